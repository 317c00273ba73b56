"""What only the papers' tables need: more methods and more columns than bench.py has.

    alpha_overlap     GLIDE's alpha in sampling (section 5.1): the mean of sum_x min(p_T(x), p_D(x))
    alpha_depth       EDD's alpha: new tokens over the depth of the trees
    c                 GLIDE's cost coefficient: a drafter forward over a plain decoding step
    expected_speedup  GLIDE's E(Spd.) (section 5.1), of alpha, c and the chain's length
    swi_ms            Cascade's standardized walltime improvement (section 5.1): a run of a model
                      costs its share of the target's weights
    swi_clock         the same, all drafting costing what it takes here

and "by_prompt", the same of each prompt, of which paper.py makes intervals.
"""
import json
import shlex
from collections import Counter, namedtuple
from functools import partial
from statistics import fmean

import torch

import bench
import maxgram
import verify
from runtime import load
from runtime.calls import read_call

# ---------------------------------------------------------------- methods
def methods_of(a, loaded, run):
    """The bench.Methods of a run: plain decoding, run.others, run.methods."""
    methods = []
    for drafters, trees in run.methods:
        drafters = load.drafter_calls(drafters, a.checkpoint)
        trees = [read_call(tree, bench.TREES, "tree") for tree in trees]
        plain, generate, *more = bench.methods_of(loaded, drafters, trees, a.temperature)
        methods += more
    # Prompt lookup is the library's Max-Gram; it does not search an encoder's input.
    arguments = {"generate()": {}, "prompt lookup": {"prompt_lookup_num_tokens": maxgram.N}}
    for name, model in loaded.stages.items():
        arguments[f"assisted generation ({name})"] = {"assistant_model": model}
    others = [bench.Method(name, partial(generate.decode, **arguments[name]))
              for name in run.others]
    return [plain, *others, *methods]

# A bench.Record, and what it lacks.  overlaps: of each round that drafted, those of its tokens.
# calls: {"draft": forwards of the drafter, number of a model of a cascade: its runs}
Observed = namedtuple("Observed", [*bench.Record._fields, "overlaps", "calls"])

class Overlap(verify.Rule):
    """A Rule that keeps sum_x min(p_T(x), p_D(x)) of each drafted token of sampled chains."""

    def __init__(self, rule):
        vars(self).update(vars(rule))
        self.overlaps = []

    def choose(self, tree, logits, ids):
        if tree.p_draft is not None:
            # Nothing is drafted after the last node.
            p_target = self.p_target(logits[:-1])                                     # (n - 1, V)
            self.overlaps.append(torch.minimum(p_target, tree.p_draft).sum(1).tolist())
        return super().choose(tree, logits, ids)

def observed(method):
    """The same method, whose Records are Observed ones.  It decodes one prompt at once."""
    calls = Counter()

    def count(thing, name, key):
        inner = getattr(thing, name)

        def call(*args, **more):
            calls[key] += 1
            return inner(*args, **more)
        setattr(thing, name, call)

    if method.pair:
        drafter, _ = method.pair
        count(drafter, "expand", "draft")
        for number, model in enumerate(getattr(drafter, "models", [])):
            count(model, "align", number)

    def decode(prompts, rules):
        calls.clear()
        rule = Overlap(*rules)
        [record] = method.decode(prompts, [rule])
        return [Observed(*record, rule.overlaps, calls.copy())]
    return method._replace(decode=decode)

# ---------------------------------------------------------------- columns
def expected_speedup(alpha, c, gamma):
    """GLIDE's E(Spd.): (1 - alpha^{gamma+1}) / ((1 - alpha) (c gamma + 1))"""
    return sum(alpha ** i for i in range(gamma + 1)) / (c * gamma + 1)

def swi(tokens, runs, costs):
    """Cascade's SWI: n / (count(S, M_t, T) + sum_i count(S, M_di, T) c_i); c of the target is 1."""
    return tokens / sum(count * cost for count, cost in zip(runs, costs))

def columns(method, results, size):
    """bench.row_of, and the columns at the top of this file -> dict

    results: as of bench.measure, of observed() methods.  size: the number of the target's weights.
    """
    row = bench.row_of(method, results)
    if "tau" not in row:                                          # a baseline
        return row
    records = [found[method.name] for found in results]
    rounds = [one for record in records for one in record.rounds]
    # A node's depth is the number of its ancestors.
    masks = [verify.ancestor_mask(torch.tensor(one.parents)) for one in rounds]
    depth = sum(mask.sum(1).max().item() - 1 for mask in masks)
    if depth:
        row["alpha_depth"] = sum(len(one.new) for one in rounds) / depth
    overlaps = []
    for record in records:
        drafted = (one for one in record.rounds if len(one.tokens) > 1)
        for one, values in zip(drafted, record.overlaps):
            _, tested = bench.accepted_and_tested(one)
            overlaps += values[:tested]
    if overlaps:
        row["alpha_overlap"] = fmean(overlaps)
    # All drafting, in plain decoding steps
    drafting = sum(record.seconds.get("draft", 0.0) for record in records) / row["plain_ms"] * 1e3
    calls = sum((record.calls for record in records), Counter())
    forwards = calls["draft"]
    models = getattr(method.pair[0], "models", None)              # None: no cascade
    if models is not None:
        forwards = calls[0] if len(models) == 1 else 0            # several models differ in c
        # The target runs once in a round, and once for the prefill.
        runs = [len(rounds) + len(records), *(calls[number] for number in range(len(models)))]
        weights = [1, *(model.model.num_parameters() / size for model in models)]
        row["swi_ms"] = swi(row["tokens"], runs, weights)
        row["swi_clock"] = row["tokens"] / (runs[0] + drafting)
    if forwards:
        row["c"] = drafting / forwards
        if "alpha" in row:
            gamma = max(len(one.tokens) - 1 for one in rounds)
            row["expected_speedup"] = expected_speedup(row["alpha"], row["c"], gamma)
    return row

# ---------------------------------------------------------------- a run
def measure(name, run, path):
    """Measure a run of figures/runs.py and write its rows to `path`."""
    a = bench.parser().parse_args(shlex.split(run.flags))
    loaded, prompts = bench.prepare(a)
    about = bench.about_of(a, loaded, f"python figures/paper.py measure {name}")
    found = []
    for batch in run.batches:
        of_batch = about | {"flags": run.flags, "batch": batch}
        given = [prompt for prompt in prompts for _ in range(batch)] if run.copies else prompts
        found += [of_batch | row for row in rows_of(a, loaded, run, given, batch)]
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")

def rows_of(a, loaded, run, prompts, batch):
    """Measure a run's methods, `batch` prompts at once -> rows, with "by_prompt"."""
    methods, figures = methods_of(a, loaded, run), bench.row_of
    if batch == 1:
        methods = [observed(method) for method in methods]
        figures = partial(columns, size=loaded.model.num_parameters())
    results = list(bench.measure(methods, prompts, a.temperature, rows=batch, graphs=a.graphs))
    rows = []
    for method in methods:
        row = figures(method, results)
        row |= bench.losslessness(method, results, prompts, loaded.target, a.temperature)
        row["by_prompt"] = []
        for number, (prompt, found) in enumerate(zip(prompts, results)):
            one = {key: value for key, value in figures(method, [found]).items()
                   if isinstance(value, float)}
            # The prompts of one batch share their seconds: they count as one question.
            question = prompt.question if batch == 1 else number // batch
            row["by_prompt"].append({"kind": prompt.kind, "question": question, **one})
        rows.append(row)
    bench.print_table([method.name for method in methods], rows)
    return rows
