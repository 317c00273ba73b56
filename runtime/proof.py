"""A drafter proves itself at load: is it this target's at all?

A drafter of another target, with another chat template or vocabulary, loads, runs and is lossless; it is only
never right.  So ask for its first choice along the target's own greedy text, before anybody measures it.

    sentence = proves_itself(target, drafter, prompts)         # None: it is better than chance
"""
import torch

from verify import generate, root_only

NEW = 32                 # tokens of text behind each prompt


def proves_itself(target, drafter, prompts, new=NEW, stopping_criteria=()):
    """One sentence where the drafter's first choice is right less than twice as often as chance, else None.

    prompts: lists of ids, two will do.  Chance: how often its choices would be right if they were made at
    other places of the texts.  Rows of zeros, where a drafter has nothing to say, are not counted.
    """
    rows, tokens = [], []

    def look(expand, root):
        rows.append(expand(root, [-1])[0].cpu())                                       # (V,)
        return root_only(expand, root)

    for ids in prompts:
        # Plain decoding, while the drafter says what it would draft after each root
        out = generate(target, drafter, look, ids, new, stopping_criteria=stopping_criteria)
        tokens += out.tokens[1:]
    said = [i for i, row in enumerate(rows) if row.any()]
    choices = [rows[i].argmax().item() for i in said]
    truth = [tokens[i] for i in said]
    count = len(truth)
    if count == 0:
        return None
    right = sum(choice == token for choice, token in zip(choices, truth))
    pairs = torch.tensor(choices)[:, None] == torch.tensor(truth)                      # (count, count)
    chance = pairs.double().mean().item()
    # Of a text that repeats one token all is right by chance; and one lucky hit is no proof.
    if right > count / 2 or right > max(1, 2 * chance * count):
        return None
    return (f"the drafter's first choice was right {right} times of {count} on the target's own text, where "
            f"chance gives {chance:.0%}: was it made for another target (a base model, another fine-tune) or "
            "with another chat template or vocabulary?")
