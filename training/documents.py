"""Documents as token ids: encoded once into files, which training maps into memory.

    data = load(paths, tokenizer, template, vocab, folder)       # -> Prepared: the two below
    prepare(paths, tokenizer, template, vocab, folder)
    data = read(folder, tokenizer, template)
    prompts_in(paths, tokenizer, template, most)         # only what is asked, not what is learned

A prepared folder holds, of the documents to train on (train) and of those held out (val):

    train.bin, val.bin    int32: the token ids of all documents, one document after the other.  A
                          token that is read but not learned (a prompt) is stored as ~id, below 0
    train.npy, val.npy    int64 (documents, 3): start, size and kind of text of each document
    meta.json             fingerprint of the vocabulary, chat template, names of the kinds of text,
                          what was read and left out, a hash of the tokens
"""
import hashlib
import json
import sys
from array import array
from collections import namedtuple
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from tqdm import tqdm

from runtime import chats, text
from runtime.errors import UserError
from runtime.load import vocabulary_fingerprint
from runtime.program import folder_atomically
from training.processes import barrier, rank_and_world
from training.reading import Report

SPLITS = ("train", "val")
FILES = ("train.bin", "val.bin", "train.npy", "val.npy", "meta.json")
# Token ids (n,) and documents (m, 3) to train on, those that are held out, names of the kinds, the
# lines of the report, and the hash by which a resumed run knows its data
Prepared = namedtuple("Prepared",
                      "tokens documents held_tokens held_documents kinds report digest")

# ---------------------------------------------------------------- documents -> token ids
def encoded(paths, tokenizer, template, vocab, report):
    """Yield (Document, its token ids in parts) of all rows that can be learned.

    All rows are counted in `report`.  UserError where nothing can be learned.
    """
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} does not say where in a text its tokens "
                        "stand: give a tokenizer with a tokenizer.json (a fast one)")
    bar = tqdm(text.documents(paths), unit=" rows", desc="prepare", leave=False, disable=None)
    for document in bar:
        try:
            parts = chats.encode(document, tokenizer, template)
        except text.LeftOut as why:
            report.leave_out(why, document)
            continue
        largest = max(int(np.where(ids < 0, ~ids, ids).max()) for ids in parts)
        if largest >= vocab:
            raise UserError(f"--data: {document.place} holds token id {largest}, and the target "
                            f"has {vocab} tokens: give text, or ids of its own tokenizer")
        report.read(document, parts)
        yield document, parts
    if not report.forms:
        found = "; ".join(line.strip() for line in report.lines())
        raise UserError(f"there is no text to learn from ({found or 'no rows'}): name the fields "
                        "as docs/training.md does")

def prepare(paths, tokenizer, template, vocab, folder):
    """Encode files and folders into `folder`.

    template: a name or a file, as --template takes it.  The files are written beside the folder and
    moved there at the end: an interrupted preparation leaves nothing incomplete.
    """
    template = chats.template_of(template, tokenizer)
    folder = Path(folder)
    if folder.exists() and any(path.name not in FILES for path in folder.iterdir()):
        raise UserError(f"{folder} holds something else than prepared data: name another folder")
    report, names = Report(), {}                         # names: of documents, numbered
    index = {split: array("q") for split in SPLITS}
    digest = hashlib.sha256()
    with folder_atomically(folder, last="meta.json") as part, ExitStack() as opened:
        files = {split: opened.enter_context(open(part / f"{split}.bin", "wb"))
                 for split in SPLITS}
        for document, parts in encoded(paths, tokenizer, template, vocab, report):
            split = "val" if document.held_out else "train"
            number = names.setdefault(document.names, len(names))
            for ids in parts:
                data = ids.tobytes()
                digest.update(data)
                start = files[split].tell() // 4         # an int32 has four bytes
                index[split].extend((start, len(ids), number))
                files[split].write(data)
        of_names = text.kinds_of(names)
        kinds = list(dict.fromkeys(of_names.values()))
        kind_of_number = np.array([kinds.index(of_names[name]) for name in names])
        for split in SPLITS:
            documents = np.array(index[split], "i8").reshape(-1, 3)
            documents[:, 2] = kind_of_number[documents[:, 2]]
            digest.update(documents.tobytes())
            np.save(part / f"{split}.npy", documents)
        meta = {"vocabulary": vocabulary_fingerprint(tokenizer), "template": template,
                "kinds": kinds, "report": report.lines(), "digest": digest.hexdigest()[:16]}
        (part / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")

# ---------------------------------------------------------------- what training reads
def load(paths, tokenizer, template, vocab, folder, prepared=False):
    """--data -> Prepared.  Files and folders are encoded into `folder`, and the report is printed.

    Nothing is encoded where the path is a folder that prepare() has made, or where `folder` is
    `prepared` already.  Of several processes the first one encodes and prints.
    """
    rank, _ = rank_and_world()
    if len(paths) == 1 and is_prepared(paths[0]):
        folder = paths[0]
    elif not prepared and rank == 0:
        prepare(paths, tokenizer, template, vocab, folder)
    barrier()
    data = read(folder, tokenizer, template)
    if rank == 0:
        print(*data.report, sep="\n")
    return data

def is_prepared(folder):
    """Whether prepare() has made this folder."""
    return (Path(folder) / "meta.json").is_file() and (Path(folder) / "train.bin").is_file()

def read(folder, tokenizer, template):
    """A prepared folder -> Prepared.  Other arguments: as of prepare()."""
    folder = Path(folder)
    meta = json.loads((folder / "meta.json").read_text())
    wanted = vocabulary_fingerprint(tokenizer), chats.template_of(template, tokenizer)
    if (meta["vocabulary"], meta["template"]) != wanted:
        raise UserError(f"--data: {folder} was prepared with another tokenizer or --template: "
                        "prepare it again")
    found = []
    for split in SPLITS:
        path = folder / f"{split}.bin"
        tokens = np.zeros(0, "i4")
        if path.stat().st_size:
            tokens = np.memmap(path, "i4", "r")
        found += [tokens, np.load(folder / f"{split}.npy")]
    return Prepared(*found, meta["kinds"], meta["report"], meta["digest"])

# ---------------------------------------------------------------- prompts
def plain_ids(tokens):
    """Token ids, of which those that are not learned are stored as ~id -> list of ids"""
    return np.where(tokens < 0, ~tokens, tokens).tolist()

def prompts_in(paths, tokenizer, template, most, held_out=False):
    """The prompts of documents to learn from, or of those held out -> [(kind of text, ids)].

    Left out are prompts of more than `most` tokens, and those that come a second time.  What is
    left out is printed with its reason.
    """
    template = chats.template_of(template, tokenizer)
    report, found = Report(), {}
    for document in text.documents(paths):
        if document.held_out != held_out:
            continue
        try:
            turns = text.questions_of(document)[0]
            ids = chats.prompt_ids(turns, tokenizer, template)
        except text.LeftOut as why:
            report.leave_out(why, document)
            continue
        if all(turn.learned for turn in turns):
            ids = ids[:len(ids) // 2]                    # a text without a prompt
        if not 0 < len(ids) <= most:
            report.leave_out(f"a prompt has no token, or more than {most}", document)
        elif found.setdefault(tuple(ids), document) is not document:
            report.leave_out("a prompt comes once more", document)
    left_out = report.lines()
    if not found:
        why = "; ".join(line.strip() for line in left_out) or "no rows"
        raise UserError(f"--data has no prompt of at most {most} tokens ({why}): give more "
                        "--length, or more text")
    for line in left_out:
        print(line, file=sys.stderr)
    kinds = text.kinds_of({document.names for document in found.values()})
    return [(kinds[document.names], list(ids)) for ids, document in found.items()]
