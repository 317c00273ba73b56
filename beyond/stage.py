"""A language model as a drafter of trees, for graft.Mixture: in none of the papers.

    drafter = Stage(verify.Target(small_model))

In a cascade a language model writes chains, token by token (cascade.py).  Here it follows the
contract at the top of verify.py.
"""
import torch

class Stage:
    """A language model whose forwards read the whole tree, by its mask and the nodes' positions.

    Its KV cache holds committed tokens only, so each forward reads all nodes of the round anew.
    """
    needs = {}

    def __init__(self, target, temperature=1.0):
        """target: the language model as a verify.Target, with the target's vocabulary size.

        temperature: the calibration temperature.
        """
        self.target, self.temperature = target, temperature

    def reset(self, probs):
        """Start a new sequence."""
        self.probs = probs
        self.target.reset()
        self.text, self.unread = [], []

    def begin(self, view, root):
        """A round starts.  Newly committed tokens are read together with its first nodes."""
        self.text += view.ids
        self.unread += view.ids
        self.tokens, self.parents = [], []
        if len(self.unread) == len(self.text) < self.target.capacity:
            self.target.align(self.text)            # a prompt, which may be long
            self.unread = []

    def expand(self, tokens, parents):
        """As in the contract; no prediction where the model's context is full."""
        self.tokens += tokens.tolist()
        self.parents += parents
        if len(self.text) + len(self.tokens) > self.target.capacity:
            return torch.zeros(len(parents), self.target.vocab, device=tokens.device)
        # The k unread tokens are a chain, and the tree hangs from its last one.
        k = len(self.unread)
        chain = list(range(-1, k - 1))
        tree = [k + parent if parent >= 0 else k - 1 for parent in self.parents]
        nodes = torch.tensor(self.unread + self.tokens)
        logits, states = self.target.forward(nodes, torch.tensor(chain + tree))   # (k + nodes, V)
        self.target.commit(list(range(k)), self.unread, states)
        self.unread = []
        return self.probs(logits[-len(parents):].to(tokens.device), self.temperature)

    def keep(self, path):
        """Nothing to do: accepted tokens come back in the next view."""
