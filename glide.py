"""GLIDE: a draft model that glimpses the target's KV cache.

GLIDE with a CAPE (arXiv 2402.02082), section 4.1 and Figure 2.  The vanilla drafter of Figure 4,
which is the same model without the glimpse, is here, too: Config.for_target(model, glimpse=False).

The idea.  When the target has verified the tokens before position t, their keys and values lie in
its cache.  GLIDE is a small decoder.  Each of its layers has a cross-attention to those keys and
values, between self-attention and feed-forward: the glimpse.  So it reads the prefix as the target
understands it.  While it drafts x_{t+1}, x_{t+2}, ..., the target's keys still end at x_{t-1}: they
are delayed.  A block mask imitates this delay in training.

    paper              shape             name here
    N_D, d_D, h, d_k   ints              config.layers, .width, .target_heads, .target_head_size
    H^m                (B, T, d_D)       x, after the self-attention of layer m
    W_j                (d_D, d_k) x h    layer.glimpse_q: all heads in one matrix
    K^{l,j}, V^{l,j}   (B, H, t, d_k)    kv[l], l = config.layers_read[m] (paper: l = N_T - N_D + m)
    W^O                (h d_k, d_D)      layer.glimpse_o
    L, Mask_Block      int, (T, T)       config.block (5); block_mask(T, L)

Positions and layers count from 0 here.  h is the number of the target's query heads.  H is the
number of its KV heads, which is smaller where the target has grouped-query attention.

The delay, by an example.  A text is a b c d e | f g h i j | k l m n o, in blocks of L = 5.
    Training.       The queries f g h i j predict g h i j k.  Each sees the target's KV entries of
                    a ... e, the blocks before its own, and the drafter's entries up to itself.
    Decoding.       The target has verified a ... e and generated f, the root of this round.  The
                    queries f g h i j draft g h i j k, and see the target's entries of a ... e.
    The next round. If the target accepts all five drafted tokens, it has verified a ... k, and
                    generates l, the next root.  The query l sees a ... k.  In training it saw only
                    a ... j, since blocks start at multiples of L there; in decoding they start
                    wherever a round does.

Differences from the paper:
 1. Queries of the glimpse get RoPE at their own position, by the target's own cos/sin table, since
    the cached keys have it.  The paper does not mention it.  The official code fixes theta = 10000.
    The drafter's self-attention uses the same table.
 2. Positions of the first block see no key of the target.  Their glimpse is zero.  The official
    code gives them the causal mask instead, which lets a position see its own key.
 3. With config.norm an RMSNorm precedes W_j.  Neither the paper nor the official code has one.
    Without it the residual stream is small at first, and the attention scores of the glimpse stay
    nearly uniform for a long part of the training.
 4. Any layer of the target can be read, not only its last ones: for_target's `layer`.
 5. In a drafter of two layers the KV entries of the second depend on which target keys the first
    one's glimpse saw.  The paper does not say which these are once a token is committed.  Here
      - an accepted node that expand() read keeps the entries computed then;
      - every other token is encoded when it is committed, under a block mask.  The first block
        starts at position 0 for a prompt, and at the last drafted round's root for accepted nodes
        that expand() did not read.
    The official code encodes accepted tokens anew in each round.
 6. Embedding and head may start as the target's (start_from), and the loss may be EDD's KL
    divergence to the target's distribution.  In the paper all weights start at random, and the loss
    is cross entropy.
 7. The mask is "not used for testing" in the paper.  Here a held-out loss uses it, too: without it
    a query would see target keys of its own token and of later ones.
 8. A query belongs to the block of its own token, as in the printed Mask_Block and in the paper's
    inference.  In the example the query e, which predicts f, belongs to a b c d e.  The prose of
    section 4.1 takes the block of the predicted token instead, here that of f.
 9. The glimpse is added to the residual stream, as the output of every other sub-layer, and as in
    the official code.  The paper's text has no residual there.
10. d_D is by default the target's width; in the paper it is 4096 for all targets.
11. In training the target's keys are delayed by at most L tokens.  A draft may be longer, as in
    trees of more than five levels.
12. Misprints in section 4.1: M_D stands for M_T twice, d_b for d_D, "up to position t" for "up to
    position t - 1".

To use this file in a project of yours: the contract of a drafter, and generate(), which calls it,
are in verify.py; docs/any_project.py is a whole loop without verify.py.  A round of it:

    drafter, _ = glide.load("my-glide", model)           # once.  model: the target
    drafter.begin(view, root_id)                         # view: see begin()
    probs = drafter.expand(torch.tensor([root_id]), [-1])          # (1, V): node 0 is the root
    best = probs.topk(2).indices[0]
    probs = drafter.expand(best, [0, 0])                 # (2, V): nodes 1 and 2, its children
    drafter.keep([0, 2])                                 # the target accepted the root and node 2

    python glide.py         # the demo: training under the mask predicts what decoding does
    python train.py "glide(layer=13)" --data my-texts    # for the stand-in target; docs/training.md
"""
import json
from dataclasses import dataclass, fields
from functools import partial
from math import ceil, gcd
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

CHUNK = 512              # a long prompt is encoded in pieces of this many tokens: small masks
TREE_POSITIONS = 1024    # after the last token of a full context, for the nodes of a tree

@dataclass
class Config:
    """Sizes and settings; in parentheses, where the paper has them.

    The defaults are the paper's where it states them; train.py's are in training/models.py.
    """
    vocab: int                       # number of token ids
    width: int                       # d_D (4.1)
    feed_forward: int                # hidden size of the feed-forward sub-layer (Figure 2)
    layers: int = 1                  # N_D: 1 for 7B and 13B targets, 2 for 33B (5.1)
    heads: int = 8                   # of the drafter's self-attention (Figure 2)
    block: int = 5                   # L (4.1)
    glimpse: bool = True             # False: the vanilla drafter (Figure 4)
    target_heads: int = 0            # h (4.1)
    target_head_size: int = 0        # d_k (4.1)
    layers_read: tuple = ()          # l of each drafter layer m: the target layer it reads (4.1)
    eps: float = 1e-6                # of the norms (Figure 2)
    norm: bool = False               # an RMSNorm before W_j (difference 3)
    loss: str = "ce"                 # cross entropy (4.1), or "kl" (difference 6)

    @classmethod
    def for_target(cls, model, width=None, layers=1, layer=None, **more):
        """The Config of a drafter for the Hugging Face model `model`.

        width: d_D; None: the target's.  layers: N_D.  layer: the target layer that the drafter's
        last layer reads; None: the target's last, as in the paper.  more: further settings, say
        glimpse=False.  Raises ValueError where the target has no such layer.
        """
        c = model.config.get_text_config()
        # l = N_T - N_D + m: the drafter's layers read the target's last ones, in order.
        last = c.num_hidden_layers - 1 if layer is None else layer
        if last not in range(layers - 1, c.num_hidden_layers):
            raise ValueError(f"layer {last} of the target cannot be read by the last of {layers} "
                             f"drafter layers: choose one from {layers - 1} to "
                             f"{c.num_hidden_layers - 1}")
        d_k = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        width = width or c.hidden_size
        # The drafter's own heads have the size d_k, or the largest divisor of it that divides the
        # width, too.
        heads = width // gcd(width, d_k)
        # Llama's ratio of 8/3, rounded up to a multiple of 32
        feed_forward = 32 * ceil(width * 8 / 3 / 32)
        config = cls(c.vocab_size, width, feed_forward, layers, heads, **more)
        if config.glimpse:
            config.layers_read = tuple(range(last - layers + 1, last + 1))
            config.target_heads = c.num_attention_heads
            config.target_head_size = d_k
        return config

def block_mask(length, block, device="cpu"):
    """Mask_Block (4.1): query j sees key k where block(j) > block(k) -> (length, length) bool."""
    block_of = torch.arange(length, device=device) // block
    return block_of[:, None] > block_of[None, :]

# -------------------------------------------------- rotary position embeddings (RoPE)
def tables_of(model, config, length):
    """The target's cos/sin table for positions 0 ... length - 1 -> the two tables of a Glide.

    The first, (2, length, d), is that of the drafter's self-attention, with heads of size d; the
    second, (2, length, d_k), that of the glimpse.  Where d = d_k they are one.  Raises ValueError
    where the target's RoPE is seen not to be Llama's: it has no rope_type, its tables change with
    the length of the text (longrope, dynamic NTK), or they are smaller than a head of the drafter.
    """
    unlike = ValueError(f"the RoPE of {type(model).__name__} is not Llama's, which glide.py needs: "
                        "see runtime/families.py")
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if getattr(rotary, "rope_type", None) in (None, "longrope", "dynamic"):
        raise unlike
    position = torch.arange(length, device=model.device)[None]
    # The first argument supplies only the dtype and the device of the table.
    cos, sin = rotary(position.float(), position)
    table = torch.stack((cos[0], sin[0]))                              # (2, length, d_k)
    # RoPE's angles for heads of size d_k / s are every s-th of those for size d_k.
    d = config.width // config.heads
    s = table.shape[-1] // d
    if s == 0:                                                         # smaller than a head
        raise unlike
    return table[..., ::s], table

def apply_rope(x, rope):
    """RoPE of x (..., T, d), by rope: cos and sin (2, T, r).

    Where r < d only the first r entries of a head are rotated, as in some families of targets
    (runtime/families.py).
    """
    cos, sin = rope
    r = cos.shape[-1]
    a, b, rest = x.tensor_split((r // 2, r), -1)
    rotated_half = torch.cat((-b, a), -1)
    rotated = x[..., :r] * cos + rotated_half * sin
    return torch.cat((rotated, rest), -1) if r < x.shape[-1] else rotated

# -------------------------------------------------- the draft model
class Layer(nn.Module):
    """One layer of Figure 2: x += SelfAttn(norm(x)); x += Glimpse(x); x += MLP(norm(x))."""

    def __init__(self, c, m):
        super().__init__()
        self.c = c
        linear = partial(nn.Linear, bias=False)
        norm = partial(nn.RMSNorm, c.width, eps=c.eps)
        self.norm1 = norm()
        self.qkv = linear(c.width, 3 * c.width)
        self.o = linear(c.width, c.width)
        if c.glimpse:
            self.target_layer = c.layers_read[m]
            target_width = c.target_heads * c.target_head_size         # h d_k
            self.glimpse_norm = norm() if c.norm else nn.Identity()
            self.glimpse_q = linear(c.width, target_width)
            self.glimpse_o = linear(target_width, c.width)
        self.norm2 = norm()
        self.up = linear(c.width, 2 * c.feed_forward)
        self.down = linear(c.feed_forward, c.width)

    def project(self, x, rope):
        """Queries, keys and values of the drafter's self-attention.

        x (B, T, d_D), rope (2, T, d) -> q, k, v (B, heads, T, d) each
        """
        qkv = self.qkv(self.norm1(x))                                  # (B, T, 3 d_D)
        qkv = qkv.unflatten(-1, (3, self.c.heads, -1))                 # (B, T, 3, heads, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return apply_rope(q, rope), apply_rope(k, rope), v

    def attend(self, q, k, v, mask):
        """Self-attention of q (B, heads, T, d) to k, v (B, heads, keys, d) -> (B, T, d_D)."""
        # Under autocast, RoPE makes q and k float32 but leaves v as it is.
        heads = F.scaled_dot_product_attention(q, k, v.to(q), attn_mask=mask)
        concat = heads.transpose(1, 2).flatten(2)                      # (B, T, d_D)
        return self.o(concat)

    def glimpse(self, x, kv, rope, mask=None):
        """Cross-attention to the target's keys and values -> (B, T, d_D).

        x (B, T, d_D), kv[l] two tensors (B, H, t, d_k), rope (2, T, d_k), mask (T, t) bool.
        Without a mask every query sees all t keys.
        """
        B, T, _ = x.shape
        k, v = kv[self.target_layer]
        h = self.c.target_heads
        H = k.shape[1]
        # Q^{m,j} = H^m W_j, then RoPE as the cached keys have it (difference 1)
        q = self.glimpse_q(self.glimpse_norm(x))                       # (B, T, h d_k)
        q = q.reshape(B, T, h, -1).transpose(1, 2)                     # (B, h, T, d_k)
        q = apply_rope(q, rope)
        # Attention runs on the device of the target's cache, but in the drafter's dtype: in the
        # target's float16 the drafter's small gradients would be rounded to zero.
        q = q.to(k.device)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        # With grouped-query attention, h / H query heads share a KV head.  They are stacked along
        # the axis of the queries.  (enable_gqa=True gives the same, but it copies the keys.)
        group = h // H
        q = q.reshape(B, H, group * T, -1)
        attention_mask = None
        if mask is not None:
            # A softmax over no keys would be NaN.  So a query that may see no key sees all of them
            # here, and its result is replaced by zero below.
            sees_none = ~mask.any(1, keepdim=True)                     # (T, 1)
            attention_mask = mask | sees_none                          # (T, t)
            attention_mask = attention_mask.repeat(group, 1)           # (h / H * T, t)
            attention_mask = attention_mask.to(k.device)
        # hd_j = SoftMax(Q^{m,j} (K^{l,j})^T / sqrt(d_k)) V^{l,j}
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        concat = heads.reshape(B, h, T, -1).transpose(1, 2)            # (B, T, h, d_k)
        concat = concat.flatten(2).to(x)                               # (B, T, h d_k)
        if mask is not None:
            concat = concat.masked_fill(sees_none, 0)                  # (difference 2)
        # Concat(hd_1, ..., hd_h) W^O
        return self.glimpse_o(concat)

    def forward(self, x, ropes, mask, kv=None, glimpse_mask=None, update=None):
        """x (B, T, d_D) -> (B, T, d_D)

        ropes: cos and sin (2, T, d) of the self-attention, and (2, T, d_k) of the glimpse.  mask
        (T, keys) is that of the self-attention, glimpse_mask (T, t) that of the glimpse; None: all
        keys are seen.  update(k, v) writes the tokens' KV entries to a cache, and returns the keys
        and values to attend to; None: the T tokens attend to one another only.
        """
        rope, glimpse_rope = ropes
        # Self-attention
        q, k, v = self.project(x, rope)
        if update is not None:
            k, v = update(k, v)
        x = x + self.attend(q, k, v, mask)
        # Cross-attention: the glimpse
        if self.c.glimpse:
            x = x + self.glimpse(x, kv, glimpse_rope, glimpse_mask)
        # Feed-forward
        gate_and_up = self.up(self.norm2(x))
        gate, up = gate_and_up.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

class Glide(nn.Module):
    """The draft model: GLIDE, or the vanilla drafter where config.glimpse is False."""

    def __init__(self, config, tables):
        """tables: as tables_of gives them.  The model serves as many positions as they have."""
        super().__init__()
        c = self.config = config
        self.embed = nn.Embedding(c.vocab, c.width)
        self.layers = nn.ModuleList([Layer(c, m) for m in range(c.layers)])
        self.norm = nn.RMSNorm(c.width, eps=c.eps)
        self.head = nn.Linear(c.width, c.vocab, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        table, glimpse_table = tables
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("glimpse_table", glimpse_table, persistent=False)

    @torch.no_grad()
    def start_from(self, embed, head):
        """Copy the target's embedding and LM head, where they have the drafter's sizes.

        embed, head: modules with a weight (V, D).
        """
        for own, other in ((self.embed, embed), (self.head, head)):
            if own.weight.shape == other.weight.shape:
                own.weight.copy_(other.weight)

    def ropes(self, position):
        """position (T,) -> cos and sin there: (2, T, d), and (2, T, d_k) of the glimpse."""
        return self.table.index_select(1, position), self.glimpse_table.index_select(1, position)

    def forward(self, ids, kv=None):
        """Training: all positions at once, under the block mask -> (B, T, d_D).

        The result has passed the last norm; self.head computes the logits from it.
        ids (B, T); kv {l: (K, V)}, (B, H, T, d_k) each: the target's KV entries of the same tokens.
        """
        T = ids.shape[1]
        position = torch.arange(T, device=ids.device)
        ropes = self.ropes(position)
        # The drafter's own KV entries are up to date: a causal mask.  The target's are delayed:
        # Mask_Block.
        causal = position[:, None] >= position[None, :]
        delayed = block_mask(T, self.config.block, ids.device)
        x = self.embed(ids)                                            # (B, T, d_D)
        for layer in self.layers:
            x = layer(x, ropes, causal, kv, delayed)
        return self.norm(x)

    def terms(self, batch, block=None):
        """The losses of a batch, for train.py: a list of (x, labels, mask), one for each loss.

        GLIDE has one.  x (B, T, d_D) and labels have an entry for each position.  Mask None: of
        these train.py uses all in the loss mask of the batch.  Labels are the next token ids
        (B, T), or for "kl" the target's logits (B, T, V).  The docstring of train.py explains
        batches.  block is not used: EDD draws an L for each training step, GLIDE's is config.block.
        """
        x = self(batch.ids, batch.kv)
        # The next ids.  The last one wraps around, but its position is in no loss mask.
        next_ids = batch.ids.roll(-1, 1)
        labels = next_ids if self.config.loss == "ce" else batch.logits
        return [(x, labels, None)]

    def loss_of(self, x, labels):
        """The loss, summed over n positions -> ().  x (n, d_D) and labels (n, ...) as in terms."""
        log_p_draft = self.head(x).float().log_softmax(-1)             # (n, V)
        if self.config.loss == "ce":
            return F.nll_loss(log_p_draft, labels, reduction="sum")
        # D_KL(p_target || p_draft)
        log_p_target = labels.float().log_softmax(-1)
        return F.kl_div(log_p_draft, log_p_target, reduction="sum", log_target=True)

# -------------------------------------------------- decoding
# softmax, write, place, reserve and (nearly) read are those of edd.py, repeated so that each of
# the two files can be copied alone.
def softmax(logits, temperature=1.0):
    """How logits (m, V) become probabilities where no rule of decoding says otherwise."""
    return (logits.float() / temperature).softmax(-1)

def write(store, slots, end, k, v):
    """Write new KV entries k, v (1, heads, m, d) at slots (m,) -> all keys, all values before end.

    store (2, 1, heads, capacity, d): keys and values of one layer.
    """
    store.index_copy_(3, slots, torch.stack((k, v)))
    return store[:, :, :, :end]

class Drafter:
    """Drafts with a Glide, by the contract of a drafter in verify.py.

    In each round begin is called once, then expand any number of times, then keep.  No KV entry is
    computed twice.
    """

    def __init__(self, model, temperature=1.0):
        """temperature: for calibration.  Of the tokens that have probability p in softmax(logits /
        temperature), a fraction p is the target's greedy choice.
        """
        self.model, self.temperature = model.eval(), temperature
        c = self.config = model.config
        self.needs = {"kv": c.layers_read}
        weight = model.layers[0].o.weight.detach()
        self.device = weight.device
        # The drafter's own KV entries: those of committed tokens first, then those of this round's
        # nodes, in the order given to expand
        self.store = weight.new_zeros(c.layers, 2, 1, c.heads, 0, c.width // c.heads)
        self.reset()

    def reset(self, probs=softmax, source=None):
        """Begin a sequence.  probs(logits (m, V), temperature) -> probabilities (m, V)."""
        self.probs = probs
        self.encoded = 0                 # the first `encoded` committed tokens have their entries
        self.last_root = 0               # position of the previous round's root

    @torch.no_grad()
    def begin(self, view, root_id):
        """Begin a round: the tokens before position view.length are committed.

        Accepted nodes that expand() was given have their entries already.  The last of view.tokens
        (k,) may have none yet: in the first round the whole prompt, later the accepted nodes that
        expand() was not given, as a rule a leaf or none.  view.kv[l] is (K, V), (1, H, view.length,
        d_k) each: the target's.  root_id is not used: expand is given the root.
        """
        self.t = view.length
        self.kv = view.kv
        self.paths = []                  # paths[i]: the nodes from the root to node i, i included
        missing = self.t - self.encoded
        if missing:
            tokens = view.tokens[-missing:].to(self.device)
            for chunk in tokens.split(CHUNK):
                self.encode(chunk)

    def encode(self, tokens):
        """Compute the KV entries of the next k committed tokens, which expand did not read.

        tokens (k,): a prompt, or accepted nodes.
        """
        c, model = self.config, self.model
        end = self.encoded + len(tokens)
        self.reserve(end)
        position = torch.arange(self.encoded, end, device=self.device)             # (k,)
        ropes = model.ropes(position)
        x = model.embed(tokens)[None]                                              # (1, k, d_D)
        # Only a second layer's entries depend on what x saw in the first (difference 5).
        if c.layers > 1:
            own_key = torch.arange(end, device=self.device)                        # (end,)
            causal = own_key <= position[:, None]                                  # (k, end)
            # Mask_Block, where blocks start at the previous round's root, L tokens after it, and
            # so on.  A query sees the target's entries of all tokens before its own block.
            block_start = position - (position - self.last_root) % c.block         # (k,)
            target_key = torch.arange(self.t, device=self.device)                  # (t,)
            delayed = target_key < block_start[:, None]                            # (k, t)
            for layer, store in zip(model.layers[:-1], self.store):
                update = partial(write, store, position, end)
                x = layer(x, ropes, causal, self.kv, delayed, update)
        # Of the last layer only the keys and values are needed, not the output.
        _, k, v = model.layers[-1].project(x, ropes[0])
        write(self.store[-1], position, end, k, v)
        self.encoded = end

    @torch.no_grad()
    def expand(self, tokens, parents):
        """One forward over m new nodes -> probabilities (m, V) of the token after each.

        tokens (m,); parents: m ints, the index of each node's parent among all nodes given to
        expand in this round, in order; -1 for the root.
        """
        end, position, slots, mask = self.place(parents)
        [logits] = self.run(end, tokens.to(self.device), position, slots, mask)    # (m, V)
        return self.probs(logits.to(tokens.device), self.temperature)

    def place(self, parents):
        """Number m new nodes -> what run takes: end, position (m,), slots (m,), mask (m, end).

        A node sees all committed tokens and the nodes of its path.
        """
        for parent in parents:
            above = self.paths[parent] if parent >= 0 else []
            self.paths.append(above + [len(self.paths)])
        m, nodes = len(parents), len(self.paths)
        paths = self.paths[nodes - m:]
        end = self.t + nodes
        self.reserve(end)
        slots = torch.arange(end - m, end, device=self.device)                     # (m,)
        if m == 1 and len(paths[0]) == nodes:
            # The next node of a chain sees all entries, and its position is its slot.
            return end, slots, slots, None
        # visible (m, nodes): which of this round's nodes are on the path of each new one
        visible = torch.zeros(m, nodes, dtype=torch.bool)
        rows = [row for row, path in enumerate(paths) for _ in path]
        columns = [node for path in paths for node in path]
        visible[rows, columns] = True
        visible = visible.to(self.device, non_blocking=True)
        # The root is at position t, and the path of a node at depth n has n + 1 nodes.
        position = self.t + visible.sum(1) - 1                                     # (m,)
        mask = F.pad(visible, (self.t, 0), value=True)                             # (m, end)
        return end, position, slots, mask

    def run(self, end, tokens, position, slots, mask, glimpse_mask=None):
        """The tensor part of expand -> [logits (m, V)].  (CUDA graphs return lists.)

        tokens, position, slots (m,), mask (m, end), glimpse_mask (m, t); where a mask is None, all
        entries are seen.

        runtime/static.py replaces this method by one that pads nodes and entries to static shapes
        and replays CUDA graphs.  It gives a glimpse_mask, and relies on the names and shapes of
        `run`, `reserve`, `store`, `t` and `kv`.
        """
        ropes = self.model.ropes(position)
        x = self.model.embed(tokens)[None]                                         # (1, m, d_D)
        for layer, store in zip(self.model.layers, self.store):
            update = partial(write, store, slots, end)
            x = layer(x, ropes, mask, self.kv, glimpse_mask, update)
        logits = self.model.head(self.model.norm(x))                               # (1, m, V)
        return [logits[0]]

    def reserve(self, entries):
        """Make sure that the store has a capacity of at least `entries` entries."""
        if entries > self.store.shape[-2]:
            # more >= entries > capacity: the capacity at least doubles, so there are few copies.
            more = max(1024, entries)
            self.store = F.pad(self.store, (0, 0, 0, more))

    def keep(self, path):
        """End the round: the expanded nodes in `path` were accepted, the others are dropped.

        path: a list of node indices, the root first.  The KV entries of these nodes are compacted
        into the slots after those of the committed tokens.
        """
        self.encoded = self.t + len(path)
        self.last_root = self.t
        in_place = list(range(len(path)))
        if path != in_place:
            slots = torch.tensor(path, device=self.device) + self.t
            kept = self.store.index_select(-2, slots)
            self.store[..., self.t:self.encoded, :] = kept

# -------------------------------------------------- from a checkpoint
def read(folder, config_class=Config):
    """Read a checkpoint of train.py -> its Config, weights {name: tensor} and training.json.

    config_class: runtime/families.py passes those of other drafters.  Settings that it does not
    have are ignored.  Raises ValueError where the folder holds no such drafter.
    """
    try:
        about = json.loads(Path(folder, "training.json").read_text())
        saved = about["config"]
        names = [field.name for field in fields(config_class)]
        config = config_class(**{name: saved[name] for name in names if name in saved})
        return config, load_file(Path(folder, "model.safetensors")), about
    except (OSError, KeyError, TypeError) as why:
        raise ValueError(f"{folder} holds no drafter that {__name__}.py can load: {why}") from why

def load(folder, model, length=None):
    """Load a checkpoint of train.py for the target `model` -> (Drafter, training.json as a dict).

    The drafter has the target's dtype and device.  length: the longest sequence to decode; None:
    the target's context.  Raises ValueError where the folder does not hold such a drafter.
    Whether it was trained for this target cannot be checked here.  For a target whose RoPE is not
    Llama's, runtime/families.py has a function of this name.
    """
    config, weights, about = read(folder)
    length = length or model.config.get_text_config().max_position_embeddings
    draft_model = Glide(config, tables_of(model, config, length + TREE_POSITIONS))
    try:
        draft_model.load_state_dict(weights)
    except RuntimeError as why:
        raise ValueError(f"{folder} does not hold the weights that its training.json describes: "
                         "train the drafter again") from why
    temperature = about.get("validation", {}).get("temperature", 1.0)
    return Drafter(draft_model.to(model.device, model.dtype), temperature), about

def main():
    """Fifteen tokens in blocks of five: training under the mask equals delayed decoding."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    target = LlamaForCausalLM(config).double()
    config = Config.for_target(target)
    model = Glide(config, tables_of(target, config, 15)).double()
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    ids = torch.arange(15)
    cache = DynamicCache()
    target(ids[None], past_key_values=cache)
    k, v = cache.layers[1].keys.detach(), cache.layers[1].values.detach()
    trained = model.head(model(ids[None], {1: (k, v)}))[0].softmax(-1)         # (15, V)
    # Ten tokens are verified.  The last block of five is drafted.
    drafter = Drafter(model)
    verified = k[:, :, :10], v[:, :, :10]
    view = SimpleNamespace(tokens=ids[:10], length=10, kv={1: verified})
    drafter.begin(view, root_id=10)
    drafted = drafter.expand(ids[10:], [-1, 0, 1, 2, 3])                       # (5, V)
    error = (drafted - trained[10:]).abs().max()
    assert error < 1e-5, error
    print(f"training under the block mask = decoding with delayed keys: difference {error:.0e}")

if __name__ == "__main__":
    main()
