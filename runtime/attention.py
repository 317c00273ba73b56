"""Attention of grouped queries without copies of keys and values, for the target's forwards.

Nearly every model of today lets g queries share one key.  Where a mask is given, as verification
gives one, transformers' sdpa attention first repeats all keys and values g times, in every layer.
So a verification costs the more, the longer the text is.  Here the g queries that share a key stand
one after the other, as queries of one head:

    query   (B, H, n, d)   ->   (B, H / g, g n, d)
    mask    (B, 1, n, t)   ->   (B, 1, g n, t), repeated g times

The keys and values (B, H / g, t, d) are read where they lie, in the cache.  The pass over a prompt
needs no mask: there sdpa reads grouped queries itself.  AnyTarget changes a model's configuration
around its own forwards alone, and proves that the logits are the model's.
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
    heads = key.shape[1]
    g, mask = H // heads, attention_mask
    is_special = any(settings.get(name) is not None for name in SPECIAL)
    is_prompt = mask is None and n > 1
    is_of_each_head = mask is not None and mask.shape[1] > 1
    # For many queries the repeated mask would be larger than the repeated keys.
    if g == 1 or is_special or is_prompt or is_of_each_head or n > heads * d:
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout,
                                      scaling=scaling, **settings)
    if mask is not None:
        # All layers of a forward are given the same mask: it is folded in the first of them.
        folds = vars(mask).setdefault("folds", {})
        if g not in folds:
            folds[g] = mask.repeat(1, 1, g, 1)
        mask = folds[g]
    folded = query.reshape(B, heads, g * n, d)                 # head h reads key h // g
    out = F.scaled_dot_product_attention(folded, key, value, mask, dropout, scale=scaling)
    out = out.reshape(B, H, n, -1)
    return out.transpose(1, 2).contiguous(), None

AttentionInterface.register(NAME, folded_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)               # masks are made as for sdpa

@contextmanager
def changed(x, **settings):
    """Within it those attributes of x that are set have other values; afterwards their own."""
    own = {name: value for name in settings if (value := getattr(x, name, None))}
    try:
        for name in own:
            setattr(x, name, settings[name])
        yield
    finally:
        for name, value in own.items():
            setattr(x, name, value)
