"""Train drafters for decoder-only targets.  (GLIDE: 4.1, 5.1, app. A; EDD: 3.1, app. B)

    python train.py glide edd --target lmsys/vicuna-7b-v1.5 --data vicuna.jsonl
    python train.py "glide(layer=13)" "top=glide(norm=False)" "edd(hidden=10)" --data written.jsonl
    torchrun --nproc-per-node 8 train.py glide edd --data ...      # recipes: docs/training.md

The idea.  A drafter learns to predict the next token while the target stays frozen.  GLIDE reads
the target's KV entries and EDD its hidden states, so training needs the target's forward pass, and
all drafters of a run share it.  A drafter is named as a function would be called, with settings
(training/models.py); `top=` names its folder.

From text to a batch.  data.tokens (n,) has the tokens of all documents, one after the other: an id
where it is a label, and ~id, below 0, where it is only read, as in a prompt.

    document    what was one row or file
    piece       at most --length tokens of one document: (start, size) in data.tokens
    step        some --batch x --length tokens, in whole pieces: one update of the weights
    batch       pieces of one step that go through the target together

A batch has

    ids         (B, T)           token ids of B pieces, from position 0, padded on the right
    loss_mask   (B, T)           True where the token after a position is a label
    kv          {l: (K, V)}      KV entries of the target's layer l, (B, H, T, d) each
    hidden      {k: (B, T, D)}   hidden_states[k] of the target, numbered as Hugging Face does: the
                                 input of layer k, from 0 on; the last one is the normed output
    logits      (B, T, V)        the target's logits after each token, None if no drafter needs them

A drafter is a module with

    terms(batch, block)   -> [(x (B, T, ...), labels (B, T, ...), mask (B, T) or None)]
    loss_of(x, labels)    -> the loss, summed over n positions: x (n, ...), labels (n, ...)

and its loss is the sum of loss_of over terms.  A position counts where the loss mask of the batch
is True, and the term's own mask, too, if it has one (as in beyond/eagle.py).

The recipe.  The loss is the KL divergence to the target's distribution; loss='ce' is cross entropy
of the text.  It is a mean over the labels of a step.  Muon optimises hidden matrices, AdamW all
else.  The learning rate rises for 2.5 % of the steps, then falls along a cosine to 0.  At the end
each drafter gets a calibration temperature T, for which softmax(logits / T) predicts the target's
own greedy text best (training/evaluate.py).

Every ten minutes, and at Ctrl-C after the step, the state is saved: weights, optimisers and the
step.  The same command with --resume continues from there with the same text, as that follows from
seed and step; on a CPU bit for bit.
"""
import argparse
import json
import math
import os
import shlex
import signal
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm

from runtime.load import STAND_IN, fingerprint, load_target
from runtime.program import UserError, at_least, program
from runtime.targets import any_target
from training import documents, evaluate, models

WARMUP = 0.025                  # of the steps: the learning rate rises
CLIP = 1.0                      # the largest norm of a drafter's gradient
BETAS = (0.9, 0.95)             # of AdamW, as in GLIDE's code; Muon's momentum is 0.95
WEIGHT_DECAY = 0.01
FORWARD = 2048                  # tokens of a batch with padding, at most, unless a piece is longer
LOGITS = 2 ** 27                # logits of a batch (tokens x vocabulary), likewise: 512 MB
SAVE_SECONDS = 600              # between two states that a resumed run can start from

# ---------------------------------------------------------------- the flags
def parser():
    p = argparse.ArgumentParser(description="Train drafters for a target.")
    flag = p.add_argument
    flag("drafters", nargs="+", help=f"{', '.join(models.RECIPES)}; or calls with settings: "
         '"top=glide(layer=23)" is saved in the folder top')
    flag("--target", default=str(STAND_IN), help="folder or hub name")
    flag("--trust-remote-code", action="store_true", help="run the target's own code")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    flag("--data", nargs="+", required=True,
         help="files or folders of text, chats or token ids, or a folder that prepare.py made")
    flag("--template", help="chat format: question, vicuna, a file (default: the target's)")
    flag("--template-args", help="for the template, as '{\"enable_thinking\": false}'")
    flag("--length", type=at_least(2), default=512, help="tokens of a text that are seen together")
    flag("--steps", type=at_least(1), help="default: one epoch")
    flag("--batch", type=at_least(1), default=8, help="a step has this many times --length tokens")
    flag("--lr", type=at_least(0.0), help="the highest (default: 5e-4 sqrt(4096 / hidden size))")
    flag("--optimizer", choices=("muon", "adamw"), default="muon", help="of hidden matrices")
    flag("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
         help="of matrix products; auto: bfloat16 on CUDA, float32 on a CPU")
    flag("--seed", type=int, default=0, help="of weights and of the order of text")
    flag("--out", default="work/drafters", help="folder of the drafters, of the log and the state")
    flag("--resume", action="store_true", help="go on with the interrupted run in --out")
    flag("--overwrite", action="store_true", help="replace the drafters in --out")
    return p

def check(out, names, resume, overwrite):
    """Refuse an --out that is in use, before anything is loaded.  names: of the drafters."""
    if resume and not (out / "state.pt").exists():
        raise UserError(f"--resume: there is no interrupted run in {out}")
    for path in (out / "state.pt", *(out / name for name in names)):
        if path.exists() and not resume and not overwrite:
            raise UserError(f"{path} is there already: --resume goes on with an interrupted run, "
                            "--overwrite replaces it")

# ---------------------------------------------------------------- documents, pieces, steps, batches
def pieces_of(index, length):
    """Cut documents into pieces of at most `length` tokens -> (m, 2): start, size

    index (n, 3): start, size and kind of text of each document.  A piece begins with the last token
    of the piece before it, so that no label is lost.
    """
    pieces = []
    for start, size, _ in index.tolist():
        for begin in range(0, size - 1, length - 1):
            pieces.append((start + begin, min(length, size - begin)))
    return np.array(pieces, "i8").reshape(-1, 2)

def pieces_of_step(pieces, step_tokens, seed, step):
    """The pieces that a step learns from.

    Each epoch shuffles all pieces and splits their tokens into steps of `step_tokens`.  A piece
    belongs to the step in which it begins; the rest of an epoch, less than a step, is left out.
    """
    steps = max(1, int(pieces[:, 1].sum()) // step_tokens)             # of an epoch
    epoch, number = divmod(step, steps)
    order = np.random.default_rng([seed, epoch]).permutation(len(pieces))
    pieces = pieces[order]
    begin = pieces[:, 1].cumsum() - pieces[:, 1]                       # (m,)
    return pieces[begin // step_tokens == number]

def batches_of(pieces, limit):
    """Sort pieces by size and split them into batches of at most `limit` tokens with padding."""
    pieces = pieces[np.argsort(-pieces[:, 1], kind="stable")]
    batches = []
    while len(pieces):
        count = max(1, limit // pieces[0, 1])            # the first one is the longest
        batches.append(pieces[:count])
        pieces = pieces[count:]
    return batches

def gather(tokens, pieces):
    """The batch of some pieces -> ids (B, T), padded on the right, and the loss mask (B, T)."""
    # Padding is ~0: read as token 0, and no label.
    stored = torch.full((len(pieces), pieces[:, 1].max()), ~0)
    for row, (start, size) in zip(stored, pieces):
        row[:size] = torch.from_numpy(tokens[start:start + size].astype("i8"))
    loss_mask = torch.zeros(stored.shape, dtype=torch.bool)
    loss_mask[:, :-1] = stored[:, 1:] >= 0               # whether the token after i is a label
    return torch.where(stored < 0, ~stored, stored), loss_mask

def labels_in(tokens, pieces):
    """How many labels some pieces have: what gather's loss masks add up to."""
    return sum(int((tokens[start + 1:start + size] >= 0).sum()) for start, size in pieces)

# ---------------------------------------------------------------- the frozen target
class FrozenTarget:
    """The target's forward pass, which computes what all drafters of a run read from it."""

    def __init__(self, target, modules, drafters):
        """modules: {name: draft model}.  drafters: {name: its drafter}, which says its needs."""
        self.target, self.device = target, target.device
        self.kv, self.hidden = set(), set()              # layers, and indices of hidden_states
        for drafter in drafters.values():
            self.kv.update(drafter.needs.get("kv", ()))
            self.hidden.update(drafter.needs.get("hidden", ()))
        self.needs_logits = any(module.config.loss == "kl" for module in modules.values())

    @torch.no_grad()
    def batch(self, tokens, pieces):
        """The batch of some pieces, with the fields that the top of this file lists."""
        ids, loss_mask = (x.to(self.device) for x in gather(tokens, pieces))
        cache = transformers.DynamicCache() if self.kv else None
        out = self.target(
            input_ids=ids, past_key_values=cache, use_cache=bool(self.kv),
            output_hidden_states=bool(self.hidden),
            logits_to_keep=0 if self.needs_logits else 1)              # 0: of all positions
        kv = {layer: (cache.layers[layer].keys, cache.layers[layer].values) for layer in self.kv}
        hidden = {index: out.hidden_states[index] for index in self.hidden}
        return SimpleNamespace(ids=ids, loss_mask=loss_mask, kv=kv, hidden=hidden,
                               logits=out.logits if self.needs_logits else None)

# ---------------------------------------------------------------- losses
def masked_loss(module, batch, block):
    """A drafter's loss, summed over the loss mask of a batch -> ().  block: EDD's L."""
    total = 0.0
    for x, labels, mask in module.terms(batch, block):
        loss_mask = batch.loss_mask if mask is None else batch.loss_mask & mask
        positions = loss_mask.flatten().nonzero()[:, 0]                # (n,)
        x = x.flatten(0, 1).index_select(0, positions)                 # (n, ...)
        labels = labels.flatten(0, 1).index_select(0, positions)       # (n, ...)
        total = total + module.loss_of(x, labels)
    return total

def block_of_step(module, seed, step):
    """The block length L of a step, sampled uniformly from EDD's range (EDD, 3.1)."""
    # Other drafters have no range, and ignore L.
    low, high = getattr(module.config, "blocks", (1, 1))
    return int(np.random.default_rng([seed, step]).integers(low, high + 1))

# ---------------------------------------------------------------- the update
def optimizers_of(modules, kind):
    """The optimisers of draft models {name: module} -> a list.  update() sets the learning rates.

    kind "muon": Muon for hidden matrices, AdamW for embeddings, heads, norms and biases.  kind
    "adamw": AdamW for everything.
    """
    matrices, others = [], []
    for module in modules.values():
        for name, weight in module.named_parameters():
            is_table = "embed" in name or "head" in name
            if kind == "muon" and weight.ndim == 2 and not is_table:
                matrices.append(weight)
            else:
                others.append(weight)
    optimizers = [torch.optim.AdamW(others, betas=BETAS, weight_decay=WEIGHT_DECAY)]
    if matrices:
        # Its updates have the size of AdamW's, so both have one learning rate.
        optimizers.append(torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY,
                                           adjust_lr_fn="match_rms_adamw"))
    return optimizers

def cosine(step, steps):
    """The factor of the learning rate: a linear warm-up, then half a cosine to 0."""
    warmup = max(1, round(steps * WARMUP))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

def update(modules, losses, optimizers, lr, step):
    """Clip the gradient of each drafter, then step.  UserError where it or a loss is not finite."""
    for name, module in modules.items():
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP).item()
        if not math.isfinite(losses[name] + norm):
            raise UserError(f"step {step}: the loss of {name} is {losses[name]}, its gradient "
                            f"{norm}: begin again with a lower --lr and --overwrite")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()

# ---------------------------------------------------------------- processes and signals
def rank_and_world():
    """The rank of this process and the world size, as torchrun sets them."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

def all_reduce(modules, losses):
    """Add up gradients, and losses {name: tensor ()}, over all processes -> {name: number}"""
    if dist.is_initialized():
        for loss in losses.values():
            dist.all_reduce(loss)
        for module in modules.values():
            for weight in module.parameters():
                if weight.grad is None:                  # this process has no batch of the step
                    weight.grad = torch.zeros_like(weight)
                dist.all_reduce(weight.grad)
    return {name: loss.item() for name, loss in losses.items()}

@contextmanager
def noted_signals():
    """Within this context, Ctrl-C and SIGTERM only append to the list that it yields."""
    noted = []
    before = {number: signal.signal(number, lambda *_: noted.append(1))
              for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

# ---------------------------------------------------------------- the state
def save(out, step, modules, optimizers, command):
    """Write what resume() reads, whole or not at all."""
    state = {"step": step, "command": command,
             "drafters": {name: module.state_dict() for name, module in modules.items()},
             "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    torch.save(state, out / "state.part")
    os.replace(out / "state.part", out / "state.pt")

def resume(out, modules, optimizers, command):
    """Restore what save() wrote -> the number of steps done."""
    state = torch.load(out / "state.pt", map_location="cpu", weights_only=True)
    if state["command"] != command:
        raise UserError("--resume: repeat the interrupted run's command, "
                        f"python train.py {shlex.join(state['command'])} --resume")
    for name, module in modules.items():
        module.load_state_dict(state["drafters"][name])
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        optimizer.load_state_dict(saved)
    return state["step"]

# ---------------------------------------------------------------- the training
def train(a, calls, command):
    """Train the drafters {name: Call} by the flags `a`, and save them.

    command: the command line, which a resumed run must repeat.
    """
    rank, world = rank_and_world()
    out = Path(a.out)
    out.mkdir(parents=True, exist_ok=True)

    # The target, frozen: in its stored dtype on CUDA and with bfloat16, else in float32
    dtype = "auto" if a.device.startswith("cuda") or a.dtype == "bfloat16" else "float32"
    target, tokenizer = load_target(a.target, dtype, a.device, trust=a.trust_remote_code)
    target.requires_grad_(False)
    about_target = fingerprint(target, tokenizer)
    vocab, width = about_target["vocab_size"], about_target["hidden_size"]

    # The text
    data = documents.load(a.data, tokenizer, (a.template, a.template_args), about_target,
                          out / "data", keep=a.resume)
    pieces = pieces_of(data.documents, a.length)
    total = int(pieces[:, 1].sum())
    if total <= a.length:
        raise UserError("--data has too few tokens: give more text, or less --length")
    step_tokens = a.batch * a.length
    steps = a.steps or max(1, total // step_tokens)                    # one epoch
    batch_tokens = min(FORWARD, LOGITS // vocab, math.ceil(step_tokens / world))

    # The drafters: draft models, and what decodes by them
    modules, drafters = {}, {}
    for name, call in calls.items():
        torch.manual_seed(a.seed)            # weights do not depend on the other drafters
        modules[name] = models.new(call, target, a.length, data.tokens)
        # This sets the mode eval(), which only turns dropout off: drafters train without it.
        drafters[name] = models.drafter_of(call.name, modules[name])
    frozen = FrozenTarget(target, modules, drafters)
    optimizers = optimizers_of(modules, a.optimizer)
    peak = a.lr or 5e-4 * math.sqrt(4096 / width)
    in_bfloat16 = a.dtype == "bfloat16" or (a.dtype == "auto" and target.device.type == "cuda")
    autocast = torch.autocast(target.device.type, torch.bfloat16, enabled=in_bfloat16)
    # What evaluates them: a target or text that does not serve is refused before the training.
    prompts = evaluate.prompts_of(data.tokens, data.held_out, a.length)
    decoding = any_target(target)

    # The loop
    start = resume(out, modules, optimizers, command) if a.resume else 0
    saved_at = time.monotonic()
    bar = tqdm(range(start, steps), total=steps, initial=start, unit="step", disable=rank > 0)
    with noted_signals() as signals, bar:
        for step in bar:
            # The forward of the frozen target, the losses of all drafters, backward.  A loss is
            # the mean over all labels of the step, of which each process has some.
            step_pieces = pieces_of_step(pieces, step_tokens, a.seed, step)
            labels = max(1, labels_in(data.tokens, step_pieces))
            losses = {name: torch.zeros((), device=target.device) for name in modules}
            for batch_pieces in batches_of(step_pieces, batch_tokens)[rank::world]:
                batch = frozen.batch(data.tokens, batch_pieces)
                for name, module in modules.items():
                    block = block_of_step(module, a.seed, step)
                    with autocast:
                        loss = masked_loss(module, batch, block) / labels
                    loss.backward()
                    losses[name] += loss.detach()
            # A signal to one process stops all of them after this step.
            stopped = torch.tensor(float(len(signals)), device=target.device)
            losses = all_reduce(modules, losses | {"stopped": stopped})
            stopped = losses.pop("stopped") > 0

            # Step
            update(modules, losses, optimizers, peak * cosine(step, steps), step)
            done = step + 1

            # Log, save
            if rank == 0:
                with open(out / "log.jsonl", "a") as file:
                    file.write(json.dumps({"step": done, "loss": losses}) + "\n")
            bar.set_postfix(losses, refresh=False)
            is_due = time.monotonic() - saved_at > SAVE_SECONDS or done == steps
            if rank == 0 and (is_due or stopped):
                save(out, done, modules, optimizers, command)
                saved_at = time.monotonic()
            if stopped:
                raise UserError(f"stopped after {done} of {steps} steps: the same command with "
                                "--resume goes on")

    # Evaluate, write the checkpoints
    if rank > 0:
        return
    metrics = evaluate.measure(decoding, drafters, prompts)
    for name, module in modules.items():
        about = {                            # models.save adds the config, commit and date
            "kind": calls[name].name,
            "command": "python train.py " + shlex.join(command),
            "seed": a.seed,
            "steps": steps,
            "tokens_seen": steps * step_tokens,
            "validation": metrics[name],
            "target": about_target,
        }
        models.save(out / name, module.to(torch.bfloat16), tokenizer, about)
        print("saved {}: alpha {alpha:.3f}, tau {tau:.2f}".format(out / name, **metrics[name]))
    (out / "state.pt").unlink()

@program
def main(argv):
    a = parser().parse_args(argv)
    calls = models.calls_of(a.drafters)
    check(Path(a.out), calls, a.resume, a.overwrite)
    _, world = rank_and_world()
    if world > 1:
        if a.device == "cuda":
            a.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(a.device)
        # The first process may prepare the data for hours, while the others wait.
        backend = "nccl" if a.device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=3))
    try:
        train(a, calls, [word for word in argv if word not in ("--resume", "--overwrite")])
    finally:
        if world > 1:
            dist.destroy_process_group()

# Differences from the papers, all of them:
#  1. Muon optimises hidden matrices; both papers have AdamW for all weights.
#  2. The peak learning rate is 5e-4 sqrt(4096 / D) for all drafters; EDD's paper has 1e-4.
#  3. A step has 8 x 512 tokens by default; GLIDE's paper has 64 texts, EDD's 8.
#  4. Gradients are clipped; EDD's paper states no warm-up and no cosine, which GLIDE's code has.
#  5. All text is learned in one stage: GLIDE's paper has SlimPajama before ShareGPT.
#  6. GLIDE learns by KL from the target's embedding and head; in its paper by cross entropy from
#     random ones: "glide(norm=False, loss='ce', tables='random')" --optimizer adamw.

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
