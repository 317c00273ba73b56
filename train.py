"""Train drafters for any target.  (GLIDE, arXiv 2402.02082: 4.1, 5.1, app. A; EDD: 3.1, app. B)

    python train.py glide edd --target lmsys/vicuna-7b-v1.5 --template vicuna --data sharegpt.json
    torchrun --nproc-per-node 8 train.py glide edd --data ...      # recipes: docs/training.md

The idea.  A drafter learns to predict the next token while the target stays frozen.  GLIDE reads
the target's KV entries and EDD its hidden states, so training needs the target's forward, and all
drafters of a run share it.  A drafter is a module with loss(batch), where batch is a dict:

    batch       shape            meaning
    ids         (B, T)           token ids of B pieces of text from position 0, padded on the right
    learn       (B, T)           the loss mask: True where the token after a position is a label
    count       number           labels of the whole step, divided by the number of processes: a sum
                                 of losses is divided by it
    sum         function         in_chunks below: sums a loss over the loss mask
    kv          {l: (K, V)}      KV entries of the target's layer l, (B, H, T, d) each
    hidden      {k: (B, T, D)}   hidden_states[k] of the target, numbered as Hugging Face does: the
                                 input of layer k, from 0 on; the last one is the normed output
    logits      (B, T, V)        the target's prediction after each token, with --words only over
                                 those words; None if nobody reads it
    block       int or None      EDD's block length L; None: to be drawn from `random`
    random      numpy Generator  by (seed, step): all drafters of a step draw the same

Differences from the papers:
 1. A row of a batch is one document, or a piece of a long one.  All steps have about the same
    number of tokens, of all kinds of text, in an order that (seed, epoch) alone decides.
 2. GLIDE learns the target's distribution (KL), as EDD does in its paper, too, and hidden matrices
    are optimised with Muon.  The papers' recipes are --loss ce --optimizer adamw --batch 64
    --norm no for GLIDE, and --optimizer adamw --lr 1e-4 for EDD.  GLIDE's embedding and head start
    as the target's where the widths agree; in the paper they start at random.  --init starts with
    trained drafters: a second stage, on other data.
 3. Each drafter gets a calibration temperature, fitted on the target's own greedy text
    (training/evaluate.py), so that trees can trust its confidence.
"""
import argparse
import json
import math
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from runtime.load import fingerprint, load_target
from runtime.targets import any_target
from runtime.text import Parser, write_atomically
from training import drafters, prepare
from training.evaluate import Walks
from training.forward import SomeLayersCache, reads_of
from training.muon import optimizers
from training.state import claim_folders, interruptible
from verify import UserError

ROOT = Path(__file__).resolve().parent
WARMUP = 0.025                  # of the steps: the learning rate rises
CLIP = 1.0                      # the largest norm of a drafter's gradient
LOGITS = 2 ** 25                # a drafter's logits (positions x vocabulary) in memory at a time
HELD_OUT = 2 ** 14              # held-out tokens whose loss is measured
LOWER = "give a lower --lr, and go on with --resume"
# Flags that decide a drafter's architecture, which --init brings with it
ARCHITECTURE = "width layers layer norm block hidden words".split()
# Flags that a resumed run may change
FREE = "lr every micro device out work resume overwrite".split()

# ---------------------------------------------------------------- the flags
def parser():
    p = Parser(description="Train drafters.",
               formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flag = p.add_argument
    flag("what", nargs="+", help=f"any of: {drafters.NAMES}")
    # The target
    flag("--target", default=str(ROOT / "checkpoints/target"), help="folder or hub name")
    flag("--revision", help="of the target on the hub: a branch, a tag, a commit")
    flag("--trust-remote-code", action="store_true", help="run the target's own code")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    # The data
    flag("--data", nargs="+", required=True,
         help="files or folders of text, chats or token ids, or a folder that prepare.py made")
    flag("--template", help="chat format: plain, vicuna, a Jinja file; default: the tokenizer's")
    flag("--length", type=int, default=512, help="tokens of a document that are seen together")
    # The drafters
    flag("--init", help="folder of drafters to start from: a second stage, on other data")
    flag("--width", type=int, help="d_D, GLIDE's hidden size; default: the target's")
    flag("--layers", type=int, default=1, help="N_D, GLIDE's layers")
    flag("--layer", type=int, help="the target's layer that GLIDE's last one reads; default: top")
    flag("--norm", choices=("yes", "no"), default="yes",
         help="a norm before GLIDE's glimpse; the paper has none")
    flag("--block", type=int, default=5,
         help="L, the block length of GLIDE's mask, and of EDD's where a held-out loss is measured")
    flag("--hidden", type=int, default=-4, help="which of the target's hidden_states EDD reads")
    flag("--tables", choices=("target", "random"), default="target",
         help="GLIDE's embedding and head start as the target's, or at random as in the paper")
    flag("--words", type=int,
         help="glide-shared, edd-shared ...: learn and draft only this many tokens, the most "
              "frequent ones")
    # The recipe
    flag("--loss", choices=("kl", "ce", "lk"), default="kl",
         help="KL to the target's distribution; cross entropy of the text; -log of the "
              "acceptance rate (glide-shared, edd-shared ...)")
    flag("--steps", type=int, help="default: one epoch; 0: only measure the drafters of --init")
    flag("--batch", type=int, default=8, help="tokens of a step, in multiples of --length")
    flag("--micro", type=int, default=2048, help="tokens of a forward, with padding")
    flag("--lr", type=float,
         help="peak learning rate; default: 5e-4 sqrt(4096 / the target's width)")
    flag("--optimizer", choices=("muon", "adamw"), default="muon",
         help="of hidden matrices; everything else is optimised with AdamW")
    flag("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
         help="of the drafters' products; auto: bfloat16 on CUDA, float32 on a CPU; bfloat16 on a "
              "CPU: the target's, too")
    flag("--seed", type=int, default=0, help="of the weights and of the order of the pieces")
    # The run
    flag("--out", default=str(ROOT / "work/drafters"), help="folder to save drafters under")
    flag("--work", default=str(ROOT / "work/training"), help="folder of tokens, state and log")
    flag("--every", type=int, default=200, help="steps between two evaluations, and saved states")
    flag("--resume", action="store_true", help="go on with the interrupted run in --work")
    flag("--overwrite", action="store_true", help="replace what is in --work and --out")
    return p

def check(a):
    """Refuse what cannot work, before anything is loaded."""
    for name in a.what:
        drafters.kind_of(name)                           # refuses what it does not know
    for flag in "batch micro length lr width layers block every words".split():
        value = getattr(a, flag)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{flag} is {value}: it must be above 0")
    least = 0 if a.init else 1
    if a.steps is not None and a.steps < least:
        raise UserError(f"--steps is {a.steps}: it must be at least {least}")
    if a.length <= a.block + 1:
        raise UserError(f"--length {a.length} must be longer than a block of {a.block} and a token")
    for flag in ARCHITECTURE if a.init else ():
        if getattr(a, flag) != parser().get_default(flag):
            raise UserError(f"--init fixes the architecture: leave out --{flag}")

# ---------------------------------------------------------------- tokens and pieces
def load_data(a, tokenizer, vocab):
    """--data -> the tokens (n,) and documents (m, 3) in it: start, size, kind (prepare.Prepared).

    A prompt is read, but not learned: its tokens come as ~id, the complement, which is below 0.
    """
    folder = Path(a.data[0])
    if len(a.data) > 1 or not prepare.is_prepared(folder):
        folder = Path(a.work) / "data"
        rank, _ = rank_and_world()
        if rank == 0 and not a.resume:
            prepare.prepare(a.data, tokenizer, a.template, vocab, folder)
        if dist.is_initialized():
            dist.barrier()
    return prepare.read(folder, tokenizer, a.template)

def pieces_of(documents, length):
    """Cut documents (n, 3) into pieces of at most `length` tokens -> (pieces, 3): start, size, kind

    A piece of one token is left out: it has no label.
    """
    pieces = []
    for start, size, kind in documents.tolist():
        for begin in range(0, size - 1, length):
            pieces.append((start + begin, min(length, size - begin), kind))
    return np.array(pieces, "i8").reshape(-1, 3)

def steps_in_epoch(pieces, step_tokens):
    """How many steps of `step_tokens` tokens the pieces fill; at least one."""
    return max(1, int(pieces[:, 1].sum()) // step_tokens)

def pieces_of_epoch(pieces, step_tokens, seed, epoch):
    """All pieces, shuffled by (seed, epoch) alone -> the pieces of each step of this epoch.

    A piece belongs to the step in which its last token falls.  Pieces after the last full step are
    left out.  Where all pieces together do not fill one step, they are the only step.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(pieces))
    shuffled = pieces[order]
    last_token = np.cumsum(shuffled[:, 1]) - 1
    step_of = last_token // step_tokens                                # 0, 0, ... 1, 1, ... 2 ...
    steps = steps_in_epoch(pieces, step_tokens)
    first_piece = np.searchsorted(step_of, np.arange(steps + 1))       # of each step
    return np.split(shuffled, first_piece[1:])[:-1]

def parts_of(pieces, most):
    """Sort pieces by size and split them into parts of at most `most` tokens with padding.

    A part is the batch of one forward.  It has one piece at least.
    """
    pieces = pieces[np.argsort(-pieces[:, 1], kind="stable")]
    parts = []
    while len(pieces):
        longest = pieces[0, 1]
        rows = max(1, most // longest)
        parts.append(pieces[:rows])
        pieces = pieces[rows:]
    return parts

def gather(tokens, pieces):
    """The batch of some pieces -> ids (B, T), padded on the right; the loss mask (B, T)."""
    # Padding is ~0, which is -1: below 0, so that it is no label.  Its token id becomes 0.
    ids = torch.full((len(pieces), pieces[:, 1].max()), ~0)
    for row, (start, size, _) in zip(ids, pieces):
        row[:size] = torch.from_numpy(tokens[start:start + size].astype("i8"))
    learn = torch.zeros(ids.shape, dtype=torch.bool)
    learn[:, :-1] = ids[:, 1:] >= 0                      # the token after position i is a label
    return torch.where(ids < 0, ~ids, ids), learn

def labels_in(tokens, pieces):
    """How many labels some pieces have: what gather's loss masks add up to."""
    total = 0
    for start, size, _ in pieces:
        labels = tokens[start + 1:start + size] >= 0
        total += int(labels.sum())
    return total

# ---------------------------------------------------------------- the frozen target
class FrozenTarget:
    """What all drafters of a run, {name: draft model}, read of the target: one forward for all."""

    def __init__(self, target, models):
        self.target, self.device = target, target.device
        # reads.kv, reads.hidden: which layers and indices; reads.logits: whether somebody learns
        # the logits; reads.head: with --words, the LM head that computes only the words' logits,
        # from the last hidden state
        self.reads = reads_of(models, target)
        self.vocab = target.config.get_text_config().vocab_size
        # No autocast: the target computes in its own dtype.
        self.exactly = torch.autocast(self.device.type, enabled=False)

    def forward(self, ids, logits=False):
        """ids (B, T) -> kv {l: (K, V)}, hidden {k: (B, T, D)}, logits (B, T, V) or None"""
        cache = SomeLayersCache(self.reads.kv)
        with torch.no_grad(), self.exactly:
            out = self.target(input_ids=ids.to(self.device), past_key_values=cache, use_cache=True,
                              output_hidden_states=bool(self.reads.hidden),
                              logits_to_keep=0 if logits else 1)
        hidden = {index: out.hidden_states[index] for index in self.reads.hidden}
        return cache.kv, hidden, out.logits if logits else None

    def batch(self, tokens, pieces, count):
        """The batch of some pieces, as the top of this file has it, without block and random."""
        ids, learn = gather(tokens, pieces)
        ids = ids.to(self.device)
        kv, hidden, logits = self.forward(ids, self.reads.logits and self.reads.head is None)
        if self.reads.head is not None:
            last = hidden[max(hidden)]                         # (B, T, D), after the last norm
            with torch.no_grad(), self.exactly:
                logits = self.reads.head(last)                 # (B, T, words)
        vocab = self.vocab if logits is None else logits.shape[-1]
        return {
            "ids": ids,
            "learn": learn.to(self.device),
            "count": count,
            "sum": partial(in_chunks, max(1, LOGITS // vocab)),
            "kv": kv,
            "hidden": hidden,
            "logits": logits,
        }

# ---------------------------------------------------------------- the drafters, and one step
def in_chunks(size, loss, learn, x, *others):
    """Sum of loss(x, *others) over the positions of the loss mask: what batch["sum"] does.

    learn (B, T) bool, x (B, T, D), others (B, T, ...).  For many positions the (n, V) logits of a
    drafter would not fit into memory.  So they are computed for `size` positions at a time, and
    once more for the gradient.
    """
    chosen = learn.flatten().nonzero()[:, 0]                           # (n,)
    x = x.flatten(0, 1)[chosen]                                        # (n, D)

    def loss_of_chunk(x, chunk):
        labels = [other.flatten(0, 1)[chunk] for other in others]
        return loss(x, *labels)

    if len(chosen) <= size:
        return loss_of_chunk(x, chosen)
    total = 0.0
    for x_chunk, chunk in zip(x.split(size), chosen.split(size)):
        total = total + checkpoint(loss_of_chunk, x_chunk, chunk, use_reentrant=False,
                                   preserve_rng_state=False)
    return total

class AllDrafters(torch.nn.Module):
    """All draft models as one module, for DistributedDataParallel."""

    def __init__(self, models):
        super().__init__()
        self.models = torch.nn.ModuleDict(models)

    def forward(self, batch, seed):
        """batch -> {name: loss}"""
        losses = {}
        for name, module in self.models.items():
            # Each draws the same numbers: say, the block length of this step.
            random = np.random.default_rng(seed)
            losses[name] = module.loss({**batch, "block": None, "random": random})
        return losses

class Gradients:
    """gradients(step) computes the gradients of a step and returns {name: loss of the step}.

    A step's pieces, which the number of the step decides, are read in parts of --micro tokens.
    """

    def __init__(self, models, frozen, tokens, pieces, a):
        self.frozen, self.tokens, self.pieces, self.a = frozen, tokens, pieces, a
        self.engine = AllDrafters(models)
        if dist.is_initialized():
            self.engine = DistributedDataParallel(self.engine)
        self.steps_in_epoch = steps_in_epoch(pieces, a.batch * a.length)
        self.epoch, self.steps = None, None
        on_cuda = frozen.device.type == "cuda"
        self.in_bfloat16 = a.dtype == "bfloat16" or a.dtype == "auto" and on_cuda

    def pieces_of_step(self, step):
        epoch, number = divmod(step, self.steps_in_epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            step_tokens = self.a.batch * self.a.length
            self.steps = pieces_of_epoch(self.pieces, step_tokens, self.a.seed, epoch)
        return self.steps[number]

    def __call__(self, step):
        rank, world = rank_and_world()
        pieces = self.pieces_of_step(step)
        # The gradient is that of the mean over all labels of the step, whichever rank has them.
        # DistributedDataParallel averages over ranks, which divides by `world` once more.
        count = max(1, labels_in(self.tokens, pieces)) / world
        total = {}
        parts = parts_of(pieces, self.a.micro * world)
        for number, part in enumerate(parts, 1):
            mine = part[rank::world]
            has_none = len(mine) == 0            # fewer pieces than ranks
            mine = part[:1] if has_none else mine
            batch = self.frozen.batch(self.tokens, mine, count)
            if has_none:
                batch["learn"].zero_()           # it only takes part in the exchange of gradients
            # Ranks exchange their gradients once, after the last part.
            self.engine.require_backward_grad_sync = number == len(parts)
            with torch.autocast(self.frozen.device.type, torch.bfloat16, enabled=self.in_bfloat16):
                losses = self.engine(batch, [self.a.seed, step])
            sum(losses.values()).backward()
            for name, loss in losses.items():
                total[name] = total.get(name, 0.0) + loss.detach()
        return total

# ---------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate(models, frozen, walks, data, a):
    """-> {name: {"alpha", "tau", "temperature", ..., "held_out_loss", "by_kind"}}"""
    metrics = walks(models)
    pieces = pieces_of(data.held_documents, a.length)
    kinds = np.unique(pieces[:, 2])
    for name in models:
        metrics[name]["held_out_loss"] = 0.0                 # the mean over the kinds of text
    for kind in kinds:
        # The same number of tokens from each kind of text, and the same pieces in every evaluation
        most = max(a.length, HELD_OUT // len(kinds))
        chosen = pieces_of_epoch(pieces[pieces[:, 2] == kind], most, seed=0, epoch=0)[0]
        count = max(1, labels_in(data.held_tokens, chosen))
        losses = dict.fromkeys(models, 0.0)
        for part in parts_of(chosen, a.micro):
            batch = frozen.batch(data.held_tokens, part, count)
            for name, module in models.items():
                losses[name] += module.loss({**batch, "block": a.block, "random": None}).item()
        for name, loss in losses.items():
            metrics[name]["held_out_loss"] += loss / len(kinds)
            of_kind = metrics[name]["by_kind"].setdefault(data.kinds[kind], {})
            of_kind["held_out_loss"] = loss
    return metrics

# ---------------------------------------------------------------- the loop
def cosine(step, steps):
    """The factor of the learning rate: a linear warm-up, then half a cosine to 0."""
    warmup = max(1, round(steps * WARMUP))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

def clip(models, losses, step):
    """Clip the gradient of each drafter.  Stop the run where a loss or a gradient is not finite."""
    for (name, module), loss in zip(models.items(), losses):
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP).item()
        if not math.isfinite(loss + norm):
            raise UserError(f"step {step}: the loss of {name} is {loss}, its gradient {norm}: "
                            f"{LOWER}")

def log(a, row):
    """Append a row to --work/log.jsonl."""
    with open(Path(a.work) / "log.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")

def log_metrics(a, step, tokens_seen, seconds, losses, metrics):
    """Print what was measured, and log it.  seconds, losses {name: [loss]}: since the last time."""
    steps = len(losses[a.what[0]])
    row = {"step": step, "tokens_seen": tokens_seen}
    row["seconds_per_step"] = seconds / steps if steps else None
    for name, values in metrics.items():
        loss = float(np.mean(losses[name])) if steps else None
        row[name] = {"loss": loss, **values}
        shown = [f"{key} {value:.3f}" for key, value in values.items() if key != "by_kind"]
        tqdm.write(f"step {step} {name}: {', '.join(shown)}")
    log(a, row)

def fit(models, learners, gradients, measure, steps, step_tokens, a, device):
    """Train models {name: module} for `steps` steps -> {name: metrics of the last evaluation}

    learners: optimizers, with their peak learning rates.  gradients(step) computes the gradients of
    a step and returns {name: loss}.  measure() returns {name: metrics}, with a "held_out_loss".
    step_tokens: how many tokens a step reads.
    """
    rank, _ = rank_and_world()
    together = torch.nn.ModuleDict(models)
    start = 0
    if a.resume:
        start = resume(together, learners, a)
    groups = [group for learner in learners for group in learner.param_groups]
    peaks = [group["lr"] for group in groups]
    recent = {name: [] for name in models}               # losses since the last evaluation
    began = time.perf_counter()
    bar = tqdm(range(start, steps + 1), total=steps, initial=start, unit="step", disable=rank > 0)
    with interruptible() as signals, bar:
        for step in bar:
            # Evaluate
            if step == steps or step % a.every == 0:
                seconds = time.perf_counter() - began
                together.eval()
                metrics = measure()
                together.train()
                if rank == 0:
                    log_metrics(a, step, step * step_tokens, seconds, recent, metrics)
                if not all(math.isfinite(values["held_out_loss"]) for values in metrics.values()):
                    raise UserError(f"step {step}: a held-out loss is not finite: {LOWER}")
                recent = {name: [] for name in models}
                began = time.perf_counter()
            if step == steps:
                break
            # Gradients.  Ranks agree on the losses, and whether one of them was interrupted.
            own_losses = gradients(step)
            *losses, interrupted = average([*own_losses.values(), len(signals)], device)
            clip(models, losses, step)
            # Saved before the update: these weights gave a finite loss.
            if rank == 0 and (step % a.every == 0 or interrupted):
                save(step, together, learners, a)
            if interrupted:
                raise UserError(f"stopped after {step} of {steps} steps: the same command with "
                                "--resume goes on")
            # Update
            for group, peak in zip(groups, peaks):
                group["lr"] = peak * cosine(step, steps)
            for learner in learners:
                learner.step()
                learner.zero_grad()
            for name, loss in zip(models, losses):
                recent[name].append(loss)
            shown = [f"{name} {loss:.3f}" for name, loss in zip(models, losses)]
            bar.set_postfix_str(f"loss of {', '.join(shown)}", refresh=False)
    if rank == 0:
        save(steps, together, learners, a)
    return metrics

def save(step, together, learners, a):
    """Write all that a resumed run needs into --work.

    Which text a step reads and which numbers it draws follow from `step`: they are not written.
    """
    tensors = {f"model {name}": x for name, x in together.state_dict().items()}
    for i, learner in enumerate(learners):
        for j, moments in learner.state_dict()["state"].items():
            for name, x in moments.items():
                tensors[f"optimizer {i} {j} {name}"] = x
    # Copies, because tied weights share memory, which safetensors refuses.
    tensors = {name: x.detach().cpu().clone() for name, x in tensors.items()}
    about = {"step": str(step), "flags": json.dumps(vars(a))}
    path = Path(a.work) / "state.safetensors"
    write_atomically(path, lambda part: save_file(tensors, part, about))

def resume(together, learners, a):
    """Restore what save() wrote -> the number of steps done."""
    with safe_open(Path(a.work) / "state.safetensors", "pt") as file:
        about = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    flags = json.loads(about["flags"])
    changed = [flag for flag, value in vars(a).items()
               if flag not in FREE and flags[flag] != value]
    if changed:
        raise UserError(f"--resume: the run in {a.work} had another --{' --'.join(changed)}; only "
                        f"--{' --'.join(FREE)} may change")
    weights = {}
    moments = [{} for _ in learners]                     # of each optimizer: {weight: {name: x}}
    for name, x in tensors.items():
        kind, rest = name.split(" ", 1)
        if kind == "model":
            weights[rest] = x
        else:
            i, j, moment = rest.split(" ")
            moments[int(i)].setdefault(int(j), {})[moment] = x
    together.load_state_dict(weights)
    for learner, of_learner in zip(learners, moments):
        # Its groups hold nothing but the flags' settings and the learning rate of a step.
        groups = learner.state_dict()["param_groups"]
        learner.load_state_dict({"state": of_learner, "param_groups": groups})
    return int(about["step"])

# ---------------------------------------------------------------- processes (DDP)
def rank_and_world():
    """The number of this process, and how many there are, as torchrun says."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

def join(device):
    """Under torchrun, join the other processes -> this process's own device."""
    _, world = rank_and_world()
    if world == 1:
        return device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    # The first rank may prepare the data for long, while the others wait.
    dist.init_process_group(backend, timeout=timedelta(hours=3))
    return device

def average(values, device):
    """The mean of each number over all ranks -> floats."""
    values = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in values])
    if dist.is_initialized():
        dist.all_reduce(values)
    _, world = rank_and_world()
    return (values / world).tolist()

# ---------------------------------------------------------------- from the flags to checkpoints
def run(argv):
    a = parser().parse_args(argv)
    check(a)
    claim_folders(a)
    device = join(a.device)
    # The target, its tokenizer, and how many positions it has
    dtype = "auto" if device.startswith("cuda") or a.dtype == "bfloat16" else "float32"
    target, tokenizer = load_target(a.target, dtype, device, revision=a.revision,
                                    trust=a.trust_remote_code)
    target.requires_grad_(False)
    capacity = any_target(target).capacity
    if a.length > capacity:
        raise UserError(f"--length {a.length} is more than the target's context of {capacity}")
    c = target.config.get_text_config()
    lr = a.lr or 5e-4 * math.sqrt(4096 / c.hidden_size)
    # The data
    data = load_data(a, tokenizer, c.vocab_size)
    pieces = pieces_of(data.documents, a.length)
    step_tokens = a.batch * a.length
    if pieces[:, 1].sum() <= a.length:
        raise UserError("--data has too few tokens: give more text, or less --length")
    if not len(pieces_of(data.held_documents, a.length)):
        print("no text is held out: drafters are measured on what they learn", file=sys.stderr)
        data = data._replace(held_tokens=data.tokens, held_documents=data.documents)
    steps = steps_in_epoch(pieces, step_tokens) if a.steps is None else a.steps
    # The drafters
    target_fingerprint = fingerprint(target, tokenizer)
    models, inits = {}, {}                   # inits: training.json of --init, or None
    for name in a.what:
        models[name], inits[name] = drafters.start(name, target, target_fingerprint, data.tokens, a)
    frozen = FrozenTarget(target, models)
    # Learn
    command = " ".join(["python train.py", *argv])
    rank, _ = rank_and_world()
    if rank == 0:
        log(a, {"command": command, "date": time.strftime("%Y-%m-%d")})
    walks = Walks(target, frozen.forward, data, a.length)
    gradients = Gradients(models, frozen, data.tokens, pieces, a)
    measure = partial(evaluate, models, frozen, walks, data, a)
    learners = optimizers(torch.nn.ModuleDict(models), a.optimizer, lr)
    metrics = fit(models, learners, gradients, measure, steps, step_tokens, a, device)
    # Save
    for name, module in models.items() if rank == 0 else ():
        about = {
            "kind": drafters.kind_of(name),
            "command": command,
            "seed": a.seed,
            "steps": steps,
            "date": time.strftime("%Y-%m-%d"),
            "tokens_seen": steps * step_tokens,
            "validation": metrics[name],
            "target": target_fingerprint,
            "init": inits[name],
        }
        drafters.save(Path(a.out) / name, module, tokenizer, about)
        print(f"saved {Path(a.out) / name}")

def main(argv):
    """Exit status: 0; 2 after one sentence about a user's mistake or an interruption."""
    rank, _ = rank_and_world()
    try:
        run(argv)
    except (UserError, OSError, torch.OutOfMemoryError) as why:
        # Every process raises the same UserError, so only the first one prints it.
        if rank == 0 or not isinstance(why, UserError):
            print(f"train.py: {why}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
