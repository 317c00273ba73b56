"""Decoding on a device: nothing is mixed, and the host waits at most once for each forward.

On a CUDA device, where there is one, the tokens are the same.
"""
import json
import multiprocessing
import shutil
from functools import partial

import pretended
import pytest
import torch
from conftest import plain, random_drafter, tiny

import cape
import cascade
import pct
import verify
from runtime import static as graphs
from runtime.generation import speculative
from runtime.targets import any_target

PROMPT = [3, 1, 4, 1, 5]
# The most device-to-host syncs and host-to-device copies per round, in which the tree is not built
# on the host.  Syncs: the tree as it is built and the acceptance, 2; the depths of a tree whose
# tokens are sampled, 1; a cascade's reviews.  Copies: an index, where accepted nodes move.
PER_ROUND = {"glide x chain": (2, 0), "glide x cape, sampled": (3, 1), "cascade": (3, 3)}
# Per forward, where the host waits for each layer.  A mixture also waits for the tokens that it is
# given.  Copies: a forward's tokens and mask, a round's tree and index.
PER_FORWARD = {"mixture x graft": (2, 2.5), "edd x pct, static": (1, 2.5), "edd x eagle2": (1, 2.5)}

@pytest.fixture(scope="module")
def decodings(tmp_path_factory):
    """What pretended.py prints: {name: its line}."""
    if not shutil.which("g++"):
        pytest.skip("a device guard is built by g++")
    path = tmp_path_factory.mktemp("pretended") / "lines"
    with open(path, "w") as file:
        context = multiprocessing.get_context("fork")
        child = context.Process(target=pretended.main, args=(file,))
        child.start()
        child.join()
    assert child.exitcode == 0, "on stderr: why"
    return {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}

@pytest.mark.parametrize("name", [*PER_ROUND, *PER_FORWARD])
def test_the_tokens_are_the_cpus_and_the_host_seldom_waits(decodings, name):
    """And nothing ran over two devices."""
    row = decodings[name]
    assert row["tokens"] == row["expected"] and len(row["tokens"]) == pretended.NEW
    reads, copies = PER_ROUND.get(name) or PER_FORWARD[name]
    times = row["rounds"] if name in PER_ROUND else row["forward"]
    # Once: the first token, both ways; constants (CAPE's sizes, the parents of each short chain)
    assert row["read"] <= reads * times + 1
    assert row.get("copy", 0) <= copies * times + 12

# ---------------------------------------------------------------- a real one
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-mixed"])
def test_cuda_decodes_as_the_model_itself(name, static):
    model, text = tiny(name).to("cuda"), plain(tiny(name), PROMPT, 30)
    wrap = graphs.static if static else lambda x: x
    target = wrap(any_target(model))
    stage = wrap(any_target(tiny(name, seed=1).to("cuda"), vocab=12))
    drafters = [wrap(random_drafter(model, kind)) for kind in ("glide", "edd")]
    drafters.append(cascade.Cascade([stage], vocab=12))
    assert verify.generate(target, None, verify.root_only, PROMPT, 30).tokens == text
    for drafter in drafters:
        for build in (cape.chain, cape.cape, partial(pct.pct, cost=0.05, depth=5), pct.eagle2):
            out = verify.generate(target, drafter, build, PROMPT, 30)
            assert out.tokens == text, (type(drafter), build)
        assert not static or not hasattr(drafter, "run") or drafter.run.recorded
    assert not static or target.run.graphs and target.run.recorded, "each forward was recorded"

@pytest.mark.cuda
@cuda
def test_cuda_inside_generate():
    """Ids on the host or on the device, processors that look at tokens, criteria there."""
    model, text = tiny("llama").to("cuda"), plain(tiny("llama"), PROMPT, 20)
    fast, devices = speculative(random_drafter(model, "glide"), cape.cape), set()

    def criterion(ids, scores):
        devices.add(ids.device.type)
        return torch.zeros(1, dtype=torch.bool, device=ids.device)
    for device in ("cuda", "cpu"):
        ids = torch.tensor([PROMPT], device=device)
        for how in ({}, dict(repetition_penalty=1.3), dict(suppress_tokens=[3, 5])):
            how = dict(max_new_tokens=20, stopping_criteria=[criterion], **how)
            own = model.generate(ids, **how)
            devices.clear()
            out = model.generate(ids, custom_generate=fast, **how)
            assert torch.equal(out, own) and devices == {device}
            assert len(how) > 2 or out[0, 5:].tolist() == text
