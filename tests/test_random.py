"""Whatever is combined, the output is plain decoding's: targets, drafters, trees and settings drawn at random.

A case is a number.  It draws the class and sizes of a target, a drafter, a tree builder and its settings, how tokens
are chosen, the prompt, the limits and end-of-text tokens; then it decodes, and compares with the model's own uncached
forward over the whole text, of which every token must follow: its argmax, or its draw by the keyed noise.  Of a drawn
chain, whose tokens may be any that the target can draw, the invariants are checked, as for every case: what the cache
holds, that a second run is the same, and that the drafter's state is that of a fresh one which is shown all at once.

    LONG=10000 python -m pytest tests/test_random.py            # so many cases
    python -m pytest "tests/test_random.py::test_a_random_case_equals_plain_decoding[12]"     # this one again
"""
import random
from functools import cache, partial

import pytest
import torch
from conftest import CLASSES, LONG, random_drafter, shared, target_of
from test_cascade import relative
from test_verify import TOLERANCE, HandMade
from transformers import DynamicCache
from transformers.generation import EosTokenCriteria

import cape
import cascade
import maxgram
import pct
import verify
from beyond import graft, priced
from runtime.targets import AnyTarget

COUNT = 100                      # cases of the quick run; with LONG=1 thirty times as many
# Sizes of the targets: (vocabulary, layers, context)
SIZES = [(8, 2, 24), (12, 3, 40), (30, 1, 64)]
NEURAL = ("glide", "glide 2", "vanilla", "edd", "vdm", "eagle", "medusa", "noise", "noise")
CASCADES = ("maxgram", "cascade 1", "cascade 2", "cascade 1, maxgram", "cascade 2, maxgram")
MIXTURES = ("mixture edd", "mixture glide", "mixture eagle", "mixture medusa", "mixture noise", "mixture noise")
DRAFTERS = (*NEURAL, *CASCADES, *MIXTURES, "none")
# Those that branch below the first layer more often
BUILDERS = ("chain", "cape", "fixed", "own_confidence", "pct_cost", "graft") + 2 * ("beam", "pct", "vct", "eagle2")

# ---------------------------------------------------------------- models, made once
@cache
def model_of(name, sizes):
    """A random target, its weights large enough that its distributions are far from uniform."""
    model = shared(name, **dict(zip(("vocab_size", "num_hidden_layers", "max_position_embeddings"), sizes)))
    AnyTarget(model)                                                     # proves it once, at its whole context
    return model

@cache
def stage_of(name, sizes, number):
    """A small model of a cascade, that mostly agrees with the target."""
    return relative(model_of(name, sizes), (0.03, 0.08)[number], number + 1)

@cache
def draft_model_of(name, sizes, kind, *how):
    """A random draft model, and the class that decodes with it."""
    is_glide = kind.startswith(("glide", "vanilla"))
    drafter = random_drafter(model_of(name, sizes), kind, **({"length": 256} if is_glide else {"hidden": 1, **dict(how)}))
    return drafter.model, type(drafter)

class Noise(HandMade):
    """A drafter with another prediction at each position."""

    def expand(self, tokens, parents):
        logits = []
        for parent in parents:
            self.depth.append(self.depth[parent] + 1 if parent >= 0 else 0)
            rng = random.Random(self.t + self.depth[-1])
            logits.append([rng.uniform(-3, 0) for _ in range(self.vocab)])
        return torch.tensor(logits, dtype=torch.float64)

# ---------------------------------------------------------------- drawing a case
def drawn_tree(rng, drafter, sampled):
    """-> a builder and its settings; of a cascade its own chain, too."""
    names = BUILDERS + 5 * ("graft",) * (drafter in MIXTURES) + 3 * ("drawn",) * sampled
    name = rng.choice(names)
    if drafter in CASCADES and name in ("chain", "drawn"):
        return cascade.proposal, {"drawn": name == "drawn"}
    gamma, width, depth, most = rng.randint(1, 7), rng.choice([1, 2, 2, 3, 5]), rng.randint(1, 6), rng.choice([1, 4, 9, 20, 64, 64])
    sizes = tuple(rng.randint(0, 7) for _ in range(rng.randint(1, 4)))
    edges = tuple(sorted(round(rng.random(), 2) for _ in sizes[1:]))
    leaf, small, nodes = rng.choice([0, 0, 0.01, 0.05]), round(10 ** rng.uniform(-3, 0), 4), gamma + rng.randint(0, 20)
    shape, price = {"width": width, "depth": depth, "max_nodes": most}, rng.choice([0, 0.001, 0.01, 0.1])
    return {
        "chain": (cape.chain, {"gamma": gamma}), "drawn": (cape.drawn, {"gamma": gamma}), "beam": (cape.beam, {"gamma": gamma, "width": width}),
        "cape": (cape.cape, {"gamma": gamma, "sizes": sizes, "edges": edges, "max_nodes": nodes}),
        "fixed": (cape.fixed, {"gamma": gamma, "size": rng.randint(0, 9), "max_nodes": nodes}),
        "pct": (pct.pct, {"cost": small, "leaf": leaf, **shape}), "own_confidence": (pct.own_confidence, {"own": small, "leaf": leaf, **shape}),
        "pct_cost": (priced.pct_cost, {"cost": small, "node_price": price, **shape}),
        "graft": (graft.graft, {"cost": small, "node_price": price, "chain": rng.randint(0, 10), **shape}),
        "vct": (pct.vct, {"width": width, "depth": min(depth, {1: 6, 2: 5, 3: 3, 5: 2}[width])}),
        "eagle2": (pct.eagle2, {"total": most, "depth": depth, "expanded": width}),
    }[name]

def drawn_drafter(rng, kind, vocab, layers, context):
    """-> settings of a drafter of this kind."""
    if kind not in CASCADES:
        own = {"edd": {"hidden": rng.randint(1, layers)}, "medusa": {"heads": rng.randint(1, 5)}}.get(kind.removeprefix("mixture "), {})
        # Max-Gram's mixture weight: by length of match, or by the drafter's own probability, too
        mixture = {"confidence": [rng.choice([0, 1, rng.random()]) for _ in range(3)],
                   "agreement": rng.choice([None, (rng.uniform(-3, 3), rng.random(), rng.random())])}
        return {**own, "temperature": rng.choice([1.0, 1.0, 0.5, 2.0]), **(mixture if kind in MIXTURES else {})}
    neural, gram = (1 if "1" in kind else 2 if "2" in kind else 0), kind.endswith("maxgram")
    stages = neural + gram
    K = [[0] * r + [rng.randint(0, 4) for _ in range(stages - r)] for r in range(stages)]
    K[0][rng.randrange(stages)] += 1
    bigram = [rng.randrange(vocab) for _ in range(rng.choice([0, vocab // 2, vocab]))]
    return {"neural": neural, "K": K, "lenience": rng.choice([1.0, 1.0, 1.5, 4.0]), "bigram": bigram if gram else None,
            "capacity": rng.choice([None, None, rng.randint(2, context)])}

def drawn_case(number):
    """Everything that a case decides -> a dict."""
    rng = random.Random(number)
    case = {"case": number, "class": rng.choice(list(CLASSES)), "sizes": rng.choice(SIZES)}
    vocab, layers, context = case["sizes"]
    case["drafter"] = rng.choice(DRAFTERS)
    if layers == 1:
        case["drafter"] = case["drafter"].replace("glide 2", "glide")   # no drafter is deeper than its target
    # How often it is told the right token; None: never
    case["rate"] = rng.choice([None, 0.7, 0.9, 1.0])
    case["settings"] = drawn_drafter(rng, case["drafter"], vocab, layers, context)
    case["sampling"] = None
    if rng.random() < 0.5:
        case["sampling"] = {"temperature": round(rng.uniform(0.3, 1.5), 2), "seed": rng.randrange(1000),
                            "top_k": rng.choice([None, None, rng.randint(1, vocab + 2)]),
                            "top_p": rng.choice([None, None, 1.0, round(rng.uniform(0.05, 1), 2)])}
    case["tree"] = drawn_tree(rng, case["drafter"], case["sampling"] is not None)
    case["capacity"] = rng.choice([None, None, None, rng.randint(2, context)])
    most = case["capacity"] or context
    # Often short, or near the end
    length = rng.choice([*(rng.randint(1, min(12, most)) for _ in range(2)), rng.randint(1, most), rng.randint(max(1, most - 6), most)])
    case["prompt"] = [rng.randrange(1, vocab) for _ in range(length)]
    case["new"] = rng.choice([rng.randint(1, 3), rng.randint(1, 12), rng.randint(6, 24), rng.randint(6, 24)])
    ends = rng.sample(range(vocab), rng.randint(1, max(1, vocab // 5)))
    case["eos"] = rng.choice([[], [], ends[:1], ends])
    case["checked"] = rng.choice([1, 1, 1, 2])
    case["slice"] = rng.choice([512, 512, rng.randint(4, 20)])
    case["twice"] = rng.random() < 0.4
    return case

# ---------------------------------------------------------------- what is watched while it decodes
class Watched:
    """A drafter, of which one round is compared with a fresh one that is shown the whole text at once.

    text, rate: in so many places it is told the token that comes next, so that much of what it drafts is accepted.
    """

    def __init__(self, make, checked, text, rate):
        self.make, self.inner, self.checked = make, make(), checked
        self.text, self.rate = text, rate
        self.needs, self.temperature = self.inner.needs, getattr(self.inner, "temperature", 1.0)
        for name in ("adjust", "suggest", "chain"):
            if hasattr(self.inner, name):
                setattr(self, name, getattr(self.inner, name))

    def reset(self):
        self.round, self.tokens, self.hidden = -1, [], []
        self.inner.reset()

    def begin(self, view):
        self.round += 1
        self.view, self.nodes = view, []                                 # nodes: (token, parent, depth, logits) each
        self.tokens.append(view.tokens)
        self.hidden.append(view.hidden)
        assert sum(map(len, self.tokens)) == view.length, "what it is shown adds up"
        self.inner.begin(view)

    def expand(self, tokens, parents):
        logits = self.inner.expand(tokens, parents)
        told = logits.clone()
        for token, parent, own, new in zip(tokens.tolist(), parents, logits, told):
            depth = self.nodes[parent][2] + 1 if parent >= 0 else 0
            self.nodes.append((token, parent, depth, own))
            at = self.view.length + depth + 1
            rng = random.Random(at)
            # Some have no prediction: their logits are -inf.
            if at < len(self.text) and rng.random() < self.rate and own.max() > -torch.inf:
                new[self.text[at]] = own.max() + rng.choice([-0.5, -0.1, 0.5, 3.0])
        return told

    def keep(self, path):
        if self.round == self.checked and self.nodes:
            # The logits after one of the nodes, against its path alone
            chosen = random.Random(self.view.length).randrange(len(self.nodes))
            path_to_it, node = [], chosen
            while node >= 0:
                token, node, _, _ = self.nodes[node]
                path_to_it.insert(0, token)
            fresh = self.fresh().expand(torch.tensor(path_to_it), list(range(-1, len(path_to_it) - 1)))
            torch.testing.assert_close(self.nodes[chosen][3], fresh[-1], **TOLERANCE)
        self.inner.keep(path)

    def fresh(self):
        drafter = self.make()
        drafter.reset()
        hidden = {k: torch.cat([states[k] for states in self.hidden]) for k in self.view.hidden}
        tokens = torch.cat(self.tokens)
        drafter.begin(self.view._replace(tokens=tokens, hidden=hidden, ids=tokens.tolist()))
        return drafter

# ---------------------------------------------------------------- deciding a case
def drafter_of(case):
    """-> a function that makes the case's drafter, always the same one."""
    kind, how, model = case["drafter"], case["settings"], model_of(case["class"], case["sizes"])
    vocab = model.config.get_text_config().vocab_size

    def make():
        if kind in CASCADES:
            stages = [AnyTarget(stage_of(case["class"], case["sizes"], number), how["capacity"]) for number in range(how["neural"])]
            gram = None if how["bigram"] is None else maxgram.MaxGram(how["bigram"])
            return cascade.Cascade(stages, how["K"], how["lenience"], gram, vocab)
        neural = kind.removeprefix("mixture ")
        if neural == "noise":
            drafter = Noise([], 0)
            drafter.vocab = vocab
        else:
            of_model = [(k, v) for k, v in how.items() if k in ("hidden", "heads")]
            draft_model, drafter_class = draft_model_of(case["class"], case["sizes"], neural, *of_model)
            drafter = drafter_class(draft_model)
        drafter.temperature = how["temperature"]
        if kind in MIXTURES:
            drafter = graft.Mixture(drafter, maxgram.MaxGram(confidence=how["confidence"]), how["agreement"])
        return drafter
    return make

@torch.no_grad()
def run(case):
    """Decode a case and check it -> how many rounds accepted something.  Raises AssertionError."""
    model = model_of(case["class"], case["sizes"])
    target = target_of(model, case["capacity"])
    prompt, sampling, eos, (build, settings) = case["prompt"], case["sampling"], case["eos"], case["tree"]
    limit = min(case["new"], target.remaining(prompt))
    rule = verify.Sampled(**sampling) if sampling else verify.Greedy()
    drafter, text = None, []
    if case["drafter"] == "none":
        build, settings = verify.root_only, {}
    else:
        if case["rate"]:
            text = prompt + verify.generate(target, None, verify.root_only, prompt, case["new"], rule).tokens
        # The KV entries of a second layer depend on when they were drafted: a fresh drafter, shown the same text, has others.
        checked = None if case["drafter"] == "glide 2" else case["checked"]
        drafter = Watched(drafter_of(case), checked, text, case["rate"])
    drawn = build is cape.drawn or settings.get("drawn", False)
    criteria = [EosTokenCriteria(eos)] if eos else []
    decode = partial(verify.generate, target, drafter, partial(build, **settings), prompt, case["new"], rule, criteria)
    out = decode()
    tokens, whole = out.tokens, prompt + out.tokens

    # Lengths and ends
    assert 1 <= len(tokens) <= limit, f"{len(tokens)} tokens, the limit is {limit}"
    assert not {*tokens[:-1]} & {*eos}, f"{tokens} go on after an end of text"
    assert len(tokens) == limit or tokens[-1] in eos, f"{tokens} end before the limit, {limit}"
    assert sum(len(step.new) for step in out.rounds) == len(tokens) - 1 and all(step.new for step in out.rounds)

    # Every token is what the model's own forward gives after those before it, to rounding.
    kept = DynamicCache()
    own = model(torch.tensor([whole[:-1]]), past_key_values=kept, use_cache=True)
    score = own.logits[0, len(prompt) - 1:].double()                     # (tokens, V)
    if sampling:
        p_target = rule.warp(score).double()                             # (an oracle of its own is in test_generate.py)
        assert (p_target[range(len(tokens)), tokens] > 0).all(), "a token that the target cannot draw"
        noise = [verify.keyed_noise(sampling["seed"], len(prompt) + i, score.shape[1], score.device) for i in range(len(tokens))]
        score = p_target.log() - torch.stack(noise).log()
    # Of a drawn chain the first token alone comes by keyed noise.
    for i, token in enumerate(tokens[:1] if drawn else tokens):
        assert score[i].max() - score[i, token] < 1e-4, f"token {i} of {tokens} should be {score[i].argmax()}"

    # The cache holds the text, and beyond an end or the limit what was accepted.
    n = min(len(target.ids), len(whole) - 1)
    assert target.cache.length == len(target.ids) >= len(whole) - 1 and target.ids[:n] == whole[:n]
    for number, layer in enumerate(kept.layers):
        for held, expected in zip(target.cache.kv[number], (layer.keys, layer.values)):
            torch.testing.assert_close(held[:, :, :n], expected[:, :, :n], **TOLERANCE)
    if case["twice"]:
        again = decode()
        assert again.tokens == out.tokens and again.rounds == out.rounds, f"a second run: {again.tokens}"
    return sum(len(step.path) > 1 for step in out.rounds)

ACCEPTED = []

@pytest.mark.parametrize("number", range(max(COUNT, LONG, 30 * COUNT * (LONG == 1))))
def test_a_random_case_equals_plain_decoding(number, monkeypatch):
    case = drawn_case(number)
    print(case)                                                          # pytest shows it where the case fails
    monkeypatch.setattr(verify, "CHUNK", case["slice"])
    ACCEPTED.append(run(case))

def test_drafts_were_accepted():
    """Or there was nothing to test."""
    assert sum(ACCEPTED) >= len(ACCEPTED) / 2
