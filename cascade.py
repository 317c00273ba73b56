"""Cascade speculative drafting: every drafter but the last reviews what smaller ones drafted.

Cascade Speculative Drafting (arXiv 2312.11462): Algorithm 1, sections 3 to 5, Tables 1 to 3.

The idea.  Speculative decoding spends most of its drafting on the autoregressive runs of the small model.  The *vertical*
cascade gives each neural drafter a smaller one to review instead, down to Max-Gram, which costs nothing.  The *horizontal*
cascade lets the largest drafter write the first tokens of a proposal, which will most likely be accepted, and smaller ones
the later tokens.  Together they are one recursion: `Cascade.draft` (horizontal) and `Cascade.step` (vertical).

    paper                     shape        name here
    M_t                                    the target: verify.generate's, not part of the Cascade
    M_d1 ... M_dn             n stages     Cascade.stages, largest first; Max-Gram is the last one, if any
    K_nn                      (n, n)       K[r][c]: tokens that stage c adds before reviewer r reads; r = 0: the target,
                                           r = i: stage i - 1.  Upper triangular; lower bounds: a review may add more
    k11, k12, k22 (Table 2)   n(n+1)/2     table2(...): row by row, cumulative: 8, 13, 1 is [[8, 5, 10], [0, 1, 10], [0, 0, 10]]
    l                         float        lenience: inner reviews only, never of Max-Gram's drafts, never the target's
    curGen, curProbs          m Drafts     gen: token, and the distribution it was last reviewed or drawn with

The reviews are verify.accept and verify.accept_drawn, as the target's.  Each neural stage is a verify.Target, whose own KV
cache is rolled back to the common prefix and never recomputed.

Where p_draft is true.  A drawn chain (`--tree drawn`: chain() with a generator) keeps a true p_draft: a reviewed token follows
its last reviewer's distribution exactly, since an inner review is speculative sampling too; one of Max-Gram's is drawn from a
distribution that is certain of it.  Lenience above 1 breaks the first, so there the chain, like every greedy one, is
deterministic candidates (p_draft None), accepted where the target's own draw agrees.  Both are lossless.

Differences from the paper:
 1. Algorithm 1's base case takes the first element of an empty list; the model that it means is the smallest.  Here the
    smallest stage is one like all others with nothing to review: Max-Gram proposes, a neural one writes a token (S Decoding).
 2. curPrefix <- curGen inside the while resets the count, so that the loop would ask for k_i tokens in one step; here the
    tokens that stage i has added so far are counted.
 3. A row of K unpacks n - 1 values, but the loop runs n times; p_s ... p_v are appended where p_1 ... p_v is printed; section
    5.2's k21 is k22.
 4. Table 2's k12 is cumulative and Table 1's k2 a count; K here is Algorithm 1's.
 5. Max-Gram's column asks for 10 tokens at most once for each visit: where it finds fewer (or none) it is not asked again.
 6. "Lenience above 1" compares probabilities at temperature 1 (greedy): M_d(x) <= l M_r(x) keeps x though r's argmax differs.
 7. In a tree (cape, pct), which asks for distributions, the chain is greedy, and off it there is nothing to say: rows of zeros.

    python cascade.py          # the demo: a cascade of three random models is lossless, and what its runs make of SWI
    python bench.py --drafter cascade --tree chain --models base small maxgram --k 8 13 1 --lenience 3
"""
from collections import namedtuple

import torch

from maxgram import MaxGram
from verify import Target, Tree, UserError, accept, accept_drawn

GRAM = 10                       # tokens that Max-Gram proposes at once (section 5.2)
HORIZON = 64                    # longest chain of which a tree is asked for distributions
# One drafted token.  row: (V,) distribution (drawn) or logits (greedy) of the model that reviewed it last; None: Max-Gram's, and
# then `match` is the length of the matching suffix it came from.
Draft = namedtuple("Draft", "token row match")


# ---------------------------------------------------------------- the matrix K
def table2(k, neural, gram):
    """Table 2's k11, k12, k22 ... -> K as Algorithm 1 takes it.  neural: stages that are models; gram: whether Max-Gram is last.

    Row by row, cumulative within a row; Max-Gram's column is 10.
    """
    if neural < 1:
        return [[GRAM]]
    if len(k) != neural * (neural + 1) // 2:
        raise UserError(f"--k {' '.join(map(str, k))}: {neural} neural stage(s) take {neural * (neural + 1) // 2} number(s), Table 2's "
                        "k11, or k11 k12 k22, row by row")
    n, K, k = neural + gram, [], list(k)
    for r in range(neural):
        row = k[:neural - r]
        del k[:neural - r]
        K.append([0] * r + [b - a for a, b in zip([0] + row, row)] + [GRAM] * gram)
    return checked(K + [[0] * neural + [GRAM]] * gram, n)


def default_k(neural):
    """Table 2's smallest tuned row (5, 9, 1), and its kind for any number of models."""
    return [5 + 4 * i for i in range(neural)] + [1 + i for r in range(1, neural) for i in range(neural - r)]


def checked(K, n):
    """K if it is an upper triangular n x n matrix of counts, else UserError."""
    if len(K) != n or any(len(row) != n for row in K):
        raise UserError(f"K is {len(K)} x {max(map(len, K), default=0)}: {n} stages take a matrix of {n} x {n}")
    if any(K[r][c] for r in range(n) for c in range(r)):
        raise UserError(f"K {K} is not upper triangular: a stage reviews smaller ones only")
    if any(x < 0 for row in K for x in row) or sum(K[0]) < 1:
        raise UserError(f"K {K}: every entry must be at least 0, and the target must be given something (Table 2's k in a row never falls)")
    return K


# ---------------------------------------------------------------- analysis (section 4)
def geometric(x, k):
    """1 + x + ... + x^k: the paper's (1 - x^{k+1}) / (1 - x), which has no value at x = 1 (a drafter that is never wrong)."""
    return sum(x ** i for i in range(k + 1))


def phi(x, alpha, k):
    """Theorem 4.1: the probability generating function of the tokens that one speculative round yields.

    alpha: probability that a drafted token is accepted, given that those before it were; k: drafted tokens a round.  The
    coefficient of x^j is the probability of j tokens, the reviewer's own included, so j = 1 .. k + 1.
    Erratum: Appendix C.1 ends (equation 6) with x + ..., where its own equation 5 and Theorem 4.1 give 1 + ...
    """
    assert k >= 0 and 0 <= alpha <= 1, f"k {k} or alpha {alpha} out of range"
    # phi(x) = 1 + (x - 1) (1 - alpha^{k+1} x^{k+1}) / (1 - alpha x)
    return 1 + (x - 1) * geometric(alpha * x, k)


def ewif_speculative(alpha, c, k):
    """Corollary 4.2: expected walltime improvement factor (over plain decoding) of one drafter that drafts k tokens a round.

    alpha = alpha(M_t, M_d); c = c(M_t, M_d): one run of the drafter over one of the target.
    Erratum: the corollary prints phi(1), which is 1 for any distribution; its value is that of phi'(1), the expected tokens.
    """
    assert k >= 0 and 0 <= alpha <= 1 and c >= 0, f"k {k}, alpha {alpha} or c {c} out of range"
    # phi'(1) / (ck + 1) = (1 - alpha^{k+1}) / ((1 - alpha) (ck + 1))
    return geometric(alpha, k) / (c * k + 1)


def ewif_vertical(alpha, alpha_inner, c1, c2, n, k):
    """Theorem 4.3: M_d2 drafts k tokens and M_d1 reviews them; after n such rounds M_t reviews all that came out of them.

    alpha = alpha(M_t, M_d1); alpha_inner = alpha' = alpha(M_d1, M_d2); c1, c2: one run of M_d1, of M_d2 over one of M_t.
    phi^n is a power (n rounds one after the other), not a composition; n is fixed here, where Algorithm 1 counts tokens.
    Corollary 4.4: phi(alpha) < alpha for 0 < alpha, alpha' < 1 and k > 0, so with c2 = 0 this beats M_d1 alone at k = n.

    Errata: alpha is printed alpha(M_t, M_d), without the 1; the proof of Corollary 4.4 says
    (1 - (alpha alpha')^{k+1}) / (1 - alpha alpha') < 1, and needs > 1, which is true.
    Unsaid: M_t's review must be independent of M_d1's.  Where they agree more often than by chance the theorem gives too little,
    where less often too much; it is exact again with alpha_inner = P(both accept what M_d2 drafted) / alpha.
    """
    assert n >= 0 and k >= 0, f"n {n} or k {k} out of range"
    assert 0 <= alpha <= 1 and 0 <= alpha_inner <= 1 and c1 >= 0 and c2 >= 0, f"{alpha}, {alpha_inner}, {c1} or {c2} out of range"
    # 1 - phi(alpha) = (1 - alpha) ratio,  ratio = (1 - (alpha alpha')^{k+1}) / (1 - alpha alpha'),  so without a division by 1 - alpha:
    # (1 - alpha phi^n(alpha)) / (1 - alpha) = 1 + alpha (1 - phi^n(alpha)) / (1 - alpha) = 1 + alpha ratio (1 + phi + ... + phi^{n-1})
    tokens = 1 + alpha * geometric(alpha * alpha_inner, k) * geometric(phi(alpha, alpha_inner, k), n - 1)
    return tokens / (1 + n * c1 + n * k * c2)


def ewif_horizontal(alphas, costs):
    """Theorem 4.5: T(k, alpha_1 .. alpha_k, c_1 .. c_k), where the i-th token is drafted by a model of its own.

    alphas[i-1] = alpha(M_t, M_i) and costs[i-1] = c(M_t, M_i), M_i being the drafter of the i-th token.
    Table 1's k_1 and k_2 are how many tokens each drafter adds (5 and 3 make k = 8), its costs ratios of parameters.
    Erratum: the k of its third row are not the best ones (5 and 5 give more; the other rows' are).
    """
    assert len(alphas) == len(costs), f"{len(alphas)} alphas for {len(costs)} costs"
    # sum_{i=0}^k prod_{j=1}^i alpha_j / (1 + sum_{i=1}^k c_i)
    tokens, accepted = 1.0, 1.0
    for alpha in alphas:
        accepted *= alpha                       # Corollary 4.6: the probability that the i-th token is accepted
        tokens += accepted
    return tokens / (1 + sum(costs))


def d_ewif_horizontal(l, alphas, costs):
    """Corollary 4.6: dT / d alpha_l, l from 1 to k: what a better drafter of the l-th token is worth, at the same cost."""
    assert len(alphas) == len(costs) and 1 <= l <= len(alphas), f"l {l} is not one of {len(alphas)} positions, or costs are missing"
    # sum_{i=l}^k prod_{j=1, j != l}^i alpha_j / (1 + sum_{i=1}^k c_i)
    total, product = 0.0, 1.0
    for i, alpha in enumerate(alphas, 1):
        product *= 1.0 if i == l else alpha
        total += product if i >= l else 0.0
    return total / (1 + sum(costs))


def swi(tokens, runs, costs):
    """Section 5.1: standardized walltime improvement, tokens over standardized time (not over the target's runs: that is tau).

    tokens = n, all that were generated; runs[0] = count(S, M_t, T), runs[i] = count(S, M_di, T); costs[i] = c_i: one run of
    M_di over one of M_t, so costs[0] = 1 (a statistical model's c is 0).  Plain decoding, n runs of the target, has SWI 1.
    Erratum: "simply the sum of GPU time by all models" describes the denominator.
    """
    assert len(runs) == len(costs) and costs[0] == 1, f"one cost per model, the target's (1) first: {len(runs)} runs, costs {costs}"
    # n / (count(S, M_t, T) + sum_i count(S, M_di, T) c_i)
    return tokens / sum(count * c for count, c in zip(runs, costs))


# ---------------------------------------------------------------- the cascade
class Cascade:
    """A sequence drafter for verify.generate: see there for the protocol."""
    needs = {}

    def __init__(self, models, K=None, lenience=1.0, gram=None, capacity=None, vocab=None):
        """models: small causal (or encoder-decoder) LMs of Hugging Face with the target's vocabulary, largest first.

        K: Algorithm 1's matrix (see table2).  gram: a maxgram.MaxGram as the last stage, or None.  vocab: the width of rows,
        needed where there is no model.
        """
        if not models and gram is None:
            raise UserError("a cascade without any stage drafts nothing: name --models")
        if not lenience >= 1:
            raise UserError(f"lenience is {lenience}: it must be at least 1, which is none")
        self.stages, self.gram, self.lenience = [Target(m, capacity) for m in models], gram, lenience
        self.n = len(models) + (gram is not None)
        self.K = checked(K if K is not None else table2(default_k(len(models)), len(models), gram is not None), self.n)
        self.vocab = vocab or self.stages[0].config.vocab_size
        self.reset()

    def reset(self):
        """Forget the sequence."""
        for stage in self.stages:
            stage.reset()
        if self.gram:
            self.gram.reset()
        self.text, self.runs, self.path = [], [0] * self.n, None             # runs: of each stage; Max-Gram's proposals are counted too

    def source(self, ids):
        """An encoder-decoder target's input: every stage's own encoder runs over it once; Max-Gram looks for matches in it."""
        for stage in self.stages:
            stage.encode(ids)
        if self.gram:
            self.gram.commit_source(ids)

    def begin(self, view):
        """A round starts: what the target has committed since the last one joins the text."""
        new = view.tokens.tolist()
        self.text += new
        if self.gram:
            self.gram.commit(new)
        self.path = None                               # of the tree in hand, see expand

    def keep(self, tokens):
        """Nothing to move: stages roll their caches back when they are next asked (Target.sync)."""

    # Algorithm 1, its for and while loops: the horizontal cascade.
    def draft(self, reviewer, gen):
        """Everything that `reviewer` (a row of K; 0: the target) will read, appended to gen, a list of Drafts."""
        for stage in range(reviewer, self.n):
            start = len(gen)
            while (missing := self.K[reviewer][stage] - (len(gen) - start)) > 0 and len(gen) < self.most:
                before = len(gen)
                self.step(stage, gen, missing)
                if len(gen) == before or self.gram and stage == self.n - 1:
                    break

    # Algorithm 1, its recursive call: the vertical cascade.
    def step(self, stage, gen, missing):
        """`stage` adds tokens to gen: Max-Gram `missing` ones at most; a model at least one, by reviewing smaller stages' drafts."""
        self.runs[stage] += 1
        if stage == len(self.stages):
            tokens, matches = self.gram.propose([self.root] + [d.token for d in gen], missing)
            gen += [Draft(token, None, match) for token, match in zip(tokens, matches)]
            return
        first = len(gen)
        self.draft(stage + 1, gen)
        self.review(self.stages[stage], gen, first)

    def review(self, model, gen, first):
        """`model` reads gen[first:] and replaces it by what it accepts, and one token of its own."""
        ids = self.text + [self.root] + [d.token for d in gen]
        drafts = gen[first:]
        del gen[first:]
        if len(ids) > model.capacity:                                        # beyond this model's context it has nothing to say
            return
        logits = model.sync(ids, len(drafts) + 1)                            # (n + 1, V)
        tree = Tree(torch.tensor(ids[len(ids) - len(drafts) - 1:], device=logits.device), torch.arange(-1, len(drafts)),
                    None if self.generator is None else self.rows(drafts, logits.device))
        if self.generator is not None:                                       # speculative sampling: what comes out follows p_reviewer
            rows = self.warp(logits.float())
            _, new = accept_drawn(tree, rows, self.generator)
        else:
            choice = logits.argmax(-1)
            if self.lenience > 1 and drafts:
                choice = self.lenient(drafts, logits, choice)
            rows = logits
            _, new = accept(tree, choice)
        gen += [Draft(token, rows[i], None) for i, token in enumerate(new)]

    def lenient(self, drafts, logits, choice):
        """Greedy lenience: where M_d(x) <= l M_r(x), x is what the reviewer chooses.  Never for Max-Gram's drafts.  -> choice."""
        choice = choice.clone()
        asked = [i for i, d in enumerate(drafts) if d.row is not None]
        if asked:
            x = torch.tensor([drafts[i].token for i in asked], device=logits.device)[:, None]
            p_draft = torch.stack([drafts[i].row for i in asked]).float().softmax(-1).gather(1, x)[:, 0]
            p_reviewer = logits[asked].float().softmax(-1).gather(1, x)[:, 0]
            choice[asked] = torch.where(p_draft <= self.lenience * p_reviewer, x[:, 0], choice[asked])
        return choice

    def rows(self, drafts, device):
        """p_draft of a drawn chain, (n, V): a token of Max-Gram's was drawn from a distribution that is certain of it."""
        p = torch.zeros(len(drafts), self.vocab, device=device)
        for row, d in zip(p, drafts):
            if d.row is None:
                row[d.token] = 1
            else:
                row.copy_(d.row)
        return p

    def chain(self, root, most, warp=None, generator=None):
        """The whole cascade's proposal after the last token `root`, at most `most` tokens -> (tokens [ints], p_draft).

        With a generator the chain is drawn and p_draft (n, V) is the true distribution of each token (see above).
        """
        if generator is not None and self.lenience > 1:
            raise UserError(f"lenience {self.lenience:g} leaves no true distribution to draw from: use --tree chain, or --lenience 1")
        gen, device = self.write(root, most, warp, generator), self.stages[0].device if self.stages else generator and generator.device
        tokens = [d.token for d in gen]
        return tokens, self.rows(gen, device) if generator is not None and gen else None

    def write(self, root, most, warp=None, generator=None):
        """-> list of Drafts"""
        self.root, self.most, self.warp, self.generator = root, most, warp, generator
        gen = []
        self.draft(0, gen)
        return gen[:most]

    def expand(self, tokens, parents):
        """Distributions along the cascade's own greedy chain, each from the model that reviewed the token last; zeros elsewhere."""
        if self.path is None:
            self.path = self.write(tokens[0].item(), HORIZON)
            self.place = []                            # of each node: how far down the chain it is; None: off it
        probs = torch.zeros(len(parents), self.vocab, device=tokens.device)
        for row, token, parent in zip(probs, tokens.tolist(), parents):
            at = 0 if parent < 0 else self.place[parent]
            if parent >= 0 and at is not None:
                at = at + 1 if self.path[at:] and self.path[at].token == token else None
            self.place.append(at)
            if at is not None and at < len(self.path):
                d = self.path[at]
                if d.row is None:
                    row[d.token] = self.gram.confidence_of(d.match)
                else:
                    row.copy_(d.row.float().softmax(-1))
        return probs


# ---------------------------------------------------------------- demo
def main():
    """A target and two smaller relatives of it: S Decoding and two cascades give plain decoding's output, in fewer runs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from verify import generate, no_draft, proposal
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(vocab_size=30, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
                                          num_key_value_heads=4, max_position_embeddings=256)).double().eval()
    for p in target.parameters():
        p.data += 0.1 * torch.randn_like(p) * (p.ndim == 2)

    def relative(noise):
        small = LlamaForCausalLM(target.config).double().eval()
        small.load_state_dict({k: v + noise * torch.randn_like(v) * (v.ndim == 2) for k, v in target.state_dict().items()})
        return small
    base, small, prompt, wrapped = relative(0.01), relative(0.03), list(range(10)), Target(target)
    plain = generate(wrapped, None, no_draft, prompt, 60).tokens
    found = {}
    for name, models, k, gram in (("S Decoding", [base], [5], None), ("base, Max-Gram", [base], [5], MaxGram()),
                                  ("base, small, Max-Gram", [base, small], [5, 9, 1], MaxGram())):
        cascade = Cascade(models, table2(k, len(models), gram is not None), gram=gram)
        out = generate(wrapped, cascade, proposal, prompt, 60)
        assert out.tokens == plain, name
        found[name] = swi(60, [1 + out.rounds, *out.stage_runs], [1, 0.1, 0.03, 0][:1 + len(models)] + [0] * (gram is not None))
        print(f"{name}: lossless; the target ran {1 + out.rounds} times for 60 tokens, the stages {out.stage_runs}; SWI {found[name]:.2f}")
    assert found["base, Max-Gram"] > found["S Decoding"] > 1, "a cascade over Max-Gram saves runs of the drafter"


if __name__ == "__main__":
    main()
