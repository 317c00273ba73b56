"""Decoding on a device: nothing is mixed, the host waits once a round; on a CUDA device, where there is one, the same tokens."""
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import plain, tiny
from test_edd import random_drafter
from test_glide import random_glide

import cape
import cascade
import glide
import pct
import verify

DEPTH = 5                                          # of PCT's trees in pretended.py


@pytest.fixture(scope="module")
def pretended():
    """What pretended.py printed: {name: its line}."""
    script = Path(__file__).with_name("pretended.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-2000:]
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}


def test_the_tokens_are_the_cpus(pretended):
    """Nothing ran over two devices, and nothing in float64."""
    assert len(pretended) == 9
    for name, row in pretended.items():
        # Drawn chains are as long as on a CPU but at the length limit, where absent nodes take a draw.
        length = 24 if "drawn" not in name else 24 - 6
        assert row["tokens"][:length] == row["expected"][:length], name


@pytest.mark.parametrize("name, reads, copies", [
    ("glide x chain", 1, 1), ("glide x cape", 1, 2), ("vanilla x cape", 1, 2), ("glide x cape, sampled", 1, 2), ("glide x drawn", 1, 1),
    ("edd x pct", 1 + DEPTH, 12), ("edd x eagle2", 1 + DEPTH, 12), ("maxgram", 2, 2)])
def test_what_the_host_waits_for_in_a_round(pretended, name, reads, copies):
    row = pretended[name]
    first = 3                                      # once: the first round's tokens, CAPE's tables
    assert row["read"] <= reads * row["rounds"], row["lines"]
    assert row["copy"] <= copies * row["rounds"] + first, row["lines"]


# ---------------------------------------------------------------- a real one
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-mixed"])
def test_cuda_decodes_as_the_model_itself(name, graphs):
    model = tiny(name).to("cuda")
    prompt = [3, 1, 4, 1, 5]
    text = plain(tiny(name), prompt, 30)
    target = verify.Target(model, graphs=graphs)
    drafters = [(None, {"plain": verify.no_draft})]
    trees = {"chain": cape.chain, "cape": cape.cape, "pct": partial(pct.pct, cost=0.05, depth=5), "eagle2": partial(pct.eagle2, total=15)}
    drafters.append((glide.Drafter(random_glide(model).to("cuda")), trees))
    for kind in ("edd", "vdm", "eagle", "medusa"):
        drafters.append((random_drafter(model, kind), trees))
    drafters.append((cascade.Cascade([tiny(name, seed=1).to("cuda")], vocab=12), {"chain": cascade.proposal, **trees}))
    for drafter, builds in drafters:
        for tree, build in builds.items():
            assert verify.generate(target, drafter, build, prompt, 30).tokens == text, tree
    assert target.call.graphs == graphs and (not graphs or target.call.recorded)
