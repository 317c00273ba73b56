"""The house: which files lie where, who imports whom, components that work when copied alone, commands that exist."""
import ast
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

COMPONENTS = ("cape", "pct", "maxgram", "glide", "edd", "verify", "cascade")
TOP = {*COMPONENTS, "train", "bench"}
FOLDERS = ("beyond", "runtime", "training", "figures", "tests")
# Who may import whom; every other component imports no local file.
NEEDS = {
    "cascade": {"verify", "maxgram"},
    "beyond": {*COMPONENTS, "beyond"},
    "runtime": {*COMPONENTS, "beyond", "runtime"},
    "bench": {*COMPONENTS, "beyond", "runtime"},
    "training": {*COMPONENTS, "beyond", "runtime", "training", "train"},      # t5.py trains by train.py's loop
    "train": {*COMPONENTS, "beyond", "runtime", "training"},
    "figures": {*TOP, "beyond", "runtime", "training", "figures"},
}

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
def test_a_file_imports_what_it_may(name):
    """Nothing upward; a component takes torch and transformers (which brings safetensors) and at most its leaves."""
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

# ---------------------------------------------------------------- commands
def test_commands_name_programs():
    """`python FILE` and `python -m MODULE`, in any text: a file that is there, and does something."""
    wrong = []
    for name in [*files(".", *FOLDERS[:-1]), "README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]:
        for script, module in re.findall(r"\bpython (?:([a-z_\d/]+)\.py|-m ((?:%s)\.\w+))" % "|".join(FOLDERS), source(name)):
            path = ROOT / f"{script or module.replace('.', '/')}.py"
            if not path.exists() or "__main__" not in source(path):
                wrong.append((name, script or module))
    assert not wrong

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
