"""Is a drafter's confidence right?  Which tokens are accepted?  What does a verified node cost?

    python figures/probe.py calibration --drafter edd "edd(temperature=1)"
    python figures/probe.py positions --drafter glide "cascade(base, k=30)" --limit 12
    python figures/probe.py costs
    python figures/probe.py lengths --target smollm2
    python figures/probe.py ewif

calibration  Is the confidence the probability that a token is accepted?  EDD and PCT (ACL 2025),
             section 3.2, Figure 3(b); GLIDE with a CAPE (arXiv 2402.02082), Figure 1(b).  Chains of
             ten.  Tokens after the first rejection in a chain are left out, since the target has
             not scored them.  temperature=1 gives raw confidences.
positions    How likely is the i-th token of a chain of thirty to be accepted, and so all before it?
             Cascade Speculative Drafting (arXiv 2312.11462), Figures 2 and 3.  Cascades and
             Max-Gram write chains of their own length.
costs        T_v(n): milliseconds of a forward of the target with n nodes after 256 tokens.  PCT
             takes a node as free (section 3.2), GLIDE a forward as bound by memory (appendix D):
             true as far as the ratio T_v(n) / T_v(1) stays near 1.
lengths      T_v(n) after 256 to 7 000 tokens, with grouped queries folded (runtime/attention.py)
             and by the model's own attention, in turns.
ewif         Table 1 of Cascade by Theorem 4.5: expected tokens of a round over its time, in target
             forwards, if acceptances are independent.  It decodes nothing.

Decoding is greedy; the flags are bench.py's.
"""
import json
import shlex
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # so that it runs from anywhere

import torch

import bench
import cape
import verify
from runtime import load
from runtime.program import program
from runtime.provenance import provenance

CHAIN, LONG_CHAIN = 10, 30                 # tokens of a chain: calibration, positions
BINS = 10                                  # of confidence
CONTEXT = 256                              # tokens before a forward whose cost is measured
NODES = 1, 2, 4, 8, 16, 32, 64             # of such a forward
LENGTHS, FEW_NODES = (256, 1024, 4096, 7000), (1, 6, 18)       # the same, of `lengths`
TURNS, REPEATS = 5, 5                      # REPEATS calls are timed together, TURNS times
# Cascade's Table 1.  alpha of FLAN-T5-small and -base (Leviathan et al. 2023); million parameters,
# of FLAN-T5-XXL last; [(data set, {model: how many tokens it drafts}, the largest model first)]
ALPHAS = {"CNN/DM": {"small": 0.65, "base": 0.73}, "EnDe": {"small": 0.75, "base": 0.80}}
WEIGHTS, XXL = {"small": 77, "base": 248}, 11_300
TABLE_1 = [("CNN/DM", {"small": 9}), ("CNN/DM", {"base": 8}), ("CNN/DM", {"base": 5, "small": 3}),
           ("EnDe", {"small": 12}), ("EnDe", {"base": 11}), ("EnDe", {"base": 5, "small": 8})]

# ---------------------------------------------------------------- calibration
def scored_tokens(loaded, drafter, prompt):
    """Decode a prompt by chains -> [(confidence, accepted?)] of the tokens that were scored

    A confidence is the drafter's largest probability, that of its token.
    """
    noted = []                                     # of each round: its confidences

    def build(expand, root):
        confidences = []

        def noting(tokens, parents):
            probs = expand(tokens, parents)                                           # (1, V)
            confidences.append(probs.max().item())
            return probs
        noting.remaining = expand.remaining
        noted.append(confidences)
        return cape.chain(noting, root, gamma=CHAIN)

    out = verify.generate(loaded.target, drafter, build, prompt.ids, prompt.limit, eos=loaded.eos)
    scored = []
    for one, confidences in zip((one for one in out.rounds if len(one.tokens) > 1), noted):
        # one.new: the accepted tokens, then the target's own, where the first draft was rejected.
        for drafted, true, confidence in zip(one.tokens[1:], one.new, confidences):
            scored.append((confidence, drafted == true))
    return scored

def calibration_of(pairs):
    """[(confidence, accepted?)] -> {"ece", "bin 90": the share accepted of those above .9, ...}

    Bins are closed on the right, (0, .1] ... (.9, 1].
    """
    row = {"ece": 0.0}
    for b in range(BINS):
        inside = [pair for pair in pairs if b < pair[0] * BINS <= b + 1]
        row[f"bin {100 * b // BINS}"] = None
        if inside:
            confidence = fmean(confidence for confidence, _ in inside)
            share = fmean(accepted for _, accepted in inside)
            row[f"bin {100 * b // BINS}"] = share
            # ECE = sum_b |B_b| / n |acc(B_b) - conf(B_b)|
            row["ece"] += len(inside) / len(pairs) * abs(share - confidence)
    return row

# ---------------------------------------------------------------- acceptance by position
def rounds_of(loaded, drafter, prompt):
    """Decode a prompt by long chains -> [verify.Round].  A cascade writes a chain of its own."""
    build = getattr(drafter, "chain", partial(cape.chain, gamma=LONG_CHAIN))
    out = verify.generate(loaded.target, drafter, build, prompt.ids, prompt.limit, eos=loaded.eos)
    return out.rounds

def positions_of(rounds):
    """verify.Rounds of chains -> {"position 5": the share of fifth tokens that were accepted}"""
    drafted, accepted = Counter(), Counter()
    for one in rounds:
        count = min(len(one.path) - 1, len(one.new))
        # Where the output ended within the accepted tokens, the target did not score the rest.
        ended = len(one.new) == count
        drafted.update(range(count if ended else len(one.tokens) - 1))
        accepted.update(range(count))
    return {f"position {i + 1}": accepted[i] / drafted[i] for i in range(len(drafted))}

# ---------------------------------------------------------------- the cost of a node
@torch.inference_mode()
def timed(target, prompts, context, sizes, folds):
    """Time forwards of chains after `context` of the prompts' tokens -> {(fold, n): milliseconds}

    sizes: the numbers of nodes.  folds: whether grouped queries are folded, each that is tried.
    """
    given = [token for prompt in prompts for token in prompt.ids]
    ids = (given * context)[:context]
    token = torch.tensor(ids[-1:], device=target.device)
    parents = torch.arange(-1, sizes[-1], device=target.device)
    target.prefill(ids, sizes[-1])
    own = target.folds
    found = {(fold, n): [] for fold in folds for n in sizes}
    for _ in range(TURNS + 1):
        # They take turns, since other programs disturb.
        for target.folds, n in found:
            started = time.perf_counter()
            for _ in range(REPEATS):
                target.forward(token.repeat(n), parents[:n])
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            found[target.folds, n].append((time.perf_counter() - started) / REPEATS)
    target.folds = own
    # The first turn warms up.
    return {key: 1e3 * median(seconds[1:]) for key, seconds in found.items()}

def costs(target, prompts):
    """A row for each number of nodes."""
    ms = timed(target, prompts, CONTEXT, NODES, [target.folds])
    return [{"drafter": f"n = {n}", "ms": ms[target.folds, n],
             "ratio": ms[target.folds, n] / ms[target.folds, 1]} for n in NODES]

def lengths(target, prompts):
    """A row for each length of the text and number of nodes."""
    rows = []
    for context in LENGTHS:
        ms = timed(target, prompts, context, FEW_NODES, [False, True])
        for n in FEW_NODES:
            rows.append({"drafter": f"{context} tokens, n = {n}", "own_ms": ms[False, n],
                         "own_ratio": ms[False, n] / ms[False, 1],
                         "ms": ms[True, n], "ratio": ms[True, n] / ms[True, 1]})
    return rows

# ---------------------------------------------------------------- Cascade's Table 1
def ewif_horizontal(alphas, costs):
    """Theorem 4.5: T = (sum_{i=0}^k prod_{j=1}^i alpha_j) / (1 + sum_{i=1}^k c_i)

    alphas, costs: of the model that drafts the i-th token.
    """
    tokens = accepted = 1
    for alpha in alphas:
        accepted *= alpha          # Corollary 4.6: the probability that token i is accepted
        tokens += accepted
    return tokens / (1 + sum(costs))

def table_1():
    """-> rows of Table 1; k1, k2: tokens that the first, the second model drafts."""
    rows = []
    for data, counts in TABLE_1:
        drafting = [name for name, count in counts.items() for _ in range(count)]
        value = ewif_horizontal([ALPHAS[data][name] for name in drafting],
                                [WEIGHTS[name] / XXL for name in drafting])
        k1, k2 = [*counts.values(), None][:2]
        rows.append({"drafter": f"{data} ({', '.join(counts)})", "k1": k1, "k2": k2, "ewif": value})
    return rows

# ---------------------------------------------------------------- the command line
def print_rows(rows, keys):
    """Print these keys of the rows as a table."""
    width = max(len(row["drafter"]) for row in rows)
    print(" " * width, *(f"{key:>11}" for key in keys))
    for row in rows:
        cells = ("-" if row.get(key) is None else f"{row[key]:.3g}" for key in keys)
        print(f"{row['drafter']:{width}}", *(f"{cell:>11}" for cell in cells))

def measured(a):
    """calibration or positions, a row for each drafter; or costs -> rows"""
    calls = load.drafter_calls(a.drafter, a.checkpoint)
    loaded = load.Loaded(a.target, a.checkpoint, a.dtype, a.device, graphs=a.graphs)
    prompts = bench.read_prompts(a.prompts or [bench.PROMPTS], loaded, a.max_new_tokens, a.limit)
    if a.measurement in ("costs", "lengths"):
        return {"costs": costs, "lengths": lengths}[a.measurement](loaded.target, prompts)
    decode, figures = {"calibration": (scored_tokens, calibration_of),
                       "positions": (rounds_of, positions_of)}[a.measurement]
    rows = []
    for call in calls:
        drafter = loaded.drafter(call)
        found = [one for prompt in prompts for one in decode(loaded, drafter, prompt)]
        rows.append({"drafter": call.label, "prompts": len(prompts), **figures(found)})
    return rows

KEYS = {"calibration": ["ece", *(f"bin {b}" for b in (10, 30, 50, 70, 90))],
        "positions": [f"position {i}" for i in (1, 2, 3, 5, 10, 20)],
        "costs": ["ms", "ratio"], "lengths": ["own_ms", "own_ratio", "ms", "ratio"],
        "ewif": ["k1", "k2", "ewif"]}

@program
def main(argv):
    p = bench.parser()
    p.description = "Calibration, positions, costs, EWIF: see the top of this file."
    p.add_argument("measurement", choices=KEYS)
    p.set_defaults(limit=bench.FEW)
    a = p.parse_args(argv)
    rows = table_1() if a.measurement == "ewif" else measured(a)
    print_rows(rows, KEYS[a.measurement])
    if a.json:
        about = {"command": shlex.join(["python", "figures/probe.py", *argv]),
                 "target": a.target.removeprefix(f"{Path.cwd()}/"),
                 **provenance(torch.device(a.device))}
        Path(a.json).write_text("".join(json.dumps(about | row) + "\n" for row in rows))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
