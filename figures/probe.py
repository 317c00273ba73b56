"""Is a drafter's confidence right?  What does a verified node cost?

    python figures/probe.py calibration --drafter edd "edd(temperature=1)"
    python figures/probe.py costs

calibration  Is the confidence the probability that a token is accepted?  EDD and PCT (ACL 2025),
             section 3.2, Figure 3(b); GLIDE with a CAPE (arXiv 2402.02082), Figure 1(b).  Chains of
             ten.  Tokens after the first rejection in a chain are left out, since the target has
             not scored them.  temperature=1 gives raw confidences.
costs        T_v(n): milliseconds of a forward of the target with n nodes after 256 tokens.  PCT
             takes a node as free (section 3.2), GLIDE a forward as bound by memory (appendix D):
             true as far as the ratio T_v(n) / T_v(1) stays near 1.

Decoding is greedy; the flags are bench.py's.
"""
import json
import shlex
import sys
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # so that it runs from anywhere

import torch

import bench
import cape
import verify
from runtime import load
from runtime.program import program

CHAIN = 10                                 # tokens
BINS = 10                                  # of confidence
CONTEXT = 256                              # tokens before a forward whose cost is measured
NODES = 1, 2, 4, 8, 16, 32, 64             # of such a forward
TURNS, REPEATS = 5, 5                      # all sizes take TURNS turns, of REPEATS calls each

# ---------------------------------------------------------------- calibration
def scored_tokens(loaded, drafter, prompt):
    """Decode a prompt by chains -> [(confidence, accepted?)] of the tokens that were scored"""
    noted = []                                     # of each round: its confidences

    def build(expand, root):
        chosen, p, _ = cape.draft(expand, root, CHAIN, cape.best)
        noted.append(p.tolist())
        return cape.chain_tree(root, chosen, len(chosen))

    out = verify.generate(loaded.target, drafter, build, prompt.ids, prompt.limit, eos=loaded.eos)
    drafted = [one for one in out.rounds if len(one.tokens) > 1]
    # one.new: the accepted tokens, then the target's own, where the first draft was rejected.
    return [(confidence, token == true) for one, confidences in zip(drafted, noted)
            for token, true, confidence in zip(one.tokens[1:], one.new, confidences)]

def calibration_of(pairs):
    """[(confidence, accepted?)] -> {"ece", "bin 90": the share accepted of those above .9, ...}

    Bins are closed on the right, (0, .1] ... (.9, 1].
    """
    row = {"ece": 0.0}
    for b in range(BINS):
        inside = [pair for pair in pairs if b < pair[0] * BINS <= b + 1]
        share = fmean(accepted for _, accepted in inside) if inside else None
        row[f"bin {100 * b // BINS}"] = share
        if inside:
            # ECE = sum_b |B_b| / n |acc(B_b) - conf(B_b)|
            confidence = fmean(confidence for confidence, _ in inside)
            row["ece"] += len(inside) / len(pairs) * abs(share - confidence)
    return row

def calibration(a, loaded, prompts):
    """A row for each drafter."""
    rows = []
    for call in load.drafter_calls(a.drafter, a.checkpoint):
        drafter = loaded.drafter(call)
        pairs = [one for prompt in prompts for one in scored_tokens(loaded, drafter, prompt)]
        rows.append({"drafter": call.label, "prompts": len(prompts), **calibration_of(pairs)})
    return rows

# ---------------------------------------------------------------- the cost of a node
@torch.inference_mode()
def costs(a, loaded, prompts):
    """A row for each number of nodes."""
    target = loaded.target
    ids = ([token for prompt in prompts for token in prompt.ids] * CONTEXT)[:CONTEXT]
    token = torch.tensor(ids[-1:], device=target.device)
    parents = torch.arange(-1, NODES[-1], device=target.device)
    target.prefill(ids, NODES[-1])
    turns = []
    for _ in range(TURNS + 1):
        clock = bench.Clock(None, target.device.type == "cuda")
        for n in NODES:
            forward = clock.timed(target.forward, n)
            for _ in range(REPEATS):
                forward(token.repeat(n), parents[:n])
        turns.append(clock.seconds())
    # The first turn warms up.
    ms = {n: 1e3 * median(seconds[n] for seconds in turns[1:]) / REPEATS for n in NODES}
    return [{"drafter": f"n = {n}", "ms": ms[n], "ratio": ms[n] / ms[1]} for n in NODES]

# ---------------------------------------------------------------- the command line
@program
def main(argv):
    p = bench.parser()
    p.description = "Calibration and costs: see the top of this file."
    p.add_argument("measurement", choices=("calibration", "costs"))
    a = p.parse_args(argv)
    loaded, prompts = bench.prepare(a)
    rows = (costs if a.measurement == "costs" else calibration)(a, loaded, prompts)
    for row in rows:
        values = (f"{key} {value:.3g}" for key, value in row.items() if isinstance(value, float))
        print(row["drafter"], *values, sep="; ")
    if a.json:
        about = bench.about_of(a, loaded, shlex.join(["python", "figures/probe.py", *argv]))
        Path(a.json).write_text("".join(json.dumps(about | row) + "\n" for row in rows))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
