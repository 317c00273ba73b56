"""Published drafters: what is converted predicts what its published forward, written out here from the published names, predicts."""
import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import SIZES, plain, tiny
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import nn

import cape
import verify
from runtime import drafters as families
from runtime import load
from runtime.targets import any_target
from training import convert

VOCAB, WIDTH, LAST = 40, 32, 3
assert (SIZES["hidden_size"], SIZES["num_hidden_layers"], SIZES["num_attention_heads"]) == (WIDTH, LAST, 4), "the layouts are written for these"
NEAR = dict(atol=5e-5, rtol=1e-5)                               # a model's RoPE tables are float32
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
TARGETS = {"llama": tiny("llama", vocab_size=VOCAB, max_position_embeddings=64, **THETA), "qwen2": tiny("qwen2", vocab_size=VOCAB, max_position_embeddings=64)}

@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: folder of a target, with a tokenizer of as many words as it has ids}"""
    top, words = tmp_path_factory.mktemp("targets"), Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    torch.manual_seed(5)
    for name, model in TARGETS.items():
        for p in model.parameters():
            if p.ndim == 1:
                nn.init.uniform_(p, 0.5, 1.5)                    # norms and biases that matter
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(top / name)
        model.save_pretrained(top / name)
    return {name: top / name for name in TARGETS}

# ---------------------------------------------------------------- the published layouts, with random weights
def drawn(shapes):
    """{name: float32 tensor}: matrices about zero, norms about one."""
    torch.manual_seed(0)
    return {name: 1 + 0.2 * torch.randn(shape) if "norm" in name else 0.2 * torch.randn(shape) for name, shape in shapes.items()}

def attention(prefix, width, kv_width, bias=False):
    sizes = {"q": (width, width), "k": (kv_width, width), "v": (kv_width, width), "o": (width, width)}
    shapes = {f"{prefix}.{name}_proj.weight": size for name, size in sizes.items()}
    return shapes | {f"{prefix}.{name}_proj.bias": sizes[name][:1] for name in "qkv" if bias}

def mlp(prefix, width, inner):
    return {f"{prefix}.gate_proj.weight": (inner, width), f"{prefix}.up_proj.weight": (inner, width), f"{prefix}.down_proj.weight": (width, inner)}

def eagle_files(name="llama", bias=True):
    """-> weights, config.json of an EAGLE-1 for a target."""
    c = TARGETS[name].config
    shapes = {"fc.weight": (WIDTH, 2 * WIDTH), "layers.0.post_attention_layernorm.weight": (WIDTH,)}
    shapes |= {"fc.bias": (WIDTH,)} if bias else {}
    shapes |= attention("layers.0.self_attn", WIDTH, c.num_key_value_heads * 8, bias=name == "qwen2") | mlp("layers.0.mlp", WIDTH, 48)
    weights = drawn(shapes) | {"embed_tokens.weight": TARGETS[name].get_input_embeddings().weight.detach().half()}
    config = {"num_attention_heads": 4, "num_key_value_heads": c.num_key_value_heads, "rms_norm_eps": c.rms_norm_eps, "hidden_act": "silu"}
    return weights, config | ({"rope_theta": 500.0} if name == "llama" else {})           # a missing one is 10000

def glide_files(name="llama", layers=1, prefix=""):
    """-> weights, config.json of a GLIDE: four heads of 6."""
    width = 24
    shapes = {"model.embed_tokens.weight": (VOCAB, width), "model.norm.weight": (width,), "lm_head.weight": (VOCAB, width)}
    for m in range(layers):
        layer = f"model.layers.{m}"
        shapes |= attention(f"{layer}.self_attn", width, width) | mlp(f"{layer}.mlp", width, 20)
        shapes |= {f"{layer}.cross_attn.q_proj.weight": (WIDTH, width), f"{layer}.cross_attn.o_proj.weight": (width, WIDTH)}
        shapes |= {f"{layer}.{norm}_layernorm.weight": (width,) for norm in ("input", "post_attention")}
    config = {"num_attention_heads": 4, "num_hidden_layers": layers, "rms_norm_eps": 1e-3, "rope_theta": 700.0}
    config = {"small_cfg": config} if prefix else config
    return {prefix + key: weight for key, weight in drawn(shapes).items()}, config

def medusa_files(name="llama", heads=3, prefix=""):
    """-> weights, config.json of a MEDUSA-1, which says two heads, as the published files do."""
    shapes = {}
    for h in range(heads):
        shapes |= {f"{h}.0.linear.weight": (WIDTH, WIDTH), f"{h}.0.linear.bias": (WIDTH,), f"{h}.1.weight": (VOCAB, WIDTH)}
    return {prefix + key: weight for key, weight in drawn(shapes).items()}, {"medusa_num_heads": 2}

def written(folder, weights, config, name):
    """A folder as the hub has it."""
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file({key: weight.contiguous().clone() for key, weight in weights.items()}, folder / name)
    else:
        torch.save(weights, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    return folder

def converted(source, target, out):
    """The real command, then what bench.py loads -> (drafter, training.json, the target's model)."""
    assert convert.main([str(source), "--target", str(target), "--out", str(out)]) == 0
    model, tokenizer = load.load_target(str(target), "auto", "cpu")
    about = json.loads((out / "training.json").read_text())
    assert load.relation(about["target"], load.fingerprint(model, tokenizer)) == "the same"
    drafter, _ = families.load(out, model)
    return drafter, about, model

# ---------------------------------------------------------------- the published forwards, in plain torch
def rotated(x, theta):
    """RoPE of x (heads, T, d): entries i and i + d/2 are a complex number, turned by position theta^(-2i / d)."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:])
    angle = torch.arange(x.shape[1]).double()[:, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)

def attend(q, k, v, seen):
    """q (h, T, d), k and v (H, t, d), seen (T, t): a query that sees nothing gets zero -> (T, h d)."""
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(0, 1).flatten(1)

def self_attention(w, prefix, x, key_heads, theta):
    parts = []
    for name, n in (("q", 4), ("k", key_heads), ("v", key_heads)):
        part = F.linear(x, w[f"{prefix}.{name}_proj.weight"], w.get(f"{prefix}.{name}_proj.bias"))
        parts.append(part.unflatten(-1, (n, -1)).transpose(0, 1))
    q, k = (rotated(part, theta) for part in parts[:2])
    return attend(q, k, parts[2], torch.ones(len(x), len(x), dtype=torch.bool).tril()) @ w[f"{prefix}.o_proj.weight"].T

def feed_forward(w, prefix, x):
    gate, up, down = (w[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

def eagle_features(w, config, tokens, features):
    """Features (T, D) after tokens t_1 ..., from the features before them."""
    x = torch.cat((w["embed_tokens.weight"][tokens], features), -1)
    x = F.linear(x, w["fc.weight"], w.get("fc.bias"))
    x = x + self_attention(w, "layers.0.self_attn", x, config["num_key_value_heads"], config.get("rope_theta", 10000.0))
    normed = F.rms_norm(x, x.shape[-1:], w["layers.0.post_attention_layernorm.weight"], config["rms_norm_eps"])
    return x + feed_forward(w, "layers.0.mlp", normed)

def eagle_logits(w, config, model, batch, ids, t):
    """After ids[t] and all that follow, step by step, on its own features."""
    w = w | {"embed_tokens.weight": model.get_input_embeddings().weight.detach()}            # the file has rounded it
    features = batch["hidden"][LAST][0, :t]
    for i in range(t, len(ids)):
        features = torch.cat((features, eagle_features(w, config, ids[1:i + 1], features)[-1:]))
    return features[t:] @ model.get_output_embeddings().weight.T

def glide_logits(w, config, model, batch, ids, t):
    """Of ids, whose first t are committed: these see the target's keys of earlier blocks of five."""
    limits = torch.tensor([j // 5 * 5 if j < t else t for j in range(len(ids))])
    x, eps = w["model.embed_tokens.weight"][ids], config["rms_norm_eps"]
    for m in range(config["num_hidden_layers"]):
        p = f"model.layers.{m}."
        k, v = (entries[0] for entries in batch["kv"][LAST - config["num_hidden_layers"] + m])
        x = x + self_attention(w, f"{p}self_attn", F.rms_norm(x, x.shape[-1:], w[f"{p}input_layernorm.weight"], eps), 4, config["rope_theta"])
        q = (x @ w[f"{p}cross_attn.q_proj.weight"].T).unflatten(-1, (4, -1)).transpose(0, 1)
        x = x + attend(rotated(q, 10000.0), k, v, torch.arange(k.shape[1]) < limits[:, None]) @ w[f"{p}cross_attn.o_proj.weight"].T
        x = x + feed_forward(w, f"{p}mlp", F.rms_norm(x, x.shape[-1:], w[f"{p}post_attention_layernorm.weight"], eps))
    return F.rms_norm(x, x.shape[-1:], w["model.norm.weight"], eps) @ w["lm_head.weight"].T

def medusa_logits(w, config, model, batch, ids, t):
    """By the head of a node's depth, on the last committed feature."""
    f, h = batch["hidden"][LAST][0, t - 1], len(ids) - t - 1
    z = f + F.silu(F.linear(f, w[f"{h}.0.linear.weight"], w[f"{h}.0.linear.bias"]))
    return (z @ w[f"{h}.1.weight"].T)[None]

# ---------------------------------------------------------------- equal to the published forwards
@pytest.mark.parametrize("files, forward, name, more", [
    (eagle_files, eagle_logits, "qwen2", {}), (eagle_files, eagle_logits, "llama", dict(bias=False)),
    (glide_files, glide_logits, "llama", dict(layers=2, prefix="small_model.")), (glide_files, glide_logits, "qwen2", {}),
    (medusa_files, medusa_logits, "qwen2", dict(heads=11, prefix="medusa_head."))])
def test_drafts_are_those_of_the_published_forward(folders, tmp_path, files, forward, name, more):
    """Along a chain, and on each path of a tree after it."""
    weights, config = files(name, **more)
    file = "medusa_lm_head.pt" if files is medusa_files else "model.safetensors"
    source = written(tmp_path / "in", weights, config, file)
    drafter, about, model = converted(source, folders[name], tmp_path / "out")
    assert f"{about['kind']}_files" == files.__name__ and about["source"] == str(tmp_path / "in")
    w = {key.removeprefix(more.get("prefix", "")): weight.double() for key, weight in weights.items()}
    expected = partial(forward, w, config.get("small_cfg", config), model)
    ids = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(2))
    cache = transformers.DynamicCache()
    with torch.no_grad():
        states = model(ids[None], past_key_values=cache, output_hidden_states=True).hidden_states
        batch = {"hidden": {LAST: states[LAST]}, "kv": {m: (layer.keys, layer.values) for m, layer in enumerate(cache.layers)}}
        before = 0
        for t, parents, calls in ((5, [-1, 0, 1, 2], (0, 1, 2, 3, 4)), (12, [-1, 0, 0, 1, 2, 4, 3, 5], (0, 1, 3, 8))):
            nodes = ids[t:t + len(parents)]
            kv = {m: (k[:, :, :t], v[:, :, :t]) for m, (k, v) in batch["kv"].items()}
            drafter.begin(SimpleNamespace(tokens=ids[before:t], length=t, kv=kv, hidden={LAST: states[LAST][0, before:t]}))
            logits = torch.cat([drafter.expand(nodes[i:j], parents[i:j]) for i, j in zip(calls, calls[1:])])
            for node, row in enumerate(logits):
                path = [node]
                while parents[path[0]] >= 0:
                    path.insert(0, parents[path[0]])
                text = torch.cat((ids[:t], nodes[path]))
                torch.testing.assert_close(row, expected(batch, text, t)[-1], **NEAR)
            drafter.keep([0, 1, 2, 3])
            before = t
    drafter.reset()
    prompt = [3, 1, 4, 1, 5, 9, 2]
    assert verify.generate(any_target(model), drafter, cape.cape, prompt, 8).tokens == plain(model, prompt, 8)

def test_what_does_not_fit_is_named(folders, tmp_path, capsys):
    weights, config = eagle_files()
    weights["layers.0.input_layernorm.weight"] = torch.ones(WIDTH)
    source = written(tmp_path / "in", weights, config, "model.safetensors")
    assert convert.main([str(source), "--target", str(folders["llama"]), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "layer.input_layernorm.weight" in err and err.startswith("convert.py: ") and err.count("\n") == 1 and not (tmp_path / "out").exists()
