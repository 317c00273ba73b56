"""Draft models for targets of any family: what they need of the target, and how they are loaded.

    drafter, about = load("my-drafters/glide", model)             # about: its training.json
    draft_model = new(edd.Config.for_target(model), model)        # a new one, to be trained

glide.py and edd.py alone serve some families.  Here the same draft models get what they need of any
other target: RoPE as its keys have it, by halves (Llama) or by pairs (Cohere, GLM), wholly, in part
(Phi) or not at all (GPT-2); for EDD, the VDM and EAGLE a layer of Llama's class with its sizes;
copies of its embedding and LM head by what they compute, as they may be quantised or offloaded.
"""
import copy
import json
import warnings
from inspect import signature
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaModel
from transformers.models.cohere.modeling_cohere import rotate_half as rotate_pairs
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

import edd
import glide
from beyond import eagle, medusa, shared
from runtime.linear import PackedLinear, pack
from runtime.program import UserError
from runtime.targets import context_of, device_of

READS_NONE = "take a drafter that does not (edd, vanilla)"
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "head_dim")             # of a layer of Llama's class

# ---------------------------------------------------------------- embedding and head
@torch.no_grad()
def embedded(model, ids):
    """The target's embedding of ids (list) -> (len(ids), D), in the dtype of hidden states"""
    return model.get_input_embeddings()(torch.tensor(ids, device=device_of(model)))

def embedding_of(model):
    """A trainable copy of the target's embedding."""
    vocab = model.config.get_text_config().vocab_size
    return nn.Embedding.from_pretrained(embedded(model, range(vocab)), freeze=False)

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
def rope_by(angles, partner=rotate_half):
    """RoPE of the first 2 n entries of a head -> a function as glide.rope_of gives it

    angles: cos and sin (2, length, n).  partner: rotate_half where entries i and n + i are a pair,
    rotate_pairs where 2 i and 2 i + 1 are.
    """
    by_pairs = partner is rotate_pairs
    table = angles.repeat_interleave(2, -1) if by_pairs else torch.cat((angles, angles), -1)

    def rope(x, position):
        cos, sin = table.index_select(1, position).to(x.dtype)         # (T, 2 n) each

        def rotate(q):
            rotated, rest = q.tensor_split([table.shape[-1]], -1)
            rotated = rotated * cos + partner(rotated) * sin
            return torch.cat((rotated, rest), -1) if rest.numel() else rotated
        return rotate
    return rope

def rope_angles(model, layer):
    """The angles of the target's RoPE in one of its layers, by position: cos and sin (2, length, n)

    n is 0 in a target without one.  The length is the context's, and 1024 for the nodes of a tree.
    """
    c, device = model.config.get_text_config(), device_of(model)
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    kind = f"{c.layer_types[layer]}_" if hasattr(rotary, "layer_types") else ""
    # longrope and dynamic NTK have others for longer texts than the context, which nobody decodes.
    inv_freq = getattr(rotary, f"{kind}original_inv_freq", torch.zeros(0))
    scaling = getattr(rotary, f"{kind}attention_scaling", 1.0)
    position = torch.arange(context_of(c) + 1024, device=device)
    angles = position[:, None] * inv_freq.float().to(device)                   # (length, n)
    return torch.stack((angles.cos(), angles.sin())) * scaling

@torch.no_grad()
def cached_keys(model, layer, position):
    """What a layer of the target caches of one token at each position (k, 1) -> (k, H, 1, d_k)"""
    takes_positions = "position_ids" in signature(model.forward).parameters
    at = {"position_ids": position} if takes_positions else {}         # ALiBi needs none
    cache = DynamicCache()
    model(input_ids=torch.zeros_like(position), past_key_values=cache, use_cache=True, **at)
    # Layers that share keys appear once.
    cached = cache.layers[layer] if layer < len(cache.layers) else None
    k, v = getattr(cached, "keys", None), getattr(cached, "values", None)
    if k is None or k.shape != v.shape:
        raise ValueError(f"layer {layer} of {type(model).__name__} does not cache keys and values "
                         f"of one size, and GLIDE reads them: {READS_NONE}")
    return k.float()

def rotation_of(model, angles, layer):
    """How the target rotates the keys of a layer -> the arguments of rope_by"""
    position = torch.tensor([[0], [2]], device=angles.device)
    key_0, key_2 = cached_keys(model, layer, position).to(angles.device)
    # Without RoPE keys stay the same (ALiBi), or become others (learned positions).
    same = (key_2 - key_0).norm() < 0.01 * key_0.norm()
    of_one_length = torch.allclose(key_2.norm(dim=-1), key_0.norm(dim=-1), rtol=0.01)
    if same or not angles.numel() and not of_one_length:
        return angles[..., :0], rotate_half

    def error(partner):
        """|R_2 k_0 - R_0 k_2| / |k_2 - k_0|: R_0 only scales, if it does, and both sides alike."""
        rope = rope_by(angles, partner)
        difference = rope(key_0, position[1])(key_0) - rope(key_2, position[0])(key_2)
        return difference.norm() / (key_2 - key_0).norm()

    best = min(rotate_half, rotate_pairs, key=error)
    if error(best) > 0.3:                                              # half precision is coarse
        raise ValueError(f"{type(model).__name__} rotates its keys in a way that is unknown here, "
                         f"and GLIDE reads them: {READS_NONE}")
    return angles, best

def ropes_of(model, config):
    """The RoPE of the self-attention of a GLIDE of this Config, and of its glimpse.

    Raises ValueError where the target does not cache the keys that it reads.
    """
    layer = config.layers_read[-1] if config.glimpse else -1
    angles, partner = rope_angles(model, layer), rotate_half
    if config.glimpse:
        angles, partner = rotation_of(model, angles, layer)
    glimpse_rope = rope_by(angles, partner)
    d = config.width // config.heads
    if 2 * angles.shape[-1] == d:
        return glimpse_rope, glimpse_rope
    # The drafter needs positions where the target has none, or rotates a part of a head.
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=d, num_attention_heads=1))
    position = torch.arange(angles.shape[1])[None]
    own = torch.cat(rotary(position.float(), position))[..., :d // 2]
    return rope_by(own.to(angles.device)), glimpse_rope

# ---------------------------------------------------------------- EDD, the VDM, EAGLE
def parts_of(model, embed=None, head=None):
    """What an edd.EDD between these tables is made of, beside any target -> edd.Parts."""
    decoder = model.get_decoder()
    decoder_class, config = type(decoder), copy.deepcopy(decoder.config)
    if config.model_type not in edd.FAMILIES:
        sizes = {name: getattr(config, name, None) for name in SIZES}
        sizes["intermediate_size"] = sizes["intermediate_size"] or 4 * config.hidden_size
        decoder_class, config = LlamaModel, LlamaConfig(**sizes, attn_implementation="sdpa")
    config.update({"num_hidden_layers": 1, "vocab_size": 1, "pad_token_id": None})
    one = decoder_class(config)                      # a new decoder of one layer
    return edd.Parts(embed, head, one.layers[0], one.norm, one.rotary_emb)

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
# {"kind" in a training.json: (the Config, what decodes with its draft model)}
KINDS = {
    "glide": (glide.Config, glide.Drafter),
    "vanilla": (glide.Config, glide.Drafter),
    "glide-shared": (shared.GlideConfig, glide.Drafter),
    "vanilla-shared": (shared.GlideConfig, glide.Drafter),
    "edd": (edd.Config, edd.Drafter),
    "vdm": (edd.Config, edd.Drafter),
    "edd-shared": (shared.EDDConfig, edd.Drafter),
    "vdm-shared": (shared.EDDConfig, edd.Drafter),
    "eagle": (eagle.Config, eagle.Drafter),
    "medusa": (medusa.Config, medusa.Drafter),
}
# Older names of weights, in the checkpoints for SmolLM2
RENAMED = {"projection.weight": "between.projection.weight", "words": "between.words"}

def new(config, model, words=None):
    """A draft model with new weights, on the target's device and in its dtype.

    config: the Config of a kind.  words (k,): the token ids that a drafter between the target's
    tables drafts alone.
    """
    like = embedded(model, [0])
    with torch.device(like.device):
        match config:                    # the first of these classes of which it is an instance
            case shared.GlideConfig():
                between = shared.Between(config, tables_of(model, words))
                made = glide.Glide(config, *ropes_of(model, config), between.embed, between.head,
                                   shared.Layer)
                between.join(made)
            case glide.Config():
                made = glide.Glide(config, *ropes_of(model, config))
            case shared.EDDConfig():
                between = shared.Between(config, tables_of(model, words))
                made = edd.EDD(config, parts_of(model, between.embed, between.head))
                between.join(made)
            case eagle.Config():
                tables = tables_of(model)
                made = eagle.Eagle(config, parts_of(model, tables.embed, tables.head))
            case edd.Config():
                made = edd.EDD(config, parts_of(model, embedding_of(model), head_of(model)))
            case medusa.Config():
                made = medusa.Medusa(config, head_of(model))
    return made.to(like)

def about_drafter(folder):
    """The training.json of a drafter -> it as a dict, and the Config that it holds."""
    path = Path(folder, "training.json")
    try:
        about = json.loads(path.read_text())
        config_class, _ = KINDS[about["kind"]]
        _ = about["target"]["probe"], about["validation"]      # which are read, too
        return about, config_class(**about["config"])
    except (KeyError, TypeError, ValueError) as why:
        raise UserError(f"{path} holds no drafter ({why!r}): its kind may be "
                        f"{', '.join(KINDS)}") from why

def load(folder, model):
    """A checkpoint of train.py -> (drafter for the target `model`, training.json as a dict).

    Warns if it was trained for other weights.
    """
    about, config = about_drafter(folder)
    if glide.has_other_weights(model, about["target"]["probe"]):
        warnings.warn("the drafter was trained for a model with other weights", stacklevel=2)
    weights = load_file(Path(folder, "model.safetensors"))
    weights = {RENAMED.get(name, name): weight for name, weight in weights.items()}
    draft_model = new(config, model, weights.get("between.words"))
    draft_model.load_state_dict(weights)
    draft_model.made_for = about["target"]
    _, drafter_class = KINDS[about["kind"]]
    return drafter_class(draft_model, about["validation"].get("temperature", 1.0)), about
