"""Published drafters become checkpoints of ours: EAGLE-1, GLIDE, LongSpec, MEDUSA-1.

    python training/convert.py yuhuili/EAGLE-Vicuna-7B-v1.3 --target lmsys/vicuna-7b-v1.3 \\
        --out my-eagle
    python bench.py --target lmsys/vicuna-7b-v1.3 --checkpoint my-eagle --drafter eagle

The idea.  The published architectures are those of beyond/ and glide.py.  Weights get their names
there, what must be the target's is compared with it, and the first thing that does not fit is named
(docs/public.md).

    layout     told by the key     its keys, without .weight (a prefix of all of them is dropped)
    EAGLE-1    fc.weight           embed_tokens, fc, layers.0.(self_attn, mlp,
                                   post_attention_layernorm)
    GLIDE      ... .cross_attn.    model.(embed_tokens, norm), lm_head, model.layers.m.(self_attn,
                                   mlp, cross_attn, input_layernorm, post_attention_layernorm)
    LongSpec   cross_attn.q_proj   self_attn, cross_attn, mlp, input_layernorm,
                                   post_self_attention_layernorm, post_cross_attention_layernorm
    MEDUSA-1   0.0.linear.weight   h.0.linear, with a bias, and h.1, of each head h

Pickled weights (*.bin, *.pt) are read here and nowhere else, as weights alone: no code in them
runs.
"""
import json
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))                      # so that it runs from anywhere


import torch  # noqa: E402
from huggingface_hub import snapshot_download  # noqa: E402
from safetensors import SafetensorError  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from beyond import eagle, medusa  # noqa: E402
from runtime import text as read  # noqa: E402
from runtime import load  # noqa: E402
from runtime.drafters import Eagle, LongSpec, glide_config, longspec_config  # noqa: E402
from verify import UserError  # noqa: E402

PREFIXES = ("small_model.", "medusa_head.")
COS_SIN = "rotary_emb.inv_freq"                    # no weight: theta says it
NO_WEIGHTS = ("training_args", "optimizer", "scheduler")
GLIMPSE_THETA = 10000.0                            # of GLIDE's cross-attention, beside any target
WINDOW = 512                                       # of LongSpec's self-attention
NEVER_READ = r"cross_attn\.[kv]_proj\."            # in LongSpec's files; its keys are the target's
# What the published classes take where config.json is silent.
SILENT = {
    "num_attention_heads": 32, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
    "large_hidden_size": 4096, "large_num_attention_heads": 32, "block_size": 5,
}
# What settings of config.json are
COUNTS = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "block_size",
          "large_hidden_size", "large_num_attention_heads")
NUMBERS = ("rms_norm_eps", "rope_theta")
OBJECTS = ("rope_scaling", "rope_parameters")
FLAGS = ("bias", "attention_bias")
ITS_OWN = "take a whole checkpoint, and name its own target"

# -------------------------------------------------- reading
def folder_of(source):
    """A folder itself, or where the hub's files are once they are downloaded."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{source} is a file: give the folder that holds it")
    if folder.is_absolute() or len(folder.parts) != 2:
        raise UserError(f"{source} does not exist: give a folder, or OWNER/NAME of a drafter on "
                        "the hub")
    # One question, as the library would ask again and again
    only_local = load.on_hub(source, None, "the drafter")
    try:
        for kinds in (("*.json", "*.safetensors"), ("*.json", "*.bin", "*.pt")):
            found = snapshot_download(source, allow_patterns=kinds, local_files_only=only_local)
            if weight_files(Path(found)):
                break
    except Exception as why:
        reason = "it cannot be reached" if only_local else type(why).__name__
        raise UserError(f"{source} cannot be had from the hub ({reason}): download it elsewhere, "
                        "and give its folder") from None
    return Path(found)

def weight_files(folder):
    """Its *.safetensors, else what is pickled."""
    for kinds in (("*.safetensors",), ("*.bin", "*.pt")):
        found = [path for kind in kinds for path in folder.glob(kind) if path.is_file()]
        found = [path for path in found if not path.name.startswith(NO_WEIGHTS)]
        if found:
            return sorted(found)
    return []

def read_file(path):
    """{key: tensor} of one file; no code in it runs."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return dict(torch.load(path, weights_only=True, map_location="cpu"))
    except Exception as why:
        reason = type(why).__name__
        raise UserError(f"{path} cannot be read, or holds more than weights ({reason}): download "
                        "it again, or take a file of safetensors") from None

def read_weights(folder):
    """{key: tensor} of all its files, without prefixes."""
    files = weight_files(folder)
    if not files:
        raise UserError(f"{folder} holds no *.safetensors, *.bin or *.pt: give the folder of a "
                        "drafter")
    weights = {}
    for path in files:
        for key, weight in read_file(path).items():
            for prefix in PREFIXES:
                key = str(key).removeprefix(prefix)
            if key in weights:
                raise UserError(f"{key} is in {path} and in another file: keep one of them")
            if not torch.is_tensor(weight) or not weight.is_floating_point():
                held = getattr(weight, "dtype", type(weight).__name__)
                raise UserError(f"{key} in {path} is {held}: take floating weights")
            if not weight.isfinite().all():
                raise UserError(f"{key} in {path} is not finite: download it again")
            if not key.endswith(COS_SIN):
                weights[key] = weight
    return weights

def is_number(value):
    """A finite number above zero."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return known and math.isfinite(value) and value > 0

def check_kinds(settings):
    """Settings of config.json must be of the kind that they are named after."""
    kinds = [
        (COUNTS, lambda value: is_number(value) and isinstance(value, int), "a count"),
        (NUMBERS, is_number, "a number above 0"),
        (OBJECTS, lambda value: isinstance(value, dict), "an object"),
        (FLAGS, lambda value: isinstance(value, bool), "true or false"),
    ]
    for names, fits, kind in kinds:
        for name in names:
            if name in settings and not fits(settings[name]):
                raise UserError(f"config.json: {name} is {settings[name]!r}, and must be {kind}")

def read_settings(folder):
    """config.json, and what the published classes take where it is silent."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found = found.get("small_cfg") or found              # of a file for both models
        found = {name: value for name, value in found.items() if value is not None}
    except (ValueError, AttributeError, RecursionError) as why:
        reason = type(why).__name__
        raise UserError(f"{path} is no JSON object ({reason}): download it again") from None
    check_kinds(found)
    for name in OBJECTS:
        check_kinds(found.get(name, {}))
    return SILENT | found

# -------------------------------------------------- comparing
def check_keys(weights, parts, layout):
    """weights must have the keys of `parts`, and no other.  parts: {our name: {key: shape}}."""
    shapes = {}
    for part in parts.values():
        shapes |= part
    for key in weights:
        if key not in shapes:
            raise UserError(f"{layout} for this target has no key {key}: {ITS_OWN}")
    for key, shape in shapes.items():
        if key not in weights:
            raise UserError(f"{layout} for this target has a key {key}, which is missing: "
                            f"{ITS_OWN}")
        found, wanted = tuple(weights[key].shape), tuple(shape)
        if found != wanted:
            raise UserError(f"{key} has shape {found}, and for this target it must be {wanted}: "
                            f"{ITS_OWN}")

def joined(weights, parts):
    """{our name: tensor}: what lies in one matrix here may be several there."""
    return {name: torch.cat([weights[key] for key in part]) for name, part in parts.items()}

def check_settings(theirs, ours):
    """Settings {name: value} of config.json, and what they must be."""
    for name, value in ours.items():
        if theirs[name] != value:
            raise UserError(f"config.json: {name} is {theirs[name]}, and must be {value} here: "
                            f"{ITS_OWN}")

def rope_of(settings):
    """theta, and what else a config has of its RoPE, by old names and by new ones."""
    rope = (settings.get("rope_scaling") or {}) | (settings.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", None) or settings.get("rope_theta") or 10000.0
    kind = rope.pop("type", "default")
    return theta, {"rope_type": kind} | rope

def of_a_layer(settings):
    """The settings that make a decoder layer compute what it does."""
    theta, scaling = rope_of(settings)
    heads = settings.get("num_attention_heads") or 1
    return {
        "rope_theta": theta, "rope_scaling": scaling,
        "rms_norm_eps": settings.get("rms_norm_eps"), "hidden_act": settings.get("hidden_act"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.get("num_key_value_heads") or heads,
        "head_dim": settings.get("head_dim") or settings.get("hidden_size", 0) // heads,
    }

def check_embedding(table, target):
    """An EAGLE brings the target's embedding (V, D): the same, up to rounding to half precision."""
    c = target.config.get_text_config()
    if table is None or table.shape[1:] != (c.hidden_size,):
        raise UserError(f"embed_tokens.weight is missing, or not of width {c.hidden_size}: "
                        f"{ITS_OWN}")
    shared = min(len(table), c.vocab_size)                   # either may be padded
    with torch.no_grad():
        own = target.get_input_embeddings()(torch.arange(shared, device=target.device))
    close = torch.isclose(table[:shared].float(), own.cpu().float(), rtol=1 / 128, atol=1e-6)
    other = shared - close.all(1).sum().item()
    if other:
        raise UserError(f"{other} of {shared} rows of embed_tokens.weight are another target's: "
                        f"{ITS_OWN}")

# -------------------------------------------------- the layouts: -> kind, config, our weights
def from_eagle(weights, settings, target):
    """EAGLE-1.  The layer is of the target's class, so its settings must be the target's."""
    c = target.config.get_text_config()
    config = eagle.Config.for_target(target, bias=settings.get("bias", True))
    check_embedding(weights.pop("embed_tokens.weight", None), target)
    parts = {}
    for name, weight in Eagle(config, target).state_dict().items():
        parts[name] = {re.sub(r"^layer\.", "layers.0.", name): weight.shape}
    check_keys(weights, parts, "EAGLE-1")
    check_settings(of_a_layer({"hidden_size": c.hidden_size} | settings), of_a_layer(c.to_dict()))
    return "eagle", config, joined(weights, parts)

def size_of(weights, key, axis):
    """How long an axis of a matrix is; any size where there is none, as check_keys will say so."""
    weight = weights.get(key)
    return 64 if weight is None or weight.ndim != 2 else weight.shape[axis]

def sizes_of_glide(weights, settings, target):
    """The sizes of a GLIDE: the weights say what they can."""
    layers = set(re.findall(r"\bmodel\.layers\.(\d+)\.", " ".join(weights)))
    width = size_of(weights, "model.embed_tokens.weight", 1)
    config = glide_config(target, width, len(layers) or 1, block=settings["block_size"])
    config.vocab = size_of(weights, "model.embed_tokens.weight", 0)
    config.feed_forward = size_of(weights, "model.layers.0.mlp.gate_proj.weight", 0)
    config.heads, config.eps = settings["num_attention_heads"], settings["rms_norm_eps"]
    config.theta, scaling = rope_of(settings)
    config.glimpse_theta = GLIMPSE_THETA
    check_settings(settings | {"rope_scaling": scaling}, {
        "large_num_attention_heads": config.target_heads,
        "large_hidden_size": config.target_heads * config.target_head_size,
        "rope_scaling": {"rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
    })
    return config

def layer_parts(config, key_heads):
    """{our name: {key: shape}} of a layer of GLIDE, less the .weight of all."""
    D, F = config.width, config.feed_forward
    kv = key_heads * (D // config.heads), D
    target_width = config.target_heads * config.target_head_size
    return {
        "norm1": {"input_layernorm": (D,)},
        "qkv": {"self_attn.q_proj": (D, D), "self_attn.k_proj": kv, "self_attn.v_proj": kv},
        "o": {"self_attn.o_proj": (D, D)},
        "glimpse_q": {"cross_attn.q_proj": (target_width, D)},
        "glimpse_o": {"cross_attn.o_proj": (D, config.target_heads * config.target_value_size)},
        "norm2": {"post_attention_layernorm": (D,)},
        "up": {"mlp.gate_proj": (F, D), "mlp.up_proj": (F, D)},
        "down": {"mlp.down_proj": (D, F)},
    }

def repeat_keys(weights, config, key_heads):
    """Where query heads share a key, its projection is repeated, which computes the same."""
    size = config.width // config.heads
    for key in weights:
        if ".k_proj." in key or ".v_proj." in key:
            heads = weights[key].unflatten(0, (key_heads, size))       # (H, size, D); a bias: no D
            repeated = heads.repeat_interleave(config.heads // key_heads, 0)
            weights[key] = repeated.flatten(0, 1)

def key_heads_of(config, settings):
    """How many heads its own keys have; query heads must share them evenly."""
    key_heads = settings.get("num_key_value_heads") or config.heads
    size = config.width // config.heads
    if size * config.heads != config.width or size % 2 or config.heads % key_heads:
        raise UserError(f"config.json: {config.heads} heads and {key_heads} of keys do not part a "
                        f"width of {config.width}: download it again")
    return key_heads

def from_glide(weights, settings, target):
    """GLIDE, with an embedding and a head of its own."""
    config = sizes_of_glide(weights, settings, target)
    key_heads = key_heads_of(config, settings)
    table = config.vocab, config.width
    parts = {
        "embed.weight": {"model.embed_tokens.weight": table},
        "head.weight": {"lm_head.weight": table},
        "norm.weight": {"model.norm.weight": (config.width,)},
    }
    for m in range(config.layers):
        for name, part in layer_parts(config, key_heads).items():
            keys = {f"model.layers.{m}.{key}.weight": shape for key, shape in part.items()}
            parts[f"layers.{m}.{name}.weight"] = keys
    check_keys(weights, parts, "GLIDE")
    repeat_keys(weights, config, key_heads)
    return "glide", config, joined(weights, parts)

def from_longspec(weights, settings, target):
    """LongSpec: one layer, which reads the target's last, without an embedding and a head."""
    c = target.config.get_text_config()
    config = longspec_config(target, window=WINDOW, projected=False, eps=settings["rms_norm_eps"])
    check_settings({"hidden_size": c.hidden_size} | settings, {
        "hidden_size": c.hidden_size,
        "num_attention_heads": c.num_attention_heads,
        "hidden_act": "silu",
    })
    key_heads = key_heads_of(config, settings)
    for key in list(weights):
        if re.match(NEVER_READ, key):
            del weights[key]
    config.feed_forward = size_of(weights, "mlp.gate_proj.weight", 0)
    layer = layer_parts(config, key_heads)
    layer["glimpse_norm"] = {"post_self_attention_layernorm": (config.width,)}
    layer["norm2"] = {"post_cross_attention_layernorm": (config.width,)}
    parts = {}
    for name, part in layer.items():
        matrices = {f"{key}.weight": shape for key, shape in part.items()}
        parts[f"layers.0.{name}.weight"] = matrices
    for name in ("qkv", "glimpse_q"):
        biases = {f"{key}.bias": shape[:1] for key, shape in layer[name].items()}
        parts[f"layers.0.{name}.bias"] = biases
    check_keys(weights, parts, "LongSpec")
    repeat_keys(weights, config, key_heads)
    # ValueError where the target's RoPE, embedding or head are not used as Llama's
    LongSpec.beside(target, config, 1)
    return "longspec", config, joined(weights, parts)

def from_medusa(weights, settings, target):
    """MEDUSA-1.  The published config.json says a wrong number of heads: the keys are counted."""
    for key in weights:
        if re.match(r"\d+\.[1-9]\d*\.linear\.", key):
            raise UserError(f"{key}: medusa_num_layers is above 1: take one whose heads have one "
                            "layer")
    heads = {key.split(".")[0] for key in weights if re.match(r"\d+\.0\.linear\.", key)}
    config = medusa.Config.for_target(target, heads=len(heads))
    V, D = config.vocab, config.width
    parts = {}
    for h in range(config.heads):
        parts[f"w.{h}.weight"] = {f"{h}.0.linear.weight": (D, D)}
        parts[f"w.{h}.bias"] = {f"{h}.0.linear.bias": (D,)}
        parts[f"heads.{h}.weight"] = {f"{h}.1.weight": (V, D)}
    check_keys(weights, parts, "MEDUSA-1")
    return "medusa", config, joined(weights, parts)

def layout_of(weights, source):
    """What converts these weights, told by their keys."""
    if "fc.weight" in weights:
        return from_eagle
    if any(".cross_attn." in key for key in weights):
        return from_glide
    if "cross_attn.q_proj.weight" in weights:
        return from_longspec
    if any(re.match(r"\d+\.\d+\.linear\.", key) for key in weights):
        return from_medusa
    raise UserError(f"{source} is in no known layout (it has a key {next(iter(weights), None)}): "
                    "EAGLE-1 has fc.weight, GLIDE and LongSpec keys with cross_attn, MEDUSA-1 "
                    "0.0.linear.weight")

# -------------------------------------------------- command line
def parser():
    p = read.Parser(description="Convert a published drafter.")
    p.add_argument("source", help="folder or hub name of the drafter: EAGLE-1, GLIDE, LongSpec, "
                                  "MEDUSA-1")
    p.add_argument("--out", required=True, help="folder to save under")
    p.add_argument("--target", default=str(load.STAND_IN),
                   help="folder or hub name of its target (default: the stand-in)")
    p.add_argument("--target-dtype", choices=("float32", "bfloat16", "float16", "auto"),
                   default="auto", help="how the target is loaded (default: as it is stored)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", default=device, help=f"cpu or cuda (default: {device})")
    p.add_argument("--revision", help="of the target on the hub: a branch, a tag, a commit")
    p.add_argument("--trust-remote-code", action="store_true",
                   help="run the target's own code, too")
    return p

def run(argv):
    a = parser().parse_args(argv)
    load.check_device(a.device)
    out = Path(a.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} is not empty: name a new folder")
    folder = folder_of(a.source)
    settings = read_settings(folder)
    weights = read_weights(folder)
    convert = layout_of(weights, a.source)
    target, tokenizer = load.load_target(a.target, a.target_dtype, a.device, revision=a.revision,
                                         trust=a.trust_remote_code)
    try:
        kind, config, state = convert(weights, settings, target)
    except ValueError as why:
        raise UserError(f"{a.source}: {why}") from None
    about = {"config": vars(config), "kind": kind, "source": a.source, "validation": {}}
    about["command"] = " ".join(["python training/convert.py", *argv])
    about["date"] = time.strftime("%Y-%m-%d")
    about["target"] = load.fingerprint(target, tokenizer)
    save(out, state, about)
    print(f"saved {out}: python bench.py --target {a.target} --checkpoint {out} --drafter {kind}")

def save(out, state, about):
    """A checkpoint as train.py writes it, in the type that the weights have: all of it, or none."""
    text = json.dumps(about, indent=1) + "\n"
    part = out.with_name(f"{out.name}.part{os.getpid()}")
    try:
        part.mkdir(parents=True)
        save_file(state, part / "model.safetensors", {"format": "pt"})
        (part / "training.json").write_text(text)
        os.replace(part, out)
    except (OSError, SafetensorError) as why:
        raise UserError(f"--out {out} cannot be written ({why})") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)

def main(argv):
    """Exit status: 0; 2 after one sentence, about a mistake."""
    try:
        run(argv)
    except (UserError, read.UserError, OSError) as why:
        print(f"convert.py: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("convert.py: interrupted", file=sys.stderr)
        return 2
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
