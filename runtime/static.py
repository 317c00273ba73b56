"""Static shapes and CUDA graphs for the forwards of a target or a drafter.

At batch 1 launching a forward's hundreds of kernels takes longer than running them.  A CUDA graph
records which kernels ran on which addresses and replays all of them by one launch.  So shapes and
addresses must not change: nodes are padded to a power of two (see padded) and keys to a multiple of
256, and inputs are copied into the tensors that the graph was recorded with.

    target = static(verify.Target(model))    # its forwards, those of plain decoding, too
    drafter = static(glide.Drafter(...))     # GLIDE's, EDD's, EAGLE's; MEDUSA has no `run`

An example in half precision.  5 nodes after 100 tokens are padded to 8.  They write slots
100 ... 107 and read 256 keys.  Nodes 5, 6 and 7 are padding: they see the first key alone, and
their results are dropped.  Their slots 105, 106 and 107 are written again by the next forward, and
no mask shows them before.
"""
from functools import partial

import torch
import torch.nn.functional as F

from verify import Target

GRAPHED = 64             # nodes; a larger forward keeps a GPU busy without a graph
KEYS = 256               # the number of keys that a forward reads is a multiple of this

def padded(n, dtype):
    """To how many nodes a forward of n nodes is padded."""
    size = 1 << (n - 1).bit_length()                           # the next power of two
    # A float32 forward of 8 or 16 nodes took 2.5 times as long as one of 32 (docs/cuda.md).
    is_half = dtype in (torch.float16, torch.bfloat16)
    return size if is_half or size <= 4 else max(size, 32)

def bucket(entries):
    """How many keys are read where `entries` are needed: a multiple of KEYS."""
    return -(-entries // KEYS) * KEYS

def lengthened(entries):
    """A view (1, H, t, d) of the target's cache -> the same, up to a multiple of KEYS."""
    _, heads, t, d = entries.shape
    allocated = entries.stride(1) // entries.stride(2)
    keys = min(bucket(t), allocated)
    return entries.as_strided((1, heads, keys, d), entries.stride(), entries.storage_offset())

def static(x):
    """Give a target, or a drafter with a method `run`, static shapes -> x."""
    # A model that verifies chains only counts positions by its cache, and takes no padding.
    if hasattr(x, "run") and getattr(x, "verifies_trees", True):
        x.run = Static(x)
    return x

class Static:
    """Replaces x.run: the same results by static shapes, and on a CUDA device by recordings.

    recorded is {shapes of the inputs: (inputs, replay)}.  A recording is valid as long as the KV
    entries stay at the same addresses.
    """
    def __init__(self, x):
        self.x, self.own = x, x.run
        self.dtype = next(x.model.parameters()).dtype
        self.is_target = isinstance(x, Target)
        self.graphs = x.device.type == "cuda"
        self.recorded, self.addresses, self.pool = {}, None, None

    def __call__(self, end, x, position, slots, mask, *logits_to_keep):
        """As Target.run, and as the drafters' run."""
        n = len(x)
        # A prompt without a mask, a large tree, and the first forward, which allocates KV entries
        if n > GRAPHED or mask is None and n > 1 or not self.kv_entries():
            return self.own(end, x, position, slots, mask, *logits_to_keep)
        padding = padded(n, self.dtype) - n
        keys = self.reserve(end + padding)
        sees = torch.zeros(n + padding, keys, dtype=torch.bool, device=self.x.device)
        sees[:n, :end] = True if mask is None else mask        # None: a single node sees all keys
        sees[n:, 0] = True                                     # a softmax over no key would be NaN
        after = torch.arange(end, end + padding, device=slots.device)
        inputs = [
            F.pad(x, (0, 0) * (x.ndim - 1) + (0, padding)),                            # (size, ...)
            F.pad(position, (0, padding)),                                             # (size,)
            torch.cat((slots, after)),                                                 # (size,)
            sees]
        forward = self.beside_views if getattr(self.x, "kv", None) else self.forward
        outputs = forward(keys, inputs)
        first, *states = [out[:n] for out in outputs]          # logits, or what a drafter predicts
        for count in logits_to_keep:
            first = first[-count:]
        return [first, *states]

    def beside_views(self, keys, inputs):
        """As forward, for a drafter that also reads views of the target's KV entries, `x.kv`."""
        views = self.x.kv
        self.x.kv = {layer: [lengthened(x) for x in pair] for layer, pair in views.items()}
        [length] = {x.shape[2] for pair in self.x.kv.values() for x in pair}
        committed = torch.arange(length, device=self.x.device) < self.x.t
        glimpse_mask = committed.repeat(len(inputs[0]), 1)     # (size, length)
        outputs = self.forward(keys, [*inputs, glimpse_mask])
        self.x.kv = views
        return outputs

    def reserve(self, entries):
        """Allocate for `entries` -> how many keys are read."""
        if self.is_target:
            # If its cache grew, all recordings would be void: use what the prefill allocated.
            self.x.cache.reserve(entries)
            return min(bucket(entries), self.x.cache.allocated)
        self.x.reserve(bucket(entries))
        return bucket(entries)

    def kv_entries(self):
        """The tensors that hold the KV entries which x reads."""
        if self.is_target:
            return [] if self.x.cache.stack is None else [self.x.cache.stack]
        views = getattr(self.x, "kv", {}).values()             # the target's, which a GLIDE reads
        return [self.x.store, *(entries for pair in views for entries in pair)]

    # ------------------------------------------------------------ recordings
    def forward(self, keys, inputs):
        """x's own run(keys, *inputs) -> its outputs, by a recording on a CUDA device"""
        if not self.graphs:
            return self.own(keys, *inputs)
        addresses = [(entries.data_ptr(), *entries.stride()) for entries in self.kv_entries()]
        if addresses != self.addresses:
            self.recorded, self.addresses, self.pool = {}, addresses, None
        # Which hidden states were captured is part of a recording, too.
        key = (*self.x.needs.get("hidden", ()), *(x.shape for x in inputs))
        if key not in self.recorded:
            held = [x.clone() for x in inputs]
            self.recorded[key] = held, self.record(partial(self.own, keys), held)
        held, replay = self.recorded[key]
        for x, new in zip(held, inputs):
            x.copy_(new)
        return [out.clone() for out in replay()]

    def record(self, function, inputs):
        """function(*inputs) as a function without arguments, whose results keep their addresses."""
        # Libraries set themselves up at a first call, which must not be recorded.
        function(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # One pool serves all: no two recordings replay at once, and their results are copied out.
        with torch.cuda.graph(graph, pool=self.pool):
            outputs = function(*inputs)
        self.pool = graph.pool()

        def replay():
            graph.replay()
            return outputs
        return replay
