"""What a target writes itself: the text that its drafters learn from best.

    python training/write.py --target smollm2 --data questions.jsonl --out written.jsonl
    python train.py glide edd --target smollm2 --data written.jsonl

The prompts are the first questions of chats, or the first halves of other texts.  Each row of the
output is {"source": kind of text, "temperature": T, "prompt": [ids], "answer": [ids]}.  train.py
reads the prompt and learns the answer.

The idea.  A step of decoding costs a small model hardly more for 64 texts than for one.  So a batch
of texts is decoded together, and where a text has ended, the next prompt takes its place at once.
All keys and values lie in one preallocated cache, a row for each text, which begins at position 0
of its row.  So nothing is concatenated or moved while texts of different lengths grow.  Query heads
that share a key are multiplied with it in one product, instead of a copy of the key for each.

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
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask

from runtime import load, text
from runtime.targets import any_target
from training import prepare
from verify import UserError

# ---------------------------------------------------------------- attention and cache
def grouped_attention(module, query, key, value, attention_mask, scaling=None, **more):
    """Attention of transformers' models without a copy of the keys for each query head.

    query (B, h, T, d), key and value (B, H, t, d), h a multiple of H -> (B, T, h, d), None
    """
    B, h, T, d = query.shape
    H = key.shape[1]
    scaling = d ** -0.5 if scaling is None else scaling
    # The h / H query heads of a key head, and their T positions, are rows of one product.
    grouped = query.reshape(B, H, h // H * T, d)
    scores = grouped @ key.transpose(2, 3) * scaling                   # (B, H, h / H T, t)
    scores = scores.unflatten(2, (h // H, T))                          # (B, H, h / H, T, t)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask[:, :, None, :, :key.shape[2]], -torch.inf)
    p = scores.float().softmax(-1).to(value.dtype)
    heads = p.flatten(2, 3) @ value                                    # (B, H, h / H T, d)
    return heads.reshape(B, h, T, d).transpose(1, 2), None

# Models whose attention is no more than this; all others keep their own.
GROUPED = ("llama", "mistral", "qwen2")
AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)

class RowsCache(Cache):
    """Keys and values of a batch of texts: kv[layer] = [K, V], (rows, H, capacity, d) each.

    Before a forward, `at` says where its new entries go, and `end` how many entries are read.
    """

    def __init__(self, rows, capacity):
        super().__init__(layers=[])
        self.rows, self.capacity = rows, capacity
        self.kv = {}

    def write(self, rows, positions, end):
        """Entry (b, i) of the next forward goes to rows[b], positions[b, i].  rows (b,)"""
        self.at = rows[:, None], positions
        self.end = end

    def update(self, k, v, layer, *args, **kwargs):
        """k, v (b, H, T, d) of the forward -> what it reads of the same rows, (b, H, end, d)"""
        if layer not in self.kv:
            shape = self.rows, k.shape[1], self.capacity
            self.kv[layer] = [x.new_zeros(*shape, x.shape[3]) for x in (k, v)]
        rows, positions = self.at
        found = []
        for kept, new in zip(self.kv[layer], (k, v)):
            kept[rows, :, positions] = new.transpose(1, 2)             # (b, T, H, d)
            if len(rows) == self.rows:
                found.append(kept[:, :, :self.end])                    # a view: nothing is copied
            else:
                found.append(kept[rows[:, 0], :, :self.end])
        return found

    def keep(self, rows):
        """Forget all texts but those of some rows (k,), which become rows 0 ... k - 1."""
        self.rows = len(rows)
        for layer, entries in self.kv.items():
            self.kv[layer] = [kept[rows] for kept in entries]

    def get_seq_length(self, layer_idx=0):
        return 0

    def get_mask_sizes(self, query_length, layer_idx):
        return self.end, 0

# ---------------------------------------------------------------- the loop
def choose(logits, temperature, generator=None):
    """The next token of each text, greedy at temperature 0.  logits (B, V) -> (B,)"""
    if not temperature:
        return logits.argmax(-1)
    p = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(p, 1, generator=generator)[:, 0]

class Writer:
    """Decodes a batch of texts; the next prompt takes the place of a text that has ended.

    A text ends with an end-of-text token or at `length` tokens, its prompt included.
    """

    def __init__(self, target, prompts, lengths, batch, temperature=0.0, generator=None):
        """prompts: lists of ids; lengths: how long the text of each may get."""
        self.target, self.device = target, target.device
        self.prompts, self.lengths = prompts, lengths
        self.temperature, self.generator = temperature, generator
        self.waiting = list(range(len(prompts)))[::-1]                 # the next one is the last
        self.is_grouped = target.config.model_type in GROUPED
        eos = target.generation_config.eos_token_id
        self.ends = set(eos) if isinstance(eos, list) else {eos}
        rows = min(batch, len(prompts))
        self.cache = RowsCache(rows, max(lengths))
        # Of each row: the number of its prompt, None while it is free; its text so far
        self.number = [None] * rows
        self.ids = [[0]] * rows

    def masks(self, positions, end):
        """What position_ids (b, T) see of the first `end` entries -> attention_mask of the model"""
        key = torch.arange(end, device=positions.device)
        distance = positions[:, None, :, None] - key                   # (b, 1, T, end)
        c = self.target.config.get_text_config()
        masks = {"full_attention": distance >= 0}
        window = getattr(c, "sliding_window", None)
        if window:
            masks["sliding_attention"] = (distance >= 0) & (distance < window)
        if not self.is_grouped:
            for kind, mask in masks.items():
                hidden = torch.finfo(self.target.dtype).min            # added to the scores
                masks[kind] = torch.where(mask, 0.0, hidden).to(self.target.dtype)
        # Models whose layers are of several kinds take a mask for each of them.
        kinds = set(getattr(c, "layer_types", None) or list(masks)[-1:])
        if len(kinds) > 1:
            return masks
        return masks[kinds.pop()]

    def forward(self, ids, rows, positions, end):
        """One forward of some texts.  ids, positions (b, T), rows (b,) -> last logits (b, V)"""
        rows = rows.to(self.device)
        positions = positions.to(self.device)
        self.cache.write(rows, positions, end)
        out = self.target(input_ids=ids.to(self.device), position_ids=positions,
                          attention_mask=self.masks(positions, end),
                          past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]

    def fill(self):
        """Put waiting prompts into free rows: KV entries of all their tokens but the last."""
        new = []
        for row, number in enumerate(self.number):
            if number is None and self.waiting:
                self.number[row] = self.waiting.pop()
                self.ids[row] = list(self.prompts[self.number[row]])
                new.append(row)
        longest = max((len(self.ids[row]) - 1 for row in new), default=0)
        if not longest:
            return
        ids = torch.zeros(len(new), longest, dtype=torch.long)
        for padded, row in zip(ids, new):
            prompt = self.ids[row][:-1]
            padded[:len(prompt)] = torch.tensor(prompt)
        # Entries of the padding are overwritten before anybody sees them.
        positions = torch.arange(longest).expand(len(new), -1)
        self.forward(ids, torch.tensor(new), positions, longest)

    def step(self):
        """The next token of each text."""
        last = torch.tensor([ids[-1:] for ids in self.ids])            # (B, 1)
        position = torch.tensor([[len(ids) - 1] for ids in self.ids])  # (B, 1)
        rows = torch.arange(len(self.ids))
        logits = self.forward(last, rows, position, int(position.max()) + 1)
        tokens = choose(logits, self.temperature, self.generator).tolist()
        for row, token in enumerate(tokens):
            if self.number[row] is not None:
                self.ids[row].append(token)

    def ended(self):
        """Take out the texts that have ended -> [(number of the prompt, ids)]"""
        found = []
        for row, number in enumerate(self.number):
            if number is None:
                continue
            ids = self.ids[row]
            is_new = len(ids) > len(self.prompts[number])
            if len(ids) >= self.lengths[number] or is_new and ids[-1] in self.ends:
                found.append((number, ids))
                self.number[row] = None
                self.ids[row] = [0]
        return found

    def shrink(self):
        """When no prompt waits and half of the texts have ended, go on with the others alone."""
        active = [row for row, number in enumerate(self.number) if number is not None]
        if self.waiting or not active or 2 * len(active) > len(self.number):
            return
        self.number = [self.number[row] for row in active]
        self.ids = [self.ids[row] for row in active]
        self.cache.keep(torch.tensor(active, device=self.device))

    @torch.no_grad()
    def texts(self):
        """Yield (number of the prompt, ids with the prompt) of each text when it has ended."""
        how = self.target.config._attn_implementation
        if self.is_grouped:
            self.target.set_attn_implementation("grouped")
        try:
            while self.waiting or any(number is not None for number in self.number):
                self.fill()
                yield from self.ended()                                # prompts of full length
                self.step()
                yield from self.ended()
                self.shrink()
        finally:
            self.target.set_attn_implementation(how)

def continuations(target, prompts, lengths, batch=32):
    """The target's greedy continuations of prompts, each to its length -> [ids], in their order."""
    texts = Writer(target, prompts, lengths, batch).texts()
    return [ids for _, ids in sorted(texts)]

# ---------------------------------------------------------------- prompts
def prompt_size(tokens):
    """How many of a document's tokens (n,) are its prompt; tokens below 0 are not learned.

    Of a chat these are the tokens before its first answer, of any other text the first half.
    """
    learned = tokens >= 0
    if learned.all():
        return len(tokens) // 2
    is_answer = learned[1:] & ~learned[:-1]              # an answer begins with token i + 1
    return 1 + int(is_answer.argmax()) if is_answer.any() else 0

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

# ---------------------------------------------------------------- the file
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

# ---------------------------------------------------------------- command line
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
    flag("--most", type=int, help="so many prompts, at most")
    flag("--seed", type=int, default=0, help="of the order of the prompts, and of sampling")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    flag("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
         help="auto: bfloat16 on a GPU, and on a CPU that has instructions for it")
    return p

def dtype_of(a):
    """The dtype of --dtype."""
    has_bfloat16 = a.device != "cpu" or torch.cpu.get_capabilities().get("avx512_bf16")
    if a.dtype == "auto":
        return "bfloat16" if has_bfloat16 else "float32"
    return a.dtype

def run(argv):
    a = parser().parse_args(argv)
    if min(a.batch, a.length) < 1 or a.temperature < 0:
        raise UserError("--batch and --length must be above 0, --temperature 0 or above")
    out = Path(a.out)
    if out.exists() and not (a.resume or a.overwrite):
        raise UserError(f"--out: {out} exists: go on with it by --resume, or give --overwrite")
    target, tokenizer = load.load_target(a.target, dtype_of(a), a.device, revision=a.revision,
                                         trust=a.trust_remote_code)
    capacity = any_target(target).capacity
    if a.length > capacity:
        raise UserError(f"--length {a.length} is more than the target's context of {capacity}")
    prompts = prompts_in(a.data, tokenizer, a.template, a.length * 3 // 4)
    order = np.random.default_rng(a.seed).permutation(len(prompts))
    prompts = [prompts[i] for i in order][:a.most]
    if a.overwrite and not a.resume:
        out.unlink(missing_ok=True)
    done = written(out)
    prompts = [(kind, ids) for kind, ids in prompts if tuple(ids) not in done]
    if not prompts:
        print(f"{out} holds all answers already")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(target.device).manual_seed(a.seed)
    writer = Writer(target, [ids for _, ids in prompts], [a.length] * len(prompts), a.batch,
                    a.temperature, generator)
    bar = tqdm(writer.texts(), total=len(prompts), unit="text", dynamic_ncols=True, disable=None)
    with open(out, "a", encoding="utf-8") as file:
        for number, ids in bar:
            kind, prompt = prompts[number]
            row = {"source": kind, "temperature": a.temperature, "prompt": prompt,
                   "answer": ids[len(prompt):]}
            file.write(json.dumps(row) + "\n")
            file.flush()
    print(f"saved {out}")

def main(argv):
    """Exit status: 0; 2 after one sentence about a user's mistake."""
    try:
        run(argv)
    except (UserError, OSError, torch.OutOfMemoryError) as why:
        print(f"write.py: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("write.py: interrupted; the same with --resume goes on", file=sys.stderr)
        return 2
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
