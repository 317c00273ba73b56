"""What a decoding takes, measured from outside: verify.generate knows no clock.

    record = decode(target, drafter, build, ids, 128)       # verify.generate, timed
    record.total["draft"]                                   # seconds in the drafter

And what some trees must know of this machine before they are built:

    prices(decode, drafters, prompts)     # of a draft and of a node, for pct, pct-cost and graft
"""
import inspect
import time
from collections import Counter, namedtuple
from functools import partial

import torch
from tqdm import tqdm

import pct
import verify
from beyond import priced

# {method of a target or a drafter: what its time counts as}
METHODS = {"prefill": "prefill", "forward": "verify", "begin": "begin", "expand": "draft",
           "chain": "draft", "drawn": "draft"}
TURNS = 12               # how often prices() decodes with each drafter, after one turn to warm up
ENOUGH = 30              # seconds after which it stops sooner,
FEWEST = 6               # though not before this many turns
PRICE_TOKENS = 24        # of each of its decodings

# What one decoding gave, and what it took; all of it can be written as JSON.
#   tokens      the new token ids
#   total       {what: sum over the rounds}: counts, see counts_of; and seconds:
#                 prefill, draft (in the drafter), verify (in the target), other (all the rest);
#                 begin: the part of draft before a round's first forward, for committed tokens;
#                 0, 1, ...: the parts of draft in the forwards of each model of a cascade
#   stage_runs  the number of forwards of each stage of a cascade
#   seconds     of the whole decoding, prefill included
Record = namedtuple("Record", "tokens total stage_runs seconds", defaults=((), None))

# ---------------------------------------------------------------- the clock
class Clock:
    """Seconds of one decoding, by what they were spent on.

    Time outside of all timed calls counts as "prefill" before the first round, and then as "other".
    A timed call within another one counts for itself alone.
    """
    def __init__(self, cuda=False):
        self.cuda, self.now_in = cuda, "prefill"
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

    def timed(self, function, what):
        """The same function, with the time of its calls counted as `what`."""
        def call(*args, **more):
            before = self.now_in
            self.mark(before)
            self.now_in = what
            result = function(*args, **more)
            self.mark(what)
            self.calls[what] += 1
            is_first_round = before == "prefill" != what
            self.now_in = "other" if is_first_round else before
            return result
        return call

    def around(self, inner):
        """A target or a drafter whose METHODS are timed, and the models of a cascade with it."""
        for number, model in enumerate(getattr(inner, "models", ())):
            of_class = partial(type(model).align, model)          # not that of an earlier clock
            model.align = self.timed(of_class, str(number))
        return Timed(inner, self)

    def builder(self, build):
        """A builder, timed where it is a drafter's own method: then building it is drafting."""
        is_drafting = inspect.ismethod(build) and build.__name__ in METHODS
        return self.timed(build, METHODS[build.__name__]) if is_drafting else build

    def seconds(self):
        """To be called when the decoding is over -> Counter {what: seconds}"""
        self.mark(self.now_in)
        if self.cuda:
            self.marks[-1][1].synchronize()
        seconds = Counter()
        for (_, before), (what, now) in zip(self.marks, self.marks[1:]):
            seconds[what] += before.elapsed_time(now) / 1000 if self.cuda else now - before
        return seconds

class Timed:
    """See Clock.around.  Everything else is the target's or drafter's own."""
    def __init__(self, inner, clock):
        self.inner = inner
        for name, what in METHODS.items():
            if hasattr(inner, name):
                setattr(self, name, clock.timed(getattr(inner, name), what))

    def __getattr__(self, name):
        return getattr(self.inner, name)

class Overlap(verify.Rule):
    """A Rule that records sum_x min(p_target(x), p_draft(x)) for a sampled chain: GLIDE's alpha.

    overlaps: an entry for each tree, the prefill's first: a tensor (n - 1,), one number for each
    drafted token; or None for a tree without p_draft.  In greedy decoding it stays empty.
    """
    def __init__(self, rule):
        self.__dict__ |= rule.__dict__
        self.overlaps = []

    def choose(self, tree, logits, ids):
        if self.greedy:
            return super().choose(tree, logits, ids)
        p_target = self.p_target(logits)                                               # (n, V)
        overlap = None
        if tree.p_draft is not None:
            # After the last node nothing was drafted.
            overlap = torch.minimum(p_target[:-1], tree.p_draft).sum(1)
        self.overlaps.append(overlap)
        return super().choose(tree, logits, ids)

# ---------------------------------------------------------------- one decoding
def decode(target, drafter, build, ids, limit, rule=verify.Rule(), eos=(), streamer=None):
    """verify.generate, timed -> Record.  drafter None and build root_only: plain decoding."""
    cuda = target.device.type == "cuda"
    rule = Overlap(rule)
    start = time.perf_counter()
    clock = Clock(cuda)
    timed = clock.around(drafter) if drafter else None
    out = verify.Output()
    for one in verify.rounds(clock.around(target), timed, clock.builder(build), ids, limit, rule,
                             eos):
        out.tokens += one.new
        out.rounds += [one] if one.tokens else []
        if streamer:
            streamer.put(torch.tensor(one.new))
    if streamer:
        streamer.end()
    seconds = clock.seconds()
    total = counts_of(out.rounds, rule.overlaps)
    total.update(seconds)
    models = [seconds[str(number)] for number in range(len(getattr(drafter, "models", ())))]
    total["draft"] += total["begin"] + sum(models)
    stage_runs = getattr(drafter, "runs", [])
    total["draft_forwards"] = sum(stage_runs) or clock.calls["draft"]
    return Record(out.tokens, total, stage_runs, time.perf_counter() - start)

def counts_of(rounds, overlaps=()):
    """Sums over the verify.Rounds of a decoding -> Counter

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
def prices(decode, drafters, prompts):
    """Prices of {label: drafter} -> {label: see priced.prices_of, or None}

    decode(drafter, build, ids, limit) -> Record.  prompts: [(ids, limit)], none of the table's.
    All drafters take turns with plain decoding, since other programs may disturb the machine for a
    while.  None: for a cascade with a model, which drafts its whole chain whatever the tree, and
    where all outputs ended at once.
    """
    rounds = {label: rounds_for_prices(drafter) for label, drafter in drafters.items()}
    started = time.perf_counter()
    turns = []
    for turn in tqdm(range(1 + TURNS), "measuring prices", unit="turn", leave=False, disable=None):
        ids, limit = prompts[turn % len(prompts)]
        limit = min(limit, PRICE_TOKENS)
        plain = spent(decode(None, verify.root_only, ids, limit))
        of_label = {}
        for label, kinds in rounds.items():
            of_label[label] = [spent(decode(*how, ids, limit)) for how in kinds]
        if turn > 0:
            turns.append((plain, of_label))
        if turn >= FEWEST and time.perf_counter() - started > ENOUGH:
            break
    return {**dict.fromkeys(drafters), **priced.prices_of(turns)}

def rounds_for_prices(drafter):
    """Decodings with trees of several sizes -> [(drafter, builder)]"""
    models = getattr(drafter, "models", None)              # of a cascade
    if models:
        return []
    if models == []:
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
    return verify.Tree(tokens, parents, torch.full_like(parents, -1))

def spent(record):
    """A Record -> priced.Spent"""
    total = record.total
    return priced.Spent(total["rounds"], total["nodes"], total["draft_forwards"],
                        total["draft"] - total["begin"], total["verify"], total["other"])
