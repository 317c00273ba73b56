"""GLIDE: a draft model that glimpses the target's KV cache.

GLIDE with a CAPE (arXiv 2402.02082), section 4.1 and Figure 2; the vanilla drafter is Figure 4's control.

The idea.  When the target has verified x_{<t} its keys and values lie in the cache for free.  Each layer of the small draft
model gets a cross-attention onto them, between self-attention and feed-forward, so that the drafter reads the prefix with
the target's own understanding.  While drafting x_{t+1}, x_{t+2}, ... those keys end at x_{t-1}: they are delayed.
Training imitates the delay with a block-wise mask.

    paper              shape               name here
    N_D, d_D           ints                config.layers, config.width
    H^m                (m, d_D)            x, after self-attention of layer m
    W_j                (d_D, d_k) x h      layer.glimpse_q: all heads of the target side by side
    K^{l,j}, V^{l,j}   (H, t, d_k)         kv[l]; l = N_T - N_D + m, `layers_read`
    W^O                (h d_k, d_D)        layer.glimpse_o
    L                  int                 config.block: length of a block in training (5)
    Mask_Block         (T, T)              block_mask(T, L)

Differences from the paper:
 1. Queries are rotated by the target's rotary embedding at their own position, as the cached keys are (the paper is silent;
    the official code fixes theta = 10000, which is wrong for other targets).
 2. Positions of the first block see no key of the target.  The official code falls back to the causal mask there, which lets
    a position see its own key; here such a glimpse contributes zero.
 3. In the printed mask j is the query and k the key.  It is "not used for testing" in the paper; here an evaluation loss
    uses it too, since without it a query would see the target's keys of the future.
 4. With one layer the drafter's own keys and values depend on (token, position) alone.  With more, rows are kept as they were
    drafted, and prompt positions are encoded under the block delay: decoding computes what training computed.  The official
    code re-encodes the accepted tokens in every round.
 5. M_D stands for M_T twice in section 4.1, d_b for d_D, and "up to position t" means t - 1.
 6. "GLIDE-47m" with d_D = 4096 cannot be: one such layer alone has some 200M weights.  Sizes here are free.

    python glide.py         # the demo: training under the mask and step-by-step decoding give the same logits
    python train.py glide vanilla
"""
import json
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    """vocab: ids; width: d_D; hidden: feed-forward; target_*: what the cache rows look like; layers_read: 0-based l."""
    vocab: int
    width: int
    hidden: int
    layers: int = 1                  # N_D: 1 for 7B and 13B targets, 2 for 33B (section 5.1)
    heads: int = 8
    block: int = 5                   # L (section 4.1)
    glimpse: bool = True             # False: the vanilla drafter
    target_heads: int = 0            # h
    target_head_size: int = 0        # d_k
    layers_read: tuple = ()          # target layer that layer m reads; the paper's: N_T - N_D + m

    @classmethod
    def for_target(cls, model, width=None, layers=1, glimpse=True, block=5, layer=None):
        """Sizes that fit `model`.  layer: the target layer (0-based) that the top layer reads; the top one if None."""
        c = model.config.get_text_config()
        head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        width = width or c.hidden_size
        top = c.num_hidden_layers - 1 if layer is None else layer
        if not layers - 1 <= top < c.num_hidden_layers:
            raise ValueError(f"layer {top} of the target cannot be read by a drafter of {layers} layer(s): it has layers "
                             f"{layers - 1} to {c.num_hidden_layers - 1} for that")
        own = next(h for h in (head, 64, 32, 16, 8, 4, 2) if width % h == 0)
        return cls(c.vocab_size, width, -(-width * 8 // 3 // 32) * 32, layers, width // own, block, glimpse,
                   c.num_attention_heads, head, tuple(range(top - layers + 1, top + 1)) if glimpse else ())


def block_mask(length, block):
    """Mask_Block -> (length, length) bool: query j sees the target's key k iff block(j) > block(k)."""
    of = torch.arange(length) // block
    return of[:, None] > of[None, :]


def angles(size, length, theta=10000.0):
    """The drafter's own rotary table: cos and sin, (length, size) each."""
    freq = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turn = torch.outer(torch.arange(length, dtype=torch.float64), freq).repeat(1, 2)
    return turn.cos(), turn.sin()


def target_angles(model, length):
    """The target's own rotary table, from its own module; (length, r) each, r = 0 where it has none (GPT-2, OPT).

    Families that rotate neighbouring pairs (GPT-J, Cohere) are not laid out like this; their queries must learn the rest.
    Where the table differs by kind of layer (Gemma 3), it is the top layer's.
    """
    rotary, device = getattr(model.get_decoder(), "rotary_emb", None), next(model.parameters()).device
    if rotary is None:
        return torch.zeros(length, 0, device=device), torch.zeros(length, 0, device=device)
    kind = {"layer_type": model.config.get_text_config().layer_types[-1]} if "layer_type" in signature(rotary.forward).parameters else {}
    cos, sin = rotary(torch.zeros(1, length, 1, device=device), torch.arange(length, device=device)[None], **kind)
    return cos[0].detach(), sin[0].detach()


def signed(table):
    """(cos, sin) as rotate() takes them: the sign of the first half's sine is folded in."""
    cos, sin = table
    half = sin.shape[-1] // 2
    return cos, torch.cat((-sin[..., :half], sin[..., half:]), -1)


def rotate(x, cos, sin):
    """Rotary embedding on the last axis, pairs (i, i + r/2) of the first r, as Llama lays them out: three operations."""
    r = cos.shape[-1]
    if r == 0:
        return x
    y = x if r == x.shape[-1] else x[..., :r]
    y = torch.addcmul(y * cos, y.roll(r // 2, -1), sin)
    return y if r == x.shape[-1] else torch.cat((y, x[..., r:]), -1)


class Layer(nn.Module):
    """One layer of the drafter: h += SelfAttn(norm(h)); h += Glimpse(h); h += MLP(norm(h))."""

    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(c.width, eps=1e-6), nn.RMSNorm(c.width, eps=1e-6)
        self.qkv, self.o = nn.Linear(c.width, 3 * c.width, bias=False), nn.Linear(c.width, c.width, bias=False)
        if c.glimpse:
            wide = c.target_heads * c.target_head_size
            self.glimpse_q, self.glimpse_o = nn.Linear(c.width, wide, bias=False), nn.Linear(wide, c.width, bias=False)
        self.up, self.down = nn.Linear(c.width, 2 * c.hidden, bias=False), nn.Linear(c.hidden, c.width, bias=False)
        self.c = c

    def heads(self, x, n):
        """(..., T, n * d) -> (..., n, T, d)"""
        return x.unflatten(-1, (n, -1)).transpose(-3, -2)

    def glimpse(self, x, kv, cos, sin, mask=None):
        """Cross-attention onto the target's cache.  x (B, T, d_D), kv (B, H, t, d_k) each -> (B, T, d_D).

        hd_j = SoftMax(Q^{m,j} (K^{l,j})^T / sqrt(d_k)) V^{l,j}.  Heads that share a key (grouped queries) are laid out as
        further rows of one query, so no key is ever repeated in memory.
        """
        k, v = kv
        q = rotate(self.heads(self.glimpse_q(x), self.c.target_heads), cos, sin)             # (B, h, T, d_k)
        B, h, T, d = q.shape
        group = h // k.shape[1]
        if mask is not None and group > 1:
            mask = mask.repeat(group, 1)                                                     # (group * T, t)
        seen = F.scaled_dot_product_attention(q.reshape(B, k.shape[1], group * T, d).to(k.dtype), k, v, attn_mask=mask)
        return self.glimpse_o(seen.reshape(B, h, T, d).transpose(1, 2).flatten(2).to(x.dtype))

    def feed(self, x):
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Glide(nn.Module):
    """The draft model, GLIDE or (config.glimpse False) vanilla, over all positions at once: what training runs."""

    def __init__(self, config, tables):
        """tables: cos, sin of the target's rotary embedding (target_angles), as long as any sequence will get."""
        super().__init__()
        c = self.config = config
        self.embed, self.head = nn.Embedding(c.vocab, c.width), nn.Linear(c.width, c.vocab, bias=False)
        self.layers, self.norm = nn.ModuleList(Layer(c) for _ in range(c.layers)), nn.RMSNorm(c.width, eps=1e-6)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        for name, table in zip(("cos", "sin", "target_cos", "target_sin"),
                               (*signed(angles(c.width // c.heads, tables[0].shape[0])), *signed(tables))):
            self.register_buffer(name, table.to(torch.get_default_dtype()), persistent=False)

    def forward(self, ids, kv=None):
        """ids (B, T), kv {layer: (K, V) of (B, H, T, d_k)} -> logits (B, T, V): row j predicts token j + 1."""
        c, T, L = self.config, ids.shape[1], self.config.block
        assert not c.glimpse or set(c.layers_read) <= set(kv), f"the drafter reads target layers {c.layers_read}"
        x = self.embed(ids)
        for m, layer in enumerate(self.layers):
            q, k, v = (layer.heads(y, c.heads) for y in layer.qkv(layer.norm1(x)).chunk(3, -1))
            q, k = rotate(q, self.cos[:T], self.sin[:T]), rotate(k, self.cos[:T], self.sin[:T])
            x = x + layer.o(F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), is_causal=True).transpose(1, 2).flatten(2))
            if c.glimpse and T > L:          # rows of the first block see nothing: their glimpse is zero
                seen = layer.glimpse(x[:, L:], kv[c.layers_read[m]], self.target_cos[L:T], self.target_sin[L:T],
                                     block_mask(T, L)[L:].to(x.device))
                x = x + F.pad(seen, (0, 0, L, 0))
            x = layer.feed(x)
        return self.head(self.norm(x))

    def loss(self, batch):
        """Cross entropy of the next token (section 5.1).  batch: ids (B, T), kv -> (loss, logits (B, T, V))."""
        logits = self(batch["ids"], batch["kv"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["ids"][:, 1:].flatten()), logits


class Drafter:
    """Decoding with a Glide, step by step; nothing is computed twice.  The loop in verify.py calls reset(), begin(view),
    expand(tokens, parents) and keep(tokens); `needs` says what of the target it reads.

    (No nn.Module: it is state that changes with every step, and setting an attribute on a module is slow.)
    """

    def __init__(self, model):
        self.model, self.config, self.layers = model.eval(), model.config, list(model.layers)
        self.needs = {"kv": model.config.layers_read}
        self.tables = model.cos, model.sin, model.target_cos, model.target_sin
        self.store = None
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.context = 0                 # committed positions that have rows in the store
        self.fresh_from = None           # t of the round in which the last tokens were drafted

    def begin(self, view):
        """A round starts: x_{<t} is committed, the target's rows for it are in view.kv."""
        self.kv, self.t = view.kv, view.length
        missing = self.t - self.context
        self.pending = view.tokens[view.tokens.shape[0] - missing:]          # committed, not encoded yet
        self.nodes, self.node_tokens, self.parents, self.is_chain, self.above = 0, [], [], True, None
        # What a pending position may glimpse: in a prompt the earlier blocks, as in training; after that, what was
        # committed when its round began, as the positions that were drafted in that round did.
        if self.config.layers > 1 and missing:
            place = torch.arange(self.context, self.t, device=self.pending.device)
            L = self.config.block
            self.limit = place // L * L if self.fresh_from is None else torch.full_like(place, self.fresh_from)

    def expand(self, tokens, parents):
        """One forward over m new nodes.  tokens (m,), parents [m ints], -1 for the root -> probabilities (m, V)."""
        c, m, first = self.config, tokens.shape[0], self.nodes == 0
        self.is_chain &= parents == list(range(self.nodes - 1, self.nodes - 1 + m)) and (m == 1 or first)
        self.parents += parents
        self.node_tokens.append(tokens)
        p = self.pending.shape[0]
        ids = torch.cat((self.pending, tokens)) if p else tokens
        start = self.context + self.nodes                   # first row written
        end = start + p + m
        self.room(end, ids.device)
        mask = None
        if self.is_chain:
            position = slice(start, end)
            if m > 1 or (p and c.layers > 1):
                mask = torch.ones(p + m, end, dtype=torch.bool, device=ids.device).tril_(start)
        else:
            position, mask = self.tree_rows(m, p, end, ids.device)
        x = F.embedding(ids, self.model.embed.weight)[None]  # (1, p + m, d_D)
        cos, sin, tcos, tsin = (table[position] for table in self.tables)
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.norm1(x)).view(p + m, 3, c.heads, -1).permute(1, 2, 0, 3)          # (3, heads, p + m, d)
            qk, v = qkv[:2], qkv[2]
            q, k = rotate(qk, cos, sin)
            last = i == c.layers - 1
            if last and p:                                  # pending rows need no output: their keys and values suffice
                q, x, tcos, tsin = q[:, p:], x[:, p:], tcos[p:], tsin[p:]
                mask = mask if mask is None else mask[p:]
            keys, values = self.store[0, i, :, :end], self.store[1, i, :, :end]
            keys[:, start:], values[:, start:] = k, v
            y = F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask)
            x = x + layer.o(y.transpose(1, 2).flatten(2))
            if c.glimpse:
                x = x + self.delayed(layer, x, self.kv[c.layers_read[i]], tcos, tsin, 0 if last else p)
            x = layer.feed(x)
        if p:
            self.context, self.pending = self.t, self.pending[:0]
        self.nodes += m
        return self.model.head(self.model.norm(x))[0].float().softmax(-1)

    def delayed(self, layer, x, kv, cos, sin, p):
        """The glimpse of drafted rows: all that is committed; the first p rows (pending) see less (`limit`)."""
        if not p:
            return layer.glimpse(x, kv, cos, sin)
        limit = torch.cat((self.limit, self.limit.new_full((x.shape[1] - p,), self.t)))
        mask = torch.arange(self.t, device=x.device) < limit[:, None]
        blind = limit == 0                                  # no key at all: the glimpse is zero
        seen = layer.glimpse(x, kv, cos, sin, mask | blind[:, None])
        return seen.masked_fill(blind[:, None], 0)

    def tree_rows(self, m, p, end, device):
        """Positions (p + m,) and self-attention mask (p + m, end) of new nodes in a tree.

        above[1 + i, j] says that node j is node i or above it; row 0 stands for the prefix, above which no node is.
        """
        if self.above is None:
            self.above, self.depth = torch.zeros(65, 64, dtype=torch.bool), []
        while self.above.shape[1] < len(self.parents):
            self.above = F.pad(self.above, (0, self.above.shape[1], 0, self.above.shape[1]))
        done = len(self.depth)                              # nodes entered so far; those of a chain that now branches come late
        for a, b in ((done, self.nodes), (self.nodes, self.nodes + m)):
            rows = range(a, b) if any(parent >= a for parent in self.parents[a:b]) else [slice(a, b)]
            for i in rows:                                  # a frontier at once; one by one where parents came in the same call
                i = slice(i, i + 1) if isinstance(i, int) else i
                self.above[1 + i.start:1 + i.stop] = self.above[torch.tensor(self.parents[i], dtype=torch.long) + 1]
                self.above[1 + i.start:1 + i.stop, i].fill_diagonal_(True)
            for parent in self.parents[a:b]:
                self.depth.append(self.depth[parent] + 1 if parent >= 0 else 0)
        mask = torch.ones(p + m, end, dtype=torch.bool)
        mask[:p].tril_(end - p - m)
        mask[p:, self.t:] = self.above[1 + self.nodes:1 + self.nodes + m, :self.nodes + m]
        position = torch.tensor(list(range(self.t - p, self.t)) + [self.t + d for d in self.depth[-m:]])
        return position.to(device), mask.to(device)

    def room(self, rows, device):
        """Preallocated keys and values of the drafter: (2, N_D, heads, capacity, d)."""
        if self.store is None or self.store.shape[3] < rows or self.store.device != device:
            c, old = self.config, self.store
            size = max(1024, 2 * rows)
            self.store = self.model.embed.weight.new_zeros(2, c.layers, c.heads, size, c.width // c.heads)
            if old is not None and old.device == device:
                self.store[:, :, :, :old.shape[3]] = old

    def keep(self, tokens):
        """tokens: the accepted ids, root first.  Their rows stay; rows of everything else are forgotten."""
        drafted = torch.cat(self.node_tokens).tolist() if self.nodes else []
        child = {key: i for i, key in enumerate(zip(self.parents, drafted))}
        path, node = [], -1
        for token in tokens:
            if (node := child.get((node, token), -2)) < 0:
                break
            path.append(node)
        if path != list(range(len(path))):
            rows = torch.tensor(path, device=self.store.device) + self.context
            self.store[:, :, :, self.context:self.context + len(path)] = self.store.index_select(3, rows)
        self.context += len(path)
        self.fresh_from = self.t


def load(folder, model, length=None):
    """Read a checkpoint made by train.py for the target `model` -> (Drafter in the model's dtype, what training.json says).

    Raises ValueError, in one sentence, where the folder is missing or broken.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    folder = Path(folder)
    if missing := [name for name in ("training.json", "model.safetensors") if not (folder / name).is_file()]:
        raise ValueError(f"no drafter in {folder}: {missing[0]} is missing; train one with train.py or name its folder with "
                         "--checkpoint")
    try:
        about = json.loads((folder / "training.json").read_text())
        config = Config(**{**about["config"], "layers_read": tuple(about["config"]["layers_read"])})
        length = length or getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048
        draft_model = Glide(config, target_angles(model, length + 512))
        draft_model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as why:
        raise ValueError(f"the drafter in {folder} is damaged ({type(why).__name__}: {str(why).splitlines()[0][:100]}); "
                         "train or copy it again") from None
    drafter = Drafter(draft_model.to(model.device, model.dtype))
    drafter.temperature = about.get("validation", {}).get("temperature", 1.0)
    return drafter, about


def main():
    """On fifteen tokens in blocks of five: training under the mask equals decoding with the delayed cache."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    c = Config(vocab=20, width=16, hidden=32, layers=2, heads=2, target_heads=4, target_head_size=8, layers_read=(1, 2))
    model = Glide(c, angles(8, 64))
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    ids = torch.randint(20, (1, 15))
    kv = {layer: (torch.randn(1, 2, 15, 8), torch.randn(1, 2, 15, 8)) for layer in c.layers_read}   # two queries a key
    with torch.no_grad():
        trained = model(ids, kv).softmax(-1)[0]
        drafter = Drafter(model)
        worst = 0
        for t in (5, 10):
            new = ids[0, :5] if t == 5 else ids[0, 5:10]
            drafter.begin(SimpleNamespace(tokens=new, length=t, kv={m: (k[:, :, :t], v[:, :, :t]) for m, (k, v) in kv.items()}))
            for i in range(5):
                row = drafter.expand(ids[0, t + i:t + i + 1], [i - 1])[0]
                worst = max(worst, (row - trained[t + i]).abs().max().item())
            drafter.keep(ids[0, t:t + 5].tolist())
    assert worst < 1e-5, worst
    print(f"training under the block mask = step-by-step decoding: largest difference {worst:.0e}")


if __name__ == "__main__":
    main()
