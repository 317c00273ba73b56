"""What only the papers' tables need: more methods and more columns than bench.py has.

    alpha_overlap     GLIDE's alpha in sampling (section 5.1): the mean of sum_x min(p_T(x), p_D(x))
    alpha_depth       EDD's alpha: new tokens over the depth of the trees
    c                 GLIDE's cost coefficient: a drafter forward over a plain decoding step
    expected_speedup  GLIDE's E(Spd.), of alpha, c and the chain's length
    swi_ms            Cascade's standardized walltime improvement (section 5.1): a run of a model
                      costs its share of the target's weights
    swi_clock         the same, all drafting costing what it takes here

and "by_prompt", the same of each prompt, of which paper.py makes intervals.
"""
import json
import shlex
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

import bench
import maxgram
import verify
from runtime import load
from runtime.calls import read_call
from runtime.provenance import provenance

# ---------------------------------------------------------------- methods
def methods_of(a, loaded, run, rows):
    """The bench.Methods of a run: plain decoding, run.others, run.methods.  rows: of a batch."""
    methods = []
    for drafters, trees in run.methods:
        drafters = load.drafter_calls(drafters, a.checkpoint)
        trees = [read_call(tree, bench.TREES, "tree") for tree in trees]
        plain, generate, *more = bench.methods_of(loaded, drafters, trees, a.temperature, rows)
        methods += more
    library = partial(bench.library, loaded.model, a.temperature)
    others = []
    for name in run.others:
        if name == "generate()":
            others.append(generate)
        elif name == "lookup":
            # Prompt lookup is the library's Max-Gram; it does not search an encoder's input.
            lookup = partial(library, prompt_lookup_num_tokens=maxgram.N)
            others.append(bench.Method("prompt lookup", lookup))
        else:
            assisted = partial(library, assistant_model=loaded.stages[name])
            others.append(bench.Method(f"assisted generation ({name})", assisted))
    return [plain, *others, *methods]

class Overlap(verify.Rule):
    """A Rule that keeps sum_x min(p_T(x), p_D(x)) of each drafted token of sampled chains."""

    def __init__(self, rule):
        vars(self).update(vars(rule))
        self.of_rounds = []

    def choose(self, tree, logits, ids):
        if tree.p_draft is not None:
            # Nothing is drafted after the last node.
            p_target = self.p_target(logits[:-1])                                     # (n - 1, V)
            self.of_rounds.append(torch.minimum(p_target, tree.p_draft).sum(1).tolist())
        return super().choose(tree, logits, ids)

def observed(method, seen):
    """The same method, which appends to `seen`, for each decoding, what a Record lacks.

    That is an Overlap's list, and {number of a model of a cascade: its runs}.
    """
    models = getattr(method.pair[0], "models", []) if method.pair else []

    def decode(ids, new_tokens, rule):
        rule, clock = Overlap(rule), bench.Clock("other")
        for number, model in enumerate(models):
            align = partial(type(model).align, model)        # not that of an earlier decoding
            model.align = clock.timed(align, number)
        record = method.decode(ids, new_tokens, rule)
        seen.append((rule.of_rounds, clock.calls))
        return record
    return method._replace(decode=decode)

# ---------------------------------------------------------------- columns
def expected_speedup(alpha, c, gamma):
    """GLIDE's E(Spd.) (section 5.1): (1 - alpha^{gamma+1}) / ((1 - alpha) (c gamma + 1))"""
    return sum(alpha ** i for i in range(gamma + 1)) / (c * gamma + 1)

def swi(tokens, runs, costs):
    """Cascade's SWI (section 5.1): n / (count(S, M_t, T) + sum_i count(S, M_di, T) c_i)

    runs, costs: of the target, and of each model; the target's cost is 1.
    """
    return tokens / sum(count * cost for count, cost in zip(runs, costs))

def depth_of(parents):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)

def columns(method, results, seen, size):
    """bench.row_of, and the columns at the top of this file -> dict

    results: as of bench.measure.  seen: of each of these prompts, what observed() kept.  size: the
    number of the target's weights.
    """
    row = bench.row_of(method, results)
    if "tau" not in row:                                          # a baseline
        return row
    records = [found[method.name] for found in results]
    rounds = [one for record in records for one in record.rounds]
    depth = sum(depth_of(one.parents) for one in rounds)
    if depth:
        row["alpha_depth"] = sum(len(one.new) for one in rounds) / depth
    overlaps = []
    for record, (of_rounds, _) in zip(records, seen):
        drafted = (one for one in record.rounds if len(one.tokens) > 1)
        for one, values in zip(drafted, of_rounds):
            overlaps += values[:bench.counts([one])["tested"]]
    if overlaps:
        row["alpha_overlap"] = fmean(overlaps)
    # All drafting, in plain decoding steps
    drafting = sum(record.seconds.get("draft", 0.0) for record in records) / row["plain_ms"] * 1e3
    forwards = sum(record.calls.get("draft", 0) for record in records)
    models = getattr(method.pair[0], "models", None)              # None: no cascade
    if models is not None:
        runs = sum((runs for _, runs in seen), Counter())
        forwards = runs[0] if len(models) == 1 else 0             # several models differ in c
        # The target runs once in a round, and once for the prefill.
        counts = [len(rounds) + len(records), *(runs[number] for number in range(len(models)))]
        weights = [1, *(model.model.num_parameters() / size for model in models)]
        row["swi_ms"] = swi(row["tokens"], counts, weights)
        row["swi_clock"] = row["tokens"] / (counts[0] + drafting)
    if forwards:
        row["c"] = drafting / forwards
        if "alpha" in row:
            gamma = max(len(one.tokens) - 1 for one in rounds)
            row["expected_speedup"] = expected_speedup(row["alpha"], row["c"], gamma)
    return row

# ---------------------------------------------------------------- a run
def row_of(method, prompts, results, seen, loaded, temperature, rows=1):
    """A method's row, with "by_prompt".  rows: of a batch."""
    size = loaded.model.num_parameters()
    row = columns(method, results, seen, size)
    row |= bench.losslessness(method, results, prompts, loaded.target, temperature)
    row["by_prompt"] = []
    for number, (prompt, found, kept) in enumerate(zip(prompts, results, seen)):
        one = columns(method, [found], [kept], size)
        figures = {key: value for key, value in one.items() if isinstance(value, float)}
        # The prompts of one batch share their seconds: they count as one question.
        question = prompt.question if rows == 1 else number // rows
        row["by_prompt"].append({"kind": prompt.kind, "question": question, **figures})
    return row

def measure(name, run, path):
    """Measure a run of figures/runs.py and write its rows to `path`."""
    a = bench.parser().parse_args(shlex.split(run.flags))
    loaded = load.Loaded(a.target, a.checkpoint, a.dtype, a.device, graphs=a.graphs)
    prompts = bench.read_prompts(a.prompts or [bench.PROMPTS], loaded, a.max_new_tokens, a.limit)
    about = {"command": f"python figures/paper.py measure {name}", "flags": run.flags,
             "target": a.target.removeprefix(f"{Path.cwd()}/"), "dtype": a.dtype,
             "device": a.device, "graphs": a.graphs, "temperature": a.temperature,
             "max_new_tokens": a.max_new_tokens, **provenance(loaded.target.device)}
    found = []
    for batch in run.batches:
        copies = [prompt for prompt in prompts for _ in range(batch)] if run.copies else prompts
        rows = measure_batch(a, loaded, run, copies, batch)
        found += [about | {"batch": batch} | row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")

def measure_batch(a, loaded, run, prompts, batch):
    """Measure a run's methods, `batch` prompts at once -> rows."""
    methods = methods_of(a, loaded, run, batch)
    first = [prompts[0]._replace(limit=bench.WARM_UP)]
    bench.warm_up(methods, prompts if a.graphs else first, a.temperature, batch)
    # Of a batch nothing is kept but the Records.
    seen = {method.name: [([], Counter())] * len(prompts) for method in methods}
    if batch == 1:
        seen = {method.name: [] for method in methods}
        methods = [observed(method, seen[method.name]) for method in methods]
    results = bench.measure(methods, prompts, a.temperature, rows=batch)
    if len(results) < len(prompts) // batch * batch:
        raise KeyboardInterrupt
    rows = [row_of(method, prompts, results, seen[method.name], loaded, a.temperature, batch)
            for method in methods]
    bench.print_table([method.name for method in methods], rows)
    return rows
