"""Products of few rows: same results as F.linear, up to rounding, and what is left alone."""
import copy

import pytest
import torch
from conftest import plain, tiny
from test_glide import new_edd, new_glide

import cape
import edd
import glide
import verify
from runtime import linear

PROMPT = [3, 1, 4, 1, 5]

# PyTorch may have no oneDNN, or this may be no x86 CPU: F.linear serves all products there.
pytestmark = pytest.mark.skipif(not linear.can_pack(torch.nn.Linear(256, 256)),
                                reason="no oneDNN for this CPU")

@pytest.fixture
def everything(monkeypatch):
    """Also tiny models get blocks."""
    monkeypatch.setattr(linear, "CACHE", 0)

def packed(*sizes, bias=True, beside=None):
    module = torch.nn.Sequential(*[torch.nn.Linear(size, size, bias) for size in sizes])
    linear.pack(module, beside)
    return module

def test_products_are_f_linears(everything):
    """And with gradients they are F.linear's own."""
    for bias in (True, False):
        module = packed(24, bias=bias)[0]
        assert isinstance(module, linear.PackedLinear)
        assert [*module.state_dict()] == ["weight", "bias"][:1 + bias]
        for shape in ((1, 24), (17, 24), (3, 5, 24), (0, 24)):
            across = torch.randn(shape[::-1]).permute(*range(len(shape))[::-1])
            for x in (torch.randn(shape), across):
                expected = torch.nn.functional.linear(x, module.weight, module.bias)
                with torch.no_grad():
                    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
                assert torch.equal(module(x), expected) and module(x).requires_grad

@torch.no_grad()
def test_a_copy_has_no_blocks(everything):
    """A drafter may be made of copies of the target's modules, and gets other weights."""
    module, x = packed(24)[0], torch.randn(3, 24)
    other = copy.deepcopy(module)
    assert module.blocks is not None and other.blocks is None
    other.load_state_dict(torch.nn.Linear(24, 24).state_dict())
    expected = torch.nn.functional.linear(x, other.weight, other.bias)
    torch.testing.assert_close(other(x), expected)

def test_packed_models_decode_as_before(everything, monkeypatch):
    """The target, a GLIDE and an EDD, whose head is the target's."""
    model = tiny("llama").float()
    text = plain(model, PROMPT, 8)
    drafters = [glide.Drafter(new_glide(model).float()), edd.Drafter(new_edd(model).float())]
    for module in (model, *[drafter.model for drafter in drafters]):
        linear.pack(module)
    calls, op = [], torch.ops.mkldnn._linear_pointwise

    def watched(*args):
        calls.append(1)
        return op(*args)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched, raising=False)
    assert plain(model, PROMPT, 8) == text and calls
    target = verify.Target(model)
    for drafter in drafters:
        calls.clear()
        assert verify.generate(target, drafter, cape.cape, PROMPT, 8).tokens == text and calls
