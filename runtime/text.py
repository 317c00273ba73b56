"""User-supplied files: their rows become documents to learn from, or prompts to decode after.

runtime/files.py reads the files, documents() makes a Document of each row, and runtime/chats.py
makes token ids of these.

A row is read by the names of its fields, in any case.  The first line of this table that fits is
taken; null, "" and [] count as absent:

    the row has                     it becomes
    one of CHATS                    a chat: a list of turns, each with a role and a content
    prompt and answer, lists of     token ids, of which the answer is learned
      token ids
    prompt and a CONTINUATION       a text; what goes on after the prompt is learned
    one of QUESTIONS and one of     a chat of two turns: the question, with a field of CONTEXTS
      ANSWERS                       below it, and the answer.  `history` stands before it
    any field with such a list      a chat
    one of TEXTS                    a text, which is learned
    one of QUESTIONS alone          a prompt: it is asked, but nothing can be learned
    one of IDS                      token ids; learned are those that one of MASKS says, or all

Of a chat the answers are learned.  A field of SYSTEM begins it.  Only strings, numbers and lists of
text parts are text.  A row that is not understood is left out with its reason, never in silence.
"""
import json
from collections import namedtuple

from runtime.files import NAMES, files_of, parsed, rows_of

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
IDS = ("ids", "input_ids")
MASKS = ("labels", "loss_mask", "completion_mask", "assistant_masks")    # -100, 0: not learned
KINDS = ("group", "category", "source")                  # the kind of text that a row is

# Of a message of a chat
ROLE = ("role", "from")
CONTENT = ("content", "value", "text", "parts")
ROLES = {"human": "user", "prompter": "user", "gpt": "assistant", "model": "assistant",
         "bing": "assistant", "chatgpt": "assistant", "bot": "assistant", "developer": "system",
         "function": "tool", "observation": "tool"}
ROLES |= {role: role for role in ("user", "assistant", "system", "tool")}
CALLS = ("tool_calls", "function_call")
LEARNED = ("weight", "loss", "loss_mask", "train", "trainable")      # off: it is not learned
OFF = ("0", "0.0", "-1", "false", "no", "off")           # a flag that says no, as a string
TEXT_PARTS = ("text", "input_text", "output_text")       # types of the parts of a content

# role: user, assistant, system or tool in a chat; else "text" or "ids".  content: a string, or a
# list of token ids.  learned: whether its tokens are labels.  more: other fields of a message, for
# the chat template
Turn = namedtuple("Turn", "role content learned more", defaults=({},))
# place: "row 3 of questions.jsonl".  kind: of text.  held_out: whether it is left for validation.
# form: the names of the fields that were read.  turns: [Turn], empty where the row is left out.
# note: why it is, or what of it, or None.  row: its fields, in lower case
Document = namedtuple("Document", "place kind held_out form turns note row")

class LeftOut(Exception):
    """Why a row is left out: a phrase that is the same for all such rows."""

# ---------------------------------------------------------------- the values of a row
def lowered(row):
    """A dict with its keys in lower case, without absent values.

    Of two names that differ in case alone, the one in lower case is taken; the other stays.
    """
    found = {}
    for name in sorted(row, key=str.islower, reverse=True):
        value = row[name]
        if (value.strip() if isinstance(value, str) else value) not in (None, "", []):
            found[name if name.lower() in found else name.lower()] = value
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
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise LeftOut(f"{name} has a part of type {kind}, which is no text")
    return "".join(part["text"] for part in parts)

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

def turns_of(row, name, role=None):
    """A list of messages, of pairs, or of strings, which a user says, or JSON of these -> [Turn]

    role: whose turn it is where it is just text.
    """
    value = row[name]
    if role and not is_chat(value):
        return [Turn(role, string_of(row, name), role == "assistant")]
    value = parsed(value) if isinstance(value, str) else value
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
            turns += pair_in(one)[1]
        else:
            raise LeftOut(f"{name} is no list of turns with roles")
    return turns

def pair_in(row):
    """A question, with its answer if there is one -> names of the fields that were read, [Turn]"""
    question, answer = first_of(QUESTIONS, row), first_of(ANSWERS, row)
    turns = turns_of(row, question, "user")
    context = first_of([name for name in CONTEXTS if name != question], row)
    if context and len(turns) == 1:
        turns = [Turn("user", f"{turns[0].content}\n{string_of(row, context)}", False)]
    if "history" in row:
        turns = turns_of(row, "history") + turns
    if answer:
        answers = turns_of(row, answer, "assistant")
        holds_question = answers[0].role != "assistant"
        turns = answers if holds_question else turns + answers
    return [name for name in (question, context, "history", answer) if name in row], turns

def ids_in(row, name):
    """Token ids, with labels or a mask if there are any -> names of the fields read, [Turn]"""
    ids = row[name]
    mask = next((mask for mask in MASKS if isinstance(row.get(mask), list)), name)
    marks = row[mask]
    if mask not in (name, "labels"):
        marks = [token if mark else -100 for mark, token in zip(marks, ids)]
    if len(row[mask]) != len(ids) or any(m not in (-100, i) for m, i in zip(marks, ids)):
        raise LeftOut(f"{mask} are of other tokens than {name}")
    turns = [Turn("ids", [token], mark != -100) for mark, token in zip(marks, ids)]
    return [name] if mask == name else [name, mask], turns

def turns_in(row):
    """A row, a dict with its keys in lower case -> names of the fields that were read, [Turn]"""
    chat, text, ids = first_of(CHATS, row), first_of(TEXTS, row), first_of(IDS, row)
    question, answer = first_of(QUESTIONS, row), first_of(ANSWERS, row)
    prompt, reply, more = row.get("prompt"), row.get("answer", []), first_of(CONTINUATIONS, row)
    if chat:
        return [chat], turns_of(row, chat)
    if are_ids(prompt) and are_ids(reply):
        return ["prompt", "answer"], [Turn("ids", prompt, False), Turn("ids", reply, True)]
    if isinstance(prompt, str) and isinstance(row.get(more), str):
        return ["prompt", more], [Turn("text", prompt, False), Turn("text", row[more], True)]
    if question and answer:
        return pair_in(row)
    for name in (*ANSWERS, *row):                        # a chat of any name
        if isinstance(row.get(name), list) and is_chat(row[name]):
            return [name], turns_of(row, name)
    if "role" in row and text:
        raise LeftOut("it is a single message: a row holds all messages of a chat")
    if text:
        return [text], [Turn("text", string_of(row, text), True)]
    if question == "prompt" and isinstance(prompt, str):
        return ["prompt"], [Turn("text", prompt, False)]
    if question:
        return pair_in(row)
    if ids and are_ids(row[ids]):
        return ids_in(row, ids)
    raise LeftOut(f"no known field holds a text or a question: {', '.join(row) or 'it is empty'}")

def tidied(turns):
    """A chat from its first question on, up to its first empty turn -> [Turn], note or None"""
    kept, note = [], None
    for turn in turns:
        if turn.role == "assistant" and all(earlier.role == "system" for earlier in kept):
            note = "the assistant's turns before the first question"
        elif turn.content:
            kept.append(turn)
        elif turn.role != "system":
            return kept, "the rest of a chat, from a turn that is empty or calls a tool"
    return kept, note

def document_of(row, place, kind, number):
    """A row as a Document.  kind: where it names none.  number: every fiftieth is held out."""
    if isinstance(row, (str, list)):
        row = {"text" if isinstance(row, str) else "messages": row}
    row = lowered(row) if isinstance(row, dict) else {}
    held_out = not is_off(row.get("held_out", number % 50 == 0))
    named = row.get(first_of(KINDS, row))
    kind = str(named) if isinstance(named, (str, int)) else kind
    fields, note = [], None
    try:
        fields, turns = turns_in(row)
        system = first_of(SYSTEM, row)
        if system and {"system", "text", "ids"}.isdisjoint(turn.role for turn in turns):
            turns.insert(0, Turn("system", string_of(row, system), False))
            fields.insert(0, system)
        turns, note = tidied(turns)
    except LeftOut as left_out:
        turns, note = [], str(left_out)
    return Document(place, kind, held_out, " + ".join(fields), turns, note, row)

def documents(paths):
    """Yield a Document for each row of files and folders."""
    number = 0
    for path, is_read in files_of(paths):
        kind = path.name.partition(".")[0]
        if not is_read:
            note = f"of a folder only {', '.join(NAMES)} are read: name other files one by one"
            yield Document(str(path), kind, False, "", [], note, {})
            continue
        for line, value in rows_of(path):
            are_rows = isinstance(value, list) and not is_chat(value)
            for place, row in enumerate(value, 1) if are_rows else [(line, value)]:
                number += 1
                yield document_of(row, f"row {place} of {path}", kind, number)
