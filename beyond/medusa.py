"""MEDUSA-1 (arXiv 2401.10774), a baseline of EDD's Table 1: heads that predict further ahead.

The idea.  The target's head predicts the next token from the last feature.  MEDUSA adds K heads,
which predict the K tokens after that one from the same feature, each by itself.  A round runs all
of them once.  So what is predicted after a node depends on its depth alone, not on the path to it.

    paper                                       shape          name here
    h_t, the last hidden state                  (..., D)       feature: hidden_states[-1]
    h_t + SiLU(W_1 h_t + b)                     (..., D)       Medusa.forward, one for each head
    p_t^(k) = softmax(W_2 (...)), k = 1 ... K   (..., V)       heads[k - 1]; k counts from 0 here
    - lambda_k log p_t^(k)(y_{t+k+1})           ()             Medusa.loss; lambda_k: DECAY^k

Positions.  Feature i has read token i, and the target's head predicts token i + 1 from it.  So head
k, counted from 0, predicts token i + 2 + k.  In a round, i is the last committed token and the root
is token i + 1.  So head d predicts what follows a node at depth d.

Differences from the paper:
 1. It drafts any tree.  After a node that is deeper than the heads reach there is no prediction.
 2. As there, W_2 starts as the target's head and W_1 as zero; here b starts as zero, too.
 3. The loss mask of plain training says which tokens are labels.  Head k learns from the same ones.

The architecture is the published one: training/convert.py reads its weights.

    python train.py medusa
"""
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import edd

HEADS = 5                        # K
DECAY = 0.8                      # head k's loss has the weight DECAY^k
VARIANTS = {"medusa": {"hidden": -1, "loss": "ce"}}                # for train.py: name, settings

@dataclass
class Config(edd.Config):
    """As edd.Config.  heads: K."""
    loss: str = "ce"
    kind: str = "medusa"
    heads: int = HEADS

    @classmethod
    def for_target(cls, model, hidden=-1, **more):
        """As edd.Config.for_target.  hidden: the last of the hidden_states are the features."""
        return super().for_target(model, hidden, **more)

class Medusa(edd.DraftModel):
    """K heads that read the feature of one token."""
    config_class = Config

    def __init__(self, config, model):
        super().__init__(config, model)
        self.w = nn.ModuleList()                               # W_1 and b
        self.heads = nn.ModuleList()                           # W_2
        for _ in range(config.heads):
            w = nn.Linear(config.width, config.width).to(self.target.like)
            nn.init.zeros_(w.weight)
            nn.init.zeros_(w.bias)
            self.w.append(w)
            self.heads.append(self.own(model.get_output_embeddings()))

    def forward(self, feature):
        """feature (..., D) -> list of K tensors (..., D): what each head reads"""
        feature = feature.to(self.w[0].weight)
        return [feature + F.silu(w(feature)) for w in self.w]

    def loss(self, batch):
        """As edd.EDD.loss: the sum over k of DECAY^k times the cross entropy of head k."""
        total = 0
        xs = self(batch["hidden"][self.config.hidden])                         # K of (B, T, D)
        for k, x in enumerate(xs):
            # At position i the label is token i + 2 + k.  Plain training predicts that token at
            # position i + 1 + k, so the loss mask is read there.
            labels = batch["ids"].roll(-2 - k, 1)                              # (B, T)
            loss_mask = F.pad(batch["learn"], (0, 1 + k))[:, 1 + k:]           # (B, T)
            loss = partial(edd.cross_entropy, self.heads[k])
            total += DECAY ** k * batch["sum"](loss, loss_mask, x, labels)
        return total / batch["count"]

class Drafter(edd.Drafter):
    """Drafts with MEDUSA-1, by the contract of a drafter in verify.py."""

    @torch.no_grad()
    def begin(self, view):
        """Start a round: run all heads, on the last committed token's feature."""
        self.paths = []
        feature = view.hidden[self.config.hidden][-1]                          # (D,)
        xs = self.model(feature)                                               # K of (D,)
        logits = [head(x) for head, x in zip(self.model.heads, xs)]            # K of (V,)
        none = torch.full_like(logits[0], float("-inf"))
        # Row d: what follows a node at depth d.  The last row is for all deeper nodes.
        self.table = torch.stack([*logits, none])                              # (K + 1, V)

    def expand(self, tokens, parents):
        """As in the contract, without a forward -> logits (m, V) by the depth of each node."""
        depths = [len(path) - 1 for path in self.add_paths(parents)]
        deepest = self.config.heads
        return self.table[[min(depth, deepest) for depth in depths]]
