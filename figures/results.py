"""Write docs/results.md and the bar chart docs/arms.svg from the measured JSON lines in docs/results/.

    python figures/results.py            # write them, and the line numbers of the README's links to functions
    python figures/results.py --check    # write nothing; exit 1 where something differs

docs/results/tables.json names the tables of the page, docs/results/FILE.jsonl holds the rows of one, as
`bench.py --json` writes them; docs/results/earlier.md is what was measured before these files existed, and is
included as it stands.

    key of a table | meaning
    section        | heading under which it stands, such as a paper's name
    title, claim   | what it is, and which claim of which paper it shows, or does not
    command        | the command that made it, without its --json
    file           | its rows, in docs/results/; while it is missing, the page says "not measured yet"
    machine        | a key of "machines"
    measured       | date and commit
    groups         | groups of prompts to show (default: all that the rows have)
    columns        | names of COLUMNS, or "Heading=key:format" of a row (default: DEFAULT)
    note           | a remark under it

"chart" names the bars in their order, by file, drafter and tree, and the one group of prompts that they show.
Page and chart are pure functions of these files: no clock, no machine, no order of a directory.
"""
import argparse
import ast
import json
import re
import sys
from pathlib import Path

from pictures import DOCS, MARGIN, ROOT, WIDTH, label, legend, picture, rectangle, stroke

HEAD = """# Results

`python figures/results.py` writes this page, and the bar chart of the README, from the JSON lines in
[`docs/results/`](results/); a test fails where it is not what they give. To measure a table again, run its
command with `--json docs/results/FILE.jsonl` added, then the script.

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


# ---------------------------------------------------------------- columns: how a row shows one of its values
def name_of(row):
    """The arm's name, as bench.py prints it."""
    if row.get("tree"):
        return f"{row['drafter']} × {row['tree']}"
    return row["drafter"]


def show(value, form):
    """A number in the given format; a dash where there is none."""
    if value is None:
        return "–"
    return format(value, form)


def speedup(row):
    return f"{row['speedup']:.2f}× [{row['speedup_low']:.2f}–{row['speedup_high']:.2f}]"


def share(row, what):
    """A share of a round; arms without rounds of their own (plain decoding, transformers) have none."""
    if row["tau"] is None:
        return "–"
    return f"{row[f'share_{what}']:.0%}"


def milliseconds(row):
    if row["tau"] is None:
        return "–"
    return f"{row['draft_ms'] + row['verify_ms'] + row['other_ms']:.1f}"


def lossless(row):
    return {True: "yes", False: "**NO**", None: "–"}[row["lossless"]]


COLUMNS = {
    "arm": ("arm", name_of),
    "tok/s": ("tok/s", lambda row: f"{row['tokens_per_second']:.1f}"),
    "speedup": ("speedup", speedup),
    "vs generate()": ("vs generate()", lambda row: f"{row['speedup_vs_generate']:.2f}×"),
    "tau": ("τ", lambda row: show(row["tau"], ".2f")),
    "alpha": ("α", lambda row: show(row["alpha"], ".3f")),
    "nodes": ("nodes", lambda row: show(row["nodes"], ".1f")),
    "draft": ("draft", lambda row: share(row, "draft")),
    "verify": ("verify", lambda row: share(row, "verify")),
    "other": ("other", lambda row: share(row, "other")),
    "ms/round": ("ms/round", milliseconds),
    "lossless": ("lossless", lossless),
    "tau/depth": ("τ/depth", lambda row: show(row["alpha_depth"], ".2f")),
    "c": ("c", lambda row: show(row["c"], ".3f")),
    "E(Spd.)": ("E(Spd.)", lambda row: show(row["expected_speedup"], ".2f")),
    "overlap": ("Σ min(p_T, p_D)", lambda row: show(row["alpha_overlap"], ".3f")),
    "optimality": ("tree optimality", lambda row: show(row["tree_optimality"], ".3f")),
    "SWI": ("SWI, measured", lambda row: show(row.get("swi_measured"), ".2f")),
    "SWI (MS)": ("SWI, by weights", lambda row: show(row.get("swi_ms"), ".2f")),
    "runs": ("runs", lambda row: ", ".join(map(str, row["runs"] or ())) or "–"),
}
DEFAULT = ["arm", "tok/s", "speedup", "vs generate()", "tau", "alpha", "nodes", "draft", "verify", "other",
           "ms/round", "lossless"]


def column(text):
    """A name of COLUMNS, or "Heading=key:format" -> (heading, function of a row)."""
    if text in COLUMNS:
        return COLUMNS[text]
    heading, _, key = text.rpartition("=")
    key, _, form = key.partition(":")
    return heading or key, lambda row: show(row[key], form)


# ---------------------------------------------------------------- one table
def read_rows(path):
    """JSON lines -> list of rows."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def tables(folder):
    """What docs/results/tables.json says."""
    return json.loads((folder / "tables.json").read_text(encoding="utf-8"))


def unique(values):
    """The different values, in their order."""
    return list(dict.fromkeys(values))


def setting(rows):
    """What the rows ran under: "target `x`, float32, cpu (4 threads), temperature 0, Python 3.11"."""
    def listed(key):
        return "/".join(f"{value:g}" if isinstance(value, float) else str(value)
                        for value in unique(row[key] for row in rows))
    if "dtype" not in rows[0]:                   # not a row of bench.py's table
        return ""
    where = listed("device")
    if where == "cpu":
        where += f" ({listed('threads')} threads)"
    parts = [f"target `{listed('target')}`", listed("dtype"), where, f"temperature {listed('temperature')}"]
    parts += [f"{package} {version}" for package, version in rows[0]["versions"].items()]
    return ", ".join(parts)


def grid(rows, columns):
    """The rows as a Markdown table: words to the left, numbers to the right."""
    chosen = [column(name) for name in columns]
    align = ["---"] + ["---:"] * (len(chosen) - 1)
    lines = [[heading for heading, _ in chosen], align]
    lines += [[cell(row).replace("|", "\\|") for _, cell in chosen] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def baseline(rows):
    """The arm that the speedups are over: the one whose every speedup is 1."""
    for row in rows:
        if row.get("target_ms") and row["speedup_low"] == row["speedup"] == row["speedup_high"] == 1:
            return row
    return None


def remarks(rows):
    """The baseline of a table, and where an output left it."""
    base = baseline(rows)
    if base:
        yield (f"Baseline: {name_of(base)}, {base['target_ms']:.2f} ms a token; "
               f"distinct 4-grams of its output: {base['distinct_4grams'] or 0:.0%}.")
    for row in rows:
        away = row.get("first_divergence")
        if away:
            gap = ""
            if away["logit_gap"] is not None:
                gap = f": the target's logits of the two tokens differ by {away['logit_gap']:.2g} there"
            where = f"token {away['token']} of prompt {away['prompt'] + 1}"
            yield f"{name_of(row)} leaves plain decoding at {where}{gap}."


def table(spec, machines, folder):
    """One table of the page, with all that is needed to judge it and to make it again."""
    parts = [f"### {spec['title']}"]
    if spec.get("claim"):
        parts.append(spec["claim"])
    parts.append(f"```\n{spec['command']}\n```")
    path = folder / spec["file"]
    if not path.exists():
        return parts + ["*Not measured yet.*"]

    rows = read_rows(path)
    where = [machines[spec["machine"]], spec.get("measured"), setting(rows)]
    parts.append("; ".join(text for text in where if text) + ".")
    groups = spec.get("groups") or unique(row.get("group") for row in rows)
    for group in groups:
        chosen = [row for row in rows if row.get("group") == group]
        if group is not None and (len(groups) > 1 or group != "all"):
            parts.append(f"**{group}**, {chosen[0]['prompts']} prompts")
        parts.append(grid(chosen, spec.get("columns", DEFAULT)))
        parts += remarks(chosen)
    if spec.get("note"):
        parts.append(spec["note"])
    return parts


# ---------------------------------------------------------------- the page
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
    chart = tables(folder).get("chart")
    if chart:
        found[docs / "arms.svg"] = bar_chart(chart, folder)
    readme = ROOT / "README.md"
    found[readme] = with_links(readme.read_text(encoding="utf-8"))
    return found


def main(argv=None):
    """Exit status: 0, or 1 where --check found a difference."""
    parser = argparse.ArgumentParser(description="Write docs/results.md and docs/arms.svg.")
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
