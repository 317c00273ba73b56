"""EDD: the mask of Figure 3(a), Eq. 4, training equals decoding, each soft-prompt row computed once, nothing stale; EAGLE, MEDUSA."""
import copy
import functools
import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import SIZES, VOCAB, plain, tiny
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


def rounding(model):
    """How far two ways to one number may be apart: eager attention takes its softmax in float32."""
    return 1e-3 if model.config._attn_implementation == "eager" else 1e-6


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

    def kl(target, draft):
        return edd.kl(target.flatten(0, 1).softmax(-1), draft.flatten(0, 1)) / target[..., 0].numel()
    target[0, 0, 2] = float("-inf")                             # a token that the target rules out adds nothing
    P, Q = (torch.distributions.Categorical(logits=x) for x in (target, draft))
    expected = torch.where(P.probs > 0, P.probs * (P.probs.log() - Q.probs.log()), 0).sum(-1).mean()
    torch.testing.assert_close(kl(target, draft), expected.float().to(kl(target, draft).dtype), atol=1e-6, rtol=0)
    whole = torch.distributions.kl_divergence(torch.distributions.Categorical(logits=target[1:]), torch.distributions.Categorical(logits=draft[1:]))
    assert abs(kl(target[1:], draft[1:]).item() - whole.mean().item()) < 1e-6
    assert abs(kl(draft, draft).item()) < 1e-6


@pytest.mark.parametrize("encoding", [True, False])
@pytest.mark.parametrize("block", [3, 5, 7])
def test_training_equals_decoding(model, encoding, block):
    check_training_equals_decoding(model, encoding, block, atol=1e-9 if rounding(model) == 1e-6 else 1e-5)


def check_training_equals_decoding(model, encoding, block, atol):
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
                torch.testing.assert_close(row, trained[t + i], atol=atol, rtol=0)
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
            torch.testing.assert_close(rows[node], alone, atol=rounding(model), rtol=0)


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
            # EAGLE has no row for the first token
            committed = t - before - (name == "eagle" and before == 0)
            expected = [1] if name == "medusa" else [committed + 1, 2, 1]
            assert passed == expected, "rows of a round depend on what is new, not on the context"
            hook.remove()
            fresh.reset()
            fresh.begin(view(ids, hidden, 0, t))
            torch.testing.assert_close(root, fresh.expand(ids[t:t + 1], [-1]), atol=rounding(model), rtol=0)
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
        assert drafter.cache.kept[0].shape[2] > 1200


@pytest.mark.parametrize("kind", list(edd.VARIANTS))
def test_no_gradient_reaches_the_target_and_all_of_the_drafter_learns(llama, kind):
    import numpy as np
    llama.zero_grad()
    llama.requires_grad_(True)
    draft_model = random_edd(llama, **edd.VARIANTS[kind])
    batch = frozen_forward(llama, torch.randint(VOCAB, (2, 20)), {draft_model.config.hidden})
    loss = draft_model.loss(batch | {"block": None, "random": np.random.default_rng(0)})
    loss.backward()
    assert all(p.grad is None for p in llama.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft_model.parameters())


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_the_feature_is_what_the_targets_head_reads(model, name):
    """The last layer's hook, normed, under the frozen head: the target's own logits; the frozen parts are its own, untrained, unsaved."""
    batch = frozen_forward(model, torch.randint(VOCAB, (2, 9)), {LAST})
    draft_model = random_edd(model, **edd.VARIANTS[name])
    feature = draft_model.target.norm(batch["hidden"][LAST])
    torch.testing.assert_close(draft_model.logits(draft_model.target.head, feature), batch["logits"])
    assert draft_model.target.embed.module.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    own = {k.split(".")[0] for k in draft_model.state_dict()}
    assert own == ({"fc", "layer"} if name == "eagle" else {"heads", "w"}) == {k.split(".")[0] for k, _ in draft_model.named_parameters()}


def test_eagle_equals_brute_force(model):
    """Row by row: training's forward where features are true, and a forward over everything that is fed predicted ones elsewhere."""
    T, t0 = 20, 7
    drafter = random_drafter(model, "eagle")
    draft_model, (ids, hidden) = drafter.model, some_text(model, T, 2)
    head, embed, f = draft_model.target.head, draft_model.target.embed, draft_model.target.norm(hidden[LAST])
    with torch.no_grad():
        trained = head(draft_model(ids[None], f[None]))[0]                         # row i predicts after token i + 1
        assert len(trained) == T - 1, "the first token has no row"
        before = 0
        for t in (1, t0, t0 + 1, t0 + 5, T - 4):
            drafter.begin(view(ids, hidden, before, t))
            fed = list(f[:t])                                              # the feature before each but the first
            for i in range(4):
                row = drafter.expand(ids[t + i:t + i + 1], [i - 1])[0]
                x = draft_model.fc(torch.cat((embed(ids[1:t + i + 1]), torch.stack(fed)), -1))[None]
                earlier = torch.ones(t + i, t + i).tril().bool()
                predicted = draft_model.rows(x, torch.arange(t + i)[None], earlier)[0, -1]
                torch.testing.assert_close(row, head(predicted), atol=rounding(model), rtol=0)
                if i == 0:
                    torch.testing.assert_close(row, trained[t - 1], atol=rounding(model), rtol=0)
                fed.append(predicted)
            assert (row - trained[t + 2]).abs().max() > 1e-3, "predicted features differ, or the above says nothing"
            before = t
        with pytest.raises(AssertionError, match="cannot go on from token 5"):      # a rollback that it has no feature for
            drafter.begin(view(ids, hidden, 5, 9))


def test_eagle_does_not_see_what_drafting_cannot(model):
    """Training's row of token i + 1, which is row i, is made of tokens 1 to i + 1 and of features 0 to i."""
    draft_model, (ids, hidden) = random_edd(model, **edd.VARIANTS["eagle"]), some_text(model, 12, 3)
    with torch.no_grad():
        base = draft_model(ids[None], hidden[LAST][None])[0]
        for k in (0, 5, 11):
            f = torch.cat((hidden[LAST][:k], hidden[LAST][k:] + 1))
            out = draft_model(ids[None], f[None])[0]
            assert torch.equal(out[:k], base[:k]) and not (out[k:] == base[k:]).all(-1).any()
            other = ids.clone()
            other[k] = (ids[k] + 1) % VOCAB
            out, row = draft_model(other[None], hidden[LAST][None])[0], max(0, k - 1)
            assert torch.equal(out[:row], base[:row]) and torch.equal(out[row], base[row]) == (k == 0)


def test_eagle_is_built_as_published(llama):
    """arXiv 2401.15077: a biased fc on (embedding of t_{i+1}, f_i), a layer without first norm, no norm behind."""
    draft_model, (ids, hidden) = random_edd(llama, **edd.VARIANTS["eagle"]), some_text(llama, 9, 4)
    parts = {name.split(".")[1] for name, _ in draft_model.named_parameters() if name.startswith("layer")}
    assert parts == {"self_attn", "mlp", "post_attention_layernorm"}
    layer, fc, f = draft_model.layer, draft_model.fc, draft_model.target.norm(hidden[LAST])

    def heads(x, name):
        return (x @ getattr(layer.self_attn, name).weight.T).view(8, 4, 8).transpose(0, 1)
    with torch.no_grad():
        fc.bias.normal_()
        x = torch.cat((llama.get_input_embeddings()(ids[1:]), f[:-1]), -1) @ fc.weight.T + fc.bias
        q, k, v = heads(x, "q_proj"), heads(x, "k_proj"), heads(x, "v_proj")
        place, pair = torch.arange(8.0, dtype=x.dtype), torch.arange(0, 8, 2, dtype=x.dtype)
        angle = place[:, None] / 10000 ** (pair / 8)                                # positions from 0
        cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
        q, k = (z * cos + torch.cat((-z[..., 4:], z[..., :4]), -1) * sin for z in (q, k))
        score = (q @ k.transpose(1, 2) / 8 ** 0.5).masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
        x = x + F.linear((score.softmax(-1) @ v).transpose(0, 1).reshape(8, 32), layer.self_attn.o_proj.weight)
        expected = x + layer.mlp(layer.post_attention_layernorm(x))
        torch.testing.assert_close(draft_model(ids[None], f[None])[0], expected, atol=1e-4, rtol=1e-4)


def test_eagles_loss(llama):
    """SmoothL1 and a tenth of the cross entropy to the target's distribution; logits are those after each token."""
    ids, hidden = some_text(llama, 9, 4)
    draft_model = random_edd(llama, **edd.VARIANTS["eagle"])
    batch = frozen_forward(llama, ids[None], {LAST})
    with torch.no_grad():
        loss, logits = draft_model.loss(batch), draft_model.predict(batch)
        assert logits.shape == batch["logits"].shape
        f = draft_model.target.norm(hidden[LAST])
        d = (draft_model(ids[None], f[None])[0] - f[1:]).abs()
        smooth = torch.where(d < 1, d * d / 2, d - 0.5).mean(-1)
        ce = -(batch["logits"][0, 1:].softmax(-1) * logits[0, 1:].log_softmax(-1)).sum(-1)
        expected = (smooth + 0.1 * ce)[:-1].sum() / 8              # of nine tokens eight count, of the first nothing is predicted
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)


def test_medusas_heads_are_shifted_as_the_docstring_says(llama):
    draft_model = edd.Medusa(edd.Config.for_target(llama, **edd.VARIANTS["medusa"]), llama)
    ids = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    batch = frozen_forward(llama, ids, {LAST})
    with torch.no_grad():
        assert len(draft_model.heads) == 5
        for logits in draft_model(batch["hidden"][LAST]):
            torch.testing.assert_close(logits, batch["logits"])       # untrained: every head says what the target does
        draft_model = random_edd(llama, **edd.VARIANTS["medusa"])
        loss, shown = draft_model.loss(batch), draft_model.predict(batch)
        expected, found = 0, draft_model(batch["hidden"][LAST])
        for k in range(5):                                                          # from f_i head k predicts t_{i+2+k}
            picked = [-found[k][b, i].log_softmax(-1)[ids[b, i + 2 + k]] for b in range(2) for i in range(20 - 2 - k)]
            expected += 0.8 ** k * sum(picked) / 38                                 # 19 rows of each text count
        torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(shown[:, 1:], found[0][:, :-1])                          # row j, from f_{j-1}, predicts token j + 1
        short = {"ids": ids[:, :4], "hidden": {LAST: batch["hidden"][LAST][:, :4]}, "learn": batch["learn"][:, :4]}
        assert draft_model.loss({**batch, **short}).isfinite()
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
        draft_model = random_edd(llama, **edd.VARIANTS[kind])
        for step in range(60):
            draft_model.loss(batch | {"block": None, "random": np.random.default_rng([0, step])})
        assert set(seen) == expected


def test_it_is_the_targets_own_layer_with_its_embedding_and_head(model):
    """Embedding and head are copies of the target's that learn apart from it; the layer is of the target's own class."""
    draft_model = edd.EDD(edd.Config.for_target(model, 2), model)
    assert type(draft_model.layer) is type(model.get_decoder().layers[-1])
    assert torch.equal(draft_model.embed.weight, model.get_input_embeddings().weight)
    assert torch.equal(draft_model.head.weight, model.get_output_embeddings().weight)
    draft_model.head.weight.data += 1
    assert not torch.equal(draft_model.head.weight, model.get_output_embeddings().weight)
    assert not torch.equal(draft_model.embed.weight, draft_model.head.weight)
    shapes = [tuple(p.shape) for p in model.get_decoder().layers[-1].parameters()]
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
        batch["block"] = 5
        loss, logits = draft_model.loss(batch), draft_model.predict(batch)
        expected = draft_model(ids, batch["hidden"].get(2), 5)
        torch.testing.assert_close(logits, expected)
        log_p_target, log_p_draft = batch["logits"].log_softmax(-1), expected.log_softmax(-1)
        kl = (log_p_target.exp() * (log_p_target - log_p_draft)).sum(-1)[:, :-1].mean()
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
    """head_k(f + SiLU(W_k f + b_k)), f after the target's final norm."""
    draft_model = random_edd(llama, **edd.VARIANTS["medusa"])
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    with torch.no_grad():
        f = llama.get_decoder().norm(hidden)
        for w in draft_model.w:
            w.bias.normal_()
        for logits, head, w in zip(draft_model(hidden), draft_model.heads, draft_model.w):
            z = f @ w.weight.T + w.bias
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


# ---------------------------------------------------------------- families: what the target does, the drafters do
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
              num_key_value_heads=4)
CAPPED = dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
GEMMA = dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=9)
FAMILIES = {
    "Llama": {},
    "Granite": dict(embedding_multiplier=3.0, logits_scaling=4.0, residual_multiplier=0.5, attention_multiplier=0.2),
    "Cohere": dict(logit_scale=0.25),
    "Gemma2": GEMMA | CAPPED,
    "Gemma3Text": GEMMA | dict(layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
    "Olmo": {},
    "Olmo2": {},
    "Apertus": {},
    "MiniCPM3": LATENT | dict(dim_model_base=8, scale_emb=2.0),
    "DeepseekV3": LATENT | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1,
                                topk_group=1, first_k_dense_replace=1),
    "Mixtral": dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "Qwen3Moe": dict(head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "Olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "GptOss": dict(num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=9),
}
WITH_EXPERTS = ["DeepseekV3", "Mixtral", "Qwen3Moe", "Olmoe", "GptOss"]


def class_of(name):
    return getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")


@functools.cache
def of_family(name):
    """A random target of the family in float64; its experts in a loop, as grouped kernels know no float64."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, "tie_word_embeddings": False, **FAMILIES[name]})
    config._experts_implementation = "eager"
    model = class_of(name)(config).double().eval()
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.25)
        elif p.ndim == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)                 # norms that matter
    return model


@functools.cache
def forward_of(name):
    """-> ids (2, 9); the target's frozen forward over them; what its first and its last layer read."""
    model, read = of_family(name), []
    layers, hooks = model.get_decoder().layers, []
    for layer in (layers[0], layers[-1]):
        hooks.append(layer.register_forward_pre_hook(lambda module, args: read.append(args[0])))
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = frozen_forward(model, ids, {2, LAST})
    for hook in hooks:
        hook.remove()
    return ids, batch, *read


def fresh(model, kind, **more):
    return edd.KINDS[kind][0](edd.Config.for_target(model, 2, kind=kind, **more), model)


def divergence(p_logits, q_logits):
    """The largest KL(p || q) of any row."""
    log_p, log_q = p_logits.double().log_softmax(-1), q_logits.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).max().item()


@pytest.mark.parametrize("name", FAMILIES)
def test_on_the_targets_own_last_state_each_head_says_what_the_target_does(name):
    model, (_, batch, _, _) = of_family(name), forward_of(name)
    hidden, norm = batch["hidden"][LAST], model.get_decoder().norm
    medusa, eagle, own = fresh(model, "medusa"), fresh(model, "eagle"), fresh(model, "edd")
    own.norm.load_state_dict(norm.state_dict())
    with torch.no_grad():
        of_eagle, of_edd = eagle.logits(eagle.target.head, norm(hidden)), own.logits(own.head, own.norm(hidden))
        for logits in [*medusa(hidden), of_eagle, of_edd]:
            assert divergence(batch["logits"], logits) < 1e-12
        # The scale or the cap matters, or the above says nothing
        if name in ("Granite", "Cohere", "Gemma2", "MiniCPM3"):
            assert divergence(batch["logits"], eagle.target.head(norm(hidden))) > 0.01


@pytest.mark.parametrize("name", FAMILIES)
def test_the_embedding_is_what_the_targets_first_layer_reads(name):
    model, (ids, batch, first, _) = of_family(name), forward_of(name)
    own, eagle, fed = fresh(model, "edd"), fresh(model, "eagle"), []
    hook = eagle.fc.register_forward_pre_hook(lambda module, args: fed.append(args[0]))
    with torch.no_grad():
        torch.testing.assert_close(own.embed(ids), first)
        eagle(ids, batch["hidden"][LAST])
    hook.remove()
    torch.testing.assert_close(fed[0][..., :32], first[:, 1:])
    torch.testing.assert_close(fed[0][..., 32:], batch["hidden"][LAST][:, :-1])
    assert (name == "Granite") == (not torch.allclose(model.get_input_embeddings()(ids), first))


@pytest.mark.parametrize("name", FAMILIES)
def test_with_the_weights_of_the_targets_last_layer_the_layer_does_what_that_does(name):
    """Also where the first layer is of another kind (DeepSeek's is dense) or turns by another table (Gemma 3's)."""
    model, (_, batch, _, last) = of_family(name), forward_of(name)
    draft_model = fresh(model, "edd")
    draft_model.layer.load_state_dict(model.get_decoder().layers[-1].state_dict())
    with torch.no_grad():
        torch.testing.assert_close(draft_model.causal(last), batch["hidden"][LAST], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("encoding", [True, False])
@pytest.mark.parametrize("name", ["Gemma2", "DeepseekV3", "GptOss", "Granite"])
def test_training_equals_decoding_in_other_families(name, encoding):
    """Eager attention with soft-capping, with sinks; keys and values of different sizes."""
    check_training_equals_decoding(of_family(name), encoding, 5, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_family_decodes_to_plain_output(name):
    model = of_family(name)
    target, prompt = verify.Target(model), [3, 1, 4, 1, 5]
    drafter = random_drafter(model, "eagle" if name in ("Cohere", "Olmo2", "DeepseekV3") else "edd")
    assert verify.generate(target, drafter, cape.cape, prompt, 12).tokens == plain(model, prompt, 12)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_fresh_mixture_of_experts_learns(name):
    """Every weight of the layer is drawn by the model's own rule: memory that nobody writes is NaN here."""
    model, (ids, batch, _, _) = of_family(name), forward_of(name)
    torch.use_deterministic_algorithms(True)
    draft_model = fresh(model, "edd")
    torch.use_deterministic_algorithms(False)
    assert all(p.isfinite().all() for p in draft_model.parameters())
    experts = [p for p in draft_model.layer.mlp.experts.parameters() if p.ndim == 3]
    assert experts and all(0.015 < p.std() < 0.025 for p in experts), "initializer_range is 0.02"
    for p, targets in zip(draft_model.layer.parameters(), model.get_decoder().layers[-1].parameters()):
        assert p.ndim == 1 or not torch.equal(p, targets)
    learner = torch.optim.AdamW(draft_model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = draft_model.loss(batch | {"block": 5})
        learner.zero_grad()
        loss.backward()
        learner.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["Llama", "Granite", "Cohere", "Gemma2", "MiniCPM3", "Mixtral"])
def test_in_half_precision_the_scales_are_found_and_nobody_is_refused(name, dtype):
    draft_model = fresh(copy.deepcopy(of_family(name)).to(dtype), "edd")
    found = draft_model.embed_scale, draft_model.logit_scale
    expected = {"Granite": (3, 1 / 4), "Cohere": (1, 1 / 4), "MiniCPM3": (1, 1 / 4)}.get(name, (1, 1))
    assert found == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 2e-3)
    # To the bit: where the target scales nothing, nothing changes
    if expected == (1, 1) and name != "Gemma2":
        assert found == (1, 1)


@pytest.mark.parametrize("name, own, why", [
    ("NanoChat", {}, "embeddings"),                             # norms them
    ("Gemma3nText", dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, laurel_rank=4, head_dim=8,
                         num_kv_shared_layers=0, layer_types=["full_attention"] * 3, intermediate_size=[48] * 3,
                         activation_sparsity_pattern=[0.0] * 3), "embeddings"),
    ("GPTNeoX", {}, "norm"),
    ("Phi", {}, "norm"),
    ("OPT", dict(ffn_dim=48, word_embed_proj_dim=32), "norm"),
])
def test_a_family_that_is_built_otherwise_is_refused_in_one_sentence(name, own, why):
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **own})
    model = class_of(name)(config).eval()
    for kind, (draft_class, _) in edd.KINDS.items():
        with pytest.raises(ValueError, match=why) as refusal:
            draft_class(edd.Config.for_target(model, 2, kind=kind), model)
        assert "is built otherwise (" in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("what", ["embeddings", "last layer", "logits"])
def test_a_target_whose_parts_are_used_otherwise_is_refused(what):
    """Each proof by itself: noise on what the first layer reads, on what the last one gives, or on the logits."""
    model, calls = tiny("llama"), []
    decoder, forward = model.get_decoder(), model.forward
    noise = torch.randn(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def noisy_forward(*args, **kwargs):
        return SimpleNamespace(logits=forward(*args, **kwargs).logits + noise[:VOCAB])

    def noisy_once(module, args):
        calls.append(module)                                    # the first call is the target's own forward's
        return (args[0] + noise, *args[1:]) if len(calls) == 1 else None
    if what == "logits":
        model.forward = noisy_forward
    else:
        part = decoder.layers[0] if what == "embeddings" else decoder.norm
        part.register_forward_pre_hook(noisy_once)
    with pytest.raises(ValueError, match=f"LlamaForCausalLM is built otherwise .its {what} "):
        fresh(model, "edd")
    hooks = sum(len(m._forward_pre_hooks) for m in model.modules())
    assert hooks == (what != "logits"), "only this test's own hook stays"


# ---------------------------------------------------------------- parts of a target that are quantised, or lie elsewhere
def test_a_part_reads_what_the_target_feeds_it():
    """x comes in the type of `like`, and what is said goes back to where x lies."""
    read = []
    part = edd.Part(lambda x: read.append(x.dtype) or 2 * x, torch.zeros(1, dtype=torch.bfloat16))
    assert torch.equal(part(torch.ones(3)).float(), torch.full((3,), 2.0)) and read == [torch.bfloat16]


def test_a_copy_leaves_behind_what_accelerate_hangs_on_a_module():
    """Its hook (and with it the weights of a whole model) is not copied, its forward is the class's own, its weights are there."""
    norm, hook = torch.nn.LayerNorm(4, device="meta"), SimpleNamespace(weights=object())
    norm._hf_hook, norm.forward = hook, functools.partial(lambda module, x: 0 / 0, norm)
    twin = edd.own_copy(norm)
    torch.nn.init.ones_(twin.weight), torch.nn.init.zeros_(twin.bias)
    assert twin._hf_hook is hook and twin is not norm and norm.weight.is_meta
    torch.testing.assert_close(twin(torch.tensor([0.0, 0.0, 1.0, 1.0])), torch.tensor([-1.0, -1.0, 1.0, 1.0]), atol=1e-4, rtol=0)


def test_a_head_with_a_bias_is_copied_with_it(llama):
    model = copy.deepcopy(llama)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB, dtype=torch.float64))
    own = fresh(model, "edd")
    torch.testing.assert_close(own.head.weight, model.lm_head.weight)
    torch.testing.assert_close(own.head.bias, model.lm_head.bias)
    assert own.head.bias.requires_grad and fresh(llama, "edd").head.bias is None


@pytest.mark.parametrize("name", ["edd", "vdm", "eagle", "medusa"])
@pytest.mark.parametrize("apart", ["model.norm", "model.layers.2", "model.embed_tokens"])
def test_a_target_that_accelerate_spreads(name, apart, tmp_path):
    """One part lies on the disk, with the head: the same drafter says the same."""
    pytest.importorskip("accelerate")
    whole = tiny("llama").float()
    whole.save_pretrained(tmp_path / "model")
    parts = ["model.embed_tokens", "model.rotary_emb", "model.norm", *(f"model.layers.{i}" for i in range(3))]
    places = dict.fromkeys(parts, "cpu") | {"lm_head": "disk", apart: "disk"}
    spread = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk")
    save_drafter(tmp_path / "drafter", random_edd(whole, **edd.VARIANTS[name]), {"kind": name})
    runs = []
    for model in (whole, spread):
        drafter, _ = edd.load(tmp_path / "drafter", model)
        out = verify.generate(verify.Target(model), drafter, cape.cape, [3, 1, 4], 12)
        assert out.tokens == plain(whole, [3, 1, 4], 12)
        runs.append(out.runs)
    assert runs[0] == runs[1] and drafter.device == torch.device("cpu")
