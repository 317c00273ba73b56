"""Max-Gram against a definition by brute force; bigram and confidence."""
import random
from collections import Counter

import pytest
from helpers import brute_force

from maxgram import MaxGram, build_bigram
from training.bigram import measure_confidence

# ---------------------------------------------------------------- proposals
def test_proposals_equal_brute_force():
    """With commits in pieces, of 2 to 4 symbols, so that much matches; a proposal leaves no trace.

    Some ids are no characters of text: surrogates, and those beyond 16 bits.
    """
    rng, ids = random.Random(0), [0, 1, 2, 3, 10, 0xD800, 0xDFFF, 65_536, 1_114_111]
    for _ in range(150):
        symbols, n = rng.sample(ids, rng.randint(2, 4)), rng.choice([0, 1, 2, 5, 25])
        source, generation, draft, bigram = [
            rng.choices(symbols, k=rng.choice([0, rng.randint(1, most)]))
            for most in (40, 40, 6, 6)]
        g, done = MaxGram(bigram), 0
        g.commit_source(source)
        while done < len(generation):
            new = generation[done:done + rng.randint(1, 9)]
            g.commit(new)
            done += len(new)
            before = dict(vars(g))
            assert g.propose(draft, n) == brute_force(generation[:done], draft, n, source, bigram)
            assert vars(g) == before

def test_a_corpus_of_another_tokenizer_is_refused():
    with pytest.raises(ValueError, match="give the tokenizer that the ids were made with"):
        build_bigram([[1, 5]], 5)

# ---------------------------------------------------------------- bigram and confidence
def test_bigram_equals_a_counter():
    """A tie goes to the lower id, and no pair crosses texts."""
    rng = random.Random(0)
    for _ in range(100):
        vocab = rng.randint(2, 7)
        sizes = [rng.randint(0, 30) for _ in range(rng.randint(0, 4))]
        texts = [[rng.randrange(vocab) for _ in range(size)] for size in sizes]
        best = []
        for a in range(vocab):
            counts = Counter(b for ids in texts for x, b in zip(ids, ids[1:]) if x == a)
            best.append(min(counts, key=lambda b, c=counts: (-c[b], b)) if counts else 0)
        assert build_bigram(iter(texts), vocab) == best

def test_confidence_by_hand():
    """How often the token after a match of each length is right; the last is for "or longer"."""
    # By matches of length 1: after 1 2 3 1 a 2, right; after the last 1 a 2, wrong.  Of length 2: a
    # 3, wrong.  By the bigram: 5 after 4, right in the second text, wrong in the first.
    texts = [[1, 2, 3, 1, 2, 4, 1, 3], [4, 5]]
    bigram = [0, 0, 0, 0, 5]
    assert measure_confidence(texts, None, 3) == [0.5, 0.5, 0, 0]
    assert measure_confidence(texts, bigram, 3) == [0.5, 0.5, 0, 0]
    assert measure_confidence([[1], []], None) is None
    # Lengths never seen take the nearest value: lengths 1 to 4, right, and 5, wrong
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 7, 0]
    assert measure_confidence([text], None, 8) == [1, 1, 1, 1, 1, 0, 0, 0, 0]
    gram = MaxGram(confidence=[0.1, 0.2, 0.7])
    assert [gram.confidence_of(length) for length in (0, 1, 2, 50)] == [0.1, 0.2, 0.7, 0.7]
