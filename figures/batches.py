"""GLIDE's Table 4: tokens a second where one prompt is decoded in several copies at once.

    python figures/batches.py
    python figures/batches.py --batches 1 4 16 --drafter glide --tree cape --json rows.jsonl
    python figures/batches.py --target lmsys/vicuna-7b-v1.5 --checkpoint my-glide --dtype float16

GLIDE with a CAPE (arXiv 2402.02082), appendix D, Table 4.  "To avoid other irrelevant reasons like
different samples in the same batch having different lengths, we just duplicate the input IDs."  So
all copies draft, accept and commit alike, and one loop decodes all of them: verify.generate, with
forwards that compute B copies.  Copies, below, makes them so, in the target and in the drafter.

    Table 4                     name here
    Batch Size                  batch: copies of the prompt
    Only                        plain: tokens a second of one copy, by the target alone
    +GLIDE                      glide: the same with the drafter, in chains of five or by --tree
    OOM                         no row: the device's memory does not hold this batch

The speed of a whole batch is that of one copy times the batch, as the paper prints it.  The loop
reads copy 0 alone; what the others choose where half precision rounds them differently is not
looked at.  Other flags are bench.py's: one GLIDE drafter, one tree, greedy decoding.
"""
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from probe import show, work  # noqa: E402
from tables import with_by_prompt  # noqa: E402

import bench  # noqa: E402
from runtime import text  # noqa: E402
from verify import UserError  # noqa: E402

BATCHES = (1, 2, 4, 8, 16)
COLUMNS = ["batch=batch:d", "+GLIDE, tokens/s a copy=glide:.1f", "only=plain:.1f",
           "speedup=speedup:.2f", "tau", "lossless=lossless"]

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
def row_of(run, copies, batch):
    """Decode all prompts in `batch` copies -> bench.py's row; speeds are of one copy."""
    copies.begin(batch)
    # A cache that holds entries of one batch takes no other: each batch gets a target of its own.
    run.target = run.wrap(run.model)
    [label] = run.drafters
    plain, drafted = arms = [bench.plain_arm(run), bench.drafted_arm(run, label, run.trees[0])]
    if bench.measure_all(run, arms) < len(run.prompts):
        raise KeyboardInterrupt
    which = range(len(run.prompts))
    row = bench.row_of(run, drafted, plain, plain, "all", which)
    [row] = with_by_prompt([row], run.prompts)
    alone = bench.speeds(plain, plain, plain, which)["tokens_per_second"]
    return {**row, "batch": batch, "glide": row["tokens_per_second"], "plain": alone}

def rows_of(argv):
    """["--batches", "1", "4", bench.py's flags ...] -> a row for each batch, printed as a table"""
    parser = text.Parser(add_help=False)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    a, flags = parser.parse_known_args(argv)
    run = bench.Run(["--drafter", "glide", "--tree", "chain", "--limit", "4", *flags])
    if run.a.temperature > 0 or len(run.drafters) * len(run.trees) != 1 or min(a.batches) < 1:
        raise UserError("name one drafter, one tree and batches above 0; decoding must be greedy, "
                        "so that all copies draft and accept alike")
    [drafter] = run.drafters.values()
    copies = Copies(run.model, drafter)
    rows = []
    for batch in sorted(a.batches):
        try:
            rows.append(row_of(run, copies, batch))
        except torch.OutOfMemoryError:
            run.notes.append(f"a batch of {batch} does not fit into the device's memory")
            break
    show(run, rows, COLUMNS)
    return rows

main = partial(bench.main, work=partial(work, rows_of=rows_of), name="figures/batches.py")

if __name__ == "__main__":
    sys.exit(main())
