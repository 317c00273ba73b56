"""EDD: the mask of Figure 3(a), Eq. 4, training equals decoding, losses; EAGLE and MEDUSA-1."""
import numpy as np
import pytest
import torch
from conftest import random_edd, shared, tiny, weighty
from test_glide import batch_of, text, view

import edd
from beyond import eagle, medusa

LAST = 3                         # the tiny targets' last hidden states, which EAGLE and MEDUSA read
FEW = ["llama-eager", "qwen2-mixed"]        # targets that between them have grouped keys, biases, windows, both kinds of attention

def rounding(model):
    """How far two ways to one number may be apart: eager attention takes its softmax in float32."""
    return 1e-3 if model.config._attn_implementation == "eager" else 1e-6

# ---------------------------------------------------------------- equations 3 and 4
def test_dual_block_mask_entry_by_entry():
    for T, L in ((1, 5), (7, 1), (12, 4), (13, 5), (6, 9)):
        i, k = torch.arange(T)[:, None], torch.arange(T)
        start = i // L * L                                      # where the block of t_i begins: j L
        # Hidden states strictly before the block; tokens of the own block up to itself
        assert torch.equal(edd.dual_block_mask(T, L), torch.cat((k < start, (start <= k) & (k <= i)), 1))

@pytest.mark.parametrize("name, block, encoding", [("llama", 3, True), ("qwen2-mixed", 5, True), ("llama-eager", 5, False)])
def test_training_equals_decoding(name, block, encoding):
    """Rounds that begin where blocks do: the dual-block forward's logits."""
    T, model = 13, shared(name)
    draft_model, batch = random_edd(model, encoding=encoding), batch_of(model, text(T)[None], {2})
    drafter, ids, hidden = edd.Drafter(draft_model), batch["ids"], batch["hidden"][2]
    with torch.no_grad():
        trained = draft_model.head(draft_model(ids, hidden, block))[0]
        for t in range(block, T, block):
            drafter.begin(view(batch, t - block, t))
            for i in range(t, min(t + block, T)):
                found = drafter.expand(ids[0, i:i + 1], [i - t - 1])[0]
                torch.testing.assert_close(found, trained[i], atol=rounding(model) / 100, rtol=0)
            drafter.keep(list(range(min(block, T - t))))

@pytest.mark.parametrize("name", FEW)
def test_the_soft_prompt_is_keys_and_values_alone(name):
    """As where hidden states go through the whole layer, each seeing itself alone: the same outputs and gradients."""
    model = shared(name)
    draft_model, batch = random_edd(model), batch_of(model, text(18, 1).view(2, 9), {2})
    ids, hidden, weights = batch["ids"], batch["hidden"][2], [*draft_model.layer.parameters()]
    found = draft_model(ids, hidden, 4)
    x, mask = torch.cat((hidden, draft_model.embed(ids)), 1), torch.eye(18, dtype=torch.bool)
    mask[9:] = edd.dual_block_mask(9, 4)
    expected = draft_model.norm(draft_model.run_layer(x, torch.arange(9).repeat(1, 2), mask)[:, 9:])
    torch.testing.assert_close(found, expected, atol=rounding(model) / 100, rtol=0)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), weights) for x in (found, expected))):
        torch.testing.assert_close(a, b, atol=rounding(model), rtol=1e-3)

# ---------------------------------------------------------------- losses, and what the drafter is
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

def test_it_is_the_targets_own_layer_with_its_embedding_and_head():
    """Copies that learn apart from the target's; the layer is fresh, of its class, drawn with its initializer_range; so is the norm."""
    own = tiny("qwen2", num_hidden_layers=6)
    own.config.initializer_range = 0.05
    own.get_decoder().norm.weight.data.fill_(3.0)
    config = edd.Config.for_target(own)
    assert config.hidden == 3 == edd.Config.for_target(own, **edd.VARIANTS["edd-top"]).hidden, "the fourth-to-last of 0 (the embeddings) to 6"
    draft_model, layer = edd.EDD(config, own), own.get_decoder().layers[-1]
    assert type(draft_model.layer) is type(layer)
    assert torch.equal(draft_model.embed.weight, own.get_input_embeddings().weight)
    assert torch.equal(draft_model.head.weight, own.get_output_embeddings().weight)
    draft_model.head.weight.data += 1
    assert not torch.allclose(draft_model.head.weight, own.get_output_embeddings().weight), "a copy"
    assert all(0.045 < p.std() < 0.055 for p in draft_model.layer.parameters() if p.ndim == 2)
    assert torch.equal(draft_model.norm.weight, torch.ones_like(draft_model.norm.weight))
    for wrong in (0, 7, -7):
        with pytest.raises(ValueError, match="no layer's output"):
            edd.Config.for_target(own, wrong)

# ---------------------------------------------------------------- the baselines of Table 1
@torch.no_grad()
@pytest.mark.parametrize("width", [32, 16])
def test_eagle_learns_what_it_drafts(width):
    """SmoothL1, a mean over D, and 0.1 sqrt(4096 / D) of the cross entropy to the target's distribution.  (Drafting: test_convert.py.)"""
    model = tiny("llama", hidden_size=width)
    draft_model = weighty(lambda: eagle.Eagle(eagle.Config.for_target(model), model), 1)
    batch = batch_of(model, text(9, 4)[None], {LAST})
    ids, f = batch["ids"][0], batch["hidden"][LAST][0]
    torch.testing.assert_close(draft_model.logits(f), batch["logits"][0])              # the feature is what the target's head reads
    assert {k.split(".")[0] for k in draft_model.state_dict()} == {"fc", "layer"}, "the frozen parts are not its own"
    fed = []
    draft_model.fc.register_forward_pre_hook(lambda module, args: fed.append(args[0][0]))
    predicted = draft_model(ids[None], f[None])[0]
    assert torch.equal(fed[0], torch.cat((model.get_input_embeddings()(ids[1:]), f[:-1]), -1)), "a token, the feature before it"
    trained, d = draft_model.logits(predicted), (predicted - f[1:]).abs()
    ce = -(batch["logits"][0, 1:].softmax(-1) * trained.log_softmax(-1)).sum(-1)
    expected = torch.where(d < 1, d * d / 2, d - 0.5).mean(-1) + 0.1 * (4096 / width) ** 0.5 * ce
    loss = expected[:-1].sum() / 8                              # of nine tokens the first has none
    torch.testing.assert_close(draft_model.loss(batch).double(), loss, atol=1e-5, rtol=1e-5)

@torch.no_grad()
def test_medusas_heads_are_shifted_as_the_docstring_says(llama):
    """head_k(f + SiLU(W_k f + b_k)) of f_i predicts t_{i+2+k}; a token at depth d comes from head d - 1."""
    batch, config = batch_of(llama, text(40, 1).view(2, 20), {LAST}), medusa.Config.for_target(llama)
    ids, f, found, loss = batch["ids"], batch["hidden"][LAST], [], 0
    draft_model = medusa.Medusa(config, llama)
    assert len(draft_model.heads) == 5
    for head, x in zip(draft_model.heads, draft_model(f)):
        torch.testing.assert_close(head(x), batch["logits"])              # untrained: every head predicts what the target does
    draft_model = weighty(lambda: medusa.Medusa(config, llama), 1)
    for k, (head, w) in enumerate(zip(draft_model.heads, draft_model.w)):
        z = f @ w.weight.T + w.bias.normal_()
        found.append((f + z * z.sigmoid()) @ head.weight.T)
        picked = [-found[k][b, i].log_softmax(-1)[ids[b, i + 2 + k]] for b in range(2) for i in range(20 - 2 - k)]
        loss += 0.8 ** k * sum(picked) / 38                               # 19 positions of each text count
    torch.testing.assert_close(draft_model.loss(batch).double(), loss, atol=1e-5, rtol=1e-5)
    drafter = medusa.Drafter(draft_model)
    drafter.begin(view(batch, 0, 8))
    logits = drafter.expand(torch.arange(8), [-1, 0, 0, 1, 3, 4, 5, 6])
    assert torch.equal(logits[1], logits[2]) and (logits[6:] == float("-inf")).all(), "whatever the path; nothing beyond the last head"
