"""User-supplied files: rows become the documents and prompts that they mean, and one chat template serves training and asking."""
import copy
import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from runtime import text
from verify import UserError

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}

@pytest.fixture(scope="module")
def tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(["def add(a, b):\n    return a + b\n" * 9], trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>")

def dump(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path

# ---------------------------------------------------------------- rows
def test_rows_of_files(tmp_path):
    def rows_of(content, name="rows.jsonl"):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return list(text.read_rows(tmp_path / name))
    two = [{"text": "a"}, {"text": "b\u2028c"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in two)
    assert rows_of(lines) == rows_of(json.dumps(two, indent=1), "x.json") == two, "U+2028 ends no line"
    assert rows_of(json.dumps(two[0]), "y.json") == two[:1] and rows_of(json.dumps(two)) == [two]
    assert rows_of(gzip.compress(lines.encode()), "x.jsonl.gz") == two
    assert rows_of("plain\ntext\n", "x.txt") == [{"text": "plain\ntext\n"}]
    damaged = bytearray(gzip.compress(lines.encode() * 9))
    damaged[20:30] = b"0123456789"
    with pytest.raises(UserError, match="cannot be read as"):
        rows_of(bytes(damaged), "x.gz")

SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]

@pytest.mark.parametrize("row, document, asks", [
    ({"conversations": SHAREGPT}, [USER, ASSISTANT], None), ({"id": 1, "conversation": [USER, ASSISTANT]}, [USER, ASSISTANT], None),
    ({"messages": [USER, ASSISTANT], "text": "other"}, [USER, ASSISTANT], "other"), ({"conversations": []}, [], None),
    ({"turns": ["hi", "more"], "category": "writing"}, [USER, {"role": "user", "content": "more"}], None), ({"ids": [1, 2]}, [1, 2], None),
    ({"question": "1 + 1?", "answer": "2"}, "Question: 1 + 1?\nAnswer: 2\n", "Question: 1 + 1?\nAnswer:"),
    ({"text": "turns and messages"}, "turns and messages", "turns and messages"), ({"text": None}, "", None),
    ({"prompt": "def f():\n", "canonical_solution": "    return 1\n"}, "def f():\n    return 1\n", "def f():\n"),
    ({"prompt": "a", "completion": "b"}, "ab", "a"), ({"prompt": [1, 2], "answer": [3]}, [~1, ~2, 3], None),
    ({"instruction": "Sum up", "input": "a text", "output": "short"}, "Sum up\na text\nshort", "Sum up\na text\n"),
    ({"instruction": "Why?", "input": "", "output": "So."}, "Why?\n\nSo.", "Why?\n"),
    ({"sentence": "a"}, None, None), ([1], None, None), (3, None, None), ({"conversations": "hi"}, None, None), ({"messages": [3]}, None, None)])
def test_what_rows_mean(row, document, asks):
    assert text.document(row) == document
    if document is None or isinstance(document, str):
        assert text.question_text(row) == asks

def test_what_holds_no_document_is_named(tmp_path):
    """It is a mistake; or, with bad=[], its place is noted.  Hidden files of a folder are left out."""
    rows = dump(tmp_path / "rows.jsonl", [{"text": "a"}, {"other": 1}, {"text": "b"}, {"ids": [-1]}])
    with pytest.raises(UserError, match="--data: row 2 of .*rows.jsonl has none of the fields"):
        list(text.documents([rows]))
    bad = []
    assert [found for *_, found in text.documents([rows], bad)] == ["a", "b"] and bad == [f"row 2 of {rows}", f"row 4 of {rows}"]
    for name in ("b.txt", "a.txt", ".c.txt", "d/e.txt", ".git/f.txt", "d/.g/h/i.txt"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(name)
    assert [document for *_, document in text.documents([tmp_path / "data"])] == ["a.txt", "b.txt", "d/e.txt"]

# ---------------------------------------------------------------- chats: one template
HIS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
# As Qwen3's: an assistant's thoughts are written for the last turn only.
THINKS = ("{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}(thought) {% endif %}{{ m.content }}|"
          "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
CHAT = [{"role": role, "content": content} for role, content in (
    ("user", "add a"), ("assistant", "a + b"), ("user", "return"), ("assistant", "return b"))]

def learned_of(tokenizer, chat, template):
    """[(a text, its labels)]"""
    parts, = text.encode_all([chat], tokenizer, template)
    return [(tokenizer.decode(np.where(part < 0, ~part, part)), tokenizer.decode(part[part >= 0])) for part in parts]

@pytest.mark.parametrize("template, answers", [(HIS, "a + b|return b|"), ("plain", " a + b\n\n return b\n\n"), ("vicuna", " a + b</s> return b</s>")])
def test_training_and_asking_have_one_format(tokenizer, template, answers):
    """The labels of a chat are its answers; each prompt is the beginning of what was learned."""
    template = text.TEMPLATES.get(template, template)
    (whole, learned), = learned_of(tokenizer, CHAT, template)
    assert learned.split() == answers.split()
    for turns in (1, 3):
        asked = tokenizer.decode(text.chat_ids(CHAT[:turns], tokenizer, template))
        assert whole.startswith(asked) and whole[len(asked):].lstrip().startswith(CHAT[turns]["content"])
    (_, learned), = learned_of(tokenizer, CHAT[:1], template)
    assert learned == "", "a question alone"

def test_answers_are_learned_where_a_template_writes_earlier_turns_otherwise(tokenizer):
    """Each from a text of its own that ends with it, as the target would write it."""
    first, second = learned_of(tokenizer, CHAT, THINKS)
    assert first == ("<user>add a|<assistant>(thought) a + b|", "(thought) a + b|")
    assert second == ("<user>add a|<assistant>a + b|<user>return|<assistant>(thought) return b|", "(thought) return b|")

def test_templates_by_name(tokenizer, tmp_path):
    own = copy.deepcopy(tokenizer)
    assert text.template_of(None, own) == text.PLAIN
    for own.chat_template in (HIS, {"default": HIS, "tools": "x"}):
        assert text.template_of(None, own) == HIS
    (tmp_path / "mine.jinja").write_text(THINKS)
    assert text.template_of(str(tmp_path / "mine.jinja"), own) == THINKS
    # A template that writes the first token itself: the tokenizer must not add another.
    own.bos_token, own.chat_template = "<|endoftext|>", "{{ bos_token }}" + HIS
    own._tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    assert own.decode(text.encode([USER, ASSISTANT], own)) == "<|endoftext|><user>hi|<assistant>yes|"
    assert text.encode("hi", own) == [0, *text.encode("hi", own, special_tokens=False)]

# ---------------------------------------------------------------- prompts
def test_prompts_are_balanced_by_kind_and_fit_the_context(tokenizer, tmp_path):
    rows = [{"text": f"{kind}{i}", "group": kind} for kind, n in (("a", 4), ("b", 2)) for i in range(n)]
    paths = [dump(tmp_path / "x.jsonl", rows), dump(tmp_path / "c.jsonl", [{"text": "c0 " + "x" * 99}])]
    found = text.prompt_rows(paths, 5)
    assert [(kind, row["text"][:2]) for kind, row, _ in found] == [("a", "a0"), ("b", "b0"), ("c", "c0"), ("a", "a1"), ("b", "b1")]
    assert found[1][2] == f"row 5 of {tmp_path / 'x.jsonl'}" and text.prompt_rows(paths, 2, skip=3) == found[3:]
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=300), context=10, remaining=lambda ids: 11 - len(ids))
    setup = SimpleNamespace(tokenizer=tokenizer, target=target, notes=[])
    prompts = text.prompts_of(setup, paths, 5, 9, None)
    assert prompts == [(kind, tokenizer(row["text"])["input_ids"], 9) for kind, row, _ in found if kind != "c"]
    assert setup.notes == ["1 prompts longer than the context left out"] and text.prompts_of(setup, paths, 5, 9, None, skip=9) == []

def test_each_question_of_a_chat_is_a_prompt(tokenizer):
    """After all before it; an answer that the row leaves open is the target's."""
    def asked(row, **more):
        return [tokenizer.decode(ids) for ids in text.questions_of(row, "row 1", tokenizer, HIS, **more)]
    answers, two = [], {"turns": ["one", "two"]}
    answer = lambda ids: answers.append(tokenizer.decode(ids)) or "yes"                                     # noqa: E731
    assert asked(two, answer=answer) == ["<user>one|<assistant>", "<user>one|<assistant>yes|<user>two|<assistant>"]
    assert answers == ["<user>one|<assistant>"], "the last question is not answered"
    first = "<user>add a|<assistant>"
    assert asked({"messages": CHAT}) == [first, first + "a + b|<user>return|<assistant>"] and asked({"messages": [ASSISTANT]}) == []
