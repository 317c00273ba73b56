"""Lossless for every drafter x tree; the tree's logits, the cache, the sampling rules against independent oracles."""
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from conftest import CLASSES, CONTEXT, VOCAB, family, plain, random_drafter, shared, target_of

import cape
import pct
import verify
from runtime.targets import any_target

BUILDS = {"chain": cape.chain, "cape": cape.cape, "fixed": partial(cape.fixed, size=2), "beam": partial(cape.beam, width=3),
          "pct": partial(pct.pct, cost=0.05, depth=5), "vct": partial(pct.vct, width=2, depth=5), "eagle2": partial(pct.eagle2, total=15, depth=5, expanded=4)}
PROMPT = [3, 1, 4]
TOLERANCE = dict(atol=2e-5, rtol=1e-4)                         # norms and rotary tables of a float64 model are float32

class HandMade:
    """A drafter that knows the plain output and is right at each position with probability `rate`."""
    needs = {}

    def __init__(self, text, rate):
        self.text, self.rate = text, rate

    def reset(self):
        pass

    def begin(self, view):
        self.t, self.depth = view.length, []

    def keep(self, path):
        """Its own nodes, root first; none where nobody asked."""
        assert path == sorted(set(path)) and path[:1] == list(range(min(1, len(self.depth))))
        assert all(node < len(self.depth) for node in path)

    def expand(self, tokens, parents):
        rows = torch.full((len(parents), VOCAB), 0.1 / VOCAB, dtype=torch.float64)
        for row, parent in zip(rows, parents):
            self.depth.append(self.depth[parent] + 1 if parent >= 0 else 0)
            at = self.t + self.depth[-1] + 1
            truth = self.text[at] if at < len(self.text) else 0
            right = torch.rand(1, generator=torch.Generator().manual_seed(at)).item() < self.rate
            row[truth if right else (truth + 1) % VOCAB] += 0.9
            if not right:
                row[truth] = 0                                 # never right: not even among the extras
        return (rows / rows.sum(1, keepdim=True)).log()

RATES = {"always right": 1.0, "never right": 0.0, "half right": 0.5}
# Neural drafters and other settings: test_random.py
PAIRS = list(product(("glide", "edd", *RATES), BUILDS))
LENGTHS = [1, 11, CONTEXT - 3, CONTEXT]

def oracle(target, text, depth=5):
    """A builder that asks nobody: what is true, also beyond the limit."""
    def build(expand, root):
        at = target.cache.length
        tokens = torch.cat((root, torch.tensor(text[at + 1:at + 1 + depth], dtype=torch.long)))
        return verify.Tree(tokens, torch.arange(len(tokens)) - 1)
    return build

def generate(model, drafter, build, prompt=PROMPT, new=12, rule=None, **how):
    return verify.generate(target_of(model), drafter, build, prompt, new, rule, **how)

def test_a_tree_has_one_root_and_parents_before_children():
    for parents in ([-1, 1], [-1, 0, 2], [-1, -2]):
        with pytest.raises(AssertionError, match="parents before"):
            verify.accept([5, 6, 7][:len(parents)], parents, [6, 7, 8])

@pytest.mark.parametrize("number, name, length", [(i, *pair) for i, pair in enumerate(product(CLASSES, LENGTHS))])
def test_greedy_output_is_plain_decoding(number, name, length):
    """Every drafter x tree, at one class and length or more.  (At all of them: test_random.py.)"""
    model, new = shared(name), min(14, CONTEXT - length + 1)
    prompt = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    expected, target = plain(model, prompt, new), target_of(model)
    out = verify.generate(target, None, verify.root_only, prompt, 14)
    assert out.tokens == expected and len(out.rounds) == new - 1, "the baseline: one token a forward"
    for drafter, tree in PAIRS[number::12]:
        made = HandMade(prompt + expected, RATES[drafter]) if drafter in RATES else random_drafter(model, drafter)
        out = verify.generate(target, made, BUILDS[tree], prompt, 14)
        assert out.tokens == expected, f"{drafter} x {tree}"
        assert sum(len(step.new) for step in out.rounds) == new - 1 and out.tau == (new - 1) / max(1, len(out.rounds))
        for step in out.rounds:
            assert [step.tokens[node] for node in step.path[1:]][:len(step.new) - 1] == step.new[:-1]
            assert [step.parents[node] for node in step.path] == [-1, *step.path[:-1]]
        if drafter in ("always right", "never right"):
            assert len(out.rounds) == (-(-(new - 1) // 6) if drafter == "always right" else new - 1)
    assert target.ids == (prompt + expected)[:len(target.ids)], "the cache holds the output and nothing else"

# ---------------------------------------------------------------- trees, the cache
def random_tree(n, seed):
    """Of an odd seed a deep one: deeper than the windows are long."""
    g = torch.Generator().manual_seed(seed)
    parents = [-1] + [int(torch.randint(max(0, i - 2) if seed % 2 else 0, i, (1,), generator=g)) for i in range(1, n)]
    return torch.randint(VOCAB, (n,), generator=g), parents

def path_to(node, parents):
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path

@pytest.mark.parametrize("seed", range(2))
@torch.inference_mode()
def test_tree_logits_and_commit_equal_each_path_alone(model, seed):
    """Every node of a random tree sees its own path and nothing else; a committed path leaves the cache of a fresh prefill."""
    (tokens, parents), target, fresh = random_tree(18, seed), target_of(model), target_of(model)
    prompt = torch.randint(VOCAB, (10,), generator=torch.Generator().manual_seed(1)).tolist()
    target.capture({"hidden": [0, 1, 3]})
    target.prefill(prompt)
    views = [target.view()]
    logits = target.forward(tokens, torch.tensor(parents))
    paths = [path_to(node, parents) for node in range(18)]
    for row, path in zip(logits, paths):
        alone = model(torch.tensor([prompt + tokens[path].tolist()]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(row, alone, **TOLERANCE)
    path = max(paths, key=len)
    text = prompt + tokens[path].tolist()
    target.commit(path, tokens[path].tolist())
    fresh.sync(text)
    n = len(text)
    assert target.ids == text and target.cache.length == n and len(target.cache.kv) == 3
    for layer, held in target.cache.kv.items():
        for entries, whole in zip(held, fresh.cache.kv[layer]):
            torch.testing.assert_close(entries[:, :, :n], whole[:, :, :n], **TOLERANCE)
    # Hidden states are those of what was committed, as the library numbers them (the last layer's normed).
    states = model(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    views.append(target.view())
    assert sum((view.tokens.tolist() for view in views), []) == sum((view.ids for view in views), []) == text and views[1].length == n
    for k in (0, 1, 3):
        torch.testing.assert_close(torch.cat([view.hidden[k] for view in views]), states[k][0], **TOLERANCE)

@torch.inference_mode()
def test_sync_keeps_the_common_prefix(model):
    """The view shows what was forwarded, and the source once."""
    target, before = any_target(model), []
    target.capture({"hidden": [1]})
    target.source = [8, 9]
    for ids in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [1, 2, 3, 9], [1, 2], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] * 3):
        common = next((i for i, (a, b) in enumerate(zip(before, ids)) if a != b), min(len(before), len(ids)))
        for count in (1, min(4, len(ids))):
            forwarded, n = [], len(ids)
            with model.get_input_embeddings().register_forward_hook(lambda module, args, out, seen=forwarded: seen.append(args[0].numel())):
                logits = target.sync(ids, count)
            own = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
            torch.testing.assert_close(logits, own.logits[0, -count:], **TOLERANCE)
            assert logits.shape == (count, VOCAB) and target.ids == ids and target.cache.length == n
            new = n - min(common, n - count)
            assert sum(forwarded) == new
            view, common = target.view(), n
            assert view.tokens.tolist() == view.ids == ids[n - new:] and view.length == n
            assert view.source == (None if before or count > 1 else [8, 9])
            torch.testing.assert_close(view.hidden[1], own.hidden_states[1][0, n - new:], **TOLERANCE)
        before = list(ids)

# ---------------------------------------------------------------- the loop: trees, what a builder and a drafter see
@pytest.mark.parametrize("off, tokens, parents", [(0, [3, 4], [-1, 2, 0]), (0, [3, 4], [-1, 1, 0]), (0, [3], [0, 0]), (0, [3], [-1, 5]), (0, [3], [-1]), (1, [], [-1])])
def test_a_tree_that_breaks_the_contract_is_refused(llama, off, tokens, parents):
    """A child before its parent, no root, a parent that is no node, lengths that differ; another root."""
    def build(expand, root):
        return verify.Tree(torch.cat(((root + off) % VOCAB, torch.tensor(tokens, dtype=torch.long))), torch.tensor(parents))
    for rule in (None, verify.Sampled()):
        with pytest.raises(AssertionError, match="tree"):
            generate(llama, None, build, rule=rule)

def test_duplicates_and_the_two_orders_of_nodes(llama):
    """Duplicates: the first counts.  What is kept of the drafter's nodes is told in its own order, not the tree's."""
    assert verify.accept([7, 3, 3, 5], [-1, 0, 0, 1], [3, 5, 9, 4]) == ([0, 1, 3], [3, 5, 4])
    expected, kept = plain(llama, PROMPT, 24), []
    a, b = expected[1:3]
    wrong = torch.tensor([(a + 1) % VOCAB])

    def build(expand, root):
        expand(root, [-1])
        expand(torch.cat((wrong, torch.tensor([a]))), [0, 0])
        return verify.Tree(torch.cat((root, torch.tensor([a, b]), wrong)), torch.tensor([-1, 0, 1, 0]))
    drafter = HandMade(PROMPT + expected, 1.0)
    drafter.keep = kept.append
    out = generate(llama, drafter, build, new=4)
    assert out.tokens == expected[:4] and out.rounds[0].path == [0, 1, 2] and kept == [[0, 2]]

def test_what_a_builder_sees(llama):
    """The root, how deep a tree may be, the drafter; probabilities that are calibrated or warped, then adjusted."""
    seen = []

    def build(expand, root):
        assert expand.root == root.item() and expand.drafter is drafter
        seen.append((expand.remaining, expand(root, [-1])[0]))
        return verify.Tree(root, torch.tensor([-1]))
    drafter = HandMade([0] * 40, 1.0)
    drafter.temperature = 0.5
    generate(llama, drafter, build, [1, 2], 5)
    assert [remaining for remaining, _ in seen] == [3, 2, 1, 0]
    drafter.begin(verify.View(None, 2, {}, {}))
    p = drafter.expand(torch.tensor([0]), [-1])[0].exp().float()
    calibrated = p ** 2 / (p ** 2).sum()
    torch.testing.assert_close(seen[0][1], calibrated)
    top_3 = p * (p >= p.topk(3).values[-1])
    for rule, expected in ((None, calibrated), (verify.Sampled(), p), (verify.Sampled(0.5, top_k=3), top_3 ** 2 / (top_3 ** 2).sum())):
        for drafter.adjust in (lambda probs: probs, lambda probs: 1 - probs):
            del seen[:]
            generate(llama, drafter, build, [1, 2], 3, rule)
            torch.testing.assert_close(seen[0][1], drafter.adjust(expected))

@pytest.mark.parametrize("rule", [None, verify.Sampled(0.8, seed=3)])
def test_a_tree_deeper_than_its_builder_asked_and_than_the_context_holds(rule):
    """GPT-2, whose table of positions ends: up to its last one, and the last token is not read."""
    model = family("GPT2LMHeadModel", max_position_embeddings=16, num_hidden_layers=2)
    for prompt in ([1, 2, 3], [1] * 13, [1] * 15, [1] * 16):
        expected = generate(model, None, verify.root_only, prompt, 20, rule).tokens
        assert len(expected) == 17 - len(prompt) and (rule or expected == plain(model, prompt, len(expected)))
        for target in (verify.Target(model), verify.Target(model, capacity=100)):
            build = oracle(target, prompt + expected + [1] * 9)
            assert verify.generate(target, None, build, prompt, 20, rule).tokens == expected

# ---------------------------------------------------------------- sampling
def inverse(p, uniform):
    """The first token at which the sums of p reach uniform times their total, in float64."""
    sums = np.cumsum(p.double().numpy())
    return int(np.argmax(sums >= uniform * sums[-1]))

def test_the_nodes_of_a_depth_share_their_noise():
    """364 nodes in six depths: each node's token is that of its own distribution by its position's noise."""
    wide = pct.vct(lambda tokens, parents: torch.full((len(parents), 9), 1 / 9), torch.tensor([0]), 3, 5)
    rule, logits = verify.Sampled(0.9, top_k=20, seed=3), torch.randn(364, 30)
    depths = verify.ancestor_mask(wide.parents).sum(1) - 1
    assert depths.max() == 5
    expected = [(p / verify.keyed_noise(3, 100 + d, 30, p.device)).argmax() for p, d in zip(rule.warp(logits), depths.tolist())]
    assert rule.choose(wide, logits, 100).tolist() == expected

def test_the_noise_of_one_token_is_exponential_over_positions_and_over_seeds():
    """By Kolmogorov and Smirnov's distance at 1 in 1000: positions, and seeds, have noise of their own."""
    def noise(seed, position):
        return verify.keyed_noise(seed, position, 2, torch.device("cpu"))[1].item()
    for numbers in ([noise(3, position) for position in range(1000)], [noise(seed, 3) for seed in range(1000)]):
        share = 1 - np.exp(-np.sort(numbers))                              # of the distribution, uniform
        assert np.abs(share - (np.arange(1000) + 0.5) / 1000).max() < 1.95 / 1000 ** 0.5

def test_rounding_does_not_change_what_is_sampled_from_a_large_vocabulary():
    """Logits of 50 000 tokens and the same with the rounding of another kernel: 300 positions have the same token.

    Of cumulative sums one position in some hundreds had another, and so a tree had not plain sampling's tokens.
    """
    g = torch.Generator().manual_seed(0)
    root = verify.root_only(None, torch.tensor([0]))
    for position in range(300):
        logits = 3 * torch.randn(1, 50_000, generator=g)
        rounded = logits + 1e-5 * torch.randn(1, 50_000, generator=g)
        assert verify.Sampled(1.0).choose(root, logits, position) == verify.Sampled(1.0).choose(root, rounded, position)

def test_the_first_and_last_token_can_be_sampled_and_none_of_probability_zero():
    """By the cumulative sums that redraw a token of a sampled chain."""
    p = torch.tensor([[0, 0.5, 0, 0.5, 0]])
    ends = [verify.sample(p, torch.tensor(u, dtype=torch.float64)).item() for u in (2 ** -52, 0.5, 0.5 + 2 ** -52, 1.0)]
    assert ends == [1, 1, 3, 3]

def test_the_threshold_and_the_residual_of_a_drawn_token_to_rounding():
    """min(1, p_target / p_draft) by targets on either side of a known draw; after a rejection the residual's token, no statistics."""
    def random_row(seed):
        p = torch.rand(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
        return p / p.sum()
    after = torch.full((6,), 1 / 6, dtype=torch.float64)
    for seed in range(40):
        q, x = random_row(seed + 50), seed % 6
        u = torch.rand(1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).item()
        tree = verify.Tree(torch.tensor([0, x]), torch.tensor([-1, 0]), q[None])
        for ratio in (u - 1e-9, u + 1e-9, 1.0):
            p = random_row(1000 + seed)
            p[x] = 0
            p *= (1 - ratio * q[x]) / p.sum()
            p[x] = ratio * q[x]                                # min(1, p / q) is the ratio
            choice = verify.accept_drawn(tree, torch.stack((p, after)), torch.Generator().manual_seed(seed)).tolist()
            redrawn = []
            for residual in ((p - q).clamp(min=0) + 1e-30, after):     # of which a round uses one
                g = torch.Generator().manual_seed(seed)
                _, number = torch.rand(1, generator=g, dtype=torch.float64), torch.rand((), generator=g, dtype=torch.float64)
                redrawn.append(inverse(residual, 1 - number.item()))
            assert choice == [x if u < ratio else redrawn[0], redrawn[1]], (u, ratio)
    # Both are certain of token 1, and rounding rejects it: nothing is left of the difference.
    sure = torch.eye(4)[[1, 1, 1]]
    tree = verify.Tree(torch.tensor([0, 1, 1]), torch.arange(-1, 2), 9 * sure[:2])
    assert verify.accept_drawn(tree, sure, torch.Generator().manual_seed(0)).tolist() == [1, 1, 1]
