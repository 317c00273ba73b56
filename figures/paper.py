"""The papers' tables beside ours: measure them, write them into docs/, check every figure there.

    python figures/paper.py measure main chains  # rows go to docs/results/main.jsonl, chains.jsonl
    python figures/paper.py write                # fill README.md and docs/*.md from the rows
    python figures/paper.py gpu                  # what fifteen minutes of a GPU should measure
    python figures/paper.py check                # exit 1 where a page says what no row says

figures/runs.py has the runs and how long each takes.  Comments in a page, which are not rendered,
name the source of what follows them; `write` fills it in, `check` compares it:

    <!--printed main-->                     a block, what bench.py prints of a run
    <!--claims-->                           rows of docs/results.md's first table, by their claims
    <!--table main: paper, speedup, tau-->...<!--end-->     the keys of a table's columns after the
                                                            first, the method; "paper": by hand
    <!--main speedup: glide x cape-->1.81                   a figure of a method, as precise as it
    <!--main speedup: glide x cape / plain-->1.8 [1.7, 1.9] is written; of two methods compared
    <!--main speedup: glide x cape / plain-->open           the same, where no row is there yet
    <!--reproduced-->partly                                 a claim, by the intervals in its line
    <!--given-->2.5x                                        a figure of a paper, or a setting

"tau on story" in place of "tau" is of one kind of text.  Two methods are compared on the same
questions (two turns of a chat are one question): speeds, times and counts by the geometric mean of
their ratios, all else by the mean difference, with the 95 % interval of a bootstrap.

A claim's figures are written so that the paper says "above 1", or "above 0" of a difference;
<!--reproduced 2.17--> says "above 2.17".  It is reproduced ("yes") where all intervals in its line
lie above, "partly" where some do, "no" where none does, and "open" where nothing was measured.
"""
import argparse
import io
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # so that it runs from anywhere

import numpy as np
from runs import RUNS

from runtime.program import program

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
FORMATS = {".1f": ("tokens_per_second", "nodes", "draft_ms", "verify_ms", "other_ms", "own_ms",
                   "plain_ms"),
           ".3f": ("alpha", "alpha_overlap", "c", "ece"), "d": ("k1", "k2")}
RATIOS = ("speedup", "expected_speedup", "swi_ms", "swi_clock", "nodes", "draft_ms")
SAMPLES = 10_000                           # of the bootstrap

# ---------------------------------------------------------------- rows
def name_of(row):
    """The method's name, as bench.py prints it: "glide x cape", "plain"."""
    name = f"{row['drafter']} x {row['tree']}" if row.get("tree") else row["drafter"]
    copies = row.get("batch", 1)
    if row.get("device") == "cuda" and row.get("graphs") is False:
        name += ", without graphs"             # grown.jsonl has both
    return f"{name}, {copies} rows" if copies > 1 else name

@cache
def rows_of(run):
    """The rows of a run, of all its prompts -> {method: row}; {} where it was not measured."""
    path = RESULTS / f"{run}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = map(json.loads, lines)
    return {name_of(row): row for row in rows if row.get("group", "all") == "all"}

def questions(run, method, key):
    """A method's value on each question -> {question: value}, of RATIOS its logarithm.

    "tau on story": of one kind of text.  The turns of one question count as one, by their mean.
    """
    key, _, kind = key.partition(" on ")
    found = {}
    for number, one in enumerate(rows_of(run).get(method, {}).get("by_prompt", [])):
        of_kind = one.get("kind", one.get("group", "all"))
        if kind and of_kind != kind and not of_kind.startswith(f"{kind}/"):
            continue
        value = one.get(key)
        if value is not None and (value > 0 or key not in RATIOS):
            value = np.log(value) if key in RATIOS else value
            found.setdefault(one.get("question", number), []).append(value)
    return {question: np.mean(values) for question, values in found.items()}

def interval(values):
    """95 % of the means of bootstrap samples of the values (n,) -> [low, high]"""
    n = len(values)
    samples = np.random.RandomState(0).randint(0, n, (SAMPLES, n))
    return np.percentile(values[samples].mean(1), [2.5, 97.5]).tolist()

def compare(run, key, first, second=None):
    """Two methods on the same questions -> [mean ratio or difference, low, high]

    second None: the first method alone.  [] without rows; one question has no interval.
    """
    values = questions(run, first, key)
    if second:
        others = questions(run, second, key)
        values = {question: values[question] - others[question]
                  for question in values if question in others}
    if not values:
        return []
    values = np.array(list(values.values()))
    numbers = np.array([values.mean(), *(interval(values) if len(values) > 1 else [])])
    return (np.exp(numbers) if is_ratio(key) else numbers).tolist()

def is_ratio(key):
    return key.partition(" on ")[0] in RATIOS

def values_of(run, key, method):
    """A method's figure -> [value], of a speedup [value, low, high]; [] without a row.

    Speedups and figures of one kind of text are means over questions, all else is over all rounds.
    """
    found = compare(run, key, method)
    if found and key.startswith("speedup"):
        return found
    if " on " in key:
        return found[:1]
    value = rows_of(run).get(method, {}).get(key)
    return [] if value is None else [value]

# ---------------------------------------------------------------- tables
def form_of(key):
    """The format of a key's values."""
    key = key.partition(" on ")[0]
    return next((form for form, keys in FORMATS.items() if key in keys), ".2f")

def cell(run, method, key):
    if method not in rows_of(run):
        return "open"
    found = values_of(run, key, method)
    if not found:
        return "–"
    text = format(found[0], form_of(key))
    if key == "speedup" and len(found) == 3 and method != "plain":
        text += f" [{found[1]:.2f}, {found[2]:.2f}]"
    return text

def provenance(run):
    """Where the rows of a run are from, in a line."""
    rows = list(rows_of(run).values())
    first = rows[0]
    parts = [f"run `{run}`"]
    if "prompts" in first:
        parts.append(f"{first['prompts']} prompts")
    if first.get("temperature"):
        parts.append(f"temperature {first['temperature']:g}")
    if first.get("dtype", "float32") != "float32":
        parts.append(first["dtype"])
    machine = first["machine"].replace("(R)", "").replace(" Processor", "")
    parts += [f"commit {first['commit']}", machine, first["date"]]
    different = [name_of(row).replace(" x ", " × ")
                 for row in rows if row.get("lossless") is False]
    if different:
        parts.append(f"other tokens than plain decoding's: {', '.join(different)}")
    return "; ".join(parts) + "."

def table(match):
    """A match of TABLE -> the same with its cells by the rows."""
    run, keys, body = match.groups()
    head, align, *lines = [line for line in body.splitlines() if line.startswith("|")]
    for number, line in enumerate(lines):
        cells = line.strip("|").split("|")
        method = cells[0].replace(" × ", " x ")
        for column, key in enumerate(keys.split(", "), 1):
            if key != "paper":
                cells[column] = cell(run, method, key)
        lines[number] = f"|{'|'.join(cells)}|"
    below = provenance(run) if rows_of(run) else f"`python figures/paper.py measure {run}`"
    grid = "\n".join([head, align, *lines])
    return f"<!--table {run}: {keys}-->\n\n{grid}\n\n{below}\n\n<!--end-->"

def printed(match):
    """A match of PRINTED -> the same with what bench.py prints of the rows of a run"""
    import bench
    rows = rows_of(match[2])
    if not rows:
        return match[0]
    with redirect_stdout(io.StringIO()) as out:
        bench.print_table(list(rows), list(rows.values()))
    return match[1] + out.getvalue()

def claims(match):
    """A match of CLAIMS -> the same with its rows as docs/results.md shows them"""
    shown = re.sub(r"<!--.*?-->", "", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    rows = {}
    for row in shown.splitlines():
        if row.startswith("|"):
            rows.setdefault(row.split("|")[1], row)
    names = [row.split("|")[1] for row in match[2].splitlines()]
    return match[1] + "".join(f"{rows[name]}\n" for name in names)

# ---------------------------------------------------------------- pages
TABLE = re.compile(r"<!--table (\S+): ([^>]+)-->\n(.*?)<!--end-->", re.S)
PRINTED = re.compile(r"(<!--printed (\S+)-->\n```\n).*?(?=```)", re.S)
CLAIMS = re.compile(r"(<!--claims-->\n\n)((?:\|.*\n)+)")
NUMBER = r"[+-]?\d*\.?\d+"
MARKED = re.compile(rf"<!--([\w/.-]+) ([^:<>]+): ([^<>]+?)-->(open\b|{NUMBER})"
                    rf"( \[{NUMBER}, {NUMBER}\])?")
REPRODUCED = re.compile(r"<!--reproduced ?([\d.]*)-->(yes|partly|no|open)\b")

def pages():
    # README.md, which quotes docs/results.md, comes last.
    return [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]

def as_written(value, text):
    """A value, as precise as the number `text`, and in its form (.76, +0.17, -0.3)."""
    sign = "+" if text[0] in "+-" else ""
    decimals = len(text.partition(".")[2])
    number = f"{value:{sign}.{decimals}f}"
    is_bare = text.lstrip("+-").startswith(".")
    return number.replace("0.", ".", 1) if is_bare else number

def figures_of(match):
    """A match of MARKED -> [value], or [value, low, high], by the rows; []: there is no row."""
    run, key, methods = match.groups()[:3]
    first, divided, second = methods.partition(" / ")
    return compare(run, key, first, second) if divided else values_of(run, key, first)

def figure(match):
    """A match of MARKED -> the same by the rows; "open" where there is no row."""
    text, bracket = match.groups()[3:]
    found = figures_of(match)
    written = "open"
    if found:
        has_interval = len(found) == 3
        if text == "open":
            sign = "+" if has_interval and not is_ratio(match[2]) else ""
            text = f"{sign}{0:{form_of(match[2])}}"
            bracket = has_interval
        written, *ends = (as_written(number, text) for number in found)
        if bracket:
            written += f" [{', '.join(ends)}]"
    return match[0][:match.start(4) - match.start()] + written

def reproduced(line):
    """A line of the claims' table -> the same with its last word by the intervals in it."""
    asked = REPRODUCED.search(line)
    if not asked:
        return line
    above = []
    for match in MARKED.finditer(line):
        found = figures_of(match)
        if len(found) == 3:
            least = float(asked[1] or is_ratio(match[2]))
            above.append(found[1] > least)
    word = "open"
    if above:
        word = "yes" if all(above) else "partly" if any(above) else "no"
    return line[:asked.start(2)] + word + line[asked.end(2):]

def filled(text):
    """A page's text -> the same from the rows"""
    text = CLAIMS.sub(claims, PRINTED.sub(printed, TABLE.sub(table, text)))
    text = MARKED.sub(figure, text)
    return "\n".join(map(reproduced, text.split("\n")))

def write(check=False):
    """Fill all pages from the rows -> 0; check: only say where they differ -> 1 if they do"""
    status = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if not check:
            page.write_text(new, encoding="utf-8")
            continue
        for number, (line, wanted) in enumerate(zip(text.split("\n"), new.split("\n")), 1):
            if line != wanted:
                print(f"{page.name}, line {number}: {line}\n  should be {wanted}", file=sys.stderr)
                status = 1
    if check and not status:
        print("holds")
    return status

# ---------------------------------------------------------------- the command line
# In a dry run the grown target is smaller, and elsewhere.
IN_DRY = "work/7b", "work/dry/7b"
DRY = "--limit 1 --max-new-tokens 4 --device cpu --dtype float32"

def measure(names, dry=False):
    """Measure the named runs, one after the other.

    dry: try them, one prompt on a CPU; rows go to work/dry.
    """
    import columns
    import probe
    for name in names:
        run = RUNS[name]
        path = RESULTS / f"{name}.jsonl"
        if dry:
            path = ROOT / "work" / "dry" / f"{name}.jsonl"
            run = run._replace(flags=f"{run.flags.replace(*IN_DRY).replace('--graphs', '')} {DRY}")
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"{name}: rows go to {path.relative_to(ROOT)}", flush=True)
        if run.methods:
            columns.measure(name, run, path)
        else:
            probe.main([*shlex.split(run.flags), "--json", str(path.relative_to(ROOT))])

# (what the part makes, command, its flag in a dry run, seconds it may take), in order of worth
GPU = [(None, "-m pytest -q -m cuda tests", "--collect-only", 120),
       ("work/7b", "figures/grown.py --out work/7b", "--shape 80m", 200),
       *((f"docs/results/{name}.jsonl", f"figures/paper.py measure {name}", "--dry", 240)
         for name in RUNS if name.startswith("gpu/"))]

def gpu(dry=False):
    """Run the parts of GPU that have not made anything yet, each a process of its own.

    dry: all parts on a CPU, at the 80M shape.
    """
    for made, command, dry_flag, limit in GPU:
        if dry:
            command = f"{command.replace(*IN_DRY)} {dry_flag}"
        elif made and (ROOT / made).exists():
            continue
        print(f"\n$ python {command}", flush=True)
        try:
            subprocess.run([sys.executable, *command.split()], timeout=limit)
        except subprocess.TimeoutExpired:
            print(f"stopped after {limit} seconds")

@program
def main(argv):
    p = argparse.ArgumentParser(description="Measure the papers' tables; write and check docs/.")
    p.add_argument("verb", choices=("measure", "gpu", "write", "check"))
    p.add_argument("names", nargs="*", help="measure: runs of figures/runs.py")
    p.add_argument("--dry", action="store_true", help="measure, gpu: try it, rows go to work/dry")
    a = p.parse_args(argv)
    unknown = [name for name in a.names if name not in RUNS]
    if unknown:
        p.error(f"figures/runs.py has no run {unknown[0]}")
    os.chdir(ROOT)
    if a.verb in ("write", "check"):
        return write(check=a.verb == "check")
    return gpu(a.dry) if a.verb == "gpu" else measure(a.names, a.dry)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
