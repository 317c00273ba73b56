"""Whatever a user gets wrong is one sentence on stderr and exit status 2: no traceback, and no file of theirs is touched.

A case: a program, its arguments, some words of the sentence.  MODEL, DRAFTERS and PROMPTS are those of the tiny target of test_bench.py,
T/NAME what files() makes, OUT a folder that is not there.
"""
import json
import shutil

import costs
import paper
import probe
import pytest
import rounds
from safetensors.torch import load_file, save_file
from test_bench import TEXT, small, tokenizer_of  # noqa: F401 (small: a fixture)

import bench
import train
from training import bigram, convert, prepare, smollm2, write

PROGRAMS = {"bench.py": bench, "train.py": train, "prepare.py": prepare, "write.py": write, "bigram.py": bigram, "convert.py": convert,
            "smollm2.py": smollm2, "figures/paper.py": paper, "figures/probe.py": probe, "figures/rounds.py": rounds, "figures/costs.py": costs}
BENCH = "--target MODEL --checkpoint DRAFTERS --prompts PROMPTS --max-new-tokens 4 --device cpu --limit 1 --drafter maxgram --tree chain "
TRAIN = "--target MODEL --device cpu --work OUT/w --out OUT/o --length 40 --steps 1 --batch 1 --width 16 --hidden 2 --data T/good.jsonl "
WRITE = "--target MODEL --device cpu --length 40 --data T/good.jsonl --out OUT/o.jsonl "
COUNT = "count --data T/good.jsonl --tokenizer MODEL --out OUT/b.json "
AGREEMENT = "agreement --target MODEL --checkpoint DRAFTERS --data T/good.jsonl "

# ---------------------------------------------------------------- bench.py
CASES = [("bench.py", BENCH + flags, words) for flags, words in (
    # flags
    ("--nonsense", "unrecognized arguments"), ("--limit 0", "--limit is 0"), ("--limit x", "invalid int value"),
    ("--temperature nan", "--temperature is nan"), ("--temperature -1", "--temperature is -1"), ("--top-p 7", "--top-p is 7"),
    ("--top-k 0", "--top-k is 0"), ("--threads 99999999999", "--threads is 99999999999"), ("--seed -1", "--seed is -1"),
    ("--max-new-tokens 0", "--max-new-tokens is 0"), ("--dtype int8", "invalid choice"), ("--graphs", "--graphs: "),
    ("--device x", "--device x is not here: choose cpu"), ("--device cuda:x", "--device cuda:x is not here"),
    ("--device cuda:99", "--device cuda:99 is not here"), ("--json /no/such/r.jsonl", "name a file"), ("--json T", "name a file"),
    # trees
    ("--tree", "expected at least one argument"), ("--tree bush", "there is no tree called 'bush'"), ("--tree pct-cost pct_cost", "name each once"),
    ("--tree chain(", "chain takes gamma=5"), ("--tree chain(gamma=0)", "--tree chain(gamma=0): "), ("--tree drawn", "give --temperature above 0"),
    ("--tree cape(sizes=3)", "--tree cape(sizes=3): "), ("--tree cape(sizes=(3,1))", "--tree cape(sizes=(3, 1)): "), ("--tree pct(depth=-1)", "depth is -1"),
    ("--tree pct(wdith=7)", "pct takes cost=0.05, width=5"), ("--tree pct(width=x)", "pct takes"),
    ("--tree vct(width=60,depth=60)", "more than 512 nodes"), ("--tree vct(width=8,depth=3)", "exceed the 511 that fit"),
    ("--tree chain(gamma=3)", "of its own length"),
    # drafters
    ("--drafter bush", "called 'bush'"), ("--drafter glide(raw=True)", "glide takes no settings"), ("--drafter maxgram(3)", "maxgram takes k=None"),
    ("--drafter maxgram(bigram='T/no.json')", "no.json cannot be read"), ("--drafter maxgram(bigram=3)", "bigram file 3 cannot be read"),
    ("--drafter cascade", "cascade takes names of models"), ("--drafter cascade(nowhere)", "the stage nowhere does not exist"),
    ("--drafter cascade(maxgram,base)", "maxgram last"), ("--drafter cascade(base,k='a')", "cascade(base, k='a')"),
    ("--drafter cascade(base,lenience='x')", "cascade(base, lenience='x')"),
    ("--drafter cascade(base,k=(1,2))", "1 neural stage"), ("--drafter cascade(base,lenience=0.9)", "lenience is 0.9"),
    ("--drafter mixture", "mixture takes a neural drafter"),
    ("--drafter mixture(glide)", "name one drafter of trees"), ("--drafter mixture(nowhere,maxgram)", "nowhere does not exist"),
    ("--drafter cascade(T/renamed)", "has another tokenizer than the target"), ("--checkpoint /no/such --drafter glide", "choose among maxgram"),
    ("--checkpoint T/kind --drafter bush", "bush is no kind of drafter"), ("--checkpoint T/no-json --drafter glide", "is damaged"),
    ("--checkpoint T/cut --drafter glide", "cannot be loaded"), ("--checkpoint T/heads --drafter glide", "cannot be loaded"),
    ("--checkpoint T/no-weights --drafter glide", "model.safetensors"), ("--checkpoint T/unprobed --drafter glide", "made for another target"),
    ("--drafter glide --target T/other", "made for another target: train one"),
    # targets
    ("--target nowhere", "the target nowhere does not exist"), ("--target /no/such/model", "does not exist"), ("--target DRAFTERS/glide", "cannot be loaded"),
    ("--target T/config", "cannot be loaded"), ("--target T/weights", "cannot be loaded"), ("--target T/activation", "cannot be loaded"),
    # prompts
    ("--prompts T/no", "--prompts: "), ("--prompts T/empty", "holds no prompt"), ("--prompts T/empty.jsonl", "asks nothing"),
    ("--prompts T/long.txt", "holds no prompt of at most 64 tokens"), ("--prompts T/bytes.txt", "cannot be read as text"),
    ("--prompts T/cut.jsonl", "cannot be read as text"), ("--prompts T/bytes.gz", "cannot be read as text"), ("--prompts T/number.jsonl", "asks nothing"),
    ("--prompts T/unknown.jsonl", "row 1 of "), ("--template bush", "choose plain or vicuna"),
    ("--prompts T/chats.jsonl --template T/broken.jinja", "the chat template refuses"),
    ("--prompts T/chats.jsonl --template T/refuses.jinja", "the chat template refuses"),
    ("--prompts T/chats.jsonl --template T/silent.jinja", "gives no tokens"))]
# ---------------------------------------------------------------- train.py, training/
CASES += [("train.py", flags, words) for flags, words in (
    ("", "required: what"), ("glide", "required: --data"), ("glid " + TRAIN, "cannot train glid"), ("glide-top edd-l3 " + TRAIN, "edd has no variants -l"),
    ("glide --width x", "invalid int value"),
    *((f"glide {TRAIN} {flag} {value}", f"{flag} is {value}") for flag, value in (
        ("--steps", "-1"), ("--lr", "0.0"), ("--lr", "inf"), ("--lr", "nan"), ("--every", "0"), ("--block", "-2"), ("--words", "0"))),
    (f"glide {TRAIN} --length 6", "longer than a block"), (f"glide {TRAIN} --length 65", "more than the target's context of 64"),
    (f"glide {TRAIN} --resume", "there is no interrupted run"), (f"glide {TRAIN} --out DRAFTERS", "glide is there already"),
    (f"glide {TRAIN} --work T/good.jsonl/w", "Not a directory"), (f"glide {TRAIN} --init DRAFTERS --width 8", "leave out --width"),
    (f"glide {TRAIN} --words 4", "--words serves drafters between the target's tables"), (f"glide {TRAIN} --layer 7", "layer 7"),
    (f"glide {TRAIN} --target nowhere", "nowhere does not exist"), (f"glide {TRAIN} --device cuda:x", "--device cuda:x is not here"),
    (f"glide {TRAIN} --data T/no", "--data: "), (f"glide {TRAIN} --data T/empty", "no text to learn from"), (f"glide {TRAIN} --data T/short.txt", "too few tokens"),
    (f"glide {TRAIN} --data T/cut.jsonl", "cannot be read as text"), (f"glide {TRAIN} --data T/ids.jsonl", "holds token id 300"),
    (f"glide {TRAIN} --template bush", "choose plain or vicuna"))]
CASES += [
    ("prepare.py", "T/good.jsonl --tokenizer MODEL", "required: --out"), ("prepare.py", "T/no --tokenizer MODEL --out OUT", "does not exist"),
    ("prepare.py", "T/good.jsonl --tokenizer MODEL --out T/empty", "holds something else"),
    ("write.py", WRITE + "--batch 0", "--batch and --length must be above 0"), ("write.py", WRITE + "--temperature -1", "--temperature 0 or above"),
    ("write.py", WRITE + "--out T/good.jsonl", "good.jsonl exists"), ("write.py", WRITE + "--out T/good.jsonl --resume", "holds something else"),
    ("write.py", WRITE + "--length 65", "context of 64"), ("write.py", WRITE + "--data T/unknown.jsonl", "none of the fields"),
    ("write.py", WRITE + "--data T/long.txt", "no prompt of at most 30 tokens"), ("write.py", WRITE + "--target nowhere", "nowhere does not exist"),
    ("bigram.py", "", "required: made"), ("bigram.py", COUNT + "--data T/no", "does not exist"), ("bigram.py", COUNT + "--data T/empty", "holds no text"),
    ("bigram.py", AGREEMENT, "No such file or directory"),
    ("convert.py", "nowhere --out OUT", "nowhere does not exist"), ("convert.py", "DRAFTERS/glide --out T", "exists: name a new folder"),
    ("convert.py", "T/empty --out OUT", "holds no weights"), ("convert.py", "DRAFTERS/glide --target MODEL --out OUT", "in no known layout"),
    ("smollm2.py", "made", "invalid choice"), ("smollm2.py", "prompts --data T/good.jsonl", "prompts needs --data"),
    ("smollm2.py", "prompts --data T/unknown.jsonl --out OUT", "asks nothing")]
# ---------------------------------------------------------------- figures/
CASES += [
    ("figures/paper.py", "", "required: names"), ("figures/paper.py", "bush", "there is no table called 'bush'"), ("figures/paper.py", "main --limt 3", "--limt"),
    ("figures/paper.py", "write --rows T/no", "holds no measured tables"),
    ("figures/paper.py", "main --out T/good.jsonl", "good.jsonl"), ("figures/paper.py", "main --out OUT --target nowhere", "nowhere does not exist"),
    ("figures/probe.py", "", "no measurement called 'nothing'"), ("figures/probe.py", "walk", "no measurement called 'walk'"),
    ("figures/probe.py", "lookup " + BENCH, "at least four prompts"),
    ("figures/rounds.py", "--out OUT/no/a.html", "No such file or directory"), ("figures/rounds.py", f"{BENCH} --out /dev/null --prompt 3", "there are prompts 1 to 1"),
    ("figures/costs.py", "--contexts 9 0", "a prompt has at least one token"), ("figures/costs.py", "--target nowhere --device cpu", "nowhere does not exist")]

# ---------------------------------------------------------------- what the cases name
def damaged(source, folder, about=None, weights=None, file="training.json", **changes):
    """A copy of a folder: other bytes of its JSON or of its weights, or other values in the JSON."""
    shutil.copytree(source, folder)
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | changes) if about is None else about)
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    return folder

@pytest.fixture(scope="module")
def files(small, tmp_path_factory):  # noqa: F811
    """T, and what the other names of the table stand for."""
    T = tmp_path_factory.mktemp("bad")
    chat = [{"role": "user", "content": "add a"}, {"role": "assistant", "content": "a + b"}]
    rows = {"good": [{"text": TEXT[i:i + 90], "held_out": i == 1} for i in range(4)], "chats": [{"messages": chat}], "ids": [{"ids": [1, 300]}],
            "empty": [{"prompt": ""}], "number": [5], "unknown": [{"body": "x"}], "cut": ["a"]}
    for name, found in rows.items():
        (T / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    (T / "cut.jsonl").write_text('{"text": "a"}\n{"text": ')
    for name, content in (("long.txt", TEXT.encode()), ("short.txt", b"a"), ("bytes.txt", b"\xff\xfe\xff"), ("bytes.gz", b"no gzip"),
                          ("broken.jinja", b"{% for %}"), ("refuses.jinja", b"{{ raise_exception('no') }}"), ("silent.jinja", b"{{ x }}")):
        (T / name).write_bytes(content)
    (T / "empty" / ".git").mkdir(parents=True)
    glide, model = small / "drafters" / "glide", small / "model"
    weights = (glide / "model.safetensors").read_bytes()
    damaged(glide, T / "kind" / "bush", kind="bush")
    damaged(glide, T / "no-json" / "glide", about="{")
    damaged(glide, T / "cut" / "glide", weights=weights[:-40])
    damaged(glide, T / "heads" / "glide", config={})
    damaged(glide, T / "unprobed" / "glide", target={})
    (damaged(glide, T / "no-weights" / "glide") / "model.safetensors").unlink()
    damaged(model, T / "config", about="{", file="config.json")
    damaged(model, T / "weights", weights=b"xx", file="config.json")
    damaged(model, T / "activation", file="config.json", hidden_act="bush")
    other = damaged(model, T / "other", file="config.json") / "model.safetensors"
    save_file({name: weight.flip(0).contiguous() for name, weight in load_file(other).items()}, other)
    renamed = damaged(small / "drafters" / "base", T / "renamed", file="config.json")
    tokenizer_of("another text, of other words " * 9, 290).save_pretrained(renamed)
    return {"T": T, "MODEL": model, "DRAFTERS": small / "drafters", "PROMPTS": small / "prompts.jsonl"}

def times(folders):
    return {path: path.stat().st_mtime_ns for folder in folders for path in folder.rglob("*") if path.is_file()}

@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: " ".join([CASES[number][0], *CASES[number][1].split()[-3:]]))
def test_a_mistake_is_one_sentence(files, number, tmp_path, monkeypatch, capsys):
    program, arguments, words = CASES[number]
    for name, path in {**files, "OUT": tmp_path / "out"}.items():
        arguments = arguments.replace(f"{name}/", f"{path}/").replace(f" {name} ", f" {path} ")
        arguments = arguments.removesuffix(f" {name}") + f" {path}" * arguments.endswith(f" {name}")
    kept = files["T"], files["DRAFTERS"]
    before = times(kept)
    monkeypatch.chdir(tmp_path)
    assert PROGRAMS[program].main(arguments.split()) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and err.startswith((f"{program}: ", "main: ")), err
    assert times(kept) == before and not (tmp_path / "out" / "o").exists()
