"""Products of few rows: same results as F.linear, up to rounding, and what is left alone."""
import copy
from unittest.mock import Mock

import pytest
import torch

from runtime import linear

# PyTorch may have no oneDNN, or this may be no x86 CPU: F.linear serves all products there.
pytestmark = pytest.mark.skipif(not linear.IS_FAST, reason="no oneDNN for this CPU")

def test_products_are_f_linears_and_a_copy_has_no_blocks(monkeypatch):
    """With gradients they are F.linear's own.  A copy, as an EDD is one, gets other weights."""
    monkeypatch.setattr(linear, "CACHE", 0)                    # also tiny models get blocks
    watched = Mock(wraps=torch.ops.mkldnn._linear_pointwise)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched, raising=False)
    for bias in (True, False):
        model = torch.nn.Sequential(torch.nn.Linear(24, 24, bias))
        linear.pack(model)
        other = copy.deepcopy(model)
        other.load_state_dict(torch.nn.Sequential(torch.nn.Linear(24, 24, bias)).state_dict())
        for x in (torch.randn(1, 24), torch.randn(24, 17).T, torch.randn(3, 5, 24)):
            for module in (model[0], other[0]):
                expected = torch.nn.functional.linear(x, module.weight, module.bias)
                with torch.no_grad():
                    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
                assert torch.equal(module(x), expected) and module(x).requires_grad
    assert watched.call_count == 6, "of the packed ones, without gradients"
