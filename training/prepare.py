"""Encode text, chats or token ids into files that training maps into memory, as nanoGPT does.

    python training/prepare.py sharegpt.json --tokenizer lmsys/vicuna-7b-v1.5 --template vicuna \\
        --out data/sharegpt
    python train.py glide --target lmsys/vicuna-7b-v1.5 --template vicuna --data data/sharegpt

The folder holds, of the documents to train on (train) and of those held out (val):

    train.bin, val.bin    int32: the token ids of all documents, one document after the other.  A
                          token that is read but not learned (a prompt) is stored as ~id, below 0
    train.npy, val.npy    int64 (documents, 3): start, size and kind of text of each document
    meta.json             fingerprint of the vocabulary, chat template, names of the kinds of text

train.py encodes files by itself.  Encoded ahead of time, they serve several runs and machines.
Every fiftieth document is held out, unless its row says "held_out": true or false.
"""
import json
import os
import shutil
import sys
from array import array
from collections import namedtuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import numpy as np
from tqdm import tqdm

from runtime import text
from runtime.load import vocabulary_fingerprint
from training.state import status_of
from verify import UserError

HELD_OUT = 50                                     # every fiftieth document
# Token ids (n,) and documents (m, 3) to train on, those that are held out, names of the kinds
Prepared = namedtuple("Prepared", "tokens documents held_tokens held_documents kinds")

# ---------------------------------------------------------------- documents -> token ids
def is_held_out(number, row):
    """Whether document `number`, counted from 1, is held out.  Its row may decide."""
    return row.get("held_out", number % HELD_OUT == 0)

def file_name(place):
    """"row 3 of questions.jsonl" -> "questions.jsonl"."""
    return place.partition(" of ")[2]

def write_splits(files, paths, tokenizer, template, vocab):
    """Encode all documents into open files {split: file} -> {split: documents}, names of the kinds

    documents: an array with start, size and kind of each.  Rows that hold no text, or from which
    nothing can be learned, are left out and reported.
    """
    index = {split: array("q") for split in files}
    kinds, left_out = [], []
    documents = text.documents(paths, bad=left_out)
    bar = tqdm(documents, unit=" documents", desc="prepare", leave=False, disable=None)
    for number, (place, row, document) in enumerate(bar, 1):
        parts = next(text.encode_all([document], tokenizer, template))
        kind = text.kind_of_text(row, file_name(place))
        if kind not in kinds:
            kinds.append(kind)
        split = "val" if is_held_out(number, row) else "train"
        learned = [ids for ids in parts if (ids >= 0).any()]
        if not learned:
            left_out.append(place)
        for ids in learned:
            check_ids(ids, vocab, place)
            if isinstance(document, str) and tokenizer.eos_token_id is not None:
                # A chat ends as its template says, and token ids end as they are.
                ids = np.append(ids, tokenizer.eos_token_id)
            start = files[split].tell() // 4              # an int32 has four bytes
            files[split].write(ids.astype("i4").tobytes())
            index[split].extend((start, len(ids), kinds.index(kind)))
    if left_out:
        first = ", ".join(left_out[:9])
        print(f"left out, {len(left_out)} rows without text to learn from: {first}",
              file=sys.stderr)
    return index, kinds

def check_ids(ids, vocab, place):
    """Refuse ids that the target's embedding does not have."""
    largest = int(np.where(ids < 0, ~ids, ids).max())
    if largest >= vocab:
        raise UserError(f"--data: {place} holds token id {largest}, and the target has {vocab} "
                        "tokens: give text, or token ids of its own tokenizer")

def prepare(paths, tokenizer, template, vocab, folder):
    """Encode files and folders into `folder`.  template: a name or a file, as --template takes it.

    The files are written beside the folder and moved there at the end: an interrupted preparation
    leaves nothing incomplete.
    """
    template = text.template_of(template, tokenizer)
    folder = Path(folder)
    if folder.exists() and not is_prepared(folder):
        raise UserError(f"{folder} holds something else than prepared data: name another folder")
    part = Path(f"{folder}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    with open(part / "train.bin", "wb") as train, open(part / "val.bin", "wb") as val:
        files = {"train": train, "val": val}
        index, kinds = write_splits(files, paths, tokenizer, template, vocab)
    for split, documents in index.items():
        np.save(part / f"{split}.npy", np.array(documents, "i8").reshape(-1, 3))
    if not any(index.values()):
        raise UserError("--data has no text to learn from, or none that the chat template takes")
    fingerprint = vocabulary_fingerprint(tokenizer)
    meta = {"vocabulary": fingerprint, "template": template, "kinds": kinds}
    (part / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)

# ---------------------------------------------------------------- what training reads
def is_prepared(folder):
    """Whether prepare() has made this folder."""
    return (Path(folder) / "meta.json").is_file() and (Path(folder) / "train.bin").is_file()

def read(folder, tokenizer, template):
    """A prepared folder -> Prepared.  Other arguments: as of prepare()."""
    folder = Path(folder)
    meta = json.loads((folder / "meta.json").read_text())
    wanted = vocabulary_fingerprint(tokenizer), text.template_of(template, tokenizer)
    if (meta["vocabulary"], meta["template"]) != wanted:
        raise UserError(f"--data: {folder} was prepared with another tokenizer or --template: "
                        "prepare it again")
    found = []
    for split in ("train", "val"):
        path = folder / f"{split}.bin"
        tokens = np.zeros(0, "i4")
        if path.stat().st_size:
            tokens = np.memmap(path, "i4", "r")
        documents = np.load(folder / f"{split}.npy")
        found += [tokens, documents]
    return Prepared(*found, meta["kinds"])

# ---------------------------------------------------------------- command line
def run(argv):
    p = text.Parser(description="Encode files for train.py.")
    p.add_argument("files", nargs="+", help="files or folders of text, chats or token ids")
    p.add_argument("--tokenizer", required=True, help="folder or hub name: the target's")
    p.add_argument("--template",
                   help="format of chats: plain, vicuna, or a Jinja file (default: its own)")
    p.add_argument("--out", required=True, help="folder to write")
    a = p.parse_args(argv)
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(a.tokenizer)
    vocab = max(tokenizer.get_vocab().values()) + 1
    prepare(a.files, tokenizer, a.template, vocab, a.out)
    data = read(a.out, tokenizer, a.template)
    print(f"{a.out}: {len(data.documents)} documents of {len(data.tokens)} tokens, held out "
          f"{len(data.held_documents)} of {len(data.held_tokens)}; kinds {' '.join(data.kinds)}")

def main(argv):
    return status_of(run, argv)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
