"""Whatever is combined, the output is plain decoding's: targets, drafters, trees and settings drawn at random.

A case is a number.  It draws the class and sizes of a target, a drafter, a tree builder and its settings, how tokens
are chosen, static shapes, the prompt, the limits and end-of-text tokens; then it decodes, and compares with the model's
own uncached forward over the whole text, of which every token must follow: its argmax, or its draw by the keyed noise.
Of a drawn chain, whose tokens may be any that the target can draw, the invariants are checked, as for every case: what
the cache holds, what was streamed, what each round gave, how deep its tree was, what builders see, that a second run is
the same, and that the drafter's state is that of a fresh one which is shown all at once.

    python tests/test_random.py 10000 --seed 5      # so many cases; prints the numbers of those that fail
    python tests/test_random.py --case 5000123      # that one again
    LONG=10000 python -m pytest tests/test_random.py -s
"""
import argparse
import random
import sys
import traceback
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import families
import torch
from conftest import CLASSES, LONG, ROOT, random_drafter, shared, target_of
from test_cascade import relative
from transformers import DynamicCache
from transformers.generation import EosTokenCriteria

import cape
import cascade
import maxgram
import pct
import verify
from beyond import graft, priced
from runtime import graphs
from runtime.families import AnyTarget

COUNT = 120                      # cases of the quick run; with LONG=1 ten times as many
OF_A_SEED = 1_000_000            # a case's number is seed * OF_A_SEED + its place
BEYOND = 3000                    # places from which on one case in four takes a family of tests/tools/families.py
# Sizes of the targets: (vocabulary, layers, context)
SIZES = [(8, 2, 24), (12, 3, 40), (30, 1, 64)]
GRAMS = ("maxgram", "cascade 1", "cascade 2", "cascade 1, maxgram", "cascade 2, maxgram")
BESIDE = ("beside edd", "beside glide", "beside eagle", "beside medusa", "beside noise", "beside noise")
DRAFTERS = ("glide", "glide 2", "vanilla", "vanilla 2", "edd", "vdm", "eagle", "medusa", *GRAMS, *BESIDE, "noise", "noise", "none")

# ---------------------------------------------------------------- models, made once
@cache
def model_of(name, sizes):
    """A random target, its weights large enough that its distributions are far from uniform."""
    if sizes is None:
        return families.make(name)
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
    if sizes is None:
        drafter = families.glide_drafter(model, None) if is_glide else families.edd_drafter(model, None, kind)
    elif is_glide:
        drafter = random_drafter(model, kind, length=256)
    else:
        drafter = random_drafter(model, kind, **{"hidden": 1, **dict(how)})
    return drafter.model, type(drafter)

class Noise(families.HalfRight):
    """A drafter that says something else at each position."""

    def expand(self, tokens, parents):
        rows = []
        for parent in parents:
            self.depth.append(self.depth[parent] + 1 if parent >= 0 else 0)
            rng = random.Random(self.t + self.depth[-1])
            rows.append([rng.uniform(-3, 0) for _ in range(self.text)])          # (text: how many ids there are)
        return torch.tensor(rows, dtype=torch.float64)

    def keep(self, path):
        assert path == sorted(set(path)) and path[:1] == list(range(min(1, len(self.depth))))
        assert all(node < len(self.depth) for node in path)

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
    function = cascade.proposal if name == "proposal" else getattr(cape, name, None) or getattr(pct, name, None) or getattr(priced, name, None) or getattr(graft, name)
    return partial(function, **settings)

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
    if number % OF_A_SEED >= BEYOND and rng.random() < 0.25:
        case |= {"class": rng.choice(families.names()), "sizes": None}
        vocab, layers, context = families.VOCAB, 1, families.CONTEXT
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
    if case["sizes"] is None:
        # Some families count positions without padding tokens, their token 0: the text ends there.
        case["eos"] = [0, *ends]
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

    def check(self, kv, states):
        """What it was shown is the model's own: kv [(K, V)] and states [(n, D)] of the whole text."""
        if self.round < 0:
            return
        for layer, rows in self.view.kv.items():
            for shown, own in zip(rows, kv[layer]):
                same(shown, own[:, :, :self.view.length], f"keys and values shown of layer {layer}")
        for k in self.view.hidden:
            shown = torch.cat([rows[k] for rows in self.hidden])
            same(shown, states[k][:len(shown)], f"hidden states shown of layer {k}")

def same(found, expected, what):
    """Norms and rotary tables of a float64 model are float32."""
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4, msg=lambda why: f"{what} differ: {why}")

class Expand(verify.Expand):
    """What builders see: rows that sum to one, or to zero."""

    def __init__(self, *given):
        super().__init__(*given)
        self.rows = []

    def __call__(self, tokens, parents):
        rows = super().__call__(tokens, parents)
        total = rows.double().sum(-1)
        assert (rows >= 0).all() and ((total == 0) | ((total - 1).abs() < 1e-5)).all(), f"rows sum to {total}"
        self.rows += rows
        return rows

def grown(build, expand, root):
    """build(expand, root), whose nodes are possible below those that the drafter was asked about, or Max-Gram's own proposals."""
    tree, paths, rows = build(expand, root), [], {}
    for token, parent, row in zip(torch.cat([root[:0], *expand.tokens]).tolist(), expand.parents, expand.rows):
        paths.append((paths[parent] if parent >= 0 else ()) + (token,))
        rows[paths[-1]] = row
    paths = [(root.item(),)]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist()):
        above = paths[parent]
        if above in rows or not hasattr(expand.drafter, "suggest"):
            offered = not rows or rows[above][token] > 0
        else:
            words, lengths = expand.drafter.inner.gram.propose(above, 1)
            offered = words == [token] and lengths[0] >= graft.LEAST
        assert 0 <= parent < len(paths) and offered, f"no drafter offered {token} below {above}"
        paths.append(above + (token,))
    assert len(paths[-1]) == 1 or max(map(len, paths)) - 1 <= expand.remaining, "no node is deeper than tokens may follow"
    return tree

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
            drafter = Noise(vocab)
        else:
            of_model = [(k, v) for k, v in how.items() if k in ("hidden", "heads")]
            draft_model, drafter_class = draft_model_of(case["class"], case["sizes"], neural, *of_model)
            drafter = drafter_class(draft_model)
        drafter.temperature = how["temperature"]
        if kind in BESIDE:
            drafter = graft.Beside(drafter, maxgram.MaxGram(confidence=how["confidence"]), how["agreement"])
        return drafter
    return make

def cut(tokens, eos):
    """tokens up to the first end of text."""
    ends = [i + 1 for i, token in enumerate(tokens) if token in eos]
    return tokens[:ends[0]] if ends else tokens

@torch.no_grad()
def run(case):
    """Decode a case and check it -> how many rounds accepted something.  Raises AssertionError."""
    model = model_of(case["class"], case["sizes"])
    target = (target_of if case["sizes"] else AnyTarget)(model, case["capacity"])
    if model.dtype != torch.float64:
        raise verify.UserError(f"{case['class']} knows no float64, where nothing ties")
    prompt, sampling, eos, (name, settings) = case["prompt"], case["sampling"], case["eos"], case["tree"]
    limit = min(case["new"], target.remaining(prompt))
    rule = verify.Sampled(**sampling) if sampling else verify.Greedy()
    undrafted, drafter, build, text = None, None, verify.root_only, []
    if case["drafter"] != "none":
        if case["rate"]:
            undrafted = verify.generate(target, None, verify.root_only, prompt, case["new"], rule).tokens
            text = prompt + undrafted
        # Rows of a second layer depend on when they were drafted: a fresh one, shown the same text, has others.
        checked = None if case["drafter"] == "glide 2" else case["checked"]
        drafter, build = Watched(drafter_of(case), checked, text, case["rate"], case["static"]), partial(grown, builder(name, settings))
    drawn = drafter and (name == "drawn" or settings.get("drawn", False))
    target = graphs.static(target, **case["static"]) if case["static"] else target
    criteria, told = [EosTokenCriteria(eos)] if eos else [], []
    decode = partial(verify.generate, target, drafter, build, case["form"](prompt), case["new"], rule, criteria)
    out = decode(SimpleNamespace(put=told.append, end=lambda: told.append(None)))
    whole = prompt + (tokens := out.tokens)

    # Lengths, ends, what was streamed, what each round says of itself
    runs = [len(step.new) for step in out.rounds]
    assert 1 <= len(tokens) <= limit, f"{len(tokens)} tokens, the limit is {limit}"
    assert cut(tokens, eos) == tokens, f"{tokens} go on behind an end of text"
    assert len(tokens) == limit or tokens[-1] in eos, f"{tokens} end before the limit, {limit}"
    assert told[0].tolist() == [prompt] and told[-1] is None and torch.cat(told[1:-1]).tolist() == tokens and len(told) == 3 + len(out.rounds)
    assert sum(runs) == len(tokens) - 1 and all(runs)
    for step in out.rounds:
        assert step.path[0] == 0 and [step.parents[node] for node in step.path[1:]] == step.path[:-1], "a path from the root"

    # Every token is what the model's own forward says after those before it, to rounding.
    kept = DynamicCache() if case["sizes"] else None
    own = model(torch.tensor([whole[:-1]]), past_key_values=kept, use_cache=kept is not None, output_hidden_states=kept is not None)
    score = own.logits[0, len(prompt) - 1:].double()                     # (tokens, V)
    if sampling:
        p_target = rule.warp(score).double()                             # (an oracle of its own is in test_verify.py)
        assert (p_target[range(len(tokens)), tokens] > 0).all(), "a token that the target cannot draw"
        noise = [verify.keyed_noise(sampling["seed"], len(prompt) + i, score.shape[1], score.device) for i in range(len(tokens))]
        score = p_target.log() - torch.stack(noise).log()
    # Of a drawn chain the first token alone comes by keyed noise.
    for i, token in enumerate(tokens[:1] if drawn else tokens):
        assert score[i].max() - score[i, token] < 1e-4, f"token {i} of {tokens} should be {score[i].argmax()}"
    best = score.topk(2).values
    if undrafted and not drawn and (best[:, 0] - best[:, 1]).min() > 1e-4:
        assert tokens == cut(undrafted, eos), f"{tokens}, and without a drafter {undrafted}"

    # The cache holds the text, and beyond an end or the limit what was accepted.
    n = min(len(target.ids), len(whole) - 1)
    assert target.cache.length == len(target.ids) >= len(whole) - 1 and target.ids[:n] == whole[:n]
    if kept is not None:
        kv = [(layer.keys, layer.values) for layer in kept.layers]
        for layer, rows in enumerate(kv):
            for held, expected in zip(target.cache.kv[layer], rows):
                same(held[:, :, :n], expected[:, :, :n], f"cached rows of layer {layer}")
        if drafter:
            drafter.check(kv, [states[0] for states in own.hidden_states])
    if case["twice"]:
        again = decode()
        assert again.tokens == out.tokens and again.rounds == out.rounds, f"a second run: {again.tokens}"
    return sum(len(step.path) > 1 for step in out.rounds)

def outcome(number):
    """-> (the rounds that accepted something, None), or (0, what is wrong), or (None, why a family was refused)."""
    case, own = {"case": number}, (verify.Expand, verify.CHUNK, AnyTarget.chunk_size)
    try:
        case = drawn_case(number)
        verify.Expand, verify.CHUNK, AnyTarget.chunk_size = Expand, case["slice"], case["slice"]
        return run(case), None
    except Exception as why:                                             # noqa: BLE001
        settings = "\n".join(f"    {key}: {value}" for key, value in case.items())
        lines = traceback.format_exc().strip().splitlines()
        place = Path(traceback.extract_tb(why.__traceback__)[-1].filename)
        ours = isinstance(why, verify.UserError) or isinstance(why, ValueError) and place.parent in (ROOT, ROOT / "runtime")
        return None if ours and case.get("sizes", 0) is None else 0, f"case {number}\n{settings}\n    " + "\n    ".join(lines[-16:])
    finally:
        verify.Expand, verify.CHUNK, AnyTarget.chunk_size = own

def check(count, seed):
    """Run `count` cases, print those that fail -> (accepted rounds, what is wrong with each that fails)."""
    accepted, refused, wrong = 0, 0, []
    for place in range(count):
        rounds, why = outcome(seed * OF_A_SEED + place)
        accepted += rounds or 0
        refused += rounds is None
        if why and rounds is not None:
            wrong.append(why)
            print(why, flush=True)
    print(f"{count} cases of seed {seed}: {len(wrong)} failed; {accepted} rounds accepted drafts; {refused} cases were refused", flush=True)
    return accepted, wrong

def test_random_cases_equal_plain_decoding():
    count = max(COUNT, LONG, 10 * COUNT * (LONG == 1))
    accepted, wrong = check(count, 0)
    assert accepted > count / 2, "drafts are accepted, or there is nothing to test"
    assert not wrong, f"{len(wrong)} of {count} cases failed; the first is {wrong[0]}"

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("count", nargs="?", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    a = parser.parse_args()
    if a.case is None:
        _, wrong = check(a.count, a.seed)
        return bool(wrong)
    _, why = outcome(a.case)
    print(why or f"case {a.case} holds: {drawn_case(a.case)}")
    return bool(why)

if __name__ == "__main__":
    sys.exit(main())
