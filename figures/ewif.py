r"""Does the expected walltime improvement factor (EWIF) say how much faster decoding will be?

    python figures/ewif.py \
        --drafter "cascade(base, k=5)" "cascade(small, k=5)" "cascade(base, small, k=(3, 5, 0))"

Cascade Speculative Drafting (arXiv 2312.11462), section 4.2: Theorem 4.5 and Table 1.

    paper                     name here
    alpha_i = alpha(M_t, M_i) of speculative decoding with that model alone, measured: accepted / tested
    c_i = c(M_t, M_i)         of the same arm, measured: one run of it over one of the target
    k_1, k_2                  tokens that each model drafts: with k=(3, 5, 0) base writes 3, small 2
    EWIF                      predicted, from alphas, costs and k alone

First Table 1 itself, from Leviathan et al.'s alphas on CNN/DM and WMT EnDe with parameters as costs.  Then
the arms named, each beside what was measured: SWI, which counts the models' runs alone, and the speedup by
the clock.  A *horizontal* cascade, whose models review nothing (zeros behind k12), needs each of its models
alone as an arm beside it.  The flags are bench.py's; --tree is not asked.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bench  # noqa: E402
import cascade  # noqa: E402
from verify import UserError  # noqa: E402

# alpha of FLAN-T5-small and -base (Leviathan et al. 2023); weights in millions: small, base, XXL
ALPHAS = {"CNN/DM": {"small": 0.65, "base": 0.73}, "EnDe": {"small": 0.75, "base": 0.80}}
WEIGHTS, TARGET = {"small": 77, "base": 248}, 11_300
# Table 1: data set, models, tokens of each
TABLE_1 = (
    ("CNN/DM", ("small",), (9,)), ("CNN/DM", ("base",), (8,)), ("CNN/DM", ("base", "small"), (5, 3)),
    ("EnDe", ("small",), (12,)), ("EnDe", ("base",), (11,)), ("EnDe", ("base", "small"), (5, 8)),
)


def ewif(names, k, alphas, costs):
    """Theorem 4.5 where the model names[i] drafts k[i] tokens; alphas, costs: {name: value}."""
    writers = []
    for name, count in zip(names, k):
        writers += [name] * count
    return cascade.ewif_horizontal([alphas[name] for name in writers], [costs[name] for name in writers])


def counted(k):
    """-> {"k1", "k2"}: tokens of the first model, of the second (None where there is none)."""
    return {"k1": k[0], "k2": k[1] if len(k) > 1 else None}


def table_1():
    """Table 1, a row each."""
    costs = {name: weights / TARGET for name, weights in WEIGHTS.items()}
    rows = []
    for data, names, k in TABLE_1:
        found = ewif(names, k, ALPHAS[data], costs)
        rows.append({"drafter": f"{data} ({', '.join(names)})", **counted(k), "ewif": found})
    return rows


def is_horizontal(row):
    """No model of the cascade reviews another, and Max-Gram is not in it."""
    return "maxgram" not in row["stages"] and not any(any(counts) for counts in row["K"][1:])


def predicted(rows):
    """bench.py's rows of cascades -> the same rows with "ewif"; None where Theorem 4.5 does not say it."""
    alone = {row["stages"][0]: row for row in rows if len(row["stages"]) == 1}
    alphas = {name: row["alpha"] for name, row in alone.items()}
    costs = {name: row["c"] for name, row in alone.items()}
    found = []
    for row in rows:
        expected = None
        if is_horizontal(row):
            lacking = [name for name in row["stages"] if name not in alone]
            if lacking:
                raise UserError(f"{row['drafter']} needs its models alone beside it: add "
                                + " ".join(f'"cascade({name}, k=5)"' for name in lacking))
            expected = ewif(row["stages"], row["K"][0], alphas, costs)
        found.append({**row, **counted(row["K"][0]), "ewif": expected})
    return found


def figure(argv):
    run = bench.Run([*(sys.argv[1:] if argv is None else argv), "--tree", "chain"])
    for label, drafter in run.drafters.items():
        if not hasattr(drafter, "names"):
            raise UserError(f"{label} is no cascade: Theorem 4.5 is about cascades")
    arms = bench.arms_of(run)
    finished = bench.measure(run, arms)
    if not finished:
        raise KeyboardInterrupt
    rows = [row for row in bench.report(run, arms, finished) if row["tree"] and row["group"] == "all"]

    rows = table_1() + predicted(rows)
    print(f"\n{'':40} EWIF  SWI measured  speedup")
    for row in rows:
        values = [row["ewif"], row.get("swi_measured"), row.get("speedup")]
        cells = ["-" if value is None else f"{value:.2f}" for value in values]
        print(f"{row['drafter']:40} {cells[0]:>4}  {cells[1]:>12}  {cells[2]:>7}")
    if run.a.json:
        bench.write_json(run.a.json, rows)
    return 0 if finished == len(run.prompts) else 130


def main(argv=None):
    return bench.main(argv, figure, "figures/ewif.py")


if __name__ == "__main__":
    sys.exit(main())
