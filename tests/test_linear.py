"""Products of few rows: same results as F.linear, and no blocks where they would be wrong."""
import copy

import pytest
import torch
from conftest import plain, random_edd, random_glide, tiny

import cape
import edd
import glide
import verify
from runtime import linear

PROMPT = [3, 1, 4, 1, 5]

# PyTorch may have no oneDNN, or this may be no x86 CPU: F.linear serves all products there.
pytestmark = pytest.mark.skipif(not linear.can_pack(torch.empty(256, 256)), reason="no oneDNN for this CPU")

@pytest.fixture
def everything(monkeypatch):
    """Also tiny models get blocks."""
    monkeypatch.setattr(linear, "SMALLEST", 1)
    monkeypatch.setattr(linear, "CACHE", 0)

def calls(monkeypatch):
    """A list that grows by one at each product with blocks."""
    seen, op = [], torch.ops.mkldnn._linear_pointwise
    counted = lambda *args: seen.append(1) or op(*args)  # noqa: E731
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted, raising=False)
    return seen

def packed_module(bias=True, **more):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(24, 40, bias, **more))
    linear.pack(module)
    return module, module[0]

@torch.no_grad()
def test_products_are_f_linears(everything):
    for bias in (True, False):
        _, module = packed_module(bias)
        assert isinstance(module, linear.PackedLinear) and module.blocks is not None
        for shape in ((1, 24), (17, 24), (3, 5, 24), (0, 24)):
            across = torch.randn(shape[::-1]).permute(*range(len(shape))[::-1])
            for x in (torch.randn(shape), across):
                expected = torch.nn.functional.linear(x, module.weight, module.bias)
                torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)

def test_blocks_are_of_the_weight_as_it_is(everything, monkeypatch):
    seen = calls(monkeypatch)
    whole, module = packed_module()
    x = torch.randn(3, 24)

    def uses_blocks(module):
        """And computes the product with the present weight either way."""
        seen.clear()
        with torch.no_grad():
            expected = torch.nn.functional.linear(x.to(module.weight.dtype), module.weight, module.bias)
            torch.testing.assert_close(module(x.to(module.weight.dtype)), expected, rtol=1e-5, atol=1e-5)
        return bool(seen)

    assert list(whole.state_dict()) == ["0.weight", "0.bias"] and len(list(whole.parameters())) == 2
    assert uses_blocks(module) and not uses_blocks(copy.deepcopy(module)), "a copy may be trained"
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    module(x).sum().backward()
    assert module.weight.grad is not None, "a gradient flows, and so without blocks"
    optimizer.step()
    assert not uses_blocks(module), "fused optimisers leave the weight's version as it was"
    linear.pack(whole)
    assert uses_blocks(module)
    with torch.no_grad():
        module.weight += 1
    assert not uses_blocks(module)
    for change in (lambda: linear.unpack(whole), module.double):
        linear.pack(whole)
        assert uses_blocks(module)
        change()
        assert not uses_blocks(module)

def test_the_rule(monkeypatch):
    weight = torch.empty(256, 256)
    assert not linear.can_pack(weight.double()) and not linear.can_pack(weight.half())
    assert not linear.can_pack(weight[:255]) and not linear.can_pack(weight.to("meta"))

    def packed(*sizes, beside=None):
        module = torch.nn.Sequential(*[torch.nn.Linear(size, size) for size in sizes])
        linear.pack(module, beside)
        return [getattr(part, "blocks", None) is not None for part in module]

    size = 4 * 256 * 256
    monkeypatch.setattr(linear, "CACHE", size)
    monkeypatch.setattr(linear, "LARGEST", 2 * size)
    assert packed(256) == [False] and packed(256, 256, 8) == [True, True, False]
    assert packed(256, 256, 256) == [False] * 3, "a copy would be too large"
    assert packed(256, beside=torch.nn.Linear(8, 8)) == [True]

def test_packed_models_decode_as_before(everything, monkeypatch):
    """The target, a GLIDE and an EDD, whose head is the target's."""
    model = tiny("llama").float()
    text = plain(model, PROMPT, 8)
    drafters = [glide.Drafter(random_glide(model).float()), edd.Drafter(random_edd(model).float())]
    for module in (model, *[drafter.model for drafter in drafters]):
        linear.pack(module)
    seen = calls(monkeypatch)
    assert plain(model, PROMPT, 8) == text and seen
    for drafter in drafters:
        drafter.model.requires_grad_(False)
        seen.clear()
        out = verify.generate(verify.Target(model), drafter, cape.cape, PROMPT, 8)
        assert out.tokens == text and seen
