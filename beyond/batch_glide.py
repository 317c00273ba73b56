"""GLIDE for a batch: one forward a position drafts the chains of all rows (beyond/batch.py).

The idea.  A forward of a small drafter takes about as long for sixteen tokens as for one.  So one
token of each row is read together.  The keys are those of all rows, one row after the other, S
slots each, and the mask shows a token those of its own row: glide.Layer needs no change for it.

    drafter, _ = glide.load("my-glide", model)
    outputs = batch.generate(target, BatchGlide(drafter), cape.cape, [ids_0, ids_1, ids_2])
"""
from functools import partial

import torch

import glide

class BatchGlide:
    """A glide.Drafter of one layer for all rows.  gamma: the builder's, cape.chain or cape.cape."""

    def __init__(self, drafter, gamma=5):
        if len(drafter.model.layers) != 1:
            raise ValueError("a GLIDE of several layers drafts row by row: give copies(drafter, B)")
        self.model, self.temperature = drafter.model, drafter.temperature
        self.needs, self.gamma = drafter.needs, gamma

    def reset(self, rows):
        """Begin a batch of batch.Rows."""
        # The slots of a row are for all its tokens, and those that are drafted after them.
        self.S = max(len(row.sequence) + row.left for row in rows) + self.gamma + 1
        c, weight = self.model.config, self.model.layers[0].o.weight
        self.store = weight.new_zeros(2, 1, c.heads, len(rows) * self.S, c.width // c.heads)

    def encode(self, rows):
        """Compute the KV entries of newly committed tokens."""
        # With one layer, they depend on a token and its position alone.
        tokens = torch.cat([row.view.tokens for row in rows])                  # (m,)
        position, slots = [], []
        for row in rows:
            new = range(row.view.length - len(row.view.ids), row.view.length)
            position += new
            slots += [row.number * self.S + i for i in new]
        position, slots = torch.tensor((position, slots), device=tokens.device)
        x = self.model.embed(tokens)[None]                                     # (1, m, d_D)
        rope, _ = self.model.ropes(x, position)
        _, k, v = self.model.layers[0].project(x, rope)
        glide.write(self.store, slots, None, k, v)

    def draft(self, batch, rows):
        """Draft the greedy chain below the root of each of the A batch.Rows, for its expand."""
        self.encode(rows)
        tokens, model = torch.cat([row.root for row in rows]), self.model      # (A,)
        device = tokens.device
        lengths = torch.tensor(batch.lengths, device=device)
        numbers = torch.tensor([row.number for row in rows], device=device)
        own = torch.arange(self.store.shape[3], device=device)                 # all slots
        own_row = own // self.S == numbers[:, None]                            # (A, rows S)
        # The target's keys and values in the same way: t entries of each row
        t = max(batch.lengths)
        key = torch.arange(len(rows) * t, device=device)
        key_row = key // t == torch.arange(len(rows), device=device)[:, None]
        seen = key_row & (key % t < lengths[:, None])                          # (A, A t)
        kv = {}
        for layer in self.needs["kv"]:
            pair = batch.stack[2 * layer:2 * layer + 2, :, :, :t]              # (2, A, H, t, d_k)
            kv[layer] = pair.transpose(1, 2).flatten(2, 3)[:, None]            # (2, 1, H, A t, d_k)
        found = []
        for i in range(min(self.gamma, max(2, *(row.left for row in rows)) - 1)):
            position = lengths + i
            mask = own_row & (own % self.S <= position[:, None])               # (A, rows S)
            update = partial(glide.write, self.store, numbers * self.S + position, None)
            x = model.embed(tokens)[None]                                      # (1, A, D)
            x = model.layers[0](x, model.ropes(x, position), mask, kv, seen, update)
            found.append(model.head(model.norm(x))[0])                         # (A, V)
            tokens = found[-1].argmax(-1)
        for row, logits in zip(rows, torch.stack(found, 1)):                   # (gamma, V)
            row.expand = partial(replay, row.rule.probs(logits, self.temperature), [])

def replay(probs, given, tokens, parents):
    """An expand that answers from a greedy chain that is drafted already.

    probs (gamma, V): what follows the root, and each token of the chain.  given: parents so far.
    """
    i = len(given)
    given += parents
    is_next = parents == [i - 1] and i < len(probs)
    if not is_next or i > 0 and not torch.equal(tokens, probs[i - 1:i].argmax(-1)):
        raise ValueError("BatchGlide drafts the greedy chain alone: give copies(drafter, B)")
    return probs[i:i + 1]
