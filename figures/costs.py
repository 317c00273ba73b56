"""What does a forward of n nodes cost?  T_v(n) / T_v(1), and the bandwidth of plain decoding.

    python figures/costs.py                                       # the stand-in
    python figures/costs.py --target lmsys/vicuna-7b-v1.5 --dtype float16 --contexts 512 3072

PCT takes a verified node as free (EDD and PCT, ACL 2025, section 3.2), and GLIDE calls the target's
forward bound by memory (appendix D).  Both hold as far as T_v(n) / T_v(1) stays near 1.  A step of
plain decoding reads all weights and the KV cache once; its bytes over its seconds, beside what the
memory can deliver, say how honest the baseline is.

    T_v(n)      seconds of a forward of the target with n nodes, a chain, after `context` tokens

With c, a drafter forward over a plain decoding step (--c; bench.py measures it), the last lines say
what drafting has to yield before it is faster than plain decoding: from which acceptance rate a
chain is, and from which tau a tree.
"""
import inspect
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # so that it runs from anywhere

import numpy as np
import torch

import bench
import probe
from runtime.program import program

NODES = 1, 2, 4, 8, 16, 32, 64              # of a forward
TURNS, REPEATS = 5, 5                       # REPEATS calls are timed together, TURNS times
CHAINS = 1, 3, 5                            # gammas
TREES = 16, 32                              # nodes, drafted by as many forwards as CAPE's five

def step_bytes(model, context):
    """Bytes that a plain decoding step reads: weights, keys and values of the context."""
    c = model.config
    table = model.get_input_embeddings().weight
    weights = model.num_parameters()        # a table that is also the head counts once
    if model.get_output_embeddings().weight is not table:
        weights += c.hidden_size - table.numel()               # of a table alone one row is read
    cached = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * context
    return (weights + cached) * table.element_size()

def seconds_of(target, forward):
    """Seconds of one call, the device's work included."""
    started = time.perf_counter()
    for _ in range(REPEATS):
        forward()
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / REPEATS

@torch.inference_mode()
def forward_seconds(target, ids):
    """{n: median seconds of a forward of a chain of n nodes after the prompt ids}"""
    token = torch.tensor(ids[-1:], device=target.device)
    parents = torch.arange(-1, NODES[-1], device=target.device)
    target.prefill(ids, NODES[-1])
    found = {n: [] for n in NODES}
    for _ in range(TURNS + 1):
        # The sizes take turns, since other programs disturb.
        for n in NODES:
            forward = partial(target.forward, token.repeat(n), parents[:n])
            found[n].append(seconds_of(target, forward))
    # The first turn warms up.
    return {n: median(seconds[1:]) for n, seconds in found.items()}

def least_alpha(steps, gamma):
    """The acceptance rate from which a chain of gamma tokens yields as many tokens as `steps`.

    None: not even if every token is accepted.
    """
    for alpha in np.arange(0, 1.001, 0.01):
        # 1 + alpha + ... + alpha^gamma, the target's own token included
        tokens = sum(alpha ** i for i in range(gamma + 1))
        if tokens >= steps:
            return round(float(alpha), 2)

def break_even(seconds, c):
    """From where on chains and trees are faster than plain decoding -> rows.

    seconds: {n: T_v(n)}.
    """
    sizes = sorted(seconds)
    ratios = [seconds[n] / seconds[1] for n in sizes]
    rows = []
    for gamma in CHAINS:
        # Plain decoding steps that a round takes: the root and gamma nodes, and gamma drafts
        steps = float(np.interp(gamma + 1, sizes, ratios) + c * gamma)
        rows.append({"drafter": f"a chain of {gamma}", "steps": steps,
                     "least_alpha": least_alpha(steps, gamma)})
    for nodes in TREES:
        steps = float(np.interp(nodes + 1, sizes, ratios) + 5 * c)
        rows.append({"drafter": f"a tree of {nodes}", "steps": steps, "least_tau": steps})
    return rows

def rows_of(a, setup, prompts):
    """-> a row for each context and number of nodes, and those of break_even"""
    given = [token for prompt in prompts for token in prompt.ids]
    rows = []
    for context in a.contexts:
        ids = (given * (context // len(given) + 1))[:context]
        seconds = forward_seconds(setup.target, ids)
        bandwidth = step_bytes(setup.model, context) / seconds[1]
        of_context = [{"drafter": f"{n} tokens", "ms": 1e3 * seconds[n],
                       "ratio": seconds[n] / seconds[1], "gb_per_second": bandwidth / 1e9}
                      for n in NODES]
        about = {"target": a.target, "dtype": a.dtype, "device": a.device, "context": context,
                 "c": a.c}
        rows += [about | row for row in of_context + break_even(seconds, a.c)]
    return rows

@program
def main(argv):
    p = probe.parser(inspect.getdoc(sys.modules[__name__]))
    p.add_argument("--contexts", nargs="+", type=bench.between(int, 1, 10 ** 6), default=[256],
                   help="tokens before the forward")
    p.add_argument("--c", type=float, default=0.06, help="a drafter forward / a plain step")
    p.add_argument("--graphs", action="store_true", help="static shapes and CUDA graphs")
    a, setup, _, prompts = probe.begin(p, argv, ["maxgram"])
    keys = ("drafter", "context", "ms", "ratio", "gb_per_second", "steps", "least_alpha",
            "least_tau")
    probe.finish(a, rows_of(a, setup, prompts), keys, "costs", argv, setup.target.device)

if __name__ == "__main__":
    sys.exit(main())
