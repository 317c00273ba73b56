"""Rows of a batch: each is what verify.generate gives for it alone, whatever its neighbours are.

A random case is a number, as in test_lossless.py; LONG=500 tries so many.
"""
import copy
import os
import random
from functools import cache, partial

import pytest
from conftest import CONTEXT, VOCAB, assert_plain, noisy, random_drafter, shared, tiny

import cape
import cascade
import maxgram
import pct
import verify
from beyond import batch, batch_glide, graft, priced
from runtime.targets import AnyTarget

COUNT = int(os.environ.get("LONG") or 40)
TARGETS = ("llama", "llama-eager", "qwen2")                    # the last two have grouped queries
DRAFTERS = ("none", "glide", "glide together", "edd", "maxgram", "noise", "mixture")

BUILDERS = {
    "chain": cape.chain, "cape": cape.cape, "beam": partial(cape.beam, width=2),
    "pct": partial(pct.pct, cost=0.1, depth=4), "drawn": cape.drawn,
    "pct-cost": priced.PctCost(cost=0.05, node_price=0.02, start=0.0)}

@cache
def neural(kind, name):
    return random_drafter(shared(name), kind)

def fresh(kind, name):
    """A drafter that has decoded nothing; None: plain decoding."""
    if kind in ("glide", "glide together", "edd"):
        drafter = neural(kind.split()[0], name)
        return type(drafter)(drafter.model)
    if kind == "maxgram":
        return cascade.Cascade([], gram=maxgram.MaxGram(), vocab=VOCAB)
    if kind == "mixture":
        return graft.Mixture(fresh("edd", name), maxgram.MaxGram())
    return noisy() if kind == "noise" else None

def pair(kind, name, tree):
    """A fresh drafter and its builder: what a priced one has learnt would change its trees."""
    drafter = fresh(kind, name)
    if kind == "maxgram":                                # it drafts chains alone
        return drafter, drafter.drawn if tree == "drawn" else drafter.chain
    return drafter, copy.deepcopy(BUILDERS[tree]) if drafter else verify.root_only

@pytest.mark.parametrize("number", range(COUNT))
def test_each_row_is_what_it_is_alone(number, monkeypatch):
    """Tokens, trees and accepted paths, also of sampled chains: their noise is the row's own.

    In odd cases all entries beyond a row's own are large numbers: nothing may see them.
    """
    forward = batch.Batch.forward

    def filled(self, trees):
        self.reserve(max(self.lengths) + 64)
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

    target = verify.Target(shared(name))
    alone = [verify.generate(target, *pair(kind, name, tree), ids, limit, rule, eos)
             for ids, limit, rule in zip(prompts, limits, rules)]
    drafters, builds = map(list, zip(*(pair(kind, name, tree) for _ in prompts)))
    if kind == "glide together":
        drafters = batch_glide.BatchGlide(drafters[0])
    assert batch.generate(target, drafters, builds, prompts, limits, rules, eos) == alone

def test_what_is_refused_is_a_sentence():
    mistral, target = AnyTarget(shared("mistral")), verify.Target(shared("llama"))
    with pytest.raises(ValueError, match="windows"):
        batch.generate(mistral, None, verify.root_only, [[1], [2]])
    drafter = fresh("edd", "llama")
    with pytest.raises(ValueError, match="its own"):
        batch.generate(target, [drafter, drafter], cape.chain, [[1], [2]])
    together = batch_glide.BatchGlide(fresh("glide", "llama"))
    with pytest.raises(ValueError, match="copies"):
        batch.generate(target, together, pct.pct, [[1, 2], [2]])

def test_positions_that_the_model_counts_itself():
    gpt2 = AnyTarget(tiny("GPT2LMHeadModel"))
    outputs = batch.generate(gpt2, None, verify.root_only, [[1], [2, 3]], 5)
    assert_plain(gpt2.model, [2, 3], outputs[1].tokens, 5)

@pytest.mark.parametrize("kind", ["glide", "mixture", "maxgram"])
def test_copies_share_no_state(kind):
    both = batch.copies(list(pair(kind, "llama", "chain")), 2)
    drafters, builds = map(list, zip(*both))
    target = verify.Target(shared("llama"))
    out = batch.generate(target, drafters, builds, [[1, 2, 1, 2], [3]], 12)
    alone = verify.generate(target, *pair(kind, "llama", "chain"), [3], 12)
    assert out[1].rounds == alone.rounds
