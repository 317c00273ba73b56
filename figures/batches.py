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

The speed of a whole batch is that of one copy times the batch, as the paper prints it.  Other flags
are bench.py's: one GLIDE drafter, one tree, greedy decoding.
"""
import platform
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import transformers  # noqa: E402
from tables import grid  # noqa: E402

import bench  # noqa: E402
from runtime import text  # noqa: E402
from verify import UserError  # noqa: E402

BATCHES = (1, 2, 4, 8, 16)
COLUMNS = ["batch=batch:d", "+GLIDE, tokens/s a copy=glide:.1f", "only=plain:.1f",
           "speedup=speedup:.2f", "tau", "lossless=lossless"]

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
        # Wrapped as a method, since the head of glide-shared is one.
        drafter.model.head = self.compared(drafter.model.head)
        # The first layer's queries, keys and values are of all copies, and so is what comes after.
        first = drafter.model.layers[0]
        first.project = partial(self.repeat_states, first.project)

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

    def compared(self, head):
        """The drafter's head, a module or a method, with its choices compared."""
        if isinstance(head, torch.nn.Module):
            head.register_forward_hook(lambda module, args, out: self.compare(out))
            return head

        def method(x):
            logits = head(x)
            self.compare(logits)
            return logits
        return method

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
def row_of(run, copies, batch, label, tree):
    """Decode all prompts in `batch` copies -> a row; speeds are of one copy."""
    copies.begin(batch)
    # A cache that holds entries of one batch takes no other: each batch gets a target of its own.
    run.target = run.wrap(run.model)
    plain, drafted = arms = [bench.plain_arm(run), bench.drafted_arm(run, label, tree)]
    if bench.measure_all(run, arms) < len(run.prompts):
        raise KeyboardInterrupt
    copies.check()
    prompts = range(len(run.prompts))
    speeds = []
    for arm in arms:
        tokens = sum(len(arm.results[i].tokens) for i in prompts)
        speeds.append(tokens / sum(arm.results[i].seconds for i in prompts))
    rounds = sum(drafted.results[i].total["rounds"] for i in prompts)
    new = sum(drafted.results[i].total["new"] for i in prompts)
    return {
        "glide": speeds[1],
        "plain": speeds[0],
        "speedup": speeds[1] / speeds[0],
        "by_prompt": {"speedup": drafted.speedups(plain, prompts)},
        "tau": new / rounds if rounds else None,
        "lossless": all(drafted.results[i].tokens == plain.results[i].tokens for i in prompts)}

def versions():
    """The packages that compute."""
    return {"python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__}

def rows_of(run, batches):
    """-> rows, one for each batch"""
    if run.a.temperature > 0:
        raise UserError("--temperature: copies draft and accept alike where decoding is greedy")
    if len(run.drafters) * len(run.trees) != 1:
        raise UserError("name one drafter and one tree")
    [(label, drafter)] = run.drafters.items()
    if not hasattr(drafter, "store"):
        raise UserError(f"{label} is no GLIDE drafter: Table 4 is about GLIDE")
    tree = run.trees[0]
    copies = Copies(run.model, drafter)
    about = {key: getattr(run.a, key) for key in ("target", "dtype", "device", "temperature")}
    about |= {"drafter": label, "tree": tree.label, "threads": torch.get_num_threads()}
    about |= {"prompts": len(run.prompts), "versions": versions()}
    rows = []
    for batch in batches:
        row = dict.fromkeys(("glide", "plain", "speedup", "tau", "lossless"))
        # What did not fit once does not fit in more copies.
        if not rows or rows[-1]["glide"]:
            try:
                row = row_of(run, copies, batch, label, tree)
            except torch.OutOfMemoryError:
                run.notes.append(f"a batch of {batch} does not fit into the device's memory")
        rows.append({**about, "batch": batch, **row, "group": "all"})
    return rows

# ---------------------------------------------------------------- the command line
def run_of(argv):
    """The command line -> bench.py's run, and the batches."""
    parser = text.Parser(add_help=False)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    a, flags = parser.parse_known_args(argv)
    if min(a.batches) < 1:
        raise UserError("--batches: at least one copy each")
    defaults = ["--drafter", "glide", "--tree", "chain", "--limit", "4"]
    return bench.Run(defaults + flags), sorted(a.batches)

def work(argv):
    run, batches = run_of(argv)
    rows = rows_of(run, batches)
    print(f"\n{grid(rows, COLUMNS)}\n", *run.notes, sep="\n")
    if run.a.json:
        bench.write_json(run.a.json, rows)
    return 0

main = partial(bench.main, work=work, name="figures/batches.py")

if __name__ == "__main__":
    sys.exit(main())
