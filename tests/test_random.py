"""Whatever is combined, the output is plain decoding's: targets, drafters, trees and settings drawn at random.

A case is a number.  It draws the class and sizes of a target, a drafter, a tree builder and its settings, how tokens
are chosen, the prompt, the limits and end-of-text tokens; then it decodes, and compares with the model's own uncached
forward over the whole text, of which every token must follow: its argmax, or its draw by the keyed noise.  Of a drawn
chain, whose tokens may be any that the target can draw, the invariants are checked, as for every case: what the cache
holds, what was told, what each round gave, how deep its tree was, what builders see, that a second run
is the same, and that the drafter's state is that of a fresh one which is shown all at once.

    python tests/test_random.py 10000 --seed 5      # so many cases; prints the numbers of those that fail
    python tests/test_random.py --case 5000123      # that one again
    LONG=10000 python -m pytest tests/test_random.py -s
"""
import argparse
import os
import random
import sys
import traceback
from functools import lru_cache, partial
from pathlib import Path

import torch
from conftest import CLASSES, ROOT, tiny
from test_cascade import relative
from test_edd import random_edd
from test_glide import random_glide
from transformers import DynamicCache

import cape
import cascade
import edd
import glide
import maxgram
import pct
import verify

try:
    import families
except ImportError:
    families = None

COUNT = 400                      # cases of the default run
OF_A_SEED = 1_000_000            # a case's number is seed * OF_A_SEED + its place
BEYOND = 3000                    # places from which on one case in four takes a family of tests/families.py
# Sizes of the targets: (vocabulary, layers, context)
SIZES = [(8, 2, 24), (12, 3, 40), (30, 1, 64)]
MOST_NODES = 80                  # of a tree, as far as settings can promise it
NEURAL = ("glide", "glide 2", "vanilla", "vanilla 2", "edd", "vdm", "eagle", "medusa")
GRAMS = ("maxgram", "cascade 1", "cascade 2", "cascade 1, maxgram", "cascade 2, maxgram")
DRAFTERS = (*NEURAL, *GRAMS, "noise", "noise", "none")
# Its rows depend on when they were drafted: a fresh one, shown the same text, has others.
DELAYED = ("glide 2",)


# ---------------------------------------------------------------- models, made once
@lru_cache(maxsize=None)
def model_of(name, sizes):
    """A random target, its weights large enough that its distributions are far from uniform."""
    if sizes is None:
        return families.make(name)
    vocab, layers, context = sizes
    return tiny(name, vocab_size=vocab, num_hidden_layers=layers, max_position_embeddings=context)


@lru_cache(maxsize=None)
def stage_of(name, sizes, number):
    """A small model of a cascade, that mostly agrees with the target."""
    return relative(model_of(name, sizes), (0.03, 0.08)[number], number + 1)


@lru_cache(maxsize=None)
def draft_model_of(name, sizes, kind, *how):
    """A random draft model of NEURAL."""
    model = model_of(name, sizes)
    if kind.startswith(("glide", "vanilla")):
        layers = 2 if kind.endswith("2") else 1
        return random_glide(model, layers, kind.startswith("glide"), length=256)
    return random_edd(model, **{"hidden": 1, **dict(how), **edd.VARIANTS[kind]})


class Noise:
    """A drafter that says something else at each position."""
    needs = {}

    def __init__(self, vocab):
        self.vocab = vocab

    def reset(self):
        pass

    def begin(self, view):
        self.t, self.depth = view.length, []

    def keep(self, path):
        assert path == sorted(set(path)) and path[:1] == list(range(min(1, len(self.depth))))
        assert all(node < len(self.depth) for node in path)

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
    names = ["chain", "cape", "fixed", "own_confidence", "pct_cost"] + ["beam", "pct", "vct", "eagle2"] * 2
    names += ["drawn"] * 3 * sampled
    name = rng.choice(names)
    if drafter in GRAMS and name in ("chain", "drawn"):
        return "proposal", {"drawn": name == "drawn"}
    while True:
        gamma = rng.randint(1, 7)
        sizes = tuple(rng.randint(0, 7) for _ in range(rng.randint(1, 4)))
        edges = tuple(sorted(round(rng.random(), 2) for _ in sizes[1:]))
        width, depth, most = rng.choice([1, 2, 2, 3, 5]), rng.randint(1, 6), rng.choice([1, 4, 9, 20, 64, 64])
        leaf = rng.choice([0, 0, 0.01, 0.05])
        small = round(10 ** rng.uniform(-3, 0), 4)
        settings = {
            "chain": {"gamma": gamma}, "drawn": {"gamma": gamma},
            "cape": {"gamma": gamma, "sizes": sizes, "edges": edges, "max_nodes": gamma + rng.randint(0, 20)},
            "fixed": {"gamma": gamma, "size": rng.randint(0, 9), "max_nodes": gamma + rng.randint(0, 20)},
            "beam": {"gamma": gamma, "width": width},
            "pct": {"cost": small, "width": width, "depth": depth, "leaf": leaf, "max_nodes": most},
            "own_confidence": {"own": small, "width": width, "depth": depth, "leaf": leaf, "max_nodes": most},
            "pct_cost": {"cost": small, "node_price": rng.choice([0, 0.001, 0.01, 0.1]), "width": width,
                         "depth": depth, "max_nodes": most},
            "vct": {"width": width, "depth": depth},
            "eagle2": {"total": most, "depth": depth, "expanded": width},
        }[name]
        if builder(name, settings).func.bounds(**settings)[0] <= MOST_NODES:
            return name, settings


def builder(name, settings):
    function = cascade.proposal if name == "proposal" else getattr(cape, name, None) or getattr(pct, name)
    return partial(function, **settings)


def drawn_drafter(rng, kind, vocab, layers, context):
    """-> settings of a drafter of this kind."""
    temperature = {"temperature": rng.choice([1.0, 1.0, 0.5, 2.0])}
    if kind == "edd":
        return {"hidden": rng.randint(1, layers), **temperature}
    if kind == "medusa":
        return {"heads": rng.randint(1, 5), **temperature}
    if kind == "none":
        return {}
    if kind not in GRAMS:
        return temperature
    neural, gram = (1 if "1" in kind else 2 if "2" in kind else 0), kind.endswith("maxgram")
    stages = neural + gram
    K = [[0] * r + [rng.randint(0, 4) for _ in range(stages - r)] for r in range(stages)]
    K[0][rng.randrange(stages)] += 1
    bigram = [rng.randrange(vocab) for _ in range(rng.choice([0, vocab // 2, vocab]))]
    return {"neural": neural, "K": K, "lenience": rng.choice([1.0, 1.0, 1.5, 4.0]), "bigram": bigram if gram else None,
            "capacity": rng.choice([None, None, rng.randint(2, context)])}


def drawn_length(rng, most):
    """1 ... most: often short, or near the end."""
    short, any_length, near_the_end = min(12, most), rng.randint(1, most), rng.randint(max(1, most - 6), most)
    return rng.choice([rng.randint(1, short), rng.randint(1, short), any_length, near_the_end])


def drawn_case(number):
    """Everything that a case decides -> a dict."""
    rng = random.Random(number)
    case = {"case": number, "class": rng.choice(list(CLASSES)), "sizes": rng.choice(SIZES)}
    vocab, layers, context = case["sizes"]
    if families and number % OF_A_SEED >= BEYOND and rng.random() < 0.25:
        case |= {"class": rng.choice(families.names()), "sizes": None}
        vocab, layers, context = families.VOCAB, 1, families.CONTEXT
    case["drafter"] = rng.choice(DRAFTERS)
    if layers == 1 and case["drafter"] in ("glide 2", "vanilla 2"):
        case["drafter"] = case["drafter"].removesuffix(" 2")   # no drafter is deeper than its target
    # How often it is told the right token; None: never
    case["rate"] = rng.choice([None, 0.7, 0.9, 1.0])
    case["settings"] = drawn_drafter(rng, case["drafter"], vocab, layers, context)
    sampled = rng.random() < 0.5
    case["sampling"] = {}
    if sampled:
        case["sampling"] = {"temperature": round(rng.uniform(0.3, 1.5), 2), "seed": rng.randrange(1000),
                            "top_k": rng.choice([None, None, rng.randint(1, vocab + 2)]),
                            "top_p": rng.choice([None, None, 1.0, round(rng.uniform(0.05, 1), 2)])}
    case["tree"] = drawn_tree(rng, case["drafter"], sampled)
    if case["drafter"] == "none":
        case["tree"] = rng.choice(["no_draft", "no_draft_padded"]), {}
    case["capacity"] = rng.choice([None, None, None, rng.randint(2, context)])
    length = drawn_length(rng, case["capacity"] or context)
    case["prompt"] = [rng.randrange(1, vocab) for _ in range(length)]
    case["form"] = rng.choice(["list", "(n,)", "(1, n)"])
    case["new"] = rng.choice([rng.randint(1, 3), rng.randint(1, 12), rng.randint(6, 24), rng.randint(6, 24)])
    ends = rng.sample(range(vocab), rng.randint(1, max(1, vocab // 5)))
    case["eos"] = rng.choice([None, None, ends[0], ends])
    if case["sizes"] is None:
        # Some families count positions without padding tokens, their token 0: the text ends there.
        case["eos"] = [0, *ends]
    case["checked"] = rng.choice([1, 1, 1, 2])
    case["slice"] = rng.choice([verify.SLICE, verify.SLICE, rng.randint(4, 20)])
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
        if hasattr(self.inner, "chain"):
            self.chain = self.own_chain

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
        drafter.begin(self.view._replace(tokens=torch.cat(self.tokens), hidden=hidden))
        return drafter

    def check(self, kv, states):
        """What it was shown is the model's own: kv [(K, V)] and states {k: (n, D)} of the whole text."""
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

    def begin(self, root, room):
        super().begin(root, room)
        self.rows = []

    def __call__(self, tokens, parents):
        rows = super().__call__(tokens, parents)
        total = rows.double().sum(-1)
        assert (rows >= 0).all() and ((total == 0) | ((total - 1).abs() < 1e-5)).all(), f"rows sum to {total}"
        if len(self.parents) > len(self.rows):                           # nobody is asked where there is no room
            self.rows += rows
        return rows


def grown(build, expand, root):
    """build(expand, root), whose nodes hang below those that the drafter was asked about, and are possible there."""
    tree = build(expand, root)
    if not expand.tokens[1:]:
        return tree                                                      # a cascade's own chain: nobody was asked
    paths, rows = [], {}
    for token, parent, row in zip(torch.cat(expand.tokens).tolist(), expand.parents, expand.rows):
        paths.append((paths[parent] if parent >= 0 else ()) + (token,))
        rows[paths[-1]] = row
    paths = [(root.item(),)]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist()):
        paths.append(paths[parent] + (token,) if parent >= 0 else None)
        assert parent < 0 or rows[paths[parent]][token] > 0, f"no drafter offered {paths[-1]}"
    return tree


class Output(verify.Output):
    """Remembers what it was told, round by round."""

    def __init__(self, limit):
        super().__init__()
        self.limit, self.accepted = limit, 0

    def round(self, new, path, parents, p_target=None, p_draft=None):
        before = len(self.tokens)
        super().round(new, path, parents, p_target, p_draft)
        assert new and path[0] == 0 and [parents[node] for node in path[1:]] == path[:-1], "a path from the root"
        self.accepted += len(path) > 1
        depth = [0]
        for parent in parents[1:]:
            assert parent < len(depth), "parents before children"
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        assert max(depth) <= max(0, self.limit - before - 1), "no node is deeper than tokens may follow"


# ---------------------------------------------------------------- deciding a case
def drafter_of(case):
    """-> a function that makes the case's drafter, always the same one."""
    kind, how = case["drafter"], case["settings"]
    model = model_of(case["class"], case["sizes"])
    vocab = model.config.get_text_config().vocab_size

    def make():
        if kind == "noise":
            drafter = Noise(vocab)
        elif kind in GRAMS:
            stages = [stage_of(case["class"], case["sizes"], number) for number in range(how["neural"])]
            gram = None if how["bigram"] is None else maxgram.MaxGram(how["bigram"])
            return cascade.Cascade(stages, how["K"], how["lenience"], gram, how["capacity"], vocab)
        else:
            more = [(k, v) for k, v in how.items() if k != "temperature"]
            draft_model = draft_model_of(case["class"], case["sizes"], kind, *more)
            drafters = {"edd": edd.Drafter, "vdm": edd.Drafter, "eagle": edd.EagleDrafter, "medusa": edd.MedusaDrafter}
            drafter = drafters.get(kind, glide.Drafter)(draft_model)
        drafter.temperature = how["temperature"]
        return drafter
    return make


def own_forward(model, ids):
    """The model's own forward over everything, with a cache of the library's own.

    -> logits (n, V), its layers' [(K, V)], (1, H, n, d) each, {k: outputs of layer k (n, D)}.
    """
    cache, states = DynamicCache(), {}
    layers = model.get_decoder().layers
    hooks = [layer.register_forward_hook(lambda module, args, out, k=k: states.update({k: out[0]}))
             for k, layer in enumerate(layers, 1)]
    out = model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    states = {k: h.reshape(-1, h.shape[-1]) for k, h in states.items()}
    return out.logits[0], [(layer.keys, layer.values) for layer in cache.layers], states


def warped(logits, temperature, top_k, top_p):
    """Probabilities (n, V) at a temperature, of the top_k most probable tokens, of the fewest that make up top_p."""
    p = (logits / temperature).softmax(-1)
    if top_k and top_k < p.shape[1]:
        p = p * (p >= p.topk(top_k).values[:, -1:])
        p = p / p.sum(-1, keepdim=True)
    if top_p and top_p < 1:
        best, index = p.sort(descending=True)
        before = best.cumsum(-1) - best                                  # of all that are more probable
        p = torch.zeros_like(p).scatter(1, index, best * (before < top_p))
        p = p / p.sum(-1, keepdim=True)
    return p


def cut(tokens, eos):
    """tokens up to the first end of text."""
    ends = [i + 1 for i, token in enumerate(tokens) if token in eos]
    return tokens[:ends[0]] if ends else tokens


@torch.no_grad()
def run(case):
    """Decode a case and check it -> how many rounds accepted something.  Raises AssertionError."""
    model = model_of(case["class"], case["sizes"])
    target = verify.Target(model, case["capacity"])
    if model.dtype != torch.float64:
        raise verify.UserError(f"{case['class']} knows no float64, where nothing ties")
    prompt, sampling, eos = case["prompt"], case["sampling"], case["eos"]
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    room = target.room(prompt) if getattr(target, "turn", None) else target.capacity - len(prompt) + 1
    limit = min(case["new"], room)
    name, settings = case["tree"]
    drafter, build = None, getattr(verify, name, None)
    if case["drafter"] != "none":
        text = []
        if case["rate"]:
            undrafted = verify.generate(target, None, verify.no_draft, prompt, case["new"], **sampling).tokens
            text = prompt + undrafted
        checked = None if case["drafter"] in DELAYED else case["checked"]
        drafter, build = Watched(drafter_of(case), checked, text, case["rate"]), partial(grown, builder(name, settings))
    drawn = name == "drawn" or settings.get("drawn", False)
    ids = {"list": prompt, "(n,)": torch.tensor(prompt), "(1, n)": torch.tensor([prompt])}[case["form"]]

    def decode(out=None):
        return verify.generate(target, drafter, build, ids, case["new"], eos_token_id=eos, out=out, **sampling)
    told, out = [], Output(limit)
    out.tell = lambda new, drafted: told.append((new, drafted))
    decode(out)
    tokens = out.tokens
    whole = prompt + tokens

    # Lengths, ends, what was told
    assert 1 <= len(tokens) <= limit, f"{len(tokens)} tokens, the limit is {limit}"
    assert cut(tokens, ends) == tokens, f"{tokens} go on behind an end of text"
    assert len(tokens) == limit or tokens[-1] in ends, f"{tokens} end before the limit, {limit}"
    assert sum(out.runs) == len(tokens) - 1 and all(run > 0 for run in out.runs)
    assert [token for new, _ in told for token in new] == tokens and len(told) == 1 + len(out.runs)
    assert all(0 <= drafted <= len(new) for new, drafted in told)

    # Every token is what the model's own forward says after those before it, to rounding.
    kv, states = [], {}
    if case["sizes"]:
        logits, kv, states = own_forward(model, whole[:-1])
    else:
        logits = model(torch.tensor([whole[:-1]]), use_cache=False).logits[0]
    score = logits[len(prompt) - 1:].double()                            # (tokens, V)
    if sampling:
        p_target = warped(score, **{key: sampling[key] for key in ("temperature", "top_k", "top_p")})
        assert (p_target[range(len(tokens)), tokens] > 0).all(), "a token that the target cannot draw"
        noise = [verify.keyed_noise(sampling["seed"], len(prompt) + i, score.shape[1], score.device)
                 for i in range(len(tokens))]
        score = p_target.log() - torch.stack(noise).log()
    # Of a drawn chain the first token alone comes by keyed noise.
    for i, token in enumerate(tokens[:1] if drawn else tokens):
        assert score[i].max() - score[i, token] < 1e-4, f"token {i} of {tokens} should be {score[i].argmax()}"

    best = score.topk(2).values
    if case["rate"] and drafter and not drawn and (best[:, 0] - best[:, 1]).min() > 1e-4:
        assert tokens == cut(undrafted, ends), f"{tokens}, and without a drafter {undrafted}"

    # The cache holds the text, and beyond an end or the limit what was accepted.
    n = min(len(target.ids), len(whole) - 1)
    assert target.cache.length == len(target.ids) >= len(whole) - 1 and target.ids[:n] == whole[:n]
    for layer, (k, v) in enumerate(kv):
        same(target.cache.keys[layer][:, :, :n], k[:, :, :n], f"cached keys of layer {layer}")
        same(target.cache.values[layer][:, :, :n], v[:, :, :n], f"cached values of layer {layer}")

    if drafter is not None and case["sizes"]:
        drafter.check(kv, states)

    if case["twice"]:
        again = decode()
        assert again.tokens == out.tokens and again.runs == out.runs, f"a second run: {again.tokens} in {again.runs}"
    return out.accepted


def outcome(number):
    """-> (the rounds that accepted something, None), or (0, what is wrong), or (None, why a family was refused)."""
    case = {"case": number}
    own = verify.Expand, verify.SLICE
    try:
        case = drawn_case(number)
        verify.Expand, verify.SLICE = Expand, case["slice"]
        return run(case), None
    except Exception as why:                                             # noqa: BLE001
        settings = "\n".join(f"    {key}: {value}" for key, value in case.items())
        lines = traceback.format_exc().strip().splitlines()
        place = Path(traceback.extract_tb(why.__traceback__)[-1].filename)
        ours = isinstance(why, verify.UserError) or isinstance(why, ValueError) and place.parent == ROOT
        refused = case["sizes"] is None and ours
        return None if refused else 0, f"case {number}\n{settings}\n    " + "\n    ".join(lines[-16:])
    finally:
        verify.Expand, verify.SLICE = own


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
        if place % 1000 == 999:
            print(f"{place + 1} cases", flush=True)
    print(f"{count} cases of seed {seed}: {len(wrong)} failed; {accepted} rounds accepted drafts; {refused} cases were "
          "refused", flush=True)
    return accepted, wrong


def test_random_cases_equal_plain_decoding():
    count = max(COUNT, int(os.environ.get("LONG", 0)))
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
