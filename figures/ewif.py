"""How much faster is decoding?  Section 4 of Cascade Speculative Drafting (arXiv 2312.11462).

The expected walltime improvement factor (EWIF) is the expected number of tokens of one round over
its time, if the acceptances of drafted tokens are independent of each other.  The unit of time is
one forward of the target.

    paper                   name here
    alpha(M_t, M_d)         alpha: probability that a drafted token is accepted, given that all
                            tokens before it were
    c(M_t, M_d)             c: one forward of the drafter over one of the target
    k                       k: drafted tokens of a round
    phi_(alpha,k)(x)        phi(x, alpha, k)
    T(k, alpha_1 ...)       ewif_horizontal(alphas, costs)

Errata of the paper:
 1. Corollary 4.2 prints phi(1), which is always 1; the value beside it is that of phi'(1).
 2. Equation 6 (appendix C.1) begins with x + ..., as equation 5 does.  But equation 5 sums from
    i = 1, and the fraction in equation 6 is the sum from i = 0.  So 1 + ... is right, as in
    Theorem 4.1.
 3. Appendix C.2 uses (1 - (alpha alpha')^{k+1}) / (1 - alpha alpha') < 1; the proof needs > 1,
    which is true.
 4. Theorem 4.3 assumes, without saying so, that M_t's review is independent of M_d1's, and that the
    number of inner rounds is fixed, where Algorithm 1 counts tokens.
 5. Table 1's third row is not the best choice of k: 5 and 5 give more than 5 and 3.
"""
# Table 1.  alpha of FLAN-T5-small and -base (Leviathan et al. 2023)
ALPHAS = {"CNN/DM": {"small": 0.65, "base": 0.73}, "EnDe": {"small": 0.75, "base": 0.80}}
# Million parameters, of FLAN-T5-XXL too
WEIGHTS = {"small": 77, "base": 248}
XXL = 11_300
# Data set, {model: how many tokens it drafts}, the largest model first
TABLE_1 = (
    ("CNN/DM", {"small": 9}),
    ("CNN/DM", {"base": 8}),
    ("CNN/DM", {"base": 5, "small": 3}),
    ("EnDe", {"small": 12}),
    ("EnDe", {"base": 11}),
    ("EnDe", {"base": 5, "small": 8}))

# ---------------------------------------------------------------- section 4.1: speculative decoding
def geometric(x, k):
    """1 + x + ... + x^k: the paper's (1 - x^{k+1}) / (1 - x), but defined at x = 1 too."""
    return sum(x ** i for i in range(k + 1))

def phi(x, alpha, k):
    """Theorem 4.1: the probability generating function of the number of tokens in one round.

    The coefficient of x^j is the probability of j tokens.  The reviewer's own token counts, so that
    j = 1 ... k + 1.
    """
    # Equation 1: phi(x) = 1 + (x - 1) (1 - alpha^{k+1} x^{k+1}) / (1 - alpha x)
    return 1 + (x - 1) * geometric(alpha * x, k)

# ---------------------------------------------------------------- section 4.1: vertical cascade
def ewif_vertical(alpha, alpha_inner, c1, c2, n, k):
    """Theorem 4.3: M_d1 reviews k tokens of M_d2, n times; M_t reviews all that came of it.

    alpha = alpha(M_t, M_d1); alpha_inner = alpha' = alpha(M_d1, M_d2); c1, c2: one forward of M_d1,
    of M_d2, over one of M_t.  phi^n in the paper is a power.

    Where the two reviews depend on each other (erratum 4) the theorem is exact again with
    alpha_inner = P(both M_d1 and M_t accept M_d2's token) / alpha.

    Corollary 4.4: phi(alpha) < alpha for 0 < alpha, alpha' < 1 and k > 0.  So with c2 = 0 this is
    more than M_d1 alone gives.
    """
    # Equation 2: (1 - alpha phi^n(alpha)) / ((1 - alpha) (1 + n c1 + n k c2))
    # At alpha = 1 that is 0 / 0, so 1 - alpha is divided out first:
    #     1 - phi(alpha) = (1 - alpha) g      with g = 1 + alpha alpha' + ... + (alpha alpha')^k
    #     1 - phi^n      = (1 - phi) h        with h = 1 + phi + ... + phi^{n-1}
    #     (1 - alpha phi^n) / (1 - alpha) = 1 + alpha (1 - phi^n) / (1 - alpha) = 1 + alpha g h
    g = geometric(alpha * alpha_inner, k)
    h = geometric(phi(alpha, alpha_inner, k), n - 1)
    tokens = 1 + alpha * g * h
    return tokens / (1 + n * c1 + n * k * c2)

# ---------------------------------------------------------------- section 4.2: horizontal cascade
def ewif_horizontal(alphas, costs):
    """Theorem 4.5: the i-th token is drafted by a model M_i of its own.

    alphas[i - 1] = alpha(M_t, M_i); costs[i - 1] = c(M_t, M_i).
    """
    # T = (sum_{i=0}^k prod_{j=1}^i alpha_j) / (1 + sum_{i=1}^k c_i)
    tokens = 1
    accepted = 1
    for alpha in alphas:
        accepted *= alpha          # Corollary 4.6: the probability that token i is accepted
        tokens += accepted
    return tokens / (1 + sum(costs))

def ewif_of(counts, alphas, costs):
    """Theorem 4.5.  counts: {model: tokens that it drafts}, in order; alphas, costs: {model: x}."""
    writers = []
    for name, count in counts.items():
        writers += [name] * count
    return ewif_horizontal([alphas[name] for name in writers], [costs[name] for name in writers])

# ---------------------------------------------------------------- Table 1
def table_1():
    """-> rows of Table 1; k1, k2: tokens that the first, the second model drafts."""
    costs = {name: weights / XXL for name, weights in WEIGHTS.items()}
    rows = []
    for data, counts in TABLE_1:
        models = ", ".join(counts)
        k1, k2 = [*counts.values(), None][:2]
        value = ewif_of(counts, ALPHAS[data], costs)
        rows.append({"drafter": f"{data} ({models})", "k1": k1, "k2": k2, "ewif": value})
    return rows
