"""GLIDE: training equals decoding, trees equal paths, nothing of the target learns, nothing stale is kept."""
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, tiny

import glide
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
    loss, _ = draft_model.loss(frozen_forward(llama, torch.randint(VOCAB, (2, 15))))
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
        loss, logits = draft_model.loss(batch)
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
