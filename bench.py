"""How is a speedup measured honestly?  Any target, drafter and tree, beside plain decoding.

    python bench.py --drafter glide --tree cape
    python bench.py --drafter glide edd --tree chain "pct(width=7, leaf=0)" pct-cost "fixed(size=4)"
    python bench.py --drafter "cascade(base, small, maxgram, k=(8, 13, 1))" --tree chain
    python bench.py --drafter "mixture(edd, maxgram)" --tree pct-cost graft
    python bench.py --drafter glide "glide(temperature=1)" --tree cape pct    # raw confidences, too
    python bench.py --target Qwen/Qwen2.5-7B-Instruct --tree chain --dtype auto \
        --drafter "cascade(Qwen/Qwen2.5-0.5B-Instruct, maxgram)" --prompts mt_bench.jsonl

An arm is one way of decoding: plain decoding, transformers' own generate(), or a drafter with a
tree.  Every prompt is decoded by all arms, in random order, and each arm gets a row of the table.
Three rules keep the table honest:

 1. The baseline is plain decoding with the same target, cache, dtype and loop, one token a forward.
    transformers' generate() is timed, too: a slow loop of ours would show there.
 2. Speedups are paired: each prompt's speed is divided by the baseline's speed on that prompt.
 3. Outputs are compared token for token with the baseline's, and the first difference is reported.

Read main() first, at the end; above it stands what it calls, in this order: arguments, prompts, one
decoding, the arms, the measurement, a row's figures, the tables.  Time is taken by measure.decode,
which puts clocks around target and drafter; verify.generate has no code for it.  The time of a
builder is "other", unless it is the drafter's own.  Sentences under the table explain its columns.

A drafter or a tree is named as a call of its function, say "pct(width=7)".  Functions of drafters
are in runtime/load.py, those of trees in cape.py and pct.py, of pct-cost and graft in beyond/.

With --json FILE an interrupted table goes on: its finished prompts stand in FILE.part, and the same
command skips them.
"""
import argparse
import os
import random
import shlex
import sys
import time
from collections import Counter, namedtuple
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from tqdm import tqdm

import cape
import cascade
import maxgram
import pct
import verify
from beyond import graft, priced
from runtime import chats, load, measure, report, text
from runtime.calls import check_tree, read_call
from runtime.errors import UserError
from runtime.program import Parser, program

TREES = {"chain": cape.chain, "drawn": cape.drawn, "cape": cape.cape, "fixed": cape.fixed,
         "beam": cape.beam, "pct": pct.pct, "vct": pct.vct, "eagle2": pct.eagle2,
         "token-confidence": pct.token_confidence, "pct-cost": priced.pct_cost,
         "graft": graft.Mixture.graft}
CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
PROMPTS = CHECKPOINTS / "prompts.jsonl"
PRICE_PROMPTS = CHECKPOINTS / "price_prompts.jsonl"
FEW = 9                         # prompts of PROMPTS: a minute or less
MOST_NODES = 512                # of a tree, the root included
WARM_UP = 16                    # tokens that each arm decodes before anything is measured
PRICED_CHAIN = {"node_price", "start", "max_nodes"}     # the settings of priced.priced_chain

# ---------------------------------------------------------------- what most functions get
# a: the flags.
#
# setup: a load.Setup.
#   model, tokenizer   transformers' own
#   target             the model as a verify.Target for any family, which has three more attributes:
#                      context, verifies_trees, encoder_decoder
#   eos                the ids that end a text, or None
#   stages             {name: model} of all cascades
#   notes              sentences that are printed above the table
#   drafter(call)      loads the drafter that a Call names
#
# A Call (runtime/calls.py) is a drafter or tree as it was named, say "pct(width=7)": its name,
# function, words (the models that it names), settings, defaults and label.  Max-Gram alone, named
# maxgram or cascade(maxgram), is a Cascade without models.

# ---------------------------------------------------------------- arguments
def between(kind, low, high):
    """An argparse type: numbers of a kind, int or float, from low to high."""
    def number(text):
        value = kind(text)
        if not low <= value <= high:                     # NaN is not, either
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
        return value
    return number

def parser():
    p = Parser(description="Decode with a target, any drafters and trees, and without them.")
    flag = p.add_argument
    positive = between(int, 1, 2 ** 31 - 1)              # above that some libraries overflow
    flag("--target", default=str(CHECKPOINTS / "target"),
         help="folder or hub name (default: the stand-in)")
    flag("--drafter", nargs="+", default=["glide"], help="folders of --checkpoint, "
         '"glide(temperature=1)" with raw confidences, maxgram, "mixture(edd, maxgram)", '
         '"cascade(base, small, maxgram, k=(8, 13, 1), lenience=3)" (default: glide)')
    flag("--tree", nargs="+", default=["cape"], help=f'{" ".join(TREES)}, with settings: '
         '"pct(width=7, leaf=0)" (default: cape)')
    flag("--checkpoint", default=str(CHECKPOINTS), help="folder of a drafter, or a folder "
         "with one folder for each drafter (default: the stand-in's)")
    flag("--prompts", nargs="+", help="files of prompts (default: the project's own)")
    flag("--limit", type=positive, help="use at most so many prompts, the kinds of text in turns "
         f"(default: all; of the project's own {FEW})")
    flag("--price-prompts", nargs="+", default=[str(PRICE_PROMPTS)], help="files of other prompts, "
         "on which the costs of drafting and verifying are measured for pct, pct-cost and graft "
         "(default: the project's own)")
    flag("--template", help="chat template of conversations: plain, question, vicuna, or a "
         "Jinja file (default: the tokenizer's own, or question)")
    flag("--max-new-tokens", type=positive, default=128, help="for each prompt")
    flag("--temperature", type=between(float, 0, 1e6), default=0.0,
         help="sampling temperature; 0 is greedy (default: 0)")
    flag("--top-k", type=positive,
         help="sample among the k most probable tokens (default: among all)")
    flag("--top-p", type=between(float, 1e-6, 1), default=1.0, help="sample among the most "
         "probable tokens whose probabilities sum to p (default: 1, all)")
    flag("--seed", type=between(int, 0, 2 ** 31 - 1), default=0,
         help="of sampling (default: 0)")
    flag("--dtype", default="float32",
         choices=["float32", "float16", "bfloat16", "float64", "auto"],
         help="auto: the dtype in which the target's weights are stored (default: float32)")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, "
         "cuda:1, or auto: spread over all devices by accelerate (default: cuda if there is one)")
    flag("--threads", type=positive, help="CPU threads (default: PyTorch's)")
    flag("--graphs", action="store_true",
         help="static shapes and CUDA graphs (default: exact shapes)")
    flag("--revision", help="of the target on the hub: branch, tag or commit (default: the newest)")
    flag("--trust-remote-code", action="store_true",
         help="run code that hub models bring (default: no)")
    flag("--json", metavar="FILE", help="write the rows to this file, one line each; FILE.part "
         "keeps the finished prompts of an interrupted table (default: none)")
    flag("--show", action="store_true",
         help="print a continuation for each drafter and tree, as it is made (default: no)")
    return p

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
    for tree in trees:
        for drafter in drafters:
            check_pair(drafter, tree)
        # check_tree builds a tree with a made-up drafter.
        trial = tree
        if tree.name == "graft":
            # graft needs a loaded drafter.  Its settings, except `chain`, are those of pct_cost,
            # which is tried in its place.
            shared = {name: x for name, x in tree.settings.items() if name != "chain"}
            trial = tree._replace(function=priced.pct_cost, settings=shared)
        check_tree(trial, MOST_NODES)
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

def check_pair(drafter, tree):
    """Refuse settings of a tree that an arm of these two Calls would ignore."""
    if tree.name in ("chain", "drawn") and drafter.name in ("maxgram", "cascade") and tree.settings:
        raise UserError(f"--tree {tree.label}: {drafter.label} writes chains of its own length; "
                        f"give --tree {tree.name}, without settings")
    # With Max-Gram alone, pct-cost and graft become a chain, priced.priced_chain: see builder().
    # `cost` is let through, though it changes nothing: Max-Gram runs no forward.
    is_maxgram = drafter.name == "maxgram" or drafter.words == ["maxgram"]
    ignored = tree.settings.keys() - PRICED_CHAIN - {"cost"}
    if tree.name in ("pct-cost", "graft") and is_maxgram and ignored:
        raise UserError(f"--tree {tree.label}: with maxgram it is a chain, which takes no "
                        f"{', '.join(sorted(ignored))}")

def check_target(name, target, drafters, trees):
    """Refuse the Calls of drafters and trees that this target does not take."""
    if not target.verifies_trees and not {tree.name for tree in trees} <= {"chain", "drawn"}:
        raise UserError(f"{name} ignores a tree's mask or positions: it takes --tree chain, or "
                        "drawn")
    named = {call.name for call in drafters}
    if target.encoder_decoder and not named <= {"maxgram", "cascade"}:
        raise UserError(f"{name} has an encoder: it takes --drafter maxgram or cascade(...)")

# ---------------------------------------------------------------- prompts
# A prompt.
#   kind      of text
#   question  a number, which all prompts of one chat share
#   ids       a list of token ids
#   limit     the most new tokens
Prompt = namedtuple("Prompt", "kind question ids limit")

def read_prompts(a, setup, paths, limit=None):
    """Files of prompts -> at most `limit` Prompts, the kinds of text in turns."""
    context, vocab = setup.target.context, setup.target.config.vocab_size

    def answer(ids):
        """The target's own answer to an earlier question, where the chat has none; untimed."""
        most = min(a.max_new_tokens, setup.target.remaining(ids))
        tokens = decode(a, setup, None, verify.root_only, ids, most).tokens
        return setup.tokenizer.decode(tokens, skip_special_tokens=True)

    prompts, too_long = [], 0
    # prompt_rows gives the kinds in turns
    for number, (kind, document) in enumerate(text.prompt_rows(paths)):
        if len(prompts) == limit:
            break
        kind = "all rows" if kind == "all" else kind     # "all" is the table of all prompts
        for ids in chats.questions(document, setup.tokenizer, a.template, vocab, answer):
            remaining = setup.target.remaining(ids)
            if remaining < 1:
                too_long += 1                            # and so are all further turns of this row
                break
            prompts.append(Prompt(kind, number, ids, min(a.max_new_tokens, remaining)))
            if len(prompts) == limit:
                break
    if not prompts:
        raise UserError(f"{' '.join(map(str, paths))}: no prompt of at most {context} tokens, the "
                        "target's context, is there")
    if too_long:
        setup.notes.append(f"{too_long} prompts longer than the context left out, and what follows "
                           "them in their chats")
    return prompts

# ---------------------------------------------------------------- one decoding
# A measure.Record is one decoding: tokens, total, stage_runs, seconds.  stage_runs are the runs of
# each stage of a cascade.  total is a Counter of sums over the rounds:
#   rounds          how many there were
#   new             tokens of the output, without the prefill's
#   nodes           drafted tokens
#   depth           of the trees
#   trees           rounds whose tree is no chain
#   drawn           rounds whose tree is a sampled chain
#   accepted        drafted tokens that were accepted
#   tested          the accepted ones, and one more in each round that rejected a token
#   overlap         of sampled chains: sum_x min(p_target(x), p_draft(x)), summed over tested tokens
#   draft_forwards  of the drafter; of a cascade the runs of all stages
#   prefill, draft, verify, other   seconds
#   begin           the seconds of `draft` before a round's first forward
#   "0", "1", ...   the seconds of `draft` in each model of a cascade

def decode(a, setup, drafter, build, ids, limit, number=0, streamer=None):
    """Speculative decoding by the flags' sampling -> Record.  drafter None: plain decoding.

    number: the prompt's.  Two prompts are sampled with different noise, all arms of one prompt with
    the same.
    """
    top_p = a.top_p if a.top_p < 1 else None
    rule = verify.Rule(a.temperature, a.top_k, top_p, prompt_seed(a.seed, number))
    eos = () if setup.eos is None else setup.eos
    return measure.decode(setup.target, drafter, build, ids, limit, rule, eos, streamer)

def library(a, setup, ids, limit, number, **more):
    """transformers' own generate() -> Record"""
    torch.manual_seed(prompt_seed(a.seed, number))
    given = torch.tensor([ids], device=setup.target.device)
    start = time.perf_counter()
    # With top_k=0 the library samples among all tokens; its default is 50.
    with torch.inference_mode():
        out = setup.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=limit,
            do_sample=a.temperature > 0, temperature=a.temperature or 1.0, top_k=a.top_k or 0,
            top_p=a.top_p, **more)
    # A decoder-only model returns the prompt, too; an encoder-decoder model its start token.
    first = 1 if setup.target.encoder_decoder else len(ids)
    tokens = out[0, first:].tolist()                     # a device-to-host sync
    seconds = time.perf_counter() - start
    return measure.Record(tokens, total=Counter(), stage_runs=[], seconds=seconds)

def prompt_seed(seed, number):
    """--seed and a prompt's number -> the seed of its noise"""
    return random.Random(f"{seed} {number}").getrandbits(63)

# ---------------------------------------------------------------- arms
# One way of decoding.
#   name      as the table prints it: "glide x cape", "generate()"
#   decode    decode(ids, limit, number of the prompt) -> Record
#   drafter   the drafter's label; None for a baseline, as are tree and cascade
#   tree      the tree's label
#   settings  {setting: value} of the tree's builder
#   cascade   the drafter, if it is a cascade
Arm = namedtuple("Arm", "name decode drafter tree settings cascade",
                 defaults=(None, None, {}, None))

# prices: {label of a drafter: its prices}, in plain decoding steps; or None: see measure.py
#   cost               of a drafter forward
#   node_price         of one more verified node
#   start              of drafting a tree at all, once a round, besides its forwards and nodes

def arms_of(a, setup, drafters, trees, prices):
    """-> all arms, in the table's order: plain decoding, transformers' own, drafters x trees.

    drafters: {label: drafter}.  trees: Calls.  prices: {label: its prices, or None}.
    """
    arms = [Arm("plain", partial(decode, a, setup, None, verify.root_only))]
    arms += library_arms(a, setup, drafters)
    baselines = len(arms)
    for label, drafter in drafters.items():
        for tree in trees:
            build, settings = builder(drafter, tree, prices.get(label))
            if build is None:
                setup.notes.append(f"no arm {label} x graft, which takes mixture(...) or maxgram")
                continue
            decoding = partial(decode, a, setup, drafter, build)
            own = drafter if isinstance(drafter, cascade.Cascade) else None
            arms.append(Arm(f"{label} x {tree.label}", decoding, label, tree.label, settings, own))
    if len(arms) == baselines:
        raise UserError("--tree graft takes --drafter mixture(...) or maxgram")
    return arms

def library_arms(a, setup, drafters):
    """transformers' own: plain, with each model of a cascade as assistant, with prompt lookup."""
    arms = [Arm("generate()", partial(library, a, setup))]
    for name, model in setup.stages.items():
        # Where the vocabulary sizes differ, transformers assumes that the tokenizers differ, too.
        if model.config.get_text_config().vocab_size != setup.target.config.vocab_size:
            setup.notes.append(f"no assisted generation with {name}: transformers wants equal "
                               "vocabularies")
            continue
        assisted = partial(library, a, setup, assistant_model=model)
        arms.append(Arm(f"assisted generation ({name})", assisted))
    # Prompt lookup is the library's Max-Gram.  It does not search an encoder's input.
    if any(getattr(drafter, "gram", None) for drafter in drafters.values()):
        lookup = partial(library, a, setup, prompt_lookup_num_tokens=maxgram.N)
        arms.append(Arm("prompt lookup", lookup))
    return arms

def is_open(tree, *names):
    """Whether a tree's Call leaves one of these settings to its default."""
    return any(name in tree.defaults and name not in tree.settings for name in names)

def builder(drafter, tree, prices):
    """The Call `tree` for a drafter -> its builder, and the settings that the table shows for it.

    prices: those measured for the drafter, which fill the settings that the Call leaves open.  A
    tree is built by its own function, except:
        chain, drawn      of a cascade: its methods
        pct-cost, graft   of Max-Gram alone: priced.priced_chain
        graft             of a mixture: its method
        graft             of any other drafter: none, the builder is None
    """
    settings = dict(tree.settings)
    for name, price in (prices or {}).items():
        if is_open(tree, name):
            settings[name] = price
    is_cascade = isinstance(drafter, cascade.Cascade)
    is_maxgram = is_cascade and not drafter.models
    if is_cascade and tree.name in ("chain", "drawn"):
        return getattr(drafter, tree.name), {}
    if is_maxgram and tree.name in ("pct-cost", "graft"):
        # It drafts without a forward: what is priced are the nodes of its chain.
        settings = {name: settings[name] for name in settings.keys() & PRICED_CHAIN}
        return partial(priced.priced_chain, gram=drafter.gram, **settings), settings
    function = tree.function
    if tree.name == "graft":
        if not hasattr(drafter, "graft"):
            return None, {}
        function = drafter.graft
    return partial(function, **settings), {**tree.defaults, **settings}

def measured_prices(a, setup, drafters, trees, prompts):
    """The prices that trees need and --tree leaves open -> {label: prices, or None}

    Where --tree gives cost and node_price nothing is measured, and an open `start` is 0.
    """
    if not any(is_open(tree, "cost", "node_price") for tree in trees):
        return {}
    others = read_prompts(a, setup, a.price_prompts)
    known = {tuple(prompt.ids) for prompt in prompts}
    if any(tuple(prompt.ids) in known for prompt in others):
        raise UserError("--price-prompts: a prompt of the table is among them; prices are measured "
                        "on prompts of their own")
    print("measuring the prices of drafting and verifying, for half a minute", file=sys.stderr)
    return measure.prices(partial(decode, a, setup), drafters, [(p.ids, p.limit) for p in others])

# ---------------------------------------------------------------- measure
# table: a report.Unfinished, all that was measured so far.
#   about              what all rows share
#   prices             as above; None before they are measured
#   results            [{name of an arm: Record}], one for each finished prompt
#   begin(prices)      the prices are known
#   add({arm: Record}) a prompt is finished
#   finish(rows, ...)  the end; FILE.part keeps all of this until then

def warm_up(arms, prompts, graphs):
    """Decode without measuring, so that kernels, allocator and caches settle.

    With --graphs every prompt is decoded whole: a graph is recorded at the first use of its size.
    """
    if not graphs:
        prompts = prompts[:1]
    for prompt in prompts:
        limit = prompt.limit if graphs else min(WARM_UP, prompt.limit)
        for arm in arms:
            arm.decode(prompt.ids, limit, number=0)

def measure_all(arms, prompts, table, graphs=False):
    """Decode every prompt with every arm, and add what each gave to `table`, a report.Unfinished.

    Prompts that are in the table already are skipped.  Ctrl-C ends it early.
    """
    done = len(table.results)
    if done == len(prompts):
        return
    warm_up(arms, prompts, graphs)
    bar = tqdm(total=len(prompts) * len(arms), initial=done * len(arms), unit="run", disable=None)
    try:
        for number in range(done, len(prompts)):
            # Arm order is random in each prompt, since an arm leaves traces (caches, clock speed)
            # for the next one.
            prompt, record_of = prompts[number], {}
            for arm in random.Random(number).sample(arms, len(arms)):
                record_of[arm.name] = arm.decode(prompt.ids, prompt.limit, number)
                bar.update()
            table.add(record_of)
            if bar.disable:                              # no terminal
                print(f"prompt {number + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        pass
    bar.close()

# ---------------------------------------------------------------- a row: the papers' figures
def ratio(x, y):
    """x / y, or None where there is nothing to divide, or to divide by."""
    return x / y if y and x is not None else None

def speedups(name, base, results):
    """For each prompt, the speed of the arm `name` divided by that of the arm `base` -> list

    Speed is in tokens per second, prefill included.
    """
    def speed(record):
        return len(record.tokens) / record.seconds
    return [speed(found[name]) / speed(found[base]) for found in results]

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
    costs[i] = c_i, a run of M_di over one of M_t: costs[0] = 1.  Every run of a model costs the
    same.
    """
    assert len(runs) == len(costs) and costs[0] == 1, "each model has a cost; the target's is 1"
    # n / (count(S, M_t, T) + sum_i count(S, M_di, T) c_i)
    return tokens / sum(count * cost for count, cost in zip(runs, costs))

def plain_step(records):
    """Seconds of a plain decoding step, s_t, from Records of plain decoding without the prefill."""
    steps = sum(len(record.tokens) - 1 for record in records)
    seconds = sum(record.seconds - record.total["prefill"] for record in records)
    return seconds / max(1, steps)

def sum_of(records):
    """The sums of Record.total over several decodings."""
    return sum((record.total for record in records), Counter())

def acceptance(total):
    """What was drafted and accepted, per round.  total: sums over rounds, of Record.total."""
    rounds = total["rounds"]
    # At most one of several siblings can be accepted, so a tree has no alpha.
    accepted = None if total["trees"] else total["accepted"]
    overlap = total["overlap"] if total["drawn"] else None
    return {
        # tau: new tokens per round, the target's own included
        "tau": ratio(total["new"], rounds),
        "nodes": ratio(total["nodes"], rounds),
        # alpha: accepted over tested tokens of a chain.  Nothing after a rejection is tested.
        "alpha": ratio(accepted, total["tested"]),
        # GLIDE's alpha under sampling: the mean of sum_x min(p_target(x), p_draft(x))
        "alpha_overlap": ratio(overlap, total["tested"]),
        # EDD's alpha: new tokens over the depth of the trees
        "alpha_depth": ratio(total["new"], total["depth"])}

def time_of_rounds(total, step):
    """How long a round takes, and for what.  step: seconds of a plain decoding step, s_t."""
    rounds = total["rounds"]
    spent = total["draft"] + total["verify"] + total["other"]
    row = {"round_ms": ratio(1e3 * spent, rounds), "target_ms": 1e3 * step}
    for what in ("draft", "verify", "other"):
        row[f"{what}_ms"] = ratio(1e3 * total[what], rounds)
        row[f"share_{what}"] = ratio(total[what], spent)
    return row

def runs_of(records):
    """Of a cascade: the number of runs of the target, and of each stage -> list"""
    # The target runs once per round, and once per prompt for the prefill.
    target = sum_of(records)["rounds"] + len(records)
    by_stage = zip(*[record.stage_runs for record in records])       # a tuple for each stage
    return [target, *(sum(runs) for runs in by_stage)]

def costs_of(records, step):
    """Of a cascade: [1, c_1, c_2, ...], the time of a run of each stage, in plain decoding steps.

    The first is the target itself.  Max-Gram's is 0, as in the paper.  step: seconds of a plain
    decoding step, s_t.
    """
    total = sum_of(records)
    costs = [1.0]
    for number, count in enumerate(runs_of(records)[1:]):
        seconds = total[str(number)]                     # in that model; Max-Gram has none: 0
        costs.append((ratio(seconds, count) or 0.0) / step)
    return costs

def gamma_of(arm):
    """The builder's gamma, for expected_speedup; None where it has none.

    Of a cascade only a single model has one: other stages do not run once for each token.
    """
    if not arm.cascade:
        return arm.settings.get("gamma")
    is_one_model = len(arm.cascade.draft_list) == len(arm.cascade.models) == 1
    return arm.cascade.K[0][0] if is_one_model else None

def metrics(arm, records, plain, costs):
    """The papers' figures of an arm.  plain: Records of plain decoding after the same prompts.

    costs: of a cascade, see costs_of; else None.
    """
    # A baseline has no tau, and no draft.
    total = sum_of(records) if arm.tree else Counter()
    step = plain_step(plain)
    row = {**acceptance(total), **time_of_rounds(total, step)}
    # c = s_d / s_t: one drafter forward, without what begin() takes, over one plain decoding step.
    drafting = ratio(total["draft"] - total["begin"], total["draft_forwards"])
    # Several stages of a cascade differ in c.
    has_one_stage = not arm.cascade or len(arm.cascade.draft_list) == 1
    row["c"] = ratio(drafting, step) if has_one_stage else None
    gamma = gamma_of(arm)
    row["expected_speedup"] = None
    if row["alpha"] is not None and row["c"] and gamma:
        row["expected_speedup"] = expected_speedup(row["alpha"], row["c"], gamma)
    if arm.cascade:
        tokens = sum(len(record.tokens) for record in records)
        runs = runs_of(records)
        # Numbers of weights, each model's divided by the target's; Max-Gram, the last stage, has 0
        sizes = [1, *arm.cascade.sizes]
        sizes += [0.0] * (len(runs) - len(sizes))
        row["runs"] = runs
        # Table 2's "PW" takes c_i from previous work; here they are measured.
        row["swi_pw"] = swi(tokens, runs, costs)
        # In its "MS", c_i is the size of the model.
        row["swi_ms"] = swi(tokens, runs, sizes)
        # By the clock: all time of drafting, in plain decoding steps.  A target's run counts 1.
        row["swi_clock"] = tokens / (runs[0] + total["draft"] / step)
    return row

def row_of(arm, results, prompts):
    """An arm on these prompts, beside plain decoding and generate() -> a line of the JSON.

    results: [{name of an arm: Record}], one for each prompt.
    """
    records = [found[arm.name] for found in results]
    plain = [found["plain"] for found in results]
    prompt_speedups = speedups(arm.name, "plain", results)
    low, middle, high = np.quantile(prompt_speedups, [0.25, 0.5, 0.75]).tolist()
    tokens = sum(len(record.tokens) for record in records)
    row = {
        "drafter": arm.drafter or arm.name,
        "tree": arm.tree,
        "baseline": arm.name == "plain",
        "settings": arm.settings,
        "prompts": len(prompts),
        "tokens": tokens,
        "tokens_per_second": tokens / sum(record.seconds for record in records),
        "speedup_low": low,
        "speedup": middle,
        "speedup_high": high,
        "speedup_vs_generate": median(speedups(arm.name, "generate()", results))}
    costs = None
    if arm.cascade:
        costs = costs_of(records, plain_step(plain))
        row |= {"stages": arm.cascade.names, "costs": costs, "K": arm.cascade.K}
    row |= metrics(arm, records, plain, costs)
    # The same figures for each prompt, as paired tests need them.  All turns of one chat belong to
    # one question.
    row["by_prompt"] = []
    for prompt, speedup, record, base in zip(prompts, prompt_speedups, records, plain):
        of_prompt = {"kind": prompt.kind, "question": prompt.question, "speedup": speedup}
        row["by_prompt"].append(of_prompt | metrics(arm, [record], [base], costs))
    return row

def has_same_noise(arm, results):
    """Whether an arm must give the tokens of plain decoding when both sample.

    Trees must: they share its noise, which (seed, position) decides.  Sampled chains and
    transformers' own arms share only its distribution.
    """
    drawn = any(found[arm.name].total["drawn"] for found in results)
    return arm.name == "plain" or (bool(arm.tree) and not drawn)

def losslessness(arm, which, results, prompts, target):
    """Are all tokens those of plain decoding, and where is the first that is not?

    which: the numbers of the prompts.
    """
    for i in which:
        ours, plain = results[i][arm.name].tokens, results[i]["plain"].tokens
        if ours != plain:
            where = divergence(target, prompts[i].ids, ours, plain)
            return {"lossless": False, "first_divergence": {"prompt": i, **where}}
    return {"lossless": True}

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
        logits, _ = target.prefill(ids)                             # (V,)
        if at:
            logits, _ = target.align(target.ids + plain[:at])        # (1, V)
        logits = logits.flatten()
        gap = (logits[plain[at]] - logits[ours[at]]).item()
    return {"token": at, "logit_gap": gap}

# ---------------------------------------------------------------- the tables
def about_run(a, setup, argv):
    """What all rows of a run share."""
    is_folder = Path(a.target).is_dir()
    return {
        "command": shlex.join(["python", "bench.py", *argv]),
        "target": os.path.relpath(a.target) if is_folder else a.target,
        "dtype": str(setup.model.dtype).removeprefix("torch."),
        "device": a.device,
        "temperature": a.temperature,
        "max_new_tokens": a.max_new_tokens,
        **report.provenance(setup.target.device)}

def tables(arms, prompts, table, target):
    """Print a table of all prompts, then one for each kind -> rows, those of all prompts first."""
    results = table.results
    finished = prompts[:len(results)]
    kinds = {}
    for i, prompt in enumerate(finished):
        kinds.setdefault(prompt.kind, []).append(i)
    groups = {"all": range(len(finished))}
    if len(kinds) > 1:                                   # one kind alone has the same table
        groups |= kinds
    names = [arm.name for arm in arms]
    rows = []
    for group, which in groups.items():
        group_rows = []
        for arm in arms:
            row = row_of(arm, [results[i] for i in which], [prompts[i] for i in which])
            greedy = table.about["temperature"] == 0
            if greedy or has_same_noise(arm, results):
                row |= losslessness(arm, which, results, prompts, target)
            of_arm = {"group": group, "prices": table.prices.get(arm.drafter), "lossless": None}
            group_rows.append(table.about | of_arm | row)
        print(report.section(group, names, group_rows, table.prices))
        rows += group_rows
    return rows

@program
def main(argv):
    """From arguments to the table -> exit status: 0; 2 after a mistake; 130 after Ctrl-C."""
    a = parser().parse_args(argv)
    drafter_calls, trees = check(a)
    if a.threads:
        torch.set_num_threads(a.threads)
    setup = load.Setup(a.target, a.checkpoint, a.dtype, a.device, a.revision, a.trust_remote_code,
                       a.graphs)
    check_target(a.target, setup.target, drafter_calls, trees)
    drafters = {call.label: setup.drafter(call) for call in drafter_calls}
    limit = a.limit or (None if a.prompts else FEW)
    prompts = read_prompts(a, setup, a.prompts or [PROMPTS], limit)
    table = report.Unfinished(a.json, about_run(a, setup, argv))
    print(report.headline(table.about, len(prompts)), flush=True)
    if table.prices is None:                             # an interrupted table brings its own
        table.begin(measured_prices(a, setup, drafters, trees, prompts))
    arms = arms_of(a, setup, drafters, trees, table.prices)
    for note in setup.notes:
        print(note)
    if a.show:
        for arm in arms:
            if arm.tree:
                report.show(arm, prompts[0], setup.tokenizer)
    measure_all(arms, prompts, table, a.graphs)
    if not table.results:
        raise KeyboardInterrupt                          # there is nothing to report
    rows = tables(arms, prompts, table, setup.target)
    is_whole = len(table.results) == len(prompts)
    table.finish(rows, is_whole)
    if is_whole:
        return 0
    print(f"interrupted: the table has {len(table.results)} of {len(prompts)} prompts",
          file=sys.stderr)
    return 130

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
