"""Documents as token ids: encoded once into a folder, which training maps into memory.

    prepare(paths, tokenizer, template, vocab, folder)   # template: by chats.template_of
    data = read(folder, tokenizer, template)             # -> Prepared
    prompts_in(paths, tokenizer, template, limit)        # what a target is asked

A prepared folder holds

    tokens.npy       int32 (n,): the token ids of all documents, one document after the other.  A
                     token that is read but not learned (a prompt) is stored as ~id, below 0
    documents.npy    int64 (m, 4): start, size and kind of text of each document, and 1 where it is
                     held out
    meta.json        fingerprint of the vocabulary, the chat template, names of the kinds of text,
                     what was read and left out, digests of the targets that wrote the text
"""
import hashlib
import json
import os
import sys
from array import array
from collections import Counter, namedtuple
from pathlib import Path

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from runtime import chats, text
from runtime.load import vocabulary_fingerprint
from runtime.program import UserError

PLACES = 3          # rows that are named for each reason

# tokens (n,), documents (m, 3) to train on and those that are held out, and what meta.json has
Prepared = namedtuple("Prepared", "tokens documents held_out kinds report written_by")

# ---------------------------------------------------------------- what was read, and what was not
class Report:
    """Counts of rows: by the form they were read in, and by the reason why they were left out."""

    def __init__(self):
        self.forms = {}                  # {form: Counter of rows, tokens, learned tokens}
        self.unread = {}                 # {form: fields that its rows have beside}
        self.reasons = {}                # {reason: [places of rows]}

    def read(self, document, parts, unread):
        """Count a row that was read, and the tokens of its parts.  unread: names of fields."""
        ids = np.concatenate(parts)
        counts = self.forms.setdefault(document.form, Counter())
        counts.update(rows=1, tokens=len(ids), learned=int((ids >= 0).sum()))
        self.unread.setdefault(document.form, set()).update(unread)
        if document.note:
            self.leave_out(document.note, document, "read without")

    def leave_out(self, why, document, what="left out:"):
        """Count a row that was left out."""
        self.reasons.setdefault(f"{what} {why}", []).append(document.place)

    def lines(self):
        """What was counted, line by line."""
        lines = []
        for form, counts in self.forms.items():
            line = ("{rows:7d} read as {form}: {learned} of {tokens} tokens are learned"
                    .format(**counts, form=form))
            unread = ", ".join(sorted(self.unread[form]))
            lines.append(f"{line}; not read: {unread}" if unread else line)
        for why, places in sorted(self.reasons.items(), key=lambda reason: -len(reason[1])):
            dots = ", ..." if len(places) > PLACES else ""
            lines.append(f"{len(places):7d} {why} ({', '.join(places[:PLACES])}{dots})")
        return lines

    def __str__(self):
        return "; ".join(line.strip() for line in self.lines()) or "the files hold no rows"

def marked(ids, tokenizer):
    """A document as text, with the learned parts between brackets.  ids: as of chats.encode."""
    is_label = ids >= 0
    plain = plain_ids(ids)
    ends = [*(np.flatnonzero(np.diff(is_label)) + 1), len(ids)]
    shown, start = "", 0
    for end in ends:
        # Decoded with all that comes before: some tokenizers drop the space of a first word.
        before = tokenizer.decode(plain[:start], clean_up_tokenization_spaces=False)
        run = tokenizer.decode(plain[:end], clean_up_tokenization_spaces=False)[len(before):]
        shown += f"⟦{run}⟧" if is_label[start] else run
        start = end
    return shown

# ---------------------------------------------------------------- documents -> token ids
def plain_ids(tokens):
    """Token ids, of which those that are not learned are stored as ~id -> list of ids"""
    return np.where(tokens < 0, ~tokens, tokens).tolist()

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
        largest = max(max(plain_ids(ids)) for ids in parts)
        if largest >= vocab:
            raise UserError(f"--data: {document.place} holds token id {largest}, and the target "
                            f"has {vocab} tokens: give text, or ids of its own tokenizer")
        report.read(document, parts, chats.not_read(document, template))
        yield document, parts
    if not report.forms:
        raise UserError(f"--data holds no text to learn from: {report}")

def prepare(paths, tokenizer, template, vocab, folder):
    """Encode files and folders into `folder`.  A folder without meta.json is incomplete."""
    report, kinds, written_by = Report(), {}, set()
    tokens, index = array("i"), []
    for document, parts in encoded(paths, tokenizer, template, vocab, report):
        kind = kinds.setdefault(document.kind, len(kinds))
        if document.form == "prompt + answer" and "target" in document.row:
            written_by.add(str(document.row["target"]))
        for ids in parts:
            index.append((len(tokens), len(ids), kind, document.held_out))
            tokens.frombytes(ids.tobytes())
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)
    np.save(folder / "tokens.npy", np.array(tokens, "i4"))
    np.save(folder / "documents.npy", np.array(index, "i8"))
    meta = {"vocabulary": vocabulary_fingerprint(tokenizer), "template": template._asdict(),
            "kinds": list(kinds), "report": report.lines(), "written_by": sorted(written_by)}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")

# ---------------------------------------------------------------- what training reads
def is_prepared(folder):
    """Whether prepare() has made this folder."""
    return (Path(folder) / "meta.json").is_file()

def read(folder, tokenizer, template=None):
    """A prepared folder -> Prepared.  template: a chats.Template that it must have, or None."""
    folder = Path(folder)
    meta = json.loads((folder / "meta.json").read_text())
    if meta["vocabulary"] != vocabulary_fingerprint(tokenizer):
        raise UserError(f"--data: {folder} was prepared with another tokenizer: prepare it again")
    if template is not None and template._asdict() != meta["template"]:
        raise UserError(f"--data: {folder} was prepared with another --template or "
                        "--template-args: leave them out, or prepare it again")
    index = np.load(folder / "documents.npy")
    documents, is_held_out = index[:, :3], index[:, 3] == 1
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    return Prepared(tokens, documents[~is_held_out], documents[is_held_out], meta["kinds"],
                    meta["report"], meta["written_by"])

def load(paths, tokenizer, template, target, folder, keep=False):
    """Files and folders -> Prepared, and its report is printed.

    template: a name and arguments, as of chats.template_of.  target: the target's fingerprint.  The
    files are encoded into `folder`, unless the path is a folder that prepare() has made, or there
    is one already to keep.  Of several processes the first one encodes and prints.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    wanted = chats.template_of(template[0], tokenizer, template[1])
    if len(paths) == 1 and is_prepared(paths[0]):
        folder = paths[0]
    elif is_first and not (keep and is_prepared(folder)):
        prepare(paths, tokenizer, wanted, target["vocab_size"], folder)
    if dist.is_initialized():
        dist.barrier()
    data = read(folder, tokenizer, wanted if any(template) else None)
    notes = list(data.report)
    if set(data.written_by) - {digest_of(target)}:
        notes.append("warning: --data has text that another model than --target wrote, or another "
                     "copy of it: drafters learn best from what their own target writes")
    if not len(data.held_out):
        notes.append("no text is held out: drafters are measured on what they learn")
        data = data._replace(held_out=data.documents)
    if is_first:
        print(*notes, sep="\n")
    return data

def digest_of(fingerprint):
    """Eight hex digits of a target's fingerprint, by which text knows who wrote it."""
    about = json.dumps(fingerprint, sort_keys=True)
    return hashlib.sha256(about.encode()).hexdigest()[:8]

# ---------------------------------------------------------------- prompts
def prompts_in(paths, tokenizer, template, limit):
    """The prompts of documents to learn from, each once -> [(kind of text, ids)].

    Prompts of more than `limit` tokens are left out.  What is left out is printed with its reason.
    """
    report, found = Report(), {}
    for document in text.documents(paths):
        try:
            if document.held_out:
                raise text.LeftOut("it is held out")
            turns = text.questions_of(document)[0]
            ids = chats.prompt_ids(turns, tokenizer, template, document.row.get("tools"))
        except text.LeftOut as why:
            report.leave_out(why, document)
            continue
        if all(turn.learned for turn in turns):
            ids = ids[:len(ids) // 2]                    # a text without a prompt
        if not 0 < len(ids) <= limit:
            report.leave_out(f"a prompt has no token, or more than {limit}", document)
        elif found.setdefault(tuple(ids), document) is not document:
            report.leave_out("a prompt comes once more", document)
    if not found:
        raise UserError(f"--data holds no prompt to ask: {report}")
    for line in report.lines():
        print(line, file=sys.stderr)
    return [(document.kind, list(ids)) for ids, document in found.items()]
