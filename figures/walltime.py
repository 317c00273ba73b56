"""Walltime on a GPU: the stand-in, and the stand-in grown to the shape of Llama-2-7B.

    python figures/walltime.py                # some minutes on an H200; --help says how to measure less

grow.py says how a model grows.

"what" a line of the JSON measures: "verify", T_verify(n) over that of one node; "step", a drafter's over the
same (c); "decode", as bench.py's lines, with ms a token and the speedup without the prefill, and of plain
decoding the bytes that a token reads, and how long a copy takes for them.  Turns have prompts of their own,
the default ones, repeated.  With graphs all are decoded once before; without, there are half as many turns.
"""
import sys
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import transformers  # noqa: E402
from grow import LLAMA_7B, cast, check, grow, grow_edd, grow_glide, scaled, shape_of  # noqa: E402

import bench  # noqa: E402
import cape  # noqa: E402
import cascade  # noqa: E402
import edd  # noqa: E402
import glide  # noqa: E402
import maxgram  # noqa: E402
import pct  # noqa: E402
import train  # noqa: E402
import verify  # noqa: E402
from verify import UserError  # noqa: E402

NODES, REPEATS = (1, 2, 4, 8, 16, 32, 64), 5    # of a verification; calls that are timed together
COPY = {"cuda": 2 ** 31, "cpu": 2 ** 25}        # bytes of the tensor that is copied

# ---------------------------------------------------------------- what is timed
def load():
    """The stand-in, its stages and drafters, in float32 on the CPU; the ids of the default prompts."""
    folder = train.HERE / "checkpoints"
    loaded = [train.load_target(str(folder / name), "float32", "cpu") for name in ("target", "base", "small")]
    model, tokenizer = loaded[0]
    rows = train.read_rows(folder / "prompts.jsonl")
    return SimpleNamespace(
        models=[found for found, _ in loaded],
        bigram=maxgram.read_bigram(folder / "bigram.json", model.config.vocab_size),
        prompts=[tokenizer(train.question_text(row))["input_ids"] for row in rows],
        glide=glide.load(folder / "glide", model)[0],
        edd=edd.load(folder / "edd", model)[0])

def named_shape(a, small, name):
    """The shape that the flags name."""
    own = shape_of(small.models[0])
    wide = small.glide.model.config
    shape = LLAMA_7B if name == "7b" else own
    # Further tokens need room beside GLIDE's vector, which must have as many heads.
    least = max(wide.width + own.head, wide.heads * shape.head)
    if name == "small":
        shape = scaled(own, own.layers + 1, least)._replace(vocab=own.vocab + own.vocab // 8)
    found = scaled(shape, a.layers or shape.layers, a.width or shape.width)
    if found.layers < own.layers or found.width < least and found[1:] != own[1:]:
        raise UserError(f"shape {name}: take --layers {own.layers} or more, --width {least} or more")
    return found

def grow_all(a, small, shape):
    """Target, stages and drafters of the shape."""
    context, models = max(a.context) + a.new_tokens, []
    own = shape_of(small.models[0])
    torch.manual_seed(0)
    for model in small.models:
        # A stage of a cascade keeps its layers, and is wider as the target is.
        its = shape_of(model)
        stage = scaled(shape, its.layers, shape.width * its.width // own.width)
        big = grow(model, stage if models else shape, context, a.device)
        check(model, big, small.prompts[0])
        models.append(cast(big, getattr(torch, a.dtype)))
    target, *stages = models
    return SimpleNamespace(
        model=target, stages=stages, edd=grow_edd(small.edd.model, target),
        glide=grow_glide(small.glide.model, target, context + verify.MOST_NODES))

def prompt_of(prompts, number, length):
    """`length` ids that end with those of prompt `number`, behind the others in their order, repeated."""
    ids = sum(prompts[number + 1:] + prompts[:number + 1], [])
    return (ids * -(-length // len(ids)))[-length:]

def medians(cuda, works, turns):
    """{name: function} -> {name: median seconds of a call}.  They take turns; the first one is unmeasured."""
    found = {name: [] for name in works}
    for _ in range(turns + 1):
        for name, work in works.items():
            clock = bench.Record(cuda)
            for _ in range(REPEATS):
                work()
            clock.mark("work")
            clock.settle()
            found[name].append(clock.total["work"] / REPEATS)
    return {name: median(seconds[1:]) for name, seconds in found.items()}

def bandwidth(device, turns):
    """Bytes a second of a large copy: each is read, and written."""
    x, y = torch.ones(2, COPY[device], dtype=torch.uint8, device=device)
    seconds = medians(device == "cuda", {"copy": lambda: y.copy_(x)}, turns)["copy"]
    return 2 * len(x) / seconds

def step_bytes(model, rows):
    """Bytes that plain decoding reads for a token: weights (one embedding), `rows` keys and values."""
    c, table = model.config, model.get_input_embeddings().weight
    weights = model.num_parameters() - table.numel() + c.hidden_size
    cached = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * rows
    return (weights + cached) * table.element_size()

@torch.inference_mode()
def costs(target, drafters, ids, turns):
    """-> seconds {name: of a drafter's step, n: of a forward of n nodes}"""
    cuda, found = target.device.type == "cuda", {}
    token = torch.tensor(ids[-1:], device=target.device)
    parents = torch.arange(-1, NODES[-1], device=target.device)
    for name, drafter in drafters.items():
        verify.generate(target, drafter, cape.chain, ids, 8)            # sets both up
        drafter.reset()
        target.prefill(ids)
        drafter.begin(target.view())
        step = {name: lambda drafter=drafter: drafter.expand(token, [len(drafter.lines) - 1])}
        found |= medians(cuda, step, turns)                             # each adds a node below the last
    target.watch({})
    target.prefill(ids)
    forwards = {n: partial(target.forward, token.repeat(n), parents[:n]) for n in NODES}
    return found | medians(cuda, forwards, turns)

def arms_of(run, small, made, cost):
    """Plain decoding, transformers' own, drafters with their trees.  cost: PCT's s_d / s_t."""
    size = run.target.capacity, run.target.vocab
    K = cascade.table2((8, 13, 1), 2, True)
    run.drafters["cascade"] = cascade.Cascade(made.stages, K, 3.0, maxgram.MaxGram(*small.bigram), *size)
    run.drafters["maxgram"] = cascade.Cascade([], None, 1.0, maxgram.MaxGram(*small.bigram), *size)
    for stage in run.drafters["cascade"].stages:
        if stage.padded:
            stage.call.graphs = run.target.call.graphs
    # Beyond these bounds pct.pct would refuse what was measured.
    cost = cost if 0.005 <= cost <= 1 else pct.COST
    builds = (
        ("glide", "chain", cape.chain),
        ("glide", "cape", cape.cape),
        ("edd", "pct", partial(pct.pct, cost=cost)),
        ("cascade", "chain", cascade.proposal),
        ("maxgram", "chain", cascade.proposal))
    arms = [bench.Arm("plain", partial(bench.Run.decode, run, None, verify.no_draft)),
            bench.Arm("generate()", partial(bench.library, run))]
    for name, tree, build in builds:
        drafter = run.drafters[name]
        drafter.costs = {}                                  # (row_of asks a cascade)
        arms.append(bench.Arm(name, partial(bench.Run.decode, run, drafter, build), tree, build))
    return arms

def decoding_rows(run, arms, size, speed):
    """-> a line for each arm.  size: bytes that plain decoding reads for a token; speed: of the copy."""
    for arm in arms:
        for out in arm.results.values():
            # Seconds by the loop's own clock, events on CUDA; generate() has none.
            out.seconds = sum(out.total[key] for key in ("prefill", *bench.SHARES)) or out.seconds
            out.ms = 1e3 * (out.seconds - out.total["prefill"]) / (run.a.new_tokens - 1)
    rows = []
    for arm in arms:
        row = bench.row_of(run, arm, *arms[:2], "all", range(len(run.prompts)))
        ms = median(out.ms for out in arm.results.values())
        rows.append(row | {"what": "decode", "ms_per_token": ms})
    plain, limit = rows[0]["ms_per_token"], 1e3 * size / speed
    for row in rows:
        row["speedup_decoding"] = plain / row["ms_per_token"]
    rows[0] |= {"bytes": size, "limit_ms": limit, "bandwidth_share": limit / plain}
    return rows

def cost_rows(seconds):
    """-> a line for each number of nodes, and for each drafter.  seconds: what costs() found."""
    rows = []
    for key, s in seconds.items():
        what = {"what": "verify", "nodes": key} if key in NODES else {"what": "step", "drafter": key}
        rows.append(what | {"ms": 1e3 * s, "ratio": s / seconds[1]})
    return rows

def cell(a, small, made, context, graphs, speed):
    """All lines of a context, with graphs or without.  speed: of the copy."""
    target = verify.Target(made.model, context + a.new_tokens, graphs=graphs)
    turns = a.turns if graphs or a.device == "cpu" else (a.turns + 1) // 2
    numbers = [turn * len(small.prompts) // a.turns for turn in range(turns)]
    run = SimpleNamespace(a=a, target=target, model=made.model, cuda=a.device == "cuda")
    run.prompts = [("", prompt_of(small.prompts, number, context), a.new_tokens) for number in numbers]
    run.drafters = {"glide": glide.Drafter(made.glide), "edd": edd.Drafter(made.edd)}
    for name, drafter in run.drafters.items():
        drafter.temperature = getattr(small, name).temperature
    seconds = costs(target, run.drafters, run.prompts[0][1], turns)
    arms = arms_of(run, small, made, seconds["edd"] / seconds[1])
    for _ in range(1 + graphs):                             # the first time records
        if bench.measure(run, arms) < turns:
            raise KeyboardInterrupt
    size = step_bytes(made.model, context + a.new_tokens / 2)
    decoded, cost = decoding_rows(run, arms, size, speed), cost_rows(seconds)
    plain = decoded[0]
    print(f"\n{a.target} {a.dtype}, context {context}, graphs {graphs}: {plain['ms_per_token']:.2f} ms a "
          f"token, {plain['bandwidth_share']:.0%} of the copy's speed")
    print(bench.table(arms, decoded))
    print("speedup without prefill:", *(f"{row['speedup_decoding']:.2f}x" for row in decoded))
    named = [(row.get("nodes") or row["drafter"], row["ratio"]) for row in cost]
    print("c; T_verify(n) / T_verify(1):", *(f"{name}: {x:.3f}" for name, x in named), flush=True)
    target.watch({})                                        # takes its hooks off the model
    about = {"context": context, "graphs": getattr(target.call, "graphs", False), "turns": turns}
    return [row | about for row in decoded + cost]

# ---------------------------------------------------------------- from arguments to lines
def parser():
    p = train.Parser(description="Walltime on a GPU at the shape of a 7B model.  For less time: fewer "
                     "--shape, --dtype, --context, --graphs on, --turns 1.  For less memory (7b is grown in "
                     "float32, which takes 27 GB): fewer --layers, less --width.")
    flag, types = p.add_argument, ["float16", "bfloat16", "float32"]
    flag("--shape", dest="shapes", nargs="+", default=["standin", "7b"], choices=["standin", "small", "7b"])
    flag("--layers", type=int, help="instead of the shape's")
    flag("--width", type=int, help="instead of the shape's")
    flag("--dtype", dest="dtypes", nargs="+", default=types[:2], choices=types)
    flag("--context", nargs="+", type=int, default=[128, 1024, 4096], help="tokens of the prompts")
    flag("--new-tokens", type=int, default=64)
    flag("--graphs", nargs="+", default=["on", "off"], choices=["on", "off"], help="the CPU has none")
    flag("--turns", type=int, default=5)
    flag("--device", default="cuda", choices=["cuda", "cpu"])
    flag("--json", default=str(train.HERE / "docs" / "results" / "walltime.jsonl"), help="a line a figure")
    p.set_defaults(seed=0, temperature=0.0, top_k=None, top_p=1.0)
    return p

def figure(argv):
    a = parser().parse_args(argv)
    cuda = a.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise UserError("no CUDA device is available here: use --device cpu with --shape small")
    if min(a.turns, a.new_tokens - 1, *a.context) < 1:
        raise UserError("--turns and --context must be at least 1, --new-tokens at least 2")
    small, lines = load(), []
    shapes = {name: named_shape(a, small, name) for name in a.shapes}
    speed = bandwidth(a.device, a.turns)
    about = {"device": torch.cuda.get_device_name() if cuda else "cpu", "copy_bytes_per_second": speed,
             "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    for a.target, a.dtype in product(a.shapes, a.dtypes):
        made = grow_all(a, small, shapes[a.target])
        about |= {"shape": a.target, **shapes[a.target]._asdict()}
        about |= {"dtype": a.dtype, "new_tokens": a.new_tokens}
        for context, graphs in product(a.context, a.graphs if cuda else ["off"]):
            lines += [row | about for row in cell(a, small, made, context, graphs == "on", speed)]
            bench.write_json(a.json, lines)                 # what is there so far
    return 0

def main(argv=None):
    return bench.main(argv, figure, "figures/walltime.py")

if __name__ == "__main__":
    sys.exit(main())
