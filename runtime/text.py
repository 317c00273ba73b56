"""Rows of user-supplied files -> documents to learn from, prompts to ask, chats in one format.

    path     read_rows(path)                     the rows of a file (data/files.py)
    row      document(row)                       text, chat messages or token ids to learn from
             question_text(row), conversation(row)      what it asks
    prompts  prompt_rows(paths, limit)           -> [(group, row, name)], evenly over the groups
             prompts_of(row, ...)                -> the token ids of each prompt of a row
    chats    template_of(name, tokenizer)        -> the format: one for training and for asking
             chat_ids(messages, ...)             -> token ids

Three tables say which rows are known: CHATS and FIELDS (documents), ASKS (questions).
"""
import argparse
import contextlib
import gzip
import importlib
import json
import os
import re
from collections import Counter
from pathlib import Path

import jinja2
import numpy as np

from verify import UserError

PIECE = 2 ** 16                                   # characters of a long text that are read at once


def first_line(why):
    """The first line of what an exception says."""
    return str(why).partition("\n")[0][:150]


# ---------------------------------------------------------------- a file's rows
def opened(path):
    """A file as text, .gz and .zst unpacked.  Only \\n ends a line, as JSON may hold U+2028."""
    how = {"encoding": "utf-8", "newline": "\n"}
    if path.suffix == ".gz":
        return gzip.open(path, "rt", **how)
    if path.suffix != ".zst":
        return open(path, **how)
    for reader in ("zstandard", "compression.zstd"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(reader).open(path, "rt", **how)
    raise UserError(f"{path} cannot be read: pip install zstandard")


def parse(line):
    """JSON -> what it says, or None."""
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(line)


def hub_rows(path):
    """Rows of a parquet file, or of the hub's OWNER/NAME or OWNER/NAME:CONFIGURATION."""
    try:
        import datasets
    except ImportError:
        what = "is no file here, maybe a data set of the hub"
        if path.suffix == ".parquet":
            what = "is parquet"
        raise UserError(f"{path} {what}: pip install datasets, or give JSON lines or "
                        "text") from None
    if path.suffix == ".parquet":
        return datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    name, _, configuration = str(path).partition(":")
    return datasets.load_dataset(name, configuration or None, split="train", streaming=True)


class Piece(str):
    """A piece of a long text: whether the text begins and ends with it."""
    first, last = True, True


def pieces_of_text(file):
    """Yield the text of an open file in pieces of some PIECE characters, of whole lines."""
    waiting = None                                       # the last piece that is not blank
    while True:
        text = file.read(PIECE) + file.readline()
        if not text:
            break
        if not text.strip():
            continue
        piece = Piece(text)
        if waiting is not None:
            waiting.last = piece.first = False
            yield waiting
        waiting = piece
    if waiting is not None:
        yield waiting


def check_file(path):
    """Refuse a pipe, which would wait for ever, and can be read once only."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is no file: write to a file what it gives, and name that")


def stream_rows(path):
    """Yield the rows of a file: of JSON, None for a bad line; of any other, its text in pieces."""
    path = Path(path)
    check_file(path)
    try:
        if path.suffix == ".parquet" or not path.exists():
            yield from hub_rows(path)
            return
        with opened(path) as file:
            if ".json" not in path.name:
                yield from pieces_of_text(file)
                return
            lines = file
            if ".jsonl" not in path.name:
                # One list or row; or, whatever the name says, a row a line
                text = file.read()
                lines = text.split("\n") if parse(text) is None else [text]
            for line in filter(str.strip, lines):
                row = parse(line)
                yield from row if isinstance(row, list) else [row]
    except Exception as why:
        if isinstance(why, UserError):
            raise
        raise UserError(f"{path} cannot be read as text or JSON lines ({type(why).__name__}): mend "
                        "it, or name another file") from None


def read_rows(path):
    """All rows of a file, as a list: none may be bad."""
    rows = list(stream_rows(path))
    if None in rows:
        bad = 1 + rows.index(None)
        raise UserError(f"{path} cannot be read as text or JSON lines (row {bad}): mend it, or "
                        "name another file")
    return rows


def files_of(paths, flag):
    """All files of files and folders, in order, none hidden; names of the hub as they are."""
    for path in map(Path, paths):
        check_file(path)
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                names = file.relative_to(path).parts
                hidden = any(name.startswith(".") for name in names)
                if file.is_file() and not hidden:
                    yield file
        elif path.exists() or re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?", str(path)):
            yield path
        else:
            raise UserError(f"{flag}: {path} does not exist")


# ---------------------------------------------------------------- rows
CHATS = ("conversations", "conversation", "messages")         # ShareGPT; GLIDE's layout; the hub's
# Fields that make a document, after the string that joins them.
FIELDS = (
    ("", "text"),
    ("", "prompt", "canonical_solution", "completion"),       # HumanEval
    ("\n", "instruction", "input", "output"),                 # Alpaca, Finance-Alpaca
    ("\n", "article", "highlights"),                          # CNN/DM
    ("", "whole_func_string"),                                # CodeSearchNet
)
# What a row asks, by the fields that it has.
CHOICES = ("Question: {question}\nA. {choices[0]}\nB. {choices[1]}\nC. {choices[2]}\n"
           "D. {choices[3]}\nAnswer:")
ASKS = (
    ("prompt", "{prompt}"),
    ("text", "{text}"),
    ("question choices", CHOICES),                            # MMLU, in both spellings
    ("input A B C D", "Question: {input}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\nAnswer:"),
    ("question", "Question: {question}\nAnswer:"),            # GSM8K, Spider
    ("article", "Summarize: {article}\nSummary:"),            # CNN/DM
    ("instruction input", "{instruction}\n{input}\n"),
    ("instruction", "{instruction}\n"),
)
# Chat formats by name, in Jinja.  plain: where a tokenizer has none of its own.
PLAIN = ("{% for turn in messages %}{{ turn.role | upper }}: {{ turn.content }}\n\n{% endfor %}"
         "{% if add_generation_prompt %}ASSISTANT:{% endif %}")
# FastChat's vicuna_v1.1, which Vicuna's tokenizer does not know.
VICUNA = (
    "{% set said = messages %}"
    "{% set system = \"A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.\" %}"
    "{% if said and said[0].role == 'system' %}"
    "{% set system = said[0].content %}{% set said = said[1:] %}{% endif %}"
    "{{ bos_token }}{{ system }} "
    "{% for turn in said %}"
    "{% if turn.role == 'user' %}USER: {{ turn.content }} "
    "{% else %}ASSISTANT: {{ turn.content }}</s>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}")
TEMPLATES = {"plain": PLAIN, "vicuna": VICUNA}


# ---------------------------------------------------------------- what every program needs
class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are one sentence, as all mistakes are here."""

    def error(self, message):
        raise UserError(f"{message} (see --help)")


def seed(text):
    """What --seed takes: a whole number from 0 to 2**63 - 1, which torch and NumPy both know."""
    number = int(text)
    if not 0 <= number < 2 ** 63:
        raise ValueError
    return number


def write_atomically(path, write):
    """Call `write(temporary path)`, then move the result: a killed write leaves the old file."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        os.replace(part, path)
    except Exception as why:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(why, UserError):
            raise
        why = f"{path} cannot be written ({why}): what was there is still there"
        raise UserError(why) from None


# ---------------------------------------------------------------- rows -> documents and questions
def question_text(row, form=None):
    """What a row asks -> text; None where no field is known.  form: --ask, in place of ASKS."""
    if not isinstance(row, dict):
        return row if isinstance(row, str) else None
    for names, known in ASKS:
        if form is None and all(row.get(name) for name in names.split()):
            form = known
    return form and form.format_map(row)


def conversation(row):
    """A row of ShareGPT, "messages" or MT-Bench -> chat [{"role", "content"}]; any other: None."""
    messages = []
    try:
        if "turns" in row:                              # MT-Bench: what the user says, turn by turn
            return [{"role": "user", "content": turn} for turn in row["turns"]]
        for turn in next(row[name] for name in CHATS if name in row):
            role = turn.get("from", turn.get("role"))
            content = turn.get("value", turn.get("content"))
            if content:
                role = {"human": "user", "gpt": "assistant"}.get(role, role)
                messages.append({"role": role, "content": content})
    except (AttributeError, TypeError, StopIteration):   # it has another shape
        return None
    return messages


def checked(ids):
    """Token ids of a row, a list, as they are; a UserError where they cannot be ids."""
    if all(type(id) is int and 0 <= id < 2 ** 31 for id in ids):
        return ids
    raise UserError("token ids are whole numbers from 0, in one list")


def document(row):
    """A row -> text, chat messages or token ids (a list); None where no field is known.

    An id comes as its complement ~id where nothing is learned from it: in a prompt.
    """
    messages = conversation(row)
    if messages is not None or not isinstance(row, dict):
        return messages
    if isinstance(row.get("text"), Piece):
        return row["text"]
    if isinstance(row.get("ids"), list):
        return checked(row["ids"])
    if isinstance(row.get("prompt"), list) and isinstance(row.get("answer"), list):
        # What a target wrote: make.py continuations
        return [~id for id in checked(row["prompt"])] + checked(row["answer"])
    if "question" in row:
        return f"{question_text({'question': row['question']})} {row.get('answer', '')}\n"
    for between, *names in FIELDS:
        if names[0] in row:
            return between.join(row[name] for name in names if isinstance(row.get(name), str))


def check_row(row):
    """Refuse a row whose "held_out" or "times" cannot be what they say."""
    if not isinstance(row, dict):
        return
    if not isinstance(row.get("held_out", True), bool):
        raise UserError(f"\"held_out\" is {row['held_out']!r}: say true or false")
    times = row.get("times", 1)
    if type(times) is not int or not 0 <= times < 1000:
        raise UserError(f"\"times\" is {times!r}: say a whole number below 1000")


def documents(paths, flag="--data", bad=None):
    """Yield (place, row, document) of all rows of files and folders.

    bad: a list that takes the places of rows that hold no document; without it they are mistakes.
    """
    known = ", ".join(names[1] for names in FIELDS)
    for file in files_of(paths, flag):
        number = 0
        try:
            for number, row in enumerate(stream_rows(file), 1):
                row = {"text": row} if isinstance(row, str) else row
                place = f"row {number} of {file}"
                try:
                    check_row(row)
                    found = document(row)
                except UserError as why:
                    raise UserError(f"{flag}: {place} cannot be read ({why})") from None
                if found is not None:
                    yield place, row, found
                    continue
                if bad is None:
                    raise UserError(f"{flag}: {place} has none of the fields conversations, "
                                    f"messages, turns, ids, question, {known}, or cannot be read "
                                    "as text or JSON lines")
                bad.append(place)
        except UserError:
            # A file that was named must be good; one of a folder may be something else.
            if bad is None or str(file) in map(str, paths):
                raise
            bad.append(f"{file} from row {number + 1} on")


def kind_of_text(row, path):
    """The kind of text that a row says it is, or its file's name."""
    about = row if isinstance(row, dict) else {}
    kind = about.get("group") or about.get("category") or about.get("source")
    return str(kind or Path(path).name.split(".")[0])


# ---------------------------------------------------------------- chats -> token ids
def template_of(name, tokenizer):
    """The chat format of --template: a name of TEMPLATES, a Jinja file; None: the tokenizer's."""
    own = tokenizer.chat_template
    if isinstance(own, dict):                            # several: of chats, of chats with tools
        own = own.get("default")
    if name is None:
        return own or PLAIN
    if name in TEMPLATES:
        return TEMPLATES[name]
    if not Path(name).is_file():
        raise UserError(f"--template {name}: say {' '.join(TEMPLATES)}, or name a file with a "
                        "Jinja template")
    try:
        template = Path(name).read_text(encoding="utf-8")
        chat_text([{"role": "user", "content": "hi"}], tokenizer, template)
    except (jinja2.TemplateSyntaxError, UnicodeError, OSError) as why:
        reason = first_line(why)
        raise UserError(f"--template: {name} is no Jinja template ({reason}): mend it") from None
    except Exception:                                    # this chat it refuses, others it may know
        pass
    return template


def chat_text(messages, tokenizer, template, ask=False):
    """Chat messages as the template writes them.  ask: up to where the next answer begins."""
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False,
                                         add_generation_prompt=ask)


def chat_ids(messages, tokenizer, template=None, ask=True):
    """Chat messages -> token ids.  template: template_of's; ask: the assistant shall speak next."""
    template = template or template_of(None, tokenizer)
    try:
        text = chat_text(messages, tokenizer, template, ask)
    except Exception as why:                        # a template is a program, with its mistakes
        raise UserError(f"the chat template refuses the messages ({why}): leave out --system, or "
                        "give another --template") from None
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def is_chat(found):
    return isinstance(found, list) and bool(found) and isinstance(found[0], dict)


def encode(found, tokenizer, template=None, special_tokens=True):
    """A document (text, chat messages or token ids) -> list of token ids."""
    if is_chat(found):
        return chat_ids(found, tokenizer, template, ask=False)
    if not isinstance(found, str):
        return [~id if id < 0 else id for id in found]
    return tokenizer(found, add_special_tokens=special_tokens, verbose=False)["input_ids"]


def chat_parts(chat, tokenizer, template):
    """What is learned from a chat -> [(text, [(before, after)])]: up to each answer, and with it.

    Some templates write a turn otherwise once another follows (without its reasoning, say).  Then
    each answer is learned from a text of its own, which ends with it, as it is in decoding.
    """
    try:
        whole, answers = chat_text(chat, tokenizer, template), []
        for i, turn in enumerate(chat):
            if turn["role"] == "assistant":
                before = chat_text(chat[:i], tokenizer, template, ask=True) if i else ""
                answers.append((before, chat_text(chat[:i + 1], tokenizer, template)))
    except (jinja2.TemplateError, TypeError):            # for example, roles that do not alternate
        return []
    if all(whole.startswith(after) for _, after in answers):
        return [(whole, answers)]
    return [(after, [(before, after)]) for before, after in answers]


def ids_of(texts, tokenizer, **how):
    """Token ids of each text; a tokenizer does not take an empty list."""
    return tokenizer(texts, verbose=False, **how)["input_ids"] if texts else []


def encode_all(found, tokenizer, template):
    """Documents -> for each a list of id arrays, mostly one; [] if empty, or refused by it.

    In chats all tokens but the assistant's come as their complement ~id: they are read, but not
    learned from.  All texts go to the tokenizer at once, since it has threads.
    """
    parts = [chat_parts(chat, tokenizer, template) if is_chat(chat) else [] for chat in found]
    plain = [text for text in found if isinstance(text, str)]
    written = [text for some in parts for text, _ in some]
    # What a tokenizer puts before a text belongs to the first piece of it alone.
    later = [text for text in plain if not getattr(text, "first", True)]
    plain_ids = iter(ids_of(plain, tokenizer))
    later_ids = iter(ids_of(later, tokenizer, add_special_tokens=False))
    chat_ids_and_offsets = iter(())
    if written:
        encoded = tokenizer(written, add_special_tokens=False, verbose=False,
                            return_offsets_mapping=tokenizer.is_fast)
        offsets = encoded.get("offset_mapping", [None] * len(written))
        chat_ids_and_offsets = zip(encoded["input_ids"], offsets)
    for one, some in zip(found, parts):
        if isinstance(one, str):
            ids = next(plain_ids)
            if not getattr(one, "first", True):
                ids = next(later_ids)
            yield [np.array(ids, "i4")] if one.strip() and ids else []
        elif is_chat(one):
            arrays = []
            for _, answers in some:
                ids, offsets = next(chat_ids_and_offsets)
                arrays.append(only_answers(ids, offsets, answers, tokenizer))
            yield arrays
        else:
            yield [np.array(one, "i4")] if one else []


def only_answers(ids, offsets, answers, tokenizer):
    """A chat's ids, ~id where nothing is learned.

    offsets: of each token the characters (start, end) that it stands for; None: a tokenizer that
    does not know them.  answers: [(the text up to an answer, and with it)].
    """
    ids = np.array(ids, "i4")
    learn = np.zeros(len(ids), bool)
    for before, after in answers:
        if offsets is None:
            ids_before, ids_after = ids_of([before, after], tokenizer, add_special_tokens=False)
            first = same(ids, ids_before)
            last = same(ids, ids_after)
        else:
            # From the first token that reaches into the answer to the last that ends with it
            ends = np.maximum.accumulate(np.array(offsets).reshape(-1, 2)[:, 1])
            first = np.searchsorted(ends, len(before), side="right")
            last = np.searchsorted(ends, len(after), side="right")
        learn[first:last] = True
    return np.where(learn, ids, ~ids)


def same(a, b):
    """How many ids of two lists are equal, from the first on."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.array(a[:n]) != np.array(b[:n]))
    return int(differ[0]) if len(differ) else n


# ---------------------------------------------------------------- rows -> prompts
def prompt_rows(paths, limit=None):
    """Rows of files of prompts -> [(group, row, name)], in turns of the groups.

    So a limit keeps as many rows of each group.
    """
    count, rows = Counter(), []
    for path in map(Path, paths):
        for number, row in enumerate(read_rows(path), 1):
            group = kind_of_text(row, path)
            count[group] += 1
            rows.append((count[group], group, row, f"row {number} of {path}"))
    rows.sort(key=lambda row: row[0])
    return [row[1:] for row in rows[:limit]]


def prompts_of(row, name, tokenizer, template=None, ask=None, system=None, answer=None):
    """Yield the token ids of each prompt of a row: of a chat every question, after all before it.

    name: of the row, for mistakes; ask: form of a question, in place of ASKS; system: message of
    chats.  answer(ids) -> text: the answer to a question that the file leaves open (MT-Bench).
    """
    known = " ".join(["turns", *CHATS, *(names.split()[-1] for names, _ in ASKS)])
    nothing = UserError(f"{name} is empty, or has none of the fields {known}: write --ask")
    chat = conversation(row)
    if not chat:
        try:
            text = question_text(row, ask)
        except (LookupError, ValueError, TypeError, AttributeError) as why:
            raise UserError(f"--ask {ask!r} does not fit a row ({type(why).__name__}: {why}): "
                            "write fields that all rows have, as {question}") from None
        if not text:
            raise nothing
        yield encode(text, tokenizer)
        return
    said = [{"role": "system", "content": system}] if system and chat[0]["role"] != "system" else []
    ids = None
    for message in chat:
        if message["role"] == "user" and said and said[-1]["role"] == "user":
            said.append({"role": "assistant", "content": answer(ids)})     # nobody has answered yet
        said.append(message)
        if message["role"] == "user":
            ids = chat_ids(said, tokenizer, template)
            yield ids
    if ids is None:                                      # nobody asks anything
        raise nothing
