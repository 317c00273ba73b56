"""GLIDE: a drafter that glimpses the target's KV cache.

GLIDE with a CAPE (arXiv 2402.02082), section 4.1 and Figure 2.  The vanilla drafter of Figure 4 is
the same model without the glimpse: Config.for_target(model, glimpse=False).

The idea.  When the target has verified the tokens before position t, their keys and values lie in
its cache.  GLIDE is a small decoder, each of whose layers attends to them between self-attention
and feed-forward.  This cross-attention is the glimpse: by it the drafter reads the prefix as the
target understands it.  While it drafts x_{t+1}, x_{t+2}, ..., the target's keys still end at
x_{t-1}: they are delayed.  A block mask imitates this delay in training.

    paper              shape             name here
    N_D, d_D, h, d_k   ints              config.layers, .width, .target_heads, .target_head_size
    H^m                (B, T, d_D)       x, after the self-attention of layer m
    W_j                (d_D, d_k) x h    layer.glimpse_q: all heads in one matrix
    K^{l,j}, V^{l,j}   (B, n_kv, t, d_k) kv[l], l = config.layers_read[m] (paper: l = N_T - N_D + m)
    W^O                (h d_k, d_D)      layer.glimpse_o
    L, Mask_Block      int, (T, T)       config.block (5); block_mask(T, L)

Positions and layers count from 0 here.  The target has h query heads and n_kv KV heads, which are
fewer if its attention is grouped-query attention.

The delay, by an example.  A text is a b c d e | f g h i j | k l m n o, in blocks of L = 5.
    Training.       The queries f g h i j predict g h i j k.  Each sees the target's KV entries of
                    a ... e, the blocks before its own, and the drafter's entries up to itself.
    Decoding.       The target has verified a ... e and generated f, the root of this round.  The
                    queries f g h i j draft g h i j k, and see the target's entries of a ... e.
    The next round. If the target accepts all five drafted tokens, it has verified a ... k, and
                    generates l, the next root.  The query l sees a ... k: in decoding
                    blocks begin where rounds do.

To use it in your project, by the contract of a drafter in verify.py.  A round:

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
import warnings
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import rotate_half

TREE_POSITIONS = 1024            # after the last token of a full context, for the nodes of a tree

@dataclass
class Config:
    """Sizes and settings; in parentheses, where the paper has them.

    Differs from the paper: the defaults are what train.py trains.  The paper's GLIDE has the width
    4096 beside all targets, no norm before the glimpse, and cross entropy as its loss.
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
    # An RMSNorm precedes W_j.  Without it the residual stream is small at first, and the attention
    # scores of the glimpse stay nearly uniform for long.
    norm: bool = True
    loss: str = "kl"                 # KL(target || drafter), EDD's loss; or "ce", cross entropy

    @classmethod
    def for_target(cls, model, width=None, layers=1, layer=None, **more):
        """The Config of a drafter for the Hugging Face model `model`.

        width: d_D; None: the target's.  layers: N_D.  layer: the target layer that the drafter's
        last layer reads; None: the target's last, as in the paper.  more: further settings, say
        glimpse=False.  Raises ValueError if the target has no such layer, or if the width is not
        a multiple of d_k, the size of the target's heads and of the drafter's.
        """
        c = model.config.get_text_config()
        # l = N_T - N_D + m: the drafter's layers read the target's last ones, in order.
        # Differs from the paper: they may read earlier ones (`layer`).
        last = c.num_hidden_layers - 1 if layer is None else layer
        if last not in range(layers - 1, c.num_hidden_layers):
            raise ValueError(f"layer {last} of the target cannot be read by the last of {layers} "
                             f"layers: take {layers - 1} to {c.num_hidden_layers - 1}")
        d_k = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        width = width or c.hidden_size
        if width % d_k:
            raise ValueError(f"width {width} makes no heads of size {d_k}, as the target's: take a "
                             f"multiple of {d_k}")
        # Llama's ratio of 8/3, rounded up to a multiple of 32
        feed_forward = 32 * ceil(width * 8 / 3 / 32)
        config = cls(c.vocab_size, width, feed_forward, layers, width // d_k, **more)
        if config.glimpse:
            config.layers_read = tuple(range(last - layers + 1, last + 1))
            config.target_heads = c.num_attention_heads
            config.target_head_size = d_k
        return config

def block_mask(length, block, device="cpu"):
    """Mask_Block (4.1): query j sees key k where block(j) > block(k) -> (length, length) bool

    Differs from the prose of 4.1, but not from the printed mask or from inference: a query belongs
    to the block of its own token, not of the token that it predicts.
    """
    block_of = torch.arange(length, device=device) // block
    return block_of[:, None] > block_of[None, :]

# -------------------------------------------------- rotary position embeddings (RoPE)
class Rope(nn.Module):
    """RoPE by a table of the target's: cos and sin (2, length, d) of positions 0 ... length - 1."""

    def __init__(self, table):
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def at(self, position):
        """position (T,) -> a function that applies RoPE to queries or keys (..., T, d) there"""
        cos, sin = self.table.index_select(1, position)        # (T, d) each
        return lambda x: x * cos + rotate_half(x) * sin

def rope_error(rope, key_0, key_2):
    """The relative error of rotating key_0 to position 2: |R_2 k_0 - R_0 k_2| / |k_2 - k_0|

    key_0, key_2 (1, n_kv, 1, d_k): of one token at positions 0 and 2.  R_i: what `rope` does at i.
    """
    position = torch.tensor([0, 2], device=key_0.device)
    key_0, key_2 = key_0.float(), key_2.float()
    # R_0 only scales, if the table does: then each side is scaled once.
    difference = rope.at(position[1:])(key_0) - rope.at(position[:1])(key_2)
    return (difference.norm() / (key_2 - key_0).norm()).item()

@torch.no_grad()
def ropes_of(model, length):
    """The target's RoPE for `length` positions -> (Rope, Rope)

    It serves both the drafter's self-attention and the glimpse.  Raises ValueError if it is not
    Llama's: it rotates pairs of neighbours, or its table changes with the length of the text
    (longrope, dynamic NTK).
    """
    refusal = (f"the RoPE of {type(model).__name__} is not Llama's: take a target of Llama's kind, "
               "or runtime/families.py, which serves others")
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    kind = getattr(rotary, "rope_type", None)
    if not isinstance(kind, str) or kind in ("longrope", "dynamic"):
        raise ValueError(refusal)
    position = torch.arange(length, device=model.device)[None]
    cos, sin = rotary(position.float(), position)          # in the first one's dtype
    rope = Rope(torch.cat((cos, sin)))                                 # (2, length, d_k)
    # Does the target rotate its keys by this table?  With two equal tokens, every layer's input is
    # the same at both positions, so the keys R_0 W_K x and R_2 W_K x differ by rotation only.
    tokens, positions = torch.tensor([[[0, 0]], [[0, 2]]], device=model.device)
    cache = DynamicCache()
    model(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True)
    keys = cache.layers[-1].keys.split(1, 2)
    # The rounding of bfloat16 gives an error of at most 0.05, a rotation of neighbours one of 1.2.
    if cos.shape[-1] != keys[0].shape[-1] or not rope_error(rope, *keys) < 0.3:
        raise ValueError(refusal)
    return rope, rope

# -------------------------------------------------- the draft model
def attention(q, k, v, mask=None):
    """SoftMax(q k^T / sqrt(d)) v of all heads -> (B, h, T, d)

    q (B, h, T, d); k, v (B, n_kv, t, d): h / n_kv query heads share a KV head.  mask (T, t) bool;
    None: every query sees all t keys.  A query that sees no key gets zero.
    """
    B, h, T, d = q.shape
    n_kv = k.shape[1]
    # Query heads that share keys become further queries of one head, so no key is copied for them.
    group = h // n_kv
    q = q.reshape(B, n_kv, group * T, d)
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v).reshape(B, h, T, d)
    # A softmax over no keys would be NaN: let such a query see all keys, and drop its result.
    sees_none = ~mask.any(1, keepdim=True)                             # (T, 1)
    mask = (mask | sees_none).repeat(group, 1)                         # (group * T, t)
    heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(k.device))
    return heads.reshape(B, h, T, d).masked_fill(sees_none.to(k.device), 0)

class Layer(nn.Module):
    """One layer of Figure 2: x += SelfAttn(norm(x)); x += Glimpse(x); x += MLP(norm(x)).

    Differs from the paper's text: the glimpse is added to x, as in the official code.
    """
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
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def project(self, x, rope):
        """Self-attention's queries, keys and values of x (B, T, d_D) -> (B, heads, T, d) each"""
        qkv = self.qkv(self.norm1(x))                                  # (B, T, 3 d_D)
        qkv = qkv.unflatten(-1, (3, self.c.heads, -1))                 # (B, T, 3, heads, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return rope(q), rope(k), v

    def attend(self, q, k, v, mask):
        """Self-attention of q (B, heads, T, d) to k, v (B, heads, keys, d) -> (B, T, d_D)"""
        # Under autocast, RoPE makes q and k float32 but leaves v as it is.
        heads = F.scaled_dot_product_attention(q, k, v.to(q), attn_mask=mask)
        concat = heads.transpose(1, 2).flatten(2)                      # (B, T, d_D)
        return self.o(concat)

    def glimpse(self, x, kv, rope, mask=None):
        """Cross-attention of x (B, T, d_D) to the target's keys and values -> (B, T, d_D)

        kv[l] is (K, V), (B, n_kv, t, d_k) each.  mask (T, t) bool; None: every query sees all keys.
        Differs from the paper, which does not mention RoPE: the cached keys have it, so the queries
        get it at their own positions, by the target's table.  (The official code: theta = 10000.)
        Differs from the official code, whose mask is causal in the first block: here this block
        sees no key of the target, and its glimpse is zero.
        """
        k, v = kv[self.target_layer]
        # Q^{m,j} = H^m W_j
        q = self.glimpse_q(self.glimpse_norm(x))                       # (B, T, h d_k)
        q = q.unflatten(-1, (self.c.target_heads, -1)).transpose(1, 2)         # (B, h, T, d_k)
        # Attention runs on the device of the target's cache, but in the drafter's dtype: in the
        # target's float16 the drafter's small gradients would be rounded to zero.
        q = rope(q).to(k.device)
        # hd_j = SoftMax(Q^{m,j} (K^{l,j})^T / sqrt(d_k)) V^{l,j}
        heads = attention(q, k.to(q.dtype), v.to(q.dtype), mask)       # (B, h, T, d_k)
        # Concat(hd_1, ..., hd_h) W^O
        concat = heads.transpose(1, 2).flatten(2).to(x)                # (B, T, h d_k)
        return self.glimpse_o(concat)

    def forward(self, x, ropes, mask, kv=None, glimpse_mask=None, update=None):
        """x (B, T, d_D) -> (B, T, d_D)

        ropes: two functions (Rope.at), of the self-attention and of the glimpse.  mask (T, keys) is
        that of the self-attention, glimpse_mask (T, t) that of the glimpse; None: all keys are
        seen.  update(k, v) writes the tokens' KV entries to a cache, and returns the keys and
        values to attend to; None: the T tokens attend to one another only.
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
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

class Glide(nn.Module):
    """The draft model: GLIDE, or the vanilla drafter if config.glimpse is False."""

    def __init__(self, config, ropes, embed=None, head=None, layer_class=Layer):
        """ropes: as ropes_of gives them.  layer_class(config, m) makes layer m.

        embed, head: modules in place of new ones, ids (...) -> (..., d_D) -> logits (..., V).
        """
        super().__init__()
        c = self.config = config
        self.embed = embed or nn.Embedding(c.vocab, c.width)
        self.layers = nn.ModuleList([layer_class(c, m) for m in range(c.layers)])
        self.norm = nn.RMSNorm(c.width, eps=c.eps)
        self.head = head or nn.Linear(c.width, c.vocab, bias=False)
        for given, table in ((embed, self.embed), (head, self.head)):
            if given is None:
                nn.init.normal_(table.weight, std=0.02)
        self.rope, self.glimpse_rope = ropes

    def ropes(self, position):
        """position (T,) -> the functions that apply RoPE there, of self-attention and glimpse"""
        return self.rope.at(position), self.glimpse_rope.at(position)

    def forward(self, ids, kv=None):
        """Training: all positions at once, under the block mask -> (B, T, d_D).

        self.head computes the logits from the result.  ids (B, T); kv[l] is (K, V),
        (B, n_kv, T, d_k) each: the target's KV entries of the same tokens.
        Differs from the paper, whose mask is "not used for testing": a held-out loss needs it, or a
        query would see the target's keys of its own token and of later ones.
        """
        T = ids.shape[1]
        position = torch.arange(T, device=ids.device)
        ropes = self.ropes(position)
        # The drafter's own KV entries are up to date, the target's are delayed.
        causal = position[:, None] >= position[None, :]
        delayed = block_mask(T, self.config.block, ids.device)
        x = self.embed(ids)                                            # (B, T, d_D)
        for layer in self.layers:
            x = layer(x, ropes, causal, kv, delayed)
        return self.norm(x)

    def terms(self, batch, block=None):
        """The terms of train.py's loss, here one -> [(x (B, T, d_D), labels, no mask of its own)]

        batch: see train.py.  labels: the next token ids (B, T), or for "kl" the target's logits
        (B, T, V).  block: EDD's L, which differs by step; GLIDE's is config.block.
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
        # D_KL(p_target || p_draft), where 0 log 0 is 0
        log_p_target = labels.float().log_softmax(-1)
        log_p_target.clamp_(min=torch.finfo(torch.float32).min)
        return F.kl_div(log_p_draft, log_p_target, reduction="sum", log_target=True)

# -------------------------------------------------- decoding
# softmax, write, place, reserve and the checks in read() are those of edd.py: each file can be
# copied alone.
def softmax(logits, temperature=1.0):
    """Logits (m, V) -> probabilities, where no rule of decoding says otherwise."""
    return (logits.float() / temperature).softmax(-1)

def write(store, slots, end, k, v):
    """Write KV entries k, v (1, heads, m, d) of one layer at slots (m,) -> its keys, its values

    store (2, 1, heads, capacity, d).  Those before `end` are returned.
    """
    store.index_copy_(3, slots, torch.stack((k, v)))
    return store[:, :, :, :end]

class Drafter:
    """Drafts with a Glide, by the contract of a drafter in verify.py."""

    def __init__(self, model, temperature=1.0):
        """temperature: for calibration.  Of the tokens that have probability p in softmax(logits /
        temperature), a fraction p is the target's greedy choice.
        """
        self.model, self.temperature = model.eval(), temperature
        c = self.config = model.config
        self.needs = {"kv": c.layers_read}
        weight = model.layers[0].o.weight.detach()
        self.device = weight.device
        # The drafter's own KV entries: of committed tokens, then of this round's nodes
        self.store = weight.new_zeros(c.layers, 2, 1, c.heads, 0, c.width // c.heads)
        self.reset()

    def reset(self, probs=softmax):
        """Begin a sequence.  probs(logits (m, V), temperature) -> probabilities (m, V)"""
        self.probs = probs
        self.t = 0                       # number of committed tokens
        self.encoded = 0                 # the first `encoded` of them have their entries
        self.paths = []                  # paths[i]: the nodes from the root to node i, i included

    @torch.no_grad()
    def begin(self, view, root_id):
        """Begin a round: compute the KV entries of committed tokens that expand was not given.

        In the first round this is the prompt, later usually one accepted leaf.  view.tokens (k,)
        are those committed since the last begin, view.length is the number of all, and view.kv[l]
        is the target's (K, V), (1, n_kv, view.length, d_k) each.  root_id is not used: expand is
        given the root.  Raises ValueError if the view does not continue the last one.
        """
        first = view.length - len(view.tokens)
        if first != self.t:
            raise ValueError(f"begin was given the tokens from {first} on, after {self.t} tokens: "
                             "reset() begins another sequence")
        self.t = view.length
        self.kv = view.kv
        self.paths = []
        self.reserve(self.t)
        block, model = self.config.block, self.model
        tokens = view.tokens[self.encoded - first:].to(self.device)                # (n,)
        position = torch.arange(self.encoded, self.t, device=self.device)          # (n,)
        ropes = model.ropes(position)
        x = model.embed(tokens)[None]                                              # (1, n, d_D)
        # A second layer's entries depend on what the first one glimpsed.  Differs from the paper:
        # these positions also glimpse, under Mask_Block as in training; in 4.1 only positions
        # t ... t+i-1 query.  (The official code encodes accepted nodes again; here they stay.)
        if len(model.layers) > 1:
            key = torch.arange(self.t, device=self.device)                         # (t,)
            causal = key <= position[:, None]                                      # (n, t)
            delayed = key // block < position[:, None] // block                    # (n, t)
            for layer, store in zip(model.layers[:-1], self.store):
                update = partial(write, store, position, self.t)
                x = layer(x, ropes, causal, self.kv, delayed, update)
        # Of the last layer only the keys and values are needed, not the output.
        _, k, v = model.layers[-1].project(x, ropes[0])
        write(self.store[-1], position, self.t, k, v)
        self.encoded = self.t

    @torch.no_grad()
    def expand(self, tokens, parents):
        """One forward over m new nodes -> probabilities (m, V) of the token after each.

        tokens (m,); parents: m ints, the index of each node's parent among all nodes given to
        expand in this round, in order; -1 for the root.
        Differs from training: in a tree deeper than L the target's keys are delayed by more than L.
        """
        end, position, slots, mask = self.place(parents)
        [logits] = self.run(end, tokens.to(self.device), position, slots, mask)    # (m, V)
        return self.probs(logits.to(tokens.device), self.temperature)

    def place(self, parents):
        """Add m nodes to the round's -> run's end, position (m,), slots (m,), mask (m, end).

        A node sees all committed tokens and the nodes of its path, itself included.
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

    def run(self, end, tokens, position, slots, mask):
        """The tensor part of expand -> [logits (m, V)].  runtime/static.py replaces it by graphs.

        tokens, position, slots (m,), mask (m, end); None: all entries before `end` are seen.
        """
        ropes = self.model.ropes(position)
        x = self.model.embed(tokens)[None]                                         # (1, m, d_D)
        for layer, store in zip(self.model.layers, self.store):
            update = partial(write, store, slots, end)
            x = layer(x, ropes, mask, self.kv, update=update)
        logits = self.model.head(self.model.norm(x))                               # (1, m, V)
        return [logits[0]]

    # A tensor that is made in inference mode cannot be written to outside of it.
    @torch.inference_mode(False)
    def reserve(self, entries):
        """Make sure that the store has a capacity of at least `entries` entries."""
        if entries > self.store.shape[-2]:
            # The capacity at least doubles, so there are few copies.
            self.store = F.pad(self.store, (0, 0, 0, max(1024, entries)))

    def keep(self, path):
        """End the round: keep the KV entries of the accepted nodes, a list with the root first."""
        self.encoded = self.t + len(path)
        if path != list(range(len(path))):
            slots = torch.tensor(path, device=self.device) + self.t
            kept = self.store.index_select(-2, slots)
            self.store[..., self.t:self.encoded, :] = kept

# -------------------------------------------------- from a checkpoint
def read(folder, model, kinds):
    """Read a checkpoint of train.py -> its weights {name: tensor}, its training.json as a dict.

    kinds: strings, those accepted.  Raises ValueError for other kinds, or for a target of other
    sizes than `model`.  Warns if the target had other weights.
    """
    about = json.loads(Path(folder, "training.json").read_text())
    if about.get("kind") not in kinds:
        raise ValueError(f"{folder} holds no drafter of these kinds: {', '.join(kinds)}")
    target, c = about["target"], model.config.get_text_config()
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if target[name] != getattr(c, name):
            raise ValueError(f"the drafter was made for another target, with {name} "
                             f"{target[name]} instead of {getattr(c, name)}: train one for this")
    # training.json stores one weight of each sampled matrix of the target.  A quantised copy's
    # weights are near these, or cannot be read.
    noted, found = [], []
    for name, p in model.named_parameters():
        readable = type(p) is nn.Parameter and p.dtype.itemsize > 1 and not p.is_meta
        if name in target["probe"] and readable:
            noted.append(target["probe"][name])
            found.append(p[len(p) // 3, p.shape[1] // 2].item())
    noted, found = torch.tensor(noted), torch.tensor(found)
    if (noted - found).norm() > 0.25 * found.norm():
        warnings.warn("the drafter was trained for a model with other weights: few drafts will be "
                      "accepted", stacklevel=3)
    # A copy, because the file may be replaced while the drafter is in use.
    mapped = load_file(Path(folder, "model.safetensors"))
    return {name: weight.clone() for name, weight in mapped.items()}, about

def load(folder, model):
    """Load a checkpoint of train.py for the target `model` -> (Drafter, training.json as a dict).

    The drafter has the target's dtype and device, and serves the target's context.  Raises
    ValueError if the folder does not hold a GLIDE or a vanilla drafter for such a target, and
    warns if it was trained for other weights.
    """
    weights, about = read(folder, model, ("glide", "vanilla"))
    context = model.config.get_text_config().max_position_embeddings
    ropes = ropes_of(model, context + TREE_POSITIONS)
    with torch.device("meta"):                     # no memory, since the weights are there already
        draft_model = Glide(Config(**about["config"]), ropes)
    draft_model.load_state_dict(weights, assign=True)
    draft_model.made_for = about["target"]
    temperature = about["validation"].get("temperature", 1.0)
    return Drafter(draft_model.to(model.device, model.dtype), temperature), about

def main():
    """Fifteen tokens in blocks of five: training under the mask equals delayed decoding."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=4))
    model = Glide(Config.for_target(target), ropes_of(target, 15))
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    ids = torch.arange(15)
    with torch.no_grad():
        cache = target(ids[None]).past_key_values
        k, v = cache.layers[1].keys, cache.layers[1].values
        trained = model.head(model(ids[None], {1: (k, v)}))[0].softmax(-1)     # (15, V)
    # Ten tokens are verified.  The last block of five is drafted.
    drafter = Drafter(model)
    verified = k[:, :, :10], v[:, :, :10]
    view = SimpleNamespace(tokens=ids[:10], length=10, kv={1: verified})
    drafter.begin(view, root_id=10)
    drafted = drafter.expand(ids[10:], [-1, 0, 1, 2, 3])                       # (5, V)
    error = (drafted - trained[10:]).abs().max()
    assert error < 1e-5, error
    print(f"training under the block mask = decoding with delayed keys: difference {error:.0e}")

# Differences from the paper, all of them:
#  1. The glimpse's queries get RoPE by the target's table (Layer.glimpse).
#  2. The glimpse of the first block is zero (Layer.glimpse), and it is added to x (Layer).
#  3. By default d_D is the target's, an RMSNorm precedes W_j, and the loss is EDD's (Config).
#  4. Embedding and head start as the target's (the default of `tables` in training/models.py).
#  5. Any layer of the target can be read (for_target's `layer`).
#  6. A query belongs to the block of its own token (block_mask).
#  7. A held-out loss uses the mask (Glide.forward).
#  8. In a drafter of two layers the prompt and accepted leaves glimpse (Drafter.begin).
#  9. In decoding, rounds begin anywhere, and trees may be deeper than L (Drafter.expand).
# Misprints in 4.1: M_D stands for M_T twice, d_b for d_D, "position t" for "position t - 1".

if __name__ == "__main__":
    main()
