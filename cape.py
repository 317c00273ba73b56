"""CAPE: confidence-aware proposal expansion, and what it is compared with.

GLIDE with a CAPE (arXiv 2402.02082), section 4.2; baselines of sections 5.3, 5.4 and Table 3.

The idea.  The drafter's confidence says how likely its first choice is to be accepted.  Where it is low, offer the target
more of the next best tokens; they are not continued, so they cost the drafter nothing.

    paper                   shape         name here
    x_t                     (1,)          root (already produced by the target, not yet in its cache)
    gamma                   int           gamma: drafted positions
    p_D(.|x_{<t+i})         (V,)          a row of expand(...)
    p_i = max p_D           float         confidence of position i
    S(p), K_i               int           size_of(p): 7, 5, 3, 1 for p in (0, .3], (.3, .6], (.6, .8], (.8, 1]
    X_i                     K_i tokens    the extras of position i: the best tokens but the first
    beta                    int           number of nodes without the root, at most 32 (section 5.3)

A builder is a function of `expand(tokens (m,), parents [m ints]) -> probs (m, V)`, which runs the drafter over m new nodes
(`parents` index nodes in the order given to expand; -1 is the cached prefix), and of the root.  It returns a Tree: tokens
(n,) with the root first, parents (n,) with parents[0] = -1 and parents before children, p_draft.  A row of zeros says that
the drafter cannot go on; no child of probability zero is ever added.

Differences from the paper:
 1. pos(i) = i for i <= gamma and "x_{t+j}" for "token x_j" are unstated in the printed mask, and the root x_t is left out of
    it; here the root is node 0.
 2. With gamma = 5 the widest proposal has 5 x (1 + 7) = 40 nodes, above the stated maximum of 32, and how it is cut is not
    said (the official code drafts four: 4 x 8 = 32).  Here the chain stays and the extras of lowest joint probability go.
 3. gamma for CAPE's own experiments is not stated; 5 is section 5.1's.
 4. Beam search keeps every hypothesis that was in a beam as a node, as tree verification can use them all.

    python cape.py          # the demo: the example of Figure 3
"""
from bisect import bisect_left
from collections import namedtuple

import torch

Tree = namedtuple("Tree", "tokens parents p_draft", defaults=(None,))

GAMMA = 5                        # drafted positions (section 5.1)
SIZES = (7, 5, 3, 1)             # S(p) of section 4.2 ...
EDGES = (0.3, 0.6, 0.8)          # ... on bins closed on the right
MAX_NODES = 32                   # "the maximum number of tokens for verification" (section 5.3), the root not counted


def size_of(p, sizes=SIZES, edges=EDGES):
    """S(p): the number of extras for confidence p."""
    return sizes[bisect_left(edges, p)]


def draw(row, generator=None):
    """A `pick` that draws from the row (V,): an exponential race, which a row of zeros survives without a host read."""
    return (row / torch.empty_like(row).exponential_(generator=generator)).argmax()


def draft(expand, root, gamma, pick=None):
    """Draft a chain one token at a time, without reading anything back -> rows (gamma, V), tokens (gamma,)."""
    assert gamma >= 1, "gamma must be at least 1"
    pick = pick or (lambda row: row.argmax())
    rows, tokens = [], [root]
    for i in range(gamma):
        rows.append(expand(tokens[-1], [i - 1])[0])
        tokens.append(pick(rows[-1]).reshape(1))
    return torch.stack(rows), torch.cat(tokens[1:])


def chain(expand, root, gamma=GAMMA, pick=None):
    """The standard proposal: gamma tokens, each the best (or `pick`ed) continuation of the one before it.

    pick(row (V,)) -> token (); when given (cape.draw), the rows are kept as p_draft, for speculative sampling.  It may be
    asked about rows of zeros, and what it says there is dropped.
    """
    rows, tokens = draft(expand, root, gamma, pick)
    can = (rows.gather(1, tokens[:, None])[:, 0] > 0).tolist() + [False]           # the one host read
    n = can.index(False)
    return Tree(torch.cat((root, tokens[:n])), torch.arange(-1, n), rows[:n] if pick else None)


def cape(expand, root, gamma=GAMMA, sizes=SIZES, edges=EDGES, max_nodes=MAX_NODES):
    """Section 4.2: the greedy chain, and beside each of its tokens the S(p_i) next best ones."""
    assert len(sizes) == len(edges) + 1 and list(edges) == sorted(edges), "one more size than edges, edges ascending"
    assert max_nodes >= gamma, f"max_nodes {max_nodes} cannot hold the chain of {gamma}"
    rows, _ = draft(expand, root, gamma)
    best = rows.topk(min(1 + max(sizes), rows.shape[1]))                             # (gamma, 1 + max K)
    probs, tokens = torch.stack((best.values.double(), best.indices.double())).tolist()   # the one host read
    proposal, extras, joint = [], [], 1.0
    for i, (p, x) in enumerate(zip(probs, tokens)):
        if p[0] <= 0:
            break
        proposal.append(int(x[0]))
        k = size_of(p[0], sizes, edges)                                              # K_i = S(p_i)
        extras += [(joint * p[j], i, int(x[j])) for j in range(1, min(1 + k, len(x))) if p[j] > 0]
        joint *= p[0]
    if len(proposal) + len(extras) > max_nodes:                                      # difference 2
        best_first = sorted(range(len(extras)), key=lambda e: (-extras[e][0], e))[:max_nodes - len(proposal)]
        extras = [extras[e] for e in sorted(best_first)]
    parents = list(range(-1, len(proposal))) + [i for _, i, _ in extras]
    linear = torch.tensor(proposal + [x for _, _, x in extras], dtype=torch.long, device=root.device)
    return Tree(torch.cat((root, linear)), torch.tensor(parents))


def fixed(expand, root, gamma=GAMMA, size=4, max_nodes=MAX_NODES):
    """Section 5.4's control: the same number of extras everywhere (the paper's 4: the mean of CAPE's sets there)."""
    return cape(expand, root, gamma, (size,), (), max_nodes)


def beam(expand, root, gamma=GAMMA, width=4):
    """Beam search (sections 5.3 and 5.4, Table 3): the `width` most probable sequences of each length, all as nodes."""
    assert gamma >= 1 and width >= 1, "gamma and width must be at least 1"
    tokens, parents = [root], [-1]
    frontier, joint = [0], torch.ones(1, 1, dtype=torch.float64, device=root.device)
    for _ in range(gamma):
        rows = expand(tokens[-1], [parents[node] for node in frontier])              # (m, V)
        score = joint * rows                                                         # (m, V) joint probabilities
        best = score.flatten().topk(min(width, score.numel()))
        flat, kept = torch.stack((best.indices.double(), best.values)).tolist()      # one host read a depth
        kept = sum(p > 0 for p in kept)
        if not kept:
            break
        parents += [frontier[int(i) // rows.shape[1]] for i in flat[:kept]]
        tokens.append(best.indices[:kept] % rows.shape[1])
        joint = best.values[:kept, None]
        frontier = list(range(len(parents) - kept, len(parents)))
    return Tree(torch.cat(tokens), torch.tensor(parents))


# What a builder can ask for at most: (nodes without the root, nodes of one expand), for static shapes.
chain.bounds = lambda gamma=GAMMA, **_: (gamma, 1)
cape.bounds = lambda gamma=GAMMA, max_nodes=MAX_NODES, **_: (max_nodes, 1)
fixed.bounds = cape.bounds
beam.bounds = lambda gamma=GAMMA, width=4, **_: (gamma * width, width)


def main():
    """Figure 3: the proposal "Attention is all the", one extra at each later position, and "you" beside "the"."""
    words = ["<root>", "Attention", "is", "all", "the", "All", "that", "you", "need"]
    word = {w: i for i, w in enumerate(words)}
    table = torch.zeros(len(words), len(words))
    for here, (first, p, second) in {"<root>": ("Attention", 0.85, "All"), "Attention": ("is", 0.9, "that"),
                                     "is": ("all", 0.95, "that"), "all": ("the", 0.82, "you")}.items():
        table[word[here], word[first]], table[word[here], word[second]] = p, 1 - p
    tree = cape(lambda tokens, parents: table[tokens], torch.tensor([0]), gamma=4)
    drawn = [words[i] for i in tree.tokens]
    assert drawn == ["<root>", "Attention", "is", "all", "the", "All", "that", "that", "you"]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3, 0, 1, 2, 3]
    print("proposal:", " ".join(drawn[1:5]), "| extras:", " | ".join(drawn[5:]))


if __name__ == "__main__":
    main()
