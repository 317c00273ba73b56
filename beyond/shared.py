"""Drafters between the target's own embedding and LM head, on a short list of frequent words.

The idea.  GLIDE and EDD train an embedding and a head of their own.  Beside a small target with a
large vocabulary these two tables are nearly the whole drafter: of an EDD beside SmolLM2-135M
(49 152 token ids, width 576) they are 56.6M of 60.2M weights, and the head is most of what a draft
costs.  Here only one layer is trained, between the target's own tables.  They are frozen, and are
not saved with the drafter.

The layer may also learn a short list of frequent words alone.  Their logits need k rows of the head
instead of V.  All other tokens get a logit of -inf: they are never drafted.  The target verifies
over the whole vocabulary, so the output stays the same, and a rare token only costs a rejection.

    name for train.py     the layer                            what it reads of the target
    glide-shared          GLIDE's (glide.py)                   KV entries of one layer
    glide-shared-top      GLIDE's, no norm before the glimpse  KV entries of the last layer
    vanilla-shared        GLIDE's, no glimpse                  nothing but the tables
    edd-shared            EDD's (edd.py)                       hidden states of one layer
    vdm-shared            EDD's, as the VDM                    nothing but the tables

None of these is the drafter of the GLIDE paper or of the EDD paper: those have tables of their own.
glide-shared has the shape of LongSpec (Yang et al., arXiv 2502.17421): one layer between the
target's tables, with self-attention over a window and cross-attention onto the target's cache.
EAGLE (arXiv 2401.15077) shares the tables, too.  The list of words is FR-Spec's (arXiv 2502.14856).

    paper                            shape          name here
    embedding of the target          (V, D)         target.embed, a function
    LM head of the target, W_LM      (V, D)         target.lm_head; target.head, a function
    V_high (FR-Spec)                 (k,)           words: token ids, the most frequent first
    ~W_LM (FR-Spec, Eq. 2)           (k, D)         the rows of W_LM in head_of_words
    T, H, L, K, V                                   as in edd.py and glide.py

Differences from the drafters of glide.py and edd.py, besides the tables and the list:
 1. Some targets have one table for both, so the embedding of a token is also its row of the head.
    Then the logit of the token that was just read starts high.  The many layers of a target learn
    to undo that, and one layer hardly can.  So there a D x D matrix follows the embedding
    (config.projected).  It starts as a random rotation.
 2. The last norm starts as the target's, since the head was trained on what that norm gave.
 3. The loss is the KL divergence to the target's distribution (config.loss "kl"), or the negative
    logarithm of the acceptance rate ("lk", arXiv 2602.23881).  With a list of words, both
    distributions are softmaxes over the words' k logits.
 4. GLIDE's layer has as many heads as the target's layers, and the target's RoPE for its own keys,
    too.  Its self-attention sees the last 512 tokens only, as LongSpec's; what is older it sees by
    the glimpse.  config.bias adds LongSpec's biases.

The words are counted once, before training.  choose_words tells them to a new draft model, which
saves them with its weights, as the tensor `words`.  load_state_dict reads them back.

    python train.py glide-shared edd-shared
"""
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

import edd
import glide

# Names for train.py, and the settings of a Config that each stands for
GLIDE_VARIANTS = {
    "glide-shared": {},
    "glide-shared-top": {"layer": None, "norm": False},
    "vanilla-shared": {"glimpse": False},
}
EDD_VARIANTS = {
    "edd-shared": {},
    "vdm-shared": {"encoding": False},
}

# ---------------------------------------------------------------- the list of words
def frequent_words(tokens, k, vocab, eos=None):
    """The k most frequent token ids of a training text, the most frequent first -> (k,)

    tokens (n,): the ids of all tokens that a drafter learns to predict.  vocab: V.  eos: the token
    that ends a text; it is always in the list, as its first entry.  Of equally frequent ids the
    lower comes first.
    """
    if not 1 <= k <= vocab:
        raise ValueError(f"a list of {k} words of a vocabulary of {vocab}: take 1 to {vocab}")
    counts = torch.bincount(tokens, minlength=vocab)                           # (V,)
    if eos is not None:
        counts[eos] = len(tokens) + 1
    return counts.argsort(descending=True, stable=True)[:k]

# ---------------------------------------------------------------- between the target's tables
def is_tied(model):
    """Whether a model's embedding and head are one table."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight

def linear_of(x, weight):
    """x (..., D), weight (n, D) -> (..., n)

    The weight is cast to the dtype of x, not x to that of the weight: in float16 small gradients of
    x would be lost.
    """
    return F.linear(x, weight.to(x.dtype))

class BetweenTables:
    """What GlideShared and EDDShared have in common: the tables, the projection and the words.

    For targets that use their tables in another way than Llama, runtime/drafters.py overrides
    take_tables and head_of_words.
    """

    def init_tables(self, config):
        """Make the projection, and a buffer for the words, which choose_words fills."""
        if config.loss not in ("kl", "lk"):
            raise ValueError(f"drafters between the target's tables learn by the loss kl or lk, "
                             f"not by {config.loss}")
        self.projection = nn.Identity()
        if config.projected:
            self.projection = nn.Linear(config.width, config.width, bias=False)
            nn.init.orthogonal_(self.projection.weight)        # a random rotation
        words = torch.zeros(config.words, dtype=torch.long) if config.words else None
        self.register_buffer("words", words)

    def take_tables(self, model):
        """Put the target's embedding and head into self.target: they are not saved with this."""
        table = model.get_input_embeddings().weight.detach()                   # (V, D)
        self.target.embed = partial(F.embedding, weight=table)
        self.target.lm_head = model.get_output_embeddings()
        weight = self.target.lm_head.weight.detach()                           # (V, D)
        self.target.head = partial(linear_of, weight=weight)

    def head_of_words(self, words):
        """The target's head for words (k,) alone -> a function: x (..., D) -> logits (..., k)"""
        weight = self.target.lm_head.weight.detach()                           # (V, D)
        rows = weight[words.to(weight.device)]                                 # (k, D), copied once
        return partial(linear_of, weight=rows)

    def choose_words(self, words):
        """Learn and draft these token ids alone.  words (k,), k = config.words"""
        k = self.config.words
        assert len(words) == k, f"{len(words)} words, and the draft model was made for {k}"
        own = next(self.norm.parameters())
        self.words = words.to(own.device)
        self.target.word_head = self.head_of_words(words)

    def load_state_dict(self, weights, *args, **more):
        """As nn.Module's.  Then the words that were loaded are chosen."""
        result = super().load_state_dict(weights, *args, **more)
        if self.words is not None:
            self.choose_words(self.words)
        return result

    def embed(self, ids):
        """ids (...) -> (..., D), in the dtype of the drafter.  The table gets no gradient."""
        own = next(self.norm.parameters())
        x = self.target.embed(ids).detach()
        return self.projection(x.to(own))

    def word_logits(self, x):
        """x (..., D), normed -> logits (..., k) of the words; without a list, (..., V) of all.

        Where x is the target's own last hidden state, these are the target's own logits.
        """
        if self.words is None:
            return self.target.head(x)
        return self.target.word_head(x)

    def head(self, x):
        """What decoding uses: x (..., D), normed -> logits (..., V), -inf outside the list."""
        logits = self.word_logits(x)
        if self.words is None:
            return logits
        shape = (*logits.shape[:-1], self.config.vocab)
        spread = logits.new_full(shape, float("-inf"))
        return spread.index_copy(-1, self.words, logits)

    def word_loss(self, x, target_logits):
        """What training uses: the loss of difference 3 among the words, summed over n tokens -> ()

        x (n, D), normed.  target_logits (n, k): the target's logits of the words; without a list,
        (n, V).
        """
        logits = self.word_logits(x)
        if self.config.loss == "kl":
            return edd.kl(target_logits, logits)
        # The probability that a sampled draft is accepted: sum_x min(p_target(x), p_draft(x))
        p_target = target_logits.float().softmax(-1)
        p_draft = logits.float().softmax(-1)
        acceptance = torch.minimum(p_target, p_draft).sum(-1)                  # (n,)
        return -acceptance.log().sum()

# ---------------------------------------------------------------- GLIDE's layer
@dataclass
class GlideConfig(glide.Config):
    """glide.Config with what these drafters have beyond it; sizes are those of a target's layer."""
    norm: bool = True                # before the glimpse
    loss: str = "kl"                 # or "lk" (difference 3)
    kind: str = "glide-shared"
    bias: bool = False               # of all queries, and of the drafter's own keys and values
    window: int = 512                # of the drafter's own entries, how many a query sees before it
    projected: bool = False          # a matrix follows the embedding (difference 1)
    words: int = 0                   # k; 0: the whole vocabulary

    @classmethod
    def for_target(cls, model, layer=None, glimpse=True, **more):
        """Sizes of a layer of the target's.  layer, glimpse: as in glide.Config.for_target.

        more: further settings, say feed_forward, norm, words.
        """
        c = model.config.get_text_config()
        config = super().for_target(model, layer=layer, glimpse=glimpse)
        config.heads = c.num_attention_heads
        config.feed_forward = getattr(c, "intermediate_size", None) or config.feed_forward
        config.projected = is_tied(model)
        for name, value in more.items():
            setattr(config, name, value)
        return config

class Layer(glide.Layer):
    """A layer of GLIDE whose self-attention sees a window, with biases where config.bias says so"""

    def __init__(self, c, m):
        super().__init__(c, m)
        if c.bias:
            self.qkv = nn.Linear(c.width, 3 * c.width)
        if c.bias and c.glimpse:
            self.glimpse_q = nn.Linear(c.width, c.target_heads * c.target_head_size)

    def in_window(self, mask):
        """mask (m, keys) bool: the entries that a query sees -> those of them in its window.

        A query sees its own entry, which is the last of them, and the `window` before it.  Entries
        are in the order of the sequence, but between those that a node of a tree sees there are
        entries of other nodes: so the visible ones are counted.
        """
        visible = mask.cumsum(1)                                               # up to each entry
        visible_after = visible[:, -1:] - visible                              # after each entry
        return mask & (visible_after <= self.c.window)

    def forward(self, x, ropes, mask, kv=None, glimpse_mask=None, cache=None):
        """As glide.Layer.forward."""
        if mask is None:
            # The next node of a chain sees all entries.
            mask = torch.ones(1, cache.end, dtype=torch.bool, device=x.device)
        mask = self.in_window(mask)
        return super().forward(x, ropes, mask, kv, glimpse_mask, cache)

class GlideShared(BetweenTables, glide.Glide):
    """The draft model: glide.Glide around one layer, between the target's tables."""
    config_class = GlideConfig
    layer_class = Layer

    def __init__(self, config, tables):
        """tables: the target's cos and sin.  The drafter's own queries and keys use them, too."""
        nn.Module.__init__(self)
        c = self.config = config
        head_size = c.width // c.heads
        rope_size = tables[0].shape[-1]
        if rope_size != head_size:
            raise ValueError(f"the target's RoPE covers {rope_size} entries of a head, and the "
                             f"drafter's heads have {head_size}: train glide instead")
        self.layers = nn.ModuleList([self.layer_class(c, 0)])
        self.norm = nn.RMSNorm(c.width, eps=c.eps)
        for p in self.layers[0].parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        self.init_tables(c)
        table = torch.stack(tables)                                            # (2, length, d)
        self.register_buffer("own_table", table, persistent=False)
        self.register_buffer("target_table", table, persistent=False)

    @classmethod
    def for_target(cls, model, config, length):
        """As glide.Glide.for_target."""
        draft_model = super().for_target(model, config, length)
        draft_model.take(model)
        return draft_model

    @torch.no_grad()
    def take(self, model):
        """Remember the target's tables, and start the last norm as the target's (difference 2)."""
        self.target = SimpleNamespace()
        self.take_tables(model)
        norm = model.get_decoder().norm
        self.norm.weight.copy_(norm.weight)

    def loss(self, batch):
        """As glide.Glide.loss."""
        x = self(batch["ids"], batch["kv"])                                    # (B, T, D)
        total = batch["sum"](self.word_loss, batch["learn"], x, batch["logits"])
        return total / batch["count"]

# ---------------------------------------------------------------- EDD's layer
@dataclass
class EDDConfig(edd.Config):
    """edd.Config with what these drafters have beyond it."""
    kind: str = "edd-shared"
    projected: bool = False          # a matrix follows the embedding (difference 1)
    words: int = 0                   # k; 0: the whole vocabulary

    @classmethod
    def for_target(cls, model, hidden=edd.HIDDEN, **more):
        """As edd.Config.for_target.  more: further settings, say encoding, words."""
        return super().for_target(model, hidden, projected=is_tied(model), **more)

class EDDShared(BetweenTables, edd.EDD):
    """The draft model, EDD or VDM: a fresh layer and norm between the target's tables."""
    config_class = EDDConfig

    def __init__(self, config, model):
        # Not edd.EDD's, which would copy the target's tables
        edd.DraftModel.__init__(self, config, model)
        self.layer = self.fresh_layer(model)
        self.norm = self.own(model.get_decoder().norm)                         # (difference 2)
        self.init_tables(config)
        self.projection.to(self.target.like)

    def take(self, model, decoder):
        """As edd.DraftModel.take, with the target's tables."""
        super().take(model, decoder)
        self.take_tables(model)

    def divergence(self, x, target_logits):
        """As edd.EDD.divergence."""
        return self.word_loss(x, target_logits)
