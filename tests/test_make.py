"""How the stand-in is made: what is held out stays out, each step does what it says, interrupted or not."""
import json
import signal
from array import array
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, plain, tiny
from test_house import run_alone
from tokenizers.processors import TemplateProcessing

import cape
import glide
import train
import verify
from checkpoints import make
from test_corpus import corpus, dump, made_up  # noqa: F401
from maxgram import build_bigram, measure_confidence, read_bigram


# ---------------------------------------------------------------- tokenizer, target
def test_a_corpus_without_problems_and_mistakes(made_up, tmp_path, capsys):
    assert make.main(["corpus", "--out", str(tmp_path / "c"), *made_up[:2]]) == 0
    assert {p.stem for p in (tmp_path / "c").iterdir()} == {"stories", "retell"}
    assert not (tmp_path / "c-first").exists()
    capsys.readouterr()
    for argv, words in ((["corpus", *made_up[:2], "--math", "/no/such"], "--math: /no/such does not exist"),
                        (["corpus"], "required: --stories"), ([], "required: made"),
                        (["corpse"], "invalid choice: 'corpse'"), (["target"], "required: --data"),
                        (["target", "--data", "/no/such"], "--data: /no/such does not exist"),
                        (["target", "--data", "x", "--steps", "0"], "--steps is 0"),
                        (["target", "--data", "x", "--vocab", "-3"], "--vocab is -3"),
                        (["small", "huge", "--data", "x"], "cannot make huge: small models are base small"),
                        (["small", "--data", "x", "--target", "/no/such"], "target /no/such does not exist"),
                        (["continuations", "--data", "x", "--device", "cuda"], "no CUDA device")):
        if words == "no CUDA device" and torch.cuda.is_available():
            continue
        assert make.main(argv) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1 and err.startswith("make.py: "), err


def test_the_tokenizer(tmp_path):
    tokenizer = make.train_tokenizer(["x = 1234567890\n" * 50], 300)
    ids = tokenizer("x = 1234567890 é\n")["input_ids"]
    assert tokenizer.decode(ids) == "x = 1234567890 é\n"
    assert tokenizer.eos_token_id == 0 and len(tokenizer) <= 300
    assert sum(tokenizer.decode([i]).strip().isdigit() for i in ids) == 10, "a token a digit"


def test_the_tokenizer_of_a_corpus(tmp_path):
    """It is trained on what is not held out, and read back where the same text was seen before."""
    rows = [{"text": "plain words " * 50}, {"text": "zyxwvuts " * 500, "held_out": True}]
    data = dump(tmp_path / "rows.jsonl", rows)
    a = make.parser().parse_args(["target", "--data", str(data), "--work", str(tmp_path), "--vocab", "300"])
    tokenizer = make.tokenizer_of(a)
    assert len(tokenizer("plain")["input_ids"]) == 1 and len(tokenizer("zyxwvuts")["input_ids"]) == 8
    folder, = tmp_path.glob("tokenizer-*")
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    assert make.tokenizer_of(a).get_vocab() == tokenizer.get_vocab()
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before and list(tmp_path.glob("*.part")) == []
    dump(data, rows[1:] + [{"text": "other words " * 50}])
    assert make.tokenizer_of(a).get_vocab() != tokenizer.get_vocab()
    dump(data, [{"ids": [1, 2]}])
    with pytest.raises(train.UserError, match="trained on text"):
        make.tokenizer_of(a)


def test_the_stand_in_from_scratch_and_its_drafter(made_up, tmp_path, monkeypatch, capsys):
    """The whole road on made-up text: corpus, target (resumed bit for bit), a drafter, decoding."""
    data, out = str(tmp_path / "corpus"), tmp_path / "out"
    assert make.main(["corpus", "--out", data, *made_up]) == 0
    base = ["--data", data, "--work", str(tmp_path / "work"), "--device", "cpu", "--batch", "2",
            "--length", "200", "--every", "2", "--out", str(out)]
    target = ["target", *base, "--first", data + "-first", "--vocab", "300", "--width", "32", "--layers", "2", "--steps", "5"]
    assert make.main(target) == 0
    whole = (out / "target" / "model.safetensors").read_bytes()
    draw, calls = make.draw, []

    def interrupting(ids, n, length, seed, step, eos):
        if seed == 0 and step == 3 and not calls:
            calls.append(signal.raise_signal(signal.SIGINT))
        return draw(ids, n, length, seed, step, eos)
    monkeypatch.setattr(make, "draw", interrupting)
    assert make.main(target) == 2 and calls
    monkeypatch.setattr(make, "draw", draw)
    (out / "target" / "model.safetensors").unlink()
    assert make.main([*target, "--resume"]) == 0
    assert (out / "target" / "model.safetensors").read_bytes() == whole
    about = json.loads((out / "target" / "training.json").read_text())
    assert about["tokens_seen"] == 5 * 2 * 200
    assert about["command"] == " ".join(["python checkpoints/make.py", *target, "--resume"])
    assert {"alpha", "held_out_loss", "held_out_loss_retell"} < set(about["validation"])
    assert len(about["corpus_tokens"]) == 2

    # A second run goes on where the first ended, and says so.
    again = [*target, "--init", str(out / "target"), "--repeat", "0.5", "--lr", "1e-30"]
    assert make.main([*again, "--out", str(tmp_path / "more")]) == 0
    assert (tmp_path / "more" / "target" / "model.safetensors").read_bytes() == whole
    assert json.loads((tmp_path / "more" / "target" / "training.json").read_text())["init"] == about
    capsys.readouterr()
    assert make.main([*again, "--layers", "3"]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("make.py: --init: ") and "of the same --layers" in err

    assert train.main(["glide", *base, "--target", str(out / "target"), "--width", "16", "--steps", "2"]) == 0
    model, tokenizer = train.load_target(out / "target", "float64", "cpu")
    drafter, about = glide.load(out / "glide", model)
    assert train.same_target(about["target"], train.fingerprint(model, tokenizer))
    assert about["target"]["vocabulary"] == train.vocabulary_fingerprint(tokenizer)
    ids = tokenizer("x = 1\n#")["input_ids"]
    for build in (cape.chain, cape.cape):
        out = verify.generate(verify.Target(model, 64), drafter, build, ids, 12)
        assert out.tokens == plain(model, ids, 12)


# ---------------------------------------------------------------- small models, continuations
@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny random target with a tokenizer, saved as Hugging Face does, and a file of text."""
    folder = tmp_path_factory.mktemp("target")
    text = "def add(a, b):\n    return a + b\n\n"
    tiny("llama", vocab_size=300, max_position_embeddings=64).float().save_pretrained(folder / "model")
    make.train_tokenizer([text * 400], 300).save_pretrained(folder / "model")
    dump(folder / "text.jsonl", [{"text": (text * 60)[i:]} for i in range(60)])
    return folder


def base_flags(small, tmp_path, *more):
    return ["--target", str(small / "model"), "--work", str(tmp_path / "work"), "--device", "cpu",
            "--batch", "3", "--length", "24", *more]


def test_continuations_are_the_targets_own(small, tmp_path):
    written = tmp_path / "written.jsonl"
    flags = base_flags(small, tmp_path, "--data", str(small / "text.jsonl"))
    argv = ["continuations", *flags, "--steps", "4", "--out", str(written)]
    assert make.main(argv) == 0
    rows = [json.loads(line)["ids"] for line in written.read_text().splitlines()]
    model, tokenizer = train.load_target(small / "model", "float32", "cpu")
    assert len(rows) == 12 and len({tuple(row[:6]) for row in rows}) > 6, "of twelve documents"
    for ids in rows:
        assert 6 <= len(ids) <= 24 and ids[6:] == plain(model, ids[:6], 18)[:len(ids) - 6]
        assert tokenizer.decode(ids[:6]) in "def add(a, b):\n    return a + b\n\n" * 3, "the text begins them"
    whole = written.read_bytes()
    written.write_bytes(whole[:len(whole) // 2])                   # cut off in the middle of a row
    assert make.main([*argv, "--resume"]) == 0 and written.read_bytes() == whole
    # A drafter learns from them.
    flags = base_flags(small, tmp_path, "--data", str(written), "--out", str(tmp_path))
    assert train.main(["glide", *flags, "--width", "16", "--steps", "1"]) == 0


def test_continuations_through_a_drafter_are_the_same(small, tmp_path, capsys):
    """A drafter that was trained for a moment changes nothing but the time; one of another target is refused."""
    flags = base_flags(small, tmp_path, "--data", str(small / "text.jsonl"))
    assert train.main(["glide", "edd", *flags, "--hidden", "2", "--width", "16", "--steps", "2", "--out", str(tmp_path)]) == 0
    written = []
    for more in ([], ["--drafter", str(tmp_path / "glide")], ["--drafter", str(tmp_path / "edd")]):
        out = tmp_path / f"{len(written)}.jsonl"
        assert make.main(["continuations", *flags, *more, "--steps", "2", "--out", str(out)]) == 0
        written.append(out.read_text())
    assert written[0] == written[1] == written[2] and written[0].count("\n") == 6
    about = json.loads((tmp_path / "edd" / "training.json").read_text())
    about["target"]["vocabulary"] = "another"
    (tmp_path / "edd" / "training.json").write_text(json.dumps(about))
    for folder, words in (("edd", "made for another target"), ("none", "cannot be used")):
        assert make.main(["continuations", *flags, "--drafter", str(tmp_path / folder), "--out", str(tmp_path / "x")]) == 2
        assert words in capsys.readouterr().err


def test_a_continuation_ends_where_the_text_does(small, tmp_path, monkeypatch):
    """What follows the end-of-text token is padding, and no data."""
    load, given = train.load_target, []

    def loaded(*args, **more):
        model, tokenizer = load(*args, **more)
        made = torch.tensor([[8, 9, 0, 0], [7] * 4, [0, 8, 0, 0]])
        model.generate = lambda prompts, **settings: given.append(prompts.tolist()) or torch.cat((prompts, made), 1)
        return model, tokenizer
    monkeypatch.setattr(train, "load_target", loaded)
    out = tmp_path / "out.jsonl"
    flags = base_flags(small, tmp_path, "--data", str(small / "text.jsonl"))
    assert make.main(["continuations", *flags, "--steps", "1", "--out", str(out)]) == 0
    (first, second, third), = given
    assert train.read_rows(out) == [{"ids": first + [8, 9]}, {"ids": second + [7] * 4}, {"ids": third}]


def test_the_corpus_own_documents_are_continued_where_the_answer_begins(small, tmp_path):
    rows = [{"source": "math", "text": "Question: a + b?\nAnswer: a + b\n#### b"}, {"source": "retell", "text": "a. b.\n\nAgain.\n\na. b."},
            {"source": "stories", "text": "One day, a. Two. Three"}, {"source": "stories", "text": "One day, a. Two. Three."},
            {"source": "math", "text": "Question: x\nAnswer: y", "held_out": True}, {"text": "def add(a, b):\n    return a + b"}]
    path = dump(tmp_path / "rows.jsonl", [{"held_out": False, **row} for row in rows])
    tokenizer = make.load_tokenizer(str(small / "model"))
    parts = make.given_parts(SimpleNamespace(data=[path], length=48), tokenizer)
    texts = [tokenizer.decode(ids) for ids in parts]
    assert texts[:4] == ["Question: a + b?\nAnswer:", "a. b.\n\nAgain.\n\n", "One day, a.", "One day, a. Two."]
    assert len(parts) == 5 and parts[4] == tokenizer(rows[-1]["text"])["input_ids"][:12]


def test_prompts_of_several_lengths_are_continued_side_by_side(small, tmp_path):
    """Each as if it were alone."""
    rows = [{"source": "math", "text": f"Question: {'a ' * i}\nAnswer: b", "held_out": False} for i in range(6)]
    out = tmp_path / "out.jsonl"
    flags = base_flags(small, tmp_path, "--data", str(dump(tmp_path / "rows.jsonl", rows)))
    flags[flags.index("--length") + 1] = "60"
    flags[flags.index("--batch") + 1] = "6"
    assert make.main(["continuations", *flags, "--steps", "1", "--out", str(out)]) == 0
    model, tokenizer = train.load_target(small / "model", "float32", "cpu")
    starts = [tokenizer(row["text"][:-2])["input_ids"] for row in rows]
    longest, seen = max(map(len, starts)), set()
    for row in train.read_rows(out):
        start = next(ids for ids in starts if row["ids"][:len(ids)] == ids and len(row["ids"]) == len(ids) + 60 - longest)
        seen.add(len(start))
        assert row["ids"] == start + plain(model, start, 60 - longest)
    assert len(seen) == 6


def test_small_models_learn_from_the_target(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make, "SMALL", {"base": (2, 32), "small": (1, 32)})
    out, again = tmp_path / "out", tmp_path / "again"
    flags = base_flags(small, tmp_path, "--data", str(small / "text.jsonl"))
    assert make.main(["small", *flags, "--steps", "3", "--out", str(out)]) == 0
    for name, layers in (("base", 2), ("small", 1)):
        model, _ = train.load_target(out / name, "float32", "cpu")
        about = json.loads((out / name / "training.json").read_text())
        assert model.config.num_hidden_layers == layers and about["kind"] == name
        assert about["tokens_seen"] == 3 * 3 * 24
    more = ["--init", str(out), "--out", str(again)]
    assert make.main(["small", "small", *flags, *more, "--lr", "1e-30", "--steps", "1"]) == 0
    first, second = ((folder / "small" / "model.safetensors").read_bytes() for folder in (out, again))
    assert first == second
    assert json.loads((again / "small" / "training.json").read_text())["init"]["tokens_seen"] == 3 * 3 * 24
    about = json.loads((out / "small" / "training.json").read_text())
    about["target"]["vocabulary"] = "another"
    (out / "small" / "training.json").write_text(json.dumps(about))
    assert make.main(["small", "small", *flags, *more, "--steps", "1"]) == 2
    assert "made for another target" in capsys.readouterr().err


def test_the_loss_of_a_small_model_is_kl_to_the_target(llama):
    model = make.SmallLM(tiny("llama", seed=5))
    ids = torch.randint(12, (2, 9))
    batch = train.frozen_forward(llama, ids)
    loss, logits = model.loss(batch), model.predict(batch)
    with torch.no_grad():
        p, q = (torch.distributions.Categorical(logits=m(ids).logits) for m in (llama, model.lm))
    assert loss.item() == pytest.approx(torch.distributions.kl_divergence(p, q)[:, :-1].mean().item(), abs=1e-5)
    assert torch.equal(logits, model.lm(ids).logits)


def test_a_saved_language_model_is_whole(small, tmp_path, monkeypatch):
    """Killed while it is written: the old files are still there, all of them."""
    model, tokenizer = train.load_target(small / "model", "float32", "cpu")
    make.save_lm(tmp_path / "lm", model, tokenizer, {"a": 1})
    before = {p.name: p.read_bytes() for p in (tmp_path / "lm").iterdir()}

    def killed(folder):
        raise KeyboardInterrupt
    monkeypatch.setattr(tokenizer, "save_pretrained", killed)
    for p in model.parameters():
        p.data += 1
    with pytest.raises(KeyboardInterrupt):
        make.save_lm(tmp_path / "lm", model, tokenizer, {"a": 2})
    assert {p.name: p.read_bytes() for p in (tmp_path / "lm").iterdir()} == before


# ---------------------------------------------------------------- the bigram
TEXT = "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return f(x) + 2\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make.train_tokenizer([TEXT * 3], 300).save_pretrained(folder)
    return folder


def command(*args):
    return make.main(["bigram", *map(str, args)])


def test_bigram_end_to_end(tmp_path, tokenizer, capsys):
    from transformers import AutoTokenizer
    t = AutoTokenizer.from_pretrained(tokenizer)
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    (corpus / "a.py").write_text(TEXT)
    dump(corpus / "deep" / "b.jsonl", [{"text": x} for x in (TEXT, "", "x + 1")])
    (corpus / "deep" / "c.bin").write_bytes(array("H", [0, 5, 6, 7, 0, 0, 6, 7]).tobytes())
    (corpus / ".hidden").write_bytes(b"\xff")
    (corpus / "empty.txt").write_text("")
    last = tmp_path / "last.txt"
    last.write_text(TEXT)
    out = tmp_path / "new" / "bigram.json"
    assert command("--corpus", corpus, last, "--tokenizer", tokenizer, "--out", out) == 0
    assert capsys.readouterr().err == ""
    texts = [t(TEXT)["input_ids"]] * 2 + [t("x + 1")["input_ids"], [5, 6, 7], [6, 7]]
    bigram, confidence = read_bigram(out, len(t))
    assert bigram == build_bigram(texts, len(t)) and len(bigram) == len(t) and bigram[5] == 6
    assert confidence == pytest.approx(measure_confidence([t(TEXT)["input_ids"]], bigram), abs=1e-4)
    about = json.loads(out.read_text())["about"]
    assert (about["documents"], about["held_out"]) == (6, 1)
    assert about["tokens"] == sum(map(len, texts)) + len(t(TEXT)["input_ids"])
    assert [p.name for p in out.parent.iterdir()] == ["bigram.json"]        # no temporary file is left


def test_held_out_documents_are_not_counted(tmp_path, tokenizer):
    """Every fiftieth document, or those whose rows say so, are measured on alone; each has its own pair."""
    def made(rows):
        out, corpus = tmp_path / "b.json", dump(tmp_path / "rows.jsonl", rows)
        assert command("--corpus", corpus, "--tokenizer", tokenizer, "--out", out) == 0
        found = json.loads(out.read_text())
        return found["bigram"], found["confidence"], found["about"]["held_out"]
    rows = [{"ids": [2 * i, 2 * i + 1, 2 * i]} for i in range(1, 121)]
    bigram, confidence, held = made(rows)
    assert held == 2 and not any(bigram[x] for i in (50, 100) for x in (2 * i, 2 * i + 1))
    assert all(bigram[2 * i] == 2 * i + 1 for i in range(1, 121) if i % 50), "the others are"
    assert confidence is None, "the held-out documents have no pair that the bigram knows, and repeat nothing"
    rows = [{"ids": [2 * i, 2 * i + 1], "held_out": i in (3, 7)} for i in range(1, 121)]
    bigram, _, held = made(rows)
    assert held == 2 and not bigram[6] and not bigram[14] and bigram[100] == 101 and bigram[200] == 201


def test_a_bigram_says_whose_it_is(tmp_path, tokenizer):
    """The fingerprint is the vocabulary's, and a reader with another vocabulary refuses the file."""
    (tmp_path / "a.txt").write_text(TEXT)
    out = tmp_path / "b.json"
    assert command("--corpus", tmp_path / "a.txt", "--tokenizer", tokenizer, "--out", out) == 0
    loaded = make.load_tokenizer(str(tokenizer))
    mine = train.vocabulary_fingerprint(loaded)
    assert json.loads(out.read_text())["fingerprint"] == mine
    assert read_bigram(out, 10 ** 6, mine)[0] == read_bigram(out, 10 ** 6)[0]
    other = train.vocabulary_fingerprint(make.train_tokenizer(["another text altogether " * 9], 300))
    with pytest.raises(ValueError, match="another tokenizer"):
        read_bigram(out, 10 ** 6, other)


def test_a_bigram_is_of_the_text_alone(tmp_path):
    """Not of the token that a tokenizer (Llama's) puts before it."""
    loaded = make.train_tokenizer([TEXT * 3], 300)
    first = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    loaded._tokenizer.post_processor = first
    loaded.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text(TEXT)
    out = tmp_path / "b.json"
    assert command("--corpus", tmp_path / "a.txt", "--tokenizer", tmp_path / "tokenizer", "--out", out) == 0
    assert loaded("def")["input_ids"][0] == 0 and read_bigram(out, 300)[0][0] == 0


def test_one_document_leaves_nothing_to_measure(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(TEXT)
    out = tmp_path / "b.json"
    assert command("--corpus", tmp_path / "a.txt", "--tokenizer", tokenizer, "--out", out) == 0
    assert read_bigram(out, 10**6)[1] is None


def test_mistakes_about_bigrams_are_one_sentence_and_status_2(tmp_path, tokenizer, capsys):
    good, old = tmp_path / "a.txt", tmp_path / "out.json"
    good.write_text(TEXT)
    old.write_text("[0]")
    for name, data in {"odd.bin": b"abc", "high.bin": array("H", [1, 60000]).tobytes(), "latin.txt": b"\xff",
                       "bad.jsonl": b"{\n", "field.jsonl": b'{"body": "x"}\n', "row.jsonl": b"[[1]]\n",
                       "type.jsonl": b'{"text": 3}\n'}.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "nothing").mkdir()
    ok = ("--tokenizer", tokenizer, "--out", old)
    for args, why in [
        ((), "--corpus"),
        (("--corpus", tmp_path / "no.txt", *ok), "--corpus: "),
        (("--corpus", tmp_path / "no.txt", *ok), "does not exist"),
        (("--corpus", tmp_path / "no.bin", *ok), "does not exist"),
        (("--corpus", tmp_path / "nothing", *ok), "holds no text"),
        (("--corpus", tmp_path / "type.jsonl", *ok), "holds no text"),
        (("--corpus", tmp_path / "odd.bin", *ok), "odd number of bytes"),
        (("--corpus", tmp_path / "high.bin", *ok), "the corpus holds token id 60000"),
        (("--corpus", tmp_path / "latin.txt", *ok), "cannot be read as text"),
        (("--corpus", tmp_path / "bad.jsonl", *ok), "cannot be read as text or JSON lines"),
        (("--corpus", tmp_path / "field.jsonl", *ok), "field.jsonl has none of the fields"),
        (("--corpus", tmp_path / "row.jsonl", *ok), "has none of the fields"),
        (("--corpus", good, "--tokenizer", tmp_path / "no", "--out", old), "--tokenizer"),
        (("--corpus", good, "--tokenizer", tmp_path / "nothing", "--out", old), "--tokenizer"),
        (("--corpus", good, "--tokenizer", tokenizer, "--out", tmp_path), "is a folder"),
        (("--corpus", good, "--tokenizer", tokenizer, "--out", good / "b.json"), "a.txt"),
        (("--corpus", good, *ok, "--nonsense"), "--help"),
    ]:
        assert command(*args) == 2, args
        err = capsys.readouterr().err
        assert why in err and err.count("\n") == 1 and err.startswith("make.py: "), (args, err)
    assert make.main(["trigram"]) == 2
    assert old.read_text() == "[0]"


def test_a_failed_write_leaves_the_old_file(tmp_path, tokenizer, monkeypatch, capsys):
    good, old = tmp_path / "a.txt", tmp_path / "out.json"
    good.write_text(TEXT)
    old.write_text("[0]")

    def full(self, text, *a, **k):
        raise OSError("No space left on device")
    monkeypatch.setattr("pathlib.Path.write_text", full)
    assert command("--corpus", good, "--tokenizer", tokenizer, "--out", old) == 2
    assert old.read_bytes() == b"[0]" and "No space left" in capsys.readouterr().err


# ---------------------------------------------------------------- what the repository ships
def test_the_default_prompts():
    """Twelve openings of stories, retellings, word problems; the stand-in has room for 128 more tokens."""
    from transformers import AutoConfig, AutoTokenizer
    rows = train.read_rows(ROOT / "checkpoints" / "prompts.jsonl")
    assert [row["group"] for row in rows] == ["story"] * 12 + ["retell"] * 12 + ["math"] * 12
    texts = [train.question_text(row) for row in rows]
    assert len(set(texts)) == 36 and all(text.isascii() for text in texts)
    # A retelling's prompt has the corpus' form: the story, an empty line, the wish, an empty line.
    wishes = [wish.split("{}")[0] for wish in (*corpus.AGAIN, *corpus.WISH_SHORTER)]
    for text in texts[12:24]:
        story, wish, nothing = text.split("\n\n")
        assert nothing == "" and corpus.balanced(story) and any(wish.startswith(head) for head in wishes)
    tokenizer = AutoTokenizer.from_pretrained(train.STAND_IN)
    context = AutoConfig.from_pretrained(train.STAND_IN).max_position_embeddings
    assert all(1 < len(tokenizer(text)["input_ids"]) <= context - 128 for text in texts)


def test_make_runs_from_anywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_alone(ROOT / "checkpoints" / "make.py", "bigram", "--help") == 0
    assert "--tokenizer" in capsys.readouterr().out
