"""What a run of bench.py prints and writes: tables, sentences below them, a file that goes on.

    print(headline(about, prompts))
    print(section("all", names, rows, prices))     # rows: bench.row_of's; names: their arms'
    show(arm, prompt, tokenizer)              # a continuation, round by round
    Unfinished("rows.jsonl", about)           # prompts that are done, of an interrupted table
"""
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path

import torch
import transformers
from transformers.generation import BaseStreamer

from runtime.errors import UserError
from runtime.measure import Record

ROOT = Path(__file__).resolve().parent.parent
# {column: format of a row}
COLUMNS = {
    "tok/s": "{tokens_per_second:.1f}",
    "speedup": "{speedup:.2f}x [{speedup_low:.2f}-{speedup_high:.2f}]",
    "vs generate()": "{speedup_vs_generate:.2f}x",
    "tau": "{tau:.2f}",
    "alpha": "{alpha:.3f}",
    "nodes": "{nodes:.1f}",
    "c": "{c:.3f}",
    "draft": "{share_draft:.0%}",
    "verify": "{share_verify:.0%}",
    "other": "{share_other:.0%}",
    "ms/round": "{round_ms:.1f}",
    "lossless": "{lossless}",
}
LEGEND = """\
tok/s          new tokens per second over all prompts, prefill included
speedup        over plain decoding, prompt by prompt: median [lower quartile-upper quartile]
vs generate()  speedup over transformers' own generate(), prompt by prompt: the median
tau            new tokens per round, the target's own included
alpha          accepted / tested drafted tokens; for chains only
nodes          drafted tokens that are verified per round
c              a forward of the drafter (of Max-Gram: a proposal) / a plain decoding step
draft          share of a round's time in the drafter
verify         share of a round's time in the target's forward
other          share of a round's time in all the rest: building trees, accepting, committing
ms/round       milliseconds of a round
lossless       every token is that of plain decoding (-: sampled with other noise)"""
LOSSLESS = {True: "yes", False: "NO", None: "-"}

# ---------------------------------------------------------------- where and with what
def provenance(device):
    """What rows say of the code and the machine -> dict"""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    machine = f"{os.cpu_count()} cores of {found[1] if found else platform.machine()}"
    if device.type == "cuda":
        machine = f"{torch.cuda.get_device_name(device)}, {machine}"
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "transformers": transformers.__version__}
    return {"commit": commit(), "machine": machine, "threads": torch.get_num_threads(),
            "date": date.today().isoformat(), "versions": versions}

def commit():
    """The commit of this code, "+changes" where files differ from it; "unknown" without git."""
    def git(*command):
        return subprocess.run(["git", *command], cwd=ROOT, text=True, capture_output=True,
                              check=True).stdout.strip()
    try:
        # Rows that were measured a moment ago change nothing of what is measured now.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!docs")
        return git("rev-parse", "--short=10", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

# ---------------------------------------------------------------- the table
def cell(form, row):
    """A cell of the table; a dash where the row has no such figure."""
    try:
        return form.format(**row)
    except TypeError:
        return "-"

def table(names, rows):
    """The rows as text, a line for each arm."""
    lines = [["", *COLUMNS]]
    for name, row in zip(names, rows):
        shown = {**row, "lossless": LOSSLESS[row["lossless"]]}
        lines.append([name, *(cell(form, shown) for form in COLUMNS.values())])
    first, *widths = [max(map(len, column)) for column in zip(*lines)]
    text = []
    for name, *cells in lines:
        right = [cell.rjust(width) for cell, width in zip(cells, widths)]
        text.append("  ".join([name.ljust(first), *right]).rstrip())
    return "\n".join(text)

def headline(about, prompts):
    """The line that a run begins with.  about: what all its rows share.  prompts: their number."""
    return (f"target {about['target']}, {about['dtype']}, {about['device']} ({about['machine']}; "
            f"{about['threads']} threads), temperature {about['temperature']:g}, {prompts} prompts "
            f"of up to {about['max_new_tokens']} new tokens, commit {about['commit']}")

def section(group, names, rows, prices):
    """The table of a kind of text, and sentences below that of "all" prompts, as text.

    prices: {label: measured prices, or None}.
    """
    lines = ["", f"{group}: {rows[0]['prompts']} prompts", table(names, rows)]
    if group == "all":
        lines += sentences(names, rows, prices)
    return "\n".join(lines)

# ---------------------------------------------------------------- below the table of all prompts
def sentences(names, rows, prices):
    """Lines: the legend, then what has no column.  prices: as of section."""
    lines = [LEGEND, "", f"A plain decoding step takes {rows[0]['target_ms']:.2f} ms."]
    for name, row in zip(names, rows):
        lines += [f"{name}: {sentence}" for sentence in (*formulas(row), *remarks(row))]
    prices = {label: price for label, price in prices.items() if price}
    if prices:
        lines.append("Prices for pct, pct-cost and graft, where --tree sets no others, in plain "
                     "decoding steps; measured before the table on other prompts [quartiles]:")
    for label, price in prices.items():
        lines.append(f"{label}: {prices_in_words(price)}")
    return lines

def formulas(row):
    """Yield what the papers' formulas make of an arm's figures."""
    if row["expected_speedup"]:
        yield (f"from alpha and c GLIDE's formula expects a speedup of "
               f"{row['expected_speedup']:.2f}x.")
    if row["alpha_overlap"]:
        yield (f"the distributions of drafter and target overlap by {row['alpha_overlap']:.3f} on "
               "average, which is GLIDE's alpha when sampling.")
    models = [name for name in row.get("stages") or [] if name != "maxgram"]
    if models:
        runs = [f"the target ran {row['runs'][0]} times"]
        for name, count, cost in zip(models, row["runs"][1:], row["costs"][1:]):
            runs.append(f"{name} {count} times ({cost:.3f} plain decoding steps each)")
        yield (f"{', '.join(runs)}. Standardized walltime improvement, tokens / sum of runs x cost "
               f"(Cascade, section 5.1): {row['swi_pw']:.2f} by these measured costs (its PW), "
               f"{row['swi_ms']:.2f} by the sizes of the models (its MS); by the clock, with all "
               f"time in the drafter, {row['swi_clock']:.2f}.")

def remarks(row):
    """Yield what a reader of an arm's row should know."""
    found = row.get("first_divergence")
    if found:
        gap = "One of the two outputs ends there."
        if found["logit_gap"] is not None:
            gap = (f"The target's logits of these two tokens differ by {found['logit_gap']:.2g}; a "
                   "difference near 0 is rounding.")
        yield (f"not lossless: after prompt {found['prompt'] + 1} the output differs from plain "
               f"decoding's from token {found['token'] + 1} on. {gap}")
    if row["tree"] and row["speedup"] < 1:
        yield "slower than plain decoding; docs/speed.md says when that happens."

def prices_in_words(price):
    """Prices, with their quartiles over the turns."""
    drafting = "no forward to draft"
    if price["cost"]:
        low, high = price["cost_range"]
        drafting = f"a forward of the drafter {price['cost']:.3f} [{low:.3f}-{high:.3f}]"
    low, high = price["node_price_range"]
    return (f"{drafting}; a verified node {price['node_price']:.3f} [{low:.3f}-{high:.3f}]; all "
            f"else that a round with a tree adds {price['start']:.3f}.")

# ---------------------------------------------------------------- a table that goes on
class Unfinished:
    """The finished prompts of a table, in the file `path`.part: an interrupted one goes on there.

    Its first line holds what all rows share, and the prices; each other line a prompt.
    path: of --json; None: nothing is written.

    about       what all rows share: of the file, where there is one
    prices      {label: prices}; None: not measured yet
    results     [{name of an arm: Record}], one for each finished prompt
    """
    def __init__(self, path, about):
        self.path = Path(f"{path}.part") if path else None
        self.about, self.prices, self.results = about, None, []
        if not self.path or not self.path.exists():
            return
        text = self.path.read_text()
        whole = text[:text.rfind("\n") + 1]       # a line that was cut by a kill has no end
        try:
            first, *lines = map(json.loads, whole.splitlines())
            if not lines:                          # nothing was finished
                return
            self.about, self.prices = first["about"], first["prices"]
            for found in lines:
                self.results.append({name: record_of(*kept) for name, kept in found.items()})
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UserError(f"{self.path} is damaged: delete it to begin the table anew") from None
        for key, value in json.loads(json.dumps(about)).items():
            if key != "date" and self.about.get(key) != value:
                raise UserError(f"{self.path} holds an interrupted table with another {key}: "
                                "repeat its command to go on with it, or delete the file")
        self.path.write_text(whole)

    def begin(self, prices):
        """The prices are known, and prompts can be measured."""
        self.prices = prices
        if self.path and not self.results:
            self.path.write_text(json.dumps({"about": self.about, "prices": prices}) + "\n")

    def add(self, found):
        """A prompt is finished: {name of an arm: Record}."""
        self.results.append(found)
        if self.path:
            with open(self.path, "a") as file:
                file.write(json.dumps(found) + "\n")

    def finish(self, rows, is_whole):
        """Write the rows to --json; where all prompts are in them, the other file goes."""
        if self.path:
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            self.path.with_suffix("").write_text(lines)
            if is_whole:
                self.path.unlink()

def record_of(tokens, total, stage_runs, seconds):
    """A Record's values as JSON has them -> Record"""
    return Record(tokens, Counter(total), stage_runs, seconds)

# ---------------------------------------------------------------- a continuation as it is made
class Screen(BaseStreamer):
    """Prints each round's tokens: accepted ones in colour or [brackets], then the target's own."""
    def __init__(self, tokenizer):
        self.tokenizer, self.tokens = tokenizer, []
        self.form = "\033[32m{}\033[0m" if sys.stdout.isatty() else "[{}]"

    def text(self):
        # Incomplete UTF-8 is held back.
        return self.tokenizer.decode(self.tokens).rstrip("\ufffd")

    def put(self, value):
        if value.ndim > 1:                                          # the prompt
            return
        *accepted, own = value.tolist()
        for tokens, form in ((accepted, self.form), ([own], "{}")):
            before = self.text()
            self.tokens += tokens
            new = self.text()[len(before):]
            print(form.format(new) if new else "", end="", flush=True)

    def end(self):
        print()

def show(arm, prompt, tokenizer):
    """Print an arm's continuation of a prompt as it is made."""
    screen = Screen(tokenizer)
    colours = screen.form.format("accepted") + "bonus"
    print(f"\n--- {arm.name}, prompt 1 of {prompt.kind}: {colours}")
    record = arm.decode(prompt.ids, prompt.limit, 0, streamer=screen)
    tau = record.total["new"] / max(1, record.total["rounds"])
    print(f"--- {len(record.tokens)} tokens in {record.total['rounds']} rounds, tau {tau:.2f}")
