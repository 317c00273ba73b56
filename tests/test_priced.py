"""The priced builders against their equations on dicts and floats; prices from a made-up clock."""
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import brute_force, paths, random_table, table_expand

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

    gram, kind, expand = None, priced.PctCost, partial(expand_table)
    if seed % 2:
        gram = Suggestions(seed, table)
        nothing = SimpleNamespace(needs={}, reset=lambda *a: 0, begin=lambda *a: 0)
        nothing.expand = expand_table
        mixture = graft.Mixture(nothing, gram)
        mixture.reset(None)
        mixture.begin(SimpleNamespace(ids=[1]), ROOT)
        settings["chain"] = rng.choice([2, 16, 16])
        kind, expand = partial(graft.Graft, mixture), partial(mixture.expand)
    expand.remaining, expand.calls = rng.randint(2, 8), 0
    build = kind(cost, node_price, start, **settings)
    return SimpleNamespace(
        table=table, gram=gram, prices=(cost, node_price, start), settings=settings, build=build,
        remaining=expand.remaining, expand=expand, given=given)

def test_the_tree_is_drafted_by_its_rule_and_is_the_most_profitable(monkeypatch):
    """Of what was drafted no other set of nodes gives more expected tokens for its time."""
    seen, own = [], priced.most_profitable

    def recorded(candidates, *more):
        seen.append(candidates)
        return own(candidates, *more)
    monkeypatch.setattr(priced, "most_profitable", recorded)
    for seed in range(260):
        a = case(seed)
        most = a.settings["max_nodes"]
        nodes, expanded, D = layered(
            a.table, a.gram, a.settings["width"], a.settings["depth"], a.prices, most,
            a.settings.get("chain", 0), a.remaining)
        tree = a.build(a.expand, ROOTS)
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

def built(table, remaining=10 ** 6, **settings):
    """The tree of a new builder, and how many forwards it took."""
    expand = table_expand(table)
    expand.remaining = remaining
    tree = priced.PctCost(**settings)(expand, ROOTS)
    return len(tree.tokens), expand.calls

def test_where_the_equations_hold_with_equality():
    """Eq. 4 and 5: what is worth exactly its price is drafted.  What gains nothing is not verified.
    """
    sure = torch.eye(3, dtype=torch.float64)
    half = torch.tensor([[0.5, 0.0]]).repeat(2, 1)
    _, calls = built(sure, cost=1.0, node_price=0.0, start=0.0, depth=4)   # r = 2/2 = 3/3 = 4/4
    assert calls == 4
    _, calls = built(half, cost=0.0, node_price=0.25, start=0.25)          # r = 1.5/1.5, s p = .25
    assert calls == 2
    nodes, _ = built(half, cost=0.0, node_price=0.5, start=0.0, depth=1)
    assert nodes == 1                                                      # 1.5/1.5 = 1/1

# ---------------------------------------------------------------- whether a round drafts: Eq. 6
def test_a_round_drafts_where_drafting_lately_gained_what_it_took():
    """Otherwise N_0 is verified, and the mean gain rises.  Rounds of the other kind draft."""
    silent = [0, 0]
    for seed in range(260):
        a = case(seed)
        cost, price, start = a.prices
        most = min(a.settings.get("chain", 0), a.remaining)
        chain = suggested((ROOT,), 1.0, a.gram, price, most)
        counts = range(min(len(chain), a.settings["max_nodes"]) + 1)
        rates = [rate(chain, list(chain)[:n], a.prices, 0) for n in counts]
        n = rates.index(max(rates))
        worth, time = seed // 5 % 2, 0.55
        gain = time * rates[n] * (1.001 if worth else 0.999)
        a.build.gains.means = means = {
            ("draft", n > 0): [gain, time, 0.05], ("draft", n == 0): [9.0, 0.0, 0.05]}
        tree = a.build(a.expand, ROOTS)
        assert (a.expand.calls > 0) == worth
        if not a.expand.calls:
            assert paths(tree) == {path[1:] for path in list(chain)[:n]}
            assert means["draft", n > 0][0] == pytest.approx(gain + 0.05 * 0.02)
            silent[n > 0] += 1
    assert min(silent) > 20, "the root alone, and chains that are good enough alone"

def test_max_grams_chain_that_is_always_wrong_is_left_out():
    """By the length of the match that it begins with: sure chains stay."""
    gram = MaxGram(confidence=[0.3, 0.5, 0.6, 0.9])
    gram.commit([1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    build, expand = priced.PricedChain(gram, node_price=0.01, start=0.1), partial(print)
    expand.remaining = 10 ** 6

    def sizes(root, accepted, rounds):
        """The trees' numbers of nodes, of which `accepted` are right at most."""
        for _ in range(rounds):
            nodes = len(build(expand, torch.tensor([root])).tokens) - 1
            expand.remaining -= min(nodes, accepted) + 1
            yield nodes
    wrong = list(sizes(7, 0, 300))                         # after 3 7 the chain of the match 7: 1
    assert wrong[0] > 0 and np.count_nonzero(wrong[100:]) < 40
    assert all(sizes(4, 9, 20)), "of the match 1 2 3 4: 5"

def test_max_grams_chain_has_the_length_of_the_highest_rate():
    """Of all lengths, by brute force; none where nothing is worth its price."""
    rng, lengths = random.Random(0), []
    for _ in range(200):
        text = [rng.randrange(4) for _ in range(rng.randint(1, 30))] * rng.choice([1, 2])
        confidence = sorted(rng.random() for _ in range(5))
        gram, root = MaxGram([0, 2, 3, 1], confidence), rng.randrange(4)
        gram.commit(text)
        expand = partial(print)
        expand.remaining, most = rng.randint(1, 24), rng.choice([3, 99])
        price, start = rng.choice([0.01, 0.05, 0.3]), rng.choice([0.0, 0.1, 0.6])
        tree = priced.PricedChain(gram, price, start, most)(expand, torch.tensor([root]))
        chain, found = brute_force(text, [root], min(expand.remaining, most), bigram=[0, 2, 3, 1])
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

# ---------------------------------------------------------------- prices from the rounds
class Machine:
    """Decodes with a builder, whose clock it moves.  Prices: cost, node_price, start."""

    def __init__(self, build, step=0.05, prices=(0.06, 0.012, 0.15)):
        self.build, self.step, self.prices = build, step, prices
        self.rng, self.time, self.disturbed = random.Random(0), 0.0, False
        build.clock.now = lambda: self.time

    def spend(self, steps):
        slower = 1 + 3 * self.rng.random() * self.disturbed
        self.time += self.step * steps * slower * self.rng.lognormvariate(0, 0.05)

    def decode(self, rounds, likely=(0.2, 0.4, 0.7), accepted=6):
        """Decode a sequence -> its trees' numbers of nodes.

        likely: the drafter's confidences.  accepted: the most nodes that are right.
        """
        def forward(tokens, parents):
            self.spend(self.prices[0])
            p = self.rng.choice(likely)
            return torch.tensor([[0.0, p, (1 - p) / 2, (1 - p) / 2]]).repeat(len(parents), 1)
        expand, sizes = partial(forward), []
        expand.remaining = 10 ** 6
        for _ in range(rounds):
            nodes = len(self.build(expand, ROOTS).tokens) - 1
            self.spend(1 + self.prices[2] * (nodes > 0) + self.prices[1] * nodes)
            expand.remaining -= 1 + min(nodes, self.rng.randint(accepted // 2, accepted))
            sizes.append(nodes)
        return sizes

@pytest.mark.parametrize("step, prices", [
    (0.05, (0.06, 0.012, 0.15)), (10.0, (0.15, 0.03, 0.4)), (1e-3, (0.03, 0.02, 0.0))])
def test_prices_are_those_of_the_machine(step, prices):
    build = priced.PctCost()
    Machine(build, step, prices).decode(400)
    cost, node_price, start = build.clock.prices
    assert (cost, node_price) == pytest.approx(prices[:2], rel=0.25)
    assert start == pytest.approx(prices[2], abs=0.15)

def test_a_price_that_is_given_stays():
    build = priced.PctCost(node_price=0.5, start=0.0)
    Machine(build).decode(60)
    cost, *others = build.clock.prices
    assert others == [0.5, 0.0] and cost == pytest.approx(0.06, rel=0.2)
    with pytest.raises(ValueError, match="below zero"):
        priced.PctCost(cost=-1.0)

def test_a_disturbance_is_forgotten():
    """Rounds that another program makes up to four times slower, each by another factor."""
    quiet, disturbed = [Machine(priced.PctCost()) for _ in range(2)]
    expected = np.mean(quiet.decode(400)[200:])
    disturbed.disturbed = True
    disturbed.decode(150)
    disturbed.disturbed = False
    found = np.mean(disturbed.decode(250)[100:])
    assert found == pytest.approx(expected, rel=0.2)
    price = disturbed.build.clock.prices.node_price
    assert price == pytest.approx(0.012, rel=0.3)

def test_an_always_wrong_drafter_costs_little():
    """At least .97 of plain decoding from the first round on, though it is sure of itself."""
    machine = Machine(priced.PctCost())
    sizes = machine.decode(1500, (0.9, 0.95), accepted=0)
    assert 1500 * machine.step / machine.time > 0.97
    assert 0 < np.count_nonzero(sizes) < 60
    drafted = np.count_nonzero(machine.decode(200, (0.9, 0.95), accepted=9))
    assert drafted > 100, "it is tried again, and drafts once it is right"
