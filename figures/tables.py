"""Measured rows as Markdown: a table with the paper's values next to ours, paired tests, verdicts on claims.

A table is an entry of docs/results/tables.json, its rows are the lines of docs/results/FILE.jsonl, a claim is
an entry of docs/results/claims.json, made of comparisons: docs/results/README.md explains their keys.

The verdict is a test over prompts: MORE or LESS where p < 0.05, else LEVEL.  Without values of each prompt
there is no test and no verdict: UNTESTED.
"""
import fnmatch
import functools
import json
import math
import re
import statistics
from collections import namedtuple
from pathlib import Path

import numpy as np

MORE, LESS, LEVEL, UNTESTED = "more", "less", "level", "untested"
SIGNIFICANT = 0.05
SPEEDS = ("speedup", "expected_speedup", "swi_measured", "swi_ms")     # compared by their ratios
MILLION = 1_000_000                        # tokens over which a drafter's gain is measured
DRAWS = 10_000                             # of signs; the smallest p there can be is 1 / (1 + DRAWS)

# ---------------------------------------------------------------- rows
def read_rows(path):
    """JSON lines -> rows; "totals": tokens a second over the baseline's."""
    # A page of claims asks for the same rows a hundred times.
    return list(parsed(path, path.stat().st_mtime_ns, path.stat().st_size))

@functools.cache
def parsed(path, *version):
    """The rows of a file as it is now."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    for row in rows:
        base = baseline([other for other in rows if other.get("group") == row.get("group")])
        if base and "tokens_per_second" in row:
            row["totals"] = row["tokens_per_second"] / base["tokens_per_second"]
    return rows

def baseline(rows):
    """The arm that the speedups are over: the one whose every speedup is 1."""
    for row in rows:
        if row.get("target_ms") and row["speedup_low"] == row["speedup"] == row["speedup_high"] == 1:
            return row
    return None

def name_of(row):
    """The arm's name: "glide × cape", "plain"."""
    return f"{row['drafter']} × {row['tree']}" if row.get("tree") else row["drafter"]

def rows_of_log(path, drafters=("*",)):
    """train.py's log.jsonl -> rows of its last evaluation: of each drafter, over all text and by kind.

    drafters: patterns of names.  curve: [[tokens seen, α]] of all evaluations; alpha_first: at the first one;
    gain: of α, over the last MILLION tokens, None where they were fewer; init: began with trained drafters.
    """
    found, init = {}, False                    # {(drafter, kind): {tokens: figures}}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "command" in row:
            init = "--init" in row["command"]
            if "--resume" not in row["command"]:
                found = {}                     # an earlier run's
        for name, evaluation in row.items():
            if isinstance(evaluation, dict) and any(fnmatch.fnmatch(name, pattern) for pattern in drafters):
                for kind, figures in {"all": evaluation, **evaluation["by_kind"]}.items():
                    found.setdefault((name, kind), {})[row["tokens_seen"]] = figures
    rows = []
    for (name, kind), points in found.items():
        curve = [[tokens, points[tokens]["alpha"]] for tokens in sorted(points)]
        (_, first), (last, alpha) = curve[0], curve[-1]
        gain = alpha - np.interp(last - MILLION, *zip(*curve)) if last >= MILLION else None
        rows.append({"drafter": name, "tree": "chain", "group": kind, "alpha": alpha, "alpha_first": first,
                     "tau": points[last]["tau"], "gain": gain, "tokens_trained": last, "init": init,
                     "curve": curve})
    return rows

def value_of(row, key):
    """A row's value by its key, by "position 5" of its chains, or by "bin 0.9" of its confidences."""
    what, _, number = key.partition(" ")
    if what == "position":
        # The share accepted of the chains that have a token there, counted from 1
        found = row["positions"][int(number) - 1:int(number)]
        return found[0]["accepted"] / found[0]["drafted"] if found else None
    if what == "bin":
        found = [each for each in row["bins"] if abs(each["low"] - float(number)) < 1e-9]
        return found[0]["acceptance"] if found else None
    return row.get(key)

def unique(values):
    """The different values, in their order."""
    return list(dict.fromkeys(values))

# ---------------------------------------------------------------- columns: how a row shows one of its values
# {name: (heading, format of a row)}
COLUMNS = json.loads(Path(__file__).with_name("columns.json").read_text(encoding="utf-8"))
WORDS = {re.match(r"{(\w+)", form)[1]: heading for heading, form in COLUMNS.values()}      # of a row's keys
DEFAULT = ["arm", "tok/s", "speedup", "totals", "vs generate()", "tau", "alpha", "nodes", "draft", "verify",
           "other", "ms/round", "lossless"]
KINDS = ["speedup=speedup:.2f", "tau"]
OF_ROUNDS = ("share_draft", "share_verify", "share_other", "draft_ms", "round_ms")

def cells_of(row, columns):
    """The row's cells; a dash where it has no such value."""
    shown = {**row, "name": name_of(row)}
    if row.get("tau") is None:             # plain decoding and transformers: no rounds to speak of
        shown |= dict.fromkeys(OF_ROUNDS)
    shown["lossless"] = {True: "yes", False: "**NO**"}.get(row.get("lossless"))
    cells = []
    for name in columns:
        what, _, number = name.partition(" ")
        if what in ("position", "bin") and number:
            shown[what] = value_of(row, name)
        try:
            cell = heading_and_form(name)[1].format(**shown)
        except (KeyError, TypeError):      # nothing there; None has no format
            cell = "–"
        cells.append("–" if cell == "None" else cell)
    return cells

def heading_and_form(name):
    """A name of COLUMNS, "position 5", "bin 0.9" or "Heading=key:format" -> (heading, format)."""
    if name in COLUMNS:
        return COLUMNS[name]
    what = name.partition(" ")[0]
    if what in ("position", "bin"):
        return name, f"{{{what}:.2f}}"
    heading, _, form = name.rpartition("=")
    return heading or form.partition(":")[0], f"{{{form}}}"

def headings_of(columns):
    return [heading_and_form(name)[0] for name in columns]

# ---------------------------------------------------------------- the paper's values next to ours
def beside(rows, columns, paper):
    """A grid of strings, the headings first: our rows, and each paper's value left of our own.

    Rows of the paper that have no counterpart among ours come last, with dashes for our values.
    """
    headings = headings_of(columns)
    both = [heading for heading in headings[1:] if any(heading in row for row in paper["rows"])]

    def line(cells, its):
        found = [cells[0], its.get("as", "–")]
        for heading, cell in zip(headings[1:], cells[1:]):
            if heading in both:
                found.append(its.get(heading, "–"))
            found.append(cell)
        return found

    top = [headings[0], "in the paper"]
    for heading in headings[1:]:
        top += [f"{heading}, paper", f"{heading}, here"] if heading in both else [heading]
    lines, printed = [top], {row["arm"]: row for row in paper["rows"]}
    for row in rows:
        lines.append(line(cells_of(row, columns), printed.get(name_of(row), {})))
    ours = [name_of(row) for row in rows]
    for its in paper["rows"]:
        if its["arm"] not in ours:
            lines.append(line([its["arm"] or "–"] + ["–"] * len(headings[1:]), its))
    return lines

def markdown(lines, words):
    """A grid of strings, the headings first -> Markdown; the first `words` columns are set to the left."""
    align = ["---"] * words + ["---:"] * (len(lines[0]) - words)
    found = []
    for line in [lines[0], align, *lines[1:]]:
        cells = [cell.replace("|", "\\|") for cell in line]
        found.append(f"| {' | '.join(cells)} |")
    return "\n".join(found)

def grid(rows, columns, paper=None):
    """Rows as a Markdown table, next to the paper's values where there are any."""
    if paper:
        return markdown(beside(rows, columns, paper), 2)
    lines = [cells_of(row, columns) for row in rows]
    return markdown([headings_of(columns), *lines], 1)

def by_kind(rows, columns):
    """A folded table, a row for each drafted arm, a column for each kind of text; [] where there is one."""
    kinds = unique(row["group"] for row in rows if row.get("group") not in (None, "all"))
    if not kinds or not columns:
        return []
    cells = {(name_of(row), row["group"]): ", ".join(cells_of(row, columns)) for row in rows}
    lines = [["arm", *kinds]]
    for name in unique(name_of(row) for row in rows if row.get("tree")):
        lines.append([name, *(cells[name, kind] for kind in kinds)])
    what = ", ".join(headings_of(columns))
    return [f"<details><summary>By kind of text: {what}</summary>", markdown(lines, 1), "</details>"]

# ---------------------------------------------------------------- tables.json, claims.json
def read_specs(folder, name, tuned=None):
    """docs/results/NAME, tables.json or claims.json, with drafters in the place of @names.

    "best" of tables.json is {"@name": [drafters]}.  @name becomes the fastest of them in the rows of "tuned
    by", which are measured on other prompts, or else the first.  tuned: the folder of these rows, or the same.
    """
    content = json.loads((folder / "tables.json").read_text(encoding="utf-8"))
    path = (tuned or folder) / content.get("tuned by", "")
    rows = read_rows(path) if path.is_file() else []
    speeds = {row["drafter"]: row["tokens_per_second"] for row in rows if row.get("group") in (None, "all")}
    text = (folder / name).read_text(encoding="utf-8")
    for at, drafters in content.get("best", {}).items():
        best = max(drafters, key=lambda drafter: speeds.get(drafter, 0))
        text = re.sub(at + r"\b", best, text)
    return json.loads(text)

# ---------------------------------------------------------------- one table
def remarks(rows):
    """Sentences: the baseline among the rows, and the first token at which an output differs from it."""
    base = baseline(rows)
    if base:
        yield (f"Baseline: {name_of(base)}, {base['target_ms']:.2f} ms a token; "
               f"distinct 4-grams of its output: {base['distinct_4grams'] or 0:.0%}.")
    for row in rows:
        away = row.get("first_divergence")
        if away:
            gap = "" if away["logit_gap"] is None else f", where the logits differ by {away['logit_gap']:.2g}"
            where = f"token {away['token']} of prompt {away['prompt'] + 1}"
            yield f"{name_of(row)} leaves plain decoding at {where}{gap}."

def setting(rows):
    """The settings of the run that made the rows: target, type, device, temperature, versions."""
    first = next((row for row in rows if "dtype" in row), None)
    if not first:
        return []
    where = first["device"]
    if where == "cpu":
        where += f" ({first['threads']} threads)"
    parts = [f"target `{first['target']}`", first["dtype"], where, f"temperature {first['temperature']:g}"]
    return parts + [f"{package} {version}" for package, version in first["versions"].items()]

def table(spec, rows, measured, common=()):
    """One table of the page -> paragraphs.  measured: when and where; common: settings named at its head."""
    sentences = [spec.get("claim", "")]
    if spec.get("paper"):
        sentences.append(f"In the paper: {spec['paper']['where']}.")
    parts = [f"### {spec['title']}", " ".join(sentence for sentence in sentences if sentence)]
    if "command" in spec:
        parts.append(f"```\n{spec['command']}\n```")
    rows = [row for row in rows if name_of(row) in spec.get("shown", [name_of(row)])]
    shown = [row for row in rows if row.get("group") in (None, "all")]
    count = [f"{shown[0]['prompts']} prompts"] if shown and "prompts" in shown[0] else []
    where = count + [part for part in [*measured, *setting(shown)] if part not in common]
    parts.append(", ".join(where) + "." if where else "")
    parts.append(grid(shown, spec.get("columns", DEFAULT), spec.get("paper")))
    parts.append("  \n".join([*remarks(shown), *filter(None, [spec.get("note")])]))
    parts += by_kind(rows, spec.get("kinds", KINDS))
    return [part for part in parts if part]

# ---------------------------------------------------------------- tests
@functools.cache
def signs(n):
    """DRAWS rows of n signs, the same each time."""
    # RandomState's numbers are the same in all releases of numpy.
    return 2.0 * np.random.RandomState(0).randint(0, 2, (DRAWS, n)) - 1.0              # (DRAWS, n)

def share_as_far(sampled, found):
    """p: the share of the sums `sampled` (DRAWS,) at least as far from zero as the observed one, `found`."""
    as_far = int((np.abs(sampled) >= abs(found) - 1e-9).sum())
    # The observed signs are one of the possible ways.
    return (1 + as_far) / (1 + DRAWS)

def sign_flips(differences):
    """How often would chance give a mean at least as far from zero?  A paired randomisation test, two-sided.

    If two arms did not differ, each prompt's difference could as well have the other sign.  So signs are
    sampled, and p is the share of means as far from zero as the observed one.  Of eight differences of 1, two
    of the 256 ways are that far, all plus and all minus: p = 0.008.

    It assumes that differences are symmetric.  Where they are strongly skewed (log-normal) it rejects in 12 to
    15 % of cases without a difference, not in 5 %.  So speeds are compared by logarithms, and where a sign test
    decides otherwise its p is given, too.
    """
    sampled = signs(len(differences)) @ np.array(differences, dtype=float)               # (DRAWS,)
    return share_as_far(sampled, sum(differences))

def sign_test(differences):
    """p of as uneven a split into higher and lower prompts, if both were as likely; ties are left out."""
    higher = sum(difference > 0 for difference in differences)
    lower = sum(difference < 0 for difference in differences)
    n = higher + lower
    tail = sum(math.comb(n, k) for k in range(min(higher, lower) + 1))
    return min(1.0, 2 * tail / 2 ** n)

def relabelled(mine, its):
    """p of as large a difference of means, if the values of two kinds of text were one kind's: two-sided.

    The values are dealt out anew to two groups of the same sizes, DRAWS times.
    """
    values = np.array([*mine, *its], dtype=float)
    order = np.random.RandomState(0).random_sample((DRAWS, len(values))).argsort(1)    # (DRAWS, n)
    dealt = (values - values.mean())[order]
    sampled = dealt[:, :len(mine)].sum(1)                                                # (DRAWS,)
    return share_as_far(sampled, sum(mine) - len(mine) * values.mean())

# ---------------------------------------------------------------- one comparison
# name: in words; value: of all prompts together, None where not measured; values: of each prompt, or None;
# group: its kind of text, or "all"; None of a number
Side = namedtuple("Side", "name group value values")
# verdict: MORE, LESS, LEVEL, UNTESTED, or None where something is missing; words: the figures; missing: what
Found = namedtuple("Found", "verdict words missing")

def rows_in(folder, file, group="all"):
    """{name: row} of a file's rows about all prompts, or about one kind; {} where the file is missing."""
    path = folder / file
    rows = read_rows(path) if path.exists() else []
    return {name_of(row): row for row in rows if row.get("group") in (None, group)}

def values_of(row, key, group):
    """The values of each prompt in a row of all prompts, or of those of one kind; None where it has none."""
    by_prompt = row.get("by_prompt") or {}
    values = by_prompt.get(key)
    if group == "all" or values is None:
        return values
    groups = by_prompt.get("group") or [None] * len(values)
    return [value for value, its in zip(values, groups) if its == group] or None

def side_of(folder, spec, given):
    """One side of a comparison -> Side; a number's has neither name nor values."""
    if isinstance(given, (int, float)):
        return Side("", None, given, None)
    given = given if isinstance(given, dict) else {"arm": given}
    name = arm = given["arm"]
    key, group = (given.get(what, spec.get(what, "all")) for what in ("key", "group"))
    if group != "all":
        name += f" ({group})"
    if key != spec["key"]:
        name += f", {WORDS.get(key, key)},"
    row = rows_in(folder, spec["in"], group).get(arm)
    if row is None:
        return Side(name, group, None, None)
    whole = rows_in(folder, spec["in"]).get(arm, {})
    return Side(name, group, value_of(row, key), values_of(whole, key, group))

def mean_of(spec, values):
    """The mean over prompts; of speeds the geometric one, which is that of their logarithms."""
    if spec["key"] in SPEEDS:
        return statistics.geometric_mean(values)
    return statistics.fmean(values)

def both_there(ours, others):
    """Two sides' values on the prompts that have both; a number has its value on each prompt."""
    n = len(ours.values or others.values)
    mine, its = [side.values if side.name else [side.value] * n for side in (ours, others)]
    pairs = [(x, y) for x, y in zip(mine, its) if x is not None and y is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]

def decided(spec, mine, its, paired):
    """more against times * than + by, by their values of each prompt -> (LEVEL ..., what was tested, in words)."""
    against = [spec.get("times", 1) * y + spec.get("by", 0) for y in its]
    fast = spec["key"] in SPEEDS
    if fast:
        mine, against = [[math.log(value) for value in values] for values in (mine, against)]
    mean = statistics.fmean(mine) - statistics.fmean(against)
    words = f"{math.exp(mean):.3g} times" if fast else f"{mean:+.3g}"
    if paired:
        differences = [x - y for x, y in zip(mine, against)]
        p, other = sign_flips(differences), sign_test(differences)
        higher = sum(difference > 0 for difference in differences)
        words += f" a prompt, above on {higher} of {len(differences)}, p = {p:.2g}"
        if (p < SIGNIFICANT) != (other < SIGNIFICANT):
            words += f"; by a sign test {other:.2g}"
    else:
        p = relabelled(mine, against)
        words += f", {len(mine)} and {len(against)} prompts, p = {p:.2g}"
    if p >= SIGNIFICANT:
        return LEVEL, words
    return MORE if mean > 0 else LESS, words

def in_words(spec, ours, others, mine, its):
    """"τ: edd × pct 3.62 against 0.97 of edd × eagle2 4.05"."""
    label = WORDS.get(spec["key"], spec["key"])
    factor = f"{spec['times']:g} of " if "times" in spec else ""
    margin = f" + {spec['by']:g}" if "by" in spec else ""
    mine = f"{ours.name} {mine:.3g}".strip()
    its = f"{others.name} {its:.3g}".strip()
    return f"{label}: {mine} against {factor}{its}{margin}"

def compare(folder, spec, other):
    """`more` against `other`, one of `than` -> Found.  The means shown are those of the prompts tested."""
    ours, others = side_of(folder, spec, spec["more"]), side_of(folder, spec, other)
    missing = [side.name for side in (ours, others) if side.value is None]
    if missing:
        return Found(None, "", "not measured: " + ", ".join(missing))
    paired = ours.group == others.group or None in (ours.group, others.group)
    testable = all(side.values or not side.name for side in (ours, others))
    mine, its = [], []
    if testable and paired:
        mine, its = both_there(ours, others)
    elif testable:
        mine, its = [[value for value in side.values if value is not None] for side in (ours, others)]
    if not mine or not its:
        return Found(UNTESTED, in_words(spec, ours, others, ours.value, others.value) + " (untested)", "")
    verdict, tested = decided(spec, mine, its, paired)
    words = in_words(spec, ours, others, mean_of(spec, mine), mean_of(spec, its))
    return Found(verdict, f"{words} ({tested})", "")

def every(folder, spec):
    """{"in": [files], "every": key} -> Found: LESS where the key is false in a row with a tree."""
    rows = [row for file in spec["in"] for row in rows_in(folder, file).values() if row.get("tree")]
    values = [row[spec["every"]] for row in rows if row.get(spec["every"]) is not None]
    if not values:
        return Found(None, "", "not measured: " + ", ".join(spec["in"]))
    verdict = MORE if all(values) else LESS
    return Found(verdict, f"{spec['every']} in {sum(values)} of {len(values)} rows", "")

def height(folder, spec, other):
    """The value by which the best of several arms is chosen: the tested mean, or the row's own figure."""
    side = side_of(folder, spec, other)
    values = [value for value in side.values or [] if value is not None]
    return mean_of(spec, values) if values else side.value or 0

def file_of(folder, spec, sides):
    """The file that a comparison is about: of several the first that has all its arms, or else the first."""
    files = spec["in"] if isinstance(spec["in"], list) else [spec["in"]]
    arms = {side["arm"] if isinstance(side, dict) else side for side in sides if not isinstance(side, (int, float))}
    for file in files:
        if arms <= rows_in(folder, file).keys():
            return file
    return files[0]

def judged(folder, spec):
    """A comparison -> [Found], one for each arm of `than`, or against the best of them alone."""
    if "every" in spec:
        return [every(folder, spec)]
    others = spec["than"] if isinstance(spec["than"], list) else [spec["than"]]
    spec = {**spec, "in": file_of(folder, spec, [spec["more"], *others])}
    if spec.get("best"):
        others = [max(others, key=lambda other: height(folder, spec, other))]
    return [compare(folder, spec, other) for other in others]
