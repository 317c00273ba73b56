"""CAPE's sets against a plain reading of section 4.2, its mask against the printed formula, beam search against brute force."""

import pytest
import torch

import cape
from verify import ancestor_mask


def table_expand(table):
    """A drafter whose distribution depends on the last token alone; counts its calls."""
    def expand(tokens, parents):
        expand.calls += 1
        expand.widest = max(expand.widest, len(parents))
        assert tokens.shape == (len(parents),)
        return table[tokens]
    expand.calls = expand.widest = 0
    return expand


def random_table(seed, vocab=14, zeros=0.0):
    g = torch.Generator().manual_seed(seed)
    table = torch.rand(vocab, vocab, generator=g, dtype=torch.float64) ** (1 + seed % 9) + 1e-9
    table[torch.rand(vocab, vocab, generator=g) < zeros] = 0
    return table / table.sum(1, keepdim=True).clamp(min=1e-300)


def paper_sets(table, root, gamma, limit):
    """Section 4.2 read literally, on Python floats -> (chain, [(position, token)] in linear order)."""
    chain, candidates, joint, here = [], [], 1.0, root
    for i in range(gamma):
        ranked = sorted(range(table.shape[1]), key=lambda x: -table[here, x].item())
        p = table[here, ranked[0]].item()
        if p == 0:
            break
        k = 7 if p <= 0.3 else 5 if p <= 0.6 else 3 if p <= 0.8 else 1
        candidates += [(joint * table[here, x].item(), i, x) for x in ranked[1:1 + k] if table[here, x] > 0]
        joint *= p
        here = ranked[0]
        chain.append(here)
    room = limit - len(chain)
    kept = sorted(candidates, key=lambda c: -c[0])[:room]
    return chain, [(i, x) for c in candidates if c in kept for _, i, x in [c]]


@pytest.mark.parametrize("zeros", [0.0, 0.7])
def test_sets_equal_a_brute_force_reading(zeros):
    widest = 0
    for seed in range(150):
        table, root = random_table(seed, zeros=zeros), seed % 14
        gamma = 1 + seed % 6
        expand = table_expand(table)
        tree = cape.cape(expand, torch.tensor([root]), gamma)
        chain, extras = paper_sets(table, root, gamma, 32)
        assert tree.tokens.tolist() == [root] + chain + [x for _, x in extras]
        assert tree.parents.tolist() == list(range(-1, len(chain))) + [i for i, _ in extras]
        assert expand.calls == gamma and expand.widest == 1, "extras cost the drafter nothing"
        widest = max(widest, len(tree.tokens) - 1)
    assert zeros or widest == 32, "the cap was met"


@pytest.mark.parametrize("p, size", [(1e-9, 7), (0.3, 7), (0.3000001, 5), (0.6, 5), (0.6000001, 3), (0.8, 3), (0.8000001, 1), (1.0, 1)])
def test_bins_are_closed_on_the_right(p, size):
    assert cape.size_of(p) == size


def test_mask_is_the_printed_formula_on_figure_3():
    """mask_CAPE(A)_ij: A_ij if j <= gamma and pos(i) > j, or if i = j; else -inf.  1-based, the root left out."""
    vocab, gamma = 10, 4
    table = torch.full((vocab, vocab), 1e-3)
    for here, (first, second) in {0: (1, 5), 1: (2, 6), 2: (3, 6), 3: (4, 7)}.items():     # one extra at each position
        table[here, first], table[here, second] = 0.9, 0.05
    tree = cape.cape(table_expand(table), torch.tensor([0]), gamma)
    assert tree.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 7]
    pos = {1: 1, 2: 2, 3: 3, 4: 4, 5: 1, 6: 2, 7: 3, 8: 4}
    mask = ancestor_mask(tree.parents)
    assert mask[:, 0].all() and mask[0].sum() == 1, "the root is seen by all and sees no node but itself"
    for i in range(1, 9):
        for j in range(1, 9):
            assert mask[i, j].item() == ((j <= gamma and pos[i] > j) or i == j), (i, j)


def test_fixed_has_the_same_number_everywhere_and_beam_is_brute_force():
    for seed in range(40):
        table = random_table(seed)
        tree = cape.fixed(table_expand(table), torch.tensor([3]), 4, 2)
        assert [tree.parents.tolist().count(i) for i in range(4)] == [3, 3, 3, 3]

        width, gamma = 1 + seed % 5, 1 + seed % 4
        expand = table_expand(table)
        tree = cape.beam(expand, torch.tensor([3]), gamma, width)
        beams, expected = [((3,), 1.0)], []
        for _ in range(gamma):
            grown = [(seq + (x,), p * table[seq[-1], x].item()) for seq, p in beams for x in range(14)]
            beams = sorted(grown, key=lambda b: -b[1])[:width]
            expected += [seq for seq, _ in beams]
        found = []
        for i in range(1, len(tree.tokens)):
            seq, node = (), i
            while node >= 0:
                seq, node = (tree.tokens[node].item(),) + seq, tree.parents[node].item()
            found.append(seq)
        assert found == expected and expand.widest <= width


def test_chain_stops_where_the_drafter_cannot_go_on():
    table = torch.zeros(5, 5)
    table[0, 1] = table[1, 2] = 1.0
    for build in (cape.chain, cape.cape, cape.fixed, cape.beam):
        tree = build(table_expand(table), torch.tensor([0]), 4)
        assert tree.tokens.tolist() == [0, 1, 2] and tree.parents.tolist() == [-1, 0, 1]
    tree = cape.chain(table_expand(table), torch.tensor([4]), 4)
    assert tree.tokens.tolist() == [4]


def test_bounds_hold():
    for seed in range(60):
        table, gamma = random_table(seed, vocab=30), 1 + seed % 6
        for build in (cape.chain, cape.cape, cape.fixed, cape.beam):
            nodes, frontier = build.bounds(gamma=gamma)
            expand = table_expand(table)
            assert len(build(expand, torch.tensor([0]), gamma).tokens) - 1 <= nodes and expand.widest <= frontier
