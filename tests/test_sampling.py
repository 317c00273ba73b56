"""Sampled chains are exact, end to end: what generate() writes follows the target.

Targets and drafters are tables over three tokens, so that a thousand seeds take a second.  Each new
token is compared with the target's exact distribution after the two tokens before it, by Pearson's
chi-square: sixteen p-values, each against ALARM, so a change of seeds makes correct code fail once
in 60 000 times.  Power: one generator for drafting and accepting, which was a bug once, gives a
p-value below ALARM.
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
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, VOCAB, generator=g, dtype=torch.float64)

# The target's logits after the last two tokens, (V, V, V), flat enough that every cell fills
EXACT = table(1, VOCAB, VOCAB) / 2
# What a processor adds to them, by the last token but one: (V, 1, V)
BACK = table(4, VOCAB)[:, None]

def looks_back(text, scores):
    """A logits processor."""
    return scores + BACK[text[0, -2]]

class Target(verify.Target):
    """A verify.Target of no model: its logits (V, V, V) follow from the last two tokens."""
    device, capacity = torch.device("cpu"), 100

    def __init__(self, logits):
        self.logits, self.cache = logits, SimpleNamespace(length=0)

    def prefill(self, ids, new_tokens=0, needs={}):
        self.ids = []
        return self.logits[ids[-2], ids[-1]], self.commit(None, list(ids), None)

    def forward(self, tokens, parents):
        before = torch.cat((torch.tensor(self.ids[-1:]), tokens[:-1]))         # of a chain
        return self.logits[before, tokens], None

    def commit(self, path, ids, states):
        self.ids = self.ids + ids
        return verify.View(torch.tensor(ids), ids, len(self.ids), {}, {})

class Drafter(verify.NoDrafter):
    """A drafter that knows the last token alone, or a stage of a cascade: table (V, V)."""
    capacity, vocab = 100, VOCAB

    def __init__(self, table):
        self.table = table

    def reset(self, probs=None, source=None):
        self.probs = probs

    def expand(self, tokens, parents):
        return self.probs(self.table[tokens], 1.0)

    def align(self, ids, logits_to_keep):
        return self.table[ids[-logits_to_keep:]], None

def one():
    return Drafter(table(2, VOCAB))

def cascade_of(K, lenience=1.0, gram=None):
    stages = [Drafter(table(seed, VOCAB)) for seed in (2, 3)]
    return cascade.Cascade(stages, K, lenience, gram, VOCAB)

def lenient_cascade():
    """Lenience acts where one neural stage reviews another."""
    return cascade_of([[1, 1, 2], [0, 1, 1], [0, 0, 2]], 2.0, MaxGram([1, 2, 1]))

CASES = {
    "one drafter": (one, []),
    "a processor that looks at the text": (one, [looks_back]),
    "cascade": (partial(cascade_of, [[1, 1], [0, 1]]), []),
    "lenient, three stages": (lenient_cascade, []),
}

def decoded(case, seeds):
    """Decode with each seed -> how often each text of NEW = 4 tokens came out, (V, V, V, V)."""
    make, processors = CASES[case]
    drafter, target = make(), Target(EXACT - BACK if processors else EXACT)
    build = getattr(drafter, "drawn", partial(cape.drawn, gamma=2))
    counts, drafted = torch.zeros([VOCAB] * NEW, dtype=torch.float64), 0

    def drawn(expand, root):
        tree = build(expand, root)
        assert tree.p_draft is not None or len(tree.tokens) == 1, "a chain that is not sampled"
        return tree

    for seed in seeds:
        rule = verify.Rule(processors, seed)
        out = verify.generate(target, drafter, drawn, PROMPT, NEW, rule)
        counts[tuple(out.tokens)] += 1
        drafted += NEW - 1 - len(out.rounds)
    assert drafted > len(seeds) / 10, "drafts are accepted, or there is nothing to test"
    return counts

def chi_squares(counts):
    """Pearson's statistic of each token, given the two before it -> the p-values."""
    exact, found = EXACT.softmax(-1), []
    a, b = PROMPT[-2:]
    # What came before: the prompt's last two tokens; its last and the first new one; new ones
    after = [(counts.sum((1, 2, 3)), exact[a, b]), (counts.sum((2, 3)), exact[b]),
             (counts.sum(3), exact), (counts.sum(0), exact)]
    for seen, p in after:
        expected = seen.sum(-1, keepdim=True) * p                              # (..., V)
        assert expected.min() > 5, "too few for Pearson's statistic"
        x = ((seen - expected) ** 2 / expected).sum()
        freedom = seen.numel() // VOCAB * (VOCAB - 1)
        half = torch.tensor(freedom / 2, dtype=torch.float64)
        found.append(torch.special.gammaincc(half, x / 2).item())      # the upper tail
    return found

@pytest.mark.parametrize("case", CASES)
def test_the_output_follows_the_target(case):
    assert min(chi_squares(decoded(case, range(SEEDS)))) > ALARM
