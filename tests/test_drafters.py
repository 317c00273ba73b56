"""Drafters for other families of targets (runtime/parts.py): what the target does with its parts, the drafters do.

Moved here as they stood from test_glide.py and test_edd.py, which test glide.py and edd.py alone.
"""
import copy
import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import CLASSES, VOCAB, family, plain, random_edd, random_glide, random_named, shared, tiny, weighty
from test_edd import LAST, rounding
from test_glide import EXACT, batch_of, logits_of, save, text, view

import cape
import edd
import glide
import verify
from beyond import eagle, medusa
from runtime import load, parts
from runtime.families import any_target

ALONE = {"edd": (edd.EDD, edd.Drafter), "eagle": (eagle.Eagle, eagle.Drafter), "medusa": (medusa.Medusa, medusa.Drafter)}

def tree_logits(drafters, batch):
    """Of a tree, by drafters that are calibrated at temperature 0.7 -> [logits of each]"""
    found = []
    for drafter in drafters:
        drafter.begin(view(batch, 0, 7))
        found.append(drafter.expand(batch["ids"][0, 7:11], [-1, 0, 0, 1]))
        assert drafter.temperature == 0.7 and not found[-1].requires_grad
    return found

# ---------------------------------------------------------------- Llama, Mistral, Qwen2: as the files alone
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_alone_it_computes_what_runtime_parts_does(name, tmp_path):
    """Llama, Mistral, Qwen2: the same sizes, tables, start, logits; nothing asks for gradients."""
    model, batch = shared(name), batch_of(shared(name), text(12)[None])
    config, any_config = glide.Config.for_target(model, 32), parts.glide_config(model, 32)
    assert vars(config).items() <= vars(any_config).items()
    ours, any_family = glide.Glide.for_target(model, config, 40), parts.Glide.for_target(model, any_config, 40)
    assert torch.equal(ours.target_table, any_family.target_table) and ours.embed.weight.dtype == torch.float64
    assert any_family.start_from(model) and torch.equal(any_family.embed.weight, model.get_input_embeddings().weight)
    torch.testing.assert_close(any_family.head.weight, model.get_output_embeddings().weight)
    assert not random_glide(model).start_from(model), "a width of its own: it starts at random"
    save(tmp_path, any_family, kind="glide", validation={"temperature": 0.7})
    drafters = [glide.load(tmp_path, model, 40)[0], parts.load(glide, tmp_path, model)[0]]
    assert torch.equal(*tree_logits(drafters, batch)) and not any(drafter.store.requires_grad for drafter in drafters)
    assert all(p.requires_grad for p in (*model.parameters(), *drafters[0].model.parameters()))

def test_a_drafter_of_another_target_is_refused_in_one_sentence(llama, tmp_path):
    save(tmp_path, random_glide(llama), kind="glide")
    for other_target in (tiny("llama", num_hidden_layers=1), tiny("llama", num_attention_heads=2, num_key_value_heads=2)):
        with pytest.raises(ValueError, match="made for another target") as error:
            parts.load(glide, tmp_path, other_target)
        assert "\n" not in str(error.value)

@pytest.mark.parametrize("target, name", [("llama", "edd"), ("mistral", "edd"), ("qwen2", "edd"), ("qwen2", "eagle"), ("mistral", "medusa")])
def test_alone_it_says_what_runtime_parts_makes_it_say(target, name, tmp_path):
    """Llama, Mistral, Qwen2: the same logits, and nothing asks for gradients."""
    model = shared(target)
    config = parts.config_of(name, model, hidden=2)
    alone, drafter_class = ALONE[config.kind]
    save(tmp_path, random_named(model, name), kind=name, validation={"temperature": 0.7})
    drafters = edd.load(tmp_path, model, alone, drafter_class)[0], parts.load(edd, tmp_path, model)[0]
    torch.testing.assert_close(*tree_logits(drafters, batch_of(model, text(12)[None], {2, LAST})))

# ---------------------------------------------------------------- runtime/parts.py: targets with a RoPE, or a cache, of their own kind
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
    table = parts.target_angles(model, context + 1024)
    assert torch.equal(model(ids, use_cache=False).logits, before)
    for n in (2, 24, switch, context):
        for long, short, own in zip(table, parts.target_angles(model, n), turned_by(model, n)):
            since = switch if n > switch else 0
            assert torch.equal(long[since:n], own[since:]) and torch.equal(long[:n], short)
    if rope in (LONG, NTK):
        with pytest.raises(ValueError, match="is not Llama.s, which glide.py needs"):
            glide.target_angles(model, 9)
    else:
        assert torch.equal(glide.target_angles(model, context + 1024)[1], table[1])

@pytest.mark.parametrize("name, layer, more", [
    ("Phi", 2, dict(partial_rotary_factor=0.5)), ("GptOss", 2, dict(num_local_experts=2, num_experts_per_tok=1)),
    ("DeepseekV3", 2, LATENT), ("Gemma3", 0, GEMMA3), ("Gemma3", 1, GEMMA3)])
def test_queries_have_the_rope_of_a_layer_s_own_keys(name, layer, more, tmp_path):
    """The key of a token at position 5 is its key at position 0, turned by the table of a drafter that was loaded."""
    model = other(name, **more)
    config = parts.glide_config(model, 24, layer=layer)
    save(tmp_path, parts.Glide.for_target(model, config, 24))
    drafter, _ = parts.load(glide, tmp_path, model)
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
])
def test_what_glide_cannot_read_is_said_in_one_sentence(name, more, message):
    model = other(name, **more)
    with pytest.raises(ValueError, match=message) as error:
        how = {"layer": 3} if more is SHARED else {"layers": 2} if more is WIDE else {}
        parts.glide_config(model, 33 if name == "Llama" else 16, **how)
    assert "\n" not in str(error.value) and error.value.__suppress_context__ == (name == "Lfm2")

GEMMA = dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=9)
FAMILIES = {
    "Granite": dict(embedding_multiplier=3.0, logits_scaling=4.0, residual_multiplier=0.5, attention_multiplier=0.2),
    "Gemma2": GEMMA | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "Gemma3Text": GEMMA | dict(layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
    "Olmo2": {},
    "DeepseekV3": LATENT | dict(first_k_dense_replace=1),
    "Mixtral": dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "GptOss": dict(num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=9),
}

# ---------------------------------------------------------------- runtime/parts.py: what the target does, the drafters do
@functools.cache
def of_family(name):
    """A random target of the family, with norms that matter."""
    model = other(name, **{"num_key_value_heads": 4, "tie_word_embeddings": False, **FAMILIES[name]})
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return model

def fresh(model, kind, **more):
    config = parts.config_of(kind, model, hidden=2, **more)
    return parts.KINDS[config.kind][0](config, model)

def divergence(p_logits, q_logits):
    """The largest KL(p || q) of any row."""
    log_p, log_q = p_logits.double().log_softmax(-1), q_logits.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).max().item()

@pytest.mark.parametrize("name, block, encoding", [("Gemma2", 5, False), ("DeepseekV3", 5, True), ("GptOss", 5, True)])
def test_edd_s_training_equals_its_decoding(name, block, encoding):
    """Rounds that begin where blocks do: the dual-block forward's logits; soft-capping, sinks, keys and values of different sizes."""
    model = shared(name) if name in CLASSES else of_family(name)
    atol = 1e-4 if name not in CLASSES else 1e-9 if rounding(model) == 1e-6 else 1e-5
    T, draft_model = 13, weighty(lambda: fresh(model, "edd", encoding=encoding), 1)
    drafter, batch = edd.Drafter(draft_model), batch_of(model, text(T)[None], {2})
    ids, hidden = batch["ids"], batch["hidden"][2]
    with torch.no_grad():
        trained = draft_model.head(draft_model(ids, hidden, block))[0]
        for t in range(block, T, block):
            drafter.begin(view(batch, t - block, t))
            for i in range(t, min(t + block, T)):
                torch.testing.assert_close(drafter.expand(ids[0, i:i + 1], [i - t - 1])[0], trained[i], atol=atol, rtol=0)
            drafter.keep(list(range(min(block, T - t))))

@pytest.mark.parametrize("name", ["qwen2-mixed", "Gemma3Text", "Olmo2", "DeepseekV3", "Mixtral", "GptOss"])
def test_the_soft_prompt_is_keys_and_values_alone(name):
    """As where hidden states go through the whole layer, each seeing itself alone: the same outputs and gradients, in every family."""
    model = shared(name) if name in CLASSES else of_family(name)
    torch.use_deterministic_algorithms(True)                    # memory that nobody writes is NaN
    draft_model, batch = weighty(lambda: fresh(model, "edd"), 1), batch_of(model, text(18, 1).view(2, 9), {2})
    torch.use_deterministic_algorithms(False)
    ids, hidden, weights = batch["ids"], batch["hidden"][2], [*draft_model.layer.parameters()]
    assert all(p.isfinite().all() for p in weights)
    assert all(0.015 < p.std() < 0.025 for p in weights if p.ndim == 3), "experts are drawn by initializer_range, 0.02"
    found = draft_model(ids, hidden, 4)
    x, mask = torch.cat((hidden, draft_model.embed(ids)), 1), torch.eye(18, dtype=torch.bool)
    mask[9:] = edd.dual_block_mask(9, 4)
    expected = draft_model.norm(draft_model.run_layer(x, torch.arange(9).repeat(1, 2), mask)[:, 9:])
    torch.testing.assert_close(found, expected, atol=rounding(model) / 100, rtol=0)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), weights, allow_unused=True) for x in (found, expected))):
        torch.testing.assert_close(a, b, atol=rounding(model), rtol=1e-3)

@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_s_parts_say(name):
    """Heads on the last feature, embeddings, and the layer with the last layer's weights say what the target's own do."""
    model, read, fed = of_family(name), [], []
    decoder = model.get_decoder()
    parts_of = decoder.layers[0], decoder.layers[-1], decoder.norm
    hooks = [part.register_forward_pre_hook(lambda module, args: read.append(args[0])) for part in parts_of]
    batch = batch_of(model, text(18, 1).view(2, 9), {LAST})
    first, last, normed = read[-3:]
    f, ids = batch["hidden"][LAST], batch["ids"]
    medusa, eagle, own = fresh(model, "medusa"), fresh(model, "eagle"), fresh(model, "edd")
    own.norm.load_state_dict(decoder.norm.state_dict())
    own.layer.load_state_dict(decoder.layers[-1].state_dict())
    hooks += [eagle.fc.register_forward_pre_hook(lambda module, args: fed.append(args[0]))]
    with torch.no_grad():
        of_medusa = [head(x) for head, x in zip(medusa.heads, medusa(f))]
        for logits in (*of_medusa, eagle.target.head(f), own.head(own.norm(normed))):
            assert divergence(batch["logits"], logits) < 1e-12
        # The scale or the cap matters, or the above says nothing
        if name in ("Granite", "Gemma2"):
            assert divergence(batch["logits"], model.get_output_embeddings()(f)) > 0.01
        torch.testing.assert_close(own.embed(ids), first)
        eagle(ids, f)
        torch.testing.assert_close(fed[0], torch.cat((first[:, 1:], f[:, :-1]), -1))
        assert (name == "Granite") == (not torch.allclose(model.get_input_embeddings()(ids), first))
        # Also where the first layer is of another kind (DeepSeek's is dense) or turns by another table (Gemma 3's)
        torch.testing.assert_close(own.causal(last), normed, atol=1e-5, rtol=1e-5)
    for hook in hooks:
        hook.remove()
    # In half precision the scale is found; to the bit, where there is none.
    in_half = fresh(copy.deepcopy(model).bfloat16(), "edd")
    assert in_half.target.scale == pytest.approx(own.target.scale, rel=0 if name in ("Mixtral", "Gemma2") else 5e-3, abs=0)

@pytest.mark.parametrize("what", ["embeddings", "last layer", "logits"])
def test_a_target_whose_parts_are_used_otherwise_is_refused(what):
    """Each proof by itself: noise on what the first layer reads, on what the last one gives, or on the logits."""
    model, calls = tiny("llama"), []
    noise = torch.randn(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    def noisy_once(module, args, *out):
        calls.append(module)                                    # the first call is the target's own forward's
        if out:
            return SimpleNamespace(logits=out[0].logits + noise[:VOCAB])
        return (args[0] + noise, *args[1:]) if len(calls) == 1 else None
    part = {"embeddings": model.model.layers[0], "last layer": model.model.norm, "logits": model}[what]
    (part.register_forward_hook if part is model else part.register_forward_pre_hook)(noisy_once)
    with pytest.raises(ValueError, match=f"LlamaForCausalLM is built otherwise .its {what} "):
        fresh(model, "edd")
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == (what != "logits"), "only this test's own hook stays"

# ---------------------------------------------------------------- parts of a target that are quantised, or lie elsewhere

@pytest.mark.parametrize("name, apart", [("glide", "model.embed_tokens"), ("edd", "model.layers.2")])
def test_a_target_that_accelerate_spreads(name, apart, tmp_path):
    """One part lies on the disk, with the head: the same drafter says the same."""
    pytest.importorskip("accelerate")
    whole = tiny("llama").float()
    whole.save_pretrained(tmp_path / "model")
    modules = ["model.embed_tokens", "model.rotary_emb", "model.norm", *(f"model.layers.{i}" for i in range(3))]
    places = dict.fromkeys(modules, "cpu") | {"lm_head": "disk", apart: "disk"}
    spread = type(whole).from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk")
    module, draft_model = (glide, random_glide(whole, 2)) if name == "glide" else (edd, random_named(whole, name))
    save(tmp_path / "drafter", draft_model.float(), kind=name)
    assert load.same_target(load.fingerprint(whole), load.fingerprint(spread))
    runs = []
    for model in (whole, spread):
        drafter, _ = parts.load(module, tmp_path / "drafter", model)
        out = verify.generate(any_target(model), drafter, cape.cape, [3, 1, 4], 6)
        assert out.tokens == plain(whole, [3, 1, 4], 6)
        runs.append([len(step.new) for step in out.rounds])
    assert runs[0] == runs[1]

@pytest.mark.parametrize("name", ["edd", "vdm-ce", "eagle", "medusa"])
def test_no_gradient_reaches_the_target_and_all_of_the_drafter_learns(llama, name):
    llama.zero_grad()
    draft_model = weighty(lambda: fresh(llama, name), 1)
    batch = batch_of(llama, text(24).view(2, 12), {draft_model.config.hidden})
    draft_model.loss(batch | {"block": None, "random": np.random.default_rng(0)}).backward()
    assert all(p.grad is None and p.requires_grad for p in llama.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft_model.parameters())

# ---------------------------------------------------------------- checkpoints
def test_a_broken_or_foreign_checkpoint_is_one_sentence(llama, tmp_path):
    draft_model = random_edd(llama)
    save(tmp_path, draft_model, kind="edd")
    about, config, weights = tmp_path / "training.json", vars(draft_model.config), tmp_path / "model.safetensors"
    about.write_text(json.dumps({"config": config | {"kind": "edd", "heads": 5, "bias": True}}))        # as older checkpoints say
    assert type(edd.load(tmp_path, llama)[0]) is type(parts.load(edd, tmp_path, llama)[0]) is edd.Drafter

    def refused(words, loaded=functools.partial(parts.load, edd), model=llama):
        with pytest.raises(ValueError, match=words) as error:
            loaded(tmp_path, model)
        assert "\n" not in str(error.value)
    for foreign in (dict(hidden_size=64), dict(num_hidden_layers=1)):
        refused("another target", edd.load, tiny("llama", **foreign))
    refused("another target", model=tiny("llama", vocab_size=11))
    for broken in ({"config": {**config, "kind": "hydra"}}, {}):
        about.write_text(json.dumps(broken))
        refused("is damaged")
    save(tmp_path, draft_model, kind="edd")
    weights.write_bytes(b"half")
    refused("is damaged")
    weights.unlink()
    refused("model.safetensors is missing")
