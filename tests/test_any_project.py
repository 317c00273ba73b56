"""docs/any_project.py: its output is plain decoding's, its caches serve, and it runs anywhere."""
import importlib.util
import shutil
from functools import partial

import pytest
import torch
from conftest import ROOT, assert_plain, tiny
from test_cascade import relative
from test_house import run_alone

import cape
import pct

SCRIPT = ROOT / "docs" / "any_project.py"

@pytest.fixture(scope="module")
def any_project():
    spec = importlib.util.spec_from_file_location("any_project", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

@pytest.mark.parametrize("name, build", [
    ("llama", cape.beam), ("llama-eager", cape.cape), ("qwen2", partial(pct.pct, cost=0.05))])
def test_the_output_is_plain_decodings(any_project, name, build, monkeypatch):
    """Any two causal LMs, trees of which inner nodes are accepted, or none, or all.

    And what the caches hold at the end is what the two models would have read.
    """
    made = []

    class Seen(any_project.CachedModel):
        def __init__(self, model):
            super().__init__(model)
            made.append(self)
    monkeypatch.setattr(any_project, "CachedModel", Seen)
    target = tiny(name)
    for noise, prompt in ((0.05, [3]), (0.1, [3, 1, 4])):
        drafter = relative(target, noise, 1)
        found = any_project.generate(target, drafter, build, prompt, 12)
        new = found[len(prompt):]
        assert found[:len(prompt)] == prompt and len(new) >= 12
        assert_plain(target, prompt, new, len(new))
        for cached in made[-2:]:
            with torch.inference_mode():
                cached.read(found[:-1])
                [logits] = cached.forward(found[-1:], [-1])
                own = cached.model(torch.tensor([found]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits, own, atol=1e-5, rtol=1e-5)

@pytest.mark.parametrize("builder, beside", [("cape", True), ("pct", False)])
def test_its_demo_runs_here_and_beside_a_copied_builder(builder, beside, tmp_path, monkeypatch):
    """It asserts that its output is plain decoding's."""
    script = SCRIPT
    if beside:
        script = shutil.copy(SCRIPT, tmp_path)
        shutil.copy(ROOT / f"{builder}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run_alone(script, builder) == 0
