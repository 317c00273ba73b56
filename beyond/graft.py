"""Graft: one tree from two drafters, a neural one and Max-Gram, which drafts without a forward.

It is in none of the three papers, and joins all three.  Max-Gram is Cascade's (maxgram.py), the
tree is EDD's, priced (priced.py), and the neural drafter may be GLIDE.  "Graft: prune-then-graft"
(arXiv 2605.20104, May 2026) has the same name and the same idea; its code was not read.

The idea.  One forward of a neural drafter takes about s_d, however many nodes it reads.  Max-Gram
suggests a chain of tokens without any forward.  So one forward reads a node *and* the chain that
Max-Gram suggests after it.  It gives a distribution after each token of the chain: how likely the
chain's next token is, and which other tokens may follow.  Where the drafter agrees with a chain of
n tokens, this one forward makes the tree n + 1 tokens deeper.

Mixture is a neural drafter and Max-Gram as one drafter, by the contract in verify.py: it goes with
every builder.  Graft is the builder that adds the chains.

The mixture.  At a node after which Max-Gram's match is LEAST tokens or longer, the builder sees

    (1 - w) p_draft + w delta_predicted                                                         (1)

instead of p_draft.  At all other nodes it sees p_draft, as it would without Max-Gram.  The mixture
weight w is Max-Gram's confidence by length of match.  Where an agreement (a, b, c) was fitted, it
also depends on the drafter's probability p of the predicted token:

    logit rho = a + b length + c logit p,      rho = (1 - w) p + w                              (2)

p = 0 is no opinion: the token is not among those that the drafter can predict, and w is the
confidence by length of match.  Where the drafter predicts nothing at all, p_draft is uniform, too.

    mixture = graft.Mixture(drafter, maxgram.MaxGram())
    verify.generate(target, mixture, graft.Graft(mixture), ids)
"""
from functools import partial

import torch

from beyond import priced
from maxgram import CONFIDENCE
from pct import Candidates

CHAIN = 16              # the most suggested tokens after one node
LEAST = 2               # a shorter match is not mixed, and its chain is not read by a forward

def common_prefix(a, b):
    """The number of tokens, from the first on, that two lists share."""
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length

class Mixture(priced.OnDemand):
    """A drafter and Max-Gram.  gram: a MaxGram.  agreement: (a, b, c) of Eq. 2, or None."""

    def __init__(self, drafter, gram, agreement=None):
        super().__init__(drafter)
        self.gram, self.agreement = gram, agreement

    def reset(self, probs):
        super().reset(probs)
        self.gram.reset()

    def begin(self, view, root_id):
        super().begin(view, root_id)
        self.gram.commit(view.ids)
        self.new = [*view.ids[1:], root_id]      # the last round's new tokens
        self.paths = []                          # by expand_index: the ids from the root to a node

    # ------------------------------------------------ the mixture
    def expand(self, tokens, parents):
        """One forward of the drafter -> the mixture (m, V).  tokens (m,), parents [m ints]"""
        # The tokens are read before the forward starts: afterwards the host would wait for it.
        predictions = self.predict(tokens.tolist(), parents)
        numbers = torch.tensor(predictions, dtype=torch.long, device=tokens.device)    # (k, 3)
        probs = super().expand(tokens, parents)                                        # (m, V)
        if not predictions:
            return probs
        rows, predicted, lengths = numbers.split(1, 1)                                 # (k, 1) each
        rows = rows.flatten()
        return probs.index_copy(0, rows, self.mixture(probs[rows], predicted, lengths))

    def predict(self, ids, parents):
        """Max-Gram's predictions, by LEAST tokens or more -> [(index in ids, token, length)]"""
        predictions = []
        for row, (token, parent) in enumerate(zip(ids, parents)):
            path = [*self.paths[parent], token] if parent >= 0 else [token]
            self.paths.append(path)
            predicted, lengths = self.gram.propose(path, 1)
            if predicted and lengths[0] >= LEAST:
                predictions.append((row, predicted[0], lengths[0]))
        return predictions

    def mixture(self, p_draft, predicted, lengths):
        """Eq. 1.  p_draft (k, V), predicted tokens (k, 1), lengths of matches (k, 1) -> (k, V)"""
        table = torch.tensor(self.gram.confidence, dtype=p_draft.dtype, device=p_draft.device)
        w = table[lengths.clamp(max=len(table) - 1)]                                   # (k, 1)
        p = p_draft.gather(1, predicted)                                               # (k, 1)
        if self.agreement is not None:
            a, b, c = self.agreement
            lengths = lengths.clamp(max=len(CONFIDENCE) - 1).to(p)
            inner = p.clamp(1e-6, 1 - 1e-6)
            rho = torch.sigmoid(a + b * lengths + c * torch.logit(inner))
            # From rho = (1 - w) p + w.  Where p is above rho, nothing is mixed in.
            solved = (rho - inner) / (1 - inner)
            w = torch.where(p > 0, solved.clamp(min=0), w)
        has_none = ~(p_draft > 0).any(1, keepdim=True)                                 # (k, 1)
        p_draft = p_draft.masked_fill(has_none, 1 / p_draft.shape[1])
        return ((1 - w) * p_draft).scatter_add(1, predicted, w)

# ---------------------------------------------------------------- the builder
class Graft(priced.PctCost):
    """PctCost with suggested chains, and its prices and settings."""

    def __init__(self, mixture, *prices, **settings):
        super().__init__(*prices, **settings)
        self.mixture, self.gram = mixture, mixture.gram
        self.undrafted = []                      # the last round's chain N_0

    def right(self):
        """As in PctCost: N_0 was verified, or would have been."""
        return common_prefix(self.undrafted, self.mixture.new)

    def draft(self, undrafted):
        """-> Candidates, and the Plan of what is verified of them."""
        # N_0, the tree without any forward: the root and the chain that is suggested after it.
        undrafted.token[0] = self.mixture.root_id              # Max-Gram needs the root's id
        before = self.chain(undrafted, CHAIN, "chain")
        self.undrafted = [undrafted.token[node] for node in before.nodes]
        # Beside a chain drafting gains less: it has a balance of its own.
        kind = "draft beside a chain" if before.nodes else "draft"
        if not self.pays(kind):
            return undrafted, before

        # Each forward reads the frontier and one suggested chain.
        candidates = Candidates(undrafted.expand, undrafted.root, self.width)
        candidates.token[0] = self.mixture.root_id
        r = self.grow_by_price(candidates, partial(self.grow, candidates))
        # After the nodes that no forward has read, suggested chains are added without a forward.
        price = r * self.prices.node_price
        for node in range(1, len(candidates.token)):
            if candidates.expand_index[node] < 0 and candidates.p[node] >= price:
                chain = priced.suggested(self.gram, candidates, node, CHAIN, price)
                priced.add_chain(candidates, node, chain)
        after = self.most_profitable(candidates)
        self.expect(kind, before, after)
        return candidates, after

    def grow(self, candidates, frontier):
        """As Candidates.grow; the same forward reads the chain suggested after the best node.

        A token of the chain becomes a node if the drafter has it among the `width` best children
        of the node before it.  Where it has not, the chain ends.
        """
        best = candidates.ranked(frontier)[0]
        # The forward also drafts children of the chain's last token.  They must not be too deep.
        longest = min(CHAIN, candidates.expand.remaining - candidates.depth[best] - 1)
        found = priced.suggested(
            self.gram, candidates, best, longest, self.prices.node_price, LEAST)
        if not found:
            return candidates.grow(frontier)

        # What the forward reads: the frontier with `best` as its last node, then the chain below.
        first_child = len(candidates.token)
        first_index = candidates.num_expanded
        nodes = sorted(frontier, key=lambda node: node == best)
        ids = [candidates.token[node] for node in nodes] + [token for token, _ in found]
        parents = [candidates.expand_index_above(node) for node in nodes]
        for i in range(len(nodes), len(ids)):
            parents.append(first_index + i - 1)
        c, x = candidates.forward(torch.tensor(ids, device=candidates.root.device), parents)

        # `children` are those of `best` in the end, then those of one token of the chain after the
        # other, while it is among them.
        children = {}
        for i, token in enumerate(ids):
            node = nodes[i] if i < len(nodes) else children.get(token)
            if node is None:
                break
            candidates.expand_index[node] = first_index + i
            children = candidates.add_children(node, c[i], x[i])
        return range(first_child, len(candidates.token))
