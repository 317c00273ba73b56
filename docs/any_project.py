"""A tree builder in any project: this file and cape.py (or pct.py) are all that it needs.

    python any_project.py cape        # the demo: random models; a tree's output is plain decoding's
    python any_project.py pct

A builder knows no model.  It gets a function expand, which predicts with the drafter, and the last
token of the text, the root; it returns a tree of drafted tokens.  One forward of the target then
verifies the whole tree.  Any two causal LMs of transformers do, with one tokenizer and without
sliding windows:

    target = AutoModelForCausalLM.from_pretrained("a large one")
    drafter = AutoModelForCausalLM.from_pretrained("a small one")
    ids = generate(target, drafter, cape.cape, tokenizer(text).input_ids, 100)

For clarity each forward reads the whole text again.  verify.py does the same with a KV cache.
"""
import importlib
import sys
from copy import deepcopy

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def expand_after(text, drafter):
    """What a builder calls in one round: a function.  text: list of ids, the root the last."""
    paths = []                                    # of each node: the text up to it

    def expand(tokens, parents):
        """m new nodes: tokens (m,), parents [m ints] -> probabilities (m, V) of what follows each.

        Nodes are numbered from 0 in the order in which they are given; the root's parent is -1.
        """
        probs = []
        for token, parent in zip(tokens.tolist(), parents):
            before = text[:-1] if parent == -1 else paths[parent]
            path = before + [token]
            paths.append(path)
            logits = drafter(torch.tensor([path])).logits[0, -1]                # (V,)
            probs.append(logits.softmax(-1))
        return torch.stack(probs)
    return expand

def target_choices(target, text, tokens, parents):
    """One forward over text and tree -> the target's token after each of the n nodes, a list."""
    t, n = len(text) - 1, len(tokens)             # the root is in the text, and in the tree
    # A token sees all before it in the text; a node sees the text, its ancestors and itself.
    sees = torch.ones(t + n, t + n).tril().bool()
    sees[t:, t:] = torch.eye(n).bool()
    for node in range(1, n):
        sees[t + node] |= sees[t + parents[node]]
    position = sees.sum(1) - 1                    # how many tokens each sees before itself
    mask = torch.where(sees, 0.0, -torch.inf)     # added to the scores
    mask = mask.to(target.dtype)
    ids = torch.tensor([text[:-1] + tokens])
    out = target(ids, attention_mask=mask[None, None], position_ids=position[None])
    return out.logits[0, t:].argmax(-1).tolist()

def accepted(tokens, parents, choices):
    """Walk down from the root while the target's choice is a child -> the new tokens."""
    nodes = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens))}
    new = []
    node = 0
    while node is not None:
        new.append(choices[node])
        node = nodes.get((node, choices[node]))
    return new

@torch.inference_mode()
def generate(target, drafter, build, text, count):
    """Greedy decoding of `count` tokens or a few more after `text`, a list of ids -> all ids."""
    end = len(text) + count
    while len(text) < end:
        # Draft a tree, verify it by one forward, accept.
        root = torch.tensor(text[-1:])
        tree = build(expand_after(text, drafter), root)
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        choices = target_choices(target, text, tokens, parents)
        text = text + accepted(tokens, parents, choices)
    return text

def main(name):
    """Random models, the drafter like the target but for some noise."""
    build = getattr(importlib.import_module(name), name)                        # cape.cape, pct.pct
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
    rounds = len(forwards)
    plain = text[:5]
    while len(plain) < len(text):
        plain.append(target(torch.tensor([plain])).logits[0, -1].argmax().item())
    assert text == plain, "the output is plain decoding's"
    assert rounds < len(text) / 2, "by half as many forwards of the target as tokens"
    print(f"{len(text) - 5} tokens, plain decoding's, by {rounds} forwards of the target")

if __name__ == "__main__":
    main(*sys.argv[1:])
