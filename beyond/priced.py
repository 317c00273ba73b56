"""Priced PCT (`pct-cost`): the tree that gives the most expected tokens for the time of a round.

It is in none of the three papers.  It is the pruned candidate tree of EDD (section 3.2, pct.py)
with other prices: a verified node is not free, and a drafter forward is paid once for the depth,
not by each node that it expands.

The idea.  The unit of time is one target step, s_t.  A round that runs the drafter D times and then
verifies the root and a set N of further nodes

    takes   T = 1 + D cost + (start + |N| node_price, if N is not empty)      target steps
    gives   E = 1 + sum_{j in N} p_j                                          expected tokens

The 1 in E is the target's own token, and p_j is the probability that node j is accepted.  The aim
is the highest rate E / T.  Let r be a rate that is reached already, at first 1, that of plain
decoding.  E / T >= r exactly where E - r T >= 0 (Dinkelbach's method), which is a sum with a term
for each node and each forward:

    E - r T = 1 - r - r start + sum_{j in N} (p_j - r node_price) - D r cost                    (1)

So a node is worth verifying where

    p_j >= r node_price                                                                         (2)

The last forward expanded the nodes R and drafted their children, the layer L.  Of R's probability
the layer kept the share s.  The next forward is expected to keep the same share, so it expands the
nodes F whose children cover a node's price, and is run where it is worth its own price:

    s = sum_{j in L, p_j >= r node_price} p_j / sum_{j in R} p_j                                (3)
    F = {j in L : s p_j >= r node_price}                                                        (4)
    sum_{j in F} (s p_j - r node_price) >= r cost                                               (5)

After each forward r becomes the rate of what is drafted, if that is higher.  At the end the tree is
the n most probable nodes, for the n with the highest E / T, which may be 0.

A round may also not draft.  Then it verifies a tree N_0: the root alone, with E_0 = T_0 = 1, or
what Max-Gram suggests without a forward (graft.py).  Drafting turns G_0 realised tokens into G, and
T_0 into T.  It is worth that where

    mean of G - G_0 >= (mean of T - T_0) E_0 / T_0                                              (6)

Both are known a round later, as the tokens of a sequence do not depend on the trees.

    symbol           unit           name here
    s_d / s_t        target steps   cost: one drafter forward
    node_price       target steps   node_price: one more verified node
    start            target steps   start: what a tree takes in addition, however small it is
    D                forwards       Candidates.num_forwards
    p_j              probability    Candidates.p
    N, E, T                         a Plan

Builders are objects here, since prices and means last longer than a sequence.  Prices come from the
rounds themselves (Clock); one that is given stays.

    build = PctCost(node_price=0.012)
    verify.generate(target, drafter, build, ids)

    python -m beyond.priced       # the demo: a node is verified where it gives more than it costs
"""
import time
from collections import deque, namedtuple
from functools import partial

import numpy as np
import torch

from maxgram import N
from pct import DEPTH, MAX_NODES, WIDTH, Candidates

Prices = namedtuple("Prices", "cost node_price start")
# Before rounds were timed, by device: about those of the stand-in, and of a 7B model
DEFAULTS = {"cpu": Prices(0.07, 0.018, 0.2), "cuda": Prices(0.06, 0.004, 0.1)}
DEFAULT_WEIGHTS = 0.5, 1.0     # of the default start and node price, in rounds
LARGEST = 4             # a start or node price is at most so many times the default
ROUNDS = 400            # the last rounds, from which prices come;
FORGET = 0.995          # a round weighs so much less than the next one
AROUND = 15             # rounds within which the machine has one speed
PLAIN_EVERY = 100       # rounds after which one is plain, so that its time is known

EXPECTED = 2            # rounds, as which what the first one expects counts in running means
LEARN = 0.05            # the least weight of a new round in them
RETRY = 0.02            # target steps a round that may be lost by trying what does not pay
LONG = 4                # chains that begin with a match of so many tokens or more are one kind

# A tree to verify: its nodes without the root, the expected tokens E, the time T in target steps
Plan = namedtuple("Plan", "nodes E T")
PLAIN = Plan([], 1.0, 1.0)

# ---------------------------------------------------------------- prices, from timed rounds
class Clock:
    """Prices from what rounds took.

    While the builder runs, D forwards take D cost.  From its return to its next call the target
    verifies and the drafter reads what was committed, which takes

        step + start + |N| node_price     target steps, or without nodes     step               (7)

    where step is 1.  How many seconds that is changes with other programs and with the length of
    the text.  So the seconds of a round are divided by a plain step's at that time: the median of
    seconds over T in the rounds around it.  The three numbers are then those of the least absolute
    deviations, for which a disturbed round hardly counts.  Two more rows say that start and
    node_price are the default ones; they decide where the rounds do not, as where all trees have
    one size.
    """

    def __init__(self, cost=None, node_price=None, start=None):
        """cost, node_price, start: in target steps.  One that is given is not measured."""
        self.fixed = Prices(cost, node_price, start)
        if any(price is not None and price < 0 for price in self.fixed):
            raise ValueError(f"{self.fixed}: times are not below zero")
        self.now = time.perf_counter
        # (nodes, seconds after the builder, forwards, seconds in the builder) of each round
        self.rounds = deque(maxlen=ROUNDS)
        self.count = 0                           # timed rounds,
        self.plain = 0                           # the plain ones among them,
        self.since_plain = 0                     # and the others since the last plain one
        self.prices = None

    def begin(self, expand, device):
        """The builder is called, so the last round of this sequence is over -> Prices."""
        self.began = self.now()
        default = DEFAULTS.get(device.type, DEFAULTS["cuda"])
        self.prices = self.prices or self.but_fixed(default)
        if hasattr(expand, "timed"):
            nodes, returned, forwards, drafting = expand.timed
            self.rounds.append((nodes, self.began - returned, forwards, drafting))
            self.count += 1
            is_plain = not nodes and not forwards
            self.plain += is_plain
            self.since_plain = 0 if is_plain else self.since_plain + 1
            if None in self.fixed and (self.count <= 32 or self.count % 16 == 0):
                self.prices = self.but_fixed(self.fit(default))
        return self.prices

    def end(self, expand, forwards, nodes):
        """The builder returns: it ran so many forwards, and the tree has so many nodes."""
        now = self.now()
        expand.timed = nodes, now, forwards, now - self.began

    def is_plain_due(self):
        """Whether a plain round is missing: after 1, 2, 4, ... others, later PLAIN_EVERY."""
        return None in self.fixed and self.since_plain >= min(2 ** self.plain, PLAIN_EVERY)

    def but_fixed(self, prices):
        """The prices, those that were given in their places."""
        return Prices(*(own if price is None else price for price, own in zip(self.fixed, prices)))

    def fit(self, default):
        """Eq. 7 by the last rounds -> Prices"""
        nodes, seconds, forwards, drafting = np.array(self.rounds).T
        x = np.stack((np.ones_like(nodes), nodes > 0, nodes), 1)                       # (n, 3)
        most = max(nodes.max(), 1.0)
        defaults = [[-default.start, 1.0, 0.0], [-default.node_price * most, 0.0, most]]
        weight = FORGET ** np.arange(len(nodes))[::-1]
        # T by the last prices: from fit to fit they settle.
        T = x @ [1.0, self.prices.start, self.prices.node_price]
        step_seconds = around(seconds / T)
        step, start, node_price = least_absolute(
            np.concatenate((x, defaults)),
            np.append(seconds / step_seconds, (0.0, 0.0)),
            np.append(weight, DEFAULT_WEIGHTS))
        # No chance makes nodes free, when trees would be very large, or forbids all trees.
        start = np.clip(start / step, 0, LARGEST * default.start)
        node_price = np.clip(node_price / step, default.node_price / LARGEST,
                             default.node_price * LARGEST)
        drafted = forwards > 0
        costs = (drafting / step_seconds)[drafted] / forwards[drafted]
        cost = np.median(costs[-64:]) if len(costs) else default.cost
        return Prices(float(cost), float(node_price), float(start))

def around(x):
    """The median of the AROUND entries around each entry.  x (n,)"""
    padded = np.pad(x, AROUND // 2, mode="symmetric")
    windows = np.lib.stride_tricks.sliding_window_view(padded, AROUND)                 # (n, AROUND)
    return np.sort(windows, axis=1)[:, AROUND // 2]

def least_absolute(x, y, weight):
    """The beta (k,) of the least sum of weight |y - x beta|.  x (n, k), y and weight (n,)"""
    by_residual = 1.0
    # Least squares, again and again, whose weights are 1 / |residual|
    for _ in range(12):
        weighted = x.T * (weight * by_residual)
        beta = np.linalg.solve(weighted @ x, weighted @ y)
        by_residual = 1 / np.maximum(abs(y - x @ beta), 0.01)
    return beta

# ---------------------------------------------------------------- whether it pays: Eq. 6
class Gains:
    """Running means of what drafting, and what suggested chains, gained and took.

    means: {kind: [mean gain in tokens, mean time in target steps, weight of the next round]}.
    ("draft", suggested) is drafting, apart in rounds with a suggested chain N_0, where it gains
    less.  ("chain", m) is a chain N_0 instead of the root alone, by the length m of the match that
    it begins with.  Means begin with what the first round expects, which counts as EXPECTED rounds,
    and later move slowly: a single gain is mostly chance.
    """

    def __init__(self):
        self.means = {}

    def pays(self, kind, before):
        """Eq. 6 -> bool.  before: the Plan of N_0, with E_0 and T_0."""
        if kind not in self.means:
            return True
        gain, taken, _ = self.means[kind]
        needed = taken * before.E / before.T
        if gain < needed:
            # So it is tried again later.  A try that gains nothing lowers the mean by LEARN times
            # its time: in the long run tries take RETRY steps a round.
            self.means[kind][0] += LEARN * RETRY
        return gain >= needed

    def expect(self, expand, kind, before, after):
        """This round turns the Plan `before` into `after`."""
        taken = after.T - before.T
        self.means.setdefault(kind, [after.E - before.E, taken, 1 / (1 + EXPECTED)])
        expand.tried[kind] = taken

    def learn(self, expand, right):
        """A round begins: now it is known what the last one gained.

        right(new): how many tokens of the last N_0 were right, if the round gave `new` tokens.
        """
        tried, before = getattr(expand, "tried", {}), getattr(expand, "before", None)
        expand.tried, expand.before = {}, expand.remaining
        for kind, taken in tried.items():
            new = before - expand.remaining
            gain = right(new) if kind[0] == "chain" else new - 1 - right(new)
            means = self.means[kind]
            weight = max(LEARN, means[2])
            means[0] += weight * (gain - means[0])
            means[1] += weight * (taken - means[1])
            means[2] = weight / (1 + weight)             # 1/3, 1/4, 1/5, ...

# ---------------------------------------------------------------- the builders
class PctCost:
    """PCT whose thresholds follow from prices.

    cost, node_price, start: see Clock.  A tree has at most 1 + max_nodes nodes.
    """

    def __init__(self, cost=None, node_price=None, start=None, width=WIDTH, depth=DEPTH,
                 max_nodes=MAX_NODES):
        if depth < 1 or max_nodes < 1:
            raise ValueError(f"depth is {depth}, max_nodes is {max_nodes}: allow at least one")
        self.clock, self.gains = Clock(cost, node_price, start), Gains()
        self.width, self.depth, self.max_nodes = width, depth, max_nodes

    def __call__(self, expand, root):
        """-> Tree"""
        prices = self.clock.begin(expand, root.device)
        self.gains.learn(expand, self.right)
        candidates, plan = Candidates(expand, root, self.width), PLAIN
        if not self.clock.is_plain_due():
            candidates, plan = self.draft(candidates, prices)
        self.clock.end(expand, candidates.num_forwards, len(plan.nodes))
        return candidates.tree(plan.nodes)

    def right(self, new):
        """See Gains.learn: here N_0 is the root alone."""
        return 0

    def draft(self, candidates, prices):
        """-> Candidates, and the Plan of what is verified of them."""
        kind = "draft", False
        if not self.gains.pays(kind, before=PLAIN):
            return candidates, PLAIN
        draft_by_price(candidates, candidates.grow, prices, self.depth, self.max_nodes)
        plan = most_profitable(candidates, prices, self.max_nodes)
        self.gains.expect(candidates.expand, kind, PLAIN, plan)
        return candidates, plan

    def chain(self, candidates, chain, prices):
        """Add a chain below the root -> the Plan of its best length; PLAIN where it does not pay.

        chain: [(token, length of its match)].  Of subclasses, which have a MaxGram self.gram.
        """
        add_chain(candidates, 0, chain, self.gram)
        plan = most_profitable(candidates, prices, self.max_nodes)
        kind = "chain", min(chain[0][1], LONG) if chain else 0
        if not plan.nodes or not self.gains.pays(kind, before=PLAIN):
            return PLAIN
        self.gains.expect(candidates.expand, kind, PLAIN, plan)
        return plan

class PricedChain(PctCost):
    """Max-Gram alone: its chain, cut at the length with the highest E / T, which may be 0.

    gram: the MaxGram of a cascade without models, which commits to it.  The root's id is read from
    the device.
    """

    def __init__(self, gram, node_price=None, start=None, max_nodes=MAX_NODES):
        super().__init__(0.0, node_price, start, width=1, max_nodes=max_nodes)
        self.gram = gram

    def right(self, new):
        return new - 1

    def draft(self, candidates, prices):
        root, expand = candidates.root, candidates.expand
        most = min(self.max_nodes, expand.remaining)
        chain = suggested(self.gram, root.tolist(), most, least=prices.node_price)
        return candidates, self.chain(candidates, chain, prices)

# ---------------------------------------------------------------- suggested chains
def suggested(gram, path, most, least, p=1.0, match=0):
    """What Max-Gram suggests after a path of ids -> up to `most` pairs [(token, length of match)]

    p: the path's probability.  The chain ends before the first token whose probability, by
    Max-Gram's confidences, is below `least`, or whose match is shorter than `match`.
    """
    path, found = list(path), []
    while len(found) < most:
        ids, lengths = gram.propose(path, min(N, most - len(found)))
        for token, length in zip(ids, lengths):
            p *= gram.confidence_of(length)
            if length < match or p < least:
                return found
            found.append((token, length))
        if not ids:
            break
        path += ids
    return found

def add_chain(candidates, node, chain, gram):
    """Add a chain [(token, length of its match)] to the candidates below a node."""
    for token, length in chain:
        node = candidates.add(node, token, gram.confidence_of(length))

# ---------------------------------------------------------------- drafting: Eq. 2 to 5
def draft_by_price(candidates, grow, prices, depth, max_nodes):
    """Draft while one more forward is expected to be worth its price -> r, the rate reached.

    grow(frontier) runs the drafter once -> the new nodes, the layer L.
    """
    p, expand_index = candidates.p, candidates.expand_index
    remaining = candidates.expand.remaining
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

# ---------------------------------------------------------------- demo
def main():
    """Three tokens of probability 0.6, 0.3 and 0.1: what a node costs decides how many stay."""
    row = torch.tensor([0.0, 0.6, 0.3, 0.1])

    def expand(tokens, parents):
        return row.repeat(len(parents), 1)

    root = torch.tensor([0])
    sizes = []
    for node_price in (0.0, 0.05, 0.2, 1.0):
        sequence = partial(expand)                                   # as verify.rounds makes it
        sequence.remaining = 10
        tree = PctCost(cost=0.1, node_price=node_price, start=0.0, depth=1)(sequence, root)
        sizes.append(len(tree.tokens) - 1)
    assert sizes == [3, 3, 2, 0], sizes
    print("verified nodes at prices 0, 0.05, 0.2 and 1:", *sizes)

if __name__ == "__main__":
    main()
