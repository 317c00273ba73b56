"""What the frozen target computes of each piece of text, kept on the disk for later epochs.

    features = Features(forward, head, folder, tokens, key, vocab)
    batch = features(pieces, ids, learn=learn, count=count)      # as frozen_forward's

The target does not learn: of the same piece it computes the same in each epoch.  Drafters read
little of it, so that little is kept: of SmolLM2 beside GLIDE, EDD and EAGLE 3 KB a token, in
bfloat16, where a forward takes 0.27 GFLOP.  A piece begins at position 0 in whatever batch it
stands, so what belongs to its tokens lies at their places in the text, a row of numbers each.
Logits are not kept: the head gives them again.
"""
import json
import os
import shutil
from pathlib import Path

import numpy as np
import torch

from runtime.text import UserError, write_atomically
from training import state as jobs
from training.forward import LOGITS, batch_of

# ---------------------------------------------------------------- a batch as rows of numbers
def parts_of(batch):
    """What is kept of a batch -> [(what, layer, (B, T, heads, size))]"""
    found = []
    for layer, (k, v) in sorted(batch["kv"].items()):
        found.append(("keys", layer, k.transpose(1, 2)))
        found.append(("values", layer, v.transpose(1, 2)))
    for layer, states in sorted(batch["hidden"].items()):
        found.append(("hidden", layer, states[:, :, None]))
    return found


def row_of(batch):
    """-> rows (B, T, W) in bfloat16, and their layout [(what, layer, heads, size)]"""
    parts = parts_of(batch)
    rows = torch.cat([part.flatten(2).bfloat16() for _, _, part in parts], -1)
    layout = [[what, layer, *part.shape[2:]] for what, layer, part in parts]
    return rows, layout


def from_rows(rows, layout):
    """Rows (B, T, W) -> "kv" {l: (K, V)} and "hidden" {k: (B, T, D)}, as frozen_forward has them"""
    kv, hidden = {}, {}
    widths = [heads * size for _, _, heads, size in layout]
    for (what, layer, heads, size), part in zip(layout, rows.split(widths, -1)):
        if what == "hidden":
            hidden[layer] = part
            continue
        part = part.unflatten(-1, (heads, size)).transpose(1, 2)               # (B, H, T, d)
        kv[layer] = (*kv.get(layer, ()), part)
    return kv, hidden


# ---------------------------------------------------------------- on the disk
def first_of_machine():
    """Whether this process is the first, or the only one, of those on this machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def folder_in(work):
    """The folder in --work that is this machine's own: several may see --work."""
    machine = int(os.environ.get("GROUP_RANK", 0))       # torchrun's number of the node
    return Path(work) / (f"features-{machine}" if machine else "features")


class Features:
    """frozen_forward of pieces that may have been seen before.

    forward(ids) -> batch without logits.  head: the last of its hidden states -> logits; None where
    nobody reads any.  folder: of the files; tokens: how many the text has; key: of the target, the
    text and what is read.  Another key in the folder: it is begun anew.  vocab: ids there are.
    """

    def __init__(self, forward, head, folder, tokens, key, vocab):
        self.forward, self.head, self.vocab = forward, head, vocab
        self.folder, self.tokens = Path(folder), tokens
        self.about = {"key": key, "layout": None}
        if first_of_machine():
            self.begin()
        jobs.meet()                              # the files are shared by a machine's processes
        self.about |= self.read_about()
        # 1 at the first token of each piece that is there
        self.known = self.open("known", np.uint8, 1)
        self.rows = None

    def read_about(self):
        path = self.folder / "about.json"
        try:
            return json.loads(path.read_text()) if path.exists() else {}
        except ValueError:                       # damaged: as if it were another's
            return {}

    def write_about(self):
        text = json.dumps(self.about)
        write_atomically(self.folder / "about.json", lambda part: part.write_text(text))

    def begin(self):
        """Keep the folder's files, or begin anew where they are of another key."""
        if self.read_about().get("key") != self.about["key"]:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            self.write_about()

    def open(self, name, kind, width):
        """A file of `width` numbers a token, as an array (tokens, width)."""
        path = self.folder / f"{name}.bin"
        size = self.tokens * width * np.dtype(kind).itemsize
        try:
            with open(path, "ab") as file:
                file.truncate(size)
                if hasattr(os, "posix_fallocate"):
                    # All of it now: on a full disk a mapped file would end the process later.
                    os.posix_fallocate(file.fileno(), 0, size)
        except OSError as why:
            raise UserError(f"--features: {path} needs {size / 2 ** 30:.1f} GiB ({why.strerror}): "
                            "name another --work, or leave --features out") from None
        return np.memmap(path, kind, "r+", shape=(self.tokens, width))

    def add(self, pieces, ids):
        """Compute pieces (n, 3), ids (n, T), and keep what is read of them."""
        rows, layout = row_of(self.forward(ids))
        if self.about["layout"] is None:
            self.about["layout"] = layout
            if first_of_machine():
                self.write_about()
        numbers = rows.view(torch.uint16).cpu().numpy()
        self.open_rows()
        for (start, size, _), row in zip(pieces, numbers):
            self.rows[start:start + size] = row[:size]
        self.known[pieces[:, 0]] = 1

    def open_rows(self):
        width = sum(heads * size for _, _, heads, size in self.about["layout"])
        if self.rows is None:
            self.rows = self.open("rows", np.uint16, width)

    def __call__(self, pieces, ids, learn, count):
        """Pieces (B, 3), and what prepare.gather gives of them -> a batch of frozen_forward."""
        is_new = self.known[pieces[:, 0], 0] == 0
        if is_new.any():
            longest = pieces[is_new, 1].max()
            self.add(pieces[is_new], ids[torch.from_numpy(is_new), :longest])
        self.open_rows()
        found = torch.zeros(*ids.shape, self.rows.shape[1], dtype=torch.bfloat16)
        for row, (start, size, _) in zip(found, pieces):
            row[:size] = torch.from_numpy(self.rows[start:start + size]).view(torch.bfloat16)
        kv, hidden = from_rows(found.to(ids.device), self.about["layout"])
        logits = None
        if self.head is not None:
            with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
                logits = self.head(hidden[max(hidden)].float())
        words = logits.shape[-1] if logits is not None else self.vocab
        return batch_of(ids, learn, count, kv, hidden, logits, max(1, LOGITS // words))
