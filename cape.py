"""CAPE: confidence-aware proposal expansion, and what it is compared with.

GLIDE with a CAPE (arXiv 2402.02082), section 4.2; baselines of sections 5.3, 5.4 and Table 3.

The idea.  The drafter's confidence in a token predicts whether the target will accept it.  Where
the confidence is low, the target is offered several of the next best tokens as well.  Nothing is
drafted after these extras, so they need no further forward of the drafter.

    paper                   shape         name here
    x_t                     (1,)          root: the last token, which the target has not cached yet
    gamma                   int           gamma: number of drafted positions
    x_{t+1..t+gamma}        (gamma,)      chosen: the standard proposal, a chain
    p_D(.|x_{<t+i})         (gamma, V)    probs: the drafter's distribution at each position
    p_i = max p_D           (gamma,)      p: the confidence at each position
    S(p), K_i               (gamma,)      size_of(p): 7, 5, 3, 1 for p in bins up to .3, .6, .8, 1
    X_i                     (gamma, K)    extras: the K_i best tokens except x_{t+i}; K = max(sizes)
    beta                    int           nodes excluding the root: at most max_nodes = 32 (5.3)

A builder is a function of `expand` and of root (1,), a token id.  It returns a Tree of tokens (n,)
and parents (n,), which are indices of the tree's own nodes.  Node 0 is the root, with parent -1,
and parents come before their children.

expand(tokens (m,), parents [m ints]) -> probabilities (m, V) runs the drafter once over m new nodes
and returns the distribution of the token that follows each.  It numbers nodes from 0 in the order
in which it receives them, and `parents` are these numbers: the root comes first, by
expand(root, [-1]), so its children have parent 0.  A row of zeros means that the drafter has no
prediction.  No builder adds a node of probability zero.  If expand has an attribute `remaining`,
the tree is at most that deep.

To use this file in a project of yours, write `expand` for your drafter and verify the tree by one
forward of your target.  docs/any_project.py has both, in plain code for any causal LMs.

    tree = cape(expand, root)            # root = torch.tensor([the last token's id])
    # Forward the target once over tree.tokens.  A node's position id is the root's plus the node's
    # depth; its mask shows the text before the root, the node's ancestors and the node itself.
    # Then walk down from node 0 while the target's choice after a node is one of its children.

Differences from the paper:
 1. The printed mask leaves out the root x_t; here the root is node 0.  The paper defines pos(i),
    the position of the i-th proposed token, for extras only; for the chain's tokens we take
    pos(i) = i.  Where the paper's text says "token x_j", it means x_{t+j}.
 2. With gamma = 5 the widest proposal has 5 x (1 + 7) = 40 nodes, but the stated maximum is 32, and
    the paper does not say what is cut.  (The official code drafts four positions: 4 x 8 = 32.)
    Here the whole chain is kept, and of the extras of all positions those with the highest joint
    probability, until there are 32 nodes.  The Tree lists them in that order.
 3. The paper does not state gamma for CAPE's own experiments; 5 is section 5.1's.
 4. Beam search returns every sequence that was in a beam at any length, not only the last ones,
    because tree verification can use them all.

    python cape.py          # the demo: the example of Figure 3
"""
from collections import namedtuple
from functools import lru_cache, partial

import torch
from torch.nn.functional import pad

Tree = namedtuple("Tree", "tokens parents p_draft", defaults=(None,))

GAMMA = 5                        # drafted positions (section 5.1)
SIZES = (7, 5, 3, 1)             # S(p) of section 4.2 ...
EDGES = (0.3, 0.6, 0.8)          # ... on bins closed on the right
MAX_NODES = 32                   # "the maximum number of tokens for verification" (section 5.3)
SIZE = 4                         # extras at each position of the fixed-size control (section 5.4)
WIDTH = 4                        # beam size (section 5.3)

# ------------------------------------------------------------------ the standard proposal
def best(probs):
    """The most probable token of each distribution (m, V) -> (m,)."""
    return probs.argmax(-1)

def draw(probs, generator=None):
    """Sample a token from each distribution (m, V) -> (m,), by inverting its cumulative sums.

    For a row of zeros the result is a token of probability zero.  (torch.multinomial would raise
    there.  It takes a device-to-host sync to find out, and a random number for each of V tokens.)
    """
    sums = probs.cumsum(-1, dtype=torch.float64)                  # (m, V)
    uniform = torch.rand(len(probs), 1, dtype=torch.float64, device=probs.device,
                         generator=generator)
    uniform = 1 - uniform                         # (0, 1]: at 0 it would find x = 0 of any p
    return torch.searchsorted(sums, uniform * sums[:, -1:]).flatten()

def clamped(expand, gamma):
    """gamma, or expand.remaining if that is less."""
    if gamma < 1:
        raise ValueError(f"gamma is {gamma}: draft at least one token")
    remaining = getattr(expand, "remaining", gamma)
    return min(gamma, remaining)

def draft(expand, root, gamma, pick):
    """Draft a chain, token by token, without a device-to-host sync.

    pick(probs (1, V)) -> token (1,).  Returns chosen (gamma,), their probabilities p (gamma,), and
    the distributions probs (gamma, V).  If a token has probability zero, the chain ends before it,
    and the entries from that token on must be ignored: drafted_length counts the valid ones.
    """
    tokens = [root]
    probs = []
    for i in range(gamma):
        # x_{t+i+1} is picked from p_D(.|x_{<t+i+1}), the distribution after node i
        parent = i - 1
        after = expand(tokens[i], [parent])                       # (1, V)
        probs.append(after)
        tokens.append(pick(after))                                # (1,)
    chosen = torch.cat(tokens[1:])
    probs = torch.cat(probs)
    p = probs.gather(1, chosen[:, None])                          # (gamma, 1)
    return chosen, p.flatten(), probs

def drafted_length(p):
    """The number of tokens, a tensor (), before the first of probability zero.  p (gamma,)."""
    least_so_far = p.cummin(0).values
    return (least_so_far > 0).sum()

def to_host(p, *counts):
    """Copy counts, tensors () on the device, to the host -> list of ints.

    The same device-to-host sync checks that p (gamma,) are probabilities, else ValueError.
    """
    # torch.stack converts the counts to p's dtype, and bfloat16 has not all integers above 256.
    p = p.float()
    numbers = torch.stack((*counts, p.min(), p.max()))
    *counts, lowest, highest = numbers.tolist()                   # the device-to-host sync
    # A probability in bfloat16 may be a little above 1.
    if not (lowest >= 0 and highest < 1.01):
        raise ValueError(f"expand gave values from {lowest} to {highest}: "
                         "it must give probabilities, not logits")
    return [int(count) for count in counts]

def root_only(root):
    """The tree of the root alone."""
    return Tree(root, torch.full_like(root, -1))

def chain_parents(length, device):
    """The parents (1 + length,) of the root and a chain below it: -1, 0, ..., length - 1."""
    return torch.arange(-1, length, device=device)

def proposed(expand, root, gamma, pick):
    """A chain of at most gamma tokens, each by pick(probs) -> Tree.

    p_draft (length, V): row i is the distribution from which node i + 1 was picked.
    """
    gamma = clamped(expand, gamma)
    if gamma == 0:
        return root_only(root)
    chosen, p, probs = draft(expand, root, gamma, pick)
    [length] = to_host(p, drafted_length(p))
    tokens = torch.cat((root, chosen[:length]))
    parents = chain_parents(length, root.device)
    return Tree(tokens, parents, probs[:length])

def chain(expand, root, gamma=GAMMA):
    """The standard proposal (section 4.2): gamma tokens, each the most probable -> Tree."""
    tree = proposed(expand, root, gamma, best)
    return Tree(tree.tokens, tree.parents)

def drawn(expand, root, gamma=GAMMA, generator=None):
    """A chain sampled from the drafter, for speculative sampling -> Tree with p_draft.

    generator: a torch.Generator on the device of the probabilities; by default expand.generator, if
    there is one.  It must not be the generator that decides acceptance: then the output would not
    follow the target's distribution.
    """
    if generator is None:
        generator = getattr(expand, "generator", None)
    pick = partial(draw, generator=generator)
    return proposed(expand, root, gamma, pick)

# ------------------------------------------------------------------ the expanded proposal
@lru_cache(maxsize=64)
def constant(numbers, dtype, device):
    """A tuple as a tensor.  It is cached, so that it is not copied to the device in every round."""
    return torch.tensor(numbers, dtype=dtype, device=device)

def size_of(p, sizes=SIZES, edges=EDGES):
    """S(p) of section 4.2: the number of extras (gamma,) for confidences p (gamma,).

    Bin b is (edges[b - 1], edges[b]]; p and the edges are compared in p's own precision.
    """
    sizes = constant(tuple(sizes), torch.long, p.device)
    edges = constant(tuple(edges), p.dtype, p.device)
    b = torch.bucketize(p, edges)
    return sizes[b]

def expansion_sets(probs, chosen, p, sizes=SIZES, edges=EDGES):
    """The sets X_i of section 4.2: the S(p_i) best tokens at each position except the chosen one.

    probs (gamma, V), chosen (gamma,), p (gamma,): p_i = probs[i, chosen_i].
    Returns extras (gamma, K), the best first, and their probabilities (gamma, K).  K is max(sizes),
    or V if that is less.  An extra whose probability is zero is not in the set.
    """
    # "K_i tokens (excluding x_{t+i}) that have the highest probabilities according to
    # p_D(.|x_{<t+i})".  x_{t+i} is set to zero before sorting, because in a tie it need not come
    # first.
    others = probs.scatter(1, chosen[:, None], 0.0)
    _, V = probs.shape
    K = min(max(sizes), V)
    p_extras, extras = others.topk(K)                             # (gamma, K)
    # K_i = S(p_i)
    K_i = size_of(p, sizes, edges)
    rank = torch.arange(K, device=probs.device)
    outside = rank >= K_i[:, None]                                # (gamma, K)
    return extras, p_extras.masked_fill(outside, 0.0)

def by_joint_probability(p, p_extras, most):
    """The `most` extras of highest joint probability (difference 2).

    p (gamma,): the chain's.  p_extras (gamma, K).  Returns their joint probabilities (most,), the
    highest first, and their indices (most,) in the flattened extras.  A joint probability of zero
    means that there is no such extra.
    """
    # The ancestors of x'_{t+i,j} are x_{t+1} ... x_{t+i-1}, so its joint probability is
    # p_1 ... p_{i-1} p_D(x'_{t+i,j}).
    before = pad(p[:-1], (1, 0), value=1.0)                       # 1, p_1, ..., p_{gamma-1}
    p_ancestors = before.cumprod(0)                               # (gamma,)
    joint = p_ancestors[:, None] * p_extras                       # (gamma, K)
    return joint.flatten().topk(most)

def check_cape(gamma, sizes, edges, max_nodes):
    """Refuse settings of `cape` that have no meaning."""
    if len(sizes) != len(edges) + 1:
        raise ValueError(f"{len(edges)} edges need {len(edges) + 1} sizes: {sizes}")
    if list(edges) != sorted(edges):
        raise ValueError(f"edges must ascend: {edges}")
    if min(sizes) < 0:
        raise ValueError(f"sizes are numbers of tokens, so none is negative: {sizes}")
    if max_nodes < gamma:
        raise ValueError(f"max_nodes {max_nodes} cannot hold the chain of {gamma}")

def cape(expand, root,
         gamma=GAMMA, sizes=SIZES, edges=EDGES, max_nodes=MAX_NODES):
    """Section 4.2: the greedy chain, and beside each of its tokens the S(p_i) next best ones.

    sizes, edges: S(p) is sizes[b] in bin b = (edges[b - 1], edges[b]].  max_nodes: excluding the
    root.  Returns a Tree: the root, the chain (the same one as `chain` drafts), the extras.
    """
    check_cape(gamma, sizes, edges, max_nodes)
    gamma = clamped(expand, gamma)
    if gamma == 0:
        return root_only(root)
    # the proposal x_{t+1} ... x_{t+gamma}
    chosen, p, probs = draft(expand, root, gamma, best)
    # its expansion sets X_1 ... X_gamma, (gamma, K)
    extras, p_extras = expansion_sets(probs, chosen, p, sizes, edges)
    most = min(extras.numel(), max_nodes)
    joint, index = by_joint_probability(p, p_extras, most)        # (most,)
    length, count = to_host(p, drafted_length(p), (joint > 0).sum())
    count = min(count, max_nodes - length)
    index = index[:count]

    # linearised: the root, the chain, the extras
    tokens = torch.cat((root, chosen[:length], extras.take(index)))
    # Which x_{t+j} x_{t+i} may see, where A are the attention scores:
    #     mask_CAPE(A)_ij = A_ij    if j <= gamma and pos(i) > j     the chain's tokens before it
    #                       A_ij    if i = j                         itself
    #                       -inf    otherwise                        extras, and later tokens
    # In a tree a node sees its ancestors and itself, so parents express the same mask: the parent
    # of x_{t+i} is the chain's token at position pos(i) - 1, or the root, node 0, if pos(i) is 1.
    # No extra has children.
    parents_of_chain = chain_parents(length, root.device)
    # `index` counts in the flattened extras (gamma, K), so index // K is the row.  Row i, counted
    # from 0, is the set X_{i+1}, and the parent of its tokens is node i.
    K = max(1, extras.shape[1])                                   # if all sizes are 0, K is 0
    parents_of_extras = index // K
    parents = torch.cat((parents_of_chain, parents_of_extras))
    return Tree(tokens, parents)

# ------------------------------------------------------------------ what it is compared with
def fixed(expand, root, gamma=GAMMA, size=SIZE, max_nodes=MAX_NODES):
    """Section 5.4's control: `size` extras everywhere (4 is the mean size of CAPE's sets there)."""
    one_size = (size,)
    no_edges = ()
    return cape(expand, root, gamma, one_size, no_edges, max_nodes)

def beam(expand, root, gamma=GAMMA, width=WIDTH):
    """Beam search (sections 5.3, 5.4, Table 3): the `width` most probable sequences of each length.

    A node stands for the sequence that ends with it.  Nodes are given to expand in the order of the
    tree, so a node has one number in both.  One device-to-host sync per depth: the host must know
    which sequences are continued.
    """
    if width < 1:
        raise ValueError(f"width is {width}: keep at least one sequence")
    tokens = [root]
    parents = [-1]
    frontier = [0]                                                # the nodes of the current length
    score = torch.zeros(1, 1, device=root.device)                 # log p of their sequences
    for _ in range(clamped(expand, gamma)):
        frontier_parents = [parents[node] for node in frontier]
        probs = expand(tokens[-1], frontier_parents)              # (m, V)
        each = min(width, probs.shape[1])                         # continuations of one sequence
        p, x = probs.topk(each)                                   # (m, each)
        # log p(sequence, x) = log p(sequence) + log p_D(x | sequence)
        score = score + p.log()                                   # (m, each)
        most = min(width, score.numel())
        score, index = score.flatten().topk(most)                 # (most,), the best first
        # Which of the m sequences each of the best continues.  Those of probability zero come last,
        # so the first `count` are kept.
        continued = index // each
        count = score.isfinite().sum()
        numbers = torch.cat((continued, count[None])).tolist()    # device-to-host sync
        count = numbers[-1]
        if count == 0:
            break
        tokens.append(x.take(index[:count]))
        score = score[:count, None]                               # (count, 1)
        for sequence in numbers[:count]:
            parents.append(frontier[sequence])
        frontier = list(range(len(parents) - count, len(parents)))
    parents = torch.tensor(parents, device=root.device)
    return Tree(torch.cat(tokens), parents)

# ------------------------------------------------------------------ the demo
def main():
    """Figure 3: "Attention is all the", and one extra beside each token ("you" beside "the")."""
    drafter = {
        "<root>": {"Attention": 0.85, "All": 0.15},
        "Attention": {"is": 0.9, "that": 0.1},
        "is": {"all": 0.95, "that": 0.05},
        "all": {"the": 0.82, "you": 0.18},
    }
    words = ["<root>", "Attention", "is", "all", "the", "All", "that", "you"]
    table = torch.zeros(8, 8)
    for word, after in drafter.items():
        for next_word, p in after.items():
            table[words.index(word), words.index(next_word)] = p

    def expand(tokens, parents):
        return table[tokens]

    root = torch.tensor([0])
    tree = cape(expand, root, gamma=4)
    tokens = [words[token] for token in tree.tokens]
    parents = tree.parents.tolist()
    # every confidence is above 0.8, so each K_i is 1
    assert len(tokens) == 1 + 4 + 4
    assert tokens[1:5] == ["Attention", "is", "all", "the"]
    assert parents[:5] == [-1, 0, 1, 2, 3]
    X = {i: [] for i in range(4)}
    for token, parent in zip(tokens[5:], parents[5:]):
        X[parent].append(token)
    assert X == {0: ["All"], 1: ["that"], 2: ["that"], 3: ["you"]}
    for i in range(4):
        print(f"x_t+{i + 1}: {tokens[i + 1]:10s} X_{i + 1}:", *X[i])

if __name__ == "__main__":
    main()
