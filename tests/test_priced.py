"""The priced tree and graft against their equations on dicts and Python floats."""
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_cape import random_table, table_expand
from test_maxgram import brute_force
from test_pct import paths

from beyond import graft, priced
from maxgram import MaxGram

ROOT = 0
ROOTS = torch.tensor([ROOT])

class Suggestions:
    """A MaxGram whose next token depends on the seed and the path: mostly the likeliest one."""
    confidence = (0.5, 0.7, 0.9, 0.99)

    def __init__(self, seed, table):
        self.seed, self.table = seed, table

    def reset(self):
        pass

    def commit(self, ids):
        pass

    def confidence_of(self, length):
        return self.confidence[length]

    def after(self, path):
        """(token, length of its match), or None"""
        rng = random.Random(hash((self.seed, *path)))
        if rng.random() < 0.25:
            return None
        likeliest = self.table[path[-1]].argmax().item()
        token = likeliest if rng.random() < 0.8 else rng.randrange(len(self.table))
        return token, rng.randrange(4)

    def propose(self, path, n):
        path, lengths = list(path), []
        while len(lengths) < n and (found := self.after(path)):
            path.append(found[0])
            lengths.append(found[1])
        return path[len(path) - len(lengths):], lengths

def row_of(table, gram, path):
    """The distribution after a path (the root first): the table's, Max-Gram's token mixed in."""
    row = table[path[-1]].tolist()
    if gram and (found := gram.after(path)) and found[1] >= 2:
        token, w = found[0], gram.confidence_of(found[1])
        row = [(1 - w) * p + w * (x == token) for x, p in enumerate(row)]
    return row

def suggested(path, joint, gram, least, most, match=0):
    """What is suggested after a path while its probability is `least` or more -> {path: joint}."""
    found, path = {}, tuple(path)
    while gram and len(found) < most and (after := gram.after(path)):
        joint *= gram.confidence_of(after[1])
        if joint < least or after[1] < match:
            break
        path += (after[0],)
        found[path] = joint
    return found

def layered(table, gram, width, depth, prices, most, chain, remaining):
    """The rule of the docstrings on dicts -> all nodes {path: joint}, the paths expanded, D."""
    cost, price, start = prices
    found, frontier, expanded, r = {}, {(ROOT,): 1.0}, set(), 1.0
    for D in range(1, depth + 1):
        layer, R = {}, dict(frontier)
        best = max(frontier, key=frontier.get)
        longest = min(chain, remaining - len(best))
        reads = suggested(best, frontier[best], gram, price, longest, match=2)
        for path in [*frontier, *reads]:
            if path not in frontier and path not in layer:
                break                            # the chain is not among the best children
            R[path] = frontier.get(path, layer.get(path))
            row = row_of(table, gram, path)
            for x in sorted(range(len(row)), key=lambda x: (-row[x], x))[:width]:
                if row[x] > 0:
                    layer[(*path, x)] = R[path] * row[x]
        expanded |= set(R)
        found.update(layer)
        worth = sorted((p for p in found.values() if p >= price * r), reverse=True)[:most]
        r = max(r, (1 + sum(worth)) / (1 + start + cost * D + price * len(worth)))
        s = sum(p for p in layer.values() if p >= price * r) / sum(R.values())
        frontier = {path: p for path, p in layer.items()
                    if s * p >= price * r and path not in R and len(path) <= remaining}
        frontier = dict(sorted(frontier.items(), key=lambda at: -at[1])[:most])
        if not frontier or sum(s * p - price * r for p in frontier.values()) < cost * r:
            break
    for path in found.keys() - expanded if gram else ():
        if found[path] >= price * r:
            longest = min(chain, remaining + 1 - len(path))
            found.update(suggested(path, found[path], gram, price * r, longest))
    return found, expanded, D

def rate(nodes, kept, prices, D):
    cost, price, start = prices
    E = 1 + sum(nodes[path] for path in kept)
    return E / (1 + start * (len(kept) > 0) + cost * D + price * len(kept))

def most_profitable(nodes, prices, most, D):
    """Of each number of nodes the most probable ones -> the highest rate."""
    ranked = sorted(nodes, key=nodes.get, reverse=True)
    return max(rate(nodes, ranked[:n], prices, D) for n in range(min(most, len(nodes)) + 1))

def case(seed):
    """A random table, the drafter and builder over it, and how they are set."""
    rng = random.Random(seed)
    small = rng.random() < 0.25
    table = random_table(seed, vocab=3 if small else 8)
    cost, start = rng.choice([0.05, 0.1, 0.2, 0.4]), rng.choice([0.0, 0.3, 1.0])
    node_price = rng.choice([0.0, 0.03, 0.2, 1.0] if small else [0.005, 0.02, 0.05])
    settings = {"width": 3 if small else 4, "depth": 2 if small else 6,
                "max_nodes": rng.choice([4, 99, 99, 99])}
    given = []

    def expand_table(tokens, parents):
        for token, parent in zip(tokens.tolist(), parents):
            given.append((given[parent] if parent >= 0 else ()) + (token,))
        expand.calls += 1
        return table[tokens]

    gram, build, expand = None, priced.pct_cost, partial(expand_table)
    if seed % 2:
        gram = Suggestions(seed, table)
        nothing = SimpleNamespace(needs={}, reset=lambda *a: 0, begin=lambda *a: 0)
        nothing.expand = expand_table
        mixture = graft.Mixture(nothing, gram)
        mixture.reset(None, None)
        mixture.begin(SimpleNamespace(ids=[1]), ROOT)
        settings["chain"] = rng.choice([2, 16, 16])
        build, expand = mixture.graft, partial(mixture.expand)
    expand.remaining, expand.calls = rng.randint(2, 8), 0
    build = partial(build, expand, ROOTS, cost, node_price, start, **settings)
    return SimpleNamespace(
        table=table, gram=gram, prices=(cost, node_price, start), settings=settings, build=build,
        remaining=expand.remaining, expand=expand, given=given)

def test_the_tree_is_drafted_by_its_rule_and_is_the_most_profitable(monkeypatch):
    """Of what was drafted no other set of nodes gives more expected tokens for its time."""
    seen, own = [], priced.most_profitable

    def recorded(candidates, *more):
        seen.append(candidates)
        return own(candidates, *more)
    for module in (priced, graft):
        monkeypatch.setattr(module, "most_profitable", recorded)
    for seed in range(260):
        a = case(seed)
        most = a.settings["max_nodes"]
        nodes, expanded, D = layered(
            a.table, a.gram, a.settings["width"], a.settings["depth"], a.prices, most,
            a.settings.get("chain", 0), a.remaining)
        tree = a.build()
        kept = {(ROOT, *path) for path in paths(tree)}
        assert a.expand.calls == D
        assert set(a.given) >= expanded, "a suggestion may be read in vain"
        assert a.gram or set(a.given) == expanded
        assert max(map(len, a.given)) <= a.remaining
        # All nodes that were drafted, or added without a forward
        candidates, drafted = seen[-1], [(ROOT,)]
        for parent, token in zip(candidates.parent[1:], candidates.token[1:]):
            drafted.append((*drafted[parent], token))
        assert dict(zip(drafted[1:], candidates.p[1:])) == pytest.approx(nodes)
        assert len(kept) <= most and max(map(len, kept), default=0) <= a.remaining + 1
        assert rate(nodes, kept, a.prices, D) >= most_profitable(nodes, a.prices, most, D) - 1e-12

def test_where_the_equations_hold_with_equality():
    """Eq. 4 and 5: what is worth exactly its price is drafted.  What gains nothing is not verified.
    """
    sure = table_expand(torch.eye(3, dtype=torch.float64))
    priced.pct_cost(sure, ROOTS, cost=1.0, node_price=0.0, depth=4)      # r = 2/2 = 3/3 = 4/4
    assert sure.calls == 4
    half = table_expand(torch.tensor([[0.5, 0.0]]).repeat(2, 1))
    priced.pct_cost(half, ROOTS, cost=0.0, node_price=0.25, start=0.25)  # r = 1.5/1.5, s p = .25
    assert half.calls == 2
    tree = priced.pct_cost(half, ROOTS, cost=0.0, node_price=0.5, depth=1)
    assert len(tree.tokens) == 1                                         # 1.5/1.5 = 1/1

# ---------------------------------------------------------------- whether a round drafts: Eq. 6
def test_a_round_drafts_where_drafting_lately_gained_what_it_took():
    """Otherwise N_0 is verified, and the mean gain rises.  Rounds of the other kind draft."""
    silent = [0, 0]
    for seed in range(0, 260):
        a = case(seed)
        cost, price, start = a.prices
        chain = suggested((ROOT,), 1.0, a.gram, price, min(a.settings.get("chain", 0), a.remaining))
        counts = range(min(len(chain), a.settings["max_nodes"]) + 1)
        rates = [rate(chain, list(chain)[:n], a.prices, 0) for n in counts]
        n = rates.index(max(rates))
        worth, time = seed // 5 % 2, 0.55
        gain = time * rates[n] * (1.001 if worth else 0.999)
        a.expand.history = history = priced.History()
        history.means = {n > 0: [gain, time], n == 0: [9.0, 0.0]}
        tree = a.build()
        assert (a.expand.calls > 0) == worth
        if not a.expand.calls:
            assert paths(tree) == {path[1:] for path in list(chain)[:n]}
            assert history.means[n > 0] == [pytest.approx(gain + 0.01 * time * rates[n]), time]
            silent[n > 0] += 1
    assert min(silent) > 20, "the root alone, and chains that are good enough alone"

@pytest.mark.parametrize("confidence, accepted, worth", [
    (0.9, 1, False), (0.6, 2, True), (0.05, 0, False)])
def test_the_gain_is_counted_in_realised_tokens(confidence, accepted, worth):
    """A drafter that is sure of itself and wrong stops drafting, and tries again now and then.

    accepted: the depth to which its tokens are right.
    """
    expand = table_expand(torch.tensor([[confidence, 0.0]]).repeat(2, 1))
    expand.remaining = 10 ** 6
    means, drafted, last = None, 0, None
    for _ in range(400):
        calls = expand.calls
        tree = priced.pct_cost(expand, ROOTS, cost=0.1, node_price=0.01, start=0.1)
        n, D = len(tree.tokens) - 1, expand.calls - calls
        if last is not None:                     # what the round before gave and took
            gain, time = last
            means = [means[0] + 0.05 * (gain - means[0]), means[1] + 0.05 * (time - means[1])]
        if D:
            time = 0.1 * D + 0.01 * n + 0.1 * (n > 0)
            means = means or [sum(confidence ** (i + 1) for i in range(n)), time]
        else:
            assert n == 0 and means[0] < means[1]
            means = [means[0] + 0.01 * means[1], means[1]]
        assert expand.history.means == {False: pytest.approx(means)}
        new = min(n, accepted) + 1
        last = (new - 1, time) if D else None
        expand.remaining -= new
        drafted += D > 0
    assert drafted == 400 if worth else 0 < drafted < 250

def test_without_remaining_every_round_drafts():
    expand = table_expand(torch.tensor([[0.05, 0.0]]).repeat(2, 1))
    for rounds in range(1, 30):
        priced.pct_cost(expand, ROOTS, cost=0.5)
        assert expand.calls == rounds

# ---------------------------------------------------------------- Max-Gram alone
def test_max_grams_chain_has_the_length_of_the_highest_rate():
    """Of all lengths, by brute force; none where nothing is worth its price."""
    rng, lengths = random.Random(0), []
    for _ in range(200):
        text = [rng.randrange(4) for _ in range(rng.randint(1, 30))] * rng.choice([1, 2])
        confidence = sorted(rng.random() for _ in range(5))
        gram, root = MaxGram([0, 2, 3, 1], confidence), rng.randrange(4)
        gram.commit(text)
        remaining, most = rng.randint(1, 24), rng.choice([3, 99])
        price, start = rng.choice([0.01, 0.05, 0.3]), rng.choice([0.0, 0.1, 0.6])
        tree = priced.priced_chain(SimpleNamespace(remaining=remaining), torch.tensor([root]), gram,
                                   price, start, most)
        deepest = min(remaining, most)
        chain, found = brute_force(text, [root], deepest, bigram=[0, 2, 3, 1])
        joints = [1.0]
        for length in found:
            joints.append(joints[-1] * confidence[min(length, 4)])
        rates = [sum(joints[:n + 1]) / (1 + n * price + start * (n > 0))
                 for n in range(len(joints))]
        n = len(tree.tokens) - 1
        assert tree.tokens.tolist() == [root, *chain[:n]]
        assert tree.parents.tolist() == list(range(-1, n))
        assert set(tree.expand_index.tolist()) == {-1}
        assert rates[n] == pytest.approx(max(rates))
        lengths.append(n)
    assert 40 < lengths.count(0) < 160 and max(lengths) > 10

