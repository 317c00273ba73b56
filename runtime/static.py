"""Static shapes and CUDA graphs around any `run`.

At batch 1 a forward launches hundreds of kernels of some microseconds each, and launching them
takes longer than running them.  A CUDA graph records which kernels ran on which addresses, and
replays all by one launch.  Hence shapes and addresses must stay: nodes are padded to a power of
two, keys to one of few lengths (bucket()), and inputs are copied into the tensors that the graph
was recorded with.

    target = static(verify.Target(model))    # its forwards, plain decoding's too, have few shapes
    drafter = static(glide.Drafter(...))     # likewise GLIDE's, EDD's, EAGLE's; MEDUSA never runs

A worked example: 5 nodes after 100 tokens are padded to 8, which write slots 100 ... 107 and read
256 keys.  Nodes 5, 6, 7 are padding: they stand at position 0, see the first key, and their results
are cut off; slots 105, 106, 107 are overwritten by the next forward, and no mask shows them.
"""
import sys
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F

from runtime.text import first_line
from verify import Target, UserError

GRAPHED = 64             # nodes; a larger forward keeps a GPU busy without a graph
KEYS = 256               # the least number of keys that a static forward reads


def static(x, rows=1, keys=KEYS, record=True):
    """Give a target, or a drafter with a method `run`, static shapes -> x.

    rows: fewest nodes of a forward; 64 makes all forwards of one size, so that in half precision a
    node is rounded alike whatever stands beside it.  keys: what their number is a multiple of.
    record: CUDA graphs, on a CUDA device.  What is static already stays as it is.  Raises UserError
    for a target that is spread over devices, if it is to be recorded.
    """
    # A model that verifies chains only counts positions by its cache: it takes no padding.
    takes_padding = hasattr(x, "run") and getattr(x, "verifies_trees", True)
    if not takes_padding or isinstance(x.run, Static):
        return x
    spread = set((getattr(getattr(x, "model", None), "hf_device_map", None) or {}).values())
    if record and len(spread) > 1:
        raise UserError("a CUDA graph is of one device, and the target is spread over "
                        f"{len(spread)}: leave --graphs out")
    x.run = Static(x, rows, keys, record)
    return x


def bucket(n, least):
    """n rounded up to one of few lengths: multiples of `least`, later four lengths an octave."""
    quarter_octave = 1 << max(0, (n - 1).bit_length() - 3)
    step = max(least, quarter_octave)
    return -(-n // step) * step


class Static:
    """Stands in the place of x.run."""

    def __init__(self, x, rows, keys, record):
        self.x, self.own, self.rows, self.keys = x, x.run, rows, keys
        self.is_target = isinstance(x, Target)
        self.graphs = record and x.device.type == "cuda"
        # Recordings, of tensors at these addresses.  pool: the memory that all recordings share;
        # stream: where all warm up and are recorded, since each stream has a cuBLAS workspace.
        self.recorded, self.addresses, self.pool, self.stream = {}, None, None, None

    def __call__(self, keys, x, position, slots, mask, logits_to_keep=0):
        n = len(x)
        # As they are: a prompt without a mask; what keeps a GPU busy; the first forward of all.
        if n > GRAPHED or mask is None and n > 1 or not self.held():
            more = (logits_to_keep,) if self.is_target else ()
            return self.own(keys, x, position, slots, mask, *more)
        power_of_two = 1 << (n - 1).bit_length()
        size = max(power_of_two, self.rows)
        padding = size - n
        total = self.reserve(keys + padding)
        # Nodes of padding write the slots after the last node's.
        after = torch.arange(keys, keys + padding, device=slots.device)
        inputs = [
            F.pad(x, (0, 0) * (x.ndim - 1) + (0, padding)),                            # (size, ...)
            F.pad(position, (0, padding)),                                             # (size,)
            torch.cat((slots, after)),                                                 # (size,)
            self.padded_mask(mask, n, keys, size, total),
        ]
        is_glide = bool(getattr(self.x, "kv", None))
        found = self.of_glide(total, inputs) if is_glide else self.replay(total, inputs)
        first, *states = [out[:n] for out in found]            # logits, or what a drafter predicts
        return [first[-logits_to_keep:], *states]

    def reserve(self, keys):
        """Make room for so many keys -> the bucket that is read."""
        total = bucket(keys, self.keys)
        if not self.is_target:
            self.x.reserve(total)
            return total
        # Growing would void all recordings: a text's last bucket is what its prefill allocated.
        cache = self.x.cache
        cache.reserve(keys)
        return min(total, cache.allocated)

    def padded_mask(self, mask, n, keys, size, total):
        """mask (n, keys) bool, or None: a lone node sees all keys -> (size, total)."""
        padded = torch.zeros(size, total, dtype=torch.bool, device=self.x.device)
        padded[:n, :keys] = True if mask is None else mask
        # A softmax over no key is NaN: nodes of padding see the first one.
        padded[n:, 0] = True
        return padded

    # ------------------------------------------------ what x is: a target, GLIDE, EDD and its kin
    def held(self):
        """The tensors that hold x's keys and values: a recording knows their addresses."""
        if self.is_target:
            pairs = self.x.cache.kv.values()
        elif hasattr(self.x, "store"):
            pairs = [[self.x.store], *self.x.kv.values()]
        else:
            pairs = [self.x.cache.kept.values()]
        return [tensor for pair in pairs for tensor in pair]

    def of_glide(self, total, inputs):
        """GLIDE's forward: the target's keys and values, lengthened, and what of them is there."""
        own, t = self.x.kv, self.x.t
        longer, length = {}, None
        for layer, kv in own.items():
            longer[layer] = [self.lengthened(entries) for entries in kv]
            length = longer[layer][0].shape[2]
        self.x.kv = longer
        there = torch.arange(length, device=self.x.device) < t                         # (length,)
        there = there.repeat(len(inputs[0]), 1)                # (size, length)
        found = self.replay(total, [*inputs, there])
        self.x.kv = own
        return found

    def lengthened(self, entries):
        """A view (1, H, t, d) of the target's cache -> the same, to the end of the bucket of t."""
        _, heads, t, d = entries.shape
        allocated = entries.stride(1) // entries.stride(2)
        length = min(bucket(t, self.keys), allocated)
        return entries.as_strided((1, heads, length, d), entries.stride(), entries.storage_offset())

    # ------------------------------------------------------------ recordings
    def replay(self, total, tensors):
        """x's own run(total, *tensors) -> its list, by a recording where there can be one."""
        # A recording knows where keys and values lie, and how far apart: growth voids it.
        addresses = [(held.data_ptr(), *held.stride()) for held in self.held()]
        if addresses != self.addresses:
            self.recorded, self.addresses, self.pool = {}, addresses, None
        # It knows which hidden states were captured, too; the mask's shape says the keys.
        key = (*self.x.needs.get("hidden", ()), *(x.shape for x in tensors))
        if self.graphs and key not in self.recorded:
            inputs = [x.clone() for x in tensors]
            try:
                self.recorded[key] = inputs, self.record(partial(self.own, total), inputs)
            except RuntimeError as why:
                self.graphs = False
                print(f"no CUDA graphs, this model cannot be recorded: {first_line(why)}",
                      file=sys.stderr)
        if not self.graphs:
            return self.own(total, *tensors)
        inputs, replay = self.recorded[key]
        for kept, x in zip(inputs, tensors):
            kept.copy_(x)
        return [x.clone() for x in replay()]

    def record(self, function, inputs):
        """function(*inputs) as one without arguments, whose results lie at fixed addresses."""
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            # Libraries set themselves up at a first call, which no recording may see.
            function(*inputs)
            # A capture that fails leaves its stream behind (torch.cuda.graph.__exit__), so a
            # model for which the host waits (dynamic NTK, int8 weights) is found before.
            with no_syncs():
                function(*inputs)
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # One pool serves all: no two replay at once, and results are copied out at once.
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            out = function(*inputs)

        def replay():
            graph.replay()
            return out
        return replay


@contextmanager
def no_syncs():
    """Within, what would make the host wait for the device raises a RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
