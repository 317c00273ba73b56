"""A grown target and its drafters decode as the small ones: the same tokens, rounds and trees."""
import grown
import pytest
import torch

import cape
import pct
import verify
from runtime import families, load

SHAPE = (26, 256, 8, 704, 1100)  # two layers more, and twice as wide

@pytest.fixture(scope="module")
def targets():
    small, tokenizer = load.load_target(load.STAND_IN, "float32", "cpu")
    return small, grown.grow_target(small, SHAPE, torch.float32), tokenizer

@pytest.mark.parametrize("name, build", [("glide", cape.cape), ("edd", pct.pct)])
def test_a_grown_drafter_drafts_the_same_trees(targets, name, build):
    small, large, tokenizer = targets
    ids = tokenizer("A baker has 36 rolls. He sells 14 in the morning and")["input_ids"]
    drafter, _ = families.load(load.CHECKPOINTS / name, small)
    draft_model, _ = grown.grow_drafter(load.CHECKPOINTS / name, small, large)
    expected = verify.generate(verify.Target(small), drafter, build, ids, 24)
    other = type(drafter)(draft_model, drafter.temperature)
    target = verify.Target(large)
    found = verify.generate(target, other, build, ids, 24)
    assert found == expected, "the same tokens, the same trees, and the same nodes accepted"
    logits, _ = target.prefill(ids)
    assert logits[1024:].max() < logits[:1024].min(), "tokens that the small model lacks"
