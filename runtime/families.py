"""Draft models for targets of any family: what they need of the target, and how they are loaded.

    drafter, about = load("my-drafters/glide", model)             # about: its training.json
    draft_model = new("edd", edd.Config.for_target(model), model)        # a new one, to be trained
    drafter = edd.Drafter(draft_model)

glide.py and edd.py alone serve some families.  Here the same draft models get what they need of any
other target: RoPE as its keys have it, by halves (Llama) or by pairs (Cohere, GLM), wholly, in part
(Phi) or not at all (GPT-2); for EDD, the VDM and EAGLE a layer of Llama's class with its sizes;
copies of its embedding and LM head by what they compute, as they may be quantised or offloaded, or
for beyond/shared.py and EAGLE themselves.
"""
import json
import warnings
from dataclasses import fields
from inspect import signature
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    rotate_half,
)

import edd
import glide
from beyond import eagle, medusa, shared
from runtime.linear import PackedLinear, pack
from runtime.targets import context_of, device_of

READS_NONE = "take a drafter that does not (edd, vanilla)"
TREE_POSITIONS = 1024            # after the last token of a full context, for the nodes of a tree

# ---------------------------------------------------------------- embedding and head
@torch.no_grad()
def embedded(model, ids):
    """The target's embedding of ids (list) -> (len(ids), D), in the dtype of hidden states"""
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
    in_memory = type(weight) is nn.Parameter and not weight.is_meta
    if type(lm_head) not in (nn.Linear, PackedLinear) or not in_memory:
        # What it computes of the D unit vectors is its weight, what it computes of zero its bias.
        width = like.shape[1]
        logits = lm_head(torch.eye(width + 1, width).to(like))                 # (D + 1, V)
        weight = (logits[:-1] - logits[-1]).T
        bias = None if bias is None else logits[-1]
    head = nn.Linear(*weight.T.shape, bias is not None, device="meta")
    head.weight = nn.Parameter(weight[words].to(like).clone())
    if bias is not None:
        head.bias = nn.Parameter(bias[words].to(like).clone())
    return head

# ---------------------------------------------------------------- GLIDE
def rope_by(angles, neighbours=False):
    """RoPE of the first 2 n entries of a head -> a function as glide.rope_of gives it

    angles: cos and sin (2, length, n).  neighbours: entries 2 i and 2 i + 1 are a pair, and not i
    and n + i as in Llama.
    """
    table = angles.repeat_interleave(2, -1) if neighbours else torch.cat((angles, angles), -1)

    def rope(x, position):
        cos, sin = table.index_select(1, position).to(x.dtype)         # (T, 2 n) each

        def rotate(q):
            rotated, rest = q.tensor_split([table.shape[-1]], -1)
            if neighbours:
                a, b = rotated[..., ::2], rotated[..., 1::2]
                partner = torch.stack((-b, a), -1).flatten(-2)
            else:
                partner = rotate_half(rotated)
            rotated = rotated * cos + partner * sin
            return torch.cat((rotated, rest), -1) if rest.numel() else rotated
        return rotate
    return rope

def rope_table(model, layer):
    """The cos and sin that the target's own module gives one of its layers -> (2, length, r).

    How they belong to the entries of a head differs from family to family.  r is 0 in a target
    without such a module.  The length is the context's, and more for the nodes of a tree.
    """
    c, device = model.config.get_text_config(), device_of(model)
    # Beyond the context, which no sequence reaches, longrope and dynamic NTK have other tables.
    context = context_of(c)
    position = torch.arange(context + TREE_POSITIONS, device=device).clamp(max=context - 1)[None]
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    table = None
    if rotary is not None:
        has_kinds = "layer_type" in signature(rotary.forward).parameters
        kind = {"layer_type": c.layer_types[layer]} if has_kinds else {}
        table = rotary(position.float(), position, **kind)
    if not isinstance(table, tuple):                                   # complex numbers (Llama 4)
        return torch.zeros(2, position.shape[1], 0, device=device)
    table = torch.cat(table).detach()
    if table.shape[-1] == len(getattr(rotary, "inv_freq", ())):        # GPT-OSS has each angle once
        table = table.repeat(1, 1, 2)
    return table

@torch.no_grad()
def cached_keys(model, layer, position):
    """What a layer of the target caches of one token at a position -> (H, 1, d_k)

    Some targets know no positions (ALiBi).
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
    at = {"position_ids": token + position}
    if "position_ids" not in signature(model.forward).parameters:
        at = {}
    cache = DynamicCache()
    model(input_ids=token, past_key_values=cache, use_cache=True, **at)
    # Layers that share keys appear once.
    cached = cache.layers[layer] if layer < len(cache.layers) else None
    k, v = getattr(cached, "keys", None), getattr(cached, "values", None)
    if k is None or k.shape != v.shape:
        raise ValueError(f"layer {layer} of {type(model).__name__} does not cache keys and values "
                         f"of one size, and GLIDE reads them: {READS_NONE}")
    return k[0].float()

def angles_of(model, table, layer):
    """How the target rotates the keys of a layer -> the arguments of rope_by

    table: as rope_table gives it.
    """
    key_0, key_2 = [cached_keys(model, layer, position).to(table.device) for position in (0, 2)]
    # Without RoPE keys stay the same (ALiBi), or become others (learned positions).
    same = (key_2 - key_0).norm() < 0.01 * key_0.norm()
    of_one_length = torch.allclose(key_2.norm(dim=-1), key_0.norm(dim=-1), rtol=0.01)
    n = table.shape[-1] // 2
    if same or n == 0 and not of_one_length:
        return table[..., :0], False
    position = torch.tensor([[0], [2]], device=table.device)

    def error(how):
        """|R_2 k_0 - R_0 k_2| / |k_2 - k_0|: R_0 only scales, if it does, and both sides alike."""
        rope = rope_by(*how)
        difference = rope(key_0, position[1])(key_0) - rope(key_2, position[0])(key_2)
        return difference.norm() / (key_2 - key_0).norm()

    # A table has each angle twice: half a head apart, or in turn.
    ways = [(angles, neighbours) for angles in (table[..., :n], table[..., ::2])
            for neighbours in (False, True)]
    best = min(ways, key=error)
    if error(best) > 0.3:                                              # half precision is coarse
        raise ValueError(f"{type(model).__name__} rotates its keys in a way that is unknown here, "
                         f"and GLIDE reads them: {READS_NONE}")
    return best

def ropes_of(model, config):
    """The RoPE of the self-attention of a GLIDE of this Config, and of its glimpse.

    Raises ValueError where the target does not cache the keys that it reads.
    """
    layer = config.layers_read[-1] if config.glimpse else -1
    table, d = rope_table(model, layer), config.width // config.heads
    angles, neighbours = table.chunk(2, -1)[0], False
    if config.glimpse:
        angles, neighbours = angles_of(model, table, layer)
    glimpse_rope = rope_by(angles, neighbours)
    if 2 * angles.shape[-1] == d:
        return glimpse_rope, glimpse_rope
    # The drafter needs positions where the target has none, or rotates a part of a head.
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=d, num_attention_heads=1))
    position = torch.arange(table.shape[1])[None]
    angles = torch.cat(rotary(position.float(), position))[..., :d // 2]
    return rope_by(angles.to(table.device)), glimpse_rope

# ---------------------------------------------------------------- EDD, the VDM, EAGLE
def parts_of(model, embed, head):
    """What an edd.EDD between these tables is made of, beside any target -> edd.Parts."""
    decoder = model.get_decoder()
    c = decoder.config
    if c.model_type in edd.FAMILIES:
        layer = type(decoder.layers[-1])(c, layer_idx=len(decoder.layers) - 1)
        rotary_class = type(decoder.rotary_emb)
    else:
        c = LlamaConfig(
            hidden_size=c.hidden_size,
            intermediate_size=getattr(c, "intermediate_size", None) or 4 * c.hidden_size,
            num_attention_heads=c.num_attention_heads,
            num_key_value_heads=getattr(c, "num_key_value_heads", None),
            head_dim=getattr(c, "head_dim", None),
            attn_implementation="sdpa")
        layer = LlamaDecoderLayer(c, layer_idx=0)
        rotary_class = LlamaRotaryEmbedding
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=c.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    norm = LlamaRMSNorm(c.hidden_size, c.rms_norm_eps)
    return edd.Parts(embed, head, layer, norm, rotary_class(c))

# ---------------------------------------------------------------- the target's own tables
@torch.no_grad()
def tables_of(model, words=None):
    """The target's own embedding and LM head -> shared.Tables

    words (k,): a list of token ids, to which the head is reduced.  A scale or a soft cap outside of
    the head is left out: the drafter learns it.
    """
    embed, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    dtype = embedded(model, [0]).dtype
    if words is not None:
        words = words.to(device_of(model))
        lm_head = head_of(model, words.cpu()).requires_grad_(False)
        pack(lm_head, beside=model)

    def head(x):
        return lm_head(x.to(dtype)).to(x)

    # The weights of the last norm are what it makes of ones; a LayerNorm has none to start from.
    norm = torch.ones_like(embedded(model, [0])[0])                            # (D,)
    module = getattr(model.get_decoder(), "norm", None)
    if module is not None and getattr(module, "bias", None) is None:
        norm = module(norm).to(norm)
    return shared.Tables(embed, head, norm, words)

# ---------------------------------------------------------------- the kinds of draft models
def new_glide(config, model, words):
    return glide.Glide(config, *ropes_of(model, config))

def new_glide_shared(config, model, words):
    return shared.GlideShared(config, ropes_of(model, config), tables_of(model, words))

def new_edd(config, model, words):
    return edd.EDD(config, parts_of(model, embedding_of(model), head_of(model)))

def new_edd_shared(config, model, words):
    return shared.EDDShared(config, parts_of(model, None, None), tables_of(model, words))

def new_eagle(config, model, words):
    tables = tables_of(model)
    return eagle.Eagle(config, parts_of(model, tables.embed, tables.head))

def new_medusa(config, model, words):
    return medusa.Medusa(config, head_of(model))

# {"kind" in a training.json: (the Config, what makes the draft model, what decodes with it)}
KINDS = {
    "glide": (glide.Config, new_glide, glide.Drafter),
    "vanilla": (glide.Config, new_glide, glide.Drafter),
    "glide-shared": (shared.GlideConfig, new_glide_shared, glide.Drafter),
    "vanilla-shared": (shared.GlideConfig, new_glide_shared, glide.Drafter),
    "edd": (edd.Config, new_edd, edd.Drafter),
    "vdm": (edd.Config, new_edd, edd.Drafter),
    "edd-shared": (shared.EDDConfig, new_edd_shared, edd.Drafter),
    "vdm-shared": (shared.EDDConfig, new_edd_shared, edd.Drafter),
    "eagle": (eagle.Config, new_eagle, eagle.Drafter),
    "medusa": (medusa.Config, new_medusa, medusa.Drafter),
}
# Older names of weights in the checkpoints of drafters between the target's tables
RENAMED = {"projection.weight": "between.projection.weight", "words": "between.words"}

def new(kind, config, model, words=None):
    """A draft model with new weights, on the target's device and in its dtype.

    kind, config: a key of KINDS, and a Config of that kind.  words (k,): the token ids that a
    drafter between the target's tables drafts alone.
    """
    _, make, _ = KINDS[kind]
    like = embedded(model, [0])
    with torch.device(like.device):
        return make(config, model, words).to(like)

def load(folder, model):
    """A checkpoint of train.py -> (drafter for the target `model`, training.json as a dict).

    Warns if it was trained for other weights.
    """
    about = json.loads(Path(folder, "training.json").read_text())
    if about["kind"] not in KINDS:
        raise ValueError(f"{folder} holds no drafter of these kinds: {', '.join(KINDS)}")
    if glide.has_other_weights(model, about["target"]["probe"]):
        warnings.warn("the drafter was trained for a model with other weights", stacklevel=2)
    config_class, _, drafter_class = KINDS[about["kind"]]
    # Checkpoints of other versions have other settings and names, too.
    names = {field.name for field in fields(config_class)}
    config = config_class(**{k: v for k, v in about["config"].items() if k in names})
    weights = load_file(Path(folder, "model.safetensors"))
    weights = {RENAMED.get(name, name): weight for name, weight in weights.items()}
    draft_model = new(about["kind"], config, model, weights.get("between.words"))
    draft_model.load_state_dict(weights)
    draft_model.made_for = about["target"]
    return drafter_class(draft_model, about["validation"].get("temperature", 1.0)), about
