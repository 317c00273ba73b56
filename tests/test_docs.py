"""The pages in docs/ are what the measured rows give; links and commands of the documentation hold."""
import re
import shlex

import paper
import pytest
import tables
from conftest import ROOT

import bench
from runtime.calls import read_call

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), DOCS / "results" / "README.md"]

def test_docs_are_what_the_rows_give(capsys):
    assert paper.main(["check"]) == 0, capsys.readouterr().err

def slugs(page):
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return [re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings]

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
    assert len(commands) > 3
    for command in commands:
        a = bench.parser().parse_args(shlex.split(command.partition("#")[0]))
        for tree in a.tree:
            read_call(tree, bench.TREES, "tree")

def test_the_snippet_of_the_readme_runs(monkeypatch, capsys):
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[1]
    monkeypatch.chdir(ROOT)
    exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()

# ---------------------------------------------------------------- a table of the page
ROW = {"target": "t", "drafter": "glide", "tree": "cape", "group": "all", "dtype": "float32", "device": "cpu",
    "threads": 4, "temperature": 0.0, "prompts": 3, "tokens_per_second": 491.26, "speedup": 1.4,
    "speedup_low": 1.26, "speedup_high": 1.876, "tau": 3.357, "alpha": None, "nodes": 20.44, "draft_ms": 1.5, "verify_ms": 5.03,
    "other_ms": 0.31, "lossless": True, "first_divergence": None, "target_ms": 2.79, "versions": {"python": "3.11", "torch": "2.13.0"},
    "machine": "a machine", "date": "a day", "flags": ""}
PLAIN = {**ROW, "drafter": "plain", "tree": None, "tau": None, "nodes": None, "tokens_per_second": 245.63,
         "speedup": 1.0, "speedup_low": 1.0, "speedup_high": 1.0, "baseline": True}
SPEC = {"section": "A paper", "title": "A table", "command": "python bench.py", "file": "rows.jsonl"}

def table(rows, **spec):
    rows = [{**row, "mean_speedup": row["speedup"]} for row in rows]
    return "\n\n".join(tables.table(SPEC | spec, rows, [], "Here: float32, temperature 0."))

def test_a_table_says_all_that_is_needed_to_judge_it():
    text = table([PLAIN, ROW], shows="It is fast.", note="A note.", paper={"where": "there", "rows": []})
    head = "### A table\n\nIt is fast. In the paper: there.\n\n```\npython bench.py\n```\n\n"
    assert text.startswith(head + "3 prompts; a machine; a day; target `t`; cpu (4 threads); python 3.11; torch 2.13.0.")
    assert "|plain|–|245.6|1.00× [1.00–1.00]|–|–|–|–|–|–|" in text
    assert "|glide × cape|–|491.3|1.40× [1.26–1.88]|3.36|–|20.4|1.5|5.0|0.3|" in text
    assert text.endswith("Baseline: plain, 2.79 ms a token. Lossless: 2 of 2 arms. A note.")
    # in the order of `shown`
    assert re.findall(r"^\|(\w+)", table([PLAIN, ROW], shown=["glide × cape", "plain"]), re.M) == ["arm", "glide", "plain"]
    text = table([PLAIN, {**ROW, "lossless": False, "first_divergence": {"prompt": 2, "token": 17, "logit_gap": 0.00123}}])
    assert "**Not lossless**: glide × cape leaves plain decoding at token 17 of prompt 3, where the logits differ by 0.0012." in text
