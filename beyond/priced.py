"""PCT with prices: a tree that gives the most tokens for the time of a round.

It is in none of the three papers.  EDD's section 3.2 (pct.py) takes a verified node as free,
charges a drafting step to each node rather than to a depth, and takes a token as worth s_t however
fast the round is.  Its two thresholds, s_d / s_t and that of leaves, are set apart.

The idea.  Both thresholds follow from one aim.  The unit of time is a plain decoding step, s_t.  A
round that drafts D times and verifies the nodes N, besides the root,

    takes   T = 1 + start + D cost + |N| node_price        plain steps
    gives   E = 1 + sum_{j in N} p_j                       tokens: the target's own, the accepted

and the aim is the highest rate E / T.  Let r be a rate already reached: at first 1, that of plain
decoding.  E / T >= r exactly where E - r T >= 0 (Dinkelbach).  That difference is a sum over nodes
and forwards, where the fraction is none:

    E - r T = 1 - r - r start + sum_{j in N} (p_j - r node_price) - D r cost                    (1)

    Nodes.     A node is worth verifying where
                   p_j >= r node_price                                                          (2)
    Forwards.  One more costs r cost once, however many nodes it expands.  The last one read the
               nodes R and drafted the layer L; of R's probability it kept the share
                   s = sum_{j in L, p_j >= r node_price} p_j / sum_{j in R} p_j                 (3)
               The next one is expected to keep the same share.  So it expands
                   F = {j in L : s p_j >= r node_price}                                         (4)
               and it is worth its price where
                   sum_{j in F} (s p_j - r node_price) >= r cost                                (5)
    Drafting.  A round has a tree N_0 before its first forward, of E_0 and T_0: the root alone, with
               E_0 = T_0 = 1, or what is suggested to it for nothing (graft.py).  Drafting makes
               them E and T.  E / T >= E_0 / T_0 exactly where
                   E - E_0 >= (T - T_0) E_0 / T_0                                               (6)
               A round drafts where this holds of what drafting gained and took lately in this
               text, two running means.  Else N_0 is verified; the root alone is plain decoding.

Each forward raises r, if (2) gives a higher E / T.  At the end all drafting is paid for: the tree
is the n most probable nodes, for the n of highest E / T, and n may be 0.

    symbol           unit           name here
    s_d / s_t        plain steps    cost: one drafter forward
    node_price       plain steps    node_price: one more verified node
    start            plain steps    start: what any drafted round takes besides
    D                forwards       Candidates.drafts
    p_j              probability    Candidates.p
    r                tokens/step    r
    s                share          s

Max-Gram alone drafts without a forward: D = 0.  Its tree is its chain, as long as (1) grows.

To use it, beside pct.py: pct.py's own example, with this builder in the place of pct.pct.

    tree = priced.pct_cost(expand, root, cost=0.07, node_price=0.012)

Where expand has `memory`, a dict that lasts for a text, Eq. 6 remembers there.  Without it, and at
the start of a text, a round drafts.  `prices_of` finds the prices in timed decodings.

    python -m beyond.priced       # the demo: a node goes where it costs more than it gives
"""
from collections import namedtuple
from statistics import median, quantiles

import torch

from pct import COST, DEPTH, MAX_NODES, WIDTH, Candidates, Tree, clamp_depth

NODE_PRICE = 0.01       # of one more verified node, in plain steps, where it was not measured
START = 0.0             # of a drafted round besides, where it was not measured
# What a round gained and took moves what is expected by LEARN of the difference.  Without drafting
# the gain moves by FORGET towards a token a round: after a while it is tried again.
LEARN, FORGET = 0.2, 0.003

Prices = namedtuple("Prices", "cost node_price start")
# Nodes to verify (but the root), the tokens that a round then gives, the plain steps that it takes
Plan = namedtuple("Plan", "nodes E T")
PLAIN = Plan([], 1.0, 1.0)

# ---------------------------------------------------------------- the builder
def pct_cost(expand, root, cost=COST, node_price=NODE_PRICE, start=START, width=WIDTH, depth=DEPTH,
             max_nodes=MAX_NODES):
    """PCT whose thresholds follow from prices.  cost, node_price, start: in plain steps.

    Returns a Tree of at most 1 + max_nodes nodes.
    """
    prices = checked(cost, node_price, start)
    depth = clamp_depth(expand, width, depth, max_nodes)
    gram = max_gram_alone(expand)
    if gram is not None:
        return priced_chain(expand, root, gram, prices, max_nodes)
    candidates = Announced(expand, root, width)
    plan = PLAIN
    if worth_drafting(expand, plan):
        draft_by_price(candidates, candidates.grow, prices, depth, max_nodes)
        plan = most_profitable(candidates, prices, max_nodes)
        remember(expand, PLAIN, plan)
    return candidates.tree(plan.nodes)

def checked(cost, node_price, start):
    """-> Prices"""
    assert 0 <= cost <= 1, f"cost {cost} is s_d / s_t: between 0 and 1"
    assert node_price >= 0, f"node_price {node_price} is a time: not below zero"
    assert start >= 0, f"start {start} is a time: not below zero"
    return Prices(cost, node_price, start)

def worth_drafting(expand, before):
    """Eq. 6, as drafting went lately in this text.  before: the Plan without any forward."""
    memory = getattr(expand, "memory", {})
    gain, time = memory.get(kind_of(before), (1.0, 0.0))
    worth = gain >= time * before.E / before.T
    if not worth:
        memory[kind_of(before)] = gain + FORGET * (1 - gain), time
    return worth

def remember(expand, before, after):
    """What drafting gained and took, for Eq. 6 in later rounds.  before, after: Plans."""
    memory = getattr(expand, "memory", {})
    now = after.E - before.E, after.T - before.T
    expected = memory.get(kind_of(before), now)
    moved = [old + LEARN * (new - old) for old, new in zip(expected, now)]
    memory[kind_of(before)] = tuple(moved)

def kind_of(before):
    """Rounds that have a suggestion gain less by drafting: each kind has its own running means."""
    return "suggested" if before.nodes else "root alone"

def draft_by_price(candidates, grow, prices, depth, max_nodes):
    """Draft while a forward is expected to be worth its price -> the rate reached.

    grow(frontier) drafts once -> the new nodes, the layer L.
    """
    p = candidates.p
    frontier = [0]
    r = 1.0
    while frontier and candidates.drafts < depth:
        layer = grow(frontier)
        r = max(r, rate_at(r, candidates, prices))
        price = r * prices.node_price
        # Eq. 3.  The nodes of a grafted chain are read by the forward that drafts them (graft.py).
        read = frontier + [j for j in layer if j in candidates.expand_index]
        worth = [p[j] for j in layer if p[j] >= price]
        s = sum(worth) / sum(p[j] for j in read)
        # Eq. 4
        frontier = [j for j in unread(candidates, layer) if s * p[j] >= price]
        frontier = candidates.best(frontier, max_nodes)
        # Eq. 5
        gain = sum(s * p[j] - price for j in frontier)
        if gain < r * prices.cost:
            break
    return r

class Announced(Candidates):
    """Candidates whose tokens are announced: a drafter beside Max-Gram needs them on the host."""

    def __init__(self, expand, root, width):
        super().__init__(expand, root, width)
        self.token[0] = getattr(expand, "root", None)

    def tokens_of(self, nodes):
        """As Candidates.tokens_of."""
        if nodes == [0]:
            return self.root                     # its id is in the drafter's view
        ids = [self.token[node] for node in nodes]
        parents = [self.parent_index(node) for node in nodes]
        return self.announce(ids, parents)

    def announce(self, ids, parents):
        """The ids that expand is given next, and their parents' expand_indices: lists -> (m,)"""
        drafter = getattr(self.expand, "drafter", None)
        if hasattr(drafter, "announce"):
            return drafter.announce(ids, parents, self.root.device)
        return torch.tensor(ids, device=self.root.device)

def unread(candidates, layer):
    """The nodes of a layer that the drafter can still read, and below which the output goes on."""
    remaining = getattr(candidates.expand, "remaining", float("inf"))
    nodes = [j for j in layer if j not in candidates.expand_index]
    return [j for j in nodes if candidates.depth[j] < remaining]

def rate_at(r, candidates, prices):
    """E / T, if drafting ended here and the nodes were verified that are worth it at the rate r."""
    D = candidates.drafts
    # Eq. 2
    worth = [p for p in candidates.p[1:] if p >= r * prices.node_price]
    E = 1 + sum(worth)
    T = 1 + prices.start + D * prices.cost + len(worth) * prices.node_price
    return E / T

def most_profitable(candidates, prices, max_nodes):
    """The Plan of highest E / T after all drafting: the n most probable nodes, for the best n."""
    E = 1.0
    T = 1.0 + candidates.drafts * prices.cost    # of the root alone
    best = Plan([], E, T)
    T += prices.start
    ranked = candidates.ranked(candidates.nodes())
    for n, j in enumerate(ranked[:max_nodes], 1):
        E += candidates.p[j]
        T += prices.node_price
        if E / T > best.E / best.T:
            best = Plan(ranked[:n], E, T)
    return best._replace(nodes=sorted(best.nodes))

# ---------------------------------------------------------------- Max-Gram alone
def max_gram_alone(expand):
    """The MaxGram of a drafter that has nothing else (a cascade without models), or None."""
    drafter = getattr(expand, "drafter", None)
    alone = getattr(drafter, "stages", None) == []
    return drafter.gram if alone else None

def priced_chain(expand, root, gram, prices, most):
    """Max-Gram's chain of the length of highest E / T: D = 0, and the length may be 0 -> Tree."""
    most = min(most, expand.remaining)
    ids, n = [], 0
    p = E = best_rate = 1.0
    T = 1 + prices.start
    place = gram.after(gram.here(), expand.root)
    while len(ids) < most:
        chunk, length = gram.chunk(place, 1)
        if not chunk:
            break
        p *= gram.confidence_of(length)
        # Eq. 2, at the rate of plain decoding: nothing further can pay.
        if p < prices.node_price:
            break
        ids += chunk
        E += p
        T += prices.node_price
        if E / T > best_rate:
            best_rate = E / T
            n = len(ids)
        place = gram.after(place, chunk[0])
    chain = torch.tensor(ids[:n], dtype=root.dtype, device=root.device)
    tokens = torch.cat((root, chain))
    parents = torch.arange(-1, n, device=root.device)
    return Tree(tokens, parents)

# ---------------------------------------------------------------- the prices, from timed decodings
def prices_of(turns):
    """Prices from short decodings that took turns -> {label: {"cost", "node_price", "start", ...}}.

    turns: {label: list of (plain, short, deep, wide)}, totals of a plain decoding and of three with
    a drafter: seconds "draft", "verify", "other", counts "rounds" (above 0), "nodes" and
    "draft_forwards".  short and deep have chains, of as many drafts as nodes, or of none, as
    Max-Gram's.  A round takes

        t = s_t + start + D cost + |N| node_price                                               (7)

    so three kinds of rounds tell the three prices.  A node's price is the target's: it is the
    median over all turns of all labels.  cost and start are medians over the label's own turns:
    another program disturbs some turns, not most.  In plain steps, as are the lists "cost_range"
    and "node_price_range", the quartiles over turns.  A label without a turn that drafted is left
    out.
    """
    solved = {label: [solve(*turn) for turn in its if tells(*turn)] for label, its in turns.items()}
    solved = {label: found for label, found in solved.items() if found}
    node_prices = [found.node_price for its in solved.values() for found in its]
    node_price = max(0.0, median(node_prices or [0.0]))
    prices = {}
    for label, its in solved.items():
        # Their sum is what was seen; the price of a node is known better.
        both = [found.cost + found.node_price for found in its]
        low, high = quartiles(both)
        start = median(found.start for found in its)
        prices[label] = {
            "cost": max(0.0, median(both) - node_price),
            "node_price": node_price,
            "start": max(0.0, start),
            "cost_range": [low - node_price, high - node_price],
            "node_price_range": quartiles(node_prices)}
    return prices

def per_round(total):
    """Averages over the rounds of a decoding -> seconds, drafts, nodes."""
    seconds = total["draft"] + total["verify"] + total["other"]
    rounds = total["rounds"]
    return seconds / rounds, total["draft_forwards"] / rounds, total["nodes"] / rounds

def tells(plain, short, deep, wide):
    """Whether Eq. 7 can be solved: the text did not end before much was drafted."""
    _, _, N_short = per_round(short)
    _, _, N_deep = per_round(deep)
    _, D_wide, N_wide = per_round(wide)
    return N_deep > N_short and N_wide > D_wide

def solve(plain, short, deep, wide):
    """Eq. 7 for one turn -> Prices, in plain steps."""
    s_t, _, _ = per_round(plain)
    t_short, _, N_short = per_round(short)
    t_deep, _, N_deep = per_round(deep)
    t_wide, D_wide, N_wide = per_round(wide)
    # A chain one token longer takes one draft and one node more: cost + node_price.
    both = (t_deep - t_short) / (N_deep - N_short)
    start = t_short - s_t - N_short * both
    # The wide tree has further nodes than one a draft.
    further = t_wide - s_t - start - D_wide * both
    node_price = further / (N_wide - D_wide)
    return Prices((both - node_price) / s_t, node_price / s_t, start / s_t)

def quartiles(values):
    """The lower and the upper quartile of a list."""
    if len(values) == 1:
        return [values[0], values[0]]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return [low, high]

# ---------------------------------------------------------------- demo
def main():
    """One likely token and two unlikely ones: what a node costs decides how many are verified."""
    row = torch.tensor([0.0, 0.6, 0.3, 0.1])

    def expand(tokens, parents):
        return row.repeat(len(parents), 1)

    root = torch.tensor([0])
    sizes = []
    for node_price in (0.0, 0.05, 0.2, 1.0):
        tree = pct_cost(expand, root, cost=0.1, node_price=node_price, depth=1)
        sizes.append(len(tree.tokens) - 1)
    assert sizes == [3, 3, 2, 0], sizes
    print("nodes at prices 0, 0.05, 0.2 and 1:", *sizes)

if __name__ == "__main__":
    main()
