"""Decoding on a CUDA device, where there is one: the same tokens."""
from functools import partial

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
pytestmark = [pytest.mark.cuda,
              pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

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
