"""Products of few rows: same results as F.linear, up to rounding, and what is left alone."""
import copy

import pytest
import torch
from conftest import assert_plain, plain, random_draft_model, tiny

import cape
import edd
import verify
from runtime import linear

PROMPT = [3, 1, 4, 1, 5]

# PyTorch may have no oneDNN, or this may be no x86 CPU: F.linear serves all products there.
pytestmark = pytest.mark.skipif(not linear.can_pack(torch.nn.Linear(256, 256)),
                                reason="no oneDNN for this CPU")

@pytest.fixture(autouse=True)
def everything(monkeypatch):
    """Also tiny models get blocks."""
    monkeypatch.setattr(linear, "CACHE", 0)

def packed(bias=True):
    module = torch.nn.Linear(24, 24, bias)
    linear.pack(module)
    return module

def test_products_are_f_linears():
    """And with gradients they are F.linear's own."""
    for bias in (True, False):
        module = packed(bias)
        assert isinstance(module, linear.PackedLinear)
        assert [*module.state_dict()] == ["weight", "bias"][:1 + bias]
        for x in (torch.randn(1, 24), torch.randn(24, 17).T, torch.randn(3, 5, 24)):
            expected = torch.nn.functional.linear(x, module.weight, module.bias)
            with torch.no_grad():
                torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(module(x), expected) and module(x).requires_grad

@torch.no_grad()
def test_a_copy_has_no_blocks():
    """A drafter may be made of copies of the target's modules, and gets other weights."""
    module, x = packed(), torch.randn(3, 24)
    other = copy.deepcopy(module)
    assert module.blocks is not None and other.blocks is None
    other.load_state_dict(torch.nn.Linear(24, 24).state_dict())
    expected = torch.nn.functional.linear(x, other.weight, other.bias)
    torch.testing.assert_close(other(x), expected)

def test_packed_models_decode_as_before(monkeypatch):
    """The target, and an EDD made of copies of its modules."""
    model = tiny("llama").float()
    text = plain(model, PROMPT, 8)
    draft_model = random_draft_model(model, "edd").float()
    for module in (model, draft_model):
        linear.pack(module)
    calls, op = [], torch.ops.mkldnn._linear_pointwise

    def watched(*args):
        calls.append(1)
        return op(*args)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched, raising=False)
    assert_plain(model, PROMPT, text, 8)
    assert calls
    drafter = edd.Drafter(draft_model)
    assert verify.generate(verify.Target(model), drafter, cape.cape, PROMPT, 8).tokens == text
