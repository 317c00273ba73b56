"""GLIDE: a draft model that glimpses at the target's KV cache.

GLIDE with a CAPE (arXiv 2402.02082), section 4.1 and Figure 2; the vanilla drafter is Figure 4's.

The idea.  When the target has verified x_{<t}, the keys and values of these tokens lie in its
cache.  Each layer of the small draft model gets a cross-attention onto them, between self-attention
and feed-forward, and so reads the prefix as the target understands it.  While it drafts x_{t+1},
x_{t+2}, ... those keys end at x_{t-1}: they are delayed.  Training imitates this by a block mask.

    paper              shape             name here
    N_D, d_D, h, d_k   ints              config.layers, .width, .target_heads, .target_head_size
    H^m                (B, T, d_D)       x, after the self-attention of layer m
    W_j                (d_D, d_k) x h    layer.glimpse_q: all heads side by side
    K^{l,j}, V^{l,j}   (B, H, t, d_k)    kv[l], l = N_T - N_D + m: config.layers_read[m]
    W^O                (h d_k, d_D)      layer.glimpse_o
    L, Mask_Block      int, (T, T)       config.block (5); block_mask(T, L)

The delay on the tokens a b c d e | f g h i j | k l m n o, in blocks of L = 5.  Training: f ... j
are queries, and predict g ... k.  They see the target's KV entries of a ... e, the blocks before
their own, and the drafter's own entries up to themselves.  Decoding: the target has verified
a ... e and generated f, the root of the round; f ... j draft g ... k, and see the target's a ... e.
If it accepts all five, it has verified a ... k and generated l.  There the two differ: l sees the
target's a ... k now, and a ... j in training.

Differences from the paper:
 1. Queries get RoPE by the target's own cos/sin table at their own position, as the cached keys
    have it (the paper is silent; the official code fixes theta = 10000).
 2. Positions of the first block see no key of the target, and their glimpse is zero.  The official
    code falls back to the causal mask there, which lets a position see its own key.
 3. config.norm adds a norm before W_j, which paper and official code do not have.  Without it the
    residual stream is small at first, and the scores of the glimpse stay flat for long.
 4. Any layer may be read.  Some heads in the middle of a target, its induction heads, find what
    followed a token earlier, which one layer alone cannot, and the top layers hold little of it.
    `python figures/probe.py lookup` names the layer.
 5. With two layers, KV entries depend on the glimpse.  Accepted nodes keep theirs; other tokens are
    encoded in blocks of L, as in training, from the last root on (the paper's: the last i alone).
 6. In the paper all weights start at random.  At the target's width, train.py starts embedding and
    LM head with the target's, vanilla's too.  The loss may be KL to the target's distribution.
 7. In the printed mask j is the query and k the key.  It is "not used for testing" there; here a
    held-out loss uses it too, or a query would see the target's keys of the future.
 8. M_D stands for M_T twice in section 4.1, d_b for d_D; "up to position t" means t - 1.

Alone in a project: this file, a Hugging Face model, a drafter from train.py.  Chains of five:

    import torch, glide
    from types import SimpleNamespace
    from transformers import AutoModelForCausalLM, DynamicCache
    model = AutoModelForCausalLM.from_pretrained("my-target")
    drafter, _ = glide.load("my-glide", model)
    ids, cache = torch.tensor([1, 5, 7]), DynamicCache()
    with torch.no_grad():
        model(ids[None, :-1], past_key_values=cache)         # all but the last token, the root
        while len(ids) < 30:
            t = len(ids) - 1                                 # tokens that the cache holds
            kv = {l: (cache.layers[l].keys, cache.layers[l].values) for l in drafter.needs["kv"]}
            drafter.begin(SimpleNamespace(tokens=ids[:t], length=t, kv=kv))
            chain = ids[-1:]
            for i in range(5):
                logits = drafter.expand(chain[-1:], [i - 1])
                chain = torch.cat((chain, logits.argmax(-1)))
            choice = model(chain[None], past_key_values=cache).logits[0].argmax(-1)
            accepted = (chain[1:] == choice[:-1]).long().cumprod(0).sum().item()
            cache.crop(accepted - 5)                         # less the entries of rejected tokens
            drafter.keep(list(range(min(accepted + 1, 5))))  # accepted nodes, the root first
            ids = torch.cat((ids, choice[:accepted + 1]))

A tree: expand(tokens (3,), [0, 0, 1]) gives logits (3, V) of two children of node 0 and one of
node 1, numbered in the order given to expand; softmax(logits / drafter.temperature) is calibrated.

    python glide.py         # the demo: training under the mask and decoding give the same logits
"""
import json
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from math import gcd
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

CHUNK = 512              # tokens of a prompt that are encoded at once

@dataclass
class Config:
    """Sizes and settings; behind each, where the paper has it."""
    vocab: int                       # number of token ids
    width: int                       # d_D (4.1)
    feed_forward: int                # hidden size of the feed-forward sub-layer (Figure 2)
    layers: int = 1                  # N_D: 1 for 7B and 13B targets, 2 for 33B (5.1)
    heads: int = 8                   # of the drafter's self-attention (Figure 2)
    block: int = 5                   # L (4.1)
    glimpse: bool = True             # False: the vanilla drafter (Figure 4)
    target_heads: int = 0            # h (4.1)
    target_head_size: int = 0        # d_k (4.1)
    layers_read: tuple = ()          # the target's layer l, from 0, that layer m reads (4.1)
    eps: float = 1e-6                # of the norms (Figure 2)
    norm: bool = False               # an RMSNorm before W_j (difference 3)
    loss: str = "ce"                 # cross entropy (4.1), or "kl" (difference 6)

    @classmethod
    def for_target(cls, model, width=None, layers=1, glimpse=True, block=5, layer=None,
                   head_size=None):
        """Sizes for `model`.  layer: the target's, that the top layer reads; head_size: its d_k."""
        c = model.config.get_text_config()
        # l = N_T - N_D + m: the drafter's layers read the target's last ones, in order.
        top = c.num_hidden_layers - 1 if layer is None else layer
        assert top >= layers - 1, f"{layers} layers cannot read up to layer {top}"
        width = width or c.hidden_size
        # Heads of the target's size, or of the largest one that divides both it and the width
        d_k = head_size or getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        heads = width // gcd(width, d_k)
        feed_forward = -(-width * 8 // 3 // 32) * 32     # Llama's 8/3, up to a multiple of 32
        config = cls(c.vocab_size, width, feed_forward, layers, heads, block, glimpse)
        if glimpse:
            config.layers_read = tuple(range(top - layers + 1, top + 1))
            config.target_heads = c.num_attention_heads
            config.target_head_size = d_k
        return config

def block_mask(length, block, device="cpu"):
    """Mask_Block (4.1): query j sees key k if block(j) > block(k) -> (length, length) bool."""
    block_of = torch.arange(length, device=device) // block
    return block_of[:, None] > block_of[None, :]

# -------------------------------------------------- rotary position embeddings (RoPE)
def target_angles(model, length):
    """The target's cos/sin table, (length, d_k) each.  ValueError where it is not Llama's."""
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    # The tables of longrope and dynamic NTK depend on the length of the text.
    if getattr(rotary, "rope_type", None) in (None, "longrope", "dynamic"):
        name = type(model).__name__
        raise ValueError(f"{name} does not rotate as Llama does: use runtime/parts.py")
    position = torch.arange(length, device=model.device)[None]
    cos, sin = rotary(position.float(), position)            # (of the former it takes the type)
    return cos[0], sin[0]

def angles(size, length, theta=10000.0):
    """The drafter's own cos/sin table, (length, size) each."""
    # position * theta^(-2i / size), for the pair of entries i and i + size / 2
    pair = torch.arange(0, size, 2, dtype=torch.float64)
    position = torch.arange(length, dtype=torch.float64)
    frequency = theta ** (-pair / size)
    angle = torch.outer(position, frequency).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()

def apply_rope(x, cos, sin):
    """RoPE of x (..., T, d), cos and sin (T, d)."""
    a, b = x.chunk(2, -1)
    rotated_half = torch.cat((-b, a), -1)
    return x * cos + rotated_half * sin

# -------------------------------------------------- the draft model
# Keys and values of a layer (2, 1, heads, capacity, d), slots (m,) of new ones, how many there are
Cache = namedtuple("Cache", "store slots keys")
# cos and sin at the T positions of a forward: (2, T, d) of the drafter, (2, T, d_k) of the target
Ropes = namedtuple("Ropes", "own target")

class Layer(nn.Module):
    """One layer of Figure 2: h += SelfAttn(norm(h)); h += Glimpse(h); h += MLP(norm(h))."""
    query_rope = staticmethod(apply_rope)

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
        """Own queries, keys, values.  x (B, T, d_D), rope (2, T, d) -> (B, heads, T, d) each."""
        qkv = self.qkv(self.norm1(x))                                  # (B, T, 3 d_D)
        qkv = qkv.unflatten(-1, (3, self.c.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q = apply_rope(q, *rope)
        k = apply_rope(k, *rope)
        return q, k, v

    def glimpse(self, x, kv, rope, mask=None):
        """Cross-attention.  x (B, T, d_D), kv[l] (B, H, t, d_k) each, mask (T, t) or None: all."""
        B, T, _ = x.shape
        k, v = kv[self.target_layer]
        h = self.c.target_heads
        H = k.shape[1]
        # Q^{m,j} = H^m W_j, then RoPE as the cached keys have it (difference 1)
        q = self.glimpse_q(self.glimpse_norm(x))                       # (B, T, h d_k)
        q = q.reshape(B, T, h, -1).transpose(1, 2)                     # (B, h, T, d_k)
        q = self.query_rope(q, *rope)
        # On the cache's device, but in the type of q: in float16 gradients would be lost.
        q = q.to(k.device)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        # Grouped queries: heads that share a key become further queries of one head.
        group = h // H
        q = q.reshape(B, H, group * T, -1)
        allowed = None
        if mask is not None:
            # A softmax over no key is NaN: such a query may see all keys, and gets zero below.
            sees_none = ~mask.any(1, keepdim=True)                     # (T, 1)
            allowed = mask | sees_none
            allowed = allowed.repeat(group, 1).to(k.device)            # (group T, t)
        # hd_j = SoftMax(Q^{m,j} (K^{l,j})^T / sqrt(d_k)) V^{l,j}
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        concat = heads.reshape(B, h, T, -1).transpose(1, 2)            # (B, T, h, d_k)
        concat = concat.flatten(2).to(x)
        if mask is not None:
            concat = concat.masked_fill(sees_none, 0)                  # (difference 2)
        return self.glimpse_o(concat)                                  # Concat(hd_1 ... hd_h) W^O

    def forward(self, x, ropes, mask, kv=None, glimpse_mask=None, cache=None):
        """x (B, T, d_D) -> the same.  mask (T, keys), glimpse_mask (T, t); None: all are seen."""
        # Self-attention
        q, k, v = self.project(x, ropes.own)
        if cache is not None:
            new = torch.stack((k, v))                                  # (2, B, heads, T, d)
            cache.store.index_copy_(3, cache.slots, new)
            k, v = cache.store[:, :, :, :cache.keys]
        heads = F.scaled_dot_product_attention(q, k, v.to(q), attn_mask=mask)
        concat = heads.transpose(1, 2).flatten(2)                      # (B, T, d_D)
        x = x + self.o(concat)
        # Cross-attention: the glimpse
        if self.c.glimpse:
            x = x + self.glimpse(x, kv, ropes.target, glimpse_mask)
        # Feed-forward
        gate_and_up = self.up(self.norm2(x))
        gate, up = gate_and_up.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

class Glide(nn.Module):
    """The draft model, GLIDE or (config.glimpse False) vanilla; forward: all positions at once."""
    # Other families and LongSpec have others (runtime/parts.py, beyond/longspec.py).
    config_class = Config
    layer_class = Layer

    def __init__(self, config, tables):
        """tables: the target's cos and sin (target_angles), as long as sequences get."""
        super().__init__()
        c = self.config = config
        self.embed = nn.Embedding(c.vocab, c.width)
        layers = [self.layer_class(c, m) for m in range(c.layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(c.width, eps=c.eps)
        self.head = nn.Linear(c.width, c.vocab, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        own = angles(c.width // c.heads, len(tables[0]))
        self.register_buffer("own_table", torch.stack(own), persistent=False)
        self.register_buffer("target_table", torch.stack(tables), persistent=False)

    @classmethod
    def beside(cls, model, config, length):
        """A draft model for texts of `length` tokens, where the target lies and of its type."""
        return cls(config, target_angles(model, length)).to(model.device, model.dtype)

    def ropes(self, position):
        """position (T,) -> cos and sin there."""
        own = self.own_table.index_select(1, position)
        target = self.target_table.index_select(1, position)
        return Ropes(own, target)

    def forward(self, ids, kv=None):
        """ids (B, T), kv {layer: (K, V) of (B, H, T, d_k)} -> (B, T, d_D), which the head reads."""
        T = ids.shape[1]
        position = torch.arange(T, device=ids.device)
        ropes = self.ropes(position)
        # The drafter's own entries are up to date, the target's are delayed: Mask_Block.
        causal = position[:, None] >= position[None, :]
        delayed = block_mask(T, self.config.block, ids.device)
        x = self.embed(ids)                                            # (B, T, d_D)
        for layer in self.layers:
            x = layer(x, ropes, causal, kv, delayed)
        return self.norm(x)

    def loss_of(self, x, labels):
        """Summed over x (n, d_D).  labels: ids (n,), or for "kl" the target's logits (n, V)."""
        log_p_draft = self.head(x).float().log_softmax(-1)             # (n, V)
        if self.config.loss == "ce":
            return F.nll_loss(log_p_draft, labels, reduction="sum")
        p_target = labels.float().softmax(-1)
        return F.kl_div(log_p_draft, p_target, reduction="sum")        # D_KL(p_target || p_draft)

    def loss(self, batch):
        """The mean over the loss mask batch["learn"] (B, T); see train.py for the batch."""
        labels = batch["ids"].roll(-1, 1)                              # the tokens that follow
        if self.config.loss == "kl":
            labels = batch["logits"]
        x = self(batch["ids"], batch["kv"])              # (B, T, d_D)
        total = batch["sum"](self.loss_of, batch["learn"], x, labels)
        return total / batch["count"]

# -------------------------------------------------- decoding
class Drafter:
    """Decoding with a Glide, step by step; nothing is computed twice."""
    temperature = 1.0                # at which it is as confident in the target's choice as right

    def __init__(self, model):
        self.model = model.eval()
        c = self.config = model.config
        self.needs = {"kv": c.layers_read}
        weight = model.layers[0].o.weight.detach()
        self.device = weight.device
        # Own keys and values (N_D, 2, 1, heads, capacity, d): committed tokens, then nodes
        size = c.width // c.heads
        self.store = weight.new_zeros(c.layers, 2, 1, c.heads, 0, size)
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.context = 0                 # committed tokens with entries in the store
        self.last_root = 0               # position of the root of the round before

    @torch.no_grad()
    def begin(self, view):
        """A round starts: x_{<t} is committed, and view.kv holds the target's entries of it."""
        self.t = view.length
        self.kv = view.kv
        self.visible = []                # visible[i][j]: node i sees node j <= i
        missing = self.t - self.context
        if missing:
            tokens = view.tokens[-missing:].to(self.device)
            for chunk in tokens.split(CHUNK):
                self.encode(chunk)

    def encode(self, tokens):
        """KV entries of committed tokens that were not drafted: a prompt, a chain's last token."""
        c, model = self.config, self.model
        end = self.context + len(tokens)
        self.reserve(end)
        position = torch.arange(self.context, end, device=self.device)             # (p,)
        ropes = model.ropes(position)
        causal = delayed = None
        if c.layers > 1:
            key = torch.arange(self.t, device=self.device)                         # (t,)
            causal = key[:end] <= position[:, None]
            # As in training, a query sees what lies before its block of L.  Blocks begin at the
            # last root, as that round did: its nodes saw what lay before the root.
            within_block = (position - self.last_root) % c.block
            block_start = position - within_block
            delayed = key < block_start[:, None]
        x = model.embed(tokens)[None]                                              # (1, p, d_D)
        for layer, store in zip(model.layers[:-1], self.store):
            cache = Cache(store, position, end)
            x = layer(x, ropes, causal, self.kv, delayed, cache)
        # The last layer's output is not needed, only its keys and values.
        _, k, v = model.layers[-1].project(x, ropes.own)
        self.store[-1].index_copy_(3, position, torch.stack((k, v)))
        self.context = end

    @torch.no_grad()
    def expand(self, tokens, parents):
        """One forward over m new nodes.  tokens (m,), parents [m ints], -1: the root -> (m, V)."""
        for parent in parents:
            ancestors = self.visible[parent] if parent >= 0 else []
            others = [False] * (len(self.visible) - len(ancestors))
            self.visible.append(ancestors + others + [True])
        m = len(parents)
        nodes = len(self.visible)
        keys = self.t + nodes
        slots = torch.arange(keys - m, keys, device=self.device)                   # (m,)
        # The next node of a chain sees all entries, and its slot is its position.
        position = slots
        mask = None
        if m > 1 or not all(self.visible[-1]):
            new = self.visible[-m:]
            padded = [seen + [False] * (nodes - len(seen)) for seen in new]
            visible = torch.tensor(padded)                                         # (m, nodes)
            visible = visible.to(self.device, non_blocking=True)
            # The prefix is visible, too.  A node sees its ancestors and itself: so deep it is.
            position = self.t - 1 + visible.sum(1)
            mask = F.pad(visible, (self.t, 0), value=True)                         # (m, keys)
        self.reserve(keys)
        tokens = tokens.to(self.device)
        return self.run(keys, tokens, position, slots, mask)[0]

    def run(self, keys, x, position, slots, mask, glimpse=None):
        """The forward.  x: tokens (m,), slots (m,), masks (m, keys), (m, t) -> [logits (m, V)]."""
        ropes = self.model.ropes(position)
        hidden = self.model.embed(x)[None]                                         # (1, m, d_D)
        for layer, store in zip(self.model.layers, self.store):
            cache = Cache(store, slots, keys)
            hidden = layer(hidden, ropes, mask, self.kv, glimpse, cache)
        logits = self.model.head(self.model.norm(hidden))
        return [logits[0]]

    def reserve(self, keys):
        """Let the store have a capacity of at least `keys`."""
        if keys > self.store.shape[-2]:
            more = max(1024, keys)       # doubled: each entry is copied a constant number of times
            self.store = F.pad(self.store, (0, 0, 0, more))

    def keep(self, path):
        """The nodes `path`, root first, were accepted: their entries are compacted, others go."""
        self.context = self.t + len(path)
        self.last_root = self.t
        in_place = list(range(len(path)))
        if path != in_place:
            slots = torch.tensor(path, device=self.device) + self.t
            kept = self.store.index_select(-2, slots)
            self.store[..., self.t:self.context, :] = kept

def load(folder, model, length=None, draft_class=Glide):
    """Read a checkpoint of train.py for the target -> (Drafter in its type, training.json)."""
    about = json.loads(Path(folder, "training.json").read_text())
    config = draft_class.config_class(vocab=0, width=0, feed_forward=0)
    for name, value in about["config"].items():
        setattr(config, name, value)                         # (some are for subclasses alone)
    length = length or model.config.get_text_config().max_position_embeddings
    # Nodes of a tree may stand beyond the last token that the context holds.
    draft_model = draft_class.beside(model, config, length + 1024)
    draft_model.load_state_dict(load_file(Path(folder, "model.safetensors")))
    drafter = Drafter(draft_model)
    drafter.temperature = about.get("validation", {}).get("temperature", 1.0)
    return drafter, about

def main():
    """Fifteen tokens in blocks of five: training under the mask equals decoding with the delay."""
    torch.manual_seed(0)
    c = Config(20, 16, 32, heads=2, target_heads=4, target_head_size=8, layers_read=(7,))
    model = Glide(c, angles(8, 64)).double()
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    ids = torch.randint(20, (15,))
    kv = torch.randn(2, 1, 2, 15, 8).double()
    trained = model.head(model(ids[None], {7: kv}))[0]                 # (15, V)
    drafter = Drafter(model)
    verified = kv[..., :10, :]           # of ten tokens; five are drafted
    view = SimpleNamespace(tokens=ids[:10], length=10, kv={7: verified})
    drafter.begin(view)
    drafted = drafter.expand(ids[10:], [-1, 0, 1, 2, 3])
    error = (drafted - trained[10:]).abs().max()
    assert error < 1e-5, error
    print(f"training under the block mask = decoding with delayed keys: difference {error:.0e}")

if __name__ == "__main__":
    main()
