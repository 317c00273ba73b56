"""Whatever is combined, the output is plain decoding's: the one table of lossless cases.

A random case is a number, from which everything else is drawn.  Every token must be what the
model's own forward over the whole text gives, without cache and mask: its argmax, or its sample by
the keyed noise.  And the cache must hold the text, and a second run be the same.

    LONG=10000 python -m pytest tests/test_lossless.py            # so many cases
"""
import os
import random
from collections import Counter
from functools import cache, partial

import pytest
import torch
from conftest import CLASSES, noisy, plain, random_drafter, relative, shared, tiny
from transformers import DynamicCache

import cape
import cascade
import maxgram
import pct
import verify
from beyond import graft, priced
from runtime import families, load
from runtime import static as graphs
from runtime.targets import AnyTarget

COUNT = int(os.environ.get("LONG") or 100)   # cases
TOLERANCE = dict(atol=2e-5, rtol=1e-4)       # norms and RoPE tables of a float64 model are float32
# Sizes of the targets: (vocabulary, layers, context)
SIZES = [(8, 2, 24), (12, 3, 40), (30, 1, 64)]
NEURAL = ("glide", "glide 2", "vanilla", "edd", "vdm", "eagle", "medusa", "noise", "noise")
CASCADES = ("maxgram", "cascade 1", "cascade 2", "cascade 1, maxgram", "cascade 2, maxgram")
MIXTURES = ("mixture edd", "mixture glide", "mixture eagle", "mixture medusa",
            "mixture noise", "mixture noise")
DRAFTERS = (*NEURAL, *CASCADES, *MIXTURES, "none")
# Small trees, large ones, and trees of one kind of branches: builders, or names of what is made
# for a case's drafter
TREES = (
    cape.chain, partial(cape.chain, gamma=2), cape.cape, cape.fixed,
    partial(cape.cape, gamma=7, sizes=(4, 0, 2), edges=(0.2, 0.6), max_nodes=9),
    partial(cape.fixed, gamma=3, size=9), cape.beam, partial(cape.beam, gamma=6, width=2),
    pct.pct, partial(pct.pct, cost=0.002, width=2, depth=6, leaf=0),
    partial(pct.pct, cost=0.01, width=5, depth=3, max_nodes=4), pct.token_confidence,
    partial(pct.token_confidence, token_threshold=0.02, width=3, max_nodes=20),
    partial(pct.vct, width=2, depth=4), partial(pct.vct, width=5, depth=2), pct.eagle2,
    partial(pct.eagle2, total=9, depth=4, expanded=2), "pct_cost")

# ---------------------------------------------------------------- models, made once
@cache
def model_of(name, sizes):
    """A random target, its weights large enough that its distributions are far from uniform."""
    names = "vocab_size", "num_hidden_layers", "max_position_embeddings"
    model = shared(name, **dict(zip(names, sizes)))
    AnyTarget(model)                                     # proves it once, at its whole context
    return model

@cache
def stage_of(name, sizes, number):
    """A small model of a cascade, that mostly agrees with the target."""
    return relative(model_of(name, sizes), (0.03, 0.08)[number], number + 1)

# ---------------------------------------------------------------- drawing a case
def drawn_tree(rng, drafter, sampled):
    """A builder, or the name of one; a cascade has its own."""
    sampled_too = 3 * ["drawn"] if sampled else []
    if drafter in CASCADES:
        return rng.choice(["chain", *sampled_too, *["pct_cost"] * (drafter == "maxgram")])
    return rng.choice([*TREES, *sampled_too, *8 * ["graft"] * (drafter in MIXTURES)])

def drawn_drafter(rng, kind, vocab, context):
    """Settings of a drafter of this kind."""
    if kind not in CASCADES:
        # Max-Gram's mixture weight: by length of match, or by the drafter's probability, too
        return {"temperature": rng.choice([1.0, 1.0, 0.5, 2.0]),
                "confidence": [rng.choice([0, 1, rng.random()]) for _ in range(3)],
                "agreement": rng.choice([None, (rng.uniform(-3, 3), 0.3, 0.8)])}
    neural = 1 if "1" in kind else 2 if "2" in kind else 0
    gram = kind.endswith("maxgram")
    n = neural + gram
    K = [[0] * r + [rng.randint(0, 4) for _ in range(n - r)] for r in range(n)]
    K[0][rng.randrange(n)] += 1
    bigram = [rng.randrange(vocab) for _ in range(rng.choice([0, vocab // 2, vocab]))]
    return {"neural": neural, "K": K, "lenience": rng.choice([1.0, 1.0, 1.5, 4.0]),
            "bigram": bigram if gram else None,
            "capacity": rng.choice([None, None, rng.randint(2, context)])}

def drawn_case(number):
    """Everything that a case decides -> a dict."""
    rng = random.Random(number)
    vocab, layers, context = sizes = rng.choice(SIZES)
    drafter = rng.choice(DRAFTERS)
    if layers == 1:                                      # no drafter is deeper than its target
        drafter = drafter.replace("glide 2", "glide")
    sampling = None
    if rng.random() < 0.5:
        sampling = {"temperature": rng.uniform(0.3, 1.5), "seed": rng.randrange(1000),
                    "top_k": rng.choice([None, None, rng.randint(1, vocab + 2)]),
                    "top_p": rng.choice([None, None, 1.0, rng.uniform(0.05, 1)])}
    # Often short, or near the end of the context
    length = rng.choice([rng.randint(1, 12), rng.randint(1, 12), rng.randint(1, context),
                         rng.randint(context - 6, context)])
    ends = rng.sample(range(vocab), rng.randint(1, max(1, vocab // 5)))
    return {
        "class": rng.choice(list(CLASSES)), "sizes": sizes, "drafter": drafter,
        "settings": drawn_drafter(rng, drafter, vocab, context),
        "rate": rng.choice([0, 0.7, 0.9, 1.0]),          # how often it is told the right token
        "sampling": sampling, "tree": drawn_tree(rng, drafter, sampling is not None),
        "prompt": [rng.randrange(1, vocab) for _ in range(length)],
        "new": rng.choice([rng.randint(1, 3), rng.randint(1, 12), rng.randint(6, 24)]),
        "eos": rng.choice([[], [], ends[:1], ends]),
        "margin": rng.choice([512, 512, rng.randint(4, 20)]),
        # Exact shapes, or those of CUDA graphs, whose forwards read a multiple of so many keys
        "static": rng.choice([None, None, None, 1, 16, 256])}

# ---------------------------------------------------------------- what the drafters are told
class Told:
    """A drafter that is told the next token of a text, at a rate, so that much is accepted."""

    def __init__(self, inner, text, rate):
        self.inner, self.text, self.rate = inner, text, rate
        self.needs, self.reset, self.keep = inner.needs, inner.reset, inner.keep

    def begin(self, view, root):
        self.length, self.depth = view.length, []
        self.inner.begin(view, root)

    def expand(self, tokens, parents):
        probs = self.inner.expand(tokens, parents)
        told = probs.clone()
        for parent, own, new in zip(parents, probs, told):
            self.depth.append(self.depth[parent] + 1 if parent >= 0 else 0)
            at = self.length + self.depth[-1] + 1
            rng = random.Random(at)
            # Some have no prediction: a row of zeros.
            if at < len(self.text) and rng.random() < self.rate and own.max() > 0:
                new[self.text[at]] = own.max() * rng.choice([0.6, 0.9, 1.6, 20.0])
                new /= new.sum()
        return told

# ---------------------------------------------------------------- deciding a case
def drafter_of(case):
    """The case's drafter."""
    kind, how = case["drafter"], case["settings"]
    name, sizes = case["class"], case["sizes"]
    vocab, _, _ = sizes
    if kind in CASCADES:
        stages = []
        for number in range(how["neural"]):
            stages.append(AnyTarget(stage_of(name, sizes, number)))
            stages[-1].capacity = how["capacity"] or stages[-1].capacity
        gram = None if how["bigram"] is None else maxgram.MaxGram(how["bigram"])
        return cascade.Cascade(stages, how["K"], how["lenience"], gram, vocab)
    neural = kind.removeprefix("mixture ")
    if neural == "noise":
        drafter = noisy(vocab)
    else:
        settings = {"hidden": 1} if neural in ("edd", "vdm") else {}
        drafter = random_drafter(model_of(name, sizes), neural, **settings)
    drafter.temperature = how["temperature"]
    if kind in MIXTURES:
        gram = maxgram.MaxGram(confidence=how["confidence"])
        drafter = graft.Mixture(drafter, gram, how["agreement"])
    return drafter

def builder_of(case, drafter):
    """The case's builder, for its drafter."""
    tree, prices = case["tree"], {"cost": 0.02, "node_price": 0.01}
    if case["drafter"] == "none":
        return verify.root_only
    if case["drafter"] in CASCADES and tree != "pct_cost":
        return getattr(drafter, tree)
    if case["drafter"] == "maxgram":
        return priced.PricedChain(drafter.gram, node_price=0.01)
    made = {"drawn": cape.drawn, "pct_cost": priced.PctCost(**prices),
            "graft": partial(graft.Graft, **prices)}
    build = made.get(tree, tree)
    return build(drafter) if tree == "graft" else build

@torch.no_grad()
def run(case):
    """Decode a case and check it -> how many rounds accepted something.  Raises AssertionError."""
    model = model_of(case["class"], case["sizes"])
    window = getattr(model.config, "sliding_window", None)
    target = (AnyTarget if window else verify.Target)(model)
    prompt, sampling, eos = case["prompt"], case["sampling"], case["eos"]
    limit = min(case["new"], target.remaining(prompt))
    rule = verify.Rule(**sampling or {})
    drafter = None if case["drafter"] == "none" else drafter_of(case)
    if case["static"]:
        for part in (target, drafter, getattr(drafter, "drafter", None)):      # of a mixture
            graphs.static(part)
    build = builder_of(case, drafter)
    if drafter and case["rate"] and case["drafter"] not in CASCADES:
        alone = verify.generate(target, None, verify.root_only, prompt, case["new"], rule)
        drafter = Told(drafter, prompt + alone.tokens, case["rate"])
    drawn = case["tree"] == "drawn" and drafter
    decode = partial(verify.generate, target, drafter, build, prompt, case["new"], rule, eos)
    out = decode()
    tokens, whole = out.tokens, prompt + out.tokens

    assert not {*tokens[:-1]} & {*eos}, "the tokens go on after an end of text"
    assert len(tokens) == limit or len(tokens) < limit and tokens[-1] in eos
    assert [token for step in out.rounds for token in step.new] == tokens[1:]

    # Every token is what the model's own forward gives after those before it, to rounding.
    kept = DynamicCache()
    own = model(torch.tensor([whole[:-1]]), past_key_values=kept, use_cache=True)
    score = own.logits[0, len(prompt) - 1:].double()                     # (tokens, V)
    if sampling:
        p_target = rule.p_target(score).double()
        possible = p_target[range(len(tokens)), tokens] > 0
        assert possible.all(), "a token that the target cannot sample"
        noise = [verify.keyed_noise(rule.seed, at, score.shape[1], score.device)
                 for at in range(len(prompt), len(whole))]
        score = p_target.log() - torch.stack(noise).log()
    # Of a sampled chain the first token alone comes by keyed noise.
    for i, token in enumerate(tokens[:1] if drawn else tokens):
        best = score[i].argmax()
        assert score[i, best] - score[i, token] < 1e-4, f"token {i} of {tokens} should be {best}"

    # The cache holds the text, and beyond an end or the limit what was accepted.
    n = min(len(target.ids), len(whole) - 1)
    assert target.cache.length == len(target.ids) >= len(whole) - 1
    assert target.ids[:n] == whole[:n]
    for number, layer in enumerate(kept.layers):
        for held, expected in zip(target.cache.kv[number], (layer.keys, layer.values)):
            torch.testing.assert_close(held[:, :, :n], expected[:, :, :n], **TOLERANCE)
    # A second run is the same; but of priced trees the clock decides.
    again = decode()
    assert again.tokens == tokens
    assert again.rounds == out.rounds or case["tree"] in ("pct_cost", "graft")
    return sum(len(step.path) > 1 for step in out.rounds)

ACCEPTED, CASES = Counter(), Counter()       # by drafter

@pytest.mark.parametrize("number", range(COUNT))
def test_a_random_case_is_lossless(number, monkeypatch):
    case = drawn_case(number)
    print(case)                                          # pytest shows it where the case fails
    monkeypatch.setattr(verify, "MARGIN", case["margin"])
    monkeypatch.setattr(graphs, "KEYS", case["static"] or graphs.KEYS)
    CASES[case["drafter"]] += 1
    ACCEPTED[case["drafter"]] += run(case)

def test_every_drafter_had_drafts_accepted():
    """Or there was nothing to test."""
    tried = [drafter for drafter, count in CASES.items() if count >= 3 and drafter != "none"]
    assert all(ACCEPTED[drafter] for drafter in tried), (CASES, ACCEPTED)

# ---------------------------------------------------------------- what chance does not draw
SHIPPED = {"glide": cape.cape, "glide-top": cape.beam, "vanilla": cape.chain, "edd": pct.pct,
           "vdm": pct.eagle2, "eagle": priced.PctCost(), "medusa": cape.cape}

def test_shipped_drafters_are_lossless():
    model, tokenizer = load.load_target(load.STAND_IN, "float32", "cpu")
    prompt = tokenizer("Lucy had a paper boat. She wanted to see")["input_ids"]
    text = plain(model, prompt, 24)
    for name, build in SHIPPED.items():
        drafter, _ = families.load(load.CHECKPOINTS / name, model)
        out = verify.generate(verify.Target(model), drafter, build, prompt, 24)
        assert out.tokens == text and out.tau > 1.2, name

def test_a_tree_deeper_than_its_builder_asked_and_than_the_context_holds():
    """GPT-2, whose table of positions ends: up to its last one, and the last token is not read."""
    model = tiny("GPT2LMHeadModel", max_position_embeddings=16, num_hidden_layers=2)
    target, prompt = verify.Target(model), [1, 2, 3]
    text = prompt + plain(model, prompt, 14)

    def build(expand, root):
        """Ask nobody, and propose five tokens, the text's and beyond its limit."""
        after = (text + [1] * 9)[target.cache.length + 1:][:5]
        return cascade.chain_of([root.item(), *after], root.device)

    assert verify.generate(target, None, build, prompt, 20).tokens == text[3:]
