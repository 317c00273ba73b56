"""Run a target model with any drafter x tree, end to end, beside honest baselines, and print the table.

    python bench.py --drafter glide --tree cape
    python bench.py --drafter vanilla glide --tree chain cape fixed beam
    python bench.py --target lmsys/vicuna-7b-v1.5 --checkpoint my-glide --dtype float16 --device cuda

GLIDE with a CAPE (arXiv 2402.02082), section 5: Table 1 (alpha, c, E(Spd.)), Figures 5 and 6 (walltime), Table 3 (draft time),
section 5.4 (fixed-size expansion, beam search).  EDD and PCT (ACL 2025), Table 2: PCT, VCT, EAGLE-2's tree.

    column        meaning (the design's words)
    tok/s         new tokens over all seconds, prefill included, of all prompts
    speedup       over plain decoding, prompt by prompt: median [lower quartile - upper quartile]
    alpha_depth   (JSON) tau / maximum depth, EDD's definition
    tau           new tokens a round, the bonus token included; prefill outside
    alpha         accepted / tested drafted tokens, on chains; trees have none
    nodes         drafted nodes verified a round, the root not counted
    draft, verify, other     milliseconds of a round; other: building trees and masks, acceptance, bookkeeping
    lossless      the output is token for token plain decoding's (drawn chains follow the same distribution instead)

Plain decoding is the same target, cache and dtype through the same loop with one token a forward; on a CPU also padded to two
queries, since one query takes a slow path there, and the faster of the two is the baseline.  Arms interleave prompt by prompt.
"""
import contextlib
import json
import os
import platform
import resource
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import cape
import cascade
import edd
import maxgram
import pct
import verify
from train import HERE, STAND_IN, Parser, clean, fingerprint, kind_of, load_target, read_rows, same_target, source_roots, write_atomically
from verify import UserError

# Word problems in GSM8K's form, written for this project.
MATH = [
    "A baker makes 24 rolls in the morning and twice as many in the afternoon. She sells 50 of them. How many rolls are left?",
    "Nora reads 15 pages a day from Monday to Friday and 30 pages on each day of the weekend. How many pages does she read in a week?",
    "A bus starts with 18 passengers. At the first stop 7 get off and 12 get on. At the second stop half of them get off. How many passengers remain?",
    "Tom buys 3 notebooks for $4 each and 2 pens for $1.50 each. He pays with a $20 bill. How much change does he get?",
    "A farmer has 6 rows of apple trees with 14 trees in each row. A storm fells a quarter of the trees. How many trees are still standing?",
    "Lena saves $12 every week for 10 weeks and then spends $45 on a pair of shoes. How much money does she have left?",
    "A tank holds 240 liters. A pump fills 16 liters every minute. After 9 minutes, how many more liters are needed to fill the tank?",
    "There are 28 students in a class. Three sevenths of them play football, and 5 of those also play chess. How many play football only?",
]


# ---------------------------------------------------------------- prompts
def head(text, characters=500):
    """The head of a module, cut at the end of a line."""
    return text[:characters].rsplit("\n", 1)[0] + "\n"


def held_out_prompts(target):
    """(group, text) of the stand-in's prompts, and how many held-out modules this interpreter lacks."""
    found, missing = [], 0
    roots = source_roots()
    for source, prefixes in json.loads((Path(target) / "held_out.json").read_text()).items():
        for path in (roots[source] / name for name in prefixes.values()):
            if path.exists():
                found.append(("code", head(clean(path.read_text(errors="ignore")))))
            else:
                missing += 1
    n = min(16, len(found))              # sixteen, from all three sources
    return [found[i * len(found) // n] for i in range(n)] + [("math", question_text(q)) for q in MATH], missing


def question_text(question):
    return f"Question: {question}\nAnswer:"


def read_prompts(path):
    """Prompts of a file: MT-Bench, GSM8K, HumanEval (.gz too), conversations, {"prompt": ...} or plain text, by their fields.

    -> list of (group, text or list of chat messages)
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"--prompts: {path} does not exist")
    return [(path.name.split(".")[0], prompt_of(row, path)) for row in read_rows(path)]


def prompt_of(row, path):
    if isinstance(row, str):
        return row
    if isinstance(row, dict):
        if row.get("turns"):                                                   # MT-Bench: the first turn
            return [{"role": "user", "content": row["turns"][0]}]
        if turns := row.get("conversations") or row.get("messages"):           # ShareGPT and its kin: the first message of a person
            first = next((t for t in turns if t.get("from", t.get("role")) in ("human", "user")), turns[0])
            return [{"role": "user", "content": first.get("value", first.get("content", ""))}]
        for name, form in (("question", question_text), ("prompt", str), ("text", str)):
            if isinstance(row.get(name), str):
                return form(row[name])
    raise UserError(f"--prompts: a row of {path} has none of the fields turns, conversations, messages, question, prompt, text")


def encode(prompt, tokenizer):
    """Chat messages go through the tokenizer's own template where it has one."""
    if isinstance(prompt, list):
        if tokenizer.chat_template:
            return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        prompt = prompt[0]["content"]
    return tokenizer(prompt)["input_ids"]


# ---------------------------------------------------------------- drafters and trees
def load_drafter(name, checkpoint, model, about_target, capacity, raw=False):
    """The drafter `name` from CHECKPOINT or CHECKPOINT/NAME, refused if it was made for another target."""
    folder = Path(checkpoint)
    folder = folder / name if (folder / name).is_dir() or not (folder / "training.json").exists() else folder
    try:
        drafter, about = kind_of(name).load(folder, model, capacity)
    except ValueError as why:
        raise UserError(str(why)) from None
    if about.get("kind", name) != name:
        raise UserError(f"{folder} holds a drafter of kind {about['kind']}, not {name}: name another --checkpoint or --drafter")
    if not same_target(about["target"], about_target):
        theirs, ours = about["target"], about_target
        raise UserError(f"the drafter in {folder} was made for another target ({theirs['class']}, vocabulary {theirs['vocab_size']}, "
                        f"{theirs['num_hidden_layers']} layers, against {ours['class']}, {ours['vocab_size']}, {ours['num_hidden_layers']}): "
                        "train one for this target with train.py --target")
    if raw:
        drafter.temperature = 1.0
    return drafter


SEQUENCE = ("maxgram", "cascade")                                    # drafters that write a chain themselves
DRAFTERS = ("glide", "vanilla", *edd.VARIANTS, *SEQUENCE)
TREES = {"chain": cape.chain, "cape": cape.cape, "fixed": cape.fixed, "beam": cape.beam, "beam8": cape.beam, "drawn": cape.chain,
         "pct": pct.pct, "pct-cost": pct.pct, "pct-own": pct.pct, "pct-leaves": pct.pct, "vct": pct.vct, "eagle2": pct.eagle2}
OWN_DEPTH = {"pct", "pct-cost", "pct-own", "pct-leaves", "vct", "eagle2"}        # the others: --gamma
MOST_NODES = 511                                                     # verify.Target has room for 512, the root included


def settings(name, a, costs=None):
    """This run's settings of the tree builder `name`.  costs: s_d / s_t and the price of a node, for PCT."""
    more = {"beam": {"width": 4}, "beam8": {"width": 8},                                     # section 5.3 and Table 3 of GLIDE
            "cape": {"sizes": a.sizes, "edges": a.edges, "max_nodes": a.max_nodes},
            "fixed": {"size": a.fixed_size, "max_nodes": a.max_nodes},
            "pct": {"leaf": a.leaf}, "pct-leaves": {"leaf": 0},                              # Table 3 of EDD: w/o remove leaf nodes,
            "pct-own": {"leaf": a.leaf, "own": a.own},                                       # w/o expected time gain
            "pct-cost": {"node_price": costs["node_price"]} if costs else {}}.get(name, {})
    if name.startswith("pct"):
        return {**more, "width": a.width, "depth": a.depth, **({"cost": costs["cost"]} if costs else {})}
    return more if name in OWN_DEPTH else {**more, "gamma": a.gamma}


def load_stage(name, a, target, tokenizer):
    """A stage of a cascade: `name` is a folder of --checkpoint, or any folder or hub name of a language model with the target's vocabulary."""
    folder = Path(a.checkpoint) / name
    model, theirs = load_target(str(folder) if (folder / "config.json").exists() else name, a.dtype, a.device, a.attention, True, "the stage")
    ours, other = target.config.get_text_config().vocab_size, model.config.get_text_config().vocab_size
    if ours != other or tokenizer.get_vocab() != theirs.get_vocab() or model.config.is_encoder_decoder != target.config.is_encoder_decoder:
        raise UserError(f"--models: {name} has another vocabulary or another kind of model than the target ({type(model).__name__}, {other} tokens, "
                        f"against {type(target).__name__}, {ours}): stages of a cascade share both with the target")
    if model.num_parameters() >= target.num_parameters():
        print(f"bench.py: warning: the stage {name} has {model.num_parameters():,} weights, the target {target.num_parameters():,}: it will slow it down",
              file=sys.stderr)
    return model


def load_gram(a, vocab):
    """Max-Gram with the bigram of --bigram, or of --checkpoint where it has one."""
    path = Path(a.bigram) if a.bigram else Path(a.checkpoint) / "bigram.json"
    try:
        return maxgram.MaxGram(*(maxgram.read_bigram(path, vocab) if a.bigram or path.exists() else ()))
    except ValueError as why:
        raise UserError(f"--bigram: {why}") from None


def load_cascades(a, target, tokenizer, context):
    """{name in the table: (Cascade, names of its stages, their models)} for every --models; Max-Gram alone is one too."""
    vocab, loaded, found, lists = target.config.get_text_config().vocab_size, {}, {}, a.models or []
    if "maxgram" in a.drafter:
        found["maxgram"] = cascade.Cascade([], gram=load_gram(a, vocab), capacity=context, vocab=vocab), ["maxgram"], []
    for names, k in zip(lists, a.k or [None] * len(lists)):
        neural = [n for n in names if n != "maxgram"]
        loaded |= {n: load_stage(n, a, target, tokenizer) for n in neural if n not in loaded}
        models = [loaded[n] for n in neural]
        K = cascade.table2(k, len(neural), "maxgram" in names) if k else None
        c = cascade.Cascade(models, K, a.lenience if len(neural) > 1 else 1.0, load_gram(a, vocab) if "maxgram" in names else None, context, vocab)
        label = " ".join([f"cascade ({', '.join(Path(n).name for n in names)})", *(["k", *map(str, k)] if k and len(lists) > 1 else [])])
        found[label] = (c, names, models)
    return found


def builder(name, a, generator, costs=None, own=False):
    """The tree builder `name` as a function of (expand, root).  own: the drafter writes chains itself."""
    if own and name in ("chain", "drawn"):
        return partial(verify.proposal, **({"generator": generator} if name == "drawn" else {}))
    draws = {"pick": partial(cape.draw, generator=generator)} if name == "drawn" else {}
    return partial(TREES[name], **settings(name, a, costs), **draws)


def median_time(f, device, times=12):
    """Median seconds of f(), a few warm calls."""
    spent = []
    for _ in range(times):
        synchronize(device)
        start = time.perf_counter()
        f()
        synchronize(device)
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[2:])


@torch.inference_mode()
def stage_costs(a, target, c, names, models, ids):
    """Cost of a run of each stage over one of the target: {"measured", "ms": by weights, "given": --costs}; Max-Gram's is 0."""
    def step(t):
        if t.encoder_decoder:
            t.encode(ids)
        t.sync([t.start] if t.encoder_decoder else ids)
        return median_time(lambda: t.forward(torch.tensor(ids[-1:], device=a.device)), a.device)
    plain, free = step(target), [0.0] * (len(names) - len(c.stages))
    found = {"measured": [step(s) / plain for s in c.stages] + free,
             "ms": [s.model.num_parameters() / target.model.num_parameters() for s in c.stages] + free}
    if a.costs:
        found["given"] = [a.costs[list(models).index(n)] for n in names[:len(c.stages)]] + free
    return found


@torch.inference_mode()
def measure_costs(target, drafter, ids, a):
    """{"cost": s_d / s_t, "node_price": one more verified node}, in plain steps, from a few warm forwards of each."""
    median = partial(median_time, device=a.device)
    target.watch(drafter.needs)
    drafter.reset()
    target.sync(ids)
    drafter.begin(target.view())
    token, asked = torch.tensor(ids[-1:], device=a.device), [1]
    drafter.expand(token, [-1])

    def draft():                       # a frontier of three nodes, as PCT's are about
        drafter.expand(token.repeat(3), [sum(asked) - 1] * 3)
        asked.append(3)
    plain = median(lambda: target.forward(token))
    few, many = (median(lambda: target.forward(token.repeat(n), torch.arange(-1, n - 1)), times=8) for n in (4, 32))       # noqa: B023
    return {"cost": min(1.0, a.cost or median(draft) / plain), "node_price": max(0.0, (many - few) / 28 / plain)}


def sampling_of(a):
    """How to choose tokens, as verify.generate takes it."""
    return {"temperature": a.temperature, "top_k": a.top_k, "top_p": a.top_p, "seed": a.seed}


# ---------------------------------------------------------------- what a drafter's confidence is worth
def played(target, drafter, build, prompts, a, eos):
    """Yield (tree, the tokens that the output went on with after its root) of every round."""
    for _, ids, limit in tqdm(prompts, unit="prompt", dynamic_ncols=True, disable=None):
        trees = []

        def recording(expand, root, trees=trees):
            trees.append(build(expand, root))
            return trees[-1]
        out, at = verify.generate(target, drafter, recording, ids, limit, eos_token_id=eos, **sampling_of(a)), 1
        for tree, gained in zip(trees, out.runs):
            yield tree, out.tokens[at:at + gained]
            at += gained


def calibration(target, drafter, prompts, a, eos, length=10):
    """Chains of `length` drafts -> [(confidence, accepted?)] of every judged token (EDD section 3.2, GLIDE section 4.2).

    Tokens after the first rejection are left out: whether they would have been accepted depends on it.
    """
    found, confidence = [], []

    def build(expand, root):
        rows = []

        def recording(tokens, parents):
            rows.append(expand(tokens, parents))
            return rows[-1]
        tree = cape.chain(recording, root, length)
        confidence.append(torch.cat(rows)[:len(tree.tokens) - 1].max(1).values.tolist())
        return tree
    for n, (tree, went_on) in enumerate(played(target, drafter, build, prompts, a, eos)):
        for x, p, y in zip(tree.tokens[1:].tolist(), confidence[n], went_on):
            found.append((p, x == y))
            if x != y:
                break
    return found


def position_acceptance(target, drafter, build, prompts, a, eos):
    """-> [(drafted, accepted)] of each position of a chain (Cascade, Figures 2 and 3): accepted with all before it."""
    found = []
    for tree, went_on in played(target, drafter, build, prompts, a, eos):
        drafted = tree.tokens[1:].tolist()
        same = next((i for i, (x, y) in enumerate(zip(drafted, went_on)) if x != y), min(len(drafted), len(went_on)))
        cut = same == len(went_on) < len(drafted)                # the output ended here: later positions were not judged
        for i in range(same if cut else len(drafted)):
            found += [[0, 0]] * (i + 1 - len(found))
            found[i] = [found[i][0] + 1, found[i][1] + (i < same)]
    return found


def position_plot(name, found):
    """Figures 2 and 3 as text."""
    lines = [f"\n{name}: probability that a drafted token is accepted, by its position in the chain"]
    return "\n".join(lines + [f"  {i:3d}  {ok / n:.2f}  {n:6d}  {'#' * round(40 * ok / n)}".rstrip() for i, (n, ok) in enumerate(found, 1)])


def reliability(judged, bins=10):
    """-> ([{low, high, confidence, acceptance, count} of each bin], expected calibration error).  Bins are closed on the right.

    ECE = sum over bins of (count / all) |acceptance - mean confidence|  (Guo et al. 2017).
    """
    rows = []
    for b in range(bins):
        here = [(p, ok) for p, ok in judged if b < p * bins <= b + 1 or (b == 0 and p == 0)]
        rows.append({"low": b / bins, "high": (b + 1) / bins, "count": len(here),
                     "confidence": mean([p for p, _ in here]), "acceptance": mean([ok for _, ok in here])})
    error = sum(r["count"] * abs(r["acceptance"] - r["confidence"]) for r in rows if r["count"])
    return rows, error / max(1, len(judged))


def reliability_plot(name, rows, error):
    """The diagram as text: a bar of the bin's acceptance, and | where its mean confidence is."""
    lines = [f"\n{name}: expected calibration error {error:.3f} over {sum(r['count'] for r in rows)} drafted tokens (bar: accepted; |: confidence)"]
    for r in rows:
        bar = ""
        if r["count"]:
            bar = "#" * round(40 * r["acceptance"])
            at = round(40 * r["confidence"])
            bar = bar.ljust(at + 1)
            bar = f"{r['confidence']:.2f}  {r['acceptance']:.2f}  {r['count']:6d}  {bar[:at]}|{bar[at + 1:]}"
        lines.append(f"  ({r['low']:.1f}, {r['high']:.1f}]  {bar}".rstrip())
    return "\n".join(lines)


@torch.inference_mode()
def optimality(target, drafter, build, prompts, a, eos):
    """tree_optimality: joint probability of the nodes of a tree over that of the best as many among all that the drafter was
    asked about (every child, in the whole vocabulary, of every node that was expanded); over the rounds of a few prompts."""
    kept = best = 0.0
    for _, ids, limit in prompts:
        def judged(expand, root):
            nonlocal kept, best
            asked, at, rows = {}, [], []                   # (asked parent, token) -> number; joint of each asked node; joint of children

            def recording(tokens, parents):
                probs = expand(tokens, parents)
                for i, (x, parent) in enumerate(zip(tokens.tolist(), parents)):
                    asked[parent, x] = len(at)
                    at.append(rows[parent][x].item() if parent >= 0 else 1.0)
                    rows.append(at[-1] * probs[i].double())
                return probs
            tree = build(recording, root)
            where = []                                     # each tree node's number among the asked
            for x, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
                above = where[parent] if parent >= 0 else -1
                kept += rows[above][x].item() if parent >= 0 else 0.0
                where.append(asked.get((above, x)))
            best += torch.cat(rows).topk(len(where) - 1).values.sum().item()
            return tree
        verify.generate(target, drafter, judged, ids, min(limit, 48), eos_token_id=eos, **sampling_of(a))
    return kept / best if best else None


# ---------------------------------------------------------------- one row of the table
def expected_speedup(alpha, c, gamma):
    """E(Spd.) = (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1)): section 5.1, after Leviathan et al. 2023."""
    return sum(alpha ** i for i in range(gamma + 1)) / (gamma * c + 1)


def distinct_4grams(tokens):
    """Distinct / all 4-grams of one output; None where there is none."""
    grams = [tuple(tokens[i:i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else None


def mean(values):
    values = [v for v in values if v is not None]
    return sum(values) / len(values) if values else None


@dataclass
class Arm:
    """One way of decoding; results[i] is (seconds, Output) of prompt i.  run(ids, limit, eos) -> Output."""
    drafter: str
    tree: str
    run: callable
    results: dict = field(default_factory=dict)
    memory: int = 0
    optimality: float = None
    stages: tuple = ()                    # of a cascade
    K: list = None
    costs: dict = None                    # cost of a run of each stage: measured, by parameters ("ms"), as given

    @property
    def name(self):
        return f"{self.drafter} x {self.tree}" if self.tree else self.drafter


def row_of(arm, base, transformers_arm, which, a, gap=None):
    """One line of the JSON: `arm` over the prompts `which`, against the plain arm `base`."""
    done = [(arm.results[i], base.results[i], transformers_arm.results[i]) for i in which]
    outs = [o for (_, o), _, _ in done]
    seconds, tokens = sum(s for (s, _), _, _ in done), sum(len(o.tokens) for o in outs)

    def speed(result):
        return len(result[1].tokens) / result[0]
    ratios = [speed(x) / speed(b) for x, b, _ in done]
    low, mid, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    rounds = sum(o.rounds for o in outs) or None
    total = {k: sum(getattr(o, k) for o in outs) for k in ("draft", "verify", "other", "nodes", "accepted", "tested", "draft_forwards", "overlap")}
    spent = total["draft"] + total["verify"] + total["other"]
    steps = [(s - o.prefill, len(o.tokens) - 1) for _, (s, o), _ in done]
    target_s = sum(s for s, _ in steps) / max(1, sum(n for _, n in steps))
    chain = rounds and total["tested"] and all(o.chain for o in outs)
    alpha = total["accepted"] / total["tested"] if chain else None
    c = total["draft"] / total["draft_forwards"] / target_s if total["draft_forwards"] and not arm.stages else None
    tau = sum(sum(o.runs) for o in outs) / rounds if rounds and arm.tree else None
    wrong = [i for i in which if arm.results[i][1].tokens != base.results[i][1].tokens]
    depth = sum(o.depth for o in outs) / rounds if rounds and arm.tree else None
    exact = a.temperature == 0 or not any(o.drawn for o in outs) and (arm.tree or arm.drafter.startswith("plain"))
    stages = [sum(counts) for counts in zip(*(o.stage_runs for o in outs))]
    counts = [sum(o.rounds + 1 for o in outs), *stages]                  # every prompt's prefill is a run, as it is in plain decoding
    return {
        "target": str(a.target), "drafter": arm.drafter, "tree": arm.tree or None, "group": a.group_name, "dtype": a.dtype,
        "device": a.device, "threads": torch.get_num_threads(), "batch": 1, "seed": a.seed, "gamma": a.gamma, "depth": depth,
        "temperature": a.temperature, "prompts": len(done), "tokens": tokens, "tokens_per_second": tokens / seconds,
        "speedup": mid, "speedup_low": low, "speedup_high": high,
        "speedup_vs_generate": statistics.median(speed(x) / speed(t) for x, _, t in done),
        "tau": tau, "alpha": alpha, "alpha_overlap": total["overlap"] / total["tested"] if arm.tree == "drawn" and total["tested"] else None,
        "alpha_depth": tau / depth if tau and depth else None, "nodes": total["nodes"] / rounds if tau else None,
        "draft_forwards": total["draft_forwards"] / rounds if tau else None, "c": c,
        "expected_speedup": expected_speedup(alpha, c, a.gamma) if alpha is not None and c else None,
        "tree_optimality": arm.optimality, "stages": arm.stages or None, "K": arm.K, "runs": counts if rounds else None,
        **{f"swi_{how}": cascade.swi(tokens, counts, [1, *costs]) if arm.stages else None for how, costs in (arm.costs or {}).items()},
        "draft_ms": 1e3 * total["draft"] / rounds if rounds else None, "verify_ms": 1e3 * total["verify"] / rounds if rounds else None,
        "other_ms": 1e3 * total["other"] / rounds if rounds else None, "target_ms": 1e3 * target_s,
        **{f"share_{k}": total[k] / spent if rounds and spent else None for k in ("draft", "verify", "other")},
        "time_to_first_token": statistics.median(o.prefill for o in outs) if rounds else None, "peak_memory": arm.memory,
        "lossless": (not wrong) if exact else None, "first_divergence": gap if wrong and exact else None,
        "distinct_4grams": mean(distinct_4grams(o.tokens) for o in outs),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": sys.modules["transformers"].__version__},
    }


@torch.inference_mode()
def divergence(target, ids, ours, plain, prompt):
    """Where an output first leaves plain decoding's, and by how little the target preferred its own token there."""
    at = next((i for i, (x, y) in enumerate(zip(ours, plain)) if x != y), min(len(ours), len(plain)))
    found = {"prompt": prompt, "token": at, "logit_gap": None}
    if at < min(len(ours), len(plain)):
        target.reset()
        if target.encoder_decoder:
            target.encode(ids)
        logits = target.sync(([target.start] if target.encoder_decoder else ids) + plain[:at]).float()
        found["logit_gap"] = (logits[plain[at]] - logits[ours[at]]).item()
    return found


def table(rows):
    """The rows as text."""
    def show(value, form):
        return "-" if value is None else format(value, form)
    head_ = ["", "tok/s", "speedup", "vs generate()", "tau", "alpha", "nodes", "draft", "verify", "other", "ms/round", "lossless"]
    lines = [head_]
    for r in rows:
        shares = [f"{100 * r[f'share_{k}']:.0f}%" if r["tau"] else "-" for k in ("draft", "verify", "other")]
        ms = sum(r[f"{k}_ms"] for k in ("draft", "verify", "other")) if r["tau"] else None
        lossless = {True: "yes", False: "NO", None: "-"}[r["lossless"]]
        lines.append([r["drafter"] + (f" x {r['tree']}" if r["tree"] else ""), f"{r['tokens_per_second']:.1f}",
                      f"{r['speedup']:.2f}x [{r['speedup_low']:.2f}-{r['speedup_high']:.2f}]", f"{r['speedup_vs_generate']:.2f}x",
                      show(r["tau"], ".2f"), show(r["alpha"], ".3f"), show(r["nodes"], ".1f"), *shares, show(ms, ".1f"), lossless])
    wide = [max(len(line[i]) for line in lines) for i in range(len(head_))]
    return "\n".join("  ".join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(line, wide))).rstrip() for line in lines)


def shown(out, tokenizer):
    """A continuation with each accepted run in brackets (the papers' case studies colour them): [accepted]bonus."""
    text, at = tokenizer.decode(out.tokens[:1]), 1
    for gained in out.runs:
        drafted, bonus = out.tokens[at:at + gained - 1], out.tokens[at + gained - 1:at + gained]
        text += (f"[{tokenizer.decode(drafted)}]" if drafted else "") + tokenizer.decode(bonus)
        at += gained
    return text


# ---------------------------------------------------------------- the run
def baselines(a, model, target, stages, lookup):
    """Arms that every table has: plain decoding (on a CPU also padded to two queries) and transformers' generate(); and its
    assisted generation with each of `stages` {name: model}, and prompt lookup."""
    def plain(build):
        return lambda ids, limit, eos: verify.generate(target, None, build, ids, limit, eos_token_id=eos, **sampling_of(a))

    def library(ids, limit, eos, **more):
        torch.manual_seed(a.seed)
        how = {"do_sample": True, "temperature": a.temperature, "top_k": a.top_k or 0, "top_p": a.top_p or 1.0} if a.temperature else {
            "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        ids = torch.tensor([ids], device=a.device)
        with torch.inference_mode():
            got = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, eos_token_id=eos or None,
                                 pad_token_id=eos[0] if eos else 0, **how, **more)
        return verify.Output(got[0, 1 if target.encoder_decoder else ids.shape[1]:].tolist())
    arms = [Arm("plain", "", plain(verify.no_draft))]
    if a.device == "cpu" and not target.encoder_decoder:
        arms.append(Arm("plain, two queries", "", plain(verify.no_draft_padded)))
    helped = [Arm(f"assisted generation ({n})", "", partial(library, assistant_model=lm)) for n, lm in stages.items()]
    if lookup:
        helped.append(Arm("prompt lookup", "", partial(library, prompt_lookup_num_tokens=cascade.GRAM)))
    return arms, Arm("generate()", "", library), helped


def measure(arms, prompts, a, eos):
    """Run every arm on every prompt, prompt by prompt.  -> number of prompts that all arms have finished."""
    def timed(arm, ids, limit):
        synchronize(a.device)
        start = time.perf_counter()
        out = arm.run(ids, limit, eos)
        synchronize(a.device)
        return time.perf_counter() - start, out
    for arm in arms:                                                         # warm-up: kernels, allocator, caches
        timed(arm, prompts[0][1], min(16, a.max_new_tokens))
    bar = tqdm(total=len(prompts) * len(arms), unit="run", dynamic_ncols=True, disable=None)
    with bar, contextlib.suppress(KeyboardInterrupt):
        for i, (_, ids, limit) in enumerate(prompts):
            for arm in arms[i % len(arms):] + arms[:i % len(arms)]:          # nobody is always first
                if a.device.startswith("cuda"):
                    torch.cuda.reset_peak_memory_stats()
                arm.results[i] = timed(arm, ids, limit)
                peak = torch.cuda.max_memory_allocated() if a.device.startswith("cuda") else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                arm.memory = max(arm.memory, peak)
                seconds, out = arm.results[i]
                bar.set_postfix_str(f"{arm.name}: {len(out.tokens) / seconds:.1f} tokens/s, tau {out.tau:.2f}" if out.rounds else arm.name)
                bar.update()
    return min(len(arm.results) for arm in arms)


def show_acceptance(target, drafters, build, prompts, a, eos):
    """--calibration: the reliability diagram of every drafter, Figure 3(b) of EDD and Figure 1(b) of GLIDE; --position-acceptance:
    Figures 2 and 3 of Cascade, chains of 30 (a cascade's own: --k)."""
    print(f"target {a.target}, {a.dtype}, {a.device}, temperature {a.temperature:g}, {len(prompts)} prompts, up to {a.max_new_tokens} new tokens; "
          f"chains of {'10' if a.calibration else '30, or of a cascade'}")
    found = []
    for name, drafter in drafters.items():
        row = {"target": str(a.target), "drafter": name, "temperature": a.temperature, "seed": a.seed}
        if a.calibration:
            bins, error = reliability(calibration(target, drafter, prompts, a, eos))
            print(reliability_plot(name, bins, error))
            found.append({**row, "ece": error, "bins": bins})
        if a.position_acceptance:
            chain = build(name, "chain") if hasattr(drafter, "chain") else partial(cape.chain, gamma=30)
            positions = position_acceptance(target, drafter, chain, prompts, a, eos)
            print(position_plot(name, positions))
            found.append({**row, "positions": [{"position": i, "drafted": n, "accepted": ok} for i, (n, ok) in enumerate(positions, 1)]})
    if a.json:
        write_atomically(a.json, lambda p: p.write_text("".join(json.dumps(r) + "\n" for r in found)))
    return 0


def synchronize(device):
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def prepare_prompts(a, tokenizer, context, vocab):
    """[(group, ids, limit)], and a line about what was left out."""
    note = ""
    if a.prompts:
        found = [p for path in a.prompts for p in read_prompts(path)]
        if not found:
            raise UserError(f"{' '.join(a.prompts)} holds no prompt")
    elif (Path(a.target) / "held_out.json").exists():
        found, missing = held_out_prompts(a.target)
        note = f"; {missing} held-out modules are not in this interpreter, and skipped" if missing else ""
    else:
        found = [("math", question_text(q)) for q in MATH]
    if a.limit:                                   # as many of each group, in turn
        groups = {}
        for p in found:
            groups.setdefault(p[0], []).append(p)
        quota = {g: len(range(i, a.limit, len(groups))) for i, g in enumerate(groups)}
        spare = sum(max(0, quota[g] - len(ps)) for g, ps in groups.items())
        found = [p for g, ps in groups.items() for p in ps[:quota[g] + spare]][:a.limit]
    prompts, long = [], 0
    for i, (group, text) in enumerate(found):
        ids = encode(text, tokenizer)
        if not ids:
            raise UserError(f"prompt {i + 1} of {group} is empty: give at least one token")
        if max(ids) >= vocab:
            raise UserError(f"prompt {i + 1} of {group} has token {max(ids)}, but the target's vocabulary is {vocab}: the tokenizer is "
                            "not this target's")
        if len(ids) > context:
            if not a.skip_long:
                raise UserError(f"prompt {i + 1} of {group} has {len(ids)} tokens, but the target's context holds {context}: shorten "
                                "it, or leave such prompts out with --skip-long")
            long += 1
            continue
        prompts.append((group, ids, min(a.max_new_tokens, context - len(ids) + 1)))
    if not prompts:
        raise UserError(f"every prompt is longer than the target's context of {context} tokens")
    return prompts, note + (f"; {long} prompts longer than the context skipped" if long else "")


def parser():
    p = Parser(description="Decode with a target and any drafter x tree beside plain decoding, and print the table.")
    p.add_argument("--target", default=str(STAND_IN), help="folder or hub name of a decoder-only causal LM (default: the stand-in)")
    p.add_argument("--drafter", nargs="+", default=["glide"], help=f"any of: {' '.join(DRAFTERS)} (default: glide)")
    p.add_argument("--tree", nargs="+", default=["cape"], help=f"any of: {' '.join(TREES)} (default: cape); drawn is a drawn chain, for "
                   "--temperature above 0")
    p.add_argument("--checkpoint", default=str(HERE / "checkpoints"), help="folder of the drafter, or of one folder a drafter")
    p.add_argument("--models", nargs="+", action="append", help="stages of --drafter cascade, largest first: folders or hub names of small language models, "
                   "maxgram last; give it again for another cascade in the same run")
    p.add_argument("--k", nargs="+", type=int, action="append", help="Table 2's k11, or k11 k12 k22: row by row, cumulative (8 13 1 is Algorithm 1's K "
                   "[[8, 5, 10], [0, 1, 10], [0, 0, 10]], lower bounds); once for each --models")
    p.add_argument("--lenience", type=float, default=1.0, help="l of reviews by a cascade's models; the target never uses it")
    p.add_argument("--costs", nargs="+", type=float, help="cost of a run of each named model of the cascades over one of the target, for SWI as given (PW)")
    p.add_argument("--bigram", help="Max-Gram's bigram: made by maxgram.py bigram, or a flat JSON array (default: the checkpoint folder's)")
    p.add_argument("--position-acceptance", action="store_true", help="acceptance by draft position (chains of 30) instead of the table")
    p.add_argument("--prompts", nargs="+", help="files of prompts (default: heads of held-out modules and word problems)")
    p.add_argument("--limit", type=int, help="at most so many prompts")
    p.add_argument("--skip-long", action="store_true", help="leave out prompts longer than the context, with a count")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--gamma", type=int, default=cape.GAMMA, help="drafted positions (depth of the tree)")
    p.add_argument("--sizes", type=int, nargs="+", default=list(cape.SIZES), help="CAPE's S(p): extras for each bin of confidence")
    p.add_argument("--edges", type=float, nargs="*", default=list(cape.EDGES), help="CAPE's bins of confidence, closed on the right")
    p.add_argument("--max-nodes", type=int, default=cape.MAX_NODES, help="most nodes of CAPE and fixed, the root not counted")
    p.add_argument("--cost", type=float, help="s_d / s_t of PCT (default: measured at start)")
    p.add_argument("--width", type=int, default=pct.WIDTH, help="children of a node of PCT (Figure 6)")
    p.add_argument("--depth", type=int, default=pct.DEPTH, help="maximum depth of PCT")
    p.add_argument("--leaf", type=float, default=pct.LEAF, help="PCT removes leaves under this joint probability (pct-leaves: none)")
    p.add_argument("--own", type=float, default=0.3, help="pct-own expands nodes of at least this confidence of their own")
    p.add_argument("--raw-confidence", action="store_true", help="greedy decoding without the drafters' temperature scaling")
    p.add_argument("--calibration", action="store_true", help="reliability diagram of the drafter's confidence instead of the table")
    p.add_argument("--fixed-size", type=int, help="extras a position of --tree fixed (default: the mean of CAPE's sets, measured first)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    p.add_argument("--top-k", type=int)
    p.add_argument("--top-p", type=float)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16", "float64"])
    p.add_argument("--attention", default="sdpa", choices=["sdpa", "eager"])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's)")
    p.add_argument("--json", help="write one line a row to this file")
    p.add_argument("--show", action="store_true", help="print one continuation of each drafter x tree: [accepted]bonus")
    return p


def check(a):
    """Refuse what cannot work, before anything is loaded."""
    for kind, given, known in (("drafter", a.drafter, DRAFTERS), ("tree", a.tree, TREES)):
        if unknown := [x for x in given if x not in known and not (kind == "drafter" and kind_of(x) is edd)]:
            raise UserError(f"--{kind}: there is no {kind} {unknown[0]!r}; choose among {' '.join(known)}")
    for name, low in (("gamma", 1), ("width", 1), ("depth", 1), ("leaf", 0), ("own", 0), ("max_new_tokens", 1), ("limit", 1), ("fixed_size", 0),
                      ("top_k", 1), ("threads", 1), ("temperature", 0)):
        value = getattr(a, name)
        if value is not None and not value >= low:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be at least {low}")
    if a.cost is not None and not 0 < a.cost <= 1:
        raise UserError(f"--cost is {a.cost}: s_d / s_t must be above 0 and at most 1")
    if a.top_p is not None and not 0 < a.top_p <= 1:
        raise UserError(f"--top-p is {a.top_p}: it must be above 0 and at most 1")
    if ("cascade" in a.drafter) != bool(a.models):
        raise UserError("--drafter cascade and --models go together: name its stages, as in --models base small maxgram")
    for names in a.models or ():
        if "maxgram" in names[:-1] or len(set(names)) < len(names):
            raise UserError(f"--models {' '.join(names)}: name every stage once, largest first, maxgram last")
    if a.k and len(a.k) != len(a.models or ()):
        raise UserError(f"--k is given {len(a.k)} time(s) for {len(a.models or ())} --models: give it once for each, or not at all")
    for names, k in zip(a.models or (), a.k or ()):
        cascade.table2(k, len([n for n in names if n != "maxgram"]), "maxgram" in names)
    if not a.lenience >= 1:
        raise UserError(f"--lenience is {a.lenience}: it must be at least 1, which is none")
    if a.lenience > 1 and "drawn" in a.tree:
        raise UserError("--lenience above 1 leaves no true distribution to draw from: use --tree chain, or --lenience 1")
    stages = list(dict.fromkeys(n for names in a.models or () for n in names if n != "maxgram"))
    if a.costs and len(a.costs) != len(stages):
        raise UserError(f"--costs gives {len(a.costs)} number(s) for the models {' '.join(stages)}: give one for each, in that order")
    if "drawn" in a.tree and a.temperature == 0:
        raise UserError("--tree drawn draws its tokens: give --temperature above 0, or --tree chain for greedy decoding")
    if {"cape", "fixed"} & set(a.tree) and a.gamma > a.max_nodes:
        raise UserError(f"--gamma {a.gamma} exceeds the {a.max_nodes} nodes that CAPE verifies at most (--max-nodes)")
    if len(a.sizes) != len(a.edges) + 1 or a.edges != sorted(a.edges) or min(a.sizes) < 0:
        raise UserError(f"--sizes {a.sizes} and --edges {a.edges}: give ascending edges, and one more size than edges, none below 0")
    if max(TREES[t].bounds(**settings(t, a))[0] for t in a.tree) > MOST_NODES:
        raise UserError(f"--gamma {a.gamma} makes trees of more than the {MOST_NODES} nodes that the cache has room for")
    if a.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is available here; use --device cpu")


def report(a, arms, plain, library, prompts, finished, target):
    """Print a table for each group of prompts, and what does not fit into it -> the rows, those of all prompts first."""
    base = min(plain, key=lambda p: sum(p.results[i][0] for i in range(finished)))
    groups = {"all": range(finished)}
    for g in dict.fromkeys(g for g, _, _ in prompts[:finished]):
        groups[g] = [i for i in range(finished) if prompts[i][0] == g]
    rows = []
    for name, which in groups.items() if len(groups) > 2 else [next(iter(groups.items()))]:
        a.group_name = name
        for x in arms:
            bad = next((i for i in which if x.results[i][1].tokens != base.results[i][1].tokens), None)
            gap = divergence(target, prompts[bad][1], x.results[bad][1].tokens, base.results[bad][1].tokens, bad) if bad is not None else None
            rows.append(row_of(x, base, library, which, a, gap))
        print(f"\n{name}: {len(which)} prompts" if len(groups) > 2 else "")
        print(table(rows[-len(arms):]))
    whole = rows[:len(arms)]
    print(f"\nbaseline: {base.name}, {whole[arms.index(base)]['target_ms']:.2f} ms a token; distinct 4-grams of its output: "
          f"{whole[arms.index(base)]['distinct_4grams'] or 0:.0%}")
    for r in whole:
        name = r["drafter"] + (f" x {r['tree']}" if r["tree"] else "")
        runs = ", ".join(f"{n} {count}" for n, count in zip(["target", *r["stages"]], r["runs"])) if r["stages"] else ""
        facts = [("c = {:.3f}", r["c"]), ("E(Spd.) = {:.2f}", r["expected_speedup"]), ("sum min(p_T, p_D) = {:.3f}", r["alpha_overlap"]),
                 ("tree_optimality {:.3f}", r["tree_optimality"]), ("K = {}", r["K"]), ("runs: {}", runs),
                 ("SWI {:.2f} (costs measured here)", r.get("swi_measured")), ("SWI {:.2f} (MS: by weights)", r.get("swi_ms")),
                 ("SWI {:.2f} (--costs)", r.get("swi_given"))]
        if facts := [text.format(value) for text, value in facts if value]:
            print(f"{name}: " + "; ".join(facts))
        if r["first_divergence"]:
            d = r["first_divergence"]
            print(f"{name} leaves plain decoding at token {d['token']} of prompt {d['prompt'] + 1}"
                  + (f": the target's logits of the two tokens differ by {d['logit_gap']:.2g} there" if d["logit_gap"] is not None else ""))
    return rows


def run(argv=None):
    a = parser().parse_args(argv)
    check(a)
    if a.threads:
        torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    if Path(a.target).is_dir():
        a.target = os.path.relpath(a.target)          # what a table shows should not depend on the machine
    model, tokenizer = load_target(a.target, a.dtype, a.device, a.attention, encoder_decoder=True)
    if model.config.is_encoder_decoder and (set(a.drafter) - set(SEQUENCE) or set(a.tree) - {"chain", "drawn"} or a.calibration):
        raise UserError(f"{a.target} is an encoder-decoder model: it takes --drafter maxgram or cascade with --tree chain (relative positions of "
                        "its decoder follow the order of the cache, not the depth in a tree)")
    vocab, context = model.config.get_text_config().vocab_size, verify.Target(model, 1).context
    prompts, note = prepare_prompts(a, tokenizer, context, vocab)
    capacity = min(context, max(len(ids) + limit for _, ids, limit in prompts))
    target = verify.Target(model, capacity)
    eos = model.generation_config.eos_token_id
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    generator = torch.Generator(a.device)
    cascades = load_cascades(a, model, tokenizer, context)
    named = {n: m for _, names, models in cascades.values() for n, m in zip(names, models)}
    about = fingerprint(model) if set(a.drafter) - set(SEQUENCE) else None
    drafters = {name: load_drafter(name, a.checkpoint, model, about, context, a.raw_confidence) for name in dict.fromkeys(a.drafter) if name not in SEQUENCE}
    drafters |= {label: c for label, (c, _, _) in cascades.items()}

    if "fixed" in a.tree and a.fixed_size is None:
        outs = [verify.generate(target, next(iter(drafters.values())), builder("cape", a, generator), ids, min(limit, 64),
                                eos_token_id=eos, **sampling_of(a)) for _, ids, limit in prompts[:8]]
        a.fixed_size = max(0, round(sum(o.nodes for o in outs) / sum(o.rounds for o in outs) / a.gamma - 1))
        note += f"; fixed: {a.fixed_size} extras a position, the measured mean of CAPE's sets"
    costs = {}
    if any(t.startswith("pct") for t in a.tree):
        costs = {d: measure_costs(target, drafters[d], prompts[0][1], a) for d in drafters}
        note += "".join(f"; {d}: s_d / s_t = {c['cost']:.3f}, a verified node costs {c['node_price']:.3f} plain steps" for d, c in costs.items())

    def build(drafter, tree):
        generator.manual_seed(a.seed)
        return builder(tree, a, generator, costs.get(drafter), hasattr(drafters[drafter], "chain"))
    if a.calibration or a.position_acceptance:
        return show_acceptance(target, drafters, build, prompts, a, eos)

    def arm(drafter, tree):
        def decode(ids, limit, eos):
            return verify.generate(target, drafters[drafter], build(drafter, tree), ids, limit, eos_token_id=eos, **sampling_of(a))
        c, names, _ = cascades.get(drafter, (None, (), ()))
        return Arm(drafter, tree, decode, stages=names, K=c and c.K, costs=c and stage_costs(a, target, c, names, named, prompts[0][1]))
    uses_gram = any("maxgram" in names for _, names, _ in cascades.values())
    plain, library, helped = baselines(a, model, target, named, uses_gram and not target.encoder_decoder)
    ours = [arm(d, t) for d in drafters for t in dict.fromkeys(a.tree)]
    arms = [*plain, library, *helped, *ours]
    where = torch.cuda.get_device_name() if a.device.startswith("cuda") else f"{torch.get_num_threads()} threads"
    print(f"target {a.target}, {a.dtype}, {a.device} ({where}), gamma {a.gamma}, temperature {a.temperature:g}, {len(prompts)} prompts, "
          f"up to {a.max_new_tokens} new tokens{note}")
    finished = measure(arms, prompts, a, eos)
    if not finished:
        raise KeyboardInterrupt

    for x in ours:
        if hasattr(drafters[x.drafter], "chain") and x.tree in ("chain", "drawn"):
            continue                                             # nobody was asked for distributions
        x.optimality = optimality(target, drafters[x.drafter], build(x.drafter, x.tree), prompts[:4], a, eos)
    rows = report(a, arms, plain, library, prompts, finished, target)
    if a.show:
        for x in ours:
            print(f"\n--- {x.name}, {prompts[0][0]} prompt 1, tau {x.results[0][1].tau:.2f}: [accepted]bonus\n{shown(x.results[0][1], tokenizer)}")
    if a.json:
        write_atomically(a.json, lambda p: p.write_text("".join(json.dumps(r) + "\n" for r in rows)))
    if finished < len(prompts):
        print(f"interrupted: {finished} of {len(prompts)} prompts are in the table", file=sys.stderr)
        return 130
    return 0


def main(argv=None):
    """Exit status: 0; 2 after one sentence about a user's mistake; 130 after an interruption."""
    try:
        return run(argv)
    except UserError as why:
        print(f"bench.py: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench.py: interrupted before there was anything to report", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
