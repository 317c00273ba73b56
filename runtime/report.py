"""What a run of bench.py prints: a headline, tables, notes below them, a continuation in colour.

    print(headline(run))
    print(table(names, rows))                 # rows: bench.row_of's; names: their arms'
    print(*notes(run, names, rows), sep="\\n")
    show(run, arm)                            # a continuation, round by round
"""
import sys

import torch
from transformers.generation import BaseStreamer

# {column: format of a row}
COLUMNS = {
    "tok/s": "{tokens_per_second:.1f}",
    "speedup": "{speedup:.2f}x [{speedup_low:.2f}-{speedup_high:.2f}]",
    "vs generate()": "{speedup_vs_generate:.2f}x",
    "tau": "{tau:.2f}",
    "alpha": "{alpha:.3f}",
    "nodes": "{nodes:.1f}",
    "draft": "{share_draft:.0%}",
    "verify": "{share_verify:.0%}",
    "other": "{share_other:.0%}",
    "ms/round": "{round_ms:.1f}",
    "lossless": "{lossless}",
}
LEGEND = """\
tok/s          new tokens per second over all prompts, prefill included
speedup        over plain decoding, prompt by prompt: median [lower quartile-upper quartile]
vs generate()  speedup over transformers' own generate(), the median
tau            new tokens per round, the target's own included
alpha          accepted / tested drafted tokens; for chains only
nodes          drafted tokens that are verified per round
draft, verify, other (all the rest)   shares of a round's time, ms/round
lossless       every token is that of plain decoding (-: sampled with other noise)"""
LOSSLESS = {True: "yes", False: "NO", None: "-"}
# Keys of a row that are printed below the table
DETAILS = ("c", "expected_speedup", "alpha_overlap", "K", "runs", "swi_measured", "swi_ms",
           "swi_given", "first_divergence")
MEASURED = ("cost", "node_price", "start", "size")       # settings that bench.py may have measured

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

def headline(run):
    """Target, device, prompts, notes: the line that a run begins with."""
    a = run.a
    where = f"{torch.get_num_threads()} threads"
    if run.cuda:
        where = torch.cuda.get_device_name()
    about = [f"target {a.target}", str(run.model.dtype).removeprefix("torch."),
             f"{a.device} ({where})", f"temperature {a.temperature:g}",
             f"{len(run.prompts)} prompts", f"up to {a.max_new_tokens} new tokens"]
    return "; ".join([", ".join(about), *run.notes])

# ---------------------------------------------------------------- below a table
def notes(run, names, rows):
    """Lines below the table of all prompts: a legend and details."""
    lines = [LEGEND, "", f"baseline: plain decoding, {rows[0]['target_ms']:.2f} ms per token"]
    for name, row in zip(names, rows):
        lines += details(name, row)
    return lines + prices(run)

def details(name, row):
    """A line with the figures of an arm that have no column."""
    found = []
    for key in DETAILS:
        if row.get(key):
            found.append(f"{key} {rounded(row[key])}")
    # What a tree was built with, as given or as measured
    for key in MEASURED:
        if key in row["settings"]:
            found.append(f"{key} {rounded(row['settings'][key])}")
    if row["tree"] and row["speedup"] < 1:
        found.append("slower than plain decoding, see docs/speed.md")
    wanted = row["tree"] or row["lossless"] is False
    return [f"{name}: {'; '.join(found)}"] if wanted and found else []

def rounded(value):
    return f"{value:.3g}" if isinstance(value, float) else value

def prices(run):
    """What a draft and a node cost, in plain decoding steps, with the quartiles of the turns."""
    lines = []
    for label, price in run.prices.items():
        if price is None:
            continue
        drafting = "drafts without a forward"
        if price["cost"]:
            low, high = price["cost_range"]
            drafting = f"measured s_d / s_t {price['cost']:.3f} [{low:.3f}-{high:.3f}]"
        low, high = price["node_price_range"]
        node = f"{price['node_price']:.3f} [{low:.3f}-{high:.3f}]"
        lines.append(f"{label}: {drafting}; in plain decoding steps, a verified node takes {node}, "
                     f"and all else that a round with a tree adds {price['start']:.3f}")
    return lines

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

def show(run, arm):
    """Print an arm's continuation of the first prompt as it is made."""
    group, ids, limit = run.prompts[0]
    screen = Screen(run.tokenizer)
    print(f"\n--- {arm.name}, prompt 1 of {group}: {screen.form.format('accepted')}bonus")
    record = arm.decode(ids, limit, 0, streamer=screen)
    print(f"--- tau {record.total['new'] / max(1, record.total['rounds']):.2f}")
