"""A drafter proves itself at load: is it this target's at all?

A drafter of another target, with another chat template or vocabulary, loads, runs and is lossless;
but it is never right.  So its first choice is compared with the target's own greedy text at load.

    sentence = proves_itself(target, drafter, prompts)         # None: it is better than chance
"""
import torch

from verify import generate, root_only

NEW = 32                 # tokens decoded after each prompt

def proves_itself(target, drafter, prompts, new=NEW, stopping_criteria=()):
    """A sentence where a drafter's first choice is right less than twice as often as by chance.

    Else None.  prompts: lists of ids, two will do.  Chance: how often its choices would be right at
    other places of the texts.  Rows of zeros, which predict nothing, are not counted.
    """
    predicted, tokens = [], []

    def look(expand, root):
        predicted.append(expand(root, [-1])[0].cpu())                              # (V,)
        return root_only(expand, root)

    for ids in prompts:
        # Plain decoding; after each root the drafter is asked for its next token.
        out = generate(target, drafter, look, ids, new, stopping_criteria=stopping_criteria)
        tokens += out.tokens[1:]
    pairs = [(row.argmax().item(), token) for row, token in zip(predicted, tokens) if row.any()]
    count = len(pairs)
    if count == 0:
        return None
    right = sum(choice == token for choice, token in pairs)
    choices, truth = torch.tensor(pairs).T                                         # (count,) each
    same = choices[:, None] == truth                                               # (count, count)
    chance = same.double().mean().item()
    # In a text that repeats one token all is right by chance; and one lucky hit is no proof.
    if right > count / 2 or right > max(1, 2 * chance * count):
        return None
    return (f"the drafter's first choice was right {right} times of {count} on the target's own "
            f"text, where chance gives {chance:.0%}: was it made for another target (a base model, "
            "another fine-tune) or with another chat template or vocabulary?")
