"""The papers' tables beside ours: measure them, write them into docs/, check every figure there.

    python figures/paper.py list                 # the runs, how long each takes, what is there
    python figures/paper.py measure main chains  # rows go to docs/results/main.jsonl, chains.jsonl
    python figures/paper.py write                # fill README.md and docs/*.md from the rows
    python figures/paper.py check                # exit 1 where a page says what no row says

figures/tables.py has the runs and the tables.  A page says in comments, which are not rendered,
what comes from rows; `write` fills it in, `check` compares it:

    <!--table glide-table-1-->...<!--end-->                 a table, and its comparisons
    <!--printed main-->, and a code block below it          what bench.py prints of these rows
    <!--main speedup: glide x cape-->1.81                   a figure of an arm, as precise as it is
    <!--main speedup: glide x cape / plain-->1.8 [1.7, 1.9] written; of two arms compared
    <!--given-->2.5x                                        a figure of a paper, or a setting

In place of an arm a pattern may stand, "cascade(base, k*": the best arm that it fits.

Prose without a comment may not have figures with a decimal point, "x" or "%".

A comparison is paired over the questions of a run (two turns of a chat are one question): of what
is a ratio the mean of logarithms, of all else the mean difference.  The interval is a bootstrap's,
95 %, p that of a sign-flip test, both as they are.  The verdict is by p adjusted by Holm, for all
claims of one paper on one page: below .05 it is "held" or "not held", by the side; else, or with
fewer than 12 questions, "undecided".  That two arms are equal is held if two one-sided tests say
that they are within 5 % of each other, and not held if the interval lies outside of that.
"""
import argparse
import importlib
import json
import os
import re
import shlex
import sys
from collections import namedtuple
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "figures")]              # so that it runs from anywhere

import numpy as np

from runtime import report
from tables import RUNS, TABLES

RESULTS = ROOT / "docs" / "results"
# {key of a row: (its heading, its format)}
COLUMNS = {
    "tokens_per_second": ("tok/s", ".1f"), "speedup": ("speedup", ".2f"), "tau": ("τ", ".2f"),
    "alpha": ("α", ".3f"), "alpha_overlap": ("Σ min(p_T, p_D)", ".3f"),
    "alpha_depth": ("τ/depth", ".2f"), "nodes": ("nodes", ".1f"), "c": ("c", ".3f"),
    "expected_speedup": ("E(Spd.)", ".2f"), "draft_ms": ("draft ms", ".1f"),
    "verify_ms": ("verify ms", ".1f"), "other_ms": ("other ms", ".1f"),
    "swi_ms": ("SWI, by weights", ".2f"), "swi_pw": ("SWI, by measured c", ".2f"),
    "swi_clock": ("by the clock", ".2f"), "ewif": ("EWIF", ".2f"), "k1": ("k1", "d"),
    "k2": ("k2", "d"), "glide": ("+GLIDE, tok/s", ".1f"), "plain": ("only, tok/s", ".1f"),
    "ece": ("ECE", ".3f"), "head": ("head", "d"), "mass": ("mass on what followed", ".3f"),
    "before": ("names the token before", ".2f"), "ratio": ("T_v(n) ÷ T_v(1)", ".2f"),
    "ms": ("ms", ".2f"), "steps": ("plain steps of a round", ".2f"),
    "least_alpha": ("faster from α on", ".2f")}
RATIOS = ("speedup", "expected_speedup", "swi_ms", "swi_pw", "swi_clock", "nodes", "draft_ms")
SIGNIFICANT, MARGIN, ENOUGH = 0.05, 0.05, 12
DRAWS = 10_000                             # the smallest p there can be is 1 / (1 + DRAWS)

# ---------------------------------------------------------------- rows
def name_of(row):
    """The arm's name, as bench.py prints it: "glide x cape", "plain"."""
    name = f"{row['drafter']} x {row['tree']}" if row.get("tree") else row["drafter"]
    copies = row.get("batch", 1)
    if row.get("device") == "cuda" and row.get("graphs") is False:
        name += ", without graphs"             # grown.jsonl has both
    return f"{name}, {copies} copies" if copies > 1 else name

@cache
def rows_of(run):
    """The rows of a run -> {(arm, kind of text): row}; {} where it was not measured."""
    path = RESULTS / f"{run}.jsonl"
    if run not in RUNS or not path.exists():
        return {}
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {(name_of(row), row.get("group", "all")): row for row in rows}

def arms_of(run):
    return [arm for arm, kind in rows_of(run) if kind == "all"]

def questions(run, arm, key, kind="all"):
    """An arm's value on each question of a kind of text -> {question: value}, of ratios its log.

    A question whose row has several turns has the mean of their values.
    """
    found = {}
    row = rows_of(run).get((arm, "all"), {})
    for number, one in enumerate(row.get("by_prompt", [])):
        of_kind = one.get("kind", one.get("group", "all"))
        if kind != "all" and of_kind != kind and not of_kind.startswith(f"{kind}/"):
            continue
        value = one.get(key)
        if value is not None and (value > 0 or key not in RATIOS):
            value = np.log(value) if key in RATIOS else value
            found.setdefault(one.get("question", number), []).append(value)
    return {question: np.mean(values) for question, values in found.items()}

def value_of(run, arm, key):
    """An arm's figure.  key: of a row, "tau on story" for one kind of text.  None: it has none.

    A speedup is the geometric mean over the questions; all else is over all rounds of all prompts.
    """
    key, _, kind = key.partition(" on ")
    if "*" in arm:
        arm = best(run, key, kind or "all", arm)
    if key == "speedup":
        logs = questions(run, arm, key, kind or "all")
        if logs:
            return float(np.exp(np.mean(list(logs.values()))))
    row = rows_of(run).get((arm, kind or "all"), {})
    if key.endswith("_ms") and key != "swi_ms" and row.get("tau") is None:
        return None                        # plain decoding has no rounds
    return row.get("speedup" if key == "median" else key)

# ---------------------------------------------------------------- intervals and tests
@cache
def signs(n):
    """DRAWS rows of n signs, the same in all releases of numpy."""
    return 2.0 * np.random.RandomState(0).randint(0, 2, (DRAWS, n)) - 1.0              # (DRAWS, n)

def sign_flips(differences, sides=2):
    """How often would chance give a sum as far above zero?  With two sides: as far from zero.

    If two arms did not differ, each question's difference could as well have the other sign.  The
    test assumes symmetric differences; so speeds are compared by logarithms.
    """
    sums = signs(len(differences)) @ differences                                       # (DRAWS,)
    observed = differences.sum()
    if sides == 2:
        sums, observed = abs(sums), abs(observed)
    # The observed signs are one of the possible ways.
    return (1 + (sums >= observed - 1e-9).sum()) / (1 + DRAWS)

@cache
def samples(n):
    """DRAWS bootstrap samples of n numbers."""
    return np.random.RandomState(0).randint(0, n, (DRAWS, n))

def interval(values):
    """95 % of the means of DRAWS bootstrap samples of the values (n,) -> [low, high]"""
    means = values[samples(len(values))].mean(1)
    return np.percentile(means, [2.5, 97.5]).tolist()

def holm(ps):
    """p adjusted for their number m (Holm 1979): the smallest times m, the next times m - 1 ..."""
    order = sorted(range(len(ps)), key=ps.__getitem__)
    adjusted = [0.0] * len(ps)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, (len(ps) - rank) * ps[i])
        adjusted[i] = min(1.0, largest)
    return adjusted

# One claim, measured.  effect, low, high: a ratio, or a difference; above: on how many of n
# questions the first arm is; margin: (low, high) within which two arms are equal, or None
Compared = namedtuple("Compared", "what key first second effect low high above n p margin")

def best(run, key, kind, patterns, first=None):
    """The best, by its mean, of all arms but `first` that fit a pattern; None: no arm does.

    The pattern "*" means all arms but the mixtures with the tree of `first`.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = {}
    for arm in arms_of(run):
        fits = any(fnmatchcase(arm, pattern) for pattern in patterns)
        if "*" in patterns:
            same_tree = arm.partition(" x ")[2] == first.partition(" x ")[2]
            fits = not (same_tree and arm.startswith("mixture("))
        values = questions(run, arm, key, kind)
        if fits and arm != first and values:
            found[arm] = np.mean(list(values.values()))
    return max(found, key=found.get) if found else None

def compare(run, what, key, first, second):
    """A claim of a table -> Compared; None where one of its arms was not measured."""
    equal = key.startswith("=")
    key, _, kind = key.removeprefix("=").partition(" on ")
    if "*" in first:
        first = best(run, key, kind or "all", first)
    second = best(run, key, kind or "all", second, first)
    x, y = (questions(run, arm, key, kind or "all") for arm in (first, second))
    differences = np.array([x[question] - y[question] for question in x if question in y])
    if not len(differences):
        return None
    n = len(differences)
    numbers = np.array([differences.mean(), *interval(differences)])
    above = (differences > 0).sum()
    margin = None
    p = sign_flips(differences)
    if equal:
        within = np.log1p(MARGIN) if key in RATIOS else MARGIN * abs(np.mean(list(y.values())))
        margin = np.array([-within, within])
        p = max(sign_flips(within + differences, 1), sign_flips(within - differences, 1))
    if key in RATIOS:
        numbers = np.exp(numbers)
        margin = np.exp(margin) if equal else None
    words = f"{key} on {kind}" if kind else key
    return Compared(what, words, first, second, *numbers.tolist(), above, n, p, margin)

def verdict(one, adjusted):
    """A Compared and its p by Holm -> in a word or two"""
    if one.margin is not None:
        low, high = one.margin
        if adjusted < SIGNIFICANT and one.n >= ENOUGH:
            return "held"
        outside = one.high < low or high < one.low
        return "**not held**" if outside and one.n >= ENOUGH else "undecided"
    if adjusted >= SIGNIFICANT or one.n < ENOUGH:
        return "undecided"
    is_ratio = one.key.partition(" on ")[0] in RATIOS
    return "held" if one.effect > (1 if is_ratio else 0) else "**not held**"

def comparisons(names):
    """The claims of a page's tables -> {table: [(Compared, verdict)]}"""
    families = {}
    for name in names:
        table = TABLES[name]
        for what, key, first, second in table.claims:
            one = compare(table.run, what, key, first, second)
            if one:
                families.setdefault(table.paper, []).append((name, one))
    found = {name: [] for name in names}
    for family in families.values():
        for (name, one), p in zip(family, holm([one.p for _, one in family])):
            found[name].append((one, verdict(one, p)))
    return found

# ---------------------------------------------------------------- Markdown
def shown(name):
    return name.replace(" x ", " × ")

def column(key):
    """A key as table columns have it, "tau on story" or "position 3" -> its heading and format."""
    key, _, kind = key.partition(" on ")
    name, _, number = key.partition(" ")
    words, form = COLUMNS.get(name, (name, ".2f"))
    words = f"{words} {number}".strip()
    return f"{words}, {kind.rpartition('/')[2]}" if kind else words, form

def cell(run, arm, key):
    value = value_of(run, arm, key)
    if value is None:
        return "–"
    text = format(value, column(key)[1])
    logs = questions(run, arm, "speedup") if key == "speedup" else {}
    if len(logs) > 1 and arm != "plain":
        low, high = np.exp(interval(np.array(list(logs.values()))))
        text += f" [{low:.2f}, {high:.2f}]"
    return text

def markdown(lines, words):
    """A grid of strings, the headings first -> Markdown, with `words` columns set to the left."""
    align = ["---"] * words + ["---:"] * (len(lines[0]) - words)
    return "\n".join(f"|{'|'.join(cells)}|" for cells in [lines[0], align, *lines[1:]])

def grid(table):
    """The arms of a table, beside what the paper prints."""
    arms = table.arms or [(arm, "", {}) for arm in arms_of(table.run)]
    arms = [line for line in arms if (line[0], "all") in rows_of(table.run)]
    printed = {key for _, _, found in arms for key in found}
    named = any(words for _, words, _ in arms)
    top = ["arm", "in the paper"] if named else ["arm"]
    for key in table.columns:
        words, _ = column(key)
        top += [f"{words}, paper", "ours"] if key in printed else [words]
    lines = [top]
    for arm, words, found in arms:
        line = [shown(arm), words or "–"] if named else [shown(arm)]
        for key in table.columns:
            line += [found.get(key, "–")] if key in printed else []
            line.append(cell(table.run, arm, key))
        if table.arms or set(line[1:]) != {"–"}:                # plain decoding has no tau
            lines.append(line)
    return markdown(lines, 2 if named else 1)

def claims(made):
    """[(Compared, verdict)] -> Markdown"""
    lines = [["claim", "compared", "ours [95 %]", "above", "p", "verdict"]]
    for one, words in made:
        is_ratio = one.key.partition(" on ")[0] in RATIOS
        form = ".2f" if is_ratio else "+.3f"
        effect = f"{one.effect:{form}} [{one.low:{form}}, {one.high:{form}}]"
        sign = "÷" if is_ratio else "−"
        arms = f"{column(one.key)[0]}: {shown(one.first)} {sign} {shown(one.second)}"
        if one.margin is not None:
            arms += ", equal"
        lines.append([one.what, arms, effect, f"{one.above}/{one.n}", f"{one.p:.2g}", words])
    return markdown(lines, 2)

def provenance(run, known):
    """Where the rows of a run are from, in a sentence; known: the runs of which a page said it."""
    if run in known:
        return f"run `{run}`, as above."
    rows = [row for (_, kind), row in rows_of(run).items() if kind == "all"]
    first = rows[0]
    parts = [f"{first['prompts']} prompts"] if "prompts" in first else []
    if first.get("temperature"):
        parts.append(f"temperature {first['temperature']:g}")
    if first.get("dtype", "float32") != "float32":
        parts.append(first["dtype"])
    parts += [f"run `{run}`", f"commit {first['commit']}", first["machine"], first["date"]]
    # Plain decoding is what the others are compared with.
    tested = [row for row in rows if row.get("lossless") is not None and not row.get("baseline")]
    differ = [name_of(row) for row in tested if not row["lossless"]]
    if tested:
        parts.append(f"lossless: {len(tested) - len(differ)} of {len(tested)} arms compared token "
                     "for token")
    if differ:
        parts.append(f"not {', '.join(map(shown, differ))}")
    known.add(run)
    return "; ".join(parts) + "."

def block(name, made, known):
    """What stands between a table's comments.  made: its comparisons; known: see provenance."""
    table = TABLES[name]
    if not rows_of(table.run):
        return f"*Not measured: `python figures/paper.py measure {table.run}`.*"
    where = f"In the paper: {table.where}. Ours: " if table.where else ""
    parts = [grid(table), where + provenance(table.run, known)]
    if made:
        parts.append(claims(made))
    return "\n\n".join(parts)

# ---------------------------------------------------------------- the pages
BLOCK = re.compile(r"<!--table (\S+)-->\n(.*?)<!--end-->", re.S)
PRINTED = re.compile(r"<!--printed (\S+)-->\n```\n(.*?)```", re.S)
NUMBER = r"[+−-]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
MARKED = re.compile(rf"<!--([\w/.-]+) ([^:<>]+): ([^<>]+?)-->({NUMBER})((?:x|×| ?%)?)"
                    rf"( \[{NUMBER}, {NUMBER}\])?")

def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

def as_written(value, text, percent=False):
    """A value, as precise as the number `text`, and in its form (.76, +0.17, −0.3)."""
    value = 100 * value if percent else value
    number = f"{abs(value):.{len(text.partition('.')[2])}f}"
    if text.lstrip("+−-").startswith("."):
        number = number.removeprefix("0")
    if value < 0:
        return ("−" if "−" in text else "-") + number
    return "+" * text.startswith("+") + number

def figure(match):
    """A marked figure -> as the rows have it; as it stands where there is no row, for check()."""
    run, key, arms, text, unit, bracket = match.groups()
    first, divided, second = arms.partition(" / ")
    low = high = None
    if divided:
        one = compare(run, "", key, first, second)
        value, low, high = (one.effect, one.low, one.high) if one else (None, None, None)
    else:
        value = value_of(run, first, key)
        logs = questions(run, first, "speedup") if key == "speedup" else {}
        if len(logs) > 1:
            low, high = np.exp(interval(np.array(list(logs.values()))))
    if value is None or bracket and low is None:
        return None
    percent = "%" in unit
    found = as_written(value, text, percent) + unit
    if bracket:
        low_text, high_text = re.findall(NUMBER, bracket)
        found += (f" [{as_written(low, low_text, percent)}, "
                  f"{as_written(high, high_text, percent)}]")
    return match[0][:match.start(4) - match.start()] + found

def printed(run):
    """What bench.py prints of all prompts of a run."""
    rows = {arm: row for (arm, kind), row in rows_of(run).items() if kind == "all"}
    return report.table(list(rows), list(rows.values())) + "\n" if rows else None

def filled(text):
    """A page's text -> the same from the rows, and [what has no row]"""
    missing, known = [], set()
    made = comparisons([name for name, _ in BLOCK.findall(text) if name in TABLES])

    def of_table(match):
        # A table whose run was not measured says so itself, and how to measure it.
        if match[1] not in TABLES:
            missing.append(f"table {match[1]}")
            return match[0]
        return f"<!--table {match[1]}-->\n\n{block(match[1], made[match[1]], known)}\n\n<!--end-->"

    def of_print(match):
        found = printed(match[1])
        if found is None:
            missing.append(f"printed {match[1]}")
            return match[0]
        return f"<!--printed {match[1]}-->\n```\n{found}```"

    def of_figure(match):
        found = figure(match)
        if found is None:
            missing.append(match[0])
        return found or match[0]
    text = PRINTED.sub(of_print, BLOCK.sub(of_table, text))
    return MARKED.sub(of_figure, text), missing

# What may have a decimal point and is no figure of ours: ids of arXiv, versions, models, sections
NO_FIGURE = re.compile(
    r"\d{4}\.\d{4,5}|\d+\.\d+\.\d+\S*|\b(?:Qwen|Phi-|GPT-|Llama-|Vicuna-?)\d\.\d|"
    r"(?:Python|torch|transformers|CUDA|§+|[Ss]ections?|Theorems?|Corollary) ?\d+(?:\.\d+)+\S*"
    r"(?:(?:,| to| and| or) \d+(?:\.\d+)+)*")
BARE = re.compile(r"(?<![\w/.])[+−-]?(?:\d+\.\d+|\.\d+)(?:x|×| ?%)?(?![\w/])|"
                  r"(?<![\w/.])\d+(?:x\b|×| ?%)")

def unmarked(text):
    """The figures in a page's prose that no comment gives a source -> [(line, figure)]"""
    def blank(match):
        return re.sub(r"[^\n]", " ", match[0])
    given = re.compile(rf"<!--given-->{NUMBER}[^\s|,;:)]*")
    for pattern in (BLOCK, re.compile(r"^```.*?^```", re.S | re.M),
                    MARKED, given, re.compile(r"<!--.*?-->", re.S), re.compile(r"`[^`]*`"),
                    re.compile(r"\]\([^)]*\)"), NO_FIGURE):
        text = pattern.sub(blank, text)
    return [(text[:match.start()].count("\n") + 1, match[0]) for match in BARE.finditer(text)]

def write():
    """Fill all pages -> exit status"""
    rows_of.cache_clear()
    for page in pages():
        text = page.read_text(encoding="utf-8")
        found, missing = filled(text)
        if found != text:
            page.write_text(found, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")
        for each in missing:
            print(f"{page.relative_to(ROOT)}: no row for {each}", file=sys.stderr)
    return 0

def check(which=None):
    """Compare all pages with the rows, and look for figures without a source -> exit status"""
    rows_of.cache_clear()
    wrong = []
    for page in which or pages():
        text = page.read_text(encoding="utf-8")
        found, missing = filled(text)
        wrong += [f"{page.name}: no row for {each}" for each in missing]
        if found != text:
            lines = zip(text.splitlines(), found.splitlines())
            at, (old, new) = next(((number, pair) for number, pair in enumerate(lines, 1)
                                   if pair[0] != pair[1]), (0, ("", "")))
            wrong.append(f"{page.name}, line {at}: not what the rows give\n  is     {old}\n"
                         f"  should {new}")
        wrong += [f"{page.name}, line {line}: {bare} names no row" for line, bare in unmarked(text)]
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0

# ---------------------------------------------------------------- the command line
def measure(names):
    """Run the commands of the named runs -> exit status, of the first that fails."""
    os.chdir(ROOT)
    for name in names:
        command = RUNS[name].command
        if command is None:
            print(f"{name}: {RUNS[name].old}", file=sys.stderr)
            return 2
        _, script, *arguments = shlex.split(command)
        print(f"\n$ {command}", flush=True)
        program = importlib.import_module(Path(script).stem)
        status = program.main([*arguments, "--json", f"docs/results/{name}.jsonl"])
        if status:
            return status
    return 0

def show_list():
    for name, run in RUNS.items():
        rows = list(rows_of(name).values())
        there = f"{rows[0]['commit']}, {rows[0]['date']}" if rows else "not measured"
        takes = f"{run.minutes:g} min" if run.command else "-"
        quiet = "" if run.command is None else "counts" if run.counted else "timed"
        print(f"{name:24} {takes:>8}  {quiet:7} {there}")
    return 0

def main(argv=None):
    p = argparse.ArgumentParser(description="Measure the papers' tables; write and check docs/.")
    verbs = p.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="the runs, how long each takes, what was measured")
    verbs.add_parser("measure", help="run commands, alone on the machine").add_argument(
        "names", nargs="+", choices=RUNS, metavar="NAME", help="as `list` prints them")
    verbs.add_parser("write", help="fill README.md and docs/*.md from the rows")
    verbs.add_parser("check", help="exit 1 where a page says what no row says")
    a = p.parse_args(argv)
    if a.verb == "measure":
        return measure(a.names)
    return {"list": show_list, "write": write, "check": check}[a.verb]()

if __name__ == "__main__":
    sys.exit(main())
