"""beyond/shared.py: a layer between the target's tables on a short list of words, against whole tables, KL by hand, and paths by themselves."""
from collections import Counter

import pytest
import torch
from conftest import VOCAB, plain, shared, tiny, weighty
from safetensors.torch import load_file
from test_glide import EXACT, batch_of, save, text, view
from test_verify import path_to

import cape
import edd
import glide
import pct
import verify
from beyond.shared import EDDConfig, EDDShared, GlideConfig, GlideShared, frequent_words

WORDS = [7, 2, 5, 3]
OTHERS = [token for token in range(VOCAB) if token not in WORDS]

def made(model, name, words=len(WORDS), **more):
    """A random draft model, and what decodes with it."""
    if name == "edd":
        module = weighty(lambda: EDDShared(EDDConfig.for_target(model, 2, words=words, **more), model), 1)
    else:
        config = GlideConfig.for_target(model, layer=1, words=words, window=3, **more)
        module = weighty(lambda: GlideShared.for_target(model, config, 64), 1)
    if words:
        module.choose_words(torch.tensor(WORDS))
    return module, (edd if name == "edd" else glide).Drafter(module)

def hidden_of(module, batch):
    """What the module's head reads of a batch, as in training."""
    if isinstance(module, EDDShared):
        return module(batch["ids"], batch["hidden"][2], 5)
    return module(batch["ids"], batch["kv"])

def tied_llama():
    return tiny("llama", tie_word_embeddings=True)

def test_the_most_frequent_words():
    """By a Counter; the end of a text comes first, however rare it is; of equally frequent ones the lower."""
    for seed in range(20):
        tokens, count = text(seed, seed, 9), Counter(text(seed, seed, 9).tolist())
        ranked = sorted(range(9), key=lambda token: (-count[token], token))
        assert frequent_words(tokens, 5, 9).tolist() == ranked[:5]
        assert frequent_words(tokens, 5, 9, eos=8).tolist() == [8, *(token for token in ranked if token != 8)][:5]

@pytest.mark.parametrize("name", ["glide", "edd"])
@pytest.mark.parametrize("target", [lambda: shared("qwen2"), tied_llama])
def test_the_layer_learns_among_the_words_alone(target, name):
    """The loss is KL over the words' logits, in float64; each weight of the drafter gets a gradient, none of the target's."""
    model = target()
    batch = batch_of(model, torch.stack((text(13), text(13, 8))), {2, 3})
    batch["learn"][1, :4] = False
    batch["count"] = batch["learn"].sum()
    module, _ = made(model, name, bias=True) if name == "glide" else made(model, name)
    # The target's own last hidden state gives the target's own logits.
    whole, batch["logits"] = batch["logits"], module.word_logits(batch["hidden"][3])
    torch.testing.assert_close(batch["logits"], whole[..., WORDS], **EXACT)
    model.zero_grad()
    found = module.loss(batch)
    found.backward()
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(p.grad.abs().sum() > 0 for p in module.parameters())
    with torch.no_grad():
        x = hidden_of(module, batch)
        log_d = (x @ model.get_output_embeddings().weight.T)[..., WORDS].log_softmax(-1)
        log_t = whole[..., WORDS].log_softmax(-1)
        each = (log_t.exp() * (log_t - log_d)).sum(-1)[batch["learn"]]
    assert found.item() == pytest.approx(each.mean().item(), abs=1e-5)
    module.config.loss = "lk"
    rate = torch.minimum(log_t.exp(), log_d.exp()).sum(-1)[batch["learn"]]
    assert module.loss(batch).item() == pytest.approx(-rate.log().mean().item(), abs=1e-5)
    # A tied table is turned, and the turn learns; a table by itself is read as it is.
    assert module.config.projected == hasattr(module.projection, "weight") == (target is tied_llama)

@pytest.mark.parametrize("name", ["glide", "edd"])
def test_a_tree_s_logits_are_those_of_training_along_each_path(name):
    """In GLIDE's layer the window of a query holds its own entry and three before it, whatever nodes lie between."""
    model, ids = shared("llama"), text(20)
    module, drafter = made(model, name)
    nodes, parents = [3, 7, 1, 4, 4, 9, 2], [-1, 0, 0, 1, 2, 4, 5]
    batch = batch_of(model, ids[None], {2})
    drafter.begin(view(batch, 0, 10))
    found = torch.cat([drafter.expand(torch.tensor(nodes[i:j]), parents[i:j]) for i, j in ((0, 1), (1, 3), (3, 7))])
    assert found[:, OTHERS].isneginf().all()
    for node in range(7):
        path = [nodes[i] for i in path_to(node, parents)]
        along = batch_of(model, torch.cat((ids[:10], torch.tensor(path)))[None], {2})
        with torch.no_grad():
            trained = module.word_logits(hidden_of(module, along))[0, -1]
        torch.testing.assert_close(found[node, WORDS], trained, **EXACT)
    if name == "glide":
        alone = GlideConfig.for_target(model, layer=1, words=len(WORDS), window=99)
        wide = GlideShared.for_target(model, alone, 64)
        wide.load_state_dict(module.state_dict())
        with torch.no_grad():
            differ = (wide.word_logits(hidden_of(wide, batch)) - module.word_logits(hidden_of(module, batch)))[0].abs().amax(-1)
        assert differ[:4].max() < 1e-9 < 1e-3 < differ[4:].min(), "four entries, its own the last"

@pytest.mark.parametrize("name", ["glide", "edd"])
def test_words_lie_in_the_checkpoint_and_the_output_stays(name, tmp_path):
    """Saved, loaded: the words' logits are those of the whole head, no other is drafted, the text is plain decoding's."""
    model, prompt = shared("qwen2"), [3, 1, 4, 1, 5]
    module, _ = made(model, name)
    save(tmp_path / "short", module, kind=f"{name}-shared")
    saved = load_file(tmp_path / "short" / "model.safetensors")
    assert set(saved) == {"words", *(n for n, _ in module.named_parameters())} and saved["words"].tolist() == WORDS
    assert not any(weight.shape[0] == VOCAB for weight in saved.values()), "neither table is saved"
    whole, drafters = made(model, name, words=0)[0], []
    whole.load_state_dict({n: weight for n, weight in saved.items() if n != "words"})
    save(tmp_path / "whole", whole, kind=f"{name}-shared")
    for folder in ("short", "whole"):
        how = (edd.load, (EDDShared,)) if name == "edd" else (glide.load, (64, GlideShared))
        drafters.append(how[0](tmp_path / folder, model, *how[1])[0])
    batch = batch_of(model, text(12)[None], {2})
    short, full = [drafter.begin(view(batch, 0, 9)) or drafter.expand(torch.tensor([3, 1, 2]), [-1, 0, 0]) for drafter in drafters]
    torch.testing.assert_close(short[:, WORDS], full[:, WORDS], **EXACT)
    assert short[:, OTHERS].isneginf().all() and full.isfinite().all()
    for build in (pct.pct, cape.cape):
        out = verify.generate(verify.Target(model), drafters[0], build, prompt, 8)
        assert out.tokens == plain(model, prompt, 8)
        assert {token for one in out.rounds for token in one.tokens[1:]} <= set(WORDS)
