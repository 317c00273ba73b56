"""CAPE's sets and cap against a plain reading of section 4.2 on Python lists, its mask against the printed formula,
beam search against brute force; that chains and CAPE read nothing back from the device, and how they say "absent"."""
import inspect

import pytest
import torch
from torch.overrides import TorchFunctionMode

import cape
from verify import ancestor_mask

BUILDERS = (cape.chain, cape.drawn, cape.cape, cape.fixed, cape.beam)


def table_expand(table):
    """A drafter whose distribution depends on the last token alone; counts its calls."""
    def expand(tokens, parents):
        expand.calls += 1
        expand.widest = max(expand.widest, len(parents))
        assert tokens.shape == (len(parents),) and parents, "nobody is asked about no node"
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
    """A drafter whose distribution depends on the whole path, which it knows from `parents` alone."""
    given = []

    def expand(tokens, parents):
        for token, parent in zip(tokens.tolist(), parents):
            assert -1 <= parent < len(given), "parents come before, in the order given to expand"
            given.append((given[parent] if parent >= 0 else ()) + (token,))
        return torch.stack([row_after(path) for path in given[-len(parents):]])
    return expand


def sequences(tree):
    """The token sequence of each node that is there, the root's first; checked: parents are there, and come before."""
    found = [tuple(tree.tokens[:1].tolist())]
    for i in range(1, len(tree.tokens)):
        parent = tree.parents[i].item()
        above = found[parent] if parent >= 0 else None
        assert parent < i and (parent < 0 or above is not None), "a node that is there hangs from one that is there"
        found.append(above and above + (tree.tokens[i].item(),))
    there = [sequence for sequence in found if sequence]
    assert len(set(there)) == len(there), "nothing is proposed twice"
    return there


def paper_sets(table, root, gamma, limit):
    """Section 4.2 read literally, on Python floats -> (chain, {(position, token)} of the extras that stay)."""
    chain, candidates, joint, here = [], [], 1.0, root
    for i in range(gamma):
        ranked = sorted(range(len(table)), key=lambda x: -table[here][x])
        p = table[here][ranked[0]]
        if p == 0:
            break
        k = 7 if p <= 0.3 else 5 if p <= 0.6 else 3 if p <= 0.8 else 1
        candidates += [(joint * table[here][x], i, x) for x in ranked[1:1 + k] if table[here][x] > 0]
        joint *= p
        here = ranked[0]
        chain.append(here)
    room = limit - len(chain)
    return chain, {(i, x) for _, i, x in sorted(candidates, reverse=True)[:room]}


# ---------------------------------------------------------------- the paper's numbers
def test_the_constants_are_the_papers():
    """4.2: "we set S(p) to be 7, 5, 3, and 1 for p in the ranges of (0, 0.3], (0.3, 0.6], (0.6, 0.8], and (0.8, 1]".
    5.1: "set proposal length gamma to be 5".  5.3: "Our CAPE sets the maximum number of tokens for verification at each
    step to be 32"; "GLIDE+BeamSearch, where we set the beam size equal to 4".  5.4: "we set the size of the expansion sets
    to 4, which is the average size of the practical expansion sets".
    """
    def defaults(f):
        return {k: v.default for k, v in inspect.signature(f).parameters.items() if v.default is not inspect.Parameter.empty}
    assert defaults(cape.chain) == {"gamma": 5}
    assert defaults(cape.drawn) == {"gamma": 5, "generator": None}
    assert defaults(cape.cape) == {"gamma": 5, "sizes": (7, 5, 3, 1), "edges": (0.3, 0.6, 0.8), "max_nodes": 32}
    assert defaults(cape.fixed) == {"gamma": 5, "size": 4, "max_nodes": 32}
    assert defaults(cape.beam) == {"gamma": 5, "width": 4}

    table, root = random_table(3, vocab=20), torch.tensor([0])
    assert torch.bincount(cape.fixed(table_expand(table), root).parents[1:]).tolist() == [5] * 5        # 1 + 4 each
    tree = cape.beam(table_expand(table), root)
    assert [len(s) for s in sequences(tree)].count(6) == 4 and len(tree.tokens) == 1 + 4 * 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bins_are_closed_on_the_right(dtype):
    """Each edge, as the drafter's own precision has it, is in the bin under it; the next number above is not."""
    edges = torch.tensor([0.3, 0.6, 0.8, 1.0], dtype=dtype)
    assert cape.size_of(edges).tolist() == [7, 5, 3, 1]
    assert cape.size_of(torch.nextafter(edges[:3], edges[3])).tolist() == [5, 3, 1]
    assert cape.size_of(torch.tensor([1e-9, 0.299, 0.31, 0.59, 0.61, 0.79, 0.81], dtype=dtype)).tolist() == [7, 7, 5, 5, 3, 3, 1]
    assert cape.size_of(edges, (2,), ()).tolist() == [2] * 4


@pytest.mark.parametrize("p, size", [(0.3, 7), (0.6, 5), (0.8, 3), (1.0, 1), (0.3001, 5), (0.6001, 3), (0.8001, 1)])
def test_a_confidence_on_an_edge_gives_that_many_extras(p, size):
    rows = torch.full((1, 101), (1 - p) / 100)
    rows[0, 17] = p
    if p == 1.0:
        rows[0, 3] = 1e-9
    tree = cape.cape(lambda tokens, parents: rows, torch.tensor([0]), gamma=1)
    assert len(sequences(tree)) == 1 + 1 + size


# ---------------------------------------------------------------- X_i and the cap, against lists
def test_expansion_sets_are_the_next_best_tokens():
    for seed in range(100):
        gamma, vocab = 1 + seed % 6, 3 + seed % 20
        rows = random_table(seed, vocab=max(gamma, vocab), zeros=[0.0, 0.5][seed % 2])[:gamma]
        chosen = rows.argmax(1)
        p = rows.max(1).values
        extras, p_extras = cape.expansion_sets(rows, chosen, p)
        assert extras.shape == p_extras.shape == (gamma, min(7, rows.shape[1]))
        for row, x, p_i, found, values in zip(rows.tolist(), chosen.tolist(), p.tolist(), extras.tolist(), p_extras.tolist()):
            size = [7, 5, 3, 1][sum(p_i > edge for edge in (0.3, 0.6, 0.8))]
            others = [(-v, token) for token, v in enumerate(row) if token != x and v > 0]
            expected = [token for _, token in sorted(others)][:size]
            there = [token for token, v in zip(found, values) if v > 0]
            assert there == expected and all(row[token] == v for token, v in zip(found, values) if v > 0)


def test_the_cap_keeps_the_highest_joint_probabilities():
    for seed in range(100):
        g = torch.Generator().manual_seed(seed)
        gamma, k = 1 + seed % 6, 1 + seed % 7
        p = torch.rand(gamma, generator=g, dtype=torch.float64)
        p_extras = torch.rand(gamma, k, generator=g, dtype=torch.float64) * (torch.rand(gamma, k, generator=g) < 0.7)
        room = seed % (gamma * k + 1)
        joint, index = cape.cap(p, p_extras, room)
        every = []
        for i in range(gamma):
            above = 1.0
            for before in p[:i].tolist():
                above *= before
            every += [above * v for v in p_extras[i].tolist()]
        best = sorted(range(len(every)), key=lambda e: -every[e])[:room]
        assert joint.shape == (room,)
        assert {e for e in best if every[e] > 0} == {e for e, v in zip(index.tolist(), joint.tolist()) if v > 0}
        assert torch.allclose(joint, torch.tensor([every[e] for e in best], dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize("zeros", [0.0, 0.7])
def test_trees_equal_a_brute_force_reading(zeros):
    widest = 0
    for seed in range(150):
        table, root = random_table(seed, zeros=zeros), seed % 14
        gamma = 1 + seed % 6
        expand = table_expand(table)
        tree = cape.cape(expand, torch.tensor([root]), gamma)
        chain, extras = paper_sets(table.tolist(), root, gamma, 32)
        there = sequences(tree)
        expected = {(root, *chain[:i]) for i in range(len(chain) + 1)} | {(root, *chain[:i], x) for i, x in extras}
        assert set(there) == expected
        assert there[:1 + len(chain)] == [(root, *chain[:i]) for i in range(len(chain) + 1)], "the proposal first, in order"
        assert expand.calls == gamma and expand.widest == 1, "extras cost the drafter nothing"
        widest = max(widest, len(there) - 1)
    assert zeros or widest == 32, "the cap was met"


def test_parents_are_told_to_the_drafter():
    """With a drafter that looks at the whole path: chain and extras follow from its distributions along the chain."""
    for seed in range(7):
        chain = [(seed,)]
        for _ in range(4):
            chain.append(chain[-1] + (row_after(chain[-1]).argmax().item(),))
        root = torch.tensor([seed])
        assert sequences(cape.chain(path_expand(), root, 4)) == chain
        assert sequences(cape.cape(path_expand(), root, 4))[:5] == chain
        assert len(sequences(cape.drawn(path_expand(), root, 4))) == 5
        beams, expected = [((seed,), 1.0)], [(seed,)]
        for _ in range(4):
            grown = [(path + (x,), p * row_after(path)[x].item()) for path, p in beams for x in range(7)]
            beams = sorted(grown, key=lambda b: -b[1])[:3]
            expected += [path for path, _ in beams]
        assert sequences(cape.beam(path_expand(), root, 4, 3)) == expected


def test_other_sizes_edges_and_caps():
    table = random_table(4, vocab=30)
    for sizes, edges, max_nodes in [((0,), (), 5), ((2, 0), (0.5,), 32), ((9, 4, 1), (0.1, 0.7), 11), ((40,), (), 500), ((3,), (), 5)]:
        tree = cape.cape(table_expand(table), torch.tensor([2]), 5, sizes, edges, max_nodes)
        there = sequences(tree)
        chain = sequences(cape.chain(table_expand(table), torch.tensor([2])))
        assert set(chain) <= set(there) and len(there) - 1 <= max_nodes
        counts = [sum(s[:-1] == above for s in there) - 1 for above in chain[:-1]]
        p = [table[s[-2], s[-1]].item() for s in chain[1:]]
        wanted = [min(sizes[sum(v > edge for edge in edges)], 29) for v in p]
        assert sum(counts) == min(sum(wanted), max_nodes - 5) and all(c <= w for c, w in zip(counts, wanted))


@pytest.mark.parametrize("wrong, says", [
    (dict(gamma=0), "gamma"), (dict(sizes=(1, 2)), "sizes"), (dict(edges=(0.3, 0.8, 0.6)), "ascend"),
    (dict(sizes=(7, 5, 3, -1)), "fewer than no"), (dict(gamma=6, max_nodes=5), "cannot hold the chain"),
])
def test_settings_that_mean_nothing_are_refused(wrong, says):
    with pytest.raises(AssertionError, match=says):
        cape.cape(table_expand(random_table(0)), torch.tensor([0]), **wrong)


def test_settings_of_the_others_are_checked():
    expand, root = table_expand(random_table(0)), torch.tensor([0])
    for build in BUILDERS:
        with pytest.raises(AssertionError, match="gamma"):
            build(expand, root, gamma=0)
    with pytest.raises(AssertionError, match="width"):
        cape.beam(expand, root, width=0)


def test_mask_is_the_printed_formula_on_figure_3():
    """mask_CAPE(A)_ij: A_ij if j <= gamma and pos(i) > j, or if i = j; else -inf.  1-based, the root left out."""
    vocab, gamma = 10, 4
    table = torch.full((vocab, vocab), 1e-3)
    for here, (first, second) in {0: (1, 5), 1: (2, 6), 2: (3, 6), 3: (4, 7)}.items():     # one extra at each position
        table[here, first], table[here, second] = 0.9, 0.05
    tree = cape.cape(table_expand(table), torch.tensor([0]), gamma)
    there = [i for i in range(len(tree.tokens)) if i == 0 or tree.parents[i] >= 0]
    assert there == list(range(9)), "the chain, one extra each, most probable first; then only what is absent"
    tokens, parents = tree.tokens[:9], tree.parents[:9]
    assert tokens[:5].tolist() == [0, 1, 2, 3, 4]
    assert {(parent.item() + 1, x.item()) for parent, x in zip(parents[5:], tokens[5:])} == {(1, 5), (2, 6), (3, 6), (4, 7)}
    pos = {i: i if i <= gamma else 1 + parents[i].item() for i in range(1, 9)}             # x_i is in X_pos(i)
    mask = ancestor_mask(parents)
    assert mask[:, 0].all() and mask[0].sum() == 1, "the root is seen by all and sees no node but itself"
    for i in range(1, 9):
        for j in range(1, 9):
            assert mask[i, j].item() == ((j <= gamma and pos[i] > j) or i == j), (i, j)


# ---------------------------------------------------------------- chain and CAPE draft the same
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_do_not_part_chain_and_cape(dtype):
    """A drafter in half precision ties often: whichever token wins, it is the same for all, and no set holds it again."""
    tied = 0
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        table = torch.randint(1, 4, (40, 40), generator=g).to(dtype) / 100
        best = table.max(1, keepdim=True).values
        tied += ((table == best).sum(1) > 1).all().item()
        root, gamma = torch.tensor([seed % 40]), 1 + seed % 6
        proposal = sequences(cape.chain(table_expand(table), root, gamma))
        assert len(proposal) == 1 + gamma
        for build in (cape.cape, cape.fixed):
            tree = build(table_expand(table), root, gamma)
            assert sequences(tree)[:1 + gamma] == proposal
            # all extras of a position are at least as probable as any token that was left out (no cap at gamma <= 4)
            if gamma <= 4:
                for i in range(gamma):
                    row = table[tree.tokens[i]]
                    offered = [s[-1] for s in sequences(tree) if s[:-1] == proposal[i]]
                    left_out = [x for x in range(40) if x not in offered]
                    assert len(offered) == len(set(offered)) == 1 + (4 if build is cape.fixed else 7)
                    assert min(row[offered]) >= max(row[left_out])
    assert tied > 30


# ---------------------------------------------------------------- absent nodes, static shapes, no host read
def test_what_cannot_be_drafted_is_absent():
    table = torch.zeros(5, 5)
    table[0, 1] = table[1, 2] = 1.0
    for build in BUILDERS:
        tree = build(table_expand(table), torch.tensor([0]), 4)
        assert sequences(tree) == [(0,), (0, 1), (0, 1, 2)], build.__name__
        tree = build(table_expand(table), torch.tensor([4]), 4)
        assert sequences(tree) == [(4,)], build.__name__


def test_nothing_hangs_below_an_absent_node():
    """What the drafter says after a token of probability zero is meaningless, however sure it is."""
    table = torch.zeros(6, 6)
    table[3, 5], table[3, 4] = 0.7, 0.3
    table[0, 1] = 1.0                       # after 5 comes an impossible token: argmax of zeros is 0, which can go on
    for build in (cape.chain, cape.drawn, cape.cape, cape.fixed):
        tree = build(table_expand(table), torch.tensor([3]), 5)
        there = set(sequences(tree))
        assert there <= {(3,), (3, 4), (3, 5)} and len(there) == (3 if build in (cape.cape, cape.fixed) else 2)
        assert tree.parents[2:6].tolist() == [-1] * 4


def test_a_long_unlikely_chain_is_there():
    """The joint probability of forty tokens of 2 % is below what a float32 holds; each of them is possible all the same."""
    table = torch.full((50, 50), 0.02)
    assert len(sequences(cape.chain(table_expand(table), torch.tensor([0]), 40))) == 41
    assert len(sequences(cape.drawn(table_expand(table), torch.tensor([0]), 40))) == 41
    assert len(sequences(cape.cape(table_expand(table), torch.tensor([0]), 40, max_nodes=60))) == 61
    assert len(sequences(cape.beam(table_expand(table), torch.tensor([0]), 40, 2))) == 81


@pytest.mark.parametrize("zeros", [0.0, 0.8, 1.0])
def test_the_number_of_nodes_is_static(zeros):
    for seed in range(20):
        table, gamma = random_table(seed, zeros=zeros), 1 + seed % 6
        expand, root = table_expand(table), torch.tensor([0])
        assert len(cape.chain(expand, root, gamma).tokens) == len(cape.drawn(expand, root, gamma).tokens) == 1 + gamma
        assert len(cape.cape(expand, root, gamma).tokens) == 1 + gamma + min(gamma * 7, 32 - gamma)
        assert len(cape.cape(expand, root, gamma, (2, 6), (0.5,), 10).tokens) == 1 + gamma + min(gamma * 6, 10 - gamma)
        assert len(cape.fixed(expand, root, gamma).tokens) == 1 + gamma + min(gamma * 4, 32 - gamma)


class NoHostRead(TorchFunctionMode):
    """Refuses whatever makes the host wait for the device's values."""
    READS = {"item", "tolist", "numpy", "cpu", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "__bool__",
             "__int__", "__float__", "__index__", "__contains__", "__array__", "allclose"}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert getattr(func, "__name__", "") not in self.READS, f"{func.__name__} reads the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("build", [cape.chain, cape.drawn, cape.cape, cape.fixed])
def test_nothing_is_read_back(build, device):
    """On the meta device there is nothing to be read, and no shape can depend on values."""
    table, root = random_table(1).float().to(device), torch.tensor([0], device=device)
    with NoHostRead():
        tree = build(table_expand(table), root)
        again = build(table_expand(table), root)
    assert tree.tokens.shape == tree.parents.shape == again.tokens.shape == (1 + build.bounds()[0],)
    assert tree.tokens.dtype == tree.parents.dtype == torch.long
    assert {x.device.type for x in tree if x is not None} == {device}
    assert (tree.p_draft is None) != (build is cape.drawn)


@pytest.mark.parametrize("build", [cape.chain, cape.drawn, cape.cape, cape.fixed])
def test_nothing_is_sent_from_the_second_round_on(build):
    class Sent(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy), "made on the host"
            return func(*args, **(kwargs or {}))
    table, root = random_table(1), torch.tensor([0])
    build(table_expand(table), root)
    with Sent():
        build(table_expand(table), root)


# ---------------------------------------------------------------- drawn chains
def test_drawn_keeps_the_distribution_of_each_token():
    for seed in range(40):
        table = random_table(seed, zeros=[0.0, 0.6][seed % 2])
        expand = table_expand(table)
        tree = cape.drawn(expand, torch.tensor([1]), 5, torch.Generator().manual_seed(seed))
        there = len(sequences(tree)) - 1
        assert tree.parents.tolist() == list(range(-1, there)) + [-1] * (5 - there), "absent nodes come last"
        assert tree.p_draft.shape == (5, 14) and expand.calls == 5
        for i in range(there):
            assert torch.equal(tree.p_draft[i], table[tree.tokens[i]])
            assert tree.p_draft[i, tree.tokens[i + 1]] > 0


def test_draws_follow_the_row_and_the_generator():
    row = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    tokens = cape.draw(row.expand(40000, 5), torch.Generator().manual_seed(0))
    found = torch.bincount(tokens, minlength=5)
    expected = 40000 * row
    there = row > 0
    assert found[1] == 0
    assert ((found - expected)[there] ** 2 / expected[there]).sum() < 16.3          # chi-square, 3 degrees of freedom: 0.1 %

    table, root = random_table(2), torch.tensor([0])

    def drawn(seed, **given):
        expand = table_expand(table)
        if seed is not None:
            expand.generator = torch.Generator().manual_seed(seed)
        return cape.drawn(expand, root, 20, **given).tokens.tolist()
    assert drawn(1) == drawn(1) != drawn(2), "expand's generator, where it has one"
    assert drawn(1, generator=torch.Generator().manual_seed(2)) == drawn(2), "the one given goes before"
    torch.manual_seed(1)
    assert drawn(None) != drawn(None), "none: torch's own"


# ---------------------------------------------------------------- what CAPE is compared with
def test_fixed_has_the_same_number_everywhere_and_beam_is_brute_force():
    for seed in range(40):
        table = random_table(seed)
        tree = cape.fixed(table_expand(table), torch.tensor([3]), 4, 2)
        assert [tree.parents.tolist().count(i) for i in range(4)] == [3, 3, 3, 3]

        width, gamma = 1 + seed % 5, 1 + seed % 4
        expand = table_expand(table)
        tree = cape.beam(expand, torch.tensor([3]), gamma, width)
        beams, expected = [((3,), 1.0)], [(3,)]
        for _ in range(gamma):
            grown = [(seq + (x,), p * table[seq[-1], x].item()) for seq, p in beams for x in range(14)]
            beams = sorted(grown, key=lambda b: -b[1])[:width]
            expected += [seq for seq, _ in beams]
        assert sequences(tree) == expected
        assert expand.calls == gamma and expand.widest <= width


def test_a_beam_wider_than_the_vocabulary_is_every_sequence():
    for gamma in (1, 2, 3):
        tree = cape.beam(table_expand(random_table(gamma, vocab=3)), torch.tensor([0]), gamma, 33)
        assert len(sequences(tree)) == len(tree.tokens) == sum(3 ** length for length in range(gamma + 1))


def test_beam_reads_once_a_depth():
    reads = []

    class Counted(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            name = getattr(func, "__name__", "")
            reads.extend([name] if name in NoHostRead.READS else [])
            return func(*args, **(kwargs or {}))
    with Counted():
        cape.beam(table_expand(random_table(0)), torch.tensor([0]), 5)
    assert reads == ["tolist"] * 5


def test_bounds_hold():
    assert [build.bounds() for build in BUILDERS] == [(5, 1), (5, 1), (32, 1), (25, 1), (20, 4)]
    for seed in range(60):
        vocab, gamma = [30, 3][seed % 2], 1 + seed % 6
        table = random_table(seed, vocab=vocab)
        settings = {cape.cape: [{}, dict(sizes=(2, 3), edges=(0.4,)), dict(max_nodes=7)], cape.beam: [{}, dict(width=40)],
                    cape.fixed: [{}, dict(size=9), dict(size=0), dict(max_nodes=6)]}
        for build in BUILDERS:
            for given in settings.get(build, [{}]):
                nodes, frontier = build.bounds(gamma=gamma, **given)
                expand = table_expand(table)
                tree = build(expand, torch.tensor([0]), gamma=gamma, **given)
                assert len(tree.tokens) - 1 <= nodes and expand.widest <= frontier
                if vocab == 30 and build is not cape.beam:
                    assert len(tree.tokens) - 1 == nodes, "static: the bound is the number"
