"""One table: any target with any drafter and any tree, end to end, beside honest baselines.

    python bench.py --drafter glide --tree cape
    python bench.py --drafter glide edd --tree chain "pct(width=7, leaf=0)" pct-cost "fixed(size=4)"
    python bench.py --drafter maxgram "cascade(base, small, maxgram, k=(8, 13, 1))" --tree chain
    python bench.py --target lmsys/vicuna-7b-v1.5 --checkpoint my-glide --dtype float16 --device cuda
    python bench.py --target Qwen/Qwen2.5-7B-Instruct --tree chain --dtype auto --prompts mt_bench.jsonl \
        --drafter "cascade(Qwen/Qwen2.5-0.5B-Instruct, maxgram)"

Drafters and trees are named as their functions would be called: see cape.py, pct.py, and load_cascade below.
Plain decoding is the same target, cache and dtype through the same loop with one token a forward; on a CPU
also padded to two queries, as one query takes a slow path on some, and the faster of the two is the baseline.
"""
import ast
import contextlib
import inspect
import json
import os
import platform
import re
import resource
import sys
import time
from collections import Counter, namedtuple
from functools import partial
from pathlib import Path
from statistics import median

import jinja2
import torch
import transformers
from tqdm import tqdm

import cape
import cascade
import edd
import glide
import maxgram
import pct
import train
import verify
from verify import UserError

CHAINS = {"chain": cape.chain, "drawn": cape.drawn}         # a cascade and Max-Gram write these by themselves
# Chats in Vicuna's words (FastChat's vicuna_v1.1), which its tokenizer does not know.
VICUNA = (
    "{% set said = messages %}"
    "{% set system = \"A chat between a curious user and an artificial intelligence assistant. The assistant "
    "gives helpful, detailed, and polite answers to the user's questions.\" %}"
    "{% if said[0].role == 'system' %}{% set system = said[0].content %}{% set said = said[1:] %}{% endif %}"
    "{{ bos_token }}{{ system }} "
    "{% for turn in said %}"
    "{% if turn.role == 'user' %}USER: {{ turn.content }} "
    "{% else %}ASSISTANT: {{ turn.content }}</s>{% endif %}"
    "{% endfor %}ASSISTANT:")
TEMPLATES = {"vicuna": VICUNA}
TREES = {**CHAINS, "cape": cape.cape, "fixed": cape.fixed, "beam": cape.beam, "pct": pct.pct, "vct": pct.vct,
         "own-confidence": pct.own_confidence, "pct-cost": pct.pct_cost, "eagle2": pct.eagle2}
LOOK = 9                                                     # prompts of the project's own: a minute or less
SHARES = ("draft", "verify", "other")                       # where the time of a round goes
FACTS = "c|expected_speedup|alpha_overlap|K|runs|swi_.*|first_divergence"            # printed under the table
COLUMNS = {
    "tok/s": "{tokens_per_second:.1f}",                     # new tokens over all seconds, prefill included
    # over plain decoding, prompt by prompt: median [lower quartile - upper quartile]
    "speedup": "{speedup:.2f}x [{speedup_low:.2f}-{speedup_high:.2f}]",
    "vs generate()": "{speedup_vs_generate:.2f}x",          # over transformers' own generate(): median
    "tau": "{tau:.2f}",                                     # new tokens a round, the bonus token included
    "alpha": "{alpha:.3f}",                                 # accepted / tested drafted tokens, on chains
    "nodes": "{nodes:.1f}",                                 # drafted nodes verified a round
    "draft": "{share_draft:.0%}", "verify": "{share_verify:.0%}",
    "other": "{share_other:.0%}",                           # trees, masks, acceptance, bookkeeping
    "ms/round": "{round_ms:.1f}",
    "lossless": "{lossless}"}                               # token for token plain decoding's output

# ---------------------------------------------------------------- names as calls
Call = namedtuple("Call", "name function words settings label")         # label: the call as tables show it

def settings_of(function):
    """{setting: default} of a function that the command line can call."""
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.default is not p.empty and p.name != "generator"}

def read_call(text, functions, what):
    """`pct(width=7, leaf=0)` -> Call("pct", pct.pct, [], {"width": 7, "leaf": 0}, "pct(width=7, leaf=0)").

    Settings are Python literals; words name models, and may hold slashes, dots and dashes.
    """
    name, _, inside = re.sub(r"\s", "", text).partition("(")
    name = name.replace("_", "-")
    if name not in functions:
        raise UserError(f"there is no {what} called {name!r}: choose among {' '.join(functions)}")
    takes, words, settings = settings_of(functions[name]), [], {}
    # Commas part the arguments, except within brackets.
    arguments = re.findall(r"(?:\([^)]*\)|\[[^]]*\]|[^,()[\]])+", inside.removesuffix(")"))
    for argument in arguments:
        key, _, value = argument.partition("=")
        try:
            settings[key] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            words.append(argument)
    closed = inside.endswith(")") == ("(" in text) and text.count("(") == text.count(")")
    known = settings.keys() <= takes.keys() and len(words) + len(settings) == len(arguments)
    if not closed or not known or bool(words) != (name == "cascade"):
        models = ["names of models, the largest first"] if name == "cascade" else []
        listed = ", ".join(models + [f"{key}={value!r}" for key, value in takes.items()])
        raise UserError(f"{text}: {name} takes {listed or 'no settings'}")
    label = f"{name}({', '.join(arguments)})" if arguments else name
    return Call(name, functions[name], words, settings, label)

def check(a):
    """Refuse what cannot work before anything is loaded -> the calls of --drafter, of --tree"""
    loaders = dict.fromkeys(drafters_in(a.checkpoint), load_drafter)
    loaders |= {"maxgram": load_cascade, "cascade": load_cascade}
    drafters = [read_call(text, loaders, f"drafter in {a.checkpoint}") for text in a.drafter]
    trees = [read_call(text, TREES, "tree") for text in a.tree]
    for labels in ([call.label for call in drafters], [call.label for call in trees]):
        if len(set(labels)) < len(labels):
            raise UserError(f"{' '.join(labels)}: name each once")
    for tree in trees:
        try:
            nodes, _ = tree.function.bounds(**tree.settings)
            most = verify.GRAPHED if a.exact else verify.MOST_NODES
            assert nodes < most, f"{nodes} nodes exceed the {most - 1} that fit"
            # Built once for a made-up drafter, a tree says what is wrong with its settings.
            tree.function(lambda x, _: torch.full((len(x), 8), 1 / 8), torch.tensor([0]), **tree.settings)
        except Exception as why:
            raise UserError(f"--tree {tree.label}: {why}") from None
        if tree.name == "drawn" and a.temperature == 0:
            raise UserError("--tree drawn draws its tokens: give --temperature above 0, or take --tree chain")
    least = {"max_new_tokens": 1, "limit": 1, "top_k": 1, "threads": 1, "temperature": 0}
    for name, low in least.items():
        value = getattr(a, name)
        if value is not None and not value >= low:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be at least {low}")
    if not 0 < a.top_p <= 1:
        raise UserError(f"--top-p is {a.top_p}: it must be above 0 and at most 1")
    if a.template and a.template not in TEMPLATES and not Path(a.template).is_file():
        raise UserError(f"--template {a.template}: say {' '.join(TEMPLATES)}, or name a file with a Jinja "
                        "template")
    if a.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is available here; use --device cpu")
    return drafters, trees

# ---------------------------------------------------------------- the run: what the flags name, loaded
class Run:
    """All that the flags `a` name: model, tokenizer, target, trees [Call], prompts [(group, ids, limit)],
    drafters {label: drafter}, stages {name: model} of all cascades, notes for the output's first line."""

    def __init__(self, argv=None):
        a = self.a = parser().parse_args(argv)
        calls, self.trees = check(a)
        if not a.prompts:
            a.prompts, a.limit = [str(train.HERE / "checkpoints" / "prompts.jsonl")], a.limit or LOOK
        torch.set_num_threads(a.threads or torch.get_num_threads())
        if a.template:
            a.template = TEMPLATES.get(a.template) or Path(a.template).read_text()
        a.target = os.path.relpath(a.target) if Path(a.target).is_dir() else a.target
        self.model, self.tokenizer = self.load(a.target, a.revision)
        a.dtype = str(self.model.dtype).removeprefix("torch.")             # where it was auto
        seq2seq = self.model.config.is_encoder_decoder
        kind = cascade.EncoderDecoder if seq2seq else verify.Target
        self.target = kind(self.model, graphs=not a.no_graphs, exact=a.exact)
        # What exactness costs is seen beside plain decoding that does without.
        self.inexact = kind(self.model, graphs=not a.no_graphs) if a.exact else None
        if not self.target.verifies_trees and not {tree.name for tree in self.trees} <= CHAINS.keys():
            raise UserError(f"{a.target} honours no mask or positions of a tree: it takes --tree chain")
        if seq2seq and not {call.name for call in calls} <= {"maxgram", "cascade"}:
            raise UserError(f"{a.target} has an encoder: it takes --drafter maxgram or cascade(...)")
        self.cuda = self.target.device.type == "cuda"
        self.drafters, self.stages, self.costs, self.notes = {}, {}, {}, []
        self.prompts = read_prompts(self)
        self.target.capacity = max(self.target.prompt_rows(ids) + limit for _, ids, limit in self.prompts)
        for call in calls:
            try:
                self.drafters[call.label] = call.function(self, *(call.words or [call.name]), **call.settings)
            except TypeError as why:
                raise UserError(f"--drafter {call.label}: {why}") from None

    def load(self, name, revision=None, role="the target"):
        """A language model as the flags say -> (model, tokenizer)"""
        a = self.a
        return train.load_target(name, a.dtype, a.device, a.attention, True, role, revision,
                                 a.trust_remote_code)

    def decode(self, drafter, build, ids, limit, tell=None, target=None):
        """verify.generate as the flags say -> Record.  drafter None: plain decoding; tell: see Output."""
        a, out = self.a, Record(self.cuda)
        out.tell = tell or out.tell
        eos = self.model.generation_config.eos_token_id
        verify.generate(target or self.target, drafter, build, ids, limit, a.temperature, a.top_k, a.top_p,
                        eos, a.seed, out=out)
        out.stage_runs = list(getattr(drafter, "runs", ()))
        out.total["draft_forwards"] = sum(out.stage_runs) or out.total["draft_forwards"]
        return out

def chat_ids(run, messages):
    """Messages -> ids, by --template or the tokenizer's own; without either their words, by blank lines."""
    tokenizer = run.tokenizer
    template = run.a.template or tokenizer.chat_template
    if not template:
        return tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    try:
        chat = tokenizer.apply_chat_template(messages, chat_template=template, add_generation_prompt=True,
                                             return_dict=True)
    except jinja2.TemplateError as why:
        raise UserError(f"the chat template refuses the messages ({why}): leave out --system, or give "
                        "another --template") from None
    return chat["input_ids"]

def turns_of(run, row):
    """Yield the ids of each prompt of a row, or None where no field is known.

    Of a conversation those are all its questions, each behind what was said before.  Where the file has no
    answer to a question (MT-Bench) the target's own stands there, by plain decoding.
    """
    a, chat = run.a, train.conversation(row)
    if not chat:
        try:
            text = train.question_text(row, a.ask)
        except (LookupError, ValueError, TypeError, AttributeError) as why:
            raise UserError(f"--ask {a.ask!r} does not fit a row ({type(why).__name__}: {why}): write fields "
                            "that all rows have, as {question}") from None
        yield run.tokenizer(text)["input_ids"] if text else None
        return
    said = [{"role": "system", "content": a.system}] if a.system and chat[0]["role"] != "system" else []
    asked = ids = None
    for message in chat:
        if message["role"] == "user" and asked:
            # Nobody has answered yet.
            out = run.decode(None, verify.no_draft, ids, min(a.max_new_tokens, run.target.room(ids)))
            answer = run.tokenizer.decode(out.tokens, skip_special_tokens=True)
            said.append({"role": "assistant", "content": answer})
        said.append(message)
        asked = message["role"] == "user"
        if asked:
            ids = chat_ids(run, said)
            yield ids
    if ids is None:                                                  # nobody asks anything
        yield None

def read_prompts(run):
    """-> [(group, ids, most new tokens)]"""
    a, context, vocab = run.a, run.target.context, run.target.config.vocab_size
    rows, count, prompts = [], Counter(), []
    for path in map(Path, a.prompts):
        for number, row in enumerate(train.read_rows(path), 1):
            about = row if isinstance(row, dict) else {}
            group = about.get("group") or about.get("category") or path.name.split(".")[0]
            count[group] += 1
            rows.append((count[group], group, row, f"row {number} of {path}"))
    # The first of each group, the second of each ...: --limit keeps as many of each.
    rows = sorted(rows, key=lambda row: row[0])[:a.limit]
    left_out = 0
    for _, group, row, name in tqdm(rows, desc="prompts", unit="row", leave=False, disable=None):
        if len(prompts) == a.limit:
            break
        for ids in turns_of(run, row):
            if not ids:
                known = " ".join(["turns", *train.CHATS, *(names.split()[-1] for names, _ in train.ASKS)])
                raise UserError(f"{name} is empty, or has none of the fields {known}: write --ask")
            if max(ids) >= vocab:
                raise UserError(f"{name} has token {max(ids)}, but the target's vocabulary is {vocab}")
            room = run.target.room(ids)
            if room < 1 and not a.skip_long:
                raise UserError(f"{name} has {len(ids)} tokens, the target's context holds {context}: "
                                "shorten it, or leave such prompts out with --skip-long")
            if room < 1:
                left_out += 1                                        # and with it what is said behind it
                break
            prompts.append((group, ids, min(a.max_new_tokens, room)))
    if not prompts:
        raise UserError(f"--prompts: {' '.join(a.prompts)} holds no prompt of at most {context} tokens")
    if left_out:
        run.notes.append(f"{left_out} prompts longer than the context left out")
    return prompts[:a.limit]

def kind_of(folder):
    """What a folder of train.py's says that it holds."""
    try:
        return json.loads((folder / "training.json").read_text())["kind"]
    except (ValueError, LookupError, TypeError):
        raise UserError(f"the drafter in {folder} is damaged: train or copy it again") from None

def drafters_in(checkpoint):
    """{name: folder} of the trained drafters in a folder of folders, or in the folder of one."""
    top = Path(checkpoint)
    if (top / "training.json").exists():
        return {kind_of(top): top}
    folders = [path.parent for path in sorted(top.glob("*/training.json"))]
    # A folder with a config is a language model's, which is a stage of a cascade.
    folders = [folder for folder in folders if not (folder / "config.json").exists()]
    return {folder.name.replace("_", "-"): folder for folder in folders}

def load_drafter(run, name):
    """A trained drafter, refused where it was made for another target."""
    folder = drafters_in(run.a.checkpoint)[name]
    try:
        drafter, about = (glide if kind_of(folder) in ("glide", "vanilla") else edd).load(folder, run.model)
    except ValueError as why:
        raise UserError(str(why)) from None
    if not train.same_target(about["target"], train.fingerprint(run.model, run.tokenizer)):
        raise UserError(f"the drafter in {folder} was made for another target: train one for this")
    drafter.temperature = 1.0 if run.a.raw_confidence else drafter.temperature
    return drafter

def load_cascade(run, *names, k=None, lenience=1.0, costs=None, stop="own", matching=True):
    """Algorithm 1; Max-Gram alone is a cascade without a model.

    names: folders of the checkpoint, other folders or hub names of language models, the largest first,
    maxgram last.  k: Table 2's k11, or (k11, k12, k22).  costs: of one run of each model, the target's is 1.
    stop: when a stage has added enough (cascade.py, difference 2).  matching: False: Max-Gram's bigram alone.
    """
    models = [name for name in names if name != "maxgram"]
    if "maxgram" in names[:-1] or len(set(names)) < len(names) or costs and len(costs) != len(models):
        raise UserError(f"cascade({', '.join(names)}): name every stage once, the largest first, maxgram "
                        "last; give a cost for each model, or none")
    k = [k] if isinstance(k, int) else k
    K = None if k is None else cascade.table2(k, len(models), "maxgram" in names)
    run.stages |= {name: load_stage(run, name) for name in models if name not in run.stages}
    lms, gram = [run.stages[name] for name in models], load_gram(run) if "maxgram" in names else None
    if gram:
        gram.matching = matching
    drafter = cascade.Cascade(lms, K, lenience, gram, run.target.context, run.target.vocab, stop)
    for stage in drafter.stages:
        if stage.padded:
            stage.call.graphs = stage.call.graphs and not run.a.no_graphs
    weights = [lm.num_parameters() / run.model.num_parameters() for lm in lms]
    drafter.names, drafter.costs = list(names), {"ms": weights} | ({"given": costs} if costs else {})
    return drafter

def load_stage(run, name):
    """A language model with the target's tokenizer."""
    folder = Path(run.a.checkpoint) / name
    source = str(folder) if (folder / "config.json").exists() else name
    model, tokenizer = run.load(source, role="the stage")
    if model.config.is_encoder_decoder != run.model.config.is_encoder_decoder:
        raise UserError(f"{name} is another kind of model than the target: one has an encoder")
    # Vocabularies may be padded otherwise; what an id means must be the same.
    mine = {i: token for token, i in run.tokenizer.get_vocab().items()}
    its = {i: token for token, i in tokenizer.get_vocab().items()}
    for i in sorted(mine.keys() & its.keys()):
        if mine[i] != its[i]:
            raise UserError(f"{name} has another tokenizer than the target: token {i} is {its[i]!r} there, "
                            f"{mine[i]!r} here; take a model of the target's family")
    if model.num_parameters() >= run.model.num_parameters():
        run.notes.append(f"{name} is no smaller than the target, and will slow it down")
    return model

def load_gram(run):
    """Max-Gram with the bigram of --bigram, or of the checkpoint where it has one."""
    path = Path(run.a.bigram or Path(run.a.checkpoint) / "bigram.json")
    if not run.a.bigram and not path.exists():
        return maxgram.MaxGram()
    vocab, fingerprint = run.target.config.vocab_size, train.vocabulary_fingerprint(run.tokenizer)
    try:
        return maxgram.MaxGram(*maxgram.read_bigram(path, vocab, fingerprint))
    except ValueError as why:
        if run.a.bigram:
            raise UserError(f"--bigram: {why}") from None
        # Nobody asked for the checkpoint's: another target goes without one.
        run.notes.append(f"no bigram: {path} is not this target's")
        return maxgram.MaxGram()

# ---------------------------------------------------------------- what a decoding, a step, a tree costs
class Record(verify.Output):
    """An Output that measures.  total: seconds of prefill, draft, verify and other, and counts of rounds."""

    def __init__(self, cuda=False):
        super().__init__()
        self.cuda, self.total, self.marks, self.stage_runs, self.seconds = cuda, Counter(), [], [], None
        self.mark("")

    def speed(self):
        """Tokens a second, prefill included."""
        return len(self.tokens) / self.seconds

    def mark(self, what):
        now = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            now.record()
        self.marks.append((what, now))

    def settle(self):
        if self.cuda:
            self.marks[-1][1].synchronize()
        for (_, before), (what, now) in zip(self.marks, self.marks[1:]):
            self.total[what] += before.elapsed_time(now) / 1000 if self.cuda else now - before
            self.total["draft_forwards"] += what == "draft"
        self.marks = self.marks[-1:]

    def round(self, new, path, parents, p_target=None, p_draft=None):
        super().round(new, path, parents, p_target, p_draft)
        depths = [0]
        for parent in parents[1:]:                                   # absent nodes have none
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        drafted = sum(depth > 0 for depth in depths)
        accepted = min(len(path) - 1, len(new))
        # Beyond a cut by EOS or the length limit nothing was tested; begin() was marked as a draft, too.
        tested = accepted + (accepted < len(new) and accepted < drafted)
        self.total.update(rounds=1, nodes=drafted, depth=max(depths), accepted=accepted, tested=tested,
                          trees=max(depths) < drafted, drawn=p_draft is not None)
        self.total["draft_forwards"] -= self.total["draft"] > 0
        if p_draft is not None:
            self.total["overlap"] += torch.minimum(p_target[:tested], p_draft[:tested]).sum()

    def by_prompt(self):
        """The figures of this decoding alone, which a paired comparison of two arms wants."""
        total = self.total
        accepted = total["accepted"] if not total["trees"] else None
        overlap = float(total["overlap"]) if total["drawn"] else None
        return {"tau": self.tau, "alpha": ratio(accepted, total["tested"]),
                "alpha_overlap": ratio(overlap, total["tested"]),
                "nodes": ratio(total["nodes"], total["rounds"])}

def measure_costs(run, label):
    """{"cost": s_d / s_t, "node_price": of one more verified node} in plain steps, by the loop's own clock.

    Short decodings take turns and medians of their ratios count, since other programs disturb; {}: they did.
    """
    drafter, (_, ids, limit) = run.drafters[label], run.prompts[0]
    builds = [(None, verify.no_draft), (drafter, cape.chain), (drafter, partial(cape.fixed, size=5))]
    turns = []
    for _ in range(7):
        turns.append([run.decode(*build, ids, min(limit, 24)).total for build in builds])
    cost, price = pct.costs_of(turns[1:])                            # the first turn warms up
    if not 0.005 <= cost <= 1:
        run.notes.append(f"{label}: s_d / s_t came out as {cost:.3f}, which cannot be; {pct.COST} is taken")
        return {}
    run.notes.append(f"{label}: s_d / s_t = {cost:.3f}, a verified node costs {price:.3f} plain steps")
    return {"cost": cost, "node_price": price}

def builder(run, label, tree):
    """The builder that the call `tree` names, for the drafter `label`; what depends on both is measured."""
    drafter = run.drafters[label]
    writes_chains = hasattr(drafter, "chain")
    if writes_chains and tree.name in CHAINS:
        if tree.settings:
            raise UserError(f"--tree {tree.label}: {label} writes chains of its own length; say {tree.name}")
        return partial(cascade.proposal, drawn=tree.name == "drawn")
    missing, found = settings_of(tree.function).keys() - tree.settings.keys(), {}
    if missing & {"cost", "node_price"} and not writes_chains:
        if label not in run.costs:
            run.costs[label] = measure_costs(run, label)
        found = run.costs[label]
    if "size" in missing:
        # CAPE's control (section 5.4): the mean size of CAPE's sets, with this drafter, everywhere.
        build, total = partial(cape.cape, gamma=tree.settings.get("gamma", cape.GAMMA)), Counter()
        for _, ids, limit in run.prompts[:8]:
            total.update(run.decode(drafter, build, ids, min(limit, 64)).total)
        found = {"size": max(0, round(total["nodes"] / max(1, total["depth"])) - 1)}
        run.notes.append(f"{label}: fixed takes {found['size']} extras a position")
    return partial(tree.function, **{key: found[key] for key in found.keys() & missing}, **tree.settings)

# ---------------------------------------------------------------- decoding: prompt by prompt, arms in turn
class Arm:
    """One way of decoding.  decode(ids, limit) -> Record; results[i]: the Record of prompt i."""

    def __init__(self, drafter, decode, tree=None, build=None):
        self.drafter, self.decode, self.tree, self.build = drafter, decode, tree, build
        self.name = f"{drafter} x {tree}" if tree else drafter
        self.results, self.memory = {}, 0

    def speeds(self, base, which):
        """Speedups over `base` on the prompts `which`."""
        return [self.results[i].speed() / base.results[i].speed() for i in which]

def library(run, ids, limit, **more):
    """transformers' own generate() -> Record"""
    a, out, start = run.a, Record(), 1 if run.target.encoder_decoder else len(ids)
    torch.manual_seed(a.seed)
    ids = torch.tensor([ids], device=run.target.device)
    with torch.inference_mode():
        found = run.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit,
                                   do_sample=a.temperature > 0, temperature=a.temperature or 1.0,
                                   top_k=a.top_k or 0, top_p=a.top_p, **more)
    out.tokens = found[0, start:].tolist()
    return out

def arms_of(run):
    """-> all arms in the order of the table: plain decoding's, transformers' own, drafters and trees."""
    seq2seq = run.target.encoder_decoder
    arms = [Arm("plain", partial(run.decode, None, verify.no_draft))]
    if run.target.device.type == "cpu" and not seq2seq:
        arms.append(Arm("plain, two queries", partial(run.decode, None, verify.no_draft_padded)))
    if run.inexact:
        arms.append(Arm("plain, not exact", partial(run.decode, None, verify.no_draft, target=run.inexact)))
    arms.append(Arm("generate()", partial(library, run)))
    for name, model in run.stages.items():
        # The library takes vocabularies of two sizes for two tokenizers.
        if model.config.get_text_config().vocab_size != run.target.config.vocab_size:
            run.notes.append(f"no assisted generation with {name}: transformers wants equal vocabularies")
            continue
        arms.append(Arm(f"assisted generation ({name})", partial(library, run, assistant_model=model)))
    if not seq2seq and any(getattr(drafter, "gram", None) for drafter in run.drafters.values()):
        arms.append(Arm("prompt lookup", partial(library, run, prompt_lookup_num_tokens=maxgram.N)))
    for label, drafter in run.drafters.items():
        for tree in run.trees:
            build = builder(run, label, tree)
            arms.append(Arm(label, partial(run.decode, drafter, build), tree.label, build))
    return arms

def show(run, arm):
    """Print arm's continuation of the first prompt as it is made: accepted runs in colour or [brackets]."""
    left, right = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[", "]")
    group, ids, limit = run.prompts[0]
    made = []

    def tell(tokens, drafted):
        for part, form in ((tokens[:drafted], left + "{}" + right), (tokens[drafted:], "{}")):
            # Half a character waits for its other half.
            before = run.tokenizer.decode(made).rstrip("\ufffd")
            made.extend(part)
            fresh = run.tokenizer.decode(made).rstrip("\ufffd")[len(before):]
            print(form.format(fresh) if fresh else "", end="", flush=True)
    print(f"\n--- {arm.name}, prompt 1 of {group}: {left}accepted{right}bonus")
    print(f"\n--- tau {arm.decode(ids, limit, tell=tell).tau:.2f}")

def measure(run, arms):
    """Decode every prompt with every arm -> how many prompts all have finished; an interruption ends it."""
    for arm in arms:                                                 # warm-up: kernels, allocator, caches
        arm.decode(run.prompts[0][1], min(16, run.prompts[0][2]))
    bar = tqdm(total=len(run.prompts) * len(arms), unit="run", dynamic_ncols=True, disable=None)
    with bar, contextlib.suppress(KeyboardInterrupt):
        for i, (_, ids, limit) in enumerate(run.prompts):
            first = i % len(arms)                                    # nobody is always first
            for arm in arms[first:] + arms[:first]:
                if run.cuda:
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                out = arm.decode(ids, limit)
                if run.cuda:
                    torch.cuda.synchronize()
                out.seconds, arm.results[i] = time.perf_counter() - start, out
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                if run.cuda:
                    peak = torch.cuda.max_memory_allocated()
                arm.memory = max(arm.memory, peak)
                bar.update()
            speeds = {arm.name: median(arm.speeds(arms[0], range(i + 1))) for arm in arms if arm.tree}
            bar.set_postfix_str(", ".join(f"{name} {speed:.2f}x" for name, speed in speeds.items()))
    return min(len(arm.results) for arm in arms)

# ---------------------------------------------------------------- one row of the table
# GLIDE's E(Spd.) (section 5.1, after Leviathan et al. 2023) is Corollary 4.2 of Cascade: f(alpha, c, gamma).
expected_speedup = cascade.ewif_speculative

def ratio(x, y):
    """x / y, or None where there is nothing to divide, or to divide by."""
    return x / y if y and x is not None else None

def row_of(run, arm, base, generate, group, which, truth=None):
    """A line of the JSON: `arm` on the prompts `which`, beside plain decoding and transformers' own.

    base: the arm of plain decoding that is the fastest; truth: the one whose tokens all should give, or base.
    """
    truth = truth or base
    outs, plain, total = [arm.results[i] for i in which], [base.results[i] for i in which], Counter()
    for out in outs:
        total.update(out.total)
    tokens, rounds = sum(len(out.tokens) for out in outs), total["rounds"]
    drafted = rounds if arm.build else 0                             # plain decoding has no tau
    # Seconds of a plain step: the baseline's, without its prefills.
    steps = sum(len(out.tokens) - 1 for out in plain)
    step = sum(out.seconds - out.total["prefill"] for out in plain) / max(1, steps)
    speeds = arm.speeds(base, which)
    quartiles = torch.tensor(speeds).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    grams = [list(zip(*(out.tokens[i:] for i in range(4)))) for out in outs if len(out.tokens) > 3]
    settings = settings_of(arm.build) if arm.build else {}

    row = {key: getattr(run.a, key) for key in ("target", "dtype", "device", "seed", "temperature")}
    row |= {"drafter": arm.drafter, "tree": arm.tree, "settings": settings, "group": group, "batch": 1,
            "prompts": len(outs), "prompt_tokens": sum(len(run.prompts[i][1]) for i in which),
            "threads": torch.get_num_threads(), "peak_memory": arm.memory,
            "tokens": tokens, "tokens_per_second": tokens / sum(out.seconds for out in outs)}
    row |= dict(zip(("speedup_low", "speedup", "speedup_high"), quartiles))
    row["by_prompt"] = [{"speedup": speed, **out.by_prompt()} for speed, out in zip(speeds, outs)]
    row["speedup_vs_generate"] = median(arm.speeds(generate, which))
    row["time_to_first_token"] = median(out.total["prefill"] for out in outs) if rounds else None
    row["distinct_4grams"] = ratio(sum(len(set(found)) / len(found) for found in grams), len(grams))
    row["tau"] = ratio(sum(sum(out.runs) for out in outs), drafted)
    row |= {key: ratio(total[key], drafted) for key in ("depth", "nodes", "draft_forwards")}
    row["alpha_depth"] = ratio(row["tau"], row["depth"])             # EDD's alpha
    row["alpha"] = None if total["trees"] else ratio(total["accepted"], total["tested"])
    row["alpha_overlap"] = ratio(float(total["overlap"]), total["tested"]) if total["drawn"] else None
    spent = sum(total[key] for key in SHARES)
    row |= {"round_ms": ratio(1e3 * spent, drafted), "target_ms": 1e3 * step}
    row |= {f"{key}_ms": ratio(1e3 * total[key], rounds) for key in SHARES}
    row |= {f"share_{key}": ratio(total[key], spent) for key in SHARES}

    # A run of the target is a round, or a prompt's prefill, as it is in plain decoding.
    drafter = run.drafters.get(arm.drafter)
    stages = [sum(counts) for counts in zip(*(out.stage_runs for out in outs))]
    row["runs"] = [rounds + len(outs), *stages] if rounds else None
    row |= {"stages": getattr(drafter, "names", None), "K": getattr(drafter, "K", None)}
    # One model alone is speculative decoding; the runs of several are not alike.
    row["c"] = None if len(stages) > 1 else ratio(ratio(total["draft"], total["draft_forwards"]), step)
    alpha, c, gamma = row["alpha"], row["c"], row["K"][0][0] if row["K"] else settings.get("gamma")
    row["expected_speedup"] = expected_speedup(alpha, c, gamma) if alpha and c and gamma else None
    if stages:
        row["swi_measured"] = tokens / (row["runs"][0] + total["draft"] / step)
        for how, costs in drafter.costs.items():                     # Max-Gram is free
            counts = row["runs"][:1 + len(costs)]
            row[f"swi_{how}"] = cascade.swi(tokens, counts, [1, *costs])

    # Where tokens are sampled, only arms with plain decoding's keyed noise must give the same ones.
    exact = run.a.temperature == 0 or arm.drafter.startswith("plain") or arm.build and not total["drawn"]
    wrong = [i for i in which if arm.results[i].tokens != truth.results[i].tokens]
    row["lossless"] = not wrong if exact else None
    row["first_divergence"] = divergence(run, arm, truth, wrong[0]) if exact and wrong else None
    row["versions"] = {"python": platform.python_version(), "torch": torch.__version__,
                       "transformers": transformers.__version__}
    return row

@torch.inference_mode()
def divergence(run, arm, base, i):
    """Where an output first leaves plain decoding's, and by how little the target preferred its own token."""
    ours, plain = arm.results[i].tokens, base.results[i].tokens
    same = [x == y for x, y in zip(ours, plain)] + [False]
    at, gap = same.index(False), None
    if at < len(same) - 1:
        run.target.watch({})
        logits = run.target.prefill(run.prompts[i][1])
        logits = run.target.sync(run.target.ids + plain[:at]) if at else logits
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
    lines = [["", *COLUMNS]]
    for arm, row in zip(arms, rows):
        lossless = {True: "yes", False: "NO", None: "-"}[row["lossless"]]
        hidden = [f"share_{key}" for key in SHARES if row["tau"] is None]           # baselines have no rounds
        row = {**row, **dict.fromkeys(hidden), "lossless": lossless}
        lines.append([arm.name, *(cell(form, row) for form in COLUMNS.values())])
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in lines)

def report(run, arms, finished):
    """Print a table for each group of prompts, and what does not fit into it -> rows, all prompts' first."""
    plain = [arm for arm in arms if not arm.tree and arm.drafter.startswith("plain")]
    base = min(plain, key=lambda arm: sum(arm.results[i].seconds for i in range(finished)))
    groups = {"all": list(range(finished))}
    for i in range(finished):
        groups.setdefault(run.prompts[i][0], []).append(i)
    rows, truth = [], arms[0] if run.a.exact else base
    for group, which in groups.items() if len(groups) > 2 else [("all", groups["all"])]:
        rows += [row_of(run, arm, base, arms[len(plain)], group, which, truth) for arm in arms]
        print(f"\n{group}: {len(which)} prompts\n{table(arms, rows[-len(arms):])}")
    row = rows[arms.index(base)]
    print(f"\nbaseline: {base.name}, {row['target_ms']:.2f} ms a token; distinct 4-grams of its output: "
          f"{row['distinct_4grams'] or 0:.0%}")
    for arm, row in zip(arms, rows):
        facts = {key: row[key] for key in row if row[key] and re.fullmatch(FACTS, key)}
        facts = [f"{key} {round(x, 3) if isinstance(x, float) else x}" for key, x in facts.items()]
        if arm.tree or row["lossless"] is False:
            print(f"{arm.name}: {'; '.join(facts)}")
    return rows

# ---------------------------------------------------------------- from arguments to table
def parser():
    p = train.Parser(description="Decode with a target and any drafters and trees beside plain decoding.")
    flag, checkpoints = p.add_argument, train.HERE / "checkpoints"
    flag("--target", default=str(train.STAND_IN), help="folder or hub name (default: the stand-in)")
    flag("--drafter", nargs="+", default=["glide"], help="a folder of --checkpoint (glide ...), maxgram, or "
         '"cascade(base, small, maxgram, k=(8, 13, 1), lenience=3, costs=(0.3, 0.05))"')
    flag("--tree", nargs="+", default=["cape"], help=f'{" ".join(TREES)}; settings: "pct(width=7, leaf=0)"')
    flag("--checkpoint", default=str(checkpoints), help="folder of a drafter, or of one folder a drafter")
    flag("--bigram", help="Max-Gram's bigram (default: bigram.json of --checkpoint, where there is one)")
    flag("--prompts", nargs="+", help="files of prompts (default: the project's own)")
    flag("--limit", type=int, help=f"at most so many prompts (default: all, of the project's own {LOOK})")
    flag("--ask", help='what a row asks, by its fields: "{question} Let us think step by step." (default: by '
         "the data set)")
    flag("--system", help="system message of conversations")
    flag("--template", help="form of conversations: vicuna, or a Jinja file (default: the tokenizer's own)")
    flag("--skip-long", action="store_true", help="leave out prompts longer than the context, with a count")
    flag("--max-new-tokens", type=int, default=128)
    flag("--temperature", type=float, default=0.0, help="0 is greedy")
    flag("--top-k", type=int)
    flag("--top-p", type=float, default=1.0)
    flag("--seed", type=int, default=0)
    flag("--dtype", default="float32", choices=["float32", "float16", "bfloat16", "float64", "auto"],
         help="auto: as the target's weights are stored")
    flag("--attention", default="sdpa", choices=["sdpa", "eager"])
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu",
         help="cpu, cuda; auto: spread over what there is (needs accelerate)")
    flag("--no-graphs", action="store_true", help="on CUDA: kernel by kernel, to compare")
    flag("--exact", action="store_true", help="one size for all forwards: half precision rounds alike")
    flag("--revision", help="of the target on the hub: a branch, a tag, a commit")
    flag("--trust-remote-code", action="store_true", help="run the code that models of the hub bring along")
    flag("--threads", type=int, help="CPU threads (default: PyTorch's)")
    flag("--raw-confidence", action="store_true", help="no temperature scaling of drafters")
    flag("--json", help="write one line a row to this file")
    flag("--show", action="store_true", help="print a continuation of each drafter and tree as it is made")
    return p

def write_json(path, rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    train.write_atomically(path, lambda part: part.write_text(lines))

def run_table(argv):
    run = Run(argv)
    a, arms = run.a, arms_of(run)
    where = f"{torch.get_num_threads()} threads"
    if run.cuda:
        where = torch.cuda.get_device_name()
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
    if finished < len(run.prompts):
        print(f"interrupted: {finished} of {len(run.prompts)} prompts are in the table", file=sys.stderr)
    return 0 if finished == len(run.prompts) else 130

def main(argv=None, work=run_table, name="bench.py"):
    """Exit status: 0; 2 after one sentence about a user's mistake; 130 after an interruption."""
    try:
        return work(argv)
    except UserError as why:
        print(f"{name}: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted before there was anything to report", file=sys.stderr)
        return 130

if __name__ == "__main__":
    sys.exit(main())
