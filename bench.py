"""One table: any target with any drafter and any tree, end to end, beside honest baselines.

    python bench.py --drafter glide --tree cape
    python bench.py --drafter glide edd --tree chain "pct(width=7, leaf=0)" pct-cost "fixed(size=4)"
    python bench.py --drafter "cascade(base, small, maxgram, k=(8, 13, 1))" --tree chain
    python bench.py --drafter "beside(edd, maxgram)" --tree pct-cost graft
    python bench.py --target lmsys/vicuna-7b-v1.5 --checkpoint my-glide --dtype float16
    python bench.py --target Qwen/Qwen2.5-7B-Instruct --tree chain --dtype auto \
        --drafter "cascade(Qwen/Qwen2.5-0.5B-Instruct, maxgram)" --prompts mt_bench.jsonl

arguments -> arms -> measure -> row -> table.  An arm is one way of decoding.  All arms decode each
prompt, in random order.  Drafters and trees are named as their functions would be called: see
cape.py, pct.py, and runtime/load.py.

Plain decoding, the baseline, is the same target, cache and dtype through the same loop with one
token a forward.  On a CPU it also runs padded to two queries, as one query takes a slow path on
some; the faster of the two is the baseline.  A legend under the first table explains its columns.
"""
import contextlib
import json
import os
import platform
import random
import sys
from functools import partial
from pathlib import Path
from statistics import median

import torch
import transformers
from tqdm import tqdm

import cape
import cascade
import maxgram
import pct
import verify
from beyond import graft, priced
from runtime import text as read
from runtime import measure as clock, load, prompts, proof, report
from runtime.calls import check_tree, read_call, settings_of
from verify import UserError

# A cascade and Max-Gram write these by themselves.
CHAINS = {"chain": cape.chain, "drawn": cape.drawn}
TREES = {**CHAINS, "cape": cape.cape, "fixed": cape.fixed, "beam": cape.beam, "pct": pct.pct,
         "vct": pct.vct, "own-confidence": pct.own_confidence, "pct-cost": priced.pct_cost,
         "graft": graft.graft, "eagle2": pct.eagle2}
PROMPTS = load.CHECKPOINTS / "prompts.jsonl"           # the project's own
LOOK = 9                                                 # of them: a minute or less
MOST_NODES = 512                                         # of a tree, the root counted
EXACT = 64                                               # tokens a forward under --exact
WARM_UP = 16                                             # tokens that each arm decodes unmeasured

# ---------------------------------------------------------------- arguments
def parser():
    p = read.Parser(description="Decode with a target, any drafters and trees, and without them.")
    flag = p.add_argument
    flag("--target", default=str(load.STAND_IN),
         help="folder or hub name (default: the stand-in)")
    flag("--drafter", nargs="+", default=["glide"], help="a folder of --checkpoint, maxgram, "
         '"beside(edd, maxgram)", '
         '"cascade(base, small, maxgram, k=(8, 13, 1), lenience=3)" (default: glide)')
    flag("--tree", nargs="+", default=["cape"], help=f'{" ".join(TREES)}, with settings: '
         '"pct(width=7, leaf=0)" (default: cape)')
    flag("--checkpoint", default=str(load.CHECKPOINTS), help="folder of a drafter, or of several "
         "folders of one each (default: the stand-in's)")
    flag("--prompts", nargs="+", help="files of prompts (default: the project's own)")
    flag("--limit", type=int, help="read so many rows, evenly over their kinds (default: all, of "
         f"the project's own {LOOK})")
    flag("--ask", help='what a row asks, by its fields: "{question} Think step by step." (default: '
         "by the fields that it has)")
    flag("--system", help="system message of conversations (default: none)")
    flag("--template", help=f"form of conversations: {' '.join(read.TEMPLATES)}, or a Jinja file "
         "(default: the tokenizer's own, or plain)")
    flag("--max-new-tokens", type=int, default=128, help="for each prompt (default: 128)")
    flag("--temperature", type=float, default=0.0,
         help="of sampling; 0 is greedy (default: 0)")
    flag("--top-k", type=int, help="sample among so many tokens (default: among all)")
    flag("--top-p", type=float, default=1.0, help="sample among the likeliest tokens, of this "
         "probability together (default: 1, all)")
    flag("--seed", type=read.seed, default=0, help="of all random choices (default: 0)")
    flag("--dtype", default="float32",
         choices=["float32", "float16", "bfloat16", "float64", "auto"],
         help="auto: as the target's weights are stored (default: float32)")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, "
         "cuda:1, or auto: over all devices, by accelerate (default: cuda if there is one)")
    flag("--threads", type=int, help="CPU threads (default: PyTorch's)")
    flag("--graphs", action="store_true",
         help="static shapes and CUDA graphs (default: exact shapes)")
    flag("--exact", action="store_true", help=f"at least {EXACT} tokens in each forward of the "
         "target, and no reduced-precision sums, so that half precision rounds alike in all arms "
         "(default: no)")
    flag("--revision", help="of the target on the hub: branch, tag or commit (default: the newest)")
    flag("--trust-remote-code", action="store_true",
         help="run code that hub models bring (default: no)")
    flag("--json", help="write one line a row to this file (default: none)")
    flag("--show", action="store_true",
         help="print a continuation of each drafter and tree (default: no)")
    return p

def check_numbers(a):
    """Refuse numbers out of range."""
    least = {"max_new_tokens": 1, "limit": 1, "top_k": 1, "threads": 1, "temperature": 0}
    for name, low in least.items():
        value = getattr(a, name)
        # A comparison with nan is false; beyond 2^31 libraries take no number.
        in_range = value is None or low <= value < 2 ** 31
        if not in_range:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {value}: it must be a number of at least {low}")
    if not 0 < a.top_p <= 1:
        raise UserError(f"--top-p is {a.top_p}: it must be above 0 and at most 1")

def check(a):
    """Refuse what cannot work before anything is loaded -> the calls of --drafter, of --tree"""
    loaders = load.loaders(a.checkpoint)
    drafters = [read_call(text, loaders, f"drafter in {a.checkpoint}") for text in a.drafter]
    trees = [read_call(text, TREES, "tree") for text in a.tree]
    for calls in (drafters, trees):
        labels = [call.label for call in calls]
        if len(set(labels)) < len(labels):
            raise UserError(f"{' '.join(labels)}: name each once")
    check_numbers(a)
    for tree in trees:
        check_tree(tree, EXACT if a.exact else MOST_NODES)
        if tree.name == "drawn" and a.temperature == 0:
            raise UserError("--tree drawn samples its tokens: give --temperature above 0, or take "
                            "--tree chain")
    if a.json:
        load.check_writable("--json", a.json)
    load.check_device(a.device, spread=True)
    if a.graphs and a.device == "cpu":
        raise UserError("--graphs: only a CUDA device has graphs; use --device cuda")
    return drafters, trees

# ---------------------------------------------------------------- what the flags name, loaded
class Run(load.Setup):
    """All that the flags `a` name, loaded.  Besides Setup's attributes:

    trees [Call]; prompts [(group, ids, limit)]; drafters {label: drafter}; costs {label: what
    clock.measure_costs found}.
    """

    def __init__(self, argv=None):
        a = self.a = parser().parse_args(argv)
        calls, self.trees = check(a)
        # What the flags leave open
        if not a.prompts:
            a.prompts = [str(PROMPTS)]
            a.limit = a.limit or LOOK
        if a.threads:
            torch.set_num_threads(a.threads)
        if a.target and Path(a.target).is_dir():
            # Rows name it: without the folders of one machine.
            a.target = os.path.relpath(a.target)
        super().__init__(a.target, a.checkpoint, a.dtype, a.device, a.revision, a.trust_remote_code,
                         a.graphs, rows=EXACT if a.exact else 1)
        a.dtype = str(self.model.dtype).removeprefix("torch.")             # where it was auto
        if a.exact:
            # In these sums the order, and so the rounding, depends on the shape.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.check_target(calls)
        self.prompts = prompts.prompts_of(self, a.prompts, a.limit, a.max_new_tokens, self.answer,
                                          a.template, a.ask, a.system)
        self.drafters, self.costs = {}, {}
        for call in calls:
            self.drafters[call.label] = self.proven(call)

    def check_target(self, calls):
        """Refuse drafters and trees that this target does not take."""
        named = {tree.name for tree in self.trees}
        if not self.target.verifies_trees and not named <= CHAINS.keys():
            raise UserError(f"{self.a.target} honours no mask or positions of a tree: it takes "
                            "--tree chain")
        named = {call.name for call in calls}
        if self.target.encoder_decoder and not named <= {"maxgram", "cascade"}:
            raise UserError(f"{self.a.target} has an encoder: it takes --drafter maxgram or "
                            "cascade(...)")

    def proven(self, call):
        """The drafter that a call names; with a note where it hardly knows this target's text."""
        drafter = load.called(self, call)
        if call.name not in ("maxgram", "cascade"):
            two = [ids for _, ids, _ in self.prompts[:2]]
            sentence = proof.proves_itself(self.target, drafter, two)
            if sentence:
                self.notes.append(f"{call.label}: {sentence}")
        return drafter

    def decode(self, drafter, build, ids, limit, target=None, streamer=None):
        """verify.generate as the flags say, timed -> Record.  drafter None: plain decoding."""
        a = self.a
        rule = verify.Greedy()
        if a.temperature > 0:
            top_p = a.top_p if a.top_p < 1 else None
            rule = clock.Overlap(a.temperature, a.top_k, top_p, a.seed)
        stop = []
        # The end of the text, as the model's own generation_config names it
        if self.eos is not None:
            stop.append(transformers.EosTokenCriteria(self.eos))
        # verify.generate knows no clock: it gets a target and a drafter whose calls are timed.
        watch = clock.Clock(self.cuda)
        target = clock.Timed(target or self.target, watch, clock.TARGET)
        timed = drafter and clock.Timed(drafter, watch, clock.DRAFTER)
        out = verify.generate(target, timed, build, ids, limit, rule, stop, streamer)
        overlaps = getattr(rule, "overlaps", ())
        stage_runs = getattr(drafter, "runs", ())
        return clock.Record(out, watch, overlaps, stage_runs)

    def answer(self, ids):
        """The target's answer as text, by plain decoding."""
        limit = min(self.a.max_new_tokens, self.target.remaining(ids))
        out = self.decode(None, verify.root_only, ids, limit)
        return self.tokenizer.decode(out.tokens, skip_special_tokens=True)

# ---------------------------------------------------------------- arms
class Arm:
    """One way of decoding.  decode(ids, limit) -> Record; results[i]: the Record of prompt i.

    tree, build: of an arm with a drafter.  plain: plain decoding by our own loop.
    memory: its peak in bytes, on CUDA.
    """
    def __init__(self, drafter, decode, tree=None, build=None, plain=False):
        self.drafter, self.decode, self.tree = drafter, decode, tree
        self.build, self.plain = build, plain
        self.name = f"{drafter} x {tree}" if tree else drafter
        self.results, self.memory = {}, None

    def speeds(self, base, which):
        """Speedups over `base` on the prompts `which`."""
        return [self.results[i].speed() / base.results[i].speed() for i in which]

    def seconds(self, which):
        """Seconds on the prompts `which` together."""
        return sum(self.results[i].seconds for i in which)

def plain_arms(run):
    """Plain decoding by our own loop."""
    wrapped = {"plain": run.target}
    if run.a.exact:
        # The price of exactness is seen beside plain decoding without it.
        wrapped["plain, not exact"] = run.wrap(run.model)
    decode = partial(run.decode, None, verify.root_only)
    arms = []
    for name, target in wrapped.items():
        arms.append(Arm(name, partial(decode, target=target), plain=True))
    return arms

def library(run, ids, limit, **more):
    """transformers' own generate() -> Record"""
    a = run.a
    start = 1 if run.target.encoder_decoder else len(ids)
    torch.manual_seed(a.seed)
    ids = torch.tensor([ids], device=run.target.device)
    # Sampling is among all tokens with top_k=0; without it the library takes 50.
    with torch.inference_mode():
        found = run.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit,
            do_sample=a.temperature > 0, temperature=a.temperature or 1.0, top_k=a.top_k or 0,
            top_p=a.top_p, **more)
    return clock.Record(found[0, start:].tolist())

def library_arms(run):
    """transformers' own: plain, with each model of a cascade as assistant, with prompt lookup."""
    arms = [Arm("generate()", partial(library, run))]
    for name, model in run.stages.items():
        # The library takes vocabularies of two sizes for two tokenizers.
        if model.config.get_text_config().vocab_size != run.target.config.vocab_size:
            run.notes.append(f"no assisted generation with {name}: transformers wants equal "
                             "vocabularies")
            continue
        assisted = partial(library, run, assistant_model=model)
        arms.append(Arm(f"assisted generation ({name})", assisted))
    # Max-Gram has its counterpart in the library.
    grams = [drafter for drafter in run.drafters.values() if getattr(drafter, "gram", None)]
    if grams and not run.target.encoder_decoder:
        lookup = partial(library, run, prompt_lookup_num_tokens=maxgram.N)
        arms.append(Arm("prompt lookup", lookup))
    return arms

def writes_itself(drafter, tree="chain"):
    """Whether a drafter writes the tree of this name by itself: a sequence drafter's chain."""
    return hasattr(drafter, "chain") and tree in CHAINS

def builder(run, label, tree):
    """The builder that the call `tree` names, for the drafter `label`.

    Settings that are left open and depend on target and drafter are measured: prices, a mean size.
    """
    drafter = run.drafters[label]
    if writes_itself(drafter, tree.name):
        if tree.settings:
            raise UserError(f"--tree {tree.label}: {label} writes chains of its own length; say "
                            f"{tree.name}")
        return partial(cascade.proposal, drawn=tree.name == "drawn")
    settings = dict(tree.settings)
    left_open = settings_of(tree.function).keys() - settings.keys()
    if left_open & {"cost", "node_price"}:
        measured = clock.measure_costs(run, label)
        settings |= {key: measured[key] for key in left_open & measured.keys()}
    if "size" in left_open:
        settings["size"] = clock.mean_extras(run, label, settings.get("gamma", cape.GAMMA))
    if run.a.exact and "max_nodes" in settings_of(tree.function):
        # How large a tree grows where the drafter is sure, check_tree cannot know.
        settings["max_nodes"] = min(settings.get("max_nodes", EXACT), EXACT - 1)
    return partial(tree.function, **settings)

def arms_of(run):
    """-> all arms, in the table's order: plain decoding, transformers' own, drafters x trees."""
    arms = plain_arms(run) + library_arms(run)
    for label, drafter in run.drafters.items():
        for tree in run.trees:
            build = builder(run, label, tree)
            arms.append(Arm(label, partial(run.decode, drafter, build), tree.label, build))
    return arms

# ---------------------------------------------------------------- measure
def warm_up(run, arms):
    """Decode unmeasured, for kernels, allocator, caches; with graphs all, to record all sizes."""
    first = run.prompts if run.a.graphs else run.prompts[:1]
    for _, ids, limit in first:
        for arm in arms:
            arm.decode(ids, limit if run.a.graphs else min(WARM_UP, limit))

def measure(run, arms, after=None):
    """Decode every prompt with every arm -> how many prompts all have finished.

    An interruption ends it.  Results that are there stay.  after(i): called when prompt i is done.
    """
    warm_up(run, arms)
    bar = tqdm(total=len(run.prompts) * len(arms), unit="run", dynamic_ncols=True, disable=None)
    with bar, contextlib.suppress(KeyboardInterrupt):
        for i, (_, ids, limit) in enumerate(run.prompts):
            # Arm order is random in each prompt: an arm leaves traces for the next one.
            fresh = [arm for arm in arms if i not in arm.results]
            bar.update(len(arms) - len(fresh))
            for arm in random.Random(i).sample(fresh, len(fresh)):
                arm.results[i] = clock.measured(arm, ids, limit, run.cuda)
                bar.update()
            if after and fresh:
                after(i)
            so_far = range(i + 1)
            drafted = [arm for arm in arms if arm.tree]
            speeds = {arm.name: median(arm.speeds(arms[0], so_far)) for arm in drafted}
            report.progress(bar, i + 1, len(run.prompts), speeds)
    return min(len(arm.results) for arm in arms)

# ---------------------------------------------------------------- one row of the table
def versions():
    """What computes: a row says it."""
    packages = {package.__name__: package.__version__ for package in (torch, transformers)}
    return {"python": platform.python_version(), **packages}

def row_of(run, arm, base, generate, group, which, truth=None):
    """A line of the JSON: `arm` on the prompts `which`, beside plain decoding and generate().

    base: the fastest arm of plain decoding.  truth: the one whose tokens all should give, or base.
    """
    outs = [arm.results[i] for i in which]
    step = clock.plain_step([base.results[i] for i in which])
    row = {key: getattr(run.a, key) for key in ("target", "dtype", "device", "seed", "temperature")}
    row |= {
        "drafter": arm.drafter,
        "tree": arm.tree,
        "settings": settings_of(arm.build) if arm.build else {},
        "prices": run.costs.get(arm.drafter),                    # measured, with their ranges
        "group": group,
        "batch": 1,
        "prompts": len(outs),
        "prompt_tokens": sum(len(run.prompts[i][1]) for i in which),
        "threads": torch.get_num_threads(),
        "peak_memory": arm.memory}
    row |= clock.of_speeds(arm, base, generate, which)
    row |= clock.of_rounds(outs, step, drafts=arm.build is not None)
    row |= clock.of_stages(outs, step, run.drafters.get(arm.drafter), row)
    row["distinct_4grams"] = clock.distinct_4grams(outs)
    row |= report.losses(run, arm, truth or base, which)
    return row | {"versions": versions()}

# ---------------------------------------------------------------- the tables
def tables(run, arms, finished):
    """Print a table for each kind of prompts, and notes -> rows, those of all prompts first."""
    names = [arm.name for arm in arms]
    # arms_of puts plain decoding's arms first, and generate() after them.
    plain = [arm for arm in arms if arm.plain]
    generate = arms[len(plain)]
    groups = report.groups_of(run.prompts[:finished])
    # Speeds are held against the fastest plain decoding.
    base = min(plain, key=lambda arm: arm.seconds(groups["all"]))
    # Tokens are, too; but under --exact it may round differently, and the exact arm comes first.
    truth = arms[0] if run.a.exact else base
    rows = []
    for group, which in groups.items():
        fresh = [row_of(run, arm, base, generate, group, which, truth) for arm in arms]
        print(f"\n{group}: {len(which)} prompts\n{report.table(names, fresh)}")
        notes = report.slower(names, fresh)
        if group == "all":
            notes = [report.legend(run.a.graphs), report.averages(names, fresh, base.name), *notes]
        for note in notes:
            print(note)
        rows += fresh
    print()
    for fact in report.facts(run, names, rows, base.name):
        print(fact)
    return rows

# ---------------------------------------------------------------- from arguments to table
def write_json(path, rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    read.write_atomically(path, lambda part: part.write_text(lines))

def run_table(argv):
    run = Run(argv)
    a, arms = run.a, arms_of(run)
    print(report.headline(run), flush=True)
    for arm in arms:
        if a.show and arm.tree:
            report.show(run, arm)
    finished = measure(run, arms)
    if not finished:
        raise KeyboardInterrupt
    rows = tables(run, arms, finished)
    if a.json:
        write_json(a.json, rows)
    if finished == len(run.prompts):
        return 0
    counted = f"{finished} of {len(run.prompts)} prompts are in the table"
    print(f"interrupted: {counted}", file=sys.stderr)
    return 130

def main(argv=None, work=run_table, name="bench.py"):
    """Exit status: 0; 2 after one sentence about a user's mistake; 130 after an interruption."""
    try:
        return work(argv)
    except KeyboardInterrupt:
        print(f"{name}: interrupted before there was anything to report", file=sys.stderr)
        return 130
    except Exception as why:
        if not report.is_mistake(why):
            raise
        print(f"{name}: {why}", file=sys.stderr)
        return 2

if __name__ == "__main__":
    sys.exit(main())
