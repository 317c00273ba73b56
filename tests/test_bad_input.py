"""Whatever a user gets wrong is one sentence on stderr and exit status 2: no traceback, and no file
of theirs is touched.

A case: a program, its arguments, some words of the sentence.  MODEL, DRAFTERS and PROMPTS are those
of conftest.small, T/NAME what files() makes, OUT a folder that is not there.
"""
import importlib
import json
import re
import shutil

import pytest
import torch
from helpers import TEXT, tokenizer_of, write_rows
from safetensors.torch import load_file, save_file

import bench

PROGRAMS = {"bench.py": "bench", "train.py": "train", "prepare.py": "training.prepare",
            "bigram.py": "training.bigram",
            "convert.py": "training.convert"}
BENCH = ("--target MODEL --checkpoint DRAFTERS --prompts PROMPTS --max-new-tokens 4 --device cpu "
         "--limit 1 --drafter maxgram --tree chain ")
TRAIN = ("{} --target MODEL --device cpu --data T/texts.jsonl --length 32 --steps 4 --batch 3 "
         "--out OUT {}")

CASES = [("bench.py", BENCH + flags, words) for flags, words in (
    ("--json /no/such/r.jsonl", "--json /no/such/r.jsonl: its folder does not exist"),
    ("--device cuda:99", "the target MODEL cannot be loaded"),
    ("--target no/such/folder", "the target no/such/folder cannot be loaded"),
    ("--target T/weights", "the target T/weights cannot be loaded"),
    # trees
    ("--tree bush", "there is no tree called 'bush'"),
    ("--tree pct(wdith=7)", "pct takes cost=0.05, width=5"),
    ("--tree cape(sizes=(3,1))", "maxgram x cape(sizes=(3, 1)): "),
    ("--tree graft(depth=3)", "no maxgram x graft(depth=3): "),
    ("--drafter glide --tree graft", "graft takes --drafter mixture(...) or maxgram"),
    # drafters
    ("--checkpoint nowhere", "the folder nowhere, in which drafters should lie, does not exist"),
    ("--drafter cascade(maxgram,base)", "name the largest model first, maxgram last"),
    ("--drafter cascade(base,k=(1,2))", "1 model(s) take 1 whole number(s)"),
    ("--drafter cascade(base,lenience=0.9)", "lenience is 0.9"),
    ("--drafter cascade(T/renamed)", "has another tokenizer than the target"),
    ("--drafter mixture(glide)", "name one drafter of trees"),
    ("--checkpoint T/kind --drafter bush", "cannot be loaded"),
    ("--checkpoint T/cut --drafter glide", "cannot be loaded"),
    ("--drafter glide --target T/other", "made for another target: train one"),
    # prompts
    ("--prompts T/empty.jsonl", "T/empty.jsonl: no prompt is there"),
    ("--prompts T/long.txt", "or none that fits the target's context of 64 tokens"),
    ("--prompts T/chats.jsonl --template T/silent.jinja", "gives no tokens"))]

CASES += [("train.py", TRAIN.format(drafters, flags), words) for drafters, flags, words in (
    ("glide", "--data T/no", "T/no does not exist"),
    ("glide", "--length 65", "the target's context of 64"),
    ("glid", "", "there is no drafter called 'glid': choose among glide"),
    ("glide(layer=3)", "", "glide(layer=3): layer 3 of the target cannot be read"),
    ("glide(loss='lk')", "", "it learns by the loss kl or ce"))]

CASES += [
    ("prepare.py", "T/no --tokenizer MODEL --out OUT", "T/no does not exist"),
    ("bigram.py", "--data T/no --tokenizer MODEL --out OUT", "T/no does not exist"),
    ("convert.py", "no/such/folder --out OUT", "no/such/folder")]

# ---------------------------------------------------------------- what the cases name
def damaged(source, folder, about=None, weights=None, file="training.json", **changes):
    """A copy of a folder: other bytes of its JSON or of its weights, or other values in it."""
    shutil.copytree(source, folder)
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | changes) if about is None else about)
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    return folder

@pytest.fixture(scope="module")
def files(small, tmp_path_factory):
    """T, and what the other names of the table stand for."""
    T = tmp_path_factory.mktemp("bad")
    chat = [{"role": "user", "content": "add a"}, {"role": "assistant", "content": "a + b"}]
    write_rows(T / "chats.jsonl", [{"messages": chat}])
    write_rows(T / "texts.jsonl", [{"text": TEXT * 9, "held_out": i == 1} for i in range(3)])
    (T / "long.txt").write_text(TEXT * 100)
    (T / "empty.jsonl").write_text("")
    (T / "silent.jinja").write_text("{{ x }}")
    glide, model = small / "drafters" / "glide", small / "model"
    damaged(glide, T / "kind" / "bush", kind="bush")
    weights = (glide / "model.safetensors").read_bytes()
    damaged(glide, T / "cut" / "glide", weights=weights[:-40])
    damaged(model, T / "weights", weights=b"xx", file="config.json")
    other = damaged(model, T / "other", file="config.json") / "model.safetensors"
    flipped = {name: weight.flip(0).contiguous() for name, weight in load_file(other).items()}
    save_file(flipped, other)
    renamed = damaged(small / "drafters" / "base", T / "renamed", file="config.json")
    tokenizer_of("another text, of other words " * 9, 290).save_pretrained(renamed)
    return {"T": T, "MODEL": model, "DRAFTERS": small / "drafters",
            "PROMPTS": small / "prompts.jsonl"}

def times(folders):
    return {path: path.stat().st_mtime_ns
            for folder in folders for path in folder.rglob("*") if path.is_file()}

@pytest.mark.parametrize("program, arguments, words", CASES,
                         ids=[f"{case[0]} {case[2]}" for case in CASES])
def test_a_mistake_is_one_sentence(files, program, arguments, words, tmp_path, monkeypatch, capsys):
    for name, path in {**files, "OUT": tmp_path / "out"}.items():
        arguments = re.sub(rf"(?<![\w/]){name}(?=[\s/]|$)", str(path), arguments)
    kept = files["T"], files["DRAFTERS"]
    before = times(kept)
    monkeypatch.chdir(tmp_path)
    assert importlib.import_module(PROGRAMS[program]).main(arguments.split()) == 2
    err = capsys.readouterr().err
    words = words.replace("T/", f"{files['T']}/").replace("MODEL", str(files["MODEL"]))
    assert words in err and err.startswith((f"{program}: ", "main: ")), err
    assert err.count("\n") == 1, err
    assert times(kept) == before

def test_a_defect_of_ours_keeps_its_traceback(monkeypatch, capsys):
    """Memory that does not suffice is a sentence; a fault of CUDA's is no user's mistake."""
    def main_after(why):
        def drafter_calls(names, checkpoint):
            raise why
        monkeypatch.setattr(bench.load, "drafter_calls", drafter_calls)
        return bench.main([])
    assert main_after(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")) == 2
    assert "CUDA out of memory" in capsys.readouterr().err
    assert main_after(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "bench.py: interrupted\n"
    with pytest.raises(RuntimeError, match="memory access"):
        main_after(RuntimeError("CUDA error: an illegal memory access"))
