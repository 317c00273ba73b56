"""Static shapes, as CUDA takes them, on the CPU: the same tokens, and nothing of the host's in a recording."""
from functools import partial
from itertools import product

import pytest
import torch
from conftest import VOCAB, plain, tiny
from test_edd import random_drafter
from test_glide import random_glide
from test_verify import BUILDS, HandMade
from torch.fx.experimental.proxy_tensor import make_fx

import cape
import edd
import glide
import verify

NEW = 20                     # tokens of a decoding: beyond the windows


class Traced(verify.Static):
    """Recordings by a tracer: like a CUDA graph they replay operations, and all else is a constant in them."""

    def __init__(self, device, graphs=True, least=1):
        super().__init__(device, graphs, least)
        self.graphs = graphs                       # on a CPU, too

    def record(self, function, held):
        traced = make_fx(lambda *x: tuple(function(*x)))(*held)
        return lambda: traced(*held)


@torch.no_grad()
def generate(*given, **how):
    """verify.generate without inference mode, which a tracer does not know."""
    return verify.generate.__wrapped__(*given, **how)


def padded(model, record=False, **more):
    target = verify.Target(model, padded=True, **more)
    target.call = Traced("cpu", record)
    return target


@pytest.mark.parametrize("record", [False, True])
def test_trees_logits_are_the_unpadded_ones(model, record):
    """Of drawn trees behind prefixes of many lengths, windows among them; hidden rows and cached rows too."""
    generator = torch.Generator().manual_seed(0)
    ours, own = padded(model, record), verify.Target(model, padded=False)
    for target in (ours, own):
        target.watch({"hidden": (1, 3)})
    for n in (1, 2, 3, 5, 8, 9):
        text = torch.randint(VOCAB, (int(torch.randint(1, 20, (), generator=generator)),), generator=generator).tolist()
        parents = torch.tensor([-1] + [int(torch.randint(-1 if i % 3 == 0 else 0, i, (), generator=generator)) for i in range(1, n)])
        tokens = torch.randint(VOCAB, (n,), generator=generator)
        path, kept = [0], []
        while True:
            below = [i for i in range(n) if parents[i] == path[-1]]
            if not below:
                break
            path.append(below[-1])
        kept = tokens[path].tolist()
        found = []
        for target in (ours, own):
            with torch.no_grad():
                target.prefill(text)
                logits = target.forward(tokens, parents)
                depth = target.depth
                target.commit(path, kept)
                after = target.forward(torch.tensor([3, 4]))
                hidden = target.view().hidden
            found.append([logits, depth, after, *hidden.values(), *(rows[:, :, :target.cache.length] for rows in target.cache.keys.values())])
        # (transformers' eager attention rounds to float32 within.)
        exact = 1e-12 if model.config._attn_implementation == "sdpa" else 1e-5
        for x, y in zip(*found):
            torch.testing.assert_close(x, y, atol=exact, rtol=0)
    assert not record or ours.call.recorded and ours.call.graphs


def drafters(model, text):
    """Each kind: on padded shapes, and on exact ones."""
    yield "hand-made", HandMade(text, 0.7), HandMade(text, 0.7)
    for name, more in (("glide", {"layers": 2}), ("vanilla", {"glimpse": False})):
        draft_model = random_glide(model, **more)
        yield name, glide.Drafter(draft_model), glide.Drafter(draft_model)
    for name in ("edd", "vdm", "eagle"):
        draft_model = random_drafter(model, name).model
        drafter_class = edd.KINDS[draft_model.config.kind][1]
        yield name, drafter_class(draft_model), drafter_class(draft_model)


def decoded(target, drafter, build, prompt, new=NEW):
    """-> tokens, runs, and all that the drafter said."""
    said = []

    def listened(expand, root):
        def asked(tokens, parents):
            said.append(expand(tokens, parents))
            return said[-1]
        for name in ("room", "generator", "out", "drafter", "warp", "deepest"):
            setattr(asked, name, getattr(expand, name, None))
        return build(asked, root)
    out = generate(target, drafter, listened, prompt, new)
    return out.tokens, out.runs, said


ALL = ("hand-made", "glide", "vanilla", "edd", "vdm", "eagle")


@pytest.mark.parametrize("name, record, kinds, trees", [
    ("llama", True, ALL, ("cape",)), ("qwen2-mixed", True, ("glide", "edd"), ("pct",)), ("mistral", False, ALL, BUILDS),
    ("llama-eager", False, ALL, ("cape", "pct"))])
def test_output_and_drafts_are_those_of_exact_shapes(name, record, kinds, trees):
    model, prompt = tiny(name), [3, 1, 4, 1, 5]
    text = plain(model, prompt, NEW)
    target, own = padded(model, record), verify.Target(model, padded=False)
    exact = 1e-10 if name != "llama-eager" else 1e-4
    assert generate(target, None, verify.no_draft, prompt, NEW).tokens == text
    pairs = {kind: pair for kind, *pair in drafters(model, prompt + text)}
    assert set(pairs) == set(ALL)
    for kind, tree in product(kinds, trees):
        drafter, other = pairs[kind]
        tokens, runs, said = decoded(target, drafter, BUILDS[tree], prompt)
        _, own_runs, own_said = decoded(own, other, BUILDS[tree], prompt)
        assert tokens == text and runs == own_runs, (kind, tree)
        for x, y in zip(said, own_said, strict=True):
            torch.testing.assert_close(x, y, atol=exact, rtol=0)
        if record:
            static = getattr(drafter, "call", target.call)
            assert target.call.graphs and target.call.recorded and static.graphs and static.recorded


def test_sampled_output_is_plain_samplings(llama):
    how = dict(temperature=0.8, top_k=7, seed=3)
    own = verify.generate(verify.Target(llama, padded=False), None, verify.no_draft, [1, 2], 30, **how).tokens
    assert generate(padded(llama, True), glide.Drafter(random_glide(llama)), cape.cape, [1, 2], 30, **how).tokens == own


def test_a_recording_of_one_length_serves_others(llama):
    """Few recordings: one for each size of tree, and of the cache."""
    target = padded(llama, True)
    generate(target, glide.Drafter(random_glide(llama)), partial(cape.fixed, size=2), [1, 2], 30)
    count = len(target.call.recorded)
    generate(target, glide.Drafter(random_glide(llama)), partial(cape.fixed, size=2), [5, 4, 3], 30)
    assert 1 <= len(target.call.recorded) == count <= 5


@pytest.mark.parametrize("tree, record", [("chain", True), ("pct", False), ("eagle2", False)])
def test_keys_of_several_sizes_and_caches_that_grow(tree, record, monkeypatch):
    """Sizes of eight keys; a longer text after a short one, with the same drafter, whose recordings know where the rows lie."""
    llama = tiny("llama")
    monkeypatch.setattr(verify, "KEYS", 8)
    monkeypatch.setattr(verify, "MOST_NODES", 40)
    target, own = padded(llama, record), verify.Target(llama, padded=False)
    drafters = [(glide.Drafter(random_glide(llama)), glide.Drafter(random_glide(llama))), (random_drafter(llama, "edd"), random_drafter(llama, "edd"))]
    for (prompt, new), (drafter, other) in product((([1, 2], 6), ([3, 1, 4, 1, 5], 18)), drafters):
        tokens, runs, said = decoded(target, drafter, BUILDS[tree], prompt, new)
        own_tokens, own_runs, own_said = decoded(own, other, BUILDS[tree], prompt, new)
        assert tokens == own_tokens == plain(llama, prompt, new) and runs == own_runs
        for x, y in zip(said, own_said, strict=True):
            torch.testing.assert_close(x, y, atol=1e-10, rtol=0)
    assert len({keys for _, keys, *_ in target.call.recorded}) > 2 or not record


def test_a_new_cache_is_not_read_by_old_recordings(llama):
    """Recordings hold addresses: those of a cache that is gone must not be used."""
    target = padded(llama, True)
    before = generate(target, None, verify.no_draft, [1, 2], 9).tokens
    assert target.call.recorded
    target.empty()
    assert not target.call.recorded
    assert generate(target, None, verify.no_draft, [1, 2], 9).tokens == before == plain(llama, [1, 2], 9)


def test_what_cannot_be_recorded_runs_as_it_is(llama, capsys):
    target = padded(llama, True)

    def refuse(function, held):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")
    target.call.record = refuse
    assert generate(target, None, verify.no_draft, [1, 2], 9).tokens == plain(llama, [1, 2], 9)
    assert capsys.readouterr().err == "no CUDA graphs, this model cannot be recorded: operation not permitted when stream is capturing\n"
