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
    OOM                         None: the device's memory does not hold this batch

The speed of a whole batch is that of one copy times the batch, as the paper prints it.  Plain
decoding is the fastest of bench.py's plain arms, in each batch.  Other flags are bench.py's: one
drafter, one tree, and greedy decoding.
"""
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tables as compare  # noqa: E402
import torch  # noqa: E402

import bench  # noqa: E402
import glide  # noqa: E402
from runtime import text as read  # noqa: E402
from runtime import measure as clock  # noqa: E402
from verify import UserError  # noqa: E402

BATCHES = (1, 2, 4, 8, 16)
COLUMNS = ["batch=batch:d", "+GLIDE, tokens/s a copy=glide:.1f", "only=plain:.1f",
           "speedup=speedup:.2f", "tau=tau:.2f", "lossless=lossless"]

# ---------------------------------------------------------------- forwards of several copies
class Copies:
    """Makes each forward of a model and of a GLIDE drafter compute `count` copies of its input.

    The loop sees copy 0.  `differ` counts the choices of other copies that were not copy 0's.
    """
    def __init__(self, model, drafter):
        self.drafter = drafter
        self.begin(1)
        model.register_forward_pre_hook(self.repeat_input, with_kwargs=True)
        model.register_forward_hook(lambda module, args, out: self.compare(out.logits))
        self.watch_head(drafter.model)
        # The first layer's queries, keys and values are of all copies, and so is what comes after.
        first = drafter.model.layers[0]
        first.project = partial(self.repeat_states, first.project)

    def watch_head(self, draft_model):
        """Compare the draft model's choices, too; LongSpec's head is a method."""
        head = draft_model.head

        def compared(x):
            logits = head(x)
            self.compare(logits)
            return logits
        if isinstance(head, torch.nn.Module):
            head.register_forward_hook(lambda module, args, out: self.compare(out))
        else:
            draft_model.head = compared

    def begin(self, count):
        """From here on `count` copies.  The drafter's own KV entries are of so many, too."""
        self.count = count
        self.differ = 0
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

    def compare(self, logits):
        """logits (count, n, V).  Without a device-to-host sync, for which a forward would wait."""
        assert len(logits) == self.count, "a forward computed fewer copies"
        choice = logits.argmax(-1)                             # (count, n)
        differ = choice != choice[:1]
        self.differ = self.differ + differ.sum()

    def check(self):
        """Refuse what was measured where copies did not choose alike."""
        if int(self.differ):
            raise UserError(f"{self.count} copies of a prompt chose different tokens, since half "
                            "precision rounds them differently: take --dtype float32")

# ---------------------------------------------------------------- one row of the table
def row_of(run, arms, truth):
    """Measured arms, the drafter's the last -> a row; speeds are of one copy, over all prompts."""
    *plain, drafted = [[arm.results[i] for i in range(len(run.prompts))] for arm in arms]
    speeds = []
    for outs in (*plain, drafted):
        tokens = sum(len(out.tokens) for out in outs)
        seconds = sum(out.seconds for out in outs)
        speeds.append(tokens / seconds)
    *plain_speeds, speed = speeds
    total = clock.totals(drafted)
    return {
        "glide": speed,
        "plain": max(plain_speeds),
        "speedup": speed / max(plain_speeds),
        "tau": clock.ratio(total["new"], total["rounds"]),
        "lossless": [out.tokens for out in drafted] == truth}

def measured(run, label, build, copies, batch):
    """Decode all prompts in `batch` copies -> arms: plain decoding's, then the drafter's."""
    copies.begin(batch)
    # A cache that holds entries of one batch takes no other: each batch gets targets of its own.
    run.target = run.wrap(run.model)
    drafted = bench.Arm(label, partial(run.decode, run.drafters[label], build), "tree", build)
    arms = [*bench.plain_arms(run), drafted]
    if bench.measure(run, arms) < len(run.prompts):
        raise KeyboardInterrupt
    copies.check()
    return arms

def rows_of(run, batches):
    """-> rows, one for each batch"""
    if run.a.temperature > 0:
        raise UserError("--temperature: copies draft and accept alike where decoding is greedy")
    if len(run.drafters) * len(run.trees) != 1:
        raise UserError("name one drafter and one tree")
    [(label, drafter)] = run.drafters.items()
    if not isinstance(drafter, glide.Drafter):
        raise UserError(f"{label} is no GLIDE drafter: Table 4 is about GLIDE")
    tree = run.trees[0]
    build = bench.builder(run, label, tree)
    copies = Copies(run.model, drafter)
    about = {key: getattr(run.a, key) for key in ("target", "dtype", "device", "temperature")}
    about |= {"drafter": label, "tree": tree.label, "threads": torch.get_num_threads()}
    about["versions"] = bench.versions()
    rows = []
    truth = None                               # plain decoding's tokens, in the smallest batch
    for batch in batches:
        row = dict.fromkeys(("glide", "plain", "speedup", "tau", "lossless"))
        # What did not fit once does not fit in more copies.
        if not rows or rows[-1]["glide"]:
            try:
                arms = measured(run, label, build, copies, batch)
                truth = truth or [arms[0].results[i].tokens for i in range(len(run.prompts))]
                row = row_of(run, arms, truth)
            except torch.OutOfMemoryError:
                run.notes.append(f"a batch of {batch} does not fit into the device's memory")
        rows.append({**about, "batch": batch, **row, "group": "all"})
    return rows

# ---------------------------------------------------------------- the command line
def run_of(argv):
    """The command line -> bench.py's run, and the batches."""
    parser = read.Parser(add_help=False)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    a, flags = parser.parse_known_args(argv)
    if min(a.batches) < 1:
        raise UserError("--batches: at least one copy each")
    defaults = ["--drafter", "glide", "--tree", "chain", "--limit", "4"]
    return bench.Run(defaults + flags), sorted(a.batches)

def work(argv):
    run, batches = run_of(argv)
    rows = rows_of(run, batches)
    print(f"\n{compare.grid(rows, COLUMNS)}\n", *run.notes, sep="\n")
    if run.a.json:
        bench.write_json(run.a.json, rows)
    return 0

main = partial(bench.main, work=work, name="figures/batches.py")

if __name__ == "__main__":
    sys.exit(main())
