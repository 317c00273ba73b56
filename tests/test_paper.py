"""The papers' tables by name: what tables.json says can be run, runs, and is shown; verdicts are paired tests."""
import json
import re
import shutil
from fnmatch import fnmatch
from functools import partial
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import tables as compare
import paper
import charts as pictures
import probe
import pytest
from conftest import ROOT
from test_bench import args, small  # noqa: F401

import bench
from runtime import calls, measure as clock, load
from training import drafters

RESULTS = paper.DOCS / "results"
SPECS = compare.read_specs(RESULTS, "tables.json")["tables"]
CLAIMS = compare.read_specs(RESULTS, "claims.json")

def run_of(spec):
    """The table whose command makes the rows, its script, its arguments, its flags."""
    run = paper.run_of(spec, SPECS)
    script, arguments = paper.arguments_of(run["command"], [])
    return run, script, arguments, bench.parser().parse_known_args(arguments)[0]

def arms_of(spec):
    """The names of all rows that a table's run makes."""
    run, script, arguments, a = run_of(spec)
    if script == "train.py":
        made = arguments[:next(i for i, word in enumerate(arguments) if word.startswith("--"))]
        return {f"{name} × chain" for name in made for pattern in run["drafters"] if fnmatch(name, pattern)}
    if script == "figures/batches.py":
        return {"glide × chain"}
    kinds = {"cascade": load.load_cascade, "maxgram": load.load_cascade, "beside": getattr(load, "load_beside", load.load_cascade),
             "glide": partial(load.load_drafter, None, "glide")}
    labels = [calls.read_call(text, kinds, "").label if "(" in text else text for text in a.drafter]
    trees = [calls.read_call(text, bench.TREES, "tree").label for text in a.tree]
    if script == "figures/probe.py" and arguments[0] in ("calibration", "positions"):
        return {*labels}
    names = {"plain", "plain, two queries", "generate()", "prompt lookup"}
    names |= {f"assisted generation ({stage})" for stage in ("base", "small")} | {row["drafter"] for row in probe.table_1()}
    trees = ["chain"] if script == "figures/probe.py" and arguments[0] == "ewif" else trees
    return names | {name for name in map(" × ".join, product(labels, trees)) if name in run.get("arms", [name])}

@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["name"])
def test_a_table_can_be_run_and_shown_as_far_as_its_words_say(spec):
    assert re.fullmatch(r"(glide|edd|cascade)-[\w.-]+|main|papers|calibration|training(-third|-fifth)?|smollm2[\w-]*", spec["name"])
    run, script, arguments, a = run_of(spec)
    there = arms_of(spec)
    if script == "train.py":
        assert all(drafters.named(name.removesuffix(" × chain")) for name in there)
        assert all(any(fnmatch(name, f"{pattern} × chain") for name in there) for pattern in run["drafters"])
    else:
        assert script in ("bench.py", "figures/batches.py") or script == "figures/probe.py" and arguments[0] in probe.MEASUREMENTS
        a = bench.parser().parse_args(arguments[script == "figures/probe.py":])
        for text in a.tree:
            calls.check_tree(calls.read_call(text, bench.TREES, "tree"), bench.MOST_NODES)
        assert run["minutes"] > 0
    assert {*run.get("arms", []), *spec.get("shown", [])} <= there
    headings = set(compare.headings_of(spec.get("columns", compare.DEFAULT)))
    for row in spec.get("paper", {"rows": []})["rows"]:
        assert row["arm"] is None or row["arm"] in spec.get("shown", there)
        assert row.keys() - {"arm", "as"} <= headings and row["as"]

def test_claims_compare_rows_that_a_table_makes():
    there = {}
    for spec in SPECS:                                                         # SmolLM2's rows, too
        there.setdefault(Path(spec["file"]).name, set()).update(arms_of(spec))
    kinds = {row["group"] for row in bench.read.read_rows(bench.PROMPTS)}
    kinds |= {"mt_bench", "gsm8k_test", "HumanEval", "news"}                   # SmolLM2's
    for claim in CLAIMS:
        assert claim.get("holds") or claim.get("cannot"), claim["claim"]
        for spec in claim.get("holds", []):
            sides = spec["than"] if isinstance(spec.get("than"), list) else [spec.get("than")]
            for side in [spec.get("more"), *sides]:
                arm = side["arm"] if isinstance(side, dict) else side
                files = spec["in"] if isinstance(spec["in"], list) else [spec["in"]]
                assert not isinstance(arm, str) or all(arm in there[file] for file in files), f"{files} will have no row of {arm}"
            assert spec.get("group", "retell") in kinds
    assert 20 <= sum(claim.get("main", False) for claim in CLAIMS) <= 30
    assert sorted(claim["finding"] for claim in CLAIMS if "finding" in claim) == list(range(1, 11))

def test_no_file_is_forgotten_and_tuning_prompts_are_none_of_those_that_are_reported():
    assert len({spec["name"] for spec in SPECS}) == len(SPECS)
    assert all(sum("command" in spec for spec in SPECS if spec["file"] == file) == 1 for file in {spec["file"] for spec in SPECS})
    files = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.jsonl")}
    assert files <= {*(spec["file"] for spec in SPECS), *compare.read_specs(RESULTS, "tables.json")["curves"]} and {*paper.measured(RESULTS)} == files
    read = [list(bench.read.read_rows(path)) for path in (ROOT / "figures" / "tuning.jsonl", bench.PROMPTS)]
    tuning, reported = ([row.get("prompt") or row["question"] for row in rows] for rows in read)
    assert len(tuning) == 12 and not {*tuning} & {*reported}

def test_flags_given_here_win_and_work_stands_elsewhere():
    command = 'python bench.py --checkpoint work/a --drafter "cascade(base, k=5)" \\\n    glide --limit 9'
    script, arguments = paper.arguments_of(command, ["--limit", "4"], "my trainings")
    a = bench.parser().parse_args(arguments)
    assert (script, a.limit, a.checkpoint, a.drafter) == ("bench.py", 4, "my trainings/a", ["cascade(base, k=5)", "glide"])
    assert bench.parser().parse_args(paper.arguments_of(command, ["--checkpoint", "mine"])[1]).checkpoint == "mine"

def test_what_is_not_there_is_left_out_with_one_sentence(tmp_path):
    kept, absent = ["glide", "cascade(base, maxgram, k=(8, 1))", "beside(edd, maxgram)"], ["bush", "cascade(twig, k=2)", "beside(tree, maxgram)"]
    arguments, (sentence,) = paper.shipped(["--drafter", *kept, *absent])
    assert bench.parser().parse_args(arguments).drafter == kept and sentence.endswith("does not hold " + " ".join(absent))
    arguments, (sentence,) = paper.shipped(["--drafter", "bush"])
    assert arguments is None and sentence.endswith("does not hold bush")
    script, log, (sentence,) = paper.lacking({"command": "python train.py edd --work work/a"}, [], tmp_path)
    assert (script, log) == ("train.py", None) and f"{tmp_path}/a/log.jsonl is not there" in sentence

def said(alpha, **kinds):
    """What a log says of a drafter."""
    by_kind = {kind: {"alpha": x, "tau": 1 + x} for kind, x in kinds.items()}
    return {"loss": 1.0, "alpha": alpha, "tau": 1 + 2 * alpha, "held_out_loss": 2.0, "by_kind": by_kind}

def test_a_training_log_is_rows_a_table_and_curves(tmp_path, monkeypatch, capsys):
    """Its last run alone, each step once; a gain is over the last million tokens, between evaluations by a straight line."""
    lines = [{"command": "python train.py old"}, {"step": 0, "tokens_seen": 0, "old": said(0.9)}, {"command": "python train.py glide edd --init x"},
             {"step": 0, "tokens_seen": 0, "tokens_per_s": 9, "glide": said(0.0, x=0.1, y=0.2), "edd": said(0.125, x=0.1, y=0.2)},
             {"step": 5, "tokens_seen": 500_000, "glide": said(0.25, x=0.25, y=0.25), "edd": said(0.25, x=0.25, y=0.5)},
             {"command": "python train.py glide edd --init x --resume"},
             {"step": 5, "tokens_seen": 500_000, "glide": said(0.5, x=0.5, y=0.25), "edd": said(0.25, x=0.25, y=0.5)},
             {"step": 9, "tokens_seen": 1_250_000, "glide": said(0.75, x=0.5, y=0.75), "edd": said(0.5, x=0.75, y=0.25)}]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = compare.rows_of_log(tmp_path / "a" / "log.jsonl")
    assert [(row["drafter"], row["group"]) for row in rows] == [(name, kind) for name in ("glide", "edd") for kind in ("all", "x", "y")]
    assert rows[0]["curve"] == [[0, 0.0], [500_000, 0.5], [1_250_000, 0.75]] and rows[0]["tau"] == 2.5 and rows[0]["init"]
    assert [row["gain"] for row in rows] == pytest.approx([0.75 - 0.25, 0.5 - 0.3, 0.75 - 0.225, 0.5 - 0.1875, 0.75 - 0.175, 0.25 - 0.35])
    assert [row["drafter"] for row in compare.rows_of_log(tmp_path / "a" / "log.jsonl", ["g*"])] == ["glide"] * 3
    spec = {"name": "t", "title": "T", "section": "s", "minutes": 0, "file": "t.jsonl", "command": "python train.py glide --work work/a",
            "drafters": ["*"], "columns": ["arm", "alpha before", "alpha", "gain"], "kinds": ["alpha"]}
    calls = made_up(tmp_path, monkeypatch, [], specs=[spec])
    assert paper.main(["t", "--work", str(tmp_path), "--out", str(tmp_path / "rows")]) == 0 and not calls
    assert "| glide × chain | 0.000 | 0.750 | +0.5000 |" in capsys.readouterr().out
    assert (tmp_path / "rows" / "t.svg").read_text() == pictures.curves(compare.read_rows(tmp_path / "rows" / "t.jsonl"))

CHAIN, CAPE = "python bench.py --drafter glide --tree chain", "python bench.py --drafter maxgram --tree cape"

def made_up(tmp_path, monkeypatch, tables, ends=(), specs=()):
    """docs/ of its own with these tables, or specs; a command makes a row of each of its drafters, or ends as it is told."""
    folder, calls, ends = tmp_path / "docs" / "results", [], list(ends)
    folder.mkdir(parents=True)
    specs = [*specs]
    for name, command in tables:
        more = {"file": f"{command}.jsonl", "shown": ["maxgram × cape"]}
        if command.startswith("python"):
            more = {"command": command, "file": f"{name}.jsonl", "minutes": 1}
        specs.append({"name": name, "title": name, "section": "s", "columns": ["arm"], **more})
    (folder / "tables.json").write_text(json.dumps({"tables": specs}))
    (folder / "claims.json").write_text("[]")
    for name in ("results", "claims"):
        (folder / f"{name}.head.md").write_text(f"# {name} @FINDINGS@ @COMMON@\n")

    def rows_of_command(script, arguments, spec, a):
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
    tables = [("a", CHAIN), ("b", CAPE), ("d", "b"), ("c", CHAIN + " cape")]
    calls = made_up(tmp_path, monkeypatch, tables, [None, KeyboardInterrupt(), None, bench.UserError("it broke"), None, None, KeyboardInterrupt()])
    before = sorted(tmp_path.rglob("*"))
    argv, out = ["all", "--limit", "3", "--out", str(tmp_path / "rows")], tmp_path / "rows"
    assert paper.main(argv) == 130 and "the same command goes on with b" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["a.jsonl", "measured.json"] and len(calls) == 2
    # The same command goes on: a is not measured again, but with other flags it is.  d is rows of b.
    assert paper.main(argv) == 2 and len(calls) == 4 and all(call[-2:] == ["--limit", "3"] for call in calls)
    said = capsys.readouterr()
    assert "a.jsonl is there; --again measures it again" in said.out and "c: it broke\n" in said.err and "Traceback" not in said.err
    assert names_in(out / "b.jsonl") == ["plain", "maxgram × cape"] and not (out / "c.jsonl").exists()
    assert paper.main(["c", *argv[1:]]) == 0 and names_in(out / "c.jsonl") == ["plain", "glide × chain", "glide × cape"]
    assert paper.main(["d", "--limit", "4", *argv[3:]]) == 0 and len(calls) == 6
    assert paper.main(["b", "--limit", "4", *argv[3:]]) == 0 and len(calls) == 6, "d has measured it"
    assert paper.main(["a", *argv[1:], "--again"]) == 130 and "without --again it goes on with a" in capsys.readouterr().err
    assert paper.main(["a", *argv[1:]]) == 0 and len(calls) == 8, "what was there before is not taken for it"
    said = paper.measured(out)
    assert said["a.jsonl"]["flags"] == "--limit 3" and said["b.jsonl"]["flags"] == "--limit 4" and said["a.jsonl"]["machine"]
    assert [path for path in sorted(tmp_path.rglob("*")) if out not in (path, *path.parents)] == before, "docs/ is as it was"

def test_write_takes_rows_in_and_check_writes_nothing(tmp_path, monkeypatch, capsys):
    made_up(tmp_path, monkeypatch, [("a", CHAIN), ("d", "a")])
    rows = str(tmp_path / "rows")
    assert paper.main(["check"]) == 1 and not (tmp_path / "docs" / "results.md").exists()
    assert paper.main(["write"]) == 0 == paper.main(["check"])
    assert "## Not measured here" in (tmp_path / "docs" / "results.md").read_text()
    assert paper.main(["a", "--limit", "3", "--out", rows]) == 0 == paper.main(["check"])
    assert paper.main(["write", "--rows", rows]) == 0
    page = (tmp_path / "docs" / "results.md").read_text()
    assert page.count("| glide × chain |") == 1 and "with --limit 3." in page and "## Not measured here" not in page

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
    rows = [{"drafter": "plain", "tree": None, "tau": None, "c": None}, {"drafter": "glide", "tree": "chain", "tau": 2.5, "c": 0.1}]
    said = {"rows": [{"arm": "glide × chain", "as": "GLIDE", "τ": "3.0"}, {"arm": None, "as": "LLAMA", "τ": "~2"},
                     {"arm": "edd × chain", "as": "EDD"}]}
    assert compare.grid(rows, ["arm", "tau", "c"], said).splitlines() == [
        "| arm | in the paper | τ, paper | τ, here | c |", "| --- | --- | ---: | ---: | ---: |", "| plain | – | – | – | – |",
        "| glide × chain | GLIDE | 3.0 | 2.50 | 0.100 |", "| – | LLAMA | ~2 | – | – |", "| edd × chain | EDD | – | – | – |"]

def exact(found):
    """p of the randomisation test by all 2^n ways of signs."""
    means = [abs(sum(sign * x for sign, x in zip(signs, found))) for signs in product((1, -1), repeat=len(found))]
    return sum(mean >= abs(sum(found)) - 1e-12 for mean in means) / len(means)

@pytest.mark.parametrize("found", [[1.0] * 8, [0.3, 0.1, -0.05, 0.4, 0.2, -0.1, 0.02], [0.0, 0.0]])
def test_drawn_signs_give_the_exact_p(found):
    assert compare.sign_flips(found) == pytest.approx(exact(found), abs=0.015) == compare.sign_flips([-x for x in found])
    split = [(x > 0) - (x < 0) for x in found if x]
    assert compare.sign_test(found) == pytest.approx(exact(split)), "a sign test is that of the signs alone"

def test_two_kinds_of_text_are_tested_by_all_ways_of_dealing_them_out():
    mine, its = [3.0, 1.0, 4.0, 2.5], [1.0, 0.5, 2.0]
    means = [sum(chosen) / 4 - (sum(mine + its) - sum(chosen)) / 3 for chosen in combinations(mine + its, 4)]
    found = sum(mine) / 4 - sum(its) / 3
    p = sum(abs(mean) >= found - 1e-12 for mean in means) / len(means)
    assert compare.relabelled(mine, its) == pytest.approx(p, abs=0.015) == compare.relabelled(its, mine)

@pytest.fixture
def folder(tmp_path):
    """Twelve prompts of the kinds x and y in turn: b is below a on each, c on seven.  A row's own figures are others than its prompts'."""
    rows = []
    taus = {"a": [2.5] * 12, "b": [2.0] * 12, "c": [2.4] * 7 + [2.6] * 5, "d": [2.0, 3.0] * 6, "e": [9.0] + [2.0] * 11}
    for number, (name, values) in enumerate(taus.items()):
        row = {"drafter": name, "tree": "t", "tau": number, "nodes": 10, "ece": 0.06, "lossless": name == "a"}
        columns = {"group": ["x", "y"] * 6, "tau": values, "speedup": [None, *values[1:]]}
        rows += [{**row, "group": "all", "speedup": 3.0, "by_prompt": columns}, *({**row, "group": kind, "speedup": 3.0} for kind in "xy")]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tables.json").write_text(json.dumps({"tables": []}))
    return tmp_path

def tau(more, than, **extra):
    return {"in": "r.jsonl", "key": "tau", "more": more, "than": than, **extra}

def kind(arm, group, **key):
    return {"arm": arm, "group": group, **key}

FAST = {"key": "speedup"}

@pytest.mark.parametrize("spec, verdict, words", [
    # what is shown is what is tested, means over prompts, and not a row's own figure
    (tau("a × t", "b × t"), "more", "τ: a × t 2.5 against b × t 2 (+0.5 a prompt, above on 12 of 12, p = 0.0"),
    (tau("b × t", "a × t"), "less", "τ: b × t 2 against a × t 2.5 (-0.5 a prompt, above on 0 of 12, p = 0.0"),
    (tau("a × t", "c × t"), "level", "τ: a × t 2.5 against c × t 2.48 (+0.0167 a prompt, above on 7 of 12, p = 0.7"),
    (tau("a × t", "b × t", by=0.6), "less", "against b × t 2 + 0.6"), (tau("a × t", "b × t", by=0.5), "level", " + 0.5 "),
    (tau("b × t", "a × t", times=0.7), "more", "against 0.7 of"), (tau("a × t", 2.4), "more", "τ: a × t 2.5 against 2.4 "),
    (tau("a × t", ["b × t", "c × t", "f × t"], best=True), "level", "τ: a × t 2.5 against c × t 2.48"),
    # speeds by their ratios
    (tau("a × t", "b × t", **FAST, times=1.2), "more", "speedup: a × t 2.5 against 1.2 of b × t 2 (1.04 times a prompt, above on 11 of 11"),
    # two tests that differ
    (tau("a × t", "c × t", by=-0.08), "more", "; by a sign test 0.77)"),
    # one kind of text; two kinds, which share no prompt
    (tau("d × t", "c × t", group="y"), "more", "τ: d × t (y) 3 against c × t (y) 2.5"), (tau("a × t", "c × t", group="x"), "level", "of 6"),
    (tau(kind("d × t", "y"), kind("d × t", "x")), "more", "τ: d × t (y) 3 against d × t (x) 2 (+1, 6 and 6 prompts, p = 0.0"),
    # without values of each prompt no verdict, whatever the figures; a tie is none either
    (tau("e × t", {"arm": "b × t", "key": "ece"}), "untested", "τ: e × t 4 against b × t, ECE, 0.06 (untested)"),
    (tau("a × t", "b × t", key="nodes"), "untested", "nodes: a × t 10 against b × t 10 (untested)"),
    (tau("a × t", "f × t"), None, "not measured: f × t"),
    ({"in": ["r.jsonl", "none.jsonl"], "every": "lossless"}, "less", "lossless in 1 of 5 rows")])
def test_comparisons_by_hand(folder, spec, verdict, words):
    (found,) = compare.judged(folder, spec)
    assert found.verdict == verdict and words in found.words + found.missing

def test_claims_are_held_level_or_not(folder):
    good, level, bad, missing = tau("a × t", "b × t"), tau("a × t", "c × t"), tau("b × t", "a × t"), tau("f × t", "a × t")
    untested = tau("b × t", "a × t", key="nodes")
    said = [({"holds": [good], "main": True, "found": "A is first", "finding": 1}, "held", ""),
        ({"holds": [tau("a × t", ["b × t", "c × t"])], "reason": "why"}, "level", "why"),
        ({"holds": [good, bad], "reason": "because"}, "not held", "because"), ({"holds": [level, bad]}, "not held", ""),
        ({"holds": [missing, bad]}, "not held", ""), ({"holds": [good, missing]}, paper.OPEN, "not measured: f × t"),
        ({"holds": [good], "cannot": "it needs a GPU"}, paper.OPEN, "it needs a GPU"), ({"holds": [good, untested]}, "untested", "")]
    made = [{"paper": "P", "where": "Table 1", "claim": f"claim | {i}", **claim} for i, (claim, _, _) in enumerate(said)]
    assert [paper.verdict(folder, claim)[::2] for claim in made] == [tuple(expected) for _, *expected in said]
    (folder / "claims.json").write_text(json.dumps(made))
    (folder / "claims.head.md").write_text("# Claims\n")
    page = paper.claims_page(folder)
    assert "**Of the 1 that matter most: 1 held, 0 level, 0 not held.**" in page
    assert "| claim \\| 2 | **not held** | " in page
    shutil.copytree(folder, folder / "smollm2")                                # the same rows, as a public model's
    its = paper.claims_page(folder)
    assert "not held. On SmolLM2, of 1: 1 held, 0 level, 0 not held.**" in its
    assert all(line.count("**not held**") in (0, 2) for line in its.splitlines())
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

def test_an_interrupted_table_keeps_its_prompts(small, tmp_path, monkeypatch):  # noqa: F811
    """With seconds and prices.  A larger --limit measures the further prompts alone; --again and other waiting of threads all."""
    real, decoded, ends, prices = clock.measured, [], [8], iter([0.01, 0.02, 0.03])

    def measured(arm, *given):
        decoded.append(arm.name)
        if [len(decoded)] == ends:
            raise KeyboardInterrupt(ends.clear())
        return real(arm, *given)
    monkeypatch.setattr(clock, "measured", measured)
    monkeypatch.setattr(clock, "measured_prices", lambda *_: {"glide": {"cost": 0.1, "node_price": next(prices), "start": 0.0}})

    def table(limit, again=False):
        decoded.clear()
        flags = args(small, "--drafter", "glide", "--tree", "chain", "pct-cost", "--limit", str(limit))
        rows = paper.rows_of_command("bench.py", flags, {}, SimpleNamespace(out=tmp_path, again=again))
        assert all(row["lossless"] for row in rows) and [row["prompts"] for row in rows[:5]] == [limit] * 5
        return rows[3], rows[4]["prices"]["node_price"], len(decoded)
    with pytest.raises(KeyboardInterrupt):
        table(2)
    (path,) = (tmp_path / "kept").iterdir()
    row, price, count = table(2)
    found = json.loads(path.read_text())["prompts"].values()
    assert row["tokens_per_second"] == row["tokens"] / sum(arms["glide x chain"]["seconds"] for arms in found)
    assert (price, count) == (0.01, 5) and table(3)[1:] == (0.01, 5) and table(1)[1:] == (0.01, 0) and table(1, again=True)[1:] == (0.02, 5)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert table(1)[1:] == (0.03, 5)
    for file in path.parent.iterdir():
        file.write_text("[]")
    with pytest.raises(bench.UserError, match="is damaged"):
        table(1)
