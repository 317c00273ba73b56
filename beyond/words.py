"""A short list of words to draft: a draft head over the most frequent tokens alone.

FR-Spec (arXiv 2502.14856); EAGLE-3 trains its drafter with such a list.

The idea.  Most of what is written are few of the tokens of a large vocabulary.  A draft head that
multiplies the rows of these tokens alone costs a fraction, and it misses the others rarely.  The
logits of all other tokens are -inf: they are never drafted.  The target verifies over the whole
vocabulary, so the output is exactly the same: a rare token costs a rejection, nothing else.

    shorten(drafter.model, words)       # words: the first k ids of a list by falling frequency
    python bench.py --drafter glide "glide(words=8192)"      # by the words.json of the checkpoint
    python training/smollm2.py words --data TEXT --target TARGET --out words.json

    symbol    shape       name here
    V_high    (k,)        words: ids of tokens
    W_LM      (V, D)      head.weight
    ~W_LM     (k, D)      rows_of(head, words).weight (their Eq. 2), taken once, at load

Difference from the paper: any head may be shortened, without training: GLIDE's, EDD's, MEDUSA's
heads, and the target's own, by which EAGLE drafts.

    python -m beyond.words        # the demo
"""
import copy
import json
from functools import partial
from pathlib import Path

import torch
from torch import nn

from verify import UserError


def frequent_words(path, k, vocabulary):
    """The first k ids of a words.json; UserError where it has no k words of this vocabulary.

    The file: {"vocabulary": fingerprint, "words": [ids, the most frequent first]}.
    """
    if type(k) is not int or k < 1:
        raise UserError(f"words={k!r}: give how many words may be drafted")
    if not Path(path).exists():
        raise UserError(f"words={k}: there is no {path}; write it by training/smollm2.py words")
    try:
        found = json.loads(Path(path).read_text())
        words, its = found["words"], found["vocabulary"]
        assert all(type(word) is int and word >= 0 for word in words)
    except (ValueError, LookupError, TypeError, AssertionError):
        raise UserError(f"words={k}: {path} holds no list of words: write it again") from None
    if its != vocabulary:
        raise UserError(f"words={k}: the words of {path} are of another vocabulary: write it again")
    if k > len(words):
        raise UserError(f"words={k}: {path} has {len(words)} words")
    return words[:k]

class ShortHead(nn.Module):
    """Logits of some words, x (..., D) -> (..., V): -inf for all others.

    head: a function, x (..., D) -> the words' logits (..., k).  words (k,): ids.
    """
    def __init__(self, head, words, vocab):
        super().__init__()
        self.head, self.vocab = head, vocab
        self.spread = True                       # False: (..., k), of the words alone, in training
        self.register_buffer("words", words, persistent=False)

    def forward(self, x):
        """x (..., D) -> logits (..., V)"""
        of_words = self.head(x)                                                # (..., k)
        if not self.spread:
            return of_words
        shape = (*of_words.shape[:-1], self.vocab)
        logits = of_words.new_full(shape, float("-inf"))
        return logits.index_copy(-1, self.words.to(of_words.device), of_words) # (..., V)

def rows_of(head, words):
    """A linear head with the rows of the words alone.  UserError where it has no such rows."""
    floating = isinstance(head, nn.Linear) and head.weight.is_floating_point()
    if not floating or head.weight.is_meta:
        raise UserError("words: the draft head is quantised, or not in memory: draft all words")
    if words.max() >= len(head.weight):
        raise UserError(f"words: the draft head has {len(head.weight)} words, and no {words.max()}")
    # A copy of the head, in which other parameters stand for its own.
    memo = {}
    for parameter in head.parameters():
        rows = parameter.detach()[words.to(parameter.device)]
        memo[id(parameter)] = nn.Parameter(rows, requires_grad=False)
    short = copy.deepcopy(head, memo)
    short.out_features = len(words)
    return short

def shorten(model, words):
    """Let a draft model draft these words alone.  words: list of ids, or (k,)."""
    words = torch.as_tensor(words)
    heads = getattr(model, "heads", None)
    if heads is not None:
        # MEDUSA: one for each depth
        for i, head in enumerate(heads):
            heads[i] = short_head(head, words)
    elif isinstance(getattr(model, "head", None), nn.Module):
        # GLIDE and EDD
        model.head = short_head(model.head, words)
    else:
        # EAGLE, LongSpec: the target's
        model.short_rows = shorten_target(model.target, words)

def short_head(head, words):
    """A linear head -> its ShortHead, on the head's device."""
    return ShortHead(rows_of(head, words), words.to(head.weight.device), head.out_features)

def shorten_target(target, words):
    """Shorten target.head, a drafter's view of the target's own head, which stays as it is.

    Returns the rows as a module, None where the head is none.
    """
    rows = None
    if hasattr(target, "raw_head"):
        # target.head scales and caps what raw_head gives.
        like = target.lm_head.weight
        rows = rows_of(target.lm_head, words)
        target.raw_head = copy.copy(target.raw_head)
        target.raw_head.module, target.raw_head.like = rows, rows.weight
        head = target.head
    else:
        like = target.head.keywords["weight"]
        head = partial(target.head.func, weight=like[words.to(like.device)])
    target.head = ShortHead(head, words.to(like.device), len(like))
    return rows

def demo():
    """A head of 1 000 tokens, shortened to 10: their logits are as before, all others are -inf."""
    torch.manual_seed(0)
    model = nn.Module()
    model.head = nn.Linear(16, 1000)
    x = torch.randn(3, 16)
    before = model.head(x)                                                     # (3, V)
    words = torch.randperm(1000)[:10]
    shorten(model, words)
    after = model.head(x)                                                      # (3, V)
    torch.testing.assert_close(after[:, words], before[:, words])
    assert after.isinf().sum() == 3 * 990
    weights = model.head.head.weight.numel()
    print(f"{len(words)} of {after.shape[1]} words are drafted, by {weights} weights")

if __name__ == "__main__":
    demo()
