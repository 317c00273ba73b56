"""GLIDE: training equals decoding, nothing of the target is trained, no KV entry is stale; the docstrings of glide.py and edd.py."""
import ast
import inspect
import json
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import ROOT, VOCAB, plain, random_drafter, random_edd, random_glide, shared, tiny
from safetensors.torch import save_file
from test_house import run_alone

import glide

EXACT = dict(atol=1e-9, rtol=0)

# ---------------------------------------------------------------- what other tests of drafters use, too
def text(length, seed=2, vocab=VOCAB):
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed))

def logits_of(draft_model, ids, kv):
    """Of all positions at once, as in training."""
    return draft_model.head(draft_model(ids, kv))

def batch_of(model, ids, hidden=()):
    """What training reads of the target's forward over ids (B, T), by transformers alone."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        out = model(ids, past_key_values=cache, use_cache=True, output_hidden_states=bool(hidden))
    learn = F.pad(torch.ones_like(ids[:, 1:], dtype=torch.bool), (0, 1))
    return {"ids": ids, "kv": {i: (layer.keys, layer.values) for i, layer in enumerate(cache.layers)}, "logits": out.logits, "block": 5,
            "hidden": {k: out.hidden_states[k] for k in hidden}, "learn": learn, "count": learn.sum(),
            "sum": lambda loss, learn, *xs: loss(*(x[learn] for x in xs))}

def view(batch, since, t):
    """A View of the batch's first text."""
    kv = {m: (k[:, :, :t], v[:, :, :t]) for m, (k, v) in batch["kv"].items()}
    hidden = {k: h[0, since:t] for k, h in batch["hidden"].items()}
    return SimpleNamespace(tokens=batch["ids"][0, since:t], length=t, kv=kv, hidden=hidden)

def save(folder, draft_model, **about):
    """A checkpoint as train.py writes it, but in full precision."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in draft_model.state_dict().items()}, folder / "model.safetensors")
    (folder / "training.json").write_text(json.dumps({"config": vars(draft_model.config), **about}))

# ---------------------------------------------------------------- alone in a project
@pytest.mark.parametrize("name, draft_model_of", [("glide", random_glide), ("edd", partial(random_edd, hidden=1))])
def test_a_stranger_uses_it_alone(name, draft_model_of, tmp_path, monkeypatch):
    """The docstring's script, in an empty folder that holds the module's file, a target and a drafter alone: plain decoding's tokens."""
    doc = ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8")))
    lines, model = inspect.cleandoc(doc.split("Alone in a project")[1].split("\n\n")[1]), tiny("llama")
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    (tmp_path / "script.py").write_text(f"{lines}\nopen('ids', 'w').write(repr(ids.tolist()))")
    model.save_pretrained(tmp_path / "my-target")
    save(tmp_path / f"my-{name}", draft_model_of(model))
    monkeypatch.chdir(tmp_path)
    assert run_alone(tmp_path / "script.py") == 0
    ids = ast.literal_eval((tmp_path / "ids").read_text())
    assert len(ids) >= 30 and ids[3:] == plain(model, ids[:3], len(ids) - 3)

def test_a_checkpoint_brings_its_temperature_and_needs_llamas_rope(llama, tmp_path):
    save(tmp_path, random_glide(llama), validation={"temperature": 0.7})
    drafter, _ = glide.load(tmp_path, llama, 40)
    assert drafter.temperature == 0.7 and not drafter.store.requires_grad
    with pytest.raises(ValueError, match="is not Llama's"):
        glide.load(tmp_path, tiny("llama", rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)), 40)

# ---------------------------------------------------------------- training equals decoding
@pytest.mark.parametrize("name, layers, glimpse, norm", [
    ("llama-eager", 2, True, True), ("qwen2-mixed", 1, True, False), ("llama", 2, False, False)])
def test_training_equals_decoding_with_the_delayed_cache(name, layers, glimpse, norm):
    """drafted < 5: accepted tokens without KV entries yet (CAPE's extras, a chain's last) are encoded in the next round."""
    L, T, model = 5, 20, shared(name)
    draft_model, batch = random_glide(model, layers, glimpse, norm=norm), batch_of(model, text(T)[None])
    ids = batch["ids"][0]
    assert draft_model.config.norm == norm
    with torch.no_grad():
        trained = logits_of(draft_model, batch["ids"], batch["kv"])[0]
    for drafted in (5, 2):
        drafter = glide.Drafter(draft_model)
        for t in range(L, T, L):                                  # rounds start where blocks do
            drafter.begin(view(batch, 0 if t == L else t - L, t))
            logits = torch.cat([drafter.expand(ids[t + i:t + i + 1], [i - 1]) for i in range(drafted)])
            torch.testing.assert_close(logits, trained[t:t + drafted], **EXACT)
            drafter.keep(list(range(drafted)))

def test_queries_have_the_rope_of_the_target_s_keys(llama):
    """Difference 1: the key that the target caches at position 5 is its key at position 0, rotated by our table."""
    keys, ids = [], torch.arange(4)[:, None]
    for position in (0, 5):
        cache = transformers.DynamicCache()
        with torch.no_grad():
            llama(ids, position_ids=torch.full_like(ids, position), past_key_values=cache, use_cache=True)
        keys.append(cache.layers[0].keys)
    cos, sin = glide.target_angles(llama, 6)
    torch.testing.assert_close(glide.apply_rope(keys[0], cos[5], sin[5]), keys[1], atol=1e-6, rtol=0)

def test_no_entry_is_staler_than_in_training(llama):
    """Of a chain of five that is all accepted the last token, six behind the round's keys, begins a block of its own."""
    draft_model, batch = random_glide(llama, 2), batch_of(llama, text(30)[None])
    ids = batch["ids"][0]

    def second_keys(starts):
        """Keys of the second layer, where a token glimpses what lies before its block; starts: of the blocks."""
        of = torch.tensor([max(s for s in starts if s <= j) for j in range(30)])
        ropes = draft_model.ropes(torch.arange(30))
        seen = torch.ones(30, 30, dtype=torch.bool).tril()
        x = draft_model.layers[0](draft_model.embed(batch["ids"]), ropes, seen, batch["kv"], torch.arange(30) < of[:, None])
        return draft_model.layers[1].project(x, ropes.own)[1][0]                    # (heads, T, d)
    drafter, t, starts = glide.Drafter(draft_model), 7, [0, 5]
    with torch.no_grad():
        for accepted in (5, 5, 2, 5):                             # drafted tokens; with the root one more
            drafter.begin(view(batch, drafter.context, t))
            drafter.expand(ids[t:t + 5], [-1, 0, 1, 2, 3])
            drafter.keep(list(range(min(accepted + 1, 5))))
            starts += [t] + [t + 5] * (accepted == 5)
            t += accepted + 1
        drafter.begin(view(batch, drafter.context, t))
        torch.testing.assert_close(drafter.store[1, 0, 0, :, :t], second_keys(starts)[:, :t], **EXACT)
        assert (second_keys(starts) - second_keys([s for s in starts if s != 12]))[:, 12].abs().max() > 0.01, "the block matters"

@pytest.mark.parametrize("name", ["glide 2", "edd"])
def test_a_long_text_in_pieces_gives_the_logits_of_one_go(llama, name, monkeypatch):
    """GLIDE's prompt in chunks; contexts that outgrow the first capacity; a round that asks for nothing."""
    torch.manual_seed(6)
    batch, logits = {"ids": text(1300, 6)[None], "hidden": {2: torch.randn(1, 1300, 32, dtype=torch.float64)}}, []
    batch["kv"] = {m: torch.randn(2, 1, 4, 1300, 8, dtype=torch.float64) for m in (1, 2)}
    for chunk, steps in ((2000, (1200,)), (400, (500, 505, 1200))):
        monkeypatch.setattr(glide, "CHUNK", chunk)
        drafter, before = random_drafter(llama, name, **({"hidden": 2} if name == "edd" else {"length": 1300})), 0
        for t in steps:
            drafter.begin(view(batch, before, t))
            if t != 505:
                found = drafter.expand(batch["ids"][0, t:t + 1], [-1])
            drafter.keep([])
            before = t
        logits.append(found)
    torch.testing.assert_close(*logits, atol=1e-9 if name != "edd" else 1e-6, rtol=0)

# ---------------------------------------------------------------- losses
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_losses_are_what_their_names_say(llama, loss):
    """Cross entropy of the next token, or KL to the target's distribution, over the loss mask; the target learns nothing."""
    draft_model, batch = random_glide(llama, loss=loss, norm=True), batch_of(llama, torch.stack((text(13), text(13, 8))))
    batch["learn"][1, :4] = False
    batch["count"] = batch["learn"].sum()
    llama.zero_grad()
    found = draft_model.loss(batch)
    found.backward()
    assert all(p.grad is None and p.requires_grad for p in llama.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft_model.parameters())
    with torch.no_grad():
        log_p = logits_of(draft_model, batch["ids"], batch["kv"]).log_softmax(-1)
        log_t, total = batch["logits"].log_softmax(-1), 0
        for b, j in batch["learn"].nonzero().tolist():
            ce = -log_p[b, j, batch["ids"][b, j + 1]]
            total += ce if loss == "ce" else (log_t[b, j].exp() * (log_t[b, j] - log_p[b, j])).sum()
    assert found.item() == pytest.approx(total.item() / 20, abs=1e-5)

# ---------------------------------------------------------------- settings
def test_the_papers_settings_are_the_defaults():
    """Section 4.1: L = 5, l = N_T - N_D + m; 5.1: one layer; no norm before the glimpse."""
    model = tiny("llama", num_hidden_layers=6)
    c = glide.Config.for_target(model, 16)
    assert (c.block, c.layers, c.norm, c.loss, c.layers_read) == (5, 1, False, "ce", (5,))
    assert glide.Config.for_target(model, 16, 2).layers_read == (4, 5) and glide.Config.for_target(model, 16, layer=2).layers_read == (2,)
    for wrong in (dict(layers=2, layer=0), dict(layer=6)):
        with pytest.raises(ValueError, match="cannot be read"):
            glide.Config.for_target(model, 16, **wrong)
