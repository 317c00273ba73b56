"""Cascade's section 4 (figures/ewif.py) and its SWI: each formula against a simulation of its process, or a plain sum."""
from itertools import product

import ewif
import numpy as np
import pytest

from runtime import measure as clock

SIGMAS = 4
TRIALS = 50_000

def near(samples, expected):
    """The mean of the samples is the expected one, up to 4 sigma of its own noise."""
    return abs(samples.mean() - expected) <= SIGMAS * samples.std() / len(samples) ** 0.5 + 1e-9

def round_tokens(rng, alpha, k):
    """One round: k coins each, the heads before the first tail, and the reviewer's own token -> (TRIALS,)"""
    heads = rng.random((TRIALS, k)) < alpha
    return np.cumprod(heads, axis=1).sum(1) + 1

def probabilities(alpha, k):
    """Equation 3: {tokens: probability}."""
    return {i + 1: alpha ** i * (1 - alpha) for i in range(k)} | {k + 1: alpha ** k}

# ---- Theorem 4.1, Corollary 4.2
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("k", [0, 1, 6])
def test_phi_is_the_generating_function_of_equation_3(alpha, k):
    p = probabilities(alpha, k)
    assert ewif.phi(1.0, alpha, k) == pytest.approx(1)
    # 1.25 with alpha 0.8: alpha x = 1, where the closed form divides by 0
    for x in (-0.7, 0.0, 0.4, 1.0, 1.25):
        true = sum(q * x ** j for j, q in p.items())
        assert ewif.phi(x, alpha, k) == pytest.approx(true, abs=1e-12)
        if abs(alpha * x - 1) > 1e-9:                           # the closed form as Theorem 4.1 prints it, not equation 6
            series = (x - 1) * (1 - (alpha * x) ** (k + 1)) / (1 - alpha * x)
            assert 1 + series == pytest.approx(true) and (x == 1 or x + series != pytest.approx(true, abs=0.1))
    assert ewif.ewif_speculative(alpha, 0.0, k) == pytest.approx(sum(j * q for j, q in p.items()))

@pytest.mark.parametrize("alpha, c, k", [(0.65, 0.01, 9), (0.2, 0.3, 1)])
def test_corollary_4_2_is_glides_expected_speedup(alpha, c, k):
    """And Theorem 4.5 with one drafter."""
    closed = (1 - alpha ** (k + 1)) / ((1 - alpha) * (c * k + 1))
    found = ewif.ewif_speculative(alpha, c, k), clock.expected_speedup(alpha, c, k), ewif.ewif_horizontal([alpha] * k, [c] * k)
    assert found == pytest.approx((closed,) * 3)

def test_plain_decoding_has_factor_one_and_swi_by_hand():
    assert ewif.ewif_speculative(0.5, 0.1, 0) == ewif.ewif_horizontal([], []) == ewif.ewif_vertical(0.5, 0.5, 0.1, 0.1, 0, 3) == 1
    assert clock.swi(37, [37], [1]) == 1
    # 100 tokens by 20 runs of the target, 60 of a drafter at 1/10 and 200 of one at 1/100 of its cost, or at none
    assert clock.swi(100, [20, 60, 200], [1, 0.1, 0.01]) == pytest.approx(100 / 28)
    assert clock.swi(100, [20, 60, 200], [1, 0.1, 0]) == pytest.approx(100 / 26)

# ---- Theorem 4.3, Corollary 4.4
#            alpha, alpha', c1, c2, n, k
VERTICAL = [(0.7, 0.8, 0.1, 0.01, 2, 3), (0.95, 0.7, 0.02, 0.001, 5, 5), (1.0, 0.6, 0.1, 0.01, 3, 2), (0.8, 0.0, 0.1, 0.01, 3, 4)]

@pytest.mark.parametrize("alpha, inner, c1, c2, n, k", VERTICAL)
def test_theorem_4_3_is_the_sum_over_the_drafts_length(alpha, inner, c1, c2, n, k):
    """The n-fold convolution of equation 3, and Leviathan et al.'s expectation for a draft of that length."""
    value, seconds = ewif.ewif_vertical(alpha, inner, c1, c2, n, k), 1 + n * (c1 + k * c2)
    lengths = np.array([1.0])
    for _ in range(n):
        lengths = np.convolve(lengths, [0.0] + list(probabilities(inner, k).values()))
    exact = sum(p * sum(alpha ** i for i in range(j + 1)) for j, p in enumerate(lengths))
    assert value == pytest.approx(exact / seconds)
    if alpha < 1:                                               # equation 2 as printed
        printed = (1 - alpha * ewif.phi(alpha, inner, k) ** n) / ((1 - alpha) * (1 + n * c1 + n * k * c2))
        assert value == pytest.approx(printed)

def test_corollary_4_4():
    for alpha, inner, n, k, c1 in product((0.05, 0.4, 0.99), (0.05, 0.5, 0.95), (1, 8), (1, 10), (0.01, 0.2)):
        assert ewif.phi(alpha, inner, k) < alpha
        alone = ewif.ewif_speculative(alpha, c1, n)
        assert ewif.ewif_vertical(alpha, inner, c1, 0.0, n, k) > alone
        # how large c2 may be: where the tokens gained are paid for by the time of n k drafts, and not beyond
        gain = ewif.ewif_vertical(alpha, inner, 0.0, 0.0, n, k) / ewif.ewif_speculative(alpha, 0.0, n)
        limit = (gain - 1) * (1 + n * c1) / (n * k)
        assert ewif.ewif_vertical(alpha, inner, c1, 0.99 * limit, n, k) > alone > ewif.ewif_vertical(alpha, inner, c1, 1.01 * limit, n, k)

# ---- Theorem 4.5, Corollary 4.6, Table 1 (its printed values: test_paper.py)
def test_table_1s_k_are_the_best_but_in_its_third_row():
    costs = {name: weights / ewif.XXL for name, weights in ewif.WEIGHTS.items()}
    for row, (data, counts) in zip(ewif.table_1(), ewif.TABLE_1):
        every = [dict(zip(counts, ks)) for ks in product(range(16), repeat=len(counts))]
        best = max(every, key=lambda ks: ewif.ewif_of(ks, ewif.ALPHAS[data], costs))                         # noqa: B023
        assert list(best.values()) == ([5, 5] if row["drafter"] == "CNN/DM (base, small)" else list(counts.values()))

@pytest.mark.parametrize("a1, c1, k1, a2, c2, k2", [(0.8, 0.1, 3, 0.5, 0.01, 4), (0.95, 0.2, 1, 0.9, 0.0, 10)])
def test_theorem_4_5_is_what_a_simulation_gives(a1, c1, k1, a2, c2, k2):
    rng = np.random.default_rng(5)
    first, second = round_tokens(rng, a1, k1) - 1, round_tokens(rng, a2, k2) - 1
    # the cheaper drafter's tokens count where all before them do
    accepted = first + np.where(first == k1, second, 0)
    value = ewif.ewif_horizontal([a1] * k1 + [a2] * k2, [c1] * k1 + [c2] * k2)
    assert near((accepted + 1) / (1 + k1 * c1 + k2 * c2), value)

@pytest.mark.parametrize("k", [1, 6])
def test_corollary_4_6_is_the_derivative(k):
    rng = np.random.default_rng(k)
    alphas, costs = rng.uniform(0.1, 0.9, k).tolist(), rng.uniform(0, 0.2, k).tolist()
    h = 1e-5
    for l in range(1, k + 1):
        up, down = list(alphas), list(alphas)
        up[l - 1], down[l - 1] = alphas[l - 1] + h, alphas[l - 1] - h
        slope = (ewif.ewif_horizontal(up, costs) - ewif.ewif_horizontal(down, costs)) / (2 * h)
        assert ewif.d_ewif_horizontal(l, alphas, costs) == pytest.approx(slope, rel=1e-7)
    first, alphas[0] = ewif.d_ewif_horizontal(1, alphas, costs), 0.0
    assert ewif.d_ewif_horizontal(1, alphas, costs) == pytest.approx(first), "nothing is divided by alpha_l"
