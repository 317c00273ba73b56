"""Files of prompts, as bench.py decodes after them: their questions as token ids.

    prompts = read_prompts(["mt_bench.jsonl"], loaded, new_tokens=128)
    questions_of(document)        what a text.Document asks, turn by turn
"""
from collections import Counter, namedtuple
from itertools import takewhile

import verify
from runtime import chats, text
from runtime.errors import UserError

# kind: of text.  question: a number, which all prompts of one chat share.  ids: token ids, a list.
# limit: the most new tokens
Prompt = namedtuple("Prompt", "kind question ids limit")

def questions_of(document):
    """What a text.Document asks -> [[Turn]]: each question, after the turns since the one before.

    Where a question follows another one directly, the answer between is left open.  LeftOut where
    it asks nothing.
    """
    turns = document.turns
    if turns and turns[0].role in ("text", "ids"):
        return [list(takewhile(lambda turn: not turn.learned, turns)) or turns]
    ends = [i for i, turn in enumerate(turns, 1) if turn.role == "user"]
    if not ends:
        raise text.LeftOut(document.note or "it has no question")
    return [turns[start:end] for start, end in zip([0, *ends], ends)]

def alternating(documents):
    """Sort documents: the first one of each kind of text, then the second of each, and so on."""
    count, numbered = Counter(), []
    for document in documents:
        count[document.kind] += 1
        numbered.append((count[document.kind], document))
    numbered.sort(key=lambda pair: pair[0])
    return [document for _, document in numbered]

def asked(document, loaded, template, new_tokens):
    """Yield the prompt of each question of a text.Document, as token ids.

    Where it has no answer to the question before, the target itself answers, untimed.
    """
    target, tokenizer = loaded.target, loaded.tokenizer
    turns, ids = [], None
    try:
        for part in questions_of(document):
            if turns and part[0].role == "user":         # nobody has answered the question before
                out = verify.generate(target, None, verify.root_only, ids, new_tokens,
                                      eos=loaded.eos)
                answer = tokenizer.decode(out.tokens, skip_special_tokens=True)
                turns.append(text.Turn("assistant", answer, False))
            turns += part
            ids = chats.prompt_ids(turns, tokenizer, template, document.row.get("tools"))
            if not ids or max(ids) >= target.config.vocab_size:
                raise text.LeftOut("it has no tokens, or others than the target's")
            yield ids
    except text.LeftOut as why:
        raise UserError(f"{document.place} asks nothing ({why}): correct the row or "
                        "--template") from None

def read_prompts(paths, loaded, new_tokens, limit=None, template=None):
    """Files of prompts -> at most `limit` Prompts, the kinds of text alternating.

    loaded: a load.Loaded.  template: as of chats.template_of.
    """
    template = chats.template_of(template, loaded.tokenizer)
    prompts, too_long = [], 0
    for number, document in enumerate(alternating(text.documents(paths))):
        for ids in asked(document, loaded, template, new_tokens):
            remaining = loaded.target.remaining(ids)
            if remaining < 1:
                too_long += 1                            # and so are all further turns of this chat
                break
            prompts.append(Prompt(document.kind, number, ids, min(new_tokens, remaining)))
            if len(prompts) == limit:
                return prompts
    if too_long:
        loaded.notes.append(f"left out: {too_long} prompts that exceed the target's context")
    if not prompts:
        raise UserError(f"{' '.join(map(str, paths))}: no prompt is there, or none that fits the "
                        f"target's context of {loaded.target.context} tokens")
    return prompts
