"""Tree logits, the cache, the contract of the loop, and the rule, against independent oracles.

That the output is plain decoding's is asserted in test_lossless.py, and that sampled chains follow
the target in test_sampling.py.
"""
import numpy as np
import pytest
import torch
from conftest import VOCAB, plain, target_of
from transformers import generation

import cape
import verify
from runtime.targets import any_target

PROMPT = [3, 1, 4]
TOLERANCE = dict(atol=2e-5, rtol=1e-4)       # norms and RoPE tables of a float64 model are float32

class Known:
    """A drafter that knows a text, and is certain of it at each position."""
    needs = {}

    def __init__(self, text):
        self.text, self.kept = text, []

    def reset(self, probs, source):
        self.probs = probs

    def begin(self, view, root):
        self.t, self.depth = view.length, []

    def keep(self, path):
        self.kept.append(path)

    def expand(self, tokens, parents):
        logits = torch.zeros(len(parents), VOCAB)
        for of_node, parent in zip(logits, parents):
            self.depth.append(self.depth[parent] + 1 if parent >= 0 else 0)
            of_node[self.text[self.t + self.depth[-1] + 1]] = 3.0
        return self.probs(logits, 0.5)

def generate(model, drafter, build, prompt=PROMPT, new=12, rule=verify.Rule()):
    return verify.generate(target_of(model), drafter, build, prompt, new, rule)

def own_forward(model, ids):
    """The model over a whole text, without cache and mask: its logits and hidden states."""
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
    target = any_target(model)
    target.configure({"hidden": [1]})
    forwarded, before = [], []
    count_ids = model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: forwarded.append(args[0].numel()))
    # Each text, how many of its ids the text before it began with, how many logits are asked for
    texts = [([1, 2, 3, 4, 5, 6], 0, 1), ([1, 2, 3, 4, 5, 6], 6, 4), ([1, 2, 3, 9], 3, 1),
             ([1, 2], 2, 2), ([5], 0, 1), ([5, *range(11)] * 3, 1, 1)]
    for ids, common, count in texts:
        forwarded.clear()
        logits, view = target.align(ids, count)
        new = len(ids) - min(common, len(ids) - count)
        assert sum(forwarded) == new, (before, ids)
        assert view.tokens.tolist() == view.ids == ids[-new:] and view.length == len(ids)
        assert target.ids == ids and target.cache.length == len(ids)
        own = own_forward(model, ids)
        torch.testing.assert_close(logits, own.logits[0, -count:], **TOLERANCE)
        torch.testing.assert_close(view.hidden[1], own.hidden_states[1][0, -new:], **TOLERANCE)
        before = ids
    count_ids.remove()

# ---------------------------------------------------------------- the contract of the loop
def test_a_walk_down_a_tree(llama):
    """Of two equal children the first counts; parents come first, and the root before all."""
    assert verify.accept([7, 3, 3, 5], [-1, 0, 0, 1], [3, 5, 9, 4]) == ([0, 1, 3], [3, 5, 4])
    for parents in ([-1, 1], [-1, 0, 2], [-1, -2]):
        with pytest.raises(AssertionError, match="parents before"):
            verify.accept([5, 6, 7][:len(parents)], parents, [6, 7, 8])

    def build(expand, root):
        return verify.root_only(expand, (root + 1) % VOCAB)
    with pytest.raises(AssertionError, match="begins with the root"):
        generate(llama, None, build)

def test_the_drafter_is_told_its_own_numbers(llama):
    """Of what it expanded, in its own order, and not of what was never given to it."""
    expected = plain(llama, PROMPT, 24)
    a, b = expected[1:3]
    wrong = (a + 1) % VOCAB

    def build(expand, root):
        expand(root, [-1])
        expand(torch.tensor([wrong, a]), [0, 0])
        tokens = torch.cat((root, torch.tensor([a, b, wrong])))
        return verify.Tree(tokens, torch.tensor([-1, 0, 1, 0]), torch.tensor([0, 2, -1, 1]))

    drafter = Known(PROMPT + expected)
    out = generate(llama, drafter, build, new=4)
    assert out.rounds[0].path == [0, 1, 2] and drafter.kept == [[0, 2]]

def test_what_a_builder_sees(llama):
    """How deep a tree may be, calibrated or processed probabilities, one expand for a sequence."""
    seen, memory = [], []

    def build(expand, root):
        seen.append((expand.remaining, expand(root, [-1])[0]))
        expand.count = getattr(expand, "count", 0) + 1
        memory.append(expand.count)
        return verify.root_only(expand, root)

    generate(llama, Known([5] * 40), build, [1, 2], 5)
    assert [remaining for remaining, _ in seen] == [3, 2, 1], "no builder is called at depth 0"
    logits = torch.zeros(VOCAB)
    logits[5] = 3.0
    torch.testing.assert_close(seen[0][1], (logits / 0.5).softmax(-1))
    generate(llama, Known([5] * 40), build, [1, 2], 5, verify.sampling(2.0, top_k=1))
    assert memory == 2 * [1, 2, 3], "another sequence has another expand"
    torch.testing.assert_close(seen[3][1], torch.eye(VOCAB)[5])
    # A row without any prediction
    none = torch.full((1, 4), -torch.inf)
    for rule in (verify.Rule(), verify.sampling(0.7, top_p=0.9)):
        assert rule.probs(none, 0.5).tolist() == [[0, 0, 0, 0]]

def test_no_two_generators_of_a_decoding_have_one_seed(llama, monkeypatch):
    """One stream for two purposes biases what is sampled.  Eight seeds, chains and trees, and a
    rule that looks at the text.
    """
    made = []
    own = verify.generator_for

    def noted(seed, purpose, device="cpu"):
        generator = own(seed, purpose, device)
        made.append(generator.initial_seed())
        return generator

    monkeypatch.setattr(verify, "generator_for", noted)
    text = PROMPT + 2 * plain(llama, PROMPT, 24)
    for seed in range(8):
        by_text = verify.Rule([Counts()], seed)
        for build in (cape.drawn, cape.cape):
            for rule in (verify.sampling(1.0, seed=seed), by_text):
                made.clear()
                verify.keyed_noise.cache_clear()
                generate(llama, Known(text), build, new=10, rule=rule)
                assert len(made) > 5 and len(made) == len(set(made))

class Counts(generation.LogitsProcessor):
    """A user's own: a token is the less probable, the more often the text has it."""
    def __init__(self):
        self.seen = []

    def __call__(self, ids, scores):
        self.seen.append(ids.tolist())
        counts = torch.zeros_like(scores)
        counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=scores.dtype))
        return scores - counts * torch.arange(scores.shape[1])

def test_processors_see_the_accepted_path_token_by_token():
    """One of them is called once for each new token, with the text before it, and remembers it."""
    (tree, _), longest = random_tree(18, 11), 0
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    text = [1, 1, 5, tokens[0]]
    for seed in range(40):
        logits = torch.randn(18, VOCAB, generator=verify.generator_for(seed, "logits"))
        logits[parents[1:], tokens[1:]] += 9                   # so that children are chosen
        counts, penalty = Counts(), generation.RepetitionPenaltyLogitsProcessor(1.3)
        choice = verify.Rule([counts, penalty]).choose(tree, logits, torch.tensor([text]))
        path, new = verify.accept(tokens, parents, choice.tolist())
        texts = [[text + new[:i]] for i in range(len(path))]
        assert counts.seen == texts
        for own, node, token in zip(texts, path, new):
            own = torch.tensor(own)
            assert token == penalty(own, Counts()(own, logits[node:node + 1])).argmax()
        longest = max(longest, len(path))
    assert longest > 2, "no path of several nodes"

def chain_of(tokens, p_draft):
    parents = torch.arange(len(tokens)) - 1
    return verify.Tree(torch.tensor(tokens), parents, torch.full_like(parents, -1), p_draft)

def test_drafts_of_the_targets_own_distributions_are_all_accepted():
    """A sampled chain, where a processor looks at the text: each node has a p_draft of its own."""
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        tokens, logits = torch.randint(VOCAB, (6,), generator=g), torch.randn(6, VOCAB, generator=g)
        p_draft = []
        for i in range(5):
            scores = Counts()(tokens[None, :i + 1], logits[i:i + 1])
            p_draft.append(scores.softmax(-1))
        tree = chain_of(tokens.tolist(), torch.cat(p_draft))
        choice = verify.Rule([Counts()], seed).choose(tree, logits, tokens[None, :1])
        assert choice[:5].tolist() == tokens[1:].tolist()

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

def test_a_sample_inverts_the_cumulative_sums():
    """The first and the last token can be sampled, and none of probability zero."""
    p = torch.tensor([[0, 0.5, 0, 0.5, 0]])
    found = []
    for u in (2 ** -52, 0.5, 0.5 + 2 ** -52, 1.0):
        found.append(verify.sample_by(torch.tensor(u, dtype=torch.float64), p).item())
    assert found == [1, 1, 3, 3]

def inverse(p, uniform):
    """The first token at which the sums of p reach uniform times their total."""
    sums = np.cumsum(p)
    return int(np.argmax(sums >= uniform * sums[-1]))

def test_speculative_sampling_at_its_threshold():
    """Beside a known u: min(1, p_target / p_draft), or the residual's token by the next number."""
    rng = np.random.default_rng(0)
    after = np.full(6, 1 / 6)
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        u = torch.rand(1, generator=generator, dtype=torch.float64).item()
        number = 1 - torch.rand((), generator=generator, dtype=torch.float64).item()
        q, x = rng.dirichlet(np.full(6, 0.5)), seed % 6
        for ratio in (u - 1e-9, u + 1e-9, 1.0):
            p = rng.dirichlet(np.full(6, 0.5))
            p[x] = 0
            p *= (1 - ratio * q[x]) / p.sum()
            p[x] = ratio * q[x]                                # p_target / p_draft is the ratio
            p_target = torch.tensor(np.stack((p, after)))
            tree = chain_of([0, x], torch.tensor(q[None]))
            generator.manual_seed(seed)
            choice = verify.accept_sampled(tree, p_target, generator).tolist()
            resampled = inverse(np.maximum(p - q, 0), number)
            assert choice == [x if u < ratio else resampled, inverse(after, number)], (u, ratio)
    # Both are certain of token 1, and rounding rejects it: nothing is left of the difference.
    sure = torch.eye(4)[[1, 1, 1]]
    tree = chain_of([0, 1, 1], 9 * sure[:2])
    generator = torch.Generator().manual_seed(0)
    assert verify.accept_sampled(tree, sure, generator).tolist() == [1, 1, 1]
