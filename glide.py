"""GLIDE: a draft model that glimpses the target's KV cache.

GLIDE with a CAPE (arXiv 2402.02082), section 4.1 and Figure 2.  The vanilla drafter of Figure 4,
which is the same model without the glimpse, is here, too: Config(glimpse=False).

The idea.  When the target has verified the tokens before position t, their keys and values lie in
its cache.  GLIDE is a small decoder.  Each of its layers has a cross-attention to those keys and
values, between self-attention and feed-forward: the glimpse.  So it reads the prefix as the target
understands it.  While it drafts x_{t+1}, x_{t+2}, ..., the target's keys still end at x_{t-1}: they
are delayed.  A block mask imitates this delay in training.

    paper              shape             name here
    N_D, d_D, h, d_k   ints              config.layers, .width, .target_heads, .target_head_size
    H^m                (B, T, d_D)       x, after the self-attention of layer m
    W_j                (d_D, d_k) x h    layer.glimpse_q: all heads in one matrix
    K^{l,j}, V^{l,j}   (B, H, t, d_k)    kv[l], where l = N_T - N_D + m is config.layers_read[m]
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
                    generates l.  The query l now sees a ... k; in training it saw a ... j.  Blocks
                    start wherever a round starts in decoding, and at multiples of L in training.

Differences from the paper:
 1. Queries of the glimpse get RoPE at their own position, by the target's own cos/sin table, since
    the cached keys have it.  The paper does not mention it.  The official code fixes theta = 10000.
 2. Positions of the first block see no key of the target.  Their glimpse is zero.  The official
    code gives them the causal mask instead, which lets a position see its own key.
 3. config.norm puts an RMSNorm before W_j.  Neither the paper nor the official code has one.
    Without it the residual stream is small at first, and the attention scores of the glimpse stay
    nearly uniform for a long part of the training.
 4. Any layer of the target can be read, not only its last ones.  Induction heads, which attend to
    the token that followed an earlier occurrence of the current one, sit in its middle layers.  A
    drafter of one layer cannot learn such a head by itself.  `python figures/probe.py lookup` finds
    the layer.  Differences 3 and 4 are independent of each other.  The shipped `glide` has both: it
    reads layer 13 of the target's layers 0 ... 23, through the norm.  The shipped `glide-top` has
    neither: it is the paper's setting.  Comparing the two does not tell which difference helps.
 5. With two layers, the second one's KV entries depend on what the first layer's glimpse saw.  The
    paper describes the glimpse of the round's own tokens (its "last i output vectors") and does not
    say how earlier tokens are encoded; the official code encodes accepted tokens anew each round.
    Here an accepted node keeps the KV entries that expand() computed.  Two kinds of committed
    tokens have none yet: those of the prompt, and an accepted leaf, which expand() was never given.
    They are encoded under the block mask.  Its blocks are counted from the previous round's root,
    and in a prompt from position 0.
 6. In the paper all weights start at random.  Where the drafter is as wide as the target, train.py
    copies the target's embedding and LM head into it, and does the same for the vanilla drafter.
    The loss may also be the KL divergence to the target's distribution.
 7. The mask is "not used for testing" in the paper.  Here a held-out loss uses it, too: without it
    a query would see target keys of its own token and of later ones.
 8. In the prose of section 4.1, block(j) is the block of the predicted token x_j.  In the example
    above the query e predicts f.  It would then count as a query of the block f g h i j, though e
    itself lies in the block before.  In the printed Mask_Block, in the inference that the paper
    describes, and here, block(j) is the block in which the query itself lies.
 9. The delay of a query is its distance to the last target key that it sees.  In training it is 1
    at the start of a block and L at its end.  A drafted tree that is deeper than L (PCT goes to
    depth 10) has longer delays.  The drafter is not trained for these, but its calibration
    temperature is fitted on drafted chains of up to ten tokens, which have some of them.
10. Misprints in section 4.1: M_D stands for M_T twice, d_b for d_D, "up to position t" for "up to
    position t - 1".

Alone in a project, you need this file, a Hugging Face model, and a drafter from train.py.  Greedy
decoding with drafted chains of five tokens:

    import torch, glide
    from types import SimpleNamespace
    from transformers import AutoModelForCausalLM, DynamicCache
    model = AutoModelForCausalLM.from_pretrained("my-target")
    drafter, _ = glide.load("my-glide", model)
    ids, cache = torch.tensor([1, 5, 7]), DynamicCache()
    with torch.no_grad():
        # The target's cache always holds all tokens but the last one, which is the root.
        model(ids[None, :-1], past_key_values=cache)
        while len(ids) < 30:
            t = len(ids) - 1
            kv = {l: (cache.layers[l].keys, cache.layers[l].values) for l in drafter.needs["kv"]}
            drafter.begin(SimpleNamespace(tokens=ids[:t], length=t, kv=kv))
            chain = ids[-1:]
            for i in range(5):
                # Node 0 is the root, whose parent is -1.  The parent of node i is node i - 1.
                logits = drafter.expand(chain[-1:], [i - 1])
                chain = torch.cat((chain, logits.argmax(-1)))
            # The target's choice after each of the six tokens, and how many drafts agree with it
            choice = model(chain[None], past_key_values=cache).logits[0].argmax(-1)
            accepted = (chain[1:] == choice[:-1]).long().cumprod(0).sum().item()
            cache.crop(accepted - 5)         # removes the last 5 - accepted entries
            # The root and four drafted tokens were expanded.  Those of them that stay:
            drafter.keep(list(range(min(1 + accepted, 5))))
            ids = torch.cat((ids, choice[:accepted + 1]))

A tree is drafted in the same way: after the root, expand(tokens (3,), [0, 0, 1]) gives the logits
(3, V) of two children of node 0 and of one child of node 1.  Nodes are numbered in the order in
which they were given to expand.  softmax(logits / drafter.temperature) is calibrated: a token of
probability p is the target's greedy choice in a share p of all cases.

    python glide.py         # the demo: training under the mask and decoding give the same logits
    python train.py glide glide-top vanilla
"""
import json
from collections import namedtuple
from dataclasses import dataclass, fields
from functools import partial
from math import ceil, gcd
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

CHUNK = 512              # a long prompt is encoded in pieces of this many tokens
BEYOND = 1024            # positions after the last token of a full context, for the nodes of a tree


@dataclass
class Config:
    """Sizes and settings; in parentheses, where the paper has them."""
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
    def for_target(cls, model, width=None, layers=1, glimpse=True, block=5, layer=None,
                   head_size=None):
        """The Config of a drafter for the Hugging Face model `model`.

        width: d_D; None: the target's.  layer: the target layer that the drafter's last layer
        reads; None: the target's last, as in the paper.  head_size: d_k, where it is not what the
        target's configuration says.  Raises ValueError where the target has no such layer.
        """
        c = model.config.get_text_config()
        # l = N_T - N_D + m: the drafter's layers read the target's last ones, in order.
        top = c.num_hidden_layers - 1 if layer is None else layer
        if top not in range(layers - 1, c.num_hidden_layers):
            raise ValueError(f"layer {top} of the target cannot be read by the last of {layers} "
                             f"drafter layers: choose one from {layers - 1} to "
                             f"{c.num_hidden_layers - 1}")
        width = width or c.hidden_size
        d_k = head_size or head_size_of(c)
        # The drafter's own heads have the size d_k, or the largest divisor of it that divides the
        # width, too.
        heads = width // gcd(width, d_k)
        # Llama's ratio of 8/3, rounded up to a multiple of 32
        feed_forward = 32 * ceil(width * 8 / 3 / 32)
        config = cls(c.vocab_size, width, feed_forward, layers, heads, block, glimpse)
        if glimpse:
            config.layers_read = tuple(range(top - layers + 1, top + 1))
            config.target_heads = c.num_attention_heads
            config.target_head_size = d_k
        return config


def head_size_of(c):
    """d_k, from the configuration of a Hugging Face model."""
    return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads


def block_mask(length, block, device="cpu"):
    """Mask_Block (4.1): query j sees key k where block(j) > block(k) -> (length, length) bool."""
    block_of = torch.arange(length, device=device) // block
    return block_of[:, None] > block_of[None, :]


# -------------------------------------------------- rotary position embeddings (RoPE)
def target_angles(model, length):
    """The target's own cos/sin table for positions 0 ... length - 1: (length, d_k) each.

    Raises ValueError where the target's RoPE is not Llama's.
    """
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    # The tables of longrope and dynamic NTK change with the length of the text.
    if getattr(rotary, "rope_type", None) in (None, "longrope", "dynamic"):
        raise ValueError(f"the RoPE of {type(model).__name__} is not Llama's, which glide.py "
                         "needs: see runtime/drafters.py")
    position = torch.arange(length, device=model.device)[None]
    # The first argument supplies only the dtype and the device of the table.
    cos, sin = rotary(position.float(), position)
    return cos[0], sin[0]


def angles(size, length, theta=10000.0):
    """The cos/sin table of the drafter's self-attention, for heads of `size`: (length, size) each.

    The angle of entries i and i + size / 2 at a position is position * theta^(-2 i / size).
    """
    two_i = torch.arange(0, size, 2, dtype=torch.float64)
    position = torch.arange(length, dtype=torch.float64)
    frequency = theta ** (-two_i / size)
    angle = torch.outer(position, frequency).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()


def apply_rope(x, cos, sin):
    """RoPE of x (..., T, d), by cos and sin (T, d)."""
    a, b = x.chunk(2, -1)
    rotated_half = torch.cat((-b, a), -1)
    return x * cos + rotated_half * sin


# -------------------------------------------------- the draft model
# The drafter's own KV cache of one layer, in one forward over m tokens:
#   store   (2, 1, heads, capacity, d): keys and values
#   slots   (m,): where the KV entries of these tokens are written
#   end     int: the entries before this slot are read
Cache = namedtuple("Cache", "store slots end")

# cos and sin at the positions of the T tokens of a forward:
#   own     (2, T, d): of the drafter's self-attention
#   target  (2, T, d_k): of the glimpse, from the target's table
Ropes = namedtuple("Ropes", "own target")


class Layer(nn.Module):
    """One layer of Figure 2: x += SelfAttn(norm(x)); x += Glimpse(x); x += MLP(norm(x))."""
    # RoPE of the glimpse's queries; layers for other families of targets replace it.
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
        """Queries, keys and values of the drafter's self-attention.

        x (B, T, d_D), rope (2, T, d) -> q, k, v (B, heads, T, d) each
        """
        qkv = self.qkv(self.norm1(x))                                  # (B, T, 3 d_D)
        qkv = qkv.unflatten(-1, (3, self.c.heads, -1))                 # (B, T, 3, heads, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q = apply_rope(q, *rope)
        k = apply_rope(k, *rope)
        return q, k, v

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
        q = self.query_rope(q, *rope)
        # Attention runs on the device of the target's cache, but in the drafter's dtype: in the
        # target's float16 the drafter's small gradients would be rounded to zero.
        q = q.to(k.device)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        # With grouped-query attention, h / H query heads share a KV head.  They are stacked along
        # the axis of the queries, so that no key is copied.
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

    def forward(self, x, ropes, mask, kv=None, glimpse_mask=None, cache=None):
        """x (B, T, d_D) -> (B, T, d_D)

        mask (T, keys) is that of the self-attention, glimpse_mask (T, t) that of the glimpse; None:
        all keys are seen.  Without a Cache, the keys of the self-attention are those of the T
        tokens.  With one, the tokens' KV entries are first written to it, and the keys are all of
        its entries before cache.end.
        """
        # Self-attention
        q, k, v = self.project(x, ropes.own)
        if cache is not None:
            new = torch.stack((k, v))                                  # (2, B, heads, T, d)
            cache.store.index_copy_(3, cache.slots, new)
            k, v = cache.store[:, :, :, :cache.end]
        # Under autocast, RoPE makes q and k float32 but leaves v as it is.
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
    """The draft model: GLIDE, or the vanilla drafter where config.glimpse is False."""
    # Subclasses for other families of targets replace these two.
    config_class = Config
    layer_class = Layer

    def __init__(self, config, tables):
        """tables: the target's cos and sin (length, d_k), as target_angles gives them.

        No position may be `length` or larger.
        """
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
    def for_target(cls, model, config, length):
        """A draft model with random weights, on the target's device and in its dtype.

        length: the number of positions it serves.  Raises ValueError where `config` was made for
        another target.
        """
        c = model.config.get_text_config()
        fits = config.vocab == c.vocab_size
        if config.glimpse:
            heads = config.target_heads, config.target_head_size
            same_heads = heads == (c.num_attention_heads, head_size_of(c))
            fits = fits and same_heads and max(config.layers_read) < c.num_hidden_layers
        if not fits:
            raise ValueError("the drafter was made for another target: its vocabulary, heads or "
                             "layers are not those of this one; train one for this with train.py")
        return cls(config, target_angles(model, length)).to(model.device, model.dtype)

    def ropes(self, position):
        """position (T,) -> Ropes at these positions."""
        own = self.own_table.index_select(1, position)
        target = self.target_table.index_select(1, position)
        return Ropes(own, target)

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

    def loss_of(self, x, labels):
        """The loss summed over n positions.  x (n, d_D) is what forward gives.

        labels: the next token ids (n,); for "kl" the target's logits (n, V).
        """
        log_p_draft = self.head(x).float().log_softmax(-1)             # (n, V)
        if self.config.loss == "ce":
            return F.nll_loss(log_p_draft, labels, reduction="sum")
        # D_KL(p_target || p_draft)
        log_p_target = labels.float().log_softmax(-1)
        return F.kl_div(log_p_draft, log_p_target, reduction="sum", log_target=True)

    def loss(self, batch):
        """The mean loss of a training step; train.py's docstring lists the entries of `batch`.

        batch["learn"] (B, T) is the loss mask, and batch["count"] the number of labels in the step.
        batch["sum"] sums a loss over the positions that the mask selects.
        """
        labels = batch["ids"].roll(-1, 1)                              # (B, T): the next tokens
        if self.config.loss == "kl":
            labels = batch["logits"]                                   # (B, T, V)
        x = self(batch["ids"], batch["kv"])                            # (B, T, d_D)
        total = batch["sum"](self.loss_of, batch["learn"], x, labels)
        return total / batch["count"]


# -------------------------------------------------- decoding
class Drafter:
    """Drafts with a Glide, by the contract of a drafter in verify.py.

    In each round begin is called once, then expand any number of times, then keep.  No KV entry is
    computed twice.
    """
    # Calibration temperature: of the tokens that have probability p in softmax(logits /
    # temperature), a share p is the target's greedy choice.
    temperature = 1.0

    def __init__(self, model):
        self.model = model.eval()
        c = self.config = model.config
        self.needs = {"kv": c.layers_read}
        weight = model.layers[0].o.weight.detach()
        self.device = weight.device
        # The drafter's own KV entries, (N_D, 2, 1, heads, capacity, d): those of committed tokens
        # first, then those of this round's nodes, in the order given to expand
        size = c.width // c.heads
        self.store = weight.new_zeros(c.layers, 2, 1, c.heads, 0, size)
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.context = 0                 # number of committed tokens that have entries in the store
        self.last_root = 0               # position of the previous round's root

    @torch.no_grad()
    def begin(self, view):
        """Start a round: the tokens before position view.length are committed.

        view.tokens ends with the tokens committed since the last begin, and may hold earlier ones
        before them.  view.kv[l] is (K, V), (1, H, view.length, d_k) each: the target's KV entries.
        """
        self.t = view.length
        self.kv = view.kv
        self.visible = []                # visible[i][j]: whether node i sees node j, for j <= i
        missing = self.t - self.context
        if missing:
            tokens = view.tokens[-missing:].to(self.device)
            for chunk in tokens.split(CHUNK):
                self.encode(chunk)

    def encode(self, tokens):
        """Compute the KV entries of the next p committed tokens, which expand did not read.

        tokens (p,): those of a prompt, or an accepted leaf.
        """
        c, model = self.config, self.model
        end = self.context + len(tokens)
        self.reserve(end)
        position = torch.arange(self.context, end, device=self.device)             # (p,)
        ropes = model.ropes(position)
        causal = delayed = None
        # The first layer's KV entries depend on token and position alone.  Only those of a second
        # layer depend on the glimpse (difference 5), so only then are masks needed.
        if c.layers > 1:
            key = torch.arange(self.t, device=self.device)                         # (t,)
            causal = key[:end] <= position[:, None]                                # (p, end)
            # Mask_Block, its blocks counted from the previous round's root: a query sees the
            # target's entries of all tokens before its own block.
            within_block = (position - self.last_root) % c.block
            block_start = position - within_block                                  # (p,)
            delayed = key < block_start[:, None]                                   # (p, t)
        x = model.embed(tokens)[None]                                              # (1, p, d_D)
        for layer, store in zip(model.layers[:-1], self.store):
            cache = Cache(store, position, end)
            x = layer(x, ropes, causal, self.kv, delayed, cache)
        # Of the last layer only the keys and values are needed, not the output.
        _, k, v = model.layers[-1].project(x, ropes.own)
        self.store[-1].index_copy_(3, position, torch.stack((k, v)))
        self.context = end

    @torch.no_grad()
    def expand(self, tokens, parents):
        """One forward over m new nodes -> logits (m, V) of the token after each.

        tokens (m,); parents: m ints, the index of each node's parent among all nodes given to
        expand in this round, in order; -1 for the root.
        """
        for parent in parents:
            # A node sees its parent, all that its parent sees, and itself.
            ancestors = self.visible[parent] if parent >= 0 else []
            others = [False] * (len(self.visible) - len(ancestors))
            self.visible.append(ancestors + others + [True])
        m = len(parents)
        nodes = len(self.visible)
        end = self.t + nodes
        slots = torch.arange(end - m, end, device=self.device)                     # (m,)
        # A single node that continues a chain sees all entries, and its position is its slot.
        position = slots
        mask = None
        if m > 1 or not all(self.visible[-1]):
            padded = [seen + [False] * (nodes - len(seen)) for seen in self.visible[-m:]]
            visible = torch.tensor(padded)                                         # (m, nodes)
            visible = visible.to(self.device, non_blocking=True)
            # The root is at position t, and a node at depth n sees n + 1 nodes.
            position = self.t + visible.sum(1) - 1                                 # (m,)
            # Every node sees all committed tokens.
            mask = F.pad(visible, (self.t, 0), value=True)                         # (m, end)
        self.reserve(end)
        tokens = tokens.to(self.device)
        return self.run(end, tokens, position, slots, mask)[0]

    def run(self, end, tokens, position, slots, mask, glimpse_mask=None):
        """The tensor part of expand, which runtime/static.py gives static shapes -> [logits (m, V)]

        tokens, position, slots (m,), mask (m, end), glimpse_mask (m, t); where a mask is None,
        all entries are seen.  It returns a list, since verify.Target.run does.
        """
        ropes = self.model.ropes(position)
        hidden = self.model.embed(tokens)[None]                                    # (1, m, d_D)
        for layer, store in zip(self.model.layers, self.store):
            cache = Cache(store, slots, end)
            hidden = layer(hidden, ropes, mask, self.kv, glimpse_mask, cache)
        logits = self.model.head(self.model.norm(hidden))                          # (1, m, V)
        return [logits[0]]

    def reserve(self, length):
        """Make sure that the store has a capacity of at least `length` entries."""
        if length > self.store.shape[-2]:
            # Adding `length`, which is larger than the capacity, at least doubles it.  So growing
            # copies each entry a few times at most.
            more = max(1024, length)
            self.store = F.pad(self.store, (0, 0, 0, more))

    def keep(self, path):
        """End the round: the expanded nodes in `path` were accepted, the others are dropped.

        path: a list of node indices, the root first.  The KV entries of these nodes are compacted
        into the slots after those of the committed tokens.
        """
        self.context = self.t + len(path)
        self.last_root = self.t
        in_place = list(range(len(path)))
        if path != in_place:
            slots = torch.tensor(path, device=self.device) + self.t
            kept = self.store.index_select(-2, slots)
            self.store[..., self.t:self.context, :] = kept


def load(folder, model, length=None, draft_class=Glide):
    """Load a checkpoint of train.py for the target `model` -> (Drafter, training.json as a dict).

    The drafter has the target's dtype and device.  length: the longest sequence to decode; None:
    the target's context.  Raises ValueError where the checkpoint does not fit the target.
    """
    about = json.loads(Path(folder, "training.json").read_text())
    saved, known = about["config"], fields(draft_class.config_class)
    settings = {field.name: saved[field.name] for field in known if field.name in saved}
    config = draft_class.config_class(**settings)
    length = length or model.config.get_text_config().max_position_embeddings
    draft_model = draft_class.for_target(model, config, length + BEYOND)
    try:
        draft_model.load_state_dict(load_file(Path(folder, "model.safetensors")))
    except RuntimeError:
        raise ValueError(f"{folder} does not hold the weights that its training.json describes: "
                         "train the drafter again") from None
    drafter = Drafter(draft_model)
    drafter.temperature = about.get("validation", {}).get("temperature", 1.0)
    return drafter, about


def main():
    """Fifteen tokens in blocks of five: training under the mask equals delayed decoding."""
    torch.manual_seed(0)
    config = Config(20, 16, 32, heads=2, target_heads=4, target_head_size=8, layers_read=(7,))
    model = Glide(config, angles(8, 64)).double()
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    ids = torch.randint(20, (15,))
    # Keys and values of the target's layer 7, which has two KV heads
    k, v = torch.randn(2, 1, 2, 15, 8).double()
    trained = model.head(model(ids[None], {7: (k, v)}))[0]             # (15, V)
    # Ten tokens are verified.  The last block of five is drafted.
    drafter = Drafter(model)
    verified = k[:, :, :10], v[:, :, :10]
    drafter.begin(SimpleNamespace(tokens=ids[:10], length=10, kv={7: verified}))
    drafted = drafter.expand(ids[10:], [-1, 0, 1, 2, 3])               # (5, V)
    error = (drafted - trained[10:]).abs().max()
    assert error < 1e-5, error
    print(f"training under the block mask = decoding with delayed keys: difference {error:.0e}")


if __name__ == "__main__":
    main()
