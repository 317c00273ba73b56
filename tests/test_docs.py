"""The pages and the pictures in docs/ are what the measured JSON gives."""
import json
import re
import xml.etree.ElementTree as ElementTree

import tables as compare
import paper
import charts as pictures
import pytest
from conftest import ROOT

DOCS = ROOT / "docs"

def test_docs_are_what_the_rows_give(capsys):
    assert paper.main(["check"]) == 0, capsys.readouterr().err
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    found = page.split("## What we found")[1].split("\n\n")[1]
    assert len(page.splitlines()) <= 700 and len(found.splitlines()) == 2 + 10

def test_the_page_of_rounds_is_its_template_with_its_data():
    import rounds
    page = (DOCS / "rounds.html").read_text(encoding="utf-8")
    data = json.loads(pictures.DATA.search(page)[1])
    assert rounds.page(data, rounds.TEMPLATE.read_text(encoding="utf-8")) == page

def test_the_snippet_of_the_readme_runs(monkeypatch, capsys):
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[1]
    assert len(snippet.splitlines()) <= 10
    monkeypatch.chdir(ROOT)
    exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()

# ---------------------------------------------------------------- a table of the page
ROW = {"target": "t", "drafter": "glide", "tree": "cape", "group": "all", "dtype": "float32", "device": "cpu",
    "threads": 4, "temperature": 0.0, "prompts": 3, "tokens_per_second": 491.26, "speedup": 1.4,
    "speedup_low": 1.26, "speedup_high": 1.876, "speedup_vs_generate": 1.57, "tau": 3.357, "alpha": None,
    "nodes": 20.44, "share_draft": 0.262, "share_verify": 0.68, "share_other": 0.058, "draft_ms": 1.5, "round_ms": 6.6,
    "lossless": True, "first_divergence": None, "target_ms": 2.79, "distinct_4grams": 0.262, "versions": {"python": "3.11", "torch": "2.13.0"},
}
PLAIN = {**ROW, "drafter": "plain", "tree": None, "tau": None, "nodes": None, "tokens_per_second": 245.63,
         "speedup": 1.0, "speedup_low": 1.0, "speedup_high": 1.0}
SPEC = {"section": "A paper", "title": "A table", "command": "python bench.py", "file": "rows.jsonl"}

def table(tmp_path, rows, **spec):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["a machine", "float32", "temperature 0"]
    return "\n\n".join(compare.table(SPEC | spec, compare.read_rows(path), ["a machine", "a day"], common))

def test_a_table_says_all_that_is_needed_to_judge_it(tmp_path):
    text = table(tmp_path, [PLAIN, ROW], claim="It is fast.", note="A note.", paper={"where": "there", "rows": []})
    head = "### A table\n\nIt is fast. In the paper: there.\n\n```\npython bench.py\n```\n\n"
    assert text.startswith(head + "3 prompts, a day, target `t`, cpu (4 threads), python 3.11, torch 2.13.0.")
    assert "| plain | – | 245.6 | 1.00× [1.00–1.00] | 1.00× | 1.57× | – | – | – | – | – | – | – | yes |" in text
    assert "| glide × cape | – | 491.3 | 1.40× [1.26–1.88] | 2.00× | 1.57× | 3.36 | – | 20.4 | 26% | 68% | 6% | 6.6 | yes |" in text
    assert "Baseline: plain, 2.79 ms a token; distinct 4-grams of its output: 26%.  \nA note." in text
    assert text.endswith("A note.") and "<details>" not in text
    assert "glide × cape |" not in table(tmp_path, [PLAIN, ROW], shown=["plain"])
    text = table(tmp_path, [PLAIN, {**ROW, "lossless": False, "first_divergence": {"prompt": 2, "token": 17, "logit_gap": 0.00123}}])
    assert "| **NO** |" in text and "glide × cape leaves plain decoding at token 17 of prompt 3, where the logits differ by 0.0012." in text

# ---------------------------------------------------------------- the pictures
def texts(svg):
    """The texts of a well-formed picture."""
    return [each.text for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]

def test_bars_say_what_the_rows_say(tmp_path):
    rows = [{**ROW, "tree": "a", "speedup": 1.5}, {**ROW, "tree": "b", "speedup": 3.04, "speedup_high": 3.2}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bars = [{"arm": f"glide × {tree}", "label": f"bar {tree}", "paper": "GLIDE"} for tree in "ab"]
    chart = {"file": "rows.jsonl", "title": "T", "subtitle": "S", "bars": bars}
    assert {"T", "S", "bar a", "bar b", "1.50×", "3.04×", "GLIDE"} <= {*texts(pictures.bar_chart(chart, tmp_path))}
    with pytest.raises(KeyError):
        pictures.bar_chart({**chart, "bars": [{**bars[0], "arm": "other"}]}, tmp_path)

ROUND = {"accepted": " <b> & c", "bonus": "d", "choice": "ch", "verified": 4, "path": [0, 1, 3], "own": 7,
    "texts": ["r", "a", "b", "c", "e"], "parents": [-1, 0, 0, 1, 1], "p": [None, 0.5, 0.25, 0.001, 1.0]}
ARM = {"name": "glide × cape", "tokens": 4, "first": "r", "rounds": [ROUND]}

def test_a_round_draws_its_verified_tree():
    svg = pictures.one_round(ARM, "once\n")
    shown = texts(svg)
    assert {"r", "a", "b", "c", "ch", ".50", ".25", "<.01", "… once↵"} <= {*shown} and "e" not in shown and "1.00" not in shown
    assert "glide × cape, round 1 of a continuation: 3 nodes verified, 2 accepted, 3 new tokens" in shown
    classes = [each.get("class") for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")]
    assert [classes.count(kind) for kind in ("yes-line", "own-line", "edge")] == [2, 1, 1]
    # the mask: each node sees itself and its ancestors
    assert classes.count("seen") + classes.count("yes-cell") == 1 + 2 + 2 + 3
