"""The repository: who imports whom, the demos and snippets run, commands and links."""
import ast
import importlib
import re
import sys
from functools import cache

import pytest
from conftest import ROOT

SEVEN = ("cape", "pct", "maxgram", "glide", "edd", "verify", "cascade")
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
FOLDERS = "beyond", "runtime", "training", "figures"
SOURCE = {}                      # {path from the root: text} of all scripts but the tests
for folder in (".", *FOLDERS):
    for path in sorted((ROOT / folder).glob("*.py")):
        SOURCE[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
         for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}

@cache
def imports(name):
    """What a file imports: {"runtime.load", "cape", "verify.rounds", ...}"""
    found = set()
    for node in ast.walk(ast.parse(SOURCE[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found

def local(name):
    """The local files among them, as paths.  Programs of figures/ name each other without it."""
    parts = [module.split(".") for module in imports(name)]
    paths = {f"{first}.py" for first, *_ in parts} | {f"figures/{first}.py" for first, *_ in parts}
    return (paths | {"/".join(names[:2]) + ".py" for names in parts}) & SOURCE.keys()

def place(name):
    return name.split("/")[0].removesuffix(".py")

@pytest.mark.parametrize("name", SOURCE)
def test_a_file_imports_what_it_may(name):
    """And runs no code that a user's file brings: no pickle, no torch.load that would unpickle."""
    wrong = [path for path in local(name) if place(path) not in MAY_IMPORT.get(place(name), ())]
    packages = {module.split(".")[0] for module in imports(name)}
    assert not wrong and not packages & {"pickle", "cloudpickle", "dill", "joblib", "shelve"}
    if place(name) in SEVEN:
        others = packages - {*sys.stdlib_module_names} - {*SEVEN}
        assert others <= {"torch", "transformers", "safetensors"}
    for call in re.findall(r"torch\.load\((?:[^()]|\([^()]*\))*\)", SOURCE[name]):
        assert "weights_only=True" in call

def test_the_top_level_holds_exactly_these_modules_and_no_imports_go_in_a_circle():
    assert {name for name in SOURCE if "/" not in name} == {
        f"{name}.py" for name in (*SEVEN, "bench", "train")}
    needs = {name: local(name) for name in SOURCE}
    while needs:
        leaves = {name for name, found in needs.items() if not found & needs.keys()}
        assert leaves, f"a circle among {sorted(needs)}"
        needs = {name: found for name, found in needs.items() if name not in leaves}

@pytest.mark.parametrize("name", SEVEN)
def test_the_demos_of_the_components_run(name, capsys):
    importlib.import_module(name).main()
    assert capsys.readouterr().out

SNIPPETS = re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.S)

@pytest.mark.parametrize("lines", SNIPPETS, ids=range(len(SNIPPETS)))
def test_the_snippets_of_the_readme_run(lines, tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "my-target").symlink_to(ROOT / "checkpoints/target")
    (tmp_path / "my-glide").symlink_to(ROOT / "checkpoints/glide")
    monkeypatch.chdir(tmp_path)
    exec(compile(lines, "README.md", "exec"), {"__name__": "__main__"})
    assert float(capsys.readouterr().out.split()[-1]) > 2, "tau"

def test_commands_name_programs():
    """`python FILE`, in any text: a program that is there."""
    for path, text in [*SOURCE.items(), *PAGES.items()]:
        for script in re.findall(r"\bpython ([a-z_\d/]+\.py)", text):
            assert "__main__" in SOURCE[script], (path, script)

def slugs(text):
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return [re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
            for heading in headings]

@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", PAGES[page]):
        name, _, anchor = link.partition("#")
        there = (ROOT / page).parent / name if name else ROOT / page
        assert "://" in link or there.exists(), link
        assert not anchor or "://" in link or anchor in slugs(there.read_text()), link
