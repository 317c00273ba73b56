"""PCT: the pruned candidate tree, and the trees that it is compared with.

Effective Draft Decoder with Pruned Candidate Tree (ACL 2025), section 3.2 and appendix B; baselines of appendix A.

The idea.  The drafter's confidence is calibrated: the product of confidences along a path is the probability that the whole
path is accepted.  Drafting below a node costs s_d and saves s_t if the node is accepted, so it pays while that probability
is at least s_d / s_t; nodes that are almost surely rejected are not worth verifying either.

    paper                     shape        name here
    c_i                       float        the drafter's probability of one token
    p_j = prod c_i            float        joint: of a node and all above it; the root's is 1
    s_d, s_t                  seconds      cost = s_d / s_t: one drafter forward over one target forward
    s_d - p_j s_t  (Eq. 5)    seconds      expected loss of drafting below a node: it pays while p_j >= s_d / s_t
    top-k children            int          width (5); maximum depth (10); leaf threshold (0.01), all of appendix B

Builders are functions of `expand(tokens (m,), parents [m ints]) -> probs (m, V)`, which runs the drafter over m new nodes
(`parents` index nodes in the order given to expand), and of the root; see cape.py.  Each depth costs one drafter forward
over the whole frontier and one host read.

Differences from the paper:
 1. Eq. 5 is an expected loss: smaller is better.  (The text calls it a gain, and acts on it as a loss.)
 2. Section 4.2 says that the "VDM" tree has many nodes: VCT is meant.
 3. A node with p_j < s_d / s_t (strict) stays as a leaf and is not expanded.  p_j never grows downwards, so removing leaves
    under the threshold until none is left is the same as dropping every node under it.
 4. The official code drops the best surviving path at the maximum depth, keeps only each path's top child when a whole layer
    falls below the threshold, and never removes leaves.  This file follows the text.
 5. VCT of width 3 and depth 5 has 3 + 9 + 27 + 81 + 243 = 363 nodes, as its text says literally.
 6. EAGLE-2's re-ranking may break the tree where confidences tie; here a parent always comes before its child.
 7. node_price is beyond the paper, which takes a verified node as free, and a token as worth s_t however fast the round is.
 8. The thresholds alone allow 1 / leaf nodes a layer; a cap, far above what trees have in practice, keeps the most probable.

    python pct.py          # the demo: a small tree in the setting of Figure 4 (s_d / s_t = 0.1, leaves under 0.05 removed)
"""
from collections import namedtuple

import torch

Tree = namedtuple("Tree", "tokens parents p_draft", defaults=(None,))
Node = namedtuple("Node", "token parent depth joint own")          # parent: index in the list of nodes; own: its own probability

WIDTH, DEPTH, LEAF = 5, 10, 0.01       # appendix B
COST = 0.05                            # s_d / s_t where it was not measured
MAX_NODES = 256                        # the root not counted: declared so that a cache can have room; see difference 8


def grow(expand, root, width, depth, chosen):
    """Layer by layer: expand the frontier, add the `width` best children of each of its nodes.  -> list of Node, root first.

    chosen(nodes, layer) -> the indices among `layer` (indices of the newest nodes) that the next depth expands.
    """
    assert width >= 1 and depth >= 1, "width and depth must be at least 1"
    nodes, frontier, asked = [Node(None, -1, 0, 1.0, 1.0)], [0], {-1: -1}
    for level in range(1, depth + 1):
        for node in frontier:
            asked[node] = len(asked) - 1                                   # its number in the order given to expand
        tokens = root if level == 1 else torch.tensor([nodes[node].token for node in frontier], device=root.device)
        rows = expand(tokens, [asked[nodes[node].parent] for node in frontier])
        best = rows.topk(min(width, rows.shape[1]))
        probs, ids = torch.stack((best.values.double(), best.indices.double())).tolist()     # the host read of this depth
        layer = len(nodes)
        for node, p, x in zip(frontier, probs, ids):
            nodes += [Node(int(t), node, level, nodes[node].joint * c, c) for c, t in zip(p, x) if c > 0]
        frontier = chosen(nodes, range(layer, len(nodes)))
        if not frontier:
            break
    return nodes


def as_tree(nodes, kept, root):
    """The nodes `kept` (ascending indices, closed upwards, without the root) as a Tree."""
    place = {-1: -1, 0: 0, **{node: i for i, node in enumerate(kept, 1)}}
    tokens = torch.tensor([nodes[node].token for node in kept], dtype=torch.long, device=root.device)
    return Tree(torch.cat((root, tokens)), torch.tensor([-1] + [place[nodes[node].parent] for node in kept]))


def pct(expand, root, cost=COST, width=WIDTH, depth=DEPTH, leaf=LEAF, own=None, node_price=None, max_nodes=MAX_NODES):
    """Section 3.2.  cost: s_d / s_t.  leaf: nodes under this joint probability are removed (0: "w/o remove leaf nodes").

    own: expand by each node's own confidence against this threshold instead ("w/o expected time gain", Table 3).
    node_price: what one more verified node costs, in plain steps; then `best_prefix` takes the place of `leaf`, and a token is
    worth what it costs in this round, not a plain step: nodes are expanded while p_j >= rate s_d / s_t (see `rate_of`).
    """
    assert 0 <= cost <= 1, f"cost {cost} is s_d / s_t, between 0 and 1"
    rate = 1.0

    def pays(nodes, layer):
        nonlocal rate
        if own is not None:
            return [i for i in layer if nodes[i].own >= own]
        if node_price is not None:
            rate = max(rate, rate_of(nodes, cost, node_price, rate))
        return [i for i in layer if nodes[i].joint >= rate * cost]
    nodes = grow(expand, root, width, depth, pays)
    likely = best_prefix(nodes, cost, node_price) if node_price is not None else [i for i in ranking(nodes) if nodes[i].joint >= leaf]
    return as_tree(nodes, sorted(likely[:max_nodes]), root)


def rate_of(nodes, cost, node_price, rate):
    """Expected tokens a plain step if drafting ended here, with the nodes that are worth their price at `rate` (Dinkelbach's step).

    Eq. 5 holds a drafting step against s_t, what a token costs without speculation.  A round that already yields `rate` tokens a
    plain step makes a token for s_t / rate: a further depth must beat that.
    """
    kept = [node.joint for node in nodes[1:] if node.joint >= rate * node_price]
    return (1 + sum(kept)) / (1 + cost * nodes[-1].depth + node_price * len(kept))


def best_prefix(nodes, cost, node_price):
    """Beyond the paper: the most probable n nodes, with n such that expected tokens over time is largest.

    A round of n nodes takes 1 + n * node_price + depths * cost plain steps and gives 1 + (sum of their joint probabilities)
    tokens.  Probabilities fall downwards, so the most probable nodes always form a tree.
    """
    time = 1 + cost * max(node.depth for node in nodes)                    # the drafting is done, whatever is verified
    ranked, gain, best, keep = ranking(nodes), 1.0, 1.0 / time, 0
    for n, i in enumerate(ranked, 1):
        gain += nodes[i].joint
        if gain / (time + n * node_price) > best:
            best, keep = gain / (time + n * node_price), n
    return ranked[:keep]


def ranking(nodes):
    """Indices of all nodes but the root, most probable first; nodes are listed parents first, so ties cannot part them."""
    return sorted(range(1, len(nodes)), key=lambda i: (-nodes[i].joint, i))


def vct(expand, root, width=3, depth=5):
    """The vanilla candidate tree (appendix A): every node has its `width` best children, to a fixed depth."""
    nodes = grow(expand, root, width, depth, lambda nodes, layer: list(layer))
    return as_tree(nodes, list(range(1, len(nodes))), root)


def eagle2(expand, root, total=50, depth=6, expanded=10):
    """EAGLE-2's tree (appendix A): the `expanded` best nodes of a layer get as many children each; the best `total` stay."""
    def best(nodes, layer):
        return sorted(sorted(layer, key=lambda i: (-nodes[i].joint, i))[:expanded])
    nodes = grow(expand, root, expanded, depth, best)
    return as_tree(nodes, sorted(ranking(nodes)[:total]), root)


# What a builder can ask for at most: (nodes without the root, nodes of one expand).  Joint probabilities of a layer sum to at
# most one, so PCT expands at most 1 / cost nodes of it, and keeps at most 1 / leaf of them.
def _pct_bounds(cost=COST, width=WIDTH, depth=DEPTH, leaf=LEAF, max_nodes=MAX_NODES, **_):
    frontier = min(int(1 / cost + 1e-9) if cost else width ** depth, width ** depth)
    return min(max_nodes, depth * min(width * frontier, int(1 / leaf + 1e-9) if leaf else width * frontier)), frontier


pct.bounds = _pct_bounds
vct.bounds = lambda width=3, depth=5, **_: (sum(width ** d for d in range(1, depth + 1)), width ** (depth - 1))
eagle2.bounds = lambda total=50, depth=6, expanded=10, **_: (total, expanded)


def main():
    """s_d / s_t = 0.1, leaves under 0.05 removed: unlikely nodes stay as leaves or go, and the likely path grows on."""
    table = {0: {1: 0.6, 2: 0.3, 3: 0.08, 4: 0.02}, 1: {2: 0.9, 3: 0.1}, 2: {4: 0.5, 1: 0.2}, 3: {1: 1.0}, 4: {}}
    probs = torch.tensor([[row.get(x, 0.0) for x in range(5)] for row in table.values()], dtype=torch.float64)
    tree = pct(lambda tokens, parents: probs[tokens], torch.tensor([0]), cost=0.1, leaf=0.05)
    shown = {}
    for i in range(1, len(tree.tokens)):
        shown[i] = shown.get(tree.parents[i].item(), "") + f"{tree.tokens[i].item()}"
    # 4 (0.02) is removed; 3 (0.08), 1-3 (0.06) and 2-1 (0.06) stay as leaves; 1-2-1-2 (0.097) is not expanded either
    assert sorted(shown.values()) == ["1", "12", "121", "1212", "124", "13", "2", "21", "24", "3"], shown
    print("kept paths:", " ".join(sorted(shown.values())))


if __name__ == "__main__":
    main()
