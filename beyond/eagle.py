"""EAGLE (arXiv 2401.15077), a baseline of EDD's Table 1: a layer that predicts features.

The idea.  A feature is what the target's LM head reads: the last hidden state, after the last norm.
EAGLE is one layer of the target's class.  It reads the embedding of token i together with the
feature of token i - 1, and predicts the feature of token i.  The target's own head, frozen, turns
this into logits of token i + 1.  The features of committed tokens are known from the target.  At a
drafted token EAGLE has to go on from its own prediction.

    paper                               shape          name here
    f_i, the features                   (B, T, D)      feature: hidden_states[-1]
    FC([e(t_i), f_{i-1}])               (B, T - 1, D)  Eagle.inputs
    f^_i, the predicted features        (B, T - 1, D)  Eagle.forward
    Head(f_i), Head(f^_i)               (n, V)         Eagle.head: the target's
    L_reg = SmoothL1(f_i, f^_i)         ()             in Eagle.loss_of
    L_cls = CE(P_t, P_d), w_cls         ()             in Eagle.loss_of

The architecture is the published one: training/convert.py reads its weights.
"""
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import edd

@dataclass
class Config(edd.Config):
    """As edd.Config."""
    loss: str = "smooth l1 + ce"

    @classmethod
    def for_target(cls, model, hidden=-1, **more):
        """As edd.Config.for_target.  hidden: the last of the hidden_states are the features."""
        return super().for_target(model, hidden, **more)

# ---------------------------------------------------------------- the draft model
class Eagle(nn.Module):
    """FC and one layer, between the target's embedding and head, which are frozen."""

    def __init__(self, config, parts):
        """parts: an edd.Parts whose embed and head are the target's own."""
        super().__init__()
        self.config, self.layer = config, parts.layer
        # Functions, not modules: they are neither trained nor saved with the drafter.
        self.embed, self.head = partial(parts.embed), partial(parts.head)
        self.rotary = partial(parts.rotary)
        self.fc = nn.Linear(2 * config.width, config.width).to(next(self.layer.parameters()))
        # The published layer has no norm before its attention.
        self.layer.input_layernorm = nn.Identity()

    def inputs(self, ids, before):
        """FC([e(t_i), f_{i-1}]).  ids (..., m), before (..., m, D) -> (..., m, D)"""
        x = torch.cat((self.embed(ids).to(before), before), -1)                # (..., m, 2 D)
        x = x.to(self.fc.weight)
        # Autocast would give the layer another dtype than its weights'.
        return self.fc(x).to(x)

    def forward(self, ids, feature):
        """ids (B, T), the target's feature (B, T, D) -> f^_1 ... f^_{T-1} (B, T - 1, D)

        Differs from the paper, which adds noise to the features in training.
        """
        x = self.inputs(ids[:, 1:], feature[:, :-1])
        position = torch.arange(x.shape[1], device=x.device)
        causal = position[:, None] >= position[None, :]
        return edd.run_layer(self.layer, self.rotary, x, position[None], causal)

    def terms(self, batch, block):
        """As edd.EDD.terms -> [(f^ (B, T, D), f (B, T, D), mask (B, T))]"""
        feature = batch.hidden[self.config.hidden]                             # (B, T, D)
        # No feature precedes the first token, so it has no prediction: the mask leaves it out.
        predicted = F.pad(self(batch.ids, feature), (0, 0, 1, 0))              # (B, T, D)
        mask = F.pad(torch.ones_like(batch.ids[:, 1:], dtype=torch.bool), (1, 0))          # (B, T)
        return [(predicted, feature, mask)]

    def loss_of(self, predicted, feature):
        """L_reg + w_cls L_cls, summed over n positions.  f^ and f (n, D) -> ()

        Differs from the paper, where w_cls is 0.1 and D is 4096.  SmoothL1 is a mean over D, so its
        gradient on a feature falls as 1 / sqrt(D), and that of the cross entropy does not.
        """
        width = feature.shape[-1]
        distance = F.smooth_l1_loss(predicted.float(), feature.float(), reduction="sum")
        # P_t = softmax(Head(f)), P_d = softmax(Head(f^))
        with torch.no_grad():
            p_target = self.head(feature).float().softmax(-1)                  # (n, V)
        logits = self.head(predicted).float()                                  # (n, V)
        cross_entropy = F.cross_entropy(logits, p_target, reduction="sum")
        w_cls = 0.1 * (4096 / width) ** 0.5
        return distance / width + w_cls * cross_entropy

# ---------------------------------------------------------------- decoding
class Drafter(edd.Drafter):
    """Drafts with EAGLE, by the contract of a drafter in verify.py."""

    def reset(self, probs):
        super().reset(probs)
        # The target's feature of the last committed token, then the predicted one of each node
        self.features = self.store.new_zeros(0, self.config.width)             # (1 + nodes, D)

    @torch.no_grad()
    def begin(self, view, root):
        """Begin a round: encode the newly committed tokens, each with the feature before it."""
        self.paths = []
        new = view.hidden[self.config.hidden].to(self.device)                  # (k, D)
        known = torch.cat((self.features[:1], new))            # (1 + k, D); of a prompt (k, D)
        before = known[:-1]
        # Of a whole prompt the first token is left out: no feature comes before it.
        tokens = view.tokens[len(view.tokens) - len(before):]
        self.encode(self.model.inputs(tokens.to(self.device), before))
        self.features = known[-1:]

    @torch.no_grad()
    def expand(self, tokens, parents):
        """As edd.Drafter.expand, with one forward for each generation of the nodes.

        A node needs the predicted feature of its parent.  Differs from the paper, whose tree is
        fixed: any tree will do.
        """
        ids, logits = tokens.to(self.device), []
        while parents:
            # The first `count` nodes: their parents have features already.
            known, count = len(self.paths), 1
            while count < len(parents) and parents[count] < known:
                count += 1
            before = self.features[[1 + parent for parent in parents[:count]]]         # (count, D)
            end, position, slots, mask = self.place(parents[:count])
            x = self.model.inputs(ids[:count], before)                                 # (count, D)
            [predicted] = self.run(end, x, position, slots, mask)                      # (count, D)
            self.features = torch.cat((self.features, predicted))
            logits.append(self.model.head(predicted))
            ids, parents = ids[count:], parents[count:]
        logits = torch.cat(logits).to(tokens.device)                                   # (m, V)
        return self.probs(logits, self.temperature)
