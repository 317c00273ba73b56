"""CAPE's sets and cap against a plain reading of section 4.2; beam search by brute force."""

import inspect

import pytest
import torch

import cape

ROOT_0 = torch.tensor([0])


def table_expand(table):
    """A drafter whose distribution depends on the last token alone; counts its calls."""

    def expand(tokens, parents):
        expand.calls += 1
        expand.widest = max(expand.widest, len(parents))
        assert tokens.shape == (len(parents),) and parents, "a forward over no node"
        return table[tokens]

    expand.calls = expand.widest = 0
    return expand


def random_table(seed, vocab=14, zeros=0.0):
    g = torch.Generator().manual_seed(seed)
    table = torch.rand(vocab, vocab, generator=g, dtype=torch.float64) ** (1 + seed % 9) + 1e-9
    table[torch.rand(vocab, vocab, generator=g) < zeros] = 0
    return table / table.sum(1, keepdim=True).clamp(min=1e-300)


def row_after(path, vocab=7):
    """A distribution of its own after each path, the root's token first."""
    g = torch.Generator().manual_seed(hash(path) % 2**40)
    return (3 * torch.randn(vocab, generator=g, dtype=torch.float64)).softmax(-1)


def path_expand():
    """A drafter whose distribution depends on the whole path, known from `parents` alone."""
    given = []

    def expand(tokens, parents):
        for token, parent in zip(tokens.tolist(), parents):
            assert -1 <= parent < len(given), "parents come before, in the order given to expand"
            given.append((given[parent] if parent >= 0 else ()) + (token,))
        return torch.stack([row_after(path) for path in given[-len(parents) :]])

    return expand


def sequences(tree):
    """The token sequence of each node, the root's first.

    Checked: parents come before their children, and nothing is proposed twice.
    """
    found = [tuple(tree.tokens[:1].tolist())]
    assert tree.parents[0] == -1
    assert tree.tokens.dtype == tree.parents.dtype == tree.expand_index.dtype == torch.long
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist()):
        assert 0 <= parent < len(found)
        found.append(found[parent] + (token,))
    assert len(found) == len(set(found)) == len(tree.parents)
    return found


def paper_sets(table, root, gamma, sizes=(7, 5, 3, 1), edges=(0.3, 0.6, 0.8), max_nodes=32):
    """Section 4.2 read literally, on Python floats -> chain, {(position, token)} of the extras."""
    chain, candidates, joint, here = [], [], 1.0, root
    for i in range(gamma):
        ranked = sorted(range(len(table)), key=lambda x: -table[here][x])
        p = table[here][ranked[0]]
        if p == 0:
            break
        k = sizes[sum(p > edge for edge in edges)]
        candidates += [
            (joint * table[here][x], i, x) for x in ranked[1 : 1 + k] if table[here][x] > 0
        ]
        joint *= p
        here = ranked[0]
        chain.append(here)
    return chain, {(i, x) for _, i, x in sorted(candidates, reverse=True)[: max_nodes - len(chain)]}


def beams(row, start, gamma, width):
    """All hypotheses that a beam search meets, by brute force.  row(sequence): probabilities."""
    best, found = [((start,), 1.0)], [(start,)]
    for _ in range(gamma):
        grown = [(seq + (x,), p * q) for seq, p in best for x, q in enumerate(row(seq))]
        best = sorted(grown, key=lambda b: -b[1])[:width]
        found += [seq for seq, _ in best]
    return found


# ---------------------------------------------------------------- the paper's numbers
def test_the_constants_are_the_papers():
    """4.2: "we set S(p) to be 7, 5, 3, and 1 for p in the ranges of (0, 0.3], (0.3, 0.6],
    (0.6, 0.8], and (0.8, 1]".  5.1: gamma 5.  5.3: at most 32 tokens to verify, beam size 4.
    5.4: "we set the size of the expansion sets to 4".
    """

    def defaults(f):
        return {
            k: v.default
            for k, v in inspect.signature(f).parameters.items()
            if v.default is not inspect.Parameter.empty
        }

    assert [defaults(f) for f in (cape.chain, cape.drawn, cape.cape, cape.fixed, cape.beam)] == [
        {"gamma": 5},
        {"gamma": 5},
        {"gamma": 5, "sizes": (7, 5, 3, 1), "edges": (0.3, 0.6, 0.8), "max_nodes": 32},
        {"gamma": 5, "size": 4, "max_nodes": 32},
        {"gamma": 5, "width": 4},
    ]
    expand = table_expand(random_table(3, vocab=20))
    assert torch.bincount(cape.fixed(expand, ROOT_0).parents[1:]).tolist() == [5] * 5  # 1 + 4 each


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bins_are_closed_on_the_right(dtype):
    """Each edge, in the drafter's precision, is in the bin below it; the next number is not."""
    edges = torch.tensor([0.3, 0.6, 0.8, 1.0], dtype=dtype)
    assert cape.num_extras(edges).tolist() == [7, 5, 3, 1]
    assert cape.num_extras(torch.nextafter(edges[:3], edges[3])).tolist() == [5, 3, 1]
    assert cape.num_extras(
        torch.tensor([1e-9, 0.299, 0.31, 0.59, 0.61, 0.79, 0.81], dtype=dtype)
    ).tolist() == [7, 7, 5, 5, 3, 3, 1]
    assert cape.num_extras(edges, (2,), ()).tolist() == [2] * 4


# ---------------------------------------------------------------- the expanded proposal
@pytest.mark.parametrize("zeros", [0.0, 0.7])
@pytest.mark.parametrize(
    "given",
    [
        {},
        dict(sizes=(0,), edges=(), max_nodes=6),
        dict(sizes=(2, 0), edges=(0.5,)),
        dict(sizes=(9, 4, 1), edges=(0.1, 0.7), max_nodes=11),
        dict(sizes=(40,), edges=(), max_nodes=500),
    ],
)
def test_trees_equal_a_brute_force_reading(zeros, given):
    widest = 0
    for seed in range(30 if not given else 10):
        table, root, gamma = random_table(seed, zeros=zeros), seed % 14, 1 + seed % 6
        expand = table_expand(table)
        there = sequences(cape.cape(expand, torch.tensor([root]), gamma, **given))
        chain, extras = paper_sets(table.tolist(), root, gamma, **given)
        proposal = [(root, *chain[:i]) for i in range(len(chain) + 1)]
        assert there[: 1 + len(chain)] == proposal, "the proposal first, in order"
        assert set(there) == {*proposal} | {(root, *chain[:i], x) for i, x in extras}
        assert expand.calls == gamma and expand.widest == 1, "extras take no forward"
        widest = max(widest, len(there) - 1)
    assert zeros or given or widest == 32, "the cap was met"


def test_the_cap_is_filled_where_the_chain_is_short():
    """By a row of zeros after the second token, and by what remains: 32 nodes, two in the chain."""
    table = torch.full((60, 60), 1 / 60, dtype=torch.float64)
    table[0, 1] = table[1, 2] = 0.1
    table[2] = 0
    short = sequences(cape.cape(table_expand(table), ROOT_0, sizes=(40,), edges=()))
    expand = table_expand(table)
    expand.remaining = 2
    assert (
        short == sequences(cape.cape(expand, ROOT_0, sizes=(40,), edges=()))
        and len(short) == 1 + 32
    )


def test_parents_are_told_to_the_drafter():
    """With a drafter that looks at the whole path: chain, extras and beams follow from it."""
    for seed in range(7):
        chain = [(seed,)]
        for _ in range(4):
            chain.append(chain[-1] + (row_after(chain[-1]).argmax().item(),))
        root = torch.tensor([seed])
        assert sequences(cape.chain(path_expand(), root, 4)) == chain
        assert sequences(cape.cape(path_expand(), root, 4))[:5] == chain
        assert len(sequences(cape.drawn(path_expand(), root, 4))) == 5
        for gamma, width in ((4, 3), (2, 33)):  # and wider than the vocabulary
            expected = beams(lambda path: row_after(path).tolist(), seed, gamma, width)
            assert sequences(cape.beam(path_expand(), root, gamma, width)) == expected
