"""PCT: the pruned candidate tree, and the trees that it is compared with.

Effective Draft Decoder with Pruned Candidate Tree (ACL 2025), section 3.2 and appendix B; the ablations of
Table 3; the baselines of appendix A.

The idea.  The drafter's confidence is calibrated: the product of confidences along a path is the probability
that the whole path is accepted.  Drafting below a node costs s_d and saves s_t if the node is accepted, so it
pays while that probability is at least s_d / s_t.  Nodes that are almost surely rejected are not worth
verifying either.

    paper                     shape      name here
    d_1 ... d_m               tokens     a path of the tree, the root left out
    c_i                       float      c: the drafter's probability of one token
    p_j = prod_{i<=j} c_i     float      p: joint probability of a node and all above it; the root's is 1
    s_d, s_t                  seconds    cost = s_d / s_t: one drafter forward over one target forward
    s_d - p_j s_t  (Eq. 5)    seconds    expected loss of drafting below a node: pays while p_j >= s_d / s_t
    top-k children            int        width (5)           appendix B
    maximum depth             int        depth (10)          appendix B
    leaf threshold            float      leaf (0.01)         appendix B

A builder is a function of expand(tokens (m,), parents [m ints]) -> probabilities (m, V), which runs the
drafter once over m new nodes (`parents` index nodes in the order given to expand; -1: the cached prefix), and
of the root (1,).  It returns a Tree: tokens (n,) with the root first, parents (n,) with parents[0] = -1 and
parents before children.  A row of zeros says that the drafter cannot go on; no child of probability zero is
ever added.  Each depth costs one drafter forward over the whole frontier, and one host read.

Differences from the paper:
 1. Eq. 5 is an expected loss: smaller is better.  (The text calls it a gain, and acts on it as a loss.)
 2. Section 4.2 says that the "VDM" tree has many nodes: VCT is meant.
 3. A node with p_j < s_d / s_t (strict) stays as a leaf and is not expanded.  p_j never grows downwards, so
    removing leaves under the threshold until none is left is the same as dropping every node under it.
 4. The official code drops the best surviving path at the maximum depth, keeps only each path's top child
    when a whole layer falls below the threshold, and never removes leaves.  This file follows the text.
 5. VCT of width 3 and depth 5 has 3 + 9 + 27 + 81 + 243 = 363 nodes, as its text says literally.
 6. EAGLE-2's re-ranking may break the tree where confidences tie; here a parent comes before its child.
 7. The thresholds alone allow 1 / leaf nodes a layer; a cap, far above what trees have in practice, keeps
    the max_nodes most probable.  Of a layer, too, no more are expanded: what is below the others would not
    be among the most probable.
 8. `pct_cost` is beyond the paper, which takes a verified node as free, and a token as worth s_t however
    fast the round is.

    python pct.py       # the demo: a small tree in Figure 4's setting (s_d / s_t = 0.1, leaf threshold 0.05)
"""
import math
from collections import namedtuple
from statistics import median

import torch

Tree = namedtuple("Tree", "tokens parents p_draft", defaults=(None,))

WIDTH = 5               # "the expansion width of each node in the PCT was set to 5" (appendix B)
DEPTH = 10              # "and the maximum depth was set to 10"
LEAF = 0.01             # "removed leaf nodes whose overall acceptance confidence was less than 0.01"
COST = 0.05             # s_d / s_t, where it was not measured
OWN = 0.3               # the threshold of "w/o expected time gain", which Table 3 does not state
NODE_PRICE = 0.01       # one more verified node, in plain steps, where it was not measured
MAX_NODES = 256         # the root not counted: declared, so that a cache can have room (difference 7)

# ------------------------------------------------------------------ the candidate tree while it grows
class Candidates:
    """Lists with one entry a node: the root first, then layer by layer, parents before children.

    token; parent: index in these lists; depth; c: the node's own confidence; p: its joint probability.
    """

    def __init__(self, expand, root, width):
        self.expand, self.root, self.width = expand, root, width
        self.token = [None]                      # the root's stays on the device
        self.parent = [-1]
        self.depth = [0]
        self.c = [1.0]
        self.p = [1.0]
        self.asked = {-1: -1}                    # node -> its number in the order given to expand

    def grow(self, frontier):
        """Draft once, the `width` best children of each node of the frontier -> indices of the new layer."""
        parents = [self.asked[self.parent[node]] for node in frontier]
        for node in frontier:
            self.asked[node] = len(self.asked) - 1
        tokens = self.root
        if frontier != [0]:
            tokens = [self.token[node] for node in frontier]
            tokens = torch.tensor(tokens, device=self.root.device)
        rows = self.expand(tokens, parents)                      # (m, V)
        c, x = read_top_k(rows, self.width)                      # m lists of k numbers each

        first = len(self.token)
        for node, c_below, x_below in zip(frontier, c, x):
            for c_j, x_j in zip(c_below, x_below):
                if c_j == 0:
                    break                                        # nor is any of the rest possible
                self.token.append(int(x_j))
                self.parent.append(node)
                self.depth.append(self.depth[node] + 1)
                self.c.append(c_j)
                # p_j = c_1 c_2 ... c_j
                self.p.append(self.p[node] * c_j)
        return range(first, len(self.token))

    def nodes(self):
        """All but the root."""
        return range(1, len(self.token))

    def ranked(self, nodes):
        """Most probable first; where two tie, first come.

        A parent is at least as probable as its child, and came before it: whatever n, the first n are a tree.
        """
        return sorted(nodes, key=lambda j: (-self.p[j], j))

    def best(self, nodes, most):
        """The `most` most probable of the nodes, in the order in which they came."""
        ranked = self.ranked(nodes)
        return sorted(ranked[:most])

    def tree(self, kept):
        """The nodes `kept`, ascending and each with its parent, as a Tree.  The root is always kept."""
        place = {0: 0}
        tokens, parents = [0], [-1]              # the root's token is on the device already: any number here
        for node in kept:
            place[node] = len(tokens)
            tokens.append(self.token[node])
            parents.append(place[self.parent[node]])
        # one tensor: one copy to the device
        both = torch.tensor([tokens, parents], device=self.root.device)      # (2, n)
        tokens = torch.cat((self.root, both[0, 1:]))
        return Tree(tokens, both[1])

def read_top_k(rows, k):
    """The k best of each row (m, V) -> probabilities and tokens, [m][k] each, by one host read."""
    best = rows.topk(min(k, rows.shape[1]))                      # (m, k)
    # they travel as one tensor of floats: a float32 holds every integer below 2^24, so every token
    dtype = torch.promote_types(rows.dtype, torch.float32)
    c = best.values.to(dtype)
    x = best.indices.to(dtype)
    return torch.stack((c, x)).tolist()

def check(width, depth, most=1):
    assert width >= 1, f"width is {width}: a node needs at least one child"
    assert depth >= 1, f"depth is {depth}: draft at least once"
    assert most >= 1, f"the tree may have {most} nodes: allow at least one"

# ------------------------------------------------------------------ section 3.2 and its ablations
def pct(expand, root,
        cost=COST, width=WIDTH, depth=DEPTH, leaf=LEAF, max_nodes=MAX_NODES):
    """The pruned candidate tree (section 3.2, "Implementation Details").

    cost: s_d / s_t.  leaf: nodes under this joint probability are removed; 0 is Table 3's "w/o remove leaf
    nodes".  Returns a Tree of at most 1 + max_nodes nodes.
    """
    check(width, depth, max_nodes)
    assert 0 <= cost <= 1, f"cost {cost} is s_d / s_t: between 0 and 1"
    candidates = Candidates(expand, root, width)
    p = candidates.p
    frontier = [0]
    # "the construction process terminates if there are no expandable leaf nodes or the tree depth reaches
    # the maximum depth"
    while frontier and candidates.depth[-1] < depth:
        # "the draft model predicts the top-k child nodes based on the expandable nodes from the previous
        # layer to form the current layer"
        layer = candidates.grow(frontier)
        # "marks the nodes with an overall acceptance confidence less than s_d/s_t to prevent them from
        # being used in the next layer's node generation".  Eq. 5: s_d - p_j s_t <= 0
        frontier = [j for j in layer if p[j] >= cost]
        frontier = candidates.best(frontier, max_nodes)
    # "we remove leaf nodes whose overall acceptance confidence is below a given threshold" (difference 3)
    kept = [j for j in candidates.nodes() if p[j] >= leaf]
    kept = candidates.best(kept, max_nodes)
    return candidates.tree(kept)

def own_confidence(expand, root,
                   own=OWN, width=WIDTH, depth=DEPTH, leaf=LEAF, max_nodes=MAX_NODES):
    """Table 3's "w/o expected time gain": "confidence score is directly used to prune the candidate tree".

    A node is expanded where its own confidence c_j, not the product p_j, is at least `own`.  The rest is as
    in `pct`, the removal of leaves by their joint probability included.
    """
    check(width, depth, max_nodes)
    assert 0 <= own <= 1, f"own {own} is a confidence: between 0 and 1"
    candidates = Candidates(expand, root, width)
    c, p = candidates.c, candidates.p
    frontier = [0]
    while frontier and candidates.depth[-1] < depth:
        layer = candidates.grow(frontier)
        # c_j in the place of p_j
        frontier = [j for j in layer if c[j] >= own]
        frontier = candidates.best(frontier, max_nodes)
    kept = [j for j in candidates.nodes() if p[j] >= leaf]
    kept = candidates.best(kept, max_nodes)
    return candidates.tree(kept)

# ------------------------------------------------------------------ beyond the paper: what a node costs
def pct_cost(expand, root,
             cost=COST, node_price=NODE_PRICE, width=WIDTH, depth=DEPTH, max_nodes=MAX_NODES):
    """PCT whose two thresholds follow from one aim: the most tokens for the time of a round.

    cost: s_d / s_t.  node_price: what one more verified node takes.  Both in plain steps (s_t: a token
    without speculation), the unit of time here.  A round that drafts D times and verifies the nodes N
        takes   T = 1 + D cost + |N| node_price
        gives   E = 1 + sum_{j in N} p_j      tokens: the target's own, and each node if it is accepted.

    The aim is the highest rate E / T.  Say that tokens can be had at the rate r.  E / T is at least r just
    where E - r T >= 0 (Dinkelbach), and that difference, unlike the fraction, is a sum to which each node and
    each drafting step contributes by itself:
        E - r T = (1 - r) + sum_{j in N} (p_j - r node_price) - D r cost.
    So a node is worth verifying while p_j >= r node_price; and a drafting step below a node, which takes
    r cost and brings a token only if the node is accepted, is worth it while p_j >= r cost.  This is Eq. 5
    where a token is worth s_t / r, what it costs in such a round, and not s_t, its cost without speculation.

    r is 1 at first: plain decoding.  After each depth, the nodes that are worth verifying at r give an E / T,
    a rate that can be had: where it is higher it is the new r (one step of Dinkelbach's iteration).  At the
    end the drafting is paid for, and what is verified is the n most probable nodes, for the best n.
    Returns a Tree of at most 1 + max_nodes nodes.
    """
    check(width, depth, max_nodes)
    assert 0 <= cost <= 1, f"cost {cost} is s_d / s_t: between 0 and 1"
    assert node_price >= 0, f"node_price {node_price} is a time: not below zero"
    candidates = Candidates(expand, root, width)
    p = candidates.p
    frontier = [0]
    r = 1.0
    while frontier and candidates.depth[-1] < depth:
        layer = candidates.grow(frontier)
        r = max(r, rate_at(r, candidates, cost, node_price))
        # Eq. 5 at this rate: s_d - p_j s_t / r <= 0
        frontier = [j for j in layer if p[j] >= r * cost]
        frontier = candidates.best(frontier, max_nodes)
    kept = most_profitable(candidates, cost, node_price)
    kept = candidates.best(kept, max_nodes)
    return candidates.tree(kept)

def rate_at(r, candidates, cost, node_price):
    """E / T, if drafting ended here and the nodes that are worth verifying at the rate r were verified."""
    D = candidates.depth[-1]
    worth = [p for p in candidates.p[1:] if p >= r * node_price]
    E = 1 + sum(worth)
    T = 1 + D * cost + len(worth) * node_price
    return E / T

def most_profitable(candidates, cost, node_price):
    """The nodes N of highest E / T when all drafting is done: the n most probable, for the best n."""
    D = candidates.depth[-1]
    E = 1
    T = 1 + D * cost
    best, n = E / T, 0
    ranked = candidates.ranked(candidates.nodes())
    for i, j in enumerate(ranked, 1):
        E += candidates.p[j]
        T += node_price
        if E / T > best:
            best, n = E / T, i
    return ranked[:n]

def costs_of(turns):
    """s_d / s_t and the price of a node, both in plain steps, from short decodings that took turns.

    turns: list of (plain, chain, wide), the totals of a plain decoding, of one with chains, of one with wide
    trees: seconds "draft" and "verify", counts "rounds", "nodes" and "draft_forwards".  Medians over turns:
    another program disturbs one of them, not most.
    """
    costs, prices = [0.0], [0.0]
    for plain, chain, wide in turns:
        if not chain["nodes"]:
            continue                                             # the text ended before anything was drafted
        s_t = plain["verify"] / plain["rounds"]
        # Below the first depth PCT mostly drafts from one node, as a chain does.
        s_d = chain["draft"] / chain["draft_forwards"]
        costs.append(s_d / s_t)
        # How much longer the wide tree's round takes to verify, for how many more nodes
        longer = wide["verify"] / wide["rounds"] - chain["verify"] / chain["rounds"]
        more = wide["nodes"] / wide["rounds"] - chain["nodes"] / chain["rounds"]
        prices.append(longer / more / s_t)
    cost = median(costs[1:] or costs)
    price = median(prices[1:] or prices)
    return cost, max(0.0, price)

# ------------------------------------------------------------------ appendix A: the baselines
def vct(expand, root, width=3, depth=5):
    """The vanilla candidate tree: "fixed width and depth" (appendix A)."""
    check(width, depth)
    candidates = Candidates(expand, root, width)
    frontier = [0]
    while frontier and candidates.depth[-1] < depth:
        frontier = candidates.grow(frontier)
    return candidates.tree(candidates.nodes())

def eagle2(expand, root, total=50, depth=6, expanded=10):
    """EAGLE-2's tree (appendix A): the `expanded` best nodes of a layer get as many children each.

    "We set the total number of draft tokens to 50, with a draft tree depth of 6, and select 10 nodes during
    the expansion phase."
    """
    check(expanded, depth, total)
    candidates = Candidates(expand, root, expanded)
    frontier = [0]
    while frontier and candidates.depth[-1] < depth:
        layer = candidates.grow(frontier)
        frontier = candidates.best(layer, expanded)
    # "re-ranks the nodes of the candidate tree by confidence scores and retains the top-k nodes"
    kept = candidates.best(candidates.nodes(), total)
    return candidates.tree(kept)

# ------------------------------------------------------------------ what a builder can ask for at most
# bounds(**settings) -> (nodes without the root, nodes of one expand), for static shapes
def at_most(p):
    """How many alternatives can have a probability of p or more: they sum to one, but for rounding."""
    if p == 0:
        return math.inf
    return int((1 + 1e-5) / p)

def layers(width, depth, children=math.inf, expanded=math.inf, kept=math.inf):
    """Bounds layer by layer, where at most so many children of a node are expanded, so many nodes of a layer
    are expanded, and so many nodes of a layer are kept -> (nodes, nodes of one expand)."""
    nodes, frontier, widest = 0, 1, 1
    for _ in range(depth):
        widest = max(widest, frontier)
        layer = frontier * width
        nodes += min(layer, kept)
        frontier = min(layer, frontier * children, expanded)
    return nodes, widest

def pct_bounds(cost=COST, width=WIDTH, depth=DEPTH, leaf=LEAF, max_nodes=MAX_NODES, **_):
    # the joint probabilities of a layer sum to at most one: no more than s_t / s_d of them reach s_d / s_t
    expanded = min(at_most(cost), max_nodes)
    nodes, widest = layers(width, depth, expanded=expanded, kept=at_most(leaf))
    return min(nodes, max_nodes), widest

def own_confidence_bounds(own=OWN, width=WIDTH, depth=DEPTH, leaf=LEAF, max_nodes=MAX_NODES, **_):
    # the own confidences of one node's children sum to at most one, those of a layer do not
    nodes, widest = layers(width, depth, at_most(own), max_nodes, at_most(leaf))
    return min(nodes, max_nodes), widest

def pct_cost_bounds(cost=COST, width=WIDTH, depth=DEPTH, max_nodes=MAX_NODES, **_):
    # r is at least 1, so no more is expanded than by pct; no threshold removes leaves
    return pct_bounds(cost, width, depth, leaf=0, max_nodes=max_nodes)

def vct_bounds(width=3, depth=5, **_):
    return layers(width, depth)

def eagle2_bounds(total=50, depth=6, expanded=10, **_):
    nodes, widest = layers(expanded, depth, expanded=expanded)
    return min(nodes, total), widest

pct.bounds = pct_bounds
own_confidence.bounds = own_confidence_bounds
pct_cost.bounds = pct_cost_bounds
vct.bounds = vct_bounds
eagle2.bounds = eagle2_bounds

def main():
    """s_d / s_t = 0.1, leaves under 0.05 removed: unlikely nodes stay or go, the likely path grows on."""
    table = torch.tensor([
        [0.0, 0.6, 0.3, 0.08, 0.02],
        [0.0, 0.0, 0.9, 0.1, 0.0],
        [0.0, 0.2, 0.0, 0.0, 0.5],
        [0.0, 1.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0],
    ])

    def expand(tokens, parents):
        return table[tokens]

    root = torch.tensor([0])
    tree = pct(expand, root, cost=0.1, leaf=0.05)
    paths = [""]
    for node in range(1, len(tree.tokens)):
        parent = tree.parents[node]
        token = tree.tokens[node].item()
        paths.append(f"{paths[parent]}{token}")
    # 4 (0.02) is removed; 3 (0.08), 1-3 (0.06), 2-1 (0.06) and 1-2-1-2 (0.097) stay but are not expanded
    paths = " ".join(sorted(paths[1:]))
    assert paths == "1 12 121 1212 124 13 2 21 24 3"
    print("kept paths:", paths)

if __name__ == "__main__":
    main()
