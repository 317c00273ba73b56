"""What a target writes itself, by plain decoding; the programs that write it and the bigram."""
import json

import numpy as np
import pytest
import torch
from conftest import plain, tiny
from helpers import rows_of, write_rows

import maxgram
from runtime import load
from runtime.errors import UserError
from training import bigram, documents, write

# ---------------------------------------------------------------- texts
@pytest.mark.parametrize("name", ["llama", "mistral", "GPT2LMHeadModel", "BloomForCausalLM"])
def test_each_text_is_the_models_own(name):
    """Seven prompts in batches of three: what the model writes alone, to the length or its end."""
    # In float32: eager attention makes infinities of a float64 mask.
    model = tiny(name).float()
    model.generation_config.eos_token_id = [3, 7]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 12, size).tolist() for size in (1, 5, 9, 1, 3, 20, 6)]
    found = dict(write.write(model, prompts, 22, 3))
    for number, prompt in enumerate(prompts):
        text = plain(model, prompt, 22 - len(prompt))
        ends = [n for n, token in enumerate(text, 1) if token in (3, 7)]
        assert found[number] == text[:min([*ends, len(text)])]

def test_sampled_texts_have_the_models_distribution(llama):
    """The first token of 3 000 texts after one prompt against softmax(logits / T)."""
    n, prompt = 3000, [1, 2, 3]
    torch.manual_seed(0)
    first = torch.tensor([ids[0] for _, ids in write.write(llama, [prompt] * n, 4, 500, 1.7)])
    p = (llama(torch.tensor([prompt])).logits[0, -1] / 1.7).softmax(-1)
    expected, seen = n * p, torch.bincount(first, minlength=12)
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < 31, "11 degrees of freedom, p = .001"

# ---------------------------------------------------------------- the command
def test_rows_are_what_training_reads(small, tmp_path):
    """No prompt twice; in training the answer alone is learned.

    A file that was cut is gone on with.
    """
    given = [{"ids": list(range(7, 7 + i % 5 * 2 + 6)) + [i], "source": "ab"[i % 2]}
             for i in range(12)]
    data, out = write_rows(tmp_path / "given.jsonl", given), tmp_path / "written.jsonl"
    argv = ["--target", str(small / "model"), "--device", "cpu", "--batch", "3", "--length", "24",
            "--data", str(data), "--out", str(out)]
    assert write.main(argv) == 0
    model, tokenizer = load.load_target(small / "model", "float32", "cpu")
    expected = {}
    for row in given:
        prompt = row["ids"][:len(row["ids"]) // 2]
        answer = plain(model, prompt, 24 - len(prompt))
        expected.setdefault(tuple(prompt), (prompt, answer, row["source"]))
    rows = rows_of(out)
    found = [(row["prompt"], row["answer"], row["source"]) for row in rows]
    assert sorted(found) == sorted(expected.values()) and len(rows) == 5
    documents.prepare([out], tokenizer, "", 300, tmp_path / "ready")
    data = documents.read(tmp_path / "ready", tokenizer)
    for row, (start, size) in zip(rows, data.documents):
        tokens = data.tokens[start:start + size].tolist()
        assert tokens == [~i for i in row["prompt"]] + row["answer"]

    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    assert write.main([*argv, "--temperature", "1", "0"]) == 0
    again = rows_of(out)
    assert again[:3] == rows[:3] and len(again) == 5
    assert [row["temperature"] for row in again[3:]] == [1.0, 0.0]

def test_prompts_of_chats_are_first_questions_of_texts_the_first_half(small, tmp_path):
    """What is held out is not asked."""
    tokenizer = load.load_tokenizer(small / "model")
    rows = [{"turns": ["return", "more"], "category": "code"}, {"text": "def add(a, b)"},
            {"question": "q", "held_out": True}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    template = "{{ messages[0].content }}"
    (kind, question), (_, half) = write.prompts_in([path], tokenizer, template, 90)
    assert kind == "code" and tokenizer.decode(question) == "return"
    assert "def add(a, b)".startswith(tokenizer.decode(half))
    path = write_rows(path, rows[2:])
    with pytest.raises(UserError, match="holds no prompt to ask: 1 left out: it is held out"):
        write.prompts_in([path], tokenizer, template, 90)

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
    assert found["bigram"] == maxgram.build_bigram(texts, len(found["bigram"]))
    assert found["confidence"] == bigram.measure_confidence([held_out], found["bigram"])
