"""How likely is the i-th drafted token of a chain to be accepted?

    python figures/acceptance.py --drafter glide "cascade(base, k=30)" "cascade(small, k=30)"

Cascade Speculative Drafting (arXiv 2312.11462), section 3.2, Figures 2 and 3: later tokens are accepted less
often, so that cheaper drafters should write them (the horizontal cascade).

    paper                       name here
    token index                 position, from 1
    P(accepted)                 accepted / drafted at that position: accepted together with all before it

Chains of thirty are drafted; a cascade and Max-Gram write chains of their own length (k).  The flags are
bench.py's; --tree is not asked.
"""
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from calibration import about, drafted_tokens, played  # noqa: E402

import bench  # noqa: E402
import cape  # noqa: E402
import cascade  # noqa: E402

LENGTH, WIDE = 30, 40


def position_acceptance(rounds):
    """rounds: (tree, the tokens that the output went on with) -> [[drafted, accepted]] by position."""
    found = []
    for tree, went_on in rounds:
        drafted = drafted_tokens(tree)
        accepted = 0
        for token, true in zip(drafted, went_on):
            if token != true:
                break
            accepted += 1
        judged = len(drafted)
        if accepted == len(went_on) < len(drafted):
            judged = accepted                   # the output ended here: later positions were not judged
        for i in range(judged):
            if i == len(found):
                found.append([0, 0])
            found[i][0] += 1
            found[i][1] += i < accepted
    return found


def position_plot(name, found):
    """Figures 2 and 3 as text."""
    lines = [f"\n{name}: probability that a drafted token is accepted, by its position in the chain"]
    for position, (drafted, accepted) in enumerate(found, 1):
        share = accepted / drafted
        lines.append(f"  {position:3d}  {share:.2f}  {drafted:6d}  {'#' * round(WIDE * share)}".rstrip())
    return "\n".join(lines)


def figure(argv):
    run = bench.Run(argv)
    rows = []
    for label, drafter in run.drafters.items():
        build = cascade.proposal if hasattr(drafter, "chain") else partial(cape.chain, gamma=LENGTH)
        found = position_acceptance(played(run, drafter, build))
        print(position_plot(label, found))
        positions = [{"position": i, "drafted": n, "accepted": ok} for i, (n, ok) in enumerate(found, 1)]
        rows.append({**about(run, label), "positions": positions})
    if run.a.json:
        bench.write_json(run.a.json, rows)
    return 0


def main(argv=None):
    return bench.main(argv, figure, "figures/acceptance.py")


if __name__ == "__main__":
    sys.exit(main())
