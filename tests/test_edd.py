"""EDD: the mask of Figure 3(a), Eq. 4, training equals decoding, each KV entry computed once, nothing stale; EAGLE, MEDUSA-1; targets."""
import copy
import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CLASSES, VOCAB, plain, random_drafter, random_edd, random_glide, random_named, shared, tiny, weighty
from test_glide import LATENT, batch_of, other, save, text, tree_logits, view

import cape
import edd
import glide
import verify
from beyond import eagle, medusa
from runtime import load, drafters as runtime_drafters
from runtime.targets import any_target

LAST = 3                         # the tiny targets' last hidden states, which EAGLE and MEDUSA read
FEW = ["llama-eager", "qwen2-mixed"]        # targets that between them have grouped keys, biases, windows, both kinds of attention
ALONE = {"edd": (edd.EDD, edd.Drafter), "eagle": (eagle.Eagle, eagle.Drafter), "medusa": (medusa.Medusa, medusa.Drafter)}

def rounding(model):
    """How far two ways to one number may be apart: eager attention takes its softmax in float32."""
    return 1e-3 if model.config._attn_implementation == "eager" else 1e-6

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

# ---------------------------------------------------------------- alone in a project
@pytest.mark.parametrize("target, name", [("llama", "edd"), ("mistral", "edd"), ("qwen2", "edd"), ("qwen2", "eagle"), ("mistral", "medusa")])
def test_alone_it_says_what_runtime_parts_makes_it_say(target, name, tmp_path):
    """Llama, Mistral, Qwen2: the same logits; confidence is calibrated, and nothing asks for gradients."""
    model = shared(target)
    config = runtime_drafters.config_of(name, model, hidden=2)
    alone, drafter_class = ALONE[config.kind]
    save(tmp_path, random_named(model, name), kind=name, validation={"temperature": 0.7})
    drafters = edd.load(tmp_path, model, alone, drafter_class)[0], runtime_drafters.load(edd, tmp_path, model)[0]
    torch.testing.assert_close(*tree_logits(drafters, batch_of(model, text(12)[None], {2, LAST})))
    child = torch.tensor([1]), [3]
    torch.testing.assert_close(drafters[0].confidence(*child), (drafters[1].expand(*child) / 0.7).softmax(-1).float())

# ---------------------------------------------------------------- equations 3 and 4
def test_dual_block_mask_entry_by_entry():
    for T, L in ((1, 5), (7, 1), (12, 4), (13, 5), (6, 9)):
        i, k = torch.arange(T)[:, None], torch.arange(T)
        start = i // L * L                                      # where the block of t_i begins: j L
        # Hidden states strictly before the block; tokens of the own block up to itself
        assert torch.equal(edd.dual_block_mask(T, L), torch.cat((k < start, (start <= k) & (k <= i)), 1))

@pytest.mark.parametrize("name, block, encoding", [
    ("llama", 3, True), ("qwen2-mixed", 5, True), ("Gemma2", 5, False), ("DeepseekV3", 5, True), ("GptOss", 5, True)])
def test_training_equals_decoding(name, block, encoding):
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

@pytest.mark.parametrize("name", [*FEW, "Gemma3Text", "Olmo2", "DeepseekV3", "Mixtral", "GptOss"])
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

# ---------------------------------------------------------------- decoding
@pytest.mark.parametrize("target, name", [
    ("llama-eager", "glide"), ("llama-eager", "edd"), ("llama-eager", "medusa"), ("qwen2-mixed", "edd"), ("qwen2-mixed", "eagle")])
def test_a_round_costs_its_nodes_and_drafts_as_their_paths_alone(target, name):
    """Tokens that go through the layer's MLP (MEDUSA: its first head), and the logits, whatever was rejected before."""
    model = shared(target)
    drafter, passed = random_drafter(model, name), []
    fresh, of_glide = type(drafter)(drafter.model), name == "glide"
    part = drafter.model.heads[0] if name == "medusa" else drafter.model.layers[0].up if of_glide else drafter.model.layer.mlp
    tolerance = 1e-9 if of_glide else rounding(model)
    g, batch = torch.Generator().manual_seed(5), batch_of(model, text(24, 5)[None], {2, LAST})
    ids, t, before = batch["ids"][0], 4, 0
    while t < 18:
        hook = part.register_forward_pre_hook(lambda module, args: passed.append(args[0].numel() // args[0].shape[-1]))
        passed.clear()
        drafter.begin(view(batch, before, t))
        root = drafter.expand(ids[t:t + 1], [-1])
        siblings = drafter.expand(torch.stack(((ids[t + 1] + 1) % VOCAB, ids[t + 1])), [0, 0])
        lone = drafter.expand(ids[t + 2:t + 3], [2])
        assert passed == ([1] if name == "medusa" else [1, 2, 1]), "committed tokens cost keys and values alone, once"
        hook.remove()
        for calls in ([0, 3], [0, 1, 2, 3]):                    # the path at once, and one by one
            fresh.reset()
            fresh.begin(view(batch, 0, t))
            alone = [fresh.expand(ids[t + i:t + j], list(range(i - 1, j - 1))) for i, j in zip(calls, calls[1:])]
            torch.testing.assert_close(torch.cat((root, siblings[1:], lone)), torch.cat(alone), atol=tolerance, rtol=0)
        gained = int(torch.randint(5, (1,), generator=g))
        drafter.keep([0, 2, 3][:1 + gained])
        before, t = t, t + 1 + gained

def test_the_cache_grows_and_rounds_without_expand_lose_nothing(llama):
    """The same logits as in one go; a builder may propose the root alone without asking.  A gap in the text is noticed."""
    hidden = torch.randn(1, 1300, 32, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    batch = {"ids": text(1300, 6)[None], "kv": {}, "hidden": {2: hidden}}
    drafter, fresh = edd.Drafter(random_edd(llama)), edd.Drafter(random_edd(llama))
    for before, t in ((0, 200), (200, 201), (201, 1200)):
        drafter.begin(view(batch, before, t))
        if t != 201:
            row = drafter.expand(batch["ids"][0, t:t + 1], [-1])
        drafter.keep([])
    fresh.begin(view(batch, 0, 1200))
    torch.testing.assert_close(row, fresh.expand(batch["ids"][0, 1200:1202], [-1, 0])[:1], atol=1e-6, rtol=0)
    assert drafter.cache.kept["keys"].shape[2] > 1200
    with pytest.raises(AssertionError, match="cannot go on from token 1201 after 1200"):
        drafter.begin(view(batch, 1201, 1203))

# ---------------------------------------------------------------- losses, and what learns
@pytest.mark.parametrize("kinds", [ALONE, runtime_drafters.KINDS])
@pytest.mark.parametrize("name", ["edd", "vdm-ce", "eagle", "medusa"])
def test_no_gradient_reaches_the_target_and_all_of_the_drafter_learns(llama, name, kinds):
    llama.zero_grad()
    config = runtime_drafters.config_of(name, llama, hidden=2)
    draft_model = weighty(lambda: kinds[config.kind][0](config, llama), 1)
    batch = batch_of(llama, text(24).view(2, 12), {draft_model.config.hidden})
    draft_model.loss(batch | {"block": None, "random": np.random.default_rng(0)}).backward()
    assert all(p.grad is None and p.requires_grad for p in llama.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft_model.parameters())

@pytest.mark.parametrize("name", ["edd", "edd-ce", "vdm", "vdm-ce"])
def test_losses_are_what_their_names_say(llama, name):
    """KL(P_t || P_d) of Eq. 4 over all positions, or the cross entropy of the next token, written out; VDM reads no hidden states."""
    batch, draft_model = batch_of(llama, text(28, 9).view(2, 14), {2}), random_edd(llama, **edd.VARIANTS[name])
    ids = batch["ids"]
    with torch.no_grad():
        expected = draft_model.head(draft_model(ids, batch["hidden"][2], 5))
        log_p_target, log_p_draft = batch["logits"].log_softmax(-1), expected.log_softmax(-1)
        kl = (log_p_target.exp() * (log_p_target - log_p_draft)).sum(-1)[:, :-1].mean()
        ce = torch.stack([-log_p_draft[b, i, ids[b, i + 1]] for b in range(2) for i in range(13)]).mean()
        torch.testing.assert_close(draft_model.loss(batch).double(), ce if name.endswith("ce") else kl, atol=1e-5, rtol=1e-5)
        assert abs(ce - kl) > 0.1, "the two differ, or the above says nothing"
        other = draft_model.head(draft_model(ids, torch.randn_like(batch["hidden"][2]), 5))
        assert torch.equal(other, expected) == name.startswith("vdm")

@pytest.mark.parametrize("name, expected", [("edd", {5, 6, 7, 8, 9, 10}), ("edd-fixed", {5})])
def test_block_lengths_are_drawn_from_the_whole_range(llama, monkeypatch, name, expected):
    seen, batch, draft_model = set(), batch_of(llama, text(20)[None], {2}), random_edd(llama, **edd.VARIANTS[name])
    monkeypatch.setattr(draft_model, "forward", lambda ids, hidden, block: seen.add(block) or hidden)
    for step in range(60):
        draft_model.loss(batch | {"block": None, "random": np.random.default_rng([0, step])})
    assert seen == expected

@pytest.mark.parametrize("kinds", [ALONE, runtime_drafters.KINDS])
def test_it_is_the_targets_own_layer_with_its_embedding_and_head(kinds):
    """Copies that learn apart from the target's; the layer is fresh, of its class, drawn with its initializer_range; so is the norm."""
    own = tiny("qwen2", num_hidden_layers=6)
    own.config.initializer_range = 0.05
    own.get_decoder().norm.weight.data.fill_(3.0)
    draft_model, layer = kinds["edd"][0](edd.Config.for_target(own), own), own.get_decoder().layers[-1]
    assert type(draft_model.layer) is type(layer) and draft_model.config.hidden == 3, "the fourth-to-last of layers 0 (the embeddings) to 6"
    assert torch.equal(draft_model.embed.weight, own.get_input_embeddings().weight)
    torch.testing.assert_close(draft_model.head.weight, own.get_output_embeddings().weight)
    draft_model.head.weight.data += 1
    assert not torch.allclose(draft_model.head.weight, own.get_output_embeddings().weight), "a copy"
    assert [p.shape for p in draft_model.layer.parameters()] == [p.shape for p in layer.parameters()]
    assert all(0.045 < p.std() < 0.055 for p in draft_model.layer.parameters() if p.ndim == 2)
    assert torch.equal(draft_model.norm.weight, torch.ones_like(draft_model.norm.weight))
    for wrong in (0, 7, -7):
        with pytest.raises(ValueError, match="no layer's output"):
            edd.Config.for_target(own, wrong)

# ---------------------------------------------------------------- the baselines
@torch.no_grad()
@pytest.mark.parametrize("width", [32, 16])
def test_eagle_learns_what_it_drafts(width):
    """SmoothL1, a mean over D, and 0.1 sqrt(4096 / D) of the cross entropy to the target's distribution.  (Drafting: test_convert.py.)"""
    model = tiny("llama", hidden_size=width)
    batch, draft_model = batch_of(model, text(9, 4)[None], {LAST}), random_named(model, "eagle")
    ids, f = batch["ids"][0], batch["hidden"][LAST][0]
    torch.testing.assert_close(draft_model.logits(f), batch["logits"][0])              # the feature is what the target's head reads
    assert {k.split(".")[0] for k in draft_model.state_dict()} == {"fc", "layer"}, "the frozen parts are not its own"
    predicted = draft_model(ids[None], f[None])[0]
    trained, d = draft_model.logits(predicted), (predicted - f[1:]).abs()
    ce = -(batch["logits"][0, 1:].softmax(-1) * trained.log_softmax(-1)).sum(-1)
    expected = torch.where(d < 1, d * d / 2, d - 0.5).mean(-1) + 0.1 * (4096 / width) ** 0.5 * ce
    loss = expected[:-1].sum() / 8                              # of nine tokens the first has none
    torch.testing.assert_close(draft_model.loss(batch).double(), loss, atol=1e-5, rtol=1e-5)

@torch.no_grad()
def test_medusas_heads_are_shifted_as_the_docstring_says(llama):
    """head_k(f + SiLU(W_k f + b_k)) of f_i predicts t_{i+2+k}; a token at depth d comes from head d - 1."""
    batch = batch_of(llama, text(40, 1).view(2, 20), {LAST})
    draft_model = medusa.Medusa(medusa.Config.for_target(llama), llama)
    ids, f, found, loss = batch["ids"], batch["hidden"][LAST], [], 0
    assert len(draft_model.heads) == 5
    for head, x in zip(draft_model.heads, draft_model(f)):
        torch.testing.assert_close(head(x), batch["logits"])              # untrained: every head says what the target does
    draft_model = random_named(llama, "medusa")
    for k, (head, w) in enumerate(zip(draft_model.heads, draft_model.w)):
        z = f @ w.weight.T + w.bias.normal_()
        found.append((f + z * z.sigmoid()) @ head.weight.T)
        picked = [-found[k][b, i].log_softmax(-1)[ids[b, i + 2 + k]] for b in range(2) for i in range(20 - 2 - k)]
        loss += 0.8 ** k * sum(picked) / 38                               # 19 rows of each text count
    torch.testing.assert_close(draft_model.loss(batch).double(), loss, atol=1e-5, rtol=1e-5)
    drafter = medusa.Drafter(draft_model)
    drafter.begin(view(batch, 0, 8))
    rows = drafter.expand(torch.arange(8), [-1, 0, 0, 1, 3, 4, 5, 6])
    assert torch.equal(rows[1], rows[2]) and (rows[6:] == float("-inf")).all(), "whatever the path; nothing beyond the last head"
    assert not drafter.confidence(torch.arange(1), [7]).any()

# ---------------------------------------------------------------- checkpoints
def test_a_broken_or_foreign_checkpoint_is_one_sentence(llama, tmp_path):
    draft_model = random_edd(llama)
    save(tmp_path, draft_model, kind="edd")
    about, config, weights = tmp_path / "training.json", vars(draft_model.config), tmp_path / "model.safetensors"
    about.write_text(json.dumps({"config": config | {"kind": "edd", "heads": 5, "bias": True}}))        # as older checkpoints say
    assert type(edd.load(tmp_path, llama)[0]) is type(runtime_drafters.load(edd, tmp_path, llama)[0]) is edd.Drafter

    def refused(words, loaded=functools.partial(runtime_drafters.load, edd), model=llama):
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

# ---------------------------------------------------------------- runtime/drafters.py: what the target does, the drafters do
@functools.cache
def of_family(name):
    """A random target of the family, with norms that matter."""
    model = other(name, **{"num_key_value_heads": 4, "tie_word_embeddings": False, **FAMILIES[name]})
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return model

def fresh(model, kind, **more):
    config = runtime_drafters.config_of(kind, model, hidden=2, **more)
    return runtime_drafters.KINDS[kind][0](config, model)

def divergence(p_logits, q_logits):
    """The largest KL(p || q) of any row."""
    log_p, log_q = p_logits.double().log_softmax(-1), q_logits.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).max().item()

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
        drafter, _ = runtime_drafters.load(module, tmp_path / "drafter", model)
        out = verify.generate(any_target(model), drafter, cape.cape, [3, 1, 4], 6)
        assert out.tokens == plain(whole, [3, 1, 4], 6)
        runs.append([len(step.new) for step in out.rounds])
    assert runs[0] == runs[1]
