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
import re
import statistics
from dataclasses import dataclass

import numpy as np

SIGNIFICANT = 0.05
SPEEDS = ("speedup", "expected_speedup", "swi_measured", "swi_ms", "ewif")    # compared by ratios
# What is kept of each prompt, for comparisons
BY_PROMPT = ("speedup", "tau", "alpha", "alpha_overlap", "alpha_depth", "nodes", "c",
             "expected_speedup", "draft_ms", "swi_ms", "swi_measured")
DRAWS = 10_000                             # the smallest p there can be is 1 / (1 + DRAWS)

# ---------------------------------------------------------------- rows
def read_rows(path):
    """JSON lines -> rows.  mean_speedup: the geometric mean over the prompts."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        speeds = by_prompt(rows, name_of(row), "speedup", row.get("group"))
        row["mean_speedup"] = statistics.geometric_mean(speeds) if speeds else row.get("speedup")
    return rows

def name_of(row):
    """The arm's name: "glide × cape", "plain"; "glide × chain, 4 copies" of a prompt."""
    name = f"{row['drafter']} × {row['tree']}" if row.get("tree") else row["drafter"]
    copies = row.get("batch", 1)
    return f"{name}, {copies} copies" if copies > 1 else name

def whole(rows):
    """The rows over all prompts, without those of one kind of text -> {arm: row}"""
    return {name_of(row): row for row in rows if row.get("group", "all") == "all"}

def by_prompt(rows, arm, key, group="all"):
    """An arm's value on each prompt, of one kind of text or of all; [] where it has none.

    The group "mt_bench" also holds the prompts of "mt_bench/math" and its other parts.
    """
    kept = whole(rows).get(arm, {}).get("by_prompt", {})
    values = kept.get(key, [])
    if group in (None, "all"):
        return values
    kinds = kept.get("group", [])
    return [value for value, kind in zip(values, kinds) if f"{kind}/".startswith(f"{group}/")]

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

def rows_of_log(path, drafters):
    """train.py's log.jsonl -> a row for each drafter whose name fits one of the patterns.

    Of the last run: its last evaluation, alpha_first of its first one, and "alpha 1995k" of the one
    after 1 995 thousand tokens, and so on.
    """
    found = {}                                 # {drafter: {tokens seen: its evaluation}}
    for line in path.read_text(encoding="utf-8").splitlines():
        logged = json.loads(line)
        if "--resume" not in logged.get("command", "--resume"):
            found = {}                         # what stands before is an earlier run's
        for name, value in logged.items():
            fits = any(fnmatch.fnmatch(name, pattern) for pattern in drafters)
            if fits and isinstance(value, dict):
                found.setdefault(name, {})[logged["tokens_seen"]] = value
    rows = []
    for name, evaluations in found.items():
        tokens = max(evaluations)
        first, last = evaluations[min(evaluations)], evaluations[tokens]
        row = {"drafter": name, "tree": "chain", "group": "all", "alpha": last["alpha"],
               "alpha_first": first["alpha"], "tau": last["tau"], "tokens_trained": tokens}
        row |= {f"alpha {n // 1000}k": each["alpha"] for n, each in evaluations.items()}
        rows.append(row)
    return rows

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

# ---------------------------------------------------------------- Markdown
def markdown(lines, words=1):
    """A grid of strings, the headings first -> Markdown, with `words` columns set to the left."""
    align = ["---"] * words + ["---:"] * (len(lines[0]) - words)
    found = []
    for line in [lines[0], align, *lines[1:]]:
        cells = [cell.replace("|", "\\|") for cell in line]
        found.append(f"|{'|'.join(cells)}|")
    return "\n".join(found)

def grid(rows, columns, paper=None):
    """Rows as a Markdown table.  paper: the paper's values, which stand left of our own."""
    headings = headings_of(columns)
    lines = [cells_of(row, columns) for row in rows]
    if not paper:
        return markdown([headings, *lines])
    printed = {row["arm"]: row for row in paper["rows"]}
    both = [heading for heading in headings if any(heading in row for row in paper["rows"])]
    top = ["arm", "in the paper"]
    for heading in headings[1:]:
        top += [f"{heading}, paper", f"{heading}, ours"] if heading in both else [heading]
    found = [top]
    for name, *cells in lines:
        theirs = printed.get(name, {})
        line = [name, theirs.get("as", "–")]
        for heading, cell in zip(headings[1:], cells):
            if heading in both:
                line.append(theirs.get(heading, "–"))
            line.append(cell)
        found.append(line)
    return markdown(found, 2)

def by_kind(rows, names, columns, whole_kind=""):
    """A folded table, a row for each named arm, a column for each kind of text -> paragraphs

    whole_kind: "mt_bench" for the columns "mt_bench/math" and its other parts; "": for all whole
    kinds.
    """
    kinds = []
    for group in dict.fromkeys(row["group"] for row in rows if row["group"] != "all"):
        inside, _, _ = group.rpartition("/")
        if inside == whole_kind:
            kinds.append(group)
    cells = {(name_of(row), row["group"]): ", ".join(cells_of(row, columns)) for row in rows}
    lines = [["arm", *(kind.rpartition("/")[2] for kind in kinds)]]
    for name in names:
        lines.append([name, *(cells[name, kind] for kind in kinds)])
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
    sampled = signs(len(differences)) @ differences                                      # (DRAWS,)
    as_far = (np.abs(sampled) >= abs(sum(differences)) - 1e-9).sum()
    # The observed signs are one of the possible ways.
    return (1 + as_far) / (1 + DRAWS)

def interval(values):
    """95 % of the means of DRAWS bootstrap samples of the values (n,) -> [low, high]"""
    n = len(values)
    picked = np.random.RandomState(0).randint(0, n, (DRAWS, n))                  # (DRAWS, n)
    means = values[picked].mean(1)
    return np.percentile(means, [2.5, 97.5]).tolist()

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
@dataclass
class Comparison:
    """What was measured of a claim.  Of a total, without values of each prompt, there is no p."""
    claim: dict                                # its entry of tables.json
    first: str                                 # the arms, with their key or file where it is theirs
    second: str
    effect: float                              # a ratio of their means, or a difference
    low: float = None                          # its interval
    high: float = None
    above: str = "–"                           # "30/36": on how many prompts the first is higher
    p: float = None
    adjusted: float = None                     # p by Holm, over the page

    @property
    def is_ratio(self):
        return self.claim["key"] in SPEEDS

def values_of(tables, own, claim, given):
    """One arm of a claim -> (its words, its values: an array, of speeds their logarithms)

    given: its name, or {"arm", and a "key" or "file" of its own}.  The values are those of each
    prompt, NaN where it has none; or one, where only a total is known; or none of an arm that was
    not measured.
    """
    side = given if isinstance(given, dict) else {"arm": given}
    arm, key = side["arm"], side.get("key", claim["key"])
    words = f"`{arm}`"
    if "key" in side:
        words += f" ({WORDS.get(key, key)})"
    if "file" in side:
        words += f" ({side['file']})"
    rows = tables.get(side.get("file", own), [])
    values = by_prompt(rows, arm, key, claim.get("group", "all"))
    total = whole(rows).get(arm, {}).get(key)
    if not values and total is not None:
        values = [total]
    values = np.array(values, dtype=float)
    return words, np.log(values) if claim["key"] in SPEEDS else values

def compare(tables, own, claim):
    """One claim -> Comparison, None where an arm was not measured.

    tables: {file: rows}; own: the file of the table under which the claim stands.  Where the claim
    names several second arms, it is about the best of those measured, by its mean.
    """
    one, others = claim["arms"]
    others = others if isinstance(others, list) else [others]
    first, x = values_of(tables, own, claim, one)
    rivals = [values_of(tables, own, claim, other) for other in others]
    rivals = [rival for rival in rivals if len(rival[1])]
    if not len(x) or not rivals:
        return None
    second, y = max(rivals, key=lambda rival: np.nanmean(rival[1]))
    # A total, and what is predicted rather than measured, stands for each prompt.
    differences = x - y                                                               # (n,)
    differences = differences[~np.isnan(differences)]
    numbers = [differences.mean()]
    if len(differences) > 1:
        numbers += interval(differences)
    if claim["key"] in SPEEDS:
        numbers = np.exp(numbers)
    made = Comparison(claim, first, second, *numbers)
    if len(differences) > 1:
        made.above = f"{(differences > 0).sum()}/{len(differences)}"
        made.p = sign_flips(differences)
    return made

def compare_all(specs, tables):
    """All comparisons of a page, p adjusted by Holm -> {name of the table: [Comparison]}"""
    by_table = {}
    for spec in specs:
        made = [compare(tables, spec["file"], claim) for claim in spec.get("compare", [])]
        by_table[spec["name"]] = [each for each in made if each]
    tested = [each for made in by_table.values() for each in made if each.p is not None]
    for each, adjusted in zip(tested, holm([each.p for each in tested])):
        each.adjusted = adjusted
    return by_table

def verdict(each):
    """A Comparison in a word or two.  That two arms are equal can be refuted, but not shown."""
    above = each.effect > (1 if each.is_ratio else 0)
    if each.adjusted is None:
        return "as claimed, untested" if above else "**not held**, untested"
    if each.claim.get("equal"):
        return "not refuted" if each.adjusted >= SIGNIFICANT else "**not held**"
    if each.adjusted >= SIGNIFICANT:
        return "undecided"
    return "held" if above else "**not held**"

def key_in_words(each):
    """What a Comparison compares, and on which kind of text: "speedup on story", "τ"."""
    key, group = each.claim["key"], each.claim.get("group")
    words = WORDS.get(key, key)
    return f"{words} on {group}" if group else words

def effect_in_words(each):
    """A Comparison's effect: "1.28×" of a ratio, "+0.173" of a difference"""
    return f"{each.effect:.2f}×" if each.is_ratio else f"{each.effect:+.3f}"

def comparisons_table(made):
    """[Comparison] -> a Markdown table"""
    lines = [["claim", "compared", "ours [95 %]", "above", "p", "verdict"]]
    for each in made:
        compared = f"{key_in_words(each)}: {each.first} over {each.second}"
        effect, p = effect_in_words(each), "–"
        if each.p is not None:
            form = ".2f" if each.is_ratio else ".3f"
            effect += f" [{each.low:{form}}, {each.high:{form}}]"
            p = f"{each.adjusted:.2g}"
        lines.append([each.claim["claim"], compared, effect, each.above, p, verdict(each)])
    return markdown(lines, 2)

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
        found = row["first_divergence"]
        where = f"at token {found['token']} of prompt {found['prompt'] + 1}"
        if found["logit_gap"] is not None:
            where += f", where the logits differ by {found['logit_gap']:.2g}"
        yield f"**Not lossless**: {name_of(row)} leaves plain decoding {where}."

def table(spec, rows, made, head=""):
    """One table -> paragraphs.  made: its Comparisons; head: the page's, which may name settings"""
    sentences = [spec.get("shows", "")]
    if "paper" in spec:
        sentences.append(f"In the paper: {spec['paper']['where']}.")
    parts = [f"### {spec['title']}", " ".join(filter(None, sentences))]
    if "command" in spec:
        parts.append(f"```\n{spec['command']}\n```")
    arms = whole(rows)
    names = [name for name in spec.get("shown", arms) if name in arms]
    shown = [arms[name] for name in names]
    about = [f"{shown[0]['prompts']} prompts"] if "prompts" in shown[0] else []
    about += [shown[0][key] for key in ("machine", "date") if key in shown[0]]
    if shown[0].get("flags"):
        about.append(f"with {shown[0]['flags']}")
    about += [part for part in setting(shown) if part not in head]
    if "tokens_trained" in shown[0]:
        about.append("from the log of this training, which `paper.py` does not start")
    parts.append("; ".join(about) + "." if about else "")
    parts.append(grid(shown, spec.get("columns", DEFAULT), spec.get("paper")))
    parts.append(" ".join([*remarks(shown), spec.get("note", "")]).strip())
    parts.append(comparisons_table(made) if made else "")
    if "kinds" in spec:
        drafted = [name for name in names if arms[name]["tree"]]
        parts += by_kind(rows, drafted, spec["kinds"], spec.get("parts_of", ""))
    return [part for part in parts if part]
