"""Attention of grouped queries without copies of keys and values, for the target's forwards.

Nearly every model of today lets g queries share one key.  Where a mask is given, as verification
gives one, transformers' sdpa attention first repeats all keys and values g times, in every layer.
So a verification costs the more, the longer the text is.  Here the g queries that share a key stand
one after the other, as queries of one head:

    query   (B, H, n, d)   ->   (B, H / g, g n, d)
    mask    (B, 1, n, t)   ->   (B, 1, g n, t), repeated g times

The keys and values (B, H / g, t, d) are read where they lie, in the cache.  The pass over a prompt
needs no mask: there sdpa reads grouped queries itself, and nothing is replaced.

    with changed(model.config, _attn_implementation=NAME):     # AnyTarget does so, around its own
        model(...)                                             # forwards alone

The proof in runtime/targets.py tries whether a model gives its own logits by it.
"""
from contextlib import contextmanager

import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "folded"                  # of this attention, where a configuration names one
# What a layer may pass on that changes scores or softmax: then sdpa's own function decides
SPECIAL = ("softcap", "s_aux", "position_bias", "cache")

def folded_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None,
                     **settings):
    """As transformers' sdpa_attention_forward -> (output (B, n, H, d), None)."""
    B, H, n, d = query.shape
    heads, t = key.shape[1:3]
    g = H // heads
    is_special = any(settings.get(name) is not None for name in SPECIAL)
    is_prompt = attention_mask is None and n > 1
    # For many queries the repeated mask would be larger than the repeated keys.
    if g == 1 or is_special or is_prompt or n > heads * d:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout,
                                      scaling=scaling, **settings)
    mask = attention_mask
    if mask is not None:
        mask = mask[..., :t]
        # A mask of each head's own (B, H, n, t) is folded as the queries are.
        has_heads = mask.shape[1] > 1
        mask = mask.reshape(-1, heads, g * n, t) if has_heads else mask.repeat(1, 1, g, 1)
    folded = query.reshape(B, heads, g * n, d)                 # head h reads key h // g
    out = F.scaled_dot_product_attention(folded, key, value, mask, dropout, scale=scaling)
    out = out.reshape(B, H, n, -1)
    return out.transpose(1, 2).contiguous(), None

AttentionInterface.register(NAME, folded_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)               # masks are made as for sdpa

def can_fold(config):
    """Whether a model has sdpa attention and grouped queries, by its text's configuration."""
    queries = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None)
    return config._attn_implementation == "sdpa" and bool(queries and keys) and keys < queries

@contextmanager
def changed(x, **settings):
    """Within it those attributes of x that are set have other values; afterwards their own.

    So a configuration is changed for the target's forwards, and not for what a user does.
    """
    own = {name: getattr(x, name, None) for name in settings}
    own = {name: value for name, value in own.items() if value}
    try:
        for name in own:
            setattr(x, name, settings[name])
        yield
    finally:
        for name, value in own.items():
            setattr(x, name, value)
