"""One table: any target with any drafter and any tree, end to end, beside honest baselines.

    python bench.py --drafter glide --tree cape
    python bench.py --drafter glide edd --tree chain "pct(width=7, leaf=0)" pct-cost "fixed(size=4)"
    python bench.py --drafter maxgram "cascade(base, small, maxgram, k=(8, 13, 1))" --tree chain
    python bench.py --drafter "beside(edd, maxgram)" --tree pct-cost graft
    python bench.py --target lmsys/vicuna-7b-v1.5 --checkpoint my-glide --dtype float16 --device cuda
    python bench.py --target Qwen/Qwen2.5-7B-Instruct --tree chain --dtype auto --prompts mt_bench.jsonl \
        --drafter "cascade(Qwen/Qwen2.5-0.5B-Instruct, maxgram)"

arguments -> arms -> measure -> row -> table.  An arm is one way of decoding; all take turns on each prompt.
Drafters and trees are named as their functions would be called: see cape.py, pct.py, and runtime/load.py.
Plain decoding is the same target, cache and dtype through the same loop with one token a forward; on a CPU
also padded to two queries, as one query takes a slow path on some, and the faster of the two is the baseline.
"""
import contextlib
import json
import os
import platform
import random
import re
import sys
import time
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
from data import read
from runtime import clock, families, graphs, load, proof
from runtime.load import read_call, settings_of
from verify import UserError

CHAINS = {"chain": cape.chain, "drawn": cape.drawn}         # a cascade and Max-Gram write these by themselves
TREES = {**CHAINS, "cape": cape.cape, "fixed": cape.fixed, "beam": cape.beam, "pct": pct.pct, "vct": pct.vct,
         "own-confidence": pct.own_confidence, "pct-cost": priced.pct_cost, "graft": graft.graft,
         "eagle2": pct.eagle2}
PROMPTS = load.ROOT / "data" / "prompts.jsonl"              # the project's own
LOOK = 9                                                    # of them: a minute or less
MOST_NODES = 512                                            # of a tree, the root counted
EXACT = 64                                                  # rows of a forward under --exact, at least
FACTS = "c|expected_speedup|alpha_overlap|K|runs|swi_.*|first_divergence"           # printed under the table
COLUMNS = {
    "tok/s": "{tokens_per_second:.1f}",                     # new tokens over all seconds, prefill included
    # over plain decoding, prompt by prompt: median [lower quartile - upper quartile]
    "speedup": "{speedup:.2f}x [{speedup_low:.2f}-{speedup_high:.2f}]",
    "vs generate()": "{speedup_vs_generate:.2f}x",          # over transformers' own generate(): median
    "tau": "{tau:.2f}",                                     # new tokens a round, the bonus token included
    "alpha": "{alpha:.3f}",                                 # accepted / tested drafted tokens, on chains
    "nodes": "{nodes:.1f}",                                 # drafted nodes verified a round
    "draft": "{share_draft:.0%}",
    "verify": "{share_verify:.0%}",
    "other": "{share_other:.0%}",                           # trees, masks, acceptance, bookkeeping
    "ms/round": "{round_ms:.1f}",
    "lossless": "{lossless}"}                               # token for token plain decoding's output

# ---------------------------------------------------------------- arguments
def parser():
    p = read.Parser(description="Decode with a target and any drafters and trees beside plain decoding.")
    flag = p.add_argument
    flag("--target", default=str(load.STAND_IN), help="folder or hub name (default: the stand-in)")
    flag("--drafter", nargs="+", default=["glide"], help="a folder of --checkpoint, maxgram, gemma4(NAME), "
         'eagle3(NAME), "beside(edd, maxgram)", "cascade(base, small, maxgram, k=(8, 13, 1), lenience=3)" '
         "(default: glide)")
    flag("--tree", nargs="+", default=["cape"], help=f'{" ".join(TREES)}, with settings: '
         '"pct(width=7, leaf=0)" (default: cape)')
    flag("--checkpoint", default=str(load.CHECKPOINTS), help="folder of a drafter, or of several folders of "
         "one each (default: the stand-in's)")
    flag("--prompts", nargs="+", help="files of prompts (default: the project's own)")
    flag("--limit", type=int, help="read so many rows, evenly over their kinds (default: all, of the "
         f"project's own {LOOK})")
    flag("--ask", help='what a row asks, by its fields: "{question} Think step by step." (default: by '
         "the fields that it has)")
    flag("--system", help="system message of conversations (default: none)")
    flag("--template", help=f"form of conversations: {' '.join(read.TEMPLATES)}, or a Jinja file (default: "
         "the tokenizer's own, or plain)")
    flag("--max-new-tokens", type=int, default=128, help="for each prompt (default: 128)")
    flag("--temperature", type=float, default=0.0, help="of sampling; 0 is greedy (default: 0)")
    flag("--top-k", type=int, help="sample among so many tokens (default: among all)")
    flag("--top-p", type=float, default=1.0, help="sample among the likeliest tokens, of this probability "
         "together (default: 1, all)")
    flag("--seed", type=read.seed, default=0, help="of all draws (default: 0)")
    flag("--dtype", default="float32", choices=["float32", "float16", "bfloat16", "float64", "auto"],
         help="auto: as the target's weights are stored (default: float32)")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu",
         help="cpu, cuda, or auto: spread over what there is, by accelerate (default: cuda if there is one)")
    flag("--threads", type=int, help="CPU threads (default: PyTorch's)")
    flag("--graphs", action="store_true", help="static shapes and CUDA graphs (default: exact shapes)")
    flag("--exact", action="store_true", help=f"at least {EXACT} rows in each forward of the target, so that "
         "half precision rounds alike in all arms (default: no)")
    flag("--revision", help="of the target on the hub: a branch, tag or commit (default: the newest)")
    flag("--trust-remote-code", action="store_true", help="run code that hub models bring (default: no)")
    flag("--json", help="write one line a row to this file (default: none)")
    flag("--show", action="store_true", help="print a continuation of each drafter and tree (default: no)")
    return p

def uniform(tokens, parents):
    """What a builder sees of a made-up drafter: each of 64 tokens is as likely."""
    assert len(parents) <= MOST_NODES, f"more than {MOST_NODES} nodes a depth"
    return torch.full((len(parents), 64), 1 / 64)

def check_tree(tree, a):
    """Refuse a tree that no drafter could build."""
    most = EXACT if a.exact else MOST_NODES
    try:
        made = tree.function(uniform, torch.tensor([0]), **tree.settings)
        nodes = len(made.tokens) - 1
        assert nodes < most, f"{nodes} nodes exceed the {most - 1} that fit"
    except Exception as why:
        raise UserError(f"--tree {tree.label}: {why}") from None
    if tree.name == "drawn" and a.temperature == 0:
        raise UserError("--tree drawn draws its tokens: give --temperature above 0, or take --tree chain")

def check(a):
    """Refuse what cannot work before anything is loaded -> the calls of --drafter, of --tree"""
    loaders = load.loaders(a.checkpoint)
    drafters = [read_call(text, loaders, f"drafter in {a.checkpoint}") for text in a.drafter]
    trees = [read_call(text, TREES, "tree") for text in a.tree]
    for calls in (drafters, trees):
        labels = [call.label for call in calls]
        if len(set(labels)) < len(labels):
            raise UserError(f"{' '.join(labels)}: name each once")
    for tree in trees:
        check_tree(tree, a)
    least = {"max_new_tokens": 1, "limit": 1, "top_k": 1, "threads": 1, "temperature": 0}
    for name, low in least.items():
        value = getattr(a, name)
        if value is not None and not value >= low:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be at least {low}")
    if not 0 < a.top_p <= 1:
        raise UserError(f"--top-p is {a.top_p}: it must be above 0 and at most 1")
    if a.json and (Path(a.json).is_dir() or not os.access(Path(a.json).absolute().parent, os.W_OK)):
        raise UserError(f"--json {a.json}: name a file in a folder that is there and can be written to")
    load.check_device(a.device, spread=True)
    if a.graphs and a.device == "cpu":
        raise UserError("--graphs: only a CUDA device has graphs; use --device cuda")
    return drafters, trees

# ---------------------------------------------------------------- the run: what the flags name, loaded
class Run(load.Setup):
    """All that the flags `a` name: besides Setup's, trees [Call], prompts [(group, ids, limit)], drafters
    {label: drafter}."""

    def __init__(self, argv=None):
        a = self.a = parser().parse_args(argv)
        calls, self.trees = check(a)
        if not a.prompts:
            a.prompts, a.limit = [str(PROMPTS)], a.limit or LOOK
        torch.set_num_threads(a.threads or torch.get_num_threads())
        a.target = os.path.relpath(a.target) if Path(a.target).is_dir() else a.target
        super().__init__(a.target, a.checkpoint, a.dtype, a.device, a.revision, a.trust_remote_code, a.graphs,
                         EXACT if a.exact else 1)
        a.dtype = str(self.model.dtype).removeprefix("torch.")             # where it was auto
        if not self.target.verifies_trees and not {tree.name for tree in self.trees} <= CHAINS.keys():
            raise UserError(f"{a.target} honours no mask or positions of a tree: it takes --tree chain")
        if self.target.encoder_decoder and not {call.name for call in calls} <= {"maxgram", "cascade"}:
            raise UserError(f"{a.target} has an encoder: it takes --drafter maxgram or cascade(...)")
        self.prompts = load.prompts_of(self, a.prompts, a.limit, a.max_new_tokens, self.answer, a.template,
                                       a.ask, a.system)
        self.drafters, self.costs = {}, {}
        for call in calls:
            self.drafters[call.label] = drafter = load.called(self, call)
            if call.name not in ("maxgram", "cascade"):
                prompts = [ids for _, ids, _ in self.prompts[:2]]
                sentence = proof.proves_itself(self.target, drafter, prompts)
                self.notes += [f"{call.label}: {sentence}"] if sentence else []

    def decode(self, drafter, build, ids, limit, target=None, streamer=None):
        """verify.generate as the flags say, timed -> Record.  drafter None: plain decoding."""
        a, rule, stop = self.a, verify.Greedy(), []
        if a.temperature > 0:
            top_p = a.top_p if a.top_p < 1 else None
            rule = clock.Overlap(a.temperature, a.top_k, top_p, a.seed)
        if self.eos is not None:
            stop.append(transformers.EosTokenCriteria(self.eos))
        watch = clock.Clock(self.cuda)
        target = clock.Timed(target or self.target, watch, clock.TARGET)
        timed = drafter and clock.Timed(drafter, watch, clock.DRAFTER)
        out = verify.generate(target, timed, build, ids, limit, rule, stop, streamer)
        overlaps, runs = getattr(rule, "overlaps", ()), getattr(drafter, "runs", ())
        return clock.Record(out, watch, overlaps, runs)

    def answer(self, ids):
        """What the target says, as text, by plain decoding."""
        limit = min(self.a.max_new_tokens, self.target.remaining(ids))
        out = self.decode(None, verify.root_only, ids, limit)
        return self.tokenizer.decode(out.tokens, skip_special_tokens=True)

# ---------------------------------------------------------------- arms
class Arm:
    """One way of decoding.  decode(ids, limit) -> Record; results[i]: the Record of prompt i.

    tree, build: of an arm with a drafter.  plain: plain decoding by our own loop.  memory: bytes, on CUDA.
    """
    def __init__(self, drafter, decode, tree=None, build=None, plain=False):
        self.drafter, self.decode, self.tree, self.build, self.plain = drafter, decode, tree, build, plain
        self.name = f"{drafter} x {tree}" if tree else drafter
        self.results, self.memory = {}, None

    def speeds(self, base, which):
        """Speedups over `base` on the prompts `which`."""
        return [self.results[i].speed() / base.results[i].speed() for i in which]

def plain_arms(run):
    """Plain decoding by our own loop."""
    targets = {"plain": run.target}
    if run.target.device.type == "cpu" and not run.target.encoder_decoder:
        two = families.any_target(run.model)
        targets["plain, two queries"] = graphs.static(two, rows=2, keys=1, record=False)
    if run.a.exact:
        # What exactness costs is seen beside plain decoding that does without.
        targets["plain, not exact"] = run.wrap(run.model)
    decode = partial(run.decode, None, verify.root_only)
    return [Arm(name, partial(decode, target=target), plain=True) for name, target in targets.items()]

def library(run, ids, limit, **more):
    """transformers' own generate() -> Record"""
    a, start = run.a, 1 if run.target.encoder_decoder else len(ids)
    torch.manual_seed(a.seed)
    ids = torch.tensor([ids], device=run.target.device)
    with torch.inference_mode():
        found = run.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit,
                                   do_sample=a.temperature > 0, temperature=a.temperature or 1.0,
                                   top_k=a.top_k or 0, top_p=a.top_p, **more)
    return clock.Record(found[0, start:].tolist())

def library_arms(run):
    """transformers' own: plain, with each model of a cascade as an assistant, with prompt lookup."""
    arms = [Arm("generate()", partial(library, run))]
    for name, model in run.stages.items():
        # The library takes vocabularies of two sizes for two tokenizers.
        if model.config.get_text_config().vocab_size != run.target.config.vocab_size:
            run.notes.append(f"no assisted generation with {name}: transformers wants equal vocabularies")
            continue
        arms.append(Arm(f"assisted generation ({name})", partial(library, run, assistant_model=model)))
    grams = [drafter for drafter in run.drafters.values() if getattr(drafter, "gram", None)]
    if grams and not run.target.encoder_decoder:
        arms.append(Arm("prompt lookup", partial(library, run, prompt_lookup_num_tokens=maxgram.N)))
    return arms

def builder(run, label, tree):
    """The builder that the call `tree` names, for the drafter `label`; what depends on both is measured."""
    writes_chains = hasattr(run.drafters[label], "chain")
    if writes_chains and tree.name in CHAINS:
        if tree.settings:
            raise UserError(f"--tree {tree.label}: {label} writes chains of its own length; say {tree.name}")
        return partial(cascade.proposal, drawn=tree.name == "drawn")
    missing, found = settings_of(tree.function).keys() - tree.settings.keys(), {}
    if missing & {"cost", "node_price"}:
        if label not in run.costs:
            run.costs[label] = clock.measure_costs(run, label)
        found = run.costs[label]
    if "size" in missing:
        found = {"size": clock.mean_extras(run, label, tree.settings.get("gamma", cape.GAMMA))}
    measured = {key: found[key] for key in found.keys() & missing}
    return partial(tree.function, **measured, **tree.settings)

def arms_of(run):
    """-> all arms in the order of the table: plain decoding's, transformers' own, drafters and trees."""
    arms = plain_arms(run) + library_arms(run)
    for label, drafter in run.drafters.items():
        for tree in run.trees:
            build = builder(run, label, tree)
            arms.append(Arm(label, partial(run.decode, drafter, build), tree.label, build))
    return arms

class Screen(transformers.generation.BaseStreamer):
    """Prints each round's tokens: the accepted ones in colour or [brackets], then the target's own."""
    def __init__(self, tokenizer):
        self.tokenizer, self.made = tokenizer, []
        self.form = "\033[32m{}\033[0m" if sys.stdout.isatty() else "[{}]"

    def text(self):
        # Half a character waits for its other half.
        return self.tokenizer.decode(self.made).rstrip("\ufffd")

    def put(self, value):
        if value.ndim > 1:                                          # the prompt
            return
        *accepted, own = value.tolist()
        for tokens, form in ((accepted, self.form), ([own], "{}")):
            before = self.text()
            self.made += tokens
            fresh = self.text()[len(before):]
            print(form.format(fresh) if fresh else "", end="", flush=True)

    def end(self):
        print()

def show(run, arm):
    """Print arm's continuation of the first prompt as it is made."""
    group, ids, limit = run.prompts[0]
    screen = Screen(run.tokenizer)
    print(f"\n--- {arm.name}, prompt 1 of {group}: {screen.form.format('accepted')}bonus")
    print(f"--- tau {arm.decode(ids, limit, streamer=screen).tau:.2f}")

# ---------------------------------------------------------------- measure
def measure(run, arms):
    """Decode every prompt with every arm -> how many prompts all have finished; an interruption ends it."""
    for arm in arms:                                                # warm-up: kernels, allocator, caches
        arm.decode(run.prompts[0][1], min(16, run.prompts[0][2]))
    bar = tqdm(total=len(run.prompts) * len(arms), unit="run", dynamic_ncols=True, disable=None)
    with bar, contextlib.suppress(KeyboardInterrupt):
        for i, (_, ids, limit) in enumerate(run.prompts):
            # Nobody is always first, or always behind the same: what ran before leaves its traces.
            for arm in random.Random(i).sample(arms, len(arms)):
                if run.cuda:
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                out = arm.decode(ids, limit)
                if run.cuda:
                    torch.cuda.synchronize()
                    arm.memory = max(arm.memory or 0, torch.cuda.max_memory_allocated())
                out.seconds, arm.results[i] = time.perf_counter() - start, out
                bar.update()
            speeds = {arm.name: median(arm.speeds(arms[0], range(i + 1))) for arm in arms if arm.tree}
            bar.set_postfix_str(", ".join(f"{name} {speed:.2f}x" for name, speed in speeds.items()))
    return min(len(arm.results) for arm in arms)

# ---------------------------------------------------------------- one row of the table
def speed_figures(arm, base, generate, which):
    """Speeds of `arm` on the prompts `which`, beside plain decoding's and transformers' own."""
    outs = [arm.results[i] for i in which]
    tokens = sum(len(out.tokens) for out in outs)
    seconds = sum(out.seconds for out in outs)
    speeds = arm.speeds(base, which)
    low, middle, high = torch.tensor(speeds).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "speedup_low": low,
        "speedup": middle,
        "speedup_high": high,
        "speedup_vs_generate": median(arm.speeds(generate, which)),
        "by_prompt": [{"speedup": speed, **out.by_prompt()} for speed, out in zip(speeds, outs)]}

def row_of(run, arm, base, generate, group, which, truth=None):
    """A line of the JSON: `arm` on the prompts `which`, beside plain decoding and transformers' own.

    base: the arm of plain decoding that is the fastest; truth: the one whose tokens all should give, or base.
    """
    truth = truth or base
    outs = [arm.results[i] for i in which]
    step = clock.plain_step([base.results[i] for i in which])
    row = {key: getattr(run.a, key) for key in ("target", "dtype", "device", "seed", "temperature")}
    row |= {
        "drafter": arm.drafter,
        "tree": arm.tree,
        "settings": settings_of(arm.build) if arm.build else {},
        "group": group,
        "batch": 1,
        "prompts": len(outs),
        "prompt_tokens": sum(len(run.prompts[i][1]) for i in which),
        "threads": torch.get_num_threads(),
        "peak_memory": arm.memory}
    row |= speed_figures(arm, base, generate, which)
    row |= clock.of_rounds(outs, step, drafts=arm.build is not None)
    row |= clock.of_stages(outs, step, run.drafters.get(arm.drafter), row)
    row["distinct_4grams"] = clock.distinct_4grams(outs)
    # Where tokens are sampled, only arms with plain decoding's keyed noise must give the same ones.
    drawn = any(out.total["drawn"] for out in outs)
    exact = run.a.temperature == 0 or arm.plain or arm.build and not drawn
    wrong = [i for i in which if arm.results[i].tokens != truth.results[i].tokens]
    row["lossless"] = not wrong if exact else None
    row["first_divergence"] = divergence(run, arm, truth, wrong[0]) if exact and wrong else None
    row["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__}
    return row

@torch.inference_mode()
def divergence(run, arm, base, i):
    """Where an output first leaves plain decoding's, and by how little the target preferred its own token."""
    ours, plain = arm.results[i].tokens, base.results[i].tokens
    at = 0
    while ours[at:at + 1] == plain[at:at + 1] and at < len(ours):
        at += 1
    gap = None
    # Where one ends the other may go on.
    if at < min(len(ours), len(plain)):
        run.target.capture({})
        logits = run.target.prefill(run.prompts[i][1])              # (V,)
        if at:
            logits = run.target.sync(run.target.ids + plain[:at])[-1]
        gap = (logits[plain[at]] - logits[ours[at]]).item()
    return {"prompt": i, "token": at, "logit_gap": gap}

# ---------------------------------------------------------------- the table
def cell(form, row):
    """A cell of the table; a dash where the row has no such figure."""
    try:
        return form.format(**row)
    except TypeError:
        return "-"

def table(arms, rows):
    """The rows as text."""
    words = {True: "yes", False: "NO", None: "-"}
    lines = [["", *COLUMNS]]
    for arm, row in zip(arms, rows):
        shown = {**row, "lossless": words[row["lossless"]]}
        if row["tau"] is None:                                      # baselines have no rounds
            shown |= dict.fromkeys(f"share_{key}" for key in clock.SHARES)
        lines.append([arm.name, *(cell(form, shown) for form in COLUMNS.values())])
    first, *widths = [max(map(len, column)) for column in zip(*lines)]
    text = []
    for name, *cells in lines:
        right = [cell.rjust(width) for cell, width in zip(cells, widths)]
        text.append("  ".join([name.ljust(first), *right]).rstrip())
    return "\n".join(text)

def averages(arms, rows, base):
    """Which average the speedup is, and what another one says."""
    plain = rows[arms.index(base)]
    ratios = []
    for arm, row in zip(arms, rows):
        ratio = row["tokens_per_second"] / plain["tokens_per_second"]
        ratios.append(f"{arm.name} {ratio:.2f}x")
    return ("speedup: median over prompts of each prompt's ratio to the baseline [lower-upper quartile]; "
            f"ratio of totals, all tokens over all seconds: {', '.join(ratios)}")

def report(run, arms, finished):
    """Print a table for each group of prompts, and what does not fit into it -> rows, all prompts' first."""
    plain = [arm for arm in arms if arm.plain]
    base = min(plain, key=lambda arm: sum(arm.results[i].seconds for i in range(finished)))
    groups = {"all": list(range(finished))}
    for i in range(finished):
        groups.setdefault(run.prompts[i][0], []).append(i)
    if len(groups) == 2:                                            # one kind of prompts
        groups = {"all": groups["all"]}
    rows, truth, generate = [], arms[0] if run.a.exact else base, arms[len(plain)]
    for group, which in groups.items():
        fresh = [row_of(run, arm, base, generate, group, which, truth) for arm in arms]
        print(f"\n{group}: {len(which)} prompts\n{table(arms, fresh)}")
        if group == "all":
            print(averages(arms, fresh, base))
        rows += fresh
    first = rows[arms.index(base)]
    print(f"\nbaseline: {base.name}, {first['target_ms']:.2f} ms a token; distinct 4-grams of its output: "
          f"{first['distinct_4grams'] or 0:.0%}")
    for arm, row in zip(arms, rows):
        facts = {key: row[key] for key in row if row[key] and re.fullmatch(FACTS, key)}
        facts = [f"{key} {round(x, 3) if isinstance(x, float) else x}" for key, x in facts.items()]
        if arm.tree or row["lossless"] is False:
            print(f"{arm.name}: {'; '.join(facts)}")
    return rows

# ---------------------------------------------------------------- from arguments to table
def write_json(path, rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    read.write_atomically(path, lambda part: part.write_text(lines))

def run_table(argv):
    run = Run(argv)
    a, arms = run.a, arms_of(run)
    where = torch.cuda.get_device_name() if run.cuda else f"{torch.get_num_threads()} threads"
    print(f"target {a.target}, {a.dtype}, {a.device} ({where}), temperature {a.temperature:g}, "
          f"{len(run.prompts)} prompts, up to {a.max_new_tokens} new tokens", *run.notes, sep="; ")
    for arm in arms:
        if a.show and arm.tree:
            show(run, arm)
    finished = measure(run, arms)
    if not finished:
        raise KeyboardInterrupt
    rows = report(run, arms, finished)
    if a.json:
        write_json(a.json, rows)
    if finished == len(run.prompts):
        return 0
    print(f"interrupted: {finished} of {len(run.prompts)} prompts are in the table", file=sys.stderr)
    return 130

def main(argv=None, work=run_table, name="bench.py"):
    """Exit status: 0; 2 after one sentence about a user's mistake; 130 after an interruption."""
    try:
        return work(argv)
    except (UserError, read.UserError) as why:
        print(f"{name}: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted before there was anything to report", file=sys.stderr)
        return 130

if __name__ == "__main__":
    sys.exit(main())
