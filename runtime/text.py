"""User-supplied files: their rows become documents to learn from, or prompts to decode after.

    documents(paths)              a Document for each row of files and folders
    prompt_rows(paths, limit)     (kind, Document) for each row of files of prompts
    questions_of(document)        what it asks, turn by turn

runtime/files.py reads the files, runtime/chats.py makes token ids of documents and of prompts.

A row is read by the names of its fields, in any case.  The first line of this table that fits is
taken; null, "" and [] count as absent:

    the row has                     it becomes
    one of CHATS                    a chat: a list of turns, each with a role and a content; below
                                    the pairs, so is any field that holds such a list
    ids; or prompt and answer,      token ids; of prompt and answer, the answer alone is learned
      lists of token ids
    prompt, and completion or       a text; what goes on after the prompt is learned
      canonical_solution
    one of QUESTIONS and one of     a chat of two turns: the question, with a field of CONTEXTS
      ANSWERS                       below it, and the answer.  `history` stands before it
    one of TEXTS                    a text, which is learned
    one of QUESTIONS alone          a prompt: it is asked, but nothing can be learned

Of a chat the answers are learned.  A field of SYSTEM begins it.  Only strings, numbers and lists of
text parts are text.  A row that is not understood is left out with its reason, never in silence.
"""
import json
from collections import Counter, namedtuple
from pathlib import Path

from runtime.files import NAMES, files_of, is_chat, is_message, parsed, read_rows, suffix_of
# ---------------------------------------------------------------- the table of forms
CHATS = ("conversations", "conversation", "messages", "chat", "turns")
QUESTIONS = ("instruction", "question", "query", "problem", "prompt", "input", "inputs", "text",
             "user", "human")
CONTEXTS = ("input", "context")
ANSWERS = ("output", "response", "solution", "answer", "answers", "completion",
           "canonical_solution", "chosen", "target", "targets", "code", "assistant", "gpt")
CONTINUATIONS = ("completion", "canonical_solution")     # they go on with a prompt
TEXTS = ("text", "content", "code")
SYSTEM = ("system", "system_prompt", "system_message")
KINDS = ("group", "category", "source")                  # the kind of text that a row is

ROLES = {
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "model", "bing", "chatgpt", "bot"),
    "system": ("system", "developer"),
    "tool": ("tool", "function", "observation"),
}
READ_ONLY = ("weight", "loss", "train")                  # 0 or false: an answer is not learned

HELD_OUT = 50                                            # every fiftieth row is held out
MOST_KINDS = 50

# role: user, assistant, system or tool in a chat; else "text" or "ids".  content: a string, or a
# list of token ids.  learned: whether its tokens are labels
Turn = namedtuple("Turn", "role content learned")
# place    "row 3 of questions.jsonl"
# names    of its kind of text, from the finest: the row's own, the file's, the argument's
# held_out whether it is left for validation
# form     the names of the fields that were read
# turns    [Turn], empty where the row is left out
# note     what of the row is left out, or None.  why: for what reason all of it is, or None
# row      its fields, in lower case
Document = namedtuple("Document", "place names held_out form turns note why row")

class LeftOut(Exception):
    """Why a row is left out: a phrase that is the same for all such rows."""

# ---------------------------------------------------------------- the values of a row
def lowered(row):
    """A dict with its keys in lower case, without absent values."""
    found = {}
    for name, value in row.items():
        is_blank = isinstance(value, str) and not value.strip()
        if not is_blank and value is not None and value != []:
            found.setdefault(name.lower(), value)
    return found

def first_of(names, row):
    """The first of these names that a row has, or None."""
    return next((name for name in names if name in row), None)

def string_of(row, name):
    """A field of a row as a string: of a string, a number or text parts.  "" where it is absent."""
    value = row.get(name)
    if value is None:
        return ""
    if isinstance(value, str):
        # Half of a character that JSON writes in two halves becomes U+FFFD.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise LeftOut(f"{name} is a {type(value).__name__}, and no text")
    for part in value:
        kind = part.get("type", "text")
        if not str(kind).endswith("text") or not isinstance(part.get("text"), str):
            raise LeftOut(f"{name} has a part of type {kind}, which is no text")
    return "".join(string_of(part, "text") for part in value)

def are_ids(value):
    """Whether a value is a list of token ids."""
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2 ** 31 for i in value)

# ---------------------------------------------------------------- a row as turns
def role_of(message):
    """The role of a message, a dict with its keys in lower case; None where it is unknown."""
    said = str(message[first_of(("role", "from"), message)]).strip().lower()
    return next((role for role, names in ROLES.items() if said in names), None)

def turn_of(message):
    """A message of a chat -> Turn.  One that calls a tool has no content."""
    role = role_of(message)
    if role is None:
        raise LeftOut(f"a role is unknown: {message[first_of(('role', 'from'), message)]}")
    content = string_of(message, first_of(("content", "value", "text", "parts"), message))
    if first_of(("tool_calls", "function_call"), message):
        content = ""
    read_only = any(message.get(flag) in (0, False) for flag in READ_ONLY)
    return Turn(role, content, role == "assistant" and not read_only)

def turns_of(row, name):
    """A field of a row as the turns of a chat.

    It is a list of messages, of pairs, or of strings, all of which a user says; or JSON of these.
    """
    value = parsed(row[name]) if isinstance(row[name], str) else row[name]
    if value is None:
        raise LeftOut(f"{name} is a string, and no list of turns")
    turns = []
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, list) and len(one) == 2:      # [question, answer]
            one = dict(zip(("human", "assistant"), one))
        if isinstance(one, str) and name == "turns":
            turns.append(Turn("user", string_of({name: one}, name), False))
            continue
        one = lowered(one) if isinstance(one, dict) else {}
        if is_message(one):
            turns.append(turn_of(one))
        elif first_of(QUESTIONS, one):
            turns += pair_in(one)[1]
            if turns[-1].role != "assistant":
                turns.append(Turn("assistant", "", True))
        else:
            raise LeftOut(f"{name} has turns without a role")
    return turns

def side_of(row, name, role):
    """A field that holds a question or an answer -> [Turn]: one, or those of messages"""
    if is_chat(row[name]) or is_message(row[name]):
        return turns_of(row, name)
    return [Turn(role, string_of(row, name), role == "assistant")]

def pair_in(row):
    """A question, with its answer if there is one -> names of the fields that were read, [Turn]"""
    question, answer = first_of(QUESTIONS, row), first_of(ANSWERS, row)
    fields, turns = [question], side_of(row, question, "user")
    context = first_of([name for name in CONTEXTS if name != question], row)
    if context and len(turns) == 1:
        turns = [Turn("user", f"{turns[0].content}\n{string_of(row, context)}", False)]
        fields.append(context)
    if "history" in row:
        turns = turns_of(row, "history") + turns
        fields.append("history")
    if answer:
        answers = side_of(row, answer, "assistant")
        begins_anew = answers[0].role != "assistant"     # it holds the question, too
        turns = answers if begins_anew else turns + answers
        fields.append(answer)
    return fields, turns

def turns_in(row):
    """A row, a dict with its keys in lower case -> names of the fields that were read, [Turn]"""
    chat, text = first_of(CHATS, row), first_of(TEXTS, row)
    question, answer = first_of(QUESTIONS, row), first_of(ANSWERS, row)
    more = first_of(CONTINUATIONS, row)
    if chat:
        return [chat], turns_of(row, chat)
    if "ids" in row and are_ids(row["ids"]):
        return ["ids"], [Turn("ids", row["ids"], True)]
    if "prompt" in row and are_ids(row["prompt"]) and are_ids(row.get("answer", [])):
        asked, answered = row["prompt"], row.get("answer", [])
        return ["prompt", "answer"], [Turn("ids", asked, False), Turn("ids", answered, True)]
    if isinstance(row.get("prompt"), str) and isinstance(row.get(more), str):
        asked, answered = string_of(row, "prompt"), string_of(row, more)
        return ["prompt", more], [Turn("text", asked, False), Turn("text", answered, True)]
    if question and answer:
        return pair_in(row)
    spoken = next((name for name in (*ANSWERS, *row) if is_chat(row.get(name))), None)
    if spoken:
        return [spoken], turns_of(row, spoken)
    if is_message(row) and role_of(row):
        raise LeftOut("it is a single message: a row holds all messages of a chat")
    if text:
        return [text], [Turn("text", string_of(row, text), True)]
    if question == "prompt" and isinstance(row["prompt"], str):
        return ["prompt"], [Turn("text", string_of(row, "prompt"), False)]
    if question:
        return pair_in(row)
    if not row:
        raise LeftOut("it is empty, or has no fields")
    raise LeftOut("no known field holds a text or a question: " + ", ".join(list(row)[:8]))

def tidied(turns):
    """A chat from its first question on, up to its first empty turn -> [Turn], note or None"""
    turns = [turn for turn in turns if turn.content or turn.role != "system"]
    note = None
    first = sum(turn.role == "system" for turn in turns[:1])
    while turns[first:] and turns[first].role == "assistant":
        del turns[first]
        note = "the assistant's turns before the first question"
    for number, turn in enumerate(turns):
        if not turn.content:
            return turns[:number], "the rest of a chat, from a turn that is empty or calls a tool"
    return turns, note

def document_of(row, place, names, number):
    """A row as a Document.  names: of its file and argument.  number: of the row, for held_out."""
    form, turns, note, why = "", [], None, None
    held_out = number % HELD_OUT == 0
    row = {"text": row} if isinstance(row, str) else row
    row = {"messages": row} if is_chat(row) else row
    row = lowered(row) if isinstance(row, dict) else {}
    try:
        if row.get("held_out", True) not in (True, False):
            raise LeftOut("held_out is neither true nor false")
        held_out = row.get("held_out", held_out)
        if isinstance(row.get(first_of(KINDS, row)), (str, int)):
            names = (string_of(row, first_of(KINDS, row)), *names)
        fields, turns = turns_in(row)
        form = " + ".join(fields)
        if turns[0].role not in ("text", "ids"):
            system = first_of(SYSTEM, row)
            if system and turns[0].role != "system":
                turns = [Turn("system", string_of(row, system), False), *turns]
                form = f"{system} + {form}"
            turns, note = tidied(turns)
        if not note and not any(turn.learned for turn in turns):
            note = "its fields: " + ", ".join(list(row)[:8])
    except LeftOut as left_out:
        turns, why = [], str(left_out)
    return Document(place, names, held_out, form, turns, note, why, row)

def documents(paths, flag="--data"):
    """Yield a Document for each row of files and folders.  flag: what gave them."""
    number = 0
    for file, given in files_of(paths, flag):
        names = file.name.partition(".")[0], Path(given).absolute().name
        if str(file) != given and suffix_of(file) not in NAMES:
            why = (f"of a folder only {', '.join(NAMES)} are read, of others name each file to see "
                   "how it becomes rows")
            yield Document(str(file), names, False, "", [], None, why, {})
            continue
        for place, row in read_rows(file):
            number += 1
            yield document_of(row, f"row {place} of {file}", names, number)

def kinds_of(names):
    """Names of many documents -> {a document's names: its kind of text}

    It is the row's own kind; where there are more than MOST_KINDS, the file's name, or else that of
    the folder that was given.
    """
    for level in range(3):
        found = {of_one: of_one[max(0, level + len(of_one) - 3)] for of_one in names}
        if len(set(found.values())) <= MOST_KINDS:
            break
    return found

# ---------------------------------------------------------------- rows as prompts
def prompt_rows(paths, limit=None, skip=0):
    """Rows of files of prompts, balanced by kind -> [(kind, Document)]

    skip: how many of them to leave out first.  limit: how many to take then; None: all.
    """
    found = list(documents(paths, "--prompts"))
    kinds = kinds_of({document.names for document in found})
    count, rows = Counter(), []
    for document in found:
        kind = kinds[document.names]
        count[kind] += 1
        rows.append((count[kind], kind, document))
    # The first row of each kind, then the second of each, and so on
    rows.sort(key=lambda row: row[0])
    end = None if limit is None else skip + limit
    return [row[1:] for row in rows[skip:end]]

def questions_of(document):
    """What a Document asks -> [[Turn]]: each question, after the turns since the one before.

    Where a question follows another one directly, the answer between is left open.  LeftOut where
    it asks nothing.
    """
    turns = document.turns
    if turns and turns[0].role in ("text", "ids"):
        return [[turn for turn in turns if not turn.learned] or turns]
    ends = [i for i, turn in enumerate(turns, 1) if turn.role == "user"]
    if not ends:
        raise LeftOut(document.why or f"no question is in {document.form}")
    return [turns[start:end] for start, end in zip([0, *ends], ends)]
