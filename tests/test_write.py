"""What a target writes itself, and Max-Gram's bigram: plain decoding and brute force say what."""
import json
from functools import partial

import numpy as np
import pytest
import torch
from conftest import plain, tiny
from helpers import refused, rows_of, write_rows

from runtime import chats, load
from training import batched, bigram, documents, standin, write

# ---------------------------------------------------------------- texts
def texts_of(model, prompts, lengths, batch):
    return [ids for _, ids in sorted(batched.write(model, prompts, lengths, batch))]

@pytest.mark.parametrize("name", ["llama", "mistral", "GPT2LMHeadModel", "BloomForCausalLM"])
def test_each_text_is_the_models_own(name):
    """Seven prompts in batches of three: what the model writes alone, to its length or end."""
    # In float32: eager attention makes infinities of a float64 mask.
    model = tiny(name).float()
    rng = np.random.default_rng(0)
    sizes = (1, 5, 9, 1, 3, 20, 6)
    prompts = [rng.integers(1, 12, size).tolist() for size in sizes]
    new = (12, 9, 1, 15, 3, 13, 4)
    lengths = [size + count for size, count in zip(sizes, new)]
    expected = [prompt + plain(model, prompt, count) for prompt, count in zip(prompts, new)]
    assert texts_of(model, prompts, lengths, 3) == expected
    model.generation_config.eos_token_id = [3, 7]
    for ids, text, size in zip(texts_of(model, prompts, lengths, 4), expected, sizes):
        ends = [n for n, token in enumerate(text, 1) if n > size and token in (3, 7)]
        assert ids == text[:min([*ends, len(text)])]

def test_sampled_texts_have_the_models_distribution(llama):
    """The first token of 3 000 texts after one prompt against softmax(logits / T)."""
    n, prompt = 3000, [1, 2, 3]
    torch.manual_seed(0)
    texts = batched.write(llama, [prompt] * n, [4] * n, 500, 1.7)
    first = torch.tensor([ids[3] for _, ids in texts])
    p = (llama(torch.tensor([prompt])).logits[0, -1] / 1.7).softmax(-1)
    expected, seen = n * p, torch.bincount(first, minlength=12)
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < 31, "11 degrees of freedom, p = .001"

# ---------------------------------------------------------------- the command
def flags(small, tmp_path, rows, *more):
    data = write_rows(tmp_path / "given.jsonl", rows)
    return ["--target", str(small / "model"), "--device", "cpu", "--batch", "3", "--length", "24",
            "--data", str(data), "--out", str(tmp_path / "written.jsonl"), *more]

def test_rows_are_what_training_reads(small, tmp_path):
    """No prompt twice; in training the answer alone is learned, and it is known who wrote it."""
    given = [{"ids": list(range(7, 7 + i % 5 * 2 + 6)) + [i], "source": "ab"[i % 2]}
             for i in range(12)]
    assert write.main(flags(small, tmp_path, given)) == 0
    model, tokenizer = load.load_target(small / "model", "float32", "cpu")
    expected = {}
    for row in given:
        prompt = row["ids"][:len(row["ids"]) // 2]
        answer = plain(model, prompt, 24 - len(prompt))
        expected.setdefault(tuple(prompt), (prompt, answer, row["source"]))
    rows = rows_of(tmp_path / "written.jsonl")
    found = [(row["prompt"], row["answer"], row["source"]) for row in rows]
    assert sorted(found) == sorted(expected.values()) and len(rows) == 5
    assert {row["temperature"] for row in rows} == {0.0}
    template = chats.template_of(None, tokenizer)
    documents.prepare([tmp_path / "written.jsonl"], tokenizer, template, 300, tmp_path / "ready")
    data = documents.read(tmp_path / "ready", tokenizer, template)
    for row, (start, size, _) in zip(rows, data.documents):
        tokens = data.tokens[start:start + size].tolist()
        assert tokens == [~i for i in row["prompt"]] + row["answer"]
    assert data.written_by == [documents.digest_of(load.fingerprint(model, tokenizer))]

def test_a_cut_file_is_gone_on_with(small, tmp_path, capsys):
    given = [{"ids": list(range(7 + i, 19 + i))} for i in range(6)]
    out = tmp_path / "written.jsonl"
    argv = flags(small, tmp_path, given)
    no = partial(refused, capsys, main=write.main)
    assert write.main(argv) == 0
    whole = rows_of(out)
    lines = out.read_bytes().splitlines(keepends=True)
    no(argv, "exists: go on with it by --resume")
    out.write_bytes(b"".join(lines[:4]) + lines[4][:20])
    assert write.main([*argv, "--resume"]) == 0
    assert out.read_bytes().startswith(b"".join(lines[:4]))
    assert sorted(map(str, rows_of(out))) == sorted(map(str, whole))
    write_rows(out, [{**whole[0], "target": "another"}])
    no([*argv, "--resume"], "was not written by this target")
    out.write_text("a poem\n")
    no([*argv, "--resume"], "holds something else than rows")
    assert out.read_text() == "a poem\n"
    assert write.main([*argv, "--overwrite", "--temperature", "0", "1"]) == 0
    assert [row["temperature"] for row in rows_of(out)] == [0.0] * 3 + [1.0] * 3

def test_prompts_of_chats_are_first_questions(small, tmp_path):
    """And of other texts the first half."""
    tokenizer = load.load_tokenizer(small / "model")
    rows = [{"turns": ["return", "more"], "category": "code"}, {"text": "def add(a, b)"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    template = chats.template_of("plain", tokenizer)
    (kind, question), (_, half) = documents.prompts_in([path], tokenizer, template, 90)
    assert kind == "code" and tokenizer.decode(question) == "USER: return\n\nASSISTANT:"
    assert "def add(a, b)".startswith(tokenizer.decode(half))

def test_the_stand_in_goes_on_with_its_prompts_and_its_answers(tmp_path, monkeypatch):
    """A run that was cut among the prompts, and one that was cut among the answers."""
    kinds = {name: ("Question:", 40, lambda text, rng: text.strip()[:60] or None) for name in "ab"}
    monkeypatch.setattr(standin, "KINDS", kinds)
    out, begun = tmp_path / "written.jsonl", tmp_path / "written.jsonl.prompts"
    argv = ["--out", str(out), "--texts", "4", "--length", "256", "--device", "cpu", "--batch", "2"]
    write_rows(begun, [{"source": "a", "prompt": "Question: How many?"}])
    assert standin.main([*argv, "--resume"]) == 0
    prompts, rows = rows_of(begun), rows_of(out)
    assert [row["source"] for row in prompts] == ["a", "a", "b", "b"]
    assert prompts[0]["prompt"] == "Question: How many?"
    assert len(rows) == 4 and {row["temperature"] for row in rows} == {0.0, 1.0}
    write_rows(out, rows[:2])
    assert standin.main([*argv, "--resume"]) == 0
    again = rows_of(out)
    assert again[:2] == rows[:2] and rows_of(begun) == prompts
    assert {tuple(row["prompt"]) for row in again} == {tuple(row["prompt"]) for row in rows}

# ---------------------------------------------------------------- bigram
def test_the_bigram_is_counted_and_its_confidence_measured(small, tmp_path):
    """The most frequent follower in texts to learn; the confidence on those that are held out."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 9, 40).tolist() * 2 for _ in range(60)]
    data = write_rows(tmp_path / "rows.jsonl", [{"ids": ids} for ids in texts])
    out = tmp_path / "bigram.json"
    argv = ["--data", str(data), "--tokenizer", str(small / "model"), "--out", str(out)]
    assert bigram.main(argv) == 0
    found = json.loads(out.read_text())
    held_out = texts.pop(49)
    counts = np.zeros((300, 300), int)
    for ids in texts:
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    for token in range(1, 9):
        assert counts[token][found["bigram"][token]] == counts[token].max()
    assert found["confidence"] == bigram.measure_confidence([held_out], found["bigram"])
