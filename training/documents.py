"""Documents as token ids: encoded once into a folder, which training maps into memory.

    report = prepare(paths, tokenizer, template, folder)         # template: by chats.template_of
    data = load(paths, tokenizer, template, target, folder)      # what training reads
    prompts_in(paths, tokenizer, template, limit)                # what a target is asked

A prepared folder holds

    tokens.npy       int32 (n,): the token ids of all documents, one document after the other.  A
                     token that is read but not learned (a prompt) is stored as ~id, below 0
    documents.npy    int64 (m, 4): start, size and kind of text of each document, and 1 where it is
                     held out
    meta.json        fingerprint of the vocabulary, the chat template, what was read and left out,
                     digests of the targets that wrote the text

A report is a defaultdict(list), {what was done with rows: their places}.
"""
import hashlib
import json
import os
import sys
from array import array
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from runtime import chats, text
from runtime.load import vocabulary_fingerprint
from runtime.program import UserError

PLACES = 3          # rows that are named for each line of a report

# ---------------------------------------------------------------- what was read, and what was not
def lines_of(report):
    """The lines of a report, the most frequent first."""
    lines = []
    for what, places in sorted(report.items(), key=lambda item: -len(item[1])):
        dots = ", ..." if len(places) > PLACES else ""
        lines.append(f"{len(places)} {what} ({', '.join(places[:PLACES])}{dots})")
    return lines or ["the files hold no rows"]

def marked(ids, tokenizer):
    """A document as text, with the learned parts between brackets.  ids: as of chats.encode."""
    is_label = ids >= 0
    plain = plain_ids(ids)
    before = shown = ""
    for end in [*(np.flatnonzero(np.diff(is_label)) + 1), len(ids)]:
        # Decoded with all that comes before: some tokenizers drop the space of a first word.
        whole = tokenizer.decode(plain[:end], clean_up_tokenization_spaces=False)
        part = whole[len(before):]
        shown += f"⟦{part}⟧" if is_label[end - 1] else part
        before = whole
    return shown

# ---------------------------------------------------------------- documents -> token ids
def plain_ids(tokens):
    """Token ids, of which those that are not learned are stored as ~id -> list of ids"""
    return np.where(tokens < 0, ~tokens, tokens).tolist()

def encoded(paths, tokenizer, template, report):
    """Yield (Document, its token ids in parts) of all rows that can be learned.

    All rows are added to `report`.  UserError where nothing can be learned.
    """
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} does not say where in a text its tokens "
                        "stand: give a tokenizer with a tokenizer.json (a fast one)")
    vocab = max(tokenizer.get_vocab().values()) + 1
    bar = tqdm(text.documents(paths), unit=" rows", desc="prepare", leave=False, disable=None)
    for document in bar:
        try:
            parts = chats.encode(document, tokenizer, template)
        except text.LeftOut as why:
            report[f"left out: {why}"].append(document.place)
            continue
        largest = max(max(plain_ids(ids)) for ids in parts)
        if largest >= vocab:
            raise UserError(f"--data: {document.place} holds token id {largest}, and the tokenizer "
                            f"has {vocab} tokens: give text, or ids of the target's tokenizer")
        unread = ", ".join(sorted(chats.not_read(document, template)))
        what = f"read as {document.form}" + (f"; not read: {unread}" if unread else "")
        report[what].append(document.place)
        if document.note:
            report[f"read without {document.note}"].append(document.place)
        yield document, parts
    if all(what.startswith("left out") for what in report):
        raise UserError(f"--data holds no text to learn from: {'; '.join(lines_of(report))}")

def prepare(paths, tokenizer, template, folder):
    """Encode files and folders into `folder` -> the lines of the report.  meta.json comes last."""
    report, kinds, written_by = defaultdict(list), {}, set()
    tokens, index = array("i"), []
    for document, parts in encoded(paths, tokenizer, template, report):
        kind = kinds.setdefault(document.kind, len(kinds))
        if document.form == "prompt + answer" and "target" in document.row:
            written_by.add(str(document.row["target"]))
        for ids in parts:
            index.append((len(tokens), len(ids), kind, document.held_out))
            tokens.frombytes(ids.tobytes())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)
    tokens, index = np.array(tokens, "i4"), np.array(index, "i8")
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "documents.npy", index)
    lines = [*lines_of(report),
             f"{(tokens >= 0).sum()} of {len(tokens)} tokens are learned; {index[:, 3].sum()} of "
             f"{len(index)} documents are held out; kinds of text: {len(kinds)}"]
    meta = {"vocabulary": vocabulary_fingerprint(tokenizer), "template": template,
            "report": lines, "written_by": sorted(written_by)}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return lines

# ---------------------------------------------------------------- what training reads
def load(paths, tokenizer, template, target, folder, keep=False):
    """Files and folders -> tokens (n,), documents (m, 3) and held_out (k, 3); prints the report.

    template: a name and arguments, as of chats.template_of.  target: the target's fingerprint.  The
    files are encoded into `folder`, unless the path is a folder that prepare() has made, or what is
    in `folder` is kept.  Of several processes the first one encodes and prints.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    wanted = chats.template_of(template[0], tokenizer, template[1])
    if len(paths) == 1 and Path(paths[0], "meta.json").is_file():
        folder = paths[0]
    elif is_first and not keep:
        prepare(paths, tokenizer, wanted, folder)
    if dist.is_initialized():
        dist.barrier()
    meta = json.loads(Path(folder, "meta.json").read_text())
    if meta["vocabulary"] != vocabulary_fingerprint(tokenizer):
        raise UserError(f"--data: {folder} was prepared with another tokenizer: prepare it again")
    if any(template) and wanted != meta["template"]:
        raise UserError(f"--data: {folder} was prepared with another --template or "
                        "--template-args: leave them out, or prepare it again")
    notes = meta["report"]
    if set(meta["written_by"]) - {digest_of(target)}:
        notes.append("warning: --data has text that another model than --target wrote, or another "
                     "copy of it: drafters learn best from what their own target writes")
    index = np.load(Path(folder, "documents.npy"))
    learned, held_out = [index[index[:, 3] == mark, :3] for mark in (0, 1)]
    if not len(held_out):
        notes.append("no text is held out: drafters are measured on what they learn")
        held_out = learned
    if is_first:
        print(*notes, sep="\n")
    tokens = np.load(Path(folder, "tokens.npy"), mmap_mode="r")
    return SimpleNamespace(tokens=tokens, documents=learned, held_out=held_out)

def digest_of(fingerprint):
    """Eight hex digits of a target's fingerprint, by which text knows who wrote it."""
    about = json.dumps(fingerprint, sort_keys=True)
    return hashlib.sha256(about.encode()).hexdigest()[:8]

# ---------------------------------------------------------------- prompts
def prompts_in(paths, tokenizer, template, limit):
    """The prompts of documents to learn from, each once -> [(kind of text, ids)].

    Prompts of more than `limit` tokens are left out.  What is left out is printed with its reason.
    """
    report, found = defaultdict(list), {}
    for document in text.documents(paths):
        try:
            if document.held_out:
                raise text.LeftOut("it is held out")
            ids = next(chats.questions(document, tokenizer, template))
            if all(turn.learned for turn in document.turns):
                ids = ids[:len(ids) // 2]                # a text without a prompt
            if not 0 < len(ids) <= limit:
                raise text.LeftOut(f"its prompt has no token, or more than {limit}")
            if tuple(ids) in found:
                raise text.LeftOut("its prompt comes once more")
        except text.LeftOut as why:
            report[f"left out: {why}"].append(document.place)
            continue
        found[tuple(ids)] = document.kind
        report["asked"].append(document.place)
    lines = lines_of(report)
    if not found:
        raise UserError(f"--data holds no prompt to ask: {'; '.join(lines)}")
    print(*lines, sep="\n", file=sys.stderr)
    return [(kind, list(ids)) for ids, kind in found.items()]
