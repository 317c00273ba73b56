"""The house: which files lie where, who imports whom, components that work when copied alone, links that lead somewhere."""
import ast
import dataclasses
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

COMPONENTS = ("cape", "pct", "maxgram", "glide", "edd", "verify", "cascade")
TOP = {*COMPONENTS, "train", "bench"}
FOLDERS = ("beyond", "runtime", "training", "figures", "tests")
# Fields of the papers' configs: what only a published checkpoint or another family needs is a subclass.
FIELDS = {
    "glide": "vocab width feed_forward layers heads block glimpse target_heads target_head_size layers_read eps norm loss",    # 4.1, Figure 2
    "edd": "vocab width hidden encoding loss blocks",                                                    # 3.1, appendix B
}
# Who may import whom; every other component imports no local file.
NEEDS = {
    "cascade": {"verify", "maxgram"},
    "beyond": {*COMPONENTS, "beyond"},
    "runtime": {*COMPONENTS, "beyond", "runtime"},
    "bench": {*COMPONENTS, "beyond", "runtime"},
    "training": {*COMPONENTS, "beyond", "runtime", "training"},
    "train": {*COMPONENTS, "beyond", "runtime", "training"},
    "figures": {*TOP, "beyond", "runtime", "training", "figures"},
}
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINKS = re.findall(r"\]\(([^)\s]+)\)", README)

def files(*folders):
    """The scripts in these folders, as paths from the root."""
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).glob("*.py"))

def source(name):
    return (ROOT / name).read_text(encoding="utf-8")

def imported(name):
    """Modules that a file imports, also inside its functions: "torch", "cape", "runtime.load"."""
    found = set()
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module in FOLDERS else {node.module}
    return {".".join(module.split(".")[:2]) if module.split(".")[0] in FOLDERS else module.split(".")[0] for module in found}

def local(name):
    """The local modules among them."""
    return {module for module in imported(name) if module.split(".")[0] in {*TOP, *FOLDERS}}

# ---------------------------------------------------------------- files and imports
def test_the_top_level_holds_exactly_these_modules():
    assert set(files(".")) == {f"{name}.py" for name in TOP}
    assert not files("checkpoints", "data") and not [path for folder in FOLDERS for path in (ROOT / folder).glob("__init__.py")]

@pytest.mark.parametrize("name", files(".", *FOLDERS[:-1]))
def test_a_file_has_a_hundred_columns_and_imports_what_it_may(name):
    """Nothing upward; a component takes torch and transformers (which brings safetensors) and at most its leaves."""
    if not name.startswith("figures/"):
        assert not [f"{name}:{number}" for number, line in enumerate(source(name).splitlines(), 1) if len(line) > 100]
    place = Path(name).stem if "/" not in name else name.split("/")[0]
    wrong = {module for module in local(name) if module.split(".")[0] not in NEEDS.get(place, set())}
    assert not wrong
    if place in COMPONENTS:
        others = imported(name) - local(name) - {*sys.stdlib_module_names}
        assert local(name) == NEEDS.get(place, set()) and others <= {"torch", "transformers", "safetensors"}, f"{name} needs {others}"

def test_no_imports_go_in_a_circle():
    needs = {name.removesuffix(".py").replace("/", "."): local(name) for name in files(".", *FOLDERS[:-1])}
    while needs:
        leaves = {name for name, modules in needs.items() if not modules & needs.keys()}
        assert leaves, f"a circle among {sorted(needs)}"
        needs = {name: modules for name, modules in needs.items() if name not in leaves}

@pytest.mark.parametrize("name", FIELDS)
def test_a_papers_config_has_the_papers_fields(name):
    config = importlib.import_module(name).Config
    assert [field.name for field in dataclasses.fields(config)] == FIELDS[name].split()

# ---------------------------------------------------------------- alone
def run_alone(script, *argv):
    """Run a script as `python SCRIPT ARGV` would in a new process, in this one -> its exit status.

    Packages that are loaded stay loaded: torch and transformers take seconds.  Of local files it finds only
    those in its own folder, whatever was imported before.
    """
    names = {Path(name).stem for name in files(".", *FOLDERS)} | {name for name in sys.modules if name.split(".")[0] in FOLDERS}
    ours = {ROOT, *(ROOT / name for name in FOLDERS), Path.cwd()}
    outside = [entry for entry in sys.path if Path(entry).resolve() not in ours]
    with pytest.MonkeyPatch.context() as patch:
        for name in {*names, *FOLDERS}:
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
    demos = [node for node in ast.parse(source(f"{name}.py")).body if getattr(node, "name", None) in ("main", "demo")]
    assert [node for demo in demos for node in ast.walk(demo) if isinstance(node, ast.Assert)]

@pytest.mark.parametrize("name", [name for name in files("beyond") if "__main__" in source(name)])
def test_what_lies_beyond_runs_its_demo(name, capsys):
    runpy.run_path(str(ROOT / name), run_name="__main__")
    assert capsys.readouterr().out.strip() and "    assert " in source(name)

# ---------------------------------------------------------------- the README and the pages
def test_the_readme_names_all_files_and_both_commands():
    install = "pip install -r requirements.txt"
    assert f"{install} && python bench.py --drafter glide --tree cape\n" in README
    assert f"{install} && python -m pytest\n" in README
    assert {f"{name}.py" for name in TOP} <= {*LINKS}

def test_commands_name_programs():
    """`python FILE` and `python -m MODULE`, in any text: a file that is there, and does something."""
    wrong = []
    for name in [*files(".", *FOLDERS[:-1]), "README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]:
        for script, module in re.findall(r"\bpython (?:([a-z_\d/]+)\.py|-m ((?:%s)\.\w+))" % "|".join(FOLDERS), source(name)):
            path = ROOT / f"{script or module.replace('.', '/')}.py"
            if not path.exists() or "__main__" not in source(path):
                wrong.append((name, script or module))
    assert not wrong

def slug(heading):
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")

@pytest.mark.parametrize("link", sorted({link for link in LINKS if "://" not in link}))
def test_a_link_leads_somewhere(link):
    name, _, anchor = link.partition("#")
    path = ROOT / (name or "README.md")
    assert path.exists(), f"the README links to {name}, which is not there"
    assert not re.fullmatch(r"L\d+", anchor), "a line's number is wrong after the next edit: link by name"
    if anchor:
        headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
        assert anchor in [slug(heading) for heading in headings]

def defined(name):
    """What a file defines: functions, classes and constants, methods as Class.method."""
    found = set()
    for node in ast.parse(source(name)).body:
        found |= {target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)} | {getattr(node, "name", None)}
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return found

def test_names_that_link_to_a_file_stand_in_it():
    links = [(name, file) for name, file in re.findall(r"\[`([^`]+)`\]\(([^)#\s]+\.py)\)", README) if not name.endswith(".py")]
    wrong = [(name, file) for name, file in links if name.removesuffix("()") not in defined(file)]
    assert not wrong

@pytest.mark.parametrize("link", [link for link in LINKS if link.endswith(".svg")])
def test_a_picture_is_well_formed_and_brings_all_it_needs(link):
    text = source(link)
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in text
    # GitHub shows it as an image: nothing may come from elsewhere, no script runs
    assert "<script" not in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")

# ---------------------------------------------------------------- what is committed
def test_user_supplied_files_run_no_code():
    """No pickle, and no torch.load that would unpickle: weights are safetensors, or weights_only=True."""
    wrong = []
    for name in files(".", *FOLDERS[:-1]):
        wrong += [f"{name}: {module}" for module in imported(name) & {"pickle", "cloudpickle", "dill", "joblib", "shelve"}]
        for node in ast.walk(ast.parse(source(name))):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in getattr(node, "keywords", [])}
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load" and given.get("weights_only") != "True":
                wrong.append(f"{name}:{node.lineno}")
            if given.get("allow_pickle") not in (None, "False"):
                wrong.append(f"{name}:{node.lineno}")
    assert not wrong

def test_no_file_names_a_path_of_one_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    one_machine = re.compile(rb"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/\w")
    paths = [ROOT / name for name in filter(None, listed.stdout.split("\0")) if not name.endswith(".safetensors")]
    assert not [path for path in paths if path.is_file() and one_machine.search(path.read_bytes())]
