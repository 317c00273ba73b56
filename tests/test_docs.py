"""The pages in docs/ are what the measured rows give; links and commands of the pages hold."""
import re
import shlex

import paper
import pytest
from conftest import ROOT

import bench
from runtime.calls import read_call

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), DOCS / "results" / "README.md"]

@pytest.mark.parametrize("page", paper.pages(), ids=lambda page: page.name)
def test_every_figure_of_a_page_stands_in_a_row(page, capsys):
    assert paper.check([page]) == 0, capsys.readouterr().err

def slugs(page):
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return [re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
            for heading in headings]

@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        there = page.parent / name if name else page
        if "://" not in link and not (there.exists() and (not anchor or anchor in slugs(there))):
            wrong.append(link)
    assert not wrong

def test_commands_of_the_readme_parse():
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"python bench\.py ([^\n`]*)", text)
    assert len(commands) > 1
    for command in commands:
        a = bench.parser().parse_args(shlex.split(command.partition("#")[0]))
        for tree in a.tree:
            read_call(tree, bench.TREES, "tree")

def test_the_snippet_of_the_readme_runs(monkeypatch, capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = re.search(r"```python\n(.*?)```", text, re.S)[1]
    monkeypatch.chdir(ROOT)
    exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()
