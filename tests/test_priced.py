"""Priced builders against their equations on dicts; prices and balances on a made-up machine."""
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import paths, random_table, table_expand

import verify
from beyond import graft, priced
from maxgram import MaxGram

ROOT = 0
ROOTS = torch.tensor([ROOT])

def row_of(table, gram, path):
    """The distribution after a path (the root first): the table's, Max-Gram's token mixed in."""
    row = table[path[-1]].tolist()
    token, length = gram.propose(path, 1) if gram else ([], [])
    w = gram.confidence_of(length[0]) if length and length[0] >= 2 else 0
    return [(1 - w) * p + w * ([x] == token) for x, p in enumerate(row)]

def suggested(path, joint, gram, least, most, match=0):
    """What is suggested after a path while its probability is `least` or more -> {path: joint}."""
    found = {}
    for token, length in zip(*gram.propose(path, most)) if gram else ():
        path, joint = (*path, token), joint * gram.confidence_of(length)
        if length < match or joint < least:
            break
        found[path] = joint
    return found

def layered(a):
    """The rule of the docstrings on dicts -> all nodes {path: joint}, the paths expanded, D."""
    cost, price, start = a.prices
    found, frontier, expanded, r = {}, {(ROOT,): 1.0}, set(), 1.0
    for D in range(1, a.settings["depth"] + 1):
        layer, R = {}, dict(frontier)
        best = max(frontier, key=frontier.get)
        longest = a.remaining - len(best)
        reads = suggested(best, frontier[best], a.gram, price, longest, match=2)
        for path in [*frontier, *reads]:
            if path not in frontier and path not in layer:
                break                            # the chain is not among the best children
            R[path] = frontier.get(path, layer.get(path))
            row = row_of(a.table, a.gram, path)
            for x in sorted(range(len(row)), key=lambda x: (-row[x], x))[:a.settings["width"]]:
                if row[x] > 0:
                    layer[(*path, x)] = R[path] * row[x]
        expanded |= set(R)
        found.update(layer)
        worth = sorted((p for p in found.values() if p >= price * r), reverse=True)[:a.most]
        r = max(r, (1 + sum(worth)) / (1 + start + cost * D + price * len(worth)))
        s = sum(p for p in layer.values() if p >= price * r) / sum(R.values())
        frontier = {path: p for path, p in layer.items()
                    if s * p >= price * r and path not in R and len(path) <= a.remaining}
        frontier = dict(sorted(frontier.items(), key=lambda at: -at[1])[:a.most])
        if not frontier or sum(s * p - price * r for p in frontier.values()) < cost * r:
            break
    for path in found.keys() - expanded if a.gram else ():
        if found[path] >= price * r:
            longest = a.remaining + 1 - len(path)
            found.update(suggested(path, found[path], a.gram, price * r, longest))
    return found, expanded, D

def rate(nodes, kept, prices, D):
    """E / T of a round that verifies the nodes `kept`."""
    cost, price, start = prices
    E = 1 + sum(nodes[path] for path in kept)
    return E / (1 + start * (len(kept) > 0) + cost * D + price * len(kept))

def highest_rate(nodes, prices, most, D):
    """The highest rate of the n most probable nodes, for any n -> (rate, -n)"""
    ranked = sorted(nodes, key=nodes.get, reverse=True)
    counts = range(min(most, len(nodes)) + 1)
    return max((rate(nodes, ranked[:n], prices, D), -n) for n in counts)

def case(seed):
    """A random table, the drafter and builder over it, and how they are set."""
    rng = random.Random(seed)
    small = rng.random() < 0.25
    a = SimpleNamespace(table=random_table(seed, vocab=3 if small else 8), gram=None)
    node_price = rng.choice([0.0, 0.03, 0.2, 1.0] if small else [0.005, 0.02, 0.05])
    a.prices = rng.choice([0.05, 0.1, 0.2, 0.4]), node_price, rng.choice([0.0, 0.3, 1.0])
    a.most, a.remaining = rng.choice([4, 99, 99]), rng.randint(2, 8)
    a.settings = {"width": 3 if small else 4, "depth": 2 if small else 6, "max_nodes": a.most}
    a.build, a.drafter = priced.PctCost(*a.prices, **a.settings), table_expand(a.table)
    a.expand = a.drafter
    if seed % 2:
        a.gram = MaxGram(confidence=(0.5, 0.7, 0.9, 0.99))
        text = [ROOT]                            # mostly what the table, too, holds most probable
        while len(text) < 30:
            likeliest = a.table[text[-1]].argmax().item()
            text.append(likeliest if rng.random() < 0.7 else rng.randrange(len(a.table)))
        drafter = SimpleNamespace(needs={}, reset=lambda probs: 0, begin=lambda view, root: 0,
                                  expand=a.drafter)
        mixture = graft.Mixture(drafter, a.gram)
        mixture.reset(None)
        mixture.begin(verify.View(torch.tensor(text), text, None, {}, {}), ROOT)
        a.build = graft.Graft(mixture, *a.prices, **a.settings)
        a.expand = partial(mixture.expand)
    a.expand.remaining = a.remaining
    return a

def test_trees_are_drafted_by_their_rule_and_give_the_highest_rate():
    """Of what the rule drafts no other set of nodes gives more expected tokens for its time.

    Where drafting has a negative balance, the chain that gives most is verified without a forward.
    """
    silent = [0, 0]
    for seed in range(260):
        a = case(seed)
        nodes, expanded, D = layered(a)
        kept = {(ROOT, *path) for path in paths(a.build(a.expand, ROOTS))}
        given = set(a.drafter.given)
        assert a.drafter.calls == D
        assert given >= expanded and (a.gram or given == expanded)
        assert max(map(len, given)) <= a.remaining and len(kept) <= a.most
        best, _ = highest_rate(nodes, a.prices, a.most, D)
        assert rate(nodes, kept, a.prices, D) == pytest.approx(best)

        b = case(seed)
        b.build.balance = dict.fromkeys(("draft", "draft beside a chain"), -1.0)
        kept = {(ROOT, *path) for path in paths(b.build(b.expand, ROOTS))}
        chain = suggested((ROOT,), 1.0, b.gram, b.prices[1], b.remaining)
        _, n = highest_rate(chain, b.prices, b.most, 0)
        assert kept == set(list(chain)[:-n]) and not b.drafter.calls
        assert sorted(b.build.balance.values())[:2] == pytest.approx([-1, priced.RETRY - 1])
        silent[bool(kept)] += 1
        if kept:
            # G_0 of Eq. 6: how many tokens of this chain, N_0, were right is known a round later.
            *known, last = max(kept, key=len)
            b.build.mixture.begin(verify.View(None, known, None, {}, {}), last + 1)
            assert b.build.right() == len(known) - 1
    assert min(silent) > 40, "the root alone, and chains"

# ---------------------------------------------------------------- prices and balances
class Machine:
    """Decodes with a builder, whose clock it moves.  Prices: cost, node_price, start."""

    def __init__(self, build, step=0.05, prices=(0.06, 0.012, 0.15)):
        self.build, self.step, self.prices = build, step, prices
        self.rng, self.time, self.disturbed = random.Random(0), 0.0, False
        build.now = lambda: self.time

    def spend(self, steps):
        """Each time another program may make it up to four times longer."""
        slower = 1 + 3 * self.rng.random() * self.disturbed
        self.time += self.step * steps * slower * self.rng.lognormvariate(0, 0.05)

    def decode(self, rounds, likely=(0.2, 0.4, 0.7), accepted=6, root=ROOT):
        """Decode a sequence, of whose nodes at most `accepted` are right -> the trees' sizes."""
        def forward(tokens, parents):
            self.spend(self.prices[0])
            p = self.rng.choice(likely)
            return torch.tensor([[0.0, p, (1 - p) / 2, (1 - p) / 2]]).repeat(len(parents), 1)
        expand, sizes = partial(forward), []
        expand.remaining = 10 ** 6
        for _ in range(rounds):
            nodes = len(self.build(expand, torch.tensor([root])).tokens) - 1
            self.spend(1 + self.prices[2] * (nodes > 0) + self.prices[1] * nodes)
            expand.remaining -= 1 + min(nodes, self.rng.randint(accepted // 2, accepted))
            sizes.append(nodes)
        return sizes

@pytest.mark.parametrize("step, prices, given", [
    (0.05, (0.06, 0.012, 0.15), {}), (10.0, (0.15, 0.03, 0.4), {}),
    (0.05, (0.06, 0.012, 0.15), {"node_price": 0.5, "start": 0.0})])
def test_prices_are_those_of_the_machine(step, prices, given):
    """Though other programs disturbed the first rounds; but a price that is given stays."""
    machine = Machine(priced.PctCost(**given), step, prices)
    machine.disturbed = True
    machine.decode(100)
    machine.disturbed = False
    machine.decode(300)
    found = machine.build.prices
    assert found.cost == pytest.approx(prices[0], rel=0.3)
    if given:
        assert found[1:] == tuple(given.values())
    else:
        assert found.node_price == pytest.approx(prices[1], rel=0.3)
        assert found.start == pytest.approx(prices[2], abs=0.15)

def repeating():
    """Max-Gram, sure of a chain that follows the root 7."""
    gram = MaxGram(confidence=[0.3, 0.8])
    gram.commit([7, 1, 2, 3, 4, 5, 6])
    return priced.PricedChain(gram)

def test_a_draft_gains_what_the_chain_beside_it_does_not():
    """Eq. 6 of a round of five new tokens, of which a suggested chain would have given two."""
    build = priced.PctCost(0.1, 0.1, 0.1)
    build.right, build.balance = lambda: 2, {"draft": 0.0, "chain": 0.0}
    tried = {"draft": (1.5, 0.5), "chain": (1.5, 0.25)}          # (T_0 / E_0, T - T_0)
    build.learn(priced.Last(9, 1, 0, 0, 10, tried), 0, 5, None)
    assert build.balance == {"draft": 2 * 1.5 - 0.5, "chain": 2 * 1.5 - 0.25}

@pytest.mark.parametrize("make, root", [(priced.PctCost, ROOT), (repeating, 7)])
def test_an_always_wrong_drafter_costs_little(make, root):
    """At least .97 of plain decoding, though it is sure of itself; and it is tried again."""
    machine = Machine(make())
    assert any(machine.decode(1500, (0.9, 0.95), 0, root))
    assert 1500 * machine.step / machine.time > 0.97
    assert np.count_nonzero(machine.decode(300, (0.9, 0.95), 9, root)) > 150
