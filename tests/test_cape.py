"""CAPE's sets and cap against a plain reading of section 4.2; beam search by brute force."""
import pytest
import torch
from helpers import path_expand, random_table, sequences, table_expand

import cape

def row_after(path, vocab=7):
    """A distribution of its own after each path, the root's token first."""
    g = torch.Generator().manual_seed(hash(path) % 2 ** 40)
    return (3 * torch.randn(vocab, generator=g, dtype=torch.float64)).softmax(-1)

# ---------------------------------------------------------------- the expanded proposal
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bins_are_closed_on_the_right(dtype):
    """Each edge, in the drafter's precision, is in the bin below it; the next number is not."""
    edges = torch.tensor([0.3, 0.6, 0.8, 1.0], dtype=dtype)
    assert cape.num_extras(edges).tolist() == [7, 5, 3, 1]
    assert cape.num_extras(torch.nextafter(edges[:3], edges[3])).tolist() == [5, 3, 1]

def paper_sets(rows, root, gamma, sizes=(7, 5, 3, 1), edges=(0.3, 0.6, 0.8), max_nodes=32):
    """Section 4.2 read literally, on Python floats -> chain, {(position, token)} of the extras.

    S(p) on "(0, 0.3], (0.3, 0.6], (0.6, 0.8], and (0.8, 1]"; 5.3: at most 32 tokens to verify.
    """
    chain, candidates, joint, last = [], [], 1.0, root
    for i in range(gamma):
        ranked = sorted(range(len(rows)), key=lambda x: -rows[last][x])
        p = rows[last][ranked[0]]
        if p == 0:
            break
        k = sizes[sum(p > edge for edge in edges)]
        for x in ranked[1:1 + k]:
            if rows[last][x] > 0:
                candidates.append((joint * rows[last][x], i, x))
        joint *= p
        last = ranked[0]
        chain.append(last)
    kept = sorted(candidates, reverse=True)[:max_nodes - len(chain)]
    return chain, {(i, x) for _, i, x in kept}

SETTINGS = [{}, dict(sizes=(0,), edges=(), max_nodes=6), dict(sizes=(2, 0), edges=(0.5,)),
            dict(sizes=(9, 4, 1), edges=(0.1, 0.7), max_nodes=11),
            dict(sizes=(40,), edges=(), max_nodes=500)]

@pytest.mark.parametrize("zeros", [0.0, 0.7])
@pytest.mark.parametrize("settings", SETTINGS)
def test_cape_is_a_literal_reading_of_the_section(zeros, settings):
    """Also where nothing follows a token of the chain, and where fewer than gamma tokens remain."""
    for seed in range(20):
        table, root, gamma = random_table(seed, zeros=zeros), seed % 14, 1 + seed % 6
        table[seed % 3] = 0
        expand = table_expand(table)
        expand.remaining = 4
        tree = cape.cape(expand, torch.tensor([root]), gamma, **settings)
        found = sequences(tree)
        gamma = min(gamma, 4)
        chain, extras = paper_sets(table.tolist(), root, gamma, **settings)
        proposal = [(root, *chain[:i]) for i in range(len(chain) + 1)]
        assert found[:1 + len(chain)] == proposal, "the proposal first, in order"
        assert set(found) == {*proposal} | {(root, *chain[:i], x) for i, x in extras}
        assert expand.calls == gamma and expand.widest == 1, "extras take no forward"

# ---------------------------------------------------------------- the baselines
def test_the_fixed_size_control_has_four_extras_everywhere():
    """5.1: gamma 5.  5.4: "we set the size of the expansion sets to 4"."""
    tree = cape.fixed(table_expand(random_table(3, vocab=20)), torch.tensor([0]))
    assert torch.bincount(tree.parents[1:]).tolist() == [5] * 5        # one of the chain, and four

def beams(start, gamma, width):
    """All sequences that a beam search meets, by brute force over row_after."""
    best, found = [((start,), 1.0)], [(start,)]
    for _ in range(gamma):
        longer = []
        for path, p in best:
            longer += [((*path, x), p * q) for x, q in enumerate(row_after(path).tolist())]
        best = sorted(longer, key=lambda at: -at[1])[:width]
        found += [path for path, _ in best]
    return found

def test_chain_and_beam_follow_the_drafters_paths():
    """With a drafter that looks at the whole path, which `parents` alone tell it."""
    for seed in range(7):
        root = torch.tensor([seed])
        for gamma, width in ((4, 3), (2, 33)):                         # wider than the vocabulary
            found = sequences(cape.beam(path_expand(row_after), root, gamma, width))
            assert found == beams(seed, gamma, width)
        found = sequences(cape.beam(path_expand(row_after), root))
        assert found == beams(seed, 5, 4), "section 5.3"
        chain = beams(seed, 4, 1)
        assert sequences(cape.chain(path_expand(row_after), root, 4)) == chain

def test_a_sampled_chain_has_the_distributions_that_it_was_sampled_from(monkeypatch):
    tree = cape.drawn(path_expand(row_after), torch.tensor([0]), 4)
    expected = [row_after(path) for path in sequences(tree)[:-1]]
    torch.testing.assert_close(tree.p_draft, torch.stack(expected))
    # With the least number of torch.rand, and the largest: no token of probability zero
    for number, token in ((0, 3), (1 - 2 ** -53, 1)):
        def rand(*size, number=number, **more):
            return torch.full(size, number, dtype=torch.float64)
        monkeypatch.setattr(torch, "rand", rand)
        assert cape.sample(torch.tensor([[0, 0.5, 0, 0.5, 0]])).tolist() == [token]

def test_a_mistake_is_one_sentence():
    for settings in ({"edges": (0.5,)}, {"gamma": 5, "max_nodes": 4}):
        with pytest.raises(ValueError, match="need one size more|cannot hold the chain"):
            cape.cape(path_expand(row_after), torch.tensor([0]), **settings)
