"""A short list of words in training: draft models learn these alone, by the target's own head.

    head = head_of(target, words)                # the target's logits of the words, for frozen.py
    share_words(models, words)                   # the draft models' heads
    with spread_words(models): ...               # they decode: logits of the whole vocabulary

Of a small target with a large vocabulary the head is most of a drafter's work, in training even
more than in decoding: each label takes a row of V logits, of the target's and of each drafter's.
Over the k most frequent words (beyond/words.py) all of that is a k-th of V.  The loss is then the
divergence from the target's distribution among these words.  Such a drafter decodes with them.
"""
import contextlib

import edd
from beyond.words import ShortHead, shorten_target
from runtime.text import UserError
from runtime.anydraft import AnyDraftModel


def shorten_head(target, words):
    """Let target.head, of what a draft model knows of the target, give logits of words (k,) alone,
    (..., k), until it is told to spread them over the vocabulary.
    """
    shorten_target(target, words)
    target.head.spread = False


def head_of(model, words=None):
    """The target's head -> a function, x (..., D), normed -> logits (..., V), or (..., k) of words.

    ValueError where the target uses its parts in another way than Llama.
    """
    target = AnyDraftModel(edd.Config.for_target(model, -1), model).target
    if words is not None:
        shorten_head(target, words)
    return target.head


def share_words(models, words):
    """Let the draft models learn these words (k,) alone, by the target's head."""
    for name, module in models.items():
        has_own = any("head" in part for part, _ in module.named_modules())
        target = getattr(module, "target", None)
        if has_own or not hasattr(target, "raw_head"):
            raise UserError(f"--words: {name} has a head of its own, for all words: train "
                            "longspec, edd-shared, vdm-shared or eagle, or leave --words out")
        shorten_head(target, words)


@contextlib.contextmanager
def spread_words(models):
    """While this is open, models that share words give logits of the vocabulary, as in decoding."""
    heads = []
    for module in models.values():
        head = getattr(getattr(module, "target", None), "head", None)
        if isinstance(head, ShortHead):
            heads.append(head)
    for head in heads:
        head.spread = True
    try:
        yield
    finally:
        for head in heads:
            head.spread = False
