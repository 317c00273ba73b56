"""figures/paper.py: intervals against brute force, pages of rows made up; columns.py by hand."""
import shlex
from collections import Counter
from itertools import product

import columns
import helpers
import numpy as np
import paper
import pytest
import torch
from helpers import bench_args, write_rows
from runs import Run

import bench
import verify

def test_the_interval_against_all_resamples():
    values = [0.1, 0.5, 0.9, 0.2]
    means = sorted(np.mean(sample) for sample in product(values, repeat=4))              # 256
    assert paper.interval(np.array(values)) == pytest.approx((means[6], means[249]), abs=0.03)

# ---------------------------------------------------------------- pages
def row(method, speedups, taus):
    """A row on chats of two turns: prompts 0 and 1 are one question; the last is a story."""
    drafter, _, tree = method.partition(" x ")
    by_prompt = [{"kind": "chat/a", "question": i // 2, "speedup": speedup, "tau": tau}
                 for i, (speedup, tau) in enumerate(zip(speedups, taus))]
    by_prompt[-1]["kind"] = "story"
    return {"drafter": drafter, "tree": tree or None, "group": "all", "prompts": len(taus),
            "tau": float(np.mean(taus)), "by_prompt": by_prompt, "commit": "abc", "machine": "m",
            "date": "d"}

@pytest.fixture
def page(tmp_path, monkeypatch):
    """page(text) -> the text as `write` fills it, from three rows made up; docs/ is its own."""
    monkeypatch.setattr(paper, "ROOT", tmp_path)
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("No figures.\n")
    write_rows(tmp_path / "run.jsonl", [
        row("plain", [1] * 5, [1] * 5), row("d x slow", [1, 1, 2, 2, 3], [2, 2, 2, 3, 3]),
        row("d x fast", [2, 2, 4, 4, 6], [3, 4, 3, 3, 2])])
    paper.rows_of.cache_clear()

    def fill(text):
        (tmp_path / "docs" / "page.md").write_text(text)
        paper.write()
        return (tmp_path / "docs" / "page.md").read_text()
    yield fill
    paper.rows_of.cache_clear()

def test_ratios_and_differences_are_paired_over_questions(page):
    assert paper.compare("run", "speedup", "d x fast", "d x slow") == pytest.approx([2, 2, 2])
    # Questions: (3 + 4) / 2 - 2, 3 - 2.5, 2 - 3
    difference, low, high = paper.compare("run", "tau", "d x fast", "d x slow")
    assert difference == pytest.approx((1.5 + 0.5 - 1) / 3) and low < 0 < high
    assert paper.compare("run", "tau on chat", "d x fast", "d x slow")[0] == pytest.approx(1.0)

def test_a_page_is_filled_as_it_is_written_and_what_is_not_measured_stays_open(page):
    text = ("<!--run tau: d x fast-->0.0 and <!--run speedup: d x fast / d x slow-->9 [9, 9], "
            "<!--run tau: d x fast / d x slow-->+.00, <!--run tau: d x new-->open, "
            "<!--run speedup: d x fast / d x slow-->open\n")
    found = paper.re.sub("<!--.*?-->", "", page(text))
    assert found == "3.0 and 2 [2, 2], +.33, open, 2.00 [2.00, 2.00]\n"
    table = ("<!--table run: paper, speedup, tau-->\n\n|method|paper|speedup|τ|\n|-|-|-|-|\n"
             "|plain|1|?|?|\n|d × slow|7|?|?|\n|d × new|8|?|?|\n\n<!--end-->\n")
    found = page(table)
    assert "|plain|1|1.00|1.00|\n" in found and "|d × slow|7|1.82 [" in found
    assert "|d × new|8|open|open|" in found and "run `run`; 5 prompts; commit abc" in found
    assert paper.write(check=True) == 0
    (paper.ROOT / "docs" / "page.md").write_text("<!--run tau: d x fast-->3.1")
    assert paper.write(check=True) == 1

def test_a_claim_is_reproduced_where_all_intervals_are_above(page):
    above, below, unknown = (f"<!--run speedup: d x {methods}-->open" for methods in (
        "fast / d x slow", "slow / d x fast", "new / plain"))
    for cells, null, word in ((above + unknown, "", "yes"), (above + below, "", "partly"),
                              (above, " 2.5", "no"), (unknown, "", "open")):
        assert page(f"|{cells}|<!--reproduced{null}-->open|\n").endswith(f"-->{word}|\n")

def test_readme_quotes_the_claims_of_the_results(page):
    claim = "|A|<!--run tau: d x fast-->0.0|<!--reproduced-->open|\n"
    (paper.ROOT / "docs" / "results.md").write_text(f"|B|1|\n{claim}")
    (paper.ROOT / "README.md").write_text("<!--claims-->\n\n|A|\n\nend\n")
    page("")
    assert (paper.ROOT / "README.md").read_text() == "<!--claims-->\n\n|A|3.0|open|\n\nend\n"

# ---------------------------------------------------------------- the papers' columns
def test_formulas():
    assert columns.expected_speedup(0.648, 0.067, 5) == pytest.approx(1.97, abs=5e-3)    # Table 1
    assert columns.expected_speedup(0.516, 0.077, 5) == pytest.approx(1.46, abs=1e-2)
    assert columns.swi(100, [20, 60, 5], [1, 0.25, 0.0]) == 100 / 35

def test_columns_of_two_rounds_by_hand():
    """A chain of 3, of which two tokens are accepted, and a chain of 2, of which none is."""
    rounds = [verify.Round([5, 6, 7], [0, 1, 2], [1, 5, 6, 9], [-1, 0, 1, 2]),
              verify.Round([8], [0], [7, 1, 2], [-1, 0, 1])]
    seconds = {"prefill": 1.0, "draft": 0.4, "verify": 1.0, "other": 0.1}
    plain = bench.Record([0] * 5, [None] * 4, {"prefill": 1.0, "other": 4.0})
    overlaps = [[0.5, 0.25, 0.1], [0.25, 0.75]]
    record = columns.Observed([0, 5, 6, 7, 8], rounds, seconds, overlaps, Counter(draft=4))
    method = bench.Method("d x t", None, "d", "t", (object(), None))
    found = columns.columns(method, [{"plain": plain, "d x t": record}], 1)
    assert found["alpha_depth"] == 4 / 5 and found["c"] == pytest.approx(0.1)
    assert found["alpha_overlap"] == pytest.approx((0.5 + 0.25 + 0.1 + 0.25) / 4)

def test_the_overlap_of_a_sampled_chain():
    rule = columns.Overlap(verify.Rule(1.0))
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64)
    tree = verify.Tree(torch.tensor([0, 1]), torch.tensor([-1, 0]), None, p[1:])
    rule.choose(tree, p.log(), [0])
    assert rule.overlaps == [pytest.approx([0.6])]

def test_a_run_of_each_kind_of_method(small, tmp_path):
    """Cascades, library methods, a sampled chain, a batch: their rows have what a table needs."""
    def rows_of(flags, *run):
        flags = f"{shlex.join(bench_args(small))} --max-new-tokens 9 {flags}"
        columns.measure("name", Run(1, flags, *run), tmp_path / "rows.jsonl")
        return {paper.name_of(row): row for row in helpers.rows_of(tmp_path / "rows.jsonl")}
    cascade, others = "cascade(base, k=2)", ["prompt lookup", "assisted generation (base)"]
    rows = rows_of("", [([cascade, "glide"], ["chain"])], others)
    assert list(rows) == ["plain", *others, f"{cascade} x chain", "glide x chain"]
    assert all(row["lossless"] and len(row["by_prompt"]) == 3 for row in rows.values())
    assert rows[f"{cascade} x chain"]["swi_ms"] > 0 and rows["glide x chain"]["c"] > 0
    rows = rows_of("--temperature 1", [(["edd"], ["drawn"])])
    assert 0 < rows["edd x drawn"]["alpha_overlap"] < 1 < rows["edd x drawn"]["tau"]
    rows = rows_of("--limit 1", [(["glide"], ["cape"])], (), (2,), True)
    assert [row["prompts"] for row in rows.values()] == [2, 2]
    assert rows["glide x cape, 2 rows"]["lossless"]
