"""How the stand-in was made: corpus, tokenizer, the small Llama, small models, continuations, bigram.

    python checkpoints/make.py corpus --math gsm8k_train.jsonl         # work/corpus, out of this interpreter
    python checkpoints/make.py target --data work/corpus --compile     # the tokenizer and checkpoints/target
    python checkpoints/make.py small --data work/corpus                # base and small, stages of a cascade
    python checkpoints/make.py continuations --data work/corpus        # what a target writes itself
    python checkpoints/make.py bigram --corpus work/corpus --tokenizer checkpoints/target --out bigram.json

Its drafters are train.py's, like any target's: `python train.py glide vanilla --data work/corpus`.  All
settings are in docs/training.md.  `continuations` and `bigram` serve any target, any tokenizer, any text.

The idea.  No weights can be downloaded where the tests run, so the repository ships a Llama of its own.  It
is deep and narrow, so that a drafter of one layer costs of it about what GLIDE's costs of Vicuna-7B.  It has
learned from sources that everybody has, the standard library's, torch's and transformers', and from GSM8K.

Differences from the papers:
 1. Python source and GSM8K's train split stand for SlimPajama and ShareGPT.
 2. The second stage of training is on the target's own greedy continuations (EDD's appendix B, sequence-level
    distillation), where the papers have ShareGPT, on whose kind of text targets and drafters were both tuned.
 3. Matrices of the target learn by Muon, at the same learning rate scale as AdamW.
 4. Cascade's small models were trained on their own; these learn from the target (KL), on its drafters' text.

Differences from the run that made the shipped weights (train.py was one file then):
 1. A source has its share of the windows (SHARES) by counting its documents so many times, a whole number.
    Then each window was drawn from a source that was drawn with the share's probability.
 2. Validation is one figure over all held-out text; then, one for each source.
"""
import argparse
import copy
import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
import time
from array import array
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))                      # so that it runs from anywhere

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
from tqdm import tqdm  # noqa: E402

import maxgram  # noqa: E402
import train  # noqa: E402
from verify import UserError  # noqa: E402

EOS = "<|endoftext|>"
SMALL = {"base": (3, 192), "small": (1, 96)}       # stages of the stand-in's cascade: layers, width
# Share of each source in training; the standard library is the smallest and hardest, and counts most.
SHARES = {"stdlib": 0.45, "torch": 0.20, "transformers": 0.25, "math": 0.10}
TOKENIZER_TIMES = {"stdlib": 3, "math": 3}         # how often they count for the tokenizer, if not once
# Never trained on: files and folders of each source.
HELD_OUT = {
    "stdlib": [
        "argparse.py", "calendar.py", "configparser.py", "csv.py", "difflib.py", "fractions.py", "gettext.py",
        "heapq.py", "mailbox.py", "pprint.py", "shlex.py", "statistics.py", "textwrap.py", "tokenize.py",
        "trace.py", "wave.py", "json",
    ],
    "torch": [
        "optim", "distributions", "hub.py", "utils/checkpoint.py", "nn/modules/rnn.py",
        "autograd/gradcheck.py",
    ],
    "transformers": [
        "models/whisper", "models/fnet", "models/xlnet", "models/reformer", "models/tapas", "models/vits",
        "models/canine", "models/levit",
    ],
}
FOLDERS = r"tests?|idlelib|lib2to3|pydoc_data|encodings|site-packages|_vendor|config-[^/]*"
SKIP = re.compile(rf"(^|/)({FOLDERS})(/|$)|_ops_meta\.py$")


# ---------------------------------------------------------------- corpus: what this interpreter has
def source_roots():
    """Folder of each source of Python text in the running interpreter."""
    return {
        "stdlib": Path(sysconfig.get_paths()["stdlib"]),
        "torch": Path(torch.__file__).parent,
        "transformers": Path(transformers.__file__).parent,
    }


def clean(source):
    """Python source without the comment lines at its top: licences are all alike, and easy to draft."""
    lines = source.splitlines(keepends=True)
    first = 0
    while first < len(lines) and (lines[first].startswith("#") or not lines[first].strip()):
        first += 1
    return "".join(lines[first:])


def corpus(held_out, math=None):
    """Yield (source, held out?, text) for every document of the stand-in's corpus.

    held_out: as HELD_OUT.  math: GSM8K's train split (jsonl); its last fiftieth is held out.
    """
    # The library copies code between families: a file that names a held-out family is dropped whole.
    families = [path.split("/")[1] for path in held_out["transformers"] if path.startswith("models/")]
    either = "|".join(families)
    copied = re.compile(rf"models\.({either})\b|from \.\.({either})\b")
    for name, root in source_roots().items():
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root).as_posix()
            if SKIP.search(relative):
                continue
            text = clean(path.read_text(errors="ignore"))
            held = any(relative == prefix or relative.startswith(prefix + "/") for prefix in held_out[name])
            is_copy = name == "transformers" and copied.search(text)
            if len(text) > 200 and (held or not is_copy):
                yield name, held, text
    rows = train.read_rows(math) if math else []
    for i, row in enumerate(rows):
        answer = re.sub(r"<<.*?>>", "", row["answer"])         # the calculator's notes
        yield "math", i >= len(rows) * 0.98, f"{train.question_text(row['question'])} {answer}\n"


def write_corpus(a):
    """`make.py corpus`: a file of rows {"source", "text", "held_out", "times"} for each source."""
    if a.math and not Path(a.math).is_file():
        raise UserError(f"--math: {a.math} does not exist")
    rows, size = {}, {}
    for source, held, text in tqdm(corpus(HELD_OUT, a.math), unit=" documents", disable=None):
        rows.setdefault(source, []).append({"source": source, "text": text, "held_out": held})
        size[source] = size.get(source, 0) + (0 if held else len(text))
    # Counted once each, sources would have the shares of their sizes; what needs more least counts once.
    needs = {source: SHARES[source] / max(1, size[source]) for source in rows}
    for source, found in rows.items():
        times = round(needs[source] / min(needs.values()))
        for row in found:
            row["times"] = 1 if row["held_out"] else times
        text = "".join(json.dumps(row) + "\n" for row in found)
        path = Path(a.out) / f"{source}.jsonl"
        train.write_atomically(path, lambda part, text=text: part.write_text(text))
        print(f"{path}: {len(found)} documents, {size[source] / 1e6:.1f}M characters, {times} times")


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
    """The tokenizer of --data: trained, or, where the same text was seen before, read from --work."""
    texts, content = [], hashlib.sha256()
    for _, row, text in train.documents(a.data):
        if not isinstance(text, str):
            raise UserError("--data: a tokenizer is trained on text: leave out chats and token ids")
        if not row.get("held_out"):
            texts += [text] * TOKENIZER_TIMES.get(row.get("source"), 1)
            content.update(text.encode())
    folder = Path(a.work) / f"tokenizer-{a.vocab}-{content.hexdigest()[:16]}"
    if not folder.exists():
        part = Path(f"{folder}.part")
        train_tokenizer(texts, a.vocab).save_pretrained(part)
        os.replace(part, folder)                   # a killed write leaves no half tokenizer
    return transformers.AutoTokenizer.from_pretrained(folder)


def llama(vocab, layers, width, context):
    """A fresh Llama: heads of 32, a feed-forward of 8/3 the width in steps of 64, tied embeddings."""
    heads = max(1, width // 32)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=round(width * 8 / 3 / 64) * 64,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=context, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=0, pad_token_id=None)
    return transformers.LlamaForCausalLM(config)


def save_lm(folder, model, tokenizer, about):
    """A language model as Hugging Face saves it, in bfloat16, with training.json, each file atomically."""
    folder, part = Path(folder), Path(f"{folder}.part")
    copy.deepcopy(model).to("cpu", torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    (part / "training.json").write_text(json.dumps(about, indent=1) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for file in part.iterdir():
        os.replace(file, folder / file.name)
    shutil.rmtree(part)
    print(f"saved {folder}")


def train_target(a):
    """`make.py target`: the tokenizer and the stand-in from scratch."""
    torch.manual_seed(a.seed)
    tokenizer = tokenizer_of(a)
    tokens, held, a.data = train.read_data(a, tokenizer, a.vocab)     # a.data stands for the content now
    model = llama(a.vocab, a.layers, a.width, a.length).to(a.device)
    forward = torch.compile(model, dynamic=False) if a.compile else model
    print(f"target: {model.num_parameters() / 1e6:.2f}M weights; windows of {len(tokens) / 1e6:.1f}M tokens")

    def next_tokens(ids):
        """ids (B, T + 1) -> logits (n, V), and the tokens (n,) that they should predict."""
        ids = ids.to(a.device)
        logits = forward(input_ids=ids[:, :-1], use_cache=False).logits
        return logits.flatten(0, 1).float(), ids[:, 1:].flatten()

    def losses(step):
        logits, after = next_tokens(train.draw(tokens, a.batch, a.length + 1, a.seed, step))
        return {"target": F.cross_entropy(logits, after)}

    def evaluate():
        """On held-out text: "alpha", how often the first choice is the next token; the loss."""
        right, loss = 0.0, 0.0
        for i in range(4):
            logits, after = next_tokens(train.draw(held, a.batch, a.length + 1, 10 ** 6, i))
            right += (logits.argmax(-1) == after).float().mean().item() / 4
            loss += F.cross_entropy(logits, after).item() / 4
        return {"target": {"alpha": right, "held_out_loss": loss}}

    metrics = train.fit({"target": model}, losses, evaluate, a)
    about = train.how_made(a, metrics["target"], corpus_tokens=len(tokens), shares=SHARES, held_out=HELD_OUT)
    save_lm(Path(a.out) / "target", model, tokenizer, about)


# ---------------------------------------------------------------- small models, stages of a cascade
class SmallLM(torch.nn.Module):
    """A language model with the target's vocabulary, trained as drafters are: by KL to the target."""

    def __init__(self, lm):
        super().__init__()
        self.lm, self.config = lm, SimpleNamespace()

    def loss(self, batch):
        """batch: ids (B, T), logits (B, T, V) of the target -> (D_KL(P_t || P), logits)"""
        logits = self.lm(input_ids=batch["ids"], use_cache=False).logits
        ours = logits.float().log_softmax(-1).flatten(0, 1)                     # (n, V)
        theirs = batch["logits"].float().log_softmax(-1).flatten(0, 1)          # (n, V)
        return F.kl_div(ours, theirs, reduction="batchmean", log_target=True), logits


def train_small(a):
    """`make.py small`: the named small models, from one forward of the frozen target a step."""
    unknown = [name for name in a.what if name not in SMALL]
    if unknown:
        raise UserError(f"cannot make {' '.join(unknown)}: small models are {' '.join(SMALL)}")
    target, tokenizer, data = train.prepare(a)
    config, mine = target.config.get_text_config(), train.fingerprint(target, tokenizer)
    models, before = {}, {}
    for name in a.what:
        layers, width = SMALL[name]
        lm = llama(config.vocab_size, layers, width, config.max_position_embeddings)
        if a.init:
            folder = Path(a.init) / name
            lm, _ = train.load_target(folder, "float32", a.device, role="the small model")
            before[name] = train.read_rows(folder / "training.json")[0]
            if not train.same_target(before[name]["target"], mine):
                raise UserError(f"--init: the small model in {folder} was made for another target")
        models[name] = SmallLM(lm.to(a.device))
    metrics = train.train_together(models, target, data, a)
    for name, model in models.items():
        about = train.how_made(a, metrics[name], kind=name, target=mine, init=before.get(name))
        save_lm(Path(a.out) / name, model.lm, tokenizer, about)


# ---------------------------------------------------------------- what the target writes itself
@torch.no_grad()
def write_continuations(a):
    """`make.py continuations`: data for a second stage (EDD's appendix B, sequence-level distillation).

    A quarter of each window of --length tokens is text, the rest the target's greedy continuation; one row
    {"ids": [...]} a window.
    """
    target, tokenizer = train.load_target(a.target, a.target_dtype, a.device, revision=a.revision,
                                          trust=a.trust_remote_code)
    tokens, _, _ = train.read_data(a, tokenizer, target.config.get_text_config().vocab_size)
    out, eos, given = Path(a.out), tokenizer.eos_token_id, a.length // 4
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    if a.resume and out.exists():
        rows = out.read_text().splitlines()[:-1]               # the last line may be cut
    start = len(rows) // a.batch
    with open(out, "w") as file, tqdm(total=a.steps, initial=start, unit="batch", dynamic_ncols=True) as bar:
        file.writelines(row + "\n" for row in rows[:start * a.batch])
        for step in range(start, a.steps):
            prompts = train.draw(tokens, a.batch, given, a.seed + 2, step).to(a.device)
            made = target.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
                max_new_tokens=a.length - given, eos_token_id=eos, pad_token_id=eos)
            for ids in made.tolist():
                # What follows the end of a text is padding.
                end = ids.index(eos, given) if eos in ids[given:] else len(ids)
                file.write(json.dumps({"ids": ids[:end]}) + "\n")
            file.flush()
            rate = (bar.format_dict["rate"] or 0) * a.batch * (a.length - given)
            bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            bar.update()
    print(f"saved {out}")


# ---------------------------------------------------------------- the bigram
def read_ids(path):
    """A file of token ids, uint16 and little-endian, with token 0 between documents -> lists of ids."""
    data, ids = path.read_bytes(), array("H")
    if len(data) % 2:
        raise UserError(f"--corpus: {path} is no file of uint16 token ids, it has an odd number of bytes")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return [list(run) for is_text, run in groupby(ids, bool) if is_text]


def bigram_documents(paths):
    """Yield (document, held out: True, False, or None where its row does not say) of files and folders."""
    for path in map(Path, paths):
        if path.is_dir():
            yield from bigram_documents(sorted(path.glob("[!.]*")))
        elif path.suffix == ".bin" and path.exists():
            for ids in read_ids(path):
                yield ids, None
        else:
            for _, row, found in train.documents([path], "--corpus"):
                empty = not found.strip() if isinstance(found, str) else not found
                if not empty:
                    yield found, row.get("held_out")


def load_tokenizer(name):
    """What transformers' AutoTokenizer makes of a folder or a hub name; what goes wrong is one sentence."""
    transformers.logging.set_verbosity_error()
    give = "give the folder or the hub name of the target's tokenizer"
    if not Path(name).exists() and (Path(name).is_absolute() or name.count("/") > 1):
        raise UserError(f"--tokenizer: {name} does not exist: {give}")
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except Exception as why:
        reason = f"{type(why).__name__}: {(str(why).splitlines() or [''])[0][:150]}"
        raise UserError(f"--tokenizer: {name} cannot be loaded ({reason}): {give}") from None


def shown(iterable, total):
    """With a progress bar, where somebody looks."""
    return tqdm(iterable, total=total, unit="document", dynamic_ncols=True, disable=None)


def write_bigram(a):
    """`make.py bigram`: count the corpus; measure on what is held out of it how often matches are right."""
    out = Path(a.out)
    if out.is_dir():
        raise UserError(f"--out: {out} is a folder: name a file")
    tokenizer = load_tokenizer(a.tokenizer)
    vocab, total = len(tokenizer), sum(1 for _ in bigram_documents(a.corpus))
    if not total:
        raise UserError("--corpus holds no text: give files or folders that do")
    every = min(50, total)                         # every fiftieth document is held out, or the last of fewer
    held, tokens = [], 0

    def counted():
        """The documents that the bigram is counted on; the others go to `held`."""
        nonlocal tokens
        for number, (found, is_held) in enumerate(shown(bigram_documents(a.corpus), total), 1):
            ids = train.encode(found, tokenizer, special_tokens=False)
            tokens += len(ids)
            if is_held is None:
                is_held = number % every == 0 and total > 1
            if is_held:
                held.append(ids)
            else:
                yield ids

    bigram = maxgram.build_bigram(counted(), vocab)
    confidence = maxgram.measure_confidence(shown(held, len(held)), bigram)
    measured = "not measured, the defaults hold"
    if confidence:
        confidence = [round(c, 4) for c in confidence]
        measured = " ".join(f"{c:.2f}" for c in confidence)
    found = {
        "bigram": bigram,
        "confidence": confidence,
        "fingerprint": train.vocabulary_fingerprint(tokenizer),
        "about": {"tokenizer": a.tokenizer, "corpus": a.corpus, "documents": total, "held_out": len(held),
                  "tokens": tokens, "date": time.strftime("%Y-%m-%d")},
    }
    train.write_atomically(out, lambda part: part.write_text(json.dumps(found) + "\n"))
    print(f"{out}: followers of {sum(map(bool, bigram))} of {vocab} tokens, from {total} documents, "
          f"{len(held)} of them held out; confidence by length of match: {measured}")


# ---------------------------------------------------------------- command line
def add_flags(p, *names):
    """--data, --resume, and those of train.py's flags that are named."""
    p.add_argument("--data", nargs="+", required=True, help="files or folders of text, chats or token ids")
    p.add_argument("--resume", action="store_true", help="go on from what an interrupted run left")
    train.add_flags(p, names)


def parser():
    p = train.Parser(description="Make the stand-in; docs/training.md has its recipe.")
    commands = p.add_subparsers(dest="made", required=True)

    def command(name, text):
        return commands.add_parser(name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)

    loop = "work steps batch length lr warmup optimizer dtype seed every device".split()
    c = command("corpus", "the sources of this interpreter, and word problems, as JSON lines")
    c.add_argument("--out", default=str(ROOT / "work" / "corpus"), help="folder")
    c.add_argument("--math", help="GSM8K's train split (jsonl)")

    c = command("target", "the tokenizer and a small Llama, from scratch")
    add_flags(c, *loop, "out", "layers", "width")
    c.add_argument("--vocab", type=int, default=2048, help="tokens of the tokenizer")
    c.add_argument("--compile", action="store_true", help="torch.compile: faster steps after a slow start")
    c.set_defaults(batch=12, lr=3e-3, optimizer="muon", steps=3300, layers=12, width=192)

    c = command("small", "small language models, stages of a cascade")
    c.add_argument("what", nargs="*", default=list(SMALL), help="base, small or both")
    add_flags(c, *loop, "out", "target", "target-dtype", "init")
    c.set_defaults(batch=64, lr=5e-4, block=5, layers=None, width=None)

    c = command("continuations", "what a target writes itself, for a second stage of training")
    add_flags(c, "target", "target-dtype", "out", "work", "steps", "batch", "length", "seed", "device")
    c.set_defaults(out=str(ROOT / "work" / "continuations.jsonl"), steps=100, batch=64)

    c = command("bigram", "Max-Gram's bigram, and how often its matches are right")
    c.add_argument("--corpus", nargs="+", required=True, metavar="PATH",
                   help="as train.py's --data; or .bin of uint16 token ids, with token 0 between documents")
    c.add_argument("--tokenizer", required=True, metavar="T", help="folder or hub name, for AutoTokenizer")
    c.add_argument("--out", required=True, metavar="FILE", help="JSON file to write")
    return p


MAKE = {"corpus": write_corpus, "target": train_target, "small": train_small,
        "continuations": write_continuations, "bigram": write_bigram}


def run(argv):
    a = parser().parse_args(argv)
    a.command = " ".join(["python checkpoints/make.py", *argv])
    least = {"steps": 0 if getattr(a, "init", None) else 1}
    for name in ("steps", "batch", "length", "vocab", "layers", "width", "every"):
        value = getattr(a, name, None)
        if value is not None and value < least.get(name, 1):
            raise UserError(f"--{name} is {value}: it must be above 0")
    if getattr(a, "device", "cpu").startswith("cuda") and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is available here; use --device cpu")
    MAKE[a.made](a)


def main(argv):
    """Exit status: 0; 2 after one sentence, about a mistake or Ctrl-C."""
    try:
        run(argv)
    except (UserError, maxgram.UserError, OSError) as why:
        print(f"make.py: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
