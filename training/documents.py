"""Documents as token ids: encoded once into a folder, which training maps into memory.

    prepare(paths, tokenizer, template, vocab, folder)   # template: by chats.template_of
    data = read(folder, tokenizer, template)             # -> Prepared

A prepared folder holds

    tokens.npy       int32 (n,): the token ids of all documents, one document after the other.  A
                     token that is read but not learned (a prompt) is stored as ~id, below 0
    documents.npy    int64 (m, 3): start and size of each document, and 1 where it is held out
    meta.json        fingerprint of the vocabulary, the chat template, what was read and left out
"""
import json
import os
from array import array
from collections import Counter, namedtuple
from itertools import groupby
from pathlib import Path

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from runtime import chats, text
from runtime.errors import UserError
from runtime.load import vocabulary_fingerprint

PLACES = 3          # rows that are named for each line of a report

# tokens (n,), documents (m, 2) to train on and those that are held out, and the report's lines
Prepared = namedtuple("Prepared", "tokens documents held_out report")

# ---------------------------------------------------------------- what was read, and what was not
class Report:
    """Counts of rows by what became of them, with the places of the first ones."""

    def __init__(self):
        self.counts = Counter()
        self.places = {}

    def add(self, what, document):
        """Count a row."""
        self.counts[what] += 1
        if self.counts[what] <= PLACES:
            self.places.setdefault(what, []).append(document.place)

    def lines(self):
        """What was counted, line by line."""
        lines = []
        for what, count in self.counts.most_common():
            dots = ", ..." if count > PLACES else ""
            lines.append(f"{count:7d} {what} ({', '.join(self.places[what])}{dots})")
        return lines or ["the files hold no rows"]

    def __str__(self):
        return "; ".join(line.strip() for line in self.lines())

def form_of(document):
    """What a text.Document was read as."""
    return {"text": "a text", "ids": "token ids"}.get(document.turns[0].role, "a chat")

def plain_ids(tokens):
    """Token ids, of which those that are not learned are stored as ~id -> list of ids"""
    return np.where(tokens < 0, ~tokens, tokens).tolist()

def marked(tokens, tokenizer):
    """A document as text, with the learned parts between brackets.  tokens: as of chats.encode."""
    shown = ""
    for is_label, run in groupby(tokens, key=lambda token: token >= 0):
        run = tokenizer.decode(plain_ids(np.array(list(run))), clean_up_tokenization_spaces=False)
        shown += f"⟦{run}⟧" if is_label else run
    return shown

# ---------------------------------------------------------------- documents -> token ids
def encoded(paths, tokenizer, template, vocab, report):
    """Yield (Document, its token ids in parts) of all rows that can be learned.

    All rows are counted in `report`.  UserError where nothing can be learned.
    """
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} does not say where in a text its tokens "
                        "stand: give a tokenizer with a tokenizer.json (a fast one)")
    is_empty = True
    bar = tqdm(text.documents(paths), unit=" rows", desc="prepare", leave=False, disable=None)
    for document in bar:
        try:
            parts = chats.encode(document, tokenizer, template)
        except text.LeftOut as why:
            report.add(f"left out: {why}", document)
            continue
        largest = max(max(plain_ids(ids)) for ids in parts)
        if largest >= vocab:
            raise UserError(f"--data: {document.place} holds token id {largest}, and the target "
                            f"has {vocab} tokens: give text, or ids of its own tokenizer")
        report.add(f"read as {form_of(document)}", document)
        if document.note:
            report.add(f"read without {document.note}", document)
        is_empty = False
        yield document, parts
    if is_empty:
        raise UserError(f"--data holds no text to learn from: {report}")

def prepare(paths, tokenizer, template, vocab, folder):
    """Encode files and folders into `folder`.  A folder without meta.json is incomplete."""
    report, tokens, index = Report(), array("i"), []
    for document, parts in encoded(paths, tokenizer, template, vocab, report):
        for ids in parts:
            index.append((len(tokens), len(ids), document.held_out))
            tokens.frombytes(ids.tobytes())
    tokens = np.array(tokens, "i4")
    learned = f"{(tokens >= 0).sum():7d} of {len(tokens)} tokens are learned"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "documents.npy", np.array(index, "i8"))
    meta = {"vocabulary": vocabulary_fingerprint(tokenizer), "template": template,
            "report": [*report.lines(), learned]}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")

# ---------------------------------------------------------------- what training reads
def read(folder, tokenizer, template=None):
    """A prepared folder -> Prepared.  template: that it must have, or None."""
    folder = Path(folder)
    meta = json.loads((folder / "meta.json").read_text())
    if meta["vocabulary"] != vocabulary_fingerprint(tokenizer):
        raise UserError(f"--data: {folder} was prepared with another tokenizer: prepare it again")
    if template not in (None, meta["template"]):
        raise UserError(f"--data: {folder} was prepared with another --template: leave it out, or "
                        "prepare it again")
    index = np.load(folder / "documents.npy")
    documents, is_held_out = index[:, :2], index[:, -1] == 1
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    return Prepared(tokens, documents[~is_held_out], documents[is_held_out], meta["report"])

def load(paths, tokenizer, template, vocab, folder):
    """Files and folders -> Prepared, and its report is printed.

    template: --template.  vocab: the target's.  The files are encoded into `folder`, unless the
    path is a folder that prepare() has made.  Of several processes the first encodes and prints.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    wanted = chats.template_of(template, tokenizer)
    if len(paths) == 1 and (Path(paths[0]) / "meta.json").is_file():
        folder = paths[0]
    elif is_first:
        prepare(paths, tokenizer, wanted, vocab, folder)
    if dist.is_initialized():
        dist.barrier()
    data = read(folder, tokenizer, wanted if template else None)
    notes = list(data.report)
    if not len(data.held_out):
        notes.append("no text is held out: drafters are measured on what they learn")
        data = data._replace(held_out=data.documents)
    if is_first:
        print(*notes, sep="\n")
    return data
