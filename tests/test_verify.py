"""Tree logits, the cache, the contract of the loop, and the rule, against independent oracles.

That the output is plain decoding's is asserted in test_lossless.py.
"""
from functools import partial

import numpy as np
import pytest
import torch
from conftest import VOCAB, plain, target_of

import cape
import pct
import verify
from runtime.targets import any_target
from transformers import generation

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

# ---------------------------------------------------------------- trees and the cache
def random_tree(n, seed):
    """Tokens (n,) and parents [n].  Of an odd seed a tree that is deeper than windows are long."""
    g = torch.Generator().manual_seed(seed)
    parents = [-1]
    for i in range(1, n):
        lowest = max(0, i - 2) if seed % 2 else 0
        parents.append(int(torch.randint(lowest, i, (1,), generator=g)))
    return torch.randint(VOCAB, (n,), generator=g), parents

def path_to(node, parents):
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path

@pytest.mark.parametrize("seed", range(2))
@torch.inference_mode()
def test_tree_logits_and_commit_equal_each_path_alone(model, seed):
    """Every node sees its own path alone; a committed path leaves a fresh prefill's cache."""
    (tokens, parents), target, fresh = random_tree(18, seed), target_of(model), target_of(model)
    prompt = torch.randint(VOCAB, (10,), generator=torch.Generator().manual_seed(1)).tolist()
    _, first = target.prefill(prompt, needs={"hidden": [0, 1, 3], "kv": [1]})
    logits, states = target.forward(tokens, torch.tensor(parents))
    paths = [path_to(node, parents) for node in range(18)]
    for of_node, path in zip(logits, paths):
        ids = torch.tensor([prompt + tokens[path].tolist()])
        torch.testing.assert_close(of_node, model(ids, use_cache=False).logits[0, -1], **TOLERANCE)
    path = max(paths, key=len)
    new = tokens[path].tolist()
    second = target.commit(path, new, states)
    text = prompt + new
    fresh.align(text)
    n = len(text)
    assert target.ids == text and target.cache.length == n and len(target.cache.kv) == 3
    for layer, pair in target.cache.kv.items():
        for entries, expected in zip(pair, fresh.cache.kv[layer]):
            torch.testing.assert_close(entries[:, :, :n], expected[:, :, :n], **TOLERANCE)
    # The views show what was committed, with hidden states as the library numbers them.
    assert first.tokens.tolist() == first.ids == prompt and first.length == len(prompt)
    assert second.tokens.tolist() == second.ids == new and second.length == n
    assert [entries.shape[2] for entries in second.kv[1]] == [n, n]
    own = model(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    for k in (0, 1, 3):
        hidden = torch.cat((first.hidden[k], second.hidden[k]))
        torch.testing.assert_close(hidden, own[k][0], **TOLERANCE)

@torch.inference_mode()
def test_sync_keeps_the_common_prefix(model):
    """It forwards the rest and no more, and its view shows the rest."""
    target = any_target(model)
    target.configure({"hidden": [1]})
    before, forwarded = [], []
    embedding = model.get_input_embeddings()
    count_ids = embedding.register_forward_hook(
        lambda module, args, out: forwarded.append(args[0].numel()))
    long = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] * 3
    texts = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [1, 2, 3, 9], [1, 2], [5], long
    for ids in texts:
        differ = [i for i, (a, b) in enumerate(zip(before, ids)) if a != b]
        common = differ[0] if differ else min(len(before), len(ids))
        for count in (1, min(4, len(ids))):
            forwarded.clear()
            logits, view = target.align(ids, count)
            new = len(ids) - min(common, len(ids) - count)
            assert sum(forwarded) == new
            assert view.tokens.tolist() == view.ids == ids[-new:] and view.length == len(ids)
            assert target.ids == ids and target.cache.length == len(ids)
            own = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
            torch.testing.assert_close(logits, own.logits[0, -count:], **TOLERANCE)
            torch.testing.assert_close(view.hidden[1], own.hidden_states[1][0, -new:], **TOLERANCE)
            common = len(ids)
        before = ids
    count_ids.remove()

# ---------------------------------------------------------------- the contract of the loop
def test_of_two_equal_children_the_first_counts():
    assert verify.accept([7, 3, 3, 5], [-1, 0, 0, 1], [3, 5, 9, 4]) == ([0, 1, 3], [3, 5, 4])

@pytest.mark.parametrize("parents", [[-1, 1], [-1, 0, 2], [-1, -2]])
def test_parents_come_before_their_children(parents):
    with pytest.raises(AssertionError, match="parents before"):
        verify.accept([5, 6, 7][:len(parents)], parents, [6, 7, 8])

def test_a_tree_begins_with_the_root(llama):
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
    assert out.tokens == expected[:4]
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
    assert memory == [1, 2, 3]
    logits = torch.zeros(VOCAB)
    logits[5] = 3.0
    torch.testing.assert_close(seen[0][1], (logits / 0.5).softmax(-1))
    generate(llama, Known([5] * 40), build, [1, 2], 5, verify.sampling(2.0, top_k=1))
    assert memory[3:] == [1, 2, 3], "another sequence has another expand"
    torch.testing.assert_close(seen[3][1], torch.eye(VOCAB)[5])

def test_no_prediction_is_a_row_of_zeros():
    logits = torch.stack((torch.zeros(4), torch.full((4,), -torch.inf)))
    for rule in (verify.Rule(), verify.sampling(0.7, top_p=0.9)):
        assert rule.probs(logits, 0.5)[1].tolist() == [0, 0, 0, 0]

def test_no_two_generators_of_a_decoding_have_one_seed(llama, monkeypatch):
    """One stream for two purposes biases what is sampled.  Twenty seeds, chains and trees."""
    made = []
    own = verify.generator_for

    def noted(seed, purpose, device="cpu"):
        generator = own(seed, purpose, device)
        made.append(generator.initial_seed())
        return generator

    monkeypatch.setattr(verify, "generator_for", noted)
    text = PROMPT + 2 * plain(llama, PROMPT, 24)
    for seed in range(20):
        for build in (cape.drawn, cape.cape):
            made.clear()
            verify.keyed_noise.cache_clear()
            generate(llama, Known(text), build, new=10, rule=verify.sampling(1.0, seed=seed))
            assert len(made) > 5 and len(made) == len(set(made))

# ---------------------------------------------------------------- processors that look at the text
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
    tokens, parents = random_tree(18, 11)
    tree = verify.Tree(tokens, torch.tensor(parents), torch.full((18,), -1))
    text, longest = torch.tensor([[1, 1, 5, tokens[0]]]), 0
    for seed in range(40):
        logits = torch.randn(18, VOCAB, generator=verify.generator_for(seed, "logits"))
        logits[parents[1:], tokens[1:]] += 9                   # so that children are chosen
        counts, penalty = Counts(), generation.RepetitionPenaltyLogitsProcessor(1.3)
        rule = verify.Rule([counts, penalty])
        choice = rule.choose(tree, logits, text)
        path, new = verify.accept(tokens.tolist(), parents, choice.tolist())
        texts = []
        for i, (node, token) in enumerate(zip(path, new)):
            own = torch.cat((text[:, :-1], tokens[path_to(node, parents)][None]), 1)
            texts.append(own.tolist())
            assert own[0, 4:].tolist() == new[:i]
            assert token == penalty(own, Counts()(own, logits[node:node + 1])).argmax()
        assert counts.seen == texts
        longest = max(longest, len(path))
    assert longest > 2, "no path of several nodes"

# ---------------------------------------------------------------- sampling
def test_the_nodes_of_a_depth_share_their_noise():
    """364 nodes in six depths: each one's token follows from its distribution and its noise."""
    def uniform(tokens, parents):
        return torch.full((len(parents), 9), 1 / 9)
    wide = pct.vct(uniform, torch.tensor([0]), 3, 5)
    rule, logits = verify.sampling(0.9, top_k=20, seed=3), torch.randn(364, 30)
    depths = verify.ancestor_mask(wide.parents).sum(1) - 1
    assert depths.max() == 5
    text = torch.zeros(1, 100, dtype=torch.long)
    p_target = rule.distribution(wide, rule.process(None, logits))
    expected = []
    for p, d in zip(p_target, depths.tolist()):
        expected.append((p / verify.keyed_noise(3, 100 + d, 30, p.device)).argmax().item())
    assert rule.choose(wide, logits, text).tolist() == expected

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

def test_rounding_does_not_change_what_is_sampled_from_a_large_vocabulary():
    """50 000 tokens, and the rounding of another kernel: 300 positions have the same token.

    By cumulative sums one position in some hundreds had another, and so a tree had not plain
    sampling's tokens.
    """
    g = torch.Generator().manual_seed(0)
    root = verify.root_only(None, torch.tensor([0]))
    rule = verify.sampling(1.0)
    for position in range(1, 301):
        text = torch.zeros(1, position, dtype=torch.long)
        logits = 3 * torch.randn(1, 50_000, generator=g)
        rounded = logits + 1e-5 * torch.randn(1, 50_000, generator=g)
        assert rule.choose(root, logits, text) == rule.choose(root, rounded, text)

def test_the_first_and_last_token_can_be_sampled_and_none_of_probability_zero():
    """By the cumulative sums that resample a token of a sampled chain."""
    p = torch.tensor([[0, 0.5, 0, 0.5, 0]])
    found = []
    for u in (2 ** -52, 0.5, 0.5 + 2 ** -52, 1.0):
        found.append(verify.sample(p, torch.tensor(u, dtype=torch.float64)).item())
    assert found == [1, 1, 3, 3]

def inverse(p, uniform):
    """The first token at which the sums of p reach uniform times their total, in float64."""
    sums = np.cumsum(p.double().numpy())
    return int(np.argmax(sums >= uniform * sums[-1]))

def random_distribution(seed):
    p = torch.rand(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    return p / p.sum()

def chain_of(tokens, p_draft):
    parents = torch.arange(len(tokens)) - 1
    return verify.Tree(torch.tensor(tokens), parents, torch.full_like(parents, -1), p_draft)

def test_the_threshold_and_the_residual_to_rounding():
    """min(1, p_target / p_draft) beside a known u; after a rejection the residual's token."""
    rand = partial(torch.rand, dtype=torch.float64)
    after = torch.full((6,), 1 / 6, dtype=torch.float64)
    for seed in range(40):
        q, x = random_distribution(seed + 50), seed % 6
        u = rand(1, generator=torch.Generator().manual_seed(seed)).item()
        tree = chain_of([0, x], q[None])
        for ratio in (u - 1e-9, u + 1e-9, 1.0):
            p = random_distribution(1000 + seed)
            p[x] = 0
            p *= (1 - ratio * q[x]) / p.sum()
            p[x] = ratio * q[x]                                # min(1, p / q) is the ratio
            generator = torch.Generator().manual_seed(seed)
            choice = verify.accept_sampled(tree, torch.stack((p, after)), generator).tolist()
            resampled = []
            for residual in ((p - q).clamp(min=0) + 1e-30, after):     # of which a round uses one
                g = torch.Generator().manual_seed(seed)
                _, number = rand(1, generator=g), rand((), generator=g)
                resampled.append(inverse(residual, 1 - number.item()))
            assert choice == [x if u < ratio else resampled[0], resampled[1]], (u, ratio)
    # Both are certain of token 1, and rounding rejects it: nothing is left of the difference.
    sure = torch.eye(4)[[1, 1, 1]]
    tree = chain_of([0, 1, 1], 9 * sure[:2])
    generator = torch.Generator().manual_seed(0)
    assert verify.accept_sampled(tree, sure, generator).tolist() == [1, 1, 1]
