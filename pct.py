"""PCT: the pruned candidate tree, and the trees that it is compared with.

Effective Draft Decoder with Pruned Candidate Tree (ACL 2025), section 3.2 and appendix B; the ablations of
Table 3; the baselines of appendix A.

The idea.  The drafter's confidence is calibrated: the product of confidences along a path is the probability
that the whole path is accepted.  Drafting below a node costs s_d and saves at most s_t, if the node is
accepted, so it pays while that probability is at least s_d / s_t.  Nodes that are almost surely rejected are
not worth verifying either.

    paper                     shape      name here
    d_1 ... d_m               tokens     a path of the tree, the root left out
    c_i                       float      c: the drafter's probability of one token
    p_j = prod_{i<=j} c_i     float      p: joint probability of a node and all above it; the root's is 1
    s_d, s_t                  seconds    cost = s_d / s_t: one drafter forward over one target forward
    s_d - p_j s_t  (Eq. 5)    seconds    expected loss of drafting below a node: pays while p_j >= s_d / s_t
    top-k children            int        width (5)           appendix B
    maximum depth             int        depth (10)          appendix B
    leaf threshold            float      leaf (0.01)         appendix B

A builder is a function of expand and root (1,), a token id.  expand(tokens (m,), parents [m ints]) ->
probabilities (m, V) runs the drafter once over m new nodes.  It counts the nodes that it has been given in
this tree from 0; `parents` are their numbers, -1 for the root.  A row of zeros: the drafter cannot go on.
The builder returns a Tree of tokens (n,) and parents (n,), here numbers of the tree's own nodes: the root is
node 0 with parent -1, and parents come before children.  No node has probability zero.
Each depth costs one drafter forward over the whole frontier, and one host read.  Where expand has
`remaining`, the tree is no deeper.

To use this file alone, with causal LMs `target` and `drafter` of one vocabulary and without sliding windows,
and a list of token ids `text`:

    def expand(tokens, parents):
        for token, parent in zip(tokens.tolist(), parents):
            paths.append(paths[parent] + [token] if parent >= 0 else text[:-1] + [token])
        rows = [drafter(torch.tensor([path])).logits[0, -1] for path in paths[-len(parents):]]
        # (m, V).  At `temperature` the drafter's confidence should be how often its tokens are accepted.
        return (torch.stack(rows) / temperature).softmax(-1)
    while len(text) < 60:
        paths = []
        tree = pct.pct(expand, torch.tensor(text[-1:]), cost=0.05)
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        # The text is a chain above the root.  A token sees what its parent sees, and itself.
        t, n = len(text) - 1, len(tokens)
        above = [*range(-1, t - 1), *(t + parent for parent in parents)]
        sees, position = torch.eye(t + n).bool(), [0] * (t + n)
        for i in range(1, t + n):
            sees[i] |= sees[above[i]]
            position[i] = position[above[i]] + 1
        mask = sees.log().to(target.dtype)                    # 0 or -inf: added to the scores
        out = target(torch.tensor([text[:-1] + tokens]), attention_mask=mask[None, None],
                     position_ids=torch.tensor([position]))
        choice = out.logits[0, t:].argmax(-1).tolist()        # the target's token after each node
        # Accept: walk down from the root while the target's choice is a child.
        child = {place: i for i, place in enumerate(zip(parents, tokens))}
        node = 0
        while node is not None:
            text.append(choice[node])
            node = child.get((node, choice[node]))

Differences from the paper:
 1. Eq. 5 is an expected loss: smaller is better.  (The text calls it a gain, and acts on it as a loss.)  It
    prices the step that drafts d_j, after which alone p_j is known; the text, and this file, decide by p_j
    on the step below d_j, whose chance is no higher.
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
 8. `pct_cost` is beyond the paper, which takes a verified node as free, charges a drafting step to each node
    rather than to a depth, and takes a token as worth s_t however fast the round is.
 9. `graft` is beyond the paper, too: a tree drafted by two, one of them for nothing, such as a drafter beside
    Max-Gram (Cascade Speculative Drafting, arXiv 2312.11462; class Beside of maxgram.py).

    python pct.py       # the demo: a small tree in Figure 4's setting (s_d / s_t = 0.1, leaf threshold 0.05)
"""
import math
from collections import namedtuple
from functools import partial
from statistics import median

import torch

Tree = namedtuple("Tree", "tokens parents p_draft", defaults=(None,))

WIDTH = 5               # "the expansion width of each node in the PCT was set to 5" (appendix B)
DEPTH = 10              # "and the maximum depth was set to 10"
LEAF = 0.01             # "removed leaf nodes whose overall acceptance confidence was less than 0.01"
COST = 0.05             # s_d / s_t, where it was not measured
OWN = 0.3               # the threshold of "w/o expected time gain", which Table 3 does not state
NODE_PRICE = 0.01       # one more verified node, in plain steps, where it was not measured
MAX_NODES = 256         # the root not counted (difference 7)
CHAIN = 16              # suggested tokens that hang behind one node, or that one forward reads at most

# ------------------------------------------------------------------ the candidate tree while it grows
class Candidates:
    """Lists with one entry a node: the root first, parents before children, else in the order of drafting.

    token; parent: index in these lists; depth: the root's is 0; c: the node's own confidence; p: its joint
    probability.  drafts: drafter forwards so far.  read: the nodes that the last of them read.
    """

    def __init__(self, expand, root, width):
        self.expand, self.root, self.width = expand, root, width
        self.token = [None]                      # the root's stays on the device
        self.parent = [-1]
        self.depth = [0]
        self.c = [1.0]
        self.p = [1.0]
        self.asked = {-1: -1}                    # node -> its number in the order given to expand
        self.given = self.drafts = 0             # nodes given to expand, and in how many forwards

    def grow(self, frontier, chain=()):
        """Draft once, the `width` best children of each node of the frontier -> indices of the new nodes.

        chain: ids of nodes that hang behind the frontier's last, one behind the other, and are read in the
        same forward.  It ends where a node of it is not among the best children of the one before.
        """
        parents = [self.asked[self.parent[node]] for node in frontier]
        end = self.given + len(parents)
        parents += range(end - 1, end - 1 + len(chain))
        tokens = self.root
        if frontier != [0] or chain:
            below = [self.token[node] for node in frontier if node] + [*chain]
            tokens = torch.tensor(below, device=self.root.device)
        if frontier == [0] and chain:
            tokens = torch.cat((self.root, tokens))
        rows = self.expand(tokens, parents)                      # (m, V)
        c, x = read_top_k(rows, self.width)                      # m lists of k numbers each

        first, self.read, below = len(self.token), [], {}
        for i, (c_below, x_below) in enumerate(zip(c, x)):
            node = frontier[i] if i < len(frontier) else below.get(chain[i - len(frontier)])
            if node is None:
                break
            self.asked[node] = self.given + i
            self.read.append(node)
            below = self.add(node, c_below, x_below)
        self.given += len(parents)
        self.drafts += 1
        return range(first, len(self.token))

    def add(self, node, c, x):
        """Put children below a node, confidences c and tokens x, the best first -> {token: index}."""
        check_probabilities(c)
        added = {}
        for c_j, x_j in zip(c, x):
            if c_j == 0:
                break                                            # nor is any of the rest possible
            added[int(x_j)] = len(self.token)
            self.token.append(int(x_j))
            self.parent.append(node)
            self.depth.append(self.depth[node] + 1)
            self.c.append(c_j)
            # p_j = c_1 c_2 ... c_j
            self.p.append(self.p[node] * c_j)
        return added

    def suggested(self, node, most):
        """What the drafter suggests behind a node -> up to `most` ids, and a confidence in each: lists."""
        drafter = getattr(self.expand, "drafter", None)
        if not hasattr(drafter, "suggest"):
            return [], []
        token = self.token[node] if node else self.expand.root
        most = min(most, self.expand.remaining - self.depth[node])
        return drafter.suggest(token, self.asked[self.parent[node]], most)

    def grow_grafted(self, frontier, most):
        """As grow, with the chain of up to `most` tokens that is suggested behind the most probable node."""
        *others, best = reversed(self.ranked(frontier))
        # Children of its last node are no deeper than there is room.
        deepest = getattr(self.expand, "remaining", math.inf) - self.depth[best] - 1
        chain, _ = self.suggested(best, min(most, deepest))
        return self.grow(sorted(others) + [best], chain) if chain else self.grow(frontier)

    def hang(self, node, most, least):
        """Put what is suggested behind a node below it, undrafted, as long as p is more than `least`."""
        for x_j, c_j in zip(*self.suggested(node, most)):
            if self.p[node] * c_j <= least:
                break
            node = self.add(node, [c_j], [x_j])[x_j]

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
        """The nodes `kept`, each with its parent, as a Tree.  The root is always kept.

        Depth first, the most probable child first: where the likeliest path is accepted, the target's cache
        has its rows in place.
        """
        below = {}
        for node in kept:                        # as they came: of one parent, the best first
            below.setdefault(self.parent[node], []).append(node)
        place = {0: 0}
        tokens, parents = [0], [-1]              # the root's token is on the device already: any number here
        waiting = below.get(0, [])[::-1]
        while waiting:
            node = waiting.pop()
            place[node] = len(tokens)
            tokens.append(self.token[node])
            parents.append(place[self.parent[node]])
            waiting += below.get(node, [])[::-1]
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

def check_probabilities(c):
    """Refuse logits and their like: c is a list, some of the best of one row."""
    right = min(c) >= 0 and sum(c) < 1.05                        # a row in bfloat16 may sum to 1.02
    assert right, f"expand gave {c}: it must give probabilities, not logits"

def depth_within(expand, width, depth, most=1):
    """Check a builder's settings -> depth, or expand.remaining where that is less: there the output ends."""
    assert width >= 1, f"width is {width}: a node needs at least one child"
    assert depth >= 1, f"depth is {depth}: draft at least once"
    assert most >= 1, f"the tree may have {most} nodes: allow at least one"
    return min(depth, getattr(expand, "remaining", depth))

# ------------------------------------------------------------------ section 3.2 and its ablations
def pct(expand, root,
        cost=COST, width=WIDTH, depth=DEPTH, leaf=LEAF, max_nodes=MAX_NODES):
    """The pruned candidate tree (section 3.2, "Implementation Details").

    cost: s_d / s_t.  leaf: nodes under this joint probability are removed; 0 is Table 3's "w/o remove leaf
    nodes".  Returns a Tree of at most 1 + max_nodes nodes.
    """
    assert 0 <= cost <= 1, f"cost {cost} is s_d / s_t: between 0 and 1"
    candidates = Candidates(expand, root, width)
    return pruned(candidates, candidates.p, cost, depth, leaf, max_nodes)

def pruned(candidates, score, least, depth, leaf, max_nodes):
    """The loop of pct, and of its ablation: nodes j with score[j] >= least are expanded -> Tree."""
    depth = depth_within(candidates.expand, candidates.width, depth, max_nodes)
    frontier = [0]
    # "the construction process terminates if there are no expandable leaf nodes or the tree depth reaches
    # the maximum depth"
    while frontier and candidates.drafts < depth:
        # "the draft model predicts the top-k child nodes based on the expandable nodes from the previous
        # layer to form the current layer"
        layer = candidates.grow(frontier)
        # "marks the nodes with an overall acceptance confidence less than s_d/s_t to prevent them from
        # being used in the next layer's node generation".  Eq. 5: s_d - p_j s_t <= 0
        frontier = [j for j in layer if score[j] >= least]
        frontier = candidates.best(frontier, max_nodes)
    # "we remove leaf nodes whose overall acceptance confidence is below a given threshold" (difference 3)
    kept = [j for j in candidates.nodes() if candidates.p[j] >= leaf]
    kept = candidates.best(kept, max_nodes)
    return candidates.tree(kept)

def own_confidence(expand, root,
                   own=OWN, width=WIDTH, depth=DEPTH, leaf=LEAF, max_nodes=MAX_NODES):
    """Table 3's "w/o expected time gain": "confidence score is directly used to prune the candidate tree".

    A node is expanded where its own confidence c_j, not the product p_j, is at least `own`.  The rest is as
    in `pct`, the removal of leaves by their joint probability included.
    """
    assert 0 <= own <= 1, f"own {own} is a confidence: between 0 and 1"
    candidates = Candidates(expand, root, width)
    # c_j in the place of p_j
    return pruned(candidates, candidates.c, own, depth, leaf, max_nodes)

# ------------------------------------------------------------------ beyond the paper: what a node costs
def pct_cost(expand, root,
             cost=COST, node_price=NODE_PRICE, width=WIDTH, depth=DEPTH, max_nodes=MAX_NODES):
    """PCT whose two thresholds follow from one aim: the most tokens for the time of a round.

    cost: s_d / s_t.  node_price: what one more verified node takes.  Both in plain steps (s_t: a token
    without speculation), the unit of time here.  A round that drafts D times and verifies the nodes N
        takes   T = 1 + D cost + |N| node_price
        gives   E = 1 + sum_{j in N} p_j      tokens: the target's own, and each node if it is accepted.

    The aim is the highest rate E / T.  Let r be a rate already reached: 1 at first, plain decoding's.  E / T
    is at least r just where E - r T >= 0 (Dinkelbach), and that difference, unlike the fraction, is a sum:
        E - r T = (1 - r) + sum_{j in N} (p_j - r node_price) - D r cost.
    Nodes.  A node is worth verifying where p_j >= r node_price, whatever is drafted.
    Depths.  One depth more costs r cost once, however many nodes are expanded.  The p of j's children sum to
    at most p_j, so those worth verifying add at most p_j - r node_price: all of p_j on one child.  Hence no
    depth below the frontier F adds more than
        sum_{j in F} max(0, p_j - r node_price),
    and where that is less than r cost no deeper tree is faster.  But some of p_j goes to children that are
    not worth verifying.  What is expected here is that the next depth keeps the share s that the last one
    kept: sum of p over its nodes worth verifying, over the sum of p over their parents.  So
        nodes with s p_j >= r node_price are expanded,
        if the sum of s p_j - r node_price over them is at least r cost.
    Eq. 5 charges the drafting step to each node instead, as if each were drafted from alone.

    After each depth the nodes worth verifying at r give an E / T: if it is higher, it is the new r.  At the
    end the drafting is paid for, and what is verified is the n most probable nodes, for the best n.
    Returns a Tree of at most 1 + max_nodes nodes.
    """
    candidates = Candidates(expand, root, width)
    draft_by_price(candidates, candidates.grow, cost, node_price, depth, max_nodes)
    kept = most_profitable(candidates, cost, node_price)
    return candidates.tree(candidates.best(kept, max_nodes))

def graft(expand, root,
          cost=COST, node_price=NODE_PRICE, width=WIDTH, depth=DEPTH, max_nodes=MAX_NODES, chain=CHAIN):
    """pct_cost over drafters of two kinds: one whose forward costs s_d, and one that suggests for nothing.

    Where expand has a drafter that can suggest(token, parent, most) -> up to `most` ids and a confidence in
    each (lists), which may follow a token below a node (`parent`: its number in the order given to expand),
    such as maxgram.Beside, each forward reads the frontier and, behind its most probable node, up to `chain`
    suggested tokens.  It vouches for each of them or doubts it, and names what may stand beside it.

    The aim and the prices are those of pct_cost,
        T = 1 + D cost + |N| node_price,    E = 1 + sum_{j in N} p_j,
    but D, the forwards, is no longer the depth: one over a node and n suggested tokens deepens the tree by
    n + 1, for one s_d.  Nodes.  Their rule is the same: p_j >= r node_price, on the chain or beside it.
    Forwards.  The bound on what the next one adds holds for what the drafter alone can add; a chain comes on
    top.  So what is expected here of the next forward is at least worth its price.  s is measured over all
    the nodes that the last forward read.
    No forward at all.  What is suggested behind the root is a tree already, with D = 0: worth_drafting says
    whether a forward can add to it what it costs.  And when drafting is over, what is suggested behind the
    nodes that no forward read hangs there for nothing, where it is worth verifying.
    Where nothing is suggested this is pct_cost.

    depth: the most forwards.  Returns a Tree of at most 1 + max_nodes nodes, no deeper than expand.remaining.
    """
    candidates = Candidates(expand, root, width)
    candidates.hang(0, chain, least=node_price)
    alone = most_profitable(candidates, 0, node_price)
    if not alone or worth_drafting(candidates, alone, cost, node_price):
        candidates = Candidates(expand, root, width)
        grow = partial(candidates.grow_grafted, most=chain)
        r = draft_by_price(candidates, grow, cost, node_price, depth, max_nodes)
        for j in candidates.nodes():
            if j not in candidates.asked and candidates.p[j] > r * node_price:
                candidates.hang(j, chain, least=r * node_price)
    kept = most_profitable(candidates, cost, node_price)
    return candidates.tree(candidates.best(kept, max_nodes))

def worth_drafting(candidates, chain, cost, node_price):
    """Whether a forward over the root and a suggested `chain` (indices) is expected to be worth its price.

    The chain alone has a rate r.  Beside its child on the chain a node j leaves p_j - p_child for others; of
    that, a forward finds the share s, as large as the one that the chain keeps from node to node.
    """
    p = [1.0] + [candidates.p[j] for j in chain]
    r = sum(p) / (1 + len(chain) * node_price)
    s = sum(p[1:]) / sum(p[:-1])
    below = p[1:] + [0.0]
    left = [p_j - p_child for p_j, p_child in zip(p, below)]
    gain = sum(max(0, s * p_j - r * node_price) for p_j in left)
    return gain >= r * cost

def draft_by_price(candidates, grow, cost, node_price, depth, max_nodes):
    """The loop of pct_cost and graft.  grow(frontier) drafts once -> the new nodes.  -> the rate reached"""
    depth = depth_within(candidates.expand, candidates.width, depth, max_nodes)
    assert 0 <= cost <= 1, f"cost {cost} is s_d / s_t: between 0 and 1"
    assert node_price >= 0, f"node_price {node_price} is a time: not below zero"
    remaining = getattr(candidates.expand, "remaining", math.inf)
    p = candidates.p
    frontier = [0]
    r = 1.0
    while frontier and candidates.drafts < depth:
        layer = grow(frontier)
        r = max(r, rate_at(r, candidates, cost, node_price))
        # s: what share of p this forward kept
        before = sum(p[j] for j in candidates.read)
        s = sum(p[j] for j in layer if p[j] >= r * node_price) / before
        # Nodes: those not read yet whose children are expected to be worth their price
        unread = [j for j in layer if j not in candidates.asked and candidates.depth[j] < remaining]
        frontier = [j for j in unread if s * p[j] >= r * node_price]
        frontier = candidates.best(frontier, max_nodes)
        # Forwards: is what they are expected to add worth one more?
        gain = sum(s * p[j] - r * node_price for j in frontier)
        if gain < r * cost:
            break
    return r

def rate_at(r, candidates, cost, node_price):
    """E / T, if drafting ended here and the nodes that are worth verifying at the rate r were verified."""
    D = candidates.drafts
    worth = [p for p in candidates.p[1:] if p >= r * node_price]
    E = 1 + sum(worth)
    T = 1 + D * cost + len(worth) * node_price
    return E / T

def most_profitable(candidates, cost, node_price):
    """The nodes N of highest E / T when all drafting is done: the n most probable, for the best n."""
    D = candidates.drafts
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

    turns: list of (plain, short, deep, wide), the totals of a plain decoding, of two with chains, of one with
    wide trees: seconds "draft", "verify", "other", counts "rounds" (above 0), "nodes", "draft_forwards".  A
    round takes a + D s_d + |N| price, the host's work included: three kinds of rounds tell the three apart.
    Medians over turns: another program disturbs one of them, not most.
    """
    costs, prices = [], []
    for turn in turns:
        # Of each decoding's rounds: seconds, drafts and nodes, on average
        t = [(x["draft"] + x["verify"] + x["other"]) / x["rounds"] for x in turn]
        D = [x["draft_forwards"] / x["rounds"] for x in turn]
        N = [x["nodes"] / x["rounds"] for x in turn]
        plain, short, deep, wide = range(4)
        if D[deep] <= D[short] or N[wide] <= D[wide]:
            continue                                             # the text ended before much was drafted
        # A chain one deeper takes one draft and one node more.
        both = (t[deep] - t[short]) / (D[deep] - D[short])
        # The wide tree has further nodes than one a draft.
        further = N[wide] - D[wide]
        longer = t[wide] - t[short] - (D[wide] - D[short]) * both
        price = max(0.0, longer / further)
        costs.append((both - price) / t[plain])
        prices.append(price / t[plain])
    return median(costs or [0.0]), median(prices or [0.0])

# ------------------------------------------------------------------ appendix A: the baselines
def vct(expand, root, width=3, depth=5):
    """The vanilla candidate tree: "fixed width and depth" (appendix A)."""
    depth = depth_within(expand, width, depth)
    candidates = Candidates(expand, root, width)
    frontier = [0]
    while frontier and candidates.drafts < depth:
        frontier = candidates.grow(frontier)
    return candidates.tree(candidates.nodes())

def eagle2(expand, root, total=50, depth=6, expanded=10):
    """EAGLE-2's tree (appendix A): the `expanded` best nodes of a layer get as many children each.

    "We set the total number of draft tokens to 50, with a draft tree depth of 6, and select 10 nodes during
    the expansion phase."
    """
    depth = depth_within(expand, expanded, depth, total)
    candidates = Candidates(expand, root, expanded)
    frontier = [0]
    while frontier and candidates.drafts < depth:
        layer = candidates.grow(frontier)
        frontier = candidates.best(layer, expanded)
    # "re-ranks the nodes of the candidate tree by confidence scores and retains the top-k nodes"
    kept = candidates.best(candidates.nodes(), total)
    return candidates.tree(kept)

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
