"""What a target writes itself: the text that its drafters learn from best.

    python training/write.py --target smollm2 --data questions.jsonl --out written.jsonl
    python train.py glide edd --target smollm2 --data written.jsonl

The prompts are the first questions of chats, or the first halves of other texts.  Each row of the
output is {"source": kind of text, "temperature": T, "prompt": [ids], "answer": [ids]}.  train.py
reads the prompt and learns the answer.

The idea.  A step of decoding costs a small model hardly more for 64 texts than for one.  So a batch
of texts is decoded together, and where a text has ended, the next prompt takes its place at once.
All keys and values lie in one preallocated cache, a row for each text.  So nothing is concatenated
or moved while texts of different lengths grow.  This serves targets that are built as Llama is; for
all others transformers' generate() decodes one text after the other.

The file is only ever appended to.  --resume goes on with the prompts that it does not hold.
"""
import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import numpy as np
import torch
from tqdm import tqdm
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from runtime import load, text
from runtime.targets import any_target
from training import prepare
from training.state import status_of
from verify import UserError, sample


# ---------------------------------------------------------------- attention and cache
def grouped_attention(module, query, key, value, attention_mask, scaling=None, **more):
    """Attention of transformers' models without a copy of the keys for each query head.

    query (B, h, T, d), key and value (B, H, t, d), h a multiple of H.  attention_mask
    (B, 1, T, t) bool.  Returns (B, T, h, d) and None, as transformers wants it.
    """
    B, h, T, d = query.shape
    H = key.shape[1]
    scaling = d ** -0.5 if scaling is None else scaling
    # The h / H query heads of a key head, and their T positions, are rows of one product.
    grouped = query.reshape(B, H, h // H * T, d)
    scores = grouped @ key.transpose(2, 3) * scaling                   # (B, H, h / H T, t)
    scores = scores.unflatten(2, (h // H, T))                          # (B, H, h / H, T, t)
    scores = scores.masked_fill(~attention_mask[:, :, None], -torch.inf)
    p = scores.float().softmax(-1).to(value.dtype)
    heads = p.flatten(2, 3) @ value                                    # (B, H, h / H T, d)
    return heads.reshape(B, h, T, d).transpose(1, 2), None

# Models whose attention is no more than this
LLAMA_LIKE = ("llama", "mistral", "qwen2")
AttentionInterface.register("grouped", grouped_attention)

class RowsCache(Cache):
    """Keys and values of a batch of texts: kv[layer] = [K, V], (rows, H, capacity, d) each."""

    def __init__(self, rows, capacity):
        super().__init__(layers=[])
        self.rows, self.capacity = rows, capacity
        self.kv = {}

    def aim(self, rows, positions, end):
        """Entry (b, i) of the next forward goes to rows[b], positions[b, i]; it reads `end`."""
        self.at, self.positions, self.end = rows, positions, end

    def update(self, k, v, layer, *args, **kwargs):
        """k, v (b, H, T, d) of the forward -> what it reads of the same rows, (b, H, end, d)"""
        if layer not in self.kv:
            shape = self.rows, k.shape[1], self.capacity, k.shape[3]
            self.kv[layer] = [k.new_zeros(shape), v.new_zeros(shape)]
        found = []
        for kept, new in zip(self.kv[layer], (k, v)):
            kept[self.at[:, None], :, self.positions] = new.transpose(1, 2)    # (b, T, H, d)
            read = kept[:, :, :self.end]                                       # a view
            found.append(read if len(self.at) == self.rows else read[self.at])
        return found

# ---------------------------------------------------------------- decoding
def choose(logits, temperatures):
    """The next token of each text, greedy at temperature 0.  logits (B, V) -> (B,)

    temperatures: a number for each text.
    """
    greedy = logits.argmax(-1)
    if not any(temperatures):
        return greedy
    temperature = torch.tensor(temperatures, device=logits.device)[:, None]            # (B, 1)
    p = (logits.float() / temperature.clamp_min(1e-3)).softmax(-1)
    uniform = 1 - torch.rand(len(p), 1, dtype=torch.float64, device=p.device)  # in (0, 1]
    return torch.where(temperature[:, 0] > 0, sample(p, uniform), greedy)

def forward(target, cache, rows, ids, starts):
    """The forward of some texts -> logits (b, V) after the last token of each.

    rows: of the cache, ascending.  ids: T tokens of each text.  starts: the position of the first.
    """
    rows = torch.tensor(rows, device=target.device)
    ids = torch.tensor(ids, device=target.device)
    starts = torch.tensor(starts, device=target.device)
    positions = starts[:, None] + torch.arange(ids.shape[1], device=target.device)     # (b, T)
    end = int(positions.max()) + 1
    key_position = torch.arange(end, device=target.device)
    visible = key_position <= positions[:, None, :, None]                      # (b, 1, T, end)
    cache.aim(rows, positions, end)
    out = target(input_ids=ids, position_ids=positions, attention_mask=visible,
                 past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1]

def write_refilling(target, prompts, lengths, batch, temperatures):
    """As write, for Llama-like targets: the next prompts take the places of texts that ended."""
    eos = target.generation_config.eos_token_id
    ends = set(eos) if isinstance(eos, list) else {eos}
    cache = RowsCache(min(batch, len(prompts)), max(lengths))
    waiting = list(enumerate(prompts))[::-1]
    texts = {}                       # {row of the cache: (number of its prompt, its ids)}
    while waiting or texts:
        # Free rows get the next prompts together, once an eighth of all rows is free.
        free = [row for row in range(cache.rows) if row not in texts]
        if waiting and (not texts or len(free) > cache.rows // 8):
            free = free[:len(waiting)]
            for row in free:
                number, prompt = waiting.pop()
                texts[row] = number, list(prompt)
            fill(target, cache, {row: texts[row][1][:-1] for row in free})
        # A step: the next token of each text.
        rows = sorted(texts)
        last = [texts[row][1][-1:] for row in rows]
        starts = [len(texts[row][1]) - 1 for row in rows]
        of_rows = [temperatures[texts[row][0]] for row in rows]
        tokens = choose(forward(target, cache, rows, last, starts), of_rows)
        for row, token in zip(rows, tokens.tolist()):
            number, ids = texts[row]
            ids.append(token)
            if token in ends or len(ids) >= lengths[number]:
                del texts[row]
                yield number, ids

def fill(target, cache, prompts):
    """Compute the KV entries of prompts {row of the cache: ids}, all in one forward.

    Shorter prompts are padded on the right.  What is stored for the padding is overwritten before
    anything sees it: an entry is visible only to its own position and to later ones.
    """
    longest = max(len(ids) for ids in prompts.values())
    if longest == 0:
        return
    padded = [ids + [0] * (longest - len(ids)) for ids in prompts.values()]
    forward(target, cache, list(prompts), padded, [0] * len(prompts))

def write_one_by_one(target, prompts, lengths, temperatures):
    """As write, for any target: by transformers' generate()."""
    for number, prompt in enumerate(prompts):
        how = {"do_sample": False}
        if temperatures[number]:
            how = {"do_sample": True, "temperature": temperatures[number], "top_k": 0}
        ids = torch.tensor([prompt], device=target.device)
        new = lengths[number] - len(prompt)
        out = target.generate(ids, max_new_tokens=new, pad_token_id=0, **how)
        yield number, out[0].tolist()

@torch.no_grad()
def write(target, prompts, lengths, batch, temperatures=None):
    """Let the target go on with prompts, lists of ids, until a text ends or has its length.

    Yields (number of the prompt, ids with the prompt), each text when it is complete.  lengths: of
    the text of each prompt, more than the prompt has.  temperatures: a number for each prompt, 0
    for greedy decoding; None: all are greedy.
    """
    temperatures = temperatures or [0.0] * len(prompts)
    if not prompts:
        return
    window = getattr(target.config, "sliding_window", None)
    if target.config.model_type not in LLAMA_LIKE or window and window < max(lengths):
        yield from write_one_by_one(target, prompts, lengths, temperatures)
        return
    attention = target.config._attn_implementation
    target.set_attn_implementation("grouped")
    try:
        yield from write_refilling(target, prompts, lengths, batch, temperatures)
    finally:
        target.set_attn_implementation(attention)

def continuations(target, prompts, lengths, batch=32):
    """The target's greedy continuations of prompts, each to its length -> [ids], in their order."""
    return [ids for _, ids in sorted(write(target, prompts, lengths, batch))]

# ---------------------------------------------------------------- prompts
def prompt_size(tokens):
    """How many of a document's tokens (n,) are its prompt; tokens below 0 are not learned.

    Of a chat these are the tokens before its first answer, of a prompt without an answer all, of
    any other text the first half.
    """
    learned = tokens >= 0
    if learned.all():
        return len(tokens) // 2
    is_answer = learned[1:] & ~learned[:-1]              # an answer begins with token i + 1
    return 1 + int(is_answer.argmax()) if is_answer.any() else len(tokens)

def plain_ids(tokens):
    """Token ids, of which those that are not learned are stored as ~id -> list of ids"""
    return np.where(tokens < 0, ~tokens, tokens).tolist()

def first_question(chat):
    """The messages of a chat up to its first question."""
    for number, message in enumerate(chat, 1):
        if message["role"] == "user":
            return chat[:number]
    return []

def prompts_in(paths, tokenizer, template, most, held_out=False):
    """The prompts of documents to learn from, or of those held out -> [(kind of text, ids)].

    Left out are prompts of more than `most` tokens, and those that come a second time.
    """
    template = text.template_of(template, tokenizer)
    found = {}
    for number, (place, row, document) in enumerate(text.documents(paths), 1):
        if prepare.is_held_out(number, row) != held_out:
            continue
        if text.is_chat(document):
            messages = first_question(document)
            ids = text.chat_ids(messages, tokenizer, template) if messages else []
        else:
            parts = next(text.encode_all([document], tokenizer, template))
            tokens = parts[0] if parts else np.zeros(0, "i4")
            ids = plain_ids(tokens[:prompt_size(tokens)])
        if 0 < len(ids) <= most:
            kind = text.kind_of_text(row, prepare.file_name(place))
            found.setdefault(tuple(ids), kind)
    if not found:
        raise UserError(f"--data has no prompt of at most {most} tokens: give more --length, or "
                        "more text")
    return [(kind, list(ids)) for ids, kind in found.items()]

# ---------------------------------------------------------------- command line
def written(path):
    """The prompts that a file holds -> set of tuples.  A last row that was cut off is removed."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[:data.rfind(b"\n") + 1]
    try:
        found = {tuple(json.loads(line)["prompt"]) for line in whole.splitlines()}
    except (ValueError, LookupError, TypeError):
        raise UserError(f"--resume: {path} holds something else than write.py writes: name "
                        "another --out") from None
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return found

def parser():
    p = text.Parser(description="Let a target write text that its drafters can learn from.",
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flag = p.add_argument
    flag("--target", default=str(load.STAND_IN), help="folder or hub name of the target")
    flag("--revision", help="of the target on the hub")
    flag("--trust-remote-code", action="store_true", help="run the target's own code")
    flag("--data", nargs="+", required=True, help="files of questions, chats or other text")
    flag("--template", help="chat format, as for train.py")
    flag("--out", required=True, help="file to write, JSON lines")
    flag("--resume", action="store_true", help="go on with --out")
    flag("--overwrite", action="store_true", help="replace --out")
    flag("--temperature", type=float, default=0.0, help="0: greedy; else sampled")
    flag("--length", type=int, default=512, help="tokens of a prompt and its answer, at most")
    flag("--batch", type=int, default=64, help="texts that are decoded together")
    flag("--dtype", choices=("float32", "bfloat16"), default="float32",
         help="of the target on a CPU; bfloat16 is faster where the CPU has AMX")
    flag("--seed", type=int, default=0, help="of sampling")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    return p

def run(argv):
    a = parser().parse_args(argv)
    if min(a.batch, a.length) < 1 or a.temperature < 0:
        raise UserError("--batch and --length must be above 0, --temperature 0 or above")
    out = Path(a.out)
    if out.exists() and not (a.resume or a.overwrite):
        raise UserError(f"--out: {out} exists: go on with it by --resume, or give --overwrite")
    dtype = "auto" if a.device.startswith("cuda") else a.dtype
    target, tokenizer = load.load_target(a.target, dtype, a.device, revision=a.revision,
                                         trust=a.trust_remote_code)
    capacity = any_target(target).capacity
    if a.length > capacity:
        raise UserError(f"--length {a.length} is more than the target's context of {capacity}")
    prompts = prompts_in(a.data, tokenizer, a.template, a.length * 3 // 4)
    if a.overwrite and not a.resume:
        out.unlink(missing_ok=True)
    done = written(out)
    prompts = [(kind, ids) for kind, ids in prompts if tuple(ids) not in done]
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(a.seed)
    given = [ids for _, ids in prompts]
    lengths = [a.length] * len(prompts)
    texts = write(target, given, lengths, a.batch, [a.temperature] * len(prompts))
    with open(out, "a", encoding="utf-8") as file:
        for number, ids in tqdm(texts, total=len(prompts), unit="text", disable=None):
            kind, prompt = prompts[number]
            row = {"source": kind, "temperature": a.temperature, "prompt": prompt,
                   "answer": ids[len(prompt):]}
            file.write(json.dumps(row) + "\n")
            file.flush()
    print(f"saved {out}")

def main(argv):
    return status_of(run, argv)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
