"""Published drafters: what is converted predicts what its published forward predicts.

The published forwards are written out here from the published names of the weights.
"""
import json
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import SIZES, tiny
from safetensors.torch import save_file
from helpers import TEXT, save, tokenizer_of
from torch import nn

import verify
from runtime import families, load
from training import convert

VOCAB, WIDTH, LAST = 40, 32, 3
# The layouts below are written for these sizes.
assert (SIZES["hidden_size"], SIZES["num_hidden_layers"], SIZES["num_attention_heads"]) == (
    WIDTH, LAST, 4)
NEAR = dict(atol=5e-5, rtol=1e-5)                               # RoPE tables of a model are float32
MORE = dict(vocab_size=VOCAB, max_position_embeddings=64)
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
TARGETS = {"llama": tiny("llama", **MORE), "llama-500": tiny("llama", **MORE, **THETA),
           "qwen2": tiny("qwen2", **MORE)}

@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: folder of a target}"""
    top, tokenizer = tmp_path_factory.mktemp("targets"), tokenizer_of(TEXT)
    torch.manual_seed(5)
    for model in TARGETS.values():
        for p in model.parameters():
            if p.ndim == 1:
                nn.init.uniform_(p, 0.5, 1.5)                   # norms and biases that matter
    return {name: save(top / name, model, tokenizer) for name, model in TARGETS.items()}

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

def eagle_files(name="llama-500", bias=True):
    """-> weights, config.json of an EAGLE-1 for a target."""
    model = TARGETS[name]
    c = model.config
    shapes = {"fc.weight": (WIDTH, 2 * WIDTH)}
    shapes |= {"layers.0.post_attention_layernorm.weight": (WIDTH,)}
    shapes |= {"fc.bias": (WIDTH,)} if bias else {}
    kv_width = c.num_key_value_heads * 8
    shapes |= attention("layers.0.self_attn", WIDTH, kv_width, bias=name == "qwen2")
    shapes |= mlp("layers.0.mlp", WIDTH, 48)
    table = model.get_input_embeddings().weight.detach().half()
    config = {"num_attention_heads": 4, "num_key_value_heads": c.num_key_value_heads,
              "rms_norm_eps": c.rms_norm_eps, "hidden_act": "silu"}
    if name == "llama-500":
        config["rope_theta"] = 500.0                            # a missing one is 10000
    return drawn(shapes) | {"embed_tokens.weight": table}, config

def glide_files(name="llama", layers=1, heads=4, prefix=""):
    """-> weights, config.json of a GLIDE."""
    width = 24
    shapes = {"model.embed_tokens.weight": (VOCAB, width), "model.norm.weight": (width,),
              "lm_head.weight": (VOCAB, width)}
    for m in range(layers):
        layer = f"model.layers.{m}"
        shapes |= attention(f"{layer}.self_attn", width, width)
        shapes |= mlp(f"{layer}.mlp", width, 20)
        shapes[f"{layer}.cross_attn.q_proj.weight"] = (WIDTH, width)
        shapes[f"{layer}.cross_attn.o_proj.weight"] = (width, WIDTH)
        for norm in ("input", "post_attention"):
            shapes[f"{layer}.{norm}_layernorm.weight"] = (width,)
    config = {"num_attention_heads": heads, "num_hidden_layers": layers, "rms_norm_eps": 1e-3,
              "rope_theta": 10000.0}
    config = {"small_cfg": config} if prefix else config
    return {prefix + key: weight for key, weight in drawn(shapes).items()}, config

def medusa_files(name="llama", heads=3, prefix=""):
    """-> weights, config.json of a MEDUSA-1, which says two heads, as the published files do."""
    shapes = {}
    for h in range(heads):
        shapes[f"{h}.0.linear.weight"] = (WIDTH, WIDTH)
        shapes[f"{h}.0.linear.bias"] = (WIDTH,)
        shapes[f"{h}.1.weight"] = (VOCAB, WIDTH)
    weights = {prefix + key: weight for key, weight in drawn(shapes).items()}
    return weights, {"medusa_num_heads": 2}

def written(folder, weights, config, name="model.safetensors"):
    """A folder as the hub has it."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: weight.contiguous().clone() for key, weight in weights.items()}
    if name.endswith(".safetensors"):
        save_file(weights, folder / name)
    else:
        torch.save(weights, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    return folder

def converted(source, target, out):
    """The real command, then what bench.py loads -> (drafter, training.json, target's model)."""
    assert convert.main([str(source), "--target", str(target), "--out", str(out)]) == 0
    model, tokenizer = load.load_target(str(target), "auto", "cpu")
    about = json.loads((out / "training.json").read_text())
    assert load.difference(about["target"], load.fingerprint(model, tokenizer)) is None
    drafter, _ = families.load(out, model)
    return drafter, about, model

# ---------------------------------------------------------------- the published forwards
def rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight

def rotated(x, theta):
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

def self_attention(w, prefix, x, heads, key_heads, theta):
    parts = []
    for name, n in (("q", heads), ("k", key_heads), ("v", key_heads)):
        weight, bias = w[f"{prefix}.{name}_proj.weight"], w.get(f"{prefix}.{name}_proj.bias")
        parts.append(F.linear(x, weight, bias).unflatten(-1, (n, -1)).transpose(0, 1))
    q, k = (rotated(part, theta) for part in parts[:2])
    causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    return attend(q, k, parts[2], causal) @ w[f"{prefix}.o_proj.weight"].T

def feed_forward(w, prefix, x):
    gate, up, down = (w[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

def eagle_features(w, config, tokens, features):
    """Features (T, D) after tokens t_1 ..., from the features before them."""
    x = torch.cat((w["embed_tokens.weight"][tokens], features), -1)
    x = F.linear(x, w["fc.weight"], w.get("fc.bias"))
    x = x + self_attention(w, "layers.0.self_attn", x, 4, config["num_key_value_heads"],
                           config.get("rope_theta", 10000.0))
    norm = w["layers.0.post_attention_layernorm.weight"]
    return x + feed_forward(w, "layers.0.mlp", rms(x, norm, config["rms_norm_eps"]))

def eagle_logits(w, config, model, kv, last_hidden, ids, t):
    """After ids[t] and all that follow, step by step, on its own features."""
    # The file has rounded the embedding.
    w = w | {"embed_tokens.weight": model.get_input_embeddings().weight.detach()}
    features = last_hidden[:t]
    for i in range(t, len(ids)):
        new = eagle_features(w, config, ids[1:i + 1], features)[-1:]
        features = torch.cat((features, new))
    return features[t:] @ model.get_output_embeddings().weight.T

def glide_logits(w, config, model, kv, last_hidden, ids, t):
    """Of ids, whose first t are committed: these see the target's keys of blocks of five before."""
    limits = torch.tensor([j // 5 * 5 if j < t else t for j in range(len(ids))])
    x, eps = w["model.embed_tokens.weight"][ids], config["rms_norm_eps"]
    heads = config["num_attention_heads"]
    for m in range(config["num_hidden_layers"]):
        p = f"model.layers.{m}."
        k, v = (entries[0] for entries in kv[LAST - config["num_hidden_layers"] + m])
        normed = rms(x, w[f"{p}input_layernorm.weight"], eps)
        x = x + self_attention(w, f"{p}self_attn", normed, heads, heads, config["rope_theta"])
        q = (x @ w[f"{p}cross_attn.q_proj.weight"].T).unflatten(-1, (4, -1)).transpose(0, 1)
        seen = torch.arange(k.shape[1]) < limits[:, None]
        glimpse = attend(rotated(q, 10000.0), k, v, seen)
        x = x + glimpse @ w[f"{p}cross_attn.o_proj.weight"].T
        normed = rms(x, w[f"{p}post_attention_layernorm.weight"], eps)
        x = x + feed_forward(w, f"{p}mlp", normed)
    return rms(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T

def medusa_logits(w, config, model, kv, last_hidden, ids, t):
    """By the head of a node's depth, on the last committed feature."""
    f, h = last_hidden[t - 1], len(ids) - t - 1
    z = f + F.silu(F.linear(f, w[f"{h}.0.linear.weight"], w[f"{h}.0.linear.bias"]))
    return (z @ w[f"{h}.1.weight"].T)[None]

# ---------------------------------------------------------------- equal to the published forwards
@pytest.mark.parametrize("files, forward, name, more", [
    (eagle_files, eagle_logits, "qwen2", {}),
    (eagle_files, eagle_logits, "llama-500", dict(bias=False)),
    (glide_files, glide_logits, "llama", dict(layers=2, prefix="small_model.")),
    (glide_files, glide_logits, "qwen2", dict(heads=3)),
    (medusa_files, medusa_logits, "qwen2", dict(heads=11, prefix="medusa_head."))])
def test_drafts_are_those_of_the_published_forward(folders, tmp_path, files, forward, name, more):
    """Along a chain, and on each path of a tree after it."""
    weights, config = files(name, **more)
    if files is medusa_files:                      # pickled, in two files, with what is no weight
        first = dict(list(weights.items())[:5])
        rest = {key: weight for key, weight in weights.items() if key not in first}
        first["x.rotary_emb.inv_freq"] = torch.ones(4)
        written(tmp_path / "in", first, config, "a.pt")
        written(tmp_path / "in", rest, config, "pytorch_model.bin")
    else:
        written(tmp_path / "in", weights, config)
    drafter, about, model = converted(tmp_path / "in", folders[name], tmp_path / "out")
    assert f"{about['kind']}_files" == files.__name__
    assert about["source"] == str(tmp_path / "in")
    drafter.reset(lambda logits, temperature: logits)
    prefix = more.get("prefix", "")
    w = {key.removeprefix(prefix): weight.double() for key, weight in weights.items()}
    ids = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(2))
    cache = transformers.DynamicCache()
    with torch.no_grad():
        out = model(ids[None], past_key_values=cache, output_hidden_states=True)
    last_hidden = out.hidden_states[LAST][0]
    whole = {m: (layer.keys, layer.values) for m, layer in enumerate(cache.layers)}
    expected = partial(forward, w, config.get("small_cfg", config), model, whole, last_hidden)
    before = 0
    for t, parents, calls in ((5, [-1, 0, 1, 2], (0, 1, 2, 3, 4)),
                              (12, [-1, 0, 0, 1, 2, 4, 3, 5], (0, 1, 3, 8))):
        nodes, new = ids[t:t + len(parents)], ids[before:t]
        kv = {m: (k[:, :, :t], v[:, :, :t]) for m, (k, v) in whole.items()}
        hidden = {LAST: last_hidden[before:t]}
        drafter.begin(verify.View(new, new.tolist(), t, kv, hidden), nodes[0].item())
        logits = [drafter.expand(nodes[i:j], parents[i:j]) for i, j in zip(calls, calls[1:])]
        for node, row in enumerate(torch.cat(logits)):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            text = torch.cat((ids[:t], nodes[path]))
            with torch.no_grad():
                torch.testing.assert_close(row, expected(text, t)[-1], **NEAR)
        drafter.keep([0, 1, 2, 3])
        before = t

def more_of(name, weight):
    """A change of files: one weight more, or another one."""
    return lambda weights, config: weights.update({name: weight})

@pytest.mark.parametrize("files, target, spoil, words", [
    (eagle_files, "llama-500", more_of("layers.0.input_layernorm.weight", torch.ones(WIDTH)),
     "layer.input_layernorm.weight"),
    (glide_files, "llama", more_of("model.layers.0.self_attn.k_proj.weight", torch.ones(12, 24)),
     "does not fit the target"),
    (glide_files, "llama", lambda weights, config: weights.pop("model.norm.weight"), "model.norm"),
    (glide_files, "llama", more_of("model.embed_tokens.weight", torch.ones(9, 24)),
     "another vocabulary"),
    (glide_files, "llama", lambda weights, config: config.update(rope_theta=700.0),
     "its RoPE has theta = 700, and the target's is another"),
    (glide_files, "llama-500", lambda weights, config: None,
     "its RoPE has theta = 10000, and the target's is another"),
    (medusa_files, "llama", lambda weights, config: weights.pop("0.0.linear.weight"),
     "no known layout")])
def test_what_does_not_fit_is_named(folders, tmp_path, capsys, files, target, spoil, words):
    weights, config = files()
    spoil(weights, config)
    source = written(tmp_path / "in", weights, config)
    argv = [str(source), "--target", str(folders[target]), "--out", str(tmp_path / "out")]
    assert convert.main(argv) == 2
    err = capsys.readouterr().err
    assert words in err and err.startswith("convert.py: ") and err.count("\n") == 1
    assert not (tmp_path / "out").exists()
