"""Is a drafter's confidence the probability that its token is accepted?  Reliability diagrams and ECE.

    python figures/calibration.py --drafter edd glide
    python figures/calibration.py --drafter edd --raw-confidence --json calibration.jsonl

EDD and PCT (ACL 2025), section 3.2 and Figure 3(b); GLIDE with a CAPE (arXiv 2402.02082), section 4.2 and
Figure 1(b).  CAPE and PCT build on it: nodes are spent where the confidence says that they will be accepted.

    paper        name here
    c_i          confidence: the drafter's largest probability, which is that of the token it drafts
    accuracy     acceptance: whether the output went on with that token
    ECE          sum over bins of (count / all) |acceptance - mean confidence|     (Guo et al. 2017)

Chains of ten are drafted; tokens after a chain's first rejection are left out, since whether they would have
been accepted depends on it.  The flags are bench.py's; --tree is not asked.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

import bench  # noqa: E402
import cape  # noqa: E402

LENGTH, BINS, WIDE = 10, 10, 40                 # of a chain; of the diagram; columns of its bars


def played(run, drafter, build):
    """Decode the prompts; yield (tree, the tokens that the output went on with after it) of each round."""
    for _, ids, limit in tqdm(run.prompts, unit="prompt", dynamic_ncols=True, disable=None):
        trees = []

        def recording(expand, root, trees=trees):
            trees.append(build(expand, root))
            return trees[-1]
        out = run.decode(drafter, recording, ids, limit)
        at = 1                                  # the prefill's token is the first root
        for tree, gained in zip(trees, out.runs):
            yield tree, out.tokens[at:at + gained]
            at += gained


def drafted_tokens(tree):
    """The tokens of a chain but its root, as a list; absent nodes, which have no parent, are left out."""
    there = tree.parents[1:] >= 0
    return tree.tokens[1:].to(there.device)[there].tolist()


def calibration(run, drafter, length=LENGTH):
    """-> [(confidence, accepted?)] of every judged token of chains of `length`."""
    confidences = []                            # of each round: those of its chain

    def build(expand, root):
        rows = []

        def recording(tokens, parents):
            rows.append(expand(tokens, parents))
            return rows[-1]
        tree = cape.chain(recording, root, length)
        confidences.append(torch.cat(rows).max(1).values.tolist())
        return tree

    judged = []
    for number, (tree, went_on) in enumerate(played(run, drafter, build)):
        for token, confidence, true in zip(drafted_tokens(tree), confidences[number], went_on):
            judged.append((confidence, token == true))
            if token != true:
                break
    return judged


def mean(values):
    return sum(values) / len(values) if values else None


def reliability(judged, bins=BINS):
    """-> ([{low, high, confidence, acceptance, count} of each bin], expected calibration error).

    Bins are closed on the right, the first one on the left too.
    """
    rows, error = [], 0.0
    for b in range(bins):
        inside = [(p, ok) for p, ok in judged if b < p * bins <= b + 1 or p == b == 0]
        confidence = mean([p for p, _ in inside])
        acceptance = mean([ok for _, ok in inside])
        rows.append({"low": b / bins, "high": (b + 1) / bins, "count": len(inside),
                     "confidence": confidence, "acceptance": acceptance})
        if inside:
            # ECE = sum_b |B_b| / n |acc(B_b) - conf(B_b)|
            error += len(inside) / len(judged) * abs(acceptance - confidence)
    return rows, error


def reliability_plot(name, rows, error):
    """The diagram as text: a bar of the bin's acceptance, and | where its mean confidence is."""
    count = sum(row["count"] for row in rows)
    title = f"\n{name}: expected calibration error {error:.3f} over {count} drafted tokens"
    lines = [f"{title} (bar: accepted; |: confidence)"]
    for row in rows:
        line = f"  ({row['low']:.1f}, {row['high']:.1f}]  "
        if row["count"]:
            at = round(WIDE * row["confidence"])
            bar = "#" * round(WIDE * row["acceptance"])
            bar = bar.ljust(at + 1)
            bar = bar[:at] + "|" + bar[at + 1:]
            line += f"{row['confidence']:.2f}  {row['acceptance']:.2f}  {row['count']:6d}  {bar}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def about(run, label):
    """What every row of these figures says of its run."""
    a = run.a
    return {"target": a.target, "drafter": label, "temperature": a.temperature, "seed": a.seed}


def figure(argv):
    run = bench.Run(argv)
    found = []
    for label, drafter in run.drafters.items():
        rows, error = reliability(calibration(run, drafter))
        print(reliability_plot(label, rows, error))
        found.append({**about(run, label), "ece": error, "bins": rows})
    if run.a.json:
        bench.write_json(run.a.json, found)
    return 0


def main(argv=None):
    return bench.main(argv, figure, "figures/calibration.py")


if __name__ == "__main__":
    sys.exit(main())
