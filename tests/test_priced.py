"""The priced tree and the graft builder against their equations on dicts, against all subtrees of small trees; prices by hand."""
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from test_cape import path_expand, random_table, table_expand
from test_pct import all_nodes, paths

from beyond import graft, priced

def layered(table, start, width, depth, cost, price, suggest=None, room=99):
    """The rule of the docstrings on dicts -> all nodes {path: joint} that are drafted, the paths expanded, the number of forwards.

    suggest(path, most): what is suggested behind a path, a tuple."""
    found, frontier, expanded, rate = {}, {(): 1.0}, set(), 1.0
    if suggest and not worth_a_forward(alone := hung((), 1.0, suggest, price, room), cost, price):
        return alone, expanded, 0
    for drafts in range(1, min(depth, room) + 1):
        layer, asked, todo, best = {}, dict(frontier), list(frontier), max(frontier, key=frontier.get)
        chain = suggest(best, room - len(best) - 1) if suggest else ()
        todo += [best + chain[:i + 1] for i in range(len(chain))]
        for path in todo:
            if path not in frontier and path not in layer:
                break                                                    # the chain is not among the best here
            joint = asked[path] = frontier.get(path, layer.get(path))
            row = table[path[-1] if path else start]
            for x in sorted(range(len(table)), key=lambda x: (-row[x], x))[:width]:
                if row[x] > 0:
                    layer[path + (x,)] = joint * row[x]
        expanded |= set(asked)
        found.update(layer)
        paid = [p for p in found.values() if p >= price * rate]
        rate = max(rate, (1 + sum(paid)) / (1 + cost * drafts + price * len(paid)))
        share = sum(p for p in layer.values() if p >= price * rate) / sum(asked.values())
        frontier = {path: p for path, p in layer.items() if share * p >= price * rate and path not in asked and len(path) < room}
        if not frontier or sum(share * p - price * rate for p in frontier.values()) < cost * rate:
            break
    for path in found.keys() - expanded if suggest else ():
        found.update(hung(path, found[path], suggest, price * rate, room))
    return found, expanded, drafts

def hung(path, joint, suggest, least, room):
    """What is suggested behind a path while its probability is above `least` -> {path: joint}."""
    chain = suggest(path, room - len(path))
    paths = [path + chain[:i + 1] for i in range(len(chain))]
    joints = itertools.accumulate(map(sureness, paths), lambda p, c: p * c, initial=joint)
    return dict(itertools.takewhile(lambda at: at[1] > least, zip(paths, itertools.islice(joints, 1, None))))

def sureness(path):
    """Of a suggestion in the last token of a path; some are all but sure."""
    return (0.5, 0.7, 0.9, 0.99)[hash(path) % 4]

def worth_a_forward(alone, cost, price):
    """Of the chain `alone`, the part of the best rate, against a forward over it."""
    p = [1.0, *alone.values()]
    rate, most = max((sum(p[:n + 1]) / (1 + n * price), n) for n in range(len(p)))
    p = p[:most + 1]
    share = sum(p[1:]) / sum(p[:-1]) if most else 1.0
    left = [p[i] - p[i + 1] for i in range(most)] + [p[most]]
    return not most or sum(share * x - rate * price for x in left if share * x > rate * price) >= rate * cost

def test_pct_cost_drafts_by_its_rule_and_keeps_the_most_profitable_subtree():
    """Of small trees: against all connected subtrees of what was drafted none gives more expected tokens for its time."""
    skipped = 0
    for seed in range(260):
        small = seed < 60
        table, price = random_table(seed, vocab=3 if small else 8), [0.0, 0.03, 0.2, 1.0][seed % 4] if small else [0.005, 0.02, 0.05][seed % 3]
        width, depth, cost = (3, 2, [0.05, 0.2][seed % 2]) if small else (4, 6, [0.05, 0.1, 0.2, 0.4][seed % 4])
        given = []

        def expand(tokens, parents, given=given, table=table):
            for token, parent in zip(tokens.tolist(), parents):
                given.append((given[parent] if parent >= 0 else ()) + (token,))
            expand.calls += 1                                                                          # noqa: B023
            return table[tokens]
        expand.calls = 0
        settings, suggest, room = dict(cost=cost, node_price=price, width=width, depth=depth), None, 99
        build = (priced.pct_cost, graft.graft)[seed // 4 % 2]
        if seed % 3 and build is graft.graft:
            suggest, expand.root, expand.remaining = suggesting(seed, table), 0, 2 + seed % 7
            room, expand.drafter = expand.remaining, Suggester(suggest, given)
        tree = build(expand, torch.tensor([0]), **settings)
        nodes, expanded, drafts = layered(table.tolist(), 0, width, depth, cost, price, suggest, room)
        assert {path[1:] for path in given} >= expanded and expand.calls == drafts, "a suggestion may be read in vain"
        assert max(map(len, given), default=0) <= room and (suggest or {path[1:] for path in given} == expanded)
        kept, skipped = paths(tree), skipped + (not drafts)
        assert max(map(len, kept), default=0) <= room

        def rate(some):
            return (1 + sum(nodes[n] for n in some)) / (1 + cost * drafts + price * len(some))            # noqa: B023
        some = itertools.chain(*(itertools.combinations(nodes, k) for k in range(len(nodes) + 1))) if small and not suggest else []
        assert all(rate(some) <= rate(kept) + 1e-12 for some in some if all(n[:-1] == () or n[:-1] in some for n in some))
        assert all(rate(kept ^ {n}) <= rate(kept) + 1e-12 for n in nodes), "none of them is too many, and none is missing"
    assert 9 < skipped < 60, "some chains are good enough alone"

def suggesting(seed, table):
    """Chains as Max-Gram's would be: mostly the likeliest tokens, up to seed % 6 of them behind two paths of three."""
    def suggest(path, most):
        rng, chain = random.Random(hash((seed, path))), ()
        while len(chain) < min(most, seed % 6) and hash(path) % 3:
            here = (path + chain or (0,))[-1]
            chain += (table[here].argmax().item() if rng.random() < 0.8 else rng.randrange(len(table)),)
        return chain
    return suggest

class Suggester:
    """A drafter's suggest(token, parent, most) from suggesting()'s, as maxgram.Beside has it; given: paths asked about, root first."""
    def __init__(self, of_path, given):
        self.of_path, self.given = of_path, given

    def suggest(self, token, parent, most):
        path = (self.given[parent] if parent >= 0 else ()) + (token,)
        chain = self.of_path(path[1:], most)
        return list(chain), [sureness(path[1:] + chain[:i + 1]) for i in range(len(chain))]

def test_graft_without_suggestions_is_pct_cost():
    """Node for node, whether there is no drafter, one that suggests nothing, or room for no chain."""
    for seed in range(80):
        table, settings = random_table(seed, vocab=8, zeros=[0, 0.5][seed % 2]), dict(cost=[0.02, 0.1, 0.3][seed % 3], node_price=[0, 0.01, 0.05][seed % 3])
        found = []
        for build, suggest in ((priced.pct_cost, None), (graft.graft, None), (graft.graft, lambda *_: ([], []))):
            expand = path_expand() if seed < 10 else table_expand(table)
            expand.remaining = 1 + seed % 12
            if suggest:
                expand.root, expand.drafter = seed % 7, SimpleNamespace(suggest=suggest)
            tree = build(expand, torch.tensor([seed % 7]), **settings)
            found.append((tree.tokens.tolist(), tree.parents.tolist(), getattr(expand, "calls", 0)))
        assert found[0] == found[1] == found[2]

@pytest.mark.parametrize("suggested, room, forwards", [([], 9, 9), (range(1, 99), 9, 1), (range(1, 7), 9, 3), ([1, 2, 3, 9, 9], 9, 6),
    ([5], 9, 9), (range(1, 99), 99, 10), (range(1, 99), 1, 1), (range(1, 99), 99, 0)])
def test_a_suggested_chain_costs_one_forward(suggested, room, forwards):
    """A drafter that is sure: a chain down to the room, or of ten forwards.  A chain ends where the drafter knows better; sixteen at most."""
    expand = table_expand(torch.eye(200, dtype=torch.float64).roll(1, 1))
    expand.root, expand.remaining = 0, room

    def suggest(token, parent, most):
        chain = [*suggested][:most] if token == 0 else []
        return chain, [0.3 if forwards else 0.99] * len(chain)
    expand.drafter = SimpleNamespace(suggest=suggest)
    tree = graft.graft(expand, torch.tensor([0]), cost=0.05 if forwards else 0.9, node_price=0.001)
    assert expand.calls == forwards and tree.tokens.tolist() == list(range(1 + min(room, 26 if forwards else 16)))

def subtrees(table, here, joint, width, depth):
    """All connected subtrees below a node of probability `joint` -> [(sum of p, number of nodes, depth)], the empty one first."""
    found = [(0.0, 0, 0)]
    for x in sorted(range(len(table)), key=lambda x: -table[here][x])[:width] if depth else []:
        p = joint * table[here][x]
        with_x = [(p + s, 1 + n, 1 + d) for s, n, d in subtrees(table, x, p, width, depth - 1)]
        found += [(s + t, n + m, max(d, e)) for s, n, d in found for t, m, e in with_x]
    return found

@pytest.mark.parametrize("cost, price", [(0.065, 0.012), (0.1, 0.02), (0.2, 0.05), (0.3, 0.01)])
def test_pct_cost_is_near_the_best_tree_of_any_depth(cost, price):
    """Of all subtrees of all depths, by a hindsight that reads the whole table: below 1 % of the rate is lost.  (Where each node
    paid for a drafting step it was 1 to 8 %.)  And no depth that is worth drafting is below the bound in the docstring."""
    kept = []
    for seed in range(40):
        table = random_table(seed, vocab=3)
        every, rates = subtrees(table.tolist(), 0, 1.0, 2, 3), {}
        for drafts in (1, 2, 3):
            rates[drafts] = max((1 + s) / (1 + drafts * cost + n * price) for s, n, d in every if d <= drafts)
        expand, nodes = table_expand(table), all_nodes(table, 0, lambda *_: True, 2, 3)
        tree = paths(priced.pct_cost(expand, torch.tensor([0]), cost=cost, node_price=price, width=2, depth=3))
        time = 1 + expand.calls * cost + len(tree) * price
        kept.append((1 + sum(nodes[path] for path in tree)) / time / max(rates.values()))
        for drafts in (1, 2):
            r = max(1.0, rates[drafts])
            bound = sum(max(0.0, p - r * price) for path, p in nodes.items() if len(path) == drafts)
            assert bound >= r * cost or max(rates.values()) <= r + 1e-12
    assert max(kept) <= 1 + 1e-12 and sum(kept) / len(kept) > 0.99

def turn(slow=1.0, **changed):
    """Totals of a turn: a plain step takes 0.1 s; a round 0.11 s, and 0.02 s a draft, and 0.002 s a node."""
    plain = dict(verify=9.0, draft=0.0, other=1.0, rounds=100, nodes=0, draft_forwards=0)
    short = dict(verify=5.5, draft=0.9, other=0.2, rounds=50, nodes=50, draft_forwards=50)                   # 0.132 s each
    deep = dict(verify=6.0, draft=4.1, other=0.9, rounds=50, nodes=250, draft_forwards=250)                  # 0.220 s
    wide = dict(verify=8.0, draft=1.5, other=0.42, rounds=40, nodes=1560, draft_forwards=120)                # 0.248 s
    return plain, short, deep | {"draft": 4.1 * slow} | changed, wide

def test_measured_costs_by_hand():
    """s_d / s_t = 0.02 / 0.1; a node's price = 0.002 / 0.1, both in plain steps."""
    assert priced.costs_of([turn()]) == pytest.approx((0.2, 0.02))
    # one turn of three was disturbed, and one ended before anything was drafted: the middle one of the others
    assert priced.costs_of([turn(slow=9.0), turn(), turn(draft_forwards=50), turn(slow=0.9)]) == pytest.approx((0.2, 0.02))
    # a draft would take 0.08 s: the wide tree of three, with 38 nodes more, is faster than that
    assert priced.costs_of([turn(verify=18.0)]) == pytest.approx((0.82, 0.0)), "and its nodes cost nothing"
    assert priced.costs_of([turn(draft_forwards=50)]) == priced.costs_of([]) == (0.0, 0.0)
