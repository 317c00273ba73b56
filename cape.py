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
    S(p), K_i               (gamma,)      num_extras(p): 7, 5, 3, 1 for p up to .3, .6, .8, 1
    X_i                     (gamma, K)    extras: the K_i best tokens except x_{t+i}; K = max(sizes)
    beta                    int           nodes excluding the root: at most max_nodes = 32 (5.3)

The functions here are builders: build(expand, root) -> Tree.  The contract of expand and Tree
is in verify.py; docs/any_project.py shows both with any two causal LMs.

    tree = cape(expand, root)            # root = torch.tensor([the last token's id])

Differences from the paper:
 1. The printed mask leaves out the root x_t; here the root is node 0.  Where the paper's text says
    "token x_j", it means x_{t+j}.
 2. With gamma = 5 the widest proposal has 5 x (1 + 7) = 40 nodes, but the stated maximum is 32, and
    the paper does not say what is cut.  (The official code drafts four positions: 4 x 8 = 32.)
    Here the whole chain is kept, and of the extras of all positions those with the highest joint
    probability, until there are 32 nodes.  The Tree lists the root, the chain, and the extras by
    falling joint probability.
 3. The paper does not state gamma for CAPE's own experiments; 5 is section 5.1's.
 4. Beam search returns every sequence that was in a beam at any length, not only the last ones,
    because tree verification can use them all.

    python cape.py          # the demo: the example of Figure 3
"""
from collections import namedtuple
from functools import lru_cache, partial

import torch
from torch.nn.functional import pad

# As in verify.py; repeated, so that this file can be copied alone
Tree = namedtuple("Tree", "tokens parents expand_index p_draft", defaults=(None,))

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

def sample(probs, generator=None):
    """Sample a token from each distribution (m, V) -> (m,), by inverting its cumulative sums.

    For a row of zeros the result is a token of probability zero.  (torch.multinomial would raise
    there, needs a device-to-host sync to find out, and takes a random number for each of V tokens.)
    """
    sums = probs.cumsum(-1, dtype=torch.float64)                  # (m, V)
    uniform = torch.rand(len(probs), 1, dtype=torch.float64, device=probs.device,
                         generator=generator)
    uniform = 1 - uniform          # in (0, 1]: 0 would give token 0, even if its p is 0
    return torch.searchsorted(sums, uniform * sums[:, -1:]).flatten()

def draft(expand, root, gamma, pick):
    """Draft a chain, token by token, without a device-to-host sync.

    At most expand.remaining tokens are drafted, where expand has that.  pick(probs (1, V)) -> token
    (1,).  Returns chosen (gamma,), their probabilities p (gamma,), and the distributions probs
    (gamma, V).  If a token has probability zero, callers cut the chain before it, by valid_length.
    """
    assert gamma >= 1, f"gamma is {gamma}: draft at least one token"
    gamma = min(gamma, getattr(expand, "remaining", gamma))
    tokens = [root]
    probs = []
    for i in range(gamma):
        # x_{t+i+1} is picked from p_D(.|x_{<t+i+1}), the distribution after node i
        after = expand(tokens[i], [i - 1])                        # (1, V)
        probs.append(after)
        tokens.append(pick(after))                                # (1,)
    chosen = torch.cat(tokens[1:])
    probs = torch.cat(probs)
    p = probs.gather(1, chosen[:, None])                          # (gamma, 1)
    return chosen, p.flatten(), probs

def valid_length(p):
    """How many tokens precede the first of probability zero -> a tensor ().  p (gamma,)."""
    least_so_far = p.cummin(0).values
    return (least_so_far > 0).sum()

def checked_counts(p, *counts):
    """Copy counts, tensors () on the device, to the host -> list of ints.

    That is one device-to-host sync.  The smallest and the largest p (gamma,) come along, so that
    logits in place of probabilities are noticed at no further cost.
    """
    # torch.stack converts the counts to p's dtype; bfloat16 cannot represent every integer.
    p = p.float()
    numbers = torch.stack((*counts, p.min(), p.max()))
    *counts, lowest, highest = numbers.tolist()                   # the device-to-host sync
    # A probability in bfloat16 may be a little above 1.
    assert lowest >= 0 and highest < 1.01, (f"expand gave values from {lowest} to {highest}: "
                                            "it must give probabilities, not logits")
    return [int(count) for count in counts]

@lru_cache(maxsize=64)
def constant(numbers, dtype, device):
    """A tuple as a tensor.  It is cached, so that it is not copied to the device in every round."""
    return torch.tensor(numbers, dtype=dtype, device=device)

def chain_tree(root, chosen, length, p_draft=None):
    """The Tree of the root and of the first `length` of the gamma tokens `chosen` below it.

    Every chosen token except the gamma-th was given to expand.
    """
    gamma = len(chosen)
    parents = range(-1, length)
    expand_index = [node if node < gamma else -1 for node in range(1 + length)]
    return Tree(
        tokens=torch.cat((root, chosen[:length])),
        parents=constant(tuple(parents), torch.long, root.device),
        expand_index=constant(tuple(expand_index), torch.long, root.device),
        p_draft=p_draft)

def chain(expand, root, gamma=GAMMA):
    """The standard proposal (section 4.2): gamma tokens, each the most probable -> Tree."""
    chosen, p, _ = draft(expand, root, gamma, best)
    [length] = checked_counts(p, valid_length(p))
    return chain_tree(root, chosen, length)

def drawn(expand, root, gamma=GAMMA):
    """A chain sampled from the drafter, for speculative sampling -> Tree with p_draft.

    p_draft (length, V): entry i is the distribution from which node i + 1 was sampled.  The random
    numbers are those of expand.generator, if there is one.  Acceptance must use other numbers (not
    a second generator of the same seed), or the output is biased.
    """
    pick = partial(sample, generator=getattr(expand, "generator", None))
    chosen, p, probs = draft(expand, root, gamma, pick)
    [length] = checked_counts(p, valid_length(p))
    return chain_tree(root, chosen, length, probs[:length])

# ------------------------------------------------------------------ the expanded proposal
def num_extras(p, sizes=SIZES, edges=EDGES):
    """S(p) of section 4.2: the number of extras (gamma,) for confidences p (gamma,).

    Bin b is (edges[b - 1], edges[b]].  Edges are rounded to p's dtype, so that 0.3 in float32 lies
    in the bin that ends at 0.3.
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
    # p_D(.|x_{<t+i})".  The probability of x_{t+i} is set to zero before sorting, because in a tie
    # it need not come first.
    others = probs.scatter(1, chosen[:, None], 0.0)
    _, V = probs.shape
    K = min(max(sizes), V)
    p_extras, extras = others.topk(K)                             # (gamma, K)
    # K_i = S(p_i)
    K_i = num_extras(p, sizes, edges)
    rank = torch.arange(K, device=probs.device)
    outside = rank >= K_i[:, None]                                # (gamma, K)
    return extras, p_extras.masked_fill(outside, 0.0)

def by_joint_probability(p, p_extras, most):
    """The `most` extras of highest joint probability (difference 2).

    p (gamma,): the chain's.  p_extras (gamma, K).  Returns their joint probabilities (most,), the
    highest first, and their indices (most,) in the flattened extras.  A joint probability of zero
    means that there is no such extra.
    """
    # The ancestors of an extra x' in X_i are x_{t+1} ... x_{t+i-1}, so its joint probability is
    # p_1 ... p_{i-1} p_D(x').
    before = pad(p[:-1], (1, 0), value=1.0)                       # 1, p_1, ..., p_{gamma-1}
    p_ancestors = before.cumprod(0)                               # (gamma,)
    joint = p_ancestors[:, None] * p_extras                       # (gamma, K)
    return joint.flatten().topk(most)

def cape(expand, root, gamma=GAMMA, sizes=SIZES, edges=EDGES, max_nodes=MAX_NODES):
    """Section 4.2: the greedy chain, and beside each of its tokens the S(p_i) next best ones.

    sizes, edges: S(p) is sizes[b] in bin b = (edges[b - 1], edges[b]].  max_nodes: excluding the
    root.  Returns a Tree: the root, the chain (the same one as `chain` drafts), the extras.
    """
    assert len(sizes) == len(edges) + 1, f"{len(edges)} edges need one size more: {sizes}"
    assert list(edges) == sorted(edges), f"edges must ascend: {edges}"
    assert min(sizes) >= 0, f"sizes are numbers of tokens, so none is negative: {sizes}"
    assert max_nodes >= gamma, f"max_nodes {max_nodes} cannot hold the chain of {gamma}"
    # the proposal x_{t+1} ... x_{t+gamma}
    chosen, p, probs = draft(expand, root, gamma, best)
    # its expansion sets X_1 ... X_gamma, (gamma, K)
    extras, p_extras = expansion_sets(probs, chosen, p, sizes, edges)
    # The length of the chain is not known on the host yet, so take enough extras for any length
    most = min(extras.numel(), max_nodes)
    joint, index = by_joint_probability(p, p_extras, most)        # (most,)
    length, count = checked_counts(p, valid_length(p), (joint > 0).sum())
    # The chain is kept whole; the best extras fill the rest.
    count = min(count, max_nodes - length)
    index = index[:count]

    # linearised: the root, the chain, the extras
    tree = chain_tree(root, chosen, length)
    tokens = torch.cat((tree.tokens, extras.take(index)))
    # The paper's mask on the attention scores A, of query x_{t+i} for key x_{t+j}.  Here i and j
    # number all proposed tokens: 1 ... gamma are the chain, and the extras follow.
    #     mask_CAPE(A)_ij = A_ij    if j <= gamma and pos(i) > j     the chain's tokens before it
    #                       A_ij    if i = j                         itself
    #                       -inf    otherwise                        extras, and later tokens
    # pos(i) is the position of token i: i itself in the chain, k for an extra in X_k.
    # In a tree a node sees its ancestors and itself, so parents express the same mask: the parent
    # of token i is the chain's token at position pos(i) - 1, or the root, node 0, if pos(i) is 1.
    # No extra has children, and none was given to expand.
    # Row r of the extras (gamma, K), counted from 0, is the set X_{r+1}, and the parent of its
    # tokens is node r.  `index` counts in the flattened extras.  If K is 7, index 9 is in row 1: it
    # belongs to X_2, and its parent is node 1.
    K = max(1, extras.shape[1])                                   # if all sizes are 0, K is 0
    parents = torch.cat((tree.parents, index // K))
    expand_index = pad(tree.expand_index, (0, count), value=-1)
    return Tree(tokens, parents, expand_index)

# ------------------------------------------------------------------ what it is compared with
def fixed(expand, root, gamma=GAMMA, size=SIZE, max_nodes=MAX_NODES):
    """Section 5.4's control: `size` extras everywhere (4 is the mean size of CAPE's sets there)."""
    one_size = (size,)
    no_edges = ()
    return cape(expand, root, gamma, one_size, no_edges, max_nodes)

def beam(expand, root, gamma=GAMMA, width=WIDTH):
    """Beam search (sections 5.3, 5.4, Table 3): the `width` most probable sequences of each length.

    A node stands for the sequence that ends with it.  Nodes are given to expand in the order of the
    tree, so a node's index in the tree is also its number in expand.  One device-to-host sync per
    depth: the host must know which sequences are continued.
    """
    assert width >= 1, f"width is {width}: keep at least one sequence"
    tokens = [root]
    parents = [-1]
    given = 0                                                     # nodes given to expand so far
    frontier = [0]                                                # the m nodes of this length
    score = torch.zeros(1, 1, device=root.device)                 # their log-probabilities (m, 1)
    for _ in range(min(gamma, getattr(expand, "remaining", gamma))):
        frontier_parents = [parents[node] for node in frontier]
        probs = expand(tokens[-1], frontier_parents)              # (m, V)
        given += len(frontier)
        per_sequence = min(width, probs.shape[1])                 # continuations of one sequence
        p, x = probs.topk(per_sequence)                           # (m, per_sequence)
        # log p(sequence, x) = log p(sequence) + log p_D(x | sequence)
        longer = score + p.log()                                  # (m, per_sequence)
        most = min(width, longer.numel())
        score, index = longer.flatten().topk(most)                # (most,), the best first
        # The r-th best one continues sequence continues[r].
        continues = index // per_sequence                         # (most,)
        # Those of probability zero, with score -inf, come last; `count` leaves them out.
        possible = score.isfinite().sum()                         # ()
        *continued, count = torch.cat((continues, possible[None])).tolist()  # device-to-host sync
        if count == 0:
            break
        tokens.append(x.take(index[:count]))
        score = score[:count, None]                               # (count, 1)
        for sequence in continued[:count]:
            parents.append(frontier[sequence])
        frontier = list(range(len(parents) - count, len(parents)))
    expand_index = [node if node < given else -1 for node in range(len(parents))]
    both = torch.tensor([parents, expand_index], device=root.device)
    return Tree(torch.cat(tokens), *both)

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
