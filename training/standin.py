"""The stand-in's own text, from which its drafters learn: stories, retellings, word problems.

    python training/standin.py --out work/stand-in/written.jsonl
    python train.py "glide(layer=13)" "edd(hidden=10)" --data work/stand-in/written.jsonl

Nothing is read but the model.  It begins texts itself, sampled at temperature 1, after its end of
text or after "Question:".  A third of the prompts are beginnings of stories.  A third are the
beginnings of word problems, up to their answer.  A third ask for a story again with another child,
as a third of what the stand-in learned from did.  Half of the prompts are then answered greedily,
the other half at temperature 1.  The rows are those of write.py.  Prompts and rows are written as
they are finished, and the same command goes on.
"""
import argparse
import json
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import torch
from tqdm import tqdm

from runtime import load
from runtime.program import at_least, program
from training import batched

LENGTH = 384                       # tokens of a prompt and its answer
# Children of the stand-in's stories: one of them takes the place of another of the same line.
GIRLS = "Lily Sue Lucy Mia Anna Amy Sara Sally Jane Molly Emma Mary Ella Jenny Lisa Kate".split()
BOYS = "Tim Tom Ben Sam Max Timmy Bob Jack Joe John Billy Jimmy Andy Peter Leo Bobby".split()
AGAIN = (
    "Tell the same story with {new} instead of {old}.",
    "Tell it again with {new} instead of {old}.",
    "Write the story again with {new} instead of {old}.",
)

# ---------------------------------------------------------------- prompts
# Each makes a prompt of a text that the model began, or None where the text does not serve.
def story_beginning(story, rng):
    """The first 15 to 60 words of a story."""
    words = re.findall(r"\S+\s*", story)
    size = rng.randint(15, 60)
    return "".join(words[:size]).rstrip() if len(words) > size else None

def word_problem(question, rng):
    """A word problem up to its answer."""
    problem, found, _ = question.partition("\nAnswer:")
    return problem + found if found else None

def retelling(story, rng):
    """A short story, and the request to tell it again with another child."""
    sentences = re.findall(r"[^.!?]*[.!?]+\"?\s*", story)
    short = "".join(sentences[:rng.randint(4, 8)]).strip()
    children = [name for name in GIRLS + BOYS if re.search(rf"\b{name}\b", short)]
    if not children:
        return None
    old = max(children, key=short.count)
    new = rng.choice([name for name in (GIRLS if old in GIRLS else BOYS) if name != old])
    request = rng.choice(AGAIN).format(new=new, old=old)
    return f"{short}\n\n{request}\n\n"

# {kind: (what the model begins with, "" for its end of text; length; what makes a prompt of it)}
KINDS = {
    "story": ("", 100, story_beginning),
    "math": ("Question:", 180, word_problem),
    "retell": ("", 200, retelling),
}

def begin(path, target, tokenizer, count, batch):
    """Append prompts to a file until it has `count` of each kind -> [(kind, ids)], shuffled."""
    rows = batched.kept_rows(path)
    # Other numbers than those of an interrupted run
    torch.manual_seed(len(rows))
    rng = random.Random(len(rows))
    for kind, (opening, length, prompt_of) in KINDS.items():
        first = tokenizer(opening)["input_ids"] if opening else [tokenizer.eos_token_id]
        left = count - sum(row["source"] == kind for row in rows)
        bar = tqdm(desc=f"begin {kind}", total=max(0, left), unit="prompt", disable=None)
        with bar, open(path, "a", buffering=1) as file:          # a line is written at once
            while left > 0:
                some = min(batch, left)
                for _, ids in batched.write(target, [first] * some, length, batch, 1.0):
                    text = tokenizer.decode(first + ids, skip_special_tokens=True)
                    prompt = prompt_of(text, rng)
                    if prompt is None:
                        continue
                    rows.append({"source": kind, "prompt": prompt})
                    file.write(json.dumps(rows[-1]) + "\n")
                    left -= 1
                    bar.update()
    kinds = {row["prompt"]: row["source"] for row in rows}               # each prompt once
    prompts = [(kind, tokenizer(prompt)["input_ids"]) for prompt, kind in kinds.items()]
    random.Random(0).shuffle(prompts)
    return prompts

# ---------------------------------------------------------------- command line
@program
def main(argv):
    p = argparse.ArgumentParser(description="Let the stand-in write text of its three kinds.")
    flag = p.add_argument
    flag("--out", required=True, help="file to write, JSON lines; beside it FILE.prompts")
    flag("--texts", type=at_least(len(KINDS)), default=30000, help="texts that the model writes")
    flag("--batch", type=at_least(1), default=256, help="texts that are decoded together")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args(argv)
    target, tokenizer = load.load_target(load.STAND_IN, "float32", a.device)
    prompts = begin(Path(f"{a.out}.prompts"), target, tokenizer, a.texts // len(KINDS), a.batch)
    batched.append(Path(a.out), target, tokenizer, prompts, LENGTH, a.batch, [0.0, 1.0])

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
