"""Train drafters for any target.  (GLIDE, arXiv 2402.02082: sections 4.1, 5.1, app. A; EDD: 3.1, app. B)

    python train.py glide edd --target lmsys/vicuna-7b-v1.5 --template vicuna --data sharegpt.json
    torchrun --nproc-per-node 8 train.py glide edd --data ...      # several GPUs, recipes: docs/training.md

The idea.  A drafter learns to predict the next token while the target stays frozen.  GLIDE reads the target's
keys and values, EDD its hidden states, so each step needs one forward of the target, which all drafters of a
run share.  A drafter is a module with loss(batch):

    batch       shape            meaning
    ids         (B, T)           token ids, position 0 ... T-1; a document each, padded on the right
    learn       (B, T)           bool: row i predicts a token i + 1 that is learned from
    count       ()               such rows of the whole step: a sum of losses is divided by it
    sum         function         in_chunks: sums a loss over rows, with few logits in memory at a time
    kv[l]       2 x (B,H,T,d)    keys and values of the target's layer l, as its cache holds them
    hidden[k]   (B, T, D)        hidden_states[k], as Hugging Face counts: the last one is normed
    logits      (B, T, V)        what the target predicts after each id; None where no loss reads them
    block       int or None      EDD's block length; None: drawn from `random`
    random      numpy Generator  the same for each drafter of a step, so that all draw the same block

Differences from the papers:
 1. A row is one document, or a piece of a long one.  Steps have equally many tokens, of all kinds of text, in
    an order that (seed, epoch) alone decides.
 2. GLIDE and EDD learn the target's distribution (KL), and matrices learn by Muon.  The papers' own: GLIDE
    --loss ce --optimizer adamw --batch 64 --norm no, EDD --optimizer adamw --lr 1e-4.  --init goes on with
    trained drafters: a second stage, on other data.
 3. Each drafter gets a temperature, fitted on the target's own greedy text along drafted chains, up to the
    first rejection: there trees can trust its confidence.
"""
import argparse
import math
import sys
import time
from collections import namedtuple
from functools import partial
from pathlib import Path

from data import early

if __name__ == "__main__":
    early.stops("train.py")

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import edd
from data import prepare, read
from data.read import UserError
from runtime import families, load
from training import drafters, jobs
from training.jobs import place, say
from training.muon import Muon
from training.walk import Evaluation, prompts_of

WORK = Path(__file__).resolve().parent / "work"
LOGITS = 2 ** 25                                  # numbers: so many logits of a drafter are held at a time
WARMUP, CLIP = 0.025, 1.0                         # a fraction of the steps; the largest norm of a gradient
LOWER = "lower --lr and go on with --resume"
MOST = 1e37                                       # a flag's number: float32 has no tenfold of it
TRIALS = 5                                        # steps that --dtype auto times of each type
FUSED = {"qkv": 3, "up": 2}                       # matrices that stand side by side in one weight of GLIDE's
# The flags that all training has, checkpoints/make.py's too: name, type or choices, default, meaning.
FLAGS = (
    ("target", str, str(load.STAND_IN), "folder or hub name of the target"),
    ("revision", str, None, "of the target on the hub: a branch, a tag, a commit"),
    ("trust-remote-code", bool, False, "run the target's own code, too"),
    ("shard-target", bool, False, "spread the target over the processes (FSDP2)"),
    ("device", str, "cuda" if torch.cuda.is_available() else "cpu", "cpu or cuda"),
    ("template", str, None, "chat format: plain, vicuna, a Jinja file; when left out the tokenizer's own"),
    ("init", str, None, "folder of drafters to start from (a second stage, on other data)"),
    ("out", str, str(WORK / "drafters"), "folder to save under"),
    ("work", str, str(WORK / "training"), "folder for a run's tokens, state and log"),
    ("resume", bool, False, "go on with the interrupted run in --work"),
    ("overwrite", bool, False, "replace an unfinished run in --work, and drafters in --out"),
    ("steps", int, None, "one pass over the data when left out; 0: what --init has is only measured"),
    ("every", int, 200, "steps between two savings of the state, and two evaluations"),
    ("batch", int, 8, "a step has so many times --length tokens, of all processes"),
    ("micro", int, 2048, "tokens a forward, with padding; a step takes as many as it needs"),
    ("length", int, 512, "tokens of a document that are seen together, at most"),
    ("lr", float, None, "peak learning rate; when left out 5e-4 sqrt(4096 / the target's width)"),
    ("optimizer", ("muon", "adamw"), "muon", "of hidden matrices; all else learns by AdamW"),
    ("loss", ("kl", "ce"), "kl", "to the target's distribution, or cross entropy of the text"),
    ("dtype", ("auto", "float32", "bfloat16"), "auto", "autocast of drafters; auto: the faster one"),
    ("width", int, None, "d_D, GLIDE's hidden size; the target's when left out"),
    ("layers", int, 1, "N_D, GLIDE's layers"),
    ("layer", int, None, "target layer that GLIDE's top layer reads, from 0; the top one when left out"),
    ("norm", ("yes", "no"), "yes", "a norm before GLIDE's glimpse; the paper has none"),
    ("block", int, 5, "L, block length of GLIDE's mask"),
    ("hidden", int, edd.HIDDEN, "which of the target's hidden_states EDD reads"),
    ("seed", read.seed, 0, "of weights and of the order"),
)
# Flags that say what a drafter is, and where its config has that
MADE = {flag: flag for flag in "loss width layers norm block hidden".split()} | {"layer": "layers_read"}
# Tokens and pieces to learn from; tokens, pieces and prompts that are held out; names of the kinds of text
Data = namedtuple("Data", "tokens pieces held_tokens held prompts kinds")

# ---------------------------------------------------------------- the frozen target's forward
def in_chunks(rows, loss, learn, x, *others):
    """Sum of loss(x, *others) over the rows of x (B, T, D) and others (B, T, ...) that learn (B, T) chooses.

    Where they are more than `rows`, a chunk's logits are forgotten, and computed again for the gradient.
    """
    chosen = learn.flatten().nonzero()[:, 0]                           # (n,)
    x = x.flatten(0, 1)[chosen]                                        # (n, D)

    def of_chunk(x, chunk):
        of_rows = [other.flatten(0, 1)[chunk] for other in others]
        return loss(x, *of_rows)
    if len(chosen) <= rows:
        return of_chunk(x, chosen)
    total = 0
    # Chunk by chunk: the (n, V) logits are never all in memory.
    for part in zip(x.split(rows), chosen.split(rows)):
        total = total + checkpoint(of_chunk, *part, use_reentrant=False, preserve_rng_state=False)
    return total

class Kept(transformers.DynamicCache):
    """A cache that keeps the rows of the layers that somebody reads; None: of all."""
    def __init__(self, layers):
        super().__init__()
        self.wanted = layers
        self.rows = {}

    def update(self, k, v, layer_idx, *args, **kwargs):
        if self.wanted is None or layer_idx in self.wanted:
            self.rows[layer_idx] = k, v
        return k, v

def frozen_forward(model, ids, hidden=(), kv=None, logits=True, learn=None, count=None):
    """One forward of the frozen target -> batch.  hidden, kv: what somebody reads (kv None: every layer).

    logits: whether somebody reads them.  learn None: from all rows but the last; count None: of this batch.
    """
    if learn is None:
        learn = torch.ones_like(ids, dtype=torch.bool)
        learn[:, -1] = False
    if count is None:
        count = learn.sum().clamp(min=1)
    cache = Kept(kv)
    # In the target's own precision: autocast would round its logits, and drafters would learn the ties.
    with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
        found = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=0 if logits else 1,
                      output_hidden_states=bool(hidden))
    rows = max(1, LOGITS // model.config.get_text_config().vocab_size)
    return {
        "ids": ids,
        "learn": learn,
        "count": count,
        "sum": partial(in_chunks, rows),
        "kv": cache.rows,
        "hidden": {k: found.hidden_states[k] for k in hidden},
        "logits": found.logits if logits else None,
    }

def read_by(models):
    """What of the target's forward draft models read, as frozen_forward takes it."""
    hidden, kv, logits = set(), set(), False
    for module in models.values():
        c = module.config
        if getattr(c, "encoding", False):                # EDD and its baselines
            hidden.add(c.hidden)
        kv.update(getattr(c, "layers_read", ()))         # GLIDE
        logits |= getattr(c, "loss", "ce") != "ce"
    return {"hidden": hidden, "kv": kv, "logits": logits}

# ---------------------------------------------------------------- a step: all drafters from one forward
class Together(torch.nn.Module):
    """All draft models as one, which DistributedDataParallel wraps."""
    def __init__(self, models):
        super().__init__()
        self.models = torch.nn.ModuleDict(models)

    def forward(self, batch, seed):
        losses = {}
        for name, module in self.models.items():
            batch |= {"block": None, "random": np.random.default_rng(seed)}
            losses[name] = module.loss(batch)
        return losses

def losses_of(models, forward, data, a):
    """-> losses(step), which yields {name: loss} of each part of the step's pieces, by the step alone.

    forward(ids, learn, count): frozen_forward of the target.
    """
    rank, processes = place()
    engine = Together(models)
    if dist.is_initialized():
        engine = torch.nn.parallel.DistributedDataParallel(engine)
    sizes, tokens = data.pieces[:, 1], a.batch * a.length              # tokens: of a step
    steps = prepare.steps_of(sizes, tokens)                            # of an epoch
    orders = {}                                                        # {epoch: [numbers of pieces] a step}

    def losses(step):
        epoch = step // steps
        if epoch not in orders:
            orders.clear()
            orders[epoch] = prepare.order(sizes, tokens, a.seed + 1, epoch)
        chosen = data.pieces[orders[epoch][step % steps]]                          # of all processes
        _, learn = prepare.gather(data.tokens, chosen)
        # DistributedDataParallel takes the mean over processes, and the sum is meant.
        count = max(1, learn.sum().item()) / processes
        parts = prepare.parts_of(chosen, a.micro * processes)
        for i, part in enumerate(parts):
            mine = part[rank::processes]
            ids, learn = prepare.gather(data.tokens, mine if len(mine) else part[:1])
            if not len(mine):                                          # more processes than pieces
                learn[:] = False
            batch = forward(ids.to(a.device), learn=learn.to(a.device), count=count)
            if processes > 1:                                          # gradients meet once a step
                engine.require_backward_grad_sync = i == len(parts) - 1
            yield engine(batch, [a.seed + 3, step])
        a.spent += int(chosen[:, 1].sum())
    return losses

# ---------------------------------------------------------------- the loop that every training shares
def optimizers(module, kind):
    """AdamW with the official code's betas; kind "muon": hidden matrices by Muon, the rest by AdamW."""
    hidden, rest = [], []
    for name, weight in module.named_parameters():
        if kind == "muon" and weight.ndim == 2 and "embed" not in name and "head" not in name:
            hidden.append((weight, FUSED.get(name.split(".")[-2], 1)))
        else:
            rest.append(weight)
    found = [torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.01)] if rest else []
    if hidden:
        found.append(Muon(hidden, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return found

def cosine(step, steps):
    """Learning rate factor: linear warm-up, then half a cosine to 0."""
    ramp = max(1, round(steps * WARMUP))
    if step < ramp:
        return (step + 1) / ramp
    return 0.5 * (1 + math.cos(math.pi * (step - ramp) / (steps - ramp)))

def add_gradients(losses, models, a):
    """Backward of all parts of a step, losses: of each -> {name: loss of the step}."""
    found = dict.fromkeys(models, 0.0)
    while True:
        # The forwards run in here: a generator's body runs where next() is called.
        with torch.autocast(torch.device(a.device).type, torch.bfloat16, enabled=a.dtype == "bfloat16"):
            part = next(losses, None)
        if part is None:
            return found
        sum(part.values()).backward()
        found = {name: found[name] + part[name].detach() for name in models}

def faster_type(losses, models, learners, a):
    """float32 or bfloat16: the one whose steps take less time; some CPUs only imitate bfloat16."""
    seconds, spent = {}, a.spent
    for a.dtype in ("float32", "bfloat16"):
        times = []
        for step in range(TRIALS):
            began = jobs.clock(a.device)
            add_gradients(losses(step), models, a)
            times.append(jobs.clock(a.device) - began)
        seconds[a.dtype], = jobs.mean([float(np.median(times))], a.device)
    for learner in learners:
        learner.zero_grad()
    a.spent = spent
    say(", ".join(f"{name} {took:.2f} s a step" for name, took in seconds.items()))
    return min(seconds, key=seconds.get)

def finite(module):
    """Whether all weights are numbers."""
    return all(torch.isfinite(weight).all() for weight in module.parameters())

def fit(models, losses, evaluate, a, state):
    """Train the modules {name: module} with the flags `a` -> {name: last evaluation}.

    losses(step) yields {name: loss} of each part of a step, by the step alone, and adds its tokens to
    a.spent.  evaluate() -> {name: {metric: value}}, with an "alpha".  state: a jobs.State.
    """
    together = torch.nn.ModuleDict(models)
    learners = optimizers(together, a.optimizer)         # the rate is set at each step
    start, a.spent = state.restore(a, together, learners)
    if a.dtype == "auto":
        together.train()
        a.dtype = faster_type(losses, models, learners, a) if a.steps else "float32"
    log, seen = jobs.Log(a), a.spent

    def stop(why):
        """All processes come here; one says why."""
        raise UserError(why) if place()[0] == 0 else SystemExit(2)

    bar = tqdm(range(start, a.steps + 1), total=a.steps, initial=start, unit="step", disable=place()[0] > 0)
    with jobs.interruptible() as asked, bar:
        for step in bar:
            if step in (start, a.steps) or step % a.every == 0:
                for name, module in models.items():
                    if not finite(module):
                        stop(f"step {step}: the last update made weights of {name} infinite: {LOWER}")
                rate = log.rate()
                together.eval()
                metrics = evaluate()
                log.write(step, rate, metrics)
                log.begin()
            if step == a.steps:
                break
            together.train()
            found = add_gradients(losses(step), models, a)
            *values, stopped = jobs.mean([*found.values(), len(asked)], a.device)
            log.losses.append(dict(zip(models, values)))
            for (name, module), loss in zip(models.items(), values):
                norm = torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP).item()
                if not math.isfinite(loss + norm):
                    advice = LOWER if step > start else "no --lr mends that"
                    stop(f"step {step}: loss of {name} is {loss}, the gradient {norm}: {advice}")
            # Saved before the update: these weights gave a finite loss, so going on from them works.
            if step % a.every == 0 or stopped:
                state.save(step, seen, a, together, learners)
            if stopped:
                stop(f"stopped after {step} of {a.steps} steps: the same with --resume goes on")
            for learner in learners:
                for group in learner.param_groups:
                    group["lr"] = a.lr * cosine(step, a.steps)
                learner.step()
                learner.zero_grad()
            seen = a.spent
            shown = [f"{name} loss {loss:.3f} alpha {metrics[name]['alpha']:.3f}"
                     for name, loss in zip(models, values)]
            bar.set_postfix_str(f"{log.rate()} tokens/s, {', '.join(shown)}", refresh=False)
    state.save(a.steps, seen, a, together, learners)
    return metrics

# ---------------------------------------------------------------- command line
def add_flags(parser, names):
    """The flags of FLAGS that have these names."""
    for name, kind, default, meaning in FLAGS:
        takes = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        if kind is bool:
            takes = {"action": "store_true"}
        if name in names:
            parser.add_argument(f"--{name}", **takes, default=default, help=meaning)

def check(a):
    """Refuse flags that cannot work."""
    for name in ("batch", "micro", "length", "lr", "width", "layers", "block", "every"):
        value = getattr(a, name, None)
        if value is not None and not 0 < value < MOST:
            raise UserError(f"--{name} is {value}: it must be above 0, and below {MOST}")
    if a.steps is not None and a.steps < (0 if a.init else 1):
        raise UserError(f"--steps is {a.steps}: it must be above 0 (or 0 with --init, to measure alone)")
    if a.length <= a.block + 1:
        raise UserError(f"--length {a.length} must be longer than a block of {a.block}, and a token more")
    load.check_device(a.device)

def load_target(a):
    """-> the frozen target, whole or spread over the processes, and its tokenizer."""
    dtype = "auto" if a.device.startswith("cuda") else "float32"
    if a.shard_target and dist.is_initialized():
        from training import shard
        more = {"revision": a.revision, "trust_remote_code": a.trust_remote_code}
        tokenizer = transformers.AutoTokenizer.from_pretrained(a.target, **more)
        return shard.spread(a.target, dtype, a.device, a.revision, a.trust_remote_code), tokenizer
    target, tokenizer = load.load_target(a.target, dtype, a.device, revision=a.revision,
                                         trust=a.trust_remote_code)
    families.AnyTarget(target)                           # refuses what cannot be decoded with
    return target.requires_grad_(False), tokenizer

def load_data(a, tokenizer, vocab):
    """--data, prepared now or before -> Data.  From here on a.data stands for its content."""
    template, folder = read.template_of(a.template, tokenizer), Path(a.data[0])
    asked = None
    if prepare.is_prepared(a.data):
        meta = prepare.meta_of(folder)
        if meta["vocabulary"] != prepare.fingerprint(tokenizer) or meta["template"] != template:
            raise UserError(f"--data: {folder} was prepared with another tokenizer or --template: prepare it "
                            "again")
    else:
        folder = Path(a.work) / "data"
        if a.resume and prepare.is_prepared([folder]):
            # What the run has learned from stays there; restore() refuses other text.
            asked = prepare.key_of(a.data, tokenizer, template)
        elif place()[0] == 0:
            prepare.prepare(a.data, tokenizer, folder, template, vocab)
        jobs.meet()
        meta = prepare.meta_of(folder)
    a.data = asked or meta["key"]
    (tokens, index), (held_tokens, held_index) = (prepare.open_split(folder, x) for x in prepare.SPLITS)
    pieces, held = (prepare.pieces_of(rows, a.length) for rows in (index, held_index))
    if pieces[:, 1].sum() <= a.length:
        raise UserError(f"--data has too few tokens for --length {a.length}: more text, or less --length")
    shortest = a.block + 2                               # tokens of which something can be measured
    held = held[held[:, 1] >= shortest]
    prompts = prompts_of(held_tokens, held_index, a.length, shortest)
    if not len(held) or not len(prompts):
        say("too little text is held out: drafters are measured on what they are trained on")
        held_tokens, held = tokens, pieces
        prompts = prompts_of(tokens, index, a.length, shortest=2)
    if not len(prompts):
        raise UserError(f"--length {a.length}: no chat's first answer begins early enough to be measured: "
                        "more --length")
    return Data(tokens, pieces, held_tokens, held, prompts, meta["kinds"])

def how_made(a, metrics, **more):
    """What training.json says: the command, seed, tokens seen, date, validation figures."""
    about = {name: getattr(a, name) for name in ("command", "run", "seed", "steps")}
    about["date"] = time.strftime("%Y-%m-%d")
    about["tokens_seen"] = a.spent
    about["validation"] = metrics
    return about | more

def load_drafter(name, target, mine, a):
    """-> a draft model, fresh or from --init, and how that was made.  mine: the target's fingerprint."""
    try:
        if not a.init:
            return drafters.fresh(name, target, a), None
        module, before = drafters.trained(name, target, a)
        asked = [flag for flag, _, default, _ in FLAGS if flag in MADE and getattr(a, flag) != default]
        wanted = drafters.setting(drafters.fresh(name, target, a)) if asked else {}
    except ValueError as why:
        raise UserError(str(why)) from None
    if load.relation(before["target"], mine) == "another":
        raise UserError(f"--init: the drafter {name} in {a.init} was made for another target")
    # What it is stays: a flag that asks for something else would do nothing.
    found = drafters.setting(module)
    for flag in asked:
        key = MADE[flag]
        if wanted.get(key) != found.get(key):
            raise UserError(f"--init: the drafter {name} in {a.init} was not made with --{flag} "
                            f"{getattr(a, flag)}: leave that out, or train without --init")
    return module, before

def parser():
    p = read.Parser(description="Train drafters.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("what", nargs="+", help=f"any of: {drafters.NAMES}")
    p.add_argument("--data", nargs="+", required=True, help="files or folders, or one that prepare.py made")
    add_flags(p, [name for name, *_ in FLAGS])
    return p

def run(argv):
    a = parser().parse_args(argv)
    a.command = " ".join(["python train.py", *argv])
    unknown = [name for name in a.what if not drafters.named(name)]
    if unknown:
        raise UserError(f"cannot train {' '.join(unknown)}: name drafters among {drafters.NAMES}")
    check(a)
    state = jobs.State(a, a.what)
    jobs.join(a)
    target, tokenizer = load_target(a)
    c = target.config.get_text_config()
    a.lr = a.lr or 5e-4 * math.sqrt(4096 / c.hidden_size)
    context = getattr(c, "max_position_embeddings", None) or a.length
    if a.length > context:
        raise UserError(f"--length {a.length} is more than the target's context of {context}")
    data = load_data(a, tokenizer, c.vocab_size)
    if a.steps is None:                                  # one epoch
        a.steps = prepare.steps_of(data.pieces[:, 1], a.batch * a.length)
    mine, models, before = load.fingerprint(target, tokenizer), {}, {}
    mine["class"] = mine["class"].removeprefix("FSDP")   # which --shard-target puts before the name
    for name in a.what:
        models[name], before[name] = load_drafter(name, target, mine, a)
    forward = partial(frozen_forward, target, **read_by(models))
    evaluate = partial(Evaluation(forward, target, data, a), models)
    metrics = fit(models, losses_of(models, forward, data, a), evaluate, a, state)
    for name, model in models.items() if place()[0] == 0 else ():
        folder = Path(a.out) / name
        kind = "glide" if name.startswith("glide") else name
        about = how_made(a, metrics[name], kind=kind, target=mine, init=before[name])
        drafters.save(folder, model, tokenizer, about)
        print(f"saved {folder}")

def main(argv):
    """Exit status: 0; 2 after one sentence, about a mistake or Ctrl-C."""
    return jobs.main(argv, run, "train.py")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
