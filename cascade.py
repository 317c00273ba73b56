"""Cascade speculative drafting: a drafter reviews what smaller drafters have drafted.

Cascade Speculative Drafting (arXiv 2312.11462): Algorithm 1, sections 3 and 5, Tables 2 and 3.
Max-Gram (section 3.3) is maxgram.py; Table 1 (section 4) is in docs/results.md.

The idea.  In speculative decoding the drafter needs a forward for each token that it drafts.  In
the *vertical* cascade a smaller model drafts for the drafter, which reviews those tokens in one
forward; the smaller model has a drafter in turn, and so on down to Max-Gram, which runs no network.
In the *horizontal* cascade the largest drafter provides the first tokens of a proposal, the most
likely to be accepted, and smaller drafters the later ones.  cascade_step() does both.

    paper                shape    name here
    M_t                           verify.generate's target
    draftList: M_d1 ...  list     draft_list: the stages, the largest model first; each is a draft
                                  model or, as the last one, Max-Gram (MaG)
    curGen, curProbs     lists    gen.tokens, gen.probs
    prefix, curPrefix    int      prefix, cur_prefix: their lengths, since gen begins with them
    K_nn                 (n, n)   K: counts of tokens, a row per reviewer, a column per stage
    l                    float    lenience, in reviews by draft models

An example of K, for the stages M_d1, M_d2 and MaG:

             M_d1  M_d2  MaG
        K = [[8,    5,   10],     M_t reviews 8 tokens of M_d1, then 5 of M_d2, then 10 of MaG
             [0,    1,   10],     M_d1 reviews 1 token of M_d2, then 10 of MaG
             [0,    0,   10]]     M_d2 reviews 10 of MaG

Table 2 prints this K as k_11, k_12, k_22 = 8, 13, 1; in the authors' code k_12 includes k_11:

        K[0][1] = k_12 - k_11 = 13 - 8 = 5

To use it alone, with verify.py and maxgram.py beside this file, three causal LMs that share one
vocabulary, and a list of token ids `text`:

    target, *draft_models = [verify.Target(model) for model in (large, base, small)]
    drafter = cascade.Cascade(draft_models, gram=maxgram.MaxGram())
    out = verify.generate(target, drafter, drafter.chain, text, new_tokens=40)
    text += out.tokens

It drafts chains alone: its builders are the methods chain (greedy drafts) and drawn (sampled ones,
if the target samples).

    python cascade.py        # the demo: a cascade of random models is lossless
    python bench.py --drafter "cascade(base, small, maxgram, k=(8, 13, 1), lenience=3)" --tree chain
"""
from functools import partial

import torch

from maxgram import MaxGram, N
from verify import Target, Tree, accept, accept_sampled, generate, root_only

# ---------------------------------------------------------------- Algorithm 1
class Gen:
    """curGen and curProbs of Algorithm 1: the sequence with this round's drafts.

    tokens: the committed tokens (`committed` of them), the root, the drafts.
    probs: for each token, what its last reviewer gave at that position, a tensor (V,): logits if
    drafts are greedy, the distribution that the token now follows if they are sampled.  None if no
    model has reviewed the token: the root, all before it, and what only Max-Gram has written.
    """
    def __init__(self):
        self.tokens, self.probs = [], []
        self.committed = 0

    def replace(self, first, tokens, probs):
        """Replace everything from position `first` on by these tokens and their probs."""
        self.tokens[first:] = tokens
        self.probs[first:] = probs

def cascade_step(draft_list, K, gen, limit, review):
    """Algorithm 1, CascadeSpeculativeDraftingStep: append drafts to gen, up to `limit` tokens.

    draft_list: n stages, verify.Targets, the last one perhaps a MaxGram.  K: n lists of n counts.
    review(logits (m + 1, V), gen, first): accept some of the m drafts from position `first` on,
    then add one token.

    Differs from the paper in its form: there a step ends with the review by the model for which it
    drafts.  Here that review follows the recursive call.  So M_t needs no special case (the paper's
    isFirstCall): its review is verify.generate's.
    Differs from the paper, which prints curPrefix <- curGen again inside the while loop: then one
    single review would have to add k_i tokens.  Here the reviews together add them.
    Differs from the paper, which has no limits: of the output's length, and of a model's context.

    A trace with K = [[2, 2], [0, 3]], where gen is a at first.  M_t and base continue abcdefg...;
    so does small, but it writes x after f.

        what runs                gen afterwards
        step([base, small])                 i = 0: base must add K[0][0] = 2 tokens
          step([small])                     i = 0: small must add 3; each of its reviews adds one
            small reviews        ab
            small reviews        abc
            small reviews        abcd
          base reviews           abcde      it accepts bcd and adds e: 4 tokens, 2 more than needed
          small reviews          abcdef     i = 1: small must add K[0][1] = 2 tokens
          small reviews          abcdefx
        M_t reviews              abcdefg    in verify.generate: it accepts bcdef and adds g
    """
    # Perform the horizontal cascade with the for loop.
    for i, stage in enumerate(draft_list):
        k_i = K[0][i]                        # [k_1 ... k_n] <- first row of K
        if isinstance(stage, MaxGram):
            # Differs from the paper, whose base case takes an element of an empty list: Max-Gram is
            # called once for all its k tokens.
            count = min(k_i, limit - len(gen.tokens))
            tokens, _ = stage.propose(gen.tokens[gen.committed:], count)
            gen.replace(len(gen.tokens), tokens, [None] * len(tokens))
            break
        # A model with a context of 5 reads 5 tokens, its review adds a sixth; then it is skipped.
        cur_limit = min(limit, stage.capacity + 1)
        # curPrefix <- curGen
        cur_prefix = len(gen.tokens)
        while len(gen.tokens) - cur_prefix < k_i and len(gen.tokens) < cur_limit:
            # Perform the vertical cascade with the recursive call.  Below the smallest model it
            # drafts nothing.
            prefix = len(gen.tokens)
            cur_K = [row[i + 1:] for row in K[i + 1:]]
            cascade_step(draft_list[i + 1:], cur_K, gen, cur_limit - 1, review)
            # Use M_di to review the draft generation.
            num_drafts = len(gen.tokens) - prefix
            logits, _ = stage.align(gen.tokens, num_drafts + 1)  # (num_drafts + 1, V)
            review(logits, gen, prefix)

# ---------------------------------------------------------------- the reviews
def review_greedy(logits, gen, first, lenience):
    """Greedy review by a reviewer M_r, section 3.1.

    logits (n + 1, V): M_r's predictions at the positions of the n drafts, and after the last one.
    A draft x_i is accepted if x_i = argmax M_r(x)[i] or, with lenience l > 1, if
    M_d(x)[i] <= l M_r(x)[i].  Differs from the paper, whose second rule also holds at l = 1: then
    M_t's own review would not be lossless.
    """
    choice = logits.argmax(-1)                                   # (n + 1,)
    if lenience > 1:
        p_reviewer = logits.float().softmax(-1)                  # (n + 1, V)
        drafts = zip(gen.tokens[first:], gen.probs[first:])
        for i, (x, draft_logits) in enumerate(drafts):
            # There is no lenience "between MaG and its reviewer" (section 5.2).  Once a model has
            # accepted Max-Gram's token, it counts as that model's.
            if draft_logits is not None:
                p_draft = draft_logits.float().softmax(-1)       # (V,)
                accepted = p_draft[x] <= lenience * p_reviewer[i, x]
                choice[i] = torch.where(accepted, x, choice[i])
    keep_chosen(gen, first, choice.tolist(), logits)

def review_sampled(logits, gen, first, p_target, lenience, generator):
    """Review of sampled drafts: speculative sampling (section 2), with lenience (section 3.1).

    p_target(logits): the distributions (n + 1, V) that the reviewer's tokens are sampled from.
    """
    p_draft = distributions(gen, first, logits.shape[-1], logits.device)               # (n, V)
    p_new = p_target(logits)                                     # what the tokens follow afterwards
    if lenience > 1:
        # As in review_greedy, without lenience for what only Max-Gram has written
        l = [1.0 if p is None else lenience for p in gen.probs[first:]]
        l = torch.tensor(l, device=logits.device)[:, None]       # (n, 1)
        lenient = lenient_distribution(p_new[:-1], p_draft, l)
        p_new = torch.cat((lenient, p_new[-1:]))
    chain = chain_of(gen.tokens[first - 1:], logits.device, p_draft)
    choice = accept_sampled(chain, p_new, generator)             # (n + 1,)
    keep_chosen(gen, first, choice.tolist(), p_new)

def lenient_distribution(p, q, l):
    """The distribution q' (n, V) that a token follows after a lenient review.

    p (n, V): the reviewer's; q (n, V): what the draft was sampled from; l (n, 1).
    A draft x is accepted with probability min(1, l p(x) / q(x)) (section 3.1).  After a rejection a
    token is sampled from the residual norm(max(0, p - q)) (section 2).  Either may give x, so

        q'(x) = min(q(x), l p(x))  +  P(rejection) residual(x)

    The next reviewer must compare with q', not with p, or the output is biased.  The review itself
    is plain speculative sampling towards q', so accept_sampled does it: q' - q is above zero only
    where the residual is, and in proportion to it, and elsewhere q' / q = min(1, l p / q).
    """
    # Differs from the paper, which does not say how a rejected token is replaced under lenience.
    accepted = torch.minimum(q, l * p)                           # (n, V)
    rejection = 1 - accepted.sum(-1, keepdim=True)               # (n, 1)
    residual = (p - q).clamp(min=0)                              # (n, V)
    # Where p = q nothing is rejected, and the residual is zero: 0 / 0 without the clamp.
    residual = residual / residual.sum(-1, keepdim=True).clamp(min=1e-30)
    return accepted + rejection.clamp(min=0) * residual          # rounding may give -1e-8

def distributions(gen, first, vocab, device):
    """What gen's n drafts from position `first` on were sampled from: p_draft (n, V).

    Differs from the paper, whose experiments are greedy: a token that only Max-Gram has written
    counts as sampled from a distribution that has all its mass on it.
    """
    tokens, probs = gen.tokens[first:], gen.probs[first:]
    p_draft = torch.zeros(len(tokens), vocab, device=device)
    for row, token, p in zip(p_draft, tokens, probs):
        if p is None:
            row[token] = 1.0
        else:
            row.copy_(p)
    return p_draft

def chain_of(tokens, device, p_draft=None):
    """A list of ids, the root's first -> the Tree of a chain that was drafted without expand."""
    tokens = torch.tensor(tokens, device=device)
    parents = torch.arange(-1, len(tokens) - 1, device=device)
    return Tree(tokens, parents, torch.full_like(parents, -1), p_draft)

def keep_chosen(gen, first, choice, probs):
    """Keep drafts while they are the reviewer's choice, then add its next choice: verify.accept.

    choice: n + 1 tokens, for the n drafts and after them.  probs (n + 1, V): their gen.probs.
    """
    chain = gen.tokens[first - 1:]                               # the token before, then the drafts
    _, new = accept(chain, range(-1, len(chain) - 1), choice)
    gen.replace(first, new, probs[:len(new)])

# ---------------------------------------------------------------- the drafter
class Cascade:
    """A cascade as a drafter of verify.generate, by the contract at the top of verify.py."""
    needs = {}

    def __init__(self, models, K=None, lenience=1.0, gram=None, vocab=None):
        """models: the draft models, each a verify.Target of its own, the largest first.

        K: Algorithm 1's matrix.  Differs from the paper, whose k_11 is 5 to 8 (Table 2): by default
        a reviewer gets 1 token from the next model: [[1, 0, 10], [0, 1, 10], [0, 0, 10]].
        lenience: l of section 3.1, at least 1; 1 means no lenience.
        gram: a MaxGram, the last stage, or None.
        vocab: the target's vocabulary size, needed only without models.
        Raises ValueError for settings that do not fit together.
        """
        if lenience < 1:
            raise ValueError(f"lenience is {lenience}: it must be at least 1, which means none")
        if not models and vocab is None:
            raise ValueError("a cascade without models needs vocab=")
        self.models, self.gram, self.lenience = list(models), gram, lenience
        self.draft_list = self.models if gram is None else [*self.models, gram]
        self.vocab = vocab or self.models[0].vocab
        n = len(self.draft_list)
        if K is None:
            K = torch.eye(n, dtype=torch.long)
            if gram is not None:
                K[:, -1] = N
            K = K.tolist()
        if [len(row) for row in K] != [n] * n:
            raise ValueError(f"K {K} is not a matrix of {n} x {n} counts")
        self.K = K
        for model in self.models:
            if model.vocab != self.vocab:
                raise ValueError(f"a model has a vocabulary of {model.vocab} tokens, not of "
                                 f"{self.vocab}: all models of a cascade must share one")
        self.gen = Gen()

    def reset(self, probs):
        """Begin a sequence."""
        self.probs = probs
        self.gen = Gen()
        for stage in self.draft_list:
            stage.reset()

    def encode(self, source):
        """After reset: give the models and Max-Gram the input of an encoder, a list of ids."""
        for model in self.models:
            model.encode(source)
        if self.gram is not None:
            self.gram.commit_source(source)

    def begin(self, view, root_id):
        """Begin a round: the newly committed tokens replace the last round's drafts."""
        gen = self.gen
        gen.replace(gen.committed, view.ids, [None] * len(view.ids))
        gen.committed = len(gen.tokens)
        self.root_id = root_id
        if self.gram is not None:
            self.gram.commit(view.ids)

    def expand(self, tokens, parents):
        """Raise ValueError: a builder of trees needs a drafter that predicts after any node."""
        raise ValueError("a cascade drafts chains alone, by its methods chain and drawn")

    def keep(self, path):
        """Do nothing: Target.align removes rejected tokens from a stage's cache."""

    def draft(self, count, review):
        """Algorithm 1 without M_t's review -> the root and up to `count` drafts, a list of ids."""
        gen = self.gen
        gen.replace(gen.committed, [self.root_id], [None])
        limit = len(gen.tokens) + count
        cascade_step(self.draft_list, self.K, gen, limit, review)
        return gen.tokens[gen.committed:]

    # ------------------------------------------------ its builders
    def chain(self, expand, root):
        """The cascade's chain of greedy drafts -> Tree."""
        review = partial(review_greedy, lenience=self.lenience)
        tokens = self.draft(expand.remaining, review)
        return chain_of(tokens, root.device)

    def drawn(self, expand, root):
        """The cascade's chain of sampled drafts -> Tree with p_draft; greedy if the target is."""
        generator = getattr(expand, "generator", None)
        if generator is None:
            return self.chain(expand, root)
        review = partial(review_sampled, p_target=self.probs, lenience=self.lenience,
                         generator=generator)
        tokens = self.draft(expand.remaining, review)
        first = self.gen.committed + 1                           # the position after the root
        p_draft = distributions(self.gen, first, self.vocab, root.device)
        return chain_of(tokens, root.device, p_draft)

# ---------------------------------------------------------------- the demo
def main():
    """A cascade of random models gives plain decoding's output in fewer forwards of the target."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                         initializer_range=0.1)
    models = []
    for noise in (0, 0.005, 0.01):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).double()
        for p in model.parameters():
            p.data += noise * torch.randn_like(p)
        models.append(Target(model))
    target, *draft_models = models
    plain = generate(target, None, root_only, [1], 60)
    drafter = Cascade(draft_models, gram=MaxGram())
    out = generate(target, drafter, drafter.chain, [1], 60)
    assert out.tokens == plain.tokens and len(out.rounds) < 50
    print(f"60 tokens in {len(out.rounds)} rounds, the same as those of plain decoding")

# Differences from the paper, all of them:
#  1. A step drafts, and the review by the model it drafts for follows it.  The recursion ends at
#     Max-Gram or the smallest model.  Limits: of the output, of a model's context.
#  2. The while loop counts the tokens of all its reviews (cascade_step); the authors' code those of
#     the whole call, against k_1 + ... + k_i.
#  3. At l = 1 greedy review is by the argmax alone (review_greedy).
#  4. A token that a lenient review rejects is replaced by a sample of section 2's residual
#     (lenient_distribution).  The authors' code is greedy only, and compares the probabilities of
#     drafter and reviewer at two different positions.
#  5. Drafts may be sampled (distributions).
#  6. By default K asks the first model for 1 token, Table 2 for 5 to 8 (Cascade).
# Misprints: Algorithm 1 unpacks n - 1 values of k for n iterations, and appends p_1 ... p_v
#     where it means the new ones, p_s ... p_v.  Section 5.2's k_21 should read k_22.

if __name__ == "__main__":
    main()
