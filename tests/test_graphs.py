"""Static shapes, as CUDA takes them, on the CPU: the same tokens and predictions.

A tracer takes the place of a CUDA graph: nothing of the host's may be in a recording.
"""
from functools import partial

import pytest
import torch
from conftest import plain, random_drafter, shared, target_of
from test_generate import Reciting
from torch.fx.experimental.proxy_tensor import make_fx

import cape
import pct
import verify
from runtime import static as graphs
from runtime.errors import UserError

NEW, PROMPT = 12, [3, 1, 4, 1, 5]            # NEW: tokens of a decoding, beyond the windows
BUILDS = {"chain": cape.chain, "cape": cape.cape, "pct": partial(pct.pct, cost=0.05)}
model_of = partial(shared, num_hidden_layers=2)

class Traced(graphs.Static):
    """Recordings by a tracer: like a CUDA graph they replay operations, and all else is fixed."""
    def __init__(self, x, record):
        super().__init__(x, record)
        self.graphs = record                                   # on a CPU, too

    def record(self, function, held):
        traced = make_fx(lambda *x: tuple(function(*x)))(*held)
        return lambda: traced(*held)

@pytest.fixture(autouse=True)
def tracer(monkeypatch):
    monkeypatch.setattr(graphs, "Static", Traced)

@torch.no_grad()
def generate(*given):
    """verify.generate without inference mode, which a tracer does not know."""
    return verify.generate.__wrapped__(*given)

def drafter_of(model, kind, text):
    torch.manual_seed(0)
    return Reciting(text) if kind == "hand-made" else random_drafter(model, kind)

def decoded(target, drafter, build, prompt, new):
    """-> tokens, rounds, and all that the drafter predicted."""
    predicted, expand = [], drafter.expand

    def listening(tokens, parents):
        predicted.append(expand(tokens, parents))
        return predicted[-1]
    drafter.expand = listening
    out = generate(target, drafter, build, prompt, new)
    drafter.expand = expand
    return out.tokens, out.rounds, predicted

def check(model, kind, build, prompt=PROMPT, new=NEW, static=None):
    """Static shapes against exact ones -> the static target and drafter."""
    text = prompt + plain(model, prompt, new)
    own = target_of(model), drafter_of(model, kind, text)
    static = static or [graphs.static(x, record=False)
                        for x in (target_of(model), drafter_of(model, kind, text))]
    tokens, rounds, predicted = decoded(*static, build, prompt, new)
    own_tokens, own_rounds, own_predicted = decoded(*own, build, prompt, new)
    assert tokens == own_tokens == text[len(prompt):] and rounds == own_rounds
    # transformers' eager attention rounds to float32 within; builders see float32.
    rounding = 1e-4 if model.config._attn_implementation == "eager" else 1e-6
    for x, y in zip(predicted, own_predicted, strict=True):
        torch.testing.assert_close(x, y, atol=rounding, rtol=0)
    return static

@pytest.mark.parametrize("number, kind, tree", [
    (0, "hand-made", "chain"), (1, "glide", "cape"), (2, "glide 2", "pct"), (3, "glide", "chain"),
    (4, "edd", "chain"), (5, "vdm", "cape"), (6, "eagle", "pct")])
def test_output_and_drafts_are_those_of_exact_shapes(number, kind, tree, monkeypatch):
    monkeypatch.setattr(graphs, "KEYS", (16, 256, 1)[number % 3])
    model = model_of(("llama", "llama-eager", "mistral", "qwen2-mixed")[number % 4])
    static = None
    if number == 3:                                            # tracing takes its time
        static = graphs.static(target_of(model)), graphs.static(random_drafter(model, kind))
    check(model, kind, BUILDS[tree], static=static)
    assert not static or static[0].run.recorded and static[1].run.recorded

def test_nodes_are_padded_to_the_next_power_of_two_that_is_fast():
    counts = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64)
    half = [graphs.padded(n, torch.bfloat16) for n in counts]
    single = [graphs.padded(n, torch.float32) for n in counts]
    assert half == [1, 2, 4, 4, 8, 8, 16, 16, 32, 32, 64, 64]
    assert single == [1, 2, 4, 4, 32, 32, 32, 32, 32, 32, 64, 64]

def test_recordings_serve_other_lengths_and_no_other_needs():
    """One for each size of tree and cache; hidden states are found after plain decoding."""
    llama = model_of("llama")
    target, build = graphs.static(verify.Target(llama)), partial(cape.chain, gamma=1)
    drafter = graphs.static(random_drafter(llama, "glide 2"))
    out = generate(target, None, verify.root_only, [1, 2], 5)
    assert out.tokens == plain(llama, [1, 2], 5)
    check(llama, "glide 2", build, new=5, static=(target, drafter))
    check(llama, "glide 2", build, [5, 4, 3], 5, static=(target, drafter))
    assert 1 <= len(drafter.run.recorded) <= len(target.run.recorded) <= 3
    check(llama, "edd", build, new=4, static=(target, random_drafter(llama, "edd")))

def test_caches_that_grow_between_recordings(monkeypatch):
    """A longer text after a short one: recordings of other addresses are dropped.

    A forward's bucket of keys makes no cache grow.
    """
    monkeypatch.setattr(verify, "MARGIN", 4)                   # spare entries of a prefill
    llama = shared("llama", num_hidden_layers=1)
    monkeypatch.setattr(graphs, "KEYS", 8)
    target = graphs.static(verify.Target(llama))
    drafter = graphs.static(random_drafter(llama, "glide"))
    allocated = []
    for prompt, new in (([1, 2], 3), ([3, 1, 4] * 6, 4)):
        void = list(target.run.recorded.values())
        check(llama, "glide", partial(cape.chain, gamma=1), prompt, new, static=(target, drafter))
        allocated.append(target.cache.allocated)
        recorded = target.run.recorded.values()
        assert recorded and not any(kept is old for kept in recorded for old in void)
    assert allocated == [2 + 3 + 4, 18 + 4 + 4]

def test_what_takes_no_static_shapes(monkeypatch):
    """A drafter without tensors of its own, a target of chains; a spread target is refused."""
    drafter, target = Reciting([]), target_of(model_of("llama"))
    assert graphs.static(drafter) is drafter and not hasattr(drafter, "run")
    target.verifies_trees = False
    assert not isinstance(graphs.static(target).run, graphs.Static)
    target.verifies_trees = True
    monkeypatch.setattr(target.model, "hf_device_map", {"a": 0, "b": "cpu"}, raising=False)
    with pytest.raises(UserError, match="leave --graphs out"):
        graphs.static(target)
