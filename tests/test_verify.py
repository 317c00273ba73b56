"""Tree logits, the cache, the contract of the loop, and the rule, against independent oracles.

That the output is plain decoding's is asserted in test_lossless.py.  Here sampled chains are exact,
end to end: targets and drafters are tables over three tokens, and each new token is compared with
the target's exact distribution after the two before it, by Pearson's chi-square.  Twelve p-values
are held against ALARM: correct code fails for one choice of seeds in 80 000.  (One generator for
drafting and accepting, which was a bug once, gives a p-value below ALARM.)
"""
from functools import partial

import numpy as np
import pytest
import torch
from conftest import VOCAB, Positional, target_of

import cape
import cascade
import verify
from maxgram import MaxGram
from runtime.targets import any_target

PROMPT = [3, 1, 4]
TOLERANCE = dict(atol=2e-5, rtol=1e-4)       # norms and RoPE tables of a float64 model are float32

def known(text):
    """A drafter that is sure of a text, by a calibration temperature of 0.5."""
    drafter = Positional(lambda position: 3 * torch.eye(VOCAB)[text[position]])
    drafter.temperature = 0.5
    return drafter

def generate(model, drafter, build, prompt=PROMPT, new=12, rule=verify.Rule()):
    return verify.generate(target_of(model), drafter, build, prompt, new, rule)

def own_forward(model, ids):
    return model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)

# ---------------------------------------------------------------- trees and the cache
def random_tree(n, seed):
    """A Tree, and the nodes from the root to each.  Of an odd seed it is deeper than windows are.
    """
    g = torch.Generator().manual_seed(seed)
    parents, paths = [-1], [[0]]
    for i in range(1, n):
        lowest = max(0, i - 2) if seed % 2 else 0
        parents.append(torch.randint(lowest, i, (1,), generator=g).item())
        paths.append([*paths[parents[i]], i])
    tokens = torch.randint(VOCAB, (n,), generator=g)
    return verify.Tree(tokens, torch.tensor(parents), torch.full((n,), -1)), paths

@pytest.mark.parametrize("seed", range(2))
@torch.inference_mode()
def test_tree_logits_and_commit_equal_each_path_alone(model, seed):
    """Every node sees its own path alone; a committed path leaves a fresh prefill's cache."""
    (tree, paths), target, fresh = random_tree(18, seed), target_of(model), target_of(model)
    prompt = torch.randint(VOCAB, (10,), generator=torch.Generator().manual_seed(1)).tolist()
    _, first = target.prefill(prompt, needs={"hidden": [0, 1, 3], "kv": [1]})
    logits, states = target.forward(tree.tokens, tree.parents)
    for of_node, path in zip(logits, paths):
        own = own_forward(model, prompt + tree.tokens[path].tolist())
        torch.testing.assert_close(of_node, own.logits[0, -1], **TOLERANCE)
    path = max(paths, key=len)
    new = tree.tokens[path].tolist()
    second = target.commit(path, new, states)
    text = prompt + new
    fresh.align(text)
    n = len(text)
    for layer, pair in target.cache.kv.items():
        for entries, expected in zip(pair, fresh.cache.kv[layer]):
            torch.testing.assert_close(entries[:, :, :n], expected[:, :, :n], **TOLERANCE)
    # The views show what was committed, with hidden states as the library numbers them.
    assert first.tokens.tolist() == first.ids == prompt and first.length == len(prompt)
    assert second.tokens.tolist() == second.ids == new and second.length == n
    assert [entries.shape[2] for entries in second.kv[1]] == [n, n]
    own = own_forward(model, text).hidden_states
    for k in (0, 1, 3):
        hidden = torch.cat((first.hidden[k], second.hidden[k]))
        torch.testing.assert_close(hidden, own[k][0], **TOLERANCE)

@torch.inference_mode()
def test_align_keeps_the_common_prefix(model):
    """It forwards the rest and no more, and its view shows the rest."""
    target, forwarded = any_target(model), []
    run = target.run

    def noted(end, tokens, *more):
        forwarded.append(len(tokens))
        return run(end, tokens, *more)

    target.run = noted
    # Each text, how many of its ids are forwarded, how many logits are asked for
    for ids, new, count in (
            ([1, 2, 3, 4, 5, 6], 6, 1), ([1, 2, 3, 4, 5, 6], 4, 4), ([1, 2, 3, 9], 1, 1),
            ([1, 2], 2, 2), ([5], 1, 1), ([5, *range(11)] * 3, 35, 1)):
        logits, view = target.align(ids, count)
        assert forwarded.pop() == new
        assert view.tokens.tolist() == view.ids == ids[-new:] and view.length == len(ids)
        own = own_forward(model, ids).logits[0, -count:]
        torch.testing.assert_close(logits, own, **TOLERANCE)

# ---------------------------------------------------------------- the contract of the loop
def test_a_walk_down_a_tree(llama):
    """Of two equal children the first counts; parents come first, and the root before all."""
    assert verify.accept([7, 3, 3, 5], [-1, 0, 0, 1], [3, 5, 9, 4]) == ([0, 1, 3], [3, 5, 4])

@pytest.mark.parametrize("parents", [[-1, 1], [-1, 0, 2], [-1, -2], [0, 0], "another root"])
def test_what_is_no_tree_is_refused(llama, parents):
    def build(expand, root):
        if parents == "another root":
            return verify.root_only(expand, (root + 1) % VOCAB)
        tokens = root.repeat(len(parents))
        return verify.Tree(tokens, torch.tensor(parents), torch.full_like(tokens, -1))
    with pytest.raises(ValueError, match="begins with the root"):
        generate(llama, None, build)

def test_a_callers_mistake_is_one_sentence(llama):
    """Where the output would be wrong, or the error somebody else's."""
    target = verify.Target(llama)
    decode = partial(verify.generate, target, None, verify.root_only)
    for prompt, word in (([], "prompt is empty"), ([1] * 41, "leave no position"),
                         (torch.tensor([PROMPT]), "a list"), ([1, VOCAB], "vocabulary"),
                         ([-1], "vocabulary")):
        with pytest.raises(ValueError, match=word):
            decode(prompt)
    for wrong in ({"temperature": -1}, {"top_k": 0}, {"top_p": 1.1}):
        with pytest.raises(ValueError):
            verify.Rule(**{"temperature": 1.0, **wrong})

    def branching(expand, root):
        tokens = torch.cat((root, torch.tensor([1, 2])))
        p_draft = torch.full((2, VOCAB), 1 / VOCAB)
        return verify.Tree(tokens, torch.tensor([-1, 0, 0]), torch.full((3,), -1), p_draft)

    with pytest.raises(ValueError, match="sampled chain"):
        verify.generate(target, None, branching, PROMPT, 5, verify.Rule(1.0))
    with pytest.raises(ValueError, match="capacity"):
        target.align([1] * 41)
    flash = target.config.__class__.from_dict(target.config.to_dict())
    flash._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="sdpa"):
        verify.check_attention(flash)

def test_a_target_serves_again_outside_of_inference_mode(llama):
    """What generate() allocated may be written to in a forward of the caller's."""
    target = verify.Target(llama)
    expected = verify.generate(target, None, verify.root_only, PROMPT, 4).tokens
    logits, _ = target.prefill(PROMPT, 4)
    assert logits.argmax() == expected[0]
    target.cache.reserve(4 * target.cache.allocated)
    assert verify.generate(target, None, verify.root_only, PROMPT, 4).tokens == expected

def test_what_a_builder_sees(llama):
    """How deep a tree may be, calibrated or processed probabilities, one expand for a sequence."""
    seen, memory = [], []

    def build(expand, root):
        seen.append((expand.remaining, expand(root, [-1])[0]))
        expand.count = getattr(expand, "count", 0) + 1
        memory.append(expand.count)
        return verify.Tree(root, -torch.ones_like(root), torch.zeros_like(root))

    generate(llama, known([5] * 40), build, [1, 2], 5)
    assert [remaining for remaining, _ in seen] == [3, 2, 1], "no builder is called at depth 0"
    logits = torch.zeros(VOCAB)
    logits[5] = 3.0
    torch.testing.assert_close(seen[0][1], (logits / 0.5).softmax(-1))
    generate(llama, known([5] * 40), build, [1, 2], 5, verify.Rule(2.0, top_k=1))
    assert memory == 2 * [1, 2, 3], "another sequence has another expand"
    torch.testing.assert_close(seen[3][1], torch.eye(VOCAB)[5])
    # In sampling the calibration temperature, 0.5, is ignored.
    sampled = verify.Rule(2.0).probs(logits[None], 0.5)
    torch.testing.assert_close(sampled, (logits[None] / 2).softmax(-1))
    # A row without any prediction
    none = torch.full((1, 4), -torch.inf)
    for rule in (verify.Rule(), verify.Rule(0.7, top_p=0.9)):
        assert rule.probs(none, 0.5).tolist() == [[0, 0, 0, 0]]

# ---------------------------------------------------------------- sampling
def test_the_noise_of_one_token_is_exponential_over_positions_and_over_seeds():
    """By Kolmogorov and Smirnov's distance at 1 in 1000."""
    def noise(seed, position):
        return verify.keyed_noise(seed, position, 2, torch.device("cpu"))[1].item()
    over_positions = [noise(3, position) for position in range(1000)]
    over_seeds = [noise(seed, 3) for seed in range(1000)]
    for numbers in (over_positions, over_seeds):
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
    """A verify.Target of no model: its logits (V, V, V) follow from the last two tokens."""
    device, capacity = torch.device("cpu"), 100

    def __init__(self, logits):
        self.logits, self.vocab = logits, WORDS

    def prefill(self, ids, new_tokens=0, needs={}):
        self.ids = []
        return self.logits[ids[-2], ids[-1]], self.commit(None, list(ids), None)

    def forward(self, tokens, parents):
        before = torch.cat((torch.tensor(self.ids[-1:]), tokens[:-1]))         # of a chain
        return self.logits[before, tokens], None

    def commit(self, path, ids, states):
        self.ids = self.ids + ids
        return verify.View(torch.tensor(ids), ids, len(self.ids), {}, {})

class TableDrafter(verify.NoDrafter):
    """A drafter that knows the last token alone, or a stage of a cascade: table (V, V)."""
    capacity, vocab = 100, WORDS

    def __init__(self, table):
        self.table = table

    def reset(self, probs=None):
        self.probs = probs

    def expand(self, tokens, parents):
        return self.probs(self.table[tokens], 1.0)

    def align(self, ids, logits_to_keep):
        return self.table[ids[-logits_to_keep:]], None

def one():
    return TableDrafter(table(2, WORDS))

def cascade_of(K, lenience=1.0, gram=None):
    stages = [TableDrafter(table(seed, WORDS)) for seed in (2, 3)]
    return cascade.Cascade(stages, K, lenience, gram, WORDS)

def lenient_cascade():
    """Lenience acts where one neural stage reviews another."""
    return cascade_of([[1, 1, 2], [0, 1, 1], [0, 0, 2]], 2.0, MaxGram([1, 2, 1]))

CASES = {
    "one drafter": one,
    "cascade": partial(cascade_of, [[1, 1], [0, 1]]),
    "lenient, three stages": lenient_cascade,
}

def decoded(case, seeds):
    """Decode with each seed -> how often each text of NEW = 4 tokens came out, (V, V, V, V)."""
    drafter, target = CASES[case](), TableTarget(EXACT)
    build = getattr(drafter, "drawn", partial(cape.drawn, gamma=2))
    counts, drafted = torch.zeros([WORDS] * NEW, dtype=torch.float64), 0

    def drawn(expand, root):
        tree = build(expand, root)
        assert tree.p_draft is not None or len(tree.tokens) == 1, "a chain that is not sampled"
        return tree

    for seed in seeds:
        rule = verify.Rule(1.0, seed=seed)
        out = verify.generate(target, drafter, drawn, TEXT, NEW, rule)
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
        freedom = seen.numel() // WORDS * (WORDS - 1)
        half = torch.tensor(freedom / 2, dtype=torch.float64)
        found.append(torch.special.gammaincc(half, x / 2).item())      # the upper tail
    return found

@pytest.mark.parametrize("case", CASES)
def test_the_output_follows_the_target(case):
    assert min(chi_squares(decoded(case, range(SEEDS)))) > ALARM
