"""From names to models and drafters: what is loaded decodes losslessly, a fingerprint tells models apart, the hub is asked once."""
import copy
import json
import random
from functools import partial

import pytest
import torch
import transformers
from conftest import VOCAB, plain, tiny
from safetensors.torch import save_file
from test_families import drafter_for, quantised
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import cape
import cascade
import maxgram
import pct
import verify
from beyond.graft import Mixture
from runtime import load
from runtime.targets import any_target

PROMPT = [3, 1, 4, 1, 5]

def tokenizer_of(words):
    vocab = {word: i for i, word in enumerate(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token=words[0])))

WORDS = [f"w{i}" for i in range(VOCAB)]

def save(folder, model, words=WORDS):
    model.save_pretrained(folder)
    tokenizer_of(words).save_pretrained(folder)
    return folder

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, two trained drafters, a language model and a bigram."""
    top = tmp_path_factory.mktemp("load")
    model = tiny("llama").float()
    save(top / "model", model)
    save(top / "drafters" / "base", tiny("llama", seed=1, num_hidden_layers=1).float())
    for name, kind in (("my_glide", "glide"), ("edd", "edd")):
        draft_model = drafter_for(model, kind).model
        about = {"kind": kind, "config": vars(draft_model.config), "target": load.fingerprint(model, tokenizer_of(WORDS)),
                 "validation": {"temperature": 0.5}}
        (top / "drafters" / name).mkdir()
        save_file(draft_model.state_dict(), top / "drafters" / name / "model.safetensors")
        (top / "drafters" / name / "training.json").write_text(json.dumps(about))
    (top / "drafters" / "base" / "training.json").write_text(json.dumps({"kind": "base", "validation": {"temperature": 0.7}}))
    agreement = {"edd": {"weights": [0.1, 0.2, 0.3]}}
    (top / "drafters" / "bigram.json").write_text(json.dumps({"bigram": [1, 2], "confidence": [0.1, 0.2], "agreement": agreement}))
    return top

@pytest.fixture(scope="module")
def setup(folder):
    return load.Setup(str(folder / "model"), str(folder / "drafters"))

# ---------------------------------------------------------------- from names to drafters
@pytest.mark.parametrize("name, words, settings", [("my-glide", [], {}), ("edd", [], {}), ("maxgram", [], {}), ("cascade", ["base", "maxgram"], {"k": 2}),
                                                   ("mixture", ["edd", "maxgram"], {}), ("mixture", ["base", "maxgram"], {})])
def test_what_a_call_names_is_lossless(setup, name, words, settings):
    known = load.loaders(setup.checkpoint)
    assert set(known) == {"my-glide", "edd", "maxgram", "cascade", "mixture"}, "base is a language model"
    drafter = known[name](setup, *(words or [name]), **settings)
    build = cascade.proposal if hasattr(drafter, "chain") else cape.cape
    alone = verify.generate(setup.target, None, verify.root_only, PROMPT, 12).tokens
    assert verify.generate(setup.target, drafter, build, PROMPT, 12).tokens == alone
    if name in ("my-glide", "edd"):
        assert drafter.temperature == 0.5
    if name == "mixture":
        assert type(drafter) is Mixture and drafter.agreement == ([0.1, 0.2, 0.3] if words[0] == "edd" else None)
        assert drafter.drafter.temperature == (0.5 if words[0] == "edd" else 0.7)
    if "maxgram" in (name, *words):
        assert drafter.gram.bigram == [1, 2] + [0] * (VOCAB - 2) and drafter.gram.confidence == [0.1, 0.2]

def test_a_cascade_of_padded_vocabularies(llama):
    """A target of 12 ids beside stages with fewer and with more: lossless, and no token that only one of them knows is drafted."""
    text, seen, stages = plain(llama, PROMPT, 16), [], []
    assert max(text) >= 9, "the target predicts what a stage does not know"
    for seed, vocab in enumerate((16, 9)):
        stages.append(any_target(tiny("llama", seed=seed, vocab_size=vocab, num_hidden_layers=2), vocab=12))
    drafter = cascade.Cascade(stages, None, 3.0, maxgram.MaxGram(), vocab=12)
    for build in (cascade.proposal, partial(pct.pct, cost=0.05, depth=5)):
        def watched(expand, root, build=build):
            tree = build(expand, root)
            seen.extend(tree.tokens[1:].tolist())
            return tree
        assert verify.generate(verify.Target(llama), drafter, watched, PROMPT, 16).tokens == text
    assert all(0 <= token < 12 for token in seen)

def test_a_language_model_drafts_trees(llama):
    """Its logits are those of its own plain forward over each path, whatever the steps and rounds; where its context ends, -inf."""
    rng = random.Random(0)
    for capacity in (None, 14):
        stage, text = load.Stage(verify.Target(llama, capacity)), []
        for _ in range(4):
            new, paths = [rng.randrange(12) for _ in range(rng.randint(1, 5))], []
            text += new
            stage.begin(verify.View(torch.tensor(new), len(text), {}, {}, new))
            for m in (1, 2, 3):                                     # the root, then nodes after any before them
                parents = [rng.randrange(len(paths)) if paths else -1 for _ in range(m)]
                tokens = [rng.randrange(12) for _ in range(m)]
                paths += [(paths[parent] if parent >= 0 else []) + [token] for token, parent in zip(tokens, parents)]
                logits = stage.expand(torch.tensor(tokens), parents)
                if len(text) + len(paths) > stage.target.capacity:
                    assert logits.isneginf().all() and logits.shape == (m, 12)
                    continue
                with torch.no_grad():
                    own = [llama(torch.tensor([text + path])).logits[0, -1] for path in paths[-m:]]
                torch.testing.assert_close(logits, torch.stack(own))
            stage.keep([0])
        stage.reset()
        assert stage.text == stage.target.ids == []

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
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=weight.dtype)
    return weight + share * weight.std() * noise

def test_a_fingerprint_tells_rounded_weights_from_another_models():
    model = tiny("llama")
    own = load.fingerprint(model)
    others = {
        True: [model, changed(model, lambda weight: weight.bfloat16().double()), quantised(copy.deepcopy(model), torch.nn.Linear),
               changed(model, four_bits), changed(model, lambda weight: tuned(weight, 0.05))],
        False: [tiny("llama", seed=1), changed(model, lambda weight: tuned(weight, 0.5)), tiny("llama", num_hidden_layers=2)]}
    for expected, those in others.items():
        for other in those:
            found = load.fingerprint(other)
            assert load.fits(own, found) is load.fits(found, own) is expected
    assert not load.fits(own | {"vocabulary": "a"}, own | {"vocabulary": "b"}), "tokens mean something else"
    assert not load.fits({}, own)

def test_a_drafter_serves_its_targets_relative(folder, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    setup = load.Setup(str(save(tmp_path / "rounded", changed(model, four_bits))), str(folder / "drafters"))
    assert load.load_drafter(setup, "edd").needs

# ---------------------------------------------------------------- bigram files
def test_bigram_files(tmp_path):
    """The published form, shorter than the vocabulary, and ours."""
    path = tmp_path / "b.json"
    for content, bigram, confidence in (([0, 2, 1], [0, 2, 1, 0], None), ({"bigram": [0, 2, 1], "about": {}}, [0, 2, 1, 0], None),
                                        ({"bigram": [0, 2, 1], "confidence": [0, 0.5, 1], "fingerprint": "a1b2"}, [0, 2, 1, 0], [0, 0.5, 1])):
        path.write_text(json.dumps(content))
        assert load.read_gram(path, 4, "a1b2") == {"bigram": bigram, "confidence": confidence, "agreement": {}}

# ---------------------------------------------------------------- the hub, devices
def refusal(kind):
    """An error of the hub's, without an answer of a server."""
    error = kind.__new__(kind)
    error.args = ("refused",)
    return error
