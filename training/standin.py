"""The stand-in's own text, from which its drafters learn: stories, retellings, word problems.

    python training/standin.py --out work/stand-in/written.jsonl
    python train.py "glide(layer=13)" "edd(hidden=10)" --data work/stand-in/written.jsonl

Nothing is read but the model.  It begins texts itself, sampled at temperature 1, after its end of
text or after "Question:".  A third of the prompts are beginnings of stories.  A third are the
beginnings of word problems, up to their answer.  A third ask for a story again with another child,
as a third of what the stand-in learned from did.  Half of the prompts are then answered greedily,
the other half at temperature 1.  The rows are those of write.py.
"""
import json
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))      # so that it runs from anywhere

import torch
from tqdm import tqdm

from runtime import load
from runtime.program import Parser, write_atomically
from training.state import program
from training.batched import write
from runtime.errors import UserError

# Children of the stand-in's stories: one of them takes the place of another of the same line.
GIRLS = "Lily Sue Lucy Mia Anna Amy Sara Sally Jane Molly Emma Mary Ella Jenny Lisa Kate".split()
BOYS = "Tim Tom Ben Sam Max Timmy Bob Jack Joe John Billy Jimmy Andy Peter Leo Bobby".split()
AGAIN = (
    "Tell the same story with {new} instead of {old}.",
    "Tell it again with {new} instead of {old}.",
    "Write the story again with {new} instead of {old}.",
)
TEMPERATURES = (0.0, 1.0)             # of the answers, in turn

# ---------------------------------------------------------------- prompts
def story_beginning(story, rng):
    """The first words of a story, some 15 to 60 of them, or None where it is too short."""
    words = re.findall(r"\S+\s*", story)
    size = rng.randint(15, 60)
    return "".join(words[:size]).rstrip() if len(words) > size else None

def word_problem(question):
    """A word problem up to its answer, or None where it has none."""
    problem, found, _ = question.partition("\nAnswer:")
    return problem + found if found else None

def retelling(story, rng):
    """A short story, and the request to tell it again with another child; None without a child."""
    sentences = re.findall(r"[^.!?]*[.!?]+\"?\s*", story)
    short = "".join(sentences[:rng.randint(4, 8)]).strip()
    children = [name for name in GIRLS + BOYS if re.search(rf"\b{name}\b", short)]
    if not children:
        return None
    old = max(children, key=short.count)
    new = rng.choice([name for name in (GIRLS if old in GIRLS else BOYS) if name != old])
    request = rng.choice(AGAIN).format(new=new, old=old)
    return f"{short}\n\n{request}\n\n"

def prompts_of(texts, kinds, rng):
    """Texts that the model began, and what to make of each -> [(kind, prompt)], each once."""
    found = {}
    for begun, kind in zip(texts, kinds):
        if kind == "story":
            prompt = story_beginning(begun, rng)
        elif kind == "math":
            prompt = word_problem(begun)
        else:
            prompt = retelling(begun, rng)
        if prompt:
            found.setdefault(prompt, kind)
    return [(kind, prompt) for prompt, kind in found.items()]

# ---------------------------------------------------------------- command line
@program
def main(argv):
    p = Parser(description="Let the stand-in write text of its three kinds.")
    p.add_argument("--out", required=True, help="file to write, JSON lines")
    p.add_argument("--texts", type=int, default=30000, help="texts that the model begins")
    p.add_argument("--length", type=int, default=384, help="tokens of a prompt and its answer")
    p.add_argument("--batch", type=int, default=256, help="texts that are decoded together")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args(argv)
    if min(a.texts, a.batch) < 1 or not 256 <= a.length <= 512:
        raise UserError("--texts and --batch must be above 0, --length from 256 to 512")
    dtype = "auto" if a.device.startswith("cuda") else "float32"
    target, tokenizer = load.load_target(str(load.STAND_IN), dtype, a.device)
    torch.manual_seed(a.seed)
    rng = random.Random(a.seed)

    # Begin
    end = tokenizer.eos_token_id
    kinds = [("story", "math", "retell")[i % 3] for i in range(a.texts)]
    first = {"story": [end], "math": tokenizer("Question:")["input_ids"], "retell": [end]}
    lengths = {"story": 100, "math": 180, "retell": 200}
    begun = write(target, [first[kind] for kind in kinds], [lengths[kind] for kind in kinds],
                  a.batch, [1.0] * a.texts)
    texts = [""] * a.texts
    for number, ids in tqdm(begun, total=a.texts, unit="text", desc="begin", disable=None):
        texts[number] = tokenizer.decode(ids, skip_special_tokens=True)
    prompts = prompts_of(texts, kinds, rng)

    # Answer
    given = [tokenizer(prompt)["input_ids"] for _, prompt in prompts]
    temperatures = [TEMPERATURES[i % len(TEMPERATURES)] for i in range(len(prompts))]
    answered = write(target, given, [a.length] * len(prompts), a.batch, temperatures)
    bar = tqdm(answered, total=len(prompts), unit="text", desc="answer", disable=None)
    tokens = dict.fromkeys(first, 0)                     # of the answers, by kind

    def write_rows(part):
        with open(part, "w") as file:
            for number, ids in bar:
                kind, _ = prompts[number]
                prompt, answer = ids[:len(given[number])], ids[len(given[number]):]
                row = {"source": kind, "temperature": temperatures[number],
                       "prompt": prompt, "answer": answer}
                file.write(json.dumps(row) + "\n")
                tokens[kind] += len(answer)

    out = Path(a.out)
    write_atomically(out, write_rows)
    counts = ", ".join(f"{kind} {count}" for kind, count in tokens.items())
    print(f"saved {out}: {len(prompts)} texts; tokens of answers: {counts}")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
