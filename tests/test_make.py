"""How the stand-in is made: what is held out stays out, each step does what it says, interrupted or not."""
# ruff: noqa: F811
import json
import shutil
import signal
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import plain, tiny
from test_corpus import dump, made_up  # noqa: F401
from test_train import brief, refused, small  # noqa: F401
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import cape
import glide
import train
import verify
from checkpoints import make
from training.bigram import load_tokenizer
from training import prepare
from runtime import text as read
from maxgram import build_bigram
from runtime import load
from runtime.grams import measure_confidence, read_bigram
from training import continuations, drafters

# ---------------------------------------------------------------- tokenizer, target
def test_the_tokenizer_of_a_corpus(tmp_path):
    """A token a digit; trained on what is not held out, and read back where the same text was seen before."""
    tokenizer = make.train_tokenizer(["x = 1234567890\n" * 50], 300)
    ids = tokenizer("x = 1234567890 é\n")["input_ids"]
    assert tokenizer.decode(ids) == "x = 1234567890 é\n" and tokenizer.eos_token_id == 0 and len(tokenizer) <= 300
    assert sum(tokenizer.decode([i]).strip().isdigit() for i in ids) == 10
    rows = [{"text": "plain words " * 50}, {"text": "zyxwvuts " * 500, "held_out": True}]
    a = make.parser().parse_args(["target", "--data", str(dump(tmp_path / "rows.jsonl", rows)), "--work", str(tmp_path), "--vocab", "300"])
    vocab, tokenizer = make.tokenizer_of(a).get_vocab(), make.tokenizer_of(a)
    assert len(tokenizer("plain")["input_ids"]) == 1 and len(tokenizer("zyxwvuts")["input_ids"]) == 8 and tokenizer.get_vocab() == vocab
    assert len(list(tmp_path.glob("tokenizer-*"))) == 1 and list(tmp_path.glob("*.part")) == []
    dump(tmp_path / "rows.jsonl", [rows[1], {"text": "other words " * 50}])
    assert make.tokenizer_of(a).get_vocab() != vocab

def test_the_stand_in_from_scratch_and_its_drafter(made_up, tmp_path, monkeypatch, capsys):
    """The whole road on made-up text: corpus, target (resumed bit for bit), a drafter, decoding."""
    data, out = str(tmp_path / "corpus"), tmp_path / "out"
    assert make.main(["corpus", "--out", data, *made_up]) == 0
    base = ["--data", data, "--work", str(tmp_path / "work"), "--device", "cpu", "--batch", "2", "--length", "200", "--every", "9",
            "--dtype", "float32", "--out", str(out)]
    target = ["target", *base, "--first", data + "-first", "--vocab", "300", "--width", "32", "--layers", "2", "--steps", "5"]
    assert make.main(target) == 0
    whole, draw, calls = (out / "target" / "model.safetensors").read_bytes(), make.draw, []

    def interrupting(ids, n, length, seed, step, eos):
        if seed == 0 and step == 3 and not calls:
            calls.append(signal.raise_signal(signal.SIGINT))
        return draw(ids, n, length, seed, step, eos)
    monkeypatch.setattr(make, "draw", interrupting)
    refused(capsys, target, "--overwrite", make.main)
    refused(capsys, [*target, "--overwrite"], "stopped after 3 of 5 steps", make.main)
    monkeypatch.setattr(make, "draw", draw)
    shutil.rmtree(out / "target")
    assert make.main([*target, "--resume"]) == 0
    assert (out / "target" / "model.safetensors").read_bytes() == whole
    about = json.loads((out / "target" / "training.json").read_text())
    assert about["tokens_seen"] == 5 * 2 * 200 and about["command"] == " ".join(["python checkpoints/make.py", *target, "--resume"])
    assert {"alpha", "held_out_loss", "held_out_loss_retell"} < set(about["validation"]) and len(about["corpus_tokens"]) == 2
    # A second run goes on where the first ended, and says so.
    again = [*target, "--init", str(out / "target"), "--repeat", "0.5", "--lr", "1e-30"]
    assert make.main([*again, "--out", str(tmp_path / "more")]) == 0
    assert (tmp_path / "more" / "target" / "model.safetensors").read_bytes() == whole
    assert json.loads((tmp_path / "more" / "target" / "training.json").read_text())["init"] == about
    refused(capsys, [*again, "--layers", "3", "--overwrite"], "of the same --layers", make.main)
    argv = ["glide", *base, "--target", str(out / "target"), "--width", "16", "--steps", "2", "--work", str(tmp_path / "w")]
    assert train.main(argv) == 0
    model, tokenizer = load.load_target(out / "target", "float64", "cpu")
    drafter, about = glide.load(out / "glide", model)
    assert load.same_target(about["target"], load.fingerprint(model, tokenizer))
    ids = tokenizer("x = 1\n#")["input_ids"]
    assert verify.generate(verify.Target(model, 64), drafter, cape.cape, ids, 12).tokens == plain(model, ids, 12)

def test_windows_of_the_target():
    """By seed and step alone; half of them begin where a document does; copies of a document stand apart."""
    ids = torch.arange(1000, dtype=torch.int32)
    first = make.draw(ids, 4, 10, 0, 3)
    assert torch.equal(first, make.draw(ids, 4, 10, 0, 3)) and first.shape == (4, 10) and (first.diff(dim=1) == 1).all()
    assert not any(torch.equal(first, make.draw(ids, 4, 10, seed, step)) for seed, step in ((0, 4), (1, 3)))
    assert set(make.draw(ids[:11], 200, 10, 0, 0)[:, 0].tolist()) == {0, 1}, "the last token is reached"
    ids[[99, 499, 995]] = 2000
    starts = make.draw(ids, 400, 10, 0, 3, eos=2000)[:, 0]
    assert set(starts[::2].tolist()) == {0, 100, 500}, "not those with too little text behind them"
    assert torch.equal(starts[1::2], make.draw(ids, 400, 10, 0, 3)[1::2, 0]), "the others are anywhere"
    index = np.array([[0, 2, 0], [0, 2, 0], [2, 3, 1], [5, 1, 0], [5, 1, 0], [5, 1, 0]])
    assert make.flat(np.array([1, 2, 3, ~4, 5, 6]), index).tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 6, 6]

# ---------------------------------------------------------------- continuations, small models
def continue_flags(small, tmp_path, rows, *more):
    return ["continuations", "--target", str(small / "model"), "--device", "cpu", "--batch", "3", "--length", "24",
            "--out", str(tmp_path / "written.jsonl"), "--data", str(dump(tmp_path / "given.jsonl", rows)), *more]

def rows_by_start(rows):
    return sorted((row["prompt"], row["answer"], row["source"]) for row in rows)

def test_continuations_are_the_targets_own(small, tmp_path):
    """Each prompt as if it were alone, to --length; what is learned from is the answer; no prompt comes twice."""
    given = [{"ids": list(range(7, 7 + i % 5 * 2 + 6)) + [i], "source": "ab"[i % 2]} for i in range(12)]
    argv, out = continue_flags(small, tmp_path, given), tmp_path / "written.jsonl"
    assert make.main(argv) == 0
    model, tokenizer = load.load_target(small / "model", "float32", "cpu")
    expected = {}
    for row in given:
        prompt = row["ids"][:len(row["ids"]) // 2]
        expected.setdefault(tuple(prompt), (prompt, plain(model, prompt, 24 - len(prompt)), row["source"]))
    rows = read.read_rows(out)
    assert rows_by_start(rows) == sorted(expected.values()) and len(rows) == 5
    folder = prepare.prepare([out], tokenizer, tmp_path / "ready")
    tokens, index = prepare.open_split(folder, "train")
    assert len(index) == 5
    for row, (start, size, _) in zip(rows, index):
        assert tokens[start:start + size].tolist() == [~id for id in row["prompt"]] + row["answer"], "no end of a text that has none"

def test_continuations_go_on_where_they_were_killed(small, tmp_path, monkeypatch, capsys):
    """The same rows as in one go, sampled; whole batches stay whatever happens; what is not this run's is never cut."""
    given, out = [{"ids": list(range(7 + i, 19 + i))} for i in range(12)], tmp_path / "written.jsonl"
    argv = continue_flags(small, tmp_path, given, "--temperature", "0.7")
    assert make.main(argv) == 0
    whole = out.read_bytes()
    lines, writes = whole.splitlines(keepends=True), continuations.Written.add
    assert len(lines) == 12 and make.main([*argv, "--resume"]) == 0 and out.read_bytes() == whole
    for size in (30, sum(map(len, lines[:7])) + 9):                          # half a row; two batches and more
        out.write_bytes(whole[:size])
        assert make.main([*argv, "--resume"]) == 0 and out.read_bytes() == whole
    # Killed while it writes the next batch
    out.write_bytes(b"".join(lines[:6]))

    def killed(file, rows):
        raise KeyboardInterrupt
    monkeypatch.setattr(continuations.Written, "add", killed)
    refused(capsys, [*argv, "--resume"], "stopped after 2 of 4 batches: the same with --resume goes on", make.main)
    assert out.read_bytes() == b"".join(lines[:6])
    monkeypatch.setattr(continuations.Written, "add", writes)
    for stranger in (b"a poem\n", b"".join(lines[:3]) + b'{"text": "mine"}', lines[0].replace(b'"run": "', b'"run": "0')):
        out.write_bytes(stranger)
        refused(capsys, [*argv, "--resume"], "holds something else than what this command writes", make.main)
        assert out.read_bytes() == stranger
    out.write_bytes(whole)
    refused(capsys, [*argv, "--temperature", "0.9", "--resume"], "holds something else", make.main)
    assert out.read_bytes() == whole and make.main([*argv, "--overwrite", "--seed", "1"]) == 0
    assert rows_by_start(map(json.loads, lines))[0][1] != rows_by_start(read.read_rows(out))[0][1], "sampled by --seed"

def test_a_continuation_ends_where_the_text_does(small, tmp_path, monkeypatch):
    """With an end-of-text token where the target writes one, and there alone.  Of a text half is given, of chats and files of questions the first question."""
    loading, ends = load.load_target, []

    def loaded(*args, **more):
        model, tokenizer = loading(*args, **more)
        prompt = tokenizer("def add(a, b):\n")["input_ids"]
        model.generation_config.eos_token_id = plain(model, prompt[:len(prompt) // 2], 3)[-1]
        ends.append(model.generation_config.eos_token_id)
        return model, tokenizer
    data = [{"text": "def add(a, b):\n"}, {"messages": [{"role": "user", "content": "add"}, {"role": "assistant", "content": "a"}]},
            {"turns": ["return", "b"]}]
    monkeypatch.setattr(load, "load_target", loaded)
    assert make.main(continue_flags(small, tmp_path, data, "--template", "plain")) == 0
    model, tokenizer = loading(small / "model", "float32", "cpu")
    rows = {tuple(row["prompt"]): row["answer"] for row in read.read_rows(tmp_path / "written.jsonl")}
    text, *chats = (tokenizer(given)["input_ids"] for given in ("def add(a, b):\n", "USER: add\n\nASSISTANT:", "USER: return\n\nASSISTANT:"))
    assert set(rows) == set(map(tuple, (text[:len(text) // 2], *chats)))
    for prompt, answer in rows.items():
        made = plain(model, prompt, 24 - len(prompt))
        assert answer == (made[:made.index(ends[0]) + 1] if ends[0] in made else made)
    assert rows[tuple(text[:len(text) // 2])][-1] == ends[0]

def test_the_corpus_own_documents_are_continued_where_the_answer_begins(small):
    rows = [{"source": "math", "text": "Question: a + b?\nAnswer: a + b\n#### b"}, {"source": "retell", "text": "a. b.\n\nAgain.\n\na. b."},
            {"source": "stories", "text": "One day, a. Two. Three"}, {"source": "stories", "text": "One day, a. Two. Three."},
            {"source": "stories", "text": "One day, a. Two. Four."}, {"source": "math", "text": "Question: x\nAnswer: y", "held_out": True}]
    path = dump(small / "corpus.jsonl", [{"held_out": False, **row} for row in rows])
    tokenizer = load_tokenizer(str(small / "model"))
    parts = continuations.given_parts(SimpleNamespace(data=[path], length=48, template=None), tokenizer)
    assert [(kind, tokenizer.decode(ids)) for kind, ids in parts] == [
        ("math", "Question: a + b?\nAnswer:"), ("retell", "a. b.\n\nAgain.\n\n"), ("stories", "One day, a."), ("stories", "One day, a. Two.")]

@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_the_loss_of_a_small_model(llama, loss):
    model, ids = drafters.SmallLM(tiny("llama", seed=5), loss), torch.randint(12, (2, 9))
    with torch.no_grad():
        p, q = (torch.distributions.Categorical(logits=m(ids).logits) for m in (llama, model.lm))
    expected = torch.distributions.kl_divergence(p, q)[:, :-1] if loss == "kl" else -q.log_prob(ids.roll(-1, 1))[:, :-1]
    assert model.loss(train.frozen_forward(llama, ids)).item() == pytest.approx(expected.mean().item(), abs=1e-5)

def test_a_saved_language_model_is_whole(small, tmp_path, monkeypatch):
    """A full disk: the old files are still there, all of them, and nothing half."""
    model, tokenizer = load.load_target(small / "model", "float32", "cpu")
    drafters.save_lm(tmp_path / "lm", model, tokenizer, {"a": 1})
    before = {p.name: p.read_bytes() for p in (tmp_path / "lm").iterdir()}

    def full(folder):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    model.lm_head.weight.data += 1
    with pytest.raises(read.UserError, match="No space left on device.*what was there is still there"):
        drafters.save_lm(tmp_path / "lm", model, tokenizer, {"a": 2})
    assert {p.name: p.read_bytes() for p in (tmp_path / "lm").iterdir()} == before and [p.name for p in tmp_path.iterdir()] == ["lm"]

# ---------------------------------------------------------------- the bigram
CODE = "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return f(x) + 2\n"

@pytest.fixture(scope="module")
def tokenizer(small):
    return small / "model"

def command(*args):
    return make.main(["bigram", *map(str, args)])

def test_bigram_end_to_end(tmp_path, tokenizer, capsys):
    """Files of all kinds; the last of fewer than fifty documents is measured on."""
    t, folder, out = AutoTokenizer.from_pretrained(tokenizer), tmp_path / "corpus", tmp_path / "new" / "bigram.json"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.py").write_text(CODE)
    dump(folder / "deep" / "b.jsonl", [{"text": x} for x in (CODE, "", "x + 1")])
    (folder / "deep" / "c.bin").write_bytes(array("H", [0, 5, 6, 7, 0, 0, 6, 7]).tobytes())
    (tmp_path / "last.txt").write_text(CODE)
    assert command("--corpus", folder, tmp_path / "last.txt", "--tokenizer", tokenizer, "--out", out) == 0
    assert capsys.readouterr().err == ""
    texts = [t(CODE)["input_ids"]] * 2 + [t("x + 1")["input_ids"], [5, 6, 7], [6, 7]]
    bigram, confidence = read_bigram(out, len(t))
    assert bigram == build_bigram(texts, len(t)) and len(bigram) == len(t) and bigram[5] == 6
    assert confidence == pytest.approx(measure_confidence([t(CODE)["input_ids"]], bigram), abs=1e-4)
    found = json.loads(out.read_text())
    assert (found["about"]["documents"], found["about"]["held_out"]) == (6, 1)
    assert found["about"]["tokens"] == sum(map(len, texts)) + len(t(CODE)["input_ids"])
    assert found["fingerprint"] == load.vocabulary_fingerprint(t) and read_bigram(out, len(t), found["fingerprint"])[0] == bigram
    # One document leaves nothing to measure; a tokenizer's first token (Llama's) is none of the text.
    t._tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    t.save_pretrained(tmp_path / "first")
    assert command("--corpus", tmp_path / "last.txt", "--tokenizer", tmp_path / "first", "--out", out) == 0
    bigram, confidence = read_bigram(out, 300)
    assert t("def")["input_ids"][0] == 0 and bigram[0] == 0 and confidence is None

def test_held_out_documents_are_not_counted(tmp_path, tokenizer):
    """Every fiftieth document, or those whose rows say so, are measured on alone; each has its own pair."""
    def made(rows):
        assert command("--corpus", dump(tmp_path / "rows.jsonl", rows), "--tokenizer", tokenizer, "--out", tmp_path / "b.json") == 0
        found = json.loads((tmp_path / "b.json").read_text())
        return found["bigram"], found["confidence"], found["about"]["held_out"]
    bigram, confidence, held = made([{"ids": [2 * i, 2 * i + 1, 2 * i]} for i in range(1, 121)])
    assert held == 2 and all(bigram[2 * i] == (2 * i + 1 if i % 50 else 0) for i in range(1, 121)) and not bigram[101]
    assert confidence is None, "the held-out documents have no pair that the bigram knows, and repeat nothing"
    bigram, _, held = made([{"ids": [2 * i, 2 * i + 1], "held_out": i in (3, 7)} for i in range(1, 121)])
    assert held == 2 and not bigram[6] and not bigram[14] and bigram[100] == 101 and bigram[200] == 201

# ---------------------------------------------------------------- what the repository ships
