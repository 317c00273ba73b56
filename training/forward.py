"""What draft models read of the frozen target: hidden states and KV entries of one forward.

    reads = reads_of(models, target)               # which layers' entries, which hidden states
    cache = SomeLayersCache(reads.kv)
    out = target(input_ids=ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
    cache.kv                                       # {layer: (K, V)}
    out.hidden_states                              # those of reads.hidden are among them
"""
from collections import namedtuple

import transformers

from training.drafters import drafter_of

# kv, hidden    sets: layers whose KV entries, and indices of hidden states that are read
# logits        whether somebody learns the target's logits
# head          None: these are the output of the target's forward.  With --words a function, which
#               gives those of the words alone from the last hidden state
Reads = namedtuple("Reads", "kv hidden logits head")

def reads_of(models, target):
    """What draft models {name: module} read of the target, all together -> Reads."""
    kv, hidden, logits, head = set(), set(), False, None
    for module in models.values():
        needs = drafter_of(module).needs
        kv.update(needs.get("kv", ()))
        hidden.update(needs.get("hidden", ()))
        logits = logits or module.config.loss != "ce"
        if getattr(module, "words", None) is not None:
            head = module.word_logits
    if head is not None:
        hidden.add(target.config.get_text_config().num_hidden_layers)
    return Reads(kv, hidden, logits, head)

# ---------------------------------------------------------------- one forward
class SomeLayersCache(transformers.DynamicCache):
    """A cache that keeps the keys and values of some layers: kv {layer: (K, V)}."""

    def __init__(self, layers):
        super().__init__()
        self.wanted = layers
        self.kv = {}

    def update(self, k, v, layer_idx, *args, **kwargs):
        if layer_idx in self.wanted:
            self.kv[layer_idx] = k, v
        return k, v
