"""Drawn chains are exact, end to end: the tokens that generate() writes follow the target, whatever drafted them.

Targets and drafters are tables over three tokens, so that a thousand seeds take a second.  Each new token is compared with the
target's exact distribution after the two tokens before it, by Pearson's chi-square: sixteen p-values, each against ALARM, so a
change of seeds makes correct code fail once in 60 000 times.  Power: one stream for drafting and accepting, which was a bug once, gives
a p-value below ALARM.
"""
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import cape
import cascade
import verify
from maxgram import MaxGram

ALARM = 1e-6
SEEDS = 1000
VOCAB, PROMPT, NEW = 3, [0, 1, 2, 0, 2, 1, 0, 1], 4

def table(seed, *shape):
    """Random logits (*shape, VOCAB)."""
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

# The target's logits after the last two tokens, (V, V, V), flat enough that every cell of a statistic fills.
EXACT = table(1, VOCAB, VOCAB) / 2

class Target(verify.Target):
    """A verify.Target of no model: its logits follow from the last two tokens, EXACT (V, V, V)."""
    device, capacity, hidden = torch.device("cpu"), 100, ()

    def __init__(self):
        self.cache = SimpleNamespace(length=0)

    def prefill(self, ids, new_tokens=0):
        self.commit(None, ids)
        return EXACT[ids[-2], ids[-1]]

    def forward(self, tokens, parents):
        before = torch.cat((torch.tensor(self.ids[-1:]), tokens[:-1]))                 # of a chain
        return EXACT[before, tokens]

    def commit(self, path, ids):
        self.ids, self.committed = self.ids + ids, [torch.tensor(ids)]
        self.cache.length = len(self.ids)

class Drafter:
    """A drafter as GLIDE is, that knows the last token alone; or a stage of a cascade: table (V, V)."""
    needs, capacity, vocab = {}, 100, VOCAB

    def __init__(self, table):
        self.table = table

    def reset(self):
        pass

    def begin(self, view):
        pass

    def keep(self, path):
        pass

    def expand(self, tokens, parents):
        return self.table[tokens]

    def sync(self, ids, logits_to_keep):
        return self.table[ids[-logits_to_keep:]]

def cascade_of(seeds, K, lenience=1.0, gram=None):
    return cascade.Cascade([Drafter(table(seed, VOCAB)) for seed in seeds], K, lenience, gram, VOCAB)

DRAWN, CHAIN = partial(cape.drawn, gamma=2), partial(cascade.proposal, drawn=True)
CASES = {
    "glide": (lambda: Drafter(table(2, VOCAB)), DRAWN),
    "cascade": (lambda: cascade_of([2, 3], [[1, 1], [0, 1]]), CHAIN),
    # Lenience acts where one neural stage reviews another.
    "lenient cascade": (lambda: cascade_of([2, 3], [[2, 2], [0, 2]], 2.0), CHAIN),
    "lenient cascade of three stages": (lambda: cascade_of([2, 3], [[1, 1, 2], [0, 1, 1], [0, 0, 2]], 2.0, MaxGram([1, 2, 1])), CHAIN),
}

class Rule(verify.Sampled):
    """Softmax in the place of transformers' processors, which take a quarter of the time here."""
    def warp(self, logits):
        return logits.softmax(-1)

def decoded(case, seeds):
    """Decode with each seed -> how often each text came out, (V, V, V, V): of the NEW = 4 tokens in their order."""
    make, build = CASES[case]
    drafter, target = make(), Target()
    counts, drafted = torch.zeros([VOCAB] * NEW, dtype=torch.float64), 0

    def drawn(expand, root):
        tree = build(expand, root)
        assert tree.p_draft is not None or len(tree.tokens) == 1, "a chain that is not drawn"
        return tree
    for seed in seeds:
        out = verify.generate(target, drafter, drawn, PROMPT, NEW, Rule(seed=seed))
        counts[tuple(out.tokens)] += 1
        drafted += NEW - 1 - len(out.rounds)
    assert drafted > len(seeds) / 10, "drafts are accepted, or there is nothing to test"
    return counts

def chi_squares(counts):
    """Pearson's statistic of each token, given the two before it -> the p-values."""
    exact, found = EXACT.softmax(-1), []
    a, b = PROMPT[-2:]
    # What came before: the prompt's last two, its last and the first new one, the first two new ones, the next two
    after = [(counts.sum((1, 2, 3)), exact[a, b]), (counts.sum((2, 3)), exact[b]), (counts.sum(3), exact), (counts.sum(0), exact)]
    for seen, p in after:
        expected = seen.sum(-1, keepdim=True) * p                        # (..., V)
        assert expected.min() > 5, "too few for Pearson's statistic"
        x = ((seen - expected) ** 2 / expected).sum()
        freedom = seen.numel() // VOCAB * (VOCAB - 1)
        # the upper tail of the chi-square distribution
        found.append(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), x / 2).item())
    return found

@pytest.mark.parametrize("case", CASES)
def test_the_output_follows_the_target(case):
    assert min(chi_squares(decoded(case, range(SEEDS)))) > ALARM
