"""The stand-in and its drafters in a large model's shape, computing the same functions.

    python figures/grown.py --shape 7b --out work/7b                        # 13 GB in float16
    python bench.py --target work/7b/target --checkpoint work/7b --drafter glide edd \\
        --tree chain cape pct --dtype float16 --device cuda --graphs

Walltime depends on the target's shape, acceptance on what the target predicts.  Where the weights
of the papers' models cannot be had, a grown target has the large model's cost and the small one's
text.  Its drafters grow with it, so c = s_d / s_t is that of the large shape, too.

How each part keeps its function (d, D: hidden sizes; e, E: head sizes, small and large):

    hidden states   The small vector is the first d of D coordinates; the others are zero.  RMSNorm
                    divides by the root of a mean over D instead of d, so its weight is multiplied
                    by sqrt(d / D), and eps by d / D.
    heads           RoPE turns the small head's pair (i, i + e/2) as the large head's pair
                    (j, j + E/2) with j = i E / e, so the pair goes there.  Scores are divided by
                    sqrt(E) instead of sqrt(e), so queries are multiplied by sqrt(E / e).
    feed-forward    Hidden units beyond the small model's write nothing.
    layers          Layers that write nothing stand below the small model's: a drafter reads the
                    same layer counted from the top.
    vocabulary      Tokens that the small model lacks get logits far below zero: a small constant
                    runs along the last coordinate, and only their rows of the head read it.

Weights that do not change the function are random, so that no product meets a matrix of zeros.
"""
import argparse
import copy
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

import glide
from runtime import families, load
from runtime.program import program

# Layers, hidden size, heads, feed-forward, vocabulary: Vicuna-7B's, and what a CPU can bear
SHAPES = {"7b": (32, 4096, 32, 11008, 32000), "80m": (24, 512, 8, 1376, 8192)}
DTYPES = {"7b": torch.float16, "80m": torch.float32}
DRAFTERS = "glide", "glide-top", "vanilla", "edd", "edd-top", "vdm"
CONSTANT = 1e-3                  # in the last coordinate: too small to change a norm

# ---------------------------------------------------------------- one module
def head_positions(heads, e, E):
    """Where the coordinates of `heads` small heads lie among those of large heads: (heads e,)."""
    pair = torch.arange(e // 2) * (E // e)
    of_one = torch.cat((pair, pair + E // 2))
    return torch.cat([head * E + of_one for head in range(heads)])

def lifted(norm, D):
    """The weight (d,) of a small norm -> that of the large one, (D,)."""
    weight = torch.zeros(D)
    weight[:len(norm)] = norm.float() * (len(norm) / D) ** 0.5
    return weight

# Matrices by their names in the target and in the drafters.  Some weights are several of them.
QUERIES, KEYS_VALUES = ("q_proj", "glimpse_q"), ("k_proj", "v_proj")
OUTPUTS, DOWN = ("o_proj", "o", "glimpse_o"), ("down_proj", "down")
STACKED = {"qkv": ("q_proj", "k_proj", "v_proj"), "up": ("gate", "up")}

def put(name, large, small, e, E):
    """Write a small matrix into a large one, in place; rows that it takes are zero elsewhere."""
    rows, columns = map(torch.arange, small.shape)
    if name in QUERIES + KEYS_VALUES:
        rows = head_positions(len(small) // e, e, E)
    if name in OUTPUTS:
        columns = head_positions(small.shape[1] // e, e, E)
    if name in QUERIES + OUTPUTS + DOWN:
        large.zero_()
    scale = (E / e) ** 0.5 if name in QUERIES else 1.0
    values = torch.zeros(len(small), large.shape[1])
    values[:, columns] = small.float() * scale
    large[rows.to(large.device)] = values.to(large)

@torch.no_grad()
def grow(large, small, e, E, below=0):
    """Write all weights of a small module into the large one, as the top of this file explains.

    e, E: the size of a head, small and large.  below: the layers added there.
    """
    weights = large.state_dict()
    for path, weight in small.state_dict().items():
        parts = path.split(".")
        if below:                                    # model.layers.0.self_attn.q_proj.weight
            parts[2:3] = [str(int(part) + below) if part.isdigit() else part for part in parts[2:3]]
        of_large, name = weights[".".join(parts)], parts[-2]
        if weight.ndim == 1:
            of_large.copy_(lifted(weight, len(of_large)))
            continue
        names = STACKED.get(name, (name,))
        for one, *matrices in zip(names, of_large.chunk(len(names)), weight.chunk(len(names))):
            put(one, *matrices, e, E)

def grow_vocabulary(embed, norm, head, vocab):
    """The embedding, the last norm and the LM head beyond `vocab`; see "vocabulary" at the top."""
    embed[vocab:] = 0
    embed[:, -1] = CONSTANT
    norm[-1] = 0.1 / CONSTANT
    head[vocab:] = 0
    head[vocab:, -1] = -2e4                              # float16 holds it

# ---------------------------------------------------------------- the target and the drafters
@torch.no_grad()
def grow_target(small, shape, dtype, device="cpu"):
    """A LlamaForCausalLM of `shape` that computes what `small` does, for token ids below its vocab.

    small: a Llama without grouped queries.  shape: as in SHAPES.
    """
    c = small.config
    layers, D, heads, feed_forward, vocab = shape
    config = copy.deepcopy(c)
    config.update({
        "vocab_size": vocab, "hidden_size": D, "intermediate_size": feed_forward,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_dim": D // heads, "rms_norm_eps": c.rms_norm_eps * c.hidden_size / D,
        "tie_word_embeddings": False})
    with torch.device("meta"):
        large = LlamaForCausalLM(config)
    large = large.to(dtype).to_empty(device=device)
    large.model.rotary_emb = type(large.model.rotary_emb)(config).to(device)
    for weight in large.parameters():
        weight.normal_(0, 0.02)
    below = layers - c.num_hidden_layers
    for layer in large.model.layers[:below]:
        layer.input_layernorm.weight.fill_(1.0)
        layer.post_attention_layernorm.weight.fill_(1.0)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    grow(large, small, c.head_dim, D // heads, below)
    grow_vocabulary(large.model.embed_tokens.weight, large.model.norm.weight, large.lm_head.weight,
                    c.vocab_size)
    return large.eval()

@torch.no_grad()
def grow_drafter(folder, small_target, target):
    """A GLIDE, vanilla, EDD or VDM in `folder`, grown -> (draft model, its training.json)."""
    drafter, about = families.load(folder, small_target)
    small, t = drafter.model, target.config
    below = t.num_hidden_layers - small_target.config.num_hidden_layers
    e, E = small_target.config.head_dim, t.head_dim
    config = copy.deepcopy(small.config)
    config.vocab, config.width = t.vocab_size, t.hidden_size
    if isinstance(config, glide.Config):
        config.feed_forward, config.heads = t.intermediate_size, t.num_attention_heads
        config.eps *= small.config.width / t.hidden_size
        config.layers_read = tuple(layer + below for layer in config.layers_read)
        if config.glimpse:
            config.target_heads, config.target_head_size = t.num_attention_heads, E
    else:
        config.hidden += below
    large = families.new(config, target)
    grow(large, small, e, E)
    grow_vocabulary(large.embed.weight, large.norm.weight, large.head.weight, small.config.vocab)
    return large, about

@program
def main(argv):
    p = argparse.ArgumentParser(description="Grow the stand-in and its drafters.")
    p.add_argument("--shape", choices=SHAPES, default="7b", help="default: 7b")
    p.add_argument("--out", required=True, help="folder to write: target/ and the drafters")
    a = p.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small, tokenizer = load.load_target(load.STAND_IN, "float32", "cpu")
    target = grow_target(small, SHAPES[a.shape], DTYPES[a.shape], device)
    out = Path(a.out)
    target.save_pretrained(out / "target")
    tokenizer.save_pretrained(out / "target")
    fingerprint = load.fingerprint(target, tokenizer)
    for name in DRAFTERS:
        draft_model, about = grow_drafter(load.CHECKPOINTS / name, small, target)
        folder = out / name
        folder.mkdir(exist_ok=True)
        save_file(draft_model.state_dict(), folder / "model.safetensors", {"format": "pt"})
        about |= {"config": vars(draft_model.config), "target": fingerprint}
        (folder / "training.json").write_text(json.dumps(about, indent=1) + "\n")
    shutil.copy(load.CHECKPOINTS / "bigram.json", out)               # Max-Gram's
    print(f"saved {out}: the target and {' '.join(DRAFTERS)}")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
