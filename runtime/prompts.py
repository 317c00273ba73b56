"""Files of prompts -> token ids that a target can continue: the rows of runtime/text.py, tokenised.

    setup = load.Setup("checkpoints/target", "checkpoints")
    prompts_of(setup, ["mt_bench.jsonl"], limit=9, most=128, answer=answer)
"""
from tqdm import tqdm

from runtime import text as read
from verify import UserError

def prompts_of(setup, paths, limit, most, answer, form=None, ask=None, system=None):
    """Files of prompts -> [(group, ids, new tokens that fit the context, at most `most`)].

    limit: of rows, evenly over their groups.  answer(ids) -> text: the target's own, to a question
    that the file leaves open before another one.  form, ask, system: as data.read takes them.
    """
    form = read.template_of(form, setup.tokenizer)
    prompts, left_out = [], 0
    rows = read.prompt_rows(paths, limit)
    for group, row, name in tqdm(rows, "prompts", leave=False, disable=None):
        for ids in read.prompts_of(row, name, setup.tokenizer, form, ask, system, answer):
            if not ids:
                raise UserError(f"{name}: the chat template gives no tokens: mend --template")
            if max(ids) >= setup.target.config.vocab_size:
                raise UserError(f"{name} has token {max(ids)}, but the target's vocabulary is "
                                f"{setup.target.config.vocab_size}")
            remaining = setup.target.remaining(ids)
            if remaining < 1:
                left_out += 1                                    # and all further turns of this row
                break
            prompts.append((group, ids, min(most, remaining)))
    if not prompts:
        raise UserError(f"--prompts: {' '.join(paths)} holds no prompt of at most "
                        f"{setup.target.context} tokens, the target's context")
    if left_out:
        setup.notes.append(f"{left_out} prompts longer than the context left out")
    return prompts
