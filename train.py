"""Train drafters for any target.  (GLIDE, arXiv 2402.02082: sections 4.1, 5.1, app. A; EDD: 3.1, app. B)

    python train.py glide --target lmsys/vicuna-7b-v1.5 --data sharegpt.json --out my-glide
    python train.py edd vdm --data work/corpus                    # recipes: docs/training.md

The idea.  A drafter learns to predict the next token while the target stays frozen.  GLIDE reads the target's
keys and values, EDD its hidden states, so each step needs one forward of the target: nearly the whole cost,
shared by all drafters of a run.  A drafter is a module with loss(batch) -> (loss, logits).

    batch       shape            meaning
    ids         (B, T)           token ids, position 0 ... T-1
    kv[l]       2 x (B,H,T,d)    keys and values of the target's layer l, as its cache holds them
    hidden[k]   (B, T, D)        hidden_states[k]: the output of the target's layer k, for who reads it
    logits      (B, T, V)        what the target predicts after each id

Differences from the papers:
 1. Windows of tokens are drawn at random, at each step by (seed, step) alone, where the papers pass over the
    data: a resumed run is an uninterrupted one, bit for bit.  A window may span the end of a document.
 2. --init goes on with trained drafters: a second stage, where the papers have ShareGPT.
 3. Matrices may learn by Muon (torch.optim); the papers' AdamW is the default.
 4. Each drafter gets a temperature, fitted on held-out text, at which trees can trust its confidence.
"""
import argparse
import gzip
import hashlib
import json
import math
import os
import signal
import sys
import time
from array import array
from pathlib import Path

import huggingface_hub
import jinja2
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from tqdm import tqdm

import edd
import glide
import verify
from verify import UserError

HERE = Path(__file__).resolve().parent
STAND_IN = HERE / "checkpoints" / "target"        # the default target
# Chat messages as text, where a tokenizer has no template.
PLAIN = "{% for turn in messages %}{{ turn.role | upper }}: {{ turn.content }}\n\n{% endfor %}"
HELD_OUT = 50                                     # every fiftieth document, unless its row says
RECIPES = {glide: (64, 5e-4), edd: (8, 1e-4)}     # the papers' batch and learning rate
# Drafters by name: the file, and what the name stands for in it.  edd-h9 reads hidden_states[9] (Figure 5).
DRAFTERS = {"glide": (glide, {"glimpse": True}), "vanilla": (glide, {"glimpse": False})}
DRAFTERS |= {name: (edd, variant) for name, variant in edd.VARIANTS.items()}
NAMES = f"{' '.join(DRAFTERS)} edd-hN"
DRAFTERS |= {f"edd-h{k}": (edd, {"hidden": k}) for k in range(1, 200)}
# Fields that make a document, behind the string that joins them.
FIELDS = (
    ("", "text"),
    ("", "prompt", "canonical_solution", "completion"),       # HumanEval
    ("\n", "instruction", "input", "output"),                 # Alpaca, Finance-Alpaca
    ("\n", "article", "highlights"),                          # CNN/DM
    ("", "whole_func_string"),                                # CodeSearchNet
)
# The flags that all training has, checkpoints/make.py's too: name, type or choices, default, meaning.
FLAGS = (
    ("target", str, str(STAND_IN), "folder or hub name of the target"),
    ("target-dtype", ("float32", "bfloat16", "float16", "auto"), "float32", "how it is loaded"),
    ("init", str, None, "folder of drafters to start from (a second stage, on other data)"),
    ("out", str, str(HERE / "checkpoints"), "folder to save under"),
    ("work", str, str(HERE / "work"), "folder for token files and the state of a run"),
    ("steps", int, None, "one pass over the data when left out; 0: what --init has is only measured"),
    ("batch", int, None, "windows a step; when left out GLIDE's 64, or EDD's 8 where one is named first"),
    ("length", int, 512, "tokens a window"),
    ("lr", float, None, "peak learning rate; when left out GLIDE's 5e-4, or EDD's 1e-4"),
    ("warmup", float, 0.025, "fraction of the steps"),
    ("optimizer", ("adamw", "muon"), "adamw", "muon: for hidden matrices"),
    ("dtype", ("bfloat16", "float32"), "bfloat16", "autocast"),
    ("width", int, None, "d_D, GLIDE's hidden size; the target's when left out"),
    ("layers", int, 1, "N_D, GLIDE's layers"),
    ("layer", int, None, "target layer that GLIDE's top layer reads, from 0; the top one when left out"),
    ("block", int, 5, "L, block length of GLIDE's mask"),
    ("hidden", int, edd.HIDDEN, "which of the target's hidden_states EDD reads (Figure 5)"),
    ("seed", int, 0, "of weights and windows"),
    ("every", int, 200, "steps between two savings of the state, and two validations"),
    ("device", str, "cuda" if torch.cuda.is_available() else "cpu", "cpu or cuda"),
)
FREE = {"lr", "warmup", "resume", "every", "device", "out", "work", "command"}     # --resume lets them change

# ---------------------------------------------------------------- text and tokens
def read_rows(path):
    """The rows of a .json or .jsonl file (.gz too), or one row with the text of any other file."""
    path = Path(path)
    try:
        data = path.read_bytes()
        text = gzip.decompress(data).decode() if path.suffix == ".gz" else data.decode()
        if ".json" not in path.name:
            return [text] if text.strip() else []
        try:
            rows = json.loads(text)
        except json.JSONDecodeError:
            # One row a line.  Not splitlines(): strings may hold Unicode's other line ends.
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except Exception as why:
        raise UserError(f"{path} cannot be read as text or JSON lines ({type(why).__name__}): mend it, or "
                        "name another file") from None
    return rows if isinstance(rows, list) else [rows]

def question_text(question):
    """A word problem, in the form of GSM8K's."""
    return f"Question: {question}\nAnswer:"

def conversation(row):
    """A row of ShareGPT, "messages" or MT-Bench -> chat messages [{"role", "content"}]; any other: None."""
    messages = []
    try:
        if "turns" in row:                               # MT-Bench: what the user says, turn by turn
            return [{"role": "user", "content": turn} for turn in row["turns"]]
        for turn in row.get("conversations", row.get("messages")):
            role = turn.get("from", turn.get("role"))
            content = turn.get("value", turn.get("content"))
            if content:
                role = {"human": "user", "gpt": "assistant"}.get(role, role)
                messages.append({"role": role, "content": content})
    except (AttributeError, TypeError):                  # it has another shape
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
        return f"{question_text(row['question'])} {row.get('answer', '')}\n"
    for between, *names in FIELDS:
        if names[0] in row:
            return between.join(row[name] for name in names if isinstance(row.get(name), str))

def documents(paths, flag="--data"):
    """Yield (place, row, document) of all rows of files and folders, in order; hidden files are left out."""
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{flag}: {path} does not exist")
        inside = sorted(path.rglob("[!.]*")) if path.is_dir() else [path]
        for file in filter(Path.is_file, inside):
            for number, row in enumerate(read_rows(file), 1):
                row = {"text": row} if isinstance(row, str) else row
                place, found = f"row {number} of {file}", document(row)
                if found is None:
                    known = ", ".join(names[1] for names in FIELDS)
                    raise UserError(f"{flag}: {place} has none of the fields conversations, messages, turns, "
                                    f"ids, question, {known}: rename one, or leave the file out")
                yield place, row, found

def encode(found, tokenizer, special_tokens=True):
    """A document -> list of token ids.  Messages go through the tokenizer's own template, or PLAIN."""
    if isinstance(found, str):
        ids = tokenizer(found, add_special_tokens=special_tokens, verbose=False)["input_ids"]
        return ids if found.strip() else []
    if not found or not isinstance(found[0], dict):
        return found
    template = tokenizer.chat_template or PLAIN
    return tokenizer.apply_chat_template(found, chat_template=template, return_dict=True)["input_ids"]

def encode_all(paths, tokenizer, vocab):
    """The documents of `paths`, each with the end-of-text token -> ids (n,) to train on, ids held out."""
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts, skipped = (array("i"), array("i")), []
    for number, (place, row, found) in enumerate(documents(paths), 1):
        try:
            ids = encode(found, tokenizer)
        except jinja2.TemplateError:                     # for example, roles that do not alternate
            ids = []
        if not ids:
            skipped.append(place)
            continue
        if max(ids) >= vocab:
            raise UserError(f"--data: {place} holds token id {max(ids)}, the target has {vocab} tokens: "
                            "give text, or ids of its own tokenizer")
        held = row.get("held_out", number % HELD_OUT == 0)
        # A row may say how often it counts.
        parts[held].extend((ids + eos) * row.get("times", 1))
    if skipped:
        print(f"left out, {len(skipped)} rows without text: {', '.join(skipped[:9])}", file=sys.stderr)
    return [torch.from_numpy(np.array(part, "i")) for part in parts]

def read_data(a, tokenizer, vocab):
    """--data -> ids (n,) to train on, ids held out, their key; encoded into --work when first seen."""
    content = hashlib.sha256(f"{vocabulary_fingerprint(tokenizer)} {tokenizer.chat_template}".encode())
    for _, row, found in documents(a.data):
        content.update(f"{row} {found!r}".encode())
    # The key covers what was encoded: a file that was rewritten is encoded again.
    path = Path(a.work) / f"tokens-{content.hexdigest()[:16]}.pt"
    if not path.exists():
        tokens = encode_all(a.data, tokenizer, vocab)
        write_atomically(path, lambda part: torch.save(tokens, part))
    train, held = torch.load(path, weights_only=True, mmap=True)
    if len(train) <= a.length:                           # a window, and the token after it
        raise UserError(f"--data has too few tokens for windows of {a.length}: more text, or less --length")
    if len(held) <= a.length:
        print("too little text is held out: validation is on what is trained on", file=sys.stderr)
        held = train
    return train, held, path.stem

def draw(ids, n, length, seed, step):
    """n random windows of `ids` -> (n, length) int64, always the same for the same seed and step."""
    starts = np.random.default_rng([seed, step]).integers(0, len(ids) - length + 1, n)
    return torch.stack([ids[start:start + length] for start in starts]).long()

# ---------------------------------------------------------------- the loop that every training shares
def write_atomically(path, write):
    """Call `write(temporary path)`, then move the result to `path`: a killed write leaves the old file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    write(part)
    os.replace(part, path)

def save_drafter(folder, drafter, about):
    """A drafter as model.safetensors (bfloat16) and training.json (its config and how it was made)."""
    weights = {name: w.to("cpu", torch.bfloat16).contiguous() for name, w in drafter.state_dict().items()}
    about = json.dumps({"config": vars(drafter.config), **about}, indent=1)
    write_atomically(folder / "model.safetensors", lambda part: save_file(weights, part, {"format": "pt"}))
    write_atomically(folder / "training.json", lambda part: part.write_text(about + "\n"))

def how_made(a, metrics, **more):
    """What training.json says: the command, seed, tokens seen, date, validation figures."""
    return {"command": a.command, "seed": a.seed, "steps": a.steps, "date": time.strftime("%Y-%m-%d"),
            "tokens_seen": a.steps * a.batch * a.length, "validation": metrics, **more}

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
    """Read an interrupted run's state -> steps done."""
    try:
        state = torch.load(path, weights_only=True)
    except Exception as why:
        raise UserError(f"{path} cannot be read ({type(why).__name__}): leave out --resume") from None
    changed = [name for name in setting if setting[name] != state["setting"].get(name)]
    if changed:
        raise UserError(f"--resume: the interrupted run in {path} had another {', '.join(changed)}: give the "
                        "same, or leave out --resume (--lr, --warmup and --every may change)")
    together.load_state_dict(state["models"])
    for learner, kept in zip(learners, state["learners"]):
        learner.load_state_dict(kept)
    return state["step"]

def fit(models, losses, evaluate, a):
    """Train the modules {name: module} with the flags `a` -> {name: last evaluation}.

    losses(step) -> {name: loss}, by the step alone.  evaluate() -> {name: {metric: value}}, with an "alpha".
    """
    together = torch.nn.ModuleDict(models)
    learners = optimizers(together, a.optimizer)         # the rate is set at each step
    setting = {name: value for name, value in vars(a).items() if name not in FREE}
    path = Path(a.work) / f"{'-'.join(models)}.pt"
    start = restore(path, setting, together, learners) if a.resume and path.exists() else 0
    autocast = torch.autocast(torch.device(a.device).type, torch.bfloat16, enabled=a.dtype == "bfloat16")

    def save(step):
        state = {"step": step, "setting": setting, "models": together.state_dict()}
        state["learners"] = [learner.state_dict() for learner in learners]
        write_atomically(path, lambda part: torch.save(state, part))

    # Ctrl-C lets the step under way end, and saves; a second one stops at once (what is saved stays whole).
    asked = []
    handler = signal.signal(signal.SIGINT, lambda *_: sys.exit(130) if asked else asked.append(True))
    bar = tqdm(range(start, a.steps + 1), total=a.steps, initial=start, unit="step")
    try:
        for step in bar:
            if step in (start, a.steps) or step % a.every == 0:
                together.eval()
                with torch.no_grad(), autocast:
                    metrics = evaluate()
                for name, values in metrics.items():
                    bar.write(f"step {step} {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in values.items()))
            if step == a.steps:
                break
            together.train()
            with autocast:
                found = losses(step)
            sum(found.values()).backward()
            shown = f"{(bar.format_dict['rate'] or 0) * a.batch * a.length:.0f} tokens/s"
            for name, module in models.items():
                norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0).item()
                loss = found[name].item()
                if not math.isfinite(loss + norm):
                    advice = "lower --lr and go on with --resume" if step > start else "no --lr mends that"
                    raise UserError(f"step {step}: loss of {name} is {loss}, the gradient {norm}: {advice}")
                shown += f", {name} loss {loss:.3f} alpha {metrics[name]['alpha']:.3f}"
            # Saved before the update: these weights gave a finite loss, so going on from them works.
            if step % a.every == 0 or asked:
                save(step)
            if asked:
                raise UserError(f"stopped after {step} of {a.steps} steps: the same with --resume goes on")
            for learner in learners:
                for group in learner.param_groups:
                    group["lr"] = a.lr * cosine(step, a.steps, a.warmup)
                learner.step()
                learner.zero_grad()
            bar.set_postfix_str(shown, refresh=False)
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

def frozen_forward(model, ids, hidden=()):
    """One forward of the frozen target -> batch.  hidden: which hidden_states somebody reads."""
    states, cache = {}, transformers.DynamicCache()
    hooks = verify.capture(model, hidden, states)
    with torch.no_grad():
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    for hook in hooks:
        hook.remove()
    kv = {i: (layer.keys, layer.values) for i, layer in enumerate(cache.layers)}
    return {"ids": ids, "logits": logits, "hidden": states, "kv": kv}

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

def train_together(models, target, data, a):
    """Train the draft models {name: module}, all from one target forward a step -> {name: metrics}."""
    train, held = data
    hidden = {m.config.hidden for m in models.values() if getattr(m.config, "encoding", False)}

    def losses(step):
        ids = draw(train, a.batch, a.length, a.seed + 1, step)
        batch = frozen_forward(target, ids.to(a.device), hidden)
        batch |= {"block": None, "random": np.random.default_rng([a.seed + 3, step])}   # EDD draws its block
        return {name: m.loss(batch)[0] for name, m in models.items()}

    def evaluate():
        """On held-out text: alpha, how often the first choice is the target's; the loss; the temperature."""
        ids = draw(held, a.batch, a.length, 10 ** 6, 0)
        batch = frozen_forward(target, ids.to(a.device), hidden) | {"block": a.block}
        choice = batch["logits"][:, a.block:].argmax(-1).flatten()     # (n,); the first block sees no target
        metrics = {}
        for name, m in models.items():
            loss, logits = m.loss(batch)
            logits = logits[:, a.block:].flatten(0, 1)                 # (n, V)
            right = (logits.argmax(-1) == choice).float().mean().item()
            t = greedy_temperature(logits[::4], choice[::4])
            metrics[name] = {"alpha": right, "held_out_loss": loss.item(), "temperature": t}
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
        if name in names:
            parser.add_argument(f"--{name}", **takes, default=default, help=meaning)
    if "target" in names:
        parser.add_argument("--revision", help="of the target on the hub: a branch, a tag, a commit")
        parser.add_argument("--trust-remote-code", action="store_true", help="run the target's own code, too")

def prepare(a):
    """Check the flags -> (target, tokenizer, data); fills in --steps."""
    for name in ("batch", "lr", "width", "layers", "block", "every"):
        if getattr(a, name) is not None and getattr(a, name) <= 0:
            raise UserError(f"--{name} is {getattr(a, name)}: it must be above 0")
    if a.steps is not None and a.steps < (0 if a.init else 1):
        raise UserError(f"--steps is {a.steps}: it must be above 0 (or 0 with --init, to measure alone)")
    if a.length <= a.block:
        raise UserError(f"--length {a.length} must be longer than a block of {a.block}")
    if a.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is available here; use --device cpu")
    torch.manual_seed(a.seed)
    target, tokenizer = load_target(a.target, a.target_dtype, a.device, revision=a.revision,
                                    trust=a.trust_remote_code)
    verify.Target(target)                                # refuses what cannot be decoded with
    # From here on a.data stands for the content, which a resumed run must share.
    train, held, a.data = read_data(a, tokenizer, target.config.get_text_config().vocab_size)
    if a.steps is None:                                  # one epoch, as in the papers
        a.steps = max(1, len(train) // (a.batch * a.length))
    return target.requires_grad_(False), tokenizer, (train, held)

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
    batch, lr = RECIPES[DRAFTERS[a.what[0]][0]]
    a.batch, a.lr = a.batch or batch, a.lr or lr
    target, tokenizer, data = prepare(a)
    mine, models, before = fingerprint(target, tokenizer), {}, {}
    for name in a.what:
        try:
            models[name], before[name] = make_drafter(name, target, a)
        except ValueError as why:
            raise UserError(str(why)) from None
        if a.init and not same_target(before[name]["target"], mine):
            raise UserError(f"--init: the drafter {name} in {a.init} was made for another target")
    metrics = train_together(models, target, data, a)
    for name, model in models.items():
        about = how_made(a, metrics[name], kind=name, target=mine, init=before[name])
        save_drafter(Path(a.out) / name, model, about)
        print(f"saved {Path(a.out) / name}")

def main(argv):
    """Exit status: 0; 2 after one sentence, about a mistake or Ctrl-C."""
    try:
        run(argv)
    except (UserError, OSError) as why:
        print(f"train.py: {why}", file=sys.stderr)
        return 2
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
