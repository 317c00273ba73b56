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

Positions and layers count from 0 here.  The target has h query heads and n_kv KV heads.

The delay, by an example.  A text is a b c d e | f g h i j | k l m n o, in blocks of L = 5.
    Training.  The queries f g h i j predict g h i j k.  Each sees the target's KV entries of the
               blocks before its own, a ... e, and the drafter's entries up to itself.
    Decoding.  The target has verified a ... e and generated f, the root of this round.  The queries
               f g h i j draft g h i j k, and see the target's entries of a ... e.  If the target
               accepts all five drafted tokens, it has verified a ... k, and generates l, the next
               root.  The query l sees a ... k: in decoding blocks begin where rounds do.

To use it in your project, with verify.py and cape.py.  model: the target, of transformers.

    drafter, _ = glide.load("my-glide", model)
    out = verify.generate(verify.Target(model), drafter, cape.cape, ids)

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
from transformers.models.llama.modeling_llama import rotate_half

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")     # config.model_type of the targets

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

        width: d_D, a multiple of d_k; None: the target's.  layers: N_D.  layer: the target layer
        that the drafter's last layer reads; None: the target's last, as in the paper.  more:
        further settings, say glimpse=False.
        """
        c = model.config.get_text_config()
        d_k = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        width = width or c.hidden_size
        # Llama's ratio of 8/3, rounded up to a multiple of 32
        feed_forward = 32 * ceil(width * 8 / 3 / 32)
        config = cls(c.vocab_size, width, feed_forward, layers, width // d_k, **more)
        if config.glimpse:
            # l = N_T - N_D + m: the drafter's layers read the target's last ones, in order.
            # Differs from the paper: they may read earlier ones (`layer`).
            last = c.num_hidden_layers - 1 if layer is None else layer
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

def rope_of(model):
    """The target's RoPE, for the drafter's self-attention and the glimpse -> a function `rope`.

    rope(x, position (T,)) gives the function that rotates queries or keys (..., T, d) at these
    positions; x supplies the dtype.  Raises ValueError for other families than FAMILIES, and for a
    RoPE that changes with the length of the text (dynamic NTK, longrope).
    """
    decoder = model.get_decoder()
    is_served = decoder.config.model_type in FAMILIES
    if not is_served or decoder.rotary_emb.rope_type in ("dynamic", "longrope"):
        raise ValueError(f"glide.py serves {', '.join(FAMILIES)} with a fixed RoPE, but not this "
                         f"{type(model).__name__}: see runtime/families.py")

    def rope(x, position):
        cos, sin = decoder.rotary_emb(x, position[None])               # (1, T, d) each
        return lambda q: q * cos + rotate_half(q) * sin
    return rope

# -------------------------------------------------- the draft model
def attention(q, k, v, mask=None):
    """SoftMax(q k^T / sqrt(d)) v of all heads -> (B, h, T, d)

    q (B, h, T, d); k, v (B, n_kv, t, d): h / n_kv query heads share a KV head.  mask (T, t) bool;
    None: every query sees all t keys.  A query that sees no key gets zero.
    """
    attend = partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True)
    if mask is None:
        return attend()
    # A softmax over no keys would be NaN: let such a query see all keys, and drop its result.
    mask = mask.to(k.device)
    sees_none = ~mask.any(1, keepdim=True)                             # (T, 1)
    return attend(attn_mask=mask | sees_none).masked_fill(sees_none, 0)

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

        ropes: as Glide.ropes gives them.  mask (T, keys) is that of the self-attention, and
        glimpse_mask (T, t) that of the glimpse; None: all keys are seen.  update(k, v) writes the
        tokens' KV entries to a cache, and returns the keys and values to attend to; None: the T
        tokens attend to one another only.
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

    def __init__(self, config, rope, glimpse_rope=None, embed=None, head=None, layer_class=Layer):
        """rope: as rope_of gives it.  The other arguments are for drafters that differ from GLIDE.

        glimpse_rope: another one for the glimpse.  embed, head: modules in place of new ones, ids
        (...) -> (..., d_D) -> logits (..., V).  layer_class(config, m) makes layer m.
        """
        super().__init__()
        c = self.config = config
        self.embed = embed or nn.Embedding(c.vocab, c.width)
        self.layers = nn.ModuleList([layer_class(c, m) for m in range(c.layers)])
        self.norm = nn.RMSNorm(c.width, eps=c.eps)
        self.head = head or nn.Linear(c.width, c.vocab, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        self.rope, self.glimpse_rope = rope, glimpse_rope

    def ropes(self, x, position):
        """position (T,) -> the functions that apply RoPE there, of self-attention and glimpse"""
        rope = glimpse_rope = self.rope(x, position)
        if self.glimpse_rope is not None:
            glimpse_rope = self.glimpse_rope(x, position)
        return rope, glimpse_rope

    def forward(self, ids, kv=None):
        """Training: all positions at once, under the block mask -> (B, T, d_D).

        self.head computes the logits from the result.  ids (B, T); kv[l] is (K, V),
        (B, n_kv, T, d_k) each: the target's KV entries of the same tokens.
        Differs from the paper, whose mask is "not used for testing": a held-out loss needs it, or a
        query would see the target's keys of its own token and of later ones.
        """
        T = ids.shape[1]
        position = torch.arange(T, device=ids.device)
        # The drafter's own KV entries are up to date, the target's are delayed.
        causal = position[:, None] >= position[None, :]
        delayed = block_mask(T, self.config.block, ids.device)
        x = self.embed(ids)                                            # (B, T, d_D)
        ropes = self.ropes(x, position)
        for layer in self.layers:
            x = layer(x, ropes, causal, kv, delayed)
        return self.norm(x)

    def terms(self, batch, block=None):
        """The terms of train.py's loss, here one -> [(x (B, T, d_D), labels, no mask of its own)]

        batch: see train.py.  labels: the next token ids (B, T), or for "kl" the target's logits
        (B, T, V).  block: EDD's L, which differs by step; GLIDE's is config.block.
        """
        x = self(batch.ids, batch.kv)
        # The last id wraps around, but its position is in no loss mask.
        labels = batch.ids.roll(-1, 1) if self.config.loss == "ce" else batch.logits
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
# write, place, reserve and has_other_weights stand in edd.py, too: each file is copied alone.
def write(store, slots, end, k, v):
    """Write KV entries k, v (1, heads, m, d) of one layer at slots (m,) -> its keys, its values

    store (2, 1, heads, capacity, d).  Those before `end` are returned.
    """
    store.index_copy_(3, slots, torch.stack((k, v)))
    return store[:, :, :, :end]

class Drafter:
    """Drafts with a Glide, by the contract of a drafter in verify.py."""

    def __init__(self, model, temperature=1.0):
        """temperature calibrates: of the tokens that have probability p in softmax(logits /
        temperature), a fraction p is the target's greedy choice.
        """
        self.model, self.temperature = model.eval(), temperature
        c = self.config = model.config
        self.needs = {"kv": c.layers_read}
        weight = model.layers[0].o.weight.detach()
        self.device = weight.device
        # The drafter's own KV entries: of committed tokens, then of this round's nodes
        self.store = weight.new_zeros(c.layers, 2, 1, c.heads, 0, c.width // c.heads)
        self.reset(probs=None)

    def reset(self, probs):
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
        given the root.
        """
        kept = self.encoded - self.t             # how many of view.tokens have their entries
        tokens = view.tokens[kept:].to(self.device)                                # (n,)
        self.t = view.length
        self.kv = view.kv
        self.paths = []
        self.reserve(self.t)
        block, model = self.config.block, self.model
        position = torch.arange(self.encoded, self.t, device=self.device)          # (n,)
        x = model.embed(tokens)[None]                                              # (1, n, d_D)
        ropes = model.ropes(x, position)
        # A second layer's entries depend on what the first one glimpsed.
        # Differs from the paper: these positions also glimpse, under Mask_Block as in training; in
        # 4.1 only positions t ... t+i-1 query.
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

    def run(self, end, tokens, position, slots, mask, glimpse_mask=None):
        """The tensor part of expand -> [logits (m, V)].  runtime/static.py replaces it by graphs.

        tokens, position, slots (m,).  mask (m, end), glimpse_mask (m, t): which entries are seen of
        the drafter's and of the target's; None: all.
        """
        x = self.model.embed(tokens)[None]                                         # (1, m, d_D)
        ropes = self.model.ropes(x, position)
        for layer, store in zip(self.model.layers, self.store):
            update = partial(write, store, slots, end)
            x = layer(x, ropes, mask, self.kv, glimpse_mask, update)
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
def has_other_weights(model, probe):
    """Whether `model` lacks the weights that training.json notes: `probe`, one of some matrices."""
    pairs = [(0.0, 0.0)]
    for name, p in model.named_parameters():
        is_readable = type(p) is nn.Parameter and p.dtype.itemsize > 1 and not p.is_meta
        if name in probe and is_readable:
            pairs.append((probe[name], p[len(p) // 3, p.shape[1] // 2].item()))
    noted, own = torch.tensor(pairs).T
    return bool((noted - own).norm() > 0.25 * own.norm())      # by rounding to 4 bits: 0.16

def load(folder, model):
    """Load a checkpoint of train.py for the target `model` -> (Drafter, training.json as a dict).

    The drafter has the target's dtype and device.  Raises ValueError for a drafter of another kind,
    and warns if it was trained for other weights.
    """
    about = json.loads(Path(folder, "training.json").read_text())
    if about["kind"] not in ("glide", "vanilla"):
        raise ValueError(f"{folder} holds no drafter of these kinds: glide, vanilla")
    if has_other_weights(model, about["target"]["probe"]):
        warnings.warn("the drafter was trained for a model with other weights", stacklevel=2)
    with torch.device("meta"):                     # no memory, since the weights are there already
        draft_model = Glide(Config(**about["config"]), rope_of(model))
    draft_model.load_state_dict(load_file(Path(folder, "model.safetensors")), assign=True)
    temperature = about["validation"].get("temperature", 1.0)
    return Drafter(draft_model.to(model.device, model.dtype), temperature), about

def main():
    """Fifteen tokens in blocks of five: training under the mask equals delayed decoding."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=4))
    model = Glide(Config.for_target(target), rope_of(target))
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    ids = torch.arange(15)
    with torch.no_grad():
        cache = target(ids[None]).past_key_values
        k, v = cache.layers[1].keys, cache.layers[1].values
        trained = model.head(model(ids[None], {1: (k, v)}))[0].softmax(-1)     # (15, V)
    # Ten tokens are verified.  The last block of five is drafted.
    drafter = Drafter(model)
    drafter.reset(probs=lambda logits, temperature: logits.softmax(-1))
    view = SimpleNamespace(tokens=ids[:10], length=10, kv={1: (k[:, :, :10], v[:, :, :10])})
    drafter.begin(view, root_id=10)
    drafted = drafter.expand(ids[10:], [-1, 0, 1, 2, 3])                       # (5, V)
    error = (drafted - trained[10:]).abs().max()
    assert error < 1e-5, error
    print(f"training under the block mask = decoding with delayed keys: difference {error:.0e}")

# Differences from the paper, all of them: width, norm and loss by default, and any layer can be
# read (Config); to whose block a query belongs (block_mask); the glimpse has RoPE, is zero in the
# first block, and is added to x (Layer); a held-out loss uses the mask (Glide.forward); with two
# layers the prompt and accepted leaves glimpse (Drafter.begin); rounds begin anywhere, and trees
# may be deeper than L (Drafter.expand); confidences are calibrated (Drafter); embedding and head
# start as the target's (training/models).
# Misprints in 4.1: M_D stands for M_T twice, d_b for d_D, "position t" for "position t - 1".

if __name__ == "__main__":
    main()
