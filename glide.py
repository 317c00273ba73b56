"""GLIDE: a draft model that glimpses the target's KV cache.

GLIDE with a CAPE (arXiv 2402.02082), section 4.1 and Figure 2; the vanilla drafter is Figure 4's control.

The idea.  When the target has verified x_{<t} its keys and values lie in the cache for free.  Each layer of
the small draft model gets a cross-attention onto them, between self-attention and feed-forward, so that the
drafter reads the prefix with the target's own understanding.  While drafting x_{t+1}, x_{t+2}, ... those
keys end at x_{t-1}: they are delayed.  Training imitates the delay with a block-wise mask.

    paper              shape               name here
    N_T, N_D, d_D      ints                the target's layers; config.layers, config.width
    H^m                (B, T, d_D)         x, after self-attention of layer m
    W_j                (d_D, d_k) x h      layer.glimpse_q: all heads of the target side by side
    K^{l,j}, V^{l,j}   (B, H, t, d_k)      kv[l] with l = N_T - N_D + m: config.layers_read[m]
    W^O                (h d_k, d_D)        layer.glimpse_o
    L                  int                 config.block: length of a block in training (5)
    Mask_Block         (T, T)              block_mask(T, L)

The delay on fifteen tokens a b c d e | f g h i j | k l m n o, in blocks of L = 5.  In training the query of
h sees the target's keys of a ... e, those of the blocks before its own, and the drafter's own of a ... h.  It
is the same in decoding: when the target has verified a ... e, then f ... j are drafted one by one; once they
are accepted the next round drafts k ... o with the keys of a ... j.  With two layers the second one's key of
h bears what the first one saw, so a row is never encoded twice.  Rows that were not drafted are encoded as in
training: a prompt's in blocks of L, the last accepted token's with the keys that its round began with.

Differences from the paper:
 1. Queries are rotated by the target's rotary embedding at their own position, as the cached keys are (the
    paper is silent; the official code fixes theta = 10000, as glimpse_theta does for its public weights).
 2. Positions of the first block see no key of the target.  The official code falls back to the causal mask
    there, which lets a position see its own key; here such a glimpse contributes zero.
 3. The glimpse reads the residual stream as it is, without a norm before it, as the official code does.
 4. In the printed mask j is the query and k the key.  It is "not used for testing" in the paper; here an
    evaluation loss uses it too, since without it a query would see the target's keys of the future.
 5. With several layers decoding computes what training did; the official code re-encodes accepted tokens.
 6. M_D stands for M_T twice in section 4.1, d_b for d_D, and "up to position t" means t - 1.
 7. "GLIDE-47m" with d_D = 4096 cannot be: one such layer alone has some 200M weights.  Sizes here are free.

    python glide.py         # the demo: training under the mask and decoding give the same logits
    python train.py glide vanilla
"""
import json
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import gcd
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

@dataclass
class Config:
    """Sizes.  vocab: ids; width: d_D; target_*: what the rows of the target's cache look like."""
    vocab: int
    width: int
    feed_forward: int                # hidden size of the MLP
    layers: int = 1                  # N_D: 1 for 7B and 13B targets, 2 for 33B (section 5.1)
    heads: int = 8
    block: int = 5                   # L (section 4.1)
    glimpse: bool = True             # False: the vanilla drafter
    target_heads: int = 0            # h
    target_head_size: int = 0        # d_k
    target_value_size: int = 0       # of a value, where it is not d_k
    latent: int = 0                  # size of the latent in multi-head latent attention: see whole
    layers_read: tuple = ()          # the target layer l (0-based) that layer m reads
    eps: float = 1e-6                # of the norms
    theta: float = 10000.0           # of its own rotary table
    glimpse_theta: float = 0.0       # of the glimpse's queries; 0: they turn by the target's own table

    @classmethod
    def for_target(cls, model, width=None, layers=1, glimpse=True, block=5, layer=None):
        """Sizes that fit `model`.  layer: the target layer (0-based) that the top layer reads, or None."""
        c = model.config.get_text_config()
        kv = cached_rows(model)
        # l = N_T - N_D + m: the drafter's layers look at the target's last ones, in order.
        top = len(kv) - 1 if layer is None else layer
        if not layers - 1 <= top < len(kv):
            raise ValueError(f"layer {top} of the target cannot be read by a drafter of {layers}: it "
                             f"has layers {layers - 1} to {len(kv) - 1} for that")
        read = range(top - layers + 1, top + 1)
        keys, values = kv[top]
        if any(kv[i][0].shape != keys.shape for i in read):
            raise ValueError(f"the target's layers {list(read)} have keys of several sizes: read one layer")
        # Heads of the target's size, or of the largest one that divides both it and the width
        width = width or c.hidden_size
        own = gcd(width, keys.shape[-1])
        if own % 2:
            raise ValueError(f"a drafter of width {width} would have heads of odd size: change the width")
        # Llama's feed-forward: 8/3 of the width, rounded up to a multiple of 32
        feed_forward = -(-width * 8 // 3 // 32) * 32
        config = cls(c.vocab_size, width, feed_forward, layers)
        config.heads = width // own
        config.block = block
        config.glimpse = glimpse
        if glimpse:
            config.layers_read = tuple(read)
            config.target_heads = c.num_attention_heads
            config.target_head_size = keys.shape[-1]
            config.target_value_size = values.shape[-1]
            config.latent = getattr(c, "kv_lora_rank", None) or 0
        return config

def block_mask(length, block, device="cpu"):
    """Mask_Block (section 4.1) -> (length, length) bool: query j sees key k iff block(j) > block(k)."""
    of = torch.arange(length, device=device) // block
    return of[:, None] > of[None, :]

# ---------------------------------------------------------------- what the target caches
def whole(k, v, latent):
    """K and V as attention uses them: one head's, where DeepSeek caches a latent as k, what turns as v."""
    if k.shape[-1] != latent:
        return k, v
    return torch.cat((v, k), -1), k

def cached_rows(model):
    """What the target caches of one token: [(K, V) of a layer], (1, H, 1, d) each; shared ones once."""
    from transformers import DynamicCache
    c = model.config.get_text_config()
    latent = getattr(c, "kv_lora_rank", None)
    # Weights on "meta" are brought by accelerate, and so are the ids.
    device = "cpu" if model.device.type == "meta" else model.device
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    cache = DynamicCache()
    try:
        with torch.no_grad():
            model(input_ids=token, past_key_values=cache, use_cache=True)
        assert cache.layers, "nothing was cached"
        return [whole(rows.keys, rows.values, latent) for rows in cache.layers]
    except Exception as why:
        raise ValueError(f"{type(model).__name__} does not cache keys and values in each of its layers, and "
                         f"GLIDE reads them ({type(why).__name__}): take a target that does") from None

# ---------------------------------------------------------------- rotary embeddings
def angles(size, length, theta=10000.0):
    """The drafter's own rotary table: cos and sin, (length, size) each."""
    # theta^(-2i / size) for pair i, times the position
    pair = torch.arange(0, size, 2, dtype=torch.float64)
    position = torch.arange(length, dtype=torch.float64)
    turn = torch.outer(position, theta ** (-pair / size))              # (length, size / 2)
    turn = turn.repeat(1, 2)
    return turn.cos(), turn.sin()

def target_angles(model, length, layers_read=()):
    """The target's own rotary table for the last of these layers, from its own module; (length, r) each.

    Some turn all of a text otherwise once it is long (longrope, dynamic NTK): the row of a position is that
    of a text which ends within the same limit.  r = 0 where there is no such module (GPT-2).  Queries must
    learn the rest where neighbouring entries turn (Cohere, GPT-J), or none in this layer (SmolLM3).
    """
    c = model.config.get_text_config()
    device = "cpu" if model.device.type == "meta" else model.device
    like = torch.zeros(1, 1, 1, device=device)                      # says the dtype
    position = torch.arange(length, device=device)[None]
    # A copy, as what it was last asked stays in a module
    rotary = deepcopy(getattr(model.get_decoder(), "rotary_emb", None))
    kind = {}
    rope = getattr(c, "rope_parameters", None)
    if rotary and "layer_type" in signature(rotary.forward).parameters:
        top = layers_read[-1] if layers_read else -1
        kind["layer_type"] = c.layer_types[top]
        rope = rope.get(kind["layer_type"])
    if not (rotary and rope):
        none = like.new_zeros(length, 0)
        return none, none
    # The limits; in a text of one token a module forgets a long one.
    ends = [1, rope.get("original_max_position_embeddings"), c.max_position_embeddings, length]
    parts, rows = [], 0
    for end in sorted(min(end or length, length) for end in ends):
        found = rotary(like, position[:, :end], **kind)
        if torch.is_tensor(found):                                  # cos + i sin (DeepSeek V2)
            found = found.real, found.imag
        table = torch.stack(found)[:, 0]                            # (2, end, r)
        parts.append(table[:, rows:])
        rows = end
    table = torch.cat(parts, 1)
    if table.shape[-1] == len(getattr(rotary, "inv_freq", ())):     # an angle stands there once (GPT-OSS)
        table = table.repeat(1, 1, 2)
    return table.detach().unbind()

def rotate_half(x):
    """(a, b) -> (-b, a) for the two halves of the last axis."""
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)

def rotate(x, cos, sin):
    """Rotary embedding of x (..., T, d) by tables (T, r): the first r <= d entries turn, i, i + r/2."""
    r = cos.shape[-1]
    if r == x.shape[-1]:
        return x * cos + rotate_half(x) * sin
    turned = x[..., :r]
    rest = x[..., r:]
    turned = turned * cos + rotate_half(turned) * sin
    return torch.cat((turned, rest), -1)

# ---------------------------------------------------------------- the draft model
class Layer(nn.Module):
    """One layer of the drafter: h += SelfAttn(norm(h)); h += Glimpse(h); h += MLP(norm(h))."""

    def __init__(self, c, m):
        super().__init__()
        self.c = c
        linear = partial(nn.Linear, bias=False)
        self.norm1 = nn.RMSNorm(c.width, eps=c.eps)
        self.qkv = linear(c.width, 3 * c.width)
        self.o = linear(c.width, c.width)
        if c.glimpse:
            self.read = c.layers_read[m]
            value_size = c.target_value_size or c.target_head_size
            self.glimpse_q = linear(c.width, c.target_heads * c.target_head_size)
            self.glimpse_o = linear(c.target_heads * value_size, c.width)
        self.norm2 = nn.RMSNorm(c.width, eps=c.eps)
        self.up = linear(c.width, 2 * c.feed_forward)
        self.down = linear(c.feed_forward, c.width)

    def project(self, x, turn):
        """Queries, keys, values.  x (B, T, d_D), turn: cos and sin, (T, d) each -> (B, heads, T, d) each."""
        qkv = self.qkv(self.norm1(x))                                                        # (B, T, 3 d_D)
        qkv = qkv.unflatten(-1, (3, self.c.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return rotate(q, *turn), rotate(k, *turn), v

    def glimpse(self, x, kv, turn, mask=None):
        """Cross-attention onto the target's cache.  x (B, T, d_D), kv[l] (B, H, t, d_k) each, mask (T, t)."""
        k, v = kv[self.read]
        k, v = whole(k, v, self.c.latent)
        # Q^{m,j} = H^m W_j, turned to its position as the cached keys are
        q = self.glimpse_q(x)                                                                # (B, T, h d_k)
        q = q.unflatten(-1, (self.c.target_heads, -1))
        q = q.transpose(1, 2)                                                                # (B, h, T, d_k)
        q = rotate(q, *turn).to(k)
        # Heads that share a key (grouped queries) are further rows of one query: no key is repeated.
        group = self.c.target_heads // k.shape[1]
        q = q.unflatten(1, (-1, group))
        q = q.flatten(2, 3)                                                           # (B, H, group T, d_k)
        blind = None
        if mask is not None:
            # A softmax over no key is not a number: such a row looks anywhere, and what it saw is dropped.
            blind = ~mask.any(1, keepdim=True)                                               # (T, 1)
            mask = (mask | blind).repeat(group, 1).to(k.device)
        # hd_j = SoftMax(Q^{m,j} (K^{l,j})^T / sqrt(d_k)) V^{l,j}
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        seen = seen.unflatten(2, (group, -1))
        seen = seen.flatten(1, 2)                                                            # (B, h, T, d_v)
        seen = seen.transpose(1, 2).flatten(2).to(x)                                         # (B, T, h d_v)
        if blind is not None:
            seen = seen.masked_fill(blind, 0)
        # [hd_1, ..., hd_h] W^O
        return self.glimpse_o(seen)

    def forward(self, x, turn, mask, kv=None, target_turn=None, glimpse_mask=None, cache=None):
        """x (B, T, d_D) -> (B, T, d_D).  turn, target_turn: cos and sin of the rows' positions.

        mask (T, keys) bool: what a row sees of the drafter's own rows (None: all); glimpse_mask (T, t): of
        the target's, kv[l].  cache: writes (k, v) behind the rows of earlier tokens, and returns all of them.
        """
        # Self-attention, over the drafter's own rows
        q, k, v = self.project(x, turn)
        if cache is not None:
            k, v = cache(k, v)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)     # (B, heads, T, d)
        seen = seen.transpose(1, 2).flatten(2)
        x = x + self.o(seen)
        # Cross-attention, the glimpse of the target's rows
        if self.c.glimpse:
            x = x + self.glimpse(x, kv, target_turn, glimpse_mask)
        # Feed-forward
        gate_and_up = self.up(self.norm2(x))
        gate, up = gate_and_up.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

class Glide(nn.Module):
    """The draft model, GLIDE or (config.glimpse False) vanilla, all positions at once, as in training."""

    def __init__(self, config, tables):
        """tables: cos, sin of the target's rotary embedding (target_angles), as long as sequences get."""
        super().__init__()
        c = self.config = config
        self.embed = nn.Embedding(c.vocab, c.width)
        self.layers = nn.ModuleList(Layer(c, m) for m in range(c.layers))
        self.norm = nn.RMSNorm(c.width, eps=c.eps)
        self.head = nn.Linear(c.width, c.vocab, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        length = tables[0].shape[0]
        own = angles(c.width // c.heads, length, c.theta)
        if c.glimpse_theta:
            tables = angles(c.target_head_size, length, c.glimpse_theta)
        dtype = torch.get_default_dtype()
        for name, (cos, sin) in {"": own, "target_": tables}.items():
            self.register_buffer(name + "cos", cos.to(dtype), persistent=False)
            self.register_buffer(name + "sin", sin.to(dtype), persistent=False)

    def turns(self, position):
        """((cos, sin) of the drafter, (cos, sin) of the target) at these positions: a slice or (T,)."""
        own = self.cos[position], self.sin[position]
        return own, (self.target_cos[position], self.target_sin[position])

    def rows(self, ids, kv=None):
        """ids (B, T), kv {layer: (K, V) of (B, H, T, d_k)} -> (B, T, d_D), which the head reads."""
        c, T = self.config, ids.shape[1]
        assert set(c.layers_read) <= set(kv or ()), f"the drafter reads target layers {c.layers_read}"
        turn, target_turn = self.turns(slice(0, T))
        position = torch.arange(T, device=ids.device)
        causal = position[:, None] >= position[None, :]
        # Mask_Block: the drafter's own rows are up to date, the target's are delayed
        delayed = block_mask(T, c.block, ids.device)
        x = self.embed(ids)                                                                  # (B, T, d_D)
        for layer in self.layers:
            x = layer(x, turn, causal, kv, target_turn, delayed)
        return self.norm(x)

    def forward(self, ids, kv=None):
        """As rows -> logits (B, T, V): row j for token j + 1."""
        return self.head(self.rows(ids, kv))

    def predict(self, batch):
        """batch: train.frozen_forward's -> logits (B, T, V), for validation."""
        return self(batch["ids"], batch["kv"])

    def loss(self, batch):
        """Cross entropy of the next token (section 5.1): the mean over the rows that learn (B, T) chooses."""
        def cross_entropy(x, following):
            return F.cross_entropy(self.head(x).float(), following, reduction="sum")
        x = self.rows(batch["ids"], batch["kv"])                                             # (B, T, d_D)
        following = batch["ids"].roll(-1, 1)                                                 # (B, T)
        return batch["sum"](cross_entropy, batch["learn"], x, following) / batch["count"]

# ---------------------------------------------------------------- decoding
def direct(run, reserve, keys, numbers, *tensors):
    """Run a forward: have room for so many keys, then run(keys, numbers, *tensors)."""
    reserve(keys)
    return run(keys, numbers, *tensors)

class Drafter:
    """Decoding with a Glide, step by step; nothing is computed twice.  Its contract is verify.py's.

    The store holds the drafter's own keys and values: rows of committed tokens, then of this round's nodes.
    """
    temperature = 1.0                # at which its confidence in the target's greedy choice is calibrated

    def __init__(self, model):
        self.model, self.config = model.eval(), model.config
        self.needs = {"kv": model.config.layers_read}
        self.vocab, self.device = model.config.vocab, model.embed.weight.device
        self.call = direct               # on CUDA verify.py puts its Static in this place
        c = self.config
        shape = (2, c.layers, c.heads, 0, c.width // c.heads)
        self.store = model.embed.weight.new_zeros(shape)
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.context = 0                 # committed tokens that have rows in the store
        self.began = None         # t of the last round: how many of the target's keys its nodes could glimpse

    def begin(self, view):
        """A round starts: x_{<t} is committed, the target's rows for it are in view.kv."""
        self.kv, self.t = view.kv, view.length
        self.lines = []                  # of each node of the round: the nodes from the root down to it
        missing = self.t - self.context
        if missing:
            self.encode(view.tokens[-missing:])

    def encode(self, tokens):
        """Rows of committed tokens that were never drafted: the prompt, the last one of an accepted chain."""
        c, model, device = self.config, self.model, tokens.device
        self.room(self.t)
        place = torch.arange(self.context, self.t, device=device)                            # (p,)
        turn, target_turn = model.turns(place)
        causal = delayed = None
        if c.layers > 1:
            key = torch.arange(self.t, device=device)
            causal = key <= place[:, None]
            # How many of the target's keys a row may glimpse: in a prompt the earlier blocks, as in training;
            # later, what was committed when its round began.
            limit = place // c.block * c.block
            if self.began is not None:
                limit = torch.full_like(place, self.began)
            delayed = key < limit[:, None]
        kv = {i: (k[:, :, :self.t], v[:, :, :self.t]) for i, (k, v) in self.kv.items()}
        x = model.embed(tokens)[None]                                                        # (1, p, d_D)
        for m, layer in enumerate(model.layers[:-1]):
            write = self.writer(m, place, self.t)
            x = layer(x, turn, causal, kv, target_turn, delayed, write)
        # Nobody asks what the last layer makes of these rows: its keys and values suffice.
        _, k, v = model.layers[-1].project(x, turn)
        write = self.writer(c.layers - 1, place, self.t)
        write(k, v)
        self.context = self.t

    def expand(self, tokens, parents):
        """One forward over m new nodes.  tokens (m,), parents [m ints], -1 for the root -> logits (m, V)."""
        before, m = len(self.lines), len(parents)
        for parent in parents:
            above = self.lines[parent] if parent >= 0 else []
            self.lines.append(above + [len(self.lines)])
        inputs = [tokens]
        if len(self.lines[-1]) < before + m:
            # In a tree a node sees of the nodes its own line, which is as long as it is deep
            sees = torch.zeros(m, before + m, dtype=torch.bool)
            for i, line in enumerate(self.lines[before:]):
                sees[i, line] = True
            inputs.append(sees.to(tokens.device, non_blocking=True))
        first = self.t + before
        return self.call(self.run, self.room, first + m, [self.t, first], *inputs)[0]

    def run(self, keys, numbers, tokens, sees=None):
        """tokens (m,), in the store from slot `first` on; sees (m, nodes): of a tree -> [logits (m, V)]

        numbers: t, first; ints, or tensors () where shapes are padded.
        """
        model, m, (t, first) = self.model, len(tokens), numbers
        slots = first + torch.arange(m, device=tokens.device)
        key = torch.arange(keys, device=tokens.device)
        # A chain, each node below all before it: its place in the store is its position
        position, mask = slots, None
        if sees is not None:
            position = t + sees.sum(1) - 1
            columns = t + torch.arange(sees.shape[1], device=tokens.device)
            mask = (key < t).repeat(m, 1).index_copy(1, columns, sees)                       # (m, keys)
        elif m > 1 or torch.is_tensor(t):
            mask = key <= slots[:, None]
        turn, target_turn = model.turns(position)
        x = model.embed(tokens)[None]                                                        # (1, m, d_D)
        glimpse = None                   # all that the target has verified, however deep the node is
        for i, layer in enumerate(model.layers):
            rows = self.kv[layer.read][0].shape[2] if self.config.glimpse else 0
            if torch.is_tensor(t) or rows > t:                 # padded: rows behind t are void
                glimpse = (torch.arange(rows, device=tokens.device) < t).repeat(m, 1)
            x = layer(x, turn, mask, self.kv, target_turn, glimpse, self.writer(i, slots, keys))
        return [model.head(model.norm(x))[0]]

    def writer(self, layer, slots, keys):
        """The `cache` of Layer.forward: writes rows at `slots` (m,), returns the first `keys` rows."""
        own_keys = self.store[0, layer, None]                                  # (1, heads, rows, d)
        own_values = self.store[1, layer, None]

        def write(k, v):
            own_keys.index_copy_(2, slots, k)
            own_values.index_copy_(2, slots, v)
            return own_keys[:, :, :keys], own_values[:, :, :keys]
        return write

    def room(self, rows):
        """Have room for so many rows -> where all rows lie.  The store is (2, N_D, heads, rows, d)."""
        more = rows - self.store.shape[3]
        if more > 0:
            # As many again, so that growing costs each row a constant
            more = max(1024, more + rows)
            self.store = F.pad(self.store, (0, 0, 0, more))
        return self.store.data_ptr(), *((k.data_ptr(), v.data_ptr(), k.shape) for k, v in self.kv.values())

    def keep(self, path):
        """The nodes `path` were accepted: their rows stay, moved together; all others are forgotten."""
        self.context = self.t + len(path)
        if path != list(range(len(path))):
            rows = torch.tensor(path, device=self.store.device) + self.t
            kept = self.store.index_select(3, rows)
            self.store[:, :, :, self.t:self.context] = kept
        self.began = self.t

def load(folder, model, length=None):
    """Read a checkpoint of train.py for the target `model` -> (Drafter in its dtype, training.json)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    folder = Path(folder)
    for name in ("training.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"no drafter in {folder}: {name} is missing; train one with train.py or name "
                             "its folder with --checkpoint")
    try:
        about = json.loads((folder / "training.json").read_text())
        config = Config(**about["config"])
        config.layers_read = tuple(config.layers_read)
        c = model.config.get_text_config()
        length = length or getattr(c, "max_position_embeddings", None) or 2048
        # Nodes of a tree may stand beyond the last token that the context holds.
        draft_model = Glide(config, target_angles(model, length + 1024, config.layers_read))
        draft_model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as why:
        reason = f"{type(why).__name__}: {str(why).splitlines()[0][:100]}"
        raise ValueError(f"the drafter in {folder} is damaged ({reason}); train or copy it again") from None
    # Where the rows lie that it reads, and of their type: weights may be quantised.
    rows = cached_rows(model)
    layer = max(config.layers_read, default=-1)
    keys, _ = rows[min(layer, len(rows) - 1)]
    drafter = Drafter(draft_model.to(keys.device, keys.dtype))
    drafter.temperature = about.get("validation", {}).get("temperature", 1.0)
    return drafter, about

def main():
    """On fifteen tokens in blocks of five: training under the mask equals decoding with the delayed cache."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    c = Config(vocab=20, width=16, feed_forward=32, layers=2, heads=2)
    c.target_heads = 4
    c.target_head_size = 8
    c.layers_read = (1, 2)
    model = Glide(c, angles(8, 64))
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    ids = torch.randint(20, (1, 15))
    kv = {layer: torch.randn(2, 1, 2, 15, 8) for layer in c.layers_read}       # two heads: grouped queries
    with torch.no_grad():
        trained = model(ids, kv)[0]                                                          # (15, V)
        drafter, worst = Drafter(model), 0
        for t in (5, 10):
            seen = {layer: rows[:, :, :, :t] for layer, rows in kv.items()}
            drafter.begin(SimpleNamespace(tokens=ids[0, t - 5:t], length=t, kv=seen))
            drafted = drafter.expand(ids[0, t:t + 5], [-1, 0, 1, 2, 3])
            worst = max(worst, (drafted - trained[t:t + 5]).abs().max())
            drafter.keep([0, 1, 2, 3, 4])
    assert worst < 1e-5, worst
    print(f"training under the block mask = decoding with the delayed cache: largest difference {worst:.0e}")

if __name__ == "__main__":
    main()
