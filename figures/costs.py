"""What does a forward of n nodes cost?  T_v(n) / T_v(1)

    python figures/costs.py                                       # the stand-in
    python figures/costs.py --target lmsys/vicuna-7b-v1.5 --dtype float16 --contexts 512 3072

PCT takes a verified node as free (EDD and PCT, ACL 2025, section 3.2), and GLIDE calls the target's
forward bound by memory (appendix D).  Both hold as far as T_v(n) / T_v(1) stays near 1.

    T_v(n)          seconds of a forward of the target with n nodes, a chain, after `context` tokens
    pays from tau   a tree of n - 1 drafted nodes and five forwards of a drafter (--c, in plain
                    steps) is faster than plain decoding if it yields more tokens than this
"""
import inspect
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # so that it runs from anywhere

import probe
import torch

import bench
from runtime import load
from runtime.program import program

NODES = 1, 2, 4, 6, 8, 16, 18, 32, 64       # of a forward
TURNS, REPEATS = 5, 5                       # REPEATS calls are timed together, TURNS times

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
            started = time.perf_counter()
            for _ in range(REPEATS):
                target.forward(token.repeat(n), parents[:n])
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            found[n].append((time.perf_counter() - started) / REPEATS)
    # The first turn warms up.
    return {n: median(seconds[1:]) for n, seconds in found.items()}

@program
def main(argv):
    p = bench.parser()
    p.description = inspect.getdoc(sys.modules[__name__])
    p.add_argument("--contexts", nargs="+", type=bench.at_least(1), default=[256],
                   help="tokens before the forward")
    p.add_argument("--c", type=float, default=0.06, help="a drafter forward, in plain steps")
    a = p.parse_args(argv)
    loaded = load.Loaded(a.target, a.checkpoint, a.dtype, a.device, graphs=a.graphs)
    prompts = bench.read_prompts(a.prompts or [bench.PROMPTS], loaded, 1)
    given = [token for prompt in prompts for token in prompt.ids]
    rows = []
    for context in a.contexts:
        ids = (given * (context // len(given) + 1))[:context]
        seconds = forward_seconds(loaded.target, ids)
        for n in NODES:
            ratio = seconds[n] / seconds[1]
            rows.append({"drafter": f"{n} tokens", "n": n, "context": context, "target": a.target,
                         "ms": 1e3 * seconds[n], "ratio": ratio, "least_tau": ratio + 5 * a.c})
    probe.print_rows(rows, {"n": "nodes", "context": "after", "ms": "ms",
                            "ratio": "T_v(n) / T_v(1)", "least_tau": "pays from tau"})
    probe.write_rows(a.json, rows, argv, "costs", a.device)

if __name__ == "__main__":
    sys.exit(main())
