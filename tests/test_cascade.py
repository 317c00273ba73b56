"""The cascade: Algorithm 1 against a plain recursion, lenient reviews, limits."""
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, plain, relative, tiny
from helpers import brute_force, lines_to_use

import cascade
import maxgram
import verify
from maxgram import MaxGram

BIGRAM = [3, 5, 0, 1, 2, 7, 0, 9, 4, 6, 8, 1]
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1]

@pytest.fixture(scope="module")
def models():
    """A target, and a larger and a smaller drafter, of one layer each."""
    target = tiny("llama", num_hidden_layers=1)
    return target, relative(target, 0.03, 1), relative(target, 0.06, 2)

def cascade_of(models, K=None, lenience=1.0, gram=None):
    """A cascade with caches of its own, at the beginning of a sequence."""
    stages = [verify.Target(model) for model in models]
    drafter = cascade.Cascade(stages, K, lenience, gram, VOCAB)
    drafter.reset(verify.Rule().probs)
    return drafter

def shown(ids, length=None):
    """A View that shows these ids."""
    return verify.View(torch.tensor(ids), ids, length or len(ids), {}, {})

def drafts(drafter, most=64):
    """The greedy proposal -> (tokens, their entries in gen.probs)."""
    tree = drafter.chain(SimpleNamespace(remaining=most), torch.tensor([drafter.root_id]))
    assert tree.parents.tolist() == list(range(-1, len(tree.tokens) - 1))
    assert set(tree.expand_index.tolist()) == {-1}, "it was drafted without expand"
    return tree.tokens[1:].tolist(), drafter.gen.probs[drafter.gen.committed + 1:]

# ---------------------------------------------------------------- Algorithm 1
def algorithm_1(stages, K, prefix, lenience, committed):
    """CascadeSpeculativeDraftingStep without M_t's review -> [(token, its last reviewer, logits)].

    stages: models, "gram" last.  committed: what Max-Gram may search.  On lists and plain forwards.
    """
    gen = []
    for i, stage in enumerate(stages):
        added = 0
        while added < K[0][i]:
            text = prefix + [t for t, _, _ in gen]
            if stage == "gram":
                chain, _ = brute_force(committed, text[len(committed):], K[0][i], (), BIGRAM)
                gen += [(t, "gram", None) for t in chain]
                break
            inner = [row[i + 1:] for row in K[i + 1:]]
            draft = algorithm_1(stages[i + 1:], inner, text, lenience, committed)
            read = torch.tensor([text + [t for t, _, _ in draft]])
            logits = stage(read, use_cache=False).logits[0, len(text) - 1:]
            new = []
            for row, d in zip(logits, draft):
                kept = d[0] == row.argmax().item()
                if not kept and lenience > 1 and d[1] != "gram":
                    kept = d[2].softmax(-1)[d[0]] <= lenience * row.softmax(-1)[d[0]]
                new.append((d[0] if kept else row.argmax().item(), stage, row))
                if not kept:
                    break
            else:
                new.append((logits[-1].argmax().item(), stage, logits[-1]))
            gen, added = gen + new, added + len(new)
    return gen

KS = [(1, True, [[3, 4], [0, 5]]), (2, False, [[2, 3], [0, 2]]),
      (2, True, [[3, 2, 4], [0, 1, 6], [0, 0, 5]]), (0, True, [[6]])]

@pytest.mark.parametrize("neural, gram, K", KS)
@pytest.mark.parametrize("lenience", [1.0, 3.0])
def test_chains_against_a_plain_recursion(models, neural, gram, K, lenience):
    """Tokens and their reviewers' logits, over rounds of different lengths."""
    mine = list(models[1:1 + neural])
    drafter = cascade_of(mine, K, lenience, MaxGram(BIGRAM) if gram else None)
    stages = mine + ["gram"] * gram
    text = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(neural)).tolist()
    text[12:18] = text[3:9]                                        # something to match
    at, seen = 5, 0
    with torch.inference_mode():
        while at < 20:
            drafter.begin(shown(text[seen:at], at), text[at])
            expected = algorithm_1(stages, K, text[:at + 1], lenience, text[:at])
            whole, probs = drafts(drafter)
            assert whole == [t for t, _, _ in expected]
            for prob, (_, _, logits) in zip(probs, expected):
                torch.testing.assert_close(prob, logits, atol=1e-9, rtol=0)
            # Without lenience the tokens do not depend on how many are asked for.
            if lenience == 1:
                assert drafts(drafter, len(whole) // 2)[0] == whole[:len(whole) // 2]
                assert drafts(drafter, 0)[0] == []
            seen, at = at, at + 1 + at % 4

@pytest.mark.parametrize("capacity", [7, 8, 9, 10])
def test_a_stage_stops_at_its_context_and_the_next_ones_go_on(models, capacity):
    """After 9 tokens it reads up to its capacity and adds one: none where the text fills it."""
    drafter = cascade_of([models[1]], [[3, 4], [0, 4]], gram=MaxGram([1] * VOCAB))
    drafter.models[0].capacity = capacity
    with torch.inference_mode():
        drafter.begin(shown(TEXT[:8]), 7)
        tokens, probs = drafts(drafter)
    reviewed = sum(map(torch.is_tensor, probs))
    assert reviewed == max(0, capacity + 1 - 9)
    assert len(tokens) == reviewed + 4, "Max-Gram adds its four"

# ---------------------------------------------------------------- a sampled review
def reviewed_by_the_papers_rule(p, q, l):
    """The distribution of what comes out of one review of x ~ q, case by case (section 3.1)."""
    positive = [max(0.0, a - b) for a, b in zip(p, q)]
    accepted = [b if b <= l * a else l * a for a, b in zip(p, q)]
    rejected = 1 - sum(accepted)
    return [a + rejected * x / (sum(positive) or 1) for a, x in zip(accepted, positive)]

@pytest.mark.parametrize("vocab, l", [(2, 1.0), (3, 1.3), (5, 3.0), (4, 1e6)])
def test_one_lenient_review_exactly(vocab, l):
    """q' is what the paper's rule gives, and what speculative sampling towards q' gives."""
    generator = torch.Generator().manual_seed(vocab)
    pairs = torch.rand(2, 30, vocab, generator=generator, dtype=torch.float64) ** 3
    pairs[:, 10:] *= torch.rand(2, 20, vocab, generator=generator) < 0.6
    pairs[:, range(30), torch.arange(30) % vocab] += 1e-3          # not all are zeros
    p, q = pairs / pairs.sum(-1, keepdim=True)
    p[0], q[0], q[1] = torch.eye(vocab)[0], torch.eye(vocab)[1], p[1]
    every_l = torch.full((len(p), 1), l, dtype=torch.float64)
    found = cascade.lenient_distribution(p, q, every_l)
    for one_p, one_q, one in zip(p.tolist(), q.tolist(), found.tolist()):
        assert reviewed_by_the_papers_rule(one_p, one_q, l) == pytest.approx(one, abs=1e-12)
        assert reviewed_by_the_papers_rule(one, one_q, 1.0) == pytest.approx(one, abs=1e-12)

# ---------------------------------------------------------------- the source, K, and mistakes
def test_each_model_encodes_the_source_and_max_gram_searches_it():
    """As with T5.  By default k is 1, as in Table 2, and Max-Gram proposes ten tokens."""
    encoded = []
    stage = SimpleNamespace(vocab=VOCAB, capacity=0, reset=lambda: 0, encode=encoded.append)
    drafter = cascade.Cascade([stage], gram=MaxGram())
    assert drafter.K == [[1, 10], [0, 10]]
    source = [5, 6, 7, 8, 9, 10]
    drafter.reset(verify.Rule().probs)
    drafter.encode(source)
    drafter.begin(shown([0]), 6)
    assert encoded == [source] and drafts(drafter, 3)[0] == [7, 8, 9]

def test_a_mistake_is_one_sentence(models):
    target = verify.Target(models[0])
    for settings, words in (({"K": [[3]]}, "matrix of 2 x 2"), ({"vocab": 13}, "12 tokens, not")):
        with pytest.raises(ValueError, match=words):
            cascade.Cascade([target], **{"gram": MaxGram(), **settings})
    # A target would lose its own cache to the drafts.  Another Target of the same model is fine.
    drafter = cascade.Cascade([target])
    with pytest.raises(ValueError, match="a Target of its own"):
        verify.generate(target, drafter, drafter.chain, TEXT, 9)

def test_the_docstrings_lines(models):
    large, base, small = models
    given = dict(verify=verify, cascade=cascade, maxgram=maxgram, large=large, base=base,
                 small=small, text=list(TEXT))
    exec(lines_to_use(cascade).replace("new_tokens=40", "new_tokens=20"), given)
    assert given["text"] == TEXT + plain(large, TEXT, 20)
