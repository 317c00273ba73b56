"""Cascade speculative drafting: a drafter reviews what smaller drafters have drafted.

Cascade Speculative Drafting (arXiv 2312.11462): Algorithm 1, sections 3 and 5, Tables 2 and 3.
Max-Gram, section 3.3, is maxgram.py; the analysis, section 4, is figures/ewif.py.

The idea.  In speculative decoding the drafter writes token by token, which takes most of the
drafting time.  In the *vertical* cascade a smaller model drafts for the drafter, which reviews all
these tokens in one forward; and so on down to Max-Gram, which costs nothing.  In the *horizontal*
cascade the largest drafter provides the first tokens of a proposal, which are the most likely to be
accepted, and smaller ones the later tokens.  Together they are one recursion, cascade_step().

    paper                shape    name here
    M_t                           target
    draftList: M_d1 ...           draft_list, the largest first; Max-Gram (MaG), if any, is the last
    curGen, curProbs     tokens   gen.tokens, gen.probs; prefix, cur_prefix are lengths of gen
    K_nn                 (n, n)   K, upper triangular: row 0 for M_t's reviews, row i for M_di's
    k_i                  int      k_i, in the first row of K: tokens of M_di
    l                    float    lenience, of reviews by drafters, but not of Max-Gram's tokens

The paper has two meanings of k; both are lower bounds, since one review may add more tokens.
    Algorithm 1, and Table 1: k_i counts the tokens that M_di adds.  So does K here.
    Table 2: k_12 includes k_11.  Its 8, 13, 1 is K = [[8, 5, 10], [0, 1, 10], [0, 0, 10]], with
    Max-Gram's 10 (section 5.2).  table2() and bench.py's `k=(8, 13, 1)` follow Table 2.

To use it alone, with verify.py and maxgram.py beside this file, three causal LMs with one tokenizer
and a list of token ids `text`:

    target, *stages = [verify.Target(model) for model in (large, base, small)]
    drafter = cascade.Cascade(stages, gram=maxgram.MaxGram())
    out = verify.generate(target, drafter, cascade.proposal, text, max_new_tokens=40)
    text += out.tokens

proposal() builds the cascade's own chain of greedy drafts, at any temperature of the target; with
drawn=True and verify.Sampled (`--tree drawn`) of sampled drafts, each with its p_draft.  Both are
lossless.  Any other builder sees the distributions along the greedy chain, and none off it: its
tree costs as much drafting as that chain, and ends where lenience kept a less probable token.

Differences from the paper:
 1. Algorithm 1's base case takes an element of an empty list.  Here the recursion ends at Max-Gram,
    called once for its k tokens; or, in S Decoding, at a model that has nothing to review.
 2. As printed, curPrefix <- curGen inside the while loop restarts its count, so that one review
    would have to add k_i tokens.  Here (stop="own") all reviews of a stage count.  The authors'
    code (stop="sum") counts all that this call has added, up to k_1 + ... + k_i: what a stage adds
    beyond its k_i, the next one need not add.  Max-Gram adds its full 10 there, or nothing.
 3. Misprints: n - 1 values of k for n loops; p_1 ... p_v for the new ones; section 5.2's k21: k22.
 4. No proposal is longer than the rest of the output.  After a full context smaller stages go on.
 5. The authors' code (greedy only) compares probabilities of two positions in its lenient review.

    python cascade.py        # the demo: a cascade of random models is lossless
    python bench.py --drafter "cascade(base, small, maxgram, k=(8, 13, 1), lenience=3)" --tree chain
"""
import math
from collections import Counter
from functools import partial

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from maxgram import MaxGram
from verify import CHUNK, Target, Tree, UserError, accept, accept_drawn, generate, root_only

GRAM = 10                       # tokens that Max-Gram proposes at once (section 5.2)
HORIZON = 64                    # the longest chain that is drafted for a tree builder

# ---------------------------------------------------------------- Algorithm 1
class Gen:
    """curGen and curProbs of Algorithm 1.

    tokens: `committed` tokens of the text, the root, then the drafts of this round.
    probs: None up to the root (Algorithm 1 has ones); for a draft (V,) of the model that wrote or
        last reviewed it, logits, or a distribution where drafts are sampled; a float, Max-Gram's
        confidence, for a draft that nobody has reviewed.
    runs: forwards of each stage, and proposals of Max-Gram.
    unchanged: for each stage, how many first tokens are the same as at its last forward.
    """
    def __init__(self):
        self.tokens = []
        self.probs = []
        self.committed = 0
        self.device = None                                       # the target's
        self.runs = Counter()
        self.unchanged = {}

    def replace(self, first, tokens, probs):
        """Put these tokens, and as many probs, in the place of all from position `first` on."""
        self.tokens[first:] = tokens
        self.probs[first:] = probs
        for stage, length in self.unchanged.items():
            self.unchanged[stage] = min(length, first)

    def logits_from(self, stage, last):
        """One forward of a stage -> logits (last, V), those of the last tokens."""
        self.runs[stage] += 1
        # So the stage need not compare a long text with its cache from the first token on.
        unchanged = self.unchanged.get(stage, 0)
        self.unchanged[stage] = len(self.tokens)
        logits = stage.sync(self.tokens, last, unchanged)
        return logits.to(self.device)

def cascade_step(target, draft_list, K, gen, limit, review, stop="own", is_first_call=True):
    """Algorithm 1, CascadeSpeculativeDraftingStep: draft_list drafts, and `target` reviews, in gen.

    target: a verify.Target; at the first call it is not used.  draft_list: n stages, Targets, the
    last of which may be a MaxGram.  K: n lists of n counts.  stop: difference 2.
    limit: drafts fill gen to at most `limit` tokens; after them the review may add one of target's.
    review(logits, gen, first) accepts drafts, which begin at `first`, and adds a token of target's.

    A trace with K = [[2, 2], [0, 3]].  base continues abcdefg..., small too, but with x after f:

        call                       gen       what happened
        step(M_t, [base, small])   a         i = 1: base has to add k_1 = 2 tokens
          step(base, [small])      a         i = 1: small has to add k_1 = 3, with nothing to review
            step(small, [])        ab        and twice more: abc, abcd
            base reviews           abcde     it accepts bcd and adds e: 4 tokens, 2 more than needed
          step(small, [])          abcdef    i = 2: small has to add k_2 = 2: once more, abcdefx
        M_t reviews                abcdefg   (in verify.generate) it accepts bcdef and adds g
    """
    # curGen <- prefix
    prefix = len(gen.tokens)
    # Perform the horizontal cascade with the for loop.
    for i, cur_target in enumerate(draft_list):
        # [k_1 ... k_n] <- first row of K
        k_i = K[0][i]
        cur_prefix = len(gen.tokens)
        if stop == "own":
            enough = cur_prefix + k_i
        else:
            enough = prefix + sum(K[0][:i + 1])
        # Generate using MaG for the base case of the recursive call.
        if isinstance(cur_target, MaxGram):
            most = min(k_i, limit - cur_prefix)
            if most > 0 and cur_prefix < enough:
                propose(cur_target, gen, most)
            break
        # Prepare the arguments for the next recursive call.
        cur_draft_list = draft_list[i + 1:]
        cur_k = [row[i + 1:] for row in K[i + 1:]]
        # The review adds one token, and cur_target reads no more than its context holds.
        cur_limit = min(limit - 1, cur_target.capacity)
        while len(gen.tokens) < enough and len(gen.tokens) <= cur_limit:
            # Perform the vertical cascade with the recursive call.
            cascade_step(cur_target, cur_draft_list, cur_k, gen, cur_limit, review, stop, False)
    # Use M_t to review the draft generation.  At the first call verify.generate does, with l = 1.
    if not is_first_call:
        drafts = len(gen.tokens) - prefix
        logits = gen.logits_from(target, drafts + 1)             # of each draft, and of one more
        review(logits, gen, prefix)

def propose(max_gram, gen, most):
    """Max-Gram adds up to `most` tokens.  Proposals cost nothing, but are counted as runs."""
    gen.runs[max_gram] += 1
    uncommitted = gen.tokens[gen.committed:]
    tokens, match_lengths = max_gram.propose(uncommitted, most)
    confidences = [max_gram.confidence_of(length) for length in match_lengths]
    gen.replace(len(gen.tokens), tokens, confidences)

# ---------------------------------------------------------------- the reviews
def keep_chosen(gen, first, choice, probs):
    """Accept the n drafts from `first` on while they are the reviewer's choice; add its next one.

    choice: list (n + 1,); probs: (n + 1, V) or a list, the reviewer's predictions.
    """
    chain = gen.tokens[first - 1:]                               # the token before, the drafts
    _, new = accept(chain, range(-1, len(chain) - 1), choice)
    gen.replace(first, new, probs[:len(new)])

def review_greedy(logits, gen, first, lenience):
    """Accept x_i where argmax M_r(x)[i] = x_i, M_r being the reviewer, whose logits are (n + 1, V).

    With lenience l > 1 (section 3.1) also where M_d(x)[i] <= l M_r(x)[i].
    """
    choice = logits.argmax(-1)                                   # (n + 1,)
    if lenience > 1:
        p_reviewer = logits.float().softmax(-1)                  # (n + 1, V)
        for i, x in enumerate(gen.tokens[first:]):
            draft_logits = gen.probs[first + i]
            # No lenience for Max-Gram's drafts (section 5.2), which have a confidence, no logits.
            if torch.is_tensor(draft_logits):
                p_draft = draft_logits.float().softmax(-1)       # (V,)
                accepted = p_draft[x] <= lenience * p_reviewer[i, x]
                choice[i] = torch.where(accepted, x, choice[i])
    keep_chosen(gen, first, choice.tolist(), logits)

def review_drawn(logits, gen, first, warp, lenience, generator):
    """Speculative sampling (section 2), with lenience l (section 3.1)."""
    p_draft = distributions(gen, first, logits.shape[-1])        # (n, V)
    p_reviewer = warp(logits)                                    # (n + 1, V)
    p_new = p_reviewer                                           # what the new tokens will follow
    if lenience > 1:
        # No lenience for Max-Gram's drafts (section 5.2)
        of_models = [torch.is_tensor(p) for p in gen.probs[first:]]
        of_models = torch.tensor(of_models, dtype=torch.bool, device=gen.device)
        l = torch.where(of_models, lenience, 1.0)                # (n,)
        lenient = lenient_distribution(p_reviewer[:-1], p_draft, l[:, None])
        p_new = torch.cat((lenient, p_reviewer[-1:]))
    chain = torch.tensor(gen.tokens[first - 1:], device=gen.device)          # (n + 1,)
    parents = torch.arange(-1, len(chain) - 1, device=gen.device)
    choice = accept_drawn(Tree(chain, parents, p_draft), p_new, generator)   # (n + 1,)
    keep_chosen(gen, first, choice.tolist(), p_new)

def lenient_distribution(p_reviewer, p_draft, l):
    """The distribution q' (n, V) after a lenient review.  p_reviewer, p_draft (n, V); l (n, 1).

    Section 3.1, with p for p_reviewer and q for p_draft: a draft x, sampled from q, is accepted
    with probability min(1, l p(x) / q(x)), else a token is sampled from norm(max(0, p - q)):
        q'(x) = min(q(x), l p(x)) + P(rejection) norm(max(0, p - q))(x)
        P(rejection) = 1 - sum_y min(q(y), l p(y))
    review_drawn reviews by the standard rule, with q' in the place of p.  That is the same:
        where p(x) > q(x)      q'(x) >= q(x), so that x is accepted, as it is above
        where p(x) <= q(x)     q'(x) / q(x) = min(1, l p(x) / q(x))
        after a rejection      max(0, q' - q) is a multiple of max(0, p - q)
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

def distributions(gen, first, vocab):
    """p_draft (n, V) of gen's drafts from `first` on; Max-Gram's tokens have probability 1."""
    p_draft = torch.zeros(len(gen.tokens) - first, vocab, device=gen.device)
    for row, token, p in zip(p_draft, gen.tokens[first:], gen.probs[first:]):
        if torch.is_tensor(p):
            row.copy_(p)
        else:
            row[token].fill_(1)
    return p_draft

# ---------------------------------------------------------------- encoder and decoder
class EncoderDecoder(Target):
    """An encoder-decoder target or stage, such as FLAN-T5 (section 5.2), for chains alone."""
    encoder_decoder, verifies_trees = True, False

    def remaining(self, ids):
        """The prompt takes no position of the decoder, but its start token takes one."""
        return self.capacity

    def prefill(self, ids, new_tokens=0):
        """Read the prompt, and show it to the drafter -> logits (V,) of the first token."""
        self.encode(ids)
        if "source" in self.needs:
            self.needs["source"](ids)
        self.cache.reserve(1 + new_tokens + CHUNK)
        start = self.model.generation_config.decoder_start_token_id
        return self.sync([start])[-1]

    def encode(self, ids):
        """Run the encoder over ids (list); the decoder's cache is emptied."""
        self.reset()
        ids = torch.tensor([ids], device=self.device)
        encoder = self.model.get_encoder()
        self.encoded = encoder(input_ids=ids, attention_mask=torch.ones_like(ids))
        # run() sets the first cache; the first step fills the second one, of cross-attention.
        self.caches = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def forward(self, tokens, parents=None, logits_to_keep=0):
        """As Target.forward, of a chain."""
        chain = list(range(-1, len(tokens) - 1))
        if parents is not None and parents.tolist() != chain:
            raise UserError(f"{type(self.model).__name__} verifies chains only (its decoder counts "
                            "positions by the cache, not by depth in a tree): use --tree chain")
        return super().forward(tokens, parents, logits_to_keep)

    def run(self, keys, tokens, position, slots, mask, logits_to_keep=0):
        """As Target.run.  The decoder knows a chain's positions and mask by itself."""
        self.caches.self_attention_cache = self.cache.step(slots, keys)
        out = self.model(encoder_outputs=self.encoded, decoder_input_ids=tokens[None],
                         past_key_values=self.caches, use_cache=True)
        return [out.logits[0, -logits_to_keep:]]

# ---------------------------------------------------------------- the drafter
def table2(k, neural, gram):
    """Table 2's k_11, k_12, k_22 of two models (of `neural` ones) -> K; gram: is Max-Gram the last?

    k None: all ones, for drafters that cost a tenth of the target or more; the paper's cost far
    less.  Where k_12 = k_11, as there, the second model drafts for the first one alone.
    """
    wanted = neural * (neural + 1) // 2
    rest = [1] * wanted if k is None else list(k)
    if len(rest) != wanted:
        raise UserError(f"k={tuple(k)}: {neural} neural stage(s) take {wanted} number(s)")
    max_gram = [GRAM] if gram else []
    K = []
    for r in range(neural + len(max_gram)):
        # Row r: of the models from r on, each with those before it included
        sums = rest[:neural - r]
        rest = rest[neural - r:]
        counts = [after - before for before, after in zip([0, *sums], sums)]
        K.append([0] * r + counts + max_gram)
    return checked(K, len(K))

def checked(K, n):
    """K if it is an upper triangular n x n matrix of counts, else UserError."""
    if [len(row) for row in K] != [n] * n:
        raise UserError(f"K {K}: {n} stages take a matrix of {n} x {n}")
    for r, row in enumerate(K):
        if any(row[:r]):
            raise UserError(f"K {K} is not upper triangular: a stage reviews smaller ones only")
        if min(row) < 0:
            raise UserError(f"K {K}: a count is negative; in a row of Table 2 k never falls")
    if sum(K[0]) < 1:
        raise UserError(f"K {K}: the target must be given something to review")
    return K

class Cascade:
    """A sequence drafter for verify.generate; the contract is at the top of verify.py."""

    def __init__(self, targets, K=None, lenience=1.0, gram=None, vocab=None, stop="own"):
        """targets: a verify.Target for each model, the largest first.  gram: a MaxGram, or None.

        K: Algorithm 1's matrix (see table2).  vocab: shared vocabulary size.  stop: difference 2.
        """
        if not targets and (gram is None or vocab is None):
            raise UserError("a cascade needs a model, or gram=MaxGram(...) and vocab=target.vocab")
        if not lenience >= 1:
            raise UserError(f"lenience is {lenience}: it must be at least 1, which is none")
        if stop not in ("own", "sum"):
            raise UserError(f"stop is {stop!r}: say 'own' or 'sum'")
        self.needs = {"source": self.source}
        self.stages = list(targets)
        self.gram = gram
        self.draft_list = self.stages if gram is None else [*self.stages, gram]
        K = K or table2(None, len(self.stages), gram is not None)
        self.K = checked(K, len(self.draft_list))
        self.lenience = lenience
        self.stop = stop
        self.vocab = vocab or targets[0].vocab
        for stage in self.stages:
            if stage.vocab != self.vocab:
                raise UserError(f"a stage has {stage.vocab} ids, not {self.vocab}: any_target pads")
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.gen = Gen()
        for stage in self.draft_list:
            stage.reset()

    @property
    def runs(self):
        """Forwards of each stage since reset(), and proposals of Max-Gram."""
        return [self.gen.runs[stage] for stage in self.draft_list]

    def source(self, ids):
        """An encoder-decoder target's input: each stage encodes it, Max-Gram searches it."""
        for stage in self.stages:
            stage.encode(ids)
        if self.gram is not None:
            self.gram.commit_source(ids)

    def begin(self, view):
        """A round starts: newly committed tokens take the place of the last drafts."""
        gen = self.gen
        new = view.ids
        gen.replace(gen.committed, new, [None] * len(new))
        gen.committed = len(gen.tokens)
        gen.device = view.tokens.device
        if self.gram is not None:
            self.gram.commit(new)
        self.paths = None                        # of this round's tree, see expand

    def keep(self, path):
        """Nothing to do: Target.sync drops rejected tokens from a stage's cache."""

    def write(self, root, most, warp=None, generator=None):
        """Add the root and a proposal of at most `most` tokens to gen -> its first position."""
        review = partial(review_greedy, lenience=self.lenience)
        if generator is not None:
            review = partial(review_drawn, warp=warp, lenience=self.lenience, generator=generator)
        gen = self.gen
        gen.replace(gen.committed, [root], [None])
        first = len(gen.tokens)
        cascade_step(None, self.draft_list, self.K, gen, first + most, review, self.stop)
        return first

    def chain(self, root, most, warp=None, generator=None):
        """A proposal of at most `most` tokens -> (list (n,), p_draft (n, V), or None if greedy)."""
        first = self.write(root, most, warp, generator)
        tokens = self.gen.tokens[first:]
        if generator is None:
            return tokens, None
        return tokens, distributions(self.gen, first, self.vocab)

    def expand(self, tokens, parents):
        """Logits (m, V) along the greedy chain; -inf for nodes off it, and for its last one."""
        logits = torch.full((len(parents), self.vocab), -math.inf, device=tokens.device)
        ids = tokens.tolist()
        if self.paths is None:
            # The first node of a round is the root.
            self.write(ids[0], HORIZON)
            self.paths = []                      # of each node, the tokens from the root to it
        chain = self.gen.tokens[self.gen.committed:]             # the root and the drafts
        probs = self.gen.probs[self.gen.committed:]
        for row, token, parent in zip(logits, ids, parents):
            ancestors = self.paths[parent] if parent >= 0 else []
            path = [*ancestors, token]
            self.paths.append(path)
            n = len(path)
            if chain[:n] != path or n == len(chain):
                continue
            p = probs[n]                         # of the chain's next token
            if torch.is_tensor(p):
                row.copy_(p)
            else:
                # Max-Gram: its confidence, and the rest evenly over all other tokens
                row.fill_((1 - p) / (self.vocab - 1))
                row[chain[n]].fill_(p)
                row.log_()
        return logits

def proposal(expand, root, drawn=False):
    """The builder of a drafter's own chain -> Tree.  drawn: sampled, where the rule samples."""
    warp = getattr(expand.rule, "warp", None)
    generator = expand.generator if drawn and warp else None
    drafts, p_draft = expand.drafter.chain(expand.root, expand.remaining, warp, generator)
    tokens = torch.tensor([expand.root, *drafts], device=root.device)
    parents = torch.arange(-1, len(tokens) - 1, device=root.device)
    return Tree(tokens, parents, p_draft)

def main():
    """A cascade of random models gives plain decoding's output in fewer forwards of the target."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=30, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                         num_attention_heads=4, initializer_range=0.1)
    targets = []
    for noise in (0, 0.005, 0.01):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).double()
        for p in model.parameters():
            p.data += noise * torch.randn_like(p)
        targets.append(Target(model))
    target, *stages = targets
    prompt = list(range(10))
    plain = generate(target, None, root_only, prompt, 60)
    drafter = Cascade(stages, gram=MaxGram())
    out = generate(target, drafter, proposal, prompt, 60)
    assert out.tokens == plain.tokens, "lossless"
    # M_t runs once for the prompt, and once a round.
    runs = [1 + len(out.rounds), *drafter.runs]
    assert runs[0] < 60, "fewer forwards of the target than tokens"
    print(f"60 tokens in {runs} forwards of the target and of each stage")

if __name__ == "__main__":
    main()
