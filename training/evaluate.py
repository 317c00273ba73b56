"""How well draft models draft: along what the target itself writes, without running it again.

    walks = Walks(target, forward, data, length, drafters)        # once: the target is frozen
    metrics = walks.measure()                           # each time that drafters are measured

The idea.  Greedy decoding gives the target's own text, whatever the drafter does.  So the target
continues some held-out prompts once.  Along each text the drafter then drafts as in decoding: a
round begins where the last round's accepted tokens and the target's own token end, and it drafts a
chain until a token is not the text's.  So alpha, tau and the fitted temperature equal those of
decoding.  Draft models are measured by what decodes with them, by the contract in verify.py.

    alpha           accepted / tested drafted tokens, of chains of five
    tau             new tokens a round, with the target's own
    temperature     T for which softmax(logits / T) predicts the target's choices best, fitted on
                    chains of up to ten tokens: trees are drafted as deep
"""
from bisect import bisect_left
from collections import Counter
from itertools import zip_longest

import numpy as np
import torch
import torch.nn.functional as F

from runtime.errors import UserError
from training.batched import continuations
from training.documents import plain_ids
from verify import View

CHAIN = 5                                  # drafted tokens a round, of alpha and tau
DEEP = 10                                  # drafted tokens a round, of the temperature
PROMPTS = 96                               # held-out prompts
NEW = 64                                   # tokens that the target adds to each
FITTED = 2 ** 11                           # tokens whose logits are kept, to fit a temperature
GRID = [0.3 * 1.03 ** i for i in range(89)]               # temperatures, 0.3 ... 4

# ---------------------------------------------------------------- a drafter along a text
def raw(logits, temperature):
    """For drafter.reset, in place of a rule's probs: expand then gives the drafter's logits."""
    return logits

@torch.no_grad()
def walk(drafter, kv, hidden, text, start):
    """Draft along a text -> Counter of rounds, and lists of logits and choices.

    text (T,): a prompt of `start` tokens and the target's continuation.  kv {layer: (K, V)} and
    hidden {index: (1, T, D)}: of the target's forward over the text.

    The Counter has the drafted tokens of chains of five, "tested" and "right" ones; of the rounds
    that end within the text, their number, "rounds", and their right ones, "accepted".  Logits (V,)
    are the drafter's for each tested token of chains of ten, and a choice is the target's token.
    """
    total, all_logits, choices = Counter(), [], []
    drafter.reset(raw)
    ids = text.tolist()
    last = len(ids) - 1                              # index of the last token that can be predicted
    committed, shown = start, 0                      # tokens; those that the drafter has been shown
    while committed < last:
        # What decoding would show it: all committed KV entries, what is new of everything else
        kv_now = {layer: (k[:, :, :committed], v[:, :, :committed]) for layer, (k, v) in kv.items()}
        new = slice(shown, committed)
        hidden_new = {index: states[0, new] for index, states in hidden.items()}
        drafter.begin(View(text[new], ids[new], committed, kv_now, hidden_new), ids[committed])
        shown = committed
        right = []                                   # of each drafted token: is it the text's?
        while all(right) and len(right) < DEEP and committed + len(right) < last:
            node = committed + len(right)
            logits = drafter.expand(text[node:node + 1], [len(right) - 1])[0]  # (V,)
            # One device-to-host sync for each token
            best, token = logits.max(-1)
            best, token = torch.stack((best.double(), token.double())).tolist()
            if best == float("-inf"):                # no prediction
                break
            choice = ids[node + 1]
            right.append(int(token) == choice)
            all_logits.append(logits)
            choices.append(choice)
        # The round itself is a chain of five.
        chain = right[:CHAIN]
        accepted = sum(chain)
        drafter.keep(list(range(min(accepted + 1, len(chain)))))
        committed += accepted + 1
        total.update(tested=len(chain), right=accepted)
        if committed <= last:                        # the text did not end within the round
            total.update(rounds=1, accepted=accepted)
    return total, all_logits, choices

# ---------------------------------------------------------------- its temperature
def fit_temperature(logits, choices):
    """Temperature scaling (Guo et al. 2017): the T of GRID that predicts the choices best.

    Lists of logits (V,) and of choices.  Choices that a drafter cannot predict, as their logit is
    -inf, are left out.
    """
    known = [i for i, choice in enumerate(choices) if logits[i][choice] > float("-inf")]
    if not known:
        return 1.0
    choice = torch.tensor([choices[i] for i in known], device=logits[0].device)        # (n,)
    logits = torch.stack([logits[i] for i in known]).float()                           # (n, V)

    def loss(i):
        return F.cross_entropy(logits / GRID[i], choice).item()

    # It is convex in 1 / T: along the grid it falls to its minimum, and from there on it rises.
    steps = range(len(GRID) - 1)
    return GRID[bisect_left(steps, True, key=lambda i: loss(i + 1) >= loss(i))]

# ---------------------------------------------------------------- all drafters of a run
def prompts_of(tokens, documents, length):
    """The prompts of held-out documents (n, 3) -> [(ids, kind)], the kinds in turns.

    Of a chat it is what comes before the first answer, of a text the first half of each piece of
    `length` tokens.  All leave room for the answer.
    """
    most = max(1, length - NEW)
    by_kind = {}
    for start, size, kind in documents.tolist():
        document = tokens[start:start + size]
        learned = document >= 0
        prompts = [document[:learned.argmax()]]
        if learned.all():                                # a text
            pieces = [document[begin:begin + length] for begin in range(0, size, length)]
            prompts = [piece[:min(len(piece) // 2, most)] for piece in pieces]
        for prompt in prompts:
            if 0 < len(prompt) <= most:
                by_kind.setdefault(kind, []).append(plain_ids(prompt))
    shuffled = []
    for kind, prompts in sorted(by_kind.items()):
        order = np.random.default_rng(0).permutation(len(prompts))
        shuffled.append([(prompts[i], kind) for i in order])
    in_turns = [prompt for turn in zip_longest(*shuffled) for prompt in turn if prompt]
    return in_turns[:PROMPTS]

def metrics_of(total):
    """Counts of walks, summed -> {"alpha", "tau"}"""
    return {
        "alpha": total["right"] / max(1, total["tested"]),
        "tau": 1 + total["accepted"] / max(1, total["rounds"]),
    }

class Walks:
    """Measures how well drafters draft: along the same texts each time, evenly over their kinds."""

    def __init__(self, target, forward, data, length, drafters):
        """forward: train.FrozenTarget's.  data: a documents.Prepared.  length: of a text, at most.

        drafters: {name: drafter by the contract in verify.py}.
        """
        self.forward, self.kinds, self.drafters = forward, data.kinds, drafters
        prompts = prompts_of(data.held_tokens, data.held_documents, length)
        if not prompts:
            raise UserError(f"--length {length}: no held-out chat's first answer begins early "
                            "enough to be measured: give more --length")
        lengths = [min(length, len(ids) + NEW) for ids, _ in prompts]
        texts = continuations(target, [ids for ids, _ in prompts], lengths)
        self.texts = []                              # (ids, size of the prompt, kind)
        for text, (prompt, kind) in zip(texts, prompts):
            text = torch.tensor(text, device=target.device)
            self.texts.append((text, len(prompt), kind))

    def measure(self):
        """Measure all drafters -> {name: {"alpha", "tau", "temperature", "by_kind"}}"""
        totals = {name: {} for name in self.drafters}        # {kind of text: Counter}
        logits = {name: [] for name in self.drafters}
        choices = {name: [] for name in self.drafters}
        for text, start, kind in self.texts:
            kv, hidden, _ = self.forward(text[None])
            for name, drafter in self.drafters.items():
                total, new_logits, new_choices = walk(drafter, kv, hidden, text, start)
                totals[name].setdefault(self.kinds[kind], Counter()).update(total)
                # The texts come in turns of their kinds, so the first ones are an even sample.
                most = FITTED - len(choices[name])
                logits[name] += new_logits[:most]
                choices[name] += new_choices[:most]
        metrics = {}
        for name, by_kind in totals.items():
            metrics[name] = metrics_of(sum(by_kind.values(), Counter()))
            metrics[name]["temperature"] = fit_temperature(logits[name], choices[name])
            metrics[name]["by_kind"] = {kind: metrics_of(total) for kind, total in by_kind.items()}
        return metrics
