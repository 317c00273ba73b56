"""Prepared data is what was written; pieces, steps and parts of train.py."""
# ruff: noqa: F811
import numpy as np
import pytest
import torch
from test_train import brief, small, write_rows  # noqa: F401

import train
from runtime import load
from training import prepare

HIS = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}|{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
USER, ASSISTANT = {"role": "user", "content": "add"}, {"role": "assistant", "content": "a + b"}

@pytest.fixture(scope="module")
def tokenizer(small):
    return load.load_target(small / "model", "float32", "cpu")[1]

def prepared(tmp_path, tokenizer, path, template=None):
    """-> [(kind, tokens of a document)] to learn from, and held out"""
    folder = tmp_path / "out"
    prepare.prepare([path], tokenizer, template, 300, folder)
    data = prepare.read(folder, tokenizer, template)
    found = []
    for tokens, documents in ((data.tokens, data.documents), (data.held_tokens, data.held_documents)):
        found.append([(data.kinds[kind], tokens[start:start + size].tolist()) for start, size, kind in documents])
    return found

# ---------------------------------------------------------------- documents
def test_every_fiftieth_document_is_held_out_unless_its_row_says(tmp_path, tokenizer):
    rows = [{"ids": [i, i, i], "source": "ab"[i % 2]} for i in range(1, 101)]
    learned, held = prepared(tmp_path, tokenizer, write_rows(tmp_path / "rows.jsonl", rows))
    assert held == [("a", [50] * 3), ("a", [100] * 3)], "ids as they are: no end-of-text"
    assert learned == [("ab"[i % 2], [i] * 3) for i in range(1, 101) if i % 50]
    rows = [{"ids": [i, i], "held_out": i < 4} for i in range(1, 60)]
    learned, held = prepared(tmp_path, tokenizer, write_rows(tmp_path / "rows.jsonl", rows))
    assert [ids[0] for _, ids in held] == [1, 2, 3] and len(learned) == 56

def test_of_a_chat_the_answers_are_learned(tmp_path, tokenizer, capsys):
    """All else comes as ~id; rows from which nothing is learned are left out and named."""
    rows = [{"messages": [USER, ASSISTANT]}, {"text": "def add"}, {"other": 1}, {"messages": [USER]}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    learned, _ = prepared(tmp_path, tokenizer, path, _file(tmp_path, HIS))
    chat, text = (np.array(ids) for _, ids in learned)
    assert tokenizer.decode(np.where(chat < 0, ~chat, chat)) == "<user>add|<assistant>a + b|"
    assert tokenizer.decode(chat[chat >= 0]).strip("|") == "a + b"
    assert tokenizer.decode(text) == "def add<|endoftext|>" and (text >= 0).all()
    err = capsys.readouterr().err
    assert "left out, 2 rows" in err and f"row 3 of {path}" in err and f"row 4 of {path}" in err

def _file(tmp_path, template):
    (tmp_path / "his.jinja").write_text(template)
    return str(tmp_path / "his.jinja")

def test_an_interrupted_preparation_leaves_what_was_there(tmp_path, tokenizer, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", [{"ids": [1, 2]}])
    before = prepared(tmp_path, tokenizer, path)

    def killed(splits, *given):
        splits["train"].write(b"half")
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare, "write_splits", killed)
        prepared(tmp_path, tokenizer, write_rows(tmp_path / "other.jsonl", [{"ids": [3, 4]}]))
    data = prepare.read(tmp_path / "out", tokenizer, None)
    assert data.tokens.tolist() == before[0][0][1] == [1, 2]

# ---------------------------------------------------------------- pieces, steps, parts
def test_pieces_are_documents_or_parts_of_them():
    documents = np.array([[0, 10, 1], [13, 1, 0], [14, 5, 0], [28, 4, 2]])
    pieces = train.pieces_of(documents, 4)
    assert pieces.tolist() == [[0, 4, 1], [4, 4, 1], [8, 2, 1], [14, 4, 0], [28, 4, 2]], "one token alone has no label"
    assert train.pieces_of(documents[:0], 4).shape == (0, 3)
    tokens = np.arange(40, dtype="i4")
    tokens[2:4] = ~tokens[2:4]
    ids, learn = train.gather(tokens, pieces[[2, 0, 1]])
    assert ids[0, :2].tolist() == [8, 9] and ids[1].tolist() == [0, 1, 2, 3], "a row each, padded on the right"
    assert learn.int().tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]], "no label in padding, nor in what is only read"
    assert train.labels_in(tokens, pieces) == train.gather(tokens, pieces)[1].sum() == 11

def pieces_at_random(n):
    rng = np.random.default_rng(0)
    return np.stack((np.arange(n), rng.integers(2, 100, n), np.arange(n) % 3), 1)

def test_an_epoch_has_every_piece_once_in_even_steps():
    pieces = pieces_at_random(1000)
    first, again, *others = (train.pieces_of_epoch(pieces, 512, *by) for by in ((0, 0), (0, 0), (0, 1), (1, 0)))
    assert len(first) == train.steps_in_epoch(pieces, 512) == pieces[:, 1].sum() // 512
    seen = np.concatenate(first)
    assert len(set(seen[:, 0])) == len(seen) and pieces[:, 1].sum() - seen[:, 1].sum() < 512 + 100, "once, but what fills no step"
    place = [number for number, step in enumerate(first) for _ in step]
    assert [(total - 1) // 512 for total in np.cumsum(seen[:, 1])] == place, "where its last token falls"
    assert all(map(np.array_equal, first, again)), "by the seed and the epoch"
    assert not any(np.array_equal(np.concatenate(other)[:50], seen[:50]) for other in others)
    assert [sorted(step[:, 0]) for step in train.pieces_of_epoch(pieces[:3], 512, 0, 0)] == [[0, 1, 2]], "too few for a step: one has all"

def test_parts_of_a_step_fit_with_their_padding():
    pieces = pieces_at_random(40)
    parts = train.parts_of(pieces, 300)
    assert sorted(np.concatenate(parts)[:, 0]) == list(range(40)), "each piece once"
    padded = [len(part) * part[:, 1].max() for part in parts]
    assert max(padded) <= 300 and sum(padded) < 1.1 * pieces[:, 1].sum(), "similar sizes side by side"
    assert [len(part) for part in train.parts_of(pieces, 1)] == [1] * 40 and torch.tensor(1)
