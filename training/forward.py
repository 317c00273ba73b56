"""The frozen target's forward, which all drafters of a run share: what they read, and no more.

    forward = partial(frozen_forward, target, **read_by(models))
    batch = forward(ids, learn=learn, count=count)              # see train.py for the batch
    loss = module.loss(batch | {"block": None, "random": generator})
"""
import contextlib
from functools import partial

import torch
import transformers
from torch.utils.checkpoint import checkpoint

from training.evaluate import drafter_of

LOGITS = 2 ** 25                           # numbers: so many logits of a drafter are held at a time


# ---------------------------------------------------------------- what drafters read
def read_by(models):
    """What the drafters {name: module} read of the target's forward, as frozen_forward takes it."""
    hidden, kv, logits = set(), set(), False
    for module in models.values():
        needs = drafter_of(module).needs
        hidden.update(needs.get("hidden", ()))
        kv.update(needs.get("kv", ()))
        loss = getattr(module.config, "loss", "ce")
        logits = logits or loss != "ce"
    return {"hidden": hidden, "kv": kv, "logits": logits}


def layers_of(model):
    """The decoder's layers: its list of modules that is as long as the configuration says."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} layers")


class SomeLayersCache(transformers.DynamicCache):
    """A cache that keeps the keys and values of the layers that somebody reads; None: of all."""

    def __init__(self, layers):
        super().__init__()
        self.wanted = layers
        self.kv = {}

    def update(self, k, v, layer_idx, *args, **kwargs):
        if self.wanted is None or layer_idx in self.wanted:
            self.kv[layer_idx] = k, v
        return k, v


@contextlib.contextmanager
def hidden_states_of(model, wanted):
    """While this is open, forwards put hidden_states[k], k in `wanted`, into the dict it yields.

    As Hugging Face counts: k is what layer k reads, and the last one, which is normed, what the
    decoder returns.  output_hidden_states=True would hold all of them.
    """
    layers = layers_of(model)
    found, hooks = {}, []

    def keep_input(k, module, args, kwargs):
        found[k] = args[0] if args else kwargs["hidden_states"]

    def keep_output(k, module, args, out):
        found[k] = out[0]

    for k in wanted:
        if k < len(layers):
            hook = partial(keep_input, k)
            hooks.append(layers[k].register_forward_pre_hook(hook, with_kwargs=True))
        else:
            hooks.append(model.get_decoder().register_forward_hook(partial(keep_output, k)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


# ---------------------------------------------------------------- the batch
def in_chunks(size, loss, learn, x, *others):
    """Sum of loss(x, *others) over the loss mask's positions of x (B, T, D), others (B, T, ...).

    learn (B, T) bool: the loss mask.  Where it chooses more than `size` positions, a chunk's logits
    are forgotten, and computed again for the gradient.
    """
    chosen = learn.flatten().nonzero()[:, 0]                           # (n,)
    x = x.flatten(0, 1)[chosen]                                        # (n, D)

    def of_chunk(x, chunk):
        labels = [other.flatten(0, 1)[chunk] for other in others]
        return loss(x, *labels)

    if len(chosen) <= size:
        return of_chunk(x, chosen)
    total = 0
    # Chunk by chunk: the (n, V) logits are never all in memory.
    for x_chunk, chunk in zip(x.split(size), chosen.split(size)):
        part = checkpoint(of_chunk, x_chunk, chunk, use_reentrant=False,
                          preserve_rng_state=False)
        total = total + part
    return total


def frozen_forward(model, ids, hidden=(), kv=None, logits=True, learn=None, count=None, head=None):
    """One forward of the frozen target over ids (B, T) -> batch, as the top of train.py has it.

    hidden, kv: hidden states and layers whose keys and values are read (kv None: of every layer).
    logits: whether they are read.  learn: the loss mask (B, T), None: all positions but the last.
    count: what a sum of losses is divided by, None: the positions of this batch in the loss mask.
    head: gives the logits, by the last of the hidden states; None: the target's own.
    """
    last = len(layers_of(model)) if head else None
    hidden = {*hidden, last} if head and logits else hidden
    cache = SomeLayersCache(kv)
    capture = hidden_states_of(model, hidden) if hidden else contextlib.nullcontext({})
    precise = contextlib.nullcontext()
    if logits:
        # In the target's own precision: autocast would round logits to ties, which drafters learn.
        precise = torch.autocast(ids.device.type, enabled=False)
    with torch.no_grad(), precise, capture as states:
        found = model(input_ids=ids, past_key_values=cache, use_cache=True,
                      logits_to_keep=0 if logits and not head else 1).logits
        if head and logits:
            found = head(states[last])
    chunk = max(1, LOGITS // found.shape[-1])
    return batch_of(ids, learn, count, cache.kv, states, found if logits else None, chunk)


def batch_of(ids, learn, count, kv, hidden, logits, chunk):
    """The batch of train.py's docstring.  learn, count: as for frozen_forward; chunk: labels."""
    if learn is None:
        learn = torch.ones_like(ids, dtype=torch.bool)
        learn[:, -1] = False
    if count is None:
        count = learn.sum().clamp(min=1)
    return {
        "ids": ids,
        "learn": learn,
        "count": count,
        "sum": partial(in_chunks, chunk),
        "kv": kv,
        "hidden": hidden,
        "logits": logits,
    }
