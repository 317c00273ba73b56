"""Parts: GLIDE, EDD, EAGLE and MEDUSA for targets that are not built as Llama is.

    from runtime import drafters as runtime_drafters
    drafter, about = runtime_drafters.load(glide, "my-drafters/glide", model)     # or edd
    config = runtime_drafters.glide_config(model, width=512, norm=True)
    draft_model = runtime_drafters.Glide.beside(model, config, length=2048)
    config = runtime_drafters.config_of("eagle", model)                           # edd, vdm, eagle, medusa ...
    draft_class, drafter_class = runtime_drafters.KINDS[config.kind]

glide.py, edd.py, beyond/eagle.py and beyond/medusa.py alone serve Llama, Mistral, Qwen2.  The
classes here override a few methods, for
    RoPE              tables that differ by layer (Gemma 3) or by the length of the text (longrope,
                      dynamic NTK), cover a part of a head (Phi), are complex (DeepSeek V2), do not
                      exist (GPT-2)
    latent attention  whose cache holds a latent and a part with RoPE (DeepSeek): a glimpse reads
                      them as one
    scales            of embeddings and logits, soft caps: found by running the target once
    vocabularies      of public drafters, padded otherwise than the target's
    weights           that are quantised, or that accelerate brings when a module runs
"""
import copy
import json
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

import edd
import glide
from beyond import eagle, longspec, medusa, shared
from runtime.anydraft import AnyDraftModel, Part, place_of


# -------------------------------------------------- GLIDE: what the target caches, its RoPE
def whole(k, v, latent):
    """K and V as attention uses them; DeepSeek caches a latent as k, the part with RoPE as v."""
    if k.shape[-1] != latent:
        return k, v
    return torch.cat((v, k), -1), k


def cached_kv(model):
    """What the target caches of one token: [(K, V) of a layer], (1, H, 1, d) each.

    Layers that share keys and values stand there once.  ValueError where layers cache none.
    """
    latent = getattr(model.config.get_text_config(), "kv_lora_rank", None)
    token = torch.zeros(1, 1, dtype=torch.long, device=place_of(model))
    cache = DynamicCache()
    try:
        with torch.no_grad():
            model(input_ids=token, past_key_values=cache, use_cache=True)
        assert cache.layers, "nothing was cached"
        return [whole(layer.keys, layer.values, latent) for layer in cache.layers]
    except Exception as why:
        raise ValueError(f"{type(model).__name__} does not cache keys and values in each of its "
                         f"layers, and GLIDE reads them ({type(why).__name__}): take a target "
                         "that does") from None


def target_angles(model, length, layers_read=()):
    """The cos/sin table of the last of these layers, by the target's own module; (length, r) each.

    Some have other frequencies in long texts (longrope, dynamic NTK): a position has those of a
    text that ends within the same limit.  r = 0 where there is no such module (GPT-2).  Where
    neighbouring entries are the pairs of RoPE (Cohere, GPT-J), or a layer has no RoPE at all
    (SmolLM3), the drafter has to learn the difference.
    """
    c, device = model.config.get_text_config(), place_of(model)
    like = torch.zeros(1, 1, 1, device=device)                      # (the module takes its type)
    position = torch.arange(length, device=device)[None]
    # A copy, as the module remembers the longest text
    rotary = copy.deepcopy(getattr(model.get_decoder(), "rotary_emb", None))
    kind = {}
    rope = getattr(c, "rope_parameters", None)
    if rotary and "layer_type" in signature(rotary.forward).parameters:
        top = layers_read[-1] if layers_read else -1
        kind["layer_type"] = c.layer_types[top]
        rope = rope.get(kind["layer_type"])
    if not (rotary and rope):
        none = like.new_zeros(length, 0)
        return none, none
    # The limits; a text of one token makes a module forget a long one.
    ends = [1, rope.get("original_max_position_embeddings"), c.max_position_embeddings, length]
    tables, known = [], 0
    for end in sorted(min(end or length, length) for end in ends):
        found = rotary(like, position[:, :end], **kind)
        if torch.is_tensor(found):                                  # cos + i sin (DeepSeek V2)
            found = found.real, found.imag
        table = torch.stack(found)[:, 0]                            # (2, end, r)
        tables.append(table[:, known:])
        known = end
    table = torch.cat(tables, 1)
    if table.shape[-1] == len(getattr(rotary, "inv_freq", ())):     # each angle once (GPT-OSS)
        table = table.repeat(1, 1, 2)
    return table.detach().unbind()


def apply_partial_rope(x, cos, sin):
    """RoPE of the first r <= d entries of x (..., T, d), cos and sin (T, r)."""
    r = cos.shape[-1]
    if r == x.shape[-1]:
        return glide.apply_rope(x, cos, sin)
    rotated = glide.apply_rope(x[..., :r], cos, sin)
    return torch.cat((rotated, x[..., r:]), -1)


# -------------------------------------------------- GLIDE and LongSpec for any family
@dataclass
class GlideConfig(glide.Config):
    """What other families, and the public weights of GLIDE, need beyond the paper's settings."""
    latent: int = 0                  # size of DeepSeek's latents
    target_value_size: int = 0       # of a value, where it is not d_k
    theta: float = 10000.0           # of the drafter's own RoPE
    glimpse_theta: float = 0.0       # of the RoPE of its glimpse; 0: the target's own table


class Layer(glide.Layer):
    """A layer of GLIDE for keys with RoPE in a part of their entries, for latents as keys."""
    query_rope = staticmethod(apply_partial_rope)

    def __init__(self, c, m):
        super().__init__(c, m)
        if c.glimpse and c.target_value_size not in (0, c.target_head_size):
            self.glimpse_o = nn.Linear(c.target_heads * c.target_value_size, c.width, bias=False)

    def glimpse(self, x, kv, rope, mask=None):
        """As glide.Layer.glimpse."""
        k, v = kv[self.target_layer]
        return super().glimpse(x, {self.target_layer: whole(k, v, self.c.latent)}, rope, mask)


class Glide(glide.Glide):
    """GLIDE for any target that caches keys and values."""
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
    def beside(cls, model, config, length):
        """On the device and in the type of the target's KV entries: weights may be quantised."""
        cached = cached_kv(model)
        top = max(config.layers_read, default=len(cached) - 1)
        wanted = config.target_heads, config.target_head_size
        heads = model.config.get_text_config().num_attention_heads
        found = [(heads, keys.shape[-1]) for keys, _ in cached[top:top + 1]]
        if config.glimpse and found != [wanted]:
            raise ValueError(f"the drafter reads layer {top} with heads and head size {wanted}, "
                             f"and here are {found}: it was made for another target, train one "
                             "for this")
        keys, _ = cached[top]
        tables = target_angles(model, length, config.layers_read)
        return cls(config, tables).to(keys.device, keys.dtype)

    @torch.no_grad()
    def start_from(self, model):
        """Embedding and head become the target's, with what it scales -> whether they have the
        drafter's shape, and are used as Llama's.
        """
        c = model.config.get_text_config()
        if (c.vocab_size, c.hidden_size) != self.embed.weight.shape:
            return False
        try:
            taken = AnyDraftModel(edd.Config.for_target(model, -1), model)
        except ValueError:
            return False
        embed = taken.own(model.get_input_embeddings())
        head = taken.own(model.get_output_embeddings())
        self.embed.weight.copy_(embed.weight)
        self.head.weight.copy_(head.weight * head.scale)
        return True


@dataclass
class LongSpecConfig(longspec.Config, GlideConfig):
    """beyond/longspec.py's, for other targets."""


class LongSpecLayer(longspec.Layer, Layer):
    """beyond/longspec.py's, for other targets."""


class LongSpec(longspec.LongSpec, Glide):
    """LongSpec between the embedding and head of a target that scales them, or is quantised."""
    config_class = LongSpecConfig
    layer_class = LongSpecLayer

    def take(self, model):
        """As longspec.LongSpec.take; ValueError where the target uses its parts otherwise."""
        taken = AnyDraftModel(edd.Config.for_target(model, -1), model)
        self.target = taken.target

    @torch.no_grad()
    def start_from(self, model):
        """The last norm becomes the target's, where that multiplies normed states by a vector."""
        ones = torch.ones_like(self.norm.weight)
        weight = Part(model.get_decoder().norm, self.target.like)(ones[None])[0]
        if weight.any():                                     # (LayerNorm of equal entries is zero)
            self.norm.weight.copy_(weight)


class OtherVocabulary(glide.Drafter):
    """Decoding with a GLIDE whose vocabulary is padded otherwise than the target's `vocab`."""

    def __init__(self, model, vocab):
        super().__init__(model)
        self.vocab = vocab

    def encode(self, tokens):
        """As glide.Drafter.encode; an id that the drafter does not know is any other."""
        super().encode(tokens.clamp(max=self.config.vocab - 1))

    def expand(self, tokens, parents):
        """As glide.Drafter.expand; unknown ids get -inf, those beyond the target's are cut."""
        logits = super().expand(tokens.clamp(max=self.config.vocab - 1), parents)
        return F.pad(logits, (0, self.vocab - logits.shape[-1]), value=float("-inf"))


def glide_config(model, width=None, layers=1, glimpse=True, block=5, layer=None, norm=False,
                 loss="ce"):
    """glide.Config.for_target of any family; ValueError where GLIDE cannot read the target."""
    c, cached = model.config.get_text_config(), cached_kv(model)
    top = len(cached) - 1 if layer is None else layer
    if top not in range(layers - 1, len(cached)):
        raise ValueError(f"layer {top} of the target cannot be read by a drafter of {layers}: it "
                         f"has layers {layers - 1} to {len(cached) - 1} for that")
    keys, values = cached[top]
    size = keys.shape[-1]
    config = GlideConfig.for_target(model, width, layers, glimpse, block, top, size)
    config.norm, config.loss = norm, loss
    if config.width // config.heads % 2:
        raise ValueError(f"a drafter of width {config.width} would have heads of odd size: change "
                         "the width")
    if not glimpse:
        return config
    config.target_value_size = values.shape[-1]
    config.latent = getattr(c, "kv_lora_rank", None) or 0
    if len({cached[read][0].shape for read in config.layers_read}) > 1:
        raise ValueError(f"the target's layers {list(config.layers_read)} have keys of several "
                         "sizes: read one layer")
    if c.num_attention_heads % keys.shape[1]:
        raise ValueError(f"{type(model).__name__} caches {keys.shape[1]} heads, and its "
                         f"configuration says {c.num_attention_heads}: GLIDE cannot share them "
                         "evenly")
    return config


def longspec_config(model, layer=None, norm=True, loss="kl", block=5, **more):
    """longspec.Config.for_target of any family.  more: its further settings."""
    glimpse = more.get("glimpse", True)
    sizes = glide_config(model, None, 1, glimpse, block, layer, norm, loss)
    settings = {name: value for name, value in vars(sizes).items()
                if name not in ("heads", "feed_forward")}
    tied = {"projected": longspec.is_tied(model)}
    return LongSpecConfig.for_target(model, **{**settings, **tied, **more})


def load_glide(folder, model, length):
    """glide.load of any family, LongSpec too."""
    about = json.loads((folder / "training.json").read_text())
    # Older files of converted LongSpecs say "glide"; only they have no last norm.
    named = about.get("kind", "").startswith("longspec")
    is_longspec = named or not about["config"].get("last_norm", True)
    return glide.load(folder, model, length, LongSpec if is_longspec else Glide)


# -------------------------------------------------- EDD and its baselines
class EDD(AnyDraftModel, edd.EDD):
    pass


class Shared(AnyDraftModel, shared.Shared):
    pass


class Eagle(AnyDraftModel, eagle.Eagle):
    pass


class Medusa(AnyDraftModel, medusa.Medusa):
    pass


# What config.kind in a checkpoint means: the draft model, and what decodes with it
KINDS = {
    "edd": (EDD, edd.Drafter),
    "edd-shared": (Shared, edd.Drafter),
    "eagle": (Eagle, eagle.Drafter),
    "medusa": (Medusa, medusa.Drafter),
}
# What a name on the command line means: the file, and settings of its Config
VARIANTS = {name: (edd, settings) for name, settings in edd.VARIANTS.items()}
for file in (shared, eagle, medusa):
    VARIANTS |= {name: (file, settings) for name, settings in file.VARIANTS.items()}


def config_of(name, model, **more):
    """The Config of a name on the command line, for a target.  more: what the name leaves open."""
    file, settings = VARIANTS[name]
    return file.Config.for_target(model, **{**more, **settings})


# ---------------------------------------------------------------- from a checkpoint
def load(module, folder, model, length=None):
    """glide.load or edd.load (module), for a target of any family.

    Raises ValueError, in one sentence, where that fails.
    """
    folder = Path(folder)
    for name in ("training.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"no drafter in {folder}: {name} is missing; train one with train.py "
                             "or name its folder with --checkpoint")
    try:
        if module is not glide:
            config = json.loads((folder / "training.json").read_text())["config"]
            return edd.load(folder, model, *KINDS[config.get("kind", edd.Config.kind)])
        c = model.config.get_text_config()
        length = length or getattr(c, "max_position_embeddings", None) or 2048
        drafter, about = load_glide(folder, model, length)
    except Exception as why:
        # another target, or one built otherwise; or no room for it
        if type(why) is ValueError or isinstance(why, torch.OutOfMemoryError):
            raise
        last = str(why).rpartition("\n")[2]
        reason = f"{type(why).__name__}: {last.strip()[:100]}"
        raise ValueError(f"the drafter in {folder} is damaged ({reason}); train or copy it "
                         "again") from None
    if drafter.config.vocab != c.vocab_size:
        temperature = drafter.temperature
        drafter = OtherVocabulary(drafter.model, c.vocab_size)
        drafter.temperature = temperature
    return drafter, about
