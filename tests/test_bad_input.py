"""What a user gets wrong is one sentence on stderr and exit status 2: no traceback.

A case: some words of the sentence, a program, its arguments.  MODEL and DRAFTERS are those of
conftest.small, T/NAME what files() makes.
"""
import importlib
import shutil

import pytest
import torch
from helpers import TEXT, tokenizer_of
from safetensors.torch import load_file, save_file

import bench

BENCH = "--target MODEL --checkpoint DRAFTERS --prompts T/p.txt --device cpu --drafter maxgram "
TRAIN = "glide --target MODEL --device cpu --data T/long.txt --steps 4 --length 32 --out T/out "
CASES = {
    "no/such/folder": ("bench", BENCH + "--target no/such/folder"),
    "there is no tree called 'bush'": ("bench", BENCH + "--tree bush"),
    "there is no drafter in nowhere called 'glide'": (
        "bench", BENCH + "--checkpoint nowhere --drafter glide"),
    "pct takes cost=0.05, width=5": ("bench", BENCH + "--tree pct(wdith=7)"),
    "graft takes a mixture": ("bench", BENCH + "--drafter glide --tree graft(depth=3)"),
    "1 model(s) take 1 number(s)": ("bench", BENCH + "--drafter cascade(base,k=(1,2))"),
    "cascades draft chains alone": ("bench", BENCH + "--tree pct"),
    "has another tokenizer": ("bench", BENCH + "--drafter cascade(T/renamed) --tree chain"),
    "T/torn/training.json holds no drafter (JSON": ("bench", BENCH + "--checkpoint T/torn"),
    "made for another target: train one": ("bench", BENCH + "--drafter glide --target T/other"),
    "T/empty.jsonl: no prompt is there": ("bench", BENCH + "--prompts T/empty.jsonl"),
    "the target's context of 64": ("train", TRAIN + "--length 65"),
    "choose loss='kl' or 'ce'": ("train", TRAIN.replace("glide", "glide(loss='mse')")),
    "layer 3 of LlamaForCausalLM": ("train", TRAIN.replace("glide", "glide(layer=3)")),
    "no/data does not exist": ("training.prepare", "no/data --tokenizer MODEL --out T/new")}

@pytest.fixture(scope="module")
def files(small, tmp_path_factory):
    """What the names of the table stand for."""
    T = tmp_path_factory.mktemp("bad")
    (T / "p.txt").write_text("def add(")
    (T / "long.txt").write_text(TEXT * 99)
    (T / "empty.jsonl").write_text("")
    (T / "torn").mkdir()
    (T / "torn" / "training.json").write_text('{"kind": ')
    shutil.copytree(small / "model", T / "other")
    weights = load_file(T / "other" / "model.safetensors")
    flipped = {name: weight.flip(0).contiguous() for name, weight in weights.items()}
    save_file(flipped, T / "other" / "model.safetensors", {"format": "pt"})
    shutil.copytree(small / "drafters" / "base", T / "renamed")
    tokenizer_of("another text, of other words " * 9, 290).save_pretrained(T / "renamed")
    return {"T/": f"{T}/", "MODEL": str(small / "model"), "DRAFTERS": str(small / "drafters")}

@pytest.mark.parametrize("words", CASES)
def test_a_mistake_is_one_sentence(files, words, capsys):
    program, arguments = CASES[words]
    for name, path in files.items():
        words, arguments = [text.replace(name, path) for text in (words, arguments)]
    assert importlib.import_module(program).main(arguments.split()) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1, err

@pytest.mark.parametrize("flag, least", [("--batch=0", 1), ("--temperature=nan", 0.0),
                                         ("--temperature=1e400", 0.0)])
def test_a_number_that_a_flag_does_not_take(flag, least, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.main([flag])
    assert f"give a finite number, {least} or more" in capsys.readouterr().err

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
