"""What does reading a long prompt cost, in time and memory, beside one plain forward of transformers?

    python figures/prefill.py
    python figures/prefill.py --tokens 16384 --target meta-llama/Llama-3.2-1B --dtype bfloat16 --device cuda

verify.py reads a prompt in slices, and a drafter has a prompt to read too: GLIDE makes its own keys and values of
it, EDD takes the target's hidden states of it in front of what it drafts.  Nothing of it may grow with the square
of the prompt, or a long one costs more than all that is won after it.

    arm             what is measured
    transformers    the model's own forward over the whole prompt, with its cache; the logits of the last token
    plain           verify.generate without a drafter, up to the first token
    glide, edd ...  verify.generate with that drafter, up to the first draft: its own prefill is in

    column          meaning
    s               seconds, median of --turns; the arms take turns in one process
    MB              the most memory in use at once (1e6 bytes), less what was in use before; of a process of its own
    x               over transformers at the same length

Prompts are --tokens long, a half, a quarter and an eighth of that, of random tokens.  The target is random too, of
the stand-in's shape with a context as long as the prompts ask, as the stand-in's own is short; or --target.
Drafters have fresh weights: what they draft is worth nothing, and costs what it always does.
"""
import gc
import os
import platform
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import transformers  # noqa: E402
from tqdm import tqdm  # noqa: E402

import bench  # noqa: E402
import edd  # noqa: E402
import glide  # noqa: E402
import train  # noqa: E402
import verify  # noqa: E402
from verify import UserError  # noqa: E402

CONTEXT = 16384                                 # of the random target, at least
PARTS = (8, 4, 2, 1)                            # prompts are --tokens divided by these
ROOM = 128                                      # places that are left behind a prompt
WARM = 64                                       # tokens of a short prompt that comes first, unmeasured
PLAIN = "transformers"                          # what all others are held against
ARMS = (PLAIN, "plain", "glide", "glide (two layers)", "edd")


# ---------------------------------------------------------------- target and drafters
def random_target(a):
    """A random model of the stand-in's shape, with a context for the longest prompt."""
    config = transformers.AutoConfig.from_pretrained(train.STAND_IN)
    config.max_position_embeddings = max(CONTEXT, a.tokens + ROOM)
    torch.manual_seed(a.seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, a.dtype))
    return model.to(a.device).eval()


def load_model(a):
    """The target that the flags name."""
    if a.target is None:
        return random_target(a)
    model, _ = train.load_target(a.target, a.dtype, a.device)
    context = verify.Target(model).context
    if a.tokens + ROOM > context:
        raise UserError(f"--tokens {a.tokens}: the target's context holds {context}, and {ROOM} of it are left "
                        f"for what follows the prompt; ask for at most {context - ROOM}")
    return model


def fresh_drafter(name, model, tokens):
    """A drafter of the arm `name` with fresh weights, for prompts of so many tokens; None where it has none."""
    torch.manual_seed(0)
    try:
        if name.startswith("glide"):
            config = glide.Config.for_target(model, layers=2 if "two" in name else 1)
            tables = glide.target_angles(model, tokens + ROOM + verify.MOST_NODES)
            return glide.Drafter(glide.Glide(config, tables).to(model.device, model.dtype))
        if name == "edd":
            return edd.Drafter(edd.EDD(edd.Config.for_target(model), model))
    except ValueError as why:
        raise UserError(str(why)) from None
    return None


def prompt_of(model, length):
    """Random tokens, (length,)."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(model.config.get_text_config().vocab_size, (length,), generator=generator)


# ---------------------------------------------------------------- one prefill
@torch.inference_mode()
def one_forward(model, ids):
    """transformers alone -> (seconds, the first new token)."""
    start = time.perf_counter()
    out = model(ids[None].to(model.device), use_cache=True, logits_to_keep=1)
    token = out.logits[0, -1].argmax().item()             # reading it waits for the device
    return time.perf_counter() - start, token


def one_prefill(model, drafter, ids):
    """verify.generate up to its first draft -> (seconds, the first new token)."""
    ends = []

    def first_draft(expand, root):
        if drafter:
            expand(root, [-1])                            # the drafter reads its prompt, and drafts one token
        root.tolist()
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
        return verify.no_draft(expand, root)

    target = verify.Target(model, len(ids) + ROOM)
    start = time.perf_counter()
    # With three tokens to come the root may have a child; with two nobody would ask the drafter.
    out = verify.generate(target, drafter, first_draft, ids, max_new_tokens=3)
    target.watch({})                                      # takes its hooks off the model
    return ends[0] - start, out.tokens[0]


def prefill(model, name, drafter, length):
    """One prefill of the arm `name` -> (seconds, the first new token)."""
    ids = prompt_of(model, length)
    if name == PLAIN:
        return one_forward(model, ids)
    return one_prefill(model, drafter, ids)


# ---------------------------------------------------------------- memory: a process for each figure
def status(key):
    """A figure of /proc/self/status in bytes, such as VmRSS (in use), VmHWM (the most so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {key}")


def memory_in_use(cuda):
    """Bytes in use now; from here on the most is counted anew."""
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return status("VmRSS")
    except OSError:                                       # not Linux: the most so far stands for what is in use
        return most_memory(cuda)


def most_memory(cuda):
    """The most bytes that were in use."""
    if cuda:
        return torch.cuda.max_memory_allocated()
    try:
        return status("VmHWM")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure_peak(a, name, length):
    """Bytes that one prefill needs beyond target and drafter, in this process."""
    torch.set_num_threads(a.threads)
    model = load_model(a)
    drafter = fresh_drafter(name, model, length)
    prefill(model, name, drafter, min(WARM, length))
    if drafter:
        drafter = fresh_drafter(name, model, length)      # one whose store is empty
    gc.collect()
    cuda = a.device == "cuda"
    before = memory_in_use(cuda)
    prefill(model, name, drafter, length)
    return most_memory(cuda) - before


def peak_of(a, name, length):
    """measure_peak in a new process, in which nothing else ever was."""
    # Memory that is free goes back to the system at once: what malloc keeps for later is left out.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure_peak, a, name, length).result()


# ---------------------------------------------------------------- time: arms in turn
def measure_seconds(a, model, length):
    """Median seconds of each arm, {arm: seconds}."""
    seconds = {name: [] for name in ARMS}
    modules = {name: fresh_drafter(name, model, length) for name in ARMS}
    for turn in range(a.turns + 1):
        first = turn % len(ARMS)                          # nobody is always first
        for name in ARMS[first:] + ARMS[:first]:
            drafter = modules[name]
            if drafter:
                drafter = type(drafter)(drafter.model)    # the same weights, an empty store
            took, _ = prefill(model, name, drafter, length)
            if turn:                                      # the first turn warms up
                seconds[name].append(took)
    return {name: median(values) for name, values in seconds.items()}


# ---------------------------------------------------------------- rows and table
def rows_of(a, length, seconds, peaks):
    """One row an arm, {arm: seconds}, {arm: bytes} -> JSON rows."""
    rows = []
    for name in ARMS:
        row = {"target": a.target or "random, of the stand-in's shape", "drafter": name, "dtype": a.dtype,
               "device": a.device, "threads": a.threads, "temperature": 0.0, "seed": a.seed, "turns": a.turns,
               "prompt_tokens": length, "prefill_seconds": seconds[name], "prefill_memory": peaks[name],
               "megabytes": peaks[name] / 1e6}
        row["time_ratio"] = seconds[name] / seconds[PLAIN]
        row["memory_ratio"] = peaks[name] / peaks[PLAIN]
        row["versions"] = {"python": platform.python_version(), "torch": torch.__version__,
                           "transformers": transformers.__version__}
        rows.append(row)
    return rows


def table(rows):
    """The rows as text, a block a length."""
    lines = []
    for row in rows:
        if row["drafter"] == PLAIN:
            lines.append(f"\n{row['prompt_tokens']} tokens{'s':>19}{'x':>7}{'MB':>9}{'x':>7}")
        lines.append(f"{row['drafter']:22}{row['prefill_seconds']:8.3f}{row['time_ratio']:7.2f}"
                     f"{row['megabytes']:9.1f}{row['memory_ratio']:7.2f}")
    return "\n".join(lines)


def parser():
    p = train.Parser(description="Time and memory of reading a prompt, beside transformers' own forward.")
    flag = p.add_argument
    flag("--target", help="folder or hub name (default: a random model of the stand-in's shape)")
    flag("--tokens", type=int, default=8192, help="of the longest prompt; others: a half, a quarter, an eighth")
    flag("--turns", type=int, default=5, help="timed runs of each arm")
    flag("--dtype", default="float32", choices=["float32", "float16", "bfloat16", "float64"])
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    flag("--threads", type=int, help="CPU threads (default: PyTorch's)")
    flag("--seed", type=int, default=0, help="of the random target")
    flag("--json", help="write one line a row to this file")
    return p


def figure(argv):
    a = parser().parse_args(argv)
    a.threads = a.threads or torch.get_num_threads()
    for name, low in (("tokens", PARTS[0] * WARM), ("turns", 1), ("threads", 1)):
        if getattr(a, name) < low:
            raise UserError(f"--{name} is {getattr(a, name)}: it must be at least {low}")
    if a.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is available here; use --device cpu")
    torch.set_num_threads(a.threads)
    transformers.logging.set_verbosity_error()
    model, rows = load_model(a), []
    for name in ARMS:
        fresh_drafter(name, model, WARM)                  # a target that an arm cannot draft for is said at once
    for length in tqdm([a.tokens // part for part in PARTS], unit="prompt", dynamic_ncols=True, disable=None):
        seconds = measure_seconds(a, model, length)
        peaks = {name: peak_of(a, name, length) for name in ARMS}
        rows += rows_of(a, length, seconds, peaks)
    print(table(rows))
    if a.json:
        bench.write_json(a.json, rows)
    return 0


def main(argv=None):
    return bench.main(argv, figure, "figures/prefill.py")


if __name__ == "__main__":
    sys.exit(main())
