"""Train the stand-in target and any drafter.   (GLIDE: arXiv 2402.02082, sections 4.1, 5.1 and appendix A; EDD: section 3.1 and appendix B)

    python train.py target                                     # the stand-in: tokenizer and a small Llama, from scratch
    python train.py glide vanilla                              # both drafters of the stand-in from one target forward
    python train.py edd vdm                                    # EDD and its control; Table 3's ablations and the baselines: edd-ce
                                                               # edd-fixed vdm-ce, Figure 5: edd-h3 ..., Table 1: eagle medusa
    python train.py base small                                 # small language models, stages of a cascade
    python train.py continuations                              # what the target writes itself, data for a second stage (appendix B)
    python train.py glide vanilla --init checkpoints --data work/continuations.jsonl
    python train.py glide --target lmsys/vicuna-7b-v1.5 --data sharegpt.json --out my-glide

The idea.  A drafter learns to predict the next token while the target stays frozen.  GLIDE reads the target's keys and
values and EDD its hidden states, so each step needs one forward of the target, which is nearly the whole cost; however
many drafters are named, they share it.  Every drafter is a module with `loss(batch) -> (loss, logits)`, where `batch`
holds the token ids and what the frozen forward left behind.

    name here        shape            meaning
    ids              (B, T)           token ids, position 0 ... T-1
    kv[l]            2 x (B,H,T,d)    keys and values of the target's layer l as its cache holds them (keys rotated)
    hidden[k]        (B, T, D)        hidden_states[k]: the output of the target's layer k (from 1), where a drafter reads it
    logits           (B, T, V)        what the target predicts after each id

Differences from the papers:
 1. The stand-in learns from Python source and GSM8K's train split, not SlimPajama and ShareGPT: no download.
 2. A window of tokens is drawn at random at each step instead of passing over the data once in order (that makes a
    resumed run the same, bit for bit, as an uninterrupted one, without storing where it was).
 3. The second stage of training is on the target's own greedy continuations (appendix B's sequence-level distillation): the
    stand-in has no ShareGPT, on whose kind of text the paper's targets and drafters were both tuned.
 4. Matrices of the stand-in target learn by Muon (torch.optim), at the same learning rate scale as AdamW; drafters use
    the papers' AdamW unless told otherwise.
 5. Cascade's small models were trained on their own; the stand-in's learn from the target (KL), on the drafters' text.
"""
import argparse
import contextlib
import copy
import datetime
import gzip
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import edd
import glide
import verify
from verify import UserError

HERE = Path(__file__).resolve().parent
STAND_IN = HERE / "checkpoints" / "target"
EOS = "<|endoftext|>"
SMALL = {"base": (3, 192), "small": (1, 96)}       # stages of the stand-in's cascade: layers, width

# ---------------------------------------------------------------- the stand-in's corpus: what this interpreter has
# Share of each source in training; the standard library is the smallest and hardest of the three, and is weighed most.
SHARES = {"stdlib": 0.45, "torch": 0.20, "transformers": 0.25, "math": 0.10}
# Never trained on: source -> {prefix held out: the file whose head is a prompt of bench.py}.
HELD_OUT = {
    "stdlib": {f: f for f in ("argparse.py", "calendar.py", "configparser.py", "csv.py", "difflib.py", "fractions.py",
                              "gettext.py", "heapq.py", "mailbox.py", "pprint.py", "shlex.py", "statistics.py",
                              "textwrap.py", "tokenize.py", "trace.py", "wave.py")} | {"json": "json/decoder.py"},
    "torch": {"optim": "optim/adamax.py", "distributions": "distributions/gamma.py", "hub.py": "hub.py",
              "utils/checkpoint.py": "utils/checkpoint.py", "nn/modules/rnn.py": "nn/modules/rnn.py",
              "autograd/gradcheck.py": "autograd/gradcheck.py"},
    "transformers": {f"models/{m}": f"models/{m}/{f}_{m}.py" for m, f in (
        ("whisper", "tokenization"), ("fnet", "modeling"), ("xlnet", "modeling"), ("reformer", "configuration"),
        ("tapas", "modeling"), ("vits", "modeling"), ("canine", "tokenization"), ("levit", "modeling"))},
}
SKIP = re.compile(r"(^|/)(tests?|idlelib|lib2to3|pydoc_data|encodings|site-packages|_vendor|config-[^/]*)(/|$)|_ops_meta\.py$")


def source_roots():
    """Folder of each source of Python text in the running interpreter."""
    import transformers
    return {"stdlib": Path(sysconfig.get_paths()["stdlib"]), "torch": Path(torch.__file__).parent,
            "transformers": Path(transformers.__file__).parent}


def clean(source):
    """Python source without the comment lines at its top: licence headers are the same everywhere and easy to draft."""
    lines = source.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    return "".join(lines[first:])


def corpus(held_out, math_file=None):
    """Yield (source, held out?, text) for every document of the stand-in's corpus.

    held_out: as HELD_OUT.  A transformers file that names a held-out model family is dropped whole, since the library
    copies code between families.  math_file: GSM8K's train split (jsonl); its last fiftieth is held out.
    """
    families = "|".join(p.split("/")[1] for p in held_out.get("transformers", ()) if p.startswith("models/")) or "$^"
    copied = re.compile(rf"models\.({families})\b|from \.\.({families})\b")
    for name, root in source_roots().items():
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root).as_posix()
            if SKIP.search(relative):
                continue
            text = clean(path.read_text(errors="ignore"))
            held = any(relative == p or relative.startswith(p + "/") for p in held_out.get(name, ()))
            if len(text) > 200 and (held or not (name == "transformers" and copied.search(text))):
                yield name, held, text
    if math_file:
        rows = [json.loads(line) for line in Path(math_file).read_text().splitlines()]
        for i, row in enumerate(rows):
            answer = re.sub(r"<<.*?>>", "", row["answer"])
            yield "math", i >= len(rows) * 0.98, f"Question: {row['question']}\nAnswer: {answer}\n"


def read_rows(path):
    """The rows of a .json or .jsonl file (.gz too), or one row with the text of any other file."""
    path = Path(path)
    try:
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        if not path.name.removesuffix(".gz").endswith((".json", ".jsonl")):
            return [text] if text.strip() else []
        try:
            rows = json.loads(text)
            return rows if isinstance(rows, list) else [rows]
        except json.JSONDecodeError:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, EOFError) as why:
        raise UserError(f"{path} cannot be read as text or JSON lines ({type(why).__name__}): mend it or name another file") from None


def documents(paths):
    """Yield the texts (or lists of chat messages) in files or folders."""
    for path in map(Path, paths):
        if path.is_dir():
            yield from documents(sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith(".")))
        else:
            for row in read_rows(path):
                if not (text := record_text(row)):
                    raise UserError(f"a row of {path} has none of the fields conversations, messages, question, text, prompt")
                yield text


def record_text(row):
    """One row of a data set as chat messages (list of role/content), token ids (list of ints) or text."""
    if not isinstance(row, dict):
        return row if isinstance(row, str) else ""
    if "ids" in row:
        return row["ids"]
    if turns := row.get("conversations") or row.get("messages"):
        role = {"human": "user", "gpt": "assistant"}
        return [{"role": role.get(m := t.get("from", t.get("role")), m), "content": t.get("value", t.get("content"))}
                for t in turns]
    if "question" in row:
        return f"Question: {row['question']}\nAnswer: {row.get('answer', '')}\n"
    return row.get("text") or row.get("prompt", "") + row.get("canonical_solution", row.get("completion", ""))


# ---------------------------------------------------------------- tokens on disk
def train_tokenizer(texts, vocab):
    """Byte-level BPE over `texts`; digits one by one, so that arithmetic has a chance."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, special_tokens=[EOS], show_progress=False,
                                                       initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS, bos_token=None, clean_up_tokenization_spaces=False)


class TokenFile:
    """Token ids on disk, memory-mapped; windows are drawn at random by a generator keyed by (seed, step)."""

    def __init__(self, path, vocab):
        self.ids = np.memmap(path, dtype=np.uint16 if vocab <= 65536 else np.uint32, mode="r")

    @staticmethod
    def write(path, texts, tokenizer, vocab):
        """Encode `texts`, each followed by the end-of-text token, into the file `path`, atomically."""
        dtype, eos, part = np.uint16 if vocab <= 65536 else np.uint32, tokenizer.eos_token_id, f"{path}.part"
        with open(part, "wb") as f:
            for text in texts:
                if isinstance(text, list) and isinstance(text[0], dict):
                    if not tokenizer.chat_template:
                        text = "\n\n".join(f"{m['role'].upper()}: {m['content']}" for m in text)
                    else:
                        text = tokenizer.apply_chat_template(text, tokenize=False)
                ids = text if isinstance(text, list) else tokenizer(text, verbose=False)["input_ids"]
                f.write(np.array(ids + ([eos] if eos is not None else []), dtype).tobytes())
        os.replace(part, path)

    def windows(self, n, length, rng):
        """n random windows of `length` tokens -> (n, length) int64."""
        starts = rng.integers(0, max(1, len(self.ids) - length + 1), n)
        return np.stack([self.ids[s:s + length] for s in starts]).astype(np.int64)


# ---------------------------------------------------------------- files that a crash cannot spoil
def write_atomically(path, write):
    """Call `write(temporary path)`, then move the result to `path`: a killed write leaves the old file whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    write(part)
    os.replace(part, path)


def save_drafter(folder, drafter, about):
    """A drafter as model.safetensors (bfloat16) and training.json (its config and how it was made), each atomically."""
    from safetensors.torch import save_file
    tensors = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in drafter.state_dict().items()}
    about = {"config": vars(drafter.config), **about}
    write_atomically(Path(folder) / "model.safetensors", lambda p: save_file(tensors, p, metadata={"format": "pt"}))
    write_atomically(Path(folder) / "training.json", lambda p: p.write_text(json.dumps(about, indent=1) + "\n"))


def save_lm(folder, model, tokenizer, notes):
    """A language model as Hugging Face saves it, in bfloat16, and `notes` {file name: what to write as JSON}, each file atomically."""
    from transformers.utils import logging
    logging.disable_progress_bar()
    folder, part = Path(folder), Path(f"{folder}.part")
    copy.deepcopy(model).to("cpu", torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    for name, note in notes.items():
        (part / name).write_text(json.dumps(note, indent=1) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for file in part.iterdir():
        os.replace(file, folder / file.name)
    shutil.rmtree(part)


def fingerprint(model):
    """What tells one target from another, a fine-tuned one from its base too: shapes, and weights from all over the model."""
    config, matrices = model.config.get_text_config(), [p.detach() for p in model.parameters() if p.ndim == 2]
    probed = [matrices[i * len(matrices) // 32] for i in range(32)]
    return {"class": type(model).__name__, "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_hidden_layers,
            "probe": [float(f"{w[w.shape[0] * i // 32, w.shape[1] // 2].item():.5g}") for i, w in enumerate(probed)]}


def same_target(a, b):
    """Whether two fingerprints are of one model: equal up to the rounding of half precision."""
    return all(a[k] == b[k] for k in a if k != "probe") and all(
        abs(x - y) <= abs(x) / 128 + 1e-6 for x, y in zip(a["probe"], b["probe"]))


def how_made(a, steps, metrics, **more):
    """What training.json says: the command, seed, tokens seen, date, validation figures, versions."""
    import transformers
    words = [w for w in sys.argv[1:] if w != "--resume"]
    return {"command": " ".join(["python train.py", *words]), "seed": a.seed, "steps": steps,
            "tokens_seen": steps * a.batch * a.length, "date": datetime.date.today().isoformat(), "validation": metrics,
            "torch": torch.__version__, "transformers": transformers.__version__, **more}


# ---------------------------------------------------------------- the loop that every training shares
def optimizers(module, lr, kind="adamw"):
    """AdamW with the official code's betas; kind "muon": hidden matrices by torch.optim.Muon, the rest by AdamW."""
    muon = kind == "muon"
    hidden = [p for n, p in module.named_parameters() if p.ndim == 2 and "embed" not in n and "head" not in n]
    rest = [p for p in module.parameters() if not muon or not any(p is h for h in hidden)]
    found = [torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.01)]
    if muon:
        found.append(torch.optim.Muon(hidden, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return found


def cosine(step, steps, warmup):
    """Learning rate factor: linear warm-up over `warmup` (a fraction of `steps`), then half a cosine down to zero."""
    ramp = max(1, round(steps * warmup))
    if step < ramp:
        return (step + 1) / ramp
    return 0.5 * (1 + math.cos(math.pi * (step - ramp) / max(1, steps - ramp)))


def fit(models, losses, evaluate, state_file, *, steps, lr, warmup=0.025, optimizer="adamw", resume=False,
        tokens_per_step=1, save_every=200, eval_every=200, setting=None):
    """Train every module of `models` for `steps` steps -> {name: last evaluation}.

    losses(step) -> {name: loss}, a function of the step alone, so that a resumed run repeats an uninterrupted one bit for
    bit.  evaluate() -> {name: {metric: value}}.  The state goes to `state_file` every `save_every` steps and on Ctrl-C;
    `setting` is kept in it and must be the same on resuming.
    """
    opts = {name: optimizers(m, lr, optimizer) for name, m in models.items()}
    start, state_file, setting = 0, Path(state_file), setting or {}
    if resume and state_file.exists():
        try:
            state = torch.load(state_file, weights_only=True)
        except Exception as why:
            raise UserError(f"{state_file} cannot be read ({type(why).__name__}): delete it and start without --resume") from None
        if changed := sorted(k for k in {*setting, *state["setting"]} if setting.get(k) != state["setting"].get(k)):
            raise UserError(f"--resume: {', '.join(changed)} differ from the interrupted run kept in {state_file}: give the "
                            "same flags, or start without --resume")
        start = state["step"]
        for name, m in models.items():
            m.load_state_dict(state["models"][name])
            for o, kept in zip(opts[name], state["optimizers"][name]):
                o.load_state_dict(kept)

    def save(step):
        state = {"step": step, "setting": setting, "models": {n: m.state_dict() for n, m in models.items()},
                 "optimizers": {n: [o.state_dict() for o in kinds] for n, kinds in opts.items()}}
        write_atomically(state_file, lambda p: torch.save(state, p))

    # Ctrl-C lets the step under way end, then saves; a second one stops at once (the last saved state is still whole).
    asked = []
    before = {s: signal.signal(s, lambda *_: asked.append(1) if not asked else signal.default_int_handler())
              for s in (signal.SIGINT, signal.SIGTERM)}
    average, metrics, step = {}, {}, start
    bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True, mininterval=1)
    try:
        while step < steps:
            for o in (o for kinds in opts.values() for o in kinds):
                for group in o.param_groups:
                    group["lr"] = lr * cosine(step, steps, warmup)
            for m in models.values():
                m.train()
            found = losses(step)
            sum(found.values()).backward()
            for name, m in models.items():
                torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
                for o in opts[name]:
                    o.step()
                    o.zero_grad(set_to_none=True)
                value = found[name].item()
                if not math.isfinite(value):
                    raise UserError(f"the loss of {name} is {value} at step {step}: lower --lr and go on with --resume")
                average[name] = 0.98 * average.get(name, value) + 0.02 * value
            step += 1
            if step % eval_every == 0 or step == steps:
                metrics = measured(models, evaluate)
                bar.write(f"step {step}  " + "  ".join(f"{n}: loss {average[n]:.3f} " + " ".join(
                    f"{k} {v:.3f}" for k, v in metrics[n].items()) for n in models), file=sys.stderr)
            if step % save_every == 0 or step == steps or asked:
                save(step)
            bar.set_postfix_str(", ".join(f"{n}: loss {average[n]:.3f}" + "".join(
                f" {k} {v:.3f}" for k, v in list(metrics.get(n, {}).items())[:1]) for n in models)
                + f", {(bar.format_dict['rate'] or 0) * tokens_per_step:.0f} tokens/s", refresh=False)
            bar.update()
            if asked and step < steps:
                raise UserError(f"stopped after step {step} of {steps}, saved in {state_file}: go on with --resume")
    finally:
        bar.close()
        for s, handler in before.items():
            signal.signal(s, handler)
    return metrics or measured(models, evaluate)


@torch.no_grad()
def measured(models, evaluate):
    """evaluate() with every model in evaluation mode."""
    for m in models.values():
        m.eval()
    return evaluate()


def autocast(device, dtype):
    """bfloat16 autocast, or nothing when `dtype` is float32."""
    return torch.autocast(device, torch.bfloat16) if dtype == "bfloat16" else contextlib.nullcontext()


# ---------------------------------------------------------------- the stand-in target
def stand_in_config(vocab, layers, width, context):
    """A deep and narrow Llama, so that a one-layer drafter costs of it what GLIDE's costs of Vicuna-7B."""
    from transformers import LlamaConfig
    return LlamaConfig(vocab_size=vocab, hidden_size=width, intermediate_size=round(width * 8 / 3 / 64) * 64,
                       num_hidden_layers=layers, num_attention_heads=max(1, width // 32), num_key_value_heads=max(1, width // 32),
                       max_position_embeddings=context, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0,
                       pad_token_id=None)


def stand_in_tokens(work, held_out, math_file, tokenizer=None, vocab=2048):
    """Tokenise the stand-in's corpus into `work`; returns (tokenizer, {source: TokenFile}, {source: held-out TokenFile})."""
    from transformers import AutoTokenizer
    work = Path(work)
    work.mkdir(parents=True, exist_ok=True)
    docs = list(corpus(held_out, math_file))
    if tokenizer is None and (work / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(work)
    if tokenizer is None:
        tokenizer = train_tokenizer((t for s, h, t in docs if not h for _ in range(3 if s in ("stdlib", "math") else 1)), vocab)
        tokenizer.save_pretrained(work)
    files = ({}, {})
    for source in dict.fromkeys(s for s, _, _ in docs):
        for held, found in enumerate(files):
            path = work / f"{source}-{'held-out' if held else 'train'}.bin"
            if not path.exists():
                TokenFile.write(path, (t for s, h, t in docs if s == source and h == bool(held)), tokenizer, vocab)
            found[source] = TokenFile(path, vocab)
    return tokenizer, *files


def draw(files, shares, n, length, seed, step):
    """n windows, each from a source drawn with probability `shares` -> (n, length) int64.  Keyed by (seed, step)."""
    rng = np.random.default_rng([seed, step])
    names = [s for s in files if len(files[s].ids) >= length]
    if not names:
        raise UserError(f"no text is as long as a window of {length} tokens: give more text or a smaller --length")
    weight = np.array([shares.get(s, 1.0) for s in names])
    counts = rng.multinomial(n, weight / weight.sum())
    return torch.from_numpy(np.concatenate([files[s].windows(c, length, rng) for s, c in zip(names, counts) if c]))


def train_target(a):
    """`python train.py target`: the tokenizer and the stand-in from scratch."""
    from transformers import LlamaForCausalLM
    torch.manual_seed(a.seed)
    work = Path(a.work) / f"target-{a.vocab}{'-math' if a.math else ''}"
    tokenizer, train, held = stand_in_tokens(work, HELD_OUT, a.math, vocab=a.vocab)
    model = LlamaForCausalLM(stand_in_config(a.vocab, a.layers or 12, a.width or 192, a.length)).to(a.device)
    forward = torch.compile(model, dynamic=False) if a.compile else model
    print(f"target: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M weights; corpus " + ", ".join(
        f"{s} {len(f.ids) / 1e6:.1f}M" for s, f in train.items()) + f" tokens; {a.steps} steps of {a.batch} x {a.length}", file=sys.stderr)

    def loss_of(ids):
        ids = ids.to(a.device)
        with autocast(a.device, a.dtype):
            logits = forward(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def losses(step):
        return {"target": loss_of(draw(train, SHARES, a.batch, a.length + 1, a.seed, step))}

    def evaluate():
        return {"target": {s: loss_of(draw({s: f}, {}, a.batch, a.length + 1, 10**6, 0)).item() for s, f in held.items()}}

    metrics = fit({"target": model}, losses, evaluate, work / "state.pt", steps=a.steps, lr=a.lr, warmup=a.warmup,
                  optimizer=a.optimizer, resume=a.resume, tokens_per_step=a.batch * a.length, save_every=a.save_every,
                  eval_every=a.eval_every, setting=setting_of(a))
    out = Path(a.out) if a.out else STAND_IN
    corpus_tokens = {s: len(f.ids) for s, f in train.items()}
    about = how_made(a, a.steps, metrics["target"], corpus_tokens=corpus_tokens, shares=SHARES)
    save_lm(out, model, tokenizer, {"held_out.json": HELD_OUT, "training.json": about})
    print(f"saved {out}", file=sys.stderr)


def setting_of(a):
    """The flags that a resumed run must repeat."""
    return {k: getattr(a, k) for k in ("what", "batch", "length", "lr", "warmup", "seed", "steps", "width", "layers", "optimizer", "dtype",
                                       "data", "math", "vocab")}


# ---------------------------------------------------------------- drafters
class SmallLM(torch.nn.Module):
    """An independent small language model with the target's vocabulary (a stage of cascade.py), trained like a drafter.

    Any Hugging Face causal LM inside; `loss` is KL to the target, or cross entropy.
    """

    def __init__(self, lm, loss="kl"):
        super().__init__()
        self.lm, self.kind, self.config = lm, loss, SimpleNamespace(hidden=None)

    def loss(self, batch):
        logits = self.lm(input_ids=batch["ids"], use_cache=False).logits
        if self.kind == "ce":
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["ids"][:, 1:].flatten()), logits
        return edd.kl(edd.p_target(batch), logits), logits


def kind_of(name):
    """The module that has the drafter `name`: glide, edd, or SmallLM; None where there is no such name."""
    if name in ("glide", "vanilla"):
        return glide
    return SmallLM if name in SMALL else edd if name in edd.VARIANTS or re.fullmatch(r"edd-h\d+", name) else None


def make_drafter(name, model, a):
    """A fresh draft model for the target `model`."""
    kind, vocab = kind_of(name), model.config.get_text_config().vocab_size
    if kind is SmallLM:
        from transformers import LlamaForCausalLM
        layers, width = SMALL[name]
        return SmallLM(LlamaForCausalLM(stand_in_config(vocab, a.layers or layers, a.width or width, model.config.get_text_config().max_position_embeddings)))
    try:
        if kind is edd:
            hidden, more = (int(name[5:]), {}) if name not in edd.VARIANTS else (a.hidden, edd.VARIANTS[name])
            config = edd.Config.for_target(model, hidden, **more)
            return edd.KINDS[config.kind][0](config, model).float()
        config = glide.Config.for_target(model, a.width, a.layers or 1, name == "glide", a.block, a.layer)
    except ValueError as why:
        raise UserError(str(why)) from None
    return glide.Glide(config, glide.target_angles(model, a.length))


def read_drafter(folder, name, model):
    """(the draft model that train.py saved in `folder`, what its training.json says), refused if it was made for another target."""
    try:
        if kind_of(name) is SmallLM:
            lm, _ = load_target(folder, "float32", model.device.type)
            loaded, about = SmallLM(lm), json.loads((folder / "training.json").read_text())
        else:
            loaded, about = kind_of(name).load(folder, model)
            loaded = loaded.model
    except ValueError as why:
        raise UserError(str(why)) from None
    if not same_target(about["target"], fingerprint(model)):
        raise UserError(f"--init: the drafter in {folder} was made for another target")
    return loaded.float(), about


def greedy_temperature(logits, choice):
    """Temperature scaling (Guo et al. 2017) -> T such that softmax(logits / T) best predicts the target's greedy choice.

    logits (n, V), choice (n,).  A drafter that learned the target's distribution (KL) is right about draws from it; the greedy choice
    is more certain than that, and confidence is what trees are built on.
    """
    grid = [round(0.3 + 0.025 * i, 3) for i in range(49)]
    return min(grid, key=lambda t: F.cross_entropy(logits.float() / t, choice).item())


def frozen_forward(model, ids, dtype, hidden=()):
    """What drafters may look at: {"ids", "kv" {layer: (K, V)}, "hidden" {index: (B, T, D)}, "logits"} of one forward of the
    frozen target.  hidden: the indices of hidden_states that somebody reads."""
    from transformers import DynamicCache
    states = {}
    hooks = verify.capture(model, hidden, states)
    try:
        with torch.no_grad(), autocast(ids.device.type, dtype):
            out = model(input_ids=ids, past_key_values=DynamicCache(), use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    return {"ids": ids, "logits": out.logits, "hidden": states,
            "kv": {i: (layer.keys, layer.values) for i, layer in enumerate(out.past_key_values.layers)}}


def load_target(name, dtype, device, attention="sdpa", encoder_decoder=False, role="the target"):
    """(model, tokenizer) as transformers loads them; anything that goes wrong is one sentence.

    encoder_decoder: whether such a model (FLAN-T5) may come back; drafters that are trained read decoder-only targets alone.
    role: what the sentence calls it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not Path(name).exists() and (Path(name).is_absolute() or str(name).count("/") != 1):
        raise UserError(f"{role} {name} does not exist: give a folder or a hub name of a causal language model, or train the "
                        "stand-in with train.py target")
    try:
        is_encoder_decoder = AutoConfig.from_pretrained(name).is_encoder_decoder
        if encoder_decoder or not is_encoder_decoder:
            tokenizer = AutoTokenizer.from_pretrained(name)
            kind = AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
            model = kind.from_pretrained(name, dtype=getattr(torch, dtype), attn_implementation=attention)
    except Exception as why:
        raise UserError(f"{role} {name} cannot be loaded ({type(why).__name__}: {str(why).splitlines()[0][:150]}): give a "
                        "complete folder or a hub name of a causal language model") from None
    if is_encoder_decoder and not encoder_decoder:
        raise UserError(f"{role} {name} is an encoder-decoder model: give a decoder-only one")
    return model.to(device).eval(), tokenizer


def drafter_data(a, model, tokenizer, stand_in):
    """({source: TokenFile} to train on, the same held out)."""
    if stand_in and not a.data:
        held_out = json.loads((Path(a.target) / "held_out.json").read_text())
        key = hashlib.sha256((Path(a.target) / "tokenizer.json").read_bytes()).hexdigest()[:8]
        return stand_in_tokens(Path(a.work) / f"tokens-{key}{'-math' if a.math else ''}", held_out, a.math, tokenizer, len(tokenizer))[1:]
    if not a.data:
        raise UserError("--data FILES-OR-FOLDERS is missing: only the stand-in has a corpus of its own")
    if missing := [p for p in a.data if not Path(p).exists()]:
        raise UserError(f"--data: {missing[0]} does not exist")
    vocab = model.config.get_text_config().vocab_size
    key = hashlib.sha256(repr((a.target, [str(Path(p).resolve()) for p in a.data])).encode()).hexdigest()[:12]
    files = []
    for held in (False, True):         # every fiftieth document is held out
        path = Path(a.work) / f"{key}-{'held-out' if held else 'train'}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            TokenFile.write(path, (t for i, t in enumerate(documents(a.data)) if (i % 50 == 49) == held), tokenizer, vocab)
        if path.stat().st_size == 0 and held:      # fewer than fifty documents: validate on what is trained on
            path = Path(a.work) / f"{key}-train.bin"
        if path.stat().st_size < 8 * a.length:
            raise UserError(f"--data holds too few tokens for windows of {a.length}: give more text or a smaller --length")
        files.append({"data": TokenFile(path, vocab)})
    return files


def train_drafters(a):
    """`python train.py glide vanilla ...`: all named drafters from one forward of the frozen target a step."""
    torch.manual_seed(a.seed)
    stand_in = (Path(a.target) / "held_out.json").exists()
    model, tokenizer = load_target(a.target, a.target_dtype, a.device)
    model.requires_grad_(False)
    train, held = drafter_data(a, model, tokenizer, stand_in)
    before = {}
    if a.init:
        models = {}
        for name in a.what:
            models[name], before[name] = read_drafter(Path(a.init) / name, name, model)
    else:
        models = {name: make_drafter(name, model, a).to(a.device) for name in a.what}
    tokens = sum(len(f.ids) for f in train.values())
    a.steps = max(1, tokens // (a.batch * a.length)) if a.steps is None else a.steps              # one epoch, as the paper
    print("; ".join(f"{n}: {sum(p.numel() for p in m.parameters()) / 1e6:.2f}M weights" for n, m in models.items())
          + f"; {a.steps} steps of {a.batch} x {a.length} from {tokens / 1e6:.1f}M tokens", file=sys.stderr)

    hidden = {m.config.hidden for m in models.values() if getattr(m.config, "encoding", False)}

    def losses(step):
        batch = frozen_forward(model, draw(train, SHARES, a.batch, a.length, a.seed + 1, step).to(a.device), a.dtype, hidden)
        batch |= {"block": None, "random": np.random.default_rng([a.seed + 3, step])}
        with autocast(a.device, a.dtype):
            return {name: m.loss(batch)[0] for name, m in models.items()}

    def evaluate():
        """On held-out text, every source counting the same: alpha, how often the drafter's first choice is the target's; the loss;
        the temperature at which the drafter's confidence in it is calibrated."""
        found = {name: {"alpha": [], "held_out_loss": [], "temperature": []} for name in models}
        for f in held.values():
            batch = frozen_forward(model, draw({"held": f}, {}, a.batch, a.length, 10**6, 0).to(a.device), a.dtype, hidden)
            batch["block"] = a.block
            with autocast(a.device, a.dtype):
                for name, m in models.items():
                    loss, logits = m.loss(batch)
                    choice = batch["logits"].argmax(-1)
                    found[name]["alpha"].append((logits.argmax(-1) == choice)[:, a.block:].float().mean().item())
                    found[name]["temperature"].append(greedy_temperature(logits[:, a.block::4].flatten(0, 1), choice[:, a.block::4].flatten()))
                    found[name]["held_out_loss"].append(loss.item())
        return {n: {k: sum(v) / len(v) for k, v in values.items()} for n, values in found.items()}

    out = Path(a.out) if a.out else HERE / "checkpoints"
    metrics = fit(models, losses, evaluate, Path(a.work) / f"{'-'.join(a.what)}.pt", steps=a.steps, lr=a.lr, warmup=a.warmup,
                  optimizer=a.optimizer, resume=a.resume, tokens_per_step=a.batch * a.length, save_every=a.save_every,
                  eval_every=a.eval_every, setting={**setting_of(a), "target": str(a.target), "block": a.block, "layer": a.layer, "init": a.init})
    for name, m in models.items():
        about = how_made(a, a.steps, metrics[name], kind=name, target=fingerprint(model), **({"init": before[name]} if before else {}))
        if isinstance(m, SmallLM):
            save_lm(out / name, m.lm, tokenizer, {"training.json": about})
        else:
            save_drafter(out / name, m, about)
        print(f"saved {out / name}", file=sys.stderr)


@torch.no_grad()
def write_continuations(a):
    """`python train.py continuations`: what the target itself writes, as data for drafters (appendix B, sequence-level).

    A quarter of each window of --length tokens is text, the rest the target's greedy continuation; one JSON row a window.
    """
    model, tokenizer = load_target(a.target, a.target_dtype, a.device)
    train, _ = drafter_data(a, model, tokenizer, (Path(a.target) / "held_out.json").exists())
    out = Path(a.out) if a.out else Path(a.work) / "continuations.jsonl"
    rows = out.read_text().splitlines()[:-1] if a.resume and out.exists() else []    # the last line may be cut
    start = len(rows) // a.batch
    out.parent.mkdir(parents=True, exist_ok=True)
    eos, length = tokenizer.eos_token_id, a.length // 4
    with open(out, "w") as f, tqdm(total=a.steps, initial=start, unit="batch", dynamic_ncols=True) as bar:
        f.writelines(row + "\n" for row in rows[:start * a.batch])
        for step in range(start, a.steps):
            prompts = draw(train, SHARES, a.batch, length, a.seed + 2, step).to(a.device)
            made = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=a.length - length,
                                  eos_token_id=eos, pad_token_id=eos)
            for ids in made.tolist():
                end = ids.index(eos, length) if eos in ids[length:] else len(ids)
                f.write(json.dumps({"ids": ids[:end]}) + "\n")
            f.flush()
            bar.set_postfix_str(f"{(bar.format_dict['rate'] or 0) * a.batch * (a.length - length):.0f} tokens/s", refresh=False)
            bar.update()
    print(f"saved {out}", file=sys.stderr)


# ---------------------------------------------------------------- command line
class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are one sentence, as all mistakes are here."""

    def error(self, message):
        raise UserError(f"{message} (see --help)")


def parser():
    p = Parser(description="Train the stand-in target, or drafters for any target.",
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("what", nargs="+", help=f"target, continuations, or any of: glide vanilla {' '.join(edd.VARIANTS)} edd-hN {' '.join(SMALL)}")
    p.add_argument("--target", default=str(STAND_IN), help="folder or hub name of the target that drafters are trained for")
    p.add_argument("--target-dtype", default="float32", choices=["float32", "float16", "bfloat16"], help="how the target is loaded")
    p.add_argument("--data", nargs="+", help="files or folders to train on; the stand-in's own corpus when left out")
    p.add_argument("--math", help="GSM8K's train split (jsonl), part of the stand-in's corpus where given")
    p.add_argument("--init", help="start drafters from the ones in this folder (the paper's second stage, on other data)")
    p.add_argument("--out", help="folder to save under; checkpoints/ when left out")
    p.add_argument("--work", default=str(HERE / "work"), help="folder for token files and training state")
    p.add_argument("--steps", type=int, help="steps; one pass over as many tokens as the data has when left out; 0 with --init measures alone")
    p.add_argument("--batch", type=int, help="windows a step; GLIDE's 64, EDD's 8, 12 for the stand-in target")
    p.add_argument("--length", type=int, default=512, help="tokens a window")
    p.add_argument("--lr", type=float, help="peak learning rate; GLIDE's 5e-4, EDD's 1e-4, 3e-3 for the stand-in target")
    p.add_argument("--warmup", type=float, default=0.025, help="fraction of the steps")
    p.add_argument("--optimizer", choices=["adamw", "muon"], help="adamw (the paper's) for drafters, muon for the stand-in target")
    p.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="autocast")
    p.add_argument("--width", type=int, help="hidden size: d_D of a drafter (the target's when left out), 192 for the target")
    p.add_argument("--layers", type=int, help="layers: N_D of a drafter (1), 12 for the target")
    p.add_argument("--block", type=int, default=5, help="L: block length of GLIDE's mask")
    p.add_argument("--layer", type=int, help="target layer that GLIDE's top layer reads, from 0; the top one when left out (Figure 7)")
    p.add_argument("--hidden", type=int, default=edd.HIDDEN, help="hidden_states of the target that EDD reads (Figure 5; edd-h9 reads the 9th)")
    p.add_argument("--vocab", type=int, default=2048, help="vocabulary of the stand-in")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--compile", action="store_true", help="torch.compile for the stand-in target: faster steps after a slow start (needs a C++ compiler)")
    p.add_argument("--resume", action="store_true", help="go on from the state in --work")
    p.add_argument("--save-every", type=int, default=200)
    p.add_argument("--eval-every", type=int, default=200)
    return p


def run(argv=None):
    a = parser().parse_args(argv)
    is_target, is_data = a.what == ["target"], a.what == ["continuations"]
    if unknown := [w for w in a.what if not kind_of(w) and not is_target and not is_data]:
        raise UserError(f"cannot train {' '.join(a.what)}: name target or continuations alone, or drafters among glide vanilla "
                        f"{' '.join(edd.VARIANTS)} edd-hN {' '.join(SMALL)} (not {unknown[0]})")
    if a.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is available here; use --device cpu")
    edds = all(kind_of(w) is edd for w in a.what)                    # the papers' recipes: EDD's, or GLIDE's
    a.batch = a.batch if a.batch is not None else 12 if is_target else 8 if edds else 64
    a.lr = a.lr if a.lr is not None else 3e-3 if is_target else 1e-4 if edds else 5e-4
    a.optimizer = a.optimizer or ("muon" if is_target else "adamw")
    a.steps = a.steps if a.steps is not None else 3300 if is_target else 100 if is_data else None
    if a.steps is not None and a.steps < 0 or a.steps == 0 and not a.init:
        raise UserError(f"--steps is {a.steps}: it must be above 0 (or 0 with --init, to measure alone)")
    for name in ("batch", "lr", "width", "layers", "block", "vocab", "save_every", "eval_every"):
        if getattr(a, name) is not None and getattr(a, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(a, name)}: it must be above 0")
    if a.length <= a.block:
        raise UserError(f"--length {a.length} must be longer than a block of {a.block}")
    if a.math and not Path(a.math).exists():
        raise UserError(f"--math: {a.math} does not exist")
    (train_target if is_target else write_continuations if is_data else train_drafters)(a)


def main(argv=None):
    """Exit status: 0, or 2 after one sentence about a user's mistake."""
    try:
        run(argv)
    except UserError as why:
        print(f"train.py: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
