"""Static shapes and CUDA graphs around any `run`.

At batch 1 a forward launches hundreds of kernels of some microseconds each, and launching them takes longer
than running them.  A CUDA graph records which kernels ran on which addresses, and replays all by one launch.
Hence shapes and addresses must stay: nodes are padded to a power of two and keys to a multiple of 256, and
inputs are copied into the tensors that the graph was recorded with.

    target = static(verify.Target(model))    # its forwards, plain decoding's too, have few shapes now
    drafter = static(glide.Drafter(...))     # likewise GLIDE's, EDD's, VDM's, EAGLE's; MEDUSA never runs

A worked example: 5 nodes behind 100 tokens are 8 rows, which write slots 100 ... 107 and read 256 keys.
Rows 5, 6, 7 are padding: they stand at position 0, see the first key, and their results are cut off; slots
105, 106, 107 are written over by the next forward, and no mask lets anybody see them.
"""
import sys
from functools import partial

import torch
import torch.nn.functional as F

from data.read import first_line

GRAPHED = 64             # nodes; a larger forward keeps a GPU busy without a graph
KEYS = 256               # static forwards read so many rows of the cache, or twice, three times ... as many


def static(x, rows=1, keys=KEYS, record=True):
    """Give a target, or a drafter with a method `run`, static shapes -> x.

    rows: fewest rows of a forward; 64 makes all forwards of one size, so that in half precision a row is
    rounded alike whatever stands beside it.  keys: what their number is a multiple of.  record: CUDA graphs,
    on a CUDA device.
    """
    # A model that verifies chains only counts positions by its cache: it takes no padding.
    if hasattr(x, "run") and getattr(x, "verifies_trees", True):
        x.run = Static(x, rows, keys, record)
    return x


class Static:
    """Stands in the place of x.run."""

    def __init__(self, x, rows, keys, record):
        self.x, self.own, self.rows, self.keys = x, x.run, rows, keys
        self.target = hasattr(x, "verifies_trees")
        self.graphs = record and x.device.type == "cuda"
        # Recordings, of rows that lie at these places; pool: the memory that all of them share
        self.recorded, self.places, self.pool = {}, None, None

    def __call__(self, keys, x, position, slots, mask):
        n = len(x)
        # A drafter's prompt, which needs no mask; what keeps a GPU busy as it is; the first rows of all
        if n > GRAPHED or mask is None and n > 1 or not self.held():
            if self.target:
                # GLIDE reads as many rows of a target as static(glide) wants.
                self.x.cache.reserve(self.multiple(keys))
            return self.own(keys, x, position, slots, mask)
        power_of_two = 1 << (n - 1).bit_length()
        size = max(power_of_two, self.rows)
        more = size - n
        total = self.multiple(keys + more)
        holder = self.x.cache if self.target else self.x
        holder.reserve(total)
        # Rows of padding write the slots behind the last node's.
        behind = torch.arange(keys, keys + more, device=slots.device)
        inputs = [
            F.pad(x, (0, 0) * (x.ndim - 1) + (0, more)),                               # (size, ...)
            F.pad(position, (0, more)),                                                # (size,)
            torch.cat((slots, behind)),                                                # (size,)
            self.padded_mask(mask, n, keys, size, total),                              # (size, total)
        ]
        asked = 0
        if self.target:
            asked, self.x.keep = self.x.keep, 0                # here the logits of all rows
        is_glide = bool(getattr(self.x, "kv", None))
        found = self.of_glide(total, inputs) if is_glide else self.replay(total, inputs)
        first, *states = [rows[:n] for rows in found]          # a target's logits, or what a drafter says
        return [first[-asked:], *states]

    def multiple(self, rows):
        """`rows`, rounded up to a multiple of self.keys."""
        return -(-rows // self.keys) * self.keys

    def padded_mask(self, mask, n, keys, size, total):
        """mask (n, keys) bool, or None: a lone row sees all keys -> (size, total)."""
        padded = torch.zeros(size, total, dtype=torch.bool, device=self.x.device)
        padded[:n, :keys] = True if mask is None else mask
        # A softmax over no key is NaN: rows of padding see the first one.
        padded[n:, 0] = True
        return padded

    # ------------------------------------------------------------ what x is: a target, GLIDE, EDD and its kin
    def held(self):
        """The tensors that hold the rows which x has read: a recording knows their addresses."""
        if hasattr(self.x, "store"):
            held = [self.x.store]
            for k, v in self.x.kv.values():
                held += [k, v]
            return held
        if not self.target:
            return list(self.x.cache.kept.values())
        held = []
        for k, v in self.x.cache.kv.values():
            held += [k, v]
        return held

    def of_glide(self, total, inputs):
        """GLIDE's forward: the target's rows, lengthened, and a mask of those that are there."""
        own, t = self.x.kv, self.x.t
        length = self.multiple(t)
        longer = {}
        for layer, kv in own.items():
            longer[layer] = [self.lengthened(rows, length) for rows in kv]
        self.x.kv = longer
        there = torch.arange(length, device=self.x.device) < t                         # (length,)
        there = there.repeat(len(inputs[0]), 1)                                        # (size, length)
        found = self.replay(total, [*inputs, there])
        self.x.kv = own
        return found

    def lengthened(self, rows, total):
        """A view (1, H, t, d) of the target's cache, with the void rows behind it -> (1, H, total, d)."""
        size = rows.untyped_storage().nbytes() // rows.element_size()    # numbers that the cache has room for
        _, heads, _, d = rows.shape
        shape = (1, heads, total, d)
        last = rows.storage_offset() + (heads - 1) * rows.stride(1) + (total - 1) * rows.stride(2) + d
        assert last <= size, "the target's cache ends here: static(target) comes with static(drafter)"
        return rows.as_strided(shape, rows.stride(), rows.storage_offset())

    # ------------------------------------------------------------ recordings
    def replay(self, total, tensors):
        """x's own run(total, *tensors) -> a list of tensors, by a recording where there can be one."""
        # A recording knows where the rows lie, and how far apart: those of a cache that grew since are void.
        places = [(rows.data_ptr(), *rows.stride()) for rows in self.held()]
        if places != self.places:
            self.recorded, self.places, self.pool = {}, places, None
        # It knows which hidden states were asked for, too.
        key = (total, *self.x.needs.get("hidden", ()), *(x.shape for x in tensors))
        if self.graphs and key not in self.recorded:
            held = [x.clone() for x in tensors]
            try:
                self.recorded[key] = held, self.record(partial(self.own, total), held)
            except RuntimeError as why:
                self.graphs = False
                print(f"no CUDA graphs, this model cannot be recorded: {first_line(why)}",
                      file=sys.stderr)
        if not self.graphs:
            return self.own(total, *tensors)
        held, replay = self.recorded[key]
        for kept, x in zip(held, tensors):
            kept.copy_(x)
        return [x.clone() for x in replay()]

    def record(self, function, held):
        """function(*held) as a callable without arguments, whose results lie at fixed addresses."""
        # Libraries set themselves up at a first call, which no recording may see.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(*held)
            function(*held)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # One pool serves all: no two replay at once, and results are copied out before the next one does.
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool):
            out = function(*held)

        def replay():
            graph.replay()
            return out
        return replay
