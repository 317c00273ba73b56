"""A drafter mixed with Max-Gram, against Eq. 1 and 2 in Python floats, and plain decoding."""
import math
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny
from test_maxgram import brute_force

import verify
from beyond.graft import Mixture
from maxgram import MaxGram

class Paths:
    """A drafter with logits of its own after each path; some are -inf, and some rows as a whole."""
    needs, temperature, vocab = {"hidden": (1,)}, 0.7, 5

    def reset(self):
        self.kept = []

    def begin(self, view):
        self.paths = []

    def keep(self, path):
        self.kept = path

    def expand(self, tokens, parents):
        for token, parent in zip(tokens.tolist(), parents):
            self.paths.append((self.paths[parent] if parent >= 0 else ()) + (token,))
        return torch.stack([self.row(path) for path in self.paths[-len(parents):]])

    def row(self, path):
        rng = random.Random(hash(path))
        row = [-math.inf if rng.random() < 0.2 else rng.gauss(0, 2) for _ in range(self.vocab)]
        return torch.tensor([-math.inf] * 5 if rng.random() < 0.2 else row, dtype=torch.float64)

def by_hand(row, predicted, confidence, agreement):
    """Probabilities (a list) with Max-Gram's token mixed in.  predicted: (tokens, lengths) of one proposal."""
    if not predicted[0] or predicted[1][0] < 2:
        return row
    (token, *_), (length, *_) = predicted
    w, agreement = confidence[min(length, len(confidence) - 1)], agreement if sum(row) else None
    row = row if sum(row) else [0.2] * 5
    if agreement:
        p, (a, b, c) = min(max(row[token], 1e-6), 1 - 1e-6), agreement
        rho = 1 / (1 + math.exp(-(a + b * min(length, 8) + c * math.log(p / (1 - p)))))
        w = max(0, (rho - p) / (1 - p))
    return [(1 - w) * x + w * (i == token) for i, x in enumerate(row)]

def test_rows_are_mixtures_and_suggestions_are_proposals_of_one():
    """Whatever tree is asked about, in whatever steps; where the drafter has no prediction, the rest is uniform."""
    rng, mixed = random.Random(0), 0
    for _ in range(150):
        text, confidence = [rng.randrange(5) for _ in range(rng.randint(1, 40))] * rng.choice([1, 2]), [rng.choice([0, rng.random(), 1]) for _ in range(4)]
        agreement = rng.choice([None, (rng.uniform(-2, 2), rng.random(), rng.random())])
        both = Mixture(Paths(), MaxGram([1] * 5, confidence), agreement)
        both.begin(SimpleNamespace(ids=text, root=None))
        assert both.needs == Paths.needs and both.temperature == 0.7
        paths = []
        for _ in range(rng.randint(1, 4)):
            tokens = [rng.randrange(5) for _ in range(rng.randint(1, 4))]
            parents = [rng.randint(-1, len(paths) - 1 + i) if paths or i else -1 for i in range(len(tokens))]
            for token, parent in zip(tokens, parents):
                paths.append((paths[parent] if parent >= 0 else ()) + (token,))
            logits = both.expand(torch.tensor(tokens), parents)
            own = verify.Greedy().probs(logits, rng.choice([0.5, 1.0])).nan_to_num(0)
            for row, before, path in zip(both.adjust(own), own, paths[-len(tokens):]):
                predicted = brute_force(text, path, 1, bigram=[1] * 5)
                assert row.tolist() == pytest.approx(by_hand(before.tolist(), predicted, confidence, agreement), abs=1e-9)
                mixed += predicted[1][:1] >= [2]
        assert both.drafter.paths == paths, "the drafter reads each node once"
        # After a token below the committed text, or below a node
        parent, most, match, chain, sure = rng.randint(-1, len(paths) - 1), rng.randint(0, 12), rng.randint(0, 3), [], []
        start = [*(paths[parent] if parent >= 0 else ()), 3]
        while len(chain) < most and (found := brute_force(text, start + chain, 1, bigram=[1] * 5))[1][:1] >= [match]:
            chain += found[0]
            sure.append(confidence[min(found[1][0], len(confidence) - 1)])
        assert both.suggest(3, parent, most, match) == (chain, sure)
        both.keep([0])
        assert both.drafter.kept == [0]
    assert mixed > 300

def seen(row, confidence, rule, temperature=1.0, agreement=None):
    """What a builder sees in decoding, where Max-Gram predicts 2 after a match of three and the drafter's logits are always `row`: 2's probability."""
    drafter = SimpleNamespace(needs={}, temperature=temperature, reset=list, begin=id, keep=id, expand=lambda tokens, parents: torch.tensor([row]))
    gram, found = MaxGram(confidence=[confidence]), []
    gram.chunk = lambda place, most: ([2], 3)

    def build(expand, root):
        found.append(expand(root, [-1])[0])
        return verify.root_only(expand, root)
    verify.generate(verify.Target(tiny("llama", vocab_size=len(row))), Mixture(drafter, gram, agreement), build, [0, 1], 2, rule)
    assert found[0].sum().item() == pytest.approx(1)
    return found[0][2].item()

@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_mixture_is_eq_1_for_the_builder_whatever_the_temperatures(temperature):
    """A flat drafter, V = 10, w = .6: .6 + .4 / 10, greedy or sampled, at each calibration and sampling temperature."""
    for rule in (verify.Greedy(), verify.Sampled(0.7), verify.Sampled(1.0), verify.Sampled(2.0)):
        assert seen([0.0] * 10, 0.6, rule, temperature) == pytest.approx(0.64)
    # p_draft is what the builder would see without Max-Gram: here the sampling temperature's alone.
    row, drawn = [1.0, 0.0, -1.0, 0.5], verify.Sampled(0.7)
    assert seen(row, 0.6, drawn, temperature) == pytest.approx(0.6 + 0.4 * (torch.tensor(row) / 0.7).softmax(-1)[2].item())
    assert seen(row, 0.6, verify.Sampled(0.7, top_k=2), temperature) == pytest.approx(0.6), "a token that the target cannot draw"
