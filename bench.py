"""How is a speedup measured?  Any target, drafter and tree, beside plain decoding.

    python bench.py --drafter glide --tree cape
    python bench.py --drafter edd "mixture(edd, maxgram)" --tree "pct(width=7, leaf=0)" pct-cost
    python bench.py --target Qwen/Qwen2.5-7B-Instruct --tree chain --dtype auto \
        --drafter "cascade(Qwen/Qwen2.5-0.5B-Instruct, maxgram)" --prompts mt_bench.jsonl

Every prompt is decoded by all methods: plain decoding, transformers' own generate(), each drafter
with each tree.  A method gets a row of the table:

    tok/s      new tokens per second, over all prompts, prefill included
    speedup    tok/s over plain decoding's tok/s [that of the slowest and of the fastest prompt]
    tau        new tokens per round, the target's own included
    lossless   whether every token is that of plain decoding; -: sampled with other noise

Below it stands what a round takes: draft (with the reading of committed tokens), verify, other; of
a chain also alpha, accepted over tested drafted tokens.

What keeps the table honest:

 1. The baseline is plain decoding by the same target, cache, dtype and loop, one token per forward.
    transformers' generate() is timed, too: if our loop were slow, it would show there.
 2. The methods decode a prompt one after the other, in an order that is random for each prompt,
    and the same in each run.
 3. Outputs are compared with the baseline's token for token.

decode() puts clocks around a target and a drafter, measure() is the loop, row_of() computes a row.
They know no command line, so for two language models of your own a few lines do:

    from functools import partial
    import cascade, verify
    from bench import Method, decode, measure, row_of
    from runtime.chats import Prompt
    target = verify.Target(large)
    draft = cascade.Cascade([verify.Target(small)], K=[[5]])           # five tokens a round
    methods = [Method("plain", partial(decode, target, None, verify.root_only)),
               Method("cascade", partial(decode, target, draft, draft.chain))]
    results = list(measure(methods, [Prompt("", 0, ids, 128) for ids in prompts]))
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
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import cape
import glide
import pct
import verify
from beyond import batch, batch_glide, graft, priced
from cascade import Cascade
from runtime import load
from runtime.calls import read_call
from runtime.chats import read_prompts
from runtime.program import UserError, at_least, program
from runtime.provenance import provenance

TREES = {"chain": cape.chain, "drawn": cape.drawn, "cape": cape.cape, "fixed": cape.fixed,
         "beam": cape.beam, "pct": pct.pct, "vct": pct.vct, "eagle2": pct.eagle2,
         "token-confidence": pct.token_confidence, "pct-cost": priced.PctCost,
         "graft": priced.PctCost}        # whose settings graft.Graft takes
PROMPTS = load.CHECKPOINTS / "prompts.jsonl"
FEW = 9                         # prompts of PROMPTS: a minute or less

# ---------------------------------------------------------------- the clock
class Clock:
    """Seconds of one decoding, by what they were spent on.

    A GPU works on after a call has returned: there the marks are CUDA events, read at the end.
    """
    def __init__(self, what, cuda=False):
        """what: what the time before the first switch() counts as."""
        self.cuda = cuda
        self.marks = []                                  # (what begins, when)
        self.switch(what)

    def switch(self, what):
        """From now on time counts as `what`."""
        now = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            now.record()
        self.marks.append((what, now))
        self.what = what

    def timed(self, function, what):
        """The same function.  Its time counts as `what`, except that of timed calls within it."""
        def call(*args, **more):
            before = self.what
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
            seconds[what] += start.elapsed_time(end) / 1000 if self.cuda else end - start
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
# What one decoding gave and took
#   tokens    the new token ids, those of the prefill and of all rounds
#   rounds    [verify.Round], without the prefill's
#   seconds   {part: seconds}: prefill; begin, the drafter's reading of committed tokens; draft, its
#             forwards; verify, the target's forwards; other, all else: building trees, accepting,
#             committing.  generate() has one part, "generate()".
Record = namedtuple("Record", "tokens rounds seconds")

def decode(target, drafter, build, prompts, rules, eos=()):
    """Decode one prompt by verify.rounds, or several at once by beyond/batch.py -> [Record]

    drafter None and build verify.root_only: plain decoding.  rules: one for each prompt.
    Several prompts share the seconds, so that tokens / seconds is the speed of all together.
    """
    clock = Clock("prefill", target.device.type == "cuda")
    # The prefill is no "verify": it calls the inner target's own forward, which has no clock.
    # beyond/batch.py calls target.model itself.
    timed = Timed(target, clock, forward="verify", model="verify")
    if len(prompts) == 1:
        [prompt], [rule] = prompts, rules
        drafter, build = timed_pair(drafter, build, clock)
        single = verify.rounds(timed, drafter, build, prompt.ids, prompt.limit, rule, eos)
        steps = ({0: one} for one in single)
    else:
        drafters, builds = timed_rows(drafter, build, clock, len(prompts))
        steps = batch.rounds(timed, drafters, builds, [prompt.ids for prompt in prompts],
                             [prompt.limit for prompt in prompts], rules, eos)
    rounds = [[] for _ in prompts]
    for done in steps:
        clock.switch("other")                            # at the first time the prefill is over
        for number, one in done.items():
            rounds[number].append(one)
    seconds = {part: share / len(prompts) for part, share in clock.seconds().items()}
    outputs = map(verify.output_of, rounds)
    return [Record(out.tokens, out.rounds, seconds) for out in outputs]

def timed_pair(drafter, build, clock):
    """Put clocks into a drafter and its builder -> both"""
    if drafter is None:
        return drafter, build
    if getattr(build, "__self__", None) is drafter:
        build = clock.timed(build, "draft")              # a cascade writes its chain itself
    return Timed(drafter, clock, begin="begin", expand="draft"), build

def timed_rows(drafter, build, clock, count):
    """The same for a batch of `count` rows -> drafters and builders, as batch.rounds takes them"""
    begins_with_a_chain = getattr(build, "func", None) in (cape.chain, cape.cape)
    if isinstance(drafter, glide.Drafter) and begins_with_a_chain:
        together = batch_glide.BatchGlide(drafter, build.keywords.get("gamma", cape.GAMMA))
        together.draft = clock.timed(together.draft, "draft")
        return together, build
    pairs = [timed_pair(*pair, clock) for pair in batch.copies([drafter, build], count)]
    return [list(part) for part in zip(*pairs)]

def library(model, temperature, prompts, rules, **more):
    """Decode by transformers' own generate(), whose further arguments are `more` -> [Record]"""
    torch.manual_seed(rules[0].seed)
    texts = [torch.tensor(prompt.ids, device=model.device) for prompt in prompts]
    ids = pad_sequence(texts, batch_first=True, padding_side="left")                   # (B, n)
    mask = pad_sequence([torch.ones_like(text) for text in texts], True, padding_side="left")
    start = time.perf_counter()
    # With top_k=0 the library samples among all tokens; its default is 50.
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, do_sample=temperature > 0, top_k=0,
                             max_new_tokens=max(prompt.limit for prompt in prompts),
                             temperature=temperature or 1.0, pad_token_id=0, **more)
    # A decoder-only model returns the prompt, too; an encoder-decoder model its start token.
    first = 1 if model.config.is_encoder_decoder else ids.shape[1]
    rows = out[:, first:].tolist()                       # a device-to-host sync
    seconds = {"generate()": (time.perf_counter() - start) / len(prompts)}
    eos = model.generation_config.eos_token_id
    ends = set(eos) if isinstance(eos, list) else {eos}
    return [Record(verify.until_end(row[:prompt.limit], ends), [], seconds)
            for row, prompt in zip(rows, prompts)]

# ---------------------------------------------------------------- methods
# name: as the table has it.  decode: decode(prompts, rules) -> a Record for each.  drafter, tree:
# their labels, None for a baseline.  pair: the drafter itself and its builder
Method = namedtuple("Method", "name decode drafter tree pair", defaults=(None, None, None))

def builder(drafter, tree):
    """The builder that --tree names, a calls.Call, for a drafter.  UserError where it has none."""
    if isinstance(drafter, Cascade):
        if tree.name in ("chain", "drawn"):
            return getattr(drafter, tree.name)           # by the cascade itself
        if tree.name == "pct-cost" and not drafter.models:
            # Max-Gram alone drafts without a forward: what is priced are the nodes of its chain.
            return priced.PricedChain(drafter.gram, **tree.settings)
        raise UserError("Max-Gram and cascades draft chains alone: add --tree chain")
    if tree.name == "graft":
        if not isinstance(drafter, graft.Mixture):
            raise UserError('--tree graft takes a mixture, as "mixture(glide, maxgram)"')
        return graft.Graft(drafter, **tree.settings)
    if tree.name == "pct-cost":
        return priced.PctCost(**tree.settings)
    return partial(tree.function, **tree.settings)

def methods_of(loaded, drafters, trees, temperature):
    """All methods, in the table's order: plain decoding, generate(), drafters x trees.

    loaded: a load.Loaded.  drafters, trees: lists of calls.Call.
    """
    ours = partial(decode, loaded.target, eos=loaded.eos)
    methods = [Method("plain", partial(ours, None, verify.root_only)),
               Method("generate()", partial(library, loaded.model, temperature))]
    for call, tree in product(drafters, trees):
        name, drafter = f"{call.label} x {tree.label}", loaded.drafter(call)
        try:
            build = builder(drafter, tree)
        except (UserError, TypeError) as why:            # TypeError: a setting that it lacks
            loaded.notes.append(f"no {name}: {why}")
            continue
        if tree.name == "pct-cost" and not isinstance(drafter, Cascade):
            drafter = priced.OnDemand(drafter)
        methods.append(Method(name, partial(ours, drafter, build), call.label, tree.label,
                              (drafter, build)))
    if len(methods) == 2:
        raise UserError(loaded.notes[-1])
    return methods

# ---------------------------------------------------------------- measure
def rule_of(temperature, number):
    """The rule of a prompt: each has noise of its own, which all methods share."""
    return verify.Rule(temperature, seed=random.Random(f"0 {number}").getrandbits(63))

def measure(methods, prompts, temperature=0.0, done=0, rows=1, graphs=False):
    """Decode every prompt by every method: yield {name of a method: Record} for each prompt.

    methods: one of them is named "plain".  prompts: runtime/chats.py's, of which `ids` and
    `limit` are used.  done: how many of them were measured before.  rows: how many are decoded at
    once; the last ones may be fewer.  graphs: whether the methods record CUDA graphs.
    """
    # Kernels, allocator and caches settle in a decoding that is not measured.  A CUDA graph is
    # recorded at the first use of its size: with graphs every prompt is decoded before.
    warm_up = prompts[done:] if graphs else prompts[done:done + 1]
    for prompt in warm_up:
        for method in methods:
            try:
                method.decode([prompt] * rows, [rule_of(temperature, done)] * rows)
            except ValueError as why:                    # a setting of --tree
                raise UserError(f"{method.name}: {why}") from why
    for first in tqdm(range(done, len(prompts), rows), disable=None):
        group = prompts[first:first + rows]
        rules = [rule_of(temperature, first + row) for row in range(len(group))]
        records_of = {}
        # A method leaves traces, caches and a clock speed, for the next one.
        for method in random.Random(first).sample(methods, len(methods)):
            records_of[method.name] = method.decode(group, rules)
        for row in range(len(group)):
            yield {name: records[row] for name, records in records_of.items()}

# ---------------------------------------------------------------- a row; the same tokens?
def accepted_and_tested(one):
    """How many drafted tokens of a verify.Round were accepted, and how many tested.

    Of a drafted chain a b c the target chooses a, then d: accepted 1, and tested 2, a and b.
    """
    drafted = len(one.tokens) - 1
    # Where the text ended within the path, nothing after its end was tested.
    accepted = min(len(one.path) - 1, len(one.new))
    rejected = accepted < len(one.new) and accepted < drafted
    return accepted, accepted + rejected

def speed(records):
    """Tokens per second of some Records, prefill included."""
    seconds = sum(sum(record.seconds.values()) for record in records)
    return sum(len(record.tokens) for record in records) / seconds

def row_of(method, results):
    """A method's figures -> dict.  results: as of measure(), of the prompts in question."""
    records = [found[method.name] for found in results]
    plain = [found["plain"] for found in results]
    of_prompts = [speed([one]) / speed([base]) for one, base in zip(records, plain)]
    # A step of plain decoding, without the prefill
    steps = sum(len(record.rounds) for record in plain)
    stepping = sum(sum(one.seconds.values()) - one.seconds["prefill"] for one in plain)
    row = {
        "drafter": method.drafter or method.name,
        "tree": method.tree,
        "prompts": len(records),
        "tokens": sum(len(record.tokens) for record in records),
        "tokens_per_second": speed(records),
        "speedup": speed(records) / speed(plain),
        "speedup_least": min(of_prompts),
        "speedup_most": max(of_prompts),
        "plain_ms": 1e3 * stepping / max(1, steps)}
    rounds = [one for record in records for one in record.rounds]
    if method.name == "plain" or not rounds:             # a baseline drafts nothing
        return row
    seconds = Counter()
    for record in records:
        seconds.update(record.seconds)
    row |= {
        "tau": fmean(len(one.new) for one in rounds),
        "nodes": fmean(len(one.tokens) - 1 for one in rounds),
        "draft_ms": 1e3 * (seconds["begin"] + seconds["draft"]) / len(rounds),
        "verify_ms": 1e3 * seconds["verify"] / len(rounds),
        "other_ms": 1e3 * seconds["other"] / len(rounds)}
    counts = [accepted_and_tested(one) for one in rounds]
    accepted = sum(count for count, _ in counts)
    tested = sum(count for _, count in counts)
    # Several siblings can be drafted where one is accepted: a tree has no such alpha.
    if tested and all(one.parents == list(range(-1, len(one.parents) - 1)) for one in rounds):
        row["alpha"] = accepted / tested
    return row

def losslessness(method, results, prompts, target, temperature=0.0):
    """{"lossless": bool or None}, and where it is False the first token that differs.

    None: a sampled chain and a sampling generate() share plain decoding's distribution alone; a
    tree shares its noise, too.  logit_gap: the target's logit of plain decoding's token minus that
    of ours, where both outputs have one.  In half precision a gap near zero is rounding.
    """
    has_other_noise = method.tree is None or method.tree.startswith("drawn")
    if temperature > 0 and has_other_noise and method.name != "plain":
        return {"lossless": None}
    for number, (found, prompt) in enumerate(zip(results, prompts)):
        ours, plain = found[method.name].tokens, found["plain"].tokens
        if ours == plain:
            continue
        same = graft.common_prefix(ours, plain)
        gap = None
        if same < min(len(ours), len(plain)):
            with torch.inference_mode():
                target.prefill(prompt.ids)
                logits, _ = target.align(target.ids + plain[:same])              # (1, V)
            gap = (logits[0, plain[same]] - logits[0, ours[same]]).item()
        where = {"prompt": number, "token": same, "logit_gap": gap}
        return {"lossless": False, "first_divergence": where}
    return {"lossless": True}

# ---------------------------------------------------------------- the table, the file
def print_table(names, rows, batch=1):
    """Print the rows of methods by these names, and below them where a round's time goes.

    rows: of row_of, with losslessness(); plain decoding's is the first.  batch: of --batch.
    """
    each = " for each sequence" if batch > 1 else ""     # each has its share of the seconds
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
    print(f"\nA plain step takes {rows[0]['plain_ms']:.1f} ms{each}.")
    for name, row in zip(names, rows):
        if "tau" in row:
            parts = {part: row[f"{part}_ms"] for part in ("draft", "verify", "other")}
            total = sum(parts.values())
            shares = ", ".join(f"{part} {ms / total:.0%}" for part, ms in parts.items())
            alpha = f"; alpha {row['alpha']:.3f}" if "alpha" in row else ""
            print(f"A round of {name} takes {total:.1f} ms{each}: {shares}{alpha}.")
        if "first_divergence" in row:
            print(f"{name} is not lossless: {row['first_divergence']}")

def resume(path, about):
    """The finished prompts in the file of --json -> [{name of a method: Record}]

    They stay there.  The rows, which are written anew, and a line that a kill has cut are removed.
    """
    if not path or not Path(path).exists():
        return []
    *lines, _ = Path(path).read_text().split("\n")       # after the last \n: nothing, or a cut line
    found = [json.loads(line) for line in lines]
    keys = "command", "commit", "machine"
    if any(line.get(key) != about[key] for line in found for key in keys):
        raise UserError(f"--json {path} holds what another command, commit or machine gave: "
                        "delete it, or name another file")
    finished = [line for line in found if "records" in line]
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in finished))
    return [{name: Record(tokens, [verify.Round(*one) for one in rounds], seconds)
             for name, (tokens, rounds, seconds) in line["records"].items()}
            for line in finished]

def show(name, record, tokenizer):
    """Print a method's continuation, each round's accepted tokens in [brackets]."""
    ids, text = record.tokens[:1], tokenizer.decode(record.tokens[:1])
    print(f"--- {name}: [accepted]bonus\n{text}", end="")
    for one in record.rounds:
        accepted, _ = accepted_and_tested(one)
        for tokens, form in ((one.new[:accepted], "[{}]"), (one.new[accepted:], "{}")):
            ids += tokens
            # Incomplete UTF-8 is held back.
            whole = tokenizer.decode(ids).rstrip("\ufffd")
            new, text = whole[len(text):], whole
            print(form.format(new) if new else "", end="")
    print("\n")

# ---------------------------------------------------------------- the command
def parser():
    p = argparse.ArgumentParser(description="Time decoding with drafters and trees, and without.")
    flag = p.add_argument
    flag("--target", default=str(load.STAND_IN), help="folder or hub name")
    flag("--drafter", nargs="+", default=["glide"], help='such as "glide(temperature=1)", maxgram')
    flag("--tree", nargs="+", default=["cape"], help=f'{" ".join(TREES)}, or "pct(width=7)"')
    flag("--checkpoint", default=str(load.CHECKPOINTS), help="folder of the drafters, or of one")
    flag("--prompts", nargs="+", help="files of prompts (default: the project's own)")
    flag("--limit", type=at_least(1), help=f"maximum number of prompts (default: {FEW} of our own)")
    flag("--template", help="chat format: question, vicuna, a file (default: the target's)")
    flag("--template-args", help="for the template, as '{\"enable_thinking\": false}'")
    flag("--max-new-tokens", type=at_least(1), default=128, help="for each prompt")
    flag("--temperature", type=at_least(0.0), default=0.0, help="of sampling; 0 is greedy")
    flag("--dtype", default="float32", help="float32, float16, bfloat16, float64, or auto")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="or cuda:1, auto")
    flag("--graphs", action="store_true", help="static shapes and CUDA graphs")
    flag("--trust-remote-code", action="store_true", help="run code that hub models bring")
    flag("--batch", type=at_least(1), default=1, help="number of prompts decoded at once")
    flag("--json", metavar="FILE", help="write finished prompts and the rows to this file")
    flag("--show", action="store_true", help="print the first prompt's continuations")
    return p

def prepare(a):
    """The target and the prompts that the arguments name -> load.Loaded, [Prompt]"""
    loaded = load.Loaded(a.target, a.checkpoint, a.dtype, a.device, a.trust_remote_code, a.graphs)
    limit = a.limit or (None if a.prompts else FEW)
    prompts = read_prompts(a.prompts or [PROMPTS], loaded, a.max_new_tokens, limit, a.template,
                           a.template_args)
    return loaded, prompts

def about_of(a, loaded, command):
    """What every row says of a measurement -> dict"""
    return {
        "command": command,
        "target": os.path.relpath(a.target) if Path(a.target).is_dir() else a.target,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "temperature": a.temperature,
        **provenance(loaded.target.device)}

@program
def main(argv):
    """From arguments to the table -> exit status"""
    a = parser().parse_args(argv)
    drafters = load.drafter_calls(a.drafter, a.checkpoint)
    trees = [read_call(tree, TREES, "tree") for tree in a.tree]
    if a.temperature == 0 and any(tree.name == "drawn" for tree in trees):
        raise UserError("--tree drawn samples its chain: give --temperature 1, or --tree chain")
    loaded, prompts = prepare(a)
    methods = methods_of(loaded, drafters, trees, a.temperature)
    about = about_of(a, loaded, shlex.join(["python", "bench.py", *argv]))
    results = resume(a.json, about)
    print(f"target {about['target']}, {about['dtype']}, {a.device}, {len(prompts)} prompts of up "
          f"to {a.max_new_tokens} new tokens", *loaded.notes, sep="\n", end="\n\n", flush=True)
    with open(a.json or os.devnull, "a", buffering=1) as file:
        try:
            for found in measure(methods, prompts, a.temperature, len(results), a.batch, a.graphs):
                print(json.dumps(about | {"prompt": len(results), "records": found}), file=file)
                results.append(found)
        except KeyboardInterrupt:
            if not results:
                raise                                    # there is nothing to report
            print(f"interrupted after {len(results)} prompts of {len(prompts)}", file=sys.stderr)
        is_complete = len(results) == len(prompts)
        rows = [row_of(method, results)
                | losslessness(method, results, prompts, loaded.target, a.temperature)
                for method in methods]
        for row in rows if is_complete else []:
            print(json.dumps(about | row), file=file)
    if a.show:
        for method in methods[2:]:
            show(method.name, results[0][method.name], loaded.tokenizer)
    print_table([method.name for method in methods], rows, a.batch)
    return 0 if is_complete else 130

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
