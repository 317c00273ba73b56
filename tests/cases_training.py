"""What users get wrong about training: the program, its arguments, words of the one sentence that it says.

T is a folder with what make_files() writes; TARGET and TRAIN stand for flags that would work.  test_train.py runs the table.
"""
import json
import os
import shutil

import numpy as np
import torch

from training import prepare

TARGET = "--target T/model --device cpu"
TRAIN = f"{TARGET} --work T/w --out T/o --length 40 --steps 1 --batch 1 --width 16 --dtype float32"
MAKE = "--data T/good.jsonl --work T/w --out T/o --device cpu"
WRITE = f"continuations {TARGET} --length 40 --out T/o.jsonl"

CASES = [
    # names and numbers
    ("train.py", "glid --data T/good.jsonl --device cpu", "cannot train glid"),
    ("train.py", "", "required: what"), ("train.py", "glide", "required: --data"), ("train.py", "glide --dat x --width x --data x", "invalid int value"),
    *(("train.py", f"glide --data T/good.jsonl {flag} {value}", f"{flag} is {value}") for flag, value in (
        ("--steps", "-1"), ("--lr", "0.0"), ("--lr", "inf"), ("--lr", "nan"), ("--every", "0"), ("--block", "-2"))),
    ("train.py", "glide --data T/good.jsonl --length 6", "longer than a block"),
    # folders
    ("train.py", "glide --data T/good.jsonl --device cpu --out T/good.jsonl/x",
     "--out: T/good.jsonl/x/glide is no folder that can be written to"),
    ("train.py", "glide --data T/good.jsonl --device cpu --out T/foreign --work T/w", "T/foreign/glide holds files that no training.json accounts for"),
    ("train.py", f"glide {TRAIN} --data T/good.jsonl --resume", "there is no interrupted run"),
    ("train.py", f"glide {TRAIN} --data T/good.jsonl --work T/damaged-state", "cannot be read"),
    ("train.py", f"glide {TRAIN} --data T/good.jsonl --work T/foreign-state --resume", "no state of a training run"),
    ("train.py", f"glide {TRAIN} --data T/good.jsonl --init T/nothing", "no drafter in"),
    # the target
    ("train.py", "glide --data T/good.jsonl --device cpu --target T/foreign --work T/w --out T/o", "cannot be loaded"),
    ("train.py", f"glide {TRAIN} --data T/good.jsonl --length 65", "--length 65 is more than the target's context of 64"),
    ("train.py", f"glide {TRAIN} --data T/good.jsonl --layer 7", "cannot be read"), ("train.py", f"edd-h9 {TRAIN} --data T/good.jsonl", "no layer's output"),
    ("train.py", f"glide {TRAIN} --data T/good.jsonl --width 100000000", "billion weights needs"),
    # data
    ("train.py", f"glide {TRAIN} --data T/no", "T/no does not exist"), ("train.py", f"glide {TRAIN} --data T/empty", "has no text"),
    ("train.py", f"glide {TRAIN} --data T/short.txt", "too few tokens"), ("train.py", f"glide {TRAIN} --data T/pipe", "T/pipe is no file: write to a file"),
    ("train.py", f"glide {TRAIN} --data T/late.jsonl", "no chat's first answer begins early enough"),
    *(("train.py", f"glide {TRAIN} --data T/{name}.jsonl", words) for name, words in (
        ("times-text", '"times" is \'3\''), ("times-less", '"times" is -1'), ("held", '"held_out" is \'no\''),
        ("ids-float", "row 1 of T/ids-float.jsonl cannot be read (token ids are whole numbers"),
        ("ids-nested", "token ids are whole numbers"), ("ids-less", "token ids are whole numbers"),
        ("ids-large", "holds token id 300, the target has 300 tokens"), ("unknown", "has no text"))),
    *(("train.py", f"glide {TRAIN} --data T/{name}", "is damaged, or was not prepared by") for name in (
        "ready-meta", "ready-index", "ready-bin", "ready-range")),
    ("train.py", f"glide {TRAIN} --data T/ready --template vicuna", "was prepared with another tokenizer or --template"),
    ("train.py", f"glide {TRAIN} --data T/ready-large", "T/ready-large holds token id 300, the target has 300 tokens"),
    # templates
    ("train.py", f"glide {TRAIN} --data T/good.jsonl --template x", "--template x: say plain vicuna"),
    ("train.py", f"glide {TRAIN} --data T/good.jsonl --template T/broken.jinja", "--template: T/broken.jinja is no Jinja template"),
    ("train.py", f"glide {TRAIN} --data T/chats.jsonl --template T/refuses.jinja", "none that the chat template takes"),
    # prepare.py
    ("prepare.py", "T/good.jsonl --tokenizer T/no --out T/o", "--tokenizer: T/no cannot be loaded"),
    ("prepare.py", "T/good.jsonl --tokenizer T/model --out T/foreign", "T/foreign holds something else than prepared data"),
    ("prepare.py", "T/good.jsonl --tokenizer T/model --out T/ready-meta", "is damaged, or was not prepared by"),
    # make.py
    *(("make.py", f"target {MAKE} {flag} {value}", f"{flag} is {value}") for flag, value in (
        ("--vocab", "256"), ("--width", "100"), ("--length", "1"), ("--repeat", "1.5"), ("--first-share", "-0.5"))),
    ("make.py", "target --data T/ids.jsonl --work T/w --out T/o --device cpu", "a tokenizer is trained on text"),
    ("make.py", f"{WRITE} --data T/good.jsonl --temperature -1.0", "--temperature is -1.0"), ("make.py", f"{WRITE} --data T/empty", "no document that begins"),
    ("make.py", f"{WRITE} --data T/good.jsonl --out T/good.jsonl", "good.jsonl exists"),
    ("make.py", f"{WRITE} --data T/good.jsonl --out T/good.jsonl --resume", "holds something else than what this command writes"),
    ("make.py", "bigram", "required: --corpus"), ("make.py", "bigram --corpus T/no --tokenizer T/model --out T/b.json", "--corpus: T/no does not exist"),
    *(("make.py", f"bigram --corpus T/{name} --tokenizer T/model --out T/b.json", words) for name, words in (
        ("nothing", "holds no text"), ("uneven.bin", "odd number of bytes"), ("high.bin", "the corpus holds token id 60000"))),
    ("make.py", "bigram --corpus T/good.jsonl --tokenizer T/nothing --out T/b.json", "--tokenizer"),
    ("make.py", "bigram --corpus T/good.jsonl --tokenizer T/model --out T/nothing", "is a folder"),
    ("make.py", f"agreement {TARGET} --data T/good.jsonl --checkpoint T/no", "bigram.json"),
    ("make.py", "corpus --stories T/number.jsonl --out T/o", "row 1 of T/number.jsonl is no story"),
    # smollm2.py
    ("smollm2.py", "words --target T/model --data T/ids-large.jsonl --out T/o", "holds token id 300"),
    *(("smollm2.py", f"prompts --data T/{data} --out T/o", words) for data, words in (
        ("number.jsonl", "row 1 of T/number.jsonl asks nothing"), ("unknown.jsonl", "asks nothing"), ("good.jsonl --most 0", "--most is 0"))),
]

def make_files(folder, model, text):
    """All that the cases name, in `folder`."""
    shutil.copytree(model, folder / "model")
    good = [{"text": text[i:] + text, "held_out": i == 1} for i in range(4)]
    chat = [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]
    late = [{"role": "user", "content": text * 3}, {"role": "assistant", "content": text}]
    files = {"good": good, "late": [{"messages": late}] * 9, "chats": [{"messages": chat}] * 3, "ids": [{"ids": [1, 2]}],
             "unknown": [{"body": "x"}], "number": [5], "held": [{"text": "a", "held_out": "no"}]}
    files |= {f"times-{name}": [{"text": "a", "times": times}] for name, times in (("text", "3"), ("less", -1))}
    wrong = {"float": [1.5, 2], "nested": [[1], [2]], "less": [3, -1], "large": [1, 300]}
    files |= {f"ids-{name}": [{"ids": ids}] for name, ids in wrong.items()}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("empty/.git", "nothing", "foreign/glide", "damaged-state", "foreign-state"):
        (folder / name).mkdir(parents=True)
    for name, content in {"short.txt": b"a", "bytes.txt": b"\xff\xfe\xff", "broken.jinja": b"{% for %}", "refuses.jinja": b"{{ raise_exception('no') }}",
                          "uneven.bin": b"abc", "high.bin": b"\1\0\x60\xea", "empty/.git/config": text.encode() * 9,
                          "foreign/glide/model.safetensors": b"precious", "damaged-state/state.pt": b"half"}.items():
        (folder / name).write_bytes(content)
    torch.save({}, folder / "foreign-state" / "state.pt")
    os.mkfifo(folder / "pipe")
    from transformers import AutoTokenizer
    ready, _ = (prepare.prepare([folder / f"{rows}.jsonl"], AutoTokenizer.from_pretrained(model), folder / name)
                for rows, name in (("good", "ready"), ("ids-large", "ready-large")))
    index = np.load(ready / "train.npy")

    def damaged(name, file, write):
        shutil.copytree(ready, folder / f"ready-{name}")
        write(folder / f"ready-{name}" / file)
    damaged("meta", "meta.json", lambda path: path.write_text("{}"))
    damaged("index", "train.npy", lambda path: path.write_bytes(b"no array"))
    damaged("bin", "train.bin", lambda path: path.write_bytes(path.read_bytes()[:-3]))
    damaged("range", "train.npy", lambda path: np.save(path, index + [10 ** 6, 0, 0]))
