"""Drafters for targets of any family, and their loading from a checkpoint.

    drafter, about = load("my-drafters/glide", model)        # about: its training.json
    config = config_of("eagle", model)                       # for a new one: edd, vdm, medusa ...
    draft_class, drafter_class = KINDS[kind_of("eagle")]
    draft_model = draft_class(config, model)                 # GLIDE's: draft_class.for_target
    drafter = drafter_of(draft_model)

glide.py, edd.py and beyond/ alone serve the families llama, mistral and qwen2, whose weights are
neither quantised nor brought by accelerate.  The classes here have the same names, the same weights
and, beside such a target, the same results.  What they do beside other targets:

 1. GLIDE applies RoPE by the table of the layer that it reads (Gemma 3 has two), to that part of a
    head that the target rotates (Phi), or not at all (GPT-2, OPT).
 2. EDD, the VDM and EAGLE take one layer of Llama's class with the target's sizes.  The papers take
    a layer of the target's own class.
 3. Embedding and LM head are copied by what they compute, so they may be quantised.  Scales and
    soft caps that the target applies outside of them are not copied: the copies are trained.
 4. A drafter between the target's own tables (beyond/shared.py, EAGLE) caps its logits as the
    target does.  It is refused where a small forward shows that they are not the target's.
"""
import copy
import json
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import edd
import glide
from beyond import eagle, medusa, shared
from runtime.linear import PackedLinear, pack
from runtime.targets import context_of, device_of

# ---------------------------------------------------------------- GLIDE
def cached_kv(model):
    """What the target caches for one token -> [(K, V) of a layer], each (1, H, 1, d).

    Layers that share keys and values appear once.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=token, past_key_values=cache, use_cache=True)
    cached = [(getattr(layer, "keys", None), getattr(layer, "values", None))
              for layer in cache.layers]
    of_one_size = all(k is not None and k.shape == v.shape for k, v in cached)
    if not cached or not of_one_size:
        raise ValueError(f"{type(model).__name__} does not cache keys and values of one size in "
                         "each of its layers, and GLIDE reads them: take a target that does")
    return cached

def target_angles(model, length, layers_read=()):
    """The cos/sin table of the last of layers_read, by the target's own module -> (length, r) each.

    r is the part of a head that gets RoPE; it is 0 in a target without RoPE.
    """
    c = model.config.get_text_config()
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    position = torch.arange(length, device=device_of(model))
    like = torch.zeros(1, 1, 1, device=position.device)                # supplies only the dtype
    if rotary is None:
        none = like.new_zeros(length, 0)
        return none, none
    kind = {}
    if "layer_type" in signature(rotary.forward).parameters:
        top = layers_read[-1] if layers_read else -1
        kind["layer_type"] = c.layer_types[top]
    # Beyond the context, which no sequence reaches, longrope and dynamic NTK have other tables.
    position = position.clamp(max=context_of(c) - 1)
    cos, sin = rotary(like, position[None], **kind)
    cos, sin = cos[0].detach(), sin[0].detach()                        # (length, r)
    if cos.shape[-1] == len(getattr(rotary, "inv_freq", ())):          # GPT-OSS has each angle once
        return cos.repeat(1, 2), sin.repeat(1, 2)
    return cos, sin

def apply_partial_rope(x, cos, sin):
    """RoPE of the first r <= d entries of x (..., T, d); cos and sin (T, r)."""
    r = cos.shape[-1]
    if r == 0:
        return x
    rotated = glide.apply_rope(x[..., :r], cos, sin)
    return torch.cat((rotated, x[..., r:]), -1)

class Layer(glide.Layer):
    """A layer of GLIDE, whose glimpse applies RoPE to a part of each head."""
    query_rope = staticmethod(apply_partial_rope)

class AnyGlide(glide.Glide):
    """What Glide and GlideShared have in common."""

    @classmethod
    def for_target(cls, model, config, length):
        """As glide.Glide.for_target."""
        cached = cached_kv(model)
        heads = model.config.get_text_config().num_attention_heads
        read = config.layers_read if config.glimpse else ()
        for layer in read:
            # A target may have fewer caches than layers, and keys of another size in some.
            keys = cached[min(layer, len(cached) - 1)][0]
            if (heads, keys.shape[-1]) != (config.target_heads, config.target_head_size):
                raise ValueError(f"layer {layer} of the target does not cache keys of "
                                 f"{config.target_heads} heads of size {config.target_head_size}: "
                                 "the drafter was made for another target, train one for this")
        keys, _ = cached[read[-1] if read else -1]
        tables = target_angles(model, length, read)
        return cls(config, tables).to(keys.device, keys.dtype)

@dataclass
class GlideConfig(glide.Config):
    """glide.Config, and what published weights of GLIDE need."""
    theta: float = 10000.0           # of the drafter's own RoPE
    glimpse_theta: float = 0.0       # of the RoPE of its glimpse; 0: the target's own table

class Glide(AnyGlide):
    """GLIDE, or (config.glimpse False) the vanilla drafter."""
    config_class = GlideConfig
    layer_class = Layer

    def __init__(self, config, tables):
        super().__init__(config, tables)
        c, length = config, len(tables[0])
        self.own_table = torch.stack(glide.angles(c.width // c.heads, length, c.theta))
        if c.glimpse_theta:
            table = glide.angles(c.target_head_size, length, c.glimpse_theta)
            self.target_table = torch.stack(table)

    @classmethod
    def for_target(cls, model, config, length):
        """As glide.Glide.for_target; the drafter gets the target's vocabulary."""
        config.vocab = model.config.get_text_config().vocab_size
        return super().for_target(model, config, length)

    @torch.no_grad()
    def start_from(self, model):
        """Embedding and head become the target's, where the widths agree."""
        if self.config.width == model.config.get_text_config().hidden_size:
            like = self.embed.weight
            self.embed.weight.copy_(embedding_of(model, like).weight)
            self.head.weight.copy_(head_of(model, like).weight)

def glide_config(model, width=None, layers=1, glimpse=True, block=5, layer=None, norm=False,
                 loss="ce"):
    """The Config of a new Glide for a target: glide.Config.for_target, with norm and loss."""
    config = GlideConfig.for_target(model, width, layers, glimpse, block, layer)
    config.norm, config.loss = norm, loss
    return config

# ---------------------------------------------------------------- embedding and head of a target
def is_plain(module):
    """Whether a linear module has its weight in memory, as floating numbers."""
    weight = module.weight
    in_memory = not weight.is_meta and not hasattr(weight, "__tensor_flatten__")
    return type(module) in (nn.Linear, PackedLinear) and in_memory

@torch.no_grad()
def embedding_of(model, like):
    """A trainable copy of the target's embedding, of the dtype and device of `like`."""
    vocab = model.config.get_text_config().vocab_size
    ids = torch.arange(vocab, device=device_of(model))
    table = model.get_input_embeddings()(ids)                                  # (V, D)
    return nn.Embedding.from_pretrained(table.to(like), freeze=False)

@torch.no_grad()
def head_of(model, like):
    """A trainable copy of the target's LM head, of the dtype and device of `like`."""
    lm_head = model.get_output_embeddings()
    weight, bias = lm_head.weight, lm_head.bias
    if not is_plain(lm_head):
        # What it computes of the D unit vectors is its weight, what it computes of zero its bias.
        width = model.config.get_text_config().hidden_size
        token = torch.zeros(1, dtype=torch.long, device=device_of(model))
        units = torch.eye(width + 1, width).to(model.get_input_embeddings()(token))
        logits = lm_head(units)                                                # (D + 1, V)
        weight = (logits[:-1] - logits[-1]).T
        bias = None if bias is None else logits[-1]
    vocab, width = weight.shape
    head = nn.Linear(width, vocab, bias is not None, device="meta")
    head.weight = nn.Parameter(weight.to(like).clone())
    if bias is not None:
        head.bias = nn.Parameter(bias.to(like).clone())
    return head

def frozen_linear(x, module):
    """A linear module of the target over x (..., D) -> (..., V), like x; it gets no gradient."""
    as_stored = module.weight.dtype == x.dtype and not torch.is_grad_enabled()
    if as_stored or not is_plain(module):
        return module(x).to(x)
    # In training the weight is cast to the dtype of x: in float16 small gradients would be lost.
    weight, bias = module.weight.detach().to(x), module.bias
    return F.linear(x, weight, None if bias is None else bias.detach().to(x))

def soft_capped(logits, cap):
    """cap: the target's final_logit_softcapping, or None."""
    return cap * torch.tanh(logits / cap) if cap else logits

class AnyTables:
    """How a drafter between the target's tables uses them; see beyond.shared.BetweenTables."""

    def take_tables(self, model):
        """Remember the target's embedding and LM head, which alone must give its logits."""
        target = self.target
        target.model = model
        target.embed = model.get_input_embeddings()
        target.lm_head = model.get_output_embeddings()
        target.cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        target.head = lambda x: soft_capped(frozen_linear(x, target.lm_head), target.cap)
        ids = torch.arange(4, device=device_of(model))[None]
        with torch.no_grad():
            out = model(ids, use_cache=False, output_hidden_states=True)
            logits = target.head(out.hidden_states[-1])
        error = (logits - out.logits).float().norm() / out.logits.float().norm()
        if not error < torch.finfo(logits.dtype).eps ** 0.5:
            raise ValueError(f"the logits of {type(model).__name__} are not its LM head's alone: "
                             "take a drafter with tables of its own (glide, edd)")

    def head_of_words(self, words):
        """The target's head for words (k,) alone -> a function: x (..., D) -> logits (..., k)"""
        target = self.target
        rows = head_of(target.model, next(self.norm.parameters())).requires_grad_(False)
        words = words.to(rows.weight.device)
        rows.weight = nn.Parameter(rows.weight[words], requires_grad=False)
        if rows.bias is not None:
            rows.bias = nn.Parameter(rows.bias[words], requires_grad=False)
        pack(rows, beside=target.model)
        return lambda x: soft_capped(frozen_linear(x, rows), target.cap)

# ---------------------------------------------------------------- EDD and its baselines
def own_copy(module):
    """A copy of a module, without the hook of accelerate that brings offloaded weights."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        return copy.deepcopy(module)
    from accelerate.utils import align_module_device
    with align_module_device(module):
        twin = copy.deepcopy(module, {id(hook): hook})
    vars(twin).pop("forward", None)
    return twin

class AnyDraftModel(edd.DraftModel):
    """edd.DraftModel for any target; EDD needs one whose decoder has a last norm called `norm`."""

    @torch.no_grad()
    def take(self, model, decoder):
        """As edd.DraftModel.take."""
        if isinstance(self, edd.EDD) and not hasattr(decoder, "norm"):
            raise ValueError(f"the decoder of {type(model).__name__} has no `norm`, which EDD "
                             "copies: take glide")
        target, c = self.target, decoder.config
        target.model = model
        ids = torch.arange(4, device=device_of(model))[None]
        out = model(ids, use_cache=False, output_hidden_states=True)
        target.like = out.hidden_states[self.config.hidden]
        if c.model_type in edd.FAMILIES:
            target.rotary = own_copy(decoder.rotary_emb)
            return
        heads = c.num_attention_heads
        target.layer_config = LlamaConfig(
            hidden_size=c.hidden_size,
            intermediate_size=getattr(c, "intermediate_size", None) or 4 * c.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(c, "num_key_value_heads", None) or heads,
            head_dim=glide.head_size_of(c),
            attn_implementation="sdpa")
        target.rotary = LlamaRotaryEmbedding(target.layer_config).to(target.like.device)

    def fresh_layer(self, model):
        """As edd.DraftModel.fresh_layer, or a layer of Llama's class."""
        if not hasattr(self.target, "layer_config"):
            return super().fresh_layer(model)
        layer = LlamaDecoderLayer(self.target.layer_config, layer_idx=0)
        for p in layer.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        return layer.to(self.target.like)

    def own(self, module):
        """As edd.DraftModel.own."""
        model, like = self.target.model, self.target.like
        if module is model.get_input_embeddings():
            return embedding_of(model, like)
        if module is model.get_output_embeddings():
            return head_of(model, like)
        return own_copy(module).to(like).requires_grad_(True)

# In these classes Python looks for a method in the bases from left to right: AnyDraftModel's stand
# in place of edd.DraftModel's, and AnyTables' in place of beyond/'s.
class EDD(edd.EDD, AnyDraftModel):
    """EDD or the VDM."""

class Medusa(medusa.Medusa, AnyDraftModel):
    """MEDUSA-1."""

class Eagle(AnyTables, eagle.Eagle, AnyDraftModel):
    """EAGLE-1."""

    def take(self, model, decoder):
        """As eagle.Eagle.take."""
        AnyDraftModel.take(self, model, decoder)
        self.take_tables(model)

class EDDShared(AnyTables, shared.EDDShared, AnyDraftModel):
    """EDD or the VDM between the target's tables."""

class GlideShared(AnyTables, shared.GlideShared, AnyGlide):
    """GLIDE or the vanilla drafter between the target's tables."""

    @torch.no_grad()
    def take(self, model):
        """As shared.GlideShared.take; the last norm's weights are what it makes of ones."""
        c = model.config.get_text_config()
        if (self.config.vocab, self.config.width) != (c.vocab_size, c.hidden_size):
            raise ValueError("the drafter was made for another target: one of another width or "
                             "vocabulary size")
        self.target = SimpleNamespace()
        self.take_tables(model)
        norm = getattr(model.get_decoder(), "norm", None)
        if norm is not None and getattr(norm, "bias", None) is None:
            ones = torch.ones_like(self.norm.weight)
            self.norm.weight.copy_(norm(ones))

# ---------------------------------------------------------------- the table of kinds, loading
# {"kind" in a training.json: (the draft model, what decodes with it)}
KINDS = {
    "glide": (Glide, glide.Drafter),
    "vanilla": (Glide, glide.Drafter),
    "glide-shared": (GlideShared, glide.Drafter),
    "vanilla-shared": (GlideShared, glide.Drafter),
    "edd": (EDD, edd.Drafter),
    "vdm": (EDD, edd.Drafter),
    "edd-shared": (EDDShared, edd.Drafter),
    "vdm-shared": (EDDShared, edd.Drafter),
    "eagle": (Eagle, eagle.Drafter),
    "medusa": (Medusa, medusa.Drafter),
}
# {name on the command line of train.py: the settings of its Config}, but for GLIDE's own
VARIANTS = {**edd.VARIANTS, **shared.GLIDE_VARIANTS, **shared.EDD_VARIANTS, **eagle.VARIANTS,
            **medusa.VARIANTS}

def kind_of(name):
    """The kind that a name of train.py's belongs to: "glide-shared-f768" is a "glide-shared"."""
    known = [kind for kind in KINDS if f"{name}-".startswith(f"{kind}-")]
    if not known:
        raise ValueError(f"{name} is no kind of drafter: there are {' '.join(KINDS)}")
    return max(known, key=len)

def config_of(name, model, **more):
    """The Config of a name in VARIANTS, for a target.  more: settings that the name leaves open."""
    draft_class, _ = KINDS[kind_of(name)]
    return draft_class.config_class.for_target(model, **{**more, **VARIANTS[name]})

def drafter_of(draft_model):
    """What decodes with a draft model of one of these classes."""
    drafter_classes = dict(KINDS.values())
    return drafter_classes[type(draft_model)](draft_model)

def load(folder, model, length=None):
    """A checkpoint of train.py -> (drafter for the target `model`, training.json as a dict).

    length: the longest sequence to decode; None: the target's context.  Raises ValueError where the
    checkpoint does not fit the target.
    """
    folder = Path(folder)
    about = json.loads((folder / "training.json").read_text())
    draft_class, drafter_class = KINDS[kind_of(about["kind"])]
    if issubclass(draft_class, glide.Glide):
        length = length or context_of(model.config.get_text_config())
        return glide.load(folder, model, length, draft_class)
    return edd.load(folder, model, draft_class, drafter_class)
