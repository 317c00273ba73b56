"""EDD: the mask of Figure 3(a), Eq. 4, training equals decoding, each soft-prompt row computed once, nothing stale."""
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


def random_edd(model, seed=1, **more):
    """A draft model with weights large enough that every part matters."""
    draft_model = edd.EDD(edd.Config.for_target(model, **{"hidden": 2, **more}), model).eval()
    torch.manual_seed(seed)
    for p in draft_model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.3)
    return draft_model


def view(ids, hidden, since, t):
    return SimpleNamespace(tokens=ids[since:t], length=t, kv={}, hidden={2: hidden[since:t]})


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
    hidden = frozen_forward(model, ids, "float32", {2})["hidden"][2]
    with torch.no_grad():
        trained = draft_model(ids, hidden, block).softmax(-1)[0]
        for t in range(block, T, block):
            drafter.begin(view(ids[0], hidden[0], t - block, t))
            for i in range(min(block, T - t)):
                row = drafter.expand(ids[0, t + i:t + i + 1], [i - 1])[0]
                torch.testing.assert_close(row, trained[t + i].float(), atol=1e-6, rtol=0)
            drafter.keep(ids[0, t:t + block].tolist())
        if encoding:                                            # the soft prompt matters, or the above says nothing
            assert (draft_model(ids, hidden.roll(1, -1), block).softmax(-1)[0] - trained)[block:].abs().max() > 0.01


def test_training_does_not_see_what_drafting_cannot(model):
    """Changing hidden states from position k on leaves all rows of blocks up to k's alone."""
    draft_model, L = random_edd(model), 5
    ids = torch.randint(VOCAB, (1, 20), generator=torch.Generator().manual_seed(3))
    hidden = frozen_forward(model, ids, "float32", {2})["hidden"][2]
    with torch.no_grad():
        base = draft_model(ids, hidden, L)
        for k in (0, 4, 5, 12, 19):
            out = draft_model(ids, torch.cat((hidden[:, :k], hidden[:, k:] + 1), 1), L)
            blind = (k // L + 1) * L
            assert torch.equal(out[:, :blind], base[:, :blind])
            assert blind >= 20 or not torch.allclose(out[:, blind:], base[:, blind:])


def test_rows_of_a_tree_equal_paths_drafted_alone(model):
    drafter = edd.Drafter(random_edd(model))
    ids = torch.randint(VOCAB, (13,), generator=torch.Generator().manual_seed(3))
    hidden = frozen_forward(model, ids[None], "float32", {2})["hidden"][2][0]
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


@pytest.mark.parametrize("encoding", [True, False])
def test_a_round_costs_the_committed_and_the_drafted_rows(model, encoding):
    """Rows that go through the layer, and what a round says, whatever was drafted and rejected before."""
    draft_model = random_edd(model, encoding=encoding)
    drafter, fresh, passed = edd.Drafter(draft_model), edd.Drafter(draft_model), []
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (36,), generator=g)
    hidden = frozen_forward(model, ids[None], "float32", {2})["hidden"][2][0]
    t, before = 4, 0
    with torch.no_grad():
        while t < 30:
            hook = draft_model.layer.register_forward_pre_hook(lambda module, args: passed.append(args[0].shape[1]))
            passed.clear()
            drafter.begin(view(ids, hidden, before, t))
            root = drafter.expand(ids[t:t + 1], [-1])
            drafter.expand(torch.stack(((ids[t + 1] + 1) % VOCAB, ids[t + 1])), [0, 0])
            drafter.expand(ids[t + 2:t + 3], [2])
            assert passed == [t - before + 1, 2, 1], "rows of a round depend on what is new, not on the context"
            hook.remove()
            fresh.reset()
            fresh.begin(view(ids, hidden, 0, t))
            torch.testing.assert_close(root, fresh.expand(ids[t:t + 1], [-1]), atol=1e-6, rtol=0)
            gained = int(torch.randint(5, (1,), generator=g))
            drafter.keep(ids[t:t + 1 + gained].tolist())
            before, t = t, t + 1 + gained


@pytest.mark.parametrize("kind", list(edd.VARIANTS))
def test_no_gradient_reaches_the_target_and_all_of_the_drafter_learns(llama, kind):
    import numpy as np
    llama.zero_grad()
    llama.requires_grad_(True)
    draft_model = random_edd(llama, **edd.VARIANTS[kind])
    batch = frozen_forward(llama, torch.randint(VOCAB, (2, 20)), "float32", {2})
    loss, _ = draft_model.loss(batch | {"block": None, "random": np.random.default_rng(0)})
    loss.backward()
    assert all(p.grad is None for p in llama.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft_model.parameters())


def test_block_lengths_are_drawn_from_the_whole_range(llama, monkeypatch):
    import numpy as np
    seen = []
    monkeypatch.setattr(edd, "dual_block_mask", lambda T, L, mask=edd.dual_block_mask: seen.append(L) or mask(T, L))
    batch = frozen_forward(llama, torch.randint(VOCAB, (1, 20)), "float32", {2})
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
    torch.testing.assert_close(frozen_forward(model, ids, "float32", {3})["hidden"][3], states[-4])
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
    frozen_forward(llama, torch.tensor([prompt]), "float32", {1})
    assert hooks() == 0


def test_a_broken_or_foreign_checkpoint_is_one_sentence(llama, tmp_path):
    draft_model = random_edd(llama).float()
    save_drafter(tmp_path / "edd", draft_model, {"kind": "edd"})
    single = tiny("llama").float()
    drafter, about = edd.load(tmp_path / "edd", single)
    assert about["config"]["hidden"] == 2
    torch.testing.assert_close(drafter.model.head.weight, draft_model.head.weight.bfloat16().float())
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
