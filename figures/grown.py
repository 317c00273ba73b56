"""The stand-in and its drafters in a large model's shape, computing the same functions.

    python figures/grown.py --shape 7b --vocab 32000 --out work/grown          # 13 GB in float16
    python bench.py --target work/grown/target --checkpoint work/grown --drafter glide edd \\
        --tree chain cape pct --dtype float16 --device cuda --graphs

Walltime of speculative decoding depends on the target's shape, which says how many bytes a forward
pass reads; acceptance depends on what the target predicts.  Where the weights of the papers' models
cannot be had, a grown target has both: the large model's cost, and the small model's text.  Its
drafters grow with it, so c = s_d / s_t is that of the large shape, too.

How each part keeps its function (d, D: hidden sizes; e, E: head sizes, small and large):

    hidden states   The small vector is the first d of D coordinates; the others are zero.  RMSNorm
                    divides by the root of a mean over D instead of d, so its weight is multiplied
                    by sqrt(d / D), and eps by d / D.
    heads           RoPE turns the small head's pair (i, i + e/2) as the large head's pair
                    (j, j + E/2) with j = i E / e, so the pair goes there.  Scores are divided by
                    sqrt(E) instead of sqrt(e), so queries are multiplied by sqrt(E / e).
    feed-forward    Hidden units beyond the small model's write nothing.
    layers          Layers that write nothing stand below the small model's.  So the top layers are
                    the same, and a drafter reads the same layer counted from the top.
    vocabulary      Tokens that the small model lacks get logits far below zero: a small constant
                    runs along the last coordinate, and only their rows of the head read it.

Weights that do not change the function are random, so that no product meets a matrix of zeros.
"""
import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import torch
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import edd
import glide
from runtime import families, load
from runtime.errors import UserError
from runtime.program import program

# Layers, hidden size, heads, feed-forward: Vicuna-7B's and 13B's, and one that a CPU can bear
SHAPES = {"7b": (32, 4096, 32, 11008), "13b": (40, 5120, 40, 13824), "80m": (24, 512, 8, 1376)}
CONSTANT = 1e-3                  # in the last coordinate: too small to change a norm

# ---------------------------------------------------------------- parts
def positions_of(heads, e, E):
    """Where the coordinates of `heads` small heads lie among those of large heads: (heads e,)."""
    pair = torch.arange(e // 2) * (E // e)
    of_one = torch.cat((pair, pair + E // 2))
    return torch.cat([head * E + of_one for head in range(heads)])

def lifted(norm, D):
    """The weight (d,) of a small norm -> that of the large one, (D,)."""
    d = len(norm)
    weight = torch.zeros(D)
    weight[:d] = norm.float() * (d / D) ** 0.5
    return weight

def put(large, small, rows=None, columns=None, scale=1.0):
    """Write a small matrix into a large one, in place; the rows that it takes are zero elsewhere.

    rows, columns: where the small one's go; None: to the first.
    """
    rows = torch.arange(small.shape[0]) if rows is None else rows
    columns = torch.arange(small.shape[1]) if columns is None else columns
    values = torch.zeros(small.shape[0], large.shape[1])
    values[:, columns] = small.float() * scale
    large[rows.to(large.device)] = values.to(large)

def put_tables(embed, norm, head, small_embed, small_norm, small_head):
    """The embedding, the last norm and the LM head; see "vocabulary" at the top."""
    vocab = len(small_embed)
    embed.zero_()
    put(embed, small_embed)
    norm.copy_(lifted(small_norm, len(norm)))
    put(head, small_head)
    if len(head) > vocab:
        embed[:, -1] = CONSTANT
        norm[-1] = 0.1 / CONSTANT
        head[vocab:] = 0
        head[vocab:, -1] = -2e4                          # float16 holds it

def put_layer(large, small, heads, e, E):
    """A decoder layer of Llama's class."""
    D = len(large.input_layernorm.weight)
    for name in ("input_layernorm", "post_attention_layernorm"):
        getattr(large, name).weight.copy_(lifted(getattr(small, name).weight, D))
    positions = positions_of(heads, e, E)
    attention, of_small = large.self_attn, small.self_attn
    for name, scale in (("q_proj", (E / e) ** 0.5), ("k_proj", 1.0), ("v_proj", 1.0)):
        weight = getattr(attention, name).weight
        weight[:heads * E] = 0
        put(weight, getattr(of_small, name).weight, positions, None, scale)
    attention.o_proj.weight.zero_()
    put(attention.o_proj.weight, of_small.o_proj.weight, None, positions)
    put(large.mlp.gate_proj.weight, small.mlp.gate_proj.weight)
    put(large.mlp.up_proj.weight, small.mlp.up_proj.weight)
    large.mlp.down_proj.weight.zero_()
    put(large.mlp.down_proj.weight, small.mlp.down_proj.weight)

# ---------------------------------------------------------------- the target
@torch.no_grad()
def grow_target(small, shape, vocab, dtype, device="cpu"):
    """A LlamaForCausalLM of `shape` that computes what `small` does, for token ids below its vocab.

    shape: (layers, hidden size, heads, feed-forward).  Raises UserError where `small` has another
    kind of layer or does not fit.
    """
    c = small.config
    layers, D, heads, feed_forward = shape
    d, small_heads = c.hidden_size, c.num_attention_heads
    e, E = d // small_heads, D // heads
    fits = layers >= c.num_hidden_layers and heads >= small_heads and E % e == 0
    if c.model_type != "llama" or c.num_key_value_heads != small_heads or not fits:
        raise UserError("the target cannot be grown: it must be a Llama without grouped queries, "
                        "no larger than the shape, with heads whose size divides the shape's")
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=D, intermediate_size=feed_forward, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads,
        rms_norm_eps=c.rms_norm_eps * d / D, rope_parameters=c.rope_parameters,
        max_position_embeddings=c.max_position_embeddings, tie_word_embeddings=False,
        bos_token_id=c.bos_token_id, eos_token_id=c.eos_token_id)
    with torch.device("meta"):
        large = LlamaForCausalLM(config)
    large = large.to(dtype).to_empty(device=device)
    large.model.rotary_emb = type(large.model.rotary_emb)(config).to(device)
    for weight in large.parameters():
        weight.normal_(0, 0.02)
    put_tables(large.model.embed_tokens.weight, large.model.norm.weight, large.lm_head.weight,
               small.model.embed_tokens.weight, small.model.norm.weight, small.lm_head.weight)
    below = layers - c.num_hidden_layers
    for layer in large.model.layers[:below]:
        layer.input_layernorm.weight.fill_(1.0)
        layer.post_attention_layernorm.weight.fill_(1.0)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for layer, of_small in zip(large.model.layers[below:], small.model.layers):
        put_layer(layer, of_small, small_heads, e, E)
    return large.eval()

# ---------------------------------------------------------------- the drafters
@torch.no_grad()
def grow_glide(small, target, below):
    """A glide.Glide, or a vanilla drafter, for the grown target.  below: the layers added there."""
    s, t = small.config, target.config
    D, heads, feed_forward = t.hidden_size, t.num_attention_heads, t.intermediate_size
    config = glide.Config(
        t.vocab_size, D, feed_forward, s.layers, heads, s.block, s.glimpse, norm=s.norm,
        loss=s.loss, eps=s.eps * s.width / D)
    e, E = s.width // s.heads, D // heads
    if s.glimpse:
        config.layers_read = tuple(layer + below for layer in s.layers_read)
        config.target_heads, config.target_head_size = heads, E
    large = families.new("glide", config, target)
    positions = positions_of(s.heads, e, E)
    for layer, of_small in zip(large.layers, small.layers):
        for name in ("norm1", "norm2"):
            getattr(layer, name).weight.copy_(lifted(getattr(of_small, name).weight, D))
        # Queries, keys and values, and gate and up, are stacked in one matrix each.
        layer.qkv.weight.zero_()
        scales = (E / e) ** 0.5, 1.0, 1.0
        parts = zip(layer.qkv.weight.chunk(3), of_small.qkv.weight.chunk(3), scales)
        for part, of_part, scale in parts:
            put(part, of_part, positions, None, scale)
        layer.o.weight.zero_()
        put(layer.o.weight, of_small.o.weight, None, positions)
        if s.glimpse:
            of_target = positions_of(s.target_heads, s.target_head_size, E)
            scale = (E / s.target_head_size) ** 0.5
            if s.norm:
                layer.glimpse_norm.weight.copy_(lifted(of_small.glimpse_norm.weight, D))
            layer.glimpse_q.weight.zero_()
            put(layer.glimpse_q.weight, of_small.glimpse_q.weight, of_target, None, scale)
            layer.glimpse_o.weight.zero_()
            put(layer.glimpse_o.weight, of_small.glimpse_o.weight, None, of_target)
        for part, of_part in zip(layer.up.weight.chunk(2), of_small.up.weight.chunk(2)):
            put(part, of_part)
        layer.down.weight.zero_()
        put(layer.down.weight, of_small.down.weight)
    put_tables(large.embed.weight, large.norm.weight, large.head.weight,
               small.embed.weight, small.norm.weight, small.head.weight)
    return large

@torch.no_grad()
def grow_edd(small, target, below):
    """An edd.EDD, or the VDM, for the grown target.  below: the layers added there."""
    s, t = small.config, target.config
    config = edd.Config(t.vocab_size, t.hidden_size, s.hidden + below, s.encoding, s.loss, s.blocks)
    large = families.new("edd", config, target)
    heads = s.width // small.layer.self_attn.head_dim
    put_layer(large.layer, small.layer, heads, small.layer.self_attn.head_dim,
              t.hidden_size // t.num_attention_heads)
    for norm in (large.norm, large.layer.input_layernorm, large.layer.post_attention_layernorm):
        norm.variance_epsilon = t.rms_norm_eps
    put_tables(large.embed.weight, large.norm.weight, large.head.weight,
               small.embed.weight, small.norm.weight, small.head.weight)
    return large

# ---------------------------------------------------------------- from a checkpoint to a folder
def grow_drafter(folder, small_target, target):
    """A trained drafter in `folder`, grown -> (draft model, its training.json)."""
    below = target.config.num_hidden_layers - small_target.config.num_hidden_layers
    drafter, about = families.load(folder, small_target)
    if type(drafter.model) not in (glide.Glide, edd.EDD):
        raise UserError(f"{folder}: drafters of the kinds glide, vanilla, edd, vdm can be grown")
    grow = grow_glide if isinstance(drafter.model, glide.Glide) else grow_edd
    return grow(drafter.model, target, below), about

def save(folder, draft_model, about, fingerprint):
    """Save a grown drafter as train.py does."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.cpu().contiguous() for name, weight in draft_model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    about = about | {"config": vars(draft_model.config), "target": fingerprint}
    (folder / "training.json").write_text(json.dumps(about, indent=1) + "\n")

@program
def main(argv):
    p = argparse.ArgumentParser(description="Grow the stand-in and its drafters into a large "
                                "model's shape.")
    p.add_argument("--shape", choices=SHAPES, default="7b", help="default: 7b")
    p.add_argument("--vocab", type=int, default=32000, help="default: 32000, Vicuna's")
    p.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    p.add_argument("--drafters", nargs="+", default=["glide", "vanilla", "edd", "vdm"])
    p.add_argument("--checkpoint", default=str(load.CHECKPOINTS), help="folder of the drafters")
    p.add_argument("--out", required=True, help="folder to write: target/ and the drafters")
    a = p.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small, tokenizer = load.load_target(load.STAND_IN, "float32", "cpu")
    if a.vocab < small.config.vocab_size:
        raise UserError(f"--vocab {a.vocab} is less than the stand-in's {small.config.vocab_size}")
    target = grow_target(small, SHAPES[a.shape], a.vocab, getattr(torch, a.dtype), device)
    out = Path(a.out)
    target.save_pretrained(out / "target")
    tokenizer.save_pretrained(out / "target")
    fingerprint = load.fingerprint(target, tokenizer)
    for name in tqdm(a.drafters, unit="drafter", disable=None):
        draft_model, about = grow_drafter(Path(a.checkpoint) / name, small, target)
        save(out / name, draft_model, about, fingerprint)
    weights = sum(p.numel() for p in target.parameters())
    print(f"saved {out}: a target of {weights / 1e9:.2f}B weights and {' '.join(a.drafters)}")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
