"""What a target writes itself: prompts, their continuations, and the file that keeps them.

    prompts = prompts_in(paths, tokenizer, template, most)      # [(kind of text, ids)]
    texts = continuations(target, prompts, ends)                # greedy or sampled
    file = Written(path, run)                                   # JSON lines, only ever appended to

A row of the file is {"run", "source": kind of text, "prompt": [ids], "answer": [ids]}.
runtime/text.py knows it: the prompt is read and the answer is learned from, as in a chat.
"""
import json
import os
from pathlib import Path

import numpy as np
import torch

from training import prepare
from runtime import text as read
from runtime.text import UserError
from runtime import targets


# ---------------------------------------------------------------- the target's own text
def padded(texts):
    """Texts [ids] as one batch, padded on the left -> ids, attention mask; (B, T) each."""
    longest = max(map(len, texts))
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    seen = torch.zeros_like(ids)
    for row, mask, text in zip(ids, seen, texts):
        row[longest - len(text):] = torch.tensor(text)
        mask[longest - len(text):] = 1
    return ids, seen


@torch.no_grad()
def continuations(target, prompts, ends, temperature=0.0):
    """The target's continuations of all prompts, as one batch -> [ids], prompts included.

    Text i ends where the target ends it, with an end-of-text token, or when it has ends[i] tokens,
    at most the target's context.  temperature 0: greedy; else sampled, by torch's own generator.
    """
    texts = [list(ids) for ids in prompts]
    context = targets.context_of(target, target.config.get_text_config())
    eos = target.generation_config.eos_token_id
    eos = [eos] if isinstance(eos, int) else eos or []
    how = {"do_sample": False}
    if temperature:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    active = [i for i, text in enumerate(texts) if len(text) < ends[i]]
    while active:
        ids, seen = padded([texts[i] for i in active])
        ids = ids.to(target.device)
        seen = seen.to(target.device)
        # As far as the longest may go; shorter ones that could go further do so in the next turn.
        new = max(ends[i] - len(texts[i]) for i in active)
        new = min(new, context - ids.shape[1])
        made = target.generate(ids, attention_mask=seen, max_new_tokens=new, pad_token_id=0,
                               eos_token_id=eos or None, **how)
        made = made[:, ids.shape[1]:].tolist()
        ended = set()
        for i, tokens in zip(active, made):
            for token in tokens[:ends[i] - len(texts[i])]:
                texts[i].append(token)
                if token in eos:                         # padding follows
                    ended.add(i)
                    break
        active = [i for i in active if i not in ended and len(texts[i]) < ends[i]]
    return texts


# ---------------------------------------------------------------- prompts
def prompt_size(tokens, most):
    """How many of a document's tokens are its prompt, at most `most`; 0: it has none.

    Of a plain text it is half.  Of a chat it is all up to its first answer, so that every prompt is
    one that people ask: the start of a document, which ends where an answer begins.
    """
    learned = tokens >= 0
    if learned.all():
        return max(1, min(len(tokens) // 2, most))
    begins = learned[1:] & ~learned[:-1]                 # of token i + 1: an answer begins with it
    if not begins.any():
        return 0
    size = 1 + int(begins.argmax())
    return size if size <= most else 0


def up_to_question(chat):
    """The messages of a chat up to its first question, that included."""
    for number, message in enumerate(chat, 1):
        if message["role"] == "user":
            return chat[:number]
    return []


def prompts_in(paths, tokenizer, template, most, held_out=False):
    """Prompts of documents, those to learn from or those held out -> [(kind of text, ids)].

    A document of the corpus is cut where its answer begins, a chat (or a row of questions) after
    its first question, in the target's template; of any other text half is given.  A prompt of more
    than `most` tokens is left out, and so is one that another document has given already: its
    continuation would be the same.
    """
    found, known = [], set()
    for number, (place, row, document) in enumerate(read.documents(paths), 1):
        if row.get("held_out", number % prepare.HELD_OUT == 0) != held_out:
            continue
        if read.is_chat(document):
            messages = up_to_question(document)
            ids = read.chat_ids(messages, tokenizer, template) if messages else []
        else:
            parts = next(read.encode_all([document], tokenizer, template))
            tokens = parts[0] if parts else np.zeros(0, "i4")
            tokens = tokens[:prompt_size(tokens, most)]
            ids = np.where(tokens < 0, ~tokens, tokens).tolist()
        if 0 < len(ids) <= most and tuple(ids) not in known:
            known.add(tuple(ids))
            kind = read.kind_of_text(row, place.split(" of ", 1)[-1])
            found.append((kind, ids))
    if not found:
        raise UserError(f"--data has no document that begins with a prompt of at most {most} "
                        "tokens: more --length, or more text")
    return found


def given_parts(a, tokenizer, held_out=False):
    """Prompts in --data of at most three quarters of --length -> [(kind of text, ids)]."""
    template = read.template_of(a.template, tokenizer)
    return prompts_in(a.data, tokenizer, template, a.length * 3 // 4, held_out)


def batches_of(prompts, batch, seed):
    """Lists of some `batch` prompts of like length, in an order that the seed alone decides."""
    prompts = sorted(prompts, key=lambda prompt: len(prompt[1]))
    batches = [prompts[i:i + batch] for i in range(0, len(prompts), batch)]
    return [batches[i] for i in np.random.default_rng(seed + 2).permutation(len(batches))]


# ---------------------------------------------------------------- the file
class Written:
    """The file of a run's continuations.  It grows by whole batches, and belongs to its run.

    path: of the file; run: 12 hex digits of all that decides what is written.  UserError where the
    file holds anything else than rows of this run: it is not touched then.
    """

    def __init__(self, path, run):
        self.path, self.run = Path(path), run
        self.ends = []                                   # of each row: the bytes up to its end
        # A row begins so, and a row that a killed process left behind has at least begun so.
        head = f'{{"run": "{run}", '.encode()
        data = self.path.read_bytes() if self.path.exists() else b""
        end = 0
        for line in data.splitlines(keepends=True):
            cut = not line.endswith(b"\n")
            ours = line.startswith(head) or cut and head.startswith(line)
            if not ours:
                raise UserError(f"--resume: {self.path} holds something else than what this "
                                "command writes (from the same target, --data, --template, "
                                "--length, --batch, --seed and --temperature): name another --out")
            end += len(line)
            if not cut:
                self.ends.append(end)

    def keep(self, rows):
        """Cut off what comes after so many rows: a batch that was not written to its end."""
        if self.path.exists():
            os.truncate(self.path, self.ends[rows - 1] if rows else 0)

    def add(self, rows):
        """Append a batch; it is on the disk when this returns."""
        lines = [json.dumps({"run": self.run, **row}) + "\n" for row in rows]
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())
