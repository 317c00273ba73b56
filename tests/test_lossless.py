"""Whatever is combined, the output is plain decoding's: the one table of lossless cases.

A random case is a number, from which everything else is drawn.  Every token must be what the
model's own forward over the whole text gives, without cache and mask: its argmax, or its sample by
the keyed noise.  (Of a sampled chain: one that the target can sample.)  And the cache must hold the
text, a second run be the same, and the drafter's probabilities those of a fresh one that is shown
the whole text at once.

    LONG=10000 python -m pytest tests/test_lossless.py            # so many cases
    python -m pytest "tests/test_lossless.py::test_a_random_case_is_lossless[12]"     # this again

Below them are the cases that chance does not draw: the shipped checkpoints, T5, and a sequence that
fills the context.
"""
import os
import random
from collections import Counter
from functools import cache, partial

import pytest
import torch
from conftest import (
    CLASSES, ROOT, assert_plain, noisy, plain, random_drafter, relative, shared, target_of, tiny)
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, DynamicCache

import cape
import cascade
import maxgram
import pct
import verify
from beyond import graft, priced
from runtime import families, targets
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
# Those that branch below the first layer more often
BUILDERS = ("chain", "cape", "fixed", "token_confidence", "pct_cost",
            *2 * ("beam", "pct", "vct", "eagle2"))

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

@cache
def draft_model_of(name, sizes, kind, *how):
    """A random draft model, and the class that decodes with it."""
    settings = {"hidden": 1} if kind in ("edd", "vdm") else {}
    drafter = random_drafter(model_of(name, sizes), kind, **{**settings, **dict(how)})
    return drafter.model, type(drafter)

# ---------------------------------------------------------------- drawing a case
def drawn_tree(rng, drafter, sampled):
    """The name of a builder, and its settings; of a cascade its own chain, too."""
    names = BUILDERS + 8 * ("graft",) * (drafter in MIXTURES) + 3 * ("drawn",) * sampled
    name = rng.choice(names)
    if drafter in CASCADES and name in ("chain", "drawn"):
        return name, {}
    gamma, width, depth = rng.randint(1, 7), rng.choice([1, 2, 2, 3, 5]), rng.randint(1, 6)
    most, leaf = rng.choice([1, 4, 9, 20, 64, 64]), rng.choice([0, 0, 0.01, 0.05])
    sizes = tuple(rng.randint(0, 7) for _ in range(rng.randint(1, 4)))
    edges = tuple(sorted(round(rng.random(), 2) for _ in sizes[1:]))
    small, nodes = round(10 ** rng.uniform(-3, 0), 4), gamma + rng.randint(0, 20)
    shape = {"width": width, "depth": depth, "max_nodes": most}
    prices = {"cost": small, "node_price": rng.choice([0, 0.001, 0.01, 0.1])}
    deepest = {1: 6, 2: 5, 3: 3, 5: 2}[width]
    return name, {
        "chain": {"gamma": gamma},
        "drawn": {"gamma": gamma},
        "beam": {"gamma": gamma, "width": width},
        "cape": {"gamma": gamma, "sizes": sizes, "edges": edges, "max_nodes": nodes},
        "fixed": {"gamma": gamma, "size": rng.randint(0, 9), "max_nodes": nodes},
        "pct": {"cost": small, "leaf": leaf, **shape},
        "token_confidence": {"token_threshold": small, "leaf": leaf, **shape},
        "pct_cost": {**prices, **shape},
        "graft": {**prices, **shape},
        "vct": {"width": width, "depth": min(depth, deepest)},
        "eagle2": {"total": most, "depth": depth, "expanded": width}}[name]

def drawn_drafter(rng, kind, vocab, layers, context):
    """Settings of a drafter of this kind."""
    if kind not in CASCADES:
        own = {"edd": {"hidden": rng.randint(1, layers)}, "medusa": {"heads": rng.randint(1, 5)}}
        own = own.get(kind.removeprefix("mixture "), {})
        own["temperature"] = rng.choice([1.0, 1.0, 0.5, 2.0])
        if kind in MIXTURES:
            # Max-Gram's mixture weight: by length of match, or by the drafter's probability, too
            own["confidence"] = [rng.choice([0, 1, rng.random()]) for _ in range(3)]
            agreement = rng.uniform(-3, 3), rng.random(), rng.random()
            own["agreement"] = rng.choice([None, agreement])
        return own
    neural = 1 if "1" in kind else 2 if "2" in kind else 0
    gram = kind.endswith("maxgram")
    stages = neural + gram
    K = [[0] * r + [rng.randint(0, 4) for _ in range(stages - r)] for r in range(stages)]
    K[0][rng.randrange(stages)] += 1
    bigram = [rng.randrange(vocab) for _ in range(rng.choice([0, vocab // 2, vocab]))]
    return {"neural": neural, "K": K, "lenience": rng.choice([1.0, 1.0, 1.5, 4.0]),
            "bigram": bigram if gram else None,
            "capacity": rng.choice([None, None, rng.randint(2, context)])}

def drawn_case(number):
    """Everything that a case decides -> a dict."""
    rng = random.Random(number)
    case = {"case": number, "class": rng.choice(list(CLASSES)), "sizes": rng.choice(SIZES)}
    vocab, layers, context = case["sizes"]
    case["drafter"] = rng.choice(DRAFTERS)
    if layers == 1:                                      # no drafter is deeper than its target
        case["drafter"] = case["drafter"].replace("glide 2", "glide")
    # How often it is told the right token; None: never
    case["rate"] = rng.choice([None, 0.7, 0.9, 1.0])
    case["settings"] = drawn_drafter(rng, case["drafter"], vocab, layers, context)
    case["sampling"] = None
    if rng.random() < 0.5:
        case["sampling"] = {
            "temperature": round(rng.uniform(0.3, 1.5), 2), "seed": rng.randrange(1000),
            "top_k": rng.choice([None, None, rng.randint(1, vocab + 2)]),
            "top_p": rng.choice([None, None, 1.0, round(rng.uniform(0.05, 1), 2)])}
    case["tree"] = drawn_tree(rng, case["drafter"], case["sampling"] is not None)
    case["capacity"] = rng.choice([None, None, None, rng.randint(2, context)])
    most = case["capacity"] or context
    # Often short, or near the end
    short = [rng.randint(1, min(12, most)) for _ in range(2)]
    length = rng.choice([*short, rng.randint(1, most), rng.randint(max(1, most - 6), most)])
    case["prompt"] = [rng.randrange(1, vocab) for _ in range(length)]
    middle = [rng.randint(6, 24) for _ in range(2)]
    case["new"] = rng.choice([rng.randint(1, 3), rng.randint(1, 12), *middle])
    ends = rng.sample(range(vocab), rng.randint(1, max(1, vocab // 5)))
    case["eos"] = rng.choice([[], [], ends[:1], ends])
    case["checked"] = rng.choice([1, 1, 1, 2])
    case["margin"] = rng.choice([512, 512, rng.randint(4, 20)])
    # Exact shapes, or those of CUDA graphs, whose forwards read a multiple of so many keys
    case["static"] = rng.choice([None, None, None, 1, 16, 256])
    case["twice"] = rng.random() < 0.4
    return case

# ---------------------------------------------------------------- what is watched while it decodes
class Watched:
    """A drafter, of which one round is compared with a fresh one that is shown the text at once.

    text, rate: in so many places it is told the token that comes next, so that much of what it
    drafts is accepted.
    """

    def __init__(self, make, checked, text, rate):
        self.make, self.inner, self.checked = make, make(), checked
        self.text, self.rate = text, rate
        self.needs = self.inner.needs

    def reset(self, probs):
        self.round, self.tokens, self.hidden, self.probs = -1, [], [], probs
        self.inner.reset(probs)

    def begin(self, view, root):
        self.round += 1
        self.view, self.root = view, root
        self.nodes = []                          # (token, parent, depth, probabilities) each
        self.tokens.append(view.tokens)
        self.hidden.append(view.hidden)
        assert sum(map(len, self.tokens)) == view.length, "what it is shown adds up"
        self.inner.begin(view, root)

    def expand(self, tokens, parents):
        probs = self.inner.expand(tokens, parents)
        assert probs.dtype == torch.float32 and not probs.isnan().any()
        told = probs.clone()
        for token, parent, own, new in zip(tokens.tolist(), parents, probs, told):
            depth = self.nodes[parent][2] + 1 if parent >= 0 else 0
            self.nodes.append((token, parent, depth, own))
            at = self.view.length + depth + 1
            rng = random.Random(at)
            # Some have no prediction: a row of zeros.
            if at < len(self.text) and rng.random() < self.rate and own.max() > 0:
                new[self.text[at]] = own.max() * rng.choice([0.6, 0.9, 1.6, 20.0])
                new /= new.sum()
        return told

    def keep(self, path):
        parents = [self.nodes[node][1] for node in path]
        assert parents == [-1, *path][:len(path)], "the numbers of a path, in the drafter's order"
        if self.round == self.checked and self.nodes:
            # The probabilities after one of the nodes, against its path alone
            chosen = random.Random(self.view.length).randrange(len(self.nodes))
            path_to_it, node = [], chosen
            while node >= 0:
                token, node, _, _ = self.nodes[node]
                path_to_it.insert(0, token)
            chain = list(range(-1, len(path_to_it) - 1))
            fresh = self.fresh().expand(torch.tensor(path_to_it), chain)
            torch.testing.assert_close(self.nodes[chosen][3], fresh[-1], **TOLERANCE)
        self.inner.keep(path)

    def fresh(self):
        drafter = self.make()
        drafter.reset(self.probs)
        hidden = {}
        for k in self.view.hidden:
            hidden[k] = torch.cat([states[k] for states in self.hidden])
        tokens = torch.cat(self.tokens)
        view = self.view._replace(tokens=tokens, hidden=hidden, ids=tokens.tolist())
        drafter.begin(view, self.root)
        return drafter

# ---------------------------------------------------------------- deciding a case
def drafter_of(case):
    """A function that makes the case's drafter, always the same one."""
    kind, how = case["drafter"], case["settings"]
    name, sizes = case["class"], case["sizes"]
    vocab, _, _ = sizes

    def make():
        if kind in CASCADES:
            stages = []
            for number in range(how["neural"]):
                stages.append(AnyTarget(stage_of(name, sizes, number), how["capacity"]))
            gram = None if how["bigram"] is None else maxgram.MaxGram(how["bigram"])
            return cascade.Cascade(stages, how["K"], how["lenience"], gram, vocab)
        neural = kind.removeprefix("mixture ")
        if neural == "noise":
            drafter = noisy(vocab)
        else:
            of_model = [(k, v) for k, v in how.items() if k in ("hidden", "heads")]
            draft_model, drafter_class = draft_model_of(name, sizes, neural, *of_model)
            drafter = drafter_class(draft_model)
        drafter.temperature = how["temperature"]
        if kind in MIXTURES:
            gram = maxgram.MaxGram(confidence=how["confidence"])
            drafter = graft.Mixture(drafter, gram, how["agreement"])
        return drafter
    return make

def builder_of(case, drafter):
    """The case's builder."""
    name, settings = case["tree"]
    alone = case["drafter"] == "maxgram"
    if case["drafter"] == "none":
        return verify.root_only
    if name == "graft":
        return graft.Graft(drafter.inner, **settings)
    if not settings:                                     # a method of the drafter
        return getattr(drafter.inner, name)
    if name == "pct_cost" and alone:
        prices = {key: settings[key] for key in ("node_price", "max_nodes")}
        return priced.PricedChain(drafter.inner.gram, **prices)
    if name == "pct_cost":
        return priced.PctCost(**settings)
    where = cape if hasattr(cape, name) else pct
    return partial(getattr(where, name), **settings)

@torch.no_grad()
def run(case):
    """Decode a case and check it -> how many rounds accepted something.  Raises AssertionError."""
    model = model_of(case["class"], case["sizes"])
    target = target_of(model, case["capacity"])
    prompt, sampling, eos = case["prompt"], case["sampling"], case["eos"]
    limit = min(case["new"], target.remaining(prompt))
    rule = verify.Rule(**sampling or {})
    drafter, text = None, []
    if case["drafter"] != "none":
        if case["rate"]:
            alone = verify.generate(target, None, verify.root_only, prompt, case["new"], rule)
            text = prompt + alone.tokens
        # The KV entries of a second layer depend on when they were drafted: a fresh drafter, shown
        # the same text, has others.
        checked = None if case["drafter"] == "glide 2" else case["checked"]
        drafter = Watched(drafter_of(case), checked, text, case["rate"])
    if case["static"]:
        inner = getattr(drafter, "inner", None)                # a mixture has another within
        for part in (target, inner, getattr(inner, "drafter", None)):
            graphs.static(part)
    build = builder_of(case, drafter)
    drawn = case["tree"][0] == "drawn" and drafter
    decode = partial(verify.generate, target, drafter, build, prompt, case["new"], rule, eos)
    out = decode()
    tokens, whole = out.tokens, prompt + out.tokens

    # Lengths and ends
    assert 1 <= len(tokens) <= limit, f"{len(tokens)} tokens, the limit is {limit}"
    assert not {*tokens[:-1]} & {*eos}, f"{tokens} go on after an end of text"
    assert len(tokens) == limit or tokens[-1] in eos, f"{tokens} end before the limit, {limit}"
    assert sum(len(step.new) for step in out.rounds) == len(tokens) - 1
    assert all(step.new for step in out.rounds)

    # Every token is what the model's own forward gives after those before it, to rounding.
    kept = DynamicCache()
    own = model(torch.tensor([whole[:-1]]), past_key_values=kept, use_cache=True)
    score = own.logits[0, len(prompt) - 1:].double()                     # (tokens, V)
    if sampling:
        # (transformers' own top-k and top-p; test_generate.py compares with generate() itself.)
        p_target = rule.p_target(score).double()
        possible = p_target[range(len(tokens)), tokens] > 0
        assert possible.all(), "a token that the target cannot sample"
        noise = []
        for i in range(len(tokens)):
            at = len(prompt) + i
            noise.append(verify.keyed_noise(sampling["seed"], at, score.shape[1], score.device))
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
    if case["twice"]:
        again = decode()
        assert again.tokens == out.tokens, f"a second run: {again.tokens}"
        # The clock decides about priced trees.
        assert again.rounds == out.rounds or case["tree"][0] in ("pct_cost", "graft")
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
TREES = {"glide": cape.cape, "glide-top": cape.beam, "vanilla": cape.chain, "edd": pct.pct,
         "vdm": pct.eagle2, "eagle": priced.PctCost(), "medusa": cape.cape}

@pytest.fixture(scope="module")
def stand_in():
    """The shipped target, and a prompt for it."""
    folder = ROOT / "checkpoints/target"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("Lucy had a paper boat. She wanted to see how far it could")["input_ids"]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), prompt

@pytest.mark.parametrize("name", TREES)
def test_a_shipped_drafter_is_lossless(name, stand_in):
    model, prompt = stand_in
    drafter, _ = families.load(ROOT / "checkpoints" / name, model)
    out = verify.generate(verify.Target(model), drafter, TREES[name], prompt, 24)
    assert_plain(model, prompt, out.tokens, 24)
    assert out.tau > 1.2, "and it drafts something"

def test_an_encoder_decoder_is_lossless():
    """The shipped T5 with a cascade of its stages and Max-Gram, against its own forward."""
    folder = ROOT / "checkpoints/t5"
    load = partial(AutoModelForSeq2SeqLM.from_pretrained, dtype=torch.float32)
    model, base = [load(folder / name).eval() for name in ("target", "base")]
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    ids = tokenizer("Sara wanted to ride a bike like her big sister.")["input_ids"]
    target, stage = targets.any_target(model), targets.any_target(base)
    drafter = cascade.Cascade([stage], gram=maxgram.MaxGram(), vocab=target.vocab)
    targets.with_source(drafter, target)
    out = verify.generate(target, drafter, drafter.chain, ids, 24)
    start = model.generation_config.decoder_start_token_id
    text = torch.tensor([[start, *out.tokens]])
    choices = model(torch.tensor([ids]), decoder_input_ids=text).logits[0].argmax(-1)
    assert out.tokens == choices[:24].tolist() and out.tau > 1.2

def test_a_tree_deeper_than_its_builder_asked_and_than_the_context_holds():
    """GPT-2, whose table of positions ends: up to its last one, and the last token is not read."""
    model = tiny("GPT2LMHeadModel", max_position_embeddings=16, num_hidden_layers=2)

    def build(expand, root):
        """Ask nobody, and propose five tokens of the text, also beyond its limit."""
        after = text[target.cache.length + 1:target.cache.length + 6]
        return cascade.chain_of([root.item(), *after], root.device)

    for prompt in ([1, 2, 3], [1] * 13, [1] * 15, [1] * 16):
        expected = plain(model, prompt, 17 - len(prompt))
        text = prompt + expected + [1] * 9
        for target in (verify.Target(model), verify.Target(model, capacity=100)):
            assert verify.generate(target, None, build, prompt, 20).tokens == expected
