"""Files of prompts, as bench.py decodes after them: their questions as token ids."""
from collections import namedtuple

import verify
from runtime import chats, text
from runtime.program import UserError

# kind: of text.  question: a number, which all prompts of one chat share.  ids: token ids, a list.
# limit: the most new tokens
Prompt = namedtuple("Prompt", "kind question ids limit")

def read_prompts(paths, loaded, new_tokens, limit=None, template=None, template_args=None):
    """Files of prompts -> at most `limit` Prompts, the kinds of text alternating.

    loaded: a load.Loaded.  template, template_args: as of chats.template_of.
    """
    def answer(ids):
        """The target's own answer to an earlier question, where the chat has none; untimed."""
        out = verify.generate(loaded.target, None, verify.root_only, ids, new_tokens,
                              eos=loaded.eos)
        return loaded.tokenizer.decode(out.tokens, skip_special_tokens=True)

    prompts, too_long = [], 0
    vocab = loaded.target.config.vocab_size
    for number, (kind, document) in enumerate(text.prompt_rows(paths)):
        for ids in chats.questions(document, loaded.tokenizer, template, vocab, answer,
                                   template_args):
            remaining = loaded.target.remaining(ids)
            if remaining < 1:
                too_long += 1                            # and so are all further turns of this chat
                break
            prompts.append(Prompt(kind, number, ids, min(new_tokens, remaining)))
            if len(prompts) == limit:
                return prompts
    names = " ".join(map(str, paths))
    if too_long:
        loaded.notes.append(f"left out: {too_long} prompts that exceed the target's context")
    if not prompts:
        raise UserError(f"{names}: no prompt is there, or none that fits the target's context of "
                        f"{loaded.target.context} tokens")
    return prompts
