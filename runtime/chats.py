"""Documents and prompts as token ids, by one chat template for training and asking.

    template = template_of(name, tokenizer)
    encode(document, tokenizer, template)         a text.Document's token ids, and which are labels
    prompt_ids(turns, tokenizer, template)        of a prompt: an answer begins after them
    questions(document, tokenizer, ...)           the prompts of all questions of a chat
"""
import json
import re
from collections import namedtuple
from os.path import commonprefix
from pathlib import Path

import numpy as np

from runtime.files import parsed
from runtime.program import UserError, first_line
from runtime.text import KINDS, LeftOut, Turn, questions_of

# ---------------------------------------------------------------- chat templates
# By name, in Jinja.  "plain" and "question" serve a tokenizer that has none of its own.
PLAIN = ("{% for turn in messages %}{{ turn.role | upper }}: {{ turn.content }}\n\n{% endfor %}"
         "{% if add_generation_prompt %}ASSISTANT:{% endif %}")
QUESTION = (
    "{% for turn in messages %}"
    "{% if turn.role == 'user' %}Question: {{ turn.content }}\n"
    "{% elif turn.role == 'assistant' %}Answer: {{ turn.content }}\n{{ eos_token }}"
    "{% else %}{{ turn.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}")
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
    "{% else %}ASSISTANT: {{ turn.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}")
TEMPLATES = {"plain": PLAIN, "question": QUESTION, "vicuna": VICUNA}

# source: Jinja.  arguments: {name: value} beside the messages, say {"enable_thinking": False}
Template = namedtuple("Template", "source arguments")

def template_of(name, tokenizer, arguments=None):
    """--template and --template-args -> Template

    name: a key of TEMPLATES, a file, or None for the tokenizer's own.  arguments: a JSON object.
    """
    arguments = parsed(arguments or "{}")
    if not isinstance(arguments, dict):
        raise UserError("--template-args is no JSON object, as '{\"enable_thinking\": false}' is")
    try:
        if name in TEMPLATES:
            source = TEMPLATES[name]
        elif name is not None:
            source = Path(name).read_text(encoding="utf-8-sig")
        else:
            source = tokenizer.get_chat_template() if tokenizer.chat_template else QUESTION
        return Template(source, arguments)
    except (OSError, ValueError) as why:                 # ValueError: several, and no default
        raise UserError(f"--template {name or 'is missing'} ({first_line(why)}): choose "
                        f"{' or '.join(TEMPLATES)}, or name a file with a Jinja template") from None

def not_read(document, template):
    """The fields of a Document that its turns do not have and the template does not read -> set"""
    known = {*document.form.split(" + "), *KINDS, "held_out"}
    passed = {name for turn in document.turns for name in turn.more} | {"tools"} & set(document.row)
    read = {name for name in passed if re.search(rf"\b{re.escape(name)}\b", template.source)}
    return {*document.row, *passed} - known - read

def chat_text(turns, tokenizer, template, tools=None, ask=False):
    """The turns of a chat as text; LeftOut where the template does not take them.

    ask: end where the assistant's next answer begins.
    """
    messages = [{**turn.more, "role": turn.role, "content": turn.content} for turn in turns]
    tools = json.loads(tools) if isinstance(tools, str) else tools
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template.source, tokenize=False,
            add_generation_prompt=ask, **template.arguments)
    except Exception as why:                             # a template is a program of somebody's
        raise LeftOut(f"the chat template refuses it ({first_line(why)})") from None

# ---------------------------------------------------------------- documents -> token ids
def answer_in(chat, tokenizer, template, tools):
    """A chat that ends with an answer -> (text, (start, end) of the answer in it)"""
    def text_of(turns, ask=False):
        return chat_text(turns, tokenizer, template, tools, ask)
    eos = tokenizer.eos_token
    before, text = text_of(chat[:-1], ask=True), text_of(chat)
    # Some templates ask with the beginning of a thought, which this answer may not have.
    start, end = len(commonprefix((before, text))), len(text)
    always_asks = text == text_of(chat, ask=True)
    if not always_asks and (not eos or eos in text[start:]):
        return text, (start, end)
    # The template always ends with the next answer's beginning, which is no part of this one, or
    # it may not end a last turn: what it writes before a next question tells.
    try:
        followed = text_of([*chat, Turn("user", "?", False)])
    except LeftOut:
        return text, (start, end)
    common = len(commonprefix((text, followed)))
    if always_asks:
        end = max(start, common)
    ends_at = followed.find(eos, start) if eos else -1
    if ends_at >= 0 and common >= end and not followed[end:ends_at].strip():
        end = ends_at + len(eos)
        text = followed
    return text[:end], (start, end)

def answers_in(chat, tokenizer, template, tools):
    """A chat -> [(text, [(start, end)])]: texts to learn from, and where in them answers stand.

    Mostly one text.  But some templates write an answer otherwise once a turn follows it, for
    example without its reasoning.  Then each answer has a text of its own, which ends with it, as
    it does in decoding.
    """
    whole = chat_text(chat, tokenizer, template, tools)
    found = [answer_in(chat[:i + 1], tokenizer, template, tools)
             for i, turn in enumerate(chat) if turn.learned]
    if all(whole.startswith(text) for text, _ in found):
        return [(whole, [span for _, span in found])]
    return [(text, [span]) for text, span in found]

def only_answers(ids, offsets, spans):
    """Token ids of a text -> array (n,), with ~id for each token that belongs to no answer.

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

def own_part(ids, tokenizer):
    """The slice of a text's ids without a second begin, and without ends that tokenizers append."""
    first, last = 0, len(ids)
    while last and ids[last - 1] == tokenizer.eos_token_id:
        last -= 1
    while len(ids) > first + 1 and ids[first] == ids[first + 1] == tokenizer.bos_token_id:
        first += 1
    return slice(first, last)

def encode_text(turns, tokenizer):
    """A text, of which a prompt may be the first turn -> list of token ids, with one end of text"""
    text = "".join(turn.content for turn in turns)
    encoded = tokenizer(text, verbose=False, return_offsets_mapping=True)
    own = own_part(encoded["input_ids"], tokenizer)
    ids = encoded["input_ids"][own]
    if len(turns) > 1:
        answer = len(turns[0].content), len(text)
        ids = only_answers(ids, encoded["offset_mapping"][own], [answer]).tolist()
    end = tokenizer.eos_token_id
    return ids if end is None else [*ids, end]

def encode(document, tokenizer, template):
    """A text.Document -> its token ids, int32, in a list of arrays (n,): mostly one.

    What is no label comes as ~id: it is read, but not learned.  A text ends with one end of text, a
    chat as its template says, token ids as they are.  LeftOut where there is no label.
    """
    turns = document.turns
    if document.why:
        raise LeftOut(document.why)
    if not any(turn.learned and turn.content for turn in turns):
        raise LeftOut(f"no answer to learn is in {document.form} ({document.note})")
    if turns[0].role == "ids":
        parts = [[i if turn.learned else ~i for turn in turns for i in turn.content]]
    elif turns[0].role == "text":
        parts = [encode_text(turns, tokenizer)]
    else:
        parts = []
        for text, spans in answers_in(turns, tokenizer, template, document.row.get("tools")):
            # The template has written what a tokenizer puts before a text.
            encoded = tokenizer(text, add_special_tokens=False, verbose=False,
                                return_offsets_mapping=True)
            parts.append(only_answers(encoded["input_ids"], encoded["offset_mapping"], spans))
    # The first token of a document is no label: nothing predicts it.
    parts = [np.array(ids, "i4") for ids in parts if (np.array(ids[1:]) >= 0).any()]
    if not parts:
        raise LeftOut("it has a single token, or an answer that the template does not write")
    return parts

# ---------------------------------------------------------------- prompts
def prompt_ids(turns, tokenizer, template, tools=None):
    """The turns up to a question -> list of token ids, which end where the answer begins."""
    if turns[0].role == "ids":
        return [i for turn in turns for i in turn.content]
    if turns[0].role == "text":
        text = "".join(turn.content for turn in turns)
        ids = tokenizer(text, verbose=False)["input_ids"]
        return ids[own_part(ids, tokenizer)]
    text = chat_text(turns, tokenizer, template, tools, ask=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]

def questions(document, tokenizer, name, vocab, answer, arguments=None):
    """Yield the prompt of each question of a text.Document, as token ids.

    name, arguments: as of template_of.  vocab: the target's vocabulary size.  answer(ids) -> text:
    where the document has no answer to the question before, it is made by this.
    """
    template = template_of(name, tokenizer, arguments)
    turns, ids = [], None
    try:
        for part in questions_of(document):
            if turns and part[0].role == "user":         # nobody has answered the question before
                turns.append(Turn("assistant", answer(ids), False))
            turns += part
            ids = prompt_ids(turns, tokenizer, template, document.row.get("tools"))
            if not ids or max(ids) >= vocab:
                raise UserError(f"{document.place} gives no tokens, or others than the target's "
                                f"{vocab}: correct the row or --template")
            yield ids
    except LeftOut as why:
        raise UserError(f"{document.place} asks nothing ({why}): correct the row or "
                        "--template") from None
