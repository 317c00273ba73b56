"""docs/any_project.py: it runs from anywhere, and its caches change nothing."""
import importlib.util
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT, VOCAB, plain, tiny

import cape
import pct

SCRIPT = ROOT / "docs" / "any_project.py"

@pytest.fixture(scope="module")
def any_project():
    spec = importlib.util.spec_from_file_location("any_project", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def noisy(model, noise, seed):
    """A model of the same class whose choices mostly agree with `model`'s."""
    torch.manual_seed(seed)
    other = type(model)(model.config).to(model.dtype).eval()
    weights = {name: w + noise * torch.randn_like(w) for name, w in model.state_dict().items()}
    other.load_state_dict(weights)
    return other

@pytest.mark.parametrize("name", ["llama", "llama-eager", "qwen2"])
def test_the_output_is_plain_decodings(any_project, name, monkeypatch):
    """Any two causal LMs; trees whose inner nodes are accepted, or none, or all.

    And what the caches hold at the end is what the two models would have read.
    """
    made = []

    class Seen(any_project.CachedModel):
        def __init__(self, model):
            super().__init__(model)
            made.append(self)
    monkeypatch.setattr(any_project, "CachedModel", Seen)
    target = tiny(name)
    builders = [cape.cape, cape.beam, partial(pct.pct, cost=0.05), partial(cape.chain, gamma=3)]
    for seed, noise in enumerate((0.0, 0.05, 0.3)):
        drafter = noisy(target, noise, seed)
        for build in builders:
            text = [(seed + 5 * i) % VOCAB for i in range(1 + 2 * seed)]
            found = any_project.generate(target, drafter, build, text, 12)
            assert len(found) >= len(text) + 12
            assert found == text + plain(target, text, len(found) - len(text))
            with torch.inference_mode():
                for cached in made[-2:]:
                    cached.read(found[:-1])
                    logits = cached.forward(found[-1:], [-1])[0]
                    own = cached.model(torch.tensor([found]), use_cache=False).logits[0, -1]
                    torch.testing.assert_close(logits, own, atol=1e-5, rtol=1e-5)

def test_the_drafters_cache_holds_what_it_would_read(any_project):
    """A tree in two calls after a text in two reads: each node's logits are its path's own."""
    model = tiny("llama")
    cached = any_project.CachedModel(model)
    with torch.inference_mode():
        cached.read([3, 1, 4])
        cached.forward([1, 5, 9], [-1, 0, 0])
        cached.keep([0, 2])
        cached.read([3, 1, 4, 1, 9, 2])
        logits = [*cached.forward([6, 5], [-1, 0]), *cached.forward([3, 7], [0, 1])]
        for found, path in zip(logits, ([6], [6, 5], [6, 3], [6, 5, 7])):
            ids = torch.tensor([[3, 1, 4, 1, 9, 2, *path]])
            own = model(ids, use_cache=False).logits[0, -1]
            torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-5)
    assert cached.length == 6

@pytest.mark.parametrize("builder", ["cape", "pct"])
@pytest.mark.parametrize("beside", [False, True])
def test_its_demo_runs_here_and_beside_a_copied_builder(builder, beside, tmp_path, monkeypatch):
    """It asserts that its output is plain decoding's.  sys.path is that of `python SCRIPT`."""
    script = SCRIPT
    if beside:
        for file in (SCRIPT, ROOT / f"{builder}.py"):
            shutil.copy(file, tmp_path)
        script = tmp_path / SCRIPT.name
    monkeypatch.chdir(tmp_path)
    ours = {ROOT, *(ROOT / folder for folder in ("tests", "tests/tools", "figures"))}
    outside = [entry for entry in sys.path if Path(entry).resolve() not in ours]
    monkeypatch.setattr(sys, "path", [str(script.parent), *outside])
    monkeypatch.setattr(sys, "argv", [str(script), builder])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, builder)
    runpy.run_path(str(script), run_name="__main__")
    where = tmp_path if beside else ROOT
    assert Path(sys.modules[builder].__file__).parent == where
