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
are accepted the next round drafts k ... o with the keys of a ... j.

Where a target looks things up.  One layer of attention cannot find what followed a token earlier in the text:
that takes two.  Some heads in the middle of a target do just this: they attend to what followed the current
token before.  Their keys lie in the cache, and a drafter that reads such a layer has only to learn the query.
The top layers, which the paper reads, cache little of the kind.  for_target(layer=l) picks the layer; which
one serves, train.py tells: `glide-l13` reads layer 13.

Differences from the paper:
 1. Queries are rotated by the target's rotary embedding at their own position, as the cached keys are (the
    paper is silent; the official code fixes theta = 10000, as glimpse_theta does for its public weights).
 2. Positions of the first block see no key of the target.  The official code falls back to the causal mask
    there, which lets a position see its own key; here such a glimpse contributes zero.
 3. Paper and official code have no norm before W_j; config.norm adds one.  Without it the residual stream is
    small at first, and the scores of the glimpse stay flat for long.
 4. In the printed mask j is the query and k the key.  It is "not used for testing" in the paper; here an
    evaluation loss uses it too, since without it a query would see the target's keys of the future.
 5. With two layers a row depends on what it glimpsed: accepted rows stay as drafted, other tokens are encoded
    in blocks of L from where the last round began, as in training.  In the paper only the last i glimpse.
 6. M_D stands for M_T twice in section 4.1, d_b for d_D, and "up to position t" means t - 1.
 7. "GLIDE-47m" with d_D = 4096 cannot be: one such layer alone has some 200M weights.  Sizes here are free.
 8. Defaults are the paper's, but any layer may be read, the loss may be KL divergence from the target
    (config.loss), and LongSpec's layer has a window, biases, and no last norm (checkpoints/convert.py).

Alone in a project: this file, a Hugging Face model, a drafter from train.py.  Greedy chains of five:

    import torch, glide
    from types import SimpleNamespace
    from transformers import AutoModelForCausalLM, DynamicCache
    model = AutoModelForCausalLM.from_pretrained("my-target")
    drafter, _ = glide.load("my-glide", model)
    ids, cache, seen = torch.tensor([1, 5, 7]), DynamicCache(), 0
    with torch.no_grad():
        model(ids[None, :-1], past_key_values=cache)             # all but the last token, the root
        while len(ids) < 30:
            t = len(ids) - 1                                     # tokens that the cache holds
            kv = {l: (cache.layers[l].keys, cache.layers[l].values) for l in drafter.needs["kv"]}
            drafter.begin(SimpleNamespace(tokens=ids[seen:t], length=t, kv=kv))
            chain, seen = ids[-1:], t
            for i in range(5):
                logits = drafter.expand(chain[-1:], [i - 1])     # node i hangs from node i - 1
                chain = torch.cat((chain, logits.argmax(-1)))
            choice = model(chain[None], past_key_values=cache).logits[0].argmax(-1)
            accepted = (chain[1:] == choice[:-1]).long().cumprod(0).sum().item()
            cache.crop(accepted - 5)                             # rows of rejected tokens leave
            drafter.keep(list(range(min(accepted + 1, 5))))      # the nodes that stay, root first
            ids = torch.cat((ids, choice[:accepted + 1]))

view.tokens (k,): committed since the last begin(), prompt included; view.length: t, all that is committed;
view.kv[l]: keys and values of the target's layer l, (1, H, t, d_k) each.  A tree: expand(tokens (3,),
[0, 0, 1]) gives logits (3, V) of two nodes below node 0 and one below node 1, numbered in the order given to
expand since begin(); confidence(tokens, parents) is the same as calibrated probabilities.

    python glide.py         # the demo: training under the mask and decoding give the same logits
    python train.py glide vanilla
"""
import json
from dataclasses import dataclass
from functools import partial
from math import gcd
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

SLICE = 512              # tokens of a prompt that are encoded at once

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
    latent: int = 0                  # size of DeepSeek's latent rows, which runtime/parts.py reads
    layers_read: tuple = ()          # the target layer l (0-based) that layer m reads
    eps: float = 1e-6                # of the norms
    theta: float = 10000.0           # of its own rotary table; 0: it is the target's
    glimpse_theta: float = 0.0       # of the glimpse's queries; 0: they turn by the target's own table
    norm: bool = False               # an RMSNorm before W_j
    last_norm: bool = True           # an RMSNorm before the head
    bias: bool = False               # of all queries, and of its own keys and values
    window: int = 0                  # earlier rows of its own that a row sees; 0: all of them
    loss: str = "ce"                 # or "kl"

    @classmethod
    def for_target(cls, model, width=None, layers=1, glimpse=True, block=5, layer=None, rows=None):
        """Sizes that fit `model`.  layer: of the target, read by the top layer; rows: its cached_rows."""
        c = model.config.get_text_config()
        rows = rows or cached_rows(model)
        # l = N_T - N_D + m: the drafter's layers look at the target's last ones, in order.
        top = len(rows) - 1 if layer is None else layer
        if not layers - 1 <= top < len(rows):
            raise ValueError(f"layer {top} of the target cannot be read by a drafter of {layers}: it "
                             f"has layers {layers - 1} to {len(rows) - 1} for that")
        keys, values = rows[top]
        # Heads of the target's size, or of the largest one that divides both it and the width
        width = width or c.hidden_size
        head_size = gcd(width, keys.shape[-1])
        feed_forward = -(-width * 8 // 3 // 32) * 32               # Llama's: 8/3 of the width, in steps of 32
        config = cls(c.vocab_size, width, feed_forward, layers, width // head_size, block, glimpse)
        if glimpse:
            config.layers_read = tuple(range(top - layers + 1, top + 1))
            config.target_heads = c.num_attention_heads
            config.target_head_size = keys.shape[-1]
            config.target_value_size = values.shape[-1]
        return config

def block_mask(length, block, device="cpu"):
    """Mask_Block (section 4.1) -> (length, length) bool: query j sees key k iff block(j) > block(k)."""
    of = torch.arange(length, device=device) // block
    return of[:, None] > of[None, :]

# ---------------------------------------------------------------- the target: what it caches, how it rotates
@torch.no_grad()
def cached_rows(model):
    """What the target caches of one token: [(K, V) of a layer], (1, H, 1, d) each."""
    from transformers import DynamicCache
    cache = DynamicCache()
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, past_key_values=cache, use_cache=True)
    return [(rows.keys, rows.values) for rows in cache.layers]

def target_angles(model, length, layers_read=()):
    """The target's rotary table, cos and sin (length, d_k) each.  layers_read: see runtime/parts.py."""
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    # longrope and dynamic NTK: the table depends on how long the text is
    if getattr(rotary, "rope_type", None) in (None, "longrope", "dynamic"):
        raise ValueError(f"{type(model).__name__} does not rotate as Llama does: use runtime/parts.py")
    position = torch.arange(length, device=model.device)[None]
    cos, sin = rotary(position.float(), position)                      # (the former says the dtype)
    return cos[0], sin[0]

def angles(size, length, theta=10000.0):
    """The drafter's own rotary table: cos and sin, (length, size) each."""
    # theta^(-2i / size) for pair i, times the position
    pair = torch.arange(0, size, 2, dtype=torch.float64)
    position = torch.arange(length, dtype=torch.float64)
    turn = torch.outer(position, theta ** (-pair / size))              # (length, size / 2)
    turn = turn.repeat(1, 2)
    return turn.cos().float(), turn.sin().float()

def rotate(x, cos, sin):
    """Rotary embedding of x (..., T, d) by tables (T, d)."""
    a, b = x.chunk(2, -1)
    quarter = torch.cat((-b, a), -1)                                   # (a, b), turned by 90 degrees
    return x * cos + quarter * sin

# ---------------------------------------------------------------- the draft model
class Layer(nn.Module):
    """One layer of the drafter: h += SelfAttn(norm(h)); h += Glimpse(h); h += MLP(norm(h))."""
    rotate_query = staticmethod(rotate)

    def __init__(self, c, m):
        super().__init__()
        self.c = c
        linear = partial(nn.Linear, bias=False)
        norm = partial(nn.RMSNorm, c.width, eps=c.eps)
        self.norm1 = norm()
        self.qkv = linear(c.width, 3 * c.width, bias=c.bias)
        self.o = linear(c.width, c.width)
        if c.glimpse:
            self.read = c.layers_read[m]
            value_size = c.target_value_size or c.target_head_size
            self.glimpse_norm = norm() if c.norm else nn.Identity()
            self.glimpse_q = linear(c.width, c.target_heads * c.target_head_size, bias=c.bias)
            self.glimpse_o = linear(c.target_heads * value_size, c.width)
        self.norm2 = norm()
        self.up = linear(c.width, 2 * c.feed_forward)
        self.down = linear(c.feed_forward, c.width)

    def project(self, x, turn):
        """Queries, keys, values.  x (B, T, d_D), turn: cos and sin (2, T, d) -> (B, heads, T, d) each."""
        qkv = self.qkv(self.norm1(x))                                                        # (B, T, 3 d_D)
        qkv = qkv.unflatten(-1, (3, self.c.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q = rotate(q, *turn)
        k = rotate(k, *turn)
        return q, k, v

    def glimpse(self, x, kv, turn, mask=None):
        """Cross-attention onto the target's cache.  x (B, T, d_D), kv[l] (B, H, t, d_k) each, mask (T, t)."""
        k, v = kv[self.read]
        # Q^{m,j} = H^m W_j, turned to its position as the cached keys are
        q = self.glimpse_q(self.glimpse_norm(x))                                             # (B, T, h d_k)
        q = q.unflatten(-1, (self.c.target_heads, -1))
        q = q.transpose(1, 2)                                                                # (B, h, T, d_k)
        q = self.rotate_query(q, *turn)
        # The cache may lie on another device.  Its type gives way, not the query's: gradients of a mean over
        # many tokens are too small for float16.
        q = q.to(k.device)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        # Heads that share a key (grouped queries) are further rows of one query: no key is repeated.
        group = self.c.target_heads // k.shape[1]
        q = q.unflatten(1, (-1, group))
        q = q.flatten(2, 3)                                                           # (B, H, group T, d_k)
        blind = None
        if mask is not None:
            # A softmax over zero keys is NaN: unmask such rows, then zero their output.
            blind = ~mask.any(1, keepdim=True)                                               # (T, 1)
            mask = (mask | blind).repeat(group, 1)
            mask = mask.to(k.device)
        # hd_j = SoftMax(Q^{m,j} (K^{l,j})^T / sqrt(d_k)) V^{l,j}
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        seen = seen.unflatten(2, (group, -1))
        seen = seen.flatten(1, 2)                                                            # (B, h, T, d_v)
        seen = seen.to(x).transpose(1, 2)
        seen = seen.flatten(2)                                                               # (B, T, h d_v)
        if blind is not None:
            seen = seen.masked_fill(blind, 0)
        return self.glimpse_o(seen)                                                     # [hd_1 ... hd_h] W^O

    def forward(self, x, turns, mask, kv=None, glimpse_mask=None, cache=None):
        """x (B, T, d_D) -> (B, T, d_D).  mask (T, keys) bool: which own rows a row sees; glimpse_mask (T, t):
        which of the target's; None: all.  cache: the store, the slots (T,) to write, how many rows to read.
        """
        # Self-attention, over the drafter's own rows
        q, k, v = self.project(x, turns[0])
        if cache is not None:
            store, slots, keys = cache
            store.index_copy_(3, slots, torch.stack((k, v)))
            k, v = store[:, :, :, :keys]
        if self.c.window:
            # What a row sees is in the order of the text; the last of it is itself.
            place = mask.cumsum(1)                                                           # (T, keys)
            near = place[:, -1:] - place <= self.c.window
            mask = mask & near
        seen = F.scaled_dot_product_attention(q, k.to(q), v.to(q), attn_mask=mask)   # (B, heads, T, d)
        seen = seen.transpose(1, 2)
        seen = seen.flatten(2)
        x = x + self.o(seen)
        # Cross-attention, the glimpse of the target's rows
        if self.c.glimpse:
            x = x + self.glimpse(x, kv, turns[1], glimpse_mask)
        # Feed-forward
        gate_and_up = self.up(self.norm2(x))
        gate, up = gate_and_up.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

class Glide(nn.Module):
    """The draft model, GLIDE or (config.glimpse False) vanilla, all positions at once, as in training."""
    # runtime/parts.py overrides these, for families other than Llama's.
    layer_class = Layer
    cached_rows = staticmethod(cached_rows)
    target_angles = staticmethod(target_angles)

    def __init__(self, config, tables):
        """tables: cos, sin of the target's rotary embedding (target_angles), as long as sequences get."""
        super().__init__()
        c = self.config = config
        self.embed = nn.Embedding(c.vocab, c.width)
        self.layers = nn.ModuleList(self.layer_class(c, m) for m in range(c.layers))
        self.norm = nn.RMSNorm(c.width, eps=c.eps) if c.last_norm else nn.Identity()
        self.head = nn.Linear(c.width, c.vocab, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        length = len(tables[0])
        own = angles(c.width // c.heads, length, c.theta) if c.theta else tables
        if c.glimpse_theta:
            tables = angles(c.target_head_size, length, c.glimpse_theta)
        self.register_buffer("own_table", torch.stack(own), persistent=False)                # (2, length, d)
        self.register_buffer("target_table", torch.stack(tables), persistent=False)

    @classmethod
    def beside(cls, model, config, length):
        """A draft model on the device and in the type of the target's cache: weights may be quantised."""
        rows = cls.cached_rows(model)
        top = max(config.layers_read, default=len(rows) - 1)
        heads = model.config.get_text_config().num_attention_heads
        sizes = [(heads, keys.shape[-1]) for keys, _ in rows]
        wanted = config.target_heads, config.target_head_size
        if config.glimpse and sizes[top:top + 1] != [wanted]:
            raise ValueError(f"the drafter reads layer {top} with heads and head size {wanted}, and here are "
                             f"{sizes[top:top + 1]}: it was made for another target, train one for this one")
        keys, _ = rows[top]
        tables = cls.target_angles(model, length, config.layers_read)
        return cls(config, tables).to(keys.device, keys.dtype)

    def turns(self, position):
        """position (T,) -> cos and sin of the drafter there, (2, T, d), and of the target."""
        return self.own_table.index_select(1, position), self.target_table.index_select(1, position)

    def rows(self, ids, kv=None):
        """ids (B, T), kv {layer: (K, V) of (B, H, T, d_k)} -> (B, T, d_D), which the head reads."""
        c = self.config
        T = ids.shape[1]
        assert set(c.layers_read) <= set(kv or ()), f"the drafter reads target layers {c.layers_read}"
        position = torch.arange(T, device=ids.device)
        causal = position[:, None] >= position[None, :]
        # Mask_Block: the drafter's own rows are up to date, the target's are delayed
        delayed = block_mask(T, c.block, ids.device)
        turns = self.turns(position)
        x = self.embed(ids)                                                                  # (B, T, d_D)
        for layer in self.layers:
            x = layer(x, turns, causal, kv, delayed)
        return self.norm(x)

    def forward(self, ids, kv=None):
        """As rows -> logits (B, T, V): row j for token j + 1."""
        return self.head(self.rows(ids, kv))

    def loss(self, batch):
        """batch: ids, kv, the target's logits (for "kl"); learn (B, T): which rows count, `count` of them;
        sum(f, learn, *rows): f of these rows, as a sum.
        """
        kl = self.config.loss == "kl"

        def of_rows(x, meant):
            log_p_draft = self.head(x).float().log_softmax(-1)                               # (n, V)
            if not kl:
                return F.nll_loss(log_p_draft, meant, reduction="sum")
            p_target = meant.float().softmax(-1)
            return F.kl_div(log_p_draft, p_target, reduction="sum")        # D_KL(p_T || p_D)
        x = self.rows(batch["ids"], batch["kv"])                                             # (B, T, d_D)
        meant = batch["logits"] if kl else batch["ids"].roll(-1, 1)
        total = batch["sum"](of_rows, batch["learn"], x, meant)
        return total / batch["count"]

# ---------------------------------------------------------------- decoding
class Drafter:
    """Decoding with a Glide, step by step; nothing is computed twice."""
    temperature = 1.0                # at which its confidence in the target's greedy choice is calibrated

    def __init__(self, model):
        self.model = model.eval()
        c = self.config = model.config
        self.needs = {"kv": c.layers_read}
        weight = model.embed.weight.detach()
        self.device = weight.device
        # Its own keys and values: rows of committed tokens, then of this round's nodes
        self.store = weight.new_zeros(c.layers, 2, 1, c.heads, 0, c.width // c.heads)
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.context = 0                 # committed tokens that have rows in the store
        self.began = 0                   # t of the last round: how many keys its nodes could glimpse

    @torch.no_grad()
    def begin(self, view):
        """A round starts: x_{<t} is committed, the target's rows for it are in view.kv."""
        self.t = view.length
        self.kv = view.kv
        self.lines = []                  # lines[i]: node i and its ancestors, root first
        missing = self.t - self.context
        if missing:
            tokens = view.tokens[-missing:].to(self.device)
            for piece in tokens.split(SLICE):
                self.encode(piece)

    def encode(self, tokens):
        """Rows of committed tokens that were not drafted: a prompt, the last one of an accepted chain."""
        c, model = self.config, self.model
        end = self.context + len(tokens)
        self.reserve(end)
        place = torch.arange(self.context, end, device=self.device)                          # (p,)
        turns = model.turns(place)
        causal = delayed = None
        if c.layers > 1:
            key = torch.arange(self.t, device=self.device)
            causal = key[:end] <= place[:, None]
            # As in training, a row glimpses what lies before its block of L.
            block_start = place - (place - self.began) % c.block
            delayed = key < block_start[:, None]
        x = model.embed(tokens)[None]                                                        # (1, p, d_D)
        for layer, store in zip(model.layers[:-1], self.store):
            cache = store, place, end
            x = layer(x, turns, causal, self.kv, delayed, cache)
        # The last layer's output is not needed: its keys and values suffice.
        _, k, v = model.layers[-1].project(x, turns[0])
        self.store[-1].index_copy_(3, place, torch.stack((k, v)))
        self.context = end

    @torch.no_grad()
    def expand(self, tokens, parents):
        """One forward over m new nodes.  tokens (m,), parents [m ints], -1 for the root -> logits (m, V)."""
        for parent in parents:
            above = self.lines[parent] if parent >= 0 else []
            self.lines.append(above + [len(self.lines)])
        m = len(parents)
        nodes = len(self.lines)
        keys = self.t + nodes
        # In a chain the row of a node is its position, and a lone node sees all rows.
        slots = torch.arange(keys - m, keys, device=self.device)                             # (m,)
        position = slots
        mask = None
        if m > 1 or len(self.lines[-1]) < nodes or self.config.window:
            # In a tree a node sees the prefix and its own line, which is as long as it is deep.
            lines = self.lines[-m:]
            row = [i for i, line in enumerate(lines) for _ in line]
            sees = torch.zeros(m, nodes, dtype=torch.bool)
            sees[row, sum(lines, [])] = True
            sees = sees.to(self.device, non_blocking=True)
            position = self.t - 1 + sees.sum(1)
            mask = F.pad(sees, (self.t, 0), value=True)                                      # (m, keys)
        self.reserve(keys)
        tokens = tokens.to(self.device)
        return self.run(keys, tokens, position, slots, mask)[0]

    def run(self, keys, x, position, slots, mask, glimpse=None):
        """The forward itself, x: tokens (m,) -> [logits (m, V)].  slots (m,): the rows that they write.

        mask (m, keys) bool: which of the first rows a node sees; glimpse (m, t): of the target's; None: all.
        """
        model = self.model
        turns = model.turns(position)
        x = model.embed(x)[None]                                                             # (1, m, d_D)
        for layer, store in zip(model.layers, self.store):
            cache = store, slots, keys
            x = layer(x, turns, mask, self.kv, glimpse, cache)
        x = model.norm(x)
        logits = model.head(x)
        return [logits[0]]

    def reserve(self, keys):
        """Grow the store (N_D, 2, 1, heads, rows, d) to at least `keys` rows."""
        if keys > self.store.shape[-2]:
            # As many again, so that growing costs each row a constant
            more = max(1024, keys)
            self.store = F.pad(self.store, (0, 0, 0, more))

    def keep(self, path):
        """The nodes `path` were accepted: their rows stay, moved together; all others are forgotten."""
        self.context = self.t + len(path)
        self.began = self.t
        if path and path[-1] >= len(path):                     # not the first nodes: they are in place
            rows = torch.tensor(path, device=self.device) + self.t
            kept = self.store.index_select(-2, rows)
            self.store[..., self.t:self.context, :] = kept

    def confidence(self, tokens, parents):
        """As expand -> probabilities (m, V) that each token is the target's greedy choice, calibrated."""
        logits = self.expand(tokens, parents).float()
        return (logits / self.temperature).softmax(-1)

def load(folder, model, length=None, draft_class=Glide):
    """Read a checkpoint of train.py for the target `model` -> (Drafter in its dtype, training.json)."""
    from safetensors.torch import load_file
    about = json.loads(Path(folder, "training.json").read_text())
    config = Config(**about["config"])
    config.layers_read = tuple(config.layers_read)
    length = length or model.config.get_text_config().max_position_embeddings
    # Nodes of a tree may stand beyond the last token that the context holds.
    draft_model = draft_class.beside(model, config, length + 1024)
    draft_model.load_state_dict(load_file(Path(folder, "model.safetensors")))
    drafter = Drafter(draft_model)
    drafter.temperature = about.get("validation", {}).get("temperature", 1.0)
    return drafter, about

def main():
    """On fifteen tokens in blocks of five: training under the mask equals decoding with the delayed cache."""
    torch.manual_seed(0)
    c = Config(20, 16, 32, layers=2, heads=2)
    c.target_heads = 4
    c.target_head_size = 8
    c.layers_read = (0, 1)
    model = Glide(c, angles(8, 64)).double()
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    ids = torch.randint(20, (15,))
    kv = torch.randn(2, 2, 1, 2, 15, 8).double()           # of two layers; grouped queries
    trained = model(ids[None], dict(enumerate(kv)))[0].detach()                              # (15, V)
    drafter = Drafter(model)
    verified = dict(enumerate(kv[..., :10, :]))
    view = SimpleNamespace(tokens=ids[:10], length=10, kv=verified)
    drafter.begin(view)                                    # ten tokens are verified, five are drafted
    drafted = drafter.expand(ids[10:], [-1, 0, 1, 2, 3])
    error = (drafted - trained[10:]).abs().max()
    assert error < 1e-5, error
    print(f"training under the block mask = decoding with the delayed cache: difference {error:.0e}")

if __name__ == "__main__":
    main()
