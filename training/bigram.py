"""make.py's part: Max-Gram's bigram for a tokenizer and a text; how often its matches are right.

    write_bigram(a)      followers of each token; the confidence by length of match
    fit_agreement(a)     how often Max-Gram is right where a drafter agrees
"""
import json
import sys
import time
from array import array
from itertools import groupby
from pathlib import Path

import transformers
from tqdm import tqdm

import maxgram
from runtime import text as read
from runtime.text import UserError
from runtime import grams, load
from training.write import given_parts


def read_ids(path):
    """A file of uint16 token ids, little-endian, with 0 between documents -> lists of ids."""
    data, ids = path.read_bytes(), array("H")
    if len(data) % 2:
        raise UserError(f"--corpus: {path} is no file of uint16 token ids, it has an odd number of "
                        "bytes")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return [list(run) for is_text, run in groupby(ids, bool) if is_text]


def bigram_documents(paths):
    """Yield (document, held out: None where its row does not say) of files and folders."""
    for path in map(Path, paths):
        if path.is_dir():
            yield from bigram_documents(sorted(path.glob("[!.]*")))
        elif path.suffix == ".bin" and path.exists():
            for ids in read_ids(path):
                yield ids, None
        else:
            for _, row, found in read.documents([path], "--corpus"):
                empty = not found.strip() if isinstance(found, str) else not found
                if not empty:
                    yield found, row.get("held_out")


def load_tokenizer(name):
    """transformers' AutoTokenizer of a folder or a hub name; a UserError where there is none."""
    transformers.logging.set_verbosity_error()
    give = "give the folder or the hub name of the target's tokenizer"
    if not Path(name).exists() and (Path(name).is_absolute() or name.count("/") > 1):
        raise UserError(f"--tokenizer: {name} does not exist: {give}")
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except Exception as why:
        reason = f"{type(why).__name__}: {read.first_line(why)}"
        raise UserError(f"--tokenizer: {name} cannot be loaded ({reason}): {give}") from None


def shown(iterable, total):
    """With a progress bar, where somebody looks."""
    return tqdm(iterable, total=total, unit="document", dynamic_ncols=True, disable=None)


def write_bigram(a):
    """`make.py bigram`: count the corpus; measure on its held-out part when matches are right."""
    out = Path(a.out)
    if out.is_dir():
        raise UserError(f"--out: {out} is a folder: name a file")
    tokenizer = load_tokenizer(a.tokenizer)
    vocab, total = len(tokenizer), sum(1 for _ in bigram_documents(a.corpus))
    if not total:
        raise UserError("--corpus holds no text: give files or folders that do")
    every = min(50, total)               # every fiftieth document is held out, or the last of fewer
    held, tokens = [], 0

    def counted():
        """The documents that the bigram is counted on; the others go to `held`."""
        nonlocal tokens
        for number, (found, is_held) in enumerate(shown(bigram_documents(a.corpus), total), 1):
            ids = read.encode(found, tokenizer, special_tokens=False)
            tokens += len(ids)
            if is_held is None:
                is_held = number % every == 0 and total > 1
            if is_held:
                held.append(ids)
            else:
                yield ids

    try:
        bigram = maxgram.build_bigram(counted(), vocab)
    except ValueError as why:
        raise UserError(str(why)) from None
    confidence = grams.measure_confidence(shown(held, len(held)), bigram)
    measured = "not measured, the defaults hold"
    if confidence:
        confidence = [round(c, 4) for c in confidence]
        measured = " ".join(f"{c:.2f}" for c in confidence)
    found = {
        "bigram": bigram,
        "confidence": confidence,
        "fingerprint": load.vocabulary_fingerprint(tokenizer),
        "about": {
            "tokenizer": a.tokenizer,
            "corpus": a.corpus,
            "documents": total,
            "held_out": len(held),
            "tokens": tokens,
            "date": time.strftime("%Y-%m-%d"),
        },
    }
    read.write_atomically(out, lambda part: part.write_text(json.dumps(found) + "\n"))
    print(f"{out}: followers of {sum(map(bool, bigram))} of {vocab} tokens, from {total} "
          f"documents, {len(held)} of them held out; confidence by length of match: {measured}")


def read_found(path):
    """A bigram.json as this file writes it; the paper's holds the list of followers alone."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        raise UserError(f"{path} is damaged: write it with make.py bigram") from None
    return found if isinstance(found, dict) else {"bigram": found}


def fit_agreement(a):
    """`make.py agreement`: how often Max-Gram is right where a drafter agrees, for bigram.json."""
    setup = load.Setup(a.target, a.checkpoint, "float32", a.device, a.revision, a.trust_remote_code)
    path = Path(a.checkpoint) / "bigram.json"
    if not path.exists():
        raise UserError(f"--checkpoint: {path} does not exist: write it with make.py bigram")
    found = read_found(path)
    # As many prompts of each kind of text
    prompts, kinds = [], {}
    for kind, ids in given_parts(a, setup.tokenizer, held_out=True):
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] <= a.prompts:
            prompts.append(ids)
    stop = [] if setup.eos is None else [transformers.EosTokenCriteria(setup.eos)]
    for name in a.drafter:
        beside = load.load_beside(setup, name, "maxgram")
        bar = shown(prompts, len(prompts))
        judged = grams.judged_words(setup.target, beside.drafter, beside.gram, bar, a.tokens, stop)
        if not judged:
            raise UserError("--data: nothing in these texts repeats itself: there is nothing to "
                            "judge")
        fitted = grams.fit_agreement(judged, beside.gram.confidence_of)
        print(f"{name}: {json.dumps(fitted)}")
        fitted["made"] = {"command": a.command, "date": time.strftime("%Y-%m-%d")}
        found.setdefault("agreement", {})[name] = fitted
    read.write_atomically(path, lambda part: part.write_text(json.dumps(found) + "\n"))
