"""Priced PCT (`pct-cost`): the tree that gives the most expected tokens for the time of a round.

It is in none of the three papers.  It follows the pruned candidate tree of EDD (section 3.2,
pct.py) and differs from it in what it counts as time:

    a verified node      is free in PCT; here it has a price
    a drafter forward    is charged in PCT to every node that it expands; here once, to the depth
    an accepted token    is worth one target step in PCT; here the time that the current round needs
                         for a token, which is less the faster the round is

So PCT's two thresholds, s_d / s_t and the leaf threshold, both follow from measured prices.

The idea.  The unit of time is one target step, s_t.  A round that runs the drafter D times and then
verifies the root and a set N of further nodes

    takes   T = 1 + D cost + (start + |N| node_price, if N is not empty)      target steps
    gives   E = 1 + sum_{j in N} p_j                                          expected tokens

The 1 in E is the target's own token, and p_j is the probability that node j is accepted.  The aim
is the highest rate E / T.  To decide node by node, let r be a rate that is reached already: at
first 1, the rate of plain decoding.  Then E / T >= r exactly where E - r T >= 0 (Dinkelbach's
method), and this difference is a sum with a term for each node and each forward:

    E - r T = 1 - r - r start + sum_{j in N} (p_j - r node_price) - D r cost                    (1)

Nodes.  A node is worth verifying where its term is not negative:

    p_j >= r node_price                                                                         (2)

Forwards.  One more forward costs r cost, however many nodes it expands.  The last forward expanded
the nodes R and drafted their children, the layer L.  Of R's probability the layer kept the share

    s = sum_{j in L, p_j >= r node_price} p_j / sum_{j in R} p_j                                (3)

The next forward is expected to keep the same share: a node j that it expands gets children of
probability s p_j in all.  So it expands the nodes F where this covers a node's price,

    F = {j in L : s p_j >= r node_price}                                                        (4)

and the forward itself is worth its price where

    sum_{j in F} (s p_j - r node_price) >= r cost                                               (5)

Each node of F is charged for one child, though up to `width` children may be kept.  Against that,
(5) looks one forward ahead, and the gain of all later forwards, which this one makes possible, is
not counted.  Charging every child that is expected to be kept drafts less.  In simulated decodings
of the stand-in it changed the tokens per time by -2 to +2 %, without a pattern, so the simpler
form stays.

After each forward, r becomes the rate of the nodes drafted so far, chosen by (2), if that is
higher.  When drafting ends, the forwards are paid for, whatever is verified.  So the tree is the n
most probable nodes, for the n <= max_nodes with the highest E / T.  It may be n = 0.

Rounds.  A round may also not draft at all.  Then it verifies a tree N_0: the root alone, with
E_0 = T_0 = 1, or what Max-Gram suggests without a forward (graft.py).  With realised tokens in the
place of E and E_0, drafting turns G_0 tokens into G, and T_0 into T.  It is worth that where

    mean of G - G_0 >= (mean of T - T_0) E_0 / T_0                                              (6)

G is known at the next round: expand.remaining has fallen by the number of new tokens.  So is G_0:
the tokens of a sequence do not depend on the trees, so the next round also shows how far N_0 would
have been accepted.  An overconfident drafter therefore finds out that it loses.  The two running
means are those of recent rounds of the same sequence that drafted.  They begin with what the first
of these rounds expects, E - E_0 and T - T_0, and move slowly (LEARN), since the gain of a single
round is mostly chance.

    symbol           unit           name here
    s_d / s_t        target steps   cost: one drafter forward
    node_price       target steps   node_price: one more verified node
    start            target steps   start: what a tree takes in addition, however small it is
    D                forwards       Candidates.num_forwards
    p_j              probability    Candidates.p
    N, E, T                         a Plan

Max-Gram alone (a cascade without models) drafts without a forward, D = 0.  Its tree is a chain, cut
at the length with the highest E / T: priced_chain().

pct_cost is a builder by the contract in verify.py.  A History of the sequence lies on expand, as
expand.history.  An expand without `remaining` has none, and then every round drafts.

    python -m beyond.priced       # the demo: a node is verified where it gives more than it costs
"""
from collections import namedtuple
from statistics import linear_regression, median

import numpy as np
import torch

from maxgram import N
from pct import COST, DEPTH, MAX_NODES, WIDTH, Candidates

QUARTILES = 0.25, 0.75
NODE_PRICE = 0.01       # in target steps, where it was not measured
START = 0.0             # in target steps, where it was not measured
LEARN = 0.05            # how far a round that drafted moves the running means to its gain and time
RETRY = 0.01            # how far any other raises the mean gain, as a share of what it should be

Prices = namedtuple("Prices", "cost node_price start")
# A tree to verify: its nodes without the root, the expected tokens E, the time T in target steps
Plan = namedtuple("Plan", "nodes E T")
PLAIN = Plan([], 1.0, 1.0)

# ---------------------------------------------------------------- the builder
def pct_cost(expand, root, cost=COST, node_price=NODE_PRICE, start=START, width=WIDTH, depth=DEPTH,
             max_nodes=MAX_NODES):
    """PCT whose thresholds follow from prices.  cost, node_price, start: in target steps.

    Returns a Tree of at most 1 + max_nodes nodes.
    """
    prices = checked(Prices(cost, node_price, start), depth, max_nodes)
    candidates = Candidates(expand, root, width)
    history = history_of(expand)
    history.learn(expand, undrafted=1)
    plan = PLAIN
    if history.worth_drafting(before=PLAIN):
        draft_by_price(candidates, candidates.grow, prices, depth, max_nodes)
        plan = most_profitable(candidates, prices, max_nodes)
        history.note(expand, before=PLAIN, after=plan)
    return candidates.tree(plan.nodes)

def checked(prices, depth, max_nodes):
    assert min(prices) >= 0, f"{prices}: times are not below zero"
    assert depth >= 1, f"depth is {depth}: draft at least once"
    assert max_nodes >= 1, f"a tree may have {max_nodes} nodes: allow at least one"
    return prices

# ---------------------------------------------------------------- whether a round drafts: Eq. 6
class History:
    """What drafting gained and took in recent rounds of a sequence, as running means.

    Rounds with a suggested chain N_0 gain less by drafting: they have means of their own.
    means: {whether a chain was suggested: [mean gain in tokens, mean time in target steps]}.
    last: what the last round did, if it drafted: (suggested, its time T - T_0, its remaining).
    """

    def __init__(self):
        self.means = {}
        self.last = None

    def worth_drafting(self, before):
        """Eq. 6 -> bool.  before: the Plan of N_0, with E_0 and T_0."""
        suggested = bool(before.nodes)
        if suggested not in self.means:
            return True
        gain, time = self.means[suggested]
        needed = time * before.E / before.T
        if gain < needed:
            # So drafting is tried again later: in one round of six, where it gains nothing.
            self.means[suggested][0] += RETRY * needed
        return gain >= needed

    def note(self, expand, before, after):
        """This round drafts: it turns the Plan `before` into `after`."""
        suggested = bool(before.nodes)
        time = after.T - before.T
        self.means.setdefault(suggested, [after.E - before.E, time])
        self.last = suggested, time, getattr(expand, "remaining", None)

    def learn(self, expand, undrafted):
        """A new round: now it is known what the last one gained.

        undrafted: G_0, the tokens that the last round would have given without drafting.
        """
        if self.last is None:
            return
        suggested, time, remaining = self.last
        self.last = None
        gain = remaining - expand.remaining - undrafted
        means = self.means[suggested]
        means[0] += LEARN * (gain - means[0])
        means[1] += LEARN * (time - means[1])

def history_of(expand):
    """The History of the sequence for which expand lasts."""
    if not hasattr(expand, "remaining"):
        return History()
    if not hasattr(expand, "history"):
        expand.history = History()
    return expand.history

# ---------------------------------------------------------------- drafting: Eq. 2 to 5
def draft_by_price(candidates, grow, prices, depth, max_nodes):
    """Draft while one more forward is expected to be worth its price -> r, the rate reached.

    grow(frontier) runs the drafter once -> the new nodes, the layer L.
    """
    p, expand_index = candidates.p, candidates.expand_index
    remaining = getattr(candidates.expand, "remaining", float("inf"))
    frontier = [0]
    r = 1.0
    while frontier and candidates.num_forwards < depth:
        layer = grow(frontier)
        r = max(r, rate_at(r, candidates, prices, max_nodes))
        price = r * prices.node_price
        # Eq. 3.  R is the frontier; in graft.py also the nodes of a suggested chain, which the same
        # forward both drafted and expanded.
        R = frontier + [j for j in layer if expand_index[j] >= 0]
        kept = [p[j] for j in layer if p[j] >= price]
        s = sum(kept) / sum(p[j] for j in R)
        # Eq. 4, of nodes that no forward has expanded yet, and whose children are not too deep
        frontier = [j for j in layer if s * p[j] >= price and expand_index[j] < 0]
        frontier = [j for j in frontier if candidates.depth[j] < remaining]
        frontier = candidates.best(frontier, max_nodes)
        # Eq. 5
        gain = sum(s * p[j] - price for j in frontier)
        if gain < r * prices.cost:
            break
    return r

def time_of(prices, forwards, nodes):
    """T of a round: so many drafter forwards, and a tree of so many nodes, excluding the root."""
    T = 1.0 + forwards * prices.cost
    if nodes:
        T += prices.start + nodes * prices.node_price
    return T

def rate_at(r, candidates, prices, max_nodes):
    """E / T, if drafting ended here and the nodes of Eq. 2 were verified, at most max_nodes."""
    worth = [p for p in candidates.p[1:] if p >= r * prices.node_price]
    worth = sorted(worth, reverse=True)[:max_nodes]
    return (1 + sum(worth)) / time_of(prices, candidates.num_forwards, len(worth))

def most_profitable(candidates, prices, max_nodes):
    """The Plan of the highest E / T after all drafting: the n most probable nodes, for any n.

    Of equally high ones the smallest, so a node that gains nothing is not verified, and none has
    probability zero.
    """
    drafted = range(1, len(candidates.token))
    ranked = candidates.ranked(drafted)[:max_nodes]
    E = 1.0
    best = Plan([], E, time_of(prices, candidates.num_forwards, 0))
    for n, j in enumerate(ranked, 1):
        E += candidates.p[j]
        T = time_of(prices, candidates.num_forwards, n)
        if E / T > best.E / best.T:
            best = Plan(ranked[:n], E, T)
    return best

# ---------------------------------------------------------------- Max-Gram alone
def priced_chain(expand, root, gram, node_price=NODE_PRICE, start=START, max_nodes=MAX_NODES):
    """Max-Gram's chain, cut at the length with the highest E / T, which may be 0 -> Tree

    gram: the MaxGram of a cascade without models, which commits to it.  The root's id is read from
    the device.
    """
    prices = checked(Prices(0.0, node_price, start), 1, max_nodes)
    candidates = Candidates(expand, root, width=1)
    most = min(max_nodes, expand.remaining)
    path = root.tolist()
    node = 0
    # Eq. 2 at r = 1: after a token that is less probable none can raise the rate.
    while candidates.depth[node] < most and candidates.p[node] >= node_price:
        ids, lengths = gram.propose(path, min(N, most - candidates.depth[node]))
        if not ids:
            break
        path += ids
        for token, length in zip(ids, lengths):
            node = candidates.add(node, token, gram.confidence_of(length))
    plan = most_profitable(candidates, prices, max_nodes)
    return candidates.tree(plan.nodes)

# ---------------------------------------------------------------- the prices, from timed decodings
# What one timed decoding took, summed over its rounds.  Counts: its rounds, the verified nodes
# without the roots, the drafter's forwards.  Seconds: in the drafter's forwards, in the target's,
# in all else but the drafter's begin and the prefill.
Spent = namedtuple("Spent", "rounds nodes forwards draft verify other")

def prices_of(turns):
    """Prices from short timed decodings -> {label: {"cost", "node_price", "start", "cost_range",
    "node_price_range"}}, in target steps.

    turns: list of (plain, {label: [Spent, ...]}).  In each turn the target decodes plainly once,
    and with the drafter `label` in trees of several sizes, of 1 to some 20 nodes.

        s_t           mean seconds of a target forward of one token, in plain decoding
        cost          s_d / s_t: mean seconds of one forward of the drafter over s_t (EDD, 3.2)
        node_price    slope of the target's seconds in a round over the nodes, divided by s_t; a
                      property of the target, so all drafters have one price
        start         what else a round with a tree takes beyond a plain one: in the target, and on
                      the host

    The drafter's begin() is in none of them.  It runs in every round before the builder is called,
    so it takes the same time whether the round drafts or not.  (In a mixture the neural drafter's
    begin() runs in the first forward of a round, so there it is part of `cost`.)

    Each is computed for each turn, and the median over the turns is taken: another program disturbs
    some turns, not most.  The ranges are the quartiles over the turns.  A label whose decodings
    have no rounds (the text ended at once) is left out.
    """
    turns = [(plain, of_label) for plain, of_label in turns if plain.rounds]
    slopes = [node_slope(plain, of_label) for plain, of_label in turns]
    slopes = [slope for slope in slopes if slope is not None] or [NODE_PRICE]
    node_price = max(0.0, median(slopes))
    costs, starts = {}, {}                                 # by label, one for each turn
    for plain, of_label in turns:
        s_t = plain.verify / plain.rounds
        plain_round = (plain.verify + plain.other) / plain.rounds
        for label, decodings in of_label.items():
            decodings = [spent for spent in decodings if spent.rounds]
            if not decodings:
                continue
            spent = Spent(*map(sum, zip(*decodings)))
            cost = spent.draft / max(1, spent.forwards) / s_t
            besides = (spent.verify + spent.other) / spent.rounds
            nodes = spent.nodes / spent.rounds
            start = (besides - plain_round) / s_t - nodes * node_price
            costs.setdefault(label, []).append(cost)
            starts.setdefault(label, []).append(start)
    prices = {}
    for label in costs:
        prices[label] = {
            "cost": median(costs[label]),
            "node_price": node_price,
            "start": max(0.0, median(starts[label])),
            "cost_range": np.quantile(costs[label], QUARTILES).tolist(),
            "node_price_range": np.quantile(slopes, QUARTILES).tolist()}
    return prices

def node_slope(plain, of_label):
    """One more node in target steps, by least squares over the trees of a turn.

    None where they all have one size.
    """
    decodings = [spent for many in of_label.values() for spent in many if spent.rounds]
    nodes = [spent.nodes / spent.rounds for spent in decodings]
    seconds = [spent.verify / spent.rounds for spent in decodings]
    if len(set(nodes)) < 2:
        return None
    s_t = plain.verify / plain.rounds
    return linear_regression(nodes, seconds).slope / s_t

# ---------------------------------------------------------------- demo
def main():
    """Three tokens of probability 0.6, 0.3 and 0.1: what a node costs decides how many stay."""
    row = torch.tensor([0.0, 0.6, 0.3, 0.1])

    def expand(tokens, parents):
        return row.repeat(len(parents), 1)

    root = torch.tensor([0])
    sizes = []
    for node_price in (0.0, 0.05, 0.2, 1.0):
        tree = pct_cost(expand, root, cost=0.1, node_price=node_price, depth=1)
        sizes.append(len(tree.tokens) - 1)
    assert sizes == [3, 3, 2, 0], sizes
    print("verified nodes at prices 0, 0.05, 0.2 and 1:", *sizes)

if __name__ == "__main__":
    main()
