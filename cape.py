"""CAPE: confidence-aware proposal expansion, and baselines of its experiments.

GLIDE with a CAPE (arXiv 2402.02082), section 4.2; of sections 5.3, 5.4 and Table 3 the chain, the
beam and the fixed size (Medusa is beyond/medusa.py).

The idea.  The drafter's confidence in a token predicts whether the target will accept it.  If the
confidence is low, the target is offered several of the next best tokens as well.  Nothing is
drafted after these extras, so they need no further forward of the drafter.

    paper                   shape         name here
    x_t                     (1,)          root: the last token, which the target has not cached yet
    gamma                   int           gamma: number of drafted positions
    x_{t+1..t+gamma}        (gamma,)      chosen: the standard proposal, a chain
    p_D(.|x_{<t+i})         (gamma, V)    probs: the drafter's distribution at each position
    p_i = max p_D           (gamma,)      p: the confidence at each position
    S(p), K_i               (gamma,)      num_extras(p): 7, 5, 3, 1 for p up to .3, .6, .8, 1
    X_i                     (gamma, K)    extras: the K_i best tokens except x_{t+i}; K = max(sizes)
    beta                    int           nodes excluding the root: at most max_nodes = 32 (5.3)

Example, Figure 3.  The chain is "Attention is all the".  Each of its tokens has a confidence above
0.8, so each gets one extra:

    root ── Attention ── is ── all ── the
       └─ All   └─ that   └─ that └─ you

The functions here are builders, build(expand, root) -> Tree, by the contract at the top of
verify.py:

    tree = cape.cape(expand, root)       # root = torch.tensor([the last token's id])
    out = verify.generate(target, drafter, cape.cape, ids)

    python cape.py                       # the demo: the example above
"""
from collections import namedtuple
from functools import partial

import torch
from torch.nn.functional import pad

# As in verify.py; repeated, so that this file can be copied alone
Tree = namedtuple("Tree", "tokens parents expand_index p_draft", defaults=(None,))

# Differs from the paper: it does not state gamma for CAPE's own experiments; this is section 5.1's.
GAMMA = 5                        # drafted positions
# Differs from the paper, whose p is raw: expand may give calibrated or, in sampling, warped p.
SIZES = (7, 5, 3, 1)             # S(p) of section 4.2 in the four bins of p: up to 0.3, ...
EDGES = (0.3, 0.6, 0.8)          # the last p of each bin but the last, which ends at 1
MAX_NODES = 32                   # "the maximum number of tokens for verification" (section 5.3)
SIZE = 4                         # extras at each position of the fixed-size control (section 5.4)
WIDTH = 4                        # beam size (section 5.3)

# ------------------------------------------------------------------ the standard proposal
best = partial(torch.argmax, dim=-1)     # the most probable token of each distribution

def sample(probs, generator=None):
    """Sample a token from each distribution (m, V) -> (m,), by inverting its cumulative sums.

    If all V entries are zero (no prediction) it picks a token of probability zero.
    torch.multinomial would raise there, after a device-to-host sync to find out.
    """
    sums = probs.cumsum(-1, dtype=torch.float64)                  # (m, V)
    uniform = torch.rand(len(probs), 1, dtype=torch.float64, device=probs.device,
                         generator=generator)
    uniform = 1 - uniform          # in (0, 1]: 0 would give token 0, even if its p is 0
    return torch.searchsorted(sums, uniform * sums[:, -1:]).flatten()

def draft(expand, root, gamma, pick):
    """Draft a chain of gamma tokens, or of expand.remaining if that is less.

    pick(probs (1, V)) chooses a token (1,).  Returns the tokens chosen (gamma,), their
    probabilities p (gamma,), and the distributions probs (gamma, V) that they were picked from.

    There is no sync: the host does not yet know whether the drafter has stopped predicting.  Then p
    is zero, and callers cut the chain at valid_length(p).
    """
    if gamma < 1:
        raise ValueError(f"gamma is {gamma}: draft at least one token")
    gamma = min(gamma, getattr(expand, "remaining", gamma))
    tokens = [root]
    probs = []
    for i in range(gamma):
        # Node i of the chain, whose parent is node i - 1, gives the distribution of node i + 1.
        after = expand(tokens[i], [i - 1])                        # (1, V)
        probs.append(after)
        tokens.append(pick(after))                                # (1,)
    chosen = torch.cat(tokens[1:])
    probs = torch.cat(probs)
    p = probs.gather(1, chosen[:, None])                          # (gamma, 1)
    return chosen, p.flatten(), probs

def valid_length(p):
    """Count the tokens before the first one of probability zero: p (gamma,) -> a tensor ()."""
    least_so_far = p.cummin(0).values
    return (least_so_far > 0).sum()

def chain_tree(root, chosen, length, p_draft=None):
    """Make the Tree of the root and the first `length` of the gamma tokens `chosen` after it."""
    gamma = len(chosen)
    tokens = torch.cat((root, chosen[:length]))
    parents = torch.arange(-1, length, device=root.device)
    # draft() gave nodes 0 to gamma - 1 to expand, in this order, and never node gamma, the last.
    expand_index = torch.arange(1 + length, device=root.device)
    expand_index[gamma:] = -1
    return Tree(tokens, parents, expand_index, p_draft)

def chain(expand, root, gamma=GAMMA):
    """The standard proposal (section 4.2): gamma tokens, each the most probable -> Tree."""
    chosen, p, _ = draft(expand, root, gamma, best)
    length = valid_length(p).item()                               # the device-to-host sync
    return chain_tree(root, chosen, length)

def drawn(expand, root, gamma=GAMMA):
    """A chain of tokens sampled from the drafter ("drawn"), for speculative sampling -> Tree.

    Its p_draft (length, V) holds the distribution from which each node after the root was sampled.
    The random numbers come from expand.generator, if there is one.  Acceptance must use other
    numbers (not a second generator of the same seed), or the output is biased.
    """
    pick = partial(sample, generator=getattr(expand, "generator", None))
    chosen, p, probs = draft(expand, root, gamma, pick)
    counts = torch.stack((valid_length(p), (probs < 0).sum()))
    length, negative = counts.tolist()                            # the device-to-host sync
    if negative:
        raise ValueError("expand gave values below 0: it must give probabilities, not logits")
    return chain_tree(root, chosen, length, probs[:length])

# ------------------------------------------------------------------ the expanded proposal
def num_extras(p, sizes=SIZES, edges=EDGES):
    """S(p) of section 4.2: the number of extras (gamma,) for confidences p (gamma,).

    It is sizes[b] if p lies in bin b = (edges[b - 1], edges[b]].
    """
    count = torch.full_like(p, sizes[-1], dtype=torch.long)
    # From the highest edge to the lowest, so that the lowest one that p does not exceed decides.
    for size, edge in reversed(list(zip(sizes, edges))):
        count = count.masked_fill(p <= edge, size)
    return count

def expansion_sets(probs, chosen, p, sizes=SIZES, edges=EDGES):
    """The sets X_i of section 4.2: the S(p_i) best tokens at each position except the chosen one.

    probs (gamma, V), chosen (gamma,), p (gamma,): p_i = probs[i, chosen_i].
    Returns extras (gamma, K), the best first, and their probabilities (gamma, K).  K is max(sizes),
    or V if that is less.  An extra whose probability is zero is not in the set.
    """
    # "K_i tokens (excluding x_{t+i}) that have the highest probabilities": in a tie x_{t+i} need
    # not come first.
    others = probs.scatter(1, chosen[:, None], 0.0)
    _, V = probs.shape
    K = min(max(sizes), V)
    p_extras, extras = others.topk(K)                             # (gamma, K)
    # K_i = S(p_i)
    K_i = num_extras(p, sizes, edges)
    rank = torch.arange(K, device=probs.device)
    outside = rank >= K_i[:, None]                                # (gamma, K)
    return extras, p_extras.masked_fill(outside, 0.0)

def best_extras(p, p_extras, limit):
    """Rank the extras by joint probability, and take the `limit` best.

    p (gamma,): the chain's.  p_extras (gamma, K).  Returns their joint probabilities (limit,), the
    highest first (zero: there is no such extra), and their indices (limit,) in the flattened ones.
    """
    # The ancestors of an extra x' in X_i are x_{t+1} ... x_{t+i-1}, so its joint probability is
    # p_1 ... p_{i-1} p_D(x').
    before = pad(p[:-1], (1, 0), value=1.0)                       # 1, p_1, ..., p_{gamma-1}
    p_ancestors = before.cumprod(0)                               # (gamma,)
    joint = p_ancestors[:, None] * p_extras                       # (gamma, K)
    return joint.flatten().topk(limit)

def cape(expand, root, gamma=GAMMA, sizes=SIZES, edges=EDGES, max_nodes=MAX_NODES):
    """Section 4.2: the greedy chain, and beside each of its tokens the S(p_i) next best ones.

    sizes, edges: S(p) is sizes[b] in bin b = (edges[b - 1], edges[b]].  max_nodes: excluding the
    root.  Returns a Tree: the root, the chain (the same one as `chain` drafts), then the extras,
    the most probable first.
    """
    if len(sizes) != len(edges) + 1:
        raise ValueError(f"{len(edges)} edges need one size more: {sizes}")
    if max_nodes < gamma:
        raise ValueError(f"max_nodes {max_nodes} cannot hold the chain of {gamma}")
    # the proposal x_{t+1} ... x_{t+gamma}
    chosen, p, probs = draft(expand, root, gamma, best)
    # its expansion sets X_1 ... X_gamma (gamma, K)
    extras, p_extras = expansion_sets(probs, chosen, p, sizes, edges)

    # Differs from the paper: with gamma = 5 the widest proposal has 5 x (1 + 7) = 40 nodes, and the
    # paper does not say which of them its limit of 32 cuts.  (The official code drafts four
    # positions: 4 x 8 = 32.)  Here the chain is kept whole, and the best extras fill the rest.
    # The chain's length is unknown until the sync: rank max_nodes extras now, cut them after it.
    limit = min(extras.numel(), max_nodes)
    joint, index = best_extras(p, p_extras, limit)                # (limit,)
    counts = torch.stack((valid_length(p), (joint > 0).sum()))
    length, count = counts.tolist()                               # the device-to-host sync
    count = min(count, max_nodes - length)
    index = index[:count]

    # linearised: the root, the chain, the extras
    tree = chain_tree(root, chosen, length)
    tokens = torch.cat((tree.tokens, extras.take(index)))
    # By the paper's mask a token of X_i sees the chain's tokens before position i, and itself:
    #     mask_CAPE(A)_ij = A_ij    if j <= gamma and pos(i) > j, or if i = j;    else -inf
    # In a Tree: row r of the extras (gamma, K) is X_{r+1}, and node r is the parent of its tokens.
    # Differs from the paper: its mask leaves out the root x_t; here the root is node 0.
    _, K = extras.shape                                           # if K is 0, index is empty
    parents = torch.cat((tree.parents, index // K))
    expand_index = pad(tree.expand_index, (0, count), value=-1)
    return Tree(tokens, parents, expand_index)

# ------------------------------------------------------------------ the baselines
def fixed(expand, root, gamma=GAMMA, size=SIZE, max_nodes=MAX_NODES):
    """Section 5.4's control: `size` extras everywhere (4 is the mean size of CAPE's sets there)."""
    return cape(expand, root, gamma, sizes=(size,), edges=(), max_nodes=max_nodes)

def beam(expand, root, gamma=GAMMA, width=WIDTH):
    """Beam search (sections 5.3, 5.4, Table 3): the `width` most probable sequences of each length.

    A node stands for the sequence that ends with it.  Nodes are given to expand in the order of the
    tree, so a node's index in the tree is also its number in expand.  One device-to-host sync per
    depth: the host must know which sequences are continued.
    """
    tokens = [root]
    parents = [-1]
    given = 0                                                     # nodes given to expand so far
    beams = [0]                                                   # the m nodes of this length
    score = torch.zeros(1, 1, device=root.device)                 # their log-probabilities (m, 1)
    for _ in range(min(gamma, getattr(expand, "remaining", gamma))):
        parents_of_beams = [parents[node] for node in beams]
        probs = expand(tokens[-1], parents_of_beams)              # (m, V)
        given += len(beams)
        best_of_each = min(width, probs.shape[1])
        p, x = probs.topk(best_of_each)                           # (m, best_of_each)
        # log p(sequence, x) = log p(sequence) + log p_D(x|sequence)
        longer = score + p.log()                                  # (m, best_of_each)
        n = min(width, longer.numel())
        score, index = longer.flatten().topk(n)                   # (n,), the best first
        # Row r of x (m, best_of_each) continues beam r.
        row = index // best_of_each                               # (n,)
        # Continuations of probability zero have the score -inf, so they come last.
        possible = score.isfinite().sum()                         # ()
        numbers = torch.cat((row, possible[None])).tolist()       # the device-to-host sync
        row, count = numbers[:-1], numbers[-1]
        if count == 0:
            break
        tokens.append(x.take(index[:count]))
        score = score[:count, None]                               # (count, 1)
        first = len(parents)
        parents += [beams[r] for r in row[:count]]
        # The paper does not state what stays in the tree: here all beams of all lengths.
        beams = list(range(first, len(parents)))
    expand_index = [node if node < given else -1 for node in range(len(parents))]
    parents, expand_index = torch.tensor([parents, expand_index], device=root.device)
    return Tree(torch.cat(tokens), parents, expand_index)

# ------------------------------------------------------------------ the demo
def main():
    """Figure 3: "Attention is all the", and one extra beside each token ("you" beside "the")."""
    words = ["<root>", "Attention", "is", "all", "the", "All", "that", "you"]
    chain_of_figure = torch.tensor([1, 2, 3, 4])
    extra = torch.tensor([5, 6, 6, 7])
    # Row i: what the drafter predicts after words[i]
    table = torch.zeros(8, 8)
    table[range(4), chain_of_figure] = torch.tensor([0.85, 0.9, 0.95, 0.82])
    table[range(4), extra] = torch.tensor([0.15, 0.1, 0.05, 0.18])

    def expand(tokens, parents):
        return table[tokens]

    tree = cape(expand, torch.tensor([0]), gamma=4)
    assert tree.tokens[1:5].tolist() == chain_of_figure.tolist()
    X = dict(zip(tree.parents[5:].tolist(), tree.tokens[5:].tolist()))
    assert [X[i] for i in range(4)] == extra.tolist()
    for i in range(4):
        print(f"x_t+{i + 1}: {words[i + 1]:10s} X_{i + 1}: {words[X[i]]}")

# Differences from the paper, all of them:
#  1. The printed mask leaves out the root x_t; here the root is node 0.  Misprint: where the text
#     says "token x_j", it means x_{t+j}.
#  2. The chain is kept whole; of the extras the most probable ones fill the tree up to 32 nodes.
#  3. gamma = 5 is section 5.1's; the paper does not state it for CAPE's own experiments, nor what
#     beam search keeps: here every sequence that was in a beam at any length.
#  4. S(p) sees a calibrated p, or in sampling a warped one (verify.Rule.probs), not the raw one.

if __name__ == "__main__":
    main()
