"""The house: short files, imports in a star, components that work when copied alone, a README that fits."""
import ast
import importlib
import re
import runpy
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from conftest import ROOT

LINES, WIDTH, FUNCTION = 500, 110, 80
# These hold more than one thing, and have no one to share them with: the target, its cache, acceptance and the loop; the
# calls, the run, its statistics and the table; text of all kinds, training, and how a target is loaded and told apart; four
# drafters, three of them the baselines of the paper's table.
LONGER = {"verify": 910, "bench": 745, "train": 960, "edd": 565, "glide": 530}
COMPONENTS = ("cape", "pct", "maxgram", "glide", "edd", "verify", "cascade")
TOP = {*COMPONENTS, "train", "bench"}
FOLDERS = ("checkpoints", "figures", "tests")
NEEDS = {"cascade": {"verify", "maxgram"}}                   # every other component imports no local file

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINKS = re.findall(r"\]\(([^)\s]+)\)", README)


def source(name):
    return (ROOT / f"{name}.py").read_text(encoding="utf-8")


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def length(function):
    """Lines of a function, its docstring not counted."""
    first = function.body[0]
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def imported(name):
    """Names of all modules that a top-level file imports, also inside its functions."""
    found = set()
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}.py: a relative import"
            found.add(node.module.split(".")[0])
    return found


# ---------------------------------------------------------------- the files at the top
def test_the_top_level_holds_exactly_these_modules():
    assert {path.stem for path in ROOT.glob("*.py")} == TOP


@pytest.mark.parametrize("name", sorted(TOP))
def test_a_file_fits(name):
    lines = source(name).splitlines()
    assert len(lines) <= LONGER.get(name, LINES), f"{name}.py has {len(lines)} lines: something has to leave it"
    wide = [f"{name}.py:{number}" for number, line in enumerate(lines, 1) if len(line) > WIDTH]
    assert not wide, f"beyond {WIDTH} columns: {wide}"
    long = [f"{f.name}: {length(f)}" for f in functions(ast.parse(source(name))) if length(f) > FUNCTION]
    assert not long, f"{name}.py: functions over {FUNCTION} lines: {long}"


def test_length_counts_no_docstring():
    tree = ast.parse('def f():\n    """a\n\n    b"""\n    return 1\n\n\ndef g():\n    return 2\n')
    assert [length(f) for f in functions(tree)] == [2, 2]


# ---------------------------------------------------------------- imports in a star
@pytest.mark.parametrize("name", sorted(TOP))
def test_nothing_at_the_top_imports_from_the_folders(name):
    inside = {path.stem for folder in FOLDERS for path in (ROOT / folder).glob("*.py")}
    assert not imported(name) & ({*FOLDERS} | inside)


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_imports_torch_and_at_most_its_leaves(name):
    local = imported(name) & TOP
    assert local == NEEDS.get(name, set())
    others = imported(name) - local - {*sys.stdlib_module_names}
    # transformers brings safetensors
    assert others <= {"torch", "transformers", "safetensors"}, f"{name}.py needs {others}"


def run_alone(script, *argv):
    """Run a script as `python SCRIPT ARGV` would in a new process, in this one -> its exit status.

    Packages that are loaded stay loaded: torch and transformers take seconds.  Of local files it finds only
    those in its own folder, whatever was imported before.
    """
    local = [path.stem for folder in (ROOT, *(ROOT / name for name in FOLDERS)) for path in folder.glob("*.py")]
    ours = {ROOT, *(ROOT / name for name in FOLDERS), Path.cwd()}
    outside = [entry for entry in sys.path if Path(entry).resolve() not in ours]
    with pytest.MonkeyPatch.context() as patch:
        for name in (*local, *FOLDERS):
            patch.setitem(sys.modules, name, None)           # so that what is there now comes back
            del sys.modules[name]
        patch.setattr(sys, "path", [str(Path(script).parent), *outside])
        patch.setattr(sys, "argv", [str(script), *map(str, argv)])
        patch.setattr(sys, "dont_write_bytecode", True)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as status:
            return status.code
        finally:
            torch.set_default_dtype(torch.float32)
    return 0


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_copied_alone_runs_its_demo(name, tmp_path, monkeypatch, capsys):
    for file in {name} | NEEDS.get(name, set()):
        shutil.copy(ROOT / f"{file}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run_alone(tmp_path / f"{name}.py") == 0
    assert capsys.readouterr().out.strip(), "a demo says what it shows"


def test_alone_means_alone(tmp_path, monkeypatch):
    """What a script that runs alone can import: packages and what lies beside it, not the repository's files."""
    monkeypatch.chdir(ROOT)
    before = sys.modules["bench"] = sys.modules.get("bench") or importlib.import_module("bench")
    (tmp_path / "cape.py").write_text("MINE = True")
    (tmp_path / "a.py").write_text("import sys, torch, cape\nassert cape.MINE and sys.argv[1:] == ['-x']\nsys.exit(3)")
    assert run_alone(tmp_path / "a.py", "-x") == 3
    for name in ("bench", "calibration", "make", "conftest"):
        (tmp_path / "b.py").write_text(f"import {name}")
        with pytest.raises(ModuleNotFoundError, match=name):
            run_alone(tmp_path / "b.py")
    assert sys.modules["bench"] is before and not hasattr(importlib.import_module("cape"), "MINE")


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_demo_asserts_something(name):
    tree = ast.parse(source(name))
    demos = [f for f in functions(tree) if f.name in ("main", "demo")]
    asserts = [node for f in demos for node in ast.walk(f) if isinstance(node, ast.Assert)]
    assert asserts, f"the demo of {name}.py asserts nothing"


# ---------------------------------------------------------------- the README
def test_the_readme_is_short():
    assert len(README.splitlines()) <= 130
    assert len(README.split()) <= 1200


def test_the_readme_names_both_commands():
    install = "pip install -r requirements.txt"
    assert f"{install} && python bench.py --drafter glide --tree cape\n" in README
    assert f"{install} && python -m pytest\n" in README


def slug(heading):
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("link", sorted({link for link in LINKS if "://" not in link}))
def test_a_link_leads_somewhere(link):
    name, _, anchor = link.partition("#")
    path = ROOT / name if name else ROOT / "README.md"
    assert path.exists(), f"the README links to {name}, which is not there"
    if re.fullmatch(r"L\d+", anchor):
        assert int(anchor[1:]) <= len(path.read_text(encoding="utf-8").splitlines())
    elif anchor:
        headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
        assert anchor in [slug(heading) for heading in headings]


def test_the_readme_links_to_every_file_at_the_top():
    assert {f"{name}.py" for name in TOP} <= {*LINKS}


@pytest.mark.parametrize("link", [link for link in LINKS if link.endswith(".svg")])
def test_a_picture_is_well_formed_and_brings_all_it_needs(link):
    text = (ROOT / link).read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in text
    # GitHub shows it as an image: nothing may come from elsewhere, no script runs
    assert "<script" not in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")


# ---------------------------------------------------------------- what is committed
def test_no_file_names_a_path_of_one_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    one_machine = re.compile(rb"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/\w")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix != ".safetensors" and one_machine.search(path.read_bytes()):
            found.append(name)
    assert not found
