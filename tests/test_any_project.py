"""docs/any_project.py: its output is plain decoding's, its caches serve, and it runs anywhere."""
import importlib.util
import shutil
from functools import partial

import pytest
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
def test_the_output_is_plain_decodings(any_project, name, build):
    """Any two causal LMs, trees of which inner nodes are accepted, or none, or all."""
    target = tiny(name)
    for noise, prompt in ((0.05, [3]), (0.3, [3, 1, 4])):
        drafter = relative(target, noise, 1)
        found = any_project.generate(target, drafter, build, prompt, 12)
        new = found[len(prompt):]
        assert found[:len(prompt)] == prompt and len(new) >= 12
        assert_plain(target, prompt, new, len(new))

@pytest.mark.parametrize("build", [partial(cape.chain, gamma=3), partial(cape.cape, gamma=3)])
def test_a_drafter_that_is_the_target_is_right_in_every_round(any_project, build):
    """Else its cache would hold something other than the text."""
    target, rounds = tiny("llama"), []

    def counted(expand, root):
        rounds.append(root.item())
        return build(expand, root)
    found = any_project.generate(target, tiny("llama"), counted, [3, 1, 4], 12)
    assert len(found) == 3 + 12 and len(rounds) == 12 / (3 + 1)

@pytest.mark.parametrize("builder, beside", [("cape", True), ("pct", False)])
def test_its_demo_runs_here_and_beside_a_copied_builder(builder, beside, tmp_path, monkeypatch):
    """It asserts that its output is plain decoding's."""
    script = SCRIPT
    if beside:
        script = shutil.copy(SCRIPT, tmp_path)
        shutil.copy(ROOT / f"{builder}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run_alone(script, builder) == 0
