"""What draft models read of the frozen target: hidden states and KV entries of one forward.

    reads = reads_of(models, target)               # which layers' entries, which hidden states
    with captured(target, reads) as found:
        target(input_ids=ids, past_key_values=found.cache, use_cache=True)
    found.cache.kv, found.hidden                   # {layer: (K, V)}, {index: (B, T, D)}

KeptForward computes this once for each piece of text, and keeps it on the disk for later epochs.
"""
import contextlib
import shutil
from collections import namedtuple
from functools import partial
from pathlib import Path

import torch
import transformers

from training.drafters import drafter_of
from verify import UserError

Captured = namedtuple("Captured", "cache hidden")
# kv, hidden    sets: layers whose KV entries, and indices of hidden states that are read
# logits        whether somebody learns the target's logits
# head          None: these are the output of the target's forward.  Else a function, which gives
#               them from the last hidden state: with --words of the words alone
Reads = namedtuple("Reads", "kv hidden logits head")

def reads_of(models, target, features=None):
    """What draft models {name: module} read of the target, all together -> Reads.

    features: whether the forward is kept; of logits, which are large, only what gives them is.
    """
    kv, hidden, logits, head = set(), set(), False, None
    for module in models.values():
        needs = drafter_of(module).needs
        kv.update(needs.get("kv", ()))
        hidden.update(needs.get("hidden", ()))
        logits = logits or module.config.loss != "ce"
        if getattr(module, "words", None) is not None:
            head = module.word_logits
    if features and logits and head is None:
        head = target.get_output_embeddings()
        check_head(target, head)
    if head is not None:
        hidden.add(target.config.get_text_config().num_hidden_layers)
    return Reads(kv, hidden, logits, head)

@torch.no_grad()
def check_head(target, head):
    """Refuse a target that scales or caps what its head gives."""
    ids = torch.arange(4, device=target.device)[None]
    last = Reads((), [target.config.get_text_config().num_hidden_layers], True, None)
    with captured(target, last) as found:
        logits = target(input_ids=ids).logits
    if not torch.allclose(head(*found.hidden.values()), logits, rtol=0.01, atol=0.01):
        raise UserError("--features: the target's logits are not those of its head: leave it out")

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

# ---------------------------------------------------------------- once for each piece
class KeptForward:
    """The target's forward over pieces of a text, each of which is computed once (--features).

    The target is frozen, so of the same piece it computes the same in each epoch.  What drafters
    read of it is little, some KB a token, and lies in two files that are mapped into memory: `rows`
    has all numbers of a token side by side, in bfloat16, and `known` has a 1 at the first token of
    each piece that has been computed.  Processes of one machine share the files.

    forward(ids) -> kv {layer: (K, V)}, hidden {index: (B, T, D)}, None.  reads: what these are;
    they have a folder of their own in `folder`.  tokens: the length of the text.
    """

    def __init__(self, forward, folder, tokens, reads):
        self.forward, self.tokens = forward, tokens
        layers = "-".join(map(str, [*sorted(reads.kv), "h", *sorted(reads.hidden)]))
        self.folder = Path(folder) / layers
        self.folder.mkdir(parents=True, exist_ok=True)
        self.known = self.file("known", 1, torch.uint8)
        # One token tells how wide a row is, and where in it each tensor stands.
        self.names, parts = self.parts(forward(torch.zeros(1, 1, dtype=torch.long)))
        self.shapes = [part.shape[2:] for part in parts]
        self.widths = [shape.numel() for shape in self.shapes]
        self.rows = self.file("rows", sum(self.widths), torch.bfloat16)

    def file(self, name, width, dtype):
        """A file as a tensor (tokens, width).  A new one is full of zeros."""
        path = self.folder / f"{name}.bin"
        size = self.tokens * width * dtype.itemsize
        if not path.exists() and size > shutil.disk_usage(self.folder).free:
            raise UserError(f"--features: {path} needs {size / 2 ** 30:.1f} GiB, and the disk has "
                            "less: leave it out")
        flat = torch.from_file(str(path), shared=True, size=self.tokens * width, dtype=dtype)
        return flat.view(self.tokens, width)

    def parts(self, computed):
        """What forward gives -> the names of all tensors, and these as (B, T, ...)"""
        kv, hidden, _ = computed
        found = {}
        for layer in sorted(kv):
            k, v = kv[layer]
            found["key", layer] = k.transpose(1, 2)                    # (B, T, H, d)
            found["value", layer] = v.transpose(1, 2)
        for index in sorted(hidden):
            found["hidden", index] = hidden[index]                     # (B, T, D)
        return list(found), list(found.values())

    def __call__(self, ids, pieces):
        """ids (B, T) of pieces (B, 3) -> kv, hidden, None, as forward gives them."""
        is_new = self.known[pieces[:, 0], 0] == 0                      # (B,)
        if is_new.any():
            _, parts = self.parts(self.forward(ids[is_new.to(ids.device)]))
            new = torch.cat([part.flatten(2) for part in parts], -1).to("cpu", torch.bfloat16)
            for row, (start, size, _) in zip(new, pieces[is_new.numpy()]):
                self.rows[start:start + size] = row[:size]
                self.known[start] = 1
        rows = torch.zeros(*ids.shape, self.rows.shape[1], dtype=torch.bfloat16)
        for row, (start, size, _) in zip(rows, pieces):
            row[:size] = self.rows[start:start + size]
        kv, hidden = {}, {}
        parts = rows.to(ids.device).split(self.widths, -1)
        for (what, number), shape, part in zip(self.names, self.shapes, parts):
            part = part.unflatten(-1, shape)
            if what == "hidden":
                hidden[number] = part
            else:
                kv[number] = (*kv.get(number, ()), part.transpose(1, 2))
        return kv, hidden, None
