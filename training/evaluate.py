"""How well drafters draft: on held-out text, and along the target's own greedy text.

    texts = continuations(target, prompts, ends)                # once: the target is frozen
    found = walk(drafter, batch, text, start)                   # for each drafter and text
    metrics = Evaluation(forward, target, data, a)(models)      # both, evenly over kinds of text

Greedy decoding gives the target's own text whatever the drafter does, so the target need not run.
Each round begins where the last one's accepted tokens end, and drafts a chain up to the first token
that is not the text's: alpha, tau and T equal those of decoding.  All drafters go through this one
mechanism, MEDUSA by its heads, EAGLE on its own features.
"""
from collections import Counter, namedtuple

import numpy as np
import torch
import torch.nn.functional as F

import glide
from training import prepare
from runtime import drafters as runtime_drafters
from training.write import continuations, prompt_size
from training.words import spread_words
from verify import View

CHAIN = 5                                  # drafted tokens a round
PROMPTS = 96                               # held-out prompts
NEW = 64                                   # tokens that the target adds to each
CHECKED = 2 ** 14                          # held-out tokens whose loss is measured
LOGITS = 2 ** 25                           # so many logits are kept to fit a temperature to
FITTED = 2 ** 11                           # and the logits of so many tokens at least
GRID = [0.3 * 1.03 ** i for i in range(89)]               # temperatures, 0.3 ... 4
# Of one text, lists.  Of each tested token: its logits (V,), the target's choice, and whether that
# is the drafter's; of each round that ends within the text: accepted tokens
Walk = namedtuple("Walk", "logits choice accepted right")


# ---------------------------------------------------------------- a drafter along a text
def drafter_of(module):
    """What decodes with a draft model."""
    if hasattr(module, "drafter"):
        return module.drafter()
    if isinstance(module, glide.Glide):
        return glide.Drafter(module)
    _, drafter_class = runtime_drafters.KINDS[module.config.kind]
    return drafter_class(module)


@torch.no_grad()
def walk(drafter, batch, text, start):
    """Draft along a text -> Walk.

    text (T,): a prompt of `start` tokens and the target's continuation.  batch: the target's
    forward over the text, with "kv" {layer: (K, V)} and "hidden" {k: (1, T, D)}.
    """
    found = Walk([], [], [], [])
    drafter.reset()
    ids = text.tolist()
    last = len(ids) - 1                              # index of the last token that can be predicted
    committed, shown = start, 0                      # tokens; those that the drafter has been shown
    while committed < last:
        kv = {}
        for layer, (k, v) in batch["kv"].items():
            kv[layer] = k[:, :, :committed], v[:, :, :committed]
        hidden = {k: states[0, shown:committed] for k, states in batch["hidden"].items()}
        new = text[shown:committed]
        drafter.begin(View(new, committed, kv, hidden, ids[shown:committed], ids[committed]))
        shown = committed
        path = []                                    # its nodes: the root, and accepted tokens
        right = True
        while right and len(path) < CHAIN and committed + len(path) < last:
            at = committed + len(path)
            logits = drafter.expand(text[at:at + 1], [len(path) - 1])[0]             # (V,)
            # One device-to-host sync a token: the drafter's choice, and whether there is one.
            best, token = logits.max(-1)
            best, token = torch.stack((best.double(), token.double())).tolist()
            if best == float("-inf"):                # no prediction
                break
            right = int(token) == ids[at + 1]
            found.logits.append(logits)
            found.choice.append(ids[at + 1])
            found.right.append(right)
            path.append(len(path))
        drafter.keep(path)
        accepted = len(path) if right else len(path) - 1
        committed += accepted + 1
        if committed <= last:                        # the text did not end within the round
            found.accepted.append(accepted)
    return found


# ---------------------------------------------------------------- its temperature
class Sample:
    """Logits of FITTED tested tokens or more, evenly over all texts, to fit a temperature to.

    tested: how many there will be at least.  All are kept where the vocabulary is small.
    """

    def __init__(self, tested):
        self.tested, self.seen = tested, 0
        self.logits, self.choice = [], []

    def add(self, logits, choice):
        for vector, token in zip(logits, choice):
            share = max(FITTED, LOGITS // len(vector)) / max(1, self.tested)
            share = min(1.0, share)
            # As often as the share says: where its multiple passes a whole number.
            if int((self.seen + 1) * share) > int(self.seen * share):
                self.logits.append(vector)
                self.choice.append(token)
            self.seen += 1


def cross_entropy(logits, choice, temperature):
    """Of softmax(logits / temperature), logits (n, V), at the choices (n,): their sum."""
    chunk = max(1, LOGITS // logits.shape[1])
    total = 0.0
    for part, labels in zip(logits.split(chunk), choice.split(chunk)):
        total += F.cross_entropy(part / temperature, labels, reduction="sum").item()
    return total


def greedy_temperature(logits, choice):
    """Temperature scaling (Guo et al. 2017): T for which softmax(logits / T) best predicts choices.

    logits [(V,)], choice [ids] of the target there, without those that the drafter cannot predict.
    """
    if not logits:
        return 1.0
    logits = torch.stack(logits).float()                                             # (n, V)
    choice = torch.tensor(choice, device=logits.device)                              # (n,)
    known = logits.gather(1, choice[:, None])[:, 0] > float("-inf")
    logits, choice = logits[known], choice[known]
    if not len(choice):
        return 1.0
    # The cross entropy is convex in 1 / T: on the grid it falls to its minimum, then it rises.
    low, high = 0, len(GRID) - 1
    while low < high:
        middle = (low + high) // 2
        here = cross_entropy(logits, choice, GRID[middle])
        after = cross_entropy(logits, choice, GRID[middle + 1])
        if after < here:
            low = middle + 1
        else:
            high = middle
    return GRID[low]


# ---------------------------------------------------------------- all drafters of a run
def prompts_of(tokens, documents, length, shortest):
    """Prompts in documents (n, 3), prepare.open_split's -> start, size, kind: (prompts, 3).

    A chat gives one at most, a plain text one in each piece of `length` tokens that has `shortest`
    or more.
    """
    most = max(1, length - NEW)
    found = []
    for document in documents:
        start, size, kind = document
        pieces = document[None]
        if (tokens[start:start + size] >= 0).all():
            pieces = prepare.pieces_of(pieces, length)
        pieces = pieces[pieces[:, 1] >= shortest]
        for start, size, _ in pieces:
            given = prompt_size(tokens[start:start + size], most)
            if given:
                found.append((start, given, kind))
    return np.array(found, "i8").reshape(-1, 3)


def figures(total):
    """alpha: accepted / tested drafted tokens; tau: new tokens a round, with the bonus token."""
    return {
        "alpha": total["right"] / max(1, total["tested"]),
        "tau": 1 + total["accepted"] / max(1, total["rounds"]),
        "held_out_loss": total["loss"] / max(1, total["labels"]),
    }


class Evaluation:
    """Measures drafters on the same held-out pieces and texts each time, evenly over the kinds.

    forward(ids, learn, count) -> batch: the frozen target's.  data: train.py's Data.
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
        self.texts = []                                                         # (ids, start, kind)
        new = 0
        for part in prepare.parts_of(prepare.stratified(data.prompts, PROMPTS), a.micro):
            prompts = []
            for start, size, _ in part:
                ids = data.held_tokens[start:start + size]
                prompts.append(np.where(ids < 0, ~ids, ids).tolist())
            ends = [min(a.length, len(ids) + NEW) for ids in prompts]
            for text, (_, size, kind) in zip(continuations(target, prompts, ends), part):
                new += len(text) - int(size)
                text = torch.tensor(text, device=a.device)
                self.texts.append((text, int(size), kind))
        # Of CHAIN + 1 new tokens a drafter tests CHAIN at least; of a text's first none.
        self.tested = (new - len(self.texts)) * CHAIN // (CHAIN + 1)

    @torch.no_grad()
    def __call__(self, models):
        """{name: module} -> {name: {"alpha", "tau", "held_out_loss", "temperature", "by_kind"}}"""
        self.totals, self.samples = {}, {}
        for name in models:
            self.totals[name] = {kind: Counter() for kind in self.pieces}
            self.samples[name] = Sample(self.tested)
        for kind, pieces in self.pieces.items():
            for part in prepare.parts_of(pieces, self.a.micro):
                self.add_losses(models, kind, part)
        drafters = {name: drafter_of(module) for name, module in models.items()}
        with spread_words(models):
            for text, start, kind in self.texts:
                self.add_walks(drafters, kind, text, start)
        return {name: self.metrics(name) for name in models}

    def metrics(self, name):
        """All that was added up about a drafter."""
        totals = self.totals[name]
        # Not a sum of Counters: that leaves out what is not above 0, a loss that is no number, too.
        whole = Counter()
        for total in totals.values():
            for key, value in total.items():
                whole[key] += value
        found = figures(whole)
        sample = self.samples[name]
        found["temperature"] = greedy_temperature(sample.logits, sample.choice)
        found["by_kind"] = {}
        for kind, total in totals.items():
            found["by_kind"][self.data.kinds[kind]] = figures(total)
        return found

    def add_losses(self, models, kind, pieces):
        """Add each drafter's loss on pieces of one kind."""
        ids, learn = prepare.gather(self.data.held_tokens, pieces)
        labels = learn.sum().item()
        ids = ids.to(self.a.device)
        learn = learn.to(self.a.device)
        batch = self.forward(ids, learn=learn, count=1)
        batch["block"] = self.a.block
        for name, module in models.items():
            total = self.totals[name][kind]
            total["loss"] += module.loss(batch).item()
            total["labels"] += labels

    def add_walks(self, drafters, kind, text, start):
        """Add what each drafter drafts along one text."""
        batch = self.forward(text[None], logits=False)
        for name, drafter in drafters.items():
            found = walk(drafter, batch, text, start)
            self.samples[name].add(found.logits, found.choice)
            total = self.totals[name][kind]
            total["tested"] += len(found.right)
            total["right"] += sum(found.right)
            total["accepted"] += sum(found.accepted)
            total["rounds"] += len(found.accepted)
