"""EDD: the mask of Figure 3(a), the soft prompt, training equals decoding; EAGLE and MEDUSA-1."""
import pytest
import torch
from conftest import shared, tiny, weighty
from test_glide import (
    all_labels, batch_of, mean_loss, new_edd, of_logits, text, trees_equal_training, view)

import edd
from beyond import eagle, medusa

LAST = 3                         # the tiny targets' last hidden states: EAGLE and MEDUSA read them

def rounding(model):
    """How far two ways to one number may be apart: eager attention's softmax is in float32."""
    return 1e-3 if model.config._attn_implementation == "eager" else 1e-6

# ---------------------------------------------------------------- section 3.1
def test_dual_block_mask_entry_by_entry():
    """Eq. 3: hidden states strictly before the block; tokens of the own block up to itself."""
    for T, L in ((1, 5), (7, 1), (12, 4), (13, 5), (6, 9)):
        mask = edd.dual_block_mask(T, L)
        assert mask.shape == (T, 2 * T)
        for i in range(T):
            start = i // L * L                                  # where the block of t_i begins: jL
            for k in range(T):
                assert mask[i, k] == (k < start)
                assert mask[i, T + k] == (start <= k <= i)

# Targets that between them have grouped keys, biases, windows, and both kinds of attention
@pytest.mark.parametrize("name", ["llama-eager", "qwen2-mixed"])
def test_the_soft_prompt_is_keys_and_values_alone(name):
    """As where hidden states go through the layer, each seeing itself: outputs and gradients."""
    model = shared(name)
    draft_model, batch = new_edd(model), batch_of(model, text(18, 1).view(2, 9), {2})
    ids, hidden = batch.ids, batch.hidden[2]
    found = draft_model(ids, hidden, 4)
    x = torch.cat((hidden, draft_model.embed(ids)), 1)
    mask = torch.eye(18, dtype=torch.bool)
    mask[9:] = edd.dual_block_mask(9, 4)
    position = torch.arange(9).repeat(1, 2)
    x = edd.run_layer(draft_model.layer, draft_model.rotary, x, position, mask)
    expected = draft_model.norm(x[:, 9:])
    torch.testing.assert_close(found, expected, atol=rounding(model) / 100, rtol=0)
    weights = list(draft_model.layer.parameters())
    gradients = [torch.autograd.grad(x.square().sum(), weights) for x in (found, expected)]
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=rounding(model), rtol=1e-3)

@pytest.mark.parametrize("name, encoding", [
    ("llama", True), ("qwen2-mixed", True), ("llama-eager", True), ("llama-eager", False)])
def test_decoding_trees_equals_training(name, encoding):
    """Under the dual-block mask; the VDM's is causal."""
    model = shared(name)
    drafter = edd.Drafter(new_edd(model, encoding=encoding))
    trees_equal_training(drafter, model, atol=rounding(model) / 100)

# ---------------------------------------------------------------- what the drafter is
def test_the_papers_settings_are_the_defaults():
    """Appendix B: the fourth-to-last of 0 (the embeddings) ... 6, L from 5 to 10; Eq. 4."""
    model = tiny("llama", num_hidden_layers=6)
    c = edd.Config.for_target(model)
    assert (c.hidden, c.blocks, c.loss, c.encoding) == (3, (5, 10), "kl", True)
    for wrong in (0, 7, -7):
        with pytest.raises(ValueError, match="no layer's output"):
            edd.Config.for_target(model, wrong)

def test_its_parts():
    """Copies of the embedding and head, which learn apart; a new layer and norm of its classes.

    The RoPE is the target's own: it is neither saved with the drafter nor converted with it.
    """
    model = tiny("qwen2")
    model.config.initializer_range = 0.05
    decoder = model.get_decoder()
    decoder.norm.weight.data.fill_(3.0)
    model.requires_grad_(False)
    draft_model = edd.EDD(edd.Config.for_target(model, 1), edd.parts_of(model))
    assert type(draft_model.layer) is type(decoder.layers[-1])
    assert type(draft_model.norm) is type(decoder.norm)
    for own, other in ((draft_model.embed, model.get_input_embeddings()),
                       (draft_model.head, model.get_output_embeddings())):
        assert torch.equal(own.weight, other.weight)
        assert own.weight.data_ptr() != other.weight.data_ptr()
    assert all(p.requires_grad for p in draft_model.parameters())
    matrices = [p for p in draft_model.layer.parameters() if p.ndim == 2]
    assert all(0.045 < p.std() < 0.055 for p in matrices)
    assert torch.equal(draft_model.norm.weight, torch.ones_like(draft_model.norm.weight))
    saved = {name.split(".")[0] for name in draft_model.state_dict()}
    assert saved == {"embed", "layer", "norm", "head"}
    before = decoder.rotary_emb.inv_freq.dtype
    draft_model.half()
    assert decoder.rotary_emb.inv_freq.dtype == before

def test_another_family_needs_parts_of_its_own():
    model = tiny("llama")
    model.config.model_type = "gemma"
    with pytest.raises(ValueError, match="serves llama, mistral, qwen2"):
        edd.parts_of(model)

# ---------------------------------------------------------------- the baselines of Table 1
@torch.no_grad()
@pytest.mark.parametrize("width", [32, 16])
def test_eagle_learns_what_it_drafts(width):
    """SmoothL1, a mean over D, and 0.1 sqrt(4096 / D) of the cross entropy to the target's p."""
    model = tiny("llama", hidden_size=width)
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    parts = edd.parts_of(model)._replace(embed=lambda x: embed(x), head=lambda x: head(x))
    draft_model = weighty(eagle.Eagle(eagle.Config.for_target(model), parts))
    batch = batch_of(model, text(9, 4)[None], {LAST})
    ids, f = batch.ids[0], batch.hidden[LAST][0]
    saved = {name.split(".")[0] for name in draft_model.state_dict()}
    assert saved == {"fc", "layer"}, "the frozen parts are not its own"
    fed = []
    draft_model.fc.register_forward_pre_hook(lambda module, args: fed.append(args[0][0]))
    predicted = draft_model(ids[None], f[None])[0]
    expected = torch.cat((embed(ids[1:]), f[:-1]), -1)
    assert torch.equal(fed[0], expected), "a token, and the feature before it"
    d = (predicted - f[1:]).abs()
    distance = torch.where(d < 1, d * d / 2, d - 0.5).mean(-1)
    log_p_draft = head(predicted).log_softmax(-1)
    cross_entropy = -(batch.logits[0, 1:].softmax(-1) * log_p_draft).sum(-1)
    loss = distance + 0.1 * (4096 / width) ** 0.5 * cross_entropy
    found = mean_loss(draft_model, batch, all_labels(batch))
    # Of nine tokens the first has no prediction, and the last no label.
    torch.testing.assert_close(found.double(), loss[:-1].sum() / 8, atol=1e-5, rtol=1e-5)

@torch.no_grad()
def test_medusas_heads_are_shifted_as_the_docstring_says(llama):
    """head_k(f + SiLU(W_k f + b_k)) of f_i predicts t_{i+2+k}; depth d comes from head d - 1."""
    config = medusa.Config.for_target(llama)
    batch = batch_of(llama, text(40, 1).view(2, 20), {LAST})
    ids, f = batch.ids, batch.hidden[LAST]
    untrained = medusa.Medusa(config, edd.trainable_copy(llama.get_output_embeddings()))
    assert len(untrained.heads) == 5
    for k, head in enumerate(untrained.heads):
        torch.testing.assert_close(head(untrained(f)[:, :, k]), batch.logits)
    head = edd.trainable_copy(llama.get_output_embeddings())
    draft_model = weighty(medusa.Medusa(config, head))
    logits, loss = [], 0
    for k, (head, w) in enumerate(zip(draft_model.heads, draft_model.w)):
        z = f @ w.weight.T + w.bias.normal_()
        logits.append((f + z * z.sigmoid()) @ head.weight.T)
        log_p = logits[k].log_softmax(-1)
        for b in range(2):
            for i in range(20 - 2 - k):
                loss -= 0.8 ** k * log_p[b, i, ids[b, i + 2 + k]]
    # 19 positions of each text have a label.
    found = mean_loss(draft_model, batch, all_labels(batch))
    torch.testing.assert_close(found.double(), loss / 38, atol=1e-5, rtol=1e-5)
    drafter = of_logits(medusa.Drafter(draft_model))
    drafter.begin(view(batch, 0, 8), 1)
    found = drafter.expand(torch.arange(8), [-1, 0, 0, 1, 3, 4, 5, 6])
    for row, k in ((0, 0), (1, 1), (2, 1), (3, 2), (4, 3), (5, 4)):
        torch.testing.assert_close(found[row], logits[k][0, 7])
    assert (found[6:] == float("-inf")).all(), "nothing beyond the last head"
