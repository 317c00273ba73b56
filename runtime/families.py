"""Draft models for targets of any family: what they need of the target, and how they are loaded.

    drafter, about = load("my-drafters/glide", model)             # about: its training.json
    draft_model = new("edd", edd.Config.for_target(model), model)        # a new one, to be trained
    drafter = edd.Drafter(draft_model)

glide.py and edd.py alone serve targets that are built as Llama is.  The functions here give the
same draft models what they need of any other target, and of a llama, mistral or qwen2 the same as
those files do:

 1. rope_tables_of gives GLIDE the cos and sin of the layer that it reads (Gemma 3 has two tables),
    for the part of a head that the target rotates (Phi), or none for its glimpse (GPT-2, OPT).
 2. parts_of gives what EDD, the VDM and EAGLE are made of.  Their layer is one of the target's
    class beside a llama, mistral or qwen2, as in the papers.  Beside all other families it is a
    layer of Llama's class with the target's sizes.
 3. Embedding and LM head are copied by what they compute, so they may be quantised or offloaded.
    Scales and soft caps that the target applies outside of them are not copied: the copies are
    trained.
 4. tables_of gives the target's own tables, for beyond/shared.py and EAGLE.  Their logits are
    capped as the target's.  A target whose logits are made otherwise is refused.
"""
import json
from dataclasses import fields
from inspect import signature
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding)

import edd
import glide
from beyond import eagle, medusa, shared
from runtime.linear import PackedLinear, pack
from runtime.targets import context_of, device_of

OTHER_TARGET = "the drafter was made for another target, train one for this"

# ---------------------------------------------------------------- embedding and head
@torch.no_grad()
def embedded(model, ids):
    """The target's embedding of ids (list) -> (len(ids), D).  Its dtype and device are a drafter's.

    (The dtype of a quantised weight is not that of the hidden states.)
    """
    return model.get_input_embeddings()(torch.tensor(ids, device=device_of(model)))

def embedding_of(model):
    """A trainable copy of the target's embedding."""
    vocab = model.config.get_text_config().vocab_size
    table = embedded(model, range(vocab))                                      # (V, D)
    return nn.Embedding.from_pretrained(table.clone(), freeze=False)

@torch.no_grad()
def head_of(model, words=slice(None)):
    """A trainable copy of the target's LM head; words (k,): of these rows alone."""
    lm_head, like = model.get_output_embeddings(), embedded(model, [0])
    weight, bias = lm_head.weight, lm_head.bias
    in_memory = not weight.is_meta and not hasattr(weight, "__tensor_flatten__")
    if type(lm_head) not in (nn.Linear, PackedLinear) or not in_memory:
        # What it computes of the D unit vectors is its weight, what it computes of zero its bias.
        width = like.shape[1]
        logits = lm_head(torch.eye(width + 1, width).to(like))                 # (D + 1, V)
        weight = (logits[:-1] - logits[-1]).T
        bias = None if bias is None else logits[-1]
    vocab, width = weight.shape
    head = nn.Linear(width, vocab, bias is not None, device="meta")
    head.weight = nn.Parameter(weight[words].to(like).clone())
    if bias is not None:
        head.bias = nn.Parameter(bias[words].to(like).clone())
    return head

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

def target_rope(model, length, layer=-1):
    """The target's cos and sin for one of its layers, by its own module -> (2, length, r).

    The target rotates the first r entries of a head; r is 0 in a target without RoPE.
    """
    c = model.config.get_text_config()
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    device = device_of(model)
    if rotary is None:
        return torch.zeros(2, length, 0, device=device)
    # Beyond the context, which no sequence reaches, longrope and dynamic NTK have other tables.
    position = torch.arange(length, device=device).clamp(max=context_of(c) - 1)[None]
    like = torch.zeros(1, 1, 1, device=device)                         # supplies only the dtype
    kind = {}
    if "layer_type" in signature(rotary.forward).parameters:
        kind["layer_type"] = c.layer_types[layer]
    cos, sin = rotary(like, position, **kind)
    table = torch.cat((cos, sin)).detach()                             # (2, length, r)
    if table.shape[-1] == len(getattr(rotary, "inv_freq", ())):        # GPT-OSS has each angle once
        table = table.repeat(1, 1, 2)
    return table

def rope_tables_of(model, config, length):
    """As glide.tables_of, for any target: (2, length, d) and (2, length, r).

    Raises ValueError where the target does not cache the keys that a GLIDE of this Config reads.
    """
    heads = model.config.get_text_config().num_attention_heads
    cached = cached_kv(model) if config.glimpse else []
    for layer in config.layers_read:
        sizes = (heads, cached[layer][0].shape[-1]) if layer < len(cached) else None
        if sizes != (config.target_heads, config.target_head_size):
            raise ValueError(f"layer {layer} of the target does not cache keys of "
                             f"{config.target_heads} heads of size {config.target_head_size}: "
                             f"{OTHER_TARGET}")
    glimpse_table = target_rope(model, length, config.layers_read[-1] if config.glimpse else -1)
    r, d = glimpse_table.shape[-1], config.width // config.heads
    if r and r % d == 0:
        return glimpse_table[..., ::r // d], glimpse_table
    # The drafter needs positions, also where the target has no RoPE.
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=d, num_attention_heads=1))
    position = torch.arange(length)[None]
    table = torch.cat(rotary(position.float(), position))              # (2, length, d)
    return table.to(glimpse_table), glimpse_table

# ---------------------------------------------------------------- EDD, the VDM, EAGLE
def parts_of(model, embed=None, head=None):
    """What an edd.EDD is made of, beside any target -> edd.Parts.

    embed, head: what stands in place of copies of the target's embedding and LM head.
    """
    decoder, like = model.get_decoder(), embedded(model, [0])
    c = decoder.config
    if c.model_type in edd.FAMILIES:
        layer = type(decoder.layers[-1])(c, layer_idx=len(decoder.layers) - 1)
        rotary = type(decoder.rotary_emb)(c)
    else:
        heads = c.num_attention_heads
        c = LlamaConfig(
            hidden_size=c.hidden_size,
            intermediate_size=getattr(c, "intermediate_size", None) or 4 * c.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(c, "num_key_value_heads", None) or heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
            attn_implementation="sdpa")
        layer = LlamaDecoderLayer(c, layer_idx=0)
        rotary = LlamaRotaryEmbedding(c)
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=c.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return edd.Parts(
        embed=embed or embedding_of(model),
        head=head or head_of(model),
        layer=layer.to(like),
        norm=LlamaRMSNorm(c.hidden_size, c.rms_norm_eps).to(like),
        rotary=rotary.to(like.device))

# ---------------------------------------------------------------- the target's own tables
@torch.no_grad()
def norm_weights(model):
    """The weights (D,) of the target's last norm: what it makes of ones.  Ones if it has a bias."""
    ones = torch.ones_like(embedded(model, [0])[0])
    norm = getattr(model.get_decoder(), "norm", None)
    if norm is None or getattr(norm, "bias", None) is not None:
        return ones
    return norm(ones).to(ones)

@torch.no_grad()
def tables_of(model, words=None):
    """The target's own embedding and LM head -> shared.Tables

    words (k,): a list of token ids, to which the head is reduced.  Training wants a frozen target:
    model.requires_grad_(False).  Raises ValueError where a small forward shows that the target
    makes its logits otherwise.
    """
    embed, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    dtype, rows = embedded(model, [0]).dtype, slice(None)
    if words is not None:
        rows, words = words.cpu(), words.to(device_of(model))
        lm_head = head_of(model, rows).requires_grad_(False)
        pack(lm_head, beside=model)

    def head(x):
        logits = lm_head(x.to(dtype)).to(x)
        return cap * torch.tanh(logits / cap) if cap else logits

    ids = torch.arange(4, device=device_of(model))[None]
    out = model(ids, use_cache=False, output_hidden_states=True)
    found, expected = head(out.hidden_states[-1]), out.logits[..., rows]       # (1, 4, V or k)
    error = (found - expected).float().norm() / expected.float().norm()
    if not error < torch.finfo(found.dtype).eps ** 0.5:
        raise ValueError(f"the logits of {type(model).__name__} are not its LM head's alone: "
                         "take a drafter with tables of its own (glide, edd)")
    return shared.Tables(embed, head, norm_weights(model), words)

# ---------------------------------------------------------------- the table of kinds, loading
# {"kind" in a training.json: (the Config, the draft model, what decodes with it)}
KINDS = {
    "glide": (glide.Config, glide.Glide, glide.Drafter),
    "vanilla": (glide.Config, glide.Glide, glide.Drafter),
    "glide-shared": (shared.GlideConfig, shared.GlideShared, glide.Drafter),
    "vanilla-shared": (shared.GlideConfig, shared.GlideShared, glide.Drafter),
    "edd": (edd.Config, edd.EDD, edd.Drafter),
    "vdm": (edd.Config, edd.EDD, edd.Drafter),
    "edd-shared": (shared.EDDConfig, shared.EDDShared, edd.Drafter),
    "vdm-shared": (shared.EDDConfig, shared.EDDShared, edd.Drafter),
    "eagle": (eagle.Config, eagle.Eagle, eagle.Drafter),
    "medusa": (medusa.Config, medusa.Medusa, medusa.Drafter),
}
# Older names of weights in the checkpoints of drafters between the target's tables
RENAMED = {"projection.weight": "between.projection.weight", "words": "between.words"}

def new(kind, config, model, length=None, words=None):
    """A draft model with new weights, on the target's device and in its dtype.

    kind, config: a key of KINDS, and a Config of that kind.  length: the positions that a GLIDE
    serves; None: those of the target's context and of a tree after it.  words (k,): the token ids
    that a drafter between the target's tables drafts alone.  Raises ValueError where the Config was
    made for a target of other sizes.
    """
    _, draft_class, _ = KINDS[kind]
    c = model.config.get_text_config()
    same_width = draft_class is glide.Glide or config.width == c.hidden_size
    if config.vocab != c.vocab_size or not same_width:
        raise ValueError(f"the target has another vocabulary or width: {OTHER_TARGET}")
    if draft_class in (eagle.Eagle, shared.EDDShared, shared.GlideShared):
        tables = tables_of(model, words)
    if issubclass(draft_class, glide.Glide):
        rope_tables = rope_tables_of(model, config, length or context_of(c) + glide.TREE_POSITIONS)
    if draft_class is glide.Glide:
        draft_model = glide.Glide(config, rope_tables)
    elif draft_class is shared.GlideShared:
        draft_model = shared.GlideShared(config, rope_tables, tables)
    elif draft_class is edd.EDD:
        draft_model = edd.EDD(config, parts_of(model))
    elif draft_class is shared.EDDShared:
        draft_model = shared.EDDShared(config, parts_of(model, tables.embed, tables.head), tables)
    elif draft_class is eagle.Eagle:
        draft_model = eagle.Eagle(config, parts_of(model, tables.embed, tables.head))
    else:
        draft_model = medusa.Medusa(config, head_of(model))
    return draft_model.to(embedded(model, [0]))

def load(folder, model, length=None):
    """A checkpoint of train.py -> (drafter for the target `model`, training.json as a dict).

    length: the longest sequence to decode; None: the target's context.  Raises ValueError where the
    checkpoint does not fit the target.
    """
    kind = json.loads(Path(folder, "training.json").read_text()).get("kind")
    if kind not in KINDS:
        raise ValueError(f"{folder} holds no drafter of the kinds {' '.join(KINDS)}")
    config_class, _, drafter_class = KINDS[kind]
    config, weights, about = glide.read(folder, config_class)
    weights = {RENAMED.get(name, name): weight for name, weight in weights.items()}
    draft_model = new(kind, config, model, length and length + glide.TREE_POSITIONS,
                      weights.get("between.words"))
    try:
        draft_model.load_state_dict(weights)
    except RuntimeError:
        raise ValueError(f"{folder} does not hold the weights that its training.json describes: "
                         "train the drafter again") from None
    temperature = about.get("validation", {}).get("temperature", 1.0)
    return drafter_class(draft_model, temperature), about
