"""PCT, its ablations, our priced tree, VCT and EAGLE-2's tree against plain recursive programs on Python floats."""
import inspect
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from test_cape import Traffic, path_expand, random_table, row_after, run_the_docstrings_lines, sequences, table_expand

import pct

BUILDERS = (pct.pct, pct.own_confidence, pct.pct_cost, pct.graft, pct.vct, pct.eagle2)

def paths(tree):
    """The token paths of a tree, the root left out."""
    return {path[1:] for path in sequences(tree)[1:]}

def brute(row_of, path, joint, expands, width, depth):
    """All nodes {path: joint} under one, the root's token first, by recursion: children in order of probability, then of token."""
    found, row = {}, row_of(path)
    if depth == 0 or not expands(path, joint):
        return found
    for x in sorted(range(len(row)), key=lambda x: (-row[x], x))[:width]:
        if row[x] > 0:
            found[path + (x,)] = joint * row[x]
            found.update(brute(row_of, path + (x,), joint * row[x], expands, width, depth - 1))
    return found

def all_nodes(table, start, expands, width, depth):
    """The same of a drafter that knows the last token alone, the root's token left out."""
    rows = table.tolist()
    nodes = brute(lambda path: rows[path[-1]], (start,), 1.0, expands, width, depth)
    return {path[1:]: p for path, p in nodes.items()}

def without_leaves(nodes, leaf):
    """Remove leaves under the threshold, again and again."""
    nodes = dict(nodes)
    while True:
        bare = [n for n in nodes if nodes[n] < leaf and not any(m[:-1] == n for m in nodes)]
        if not bare:
            return nodes
        for n in bare:
            del nodes[n]

def test_the_constants_are_the_papers():
    """Appendix B: "the expansion width of each node in the PCT was set to 5, and the maximum depth was set to 10 ... and
    removed leaf nodes whose overall acceptance confidence was less than 0.01".  Appendix A: "We set the node expansion width
    to 3 and the tree depth to 5"; EAGLE-2: "we set the total number of draft tokens to 50, with a draft tree depth of 6, and
    select 10 nodes during the expansion phase".  s_d / s_t there: 1.1 / 29.8 ms and 1.4 / 50.1 ms (appendix B); ours is
    larger, 5 to 7 % of the stand-in; the threshold of "w/o expected time gain" is not stated.
    """
    def defaults(f):
        return {k: v.default for k, v in inspect.signature(f).parameters.items() if v.default is not inspect.Parameter.empty}
    assert defaults(pct.pct) == {"cost": 0.05, "width": 5, "depth": 10, "leaf": 0.01, "max_nodes": 256}
    assert defaults(pct.own_confidence) == {"own": 0.3, "width": 5, "depth": 10, "leaf": 0.01, "max_nodes": 256}
    assert defaults(pct.pct_cost) == {"cost": 0.05, "node_price": 0.01, "width": 5, "depth": 10, "max_nodes": 256}
    assert defaults(pct.graft) == {**defaults(pct.pct_cost), "chain": 16}
    assert defaults(pct.vct) == {"width": 3, "depth": 5}
    assert defaults(pct.eagle2) == {"total": 50, "depth": 6, "expanded": 10}

def test_the_defaults_do_what_they_say():
    """Width 5, depth 10, leaves under 0.01, expanded from 0.05 on: each just inside and just outside."""
    root = torch.tensor([0])
    table = torch.zeros(9, 9, dtype=torch.float64)
    table[0, 1:9] = torch.tensor([0.86, 0.05, 0.0499, 0.01, 0.0099, 0.0098, 0.0097, 0.0007], dtype=torch.float64)
    table[2, 1] = table[3, 1] = 1.0
    assert paths(pct.pct(table_expand(table), root)) == {(1,), (2,), (2, 1), (3,), (4,)}
    assert paths(pct.pct(table_expand(table), root, leaf=0)) == {(1,), (2,), (2, 1), (3,), (4,), (5,)}, "five children"
    assert len(paths(pct.pct(table_expand(table), root, leaf=0, width=33))) == 8 + 1, "all of them, and (2, 1)"

    sure = torch.eye(6, dtype=torch.float64).roll(1, 1)
    for build in (pct.pct, pct.own_confidence, pct.pct_cost):
        expand = table_expand(sure)
        assert len(build(expand, root).tokens) == 1 + 10 and expand.calls == 10, build.__name__
    assert len(pct.eagle2(table_expand(sure), root).tokens) == 1 + 6

    table = torch.zeros(4, 4, dtype=torch.float64)
    table[0, 1:4] = torch.tensor([0.3, 0.29, 0.0], dtype=torch.float64)
    table[1, 1] = table[2, 1] = 0.29
    assert paths(pct.own_confidence(table_expand(table), root)) == {(1,), (2,), (1, 1)}, "expanded from 0.3 on"

# ---------------------------------------------------------------- section 3.2
@pytest.mark.parametrize("zeros", [0.0, 0.6])
def test_pct_equals_the_recursive_program(zeros):
    rng = random.Random(0)
    for seed in range(700):
        table = random_table(seed, vocab=8, zeros=zeros)
        cost, leaf = rng.choice([0.02, 0.05, 0.1, 0.3, 1.0]), rng.choice([0.0, 0.01, 0.05, 0.5])
        width, depth = rng.choice([1, 2, 5, 33]), rng.choice([1, 3, 10])
        expand = table_expand(table)
        found = [n[1:] for n in sequences(pct.pct(expand, torch.tensor([seed % 8]), cost, width, depth, leaf, max_nodes=10**6))[1:]]
        nodes = all_nodes(table, seed % 8, lambda path, joint, cost=cost: joint >= cost, width, depth)
        expanded = [n for n in nodes if nodes[n] >= cost and len(n) < depth]
        assert expand.calls == 1 + max(map(len, expanded), default=0), "one forward a depth, none beyond the last"
        assert found == sorted(without_leaves(nodes, leaf), key=lambda n, p=nodes: [-p[n[:i + 1]] for i in range(len(n))]), "the likeliest first"

def test_parents_are_told_to_the_drafter():
    """With a drafter that looks at the whole path: the same tree as by recursion along the paths."""
    for seed in range(7):
        root = torch.tensor([seed])
        nodes = brute(lambda path: row_after(path).tolist(), (seed,), 1.0, lambda path, joint: joint >= 0.06, 4, 6)
        assert max(map(len, nodes)) > 3
        assert paths(pct.pct(path_expand(), root, cost=0.06, width=4, depth=6, leaf=0)) == {n[1:] for n in nodes}
        nodes = brute(lambda path: row_after(path).tolist(), (seed,), 1.0, lambda *_: True, 2, 3)
        assert paths(pct.vct(path_expand(), root, 2, 3)) == {n[1:] for n in nodes}

def test_own_confidence_instead_of_the_expected_time_gain():
    for seed in range(200):
        table, leaf = random_table(seed, vocab=8), [0.0, 0.01, 0.1][seed % 3]
        expand = table_expand(table)
        tree = pct.own_confidence(expand, torch.tensor([0]), own=0.3, depth=4, leaf=leaf)
        nodes = all_nodes(table, 0, lambda path, joint, table=table: len(path) < 2 or table[path[-2], path[-1]] >= 0.3, 5, 4)
        assert paths(tree) == set(without_leaves(nodes, leaf))

def test_ties_are_settled_without_breaking_the_tree():
    """Equal probabilities everywhere, and certain chains (child as probable as its parent)."""
    uniform = torch.full((4, 4), 0.25, dtype=torch.float64)
    assert len(paths(pct.pct(table_expand(uniform), torch.tensor([0]), cost=0.25, width=4, depth=3, leaf=0.0))) == 4 + 16
    sure = torch.eye(6, dtype=torch.float64).roll(1, 1)
    for build in (lambda e, r: pct.pct(e, r, cost=1.0), pct.vct, lambda e, r: pct.eagle2(e, r, total=4),
                  lambda e, r: pct.pct(e, r, max_nodes=6), lambda e, r: pct.pct_cost(e, r, max_nodes=6)):
        tree = build(table_expand(sure), torch.tensor([0]))
        assert tree.parents.tolist() == list(range(-1, len(tree.tokens) - 1)) and len(tree.tokens) > 4

def test_the_cap_keeps_the_most_probable():
    """And the frontier is no wider than the cap, without which a cost of zero would draft the whole tree."""
    for seed in range(50):
        table, cap = random_table(seed, vocab=8), 1 + seed % 12
        expand = table_expand(table)
        tree = pct.pct(expand, torch.tensor([0]), cost=[0.0, 0.05][seed % 2], depth=4, leaf=0.0, max_nodes=cap)
        nodes = all_nodes(table, 0, lambda path, joint, seed=seed: joint >= [0.0, 0.05][seed % 2], 5, 4)
        assert paths(tree) == set(sorted(nodes, key=lambda n: -nodes[n])[:cap]) and expand.widest <= cap

def test_what_cannot_be_drafted_is_not_there():
    table = torch.zeros(5, 5)
    table[0, 1] = table[1, 2] = 1.0
    for build in BUILDERS:
        assert paths(build(table_expand(table), torch.tensor([0]))) == {(1,), (1, 2)}, build.__name__
        expand = table_expand(table)
        tree = build(expand, torch.tensor([4]))
        assert tree.tokens.tolist() == [4] and tree.parents.tolist() == [-1] and expand.calls == 1

@pytest.mark.parametrize("build", BUILDERS)
def test_no_tree_is_deeper_than_there_is_room(build):
    """And nobody is asked what follows there."""
    sure = torch.eye(6, dtype=torch.float64).roll(1, 1)
    for room in range(12):
        expand = table_expand(sure)
        expand.remaining = room
        deepest = inspect.signature(build).parameters["depth"].default
        assert len(build(expand, torch.tensor([0])).tokens) == 1 + min(room, deepest) == 1 + expand.calls

@pytest.mark.parametrize("build, wrong, says", [
    (pct.pct, dict(width=0), "width"), (pct.pct, dict(depth=0), "depth"), (pct.pct, dict(cost=1.5), "s_d / s_t"),
    (pct.pct, dict(max_nodes=0), "nodes"), (pct.own_confidence, dict(own=-0.1), "confidence"), (pct.vct, dict(width=0), "width"),
    (pct.pct_cost, dict(node_price=-1), "node_price"), (pct.pct_cost, dict(cost=-1), "s_d / s_t"), (pct.eagle2, dict(total=0), "nodes")])
def test_settings_that_mean_nothing_are_refused(build, wrong, says):
    with pytest.raises(AssertionError, match=says):
        build(table_expand(random_table(0)), torch.tensor([0]), **wrong)

# ---------------------------------------------------------------- appendix A
def test_vct_has_363_nodes():
    expand = table_expand(random_table(0, vocab=9))
    tree = pct.vct(expand, torch.tensor([0]))
    assert len(tree.tokens) - 1 == 363 and expand.calls == 5 and expand.widest == 81
    assert paths(tree) == set(all_nodes(random_table(0, vocab=9), 0, lambda *_: True, 3, 5))

def test_eagle2_expands_the_ten_best_of_each_layer():
    for seed in range(20):
        table = random_table(seed, vocab=14)
        plain = table.tolist()
        expand = table_expand(table)
        tree = pct.eagle2(expand, torch.tensor([0]))
        nodes, layer = {}, {(): 1.0}
        for _ in range(6):
            grown = {}
            for path in sorted(layer, key=lambda n: -layer[n])[:10]:
                here = path[-1] if path else 0
                for x in sorted(range(14), key=lambda x: -plain[here][x])[:10]:
                    grown[path + (x,)] = layer[path] * plain[here][x]
            nodes.update(grown)
            layer = grown
        assert paths(tree) == set(sorted(nodes, key=lambda n: -nodes[n])[:50])
        assert expand.widest <= 10 and expand.calls == 6

# ---------------------------------------------------------------- beyond the paper: what nodes and depths cost
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
        build = (pct.pct_cost, pct.graft)[seed // 4 % 2]
        if seed % 3 and build is pct.graft:
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
        for build, suggest in ((pct.pct_cost, None), (pct.graft, None), (pct.graft, lambda *_: ([], []))):
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
    tree = pct.graft(expand, torch.tensor([0]), cost=0.05 if forwards else 0.9, node_price=0.001)
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
        tree = paths(pct.pct_cost(expand, torch.tensor([0]), cost=cost, node_price=price, width=2, depth=3))
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
    assert pct.costs_of([turn()]) == pytest.approx((0.2, 0.02))
    # one turn of three was disturbed, and one ended before anything was drafted: the middle one of the others
    assert pct.costs_of([turn(slow=9.0), turn(), turn(draft_forwards=50), turn(slow=0.9)]) == pytest.approx((0.2, 0.02))
    # a draft would take 0.08 s: the wide tree of three, with 38 nodes more, is faster than that
    assert pct.costs_of([turn(verify=18.0)]) == pytest.approx((0.82, 0.0)), "and its nodes cost nothing"
    assert pct.costs_of([turn(draft_forwards=50)]) == pct.costs_of([]) == (0.0, 0.0)

# ---------------------------------------------------------------- reads and copies, large ids, the file alone
@pytest.mark.parametrize("build", BUILDERS)
def test_one_read_and_one_copy_a_depth_and_one_copy_for_the_tree(build):
    expand, root = table_expand(random_table(8).float()), torch.tensor([0])        # sure of itself: deep trees
    with Traffic() as traffic:
        build(expand, root)
    assert traffic.reads == ["tolist"] * expand.calls and expand.calls > 1
    assert traffic.copies == ["tensor"] * expand.calls, "the root's token is on the device: one copy fewer"

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_token_ids_survive_the_read(dtype):
    """Tokens travel with their probabilities as floats: also those that the drafter's own precision could not hold."""
    row = torch.zeros(1, 262144, dtype=dtype)
    row[0, 262143], row[0, 131071], row[0, 50257] = 0.5, 0.25, 0.125
    tree = pct.pct(lambda tokens, parents: row.expand(len(parents), -1), torch.tensor([0]), depth=1)
    assert tree.tokens.tolist() == [0, 262143, 131071, 50257]

@pytest.mark.parametrize("build", BUILDERS)
def test_logits_are_refused(build):
    logits = 3 * torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
    for given in (logits, logits.log_softmax(-1), logits / 0 * 0):
        with pytest.raises(AssertionError, match="probabilities, not logits"):
            build(table_expand(given), torch.tensor([0]))
    build(table_expand(logits.softmax(-1).bfloat16()), torch.tensor([0]))

def test_a_stranger_uses_it_alone(tmp_path):
    run_the_docstrings_lines(tmp_path, pct, ["pct.py"])
