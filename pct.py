"""PCT: the pruned candidate tree, and the trees that it is compared with.

Effective Draft Decoder with Pruned Candidate Tree (ACL 2025), section 3.2 and appendix B; the
ablations of Table 3; the baselines of appendix A.

The idea.  The drafter's confidence is calibrated: the product of the confidences along a path is
the probability that the whole path is accepted.  Drafting below a node costs s_d, and saves at most
s_t if the node is accepted.  So the tree grows below nodes that are accepted with a probability of
at least s_d / s_t.  Nodes that will almost surely be rejected are not worth verifying, so they are
removed at the end.

    paper                     shape      name here
    d_1 ... d_m               tokens     a path of the tree, excluding the root
    c_i                       float      c: the drafter's probability of one token
    p_j = prod_{i<=j} c_i     float      p: joint probability of a node's path; the root's is 1
    s_d, s_t                  seconds    cost = s_d / s_t: a drafter forward over a target forward
    s_d - p_j s_t  (Eq. 5)    seconds    expected loss of drafting below a node
    top-k children            int        width (5)           appendix B
    maximum depth             int        depth (10)          appendix B
    leaf threshold            float      leaf (0.01)         appendix B

A builder is a function of `expand` and of root (1,), a token id.  It returns a Tree of tokens (n,)
and parents (n,), which are indices of the tree's own nodes.  Node 0 is the root, with parent -1,
and parents come before their children.  No node has probability zero.

expand(tokens (m,), parents [m ints]) -> probabilities (m, V) runs the drafter once over m new nodes
and returns the distribution of the token that follows each.  It numbers nodes from 0 in the order
in which it receives them.  That number is a node's `expand_index`, and `parents` are such numbers:
the root comes first, by expand(root, [-1]).  A row of zeros means that the drafter has no
prediction.  If expand has an attribute `remaining`, the tree is at most that deep.

Each depth takes one drafter forward over all nodes that are expanded there, and one device-to-host
sync.

To use this file in a project of yours, write `expand` for your drafter and verify the tree by one
forward of your target.  docs/any_project.py has both, in plain code for any causal LMs.

    tree = pct(expand, root, cost=0.05)          # root = torch.tensor([the last token's id])
    # Forward the target once over tree.tokens.  A node's position id is the root's plus the node's
    # depth; its mask shows the text before the root, the node's ancestors and the node itself.
    # Then walk down from node 0 while the target's choice after a node is one of its children.

The confidences must be calibrated, which means that of all tokens drafted with confidence 0.7 the
target accepts 70 %.  If yours are not, divide the drafter's logits by a calibration temperature
before the softmax.

Differences from the paper:
 1. The paper calls Eq. 5 a gain, but it is an expected loss: smaller is better.  The paper's text
    lets p_j decide whether to draft d_j, but p_j is known only after d_j is drafted.  Its
    "Implementation Details" let p_j decide whether to draft below d_j, and so does this file.
 2. Section 4.2 says that the "VDM" (vanilla draft model) has many nodes; the vanilla candidate tree
    (VCT) is meant.
 3. A node with p_j < s_d / s_t (strictly less) is not expanded, but stays in the tree as a leaf.
    Removing leaves below the leaf threshold may expose others, which are removed in turn.  Since
    p_j never increases along a path, what remains are exactly the nodes with p_j >= leaf.
 4. This file follows the paper's text.  The official code departs from it: it drops the best path
    that reaches the maximum depth; when all nodes of a layer fall below the threshold, it keeps
    only the best child of each path; and it never removes leaves.
 5. VCT's width of 3 and depth of 5, taken literally, give 3 + 9 + 27 + 81 + 243 = 363 nodes.
 6. EAGLE-2's re-ranking may keep a child without its parent where both are equally probable.  Here
    parents come first in a tie.
 7. The paper does not limit the number of nodes.  Here `pct` and `own_confidence` expand at most
    max_nodes nodes per layer, and return the max_nodes most probable ones.  That is far above the
    size that trees have in practice.

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
MAX_NODES = 256         # excluding the root (difference 7)

# ---------------------------------------------------------------- the candidate tree while it grows
class Candidates:
    """All nodes drafted so far: lists with one entry per node, the root first.

    Parents come before children, and the children of a node are sorted, the most probable first.

    token, depth; parent: the index of the node's parent in these lists.  The root's depth is 0.
    c: the node's own confidence; p: its joint probability.
    expand_index: {node: its number in expand}, for the nodes that were given to expand.
    drafts: the number of drafter forwards so far.  given: the number of nodes given to expand so
    far, which is the next expand_index.
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
        probs = self.expand(tokens, parents)                     # (m, V)
        self.drafts += 1
        self.given += len(parents)
        return read_top_k(probs, self.width)

    def parent_index(self, node):
        """The expand_index of a node's parent, or -1 for the root."""
        if node == 0:
            return -1
        return self.expand_index[self.parent[node]]

    def tokens_of(self, nodes):
        """The tokens (m,) of a list of nodes, on the device."""
        if nodes == [0]:
            return self.root
        ids = [self.token[node] for node in nodes]
        return torch.tensor(ids, device=self.root.device)

    def add_children(self, node, c, x):
        """Add the children of a node: lists of confidences c and tokens x, the best first."""
        check_probabilities(c)
        for c_j, x_j in zip(c, x):
            if c_j > 0:
                self.add_child(node, c_j, int(x_j))

    def add_child(self, node, c_j, token):
        """Add one child of a node -> the child."""
        child = len(self.token)
        self.token.append(token)
        self.parent.append(node)
        self.depth.append(self.depth[node] + 1)
        self.c.append(c_j)
        # p_j = c_1 c_2 ... c_j
        self.p.append(self.p[node] * c_j)
        return child

    def nodes(self):
        """All nodes excluding the root."""
        return range(1, len(self.token))

    def ranked(self, nodes):
        """The nodes sorted by joint probability, the highest first; in a tie the first drafted.

        A parent precedes its children: it is at least as probable, and was drafted before them.  So
        the root and the first n nodes always form a tree.
        """
        return sorted(nodes, key=lambda j: (-self.p[j], j))

    def best(self, nodes, most):
        """The `most` most probable of the nodes, in the order in which they were drafted."""
        ranked = self.ranked(nodes)
        return sorted(ranked[:most])

    def tree(self, kept):
        """The Tree of the root and the nodes `kept`, which include the parents of all of them.

        Its order is depth-first, the most probable child first: if the most probable path is
        accepted, its KV entries in the target's cache already lie next to each other.
        """
        children = {}
        for node in kept:
            children.setdefault(self.parent[node], []).append(node)
        index = {0: 0}                           # {node: its index in the Tree}
        tokens = [0]                             # a placeholder: the root's token is on the device
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

def read_top_k(probs, k):
    """The k best tokens of each distribution (m, V) -> their probabilities and ids, [m][k] each.

    They reach the host by one device-to-host sync, as one tensor of floats.  float32 represents
    all integers up to 2^24, so no id changes.
    """
    k = min(k, probs.shape[1])
    best = probs.topk(k)                                         # (m, k)
    dtype = torch.promote_types(probs.dtype, torch.float32)
    c = best.values.to(dtype)
    x = best.indices.to(dtype)
    return torch.stack((c, x)).tolist()

def check_probabilities(c):
    """Refuse what is not a list of probabilities, such as logits.  c: the best of one distribution.

    In bfloat16 they may add up to 1.02.
    """
    if not (min(c) >= 0 and sum(c) < 1.05):
        raise ValueError(f"expand gave {c}: it must give probabilities, not logits")

def clamp_depth(expand, width, depth, most=1):
    """Check a builder's settings -> depth, or expand.remaining if that is less."""
    if width < 1:
        raise ValueError(f"width is {width}: a node needs at least one child")
    if depth < 1:
        raise ValueError(f"depth is {depth}: draft at least once")
    if most < 1:
        raise ValueError(f"the tree may have {most} nodes: allow at least one")
    remaining = getattr(expand, "remaining", depth)
    return min(depth, remaining)

def grow_layers(candidates, depth, expandable):
    """Draft layer by layer.  expandable(layer) -> those nodes of the layer that are to be expanded.

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

    cost: s_d / s_t.  leaf: nodes whose joint probability is lower are removed; 0 is Table 3's "w/o
    removing leaf nodes".  Returns a Tree of at most 1 + max_nodes nodes.
    """
    if not 0 <= cost <= 1:
        raise ValueError(f"cost is {cost}: s_d / s_t lies between 0 and 1")
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

    A node is expanded if its own confidence c_j is at least `own`; `pct` compares the product p_j
    instead.  Leaves are removed by their joint probability, as in `pct`.
    """
    if not 0 <= own <= 1:
        raise ValueError(f"own is {own}: a confidence lies between 0 and 1")
    depth = clamp_depth(expand, width, depth, max_nodes)
    candidates = Candidates(expand, root, width)

    def expandable(layer):
        nodes = [j for j in layer if candidates.c[j] >= own]
        return candidates.best(nodes, max_nodes)

    grow_layers(candidates, depth, expandable)
    return without_leaves(candidates, leaf, max_nodes)

# ---------------------------------------------------------------- appendix A: the baselines
def vct(expand, root, width=3, depth=5):
    """The vanilla candidate tree: "fixed width and depth" (appendix A), whatever its size."""
    depth = clamp_depth(expand, width, depth)
    candidates = Candidates(expand, root, width)

    def expandable(layer):
        return list(layer)

    grow_layers(candidates, depth, expandable)
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

# ---------------------------------------------------------------- the demo
def main():
    """s_d / s_t = 0.1, leaf 0.05: an unlikely node is kept as a leaf or removed, likely paths grow.

    The tokens are the digits 1 to 4, so a path is written as a number.
    """
    # table[x] is the drafter's distribution of the token after x; the root is 0.
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
    # 4 (0.02) and 1213 (0.0108) are removed.
    # 3 (0.08), 13 (0.06), 21 (0.06) and 1212 (0.0972) are kept as leaves, though they could go on.
    paths = " ".join(sorted(paths[1:]))
    assert paths == "1 12 121 1212 124 13 2 21 24 3"
    print("kept paths:", paths)

if __name__ == "__main__":
    main()
