"""Train drafters for any target.  (GLIDE, arXiv 2402.02082: 4.1, 5.1, app. A; EDD: 3.1, app. B)

    python train.py glide edd --target lmsys/vicuna-7b-v1.5 --template vicuna --data sharegpt.json
    torchrun --nproc-per-node 8 train.py glide edd --data ...      # recipes: docs/training.md

The idea.  A drafter learns to predict the next token while the target stays frozen.  GLIDE reads
the target's keys and values, EDD its hidden states, so each step needs one forward of the target,
which all drafters of a run share.  A drafter is a module with loss(batch):

    batch       shape            meaning
    ids         (B, T)           token ids, position 0 ... T-1; a document each, padded on the right
    learn       (B, T)           bool, the loss mask: the token after position i is a label
    count       ()               labels of the whole step: a sum of losses is divided by it
    sum         function         in_chunks: sums a loss over positions, with few logits in memory
    kv[l]       2 x (B,H,T,d)    keys and values of the target's layer l, as its cache holds them
    hidden[k]   (B, T, D)        hidden_states[k], as Hugging Face counts: the last one is normed
    logits      (B, T, V)        what the target predicts after each id; None if no loss reads them
    block       int or None      EDD's block length; None: drawn from `random`
    random      numpy Generator  the same for each drafter of a step: all draw the same block

Differences from the papers:
 1. A row of a batch is one document, or a piece of a long one.  Steps have equally many tokens, of
    all kinds of text, in an order that (seed, epoch) alone decides.
 2. GLIDE and EDD learn the target's distribution (KL), and matrices learn by Muon.  As in the
    papers: GLIDE --loss ce --optimizer adamw --batch 64 --norm no, EDD --optimizer adamw --lr 1e-4.
    GLIDE's embedding and head start as the target's where the widths agree; the paper's are random.
    --init goes on with trained drafters: a second stage, on other data.
 3. Each drafter gets a temperature, fitted on the target's own greedy text along drafted chains, up
    to the first rejection: there trees can trust its confidence.
"""
import argparse
import json
import math
import sys
import time
from collections import namedtuple
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from beyond.words import frequent_words
from training import prepare
from runtime import text as read
from runtime.text import UserError
from runtime import targets, load
from training import drafters, flags, state as jobs
from training.features import Features, folder_in
from training.forward import frozen_forward, read_by
from training.state import place, say
from training.muon import optimizers
from training.evaluate import Evaluation, prompts_of
from training.words import head_of, share_words

WARMUP = 0.025                             # of the steps: the learning rate rises
CLIP = 1.0                                 # the largest norm of a drafter's gradient
TRIALS = 5                                 # steps that --dtype auto times of each type
LOWER = "lower --lr and go on with --resume"
# Tokens and pieces to learn from; tokens, pieces and prompts that are held out; kinds of text
Data = namedtuple("Data", "tokens pieces held_tokens held prompts kinds")

# ---------------------------------------------------------------- a step: all drafters, one forward
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

class Steps:
    """steps(step) -> the forwards of a step: functions, each of which returns {name: loss}.

    A step's pieces are read in parts that fit in memory; the number of the step decides them.
    forward(ids, learn, count): frozen_forward of the target; features: the same, kept on the disk.
    """
    def __init__(self, models, forward, data, a, features=None):
        self.forward, self.data, self.a, self.features = forward, data, a, features
        self.engine = Together(models)
        if dist.is_initialized():
            self.engine = DistributedDataParallel(self.engine)
        self.sizes = data.pieces[:, 1]
        self.tokens = a.batch * a.length                               # of a step
        self.in_epoch = prepare.steps_of(self.sizes, self.tokens)
        self.epoch, self.order = None, None

    def __call__(self, step):
        pieces = self.pieces(step)
        rank, processes = place()
        labels = prepare.labels_in(self.data.tokens, pieces)
        # Gradients are the sum over all labels divided by their number, whatever process has them.
        # DistributedDataParallel takes the mean over processes: that divides by `processes` again.
        count = max(1, labels) / processes
        parts = prepare.parts_of(pieces, self.a.micro * processes)
        self.a.spent += int(pieces[:, 1].sum())
        forwards = []
        for number, part in enumerate(parts, 1):
            is_last = number == len(parts)
            forwards.append(partial(self.losses, step, part, count, is_last))
        return forwards

    def pieces(self, step):
        """The pieces that all processes learn from in a step, (n, 3)."""
        epoch, number = divmod(step, self.in_epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = prepare.order(self.sizes, self.tokens, self.a.seed + 1, epoch)
        return self.data.pieces[self.order[number]]

    def losses(self, step, part, count, is_last):
        """One forward of the target and of each drafter over this process's share of a part."""
        rank, processes = place()
        mine = part[rank::processes]
        idle = len(mine) == 0                                          # fewer pieces than processes
        mine = part[:1] if idle else mine
        ids, learn = prepare.gather(self.data.tokens, mine)
        if idle:
            learn[:] = False                       # the others wait for a forward
        forward = partial(self.features, mine) if self.features else self.forward
        batch = forward(ids.to(self.a.device), learn=learn.to(self.a.device), count=count)
        if processes > 1:
            self.engine.require_backward_grad_sync = is_last           # gradients meet once a step
        return self.engine(batch, [self.a.seed + 3, step])

def add_gradients(forwards, models, a):
    """Forward and backward of each part of a step -> {name: loss of the step}."""
    total = dict.fromkeys(models, 0.0)
    device = torch.device(a.device).type
    for forward in forwards:
        with torch.autocast(device, torch.bfloat16, enabled=a.dtype == "bfloat16"):
            losses = forward()
        sum(losses.values()).backward()
        for name, loss in losses.items():
            total[name] = total[name] + loss.detach()
    return total

# ---------------------------------------------------- the loop that every training shares
def cosine(step, steps):
    """Learning rate factor: linear warm-up, then half a cosine to 0."""
    ramp = max(1, round(steps * WARMUP))
    if step < ramp:
        return (step + 1) / ramp
    return 0.5 * (1 + math.cos(math.pi * (step - ramp) / (steps - ramp)))

def faster_type(steps, models, learners, a):
    """float32 or bfloat16: the one whose steps take less time; some CPUs only imitate bfloat16."""
    seconds, spent = {}, a.spent
    # The first turn warms up, and finds what --features keeps.
    for dtype in ("float32", "float32", "bfloat16"):
        a.dtype = dtype
        times = []
        for step in range(TRIALS):
            began = jobs.clock(a.device)
            add_gradients(steps(step), models, a)
            times.append(jobs.clock(a.device) - began)
        median = float(np.median(times))
        seconds[dtype] = jobs.mean([median], a.device)[0]
    for dtype, taken in seconds.items():
        say(f"{dtype}: {taken:.2f} s a step")
    for learner in learners:
        learner.zero_grad()
    a.spent = spent
    return min(seconds, key=seconds.get)

def check_weights(step, models):
    """Stop the run where an update has overflowed: such a drafter is never measured, nor saved."""
    for name, module in models.items():
        if not all(torch.isfinite(weight).all() for weight in module.parameters()):
            jobs.stop(f"step {step}: the last update made weights of {name} infinite: {LOWER}")

def clip_gradients(step, models, losses, advice):
    """Clip each drafter's gradient; stop the run where a loss or a gradient is not finite."""
    for (name, module), loss in zip(models.items(), losses):
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP).item()
        if not math.isfinite(loss + norm):
            jobs.stop(f"step {step}: loss of {name} is {loss}, the gradient {norm}: {advice}")

def fit(models, steps, evaluate, a, state):
    """Train the modules {name: module} with the flags `a` -> {name: last evaluation}.

    steps(step): the forwards of a step, as Steps gives them; it adds the step's tokens to a.spent.
    evaluate() -> {name: {metric: value}}, with an "alpha".  state: a jobs.State.
    """
    together = torch.nn.ModuleDict(models)
    learners = optimizers(together, a.optimizer)         # the rate is set at each step
    start, a.spent = state.restore(a, together, learners)
    if a.dtype == "auto":
        together.train()
        a.dtype = faster_type(steps, models, learners, a) if a.steps else "float32"
    log = jobs.Log(a)
    seen = a.spent                                       # tokens that the weights have learned from
    rank, _ = place()
    bar = tqdm(range(start, a.steps + 1), total=a.steps, initial=start, unit="step",
               disable=rank > 0)
    with jobs.interruptible() as signals, bar:
        for step in bar:
            if step in (start, a.steps) or step % a.every == 0:
                # Measure, on held-out text.
                check_weights(step, models)
                speed = log.rate()
                together.eval()
                metrics = evaluate()
                log.write(step, speed, metrics)
                log.begin()
            if step == a.steps:
                break
            # Learn: gradients of all parts of the step, clipped for each drafter.
            together.train()
            found = add_gradients(steps(step), models, a)
            *losses, stopped = jobs.mean([*found.values(), len(signals)], a.device)
            log.losses.append(dict(zip(models, losses)))
            advice = LOWER if step > start else "no --lr mends that"
            clip_gradients(step, models, losses, advice)
            # Saved before the update: these weights gave a finite loss, so resuming works.
            if step % a.every == 0 or stopped:
                state.save(step, seen, a, together, learners)
            if stopped:
                jobs.stop(f"stopped after {step} of {a.steps} steps: the same with --resume goes "
                          "on")
            # Update.
            for learner in learners:
                for group in learner.param_groups:
                    group["lr"] = a.lr * cosine(step, a.steps)
                learner.step()
                learner.zero_grad()
            seen = a.spent
            shown = [f"{log.rate()} tokens/s"]
            for name, loss in zip(models, losses):
                shown.append(f"{name} loss {loss:.3f} alpha {metrics[name]['alpha']:.3f}")
            bar.set_postfix_str(", ".join(shown), refresh=False)
    state.save(a.steps, seen, a, together, learners)
    return metrics

# ---------------------------------------------------------------- target, data, drafters
def load_target(a):
    """-> the frozen target, whole or spread over the processes, and its tokenizer."""
    dtype = "auto" if a.device.startswith("cuda") else "float32"
    target, tokenizer = load.load_target(a.target, dtype, a.device, revision=a.revision,
                                         trust=a.trust_remote_code)
    targets.AnyTarget(target)                           # refuses what cannot be decoded with
    return target.requires_grad_(False), tokenizer

def check_length(a, target):
    """Refuse a --length that the target has no positions for."""
    context = targets.context_of(target, target.config.get_text_config())
    if a.length > context:
        raise UserError(f"--length {a.length} is more than the target's context of {context}")

def prepared_folder(a, tokenizer, vocab):
    """The folder of --data's tokens, prepared now or before; a.data becomes its content's key."""
    template = read.template_of(a.template, tokenizer)
    if prepare.is_prepared(a.data):
        folder = Path(a.data[0])
        meta = prepare.meta_of(folder)
        known = meta["vocabulary"], meta["template"]
        if known != (prepare.vocabulary_fingerprint(tokenizer), template):
            raise UserError(f"--data: {folder} was prepared with another tokenizer or --template: "
                            "prepare it again")
        prepare.check_largest(meta.get("largest", 0), folder, vocab)
        a.data = meta["key"]
        return folder
    folder = Path(a.work) / "data"
    key = None
    if a.resume and prepare.is_prepared([folder]):
        # What the run has learned from stays there; restore() refuses other text by its key.
        key = prepare.key_of(a.data, tokenizer, template)
    elif place()[0] == 0:
        prepare.prepare(a.data, tokenizer, folder, template, vocab)
    jobs.meet()
    a.data = key or prepare.meta_of(folder)["key"]
    return folder

def load_data(a, tokenizer, vocab):
    """--data -> Data.  From here on a.data stands for its content."""
    folder = prepared_folder(a, tokenizer, vocab)
    tokens, index = prepare.open_split(folder, "train")
    held_tokens, held_index = prepare.open_split(folder, "val")
    pieces = prepare.pieces_of(index, a.length)
    if pieces[:, 1].sum() <= a.length:
        raise UserError(f"--data has too few tokens for --length {a.length}: more text, or less "
                        "--length")
    shortest = a.block + 2                               # tokens of which something can be measured
    held = prepare.pieces_of(held_index, a.length)
    held = held[held[:, 1] >= shortest]
    prompts = prompts_of(held_tokens, held_index, a.length, shortest)
    if not len(held) or not len(prompts):
        say("too little text is held out: drafters are measured on what they are trained on")
        held_tokens, held = tokens, pieces
        prompts = prompts_of(tokens, index, a.length, shortest=2)
    if not len(prompts):
        raise UserError(f"--length {a.length}: no chat's first answer begins early enough to be "
                        "measured: more --length")
    kinds = prepare.meta_of(folder)["kinds"]
    return Data(tokens, pieces, held_tokens, held, prompts, kinds)

def forward_for(models, target, tokenizer, mine, data, a):
    """The target's forward, and the same kept on the disk: for --words and --features."""
    reads = read_by(models)
    words = head = features = None
    if a.words:
        path = Path(a.out) / "words.json"
        words = frequent_words(path, a.words, load.vocabulary_fingerprint(tokenizer))
        words = torch.tensor(words, device=target.device)
        share_words(models, words)
    if reads["logits"] and (a.words or a.features):
        try:
            head = head_of(target, words)
        except ValueError as why:
            raise UserError(f"--words, --features: {why}") from None
    if a.features:
        c = target.config.get_text_config()
        # In the place of logits the state that the head reads
        kept = {**reads, "logits": False}
        if head:
            kept["hidden"] = {*reads["hidden"], c.num_hidden_layers}
        key = json.dumps([a.data, mine, a.length, sorted(kept["hidden"]), sorted(kept["kv"])])
        features = Features(partial(frozen_forward, target, **kept), head,
                            folder_in(a.work), len(data.tokens), key, c.vocab_size)
    return partial(frozen_forward, target, **reads, head=head), features

def how_made(a, metrics, **more):
    """What training.json says: the command, seed, tokens seen, date, validation figures."""
    about = {name: getattr(a, name) for name in ("command", "run", "seed", "steps")}
    about["date"] = time.strftime("%Y-%m-%d")
    about["tokens_seen"] = a.spent
    about["validation"] = metrics
    if getattr(a, "words", None):
        about["words"] = a.words
    return about | more

# ---------------------------------------------------------------- command line
def parser():
    p = read.Parser(description="Train drafters.",
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("what", nargs="+", help=f"any of: {drafters.NAMES}")
    p.add_argument("--data", nargs="+", required=True,
                   help="files or folders, or one that prepare.py made")
    flags.add_flags(p, flags.NAMES)
    return p

def check(a):
    """Refuse what cannot work, before anything is loaded."""
    unknown = [name for name in a.what if not drafters.named(name)]
    if unknown:
        raise UserError(f"cannot train {' '.join(unknown)}: name drafters among {drafters.NAMES}")
    above_0 = ("batch", "micro", "length", "lr", "width", "layers", "block", "every", "words")
    flags.check(a, above_0, least_steps=0 if a.init else 1)
    if a.words and a.loss == "ce":
        raise UserError("--words learns the target's distribution: leave --loss ce out")
    if a.length <= a.block + 1:
        raise UserError(f"--length {a.length} must be longer than a block of {a.block}, and a "
                        "token more")

def run(argv):
    a = parser().parse_args(argv)
    a.command = " ".join(["python train.py", *argv])
    check(a)
    state = jobs.State(a, a.what)
    jobs.join(a)
    target, tokenizer = load_target(a)
    check_length(a, target)
    c = target.config.get_text_config()
    a.lr = flags.rate(a, c.hidden_size)
    data = load_data(a, tokenizer, c.vocab_size)
    if a.steps is None:                                  # one epoch
        a.steps = prepare.steps_of(data.pieces[:, 1], a.batch * a.length)
    mine = load.fingerprint(target, tokenizer)
    # Drafters: fresh, or those of --init
    models, before = {}, {}
    for name in a.what:
        models[name], before[name] = drafters.begun(name, target, mine, a)
    forward, features = forward_for(models, target, tokenizer, mine, data, a)
    steps = Steps(models, forward, data, a, features)
    evaluate = partial(Evaluation(forward, target, data, a), models)
    metrics = fit(models, steps, evaluate, a, state)
    rank, _ = place()
    for name, model in models.items() if rank == 0 else ():
        folder = Path(a.out) / name
        kind = drafters.kind_of(name, before[name])
        about = how_made(a, metrics[name], kind=kind, target=mine, init=before[name])
        drafters.save(folder, model, tokenizer, about)
        print(f"saved {folder}")
    state.saved(a)

def main(argv):
    """Exit status: 0; 2 after one sentence, about a mistake or Ctrl-C."""
    return jobs.main(argv, run, "train.py")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
