"""Did the papers' claims hold here?  docs/claims.md, from docs/results/claims.json and the measured rows.

    python figures/results.py            # writes it, with the other pages

The idea.  A claim of a paper is a sentence; what would show it is a comparison of measured figures.  The file
names both, and the verdict is computed each time, so that it cannot say what the rows do not.

    key of a claim | meaning
    paper, where   | which paper; abstract, or which table, figure or section
    claim          | the sentence, short
    holds          | comparisons that all must be true
    cannot         | why it cannot be said here at all: it is about another target, or a GPU
    reason         | why it did not hold, as far as an experiment found it; shown where it did not

    comparison                                              | true where
    {"more": SIDE, "than": SIDE, "times": 0.9, "by": 0.05}  | more > times * than + by (left out: 1, 0)
    {"paired": [FILE, ARM, ARM, KEY], "below": 0.01}        | the first arm is better, p over prompts below
    {"every": [FILE ...], "key": "lossless"}                | no row of the files says false

A SIDE is a number, or [FILE, ARM, KEY] or [FILE, ARM, KEY, GROUP]: docs/results/FILE, the arm's name as the
tables show it, a key of its row, "all" or a group of prompts.  For example

    {"more": ["glide.jsonl", "glide × cape", "tau"], "than": ["glide.jsonl", "glide × chain", "tau"]}
"""
import json
from collections import Counter

from tabular import WORDS, differences, name_of, read_rows, sign_flips, value_of

HELD, FAILED, OPEN = "held", "did not hold", "cannot be said here"
HEAD = """# Claims

What the papers claim, and what the measured rows say here. `python figures/results.py` computes each verdict
from [`docs/results/`](results/) by the comparison that [`claims.json`](results/claims.json) names: none is
typed in, and nothing was tuned until a claim held. What was tuned, and on which prompts, stands beside the
tables of [results.md](results.md). *Faster* is both: more tokens a second over all prompts, and a
larger median of the prompts' speedups.
"""


# ---------------------------------------------------------------- one comparison
def rows_of(folder, file):
    """The rows of a file; none where it is not there."""
    path = folder / file
    return read_rows(path) if path.exists() else []


def figure_of(folder, given):
    """A SIDE -> (its value, or None where there is no such row; what it is, in words; its key in words)."""
    if not isinstance(given, list):
        return given, "", ""
    file, arm, key, group = [*given, "all"][:4]
    name = arm if group == "all" else f"{arm} ({group})"
    for row in rows_of(folder, file):
        if name_of(row) == arm and row.get("group", group) == group:
            return value_of(row, key), name, WORDS.get(key, key)
    return None, name, WORDS.get(key, key)


def more(folder, spec):
    """{"more", "than", "times", "by"} -> (true, false or None; words, or a list of what is missing)."""
    left, ours, key = figure_of(folder, spec["more"])
    right, others, other_key = figure_of(folder, spec["than"])
    sides = (left, ours), (right, others)
    if left is None or right is None:
        return None, [name for value, name in sides if value is None]

    times, by = spec.get("times", 1), spec.get("by", 0)
    true = left > times * right + by
    # "τ: glide × cape 3.5 > 0.9 of glide × fixed 3.48 + 0.1"
    if key and other_key and key != other_key:
        ours, others = f"{ours}, {key},", f"{others}, {other_key},"
        key = other_key = ""
    parts = [f"{key or other_key}:"] if key or other_key else []
    parts += [ours, f"{left:.3g}", ">" if true else "≤"]
    parts += [f"{times:g} of"] if times != 1 else []
    parts += [others, f"{right:.3g}"]
    parts += [f"+ {by:g}"] if by else []
    return true, " ".join(part for part in parts if part)


def significant(folder, spec):
    """{"paired", "below"} -> (true, false or None; words, or a list of what is missing)."""
    file, arm, against, key = spec["paired"]
    rows = [row for row in rows_of(folder, file) if row.get("group", "all") == "all"]
    found = differences(rows, {"arm": arm, "against": against, "key": key})
    if found is None:
        return None, [arm, against]
    mean, p = sum(found) / len(found), sign_flips(found)
    words = f"{WORDS.get(key, key)}: {arm} {mean:+.3f} over {against}, {len(found)} prompts, p = {p:.4f}"
    return mean > 0 and p < spec["below"], words


def every(folder, spec):
    """{"every", "key"} -> (true, false or None; words, or a list of what is missing)."""
    rows = [row for file in spec["every"] for row in rows_of(folder, file) if row.get("tree")]
    values = [row[spec["key"]] for row in rows if row.get(spec["key"]) is not None]
    if not values:
        return None, spec["every"]
    return all(values), f"{spec['key']} in {sum(values)} of {len(values)} rows"


def judged(folder, spec):
    """A comparison of any kind -> (true, false or None; words, or a list of what is missing)."""
    if "more" in spec:
        return more(folder, spec)
    if "paired" in spec:
        return significant(folder, spec)
    return every(folder, spec)


# ---------------------------------------------------------------- one claim
def verdict(folder, claim):
    """-> (held, did not hold or cannot be said; the figures; the reason)."""
    found = [judged(folder, spec) for spec in claim.get("holds", [])]
    figures = "; ".join(words for true, words in found if true is not None)
    if claim.get("cannot"):
        return OPEN, figures, claim["cannot"]
    if any(true is False for true, _ in found):
        return FAILED, figures, claim.get("reason", "not found")
    lacking = [name for true, names in found if true is None for name in names]
    if lacking or not found:
        return OPEN, figures, "not measured yet: " + "; ".join(dict.fromkeys(lacking))
    return HELD, figures, ""


def page(folder):
    """docs/results/ -> the text of docs/claims.md."""
    claims = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    verdicts = [verdict(folder, claim) for claim in claims]
    count = Counter(said for said, _, _ in verdicts)
    counted = f"{count[HELD]} held, {count[FAILED]} did not hold, {count[OPEN]} cannot be said here"
    parts = [HEAD.rstrip(), f"**Of {len(claims)} claims {counted}.**"]
    for paper in dict.fromkeys(claim["paper"] for claim in claims):
        lines = ["| where | claim | verdict | figures | reason |", "|---|---|---|---|---|"]
        for claim, (said, figures, reason) in zip(claims, verdicts):
            if claim["paper"] == paper:
                said = f"**{said}**" if said == FAILED else said
                cells = [claim["where"], claim["claim"], said, figures or "–", reason or "–"]
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts += [f"## {paper}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"
