"""PCT: the pruned candidate tree, and the trees of its ablations and baselines.

Faster Speculative Decoding via Effective Draft Decoder with Pruned Candidate Tree (ACL 2025,
aclanthology.org/2025.acl-long.486): section 3.2, appendix B, the ablations of Table 3, and the
trees of appendix A; its CAPE is in cape.py.

The idea.  The drafter's confidence is calibrated: the product of the confidences along a path is
the probability p_j that the whole path is accepted.  Drafting below node j costs s_d, and saves at
most p_j s_t on average.  So the tree grows below nodes with p_j of at least s_d / s_t.  Nodes that
will almost surely be rejected are removed at the end.

    paper                     shape      name here
    d_1 ... d_m               tokens     a path of the tree, excluding the root
    c_i                       float      c: the drafter's probability of one token
    p_j = prod_{i<=j} c_i     float      p: joint probability of a node's path; the root's is 1
    s_d, s_t                  seconds    cost = s_d / s_t: a drafter forward over a target forward
    s_d - p_j s_t  (Eq. 5)    seconds    expected loss of drafting below a node
    top-k children, maximum depth, leaf threshold (appendix B): width, depth, leaf

The functions here are builders, build(expand, root) -> Tree, by the contract at the top of
verify.py.  Each depth takes one drafter forward over all nodes that are expanded there, and one
device-to-host sync.

    tree = pct.pct(expand, root, cost=0.05)      # root = torch.tensor([the last token's id])
    out = verify.generate(target, drafter, pct.pct, ids)

Calibrated means: of the tokens that are drafted with confidence 0.7 below an accepted node the
target accepts 70 %.  Differs from the paper, which takes raw confidences: see verify.Rule.probs.

    python pct.py       # the demo: a small tree in Figure 4's setting (s_d / s_t = 0.1, leaf 0.05)
"""
from collections import namedtuple

import torch

# As in verify.py; repeated, so that this file can be copied alone
Tree = namedtuple("Tree", "tokens parents expand_index p_draft", defaults=(None,))

WIDTH = 5               # "the expansion width of each node in the PCT was set to 5" (appendix B)
DEPTH = 10              # "and the maximum depth was set to 10"
LEAF = 0.01             # "leaf nodes whose overall acceptance confidence was less than 0.01"
# s_d / s_t: time a forward of each.  Differs from the paper: 1.1 / 29.8 (7B), 1.4 / 50.1 (13B).
COST = 0.05
TOKEN_THRESHOLD = 0.3   # of "w/o expected time gain", which Table 3 does not state
# Differs from the paper, which limits neither the nodes expanded per layer nor the tree's size.
MAX_NODES = 256

# ---------------------------------------------------------------- the candidate tree while it grows
class Candidates:
    """All nodes drafted so far: lists with one entry per node, the root first.

    Parents come before children, and the children of a node are sorted, the most probable first.

    token: its id; token[0] is None, as the root's stays on the device.
    depth: the root's is 0.  parent: the index of the node's parent in these lists.
    c: the node's own confidence; p: its joint probability.
    expand_index: the node's number among those given to expand, -1 if it was not given.
    width: the number of children that a node gets.
    num_forwards, num_expanded: drafter forwards so far, and the nodes given to them.
    """

    def __init__(self, expand, root, width):
        self.expand, self.root, self.width = expand, root, width
        self.token, self.parent, self.depth = [None], [-1], [0]
        self.c, self.p = [1.0], [1.0]
        self.expand_index = [-1]
        self.num_forwards = self.num_expanded = 0

    def add(self, parent, token, c):
        """Add a child of `parent`, with its own confidence c -> the new node."""
        self.token.append(token)
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1)
        self.c.append(c)
        # p_j = c_1 c_2 ... c_j
        self.p.append(self.p[parent] * c)
        self.expand_index.append(-1)
        return len(self.token) - 1

    def grow(self, nodes):
        """Draft once: add the `width` best children of each of `nodes`, a list -> the new nodes.

        "the draft model predicts the top-k child nodes based on the expandable nodes from the
        previous layer to form the current layer" (section 3.2).
        """
        first_child = len(self.token)
        first_index = self.num_expanded              # expand numbers these nodes from here on
        parents = [self.expand_index_above(node) for node in nodes]
        ids = [self.token[node] for node in nodes]
        tokens = self.root if nodes == [0] else torch.tensor(ids, device=self.root.device)
        c, x = self.forward(tokens, parents)
        for i, node in enumerate(nodes):
            self.expand_index[node] = first_index + i
            self.add_children(node, c[i], x[i])
        return range(first_child, len(self.token))

    def forward(self, tokens, parents):
        """Run the drafter once over m nodes: tokens (m,), and parents, m numbers in expand.

        Returns the confidences and the ids of their best children, the best first: lists
        [m][width].  Both are copied to the host by one sync.
        """
        probs = self.expand(tokens, parents)                         # (m, V)
        self.num_forwards += 1
        self.num_expanded += len(parents)
        best = probs.topk(min(self.width, probs.shape[1]))
        # float64 represents all ids and all probabilities, so that one tensor holds both.
        return torch.stack((best.values.double(), best.indices.double())).tolist()

    def expand_index_above(self, node):
        """The expand index of a node's parent, -1 for the root."""
        return -1 if node == 0 else self.expand_index[self.parent[node]]

    def add_children(self, node, c, x):
        """Add a node's children, tokens x of confidences c above 0 (lists) -> {token: new node}.

        Returned for beyond/graft.py.
        """
        children = {}
        for c_j, token in zip(c, map(int, x)):
            if c_j > 0:
                # In bfloat16 a probability may be 1.004.
                children[token] = self.add(node, token, min(c_j, 1.0))
        return children

    def ranked(self, nodes):
        """Sort nodes by joint probability, the highest first; in a tie the first drafted.

        A parent precedes its children: it is at least as probable, and was drafted before them.  So
        the root and the first n nodes always form a tree.
        """
        return sorted(nodes, key=lambda j: (-self.p[j], j))

    def best(self, nodes, limit):
        """Take the `limit` most probable of the nodes, in the order in which they were drafted."""
        return sorted(self.ranked(nodes)[:limit])

    def tree(self, kept):
        """Make the Tree of the root and of `kept`, nodes with all their ancestors, ascending.

        Its order is depth-first, a node's most probable child first.  So if the target chooses
        that child each time, the KV entries of the accepted path are already in place.
        """
        children = {}
        for node in kept:
            children.setdefault(self.parent[node], []).append(node)  # the most probable first
        index = {}                               # {node: its index in the Tree}
        order = []                               # the nodes in the order of the Tree
        stack = [0]
        while stack:
            node = stack.pop()
            index[node] = len(order)
            order.append(node)
            stack += reversed(children.get(node, []))                # the most probable on top
        # One tensor: one host-to-device copy.  Entry 0 of the tokens is a placeholder.
        columns = torch.tensor([
            [0, *(self.token[node] for node in order[1:])],
            [-1, *(index[self.parent[node]] for node in order[1:])],
            [self.expand_index[node] for node in order]], device=self.root.device)      # (3, n)
        tokens, parents, expand_index = columns
        return Tree(torch.cat((self.root, tokens[1:])), parents, expand_index)

def draft_layers(expand, root, width, depth, criterion, threshold, limit):
    """Draft layer by layer, at most `depth` or expand.remaining of them -> Candidates.

    A layer expands the `limit` nodes of highest p among those whose own confidence (criterion "c")
    or joint probability ("p") is at least `threshold`.
    """
    candidates = Candidates(expand, root, width)
    confidence = candidates.c if criterion == "c" else candidates.p    # lists that grow
    layer = [0]
    # "The construction process terminates if there are no expandable leaf nodes or the tree depth
    # reaches the maximum depth" (section 3.2).
    for _ in range(min(depth, getattr(expand, "remaining", depth))):
        expandable = [j for j in layer if confidence[j] >= threshold]
        if not expandable:
            break
        layer = candidates.grow(candidates.best(expandable, limit))
    return candidates

def prune_leaves(candidates, leaf, limit):
    """Remove leaves whose joint probability is below `leaf`, keep the `limit` best -> Tree."""
    # "we remove leaf nodes whose overall acceptance confidence is below a given threshold" (3.2).
    # This exposes others.  As p_j never increases along a path, the nodes with p_j >= leaf remain.
    drafted = range(1, len(candidates.token))
    kept = [j for j in drafted if candidates.p[j] >= leaf]
    return candidates.tree(candidates.best(kept, limit))

# ---------------------------------------------------------------- section 3.2 and its ablations
def pct(expand, root, cost=COST, width=WIDTH, depth=DEPTH, leaf=LEAF, max_nodes=MAX_NODES):
    """The pruned candidate tree (section 3.2, "Implementation Details").

    A node whose joint probability is below `cost`, s_d / s_t, is not expanded; one below `leaf` is
    removed (0: Table 3's "w/o remove leaf nodes").  The Tree has at most 1 + max_nodes nodes.
    """
    # "marks the nodes with an overall acceptance confidence less than s_d/s_t to prevent them from
    # being used in the next layer's node generation".  Eq. 5: s_d - p_j s_t <= 0
    # Differs from the paper: below Eq. 5 p_j decides whether d_j itself is drafted, but it is known
    # only afterwards.  So it decides whether to draft below d_j, as in the quotation.
    candidates = draft_layers(expand, root, width, depth, "p", cost, max_nodes)
    return prune_leaves(candidates, leaf, max_nodes)

def token_confidence(expand, root, token_threshold=TOKEN_THRESHOLD, width=WIDTH, depth=DEPTH,
                     leaf=LEAF, max_nodes=MAX_NODES):
    """Table 3's "w/o expected time gain": "confidence score is directly used to prune".

    A node is expanded if its own confidence c_j is at least `token_threshold`.
    """
    candidates = draft_layers(expand, root, width, depth, "c", token_threshold, max_nodes)
    return prune_leaves(candidates, leaf, max_nodes)

# ---------------------------------------------------------------- appendix A: the baselines
def vct(expand, root, width=3, depth=5):
    """The vanilla candidate tree: "fixed width and depth" (appendix A), 363 nodes by default."""
    everything = width ** depth                                      # no layer has more nodes
    candidates = draft_layers(expand, root, width, depth, "p", 0, everything)
    return candidates.tree(range(1, len(candidates.token)))

def eagle2(expand, root, total=50, depth=6, expanded=10):
    """EAGLE-2's tree (appendix A): a layer's `expanded` best nodes get `expanded` children each.

    "we set the total number of draft tokens to 50, with a draft tree depth of 6, and select 10
    nodes during the expansion phase."  Ranking by p_j and ten children each: EAGLE-2's paper.
    """
    candidates = draft_layers(expand, root, expanded, depth, "p", 0, expanded)
    # "re-ranks the nodes of the candidate tree by confidence scores and retains the top-k nodes"
    drafted = range(1, len(candidates.token))
    return candidates.tree(candidates.best(drafted, total))

# ---------------------------------------------------------------- the demo
def main():
    """s_d / s_t = 0.1, leaf 0.05: an unlikely node is kept as a leaf or removed, likely paths grow.

    The tokens are the digits 1 to 3, so a path is written as a number.
    """
    # table[x]: the drafter's probabilities of the token after x, as far as they matter; root 0.
    table = torch.tensor([
        [0.0, 0.6, 0.37, 0.03],
        [0.0, 0.0, 0.9, 0.1],
        [0.0, 0.2, 0.0, 0.0],
        [0.0, 1.0, 0.0, 0.0]])

    def expand(tokens, parents):
        return table[tokens]

    tree = pct(expand, torch.tensor([0]), cost=0.1, leaf=0.05)
    paths = [""]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist()):
        paths.append(f"{paths[parent]}{token}")
    # 3 (0.03) and 1213 (0.011) are removed.  13 (0.06), 21 (0.07) and 1212 (0.097) are leaves,
    # though they could go on.
    paths = " ".join(sorted(paths[1:]))
    assert paths == "1 12 121 1212 13 2 21"
    print("kept paths:", paths)

# Differences from the paper, all of them:
#  1. Eq. 5 is called a gain, but it is an expected loss: smaller is better.  It charges each node a
#     whole forward, which the nodes of a layer share.  Here p_j decides whether to draft below d_j.
#  2. The number of nodes is limited, to 256 per layer and tree.
#  3. Confidences are calibrated, and s_d / s_t is 0.05 unless it is given.
#  4. This file follows the paper's text.  The official code drops the best path that reaches the
#     maximum depth, keeps only the best child of each path where all nodes of a layer fall below
#     the threshold, and never removes leaves.
# Misprint: section 4.2 says that the "VDM" (vanilla draft model) has many nodes; the vanilla
#     candidate tree (VCT) is meant.

if __name__ == "__main__":
    main()
