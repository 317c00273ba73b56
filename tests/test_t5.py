"""The T5 family: pairs of input and output, how it learns; the shipped one against its own forward without a cache."""
import json
import math

import pytest
import torch
import transformers
from conftest import ROOT

import cascade
import verify
from runtime import load
from training import t5

SHIPPED = ROOT / "checkpoints" / "t5"
STORY = "Anna had a blue kite. She ran up the hill with it and waited for the wind. " * 3
TEXTS = [STORY + "\n\nTell it with Tom.\n\n" + STORY, "Question: What is 2 + 3?\nAnswer: 2 + 3 = 5\n#### 5", STORY]

@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "target")

# ---------------------------------------------------------------- pairs and batches
def test_an_input_is_what_the_stand_in_is_given_as_a_prompt(tmp_path, tokenizer):
    inputs, outputs = zip(*(t5.divided(document, 7) for document in TEXTS))
    assert inputs[:2] == (STORY + "\n\nTell it with Tom.\n\n", "Question: What is 2 + 3?\nAnswer:")
    assert outputs[:2] == (STORY, "2 + 3 = 5\n#### 5")
    assert f"{inputs[2]} {outputs[2]}" == STORY and 8 <= len(inputs[2].split(" ")) <= 32
    assert t5.divided("Too short.", 0) is None
    rows = [{"text": text, "source": "a", "held_out": False, "times": 2} for text in TEXTS]
    rows += [{"question": "What is 2 + 3?", "answer": "2 + 3 = 5", "held_out": True}, {"text": "word " * 2000, "held_out": False}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    learned, held_out = t5.read_pairs([tmp_path], tokenizer)
    assert len(learned) == 6 and learned[0] == learned[1] and [pair.kind for pair in held_out] == ["rows"]
    assert tokenizer.decode(held_out[0].input) == inputs[1] and held_out[0].output[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(held_out[0].output[:-1]) == "2 + 3 = 5"

def test_batches_hold_every_pair_once(tokenizer):
    lengths = [1 + (37 * i) % 200 for i in range(3000)]
    pairs = [t5.Pair("a", [5] * (i % 90), [7] * n) for i, n in enumerate(lengths)]
    first = t5.batches_of(pairs, 1024, 0, 0)
    assert sorted(sum(first, [])) == list(range(3000)) and first == t5.batches_of(pairs, 1024, 0, 0) != t5.batches_of(pairs, 1024, 0, 1)
    assert max(len(batch) * max(lengths[i] for i in batch) for batch in first) <= 1024
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in first)
    assert sum(lengths) > 0.9 * padded, "little padding"

# ---------------------------------------------------------------- learning
def test_the_loss_and_its_gradients_are_transformers_own(tokenizer):
    """Against T5's own loss with labels, pair by pair; a distilled model against KL written out."""
    pairs = [t5.Pair("a", list(range(3, 3 + n)), list(range(9, 9 + m)) + [0]) for n, m in ((4, 9), (11, 2), (6, 6))]
    models = {name: t5.fresh(name, tokenizer, seed).double() for seed, name in enumerate(("target", "base", "base-distilled"))}
    gradients = t5.gradients_of(models, pairs, lambda epoch: [[0, 2], [1]])
    losses = gradients(2)                                     # the first step of the second epoch
    assert gradients(3).keys() == losses.keys() and len(models["base"].decoder.block) == len(models["base-distilled"].decoder.block) == 3

    def own(model, pair):
        return model(input_ids=torch.tensor([pair.input]), labels=torch.tensor([pair.output]))

    count = sum(len(pairs[i].output) for i in (0, 2))
    for name in ("target", "base"):
        whole = sum(own(models[name], pairs[i]).loss * len(pairs[i].output) for i in (0, 2)) / count
        assert losses[name] == pytest.approx(whole.item(), rel=1e-4), "the loss is float32"
    kl = 0.0
    for i in (0, 2):
        p, q = (own(models[name], pairs[i]).logits[0].softmax(-1) for name in ("target", "base-distilled"))
        kl += (p * (p / q).log()).sum().item() / count
    assert losses["base-distilled"] == pytest.approx(kl, rel=1e-3)
    metrics = t5.evaluate(models, pairs[:1])
    logits = own(models["base"], pairs[0]).logits[0]
    assert metrics["base"]["right"] == (logits.argmax(-1) == torch.tensor(pairs[0].output)).double().mean().item()

def test_deeper_models_take_smaller_steps_and_tables_larger_ones(tokenizer):
    """A rate falls with the square root of 2 + 24 and 1 + 1 layers; embeddings, biases of positions and norms are AdamW's."""
    models = {name: t5.fresh(name, tokenizer, 0) for name in ("target", "small")}
    muon, adamw = t5.learners_of(models, 0.01)
    assert [group["lr"] for group in muon.param_groups] == pytest.approx([0.01 / math.sqrt(26), 0.01 / math.sqrt(2)])
    assert [group["lr"] for group in adamw.param_groups] == pytest.approx([t5.TABLES * 0.01 / math.sqrt(26), t5.TABLES * 0.01 / math.sqrt(2)])
    for i, model in enumerate(models.values()):
        tables = {id(weight) for name, weight in model.named_parameters() if "shared" in name or "norm" in name or "bias" in name}
        assert {id(weight) for weight in adamw.param_groups[i]["params"]} == tables
        assert len(muon.param_groups[i]["params"]) + len(tables) == len(list(model.parameters()))

@torch.no_grad()
def test_a_deep_target_begins_as_a_shallow_one(tokenizer):
    shallow, deep = t5.fresh("start", tokenizer, 1).eval(), t5.fresh("target", tokenizer, 0).eval()
    t5.grow(deep, shallow)
    pair = t5.Pair("a", tokenizer(STORY)["input_ids"], [0])
    assert len(deep.decoder.block) == 24 and plain(deep, pair.input, 20) == plain(shallow, pair.input, 20)
    one, other = (model(**t5.inputs_of(model, [pair]), decoder_input_ids=torch.tensor([[0, 5, 9, 7]])).logits for model in (deep, shallow))
    assert torch.allclose(one, other, atol=1e-4)

def test_the_command_resumes_and_saves_what_decodes(tmp_path, capsys):
    """Two steps with an interruption are two steps without one; a distilled model needs the target."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text, "held_out": i < 3}) + "\n" for i, text in enumerate(TEXTS * 2)))

    def learn(name, *argv):
        where = ["--work", str(tmp_path / f"{name}-work"), "--out", str(tmp_path / name)]
        return t5.main(["target", "small", "--data", str(tmp_path / "data.jsonl"), "--every", "1", "--steps", "2", *where, *argv])

    with pytest.MonkeyPatch.context() as patch:
        def interrupted(models, pairs, batches):
            def gradients(step):
                if step == 1:
                    raise verify.UserError("the power went")
                return t5_gradients(models, pairs, batches)(step)
            return gradients
        t5_gradients = t5.gradients_of
        patch.setattr(t5, "gradients_of", interrupted)
        assert learn("a") == 2 and not (tmp_path / "a").exists()
    assert learn("a") == 2 and "--resume" in capsys.readouterr().err
    assert learn("a", "--resume") == learn("b") == 0
    for name in ("target", "small"):
        one, other = (load.load_target(tmp_path / run / name, "float32", "cpu")[0] for run in "ab")
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters()))
        about = json.loads((tmp_path / "b" / name / "training.json").read_text())
        assert about["kind"] == name and math.isfinite(about["validation"]["held_out_loss"]) and "t5.py target small" in about["command"]
        for of_kind in about["written"].values():
            assert 0 <= of_kind["distinct_4grams"] <= 1 and 0 <= of_kind["length"] <= t5.LONGEST
    assert t5.main(["base-distilled", "--data", str(tmp_path)]) == 2 and "named first" in capsys.readouterr().err

def test_what_is_written_is_measured_on_greedy_decoding(tokenizer):
    """Lengths and distinct 4-grams, counted anew from decoding without a cache."""
    model = t5.fresh("base", tokenizer, 0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3)
    pairs = [t5.Pair("a", tokenizer(text)["input_ids"], [0]) for text in TEXTS[1:]]
    lengths, shares = [], []
    for pair in pairs:
        ids = plain(model, pair.input, 60)
        ids = ids[:-1] if ids[-1] == 0 else ids
        grams = [tuple(ids[i:i + 4]) for i in range(len(ids) - 3)]
        lengths.append(len(ids))
        shares.append(len(set(grams)) / max(1, len(grams)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(t5, "LONGEST", 60)
        found = t5.written(model, tokenizer, pairs)["a"]
    assert found["length"] == sum(lengths) / 2 and found["distinct_4grams"] == pytest.approx(sum(shares) / 2)
    assert 0 < found["distinct_4grams"] < 1 and found["output"] == tokenizer.decode(plain(model, pairs[0].input, 60), skip_special_tokens=True)

# ---------------------------------------------------------------- the shipped family
@pytest.fixture(scope="module")
def setup():
    setup = load.Setup(str(SHIPPED / "target"), str(SHIPPED))
    setup.drafters = [load.load_cascade(setup, "maxgram"), load.load_cascade(setup, "base", "small", "maxgram", k=(2, 4, 1), lenience=3)]
    return setup

def prompt(setup, kind):
    rows = [json.loads(line) for line in (ROOT / "checkpoints" / "prompts.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["group"] == kind)
    return setup.tokenizer(row.get("prompt") or f"Question: {row['question']}\nAnswer:")["input_ids"]

@torch.no_grad()
def plain(model, ids, new, seed=None):
    """Decoding by whole forwards of the model, without a cache, until the end of text -> tokens.  seed: of sampling at 1."""
    read, given = [0], torch.tensor([ids])
    while len(read) <= new and (len(read) == 1 or read[-1]):
        p = model(input_ids=given, decoder_input_ids=torch.tensor([read]), use_cache=False).logits[0, -1].softmax(-1)
        if seed is not None:
            p = p / verify.keyed_noise(seed, len(read), len(p), p.device)
        read.append(p.argmax().item())
    return read[1:]

@pytest.mark.parametrize("kind", ["story", "retell", "math"])
def test_the_shipped_family_is_lossless(setup, kind):
    """Greedy, to the end of the text, by Max-Gram and by three stages; accepted tokens are many."""
    ids = prompt(setup, kind)
    text = plain(setup.model, ids, 60)
    stop = [transformers.EosTokenCriteria(setup.eos)]
    assert text == verify.generate(setup.target, None, verify.root_only, ids, 60, stopping_criteria=stop).tokens
    for drafter in setup.drafters:
        out = verify.generate(setup.target, drafter, cascade.proposal, ids, 60, stopping_criteria=stop)
        assert out.tokens == text and out.tau > 1.1
    given = torch.tensor([ids])
    own = setup.model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=60, do_sample=False)[0, 1:].tolist()
    assert own == text, "transformers' generate(), for a decoder deeper than its encoder"

def test_the_shipped_family_samples_as_plain_sampling(setup):
    ids = prompt(setup, "retell")
    texts = [plain(setup.model, ids, 50, seed) for seed in (3, 4)]
    assert texts[0] != texts[1]
    for seed, text in zip((3, 4), texts):
        for drafter in setup.drafters:
            out = verify.generate(setup.target, drafter, cascade.proposal, ids, 50, verify.Sampled(seed=seed))
            assert out.tokens[:len(text)] == text

def test_an_input_of_2000_tokens(setup):
    """Max-Gram searches all of it: what it proposes first is what followed the longest match."""
    ids = (prompt(setup, "retell") * 40)[:2000]
    text = plain(setup.model, ids, 24)
    for drafter in setup.drafters:
        assert verify.generate(setup.target, drafter, cascade.proposal, ids, 24).tokens[:len(text)] == text

def test_an_end_of_text_inside_a_chunk(setup):
    """Every token of a text in turn is the end: a round that accepts more of them stops there all the same."""
    ids = prompt(setup, "retell")
    text = plain(setup.model, ids, 40)
    inside = 0
    for end in sorted(set(text)):
        stop = [transformers.EosTokenCriteria(end)]
        out = verify.generate(setup.target, setup.drafters[0], cascade.proposal, ids, 40, stopping_criteria=stop)
        assert out.tokens == text[:text.index(end) + 1]
        inside += len(out.rounds[-1].path) > len(out.rounds[-1].new) if out.rounds else 0
    assert inside, "some round was cut within its accepted tokens"
