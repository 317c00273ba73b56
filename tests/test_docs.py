"""The page and the pictures in docs/ are what the measured JSON gives; drawing loses and invents nothing."""
import json
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "figures"))
import pictures
import results


def every(drawn, tag, *classes):
    """All elements of a tag with one of the classes; with all where none is given."""
    found = drawn.iter("{http://www.w3.org/2000/svg}" + tag)
    return [each for each in found if not classes or each.get("class") in classes]


# ---------------------------------------------------------------- what is committed
def test_results_and_readme_are_what_the_json_and_the_code_give(capsys):
    assert results.main(["--check"]) == 0, capsys.readouterr().err


def test_the_pictures_are_what_their_json_gives():
    drawn = pictures.drawings(pictures.DOCS)
    assert set(drawn) == {"continuation.svg", "round.svg"}
    for name, svg in drawn.items():
        there = (pictures.DOCS / name).read_text(encoding="utf-8")
        assert there == svg, f"{name} is another: run python figures/pictures.py draw"


def test_the_boxes_of_the_round_name_functions_that_exist():
    record = json.loads((pictures.DOCS / "results" / "round.json").read_text(encoding="utf-8"))
    for _, _, places in pictures.steps(record):
        for file, function in places:
            assert results.line_of(file, function) > 1


def test_every_file_of_rows_is_on_the_page_or_in_the_chart():
    spec = results.tables(pictures.DOCS / "results")
    named = {table["file"] for table in spec["tables"]} | {bar["file"] for bar in spec["chart"]["bars"]}
    assert {path.name for path in (pictures.DOCS / "results").glob("*.jsonl")} <= named


def test_the_snippet_of_the_readme_runs(monkeypatch, capsys):
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[1]
    assert len(snippet.splitlines()) <= 10
    monkeypatch.chdir(ROOT)
    exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


# ---------------------------------------------------------------- the page
ROW = {
    "target": "t", "drafter": "glide", "tree": "cape", "group": "all", "dtype": "float32", "device": "cpu",
    "threads": 4, "temperature": 0.0, "prompts": 3, "tokens_per_second": 491.26, "speedup": 1.4,
    "speedup_low": 1.26, "speedup_high": 1.876, "speedup_vs_generate": 1.57, "tau": 3.357, "alpha": None,
    "nodes": 20.44,
    "share_draft": 0.262, "share_verify": 0.68, "share_other": 0.058, "draft_ms": 1.5, "verify_ms": 4.6,
    "other_ms": 0.5, "lossless": True, "first_divergence": None, "target_ms": 2.79, "distinct_4grams": 0.262,
    "versions": {"python": "3.11", "torch": "2.13.0", "transformers": "5.23.0"},
}
PLAIN = {**ROW, "drafter": "plain", "tree": None, "tau": None, "nodes": None,
         "speedup": 1.0, "speedup_low": 1.0, "speedup_high": 1.0}
TABLE = {"section": "A paper", "title": "A table", "command": "python bench.py", "file": "rows.jsonl",
         "machine": "m"}


@pytest.fixture
def folder(tmp_path):
    """docs/ with one table of sample rows."""
    inside = tmp_path / "results"
    inside.mkdir()
    write(inside, [PLAIN, ROW])
    (inside / "tables.json").write_text(json.dumps({"machines": {"m": "a machine"}, "tables": [TABLE]}))
    return tmp_path


def write(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_table_says_all_that_is_needed_to_judge_it(folder):
    page = results.page(folder / "results")
    head = "## A paper\n\n### A table\n\n```\npython bench.py\n```\n\n"
    setting = "a machine; target `t`, float32, cpu (4 threads), temperature 0, python 3.11, torch 2.13.0"
    assert head + setting in page
    plain = "| plain | 491.3 | 1.00× [1.00–1.00] | 1.57× | – | – | – | – | – | – | – | yes |"
    drafted = ("| glide × cape | 491.3 | 1.40× [1.26–1.88] | 1.57× | 3.36 | – | 20.4 "
               "| 26% | 68% | 6% | 6.6 | yes |")
    assert f"{plain}\n{drafted}\n" in page
    assert "Baseline: plain, 2.79 ms a token; distinct 4-grams of its output: 26%." in page


def test_an_output_that_left_plain_decoding_is_said(folder):
    gap = {"prompt": 2, "token": 17, "logit_gap": 0.00123}
    write(folder / "results", [PLAIN, {**ROW, "lossless": False, "first_divergence": gap}])
    page = results.page(folder / "results")
    assert "| **NO** |" in page
    assert "glide × cape leaves plain decoding at token 17 of prompt 3: " in page
    assert "the target's logits of the two tokens differ by 0.0012 there." in page


def test_groups_columns_and_a_table_that_waits(folder):
    rows = [ROW, {**ROW, "group": "code", "nodes": 1.0}, {**ROW, "group": "math", "nodes": 2.0}]
    write(folder / "results", rows)
    spec = {"machines": {"m": "a machine"}, "tables": [
        {**TABLE, "groups": ["math", "code"], "columns": ["arm", "nodes", "bin=draft_ms:.3f"]},
        {**TABLE, "file": "later.jsonl", "title": "Another"}]}
    (folder / "results" / "tables.json").write_text(json.dumps(spec))
    page = results.page(folder / "results")
    first, second = page.index("**math**, 3 prompts"), page.index("**code**, 3 prompts")
    assert first < page.index("| glide × cape | 2.0 | 1.500 |") < second
    assert second < page.index("| glide × cape | 1.0 | 1.500 |")
    assert "**all**" not in page
    assert "### Another\n\n```\npython bench.py\n```\n\n*Not measured yet.*" in page


def test_rows_of_a_figure_make_a_table_too(folder):
    write(folder / "results", [{"target": "t", "drafter": "edd", "ece": 0.0321}, {"drafter": "vdm", "ece": None}])
    spec = {"machines": {"m": "a machine"}, "tables": [{**TABLE, "columns": ["arm", "ECE=ece:.3f"]}]}
    (folder / "results" / "tables.json").write_text(json.dumps(spec))
    page = results.page(folder / "results")
    assert "\n\na machine.\n\n| arm | ECE |\n| --- | ---: |\n| edd | 0.032 |\n| vdm | – |\n" in page


def test_check_fails_where_the_page_is_another(folder, capsys):
    assert results.main(["--docs", str(folder), "--check"]) == 1
    assert results.main(["--docs", str(folder)]) == 0
    assert results.main(["--docs", str(folder), "--check"]) == 0
    write(folder / "results", [PLAIN, {**ROW, "tau": 4.0}])
    assert results.main(["--docs", str(folder), "--check"]) == 1
    assert "results.md" in capsys.readouterr().err


def test_links_to_functions_follow_them():
    line = results.line_of("verify.py", "Target.forward")
    assert "def forward" in (ROOT / "verify.py").read_text(encoding="utf-8").splitlines()[line - 1]
    text = "see [`Target.forward`](verify.py#L{})."
    near, far = line + results.SLACK, line + results.SLACK + 1
    assert results.with_links(text.format(near)) == text.format(near)
    assert results.with_links(text.format(far)) == text.format(line)
    with pytest.raises(ValueError, match="has no Target.nowhere"):
        results.with_links("[`Target.nowhere`](verify.py#L1)")


# ---------------------------------------------------------------- the bar chart
def test_bars_are_as_long_as_they_say(folder):
    rows = [{**ROW, "tree": "a", "speedup": 1.5}, {**ROW, "tree": "b", "speedup": 3.0, "speedup_high": 3.2}]
    write(folder / "results", rows)
    bar = {"file": "rows.jsonl", "drafter": "glide", "label": "x", "paper": "GLIDE"}
    bars = [{**bar, "tree": tree} for tree in "ab"]
    chart = {"title": "T", "subtitle": "S", "group": "all", "bars": bars}
    drawn = ElementTree.fromstring(results.bar_chart(chart, folder / "results"))
    short, long, _ = [float(bar.get("width")) for bar in every(drawn, "rect", "bar-GLIDE")]
    assert long == pytest.approx(2 * short, abs=0.11)
    with pytest.raises(ValueError, match="has no row"):
        results.bar_chart({**chart, "group": "other"}, folder / "results")


# ---------------------------------------------------------------- the pictures
NASTY = 'if a < b & "c":\n\treturn \x07 é“ ' + "long" * 60


def joined(line):
    return "".join(character for character, _ in line)


def test_wrapping_keeps_every_character():
    pieces = [("prompt", NASTY), ("drafted", " a b\n"), ("own", "c")]
    lines = pictures.wrap(pieces, 20)
    assert all(len(line) <= 21 for line in lines)               # a line's end may hang over
    assert "".join(map(joined, lines)) == "".join(text for _, text in pieces).expandtabs(4)
    assert [joined(line) for line in pictures.wrap([("own", "one two three")], 8)] == ["one two ", "three"]


def test_a_continuation_boxes_what_was_accepted_and_nothing_else():
    rounds = [{"drafted": "", "own": "A", "tokens": 1}, {"drafted": " <b> & c", "own": "d", "tokens": 4},
              {"drafted": "", "own": " e\n", "tokens": 1}, {"drafted": "f", "own": "", "tokens": 1}]
    record = {"drafter": "glide", "tree": "cape", "prompt": NASTY, "rounds": rounds}
    drawn = ElementTree.fromstring(pictures.continuation(record))
    assert [each.text for each in every(drawn, "text", "mono yes")] == ["<b> & c", "f"]
    boxes = [float(each.get("width")) for each in every(drawn, "rect", "yes-box")]
    assert boxes[1:] == pytest.approx([8 * pictures.CELL - 1, pictures.CELL - 1], abs=0.06)
    assert "6 tokens in 3 rounds" in [each.text for each in every(drawn, "text")]


ROUND = {
    "drafter": "glide", "tree": "cape", "round": 3, "before": "once\n", "tokens": ["r", "a", " b", "\n", "d"],
    "parents": [-1, 0, 0, 2, 2], "p": [None, 0.5, 0.25, 0.001, 1.0], "path": [0, 2, 4], "own": "<",
    "expand": ["glide.py", "Drafter.expand"], "build": ["cape.py", "cape"],
    "keep": ["glide.py", "Drafter.keep"],
}


def test_a_round_draws_its_tree():
    drawn = ElementTree.fromstring(pictures.round_(ROUND))
    nodes = [each.get("class") for each in every(drawn, "rect") if float(each.get("width")) == pictures.NODE]
    boxes = [nodes.count(kind) for kind in ("own-box", "yes-box", "box")]
    assert boxes == [2, 2, 2 + 1]                               # one more: the frame of the mask is as wide
    edges = [each.get("class") for each in every(drawn, "path") if "C" in each.get("d")]
    assert sorted(edges) == ["edge", "edge", "own-line", "yes-line", "yes-line"]
    # the mask: each node sees itself and its ancestors
    assert len(every(drawn, "path", "seen", "yes-cell")) == 1 + 2 + 2 + 3 + 3
    assert {"·b", "↵", "<.01", ".25", "1.00"} <= {each.text for each in every(drawn, "text")}


# ---------------------------------------------------------------- what the pictures are drawn from
@pytest.fixture(scope="module")
def run():
    import bench
    short = ["--limit", "1", "--max-new-tokens", "24", "--device", "cpu"]
    return bench.Run(["--drafter", "glide", "--tree", "cape", *short])


def parts(run):
    import bench
    _, ids, limit = run.prompts[0]
    return run, run.drafters["glide"], bench.builder(run, "glide", run.trees[0]), ids, limit


def plain_text(run):
    """The model's own continuation, by transformers."""
    import torch
    _, ids, limit = run.prompts[0]
    prompt = torch.tensor([ids])
    mask = torch.ones_like(prompt)
    how = {"attention_mask": mask, "max_new_tokens": limit, "do_sample": False, "pad_token_id": 0}
    out = run.model.generate(prompt, **how)
    return run.tokenizer.decode(out[0, len(ids):], skip_special_tokens=True)


def test_a_recorded_continuation_is_the_targets_own(run):
    rounds = pictures.record_continuation(*parts(run))
    assert "".join(each["drafted"] + each["own"] for each in rounds) == plain_text(run)
    assert rounds[0]["tokens"] == 1 and rounds[0]["drafted"] == ""
    assert any(each["drafted"] for each in rounds), "no draft was accepted: choose another prompt"


def test_recorded_rounds_follow_each_other(run):
    forward = run.target.forward
    rounds = pictures.record_rounds(*parts(run))
    run.target.forward = forward
    text = rounds[0]["tokens"][0]
    for each in rounds:
        assert each["before"].endswith(text[:-len(each["tokens"][0])])
        assert text.endswith(each["tokens"][0]), "the root is the last token of the round before"
        assert all(each["parents"][below] == above for above, below in zip(each["path"], each["path"][1:]))
        assert each["p"][0] is None and all(0 <= p <= 1 for p in each["p"][1:])
        text += "".join(each["tokens"][node] for node in each["path"][1:]) + each["own"]
    assert text == plain_text(run)
    # CAPE's chain is the drafter's most likely token at each place
    chain = rounds[0]["p"][1:6]
    assert all(p >= max(q for q, above in zip(rounds[0]["p"], rounds[0]["parents"]) if above == node)
               for node, p in enumerate(chain))
