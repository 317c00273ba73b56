"""Published drafters become checkpoints of this project: GLIDE, EAGLE-1, MEDUSA-1 (docs/public.md).

    hf download yuhuili/EAGLE-Vicuna-7B-v1.3 --local-dir published
    python training/convert.py published --target lmsys/vicuna-7b-v1.3 --out my-eagle
    python bench.py --target lmsys/vicuna-7b-v1.3 --checkpoint my-eagle --drafter eagle

The idea.  The published architectures are those of glide.py, beyond/eagle.py and beyond/medusa.py,
so only the names of the weights change.  load_state_dict names what does not fit.  The RoPE of ours
is the target's, as that of the published ones is.

    layout     published names, and ours
    EAGLE-1    layers.0.* -> layer.*, fc; embed_tokens is the target's
    GLIDE      model.layers.m.* -> layers.m.*, see GLIDE below
    MEDUSA-1   h.0.linear -> w.h, h.1 -> heads.h

Pickled weights (*.bin, *.pt) are read as weights alone: no code in them runs.
"""
import argparse
import json
import re
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import torch
from transformers.modeling_utils import load_state_dict

import glide
from beyond import eagle, medusa
from runtime import families, load
from runtime.program import UserError, program
from training.models import save

# GLIDE's weights: ours, and the published ones of which ours is stacked
GLIDE = {
    "embed": ["model.embed_tokens"],
    "norm": ["model.norm"],
    "head": ["lm_head"],
    "layers.{m}.norm1": ["model.layers.{m}.input_layernorm"],
    "layers.{m}.qkv": [f"model.layers.{{m}}.self_attn.{x}_proj" for x in "qkv"],
    "layers.{m}.o": ["model.layers.{m}.self_attn.o_proj"],
    "layers.{m}.glimpse_q": ["model.layers.{m}.cross_attn.q_proj"],
    "layers.{m}.glimpse_o": ["model.layers.{m}.cross_attn.o_proj"],
    "layers.{m}.norm2": ["model.layers.{m}.post_attention_layernorm"],
    "layers.{m}.up": ["model.layers.{m}.mlp.gate_proj", "model.layers.{m}.mlp.up_proj"],
    "layers.{m}.down": ["model.layers.{m}.mlp.down_proj"],
}

# ---------------------------------------------------------------- reading
def read_weights(folder):
    """{name: tensor} of all files of weights in a folder, without prefixes."""
    pickled = [*folder.glob("*.bin"), *folder.glob("*.pt")]
    found = {}
    for file in list(folder.glob("*.safetensors")) or pickled:
        for name, weight in load_state_dict(file).items():
            name = re.sub(r"^(small_model|medusa_head)\.", "", name)
            if not name.endswith("rotary_emb.inv_freq"):
                found[name] = weight
    return found

# ---------------------------------------------------------------- layouts -> kind, Config, weights
def from_eagle(weights, settings, target):
    config = eagle.Config.for_target(target)
    renamed = {name.replace("layers.0.", "layer."): weight for name, weight in weights.items()}
    renamed.pop("embed_tokens.weight", None)
    renamed.setdefault("fc.bias", torch.zeros(config.width))           # some have none
    return "eagle", config, renamed

def from_medusa(weights, settings, target):
    renamed = {}
    for name, weight in weights.items():
        name = re.sub(r"^(\d+)\.0\.linear\.", r"w.\1.", name)
        name = re.sub(r"^(\d+)\.1\.", r"heads.\1.", name)
        renamed[name] = weight
    heads = sum(name.startswith("heads.") for name in renamed)         # config.json may be wrong
    return "medusa", medusa.Config.for_target(target, heads=heads), renamed

def from_glide(weights, settings, target):
    # Sizes are those of the weights; what they do not tell is in config.json.
    width = len(weights["model.norm.weight"])
    layers = len({name.split(".")[2] for name in weights if name.startswith("model.layers.")})
    config = glide.Config.for_target(target, width, layers, block=settings.get("block_size", 5),
                                     norm=False)
    config.feed_forward = len(weights["model.layers.0.mlp.gate_proj.weight"])
    config.heads = settings.get("num_attention_heads", 32)
    config.eps = settings.get("rms_norm_eps", 1e-6)
    renamed = {}
    for m in range(layers):
        for ours, theirs in GLIDE.items():
            ours = f"{ours}.weight".format(m=m)
            if ours not in renamed:
                parts = [weights.pop(f"{name}.weight".format(m=m)) for name in theirs]
                renamed[ours] = torch.cat(parts)
    # What is left, a bias for example, is named by load_state_dict.
    return "glide", config, {**renamed, **weights}

# {a weight that only this layout has: the function that renames its weights}
LAYOUTS = {
    "fc.weight": from_eagle,
    "model.layers.0.cross_attn.q_proj.weight": from_glide,
    "0.0.linear.weight": from_medusa,
}

# ---------------------------------------------------------------- command line
@program
def main(argv):
    p = argparse.ArgumentParser(description="Convert a published drafter.")
    p.add_argument("source", type=Path, help="folder of the drafter: GLIDE, EAGLE-1, MEDUSA-1")
    p.add_argument("--out", type=Path, required=True, help="folder to save under")
    p.add_argument("--target", required=True, help="folder or hub name of its target")
    a = p.parse_args(argv)
    if a.out.exists():
        raise UserError(f"--out {a.out} exists: name a new folder")
    weights = read_weights(a.source)
    convert = next((LAYOUTS[name] for name in LAYOUTS if name in weights), None)
    if convert is None:
        raise UserError(f"{a.source} holds no GLIDE, EAGLE-1 or MEDUSA-1: none of its weights is "
                        f"called {' or '.join(LAYOUTS)}")
    settings = json.loads((a.source / "config.json").read_text())
    settings = settings.get("small_cfg") or settings       # of a file for target and drafter
    target, tokenizer = load.load_target(a.target, "auto", "cpu")
    try:
        kind, config, renamed = convert(weights, settings, target)
        module = families.new(config, target)
        module.load_state_dict(renamed)
    except (KeyError, RuntimeError, ValueError) as why:                # what is missing or no fit
        why = " ".join(str(why).split())
        raise UserError(f"{a.source} does not fit the target {a.target}: {why}") from None
    about = {
        "kind": kind,
        "command": "python training/convert.py " + shlex.join(argv),
        "target": load.fingerprint(target, tokenizer),
        "validation": {},
    }
    save(a.out, module, tokenizer, about)
    print(f"saved {a.out}: python bench.py --target {a.target} --checkpoint {a.out} "
          f"--drafter {kind}")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
