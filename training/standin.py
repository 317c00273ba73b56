"""Prompts for the stand-in's own text, from which its drafters learn.

    python training/standin.py --out work/prompts.jsonl
    python training/write.py --data work/prompts.jsonl --temperature 0 1 --length 384 \\
        --out work/written.jsonl

Nothing is read but the model.  It begins texts itself, sampled at temperature 1, after its end of
text or after "Question:".  A third of the prompts are beginnings of stories.  A third are the
beginnings of word problems, up to their answer.  A third ask for a story again with another child,
as a third of what the stand-in learned from did.  The same command goes on with its file.
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
from runtime.program import program

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

def begin(target, tokenizer, opening, length, batch):
    """Texts that the model begins itself, sampled, of at most `length` tokens -> list"""
    first = tokenizer(opening)["input_ids"] if opening else [tokenizer.eos_token_id]
    ids = torch.tensor([first] * batch, device=target.device)
    out = target.generate(ids, attention_mask=torch.ones_like(ids), max_length=length,
                          do_sample=True, top_k=0, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.batch_decode(out, skip_special_tokens=True)

# ---------------------------------------------------------------- command line
@program
def main(argv):
    p = argparse.ArgumentParser(description="Let the stand-in begin texts of its three kinds.")
    flag = p.add_argument
    flag("--out", type=Path, required=True, help="file to write, JSON lines")
    flag("--texts", type=int, default=30000, help="prompts to write")
    flag("--batch", type=int, default=256, help="texts that are decoded together")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args(argv)
    dtype = "auto" if a.device.startswith("cuda") else "float32"
    target, tokenizer = load.load_target(str(load.STAND_IN), dtype, a.device)
    lines = a.out.read_text().splitlines() if a.out.exists() else []
    done = [json.loads(line)["source"] for line in lines]
    # Other numbers than those of an interrupted run
    torch.manual_seed(len(done))
    rng = random.Random(len(done))
    for kind, (opening, length, prompt_of) in KINDS.items():
        left = a.texts // len(KINDS) - done.count(kind)
        bar = tqdm(desc=kind, total=max(0, left), unit="prompt", disable=None)
        with bar, open(a.out, "a") as file:
            while left > 0:
                for text in begin(target, tokenizer, opening, length, min(a.batch, left)):
                    prompt = prompt_of(text, rng)
                    if prompt is not None:
                        file.write(json.dumps({"source": kind, "prompt": prompt}) + "\n")
                        left -= 1
                        bar.update()
                file.flush()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
