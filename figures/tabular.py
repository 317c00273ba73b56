"""Measured rows as Markdown: a table's columns, the paper's own values beside ours, paired tests.

    from tabular import table
    print("\n\n".join(table(spec, {}, folder)))

A table is an entry of docs/results/tables.json, its rows are lines of docs/results/FILE.jsonl.

    key of a table | meaning
    name           | what figures/paper.py calls it: glide-table-1
    section        | heading under which it stands, such as a paper's name
    title, claim   | what it is, and which claim of which paper it shows, or does not
    command        | the command that made it, without its --json; or
    runs           | several: [{"label", "command"}]; the label stands behind the names of a run's rows
    needs          | {drafter or label: the train.py command that makes what is not shipped}
    file           | its rows, in docs/results/; while it is missing, the page says "not measured yet"
    machine        | a key of "machines"
    measured       | date and commit
    groups         | groups of prompts to show (default: all that the rows have)
    together       | true: all groups in one grid
    arms           | names of the rows to show, in this order (default: all); several tables may share a file
    columns        | names of COLUMNS, or "Heading=key:format" of a row (default: DEFAULT)
    paper          | {"where": its target, data, machine, "rows": [{"arm", "as", HEADING: value}]}
    paired         | [{"arm", "against", "key"}]: differences of two arms prompt by prompt
    note           | a remark under it

Paper's rows.  "arm" is the name of one of our rows, or null where we have none; "as" is the paper's own name
for it; HEADING is that of a column here, its value what the paper prints, as a string ("~0.62": read off a
picture).  A column for which the paper has values is shown twice, "α, paper" and "α, here":

    | arm           | in the paper | α, paper | α, here |
    | glide × drawn | GLIDE-47m    |    0.648 |   0.481 |
    | –             | LLAMA-160m   |    0.580 |       – |
"""
import json
import random
import re
import statistics

WORDS = {                                  # keys of rows, in words
    "tokens_per_second": "tok/s", "tau": "τ", "alpha": "α", "alpha_overlap": "Σ min(p_T, p_D)",
    "alpha_depth": "τ/depth", "expected_speedup": "E(Spd.)", "swi_ms": "SWI by weights",
    "swi_measured": "SWI measured", "ewif": "EWIF", "ece": "ECE", "draft_ms": "ms of drafting a round",
    "share_draft": "drafting's share of a round",
}


# ---------------------------------------------------------------- columns: how a row shows one of its values
def name_of(row):
    """The arm's name, as bench.py prints it, and the label of its run, where one table has several."""
    name = row["drafter"]
    if row.get("tree"):
        name += f" × {row['tree']}"
    if row.get("label"):
        name += f", {row['label']}"
    return name


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


def position(row, number):
    """Of the chains that have a token there, how many were accepted up to their token `number`, from 1."""
    found = row["positions"][number - 1:number]
    if not found:
        return None
    return found[0]["accepted"] / found[0]["drafted"]


def in_bin(row, confidence):
    """The share accepted of the drafted tokens in the bin that begins at `confidence`."""
    for each in row["bins"]:
        if abs(each["low"] - confidence) < 1e-9:
            return each["acceptance"]
    return None


LISTED = r"(position|bin) [\d.]+"


def value_of(row, key):
    """A row's value by its key, by "position 5" of its chains, or by "bin 0.9" of its confidences."""
    if not re.fullmatch(LISTED, key):
        return row.get(key)
    what, number = key.split()
    return position(row, int(number)) if what == "position" else in_bin(row, float(number))


def nodes_by_prompt(row):
    """The median of the prompts' nodes a round, and their quartiles."""
    nodes = sorted(figures["nodes"] for figures in row.get("by_prompt") or () if figures["nodes"] is not None)
    if len(nodes) < 2:
        return "–"
    low, middle, high = statistics.quantiles(nodes, n=4, method="inclusive")
    return f"{middle:.1f} [{low:.1f}–{high:.1f}]"


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
    "SWI (PW)": ("SWI, costs given", lambda row: show(row.get("swi_given"), ".2f")),
    "draft ms": ("draft, ms a round", lambda row: show(row["tau"] and row["draft_ms"], ".2f")),
    "trained": ("tokens trained on", lambda row: show(row.get("tokens_trained"), ",d")),
    "loss": ("loss", lambda row: row.get("loss") or "–"),
    "held-out alpha": ("α, held-out text", lambda row: show(row.get("held_out_alpha"), ".3f")),
    "nodes by prompt": ("nodes by prompt", nodes_by_prompt),
    "runs": ("runs", lambda row: ", ".join(map(str, row["runs"] or ())) or "–"),
}
DEFAULT = ["arm", "tok/s", "speedup", "vs generate()", "tau", "alpha", "nodes", "draft", "verify", "other",
           "ms/round", "lossless"]


def column(text):
    """A name of COLUMNS, "position 5", "bin 0.9" or "Heading=key:format" -> (heading, function of a row)."""
    if text in COLUMNS:
        return COLUMNS[text]
    if re.fullmatch(LISTED, text):
        return text, lambda row: show(value_of(row, text), ".2f")
    heading, _, key = text.rpartition("=")
    key, _, form = key.partition(":")
    return heading or key, lambda row: show(row.get(key), form)


# ---------------------------------------------------------------- rows
def read_rows(path):
    """JSON lines -> list of rows."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def unique(values):
    """The different values, in their order."""
    return list(dict.fromkeys(values))


def setting(rows):
    """What the rows ran under: "target `x`, float32, cpu (4 threads), temperature 0, Python 3.11"."""
    def listed(key):
        return "/".join(f"{value:g}" if isinstance(value, float) else str(value)
                        for value in unique(row[key] for row in rows))
    rows = [row for row in rows if "dtype" in row]
    if not rows:                                 # none of bench.py's table
        return ""
    where = listed("device")
    if where == "cpu":
        where += f" ({listed('threads')} threads)"
    parts = [f"target `{listed('target')}`", listed("dtype"), where, f"temperature {listed('temperature')}"]
    parts += [f"{package} {version}" for package, version in rows[0]["versions"].items()]
    return ", ".join(parts)


# ---------------------------------------------------------------- the paper's values beside ours
def beside(rows, columns, paper):
    """A grid of strings, the headings first: our rows, and each paper's value left of our own.

    Rows of the paper that have no counterpart among ours come last, with dashes for our values.
    """
    chosen = [column(name) for name in columns]
    printed = {row["arm"]: row for row in paper["rows"] if row.get("arm")}
    both = [heading for heading, _ in chosen[1:] if any(heading in row for row in paper["rows"])]

    def line(row, said):
        cells = []
        for number, (heading, cell) in enumerate(chosen):
            if heading in both:
                cells.append(said.get(heading, "–"))
            cells.append(cell(row) if row else "–")
            if number == 0:
                cells.append(said.get("as", "–"))
        return cells

    headings = []
    for number, (heading, _) in enumerate(chosen):
        headings += [f"{heading}, paper", f"{heading}, here"] if heading in both else [heading]
        if number == 0:
            headings.append("in the paper")
    lines = [line(row, printed.get(name_of(row), {})) for row in rows]
    ours = {name_of(row) for row in rows}
    for said in paper["rows"]:
        if said.get("arm") not in ours:
            lines.append([said.get("arm") or "–", *line(None, said)[1:]])
    return [headings, *lines]


def cells_of(rows, columns, paper=None):
    """A grid of strings, the headings first."""
    if paper:
        return beside(rows, columns, paper)
    chosen = [column(name) for name in columns]
    return [[heading for heading, _ in chosen], *([cell(row) for _, cell in chosen] for row in rows)]


def grid(rows, columns, paper=None):
    """The rows as a Markdown table: words to the left, numbers to the right."""
    headings, *lines = cells_of(rows, columns, paper)
    words = 2 if paper else 1
    align = ["---"] * words + ["---:"] * (len(headings) - words)
    lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in [headings, align, *lines])


# ---------------------------------------------------------------- paired tests
DRAWS = 10_000                             # of signs; the smallest p there can be is 1 / (1 + DRAWS)


def sign_flips(differences, draws=DRAWS):
    """How often would chance give a mean at least as far from zero?  A paired randomisation test, two-sided.

    Were there no difference between two arms, each prompt's could as well have the other sign: so signs are
    drawn, and their means counted that are as far from zero as the one found.  With eight differences of 1
    two of the 256 ways are, all plus and all minus: p = 0.008.
    """
    found = abs(sum(differences))
    generator = random.Random(0)           # the page must come out the same each time
    as_far = 0
    for _ in range(draws):
        drawn = 0.0
        for difference in differences:
            drawn += difference if generator.getrandbits(1) else -difference
        as_far += abs(drawn) >= found - 1e-12
    # the signs that were found are one of the ways
    return (1 + as_far) / (1 + draws)


def differences(rows, spec):
    """By how much two arms differ in a key of by_prompt, a list; None where there is nothing to compare."""
    of_arm = {name_of(row): row.get("by_prompt") for row in rows}
    ours, others = of_arm.get(spec["arm"]), of_arm.get(spec["against"])
    if not ours or not others or len(ours) != len(others):
        return None
    pairs = [(x[spec["key"]], y[spec["key"]]) for x, y in zip(ours, others)]
    pairs = [(x, y) for x, y in pairs if x is not None and y is not None]
    return [x - y for x, y in pairs] or None


def paired(rows, spec):
    """A sentence about one paired comparison, or None."""
    found = differences(rows, spec)
    if found is None:
        return None
    mean = sum(found) / len(found)
    better = sum(difference > 0 for difference in found)
    arms, key = f"{spec['arm']} against {spec['against']}", WORDS.get(spec["key"], spec["key"])
    return (f"{arms}, prompt by prompt: {key} {mean:+.3f}, higher on {better} of {len(found)}, "
            f"p = {sign_flips(found):.4f} (signs drawn {DRAWS} times).")


# ---------------------------------------------------------------- one table
def baseline(rows):
    """The arm that the speedups are over: the one whose every speedup is 1."""
    for row in rows:
        if row.get("target_ms") and row["speedup_low"] == row["speedup"] == row["speedup_high"] == 1:
            return row
    return None


def remarks(rows, shown):
    """The baseline among the rows, and where the output of one that is shown left it."""
    base = baseline(rows)
    if base:
        yield (f"Baseline: {name_of(base)}, {base['target_ms']:.2f} ms a token; "
               f"distinct 4-grams of its output: {base['distinct_4grams'] or 0:.0%}.")
    for row in shown:
        away = row.get("first_divergence")
        if away:
            gap = ""
            if away["logit_gap"] is not None:
                gap = f": the target's logits of the two tokens differ by {away['logit_gap']:.2g} there"
            where = f"token {away['token']} of prompt {away['prompt'] + 1}"
            yield f"{name_of(row)} leaves plain decoding at {where}{gap}."


def commands_of(spec):
    """The runs of a table: [{"command", "label" or none}]."""
    return spec.get("runs") or [{"command": spec["command"]}]


def shown_of(spec, rows):
    """The rows that a table shows, in its order."""
    if "arms" not in spec:
        return rows
    return [row for name in spec["arms"] for row in rows if name_of(row) == name]


def not_shipped(spec, rows):
    """A line for each command that makes what a table lacks: drafters, or labelled runs, without a row."""
    there = {row["drafter"] for row in rows} | {row.get("label") for row in rows}
    lacking = {}                               # {command: names}
    for name, command in spec.get("needs", {}).items():
        if name not in there:
            lacking.setdefault(command, []).append(name)
    lines = [f"- Not shipped: {', '.join(names)}: `{command}`" for command, names in lacking.items()]
    return ["\n".join(lines)] if lines else []


def table(spec, machines, folder):
    """One table of the page, with all that is needed to judge it and to make it again -> paragraphs."""
    parts = [f"### {spec['title']}"]
    if spec.get("claim"):
        parts.append(spec["claim"])
    commands = "\n".join(run["command"] for run in commands_of(spec))
    parts.append(f"```\n{commands}\n```")
    if spec.get("paper"):
        parts.append(f"In the paper: {spec['paper']['where']}.")
    path, columns, paper = folder / spec["file"], spec.get("columns", DEFAULT), spec.get("paper")
    if not path.exists():
        parts.append("*Not measured yet.*")
        if paper:
            parts.append(grid([], columns, paper))
        return parts + not_shipped(spec, [])

    rows = read_rows(path)
    where = [machines.get(spec.get("machine")), spec.get("measured"), setting(rows)]
    where = "; ".join(text for text in where if text)
    parts += [f"{where}."] if where else []
    groups = spec.get("groups") or unique(row.get("group") for row in rows)
    if spec.get("together"):
        return parts + [grid(shown_of(spec, rows), columns, paper)] + not_shipped(spec, rows)
    for group in groups:
        chosen = [row for row in rows if row.get("group") == group]
        shown = shown_of(spec, chosen)
        if group is not None and (len(groups) > 1 or group != "all"):
            parts.append(f"**{group}**, {chosen[0]['prompts']} prompts")
        # The paper's values stand once, beside all prompts.
        parts.append(grid(shown, columns, paper if group == groups[0] else None))
        parts += remarks(chosen, shown)
        sentences = [paired(chosen, each) for each in spec.get("paired", [])]
        parts += [sentence for sentence in sentences if sentence]
    parts += not_shipped(spec, rows)
    if spec.get("note"):
        parts.append(spec["note"])
    return parts
