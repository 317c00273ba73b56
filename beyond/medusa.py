"""MEDUSA-1 (arXiv 2401.10774), a baseline of EDD's Table 1: heads that predict further ahead.

The idea.  The target's head predicts the next token from the last feature.  MEDUSA adds K heads,
which predict the K tokens after that one from the same feature, each by itself.  A round runs all
of them once.  So the prediction after a node depends on its depth alone, not on the path to it.

    paper                                       shape          name here
    h_t, the last hidden state                  (..., D)       feature: hidden_states[-1]
    h_t + SiLU(W_1 h_t + b)                     (..., K, D)    Medusa.forward, one for each head
    p_t^(k) = softmax(W_2 (...)), k = 1 ... K   (..., V)       heads[k - 1]; k counts from 0 here
    - lambda_k log p_t^(k)(y_{t+k+1})           ()             Medusa.loss_of; lambda_k: DECAY^k

Positions.  From feature i, which has read token i, the target's head predicts token i + 1, and head
k, counted from 0, token i + 2 + k.  In a round, i is the last committed token and the root is token
i + 1.  So head d predicts what follows a node at depth d.

The architecture is the published one: training/convert.py reads its weights.
"""
import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

DECAY = 0.8                      # the loss of head k has the weight DECAY^k
NO_LABEL = -100                  # F.cross_entropy ignores it

@dataclass
class Config:
    """Sizes and settings."""
    vocab: int                       # number of token ids: the target's
    width: int                       # D: the target's
    hidden: int                      # index of the last of the target's hidden_states
    heads: int = 5                   # K
    loss: str = "ce"                 # cross entropy of the text

    @classmethod
    def for_target(cls, model, heads=5):
        """The Config of a drafter for the Hugging Face model `model`."""
        c = model.config.get_text_config()
        return cls(c.vocab_size, c.hidden_size, c.num_hidden_layers, heads)

class Medusa(nn.Module):
    """K heads that read the feature of one token."""

    def __init__(self, config, head):
        """head: a trainable copy of the target's LM head, as which each W_2 starts.

        W_1 starts as zero.  Differs from the paper: b does, too.
        """
        super().__init__()
        self.config = config
        K, D = config.heads, config.width
        self.w = nn.ModuleList([nn.Linear(D, D).to(head.weight) for _ in range(K)])    # W_1 and b
        self.heads = nn.ModuleList([copy.deepcopy(head) for _ in range(K)])            # W_2
        for p in self.w.parameters():
            nn.init.zeros_(p)

    def forward(self, feature):
        """feature (..., D) -> (..., K, D): what each head reads"""
        feature = feature.to(self.w[0].weight)
        return torch.stack([feature + F.silu(w(feature)) for w in self.w], -2)

    def terms(self, batch, block):
        """As edd.EDD.terms -> [(x (B, T, K, D), labels (B, T, K), None)]

        At position j head k predicts token j + 1, from feature j - 1 - k.  Where there is none, its
        label is NO_LABEL.
        """
        T = batch.ids.shape[1]
        xs = self(batch.hidden[self.config.hidden])                            # (B, T, K, D)
        next_tokens = batch.ids.roll(-1, 1)                                    # (B, T)
        x, labels = [], []
        for k in range(self.config.heads):
            x.append(F.pad(xs[:, :, k], (0, 0, 1 + k, 0))[:, :T])              # (B, T, D)
            labels.append(F.pad(next_tokens[:, 1 + k:], (1 + k, 0), value=NO_LABEL)[:, :T])
        return [(torch.stack(x, 2), torch.stack(labels, 2), None)]

    def loss_of(self, x, labels):
        """The sum over k of lambda_k CE(head k), over n positions.  x (n, K, D), labels (n, K)."""
        total = 0
        for k, head in enumerate(self.heads):
            logits = head(x[:, k]).float()                                     # (n, V)
            total = total + DECAY ** k * F.cross_entropy(logits, labels[:, k], reduction="sum")
        return total

class Drafter:
    """Drafts with MEDUSA-1, by the contract of a drafter in verify.py."""

    def __init__(self, model, temperature=1.0):
        """temperature: for calibration, as in glide.Drafter."""
        self.model, self.temperature = model.eval(), temperature
        self.config = model.config
        self.needs = {"hidden": (self.config.hidden,)}

    def reset(self, probs):
        self.probs = probs

    @torch.no_grad()
    def begin(self, view, root):
        """Begin a round: run all heads, on the feature of the last committed token."""
        self.depths = []                                       # of this round's nodes
        feature = view.hidden[self.config.hidden][-1]                          # (D,)
        logits = [head(x) for head, x in zip(self.model.heads, self.model(feature))]
        # What follows a node at depth d; the last entry, nothing, is for all deeper nodes.
        table = F.pad(torch.stack(logits), (0, 0, 0, 1), value=-torch.inf)     # (K + 1, V)
        self.table = self.probs(table, self.temperature)

    def expand(self, tokens, parents):
        """Without a forward: probabilities (m, V) by the depth of each node.

        Differs from the paper, whose tree is fixed: any tree will do.
        """
        for parent in parents:
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        rows = [min(depth, self.config.heads) for depth in self.depths[-len(parents):]]
        return self.table.to(tokens.device)[rows]

    def keep(self, path):
        """End the round: there is nothing to keep."""
