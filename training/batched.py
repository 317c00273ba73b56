"""What a target writes, many texts at once: by transformers' generate(), for any family.

    for number, ids in write(target, prompts, lengths, batch=64):      # each text with its prompt
    texts = continuations(target, prompts, lengths)                    # all of them, in their order
"""
import torch

@torch.no_grad()
def write(target, prompts, lengths, batch, temperature=0.0):
    """Let the target continue prompts, lists of ids, until a text ends or has its length.

    Yields (number of the prompt, ids with the prompt), a batch after the other.  lengths: of the
    text of each prompt, more than the prompt has.  temperature: of sampling; 0: greedy.
    """
    # A batch lasts as long as its longest text: texts of similar sizes share one.
    new = [length - len(prompt) for prompt, length in zip(prompts, lengths)]
    order = sorted(range(len(prompts)), key=lambda i: (new[i], len(prompts[i])))
    stop = target.generation_config.eos_token_id
    stop = set(stop) if isinstance(stop, list) else {stop}
    how = {"do_sample": False}
    if temperature:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0}
    for start in range(0, len(order), batch):
        numbers = order[start:start + batch]
        # Padded on the left, so that all answers begin in one column.  The mask hides the padding,
        # and generate() derives the positions from it.
        longest = max(len(prompts[i]) for i in numbers)
        padding = [longest - len(prompts[i]) for i in numbers]
        ids = [[0] * size + prompts[i] for size, i in zip(padding, numbers)]
        mask = [[0] * size + [1] * len(prompts[i]) for size, i in zip(padding, numbers)]
        out = target.generate(
            torch.tensor(ids, device=target.device),
            attention_mask=torch.tensor(mask, device=target.device),
            max_new_tokens=new[numbers[-1]], pad_token_id=0, **how)
        for i, answer in zip(numbers, out[:, longest:].tolist()):
            answer = answer[:new[i]]
            end = next((n for n, token in enumerate(answer, 1) if token in stop), len(answer))
            yield i, prompts[i] + answer[:end]

def continuations(target, prompts, lengths, batch=32):
    """The target's greedy continuations of prompts, each to its length -> [ids], in their order."""
    return [ids for _, ids in sorted(write(target, prompts, lengths, batch))]
