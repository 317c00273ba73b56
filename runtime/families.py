"""Draft models for targets of any family: what they need of the target, and how they are loaded.

    drafter, about = load("my-drafters/glide", model)             # about: its training.json
    draft_model = new("edd", edd.Config.for_target(model), model)        # a new one, to be trained
    drafter = edd.Drafter(draft_model)

glide.py and edd.py alone serve targets that are built as Llama is.  The functions here give the
same draft models what they need of any other target:

 1. ropes_of gives GLIDE's queries the RoPE of the keys that they meet: rotated by halves (Llama) or
    by pairs (Cohere, GLM), wholly or in part (Phi), or not at all (GPT-2, OPT).
 2. parts_of gives EDD, the VDM and EAGLE a layer of the target's class beside a llama, mistral or
    qwen2, as in the papers, and one of Llama's class with the target's sizes beside all others.
 3. Embedding and LM head are copied by what they compute, so they may be quantised or offloaded.
    Scales and soft caps that the target applies outside of them are not copied: the copies are
    trained.
 4. tables_of gives the target's own tables, for beyond/shared.py and EAGLE.  Their logits are
    capped as the target's.
"""
from dataclasses import fields
from inspect import signature

import torch
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
@torch.no_grad()
def cached_keys(model, position):
    """What the target caches for one token at a position -> [keys of a layer], (1, H, 1, d_k) each

    Layers that share keys appear once.  Some targets know no positions (ALiBi).
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
    at = {"position_ids": token + position}
    if "position_ids" not in signature(model.forward).parameters:
        at = {}
    cache = DynamicCache()
    model(input_ids=token, past_key_values=cache, use_cache=True, **at)
    cached = [(getattr(layer, "keys", None), getattr(layer, "values", None))
              for layer in cache.layers]
    if not cached or any(k is None or k.shape != v.shape for k, v in cached):
        raise ValueError(f"{type(model).__name__} does not cache keys and values of one size in "
                         f"each of its layers, and GLIDE reads them: {READS_NONE}")
    return [k for k, _ in cached]

class AnyRope(glide.Rope):
    """RoPE of the first 2 n entries of a head: of halves, as Llama's, or of neighbours."""

    def __init__(self, angles, neighbours):
        """angles: cos and sin (2, length, n).  neighbours: entries 2 i and 2 i + 1 are a pair."""
        super().__init__(angles.repeat_interleave(2, -1) if neighbours
                         else torch.cat((angles, angles), -1))
        self.neighbours = neighbours

    def at(self, position):
        """As glide.Rope.at."""
        cos, sin = self.table.index_select(1, position)        # (T, 2 n) each

        def rotate(x):
            turned, rest = x.tensor_split([cos.shape[-1]], -1)
            if self.neighbours:
                a, b = turned[..., ::2], turned[..., 1::2]
                partner = torch.stack((-b, a), -1).flatten(-2)
            else:
                partner = rotate_half(turned)
            turned = turned * cos + partner * sin
            return torch.cat((turned, rest), -1) if rest.numel() else turned
        return rotate

def rope_table(model, length, layer):
    """The cos and sin that the target's own module gives one of its layers -> (2, length, r).

    How they belong to the entries of a head differs from family to family.  r is 0 in a target
    without such a module.
    """
    c, device = model.config.get_text_config(), device_of(model)
    rotary = None
    for module in (model.get_decoder(), model.base_model):             # older GPT-NeoX: the second
        rotary = rotary or getattr(module, "rotary_emb", None)
    # Gemma 3 had a module for each kind of layer before transformers 5.
    if hasattr(model.get_decoder(), "rotary_emb_local"):
        if c.layer_types[layer] == "sliding_attention":
            rotary = model.get_decoder().rotary_emb_local
    if rotary is None:
        return torch.zeros(2, length, 0, device=device)
    # Beyond the context, which no sequence reaches, longrope and dynamic NTK have other tables.
    position = torch.arange(length, device=device).clamp(max=context_of(c) - 1)[None]
    like = torch.zeros(1, 1, 1, device=device)                         # supplies only the dtype
    kind = {}
    if "layer_type" in signature(rotary.forward).parameters:
        kind["layer_type"] = c.layer_types[layer]
    table = rotary(like, position, **kind)
    if not isinstance(table, tuple):                                   # complex numbers (Llama 4)
        return torch.zeros(2, length, 0, device=device)
    table = torch.cat(table).detach()
    if table.shape[-1] == len(getattr(rotary, "inv_freq", ())):        # GPT-OSS has each angle once
        table = table.repeat(1, 1, 2)
    return table

def rope_of(model, table, key_0, key_2):
    """How the target turns its keys -> AnyRope

    table: as rope_table gives it.  key_0, key_2 (1, H, 1, d_k): the keys of one token at positions
    0 and 2, as cached.  Raises ValueError where they turn otherwise.
    """
    key_0, key_2 = key_0.to(table.device).float(), key_2.to(table.device).float()
    # Without RoPE keys stay the same (ALiBi), or become others (learned positions).
    same = (key_2 - key_0).norm() < 0.01 * key_0.norm()
    of_one_length = torch.allclose(key_2.norm(dim=-1), key_0.norm(dim=-1), rtol=0.01)
    n = table.shape[-1] // 2
    if same or n == 0 and not of_one_length:
        return AnyRope(table[..., :0], False)
    # A table has each angle twice: half a head apart, or in turn.
    tried = [AnyRope(angles, neighbours) for angles in (table[..., :n], table[..., ::2])
             for neighbours in (False, True)]
    errors = [glide.rope_error(rope, key_0, key_2) for rope in tried]
    if min(errors) > 0.3:                                              # half precision is coarse
        raise ValueError(f"{type(model).__name__} rotates its keys in a way that is unknown here, "
                         f"and GLIDE reads them: {READS_NONE}")
    return tried[errors.index(min(errors))]

def ropes_of(model, config, length):
    """The RoPE of self-attention and of the glimpse for `length` positions -> two glide.Rope

    Raises ValueError where the target does not cache the keys that a GLIDE of this Config reads.
    """
    layer = config.layers_read[-1] if config.glimpse else -1
    table = rope_table(model, length, layer)
    rope = AnyRope(table[..., :table.shape[-1] // 2], False)
    glimpse_rope = None
    if config.glimpse:
        keys = [cached_keys(model, position) for position in (0, 2)]
        if layer >= len(keys[0]) or config.target_head_size != keys[0][layer].shape[-1]:
            raise ValueError(f"layer {layer} of the target caches no keys of size "
                             f"{config.target_head_size}: take an earlier layer, or train a "
                             "drafter for this target")
        rope = glimpse_rope = rope_of(model, table, keys[0][layer], keys[1][layer])
    d = config.width // config.heads
    if rope.table.shape[-1] != d:
        # The drafter needs positions where the target has none, or turns a part of a head.
        rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=d, num_attention_heads=1))
        position = torch.arange(length)[None]
        angles = torch.cat(rotary(position.float(), position))[..., :d // 2].to(table)
        rope = AnyRope(angles, False)
    return rope, glimpse_rope or rope

# ---------------------------------------------------------------- EDD, the VDM, EAGLE
def parts_of(model, embed, head):
    """What an edd.EDD between these tables is made of, beside any target -> edd.Parts."""
    decoder = model.get_decoder()
    c = decoder.config
    if c.model_type in edd.FAMILIES:
        layer = type(decoder.layers[-1])(c, layer_idx=len(decoder.layers) - 1)
        rotary_class = type(decoder.rotary_emb)
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
        rotary_class = LlamaRotaryEmbedding
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=c.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    with torch.device(device_of(model)):                       # it has no weights to load
        rotary = rotary_class(c)
    return edd.Parts(embed, head, layer, LlamaRMSNorm(c.hidden_size, c.rms_norm_eps), rotary)

# ---------------------------------------------------------------- the target's own tables
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
    # The weights of the last norm are what it makes of ones; a LayerNorm has none to start from.
    norm = torch.ones_like(embedded(model, [0])[0])                            # (D,)
    module = getattr(model.get_decoder(), "norm", None)
    if module is not None and getattr(module, "bias", None) is None:
        norm = module(norm).to(norm)
    return shared.Tables(embed, head, norm, words)

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

def new(kind, config, model, length=None, words=None, empty=False):
    """A draft model with new weights, on the target's device and in its dtype.

    kind, config: a key of KINDS, and a Config of that kind.  length: the positions that a GLIDE
    serves; None: those of the target's context and of a tree after it.  words (k,): the token ids
    that a drafter between the target's tables drafts alone.  empty: without weights, for
    load_state_dict(..., assign=True).
    """
    _, draft_class, _ = KINDS[kind]
    c, like = model.config.get_text_config(), embedded(model, [0])
    if config.vocab != c.vocab_size:
        raise ValueError("the drafter was made for another vocabulary: train one for this target")
    if draft_class in (eagle.Eagle, shared.EDDShared, shared.GlideShared):
        tables = tables_of(model, words)
        embed, head = tables.embed, tables.head
    elif empty:
        bias = model.get_output_embeddings().bias is not None
        embed = nn.Embedding(config.vocab, config.width, device="meta")
        head = nn.Linear(config.width, config.vocab, bias, device="meta")
    elif draft_class is not glide.Glide:
        embed, head = embedding_of(model), head_of(model)
    is_glide = issubclass(draft_class, glide.Glide)
    if is_glide:
        parts = ropes_of(model, config, length or context_of(c) + glide.TREE_POSITIONS)
    with torch.device("meta" if empty else like.device):
        if draft_class is medusa.Medusa:
            parts = head
        elif not is_glide:
            parts = parts_of(model, embed, head)
        if draft_class in (shared.GlideShared, shared.EDDShared):
            draft_model = draft_class(config, parts, tables)
        else:
            draft_model = draft_class(config, parts)
    return draft_model if empty else draft_model.to(like)

def load(folder, model):
    """A checkpoint of train.py -> (drafter for the target `model`, training.json as a dict).

    Raises ValueError where the checkpoint does not fit the target, and warns where it was trained
    for other weights.
    """
    weights, about = glide.read(folder, model, KINDS)
    weights = {RENAMED.get(name, name): weight for name, weight in weights.items()}
    config_class, _, drafter_class = KINDS[about["kind"]]
    # Checkpoints of other versions have other settings, too.
    names = {field.name for field in fields(config_class)}
    config = config_class(**{k: v for k, v in about["config"].items() if k in names})
    draft_model = new(about["kind"], config, model, words=weights.get("between.words"), empty=True)
    draft_model.load_state_dict(weights, assign=True)
    draft_model.made_for = about["target"]
    temperature = about["validation"].get("temperature", 1.0)
    return drafter_class(draft_model.to(embedded(model, [0])), temperature), about
