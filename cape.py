"""CAPE: confidence-aware proposal expansion, and what it is compared with.

GLIDE with a CAPE (arXiv 2402.02082), section 4.2; baselines of sections 5.3, 5.4 and Table 3.

The idea.  The drafter's confidence says how likely its first choice is to be accepted.  Where it is low,
offer the target more of the next best tokens; they are not continued, so they cost the drafter nothing.

    paper                   shape         name here
    x_t                     (1,)          root (produced by the target, not yet in its cache)
    gamma                   int           gamma: drafted positions
    x_{t+1..t+gamma}        (gamma,)      chosen: the standard proposal, a chain
    p_D(.|x_{<t+i})         (gamma, V)    rows: the drafter's distribution at each position
    p_i = max p_D           (gamma,)      p: confidence of each position
    S(p), K_i               (gamma,)      size_of(p): 7, 5, 3, 1 for p in (0, .3], (.3, .6], (.6, .8], (.8, 1]
    X_i                     (gamma, K)    extras: the K_i best tokens other than x_{t+i}; K = max(sizes)
    beta                    int           nodes without the root, at most 32 (section 5.3): max_nodes

A builder is a function of expand and root (1,), a token id.  expand(tokens (m,), parents [m ints]) ->
probabilities (m, V) runs the drafter once over m new nodes.  It counts the nodes that it has been given in
this tree from 0; `parents` are their numbers, -1 for the root.  A row of zeros: the drafter cannot go on.
The builder returns a Tree of tokens (n,) and parents (n,), here numbers of the tree's own nodes: the root is
node 0 with parent -1, and parents come before children.  No node has probability zero.
It reads the device once, beam search once a depth.  Where expand has `remaining`, the tree is no deeper.

To use this file alone, with causal LMs `target` and `drafter` of one vocabulary and without sliding windows,
and a list of token ids `text`:

    def expand(tokens, parents):
        for token, parent in zip(tokens.tolist(), parents):
            paths.append(paths[parent] + [token] if parent >= 0 else text[:-1] + [token])
        rows = [drafter(torch.tensor([path])).logits[0, -1] for path in paths[-len(parents):]]
        return torch.stack(rows).softmax(-1)                  # (m, V): probabilities, never logits
    while len(text) < 60:
        paths = []
        tree = cape.cape(expand, torch.tensor(text[-1:]))
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
 1. pos(i) = i for i <= gamma and "x_{t+j}" for "token x_j" are unstated in the printed mask, and the root x_t
    is left out of it; here the root is node 0.
 2. With gamma = 5 the widest proposal has 5 x (1 + 7) = 40 nodes, above the stated maximum of 32, and how it
    is cut is not said (the official code drafts four: 4 x 8 = 32).  Here the chain stays and the extras of
    lowest joint probability go.  Extras are appended most probable first, not set by set.
 3. gamma for CAPE's own experiments is not stated; 5 is section 5.1's.
 4. Beam search keeps every hypothesis that was in a beam as a node, as tree verification can use them all.

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
def best(row):
    """The most probable token of each row (m, V) -> (m,)."""
    return row.argmax(-1)

def draw(row, generator=None):
    """A token drawn from each row (m, V) -> (m,), by an exponential race.

    With E_x ~ Exp(1), the x of largest p(x) / E_x is distributed as p.  torch.multinomial would refuse a row
    of zeros, and read the device to find one; here such a row gives a token of probability zero.
    """
    race = torch.empty_like(row).exponential_(generator=generator)
    return (row / race).argmax(-1)

def within(expand, gamma):
    """gamma, or expand.remaining where that is less: there the output ends."""
    assert gamma >= 1, f"gamma is {gamma}: draft at least one token"
    return min(gamma, getattr(expand, "remaining", gamma))

def draft(expand, root, gamma, pick):
    """Draft a chain, one token at a time, without a host read.

    pick(row (1, V)) -> token (1,).  Returns chosen (gamma,), the probability p (gamma,) of each, and the
    rows (gamma, V).  What follows a token of probability zero is meaningless.
    """
    rows, tokens = [], [root]
    for i in range(gamma):
        # x_{t+i+1} is picked from p_D(.|x_{<t+i+1}), the distribution after node i, whose parent is i - 1
        row = expand(tokens[i], [i - 1])                          # (1, V)
        rows.append(row)
        tokens.append(pick(row))                                  # (1,)
    chosen = torch.cat(tokens[1:])
    rows = torch.cat(rows)
    p = rows.gather(1, chosen[:, None])                           # (gamma, 1)
    return chosen, p.flatten(), rows

def how_many(p, joint):
    """The number of drafted tokens, and of extras, that are possible: two ints by one host read.

    p (gamma,) of the chain: it ends before the first token of probability zero.  joint (room,) of the extras,
    highest first.
    """
    least = p.cummin(0).values                                    # of a token and all before it
    drafted = (least > 0).sum()
    extra = (joint > 0).sum()
    p = p.float()                                                 # bfloat16 holds no integers above 256
    numbers = torch.stack((drafted, extra, p.min(), p.max()))
    drafted, extra, lowest, highest = numbers.tolist()            # the host read
    assert lowest >= 0, f"expand gave {lowest}: it must give probabilities, not logits"
    assert highest < 1.01, f"expand gave {highest}: it must give probabilities, not logits"
    return int(drafted), int(extra)

def root_only(expand, root):
    """The tree of the root alone."""
    return Tree(root, torch.full_like(root, -1))

def chain_parents(n, device):
    """Parents (1 + n,) of the root and a chain of n tokens: each node hangs from the one before it."""
    return torch.arange(-1, n, device=device)

def chain(expand, root, gamma=GAMMA):
    """The standard proposal (section 4.2): gamma tokens, each the most probable continuation -> Tree."""
    gamma = within(expand, gamma)
    if gamma == 0:
        return root_only(expand, root)
    chosen, p, _ = draft(expand, root, gamma, best)
    no_extras = p[:0]
    n, _ = how_many(p, no_extras)
    tokens = torch.cat((root, chosen[:n]))
    parents = chain_parents(n, root.device)
    return Tree(tokens, parents)

def drawn(expand, root, gamma=GAMMA, generator=None):
    """A chain whose tokens are drawn from the drafter, for speculative sampling.

    generator: on the device of the rows; by default expand.generator, where the loop has set one.  It must
    not be the one that accepts: draws and acceptances that know of each other are biased.
    Returns a Tree with p_draft (n - 1, V): row i is the distribution that node i + 1 was drawn from.
    """
    gamma = within(expand, gamma)
    if gamma == 0:
        return root_only(expand, root)
    if generator is None:
        generator = getattr(expand, "generator", None)
    pick = partial(draw, generator=generator)
    chosen, p, rows = draft(expand, root, gamma, pick)
    no_extras = p[:0]
    n, _ = how_many(p, no_extras)
    tokens = torch.cat((root, chosen[:n]))
    parents = chain_parents(n, root.device)
    return Tree(tokens, parents, rows[:n])

# ------------------------------------------------------------------ the expanded proposal
@lru_cache(maxsize=64)
def constant(numbers, dtype, device):
    """A tuple as a tensor, made once: a copy to the device in each round would be a wait in each round."""
    return torch.tensor(numbers, dtype=dtype, device=device)

def size_of(p, sizes=SIZES, edges=EDGES):
    """S(p) of section 4.2: the number of extras, long, for confidences p (gamma,).

    Bin b is (edges[b - 1], edges[b]]; p and the edges are compared in p's own precision.
    """
    sizes = constant(tuple(sizes), torch.long, p.device)
    edges = constant(tuple(edges), p.dtype, p.device)
    b = torch.bucketize(p, edges)
    return sizes[b]

def expansion_sets(rows, chosen, p, sizes=SIZES, edges=EDGES):
    """The sets X_i of section 4.2: beside each chosen token, the S(p_i) next best ones.

    rows (gamma, V), chosen (gamma,), p (gamma,): p_i = rows[i, chosen_i].
    Returns extras (gamma, K) and their probabilities (gamma, K), the best first, where K is max(sizes), or V
    if that is less.  A probability of zero says that the token is not in the set.
    """
    # "K_i tokens (excluding x_{t+i}) that have the highest probabilities according to p_D(.|x_{<t+i})".
    # x_{t+i} is taken out first: where several tokens tie, it need not be the first of the sorted ones.
    others = rows.scatter(1, chosen[:, None], 0.0)
    _, V = rows.shape
    most = min(max(sizes), V)
    p_extras, extras = others.topk(most)                          # (gamma, K)
    # K_i = S(p_i)
    K = size_of(p, sizes, edges)
    rank = torch.arange(most, device=rows.device)
    outside = rank >= K[:, None]                                  # (gamma, K)
    return extras, p_extras.masked_fill(outside, 0.0)

def cap(p, p_extras, room):
    """The `room` extras of highest joint probability (difference 2).

    p (gamma,) of the chain, p_extras (gamma, K).  Returns joint (room,), highest first, and index (room,) as
    `extras.take` has it.  Where the joint probability is zero there is no extra.
    """
    # x'_{t+i,j} counts only after x_{t+1} ... x_{t+i-1}: p_1 ... p_{i-1} p_D(x'_{t+i,j})
    before = pad(p[:-1], (1, 0), value=1.0)                       # 1, p_1, ..., p_{gamma-1}
    above = before.cumprod(0)                                     # (gamma,)
    joint = above[:, None] * p_extras                             # (gamma, K)
    return joint.flatten().topk(room)

def cape(expand, root,
         gamma=GAMMA, sizes=SIZES, edges=EDGES, max_nodes=MAX_NODES):
    """Section 4.2: the greedy chain, and beside each of its tokens the S(p_i) next best ones.

    sizes, edges: S(p) is sizes[b] in bin b = (edges[b - 1], edges[b]].  max_nodes: the root not counted.
    Returns a Tree of root, chain, extras; the chain is the one that `chain` drafts.
    """
    assert len(sizes) == len(edges) + 1, f"{len(edges)} edges need {len(edges) + 1} sizes: {sizes}"
    assert list(edges) == sorted(edges), f"edges must ascend: {edges}"
    assert min(sizes) >= 0, f"a set cannot have fewer than no tokens: {sizes}"
    assert max_nodes >= gamma, f"max_nodes {max_nodes} cannot hold the chain of {gamma}"
    gamma = within(expand, gamma)
    if gamma == 0:
        return root_only(expand, root)
    # the proposal x_{t+1} ... x_{t+gamma}
    chosen, p, rows = draft(expand, root, gamma, best)
    # its expansion sets X_1 ... X_gamma
    extras, p_extras = expansion_sets(rows, chosen, p, sizes, edges)
    room = min(extras.numel(), max_nodes - gamma)
    joint, index = cap(p, p_extras, room)                         # (room,)
    n, m = how_many(p, joint)
    index = index[:m]

    # linearised: the root, the chain, the extras
    tokens = torch.cat((root, chosen[:n], extras.take(index)))
    # What x_{t+i} may see of the x_{t+j}:
    #     mask_CAPE(A)_ij = A_ij    if j <= gamma and pos(i) > j     the chain's tokens before it
    #                       A_ij    if i = j                         itself
    #                       -inf    otherwise                        neither other extras nor what is later
    # In a tree a node sees itself and its ancestors.  So the parent of x_{t+i} is the chain's token at
    # position pos(i) - 1 (the root, node 0, where pos(i) = 1), and an extra is nobody's parent.
    # X_1 is row 0 of the extras: pos(i) - 1 is the number of the row.
    K = max(1, extras.shape[1])
    parents = chain_parents(n, root.device)
    parents = torch.cat((parents, index // K))
    return Tree(tokens, parents)

# ------------------------------------------------------------------ what it is compared with
def fixed(expand, root, gamma=GAMMA, size=SIZE, max_nodes=MAX_NODES):
    """Section 5.4's control: `size` extras everywhere (4 is the mean size of CAPE's sets in the paper)."""
    one_size, no_edges = (size,), ()
    return cape(expand, root, gamma, one_size, no_edges, max_nodes)

def beam(expand, root, gamma=GAMMA, width=WIDTH):
    """Beam search (sections 5.3 and 5.4, Table 3): the `width` most probable sequences of each length.

    All of them are nodes.  Which of them a sequence continues is read back at each depth: one host read.
    """
    assert width >= 1, f"width is {width}: keep at least one sequence"
    tokens, parents = [root], [-1]
    frontier = [0]                                                # the nodes of the latest length
    score = torch.zeros(1, 1, device=root.device)                 # log p of the sequences that end there
    for _ in range(within(expand, gamma)):
        above = [parents[node] for node in frontier]
        rows = expand(tokens[-1], above)                          # (m, V)
        each = min(width, rows.shape[1])                          # no sequence can use more continuations
        p, x = rows.topk(each)                                    # (m, each)
        # log p(sequence, x) = log p(sequence) + log p_D(x | sequence)
        score = score + p.log()                                   # (m, each)
        most = min(width, score.numel())
        score, index = score.flatten().topk(most)
        # which of the m sequences each of them continues; those of probability zero come last, and go
        continued = index // each
        continued = continued.masked_fill(score.isneginf(), -1)
        continued = [m for m in continued.tolist() if m >= 0]     # the host read
        kept = len(continued)
        if kept == 0:
            break
        tokens.append(x.take(index[:kept]))
        score = score[:kept, None]                                # (kept, 1)
        parents += [frontier[m] for m in continued]
        frontier = range(len(parents) - kept, len(parents))
    tokens = torch.cat(tokens)
    parents = torch.tensor(parents, device=root.device)
    return Tree(tokens, parents)

def main():
    """Figure 3: "Attention is all the", and one extra beside each of its tokens ("you" beside "the")."""
    drafter = {
        "<root>": {"Attention": 0.85, "All": 0.15},
        "Attention": {"is": 0.9, "that": 0.1},
        "is": {"all": 0.95, "that": 0.05},
        "all": {"the": 0.82, "you": 0.18},
    }
    words = ["<root>", "Attention", "is", "all", "the", "All", "that", "you"]
    table = torch.zeros(8, 8)
    for here, row in drafter.items():
        for word, p in row.items():
            table[words.index(here), words.index(word)] = p

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
