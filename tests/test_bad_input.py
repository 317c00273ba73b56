"""Whatever a user gets wrong is one sentence and exit status 2: no traceback, nothing written, nothing lost.

A case: the program, what is made in the folder T first, its arguments, words of its sentence.  MODEL, DRAFTERS, PROMPTS: of the tiny
target of test_bench.py.  Cases of training stand in cases_training.py.
"""
import json
import shutil

import paper
import probe
import pytest
import rounds
import torch
import walltime
from conftest import ROOT
from safetensors.torch import load_file, save_file
from test_bench import small, tokenizer_of  # noqa: F401

import bench

PROGRAMS = {"bench.py": bench, "figures/paper.py": paper, "figures/probe.py": probe, "figures/rounds.py": rounds, "figures/walltime.py": walltime}
BASE = "--target MODEL --checkpoint DRAFTERS --prompts PROMPTS --max-new-tokens 4 --device cpu --limit 1 --drafter maxgram --tree chain".split()

# ---------------------------------------------------------------- what a case makes in its folder
def text(name, content):
    """A file."""
    def make(folder):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return make

def copied(what, edit):
    """A copy of a folder of the tiny target's, edited."""
    def make(folder):
        name = what.rpartition("/")[2]
        shutil.copytree(folder.parent / "small" / what, folder / name)
        edit(folder / name)
    return make

def about(file, **changes):
    """Other values of keys in a JSON file, or functions of the values that are there."""
    def edit(folder):
        found = json.loads((folder / file).read_text())
        for key, value in changes.items():
            found[key] = value(found[key]) if callable(value) else value
        (folder / file).write_text(json.dumps(found))
    return edit

def weights(change):
    """Other weights."""
    def edit(folder):
        path = folder / "model.safetensors"
        save_file({name: change(tensor).contiguous() for name, tensor in load_file(path).items()}, path)
    return edit

def written(file, content):
    return lambda folder: (folder / file).write_bytes(content)

SOURCE = (ROOT / "cape.py").read_text()

def other_tokenizer(folder):
    tokenizer_of(SOURCE, 900).save_pretrained(folder)

def several(*makes):
    """All of these."""
    def make(folder):
        for each in makes:
            each(folder)
    return make

# ---------------------------------------------------------------- the table
CASES = []

def case(program, arguments, words, make=None):
    CASES.append((program, arguments if isinstance(arguments, list) else arguments.split(), words, make))

def bench_py(arguments, words, make=None):
    case("bench.py", BASE + (arguments if isinstance(arguments, list) else arguments.split()), words, make)

# Numbers and names
for flags, words in {
        "--nonsense": "unrecognized arguments", "--limit 0": "--limit is 0",
        "--limit x": "invalid int value", "--temperature nan": "--temperature is nan",
        "--top-p 7": "--top-p is 7", "--top-k 0": "--top-k is 0",
        "--threads 99999999999": "--threads is 99999999999", "--seed -1": "invalid seed value",
        "--dtype int8": "invalid choice", "--device x": "say cpu, cuda", "--graphs": "--graphs: ",
        "--json /no/such/r.jsonl": "--json /no/such/r.jsonl: name a file",
        "--json /dev/null/x": "name a file",
        "--template lama": "--template lama: say plain vicuna, or name a file",
        "--template T": "name a file", "--tree": "expected at least one argument",
        "--tree bush": "there is no tree called 'bush'",
        "--tree pct-cost pct_cost": "name each once", "--tree chain(": "closing bracket",
        "--tree chain(gamma=0)": "gamma is 0", "--tree drawn": "give --temperature above 0",
        "--tree cape(sizes=3)": "cape(sizes=3)", "--tree pct(depth=-1)": "depth is -1",
        "--tree cape(sizes=(3,1))": "edges need",
        "--tree vct(width=60,depth=60)": "more than 512 nodes",
        "--tree chain(gamma=3)": "of its own length", "--drafter bush": "called 'bush'",
        "--drafter maxgram(3)": "maxgram takes",
        "--drafter maxgram(bigram='none.json')": "bigram='none.json'",
        "--drafter cascade": "names of models",
        "--drafter cascade(nowhere)": "the stage nowhere does not exist",
        "--drafter cascade(maxgram,base)": "maxgram last",
        "--drafter cascade(base,base)": "every stage once",
        "--drafter cascade(base,k=(1,2))": "take 1 number",
        "--drafter cascade(base,lenience=0.9)": "lenience is 0.9",
        "--drafter cascade(base,stop='never')": "say 'own' or 'sum'",
        "--drafter cascade(base,small,costs=(0.1,))": "a cost for each model",
        "--drafter beside(glide)": "name one drafter of trees",
        "--drafter beside(nowhere,maxgram)": "nowhere does not exist",
        "--drafter beside(glide(x=3),maxgram)": "glide takes raw=False",
        "--drafter gemma4": "the hub name or folder of one",
        "--drafter gemma4(MODEL)": "drafts for a Gemma 4",
        "--drafter eagle3(MODEL)": "fc.weight is missing",
        "--target /no/such/model": "does not exist", "--target DRAFTERS/glide": "cannot be loaded",
        "--checkpoint /no/such --drafter glide": "no drafter in /no/such",
        "--checkpoint PROMPTS --drafter glide": "called 'glide'", "--prompts T": "cannot be read",
        "--ask {": "does not fit a row", "--ask {x}": "KeyError"}.items():
    bench_py(flags, words)
bench_py(["--target", ""], "cannot be loaded")
bench_py(["--target", "a b/c"], "no name of the hub's")
if not torch.cuda.is_available():
    bench_py("--device cuda:1", "no CUDA device")

# Prompts
for content, words in {
        '{"prompt": ""}': "is empty", '{"prompt": "%s"}' % ("x y " * 200): "holds no prompt of at most 64", b"\x80\x81": "cannot be read",
        '{"prompt": ': "cannot be read", "3": "row 1", '{"messages": [{"role": "user"}]}': "is empty"}.items():
    bench_py("--prompts T/p.jsonl", words, text("p.jsonl", content))
bench_py("--limit 2 --prompts T/p.jsonl", "row 2 of ", text("p.jsonl", '"a"\n{"x": 1}'))
bench_py("--prompts T/p.parquet", "pip install datasets", text("p.parquet", b"PAR1"))
for content, words in {"{% for": "is no Jinja template", "{{ 1 / 0 }}": "refuses the", "{{ x }}": "gives no tokens"}.items():
    bench_py("--prompts T/p.jsonl --template T/t.jinja", words, several(text("p.jsonl", '{"turns": ["a", "b"]}'), text("t.jinja", content)))

# A drafter's folder
GLIDE = "--checkpoint T --drafter glide"
DAMAGED = "damaged: train or copy it again"
for changes in (dict(validation={"temperature": 0}), dict(config=lambda config: {**config, "heads": 3}), dict(kind="alien")):
    bench_py(GLIDE, "is damaged", copied("drafters/glide", about("training.json", **changes)))
# An older fingerprint, whose weights have no names; none; another target's
for target in ({"probe": [0.5] * 32}, {}):
    bench_py(GLIDE, "was made for another target", copied("drafters/glide", about("training.json", target=target)))
bench_py("--drafter glide --target OTHER", "was made for another target: train one for this")
bench_py(GLIDE, DAMAGED, copied("drafters/glide", weights(lambda x: x * float("nan"))))
bench_py(GLIDE, "model.safetensors is missing", copied("drafters/glide", lambda folder: (folder / "model.safetensors").unlink()))

# Models
for edit in (written("config.json", b"{"), written("model.safetensors", b"xx"), lambda folder: (folder / "tokenizer.json").unlink(),
             about("config.json", vocab_size=100), about("config.json", hidden_act="alien")):
    bench_py("--target T/model", "cannot be loaded", copied("model", edit))
bench_py("--checkpoint T --drafter cascade(base)", "the stage", copied("drafters/base", written("config.json", b"{")))
bench_py("--target T/model --prompts T/p.txt", "vocabulary is 300", several(copied("model", other_tokenizer), text("p.txt", SOURCE[:100])))
bench_py("--checkpoint T --drafter cascade(base)", "another tokenizer than the target", copied("drafters/base", other_tokenizer))
bench_py("--checkpoint T --drafter beside(base,maxgram,bigram='T/b.json')", "its agreement with base is not three numbers",
         several(copied("drafters/base", lambda folder: None),
                 text("b.json", json.dumps({"bigram": [0] * 300, "agreement": {"base": {"weights": "abc"}}}))))
for content, words in {"[": "cannot be read", '{"bigram": 3}': "no array of token ids", "[999]": "another vocabulary", b"\xff": "cannot be read",
                       json.dumps({"bigram": [0] * 300, "confidence": "x"}): "its confidence"}.items():
    bench_py("--drafter maxgram(bigram='T/b.json')", words, text("b.json", content))

# The scripts of figures/
case("figures/probe.py", "", "no measurement called 'nothing'")
case("figures/probe.py", ["lookup", *BASE], "at least four prompts")
case("figures/rounds.py", "--out nowhere/a.html", "name a file in a folder")
case("figures/walltime.py", "grow --device cpu", "name a folder")
case("figures/walltime.py", "costs --contexts 9 0 --device cpu", "a prompt has at least one token")
case("figures/walltime.py", "first --out PROMPTS --device cpu", "name a folder")
case("figures/walltime.py", "first --out T --device cpu", "first.json is damaged", text("first.json", "{"))
case("figures/walltime.py", "costs --device cpu --target nowhere", "nowhere")
case("figures/rounds.py", [*BASE, "--prompt", "3"], "--prompt is 3: there are 1 prompts")
for arguments, words in {
        "": "required: names", "glide-table-9": "no table called 'glide-table-9': choose among cascade-k papers main", "main --limt 3": "--limt",
        "main --json x": "say --out FOLDER", "main --out RESULTS": "docs/ is written by `paper.py write` alone",
        "all main": "and nothing else", "write --rows /no/such": "holds no measured tables", "main --out PROMPTS": "name a folder",
        "main --target nowhere --out T/o": "nowhere does not exist"}.items():
    case("figures/paper.py", arguments, words)
case("figures/paper.py", "write --rows T", "holds no a.jsonl", text("measured.json", '{"a.jsonl": {}}'))

# ---------------------------------------------------------------- the test
def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

@pytest.fixture(scope="module")
def place(small, tmp_path_factory):  # noqa: F811
    """A folder with the tiny target's folders as small/."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "small").symlink_to(small)
    return folder

@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: " ".join([str(number), *CASES[number][1][-4:]]))
def test_a_mistake_is_one_sentence(place, number, capsys, monkeypatch):
    program, arguments, words, make = CASES[number]
    folder, small = place / f"{number}", place / "small"  # noqa: F811
    folder.mkdir()
    if make:
        make(folder)
    names = {"MODEL": small / "model", "OTHER": small / "other", "DRAFTERS": small / "drafters", "PROMPTS": small / "prompts.jsonl",
             "RESULTS": paper.DOCS / "results"}
    given = []
    for argument in arguments:
        for name, path in names.items():
            argument = argument.replace(name, str(path))
        given.append(str(folder) + argument[1:] if argument[:1] == "T" and argument[1:2] in ("", "/") else argument.replace("'T/", f"'{folder}/"))
    before = files(folder)
    monkeypatch.chdir(folder)
    assert PROGRAMS[program].main(given) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1, said
    assert said.startswith(f"{program}: ") or program == "figures/paper.py" and said.startswith("main: ")
    assert files(folder) == before, "nothing is lost, and nothing half written"
