"""PCT, VCT and EAGLE-2's tree against plain recursive programs on Python floats."""
import itertools
import random

import pytest
import torch
from test_cape import random_table, table_expand

import pct


def paths(tree):
    """The set of token paths of a tree, checked to be listed parents first without repetition."""
    found = [()]
    for i in range(1, len(tree.tokens)):
        parent = tree.parents[i].item()
        assert 0 <= parent < i
        found.append(found[parent] + (tree.tokens[i].item(),))
    assert len(set(found)) == len(found)
    return set(found[1:])


def brute(table, here, path, joint, expands, width, depth):
    """All nodes {path: joint} under one node, by recursion: children in order of probability, then of token."""
    found = {}
    if depth == 0 or not expands(path, joint):
        return found
    for x in sorted(range(len(table)), key=lambda x: (-table[here][x], x))[:width]:
        if table[here][x] > 0:
            p = joint * table[here][x]
            found[path + (x,)] = p
            found.update(brute(table, x, path + (x,), p, expands, width, depth - 1))
    return found


@pytest.mark.parametrize("zeros", [0.0, 0.6])
def test_pct_equals_the_recursive_program(zeros):
    rng = random.Random(0)
    for seed in range(1000):
        table = random_table(seed, vocab=8, zeros=zeros)
        cost, leaf = rng.choice([0.02, 0.05, 0.1, 0.3, 1.0]), rng.choice([0.0, 0.01, 0.05, 0.5])
        width, depth = rng.choice([1, 2, 5]), rng.choice([1, 3, 10])
        expand = table_expand(table)
        tree = pct.pct(expand, torch.tensor([seed % 8]), cost, width, depth, leaf, max_nodes=10**6)
        nodes = brute(table.tolist(), seed % 8, (), 1.0, lambda path, joint, cost=cost: not path or joint >= cost, width, depth)
        while True:                           # remove leaves under the threshold, again and again
            bare = [n for n in nodes if nodes[n] < leaf and not any(m[:-1] == n for m in nodes)]
            if not bare:
                break
            for n in bare:
                del nodes[n]
        assert paths(tree) == set(nodes)
        most, widest = pct.pct.bounds(cost=cost, width=width, depth=depth, leaf=leaf, max_nodes=10**6)
        assert len(nodes) <= most and expand.widest <= widest


def test_own_confidence_instead_of_the_expected_time_gain():
    for seed in range(200):
        table = random_table(seed, vocab=8)
        tree = pct.pct(table_expand(table), torch.tensor([0]), own=0.3, depth=4, leaf=0.0)
        plain = table.tolist()

        def expands(path, joint):
            return not path or plain[([0] + list(path))[-2]][path[-1]] >= 0.3       # noqa: B023
        assert paths(tree) == set(brute(plain, 0, (), 1.0, expands, 5, 4))


def test_ties_are_settled_without_breaking_the_tree():
    """Equal probabilities everywhere, and certain chains (child as probable as its parent)."""
    uniform = torch.full((4, 4), 0.25, dtype=torch.float64)
    assert len(paths(pct.pct(table_expand(uniform), torch.tensor([0]), cost=0.25, width=4, depth=3, leaf=0.0))) == 4 + 16
    sure = torch.eye(6, dtype=torch.float64).roll(1, 1)
    for build in (lambda e, r: pct.pct(e, r, cost=1.0), pct.vct, lambda e, r: pct.eagle2(e, r, total=4)):
        tree = build(table_expand(sure), torch.tensor([0]))
        assert tree.parents.tolist() == list(range(-1, len(tree.tokens) - 1)) and len(tree.tokens) > 4


def test_the_best_path_at_the_maximum_depth_stays():
    sure = torch.eye(6, dtype=torch.float64).roll(1, 1) * 0.9
    assert len(pct.pct(table_expand(sure), torch.tensor([0]), cost=0.05, depth=10).tokens) == 11


def test_the_cap_keeps_the_most_probable():
    for seed in range(50):
        table = random_table(seed, vocab=8)
        tree = pct.pct(table_expand(table), torch.tensor([0]), leaf=0.0, max_nodes=7)
        nodes = brute(table.tolist(), 0, (), 1.0, lambda path, joint: not path or joint >= pct.COST, 5, 10)
        assert paths(tree) == set(sorted(nodes, key=lambda n: -nodes[n])[:7])


def test_vct_has_363_nodes():
    expand = table_expand(random_table(0, vocab=9))
    tree = pct.vct(expand, torch.tensor([0]))
    assert len(tree.tokens) - 1 == 363 and expand.calls == 5 and expand.widest == 81
    assert pct.vct.bounds() == (363, 81)
    assert paths(tree) == set(brute(random_table(0, vocab=9).tolist(), 0, (), 1.0, lambda *_: True, 3, 5))


def test_eagle2_is_the_best_connected_subtree():
    """Where nothing is cut on the way, the best `total` nodes by rank are the best connected subtree of that size."""
    for seed in range(60):
        table = random_table(seed, vocab=3)
        tree = pct.eagle2(table_expand(table), torch.tensor([0]), total=3, depth=2, expanded=3)
        nodes = brute(table.tolist(), 0, (), 1.0, lambda *_: True, 3, 2)
        best = max(sum(nodes[n] for n in some) for some in itertools.combinations(nodes, 3)
                    if all(n[:-1] == () or n[:-1] in some for n in some))
        assert abs(sum(nodes[n] for n in paths(tree)) - best) < 1e-12


def test_eagle2_expands_the_ten_best_of_each_layer():
    for seed in range(30):
        table = random_table(seed, vocab=14)
        expand = table_expand(table)
        tree = pct.eagle2(expand, torch.tensor([0]))
        nodes, layer = {}, {(): 1.0}
        for _ in range(6):
            grown = {}
            for path in sorted(layer, key=lambda n: -layer[n])[:10]:
                here = path[-1] if path else 0
                for x in sorted(range(14), key=lambda x: -table[here, x])[:10]:
                    grown[path + (x,)] = layer[path] * table[here, x].item()
            nodes.update(grown)
            layer = grown
        assert paths(tree) == set(sorted(nodes, key=lambda n: -nodes[n])[:50])
        assert expand.widest <= 10 and expand.calls == 6


def layered(table, start, width, depth, cost, price):
    """All nodes {path: joint}, layer by layer: a node is expanded if drafting below it costs less than a token does so far."""
    found, frontier, rate = {}, {(): 1.0}, 1.0
    for _level in range(1, depth + 1):
        layer = {}
        for path, joint in frontier.items():
            row = table[path[-1] if path else start]
            for x in sorted(range(len(table)), key=lambda x: (-row[x], x))[:width]:
                if row[x] > 0:
                    layer[path + (x,)] = joint * row[x]
        found.update(layer)
        paid = [p for p in found.values() if p >= price * rate]
        if found:
            deepest = max(map(len, found))
            rate = max(rate, (1 + sum(paid)) / (1 + cost * deepest + price * len(paid)))
        frontier = {path: p for path, p in layer.items() if p >= cost * rate}
        if not frontier:
            break
    return found


def test_node_price_keeps_the_most_profitable_subtree():
    """Against all connected subtrees of what was drafted: none gives more expected tokens for its time."""
    deep = 0
    for seed in range(60):
        table, cost, price = random_table(seed, vocab=3), [0.05, 0.2][seed % 2], [0.0, 0.03, 0.2, 1.0][seed % 4]
        expand = table_expand(table)
        tree = pct.pct(expand, torch.tensor([0]), cost=cost, width=3, depth=2, node_price=price)
        nodes = layered(table.tolist(), 0, 3, 2, cost, price)
        deep += expand.calls > 1
        assert expand.calls == max(map(len, nodes), default=1)
        time = 1 + cost * max(map(len, nodes))

        def worth(some):
            return (1 + sum(nodes[n] for n in some)) / (time + price * len(some))            # noqa: B023
        best = max(worth(some) for k in range(len(nodes) + 1) for some in itertools.combinations(nodes, k)
                   if all(n[:-1] == () or n[:-1] in some for n in some))
        assert abs(worth(paths(tree)) - best) < 1e-12
    assert deep > 20


def test_a_token_is_worth_less_in_a_fast_round():
    """With a price, fewer nodes are expanded than by Eq. 5, and those are the ones that p >= rate s_d / s_t allows."""
    fewer = 0
    for seed in range(200):
        table = random_table(seed, vocab=8)
        priced, free = table_expand(table), table_expand(table)
        pct.pct(priced, torch.tensor([0]), cost=0.1, node_price=0.02)
        pct.pct(free, torch.tensor([0]), cost=0.1)
        nodes = layered(table.tolist(), 0, pct.WIDTH, pct.DEPTH, 0.1, 0.02)
        assert priced.calls == max(map(len, nodes)) <= free.calls
        fewer += priced.calls < free.calls
    assert fewer > 50
