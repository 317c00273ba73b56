"""GLIDE's Table 4: tokens per second where one prompt is decoded in several copies at once.

    python figures/batches.py
    python figures/batches.py --batches 1 4 16 --drafter glide --tree cape --json rows.jsonl
    python figures/batches.py --target lmsys/vicuna-7b-v1.5 --checkpoint my-glide --dtype float16

GLIDE with a CAPE (arXiv 2402.02082), appendix D, Table 4.  "To avoid other irrelevant reasons like
different samples in the same batch having different lengths, we just duplicate the input IDs."  So
all copies draft, accept and commit alike, and one loop decodes all of them: verify.generate, with
forwards that compute B copies.  Copies, below, makes them so, in the target and in the drafter.

    Table 4                     name here
    Batch Size                  batch: copies of the prompt
    Only                        plain: tokens per second of one copy, by the target alone
    +GLIDE                      glide: the same with the drafter, in chains of five or by --tree
    OOM                         no row: the device's memory does not hold this batch

The speed of a whole batch is that of one copy times the batch, as the paper prints it.  The loop
reads copy 0 alone; what the others choose where half precision rounds them differently is not
looked at.  Decoding is greedy.
"""
import inspect
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # so that it runs from anywhere

import torch

import bench
import probe
import verify
from runtime import report
from runtime.calls import read_call
from runtime.errors import UserError
from runtime.program import program

BATCHES = (1, 2, 4, 8, 16)
KEYS = ("batch", "glide", "plain", "speedup", "tau", "lossless")

# ---------------------------------------------------------------- forwards of several copies
class Copies:
    """Makes each forward of a model and of a GLIDE drafter compute `count` copies of its input."""
    def __init__(self, model, drafter):
        self.drafter = drafter
        self.count = 1
        model.register_forward_pre_hook(self.repeat_input, with_kwargs=True)
        # The first layer's queries, keys and values are of all copies, and so is what comes after.
        first = drafter.model.layers[0]
        first.project = partial(self.repeat_states, first.project)

    def begin(self, count):
        """From here on `count` copies.  The drafter's own KV entries are of so many, too."""
        self.count = count
        empty = self.drafter.store[:, :, :1, :, :0]            # (N_D, 2, 1, heads, 0, d)
        self.drafter.store = empty.repeat(1, 1, count, 1, 1, 1)
        self.drafter.reset()

    def repeat_input(self, module, args, more):
        """ids and positions (1, n) -> (count, n); masks (1, 1, n, keys) hold for all copies."""
        for name in ("input_ids", "position_ids"):
            if more.get(name) is not None:
                more[name] = more[name].expand(self.count, -1)
        return args, more

    def repeat_states(self, method, x, *args, **more):
        return method(x.expand(self.count, -1, -1), *args, **more)

# ---------------------------------------------------------------- the rows of the table
def row_of(a, setup, label, drafter, tree, prompts):
    """Decode all prompts, plainly and with the drafter -> bench.py's row."""
    # A cache that holds entries of one batch takes no other: each batch gets a target of its own.
    setup.target = setup.wrap(setup.model)
    build, settings = bench.builder(drafter, tree, None)
    decode = partial(bench.decode, a, setup)
    plain = bench.Arm("plain", partial(decode, None, verify.root_only))
    arm = bench.Arm("glide", partial(decode, drafter, build), label, tree.label, settings)
    table = report.Unfinished(None, {})
    bench.measure_all([plain, arm], prompts, table)
    if len(table.results) < len(prompts):
        raise KeyboardInterrupt
    # transformers' own generate() is not measured here; bench.py's rows compare with it, too.
    results = [{**found, "generate()": found["plain"]} for found in table.results]
    row = bench.row_of(arm, results, prompts)
    alone = bench.row_of(plain, results, prompts)
    row |= {"glide": row["tokens_per_second"], "plain": alone["tokens_per_second"]}
    return row | bench.losslessness(arm, range(len(prompts)), results, prompts, setup.target)

@program
def main(argv):
    p = probe.parser(inspect.getdoc(sys.modules[__name__]))
    p.add_argument("--batches", nargs="+", type=bench.between(int, 1, 4096), default=BATCHES,
                   help="how many copies")
    p.add_argument("--drafter", nargs=1, help="a GLIDE (default: glide)")
    p.add_argument("--tree", nargs=1, help="as bench.py takes it (default: chain)")
    a, setup, drafters, prompts = probe.begin(p, argv)
    [(label, drafter)] = drafters.items()
    if not hasattr(drafter, "store"):
        raise UserError(f"--drafter {label}: name a GLIDE")
    tree = read_call(a.tree[0], bench.TREES, "tree")
    copies = Copies(setup.model, drafter)
    rows = []
    for batch in sorted(a.batches):
        copies.begin(batch)
        try:
            row = row_of(a, setup, label, drafter, tree, prompts)
        except torch.OutOfMemoryError:
            print(f"a batch of {batch} does not fit into the device's memory")
            break
        rows.append({"target": a.target, "batch": batch, "temperature": 0.0, **row})
    probe.finish(a, rows, KEYS, "batches", argv, setup.target.device)

if __name__ == "__main__":
    sys.exit(main())
