"""Files of text, chats or token ids -> tokens that training maps into memory, as in nanoGPT.

    T=lmsys/vicuna-7b-v1.5
    python training/prepare.py sharegpt.json --tokenizer $T --template vicuna --out data/sharegpt
    python train.py glide --target $T --template vicuna --data data/sharegpt

    train.bin, val.bin    int32: the tokens of all documents; ~id is read, not learned from
    train.npy, val.npy    int64 (documents, 3): start, length, kind of text
    meta.json             the vocabulary, the chat template, names of the kinds, counts

train.py prepares files by itself; prepared ahead, they are read by several runs, and on several
machines.  Every fiftieth document is held out (val), unless its row says "held_out"; "times": 3
counts a row three times.  A fast tokenizer encodes many documents at once, on all cores.
"""
import hashlib
import json
import os
import shutil
import sys
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import numpy as np
import torch
from tqdm import tqdm

from runtime import text as read
from runtime.fingerprints import vocabulary_fingerprint
from runtime.text import UserError

SPLITS = ("train", "val")
FILES = {"train.bin", "val.bin", "train.npy", "val.npy", "meta.json"}
HELD_OUT = 50                                     # every fiftieth document
AT_ONCE = 2 ** 18                                 # characters that are encoded at once
KINDS = 16                                        # kinds of text; all further ones are "other"


# ---------------------------------------------------------------- documents -> tokens
class Split:
    """The documents of one split, as they are written."""

    def __init__(self, file):
        self.file, self.index, self.tokens, self.largest = file, array("q"), 0, 0

    def add(self, ids, kind, times):
        self.file.write(ids.astype("i4").tobytes())
        self.index.extend((self.tokens, len(ids), kind) * times)
        self.tokens += len(ids)
        self.largest = max(self.largest, largest_of(ids))


def in_batches(entries):
    """Yield lists of entries (place, row, document), each of some AT_ONCE characters."""
    some, size = [], 0
    for entry in entries:
        some.append(entry)
        found = entry[-1]
        size += len(found) if isinstance(found, str) else sum(len(str(part)) for part in found)
        if size > AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


def write_splits(outputs, paths, tokenizer, template, vocab):
    """Encode all documents into open files {split: file} -> the splits, and what meta.json says."""
    bad, silent, kinds, eos = [], [], [], tokenizer.eos_token_id
    splits = {name: Split(file) for name, file in outputs.items()}
    number, entries = 0, read.documents(paths, bad=bad)
    bar = tqdm(entries, unit=" documents", desc="prepare", leave=False, disable=None)
    for some in in_batches(bar):
        encoded = read.encode_all([found for _, _, found in some], tokenizer, template)
        for (place, row, found), parts in zip(some, encoded):
            number += 1
            if not parts:
                bad.append(place)
                continue
            kind = kind_number(kinds, read.kind_of_text(row, place.split(" of ", 1)[-1]))
            held = row.get("held_out", number % HELD_OUT == 0)
            for ids in parts:
                if not (ids >= 0).any():
                    silent.append(place)
                    continue
                check_ids(ids, place, vocab)
                # A chat ends as its template says, ids as they do, a piece of a text not at all.
                if isinstance(found, str) and getattr(found, "last", True) and eos is not None:
                    ids = np.append(ids, eos)
                if held:
                    splits["val"].add(ids, kind, 1)
                else:
                    splits["train"].add(ids, kind, row.get("times", 1))
    left_out = {"rows without text": bad, "chats without an answer to learn from": silent}
    for what, places in left_out.items():
        if places:
            named = ", ".join(places[:9])
            print(f"left out, {len(places)} {what}: {named}", file=sys.stderr)
    return splits, {"kinds": kinds, "left_out": len(bad), "without_answer": len(silent)}


def kind_number(kinds, kind):
    """The number of a kind of text in the list `kinds`, which grows."""
    if kind not in kinds and len(kinds) >= KINDS - 1:
        kind = "other"
    if kind not in kinds:
        kinds.append(kind)
    return kinds.index(kind)


def check_ids(ids, place, vocab):
    """Refuse ids that the target's embedding does not have."""
    check_largest(largest_of(ids), place, vocab)


def check_largest(largest, place, vocab):
    """As check_ids, by the largest of them."""
    if vocab and largest >= vocab:
        raise UserError(f"--data: {place} holds token id {largest}, the target has {vocab} tokens: "
                        "give text, or ids of its own tokenizer")


def largest_of(ids):
    """The largest id, of those that are read and of those that are learned."""
    return int(np.where(ids < 0, ~ids, ids).max())


def key_of(paths, tokenizer, template):
    """A hash of the files' content, the tokenizer and the template."""
    content = hashlib.sha256(f"{vocabulary_fingerprint(tokenizer)} {template}".encode())
    for path in read.files_of(paths, "--data"):
        content.update(f"{path.name} ".encode())
        if not path.exists():                            # a data set of the hub
            content.update(f"{path} ".encode())
            continue
        with open(path, "rb") as file:
            while block := file.read(read.PIECE):
                content.update(block)
    return content.hexdigest()[:16]


def holds_something_else(folder):
    """Whether there is a file of this name, or a folder with other files than prepare's."""
    if not folder.is_dir():
        return folder.exists()
    return not FILES >= {file.name for file in folder.iterdir()}


def prepare(paths, tokenizer, folder, template=None, vocab=None):
    """Encode files and folders into `folder`, if they are not there already -> folder.

    template: read.template_of's; vocab: ids that the target has.
    """
    folder = Path(folder)
    template = template or read.template_of(None, tokenizer)
    key = key_of(paths, tokenizer, template)
    if is_prepared([folder]) and meta_of(folder)["key"] == key:
        return folder
    if holds_something_else(folder):
        raise UserError(f"{folder} holds something else than prepared data: name another folder")
    # Made beside it, and moved there when all is done: a killed preparation leaves nothing half.
    part = Path(f"{folder}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    with open(part / "train.bin", "wb") as train, open(part / "val.bin", "wb") as val:
        outputs = {"train": train, "val": val}
        splits, meta = write_splits(outputs, paths, tokenizer, template, vocab)
    for name, split in splits.items():
        rows = np.array(split.index, "i8").reshape(-1, 3)
        np.save(part / f"{name}.npy", rows)
        meta[name] = {"tokens": split.tokens, "documents": len(rows)}
    if not meta["train"]["tokens"] + meta["val"]["tokens"]:
        raise UserError("--data has no text, or none that the chat template takes: give files or "
                        "folders that do")
    meta["largest"] = max(split.largest for split in splits.values())
    meta |= {"key": key, "vocabulary": vocabulary_fingerprint(tokenizer), "template": template}
    (part / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)
    return folder


# ---------------------------------------------------------------- what training reads back
def meta_of(folder):
    """meta.json of a prepared folder."""
    try:
        meta = json.loads((Path(folder) / "meta.json").read_text())
        kinds, key = meta["kinds"], meta["key"]
        counts = [meta[split][what] for split in SPLITS for what in ("tokens", "documents")]
        assert isinstance(kinds, list) and isinstance(key, str)
        assert all(type(count) is int for count in counts)
        assert {"vocabulary", "template"} <= set(meta)
    except (OSError, ValueError, LookupError, TypeError, AssertionError):
        raise damaged(folder) from None
    return meta


def damaged(folder):
    return UserError(f"{folder} is damaged, or was not prepared by python training/prepare.py: prepare "
                     "it again")


def is_prepared(paths):
    """Whether --data names one folder that prepare made."""
    if len(paths) != 1:
        return False
    folder = Path(paths[0])
    return (folder / "meta.json").is_file() and (folder / "train.bin").is_file()


def open_split(folder, split):
    """-> tokens (n,) int32, mapped into memory; index (documents, 3): start, length, kind."""
    path = Path(folder) / f"{split}.bin"
    meta = meta_of(folder)
    try:
        size = path.stat().st_size
        tokens = np.memmap(path, "i4", "r") if size else np.zeros(0, "i4")
        index = np.load(path.with_suffix(".npy"))
        assert size == 4 * meta[split]["tokens"] and index.dtype == "i8"
        assert index.shape == (meta[split]["documents"], 3)
        start, length, kind = index.T
        assert (index >= 0).all() and (start + length <= len(tokens)).all()
        assert (kind < len(meta["kinds"])).all()
    except (OSError, ValueError, AssertionError):
        raise damaged(folder) from None
    return tokens, index


def pieces_of(index, length):
    """Documents in pieces of `length` tokens or less -> start, size, kind: (pieces, 3)."""
    start, size, kind = index.T
    pieces = -(-size // length)                          # of each document
    before = np.cumsum(pieces) - pieces
    piece = np.arange(pieces.sum()) - np.repeat(before, pieces)        # 0, 1, ... within a document
    start = np.repeat(start, pieces) + piece * length
    size = np.minimum(np.repeat(size, pieces) - piece * length, length)
    found = np.stack((start, size, np.repeat(kind, pieces)), 1)
    return found[size > 1]                               # one token alone predicts nothing


def steps_of(sizes, tokens):
    """Steps of `tokens` tokens that pieces of these sizes fill; at least one."""
    return max(1, int(sizes.sum()) // tokens)


def order(sizes, tokens, seed, epoch):
    """All pieces once, shuffled by (seed, epoch) alone -> [their numbers], `tokens` tokens each.

    A piece belongs to the step in which its last token falls; pieces that fill no step at the end
    are left out.
    """
    shuffled = np.random.default_rng([seed, epoch]).permutation(len(sizes))
    last = np.cumsum(sizes[shuffled]) - 1                # the place of each piece's last token
    steps = np.arange(steps_of(sizes, tokens))
    ends = np.searchsorted(last // tokens, steps, side="right")
    return np.split(shuffled, ends)[:-1]


def parts_of(pieces, tokens):
    """Pieces (n, 3), the longest first, in parts of `tokens` tokens with padding, or one piece."""
    pieces = pieces[np.argsort(-pieces[:, 1], kind="stable")]
    parts = []
    while len(pieces):
        rows = max(1, tokens // pieces[0, 1])
        parts.append(pieces[:rows])
        pieces = pieces[rows:]
    return parts


def labels_in(tokens, pieces):
    """How many labels pieces (n, 3) have: the first token of a piece is none, nor is a prompt's."""
    total = 0
    for start, size, _ in pieces:
        total += int((tokens[start + 1:start + size] >= 0).sum())
    return total


def gather(tokens, pieces):
    """-> ids (B, T) of B pieces, padded on the right; the loss mask (B, T): i + 1 is a label."""
    found = torch.full((len(pieces), pieces[:, 1].max()), ~0)
    for row, (start, size, _) in zip(found, pieces):
        row[:size] = torch.from_numpy(tokens[start:start + size].astype("i8"))
    learn = torch.zeros(found.shape, dtype=torch.bool)
    learn[:, :-1] = found[:, 1:] >= 0
    return torch.where(found < 0, ~found, found), learn


def stratified(rows, count, seed=0):
    """`count` of rows (n, 3), evenly over the kinds in their last column, by the seed alone."""
    rng = np.random.default_rng(seed)
    shuffled = rows[rng.permutation(len(rows))]
    # The first of each kind, the second of each kind ...
    place = np.zeros(len(shuffled), int)
    for kind in np.unique(shuffled[:, 2]):
        mine = shuffled[:, 2] == kind
        place[mine] = np.arange(mine.sum())
    return shuffled[np.argsort(place, kind="stable")][:count]


# ---------------------------------------------------------------- command line
def run(argv):
    p = read.Parser(description="Encode files for train.py.")
    p.add_argument("files", nargs="+",
                   help="files or folders; .parquet and hub names with HF datasets")
    p.add_argument("--tokenizer", required=True, help="folder or hub name: the target's")
    p.add_argument("--template",
                   help="format of chats: plain, vicuna, or a Jinja file (default: its own)")
    p.add_argument("--out", required=True, help="folder to write")
    a = p.parse_args(argv)
    import transformers
    transformers.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(a.tokenizer)
    except Exception as why:
        reason = read.first_line(why)
        raise UserError(f"--tokenizer: {a.tokenizer} cannot be loaded ({reason})") from None
    folder = prepare(a.files, tokenizer, a.out, read.template_of(a.template, tokenizer))
    meta = meta_of(folder)
    counts = ", ".join(f"{name} {meta[name]['documents']} documents, {meta[name]['tokens']} tokens"
                       for name in SPLITS)
    print(f"{folder}: {counts}; kinds {' '.join(meta['kinds'])}")


def main(argv=None):
    """Exit status: 0; 2 after one sentence about a mistake."""
    try:
        run(argv)
    except (UserError, OSError) as why:
        print(f"prepare.py: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare.py: interrupted, nothing was replaced", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
