"""make.py's part: the stand-in's corpus on disk, stories, retellings and word problems.

A row is {"source", "text", "held_out", "times"}.  The last fiftieth of each source is held out, and
retellings with their stories.
"""
import json
import random
import re
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from data import read
from data.corpus import ASCII, BRIEF, EOS, FORMS, PROBLEM, RETELL, retellings, story_text
from data.read import UserError


def texts_of(path):
    """Yield the texts of a file: of its rows, or of a text file what stands between EOS."""
    begun = ""                                             # a text that goes on in the next piece
    for number, row in enumerate(read.read_rows(path), 1):
        text = row.get("text", "") if isinstance(row, dict) else row
        if not isinstance(text, str):
            raise UserError(f"row {number} of {path} is no story: give text, or rows "
                            "with a \"text\"")
        *whole, begun = (begun + text).split(EOS)
        yield from whole
        if getattr(row, "last", True):
            yield begun
            begun = ""


def read_stories(paths):
    """Stories of files -> (those kept, how many were read)."""
    kept, total = {}, 0
    for path in paths:
        for text in texts_of(path):
            total += 1
            kept[story_text(text)] = None                  # a story that comes twice is kept once
    kept.pop(None, None)
    return list(kept), total


def make_rows(source, texts, times):
    """Rows of the corpus; the last fiftieth is held out."""
    first = len(texts) * 0.98
    rows = []
    for i, text in enumerate(texts):
        held = i >= first
        row = {"source": source, "text": text, "held_out": held, "times": 1 if held else times}
        rows.append(row)
    return rows


def retell_rows(stories, seed):
    """Rows of retellings, of each form the share that FORMS says; held out as their stories."""
    made = {(form, held): [] for form in FORMS for held in (False, True)}
    for i, row in enumerate(tqdm(stories, unit=" stories", disable=None)):
        for form, text in retellings(row["text"], f"{seed} {i}"):
            made[form, row["held_out"]].append(text)
    rows, rng = [], random.Random(seed)
    for (form, held), texts in made.items():
        size = sum(len(row["text"]) * row["times"] for row in stories if row["held_out"] == held)
        left = size * RETELL * FORMS[form]
        times = 1 if sum(map(len, texts)) > left * 0.75 or held else 2       # a form that is rare
        rng.shuffle(texts)
        for text in texts:
            if left > 0:
                left -= len(text) * times
                row = {"source": "retell", "text": text, "held_out": held, "times": times}
                rows.append(row | {"form": form})
    rng.shuffle(rows)
    return rows


def problems(path):
    """The texts of GSM8K's word problems, without the calculator's notes."""
    texts = []
    for row in read.read_rows(path):
        if not isinstance(row, dict) or not {"question", "answer"} <= row.keys():
            raise UserError(f"--math: {path} has a row without a question and an answer")
        answer = re.sub(r"<<.*?>>", "", row["answer"])
        text = read.document({"question": row["question"], "answer": answer}).strip()
        for odd, plain in ASCII.items():
            text = text.replace(odd, plain)
        texts.append(text)
    return texts


def save_corpus(folder, sources):
    """A file for each source, and a line about each."""
    size = {}
    for name, rows in sources.items():
        size[name] = sum(len(row["text"]) * row["times"] for row in rows)
    for name, rows in sources.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = Path(folder) / f"{name}.jsonl"
        read.write_atomically(path, lambda part, text=text: part.write_text(text))
        times, share = max(row["times"] for row in rows), size[name] / sum(size.values())
        forms = Counter(row["form"] for row in rows if "form" in row)
        print(f"{path}: {len(rows)} documents, {size[name] / 1e6:.2f}M characters with {times} "
              f"times, {share:.0%}", *(f"{form} {n}" for form, n in forms.items()))


def write_corpus(a):
    """`make.py corpus`: the rows for both parts of the training."""
    for flag in ("stories", "sampled", "math"):
        for path in getattr(a, flag):
            if not Path(path).is_file():
                raise UserError(f"--{flag}: {path} does not exist")
    math = [text for path in a.math for text in problems(path)]
    kept = [text for text in math if len(text) <= PROBLEM]
    print(f"math: {len(math) - len(kept)} of {len(math)} problems left out as too long")
    for flag, name, folder, story_times, math_times in (
            ("stories", "stories", a.out, 3, 1), ("sampled", "sampled", f"{a.out}-first", 1, 2)):
        if not getattr(a, flag):
            continue
        stories, total = read_stories(getattr(a, flag))
        print(f"{name}: {total - len(stories)} of {total} left out as cut off, short, long, odd or "
              "read before")
        rows = make_rows(name, stories, story_times)
        sources = {name: rows, "retell": retell_rows(rows, name)}
        if kept:
            sources["math"] = make_rows("math", kept, 1)
            for row in sources["math"]:
                brief = len(row["text"]) <= BRIEF and not row["held_out"]
                row["times"] = math_times if brief else 1
        save_corpus(folder, sources)
