"""What a target writes after many prompts, by transformers' generate(), for any family.

    for number, ids in write(target, prompts, length=512, batch=64):      # what follows a prompt
    append(path, target, tokenizer, prompts, length=512, batch=64, temperatures=[0, 1])

append() writes rows for train.py as they are finished:

    {"source": kind of text, "temperature": T, "target": digest of the target's fingerprint,
     "prompt": [ids], "answer": [ids]}
"""
import json
import os

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from runtime import load
from runtime.program import UserError
from training.documents import digest_of
from verify import until_end

@torch.no_grad()
def write(target, prompts, length, batch, temperature=0.0):
    """Let the target continue prompts, lists of ids, until a text ends or has `length` tokens.

    Yields (number of the prompt, ids of the answer), a batch after the other.  temperature: of
    sampling; 0: greedy.
    """
    # Prompts of similar sizes share a batch: the padding of a text counts for its length.
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    ends = {*np.ravel(target.generation_config.eos_token_id).tolist()}
    for start in range(0, len(order), batch):
        numbers = order[start:start + batch]
        # Padded on the left, so that all answers begin in one column.  The mask hides the padding,
        # and generate() derives the positions from it.
        ids = [torch.tensor(prompts[i], device=target.device) for i in numbers]
        ids = pad_sequence(ids, batch_first=True, padding_value=-1, padding_side="left")
        out = target.generate(
            ids.clamp(min=0), attention_mask=(ids >= 0).long(), max_length=length, pad_token_id=0,
            top_k=0, do_sample=temperature > 0, temperature=temperature or 1.0)
        for i, answer in zip(numbers, out[:, ids.shape[1]:].tolist()):
            yield i, until_end(answer, ends)

def kept_rows(path):
    """The rows that a file of JSON lines holds, or [].  A last line that was cut off is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    data = path.read_bytes()
    if not data.startswith(b'{"source": '[:len(data)]):
        raise UserError(f"{path} holds something else than rows: name another --out")
    whole = data[:data.rfind(b"\n") + 1]
    os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]

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
        texts = write(target, [ids for _, ids in given], length, batch, temperature)
        bar = tqdm(texts, f"temperature {temperature:g}", len(given), unit="text", disable=None)
        with open(path, "a", buffering=1) as file:           # a line is written at once
            for number, answer in bar:
                kind, prompt = given[number]
                row = {"source": kind, "temperature": temperature, "target": writer,
                       "prompt": prompt, "answer": answer}
                file.write(json.dumps(row) + "\n")
    print(f"saved {path}")
