"""Max-Gram against a definition by brute force; its index against sets of places; the bigram; the file alone."""
import random
from collections import Counter

import pytest
import torch
from test_cape import run_the_docstrings_lines

import maxgram
from maxgram import CONFIDENCE, Index, MaxGram, build_bigram, max_gram_tensor

def brute_force(generation, draft, n, source=(), bigram=()):
    """The definition, one token at a time: what follows the longest suffix of the query in the text, leftmost; or the bigram."""
    text, query, tokens, lengths = [*source, -1, *generation], [*generation, *draft], [], []
    while len(tokens) < n:
        token, length = bigram[query[-1]] if query[-1] < len(bigram) else 0, 0
        for size in range(len(query), 0, -1):
            after = [text[i + size] for i in range(len(text) - size) if text[i:i + size] == query[-size:] and text[i + size] >= 0]
            if after:
                token, length = after[0], size
                break
        if not length and not token:
            break
        tokens, query, lengths = [*tokens, token], [*query, token], [*lengths, length]
    return tokens, lengths

def cases(count, seed):
    """(generation, draft, n, source, bigram): 2 to 4 symbols; random, periodic and copying texts."""
    rng = random.Random(seed)
    for _ in range(count):
        symbols = rng.randint(2, 4)

        def text(low, high, symbols=symbols):
            ids = [rng.randrange(symbols) for _ in range(rng.randint(low, high))]
            if ids and rng.random() < 0.2:
                ids = (ids[:rng.randint(1, 4)] * len(ids))[:len(ids)]
            return ids
        source = text(1, 40) if rng.random() < 0.5 else []
        generation, draft = text(1, 40), text(0, 6) if rng.random() < 0.6 else []
        if source and rng.random() < 0.3:
            generation = (generation + source[-rng.randint(1, 5):])[-40:]
        bigram = [rng.choice([0, rng.randrange(symbols + 2)]) for _ in range(rng.randint(1, symbols + 2))]
        bigram *= rng.random() < 0.5
        yield generation, draft, rng.choice([0, 1, 2, 5, 10, 25]), source, bigram

# ---------------------------------------------------------------- proposals
def test_index_and_tensors_equal_brute_force():
    """With commits in pieces.  Proposals leave no trace: the index is what it is where all is committed at once."""
    rng = random.Random(1)
    for generation, draft, n, source, bigram in cases(300, 0):
        g, once, done = MaxGram(bigram), MaxGram(bigram), 0
        g.commit_source(source)
        while done < len(generation):
            new = generation[done:done + rng.randint(1, 9)]
            g.commit(new if rng.random() < 0.5 else torch.tensor(new))
            done += len(new)
            expected = brute_force(generation[:done], draft, n, source, bigram)
            assert g.propose(draft, n) == expected
        once.commit_source(source)
        once.commit(generation)
        assert vars(g.source) == vars(once.source) and vars(g.generation) == vars(once.generation)
        given = [torch.tensor(x) if x else None for x in (draft, source, bigram)]
        tokens, lengths = max_gram_tensor(torch.tensor(generation), n, *given)
        assert (tokens.tolist(), lengths) == expected
    g = MaxGram()
    g.commit([1, 2, 3] * 9)
    assert len(g.propose()[0]) == 10, "section 5.2"

def test_without_matching_there_is_the_bigram_alone():
    gram = MaxGram([0, 2, 3, 1, 9], matching=False)
    gram.commit([1, 4, 4, 1, 4, 4, 1])
    assert gram.propose([], 5) == ([2, 3, 1, 2, 3], [0] * 5)

# ---------------------------------------------------------------- the index
class CountingList(list):
    """The transitions of an Index, counting how often a state is looked at."""
    looks = 0

    def __getitem__(self, i):
        CountingList.looks += 1
        return super().__getitem__(i)

def looks(index, call):
    index.next, before = CountingList(index.next), CountingList.looks
    call()
    return CountingList.looks - before

def test_extending_takes_linear_time_and_a_proposal_does_not_take_longer_in_a_longer_text():
    rng, counts = random.Random(0), {}
    for size in (500, 10000):
        text, g = [rng.randrange(200) for _ in range(size)], MaxGram()
        text[-12:] = text[100:112]
        g.commit(text)
        counts[size] = looks(g.generation, lambda g=g: g.propose((), 10))
    assert counts[10000] <= 1.2 * counts[500], counts
    for text in ([rng.randrange(2) for _ in range(4000)], [0] * 4000, ([0] * 50 + [1]) * 80):
        index = Index()
        assert looks(index, lambda index=index, text=text: index.extend(text)) < 12 * len(text)

# ---------------------------------------------------------------- bigram and confidence
def test_bigram_equals_a_counter():
    rng = random.Random(0)
    for _ in range(100):
        vocab = rng.randint(2, 7)
        texts = [[rng.randrange(vocab) for _ in range(rng.randint(0, 30))] for _ in range(rng.randint(0, 4))]
        counts = [Counter(b for ids in texts for x, b in zip(ids, ids[1:]) if x == a) for a in range(vocab)]
        best = [min(c, key=lambda b, c=c: (-c[b], b)) if c else 0 for c in counts]
        assert build_bigram(iter(texts), vocab) == best
    # a tie goes to the lower id; 2 -> 3 crosses texts
    assert build_bigram([[1, 2], [3, 1], [1, 3]], 5) == [0, 2, 0, 1, 0]
    for ids in ([1, 5], [-1, 2]):
        with pytest.raises(ValueError, match="give the tokenizer that the ids were made with"):
            build_bigram([ids], 5)

def test_confidence_by_hand():
    from training.bigram import measure_confidence
    # 1 2 3: nothing is proposed.  After 1 2 3 1: "1" is followed by 2, right (length 1); then "1 2": 3,
    # wrong, it is 4 (length 2); after the 4 nothing; after its 1: 2, wrong, the end is 3 (length 1).
    # The second text proposes by the bigram alone: 4 -> 5, right; after the first text's 4 it is wrong.
    texts = [[1, 2, 3, 1, 2, 4, 1, 3], [4, 5]]
    assert measure_confidence(texts, None, 3) == measure_confidence(texts, [0, 0, 0, 0, 5], 3) == [0.5, 0.5, 0, 0]
    assert measure_confidence(texts[1:], [0, 0, 0, 0, 5], 2) == [1, 1, 1] and measure_confidence([[1], []], None) is None
    # Lengths never seen take the nearest value: lengths 1 to 4, right, and 5, wrong; then the bigram's alone
    assert measure_confidence([[1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 7, 0]], None, 8) == [1, 1, 1, 1, 1, 0, 0, 0, 0]
    assert measure_confidence([[9, 8], [9, 7]], [0] * 9 + [8], 4) == [0.5] * 5
    # A token's confidence is that of its match's length, the last for "or longer".
    assert [MaxGram(confidence=[0.1, 0.2, 0.7]).confidence_of(length) for length in (0, 1, 50)] == [0.1, 0.2, 0.7]
    assert len(CONFIDENCE) == maxgram.LENGTHS + 1 and [MaxGram().confidence_of(i) for i in (0, 8, 9)] == [CONFIDENCE[i] for i in (0, 8, 8)]

def test_a_stranger_uses_it_alone(tmp_path):
    run_the_docstrings_lines(tmp_path, maxgram, ["maxgram.py"])
