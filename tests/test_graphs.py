"""Static shapes, as CUDA takes them, on the CPU: the same tokens, and nothing of the host's in a recording."""
from functools import partial

import pytest
import torch
from conftest import plain, random_drafter, shared, target_of
from test_verify import BUILDS, HandMade
from torch.fx.experimental.proxy_tensor import make_fx

import cape
import verify
from runtime import static as graphs

NEW, PROMPT = 12, [3, 1, 4, 1, 5]            # NEW: tokens of a decoding, beyond the windows
model_of = partial(shared, num_hidden_layers=2)

class Traced(graphs.Static):
    """Recordings by a tracer: like a CUDA graph they replay operations, and all else is a constant in them."""

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
def generate(*given, **how):
    """verify.generate without inference mode, which a tracer does not know."""
    return verify.generate.__wrapped__(*given, **how)

def drafter_of(model, kind, text):
    return HandMade(text, 0.7) if kind == "hand-made" else random_drafter(model, kind)

def rounding(model):
    """transformers' eager attention rounds to float32 within."""
    return 1e-4 if model.config._attn_implementation == "eager" else 1e-11


def decoded(target, drafter, build, prompt, new, rule=None):
    """-> tokens, rounds, and all that the drafter predicted."""
    rows = []

    class Listener(verify.Expand):
        def __call__(self, tokens, parents):
            rows.append(super().__call__(tokens, parents))
            return rows[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "Expand", Listener)
        out = generate(target, drafter, build, prompt, new, rule)
    return out.tokens, out.rounds, rows

def check(model, kind, build, prompt=PROMPT, new=NEW, rule=None, static=None):
    """Static shapes against exact ones: tokens, rounds, all that the drafter predicts -> the static target and drafter."""
    text = prompt + plain(model, prompt, new)
    static = static or [graphs.static(x, record=False) for x in (target_of(model), drafter_of(model, kind, text))]
    tokens, rounds, rows = decoded(*static, build, prompt, new, rule)
    own_tokens, own_rounds, own_rows = decoded(target_of(model), drafter_of(model, kind, text), build, prompt, new, rule)
    assert tokens == own_tokens and rounds == own_rounds and (rule or tokens == text[len(prompt):])
    for x, y in zip(rows, own_rows, strict=True):
        torch.testing.assert_close(x, y, atol=max(1e-6, rounding(model)), rtol=0)      # (builders see float32)
    return static

@pytest.mark.parametrize("number, kind, tree", [
    (0, "hand-made", "chain"), (1, "glide", "cape"), (2, "glide 2", "pct"), (3, "glide", "chain"), (4, "edd", "chain"), (5, "vdm", "cape"), (6, "eagle", "pct")])
def test_output_and_drafts_are_those_of_exact_shapes(number, kind, tree, monkeypatch):
    monkeypatch.setattr(graphs, "KEYS", (16, 256, 1)[number % 3])
    name = ("llama", "llama-eager", "mistral", "qwen2-mixed")[number % 4]
    record = number == 3                                       # tracing takes its time
    static = record and [graphs.static(target_of(model_of(name))), random_drafter(model_of(name), kind)]
    check(model_of(name), kind, BUILDS[tree], static=static)
    assert not record or static[0].run.recorded

def test_nodes_are_padded_to_the_next_power_of_two_that_is_fast():
    counts = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64)
    assert [graphs.padded(n, torch.bfloat16) for n in counts] == [1, 2, 4, 4, 8, 8, 16, 16, 32, 32, 64, 64]
    assert [graphs.padded(n, torch.float32) for n in counts] == [1, 2, 4, 4, 32, 32, 32, 32, 32, 32, 64, 64]

def test_recordings_serve_other_lengths_and_no_other_needs():
    """Few recordings: one for each size of tree, and of the cache; a drafter that reads hidden states finds them after plain decoding."""
    llama = model_of("llama")
    target, build = graphs.static(verify.Target(llama)), partial(cape.chain, gamma=1)
    drafter = graphs.static(random_drafter(llama, "glide 2"))
    assert generate(target, None, verify.root_only, [1, 2], 5).tokens == plain(llama, [1, 2], 5)
    check(llama, "glide 2", build, new=5, static=(target, drafter))
    check(llama, "glide 2", build, [5, 4, 3], 5, static=(target, drafter))
    assert 1 <= len(drafter.run.recorded) <= len(target.run.recorded) <= 3
    check(llama, "edd", build, new=4, static=(target, random_drafter(llama, "edd")))

def test_caches_that_grow_between_recordings(monkeypatch):
    """A longer text after a short one, with the same drafter: recordings of other addresses are dropped.

    A forward's bucket of keys makes no cache grow."""
    monkeypatch.setattr(verify, "CHUNK", 4)                    # entries that a prefill allocates to spare
    llama = shared("llama", num_hidden_layers=1)
    monkeypatch.setattr(graphs, "KEYS", 8)
    target, drafter = graphs.static(verify.Target(llama)), graphs.static(random_drafter(llama, "glide"))
    allocated = []
    for prompt, new in (([1, 2], 3), ([3, 1, 4] * 6, 4)):
        void = list(target.run.recorded.values())
        check(llama, "glide", partial(cape.chain, gamma=1), prompt, new, static=(target, drafter))
        allocated.append(target.cache.allocated)
        assert target.run.recorded and not any(kept is old for kept in target.run.recorded.values() for old in void)
    assert allocated == [2 + 3 + 4, 18 + 4 + 4]
