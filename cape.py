"""CAPE: confidence-aware proposal expansion, and what it is compared with.

GLIDE with a CAPE (arXiv 2402.02082), section 4.2; baselines of sections 5.3, 5.4 and Table 3.

The idea.  The drafter's confidence predicts whether its first choice will be accepted.  Where it is
low, offer the target more of the next best tokens.  They are not continued, so they cost no forward
of the drafter.

    paper                   shape         name here
    x_t                     (1,)          root: the target's last token, not in its cache yet
    gamma                   int           gamma: drafted positions
    x_{t+1..t+gamma}        (gamma,)      chosen: the standard proposal, a chain
    p_D(.|x_{<t+i})         (gamma, V)    probs: the drafter's distribution at each position
    p_i = max p_D           (gamma,)      p: confidence of each position
    S(p), K_i               (gamma,)      size_of(p): 7, 5, 3, 1 for p in bins up to .3, .6, .8, 1
    X_i                     (gamma, K)    extras: the K_i best tokens but x_{t+i}; K = max(sizes)
    beta                    int           at most max_nodes, 32 (section 5.3): nodes but the root

A builder is a function of expand and of root (1,), a token id.  It returns a Tree: tokens (n,) and
parents (n,).  Node 0 is the root, with parent -1; parents come before their children.

expand(tokens (m,), parents [m ints]) -> probabilities (m, V) is one forward of the drafter over m
new nodes.  It has its own numbering: nodes count from 0 in the order in which expand gets them.
The root comes first, as expand(root, [-1]); its children then have parent 0.  A row of zeros means
that the drafter has no prediction.  No builder adds a node of probability zero.

One device-to-host sync builds a tree, beam search takes one a depth.  Where expand has `remaining`,
the tree is no deeper.

To use this file alone: docs/any_project.py, an expand and a verification for any causal LMs.

Differences from the paper:
 1. pos(i) = i for i <= gamma and "x_{t+j}" for "token x_j" are unstated in the printed mask; the
    root x_t is left out of it.  Here the root is node 0.
 2. With gamma = 5 the widest proposal has 5 x (1 + 7) = 40 nodes, above the stated maximum of 32,
    and how it is cut is not said (the official code drafts four: 4 x 8 = 32).  Here the chain
    stays, and extras of lowest joint probability go.  Extras are in order of probability, not of
    sets.
 3. gamma for CAPE's own experiments is not stated; 5 is section 5.1's.
 4. Beam search keeps every hypothesis that was in a beam as a node: tree verification can use all.

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
    """A token sampled from each distribution (m, V) -> (m,), by an exponential race.

    With E_x ~ Exp(1), the x of largest p(x) / E_x is distributed as p.  A row of zeros gives a
    token of probability zero, where torch.multinomial would fail, after a device-to-host sync.
    """
    race = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / race).argmax(-1)

def clamped(expand, gamma):
    """gamma, clamped to the depth that remains: expand.remaining tokens, if it says so."""
    assert gamma >= 1, f"gamma is {gamma}: draft at least one token"
    remaining = getattr(expand, "remaining", gamma)
    return min(gamma, remaining)

def draft(expand, root, gamma, pick):
    """Draft a chain, token by token, without a device-to-host sync.

    pick(probs (1, V)) -> token (1,).  Returns chosen (gamma,), the probability p (gamma,) of each,
    and the distributions probs (gamma, V).  After a token of probability zero all are meaningless.
    """
    tokens = [root]
    probs = []
    for i in range(gamma):
        # x_{t+i+1} is picked from p_D(.|x_{<t+i+1}), what follows node i, whose parent is i - 1
        after = expand(tokens[i], [i - 1])                        # (1, V)
        probs.append(after)
        tokens.append(pick(after))                                # (1,)
    chosen = torch.cat(tokens[1:])
    probs = torch.cat(probs)
    p = probs.gather(1, chosen[:, None])                          # (gamma, 1)
    return chosen, p.flatten(), probs

def drafted(p):
    """The length of a chain, a tensor (): it ends before the first token of probability zero."""
    least = p.cummin(0).values                                    # of a token and all before it
    return (least > 0).sum()

def to_host(p, *counts):
    """Counts (), on the device -> ints, by one device-to-host sync, which checks p (gamma,) too."""
    p = p.float()                                                 # bfloat16: no integers above 256
    numbers = torch.stack((*counts, p.min(), p.max()))
    *counts, lowest, highest = numbers.tolist()                   # the device-to-host sync
    assert lowest >= 0, f"expand gave {lowest}: it must give probabilities, not logits"
    assert highest < 1.01, f"expand gave {highest}: it must give probabilities, not logits"
    return [int(count) for count in counts]

def root_only(expand, root):
    """The tree of the root alone."""
    return Tree(root, torch.full_like(root, -1))

def chain_parents(n, device):
    """Parents (1 + n,) of the root and a chain of n tokens: each node's is the one before it."""
    return torch.arange(-1, n, device=device)

def proposed(expand, root, gamma, pick):
    """A chain of at most gamma tokens -> Tree.

    Its p_draft (n - 1, V): node i + 1 was picked from distribution i.
    """
    gamma = clamped(expand, gamma)
    if gamma == 0:
        return root_only(expand, root)
    chosen, p, probs = draft(expand, root, gamma, pick)
    [n] = to_host(p, drafted(p))
    tokens = torch.cat((root, chosen[:n]))
    parents = chain_parents(n, root.device)
    return Tree(tokens, parents, probs[:n])

def chain(expand, root, gamma=GAMMA):
    """The standard proposal (section 4.2): gamma tokens, each the most probable -> Tree."""
    tree = proposed(expand, root, gamma, best)
    return Tree(tree.tokens, tree.parents)

def drawn(expand, root, gamma=GAMMA, generator=None):
    """A chain that is sampled from the drafter, for speculative sampling -> Tree with p_draft.

    generator: on the device of the probabilities; by default expand.generator, if there is one.  It
    must not be the one that accepts: then the output would not follow the target's distribution.
    """
    if generator is None:
        generator = getattr(expand, "generator", None)
    pick = partial(draw, generator=generator)
    return proposed(expand, root, gamma, pick)

# ------------------------------------------------------------------ the expanded proposal
@lru_cache(maxsize=64)
def constant(numbers, dtype, device):
    """A tuple as a tensor, made once, so that it is not copied to the device each round."""
    return torch.tensor(numbers, dtype=dtype, device=device)

def size_of(p, sizes=SIZES, edges=EDGES):
    """S(p) of section 4.2: the number of extras, long, for confidences p (gamma,).

    Bin b is (edges[b - 1], edges[b]]; p and the edges are compared in p's own precision.
    """
    sizes = constant(tuple(sizes), torch.long, p.device)
    edges = constant(tuple(edges), p.dtype, p.device)
    b = torch.bucketize(p, edges)
    return sizes[b]

def expansion_sets(probs, chosen, p, sizes=SIZES, edges=EDGES):
    """The sets X_i of section 4.2: beside each chosen token, the S(p_i) next best ones.

    probs (gamma, V), chosen (gamma,), p (gamma,): p_i = probs[i, chosen_i].
    Returns extras (gamma, K) and their probabilities (gamma, K), the best first.  K is max(sizes),
    or V if that is less.  A probability of zero means that the token is not in the set.
    """
    # "K_i tokens (excluding x_{t+i}) that have the highest probabilities according to
    # p_D(.|x_{<t+i})".  x_{t+i} is excluded before sorting: of tied tokens it need not come first.
    others = probs.scatter(1, chosen[:, None], 0.0)
    _, V = probs.shape
    K = min(max(sizes), V)
    p_extras, extras = others.topk(K)                             # (gamma, K)
    # K_i = S(p_i)
    K_i = size_of(p, sizes, edges)
    rank = torch.arange(K, device=probs.device)
    outside = rank >= K_i[:, None]                                # (gamma, K)
    return extras, p_extras.masked_fill(outside, 0.0)

def cap(p, p_extras, most):
    """The `most` extras of highest joint probability (difference 2).

    p (gamma,) of the chain, p_extras (gamma, K).  Returns joint (most,), highest first, and index
    (most,) into the flattened extras.  Where joint is zero there is no extra.
    """
    # x'_{t+i,j} counts only after x_{t+1} ... x_{t+i-1}: p_1 ... p_{i-1} p_D(x'_{t+i,j})
    before = pad(p[:-1], (1, 0), value=1.0)                       # 1, p_1, ..., p_{gamma-1}
    ancestors = before.cumprod(0)                                 # (gamma,)
    joint = ancestors[:, None] * p_extras                         # (gamma, K)
    return joint.flatten().topk(most)

def cape(expand, root,
         gamma=GAMMA, sizes=SIZES, edges=EDGES, max_nodes=MAX_NODES):
    """Section 4.2: the greedy chain, and beside each of its tokens the S(p_i) next best ones.

    sizes, edges: S(p) is sizes[b] in bin b = (edges[b - 1], edges[b]].  max_nodes: but the root.
    Returns a Tree of root, chain, extras; the chain is the one that `chain` drafts.
    """
    assert len(sizes) == len(edges) + 1, f"{len(edges)} edges need {len(edges) + 1} sizes: {sizes}"
    assert list(edges) == sorted(edges), f"edges must ascend: {edges}"
    assert min(sizes) >= 0, f"a set cannot have fewer than no tokens: {sizes}"
    assert max_nodes >= gamma, f"max_nodes {max_nodes} cannot hold the chain of {gamma}"
    gamma = clamped(expand, gamma)
    if gamma == 0:
        return root_only(expand, root)
    # the proposal x_{t+1} ... x_{t+gamma}
    chosen, p, probs = draft(expand, root, gamma, best)
    # its expansion sets X_1 ... X_gamma, (gamma, K)
    extras, p_extras = expansion_sets(probs, chosen, p, sizes, edges)
    most = min(extras.numel(), max_nodes - gamma)
    joint, index = cap(p, p_extras, most)                         # (most,)
    n, m = to_host(p, drafted(p), (joint > 0).sum())
    index = index[:m]

    # linearised: the root, the chain, the extras
    tokens = torch.cat((root, chosen[:n], extras.take(index)))
    # What x_{t+i} may see of the x_{t+j}:
    #     mask_CAPE(A)_ij = A_ij    if j <= gamma and pos(i) > j     the chain's tokens before it
    #                       A_ij    if i = j                         itself
    #                       -inf    otherwise                        extras, and later tokens
    # In a tree a node sees its ancestors and itself.  So the parent of x_{t+i} is the chain's token
    # at position pos(i) - 1; for pos(i) = 1 that is the root, node 0.  No extra has children.
    chain_part = chain_parents(n, root.device)
    # Row r of the extras, counted from 0, is X_{r+1}: its parent is node r.
    K = max(1, extras.shape[1])
    row = index // K
    return Tree(tokens, torch.cat((chain_part, row)))

# ------------------------------------------------------------------ what it is compared with
def fixed(expand, root, gamma=GAMMA, size=SIZE, max_nodes=MAX_NODES):
    """Section 5.4's control: `size` extras everywhere (4 is the mean size of CAPE's sets there)."""
    one_size = (size,)
    no_edges = ()
    return cape(expand, root, gamma, one_size, no_edges, max_nodes)

def beam(expand, root, gamma=GAMMA, width=WIDTH):
    """Beam search (sections 5.3, 5.4, Table 3): the `width` most probable sequences of each length.

    Each is a node, in the order in which expand gets them, so that both numberings are the same.
    One device-to-host sync a depth: which sequences are continued.
    """
    assert width >= 1, f"width is {width}: keep at least one sequence"
    tokens = [root]
    parents = [-1]
    frontier = [0]                                                # the nodes of the latest length
    score = torch.zeros(1, 1, device=root.device)                 # log p of the sequences
    for _ in range(clamped(expand, gamma)):
        frontier_parents = [parents[node] for node in frontier]
        probs = expand(tokens[-1], frontier_parents)              # (m, V)
        each = min(width, probs.shape[1])                         # continuations of one sequence
        p, x = probs.topk(each)                                   # (m, each)
        # log p(sequence, x) = log p(sequence) + log p_D(x | sequence)
        score = score + p.log()                                   # (m, each)
        most = min(width, score.numel())
        score, index = score.flatten().topk(most)                 # (most,), the best first
        # Each continues one of the m sequences; those of probability zero come last.
        continued = index // each
        count = score.isfinite().sum()
        *continued, count = torch.cat((continued, count[None])).tolist()      # device-to-host sync
        if count == 0:
            break
        tokens.append(x.take(index[:count]))
        score = score[:count, None]                               # (count, 1)
        parents += [frontier[m] for m in continued[:count]]
        frontier = list(range(len(parents) - count, len(parents)))
    parents = torch.tensor(parents, device=root.device)
    return Tree(torch.cat(tokens), parents)

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
