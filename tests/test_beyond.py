"""beyond/shared.py: a layer between the target's tables, on a short list of words."""
from collections import Counter

import pytest
import torch
from conftest import VOCAB, shared, tiny, weighty
from safetensors.torch import load_file
from test_glide import (
    EXACT, all_labels, batch_of, mean_loss, of_logits, save, text, trees_equal_training, view)

from beyond.shared import EDDConfig, GlideConfig, frequent_words
from runtime import families

KINDS = ["glide-shared", "edd-shared"]
WORDS = torch.tensor([7, 2, 5, 3])
OTHERS = [token for token in range(VOCAB) if token not in WORDS]

def tied_llama():
    return tiny("llama", tie_word_embeddings=True)

def made(kind, model, words=WORDS, **more):
    """A random draft model, in float64, with a window of three entries."""
    if kind == "edd-shared":
        config = EDDConfig.for_target(model, 2, **more)
    else:
        config = GlideConfig.for_target(model, layer=1, **{"window": 3, **more})
    return weighty(families.new(kind, config, model, 64, words))

def hidden_of(draft_model, batch):
    """What the draft model's head reads of a batch, as in training (B, T, D)."""
    [(x, _, _)] = draft_model.terms(batch, 5)
    return x

# ---------------------------------------------------------------- the list of words
def test_the_most_frequent_words():
    """By a Counter; the end of a text comes first; of equally frequent ones the lower."""
    for seed in range(20):
        tokens = text(seed, seed, 9)
        count = Counter(tokens.tolist())
        ranked = sorted(range(9), key=lambda token: (-count[token], token))
        assert frequent_words(tokens, 5, 9).tolist() == ranked[:5]
        ranked.remove(8)
        assert frequent_words(tokens, 5, 9, eos=8).tolist() == [8, *ranked][:5]
    with pytest.raises(ValueError, match="take 1 to 9"):
        frequent_words(tokens, 10, 9)

# ---------------------------------------------------------------- training
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", [lambda: shared("qwen2"), tied_llama])
def test_the_layer_learns_among_the_words_alone(target, kind):
    """KL, or the acceptance rate, of softmaxes over the words' logits; every weight learns."""
    model = target()
    model.requires_grad_(False)
    draft_model = made(kind, model)
    batch = batch_of(model, torch.stack((text(13), text(13, 8))), {2, 3})
    loss_mask = all_labels(batch)
    loss_mask[1, :4] = False
    # The target's own last hidden state gives the target's own logits.
    whole = batch.logits
    batch.logits = draft_model.between.tables.head(batch.hidden[3])
    torch.testing.assert_close(batch.logits, whole[..., WORDS], **EXACT)
    found = mean_loss(draft_model, batch, loss_mask)
    found.backward()
    assert all(p.grad.abs().sum() > 0 for p in draft_model.parameters())
    with torch.no_grad():
        head = model.get_output_embeddings().weight[WORDS]
        log_d = (hidden_of(draft_model, batch) @ head.T).log_softmax(-1)
        log_t = whole[..., WORDS].log_softmax(-1)
        each = (log_t.exp() * (log_t - log_d)).sum(-1)[loss_mask]
        rate = torch.minimum(log_t.exp(), log_d.exp()).sum(-1)[loss_mask]
    assert found.item() == pytest.approx(each.mean().item(), abs=1e-5)
    draft_model.config.loss = "lk"
    found = mean_loss(draft_model, batch, loss_mask)
    assert found.item() == pytest.approx(-rate.log().mean().item(), abs=1e-5)
    model.requires_grad_(True)
    # A matrix follows the embedding of a tied table.
    projected = "between.projection.weight" in draft_model.state_dict()
    assert projected == draft_model.config.projected == (target is tied_llama)

def test_what_it_starts_with():
    """The projection rotates, the last norm is the target's; other losses are refused."""
    model = tied_llama()
    model.get_decoder().norm.weight.data.uniform_(0.5, 2)
    for kind in KINDS:
        config = made(kind, model).config
        draft_model = families.new(kind, config, model, 64)
        norm = model.get_decoder().norm.weight
        torch.testing.assert_close(draft_model.norm.weight, norm, rtol=1e-5, atol=0)
        matrix = draft_model.between.projection.weight
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(32).double(), rtol=0, atol=1e-6)
        config.loss = "ce"
        with pytest.raises(ValueError, match="kl or lk, not by ce"):
            families.new(kind, config, model, 64)

# ---------------------------------------------------------------- decoding
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_trees_equals_training(kind):
    """Among the words; the logits of all others are -inf."""
    model = shared("llama")
    draft_model = made(kind, model)
    trees_equal_training(families.KINDS[kind][2](draft_model), model)

def test_the_window_holds_a_query_and_three_entries_before_it():
    model = shared("llama")
    batch = batch_of(model, text(20)[None])
    draft_model = made("glide-shared", model)
    wide = made("glide-shared", model, window=99)
    with torch.no_grad():
        differ = hidden_of(wide, batch) - hidden_of(draft_model, batch)
    differ = differ[0].abs().amax(-1)
    assert differ[:4].max() < 1e-9 < 1e-3 < differ[4:].min()

@pytest.mark.parametrize("kind", KINDS)
def test_the_words_lie_in_the_checkpoint_and_the_tables_do_not(kind, tmp_path):
    """Saved, loaded: the words' logits are those of the whole head, and no other is drafted.

    A checkpoint of before has other names.
    """
    model = tied_llama()
    save(tmp_path / "short", made(kind, model), kind=kind)
    saved = load_file(tmp_path / "short" / "model.safetensors")
    assert torch.equal(saved["between.words"], WORDS)
    assert not any(weight.shape[0] == VOCAB for weight in saved.values())
    whole = made(kind, model, words=None)
    whole.load_state_dict({name: saved[name] for name in whole.state_dict()})
    save(tmp_path / "whole", whole, kind=kind)
    before = made(kind, model)
    names = {name: name.removeprefix("between.") for name in before.state_dict()}
    before.state_dict = lambda: {names[name]: saved[name] for name in names}
    save(tmp_path / "before", before, kind=kind)
    batch, found = batch_of(model, text(12)[None], {2}), []
    for folder in ("short", "whole", "before"):
        drafter, _ = families.load(tmp_path / folder, model, 40)
        of_logits(drafter).begin(view(batch, 0, 9), 3)
        found.append(drafter.expand(torch.tensor([3, 1, 2]), [-1, 0, 0]))
    short, full, older = found
    torch.testing.assert_close(short[:, WORDS], full[:, WORDS], **EXACT)
    assert short[:, OTHERS].isneginf().all() and full.isfinite().all()
    assert torch.equal(short, older)
