"""How is a speedup measured?  Any target, drafter and tree, beside plain decoding.

    python bench.py --drafter glide --tree cape
    python bench.py --drafter "cascade(base, small, maxgram, k=(8, 13, 1))" --tree chain
    python bench.py --drafter edd "mixture(edd, maxgram)" --tree "pct(width=7, leaf=0)" pct-cost
    python bench.py --target Qwen/Qwen2.5-7B-Instruct --tree chain --dtype auto \
        --drafter "cascade(Qwen/Qwen2.5-0.5B-Instruct, maxgram)" --prompts mt_bench.jsonl

A method is one way of decoding: plain decoding, transformers' own generate(), or a drafter with a
tree.  Every prompt is decoded by all methods, and each of them gets a row of the table:

    tok/s      new tokens per second, over all prompts, prefill included
    speedup    tok/s over plain decoding's tok/s [that of the slowest and of the fastest prompt]
    tau        new tokens per round, the target's own included
    lossless   whether every token is that of plain decoding; -: sampled with other noise

Below it stands what a round takes: draft (with the reading of committed tokens), verify, other.
alpha of a chain is accepted over tested drafted tokens, here greedily, in GLIDE's paper by
sampling; EDD's alpha is another one (alpha_depth in figures/columns.py).

Three rules keep the table honest:

 1. The baseline is plain decoding by the same target, cache, dtype and loop, one token per forward.
    transformers' generate() is timed, too: if our loop were slow, it would show there.
 2. The methods decode a prompt one after the other, in an order that is random in each prompt,
    and the same in each run.
 3. Outputs are compared with the baseline's token for token.

decode() puts clocks around a target and a drafter, measure() is the loop, row_of() computes a row.
They know no command line, so for two language models of your own a few lines do:

    from functools import partial
    import cascade, verify
    from bench import Method, Prompt, decode, measure, row_of
    target = verify.Target(large)
    draft = cascade.Cascade([verify.Target(small)], K=[[5]])           # five tokens a round
    methods = [Method("plain", partial(decode, target, None, verify.root_only)),
               Method("cascade", partial(decode, target, draft, draft.chain))]
    results = measure(methods, [Prompt("", 0, ids, 128) for ids in prompts])
    print(row_of(methods[1], results))

On the command line a drafter or a tree is named as its function would be called: the drafters'
functions are in runtime/load.py, the trees' are listed in TREES.  With --json FILE every finished
prompt is written there at once, and the same command goes on after an interruption.
"""
import argparse
import json
import os
import random
import shlex
import sys
import time
from collections import Counter, namedtuple
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import cape
import glide
import pct
import verify
from beyond import batch, batch_glide, graft, priced
from cascade import Cascade
from runtime import load
from runtime.calls import read_call
from runtime.errors import UserError
from runtime.program import program
from runtime.prompts import Prompt, read_prompts
from runtime.provenance import provenance

TREES = {"chain": cape.chain, "drawn": cape.drawn, "cape": cape.cape, "fixed": cape.fixed,
         "beam": cape.beam, "pct": pct.pct, "vct": pct.vct, "eagle2": pct.eagle2,
         "token-confidence": pct.token_confidence, "pct-cost": priced.PctCost,
         "graft": graft.Graft}
CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
PROMPTS = CHECKPOINTS / "prompts.jsonl"
FEW = 9                         # prompts of PROMPTS: a minute or less
WARM_UP = 16                    # tokens that each method decodes before anything is measured

# ---------------------------------------------------------------- the clock
class Clock:
    """Seconds of one decoding, by what they were spent on.

    A GPU works on after a call has returned.  There the marks are CUDA events, which are read when
    the decoding is over.
    """
    def __init__(self, what, cuda=False):
        """what: what the time before the first switch() counts as."""
        self.cuda = cuda
        self.marks = []                                  # (what begins, when)
        self.calls = Counter()
        self.switch(what)

    def switch(self, what):
        """From now on time counts as `what`."""
        if self.cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self.marks.append((what, now))
        self.what = what

    def timed(self, function, what):
        """The same function.  Its time counts as `what`, except that of timed calls within it."""
        def call(*args, **more):
            before = self.what
            self.calls[what] += 1
            self.switch(what)
            result = function(*args, **more)
            self.switch(before)
            return result
        return call

    def seconds(self):
        """Stop the clock -> {what: seconds}"""
        self.switch(None)
        if self.cuda:
            self.marks[-1][1].synchronize()
        seconds = Counter()
        for (what, start), (_, end) in zip(self.marks, self.marks[1:]):
            if self.cuda:
                seconds[what] += start.elapsed_time(end) / 1000
            else:
                seconds[what] += end - start
        return dict(seconds)

class Timed:
    """A target or a drafter, some of whose methods are timed.  Everything else is its own."""

    def __init__(self, inner, clock, **methods):
        """methods: {name of a method: what its time counts as}"""
        self.inner = inner
        for name, what in methods.items():
            setattr(self, name, clock.timed(getattr(inner, name), what))

    def __getattr__(self, name):
        return getattr(self.inner, name)

# ---------------------------------------------------------------- one decoding
# What one decoding gave and took.  JSON holds it as four lists and dicts.
#   tokens    the new token ids, those of the prefill and of all rounds
#   rounds    [verify.Round], without the prefill's
#   seconds   {part: seconds}: prefill; begin, the drafter's reading of committed tokens; draft, its
#             forwards; verify, the target's forwards; other, all else: building trees, accepting,
#             committing.  generate() has one part, "generate()".
#   calls     {part: how many calls}
Record = namedtuple("Record", "tokens rounds seconds calls")

def decode(target, drafter, build, ids, new_tokens, rule=verify.Rule(), eos=()):
    """Decode as verify.generate does, timed -> Record.

    drafter None and build verify.root_only: plain decoding.
    """
    clock = Clock("prefill", target.device.type == "cuda")
    if drafter is not None:
        if getattr(build, "__self__", None) is drafter:
            build = clock.timed(build, "draft")          # a cascade writes its chain itself
        drafter = Timed(drafter, clock, begin="begin", expand="draft")
    # The prefill calls the inner target's forward, which has no clock: it is no "verify".
    target = Timed(target, clock, forward="verify")
    rounds = []
    for one in verify.rounds(target, drafter, build, ids, new_tokens, rule, eos):
        if not rounds:
            clock.switch("other")                        # the prefill is over
        rounds.append(one)
    out = verify.output_of(rounds)
    return Record(out.tokens, out.rounds, clock.seconds(), dict(clock.calls))

def library(model, temperature, ids, new_tokens, rule, **more):
    """Decode by transformers' own generate(), whose further arguments are `more` -> Record."""
    prompt = Prompt("", 0, ids, new_tokens)
    [record] = library_rows(model, temperature, [prompt], [rule], **more)
    return record

# ---------------------------------------------------------------- several sequences: --batch
def decode_rows(target, drafter, build, prompts, rules, eos=()):
    """Decode several prompts at once, by beyond/batch.py -> a Record for each.

    Each has its share of the seconds, so that tokens / seconds is the speed of all rows together.
    """
    clock = Clock("prefill", target.device.type == "cuda")
    B = len(prompts)
    begins_with_a_chain = getattr(build, "func", None) in (cape.chain, cape.cape)
    if isinstance(drafter, glide.Drafter) and begins_with_a_chain:
        drafters, builds = batch_glide.BatchGlide(drafter), build
        drafters.draft = clock.timed(drafters.draft, "draft")
    else:
        pairs = batch.copies([drafter, build], B)
        builds = [own for _, own in pairs]
        drafters = [own for own, _ in pairs]
        if drafter is not None:
            drafters = [Timed(own, clock, begin="begin", expand="draft") for own in drafters]
    rounds = [[] for _ in prompts]
    timed = Timed(target, clock, model="verify")
    for done in batch.rounds(timed, drafters, builds, [prompt.ids for prompt in prompts],
                             [prompt.limit for prompt in prompts], rules, eos):
        clock.switch("other")                            # at the first time the prefill is over
        for row, one in done.items():
            rounds[row].append(one)
    seconds = {part: share / B for part, share in clock.seconds().items()}
    outputs = map(verify.output_of, rounds)
    return [Record(out.tokens, out.rounds, seconds, calls={}) for out in outputs]

def library_rows(model, temperature, prompts, rules, eos=(), **more):
    """As `library`, several prompts at once -> a Record for each."""
    torch.manual_seed(rules[0].seed)
    longest = max(len(prompt.ids) for prompt in prompts)
    padding = [longest - len(prompt.ids) for prompt in prompts]
    ids = [[0] * n + prompt.ids for n, prompt in zip(padding, prompts)]
    given = torch.tensor(ids, device=model.device)
    mask = torch.ones_like(given)
    for row, n in enumerate(padding):
        mask[row, :n] = 0
    start = time.perf_counter()
    # With top_k=0 the library samples among all tokens; its default is 50.
    with torch.inference_mode():
        out = model.generate(given, attention_mask=mask, do_sample=temperature > 0, top_k=0,
                             max_new_tokens=max(prompt.limit for prompt in prompts),
                             temperature=temperature or 1.0, **more)
    # A decoder-only model returns the prompt, too; an encoder-decoder model its start token.
    first = 1 if model.config.is_encoder_decoder else longest
    rows = out[:, first:].tolist()                       # a device-to-host sync
    seconds = (time.perf_counter() - start) / len(prompts)
    ends = {eos} if isinstance(eos, int) else set(eos)
    return [Record(verify.until_end(row[:prompt.limit], ends), [], {"generate()": seconds}, {})
            for row, prompt in zip(rows, prompts)]

# ---------------------------------------------------------------- methods
# name: as the table has it.  decode: decode(ids, new_tokens, rule) -> Record; with --batch
# decode(prompts, rules) -> a Record for each.  drafter, tree: their labels, None for a baseline.
# pair: the drafter itself and its builder
Method = namedtuple("Method", "name decode drafter tree pair", defaults=(None, None, None))

def builder(drafter, tree):
    """The builder that --tree names, a calls.Call, for a drafter.  ValueError where it has none."""
    is_cascade = isinstance(drafter, Cascade)
    if is_cascade and tree.name in ("chain", "drawn"):
        return getattr(drafter, tree.name)               # by the cascade itself
    if is_cascade and not drafter.models and tree.name in ("pct-cost", "graft"):
        # Max-Gram alone drafts without a forward: what is priced are the nodes of its chain.
        return priced.PricedChain(drafter.gram, **tree.settings)
    if tree.name == "graft":
        if not isinstance(drafter, graft.Mixture):
            raise ValueError("graft takes a mixture(...), or maxgram, whose chain it prices")
        return graft.Graft(drafter, **tree.settings)
    if tree.name == "pct-cost":
        return priced.PctCost(**tree.settings)
    return partial(tree.function, **tree.settings)

def methods_of(loaded, drafters, trees, temperature, rows=1):
    """All methods, in the table's order: plain decoding, generate(), drafters x trees.

    loaded: a load.Loaded.  drafters, trees: lists of calls.Call.  rows: of --batch.
    """
    target, eos = loaded.target, loaded.eos
    ours, theirs = decode, partial(library, loaded.model, temperature)
    if rows > 1:
        ours = decode_rows
        theirs = partial(library_rows, loaded.model, temperature, eos=eos, pad_token_id=0)
    methods = [Method("plain", partial(ours, target, None, verify.root_only, eos=eos)),
               Method("generate()", theirs)]
    for call in drafters:
        drafter = loaded.drafter(call)
        for tree in trees:
            name = f"{call.label} x {tree.label}"
            try:
                build = builder(drafter, tree)
            except (TypeError, ValueError) as why:       # a setting that such a tree does not take
                loaded.notes.append(f"no {name}: {why}")
                continue
            speculative = partial(ours, target, drafter, build, eos=eos)
            methods.append(Method(name, speculative, call.label, tree.label, (drafter, build)))
    if len(methods) == 2:
        raise UserError(loaded.notes[-1])
    return methods

# ---------------------------------------------------------------- measure
def rule_of(temperature, seed, number):
    """The rule of a prompt: each has noise of its own, which all methods share."""
    return verify.Rule(temperature, seed=random.Random(f"{seed} {number}").getrandbits(63))

def warm_up(methods, prompts, temperature, rows=1):
    """Decode without measuring, so that kernels, allocator and caches settle."""
    for prompt in prompts:
        for method in methods:
            try:
                decode_group(method, [prompt] * rows, [rule_of(temperature, 0, 0)] * rows)
            except ValueError as why:                    # a setting of --tree
                raise UserError(f"{method.name}: {why}") from why

def decode_group(method, group, rules):
    """Decode a group of Prompts, one or --batch many -> a Record for each."""
    if len(group) > 1:
        return method.decode(group, rules)
    [prompt] = group
    return [method.decode(prompt.ids, prompt.limit, *rules)]

def measure(methods, prompts, temperature=0.0, seed=0, done=(), finished=None, rows=1):
    """Decode every prompt by every method -> [{name of a method: Record}], one for each prompt.

    methods: one of them is named "plain".  prompts: runtime/prompts.py's, of which `ids` and
    `limit` are used.  done: what was measured before, of the first prompts.  finished(number,
    {name: Record}) is called after each prompt.  rows: how many are decoded at once; prompts that
    do not fill the last batch are left out.  After Ctrl-C the list is shorter.
    """
    results = list(done)
    bar = tqdm(total=len(prompts) * len(methods), initial=len(results) * len(methods),
               unit="run", disable=None)
    try:
        for first in range(len(results), len(prompts) - rows + 1, rows):
            numbers = range(first, first + rows)
            rules = [rule_of(temperature, seed, number) for number in numbers]
            record_of = {number: {} for number in numbers}
            # A method leaves traces, caches and a clock speed, for the next one.
            for method in random.Random(first).sample(methods, len(methods)):
                records = decode_group(method, prompts[first:first + rows], rules)
                for number, record in zip(numbers, records):
                    record_of[number][method.name] = record
                bar.update(rows)
            results += record_of.values()
            if finished:
                for number in numbers:
                    finished(number, record_of[number])
    except KeyboardInterrupt:
        pass
    bar.close()
    return results

# ---------------------------------------------------------------- a row
def counts(rounds):
    """Sums over rounds -> Counter: rounds, new (tokens), nodes (drafted tokens), siblings (rounds
    whose tree is no chain), accepted, and tested.

    Of a drafted chain a b c the target chooses a, then d: accepted 1, and tested 2, a and b.
    """
    total = Counter()
    for one in rounds:
        drafted = len(one.tokens) - 1
        # Where the text ended within the path, nothing after its end was tested.
        accepted = min(len(one.path) - 1, len(one.new))
        rejected = accepted < len(one.new) and accepted < drafted
        siblings = one.parents != list(range(-1, drafted))
        total.update(rounds=1, new=len(one.new), nodes=drafted, siblings=siblings,
                     accepted=accepted, tested=accepted + rejected)
    return total

def speed(records):
    """Tokens per second of some Records, prefill included."""
    seconds = sum(sum(record.seconds.values()) for record in records)
    return sum(len(record.tokens) for record in records) / seconds

def plain_step(records):
    """Milliseconds of a step of plain decoding, without the prefill, from its Records."""
    steps = sum(len(record.rounds) for record in records)
    seconds = sum(sum(record.seconds.values()) - record.seconds["prefill"] for record in records)
    return 1e3 * seconds / max(1, steps)

def row_of(method, results):
    """A method's figures -> dict.  results: as of measure(), of the prompts in question."""
    records = [found[method.name] for found in results]
    plain = [found["plain"] for found in results]
    of_prompts = [speed([one]) / speed([base]) for one, base in zip(records, plain)]
    row = {
        "drafter": method.drafter or method.name,
        "tree": method.tree,
        "prompts": len(records),
        "tokens": sum(len(record.tokens) for record in records),
        "tokens_per_second": speed(records),
        "speedup": speed(records) / speed(plain),
        "speedup_least": min(of_prompts),
        "speedup_most": max(of_prompts),
        "plain_ms": plain_step(plain)}
    total = counts(one for record in records for one in record.rounds)
    rounds = total["rounds"]
    if method.name == "plain" or not rounds:             # a baseline drafts nothing
        return row
    seconds = Counter()
    for record in records:
        seconds.update(record.seconds)
    row |= {
        "tau": total["new"] / rounds,
        "nodes": total["nodes"] / rounds,
        "draft_ms": 1e3 * (seconds["begin"] + seconds["draft"]) / rounds,
        "verify_ms": 1e3 * seconds["verify"] / rounds,
        "other_ms": 1e3 * seconds["other"] / rounds}
    # Several siblings can be drafted where one is accepted: a tree has no such alpha.
    if total["tested"] and not total["siblings"]:
        row["alpha"] = total["accepted"] / total["tested"]
    return row

# ---------------------------------------------------------------- the same tokens?
def losslessness(method, results, prompts, target, temperature=0.0):
    """{"lossless": bool or None}, and where it is False the first token that differs.

    None: a sampled chain and a sampling generate() share plain decoding's distribution alone; a
    tree shares its noise, too.  prompts: of measure().  logit_gap: the target's logit of plain
    decoding's token minus that of ours, where both outputs have a token.  In half precision a gap
    near zero is rounding.
    """
    is_sampled_chain = (method.tree or "").startswith("drawn")
    if temperature > 0 and (method.name == "generate()" or is_sampled_chain):
        return {"lossless": None}
    for number, (found, prompt) in enumerate(zip(results, prompts)):
        ours, plain = found[method.name].tokens, found["plain"].tokens
        if ours == plain:
            continue
        same = graft.common_prefix(ours, plain)
        gap = None
        if same < min(len(ours), len(plain)):
            with torch.inference_mode():
                logits, _ = target.prefill(prompt.ids)                           # (V,)
                if same:
                    logits, _ = target.align(target.ids + plain[:same])          # (1, V)
            logits = logits.flatten()
            gap = (logits[plain[same]] - logits[ours[same]]).item()
        where = {"prompt": number, "token": same, "logit_gap": gap}
        return {"lossless": False, "first_divergence": where}
    return {"lossless": True}

# ---------------------------------------------------------------- the table, the file
def print_table(names, rows):
    """Print the rows of methods by these names, and below them where a round's time goes.

    rows: of row_of, with losslessness(); plain decoding's is the first.
    """
    width = max(map(len, names))
    print(f"{'':{width}}  {'tok/s':>7}  {'speedup':>19}  {'tau':>5}  lossless")
    for name, row in zip(names, rows):
        speedup = f"{row['speedup']:.2f}x"
        if name != "plain":
            speedup += f" [{row['speedup_least']:.2f}-{row['speedup_most']:.2f}]"
        tau = f"{row['tau']:.2f}" if "tau" in row else "-"
        lossless = {True: "yes", False: "NO", None: "-"}[row["lossless"]]
        print(f"{name:{width}}  {row['tokens_per_second']:7.1f}  {speedup:>19}  {tau:>5}  "
              f"{lossless:>8}")
    print(f"\nA plain step takes {rows[0]['plain_ms']:.1f} ms.")
    for name, row in zip(names, rows):
        if "tau" in row:
            parts = {part: row[f"{part}_ms"] for part in ("draft", "verify", "other")}
            total = sum(parts.values())
            shares = ", ".join(f"{part} {ms / total:.0%}" for part, ms in parts.items())
            alpha = f"; alpha {row['alpha']:.3f}" if "alpha" in row else ""
            print(f"A round of {name} takes {total:.1f} ms: {shares}{alpha}.")
        if "first_divergence" in row:
            print(f"{name} is not lossless: {row['first_divergence']}")

def resume(path, about):
    """The finished prompts in the file of --json -> [{name of a method: Record}]

    They stay there.  The rows, which are written anew, and a line that a kill has cut are removed.
    """
    if not path or not Path(path).exists():
        return []
    *lines, _ = Path(path).read_text().split("\n")       # after the last \n: nothing, or a cut line
    results, kept = [], []
    for line in lines:
        found = json.loads(line)
        if any(found.get(key) != about[key] for key in ("command", "commit", "machine")):
            raise UserError(f"--json {path} holds what another command, commit or machine gave: "
                            "delete it, or name another file")
        if "records" in found:
            record_of = {}
            for name, (tokens, rounds, *more) in found["records"].items():
                record_of[name] = Record(tokens, [verify.Round(*one) for one in rounds], *more)
            results.append(record_of)
            kept.append(line + "\n")
    Path(path).write_text("".join(kept))
    return results

# ---------------------------------------------------------------- a continuation as it is made
def show(method, prompt, rule, loaded):
    """Print a method's continuation round by round, accepted tokens in [brackets] or in colour."""
    form = "\033[32m{}\033[0m" if sys.stdout.isatty() else "[{}]"
    print(f"\n--- {method.name}, {prompt.kind}: {form.format('accepted')}bonus")
    seen, ids, written = [], [], ""
    for one in verify.rounds(loaded.target, *method.pair, prompt.ids, prompt.limit, rule,
                             loaded.eos):
        seen.append(one)
        accepted = len(one.path[1:])
        for tokens, style in ((one.new[:accepted], form), (one.new[accepted:], "{}")):
            ids += tokens
            # Incomplete UTF-8 is held back.
            whole = loaded.tokenizer.decode(ids).rstrip("\ufffd")
            new, written = whole[len(written):], whole
            print(style.format(new) if new else "", end="", flush=True)
    out = verify.output_of(seen)
    print(f"\n--- {len(ids)} tokens in {len(out.rounds)} rounds, tau {out.tau:.2f}")

# ---------------------------------------------------------------- the command
def parser():
    p = argparse.ArgumentParser(description="Decode with a target, any drafters and trees, and "
                                "without them.")
    flag = p.add_argument
    flag("--target", default=str(CHECKPOINTS / "target"), help="folder or hub name")
    flag("--drafter", nargs="+", default=["glide"], help='such as "glide(temperature=1)", maxgram')
    flag("--tree", nargs="+", default=["cape"], help=f'{" ".join(TREES)}, or "pct(width=7)"')
    flag("--checkpoint", default=str(CHECKPOINTS), help="folder of the drafters, or of one")
    flag("--prompts", nargs="+", help="files of prompts (default: the project's own)")
    flag("--limit", type=int, help=f"maximum number of prompts (default: {FEW} of our own)")
    flag("--template", help="chat template: plain, question, vicuna, or a Jinja file")
    flag("--template-args", help="JSON for the template, as '{\"enable_thinking\": false}'")
    flag("--max-new-tokens", type=int, default=128, help="for each prompt")
    flag("--temperature", type=float, default=0.0, help="of sampling; 0 is greedy")
    flag("--seed", type=int, default=0, help="of sampling")
    flag("--dtype", default="float32", help="float32, float16, bfloat16, float64, or auto")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu",
         help="cpu, cuda, cuda:1, or auto: spread over all by accelerate")
    flag("--graphs", action="store_true", help="static shapes and CUDA graphs")
    flag("--trust-remote-code", action="store_true", help="run code that hub models bring")
    flag("--batch", type=int, default=1, help="number of prompts decoded at once")
    flag("--json", metavar="FILE", help="write finished prompts and the rows to this file")
    flag("--show", action="store_true", help="print a continuation as it is made")
    return p

@program
def main(argv):
    """From arguments to the table -> exit status: 0; 2 after a mistake; 130 after Ctrl-C."""
    a = parser().parse_args(argv)
    drafters = load.drafter_calls(a.drafter, a.checkpoint)
    trees = [read_call(tree, TREES, "tree") for tree in a.tree]
    if a.temperature < 0:
        raise UserError(f"--temperature {a.temperature:g}: give 0, which is greedy, or more")
    if a.temperature == 0 and any(tree.name == "drawn" for tree in trees):
        raise UserError("--tree drawn samples its chain: give --temperature 1, or --tree chain")
    if a.json and not Path(a.json).absolute().parent.is_dir():
        raise UserError(f"--json {a.json}: its folder does not exist")
    loaded = load.Loaded(a.target, a.checkpoint, a.dtype, a.device, a.trust_remote_code, a.graphs)
    methods = methods_of(loaded, drafters, trees, a.temperature, a.batch)
    limit = a.limit or (None if a.prompts else FEW)
    prompts = read_prompts(a.prompts or [PROMPTS], loaded, a.max_new_tokens, limit, a.template,
                           a.template_args)
    prompts = prompts[:len(prompts) // a.batch * a.batch]
    if not prompts:
        raise UserError(f"--batch {a.batch}: there are fewer prompts: add some or lower it")
    about = {
        "command": shlex.join(["python", "bench.py", *argv]),
        "target": os.path.relpath(a.target) if Path(a.target).is_dir() else a.target,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": a.device,
        "temperature": a.temperature,
        "max_new_tokens": a.max_new_tokens,
        **provenance(loaded.target.device)}
    results = resume(a.json, about)
    print(f"target {about['target']}, {about['dtype']}, {a.device}, {len(prompts)} prompts of up "
          f"to {a.max_new_tokens} new tokens", *loaded.notes, sep="\n", end="\n\n", flush=True)

    def write(line):
        if a.json:
            with open(a.json, "a") as file:
                file.write(json.dumps(about | line) + "\n")

    def finished(number, record_of):
        prompt = prompts[number]
        write({"prompt": number, "kind": prompt.kind, "question": prompt.question,
               "records": record_of})

    if len(results) < len(prompts):
        # A graph is recorded at the first use of its size, so with graphs every prompt is decoded.
        kind, question, ids, limit = prompts[0]
        first = Prompt(kind, question, ids, min(WARM_UP, limit))
        warm_up(methods, prompts if a.graphs else [first], a.temperature, a.batch)
    if a.show:
        rule = rule_of(a.temperature, a.seed, 0)
        for method in methods[2:]:
            show(method, prompts[0], rule, loaded)
    results = measure(methods, prompts, a.temperature, a.seed, results, finished, a.batch)
    if not results:
        raise KeyboardInterrupt                          # there is nothing to report
    rows = [row_of(method, results)
            | losslessness(method, results, prompts, loaded.target, a.temperature)
            for method in methods]
    print_table([method.name for method in methods], rows)
    if len(results) < len(prompts):
        print(f"interrupted after {len(results)} prompts of {len(prompts)}", file=sys.stderr)
        return 130
    for row in rows:
        write(row)
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
