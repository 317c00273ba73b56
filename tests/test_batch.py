"""Rows of a batch: each is what verify.generate gives for it alone, whatever its neighbours are.

A random case is a number, as in test_lossless.py; LONG=500 tries so many.
"""
import os
import random
from functools import partial

import pytest
import torch
from conftest import CONTEXT, VOCAB, noisy, random_drafter, shared

import cape
import cascade
import maxgram
import pct
import verify
from beyond import batch, batch_glide, graft, priced
from runtime.targets import AnyTarget

COUNT = int(os.environ.get("LONG") or 40)
# Two have grouped queries; the last counts positions itself
TARGETS = ("llama", "llama-eager", "qwen2", "GPT2LMHeadModel")
DRAFTERS = ("none", "glide", "glide together", "edd", "maxgram", "noise", "mixture")

BUILDERS = {
    "chain": cape.chain, "cape": cape.cape, "beam": partial(cape.beam, width=2),
    "pct": partial(pct.pct, cost=0.1, depth=4), "drawn": cape.drawn,
    "pct-cost": priced.PctCost(cost=0.05, node_price=0.02, start=0.0)}

def pairs(kind, name, tree, count):
    """Copies of a drafter and its builder: what a priced one has learnt would change its trees."""
    drafter, build = None, BUILDERS[tree]
    match kind.split():
        case ["none"]:
            build = verify.root_only
        case ["noise"]:
            drafter = noisy()
        case ["maxgram"]:                                # it drafts chains alone
            drafter = cascade.Cascade([], gram=maxgram.MaxGram(), vocab=VOCAB)
            build = drafter.drawn if tree == "drawn" else drafter.chain
        case ["mixture"]:
            drafter = graft.Mixture(random_drafter(shared(name), "edd"), maxgram.MaxGram())
        case [neural, *_]:
            drafter = random_drafter(shared(name), neural)
    return batch.copies([drafter, build], count)

@pytest.mark.parametrize("number", range(COUNT))
def test_each_row_is_what_it_is_alone(number, monkeypatch):
    """Tokens, trees and accepted paths, also of sampled chains: their noise is the row's own.

    In odd cases all entries beyond a row's own are large numbers: nothing may see them.
    """
    forward = batch.Batch.forward

    def filled(self, trees):
        self.stack = torch.nn.functional.pad(self.stack, (0, 0, 0, 64))
        for row, length in enumerate(self.lengths):
            self.stack[:, row, :, length:] = 1e4
        return forward(self, trees)

    if number % 2:
        monkeypatch.setattr(batch.Batch, "forward", filled)
    rng = random.Random(number)
    name, kind = rng.choice(TARGETS), rng.choice(DRAFTERS)
    temperature = rng.choice([0.0, 0.0, 0.8])
    trees = ["chain", "cape"] if kind == "glide together" else sorted(BUILDERS)
    tree = rng.choice([tree for tree in trees if temperature or tree != "drawn"])
    prompts, limits, rules = [], [], []
    for row in range(rng.randint(1, 6)):
        length = rng.choice([1, rng.randint(1, 12), rng.randint(1, CONTEXT), CONTEXT])
        prompts.append([rng.randrange(VOCAB) for _ in range(length)])
        limits.append(rng.choice([1, 2, rng.randint(1, 20), 20]))
        rules.append(verify.Rule(temperature, seed=rng.randrange(100)))
    eos = tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1, 2])))
    print(name, kind, tree, prompts, limits, rules, eos)

    target = (verify.Target if "llama" in name else AnyTarget)(shared(name))
    alone = [verify.generate(target, *of_row, ids, limit, rule, eos) for of_row, ids, limit, rule
             in zip(pairs(kind, name, tree, len(prompts)), prompts, limits, rules)]
    drafters, builds = map(list, zip(*pairs(kind, name, tree, len(prompts))))
    if kind == "glide together":
        drafters = batch_glide.BatchGlide(drafters[0])
    assert batch.generate(target, drafters, builds, prompts, limits, rules, eos) == alone

def test_what_is_refused_is_a_sentence():
    target, drafter = verify.Target(shared("llama")), random_drafter(shared("llama"), "glide")
    for name in ("mistral", "DeepseekV3ForCausalLM"):            # windows; keys and values differ
        with pytest.raises(ValueError, match="one by one"):
            batch.generate(AnyTarget(shared(name)), None, verify.root_only, [[1], [2]])
    with pytest.raises(ValueError, match="its own"):
        batch.generate(target, [drafter, drafter], cape.chain, [[1], [2]])
    with pytest.raises(ValueError, match="copies"):
        batch.generate(target, batch_glide.BatchGlide(drafter), pct.pct, [[1, 2], [2]])
