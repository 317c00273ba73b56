"""Products of few rows: same results as F.linear, up to rounding, and what is left alone."""
import copy

import pytest
import torch
from conftest import plain, tiny

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

def test_products_are_f_linears_and_a_copy_has_no_blocks():
    """With gradients they are F.linear's own.  A copy, as an EDD is one, gets other weights."""
    for bias in (True, False):
        module = torch.nn.Linear(24, 24, bias)
        linear.pack(module)
        other = copy.deepcopy(module)
        other.load_state_dict(torch.nn.Linear(24, 24, bias).state_dict())
        for x in (torch.randn(1, 24), torch.randn(24, 17).T, torch.randn(3, 5, 24)):
            for one in (module, other):
                expected = torch.nn.functional.linear(x, one.weight, one.bias)
                with torch.no_grad():
                    torch.testing.assert_close(one(x), expected, rtol=1e-5, atol=1e-5)
                assert torch.equal(one(x), expected) and one(x).requires_grad

def test_a_packed_target_decodes_as_before(monkeypatch):
    model = tiny("llama").float()
    text = plain(model, PROMPT, 8)
    linear.pack(model)
    calls, op = [], torch.ops.mkldnn._linear_pointwise

    def watched(*args):
        calls.append(1)
        return op(*args)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched, raising=False)
    out = verify.generate(verify.Target(model), None, verify.root_only, PROMPT, 8)
    assert out.tokens == text and calls
