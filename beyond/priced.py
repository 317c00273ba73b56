"""Priced PCT (`pct-cost`): the tree that gives the most expected tokens for the time of a round.

It is in none of the three papers.  It is the pruned candidate tree of EDD (section 3.2, pct.py)
with other prices: a verified node is not free, and a drafter forward is paid once for the depth,
not by each node that it expands.

The idea.  The unit of time is one target step, s_t.  A round that runs the drafter D times and then
verifies the root and a set N of further nodes

    takes   T = 1 + D cost + (start + |N| node_price, if N is not empty)      target steps
    gives   E = 1 + sum_{j in N} p_j                                          expected tokens

cost is s_d / s_t, node_price is what one more verified node takes, and start what a tree takes in
addition, however small it is.  The 1 in E is the target's own token, and p_j is the probability
that node j is accepted.  The aim is the highest rate E / T.  Let r be a rate that is reached
already, at first 1, that of plain decoding.  E / T >= r exactly where E - r T >= 0 (Dinkelbach's
method), which is a sum with a term for each node and each forward:

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
T_0 into T.  A token is worth T_0 / E_0.  So drafting pays while its balance is not negative:

    balance = sum over rounds that drafted of  (G - G_0) T_0 / E_0 - (T - T_0)                  (6)

where a round counts FORGET times as much as the next one.  Its gain is known a round later, as the
tokens of a sequence do not depend on the trees.  Each round that does not draft adds RETRY, so that
drafting is tried again, and what tries lose in the long run is RETRY a round.

Prices come from the rounds themselves.  While the builder runs, D forwards take D cost.  From its
return to its next call the target verifies and the drafter reads what was committed, which takes

    step + start + |N| node_price     or, without nodes,     step                               (7)

    build = PctCost(node_price=0.012)                  # for all sequences; this price stays
    verify.generate(target, OnDemand(drafter), build, ids)
"""
import time
from collections import deque, namedtuple

import numpy as np
import torch

from maxgram import N
from pct import DEPTH, MAX_NODES, WIDTH, Candidates
from verify import root_only

Prices = namedtuple("Prices", "cost node_price start")
# Before rounds were timed, by device: about those of the stand-in, and of a 7B model
DEFAULTS = {"cpu": Prices(0.07, 0.018, 0.2), "cuda": Prices(0.06, 0.004, 0.1)}
LARGEST = 4             # a start or node price is at most so many times the default
ROUNDS = 300            # prices come from the last rounds
FIT_EVERY = 32          # rounds after which prices are fitted anew, if one of them drafted
AROUND = 15             # rounds within which the machine has one speed
FORGET, RETRY = 0.95, 0.007     # see Eq. 6
FIRST = 2               # a balance begins with the gain that the first round expects, so many times

# A tree to verify: its nodes without the root, E, T
Plan = namedtuple("Plan", "nodes E T")
PLAIN = Plan([], 1.0, 1.0)
# A sequence's last round, kept on its expand: numbers of nodes and forwards, seconds of drafting,
# when it was over, expand.remaining, and {kind of drafting: (T_0 / E_0, T - T_0)}
Last = namedtuple("Last", "nodes forwards drafting returned remaining tried")

class PctCost:
    """PCT whose thresholds follow from prices.

    cost, node_price, start: in target steps.  One that is given is not measured.  A tree has at
    most 1 + max_nodes nodes.
    """

    def __init__(self, cost=None, node_price=None, start=None, width=WIDTH, depth=DEPTH,
                 max_nodes=MAX_NODES):
        given = Prices(cost, node_price, start)._asdict()
        self.given = {name: price for name, price in given.items() if price is not None}
        self.measured = len(self.given) < len(given)
        self.width, self.depth, self.max_nodes = width, depth, max_nodes
        self.now = time.perf_counter
        self.prices = None
        # Of all sequences: (nodes, forwards, seconds of drafting, those of Eq. 7), if it was plain
        self.rounds, self.plain = deque(maxlen=ROUNDS), deque(maxlen=ROUNDS)
        self.count = 0                                   # of all rounds
        self.balance = {}                                # {kind of drafting: Eq. 6}

    def __call__(self, expand, root):
        """-> Tree"""
        began = self.now()
        default = DEFAULTS.get(root.device.type, DEFAULTS["cuda"])
        self.prices = self.prices or default._replace(**self.given)
        if hasattr(expand, "last"):
            self.learn(expand.last, began, expand.remaining, default)
        self.tried = {}
        candidates, plan = Candidates(expand, root, self.width), PLAIN
        # Without plain rounds a step is not known: of n rounds log2 n are plain.
        if not self.measured or sum(self.plain) >= len(self.plain).bit_length():
            candidates, plan = self.draft(candidates)
        nodes, forwards, returned = len(plan.nodes), candidates.num_forwards, self.now()
        expand.last = Last(
            nodes, forwards, returned - began, returned, expand.remaining, self.tried)
        return candidates.tree(plan.nodes) if nodes or forwards else root_only(expand, root)

    def draft(self, candidates):
        """-> Candidates, and the Plan of what is verified of them."""
        if not self.pays("draft"):
            return candidates, PLAIN
        self.grow_by_price(candidates, candidates.grow)
        plan = self.most_profitable(candidates)
        self.expect("draft", PLAIN, plan)
        return candidates, plan

    def chain(self, candidates, longest, kind):
        """Add Max-Gram's chain after the root -> the best Plan, PLAIN if none pays."""
        if not self.pays(kind):
            return PLAIN
        least = self.prices.node_price
        add_chain(candidates, 0, suggested(self.gram, candidates, 0, longest, least))
        plan = self.most_profitable(candidates)
        if plan.nodes:
            self.expect(kind, PLAIN, plan)
        return plan

    # ------------------------------------------------ Eq. 2 to 5
    def grow_by_price(self, candidates, grow):
        """Draft while one more forward is expected to be worth its price -> r, the rate reached.

        grow(frontier) runs the drafter once -> the new nodes, the layer L.
        """
        p, expand_index = candidates.p, candidates.expand_index
        frontier, r = [0], 1.0
        while frontier and candidates.num_forwards < self.depth:
            layer = grow(frontier)
            # E / T, if drafting ended here and the nodes of Eq. 2 were verified
            worth = [p_j for p_j in p[1:] if p_j >= r * self.prices.node_price]
            worth = sorted(worth, reverse=True)[:self.max_nodes]
            r = max(r, (1 + sum(worth)) / self.time_of(candidates, len(worth)))
            price = r * self.prices.node_price
            # Eq. 3.  R is the frontier; in graft.py also the nodes of a suggested chain, which the
            # same forward both drafted and expanded.
            R = frontier + [j for j in layer if expand_index[j] >= 0]
            s = sum(p[j] for j in layer if p[j] >= price) / sum(p[j] for j in R)
            # Eq. 4, of nodes that no forward has expanded yet, and whose children are not too deep
            frontier = [j for j in layer if s * p[j] >= price and expand_index[j] < 0
                        and candidates.depth[j] < candidates.expand.remaining]
            frontier = candidates.best(frontier, self.max_nodes)
            # Eq. 5
            if sum(s * p[j] - price for j in frontier) < r * self.prices.cost:
                break
        return r

    def time_of(self, candidates, nodes):
        """T of a round that drafted the candidates and verifies so many nodes, and the root."""
        T = 1.0 + candidates.num_forwards * self.prices.cost
        if nodes:
            T += self.prices.start + nodes * self.prices.node_price
        return T

    def most_profitable(self, candidates):
        """The Plan of the highest E / T after all drafting: the n most probable nodes, for any n.

        Of equally high ones the smallest, so a node that gains nothing is not verified.
        """
        drafted = range(1, len(candidates.token))
        ranked = candidates.ranked(drafted)[:self.max_nodes]
        E = 1.0
        best = Plan([], E, self.time_of(candidates, 0))
        for n, j in enumerate(ranked, 1):
            E += candidates.p[j]
            T = self.time_of(candidates, n)
            if E / T > best.E / best.T:
                best = Plan(ranked[:n], E, T)
        return best

    # ------------------------------------------------ whether it pays: Eq. 6
    def pays(self, kind):
        """Whether a kind of drafting pays -> bool"""
        balance = self.balance.get(kind, 0.0)
        if balance < 0:
            self.balance[kind] = balance + RETRY
        return balance >= 0

    def expect(self, kind, before, after):
        """This round turns the Plan `before` into `after`."""
        worth, taken = before.T / before.E, after.T - before.T
        self.balance.setdefault(kind, FIRST * ((after.E - before.E) * worth - taken))
        self.tried[kind] = worth, taken

    def right(self):
        """How many tokens of the last N_0 were right."""
        return 0

    def learn(self, last, now, remaining, default):
        """A sequence's last round is over: what it took and gave."""
        self.rounds.append((last.nodes, last.forwards, last.drafting, now - last.returned))
        self.plain.append(not last.nodes and not last.forwards)
        self.count += 1
        is_due = self.measured and self.count % FIT_EVERY == 0
        if is_due and not all(list(self.plain)[-FIT_EVERY:]):
            self.prices = fit(self.rounds, self.prices, default)._replace(**self.given)
        drafted, right = last.remaining - remaining - 1, self.right()
        for kind, (worth, taken) in last.tried.items():
            gain = right if kind == "chain" else drafted - right
            self.balance[kind] = FORGET * self.balance[kind] + gain * worth - taken

class PricedChain(PctCost):
    """Max-Gram alone: its chain, cut at the length with the highest E / T, which may be 0.

    gram: the MaxGram of a cascade without models, which commits to it.
    """

    def __init__(self, gram, node_price=None, start=None, max_nodes=MAX_NODES):
        super().__init__(0.0, node_price, start, max_nodes=max_nodes)
        self.gram = gram

    def draft(self, candidates):
        candidates.token[0] = candidates.root.item()
        return candidates, self.chain(candidates, self.max_nodes, "draft")

# ---------------------------------------------------------------- a drafter in silent rounds
class OnDemand:
    """A drafter that does nothing in rounds that do not call expand.

    What these rounds committed it reads, all at once, in the next round that does.
    """

    def __init__(self, drafter):
        """drafter: one by the contract in verify.py, which this is, too."""
        self.drafter, self.needs = drafter, drafter.needs

    def reset(self, probs):
        self.drafter.reset(probs)
        self.unread = []                     # the views that the drafter has not read

    def begin(self, view, root_id):
        self.unread.append(view)
        self.root_id = root_id

    def expand(self, tokens, parents):
        if self.unread:
            self.drafter.begin(self.merged(), self.root_id)
            self.unread = []
        return self.drafter.expand(tokens, parents)

    def keep(self, path):
        if not self.unread:
            self.drafter.keep(path)

    def merged(self):
        """One View, of a round that committed all that is unread."""
        views, hidden = self.unread, {}
        for layer in views[-1].hidden:
            hidden[layer] = torch.cat([view.hidden[layer] for view in views])
        tokens = torch.cat([view.tokens for view in views])
        ids = [token for view in views for token in view.ids]
        # The last view's keys and values contain those of the earlier ones.
        return views[-1]._replace(tokens=tokens, ids=ids, hidden=hidden)

# ---------------------------------------------------------------- prices, from timed rounds: Eq. 7
def fit(rounds, last, default):
    """The Prices by which rounds [(nodes, forwards, drafting, verifying)] took their times.

    How long a step is changes with other programs and with the length of the text.  So each time is
    divided by a step's at that time: the median over the rounds around it, by the last prices.  The
    new ones have the least absolute deviations, for which a disturbed round hardly counts.  Two
    more rows say that start and node_price are the default ones.  They decide where the rounds do
    not, as where all trees have one size.
    """
    nodes, forwards, drafting, verifying = np.array(rounds).T
    T = 1 + last.start * (nodes > 0) + last.node_price * nodes
    padded = np.pad(verifying / T, AROUND // 2, mode="symmetric")
    unit = np.median(np.lib.stride_tricks.sliding_window_view(padded, AROUND), axis=1)
    most = max(nodes.max(), 1.0)
    x = np.stack((np.ones_like(nodes), nodes > 0, nodes), 1)                           # (n, 3)
    x = np.concatenate((x, [[-default.start, 1, 0], [-default.node_price * most, 0, most]]))
    y = np.append(verifying / unit, (0, 0))
    by_residual = 1.0
    # Least squares, again and again, whose weights are 1 / |residual|
    for _ in range(12):
        weighted = x.T * by_residual
        beta = np.linalg.solve(weighted @ x, weighted @ y)
        by_residual = 1 / np.maximum(abs(y - x @ beta), 0.01)
    step, start, node_price = beta
    # No chance makes nodes free, when trees would be very large, or forbids all trees.
    start = np.clip(start / step, 0, LARGEST * default.start)
    node_price = np.clip(node_price / step, default.node_price / LARGEST,
                         default.node_price * LARGEST)
    cost, drafted = default.cost, forwards > 0
    if drafted.any():
        cost = np.median((drafting / unit)[drafted] / forwards[drafted]) / step
    return Prices(float(cost), float(node_price), float(start))

# ---------------------------------------------------------------- suggested chains
def suggested(gram, candidates, node, longest, least, match=0):
    """What Max-Gram suggests after a node -> pairs [(token, its confidence)]

    They are at most `longest`, and none is too deep.  They end before the first token whose
    probability, by Max-Gram's confidences, is below `least`, or whose match is shorter than
    `match`.  candidates.token[0] is the root's id.
    """
    longest = min(longest, candidates.expand.remaining - candidates.depth[node])
    p, path, found = candidates.p[node], [], []
    while node >= 0:
        path.insert(0, candidates.token[node])
        node = candidates.parent[node]
    while len(found) < longest:
        ids, lengths = gram.propose(path, min(N, longest - len(found)))
        for token, length in zip(ids, lengths):
            c = gram.confidence_of(length)
            p *= c
            if length < match or p < least:
                return found
            found.append((token, c))
        if not ids:
            break
        path += ids
    return found

def add_chain(candidates, node, chain):
    """Add a chain [(token, its confidence)] below a node."""
    for token, c in chain:
        node = candidates.add(node, token, c)
