"""PCT: the pruned candidate tree, and the trees that it is compared with.

Effective Draft Decoder with Pruned Candidate Tree (ACL 2025), section 3.2 and appendix B; the
ablations of Table 3; the baselines of appendix A.

The idea.  The drafter's confidence is calibrated: the product of the confidences along a path is
the probability that the whole path is accepted.  Drafting below a node costs s_d and saves at most
s_t, if the node is accepted.  So it pays where that probability is at least s_d / s_t.  Nodes that
are almost surely rejected are not worth verifying either.

    paper                     shape      name here
    d_1 ... d_m               tokens     a path of the tree, the root left out
    c_i                       float      c: the drafter's probability of one token
    p_j = prod_{i<=j} c_i     float      p: joint probability of a node's path; the root's is 1
    s_d, s_t                  seconds    cost = s_d / s_t: a drafter forward over a target forward
    s_d - p_j s_t  (Eq. 5)    seconds    expected loss of drafting below a node
    top-k children            int        width (5)           appendix B
    maximum depth             int        depth (10)          appendix B
    leaf threshold            float      leaf (0.01)         appendix B

A builder is a function of expand and root (1,), a token id -> Tree.
    expand(tokens (m,), parents [m ints]) -> probabilities (m, V) runs the drafter once over m new
    nodes.  It counts the nodes that it was given in this tree from 0 on: a node's number there is
    its `expand_index`.  `parents` are such numbers; the root's parent is -1.  A row of zeros: the
    drafter has no prediction there.
    A Tree has tokens (n,) and parents (n,), which are indices of the tree's own nodes: the root is
    node 0 with parent -1, and parents come before children.  No node has probability zero.
Each depth takes one drafter forward over the whole frontier, and one device-to-host sync.  Where
expand has `remaining`, the tree is no deeper.

To use this file alone, with any two causal LMs of one vocabulary: docs/any_project.py writes out
one `expand` and one verification.  There the drafter's confidence should be how often its
tokens are accepted: divide its logits by a temperature that makes it so, before the softmax.

Differences from the paper:
 1. Eq. 5 is an expected loss: smaller is better.  (The text calls it a gain, and acts on it as a
    loss.)  It prices the step that drafts d_j, and p_j is known only after that step.  The text,
    and this file, compare p_j with the price of the next step, below d_j.
 2. Section 4.2 says that the "VDM" tree has many nodes: VCT is meant.
 3. A node with p_j < s_d / s_t (strict) stays as a leaf and is not expanded.  p_j never grows
    downwards.  So removing leaves under the threshold until none is left is the same as keeping the
    nodes with p_j >= threshold.
 4. The official code drops the best surviving path at the maximum depth, keeps only each path's top
    child when a whole layer falls below the threshold, and never removes leaves.  This file follows
    the text.
 5. VCT of width 3 and depth 5 has 3 + 9 + 27 + 81 + 243 = 363 nodes, as its text says literally.
 6. EAGLE-2's re-ranking may break the tree where confidences tie; here a parent comes before its
    child.
 7. The paper has no limit on nodes.  Here a tree keeps its max_nodes most probable nodes, far more
    than trees have in practice.  Nor are more nodes of one layer expanded.

    python pct.py       # the demo: a small tree in Figure 4's setting (s_d / s_t = 0.1, leaf 0.05)
"""
from collections import namedtuple

import torch

Tree = namedtuple("Tree", "tokens parents p_draft", defaults=(None,))

WIDTH = 5               # "the expansion width of each node in the PCT was set to 5" (appendix B)
DEPTH = 10              # "and the maximum depth was set to 10"
LEAF = 0.01             # "leaf nodes whose overall acceptance confidence was less than 0.01"
COST = 0.05             # s_d / s_t, where it was not measured
OWN = 0.3               # the threshold of "w/o expected time gain", which Table 3 does not state
MAX_NODES = 256         # the root not counted (difference 7)

# ---------------------------------------------------------------- the candidate tree while it grows
class Candidates:
    """All nodes that were drafted so far: lists with one entry a node, the root first.

    Parents come before children; of one parent the most probable child comes first.

    token; parent: index in these lists; depth: the root's is 0.
    c: the node's own confidence; p: its joint probability.
    expand_index: {node: its index among the nodes given to expand}.
    drafts: drafter forwards so far; given: nodes that they read.
    """

    def __init__(self, expand, root, width):
        self.expand = expand
        self.root = root
        self.width = width
        self.token = [None]                      # the root's token stays on the device
        self.parent = [-1]
        self.depth = [0]
        self.c = [1.0]
        self.p = [1.0]
        self.expand_index = {}
        self.drafts = 0
        self.given = 0

    def grow(self, frontier):
        """Draft once: the `width` best children of each node of the frontier -> the new nodes."""
        first_index = self.given
        first_child = len(self.token)
        parents = [self.parent_index(node) for node in frontier]
        c, x = self.draft(self.tokens_of(frontier), parents)
        for i, node in enumerate(frontier):
            self.expand_index[node] = first_index + i
            self.add_children(node, c[i], x[i])
        return range(first_child, len(self.token))

    def draft(self, tokens, parents):
        """One drafter forward over m nodes -> c and x, the best children's confidences and tokens.

        tokens (m,); parents: list of m expand_indices.  c, x: lists [m][width], the best first.
        """
        rows = self.expand(tokens, parents)                      # (m, V)
        self.drafts += 1
        self.given += len(parents)
        return read_top_k(rows, self.width)

    def parent_index(self, node):
        """The expand_index of a node's parent; -1 above the root."""
        if node == 0:
            return -1
        return self.expand_index[self.parent[node]]

    def tokens_of(self, nodes):
        """The tokens (m,) of some nodes, on the device."""
        if nodes == [0]:
            return self.root
        ids = [self.token[node] for node in nodes]
        return torch.tensor(ids, device=self.root.device)

    def add_children(self, node, c, x):
        """Add children of a node: confidences c and tokens x, the best first -> {token: node}."""
        check_probabilities(c)
        children = {}
        for c_j, x_j in zip(c, x):
            # The best come first: after one that is impossible no other is possible.
            if c_j == 0:
                break
            token = int(x_j)
            children[token] = len(self.token)
            self.token.append(token)
            self.parent.append(node)
            self.depth.append(self.depth[node] + 1)
            self.c.append(c_j)
            # p_j = c_1 c_2 ... c_j
            self.p.append(self.p[node] * c_j)
        return children

    def nodes(self):
        """All nodes but the root."""
        return range(1, len(self.token))

    def ranked(self, nodes):
        """The nodes, most probable first; of equally probable ones the first drafted.

        A parent is at least as probable as its child, and came before it: the first n are a tree.
        """
        return sorted(nodes, key=lambda j: (-self.p[j], j))

    def best(self, nodes, most):
        """The `most` most probable of the nodes, in the order in which they were drafted."""
        ranked = self.ranked(nodes)
        return sorted(ranked[:most])

    def tree(self, kept):
        """The nodes `kept`, each with its parent, as a Tree.  The root is always kept.

        Depth first, the most probable child first: where the most probable path is accepted, the
        target's KV entries are already in place.
        """
        children = {}
        for node in kept:
            children.setdefault(self.parent[node], []).append(node)
        index = {0: 0}                           # in the Tree
        tokens = [0]                             # the root's is on the device: any number here
        parents = [-1]
        stack = children.get(0, [])[::-1]
        while stack:
            node = stack.pop()
            index[node] = len(tokens)
            tokens.append(self.token[node])
            parents.append(index[self.parent[node]])
            # The most probable child is on top of the stack.
            stack += children.get(node, [])[::-1]
        # One tensor: one host-to-device copy.
        both = torch.tensor([tokens, parents], device=self.root.device)          # (2, n)
        tokens = torch.cat((self.root, both[0, 1:]))
        return Tree(tokens, both[1])

def read_top_k(rows, k):
    """The k best of each row (m, V) -> probabilities and tokens, [m][k] each, by one sync."""
    k = min(k, rows.shape[1])
    best = rows.topk(k)                                          # (m, k)
    # They travel as one tensor of floats: a float32 holds every integer below 2^24, so every token.
    dtype = torch.promote_types(rows.dtype, torch.float32)
    c = best.values.to(dtype)
    x = best.indices.to(dtype)
    return torch.stack((c, x)).tolist()

def check_probabilities(c):
    """Refuse logits and their like.  c: list, the best of one row."""
    # A row in bfloat16 may sum to 1.02.
    right = min(c) >= 0 and sum(c) < 1.05
    assert right, f"expand gave {c}: it must give probabilities, not logits"

def clamp_depth(expand, width, depth, most=1):
    """Check a builder's settings -> depth, at most expand.remaining: there the output ends."""
    assert width >= 1, f"width is {width}: a node needs at least one child"
    assert depth >= 1, f"depth is {depth}: draft at least once"
    assert most >= 1, f"the tree may have {most} nodes: allow at least one"
    remaining = getattr(expand, "remaining", depth)
    return min(depth, remaining)

def grow_layers(candidates, depth, expandable):
    """Draft layer by layer.  expandable(layer) -> the nodes of it that the next layer hangs from.

    "The construction process terminates if there are no expandable leaf nodes or the tree depth
    reaches the maximum depth" (section 3.2).
    """
    frontier = [0]
    while frontier and candidates.drafts < depth:
        # "the draft model predicts the top-k child nodes based on the expandable nodes from the
        # previous layer to form the current layer"
        layer = candidates.grow(frontier)
        frontier = expandable(layer)

# ---------------------------------------------------------------- section 3.2 and its ablations
def pct(expand, root, cost=COST, width=WIDTH, depth=DEPTH, leaf=LEAF, max_nodes=MAX_NODES):
    """The pruned candidate tree (section 3.2, "Implementation Details").

    cost: s_d / s_t.  leaf: nodes under this joint probability are removed; 0 is Table 3's "w/o
    removing leaf nodes".  Returns a Tree of at most 1 + max_nodes nodes.
    """
    assert 0 <= cost <= 1, f"cost {cost} is s_d / s_t: between 0 and 1"
    depth = clamp_depth(expand, width, depth, max_nodes)
    candidates = Candidates(expand, root, width)

    def expandable(layer):
        # "marks the nodes with an overall acceptance confidence less than s_d/s_t to prevent them
        # from being used in the next layer's node generation".  Eq. 5: s_d - p_j s_t <= 0
        nodes = [j for j in layer if candidates.p[j] >= cost]
        return candidates.best(nodes, max_nodes)

    grow_layers(candidates, depth, expandable)
    return without_leaves(candidates, leaf, max_nodes)

def without_leaves(candidates, leaf, max_nodes):
    """The last step: "we remove leaf nodes whose overall acceptance confidence is below a given
    threshold" (difference 3) -> Tree.
    """
    kept = [j for j in candidates.nodes() if candidates.p[j] >= leaf]
    kept = candidates.best(kept, max_nodes)
    return candidates.tree(kept)

def own_confidence(expand, root, own=OWN, width=WIDTH, depth=DEPTH, leaf=LEAF,
                   max_nodes=MAX_NODES):
    """Table 3's "w/o expected time gain": "confidence score is directly used to prune the candidate
    tree".

    A node is expanded where its own confidence c_j, not the product p_j, is at least `own`.  The
    rest is as in `pct`: leaves are removed by their joint probability.
    """
    assert 0 <= own <= 1, f"own {own} is a confidence: between 0 and 1"
    depth = clamp_depth(expand, width, depth, max_nodes)
    candidates = Candidates(expand, root, width)

    def expandable(layer):
        nodes = [j for j in layer if candidates.c[j] >= own]
        return candidates.best(nodes, max_nodes)

    grow_layers(candidates, depth, expandable)
    return without_leaves(candidates, leaf, max_nodes)

# ---------------------------------------------------------------- appendix A: the baselines
def vct(expand, root, width=3, depth=5):
    """The vanilla candidate tree: "fixed width and depth" (appendix A)."""
    depth = clamp_depth(expand, width, depth)
    candidates = Candidates(expand, root, width)
    # Every node is expanded.
    grow_layers(candidates, depth, expandable=list)
    return candidates.tree(candidates.nodes())

def eagle2(expand, root, total=50, depth=6, expanded=10):
    """EAGLE-2's tree (appendix A): the `expanded` best nodes of a layer get as many children each.

    "We set the total number of draft tokens to 50, with a draft tree depth of 6, and select 10
    nodes during the expansion phase."
    """
    depth = clamp_depth(expand, expanded, depth, total)
    candidates = Candidates(expand, root, expanded)

    def expandable(layer):
        return candidates.best(layer, expanded)

    grow_layers(candidates, depth, expandable)
    # "re-ranks the nodes of the candidate tree by confidence scores and retains the top-k nodes"
    kept = candidates.best(candidates.nodes(), total)
    return candidates.tree(kept)

# ---------------------------------------------------------------- demo
def main():
    """s_d / s_t = 0.1, leaf 0.05: unlikely nodes stay or go, the likely path grows on."""
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
    # 4 (0.02) is removed.
    # 3 (0.08), 1-3 (0.06), 2-1 (0.06) and 1-2-1-2 (0.097) stay but are not expanded.
    paths = " ".join(sorted(paths[1:]))
    assert paths == "1 12 121 1212 124 13 2 21 24 3"
    print("kept paths:", paths)

if __name__ == "__main__":
    main()
