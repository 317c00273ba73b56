"""Drafters between the target's own embedding and head, on a short list of frequent tokens.

The idea.  GLIDE and EDD train an embedding and a head of their own.  Beside a small target with a
large vocabulary these two tables are nearly the whole drafter: of an EDD beside SmolLM2-135M
(49 152 token ids, width 576) they are 56.6M of 60.2M weights, and the head is most of what a draft
costs.  Here only one layer is trained, between the target's own tables, which stay frozen.  It may
also learn a short list of k frequent tokens alone, whose logits need k rows of the head instead of
V.  All others get probability zero: they are never drafted, and cost the target a rejection.

    kind                the layer                            what it reads of the target
    glide-shared        GLIDE's (glide.py)                   KV entries of one layer
    vanilla-shared      GLIDE's, without the glimpse         nothing but the tables
    edd-shared          EDD's (edd.py)                       hidden states of one layer
    vdm-shared          EDD's, as the VDM                    nothing but the tables

None of these is the drafter of a paper here.  glide-shared has the shape of LongSpec (arXiv
2502.17421): self-attention over a window, and cross-attention onto the target's cache.  EAGLE
shares the tables, too.  The list is FR-Spec's V_high (arXiv 2502.14856, Eq. 2).

    python train.py glide-shared edd-shared --data ...
"""
from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn

import edd
import glide

# A target's tables, as a draft model uses them
#   embed   a function: ids (...) -> (..., D)
#   head    a function: x (..., D), normed -> logits (..., V); with a list of words (..., k)
#   norm    (D,): the weights of the target's last norm
#   words   (k,): the list; None: the whole vocabulary
Tables = namedtuple("Tables", "embed head norm words")

# ---------------------------------------------------------------- the list of words
def frequent_words(tokens, k, vocab, eos=None):
    """The k most frequent token ids of a training text, in ascending order -> (k,)

    tokens (n,): the ids that a drafter learns to predict.  vocab: V.  eos: the token that ends a
    text, or several; they are always in the list.  Of equally frequent ids the lower is taken.
    """
    counts = torch.bincount(tokens, minlength=vocab)                           # (V,)
    if eos is not None:
        counts[eos] = len(tokens) + 1
    words = counts.argsort(descending=True, stable=True)[:k]
    return words.sort().values                  # logits are picked 10 times faster in order

def is_tied(model):
    """Whether a model's embedding and head are one table."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight

# ---------------------------------------------------------------- between the target's tables
class Between(nn.Module):
    """The target's tables as the embedding and the head of a draft model, and its loss."""

    def __init__(self, config, tables):
        super().__init__()
        self.config, self.tables = config, tables              # no module: it is not saved
        # Where the embedding of a token is also its row of the head, the logit of the token that
        # was just read starts high.  One layer can hardly undo that, so a matrix follows the
        # embedding, which starts as a random rotation.
        self.projection = nn.Identity()
        if config.projected:
            self.projection = nn.Linear(config.width, config.width, bias=False)
            nn.init.orthogonal_(self.projection.weight)
        self.register_buffer("words", tables.words)
        # It follows the drafter's dtype, which is not the target's in training.
        self.register_buffer("like", tables.norm.new_empty(0), persistent=False)

    def embed(self, ids):
        """ids (...) -> (..., D), in the dtype of the drafter"""
        x = self.tables.embed(ids)
        return self.projection(x.to(self.like))

    def head(self, x):
        """For decoding: x (..., D), normed -> logits (..., V), -inf outside the list."""
        logits = self.tables.head(x)
        if self.words is None:
            return logits
        spread = logits.new_full((*logits.shape[:-1], self.config.vocab), -torch.inf)
        return spread.index_copy(-1, self.words, logits)

    def loss_of(self, x, target_logits):
        """For training: the loss, summed over n positions -> ().  x (n, D), target_logits (n, V).

        With a list of words both distributions are softmaxes over their k logits.
        """
        logits = self.tables.head(x)                                           # (n, k) or (n, V)
        if self.words is not None:
            target_logits = target_logits[:, self.words]
        return edd.kl(target_logits, logits)

    def join(self, draft_model):
        """Become a part of the draft model that was made with this embedding and head."""
        draft_model.between, draft_model.loss_of = self, self.loss_of
        # The head was trained on what the target's last norm gives.
        draft_model.norm.weight.data.copy_(self.tables.norm)

# ---------------------------------------------------------------- GLIDE's layer, and EDD's
@dataclass
class GlideConfig(glide.Config):
    """glide.Config and what these drafters have beyond it; sizes are those of a target's layer."""
    window: int = 512                # of the drafter's own entries, how many a query sees before it
    projected: bool = False          # a matrix follows the embedding, see Between

    @classmethod
    def for_target(cls, model, layer=None, feed_forward=None, **more):
        """Sizes of a layer of the target's.  layer, more: as in glide.Config.for_target."""
        c = model.config.get_text_config()
        config = super().for_target(model, layer=layer, projected=is_tied(model), **more)
        config.heads = c.num_attention_heads
        config.feed_forward = (feed_forward or getattr(c, "intermediate_size", None)
                               or config.feed_forward)
        return config

class Layer(glide.Layer):
    """A layer of GLIDE whose self-attention sees a window; what is older it sees by the glimpse."""

    def attend(self, q, k, v, mask):
        """As glide.Layer.attend; a query sees its own entry and the `window` before it.

        Between the entries that a node of a tree sees are those of others: so they are counted.
        """
        if mask is None:
            # The next node of a chain sees all entries.
            mask = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device)
        visible = mask.cumsum(1)                                               # up to each entry
        visible_after = visible[:, -1:] - visible                              # after each entry
        in_window = mask & (visible_after <= self.c.window)                    # (T, keys)
        return super().attend(q, k, v, in_window)

@dataclass
class EDDConfig(edd.Config):
    """edd.Config and what these drafters have beyond it."""
    projected: bool = False          # a matrix follows the embedding, see Between

    @classmethod
    def for_target(cls, model, hidden=edd.HIDDEN, **more):
        """As edd.Config.for_target."""
        return super().for_target(model, hidden, projected=is_tied(model), **more)
