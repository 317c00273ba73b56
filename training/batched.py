"""Decoding of many texts at once, by the target alone: what it writes for its drafters.

    for number, ids in write(target, prompts, lengths, batch=64):      # each text when it is done
    texts = continuations(target, prompts, lengths)                    # all of them, in their order

The idea.  A step of decoding costs a small model hardly more for 64 texts than for one.  So a batch
of texts is decoded together, and where a text has ended, the next prompt takes its place at once.
All keys and values lie in one preallocated cache, a row for each text.  So nothing is concatenated
or moved while texts of different lengths grow.  This serves targets that are built as Llama is; for
all others transformers' generate() decodes one text after the other.
"""
import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from verify import sample

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
