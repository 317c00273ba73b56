"""From calls on the command line to models and drafters; a fingerprint tells models apart."""
import copy
import json
import shutil

import pytest
import torch
from conftest import tiny
from helpers import TEXT, tokenizer_of

import bench
import cape
import verify
from runtime import calls, load

PROMPT = [3, 1, 4, 1, 5]
FUNCTIONS = {**bench.TREES, "cascade": load.load_cascade}

# ---------------------------------------------------------------- calls
@pytest.mark.parametrize("text, name, words, settings", [
    ("pct_cost( width =7,cost= -1e-3 , ) ", "pct-cost", [], {"width": 7, "cost": -0.001}),
    ("cape(sizes=[2,3], edges=(1,))", "cape", [], {"sizes": [2, 3], "edges": (1,)}),
    ("cascade('google/flan-t5-base', ./t5.small_2, k=(8,13), lenience=2)", "cascade",
     ["google/flan-t5-base", "./t5.small_2"], {"k": (8, 13), "lenience": 2})])
def test_what_is_read_is_what_was_written(text, name, words, settings):
    """Names of models need no quotes."""
    call = calls.read_call(text, FUNCTIONS, "tree")
    assert call[:4] == (name, FUNCTIONS[name], words, settings)

# ---------------------------------------------------------------- from names to drafters
@pytest.fixture(scope="module")
def loaded(small, tmp_path_factory):
    """A target beside two trained drafters, two language models and a bigram."""
    drafters = tmp_path_factory.mktemp("load") / "drafters"
    shutil.copytree(small / "drafters", drafters)
    (drafters / "glide").rename(drafters / "my_glide")
    (drafters / "base" / "training.json").write_text("{}")
    agreement = {"edd": {"weights": [0.1, 0.2, 0.3]}}
    bigram = {"bigram": [1, 2], "confidence": [0.1, 0.2], "agreement": agreement}
    (drafters / "bigram.json").write_text(json.dumps(bigram))
    return load.Loaded(str(small / "model"), str(drafters))

@pytest.mark.parametrize("text, temperature", [
    ("my-glide", 0.5), ("my-glide(temperature=1)", 1), ("cascade(small, maxgram, k=2)", None),
    ("mixture(edd, maxgram)", 0.5)])
def test_what_a_call_names_is_lossless(loaded, text, temperature):
    """With the calibration temperature that training fitted, or that the call names."""
    drafter = loaded.drafter(*load.drafter_calls([text], loaded.checkpoint))
    build = getattr(drafter, "chain", cape.cape)
    alone = verify.generate(loaded.target, None, verify.root_only, PROMPT, 12).tokens
    assert verify.generate(loaded.target, drafter, build, PROMPT, 12).tokens == alone
    if "maxgram" in text:
        assert (drafter.gram.bigram, drafter.gram.confidence) == ([1, 2], [0.1, 0.2])
    if "mixture" in text:
        assert drafter.agreement == [0.1, 0.2, 0.3]
    neural = drafter.drafter if "mixture" in text else drafter
    assert getattr(neural, "temperature", None) == temperature
    assert set(load.drafters_in(loaded.checkpoint)) == {"my-glide", "edd"}, "base is a model"

def test_tables_k_becomes_algorithms_K():
    """The example of cascade.py, one and three models, without Max-Gram."""
    assert load.table2((8, 13, 1), 2, True) == [[8, 5, 10], [0, 1, 10], [0, 0, 10]]
    assert load.table2(5, 1, False) == [[5]]
    three = load.table2([1, 1, 4, 2, 3, 6], 3, False)
    assert three == [[1, 0, 3], [0, 2, 1], [0, 0, 6]]

# ---------------------------------------------------------------- does a drafter fit its target?
def test_a_drafter_serves_its_target_alone():
    """And an FP8 copy of it: numbers of 8 bits are not the weights, others are compared."""
    model = tiny("llama").float()
    eighth = copy.deepcopy(model)
    for layer in eighth.model.layers:
        layer.mlp.up_proj.weight.data = (layer.mlp.up_proj.weight.data * 99).to(torch.float8_e4m3fn)
    made_for = load.fingerprint(model)
    for about, beside in ((made_for, model), (made_for, eighth), (load.fingerprint(eighth), model)):
        assert load.difference(about, beside) is None
    assert "weights" in load.difference(made_for, tiny("llama", seed=1))
    assert "layers" in load.difference(made_for, tiny("llama", num_hidden_layers=2))
    other = load.difference(made_for | {"vocabulary": "a"}, model, tokenizer_of(TEXT))
    assert other.startswith("its vocabulary was a")

# ---------------------------------------------------------------- bigram files
def test_bigram_files(loaded, tmp_path):
    """The published form, and ours.  One that does not fit is a note."""
    loaded = copy.copy(loaded)
    loaded.checkpoint, loaded.notes = tmp_path, []
    path, bigram = tmp_path / "bigram.json", [0, 2, 1]
    own = load.vocabulary_fingerprint(loaded.tokenizer)
    for content in (bigram, {"bigram": bigram, "fingerprint": own}):
        path.write_text(json.dumps(content))
        assert load.load_cascade(loaded, "maxgram").gram.bigram == bigram
    for number, content in enumerate(([0, 300], {"bigram": bigram, "fingerprint": "0"}), 1):
        path.write_text(json.dumps(content))
        assert load.load_cascade(loaded, "maxgram").gram.bigram == []
        assert len(loaded.notes) == number and "another vocabulary" in loaded.notes[-1]
