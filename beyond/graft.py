"""Graft: one tree from two drafters, a neural one and Max-Gram, which drafts without a forward.

It is in none of the three papers, and joins all three.  Max-Gram is section 3.3 of Cascade
Speculative Drafting (arXiv 2312.11462).  The tree is the pruned candidate tree of Effective Draft
Decoder with Pruned Candidate Tree (ACL 2025), priced (priced.py).  The neural drafter may be GLIDE
(arXiv 2402.02082).

The idea.  One forward of a neural drafter takes about s_d, however many nodes it reads.  Max-Gram
suggests a chain of tokens without any forward.  So one forward reads a node *and* the chain that
Max-Gram suggests after it.  It gives a distribution after each token of the chain: how likely the
chain's next token is, and which other tokens may follow.  Where the drafter agrees with a chain of
n tokens, this one forward makes the tree n + 1 tokens deeper.

There are two parts, and each is of use without the other:

    Mixture    a neural drafter and Max-Gram as one drafter, by verify.py's contract: it goes with
               every builder.
    graft      the builder.  It works with any drafter that has `suggest` (see priced.py), as
               Mixture does.  Where nothing is suggested, graft builds the tree of pct_cost.

    symbol              shape      name here
    p_draft             (k, V)     the drafter's probabilities, where Max-Gram predicts a token
    p                   (k, 1)     p_draft of the token that Max-Gram predicts
    w                   (k, 1)     the mixture weight of Max-Gram's prediction
    rho                 (k, 1)     the predicted token's probability in the mixture

The mixture.  At a node after which Max-Gram's match is LEAST tokens or longer, the builder sees

    (1 - w) p_draft + w delta_predicted                                                         (1)

instead of p_draft.  At all other nodes it sees p_draft.  p_draft is what the builder would see
without Max-Gram: calibrated probabilities under greedy decoding, and under sampling those after the
target's own temperature, top-k and top-p.  The mixture weight w is Max-Gram's confidence by length
of match.  Where an agreement (a, b, c) was fitted, it also depends on the drafter's p:

    logit rho = a + b length + c logit p,      rho = (1 - w) p + w                              (2)

Where the drafter has no prediction, p_draft is uniform and w is the confidence by length of match:
there is nothing to agree with.

    drafter = graft.Mixture(drafter, maxgram.MaxGram())
    verify.generate(target, drafter, graft.graft, ids)

    python -m beyond.graft        # the demo: a mixture, and one forward for a chain
"""
from functools import partial
from types import SimpleNamespace

import torch

from beyond.priced import (
    NODE_PRICE, START, Announced, Prices, draft_by_price, max_gram_alone, most_profitable,
    priced_chain, remember, worth_drafting)
from cape import constant
from maxgram import LENGTHS, MaxGram, ints
from pct import COST, DEPTH, MAX_NODES, WIDTH, clamp_depth

CHAIN = 16              # the most suggested tokens after one node
LEAST = 2               # a shorter match is not mixed, and its chain is not read by a forward

# ---------------------------------------------------------------- the builder
def graft(expand, root, cost=COST, node_price=NODE_PRICE, start=START, width=WIDTH, depth=DEPTH,
          max_nodes=MAX_NODES, chain=CHAIN):
    """pct_cost with suggested chains.  chain: the most suggested tokens after one node.

    depth: the most forwards.  Prices: as in pct_cost.  Returns a Tree of at most 1 + max_nodes
    nodes, no deeper than expand.remaining.
    """
    prices = Prices(cost, node_price, start)
    assert min(prices) >= 0, f"{prices}: times are not below zero"
    depth = clamp_depth(expand, width, depth, max_nodes)
    gram = max_gram_alone(expand)
    if gram is not None:
        return priced_chain(expand, root, gram, prices, max_nodes)

    # The tree without any forward: the root and the chain that is suggested after it.
    undrafted = Announced(expand, root, width)
    add_suggested(undrafted, 0, chain, least=node_price)
    before = most_profitable(undrafted, prices, max_nodes)
    if not worth_drafting(expand, before):
        return undrafted.tree(before.nodes)

    # Each forward reads the frontier and one suggested chain.
    candidates = Announced(expand, root, width)
    grow = partial(grow_with_chain, candidates, most=chain, least=node_price)
    r = draft_by_price(candidates, grow, prices, depth, max_nodes)
    # After the nodes that no forward has read, suggested chains are added without a forward.
    price = r * node_price
    for j in candidates.nodes():
        if j not in candidates.expand_index and candidates.p[j] >= price:
            add_suggested(candidates, j, chain, least=price)
    after = most_profitable(candidates, prices, max_nodes)
    remember(expand, before, after)
    return candidates.tree(after.nodes)

def suggested(candidates, node, most, least, match=0):
    """The chain that is suggested after a node -> up to `most` ids, a confidence in each: lists.

    It ends before the first token whose joint probability, by these confidences, is below `least`.
    match: as in drafter.suggest.
    """
    expand = candidates.expand
    drafter = getattr(expand, "drafter", None)
    if not hasattr(drafter, "suggest"):
        return [], []
    most = min(most, expand.remaining - candidates.depth[node])
    index = candidates.parent_index(node)
    ids, confidences = drafter.suggest(candidates.token[node], index, most, match)
    p = candidates.p[node]
    for n, c in enumerate(confidences):
        p *= c
        # No node has probability zero, whatever a node costs.
        if p < least or p == 0:
            return ids[:n], confidences[:n]
    return ids, confidences

def add_suggested(candidates, node, most, least):
    """Add the suggested chain after a node to the candidates, without a forward."""
    ids, confidences = suggested(candidates, node, most, least)
    for token, c in zip(ids, confidences):
        node = candidates.add_child(node, c, token)

def add_children(candidates, node, c, x):
    """As Candidates.add_children -> the children, as {token: node}"""
    first_child = len(candidates.token)
    candidates.add_children(node, c, x)
    children = range(first_child, len(candidates.token))
    return {candidates.token[child]: child for child in children}

def grow_with_chain(candidates, frontier, most, least):
    """As Candidates.grow; the same forward reads the chain suggested after the best node.

    most, least: as in `suggested`.  A token of the chain becomes a node if the drafter has it among
    the `width` best children of the node before it.  Where it has not, the chain ends.
    """
    best = candidates.ranked(frontier)[0]
    # The forward also drafts children of the chain's last token.  They must not be too deep.
    remaining = getattr(candidates.expand, "remaining", float("inf"))
    longest = remaining - candidates.depth[best] - 1
    chain, _ = suggested(candidates, best, min(most, longest), least, LEAST)
    if not chain:
        return candidates.grow(frontier)

    # What the forward reads: the frontier with `best` as its last node, then the chain below it.
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
        children = add_children(candidates, node, c[i], x[i])
    # `children` are those of `best` now, then those of one token of the chain after the other.
    for i, token in enumerate(chain, len(nodes)):
        if token not in children:
            break
        node = children[token]
        candidates.expand_index[node] = first_index + i
        children = add_children(candidates, node, c[i], x[i])
    return range(first_child, len(candidates.token))

# ---------------------------------------------------------------- the mixture
def merged(views):
    """The views of consecutive rounds as one View, of a round that committed all their tokens."""
    if len(views) == 1:
        return views[0]
    tokens = torch.cat([view.tokens for view in views])
    ids = [token for view in views for token in view.ids]
    hidden = {}
    for layer in views[-1].hidden:
        hidden[layer] = torch.cat([view.hidden[layer] for view in views])
    # The last view's keys and values contain those of the earlier ones.
    return views[-1]._replace(tokens=tokens, hidden=hidden, ids=ids)

def to_device(device, *lists):
    """Lists of integers as one tensor each, by one host-to-device copy."""
    numbers = torch.tensor(sum(lists, []), dtype=torch.long, device=device)
    return numbers.split([len(one) for one in lists])

class Mixture:
    """A neural drafter mixed with Max-Gram: one drafter, by the contract at the top of verify.py.

    drafter: a drafter by that contract.  gram: a MaxGram.  agreement: (a, b, c) of Eq. 2, or None.

    expand gives the drafter's own logits, and adjust turns the probabilities that they become into
    the mixture of Eq. 1.

    In rounds that do not call expand, the neural drafter does nothing.  What these rounds committed
    it reads, all at once, in the next round that does.
    """

    def __init__(self, drafter, gram, agreement=None):
        self.drafter = drafter
        self.gram = gram
        self.agreement = agreement
        self.needs = drafter.needs
        self.temperature = getattr(drafter, "temperature", 1.0)
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.drafter.reset()
        self.gram.reset()
        self.unread = []                         # views that the neural drafter has not been shown
        self.announced = None                    # predictions after the nodes given next to expand

    def begin(self, view):
        """A round starts: Max-Gram is shown at once what was committed, the drafter by expand."""
        self.unread.append(view)
        self.gram.commit(view.ids)
        self.root = view.root
        self.places = []                         # by expand_index: the text's end at each node

    def keep(self, path):
        """As in the contract.  To Max-Gram accepted nodes come back as committed tokens."""
        drafted = not self.unread
        if drafted:
            self.drafter.keep(path)

    # ------------------------------------------------ Max-Gram's predictions
    def place_after(self, token, parent):
        """maxgram.Place after a token below the node with expand_index `parent` (-1: the root's)"""
        before = self.gram.here() if parent < 0 else self.places[parent]
        return self.gram.after(before, token)

    def suggest(self, token, parent, most, match):
        """Max-Gram's chain after a token (priced.py) -> up to `most` ids, a confidence in each."""
        ids, confidences = [], []
        place = self.place_after(token, parent)
        while len(ids) < most:
            chunk, length = self.gram.chunk(place, 1)
            if not chunk or length < match:
                break
            ids += chunk
            confidences.append(self.gram.confidence_of(length))
            place = self.gram.after(place, chunk[0])
        return ids, confidences

    def predict(self, ids, parents):
        """What Max-Gram predicts after k of m new nodes -> three lists of k ints.

        They are the indices of the k nodes among the m, the predicted tokens, and the lengths of
        the matches.
        """
        rows, predicted, lengths = [], [], []
        for row, (token, parent) in enumerate(zip(ids, parents)):
            place = self.place_after(token, parent)
            chunk, length = self.gram.chunk(place, 1)
            self.places.append(place)
            if chunk and length >= LEAST:
                rows.append(row)
                predicted += chunk
                lengths.append(length)
        return rows, predicted, lengths

    def announce(self, ids, parents, device):
        """As in priced.py: what expand is given next, as lists -> tokens (m,) on the device."""
        tokens, *self.announced = to_device(device, ids, *self.predict(ids, parents))
        return tokens

    # ------------------------------------------------ the mixture
    def expand(self, tokens, parents):
        """One forward of the drafter.  tokens (m,), parents [m ints] -> its own logits (m, V)."""
        if self.unread:
            self.drafter.begin(merged(self.unread))
            self.unread = []
        self.predictions = self.announced
        self.announced = None
        if self.predictions is None:
            # The tokens are read before the forward starts: afterwards the host would wait for it.
            is_root = parents == [-1] and self.root is not None
            ids = [self.root] if is_root else ints(tokens)
            self.predictions = to_device(tokens.device, *self.predict(ids, parents))
        return self.drafter.expand(tokens, parents)

    def adjust(self, probs):
        """What a builder sees of the last expand.  probs (m, V) -> (m, V), Eq. 1 where it applies.

        probs: as a builder would see them without Max-Gram.  A row of zeros is no prediction.
        """
        rows, predicted, lengths = self.predictions
        if not len(rows):
            return probs
        p_draft = probs[rows]                                                    # (k, V)
        mixture = self.mixture(p_draft, predicted[:, None], lengths[:, None])
        return probs.index_copy(0, rows, mixture)

    def mixture(self, p_draft, predicted, lengths):
        """Eq. 1.  p_draft (k, V), predicted tokens (k, 1), lengths (k, 1) -> (k, V)"""
        table = constant(tuple(self.gram.confidence), p_draft.dtype, p_draft.device)
        confidence = table[lengths.clamp(max=len(table) - 1)]                    # (k, 1)
        has_none = ~(p_draft > 0).any(1, keepdim=True)                           # (k, 1)
        p_draft = p_draft.masked_fill(has_none, 1 / p_draft.shape[1])
        p = p_draft.gather(1, predicted)                                         # (k, 1)
        w = confidence
        if self.agreement is not None:
            w = torch.where(has_none, confidence, self.weight(p, lengths))
        return ((1 - w) * p_draft).scatter_add(1, predicted, w)

    def weight(self, p, lengths):
        """w of Eq. 2 (k, 1), from p and the lengths of the matches, (k, 1) each."""
        a, b, c = self.agreement
        lengths = lengths.clamp(max=LENGTHS).to(p)
        p = p.clamp(1e-6, 1 - 1e-6)
        rho = torch.sigmoid(a + b * lengths + c * torch.logit(p))
        # From rho = (1 - w) p + w.  Where the drafter's own p is above rho, nothing is mixed in.
        w = (rho - p) / (1 - p)
        return w.clamp(min=0)

# ---------------------------------------------------------------- demo
def main():
    """A drafter that always expects "over", mixed with Max-Gram, which finds the sentence again."""
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
    mixed = Mixture(drafter, MaxGram())
    mixed.begin(SimpleNamespace(ids=text, root=ids["brown"]))

    def expand(tokens, parents):
        logits = mixed.expand(tokens, parents)
        return mixed.adjust(logits.softmax(-1))

    expand.drafter, expand.root, expand.remaining = mixed, mixed.root, 4
    tree = graft(expand, torch.tensor([mixed.root]), cost=0.01, node_price=0.1)
    shown = [words[i] for i in tree.tokens.tolist()]
    assert shown[:3] == ["brown", "fox", "jumps"], "the chain that Max-Gram suggests"
    assert "over" in shown, "and what the drafter expects"
    assert forwards[0] == 1 + 3, "one forward reads the root and the chain"
    print("tree:", *shown, f"  by {len(forwards)} forwards")

if __name__ == "__main__":
    main()
