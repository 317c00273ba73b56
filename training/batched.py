"""What a target writes after many prompts, by transformers' generate(), for any family.

    for number, ids in write(target, prompts, lengths, batch=64):      # each text with its prompt
    append(path, target, tokenizer, prompts, length=512, batch=64, temperatures=[0, 1])

append() writes rows for train.py as they are finished:

    {"source": kind of text, "temperature": T, "target": digest of the target's fingerprint,
     "prompt": [ids], "answer": [ids]}
"""
import json
import os

import torch
from tqdm import tqdm

from runtime import load
from runtime.program import UserError
from training.documents import digest_of

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

def kept_rows(path):
    """The rows that a file of JSON lines holds, or [].  A last line that was cut off is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.read_bytes() if path.exists() else b""
    if not data.startswith(b'{"source": '[:len(data)]):
        raise UserError(f"{path} holds something else than rows: name another --out")
    whole = data[:data.rfind(b"\n") + 1]
    rows = [json.loads(line) for line in whole.splitlines()]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return rows

def append(path, target, tokenizer, prompts, length, batch, temperatures):
    """Append the target's answers to prompts, [(kind of text, ids)], to a file as rows.

    Prompts of which the file has rows already are left out.  length: of a prompt and its answer.
    temperatures: of the prompts in turn.
    """
    writer = digest_of(load.fingerprint(target, tokenizer))
    rows = kept_rows(path)
    if any(row.get("target") != writer for row in rows):
        raise UserError(f"{path} was not written by this target: name another --out")
    done = {tuple(row["prompt"]) for row in rows}
    for turn, temperature in enumerate(temperatures):
        given = [(kind, ids) for kind, ids in prompts[turn::len(temperatures)]
                 if tuple(ids) not in done]
        texts = write(target, [ids for _, ids in given], [length] * len(given), batch, temperature)
        bar = tqdm(texts, f"temperature {temperature:g}", len(given), unit="text", disable=None)
        with open(path, "a") as file:
            for number, ids in bar:
                kind, prompt = given[number]
                row = {"source": kind, "temperature": temperature, "target": writer,
                       "prompt": prompt, "answer": ids[len(prompt):]}
                file.write(json.dumps(row) + "\n")
                file.flush()
    print(f"saved {path}")
