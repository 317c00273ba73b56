"""The house: which files lie where, who imports whom, components that work when copied alone."""
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
    "training": {*COMPONENTS, "beyond", "runtime", "training"},
    "train": {*COMPONENTS, "beyond", "runtime", "training"},
    "figures": {*TOP, "beyond", "runtime", "training", "figures"},
}

def files(*folders):
    """The scripts in these folders, as paths from the root."""
    found = [path for folder in folders for path in (ROOT / folder).glob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)

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
            if node.module in FOLDERS:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    short = set()
    for module in found:
        parts = module.split(".")
        short.add(".".join(parts[:2]) if parts[0] in FOLDERS else parts[0])
    return short

def local(name):
    """The local modules among them."""
    return {module for module in imported(name) if module.split(".")[0] in {*TOP, *FOLDERS}}

# ---------------------------------------------------------------- files and imports
def test_the_top_level_holds_exactly_these_modules():
    assert set(files(".")) == {f"{name}.py" for name in TOP}
    assert not files("checkpoints", "data")
    assert not [path for folder in FOLDERS for path in (ROOT / folder).glob("__init__.py")]

@pytest.mark.parametrize("name", files(".", *FOLDERS[:-1]))
def test_a_file_imports_what_it_may(name):
    """Nothing upward; a component takes torch and transformers and at most its leaves."""
    place = Path(name).stem if "/" not in name else name.split("/")[0]
    allowed = NEEDS.get(place, set())
    wrong = {module for module in local(name) if module.split(".")[0] not in allowed}
    assert not wrong
    if place in COMPONENTS:
        others = imported(name) - local(name) - {*sys.stdlib_module_names}
        assert local(name) == allowed
        assert others <= {"torch", "transformers", "safetensors"}

def test_no_imports_go_in_a_circle():
    needs = {}
    for name in files(".", *FOLDERS[:-1]):
        needs[name.removesuffix(".py").replace("/", ".")] = local(name)
    while needs:
        leaves = {name for name, modules in needs.items() if not modules & needs.keys()}
        assert leaves, f"a circle among {sorted(needs)}"
        needs = {name: modules for name, modules in needs.items() if name not in leaves}

@pytest.mark.parametrize("name", files(".", *FOLDERS))
def test_no_line_is_longer_than_100_columns(name):
    assert [line for line in source(name).splitlines() if len(line) > 100] == []

# ---------------------------------------------------------------- alone
def run_alone(script, *argv):
    """Run a script as `python SCRIPT ARGV` would in a new process, in this one -> exit status.

    Packages that are loaded stay loaded: torch and transformers take seconds.  Of local files it
    finds only those in its own folder, whatever was imported before.
    """
    names = {Path(name).stem for name in files(".", *FOLDERS)}
    names |= {name for name in sys.modules if name.split(".")[0] in FOLDERS}
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
    demos = [node for node in ast.parse(source(f"{name}.py")).body
             if getattr(node, "name", None) in ("main", "demo")]
    assert [node for demo in demos for node in ast.walk(demo) if isinstance(node, ast.Assert)]

def test_the_readmes_lines_decode_in_an_empty_folder(tmp_path, monkeypatch, capsys):
    """glide.py and cape.py with verify.py, and nothing else of this project."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [lines] = [text for text in re.findall(r"```python\n(.*?)```", readme, re.S)
               if "verify.generate" in text]
    for name in ("verify", "cape", "glide"):
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    (tmp_path / "my-target").symlink_to(ROOT / "checkpoints/target")
    (tmp_path / "my-glide").symlink_to(ROOT / "checkpoints/glide")
    (tmp_path / "script.py").write_text(lines)
    monkeypatch.chdir(tmp_path)
    assert run_alone(tmp_path / "script.py") == 0
    assert float(capsys.readouterr().out.split()[-1]) > 2, "tau"

@pytest.mark.parametrize("name", [name for name in files("beyond") if "__main__" in source(name)])
def test_what_lies_beyond_runs_its_demo(name, capsys):
    runpy.run_path(str(ROOT / name), run_name="__main__")
    assert capsys.readouterr().out.strip() and "    assert " in source(name)

# ---------------------------------------------------------------- commands
def test_commands_name_programs():
    """`python FILE` and `python -m MODULE`, in any text: a program that is there."""
    wrong = []
    pages = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    pattern = r"\bpython (?:([a-z_\d/]+)\.py|-m ((?:%s)\.\w+))" % "|".join(FOLDERS)
    for name in [*files(".", *FOLDERS[:-1]), *pages]:
        for script, module in re.findall(pattern, source(name)):
            path = ROOT / f"{script or module.replace('.', '/')}.py"
            if not path.exists() or "__main__" not in source(path):
                wrong.append((name, script or module))
    assert not wrong

PROGRAMS = ["bench.py", "train.py", *(name for name in files("training", "figures")
                                      if "__main__" in source(name))]

@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as status:
        runpy.run_path(str(ROOT / name), run_name="__main__")
    assert status.value.code in (0, None)
    out = " ".join(capsys.readouterr().out.split())
    assert "usage:" in out
    assert not re.search(r"default: [^()]*\) \(default:", out), "a default is told once"

# ---------------------------------------------------------------- what is committed
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve"}

@pytest.mark.parametrize("name", files(".", *FOLDERS[:-1]))
def test_user_supplied_files_run_no_code(name):
    """No pickle, and no torch.load that would unpickle: safetensors, or weights_only=True."""
    assert not imported(name) & PICKLES
    for node in ast.walk(ast.parse(source(name))):
        keywords = getattr(node, "keywords", [])
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert given.get("weights_only") == "True", node.lineno
        assert given.get("allow_pickle") in (None, "False")

def test_the_readme_counts_lines_rightly():
    """To the nearest hundred or so."""
    text = (ROOT / "README.md").read_text()
    smallest, whole = re.search(r"some ([\d ]+) lines\); all nine files have some ([\d ]+)\.",
                                text).groups()
    nine = re.findall(r"^\|\[`(\w+\.py)`\]", text, re.M)
    assert len(nine) == 9
    for names, said in ((("verify.py", "cape.py", "glide.py"), smallest), (nine, whole)):
        lines = sum(len((ROOT / name).read_text().splitlines()) for name in names)
        assert abs(lines - int(said.replace(" ", ""))) < 60
