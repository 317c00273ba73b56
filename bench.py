"""How is a speedup measured honestly?  Any target, drafter and tree, beside plain decoding.

    python bench.py --drafter glide --tree cape
    python bench.py --drafter glide edd --tree chain "pct(width=7, leaf=0)" pct-cost "fixed(size=4)"
    python bench.py --drafter "cascade(base, small, maxgram, k=(8, 13, 1))" --tree chain
    python bench.py --drafter "mixture(edd, maxgram)" --tree pct-cost graft
    python bench.py --target Qwen/Qwen2.5-7B-Instruct --tree chain --dtype auto \
        --drafter "cascade(Qwen/Qwen2.5-0.5B-Instruct, maxgram)" --prompts mt_bench.jsonl

An arm is one way of decoding: plain decoding, transformers' own generate(), or a drafter with a
tree.  Every prompt is decoded by all arms, in random order, and each arm gets a row of the table.
Three rules keep the table honest:

 1. The baseline is plain decoding with the same target, cache, dtype and loop, one token a forward.
    transformers' generate() is timed, too: a slow loop of ours would show there.
 2. Speedups are paired: each prompt's speed is divided by the baseline's speed on that prompt.
 3. Outputs are compared token for token with the baseline's, and the first difference is reported.

This file is in the order of the work: arguments, what they name, one timed decoding, the arms, the
measurement, a row's figures, the tables.  Drafters and trees are named as their functions would be
called: see cape.py, pct.py and runtime/load.py.  A legend under the table explains its columns.
"""
import json
import os
import platform
import random
import sys
import time
from collections import Counter
from functools import cached_property, partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers
from tqdm import tqdm

import cape
import cascade
import maxgram
import pct
import verify
from beyond import graft, priced
from runtime import load, measure, report, text
from runtime.calls import check_tree, read_call
from verify import UserError

# A cascade and Max-Gram draft a whole chain themselves, without these builders.  For them the two
# names only say whether its tokens are the most probable ones or sampled.
CHAINS = {"chain": cape.chain, "drawn": cape.drawn}
TREES = {**CHAINS, "cape": cape.cape, "fixed": cape.fixed, "beam": cape.beam, "pct": pct.pct,
         "vct": pct.vct, "own-confidence": pct.own_confidence, "pct-cost": priced.pct_cost,
         "graft": graft.graft, "eagle2": pct.eagle2}
PROMPTS = load.CHECKPOINTS / "prompts.jsonl"             # the project's own
FEW = 9                                                  # rows of PROMPTS: a minute or less
UNMEASURED = 4                  # rows, after those of the table, to measure prices on
MOST_NODES = 512                # of a tree, the root included
WARM_UP = 16                    # tokens that each arm decodes before anything is measured

# ---------------------------------------------------------------- arguments
def parser():
    p = text.Parser(description="Decode with a target, any drafters and trees, and without them.")
    flag = p.add_argument
    flag("--target", default=str(load.CHECKPOINTS / "target"),
         help="folder or hub name (default: the stand-in)")
    flag("--drafter", nargs="+", default=["glide"], help="folders of --checkpoint, maxgram, "
         '"mixture(edd, maxgram)", '
         '"cascade(base, small, maxgram, k=(8, 13, 1), lenience=3)" (default: glide)')
    flag("--tree", nargs="+", default=["cape"], help=f'{" ".join(TREES)}, with settings: '
         '"pct(width=7, leaf=0)" (default: cape)')
    flag("--checkpoint", default=str(load.CHECKPOINTS), help="folder of a drafter, or a folder "
         "with one folder for each drafter (default: the stand-in's)")
    flag("--prompts", nargs="+", help="files of prompts (default: the project's own)")
    flag("--limit", type=int, help="read this many rows, balanced by kind (default: all; of the "
         f"project's own {FEW})")
    flag("--template", help="chat template of conversations: plain, vicuna, or a Jinja file "
         "(default: the tokenizer's own, or plain)")
    flag("--max-new-tokens", type=int, default=128, help="for each prompt (default: 128)")
    flag("--temperature", type=float, default=0.0,
         help="sampling temperature; 0 is greedy (default: 0)")
    flag("--top-k", type=int, help="sample among the k most probable tokens (default: among all)")
    flag("--top-p", type=float, default=1.0, help="sample among the most probable tokens whose "
         "probabilities sum to p (default: 1, all)")
    flag("--seed", type=int, default=0, help="of all random choices (default: 0)")
    flag("--dtype", default="float32",
         choices=["float32", "float16", "bfloat16", "float64", "auto"],
         help="auto: the dtype in which the target's weights are stored (default: float32)")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, "
         "cuda:1, or auto: spread over all devices by accelerate (default: cuda if there is one)")
    flag("--threads", type=int, help="CPU threads (default: PyTorch's)")
    flag("--graphs", action="store_true",
         help="static shapes and CUDA graphs (default: exact shapes)")
    flag("--revision", help="of the target on the hub: branch, tag or commit (default: the newest)")
    flag("--trust-remote-code", action="store_true",
         help="run code that hub models bring (default: no)")
    flag("--json", help="write the rows to this file, one line each (default: none)")
    flag("--show", action="store_true",
         help="print a continuation for each drafter and tree (default: no)")
    return p

def check_numbers(a):
    """Refuse numbers out of range."""
    least = {"max_new_tokens": 1, "limit": 1, "top_k": 1, "threads": 1, "temperature": 0, "seed": 0}
    for name, low in least.items():
        value = getattr(a, name)
        # Above 2^31 some libraries overflow.  NaN fails both comparisons.
        if value is not None and not low <= value < 2 ** 31:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {value}: it must be at least {low} and below 2^31")
    if not 0 < a.top_p <= 1:
        raise UserError(f"--top-p is {a.top_p}: it must be above 0 and at most 1")

def check(a):
    """Refuse what cannot work, before anything is loaded.

    Returns two lists of Calls: those of --drafter and those of --tree.
    """
    loaders = load.loaders(a.checkpoint)
    drafters = [read_call(given, loaders, f"drafter in {a.checkpoint}") for given in a.drafter]
    trees = [read_call(given, TREES, "tree") for given in a.tree]
    for calls in (drafters, trees):
        labels = [call.label for call in calls]
        if len(set(labels)) < len(labels):
            raise UserError(f"{' '.join(labels)}: name each once")
    check_numbers(a)
    for tree in trees:
        check_tree(tree, MOST_NODES)
        if tree.name == "drawn" and a.temperature == 0:
            raise UserError("--tree drawn samples its tokens: give --temperature above 0, or take "
                            "--tree chain")
    if a.json:
        folder = Path(a.json).absolute().parent
        if Path(a.json).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UserError(f"--json {a.json}: name a file in a folder that can be written to")
    if a.graphs and a.device == "cpu":
        raise UserError("--graphs: only a CUDA device has graphs; use --device cuda")
    return drafters, trees

# ---------------------------------------------------------------- what they name, loaded
class Run(load.Setup):
    """The flags, and everything they name, loaded.

    a            the flags as they were parsed
    model        transformers' own, and its tokenizer
    target       the model as verify.generate takes it
    cuda         whether the target is on a GPU
    eos          the token ids that end a sequence
    trees        [Call]: name, function, settings; defaults of all its settings; label
    drafters     {label: drafter}
    stages       {name: language model}, of all cascades
    limit        how many rows of the prompts' files are read; None: all
    prompts      [(kind of text, token ids, limit of new tokens)]
    prices       {label: measured prices, or None}, once a tree has asked for them
    notes        [sentence for the reader]
    """

    def __init__(self, argv=None):
        a = self.a = parser().parse_args(argv)
        calls, self.trees = check(a)
        if a.threads:
            torch.set_num_threads(a.threads)
        super().__init__(a.target, a.checkpoint, a.dtype, a.device, a.revision, a.trust_remote_code,
                         a.graphs)
        self.check_target(calls)
        self.limit = a.limit or (None if a.prompts else FEW)
        self.prompts = self.read_prompts(self.limit)
        self.prices = {}
        self.drafters = {call.label: load.called(self, call) for call in calls}

    def check_target(self, calls):
        """Refuse drafters and trees that this target does not take."""
        named = {tree.name for tree in self.trees}
        if not self.target.verifies_trees and not named <= CHAINS.keys():
            raise UserError(f"{self.a.target} ignores a tree's mask or positions: it takes "
                            "--tree chain")
        named = {call.name for call in calls}
        if self.target.encoder_decoder and not named <= {"maxgram", "cascade"}:
            raise UserError(f"{self.a.target} has an encoder: it takes --drafter maxgram or "
                            "cascade(...)")

    def read_prompts(self, limit, skip=0):
        """The prompts of --prompts: skip the first `skip` rows, then read `limit` rows."""
        a = self.a
        return text.prompts_of(self, a.prompts or [str(PROMPTS)], limit, a.max_new_tokens,
                               self.answer, a.template, skip)

    @cached_property
    def unmeasured(self):
        """Prompts on which prices are measured: from rows after those of the table."""
        found = self.read_prompts(UNMEASURED, skip=self.limit) if self.limit else []
        if not found:
            self.notes.append("prices are measured on prompts of the table")
        return found or self.prompts[:UNMEASURED]

    # ------------------------------------------------------------ one timed decoding
    def decode(self, drafter, build, ids, limit, number=0, streamer=None):
        """verify.generate with the flags' sampling, timed -> Record.  drafter None: plain decoding.

        number: the prompt's.  Two prompts are sampled with different noise, all arms of one prompt
        with the same.
        """
        a = self.a
        rule = verify.Greedy()
        if a.temperature > 0:
            # verify.Sampled, which also records how far p_target and p_draft overlap
            top_p = a.top_p if a.top_p < 1 else None
            rule = measure.Overlap(a.temperature, a.top_k, top_p, prompt_seed(a.seed, number))
        stop = []
        if self.eos is not None:
            stop.append(transformers.EosTokenCriteria(self.eos))
        # verify.generate knows no clock: it gets a target and a drafter whose calls are timed.
        clock = measure.Clock(self.cuda)
        target = clock.around(self.target)
        timed = clock.around(drafter) if drafter else None
        out = verify.generate(target, timed, build, ids, limit, rule, stop, streamer)
        overlaps = getattr(rule, "overlaps", ())
        stage_runs = getattr(drafter, "runs", ())
        return measure.Record(out.tokens, out.rounds, clock, overlaps, stage_runs)

    def answer(self, ids):
        """The target's answer as text, by plain decoding."""
        limit = min(self.a.max_new_tokens, self.target.remaining(ids))
        out = self.decode(None, verify.root_only, ids, limit)
        return self.tokenizer.decode(out.tokens, skip_special_tokens=True)

def prompt_seed(seed, number):
    """--seed and a prompt's number -> the seed of its noise"""
    return random.Random(f"{seed} {number}").getrandbits(63)

# ---------------------------------------------------------------- arms
class Arm:
    """One way of decoding, and what it gave.

    name       as the table prints it: "glide x cape", "generate()"
    decode     decode(ids, limit, number) -> Record
    drafter    the drafter's label, or the name of a baseline
    tree       the tree's label, or None
    settings   {setting: value} of the tree's builder
    results    {number of a prompt: Record}
    memory     the peak in bytes, on CUDA
    """
    def __init__(self, drafter, decode, tree=None, settings=None):
        self.drafter, self.decode, self.tree = drafter, decode, tree
        self.settings = settings or {}
        self.name = f"{drafter} x {tree}" if tree else drafter
        self.results, self.memory = {}, None

    def speedups(self, base, which):
        """On each of the prompts `which`, how many times as fast as the arm `base`."""
        return [self.results[i].speed() / base.results[i].speed() for i in which]

def arms_of(run):
    """-> all arms, in the table's order: plain decoding, transformers' own, drafters x trees."""
    arms = [plain_arm(run), *library_arms(run)]
    for label in run.drafters:
        for tree in run.trees:
            arms.append(drafted_arm(run, label, tree))
    return arms

def plain_arm(run):
    """Plain decoding by our own loop: the baseline, and the reference arm for losslessness."""
    return Arm("plain", partial(run.decode, None, verify.root_only))

def library(run, ids, limit, number, **more):
    """transformers' own generate() -> Record"""
    a = run.a
    torch.manual_seed(prompt_seed(a.seed, number))
    given = torch.tensor([ids], device=run.target.device)
    # With top_k=0 the library samples among all tokens; its default is 50.
    with torch.inference_mode():
        out = run.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=limit,
            do_sample=a.temperature > 0, temperature=a.temperature or 1.0, top_k=a.top_k or 0,
            top_p=a.top_p, **more)
    # A decoder-only model returns the prompt, too; an encoder-decoder model its start token.
    start = 1 if run.target.encoder_decoder else len(ids)
    return measure.Record(out[0, start:].tolist())

def library_arms(run):
    """transformers' own: plain, with each model of a cascade as assistant, with prompt lookup."""
    arms = [Arm("generate()", partial(library, run))]
    for name, model in run.stages.items():
        # Where the vocabulary sizes differ, transformers assumes that the tokenizers differ, too.
        if model.config.get_text_config().vocab_size != run.target.config.vocab_size:
            run.notes.append(f"no assisted generation with {name}: transformers wants equal "
                             "vocabularies")
            continue
        assisted = partial(library, run, assistant_model=model)
        arms.append(Arm(f"assisted generation ({name})", assisted))
    # Prompt lookup is the library's Max-Gram.  It does not search an encoder's input.
    with_gram = [drafter for drafter in run.drafters.values() if getattr(drafter, "gram", None)]
    if with_gram:
        lookup = partial(library, run, prompt_lookup_num_tokens=maxgram.N)
        arms.append(Arm("prompt lookup", lookup))
    return arms

def drafted_arm(run, label, tree):
    """The arm of the drafter `label` with the tree that the Call `tree` names."""
    build = builder(run, label, tree)
    settings = build.keywords
    if build.func is tree.function:              # not a chain that the drafter writes itself
        settings = {**tree.defaults, **settings}
    decode = partial(run.decode, run.drafters[label], build)
    return Arm(label, decode, tree.label, settings)

def builder(run, label, tree):
    """The Call `tree` as a builder for the drafter `label` -> partial

    A tree's prices (cost, node_price) depend on the target and the drafter.  Those that --tree does
    not set are measured, once for all trees of the run.
    """
    drafter = run.drafters[label]
    if hasattr(drafter, "chain") and tree.name in CHAINS:
        if tree.settings:
            raise UserError(f"--tree {tree.label}: {label} writes chains of its own length; say "
                            f"{tree.name}")
        return partial(cascade.proposal, drawn=tree.name == "drawn")
    settings = dict(tree.settings)
    left_open = tree.defaults.keys() - settings.keys()
    if left_open & {"cost", "node_price"}:
        if not run.prices:
            run.prices = measure.prices(run)
        for name, price in (run.prices[label] or {}).items():
            if name in left_open:
                settings[name] = price
    return partial(tree.function, **settings)

# ---------------------------------------------------------------- measure
def warm_up(run, arms):
    """Decode without measuring, so that kernels, allocator and caches settle.

    With --graphs every prompt is decoded whole: a graph is recorded at the first use of its size.
    """
    prompts = run.prompts if run.a.graphs else run.prompts[:1]
    for _, ids, limit in prompts:
        for arm in arms:
            arm.decode(ids, limit if run.a.graphs else min(WARM_UP, limit), 0)

def measure_one(run, arm, number):
    """Decode one prompt with one arm -> Record with its seconds"""
    _, ids, limit = run.prompts[number]
    if run.cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    record = arm.decode(ids, limit, number)
    if run.cuda:
        torch.cuda.synchronize()
        arm.memory = max(arm.memory or 0, torch.cuda.max_memory_allocated())
    record.seconds = time.perf_counter() - start
    return record

def measure_all(run, arms, after=None):
    """Decode every prompt with every arm -> how many prompts all arms have finished.

    Ctrl-C ends it early, and keeps what was measured.  after(i) is called when prompt i is done.
    """
    warm_up(run, arms)
    bar = tqdm(total=len(run.prompts) * len(arms), unit="run", dynamic_ncols=True, disable=None)
    try:
        for i in range(len(run.prompts)):
            # Arm order is random in each prompt, since an arm leaves traces (caches, clock speed)
            # for the next one.  Results that are there already are kept: figures/paper.py
            # goes on with an interrupted table.
            missing = [arm for arm in arms if i not in arm.results]
            bar.update(len(arms) - len(missing))
            for arm in random.Random(i).sample(missing, len(missing)):
                arm.results[i] = measure_one(run, arm, i)
                bar.update()
            if after and missing:
                after(i)
            show_progress(bar, arms, i + 1, len(run.prompts))
    except KeyboardInterrupt:
        pass
    bar.close()
    return min(len(arm.results) for arm in arms)

def show_progress(bar, arms, done, count):
    """The fastest arm so far, beside the bar; without a terminal, a line for each prompt."""
    medians = [(median(arm.speedups(arms[0], range(done))), arm.name) for arm in arms]
    speedup, name = max(medians)
    fastest = f"fastest so far: {name} {speedup:.2f}x"
    bar.set_postfix_str(fastest)
    if bar.disable:
        print(f"prompt {done} of {count}; {fastest}", file=sys.stderr, flush=True)

# ---------------------------------------------------------------- a row: the papers' figures
def ratio(x, y):
    """x / y, or None where there is nothing to divide, or to divide by."""
    return x / y if y and x is not None else None

def expected_speedup(alpha, c, gamma):
    """GLIDE's E(Spd.) (section 5.1, after Leviathan et al. 2023), which is Cascade's Corollary 4.2.

    alpha: acceptance rate; c: one drafter forward over one target forward; gamma: drafted tokens.
    """
    # (1 - alpha^{gamma+1}) / ((1 - alpha) (c gamma + 1))
    tokens = sum(alpha ** i for i in range(gamma + 1))
    return tokens / (c * gamma + 1)

def swi(tokens, runs, costs):
    """Standardized walltime improvement (Cascade, section 5.1): 1 for plain decoding.

    tokens = n, all that were generated; runs[0] = count(S, M_t, T), runs[i] = count(S, M_di, T);
    costs[i] = c_i, a forward of M_di over one of M_t: costs[0] = 1, Max-Gram's is 0.
    Erratum: "simply the sum of GPU time by all models" describes the denominator.
    """
    assert len(runs) == len(costs) and costs[0] == 1, "each model has a cost; the target's is 1"
    # n / (count(S, M_t, T) + sum_i count(S, M_di, T) c_i)
    return tokens / sum(count * cost for count, cost in zip(runs, costs))

def acceptance(total):
    """What was drafted and accepted, per round.  total: sums over rounds, of Record.total."""
    rounds = total["rounds"]
    # At most one of several siblings can be accepted, so a tree has no alpha.
    accepted = None if total["trees"] else total["accepted"]
    overlap = total["overlap"] if total["drawn"] else None
    return {
        # tau: new tokens per round, the target's own included
        "tau": ratio(total["new"], rounds),
        "depth": ratio(total["depth"], rounds),
        "nodes": ratio(total["nodes"], rounds),
        "draft_forwards": ratio(total["draft_forwards"], rounds),
        # alpha: accepted over tested tokens of a chain.  Nothing after a rejection is tested.
        "alpha": ratio(accepted, total["tested"]),
        # GLIDE's alpha under sampling: the mean of sum_x min(p_target(x), p_draft(x))
        "alpha_overlap": ratio(overlap, total["tested"]),
        # EDD's alpha: tau over the maximum depth
        "alpha_depth": ratio(total["new"], total["depth"])}

def time_of_rounds(total, step):
    """How long a round takes, and for what.  step: seconds of a plain decoding step, s_t."""
    rounds = total["rounds"]
    spent = total["draft"] + total["verify"] + total["other"]
    row = {
        "round_ms": ratio(1e3 * spent, rounds),
        "target_ms": 1e3 * step,
        "begin_ms": ratio(1e3 * total["begin"], rounds)}
    for what in ("draft", "verify", "other"):
        row[f"{what}_ms"] = ratio(1e3 * total[what], rounds)
        row[f"share_{what}"] = ratio(total[what], spent)
    return row

def plain_step(records):
    """Seconds of a plain decoding step, s_t, from Records of plain decoding without the prefill."""
    steps = sum(len(record.tokens) - 1 for record in records)
    seconds = sum(record.seconds - record.total["prefill"] for record in records)
    return seconds / max(1, steps)

def speeds(arm, base, generate, which):
    """Speed of an arm on the prompts `which`, beside plain decoding (base) and generate()."""
    tokens = sum(len(arm.results[i].tokens) for i in which)
    seconds = sum(arm.results[i].seconds for i in which)
    speedups = arm.speedups(base, which)
    low, middle, high = np.quantile(speedups, [0.25, 0.5, 0.75]).tolist()
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "speedup_low": low,
        "speedup": middle,
        "speedup_high": high,
        "speedup_vs_generate": median(arm.speedups(generate, which))}

def runs_and_costs(drafter, settings, records, total, step, alpha):
    """c, E(Spd.), and for a cascade how often the target and each stage ran, and SWI.

    settings: of the tree's builder.  total: sums over the rounds of these records.
    """
    is_cascade = isinstance(drafter, cascade.Cascade)
    # The target runs once per round, and once per prompt for the prefill.
    target_runs = total["rounds"] + len(records)
    stage_runs = [sum(counts) for counts in zip(*(record.stage_runs for record in records))]
    # c = s_d / s_t: one drafter forward, without what begin() takes, over one plain decoding step.
    # The stages of a cascade have no common c.
    c = None
    if len(stage_runs) <= 1:
        drafting = ratio(total["draft"] - total["begin"], total["draft_forwards"])
        c = ratio(drafting, step)
    gamma = drafter.K[0][0] if is_cascade else settings.get("gamma")
    expected = None
    if alpha is not None and c and gamma:
        expected = expected_speedup(alpha, c, gamma)
    found = {
        "c": c,
        "expected_speedup": expected,
        "runs": [target_runs, *stage_runs] if total["rounds"] else None,
        "stages": drafter.names if is_cascade else None,
        "K": drafter.K if is_cascade else None}
    if is_cascade:
        tokens = sum(len(record.tokens) for record in records)
        found["swi_measured"] = tokens / (target_runs + total["draft"] / step)
        # costs: of the models, by their weights.  Max-Gram's is 0.
        runs = [target_runs, *stage_runs[:len(drafter.costs)]]
        found["swi_ms"] = swi(tokens, runs, [1, *drafter.costs])
    return found

def losslessness(run, arm, base, which):
    """Are all tokens those of plain decoding (base), and where is the first that is not?

    Both are None where tokens are sampled with other noise, so that other tokens are expected: by
    transformers' own arms, and by a sampled chain, which gives plain sampling's distribution but
    not its tokens.  All other arms key their noise by position, as plain sampling does.
    """
    drawn = any(arm.results[i].total["drawn"] for i in which)
    same_noise = arm is base or (arm.tree and not drawn)
    if run.a.temperature > 0 and not same_noise:
        return {"lossless": None, "first_divergence": None}
    for i in which:
        ours, plain = arm.results[i].tokens, base.results[i].tokens
        if ours != plain:
            where = divergence(run.target, run.prompts[i][1], ours, plain)
            return {"lossless": False, "first_divergence": {"prompt": i, **where}}
    return {"lossless": True, "first_divergence": None}

@torch.inference_mode()
def divergence(target, ids, ours, plain):
    """Where two outputs first differ -> {"token": counted from 0, "logit_gap"}

    logit_gap: the target's logit of plain decoding's token minus that of ours; None where one
    output ends.  In half precision a gap near zero is rounding.
    """
    at, gap = 0, None
    shorter = min(len(ours), len(plain))
    while at < shorter and ours[at] == plain[at]:
        at += 1
    if at < shorter:
        target.capture({})
        logits = target.prefill(ids)                                # (V,)
        if at:
            logits = target.sync(target.ids + plain[:at])[-1]
        gap = (logits[plain[at]] - logits[ours[at]]).item()
    return {"token": at, "logit_gap": gap}

def figures(run, arm, base, which):
    """The papers' figures of an arm on the prompts `which`.  base: plain decoding"""
    records = [arm.results[i] for i in which]
    total = Counter()
    for record in records:
        total.update(record.total)
    step = plain_step([base.results[i] for i in which])
    # A baseline has no tau, and no draft.
    drafted = total if arm.tree else Counter()
    found = {**acceptance(drafted), **time_of_rounds(drafted, step)}
    drafter = run.drafters.get(arm.drafter)
    return found | runs_and_costs(drafter, arm.settings, records, total, step, found["alpha"])

def row_of(run, arm, base, generate, group, which):
    """A line of the JSON: an arm on the prompts `which`, beside the arms `base` and `generate`."""
    records = [arm.results[i] for i in which]
    is_folder = Path(run.a.target).is_dir()
    row = {
        "target": os.path.relpath(run.a.target) if is_folder else run.a.target,
        "dtype": str(run.model.dtype).removeprefix("torch."),
        "device": run.a.device,
        "seed": run.a.seed,
        "temperature": run.a.temperature,
        "drafter": arm.drafter,
        "tree": arm.tree,
        "baseline": arm is base,
        "settings": arm.settings,
        "prices": run.prices.get(arm.drafter),
        "group": group,
        "batch": 1,
        "prompts": len(records),
        "prompt_tokens": sum(len(run.prompts[i][1]) for i in which),
        "threads": torch.get_num_threads(),
        "peak_memory": arm.memory}
    row |= speeds(arm, base, generate, which)
    row["time_to_first_token"] = None
    if records[0].rounds:
        row["time_to_first_token"] = median(record.total["prefill"] for record in records)
    row |= figures(run, arm, base, which)
    # The same figures for each prompt, as paired tests need them
    row["by_prompt"] = []
    for i, speedup in zip(which, arm.speedups(base, which)):
        row["by_prompt"].append({"speedup": speedup, **figures(run, arm, base, [i])})
    row |= losslessness(run, arm, base, which)
    row["versions"] = {"python": platform.python_version(), "torch": torch.__version__,
                       "transformers": transformers.__version__}
    return row

# ---------------------------------------------------------------- the tables, the JSON
def tables(run, arms, finished):
    """Print a table of all prompts, then one for each kind -> rows, those of all prompts first."""
    groups = {"all": list(range(finished))}
    for i in range(finished):
        kind, _, _ = run.prompts[i]
        # "mt_bench/math" is a part of "mt_bench".
        for group in dict.fromkeys([kind.split("/")[0], kind]):
            groups.setdefault(group, []).append(i)
    if len(groups) == 2:
        # One kind alone has the same table.
        del groups[kind]
    # arms_of puts plain decoding first, then generate().
    base, generate = arms[0], arms[1]
    names = [arm.name for arm in arms]
    rows = []
    for group, which in groups.items():
        fresh = [row_of(run, arm, base, generate, group, which) for arm in arms]
        print(f"\n{group}: {len(which)} prompts\n{report.table(names, fresh)}")
        if group == "all":
            print(*report.notes(run, names, fresh), sep="\n")
        rows += fresh
    return rows

def write_json(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))

def run_table(argv):
    """From arguments to the table -> exit status"""
    run = Run(argv)
    arms = arms_of(run)
    print(report.headline(run), flush=True)
    for arm in arms:
        if run.a.show and arm.tree:
            report.show(run, arm)
    finished = measure_all(run, arms)
    if not finished:
        raise KeyboardInterrupt
    rows = tables(run, arms, finished)
    if run.a.json:
        write_json(run.a.json, rows)
    if finished == len(run.prompts):
        return 0
    print(f"interrupted: the table has {finished} of {len(run.prompts)} prompts", file=sys.stderr)
    return 130

def main(argv=None, work=run_table, name="bench.py"):
    """Exit status: 0; 2 after one sentence about a user's mistake; 130 after Ctrl-C."""
    try:
        return work(argv)
    except KeyboardInterrupt:
        print(f"{name}: interrupted before there was anything to report", file=sys.stderr)
        return 130
    except (UserError, OSError, torch.OutOfMemoryError) as why:
        first_line = str(why).partition("\n")[0]
        print(f"{name}: {first_line}", file=sys.stderr)
        return 2

if __name__ == "__main__":
    sys.exit(main())
