"""User-supplied files: their rows become documents to learn from, or prompts to decode after.

    documents(paths)      a Document for each row of files and folders

A row is read by the names of its fields, in any case; null, "" and [] count as absent.  It is a
chat, of which the answers are learned; or a text, which is learned, but for a prompt that begins
it; or token ids.  turns_in() has the order in which this is tried.  A row that is not understood is
left out with its reason, never in silence.

runtime/files.py reads the files, runtime/chats.py makes token ids of documents.
"""
import json
from collections import namedtuple
from itertools import groupby

from runtime.files import files_of, json_of, rows_of

# ---------------------------------------------------------------- the names of fields
# Of a row.  A list of turns:
CHATS = ("conversations", "conversation", "messages", "chat", "turns")
# A question, what goes below it, and an answer: two turns
QUESTIONS = ("instruction", "question", "query", "problem", "prompt", "input", "inputs", "text",
             "user", "human")
CONTEXTS = ("input", "context")
ANSWERS = ("output", "response", "solution", "answer", "answers", "completion",
           "canonical_solution", "chosen", "target", "targets", "code", "assistant", "gpt")
SYSTEM = ("system", "system_prompt", "system_message")
# A text; and what goes on with a prompt
TEXTS = ("text", "content", "code")
CONTINUATIONS = ("completion", "canonical_solution")
# Token ids, and which of them are learned: labels are -100 where they are not, masks are 0
IDS = ("ids", "input_ids")
MASKS = ("labels", "loss_mask", "completion_mask", "assistant_masks")
# The kind of text that a row is
KINDS = ("group", "category", "source")

# Of a turn
ROLE = ("role", "from")
CONTENT = ("content", "value", "text", "parts")
CALLS = ("tool_calls", "function_call")
LEARNED = ("weight", "loss", "loss_mask", "train", "trainable")      # off: it is not learned

OFF = ("0", "0.0", "-1", "false", "no", "off")           # a flag that says no, as a string
TEXT_PARTS = ("text", "input_text", "output_text")       # types of the parts of a content
ROLES = {"human": "user", "prompter": "user", "gpt": "assistant", "model": "assistant",
         "bing": "assistant", "chatgpt": "assistant", "bot": "assistant", "developer": "system",
         "function": "tool", "observation": "tool"}
ROLES |= {role: role for role in ("user", "assistant", "system", "tool")}

HELD_OUT = 50                                            # every fiftieth row is held out

# role: user, assistant, system or tool in a chat; else "text" or "ids".  content: a string, or a
# list of token ids.  learned: whether its tokens are labels.  more: other fields of a message, for
# the chat template
Turn = namedtuple("Turn", "role content learned more", defaults=({},))
# place: "row 3 of questions.jsonl".  kind: of text.  held_out: whether it is left for validation.
# turns: [Turn], empty where the row is left out.  note: why it is, or what of it, or None.  row:
# its fields, in lower case
Document = namedtuple("Document", "place kind held_out turns note row")

class LeftOut(Exception):
    """Why a row is left out: a phrase that is the same for all such rows."""

# ---------------------------------------------------------------- the values of a row
def lowered(row):
    """A dict with its keys in lower case, without absent values.

    Of two names that differ in case alone, the one in lower case is taken.
    """
    found = {}
    for name in sorted(row, key=str.islower):
        value = row[name]
        if (value.strip() if isinstance(value, str) else value) not in (None, "", []):
            found[name.lower()] = value
    return found

def first_of(names, row):
    """The first of these names that a row has, or None."""
    return next((name for name in names if name in row), None)

def string_of(row, name):
    """A field of a row as a string: of a string, a number or text parts.  "" where it is absent."""
    value = row.get(name, "")
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)):                  # a boolean, too
        return json.dumps(value)
    parts = value if isinstance(value, list) else [None]
    if not all(is_text_part(part) for part in parts):
        raise LeftOut(f"{name} is no text, or not text alone")
    return "".join(part["text"] for part in parts)

def is_text_part(part):
    """Whether a part of a content is text: {"type": "text", "text": "..."}, or without its type"""
    return (isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS
            and isinstance(part.get("text"), str))

def are_ids(value):
    """Whether a value is a list of token ids."""
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2 ** 31 for i in value)

def is_off(value):
    """Whether a flag says no, as a number, a boolean or a string."""
    return str(value).strip().lower() in OFF

def is_chat(value):
    """Whether a value is a list of turns, dicts with a role, or one turn."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and any(name.lower() in ROLE for name in first)

def fields_of(row):
    """The names of a row's fields, for a report."""
    return "its fields: " + (", ".join(list(row)[:8]) or "none")

# ---------------------------------------------------------------- a row as turns
def turn_of(message):
    """A message of a chat, with its keys in lower case -> Turn.  A call of a tool has no content"""
    said = message[first_of(ROLE, message)]
    role = ROLES.get(str(said).strip().lower())
    if role is None:
        raise LeftOut(f"a role is unknown: {said}")
    field = first_of(CONTENT, message)
    content = "" if first_of(CALLS, message) else string_of(message, field)
    learned = role == "assistant" and not any(is_off(message.get(flag, 1)) for flag in LEARNED)
    more = {name: value for name, value in message.items()
            if name not in (*ROLE, field, *CALLS, *LEARNED)}
    return Turn(role, content, learned, more)

def turns_of(row, name):
    """A field of a row as the turns of a chat.

    It is a list of messages, of pairs, or of strings, all of which a user says; or JSON of these.
    """
    value = json_of(row[name]) if isinstance(row[name], str) else row[name]
    turns = []
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, list) and len(one) == 2:      # [question, answer]
            one = dict(zip(("human", "assistant"), one))
        if isinstance(one, str) and name == "turns":
            one = {"role": "user", "content": one}
        one = lowered(one) if isinstance(one, dict) else {}
        if first_of(ROLE, one):
            turns.append(turn_of(one))
        elif first_of(QUESTIONS, one):
            turns += pair_in(one)
        else:
            raise LeftOut(f"{name} is no list of turns with roles")
    return turns

def side_of(row, name, role):
    """A field that holds a question or an answer -> [Turn]: one, or those of messages"""
    if is_chat(row[name]):
        return turns_of(row, name)
    return [Turn(role, string_of(row, name), role == "assistant")]

def pair_in(row):
    """A question, with its answer if there is one -> [Turn]"""
    question, answer = first_of(QUESTIONS, row), first_of(ANSWERS, row)
    turns = side_of(row, question, "user")
    context = first_of([name for name in CONTEXTS if name != question], row)
    if context and len(turns) == 1:
        turns = [Turn("user", f"{turns[0].content}\n{string_of(row, context)}", False)]
    if "history" in row:
        turns = turns_of(row, "history") + turns
    if answer:
        answers = side_of(row, answer, "assistant")
        begins_anew = answers[0].role != "assistant"     # it holds the question, too
        turns = answers if begins_anew else turns + answers
    return turns

def ids_in(row, name):
    """Token ids, with labels or a mask if there are any -> [Turn]"""
    ids = row[name]
    mask = next((mask for mask in MASKS if isinstance(row.get(mask), list)), None)
    marks = row.get(mask, ids)
    if mask not in (None, "labels"):
        marks = [token if mark else -100 for mark, token in zip(marks, ids)]
    if len(marks) != len(ids) or any(mark not in (-100, i) for mark, i in zip(marks, ids)):
        raise LeftOut(f"{mask} are of other tokens than {name}")
    turns = []
    for is_label, run in groupby(zip(marks, ids), key=lambda pair: pair[0] != -100):
        turns.append(Turn("ids", [token for _, token in run], is_label))
    return turns

def turns_in(row):
    """A row, a dict with its keys in lower case -> [Turn]"""
    chat, text, ids = first_of(CHATS, row), first_of(TEXTS, row), first_of(IDS, row)
    question, answer = first_of(QUESTIONS, row), first_of(ANSWERS, row)
    prompt, more = row.get("prompt"), row.get(first_of(CONTINUATIONS, row))
    if chat:
        return turns_of(row, chat)
    if are_ids(prompt) and are_ids(row.get("answer", [])):
        return [Turn("ids", prompt, False), Turn("ids", row.get("answer", []), True)]
    if isinstance(prompt, str) and isinstance(more, str):
        return [Turn("text", prompt, False), Turn("text", more, True)]
    if question and answer:
        return pair_in(row)
    for name in (*ANSWERS, *row):                        # a chat of any name
        if isinstance(row.get(name), list) and is_chat(row[name]):
            return turns_of(row, name)
    if "role" in row and text:
        raise LeftOut("it is a single message: a row holds all messages of a chat")
    if text:
        return [Turn("text", string_of(row, text), True)]
    if isinstance(prompt, str) and question == "prompt":
        return [Turn("text", prompt, False)]
    if question:
        return pair_in(row)
    if ids and are_ids(row[ids]):
        return ids_in(row, ids)
    raise LeftOut(f"no known field holds a text or a question ({fields_of(row)})")

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

def document_of(row, place, kind, number):
    """A row as a Document.  kind: where it names none.  number: of the row, for held_out."""
    if isinstance(row, (str, list)):
        row = {"text" if isinstance(row, str) else "messages": row}
    row = lowered(row) if isinstance(row, dict) else {}
    held_out = not is_off(row.get("held_out", number % HELD_OUT == 0))
    named = row.get(first_of(KINDS, row))
    kind = str(named) if isinstance(named, (str, int)) else kind
    try:
        turns, note = turns_in(row), None
        if turns[0].role not in ("text", "ids"):
            system = first_of(SYSTEM, row)
            if system and turns[0].role != "system":
                turns = [Turn("system", string_of(row, system), False), *turns]
            turns, note = tidied(turns)
    except LeftOut as left_out:
        turns, note = [], str(left_out)
    return Document(place, kind, held_out, turns, note, row)

def documents(paths):
    """Yield a Document for each row of files and folders."""
    number = 0
    for path in files_of(paths):
        kind = path.name.partition(".")[0]
        for line, value in rows_of(path):
            are_rows = isinstance(value, list) and not is_chat(value)
            for place, row in enumerate(value, 1) if are_rows else [(line, value)]:
                number += 1
                yield document_of(row, f"row {place} of {path}", kind, number)
