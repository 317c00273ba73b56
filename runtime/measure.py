"""What a decoding takes, measured from outside: verify.generate knows no clock.

    clock = Clock()
    out = verify.generate(clock.around(target), clock.around(drafter), build, ids)
    Record(out.tokens, out.rounds, clock).total["draft"]               # seconds

And what some trees must know of this machine before they are built:

    prices(run)                                    # of a draft and of a node, for pct and pct-cost
"""
import time
from collections import Counter
from functools import partial

import torch

import pct
import verify
from beyond import priced

# {method of a target or a drafter: what its time counts as}
METHODS = {"prefill": "prefill", "forward": "verify",
           "begin": "begin", "expand": "draft", "chain": "draft"}
TURNS = 12               # how often prices() decodes with each drafter, after one turn to warm up
ENOUGH = 30              # seconds after which it stops sooner,
FEWEST = 6               # though not before this many turns
PRICE_TOKENS = 24        # of each of its decodings

# ---------------------------------------------------------------- the clock
class Clock:
    """Seconds of one decoding, by what they were spent on.

    calls counts the calls of each timed method.  Before the first round untimed work counts as
    "prefill", after that as "other".
    """
    def __init__(self, cuda=False):
        self.cuda, self.untimed = cuda, "prefill"
        self.marks, self.calls = [], Counter()
        self.mark(None)

    def mark(self, what):
        """The time since the last mark was spent on `what`."""
        if self.cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self.marks.append((what, now))

    def around(self, inner):
        """A target or a drafter whose METHODS are timed."""
        return Timed(inner, self)

    def timed(self, method, what):
        """A method as a function whose calls are timed."""
        def call(*args, **more):
            self.mark(self.untimed)
            result = method(*args, **more)
            self.mark(what)
            self.calls[method.__name__] += 1
            self.untimed = "prefill" if what == "prefill" else "other"
            return result
        return call

    def parts(self):
        """To be called when the decoding is over -> [(what, seconds)], in order."""
        self.mark(self.untimed)
        if self.cuda:
            self.marks[-1][1].synchronize()
        parts = []
        for (_, before), (what, now) in zip(self.marks, self.marks[1:]):
            seconds = before.elapsed_time(now) / 1000 if self.cuda else now - before
            parts.append((what, seconds))
        return parts

class Timed:
    """See Clock.around.  Everything else is the target's or drafter's own."""
    def __init__(self, inner, clock):
        self.inner = inner
        for name, what in METHODS.items():
            if hasattr(inner, name):
                method = getattr(inner, name)
                setattr(self, name, clock.timed(method, what))

    def __getattr__(self, name):
        return getattr(self.inner, name)

class Overlap(verify.Sampled):
    """Sampling that records sum_x min(p_target(x), p_draft(x)) for a sampled chain: GLIDE's alpha.

    overlaps: an entry for each call of choose(): a tensor (n - 1,), one for each drafted token; or
    None for a tree without p_draft.
    """
    def __init__(self, temperature, top_k, top_p, seed):
        super().__init__(temperature, top_k, top_p, seed)
        self.overlaps = []

    def warp(self, logits):
        self.p_target = super().warp(logits)                                           # (n, V)
        return self.p_target

    def choose(self, tree, logits, first):
        choice = super().choose(tree, logits, first)
        overlap = None
        if tree.p_draft is not None:
            # choose() has warped the target's logits.  After the last node nothing was drafted.
            overlap = torch.minimum(self.p_target[:-1], tree.p_draft).sum(1)
        self.overlaps.append(overlap)
        return choice

# ---------------------------------------------------------------- what one decoding gave and took
class Record:
    """What one decoding gave, and what it took.

    tokens       the new token ids
    rounds       [verify.Round]; none from transformers' own generate()
    parts        [(what, seconds)] in order: prefill, begin, draft, verify, other
    stage_runs   forwards of each stage of a cascade
    total        sums over the rounds: see counts_of, and the seconds of each part.
                 "draft" is all time in the drafter, and "begin" is its part before the first
                 forward of a round, for tokens that were just committed.
    seconds      of the whole decoding, prefill included; bench.py sets it
    """
    def __init__(self, tokens, rounds=(), clock=None, overlaps=(), stage_runs=()):
        self.tokens, self.rounds, self.stage_runs = tokens, rounds, list(stage_runs)
        self.parts, self.seconds = [], None
        self.total = counts_of(rounds, overlaps)
        if clock:
            self.parts = clock.parts()
            for what, seconds in self.parts:
                self.total[what] += seconds
            self.total["draft"] += self.total["begin"]
            called = clock.calls["expand"] + clock.calls["chain"]
            self.total["draft_forwards"] = sum(stage_runs) or called

    def speed(self):
        """Tokens per second, prefill included."""
        return len(self.tokens) / self.seconds

def counts_of(rounds, overlaps=()):
    """Sums over the rounds of a decoding -> Counter

    rounds, new (tokens), nodes (excluding the root), depth; accepted and tested nodes; trees: how
    many rounds had siblings; drawn, overlap: rounds with a sampled chain, see Overlap.
    """
    total = Counter()
    # The rule also chose the first root, before the first round.
    overlaps = list(overlaps)[1:] or [None] * len(rounds)
    for one, overlap in zip(rounds, overlaps):
        depths = [0]
        for parent in one.parents[1:]:
            depths.append(depths[parent] + 1)
        drafted = len(depths) - 1
        # Where the text ended within the path, nothing after its end was tested.
        accepted = min(len(one.path) - 1, len(one.new))
        rejected = accepted < len(one.new) and accepted < drafted
        tested = accepted + 1 if rejected else accepted
        total.update(rounds=1, new=len(one.new), nodes=drafted, depth=max(depths))
        total.update(accepted=accepted, tested=tested)
        total.update(trees=max(depths) < drafted, drawn=overlap is not None)
        if overlap is not None:
            total["overlap"] += overlap[:tested].sum().item()
    return total

# ---------------------------------------------------------------- prices
def prices(run):
    """Prices of all drafters of a bench.Run -> {label: see priced.prices_of, or None}

    They are measured on prompts that are not in the table.  All drafters take turns with plain
    decoding, since other programs may disturb the machine for a while.  None: for a cascade with a
    model, which drafts its whole chain whatever the tree, and where all outputs ended at once.
    """
    prompts = run.unmeasured
    rounds = {label: rounds_for_prices(drafter) for label, drafter in run.drafters.items()}
    started = time.perf_counter()
    turns = []
    for turn in range(1 + TURNS):
        _, ids, limit = prompts[turn % len(prompts)]
        limit = min(limit, PRICE_TOKENS)
        plain = spent(run.decode(None, verify.root_only, ids, limit))
        of_label = {}
        for label, kinds in rounds.items():
            of_label[label] = [spent(run.decode(*how, ids, limit)) for how in kinds]
        if turn > 0:
            turns.append((plain, of_label))
        if turn >= FEWEST and time.perf_counter() - started > ENOUGH:
            break
    return {**dict.fromkeys(run.drafters), **priced.prices_of(turns)}

def rounds_for_prices(drafter):
    """Decodings with trees of several sizes -> [(drafter, builder)]"""
    if getattr(drafter, "stages", None):
        return []
    if hasattr(drafter, "chain"):
        # Max-Gram drafts without a forward.  What a node costs, any tokens show.
        return [(None, partial(repeated_root, nodes=nodes)) for nodes in (1, 8, 24)]
    # 1, 5 and 20 nodes.  Not only a few: on some machines a forward of 2 tokens takes longer than
    # one of 4 (AMD EPYC, MKL, 2 cores), and a slope over few nodes would come out as 0.
    shapes = [{"width": 1, "depth": 1}, {"width": 1, "depth": 5}, {"width": 4, "depth": 2}]
    return [(drafter, partial(pct.vct, **shape)) for shape in shapes]

def repeated_root(expand, root, nodes):
    """A chain that repeats the root's token -> Tree"""
    tokens = root.repeat(1 + nodes)
    parents = torch.arange(-1, nodes, device=root.device)
    return verify.Tree(tokens, parents)

def spent(record):
    """A Record -> priced.Spent"""
    total = record.total
    drafting = total["draft"] - total["begin"]
    return priced.Spent(total["rounds"], total["nodes"], total["draft_forwards"], total["begin"],
                        drafting, total["verify"], total["other"])
