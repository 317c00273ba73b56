"""How well drafters draft: on held-out text, and along the target's own greedy text, as decoding takes it.

    texts = continuations(target, prompts, ends)                           # once: the target is frozen
    logits, choice, rounds = walk(drafter, batch, text, start)             # for each drafter and text
    metrics = Evaluation(forward, target, data, a)(models)                 # both, evenly over kinds of text

Greedy decoding gives the target's own text whatever the drafter does, so the target need not run: each round
begins where the last one's accepted tokens end, and drafts a chain up to the first token that is not the
text's.  All drafters go through this one mechanism, MEDUSA by its heads, EAGLE on its own features.
"""
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F

import glide
from data import prepare
from runtime import parts
from training.continuations import continuations, prompt_size
from verify import View

CHAIN = 5                                         # drafted tokens a round
PROMPTS, NEW = 96, 64                             # held-out prompts, and tokens that the target adds to each
CHECKED = 2 ** 14                                 # held-out tokens whose loss is measured
LOGITS = 2 ** 25                                  # numbers: so many logits a temperature is fitted to


# ---------------------------------------------------------------- a drafter along a text
def drafter_of(module):
    """What decodes with a draft model."""
    if hasattr(module, "drafter"):
        return module.drafter()
    if isinstance(module, glide.Glide):
        return glide.Drafter(module)
    _, drafter_class = parts.KINDS[module.config.kind]
    return drafter_class(module)


@torch.no_grad()
def walk(drafter, batch, text, start):
    """Draft along a text.  text (T,): a prompt of `start` tokens and what the target goes on with.

    batch: the target's forward over the text, with "kv" {layer: (K, V)} and "hidden" {k: (1, T, D)}.
    -> logits [(V,)] of all tested rows, choice [()] of the target there, rounds [accepted tokens].
    """
    logits, choice, rounds = [], [], []
    drafter.reset()
    t, shown = start, 0                              # committed tokens; those that the drafter has seen
    last = len(text) - 1                             # the last token that can be predicted
    while t < last:
        kv = {layer: (k[:, :, :t], v[:, :, :t]) for layer, (k, v) in batch["kv"].items()}
        hidden = {k: rows[0, shown:t] for k, rows in batch["hidden"].items()}
        drafter.begin(View(text[shown:t], t, kv, hidden))
        shown = t
        path = []                                    # its nodes: the root, and accepted tokens
        right = True
        while right and len(path) < CHAIN and t + len(path) < last:
            at = t + len(path)
            row = drafter.expand(text[at:at + 1], [len(path) - 1])[0]                # (V,)
            if row.max() == float("-inf"):           # it cannot go on
                break
            right = bool(row.argmax() == text[at + 1])
            logits.append(row)
            choice.append(text[at + 1])
            path.append(len(path))
        drafter.keep(path)
        accepted = len(path) if right else len(path) - 1
        t += accepted + 1
        if t <= last:                                # the text did not end within the round
            rounds.append(accepted)
    return logits, choice, rounds


def greedy_temperature(logits, choice):
    """Temperature scaling (Guo et al. 2017) -> T for which softmax(logits / T) best predicts greedy choices.

    logits [n rows (V,)], choice [n tokens ()].
    """
    if not logits:
        return 1.0
    every = -(-len(logits) * len(logits[0]) // LOGITS)
    rows = torch.stack(logits[::every]).float()
    choice = torch.stack(choice[::every])
    grid = [0.3 * 1.03 ** i for i in range(89)]      # 0.3 ... 4
    return min(grid, key=lambda t: F.cross_entropy(rows / t, choice).item())


# ---------------------------------------------------------------- all drafters of a run
def prompts_of(tokens, documents, length, shortest):
    """Prompts in documents, (n, 3) as prepare.open_split gives them -> start, size, kind: (prompts, 3).

    A chat gives one at most, a plain text one in each piece of `length` tokens that has `shortest` or more.
    """
    most = max(1, length - NEW)
    found = []
    for document in documents:
        start, size, kind = document
        parts = document[None]
        if (tokens[start:start + size] >= 0).all():
            parts = prepare.pieces_of(parts, length)
            parts = parts[parts[:, 1] >= shortest]
        for start, size, _ in parts:
            asked = prompt_size(tokens[start:start + size], most)
            if asked:
                found.append((start, asked, kind))
    return np.array(found, "i8").reshape(-1, 3)


def figures(total):
    """alpha: accepted / tested drafted tokens; tau: new tokens a round, the target's own one included."""
    return {
        "alpha": total["right"] / max(1, total["tested"]),
        "tau": 1 + total["accepted"] / max(1, total["rounds"]),
        "held_out_loss": total["loss"] / max(1, total["learned"]),
    }


class Evaluation:
    """Measures drafters on the same held-out pieces and texts each time, evenly over the kinds of text.

    forward(ids, learn, count) -> batch: train.py's forward of the frozen target.
    """

    def __init__(self, forward, target, data, a):
        self.forward = forward
        self.data = data
        self.a = a
        # Pieces for the loss, as many tokens of each kind
        most = max(a.length, CHECKED // len(data.kinds))
        self.pieces = {}
        for kind in np.unique(data.held[:, 2]):
            pieces = data.held[data.held[:, 2] == kind]
            chosen = prepare.order(pieces[:, 1], most, 0, 0)[0]
            self.pieces[kind] = pieces[chosen]
        # Texts for the walk: the target's own, after held-out prompts
        chosen = prepare.stratified(data.prompts, PROMPTS)
        prompts = []
        for start, size, _ in chosen:
            ids = data.held_tokens[start:start + size]
            prompts.append(np.where(ids < 0, ~ids, ids).tolist())
        ends = [min(a.length, len(ids) + NEW) for ids in prompts]
        texts = continuations(target, prompts, ends)
        self.texts = []                                                              # (ids, start, kind)
        for text, (_, size, kind) in zip(texts, chosen):
            text = torch.tensor(text, device=a.device)
            self.texts.append((text, int(size), kind))

    @torch.no_grad()
    def __call__(self, models):
        """{name: module} -> {name: {"alpha", "tau", "held_out_loss", "temperature", "by_kind"}}"""
        self.totals, self.rows = {}, {}
        for name in models:
            self.totals[name] = {kind: Counter() for kind in self.pieces}
            self.rows[name] = ([], [])                   # logits, choices
        for kind, pieces in self.pieces.items():
            for part in prepare.parts_of(pieces, self.a.micro):
                self.add_losses(models, kind, part)
        drafters = {name: drafter_of(module) for name, module in models.items()}
        for text, start, kind in self.texts:
            self.add_walks(drafters, kind, text, start)
        return {name: self.metrics(name) for name in models}

    def metrics(self, name):
        """All that was added up about a drafter."""
        totals = self.totals[name]
        # Not a sum of Counters, which leaves out what is not above 0: a loss that is no number, too.
        whole = Counter()
        for total in totals.values():
            for key, value in total.items():
                whole[key] += value
        found = figures(whole)
        found["temperature"] = greedy_temperature(*self.rows[name])
        found["by_kind"] = {}
        for kind, total in totals.items():
            found["by_kind"][self.data.kinds[kind]] = figures(total)
        return found

    def add_losses(self, models, kind, pieces):
        """Add each drafter's loss on pieces of one kind."""
        ids, learn = prepare.gather(self.data.held_tokens, pieces)
        ids = ids.to(self.a.device)
        learn = learn.to(self.a.device)
        batch = self.forward(ids, learn=learn, count=1)
        batch["block"] = self.a.block
        learned = learn.sum().item()
        for name, module in models.items():
            total = self.totals[name][kind]
            total["loss"] += module.loss(batch).item()
            total["learned"] += learned

    def add_walks(self, drafters, kind, text, start):
        """Add what each drafter drafts along one text."""
        batch = self.forward(text[None], logits=False)
        for name, drafter in drafters.items():
            logits, choice, rounds = walk(drafter, batch, text, start)
            self.rows[name][0].extend(logits)
            self.rows[name][1].extend(choice)
            total = self.totals[name][kind]
            total["tested"] += len(logits)
            for row, token in zip(logits, choice):
                total["right"] += bool(row.argmax() == token)
            total["accepted"] += sum(rounds)
            total["rounds"] += len(rounds)
