"""Cascade speculative drafting: a drafter reviews what smaller drafters have drafted.

Cascade Speculative Drafting (arXiv 2312.11462): Algorithm 1, sections 3 and 5, Tables 2 and 3.
Max-Gram (section 3.3) is maxgram.py; the analysis (section 4) is figures/ewif.py.

The idea.  In speculative decoding the drafter needs a forward for each token that it drafts.  In
the *vertical* cascade a smaller model drafts for the drafter, which reviews those tokens in one
forward.  The smaller model has a drafter, too, and so on down to Max-Gram, which runs no network.
In the *horizontal* cascade the largest drafter provides the first tokens of a proposal, which are
the most likely to be accepted, and smaller drafters provide the later ones.  One recursion does
both: cascade_step().  A *stage* is a draft model or Max-Gram.

    paper                shape    name here
    M_t                           target
    draftList: M_d1 ...  list     draft_list: the stages, the largest first; Max-Gram (MaG) is last
    curGen, curProbs     lists    gen.tokens, gen.probs
    prefix, curPrefix    int      prefix, cur_prefix: only their lengths, as gen begins with them
    K_nn                 (n, n)   K, upper triangular: row 0 for the drafts that M_t reviews, row r
                                  for those that M_dr reviews, column i for draft_list[i]
    k_i                  int      K[0][i]: how many tokens draft_list[i], that is M_d(i+1), adds
    l                    float    lenience, in reviews by drafters (difference 5)

K, by the example of Table 2's k_11, k_12, k_22 = 8, 13, 1 with Max-Gram, which is asked for 10
tokens at a time (section 5.2).  k_12 includes k_11, by the authors' code (the paper does not say
it): after the 8 tokens of M_d1, M_d2 adds 13 - 8 = 5:

             M_d1  M_d2  MaG
        K = [[8,    5,   10],     drafts for M_t: k_11, k_12 - k_11, 10
             [0,    1,   10],     drafts for M_d1: k_22, 10
             [0,    0,   10]]     drafts for M_d2: 10

The drafts that M_d1 reviews come from a call of Algorithm 1 with M_d1 as the target.  The K of this
call is K without its first row and column, [[1, 10], [0, 10]].  Where M_d2 reviews, it is [[10]].

A model's count is a minimum, since its last review may add more tokens than were missing.
Max-Gram's count is a maximum.  Where the output or a model's context ends, both may add fewer.

To use it alone, with verify.py and maxgram.py beside this file, three causal LMs with one tokenizer
and a list of token ids `text`:

    target, *draft_models = [verify.Target(model) for model in (large, base, small)]
    drafter = cascade.Cascade(draft_models, gram=maxgram.MaxGram())
    out = verify.generate(target, drafter, drafter.chain, text, new_tokens=40)
    text += out.tokens

Two builders are methods of Cascade, and return its own chain as a Tree.  chain() drafts greedily;
drawn() samples its drafts where the target's tokens are sampled, and its tree has a p_draft.  Both
are lossless.  All other builders draft from Cascade.expand(), which predicts along the greedy chain
only.  So their trees may have siblings beside the tokens of the chain, but nothing below a sibling.

Differences from the paper:
 1. Algorithm 1's base case takes an element of an empty list.  Here the recursion ends at Max-Gram,
    which is called once for all its k tokens.  Without Max-Gram (S Decoding in Table 2) it ends at
    the smallest model: with nothing to review, each of its reviews adds one token.
 2. The while loop ends when curGen is k_i tokens longer than curPrefix.  As printed, curPrefix is
    set in each pass of the loop, so it would end only if a single review added k_i tokens.  Here it
    is set once, before the loop, and the reviews together add them.  (The authors' code counts the
    tokens of the whole call, against k_1 + ... + k_i.)
 3. Misprints: Algorithm 1 unpacks n - 1 values of k for n iterations, and appends p_1 ... p_v where
    it means the new ones, p_s ... p_v.  Section 5.2's k_21 should read k_22.
 4. chain() and drawn() draft at most one token less than the output may still get: the last one is
    the target's.  A stage whose context is full is skipped, and the stages after it go on.
 5. Section 5.2 has no lenience "between MaG and its reviewer".  So a token that only Max-Gram has
    written is reviewed without lenience.  Once a model has accepted it, its entry in curProbs is
    that model's, and the next drafter's review is lenient.  (The authors' code, which is greedy
    only, compares the drafter's and the reviewer's probabilities at two different positions.)
 6. Section 3.1 does not say how a token is replaced that a lenient review rejects.  Here it is
    sampled from the residual of section 2.
 7. The paper's experiments are greedy.  When drafts are sampled, a token of Max-Gram's counts as
    sampled from a distribution that has all its mass on it.

    python cascade.py        # the demo: a cascade of random models is lossless
    python bench.py --drafter "cascade(base, small, maxgram, k=(8, 13, 1), lenience=3)" --tree chain
"""
import math
from collections import Counter
from functools import partial

import torch

from maxgram import MaxGram, N
from verify import Target, Tree, accept, accept_sampled, generate, root_only

# ---------------------------------------------------------------- Algorithm 1
class Gen:
    """curGen and curProbs of Algorithm 1.

    tokens: the committed tokens, the root, then the drafts of this round.
    committed: how many of them are committed.
    probs: an entry for each token:
        None           for the root and before it (ones in Algorithm 1)
        a float        for a draft that only Max-Gram has proposed: Max-Gram's confidence
        a tensor (V,)  for a draft that a model has proposed or reviewed.
                       Sampling: the distribution that the token now follows.
                       Greedy: that model's logits at its position; whoever needs probabilities
                       takes their softmax.
    runs: {stage: number of forwards, or of Max-Gram's proposals}.
    device: the target's.
    """
    def __init__(self):
        self.tokens = []
        self.probs = []
        self.committed = 0
        self.device = None
        self.runs = Counter()

    def replace(self, first, tokens, probs):
        """Replace everything from position `first` on by these tokens and their probs."""
        self.tokens[first:] = tokens
        self.probs[first:] = probs

def cascade_step(target, draft_list, K, gen, limit, review):
    """Algorithm 1, CascadeSpeculativeDraftingStep: append drafts to gen; `target` reviews them.

    target: a verify.Target.  None in the first call, the paper's isFirstCall: verify.generate
    reviews then.
    draft_list: n stages, verify.Targets, the last one perhaps a MaxGram.  K: n lists of n counts.
    review(logits, gen, first): accepts drafts, the first of which is at position `first`, and adds
    one token of target's own.

    limit: the most tokens that gen may have after the drafts, when `target` begins its review.

    A trace with K = [[2, 2], [0, 3]], where gen is a at first.  M_t and base continue abcdefg...;
    so does small, but it writes x after f.

        what runs                  then gen is
        step(None, [base, small])            i = 0: base must add K[0][0] = 2 tokens
          step(base, [small])                i = 0: small must add 3; each of its reviews adds one
            step(small, [])        ab
            step(small, [])        abc
            step(small, [])        abcd
            base reviews           abcde     it accepts bcd and adds e: 4 tokens, 2 more than needed
          step(small, [])          abcdef    i = 1: small must add K[0][1] = 2 tokens
          step(small, [])          abcdefx
        M_t reviews                abcdefg   in verify.generate: it accepts bcdef and adds g
    """
    # curGen <- prefix: gen holds the prefix already, so only its length is noted.
    prefix = len(gen.tokens)
    # Perform the horizontal cascade with the for loop.
    for i, cur_target in enumerate(draft_list):
        # [k_1 ... k_n] <- first row of K
        k_i = K[0][i]
        # curPrefix <- curGen
        cur_prefix = len(gen.tokens)
        # Generate using MaG for the base case of the recursive call.
        if isinstance(cur_target, MaxGram):
            most = min(k_i, limit - cur_prefix)
            if most > 0:
                propose(cur_target, gen, most)
            break
        # Prepare the arguments for the next recursive call.
        cur_draft_list = draft_list[i + 1:]
        cur_k = [row[i + 1:] for row in K[i + 1:]]
        # cur_limit: the most tokens that gen may have when cur_target begins its review.  That is
        # limit - 1, since the review adds one, but no more than cur_target's context holds.  (With
        # cur_limit tokens in gen no draft fits, but a review does: so <= below.)
        cur_limit = min(limit - 1, cur_target.capacity)
        while len(gen.tokens) - cur_prefix < k_i and len(gen.tokens) <= cur_limit:
            # Perform the vertical cascade with the recursive call.
            cascade_step(cur_target, cur_draft_list, cur_k, gen, cur_limit, review)
    # Use M_t to review the draft generation.  In the first call verify.generate does, with l = 1.
    if target is not None:
        drafts = len(gen.tokens) - prefix
        gen.runs[target] += 1
        # What the target predicts at the position of each draft, and after the last one
        logits, _ = target.align(gen.tokens, drafts + 1)          # (drafts + 1, V)
        review(logits.to(gen.device), gen, prefix)

def propose(max_gram, gen, most):
    """Max-Gram appends up to `most` tokens."""
    gen.runs[max_gram] += 1
    uncommitted = gen.tokens[gen.committed:]
    tokens, match_lengths = max_gram.propose(uncommitted, most)
    confidences = [max_gram.confidence_of(length) for length in match_lengths]
    gen.replace(len(gen.tokens), tokens, confidences)

# ---------------------------------------------------------------- the reviews
def lenient_distribution(p_reviewer, p_draft, l):
    """What a token follows after a lenient review: the distribution q' (n, V).

    p_reviewer, p_draft (n, V); l (n, 1).  Below p stands for p_reviewer, q for p_draft.  By section
    3.1 a draft x, sampled from q, is accepted with probability min(1, l p(x) / q(x)); after a
    rejection a token is sampled from norm(max(0, p - q)) (difference 6).  So
        q'(x) = min(q(x), l p(x)) + P(rejection) norm(max(0, p - q))(x)
        P(rejection) = 1 - sum_y min(q(y), l p(y))
    The next reviewer must compare with q'.  And accept_sampled, given q' in the place of p, does
    exactly this review: it accepts x with probability min(1, q'(x) / q(x)), else it samples from
    norm(max(0, q' - q)).  These are the same, case by case:
        where p(x) > q(x)      q'(x) >= q(x) and l p(x) >= q(x): both accept x
        where p(x) <= q(x)     q'(x) / q(x) = min(1, l p(x) / q(x)): the same probability
        after a rejection      max(0, q' - q) is a multiple of max(0, p - q): the same residual
    """
    # min(q, l p)
    accepted = torch.minimum(p_draft, l * p_reviewer)            # (n, V)
    # P(rejection), which rounding may make negative
    rejection = 1 - accepted.sum(-1, keepdim=True)               # (n, 1)
    rejection = rejection.clamp(min=0)
    # norm(max(0, p - q)); where p = q it is 0 / 0, and nothing is rejected
    residual = (p_reviewer - p_draft).clamp(min=0)               # (n, V)
    total = residual.sum(-1, keepdim=True).clamp(min=1e-30)      # (n, 1)
    resampled = residual / total
    return accepted + rejection * resampled

def chain_of(tokens, device, p_draft=None):
    """A list of ids, the root's first -> the Tree of a chain that was drafted without expand."""
    tokens = torch.tensor(tokens, device=device)
    parents = torch.arange(-1, len(tokens) - 1, device=device)
    return Tree(tokens, parents, torch.full_like(parents, -1), p_draft)

def distributions(gen, first, vocab):
    """p_draft (n, V) of gen's drafts from `first` on.

    What only Max-Gram has written was not sampled: its token has probability 1.
    """
    p_draft = torch.zeros(len(gen.tokens) - first, vocab, device=gen.device)
    for row, token, p in zip(p_draft, gen.tokens[first:], gen.probs[first:]):
        if torch.is_tensor(p):
            row.copy_(p)
        else:
            row[token].fill_(1)
    return p_draft

def keep_chosen(gen, first, choice, probs):
    """Keep drafts while they are what the reviewer chose, then add its next choice: verify.accept.

    The n drafts begin at position `first`.  choice: list of n + 1 tokens that the reviewer chose at
    the position of each draft, and after the last one.  probs (n + 1, V): row i becomes the entry
    in gen.probs of the i-th token that is kept.
    """
    chain = gen.tokens[first - 1:]                               # the token before, then the drafts
    parents = range(-1, len(chain) - 1)
    _, new = accept(chain, parents, choice)
    gen.replace(first, new, probs[:len(new)])

def review_greedy(logits, gen, first, lenience):
    """Greedy review by a reviewer M_r, section 3.1.

    logits (n + 1, V): M_r's predictions at the positions of the n drafts, and after the last one.
    A draft x_i is accepted where x_i = argmax M_r(x)[i].  With lenience l > 1 it is also accepted
    where M_d(x)[i] <= l M_r(x)[i], the probabilities of x_i.
    """
    choice = logits.argmax(-1)                                   # (n + 1,)
    if lenience > 1:
        p_reviewer = logits.float().softmax(-1)                  # (n + 1, V)
        for i, x in enumerate(gen.tokens[first:]):
            draft_logits = gen.probs[first + i]
            # Difference 5: what only Max-Gram has written has a confidence in place of logits.
            if torch.is_tensor(draft_logits):
                p_draft = draft_logits.float().softmax(-1)       # (V,)
                accepted = p_draft[x] <= lenience * p_reviewer[i, x]
                choice[i] = torch.where(accepted, x, choice[i])
    keep_chosen(gen, first, choice.tolist(), logits)

def review_drawn(logits, gen, first, distribution_of, lenience, generator):
    """Review of sampled drafts: speculative sampling (section 2), with lenience (section 3.1).

    logits: as in review_greedy.  distribution_of(logits): what tokens are sampled from.
    """
    p_draft = distributions(gen, first, logits.shape[-1])        # (n, V)
    p_reviewer = distribution_of(logits)                         # (n + 1, V)
    # The distributions that the tokens follow after this review
    p_new = p_reviewer
    if lenience > 1:
        # Difference 5: what only Max-Gram has written has a confidence, and no lenience.
        of_models = [torch.is_tensor(p) for p in gen.probs[first:]]
        of_models = torch.tensor(of_models, dtype=torch.bool, device=gen.device)
        l = torch.where(of_models, lenience, 1.0)                # (n,)
        lenient = lenient_distribution(p_reviewer[:-1], p_draft, l[:, None])
        p_new = torch.cat((lenient, p_reviewer[-1:]))
    chain = chain_of(gen.tokens[first - 1:], gen.device, p_draft)
    choice = accept_sampled(chain, p_new, generator)               # (n + 1,)
    # The next reviewer must compare with p_new, not p_reviewer, or the output is biased.
    keep_chosen(gen, first, choice.tolist(), p_new)

# ---------------------------------------------------------------- the drafter
class Cascade:
    """A cascade as a drafter of verify.generate, by the contract at the top of verify.py."""
    needs = {}

    def __init__(self, models, K=None, lenience=1.0, gram=None, vocab=None, names=(), sizes=()):
        """models: the draft models, each a verify.Target, the largest first.

        For an encoder-decoder target they are encoder-decoders, too, and have encode(ids), which
        runs the encoder over the prompt (runtime/targets.py).

        K: Algorithm 1's matrix.  By default each reviewer gets one token from the next smaller
        model, none from the others, ten from Max-Gram: [[1, 0, 10], [0, 1, 10], [0, 0, 10]].
        lenience: l of section 3.1, at least 1; 1 means no lenience.
        gram: a MaxGram, the last stage, or None.
        vocab: the target's vocabulary size, needed only without models.
        names, sizes: only for reports: the name of each stage, and for each model its number of
        weights divided by the target's.
        """
        assert models or (gram and vocab), "a cascade needs a model, or gram= and vocab="
        assert lenience >= 1, f"lenience is {lenience}: it must be at least 1, which means none"
        self.models = list(models)
        self.gram = gram
        self.draft_list = self.models if gram is None else [*self.models, gram]
        n = len(self.draft_list)
        if K is None:
            K = torch.eye(n, dtype=torch.long)
            if gram is not None:
                K[:, -1] = N
            K = K.tolist()
        assert [len(row) for row in K] == [n] * n, f"K {K}: {n} stages take a matrix of {n} x {n}"
        for i, row in enumerate(K):
            assert not any(row[:i]), f"K {K} is not upper triangular: stages review smaller ones"
            assert min(row) >= 0, f"K {K}: a count is negative"
        assert sum(K[0]) > 0, f"K {K}: the target must be given something to review"
        self.K = K
        self.lenience = lenience
        self.vocab = vocab or models[0].vocab
        for model in self.models:
            assert model.vocab == self.vocab, (
                f"a model has a vocabulary of {model.vocab} tokens, not of {self.vocab}: all "
                "models of a cascade must share one")
        self.names = list(names)
        self.sizes = list(sizes)
        self.gen = Gen()

    @property
    def runs(self):
        """Forwards of each model since reset(), then the number of Max-Gram's proposals."""
        return [self.gen.runs[stage] for stage in self.draft_list]

    def reset(self, probs, source=None):
        """Begin a sequence.  The models encode the source, and Max-Gram searches it."""
        self.probs = probs
        self.gen = Gen()
        for stage in self.draft_list:
            stage.reset()
        if source is not None:
            for model in self.models:
                model.encode(source)
            if self.gram is not None:
                self.gram.commit_source(source)

    def begin(self, view, root_id):
        """Begin a round: the newly committed tokens replace the last round's drafts."""
        gen = self.gen
        gen.replace(gen.committed, view.ids, [None] * len(view.ids))
        gen.committed = len(gen.tokens)
        gen.device = view.tokens.device
        if self.gram is not None:
            self.gram.commit(view.ids)
        self.root_id = root_id
        # For each node that expand() is given in this round: the tokens from the root to it
        self.paths = []

    def keep(self, path):
        """Nothing to do: Target.align removes rejected tokens from a stage's cache."""

    def draft(self, most, generator=None):
        """Algorithm 1 with M_t's review left out -> the root and up to `most` drafts, their ids.

        With a generator the drafts are sampled, otherwise they are greedy.
        """
        review = partial(review_greedy, lenience=self.lenience)
        if generator is not None:
            review = partial(review_drawn, distribution_of=self.probs, lenience=self.lenience,
                             generator=generator)
        gen = self.gen
        gen.replace(gen.committed, [self.root_id], [None])
        limit = len(gen.tokens) + most
        cascade_step(None, self.draft_list, self.K, gen, limit, review)
        return gen.tokens[gen.committed:]

    # ------------------------------------------------ its builders
    def chain(self, expand, root):
        """The cascade's chain of greedy drafts -> Tree."""
        tokens = self.draft(expand.remaining)
        return chain_of(tokens, root.device)

    def drawn(self, expand, root):
        """The cascade's chain of sampled drafts -> Tree with p_draft; greedy if the target is."""
        generator = getattr(expand, "generator", None)
        if generator is None:
            return self.chain(expand, root)
        tokens = self.draft(expand.remaining, generator)
        first = self.gen.committed + 1                           # the position after the root
        p_draft = distributions(self.gen, first, self.vocab)
        return chain_of(tokens, root.device, p_draft)

    # ------------------------------------------------ for all other builders
    def expand(self, tokens, parents):
        """The cascade's predictions after m nodes -> probabilities (m, V).

        The first call of a round drafts the whole greedy chain.  After a node on it, the prediction
        is that of the model that has written or reviewed the next draft.  If only Max-Gram wrote
        it, its probability is Max-Gram's confidence, at every temperature, and all other tokens
        share the rest.  After the chain's last node, and off the chain, there is no prediction.
        """
        probs = torch.zeros(len(parents), self.vocab, device=tokens.device)
        if not self.paths:
            self.draft(math.inf)                                 # as many as K and contexts allow
        committed = self.gen.committed
        chain = self.gen.tokens[committed:]                      # the root and the drafts
        entries = self.gen.probs[committed:]
        for row, (token, parent) in enumerate(zip(tokens.tolist(), parents)):
            ancestors = self.paths[parent] if parent >= 0 else []
            path = [*ancestors, token]
            self.paths.append(path)
            n = len(path)
            is_last = n == len(chain)
            if is_last or chain[:n] != path:
                continue
            # The node is on the chain; chain[n] is the draft after it.
            if torch.is_tensor(entries[n]):
                probs[row] = self.probs(entries[n][None])[0]
            else:
                confidence = entries[n]
                probs[row] = (1 - confidence) / (self.vocab - 1)
                probs[row, chain[n]] = confidence
        return probs

def main():
    """A cascade of random models gives plain decoding's output in fewer forwards of the target."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=30, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                         num_attention_heads=4, initializer_range=0.1)
    all_models = []
    for noise in (0, 0.005, 0.01):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).double()
        for p in model.parameters():
            p.data += noise * torch.randn_like(p)
        all_models.append(Target(model))
    target, *draft_models = all_models
    prompt = list(range(10))
    plain = generate(target, None, root_only, prompt, 60)
    drafter = Cascade(draft_models, gram=MaxGram())
    out = generate(target, drafter, drafter.chain, prompt, 60)
    assert out.tokens == plain.tokens, "lossless"
    # M_t runs once for the prompt, and once a round.
    runs = [1 + len(out.rounds), *drafter.runs]
    assert runs[0] < 60, "fewer forwards of the target than tokens"
    print(f"60 tokens in {runs} runs of the target and of each stage")

if __name__ == "__main__":
    main()
