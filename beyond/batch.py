"""Several sequences at once: one forward of the target verifies the trees of all of them.

The rows of a batch have lengths, trees and ends of their own, and each row's output is what
verify.generate gives for it alone, whatever its neighbours are.  GLIDE (arXiv 2402.02082) names
this as future work; its Table 4 has copies of one prompt.

The idea.  Row b has t_b committed tokens.  Its KV entries are the first t_b slots of its own part
of the cache, and the nodes of its tree are written to the slots after them.  Trees are padded to
the n nodes of the largest one.  Each node has the position t_b + depth, and a mask over the slots:
the committed ones, its ancestors and itself.  Padding and entries of earlier rounds are never seen.
Then each row's accepted nodes move to the end of its committed entries, by one gather for all rows.

    x_{<t} of all rows, K and V     (2 x layers, B, H, slots, d)     Batch.stack
    t_b                             (B,)                             Batch.lengths
    mask_CAPE of all rows           (B, 1, n, end)                   end = max t_b + n

    outputs = generate(target, copies(drafter, 3), cape.cape, [ids_0, ids_1, ids_2])

Drafters draft row after row, one for each row.  An object with needs, reset(rows) and
draft(batch, rows) drafts for all rows together, as that of beyond/batch_glide.py does.
"""
import copy
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache

import verify
from verify import Round, Rule, View

# ---------------------------------------------------------------- the target
class Batch(Cache):
    """The KV caches of B rows as one tensor, and the target's forwards over them.

    target: a verify.Target, or a runtime.targets.AnyTarget that verifies trees.
    """

    def __init__(self, target):
        super().__init__(layers=[])
        is_served = getattr(target, "verifies_trees", True) and getattr(target, "layers", True)
        if any(getattr(target, "windows", {}).values()) or not is_served:
            raise ValueError(f"{type(target.model).__name__} has windows, layers that differ, or "
                             "no mask of a tree: decode its sequences one by one")
        self.target = target
        self.stack = None                # (2 x layers, B, H, slots, d)
        self.lengths = None              # committed tokens of each row, a list
        self.slots, self.end = None, 0   # of the current forward: (B, n), int

    # ------------------------------------------------ rows
    def prefill(self, prompts, needs):
        """Prefill the prompts, a row each -> [(the logits (V,) after it, its View)]"""
        found, stacks = [], []
        self.lengths = [len(ids) for ids in prompts]
        slots = max(self.lengths) + verify.MARGIN
        for ids in prompts:
            found.append(self.target.prefill(ids, needs=needs))
            committed = self.target.cache.stack[:, :, :, :len(ids)]
            padded = F.pad(committed, (0, 0, 0, slots - len(ids)))
            stacks.append(padded)                              # (2 x layers, 1, H, slots, d)
        self.stack = torch.cat(stacks, 1)
        return [(logits, self.view(row, view.tokens, view.ids, view.hidden))
                for row, (logits, view) in enumerate(found)]

    def keep(self, rows):
        """Keep these rows alone."""
        self.stack = self.stack[:, rows]
        self.lengths = [self.lengths[row] for row in rows]

    def view(self, row, tokens, ids, hidden):
        """What a commit appended to a row -> verify.View.  tokens (k,), hidden {index: (k, D)}."""
        length = self.lengths[row]
        own = self.stack[:, row, None, :, :length]             # (2 x layers, 1, H, length, d)
        kv = {layer: own[2 * layer:2 * layer + 2] for layer in self.target.needs["kv"]}
        return View(tokens, ids, length, kv, hidden)

    # ------------------------------------------------ a round
    def forward(self, trees):
        """Forward a tree for each row -> logits (B, n, V), hidden states {index: (B, n, D)}."""
        target, device = self.target, self.stack.device
        lengths = torch.tensor(self.lengths, device=device)[:, None]           # (B, 1)
        tokens = pad_sequence([tree.tokens for tree in trees], batch_first=True)           # (B, n)
        n = tokens.shape[1]
        # A node of padding counts as a child of the root.
        parents = pad_sequence([tree.parents for tree in trees], batch_first=True)         # (B, n)
        seen = torch.stack([verify.ancestor_mask(of_row) for of_row in parents])   # (B, n, n)
        depth = seen.sum(-1) - 1                                               # (B, n)
        position = (lengths + depth).clamp(max=target.capacity - 1)
        self.slots = lengths + torch.arange(n, device=device)                  # (B, n)
        self.end = max(self.lengths) + n
        more = self.end - self.stack.shape[3]
        if more > 0:
            self.stack = F.pad(self.stack, (0, 0, 0, max(more, verify.MARGIN)))
        # mask (B, n, end): the row's committed entries, and what is seen of its tree
        committed = torch.arange(self.end, device=device) < lengths            # (B, end)
        mask = committed[:, None].repeat(1, n, 1)
        mask.scatter_(2, self.slots[:, None].expand_as(seen), seen)
        mask = torch.where(mask, 0.0, -torch.inf).to(target.dtype)[:, None]    # (B, 1, n, end)
        wanted = target.needs["hidden"]
        # runtime.targets.AnyTarget knows what else its model is given.
        first, around = getattr(target, "first", 0) or 0, getattr(target, "around", nullcontext)
        with around():
            out = target.model(
                input_ids=tokens, position_ids=first + position, attention_mask=mask,
                past_key_values=self, use_cache=True, output_hidden_states=bool(wanted),
                return_dict=True)
        return out.logits, {index: out.hidden_states[index] for index in wanted}

    # The model calls these three methods: they are the interface of transformers' caches.
    def update(self, k, v, layer, *args, **kwargs):
        """Write a layer's new entries k, v (B, H, n, d) -> all keys and values before `end`."""
        rows = torch.arange(len(k), device=k.device)[:, None]                  # (B, 1)
        held = self.stack[2 * layer:2 * layer + 2]                             # (2, B, H, slots, d)
        new = torch.stack((k, v)).permute(1, 3, 0, 2, 4)                       # (B, n, 2, H, d)
        held[:, rows, :, self.slots] = new
        return held[:, :, :, :self.end]

    def get_seq_length(self, layer_idx=0):
        return max(self.lengths)

    def get_mask_sizes(self, query_length, layer_idx):
        return self.end, 0

    def commit(self, paths):
        """Move each row's accepted nodes, lists of indices, to the end of its committed entries."""
        in_place = range(max(map(len, paths)))
        # Beyond a row's own path, entries are moved onto themselves.
        nodes = [[*path, *in_place[len(path):]] for path in paths]
        nodes = torch.tensor(nodes, device=self.stack.device)                  # (B, most)
        rows = torch.arange(len(paths), device=self.stack.device)[:, None]
        first = self.slots[:, :1]                                              # (B, 1)
        kept = self.stack[:, rows, :, first + nodes]           # (B, most, 2 layers, H, d)
        self.stack[:, rows, :, self.slots[:, :len(in_place)]] = kept
        for row, path in enumerate(paths):
            self.lengths[row] += len(path)

# ---------------------------------------------------------------- the drafters
def copies(drafter, count):
    """Copy a drafter that has not decoded yet, but not its models -> list of `count` drafters.

    A list of a drafter and its builder is copied as one: the builder may be the drafter's method.
    """
    modules = {}                         # deepcopy's memo: these count as copied

    def find(parts, depth=0):
        for x in parts:
            if isinstance(x, nn.Module):
                modules[id(x)] = x
            elif isinstance(x, (list, tuple)):
                find(x, depth)
            elif hasattr(x, "__dict__") and depth < 3:         # a mixture's drafter, its model
                find(vars(x).values(), depth + 1)

    find([drafter])
    return [copy.deepcopy(drafter, dict(modules)) for _ in range(count)]

# ---------------------------------------------------------------- the loop
class Row:
    """A sequence while it is decoded: what verify.rounds knows of it."""

    def __init__(self, number, target, drafter, build, rule, ids, new_tokens):
        self.number, self.drafter, self.build, self.rule = number, drafter, build, rule
        self.sequence = list(ids)
        self.left = min(new_tokens, target.remaining(ids))     # how many tokens may still come
        verify.check_prompt(target, ids, self.left)
        self.expand = partial(drafter.expand)

    def take(self, new, ends):
        """Append new tokens up to the limit or an end of text -> those appended."""
        new = verify.until_end(new[:self.left], ends)
        self.sequence += new
        self.left -= len(new)
        self.root_id = new[-1]
        return new

    def draft(self, device):
        """Draft the tree below the row's root, as in verify.rounds."""
        self.expand.remaining = self.left - 1
        if not self.rule.greedy:
            purpose = f"draft {len(self.sequence)}"
            self.expand.generator = verify.generator_for(self.rule.seed, purpose, device)
        build = self.build if self.expand.remaining else verify.root_only
        return build(self.expand, self.root)

    def accept(self, tree, logits, ends):
        """Accept nodes of the row's tree by the target's logits (n, V) -> Round."""
        choice = self.rule.choose(tree, logits, self.sequence)                 # (n,)
        numbers = torch.stack((tree.tokens, tree.parents, tree.expand_index, choice))
        tokens, parents, expand_index, chosen = numbers.tolist()
        verify.check_tree(tree, tokens, parents, self.root_id)
        path, new = verify.accept(tokens, parents, chosen)
        self.drafter.keep([expand_index[node] for node in path if expand_index[node] >= 0])
        self.root = choice[path[-1]:path[-1] + 1]                              # (1,)
        return Round(self.take(new, ends), path, tokens, parents)

def for_each(x, count):
    """A list as it is; anything else once for each of `count` rows."""
    return x if isinstance(x, list) else [x] * count

@torch.inference_mode()
def rounds(target, drafters, build, prompts, new_tokens=128, rules=Rule(), eos=(), over=()):
    """Decode as generate() does, whose arguments these are: yield {number of a row: Round}, first
    of the prefills.  over: a set to which the caller may add the numbers of rows that end.
    """
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    batch, count = Batch(target), len(prompts)
    together = None if isinstance(drafters, (list, type(None))) else drafters
    of_rows = drafters if isinstance(drafters, list) else [None] * count
    of_rows = [drafter or verify.NoDrafter() for drafter in of_rows]
    if len(set(map(id, of_rows))) < count:
        raise ValueError("each row needs a drafter with a state of its own: copies(drafter, B)")
    parts = zip(of_rows, for_each(build, count), for_each(rules, count), prompts,
                for_each(new_tokens, count))
    rows = [Row(number, target, *of_row) for number, of_row in enumerate(parts)]
    prefilled = batch.prefill(prompts, (together or of_rows[0]).needs)
    for row, (logits, view) in zip(rows, prefilled):
        row.view = view
        row.drafter.reset(row.rule.probs)
        last = verify.root_only(None, view.tokens[-1:])
        row.root = row.rule.choose(last, logits[None], row.sequence)           # (1,)
    if together:
        together.reset(rows)
    yield {row.number: Round(row.take(row.root.tolist(), ends), [], [], []) for row in rows}
    while True:
        # Rows that have ended leave the batch.
        going = [i for i, row in enumerate(rows)
                 if row.left and row.root_id not in ends and row.number not in over]
        if not going:
            return
        if len(going) < len(rows):
            batch.keep(going)
            rows = [rows[i] for i in going]

        # Draft
        if together:
            together.draft(batch, rows)
        else:
            for row in rows:
                row.drafter.begin(row.view, row.root_id)
        trees = [row.draft(target.device) for row in rows]

        # Verify: one forward over all trees
        logits, hidden = batch.forward(trees)                                  # (B, n, V)

        # Accept, and commit all rows at once
        done = [row.accept(tree, of_row[:len(tree.tokens)], ends)
                for row, tree, of_row in zip(rows, trees, logits)]
        batch.commit([one.path for one in done])
        for index, (row, tree, one) in enumerate(zip(rows, trees, done)):
            states = {layer: of_all[index, one.path] for layer, of_all in hidden.items()}
            ids = [one.tokens[node] for node in one.path]
            row.view = batch.view(index, tree.tokens[one.path], ids, states)
        yield {row.number: one for row, one in zip(rows, done)}

def generate(target, drafters, build, prompts, new_tokens=128, rules=Rule(), eos=()):
    """Speculative decoding of several sequences -> an Output for each, as verify.generate gives.

    target: as of Batch.  drafters: None, a list with one for each row (see copies), or a
    batch_glide.BatchGlide.  prompts: lists of token ids.  build, new_tokens, rules: one for all
    rows, or a list.  eos: an end-of-text id, or several.
    """
    of_rows = [[] for _ in prompts]
    for done in rounds(target, drafters, build, prompts, new_tokens, rules, eos):
        for number, one in done.items():
            of_rows[number].append(one)
    return [verify.output_of(of_row) for of_row in of_rows]
