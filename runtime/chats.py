"""Documents and prompts as token ids, by one chat template for training and asking.

    template = template_of(name, tokenizer)
    encode(document, tokenizer, template)         a text.Document's token ids, and which are labels
    prompt_ids(turns, tokenizer, template)        of a prompt: an answer begins after them
"""
import json
from os.path import commonprefix
from pathlib import Path

import numpy as np

from runtime.errors import UserError
from runtime.program import first_line
from runtime.text import LeftOut, Turn, fields_of

# ---------------------------------------------------------------- chat templates
# Of a tokenizer that has none
QUESTION = (
    "{% for turn in messages %}"
    "{% if turn.role == 'user' %}Question: {{ turn.content }}\n"
    "{% elif turn.role == 'assistant' %}Answer: {{ turn.content }}\n{{ eos_token }}"
    "{% else %}{{ turn.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}")

def template_of(name, tokenizer):
    """--template -> Jinja.  name: a file, or None for the tokenizer's own."""
    try:
        if name is not None:
            return Path(name).read_text(encoding="utf-8-sig")
        return tokenizer.get_chat_template() if tokenizer.chat_template else QUESTION
    except (OSError, ValueError) as why:                 # ValueError: several, and no default
        raise UserError(f"--template {name or 'is missing'} ({first_line(why)}): name a file with "
                        "a Jinja template, such as training/vicuna.jinja") from None

def chat_text(turns, tokenizer, template, tools=None, ask=False):
    """The turns of a chat as text; LeftOut where the template does not take them.

    ask: end where the assistant's next answer begins.
    """
    messages = [{**turn.more, "role": turn.role, "content": turn.content} for turn in turns]
    tools = json.loads(tools) if isinstance(tools, str) else tools
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, tokenize=False,
            add_generation_prompt=ask)
    except Exception as why:                             # a template is a program of somebody's
        raise LeftOut(f"the chat template refuses it ({first_line(why)})") from None

# ---------------------------------------------------------------- documents -> token ids
def answers_in(chat, tokenizer, template, tools):
    """A chat -> [(text, [(start, end)])]: texts to learn from, and where in them answers stand.

    Mostly one text.  But some templates write an answer otherwise once a turn follows it, for
    example without its reasoning.  Then each answer has a text of its own, which ends with it, as
    it does in decoding.
    """
    def text_of(turns, ask=False):
        return chat_text(turns, tokenizer, template, tools, ask)

    eos, found = tokenizer.eos_token, []
    for count, turn in enumerate(chat, 1):
        if not turn.learned:
            continue
        before, text = text_of(chat[:count - 1], ask=True), text_of(chat[:count])
        # Some templates ask with the beginning of a thought, which this answer may not have.
        start = len(commonprefix((before, text)))
        if eos and eos not in text[start:]:
            # Some templates end a turn only where another one follows.
            followed = text_of([*chat[:count], Turn("user", "?", False)])
            if followed.startswith(text) and followed[len(text):].lstrip().startswith(eos):
                text = followed[:followed.index(eos, len(text)) + len(eos)]
        elif eos:
            # What a template writes after its end of text is no part of an answer.
            text = text[:text.rindex(eos) + len(eos)]
        found.append((text, [(start, len(text))]))
    whole = text_of(chat)
    if all(whole.startswith(text) for text, _ in found):
        return [(whole, [span for _, [span] in found])]
    return found

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
    if not turns:
        raise LeftOut(document.note)
    if not any(turn.learned and turn.content for turn in turns):
        raise LeftOut(f"it has no answer to learn ({document.note or fields_of(document.row)})")
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
