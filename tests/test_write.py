"""What a target writes itself, and Max-Gram's bigram: plain decoding and brute force say what."""
# ruff: noqa: F811
import json

import numpy as np
import pytest
import torch
from conftest import CLASSES, family, plain, random_drafter, tiny
from helpers import rows_of, write_rows
from test_train import brief, refused, small  # noqa: F401

import maxgram
from runtime import load
from training import bigram, documents, write
from training.batched import continuations
from training.batched import write as write_texts
from verify import Target

# ---------------------------------------------------------------- texts
@pytest.mark.parametrize("name", ["llama", "mistral", "GPT2LMHeadModel", "BloomForCausalLM"])
def test_each_text_is_the_models_own(name):
    """Seven prompts in batches of three: what the model writes alone, to its length or end."""
    # In float32: eager attention makes infinities of a float64 mask.
    model = (tiny(name) if name in CLASSES else family(name)).float()
    rng = np.random.default_rng(0)
    sizes = (1, 5, 9, 1, 3, 20, 6)
    prompts = [rng.integers(1, 12, size).tolist() for size in sizes]
    new = (12, 9, 1, 15, 3, 13, 4)
    lengths = [size + count for size, count in zip(sizes, new)]
    expected = [prompt + plain(model, prompt, count) for prompt, count in zip(prompts, new)]
    assert continuations(model, prompts, lengths, batch=3) == expected
    model.generation_config.eos_token_id = [3, 7]
    for ids, text, size in zip(continuations(model, prompts, lengths, batch=4), expected, sizes):
        ends = [n for n, token in enumerate(text, 1) if n > size and token in (3, 7)]
        assert ids == text[:min([*ends, len(text)])]

def test_sampled_texts_have_the_models_distribution(llama):
    """The first token of 3 000 texts after one prompt against softmax(logits / T)."""
    n, prompt = 3000, [1, 2, 3]
    torch.manual_seed(0)
    texts = write_texts(llama, [prompt] * n, [4] * n, 500, 1.7)
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
    """No prompt twice; in training the answer alone is learned."""
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
    documents.prepare([tmp_path / "written.jsonl"], tokenizer, None, 300, tmp_path / "ready")
    data = documents.read(tmp_path / "ready", tokenizer, None)
    for row, (start, size, _) in zip(rows, data.documents):
        tokens = data.tokens[start:start + size].tolist()
        assert tokens == [~i for i in row["prompt"]] + row["answer"]

def test_a_cut_file_is_gone_on_with(small, tmp_path, capsys):
    given = [{"ids": list(range(7 + i, 19 + i))} for i in range(6)]
    out = tmp_path / "written.jsonl"
    argv = flags(small, tmp_path, given)
    assert write.main(argv) == 0
    whole = rows_of(out)
    lines = out.read_bytes().splitlines(keepends=True)
    refused(capsys, argv, "exists: go on with it by --resume", write.main)
    out.write_bytes(b"".join(lines[:4]) + lines[4][:20])
    refused(capsys, [*argv, "--resume", "--temperature", "1"], "another temperature", write.main)
    assert write.main([*argv, "--resume"]) == 0
    assert out.read_bytes().startswith(b"".join(lines[:4]))
    assert sorted(map(str, rows_of(out))) == sorted(map(str, whole))
    out.write_text("a poem\n")
    refused(capsys, [*argv, "--resume"], "holds something else than write.py writes", write.main)
    assert out.read_text() == "a poem\n"
    assert write.main([*argv, "--overwrite"]) == 0 and len(rows_of(out)) == 6

def test_prompts_of_chats_are_first_questions(small, tmp_path):
    """And of other texts the first half."""
    tokenizer = load.load_tokenizer(small / "model")
    rows = [{"turns": ["return", "more"], "category": "code"}, {"text": "def add(a, b)"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    (kind, question), (_, half) = documents.prompts_in([path], tokenizer, "plain", 90)
    assert kind == "code" and tokenizer.decode(question) == "USER: return\n\nASSISTANT:"
    assert "def add(a, b)".startswith(tokenizer.decode(half))

# ---------------------------------------------------------------- bigram
def test_the_bigram_is_counted_and_its_confidence_measured(small, tmp_path):
    """The most frequent follower in texts to learn; the confidence on those that are held out."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 9, 40).tolist() * 2 for _ in range(60)]
    data = write_rows(tmp_path / "rows.jsonl", [{"ids": ids} for ids in texts])
    out = tmp_path / "bigram.json"
    argv = ["count", "--data", str(data), "--tokenizer", str(small / "model"), "--out", str(out)]
    assert bigram.main(argv) == 0
    found = json.loads(out.read_text())
    held_out = texts.pop(49)
    counts = np.zeros((300, 300), int)
    for ids in texts:
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    for token in range(1, 9):
        assert counts[token][found["bigram"][token]] == counts[token].max()
    assert found["confidence"] == bigram.measure_confidence([held_out], found["bigram"])

def test_the_agreement_is_found_again():
    """Outcomes sampled from sigmoid(a + b length + c logit p): the fit finds a, b and c."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, maxgram.LENGTHS + 1, (20000,), generator=g).double()
    p = torch.rand(20000, generator=g).double()
    truth = torch.tensor([-1.0, 0.3, 0.7]).double()
    rho = torch.sigmoid(truth[0] + truth[1] * lengths + truth[2] * torch.logit(p))
    y = torch.rand(20000, generator=g).double() < rho
    found = bigram.fit([*zip(lengths.tolist(), p.tolist(), y.tolist())])
    torch.testing.assert_close(torch.tensor(found["weights"]).double(), truth, atol=0.1, rtol=0)
    assert found["words"] == 20000

def test_suggestions_are_compared_with_what_the_target_chooses(llama):
    """Round by round along the target's text: length of the match, p_draft, right or wrong.

    Some tokens the drafter cannot predict, as they are not in its list of words: left out.
    """
    muted, left_out, drafter = [1, 2], 0, random_drafter(llama, "vdm")
    reset = drafter.reset

    def reset_without(probs, source):
        def muting(logits, temperature):
            logits = logits.index_fill(1, torch.tensor(muted), float("-inf"))
            return probs(logits, temperature)
        reset(muting, source)
    drafter.reset = reset_without
    prompt = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    found = bigram.suggestions(Target(llama), drafter, maxgram.MaxGram(), [prompt], 20)

    def p_draft(ids, token):
        """The VDM's own forward over the whole text."""
        with torch.no_grad():
            x = drafter.model(torch.tensor([ids]), None, 1)
            logits = drafter.model.head(x)[0, -1]
        logits[muted] = float("-inf")
        return logits.softmax(-1)[token].item()

    text, t, expected = prompt + plain(llama, prompt, 24), len(prompt) + 1, []
    while t < len(prompt) + 20:
        # All tokens before t are known, and all but the last of them, the root, are committed.
        chain, accepted, remaining = [], 0, len(prompt) + 20 - t - 1
        while len(chain) < min(maxgram.N, remaining) and accepted == len(chain):
            known = text[:t] + chain
            gram = maxgram.MaxGram()
            gram.commit(text[:t - 1])
            proposed, matched = gram.propose(known[t - 1:], 1)
            if not proposed or matched[0] < bigram.LEAST:
                break
            right = proposed[0] == text[len(known)]
            if proposed[0] not in muted:
                p = pytest.approx(p_draft(known, proposed[0]), abs=1e-6)
                expected.append((matched[0], p, right))
            left_out += proposed[0] in muted
            chain += proposed
            accepted += right
        t += accepted + 1
    assert len(found) > 2 and left_out and found == expected
