"""GLIDE and LongSpec: training equals decoding, nothing of the target is trained, nothing stale is kept; families by runtime/drafters.py."""
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
from conftest import ROOT, VOCAB, family, plain, random_edd, random_glide, shared, tiny, weighty
from safetensors.torch import load_file, save_file
from test_house import run_alone

import cape
import glide
import verify
from beyond import longspec
from runtime import drafters as runtime_drafters
from runtime.targets import any_target

EXACT = dict(atol=1e-9, rtol=0)

# ---------------------------------------------------------------- what test_edd.py and test_convert.py use, too
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
    return {"ids": ids, "kv": {i: (rows.keys, rows.values) for i, rows in enumerate(cache.layers)}, "logits": out.logits, "block": 5,
            "hidden": {k: out.hidden_states[k] for k in hidden}, "learn": learn, "count": learn.sum(),
            "sum": lambda loss, learn, *rows: loss(*(x[learn] for x in rows))}

def view(batch, since, t):
    """A View of the batch's first text."""
    kv = {m: (k[:, :, :t], v[:, :, :t]) for m, (k, v) in batch["kv"].items()}
    hidden = {k: h[0, since:t] for k, h in batch["hidden"].items()}
    return SimpleNamespace(tokens=batch["ids"][0, since:t], length=t, kv=kv, hidden=hidden)

def tree_logits(drafters, batch):
    """Of a tree, by drafters that are calibrated at temperature 0.7 -> [logits of each]"""
    found = []
    for drafter in drafters:
        drafter.begin(view(batch, 0, 7))
        found.append(drafter.expand(batch["ids"][0, 7:11], [-1, 0, 0, 1]))
        assert drafter.temperature == 0.7 and not found[-1].requires_grad
    return found

def save(folder, draft_model, **about):
    """A checkpoint as train.py writes it, but in full precision."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in draft_model.state_dict().items()}, folder / "model.safetensors")
    (folder / "training.json").write_text(json.dumps({"config": vars(draft_model.config), **about}))

# ---------------------------------------------------------------- alone in a project
@pytest.mark.parametrize("name, draft_model_of", [("glide", random_glide), ("edd", partial(random_edd, hidden=1))])
def test_a_stranger_uses_it_alone(name, draft_model_of, tmp_path, monkeypatch):
    """The docstring's script, in an empty folder that holds the module's file, a target and a drafter alone."""
    doc = ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8")))
    block = doc.split("Alone in a project")[1].split("\n\n")[1]
    lines, model = inspect.cleandoc(block).splitlines(), tiny("llama")
    assert 15 <= len(lines) <= 24 and all(line.startswith("    ") for line in block.splitlines())
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    (tmp_path / "script.py").write_text("\n".join([*lines, "open('said', 'w').write(repr(ids.tolist()))"]))
    model.save_pretrained(tmp_path / "my-target")
    save(tmp_path / f"my-{name}", draft_model_of(model), validation={"temperature": 0.8})
    monkeypatch.chdir(tmp_path)
    assert run_alone(tmp_path / "script.py") == 0
    said = ast.literal_eval((tmp_path / "said").read_text())
    assert len(said) >= 30 and said[3:] == plain(model, said[:3], len(said) - 3)

@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_alone_it_computes_what_runtime_parts_does(name, tmp_path):
    """Llama, Mistral, Qwen2: the same sizes, tables, start, logits; nothing asks for gradients."""
    model, batch = shared(name), batch_of(shared(name), text(12)[None])
    config, any_config = glide.Config.for_target(model, 32), runtime_drafters.glide_config(model, 32)
    assert vars(config).items() <= vars(any_config).items()
    ours, any_family = glide.Glide.beside(model, config, 40), runtime_drafters.Glide.beside(model, any_config, 40)
    assert torch.equal(ours.target_table, any_family.target_table) and ours.embed.weight.dtype == torch.float64
    assert any_family.start_from(model) and torch.equal(any_family.embed.weight, model.get_input_embeddings().weight)
    torch.testing.assert_close(any_family.head.weight, model.get_output_embeddings().weight)
    assert not random_glide(model).start_from(model), "a width of its own: it starts at random"
    save(tmp_path, any_family, kind="glide", validation={"temperature": 0.7})
    drafters = [glide.load(tmp_path, model, 40)[0], runtime_drafters.load(glide, tmp_path, model)[0]]
    assert torch.equal(*tree_logits(drafters, batch)) and not any(drafter.store.requires_grad for drafter in drafters)
    assert all(p.requires_grad for p in (*model.parameters(), *drafters[0].model.parameters()))

def test_a_drafter_of_another_target_is_refused_in_one_sentence(llama, tmp_path):
    save(tmp_path, random_glide(llama), kind="glide")
    for other_target in (tiny("llama", num_hidden_layers=1), tiny("llama", num_attention_heads=2, num_key_value_heads=2)):
        with pytest.raises(ValueError, match="made for another target") as error:
            runtime_drafters.load(glide, tmp_path, other_target)
        assert "\n" not in str(error.value)

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

def test_no_entry_is_staler_than_in_training(llama):
    """Of a chain of five that is all accepted the last token, six behind the round's keys, begins a block of its own."""
    draft_model, batch = random_glide(llama, 2), batch_of(llama, text(30)[None])
    ids = batch["ids"][0]

    def second_keys(starts):
        """Keys of the second layer, where a row glimpses what lies before its block; starts: of the blocks."""
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

def test_a_long_prompt_is_encoded_in_chunks(llama, monkeypatch):
    """A context longer than the first capacity, too: the same logits as in one go."""
    batch, logits = {"ids": text(1100, 6)[None], "hidden": {}}, []
    torch.manual_seed(6)
    batch["kv"] = {m: torch.randn(2, 1, 4, 1100, 8, dtype=torch.float64) for m in (1, 2)}
    for chunk, steps in ((2000, (1050,)), (400, (500, 1050))):
        monkeypatch.setattr(glide, "CHUNK", chunk)
        drafter, before = glide.Drafter(random_glide(llama, 2, length=1100)), 0
        for t in steps:
            drafter.begin(view(batch, before, t))
            logits.append(drafter.expand(batch["ids"][0, t:t + 1], [-1]))
            before = t
    torch.testing.assert_close(logits[0], logits[2], **EXACT)
    assert drafter.store.shape[-2] > 1050

@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_losses_are_what_their_names_say(llama, loss):
    """Cross entropy of the next token, or KL to the target's distribution, over the rows that learn; the target learns nothing."""
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

@pytest.mark.parametrize("draft_class", [glide.Glide, longspec.LongSpec])
def test_a_half_precision_target_loses_no_gradients(draft_class):
    """The mean over 131 072 tokens has gradients below float16's smallest number: none passes through the target's type."""
    keys, values = torch.randn(2, 1, 4, 40, 8, generator=torch.Generator().manual_seed(0)).half()
    gradients = []
    for target_type, own_type in ((torch.float64, torch.float64), (torch.float16, torch.float32)):
        model = tiny("llama").half().to(target_type)
        torch.manual_seed(0)
        draft_model = draft_class.beside(model, draft_class.config_class.for_target(model), 40).to(torch.float32).to(own_type)
        batch = {"ids": text(40)[None], "kv": {2: (keys.to(target_type), values.to(target_type))}, "count": 2 ** 17,
                 "learn": torch.ones(1, 40, dtype=torch.bool), "sum": lambda loss, learn, *chosen: loss(*(x[learn] for x in chosen))}
        draft_model.loss(batch).backward()
        gradients.append(draft_model.layers[0].glimpse_q.weight.grad.double())
    exact, found = gradients
    assert (found - exact).norm() < 1e-3 * exact.norm()

# ---------------------------------------------------------------- LongSpec: between the target's own embedding and head
@pytest.mark.parametrize("name, last_norm", [("qwen2", False), ("gemma", True)])
def test_longspec_trains_its_layer_alone_and_is_lossless(name, last_norm, tmp_path):
    """Nothing of the target is trained or saved; what it scales (Gemma's embeddings) is scaled here."""
    gemma = dict(num_attention_heads=4, tie_word_embeddings=False)
    model = other("Gemma", **gemma) if name == "gemma" else shared(name)
    batch = batch_of(model, text(14)[None])
    config = runtime_drafters.longspec_config(model, layer=1, last_norm=last_norm, feed_forward=16, window=3)
    module = weighty(lambda: runtime_drafters.LongSpec.beside(model, config, 64), 1)
    with torch.no_grad():
        found = model(batch["ids"], output_hidden_states=True)
        torch.testing.assert_close(module.embed(batch["ids"]), found.hidden_states[0], **EXACT)
        torch.testing.assert_close(module.head(found.hidden_states[-1]), found.logits, **EXACT)
    model.zero_grad()
    module.loss(batch).backward()
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(p.grad.abs().sum() > 0 for p in module.parameters())
    matrices = sum(p.numel() for p in module.parameters() if p.ndim == 2)
    assert config.multiply_adds() == matrices + VOCAB * 32 and config.layers_read == (1,)
    save(tmp_path / "new", module, kind="longspec")
    assert set(load_file(tmp_path / "new" / "model.safetensors")) == {n for n, _ in module.named_parameters()}
    # Older files of converted ones had copies of the target's matrices, and another kind.
    module.state_dict = lambda: {**dict(module.named_parameters()), "embed.weight": torch.ones(1), "head.weight": torch.ones(1)}
    save(tmp_path / "old", module, kind="glide" if not last_norm else "longspec")
    for folder in ("new", "old"):
        drafter, _ = runtime_drafters.load(glide, tmp_path / folder, model)
        made = verify.generate(any_target(model), drafter, cape.cape, [3, 1, 4], 8)
        assert made.tokens == plain(model, [3, 1, 4], 8)

# ---------------------------------------------------------------- settings
def test_the_papers_settings_are_the_defaults_and_others_are_kept():
    """Section 4.1: L = 5, l = N_T - N_D + m; 5.1: one layer; no norm before the glimpse.  Norms and tables: as convert.py sets them."""
    model = tiny("llama", num_hidden_layers=6)
    c = glide.Config.for_target(model, 16)
    assert (c.block, c.layers, c.norm, c.layers_read) == (5, 1, False, (5,)) and glide.Config(8, 8, 8).block == 5
    assert glide.Config.for_target(model, 16, 2).layers_read == (4, 5) and glide.Config.for_target(model, 16, layer=2).layers_read == (2,)
    with pytest.raises(ValueError, match="cannot be read"):
        runtime_drafters.glide_config(model, 16, 2, layer=0)
    first = glide.Glide(glide.Config(99, 64, 128, glimpse=False), glide.angles(8, 16))
    assert all(p.ndim != 2 or 0.018 < p.std().item() < 0.022 for p in first.parameters()), "small first weights"
    sizes = dict(heads=2, eps=0.5, theta=50.0, glimpse_theta=7.0, target_heads=4, target_head_size=8, layers_read=(1,))
    for norm in (False, True):
        made = runtime_drafters.Glide(runtime_drafters.GlideConfig(20, 16, 24, **sizes, norm=norm), glide.angles(8, 12, 99.0))
        norms = [m for m in made.modules() if isinstance(m, torch.nn.RMSNorm)]
        assert len(norms) == 3 + norm and {m.eps for m in norms} == {0.5}
    assert torch.equal(made.own_table, torch.stack(glide.angles(8, 12, 50.0)))
    assert torch.equal(made.target_table, torch.stack(glide.angles(8, 12, 7.0)))

# ---------------------------------------------------------------- runtime/drafters.py: targets with a RoPE, or a cache, of their own kind
BASE = dict(rope_theta=10000.0, original_max_position_embeddings=10)
LONG = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 3.0, 4.0, 5.0])
PHI3 = dict(max_position_embeddings=256, original_max_position_embeddings=32, rope_parameters=LONG)
YARN = dict(BASE, rope_type="yarn", factor=4.0)
NTK = dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)
LATENT = dict(num_key_value_heads=4, kv_lora_rank=12, q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, head_dim=4,
              n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=3, moe_intermediate_size=16)
GEMMA3 = dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"], sliding_window=50)
GEMMA4 = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=50)
WIDE = dict(GEMMA4, global_head_dim=16, hidden_size_per_layer_input=0)                # keys of 8 and of 16 entries
SHARED = dict(GEMMA4, global_head_dim=8, hidden_size_per_layer_input=4, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=2)

def other(name, **more):
    """A tiny random model of a class that conftest.py's `tiny` has not."""
    return family(f"{name.removesuffix('Text')}ForCausalLM", **{"num_key_value_heads": 2, "head_dim": 8, **more})

def turned_by(model, length):
    """What the target's own rotary module says in a forward of so many tokens: cos, sin (length, r)."""
    said = []
    hook = model.get_decoder().rotary_emb.register_forward_hook(lambda module, args, out: said.append([x[0].float() for x in out]))
    with torch.no_grad():
        model(torch.ones(1, length, dtype=torch.long), use_cache=False)
    hook.remove()
    return said[0]

def keys_at(model, layer, position):
    """What the target caches of four tokens, each alone at this position -> K as attention uses them."""
    cache, ids = transformers.DynamicCache(), torch.arange(4)[:, None]
    with torch.no_grad():
        model(ids, position_ids=torch.full_like(ids, position), past_key_values=cache, use_cache=True)
    rows = cache.layers[layer]
    return parts.whole(rows.keys, rows.values, getattr(model.config, "kv_lora_rank", None))[0]

@pytest.mark.parametrize("rope, switch", [(LONG, 32), (NTK, 40), (YARN, 40)])
def test_tables_are_the_target_s_at_every_length(rope, switch):
    """A position has the same angles in training's short table and in decoding's long one: the target's own.  The target stays as it was."""
    model = other("Phi3", **PHI3) if rope is LONG else tiny("llama", rope_parameters=rope)
    context, ids = model.config.max_position_embeddings, text(40, 4)[None]
    before = model(ids, use_cache=False).logits
    table = runtime_drafters.target_angles(model, context + 1024)
    assert torch.equal(model(ids, use_cache=False).logits, before)
    for n in (2, 24, switch, context):
        for long, short, own in zip(table, runtime_drafters.target_angles(model, n), turned_by(model, n)):
            since = switch if n > switch else 0
            assert torch.equal(long[since:n], own[since:]) and torch.equal(long[:n], short)
    if rope in (LONG, NTK):
        with pytest.raises(ValueError, match="does not rotate as Llama does: use runtime/drafters.py"):
            glide.target_angles(model, 9)
    else:
        assert torch.equal(glide.target_angles(model, context + 1024)[1], table[1])

@pytest.mark.parametrize("name, layer, more", [
    ("Phi", 2, dict(partial_rotary_factor=0.5)), ("GptOss", 2, dict(num_local_experts=2, num_experts_per_tok=1)),
    ("DeepseekV3", 2, LATENT), ("Gemma3", 0, GEMMA3), ("Gemma3", 1, GEMMA3)])
def test_queries_have_the_rope_of_a_layer_s_own_keys(name, layer, more, tmp_path):
    """The key of a token at position 5 is its key at position 0, turned by the table of a drafter that was loaded."""
    model = other(name, **more)
    config = runtime_drafters.glide_config(model, 24, layer=layer)
    save(tmp_path, runtime_drafters.Glide.beside(model, config, 24))
    drafter, _ = runtime_drafters.load(glide, tmp_path, model)
    here, there = keys_at(model, layer, 0), keys_at(model, layer, 5)
    cos, sin = drafter.model.target_table
    # A scaled table (YaRN's) has scaled the key at position 0, too.
    turned = parts.apply_partial_rope(here, cos[5] / cos[0], sin[5] / cos[0])
    assert (there - here).abs().max() > 0.1
    torch.testing.assert_close(turned, there, atol=1e-5, rtol=0)

@pytest.mark.parametrize("name, more", [("DeepseekV3", LATENT), ("Gemma4", WIDE)])
def test_sizes_are_those_of_what_the_target_caches(name, more):
    """Latents, or sizes that differ by layer: training equals decoding.  (The output is plain decoding's: test_families.py.)"""
    model = other(name, **more)
    drafter, batch = glide.Drafter(random_glide(model)), batch_of(model, text(12)[None])
    if more.get("kv_lora_rank"):                                  # one head: what turns and the latent; the latent
        keys, values = parts.whole(*batch["kv"][2], 12)
        assert torch.equal(keys, torch.cat(batch["kv"][2][::-1], -1)) and torch.equal(values, batch["kv"][2][0]) and keys.shape[-1] == 16
    with torch.no_grad():
        trained = logits_of(drafter.model, batch["ids"], batch["kv"])[0]
    drafter.begin(view(batch, 0, 5))
    torch.testing.assert_close(drafter.expand(batch["ids"][0, 5:10], [-1, 0, 1, 2, 3]), trained[5:10], **EXACT)

@pytest.mark.parametrize("name, more, message", [
    ("Lfm2", dict(layer_types=["conv", "full_attention", "conv"]), "Lfm2ForCausalLM does not cache keys and values"),
    ("Gemma4", WIDE, "keys of several sizes"), ("Gemma4", SHARED, "layer 3 of the target cannot be read .* it has layers 0 to 1"), ("Llama", {}, "heads of odd size: change the width"),
    ("Whisper", {}, "WhisperForCausalLM caches 4 heads, and its configuration says 6"),
])
def test_what_glide_cannot_read_is_said_in_one_sentence(name, more, message):
    if name == "Whisper":
        sizes = dict(vocab_size=VOCAB, d_model=24, max_target_positions=40, pad_token_id=0, encoder_layers=1, decoder_layers=2,
                     encoder_attention_heads=6, decoder_attention_heads=4)
        model = transformers.WhisperForCausalLM(transformers.WhisperConfig(**sizes))
    else:
        model = other(name, **more)
    with pytest.raises(ValueError, match=message) as error:
        how = {"layer": 3} if more is SHARED else {"layers": 2} if more is WIDE else {}
        runtime_drafters.glide_config(model, 33 if name == "Llama" else 16, **how)
    assert "\n" not in str(error.value) and error.value.__suppress_context__ == (name == "Lfm2")
