"""What a run of bench.py prints: its table, a legend, averages in words, notes, texts in colour.

    print(table(names, rows))                        # rows: bench.row_of's, names: their arms'
    print(legend(), averages(names, rows, "plain"))
    show(run, arm)                                   # a continuation, round by round

Nothing here is measured but where an output first leaves plain decoding's (divergence).
"""
import re
import sys

import torch
from transformers.generation import BaseStreamer

from runtime import measure as clock

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
tok/s: new tokens over all seconds, prefill included; vs generate(): speedup over transformers' own
speedup: over plain decoding, prompt by prompt: median [lower quartile-upper quartile]
tau: new tokens a round, the target's own included; alpha: accepted / tested drafted tokens (chains)
nodes: drafted tokens verified a round; draft, verify, other (the rest): shares of ms/round
lossless: token for token plain decoding's output (-: sampled with other noise)"""
SHOWN = {True: "yes", False: "NO", None: "-"}            # of lossless
# Keys of a row that are printed under the tables
FACTS = "c|expected_speedup|alpha_overlap|K|runs|swi_.*|first_divergence"
SLOWER = 0.995                                           # speedups below are no rounding of 1.00

def is_mistake(why):
    """Whether an exception is a user's mistake, one sentence long.

    Its class is called UserError.  verify.py, maxgram.py and runtime/text.py work when they are copied
    alone, so each may have a class of its own.
    """
    return any(each.__name__ == "UserError" for each in type(why).__mro__)

# ---------------------------------------------------------------- the table
def groups_of(prompts):
    """{kind: its prompts' numbers}, all first; kinds are left out where there is one."""
    kinds = {}
    for i, (group, _, _) in enumerate(prompts):
        kinds.setdefault(group, []).append(i)
    whole = {"all": list(range(len(prompts)))}
    return whole | kinds if len(kinds) > 1 else whole

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
        shown = {**row, "lossless": SHOWN[row["lossless"]]}
        if row["tau"] is None:                                      # baselines have no rounds
            shown |= dict.fromkeys(f"share_{key}" for key in clock.SHARES)
        lines.append([name, *(cell(form, shown) for form in COLUMNS.values())])
    first, *widths = [max(map(len, column)) for column in zip(*lines)]
    text = []
    for name, *cells in lines:
        right = [cell.rjust(width) for cell, width in zip(cells, widths)]
        text.append("  ".join([name.ljust(first), *right]).rstrip())
    return "\n".join(text)

# ---------------------------------------------------------------- under the table
def legend(graphs=False):
    """The columns in a few words each.  graphs: whether our arms replay CUDA graphs."""
    if graphs:
        return LEGEND + "\nvs generate() compares graphs with transformers' eager forwards"
    return LEGEND

def averages(names, rows, base):
    """Which average the speedup is, and what another one says.  base: the baseline's name."""
    plain = rows[names.index(base)]["tokens_per_second"]
    ratios = [f"{name} {row['tokens_per_second'] / plain:.2f}x" for name, row in zip(names, rows)]
    return f"ratio of totals, all tokens over all seconds, not the median: {', '.join(ratios)}"

def slower(names, rows):
    """A note for each drafted arm slower than plain decoding: the reason, and what to do."""
    notes = []
    for name, row in zip(names, rows):
        if not row["tree"] or row["speedup"] >= SLOWER or not row["round_ms"]:
            continue
        steps = row["round_ms"] / row["target_ms"]
        # The target's own token of a round is no node.
        rejected = row["nodes"] - (row["tau"] - 1)
        if row["share_draft"] > row["share_verify"]:
            advice = "a smaller drafter"
        else:
            advice = "fewer nodes (a shorter chain, --tree pct-cost)"
        notes.append(
            f"{name} is slower than plain decoding: a round takes {steps:.1f} plain steps, "
            f"{row['share_draft']:.0%} of it drafting, and gives {row['tau']:.1f} tokens; of "
            f"{row['nodes']:.1f} nodes verified {rejected:.1f} are not accepted.  Try {advice}, or "
            "a drafter that knows such text")
    return notes

def chains_only(run):
    """A note for each cascade of models that was given other trees than its own chain."""
    notes = []
    for label, drafter in run.drafters.items():
        others = [tree.label for tree in run.trees if tree.name not in ("chain", "drawn")]
        # Max-Gram alone has no stages: a tree that prices nodes shortens its chain where it should.
        if getattr(drafter, "stages", None) and others:
            notes.append(f"{label} drafts its whole chain whatever the tree: {', '.join(others)} "
                         "takes as long to draft; --tree chain is enough")
    return notes

def facts(run, names, rows, base):
    """Lines about the rows of all prompts: baseline, costs, runs of stages, first divergences."""
    first = rows[names.index(base)]
    repeats = first["distinct_4grams"] or 0
    lines = [f"baseline: {base}, {first['target_ms']:.2f} ms a token; distinct 4-grams of its "
             f"output: {repeats:.0%}"]
    for name, row in zip(names, rows):
        found = []
        for key, value in row.items():
            if value and re.fullmatch(FACTS, key):
                found.append(f"{key} {round(value, 3) if isinstance(value, float) else value}")
        if row["tree"] or row["lossless"] is False:
            lines.append(f"{name}: {'; '.join(found)}")
    return lines + chains_only(run)

def headline(run):
    """Target, device, prompts, notes: the line that a run begins with."""
    a = run.a
    where = f"{torch.get_num_threads()} threads"
    if run.cuda:
        where = torch.cuda.get_device_name()
    about = [f"target {a.target}", a.dtype, f"{a.device} ({where})",
             f"temperature {a.temperature:g}", f"{len(run.prompts)} prompts",
             f"up to {a.max_new_tokens} new tokens"]
    return "; ".join([", ".join(about), *run.notes])

def progress(bar, done, prompts, speeds):
    """After each prompt: {arm: speedup so far} beside the bar, or without a terminal in a line."""
    if not bar.disable:
        bar.set_postfix_str(", ".join(f"{name} {speed:.2f}x" for name, speed in speeds.items()))
        return
    fastest = ""
    if speeds:
        name = max(speeds, key=speeds.get)
        fastest = f"; fastest so far: {name} {speeds[name]:.2f}x"
    print(f"prompt {done} of {prompts}{fastest}", file=sys.stderr, flush=True)

# ---------------------------------------------------------------- lossless?
def losses(run, arm, truth, which):
    """{"lossless": whether all tokens are those of the arm `truth`, "first_divergence": where not}.

    Both None where tokens are sampled with other noise, so that others are expected.
    """
    # A chain sampled from the drafter gives the target's distribution, but not the tokens of plain
    # sampling.  All other arms of ours do: their noise is keyed by position.
    sampled = any(arm.results[i].total["drawn"] for i in which)
    same_noise = arm.plain or arm.build and not sampled
    if run.a.temperature > 0 and not same_noise:
        return {"lossless": None, "first_divergence": None}
    for i in which:
        ours, plain = arm.results[i].tokens, truth.results[i].tokens
        if ours != plain:
            where = divergence(run.target, run.prompts[i][1], ours, plain)
            return {"lossless": False, "first_divergence": {"prompt": i, **where}}
    return {"lossless": True, "first_divergence": None}

@torch.inference_mode()
def divergence(target, ids, ours, plain):
    """Where an output first differs from plain decoding's, and how near the two tokens' logits are.

    -> {"token": counted from 0, "logit_gap": plain decoding's minus ours, None where one ends}
    """
    at = 0
    while ours[at:at + 1] == plain[at:at + 1] and at < len(ours):
        at += 1
    gap = None
    if at < min(len(ours), len(plain)):
        target.capture({})
        logits = target.prefill(ids)                                # (V,)
        if at:
            logits = target.sync(target.ids + plain[:at])[-1]
        gap = (logits[plain[at]] - logits[ours[at]]).item()
    return {"token": at, "logit_gap": gap}

# ---------------------------------------------------------------- a continuation as it is made
class Screen(BaseStreamer):
    """Prints each round's tokens: accepted ones in colour or [brackets], then the target's own."""
    def __init__(self, tokenizer):
        self.tokenizer, self.made = tokenizer, []
        self.form = "\033[32m{}\033[0m" if sys.stdout.isatty() else "[{}]"

    def text(self):
        # Incomplete UTF-8 is held back.
        return self.tokenizer.decode(self.made).rstrip("\ufffd")

    def put(self, value):
        if value.ndim > 1:                                          # the prompt
            return
        *accepted, own = value.tolist()
        for tokens, form in ((accepted, self.form), ([own], "{}")):
            before = self.text()
            self.made += tokens
            fresh = self.text()[len(before):]
            print(form.format(fresh) if fresh else "", end="", flush=True)

    def end(self):
        print()

def show(run, arm):
    """Print arm's continuation of the first prompt as it is made."""
    group, ids, limit = run.prompts[0]
    screen = Screen(run.tokenizer)
    print(f"\n--- {arm.name}, prompt 1 of {group}: {screen.form.format('accepted')}bonus")
    out = arm.decode(ids, limit, streamer=screen)
    print(f"--- tau {out.tau:.2f}")
