"""GLIDE: training equals decoding, trees equal paths, nothing of the target learns, nothing stale is kept."""
import inspect
import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import SIZES, VOCAB, plain, tiny

import cape
import glide
import verify
from train import frozen_forward, save_drafter


def random_drafter(*args, **more):
    return glide.Drafter(random_glide(*args, **more))


def random_glide(model, layers=1, glimpse=True, width=24, seed=1, length=64, **more):
    """A draft model with weights large enough that every part matters, float64."""
    torch.manual_seed(seed)
    config = glide.Config.for_target(model, width, layers, glimpse, **more)
    draft_model = glide.Glide(config, glide.target_angles(model, length)).double().eval()
    for p in draft_model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.3)
    return draft_model


def view(ids, kv, since, t):
    return SimpleNamespace(tokens=ids[since:t], length=t, kv={m: (k[:, :, :t], v[:, :, :t]) for m, (k, v) in kv.items()}, hidden={})


@pytest.mark.parametrize("drafted", [5, 4, 2])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("glimpse", [True, False])
def test_training_equals_decoding_with_the_delayed_cache(model, layers, glimpse, drafted):
    """drafted < 5: accepted tokens that have no row yet (CAPE's extras, a chain's last) are encoded in the next round."""
    L, T = 5, 20
    draft_model = random_glide(model, layers, glimpse)
    drafter = glide.Drafter(draft_model)
    ids = torch.randint(VOCAB, (1, T), generator=torch.Generator().manual_seed(2))
    batch = frozen_forward(model, ids)
    with torch.no_grad():
        trained = draft_model(ids, batch["kv"])[0]
        for t in range(L, T, L):                                  # rounds start where blocks do
            drafter.begin(view(ids[0], batch["kv"], 0 if t == L else t - L, t))
            for i in range(drafted):
                row = drafter.expand(ids[0, t + i:t + i + 1], [i - 1])[0]
                torch.testing.assert_close(row, trained[t + i], atol=1e-9, rtol=0)
            drafter.keep(list(range(drafted)))
    if glimpse:                                                   # the glimpse matters, or the test above says nothing
        other = {m: (k.roll(1, -1), v.roll(1, -1)) for m, (k, v) in batch["kv"].items()}
        with torch.no_grad():
            assert (draft_model(ids, other)[0] - trained)[L:].abs().max() > 0.01


def test_an_evaluation_loss_does_not_see_the_future(model):
    """Changing the target's keys and values from position k on leaves all rows of blocks up to k's alone."""
    draft_model, L = random_glide(model, 2), 5
    ids = torch.randint(VOCAB, (1, 20))
    kv = frozen_forward(model, ids)["kv"]
    with torch.no_grad():
        base = draft_model(ids, kv)
        for k in (0, 4, 5, 12, 19):
            changed = {m: (torch.cat((a[:, :, :k], a[:, :, k:] + 1), 2), torch.cat((b[:, :, :k], b[:, :, k:] - 1), 2)) for m, (a, b) in kv.items()}
            blind = (k // L + 1) * L                              # the first row that may see position k
            out = draft_model(ids, changed)
            assert torch.equal(out[:, :blind], base[:, :blind])
            assert blind >= 20 or not torch.allclose(out[:, blind:], base[:, blind:])


def test_block_mask_on_fifteen_tokens():
    """A ... O in blocks of five: the row of H sees A ... E alone."""
    mask, names = glide.block_mask(15, 5), "ABCDEFGHIJKLMNO"
    sees = {names[j]: "".join(names[k] for k in range(15) if mask[j, k]) for j in range(15)}
    assert sees["H"] == "ABCDE" and sees["A"] == sees["E"] == "" and sees["F"] == sees["J"] == "ABCDE"
    assert sees["K"] == sees["O"] == "ABCDEFGHIJ"


def test_no_gradient_reaches_the_target(llama):
    llama.zero_grad()
    llama.requires_grad_(True)
    draft_model = random_glide(llama)
    loss = draft_model.loss(frozen_forward(llama, torch.randint(VOCAB, (2, 15))))
    loss.backward()
    assert all(p.grad is None for p in llama.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft_model.parameters())


@pytest.mark.parametrize("layers", [1, 2])
def test_rows_of_a_tree_equal_paths_drafted_alone(model, layers):
    drafter = random_drafter(model, layers)
    ids = torch.randint(VOCAB, (13,), generator=torch.Generator().manual_seed(3))
    kv = frozen_forward(model, ids[None])["kv"]
    tokens = torch.tensor([4, 1, 2, 7, 7, 3, 5, 0, 2])
    parents = [-1, 0, 0, 1, 2, 2, 3, 3, 5]
    with torch.no_grad():
        drafter.reset()
        drafter.begin(view(ids, kv, 0, 12))
        rows = torch.cat([drafter.expand(tokens[a:b], parents[a:b]) for a, b in ((0, 1), (1, 3), (3, 6), (6, 9))])
        for node in range(9):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            drafter.reset()
            drafter.begin(view(ids, kv, 0, 12))
            for i, n in enumerate(path):
                alone = drafter.expand(tokens[n:n + 1], [i - 1])[0]
            torch.testing.assert_close(rows[node], alone, atol=1e-9, rtol=0)


def test_a_whole_chain_in_one_call_equals_one_by_one(model):
    drafter = random_drafter(model, 2)
    ids = torch.randint(VOCAB, (13,))
    kv = frozen_forward(model, ids[None])["kv"]
    with torch.no_grad():
        for at_once in (True, False):
            drafter.reset()
            drafter.begin(view(ids, kv, 0, 9))
            rows = drafter.expand(ids[9:13], [-1, 0, 1, 2]) if at_once else torch.cat(
                [drafter.expand(ids[9 + i:10 + i], [i - 1]) for i in range(4)])
            first = rows if at_once else first                    # noqa: F821
    torch.testing.assert_close(rows, first, atol=1e-9, rtol=0)


@pytest.mark.parametrize("glimpse", [True, False])
def test_nothing_stale_after_rejections(model, glimpse):
    """After rounds of accepted and rejected branches the drafter says what a fresh one says (one layer)."""
    drafter, fresh = random_drafter(model, 1, glimpse), random_drafter(model, 1, glimpse)
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (30,), generator=g)
    kv = frozen_forward(model, ids[None])["kv"]
    t, before = 4, 0
    with torch.no_grad():
        drafter.reset()
        while t < 25:
            drafter.begin(view(ids, kv, before, t))
            fresh.reset()
            fresh.begin(view(ids, kv, 0, t))
            torch.testing.assert_close(drafter.expand(ids[t:t + 1], [-1]), fresh.expand(ids[t:t + 1], [-1]), atol=1e-9, rtol=0)
            # two branches: a wrong one first, then the right one, so that kept rows must move
            drafter.expand(torch.stack(((ids[t + 1] + 1) % VOCAB, ids[t + 1])), [0, 0])
            drafter.expand(ids[t + 2:t + 3], [2])
            gained = int(torch.randint(5, (1,), generator=g))     # 0 ... 4 accepted beyond the root; the fourth has no row
            drafter.keep([0, 2, 3][:1 + gained])                  # the right branch; its last tokens were never drafted
            before, t = t, t + 1 + gained


def test_layer_read_is_the_paper_s_and_a_flag_picks_another():
    model = tiny("llama", num_hidden_layers=6)
    assert glide.Config.for_target(model, 16, 2).layers_read == (4, 5)             # l = N_T - N_D + m, from 0
    assert glide.Config.for_target(model, 16, 1).layers_read == (5,)
    assert glide.Config.for_target(model, 16, 1, layer=2).layers_read == (2,)
    with pytest.raises(ValueError, match="cannot be read"):
        glide.Config.for_target(model, 16, 2, layer=0)


def test_each_layer_reads_its_own_layer_of_the_target(llama):
    draft_model = random_glide(llama, 2)
    ids = torch.randint(VOCAB, (1, 12), generator=torch.Generator().manual_seed(9))
    kv = frozen_forward(llama, ids)["kv"]
    for blind, reads in ((0, 2), (1, 1)):
        kept = draft_model.layers[blind].glimpse_o.weight.data.clone()
        draft_model.layers[blind].glimpse_o.weight.data.zero_()
        with torch.no_grad():
            base = draft_model(ids, kv)
            for changed in (0, 1, 2):
                other = {**kv, changed: tuple(rows + 1 for rows in kv[changed])}
                assert torch.equal(draft_model(ids, other), base) == (changed != reads)
        draft_model.layers[blind].glimpse_o.weight.data = kept


@pytest.mark.parametrize("shared", [1, 2, 4])
def test_a_glimpse_is_the_paper_s_equation(shared):
    """hd_j = SoftMax(Q_j K_i^T / sqrt(d_k)) V_i, head by head: head j reads key head i = j // (4 / shared)."""
    torch.manual_seed(3)
    config = glide.Config(VOCAB, 16, 32, heads=2, target_heads=4, target_head_size=8, target_value_size=6)
    config.layers_read = (7,)
    layer = glide.Layer(config, 0).double()
    x, mask = torch.randn(1, 5, 16).double(), torch.rand(5, 9) < 0.5
    mask[0], mask[1:, 0] = False, True                            # the first row sees nothing
    keys, values = torch.randn(1, shared, 9, 8).double(), torch.randn(1, shared, 9, 6).double()
    turn = torch.outer(torch.arange(4.0, 9.0), torch.tensor([1.0, 0.1, 0.01, 0.001])).double()
    heads = []
    for j in range(4):
        W = layer.glimpse_q.weight[8 * j:8 * j + 8]               # (d_k, d_D)
        a, b = (x[0] @ W.T).chunk(2, -1)
        q = torch.cat((a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()), -1)
        i = j * shared // 4
        scores = (q @ keys[0, i].T / 8 ** 0.5).masked_fill(~mask, float("-inf"))
        heads.append(scores.softmax(-1).nan_to_num(0.0) @ values[0, i])
    said = layer.glimpse(x, {7: (keys, values)}, (turn.cos().repeat(1, 2), turn.sin().repeat(1, 2)), mask)
    torch.testing.assert_close(said[0], torch.cat(heads, -1) @ layer.glimpse_o.weight.T, atol=1e-9, rtol=0)


def test_queries_turn_as_the_targets_keys_do(model):
    """Scores of the glimpse depend on distance alone: the target's rotary table is the model's own."""
    cos, sin = glide.target_angles(model, 20)
    head = model.config.hidden_size // model.config.num_attention_heads
    freq = 1.0 / 10000 ** (torch.arange(0, head, 2, dtype=torch.float64) / head)
    turn = torch.outer(torch.arange(20, dtype=torch.float64), freq).repeat(1, 2)
    torch.testing.assert_close(cos.double(), turn.cos(), atol=1e-5, rtol=0)
    q, k = torch.randn(head, dtype=torch.float64), torch.randn(head, dtype=torch.float64)
    score = [(glide.rotate(q, cos[i], sin[i]) * glide.rotate(k, cos[i - 3], sin[i - 3])).sum().item() for i in range(3, 20)]
    assert max(score) - min(score) < 1e-4


# ---------------------------------------------------------------- what edits would have to get past
def test_theta_is_the_targets():
    """A target with theta 500: the tables are its own module's, and theta 10000 would be far off."""
    model = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    cos, sin = glide.target_angles(model, 30)
    pair = torch.arange(0, 8, 2, dtype=torch.float64)
    turn = torch.outer(torch.arange(30, dtype=torch.float64), 500.0 ** (-pair / 8)).repeat(1, 2)
    torch.testing.assert_close(cos.double(), turn.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(sin.double(), turn.sin(), atol=1e-5, rtol=0)
    assert (glide.angles(8, 30)[0] - cos).abs().max() > 0.1


def test_the_loss_is_the_cross_entropy_of_the_next_token(llama):
    draft_model, ids = random_glide(llama), torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        batch = frozen_forward(llama, ids)
        loss, logits = draft_model.loss(batch), draft_model.predict(batch)
        assert torch.equal(logits, draft_model(ids, batch["kv"]))
        picked = [-logits[b, j].log_softmax(-1)[ids[b, j + 1]].item() for b in range(2) for j in range(12)]
    assert loss.item() == pytest.approx(sum(picked) / len(picked), abs=1e-5)


def test_rows_outgrow_their_first_allocation(llama):
    """A context longer than what was allocated at first: the same logits as in one go."""
    drafter, fresh = (random_drafter(llama, length=1400) for _ in range(2))
    g = torch.Generator().manual_seed(6)
    ids = torch.randint(VOCAB, (1300,), generator=g)
    kv = {2: tuple(torch.randn(1, 4, 1300, 8, generator=g, dtype=torch.float64) for _ in range(2))}
    with torch.no_grad():
        for before, t in ((0, 500), (500, 1200)):
            drafter.begin(view(ids, kv, before, t))
            row = drafter.expand(ids[t:t + 1], [-1])
        fresh.begin(view(ids, kv, 0, 1200))
        torch.testing.assert_close(row, fresh.expand(ids[1200:1201], [-1]), atol=1e-9, rtol=0)
    assert drafter.store.shape[3] > 1200


def test_a_checkpoint_brings_its_temperature(llama, tmp_path):
    single = tiny("llama").float()
    draft_model = random_glide(single).float()
    for temperature in (0.7, 1.3):
        save_drafter(tmp_path, draft_model, {"kind": "glide", "validation": {"temperature": temperature}})
        drafter, about = glide.load(tmp_path, single, 40)
        assert drafter.temperature == temperature and about["kind"] == "glide"
        for name, value in drafter.model.state_dict().items():
            assert torch.equal(value, draft_model.state_dict()[name].bfloat16().float())


@pytest.mark.parametrize("nodes", [70, 140])
def test_a_tree_of_many_nodes_equals_paths_drafted_alone(llama, nodes):
    drafter, alone = random_drafter(llama), random_drafter(llama)
    g = torch.Generator().manual_seed(nodes)
    ids = torch.randint(VOCAB, (9,), generator=g)
    kv = frozen_forward(llama, ids[None])["kv"]
    tokens = torch.randint(VOCAB, (nodes,), generator=g)
    # Layers of ten nodes below the root, each below a random node of the layer before.
    layers = [range(1 + 10 * i, min(nodes, 11 + 10 * i)) for i in range((nodes + 8) // 10)]
    parents = [-1] + [0] * len(layers[0])
    for above, layer in zip(layers, layers[1:]):
        parents += [above[int(torch.randint(len(above), (1,), generator=g))] for _ in layer]
    with torch.no_grad():
        drafter.begin(view(ids, kv, 0, 8))
        rows = torch.cat([drafter.expand(tokens[list(layer)], [parents[i] for i in layer]) for layer in ([0], *layers)])
        for node in (nodes - 1, nodes - 6, nodes // 2):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            alone.reset()
            alone.begin(view(ids, kv, 0, 8))
            one = alone.expand(tokens[path], list(range(-1, len(path) - 1)))
            torch.testing.assert_close(rows[node], one[-1], atol=1e-9, rtol=0)


# ---------------------------------------------------------------- targets that turn, or cache, in their own way
LONG = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[2.0, 3.0, 4.0, 5.0])
PHI3 = dict(max_position_embeddings=256, original_max_position_embeddings=32, rope_parameters=LONG)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=10)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=10)
NTK = dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)
LATENT = dict(num_key_value_heads=4, kv_lora_rank=12, q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=4,
              v_head_dim=6, head_dim=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
              first_k_dense_replace=3, moe_intermediate_size=16)
GEMMA3 = dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"], sliding_window=50)
GEMMA4 = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=50)
WIDE = dict(GEMMA4, global_head_dim=16, hidden_size_per_layer_input=0)                # keys of 8 and of 16 entries
SHARED = dict(GEMMA4, global_head_dim=8, hidden_size_per_layer_input=4, vocab_size_per_layer_input=VOCAB,
              num_kv_shared_layers=2)


def other(name, **more):
    """A tiny random model of a class that conftest.py has not, float32 where the class knows no float64."""
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    config = config_class(**{**SIZES, "num_key_value_heads": 2, "head_dim": 8, **more})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model = model if name == "GptOss" else model.double()
    for p in model.parameters():
        if p.ndim >= 2:
            torch.nn.init.normal_(p, std=0.25)
    return model


def turned_by(model, length):
    """What the target's own rotary module says in a forward of so many tokens: cos, sin (length, r)."""
    said = []
    rotary = model.get_decoder().rotary_emb
    hook = rotary.register_forward_hook(lambda module, args, out: said.append([x[0].float() for x in out]))
    with torch.no_grad():
        model(torch.ones(1, length, dtype=torch.long), use_cache=False)
    hook.remove()
    return said[0]


def keys_at(model, layer, position):
    """What the target caches of four tokens, each alone at this position -> K and V as attention uses them."""
    cache, ids = transformers.DynamicCache(), torch.arange(4)[:, None]
    with torch.no_grad():
        model(ids, position_ids=torch.full_like(ids, position), past_key_values=cache, use_cache=True)
    rows = cache.layers[layer]
    return glide.whole(rows.keys, rows.values, getattr(model.config, "kv_lora_rank", None))


@pytest.mark.parametrize("rope, switch", [(LONG, 32), (NTK, 40), (YARN, 40), (LLAMA3, 40)])
def test_tables_are_what_the_target_turns_by_at_every_length(rope, switch):
    """A position has one row in training's short table and in decoding's long one, and it is the target's own."""
    if rope is LONG:
        model = other("Phi3", **PHI3)
    else:
        model = tiny("llama", rope_parameters=rope)
    context = model.config.max_position_embeddings
    table = glide.target_angles(model, context + 1024)
    for n in (2, 24, switch, context):
        for rows, short, own in zip(table, glide.target_angles(model, n), turned_by(model, n)):
            since = switch if n > switch else 0
            assert torch.equal(rows[since:n], own[since:]) and torch.equal(rows[:n], short)
    # In a longer text, where there is such a thing, the same positions turn otherwise.
    at_once, _ = model.model.rotary_emb(torch.zeros(1), torch.arange(context + 1024)[None])
    assert torch.equal(table[0][context:], at_once[0, context:])
    differ = (table[0] - at_once[0])[:switch].abs().max().item()
    assert differ > 0.1 if rope in (LONG, NTK) else differ == 0


@pytest.mark.parametrize("rope", [LONG, NTK])
def test_reading_the_tables_leaves_the_target_as_it_was(rope, tmp_path):
    """Once asked for a longer text, dynamic NTK answers otherwise for one that fills the context."""
    model = other("Phi3", **PHI3) if rope is LONG else tiny("llama", rope_parameters=rope)
    ids = torch.randint(VOCAB, (1, 40), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        rows = glide.target_angles(model, 40)
        save_drafter(tmp_path, random_glide(model), {"kind": "glide"})
        glide.load(tmp_path, model)
        assert torch.equal(model(ids, use_cache=False).logits, before)
        # Nor do the tables depend on what the target has read.
        model(ids.repeat(1, 3), use_cache=False)
        assert all(torch.equal(a, b) for a, b in zip(glide.target_angles(model, 40), rows))


def test_a_drafter_says_the_same_whatever_length_it_is_loaded_with(tmp_path):
    model = other("Phi3", **PHI3)
    draft_model = random_glide(model, length=24)
    save_drafter(tmp_path, draft_model, {"kind": "glide"})
    ids = torch.randint(VOCAB, (1, 24), generator=torch.Generator().manual_seed(7))
    kv = frozen_forward(model, ids)["kv"]
    short, long = glide.load(tmp_path, model, 24)[0], glide.load(tmp_path, model)[0]
    draft_model.load_state_dict(short.model.state_dict())          # rounded to bfloat16, as it was saved
    with torch.no_grad():
        trained = draft_model(ids, kv)
        assert torch.equal(short.model(ids, kv), trained) and torch.equal(long.model(ids, kv), trained)
        long.begin(view(ids[0], kv, 0, 20))
        torch.testing.assert_close(long.expand(ids[0, 20:21], [-1])[0], trained[0, 20], atol=1e-9, rtol=0)


@pytest.mark.parametrize("name, layer, more", [
    ("Phi", 2, dict(partial_rotary_factor=0.5)), ("Phi3", 1, PHI3), ("Llama", 2, dict(rope_parameters=YARN)),
    ("GptOss", 2, dict(num_local_experts=2, num_experts_per_tok=1)), ("DeepseekV3", 2, LATENT),
    ("Gemma3", 0, GEMMA3), ("Gemma3", 1, GEMMA3),
])
def test_queries_turn_as_a_layer_s_own_keys_do(name, layer, more, tmp_path):
    """The key of a token at position 5 is its key at position 0, turned by the table of a drafter that was loaded."""
    model = other(name, **more)
    config = glide.Config.for_target(model, 24, layer=layer)
    save_drafter(tmp_path, glide.Glide(config, glide.target_angles(model, 24)), {})
    drafter, _ = glide.load(tmp_path, model)
    (here, _), (there, _) = keys_at(model, layer, 0), keys_at(model, layer, 5)
    cos, sin = drafter.model.target_cos, drafter.model.target_sin
    # A scaled table (YaRN's) has scaled the key at position 0, too.
    turned = glide.rotate(here, cos[5] / cos[0], sin[5] / cos[0])
    assert (there - here).abs().max() > 0.1
    torch.testing.assert_close(turned, there, atol=1e-5, rtol=0)


def test_tables_of_modules_that_say_it_otherwise():
    """DeepSeek V2's says complex numbers; a kind of layers may have no positions at all (as Beam's)."""
    rope = dict(rope_type="default", rope_theta=99.0)
    complex_numbers = other("DeepseekV2", **LATENT, topk_method="greedy", rope_parameters=rope)
    turn = torch.outer(torch.arange(10.0), torch.tensor([1.0, 99.0 ** -0.5])).repeat(1, 2)
    cos, sin = glide.target_angles(complex_numbers, 10)
    torch.testing.assert_close(cos, turn.cos())
    torch.testing.assert_close(sin, turn.sin())
    gemma = other("Gemma3", **GEMMA3)
    gemma.config.rope_parameters["full_attention"] = None
    assert [glide.target_angles(gemma, 10, (layer,))[0].shape for layer in range(3)] == [(10, 8), (10, 0), (10, 8)]


@torch.no_grad()
def test_a_glimpse_can_do_what_latent_attention_does():
    """The rows that a glimpse of DeepSeek reads, under absorbed queries, give the target's own attention."""
    model, h, T = other("DeepseekV3", **LATENT), 4, 9
    attention, seen = model.model.layers[2].self_attn, {}
    attention.register_forward_pre_hook(lambda m, args, more: seen.update(x=more["hidden_states"][0]), with_kwargs=True)
    attention.o_proj.register_forward_pre_hook(lambda m, args: seen.update(out=args[0][0]))
    kv = frozen_forward(model, torch.randint(VOCAB, (1, T)))["kv"]
    keys, values = (rows[0, 0] for rows in glide.whole(*kv[2], 12))                # (T, 4 + 12), (T, 12)
    assert keys.shape == (T, 16) and values.shape == (T, 12)
    q = attention.q_proj(seen["x"]).view(T, h, 12).transpose(0, 1)
    up = attention.kv_b_proj.weight.view(h, 8 + 6, 12)
    cos, sin = glide.target_angles(model, T)
    rotated = q[..., 8:].unflatten(-1, (2, 2)).transpose(-1, -2).flatten(-2)       # neighbours into halves
    q = torch.cat((glide.rotate(rotated, cos, sin), q[..., :8] @ up[:, :8]), -1)   # (h, T, 4 + 12)
    scores = (q @ keys.T * attention.scaling).masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
    out = scores.softmax(-1) @ values @ up[:, 8:].transpose(-1, -2)                # (h, T, 6)
    torch.testing.assert_close(out.transpose(0, 1).flatten(1), seen["out"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name, more", [
    ("DeepseekV3", LATENT), ("DeepseekV2", {**LATENT, "topk_method": "greedy"}), ("Gemma4", WIDE)])
def test_sizes_are_those_of_what_the_target_caches(name, more):
    """Latents, or sizes that differ by layer: training equals decoding, and the output is plain decoding's."""
    model = other(name, **more)
    drafter = random_drafter(model)
    ids = torch.randint(VOCAB, (1, 12), generator=torch.Generator().manual_seed(2))
    kv = frozen_forward(model, ids)["kv"]
    with torch.no_grad():
        trained = drafter.model(ids, kv)[0]
        moved = {m: (k.roll(1, -1), v) for m, (k, v) in kv.items()}
        assert (drafter.model(ids, moved)[0] - trained)[5:].abs().max() > 0.01
        drafter.begin(view(ids[0], kv, 0, 5))
        rows = drafter.expand(ids[0, 5:10], [-1, 0, 1, 2, 3])
        torch.testing.assert_close(rows, trained[5:10], atol=1e-9, rtol=0)
    if name == "DeepseekV3":
        decoded = verify.generate(verify.Target(model), drafter, cape.cape, ids, 8)
        assert decoded.tokens == plain(model, ids[0].tolist(), 8)


def test_layers_without_keys_of_their_own_are_not_read():
    shared = other("Gemma4", **SHARED)
    assert glide.Config.for_target(shared, 16).layers_read == (1,)
    assert glide.Config.for_target(shared, 16, 2).layers_read == (0, 1)
    with pytest.raises(ValueError, match="layer 3 of the target cannot be read .* it has layers 0 to 1"):
        glide.Config.for_target(shared, 16, layer=3)


@pytest.mark.parametrize("name, more, message", [
    ("Lfm2", dict(layer_types=["conv", "full_attention", "conv"]), "Lfm2ForCausalLM does not cache keys and values"),
    ("OpenAIGPTLMHead", {}, "OpenAIGPTLMHeadModel does not cache keys and values in each"),
    ("Gemma4", WIDE, "keys of several sizes"),
    ("Llama", {}, "heads of odd size: change the width"),
])
def test_what_glide_cannot_read_is_said_in_one_sentence(name, more, message):
    if name == "OpenAIGPTLMHead":
        config = transformers.OpenAIGPTConfig(vocab_size=VOCAB, n_positions=40, n_embd=32, n_layer=2, n_head=4)
        model = transformers.OpenAIGPTLMHeadModel(config)
    else:
        model = other(name, **more)
    with pytest.raises(ValueError, match=message) as error:
        glide.Config.for_target(model, 33 if name == "Llama" else 16, layers=2 if name == "Gemma4" else 1)
    assert "\n" not in str(error.value) and error.value.__suppress_context__ == (name in ("Lfm2", "OpenAIGPTLMHead"))


def test_a_glide_written_out_by_hand():
    """Two layers, grouped queries, blocks of three, position by position: norms, turns, softmaxes and SiLU as the docstring has them."""
    torch.manual_seed(3)
    c = glide.Config(vocab=20, width=16, feed_forward=24, layers=2, heads=2, block=3)
    c.target_heads, c.target_head_size, c.layers_read = 4, 8, (1, 2)
    model = glide.Glide(c, glide.angles(8, 64)).double()
    own = [x.double() for x in glide.angles(8, 64)]
    model.cos, model.sin = model.target_cos, model.target_sin = own
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    ids = torch.randint(20, (1, 7))
    kv = {layer: torch.randn(2, 1, 2, 7, 8).double() for layer in c.layers_read}

    def norm(x, weight):
        return x / (x.pow(2).mean() + 1e-6).sqrt() * weight

    def turned(x, position):
        """Entries i and i + 4 are a complex number, times exp(i t theta^(-2i / 8))."""
        z = torch.complex(x[:4], x[4:])
        z = z * torch.polar(torch.ones(4).double(), position * 10000.0 ** (-torch.arange(4).double() / 4))
        return torch.cat((z.real, z.imag))

    def attend(q, keys, values):
        if not keys:
            return torch.zeros(8).double()
        p = torch.stack([(q * k).sum() / math.sqrt(8) for k in keys]).softmax(0)
        return sum(weight * v for weight, v in zip(p, values))
    with torch.no_grad():
        x = [model.embed.weight[token] for token in ids[0]]
        for layer, read in zip(model.layers, c.layers_read):
            parts = [(layer.qkv.weight @ norm(row, layer.norm1.weight)).reshape(3, 2, 8) for row in x]
            after = []
            for t, row in enumerate(x):
                seen = []
                for head in range(2):
                    keys = [turned(parts[j][1, head], j) for j in range(t + 1)]
                    seen.append(attend(turned(parts[t][0, head], t), keys, [parts[j][2, head] for j in range(t + 1)]))
                row = row + layer.o.weight @ torch.cat(seen)
                seen, glimpsed = [], range(t // 3 * 3)                          # the target's rows of the blocks before
                q = (layer.glimpse_q.weight @ row).reshape(4, 8)                # of the residual stream, without a norm
                for head in range(4):
                    keys, values = ([kv[read][i, 0, head // 2, j] for j in glimpsed] for i in (0, 1))
                    seen.append(attend(turned(q[head], t), keys, values))
                row = row + layer.glimpse_o.weight @ torch.cat(seen)
                gate, up = (layer.up.weight @ norm(row, layer.norm2.weight)).chunk(2)
                after.append(row + layer.down.weight @ (gate / (1 + (-gate).exp()) * up))
            x = after
        expected = torch.stack([model.head.weight @ norm(row, model.norm.weight) for row in x])
        torch.testing.assert_close(model(ids, kv)[0], expected, atol=1e-9, rtol=1e-9)


def test_the_papers_sizes_by_default_and_small_first_weights():
    """Section 4.1: L = 5; section 5.1: one layer."""
    assert (glide.Config(8, 8, 8).block, glide.Config(8, 8, 8).layers) == (5, 1)
    defaults = inspect.signature(glide.Config.for_target).parameters
    assert (defaults["block"].default, defaults["layers"].default) == (5, 1)
    model = glide.Glide(glide.Config(300, 64, 128, glimpse=False), glide.angles(8, 16))
    for p in model.parameters():
        assert p.ndim != 2 or 0.018 < p.std().item() < 0.022


@pytest.mark.parametrize("layers, glimpse", [(1, True), (2, True), (1, False)])
@pytest.mark.parametrize("apart", ["model.layers.1", "model.layers.2", "model.embed_tokens"])
def test_a_target_that_accelerate_spreads(layers, glimpse, apart, tmp_path):
    """One part lies on the disk, with the head: the same drafter says the same."""
    pytest.importorskip("accelerate")
    whole = tiny("llama").float()
    whole.save_pretrained(tmp_path / "model")
    parts = ["model.embed_tokens", "model.rotary_emb", "model.norm", *(f"model.layers.{i}" for i in range(3))]
    places = dict.fromkeys(parts, "cpu") | {"lm_head": "disk", apart: "disk"}
    spread = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk")
    save_drafter(tmp_path / "drafter", random_glide(whole, layers, glimpse), {"kind": "glide"})
    runs = []
    for model in (whole, spread):
        drafter, _ = glide.load(tmp_path / "drafter", model)
        out = verify.generate(verify.Target(model), drafter, cape.cape, [3, 1, 4], 12)
        assert out.tokens == plain(whole, [3, 1, 4], 12)
        runs.append(out.runs)
    assert runs[0] == runs[1]


def test_a_checkpoint_of_a_larger_target_loads_without_a_crash(tmp_path):
    """It reads a layer that is not there: who it was made for is for its fingerprint to say."""
    save_drafter(tmp_path, random_glide(tiny("llama")), {"kind": "glide"})
    drafter, _ = glide.load(tmp_path, tiny("llama", num_hidden_layers=1))
    assert drafter.config.layers_read == (2,)


def test_settings_of_norms_and_tables():
    """Its own norms and rotary table, and the glimpse's where it has one: what convert.py takes from published settings."""
    c = glide.Config(20, 16, 24, heads=2, eps=0.5, theta=50.0, glimpse_theta=7.0, target_heads=4, target_head_size=8, layers_read=(1,))
    model = glide.Glide(c, glide.angles(8, 12, 99.0))
    norms = [m for m in model.modules() if isinstance(m, torch.nn.RMSNorm)]
    assert len(norms) == 3 and {m.eps for m in norms} == {0.5}
    assert torch.equal(model.cos, glide.angles(8, 12, 50.0)[0].float())
    assert torch.equal(model.target_sin, glide.angles(8, 12, 7.0)[1].float())
    plain_model = glide.Glide(glide.Config(20, 16, 24, heads=2, glimpse=False), glide.angles(8, 12, 99.0))
    assert torch.equal(plain_model.target_cos, glide.angles(8, 12, 99.0)[0].float())
