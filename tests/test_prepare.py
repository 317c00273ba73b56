"""Prepared data is what was written, and nothing else is touched; pieces, steps, parts."""
# ruff: noqa: F811
import numpy as np
import pytest
from test_train import brief, small, write_rows  # noqa: F401

import train
from runtime import load
from runtime.errors import UserError
from training import documents, prepare, reading
from training.state import locked

TAGS = ("{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}|{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")
USER, ASSISTANT = {"role": "user", "content": "add"}, {"role": "assistant", "content": "a + b"}

@pytest.fixture(scope="module")
def tokenizer(small):
    return load.load_tokenizer(small / "model")

def prepared(tmp_path, tokenizer, path, template=None):
    """-> [(kind, tokens of a document)] to learn from, and held out"""
    folder = tmp_path / "out"
    documents.prepare([path], tokenizer, template, 300, folder)
    data = documents.read(folder, tokenizer, template)
    found = []
    for tokens, index in ((data.tokens, data.documents),
                              (data.held_tokens, data.held_documents)):
        found.append([(data.kinds[kind], tokens[start:start + size].tolist())
                      for start, size, kind in index])
    return found

# ---------------------------------------------------------------- documents
def test_documents_are_written_as_they_are_encoded(tmp_path, tokenizer):
    """Every fiftieth is held out; kinds by number; ids as they are, without an end of text."""
    rows = [{"ids": [i, i, i], "source": "ab"[i % 2]} for i in range(1, 101)]
    learned, held = prepared(tmp_path, tokenizer, write_rows(tmp_path / "rows.jsonl", rows))
    assert held == [("a", [50] * 3), ("a", [100] * 3)]
    assert learned == [("ab"[i % 2], [i] * 3) for i in range(1, 101) if i % 50]

def test_what_was_read_is_kept_with_it(tmp_path, tokenizer):
    rows = [{"messages": [USER, ASSISTANT]}, {"text": "def add"}, {"other": 1},
            {"messages": [USER]}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "tags.jinja").write_text(TAGS)
    learned, _ = prepared(tmp_path, tokenizer, path, str(tmp_path / "tags.jinja"))
    marked = [reading.marked(np.array(ids), tokenizer) for _, ids in learned]
    assert marked == ["<user>add|<assistant>⟦a + b|⟧", "⟦def add<|endoftext|>⟧"]
    report = documents.read(tmp_path / "out", tokenizer, str(tmp_path / "tags.jinja")).report
    assert [line.split()[0] for line in report] == ["1"] * 4
    assert "read as messages: " in report[0] and "read as text" in report[1]
    assert f"no known field holds a text or a question: other (row 3 of {path})" in report[2]
    assert f"(row 4 of {path})" in report[3]

def test_other_data_has_another_digest(tmp_path, tokenizer):
    digests = []
    for ids in ([1, 2], [1, 2], [1, 3]):
        prepared(tmp_path, tokenizer, write_rows(tmp_path / "rows.jsonl", [{"ids": ids}]))
        digests.append(documents.read(tmp_path / "out", tokenizer, None).digest)
    assert digests[0] == digests[1] != digests[2]

# ---------------------------------------------------------------- what lies there is kept
def test_an_interrupted_preparation_leaves_what_was_there(tmp_path, tokenizer, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", [{"ids": [1, 2]}])
    before = prepared(tmp_path, tokenizer, path)

    def killed(ids):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(documents, "vocabulary_fingerprint", killed)
        prepared(tmp_path, tokenizer, write_rows(tmp_path / "other.jsonl", [{"ids": [3, 4]}]))
    data = documents.read(tmp_path / "out", tokenizer, None)
    assert data.tokens.tolist() == before[0][0][1] == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "other.jsonl", "out"}

def test_nothing_that_is_not_prepared_data_is_replaced(tmp_path, tokenizer):
    """Neither a folder beside, nor files that somebody put into the folder."""
    path = write_rows(tmp_path / "rows.jsonl", [{"ids": [1, 2]}])
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "mine").write_text("mine")
    prepared(tmp_path, tokenizer, path)
    prepared(tmp_path, tokenizer, path)
    assert (tmp_path / "out.part" / "mine").read_text() == "mine"
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(UserError, match="holds something else than prepared data"):
        prepared(tmp_path, tokenizer, path)
    assert (tmp_path / "out" / "mine").read_text() == "mine"

def test_a_folder_has_one_run_at_a_time(tmp_path):
    """A folder that was made for a run which failed is removed again."""
    with locked(tmp_path / "a" / "work"):
        with pytest.raises(UserError, match="another run is using .*work"), \
                locked(tmp_path / "a" / "work"):
            pass
    assert not (tmp_path / "a").exists()

# ---------------------------------------------------------------- the command
def test_show_prints_documents_and_writes_nothing(small, tmp_path, capsys):
    """The first of each form, with their labels between brackets; long runs are cut."""
    rows = [{"text": f"def add{i}"} for i in range(4)] + [{"question": "add", "answer": "a" * 999}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    argv = [str(path), "--tokenizer", str(small / "model"), "--template", "question"]
    assert prepare.main([*argv, "--show", "3"]) == 0
    out = capsys.readouterr().out
    assert [f"⟦def add{i}<|endoftext|>⟧" in out for i in range(4)] == [True] * 3 + [False]
    assert "Question: add\nAnswer:⟦ aaa" in out and "characters ...]aaa" in out
    assert "4 read as text: " in out and "1 read as question + answer: " in out
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]

def test_an_interruption_is_one_line(small, tmp_path, capsys, monkeypatch):
    def interrupted(*given, **more):
        raise KeyboardInterrupt
    monkeypatch.setattr(prepare, "load_tokenizer", interrupted)
    assert prepare.main(["x", "--tokenizer", "y", "--show", "1"]) == 130
    assert capsys.readouterr().err == "prepare.py: interrupted\n"

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

def test_parts_of_a_step_fit_with_their_padding():
    pieces = pieces_at_random(40)
    parts = train.parts_of(pieces, 300)
    assert sorted(np.concatenate(parts)[:, 0]) == list(range(40)), "each piece once"
    padded = [len(part) * part[:, 1].max() for part in parts]
    assert max(padded) <= 300
    assert sum(padded) < 1.1 * pieces[:, 1].sum(), "similar sizes side by side"
    assert [len(part) for part in train.parts_of(pieces, 1)] == [1] * 40
