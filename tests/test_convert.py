"""Published drafters: what is converted predicts what its published forward predicts.

The published forwards are written out here from the published names of the weights.
"""
import json
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import tiny
from helpers import TEXT, refused, save, tokenizer_of
from safetensors.torch import save_file
from torch import nn

import verify
from runtime import families, load
from training import convert

VOCAB, WIDTH, LAST, KEY_WIDTH = 40, 32, 3, 16          # of the target, which has heads of 8
NEAR = dict(atol=5e-5, rtol=1e-5)                      # RoPE tables of a model are float32

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a target with grouped queries and biases."""
    model = tiny("qwen2", vocab_size=VOCAB, max_position_embeddings=64)
    for p in model.parameters():
        if p.ndim == 1:
            nn.init.uniform_(p, 0.5, 1.5)                       # norms and biases that matter
    return save(tmp_path_factory.mktemp("target"), model, tokenizer_of(TEXT))

# ---------------------------------------------------------------- the published layouts
def drawn(shapes):
    """{name: float32 tensor}: matrices about zero, norms about one."""
    torch.manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        x = 0.2 * torch.randn(shape)
        weights[name] = 1 + x if "norm" in name else x
    return weights

def attention(prefix, width, kv_width, bias=False):
    sizes = {"q": (width, width), "k": (kv_width, width), "v": (kv_width, width),
             "o": (width, width)}
    shapes = {f"{prefix}.{name}_proj.weight": size for name, size in sizes.items()}
    if bias:
        shapes |= {f"{prefix}.{name}_proj.bias": sizes[name][:1] for name in "qkv"}
    return shapes

def mlp(prefix, width, inner):
    sizes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    return {f"{prefix}.{name}_proj.weight": size for name, size in sizes.items()}

def eagle_files(bias):
    """-> weights, config.json of an EAGLE-1.  bias: of fc; not all have it."""
    shapes = {"fc.weight": (WIDTH, 2 * WIDTH), "embed_tokens.weight": (VOCAB, WIDTH)}
    shapes |= {"layers.0.post_attention_layernorm.weight": (WIDTH,)}
    shapes |= {"fc.bias": (WIDTH,)} if bias else {}
    shapes |= attention("layers.0.self_attn", WIDTH, KEY_WIDTH, bias=True)
    shapes |= mlp("layers.0.mlp", WIDTH, 48)
    return drawn(shapes), {"rms_norm_eps": 1e-6}

def glide_files():
    """-> weights, config.json of a GLIDE of two layers, as of a file for target and drafter."""
    width = 24
    shapes = {"model.embed_tokens.weight": (VOCAB, width), "model.norm.weight": (width,),
              "lm_head.weight": (VOCAB, width)}
    for m in range(2):
        layer = f"model.layers.{m}"
        shapes |= attention(f"{layer}.self_attn", width, width)
        shapes |= mlp(f"{layer}.mlp", width, 20)
        shapes[f"{layer}.cross_attn.q_proj.weight"] = (WIDTH, width)
        shapes[f"{layer}.cross_attn.o_proj.weight"] = (width, WIDTH)
        for norm in ("input", "post_attention"):
            shapes[f"{layer}.{norm}_layernorm.weight"] = (width,)
    weights = {f"small_model.{name}": weight for name, weight in drawn(shapes).items()}
    return weights, {"small_cfg": {"num_attention_heads": 3, "rms_norm_eps": 1e-3}}

def medusa_files(heads=11):
    """-> weights, config.json of a MEDUSA-1, which says two heads, as the published files do."""
    shapes = {}
    for h in range(heads):
        shapes[f"medusa_head.{h}.0.linear.weight"] = (WIDTH, WIDTH)
        shapes[f"medusa_head.{h}.0.linear.bias"] = (WIDTH,)
        shapes[f"medusa_head.{h}.1.weight"] = (VOCAB, WIDTH)
    return drawn(shapes), {"medusa_num_heads": 2}

def convert_to(out, weights, config, target, pickled=False):
    """Write the files as the hub has them, and convert them -> arguments of the command"""
    source = out.with_name("in")
    source.mkdir()
    if pickled:                                    # in two files, with what is no weight
        names = list(weights)
        first = {name: weights.pop(name) for name in names[:5]}
        first["x.rotary_emb.inv_freq"] = torch.ones(4)
        torch.save(first, source / "a.pt")
        torch.save(weights, source / "pytorch_model.bin")
    else:
        save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config))
    return [str(source), "--target", str(target), "--out", str(out)]

# ---------------------------------------------------------------- the published forwards
def rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight

def rotated(x, theta=10000.0):
    """RoPE of x (heads, T, d).

    Entries i and i + d/2 are a complex number, which is turned by position theta^(-2i / d).
    """
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:])
    frequency = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[1]).double()[:, None] * frequency
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)

def attend(q, k, v, seen):
    """q (h, T, d), k and v (H, t, d), seen (T, t) -> (T, h d); zero where nothing is seen."""
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(0, 1).flatten(1)

def self_attention(w, prefix, x, heads, key_heads):
    parts = []
    for name, n in (("q", heads), ("k", key_heads), ("v", key_heads)):
        weight, bias = w[f"{prefix}.{name}_proj.weight"], w.get(f"{prefix}.{name}_proj.bias")
        parts.append(F.linear(x, weight, bias).unflatten(-1, (n, -1)).transpose(0, 1))
    q, k = map(rotated, parts[:2])
    causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    return attend(q, k, parts[2], causal) @ w[f"{prefix}.o_proj.weight"].T

def feed_forward(w, prefix, x):
    gate, up, down = (w[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

def eagle_features(w, tokens, features):
    """Features (T, D) after tokens t_1 ..., from the features before them."""
    x = torch.cat((w["embed_tokens.weight"][tokens], features), -1)
    x = F.linear(x, w["fc.weight"], w.get("fc.bias"))
    x = x + self_attention(w, "layers.0.self_attn", x, 4, 2)
    return x + feed_forward(w, "layers.0.mlp", rms(x, w["layers.0.post_attention_layernorm.weight"],
                                                   1e-6))

def eagle_logits(w, model, kv, last_hidden, ids, t):
    """After ids[t] and all that follow, step by step, on its own features."""
    # The embedding is the target's: the file's is another here.
    w = w | {"embed_tokens.weight": model.get_input_embeddings().weight}
    features = last_hidden[:t]
    for i in range(t, len(ids)):
        new = eagle_features(w, ids[1:i + 1], features)[-1:]
        features = torch.cat((features, new))
    return features[t:] @ model.get_output_embeddings().weight.T

def glide_logits(w, model, kv, last_hidden, ids, t):
    """Of ids, whose first t are committed: these see the target's keys of blocks of five before."""
    w = {name.removeprefix("small_model."): weight for name, weight in w.items()}
    limits = torch.tensor([j // 5 * 5 if j < t else t for j in range(len(ids))])
    x, eps = w["model.embed_tokens.weight"][ids], 1e-3
    for m in range(2):
        p = f"model.layers.{m}."
        k, v = (entries[0] for entries in kv[LAST - 2 + m])
        normed = rms(x, w[f"{p}input_layernorm.weight"], eps)
        x = x + self_attention(w, f"{p}self_attn", normed, 3, 3)
        q = (x @ w[f"{p}cross_attn.q_proj.weight"].T).unflatten(-1, (4, -1)).transpose(0, 1)
        seen = torch.arange(k.shape[1]) < limits[:, None]
        glimpse = attend(rotated(q), k, v, seen)
        x = x + glimpse @ w[f"{p}cross_attn.o_proj.weight"].T
        normed = rms(x, w[f"{p}post_attention_layernorm.weight"], eps)
        x = x + feed_forward(w, f"{p}mlp", normed)
    return rms(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T

def medusa_logits(w, model, kv, last_hidden, ids, t):
    """By the head of a node's depth, on the last committed feature."""
    f, h = last_hidden[t - 1], len(ids) - t - 1
    linear, head = f"medusa_head.{h}.0.linear", f"medusa_head.{h}.1"
    z = f + F.silu(F.linear(f, w[f"{linear}.weight"], w[f"{linear}.bias"]))
    return (z @ w[f"{head}.weight"].T)[None]

# ---------------------------------------------------------------- equal to the published forwards
@pytest.mark.parametrize("kind, files, forward", [
    ("eagle", eagle_files(bias=True), eagle_logits),
    ("eagle", eagle_files(bias=False), eagle_logits),
    ("glide", glide_files(), glide_logits), ("medusa", medusa_files(), medusa_logits)])
@torch.no_grad()
def test_drafts_are_those_of_the_published_forward(folder, tmp_path, kind, files, forward):
    """Along a chain of five, after twelve committed tokens."""
    weights, config = files
    w, out = {name: weight.double() for name, weight in weights.items()}, tmp_path / "out"
    argv = convert_to(out, weights, config, folder, pickled=kind == "medusa")
    assert convert.main(argv) == 0
    model, tokenizer = load.load_target(str(folder), "auto", "cpu")
    about = json.loads((out / "training.json").read_text())
    assert about["kind"] == kind and about["source"] == argv[0]
    assert load.difference(about["target"], load.fingerprint(model, tokenizer)) is None
    drafter, _ = families.load(out, model)
    drafter.reset(lambda logits, temperature: logits)
    ids, t = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(2)), 12
    cache = transformers.DynamicCache()
    states = model(ids[None], past_key_values=cache, output_hidden_states=True).hidden_states
    last_hidden = states[LAST][0]
    whole = {m: (layer.keys, layer.values) for m, layer in enumerate(cache.layers)}
    kv = {m: (k[:, :, :t], v[:, :, :t]) for m, (k, v) in whole.items()}
    view = verify.View(ids[:t], ids[:t].tolist(), t, kv, {LAST: last_hidden[:t]})
    drafter.begin(view, ids[t].item())
    for i in range(t, t + 5):
        [row] = drafter.expand(ids[i:i + 1], [i - t - 1])
        expected = forward(w, model, whole, last_hidden, ids[:i + 1], t)
        torch.testing.assert_close(row, expected[-1], **NEAR)

@pytest.mark.parametrize("files, name, weight, words", [
    (eagle_files(True), "layers.0.input_layernorm.weight", torch.ones(WIDTH),
     "layer.input_layernorm.weight"),
    (glide_files(), "small_model.model.embed_tokens.weight", torch.ones(9, 24),
     "another vocabulary"),
    (glide_files(), "small_model.model.norm.weight", None, "model.norm"),
    (medusa_files(), "medusa_head.0.0.linear.weight", None, "holds no GLIDE, EAGLE-1 or MEDUSA-1")])
def test_what_does_not_fit_is_named(folder, tmp_path, capsys, files, name, weight, words):
    """One weight more, one of another size, one that is missing."""
    weights, config = files
    weights[name] = weight
    weights = {key: found for key, found in weights.items() if found is not None}
    argv = convert_to(tmp_path / "out", weights, config, folder)
    refused(capsys, argv, words, convert.main)
    assert not (tmp_path / "out").exists()
