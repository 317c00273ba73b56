"""How the stand-in was made: corpus, tokenizer, the small Llama, continuations, bigram.

    python checkpoints/make.py corpus --stories stories.jsonl --sampled stories_sampled.jsonl \\
        --math gsm8k_train.jsonl                               # work/corpus, work/corpus-first
    python checkpoints/make.py target --data work/corpus --first work/corpus-first --compile
    python checkpoints/make.py continuations --data work/corpus    # what a target writes itself
    python checkpoints/make.py bigram --corpus work/corpus --tokenizer checkpoints/target \\
        --out bigram.json
    python checkpoints/make.py agreement --data work/corpus --drafter edd glide

Its drafters and small models are train.py's: `python train.py glide base --data work/corpus`.  All
settings are in docs/training.md.  `continuations` and `bigram` serve any target, tokenizer, text.

The idea.  No weights can be downloaded where the tests run, so the repository ships a Llama of its
own.  It is deep and narrow, so that a drafter of one layer costs of it about what GLIDE's costs of
Vicuna-7B.  It has learned from children's stories (TinyStories), from retellings of them that a
program made, and from GSM8K.

Differences from the papers:
 1. Stories, retellings and GSM8K's train split stand for SlimPajama and ShareGPT.
 2. The second stage of training is on the target's own greedy continuations, where the papers have
    ShareGPT, on whose kind of text targets and drafters were both tuned.
 3. Matrices of the target learn by Muon, at the same learning rate scale as AdamW.
 4. Cascade's small models were trained on their own; these learn from the target (KL), on the text
    of its drafters.
"""
import argparse
import functools
import hashlib
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))                      # so that it runs from anywhere

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tqdm import tqdm

import train
from training.bigram import fit_agreement, write_bigram
from checkpoints.stories import write_corpus
from training import prepare
from runtime import text as read
from data.corpus import EOS
from runtime.text import UserError
from runtime import load
from training import write as written
from training import drafters, flags, state as jobs

# ---------------------------------------------------------------- tokenizer and target
def train_tokenizer(texts, vocab):
    """Byte-level BPE over `texts`; digits one by one, so that arithmetic has a chance."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    bpe = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[EOS], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=EOS, bos_token=None, clean_up_tokenization_spaces=False)


def tokenizer_of(a):
    """The tokenizer of --data and --first: trained, or from --work where the text is the same."""
    texts, content = [], hashlib.sha256()
    for _, row, text in read.documents([*a.data, *a.first]):
        if not isinstance(text, str):
            raise UserError("--data: a tokenizer is trained on text: leave out chats and token ids")
        if not row.get("held_out"):
            texts.append(text)
            content.update(text.encode())
    folder = Path(a.work) / f"tokenizer-{a.vocab}-{content.hexdigest()[:16]}"
    if not folder.exists():
        part = Path(f"{folder}.part")
        train_tokenizer(texts, a.vocab).save_pretrained(part)
        os.replace(part, folder)                   # a killed write leaves no half tokenizer
    return transformers.AutoTokenizer.from_pretrained(folder)


def flat(tokens, index):
    """The documents of an index, one after the other -> (n,); copies of one stand apart."""
    start, first, before = np.unique(index[:, 0], return_index=True, return_inverse=True)
    copy = np.arange(len(index)) - first[before]           # of each row: the copies before it
    rows = index[np.argsort(copy, kind="stable")]
    parts = [tokens[:0]] + [tokens[start:start + size] for start, size, _ in rows]
    ids = np.concatenate(parts)
    return torch.from_numpy(np.where(ids < 0, ~ids, ids))


def read_flat(a, paths, tokenizer, name):
    """-> ids (n,) to train on; held-out ids {"": all, kind of text: its own}; the content's key."""
    folder = prepare.prepare(paths, tokenizer, Path(a.work) / name, vocab=a.vocab)
    meta = prepare.meta_of(folder)
    tokens, index = prepare.open_split(folder, "train")
    held_tokens, held_index = prepare.open_split(folder, "val")
    learned, held = flat(tokens, index), {"": flat(held_tokens, held_index)}
    if len(learned) <= a.length:                         # a window, and the token after it
        raise UserError(f"--data has too few tokens for windows of {a.length}: more text, or less "
                        "--length")
    for number, kind in enumerate(meta["kinds"]):
        held[f"_{kind}"] = flat(held_tokens, held_index[held_index[:, 2] == number])
    held = {kind: ids for kind, ids in held.items() if len(ids) > a.length}
    if "" not in held:
        print("too little text is held out: validation is on what is trained on", file=sys.stderr)
        held = {"": learned}
    return learned, held, meta["key"]


def read_parts(a, tokenizer):
    """-> the tokens of both parts [(n,), (m,)]; held-out ids {"": all, kind of text: its own}.

    From here on a.data and a.first stand for the content, which a resumed run must share.
    """
    tokens, held, a.data = read_flat(a, a.data, tokenizer, "data")
    first = tokens
    if a.first:
        first, _, a.first = read_flat(a, a.first, tokenizer, "data-first")
    return (first, tokens), held


@functools.lru_cache(maxsize=8)                          # tensors are told apart by identity
def document_starts(ids, length, eos):
    """Where a document starts, a window before the end -> (n,); found once for the same `ids`."""
    starts = np.append(0, 1 + np.flatnonzero(ids.numpy() == eos))
    return starts[starts <= len(ids) - length]


def draw(ids, n, length, seed, step, eos=None):
    """n random windows of `ids` -> (n, length) int64, always the same for the same seed and step.

    eos: the end-of-text token; every other window then begins where a document does.
    """
    rng = np.random.default_rng([seed, step])
    starts = rng.integers(0, len(ids) - length + 1, n)
    if eos is not None:
        starts[::2] = rng.choice(document_starts(ids, length, eos), len(starts[::2]))
    return torch.stack([ids[start:start + length] for start in starts]).long()


def repeated(ids, count, seed, step):
    """ids (n, T), the last `count` windows each a piece of text repeated, by (seed, step) alone.

    The target learns to look up what it has read, as retellings need; nothing teaches that sooner.
    """
    rng = np.random.default_rng([seed + 4, step])
    for row in ids[len(ids) - count:]:
        period = int(rng.integers(16, len(row) // 2))
        row.copy_(row[:period].repeat(len(row) // period + 1)[:len(row)])
    return ids


def trained_before(folder, model, tokenizer):
    """Put the weights of an earlier `make.py target` into `model` -> its training.json."""
    earlier, its = load.load_target(folder, "float32", model.device)
    try:
        if its.get_vocab() != tokenizer.get_vocab():
            raise ValueError("its tokenizer is another")
        model.load_state_dict(earlier.state_dict())
        return json.loads((Path(folder) / "training.json").read_text())
    except (ValueError, RuntimeError, OSError) as why:
        reason = read.first_line(why)
        raise UserError(f"--init: {folder} does not fit ({reason}): give what `make.py target` "
                        "saved, of the same --layers, --width, --vocab and text") from None


def check_target(a):
    """Refuse sizes of which no target can be made."""
    least = {"vocab": 257, "length": 34}    # 256 bytes and an end of text; repeated() needs so many
    for name, smallest in least.items():
        if getattr(a, name) < smallest:
            raise UserError(f"--{name} is {getattr(a, name)}: it must be at least {smallest}")
    if a.width % 32:
        raise UserError(f"--width is {a.width}: it must be a multiple of 32, the size of a head")
    for name in ("repeat", "first_share"):
        share = getattr(a, name)
        if not 0 <= share <= 1:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {share}: it must be from 0 to 1")


def train_target(a):
    """`make.py target`: the tokenizer and the stand-in from scratch."""
    check_target(a)
    state = jobs.State(a, ["target"])
    torch.manual_seed(a.seed)
    tokenizer = tokenizer_of(a)
    parts, held = read_parts(a, tokenizer)
    eos, change = tokenizer.eos_token_id, a.steps * a.first_share if a.first else 0
    model = drafters.llama(a.vocab, a.layers, a.width, a.length).to(a.device)
    before = trained_before(a.init, model, tokenizer) if a.init else None
    forward = torch.compile(model, dynamic=False) if a.compile else model
    first, last = (f"{len(part) / 1e6:.1f}M tokens" for part in parts)
    print(f"target: {model.num_parameters() / 1e6:.2f}M weights; windows of {last}")
    if a.first:
        print(f"in the first {change:.0f} steps of {first}")

    def next_tokens(ids):
        """ids (B, T + 1) -> logits (n, V), and the tokens (n,) that they should predict."""
        ids = ids.to(a.device)
        logits = forward(input_ids=ids[:, :-1], use_cache=False).logits
        return logits.flatten(0, 1).float(), ids[:, 1:].flatten()

    def loss(step):
        tokens = parts[step >= change]
        ids = draw(tokens, a.batch, a.length + 1, a.seed, step, eos)
        if step < change:
            ids = repeated(ids, round(a.repeat * a.batch), a.seed, step)
        logits, after = next_tokens(ids)
        return {"target": F.cross_entropy(logits, after)}

    def steps(step):
        """A step is one forward."""
        a.spent += a.batch * a.length
        return [functools.partial(loss, step)]

    @torch.no_grad()
    def evaluate():
        """On held-out text, by source: "alpha", the argmax is the next token; and the loss."""
        found = {}
        for source, tokens in held.items():
            right, loss = 0.0, 0.0
            batches = 2 if source else 4
            for i in range(batches):
                logits, after = next_tokens(draw(tokens, a.batch, a.length + 1, 10 ** 6, i, eos))
                right += (logits.argmax(-1) == after).float().mean().item() / batches
                loss += F.cross_entropy(logits, after).item() / batches
            found |= {f"alpha{source}": right, f"held_out_loss{source}": loss}
        # What follows in a text that comes twice: can it find again what it has read?
        twice = draw(held[""], a.batch, a.length // 2, 10 ** 6, 0, eos).repeat(1, 2)
        logits, after = next_tokens(twice)
        again = (logits.argmax(-1) == after).float().unflatten(0, (a.batch, -1))[:, a.length // 2:]
        return {"target": found | {"alpha_again": again.mean().item()}}

    metrics = train.fit({"target": model}, steps, evaluate, a, state)
    corpus_tokens = [len(part) for part in parts]
    about = train.how_made(a, metrics["target"], corpus_tokens=corpus_tokens, init=before)
    drafters.save_lm(Path(a.out) / "target", model, tokenizer, about)
    state.saved(a)
    print(f"saved {Path(a.out) / 'target'}")


# ---------------------------------------------------------------- what the target writes itself
def write_continuations(a):
    """`make.py continuations`: what a target writes after prompts, for a second stage of training.

    An answer goes to the end-of-text token, where the target writes one, or to --length tokens with
    its prompt.  Each batch is appended when it is written; --resume goes on after the last one.
    """
    out = Path(a.out)
    if out.exists() and not a.overwrite and not a.resume:
        raise UserError(f"--out: {out} exists: go on with it by --resume, or give --overwrite")
    a.shard_target = False
    target, tokenizer = train.load_target(a)
    train.check_length(a, target)
    batches = written.batches_of(written.given_parts(a, tokenizer), a.batch, a.seed)
    mine = load.fingerprint(target, tokenizer)
    if a.dtype == "auto":
        a.dtype = str(target.dtype).removeprefix("torch.")
    decides = json.dumps([mine, batches, a.length, a.seed, a.temperature, a.dtype])
    target.to(getattr(torch, a.dtype))
    run = hashlib.sha256(decides.encode()).hexdigest()[:12]
    out.parent.mkdir(parents=True, exist_ok=True)
    if a.overwrite and not a.resume:
        out.unlink(missing_ok=True)
    file = written.Written(out, run)
    steps = min(a.steps, len(batches))           # of the same prompts it would write the same again
    start, kept = 0, 0
    while start < steps and kept + len(batches[start]) <= len(file.ends):
        kept += len(batches[start])
        start += 1
    if start < steps:
        file.keep(kept)
    bar = tqdm(range(start, steps), total=steps, initial=start, unit="batch", dynamic_ncols=True)
    try:
        for step in bar:
            began = time.perf_counter()
            torch.manual_seed(int(np.random.default_rng([a.seed, step]).integers(2 ** 62)))
            kinds, given = zip(*batches[step])
            texts = written.continuations(target, given, [a.length] * len(given), a.temperature)
            rows = []
            for kind, prompt, ids in zip(kinds, given, texts):
                rows.append({"source": kind, "prompt": prompt, "answer": ids[len(prompt):]})
            file.add(rows)
            tokens = sum(len(row["answer"]) for row in rows)
            speed = tokens / (time.perf_counter() - began)
            bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
    except KeyboardInterrupt:
        raise UserError(f"stopped after {step} of {steps} batches: the same with --resume goes "
                        "on") from None
    print(f"saved {out}")


# ---------------------------------------------------------------- command line
def add_flags(p, names, **meanings):
    """--data, and those of training's flags that are named.  meanings: where they are others."""
    p.add_argument("--data", nargs="+", required=True,
                   help="files or folders of text, chats or token ids")
    flags.add_flags(p, names.split(), meanings)


def parser():
    p = read.Parser(description="Make the stand-in; docs/training.md has its recipe.")
    commands = p.add_subparsers(dest="made", required=True)

    def command(name, text):
        return commands.add_parser(name, help=text,
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)

    c = command("corpus", "stories, retellings and word problems, as JSON lines")
    c.add_argument("--stories", nargs="+", required=True,
                   help="rows with a text, or TinyStories' own files")
    c.add_argument("--sampled", nargs="+", default=[], help="weaker stories, for the first part")
    c.add_argument("--math", nargs="+", default=[], help="GSM8K's train split (jsonl)")
    c.add_argument("--out", default=str(ROOT / "work" / "corpus"),
                   help="folder; the first part's is OUT-first")

    c = command("target", "the tokenizer and a small Llama, from scratch")
    add_flags(c, "work out init resume overwrite steps batch length lr optimizer dtype seed every "
              "device layers width", init="folder of a target to start from",
              overwrite="replace an unfinished run in --work, and the target in --out",
              steps="of the whole training", dtype="autocast of the target; auto: the faster one",
              width="hidden size", layers="of the Llama", lr="peak learning rate")
    c.add_argument("--repeat", type=float, default=0.0,
                   help="of the first part's windows, pieces over and over")
    c.add_argument("--first", nargs="+", default=[],
                   help="files or folders for the first part of the steps")
    c.add_argument("--first-share", type=float, default=0.5, help="that part")
    c.add_argument("--vocab", type=int, default=1024, help="tokens of the tokenizer")
    c.add_argument("--compile", action="store_true",
                   help="torch.compile: faster steps after a slow start")
    c.set_defaults(batch=12, lr=3e-3, steps=3300, layers=24, width=128,
                   out=str(ROOT / "work" / "stand-in"), work=str(ROOT / "work" / "making"))

    c = command("continuations", "what a target writes itself, for a second stage of training")
    add_flags(c, "target revision trust-remote-code template out resume overwrite steps batch "
              "length seed device", out="file to write, JSON lines",
              resume="go on with an interrupted --out", overwrite="replace --out",
              steps="batches, at most", batch="prompts that are continued together",
              length="tokens of a prompt and its continuation", seed="of order and sampling")
    c.add_argument("--temperature", type=float, default=0.0,
                   help="0: greedy; otherwise sampled, by --seed")
    c.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
                   help="of the target; auto: float32 on a CPU, as stored on a GPU; bfloat16: its "
                        "text is nearly the same, and written some times as fast on many CPUs")
    c.set_defaults(out=str(ROOT / "work" / "continuations.jsonl"), steps=100, batch=64)

    c = command("bigram", "Max-Gram's bigram, and how often its matches are right")
    c.add_argument("--corpus", nargs="+", required=True, metavar="PATH",
                   help="as train.py's --data; or .bin of uint16 ids, with 0 between documents")
    c.add_argument("--tokenizer", required=True, metavar="T",
                   help="folder or hub name, for AutoTokenizer")
    c.add_argument("--out", required=True, metavar="FILE", help="JSON file to write")

    c = command("agreement", "how far Max-Gram's tokens can be trusted in a mixture with a drafter")
    add_flags(c, "target revision trust-remote-code template length device")
    c.add_argument("--checkpoint", default=str(load.CHECKPOINTS),
                   help="folder of drafters and bigram.json")
    c.add_argument("--drafter", nargs="+", default=["edd"],
                   help="drafters of it, or language models")
    c.add_argument("--prompts", type=int, default=24,
                   help="held-out documents of each kind of text")
    c.add_argument("--tokens", type=int, default=64, help="what the target writes after each")
    return p


MAKE = {"corpus": write_corpus, "target": train_target, "continuations": write_continuations,
        "bigram": write_bigram, "agreement": fit_agreement}


def run(argv):
    a = parser().parse_args(argv)
    a.command = " ".join(["python checkpoints/make.py", *argv])
    above_0 = ("batch", "length", "lr", "vocab", "layers", "width", "every", "prompts", "tokens")
    flags.check(a, above_0, least_steps=0 if getattr(a, "init", None) else 1)
    if not 0 <= getattr(a, "temperature", 0) < flags.MOST:
        raise UserError(f"--temperature is {a.temperature}: it must be 0 or above")
    MAKE[a.made](a)


def main(argv):
    """Exit status: 0; 2 after one sentence, about a mistake or Ctrl-C."""
    return jobs.main(argv, run, "make.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
