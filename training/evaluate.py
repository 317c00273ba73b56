"""How well draft models draft: they decode a few held-out prompts with verify.generate.

    metrics = measure(target, drafters, prompts)

Of each drafter, on chains of five, in greedy decoding:

    alpha           accepted / tested drafted tokens
    tau             new tokens a round, with the target's own
    temperature     its calibration: the T for which softmax(logits / T) predicts the target's
                    choices best, fitted on the tested tokens (Guo et al. 2017)
"""
from bisect import bisect_left
from collections import Counter
from itertools import zip_longest

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import cape
import verify
from cascade import Cascade
from runtime.program import UserError
from training.documents import plain_ids

CHAIN = 5                                  # drafted tokens a round
PROMPTS = 32                               # held-out prompts
NEW = 64                                   # tokens that are decoded after each
GRID = [0.3 * 1.03 ** i for i in range(89)]               # temperatures, 0.3 ... 4

def prompts_of(tokens, documents, length):
    """The prompts of held-out documents (n, 3) -> [ids], the kinds of text alternating.

    Of a chat it is what comes before the first answer, of a text its first half.  All of them, and
    NEW tokens more, fit into `length`.
    """
    limit = max(1, length - NEW)
    by_kind = {}
    for start, size, kind in np.random.default_rng(0).permutation(documents).tolist():
        document = tokens[start:start + size]
        learned = document >= 0
        end = min(size // 2, limit) if learned.all() else int(learned.argmax())
        if 0 < end <= limit:
            by_kind.setdefault(kind, []).append((start, start + end))
    if not by_kind:
        raise UserError(f"--length {length}: no held-out prompt leaves room for {NEW} tokens after "
                        "it: give more --length, or longer texts")
    alternating = zip_longest(*by_kind.values())
    chosen = [span for turn in alternating for span in turn if span][:PROMPTS]
    return [plain_ids(tokens[start:end]) for start, end in chosen]

def decode(target, drafter, ids, eos):
    """Decode after a prompt -> Counter of what was drafted, [(p_draft (V,), target's choice)]"""
    rows = []                              # the drafter's probabilities after each node of a chain

    def build(expand, root):
        if isinstance(drafter, Cascade):       # a language model writes its chain itself
            return drafter.chain(expand, root)
        chosen, p, probs = cape.draft(expand, root, CHAIN, cape.best)
        rows[:] = probs
        return cape.chain_tree(root, chosen, cape.valid_length(p).item())

    total, predictions = Counter(), []
    for one in verify.rounds(target, drafter, build, ids, NEW, eos=eos):
        drafted = len(one.tokens) - 1
        if drafted > 0:
            right = min(len(one.path) - 1, len(one.new))
            # Every drafted token up to the first wrong one was tested.
            total.update(tested=min(right + 1, drafted, len(one.new)), right=right)
            total.update(rounds=1, new=len(one.new))
            predictions += zip(rows, one.new)
    return total, predictions

def fit_temperature(predictions):
    """The T of GRID for which softmax(log p_draft / T) predicts the choices best.

    predictions: [(p_draft (V,), choice)].  Choices that a drafter cannot predict, as their
    probability is 0, are left out.
    """
    known = [(p, choice) for p, choice in predictions if p[choice] > 0]
    if not known:
        return 1.0
    logits = torch.stack([p for p, _ in known]).float().log()                  # (n, V)
    choices = torch.tensor([choice for _, choice in known], device=logits.device)

    def rises(i):
        here, after = (F.cross_entropy(logits / T, choices) for T in GRID[i:i + 2])
        return bool(after >= here)

    # The loss is convex in 1 / T: along the grid it falls to its minimum, and then it rises.
    return GRID[bisect_left(range(len(GRID) - 1), True, key=rises)]

def measure(target, drafters, prompts):
    """A verify.Target, {name: drafter}, prompts -> {name: {"alpha", "tau", "temperature"}}"""
    metrics, eos = {}, target.model.generation_config.eos_token_id
    for name, drafter in drafters.items():
        total, predictions = Counter(), []
        drafter.temperature = 1.0
        for ids in tqdm(prompts, f"decode with {name}", leave=False, disable=None):
            counts, found = decode(target, drafter, ids, eos)
            total.update(counts)
            predictions += found
        metrics[name] = {"alpha": total["right"] / max(1, total["tested"]),
                         "tau": total["new"] / max(1, total["rounds"]),
                         "temperature": fit_temperature(predictions)}
    return metrics
