"""What does a forward of n nodes cost?  T_v(n) / T_v(1), and the bandwidth of plain decoding.

    python figures/costs.py                                       # the stand-in
    python figures/costs.py --target lmsys/vicuna-7b-v1.5 --dtype float16 --contexts 512 3072

PCT takes a verified node as free (EDD and PCT, ACL 2025, section 3.2), and GLIDE calls the target's
forward bound by memory (appendix D).  Both hold as far as T_v(n) / T_v(1) stays near 1.  A step of
plain decoding reads all weights and the KV cache once; its bytes over its seconds, beside what the
memory can deliver, say how honest the baseline is.

    T_v(n)      seconds of a forward of the target with n nodes, a chain, after `context` tokens

With c, a drafter forward over a plain decoding step (--c; a row of bench.py says it), the last lines
say what drafting has to yield before it is faster than plain decoding: from which acceptance rate a
chain is, and from which tau a tree.
"""
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402

import bench  # noqa: E402
from runtime import text  # noqa: E402
from verify import UserError  # noqa: E402

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
    target.capture({})
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

def show_break_even(seconds, c):
    """Print from where on chains and trees are faster than plain decoding.  seconds: {n: T_v(n)}"""
    sizes = sorted(seconds)
    ratios = [seconds[n] / seconds[1] for n in sizes]
    for gamma in CHAINS:
        # Plain decoding steps that a round takes: the root and gamma nodes, and gamma drafts
        steps = np.interp(gamma + 1, sizes, ratios) + c * gamma
        print(f"a chain of {gamma} takes {steps:.2f} steps: faster from alpha "
              f"{least_alpha(steps, gamma)} on")
    for nodes in TREES:
        steps = np.interp(nodes + 1, sizes, ratios) + 5 * c
        print(f"a tree of {nodes} nodes takes {steps:.2f} steps: faster from tau {steps:.2f} on")

def rows_of(run, contexts, c):
    """-> a row for each context and number of nodes"""
    given = [token for _, ids, _ in run.prompts for token in ids]
    rows = []
    for context in contexts:
        ids = (given * (context // len(given) + 1))[:context]
        seconds = forward_seconds(run.target, ids)
        bandwidth = step_bytes(run.model, context) / seconds[1]
        for n in NODES:
            row = {"target": run.a.target, "dtype": run.a.dtype, "device": run.a.device,
                   "context": context, "nodes": n, "ms": 1e3 * seconds[n],
                   "ratio": seconds[n] / seconds[1], "bytes_per_second": bandwidth}
            print(f"context {context}, {n:2d} nodes: {row['ms']:.2f} ms, {row['ratio']:.2f} of one")
            rows.append(row)
        print(f"a plain decoding step reads {bandwidth / 1e9:.0f} GB a second")
        show_break_even(seconds, c)
    return rows

def work(argv):
    parser = text.Parser(add_help=False)
    parser.add_argument("--contexts", nargs="+", type=int, default=[256])
    parser.add_argument("--c", type=float, default=0.065)
    a, flags = parser.parse_known_args(argv)
    if min(a.contexts) < 1:
        raise UserError("--contexts: a prompt has at least one token")
    run = bench.Run([*flags, "--drafter", "maxgram", "--tree", "chain"])
    rows = rows_of(run, a.contexts, a.c)
    if run.a.json:
        bench.write_json(run.a.json, rows)
    return 0

main = partial(bench.main, work=work, name="figures/costs.py")

if __name__ == "__main__":
    sys.exit(main())
