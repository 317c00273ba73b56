"""The stand-in, grown to the shape of a large model: its text and its drafters' acceptance, at a large model's cost.

    python figures/walltime.py grow --shape 7b --dtype float16 --out work/7b

Walltime depends on the target's real shape, acceptance on its text: no drafter predicts the text of random
weights of that size.  A grown model has both, the large one's bytes and the stand-in's text.  From width d to
D, heads of size e to E:
 1. The residual stream holds the small vector, a constant, and zeros.  RMSNorm divides by the root of a mean
    over D instead of d: its weight is multiplied by sqrt(d / D).  The constant, sqrt(d eps), does what eps
    did, which is zero now.  Layers do not see it; the head sees one over what the last norm divided by.
 2. RoPE rotates entry i of a head by base^(-2i/e) a position, together with i + e/2.  It goes to i E/e, which
    is rotated as fast.  Scores are divided by sqrt(E), so queries are multiplied by sqrt(E/e).
 3. Further heads and units of the feed-forward write nothing, nor do further layers, which lie below the
    others: drafters read the same KV entries and the same hidden states.
 4. A further token's logit is the mean of the others, less a multiple of the constant: it is never chosen.
"""
import copy
import re
import shutil
import sys
from collections import namedtuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import transformers  # noqa: E402

import bench  # noqa: E402
import edd  # noqa: E402
import glide  # noqa: E402
from data import read  # noqa: E402
from runtime import load  # noqa: E402
from training import drafters  # noqa: E402
from verify import UserError  # noqa: E402

Shape = namedtuple("Shape", "layers width head feed_forward vocab")     # head: the size of one
LLAMA_7B = Shape(32, 4096, 128, 11008, 32000)
STAGES = "base", "small"                        # of cascades: they keep their layers
LOW = 3000.0                                    # the multiple of rule 4
# Matrices whose rows count entries of heads; whose columns do; that stand side by side in one
HEAD_ROWS = "q_proj", "k_proj", "v_proj", "qkv", "glimpse_q"
HEAD_COLUMNS = "o_proj", "o", "glimpse_o"
PARTS = {"qkv": 3, "up": 2}
QUERIES = "q_proj", "glimpse_q", "qkv"          # of qkv the first part

# ---------------------------------------------------------------- growth
def shape_of(model):
    """The shape of a Llama."""
    c = model.config
    return Shape(c.num_hidden_layers, c.hidden_size, c.head_dim, c.intermediate_size, c.vocab_size)

def scaled(shape, layers, width):
    """So many layers of such a width, rounded up to whole heads; the feed-forward grows along."""
    width = -(-width // shape.head) * shape.head
    feed_forward = shape.feed_forward * width // shape.width
    return shape._replace(layers=layers, width=width, feed_forward=feed_forward)

def places(small, big, heads=None, parts=1):
    """Where `small` entries lie among `big`, in each of so many parts; heads: None, or their sizes (e, E)."""
    found = torch.arange(small // parts)
    if heads:
        e, E = heads
        # Entry i of a head's first half goes to i E/e, that of its second half likewise.
        head = found // e
        half = found % e // (e // 2)
        i = found % (e // 2)
        found = head * E + half * (E // 2) + i * (E // e)
    return torch.cat([found + part * (big // parts) for part in range(parts)])

def fill_matrix(w, its, module, heads):
    """Write the matrix `its` into the larger w."""
    parts = PARTS.get(module, 1)
    if module in QUERIES:
        queries = its[:len(its) // parts]
        queries *= (heads[1] / heads[0]) ** 0.5
    rows = places(its.shape[0], w.shape[0], heads if module in HEAD_ROWS else None, parts)
    columns = places(its.shape[1], w.shape[1], heads if module in HEAD_COLUMNS else None)
    w.zero_()
    w[rows[:, None], columns] = its

def width_of(weights):
    """How wide the residual stream is: as a norm's weights."""
    return next(len(w) for w in weights.values() if w.ndim == 1)

@torch.no_grad()
def fill(big, small, heads, eps, further=0):
    """Write the weights of `small` into `big`.  heads: sizes (e, E); further: layers below the others."""
    weights, state = big.state_dict(), small.state_dict()
    d, D = width_of(state), width_of(weights)

    def below(found):
        return f"layers.{int(found[1]) - further}"

    for name, w in weights.items():
        module = name.split(".")[-2]
        source = re.sub(r"layers\.(\d+)", below, name)
        if source not in state:
            # A further layer writes nothing.
            w *= module not in ("o_proj", "down_proj")
            continue
        its = state[source].to(w, copy=True)
        if w.ndim == 1:
            # A norm; only the last one lets the constant through.
            w[:d] = its * (d / D) ** 0.5
            w[d:] = (D * eps) ** -0.5 if module == "norm" else 0
            continue
        fill_matrix(w, its, module, heads)
        if module.startswith("embed"):
            w[:, d:d + 1] = (d * eps) ** 0.5
        if module.endswith("head"):
            w[len(its):, :d] = its.mean(0)
            w[len(its):, d:d + 1] = -LOW

def grow(small, shape, context=0, device="cpu"):
    """A Llama of the shape with the function and dtype of `small`, and so long a context, or its own."""
    c, heads = small.config, shape.width // shape.head
    config = copy.deepcopy(c)
    config.num_hidden_layers = shape.layers
    config.hidden_size = shape.width
    config.head_dim = shape.head
    config.num_attention_heads = config.num_key_value_heads = heads
    config.intermediate_size = shape.feed_forward
    config.vocab_size = shape.vocab
    config.tie_word_embeddings = False
    config.rms_norm_eps = 0.0 if shape.width > c.hidden_size else c.rms_norm_eps
    config.max_position_embeddings = max(context, c.max_position_embeddings)
    with torch.device(device):
        big = transformers.LlamaForCausalLM(config).to(small.dtype)
    fill(big, small, (c.head_dim, shape.head), c.rms_norm_eps, shape.layers - c.num_hidden_layers)
    big.generation_config = small.generation_config
    return big.eval()

def grow_glide(small, model, further):
    """A GLIDE as wide as the grown target, or a vanilla drafter.  further: layers of the target."""
    c, D = small.config, model.config.hidden_size
    layer = c.layers_read[-1] + further if c.glimpse else None
    width = max(c.width, D)
    config = glide.Config.for_target(model, width, c.layers, c.glimpse, c.block, layer)
    config.norm, config.loss = c.norm, c.loss
    config.eps = 0.0 if config.width > c.width else c.eps
    big = glide.Glide.for_target(model, config, model.config.max_position_embeddings)
    fill(big, small, (c.width // c.heads, width // config.heads), c.eps)
    return big.eval()

def grow_edd(small, model, further):
    """An EDD of the grown target, or a VDM."""
    c = small.config
    config = copy.deepcopy(c)
    config.vocab = model.config.vocab_size
    config.width = model.config.hidden_size
    config.hidden += further
    big = edd.EDD(config, model)
    heads = small.layer.self_attn.head_dim, model.config.head_dim
    fill(big, small, heads, small.norm.variance_epsilon)
    return big.eval()

@torch.inference_mode()
def check(small, big, ids):
    """Refuse a grown model, in float32, with other logits than the small one's, or a further token's text."""
    said, found = (model(torch.tensor([ids], device=model.device)).logits.cpu() for model in (small, big))
    vocab = said.shape[-1]
    error = (found[..., :vocab] - said).abs().max() / said.std()
    if not error < 1e-3 or found.argmax(-1).max() >= vocab:
        raise UserError("the grown model does not say what the stand-in says (logits are off by "
                        f"{error.item():.0e} of their spread): switch TF32 off")

# ---------------------------------------------------------------- a folder of grown models
def shape_for(name, own):
    """The target's shape: Llama-2-7B's, or the least that tries all of growth.  own: the stand-in's shape."""
    if name == "7b":
        return LLAMA_7B
    # Further tokens need room beside the vector of GLIDE, which is twice as wide as the stand-in.
    return scaled(own, own.layers + 1, 3 * own.width)._replace(vocab=own.vocab + 128)

def grow_model(a, name, own, shape):
    """Grow a shipped model into a.out -> (small, grown, tokenizer).  own: the stand-in's shape."""
    small, tokenizer = load.load_target(str(load.CHECKPOINTS / name), "float32", "cpu")
    if name in STAGES:
        its = shape_of(small)
        shape = scaled(shape, its.layers, shape.width * its.width // own.width)
    big = grow(small, shape, a.context, a.device)
    prompt = next(iter(read.read_rows(bench.PROMPTS)))
    check(small, big, tokenizer(read.question_text(prompt))["input_ids"])
    big.to(getattr(torch, a.dtype)).save_pretrained(a.out / name)
    tokenizer.save_pretrained(a.out / name)
    print(f"{a.out / name}: {shape}", flush=True)
    return small, big, tokenizer

def grow_all(a):
    """The stand-in, its stages and drafters, grown into the folder a.out."""
    model, _ = load.load_target(str(load.STAND_IN), "float32", "cpu")
    own = shape_of(model)
    shape = shape_for(a.shape, own)
    a.out.mkdir(parents=True)
    shutil.copy(load.CHECKPOINTS / "bigram.json", a.out)
    torch.manual_seed(0)
    for name in STAGES:
        grow_model(a, name, own, shape)
    small, big, tokenizer = grow_model(a, "target", own, shape)
    for kind, growing in ((glide, grow_glide), (edd, grow_edd)):
        name = kind.__name__
        drafter, about = kind.load(load.CHECKPOINTS / name, small)
        about["target"] = load.fingerprint(big, tokenizer)
        grown = growing(drafter.model, big, shape.layers - own.layers)
        del about["config"]
        (a.out / name).mkdir()
        drafters.save(a.out / name, grown, tokenizer, about)
