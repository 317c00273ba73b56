"""What a decoding takes, measured from outside: verify.generate knows no clock.

    clock = Clock()
    timed = Timed(target, clock, TARGET), Timed(drafter, clock, DRAFTER)
    out = verify.generate(*timed, build, ids)
    Record(out, clock).total["draft"]                              # seconds

A Timed stands in for a target or a drafter, and marks the time before and after each call of some
methods.  All else is "other": building trees, masks, acceptance, bookkeeping.  Below the clock are
the figures of bench.py's rows: of speeds, of rounds, of a cascade's stages, of the price of a draft
and of a node.
"""
import time
from collections import Counter
from functools import partial
from statistics import median

import torch

import cape
import pct
import verify
from beyond import priced

# The methods that are timed, and what their time counts as
TARGET = {"prefill": "prefill", "forward": "verify"}
DRAFTER = {"begin": "draft", "expand": "draft", "chain": "draft"}
SHARES = ("draft", "verify", "other")              # of a round's time

# ---------------------------------------------------------------- seconds
def ratio(x, y):
    """x / y, or None where there is nothing to divide, or to divide by."""
    return x / y if y and x is not None else None

def expected_speedup(alpha, c, gamma):
    """GLIDE's E(Spd.) (section 5.1, after Leviathan et al. 2023), which is Cascade's Corollary 4.2.

    alpha: acceptance rate; c: one drafter forward over one target forward; gamma: drafted tokens.
    """
    # (1 - alpha^{gamma+1}) / ((1 - alpha) (c gamma + 1))
    tokens = sum(alpha ** i for i in range(gamma + 1))
    return tokens / (c * gamma + 1)

def swi(tokens, runs, costs):
    """Standardized walltime improvement (Cascade, section 5.1): 1 for plain decoding.

    tokens = n, all that were generated; runs[0] = count(S, M_t, T), runs[i] = count(S, M_di, T);
    costs[i] = c_i, a forward of M_di over one of M_t: costs[0] = 1, Max-Gram's is 0.
    Erratum: "simply the sum of GPU time by all models" describes the denominator.
    """
    assert len(runs) == len(costs) and costs[0] == 1, "each model has a cost; the target's is 1"
    # n / (count(S, M_t, T) + sum_i count(S, M_di, T) c_i)
    return tokens / sum(count * cost for count, cost in zip(runs, costs))

class Clock:
    """Seconds of one decoding by what they were spent on.  calls: how often each timed method ran.

    Until the first round all is prefill; from then on what is not timed is other.
    """
    def __init__(self, cuda=False):
        self.cuda, self.rest = cuda, "prefill"
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

    def timed(self, method, what):
        """A method as a function whose calls are timed."""
        def call(*args, **more):
            self.mark(self.rest)
            result = method(*args, **more)
            self.mark(what)
            self.calls[method.__name__] += 1
            self.rest = "prefill" if what == "prefill" else "other"
            return result
        return call

    def parts(self):
        """The decoding is over -> [(what, seconds)], in order."""
        self.mark(self.rest)
        if self.cuda:
            self.marks[-1][1].synchronize()
        parts = []
        for (_, before), (what, now) in zip(self.marks, self.marks[1:]):
            seconds = before.elapsed_time(now) / 1000 if self.cuda else now - before
            parts.append((what, seconds))
        return parts

class Timed:
    """A target or a drafter with timed methods, {method: what}; all else is its own."""
    def __init__(self, inner, clock, methods):
        self.inner = inner
        for name, what in methods.items():
            if hasattr(inner, name):
                method = getattr(inner, name)
                setattr(self, name, clock.timed(method, what))

    def __getattr__(self, name):
        return getattr(self.inner, name)

class Overlap(verify.Sampled):
    """Sampling that keeps sum_x min(p_target(x), p_draft(x)) of each drawn token: GLIDE's alpha.

    overlaps: for each time that the rule chose a tensor (n,), or None where no chain was drawn.
    """
    def __init__(self, *how, **more):
        super().__init__(*how, **more)
        self.overlaps = []

    def warp(self, logits):
        self.warped = super().warp(logits)
        return self.warped

    def choose(self, tree, logits, first):
        choice, overlap = super().choose(tree, logits, first), None
        if tree.p_draft is not None:
            # super() warped p_target (n, V) last; no token was drawn after the last node.
            overlap = torch.minimum(self.warped[:-1], tree.p_draft).sum(1)
        self.overlaps.append(overlap)
        return choice

def counts_of(rounds, overlaps=()):
    """Sums over the rounds of a decoding: new tokens, nodes, depths, accepted, tested tokens ..."""
    total = Counter()
    # The rule chose once more, before the first round.
    overlaps = list(overlaps)[1:] or [None] * len(rounds)
    for one, overlap in zip(rounds, overlaps):
        depths = [0]
        for parent in one.parents[1:]:
            depths.append(depths[parent] + 1)
        drafted = len(depths) - 1
        # Where the end of the text cut the path, nothing after the cut was tested.
        accepted = min(len(one.path) - 1, len(one.new))
        rejected = accepted < len(one.new) and accepted < drafted
        tested = accepted + rejected
        total.update(rounds=1, new=len(one.new), nodes=drafted, depth=max(depths))
        total.update(accepted=accepted, tested=tested)
        total.update(trees=max(depths) < drafted, drawn=overlap is not None)
        if overlap is not None:
            total["overlap"] += overlap[:tested].sum().item()
    return total

class Record:
    """What one decoding gave, and what it took.

    given: a verify.Output, or the tokens alone.  tokens, rounds: as there.  parts: Clock.parts().
    total: seconds of prefill, draft, verify and other, and sums over the rounds.
    stage_runs: forwards of each stage of a cascade.  seconds: of all, as the caller measured them.
    """
    def __init__(self, given, clock=None, overlaps=(), stage_runs=()):
        self.tokens, self.rounds = getattr(given, "tokens", given), getattr(given, "rounds", [])
        self.parts, self.stage_runs = clock.parts() if clock else [], list(stage_runs)
        self.seconds = None
        self.total = counts_of(self.rounds, overlaps)
        for what, seconds in self.parts:
            self.total[what] += seconds
        if clock:
            called = clock.calls["expand"] + clock.calls["chain"]
            self.total["draft_forwards"] = sum(stage_runs) or called

    def speed(self):
        """Tokens a second, prefill included."""
        return len(self.tokens) / self.seconds

    @property
    def tau(self):
        """Average acceptance length: new tokens a round, the bonus token included."""
        return self.total["new"] / max(1, self.total["rounds"])

def measured(arm, ids, limit, cuda):
    """Decode one prompt with one bench.Arm -> Record with its seconds; arm.memory is the peak."""
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    out = arm.decode(ids, limit)
    if cuda:
        torch.cuda.synchronize()
        arm.memory = max(arm.memory or 0, torch.cuda.max_memory_allocated())
    out.seconds = time.perf_counter() - start
    return out

# ---------------------------------------------------------------- figures of a row, from Records
def totals(outs):
    """Record.total of all decodings together."""
    total = Counter()
    for out in outs:
        total.update(out.total)
    return total

def distinct_4grams(outs):
    """The share of a text's 4-grams that are distinct, on average: low where it repeats itself."""
    shares = []
    for out in outs:
        grams = list(zip(*(out.tokens[i:] for i in range(4))))
        if grams:
            shares.append(len(set(grams)) / len(grams))
    return ratio(sum(shares), len(shares))

def acceptance(total, drafts=True):
    """What was drafted and accepted, from sums over rounds.  drafts: False of plain decoding."""
    rounds = total["rounds"] if drafts else 0
    # A tree has no alpha: of siblings at most one can be accepted.
    accepted = None if total["trees"] else total["accepted"]
    overlap = total["overlap"] if total["drawn"] else None
    return {
        "tau": ratio(total["new"], rounds),
        "depth": ratio(total["depth"], rounds),
        "nodes": ratio(total["nodes"], rounds),
        "draft_forwards": ratio(total["draft_forwards"], rounds),
        "alpha": ratio(accepted, total["tested"]),
        "alpha_overlap": ratio(overlap, total["tested"])}

def of_speeds(arm, base, generate, which):
    """Speeds of a bench.Arm on the prompts `which`, beside plain decoding and generate()."""
    outs = [arm.results[i] for i in which]
    tokens = sum(len(out.tokens) for out in outs)
    speeds = arm.speeds(base, which)
    quartiles = torch.tensor(speeds).quantile(torch.tensor([0.25, 0.5, 0.75]))
    low, middle, high = quartiles.tolist()
    by_prompt = []
    for speed, out in zip(speeds, outs):
        by_prompt.append({"speedup": speed, **acceptance(out.total, arm.build is not None)})
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / arm.seconds(which),
        "speedup_low": low,
        "speedup": middle,
        "speedup_high": high,
        "speedup_vs_generate": median(arm.speeds(generate, which)),
        "by_prompt": by_prompt}

def of_rounds(outs, step, drafts):
    """Averages over all rounds.  drafts: False of plain decoding, which has no tau."""
    total = totals(outs)
    rounds = total["rounds"]
    row = {"time_to_first_token": median(out.total["prefill"] for out in outs) if rounds else None}
    row |= acceptance(total, drafts)
    # EDD's alpha: tau over the deepest node
    row["alpha_depth"] = ratio(row["tau"], row["depth"])
    spent = sum(total[key] for key in SHARES)
    row["round_ms"] = ratio(1e3 * spent, rounds if drafts else 0)
    row["target_ms"] = 1e3 * step
    for key in SHARES:
        row[f"{key}_ms"] = ratio(1e3 * total[key], rounds)
        row[f"share_{key}"] = ratio(total[key], spent)
    return row

def of_stages(outs, step, drafter, row):
    """Runs of the target and of a cascade's stages; their SWI, and the speedup to expect of one.

    row: alpha, tokens and settings of the same decodings.
    """
    total = totals(outs)
    stages = [sum(counts) for counts in zip(*(out.stage_runs for out in outs))]
    # A run of the target is a round, or a prompt's prefill, as it is in plain decoding.
    runs = [total["rounds"] + len(outs), *stages]
    K = getattr(drafter, "K", None)
    found = {
        "runs": runs if total["rounds"] else None,
        "stages": getattr(drafter, "names", None),
        "K": K}
    # One model alone is speculative decoding; the runs of several are not alike.
    c = None
    if len(stages) <= 1:
        c = ratio(ratio(total["draft"], total["draft_forwards"]), step)
    alpha = row["alpha"]
    gamma = K[0][0] if K else row["settings"].get("gamma")
    found["c"] = c
    found["expected_speedup"] = None
    # Nothing accepted (alpha = 0) is a figure, too; without a cost or a length there is none.
    if alpha is not None and c and gamma:
        found["expected_speedup"] = expected_speedup(alpha, c, gamma)
    if stages:
        found["swi_measured"] = row["tokens"] / (runs[0] + total["draft"] / step)
        # Max-Gram is free.
        for how, costs in drafter.costs.items():
            found[f"swi_{how}"] = swi(row["tokens"], runs[:1 + len(costs)], [1, *costs])
    return found

# ---------------------------------------------------------------- costs of a step, a draft, a node
def plain_step(outs):
    """Seconds of a plain step, from Records of one token a forward, without their prefills."""
    steps = sum(len(out.tokens) - 1 for out in outs)
    return sum(out.seconds - out.total["prefill"] for out in outs) / max(1, steps)

TURNS, FEWEST, ENOUGH = 12, 6, 30           # turns of measure_costs; fewer after so many seconds
LONGEST = 24                                # tokens of one of its decodings

def measure_costs(run, label):
    """The prices of a drafter of bench.Run, in plain steps -> {"cost", "node_price", "start", ...}.

    cost: s_d / s_t; the rest as priced.prices_of says.  All drafters are measured at once, in turns
    with plain decoding, since other programs disturb, and kept in run.costs.  {}: it came to
    nothing, or the drafter is a cascade of models.
    """
    if label not in run.costs:
        turns = {}
        for name, drafter in run.drafters.items():
            # A cascade of models drafts its own chain, whatever the tree.
            if not getattr(drafter, "stages", None):
                turns[name] = builds_of(drafter)
        run.costs |= dict.fromkeys(run.drafters, {})
        run.costs |= measured_prices(run, turns)
    return run.costs[label]

def builds_of(drafter):
    """[(drafter, builder)] of the three kinds of rounds that priced.prices_of asks for."""
    if hasattr(drafter, "chain"):
        # Max-Gram drafts without a forward: any tokens tell what a node costs.
        return [(None, partial(made_up, nodes=nodes)) for nodes in (1, 5, 17)]
    shapes = [{"width": 1, "depth": 1}, {"width": 1, "depth": 5}, {"width": 3, "depth": 3}]
    return [(drafter, partial(pct.vct, **shape)) for shape in shapes]

def made_up(expand, root, nodes):
    """A chain of some tokens, whatever they are -> Tree"""
    tokens = root.repeat(1 + nodes)
    parents = torch.arange(-1, nodes, device=root.device)
    return verify.Tree(tokens, parents)

def measured_prices(run, builds):
    """{label: builds_of(...)} -> {label: prices}, and a note about each."""
    _, ids, limit = run.prompts[0]
    limit = min(limit, LONGEST)
    turns = {label: [] for label in builds}
    started = time.perf_counter()
    for number in range(1 + TURNS):
        plain = run.decode(None, verify.root_only, ids, limit).total
        for label, kinds in builds.items():
            totals_of_turn = [plain] + [run.decode(*build, ids, limit).total for build in kinds]
            # The first turn warms up; a prompt that is answered by one token has no rounds.
            if number and all(total["rounds"] for total in totals_of_turn):
                turns[label].append(totals_of_turn)
        if number >= FEWEST and time.perf_counter() - started > ENOUGH:
            break
    found = priced.prices_of(turns)
    for label, prices in list(found.items()):
        free = hasattr(run.drafters[label], "chain")
        if free:
            prices |= {"cost": 0.0, "cost_range": [0.0, 0.0]}
        low, high = prices["cost_range"]
        said = f"{label}: s_d / s_t = {prices['cost']:.3f} [{low:.3f}-{high:.3f}]"
        said = f"{label}: drafts without a forward" if free else said
        if not free and not 0.005 <= prices["cost"] <= 1:
            run.notes.append(f"{said}, which cannot be; {pct.COST} is taken")
            del found[label]
            continue
        low, high = prices["node_price_range"]
        run.notes.append(f"{said}, a verified node costs {prices['node_price']:.3f} "
                         f"[{low:.3f}-{high:.3f}] plain steps, "
                         f"a drafted round {prices['start']:.3f}")
    return found

def mean_extras(run, label, gamma):
    """CAPE's control (section 5.4): the mean size of CAPE's sets, measured once for a drafter."""
    what = f"{label}, extras at {gamma}"
    if what in run.costs:
        return run.costs[what]
    build, total = partial(cape.cape, gamma=gamma), Counter()
    for _, ids, limit in run.prompts[:8]:
        total.update(run.decode(run.drafters[label], build, ids, min(limit, 64)).total)
    size = max(0, round(total["nodes"] / max(1, total["depth"])) - 1)
    run.costs[what] = size
    run.notes.append(f"{label}: fixed takes {size} extras a position")
    return size
