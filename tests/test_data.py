"""User-supplied files: each row is read as it is meant, or left out with its reason.

The tables below are the specification: what a file holds, and the documents that are learned from
it, with their labels between brackets, or why it is left out, or the sentence that refuses it.
"""
import copy
import gzip
import json
import re
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import tokenizer_of, write_rows
from tokenizers.processors import TemplateProcessing

from runtime import chats, text
from runtime.program import UserError
from training import documents

ASK = "{% if add_generation_prompt %}<assistant>{% endif %}"
TAGS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}" + ASK

@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("def add(a, b):\n    return a + b\n" * 9, end="</s>")

def learned(tokenizer, path, chat_template=chats.QUESTION, **arguments):
    """What is learned from files -> [text with marks], and the report or the error's sentence."""
    report, found = defaultdict(list), []
    template = {"chat_template": chat_template, **arguments}
    try:
        for _, parts in documents.encoded([path], tokenizer, template, report):
            found += [documents.marked(ids, tokenizer) for ids in parts]
    except UserError as why:
        return found, str(why)
    return found, "\n".join(documents.lines_of(report))

def asked(tokenizer, path, chat_template, **arguments):
    """The prompts of a file's documents, as text.  The target answers: own."""
    template = {"chat_template": chat_template, **arguments}
    return [tokenizer.decode(ids) for document in text.documents([path])
            for ids in chats.questions(document, tokenizer, template, lambda ids: "own")]

# ---------------------------------------------------------------- rows
def turns(*contents, role="role", content="content", names=("user", "assistant")):
    return [{role: names[i % 2], content: said} for i, said in enumerate(contents)]

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
QA = "<user>q|<assistant>⟦a|⟧"
CALL = {"role": "assistant", "content": "5", "tool_calls": [{"function": {"name": "add"}}]}
# A row -> what is learned from it; or, after "left out", words of the reason
ROWS = [
    ({"Conversations": turns("q", "a", role="From", content="value", names=("Human", "gpt"))}, QA),
    ({"messages": json.dumps([U, A])}, QA),
    ({"conversation": [{"human": "q", "assistant": "a"}]}, QA),
    ({"system": "s", "conversations": [A, U, A]}, "<system>s|" + QA),
    ({"messages": turns("q", names=("critic",))}, "left out: a role is unknown: critic"),
    ({"contents": [{"role": "user", "parts": [{"text": "q"}]},
                   {"role": "model", "parts": [{"text": "a"}, {"type": "text", "text": "b"}]}]},
     "<user>q|<assistant>⟦ab|⟧"),
    (U, "left out: it is a single message"),
    ({"messages": [U, {**A, "weight": -1}, U, {**A, "train": "False"}, U, {**A, "loss_mask": 0},
                   U, {**A, "weight": "1.0", "train": "yes"}]}, "<user>q|<assistant>a|" * 3 + QA),
    ({"question": "q", "reply": "a"}, "left out: no answer to learn is in question (its fields: q"),
    ({"messages": turns("q", [{"type": "reasoning_text", "text": "r"}])},
     "left out: content has a part of type reasoning_text"),
    ({"messages": [U, A, U, CALL, {"role": "tool", "content": "5"}, A]}, QA + "<user>q|"),
    ({"messages": [U, {**A, "tool_calls": []}, {"role": "function", "content": "5"}, A]},
     QA + "<tool>5|<assistant>⟦a|⟧"),
    ({"text": "a \ud83d b", "source": "\udc00", "\ud800": 1}, "⟦a \ufffd b</s>⟧"),
    ({"input": "q", "context": "c", "response": "a"}, "<user>q\nc|<assistant>⟦a|⟧"),
    ({"instruction": "q", "input": "", "output": "a", "text": "all", "system": "s"},
     "<system>s|" + QA),                                                                    # Alpaca
    ({"query": "q", "output": "a", "history": [["b", "c"]]}, "<user>b|<assistant>⟦c|⟧" + QA),
    ({"prompt": "q", "chosen": [U, A], "rejected": [U, A]}, QA),
    ({"prompt": [U], "completion": [A]}, QA),
    ({"rejected": [U, CALL], "chosen": [U, A]}, QA),
    ({"text": "q", "code": "a", "task_id": 1}, QA),                                          # MBPP
    ({"problem": "q", "solution": "a", "answer": "42"}, QA),                                 # MATH
    ({"Question": "q", "Answer": 42}, "<user>q|<assistant>⟦42|⟧"),                          # GSM8K
    ({"prompt": "def f():\n", "completion": "  pass", "system": "s"}, "def f():\n⟦  pass</s>⟧"),
    ({"prompt": [7, 8], "answer": [9, 10]}, "'(⟦)*⟧"),
    ({"input_ids": [7, 8, 9], "labels": [-100, 8, -100]}, "'⟦(⟧)"),
    ({"ids": [7, 8, 9], "completion_mask": [0, 0, 1]}, "'(⟦)⟧"),
    ({"ids": [7, 8], "labels": [7, 9]}, "left out: labels are of other tokens than ids"),
    ({"ids": [7, 8], "loss_mask": [1, 1, 1]}, "left out: loss_mask are of other tokens than ids"),
    ({"text": " "}, "left out: no known field holds a text or a question: it is empty"),
]

# ---------------------------------------------------------------- files
TWO = [{"text": "a"}, {"text": "b\u2028c"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in TWO)
MARKED = ["⟦a</s>⟧", "⟦b\u2028c</s>⟧"]
BOM = "\ufeff"
# The name of a file, its content -> what is learned; or words of the sentence
FILES = [
    ("x.JSONL", BOM + LINES.replace("\n", "\r\n"), MARKED),
    ("x.txt", json.dumps(TWO, indent=1), MARKED),
    ("x.jsonl.gz", gzip.compress(LINES.encode()), MARKED),
    ("x.jsonl", '"a"\n\n"b\u2028c"\n', MARKED),
    ("x.jl", f"{json.dumps([U, A])}\n" * 2, ["Question: q\nAnswer:⟦ a\n</s>⟧"] * 2),
    ("x.txt", BOM + "\na text\n", ["⟦\na text\n</s>⟧"]),
    ("x", "[1] a text", ["⟦[1] a text</s>⟧"]),
    ("x.jsonl", '{"ids": [7, 999]}', "row 1 of .* holds token id 999"),
    ("x.csv", "q,a\n", "make JSON lines of it, by pandas"),
    ("x.txt", LINES.encode("utf-16"), "NUL bytes: it is UTF-16"),
    ("x.jsonl", LINES + "{", "line 3 of .*x.jsonl is no JSON"),
    ("x.json", '[\n{"a": 1},\n{"b"}]', "line 3 of .*x.json is no JSON"),
    ("x.txt", "a\nb\xff".encode("latin-1"), "line 2 of .*x.txt cannot be read"),
    ("x.jsonl.gz", gzip.compress(LINES.encode())[:-9], "cannot be read"),
]

@pytest.mark.parametrize("name, content, expected", FILES)
def test_what_is_learned_from_a_file(tokenizer, tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found, report = learned(tokenizer, path)
    assert re.search(expected, report) if isinstance(expected, str) else found == expected

def test_of_a_folder_only_json_and_text_is_read(tokenizer, tmp_path):
    """Other files are named in the report; hidden ones are left out."""
    for name in ("b.txt", "a.TXT", ".c.txt", "d/e.txt", ".git/f.txt", "README.md", "d/x.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found, report = learned(tokenizer, tmp_path)
    assert found == [f"⟦{name}</s>⟧" for name in ("a.TXT", "b.txt", "d/e.txt")]
    assert "2 left out: of a folder only .json" in report and "README.md" in report

# ---------------------------------------------------------------- templates and labels
# As Qwen3's: an assistant's thoughts are written for the last turn only.
THINKS = ("{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}"
          "(thought) {% endif %}{{ m.content }}|{% endfor %}" + ASK)
# As R1's: the target is asked with the beginning of a thought.
ASKS_FOR_A_THOUGHT = TAGS.replace("<assistant>", "<assistant><think>\n")
ALWAYS_ASKS = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}"
               "{% if m.role == 'assistant' %}</s>{% endif %}|{% endfor %}<assistant>")
ENDS_NO_LAST_TURN = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last or "
                     "add_generation_prompt %}</s>{% endif %}{% endfor %}" + ASK)
FOUR = turns("q", "a", "r", "b")
# A template, and a chat -> what is learned: a text, or several
LABELS = [
    (chats.VICUNA, [{"role": "system", "content": "s"}, U, A], "s USER: q ASSISTANT:⟦ a</s>⟧"),
    (THINKS, FOUR, ["<user>q|<assistant>⟦(thought) a|⟧",
                    "<user>q|<assistant>a|<user>r|<assistant>⟦(thought) b|⟧"]),
    (ASKS_FOR_A_THOUGHT, [U, A], QA),
    (ALWAYS_ASKS, FOUR, "<user>q|<assistant>⟦a</s>⟧|<user>r|<assistant>⟦b</s>⟧|<assistant>"),
    (ALWAYS_ASKS.replace("</s>", ""), [U, A], "<user>q|<assistant>⟦a|<⟧assistant>"),
    (ENDS_NO_LAST_TURN, FOUR, ["<user>q</s><assistant>⟦a</s>⟧",
                               "<user>q</s><assistant>a</s><user>r</s><assistant>⟦b</s>⟧"]),
    ("{{ raise_exception('no') }}", [U, A], "left out: the chat template refuses it (no)"),
    ("{{ x }}", [U, A], "left out: it has a single token, or an answer that the template does not"),
]

@pytest.mark.parametrize("template, row, expected", [(TAGS, *row) for row in ROWS] + LABELS)
def test_what_is_learned_from_a_row(tokenizer, tmp_path, template, row, expected):
    path = write_rows(tmp_path / "rows.jsonl", [row])
    found, report = learned(tokenizer, path, template)
    if isinstance(expected, str) and expected.startswith("left out"):
        assert not found and expected in report and f"(row 1 of {path})" in report
    else:
        assert found == ([expected] if isinstance(expected, str) else expected)

@pytest.mark.parametrize("template", chats.TEMPLATES.values())
def test_a_prompt_is_the_beginning_of_what_is_learned(tokenizer, tmp_path, template):
    path = write_rows(tmp_path / "x.jsonl", [FOUR])
    [whole], _ = learned(tokenizer, path, template)
    before, answer, between, *_ = re.split("[⟦⟧]", whole)
    assert asked(tokenizer, path, template) == [before, before + answer + between]

def test_a_text_begins_and_ends_once_and_a_prompt_does_not_end(tokenizer, tmp_path):
    """Also by a tokenizer that writes its end of text before and after each text."""
    own = copy.deepcopy(tokenizer)
    own.bos_token, own.chat_template = "</s>", "{{ bos_token }}" + TAGS
    own._tokenizer.post_processor = TemplateProcessing(single="</s> $A </s>",
                                                       special_tokens=[("</s>", 0)])
    rows = [{"text": "a b"}, {"text": "</s>a b"}, {"prompt": "a", "completion": " b"}, [U, A]]
    path = write_rows(tmp_path / "x.jsonl", rows)
    found, _ = learned(own, path, own.chat_template)
    assert found == ["⟦</s>a b</s>⟧", "⟦</s>a b</s>⟧", "</s>a⟦ b</s>⟧", "</s>" + QA]
    prompts = ["</s>a b", "</s>a b", "</s>a", "</s><user>q|<assistant>"]
    assert asked(own, path, own.chat_template) == prompts

# As Qwen3's: tools, a name, an answer's reasoning, and a switch.
READS_MORE = "{% if tools %}[{{ tools[0].name }}]{% endif %}" + TAGS.replace(
    "{{ m.content }}", "{% if thinks %}{{ m.reasoning_content }}{% endif %}{{ m.content }}")

def test_what_a_template_can_read_reaches_it(tokenizer, tmp_path):
    """Reasoning, tools and arguments, when learning and when asking; all else is named."""
    (tmp_path / "t.jinja").write_text(BOM + READS_MORE)
    row = {"messages": [{**U, "value": "second"}, {**A, "reasoning_content": "r"}],
           "tools": json.dumps([{"name": "add"}]), "Messages": "again", "id": 3}
    path = write_rows(tmp_path / "x.jsonl", [row])
    template = chats.template_of(tmp_path / "t.jinja", tokenizer, '{"thinks": true}')
    found, report = learned(tokenizer, path, **template)
    assert found == ["[add]<user>q|<assistant>⟦ra|⟧"]
    assert "not read: Messages, id, value" in report
    assert asked(tokenizer, path, **template) == ["[add]<user>q|<assistant>"]

def test_labels_are_found_by_the_ends_of_tokens():
    """From the first token that reaches into an answer; a special token's offset may be (0, 0)."""
    offsets = [(0, 0), (0, 4), (4, 6), (6, 9), (0, 0), (9, 12)]
    encoded = {"input_ids": range(6), "offset_mapping": offsets}
    found = chats.ids_of("", lambda text, **how: encoded, [(5, 9)])
    assert np.array_equal(found, [~0, ~1, 2, 3, 4, ~5])

# ---------------------------------------------------------------- prompts
def test_prompts_are_balanced_by_kind(tokenizer, tmp_path):
    """The kind is group, category or source, or the file's name."""
    rows = [{"text": "a0", "group": "a"}, {"text": "a1", "category": "a"}, {"text": "x0"},
            {"text": "30", "source": 3}, {"text": "a2", "group": "a"}, {"text": "x1", "source": {}}]
    path = write_rows(tmp_path / "x.y.jsonl", rows)
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=300), remaining=lambda ids: 9)
    loaded = SimpleNamespace(target=target, tokenizer=tokenizer)
    found = [(prompt.kind, tokenizer.decode(prompt.ids))
             for prompt in chats.read_prompts([path], loaded, 5)]
    assert found == [("a", "a0"), ("x", "x0"), ("3", "30"), ("a", "a1"), ("x", "x1"), ("a", "a2")]

# A row -> its questions, each after what comes before it
QUESTIONS = [
    ({"turns": ["one", "two"]}, ["<user>one|<assistant>", "<user>one|<assistant>own|<user>two|"
                                 "<assistant>"]),
    ({"system": "s", "question": "q"}, ["<system>s|<user>q|<assistant>"]),
    ({"prompt": "def f():\n", "canonical_solution": "  pass"}, ["def f():\n"]),
    ({"prompt": "a"}, ["a"]),
    ({"ids": [7, 8, 9, 10], "labels": [-100, 8, -100, 10]}, ["'"]),
]

@pytest.mark.parametrize("row, expected", QUESTIONS)
def test_what_a_row_asks(tokenizer, tmp_path, row, expected):
    path = write_rows(tmp_path / "x.jsonl", [row])
    assert asked(tokenizer, path, TAGS) == expected

# ---------------------------------------------------------------- prepared data
def test_a_prepared_folder_holds_documents_as_they_are_encoded(tmp_path, tokenizer, capsys):
    """Every fiftieth is held out, if it does not say; ids as they are; kinds by number.

    Its template need not be named again; another one, or another tokenizer, is refused.  Text of
    another target, and that no text is held out, are told.
    """
    rows = [{"ids": [i, i, i], "source": "ab"[i % 2]} for i in range(1, 101)]
    rows[2]["held_out"], rows[99]["held_out"] = True, "false"
    rows.append({"prompt": [7, 8], "answer": [9], "target": "0123abcd", "source": "b"})
    path, folder = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    lines = documents.prepare([path], tokenizer, chats.template_of("question", tokenizer), folder)
    data = documents.load([folder], tokenizer, (None, None), {}, None)
    learned, held = ([(kind, data.tokens[start:start + size].tolist())
                      for start, size, kind in index] for index in (data.documents, data.held_out))
    assert held == [(0, [3] * 3), (1, [50] * 3)]
    assert learned == [(1 - i % 2, [i] * 3) for i in range(1, 101) if i not in (3, 50)] + [
        (0, [~7, ~8, 9])]
    assert lines[1] == f"1 read as prompt + answer; not read: target (row 101 of {path})"
    assert lines[2].startswith("301 of 303 tokens are learned; 2 of 101 documents are held out")
    assert "warning: --data has text that another model than --target" in capsys.readouterr().out
    path = write_rows(path, [{"ids": [1, 2]}])
    data = documents.load([path], tokenizer, ("question", None), {}, folder)
    assert data.held_out.tolist() == data.documents.tolist() == [[0, 2, 0]]
    assert "no text is held out" in capsys.readouterr().out
    for other, template, words in ((tokenizer, "vicuna", "another --template"),
                                   (tokenizer_of("other text"), "question", "another tokenizer")):
        with pytest.raises(UserError, match=f"was prepared with {words}"):
            documents.load([folder], other, (template, None), {}, None)
