"""The papers' tables by name: what tables.json says can be run, runs, and is shown; verdicts are paired tests."""
import json
import re
import shlex
import sys
from itertools import product

import pytest
from conftest import ROOT

import bench
from runtime import drafters, load

sys.path.insert(0, str(ROOT / "figures"))

import compare  # noqa: E402
import paper  # noqa: E402
import probe  # noqa: E402

RESULTS = paper.DOCS / "results"
SPECS = compare.read_specs(RESULTS, "tables.json")["tables"]
CLAIMS = compare.read_specs(RESULTS, "claims.json")
TINY = ["--limit", "1", "--max-new-tokens", "8", "--device", "cpu", "--threads", "1"]


def arms_of(spec):
    """The names of all rows that a table's commands make."""
    names = {"plain", "plain, two queries", "generate()"}
    for run in compare.commands_of(spec):
        script, arguments = paper.arguments_of(run["command"], [])
        a = bench.parser().parse_known_args(arguments)[0]
        cascades = {"cascade": load.load_cascade, "maxgram": load.load_cascade}
        labels = [bench.read_call(text, cascades, "").label if "(" in text else text for text in a.drafter]
        trees = [bench.read_call(text, bench.TREES, "tree").label for text in a.tree]
        if script == "figures/probe.py" and arguments[0] in ("calibration", "positions"):
            names |= set(labels)
            continue
        if script == "figures/probe.py" and arguments[0] == "ewif":
            trees = ["chain"]
            names |= {row["drafter"] for row in probe.table_1()}
        for drafter, tree in product(labels, trees):
            name = compare.name_of({"drafter": drafter, "tree": tree})
            if name in spec.get("arms", [name]):
                names.add(compare.name_of({"drafter": drafter, "tree": tree, "label": run.get("label")}))
    return names


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["name"])
def test_a_table_can_be_run_and_shown_as_far_as_its_words_say(spec):
    assert re.fullmatch(r"(glide|edd|cascade)-[\w.-]+|main|papers|calibration", spec["name"]) and spec["minutes"] > 0
    there = arms_of(spec)
    for run in compare.commands_of(spec):
        script, arguments = paper.arguments_of(run["command"], [])
        assert script == "bench.py" or script == "figures/probe.py" and arguments[0] in probe.MEASUREMENTS
        a = bench.parser().parse_args(arguments[script != "bench.py":])
        for text in a.tree:
            bench.check_tree(bench.read_call(text, bench.TREES, "tree"), a)
    labels = {run.get("label") for run in compare.commands_of(spec)}
    for command, made in spec.get("needs", {}).items():
        python, script, *words = shlex.split(command)
        what = words[:next(i for i, word in enumerate(words) if word.startswith("--"))]
        assert (python, script) == ("python", "train.py") and what and all(map(drafters.named, what))
        assert all(name in labels or any(name in arm for arm in there) for name in made)
    assert {*spec.get("arms", [])} <= there
    headings = set(compare.headings_of(spec.get("columns", compare.DEFAULT)))
    for row in spec.get("paper", {"rows": []})["rows"]:
        assert row["arm"] is None or row["arm"] in there
        assert row.keys() - {"arm", "as"} <= headings and row["as"]


def test_claims_compare_rows_that_a_table_makes():
    there = {spec["file"]: arms_of(spec) for spec in SPECS}
    for claim in CLAIMS:
        assert claim.get("holds") or claim.get("cannot"), claim["claim"]
        for spec in claim.get("holds", []):
            sides = spec["than"] if isinstance(spec.get("than"), list) else [spec.get("than")]
            for side in [spec.get("more"), *sides]:
                arm = side["arm"] if isinstance(side, dict) else side
                assert not isinstance(arm, str) or arm in there[spec["in"]], f"{spec['in']} will have no row of {arm}"
    assert 20 <= sum(claim.get("main", False) for claim in CLAIMS) <= 30
    assert sorted(claim["finding"] for claim in CLAIMS if "finding" in claim) == list(range(1, 11))


def test_no_file_is_forgotten_and_tuning_prompts_are_none_of_those_that_are_reported():
    for key in ("name", "file"):
        assert len({spec[key] for spec in SPECS}) == len(SPECS)
    files = {path.name for path in RESULTS.glob("*.jsonl")}
    assert files <= {spec["file"] for spec in SPECS} and {*paper.measured(RESULTS)} == files
    read = [list(bench.read.read_rows(path)) for path in (ROOT / "figures" / "tuning.jsonl", bench.PROMPTS)]
    tuning, reported = ([row.get("prompt") or row["question"] for row in rows] for rows in read)
    assert len(tuning) == 12 and not {*tuning} & {*reported}


@pytest.mark.parametrize("argv, words", [
    ([], "required: names"), (["glide-table-9"], "no table called 'glide-table-9': choose among cascade-k papers main"),
    (["main", "--limt", "3"], "--limt"), (["main", "--json", "x"], "say --out FOLDER"),
    (["main", "--out", str(RESULTS)], "docs/ is written by `paper.py write` alone"),
    (["write", "--rows", "/no/such"], "holds no measured tables"),
])
def test_mistakes_are_one_sentence(argv, words, capsys):
    assert paper.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("figures/paper.py: ") and err.count("\n") == 1 and words in err


def test_flags_given_here_win():
    command = 'python bench.py --checkpoint work/a --drafter "cascade(base, k=5)" \\\n    glide --limit 9'
    script, arguments = paper.arguments_of(command, ["--limit", "4"])
    a = bench.parser().parse_args(arguments)
    assert (script, a.limit, a.checkpoint, a.drafter) == ("bench.py", 4, "work/a", ["cascade(base, k=5)", "glide"])
    for given, checkpoint in ((command, "mine/a"), ("python bench.py --tree cape", "mine")):
        _, arguments = paper.arguments_of(given, ["--checkpoint", "mine"])
        assert bench.parser().parse_args(arguments).checkpoint == checkpoint


def test_what_is_not_there_is_left_out_with_one_sentence():
    spec = {"needs": {"python train.py bush": ["bush", "tree"], "python train.py glide": ["layer 3"]}}
    words = ["--drafter", "glide", "bush", "tree", "maxgram", "cascade(base, maxgram)", "cascade(twig, k=2)"]
    arguments, sentences = paper.shipped(words, spec, None)
    assert bench.parser().parse_args(arguments).drafter == ["glide", "maxgram", "cascade(base, maxgram)"]
    assert len(sentences) == 2 and "does not hold bush tree: `python train.py bush`" in sentences[0]
    assert sentences[1].endswith("does not hold cascade(twig, k=2)")
    arguments, (sentence,) = paper.shipped(["--drafter", "bush"], spec, "layer 3")
    assert arguments is None and "`python train.py glide` makes what is missing" in sentence
    arguments, (sentence,) = paper.shipped(["--prompts", "/no/such.jsonl"], {}, None)
    assert arguments is None and "/no/such.jsonl are not here" in sentence


def test_training_is_summed_over_its_stages(tmp_path):
    first = {"tokens_seen": 1000, "validation": {"alpha": 0.5}}
    about = {"kind": "edd", "config": {"loss": "kl"}, "tokens_seen": 24, "validation": {"alpha": 0.75}, "init": first}
    (tmp_path / "edd").mkdir()
    (tmp_path / "edd" / "training.json").write_text(json.dumps(about))
    found = {"tokens_trained": 1024, "loss": "kl", "held_out_alpha": 0.75}
    assert paper.trained({"drafter": "edd", "tree": "pct"}, str(tmp_path)) == found
    assert paper.trained({"drafter": "cascade(edd, k=2)", "stages": ["edd"]}, str(tmp_path)) == found
    assert paper.trained({"drafter": "x", "stages": ["edd", "maxgram"]}, str(tmp_path)) == {}
    assert paper.trained({"drafter": "plain"}, str(tmp_path)) == {}


@pytest.mark.long
def test_a_table_end_to_end(tmp_path, monkeypatch, capsys):
    """GLIDE's Table 2: the drafter of the first stage is not shipped, the other one is measured."""
    monkeypatch.chdir(tmp_path)
    assert paper.main(["glide-table-2", *TINY[:1], "2", *TINY[2:], "--out", "rows"]) == 0
    out, err = capsys.readouterr()
    rows = compare.read_rows(tmp_path / "rows" / "glide-table-2.jsonl")
    last = next(row for row in rows if row["tree"])
    assert rows[0]["drafter"] == "plain" and last["label"] == "both stages" and last["prompts"] == 2
    assert last["tokens_trained"] > 0 and 0 < last["held_out_alpha"] < 1 and last["totals"] > 0
    assert {"group", "speedup", "tau", "alpha", "c", "expected_speedup", "draft_ms"} <= last["by_prompt"].keys()
    assert all(len(values) == 2 for values in last["by_prompt"].values())
    assert err.count("glide-table-2: work/first does not hold glide: `python train.py glide ") == 1
    assert f"| glide × chain, both stages | w Dist. | 0.650 | {last['alpha']:.3f} |" in out
    assert "- Not shipped: first stage: `python train.py glide" in out


CHAIN, CAPE = "python bench.py --drafter glide --tree chain", "python bench.py --drafter maxgram --tree cape"


def made_up(tmp_path, monkeypatch, tables, ends=()):
    """docs/ of its own with these tables; a command makes a row of each of its drafters, or ends as it is told."""
    folder, calls, ends = tmp_path / "docs" / "results", [], list(ends)
    folder.mkdir(parents=True)
    specs = []
    for name, *commands in tables:
        runs = [{"command": command, "label": label} for command, label in commands]
        specs.append({"name": name, "title": name, "section": "s", "minutes": 1, "file": f"{name}.jsonl", "runs": runs, "columns": ["arm"]})
    (folder / "tables.json").write_text(json.dumps({"tables": specs}))
    (folder / "claims.json").write_text("[]")
    for name in ("results", "claims"):
        (folder / f"{name}.head.md").write_text(f"# {name} @FINDINGS@ @COMMON@\n")

    def rows_of_command(script, arguments, spec):
        calls.append(arguments)
        end = ends.pop(0) if ends else None
        if end:
            raise end
        a = bench.parser().parse_args(arguments)
        return [{"drafter": "plain", "tree": None}] + [{"drafter": name, "tree": tree} for name in a.drafter for tree in a.tree]
    monkeypatch.setattr(paper, "rows_of_command", rows_of_command)
    monkeypatch.setattr(paper, "DOCS", tmp_path / "docs")
    return calls


def names_in(path):
    return [compare.name_of(row) for row in compare.read_rows(path)]


def test_measuring_writes_its_own_folder_and_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, capsys):
    tables = [("a", (CHAIN, None), (CAPE, "more")), ("b", (CAPE, None)), ("c", (CHAIN + " cape", None), (CAPE, None))]
    calls = made_up(tmp_path, monkeypatch, tables, [None, None, KeyboardInterrupt(), None, RuntimeError("it broke")])
    before = sorted(tmp_path.rglob("*"))
    argv, out = ["all", "--limit", "3", "--out", str(tmp_path / "rows")], tmp_path / "rows"
    assert paper.main(argv) == 130 and "b is lost" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["a.jsonl", "measured.json"] and len(calls) == 3
    assert names_in(out / "a.jsonl") == ["plain", "glide × chain", "maxgram × cape, more"], "baselines of the first run alone"
    # The same command goes on: a is not measured again, but with other flags it is.
    assert paper.main(argv) == 2 and len(calls) == 6 and all(call[-2:] == ["--limit", "3"] for call in calls)
    said = capsys.readouterr()
    assert "a.jsonl is there; --again measures it again" in said.out and "c: RuntimeError: it broke" in said.err
    assert names_in(out / "c.jsonl") == ["plain", "maxgram × cape"], "what fails does not stop the others"
    assert paper.main(["b", "--limit", "4", *argv[3:]]) == 0 and len(calls) == 7
    assert paper.main(["b", "--limit", "4", *argv[3:], "--again"]) == 0 and len(calls) == 8
    said = paper.spec_of(out, "measured.json")
    assert said["a.jsonl"]["flags"] == "--limit 3" and said["b.jsonl"]["flags"] == "--limit 4" and said["a.jsonl"]["machine"]
    assert [path for path in sorted(tmp_path.rglob("*")) if out not in (path, *path.parents)] == before, "docs/ is as it was"


def test_write_takes_rows_in_and_check_writes_nothing(tmp_path, monkeypatch, capsys):
    made_up(tmp_path, monkeypatch, [("a", (CHAIN, None))])
    docs, rows = ["--docs", str(tmp_path / "docs")], str(tmp_path / "rows")
    assert paper.main(["check", *docs]) == 1 and not (tmp_path / "docs" / "results.md").exists()
    assert paper.main(["write", *docs]) == 0 == paper.main(["check", *docs])
    assert "## Not measured here" in (tmp_path / "docs" / "results.md").read_text()
    assert paper.main(["a", "--limit", "3", "--out", rows]) == 0 == paper.main(["check", *docs])
    assert paper.main(["write", *docs, "--rows", rows]) == 0
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "| glide × chain |" in page and "with --limit 3." in page and "## Not measured here" not in page


def test_the_fastest_on_other_prompts_stands_for_its_list(tmp_path):
    rows = [{"drafter": f"cascade(x, k={k})", "tree": "chain", "group": "all", "tokens_per_second": speed} for k, speed in ((1, 5), (2, 7), (3, 6))]
    (tmp_path / "k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    best = {"@x": [row["drafter"] for row in rows], "@xy": ["other", "another"]}
    tables = [{"command": 'python bench.py --drafter "@x" "@xy"', "arms": ["@x × chain"]}]
    (tmp_path / "tables.json").write_text(json.dumps({"tuned by": "k.jsonl", "best": best, "tables": tables}))
    (table,) = compare.read_specs(tmp_path, "tables.json")["tables"]
    assert table == {"command": 'python bench.py --drafter "cascade(x, k=2)" "other"', "arms": ["cascade(x, k=2) × chain"]}
    (tmp_path / "elsewhere").mkdir()
    (table,) = compare.read_specs(tmp_path, "tables.json", tmp_path / "elsewhere")["tables"]
    assert table["arms"] == ["cascade(x, k=1) × chain"], "without rows the first"


# ---------------------------------------------------------------- Markdown beside the paper's values
def test_the_paper_s_values_by_hand():
    rows = [{"drafter": "plain", "tree": None, "tau": None, "c": None},
            {"drafter": "glide", "tree": "chain", "tau": 2.5, "c": 0.1}]
    said = {"rows": [{"arm": "glide × chain", "as": "GLIDE", "τ": "3.0"}, {"arm": None, "as": "LLAMA", "τ": "~2"},
                     {"arm": "edd × chain", "as": "EDD"}]}
    assert compare.grid(rows, ["arm", "tau", "c"], said).splitlines() == [
        "| arm | in the paper | τ, paper | τ, here | c |",
        "| --- | --- | ---: | ---: | ---: |",
        "| plain | – | – | – | – |",
        "| glide × chain | GLIDE | 3.0 | 2.50 | 0.100 |",
        "| – | LLAMA | ~2 | – | – |",
        "| edd × chain | EDD | – | – | – |"]


def test_cells_of_lists_and_of_what_is_not_there():
    row = {"drafter": "a", "positions": [{"drafted": 8, "accepted": 6}, {"drafted": 4, "accepted": 1}],
           "bins": [{"low": 0.30000000000000004, "acceptance": 0.25}, {"low": 0.9, "acceptance": None}],
           "tau": None, "share_draft": 0.5, "lossless": False, "k1": 3}
    columns = ["position 1", "position 2", "position 3", "bin 0.3", "bin 0.9", "draft", "lossless", "loss", "k=k1:d", "k=k2:d"]
    assert compare.cells_of(row, columns) == ["0.75", "0.25", "–", "0.25", "–", "–", "**NO**", "–", "3", "–"]
    assert compare.cells_of({**row, "tau": 1.0, "share_draft": 0.256}, ["draft", "tau"]) == ["26%", "1.00"]


def exact(found):
    """p of the randomisation test by all 2^n ways of signs."""
    means = [abs(sum(sign * x for sign, x in zip(signs, found))) for signs in product((1, -1), repeat=len(found))]
    return sum(mean >= abs(sum(found)) - 1e-12 for mean in means) / len(means)


@pytest.mark.parametrize("found", [[1.0] * 8, [0.5, -0.5], [0.3, 0.1, -0.05, 0.4, 0.2, -0.1, 0.02], [0.0, 0.0], [-1.0] * 6])
def test_drawn_signs_give_the_exact_p(found):
    assert compare.sign_flips(found) == pytest.approx(exact(found), abs=0.015)
    assert compare.sign_flips(found) == compare.sign_flips(found), "the page comes out the same each time"


@pytest.fixture
def folder(tmp_path):
    """Arms on ten prompts: a is ahead of b by 0.5 on each, and of c on six of them; only a is lossless."""
    rows = []
    taus = {"a": [2.5] * 10, "b": [2.0] * 10, "c": [2.4] * 6 + [2.6] * 4}
    for name, values in taus.items():
        row = {"drafter": name, "tree": "t", "tau": sum(values) / 10, "nodes": 10, "ece": 0.06, "lossless": name == "a"}
        columns = {"group": ["x", "y"] * 5, "tau": values, "speedup": [None, *values[1:]]}
        rows += [{**row, "group": "all", "speedup": 3.0, "by_prompt": columns}, {**row, "group": "x", "tau": 7.0}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tables.json").write_text(json.dumps({"tables": []}))
    return tmp_path


def tau(more, than, **extra):
    return {"in": "r.jsonl", "key": "tau", "more": more, "than": than, **extra}


@pytest.mark.parametrize("spec, verdict, words", [
    (tau("a × t", "b × t"), "more", "τ: a × t 2.5 against b × t 2 (+0.5 a prompt, above on 10 of 10, p = 0.0"),
    (tau("b × t", "a × t"), "less", "τ: b × t 2 against a × t 2.5 (-0.5 a prompt, above on 0 of 10, p = 0.0"),
    (tau("a × t", "c × t"), "level", "τ: a × t 2.5 against c × t 2.48 (+0.02 a prompt, above on 6 of 10, p = 0.7"),
    (tau("a × t", "b × t", by=0.6), "less", "against b × t 2 + 0.6"), (tau("a × t", "b × t", by=0.5), "level", " + 0.5 "),
    (tau("a × t", "b × t", times=1.3), "less", "against 1.3 of b × t 2"), (tau("b × t", "a × t", times=0.7), "more", "against 0.7 of"),
    (tau("a × t", 2.4), "more", "τ: a × t 2.5 against 2.4 "), (tau(2.4, "a × t"), "less", "τ: 2.4 against a × t 2.5"),
    (tau("a × t", {"arm": "b × t", "key": "speedup"}), "more", "against b × t, speedup, 3 (+0.5 a prompt, above on 9 of 9"),
    (tau({"arm": "a × t", "group": "x"}, "b × t", test=False), "more", "τ: a × t (x) 7 against b × t 2 (not tested)"),
    (tau(0.05, {"arm": "a × t", "key": "ece"}, test=False), "less", "0.05 against a × t, ECE, 0.06 (not tested)"),
    (tau("a × t", {"arm": "b × t", "key": "nodes"}), None, "no figures of each prompt"),
    (tau("a × t", "d × t"), None, "not measured: d × t"), ({**tau("a × t", "b × t"), "in": "none.jsonl"}, None, "not measured: a × t, b × t"),
    ({"in": ["r.jsonl", "none.jsonl"], "every": "lossless"}, "less", "lossless in 1 of 3 rows"),
    ({"in": ["none.jsonl"], "every": "lossless"}, None, "not measured: none.jsonl"),
])
def test_comparisons_by_hand(folder, spec, verdict, words):
    (found,) = compare.judged(folder, spec)
    assert found.verdict == verdict and words in found.words + found.missing


def test_claims_are_held_level_or_not(folder):
    good, level, bad, missing = tau("a × t", "b × t"), tau("a × t", "c × t"), tau("b × t", "a × t"), tau("d × t", "a × t")
    said = [
        ({"holds": [good], "main": True, "found": "A is first", "finding": 1}, "held", ""),
        ({"holds": [tau("a × t", ["b × t", "c × t"])], "reason": "why"}, "level", "why"), ({"holds": [good, bad], "reason": "because"}, "not held", "because"),
        ({"holds": [level, bad]}, "not held", ""), ({"holds": [missing, bad]}, "not held", ""), ({"holds": [good, missing]}, paper.OPEN, "not measured: d × t"),
        ({"holds": [good], "cannot": "it needs a GPU"}, paper.OPEN, "it needs a GPU"),
    ]
    made = [{"paper": "P", "where": "Table 1", "claim": f"claim | {i}", **claim} for i, (claim, _, _) in enumerate(said)]
    assert [paper.verdict(folder, claim)[::2] for claim in made] == [tuple(expected) for _, *expected in said]
    (folder / "claims.json").write_text(json.dumps(made))
    (folder / "claims.head.md").write_text("# Claims\n")
    page = paper.claims_page(folder)
    assert "**Of the 1 that matter most: 1 held, 0 level, 0 not held.**" in page
    parts = ["claim \\| 0", "<details><summary>4 more: 0 held, 1 level, 3 not held", "| Table 1 | claim \\| 2 | **not held** | ",
             "## What cannot", "it needs a GPU", "## What waits"]
    assert [page.index(part) for part in parts] == sorted(page.index(part) for part in parts)
    assert paper.findings(folder).splitlines()[2].startswith("| A is first | held | τ: a × t 2.5 against b × t 2 ")


def test_a_prediction_by_hand():
    """Cascade's Table 1; and alpha 1/2, 1/4, c 0.2, 0.1, two tokens of base, one of small: 1 + 1/2 + 1/4 + 1/16 over 1.5."""
    (spec,) = (spec for spec in SPECS if spec["name"] == "cascade-table-1")
    printed = [float(row["EWIF"]) for row in spec["paper"]["rows"]]
    rows = probe.table_1()
    assert [row["ewif"] for row in rows] == pytest.approx(printed, abs=0.01)
    assert [row["drafter"] for row in rows] == [row["arm"] for row in spec["paper"]["rows"]]

    def row(stages, K, alpha=None, c=None):
        return {"drafter": f"cascade({', '.join(stages)})", "stages": stages, "K": K, "alpha": alpha, "c": c}
    rows = [row(["base"], [[2]], 0.5, 0.2), row(["small"], [[3]], 0.25, 0.1), row(["base", "small"], [[2, 1], [0, 0]]),
            row(["base", "small"], [[2, 1], [0, 1]]), row(["base", "maxgram"], [[1, 10], [0, 10]]), row(["maxgram"], [[10]])]
    found = probe.predicted(rows)
    assert [row["ewif"] for row in found[:3]] == pytest.approx([1.75 / 1.4, 1.328125 / 1.3, 1.8125 / 1.5])
    assert [row["ewif"] for row in found[3:]] == [None] * 3, "a model that reviews, and Max-Gram"
    assert (found[2]["k1"], found[2]["k2"], found[0]["k2"]) == (2, 1, None)
    with pytest.raises(bench.UserError, match="needs its models alone beside it"):
        probe.predicted(rows[1:3])
