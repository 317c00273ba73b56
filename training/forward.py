"""What draft models read of the frozen target: hidden states and KV entries of one forward.

    reads = reads_of(models, target)               # which layers' entries, which hidden states
    with captured(target, reads) as found:
        target(input_ids=ids, past_key_values=found.cache, use_cache=True)
    found.cache.kv, found.hidden                   # {layer: (K, V)}, {index: (B, T, D)}
"""
import contextlib
from collections import namedtuple
from functools import partial

import torch
import transformers

from training.drafters import drafter_of
from verify import UserError

Captured = namedtuple("Captured", "cache hidden")
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

def layers_of(model):
    """The decoder's layers: its list of modules that is as long as the configuration says."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"{type(model).__name__} has no list of {count} layers: its hidden states "
                    "cannot be read")

@contextlib.contextmanager
def captured(model, reads):
    """While this is open, a forward of the model fills the Captured that it yields.

    The index of a hidden state is Hugging Face's: k is the input of layer k, and the last index is
    the output of the decoder, after its norm.  (output_hidden_states=True would keep all layers'.)
    """
    found = Captured(SomeLayersCache(reads.kv), {})
    hooks = []

    def keep_input(index, module, args, kwargs):
        found.hidden[index] = args[0] if args else kwargs["hidden_states"]

    def keep_output(index, module, args, output):
        found.hidden[index] = output[0]

    layers = layers_of(model) if reads.hidden else []
    for index in reads.hidden:
        if index < len(layers):
            hook = partial(keep_input, index)
            hooks.append(layers[index].register_forward_pre_hook(hook, with_kwargs=True))
        else:
            hook = partial(keep_output, index)
            hooks.append(model.get_decoder().register_forward_hook(hook))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
