"""PCT, its ablations, VCT and EAGLE-2's tree against recursive programs; what builders share."""
import inspect
import random

import pytest
import torch
from helpers import paths, random_table, sequences, table_expand

import cape
import pct
from beyond import priced

def pct_cost(expand, root, depth=pct.DEPTH, max_nodes=99):
    """A new priced builder's first tree."""
    if not hasattr(expand, "remaining"):
        expand.remaining = 99
    return priced.PctCost(0.05, 0.01, 0.0, depth=depth, max_nodes=max_nodes)(expand, root)

OF_CAPE = (cape.chain, cape.drawn, cape.cape, cape.fixed)
BUILDERS = (*OF_CAPE, cape.beam, pct.pct, pct.token_confidence, pct_cost, pct.vct, pct.eagle2)
ROOT_0 = torch.tensor([0])

def all_nodes(table, start, expands, width, depth):
    """All nodes {path below the root: joint} by recursion; children by probability, then token."""
    rows = table.tolist()

    def below(path, joint):
        found, row = {}, rows[path[-1]]
        if len(path) > depth or not expands(path, joint):
            return found
        for x in sorted(range(len(row)), key=lambda x: (-row[x], x))[:width]:
            if row[x] > 0:
                found[(*path[1:], x)] = joint * row[x]
                found.update(below((*path, x), joint * row[x]))
        return found

    return below((start,), 1.0)

# ---------------------------------------------------------------- section 3.2
def test_a_confidence_that_bfloat16_rounded_above_1_is_1():
    """Else a child would be more probable than its parent, and be kept without it."""
    def expand(tokens, parents):
        return torch.tensor([[0.0, 1.01]]).expand(len(tokens), -1)
    tree = pct.eagle2(expand, ROOT_0, total=1, depth=2)
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([0, 1], [-1, 0])

@pytest.mark.parametrize("zeros", [0.0, 0.6])
def test_pct_and_token_confidence_equal_the_recursive_program(zeros):
    rng = random.Random(0)
    assert (pct.WIDTH, pct.DEPTH, pct.LEAF) == (5, 10, 0.01), "appendix B"
    for seed in range(120):
        table, root = random_table(seed, vocab=8, zeros=zeros), torch.tensor([seed % 8])
        rows = table.tolist()
        cost, leaf = rng.choice([0.02, 0.05, 0.1, 0.3, 1.0]), rng.choice([0.0, 0.01, 0.05, 0.5])
        width, depth = rng.choice([1, 2, 5, 33]), rng.choice([1, 3, 10])
        most = rng.choice([2, 8, 10 ** 6, 10 ** 6])
        expand = table_expand(table)
        tree = pct.pct(expand, root, cost, width, depth, leaf, most)
        nodes = all_nodes(table, seed % 8, lambda path, p, cost=cost: p >= cost, width, depth)
        expanded = [path for path in nodes if nodes[path] >= cost and len(path) < depth]
        forwards = 1 + max(map(len, expanded), default=0)
        assert expand.calls == forwards or most < 10, "one forward a depth, none beyond the last"
        assert expand.widest <= most

        def likeliest_first(path, nodes=nodes):
            return [-nodes[path[:i + 1]] for i in range(len(path))]
        found = [path[1:] for path in sequences(tree)[1:]]
        # A child is no more probable than its parent: what is cut are leaves, again and again.
        kept = [path for path in nodes if nodes[path] >= leaf]
        kept = sorted(kept, key=lambda path, nodes=nodes: -nodes[path])[:most]
        assert found == sorted(kept, key=likeliest_first)

        # Table 3: the own confidence in the place of the expected time gain
        expand = table_expand(table)
        tree = pct.token_confidence(expand, root, token_threshold=0.3, depth=4, leaf=leaf)

        def is_sure(path, joint, rows=rows):
            return len(path) == 1 or rows[path[-2]][path[-1]] >= 0.3
        nodes = all_nodes(table, seed % 8, is_sure, 5, 4)
        assert paths(tree) == {path for path in nodes if nodes[path] >= leaf}

def test_what_equals_a_threshold_is_expanded_and_kept():
    """A child as probable as its parent comes after it, where the cap cuts, too."""
    sure = torch.eye(6, dtype=torch.float64).roll(1, 1)
    for tree in (pct.pct(table_expand(sure), ROOT_0, cost=1.0, leaf=1.0),
                 pct.token_confidence(table_expand(sure), ROOT_0, token_threshold=1.0),
                 pct.eagle2(table_expand(sure), ROOT_0, total=4),
                 pct_cost(table_expand(sure), ROOT_0, max_nodes=6)):
        assert tree.parents.tolist() == list(range(-1, len(tree.tokens) - 1))
        assert len(tree.tokens) > 4

# ---------------------------------------------------------------- appendix A
def test_vct_has_363_nodes():
    """Appendix A: width 3 and depth 5."""
    tree = pct.vct(table_expand(random_table(0, vocab=9)), ROOT_0)
    assert len(tree.tokens) - 1 == 363
    assert paths(tree) == set(all_nodes(random_table(0, vocab=9), 0, lambda *_: True, 3, 5))

def test_eagle2_expands_the_ten_best_of_each_layer():
    """Appendix A: 50 nodes, depth 6, 10 expanded."""
    for seed in range(20):
        table = random_table(seed)
        rows = table.tolist()
        expand = table_expand(table)
        tree = pct.eagle2(expand, ROOT_0)
        nodes, layer = {}, {(0,): 1.0}
        for _ in range(6):
            grown = {}
            for path in sorted(layer, key=lambda path: -layer[path])[:10]:
                row = rows[path[-1]]
                for x in sorted(range(14), key=lambda x: -row[x])[:10]:
                    grown[(*path, x)] = layer[path] * row[x]
            nodes.update(grown)
            layer = grown
        kept = sorted(nodes, key=lambda path: -nodes[path])[:50]
        assert paths(tree) == {path[1:] for path in kept}
        assert expand.widest <= 10 and expand.calls == 6

# ---------------------------------------------------------------- what all builders share
@pytest.mark.parametrize("build", BUILDERS)
def test_what_cannot_be_drafted_is_not_there(build):
    table = torch.zeros(6, 6)
    table[0, 1] = table[1, 2] = 1.0
    # After 5 comes an impossible token: argmax of zeros is 0, which could go on.
    table[3, 5], table[3, 4] = 0.7, 0.3
    assert sequences(build(table_expand(table), ROOT_0)) == [(0,), (0, 1), (0, 1, 2)]
    expand = table_expand(table)
    tree = build(expand, torch.tensor([2]))
    assert sequences(tree) == [(2,)] and (tree.p_draft is None or tree.p_draft.shape == (0, 6))
    assert expand.calls == 1 or build in OF_CAPE
    found = set(sequences(build(table_expand(table), torch.tensor([3]))))
    assert found <= {(3,), (3, 4), (3, 5)}
    assert len(found) == (2 if build in (cape.chain, cape.drawn) else 3)

@pytest.mark.parametrize("build", BUILDERS)
def test_no_tree_is_deeper_than_its_setting_and_than_what_remains(build):
    """And the drafter predicts nothing beyond."""
    sure = torch.eye(6, dtype=torch.float64).roll(1, 1)
    settings = inspect.signature(build).parameters
    deepest = settings["depth" if "depth" in settings else "gamma"].default
    for remaining in range(1, 12):
        expand = table_expand(sure)
        expand.remaining = remaining
        tree = build(expand, ROOT_0)
        assert len(tree.tokens) == 1 + min(remaining, deepest) == 1 + expand.calls

@pytest.mark.parametrize("build", BUILDERS)
def test_expand_index_tells_which_nodes_were_expanded(build):
    """A node's number in expand leads to the same path as the node, and -1 was never given."""
    for seed in range(20):
        table = random_table(seed, vocab=8, zeros=0.3)
        table[3] = 0                                 # nothing follows, though it was expanded
        expand = table_expand(table)
        tree = build(expand, torch.tensor([seed % 8]))
        for path, index in zip(sequences(tree), tree.expand_index.tolist()):
            assert index == (expand.given.index(path) if path in expand.given else -1)
