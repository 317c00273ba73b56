"""What people bring: rows are read as meant, chats have one format, and what is prepared is what was written."""
import copy
import gzip
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from test_corpus import dump
from tokenizers.processors import TemplateProcessing

from checkpoints import make
from data import files, prepare, read

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
TEXT = "def add(a, b):\n    return a + b\n\n" * 40

@pytest.fixture(scope="module")
def tokenizer():
    return make.train_tokenizer([TEXT, "one two three four five six seven eight nine ten"] * 3, 300)

# ---------------------------------------------------------------- rows
def rows_of(tmp_path, text, name="rows.jsonl"):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return read.read_rows(tmp_path / name)

def test_rows_of_files(tmp_path):
    two = [{"text": "a"}, {"text": "b\u2028c"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in two)
    assert rows_of(tmp_path, lines) == rows_of(tmp_path, lines, "x.json") == two, "U+2028 ends no line"
    assert rows_of(tmp_path, json.dumps(two)) == rows_of(tmp_path, json.dumps(two, indent=1), "x.json") == two
    assert rows_of(tmp_path, json.dumps(two[0])) == two[:1]
    assert rows_of(tmp_path, gzip.compress(lines.encode()), "x.jsonl.gz") == two
    assert rows_of(tmp_path, "plain\n", "x.txt") == ["plain\n"] and rows_of(tmp_path, " \n", "x.txt") == []
    damaged = bytearray(gzip.compress(lines.encode() * 9))
    damaged[20:30] = b"0123456789"
    for text, name in ((b"\xff", "x.txt"), ("{", "x.jsonl"), (bytes(damaged), "x.gz"), (b"no gzip", "y.gz")):
        with pytest.raises(read.UserError, match="cannot be read as text or JSON lines"):
            rows_of(tmp_path, text, name)

SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]

@pytest.mark.parametrize("row, found", [
    ({"conversations": SHAREGPT}, [USER, ASSISTANT]), ({"conversations": [{"from": "system", "value": "be"}, {"from": "human", "value": ""}]},
                                                       [{"role": "system", "content": "be"}]),
    ({"id": 1, "conversation": [USER, ASSISTANT]}, [USER, ASSISTANT]), ({"messages": [USER, ASSISTANT], "text": "other"}, [USER, ASSISTANT]),
    ({"turns": ["hi", "more"], "category": "writing"}, [USER, {"role": "user", "content": "more"}]), ({"ids": [1, 2]}, [1, 2]),
    ({"question": "1 + 1?", "answer": "2"}, "Question: 1 + 1?\nAnswer: 2\n"), ({"text": "turns and messages"}, "turns and messages"),
    ({"prompt": "def f():\n", "canonical_solution": "    return 1\n"}, "def f():\n    return 1\n"), ({"prompt": "a", "completion": "b"}, "ab"),
    ({"instruction": "Sum up", "input": "a text", "output": "short"}, "Sum up\na text\nshort"), ({"article": "long", "highlights": "short"}, "long\nshort"),
    ({"instruction": "Why?", "input": "", "output": "So."}, "Why?\n\nSo."), ({"whole_func_string": "def f(): 0", "func_name": "f"}, "def f(): 0"),
    ({"text": None}, ""), ({"conversations": []}, []), ({"sentence": "a"}, None), ([1], None), (3, None),
    ({"conversations": "hi"}, None), ({"messages": [3]}, None), ({"turns": None}, None)])
def test_documents_of_rows(row, found):
    assert read.document(row) == found

MMLU = "Question: 2 + 2?\nA. 3\nB. 4\nC. 5\nD. 6\nAnswer:"

@pytest.mark.parametrize("row, asks", [
    ("as it is", "as it is"), ({"prompt": "def f("}, "def f("), ({"prompt": "", "text": "once"}, "once"), ({"instruction": "Why?", "input": ""}, "Why?\n"),
    ({"question": "How many?", "query": "SELECT", "db_id": "x"}, "Question: How many?\nAnswer:"), ({"article": "long"}, "Summarize: long\nSummary:"),
    ({"question": "2 + 2?", "choices": ["3", "4", "5", "6"], "answer": 1}, MMLU), ({"input": "2 + 2?", "A": "3", "B": "4", "C": "5", "D": "6"}, MMLU),
    ({"instruction": "Sum up", "input": "a text", "output": "short"}, "Sum up\na text\n"), ({"sentence": "a"}, None), ({"text": None}, None), (3, None),
])
def test_what_a_row_asks(row, asks):
    assert read.question_text(row) == asks
    qa = {"question": "q", "answer": "a"}
    assert read.question_text(qa, "{question}!") == "q!", "--ask stands in the place of the table"
    assert read.document(qa) == read.question_text(qa) + " a\n", "asked as it is learned"

# ---------------------------------------------------------------- chats: one format
HIS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
# As Qwen3's: what an assistant has thought is written of the last turn alone.
THINKS = ("{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}(thought) {% endif %}{{ m.content }}|"
          "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
CHAT = [{"role": role, "content": text} for role, text in (("user", "add a"), ("assistant", "a + b"),
                                                           ("user", "return"), ("assistant", "return b"))]

def learned_of(tokenizer, chat, template):
    """[(all of a part's text, what is learned of it)]"""
    parts = next(read.encode_all([chat], tokenizer, template))
    return [(tokenizer.decode(np.where(part < 0, ~part, part)), tokenizer.decode(part[part >= 0])) for part in parts]

@pytest.mark.parametrize("template, answers", [(HIS, "a + b|return b|"), ("plain", " a + b\n\n return b\n\n"),
                                               ("vicuna", " a + b</s> return b</s>")])
def test_training_and_asking_have_one_format(tokenizer, template, answers):
    """What is learned from of a chat are its answers; each prompt is the beginning of what was trained on."""
    template = read.template_of(template, tokenizer) if template in read.TEMPLATES else template
    (whole, learned), = learned_of(tokenizer, CHAT, template)
    assert learned.split() == answers.split()
    for turns in (1, 3):
        asked = tokenizer.decode(read.chat_ids(CHAT[:turns], tokenizer, template))
        assert whole.startswith(asked) and whole[len(asked):].lstrip().startswith(CHAT[turns]["content"])
    assert tokenizer.decode(read.encode(CHAT, tokenizer, template)) == whole
    (_, learned), = learned_of(tokenizer, CHAT[:1], template)
    assert learned == "", "a question alone"

def test_answers_are_learned_where_a_template_writes_earlier_turns_otherwise(tokenizer):
    """Each from a text of its own that ends with it, as the target would write it, its thoughts with it."""
    first, second = learned_of(tokenizer, CHAT, THINKS)
    assert first == ("<user>add a|<assistant>(thought) a + b|", "(thought) a + b|")
    assert second == ("<user>add a|<assistant>a + b|<user>return|<assistant>(thought) return b|", "(thought) return b|")

def test_a_tokenizer_that_knows_no_characters_of_its_tokens_finds_the_same_answers(tokenizer):
    """By the texts before them."""
    (part,), = read.encode_all([CHAT * 20], tokenizer, HIS)
    (_, answers), = read.chat_parts(CHAT * 20, tokenizer, HIS)
    assert np.array_equal(read.only_answers(np.where(part < 0, ~part, part), None, answers, tokenizer), part)

def test_formats_by_name(tokenizer, tmp_path):
    """A template that writes the first token itself: the tokenizer must not add another."""
    own = copy.deepcopy(tokenizer)
    assert read.template_of(None, own) == read.PLAIN
    for own.chat_template in (HIS, {"default": HIS, "tools": "x"}):
        assert read.template_of(None, own) == HIS
    (tmp_path / "mine.jinja").write_text(THINKS)
    assert read.template_of(str(tmp_path / "mine.jinja"), own) == THINKS
    own.bos_token, own.chat_template = "<|endoftext|>", "{{ bos_token }}" + HIS
    own._tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    assert own("hi")["input_ids"][0] == 0 and own.decode(read.encode([USER, ASSISTANT], own)) == "<|endoftext|><user>hi|<assistant>yes|"
    assert read.encode("hi", own) == [0, *read.encode("hi", own, special_tokens=False)]

def test_many_documents_at_once_are_encoded_as_one_by_one(tokenizer):
    found, refuses = ["add a", CHAT, [1, 2], "  ", "return b", [], CHAT[:3]], "{{ raise_exception('no') }}"
    at_once = [[part.tolist() for part in parts] for parts in read.encode_all(found, tokenizer, HIS)]
    assert at_once == [[part.tolist() for part in next(read.encode_all([one], tokenizer, HIS))] for one in found]
    assert at_once[0] == [tokenizer("add a")["input_ids"]] and at_once[3] == at_once[5] == list(read.encode_all([CHAT], tokenizer, refuses))[0] == []

# ---------------------------------------------------------------- prompts
def test_prompts_of_rows(tokenizer, tmp_path):
    """A limit of rows, evenly over the groups; each question of a chat behind all before it, answered or not."""
    rows = [{"text": f"{group}{i}", "group": group} for group, n in (("a", 4), ("b", 2)) for i in range(n)]
    found = read.prompt_rows([dump(tmp_path / "x.jsonl", rows), dump(tmp_path / "c.jsonl", ["c0"])], 5)
    assert [(group, read.question_text(row)) for group, row, _ in found] == [("a", "a0"), ("b", "b0"), ("c", "c0"), ("a", "a1"), ("b", "b1")]
    assert found[1][2] == f"row 5 of {tmp_path / 'x.jsonl'}"

    def asked(row, **more):
        return [tokenizer.decode(ids) for ids in read.prompts_of(row, "row 1", tokenizer, HIS, **more)]
    answers, two = [], {"turns": ["one", "two"]}
    answer = lambda ids: answers.append(tokenizer.decode(ids)) or "yes"                                     # noqa: E731
    assert asked(two, answer=answer) == ["<user>one|<assistant>", "<user>one|<assistant>yes|<user>two|<assistant>"]
    next(read.prompts_of(two, "row 1", tokenizer, HIS, answer=answer))
    assert answers == ["<user>one|<assistant>"], "the last question is not answered here, and who stops decodes nothing"
    first = "<system>be|<user>add a|<assistant>"
    assert asked({"messages": CHAT}, system="be") == [first, first + "a + b|<user>return|<assistant>"]
    assert asked({"question": "q"}, ask="{question}?") == ["q?"]

# ---------------------------------------------------------------- prepared data
def prepared(tmp_path, tokenizer, *paths, template=None, name="out"):
    """-> {split: [(kind, tokens of a document)]}, meta.json"""
    folder = prepare.prepare([str(path) for path in paths], tokenizer, tmp_path / name, template, vocab=300)
    found, meta = {}, prepare.meta_of(folder)
    for split in prepare.SPLITS:
        tokens, index = prepare.open_split(folder, split)
        assert isinstance(tokens, np.memmap) or not len(tokens)
        found[split] = [(meta["kinds"][kind], tokens[start:start + size].tolist()) for start, size, kind in index]
        assert meta[split] == {"tokens": len(tokens), "documents": len(index)}
    return found, meta

def test_every_fiftieth_document_is_held_out_unless_its_row_says(tmp_path, tokenizer):
    rows = [{"ids": [i, i, i], "source": "ab"[i % 2]} for i in range(1, 101)]
    found, meta = prepared(tmp_path, tokenizer, dump(tmp_path / "rows.jsonl", rows))
    assert found["val"] == [("a", [50] * 3), ("a", [100] * 3)] and meta["kinds"] == ["b", "a"]
    assert found["train"] == [("ab"[i % 2], [i] * 3) for i in range(1, 101) if i % 50], "ids as they are: no end-of-text"
    rows = [{"ids": [i, i], "held_out": i < 4, "times": 1 + (i == 7)} for i in range(1, 60)]
    found, _ = prepared(tmp_path, tokenizer, dump(tmp_path / "rows.jsonl", rows), name="other")
    assert [ids[0] for _, ids in found["val"]] == [1, 2, 3]
    assert [ids[0] for _, ids in found["train"]] == sorted([*range(4, 60), 7])

def test_what_is_left_out_is_counted_and_named(tmp_path, tokenizer, capsys):
    good = [json.dumps({"text": f"add {i}", "meta": {"set": "C4"}}) for i in range(3)]
    bad = ["{cut", "[]", "null", '{"other": 1}', '{"text": "  "}', '{"ids": []}', '{"instruction": "", "output": ""}']
    path = tmp_path / "c4.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join([good[0], *bad, *good[1:]]).encode()))
    found, meta = prepared(tmp_path, tokenizer, path)
    end = tokenizer.eos_token_id
    assert [ids for _, ids in found["train"]] == [[*tokenizer(f"add {i}")["input_ids"], end] for i in range(3)]
    err = capsys.readouterr().err
    assert "left out, 6 rows without text" in err and f"row 2 of {path}" in err and meta["left_out"] == 6
    with pytest.raises(read.UserError, match="row 2"):
        read.read_rows(path)
    chats = dump(tmp_path / "chats.jsonl", [{"messages": chat} for chat in (CHAT, CHAT[:1], [ASSISTANT], CHAT[:3])])
    refuses = "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}" + HIS
    found, meta = prepared(tmp_path, tokenizer, chats, template=refuses, name="chats")
    err = capsys.readouterr().err
    assert f"left out, 1 chats without an answer to learn from: row 2 of {chats}" in err
    assert f"1 rows without text: row 3 of {chats}" in err and meta["without_answer"] == meta["left_out"] == 1
    assert [ids[-1] != end for _, ids in found["train"]] == [True, True], "a chat ends as its template says"

def test_a_folder_is_read_in_order_without_what_is_hidden_or_no_text(tmp_path, tokenizer, capsys):
    for name in ("b.txt", "a.txt", ".c.txt", "d/e.txt", ".git/f.txt", "d/.g/h/i.txt"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(name)
    (tmp_path / "data" / "b.png").write_bytes(b"\x89PNG\xff\xfe")
    found, _ = prepared(tmp_path, tokenizer, tmp_path / "data")
    assert [tokenizer.decode(ids[:-1]) for _, ids in found["train"]] == ["a.txt", "b.txt", "d/e.txt"]
    assert f"left out, 1 rows without text: {tmp_path / 'data' / 'b.png'}" in capsys.readouterr().err

def test_a_long_text_begins_and_ends_once(tmp_path, tokenizer, monkeypatch):
    """However many pieces it is read in: one token before it, where the tokenizer writes one, and one end-of-text."""
    monkeypatch.setattr(files, "PIECE", 60)
    for name, text in (("a.txt", TEXT + "\n" * 99), ("b.txt", "add")):
        (tmp_path / name).write_text(text)
    own = copy.deepcopy(tokenizer)
    own._tokenizer.post_processor = TemplateProcessing(single="Ġ $A", special_tokens=[("Ġ", own.convert_tokens_to_ids("Ġ"))])
    found, _ = prepared(tmp_path, own, tmp_path / "a.txt", tmp_path / "b.txt")
    assert len(found["train"]) + len(found["val"]) > 9 and [own.decode(ids) for _, ids in found["train"]][-1] == " add<|endoftext|>"
    text = own.decode(sum((ids for _, ids in found["train"][:-1]), []))
    assert text.startswith(" def") and text.endswith("<|endoftext|>") and text[1:-13].rstrip() == TEXT.rstrip()

def test_tokens_are_those_of_the_files_as_they_are(tmp_path, tokenizer, monkeypatch):
    """Content, tokenizer and template are what counts; a killed preparation leaves nothing half, another's folder stays."""
    path, calls, write = tmp_path / "a.txt", [], prepare.write_splits
    monkeypatch.setattr(prepare, "write_splits", lambda *given: calls.append(1) or write(*given))

    def decoded(text, name="out", by=tokenizer, **more):
        path.write_text(text)
        found, meta = prepared(tmp_path, by, path, name=name, **more)
        assert by.decode(found["train"][0][1][:-1]) == text
        return meta["key"]
    first, second = "one two three four", "five six seven ten"
    assert decoded(first) == decoded(first) != decoded(second) and len(calls) == 2
    assert decoded(second, template=HIS) != decoded(second, by=make.train_tokenizer(["one two three " * 9], 270)) and len(calls) == 4

    def killed(files, *given):
        files["train"].write(b"half")
        raise KeyboardInterrupt
    monkeypatch.setattr(prepare, "write_splits", killed)
    for name in ("out", "new"):
        with pytest.raises(KeyboardInterrupt):
            decoded("nine ten nine ten", name)
    assert (tmp_path / "out" / "meta.json").exists() and not (tmp_path / "new").exists()
    monkeypatch.setattr(prepare, "write_splits", write)
    assert decoded("nine ten nine ten") == decoded("nine ten nine ten", "new")

def test_formats_that_need_another_package(tmp_path, tokenizer, monkeypatch):
    """A sentence where it is missing; its rows where it is there."""
    rows = [{"text": "add a"}, {"text": "return b"}]
    packed, parquet = tmp_path / "c4.jsonl.zst", tmp_path / "c4.parquet"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    parquet.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    with pytest.raises(read.UserError, match="pip install zstandard"):
        prepared(tmp_path, tokenizer, packed)
    asked = []
    monkeypatch.setitem(sys.modules, "zstandard", SimpleNamespace(open=gzip.open))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *given, **more: asked.append((given, more)) or rows))
    for i, path in enumerate((packed, parquet, "owner/name", "owner/name:small")):
        assert len(prepared(tmp_path, tokenizer, path, name=f"o{i}")[0]["train"]) == 2
    assert [given for given, _ in asked] == [("parquet",), ("owner/name", None), ("owner/name", "small")]
    assert asked[0][1]["data_files"] == str(parquet) and all(more["split"] == "train" for _, more in asked)

# ---------------------------------------------------------------- pieces, steps, parts
def test_pieces_are_documents_or_parts_of_them():
    index = np.array([[0, 10, 1], [13, 1, 0], [14, 5, 0], [14, 5, 0], [28, 4, 2]])
    found = prepare.pieces_of(index, 4).tolist()
    assert found == [[0, 4, 1], [4, 4, 1], [8, 2, 1], [14, 4, 0], [14, 4, 0], [28, 4, 2]], "one token alone predicts nothing"
    assert prepare.pieces_of(index[:0], 4).shape == (0, 3)
    tokens = np.arange(40, dtype="i4")
    tokens[2:4] = ~tokens[2:4]
    ids, learn = prepare.gather(tokens, prepare.pieces_of(index, 4)[[2, 0, 1]])
    assert ids[0, :2].tolist() == [8, 9] and ids[1].tolist() == [0, 1, 2, 3], "a row each, padded on the right"
    assert learn.int().tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]], "nothing from padding, nor what is only read"
    pieces = prepare.pieces_of(index, 4)
    assert prepare.labels_in(tokens, pieces) == prepare.gather(tokens, pieces)[1].sum() == 14

def pieces_at_random(n=1000):
    rng = np.random.default_rng(0)
    return np.stack((np.arange(n), rng.integers(2, 100, n), np.arange(n) % 3), 1)

def test_an_epoch_has_every_piece_once_in_even_steps():
    sizes = pieces_at_random()[:, 1]
    first, again, *others = (prepare.order(sizes, 512, *by) for by in ((0, 0), (0, 0), (0, 1), (1, 0)))
    assert len(first) == prepare.steps_of(sizes, 512) == sizes.sum() // 512 and list(map(len, prepare.order(np.full(6, 4), 8, 0, 0))) == [2, 2, 2]
    seen, place = np.concatenate(first), [at for at, step in enumerate(first) for _ in step]
    assert len(set(seen)) == len(seen) and sizes[list(set(range(1000)) - set(seen))].sum() < 512, "once, but what fills no step"
    assert [(sum(sizes[seen[:i + 1]]) - 1) // 512 for i in range(len(seen))] == place, "where its last token falls"
    assert all(map(np.array_equal, first, again)), "by the seed and the epoch"
    assert not any(np.array_equal(np.concatenate(other)[:50], seen[:50]) for other in others)
    assert [sorted(step) for step in prepare.order(sizes[:3], 512, 0, 0)] == [[0, 1, 2]], "too few for a step: one has them all"

def test_parts_of_a_step_fit_with_their_padding():
    parts = prepare.parts_of(pieces := pieces_at_random(40), 300)
    assert sorted(np.concatenate(parts)[:, 0]) == list(range(40)), "each piece once"
    padded = [len(part) * part[:, 1].max() for part in parts]
    assert max(padded) <= 300 and len(parts) < 12 and sum(padded) < 1.1 * pieces[:, 1].sum(), "like sizes side by side"
    assert [len(part) for part in prepare.parts_of(pieces, 1)] == [1] * 40, "one at least"

def test_what_is_measured_is_a_sample_of_all_kinds():
    pieces = pieces_at_random()
    pieces[:, 2] = np.where(pieces[:, 0] < 970, 0, 1 + pieces[:, 0] % 2)                 # two rare kinds
    few = prepare.stratified(pieces, 30)
    assert np.bincount(few[:, 2]).tolist() == [10, 10, 10] and len(np.unique(few[:, 0])) == 30
    assert few[:, 1].std() > 0.8 * pieces[:, 1].std(), "of all lengths"
    assert np.array_equal(few, prepare.stratified(pieces, 30)) and len(prepare.stratified(pieces, 10 ** 4)) == 1000
