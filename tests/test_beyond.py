"""beyond/shared.py: a layer between the target's tables, on a short list of words."""
from collections import Counter

import pytest
import torch
from conftest import VOCAB, random_draft_model, random_drafter, tiny
from safetensors.torch import load_file
from test_glide import (
    EXACT, all_labels, batch_of, mean_loss, of_logits, save, text, trees_equal_training, view)

from beyond.shared import frequent_words
from runtime import families

# The texts here are longer than the window of three entries.
SETTINGS = {"glide-shared": {"layer": 1, "window": 3}, "edd-shared": {}}
WORDS = torch.tensor([7, 2, 5, 3])
OTHERS = [token for token in range(VOCAB) if token not in WORDS]

@pytest.fixture
def tied():
    return tiny("llama", tie_word_embeddings=True)

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
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_layer_learns_among_the_words_alone(kind):
    """KL, or the acceptance rate, of softmaxes over the words' logits; every weight learns.

    A matrix follows the embedding of a tied table.
    """
    model = tiny("llama", tie_word_embeddings=kind == "edd-shared")
    model.requires_grad_(False)
    draft_model = random_draft_model(model, kind, words=WORDS, **SETTINGS[kind])
    assert draft_model.config.projected == (kind == "edd-shared")
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

def test_what_it_starts_with(tied):
    """The projection rotates, the last norm is the target's; other losses are refused."""
    norm = tied.get_decoder().norm.weight
    norm.data.uniform_(0.5, 2)
    for kind in SETTINGS:
        config = random_draft_model(tied, kind).config
        draft_model = families.new(kind, config, tied, 64)
        torch.testing.assert_close(draft_model.norm.weight, norm, rtol=1e-5, atol=0)
        matrix = draft_model.between.projection.weight
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(32).double(), rtol=0, atol=1e-6)
        config.loss = "ce"
        with pytest.raises(ValueError, match="kl or lk, not by ce"):
            families.new(kind, config, tied, 64)

# ---------------------------------------------------------------- decoding
@pytest.mark.parametrize("kind", SETTINGS)
def test_decoding_trees_equals_training(kind, llama):
    """Among the words; the logits of all others are -inf."""
    drafter = random_drafter(llama, kind, words=WORDS, **SETTINGS[kind])
    trees_equal_training(drafter, llama)

def test_the_window_holds_a_query_and_three_entries_before_it(llama):
    batch = batch_of(llama, text(20)[None])
    narrow = random_draft_model(llama, "glide-shared", words=WORDS, layer=1, window=3)
    wide = random_draft_model(llama, "glide-shared", words=WORDS, layer=1, window=99)
    with torch.no_grad():
        differ = hidden_of(wide, batch) - hidden_of(narrow, batch)
    differ = differ[0].abs().amax(-1)
    assert differ[:4].max() < 1e-9 < 1e-3 < differ[4:].min()

@pytest.mark.parametrize("kind", SETTINGS)
def test_the_words_lie_in_the_checkpoint_and_the_tables_do_not(kind, tmp_path, tied):
    """Saved, loaded: the words' logits are those of the whole head, and no other is drafted.

    A checkpoint of before has other names.
    """
    draft_model = random_draft_model(tied, kind, words=WORDS, **SETTINGS[kind])
    save(tmp_path / "short", draft_model, kind=kind)
    saved = load_file(tmp_path / "short" / "model.safetensors")
    assert torch.equal(saved["between.words"], WORDS)
    assert not any(weight.shape[0] == VOCAB for weight in saved.values())
    whole = random_draft_model(tied, kind, **SETTINGS[kind])
    whole.load_state_dict({name: saved[name] for name in whole.state_dict()})
    save(tmp_path / "whole", whole, kind=kind)
    before = {name.removeprefix("between."): weight for name, weight in saved.items()}
    draft_model.state_dict = lambda: before
    save(tmp_path / "before", draft_model, kind=kind)
    batch, found = batch_of(tied, text(12)[None], {2}), []
    for folder in ("short", "whole", "before"):
        drafter, _ = families.load(tmp_path / folder, tied, 40)
        of_logits(drafter).begin(view(batch, 0, 9), 3)
        found.append(drafter.expand(torch.tensor([3, 1, 2]), [-1, 0, 0]))
    short, full, older = found
    torch.testing.assert_close(short[:, WORDS], full[:, WORDS], **EXACT)
    assert short[:, OTHERS].isneginf().all() and full.isfinite().all()
    assert torch.equal(short, older)
