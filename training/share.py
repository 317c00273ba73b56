"""A drafter as a folder by which generate() decodes: to keep, or to share on a hub.

    python training/share.py checkpoints/glide --tree cape --out my-glide

    model.generate(**inputs, custom_generate="my-glide", trust_remote_code=True)

The folder has the drafter's weights and, in custom_generate/, this project's code.
"""
import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

from runtime.program import program

ROOT = Path(__file__).resolve().parent.parent
TREES = {"chain": "cape.chain", "cape": "cape.cape", "pct": "pct.pct",
         "pct-cost": "priced.PctCost()"}
CODE = set("verify.py cape.py glide.py edd.py pct.py maxgram.py cascade.py runtime beyond".split())
# transformers imports what stands at the top of this file, before the folder's code can be found.
GENERATE = '''"""generate() by the drafter of this folder."""
import sys
from importlib import import_module
from pathlib import Path

from huggingface_hub import snapshot_download


def generate(model, revision=None, **arguments):
    """Decode as model.generate(**arguments); model.speculative.last.tau is the tokens per round."""
    name = sys._getframe(1).f_locals["custom_generate"]        # as the caller wrote it
    made_for = name, model.device, model.dtype
    if getattr(model, "speculative_for", None) != made_for:
        folder = name if Path(name).is_dir() else snapshot_download(name, revision=revision)
        sys.path.insert(0, str(Path(folder, "custom_generate").resolve()))
        cape, pct, priced, families, generation = map(import_module, (
            "cape", "pct", "beyond.priced", "runtime.families", "runtime.generation"))
        drafter, _ = families.load(folder, model)
        model.speculative = generation.speculative(drafter, TREE)
        model.speculative_for = made_for
    return model.generate(custom_generate=model.speculative, **arguments)
'''

@program
def main(argv):
    p = argparse.ArgumentParser(description="Make a folder of a drafter for custom_generate.")
    p.add_argument("drafter", type=Path, help="folder of a drafter that train.py saved")
    p.add_argument("--tree", choices=TREES, default="cape")
    p.add_argument("--out", type=Path, required=True, help="folder to make")
    a = p.parse_args(argv)
    a.out.mkdir(parents=True)                                  # an OSError where it exists
    for name in ("training.json", "model.safetensors"):
        shutil.copy(a.drafter / name, a.out)
    code = a.out / "custom_generate"
    shutil.copytree(ROOT, code, ignore=lambda folder, names: (
        set(names) - CODE if Path(folder) == ROOT else {"__pycache__"}))
    (code / "generate.py").write_text(GENERATE.replace("TREE", TREES[a.tree]), encoding="utf-8")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
