"""Cascade's section 4 (figures/ewif.py): each formula as printed, and as a sum of probabilities."""
from itertools import product
from math import prod

import ewif
import numpy as np
import pytest

def probabilities(alpha, k):
    """Equation 3: {tokens of a round: probability}."""
    return {i + 1: alpha ** i * (1 - alpha) for i in range(k)} | {k + 1: alpha ** k}

# ---- Theorem 4.1, Corollary 4.2
@pytest.mark.parametrize("alpha, k", product([0.0, 0.3, 0.8, 1.0], [0, 1, 6]))
def test_phi_is_the_generating_function_of_equation_3(alpha, k):
    p = probabilities(alpha, k)
    # 1.25 with alpha 0.8: alpha x = 1, where the closed form divides by 0
    for x in (-0.7, 0.0, 0.4, 1.0, 1.25):
        true = sum(q * x ** j for j, q in p.items())
        assert ewif.phi(x, alpha, k) == pytest.approx(true, abs=1e-12)
        # as equation 5 prints it
        assert x + (x - 1) * sum((alpha * x) ** i for i in range(1, k + 1)) == pytest.approx(true)
        if abs(alpha * x - 1) > 1e-9:
            # as Theorem 4.1 prints it, and as equation 6 does: erratum 2
            fraction = (1 - (alpha * x) ** (k + 1)) / (1 - alpha * x)
            assert 1 + (x - 1) * fraction == pytest.approx(true)
            assert x == 1 or x + (x - 1) * fraction != pytest.approx(true, abs=0.1)
    mean = sum(j * q for j, q in p.items())
    assert ewif.ewif_horizontal([alpha] * k, [0.0] * k) == pytest.approx(mean)

@pytest.mark.parametrize("alpha, c, k", [(0.65, 0.01, 9), (0.2, 0.3, 1)])
def test_corollary_4_2_is_glides_expected_speedup(alpha, c, k):
    """By Theorem 4.5 with one drafter."""
    import bench
    closed = (1 - alpha ** (k + 1)) / ((1 - alpha) * (c * k + 1))
    found = bench.expected_speedup(alpha, c, k), ewif.ewif_horizontal([alpha] * k, [c] * k)
    assert found == pytest.approx((closed,) * 2)

def test_plain_decoding_has_factor_one_and_swi_by_hand():
    import bench
    assert ewif.ewif_horizontal([], []) == ewif.ewif_vertical(0.5, 0.5, 0.1, 0.1, 0, 3) == 1
    # 100 tokens by 20 runs of the target, 60 of a drafter of 1/10 of its cost, 200 of one of 1/100
    assert bench.swi(100, [20, 60, 200], [1, 0.1, 0.01]) == pytest.approx(100 / 28)

# ---- Theorem 4.3, Corollary 4.4
VERTICAL = [(0.7, 0.8, 0.1, 0.01, 2, 3), (0.95, 0.7, 0.02, 0.001, 5, 5),
            (1.0, 0.6, 0.1, 0.01, 3, 2), (0.8, 0.0, 0.1, 0.01, 3, 4)]

@pytest.mark.parametrize("alpha, inner, c1, c2, n, k", VERTICAL)
def test_theorem_4_3_is_the_sum_over_the_drafts_length(alpha, inner, c1, c2, n, k):
    """The n-fold convolution of equation 3, and the expected tokens of a draft of that length."""
    value, seconds = ewif.ewif_vertical(alpha, inner, c1, c2, n, k), 1 + n * (c1 + k * c2)
    lengths = np.array([1.0])
    for _ in range(n):
        lengths = np.convolve(lengths, [0.0] + list(probabilities(inner, k).values()))
    exact = sum(p * sum(alpha ** i for i in range(j + 1)) for j, p in enumerate(lengths))
    assert value == pytest.approx(exact / seconds)
    if alpha < 1:                                               # equation 2 as printed
        printed = (1 - alpha * ewif.phi(alpha, inner, k) ** n) / ((1 - alpha) * seconds)
        assert value == pytest.approx(printed)

def test_corollary_4_4():
    grid = product((0.05, 0.4, 0.99), (0.05, 0.95), (1, 8), (1, 10), (0.01, 0.2))
    for alpha, inner, n, k, c1 in grid:
        assert ewif.phi(alpha, inner, k) < alpha
        alone = ewif.ewif_horizontal([alpha] * n, [c1] * n)
        assert ewif.ewif_vertical(alpha, inner, c1, 0.0, n, k) > alone

# ---- Theorem 4.5, Table 1 (its printed values: test_paper.py)
ALPHAS, COSTS = [0.8, 0.8, 0.55, 0.3, 0.9], [0.1, 0.1, 0.02, 0.0, 0.3]

def test_theorem_4_5_is_the_sum_over_the_first_rejected_token():
    rejected = [(prod(ALPHAS[:j]) * (1 - alpha), j + 1) for j, alpha in enumerate(ALPHAS)]
    tokens = sum(p * n for p, n in rejected) + prod(ALPHAS) * (len(ALPHAS) + 1)
    assert ewif.ewif_horizontal(ALPHAS, COSTS) == pytest.approx(tokens / (1 + sum(COSTS)))

def test_table_1s_k_are_the_best_but_in_its_third_row():
    costs = {name: weights / ewif.XXL for name, weights in ewif.WEIGHTS.items()}
    for row, (data, counts) in zip(ewif.table_1(), ewif.TABLE_1):
        values = {}
        for ks in product(range(16), repeat=len(counts)):
            values[ks] = ewif.ewif_of(dict(zip(counts, ks)), ewif.ALPHAS[data], costs)
        third = row["drafter"] == "CNN/DM (base, small)"
        assert max(values, key=values.get) == ((5, 5) if third else tuple(counts.values()))
