"""The contract of the loop, and the rule, against independent oracles.

That the output is plain decoding's is asserted in test_lossless.py.  Here sampled chains are exact,
end to end: each new token is compared with the target's exact distribution after the two before it,
by Pearson's chi-square.  Twelve p-values are held against ALARM: correct code fails for one choice
of seeds in 80 000.
"""
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import VOCAB, Positional

import cape
import cascade
import verify
from maxgram import MaxGram

PROMPT = [3, 1, 4]

# ---------------------------------------------------------------- the contract of the loop
def test_of_two_equal_children_the_first_counts():
    assert verify.accept([7, 3, 3, 5], [-1, 0, 0, 1], [3, 5, 9, 4]) == ([0, 1, 3], [3, 5, 4])

def test_align_forwards_what_is_not_cached(llama):
    """Or what logits are asked for.  That they are right is asserted in test_cascade.py.

    Here outside of inference mode, in a cache that was allocated inside of it.
    """
    target = verify.Target(llama)
    verify.generate(target, None, verify.root_only, PROMPT, 2)
    for ids, count, forwarded in (([1, 2, 3, 4], 1, 4), ([1, 2, 9, 4], 1, 2), ([1, 2, 9, 4], 3, 3),
                                  ([1, 2], 1, 1), ([5, 2, 9], 1, 3)):
        logits, view = target.align(ids, count)
        assert view.ids == ids[-forwarded:] and len(logits) == count and target.ids == ids

def test_a_callers_mistake_is_one_sentence(llama):
    """Where the output would be wrong, or the error somebody else's."""
    target = verify.Target(llama)
    for prompt, word in (([], "at least one"), (torch.tensor([PROMPT]), "is a list"),
                         ([1] * 41, "leave no position"), ([1, VOCAB], "vocabulary")):
        with pytest.raises(ValueError, match=word):
            verify.generate(target, None, verify.root_only, prompt)

    none = torch.full((3,), -1)
    for first, parents, p_draft, word in (
            (0, [-1, 0, 2], None, "the root"), (0, [0, 0, 0], None, "the root"),
            (1, [-1, 0, 0], None, "the root"),
            (0, [-1, 0, 0], torch.full((2, VOCAB), 1 / VOCAB), "sampled chain")):
        def build(expand, root, first=first, parents=parents, p_draft=p_draft):
            tokens = root + first + torch.arange(3)
            return verify.Tree(tokens, torch.tensor(parents), none, p_draft)
        with pytest.raises(ValueError, match=word):
            verify.generate(target, None, build, PROMPT, 5)
    with pytest.raises(ValueError, match="capacity"):
        target.align([1] * 41)
    flash = target.config.__class__.from_dict(target.config.to_dict())
    flash._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="sdpa"):
        verify.check_attention(flash)

def test_what_a_builder_sees(llama):
    """How deep a tree may be; calibrated probabilities, or in sampling those of the rule."""
    seen = []

    def build(expand, root):
        seen.append((expand.remaining, expand(root, [-1])[0]))
        return verify.Tree(root, -torch.ones_like(root), torch.zeros_like(root))

    logits = 3 * torch.eye(VOCAB)[5]
    drafter = Positional(lambda position: logits)
    drafter.temperature = 0.5
    for rule in (verify.Rule(), verify.Rule(2.0, top_k=1), verify.Rule(2.0)):
        verify.generate(verify.Target(llama), drafter, build, [1, 2], 5, rule)
    assert [remaining for remaining, _ in seen] == 3 * [3, 2, 1], "no builder is called at depth 0"
    torch.testing.assert_close(seen[0][1], (logits / 0.5).softmax(-1))
    torch.testing.assert_close(seen[3][1], torch.eye(VOCAB)[5])
    torch.testing.assert_close(seen[6][1], (logits / 2).softmax(-1))
    # A row without any prediction
    none = torch.full((1, 4), -torch.inf)
    for rule in (verify.Rule(), verify.Rule(0.7, top_p=0.9)):
        assert rule.probs(none, 0.5).tolist() == [[0, 0, 0, 0]]

# ---------------------------------------------------------------- sampling
def test_the_noise_of_one_token_is_exponential_over_positions_and_over_seeds():
    """By Kolmogorov and Smirnov's distance at 1 in 1000."""
    def noise(seed, position):
        return verify.keyed_noise(seed, position, 2, torch.device("cpu"))[1].item()
    of_positions = [noise(3, position) for position in range(1000)]
    for numbers in (of_positions, [noise(seed, 3) for seed in range(1000)]):
        cumulative = 1 - np.exp(-np.sort(numbers))             # uniform
        distance = np.abs(cumulative - (np.arange(1000) + 0.5) / 1000).max()
        assert distance < 1.95 / 1000 ** 0.5

def test_noise_is_finer_than_float32s_uniform_numbers():
    """Those have steps of 2^-24, so that tokens rarer than that could not be told apart."""
    noise = verify.keyed_noise(0, 0, 200_000, torch.device("cpu")).double()
    steps = noise[noise < 1e-4] * 2 ** 24
    assert len(steps) > 5 and (steps - steps.round()).abs().max() > 0.1

def test_rounding_that_rejects_a_certain_token_leaves_a_residual():
    """Both distributions are certain of token 1: nothing is left of their difference."""
    sure = torch.eye(4)[[1, 1, 1]]
    tree = cascade.chain_of([0, 1, 1], "cpu", 9 * sure[:2])
    generator = torch.Generator().manual_seed(0)
    assert verify.accept_sampled(tree, sure, generator).tolist() == [1, 1, 1]

# ---------------------------------------------------------------- sampled chains, end to end
ALARM = 1e-6
SEEDS = 1000
WORDS, TEXT, NEW = 3, [0, 1, 2, 0, 2, 1, 0, 1], 4

def table(seed, *shape):
    """Random logits (*shape, WORDS)."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, WORDS, generator=g, dtype=torch.float64)

# The target's logits after the last two tokens, (V, V, V), flat enough that every cell fills
EXACT = table(1, WORDS, WORDS) / 2

class TableTarget(verify.Target):
    """A verify.Target of no model: its logits, EXACT, follow from the last two tokens."""
    device, capacity, vocab = torch.device("cpu"), 100, WORDS

    def __init__(self):
        """There is no model."""

    def prefill(self, ids, new_tokens=0, needs={}):
        self.ids = []
        return EXACT[ids[-2], ids[-1]], self.commit(None, list(ids), None)

    def forward(self, tokens, parents):
        before = torch.cat((torch.tensor(self.ids[-1:]), tokens[:-1]))         # of a chain
        return EXACT[before, tokens], None

    def commit(self, path, ids, states):
        self.ids = self.ids + ids
        return verify.View(torch.tensor(ids), ids, len(self.ids), {}, {})

def stage(seed):
    """A stage of a cascade that knows the last token alone."""
    rows = table(seed, WORDS)
    return SimpleNamespace(capacity=100, vocab=WORDS, reset=lambda: None,
                           align=lambda ids, count: (rows[ids[-count:]], None))

ONE, TWO = stage(2), stage(3)
# Lenience acts where one neural stage reviews another.
CASES = {
    "one drafter": Positional(lambda position: table(position, 1)[0]),
    "cascade": cascade.Cascade([ONE, TWO], [[1, 1], [0, 1]]),
    "lenient": cascade.Cascade([ONE, TWO], [[1, 1, 2], [0, 1, 1], [0, 0, 2]], 2.0,
                               MaxGram([1, 2, 1]))}

def decoded(drafter, seeds):
    """Decode with each seed -> how often each text of NEW = 4 tokens came out, (V, V, V, V)."""
    target, build = TableTarget(), getattr(drafter, "drawn", partial(cape.drawn, gamma=2))
    counts, drafted = torch.zeros([WORDS] * NEW, dtype=torch.float64), 0
    for seed in seeds:
        rule = verify.Rule(1.0, seed=seed)
        out = verify.generate(target, drafter, build, TEXT, NEW, rule)
        counts[tuple(out.tokens)] += 1
        drafted += NEW - 1 - len(out.rounds)
    assert drafted > len(seeds) / 10, "drafts are accepted, or there is nothing to test"
    return counts

def chi_squares(counts):
    """Pearson's statistic of each token, given the two before it -> the p-values."""
    exact, found = EXACT.softmax(-1), []
    a, b = TEXT[-2:]
    # What came before: the prompt's last two tokens; its last and the first new one; new ones
    after = [(counts.sum((1, 2, 3)), exact[a, b]), (counts.sum((2, 3)), exact[b]),
             (counts.sum(3), exact), (counts.sum(0), exact)]
    for seen, p in after:
        expected = seen.sum(-1, keepdim=True) * p                              # (..., V)
        assert expected.min() > 5, "too few for Pearson's statistic"
        x = ((seen - expected) ** 2 / expected).sum()
        freedom = torch.tensor(seen.numel() // WORDS * (WORDS - 1)).double()
        found.append(torch.special.gammaincc(freedom / 2, x / 2).item())       # the upper tail
    return found

@pytest.mark.parametrize("case", CASES)
def test_the_output_follows_the_target(case):
    assert min(chi_squares(decoded(CASES[case], range(SEEDS)))) > ALARM
