"""A grown target and its drafters decode as the small ones: the same tokens, rounds and trees."""
import grown
import torch

import cape
import pct
import verify
from runtime import families, load

def test_a_grown_drafter_drafts_the_same_trees():
    small, tokenizer = load.load_target(load.STAND_IN, "float32", "cpu")
    shape = 26, 256, 8, 704, 1100                  # two layers more, and twice as wide
    large = grown.grow_target(small, shape, torch.float32)
    ids = tokenizer("A baker has 36 rolls. He sells 14 in the morning and")["input_ids"]
    target = verify.Target(large)
    for name, build in (("glide", cape.cape), ("edd", pct.pct)):
        drafter, _ = families.load(load.CHECKPOINTS / name, small)
        draft_model, _ = grown.grow_drafter(load.CHECKPOINTS / name, small, large)
        expected = verify.generate(verify.Target(small), drafter, build, ids, 24)
        other = type(drafter)(draft_model, drafter.temperature)
        found = verify.generate(target, other, build, ids, 24)
        assert found == expected, "the same tokens, the same trees, and the same nodes accepted"
    logits, _ = target.prefill(ids)
    assert logits[1024:].max() < logits[:1024].min(), "tokens that the small model lacks"
