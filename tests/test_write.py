"""What a target writes itself, and Max-Gram's bigram: generate(), brute force and closed forms are the oracles."""
# ruff: noqa: F811
import json

import numpy as np
import pytest
import torch
from conftest import plain, shared
from test_train import brief, refused, small, weighty, write_rows  # noqa: F401

import maxgram
from runtime import load
from training import bigram, prepare, write
from training.drafters import drafter_of
from verify import Target

# ---------------------------------------------------------------- the loop
@pytest.mark.parametrize("name", ["llama", "llama-eager", "qwen2", "mistral", "qwen2-mixed"])
def test_each_text_is_the_models_own(name):
    """Eleven prompts of several lengths through three rows: as generate() writes each alone, to its length or its end."""
    model = shared(name)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 12, size).tolist() for size in (1, 5, 9, 2, 14, 1, 7, 3, 3, 20, 6)]
    lengths = [size + len(prompt) for prompt, size in zip(prompts, (12, 9, 1, 15, 3, 1, 20, 8, 2, 13, 4))]
    expected = [(prompt + plain(model, prompt, 21))[:length] for prompt, length in zip(prompts, lengths)]
    assert write.continuations(model, prompts, lengths, batch=3) == expected
    how = model.config._attn_implementation
    # Ends of text
    ends = [3, 7]
    model.generation_config.eos_token_id = ends
    try:
        found = write.continuations(model, prompts, lengths, batch=4)
        assert model.config._attn_implementation == how
        for prompt, text, ids, length in zip(prompts, expected, found, lengths):
            new = text[len(prompt):]
            stop = next((i + 1 for i, token in enumerate(new) if token in ends), len(new))
            assert ids == text[:len(prompt) + stop]
            given = torch.tensor([prompt])
            if length > len(prompt):
                made = model.generate(given, max_new_tokens=length - len(prompt), do_sample=False, pad_token_id=0)
                assert made[0].tolist() == ids
    finally:
        model.generation_config.eos_token_id = None

@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_sampled_texts_have_the_models_distribution(name):
    """The first token of 3 000 texts after one prompt against softmax(logits / T)."""
    model = shared(name)
    torch.manual_seed(0)
    first = torch.tensor([ids[3] for _, ids in write.write(model, [[1, 2, 3]] * 3000, [4] * 3000, 500, [1.7] * 3000)])
    p = (model(torch.tensor([[1, 2, 3]])).logits[0, -1] / 1.7).softmax(-1)
    expected, seen = 3000 * p, torch.bincount(first, minlength=12)
    assert ((seen - expected) ** 2 / expected).sum() < 31, "chi-square, 11 degrees of freedom, p = .001"

# ---------------------------------------------------------------- the command
def flags(small, tmp_path, rows, *more):
    data = write_rows(tmp_path / "given.jsonl", rows)
    return ["--target", str(small / "model"), "--device", "cpu", "--batch", "3", "--length", "24",
            "--data", str(data), "--out", str(tmp_path / "written.jsonl"), *more]

def rows_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "written.jsonl").read_text().splitlines()]

def test_rows_are_what_training_reads(small, tmp_path):
    """No prompt twice; in training the answer alone is learned."""
    given = [{"ids": list(range(7, 7 + i % 5 * 2 + 6)) + [i], "source": "ab"[i % 2]} for i in range(12)]
    assert write.main(flags(small, tmp_path, given)) == 0
    model, tokenizer = load.load_target(small / "model", "float32", "cpu")
    expected = {}
    for row in given:
        prompt = row["ids"][:len(row["ids"]) // 2]
        expected.setdefault(tuple(prompt), (prompt, plain(model, prompt, 24 - len(prompt)), row["source"]))
    rows = rows_of(tmp_path)
    assert sorted((row["prompt"], row["answer"], row["source"]) for row in rows) == sorted(expected.values()) and len(rows) == 5
    assert {row["temperature"] for row in rows} == {0.0}
    prepare.prepare([tmp_path / "written.jsonl"], tokenizer, None, 300, tmp_path / "ready")
    data = prepare.read(tmp_path / "ready", tokenizer, None)
    for row, (start, size, _) in zip(rows, data.documents):
        assert data.tokens[start:start + size].tolist() == [~id for id in row["prompt"]] + row["answer"]

def test_a_cut_file_is_gone_on_with(small, tmp_path, capsys):
    given, out = [{"ids": list(range(7 + i, 19 + i))} for i in range(9)], tmp_path / "written.jsonl"
    argv = flags(small, tmp_path, given)
    assert write.main(argv) == 0
    whole = rows_of(tmp_path)
    lines = out.read_bytes().splitlines(keepends=True)
    refused(capsys, argv, "exists: go on with it by --resume", write.main)
    out.write_bytes(b"".join(lines[:4]) + lines[4][:20])
    assert write.main([*argv, "--resume"]) == 0
    again = rows_of(tmp_path)
    assert out.read_bytes().startswith(b"".join(lines[:4])) and sorted(map(str, again)) == sorted(map(str, whole))
    out.write_text("a poem\n")
    refused(capsys, [*argv, "--resume"], "holds something else than write.py writes", write.main)
    assert out.read_text() == "a poem\n" and write.main([*argv, "--overwrite"]) == 0 and len(rows_of(tmp_path)) == 9

def test_prompts_of_chats_are_first_questions(small, tmp_path):
    _, tokenizer = load.load_target(small / "model", "float32", "cpu")
    chat = [{"role": "system", "content": "be"}, {"role": "user", "content": "add"}, {"role": "assistant", "content": "a"}]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": chat}, {"turns": ["return", "more"], "category": "code"}, {"text": "def add(a, b)"}])
    found = [(kind, tokenizer.decode(ids)) for kind, ids in write.prompts_in([path], tokenizer, "plain", 90)]
    assert found[0] == ("rows", "SYSTEM: be\n\nUSER: add\n\nASSISTANT:") and found[1] == ("code", "USER: return\n\nASSISTANT:")
    assert "def add(a, b)".startswith(found[2][1])

# ---------------------------------------------------------------- bigram
def test_the_bigram_is_counted_and_its_confidence_measured(small, tmp_path):
    """On made-up documents: the most frequent follower; how often the first proposal is right, by length of match."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 9, 40).tolist() * 2 for _ in range(60)]
    data = write_rows(tmp_path / "rows.jsonl", [{"ids": ids} for ids in documents])
    out = tmp_path / "bigram.json"
    assert bigram.main(["count", "--data", str(data), "--tokenizer", str(small / "model"), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    learned = [ids for number, ids in enumerate(documents, 1) if number % 50]
    counts = np.zeros((300, 300), int)
    for ids in learned:
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    assert all(counts[token][found["bigram"][token]] == counts[token].max() for token in range(1, 9))
    seen, right = np.zeros(99), np.zeros(99)
    for ids in documents[49::50]:
        for t in range(1, len(ids)):
            text = ids[:t]
            length = max((n for n in range(1, t) if any(text[i:i + n] == text[t - n:] for i in range(t - n))), default=0)
            if length:
                # The first token after a longest match: Max-Gram's choice among several is its own.
                gram = maxgram.MaxGram(found["bigram"])
                gram.commit(text)
                proposed, matched = gram.propose((), 1)
                assert matched[0] == length
                seen[min(length, maxgram.LENGTHS)] += 1
                right[min(length, maxgram.LENGTHS)] += proposed[0] == ids[t]
    for length in range(1, maxgram.LENGTHS + 1):
        if seen[length]:
            assert found["confidence"][length] == pytest.approx(right[length] / seen[length], abs=1e-4)

def test_the_agreement_is_found_again():
    """Outcomes drawn from sigmoid(a + b length + c logit p): the fit finds a, b and c."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, maxgram.LENGTHS + 1, (20000,), generator=g).double()
    p = torch.rand(20000, generator=g).double()
    truth = torch.tensor([-1.0, 0.3, 0.7]).double()
    x = bigram.regressors(lengths, p)
    y = torch.rand(20000, generator=g).double() < torch.sigmoid(x @ truth)
    found = bigram.fit([*zip(lengths.tolist(), p.tolist(), y.tolist())])
    torch.testing.assert_close(torch.tensor(found["weights"]).double(), truth, atol=0.1, rtol=0)
    assert found["words"] == 20000

def test_suggestions_are_judged_by_what_the_target_chooses(llama):
    """Round by round along the target's own text: length of the match, the drafter's p, right up to the first wrong one."""
    module = weighty("small", llama)
    prompt = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    found = bigram.suggestions(Target(llama), drafter_of(module), maxgram.MaxGram(), [prompt], 20)
    text, t, expected = prompt + plain(llama, prompt, 24), len(prompt) + 1, []
    while t < len(prompt) + 20:
        # All tokens before t are known, and all but the last of them, the root, are committed.
        chain, remaining = [], len(prompt) + 20 - t - 1
        while len(chain) < min(maxgram.N, remaining):
            known = text[:t] + chain
            gram = maxgram.MaxGram()
            gram.commit(text[:t - 1])
            proposed, matched = gram.propose(known[t - 1:], 1)
            if not proposed or matched[0] < bigram.LEAST:
                break
            p = module.lm(torch.tensor([known])).logits[0, -1].softmax(-1)[proposed[0]].item()
            expected.append((matched[0], pytest.approx(p, abs=1e-6), proposed[0] == text[len(known)]))
            chain += proposed
            if not expected[-1][2]:
                break
        accepted = 0
        while accepted < len(chain) and chain[accepted] == text[t + accepted]:
            accepted += 1
        t += accepted + 1
    assert len(found) > 2 and found == expected
