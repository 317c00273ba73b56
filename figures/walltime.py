"""What a forward costs at the shape of a large model, and the first ten minutes on a new GPU.

    python figures/walltime.py first --out work/first                 # all below but `long`, in one command
    python figures/walltime.py kernels --json kernels.jsonl           # bandwidth, attention at fresh lengths
    python figures/walltime.py grow --shape 7b --dtype float16 --out work/7b
    python figures/walltime.py costs --target work/7b/target --dtype float16 --json costs.jsonl
    python figures/walltime.py long --target work/7b/target --checkpoint work/7b --dtype float16
    python bench.py --target work/7b/target --checkpoint work/7b --dtype float16 --drafter glide --tree cape

`grow` makes the stand-in as large as Llama-2-7B (growth.py says how).  A line of `costs`: ms of a forward of n
nodes, and over that of one node; the bytes that a forward of one node reads, and how many a second: beside the
memory's bandwidth that says how honest plain decoding is.  `first` runs each of its steps as a process of its
own.  A step that fails is one line and no reason to stop; what is done stands in OUT/first.json, and the same
command goes on after it.
"""
import json
import platform
import shlex
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
from growth import grow_all  # noqa: E402

import bench  # noqa: E402
import cape  # noqa: E402
import cascade  # noqa: E402
import pct  # noqa: E402
from data import read  # noqa: E402
from runtime import clock, linear, load  # noqa: E402
from verify import UserError  # noqa: E402

NODES = 1, 2, 4, 8, 16, 32, 64                  # of a forward
TURNS = REPEATS = 5                             # calls that are timed together, so many times
COPIED = {"cuda": 2 ** 30, "cpu": 2 ** 26}      # bytes of the copy that measures the memory's bandwidth
HEADS, HEAD_SIZE = 32, 128                      # of the attention that is timed: Llama-2-7B's
LENGTHS = range(513, 553, 8)                    # key lengths that no call has met before
LONG_NEW = 64                                   # tokens that follow a long prompt
STEP_MINUTES = 15                               # a step of `first` that takes longer has failed

# ---------------------------------------------------------------- the machine and its kernels
def machine(device):
    """What this ran on, for the record."""
    about = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        about["device"] = properties.name
        about["capability"] = f"{properties.major}.{properties.minor}"
        about["memory_bytes"] = properties.total_memory
        about["cuda"] = torch.version.cuda
        about["cudnn"] = torch.backends.cudnn.version()
    return about


def seconds_of(device, work):
    """Seconds of one call, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def bandwidth(device):
    """Bytes a second that a copy within the memory reads and writes."""
    source = torch.ones(COPIED[device], dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    seconds = [seconds_of(device, lambda: copy.copy_(source)) for _ in range(TURNS + 1)]
    return 2 * COPIED[device] / median(seconds[1:])


def attention(device, dtype, queries, cudnn):
    """Masked attention at lengths that no call has met -> median ms of the first call of each, of the second.

    On sm90 and sm100 cuDNN is asked first for half precision, and builds a plan for every new length.
    """
    first, second = [], []
    with torch.nn.attention.sdpa_kernel(backends(cudnn)):
        for length in LENGTHS:
            keys = length + 2 * queries + cudnn                    # another length for each setting
            q = torch.randn(1, HEADS, queries, HEAD_SIZE, device=device, dtype=dtype)
            k = torch.randn(1, HEADS, keys, HEAD_SIZE, device=device, dtype=dtype)
            mask = torch.zeros(1, 1, queries, keys, device=device, dtype=dtype)
            call = partial(F.scaled_dot_product_attention, q, k, k, attn_mask=mask)
            first.append(1e3 * seconds_of(device, call))
            second.append(1e3 * seconds_of(device, call))
    return median(first), median(second)


def backends(cudnn):
    """The kernels that attention may take, with cuDNN's or without them."""
    kinds = torch.nn.attention.SDPBackend
    allowed = [kinds.MATH, kinds.FLASH_ATTENTION, kinds.EFFICIENT_ATTENTION]
    return allowed + [kinds.CUDNN_ATTENTION] if cudnn else allowed


@torch.inference_mode()
def kernels(a):
    """-> lines: the machine; its bandwidth; attention of 1 and of 16 queries, with cuDNN and without."""
    dtype = getattr(torch, a.dtype)
    lines = [machine(a.device), {"bandwidth": bandwidth(a.device)}]
    for queries in (1, 16):
        for cudnn in (False, True):
            first, second = attention(a.device, dtype, queries, cudnn)
            lines.append({"queries": queries, "cudnn": cudnn, "fresh_ms": first, "again_ms": second})
    for line in lines:
        print(line, flush=True)
    return lines


# ---------------------------------------------------------------- what a forward costs

def medians(cuda, works):
    """{name: function} -> {name: median seconds of a call}.  They take turns; the first one is unmeasured."""
    found = {name: [] for name in works}
    for _ in range(TURNS + 1):
        for name, work in works.items():
            watch = clock.Clock(cuda)
            for _ in range(REPEATS):
                work()
            seconds = sum(seconds for _, seconds in watch.parts())
            found[name].append(seconds / REPEATS)
    return {name: median(seconds[1:]) for name, seconds in found.items()}


def step_bytes(model, rows):
    """Bytes that plain decoding reads for a token: weights, `rows` keys and values."""
    c, table = model.config, model.get_input_embeddings().weight
    weights = model.num_parameters()                               # a table that is also the head counts once
    if model.get_output_embeddings().weight is not table:
        weights += c.hidden_size - table.numel()                   # of a table of its own one row is read
    cached = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * rows
    return (weights + cached) * table.element_size()

@torch.inference_mode()
def forwards(target, ids):
    """{n: seconds of a forward of a chain of n nodes behind the prompt}"""
    token = torch.tensor(ids[-1:], device=target.device)
    parents = torch.arange(-1, NODES[-1], device=target.device)
    target.capture({})
    target.cache.reserve(len(ids) + NODES[-1])
    target.prefill(ids)
    works = {}
    for n in NODES:
        works[n] = partial(target.forward, token.repeat(n), parents[:n])
    return medians(target.device.type == "cuda", works)


def costs(a):
    """-> a line for each context and number of nodes; where linear.py has made blocks, without them, too"""
    setup = load.Setup(a.target, str(load.CHECKPOINTS), a.dtype, a.device, graphs=a.graphs)
    packed = linear.is_packed(setup.model)
    text, lines = [], []
    for row in read.read_rows(bench.PROMPTS):
        text += setup.tokenizer(read.question_text(row))["input_ids"]
    for context in a.contexts:
        times = context // len(text) + 1
        ids = (text * times)[:context]
        size = step_bytes(setup.model, context)
        for blocks in (False, True)[:1 + packed]:
            if packed:
                change = linear.pack if blocks else linear.unpack
                change(setup.model)
            seconds = forwards(setup.target, ids)
            about = {key: getattr(a, key) for key in ("target", "dtype", "device", "graphs")}
            about |= {"blocks": blocks, "context": context, "bytes": size, "bytes_per_second": size / seconds[1]}
            for n in NODES:
                ms, ratio = 1e3 * seconds[n], seconds[n] / seconds[1]
                lines.append({**about, "nodes": n, "ms": ms, "ratio": ratio})
                print(f"context {context}, {'blocks, ' * blocks}{n} nodes: {ms:.2f} ms, {ratio:.2f} of one",
                      flush=True)
            print(f"one node reads {size / seconds[1] / 1e9:.0f} GB a second", flush=True)
    return lines


# ---------------------------------------------------------------- long prompts
def long_prompts(a):
    """-> a line for each context and arm: seconds of the prefill, ms of a round by part, bytes of the cache

    What a round does on the host must not grow with the context: `other` shows it.
    """
    argv = ["--target", a.target, "--checkpoint", a.checkpoint, "--dtype", a.dtype, "--device", a.device]
    run = bench.Run([*argv, "--drafter", "glide", "edd", "maxgram", "--tree", "cape", "--limit", "9"])
    text, lines = [], []
    for _, ids, _ in run.prompts:
        text += ids
    builds = {"glide": cape.cape, "edd": pct.pct, "maxgram": cascade.proposal}
    for context in a.contexts:
        if run.target.remaining([0] * context) < LONG_NEW:
            raise UserError(f"--contexts {context}: the target's context is {run.target.capacity}, and {LONG_NEW} "
                            "tokens are to follow; `grow --context` makes a target of more")
        ids = (text * (context // len(text) + 1))[:context]
        for name, drafter in run.drafters.items():
            total = run.decode(drafter, builds[name], ids, LONG_NEW).total
            line = {"target": a.target, "context": context, "drafter": name, "prefill_s": total["prefill"]}
            for part in clock.SHARES:
                line[f"{part}_ms"] = 1e3 * total[part] / total["rounds"]
            held = [x for layer in run.target.cache.kv.values() for x in layer]
            line["cache_bytes"] = sum(x.numel() * x.element_size() for x in held)
            lines.append(line)
            print(f"context {context}, {name}: prefill {line['prefill_s']:.2f} s; a round takes "
                  + ", ".join(f"{part} {line[f'{part}_ms']:.2f}" for part in clock.SHARES)
                  + f" ms; the cache {line['cache_bytes'] / 2 ** 20:.0f} MiB", flush=True)
    return lines


# ---------------------------------------------------------------- the first ten minutes on a new GPU
def steps_of(a):
    """The steps of `first` -> {name: the command's words}."""
    here = str(Path(__file__).resolve())
    script = str(load.ROOT / "bench.py")
    grown = str(a.out / "grown")
    on = ["--device", a.device, "--dtype", a.dtype]
    contexts = list(map(str, a.contexts))
    longest = max(a.contexts) + 2 * max(NODES)
    decode = [script, "--target", f"{grown}/target", "--checkpoint", grown, *on]
    arms = ["--drafter", "glide", "edd", "--tree", "chain", "cape", "pct"]
    graft = ["--drafter", "beside(edd, maxgram)", "beside(glide, maxgram)", "--tree", "graft"]
    steps = {
        "kernels": [here, "kernels", *on],
        "pytest -m cuda": ["-m", "pytest", "-q", "-m", "cuda", str(load.ROOT / "tests")],
        "grow": [here, "grow", "--shape", a.shape, "--context", str(longest), "--out", grown, *on],
        "costs": [here, "costs", "--target", f"{grown}/target", "--contexts", *contexts, *on],
        "stand-in": [script, "--device", a.device],
        "arms": [*decode, *arms],
        "graft": [*decode, *graft],
    }
    if a.device == "cuda":
        for name in ("costs", "arms", "graft"):
            steps[f"{name}, graphs"] = [*steps[name], "--graphs"]
    return steps


def run_step(name, words, out):
    """Run one step as a process of its own -> what becomes of it: status, seconds, the rows that it wrote."""
    rows = out / f"{name.replace(' ', '-')}.jsonl"
    command = [sys.executable, *words]
    if words[0].endswith(".py") and words[1:2] != ["grow"]:
        command += ["--json", str(rows)]
    print(f"--- {name}: {shlex.join(['python', *command[1:]])}", flush=True)
    began = time.perf_counter()
    log = out / f"{name.replace(' ', '-')}.log"
    with open(log, "w") as file:
        try:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=load.ROOT,
                                    timeout=60 * STEP_MINUTES).returncode
        except subprocess.TimeoutExpired:
            status = f"more than {STEP_MINUTES} minutes"
    result = {"status": status, "seconds": round(time.perf_counter() - began), "command": shlex.join(words)}
    lines = log.read_text(errors="replace").strip().splitlines()
    result["last_line"] = lines[-1] if lines else ""
    if rows.exists():
        result["rows"] = [json.loads(line) for line in rows.read_text().splitlines()]
    print(f"    {result['seconds']} s, " + ("done" if status == 0 else f"failed ({status})")
          + f": {result['last_line']}", flush=True)
    return result


def summary(found):
    """What one wants to know first, in lines: each step; a forward's price; each arm's speed."""
    lines, memory = [], None
    for name, result in found.items():
        lines.append(f"{name}: {'done' if result['status'] == 0 else 'FAILED'} in {result['seconds']} s")
        for row in result.get("rows", []):
            if "queries" in row:
                setting = f"{row['queries']} queries, cuDNN {'on' if row['cudnn'] else 'off'}"
                lines.append(f"    attention, {setting}: {row['fresh_ms']:.2f} ms at a fresh length, "
                             f"{row['again_ms']:.2f} ms again")
            elif "bandwidth" in row:
                memory = row["bandwidth"]
                lines.append(f"    memory: {memory / 1e9:.0f} GB/s")
            elif "nodes" in row and "ratio" in row:
                line = f"    context {row['context']}, {'blocks, ' * row['blocks']}{row['nodes']} nodes: "
                line += f"{row['ms']:.2f} ms, {row['ratio']:.2f} of one"
                if row["nodes"] == 1 and memory:
                    line += f"; plain decoding takes {row['bytes_per_second'] / memory:.0%} of the bandwidth"
                lines.append(line)
            elif row.get("group") == "all":
                arm = f"{row['drafter']} x {row['tree']}" if row["tree"] else str(row["drafter"])
                lines.append(f"    {arm}: {row['tokens_per_second']:.1f} tok/s, {row['speedup']:.2f}x, "
                             f"lossless: {row['lossless']}")
    return lines


def first(a):
    """Run all steps that are not done yet, and keep what each gave in OUT/first.json."""
    path = a.out / "first.json"
    try:
        a.out.mkdir(parents=True, exist_ok=True)
        found = json.loads(path.read_text()) if path.exists() else {}
    except OSError:
        raise UserError(f"--out {a.out}: name a folder that is there, or can be made") from None
    except ValueError:
        raise UserError(f"{path} is damaged: delete it, and all steps run again") from None
    for name, words in steps_of(a).items():
        if found.get(name, {}).get("status") == 0:
            continue
        if name == "grow":                                         # what an interrupted one has left
            shutil.rmtree(a.out / "grown", ignore_errors=True)
        found[name] = run_step(name, words, a.out)
        text = json.dumps(found, indent=1)
        read.write_atomically(path, lambda part, text=text: part.write_text(text))
    print("\n".join(summary(found)))
    print(f"all of it: {path}")


# ---------------------------------------------------------------- the command line
def parser():
    p = read.Parser(description="The first ten minutes on a new GPU (first), or one of its steps: time "
                    "kernels, grow the stand-in to a large shape, time forwards (costs), decode after "
                    "long prompts (long).")
    flag = p.add_argument
    flag("work", choices=["first", "kernels", "grow", "costs", "long"])
    flag("--shape", choices=["7b", "small"], default="7b", help="7b takes 27 GB; small: to try it")
    flag("--context", type=int, default=4096, help="grow: the context (default: 4096)")
    flag("--out", type=Path, help="grow: a new folder; first: the folder of all that it finds")
    flag("--target", default=str(load.STAND_IN), help="costs: folder of a Llama (default: the stand-in)")
    flag("--contexts", nargs="+", type=int, default=[512, 3072, 32768], help="costs, long: tokens of the prompts")
    flag("--checkpoint", default=str(load.CHECKPOINTS), help="long: folder of the target's drafters")
    flag("--graphs", action="store_true", help="costs: CUDA graphs")
    flag("--json", help="kernels, costs: write one line a measurement to this file")
    flag("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"],
         help="default: cuda if there is one")
    return p


def work(argv):
    a = parser().parse_args(argv)
    load.check_device(a.device)
    if a.work in ("first", "grow") and a.out is None:
        raise UserError("--out: name a folder")
    if min(a.contexts) < 1:
        raise UserError("--contexts: a prompt has at least one token")
    if a.work == "first":
        first(a)
    elif a.work == "grow":
        if a.out.exists():
            raise UserError("--out: name a folder that is not there yet")
        grow_all(a)
    else:
        lines = {"costs": costs, "kernels": kernels, "long": long_prompts}[a.work](a)
        if a.json:
            bench.write_json(a.json, lines)
    return 0


main = partial(bench.main, work=work, name="figures/walltime.py")

if __name__ == "__main__":
    sys.exit(main())
