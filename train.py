"""Train drafters for any target.  (GLIDE, arXiv 2402.02082: sections 4.1, 5.1, app. A; EDD: 3.1, app. B)

    python train.py glide --target lmsys/vicuna-7b-v1.5 --data sharegpt.json --out my-glide
    torchrun --nproc-per-node 8 train.py glide edd --data ...      # several GPUs, recipes: docs/training.md

The idea.  A drafter learns to predict the next token while the target stays frozen.  GLIDE reads the target's
keys and values, EDD its hidden states, so each step needs one forward of the target: nearly the whole cost,
shared by all drafters of a run.  A drafter is a module with loss(batch), and predict(batch) -> logits.

    batch       shape            meaning
    ids         (B, T)           token ids, position 0 ... T-1; short windows are padded on the right
    learn       (B, T)           bool: row i predicts a token i + 1 that is learned from
    count       ()               such rows of the whole step: a sum of losses is divided by it
    sum         function         in_chunks: sums a loss over rows, so that no batch of logits stands whole
    kv[l]       2 x (B,H,T,d)    keys and values of the target's layer l, as its cache holds them
    hidden[k]   (B, T, D)        hidden_states[k]: the output of the target's layer k, for who reads it
    logits      (B, T, V)        what the target predicts after each id, for who learns from it

Differences from the papers:
 1. A window is a document or a piece of one: nothing attends across documents.  A batch has windows of like
    length, in an order that (seed, epoch) alone decides: a resumed run is an uninterrupted one.
 2. --init goes on with trained drafters: a second stage, where the papers have ShareGPT.
 3. Matrices may learn by Muon (torch.optim); the papers' AdamW is the default.
 4. Each drafter gets a temperature, fitted on held-out text, at which trees can trust its confidence.
"""
import argparse
import contextlib
import copy
import gzip
import hashlib
import importlib
import json
import math
import os
import resource
import signal
import statistics
import sys
import time
from array import array
from datetime import timedelta
from itertools import islice
from pathlib import Path

import huggingface_hub
import jinja2
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import cascade
import edd
import glide
import verify
from verify import UserError

HERE = Path(__file__).resolve().parent
STAND_IN = HERE / "checkpoints" / "target"        # the default target
# Chat messages as text, where a tokenizer has no template.
PLAIN = ("{% for turn in messages %}{{ turn.role | upper }}: {{ turn.content }}\n\n{% endfor %}"
         "{% if add_generation_prompt %}ASSISTANT:{% endif %}")
PIECE = 2 ** 16                                   # characters of a long text that are read at once
CHAIN = 5                                         # drafted tokens a round, of the speedup to expect
CHECKED = 2 ** 14                                 # held-out tokens that a validation looks at, at most
PATIENCE = timedelta(minutes=10)                  # with a process of the job that does not come, or answer
CHUNK = 1024                                      # rows whose logits stand at a time
HELD_OUT = 50                                     # every fiftieth document, unless its row says
RECIPES = {"glide": (64, 5e-4), "edd": (8, 1e-4)} # the papers' batch and learning rate
# Drafters by name: the file, and what the name stands for in it.  edd-h9 reads hidden_states[9] (Figure 5).
DRAFTERS = {"glide": (glide, {"glimpse": True}), "vanilla": (glide, {"glimpse": False})}
DRAFTERS |= {name: (edd, variant) for name, variant in edd.VARIANTS.items()}
NAMES = f"{' '.join(DRAFTERS)} edd-hN"
DRAFTERS |= {f"edd-h{k}": (edd, {"hidden": k}) for k in range(1, 200)}
CHATS = ("conversations", "conversation", "messages")         # ShareGPT; GLIDE's layout; the hub's
# Fields that make a document, behind the string that joins them.
FIELDS = (
    ("", "text"),
    ("", "prompt", "canonical_solution", "completion"),       # HumanEval
    ("\n", "instruction", "input", "output"),                 # Alpaca, Finance-Alpaca
    ("\n", "article", "highlights"),                          # CNN/DM
    ("", "whole_func_string"),                                # CodeSearchNet
)
# What a row asks, by the fields that it has.
CHOICES = "Question: {question}\nA. {choices[0]}\nB. {choices[1]}\nC. {choices[2]}\nD. {choices[3]}\nAnswer:"
ASKS = (
    ("prompt", "{prompt}"),
    ("text", "{text}"),
    ("question choices", CHOICES),                            # MMLU, in both spellings
    ("input A B C D", "Question: {input}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\nAnswer:"),
    ("question", "Question: {question}\nAnswer:"),            # GSM8K, Spider
    ("article", "Summarize: {article}\nSummary:"),            # CNN/DM
    ("instruction input", "{instruction}\n{input}\n"),
    ("instruction", "{instruction}\n"),
)
# The flags that all training has, checkpoints/make.py's too: name, type or choices, default, meaning.
FLAGS = (
    ("target", str, str(STAND_IN), "folder or hub name of the target"),
    ("target-dtype", ("float32", "bfloat16", "float16", "auto"), "float32", "how it is loaded"),
    ("init", str, None, "folder of drafters to start from (a second stage, on other data)"),
    ("out", str, str(HERE / "checkpoints"), "folder to save under"),
    ("work", str, str(HERE / "work"), "folder for token files and the state of a run"),
    ("steps", int, None, "one pass over the data when left out; 0: what --init has is only measured"),
    ("recipe", tuple(RECIPES), None, "whose --batch and --lr hold; when left out the first drafter's"),
    ("batch", int, None, "windows a step, of all processes; when left out 64 (GLIDE), 8 (EDD)"),
    ("micro", int, None, "windows a forward; when left out all that a process has in a step"),
    ("length", int, 512, "tokens a window"),
    ("loss-on", ("all", "answers"), "all", "answers: in chats what the assistant says"),
    ("lr", float, None, "peak learning rate; when left out 5e-4 (GLIDE), 1e-4 (EDD)"),
    ("warmup", float, 0.025, "fraction of the steps"),
    ("clip", float, 1.0, "largest norm of a drafter's gradient"),
    ("optimizer", ("adamw", "muon"), "adamw", "muon: for hidden matrices"),
    ("dtype", ("bfloat16", "float32"), "bfloat16", "autocast"),
    ("width", int, None, "d_D, GLIDE's hidden size; the target's when left out"),
    ("layers", int, 1, "N_D, GLIDE's layers"),
    ("layer", int, None, "target layer that GLIDE's top layer reads, from 0; the top one when left out"),
    ("block", int, 5, "L, block length of GLIDE's mask"),
    ("hidden", int, edd.HIDDEN, "which of the target's hidden_states EDD reads (Figure 5)"),
    ("seed", int, 0, "of weights and of the order"),
    ("every", int, 200, "steps between two savings of the state, and two validations"),
    ("shard-target", bool, False, "spread the target's layers over the processes (FSDP2)"),
    ("device", str, "cuda" if torch.cuda.is_available() else "cpu", "cpu or cuda"),
)
# --resume lets these change.
FREE = set("lr warmup resume every device out work command recipe micro shard_target spent".split())

# ---------------------------------------------------------------- processes
def place():
    """-> the number of this process, and of how many, as torchrun says."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

def say(text):
    """One process speaks for all."""
    if place()[0] == 0:
        print(text, file=sys.stderr)

def join(a):
    """Meet the other processes of torchrun's job; each takes a GPU of its own."""
    if "RANK" not in os.environ or dist.is_initialized():
        return
    if a.device == "cuda":
        a.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(a.device)
    try:
        dist.init_process_group("nccl" if a.device.startswith("cuda") else "gloo", timeout=PATIENCE)
    except Exception as why:
        reason = str(why).splitlines()[0][:100]
        raise ConnectionError(f"not all processes of the job came together ({reason}): start every one by "
                              "torchrun") from None

def mean(values, device):
    """The mean over all processes of some numbers, in one message -> floats."""
    values = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])
    if dist.is_initialized():
        dist.all_reduce(values)
    return (values / place()[1]).tolist()

def shard(target, device):
    """FSDP2: the weights of each decoder layer are spread over the processes; the others stay on each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh(torch.device(device).type, (place()[1],))
    for layer in target.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    return target.to(device)

# ---------------------------------------------------------------- text and tokens
def opened(path):
    """A file as text, .gz and .zst unpacked.  Newlines alone end lines: strings hold Unicode's other ends."""
    how = {"encoding": "utf-8", "newline": "\n"}
    if path.suffix == ".gz":
        return gzip.open(path, "rt", **how)
    if path.suffix != ".zst":
        return open(path, **how)
    for reader in ("zstandard", "compression.zstd"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(reader).open(path, "rt", **how)
    raise UserError(f"{path} cannot be read: pip install zstandard")

def parse(line):
    """JSON -> what it says, or None."""
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(line)

def stream_rows(path):
    """Yield the rows of a .json or .jsonl file, None for a bad line, or any other file's text in pieces."""
    path = Path(path)
    try:
        with opened(path) as file:
            if ".json" not in path.name:
                while text := file.read(PIECE) + file.readline():
                    yield from [text] if text.strip() else []
                return
            lines = file
            if ".jsonl" not in path.name:                # one list or row, or, whatever its name, one a line
                text = file.read()
                lines = text.split("\n") if parse(text) is None else [text]
            for line in filter(str.strip, lines):
                row = parse(line)
                yield from row if isinstance(row, list) else [row]
    except Exception as why:
        if isinstance(why, UserError):
            raise
        raise UserError(f"{path} cannot be read as text or JSON lines ({type(why).__name__}): mend it, or "
                        "name another file") from None

def read_rows(path):
    """All rows of a file, as a list: none may be bad."""
    rows = list(stream_rows(path))
    if None in rows:
        raise UserError(f"{path} cannot be read as text or JSON lines (row {1 + rows.index(None)}): mend it, "
                        "or name another file")
    return rows

def question_text(row, form=None):
    """What a row of a data set asks -> text; None where no field is known.  form: in place of ASKS."""
    if not isinstance(row, dict):
        return row if isinstance(row, str) else None
    fitting = (form for names, form in ASKS if all(row.get(name) for name in names.split()))
    form = form or next(fitting, None)
    return form and form.format_map(row)

def conversation(row):
    """A row of ShareGPT, "messages" or MT-Bench -> chat messages [{"role", "content"}]; any other: None."""
    messages = []
    try:
        if "turns" in row:                               # MT-Bench: what the user says, turn by turn
            return [{"role": "user", "content": turn} for turn in row["turns"]]
        for turn in next(row[name] for name in CHATS if name in row):
            role = turn.get("from", turn.get("role"))
            content = turn.get("value", turn.get("content"))
            if content:
                role = {"human": "user", "gpt": "assistant"}.get(role, role)
                messages.append({"role": role, "content": content})
    except (AttributeError, TypeError, StopIteration):   # it has another shape
        return None
    return messages

def document(row):
    """A row of a data set -> text, chat messages or token ids (a list); None where no field is known."""
    messages = conversation(row)
    if messages is not None or not isinstance(row, dict):
        return messages
    if isinstance(row.get("ids"), list):
        return row["ids"]
    if "question" in row:
        return f"{question_text({'question': row['question']})} {row.get('answer', '')}\n"
    for between, *names in FIELDS:
        if names[0] in row:
            return between.join(row[name] for name in names if isinstance(row.get(name), str))

def files_of(paths, flag):
    """All files of files and folders, in order; hidden ones are left out."""
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{flag}: {path} does not exist")
        inside = sorted(path.rglob("[!.]*")) if path.is_dir() else [path]
        yield from filter(Path.is_file, inside)

def documents(paths, flag="--data", bad=None):
    """Yield (place, row, document) of all rows; bad: a list for places of rows, and a folder's files, that
    are none."""
    known = ", ".join(names[1] for names in FIELDS)
    for file in files_of(paths, flag):
        number = 0
        try:
            for number, row in enumerate(stream_rows(file), 1):
                row = {"text": row} if isinstance(row, str) else row
                place, found = f"row {number} of {file}", document(row)
                if found is not None:
                    yield place, row, found
                    continue
                if bad is None:
                    raise UserError(f"{flag}: {place} has none of the fields conversations, messages, turns, "
                                    f"ids, question, {known}, or cannot be read as text or JSON lines")
                bad.append(place)
        except UserError:
            if bad is None or str(file) in map(str, paths):
                raise
            bad.append(f"{file} from row {number + 1} on")

def is_chat(found):
    return not isinstance(found, str) and bool(found) and isinstance(found[0], dict)

def chat_texts(chat, tokenizer, answers):
    """A chat as its template writes it; answers: and, for each answer, the chat up to it, and with it."""
    def written(end, ask=False):
        return tokenizer.apply_chat_template(chat[:end], chat_template=tokenizer.chat_template or PLAIN,
                                             tokenize=False, add_generation_prompt=ask)
    try:
        texts = [written(len(chat))]
        for i, message in enumerate(chat):
            if answers and message["role"] == "assistant":
                texts += [written(i, True) if i else "", written(i + 1)]
        return texts
    except (jinja2.TemplateError, TypeError):            # for example, roles that do not alternate
        return [""]

def same(a, b):
    """How many ids of two lists are equal, from the first on."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.array(a[:n]) != np.array(b[:n]))
    return int(differ[0]) if len(differ) else n

def only_answers(ids, *around):
    """ids of a chat; around: those up to an answer, those with it, ... -> ids, ~id for all others."""
    learn = np.zeros(len(ids), bool)
    for before, after in zip(around[::2], around[1::2]):
        learn[same(ids, before):same(ids, after)] = True
    return np.where(learn, ids, np.invert(ids))

def encode_all(found, tokenizer, special_tokens=True, answers=False):
    """Documents -> lists of ids, at once, since the tokenizer has threads; none for what it refuses.

    Messages go through the tokenizer's own template, or PLAIN.  answers: what nobody shall learn to say
    comes as its complement, ~id.
    """
    plain = [text for text in found if isinstance(text, str)]
    chats = [chat_texts(chat, tokenizer, answers) if is_chat(chat) else [] for chat in found]
    rows = []
    for texts, special in ((plain, special_tokens), (sum(chats, []), False)):
        ids = tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"] if texts else []
        rows.append(iter(ids))
    for document, texts in zip(found, chats):
        if isinstance(document, str):
            ids = next(rows[0])
            yield ids if document.strip() else []
        elif texts:
            ids, *around = [next(rows[1]) for _ in texts]
            yield only_answers(ids, *around) if answers else ids
        else:
            yield document

def encode(found, tokenizer, special_tokens=True):
    """A document -> list of token ids."""
    return next(encode_all([found], tokenizer, special_tokens))

def write_tokens(path, a, tokenizer, vocab):
    """Encode --data into `path`, int32 a token -> the index (documents, 4): start, length, held, times."""
    bad, index, start, eos = [], array("q"), 0, tokenizer.eos_token_id
    entries, answers = enumerate(documents(a.data, bad=bad), 1), a.loss_on == "answers"
    with open(path, "wb") as file:
        while some := list(islice(entries, 64)):
            encoded = encode_all([found for _, (*_, found) in some], tokenizer, answers=answers)
            for (number, (where, row, _)), ids in zip(some, encoded):
                if not len(ids):
                    bad.append(where)
                    continue
                if "ids" in row and not 0 <= min(ids) <= max(ids) < vocab:
                    raise UserError(f"--data: {where} holds token id {max(ids)}, the target has {vocab} "
                                    "tokens: give text, or ids of its own tokenizer")
                if eos is not None:
                    ids = np.append(ids, eos if ids[-1] >= 0 else ~eos)
                file.write(np.array(ids, "i4").tobytes())
                held = row.get("held_out", number % HELD_OUT == 0)
                index.extend((start, len(ids), held, row.get("times", 1)))
                start += len(ids)
    if bad:
        say(f"left out, {len(bad)} rows without text: {', '.join(bad[:9])}")
    return np.array(index, "i8").reshape(-1, 4)

def read_data(a, tokenizer, vocab):
    """--data -> its tokens (n,), their index (documents, 4), their key; encoded into --work at first."""
    about = f"{vocabulary_fingerprint(tokenizer)} {tokenizer.chat_template} {a.loss_on}"
    content = hashlib.sha256(about.encode())
    for path in files_of(a.data, "--data"):
        content.update(f"{path.suffixes} {path.stat().st_size} ".encode())
        with open(path, "rb") as file:
            while block := file.read(PIECE):
                content.update(block)
    # The key covers what was encoded: a file that was rewritten is encoded again.
    path = Path(a.work) / f"tokens-{content.hexdigest()[:16]}"
    tokens, index = path.with_suffix(".bin"), path.with_suffix(".npy")
    if place()[0] == 0 and not index.exists():
        found = []
        write_atomically(tokens, lambda part: found.append(write_tokens(part, a, tokenizer, vocab)))
        write_atomically(index, lambda part: found[0].tofile(part))
    if dist.is_initialized():
        dist.barrier(dist.new_group(backend="gloo", timeout=timedelta(days=9)))
    rows = np.fromfile(index, "i8").reshape(-1, 4)
    if not len(rows):
        raise UserError("--data has no text: give files or folders that do")
    return np.memmap(tokens, "i4", "r"), rows, path.name

def windows_of(index, length, held):
    """The documents that are held out, or the others, in pieces of `length` or less -> start, size (n, 2)."""
    chosen = index[index[:, 2] == held]
    start, size, _, _ = np.repeat(chosen, chosen[:, 3], 0).T
    pieces = -(-size // length)                          # of each document
    piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    size = np.repeat(size, pieces) - piece * length
    found = np.stack((np.repeat(start, pieces) + piece * length, np.minimum(size, length)), 1)
    return found[found[:, 1] > 1]

def order(windows, batch, seed, epoch):
    """All windows (n, 2) once -> (steps, batch, 2), shuffled by (seed, epoch) alone."""
    rng = np.random.default_rng([seed, epoch])
    steps = max(1, len(windows) // batch)
    shuffled = windows[np.resize(rng.permutation(len(windows)), steps * batch)]
    # Sorted by size, some batches at a time, so that those of a batch need little padding
    for i in range(0, len(shuffled), 64 * batch):
        some = shuffled[i:i + 64 * batch]
        shuffled[i:i + 64 * batch] = some[np.argsort(some[:, 1], kind="stable")]
    return rng.permutation(shuffled.reshape(steps, batch, 2))

def gather(tokens, windows):
    """-> ids (B, T) of these windows (B, 2), padded on the right; learn (B, T), False there."""
    found = torch.full((len(windows), windows[:, 1].max()), ~0)
    for row, (start, size) in zip(found, windows):
        row[:size] = torch.from_numpy(tokens[start:start + size].astype("i8"))
    learn = F.pad(found[:, 1:] >= 0, (0, 1))
    return torch.where(found < 0, ~found, found), learn

# ---------------------------------------------------------------- the loop that every training shares
def write_atomically(path, write):
    """Call `write(temporary path)`, then move the result to `path`: a killed write leaves the old file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        write(part)
        os.replace(part, path)
    except Exception as why:
        part.unlink(missing_ok=True)
        if isinstance(why, UserError):
            raise
        raise UserError(f"{path} cannot be written ({why}): what was there is still there") from None

def save_drafter(folder, drafter, about):
    """A drafter as model.safetensors (bfloat16) and training.json (its config and how it was made)."""
    weights = {name: w.to("cpu", torch.bfloat16).contiguous() for name, w in drafter.state_dict().items()}
    about = json.dumps({"config": vars(drafter.config), **about}, indent=1)
    write_atomically(folder / "model.safetensors", lambda part: save_file(weights, part, {"format": "pt"}))
    write_atomically(folder / "training.json", lambda part: part.write_text(about + "\n"))

def how_made(a, metrics, **more):
    """What training.json says: the command, seed, tokens seen, date, validation figures."""
    return {"command": a.command, "seed": a.seed, "steps": a.steps, "date": time.strftime("%Y-%m-%d"),
            "tokens_seen": a.spent["tokens"], "validation": metrics, **more}

def optimizers(module, kind):
    """AdamW with the official code's betas; kind "muon": hidden matrices by Muon, the rest by AdamW."""
    hidden, rest = [], []
    for name, weight in module.named_parameters():
        matrix = weight.ndim == 2 and "embed" not in name and "head" not in name
        (hidden if matrix and kind == "muon" else rest).append(weight)
    found = [torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.01)]
    if hidden:
        found.append(torch.optim.Muon(hidden, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return found

def cosine(step, steps, warmup):
    """Learning rate factor: linear warm-up over `warmup` (a fraction of `steps`), then half a cosine to 0."""
    ramp = max(1, round(steps * warmup))
    if step < ramp:
        return (step + 1) / ramp
    return 0.5 * (1 + math.cos(math.pi * (step - ramp) / (steps - ramp)))

def restore(path, setting, together, learners):
    """Read an interrupted run's state -> steps done, tokens seen."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as why:
        raise UserError(f"{path} cannot be read ({type(why).__name__}): leave out --resume") from None
    changed = [name for name in setting if setting[name] != state["setting"].get(name)]
    if changed:
        raise UserError(f"--resume: the interrupted run in {path} had another {', '.join(changed)}: give the "
                        "same, or leave out --resume (--lr, --warmup, --every and --micro may change)")
    together.load_state_dict(state["models"])
    for learner, kept in zip(learners, state["learners"]):
        learner.load_state_dict(kept)
    return state["step"], state["tokens"]

def clock(device):
    """Seconds, when the device has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

class Log:
    """JSON lines in --work, and what the bar shows: what training gives, and what it costs."""
    def __init__(self, path, a, seen):
        self.path, self.a = path, a
        a.spent = {"tokens": seen}                       # seconds of the target, and all tokens so far
        self.begin()

    def begin(self):
        """Training goes on."""
        self.a.spent["target"], self.losses = 0.0, []
        self.seen, self.began = self.a.spent["tokens"], clock(self.a.device)

    def costs(self):
        """-> what training has cost since it began, or went on."""
        spent, seconds = self.a.spent, clock(self.a.device) - self.began
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.a.device.startswith("cuda"):
            memory = torch.cuda.max_memory_allocated(self.a.device)
        new = spent["tokens"] - self.seen
        return {"tokens_seen": spent["tokens"], "tokens_per_s": round(new / seconds), "peak_memory": memory,
                "target_share": round(spent["target"] / seconds, 3)}

    def write(self, step, costs, metrics):
        """A line of the file; on the screen what was measured, a line a drafter."""
        row = {"step": step, **costs}
        for name, values in metrics.items():
            lost = [loss[name] for loss in self.losses]
            row[name] = {"loss": statistics.mean(lost) if lost else None, **values}
            tqdm.write(f"step {step} {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in values.items()))
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")

def fit(models, losses, evaluate, a):
    """Train the modules {name: module} with the flags `a` -> {name: last evaluation}.

    losses(step) yields {name: loss} of each part of a batch, by the step alone, and counts in a.spent its
    tokens, and the target's seconds.  evaluate() -> {name: {metric: value}}, with an "alpha".
    """
    together = torch.nn.ModuleDict(models)
    learners = optimizers(together, a.optimizer)         # the rate is set at each step
    setting = {name: value for name, value in vars(a).items() if name not in FREE}
    path = Path(a.work) / f"{'-'.join(models)}.pt"
    start, seen = restore(path, setting, together, learners) if a.resume and path.exists() else (0, 0)
    autocast = torch.autocast(torch.device(a.device).type, torch.bfloat16, enabled=a.dtype == "bfloat16")
    path.parent.mkdir(parents=True, exist_ok=True)
    first, log = place()[0] == 0, Log(path.with_suffix(".jsonl"), a, seen)

    def save(step):
        state = {"step": step, "tokens": seen, "setting": setting, "models": together.state_dict()}
        state["learners"] = [learner.state_dict() for learner in learners]
        if first:
            write_atomically(path, lambda part: torch.save(state, part))

    def stop(why):
        """All processes come here; one says why."""
        raise UserError(why) if first else SystemExit(2)

    # Ctrl-C lets the step under way end, and saves; a second one stops at once (what is saved stays whole),
    # but for torchrun's, which passes on the one that all processes have got.
    asked = []
    once = not dist.is_initialized()
    handler = signal.signal(signal.SIGINT, lambda *_: sys.exit(130) if asked and once else asked.append(True))
    bar = tqdm(range(start, a.steps + 1), total=a.steps, initial=start, unit="step", disable=not first)
    try:
        for step in bar:
            if step in (start, a.steps) or step % a.every == 0:
                costs = log.costs()
                together.eval()
                with torch.no_grad(), autocast:
                    metrics = evaluate()
                if first:
                    log.write(step, costs, metrics)
                log.begin()
            if step == a.steps:
                break
            together.train()
            found, parts = dict.fromkeys(models, 0.0), iter(losses(step))
            while True:
                with autocast:
                    part = next(parts, None)
                if part is None:
                    break
                sum(part.values()).backward()
                found = {name: found[name] + part[name].detach() for name in models}
            *values, stopped = mean([*found.values(), len(asked)], a.device)
            log.losses.append(dict(zip(models, values)))
            worth = ""
            for (name, module), loss in zip(models.items(), values):
                norm = torch.nn.utils.clip_grad_norm_(module.parameters(), a.clip).item()
                if not math.isfinite(loss + norm):
                    advice = "lower --lr and go on with --resume" if step > start else "no --lr mends that"
                    stop(f"step {step}: loss of {name} is {loss}, the gradient {norm}: {advice}")
                known = [k for k in ("alpha", "tau", "speedup") if k in metrics[name]]
                worth += f", {name} loss {loss:.3f} " + " ".join(f"{k} {metrics[name][k]:.3f}" for k in known)
            # Saved before the update: these weights gave a finite loss, so going on from them works.
            if step % a.every == 0 or stopped:
                save(step)
            if stopped:
                stop(f"stopped after {step} of {a.steps} steps: the same with --resume goes on")
            for learner in learners:
                for group in learner.param_groups:
                    group["lr"] = a.lr * cosine(step, a.steps, a.warmup)
                learner.step()
                learner.zero_grad()
            seen = a.spent["tokens"]
            costs = log.costs()
            shown = "{tokens_per_s} tokens/s, target {target_share:.0%}".format(**costs)
            shown += f", {costs['peak_memory'] / 2 ** 30:.1f} GiB"
            bar.set_postfix_str(shown + worth, refresh=False)
    finally:
        bar.close()
        signal.signal(signal.SIGINT, handler)
    save(a.steps)
    return metrics

# ---------------------------------------------------------------- the target and its drafters
def on_hub(name, revision, role):
    """Ask the hub for a model once, without the library's retries -> whether only local files will do."""
    try:
        huggingface_hub.model_info(name, revision=revision, timeout=10)
    except (huggingface_hub.errors.RepositoryNotFoundError, huggingface_hub.errors.RevisionNotFoundError):
        at = f" at revision {revision}" if revision else ""
        raise UserError(f"{role}: the hub has no {name}{at}, or shows it to nobody that is not logged in "
                        "(`hf auth login`): check the name") from None
    except Exception:                                    # no network: what was loaded once is still here
        return True
    return False

def load_target(name, dtype, device, attention="sdpa", encoder_decoder=False, role="the target",
                revision=None, trust=False):
    """(model, tokenizer) as transformers loads them; encoder_decoder: T5 may come too; role: for mistakes.

    device "auto": spread over what there is, by accelerate.  trust: run the model's own code, too.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    give = "give a complete folder or a hub name of a causal language model"
    hub = str(name).count("/") == 1 and not Path(name).is_absolute()            # OWNER/NAME
    if not Path(name).exists() and not hub:
        raise UserError(f"{role} {name} does not exist: {give}")
    if device == "auto" and not transformers.utils.is_accelerate_available():
        raise UserError("--device auto needs accelerate: pip install accelerate")
    here = not Path(name).exists() and on_hub(name, revision, role)
    more = {"revision": revision, "trust_remote_code": trust, "local_files_only": here}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **more)
        two = config.is_encoder_decoder
        if two and not encoder_decoder:
            raise UserError("it is an encoder-decoder model")
        kind = transformers.AutoModelForSeq2SeqLM if two else transformers.AutoModelForCausalLM
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **more)
        # Quantised weights are put in place as they are loaded, as those of a model that is spread are.
        placed = device == "auto" or getattr(config, "quantization_config", None)
        if placed:
            more["device_map"] = "auto" if device == "auto" else {"": device}
        model = kind.from_pretrained(name, dtype=dtype, attn_implementation=attention, **more)
    except Exception as why:
        reason = f"{type(why).__name__}: {str(why).splitlines()[0][:150]}"
        if isinstance(why.__cause__, huggingface_hub.errors.GatedRepoError):
            reason, give = "it is gated", f"accept its terms on huggingface.co/{name}, and `hf auth login`"
        elif here and isinstance(why, OSError):
            reason = "the hub cannot be reached, and it was not loaded before"
        raise UserError(f"{role} {name} cannot be loaded ({reason}): {give}") from None
    return (model if placed else model.to(device)).eval(), tokenizer

def vocabulary_fingerprint(tokenizer):
    """What tells one vocabulary from another: 16 hex digits of a hash of all tokens and their ids."""
    tokens = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(tokens.encode()).hexdigest()[:16]

def fingerprint(model, tokenizer=None):
    """What tells one target from another, a fine-tuned one from its base too: shapes, and some weights."""
    about = {"class": type(model).__name__, "probe": {}}
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        about[name] = getattr(model.config.get_text_config(), name)
    # A weight of each of 32 matrices, the first and the last among them: of those that are here, and not
    # quantised (to integers, or, by torchao, to tensors made of several)
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2 and p.is_floating_point()
                and not p.is_meta and not hasattr(p, "__tensor_flatten__")]
    for i in range(32 if matrices else 0):
        name, matrix = matrices[round(i * (len(matrices) - 1) / 31)]
        weight = matrix[matrix.shape[0] // 3, matrix.shape[1] // 2]
        about["probe"][name] = float(f"{weight.item():.5g}")
    if tokenizer is not None:
        about["vocabulary"] = vocabulary_fingerprint(tokenizer)
    return about

def same_target(a, b):
    """Whether two fingerprints are of one model: equal in what both say, up to half precision's rounding."""
    if not isinstance(a["probe"], dict) or not isinstance(b["probe"], dict):
        return False                                     # they were lists once, whose weights had no names
    both = [name for name in a["probe"] if name in b["probe"]]
    weights = [[about["probe"][name] for name in both] for about in (a, b)]
    close = both and np.allclose(*weights, rtol=1 / 128, atol=1e-6)
    return bool(close) and all(a[key] == b[key] for key in a if key in b and key != "probe")

def in_chunks(loss, learn, x, *others):
    """Sum of loss(x, *others) over rows of x (B, T, D) and others (B, T, ...) that learn (B, T) chooses.

    What a chunk's loss computes, its logits, is forgotten, and computed again for the gradient.
    """
    def of_chunk(x, rows):
        return loss(x, *[other.flatten(0, 1)[rows] for other in others])
    rows = learn.flatten().nonzero()[:, 0]                             # (n,)
    total = 0
    for part in zip(x[learn].split(CHUNK), rows.split(CHUNK)):
        total = total + checkpoint(of_chunk, *part, use_reentrant=False, preserve_rng_state=False)
    return total

class Kept(transformers.DynamicCache):
    """A cache of the layers that somebody reads: none is read twice in a forward over whole windows."""
    def __init__(self, layers):
        super().__init__()
        self.wanted, self.rows = layers, {}

    def update(self, k, v, layer_idx, *args, **kwargs):
        if self.wanted is None or layer_idx in self.wanted:
            self.rows[layer_idx] = k, v
        return k, v

def frozen_forward(model, ids, hidden=(), kv=None, logits=True, learn=None, count=None):
    """One forward of the frozen target -> batch.  hidden, kv: what somebody reads (kv None: every layer).

    logits: whether somebody reads them.  learn None: from all rows but the last; count None: of this batch.
    """
    if learn is None:
        learn = F.pad(torch.ones_like(ids[:, 1:], dtype=torch.bool), (0, 1))
    count = learn.sum().clamp(min=1) if count is None else count
    states, cache = {}, Kept(kv)
    hooks = verify.capture(model, hidden, states)
    with torch.no_grad():
        found = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=0 if logits else 1)
    for hook in hooks:
        hook.remove()
    batch = {"ids": ids, "learn": learn, "count": count, "sum": in_chunks, "hidden": states, "kv": cache.rows}
    return batch | {"logits": found.logits if logits else None}

def read_by(models):
    """What of the target's forward draft models read, as frozen_forward takes it."""
    configs = [m.config for m in models.values()]
    return {"hidden": {c.hidden for c in configs if getattr(c, "encoding", False)},
            "kv": {layer for c in configs for layer in getattr(c, "layers_read", ())},
            "logits": any(getattr(c, "loss", "ce") != "ce" for c in configs)}

def make_drafter(name, target, a):
    """A draft model for `target`, fresh, or the one in --init -> (module, its training.json or None)."""
    module, variant = DRAFTERS[name]
    if a.init:
        drafter, before = module.load(Path(a.init) / name, target, a.length)
        return drafter.model.float(), before
    if module is edd:
        config = edd.Config.for_target(target, **{"hidden": a.hidden, **variant})
        return edd.KINDS[config.kind][0](config, target).float(), None
    config = glide.Config.for_target(target, a.width, a.layers, variant["glimpse"], a.block, a.layer)
    tables = glide.target_angles(target, a.length, config.layers_read)
    return glide.Glide(config, tables).to(target.device), None

def greedy_temperature(logits, choice):
    """Temperature scaling (Guo et al. 2017) -> T for which softmax(logits / T) best predicts greedy choices.

    logits (n, V), choice (n,).  Who learned the target's distribution (KL) is right about draws from it; the
    greedy choice is more certain than that, and confidence is what trees are built on.
    """
    grid = [0.3 * 1.03 ** i for i in range(89)]          # 0.3 ... 4
    return min(grid, key=lambda t: F.cross_entropy(logits.float() / t, choice).item())

@torch.no_grad()
def relative_cost(module, target):
    """c: a step of the drafter over one of the target, over one token, as decoding takes them; or None."""
    kind = edd.KINDS.get(getattr(module.config, "kind", None), (None, glide.Drafter))[1]
    if not isinstance(module, (edd.DraftModel, glide.Glide)):
        return None
    # A copy in the target's type; of the target's own parts there is none.
    decoding, own = verify.Target(target), getattr(module, "target", None)
    drafter = kind(copy.deepcopy(module, {id(own): own}).to(decoding.dtype))
    decoding.watch(drafter.needs)
    decoding.prefill([0])
    drafter.begin(decoding.view())
    token, seconds = torch.zeros(1, dtype=torch.long, device=decoding.device), []
    for i in range(5):
        times = [clock(decoding.device)]
        decoding.forward(token)
        times.append(clock(decoding.device))
        drafter.expand(token, [i - 1])
        times.append(clock(decoding.device))
        seconds.append(np.diff(times))
    decoding.watch({})
    of_target, of_drafter = np.median(seconds[1:], 0)    # the first warms up
    return of_drafter / of_target

def run_lengths(right, block):
    """right (n,) bool, from a block's first row on -> (rounds, CHAIN): which of a round's are accepted."""
    rounds = right[:len(right) // block * block].unflatten(0, (-1, block))[:, :CHAIN]
    return rounds.long().cumprod(1)

class Together(torch.nn.Module):
    """All draft models as one, which DistributedDataParallel wraps."""
    def __init__(self, models):
        super().__init__()
        self.models = torch.nn.ModuleDict(models)

    def forward(self, batch):
        return {name: m.loss(batch) for name, m in self.models.items()}

def train_together(models, target, data, a):
    """Train the draft models {name: module}, all from one target forward a step -> {name: metrics}."""
    tokens, windows, held = data
    (rank, processes), reads, orders = place(), read_by(models), {}
    costs = {}
    for name, module in models.items():
        # A sharded target's step is no decoding's.
        costs[name] = None if a.shard_target else relative_cost(module, target)
        if costs[name] is not None:
            say(f"{name}: a step costs {costs[name]:.3f} of the target's, measured on one token")
    engine = Together(models)
    if dist.is_initialized():
        engine = torch.nn.parallel.DistributedDataParallel(engine)

    def frozen(chosen, **more):
        ids, learn = gather(tokens, chosen)
        began = clock(a.device)
        batch = frozen_forward(target, ids.to(a.device), learn=learn.to(a.device), **{**reads, **more})
        a.spent["target"] += clock(a.device) - began
        return batch

    def losses(step):
        epoch, number = divmod(step, max(1, len(windows) // a.batch))
        if epoch not in orders:
            orders.clear()
            orders[epoch] = order(windows, a.batch, a.seed + 1, epoch)
        chosen = orders[epoch][number]                                 # (batch, 2), of all processes
        # DistributedDataParallel takes the mean over processes, and the sum is meant.
        count = max(1, gather(tokens, chosen)[1].sum().item()) / processes
        mine = chosen[rank::processes]
        micro = a.micro or len(mine)
        for i in range(0, len(mine), micro):
            batch = frozen(mine[i:i + micro], count=count)
            # EDD draws its block.
            batch |= {"block": None, "random": np.random.default_rng([a.seed + 3, step])}
            last = i + micro >= len(mine)
            with contextlib.nullcontext() if last or processes == 1 else engine.no_sync():
                yield engine(batch)
        a.spent["tokens"] += chosen[:, 1].sum().item()

    def evaluate():
        """On held-out text, against the target's first choices: alpha, tau, the loss, the temperature."""
        found, metrics = {name: [] for name in models}, {}
        few = max(1, min(a.batch, CHECKED // a.length))
        for window in order(held, few, 10 ** 6, 0)[0]:
            batch = frozen(window[None], logits=True) | {"block": a.block}
            choice = batch["logits"][0].argmax(-1)                     # (T,)
            counted = batch["learn"][0].clone()
            counted[:a.block] = False                                  # the first block sees no target
            for name, m in models.items():
                logits = m.predict(batch)[0]                           # (T, V)
                right = logits.argmax(-1) == choice
                runs = run_lengths(right[a.block:-1], a.block)
                sums = (m.loss(batch) * batch["count"], batch["count"], right[counted].sum(), counted.sum(),
                        runs.sum(), len(runs))
                found[name].append((torch.tensor(sums), logits[counted][::4], choice[counted][::4]))
        for name, rows in found.items():
            sums, logits, choice = zip(*rows)
            loss, count, right, tested, run, rounds = sum(sums).tolist()
            alpha = right / max(1, tested)
            t = greedy_temperature(torch.cat(logits), torch.cat(choice))
            metrics[name] = {"alpha": alpha, "tau": 1 + run / max(1, rounds), "held_out_loss": loss / count}
            if costs[name] is not None:
                metrics[name]["speedup"] = cascade.ewif_speculative(alpha, costs[name], CHAIN)
            metrics[name]["temperature"] = t
        return metrics
    return fit(models, losses, evaluate, a)

# ---------------------------------------------------------------- command line
class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are one sentence, as all mistakes are here."""

    def error(self, message):
        raise UserError(f"{message} (see --help)")

def add_flags(parser, names):
    """The flags of FLAGS that have these names; with a target comes what loads it from the hub."""
    for name, kind, default, meaning in FLAGS:
        takes = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        if kind is bool:
            takes = {"action": "store_true"}
        if name in names:
            parser.add_argument(f"--{name}", **takes, default=default, help=meaning)
    if "target" in names:
        parser.add_argument("--revision", help="of the target on the hub: a branch, a tag, a commit")
        parser.add_argument("--trust-remote-code", action="store_true", help="run the target's own code, too")

def prepare(a):
    """Check the flags -> (target, tokenizer, data); fills in --steps."""
    for name in ("batch", "lr", "width", "layers", "block", "every", "micro", "clip"):
        if getattr(a, name) is not None and getattr(a, name) <= 0:
            raise UserError(f"--{name} is {getattr(a, name)}: it must be above 0")
    if a.steps is not None and a.steps < (0 if a.init else 1):
        raise UserError(f"--steps is {a.steps}: it must be above 0 (or 0 with --init, to measure alone)")
    if a.length <= a.block:
        raise UserError(f"--length {a.length} must be longer than a block of {a.block}")
    if a.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is available here; use --device cpu")
    if a.batch % place()[1]:
        raise UserError(f"--batch {a.batch} does not part into {place()[1]} processes: give a multiple of it")
    join(a)
    torch.manual_seed(a.seed)
    target, tokenizer = load_target(a.target, a.target_dtype, "cpu" if a.shard_target else a.device,
                                    revision=a.revision, trust=a.trust_remote_code)
    verify.Target(target)                                # refuses what cannot be decoded with
    # From here on a.data stands for the content, which a resumed run must share.
    tokens, index, a.data = read_data(a, tokenizer, target.config.get_text_config().vocab_size)
    windows, held = (windows_of(index, a.length, held) for held in (False, True))
    if windows[:, 1].sum() <= a.length:
        raise UserError(f"--data has too few tokens for windows of {a.length}: more text, or less --length")
    if a.steps is None:                                  # one epoch, as in the papers
        a.steps = max(1, len(windows) // a.batch)
    held = held[held[:, 1] > a.block + 1]                # beyond the first block something is measured
    if not len(held):
        say("too little text is held out: validation is on what is trained on")
        held = windows[windows[:, 1] >= min(windows[:, 1].max(), a.block + 2)]
    return target.requires_grad_(False), tokenizer, (tokens, windows, held)

def run(argv):
    p = Parser(description="Train drafters.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("what", nargs="+", help=f"any of: {NAMES}")
    p.add_argument("--data", nargs="+", required=True, help="files or folders to train on")
    p.add_argument("--resume", action="store_true", help="go on from the state in --work")
    add_flags(p, [name for name, *_ in FLAGS])
    a = p.parse_args(argv)
    a.command = " ".join(["python train.py", *argv])
    unknown = [name for name in a.what if name not in DRAFTERS]
    if unknown:
        raise UserError(f"cannot train {' '.join(unknown)}: name drafters among {NAMES}")
    batch, lr = RECIPES[a.recipe or DRAFTERS[a.what[0]][0].__name__]
    a.batch, a.lr = a.batch or batch, a.lr or lr
    target, tokenizer, data = prepare(a)
    mine, models, before = fingerprint(target, tokenizer), {}, {}
    if a.shard_target:
        target = shard(target, a.device)
    for name in a.what:
        try:
            torch.manual_seed(a.seed)                    # each as if it were alone
            models[name], before[name] = make_drafter(name, target, a)
        except ValueError as why:
            raise UserError(str(why)) from None
        if a.init and not same_target(before[name]["target"], mine):
            raise UserError(f"--init: the drafter {name} in {a.init} was made for another target")
    metrics = train_together(models, target, data, a)
    for name, model in models.items() if place()[0] == 0 else ():
        about = how_made(a, metrics[name], kind=name, target=mine, init=before[name])
        save_drafter(Path(a.out) / name, model, about)
        print(f"saved {Path(a.out) / name}")

def main(argv):
    """Exit status: 0; 2 after one sentence, about a mistake or Ctrl-C."""
    try:
        run(argv)
    except (UserError, OSError, RuntimeError) as why:
        rank, together = place()[0], dist.is_initialized()
        left = together and not isinstance(why, UserError) and "onnection" in str(why)
        if isinstance(why, RuntimeError) and not left:
            raise
        # What all processes find before they have met, one of them says.
        if rank == 0 or together or isinstance(why, OSError):
            reason = "another process has ended: its own words say why" if left else why
            print(f"train.py: {f'process {rank}: ' if rank else ''}{reason}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
