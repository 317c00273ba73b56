"""A drafter mixed with Max-Gram, against Eq. 1 and 2 in Python floats, and what it is shown."""
import math
import random

import pytest
import torch
from helpers import brute_force, path_expand

from beyond.graft import Mixture
from maxgram import MaxGram
from verify import View

BIGRAM = [1] * 5

class Paths:
    """A drafter with probabilities of its own after each path; some are 0, and some whole rows."""
    needs = {"hidden": (1,)}

    def reset(self, probs):
        self.begun, self.kept = [], []
        self.keep = self.kept.append

    def begin(self, view, root):
        self.begun.append((view, root))
        self.expand = path_expand(self.row)

    def row(self, path):
        rng = random.Random(hash(path))
        row = [-math.inf if rng.random() < 0.2 else rng.gauss(0, 2) for _ in range(5)]
        row = [-math.inf] * 5 if rng.random() < 0.2 else row
        return torch.tensor(row, dtype=torch.float64).softmax(-1).nan_to_num(0.0)

def by_hand(row, predicted, confidence, agreement):
    """Probabilities (a list) with Max-Gram's token mixed in.  predicted: (tokens, lengths)."""
    if not predicted[0] or predicted[1][0] < 2:
        return row
    token, length = predicted[0][0], predicted[1][0]
    w = confidence[min(length, len(confidence) - 1)]
    if agreement and row[token] > 0:             # p = 0 is no opinion
        p, (a, b, c) = min(max(row[token], 1e-6), 1 - 1e-6), agreement
        rho = 1 / (1 + math.exp(-(a + b * min(length, 8) + c * math.log(p / (1 - p)))))
        w = max(0, (rho - p) / (1 - p))
    row = row if sum(row) else [0.2] * 5
    return [(1 - w) * p + w * (x == token) for x, p in enumerate(row)]

def test_builders_see_mixtures():
    """Whatever nodes they ask about, in whatever steps."""
    rng, mixed, unknown = random.Random(0), 0, 0
    for _ in range(100):
        text = [rng.randrange(5) for _ in range(rng.randint(1, 40))] * rng.choice([1, 2])
        confidence = [rng.choice([0, rng.random(), 1]) for _ in range(4)]
        agreement = rng.choice([None, (rng.uniform(-2, 2), rng.random(), rng.random())])
        neural = Paths()
        both = Mixture(neural, MaxGram(BIGRAM, confidence), agreement)
        both.reset(None)
        both.begin(View(torch.tensor(text), text, None, {}, {}), 0)
        paths = []
        for _ in range(rng.randint(1, 4)):
            tokens = [rng.randrange(5) for _ in range(rng.randint(1, 4))]
            parents = [rng.randint(-1, len(paths) - 1) for _ in tokens]
            for token, parent in zip(tokens, parents):
                paths.append((paths[parent] if parent >= 0 else ()) + (token,))
            probs = both.expand(torch.tensor(tokens), parents)
            for row, path in zip(probs, paths[-len(tokens):]):
                predicted = brute_force(text, path, 1, bigram=BIGRAM)
                own = neural.row(path).tolist()
                expected = by_hand(own, predicted, confidence, agreement)
                assert row.tolist() == pytest.approx(expected, abs=1e-9)
                mixed += predicted[1][:1] >= [2]
                unknown += own != expected and own[predicted[0][0]] == 0
        assert neural.expand.given == paths, "the drafter reads each node once"
    assert mixed > 200 and unknown > 30

def view(ids, length):
    """A View of committed ids; the hidden state of a token is its position and its id."""
    positions = range(length - len(ids), length)
    hidden = torch.tensor([[float(at), float(token)] for at, token in zip(positions, ids)])
    return View(torch.tensor(ids), ids, length, {3: f"kv of {length}"}, {1: hidden})

def test_what_silent_rounds_committed_is_read_in_the_next_that_drafts():
    """All at once and in order; the drafter hears of the rounds that it took part in alone."""
    drafter = Paths()
    both = Mixture(drafter, MaxGram(BIGRAM))
    both.reset(None)
    unread, length, kept = [], 0, []
    for number, new in enumerate(([1, 2, 3], [4], [0, 1], [2], [3, 4, 0], [1], [2], [3])):
        unread += new
        length += len(new)
        both.begin(view(new, length), number % 5)
        if number in (2, 3, 7):
            for _ in range(number % 4):
                both.expand(torch.tensor([0]), [-1])
            seen, root = drafter.begun[-1]
            expected = view(unread, length)
            assert root == number % 5 and seen[1:4] == expected[1:4]
            assert torch.equal(seen.tokens, expected.tokens)
            assert torch.equal(seen.hidden[1], expected.hidden[1])
            unread = []
            kept.append([0, number])
        both.keep([0, number])
    assert drafter.kept == kept and len(drafter.begun) == 3
