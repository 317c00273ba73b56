"""Measured rows as Markdown tables, beside the paper's values, with comparisons of their arms.

A table is an entry of docs/results/tables.json, its rows are the lines of docs/results/FILE.jsonl;
docs/results/README.md explains the keys.  Under a table stand its comparisons: each says that one
arm is above another, as the paper claims, and shows what was measured over the prompts:

    effect      of speeds the geometric mean of the prompts' ratios; of all else the mean difference
    interval    95 %, by a percentile bootstrap over the prompts
    p           of a paired sign-flip test, adjusted by Holm for all comparisons of a page

An arm's speedup is a geometric mean over the prompts, too, so the ratio of two speedups of a table
is the effect that stands below it.  In a table tau, alpha and milliseconds are over all rounds of
all prompts.
"""
import fnmatch
import functools
import json
import math
import re
import statistics
from collections import namedtuple

import numpy as np

SIGNIFICANT = 0.05
SPEEDS = ("speedup", "expected_speedup", "swi_measured", "swi_ms", "ewif")    # compared by ratios
MILLION = 1_000_000                        # tokens over which a drafter's gain is measured
# What is kept of each prompt, for comparisons
BY_PROMPT = ("speedup", "tau", "alpha", "alpha_overlap", "alpha_depth", "nodes", "c",
             "expected_speedup", "draft_ms", "swi_ms", "swi_measured")
DRAWS = 10_000                             # the smallest p there can be is 1 / (1 + DRAWS)

# ---------------------------------------------------------------- rows
def read_rows(path):
    """JSON lines -> rows.  mean_speedup: the geometric mean over the prompts."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    for row in rows:
        speeds = values_by_prompt(rows, name_of(row), "speedup", row.get("group"))
        row["mean_speedup"] = statistics.geometric_mean(speeds) if speeds else row.get("speedup")
    return rows

def name_of(row):
    """The arm's name: "glide × cape", "plain"; "glide × chain, 4 copies" of a prompt."""
    name = f"{row['drafter']} × {row['tree']}" if row.get("tree") else row["drafter"]
    copies = row.get("batch", 1)
    return f"{name}, {copies} copies" if copies > 1 else name

def whole(rows):
    """The rows over all prompts, without those of one kind of text -> {arm: row}"""
    return {name_of(row): row for row in rows if row.get("group") in (None, "all")}

def values_by_prompt(rows, arm, key, group=None):
    """An arm's value on each prompt, of one kind or of all; None where rows do not have them."""
    row = whole(rows).get(arm, {})
    kept = row.get("by_prompt", {})
    if group in (None, "all") or key not in kept:
        return kept.get(key)
    return [value for value, kind in zip(kept[key], kept["group"]) if kind == group]

def with_by_prompt(rows, prompts):
    """bench.py's rows, with "by_prompt" as {key: values}, and in the rows of all prompts alone.

    "group" in it is the kind of each prompt, so the rows of one kind need no values of their own.
    """
    for row in rows:
        each = row.pop("by_prompt")            # [{key: value}]
        if row["group"] == "all":
            row["by_prompt"] = {"group": [group for group, *_ in prompts]}
            for key in BY_PROMPT:
                values = [one.get(key) for one in each]
                if any(value is not None for value in values):
                    row["by_prompt"][key] = values
    return rows

def rows_of_log(path, drafters=("*",)):
    """train.py's log.jsonl -> rows of its last evaluation, for each drafter, over all and by kind.

    drafters: patterns of names.  curve: [[tokens seen, alpha]] of all evaluations; alpha_first: at
    the first one; gain: of alpha, over the last MILLION tokens, None where they were fewer; init:
    whether the run began with trained drafters.
    """
    found = {}                                 # {(drafter, kind): {tokens: figures}}
    init = False
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "command" in row:
            init = "--init" in row["command"]
            if "--resume" not in row["command"]:
                found = {}                     # what stands before is an earlier run's
        for name, evaluation in row.items():
            is_evaluation = isinstance(evaluation, dict)
            if is_evaluation and any(fnmatch.fnmatch(name, pattern) for pattern in drafters):
                for kind, figures in {"all": evaluation, **evaluation["by_kind"]}.items():
                    found.setdefault((name, kind), {})[row["tokens_seen"]] = figures
    rows = []
    for (name, kind), points in found.items():
        curve = [[tokens, points[tokens]["alpha"]] for tokens in sorted(points)]
        first = curve[0][1]
        last, alpha = curve[-1]
        gain = None
        if last >= MILLION:
            gain = alpha - np.interp(last - MILLION, *zip(*curve))
        rows.append({
            "drafter": name,
            "tree": "chain",
            "group": kind,
            "alpha": alpha,
            "alpha_first": first,
            "tau": points[last]["tau"],
            "gain": gain,
            "tokens_trained": last,
            "init": init,
            "curve": curve})
    return rows

def unique(values):
    """The different values, in their order."""
    return list(dict.fromkeys(values))

# ---------------------------------------------------------------- columns: how a row shows a value
# {name: (heading, format of a row)}
COLUMNS = {
    "arm": ("arm", "{name}"),
    "tok/s": ("tok/s", "{tokens_per_second:.1f}"),
    "speedup": ("speedup", "{mean_speedup:.2f}× [{speedup_low:.2f}–{speedup_high:.2f}]"),
    "tau": ("τ", "{tau:.2f}"),
    "alpha": ("α", "{alpha:.3f}"),
    "alpha before": ("α before", "{alpha_first:.3f}"),
    "overlap": ("Σ min(p_T, p_D)", "{alpha_overlap:.3f}"),
    "tau/depth": ("τ/depth", "{alpha_depth:.2f}"),
    "nodes": ("nodes", "{nodes:.1f}"),
    "draft ms": ("draft ms", "{draft_ms:.1f}"),
    "verify ms": ("verify ms", "{verify_ms:.1f}"),
    "other ms": ("other ms", "{other_ms:.1f}"),
    "c": ("c", "{c:.3f}"),
    "E(Spd.)": ("E(Spd.)", "{expected_speedup:.2f}"),
    "SWI": ("SWI, measured", "{swi_measured:.2f}"),
    "SWI (MS)": ("SWI, by weights", "{swi_ms:.2f}"),
    "EWIF": ("EWIF", "{ewif:.2f}"),
    "ECE": ("ECE", "{ece:.3f}"),
    "ECE, raw": ("ECE, raw", "{ece_raw:.3f}"),
    "trained": ("tokens trained on", "{tokens_trained:,d}"),
}
# {key of a row: its heading}
WORDS = {re.match(r"{(\w+)", form)[1]: heading for heading, form in COLUMNS.values()}
WORDS["speedup"] = "speedup"
DEFAULT = ["arm", "tok/s", "speedup", "tau", "alpha", "nodes", "draft ms", "verify ms", "other ms"]
OF_ROUNDS = ("draft_ms", "verify_ms", "other_ms")

def heading_and_form(name):
    """A name of COLUMNS, or "Heading=key:format" -> (heading, format)"""
    if name in COLUMNS:
        return COLUMNS[name]
    heading, _, form = name.rpartition("=")
    return heading, f"{{{form}}}"

def headings_of(columns):
    return [heading_and_form(name)[0] for name in columns]

def cells_of(row, columns):
    """The row's cells; a dash where it has no such value."""
    shown = {**row, "name": name_of(row)}
    if row.get("tau") is None:                 # plain decoding and transformers have no rounds
        shown |= dict.fromkeys(OF_ROUNDS)
    cells = []
    for name in columns:
        try:
            cells.append(heading_and_form(name)[1].format(**shown))
        except (KeyError, TypeError):          # no such key; None has no format
            cells.append("–")
    return cells

# ---------------------------------------------------------------- the paper's values beside ours
def with_the_papers(rows, columns, paper):
    """A grid of strings, the headings first: our rows, and the paper's values left of our own.

    Rows of the paper that have no counterpart among ours come last, with dashes for our values.
    """
    headings = headings_of(columns)
    both = [heading for heading in headings if any(heading in row for row in paper["rows"])]

    def line(cells, printed):
        found = [cells[0], printed.get("as", "–")]
        for heading, cell in zip(headings[1:], cells[1:]):
            if heading in both:
                found.append(printed.get(heading, "–"))
            found.append(cell)
        return found

    top = [headings[0], "in the paper"]
    for heading in headings[1:]:
        top += [f"{heading}, paper", f"{heading}, ours"] if heading in both else [heading]
    printed = {row["arm"]: row for row in paper["rows"]}
    lines = [top]
    for row in rows:
        lines.append(line(cells_of(row, columns), printed.get(name_of(row), {})))
    ours = [name_of(row) for row in rows]
    for row in paper["rows"]:
        if row["arm"] not in ours:
            lines.append(line([row["arm"] or "–"] + ["–"] * len(headings[1:]), row))
    return lines

def markdown(lines, words=1):
    """A grid of strings, the headings first -> Markdown, with `words` columns set to the left."""
    align = ["---"] * words + ["---:"] * (len(lines[0]) - words)
    found = []
    for line in [lines[0], align, *lines[1:]]:
        cells = [cell.replace("|", "\\|") for cell in line]
        found.append(f"|{'|'.join(cells)}|")
    return "\n".join(found)

def grid(rows, columns, paper=None):
    """Rows as a Markdown table, beside the paper's values where there are any."""
    if paper:
        return markdown(with_the_papers(rows, columns, paper), 2)
    lines = [cells_of(row, columns) for row in rows]
    return markdown([headings_of(columns), *lines])

def by_kind(rows, columns):
    """A folded table, a row for each drafted arm, a column for each kind of text -> paragraphs"""
    kinds = unique(row["group"] for row in rows if row.get("group") not in (None, "all"))
    if not kinds or not columns:
        return []
    cells = {(name_of(row), row["group"]): ", ".join(cells_of(row, columns)) for row in rows}
    lines = [["arm", *kinds]]
    for name in unique(name_of(row) for row in rows if row.get("tree")):
        of_kinds = [cells[name, kind] for kind in kinds]
        if any(cell.strip("–, ") for cell in of_kinds):
            lines.append([name, *of_kinds])
    what = ", ".join(headings_of(columns))
    summary = f"<details><summary>By kind of text: {what}</summary>"
    return [summary, markdown(lines), "</details>"]

# ---------------------------------------------------------------- intervals and tests over prompts
# RandomState's numbers are the same in all releases of numpy, so pages can be checked.
@functools.cache
def signs(n):
    """DRAWS rows of n signs, the same each time."""
    return 2.0 * np.random.RandomState(0).randint(0, 2, (DRAWS, n)) - 1.0              # (DRAWS, n)

def sign_flips(differences):
    """How often would chance give a mean at least as far from zero?  A paired randomisation test.

    If two arms did not differ, each prompt's difference could as well have the other sign.  So
    signs are sampled, and p is the share of sums as far from zero as the observed one.  Of eight
    differences of 1, two of the 256 ways are that far, all plus and all minus: p = 0.008.

    The test assumes that differences are symmetric.  Where they are strongly skewed (log-normal) it
    rejects in 12 to 15 % of cases without a difference, not in 5 %.  So speeds are compared by
    logarithms, and a p close to 0.05 decides nothing.
    """
    sampled = signs(len(differences)) @ np.array(differences, dtype=float)               # (DRAWS,)
    as_far = int((np.abs(sampled) >= abs(sum(differences)) - 1e-9).sum())
    # The observed signs are one of the possible ways.
    return (1 + as_far) / (1 + DRAWS)

def interval(values):
    """95 % of the means of DRAWS bootstrap samples of the values (n,) -> (low, high)"""
    n = len(values)
    picked = np.random.RandomState(0).randint(0, n, (DRAWS, n))                  # (DRAWS, n)
    means = np.array(values, dtype=float)[picked].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)

def holm(ps):
    """p-values adjusted for their number m (Holm 1979): the smallest times m, the next m - 1 ..."""
    order = sorted(range(len(ps)), key=ps.__getitem__)
    adjusted = [0.0] * len(ps)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, (len(ps) - rank) * ps[i])
        adjusted[i] = min(1.0, largest)
    return adjusted

# ---------------------------------------------------------------- comparisons
# claim: the entry of tables.json; first, second: Sides; effect: a ratio or a difference of their
# means; low, high: its interval; above: "30/36", on how many prompts the first is higher; p, and
# adjusted: p by Holm, over the page.  All but the effect are None without values of each prompt.
Comparison = namedtuple("Comparison", "claim first second effect low high above p adjusted",
                        defaults=[None] * 5)
# words: the arm, with its key or file where the other side has another; values: of each prompt, or
# None; mean: of these, or else the value over all prompts, None where it was not measured
Side = namedtuple("Side", "words mean values")

def is_ratio(claim):
    """Whether a claim is about speeds, which are compared by their ratios."""
    return claim["key"] in SPEEDS

def mean_of(claim, values):
    """The mean of the prompts' values; of speeds the geometric one."""
    values = [value for value in values if value is not None]
    if not values:
        return None
    return statistics.geometric_mean(values) if is_ratio(claim) else statistics.fmean(values)

def side_of(tables, own, claim, side):
    """One side of a claim: an arm, or {"arm", and "key" or "file" of its own} -> Side"""
    given = side if isinstance(side, dict) else {"arm": side}
    arm, key, file = given["arm"], given.get("key", claim["key"]), given.get("file", own)
    group = claim.get("group", "all")
    words = f"`{arm}`"
    if "key" in given:
        words += f" ({WORDS.get(key, key)})"
    if "file" in given:
        words += f" ({file})"
    rows = tables.get(file, [])
    values = values_by_prompt(rows, arm, key, group)
    if values:
        return Side(words, mean_of(claim, values), values)
    found = [row for row in rows if name_of(row) == arm and row.get("group", "all") == group]
    return Side(words, found[0].get(key) if found else None, None)

def compare(tables, own, claim):
    """One claim -> Comparison, None where an arm was not measured.

    tables: {file: rows}; own: the file of the table under which the claim stands.  Where the claim
    names several second arms, it is about the best of those measured, by its mean.
    """
    one, others = claim["arms"]
    first = side_of(tables, own, claim, one)
    others = others if isinstance(others, list) else [others]
    rivals = [side_of(tables, own, claim, other) for other in others]
    rivals = [each for each in rivals if each.mean is not None]
    if first.mean is None or not rivals:
        return None
    second = max(rivals, key=lambda rival: rival.mean)
    if not first.values and not second.values:
        effect = first.mean / second.mean if is_ratio(claim) else first.mean - second.mean
        return Comparison(claim, first, second, effect)
    # A value that is predicted, not measured, is the same for each prompt.
    mine = first.values or [first.mean] * len(second.values)
    its = second.values or [second.mean] * len(mine)
    assert len(mine) == len(its), f"{first.words}, {second.words}: measured on different prompts"
    differences = []
    for x, y in zip(mine, its):
        if x is not None and y is not None:
            differences.append(math.log(x / y) if is_ratio(claim) else x - y)
    numbers = [statistics.fmean(differences), *interval(differences)]
    if is_ratio(claim):
        numbers = [math.exp(number) for number in numbers]
    above = f"{sum(difference > 0 for difference in differences)}/{len(differences)}"
    return Comparison(claim, first, second, *numbers, above, sign_flips(differences))

def compare_all(specs, tables):
    """All comparisons of a page, p adjusted by Holm -> {name of the table: [Comparison]}"""
    made = []
    for spec in specs:
        for claim in spec.get("compare", []):
            found = compare(tables, spec["file"], claim)
            if found:
                made.append((spec["name"], found))
    adjusted = iter(holm([each.p for _, each in made if each.p is not None]))
    by_table = {spec["name"]: [] for spec in specs}
    for name, each in made:
        if each.p is not None:
            each = each._replace(adjusted=next(adjusted))
        by_table[name].append(each)
    return by_table

def verdict(each):
    """A Comparison in a word or two.  That two arms are equal can be refuted, but not shown."""
    above = each.effect > (1 if is_ratio(each.claim) else 0)
    if each.adjusted is None:
        return "as claimed, untested" if above else "**not held**, untested"
    if each.claim.get("equal"):
        return "not refuted" if each.adjusted >= SIGNIFICANT else "**not held**"
    if each.adjusted >= SIGNIFICANT:
        return "undecided"
    return "held" if above else "**not held**"

def effect_in_words(each):
    """A Comparison's effect with its interval: "1.28× [1.15, 1.42]", "+0.173 [0.120, 0.221]" """
    form = ".2f" if is_ratio(each.claim) or abs(each.effect) >= 1 else ".3f"
    words = f"{each.effect:{form}}×" if is_ratio(each.claim) else f"{each.effect:+{form}}"
    if each.low is None:
        return words
    return f"{words} [{each.low:{form}}, {each.high:{form}}]"

def comparisons_table(made):
    """[Comparison] -> a Markdown table"""
    lines = [["claim", "compared", "ours [95 %]", "above", "p", "verdict"]]
    for each in made:
        key, group = each.claim["key"], each.claim.get("group")
        kind = f" on {group}" if group else ""
        compared = f"{WORDS.get(key, key)}{kind}: {each.first.words} over {each.second.words}"
        p = "–" if each.adjusted is None else f"{each.adjusted:.2g}"
        numbers = [effect_in_words(each), each.above or "–", p]
        lines.append([each.claim["claim"], compared, *numbers, verdict(each)])
    return markdown(lines, 2)

# ---------------------------------------------------------------- tables.json
def read_specs(folder, tuned=None):
    """docs/results/tables.json, with drafters in the place of @names.

    "best" is {"@name": [drafters]}.  @name becomes the fastest of them in the rows of "tuned by",
    which were measured on prompts of their own, or else the first.  tuned: the folder of those
    rows, by default `folder`.
    """
    text = (folder / "tables.json").read_text(encoding="utf-8")
    content = json.loads(text)
    path = (tuned or folder) / content.get("tuned by", "")
    rows = whole(read_rows(path)) if path.is_file() else {}
    speeds = {row["drafter"]: row["tokens_per_second"] for row in rows.values()}
    for at, drafters in content.get("best", {}).items():
        best = max(drafters, key=lambda drafter: speeds.get(drafter, 0))
        text = re.sub(at + r"\b", best, text)
    return json.loads(text)

# ---------------------------------------------------------------- one table of a page
def setting(rows):
    """The settings of the run that made the rows: target, type, device, temperature, versions."""
    first = next((row for row in rows if "dtype" in row), None)
    if not first:
        return []
    where = first["device"]
    if where == "cpu":
        where += f" ({first['threads']} threads)"
    temperature = f"temperature {first['temperature']:g}"
    versions = [f"{package} {version}" for package, version in first["versions"].items()]
    return [f"target `{first['target']}`", first["dtype"], where, temperature, *versions]

def remarks(rows):
    """Sentences about the baseline, and about outputs that differ from it."""
    base = next((row for row in rows if row.get("baseline")), None)
    if base:
        yield f"Baseline: {name_of(base)}, {base['target_ms']:.2f} ms a token."
    tested = [row for row in rows if row.get("lossless") is not None]
    differ = [row for row in tested if not row["lossless"]]
    if tested and not differ:
        yield f"Lossless: {len(tested)} of {len(tested)} arms."
    for row in differ:
        found = row.get("first_divergence")
        where = ""
        if found:
            where = f" at token {found['token']} of prompt {found['prompt'] + 1}"
        if found and found["logit_gap"] is not None:
            where += f", where the logits differ by {found['logit_gap']:.2g}"
        yield f"**Not lossless**: {name_of(row)} leaves plain decoding{where}."

def table(spec, rows, made, measured, common=()):
    """One table -> paragraphs.  made: its Comparisons; measured: when and where; common: settings
    that the head of the page names."""
    sentences = [spec.get("shows", "")]
    if spec.get("paper"):
        sentences.append(f"In the paper: {spec['paper']['where']}.")
    parts = [f"### {spec['title']}", " ".join(filter(None, sentences))]
    if "command" in spec:
        parts.append(f"```\n{spec['command']}\n```")
    if "shown" in spec:
        rows = [row for row in rows if name_of(row) in spec["shown"]]
        rows.sort(key=lambda row: spec["shown"].index(name_of(row)))
    shown = list(whole(rows).values())
    about = [f"{shown[0]['prompts']} prompts"] if shown and "prompts" in shown[0] else []
    about += [*measured, *(part for part in setting(shown) if part not in common)]
    if "curve" in shown[0]:
        about.append("from the log of this training, which `paper.py` does not start")
    parts.append("; ".join(about) + "." if about else "")
    parts.append(grid(shown, spec.get("columns", DEFAULT), spec.get("paper")))
    parts.append(" ".join([*remarks(shown), spec.get("note", "")]).strip())
    parts.append(comparisons_table(made) if made else "")
    parts += by_kind(rows, spec.get("kinds", []))
    return [part for part in parts if part]
