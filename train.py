"""Train drafters for decoder-only targets.  (GLIDE: 4.1, 5.1, app. A; EDD: 3.1, app. B)

    python train.py glide edd --target lmsys/vicuna-7b-v1.5 --template vicuna --data sharegpt.json
    python train.py "glide(layer=13)" "top=glide(norm=False)" "edd(hidden=10)" --data written.jsonl
    torchrun --nproc-per-node 8 train.py glide edd --data ...      # recipes: docs/training.md

The idea.  A drafter learns to predict the next token while the target stays frozen.  GLIDE reads
the target's KV entries and EDD its hidden states, so training needs the target's forward pass, and
all drafters of a run share it.  A drafter is named as a function would be called, with settings
(training/models.py); `top=` names its folder.  Each is a module with

    terms(batch, block)   -> [(x (B, T, ...), labels (B, T, ...), mask (B, T) or None)]
    loss_of(x, labels)    -> the loss, summed over n positions: x (n, ...), labels (n, ...)

and its loss is the sum of loss_of over terms.  A position counts where the loss mask of the batch
is True, and the term's own mask, too, if it has one (as in beyond/eagle.py).  A batch has

    ids         (B, T)           token ids of B pieces of text from position 0, padded on the right
    loss_mask   (B, T)           True where the token after a position is a label
    kv          {l: (K, V)}      KV entries of the target's layer l, (B, H, T, d) each
    hidden      {k: (B, T, D)}   hidden_states[k] of the target, numbered as Hugging Face does: the
                                 input of layer k, from 0 on; the last one is the normed output
    logits      (B, T, V)        the target's logits after each token; None if no drafter learns
                                 them.  (Drafters of beyond/shared.py learn those of a list of token
                                 ids: then V is the length of this list.)

Differences from the papers:
 1. A row of a batch is one document, or a piece of a long one.  All steps have about the same
    number of tokens.  Texts of all kinds are mixed, in an order that (seed, epoch) alone decides.
 2. GLIDE learns the target's distribution (KL), as EDD does in its paper.  Hidden matrices are
    optimised with Muon, all else with AdamW.  GLIDE's embedding and head start as the target's
    where the widths agree, and its glimpse has a norm.  The learning rate has a warm-up and a
    cosine; by default it is 5e-4 sqrt(4096 / D).  The papers' recipes (GLIDE: cross entropy,
    AdamW, random embedding and head, 5e-4, batches of 64; EDD: AdamW, 1e-4) are in
    docs/training.md.
 3. Each drafter gets a calibration temperature, fitted on the target's own greedy text
    (training/evaluate.py), so that trees can trust its confidence.
"""
import json
import math
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from runtime import load
from runtime.errors import UserError
from runtime.program import Parser, program, write_atomically
from training import documents, models
from training.evaluate import Walks
from training.muon import optimizers
from training.processes import joined, rank_and_world, summed
from training.state import claim_folders, interruptible

STAND_IN = Path(__file__).resolve().parent / "checkpoints" / "target"
WARMUP = 0.025                  # of the steps: the learning rate rises
CLIP = 1.0                      # the largest norm of a drafter's gradient
LOGITS = 2 ** 25                # a drafter's logits (positions x vocabulary) in memory at a time
HELD_OUT = 2 ** 14              # held-out tokens whose loss is measured
HELD_OUT_BLOCK = 5              # EDD's block length there; in training it is random
# Flags that a resumed run may change
MAY_CHANGE = "lr every micro device out work resume overwrite".split()

# ---------------------------------------------------------------- what the functions hand on
# a: the flags.
#
# calls: {name: Call} of the command line.
#
# modules: {name: draft model}, say a glide.Glide, which models.start makes for a Call.
#
# drafters: {name: drafter}, by the contract in verify.py, say a glide.Drafter, which
# models.drafter_of makes for a draft model.  Only its `needs` is used in this file.
#
# data: tokens (n,) and documents (m, 3) to learn from, held_tokens and held_documents to measure
# on, and kinds, the names of the kinds of text (documents.load).  A document is its start, its size
# and the number of its kind.  A token of 0 or above is learned.  Below 0 it is ~id, the complement:
# it belongs to a prompt, which is read, but contributes no loss.
#
# walks: an evaluate.Walks.  measure() drafts along the target's own continuations of held-out
# prompts, and gives {name: {"alpha", "tau", "temperature", "by_kind"}}.
#
# identity: a dict of all that a resumed run must have again.
#
# signals: a list, empty until Ctrl-C or SIGTERM.
#
# Under torchrun several processes run this file; rank is the number of this one, world how many
# there are.  With one process summed() only turns tensors into numbers.

# ---------------------------------------------------------------- the flags
def parser():
    p = Parser(description="Train drafters for a target.", epilog=models.HELP)
    flag = p.add_argument
    flag("drafters", nargs="+", help='names, or calls with settings (below); "top=glide(layer=23)" '
         "is saved in the folder top")
    # The target
    flag("--target", default=str(STAND_IN), help="folder or hub name")
    flag("--revision", help="of the target on the hub: a branch, a tag, a commit")
    flag("--trust-remote-code", action="store_true", help="run the target's own code")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    # The data
    flag("--data", nargs="+", required=True,
         help="files or folders of text, chats or token ids, or a folder that prepare.py made")
    flag("--template", help="chat format: plain, question, vicuna, a file (default: the target's)")
    flag("--length", type=int, default=512, help="tokens of a document that are seen together")
    # The recipe
    flag("--init", help="folder of trained drafters to start from, in a second stage")
    flag("--steps", type=int, help="default: one epoch; 0: only measure the drafters of --init")
    flag("--batch", type=int, default=8, help="a step has this many times --length tokens")
    flag("--micro", type=int, default=2048, help="tokens of a forward pass, with padding")
    flag("--lr", type=float, help="the highest (default: 5e-4 sqrt(4096 / the target's width))")
    flag("--optimizer", choices=("muon", "adamw"), default="muon", help="of hidden matrices")
    flag("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="in which "
         "drafters multiply matrices (auto: bfloat16 on CUDA, float32 on a CPU).  The target keeps "
         "its stored dtype on CUDA and with bfloat16, else it is float32")
    flag("--seed", type=int, default=0, help="of weights and of the order of text")
    # The run
    flag("--out", default="work/drafters", help="folder to save drafters under")
    flag("--work", default="work/training", help="folder of tokens, state and log")
    flag("--every", type=int, default=200, help="steps between two evaluations and saved states")
    flag("--resume", action="store_true", help="go on with the interrupted run in --work")
    flag("--overwrite", action="store_true", help="replace what is in --work and --out")
    return p

def check(a):
    """Refuse numbers that cannot work, before anything is loaded."""
    for flag in "batch micro length lr every".split():
        value = getattr(a, flag)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{flag} is {value}: it must be above 0")
    if a.length < 2:
        raise UserError("--length is 1: a piece of one token has nothing to learn")
    least = 0 if a.init else 1
    if a.steps is not None and a.steps < least:
        raise UserError(f"--steps is {a.steps}: it must be at least {least}")

# ---------------------------------------------------------------- tokens and pieces
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
    left out.  Where all pieces together do not fill one step, they are the only step.  An
    example: pieces of 3, 2, 3 and 2 tokens, in this order, in steps of 5: two steps of two pieces.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(pieces))
    shuffled = pieces[order]
    last_token = np.cumsum(shuffled[:, 1]) - 1                         # in the example 2, 4, 7, 9
    step_of = last_token // step_tokens                                # 0, 0, 1, 1
    steps = steps_in_epoch(pieces, step_tokens)                        # 2
    # The index after the last piece of each step
    ends = np.searchsorted(step_of, np.arange(steps), side="right")    # 2, 4
    # np.split gives one part more: the pieces after the last full step, which are left out
    return np.split(shuffled, ends)[:-1]

def pieces_of_steps(pieces, step_tokens, seed, step):
    """Yield the pieces of step `step`, of the next one, and so on, epoch after epoch."""
    in_epoch = steps_in_epoch(pieces, step_tokens)
    while True:
        epoch, done = divmod(step, in_epoch)
        yield from pieces_of_epoch(pieces, step_tokens, seed, epoch)[done:]
        step = (epoch + 1) * in_epoch

def parts_of(pieces, most):
    """Sort pieces by size and split them into parts of at most `most` tokens with padding.

    A part has one piece at least.
    """
    pieces = pieces[np.argsort(-pieces[:, 1], kind="stable")]
    parts = []
    while len(pieces):
        longest = pieces[0, 1]
        count = max(1, most // longest)
        parts.append(pieces[:count])
        pieces = pieces[count:]
    return parts

def gather(tokens, pieces):
    """The batch of some pieces -> ids (B, T), padded on the right, and the loss mask (B, T)."""
    # Padding is -1 = ~0: it is read as token 0, and it is negative, so no label.
    ids = torch.full((len(pieces), pieces[:, 1].max()), ~0)
    for of_piece, (start, size, _) in zip(ids, pieces):
        of_piece[:size] = torch.from_numpy(tokens[start:start + size].astype("i8"))
    loss_mask = torch.zeros(ids.shape, dtype=torch.bool)
    loss_mask[:, :-1] = ids[:, 1:] >= 0                  # the token after position i is a label
    return torch.where(ids < 0, ~ids, ids), loss_mask

def labels_in(tokens, pieces):
    """How many labels some pieces have: what gather's loss masks add up to."""
    return sum(int((tokens[start + 1:start + size] >= 0).sum()) for start, size, _ in pieces)

# ---------------------------------------------------------------- the frozen target
class FrozenTarget:
    """What the drafters of a run read of the target: one forward pass for all of them."""

    def __init__(self, target, modules, drafters):
        """modules: {name: draft model}.  drafters: {name: drafter}, with their `needs`."""
        self.target, self.device = target, target.device
        vocab = target.config.get_text_config().vocab_size
        self.chunk_size = max(1, LOGITS // vocab)        # positions whose logits are in memory
        self.kv, self.hidden = set(), set()              # layers, and indices of hidden_states
        for drafter in drafters.values():
            self.kv.update(drafter.needs.get("kv", ()))
            self.hidden.update(drafter.needs.get("hidden", ()))
        # The token ids of which the drafters learn the target's logits: slice(None) for all, a
        # list (beyond/shared.py), or None where no drafter learns from logits
        self.learned_ids = models.words_learned(modules.values())

    @torch.no_grad()
    def forward(self, ids):
        """ids (B, T) -> kv {l: (K, V)}, hidden {k: (B, T, D)}, logits (B, T, V) or None."""
        cache = transformers.DynamicCache() if self.kv else None
        out = self.target(
            input_ids=ids.to(self.device), past_key_values=cache, use_cache=bool(self.kv),
            output_hidden_states=bool(self.hidden),
            logits_to_keep=1 if self.learned_ids is None else 0)       # 0: of all positions
        kv = {layer: (cache.layers[layer].keys, cache.layers[layer].values) for layer in self.kv}
        hidden = {index: out.hidden_states[index] for index in self.hidden}
        logits = None if self.learned_ids is None else out.logits[..., self.learned_ids]
        return kv, hidden, logits

    def batch(self, tokens, pieces):
        """The batch of some pieces, as the top of this file has it."""
        ids, loss_mask = gather(tokens, pieces)
        ids, loss_mask = ids.to(self.device), loss_mask.to(self.device)
        kv, hidden, logits = self.forward(ids)
        return SimpleNamespace(ids=ids, loss_mask=loss_mask, kv=kv, hidden=hidden, logits=logits)

# ---------------------------------------------------------------- losses
def masked_loss(module, batch, block, chunk_size):
    """A drafter's loss, summed over the loss mask of a batch -> ().

    block: EDD's L.  For many positions the (n, V) logits of a drafter would not fit into memory.
    So they are computed for `chunk_size` positions at a time, and once more in the backward pass.
    """
    def loss_at(x, labels, positions):
        """x has the rows of `positions` alone, labels those of all: theirs are picked here."""
        return module.loss_of(x, labels[positions])

    total = 0.0
    for x, labels, mask in module.terms(batch, block):
        loss_mask = batch.loss_mask if mask is None else batch.loss_mask & mask
        positions = loss_mask.flatten().nonzero()[:, 0]                # (n,)
        x = x.flatten(0, 1)[positions]                                 # (n, ...)
        # Labels are indexed chunk by chunk, in loss_at: for "kl" they are the target's logits, and
        # all at once they would be a second copy of these.
        labels = labels.flatten(0, 1)                                  # (B T, ...)
        if len(x) <= chunk_size:                         # nothing need be computed twice
            total = total + loss_at(x, labels, positions)
            continue
        for x_chunk, chunk in zip(x.split(chunk_size), positions.split(chunk_size)):
            total = total + checkpoint(loss_at, x_chunk, labels, chunk, use_reentrant=False)
    return total

def block_of_step(module, seed, step):
    """The block length L of a step, which EDD samples uniformly from its range (EDD, 3.1).

    All other drafters ignore it: for them any number will do.
    """
    low, high = getattr(module.config, "blocks", (HELD_OUT_BLOCK, HELD_OUT_BLOCK))
    return int(np.random.default_rng([seed, step]).integers(low, high + 1))

# ---------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate(modules, frozen, walks, data, a):
    """Measure drafters on held-out text.

    -> {name: {"alpha", "tau", "temperature", "held_out_loss", "by_kind"}}
    """
    metrics = walks.measure()                                # all but the loss
    pieces = pieces_of(data.held_documents, a.length)
    kinds = np.unique(pieces[:, 2])
    for name in modules:
        metrics[name]["held_out_loss"] = 0.0                 # the mean over the kinds of text
    for kind in kinds:
        # Of each kind of text about `size` tokens: shuffle its pieces as for an epoch, and take
        # those of the first step.  Seed and epoch are fixed, so all evaluations have the same.
        size = max(a.length, HELD_OUT // len(kinds))
        of_kind = pieces[pieces[:, 2] == kind]
        chosen = pieces_of_epoch(of_kind, size, seed=0, epoch=0)[0]
        count = max(1, labels_in(data.held_tokens, chosen))
        losses = dict.fromkeys(modules, 0.0)
        for part in parts_of(chosen, a.micro):
            batch = frozen.batch(data.held_tokens, part)
            for name, module in modules.items():
                loss = masked_loss(module, batch, HELD_OUT_BLOCK, frozen.chunk_size)
                losses[name] += loss.item() / count
        for name, loss in losses.items():
            metrics[name]["held_out_loss"] += loss / len(kinds)
            metrics[name]["by_kind"].setdefault(data.kinds[kind], {})["held_out_loss"] = loss
    return metrics

# ---------------------------------------------------------------- the log, the state
def log(a, row):
    """Append a row to --work/log.jsonl."""
    with open(Path(a.work) / "log.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")

def log_metrics(a, step, tokens_seen, losses, metrics):
    """Print and log what evaluate() measured.  losses {name: [loss]}: since it was called last."""
    row = {"step": step, "tokens_seen": tokens_seen}
    for name, values in metrics.items():
        loss = float(np.mean(losses[name])) if losses[name] else None
        row[name] = {"loss": loss, **values}
        shown = [f"{key} {value:.3f}" for key, value in values.items() if key != "by_kind"]
        tqdm.write(f"step {step} {name}: {', '.join(shown)}")
    log(a, row)

def save(step, modules, optimizer_list, identity, a):
    """Write all that a resumed run needs into --work/state.pt.

    Which text a step reads and which numbers it draws follow from `step`: they are not written.
    """
    state = {
        "step": step,
        "identity": identity,
        "drafters": {name: module.state_dict() for name, module in modules.items()},
        "optimizers": [optimizer.state_dict() for optimizer in optimizer_list],
    }

    def write(part):
        with open(part, "wb") as file:       # so that a full disk is an OSError
            torch.save(state, file)
    write_atomically(Path(a.work) / "state.pt", write)

def resume(modules, optimizer_list, identity, a):
    """Restore what save() wrote -> the number of steps done."""
    path = Path(a.work) / "state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        before = state["identity"]
    except Exception as why:                             # whatever a damaged file raises
        raise UserError(f"{path} is damaged, or was not saved by this program: begin again with "
                        "--overwrite") from why
    changed = [name for name, value in identity.items() if before.get(name) != value]
    if changed:
        raise UserError(f"--resume: the run in {a.work} had another {', '.join(changed)}; only "
                        f"{', '.join(MAY_CHANGE)} may change")
    for name, module in modules.items():
        module.load_state_dict(state["drafters"][name])
    for optimizer, saved in zip(optimizer_list, state["optimizers"]):
        optimizer.load_state_dict(saved)
    return state["step"]

# ---------------------------------------------------------------- the loop
def cosine(step, steps):
    """The factor of the learning rate: a linear warm-up, then half a cosine to 0."""
    warmup = max(1, round(steps * WARMUP))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

def clip(modules, losses, step):
    """Clip the gradient of each drafter.  Stop the run where a loss or a gradient is not finite."""
    for (name, module), loss in zip(modules.items(), losses):
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP).item()
        if not math.isfinite(loss + norm):
            again = "go on with --resume" if step else "begin again"
            raise UserError(f"step {step}: the loss of {name} is {loss}, its gradient {norm}: give "
                            f"a lower --lr, and {again}")

def fit(modules, optimizer_list, frozen, walks, data, steps, lr, identity, a):
    """Train {name: module} for `steps` steps -> {name: metrics of the last evaluation}

    lr: the peak learning rate.
    """
    rank, world = rank_and_world()
    on_cuda = frozen.device.type == "cuda"
    in_bfloat16 = a.dtype == "bfloat16" or (a.dtype == "auto" and on_cuda)
    autocast = torch.autocast(frozen.device.type, torch.bfloat16, enabled=in_bfloat16)
    step_tokens = a.batch * a.length
    start = resume(modules, optimizer_list, identity, a) if a.resume else 0
    order = pieces_of_steps(pieces_of(data.documents, a.length), step_tokens, a.seed, start)
    recent = {name: [] for name in modules}              # losses since the last evaluation
    bar = tqdm(range(start, steps + 1), total=steps, initial=start, unit="step", disable=rank > 0)
    with interruptible() as signals, bar:
        for step in bar:                                 # after the last step it only evaluates
            # Evaluate and log, after the last step and every a.every steps.  (Not at `start`: there
            # nothing was learned yet, or the interrupted run did it.)
            if step == steps or (step % a.every == 0 and step > start):
                metrics = evaluate(modules, frozen, walks, data, a)
                if rank == 0:
                    log_metrics(a, step, step * step_tokens, recent, metrics)
                recent = {name: [] for name in modules}
            if step == steps:
                break

            # Forward of the frozen target, losses, backward.  The gradient is that of the mean over
            # all labels of the step, whichever process has them.
            pieces = next(order)
            count = max(1, labels_in(data.tokens, pieces))
            losses = dict.fromkeys(modules, 0.0)
            for part in parts_of(pieces, a.micro * world):
                part = part[rank::world]
                if not len(part):                        # fewer pieces than processes
                    continue
                batch = frozen.batch(data.tokens, part)
                for name, module in modules.items():
                    block = block_of_step(module, a.seed, step)
                    with autocast:
                        loss = masked_loss(module, batch, block, frozen.chunk_size) / count
                    loss.backward()
                    losses[name] += loss.detach()
            # Add up the gradients of all processes, and these numbers
            numbers = [*losses.values(), len(signals)]
            *values, interrupted = summed(modules, numbers, frozen.device)
            losses = dict(zip(modules, values))
            clip(modules, values, step)

            # Save before the update: these weights gave a finite loss.
            if rank == 0 and (step % a.every == 0 or interrupted):
                save(step, modules, optimizer_list, identity, a)
            if interrupted:
                raise UserError(f"stopped after {step} of {steps} steps: the same command with "
                                "--resume goes on")

            # Step
            for optimizer in optimizer_list:
                for group in optimizer.param_groups:
                    group["lr"] = lr * cosine(step, steps)
                optimizer.step()
                optimizer.zero_grad()
            for name, loss in losses.items():
                recent[name].append(loss)
            bar.set_postfix(losses, refresh=False)
    if rank == 0:
        save(steps, modules, optimizer_list, identity, a)
    return metrics

# ---------------------------------------------------------------- from the flags to checkpoints
def train(a, device, calls, argv):
    """Train the drafters {name: Call} that the flags `a` ask for, and save them.

    device: this process's own.  argv: the command line, for the record.
    """
    rank, _ = rank_and_world()
    # In half precision torch prefers cuDNN's attention, which builds a plan for each new length
    torch.backends.cuda.enable_cudnn_sdp(False)
    # The target and its tokenizer
    dtype = "auto" if device.startswith("cuda") or a.dtype == "bfloat16" else "float32"
    target, tokenizer = load.load_target(a.target, dtype, device, revision=a.revision,
                                         trust=a.trust_remote_code)
    target.requires_grad_(False)
    fingerprint = load.fingerprint(target, tokenizer)
    c = target.config.get_text_config()
    # The data
    data = documents.load(a.data, tokenizer, a.template, c.vocab_size, Path(a.work) / "data",
                          prepared=a.resume)             # a resumed run has it in --work
    pieces = pieces_of(data.documents, a.length)
    step_tokens = a.batch * a.length
    if pieces[:, 1].sum() <= a.length:                   # hardly what one wants to learn from
        raise UserError("--data has too few tokens: give more text, or less --length")
    if not len(pieces_of(data.held_documents, a.length)):
        print("no text is held out: drafters are measured on what they learn", file=sys.stderr)
        data = data._replace(held_tokens=data.tokens, held_documents=data.documents)
    steps = steps_in_epoch(pieces, step_tokens) if a.steps is None else a.steps
    identity = {flag: value for flag, value in vars(a).items() if flag not in MAY_CHANGE}
    identity |= {"target (its weights)": fingerprint["probe"], "text": data.digest}
    # The drafters
    modules, inits = {}, {}                  # inits: training.json of --init, or None
    for name, call in calls.items():
        torch.manual_seed(a.seed)            # the same whatever else the run trains
        folder = Path(a.init) / name if a.init else None
        modules[name], inits[name] = models.start(call, target, fingerprint, a.length,
                                                  data.tokens, folder)
    drafters = {name: models.drafter_of(calls[name].name, module)
                for name, module in modules.items()}
    frozen = FrozenTarget(target, modules, drafters)
    walks = Walks(target, frozen.forward, data, a.length, drafters)
    lr = a.lr or 5e-4 * math.sqrt(4096 / c.hidden_size)
    optimizer_list = optimizers(modules, a.optimizer)
    # Learn
    command = "python train.py " + shlex.join(argv)
    made_by = {"command": command, "date": time.strftime("%Y-%m-%d")}
    if rank == 0:
        log(a, made_by)
    metrics = fit(modules, optimizer_list, frozen, walks, data, steps, lr, identity, a)
    # Save
    if rank > 0:
        return
    for name, module in modules.items():
        about = {
            "kind": calls[name].name,
            **made_by,
            "seed": a.seed,
            "steps": steps,
            "tokens_seen": steps * step_tokens,
            "validation": metrics[name],
            "target": fingerprint,
            "init": inits[name],
        }                                    # models.save adds the config and the commit
        models.save(Path(a.out) / name, module, tokenizer, about)
        print(f"saved {Path(a.out) / name}")

@program
def main(argv):
    a = parser().parse_args(argv)
    check(a)
    calls = models.calls_of(a.drafters)
    with claim_folders(a, calls), joined(a.device) as device:
        train(a, device, calls, argv)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
