"""Whatever is combined, the output is plain decoding's: targets, drafters, trees and settings drawn at random.

A case is a number.  It draws the class and sizes of a target, a drafter, a tree builder and its settings, how tokens
are chosen, static shapes, the prompt, the limits and end-of-text tokens; then it decodes, and compares with the model's
own uncached forward over the whole text, of which every token must follow: its argmax, or its draw by the keyed noise.
Of a drawn chain, whose tokens may be any that the target can draw, the invariants are checked, as for every case: what
the cache holds, what each round gave, that a second run is the same, and that the drafter's state is that of a fresh
one which is shown all at once.

    LONG=10000 python -m pytest tests/test_random.py            # so many cases
    python -m pytest "tests/test_random.py::test_a_random_case_equals_plain_decoding[12]"     # this one again
"""
import random
from functools import cache, partial

import pytest
import torch
from conftest import CLASSES, LONG, random_drafter, shared, target_of
from test_cascade import relative
from test_verify import HandMade
from transformers import DynamicCache
from transformers.generation import EosTokenCriteria

import cape
import cascade
import maxgram
import pct
import verify
from beyond import graft, priced
from runtime import static as graphs
from runtime.targets import AnyTarget

COUNT = 120                      # cases of the quick run; with LONG=1 twenty-five times as many
# Sizes of the targets: (vocabulary, layers, context)
SIZES = [(8, 2, 24), (12, 3, 40), (30, 1, 64)]
GRAMS = ("maxgram", "cascade 1", "cascade 2", "cascade 1, maxgram", "cascade 2, maxgram")
BESIDE = ("beside edd", "beside glide", "beside eagle", "beside medusa", "beside noise", "beside noise")
DRAFTERS = ("glide", "glide 2", "vanilla", "vanilla 2", "edd", "vdm", "eagle", "medusa", *GRAMS, *BESIDE, "noise", "noise", "none")

# ---------------------------------------------------------------- models, made once
@cache
def model_of(name, sizes):
    """A random target, its weights large enough that its distributions are far from uniform."""
    model = shared(name, **dict(zip(("vocab_size", "num_hidden_layers", "max_position_embeddings"), sizes)))
    AnyTarget(model)                                                     # proves it once, with room for that
    return model

@cache
def stage_of(name, sizes, number):
    """A small model of a cascade, that mostly agrees with the target."""
    return relative(model_of(name, sizes), (0.03, 0.08)[number], number + 1)

@cache
def draft_model_of(name, sizes, kind, *how):
    """A random draft model, and the class that decodes with it."""
    model, is_glide = model_of(name, sizes), kind.startswith(("glide", "vanilla"))
    drafter = random_drafter(model, kind, **({"length": 256} if is_glide else {"hidden": 1, **dict(how)}))
    return drafter.model, type(drafter)

class Noise(HandMade):
    """A drafter that says something else at each position."""

    def expand(self, tokens, parents):
        rows = []
        for parent in parents:
            self.depth.append(self.depth[parent] + 1 if parent >= 0 else 0)
            rng = random.Random(self.t + self.depth[-1])
            rows.append([rng.uniform(-3, 0) for _ in range(self.vocab)])
        return torch.tensor(rows, dtype=torch.float64)

# ---------------------------------------------------------------- drawing a case
def drawn_tree(rng, drafter, sampled):
    """-> (name, settings) of a builder: of a cascade its own chain, too."""
    # Those that branch below the first layer more often
    names = ["chain", "cape", "fixed", "own_confidence", "pct_cost"] + ["beam", "pct", "vct", "eagle2"] * 2 + ["graft"] * (6 if drafter in BESIDE else 1)
    name = rng.choice(names + ["drawn"] * 3 * sampled)
    if drafter in GRAMS and name in ("chain", "drawn"):
        return "proposal", {"drawn": name == "drawn"}
    gamma, width, depth, most = rng.randint(1, 7), rng.choice([1, 2, 2, 3, 5]), rng.randint(1, 6), rng.choice([1, 4, 9, 20, 64, 64])
    sizes = tuple(rng.randint(0, 7) for _ in range(rng.randint(1, 4)))
    edges = tuple(sorted(round(rng.random(), 2) for _ in sizes[1:]))
    leaf, small, room = rng.choice([0, 0, 0.01, 0.05]), round(10 ** rng.uniform(-3, 0), 4), gamma + rng.randint(0, 20)
    shape = {"width": width, "depth": depth, "max_nodes": most}
    return name, {"chain": {"gamma": gamma}, "drawn": {"gamma": gamma}, "beam": {"gamma": gamma, "width": width},
        "cape": {"gamma": gamma, "sizes": sizes, "edges": edges, "max_nodes": room}, "fixed": {"gamma": gamma, "size": rng.randint(0, 9), "max_nodes": room},
        "pct": {"cost": small, "leaf": leaf, **shape}, "own_confidence": {"own": small, "leaf": leaf, **shape},
        "pct_cost": {"cost": small, "node_price": rng.choice([0, 0.001, 0.01, 0.1]), **shape},
        "graft": {"cost": small, "node_price": rng.choice([0, 0.001, 0.01, 0.1]), "chain": rng.randint(0, 10), **shape},
        "vct": {"width": width, "depth": min(depth, {1: 6, 2: 5, 3: 3, 5: 2}[width])}, "eagle2": {"total": most, "depth": depth, "expanded": width},
    }[name]

def builder(name, settings):
    if name == "proposal":
        return partial(cascade.proposal, **settings)
    return partial(next(vars(module)[name] for module in (cape, pct, priced, graft) if name in vars(module)), **settings)

def drawn_drafter(rng, kind, vocab, layers, context):
    """-> settings of a drafter of this kind."""
    temperature = {"temperature": rng.choice([1.0, 1.0, 0.5, 2.0])}
    if kind not in GRAMS:
        more = {"edd": {"hidden": rng.randint(1, layers)}, "medusa": {"heads": rng.randint(1, 5)}}
        # How far Max-Gram's words are trusted: by length of match, or by what the drafter says, too
        beside = {"confidence": [rng.choice([0, 1, rng.random()]) for _ in range(3)],
                  "agreement": rng.choice([None, (rng.uniform(-3, 3), rng.random(), rng.random())])}
        return {**more.get(kind.removeprefix("beside "), {}), **temperature, **(beside if kind in BESIDE else {})}
    neural, gram = (1 if "1" in kind else 2 if "2" in kind else 0), kind.endswith("maxgram")
    stages = neural + gram
    K = [[0] * r + [rng.randint(0, 4) for _ in range(stages - r)] for r in range(stages)]
    K[0][rng.randrange(stages)] += 1
    bigram = [rng.randrange(vocab) for _ in range(rng.choice([0, vocab // 2, vocab]))]
    return {"neural": neural, "K": K, "lenience": rng.choice([1.0, 1.0, 1.5, 4.0]), "bigram": bigram if gram else None,
            "stop": rng.choice(["own", "sum"]), "capacity": rng.choice([None, None, rng.randint(2, context)])}

def drawn_case(number):
    """Everything that a case decides -> a dict."""
    rng = random.Random(number)
    case = {"case": number, "class": rng.choice(list(CLASSES)), "sizes": rng.choice(SIZES)}
    vocab, layers, context = case["sizes"]
    case["drafter"] = rng.choice(DRAFTERS)
    if layers == 1 and case["drafter"].startswith(("glide", "vanilla")):
        case["drafter"] = case["drafter"].removesuffix(" 2")   # no drafter is deeper than its target
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
    case["form"] = rng.choice([list, torch.tensor, lambda ids: torch.tensor([ids])])
    case["new"] = rng.choice([rng.randint(1, 3), rng.randint(1, 12), rng.randint(6, 24), rng.randint(6, 24)])
    ends = rng.sample(range(vocab), rng.randint(1, max(1, vocab // 5)))
    case["eos"] = rng.choice([[], [], ends[:1], ends])
    case["checked"] = rng.choice([1, 1, 1, 2])
    case["slice"] = rng.choice([512, 512, rng.randint(4, 20)])
    case["twice"] = rng.random() < 0.4
    case["static"] = rng.choice([None, None, None, {"keys": 8}, {"rows": 64}, {"rows": 2, "keys": 1}])
    return case

# ---------------------------------------------------------------- what is watched while it decodes
class Watched:
    """A drafter, of which one round is compared with a fresh one that is shown the whole text at once.

    text, rate: in so many places it is told the token that comes next, so that much of what it drafts is accepted.
    """

    def __init__(self, make, checked, text, rate, static):
        self.make, self.inner, self.checked = make, make(), checked
        self.text, self.rate = text, rate
        self.needs, self.temperature = self.inner.needs, getattr(self.inner, "temperature", 1.0)
        if static:
            graphs.static(getattr(self.inner, "drafter", self.inner), **static)
        if hasattr(self.inner, "chain"):
            self.chain = self.own_chain
        if hasattr(self.inner, "suggest"):
            self.suggest = self.inner.suggest

    def reset(self):
        self.round, self.tokens, self.hidden = -1, [], []
        self.inner.reset()

    def begin(self, view):
        self.round += 1
        self.view, self.nodes = view, []                                 # nodes: (token, parent, depth, row) each
        self.tokens.append(view.tokens)
        self.hidden.append(view.hidden)
        assert sum(map(len, self.tokens)) == view.length, "what it is shown adds up"
        self.inner.begin(view)

    def expand(self, tokens, parents):
        rows = self.inner.expand(tokens, parents)
        told = rows.clone()
        for token, parent, row, new in zip(tokens.tolist(), parents, rows, told):
            depth = self.nodes[parent][2] + 1 if parent >= 0 else 0
            self.nodes.append((token, parent, depth, row))
            at = self.view.length + depth + 1
            rng = random.Random(at)
            # Some cannot go on: their rows are -inf.
            if at < len(self.text) and rng.random() < self.rate and row.max() > -torch.inf:
                new[self.text[at]] = row.max() + rng.choice([-0.5, -0.1, 0.5, 3.0])
        return told

    def own_chain(self, root, most, warp=None, generator=None):
        tokens, p_draft = self.inner.chain(root, most, warp, generator)
        assert len(tokens) <= most
        if self.round == self.checked and generator is None:
            assert tokens == self.fresh().chain(root, most, warp)[0], "the chain is a fresh drafter's"
        return tokens, p_draft

    def keep(self, path):
        if self.round == self.checked and self.nodes:
            # The row of one of the nodes, against its path alone
            chosen = random.Random(self.view.length).randrange(len(self.nodes))
            line, place = [], chosen
            while place >= 0:
                token, place, _, _ = self.nodes[place]
                line.insert(0, token)
            rows = self.fresh().expand(torch.tensor(line), list(range(-1, len(line) - 1)))
            same(self.nodes[chosen][3], rows[-1], "the drafter's row and a fresh one's")
        self.inner.keep(path)

    def fresh(self):
        drafter = self.make()
        drafter.reset()
        hidden = {k: torch.cat([rows[k] for rows in self.hidden]) for k in self.view.hidden}
        tokens = torch.cat(self.tokens)
        drafter.begin(self.view._replace(tokens=tokens, hidden=hidden, ids=tokens.tolist()))
        return drafter

def same(found, expected, what):
    """Norms and rotary tables of a float64 model are float32."""
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4, msg=lambda why: f"{what} differ: {why}")

# ---------------------------------------------------------------- deciding a case
def drafter_of(case):
    """-> a function that makes the case's drafter, always the same one."""
    kind, how, model = case["drafter"], case["settings"], model_of(case["class"], case["sizes"])
    vocab = model.config.get_text_config().vocab_size

    def make():
        if kind in GRAMS:
            models = [stage_of(case["class"], case["sizes"], number) for number in range(how["neural"])]
            stages = [AnyTarget(stage, how["capacity"]) for stage in models]
            gram = None if how["bigram"] is None else maxgram.MaxGram(how["bigram"])
            return cascade.Cascade(stages, how["K"], how["lenience"], gram, vocab, how["stop"])
        neural = kind.removeprefix("beside ")
        if neural == "noise":
            drafter = Noise([], 0)
            drafter.vocab = vocab
        else:
            of_model = [(k, v) for k, v in how.items() if k in ("hidden", "heads")]
            draft_model, drafter_class = draft_model_of(case["class"], case["sizes"], neural, *of_model)
            drafter = drafter_class(draft_model)
        drafter.temperature = how["temperature"]
        if kind in BESIDE:
            drafter = graft.Beside(drafter, maxgram.MaxGram(confidence=how["confidence"]), how["agreement"])
        return drafter
    return make

@torch.no_grad()
def run(case):
    """Decode a case and check it -> how many rounds accepted something.  Raises AssertionError."""
    model = model_of(case["class"], case["sizes"])
    target = target_of(model, case["capacity"])
    prompt, sampling, eos, (name, settings) = case["prompt"], case["sampling"], case["eos"], case["tree"]
    limit = min(case["new"], target.remaining(prompt))
    rule = verify.Sampled(**sampling) if sampling else verify.Greedy()
    drafter, build, text = None, verify.root_only, []
    if case["drafter"] != "none":
        if case["rate"]:
            text = prompt + verify.generate(target, None, verify.root_only, prompt, case["new"], rule).tokens
        # Rows of a second layer depend on when they were drafted: a fresh one, shown the same text, has others.
        checked = None if case["drafter"] == "glide 2" else case["checked"]
        drafter, build = Watched(drafter_of(case), checked, text, case["rate"], case["static"]), builder(name, settings)
    drawn = drafter and (name == "drawn" or settings.get("drawn", False))
    target = graphs.static(target, **case["static"]) if case["static"] else target
    criteria = [EosTokenCriteria(eos)] if eos else []
    decode = partial(verify.generate, target, drafter, build, case["form"](prompt), case["new"], rule, criteria)
    out = decode()
    tokens, whole = out.tokens, prompt + out.tokens

    # Lengths, ends, what each round says of itself
    runs = [len(step.new) for step in out.rounds]
    assert 1 <= len(tokens) <= limit, f"{len(tokens)} tokens, the limit is {limit}"
    assert not {*tokens[:-1]} & {*eos}, f"{tokens} go on after an end of text"
    assert len(tokens) == limit or tokens[-1] in eos, f"{tokens} end before the limit, {limit}"
    assert sum(runs) == len(tokens) - 1 and all(runs)
    for step in out.rounds:
        assert step.path[0] == 0 and [step.parents[node] for node in step.path[1:]] == step.path[:-1], "a path from the root"

    # Every token is what the model's own forward says after those before it, to rounding.
    kept = DynamicCache()
    own = model(torch.tensor([whole[:-1]]), past_key_values=kept, use_cache=True)
    score = own.logits[0, len(prompt) - 1:].double()                     # (tokens, V)
    if sampling:
        p_target = rule.warp(score).double()                             # (an oracle of its own is in test_verify.py)
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
            same(held[:, :, :n], expected[:, :, :n], f"KV entries of layer {number}")
    if case["twice"]:
        again = decode()
        assert again.tokens == out.tokens and again.rounds == out.rounds, f"a second run: {again.tokens}"
    return sum(len(step.path) > 1 for step in out.rounds)

ACCEPTED = []

@pytest.mark.parametrize("number", range(max(COUNT, LONG, 25 * COUNT * (LONG == 1))))
def test_a_random_case_equals_plain_decoding(number, monkeypatch):
    case = drawn_case(number)
    print(case)                                                          # pytest shows it where the case fails
    monkeypatch.setattr(verify, "CHUNK", case["slice"])
    monkeypatch.setattr(AnyTarget, "chunk_size", case["slice"])
    ACCEPTED.append(run(case))

def test_drafts_were_accepted():
    """Or there was nothing to test."""
    assert sum(ACCEPTED) >= len(ACCEPTED) / 2
