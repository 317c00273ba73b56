"""What a target writes, many texts at once: by transformers' generate(), for any family.

    for number, ids in write(target, prompts, lengths, batch=64):      # each text with its prompt
    texts = continuations(target, prompts, lengths)                    # all of them, in their order

Prompts of a batch are padded on the left, so that all answers begin in one column.  The attention
mask hides the padding, and generate() derives the positions from it.  Texts of about the same room
for an answer share a batch, since a batch lasts as long as its longest text.
"""
import torch
from transformers import LogitsProcessor, StoppingCriteria

class OwnTemperature(LogitsProcessor):
    """Each text has a temperature of its own; 0: only its best token is left."""

    def __init__(self, temperatures):
        self.temperatures = temperatures                               # (B, 1)

    def __call__(self, ids, scores):
        """scores (B, V) -> (B, V)"""
        best = scores.argmax(-1, keepdim=True)                         # (B, 1)
        greedy = torch.full_like(scores, -torch.inf).scatter(1, best, 0.0)
        sampled = scores / self.temperatures.clamp(min=1e-3)
        return torch.where(self.temperatures > 0, sampled, greedy)

class OwnEnd(StoppingCriteria):
    """Each text ends in a column of its own."""

    def __init__(self, ends):
        self.ends = ends                                               # (B,)

    def __call__(self, ids, scores, **more):
        """ids (B, T) -> (B,) bool: which texts have ended"""
        return ids.shape[1] >= self.ends

@torch.no_grad()
def write(target, prompts, lengths, batch, temperatures=None):
    """Let the target go on with prompts, lists of ids, until a text ends or has its length.

    Yields (number of the prompt, ids with the prompt), a batch after the other.  lengths: of the
    text of each prompt, more than the prompt has.  temperatures: a number for each prompt, 0 for
    greedy decoding; None: all are greedy.
    """
    temperatures = temperatures or [0.0] * len(prompts)
    room = [length - len(prompt) for prompt, length in zip(prompts, lengths)]
    order = sorted(range(len(prompts)), key=lambda i: (room[i], len(prompts[i])))
    stop = target.generation_config.eos_token_id
    stop = set(stop) if isinstance(stop, list) else {stop}
    device = target.device
    for start in range(0, len(order), batch):
        numbers = order[start:start + batch]
        longest = max(len(prompts[i]) for i in numbers)
        padding = [longest - len(prompts[i]) for i in numbers]
        ids = [[0] * size + prompts[i] for size, i in zip(padding, numbers)]
        mask = [[0] * size + [1] * len(prompts[i]) for size, i in zip(padding, numbers)]
        ends = torch.tensor([longest + room[i] for i in numbers], device=device)
        own = torch.tensor([[float(temperatures[i])] for i in numbers], device=device)
        how = {"do_sample": False}
        if own.any():
            how = {"do_sample": True, "top_k": 0, "logits_processor": [OwnTemperature(own)]}
        out = target.generate(
            torch.tensor(ids, device=device), attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=max(room[i] for i in numbers), stopping_criteria=[OwnEnd(ends)],
            pad_token_id=0, **how)
        for i, new in zip(numbers, out[:, longest:].tolist()):
            new = new[:room[i]]
            end = next((n for n, token in enumerate(new, 1) if token in stop), len(new))
            yield i, prompts[i] + new[:end]

def continuations(target, prompts, lengths, batch=32):
    """The target's greedy continuations of prompts, each to its length -> [ids], in their order."""
    return [ids for _, ids in sorted(write(target, prompts, lengths, batch))]
