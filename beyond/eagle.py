"""EAGLE (arXiv 2401.15077), a baseline of EDD's Table 1: a layer that predicts features.

The idea.  A feature is what the target's LM head reads: the last hidden state, after the last norm.
EAGLE is one layer of the target's class.  It reads the embedding of token i together with the
feature of token i - 1, and predicts the feature of token i.  The target's own head, frozen, turns
this into logits of token i + 1.  The features of committed tokens are known from the target.  At a
drafted token EAGLE has to go on from its own prediction.

    paper                               shape          name here
    t_i, the tokens                     (B, T)         ids
    f_i, the features                   (B, T, D)      feature: hidden_states[-1]
    FC([e(t_i), f_{i-1}])               (B, T - 1, D)  Eagle.inputs
    f^_i, the predicted features        (B, T - 1, D)  Eagle.forward
    Head(f^_i)                          (n, V)         Eagle.logits
    L_reg = SmoothL1(f_i, f^_i)         ()             in Eagle.divergence
    L_cls = CE(P_t, P_d), w_cls         ()             in Eagle.divergence, W_CLS

Differences from the paper:
 1. It drafts any tree.  A node needs the predicted feature of its parent.  So expand runs the layer
    once for each generation of the nodes that it is given.
 2. Training adds no noise to the features.
 3. SmoothL1 is a mean over D, so its gradient on a feature falls as 1 / sqrt(D), and that of the
    cross entropy does not.  w_cls is 0.1 at the published D = 4096; here it is 0.1 sqrt(4096 / D),
    which keeps the balance of the two.
 4. The first token of a text has no feature before it: it has no KV entry and no prediction.

The architecture is the published one: training/convert.py reads its weights.

    python train.py eagle
"""
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import edd

W_CLS = 0.1                      # w_cls ...
PUBLISHED = 4096                 # ... at this width (difference 3)
VARIANTS = {"eagle": {"hidden": -1, "loss": "smooth l1 + ce"}}     # for train.py: name, settings

@dataclass
class Config(edd.Config):
    """As edd.Config.  bias: whether FC has one; some published weights have none."""
    loss: str = "smooth l1 + ce"
    kind: str = "eagle"
    bias: bool = True

    @classmethod
    def for_target(cls, model, hidden=-1, **more):
        """As edd.Config.for_target.  hidden: the last of the hidden_states are the features."""
        return super().for_target(model, hidden, **more)

# ---------------------------------------------------------------- the draft model
class Eagle(edd.DraftModel):
    """FC and one layer, between the target's embedding and head, which are frozen."""
    config_class = Config

    def __init__(self, config, model):
        super().__init__(config, model)
        width = config.width
        self.fc = nn.Linear(2 * width, width, config.bias).to(self.target.like)
        self.layer = self.fresh_layer(model)
        # The published layer has no norm before its attention.
        self.layer.input_layernorm = nn.Identity()

    def take(self, model, decoder):
        """As edd.DraftModel.take, with the target's embedding and head."""
        super().take(model, decoder)
        self.target.embed = model.get_input_embeddings()
        weight = model.get_output_embeddings().weight.detach()
        self.target.head = partial(F.linear, weight=weight)

    def inputs(self, ids, before):
        """FC([e(t_i), f_{i-1}]).  ids (..., m), before (..., m, D) -> (..., m, D)"""
        with torch.no_grad():
            embedded = self.target.embed(ids)                                  # (..., m, D)
        x = torch.cat((embedded, before), -1)                                  # (..., m, 2 D)
        x = x.to(self.fc.weight.dtype)
        # Autocast would give the layer another dtype than its weights'.
        return self.fc(x).to(x.dtype)

    def logits(self, feature):
        """Head(f).  feature (m, D) -> (m, V)"""
        return self.target.head(feature)

    def forward(self, ids, feature):
        """ids (B, T), the target's feature (B, T, D) -> f^_1 ... f^_{T-1} (B, T - 1, D)"""
        x = self.inputs(ids[:, 1:], feature[:, :-1])
        return self.causal(x)

    def divergence(self, predicted, feature, target_logits):
        """L_reg + w_cls L_cls, summed over n positions -> ()

        predicted, feature (n, D): f^ and f.  target_logits (n, V).
        """
        width = predicted.shape[-1]
        distance = F.smooth_l1_loss(predicted.float(), feature.float(), reduction="sum")
        p_target = target_logits.float().softmax(-1)                           # (n, V)
        cross_entropy = edd.cross_entropy(self.logits, predicted, p_target)
        w_cls = W_CLS * (PUBLISHED / width) ** 0.5
        return distance / width + w_cls * cross_entropy

    def loss(self, batch):
        """As edd.EDD.loss."""
        feature = batch["hidden"][self.config.hidden]                          # (B, T, D)
        predicted = self(batch["ids"], feature)                                # (B, T - 1, D)
        # The first token has no prediction.  Padding stands there, and the loss mask leaves it out.
        predicted = F.pad(predicted, (0, 0, 1, 0))                             # (B, T, D)
        loss_mask = F.pad(batch["learn"][:, 1:], (1, 0))                       # (B, T)
        total = batch["sum"](self.divergence, loss_mask, predicted, feature, batch["logits"])
        return total / batch["count"]

# ---------------------------------------------------------------- decoding
class Drafter(edd.Drafter):
    """Drafts with EAGLE, by the contract of a drafter in verify.py."""

    def reset(self):
        """Forget the sequence."""
        super().reset()
        # Row 0: the target's feature of the last committed token, None before the first round.
        # Row 1 + i: the predicted feature of node i.
        self.features = None                                                   # (1 + nodes, D)

    @torch.no_grad()
    def begin(self, view):
        """Start a round: encode the newly committed tokens, each with the feature before it."""
        self.paths = []
        new = view.hidden[self.config.hidden].to(self.device)                  # (k, D)
        known = new
        if self.features is not None:
            known = torch.cat((self.features[:1], new))                        # (1 + k, D)
        before = known[:-1]
        # Of a whole prompt the first token is left out: no feature comes before it.
        tokens = view.tokens[len(view.tokens) - len(before):]
        self.encode(self.model.inputs(tokens.to(self.device), before))
        self.features = known[-1:]

    @torch.no_grad()
    def expand(self, tokens, parents):
        """As edd.Drafter.expand, with one forward for each generation of the nodes."""
        tokens = tokens.to(self.device)
        logits = []
        while parents:
            # The first `count` nodes: their parents have features already.
            known = len(self.paths)
            count = 1
            while count < len(parents) and parents[count] < known:
                count += 1
            before = self.features[[1 + parent for parent in parents[:count]]]         # (count, D)
            x = self.model.inputs(tokens[:count], before)                              # (count, D)
            predicted = self.run_nodes(x, parents[:count])                             # (count, D)
            self.features = torch.cat((self.features, predicted))
            logits.append(self.model.logits(predicted))
            tokens = tokens[count:]
            parents = parents[count:]
        return torch.cat(logits)
