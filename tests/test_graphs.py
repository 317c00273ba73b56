"""Recordings of static shapes, as CUDA graphs take them, on the CPU: the same tokens and drafts.

A tracer takes the place of a CUDA graph: nothing of the host's may be in a recording.  That static
shapes without recordings change nothing is asserted by test_lossless.py.
"""
from functools import partial

import pytest
import torch
from conftest import plain, random_drafter, shared
from torch.fx.experimental.proxy_tensor import make_fx

import cape
import verify
from runtime import static as graphs

CHAIN = partial(cape.chain, gamma=2)         # trees of three nodes, padded to four

class Traced(graphs.Static):
    """Recordings by a tracer: like a CUDA graph they replay operations, and all else is fixed."""
    def __init__(self, x):
        super().__init__(x)
        self.graphs = True                                     # on a CPU, too

    def record(self, function, held):
        traced = make_fx(lambda *x: tuple(function(*x)))(*held)
        return lambda: traced(*held)

@pytest.fixture(autouse=True)
def tracer(monkeypatch):
    monkeypatch.setattr(graphs, "Static", Traced)

def decoded(target, drafter, prompt, new):
    """The rounds, without inference mode, which a tracer does not know; the output is plain's."""
    with torch.no_grad():
        rounds = list(verify.rounds.__wrapped__(target, drafter, CHAIN, prompt, new))
    assert [token for one in rounds for token in one.new] == plain(target.model, prompt, new)
    return rounds

def check(target, drafter, exact, prompt, new=5):
    """Static shapes against exact ones, by the same drafter: the same tokens and drafts."""
    expected = decoded(verify.Target(target.model), exact, prompt, new)
    assert decoded(target, drafter, prompt, new) == expected

@pytest.fixture
def llama():
    return shared("llama", num_hidden_layers=1)

def test_recordings_serve_other_lengths_and_no_other_needs(llama):
    """One for each size of tree and cache; hidden states are found after another drafter."""
    target = graphs.static(verify.Target(llama))
    exact, drafter = random_drafter(llama, "glide"), graphs.static(random_drafter(llama, "glide"))
    check(target, drafter, exact, [3, 1, 4, 1, 5])
    check(target, drafter, exact, [5, 4, 3])
    assert 1 <= len(drafter.run.recorded) <= len(target.run.recorded) <= 3
    exact, drafter = [random_drafter(llama, "edd", hidden=1) for _ in range(2)]
    check(target, graphs.static(drafter), exact, [5, 4, 3], 3)

def test_caches_that_grow_between_recordings(llama, monkeypatch):
    """A longer text after a short one: recordings of other addresses are dropped.

    A forward's bucket of keys makes no cache grow.
    """
    monkeypatch.setattr(verify, "MARGIN", 4)                   # spare entries of a prefill
    monkeypatch.setattr(graphs, "KEYS", 8)
    target = graphs.static(verify.Target(llama))
    exact, drafter = random_drafter(llama, "glide"), graphs.static(random_drafter(llama, "glide"))
    void = []
    for prompt, new in (([1, 2], 3), ([3, 1, 4] * 6, 4)):
        check(target, drafter, exact, prompt, new)
        assert target.cache.allocated == len(prompt) + new + 4
        recorded = list(target.run.recorded.values())
        assert recorded and not any(kept is old for kept in recorded for old in void)
        void = recorded

def test_a_target_of_chains_takes_no_static_shapes(llama):
    target = verify.Target(llama)
    target.verifies_trees = False
    assert not isinstance(graphs.static(target).run, graphs.Static)
