"""The repository: who imports whom, files that work when copied alone, commands and links."""
import ast
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

SEVEN = ("cape", "pct", "maxgram", "glide", "edd", "verify", "cascade")
FOLDERS = ("beyond", "runtime", "training", "figures", "tests")
# Who may import whom; every other component imports no local file.
MAY_IMPORT = {
    "cascade": {"verify", "maxgram"},
    "beyond": {*SEVEN, "beyond"},
    "runtime": {*SEVEN, "beyond", "runtime"},
    "training": {*SEVEN, "beyond", "runtime", "training"},
    "figures": {*SEVEN, "bench", "beyond", "runtime", "training", "figures"},
    "bench": {*SEVEN, "beyond", "runtime"},
    "train": {*SEVEN, "beyond", "runtime", "training"},
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

def files(*folders):
    """The scripts in these folders, as paths from the root."""
    found = [path for folder in folders for path in (ROOT / folder).glob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)

def source(name):
    return (ROOT / name).read_text(encoding="utf-8")

def imports(name):
    """{what a file imports, with its module: "runtime.load", "cape", "verify.rounds", ...}"""
    beside = {Path(file).stem: f"figures.{Path(file).stem}" for file in files("figures")}
    found = set()
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    # Programs of figures/ name each other without the folder.
    return {beside.get(module.split(".")[0], module) for module in found}

def local(name):
    """The local files among them, as paths."""
    found = set()
    for module in imports(name):
        parts = module.split(".")
        for length in (1, 2):
            path = "/".join(parts[:length]) + ".py"
            if (ROOT / path).exists():
                found.add(path)
    return found

@pytest.mark.parametrize("name", files(".", *FOLDERS[:-1]))
def test_a_file_imports_what_it_may(name):
    place = name.split("/")[0].removesuffix(".py")
    wrong = [path for path in local(name)
             if path.split("/")[0].removesuffix(".py") not in MAY_IMPORT.get(place, ())]
    assert not wrong
    if place in SEVEN:
        packages = {module.split(".")[0] for module in imports(name)} - {*sys.stdlib_module_names}
        assert packages - {*SEVEN} <= {"torch", "transformers", "safetensors"}

def test_no_imports_go_in_a_circle():
    needs = {name: local(name) for name in files(".", *FOLDERS[:-1])}
    while needs:
        leaves = {name for name, found in needs.items() if not found & needs.keys()}
        assert leaves, f"a circle among {sorted(needs)}"
        needs = {name: found for name, found in needs.items() if name not in leaves}

def test_the_top_level_holds_exactly_these_modules():
    assert set(files(".")) == {f"{name}.py" for name in (*SEVEN, "bench", "train")}

def test_user_supplied_files_run_no_code():
    """No pickle, and no torch.load that would unpickle: safetensors, or weights_only=True."""
    for name in files(".", *FOLDERS[:-1]):
        assert not imports(name) & {"pickle", "cloudpickle", "dill", "joblib", "shelve"}
        for call in re.findall(r"torch\.load\((?:[^()]|\([^()]*\))*\)", source(name)):
            assert "weights_only=True" in call, name

# ---------------------------------------------------------------- alone
def run_alone(script):
    """Run a script as `python SCRIPT` would in a new process, in this one -> exit status.

    Packages stay loaded: torch and transformers take seconds.  Of local files it finds only those
    in its own folder, whatever was imported before.
    """
    names = {Path(name).stem for name in files(".", *FOLDERS)} | {*FOLDERS}
    names |= {name for name in sys.modules if name.split(".")[0] in FOLDERS}
    ours = {ROOT, *(ROOT / name for name in FOLDERS), Path.cwd()}
    outside = [entry for entry in sys.path if Path(entry).resolve() not in ours]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, None)           # so that what is there now comes back
            del sys.modules[name]
        patch.setattr(sys, "path", [str(Path(script).parent), *outside])
        patch.setattr(sys, "argv", [str(script)])
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            torch.set_default_dtype(torch.float32)

@pytest.mark.parametrize("name", SEVEN)
def test_a_component_copied_alone_runs_its_demo(name, tmp_path, monkeypatch, capsys):
    for file in {name} | MAY_IMPORT.get(name, set()):
        shutil.copy(ROOT / f"{file}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    run_alone(tmp_path / f"{name}.py")
    assert capsys.readouterr().out.strip() and "    assert " in source(f"{name}.py")

@pytest.mark.parametrize("name", [name for name in files("beyond") if "__main__" in source(name)])
def test_what_lies_beyond_runs_its_demo(name, capsys):
    runpy.run_path(str(ROOT / name), run_name="__main__")
    assert capsys.readouterr().out.strip() and "    assert " in source(name)

SNIPPETS = re.findall(r"```python\n(.*?)```", source("README.md"), re.S)

@pytest.mark.parametrize("lines", SNIPPETS, ids=range(len(SNIPPETS)))
def test_the_snippets_of_the_readme_run(lines, tmp_path, monkeypatch, capsys):
    """verify, cape and glide alone decode in an empty folder; the others run in this one."""
    if "from runtime" in lines or "from beyond" in lines:
        monkeypatch.chdir(ROOT)
        exec(compile(lines, "README.md", "exec"), {"__name__": "__main__"})
    else:
        for name in ("verify", "cape", "glide"):
            shutil.copy(ROOT / f"{name}.py", tmp_path)
        (tmp_path / "my-target").symlink_to(ROOT / "checkpoints/target")
        (tmp_path / "my-glide").symlink_to(ROOT / "checkpoints/glide")
        (tmp_path / "script.py").write_text(lines)
        monkeypatch.chdir(tmp_path)
        run_alone(tmp_path / "script.py")
    assert float(capsys.readouterr().out.split()[-1]) > 2, "tau"

# ---------------------------------------------------------------- commands and links
def test_commands_name_programs():
    """`python FILE` and `python -m MODULE`, in any text: a program that is there."""
    texts = [ROOT / name for name in files(".", *FOLDERS[:-1])] + PAGES
    pattern = rf"\bpython (?:([a-z_\d/]+)\.py|-m ((?:{'|'.join(FOLDERS)})\.\w+))"
    for path in texts:
        for script, module in re.findall(pattern, path.read_text(encoding="utf-8")):
            program = ROOT / f"{script or module.replace('.', '/')}.py"
            assert program.exists() and "__main__" in source(program), (path, script or module)

def slugs(page):
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return [re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
            for heading in headings]

@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        there = page.parent / name if name else page
        assert "://" in link or there.exists() and (not anchor or anchor in slugs(there)), link
