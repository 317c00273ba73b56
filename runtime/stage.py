"""A language model that drafts trees, by verify.py's contract: a drafter for any tree.

    drafter = Stage(verify.Target(model))          # of the target's vocabulary
    verify.generate(target, drafter, cape.cape, ids)

A cascade's stage writes chains.  Here a model reads the tree instead, at each depth with the mask
and the positions of its nodes, as the target does.  Its cache holds the committed text alone.
"""
import torch

class Stage:
    """A drafter of trees: it reads all of a tree at each depth."""
    needs = {}
    temperature = 1.0                # of its confidence in the target's greedy choice, calibrated

    def __init__(self, target):
        self.target = target
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.target.reset()
        self.text, self.unread = [], []

    def begin(self, view):
        """A round starts.  Newly committed tokens are read together with its first nodes."""
        self.text += view.ids
        self.unread += view.ids
        self.tokens, self.parents = [], []
        if len(self.unread) == len(self.text) < self.target.capacity:
            self.target.sync(self.text)                          # a prompt, which may be long
            self.unread = []

    def expand(self, tokens, parents):
        """tokens (m,), parents [m ints] -> logits (m, V); -inf where the model's context ends."""
        self.tokens += tokens.tolist()
        self.parents += parents
        if len(self.text) + len(self.tokens) > self.target.capacity:
            return torch.full((len(parents), self.target.vocab), -torch.inf, device=tokens.device)
        k = len(self.unread)
        # The unread text is a chain, and the tree hangs from its end.
        chain = list(range(-1, k - 1))
        tree = [k + parent if parent >= 0 else k - 1 for parent in self.parents]
        tokens = torch.tensor(self.unread + self.tokens)
        logits = self.target.forward(tokens, torch.tensor(chain + tree))
        self.target.commit(list(range(k)), self.unread)
        self.unread = []
        return logits[-len(parents):].to(tokens.device)

    def keep(self, path):
        """Accepted tokens come back in the next view."""
