"""EDD: the mask of Figure 3(a), Eq. 4, training equals decoding, each soft-prompt row computed once, nothing stale; EAGLE, MEDUSA."""
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, tiny
from safetensors.torch import save_file

import cape
import edd
import verify
from train import frozen_forward, save_drafter

LAST = 3                         # the tiny targets' last layer, which EAGLE and MEDUSA read

def random_edd(model, seed=1, **more):
    """A draft model with weights large enough that every part matters."""
    config = edd.Config.for_target(model, **{"hidden": 2, **more})
    draft_model = edd.KINDS[config.kind][0](config, model).eval()
    torch.manual_seed(seed)
    for p in draft_model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.3)
    return draft_model


def random_drafter(model, name, **more):
    """What decodes with a random draft model of VARIANTS."""
    draft_model = random_edd(model, **edd.VARIANTS[name], **more)
    return edd.KINDS[draft_model.config.kind][1](draft_model)


def some_text(model, length, seed):
    """Random ids (length,) and the target's hidden states {k: (length, D)} that drafters here read."""
    ids = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    states = frozen_forward(model, ids[None], {2, LAST})["hidden"]
    return ids, {k: h[0] for k, h in states.items()}


def view(ids, hidden, since, t):
    hidden = hidden if isinstance(hidden, dict) else {2: hidden}
    return SimpleNamespace(tokens=ids[since:t], length=t, kv={}, hidden={k: h[since:t] for k, h in hidden.items()})


@pytest.mark.parametrize("seed", range(8))
def test_dual_block_mask_entry_by_entry(seed):
    g = torch.Generator().manual_seed(seed)
    T, L = int(torch.randint(1, 40, (1,), generator=g)), int(torch.randint(1, 12, (1,), generator=g))
    mask = edd.dual_block_mask(T, L)
    assert mask.shape == (T, 2 * T)
    for i in range(T):
        start = i // L * L                                      # where the block of t_i begins: j L
        for k in range(T):
            assert mask[i, k] == (k < start), "hidden states strictly before the block"
            assert mask[i, T + k] == (start <= k <= i), "tokens of the own block up to itself"


def test_kl_is_equation_4():
    g = torch.Generator().manual_seed(0)
    target, draft = (torch.randn(3, 5, 7, generator=g, dtype=torch.float64) for _ in range(2))
    target[0, 0, 2] = float("-inf")                             # a token that the target rules out adds nothing
    P, Q = (torch.distributions.Categorical(logits=x) for x in (target, draft))
    expected = torch.where(P.probs > 0, P.probs * (P.probs.log() - Q.probs.log()), 0).sum(-1).mean()
    torch.testing.assert_close(edd.kl(target.softmax(-1), draft), expected.float().to(edd.kl(target.softmax(-1), draft).dtype), atol=1e-6, rtol=0)
    whole = torch.distributions.kl_divergence(torch.distributions.Categorical(logits=target[1:]), torch.distributions.Categorical(logits=draft[1:]))
    assert abs(edd.kl(target[1:].softmax(-1), draft[1:]).item() - whole.mean().item()) < 1e-6
    assert abs(edd.kl(draft.softmax(-1), draft).item()) < 1e-6


@pytest.mark.parametrize("encoding", [True, False])
@pytest.mark.parametrize("block", [3, 5, 7])
def test_training_equals_decoding(model, encoding, block):
    """Rounds that begin where blocks do: the logits of the dual-block forward, row by row."""
    T, draft_model = 22, random_edd(model, encoding=encoding)
    drafter = edd.Drafter(draft_model)
    ids = torch.randint(VOCAB, (1, T), generator=torch.Generator().manual_seed(2))
    hidden = frozen_forward(model, ids, {2})["hidden"][2]
    with torch.no_grad():
        trained = draft_model(ids, hidden, block)[0]
        for t in range(block, T, block):
            drafter.begin(view(ids[0], hidden[0], t - block, t))
            for i in range(min(block, T - t)):
                row = drafter.expand(ids[0, t + i:t + i + 1], [i - 1])[0]
                torch.testing.assert_close(row, trained[t + i], atol=1e-9, rtol=0)
            drafter.keep(list(range(min(block, T - t))))
        if encoding:                                            # the soft prompt matters, or the above says nothing
            assert (draft_model(ids, hidden.roll(1, -1), block)[0] - trained)[block:].abs().max() > 0.01


def test_training_does_not_see_what_drafting_cannot(model):
    """Changing hidden states from position k on leaves all rows of blocks up to k's alone."""
    draft_model, L = random_edd(model), 5
    ids = torch.randint(VOCAB, (1, 20), generator=torch.Generator().manual_seed(3))
    hidden = frozen_forward(model, ids, {2})["hidden"][2]
    with torch.no_grad():
        base = draft_model(ids, hidden, L)
        for k in (0, 4, 5, 12, 19):
            out = draft_model(ids, torch.cat((hidden[:, :k], hidden[:, k:] + 1), 1), L)
            blind = (k // L + 1) * L
            assert torch.equal(out[:, :blind], base[:, :blind])
            assert blind >= 20 or not torch.allclose(out[:, blind:], base[:, blind:])


@pytest.mark.parametrize("name", ["edd", "eagle", "medusa"])
def test_rows_of_a_tree_equal_paths_drafted_alone(model, name):
    drafter = random_drafter(model, name)
    ids, hidden = some_text(model, 13, 3)
    tokens, parents = torch.tensor([4, 1, 2, 7, 7, 3, 5, 0, 2]), [-1, 0, 0, 1, 2, 2, 3, 3, 5]
    with torch.no_grad():
        drafter.begin(view(ids, hidden, 0, 12))
        rows = torch.cat([drafter.expand(tokens[a:b], parents[a:b]) for a, b in ((0, 1), (1, 3), (3, 6), (6, 9))])
        for node in range(9):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            drafter.reset()
            drafter.begin(view(ids, hidden, 0, 12))
            alone = drafter.expand(tokens[path], list(range(-1, len(path) - 1)))[-1]        # the whole path in one call
            torch.testing.assert_close(rows[node], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["edd", "vdm", "eagle", "medusa"])
def test_a_round_costs_the_committed_and_the_drafted_rows(model, name):
    """Rows that go through the layer (MEDUSA: through its first head), and what a round says, whatever was rejected before."""
    drafter, passed = random_drafter(model, name), []
    fresh = type(drafter)(drafter.model)
    g = torch.Generator().manual_seed(5)
    ids, hidden = some_text(model, 36, 5)
    t, before = 4, 0
    with torch.no_grad():
        while t < 30:
            part = drafter.model.heads[0] if name == "medusa" else drafter.model.layer
            hook = part.register_forward_pre_hook(lambda module, args: passed.append(args[0].numel() // args[0].shape[-1]))
            passed.clear()
            drafter.begin(view(ids, hidden, before, t))
            root = drafter.expand(ids[t:t + 1], [-1])
            drafter.expand(torch.stack(((ids[t + 1] + 1) % VOCAB, ids[t + 1])), [0, 0])
            drafter.expand(ids[t + 2:t + 3], [2])
            assert passed == ([1] if name == "medusa" else [t - before + 1, 2, 1]), "rows of a round depend on what is new, not on the context"
            hook.remove()
            fresh.reset()
            fresh.begin(view(ids, hidden, 0, t))
            torch.testing.assert_close(root, fresh.expand(ids[t:t + 1], [-1]), atol=1e-6, rtol=0)
            gained = int(torch.randint(5, (1,), generator=g))
            drafter.keep([0, 2, 3][:1 + gained])
            before, t = t, t + 1 + gained


def test_rows_outgrow_their_first_allocation(llama):
    """A context longer than what was allocated at first: the same distributions as in one go."""
    drafter, fresh = edd.Drafter(random_edd(llama)), edd.Drafter(random_edd(llama))
    ids = torch.randint(VOCAB, (1300,), generator=torch.Generator().manual_seed(6))
    hidden = torch.randn(1300, 32, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    with torch.no_grad():
        for before, t in ((0, 500), (500, 1200)):
            drafter.begin(view(ids, hidden, before, t))
            row = drafter.expand(ids[t:t + 1], [-1])
        fresh.begin(view(ids, hidden, 0, 1200))
        torch.testing.assert_close(row, fresh.expand(ids[1200:1201], [-1]), atol=1e-6, rtol=0)
        assert drafter.cache.keys.shape[2] > 1200


@pytest.mark.parametrize("kind", list(edd.VARIANTS))
def test_no_gradient_reaches_the_target_and_all_of_the_drafter_learns(llama, kind):
    import numpy as np
    llama.zero_grad()
    llama.requires_grad_(True)
    draft_model = random_edd(llama, **edd.VARIANTS[kind])
    batch = frozen_forward(llama, torch.randint(VOCAB, (2, 20)), {draft_model.config.hidden})
    loss, _ = draft_model.loss(batch | {"block": None, "random": np.random.default_rng(0)})
    loss.backward()
    assert all(p.grad is None for p in llama.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft_model.parameters())


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_the_feature_is_what_the_targets_head_reads(model, name):
    """The last layer's hook, normed, under the frozen head: the target's own logits; the frozen parts are its own, untrained, unsaved."""
    batch = frozen_forward(model, torch.randint(VOCAB, (2, 9)), {LAST})
    draft_model = random_edd(model, **edd.VARIANTS[name])
    torch.testing.assert_close(draft_model.target.head(draft_model.target.norm(batch["hidden"][LAST])), batch["logits"])
    assert draft_model.target.embed.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    own = {k.split(".")[0] for k in draft_model.state_dict()}
    assert own == ({"fc", "layer"} if name == "eagle" else {"heads", "w"}) == {k.split(".")[0] for k, _ in draft_model.named_parameters()}


def test_eagle_equals_brute_force(model):
    """Row by row: training's forward where features are true, and a forward over everything that is fed predicted ones elsewhere."""
    T, t0 = 20, 7
    drafter = random_drafter(model, "eagle")
    draft_model, (ids, hidden) = drafter.model, some_text(model, T, 2)
    head, embed, f = draft_model.target.head, draft_model.target.embed, draft_model.target.norm(hidden[LAST])
    with torch.no_grad():
        trained = head(draft_model(ids[None], f[None]))[0]
        before = 0
        for t in (t0, t0 + 1, t0 + 5, T - 4):
            drafter.begin(view(ids, hidden, before, t))
            fed = list(torch.cat((torch.zeros_like(f[:1]), f[:t])))                # the feature before each position
            for i in range(4):
                row = drafter.expand(ids[t + i:t + i + 1], [i - 1])[0]
                x = draft_model.fc(torch.cat((embed(ids[:t + i + 1]), torch.stack(fed)), -1))[None]
                predicted = draft_model.rows(x, torch.arange(t + i + 1)[None], torch.ones(t + i + 1, t + i + 1).tril().bool())[0, -1]
                torch.testing.assert_close(row, head(predicted), atol=1e-6, rtol=0)
                if i == 0:
                    torch.testing.assert_close(row, trained[t], atol=1e-6, rtol=0)
                fed.append(predicted)
            assert (row - trained[t + 3]).abs().max() > 1e-3, "predicted features differ from true ones, or the above says nothing"
            before = t
        with pytest.raises(AssertionError, match="cannot go on from token 5"):      # a rollback that it has no feature for
            drafter.begin(view(ids, hidden, 5, 9))


def test_eagle_does_not_see_what_drafting_cannot(model):
    """Row i of training is made of tokens up to i and of features before i."""
    draft_model, (ids, hidden) = random_edd(model, **edd.VARIANTS["eagle"]), some_text(model, 12, 3)
    with torch.no_grad():
        base = draft_model(ids[None], hidden[LAST][None])[0]
        for k in (0, 5, 11):
            f = torch.cat((hidden[LAST][:k], hidden[LAST][k:] + 1))
            out = draft_model(ids[None], f[None])[0]
            assert torch.equal(out[:k + 1], base[:k + 1]) and not (out[k + 1:] == base[k + 1:]).all(-1).any()
            other = ids.clone()
            other[k] = (ids[k] + 1) % VOCAB
            out = draft_model(other[None], hidden[LAST][None])[0]
            assert torch.equal(out[:k], base[:k]) and not torch.equal(out[k], base[k])


def test_eagles_loss(llama):
    """SmoothL1 and a tenth of the cross entropy to the target's distribution, element by element."""
    ids, hidden = some_text(llama, 9, 4)
    draft_model = random_edd(llama, **edd.VARIANTS["eagle"])
    batch = frozen_forward(llama, ids[None], {LAST})
    with torch.no_grad():
        loss, logits = draft_model.loss(batch)
        f = draft_model.target.norm(hidden[LAST])
        d = (draft_model(ids[None], f[None])[0] - f).abs()
        smooth = torch.where(d < 1, d * d / 2, d - 0.5).mean()
        ce = -(batch["logits"][0].softmax(-1) * logits[0].log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss.double(), smooth + 0.1 * ce, atol=1e-5, rtol=1e-5)


def test_medusas_heads_are_shifted_as_the_docstring_says(llama):
    draft_model = edd.Medusa(edd.Config.for_target(llama, **edd.VARIANTS["medusa"]), llama)
    ids = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    batch = frozen_forward(llama, ids, {LAST})
    with torch.no_grad():
        assert len(draft_model.heads) == 5
        for logits in draft_model(batch["hidden"][LAST]):
            torch.testing.assert_close(logits, batch["logits"])       # untrained: every head says what the target does
        draft_model = random_edd(llama, **edd.VARIANTS["medusa"])
        loss, shown = draft_model.loss(batch)
        expected, found = 0, draft_model(batch["hidden"][LAST])
        for k in range(5):                                                          # from f_i head k predicts t_{i+2+k}
            picked = [-found[k][b, i].log_softmax(-1)[ids[b, i + 2 + k]] for b in range(2) for i in range(20 - 2 - k)]
            expected += 0.8 ** k * sum(picked) / len(picked)
        torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(shown[:, 1:], found[0][:, :-1])                          # row j, from f_{j-1}, predicts token j + 1
        assert draft_model.loss({**batch, "ids": ids[:, :4], "hidden": {LAST: batch["hidden"][LAST][:, :4]}})[0].isfinite()
        drafter = edd.MedusaDrafter(draft_model)                                    # a token at depth d comes from head d - 1
        drafter.begin(view(ids[0], {LAST: batch["hidden"][LAST][0]}, 0, 8))
        rows = drafter.expand(torch.arange(8), [-1, 0, 0, 1, 3, 4, 5, 6])
        for row, head in zip(rows[[0, 1, 3, 4, 5]], found):
            torch.testing.assert_close(row, head[0, 7])
        assert torch.equal(rows[1], rows[2]), "whatever the path"
        assert (rows[6:] == float("-inf")).all(), "nothing beyond the last head"


def test_block_lengths_are_drawn_from_the_whole_range(llama, monkeypatch):
    import numpy as np
    seen = []
    monkeypatch.setattr(edd, "dual_block_mask", lambda T, L, mask=edd.dual_block_mask: seen.append(L) or mask(T, L))
    batch = frozen_forward(llama, torch.randint(VOCAB, (1, 20)), {2})
    for kind, expected in (("edd", {5, 6, 7, 8, 9, 10}), ("edd-fixed", {5})):
        seen.clear()
        for step in range(60):
            random_edd(llama, **edd.VARIANTS[kind]).loss(batch | {"block": None, "random": np.random.default_rng([0, step])})
        assert set(seen) == expected


def test_it_is_the_targets_own_layer_with_its_embedding_and_head(model):
    """Embedding and head are copies of the target's that learn apart from it; the layer is of the target's own class."""
    draft_model = edd.EDD(edd.Config.for_target(model, 2), model)
    assert type(draft_model.layer) is type(model.get_decoder().layers[0])
    assert torch.equal(draft_model.embed.weight, model.get_input_embeddings().weight)
    assert torch.equal(draft_model.head.weight, model.get_output_embeddings().weight)
    draft_model.head.weight.data += 1
    assert not torch.equal(draft_model.head.weight, model.get_output_embeddings().weight)
    assert not torch.equal(draft_model.embed.weight, draft_model.head.weight)
    shapes = [tuple(p.shape) for p in model.get_decoder().layers[0].parameters()]
    assert [tuple(p.shape) for p in draft_model.layer.parameters()] == shapes


def test_the_fourth_to_last_layer():
    model = tiny("llama", num_hidden_layers=6)
    assert edd.Config.for_target(model).hidden == 3
    ids = torch.randint(VOCAB, (1, 9))
    states = model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(frozen_forward(model, ids, {3})["hidden"][3], states[-4])
    assert edd.Config.for_target(model, 5).hidden == 5
    for wrong in (0, 7, -7):
        with pytest.raises(ValueError, match="no layer's output"):
            edd.Config.for_target(model, wrong)


def test_capture_costs_nothing_when_nobody_asks(llama):
    target = verify.Target(llama)

    def hooks():
        return sum(len(m._forward_hooks) for m in llama.modules())
    assert hooks() == 0
    drafter = edd.Drafter(random_edd(llama))
    prompt = [1, 2, 3]
    verify.generate(target, drafter, cape.chain, prompt, 6)
    assert hooks() == 1
    verify.generate(target, None, verify.no_draft, prompt, 6)
    assert hooks() == 0 and not target.captured and not target.hidden
    frozen_forward(llama, torch.tensor([prompt]), {1})
    assert hooks() == 0


def test_a_broken_or_foreign_checkpoint_is_one_sentence(llama, tmp_path):
    draft_model = random_edd(llama).float()
    save_drafter(tmp_path / "edd", draft_model, {"kind": "edd"})
    single = tiny("llama").float()
    drafter, about = edd.load(tmp_path / "edd", single)
    assert about["config"]["hidden"] == 2
    torch.testing.assert_close(drafter.model.head.weight, draft_model.head.weight.bfloat16().float())
    for name in ("eagle", "medusa"):
        save_drafter(tmp_path / name, saved := random_edd(llama, **edd.VARIANTS[name]).float(), {"kind": name})
        loaded, _ = edd.load(tmp_path / name, single)
        assert type(loaded) is edd.KINDS[name][1] and type(loaded.model) is type(saved) and loaded.needs == {"hidden": (LAST,)}
        for key, value in loaded.model.state_dict().items():
            assert torch.equal(value, saved.state_dict()[key].bfloat16().float())
    config = {k: v for k, v in about["config"].items() if k not in ("kind", "heads")}      # checkpoints older than the baselines
    (tmp_path / "edd" / "training.json").write_text(json.dumps({"config": config}))
    assert type(edd.load(tmp_path / "edd", single)[0]) is edd.Drafter
    (tmp_path / "edd" / "training.json").write_text(json.dumps({"config": {**config, "kind": "hydra"}}))
    with pytest.raises(ValueError, match="damaged"):
        edd.load(tmp_path / "edd", single)
    save_drafter(tmp_path / "edd", draft_model, {"kind": "edd"})
    with pytest.raises(ValueError, match="another target"):
        edd.load(tmp_path / "edd", tiny("llama", hidden_size=64))
    with pytest.raises(ValueError, match="is missing"):
        edd.load(tmp_path / "nowhere", single)
    (tmp_path / "edd" / "training.json").write_text(json.dumps({"config": {}}))
    with pytest.raises(ValueError, match="damaged"):
        edd.load(tmp_path / "edd", single)
    save_drafter(tmp_path / "edd", draft_model, {"kind": "edd"})
    save_file({"x": torch.zeros(1)}, tmp_path / "edd" / "model.safetensors")
    with pytest.raises(ValueError, match="damaged"):
        edd.load(tmp_path / "edd", single)
    from transformers import GPT2Config, GPT2LMHeadModel
    with pytest.raises(ValueError, match="built otherwise"):
        edd.EDD(edd.Config(12, 32, 1), GPT2LMHeadModel(GPT2Config(vocab_size=12, n_embd=32, n_layer=2, n_head=2)))


# ---------------------------------------------------------------- what edits would have to get past
@pytest.mark.parametrize("name", ["edd", "edd-ce", "edd-fixed", "vdm", "vdm-ce"])
def test_losses_are_what_their_names_say(llama, name):
    """KL(P_t || P_d) of Eq. 4 over all positions, or the cross entropy of the next token, written out; VDM reads no hidden states."""
    ids = torch.randint(VOCAB, (2, 14), generator=torch.Generator().manual_seed(9))
    batch = frozen_forward(llama, ids, {2})
    draft_model = random_edd(llama, **edd.VARIANTS[name])
    with torch.no_grad():
        loss, logits = draft_model.loss({**batch, "block": 5})
        expected = draft_model(ids, batch["hidden"].get(2), 5)
        torch.testing.assert_close(logits, expected)
        log_p_target, log_p_draft = batch["logits"].log_softmax(-1), expected.log_softmax(-1)
        kl = (log_p_target.exp() * (log_p_target - log_p_draft)).sum(-1).mean()
        ce = torch.stack([-log_p_draft[b, i, ids[b, i + 1]] for b in range(2) for i in range(13)]).mean()
        by_ce = name.endswith("ce")
        torch.testing.assert_close(loss.double(), ce if by_ce else kl, atol=1e-5, rtol=1e-5)
        assert abs(ce - kl) > 0.1, "the two differ, or the above says nothing"
        other = draft_model(ids, torch.randn_like(batch["hidden"][2]), 5)
        assert torch.equal(other, expected) == name.startswith("vdm")


def test_the_layer_and_its_norm_are_fresh():
    """Not copies of the target's: the norm is the identity, matrices are drawn with the target's initializer_range."""
    model = tiny("llama", hidden_size=64, intermediate_size=96, initializer_range=0.05)
    model.get_decoder().norm.weight.data.fill_(3.0)
    draft_model = edd.EDD(edd.Config.for_target(model, 2), model)
    assert torch.equal(draft_model.norm.weight, torch.ones_like(draft_model.norm.weight))
    for p in draft_model.layer.parameters():
        if p.ndim == 2:
            assert 0.045 < p.std() < 0.055


def test_medusas_heads_as_their_paper_writes_them(llama):
    """head_k(f + SiLU(W_k f)), f after the target's final norm."""
    draft_model = random_edd(llama, **edd.VARIANTS["medusa"])
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    with torch.no_grad():
        f = llama.get_decoder().norm(hidden)
        for logits, head, w in zip(draft_model(hidden), draft_model.heads, draft_model.w):
            z = f @ w.T
            torch.testing.assert_close(logits, (f + z / (1 + (-z).exp())) @ head.weight.T)


def test_a_round_without_expand_loses_nothing(llama):
    """A builder may propose the root alone without asking: what was committed then is read in the next round."""
    drafter, fresh = edd.Drafter(random_edd(llama)), edd.Drafter(random_edd(llama))
    ids = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(6))
    hidden = torch.randn(20, 32, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    with torch.no_grad():
        for before, t in ((0, 6), (6, 7), (7, 9)):
            drafter.begin(view(ids, hidden, before, t))
            if t != 7:
                row = drafter.expand(ids[t:t + 1], [-1])
            drafter.keep([])
        fresh.begin(view(ids, hidden, 0, 9))
        torch.testing.assert_close(row, fresh.expand(ids[9:10], [-1]), atol=1e-9, rtol=0)
