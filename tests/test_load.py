"""From calls on the command line to models and drafters; a fingerprint tells models apart."""
import copy
import json
import random

import pytest
import torch
from conftest import VOCAB, tiny
from helpers import TEXT, save, save_drafter, tokenizer_of

import bench
import cape
import verify
from beyond.stage import Stage
from runtime import calls, load
from runtime.errors import UserError

PROMPT = [3, 1, 4, 1, 5]
FUNCTIONS = {**bench.TREES, "glide": load.load_drafter, "maxgram": load.load_maxgram,
             "cascade": load.load_cascade}

# ---------------------------------------------------------------- calls
@pytest.mark.parametrize("text, name, words, settings, label", [
    ("  pct_cost( width =7,cost= -1e-3 , ) ", "pct-cost", [], {"width": 7, "cost": -0.001},
     "pct-cost(width=7, cost=-0.001)"),
    ("cape(sizes=[2,3], edges=(1,), max_nodes=None)", "cape", [],
     {"sizes": [2, 3], "edges": (1,), "max_nodes": None},
     "cape(sizes=[2, 3], edges=(1,), max_nodes=None)"),
    ("cascade('google/flan-t5-base', ./t5.small_2,7B, k=(8,13), bigram='a b')", "cascade",
     ["google/flan-t5-base", "./t5.small_2", "7B"], {"k": (8, 13), "bigram": "a b"},
     "cascade(google/flan-t5-base, ./t5.small_2, 7B, k=(8, 13), bigram='a b')")])
def test_what_is_read_is_what_was_written(text, name, words, settings, label):
    """Names of models need no quotes, and a label is a call again."""
    call = calls.read_call(text, FUNCTIONS, "tree")
    assert call == (name, FUNCTIONS[name], words, settings, label)
    assert calls.read_call(label, FUNCTIONS, "tree") == call

@pytest.mark.parametrize("text", [
    "", "pct width=7)", "pct=3", "pct(7)", "pct(width=7)x", "pct(width=7", "pct(**x)",
    "pct(width=x)", "cascade", "maxgram(base)", "glide(raw=True)"])
def test_what_is_no_call_is_refused(text):
    with pytest.raises(UserError):
        calls.read_call(text, FUNCTIONS, "tree")

# ---------------------------------------------------------------- from names to drafters
@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A target, two trained drafters, a language model and a bigram, loaded from a folder."""
    top = tmp_path_factory.mktemp("load")
    model, tokenizer, drafters = tiny("llama").float(), tokenizer_of(TEXT), top / "drafters"
    save(top / "model", model, tokenizer)
    save(drafters / "base", tiny("llama", seed=1, num_hidden_layers=1).float(), tokenizer)
    save_drafter(drafters / "my_glide", "glide", model, tokenizer, 0.5)
    save_drafter(drafters / "edd", "edd", model, tokenizer, 0.5)
    about = {"kind": "base", "validation": {"temperature": 0.7}}
    (drafters / "base" / "training.json").write_text(json.dumps(about))
    agreement = {"edd": {"weights": [0.1, 0.2, 0.3]}}
    bigram = {"bigram": [1, 2], "confidence": [0.1, 0.2], "agreement": agreement}
    (drafters / "bigram.json").write_text(json.dumps(bigram))
    return load.Loaded(str(top / "model"), str(drafters))

def drafter_of(loaded, text):
    return loaded.drafter(*load.drafter_calls([text], loaded.checkpoint))

@pytest.mark.parametrize("text", [
    "my-glide", "cascade(base, maxgram, k=2)", "mixture(edd, maxgram)", "mixture(base, maxgram)"])
def test_what_a_call_names_is_lossless(loaded, text):
    drafter = drafter_of(loaded, text)
    build = getattr(drafter, "chain", cape.cape)
    alone = verify.generate(loaded.target, None, verify.root_only, PROMPT, 12).tokens
    assert verify.generate(loaded.target, drafter, build, PROMPT, 12).tokens == alone
    if "maxgram" in text:
        assert drafter.gram.bigram == [1, 2] + [0] * (VOCAB - 2)
        assert drafter.gram.confidence == [0.1, 0.2]
    if "mixture" in text:
        assert drafter.agreement == ([0.1, 0.2, 0.3] if "edd" in text else None)

def test_calibration_temperatures(loaded):
    """The one that training fitted, or the one that the call names."""
    for text, temperature in (("my-glide", 0.5), ("my-glide(temperature=1)", 1)):
        assert drafter_of(loaded, text).temperature == temperature
    for text, temperature in (("edd", 0.5), ("base", 0.7)):
        assert drafter_of(loaded, f"mixture({text}, maxgram)").drafter.temperature == temperature
        text = f"mixture({text}, maxgram, temperature=2.5)"
        assert drafter_of(loaded, text).drafter.temperature == 2.5
    assert set(load.drafters_in(loaded.checkpoint)) == {"my-glide", "edd"}, "base is a model"

def test_tables_k_becomes_algorithms_K():
    """The example of cascade.py, one and three models, without Max-Gram."""
    assert load.table2((8, 13, 1), 2, True) == [[8, 5, 10], [0, 1, 10], [0, 0, 10]]
    assert load.table2(5, 1, False) == [[5]]
    three = load.table2([1, 1, 4, 2, 3, 6], 3, False)
    assert three == [[1, 0, 3], [0, 2, 1], [0, 0, 6]]

def test_a_language_model_drafts_trees(llama):
    """Its probabilities are those of its own plain forward over each path; where its context ends,
    there are none."""
    rng = random.Random(0)
    for capacity in (None, 14):
        stage, text = Stage(verify.Target(llama, capacity), 0.7), []
        stage.reset(verify.Rule().probs)
        for _ in range(4):
            new, paths = [rng.randrange(12) for _ in range(rng.randint(1, 5))], []
            text += new
            stage.begin(verify.View(torch.tensor(new), new, len(text), {}, {}), None)
            for m in (1, 2, 3):                  # the root, then nodes after any before them
                parents = [rng.randrange(len(paths)) if paths else -1 for _ in range(m)]
                tokens = [rng.randrange(12) for _ in range(m)]
                for token, parent in zip(tokens, parents):
                    paths.append((paths[parent] if parent >= 0 else []) + [token])
                probs = stage.expand(torch.tensor(tokens), parents)
                expected = torch.zeros(m, 12)
                if len(text) + len(paths) <= stage.target.capacity:
                    with torch.no_grad():
                        rows = [llama(torch.tensor([text + path])).logits[0, -1]
                                for path in paths[-m:]]
                    expected = (torch.stack(rows).float() / 0.7).softmax(-1)
                torch.testing.assert_close(probs, expected)

# ---------------------------------------------------------------- does a drafter fit its target?
def four_bits(weight):
    """Rounded to 16 values in each block of 4 columns."""
    blocks = weight.unflatten(1, (-1, 4))
    step = blocks.abs().amax(2, keepdim=True) / 7
    return ((blocks / step).round() * step).flatten(1)

def test_a_fingerprint_tells_rounded_weights_from_another_models():
    """Also those of an FP8 copy: numbers of 8 bits are not the weights, others are compared."""
    model = tiny("llama").float()
    rounded, noisy, eighth = [copy.deepcopy(model) for _ in range(3)]
    for p in rounded.parameters():
        p.data = four_bits(p.data) if p.ndim == 2 else p.data
    for p in noisy.parameters():
        p.data += 0.5 * torch.randn_like(p) * (p.std() if p.ndim == 2 else 0)
    for layer in eighth.model.layers:
        layer.mlp.up_proj.weight.data = (layer.mlp.up_proj.weight.data * 99).to(torch.float8_e4m3fn)
    own = load.fingerprint(model)
    others = noisy, tiny("llama", seed=1), tiny("llama", num_hidden_layers=2)
    fits_of = [(other, True) for other in (model, rounded, eighth)]
    for other, fits in fits_of + [(other, False) for other in others]:
        assert (load.difference(own, load.fingerprint(other)) is None) == fits
    assert "other tokens" in load.difference(own | {"vocabulary": "a"}, own | {"vocabulary": "b"})

# ---------------------------------------------------------------- bigram files
def test_bigram_files(loaded, tmp_path):
    """The published form, shorter than the vocabulary, and ours.

    A default that does not fit is a note, a file that was named is refused.
    """
    path, bigram = tmp_path / "bigram.json", [0, 2, 1]
    ours = {"bigram": bigram, "confidence": [0, 0.5, 1], "fingerprint": "a1b2"}
    for content, confidence in ((bigram, None), (ours, [0, 0.5, 1])):
        path.write_text(json.dumps(content))
        found = load.read_gram(path, 4, "a1b2")
        assert found == {"bigram": [0, 2, 1, 0], "confidence": confidence, "agreement": {}}
    for content in ([0, 4], [0] * 5, {"a": 1}, None, ours | {"agreement": {"edd": 1}},
                    ours | {"fingerprint": "0"}):
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match="bigram.json does not serve this target"):
            load.read_gram(path, 4, "a1b2")
    loaded = copy.copy(loaded)
    loaded.checkpoint, loaded.notes = tmp_path, []
    assert load.load_maxgram(loaded, "maxgram").gram.bigram == []
    assert len(loaded.notes) == 1 and "another vocabulary" in loaded.notes[0]
    with pytest.raises(UserError, match="another vocabulary"):
        load.load_maxgram(loaded, "maxgram", bigram=str(path))
