"""A tree builder in any project: this file and cape.py (or pct.py) are all that it needs.

    python docs/any_project.py cape   # the demo: random models; a tree's output is plain decoding's
    python docs/any_project.py pct

A builder knows no model.  It gets a function expand, which predicts with the drafter, and the last
token of the text, the root; it returns a tree of drafted tokens (the contract: verify.py).  One
forward of the target then verifies the whole tree.  Any two causal LMs of transformers do, with one
tokenizer and without sliding windows:

    target = AutoModelForCausalLM.from_pretrained("a large one", dtype="float32")
    drafter = AutoModelForCausalLM.from_pretrained("a small one", dtype="float32")
    ids = generate(target, drafter, cape.cape, tokenizer(text).input_ids, 100)

Both models have a KV cache.  verify.py has what is missing here: a cache without concatenation,
sampling, and stopping criteria.

In float32 the output is plain decoding's.  In half precision a forward over a tree rounds otherwise
than one over a token, and where two tokens are about equally probable another one may be chosen.
"""
import importlib
import sys
from copy import deepcopy
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

# In this project the builders lie one folder up; in yours they may lie beside this file.
sys.path.append(str(Path(__file__).resolve().parent.parent))


class CachedModel:
    """A causal LM with a KV cache: `length` entries of the text, then those of a tree's nodes."""

    def __init__(self, model):
        self.model = model
        self.cache = DynamicCache()
        self.length = 0
        self.paths = []                           # of each node: its ancestors and itself

    def forward(self, tokens, parents):
        """Read m nodes of a tree below the text: lists of m -> logits (m, V).

        Nodes are numbered from 0 in the order in which they are given; a root's parent is -1.
        """
        for parent in parents:
            ancestors = self.paths[parent] if parent >= 0 else []
            node = len(self.paths)
            self.paths.append(ancestors + [node])
        paths = self.paths[-len(tokens):]
        # A node sees the text, its ancestors and itself.
        sees = torch.zeros(len(tokens), self.length + len(self.paths), dtype=torch.bool)
        sees[:, :self.length] = True
        for row, path in zip(sees, paths):
            row[self.length:][path] = True
        mask = torch.where(sees, 0.0, -torch.inf)                  # added to the attention scores
        mask = mask.to(self.model.device, self.model.dtype)
        position = [self.length + len(path) - 1 for path in paths]
        out = self.model(
            torch.tensor([tokens], device=self.model.device),
            position_ids=torch.tensor([position], device=self.model.device),
            attention_mask=mask[None, None],
            past_key_values=self.cache)
        return out.logits[0]

    def keep(self, path):
        """Append these nodes, a path from the root, to the text, and forget all others."""
        kept = list(range(self.length)) + [self.length + node for node in path]
        for layer in self.cache.layers:
            layer.keys = layer.keys[:, :, kept]                    # (1, H, len(kept), d)
            layer.values = layer.values[:, :, kept]
        self.length = len(kept)
        self.paths = []

    def read(self, text):
        """Read the tokens of `text` that are not in the cache yet, as a chain."""
        rest = text[self.length:]
        if rest:
            chain = range(len(rest))
            self.forward(rest, [i - 1 for i in chain])
            self.keep(chain)

def accept(tokens, parents, choices):
    """Walk down from the root while the target's choice is a child -> (path, new tokens)."""
    nodes = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens))}
    path, new = [], []
    node = 0
    while node is not None:
        path.append(node)
        new.append(choices[node])
        node = nodes.get((node, choices[node]))
    return path, new

@torch.inference_mode()
def generate(target, drafter, build, text, count):
    """Greedy decoding of `count` tokens or a few more after `text`, a list of ids -> all ids."""
    target, drafter = CachedModel(target), CachedModel(drafter)

    def expand(tokens, parents):
        """What a builder calls: tokens (m,), parents [m ints] -> probabilities (m, V)."""
        logits = drafter.forward(tokens.tolist(), parents)
        return logits.float().softmax(-1).to(tokens.device)

    end = len(text) + count
    while len(text) < end:
        # The last token, the root, is not read with the text: it is part of the tree.
        target.read(text[:-1])
        drafter.read(text[:-1])
        # Draft a tree.
        tree = build(expand, torch.tensor(text[-1:]))
        tokens, parents, expand_index = [x.tolist() for x in tree[:3]]
        # Verify it by one forward of the target.
        choices = target.forward(tokens, parents).argmax(-1).tolist()
        # Accept.
        path, new = accept(tokens, parents, choices)
        text = text + new
        # Commit: the drafter has read only those nodes that were given to expand.
        target.keep(path)
        drafter.keep([expand_index[node] for node in path if expand_index[node] >= 0])
    return text

def main(name="cape"):
    """Random models, the drafter like the target but for some noise."""
    build = getattr(importlib.import_module(name), name)           # cape.cape, pct.pct
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, initializer_range=0.2)
    target = LlamaForCausalLM(config).double()
    drafter = deepcopy(target)
    for p in drafter.parameters():
        p.data += 0.02 * torch.randn_like(p)
    forwards = []
    target.register_forward_hook(lambda *_: forwards.append(1))
    text = generate(target, drafter, build, [3, 1, 4, 1, 5], 60)
    rounds = len(forwards) - 1                                     # the first read the prompt
    plain = text[:5]
    while len(plain) < len(text):
        plain.append(target(torch.tensor([plain])).logits[0, -1].argmax().item())
    assert text == plain, "the output is plain decoding's"
    assert rounds < len(text) / 2, "by half as many forwards of the target as tokens"
    print(f"{len(text) - 5} tokens, plain decoding's, by {rounds} forwards of the target")

if __name__ == "__main__":
    main(*sys.argv[1:])
