"""Graft: one tree from two drafters, a neural one and Max-Gram, whose proposals cost nothing.

It is in none of the three papers, and joins all three.  Max-Gram is section 3.3 of Cascade
Speculative Drafting (arXiv 2312.11462); the tree is PCT's, of Effective Draft Decoder with Pruned
Candidate Tree (ACL 2025), at prices (priced.py); the neural drafter may be GLIDE (arXiv
2402.02082).

The idea.  Max-Gram's proposal costs nothing to draft.  A neural drafter's forward costs s_d,
however many nodes it reads.  So one forward reads a node and Max-Gram's chain after it, as far as
that is likely.
Its rows say how likely each token of the chain is, and what else may follow.  One forward over n
suggested tokens deepens the tree by n + 1.

Two parts, each of use without the other:

    Beside     the mixture of a drafter with Max-Gram: one drafter, by verify.py's contract, for any
               tree of any builder.
    graft      the builder, for a drafter that can suggest(token, parent, most, match) -> up to
               `most` ids that may follow a token below a node, and a confidence in each (lists).
               `parent` is the node's expand_index, `match` the least length of a match.  Where
               nothing is suggested, graft is pct_cost.

    symbol              shape      name here
    p_draft             (k, V)     the drafter's probabilities, where Max-Gram predicts a token
    p                   (k, 1)     p_draft of the token that Max-Gram predicts
    w                   (k, 1)     the weight of Max-Gram's prediction in the mixture
    rho                 (k, 1)     the predicted token's probability in the mixture
    D, N, E, T, r, s               as in priced.py

The mixture, at a node after which Max-Gram has a match of LEAST tokens or more:

    (1 - w) p_draft + w delta_predicted                                                         (1)

Without agreement w is Max-Gram's confidence by length of match.  With it, the drafter's p counts:

    logit rho = a + b length + c logit p,      rho = (1 - w) p + w                              (2)

Where the drafter has no prediction, its row is uniform and w is the confidence by length: there is
nothing to agree with.

To use it, with verify.py, cape.py, pct.py, maxgram.py and beyond/priced.py:

    both = graft.Beside(drafter, maxgram.MaxGram())
    verify.generate(target, both, graft.graft, text)

    python -m beyond.graft        # the demo: a drafter beside Max-Gram, and one forward for a chain
"""
from functools import partial
from types import SimpleNamespace

import torch

from beyond.priced import (
    NODE_PRICE, START, Announced, checked, draft_by_price, max_gram_alone, most_profitable,
    priced_chain, remember, worth_drafting)
from cape import constant
from maxgram import LENGTHS, MaxGram, N, ints
from pct import COST, DEPTH, MAX_NODES, WIDTH, clamp_depth

CHAIN = 16              # suggested tokens after one node, at most
LEAST = 2               # shorter matches are not mixed with a neural drafter's predictions

# ---------------------------------------------------------------- the builder
def graft(expand, root, cost=COST, node_price=NODE_PRICE, start=START, width=WIDTH, depth=DEPTH,
          max_nodes=MAX_NODES, chain=CHAIN):
    """pct_cost over two drafters: one whose forward costs s_d, one whose suggestions cost nothing.

    chain: suggested tokens after one node, at most.  depth: the most forwards.  Prices: as in
    pct_cost.  Returns a Tree of at most 1 + max_nodes nodes, no deeper than expand.remaining.
    """
    prices = checked(cost, node_price, start)
    depth = clamp_depth(expand, width, depth, max_nodes)
    gram = max_gram_alone(expand)
    if gram is not None:
        return priced_chain(expand, root, gram, prices, max_nodes)
    # What is suggested after the root is a tree already, without any forward: D = 0.
    alone = Announced(expand, root, width)
    hang(alone, 0, chain, least=node_price)
    before = most_profitable(alone, prices, max_nodes)
    if not worth_drafting(expand, before):
        return alone.tree(before.nodes)

    # Each forward reads the frontier and a suggested chain.
    candidates = Announced(expand, root, width)
    grow = partial(grow_with_chain, candidates, most=chain, least=node_price)
    r = draft_by_price(candidates, grow, prices, depth, max_nodes)
    # What is suggested after the nodes that no forward read hangs there at no cost.
    for j in candidates.nodes():
        unread = j not in candidates.expand_index
        if unread and candidates.p[j] > r * node_price:
            hang(candidates, j, chain, least=r * node_price)
    after = most_profitable(candidates, prices, max_nodes)
    remember(expand, before, after)
    return candidates.tree(after.nodes)

def suggested(candidates, node, most, least, match=0):
    """What may follow a node -> up to `most` ids, and a confidence in each: lists.

    least: only tokens whose joint probability p is expected above it.  match: as Beside.suggest's.
    """
    expand = candidates.expand
    drafter = getattr(expand, "drafter", None)
    if not hasattr(drafter, "suggest"):
        return [], []
    remaining = expand.remaining - candidates.depth[node]
    most = min(most, remaining)
    index = candidates.parent_index(node)
    ids, confidences = drafter.suggest(candidates.token[node], index, most, match)
    p = candidates.p[node]
    for n, c in enumerate(confidences):
        p *= c
        if p <= least:
            return ids[:n], confidences[:n]
    return ids, confidences

def hang(candidates, node, most, least):
    """Add the suggested chain below a node, without a forward, while p is above `least`."""
    for token, c in zip(*suggested(candidates, node, most, least)):
        node = candidates.add_child(node, c, token)

def children_of(candidates, node, c, x):
    """Add the children of a node, as Candidates.add_children -> {token: child}."""
    first = len(candidates.token)
    candidates.add_children(node, c, x)
    return {candidates.token[child]: child for child in range(first, len(candidates.token))}

def grow_with_chain(candidates, frontier, most, least):
    """As Candidates.grow, with a chain of up to `most` tokens after the most probable node.

    The chain is read in the same forward, while p is expected to be above `least`.  It ends at a
    token that is not among the best children.
    """
    best = candidates.ranked(frontier)[0]
    # Children of the chain's last token must be no deeper than what remains.
    remaining = getattr(candidates.expand, "remaining", float("inf"))
    deepest = remaining - candidates.depth[best] - 1
    chain, _ = suggested(candidates, best, min(most, deepest), least, LEAST)
    if not chain:
        return candidates.grow(frontier)

    # The forward reads the frontier, `best` last; then the chain, each token below the one before.
    first_child = len(candidates.token)
    first_index = candidates.given
    nodes = [node for node in frontier if node != best]
    nodes.append(best)
    index_of_best = first_index + len(nodes) - 1
    parents = [candidates.parent_index(node) for node in nodes]
    parents += range(index_of_best, index_of_best + len(chain))
    ids = [candidates.token[node] for node in nodes] + chain
    tokens = candidates.announce(ids, parents)
    c, x = candidates.draft(tokens, parents)

    for i, node in enumerate(nodes):
        candidates.expand_index[node] = first_index + i
        children = children_of(candidates, node, c[i], x[i])
    # Each token of the chain is a node, if it is among the best children of the one before.
    for i, token in enumerate(chain, len(nodes)):
        if token not in children:
            break
        node = children[token]
        candidates.expand_index[node] = first_index + i
        children = children_of(candidates, node, c[i], x[i])
    return range(first_child, len(candidates.token))

# ---------------------------------------------------------------- the mixture
def to_device(device, *lists):
    """Lists of integers as one tensor each, by one host-to-device copy."""
    numbers = [number for one in lists for number in one]
    lengths = [len(one) for one in lists]
    return torch.tensor(numbers, dtype=torch.long, device=device).split(lengths)

def merged(views):
    """Views of consecutive rounds as one, that committed what all of them did -> View."""
    if len(views) == 1:
        return views[0]
    tokens = torch.cat([view.tokens for view in views])
    ids = [token for view in views for token in view.ids]
    hidden = {}
    for layer in views[-1].hidden:
        hidden[layer] = torch.cat([view.hidden[layer] for view in views])
    # The last one's keys and values are those of all rounds.
    return views[-1]._replace(tokens=tokens, hidden=hidden, ids=ids)

class Beside:
    """A neural drafter beside Max-Gram: one drafter, by the contract at the top of verify.py.

    drafter: a drafter by that contract.  gram: a MaxGram.  agreement: (a, b, c) of Eq. 2, or None.

    expand's rows, in greedy decoding's softmax at `temperature`, are the mixture of Eq. 1 where
    Max-Gram has a match of LEAST tokens or more; elsewhere they are the drafter's own.
    predicted: of each node given to expand, the token that Max-Gram predicts after it, or None.

    A round that does not ask the drafter costs nothing there: it reads what it missed when asked.
    """

    def __init__(self, drafter, gram, agreement=None):
        self.drafter = drafter
        self.gram = gram
        self.agreement = agreement
        self.needs = drafter.needs
        self.reset()

    @property
    def temperature(self):
        """At which the drafter's confidence is calibrated, and so is the mixture."""
        return getattr(self.drafter, "temperature", 1.0)

    def reset(self):
        """Forget the sequence."""
        self.drafter.reset()
        self.gram.reset()
        self.views = []                          # of rounds that the drafter was not asked in
        self.root = None
        self.places = []
        self.predicted = []
        self.announced = None

    def begin(self, view):
        """A round starts.  Max-Gram is shown what was committed; the drafter, when it is asked."""
        self.views.append(view)
        # The ids and the root's on the host, where the view has them: no device-to-host sync.
        ids = getattr(view, "ids", None)
        self.gram.commit(view.tokens if ids is None else ids)
        self.root = getattr(view, "root", None)
        self.places = []
        self.predicted = []

    def keep(self, path):
        """Of the drafter's nodes these stay; to Max-Gram they come back as committed tokens."""
        asked = not self.views
        if asked:
            self.drafter.keep(path)

    def place_after(self, token, parent):
        """The Place after a token below a node (-1: below the committed text)."""
        above = self.gram.here() if parent < 0 else self.places[parent]
        return self.gram.after(above, token)

    def prediction(self, place, match):
        """What Max-Gram predicts next -> (token, or None; length of its match).

        None where that is shorter than `match`.
        """
        chunk, length = self.gram.chunk(place, 1)
        if not chunk or length < match:
            return None, length
        return chunk[0], length

    def suggest(self, token, parent=-1, most=N, match=0):
        """Max-Gram's chain after a token below a node -> up to `most` ids, a confidence in each.

        It ends before a token whose match is shorter than `match`.
        """
        ids, confidences = [], []
        place = self.place_after(token, parent)
        token, length = self.prediction(place, match)
        while token is not None and len(ids) < most:
            ids.append(token)
            confidences.append(self.gram.confidence_of(length))
            place = self.gram.after(place, token)
            token, length = self.prediction(place, match)
        return ids, confidences

    def predictions(self, ids, parents):
        """What Max-Gram predicts after new nodes, which are counted -> lists (k,).

        rows: the nodes after which it predicts a token; the tokens; the lengths of the matches.
        """
        rows, predicted, lengths = [], [], []
        for row, (token, parent) in enumerate(zip(ids, parents)):
            place = self.place_after(token, parent)
            following, length = self.prediction(place, LEAST)
            self.places.append(place)
            self.predicted.append(following)
            if following is not None:
                rows.append(row)
                predicted.append(following)
                lengths.append(length)
        return rows, predicted, lengths

    def announce(self, ids, parents, device):
        """Tokens that expand is given next, and their parents: lists -> tokens (m,) on the device.

        They need not be read back.  With Max-Gram's predictions they are one host-to-device copy.
        """
        tokens, *self.announced = to_device(device, ids, *self.predictions(ids, parents))
        return tokens

    def expand(self, tokens, parents):
        """One forward of the drafter.  tokens (m,), parents [m ints] -> logits (m, V), mixed."""
        if self.views:
            self.drafter.begin(merged(self.views))
            self.views = []
        found = self.announced
        self.announced = None
        if found is None:
            # Read before the forward is launched: afterwards the host would wait for it.
            known = parents == [-1] and self.root is not None
            ids = [self.root] if known else ints(tokens)
            found = to_device(tokens.device, *self.predictions(ids, parents))
        logits = self.drafter.expand(tokens, parents)                            # (m, V)
        rows, predicted, lengths = [x.to(logits.device) for x in found]
        return self.mixed(logits, rows, predicted, lengths) if len(rows) else logits

    def mixed(self, logits, rows, predicted, lengths):
        """Logits (m, V) whose `rows`, in a softmax at `temperature`, are Eq. 1.

        rows, predicted, lengths: (k,).
        """
        dtype = torch.promote_types(logits.dtype, torch.float32)
        table = constant(tuple(self.gram.confidence), dtype, logits.device)
        predicted = predicted[:, None]                                           # (k, 1)
        lengths = lengths[:, None]                                               # (k, 1)
        confidence = table[lengths.clamp(max=len(table) - 1)]                    # (k, 1)
        own = logits[rows].to(dtype) / self.temperature                          # (k, V)
        # Where the drafter has no prediction its row is -inf: there any token is as likely.
        none = own.isneginf().all(1, keepdim=True)                               # (k, 1)
        log_p = own.masked_fill(none, 0.0).log_softmax(1)
        p = log_p.gather(1, predicted).exp()                                     # (k, 1)
        w = confidence
        if self.agreement is not None:
            w = torch.where(none, confidence, self.weight(p, lengths))
        # Eq. 1: (1 - w) p_draft, and for the predicted token w more
        rho = p + w * (1 - p)
        mixture = log_p + torch.log1p(-w)
        mixture = mixture.scatter(1, predicted, rho.log())
        mixture = (self.temperature * mixture).to(logits.dtype)
        return logits.index_copy(0, rows, mixture)

    def weight(self, p, lengths):
        """w of Eq. 2 (k, 1), from p and the lengths of the matches, (k, 1) each."""
        a, b, c = self.agreement
        lengths = lengths.clamp(max=LENGTHS).to(p)
        p = p.clamp(1e-6, 1 - 1e-6)
        rho = torch.sigmoid(a + b * lengths + c * torch.logit(p))
        # rho = (1 - w) p + w, unless the drafter is surer by itself
        w = (rho - p) / (1 - p)
        return w.clamp(min=0)

# ---------------------------------------------------------------- demo
def main():
    """A drafter that always expects "over", beside Max-Gram, which knows the sentence."""
    words = ["", *"the quick brown fox jumps over a lazy dog . i saw :".split()]
    ids = {word: i for i, word in enumerate(words)}
    text = [ids[word] for word in "the quick brown fox jumps . i saw : the quick".split()]
    row = torch.zeros(len(words))
    row[ids["over"]] = 3.0
    forwards = []

    def drafter_expand(tokens, parents):
        forwards.append(len(parents))
        return row.repeat(len(parents), 1)

    drafter = SimpleNamespace(needs={}, reset=list, begin=id, expand=drafter_expand)
    both = Beside(drafter, MaxGram())
    both.begin(SimpleNamespace(tokens=torch.tensor(text)))
    brown = ids["brown"]

    def expand(tokens, parents):
        return both.expand(tokens, parents).softmax(-1)

    expand.drafter, expand.root, expand.remaining = both, brown, 4
    tree = graft(expand, torch.tensor([brown]), cost=0.01, node_price=0.1)
    shown = [words[i] for i in tree.tokens.tolist()]
    assert shown[:3] == ["brown", "fox", "jumps"], "the chain that Max-Gram suggests"
    assert "over" in shown, "beside it what the drafter expects"
    assert forwards[0] == 1 + 3, "one forward reads the root and the chain"
    print("tree:", *shown, f"  by {len(forwards)} forwards")

if __name__ == "__main__":
    main()
