"""PCT with prices: a tree that gives the most tokens for the time of a round.

It is in none of the three papers.  EDD's section 3.2 (pct.py) takes a verified node as free,
charges a drafting step to each node rather than to a depth, and takes a token as worth s_t however
fast the round is.  Its two thresholds, s_d / s_t and that of leaves, are set apart.

The idea.  Both thresholds follow from one aim.  The unit of time is a plain decoding step, s_t.  A
round that drafts D times and verifies the nodes N, besides the root,

    takes   T = 1 + D cost + |N| node_price         plain steps
    gives   E = 1 + sum_{j in N} p_j                tokens: the target's own, and each accepted node

and the aim is the highest rate E / T.  Let r be a rate already reached: at first 1, that of plain
decoding.  E / T >= r exactly where E - r T >= 0 (Dinkelbach).  That difference is a sum over nodes
and forwards, where the fraction is none:

    E - r T = (1 - r) + sum_{j in N} (p_j - r node_price) - D r cost                            (1)

    Nodes.     A node is worth verifying where
                   p_j >= r node_price                                                          (2)
    Forwards.  One more costs r cost once, however many nodes it expands.  The last one read the
               nodes R and drafted the layer L; of R's probability it kept the share
                   s = sum_{j in L, p_j >= r node_price} p_j / sum_{j in R} p_j                 (3)
               The next one is expected to keep the same share.  So it expands
                   F = {j in L : s p_j >= r node_price}                                         (4)
               and it is worth its price where
                   sum_{j in F} (s p_j - r node_price) >= r cost                                (5)

Each forward raises r, if (2) gives a higher E / T.  At the end all drafting is paid for: the tree
is the n most probable nodes, for the n of highest E / T.

    symbol           unit           name here
    s_d / s_t        plain steps    cost: one drafter forward
    node_price       plain steps    node_price: one more verified node
    D                forwards       Candidates.drafts
    p_j              probability    Candidates.p
    r                tokens/step    r
    s                share          s

To use it, beside pct.py: pct.py's own example, with this builder in the place of pct.pct.

    tree = priced.pct_cost(expand, root, cost=0.07, node_price=0.012)

`costs_of` finds both prices in timed decodings.

    python -m beyond.priced       # the demo: a node goes where it costs more than it gives
"""
from statistics import median

import torch

from pct import COST, DEPTH, MAX_NODES, WIDTH, Candidates, clamp_depth

NODE_PRICE = 0.01       # of one more verified node, in plain steps, where it was not measured

# ---------------------------------------------------------------- the builder
def pct_cost(expand, root, cost=COST, node_price=NODE_PRICE, width=WIDTH, depth=DEPTH,
             max_nodes=MAX_NODES):
    """PCT whose thresholds follow from prices.  cost, node_price: in plain steps.

    Returns a Tree of at most 1 + max_nodes nodes.
    """
    candidates = Candidates(expand, root, width)
    draft_by_price(candidates, candidates.grow, cost, node_price, depth, max_nodes)
    return most_profitable_tree(candidates, cost, node_price, max_nodes)

def draft_by_price(candidates, grow, cost, node_price, depth, max_nodes):
    """Draft while a forward is expected to be worth its price -> the rate reached.

    grow(frontier) drafts once -> the new nodes, the layer L.
    """
    depth = clamp_depth(candidates.expand, candidates.width, depth, max_nodes)
    assert 0 <= cost <= 1, f"cost {cost} is s_d / s_t: between 0 and 1"
    assert node_price >= 0, f"node_price {node_price} is a time: not below zero"
    p = candidates.p
    frontier = [0]
    r = 1.0
    while frontier and candidates.drafts < depth:
        layer = grow(frontier)
        r = max(r, rate_at(r, candidates, cost, node_price))
        # Eq. 3.  The nodes of a grafted chain are read by the forward that drafts them (graft.py).
        read = frontier + [j for j in layer if j in candidates.expand_index]
        worth = [p[j] for j in layer if p[j] >= r * node_price]
        s = sum(worth) / sum(p[j] for j in read)
        # Eq. 4
        frontier = [j for j in unread(candidates, layer) if s * p[j] >= r * node_price]
        frontier = candidates.best(frontier, max_nodes)
        # Eq. 5
        gain = sum(s * p[j] - r * node_price for j in frontier)
        if gain < r * cost:
            break
    return r

def unread(candidates, layer):
    """The nodes of a layer that the drafter can still read, and below which the output goes on."""
    remaining = getattr(candidates.expand, "remaining", float("inf"))
    nodes = [j for j in layer if j not in candidates.expand_index]
    return [j for j in nodes if candidates.depth[j] < remaining]

def rate_at(r, candidates, cost, node_price):
    """E / T, if drafting ended here and the nodes were verified that are worth it at the rate r."""
    D = candidates.drafts
    # Eq. 2
    worth = [p for p in candidates.p[1:] if p >= r * node_price]
    E = 1 + sum(worth)
    T = 1 + D * cost + len(worth) * node_price
    return E / T

def most_profitable(candidates, cost, node_price):
    """The nodes N of highest E / T after all drafting: the n most probable, for the best n."""
    D = candidates.drafts
    E = 1
    T = 1 + D * cost
    best_rate = E / T
    n = 0
    ranked = candidates.ranked(candidates.nodes())
    for i, j in enumerate(ranked, 1):
        E += candidates.p[j]
        T += node_price
        if E / T > best_rate:
            best_rate = E / T
            n = i
    return ranked[:n]

def most_profitable_tree(candidates, cost, node_price, max_nodes):
    """The same as a Tree of at most 1 + max_nodes nodes."""
    nodes = most_profitable(candidates, cost, node_price)
    nodes = candidates.best(nodes, max_nodes)
    return candidates.tree(nodes)

# ---------------------------------------------------------------- the prices, from timed decodings
def costs_of(turns):
    """s_d / s_t and the price of a node, both in plain steps, from short decodings that took turns.

    turns: list of (plain, short, deep, wide), the totals of a plain decoding, of two with chains,
    of one with wide trees: seconds "draft", "verify", "other", counts "rounds" (above 0), "nodes",
    "draft_forwards".  A round takes a + D s_d + |N| price, the host's work included: three kinds
    of rounds tell the three apart.  Medians over turns: another program disturbs one, not most.
    """
    costs, prices = [], []
    for turn in turns:
        # Of each decoding's rounds: seconds, drafts and nodes, on average
        t = [(x["draft"] + x["verify"] + x["other"]) / x["rounds"] for x in turn]
        D = [x["draft_forwards"] / x["rounds"] for x in turn]
        N = [x["nodes"] / x["rounds"] for x in turn]
        plain, short, deep, wide = range(4)
        if D[deep] <= D[short] or N[wide] <= D[wide]:
            continue                             # the text ended before much was drafted
        # A chain one deeper takes one draft and one node more.
        both = (t[deep] - t[short]) / (D[deep] - D[short])
        # The wide tree has further nodes than one a draft.
        further = N[wide] - D[wide]
        longer = t[wide] - t[short] - (D[wide] - D[short]) * both
        price = max(0.0, longer / further)
        costs.append((both - price) / t[plain])
        prices.append(price / t[plain])
    return median(costs or [0.0]), median(prices or [0.0])

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
