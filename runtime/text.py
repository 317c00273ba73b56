"""User-supplied files: their rows become documents to learn from, or prompts to decode after.

    read_rows(path)                              the rows of a file
    documents(paths)                             (place, row, document) for each row of many files
    encode_all(documents, tokenizer, template)   their token ids, and which of them are labels
    prompts_of(setup, paths, ...)                (kind, ids, new tokens) for each prompt

A file is JSON lines (.jsonl), a JSON list of rows (.json) or plain text, which is one row; its name
may end in .gz.  This is what a row may hold:

    its fields                           as a document             as prompts
    conversations, conversation or       a chat                    each question, after all that
      messages, with role and content                              comes before it
      (or from and value)
    turns, what a user asks in turn      a chat without labels     the same; the target answers
    question, answer                     question and answer       the question
    text                                 the text                  the text
    prompt, canonical_solution or        both                      the prompt
      completion
    instruction, input, output           all                       instruction and input
    ids                                  these token ids           -
    prompt, answer: lists of ids         both; only the answer     -
                                         gives labels

A row's group, category or source names the kind of its text, which is otherwise the file's name.
"held_out": true or false says whether training leaves a row out for validation.

Training and asking use one chat template, so a prompt is the beginning of a text that was learned.
"""
import argparse
import gzip
import json
import os
import zlib
from collections import Counter
from pathlib import Path

import jinja2
import numpy as np
from tqdm import tqdm

from verify import UserError

CHATS = ("conversations", "conversation", "messages")
# The fields of a document, after the string that joins them
DOCUMENTS = (
    ("", "text"),
    ("", "prompt", "canonical_solution", "completion"),          # HumanEval
    ("\n", "instruction", "input", "output"),                    # Alpaca
)
# What a row asks: the first form whose fields the row has
QUESTIONS = (
    ("prompt", "{prompt}"),
    ("text", "{text}"),
    ("question", "Question: {question}\nAnswer:"),               # GSM8K
    ("instruction input", "{instruction}\n{input}\n"),
    ("instruction", "{instruction}\n"),
)
# Chat templates by name, in Jinja.  "plain" serves a tokenizer that has none of its own.
PLAIN = ("{% for turn in messages %}{{ turn.role | upper }}: {{ turn.content }}\n\n{% endfor %}"
         "{% if add_generation_prompt %}ASSISTANT:{% endif %}")
# FastChat's vicuna_v1.1: the tokenizer of Vicuna has no template.
VICUNA = (
    "{% set turns = messages %}"
    "{% set system = \"A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.\" %}"
    "{% if turns and turns[0].role == 'system' %}"
    "{% set system = turns[0].content %}{% set turns = turns[1:] %}{% endif %}"
    "{{ bos_token }}{{ system }} "
    "{% for turn in turns %}"
    "{% if turn.role == 'user' %}USER: {{ turn.content }} "
    "{% else %}ASSISTANT: {{ turn.content }}</s>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}")
TEMPLATES = {"plain": PLAIN, "vicuna": VICUNA}

# ---------------------------------------------------------------- what every program needs
class Parser(argparse.ArgumentParser):
    """argparse that raises a UserError in place of printing its usage."""

    def error(self, message):
        raise UserError(f"{message} (see --help)")

def first_line(why):
    """The first line of an exception's message."""
    return str(why).partition("\n")[0][:150]

def write_atomically(path, write):
    """Call write(temporary path), then rename the file: a killed write leaves the old file."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    write(part)
    os.replace(part, path)

# ---------------------------------------------------------------- the rows of a file
def files_of(paths, flag):
    """Yield the files of files and folders, sorted, without hidden ones.  flag: what gave them."""
    for path in map(Path, paths):
        if path.is_file():
            yield path
        elif path.is_dir():
            for file in sorted(path.rglob("*")):
                names = file.relative_to(path).parts
                hidden = any(name.startswith(".") for name in names)
                if file.is_file() and not hidden:
                    yield file
        else:
            raise UserError(f"{flag}: {path} does not exist, or is no file")

def read_rows(path):
    """Yield the rows of a file."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        # Only \n ends a line: a string in JSON may hold U+2028.
        with opener(path, "rt", encoding="utf-8", newline="\n") as file:
            if ".jsonl" in path.name:
                yield from (json.loads(line) for line in file if line.strip())
            elif ".json" in path.name:
                found = json.load(file)
                yield from found if isinstance(found, list) else [found]
            else:
                yield {"text": file.read()}
    except (OSError, EOFError, ValueError, zlib.error) as why:
        raise UserError(f"{path} cannot be read as text or JSON lines ({first_line(why)}): correct "
                        "it, or name another file") from None

def kind_of_text(row, path):
    """The kind of text that a row says it is, or else the name of its file."""
    about = row if isinstance(row, dict) else {}
    kind = about.get("group") or about.get("category") or about.get("source")
    return str(kind or Path(path).name.partition(".")[0])

# ---------------------------------------------------------------- a row as a document
def conversation(row):
    """A row with turns or with a chat -> [{"role", "content"}], of any other -> None."""
    try:
        if "turns" in row:
            return [{"role": "user", "content": turn} for turn in row["turns"]]
        turns = next(row[name] for name in CHATS if name in row)
        messages = []
        for turn in turns:
            role = turn.get("from", turn.get("role"))
            role = {"human": "user", "gpt": "assistant"}.get(role, role)
            content = turn.get("value", turn.get("content"))
            if content:
                messages.append({"role": role, "content": content})
        return messages
    except (AttributeError, TypeError, StopIteration):           # a row of another shape
        return None

def are_ids(value):
    """Whether a value is a list of token ids."""
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2 ** 31 for i in value)

def document(row):
    """A row -> a text, chat messages or a list of token ids; None where no known field is there.

    The ids of a prompt, which are no labels, are given as their complement ~id.
    """
    messages = conversation(row)
    if messages is not None or not isinstance(row, dict):
        return messages
    prompt, answer = row.get("prompt"), row.get("answer")
    if are_ids(prompt) and are_ids(answer):
        return [~number for number in prompt] + answer
    if "question" in row:
        return f"{question_text({'question': row['question']})} {row.get('answer', '')}\n"
    for between, *names in DOCUMENTS:
        if names[0] in row:
            return between.join(row[name] for name in names if isinstance(row.get(name), str))
    return row["ids"] if are_ids(row.get("ids")) else None

def documents(paths, bad=None):
    """Yield (place, row, document) for all rows of the files and folders of --data.

    bad: a list to which the places of rows without a document are appended; None: such a row is a
    UserError.
    """
    for file in files_of(paths, "--data"):
        for number, row in enumerate(read_rows(file), 1):
            place = f"row {number} of {file}"
            row = {"text": row} if isinstance(row, str) else row
            found = document(row)
            if found is not None:
                yield place, row, found
            elif bad is not None:
                bad.append(place)
            else:
                known = ", ".join([*CHATS, "turns", "question", "text", "prompt", "ids"])
                raise UserError(f"--data: {place} has none of the fields {known}")

# ---------------------------------------------------------------- chats and texts as token ids
def template_of(name, tokenizer):
    """--template as Jinja.  name: a key of TEMPLATES, a file, or None for the tokenizer's own."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    if name is None:
        return tokenizer.get_chat_template() if tokenizer.chat_template else PLAIN
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        raise UserError(f"--template {name}: choose {' or '.join(TEMPLATES)}, or name a file with "
                        "a Jinja template") from None

def chat_text(messages, tokenizer, template, ask=False):
    """Chat messages as text.  ask: end where the assistant's next answer begins."""
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False,
                                         add_generation_prompt=ask)

def chat_ids(messages, tokenizer, template, ask=True):
    """Chat messages -> list of token ids, as chat_text gives the text."""
    try:
        text = chat_text(messages, tokenizer, template, ask)
    except (jinja2.TemplateError, TypeError) as why:     # say, it wants roles to alternate
        raise UserError(f"the chat template refuses the messages ({first_line(why)}): give "
                        "another --template") from None
    # The template has written what a tokenizer puts before a text.
    return tokenizer(text, add_special_tokens=False)["input_ids"]

def is_chat(document):
    """Whether a document is chat messages."""
    return isinstance(document, list) and bool(document) and isinstance(document[0], dict)

def encode(document, tokenizer, special_tokens=True):
    """One document -> list of its token ids.  special_tokens: also those that begin a text."""
    if is_chat(document):
        return chat_ids(document, tokenizer, template_of(None, tokenizer), ask=False)
    if isinstance(document, str):
        return tokenizer(document, add_special_tokens=special_tokens, verbose=False)["input_ids"]
    return [~number if number < 0 else number for number in document]

def answers_in(chat, tokenizer, template):
    """A chat -> [(text, [(start, end)])]: texts to learn from, and where in them answers stand.

    Mostly one text.  But some templates write an answer otherwise once a turn follows it, for
    example without its reasoning.  Then each answer has a text of its own, which ends with it, as
    it does in decoding.
    """
    try:
        whole = chat_text(chat, tokenizer, template)
        spans, ends_with_answer = [], []
        for i, turn in enumerate(chat):
            if turn["role"] == "assistant":
                before = chat_text(chat[:i], tokenizer, template, ask=True) if i else ""
                after = chat_text(chat[:i + 1], tokenizer, template)
                spans.append((len(before), len(after)))
                ends_with_answer.append(after)
    except (jinja2.TemplateError, TypeError):            # the template refuses this chat
        return []
    if all(whole.startswith(text) for text in ends_with_answer):
        return [(whole, spans)]
    return [(text, [span]) for text, span in zip(ends_with_answer, spans)]

def only_answers(ids, offsets, spans):
    """Token ids of a chat -> array (n,), with ~id for each token that belongs to no answer.

    offsets: (start, end) in the text, of each token.  spans: (start, end) of each answer.
    """
    ids = np.array(ids, "i4")
    ends = np.array(offsets).reshape(-1, 2)[:, 1]
    ends = np.maximum.accumulate(ends)                   # a special token's may be 0
    is_label = np.zeros(len(ids), bool)
    for start, end in spans:
        # From the first token that reaches into the answer to the last that ends within it
        first = np.searchsorted(ends, start, side="right")
        last = np.searchsorted(ends, end, side="right")
        is_label[first:last] = True
    return np.where(is_label, ids, ~ids)

def encode_all(found, tokenizer, template):
    """Yield for each document a list of arrays of token ids, int32: mostly one, none if empty.

    Of a chat, what is not the assistant's comes as ~id: it is read, but is no label.
    """
    for one in found:
        parts = []
        if is_chat(one):
            for text, spans in answers_in(one, tokenizer, template):
                encoded = tokenizer(text, add_special_tokens=False, verbose=False,
                                    return_offsets_mapping=True)
                parts.append(only_answers(encoded["input_ids"], encoded["offset_mapping"], spans))
        elif not isinstance(one, str):
            parts.append(np.array(one, "i4"))
        elif one.strip():
            parts.append(np.array(tokenizer(one, verbose=False)["input_ids"], "i4"))
        yield [ids for ids in parts if len(ids)]

# ---------------------------------------------------------------- rows as prompts
def question_text(row):
    """What a row asks -> text, or None."""
    if not isinstance(row, dict):
        return row if isinstance(row, str) else None
    for names, form in QUESTIONS:
        if all(row.get(name) for name in names.split()):
            return form.format_map(row)
    return None

def prompt_rows(paths, limit=None, skip=0):
    """Rows of files of prompts, balanced by kind -> [(kind, row, place)]

    skip: how many of them to leave out first.  limit: how many to take then; None: all.
    """
    count, rows = Counter(), []
    for path in files_of(paths, "--prompts"):
        for number, row in enumerate(read_rows(path), 1):
            kind = kind_of_text(row, path)
            count[kind] += 1
            rows.append((count[kind], kind, row, f"row {number} of {path}"))
    # The first row of each kind, then the second of each, and so on
    rows.sort(key=lambda row: row[0])
    end = None if limit is None else skip + limit
    return [row[1:] for row in rows[skip:end]]

def questions_of(row, place, tokenizer, template, answer=None):
    """Yield the token ids of each prompt of a row: for a chat, of each question.

    answer(ids) -> text: answers a question that the row leaves open.
    """
    chat = conversation(row)
    if not chat:
        text = question_text(row)
        if not text:
            known = " ".join(["turns", *CHATS, *(names for names, _ in QUESTIONS)])
            raise UserError(f"{place} asks nothing: it has none of the fields {known}")
        yield encode(text, tokenizer)
        return
    messages = []
    for message in chat:
        is_question = message["role"] == "user"
        if is_question and messages and messages[-1]["role"] == "user":
            messages.append({"role": "assistant", "content": answer(ids)})
        messages.append(message)
        if is_question:
            ids = chat_ids(messages, tokenizer, template)
            yield ids

def prompts_of(setup, paths, limit, most, answer, form=None, skip=0):
    """Files of prompts -> [(kind, ids, new tokens)]: at most `most` of them, as the context allows.

    limit, skip: see prompt_rows.  form: --template.  answer: see questions_of.
    """
    template = template_of(form, setup.tokenizer)
    vocab = setup.target.config.vocab_size
    prompts, too_long = [], 0
    rows = prompt_rows(paths, limit, skip)
    for kind, row, place in tqdm(rows, "prompts", leave=False, disable=None):
        for ids in questions_of(row, place, setup.tokenizer, template, answer):
            if not ids or max(ids) >= vocab:
                raise UserError(f"{place} gives no tokens, or others than the target's {vocab}: "
                                "correct the row or --template")
            remaining = setup.target.remaining(ids)
            if remaining < 1:
                too_long += 1                            # and so are all further turns of this row
                break
            prompts.append((kind, ids, min(most, remaining)))
    if not prompts and not skip:
        raise UserError(f"--prompts: {' '.join(map(str, paths))} holds no prompt of at most "
                        f"{setup.target.context} tokens, the target's context")
    if too_long:
        setup.notes.append(f"{too_long} prompts longer than the context left out")
    return prompts
