"""training/share.py: a folder alone, away from the project, decodes inside generate()."""
import subprocess
import sys

from conftest import ROOT
from training import share

SCRIPT = '''
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

target, here = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(target, dtype="float32")
inputs = AutoTokenizer.from_pretrained(target)("One day, Mia found", return_tensors="pt")
plain = model.generate(**inputs, max_new_tokens=20)
fast = model.generate(**inputs, max_new_tokens=20, custom_generate="./my-drafter",
                      trust_remote_code=True)
assert fast.tolist() == plain.tolist()
assert model.speculative.last.tau > 1.2, "the drafter is never right"
assert sys.modules["verify"].__file__.startswith(here)
'''

def test_a_shared_folder_gives_generates_tokens(tmp_path):
    drafter, out = ROOT / "checkpoints" / "edd", tmp_path / "my-drafter"
    assert share.main([str(drafter), "--tree", "pct", "--out", str(out)]) == 0
    arguments = [ROOT / "checkpoints" / "target", tmp_path]
    environment = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1",
                   "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], cwd=tmp_path,
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

def test_what_is_no_drafter_is_refused(tmp_path, capsys):
    assert share.main([str(ROOT / "checkpoints"), "--out", str(tmp_path / "out")]) == 2
    assert "training.json" in capsys.readouterr().err
