"""From names to models and drafters: what is loaded decodes losslessly, a fingerprint tells models
apart."""
import copy
import json
import random

import pytest
import torch
import transformers
from conftest import VOCAB, plain, tiny
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import cape
import edd
import glide
import verify
from beyond.graft import Mixture
from runtime import families, load
from runtime.calls import read_call
from runtime.errors import UserError

PROMPT = [3, 1, 4, 1, 5]
WORDS = [f"w{i}" for i in range(VOCAB)]

# ---------------------------------------------------------------- also used by other tests
def save_drafter(folder, kind, model, tokenizer, temperature=1.0, config=None):
    """A random drafter of a kind, saved as train.py does."""
    if config is None:
        is_glide = kind in ("glide", "vanilla")
        config_class = glide.Config if is_glide else edd.Config
        more = {"width": 16, "glimpse": kind == "glide"} if is_glide else {"hidden": 2}
        config = config_class.for_target(model, **more)
    torch.manual_seed(0)
    draft_model = families.new(kind, config, model)
    about = {"kind": kind, "config": vars(config), "target": load.fingerprint(model, tokenizer),
             "validation": {"temperature": temperature}}
    folder.mkdir(parents=True)
    save_file(draft_model.state_dict(), folder / "model.safetensors")
    (folder / "training.json").write_text(json.dumps(about))

def tokenizer_of(words):
    vocab = {word: i for i, word in enumerate(words)}
    word_level = Tokenizer(models.WordLevel(vocab, unk_token=words[0]))
    return PreTrainedTokenizerFast(tokenizer_object=word_level)

def save(folder, model, words=WORDS):
    model.save_pretrained(folder)
    tokenizer_of(words).save_pretrained(folder)
    return folder

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, two trained drafters, a language model and a bigram."""
    top = tmp_path_factory.mktemp("load")
    model, drafters = tiny("llama").float(), top / "drafters"
    save(top / "model", model)
    save(drafters / "base", tiny("llama", seed=1, num_hidden_layers=1).float())
    save_drafter(drafters / "my_glide", "glide", model, tokenizer_of(WORDS), 0.5)
    save_drafter(drafters / "edd", "edd", model, tokenizer_of(WORDS), 0.5)
    about = {"kind": "base", "validation": {"temperature": 0.7}}
    (drafters / "base" / "training.json").write_text(json.dumps(about))
    agreement = {"edd": {"weights": [0.1, 0.2, 0.3]}}
    bigram = {"bigram": [1, 2], "confidence": [0.1, 0.2], "agreement": agreement}
    (drafters / "bigram.json").write_text(json.dumps(bigram))
    return top

@pytest.fixture(scope="module")
def setup(folder):
    return load.Setup(str(folder / "model"), str(folder / "drafters"))

def drafter_of(setup, text):
    return setup.drafter(read_call(text, load.loaders(setup.checkpoint), "drafter"))

# ---------------------------------------------------------------- from names to drafters
@pytest.mark.parametrize("text", [
    "my-glide", "edd", "maxgram", "cascade(base, maxgram, k=2)", "mixture(edd, maxgram)",
    "mixture(base, maxgram)"])
def test_what_a_call_names_is_lossless(setup, text):
    drafter = drafter_of(setup, text)
    build = getattr(drafter, "chain", cape.cape)
    alone = verify.generate(setup.target, None, verify.root_only, PROMPT, 12).tokens
    assert verify.generate(setup.target, drafter, build, PROMPT, 12).tokens == alone
    if "maxgram" in text:
        assert drafter.gram.bigram == [1, 2] + [0] * (VOCAB - 2)
        assert drafter.gram.confidence == [0.1, 0.2]
    if "mixture" in text:
        assert type(drafter) is Mixture
        assert drafter.agreement == ([0.1, 0.2, 0.3] if "edd" in text else None)

def test_what_is_there(setup):
    known = {"my-glide", "edd", "maxgram", "cascade", "mixture"}
    assert set(load.loaders(setup.checkpoint)) == known, "base is a language model"

def test_calibration_temperatures(setup):
    """The one that training fitted, or the one that the call names."""
    for text, temperature in (("my-glide", 0.5), ("my-glide(temperature=1)", 1)):
        assert drafter_of(setup, text).temperature == temperature
    for text, temperature in (("edd", 0.5), ("base", 0.7)):
        assert drafter_of(setup, f"mixture({text}, maxgram)").drafter.temperature == temperature
        text = f"mixture({text}, maxgram, temperature=2.5)"
        assert drafter_of(setup, text).drafter.temperature == 2.5
    for wrong in ("0", "-1", "'x'", "True", "[1]"):
        with pytest.raises(UserError, match="a calibration temperature is a number above 0"):
            drafter_of(setup, f"edd(temperature={wrong})")

def test_tables_k_becomes_algorithms_K():
    """The example of cascade.py, one and three models, without Max-Gram."""
    assert load.table2((8, 13, 1), 2, True) == [[8, 5, 10], [0, 1, 10], [0, 0, 10]]
    assert load.table2(5, 1, False) == [[5]]
    three = load.table2([1, 1, 4, 2, 3, 6], 3, False)
    assert three == [[1, 0, 3], [0, 2, 1], [0, 0, 6]]

def test_a_language_model_drafts_trees(llama):
    """Its probabilities are those of its own plain forward over each path, whatever the steps and
    rounds; where its context ends, there are none."""
    rng = random.Random(0)
    for capacity in (None, 14):
        stage, text = load.Stage(verify.Target(llama, capacity), 0.7), []
        stage.reset(verify.Rule().probs, None)
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
                if len(text) + len(paths) > stage.target.capacity:
                    assert probs.shape == (m, 12) and not probs.any()
                    continue
                with torch.no_grad():
                    own = [llama(torch.tensor([text + path])).logits[0, -1] for path in paths[-m:]]
                own = (torch.stack(own).float() / 0.7).softmax(-1)
                torch.testing.assert_close(probs, own)
            stage.keep([0])

# ---------------------------------------------------------------- does a drafter fit its target?
def changed(model, change):
    model = copy.deepcopy(model)
    for p in model.parameters():
        if p.ndim == 2:
            p.data = change(p.data)
    return model

def four_bits(weight):
    """Rounded to 16 values in each block of 4 columns."""
    blocks = weight.unflatten(1, (-1, 4))
    step = blocks.abs().amax(2, keepdim=True) / 7
    return ((blocks / step).round() * step).flatten(1)

def tuned(weight, share):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return weight + share * weight.std() * noise

def test_a_fingerprint_tells_rounded_weights_from_another_models():
    model = tiny("llama")
    own = load.fingerprint(model)
    others = {
        True: [model, changed(model, lambda weight: weight.bfloat16().double()),
               changed(model, four_bits), changed(model, lambda weight: tuned(weight, 0.05))],
        False: [tiny("llama", seed=1), changed(model, lambda weight: tuned(weight, 0.5)),
                tiny("llama", num_hidden_layers=2)]}
    for expected, those in others.items():
        for other in those:
            found = load.fingerprint(other)
            assert load.fits(own, found) is load.fits(found, own) is expected
    assert not load.fits(own | {"vocabulary": "a"}, own | {"vocabulary": "b"}), "other tokens"
    assert not load.fits({}, own)

def test_a_drafter_serves_its_targets_relative(folder, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    rounded = save(tmp_path / "rounded", changed(model, four_bits))
    assert load.load_drafter(load.Setup(str(rounded), str(folder / "drafters")), "edd").needs

# ---------------------------------------------------------------- bigram files
def test_bigram_files(tmp_path):
    """The published form, shorter than the vocabulary, and ours."""
    path, bigram = tmp_path / "b.json", [0, 2, 1]
    ours = {"bigram": bigram, "confidence": [0, 0.5, 1], "fingerprint": "a1b2"}
    for content, confidence in ((bigram, None), ({"bigram": bigram, "about": {}}, None),
                                (ours, [0, 0.5, 1])):
        path.write_text(json.dumps(content))
        found = load.read_gram(path, 4, "a1b2")
        assert found == {"bigram": [0, 2, 1, 0], "confidence": confidence, "agreement": {}}
    for content in ([0, 4], [0, -1], [0, 1.5], [0] * 5, {"a": 1}, {"bigram": 3}, "x", None,
                    ours | {"fingerprint": "0"}, ours | {"agreement": {"edd": 1}}):
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match="b.json does not serve this target"):
            load.read_gram(path, 4, "a1b2")

def test_another_target_does_without_the_checkpoints_bigram(folder, tmp_path):
    """A default that does not fit is a note, a file that was named is refused."""
    top, bigram = tmp_path / "drafters", str(tmp_path / "drafters" / "bigram.json")
    top.mkdir()
    (top / "bigram.json").write_text(json.dumps({"bigram": [1], "fingerprint": "another"}))
    setup = load.Setup(str(folder / "model"), str(top))
    assert load.load_cascade(setup, "maxgram").gram.bigram == []
    assert len(setup.notes) == 1 and "another vocabulary" in setup.notes[0]
    with pytest.raises(UserError, match="another vocabulary"):
        load.load_cascade(setup, "maxgram", bigram=bigram)
