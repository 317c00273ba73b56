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

After each forward, r becomes the rate of the nodes drafted so far, chosen by (2), if that is
higher.  When drafting ends, the forwards are paid for, whatever is verified.  So the tree is the n
most probable nodes, for the n <= max_nodes with the highest E / T.  It may be n = 0.

Rounds.  A round may also not draft at all.  Then it verifies a tree N_0: the root alone, with
E_0 = T_0 = 1, or what Max-Gram suggests without a forward (graft.py).  Drafting turns E_0 and T_0
into E and T, and E / T >= E_0 / T_0 exactly where

    E - E_0 >= (T - T_0) E_0 / T_0                                                              (6)

Both differences are known only after drafting.  So two running means hold what drafting gained and
what it took in recent rounds of the same sequence, and a round drafts where (6) holds for them.
The first round of a sequence drafts.

    symbol           unit           name here
    s_d / s_t        target steps   cost: one drafter forward
    node_price       target steps   node_price: one more verified node
    start            target steps   start: what a tree takes in addition, however small it is
    D                forwards       Candidates.drafts
    p_j              probability    Candidates.p

Max-Gram alone (a cascade without models) drafts without a forward, D = 0.  Its tree is a chain, cut
at the length with the highest E / T.

What this folder asks of expand and drafter beyond verify.py's contract; all of it is optional:

    expand.memory         a dict that lasts for a sequence; the running means of (6) are kept in it.
                          Without it every round drafts.
    drafter.suggest(token, parent, most, match) -> (ids, confidences)
                          for graft.py: a chain of up to `most` ids that may follow `token`, and a
                          confidence in each.  The token stands below the node with expand_index
                          `parent` (-1: it is the root).  match: the shortest match to predict from.
    drafter.announce(ids, parents, device) -> tokens (m,)
                          called with what expand is given next, as lists.  A drafter that needs the
                          ids on the host (graft.Mixture) then has no need to read them back.

    python -m beyond.priced       # the demo: a node is verified where it gives more than it costs
"""
from collections import defaultdict, namedtuple
from statistics import linear_regression, median

import numpy as np
import torch

from pct import COST, DEPTH, MAX_NODES, WIDTH, Candidates, clamp_depth

QUARTILES = 0.25, 0.75
NODE_PRICE = 0.01       # in target steps, where it was not measured
START = 0.0             # in target steps, where it was not measured
LEARN = 0.2             # how far a round that drafts moves the running means to its gain and time
FORGET = 0.003          # how far any other moves the mean gain to 1: drafting is tried again later

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
    prices = Prices(cost, node_price, start)
    assert min(prices) >= 0, f"{prices}: times are not below zero"
    depth = clamp_depth(expand, width, depth, max_nodes)
    gram = max_gram_alone(expand)
    if gram is not None:
        return priced_chain(expand, root, gram, prices, max_nodes)
    candidates = Announced(expand, root, width)
    plan = PLAIN
    if worth_drafting(expand, before=PLAIN):
        draft_by_price(candidates, candidates.grow, prices, depth, max_nodes)
        plan = most_profitable(candidates, prices, max_nodes)
        remember(expand, PLAIN, plan)
    return candidates.tree(plan.nodes)

# ---------------------------------------------------------------- whether a round drafts: Eq. 6
def worth_drafting(expand, before):
    """Eq. 6 for the running means of this sequence -> bool.  before: the Plan without drafting.

    Rounds with a suggested chain gain less by drafting: they have running means of their own.
    """
    memory = getattr(expand, "memory", {})
    suggested = bool(before.nodes)
    gain, time = memory.get(suggested, (1.0, 0.0))
    worth = gain >= time * before.E / before.T
    if not worth:
        memory[suggested] = gain + FORGET * (1 - gain), time
    return worth

def remember(expand, before, after):
    """Move the running means by LEARN, after a round that drafted.  before, after: Plans."""
    memory = getattr(expand, "memory", {})
    suggested = bool(before.nodes)
    gain = after.E - before.E
    time = after.T - before.T
    mean_gain, mean_time = memory.get(suggested, (gain, time))
    mean_gain += LEARN * (gain - mean_gain)
    mean_time += LEARN * (time - mean_time)
    memory[suggested] = mean_gain, mean_time

# ---------------------------------------------------------------- drafting: Eq. 2 to 5
def draft_by_price(candidates, grow, prices, depth, max_nodes):
    """Draft while one more forward is expected to be worth its price -> r, the rate reached.

    grow(frontier) runs the drafter once -> the new nodes, the layer L.
    """
    p = candidates.p
    remaining = getattr(candidates.expand, "remaining", float("inf"))
    frontier = [0]
    r = 1.0
    while frontier and candidates.drafts < depth:
        layer = grow(frontier)
        r = max(r, rate_at(r, candidates, prices, max_nodes))
        price = r * prices.node_price
        # Eq. 3.  R is the frontier; in graft.py also the nodes of a suggested chain, which the same
        # forward both drafted and expanded.
        R = frontier + [j for j in layer if j in candidates.expand_index]
        kept = [p[j] for j in layer if p[j] >= price]
        s = sum(kept) / sum(p[j] for j in R)
        # Eq. 4, of nodes that no forward has expanded yet, and whose children are not too deep
        frontier = [j for j in layer if s * p[j] >= price and j not in candidates.expand_index]
        frontier = [j for j in frontier if candidates.depth[j] < remaining]
        frontier = candidates.best(frontier, max_nodes)
        # Eq. 5
        gain = sum(s * p[j] - price for j in frontier)
        if gain < r * prices.cost:
            break
    return r

def rate_at(r, candidates, prices, max_nodes):
    """E / T, if drafting ended here and the nodes of Eq. 2 were verified, at most max_nodes."""
    worth = [p for p in candidates.p[1:] if p >= r * prices.node_price]
    worth = sorted(worth, reverse=True)[:max_nodes]
    E = 1 + sum(worth)
    T = 1 + candidates.drafts * prices.cost + prices.start + len(worth) * prices.node_price
    return E / T

def most_profitable(candidates, prices, max_nodes):
    """The Plan of the highest E / T after all drafting: the n most probable nodes, for any n."""
    E = 1.0
    T = 1.0 + candidates.drafts * prices.cost
    best = Plan([], E, T)                        # n = 0: the root alone
    T += prices.start
    ranked = candidates.ranked(candidates.nodes())
    for n, j in enumerate(ranked[:max_nodes], 1):
        E += candidates.p[j]
        T += prices.node_price
        if E / T > best.E / best.T:
            best = Plan(ranked[:n], E, T)
    return best._replace(nodes=sorted(best.nodes))

class Announced(Candidates):
    """Candidates that announce their tokens to a drafter with `announce` (see the top)."""

    def __init__(self, expand, root, width):
        super().__init__(expand, root, width)
        self.token[0] = getattr(expand, "root", None)

    def tokens_of(self, nodes):
        """As Candidates.tokens_of."""
        if nodes == [0]:
            return self.root                     # the drafter's view has its id
        ids = [self.token[node] for node in nodes]
        parents = [self.parent_index(node) for node in nodes]
        return self.announce(ids, parents)

    def announce(self, ids, parents):
        """Lists of ids and parents, to be given to expand next -> the ids as a tensor (m,)"""
        drafter = getattr(self.expand, "drafter", None)
        if hasattr(drafter, "announce"):
            return drafter.announce(ids, parents, self.root.device)
        return torch.tensor(ids, device=self.root.device)

# ---------------------------------------------------------------- Max-Gram alone
def max_gram_alone(expand):
    """The MaxGram of a cascade without models; None for every other drafter."""
    drafter = getattr(expand, "drafter", None)
    alone = getattr(drafter, "stages", None) == []
    return drafter.gram if alone else None

def priced_chain(expand, root, gram, prices, max_nodes):
    """Max-Gram's chain, cut at the length with the highest E / T, which may be 0 -> Tree"""
    candidates = Candidates(expand, root, width=1)
    place = gram.after(gram.here(), expand.root)
    node = 0
    while candidates.depth[node] < expand.remaining:
        chunk, length = gram.chunk(place, 1)
        # Eq. 2 at r = 1: after a token that is less probable none can raise the rate.
        worthless = candidates.p[node] < prices.node_price
        if worthless or not chunk:
            break
        node = candidates.add_child(node, gram.confidence_of(length), chunk[0])
        place = gram.after(place, chunk[0])
    plan = most_profitable(candidates, prices, max_nodes)
    return candidates.tree(plan.nodes)

# ---------------------------------------------------------------- the prices, from timed decodings
# What one timed decoding took, summed over its rounds.  Counts: its rounds, the verified nodes
# without the roots, the drafter's forwards.  Seconds: in the drafter's begin, in its forwards, in
# the target's forwards, in all else.  The prefill is left out.
Spent = namedtuple("Spent", "rounds nodes forwards begin draft verify other")

def prices_of(turns):
    """Prices from short timed decodings -> {label: {"cost", "node_price", "start", "cost_range",
    "node_price_range"}}, in target steps.

    turns: list of (plain, {label: [Spent, ...]}).  In each turn the target decodes plainly once,
    and with the drafter `label` in trees of several sizes, of 1 to some 20 nodes.

        s_t           mean seconds of a target forward of one token, in plain decoding
        cost          s_d / s_t: mean seconds of one forward of the drafter over s_t (EDD, 3.2)
        node_price    slope of the target's seconds in a round over the nodes, divided by s_t; a
                      property of the target, so all drafters have one price
        start         what else a round with a tree takes beyond a plain one, the drafter's begin
                      included

    Each is computed for each turn, and the median over the turns is taken: another program disturbs
    some turns, not most.  The ranges are the quartiles over the turns.  A label whose decodings
    have no rounds (the text ended at once) is left out.
    """
    turns = [(plain, of_label) for plain, of_label in turns if plain.rounds]
    slopes = [node_slope(plain, of_label) for plain, of_label in turns]
    slopes = [slope for slope in slopes if slope is not None] or [NODE_PRICE]
    node_price = max(0.0, median(slopes))
    costs, starts = defaultdict(list), defaultdict(list)         # by label, one for each turn
    for plain, of_label in turns:
        s_t = plain.verify / plain.rounds
        plain_round = (plain.verify + plain.other) / plain.rounds
        for label, decodings in of_label.items():
            spent = total(decodings)
            if not spent.rounds:
                continue
            costs[label].append(spent.draft / max(1, spent.forwards) / s_t)
            besides = (spent.begin + spent.verify + spent.other) / spent.rounds
            nodes = spent.nodes / spent.rounds
            starts[label].append((besides - plain_round) / s_t - nodes * node_price)
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

def total(decodings):
    """The sum of several Spent."""
    zeros = Spent(0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    return Spent(*map(sum, zip(zeros, *decodings)))

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
