"""Folded grouped queries against copies of keys, and against each model's own attention."""
import random

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCAB, shared

from runtime.attention import NAME, folded_attention
from runtime.targets import any_target

def test_attention_is_that_of_repeated_keys(monkeypatch):
    """For masks of numbers and of bools, which layers may share, or none."""
    own, rng = [], random.Random(0)
    monkeypatch.setattr("runtime.attention.sdpa_attention_forward", lambda *_, **__: own.append(1))
    torch.manual_seed(0)
    for _ in range(60):
        heads, g, n, t = rng.randint(1, 3), rng.randint(2, 4), rng.randint(1, 5), rng.randint(5, 9)
        B, d, d_v = rng.randint(1, 2), rng.choice([8, 16]), rng.choice([8, 16])
        query = torch.randn(B, heads * g, n, d, dtype=torch.float64)
        key = torch.randn(B, heads, t, d, dtype=torch.float64)
        value = torch.randn(B, heads, t, d_v, dtype=torch.float64)
        mask = torch.rand(rng.choice([1, B]), 1, n, t) < 0.7
        mask[..., 0] = True
        if rng.random() < 0.5:
            mask = torch.where(mask, torch.randn(mask.shape).double(), -torch.inf)
        for x, seen in ((query, mask), (query.repeat(1, 2, 1, 1), mask), (query[:, :, :1], None)):
            copies = [y.repeat_interleave(x.shape[1] // heads, 1) for y in (key, value)]
            out, _ = folded_attention(None, x, key, value, seen, scaling=0.3, softcap=None)
            expected = F.scaled_dot_product_attention(x, *copies, seen, scale=0.3)
            torch.testing.assert_close(out, expected.transpose(1, 2))
    assert not own
    # What sdpa's own function decides about: a prompt, heads without groups, or with masks of their
    # own, soft-capping
    query, mask = torch.randn(1, 4, 3, 8), torch.zeros(1, 1, 3, 5)
    key = value = torch.randn(1, 2, 5, 8)
    folded_attention(None, query, key, value, None)
    folded_attention(None, query, key, value, mask.repeat(1, 4, 1, 1))
    folded_attention(None, key, key, value, mask)
    folded_attention(None, query, key, value, mask, softcap=30.0)
    assert len(own) == 4

@pytest.mark.parametrize("name", ["llama-eager", "qwen2", "qwen2-mixed"])
def test_a_target_folds_where_it_may_and_the_model_keeps_its_own(name):
    """Within the target's forwards alone; logits are the same."""
    model = shared(name)
    own, target, names, found = model.config._attn_implementation, any_target(model), set(), []
    assert target.folds == (own == "sdpa")
    handle = model.register_forward_pre_hook(
        lambda *given: names.add(model.config._attn_implementation))
    for target.folds in (target.folds, False):
        logits, _ = target.prefill([(5 * i + 3) % VOCAB for i in range(12)])
        tree, _ = target.forward(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([-1, 0, 0, 1, 2]))
        found.append(torch.cat((logits[None], tree)))
        assert model.config._attn_implementation == own
    handle.remove()
    assert names == ({NAME, own} if own == "sdpa" else {own})
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)
