"""Cascade speculative drafting: every drafter but the smallest reviews what smaller ones drafted.

Cascade Speculative Drafting (arXiv 2312.11462): Algorithm 1, sections 3 to 5, Tables 1 to 3.

The idea.  Speculative decoding spends its drafting time on autoregressive runs of the small model.  The
*vertical* cascade gives each neural drafter a smaller one to review, down to Max-Gram, which costs nothing.
The *horizontal* cascade lets the largest drafter write the first tokens of a proposal, which will most likely
be accepted, and smaller ones the later tokens.  Together they are one recursion, cascade_step().

    paper                     shape    name here
    M_t; draftList: M_d1 ...           target; draft_list, largest first, Max-Gram (MaG) the last, if any
    curGen, curProbs          tokens   gen.tokens, gen.probs; prefix and cur_prefix are lengths of gen
    curTarget, curK ...                cur_target, cur_draft_list, cur_k, is_first_call
    K_nn, k_i                 (n, n)   K, k_i.  K[r][c]: tokens that stage c adds before reviewer r reads;
                                       r = 0 is M_t, r = i is M_di.  Upper triangular
    k11, k12, k22 (Table 2)            table2(), cumulative: 8, 13, 1 is [[8, 5, 10], [0, 1, 10], [0, 0, 10]]
    l                         float    lenience: of inner reviews, never of Max-Gram's drafts, never M_t's

To use it alone, with verify.py and maxgram.py beside this file, three causal LMs with one tokenizer and a
list of token ids `text`:

    target, *stages = [verify.Target(model) for model in (large, base, small)]
    drafter = cascade.Cascade(stages, gram=maxgram.MaxGram())
    out = verify.generate(target, drafter, cascade.proposal, text, max_new_tokens=40)
    text += out.tokens

proposal() writes a greedy chain at any temperature: deterministic candidates for the target's own choice.
proposal(drawn=True), for verify.Sampled, draws it (`--tree drawn`): an inner review is speculative sampling
too, with lenience or not, and leaves beside each token its p_draft.  Max-Gram is certain of its own tokens.
Both are lossless.  Trees (cape) see the greedy chain's distributions, and end where lenience kept another.

Differences from the paper:
 1. Algorithm 1's base case takes an element of an empty list.  Here it is Max-Gram, asked once for its k
    tokens; or, in S Decoding, a model with nothing to review, which writes one token.
 2. When has a stage added enough?  As printed, curPrefix <- curGen inside the while restarts the count, so
    that one review would have to add k_i tokens.  Here all that it has added since its turn came counts.  The
    authors' code (stop="sum") compares all that was added in this call with the sum of the k so far: what a
    stage adds beyond its k, the next one need not add; Max-Gram, if asked at all, proposes its full 10.
 3. Misprints: n - 1 values of k for n loops; p_1 ... p_v for the new ones; section 5.2's k21 is k22.
    Table 2 does not say that k12 is cumulative; the authors' code does.
 4. No chain is longer than the output has room for, and where a stage's context ends smaller ones go on.
 5. Lenience compares two probabilities of one token; the authors' code (greedy only) takes the wrong row.

    python cascade.py          # the demo: cascades of random models are lossless; the SWI of their runs
    python bench.py --drafter "cascade(base, small, maxgram, k=(8, 13, 1), lenience=3)" --tree chain
"""
import math
from collections import Counter
from functools import partial

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from maxgram import MaxGram
from verify import (
    CHUNK, StepCache, Target, Tree, UserError, accept, accept_drawn, generate, root_only)

GRAM = 10                       # tokens that Max-Gram proposes at once (section 5.2)
HORIZON = 64                    # longest chain of which a tree is asked for distributions

# ---------------------------------------------------------------- Algorithm 1
class Gen:
    """curGen and curProbs: `settled` tokens that the target has committed, the root, then drafts.

    probs, of each token: None where it is settled (Algorithm 1 has ones); the row (V,) of the model that
    wrote or reviewed it last, a distribution (drawn) or logits (greedy); a float, Max-Gram's confidence.
    """
    def __init__(self, stop="own"):
        self.tokens, self.probs = [], []
        self.settled, self.device = 0, None                      # device: the target's
        self.stop = stop                                         # difference 2
        self.runs, self.same = Counter(), {}     # of each stage; same: tokens unchanged since its last run

    def __len__(self):
        return len(self.tokens)

    def replace(self, first, tokens, probs):
        """Put these tokens, and as many probs, in the place of all from `first` on."""
        self.tokens[first:] = tokens
        self.probs[first:] = probs
        for stage in self.same:
            self.same[stage] = min(self.same[stage], first)

    def read_by(self, stage, rows):
        """A stage reads the text -> logits (rows, V) after its last `rows` tokens, where the target is."""
        self.runs[stage] += 1
        # It need not search for the first difference from 0: texts are long.
        same = self.same.get(stage, 0)
        self.same[stage] = len(self)
        return stage.sync(self.tokens, rows, same).to(self.device)

def cascade_step(target, draft_list, K, gen, limit, review, is_first_call=True):
    """Algorithm 1, CascadeSpeculativeDraftingStep: `target` adds to gen, by reviewing what draft_list drafts.

    target: a verify.Target, not asked at the first call.  draft_list: n of them, of which the last may be a
    MaxGram.  K: n rows of n counts.  gen: a Gen, of at most `limit` tokens afterwards.  review(logits, gen,
    first) puts what is accepted of gen's drafts from `first` on, and a token of target's own, in their place.

    A trace with K = [[2, 2], [0, 3]].  base continues abcdefg..., and so does small, but with x after f:

        call                       gen        what happened
        step(M_t, [base, small])   a          i = 1: base is to add k_1 = 2 tokens
          step(base, [small])      a          i = 1: small is to add k_1 = 3 tokens, with nothing to review
            step(small, [])        ab         and twice more: abc, abcd
            base reviews           abcde      it accepts bcd and adds e: 4 tokens, 2 more than it had to
          step(small, [])          abcdef     i = 2: small is to add k_2 = 2 tokens: once more, abcdefx
        M_t reviews                abcdefg    verify.generate's part: it accepts bcdef and adds g
    """
    # curGen <- prefix
    prefix = len(gen)
    # Perform the horizontal cascade with the for loop.
    for i, cur_target in enumerate(draft_list):
        # [k_1 ... k_n] <- first row of K
        k_i = K[0][i]
        cur_prefix = len(gen)
        enough = cur_prefix + k_i if gen.stop == "own" else prefix + sum(K[0][:i + 1])
        # Generate using MaG for the base case of the recursive call.
        if isinstance(cur_target, MaxGram):
            if cur_prefix < enough:
                propose(cur_target, gen, min(k_i, limit - cur_prefix))
            break
        # Prepare the arguments for the next recursive call.
        cur_draft_list = draft_list[i + 1:]
        cur_k = [row[i + 1:] for row in K[i + 1:]]
        # It adds a token to what it reads, and reads no more than its context.
        cur_limit = min(limit - 1, cur_target.capacity)
        while len(gen) < enough and len(gen) <= cur_limit:
            # Perform the vertical cascade with the recursive call.
            cascade_step(cur_target, cur_draft_list, cur_k, gen, cur_limit, review, is_first_call=False)
    # Use M_t to review the draft generation.  At the first call, without lenience, verify.generate does it.
    if not is_first_call:
        logits = gen.read_by(target, len(gen) - prefix + 1)      # for each draft and the token after them
        review(logits, gen, prefix)

def propose(max_gram, gen, most):
    """Max-Gram adds up to `most` tokens.  It costs nothing, but is counted as runs are."""
    if most > 0:
        gen.runs[max_gram] += 1
        draft = gen.tokens[gen.settled:]
        tokens, lengths = max_gram.propose(draft, most)
        gen.replace(len(gen), tokens, map(max_gram.confidence_of, lengths))

# ---------------------------------------------------------------- the three reviews
def keep_chosen(gen, first, choice, rows):
    """Accept drafts while they are the reviewer's choice, a list (n + 1,); then its choice after them."""
    chain = gen.tokens[first - 1:]                               # the last token read, then the drafts
    _, new = accept(chain, range(-1, len(chain) - 1), choice)
    gen.replace(first, new, rows[:len(new)])

def review_greedy(logits, gen, first):
    """Keep x_i where argmax M_r(x)[i] = x_i."""
    keep_chosen(gen, first, logits.argmax(-1).tolist(), logits)

def review_lenient(logits, gen, first, lenience):
    """Greedy, with lenience l (section 3.1): keep x_i also where M_d(x)[i] <= l M_r(x)[i]."""
    p_reviewer = logits.float().softmax(-1)                      # (n + 1, V)
    choice = logits.argmax(-1)                                   # (n + 1,)
    drafts, rows = gen.tokens[first:], gen.probs[first:]
    for i, x in enumerate(drafts):
        # Never for Max-Gram's drafts (section 5.2), which have no row.
        if torch.is_tensor(rows[i]):
            p_draft = rows[i].float().softmax(-1)                # (V,)
            kept = p_draft[x] <= lenience * p_reviewer[i, x]
            choice[i] = torch.where(kept, x, choice[i])
    keep_chosen(gen, first, choice.tolist(), logits)

def review_drawn(logits, gen, first, warp, lenience, generator):
    """Speculative sampling (section 2), with lenience l (section 3.1); a token follows the row beside it."""
    rows = warp(logits)                                          # (n + 1, V)
    p_draft = distributions(gen, first, rows)                    # (n, V)
    if lenience > 1:
        # Never for Max-Gram's drafts (section 5.2).
        l = [lenience if torch.is_tensor(p) else 1.0 for p in gen.probs[first:]]
        l = torch.tensor(l, device=rows.device)                  # (n,)
        rows[:-1] = lenient_distribution(rows[:-1], p_draft, l[:, None])
    chain = torch.tensor(gen.tokens[first - 1:], device=rows.device)         # (n + 1,)
    parents = torch.arange(-1, len(chain) - 1, device=rows.device)
    choice = accept_drawn(Tree(chain, parents, p_draft), rows, generator)    # (n + 1,)
    keep_chosen(gen, first, choice.tolist(), rows)

def lenient_distribution(p_reviewer, p_draft, l):
    """The distribution q' of a token that is drawn, then reviewed with lenience.  All (n, V); l (n, 1).

    Section 3.1: x, drawn from q = p_draft, is accepted with probability min(1, l p(x) / q(x)); p: p_reviewer.
    After a rejection the token is drawn from norm(max(0, p - q)).  So x comes out with probability
        q'(x) = min(q(x), l p(x)) + (1 - sum_y min(q(y), l p(y))) norm(max(0, p - q))(x).
    Speculative sampling towards q' is the same rule, which is how it is drawn: where p > q, q' >= q, so x is
    accepted, and q' - q is a multiple of p - q; elsewhere q' / q = min(1, l p / q), and q' <= q.
    """
    # min(q, l p)
    accepted = torch.minimum(p_draft, l * p_reviewer)            # (n, V)
    # 1 - sum min(q, l p), which rounding may make negative
    rejected = (1 - accepted.sum(-1, keepdim=True)).clamp(min=0)             # (n, 1)
    # norm(max(0, p - q)); where p = q there is nothing left, and nothing was rejected
    left = (p_reviewer - p_draft).clamp(min=0)                   # (n, V)
    left = left / left.sum(-1, keepdim=True).clamp(min=1e-30)
    return accepted + rejected * left

def distributions(gen, first, like):
    """p_draft (n, V) of gen's drafts: Max-Gram's were drawn from a distribution that is certain of them."""
    p_draft = like.new_zeros(len(gen) - first, like.shape[-1])
    for row, token, p in zip(p_draft, gen.tokens[first:], gen.probs[first:]):
        if torch.is_tensor(p):
            row.copy_(p)
        else:
            row[token] = 1
    return p_draft

# ---------------------------------------------------------------- encoder and decoder
class EncoderDecoder(Target):
    """An encoder-decoder target or stage, such as FLAN-T5 (section 5.2), for chains."""
    encoder_decoder, verifies_trees = True, False

    def remaining(self, ids):
        """The prompt takes no position of the decoder, but its start token takes one."""
        return self.capacity

    def prefill(self, ids, new_tokens=0):
        """Read the prompt, and show it to the drafter -> logits (V,) of the first token."""
        self.encode(ids)
        show = self.needs.get("source")
        if show:
            show(ids)
        self.cache.reserve(1 + new_tokens + CHUNK)
        start = self.model.generation_config.decoder_start_token_id
        return self.sync([start])[-1]

    def encode(self, ids):
        """Run the encoder over ids (list); the decoder's cache is emptied."""
        self.reset()
        ids = torch.tensor([ids], device=self.device)
        encoder = self.model.get_encoder()
        self.encoded = encoder(input_ids=ids, attention_mask=torch.ones_like(ids))
        # It gets cross-attention's keys and values at the decoder's first step, and keeps them.
        self.caches = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def forward(self, tokens, parents=None, logits_to_keep=0):
        """As Target.forward, of a chain."""
        chain = list(range(-1, len(tokens) - 1))
        if parents is not None and parents.tolist() != chain:
            raise UserError(f"{type(self.model).__name__} verifies chains only (relative positions of its "
                            "decoder follow the cache, not the depth in a tree): use --tree chain")
        return super().forward(tokens, parents, logits_to_keep)

    def run(self, keys, tokens, position, slots, mask, logits_to_keep=0):
        """As Target.run.  The decoder knows a chain's positions and mask by itself."""
        self.caches.self_attention_cache = StepCache(self.cache, slots, keys)
        out = self.model(encoder_outputs=self.encoded, decoder_input_ids=tokens[None],
                         past_key_values=self.caches, use_cache=True)
        return [out.logits[0, -logits_to_keep:]]

# ---------------------------------------------------------------- the drafter
def table2(k, neural, gram):
    """Table 2's k11, k12, k22 ... for `neural` models; (gram: bool) Max-Gram has 10 (section 5.2) -> K.

    None: all ones, for drafters that cost a tenth of the target or more; the paper's cost far less.  Where
    k12 = k11, as in all ones, the second model drafts for the first alone: no neural horizontal cascade.
    """
    wanted = neural * (neural + 1) // 2
    k = [1] * wanted if k is None else list(k)
    if len(k) != wanted:
        raise UserError(f"k={tuple(k)}: {neural} neural stage(s) take {wanted} number(s), as in Table 2")
    K = []
    for r in range(neural + gram):
        row = k[:neural - r]
        k = k[neural - r:]
        counts = [after - before for before, after in zip([0] + row, row)]
        K.append([0] * r + counts + [GRAM] * gram)
    return checked(K, neural + gram)

def checked(K, n):
    """K if it is an upper triangular n x n matrix of counts, else UserError."""
    if [len(row) for row in K] != [n] * n:
        raise UserError(f"K {K}: {n} stages take a matrix of {n} x {n}")
    for r, row in enumerate(K):
        if any(row[:r]):
            raise UserError(f"K {K} is not upper triangular: a stage reviews smaller ones only")
    if min(map(min, K)) < 0 or sum(K[0]) < 1:
        raise UserError(f"K {K}: the target must be given something, and Table 2's k in a row never falls")
    return K

class Cascade:
    """A sequence drafter for verify.generate; the contract is at the top of verify.py."""

    def __init__(self, targets, K=None, lenience=1.0, gram=None, vocab=None, stop="own"):
        """targets: verify.Targets, each of its own, the largest first.  gram: a MaxGram as the last stage.

        K: Algorithm 1's matrix, see table2.  vocab: how many ids all have.  stop: see difference 2.
        """
        if not targets and gram is None:
            raise UserError("a cascade without any stage drafts nothing: name its models, or maxgram")
        if not targets and vocab is None:
            raise UserError("Max-Gram alone does not know how many ids there are: give vocab=target.vocab")
        if not lenience >= 1:
            raise UserError(f"lenience is {lenience}: it must be at least 1, which is none")
        if stop not in ("own", "sum"):
            raise UserError(f"stop is {stop!r}: say 'own' or 'sum'")
        self.lenience, self.gram, self.stop = lenience, gram, stop
        self.needs = {"source": self.source}
        self.stages = list(targets)
        self.draft_list = self.stages if gram is None else [*self.stages, gram]
        K = K or table2(None, len(targets), gram is not None)
        self.K = checked(K, len(self.draft_list))
        self.vocab = vocab or targets[0].vocab
        for stage in targets:
            if stage.vocab != self.vocab:
                raise UserError(f"a stage has {stage.vocab} ids, not {self.vocab}: any_target pads it")
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.gen = Gen(self.stop)
        for stage in self.draft_list:
            stage.reset()

    @property
    def runs(self):
        """Forwards of each stage since reset(); Max-Gram's proposals too."""
        return [self.gen.runs[stage] for stage in self.draft_list]

    def source(self, ids):
        """An encoder-decoder target's input: every stage's own encoder reads it, and Max-Gram searches it."""
        for stage in self.stages:
            stage.encode(ids)
        if self.gram is not None:
            self.gram.commit_source(ids)

    def begin(self, view):
        """A round starts: the last drafts go, and what the target has committed since joins the text."""
        gen = self.gen
        new = view.tokens.tolist()
        gen.replace(gen.settled, new, [None] * len(new))
        gen.settled = len(gen)
        gen.device = view.tokens.device
        if self.gram is not None:
            self.gram.commit(new)
        self.paths = None                                # of the tree in hand, see expand

    def keep(self, path):
        """Nothing to move: stages roll their caches back when they are next asked (Target.sync)."""

    def write(self, root, most, warp=None, generator=None):
        """Add the last token `root` and a proposal of at most `most` tokens to gen -> where that begins."""
        if generator is not None:
            review = partial(review_drawn, warp=warp, lenience=self.lenience, generator=generator)
        elif self.lenience > 1:
            review = partial(review_lenient, lenience=self.lenience)
        else:
            review = review_greedy
        gen = self.gen
        gen.replace(gen.settled, [root], [None])
        first = len(gen)
        cascade_step(None, self.draft_list, self.K, gen, first + most, review)
        return first

    def chain(self, root, most, warp=None, generator=None):
        """A proposal of at most `most` tokens -> (list (n,), p_draft (n, V) with a generator, else None)."""
        first = self.write(root, most, warp, generator)
        tokens = self.gen.tokens[first:]
        if generator is None:
            return tokens, None
        like = torch.empty(0, self.vocab, device=self.gen.device)
        return tokens, distributions(self.gen, first, like)

    def expand(self, tokens, parents):
        """Logits (m, V) along the cascade's own greedy chain; off it, and behind its end, rows of -inf."""
        logits = torch.full((len(parents), self.vocab), -math.inf, device=tokens.device)
        tokens = tokens.tolist()
        if self.paths is None:
            self.write(tokens[0], HORIZON)
            self.paths = []                              # of each node: the tokens from the root to it
        start, drafts = self.gen.settled, self.gen.tokens
        for row, token, parent in zip(logits, tokens, parents):
            above = self.paths[parent] if parent >= 0 else []
            path = above + [token]
            self.paths.append(path)
            after = start + len(path)
            if drafts[start:after] != path or after == len(drafts):
                continue
            # What the stage said that wrote the next token, or reviewed it
            said = self.gen.probs[after]
            if torch.is_tensor(said):
                row.copy_(said)
            else:
                # Max-Gram gives its token the confidence c, and knows nothing of the others.
                row.fill_((1 - said) / (self.vocab - 1))
                row[drafts[after]] = said
                row.log_()
        return logits

def proposal(expand, root, drawn=False):
    """The builder of a drafter's own chain -> Tree; drawn, where the rule samples: with p_draft (n, V)."""
    warp = getattr(expand.rule, "warp", None)
    generator = expand.generator if drawn and warp else None
    drafts, p_draft = expand.drafter.chain(expand.root, expand.remaining, warp, generator)
    tokens = torch.tensor([expand.root, *drafts], device=root.device)
    parents = torch.arange(-1, len(tokens) - 1, device=root.device)
    return Tree(tokens, parents, p_draft)

# ---------------------------------------------------------------- analysis (section 4)
def geometric(x, k):
    """1 + x + ... + x^k: the paper's (1 - x^{k+1}) / (1 - x), also at x = 1."""
    return sum(x ** i for i in range(k + 1))

def phi(x, alpha, k):
    """Theorem 4.1: the probability generating function of the tokens that one speculative round yields.

    alpha: probability that a drafted token is accepted, given that those before it were; k: drafts a round.
    The coefficient of x^j is the probability of j tokens, the reviewer's own included, so j = 1 .. k + 1.
    Erratum: equation 6 (Appendix C.1) begins with x + ..., where equation 5 and Theorem 4.1 give 1 + ...
    """
    assert k >= 0 and 0 <= alpha <= 1, "k or alpha is out of range"
    # Equation 1: phi(x) = 1 + (x - 1) (1 - alpha^{k+1} x^{k+1}) / (1 - alpha x)
    return 1 + (x - 1) * geometric(alpha * x, k)

def ewif_speculative(alpha, c, k):
    """Corollary 4.2: expected walltime improvement factor of one drafter with k drafts a round.

    alpha = alpha(M_t, M_d); c = c(M_t, M_d): one run of the drafter over one of the target.
    Erratum: it prints phi(1), which is 1 always; the value is that of phi'(1), the expected tokens.
    """
    assert k >= 0 and 0 <= alpha <= 1 and c >= 0, "k, alpha or c is out of range"
    # phi'(1) / (ck + 1) = (1 - alpha^{k+1}) / ((1 - alpha) (ck + 1))
    return geometric(alpha, k) / (c * k + 1)

def ewif_vertical(alpha, alpha_inner, c1, c2, n, k):
    """Theorem 4.3: M_d1 reviews k tokens of M_d2's; after n such rounds M_t reviews what came of them.

    alpha = alpha(M_t, M_d1), printed without the 1; alpha_inner = alpha' = alpha(M_d1, M_d2); c1, c2: runs of
    M_d1, of M_d2 over one of M_t.  phi^n is a power; n is fixed, where Algorithm 1 counts tokens.
    Corollary 4.4: phi(alpha) < alpha for 0 < alpha, alpha' < 1, k > 0; so it beats M_d1 alone where c2 = 0.
    (Its proof says (1 - (alpha alpha')^{k+1}) / (1 - alpha alpha') < 1, and needs > 1, which is true.)
    Unsaid: M_t's review must be independent of M_d1's.  If they are correlated, the theorem is exact again
    with alpha_inner = P(both accept M_d2's draft) / alpha.
    """
    assert min(n, k, c1, c2, alpha, alpha_inner) >= 0 and max(alpha, alpha_inner) <= 1, "out of range"
    # Its numerator over 1 - alpha, as 1 - phi(alpha) = (1 - alpha) ratio: (1 - alpha phi^n) / (1 - alpha)
    # = 1 + alpha (1 - phi^n) / (1 - alpha) = 1 + alpha ratio (1 + phi + ... + phi^{n-1})
    ratio = geometric(alpha * alpha_inner, k)
    tokens = 1 + alpha * ratio * geometric(phi(alpha, alpha_inner, k), n - 1)
    # Equation 2: (1 - alpha phi^n(alpha)) / ((1 - alpha) (1 + n c1 + n k c2))
    return tokens / (1 + n * c1 + n * k * c2)

def ewif_horizontal(alphas, costs):
    """Theorem 4.5: T(k, alpha_1 .. alpha_k, c_1 .. c_k), where each token is drafted by a model of its own.

    alphas[i-1] = alpha(M_t, M_i), costs[i-1] = c(M_t, M_i), M_i being the drafter of the i-th token.
    Table 1's k_1, k_2 are tokens that each adds; its third row's k are not the best (5 and 5 give more).
    """
    assert len(alphas) == len(costs), "there is a cost for each alpha"
    # sum_{i=0}^k prod_{j=1}^i alpha_j / (1 + sum_{i=1}^k c_i)
    tokens, accepted = 1, 1
    for alpha in alphas:
        accepted *= alpha                       # Corollary 4.6: the probability that token i is accepted
        tokens += accepted
    return tokens / (1 + sum(costs))

def d_ewif_horizontal(l, alphas, costs):
    """Corollary 4.6: dT / d alpha_l, l = 1 .. k: what a better drafter of the l-th token is worth."""
    assert len(alphas) == len(costs) and 1 <= l <= len(alphas), "l is a position, and has a cost"
    # sum_{i=l}^k prod_{j=1, j != l}^i alpha_j / (1 + sum_{i=1}^k c_i)
    after = sum(math.prod(alphas[l:i]) for i in range(l, len(alphas) + 1))
    return math.prod(alphas[:l - 1]) * after / (1 + sum(costs))

def swi(tokens, runs, costs):
    """Section 5.1: standardized walltime improvement, tokens over standardized time (over M_t's runs: tau).

    tokens = n, all that were generated; runs[0] = count(S, M_t, T), runs[i] = count(S, M_di, T); costs[i] =
    c_i, a run of M_di over one of M_t: costs[0] = 1, a statistical model's is 0.  Plain decoding has SWI 1.
    Erratum: "simply the sum of GPU time by all models" describes the denominator.
    """
    assert len(runs) == len(costs) and costs[0] == 1, "there is a cost for each model; the target's is 1"
    # n / (count(S, M_t, T) + sum_i count(S, M_di, T) c_i)
    return tokens / sum(count * c for count, c in zip(runs, costs))

# ---------------------------------------------------------------- demo
def main():
    """A cascade of random models gives plain decoding's output in fewer runs of the target."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=30, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                         num_attention_heads=4)
    targets = []
    for noise in (0, 0.01, 0.03):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).double()
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
            p.data += noise * torch.randn_like(p)
        targets.append(Target(model))
    target, *stages = targets
    prompt = list(range(10))
    plain = generate(target, None, root_only, prompt, 60)
    drafter = Cascade(stages, gram=MaxGram())
    out = generate(target, drafter, proposal, prompt, 60)
    assert out.tokens == plain.tokens, "lossless"
    # M_t ran once for the prompt, and once a round.
    runs = [1 + len(out.rounds), *drafter.runs]
    gained = swi(60, runs, [1, 0.1, 0.03, 0])
    assert gained > 1
    print(f"60 tokens in {runs} runs of the target and of each stage: SWI {gained:.2f}")

if __name__ == "__main__":
    main()
