"""figures/paper.py and tables.py: tests against brute force, tables that can be run, pages from rows."""
import json
from functools import lru_cache
from itertools import product
from pathlib import Path

import batches
import numpy as np
import paper
import probe
import pytest
import tables
from conftest import ROOT
from test_bench import args, small  # noqa: F401 (small: a fixture)

import bench
from runtime import calls, load
from training import drafters

RESULTS = paper.DOCS / "results"
CONTENT = paper.read_specs()
SPECS = CONTENT["tables"]

# ---------------------------------------------------------------- intervals and tests over prompts
def flips(differences):
    """p by all 2^n signs."""
    sums = [sum(s * d for s, d in zip(signs, differences)) for signs in product((-1, 1), repeat=len(differences))]
    return np.mean([abs(each) >= abs(sum(differences)) - 1e-9 for each in sums])

@pytest.mark.parametrize("differences", [[1.0] * 8, [0.3, -0.1, 0.7, 0.2, -0.4, 0.9], [0.0, 0.0, 1.0], [2.0, -2.0]])
def test_sign_flips_against_all_signs(differences):
    assert tables.sign_flips(differences) == pytest.approx(flips(differences), abs=0.02)
    assert tables.sign_flips([1.0] * 40) == 1 / (1 + tables.DRAWS), "no smaller p is possible"

def test_sign_flips_reject_as_often_as_they_say():
    """Of 400 samples without a difference about 5 % have p < 0.05."""
    noise = np.random.RandomState(1).standard_normal((400, 20))
    rejected = sum(tables.sign_flips(list(sample)) < 0.05 for sample in noise)
    assert 8 <= rejected <= 34                 # within 3.2 standard deviations of 20

def test_the_interval_against_all_resamples():
    values = [0.1, 0.5, 0.9, 0.2]
    means = sorted(np.mean(sample) for sample in product(values, repeat=4))              # 256
    assert tables.interval(np.array(values)) == pytest.approx((means[6], means[249]), abs=0.03)

def test_holm_by_hand_and_against_its_definition():
    assert tables.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    ps = list(np.random.RandomState(3).random_sample(12) ** 4)
    for level in (0.01, 0.05, 0.2):
        # Step down: reject while the smallest p left is at most level / (how many are left).
        left, rejected = sorted(ps), []
        while left and left[0] <= level / len(left):
            rejected.append(left.pop(0))
        assert sorted(p for p, adjusted in zip(ps, tables.holm(ps)) if adjusted <= level) == rejected

# ---------------------------------------------------------------- comparisons by hand
def row(name, group="all", tree="t", **more):
    return {"drafter": name, "tree": tree, "group": group, **more}

def rows_by_hand():
    """a is twice as fast as b on each of eight prompts; c has no values of each prompt."""
    kinds = ["x"] * 4 + ["y"] * 4
    of_b = [1.0, 2.0, 1.5, 1.25, 1.1, 1.7, 1.3, 0.9]
    a = {"group": kinds, "speedup": [2 * each for each in of_b], "tau": [3.0] * 8}
    b = {"group": kinds, "speedup": of_b, "tau": [3.0, 2.0, None, 2.0, 2.0, 2.0, 3.0, 3.0]}
    return [row("a", by_prompt=a, speedup=9), row("b", by_prompt=b, speedup=9, ewif=1.5), row("c", alpha=0.5, tau=2),
            row("d", alpha=0.75), row("a", "y", speedup=9), row("b", "y", speedup=9)]

def claim(first, second, key="speedup", **more):
    return {"claim": "C", "arms": [first, second], "key": key, **more}

def compare(*given, **more):
    return tables.compare({"r": rows_by_hand()}, "r", claim(*given, **more))

def test_a_ratio_a_difference_and_what_is_not_tested():
    faster = compare("a × t", "b × t")
    assert (faster.effect, faster.low, faster.high) == pytest.approx((2, 2, 2)) and faster.above == "8/8"
    assert faster.p == pytest.approx(2 / 256, abs=0.004)
    assert compare("a × t", "b × t", group="y").above == "4/4"
    longer = compare("a × t", "b × t", "tau")
    assert longer.effect == pytest.approx(4 / 7) and longer.above == "4/7", "a prompt without a value is left out"
    untested = compare("c × t", "d × t", "alpha")
    assert (untested.effect, untested.p, untested.low) == (-0.25, None, None)
    assert compare("a × t", "e × t") is None
    # the best of several; a value that is predicted stands for each prompt; another key
    assert compare("b × t", ["e × t", "a × t"]).second == "`a × t`"
    speeds = np.array(rows_by_hand()[1]["by_prompt"]["speedup"])
    assert compare("b × t", {"arm": "b × t", "key": "ewif"}).effect == pytest.approx(np.exp(np.log(speeds / 1.5).mean()))

def test_verdicts_are_by_the_adjusted_p():
    claims = [claim("a × t", "b × t"), claim("b × t", "a × t"), claim("a × t", "b × t", "tau"), claim("d × t", "c × t", "alpha"),
              claim("c × t", "d × t", "alpha"), claim("a × t", "b × t", equal=True), claim("a × t", "b × t", "tau", equal=True)]
    specs = [{"name": "one", "file": "r", "compare": claims[:3]}, {"name": "two", "file": "r", "compare": claims[3:]}]
    made = tables.compare_all(specs, {"r": rows_by_hand()})
    found = [tables.verdict(each) for each in (*made["one"], *made["two"])]
    assert found == ["held", "**not held**", "undecided", "as claimed, untested", "**not held**, untested", "**not held**", "not refuted"]
    p = made["one"][0].p
    assert made["one"][0].adjusted == pytest.approx(5 * p), "five are tested on the page, two are not"
    table = tables.comparisons_table(made["one"])
    assert f"|C|speedup: `a × t` over `b × t`|2.00× [2.00, 2.00]|8/8|{5 * p:.2g}|held|" in table

# ---------------------------------------------------------------- tables that can be run
TRAINED = ("glide-l13", "glide-n2", "glide-w64", "glide-w256", "glide-shared", "glide-shared-f768", "glide-shared-top", "vanilla-shared",
           "vanilla-shared-f768", "edd-shared", "vdm-shared", "eagle", "medusa")          # of commands, where nothing is shipped
LOADERS = {**load.loaders(str(load.CHECKPOINTS)), **dict.fromkeys(TRAINED, lambda: None)}

@lru_cache
def arms_of(file):
    """The names of all rows of a file, by the command that makes it."""
    (run,) = [spec for spec in SPECS if spec["file"] == file and "command" in spec]
    script, arguments = paper.arguments_of(run["command"], [])
    if script == "train.py":
        made = arguments[:next(i for i, word in enumerate(arguments) if word.startswith("--"))]
        assert all(drafters.named(name) for name in made)
        return {f"{name} × chain" for name in made}
    kind = None
    if script == "figures/probe.py":
        kind, *arguments = arguments
        assert kind in probe.MEASUREMENTS
    a = bench.parser().parse_args(arguments)
    labels = [calls.read_call(text, LOADERS, "drafter").label for text in a.drafter]
    trees = [calls.read_call(text, bench.TREES, "tree").label for text in a.tree]
    if script == "figures/batches.py":
        return {tables.name_of({"drafter": labels[0], "tree": "chain", "batch": batch}) for batch in batches.BATCHES}
    if kind in ("calibration", "positions"):
        return {*labels}
    names = {"plain", "generate()", "prompt lookup", "assisted generation (base)", "assisted generation (small)", *(each["drafter"] for each in probe.table_1())}
    return names | {" × ".join(pair) for pair in product(labels, ["chain"] if kind else trees)}

@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["name"])
def test_a_table_shows_and_compares_arms_of_its_run(spec):
    there = arms_of(spec["file"])
    assert {*spec.get("shown", [])} <= there
    headings = {*tables.headings_of(spec.get("columns", tables.DEFAULT))}
    for printed in spec.get("paper", {"rows": []})["rows"]:
        assert printed["arm"] in there and printed.keys() - {"arm", "as"} <= headings
    for each in spec.get("compare", []):
        first, others = each["arms"]
        for arm in [first, *(others if isinstance(others, list) else [others])]:
            side = arm if isinstance(arm, dict) else {"arm": arm}
            assert side["arm"] in arms_of(side.get("file", spec["file"]))

def test_every_file_of_rows_has_a_table_and_a_date():
    files = {path.relative_to(RESULTS).as_posix(): tables.read_rows(path) for path in RESULTS.rglob("*.jsonl")}
    assert files.keys() <= {spec["file"] for spec in SPECS}
    assert all({"date", "machine", "flags"} <= row.keys() for rows in files.values() for row in rows)
    findings = {finding["name"] for finding in CONTENT["findings"]}
    assert findings == {each["finding"] for spec in SPECS for each in spec.get("compare", []) if "finding" in each}

def test_a_cascades_k_is_the_fastest_on_prompts_that_are_not_reported():
    def prompts(path):
        return {row.get("prompt") or row["question"] for row in map(json.loads, path.read_text().splitlines())}
    tuning = prompts(ROOT / "figures" / "tuning.jsonl")
    assert len(tuning) == 12 and not tuning & prompts(Path(bench.PROMPTS))
    for file, table in (("cascade-k.jsonl", "cascade-table-2"), ("t5/k.jsonl", "t5")):
        best = {}
        for name, row in tables.whole(tables.read_rows(RESULTS / file)).items():
            models = name.partition(", k=")[0]
            if name.startswith("cascade"):
                best[models] = max(best.get(models, (0, "")), (row["tokens_per_second"], name))
        (spec,) = [spec for spec in SPECS if spec["name"] == table]
        compared = {name for name in spec["shown"] if name.startswith("cascade")}
        measured = {name for each in SPECS if each["file"] == spec["file"] for name in each["shown"]}
        assert compared <= {name for _, name in best.values()} <= measured

# ---------------------------------------------------------------- a training's log
def test_a_training_log_is_rows(tmp_path):
    """Its last run alone, each step once."""
    def logged(alpha):
        return {"loss": 1.0, "alpha": alpha, "tau": 1 + 2 * alpha, "by_kind": {}}
    lines = [{"command": "python train.py old"}, {"step": 0, "tokens_seen": 0, "old": logged(0.9)},
             {"command": "python train.py glide edd --init x"}, {"step": 0, "tokens_seen": 0, "glide": logged(0.0), "edd": logged(0.125)},
             {"step": 5, "tokens_seen": 500, "glide": logged(0.25), "edd": logged(0.25)},
             {"command": "python train.py glide edd --init x --resume"},
             {"step": 5, "tokens_seen": 500, "glide": logged(0.5), "edd": logged(0.25)},
             {"step": 9, "tokens_seen": 1250, "glide": logged(0.75), "edd": logged(0.5)}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    glide, edd = tables.rows_of_log(tmp_path / "log.jsonl", ["*"])
    assert [[each[key] for key in ("drafter", "alpha", "alpha_first", "tau", "tokens_trained")] for each in (glide, edd)] == [
        ["glide", 0.75, 0.0, 2.5, 1250], ["edd", 0.5, 0.125, 2.0, 1250]]
    assert [glide["alpha 0k"], glide["alpha 1k"]] == [0.5, 0.75], "by thousands of tokens; of equal names the last"
    assert tables.cells_of(glide, ["so far=alpha 1k:.2f"]) == ["0.75"]
    assert [each["drafter"] for each in tables.rows_of_log(tmp_path / "log.jsonl", ["g*"])] == ["glide"]

# ---------------------------------------------------------------- measure, write, check
def made_up(tmp_path, monkeypatch, specs):
    """docs/ of its own with these tables."""
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    (folder / "tables.json").write_text(json.dumps({"tables": specs}))
    (folder / "results.head.md").write_text("# Results, temperature 0 @FINDINGS@\n")
    monkeypatch.setattr(paper, "DOCS", tmp_path / "docs")

def test_a_table_is_measured_goes_on_and_is_written(small, tmp_path, monkeypatch, capsys):  # noqa: F811
    """An interrupted table keeps its prompts; a larger --limit measures the further ones alone; --again, or other settings, all."""
    flags = " ".join(args(small, "--drafter", "glide", "--tree", "chain", "cape"))
    compared = [claim("glide × cape", "glide × chain", "tau")]
    made_up(tmp_path, monkeypatch, [
        {"name": "a", "section": "S", "title": "A", "file": "a.jsonl", "command": f"python bench.py {flags} \\\n --limit 9", "takes": "1 min",
         "shown": ["plain", "glide × cape"], "compare": compared},
        {"name": "b", "section": "S", "title": "B", "file": "a.jsonl", "shown": ["glide × chain"], "columns": ["arm", "tau"]},
        {"name": "c", "section": "S", "title": "C", "file": "c.jsonl", "command": "python train.py edd --work work/none", "drafters": ["*"]}])
    out = tmp_path / "rows"
    decoded, interrupts = [], [5]

    def measure_one(run, arm, number):
        decoded.append(arm.name)
        if [len(decoded)] == interrupts:
            interrupts.clear()
            raise KeyboardInterrupt
        return real(run, arm, number)
    real = bench.measure_one
    monkeypatch.setattr(bench, "measure_one", measure_one)

    def run(limit, *more):
        decoded.clear()
        return paper.main(["b", "--limit", str(limit), "--out", str(out), *more])
    assert run(2) == 130 and "goes on with a" in capsys.readouterr().err and not (out / "a.jsonl").exists()
    assert run(2) == 0 and len(decoded) == 4, "the first prompt of four arms was kept"
    assert run(2) == 0 and decoded == [] and "--again measures it again" in capsys.readouterr().out
    assert run(3) == 0 and len(decoded) == 4
    assert run(3, "--again") == 0 and len(decoded) == 12
    assert run(2, "--seed", "1") == 0 and len(decoded) == 8, "other settings: anew"
    assert run(3, "--again") == 0
    rows = tables.read_rows(out / "a.jsonl")
    arm = tables.whole(rows)["glide × cape"]
    assert len(arm["by_prompt"]["tau"]) == 3 and arm["mean_speedup"] == pytest.approx(np.prod(arm["by_prompt"]["speedup"]) ** (1 / 3))
    assert paper.main(["c", "--out", str(out)]) == 2 and "run the training" in capsys.readouterr().err

    # docs/ is written from rows, and checked
    page = tmp_path / "docs" / "results.md"
    assert paper.main(["check"]) == 1 and not page.exists()
    assert paper.main(["write", "--rows", str(out)]) == 0 == paper.main(["check"])
    text = page.read_text()
    assert "with --limit 3; target" in text and "### C" not in text and text.count("|glide × chain|") == 1
    assert "|C|τ: `glide × cape` over `glide × chain`|" in text and "Lossless: 2 of 2 arms." in text
    page.write_text(text.replace("Lossless: 2", "Lossless: 3"))
    assert paper.main(["check"]) == 1 and "out of date: results.md" in capsys.readouterr().err
    assert paper.main(["write"]) == 0 and page.read_text() == text

# ---------------------------------------------------------------- Markdown beside the paper's values
def test_the_papers_values_by_hand():
    rows = [row("plain", tree=None, tau=None, c=None), row("glide", tree="chain", tau=2.5, c=0.1)]
    printed = {"rows": [{"arm": "glide × chain", "as": "GLIDE", "τ": "3.0"}]}
    lines = tables.grid(rows, ["arm", "tau", "c"], printed).splitlines()
    assert lines[0] == "|arm|in the paper|τ, paper|τ, ours|c|"
    assert lines[2:] == ["|plain|–|–|–|–|", "|glide × chain|GLIDE|3.0|2.50|0.100|"]
    _, folded, _ = tables.by_kind([row("a", "x", tau=2), row("a", "y", tau=3)], ["a × t"], ["tau"])
    assert folded.splitlines()[2:] == ["|a × t|2.00|3.00|"]

def test_a_kind_and_its_parts():
    """"x" holds the prompts of "x/p" and "x/q", and not that of "xy"; each has its own folded table."""
    values = {"group": ["x/p", "xy", "x/q"], "tau": [1.0, 2.0, 4.0]}
    rows = [row("a", by_prompt=values), *(row("a", kind, tau=tau) for kind, tau in [("x", 2.5), ("x/p", 1), ("x/q", 4), ("xy", 2)])]
    assert tables.by_prompt(rows, "a × t", "tau", "x") == [1.0, 4.0] and tables.by_prompt(rows, "a × t", "tau", "x/q") == [4.0]
    _, folded, _ = tables.by_kind(rows, ["a × t"], ["tau"])
    assert folded.splitlines()[0::2] == ["|arm|x|xy|", "|a × t|2.50|2.00|"]
    _, folded, _ = tables.by_kind(rows, ["a × t"], ["tau"], "x")
    assert folded.splitlines()[0::2] == ["|arm|p|q|", "|a × t|1.00|4.00|"]

def test_predictions_by_hand():
    """Cascade's Table 1; alpha 1/2 and 1/4, c .2 and .1: 1 + 1/2 + 1/4 + 1/16 over 1.5; and Theorem 4.3."""
    (spec,) = (spec for spec in SPECS if spec["name"] == "cascade-table-1")
    printed = [float(each["EWIF"]) for each in spec["paper"]["rows"]]
    assert [each["ewif"] for each in probe.table_1()] == pytest.approx(printed, abs=0.01)

    def cascade(stages, K, **more):
        return {"drafter": f"cascade({', '.join(stages)})", "stages": stages, "K": K, "alpha": None, "c": None, **more}
    # Two inner rounds a round, of 1.5 tokens: 1 + alpha' = 1.5.
    vertical = cascade(["base", "small"], [[3, 0], [0, 1]], runs=[10, 20, 40], nodes=3.0)
    rows = [cascade(["base"], [[2]], alpha=0.5, c=0.2), cascade(["small"], [[3]], alpha=0.25, c=0.1),
            cascade(["base", "small"], [[2, 1], [0, 0]]), vertical, cascade(["maxgram"], [[10]])]
    found = [each["ewif"] for each in probe.predicted(rows)]
    # phi(alpha) = alpha (1 - alpha') + alpha^2 alpha' = .375; (1 - .5 * .375^2) / (.5 * (1 + 2 * .2 + 2 * .1))
    expected = [1.75 / 1.4, 1.328125 / 1.3, 1.8125 / 1.5, (1 - 0.5 * 0.375 ** 2) / 0.8]
    assert found[:4] == pytest.approx(expected) and found[4] is None
    with pytest.raises(bench.UserError, match="needs its models alone beside it"):
        probe.predicted(rows[1:3])
