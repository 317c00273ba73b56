"""Published drafters: what is converted says what its published forward, written out here from the published keys, says."""
import json
import math
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import SIZES, plain, tiny
from safetensors.torch import load_file, save_file
from test_glide import batch_of, logits_of, view
from test_glide import text as some_text
from test_verify import path_to
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

import cape
import edd
import glide
import verify
from training import convert
from runtime import load, drafters as runtime_drafters
from runtime.targets import any_target

VOCAB, WIDTH = 40, 32
LAST = SIZES["num_hidden_layers"]
assert SIZES["hidden_size"] == WIDTH and LAST == 3 and SIZES["num_attention_heads"] == 4, "the layouts below are written for these"
NEAR = dict(atol=5e-5, rtol=1e-5)                               # where positions count: a model's rotary tables are float32
SMALL = dict(vocab_size=VOCAB, max_position_embeddings=64)
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
TARGETS = {"llama": tiny("llama", **SMALL, **THETA), "qwen2": tiny("qwen2", **SMALL), "mistral": tiny("mistral", **SMALL),
           "scaled": tiny("llama", **SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0})}
text = partial(some_text, vocab=VOCAB)

@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: folder of a target, with a tokenizer of as many words as it has ids, as Hugging Face saves them}; each is read once."""
    top, words = tmp_path_factory.mktemp("targets"), Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    torch.manual_seed(5)
    for name, model in TARGETS.items():
        for p in model.parameters():
            if p.ndim == 1:
                nn.init.uniform_(p, 0.5, 1.5)                    # norms, and biases, that matter
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(top / name)
        model.save_pretrained(top / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "load_target", cache(load.load_target))
        yield {name: top / name for name in TARGETS}

# ---------------------------------------------------------------- the published layouts, with random weights
def drawn(shapes, seed=0):
    """{key: float32 tensor}: matrices about zero, what belongs to a norm about one."""
    torch.manual_seed(seed)
    return {key: 1 + 0.2 * torch.randn(shape) if "norm" in key else 0.2 * torch.randn(shape) for key, shape in shapes.items()}

def attention(prefix, width, rows, out=None, bias=False):
    """Shapes of q, k, v, o: `rows` of keys and of values, `out` of queries (width, where it is not said); with biases, or without."""
    sizes = {"q": (out or width, width), "k": (rows, width), "v": (rows, width), "o": (width, out or width)}
    shapes = {f"{prefix}.{name}_proj.weight": size for name, size in sizes.items()}
    return shapes | {f"{prefix}.{name}_proj.bias": sizes[name][:1] for name in "qkv" if bias}

def mlp(prefix, width, inner):
    sizes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    return {f"{prefix}.{name}_proj.weight": size for name, size in sizes.items()}

def eagle_files(name, bias=True):
    """-> weights, config.json of an EAGLE-1 for the target."""
    c, model = TARGETS[name].config, TARGETS[name]
    shapes = {"fc.weight": (WIDTH, 2 * WIDTH), "layers.0.post_attention_layernorm.weight": (WIDTH,)}
    shapes |= {"fc.bias": (WIDTH,)} if bias else {}
    shapes |= attention("layers.0.self_attn", WIDTH, c.num_key_value_heads * 8, bias=name == "qwen2") | mlp("layers.0.mlp", WIDTH, 48)
    weights = drawn(shapes) | {"embed_tokens.weight": model.get_input_embeddings().weight.detach().half()}
    config = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": c.num_key_value_heads, "rms_norm_eps": c.rms_norm_eps,
              "hidden_act": "silu", "rope_scaling": None, "num_hidden_layers": 1, "vocab_size": VOCAB}
    config |= {"rope_theta": 500.0} if name == "llama" else {}                     # a missing one is 10000
    config |= {"qkv_bias": True} if name == "qwen2" else {}
    return weights, config if bias else config | {"bias": False}                    # a missing one is true

def glide_files(name="llama", layers=1, key_heads=4, width=24, vocab=VOCAB, prefix=""):
    """-> weights, config.json of a GLIDE for the target: four heads of 6, eight key heads of the target's at most."""
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,), "lm_head.weight": (vocab, width)}
    for m in range(layers):
        layer = f"model.layers.{m}"
        shapes |= attention(f"{layer}.self_attn", width, key_heads * 6) | mlp(f"{layer}.mlp", width, 20)
        shapes |= {f"{layer}.cross_attn.q_proj.weight": (WIDTH, width), f"{layer}.cross_attn.o_proj.weight": (width, WIDTH)}
        shapes |= {f"{layer}.{norm}_layernorm.weight": (width,) for norm in ("input", "post_attention")}
    config = {"hidden_size": width, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": key_heads, "num_hidden_layers": layers,
              "rms_norm_eps": 1e-3, "rope_theta": 700.0, "large_hidden_size": WIDTH, "large_num_attention_heads": 4, "vocab_size": vocab}
    config = {"small_cfg": config, "large_cfg": {"hidden_size": 7}} if prefix else config           # of a file for both models
    return {prefix + key: weight for key, weight in drawn(shapes).items()}, config

def longspec_files(name="llama", key_heads=4, unread=True):
    """-> weights, config.json of a LongSpec, the target's own but for the heads of its keys; also what it never reads."""
    shapes = mlp("mlp", WIDTH, 20)
    for part in ("self_attn", "cross_attn"):
        shapes |= attention(part, WIDTH, key_heads * 8, bias=True)
    shapes |= {f"{norm}_layernorm.weight": (WIDTH,) for norm in ("input", "post_self_attention", "post_cross_attention")}
    shapes = {key: size for key, size in shapes.items() if unread or not key.startswith(("cross_attn.k", "cross_attn.v"))}
    return drawn(shapes), {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": key_heads, "rms_norm_eps": 1e-3}

def medusa_files(name="llama", heads=3, prefix=""):
    """-> weights, config.json of a MEDUSA-1, which says two heads, as the published files do."""
    shapes = {}
    for h in range(heads):
        shapes |= {f"{h}.0.linear.weight": (WIDTH, WIDTH), f"{h}.0.linear.bias": (WIDTH,), f"{h}.1.weight": (VOCAB, WIDTH)}
    return {prefix + key: weight for key, weight in drawn(shapes).items()}, {"medusa_num_heads": 2, "medusa_num_layers": 1}

def written(folder, weights, config, name="model.safetensors"):
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
    assert convert.main([str(source), "--target", str(target), "--out", str(out), "--device", "cpu"]) == 0
    model, tokenizer = load.load_target(str(target), "auto", "cpu")
    about = json.loads((out / "training.json").read_text())
    assert load.same_target(about["target"], load.fingerprint(model, tokenizer))
    drafter, _ = runtime_drafters.load(glide if about["kind"] in ("glide", "longspec") else edd, out, model)
    return drafter, about, model

# ---------------------------------------------------------------- the published forwards, in plain torch
def rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight

def turned(x, position, theta):
    """x (heads, T, d): entries i and i + d/2 are a complex number, turned by position theta^(-2i / d)."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:])
    angle = position[:, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)

def attend(q, k, v, seen):
    """q (h, T, d), k and v (H, t, d), seen (T, t): a row that sees nothing gets zero -> (T, h d)."""
    k, v = (rows.repeat_interleave(len(q) // len(rows), 0) for rows in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(0, 1).flatten(1)

def self_attention(w, prefix, x, position, heads, key_heads, theta, window=1000):
    """What a Llama's self-attention gives, before its output is added."""
    parts = []
    for name, n in (("q", heads), ("k", key_heads), ("v", key_heads)):
        rows = F.linear(x, w[f"{prefix}.{name}_proj.weight"], w.get(f"{prefix}.{name}_proj.bias"))
        parts.append(rows.unflatten(-1, (n, -1)).transpose(0, 1))
    q, k = (turned(rows, position, theta) for rows in parts[:2])
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril().triu(-window)
    return attend(q, k, parts[2], seen) @ w[f"{prefix}.o_proj.weight"].T

def feed_forward(w, prefix, x):
    gate, up, down = (w[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

def published_eagle(w, config, tokens, features):
    """Features (T, D) that follow from tokens t_1 ... and from the features before them."""
    x = torch.cat((w["embed_tokens.weight"][tokens], features), -1)
    x = F.linear(x, w["fc.weight"], w.get("fc.bias"))
    place = torch.arange(len(x), dtype=x.dtype)
    x = x + self_attention(w, "layers.0.self_attn", x, place, 4, config["num_key_value_heads"], config.get("rope_theta", 10000.0))
    return x + feed_forward(w, "layers.0.mlp", rms(x, w["layers.0.post_attention_layernorm.weight"], config["rms_norm_eps"]))

def layer_with_a_glimpse(w, p, config, x, kv, limits, turns, norms=("post_attention_layernorm",), window=1000):
    """x (T, D).  kv: what it glimpses, and limits: how many of its rows each position may see; turns: places and theta of its own
    rows, and of the glimpse; norms: that of the glimpse, where there is one, and that of the MLP."""
    eps, seen = config["rms_norm_eps"], torch.arange(kv[0].shape[1]) < torch.tensor(limits)[:, None]
    normed = rms(x, w[f"{p}input_layernorm.weight"], eps)
    x = x + self_attention(w, f"{p}self_attn", normed, turns[0], 4, config["num_key_value_heads"], turns[1], window)
    looks = rms(x, w[f"{p}{norms[0]}.weight"], eps) if norms[1:] else x
    q = F.linear(looks, w[f"{p}cross_attn.q_proj.weight"], w.get(f"{p}cross_attn.q_proj.bias")).unflatten(-1, (4, -1)).transpose(0, 1)
    x = x + attend(turned(q, turns[0], turns[2]), *kv, seen) @ w[f"{p}cross_attn.o_proj.weight"].T
    return x + feed_forward(w, f"{p}mlp", rms(x, w[f"{p}{norms[-1]}.weight"], eps))

def published_glide(w, config, ids, kv, limits):
    """Logits (T, V).  kv: the target's cache, all layers; limits: how many of its rows each position may see."""
    turns, layers = (torch.arange(len(ids)).double(), config["rope_theta"], 10000.0), config["num_hidden_layers"]
    x = w["model.embed_tokens.weight"][ids]
    for m in range(layers):
        x = layer_with_a_glimpse(w, f"model.layers.{m}.", config, x, kv[len(kv) - layers + m], limits, turns)
    return rms(x, w["model.norm.weight"], config["rms_norm_eps"]) @ w["lm_head.weight"].T

def published_longspec(w, config, target, ids, kv, limits, window):
    """As published_glide.  Embedding, head, and what turns queries and keys are the target's."""
    rope, norms = target.config.rope_parameters, ("post_self_attention_layernorm", "post_cross_attention_layernorm")
    turns = torch.arange(len(ids)).double() / rope.get("factor", 1.0), rope["rope_theta"], rope["rope_theta"]
    x = target.get_input_embeddings().weight.detach()[ids]
    return layer_with_a_glimpse(w, "", config, x, kv[-1], limits, turns, norms, window) @ target.get_output_embeddings().weight.detach().T

def glimpsed(batch, ids, t):
    """Of a text whose first t tokens are committed (training: None): the target's cache, and how many of its rows each token may see."""
    return [(k[0], v[0]) for k, v in batch["kv"].values()], [j // 5 * 5 if t is None or j < t else t for j in range(len(ids))]

def eagle_logits(w, config, model, batch, ids, t=None):
    """Of the root, ids[t], and all that follows; step by step, on its own predictions.  (Training: of all but the first.)"""
    w = w | {"embed_tokens.weight": model.get_input_embeddings().weight.detach()}                     # which the file has rounded
    f, head = batch["hidden"][LAST][0], model.get_output_embeddings().weight                          # f is normed
    if t is None:
        return published_eagle(w, config, ids[1:], f[:-1]) @ head.T
    fed = f[:t]
    for i in range(t, len(ids)):
        fed = torch.cat((fed, published_eagle(w, config, ids[1:i + 1], fed)[-1:]))
    return fed[t:] @ head.T

def glide_logits(w, config, model, batch, ids, t=None):
    return published_glide(w, config, ids, *glimpsed(batch, ids, t))

def longspec_logits(w, config, model, batch, ids, t=None):
    return published_longspec(w, config, model, ids, *glimpsed(batch, ids, t), convert.WINDOW)

def medusa_logits(w, config, model, batch, ids, t=None):
    """Of a node that is so deep by the head of that number, whatever the path.  (Training: of the first head.)"""
    f, found = batch["hidden"][LAST][0], []
    for h in range(1 if t is None else len(ids) - t):
        z = f + F.silu(F.linear(f, w[f"{h}.0.linear.weight"], w[f"{h}.0.linear.bias"]))
        found.append(z @ w[f"{h}.1.weight"].T)
    return found[0] if t is None else torch.stack(found)[:, t - 1]

def lossless(model, drafter, prompt=(3, 1, 4, 1, 5, 9, 2)):
    assert verify.generate(any_target(model), drafter, cape.cape, list(prompt), 8).tokens == plain(model, prompt, 8)

# ---------------------------------------------------------------- equal to the published forwards
CHAIN, TREE = [-1, 0, 1, 2], [-1, 0, 0, 1, 2, 4, 3, 5]

@pytest.mark.parametrize("files, forward, name, more", [
    (eagle_files, eagle_logits, "qwen2", {}), (eagle_files, eagle_logits, "mistral", dict(bias=False)),
    (glide_files, glide_logits, "llama", dict(layers=2, key_heads=2, vocab=VOCAB + 8, prefix="small_model.")),
    (glide_files, glide_logits, "mistral", {}), (glide_files, glide_logits, "qwen2", dict(key_heads=2, vocab=VOCAB - 8)),
    (longspec_files, longspec_logits, "scaled", {}), (longspec_files, longspec_logits, "qwen2", dict(key_heads=2, unread=False)),
    (medusa_files, medusa_logits, "qwen2", dict(heads=11, prefix="medusa_head."))])
def test_drafts_are_those_of_the_published_forward(folders, tmp_path, monkeypatch, files, forward, name, more):
    """In training, along a chain, and on each path of a tree."""
    weights, config = files(name, **more)
    monkeypatch.setattr(convert, "WINDOW", 3 if name == "scaled" else 512)
    drafter, about, model = converted(written(tmp_path / "in", weights, config), folders[name], tmp_path / "out")
    assert f"{about['kind']}_files" == files.__name__ and drafter.device == torch.device("cpu")
    w = {key.removeprefix(more.get("prefix", "")): weight.double() for key, weight in weights.items()}
    expected, known = partial(forward, w, config.get("small_cfg", config), model), min(more.get("vocab", VOCAB), VOCAB)
    ids = text(20).clamp(max=known - 1)
    batch, before = batch_of(model, ids[None], {LAST}), 0
    with torch.no_grad():
        if files is eagle_files:
            trained = drafter.model.logits(drafter.model(ids[None], batch["hidden"][LAST]))
        elif files is medusa_files:
            trained = drafter.model.heads[0](drafter.model(batch["hidden"][LAST])[0])
        else:
            trained = logits_of(drafter.model, ids[None], batch["kv"])
        torch.testing.assert_close(trained[0], expected(batch, ids), **NEAR)
        for t, parents, calls in ((5, CHAIN, (0, 1, 2, 3, 4)), (12, TREE, (0, 1, 3, 8))):
            nodes = ids[t:t + len(parents)]
            drafter.begin(view(batch, before, t))
            rows = torch.cat([drafter.expand(nodes[i:j], parents[i:j]) for i, j in zip(calls, calls[1:])])
            assert rows.shape[1] == VOCAB and rows.isfinite().sum() == known * len(rows), "ids that one of both does not know"
            for node, row in enumerate(rows):
                path = torch.cat((ids[:t], nodes[path_to(node, parents)]))
                torch.testing.assert_close(row[:known], expected(batch, path, t)[-1, :known], **NEAR)
            drafter.keep([0, 1, 2, 3])
            before = t
        if known < VOCAB:                                                   # an id that it does not know is any other
            batch["ids"] = ids[None].index_fill(1, torch.tensor([3]), VOCAB - 1)
            drafter.reset()
            drafter.begin(view(batch, 0, 12))
            assert drafter.expand(torch.tensor([VOCAB - 1]), [-1]).isfinite().sum() == known
    lossless(model, drafter)

# ---------------------------------------------------------------- files
def test_pickled_weights_are_as_good(folders, tmp_path, capsys):
    """Also in several files, and beside what a training leaves; types stay, a table of rotary angles is no weight."""
    weights, config = eagle_files("llama")
    half = {key: weight.half() for key, weight in weights.items()}
    keys, made = sorted(half), []
    written(tmp_path / "pickled" / "in", {key: half[key] for key in keys[::2]}, config, "a.pt")
    rest = {key: half[key] for key in keys[1::2]} | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    written(tmp_path / "pickled" / "in", rest, config, "pytorch_model.bin")
    torch.save({"lr": SimpleNamespace()}, tmp_path / "pickled" / "in" / "training_args.bin")
    written(tmp_path / "safe" / "in", half, config)
    torch.save({"never": "read"}, tmp_path / "safe" / "in" / "pytorch_model.bin")
    for kind in ("pickled", "safe"):
        source, out = tmp_path / kind / "in", tmp_path / kind / "out"
        _, about, _ = converted(source, folders["llama"], out)
        assert about["source"] == str(source) and about["command"].startswith("python training/convert.py ")
        assert len(about["date"]) == 10 and f"--drafter {about['kind']}" in capsys.readouterr().out
        made.append((out / "model.safetensors").read_bytes())
    assert made[0] == made[1]
    assert {weight.dtype for weight in load_file(out / "model.safetensors").values()} == {torch.float16}

# ---------------------------------------------------------------- what does not fit
class Code:
    """A pickle that would run something."""

    def __reduce__(self):
        return (print, ("code ran",))

def changed(key, weight):
    return lambda w, c: w.update({key: weight})

def setting(**settings):
    return lambda w, c: c.update(settings)

FC = torch.zeros(WIDTH, WIDTH)
WRONG = {"a key too many": (eagle_files, changed("layers.0.input_layernorm.weight", torch.ones(WIDTH)), "no key layers.0.input_layernorm.weight"),
    "a shape": (eagle_files, changed("fc.weight", FC), r"fc.weight has shape (32, 32), and for this target it must be (32, 64)"),
    "theta": (eagle_files, setting(rope_theta=10000.0), "rope_theta is 10000.0, and must be 500.0 here"),
    "another target": (eagle_files, lambda w, c: w["embed_tokens.weight"][7].mul_(1.1), "1 of 40 rows of embed_tokens.weight are another"),
    "integers": (eagle_files, changed("fc.weight", FC.char()), "is torch.int8: take floating weights"),
    "a larger target": (glide_files, setting(large_hidden_size=64), "large_hidden_size is 64, and must be 32"),
    "two MEDUSA layers": (medusa_files, changed("0.1.linear.weight", FC), "0.1.linear.weight: medusa_num_layers is above 1"),
    "half a head": (eagle_files, setting(num_key_value_heads=2.5), "num_key_value_heads is 2.5, and must be a count"),
    "nothing known": (lambda name: ({"x.weight": FC}, {}), lambda w, c: None, "in no known layout (it has a key x.weight)")}

def check_refused(capsys, out, words, *argv):
    assert convert.main(["--device", "cpu", *map(str, argv), "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.startswith("convert.py: ") and said.err.count("\n") == 1 and "code ran" not in said.out
    assert not out.exists(), "nothing is left behind"

@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named_in_one_sentence(folders, tmp_path, capsys, case):
    files, spoil, words = WRONG[case]
    weights, config = files("llama")
    spoil(weights, config)
    check_refused(capsys, tmp_path / "out", words, written(tmp_path / "in", weights, config), "--target", folders["llama"])

def test_files_that_cannot_be_read(folders, tmp_path, capsys, monkeypatch):
    source, target = tmp_path / "in", ("--target", folders["llama"])
    weights, config = medusa_files()

    def refused(words, *target):
        check_refused(capsys, tmp_path / "out", words, source, *target)
    refused("does not exist: give a folder, or OWNER/NAME", *target)
    (source / "folder.bin").mkdir(parents=True)
    refused("holds no *.safetensors, *.bin or *.pt", *target)
    for held, words in (({"0.0.linear.weight": Code()}, "cannot be read, or holds more than weights"), ({"epoch": 3}, "epoch in")):
        torch.save(held, source / "medusa_lm_head.pt")
        refused(words, *target)
    written(source, weights, config)
    written(source, {"2.1.weight": weights["2.1.weight"]}, config, "more.safetensors")
    refused("2.1.weight is in", *target)
    (source / "more.safetensors").unlink()
    (source / "config.json").write_text("[" * 9999)
    refused("config.json is no JSON object", *target)
    (source / "config.json").unlink()
    refused("/no/such does not exist", "--target", "/no/such")
    refused("--device x: say cpu, cuda", *target, "--device", "x")

def test_a_checkpoint_is_written_as_a_whole_into_a_new_folder(folders, tmp_path, capsys, monkeypatch):
    weights, _ = medusa_files()
    source, out = written(tmp_path / "in", weights, {}), tmp_path / "out"           # of config.json nothing is needed

    def command(out):
        return convert.main([str(source), "--target", str(folders["llama"]), "--out", str(out), "--device", "cpu"])
    (tmp_path / "file").write_text("")
    for taken, words in ((tmp_path / "file" / "out", "Not a directory"), (tmp_path / "file", "is not empty"), (source, "is not empty")):
        assert command(taken) == 2
        assert words in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(convert, "save_file", lambda weights, path, about: path.write_text("half") and [][0])
        with pytest.raises(IndexError):                                             # whatever happens while it is written
            command(out)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "file"}, "nothing is left behind"
    assert command(out) == 0 and {path.name for path in out.iterdir()} == {"model.safetensors", "training.json"}

def test_from_the_hub_safetensors_come_first(folders, tmp_path, capsys, monkeypatch):
    """Pickled files are only asked for where there are no others; no network is one sentence."""
    asked, source = [], written(tmp_path / "in", *medusa_files(), name="medusa_lm_head.pt")
    (tmp_path / "nothing").mkdir()

    def downloaded(name, allow_patterns, local_files_only):
        asked.append(allow_patterns)
        if local_files_only:
            raise OSError("no\nnetwork")
        return str(source if "*.pt" in allow_patterns else tmp_path / "nothing")
    monkeypatch.setattr(convert, "snapshot_download", downloaded)
    monkeypatch.setattr(load, "on_hub", lambda *args: True)
    check_refused(capsys, tmp_path / "out", "o/n cannot be had from the hub (it cannot be reached)", "o/n", "--target", folders["llama"])
    monkeypatch.setattr(load, "on_hub", lambda *args: False)
    _, about, _ = converted("o/n", folders["llama"], tmp_path / "out")
    assert about["source"] == "o/n" and asked[1:] == [("*.json", "*.safetensors"), ("*.json", "*.bin", "*.pt")]

# ---------------------------------------------------------------- a quantised target
class Int8(nn.Module):
    """A linear layer, or an embedding, whose weights are integers and a scale for each row, of another type than activations."""

    def __init__(self, module, of_scales):
        super().__init__()
        weight = module.weight.detach().double()
        self.table, self.bias, self.dtype = isinstance(module, nn.Embedding), getattr(module, "bias", None), module.weight.dtype
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / scale).round().char(), requires_grad=False)
        self.scale = nn.Parameter(scale.to(of_scales))

    def forward(self, x):
        weight = (self.weight * self.scale).to(self.dtype)
        return weight[x] if self.table else F.linear(x, weight, self.bias)

def quantised(model, of_scales, kinds=(nn.Linear, nn.Embedding)):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, tuple(kinds)):
                setattr(module, name, Int8(child, of_scales))
    return model

@pytest.mark.parametrize("name", ["edd", "medusa", "glide"])
def test_a_quantised_target_trains(name):
    """Weights are int8: types come from hidden states, and what learns starts at what the target says.  (Decoding: test_real.py.)"""
    model, ids = quantised(tiny("qwen2", **SMALL), torch.float32), torch.arange(VOCAB)
    assert model.dtype == torch.float32, "what a weight would say of activations is wrong"
    batch = batch_of(model, text(24).view(2, 12), {2, LAST}) | {"block": None, "random": np.random.default_rng(0)}
    if name == "glide":
        module = runtime_drafters.Glide.beside(model, runtime_drafters.glide_config(model, norm=True), 100)
        assert module.start_from(model)
    else:
        draft_class, _ = runtime_drafters.KINDS[name]
        module = draft_class(runtime_drafters.config_of(name, model, hidden=2), model)
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    if name == "medusa":
        torch.testing.assert_close(module.heads[0](module(batch["hidden"][LAST])[0]), batch["logits"], **NEAR)
    if name in ("edd", "glide"):
        torch.testing.assert_close(module.embed(ids), model.get_input_embeddings()(ids), **NEAR)
    module.loss(batch).backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in module.parameters())
