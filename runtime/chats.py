"""Documents and prompts as token ids, by one chat template for training and asking.

    template = template_of(name, tokenizer)
    encode(document, tokenizer, template)         a text.Document's token ids, and which are labels
    questions(document, tokenizer, template)      its prompts: an answer begins after each
    read_prompts(paths, loaded, new_tokens)       the prompts that bench.py decodes after
"""
import re
from collections import Counter, namedtuple
from functools import partial
from itertools import takewhile
from os.path import commonprefix
from pathlib import Path

import numpy as np

import verify
from runtime.files import parsed
from runtime.program import UserError, first_line
from runtime.text import KINDS, LeftOut, Turn, documents

# ---------------------------------------------------------------- chat templates
# By name, in Jinja.  "question" serves a tokenizer that has none of its own.
QUESTION = (
    "{% for turn in messages %}"
    "{% if turn.role == 'user' %}Question: {{ turn.content }}\n"
    "{% elif turn.role == 'assistant' %}Answer: {{ turn.content }}\n{{ eos_token }}"
    "{% else %}{{ turn.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}")
# FastChat's vicuna_v1.1: the tokenizer of Vicuna has no template.
VICUNA = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}"
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. {% endif %}"
    "{% for turn in messages %}"
    "{% if turn.role == 'user' %}USER: {{ turn.content }} "
    "{% elif loop.first and turn.role == 'system' %}{{ turn.content }} "
    "{% else %}ASSISTANT: {{ turn.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}")
TEMPLATES = {"question": QUESTION, "vicuna": VICUNA}

def template_of(name, tokenizer, arguments=None):
    """--template and --template-args -> arguments of apply_chat_template, a dict

    name: a key of TEMPLATES, a file, or None for the tokenizer's own.  arguments: a JSON object.
    """
    arguments = parsed(arguments or "{}")
    if not isinstance(arguments, dict):
        raise UserError("--template-args is no JSON object, as '{\"enable_thinking\": false}' is")
    try:
        if name is None:
            source = tokenizer.get_chat_template() if tokenizer.chat_template else QUESTION
        else:
            source = TEMPLATES.get(name) or Path(name).read_text(encoding="utf-8-sig")
        return {**arguments, "chat_template": source}
    except (OSError, ValueError) as why:                 # ValueError: several, and no default
        raise UserError(f"--template {name or 'is missing'} ({first_line(why)}): choose "
                        f"{' or '.join(TEMPLATES)}, or name a file with a Jinja template") from None

def not_read(document, template):
    """The fields of a Document that its turns do not have and the template does not read -> set"""
    known = {*document.form.split(" + "), *KINDS, "held_out"}
    passed = {name for turn in document.turns for name in turn.more} | {"tools"} & set(document.row)
    read = passed & set(re.findall(r"\w+", template["chat_template"]))
    return {*document.row, *passed} - known - read

def chat_text(turns, tokenizer, template, tools=None, ask=False):
    """A chat as text; LeftOut where the template refuses it.  ask: end where an answer begins."""
    messages = [{**turn.more, "role": turn.role, "content": turn.content} for turn in turns]
    tools = parsed(tools) if isinstance(tools, str) else tools
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False,
                                             add_generation_prompt=ask, **template)
    except Exception as why:                             # a template is a program of somebody's
        raise LeftOut(f"the chat template refuses it ({first_line(why)})") from None

# ---------------------------------------------------------------- documents -> token ids
def answers_in(chat, tokenizer, template, tools):
    """A chat -> [(text, [(start, end)])]: texts to learn from, and where in them answers stand.

    Mostly one text.  But some templates write an answer otherwise once a turn follows it, for
    example without its reasoning.  Then each answer has a text of its own, which ends with it, as
    it does in decoding.
    """
    text_of = partial(chat_text, tokenizer=tokenizer, template=template, tools=tools)
    eos, found = tokenizer.eos_token, []
    for count, turn in enumerate(chat, 1):
        if not turn.learned:
            continue
        before, text = text_of(chat[:count - 1], ask=True), text_of(chat[:count])
        # Some templates ask with the beginning of a thought, which this answer may not have.
        start = len(commonprefix((before, text)))
        # Some end with the next answer's beginning, always: it is no part of this one.
        always_asks = text == text_of(chat[:count], ask=True)
        if not eos or eos not in text[start:]:
            # Some end a turn only where another one follows.
            followed = text_of([*chat[:count], Turn("user", "?", False)])
            if always_asks:
                text = text[:max(start, len(commonprefix((text, followed))))]
            if eos and followed.startswith(text) and followed[len(text):].lstrip().startswith(eos):
                text = followed[:followed.index(eos, len(text)) + len(eos)]
        elif always_asks:
            text = text[:text.index(eos, start) + len(eos)]
        found.append((text, (start, len(text))))
    whole = text_of(chat)
    if all(whole.startswith(text) for text, _ in found):
        return [(whole, [span for _, span in found])]
    return [(text, [span]) for text, span in found]

def ids_of(text, tokenizer, spans=None, add_special_tokens=False):
    """A text -> array (n,) of token ids, with ~id for each token that belongs to no answer.

    spans: (start, end) in the text, of each answer: from the first token that reaches into it to
    the last that ends within it.  None: all is one.  Templates write special tokens themselves.
    """
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False,
                        return_offsets_mapping=spans is not None)
    ids = np.array(encoded["input_ids"], "i4")
    if spans is None:
        return ids
    ends = np.array(encoded["offset_mapping"]).reshape(-1, 2)[:, 1]
    ends = np.maximum.accumulate(ends)                   # a special token's may be 0
    is_label = np.zeros(len(ids), bool)
    for start, end in spans:
        is_label |= (start < ends) & (ends <= end)
    return np.where(is_label, ids, ~ids)

def text_ids(turns, tokenizer):
    """A text, whose first turn may be a prompt -> list of token ids, with one begin and no end."""
    text = "".join(turn.content for turn in turns)
    begins = text.startswith(tokenizer.bos_token or "\0")
    spans = [(len(turns[0].content), len(text))] if len(turns) > 1 else None
    ids = ids_of(text, tokenizer, spans, add_special_tokens=not begins).tolist()
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return ids

def encode(document, tokenizer, template):
    """A text.Document -> its token ids, int32, in a list of arrays (n,): mostly one.

    What is no label comes as ~id: it is read, but not learned.  A text ends with one end of text, a
    chat as its template says, token ids as they are.  LeftOut where there is no label.
    """
    turns, end = document.turns, tokenizer.eos_token_id
    if not any(turn.learned and turn.content for turn in turns):
        raise LeftOut(document.note or f"no answer to learn is in {document.form} "
                                       f"(its fields: {', '.join(document.row)})")
    if turns[0].role == "ids":
        parts = [[i if turn.learned else ~i for turn in turns for i in turn.content]]
    elif turns[0].role == "text":
        parts = [text_ids(turns, tokenizer) + ([] if end is None else [end])]
    else:
        parts = [ids_of(text, tokenizer, spans) for text, spans in
                 answers_in(turns, tokenizer, template, document.row.get("tools"))]
    # The first token of a document is no label: nothing predicts it.
    parts = [np.array(ids, "i4") for ids in parts if (np.array(ids[1:]) >= 0).any()]
    if not parts:
        raise LeftOut("it has a single token, or an answer that the template does not write")
    return parts

# ---------------------------------------------------------------- prompts
# kind: of text.  question: a number, which all prompts of one chat share.  ids: token ids, a list.
# limit: the most new tokens
Prompt = namedtuple("Prompt", "kind question ids limit")

def questions(document, tokenizer, template, answer=None):
    """Yield the prompt of each question of a text.Document: token ids, which an answer follows.

    answer(ids) -> text: for an answer that it does not have.  LeftOut where it asks nothing.
    """
    turns, chat, ids = document.turns, [], None
    if turns and turns[0].role in ("text", "ids"):
        asked = list(takewhile(lambda turn: not turn.learned, turns)) or turns
        is_text = turns[0].role == "text"
        yield text_ids(asked, tokenizer) if is_text else [i for turn in asked for i in turn.content]
        return
    for turn in turns:
        if turn.role == "user" and chat and chat[-1].role == "user":
            chat.append(Turn("assistant", answer(ids), False))
        chat.append(turn)
        if turn.role == "user":
            text = chat_text(chat, tokenizer, template, document.row.get("tools"), ask=True)
            ids = ids_of(text, tokenizer).tolist()
            yield ids
    if ids is None:
        raise LeftOut(document.note or f"no question is in {document.form}")

def read_prompts(paths, loaded, new_tokens, limit=None, template=None, template_args=None):
    """Files of prompts -> at most `limit` Prompts, the kinds of text alternating.

    loaded: a load.Loaded.  template, template_args: as of template_of.
    """
    target, tokenizer = loaded.target, loaded.tokenizer
    template = template_of(template, tokenizer, template_args)

    def answer(ids):
        """The target's own answer to an earlier question, where the chat has none; untimed."""
        out = verify.generate(target, None, verify.root_only, ids, new_tokens, eos=loaded.eos)
        return tokenizer.decode(out.tokens, skip_special_tokens=True)

    # The first document of each kind of text, then the second of each, and so on
    count, numbered = Counter(), []
    for document in documents(paths):
        count[document.kind] += 1
        numbered.append((count[document.kind], document))
    numbered.sort(key=lambda pair: pair[0])
    prompts, too_long = [], 0
    for number, (_, document) in enumerate(numbered):
        try:
            for ids in questions(document, tokenizer, template, answer):
                if not ids or max(ids) >= target.config.vocab_size:
                    raise LeftOut("it has no tokens, or others than the target's")
                remaining = target.remaining(ids)
                if remaining < 1:
                    too_long += 1                        # and so are all further turns of this chat
                    break
                prompts.append(Prompt(document.kind, number, ids, min(new_tokens, remaining)))
                if len(prompts) == limit:
                    return prompts
        except LeftOut as why:
            raise UserError(f"{document.place} asks nothing ({why}): correct the row or "
                            "--template") from None
    if too_long:
        loaded.notes.append(f"left out: {too_long} prompts that exceed the target's context")
    if not prompts:
        raise UserError(f"{' '.join(map(str, paths))}: no prompt is there, or none that fits the "
                        f"target's context of {target.capacity} tokens")
    return prompts
