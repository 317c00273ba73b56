"""What a target writes itself, by plain decoding; the programs that write it and the bigram."""
import json

import numpy as np
import pytest
import torch
from conftest import CONTEXT, plain, tiny
from helpers import refused, rows_of, write_rows

import maxgram
from runtime import load
from training import batched, bigram, documents, write

# ---------------------------------------------------------------- texts
@pytest.mark.parametrize("name", ["llama", "mistral", "GPT2LMHeadModel", "BloomForCausalLM"])
def test_each_text_is_the_models_own(name):
    """Seven prompts in batches of three: what the model writes alone, to its length or end.

    A text's padding counts for its length, so that no context is exceeded.
    """
    # In float32: eager attention makes infinities of a float64 mask.
    model = tiny(name).float()
    model.generation_config.eos_token_id = [3, 7]
    rng = np.random.default_rng(0)
    sizes, batches = (20, 9, 6, 5, 3, 1, 1), (20, 20, 20, 5, 5, 5, 1)
    prompts = [rng.integers(1, 12, size).tolist() for size in sizes]
    found = dict(batched.write(model, prompts, CONTEXT, 3))
    for number, longest in enumerate(batches):
        text = plain(model, prompts[number], CONTEXT - longest)
        ends = [n for n, token in enumerate(text, 1) if token in (3, 7)]
        assert found[number] == text[:min([*ends, len(text)])]

def test_sampled_texts_have_the_models_distribution(llama):
    """The first token of 3 000 texts after one prompt against softmax(logits / T)."""
    n, prompt = 3000, [1, 2, 3]
    torch.manual_seed(0)
    first = torch.tensor([ids for _, ids in batched.write(llama, [prompt] * n, 4, 500, 1.7)])
    p = (llama(torch.tensor([prompt])).logits[0, -1] / 1.7).softmax(-1)
    expected, seen = n * p, torch.bincount(first[:, 0], minlength=12)
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < 31, "11 degrees of freedom, p = .001"

# ---------------------------------------------------------------- the command
def test_rows_are_what_training_reads(small, tmp_path, capsys):
    """No prompt twice, none that is held out or long; the form of rows is that of test_data's.

    It is known who wrote them.  A file that was cut is gone on with; others are refused.
    """
    given = [{"ids": list(range(7, 7 + i % 5 * 2 + 6)) + [i], "source": "ab"[i % 5 % 2]}
             for i in range(12)]
    others = [{"ids": [5, 6, 7, 8], "held_out": True}, {"ids": list(range(38))}]
    data, out = write_rows(tmp_path / "given.jsonl", given + others), tmp_path / "written.jsonl"
    argv = ["--target", str(small / "model"), "--device", "cpu", "--batch", "3", "--length", "24",
            "--data", str(data), "--out", str(out)]
    assert write.main(argv) == 0
    model, tokenizer = load.load_target(small / "model", "float32", "cpu")
    rows = rows_of(out)
    found = [(tuple(row["prompt"]), row["source"]) for row in rows]
    asked = {tuple(row["ids"][:len(row["ids"]) // 2]): row["source"] for row in given}
    assert sorted(found) == sorted(asked.items()), "prompts of 7, 6, 5 tokens, then of 4 and 3"
    for row, longest in zip(rows, (7, 7, 7, 4, 4)):
        assert row["answer"] == plain(model, row["prompt"], 24 - longest)
    assert rows[0]["target"] == documents.digest_of(load.fingerprint(model, tokenizer))

    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    assert write.main([*argv, "--temperature", "1", "0"]) == 0
    again = rows_of(out)
    assert again[:3] == rows[:3] and len(again) == 5
    assert [row["temperature"] for row in again[3:]] == [1.0, 0.0]
    for text, words in ((json.dumps({**rows[0], "target": "another"}) + "\n", "by this target"),
                        ("a poem", "something else than rows")):
        out.write_text(text)
        refused(capsys, argv, words, write.main)
        assert out.read_text() == text

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
