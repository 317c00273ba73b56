r"""One prompt many times at once: does speculative decoding still pay where a batch fills the machine?

    python figures/repeated.py --drafter glide --tree chain --limit 4
    python figures/repeated.py --copies 1 2 4 8 16 32 --target lmsys/vicuna-7b-v1.5 --checkpoint my-glide \\
        --dtype float16 --device cuda

GLIDE with a CAPE (arXiv 2402.02082), appendix D and Table 4.  As in the paper the same prompt is repeated:
copies accept alike, so that nothing has to be rolled back to different lengths, which the loop here does not.

    paper                   name here
    batch size              copies: B
    +GLIDE, tokens / s      tok/s of one copy, in the row of the drafter; all of them make B times as many
    Only, tokens / s        the same, in the row of plain decoding

Every forward of the target and every draft is of B sequences, with keys and values of their own; acceptance
looks at the first.  Only prompts, and the last token of a chain that was accepted whole, are read once by the
drafter for all copies.  The flags are bench.py's, and --copies.  Drafters are glide and vanilla.
"""
import sys
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import bench  # noqa: E402
import glide  # noqa: E402
import train  # noqa: E402
from verify import UserError  # noqa: E402

COPIES = (1, 2, 4, 8, 16)


class Copies(glide.Drafter):
    """A drafter like `drafter` that runs on so many copies of a sequence; head h of copy b is b heads + h."""

    def __init__(self, drafter, copies):
        super().__init__(drafter.model)
        self.temperature, self.copies = drafter.temperature, copies
        self.store = self.store.repeat(1, 1, copies, 1, 1)

    def writer(self, layer, slots, keys):
        """As Drafter.writer, for keys and values of (B, heads, m, d)."""
        write_all = super().writer(layer, slots, keys)

        def folded(x):                                         # (B or 1, heads, m, d) -> (1, B heads, m, d)
            return x.expand(self.copies, -1, -1, -1).flatten(0, 1)[None]

        def unfolded(x):                                       # (1, B heads, keys, d) -> (B, heads, keys, d)
            return x[0].unflatten(0, (self.copies, -1))

        def write(k, v):
            k, v = write_all(folded(k), folded(v))
            return unfolded(k), unfolded(v)
        return write


@contextmanager
def repeated(run, copies):
    """While it lasts the target and the drafters of a run work on so many copies."""
    def repeat_ids(model, inputs, named):
        named["input_ids"] = named["input_ids"].expand(copies, -1)
        return inputs, named

    def repeat_rows(layer, inputs):
        x, *others = inputs                                    # (1, m, d_D)
        return x.expand(copies, -1, -1), *others

    own = run.drafters
    run.drafters = {label: Copies(drafter, copies) for label, drafter in own.items()}
    hooks = [run.model.register_forward_pre_hook(repeat_ids, with_kwargs=True)]
    hooks += [drafter.model.layers[0].register_forward_pre_hook(repeat_rows) for drafter in own.values()]
    run.target.empty()                                         # keys and values are of so many copies
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        run.drafters = own
        run.target.empty()


def rows_of(run, copies):
    """Decode every prompt with every arm, repeated -> rows as bench.py's, with "copies" and a label."""
    with repeated(run, copies):
        # transformers' own generate() would be repeated by the hook, but not its cache.
        arms = [arm for arm in bench.arms_of(run) if arm.build or arm.drafter.startswith("plain")]
        finished = bench.measure(run, arms)
        if finished < len(run.prompts):
            raise KeyboardInterrupt
        plain = [arm for arm in arms if not arm.build]
        base = min(plain, key=lambda arm: sum(out.seconds for out in arm.results.values()))
        which = list(range(finished))
        rows = [bench.row_of(run, arm, base, base, "all", which) for arm in arms]
    return [{**row, "copies": copies, "label": f"{copies} copies"} for row in rows]


def figure(argv):
    p = train.Parser(description="Decode many copies of a prompt at once.", allow_abbrev=False,
                     epilog="Other flags are bench.py's: --drafter, --tree, --limit ...")
    p.add_argument("--copies", type=int, nargs="+", default=COPIES, help="how many, one after the other")
    a, flags = p.parse_known_args(argv)
    if min(a.copies) < 1:
        raise UserError(f"--copies is {min(a.copies)}: it must be at least 1")
    run = bench.Run(flags)
    for label, drafter in run.drafters.items():
        if not isinstance(drafter, glide.Drafter):
            raise UserError(f"--drafter {label}: glide and vanilla are repeated, no others")
    found = []
    for copies in a.copies:
        try:
            rows = rows_of(run, copies)
        except torch.OutOfMemoryError:
            print(f"{copies} copies: out of memory")
            break
        for row in rows:
            each, name = row["tokens_per_second"], f"{row['drafter']} x {row['tree'] or '-'}"
            print(f"{copies:3d} copies  {name:30} {copies} * {each:.1f} tok/s, {row['speedup']:.2f}x")
        found += rows
    if run.a.json:
        bench.write_json(run.a.json, found)
    return 0


def main(argv=None):
    return bench.main(argv, figure, "figures/repeated.py")


if __name__ == "__main__":
    sys.exit(main())
