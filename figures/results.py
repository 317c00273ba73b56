"""Write docs/results.md, docs/claims.md and docs/arms.svg from the measured JSON lines in docs/results/.

    python figures/results.py            # write them, and the line numbers of the README's links to functions
    python figures/results.py --check    # write nothing; exit 1 where something differs

docs/results/tables.json names the tables of the page (its keys: tabular.py), docs/results/FILE.jsonl holds
the rows of one, as `bench.py --json` writes them.  docs/results/earlier.md is what was measured before these
files existed, and is included as it stands.  docs/results/claims.json: claims.py says what it holds.

"chart" names the bars in their order, by file, drafter and tree, and the one group of prompts that they show.
Page and chart are pure functions of these files: no clock, no machine, no order of a directory.
"""
import argparse
import ast
import json
import re
import sys
from pathlib import Path

import claims
from pictures import DOCS, MARGIN, ROOT, WIDTH, label, legend, picture, rectangle, stroke
from tabular import read_rows, table, unique

HEAD = """# Results

`python figures/results.py` writes this page, and the bar chart of the README, from the JSON lines in
[`docs/results/`](results/); a test fails where it is not what they give. `python figures/paper.py list` names
the tables, `python figures/paper.py NAME` measures one again, and with `--target T --checkpoint FOLDER` that
of a target of your own. [claims.md](claims.md) says which of the papers' claims held.

| column | meaning |
|---|---|
| tok/s | new tokens over all seconds, prefill included, of all prompts |
| speedup | over plain decoding in the same run, by prompt: median [lower quartile – upper quartile] |
| vs generate() | over transformers' own `generate()`, median |
| τ | new tokens a round, the target's own included; prefill outside |
| α | accepted ÷ tested drafted tokens, on chains; trees have none |
| nodes | drafted nodes verified a round, the root not counted |
| draft, verify, other | shares of a round; other: building trees and masks, acceptance, bookkeeping |
| lossless | token for token plain decoding's output (–: drawn tokens, so only the distribution is the same) |
"""


# ---------------------------------------------------------------- the page
def tables(folder):
    """What docs/results/tables.json says."""
    return json.loads((folder / "tables.json").read_text(encoding="utf-8"))


def page(folder):
    """docs/results/ -> the text of docs/results.md."""
    spec = tables(folder)
    parts = [HEAD.rstrip()]
    for section in unique(each["section"] for each in spec["tables"]):
        parts.append(f"## {section}")
        for each in spec["tables"]:
            if each["section"] == section:
                parts += table(each, spec["machines"], folder)
    earlier = folder / "earlier.md"
    if earlier.exists():
        parts.append(earlier.read_text(encoding="utf-8").strip())
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------- the bar chart
def chosen_rows(chart, folder):
    """The rows that the chart's bars name -> [(label, paper, row)]; ValueError where one is missing."""
    bars = []
    for bar in chart["bars"]:
        wanted = bar["drafter"], bar.get("tree"), chart["group"]
        rows = read_rows(folder / bar["file"])
        found = [row for row in rows if (row["drafter"], row["tree"], row["group"]) == wanted]
        if not found:
            raise ValueError(f"{bar['file']} has no row of drafter, tree, group {wanted}")
        bars.append((bar["label"], bar["paper"], found[0]))
    return bars


def bar_chart(chart, folder):
    """Speedup over plain decoding: a bar to the median over prompts, a line from quartile to quartile."""
    bars = chosen_rows(chart, folder)
    left, right, top, pitch = 290, WIDTH - 70, 92, 32
    most = max(row["speedup_high"] for _, _, row in bars)
    most = int(2 * most + 1) / 2                                       # up to the next half
    bottom = top + pitch * len(bars)

    def at(value):
        return left + value / most * (right - left)

    body = [
        label(MARGIN, 34, chart["title"], "bold"),
        label(MARGIN, 54, chart["subtitle"], "small dim"),
        label(at(1), top - 14, "plain decoding", "small middle"),
    ]
    for tick in range(int(most) + 1):
        body.append(stroke(f"M{at(tick):.1f} {top - 8}V{bottom}", "ink-line" if tick == 1 else "grid"))
        body.append(label(at(tick), bottom + 16, f"{tick}×", "small dim middle"))
    for number, (name, paper, row) in enumerate(bars):
        y = top + pitch * number + pitch / 2
        low, middle, high = (at(row[key]) for key in ("speedup_low", "speedup", "speedup_high"))
        body += [
            label(left - 12, y + 4, name, "end"),
            rectangle(left, y - 9, middle - left, 18, f"bar-{paper}", radius=2),
            stroke(f"M{low:.1f} {y - 4}v8m0 -4H{high:.1f}m0 -4v8", "ink-line"),
            label(max(high, middle) + 8, y + 4, f"{row['speedup']:.2f}×", "bold"),
        ]
    papers = dict.fromkeys(paper for _, paper, _ in bars)
    body += legend(MARGIN, bottom + 44, [(f"bar-{paper}", paper) for paper in papers])
    explained = "bar: median over prompts; line: quartiles"
    body.append(label(WIDTH - MARGIN, bottom + 44, explained, "small dim end"))
    return picture(bottom + 62, chart["title"], body)


# ---------------------------------------------------------------- the README's links to functions
LINK = re.compile(r"\[`([\w.]+)`\]\((\w+\.py)#L(\d+)\)")           # [`Drafter.expand`](glide.py#L226)
SLACK = 12                                 # lines that a link may be off: it still shows the function


def line_of(file, name):
    """Where a top-level file defines the function or class `name` (dotted); ValueError where it does not."""
    body, line = ast.parse((ROOT / file).read_text(encoding="utf-8")).body, None
    for part in name.split("."):
        here = [each for each in body if getattr(each, "name", None) == part]
        if not here:
            raise ValueError(f"{file} has no {name}")
        body, line = here[0].body, here[0].lineno
    return line


def with_links(text):
    """The README with the line numbers of its links to functions as they are now."""
    def now(match):
        name, file, line = match.groups()
        found = line_of(file, name)
        if abs(found - int(line)) <= SLACK:
            return match.group()
        return f"[`{name}`]({file}#L{found})"
    return LINK.sub(now, text)


# ---------------------------------------------------------------- all of it
def written(docs):
    """{path: text} of all that this script writes."""
    folder = docs / "results"
    found = {docs / "results.md": page(folder)}
    if (folder / "claims.json").exists():
        found[docs / "claims.md"] = claims.page(folder)
    chart = tables(folder).get("chart")
    if chart:
        found[docs / "arms.svg"] = bar_chart(chart, folder)
    readme = ROOT / "README.md"
    found[readme] = with_links(readme.read_text(encoding="utf-8"))
    return found


def main(argv=None):
    """Exit status: 0, or 1 where --check found a difference."""
    parser = argparse.ArgumentParser(description="Write docs/results.md, docs/claims.md and docs/arms.svg.")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of results.md, arms.svg and results/")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something differs")
    arguments = parser.parse_args(argv)

    differ = []
    for file, text in written(arguments.docs).items():
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            differ.append(file)
            if not arguments.check:
                file.write_text(text, encoding="utf-8")
    names = ", ".join(file.name for file in differ)
    if differ and arguments.check:
        print(f"out of date: {names}; run python figures/results.py", file=sys.stderr)
        return 1
    print(f"written: {names or 'nothing, all is up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
