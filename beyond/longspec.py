"""LongSpec: GLIDE between the target's own embedding and head, with a window, for long texts.

LongSpec (arXiv 2502.17421), by GLIDE's first author; glide.py holds what the two share.

The idea.  A small drafter is mostly vocabulary: of a GLIDE beside a target with 49 152 ids and
width 576 the embedding and the LM head are nine tenths.  LongSpec trains neither.  One layer, as
wide as the target, stands between the target's own embedding and its own LM head, both frozen.
Its self-attention sees a window of the last tokens, so that what it needs to remember does not grow
with the text; all that is older comes by the glimpse, from the target's cache.

    paper                                shape         name here
    sliding-window attention             (m, keys)     Layer.in_window, config.window
    cross-attention                      (B, T, d)     glide.Layer.glimpse, here with biases
    embedding, LM head of the target     (V, d) each   LongSpec.embed, LongSpec.head

What a draft costs.  One node takes 6 d^2 + 3 d F + V d multiply-adds, F = config.feed_forward: the
layer's matrices, and the head.  Beside SmolLM2-135M (d = 576, F = 1 536, V = 49 152) these are
2.0M + 2.7M + 28.3M, a quarter of the target's 134.5M; a further d^2 is the matrix of difference 4.
Half the feed-forward size saves 1.3M; a head over the 8 192 most frequent ids alone saves 23.6M.

Differences from the paper:
 1. It trains at consecutive positions, in GLIDE's blocks.  LongSpec's "anchor-offset" positions,
    which prepare a drafter for long texts on short ones, are not here.
 2. In its trees the window of a node starts at a place in its depth; here at its position, as in
    training.  Entries that have left the window stay in memory.
 3. A norm before the head, which LongSpec does not have, is an option (config.last_norm): the
    target's head was trained on normed states.  `train.py longspec` sets it, and lets it start as
    the target's own.
 4. Where the target ties its embedding to its head, the state of a token points to that very token:
    the embedding is a row of the head, and a layer adds to it.  Thirty layers turn it away, one has
    trouble to.  There a matrix stands behind the embedding (config.projected), as EAGLE has one; it
    starts as a random rotation.

Alone in a project: this file, glide.py, a Hugging Face model, a drafter from train.py.

    drafter, _ = glide.load("my-longspec", model, draft_class=LongSpec)     # then as in glide.py

    python -m beyond.longspec    # the demo: only the layer is trained; decoding equals training
    python train.py longspec     # longspec-f768: with a feed-forward size of 768
"""
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

import glide


@dataclass
class Config(glide.Config):
    """glide.Config, and what LongSpec has beyond it; the defaults are LongSpec's."""
    norm: bool = True                # before the glimpse
    bias: bool = True                # of all queries, and of its own keys and values
    window: int = 512                # earlier tokens of its own that a query sees; 0: all
    last_norm: bool = False          # before the head (difference 3)
    projected: bool = False          # a matrix behind the embedding (difference 4)

    @classmethod
    def for_target(cls, model, layer=None, **more):
        """Sizes of a layer of the target's.  layer: as glide.Config.for_target takes it; more:
        further settings, say feed_forward, last_norm, loss.
        """
        c = model.config.get_text_config()
        config = super().for_target(model, layer=layer, head_size=more.get("target_head_size"))
        config.heads = c.num_attention_heads
        config.feed_forward = getattr(c, "intermediate_size", None) or config.feed_forward
        for name, value in more.items():
            setattr(config, name, value)
        return config

    def multiply_adds(self):
        """Of one drafted node: its matrices, without attention over the context."""
        target_width = self.target_heads * self.target_head_size
        attention = 4 * self.width ** 2
        glimpse = 2 * self.width * target_width
        feed_forward = 3 * self.width * self.feed_forward
        head = self.vocab * self.width
        projection = self.width ** 2 if self.projected else 0
        return projection + attention + glimpse + feed_forward + head


class Layer(glide.Layer):
    """A layer of GLIDE with biases, whose self-attention sees a window."""

    def __init__(self, c, m):
        super().__init__(c, m)
        if c.bias:
            self.qkv = nn.Linear(c.width, 3 * c.width)
        if c.bias and c.glimpse:
            self.glimpse_q = nn.Linear(c.width, c.target_heads * c.target_head_size)

    def in_window(self, mask):
        """mask (m, keys) bool: entries that a query sees -> those of them in its window.

        They lie in the order of the text, the query's own the last; in a tree others lie between.
        """
        count = mask.cumsum(1)                                         # of them, up to each entry
        later = count[:, -1:] - count                                  # of them, after each entry
        return mask & (later <= self.c.window)

    def forward(self, x, ropes, mask, kv=None, glimpse_mask=None, cache=None):
        """As glide.Layer.forward."""
        if self.c.window:
            if mask is None:
                # The next node of a chain sees all entries that there are.
                mask = torch.ones(1, cache.end, dtype=torch.bool, device=x.device)
            mask = self.in_window(mask)
        return super().forward(x, ropes, mask, kv, glimpse_mask, cache)


def rotation(width):
    """A linear map (d -> d) without bias that starts as a random rotation."""
    linear = nn.Linear(width, width, bias=False)
    nn.init.orthogonal_(linear.weight)
    return linear


def linear_of(x, weight):
    """x (..., d) -> (..., V), in the type of x: in float16 gradients would be lost."""
    return F.linear(x, weight.to(x.dtype))


def is_tied(model):
    """Whether a model's embedding is its head."""
    head = model.get_output_embeddings()
    return head.weight is model.get_input_embeddings().weight


class LongSpec(glide.Glide):
    """The draft model: glide.Glide around one layer, between parts of the target."""
    config_class = Config
    layer_class = Layer

    def __init__(self, config, tables):
        """tables: the target's cos and sin, which queries and keys of its own have, too."""
        nn.Module.__init__(self)
        c = self.config = config
        own_size = c.width // c.heads
        if tables[0].shape[-1] != own_size:
            raise ValueError(f"the target's RoPE has {tables[0].shape[-1]} entries of a head, and "
                             f"LongSpec's heads beside it have {own_size}: take glide")
        self.layers = nn.ModuleList([self.layer_class(c, 0)])
        self.norm = nn.RMSNorm(c.width, eps=c.eps) if c.last_norm else nn.Identity()
        for p in self.layers[0].parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        self.projection = rotation(c.width) if c.projected else nn.Identity()
        table = torch.stack(tables)                                    # (2, length, d)
        self.register_buffer("own_table", table, persistent=False)
        self.register_buffer("target_table", table, persistent=False)

    @classmethod
    def for_target(cls, model, config, length):
        """As glide.Glide.for_target, with the target's embedding and head."""
        draft_model = super().for_target(model, config, length)
        draft_model.take(model)
        return draft_model

    def take(self, model):
        """Embedding and LM head are the target's, and no modules of ours: neither is saved."""
        table = model.get_input_embeddings().weight.detach()
        head = model.get_output_embeddings().weight.detach()
        self.target = SimpleNamespace()
        self.target.embed = lambda ids: F.embedding(ids, table)
        self.target.head = partial(linear_of, weight=head)

    def embed(self, ids):
        """ids (..., T) -> (..., T, d), in the type of the layer."""
        x = self.target.embed(ids).detach().to(self.layers[0].o.weight)
        return self.projection(x)

    def head(self, x):
        """x (..., d) -> logits (..., V)."""
        return self.target.head(x)

    def load_state_dict(self, weights, *args, **more):
        """As nn.Module's.  Older files hold copies of the target's embedding and head, too."""
        weights = dict(weights)
        for name in ("embed.weight", "head.weight"):
            weights.pop(name, None)
        return super().load_state_dict(weights, *args, **more)


def main():
    """A tiny target: only the layer gets gradients, the window holds, decoding equals training."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).double()
    config = Config.for_target(model, window=3)
    draft_model = LongSpec.for_target(model, config, 64)
    for p in draft_model.parameters():
        p.data.normal_(0, 0.3)
    assert all(name.startswith("layers.0.") for name in draft_model.state_dict())
    ids = torch.randint(20, (15,))
    kv = {1: torch.randn(2, 1, 2, 15, 8).double()}
    trained = draft_model.head(draft_model(ids[None], kv))[0]          # (15, V)
    trained.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    # Ten tokens are verified, five are drafted.
    drafter = glide.Drafter(draft_model)
    verified = {1: kv[1][..., :10, :]}
    drafter.begin(SimpleNamespace(tokens=ids[:10], length=10, kv=verified))
    drafted = drafter.expand(ids[10:], [-1, 0, 1, 2, 3])
    error = (drafted - trained[10:]).abs().max()
    assert error < 1e-9, error
    print(f"one layer between the target's embedding and head: difference {error:.0e}")


if __name__ == "__main__":
    main()
