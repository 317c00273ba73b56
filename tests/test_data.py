"""User-supplied files: each row is read as it is meant, or left out with its reason.

The tables below are the specification: what a file holds, and the documents that are learned from
it, with their labels between brackets, or why it is left out, or the sentence that refuses it.
"""
import copy
import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import tokenizer_of, write_rows
from tokenizers.processors import TemplateProcessing

import verify
from conftest import ROOT
from runtime import chats, prompts, text
from runtime.errors import UserError
from training import documents, prepare

TAGS = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")

@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("def add(a, b):\n    return a + b\n" * 9, end="</s>")

def learned(tokenizer, template, *paths):
    """What is learned from files -> [text with marks], the report's lines"""
    report, found = documents.Report(), []
    try:
        for _, parts in documents.encoded(paths, tokenizer, template, 300, report):
            found += [documents.marked(ids, tokenizer) for ids in parts]
    except UserError as why:
        if "no text to learn from" not in str(why):
            raise
    return found, "\n".join(report.lines())

def prompts_of(tokenizer, path, jinja):
    """The prompts of a file as bench.py decodes after them, as text; the target answers "own"."""
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=300), remaining=lambda ids: 9)
    loaded = SimpleNamespace(target=target, tokenizer=tokenizer, eos=0)
    found = prompts.read_prompts([path], loaded, 9, template=jinja)
    return [tokenizer.decode(prompt.ids) for prompt in found]

# ---------------------------------------------------------------- rows
def turns(*contents, role="role", content="content", names=("user", "assistant")):
    return [{role: names[i % 2], content: said} for i, said in enumerate(contents)]

def chat(*contents, **more):
    return {"messages": turns(*contents, **more)}

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
QA = "<user>q|<assistant>⟦a|⟧"
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
# A row -> what is learned from it; or, after "left out", words of the reason
ROWS = [
    # chats
    (chat("q", "a"), QA),
    ({"conversations": turns("q", "a", role="from", content="value", names=("human", "gpt"))}, QA),
    ({"Messages": turns("q", "a", names=("User", "MODEL"))}, QA),
    ({"messages": json.dumps([U, A])}, QA),
    ({"conversation": [{"human": "q", "assistant": "a"}]}, QA),
    (chat("q", "a", "b", "c"), "<user>q|<assistant>⟦a|⟧<user>b|<assistant>⟦c|⟧"),
    ({"system": "s", "conversations": [U, A]}, "<system>s|" + QA),
    (chat("q", names=("critic",)), "left out: a role is unknown: critic"),
    ({"messages": "hi"}, "left out: messages is no list of turns"),
    ({"contents": [{"role": "user", "parts": [{"text": "q"}]},
                   {"role": "model", "parts": [{"text": "a"}]}]}, QA),
    (U, "left out: it is a single message"),
    # which answers are learned
    ({"messages": [U, {**A, "weight": 0}, U, {**A, "weight": "1.0", "train": "yes"}]},
     "<user>q|<assistant>a|<user>q|<assistant>⟦a|⟧"),
    *[({"messages": [U, {**A, name: value}]}, "left out: it has no answer to learn")
      for name, value in (("weight", -1), ("train", "False"), ("loss_mask", 0))],
    ({"messages": [{"role": "system", "content": "s"}, A, U, A]}, "<system>s|" + QA),
    # contents
    (chat("q", PARTS), "<user>q|<assistant>⟦ab|⟧"),
    (chat("q", [{"type": "reasoning_text", "text": "r"}, *PARTS]),
     "left out: content is no text, or not text alone"),
    (chat(None, "a"), "left out: the rest of a chat, from a turn that is empty"),
    (chat("q", "a", "", "b"), QA),
    ({"messages": [U, A, U, CALL, {"role": "tool", "content": "5"}, A]}, QA + "<user>q|"),
    ({"messages": [U, {**A, "tool_calls": []}, {"role": "function", "content": "5"}, A]},
     QA + "<tool>5|<assistant>⟦a|⟧"),
    ({"text": "a \ud83d b", "source": "\udc00", "\ud800": 1}, "⟦a \ufffd b</s>⟧"),
    ({"Text": "other", "text": "a text"}, "⟦a text</s>⟧"),
    # a question and its answer
    ({"instruction": "q", "context": "c", "response": "a"}, "<user>q\nc|<assistant>⟦a|⟧"),   # Dolly
    ({"instruction": "q", "input": "", "output": "a", "text": "all", "system": "s"},
     "<system>s|" + QA),                                                                    # Alpaca
    ({"query": "q", "output": "a", "history": [["b", "c"]]}, "<user>b|<assistant>⟦c|⟧" + QA),
    ({"prompt": "q", "chosen": [U, A], "rejected": [U, A]}, QA),
    ({"prompt": [U], "completion": [A]}, QA),
    ({"problem": "q", "solution": "a", "answer": "42"}, QA),                                 # MATH
    ({"Question": "q", "Answer": 42}, "<user>q|<assistant>⟦42|⟧"),                          # GSM8K
    ({"question": "q", "reply_text": "a"}, "left out: it has no answer to learn (its"),
    # texts and token ids
    ("a text", "⟦a text</s>⟧"),
    ({"text": "a text</s>"}, "⟦a text</s>⟧"),
    ({"prompt": "def f():\n", "canonical_solution": "  pass"}, "def f():\n⟦  pass</s>⟧"),
    ({"prompt": [7, 8], "answer": [9, 10]}, "'(⟦)*⟧"),
    ({"input_ids": [7, 8, 9], "labels": [-100, 8, -100]}, "'⟦(⟧)"),
    ({"ids": [7, 8, 9], "completion_mask": [0, 0, 1]}, "'(⟦)⟧"),
    ({"ids": [7, 8], "labels": [7, 9]}, "left out: labels are of other tokens than ids"),
    ({"ids": [5]}, "left out: it has a single token"),
    ({"text": " "}, "left out: no known field holds a text or a question (its fields: none)"),
]

# ---------------------------------------------------------------- files
TWO = [{"text": "a"}, {"text": "b\u2028c"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in TWO)
MARKED = ["⟦a</s>⟧", "⟦b\u2028c</s>⟧"]
CHAT = "Question: q\nAnswer:⟦ a\n</s>⟧"
BOM = "\ufeff"
# The name of a file, its content -> what is learned; or words of the sentence
FILES = [
    ("x.JSONL", LINES.replace("\n", "\r\n"), MARKED),
    ("x.json", json.dumps(TWO, indent=1), MARKED),
    ("x.json", json.dumps([U, A]), [CHAT]),
    ("x.jsonl.gz", gzip.compress(LINES.encode()), MARKED),
    ("x.jsonl", '"a"\n\n"b\u2028c"\n', MARKED),
    ("x.jsonl", json.dumps([U, A]) + "\n" + json.dumps([U, A]), [CHAT] * 2),
    ("x.txt", BOM + "\na text\n", ["⟦\na text\n</s>⟧"]),
    ("x", "[1] a text", ["⟦[1] a text</s>⟧"]),
    ("x.csv", "q,a\n", "x.csv is a table: make JSON lines of it"),
    ("x.txt", LINES.encode("utf-16"), "it has NUL bytes, as UTF-16 has"),
    ("x.jsonl", LINES + "{", "line 3 of .*x.jsonl is no JSON"),
    ("x.json", '[\n{"a": 1},\n{"b"}]', "line 1 of .*x.json is no JSON"),
    ("x.txt", "a\nb\xff".encode("latin-1"), "line 2 of .*x.txt cannot be read"),
    ("x.jsonl.gz", gzip.compress(LINES.encode())[:-9], "cannot be read"),
]

@pytest.mark.parametrize("name, content, expected", FILES)
def test_what_is_learned_from_a_file(tokenizer, tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            list(documents.encoded([path], tokenizer, chats.QUESTION, 300, documents.Report()))
    else:
        assert learned(tokenizer, chats.QUESTION, path)[0] == expected

def test_of_a_folder_only_json_and_text_is_read(tokenizer, tmp_path):
    """Hidden files are left out."""
    top = tmp_path / "data"
    for name in ("b.txt", "a.TXT", ".c.txt", "d/e.txt", ".git/f.txt", "README.md", "d/x.csv"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(name)
    found, _ = learned(tokenizer, "", top)
    assert found == [f"⟦{name}</s>⟧" for name in ("a.TXT", "b.txt", "d/e.txt")]
    for path in ("", tmp_path / "no"):
        with pytest.raises(UserError, match="does not exist"):
            list(text.documents([path]))

# ---------------------------------------------------------------- templates and labels
# As Qwen3's: an assistant's thoughts are written for the last turn only.
THINKS = ("{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}"
          "(thought) {% endif %}{{ m.content }}|{% endfor %}"
          "{% if add_generation_prompt %}<assistant>{% endif %}")
# As R1's: the target is asked with the beginning of a thought.
ASKS_FOR_A_THOUGHT = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
                      "{% if add_generation_prompt %}<assistant><think>\n{% endif %}")
ALWAYS_ASKS = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}"
               "{% if m.role == 'assistant' %}</s>{% endif %}|{% endfor %}<assistant>")
ENDS_NO_LAST_TURN = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last or "
                     "add_generation_prompt %}</s>{% endif %}{% endfor %}"
                     "{% if add_generation_prompt %}<assistant>{% endif %}")
FOUR = turns("add a", "a + b", "return", "return b")
# A template, and a chat -> what is learned: a text, or several
LABELS = [
    (chats.QUESTION, FOUR, "Question: add a\nAnswer:⟦ a + b\n</s>⟧Question: return\n"
                       "Answer:⟦ return b\n</s>⟧"),
    (THINKS, FOUR, ["<user>add a|<assistant>⟦(thought) a + b|⟧",
                    "<user>add a|<assistant>a + b|<user>return|"
                    "<assistant>⟦(thought) return b|⟧"]),
    (ASKS_FOR_A_THOUGHT, [U, A], QA),
    (ALWAYS_ASKS, FOUR, "<user>add a|<assistant>⟦a + b</s>⟧|<user>return|<assistant>"
                        "⟦return b</s>⟧|<assistant>"),
    (ENDS_NO_LAST_TURN, FOUR, ["<user>add a</s><assistant>⟦a + b</s>⟧",
                               "<user>add a</s><assistant>a + b</s><user>return</s><assistant>"
                               "⟦return b</s>⟧"]),
    ("{% for %}", [U, A], "left out: the chat template refuses it"),
    ("{{ x }}", [U, A], "left out: it has a single token, or an answer that the template does not"),
]

@pytest.mark.parametrize("template, row, expected", [(TAGS, *row) for row in ROWS] + LABELS,
                         ids=lambda value: str(value)[:60])
def test_what_is_learned_from_a_row(tokenizer, tmp_path, template, row, expected):
    path = write_rows(tmp_path / "rows.jsonl", [row])
    found, report = learned(tokenizer, template, path)
    if isinstance(expected, str) and expected.startswith("left out"):
        assert not found and expected in report and f"(row 1 of {path})" in report
    else:
        assert found == ([expected] if isinstance(expected, str) else expected)

@pytest.mark.parametrize("name", [None, ROOT / "training" / "vicuna.jinja"])
def test_a_prompt_is_the_beginning_of_what_is_learned(tokenizer, tmp_path, name):
    path = write_rows(tmp_path / "x.jsonl", [FOUR])
    [whole], _ = learned(tokenizer, chats.template_of(name, tokenizer), path)
    whole = whole.replace("⟦", "").replace("⟧", "")
    for prompt, answer in zip(prompts_of(tokenizer, path, name), ("a + b", "return b")):
        assert whole.startswith(prompt) and whole[len(prompt):].lstrip().startswith(answer)

def test_a_text_begins_and_ends_once_and_a_prompt_does_not_end(tokenizer, tmp_path):
    """Also by a tokenizer that writes its end of text before and after each text."""
    own = copy.deepcopy(tokenizer)
    own.bos_token, own.chat_template = "</s>", "{{ bos_token }}" + TAGS
    own._tokenizer.post_processor = TemplateProcessing(single="</s> $A </s>",
                                                       special_tokens=[("</s>", 0)])
    rows = [{"text": "a b"}, {"text": "</s>a b"}, {"prompt": "a", "completion": " b"},
            {"messages": [U, A]}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    found, _ = learned(own, own.chat_template, path)
    assert found == ["⟦</s>a b</s>⟧", "⟦</s>a b</s>⟧", "</s>a⟦ b</s>⟧", "</s>" + QA]
    assert prompts_of(own, path, None) == ["</s>a b", "</s>a b", "</s>a",
                                           "</s><user>q|<assistant>"]

def test_the_template_is_the_tokenizers_or_a_file(tokenizer, tmp_path):
    own = copy.deepcopy(tokenizer)
    assert chats.template_of(None, own) == chats.QUESTION, "it has none"
    for own.chat_template in (TAGS, {"default": TAGS, "tools": "x"}):
        assert chats.template_of(None, own) == TAGS
    (tmp_path / "t.jinja").write_text(BOM + TAGS)
    assert chats.template_of(tmp_path / "t.jinja", own) == TAGS
    own.chat_template = {"tools": "x", "rag": "y"}
    for name, words in ((None, "is missing"), ("bush", "bush")):
        with pytest.raises(UserError, match=f"--template .*{words}.*name a file"):
            chats.template_of(name, own)

def test_tools_and_reasoning_reach_the_template(tokenizer, tmp_path):
    """As Qwen3's reads them: when learning and when asking."""
    reads = TAGS.replace("<{{ m.role }}>", "<{{ m.role }}>{{ m.reasoning_content }}")
    (tmp_path / "t.jinja").write_text("{% if tools %}[{{ tools[0].name }}]{% endif %}" + reads)
    row = {"messages": [U, {**A, "reasoning_content": "(r)"}], "tools": [{"name": "add"}]}
    path = write_rows(tmp_path / "x.jsonl", [row])
    template = chats.template_of(tmp_path / "t.jinja", tokenizer)
    assert learned(tokenizer, template, path)[0] == ["[add]<user>q|<assistant>⟦(r)a|⟧"]
    assert prompts_of(tokenizer, path, tmp_path / "t.jinja") == ["[add]<user>q|<assistant>"]

def test_labels_are_found_by_the_ends_of_tokens():
    """From the first token that reaches into an answer; a special token's offset may be (0, 0)."""
    offsets = [(0, 0), (0, 4), (4, 6), (6, 9), (0, 0), (9, 12)]
    found = chats.only_answers(range(6), offsets, [(5, 9)])
    assert np.array_equal(found, [~0, ~1, 2, 3, 4, ~5])

# ---------------------------------------------------------------- prompts
def test_prompts_are_balanced_by_kind(tokenizer, tmp_path):
    """The kind is group, category or source, or the file's name."""
    rows = [{"text": "a0", "group": "a"}, {"text": "a1", "category": "a"}, {"text": "x0"},
            {"text": "30", "source": 3}, {"text": "a2", "group": "a"}, {"text": "x1", "source": {}}]
    path = write_rows(tmp_path / "x.y.jsonl", rows)
    assert prompts_of(tokenizer, path, None) == ["a0", "x0", "30", "a1", "x1", "a2"]

# A row -> its questions, each after what comes before it; or words of the reason
QUESTIONS = [
    ({"turns": ["one", "two"]}, ["<user>one|<assistant>", "<user>one|<assistant>own|<user>two|"
                                 "<assistant>"]),
    ({"messages": FOUR}, ["<user>add a|<assistant>",
                          "<user>add a|<assistant>a + b|<user>return|<assistant>"]),
    ({"system": "s", "question": "q"}, ["<system>s|<user>q|<assistant>"]),
    ({"prompt": "def f():\n", "canonical_solution": "  pass"}, ["def f():\n"]),
    ({"prompt": "a"}, ["a"]),
    ({"ids": [7, 8, 9, 10], "labels": [-100, 8, -100, 10]}, ["'"]),
    ({"messages": [A]}, "asks nothing .the assistant's turns"),
    ({"ids": [300]}, "others than the target's"),
]

@pytest.mark.parametrize("row, expected", QUESTIONS, ids=lambda value: str(value)[:60])
def test_what_a_row_asks(tokenizer, tmp_path, monkeypatch, row, expected):
    own = SimpleNamespace(tokens=tokenizer("own")["input_ids"])
    monkeypatch.setattr(verify, "generate", lambda *given, **more: own)
    (tmp_path / "t.jinja").write_text(TAGS)
    path = write_rows(tmp_path / "x.jsonl", [row])
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            prompts_of(tokenizer, path, tmp_path / "t.jinja")
    else:
        assert prompts_of(tokenizer, path, tmp_path / "t.jinja") == expected

# ---------------------------------------------------------------- prepared data
def test_a_prepared_folder_holds_documents_as_they_are_encoded(tmp_path, tokenizer):
    """Every fiftieth is held out, if it does not say; ids as they are.

    Its template need not be named again; another one, or another tokenizer, is refused.
    """
    rows = [{"ids": [i, i, i]} for i in range(1, 101)]
    rows[2]["held_out"], rows[99]["held_out"] = True, "false"
    rows.append({"prompt": [7, 8], "answer": [9]})
    path, folder = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    documents.prepare([path], tokenizer, TAGS, 300, folder)
    data = documents.read(folder, tokenizer)
    learned, held = ([data.tokens[start:start + size].tolist() for start, size in index]
                     for index in (data.documents, data.held_out))
    assert held == [[3] * 3, [50] * 3]
    assert learned == [[i] * 3 for i in range(1, 101) if i not in (3, 50)] + [[~7, ~8, 9]]
    assert [line.strip() for line in data.report] == [
        f"101 read as token ids (row 1 of {path}, row 2 of {path}, row 3 of {path}, ...)",
        "301 of 303 tokens are learned"]
    for other, template, words in ((tokenizer, "another", "another --template"),
                                   (tokenizer_of("other text"), TAGS, "another tokenizer")):
        with pytest.raises(UserError, match=f"was prepared with {words}"):
            documents.read(folder, other, template)

def test_show_prints_documents_and_writes_nothing(tokenizer, tmp_path, capsys):
    """The first of each kind, their labels between brackets."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"text": f"def add{i}"} for i in range(4)] + [{"question": "add", "answer": "a"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    argv = [str(path), "--tokenizer", str(tmp_path / "tokenizer"), "--show", "3"]
    assert prepare.main(argv) == 0
    out = capsys.readouterr().out
    assert [f"⟦def add{i}</s>⟧" in out for i in range(4)] == [True] * 3 + [False]
    assert "Question: add\nAnswer:⟦ a" in out and "1 read as a chat" in out
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "tokenizer"}
