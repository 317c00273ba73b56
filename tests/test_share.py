"""training/share.py: a folder alone, away from the project, decodes inside generate()."""
import sys
from unittest import mock

from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

from training import share

def test_a_shared_folder_gives_generates_tokens(tmp_path, monkeypatch):
    drafter, out = ROOT / "checkpoints" / "edd", tmp_path / "my-drafter"
    assert share.main([str(drafter), "--tree", "pct", "--out", str(out)]) == 0
    target = ROOT / "checkpoints" / "target"
    model = AutoModelForCausalLM.from_pretrained(target, dtype="float32")
    inputs = AutoTokenizer.from_pretrained(target)("One day, Mia found", return_tensors="pt")
    plain = model.generate(**inputs, max_new_tokens=20)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(ROOT)])
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    with mock.patch.dict(sys.modules):
        for name in list(sys.modules):           # nothing of the project has been imported
            if share.CODE & {name.partition(".")[0], f"{name}.py"}:
                del sys.modules[name]
        fast = model.generate(**inputs, max_new_tokens=20, custom_generate="./my-drafter",
                              trust_remote_code=True)
        assert sys.modules["verify"].__file__.startswith(str(out))
    assert fast.tolist() == plain.tolist()
    assert model.speculative.last.tau > 1.2, "the drafter is never right"
