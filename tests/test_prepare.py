"""Prepared data is what was written, and nothing else is touched; pieces, steps, parts."""
# ruff: noqa: F811
from itertools import islice

import numpy as np
import pytest
from helpers import write_rows
from test_text import tags, tokenizer  # noqa: F401

import train
from runtime.errors import UserError
from training import documents, prepare, reading
from training.state import locked

def prepared(tmp_path, tokenizer, rows, template=None):
    """-> what is read of the rows again, [(kind, tokens of a document)] to learn, and held out"""
    path, folder = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    documents.prepare([path], tokenizer, template, 300, folder)
    data = documents.read(folder, tokenizer, template)
    found = [data]
    for tokens, index in ((data.tokens, data.documents), (data.held_tokens, data.held_documents)):
        found.append([(data.kinds[kind], tokens[start:start + size].tolist())
                      for start, size, kind in index])
    return found

# ---------------------------------------------------------------- documents
def test_documents_are_written_as_they_are_encoded(tmp_path, tokenizer):
    """Every fiftieth is held out, if it does not say; kinds by number; ids as they are."""
    rows = [{"ids": [i, i, i], "source": "ab"[i % 2]} for i in range(1, 101)]
    rows[2]["held_out"], rows[99]["held_out"] = True, False
    data, learned, held = prepared(tmp_path, tokenizer, rows)
    assert held == [("b", [3] * 3), ("a", [50] * 3)]
    assert learned == [("ab"[i % 2], [i] * 3) for i in range(1, 101) if i not in (3, 50)]
    again, *_ = prepared(tmp_path, tokenizer, rows)
    other, *_ = prepared(tmp_path, tokenizer, rows[1:])
    assert data.digest == again.digest != other.digest

def test_what_was_read_is_kept_with_it(tmp_path, tokenizer, tags):
    chat = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "a + b"}]
    rows = [{"messages": chat}, {"text": "def add"}, {"other": 1}, {"messages": chat[:1]}]
    data, learned, _ = prepared(tmp_path, tokenizer, rows, tags)
    marked = [reading.marked(np.array(ids), tokenizer) for _, ids in learned]
    assert marked == ["<user>add|<assistant>⟦a + b|⟧", "⟦def add</s>⟧"]
    assert [line.split()[0] for line in data.report] == ["1"] * 4
    for line, words in zip(data.report, ("read as messages: ", "read as text", ": other (row 3 of",
                                         "(row 4 of")):
        assert words in line

# ---------------------------------------------------------------- what lies there is kept
def test_nothing_that_is_not_prepared_data_is_replaced(tmp_path, tokenizer, monkeypatch):
    """Neither what was there, where a preparation is interrupted, nor a folder beside, nor files
    that somebody put into the folder."""
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "mine").write_text("mine")
    prepared(tmp_path, tokenizer, [{"ids": [1, 2]}])

    def killed(ids):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(documents, "vocabulary_fingerprint", killed)
        prepared(tmp_path, tokenizer, [{"ids": [3, 4]}])
    assert documents.read(tmp_path / "out", tokenizer, None).tokens.tolist() == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "out.part", "out"}
    assert (tmp_path / "out.part" / "mine").read_text() == "mine"
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(UserError, match="holds something else than prepared data"):
        prepared(tmp_path, tokenizer, [{"ids": [1, 2]}])
    assert (tmp_path / "out" / "mine").read_text() == "mine"

def test_a_folder_has_one_run_at_a_time(tmp_path):
    """A folder that was made for a run which failed is removed again."""
    with locked(tmp_path / "a" / "work"):
        with pytest.raises(UserError, match="another run is using .*work"), \
                locked(tmp_path / "a" / "work"):
            pass
    assert not (tmp_path / "a").exists()

# ---------------------------------------------------------------- the command
def test_show_prints_documents_and_writes_nothing(tokenizer, tmp_path, capsys):
    """The first of each form, with their labels between brackets; long runs are cut."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"text": f"def add{i}"} for i in range(4)] + [{"question": "add", "answer": "a" * 999}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    argv = [str(path), "--tokenizer", str(tmp_path / "tokenizer"), "--template", "question"]
    assert prepare.main([*argv, "--show", "3"]) == 0
    out = capsys.readouterr().out
    assert [f"⟦def add{i}</s>⟧" in out for i in range(4)] == [True] * 3 + [False]
    assert "Question: add\nAnswer:⟦ aaa" in out and "characters ...]aaa" in out
    assert "4 read as text: " in out and "1 read as question + answer: " in out
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "tokenizer"}

# ---------------------------------------------------------------- pieces, steps, parts
def test_pieces_are_documents_or_parts_of_them():
    index = np.array([[0, 10, 1], [13, 1, 0], [14, 5, 0], [28, 4, 2]])
    pieces = train.pieces_of(index, 4)
    expected = [[0, 4, 1], [4, 4, 1], [8, 2, 1], [14, 4, 0], [28, 4, 2]]
    assert pieces.tolist() == expected, "one token alone has no label"
    assert train.pieces_of(index[:0], 4).shape == (0, 3)
    tokens = np.arange(40, dtype="i4")
    tokens[2:4] = ~tokens[2:4]
    ids, loss_mask = train.gather(tokens, pieces[[2, 0, 1]])
    assert ids[0, :2].tolist() == [8, 9] and ids[1].tolist() == [0, 1, 2, 3], "a row each"
    expected = [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert loss_mask.int().tolist() == expected, "no label in padding, nor in what is only read"
    assert train.labels_in(tokens, pieces) == train.gather(tokens, pieces)[1].sum() == 11

def pieces_at_random(n):
    rng = np.random.default_rng(0)
    return np.stack((np.arange(n), rng.integers(2, 100, n), np.arange(n) % 3), 1)

def test_an_epoch_has_every_piece_once_in_even_steps():
    pieces = pieces_at_random(1000)
    seeds = (0, 0), (0, 0), (0, 1), (1, 0)
    first, again, *others = (train.pieces_of_epoch(pieces, 512, *seed) for seed in seeds)
    assert len(first) == train.steps_in_epoch(pieces, 512) == pieces[:, 1].sum() // 512
    seen = np.concatenate(first)
    left = pieces[:, 1].sum() - seen[:, 1].sum()
    assert len(set(seen[:, 0])) == len(seen) and left < 512 + 100, "once, but what fills no step"
    place = [number for number, step in enumerate(first) for _ in step]
    last = [(total - 1) // 512 for total in np.cumsum(seen[:, 1])]
    assert last == place, "where its last token falls"
    assert all(map(np.array_equal, first, again)), "by the seed and the epoch"
    assert not any(np.array_equal(np.concatenate(other)[:50], seen[:50]) for other in others)
    few = train.pieces_of_epoch(pieces[:3], 512, 0, 0)
    assert [sorted(step[:, 0]) for step in few] == [[0, 1, 2]], "too few for a step: one has all"
    # The last step of an epoch is followed by the first one of the next.
    in_order = islice(train.pieces_of_steps(pieces, 512, 0, len(first) - 1), 2)
    assert all(map(np.array_equal, in_order, (first[-1], others[0][0])))

def test_parts_of_a_step_fit_with_their_padding():
    pieces = pieces_at_random(40)
    parts = train.parts_of(pieces, 300)
    assert sorted(np.concatenate(parts)[:, 0]) == list(range(40)), "each piece once"
    padded = [len(part) * part[:, 1].max() for part in parts]
    assert max(padded) <= 300
    assert sum(padded) < 1.1 * pieces[:, 1].sum(), "similar sizes side by side"
    assert [len(part) for part in train.parts_of(pieces, 1)] == [1] * 40
