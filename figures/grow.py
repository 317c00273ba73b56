"""A model grown to a larger shape that keeps its function: a 7B model's weights to read, the stand-in's text.

walltime.py times such models: random weights of that size would have no drafter that knows what they say.
Drafters are grown likewise.  From width d to D, heads of size e to E:
 1. The residual stream holds the small vector, a constant, and zeros.  RMSNorm divides by the root of a mean
    over D instead of d: its weight is multiplied by sqrt(d / D).  The constant, sqrt(d eps), does what eps
    did, which is zero now.  Layers do not see it; the head sees one over what the last norm divided by.
 2. Entry i of a head turns by base^(-2i/e) a position, together with i + e/2.  It goes to i E/e, which turns
    as fast.  Scores are divided by sqrt(E), so queries are multiplied by sqrt(E/e).
 3. Further heads and units of the feed-forward write nothing, nor do further layers, which lie below the
    others: drafters read the same rows of the cache, and the same hidden states.
 4. A further token's logit is the mean of the others, less a multiple of the constant: it is never chosen.
"""
import re
import sys
from collections import namedtuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import transformers  # noqa: E402

import edd  # noqa: E402
import glide  # noqa: E402
from verify import UserError  # noqa: E402

Shape = namedtuple("Shape", "layers width head feed_forward vocab")     # head: the size of one
LLAMA_7B = Shape(32, 4096, 128, 11008, 32000)
LOW = 3000.0                                    # the multiple of rule 4
# Which axis of a matrix counts entries of heads; matrices that are several; that are queries, or begin so
HEADS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "qkv": 0, "o": 1, "glimpse_q": 0, "glimpse_o": 1}
PARTS, QUERIES = {"qkv": 3, "up": 2}, ("q_proj", "glimpse_q", "qkv")

def shape_of(model):
    """The shape of a Llama."""
    c = model.config
    return Shape(c.num_hidden_layers, c.hidden_size, c.head_dim, c.intermediate_size, c.vocab_size)
def places(small, big, heads=None, parts=1):
    """Where `small` entries lie among `big`, in each of so many parts; heads: None, or their sizes (e, E)."""
    found = torch.arange(small // parts)
    if heads:
        e, E = heads
        head, half, i = found // e, found % e // (e // 2), found % (e // 2)
        found = head * E + half * (E // 2) + i * (E // e)
    return torch.cat([found + part * (big // parts) for part in range(parts)])

@torch.no_grad()
def fill(big, small, heads, eps, further=0):
    """Write the weights of `small` into `big`.  heads: sizes (e, E); further: layers below the others."""
    weights, state = big.state_dict(), small.state_dict()
    d, D = [next(w for w in x.values() if w.ndim == 1).numel() for x in (state, weights)]
    for name, w in weights.items():
        module = name.split(".")[-2]
        source = re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) - further}", name)
        if source not in state:
            w *= module not in ("o_proj", "down_proj")      # a further layer writes nothing
            continue
        its = state[source].to(w, copy=True)
        if w.ndim == 1:
            # A norm; only the last one lets the constant through
            w[:d] = its * (d / D) ** 0.5
            w[d:] = (D * eps) ** -0.5 if module == "norm" else 0
            continue
        parts = PARTS.get(module, 1)
        if module in QUERIES:
            its[:len(its) // parts] *= (heads[1] / heads[0]) ** 0.5
        rows = places(its.shape[0], w.shape[0], heads if HEADS.get(module) == 0 else None, parts)
        columns = places(its.shape[1], w.shape[1], heads if HEADS.get(module) == 1 else None)
        w.zero_()
        w[rows[:, None], columns] = its
        if module.startswith("embed"):
            w[:, d:d + 1] = (d * eps) ** 0.5
        if module.endswith("head"):
            w[len(its):, :d] = its.mean(0)
            w[len(its):, d:d + 1] = -LOW

def cast(model, dtype):
    """Weights in another type.  What positions are computed from stays as precise as it was."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model

def grow(small, shape, context=0, device="cpu"):
    """A Llama of the shape with the function and dtype of `small`, and so long a context, or its own."""
    c, heads = small.config, shape.width // shape.head
    config = transformers.LlamaConfig(**c.to_dict() | {
        "num_hidden_layers": shape.layers, "hidden_size": shape.width, "head_dim": shape.head,
        "num_attention_heads": heads, "num_key_value_heads": heads, "tie_word_embeddings": False,
        "intermediate_size": shape.feed_forward, "vocab_size": shape.vocab,
        "rms_norm_eps": 0.0 if shape.width > c.hidden_size else c.rms_norm_eps,
        "max_position_embeddings": max(context, c.max_position_embeddings), "eos_token_id": None})
    with torch.device(device):
        big = cast(transformers.LlamaForCausalLM(config), small.dtype)
    fill(big, small, (c.head_dim, shape.head), c.rms_norm_eps, shape.layers - c.num_hidden_layers)
    return big.eval()

def grow_glide(small, model, length):
    """A GLIDE as wide as the grown target; length: of its tables."""
    c, wide = small.config, model.config
    config = glide.Config.for_target(model, max(c.width, wide.hidden_size), c.layers, block=c.block)
    config.eps = 0.0 if config.width > c.width else c.eps
    with torch.device(model.device):
        big = glide.Glide(config, glide.target_angles(model, length, config.layers_read)).to(model.dtype)
    fill(big, small, (c.target_head_size, wide.head_dim), c.eps)
    return big.eval()

def grow_edd(small, model):
    """An EDD of the grown target."""
    big = edd.EDD(edd.Config.for_target(model), model)
    fill(big, small, (small.layer.self_attn.head_dim, model.config.head_dim), small.norm.variance_epsilon)
    return big.eval()

@torch.inference_mode()
def check(small, big, ids):
    """Refuse a grown model, in float32, with other logits than the small one's, or a further token's text."""
    said, found = [model(torch.tensor([ids], device=model.device)).logits.cpu() for model in (small, big)]
    error = ((found[..., :said.shape[-1]] - said).abs().max() / said.std()).item()
    if not error < 1e-3 or (found.argmax(-1) >= said.shape[-1]).any():
        raise UserError(f"the grown model does not say what the stand-in says (logits are off by {error:.0e} "
                        "of their spread), so nothing is timed: switch TF32 off")

def scaled(shape, layers, width):
    """So many layers of so great a width, rounded up to whole heads; the feed-forward grows along."""
    width = -(-width // shape.head) * shape.head
    return shape._replace(layers=layers, width=width, feed_forward=shape.feed_forward * width // shape.width)
