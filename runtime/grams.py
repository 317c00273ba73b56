"""Max-Gram's file: its bigram, and how often its predictions are right, alone and beside a drafter.

    bigram, confidence = read_bigram("checkpoints/bigram.json", vocab)
    gram = maxgram.MaxGram(bigram, confidence)
    agreement = read_agreement("checkpoints/bigram.json", "edd")
    drafter = graft.Mixture(edd, gram, agreement)

`checkpoints/make.py bigram` counts the bigram and measures the confidence.  `make.py agreement`
fits for each drafter the three numbers of graft.Mixture.weight: to what the target writes by itself
after held-out prompts.
"""
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F

import maxgram
from beyond import graft
from runtime.text import first_line
from verify import Tree, UserError, generate

BINS = 10                 # of the expected calibration error

# ---------------------------------------------------------------- the file
def read_bigram(path, vocab, fingerprint=None):
    """Read a file for a vocabulary of `vocab` tokens -> (bigram, confidence).

    bigram: list (vocab,); confidence: list or None.  The file holds either {"bigram": [...],
    "confidence": [...] or null, "fingerprint": ...}, or a flat JSON array indexed by token id, as
    published with the paper, which may be shorter than a padded vocabulary.
    fingerprint: of the current tokenizer, any JSON value.  A file with another one is refused, a
    file without one is not.
    Raises UserError for a file that is missing, damaged, or of another vocabulary or tokenizer.
    """
    again = "make one with maxgram.build_bigram, as checkpoints/make.py does, or name another file"

    def damaged(what):
        return UserError(f"the bigram file {path} is damaged, {what}: {again}")

    def foreign(what):
        return UserError(f"{path} is a bigram of {what}: {again}")

    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"the bigram file {path} does not exist: {again}") from None
    except (OSError, ValueError, RecursionError) as why:
        reason = f"{type(why).__name__}: {first_line(why)}"
        raise UserError(f"the bigram file {path} cannot be read ({reason}): {again}") from None
    if not isinstance(read, dict):
        read = {"bigram": read}
    bigram, confidence, theirs = read.get("bigram"), read.get("confidence"), read.get("fingerprint")
    # Is it a bigram?
    if not isinstance(bigram, list) or not all(type(x) is int for x in bigram):
        raise damaged("it holds no array of token ids")
    # Is it one of this tokenizer?
    if fingerprint is not None and theirs is not None and theirs != fingerprint:
        raise foreign(f"another tokenizer (fingerprint {str(theirs)[:40]}, "
                      f"not {str(fingerprint)[:40]})")
    which = f"where the vocabulary has {vocab} tokens"
    if len(bigram) > vocab:
        raise foreign(f"another vocabulary ({len(bigram)} entries, {which})")
    wrong = [x for x in bigram if not 0 <= x < vocab]
    if wrong:
        raise foreign(f"another vocabulary (token id {wrong[0]}, {which})")
    # Is the confidence one?
    if confidence is not None:
        numbers = isinstance(confidence, list) and all(type(x) in (int, float) for x in confidence)
        if not numbers or not confidence or not all(0 <= x <= 1 for x in confidence):
            raise damaged("its confidence is no array of numbers from 0 to 1")
    # Ids beyond the file's end are unknown.
    return bigram + [0] * (vocab - len(bigram)), confidence

def read_agreement(path, name):
    """(a, b, c) of graft.Mixture.weight for the drafter `name`; None where the file has none."""
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
        found = read["agreement"][name]["weights"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    numbers = isinstance(found, list) and all(type(x) in (int, float) for x in found)
    if not numbers or len(found) != 3 or not all(map(math.isfinite, found)):
        raise UserError(f"the bigram file {path} is damaged, its agreement with {name} is not "
                        "three numbers: fit it again with checkpoints/make.py agreement")
    return tuple(found)

# ---------------------------------------------------------------- how often it is right
def measure_confidence(texts, bigram=None, lengths=maxgram.LENGTHS):
    """How often the first proposed token is right, by length of match -> list (lengths + 1,).

    texts: iterable of lists of ids that the bigram was not counted on, replayed token by token,
    each on its own.  A length that was never seen gets the value of the nearest one that was.
    None: nothing was proposed.
    """
    seen = [0] * (lengths + 1)
    right = [0] * (lengths + 1)
    for ids in texts:
        max_gram = maxgram.MaxGram(bigram)
        for token, after in zip(ids, ids[1:]):
            # What is proposed where the text so far ends, and what comes after it
            max_gram.commit([token])
            proposed, matched = max_gram.propose((), 1)
            if proposed:
                length = min(matched[0], lengths)
                seen[length] += 1
                right[length] += proposed[0] == after
    known = [i for i in range(lengths + 1) if seen[i]]
    if not known:
        return None
    # A match grows token by token, so there is no gap between the lengths seen.
    table = []
    for i in range(lengths + 1):
        nearest = min(max(i, known[0]), known[-1])
        table.append(right[nearest] / seen[nearest])
    return table

class Judge(graft.Mixture):
    """Leaves the drafter's logits as they are.

    judged: of each node given to expand (predicted token, length of match, the drafter's p of it),
    or None where Max-Gram predicts nothing.
    """

    def adjust(self, probs):
        rows, predicted, lengths = self.predictions
        self.judged = [None] * len(probs)
        p_draft = probs[rows]                                                    # (k, V)
        p = p_draft.gather(1, predicted[:, None])[:, 0]                          # (k,)
        # A row of zeros is no prediction: there is nothing to agree with.
        p = p.masked_fill(~(p_draft > 0).any(1), math.nan)
        judged = zip(predicted.tolist(), lengths.tolist(), p.tolist())
        for row, one in zip(rows.tolist(), judged):
            self.judged[row] = one
        return probs

def judged_words(target, drafter, gram, prompts, new, stopping_criteria=()):
    """Max-Gram's predictions along the target's own greedy text -> [(length, p, right)].

    Each round the target verifies the suggested chain.  Its tokens are judged up to the first that
    is wrong.  p: the drafter's, which read root and chain at once.  right: bool.
    prompts: lists of ids.  Where the drafter has no prediction there is nothing to agree with:
    Max-Gram's is left out.
    """
    judge, rounds, found = Judge(drafter, gram), [], []

    def review(expand, root):
        most = min(maxgram.N, expand.remaining)
        chain, _ = judge.suggest(expand.root, most=most, match=graft.LEAST)
        tokens = root.new_tensor([expand.root, *chain])
        parents = list(range(-1, len(chain)))
        expand(tokens, parents)
        rounds.append(judge.judged)
        return Tree(tokens, root.new_tensor(parents))

    for ids in prompts:
        rounds.clear()
        out = generate(target, judge, review, ids, new, stopping_criteria=stopping_criteria)
        for one, judged in zip(out.rounds, rounds):
            # The round's new tokens end with the target's own: after the first wrong prediction.
            for prediction, token in zip(judged, one.new):
                if prediction is not None:
                    predicted, length, p = prediction
                    found.append((length, p, predicted == token))
    # A row of -inf has no p.
    return [judged for judged in found if not math.isnan(judged[1])]

def features(lengths, p):
    """1, length, logit p of graft.Mixture.weight -> (n, 3).  lengths, p: (n,)"""
    lengths = lengths.clamp(max=maxgram.LENGTHS)
    logit = torch.logit(p.clamp(1e-6, 1 - 1e-6))
    return torch.stack((torch.ones_like(p), lengths, logit), 1)

def logistic(x, y, steps=30, ridge=1e-3):
    """Newton's method for sigmoid(x weights) = P(y).  x (n, k), y (n,) 0 or 1 -> weights (k,)"""
    weights = x.new_zeros(x.shape[1])
    for _ in range(steps):
        p = torch.sigmoid(x @ weights)
        spread = p * (1 - p)
        slope = x.T @ (y - p) - ridge * weights
        curve = x.T @ (spread[:, None] * x)
        curve.diagonal().add_(ridge)
        weights = weights + torch.linalg.solve(curve, slope)
    return weights

def scores(p, y):
    """How good probabilities p (n,) of outcomes y (n,) are -> {"log_loss", "ece"}"""
    loss = F.binary_cross_entropy(p.clamp(1e-4, 1 - 1e-4), y)
    place = (p * BINS).long().clamp(max=BINS - 1)
    gap = p.new_zeros(BINS).index_add(0, place, p - y)
    # ECE = sum_b |B_b| / n |confidence(B_b) - acceptance(B_b)|
    ece = gap.abs().sum() / len(p)
    return {"log_loss": round(loss.item(), 4), "ece": round(ece.item(), 4)}

def fit_agreement(judged, confidence_of):
    """judged_words(...) -> {"weights": [a, b, c], "words": n, "log_loss", "ece", "plain": {...}}.

    Log loss and ECE are of the predicted tokens in the mixture, with weights that were fitted to
    the other half.  plain: without agreement, by Max-Gram's own confidence_of(length).
    """
    lengths, p, y = torch.tensor(judged, dtype=torch.float64).T                       # (n,) each
    x = features(lengths, p)
    # Halves of a hundred words in turn: neighbours stand in one text.
    half = torch.arange(len(y)) // 100 % 2 == 0
    found = torch.zeros_like(p)
    for held in (half, ~half):
        weights = logistic(x[~held], y[~held])
        found[held] = torch.sigmoid(x[held] @ weights)
    w = p.new_tensor([confidence_of(int(length)) for length in lengths])
    plain = (1 - w) * p + w
    weights = [round(weight, 4) for weight in logistic(x, y).tolist()]
    mixed = torch.maximum(found, p)
    return {
        "weights": weights,
        "words": len(y),
        **scores(mixed, y),
        "plain": scores(plain, y)}
