"""The papers' tables by name: what tables.json says can be run, runs, and is shown beside the paper's values."""
import json
import re
import shlex
import sys
from itertools import product

import pytest
from conftest import ROOT

import bench
import train

sys.path.insert(0, str(ROOT / "figures"))

import claims  # noqa: E402
import paper  # noqa: E402
import results  # noqa: E402
import tabular  # noqa: E402

SPECS = results.tables(paper.RESULTS)["tables"]
CLAIMS = json.loads((paper.RESULTS / "claims.json").read_text(encoding="utf-8"))
TINY = ["--limit", "1", "--max-new-tokens", "8", "--device", "cpu", "--threads", "1"]


def arms_of(spec):
    """The names of all rows that a table's commands make."""
    names = {"plain", "plain, two queries", "generate()"}
    cascades = {"cascade": bench.load_cascade}
    for run in tabular.commands_of(spec):
        script, arguments = paper.arguments_of(run["command"], [])
        a = bench.parser().parse_args(arguments)
        trees = [bench.read_call(text, bench.TREES, "tree").label for text in a.tree]
        if script == "figures/ewif.py":
            trees = ["chain"]
            names |= {row["drafter"] for row in paper.ewif.table_1()}
        labels = [bench.read_call(text, cascades, "").label if "(" in text else text for text in a.drafter]
        if script in ("figures/calibration.py", "figures/acceptance.py"):
            names |= set(labels)
            continue
        if script == "figures/repeated.py":
            arms = ["plain", *(f"{drafter} × {tree}" for drafter, tree in product(labels, trees))]
            names |= {f"{arm}, {copies} copies" for arm in arms for copies in paper.repeated.COPIES}
            continue
        for drafter, tree in product(labels, trees):
            names.add(tabular.name_of({"drafter": drafter, "tree": tree, "label": run.get("label")}))
    return names


# ---------------------------------------------------------------- what is committed
def test_names_are_unique_and_say_what_they_are():
    names = [spec["name"] for spec in SPECS]
    assert len(set(names)) == len(names) and not {"all", "list"} & {*names}
    assert all(re.fullmatch(r"(glide|edd|cascade)-[\w.-]+|main", name) for name in names)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["name"])
def test_a_table_can_be_run_as_far_as_its_words_say(spec):
    known = {name for name, *_ in train.FLAGS} | {"data", "resume"}
    for run in tabular.commands_of(spec):
        script, arguments = paper.arguments_of(run["command"], [])
        assert script in paper.SCRIPTS
        a = bench.parser().parse_args(arguments)
        for text in a.tree:
            tree = bench.read_call(text, bench.TREES, "tree")
            tree.function.bounds(**tree.settings)
    for command in spec.get("needs", {}).values():
        python, script, *words = shlex.split(command)
        assert (python, script) == ("python", "train.py")
        what = words[:next(i for i, word in enumerate(words) if word.startswith("--"))]
        assert what and {*what} <= {*train.DRAFTERS}
        assert {word[2:] for word in words if word.startswith("--")} <= known
    for name in spec.get("columns", tabular.DEFAULT):
        heading, cell = tabular.column(name)
        assert heading and callable(cell)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["name"])
def test_the_paper_s_values_stand_beside_rows_that_the_commands_make(spec):
    there = arms_of(spec)
    headings = {tabular.column(name)[0] for name in spec.get("columns", tabular.DEFAULT)}
    for row in spec.get("paper", {"rows": []})["rows"]:
        assert row["arm"] is None or row["arm"] in there
        assert row.keys() - {"arm", "as"} <= headings and row["as"]
    for comparison in spec.get("paired", []):
        assert {comparison["arm"], comparison["against"]} <= there
    assert {*spec.get("arms", [])} <= there
    labels = {run.get("label") for run in tabular.commands_of(spec)}
    assert all(name in labels or any(name in arm for arm in there) for name in spec.get("needs", {}))


def test_tables_that_share_a_file_share_its_commands():
    commands = {}
    for spec in SPECS:
        own = [run["command"] for run in tabular.commands_of(spec)]
        assert commands.setdefault(spec["file"], own) == own


def sides(claim):
    """(file, arm) of all rows that a claim compares."""
    for spec in claim.get("holds", []):
        for given in (spec.get("more"), spec.get("than")):
            if isinstance(given, list):
                yield given[0], given[1]
        if "paired" in spec:
            file, *arms, _ = spec["paired"]
            yield from ((file, arm) for arm in arms)


def test_claims_compare_rows_that_a_table_makes():
    there = {}
    for spec in SPECS:
        there.setdefault(spec["file"], set()).update(arms_of(spec))
    for claim in CLAIMS:
        for file, arm in sides(claim):
            assert arm in there[file], f"{claim['claim']}: {file} will have no row of {arm}"
        assert claim.get("holds") or claim.get("cannot"), claim["claim"]


# ---------------------------------------------------------------- the command
def test_list_names_every_table_and_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)                          # where no work/ is
    assert paper.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [spec["name"] for spec in SPECS]
    line = next(line for line in lines if line.startswith("glide-figure-9 "))
    assert "not shipped: width 128, width 256, width 64" in line


@pytest.mark.parametrize("argv, words", [
    ([], "name tables"), (["glide-table-9"], "no table called 'glide-table-9': choose among main glide-table-1"),
    (["main", "--limt", "3"], "--limt"), (["main", "--json", "x"], "say --out FOLDER"),
])
def test_mistakes_are_one_sentence(argv, words, capsys):
    assert paper.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("figures/paper.py: ") and err.count("\n") == 1 and words in err


def test_names_come_first_then_flags():
    assert paper.names_and_flags(["a", "b", "--limit", "4"]) == (["a", "b"], ["--limit", "4"])
    assert paper.names_and_flags(["all"]) == (["all"], [])
    first, second = SPECS[:2]
    assert paper.chosen(SPECS, ["all"]) == SPECS
    assert paper.chosen(SPECS, [second["name"], first["name"], second["name"]]) == [second, first]


def test_flags_given_here_win():
    command = 'python bench.py --checkpoint work/a --drafter "cascade(base, k=5)" \\\n    glide --limit 9'
    script, arguments = paper.arguments_of(command, ["--limit", "4"])
    a = bench.parser().parse_args(arguments)
    assert script == "bench.py" and a.limit == 4
    assert a.checkpoint == "work/a" and a.drafter == ["cascade(base, k=5)", "glide"]
    _, arguments = paper.arguments_of(command, ["--checkpoint", "mine"])
    assert bench.parser().parse_args(arguments).checkpoint == "mine/a"
    _, arguments = paper.arguments_of("python bench.py --tree cape", ["--checkpoint", "mine"])
    assert bench.parser().parse_args(arguments).checkpoint == "mine"


def test_what_is_not_there_is_left_out_with_one_sentence():
    needs = {"bush": "python train.py bush", "tree": "python train.py bush"}
    words = ["--drafter", "glide", "bush", "tree", "maxgram", "cascade(base, maxgram)", "cascade(twig, k=2)"]
    spec = {"needs": needs}
    arguments, sentences = paper.shipped(words, spec, None)
    assert bench.parser().parse_args(arguments).drafter == ["glide", "maxgram", "cascade(base, maxgram)"]
    assert len(sentences) == 2 and "does not hold bush tree: `python train.py bush`" in sentences[0]
    assert sentences[1].endswith("does not hold cascade(twig, k=2)")
    assert paper.shipped(["--drafter", "bush"], spec, None)[0] is None
    assert paper.shipped(words, {**spec, "arms": ["glide × chain"]}, None) == (arguments, [])
    _, (sentence,) = paper.shipped(["--drafter", "bush"], {"needs": {"layer 3": "python train.py glide"}}, "layer 3")
    assert "`python train.py glide` makes what is missing" in sentence
    arguments, (sentence,) = paper.shipped(["--prompts", "/no/such.jsonl"], {}, None)
    assert arguments is None and "/no/such.jsonl are not here" in sentence


def test_a_preset_end_to_end(tmp_path, monkeypatch, capsys):
    """GLIDE's Table 2: the drafter of the first stage is not shipped, the other one is measured."""
    monkeypatch.chdir(tmp_path)
    tmp_path = tmp_path / "out"
    assert paper.main(["glide-table-2", *TINY, "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    (file,) = tmp_path.iterdir()
    rows = results.read_rows(file)
    assert file.name == "glide-table-2.jsonl" and rows[0]["drafter"] == "plain" and rows[-1]["drafter"] == "glide"
    assert rows[-1]["label"] == "both stages" and rows[-1]["prompts"] == 1 and "label" not in rows[0]
    assert rows[-1]["tokens_trained"] > 0 and rows[-1]["loss"] == "ce" and 0 < rows[-1]["held_out_alpha"] < 1
    assert err.count("glide-table-2: work/first does not hold glide: `python train.py glide ") == 1
    assert "### Table 2: before and after the target's own text" in out
    alpha = f"{rows[-1]['alpha']:.3f}"
    assert f"| glide × chain, both stages | w Dist. | 0.650 | {alpha} |" in out
    assert "| glide × chain, first stage | w/o Dist. | 0.648 | – |" in out
    assert "- Not shipped: first stage: `python train.py glide" in out


class Script:
    """Stands for bench.py: notes its arguments, writes a row of each drafter, or ends as it is told."""

    def __init__(self, statuses=()):
        self.calls, self.statuses = [], list(statuses)

    def main(self, argv):
        self.calls.append(argv)
        status = self.statuses.pop(0) if self.statuses else 0
        a = bench.parser().parse_args(argv)
        rows = [{"drafter": "plain", "tree": None}]
        rows += [{"drafter": name, "tree": tree} for name in a.drafter for tree in a.tree]
        if status == 0:
            bench.write_json(a.json, rows)
        return status


def made_up(monkeypatch, tables, statuses=()):
    script = Script(statuses)
    monkeypatch.setattr(paper, "tables", lambda folder: {"tables": tables})
    monkeypatch.setattr(paper, "SCRIPTS", {"bench.py": script})
    return script


def spec_of(name, file, *commands):
    runs = [{"command": command, "label": label} for command, label in commands]
    return {"name": name, "title": name, "file": file, "runs": runs, "columns": ["arm"]}


CHAIN, CAPE = "python bench.py --drafter glide --tree chain", "python bench.py --drafter maxgram --tree cape"


def test_runs_of_a_table_become_one_file_and_a_command_runs_once(tmp_path, monkeypatch, capsys):
    tables = [spec_of("a", "a.jsonl", (CHAIN, None), (CAPE, "more")), spec_of("b", "b.jsonl", (CAPE, None))]
    script = made_up(monkeypatch, tables)
    assert paper.main(["all", "--limit", "3", "--out", str(tmp_path)]) == 0
    assert len(script.calls) == 2 and all("--limit" in call for call in script.calls)
    names = [tabular.name_of(row) for row in results.read_rows(tmp_path / "a.jsonl")]
    assert names == ["plain", "glide × chain", "maxgram × cape, more"], "baselines of the first run alone"
    names = [tabular.name_of(row) for row in results.read_rows(tmp_path / "b.jsonl")]
    assert names == ["plain", "maxgram × cape"]
    assert "### a" in capsys.readouterr().out


def test_an_interruption_loses_only_the_table_under_way(tmp_path, monkeypatch, capsys):
    tables = [spec_of("a", "a.jsonl", (CHAIN, None)), spec_of("b", "b.jsonl", (CAPE, None)),
              spec_of("c", "c.jsonl", (CHAIN + " cape", None))]
    script = made_up(monkeypatch, tables, [0, 130])
    assert paper.main(["all", "--out", str(tmp_path)]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"] and len(script.calls) == 2
    assert "b is lost" in capsys.readouterr().err


def test_a_command_that_refuses_does_not_stop_the_others(tmp_path, monkeypatch):
    tables = [spec_of("a", "a.jsonl", (CHAIN, None), (CAPE, None)), spec_of("b", "b.jsonl", (CHAIN + " cape", None))]
    made_up(monkeypatch, tables, [2, 0, 0])
    assert paper.main(["all", "--out", str(tmp_path)]) == 2
    assert [tabular.name_of(row) for row in results.read_rows(tmp_path / "a.jsonl")] == ["plain", "maxgram × cape"]
    assert (tmp_path / "b.jsonl").exists()


def test_committed_rows_say_when_and_how_they_were_measured(tmp_path, monkeypatch, capsys):
    """Where rows go to docs/results/, all tables of the file get the date, and flags beyond the command's."""
    tables = [{**spec_of("a", "a.jsonl", (CHAIN, None)), "measured": "then"}, spec_of("b", "a.jsonl", (CHAIN, None)),
              {**spec_of("c", "c.jsonl", (CAPE, None)), "measured": "then"}]
    (tmp_path / "tables.json").write_text(json.dumps({"machines": {"cpu": "ä"}, "tables": tables}), encoding="utf-8")
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    monkeypatch.setattr(paper, "SCRIPTS", {"bench.py": Script()})
    monkeypatch.setattr(paper.time, "strftime", lambda form: "2030-01-02")
    assert paper.main(["b", "--limit", "3", "--out", str(tmp_path)]) == 0
    said = results.tables(tmp_path)
    measured = [spec.get("measured") for spec in said["tables"]]
    assert measured == ["2030-01-02, with --limit 3", "2030-01-02, with --limit 3", "then"]
    assert said["machines"] == {"cpu": "ä"} and "now python figures/results.py" in capsys.readouterr().out


def test_the_stamp_changes_nothing_else():
    text = (paper.RESULTS / "tables.json").read_text(encoding="utf-8")
    assert json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n" == text


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


# ---------------------------------------------------------------- Markdown beside the paper's values
def test_the_paper_s_values_by_hand():
    rows = [{"drafter": "plain", "tree": None, "tau": None, "c": None},
            {"drafter": "glide", "tree": "chain", "tau": 2.5, "c": 0.1}]
    said = {"rows": [{"arm": "glide × chain", "as": "GLIDE", "τ": "3.0"}, {"arm": None, "as": "LLAMA", "τ": "~2"},
                     {"arm": "edd × chain", "as": "EDD"}]}
    assert tabular.grid(rows, ["arm", "tau", "c"], said).splitlines() == [
        "| arm | in the paper | τ, paper | τ, here | c |",
        "| --- | --- | ---: | ---: | ---: |",
        "| plain | – | – | – | – |",
        "| glide × chain | GLIDE | 3.0 | 2.50 | 0.100 |",
        "| – | LLAMA | ~2 | – | – |",
        "| edd × chain | EDD | – | – | – |"]


def test_a_table_that_waits_says_what_the_paper_has_and_what_makes_it(tmp_path):
    spec = {"title": "T", "file": "none.jsonl", "columns": ["arm", "tau"], "runs": [{"command": "one"}, {"command": "two"}],
            "paper": {"where": "there", "rows": [{"arm": "a × b", "as": "A", "τ": "2"}]},
            "needs": {"a": "python train.py a c", "c": "python train.py a c"}}
    assert tabular.table(spec, {}, tmp_path) == [
        "### T", "```\none\ntwo\n```", "In the paper: there.", "*Not measured yet.*",
        "| arm | in the paper | τ, paper | τ, here |\n| --- | --- | ---: | ---: |\n| a × b | A | 2 | – |",
        "- Not shipped: a, c: `python train.py a c`"]


def test_a_table_shows_the_arms_and_groups_that_it_names(tmp_path):
    rows = [{"drafter": name, "tree": "t", "group": group, "prompts": 2, "tau": tau}
            for name, group, tau in (("a", "all", 1.0), ("b", "all", 2.0), ("a", "x", 3.0), ("b", "x", 4.0))]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {"title": "T", "file": "r.jsonl", "command": "c", "columns": ["arm", "group=group:", "tau"], "arms": ["b × t"]}
    assert "\n\n".join(tabular.table({**spec, "groups": ["all"]}, {}, tmp_path)).endswith(
        "| arm | group | τ |\n| --- | ---: | ---: |\n| b × t | all | 2.00 |")
    together = tabular.table({**spec, "together": True}, {}, tmp_path)[-1]
    assert together.splitlines()[2:] == ["| b × t | all | 2.00 |", "| b × t | x | 4.00 |"]


def test_values_inside_lists_of_a_row():
    row = {"positions": [{"drafted": 8, "accepted": 6}, {"drafted": 4, "accepted": 1}],
           "bins": [{"low": 0.30000000000000004, "acceptance": 0.25}, {"low": 0.9, "acceptance": None}],
           "by_prompt": [{"nodes": n} for n in (1.0, 2.0, 4.0, 8.0, 16.0)]}
    cells = [tabular.column(name)[1](row) for name in ("position 1", "position 2", "position 3", "bin 0.3", "bin 0.9")]
    assert cells == ["0.75", "0.25", "–", "0.25", "–"]
    assert tabular.nodes_by_prompt(row) == "4.0 [2.0–8.0]" and tabular.nodes_by_prompt({}) == "–"


# ---------------------------------------------------------------- paired tests
def exact(found):
    """p of the randomisation test by all 2^n ways of signs."""
    means = [abs(sum(sign * x for sign, x in zip(signs, found))) for signs in product((1, -1), repeat=len(found))]
    return sum(mean >= abs(sum(found)) - 1e-12 for mean in means) / len(means)


@pytest.mark.parametrize("found", [[1.0] * 8, [0.5, -0.5], [0.3, 0.1, -0.05, 0.4, 0.2, -0.1, 0.02], [0.0, 0.0], [-1.0] * 6])
def test_drawn_signs_give_the_exact_p(found):
    assert tabular.sign_flips(found) == pytest.approx(exact(found), abs=0.015)
    assert tabular.sign_flips(found) == tabular.sign_flips(found), "the page comes out the same each time"


def test_a_pair_of_arms_in_words():
    figures = {"a": [1.0, 2.0, 3.0], "b": [0.5, 1.5, 3.5]}
    rows = [{"drafter": name, "tree": "t", "by_prompt": [{"tau": x, "alpha": None} for x in taus]} for name, taus in figures.items()]
    spec = {"arm": "a × t", "against": "b × t", "key": "tau"}
    assert tabular.differences(rows, spec) == [0.5, 0.5, -0.5]
    words = "a × t against b × t, prompt by prompt: τ +0.167, higher on 2 of 3, p = 1.0000 "
    assert tabular.paired(rows, spec).startswith(words)
    assert tabular.paired(rows, {**spec, "key": "alpha"}) is None
    assert tabular.paired(rows, {**spec, "arm": "c × t"}) is None


# ---------------------------------------------------------------- claims
@pytest.fixture
def folder(tmp_path):
    """Two arms on eight prompts: a is ahead by 0.5 everywhere, and lossless; b is not."""
    rows = []
    for name, tau, lossless in (("a", 2.5, True), ("b", 2.0, False)):
        rows.append({"drafter": name, "tree": "t", "group": "all", "tau": tau, "nodes": 10, "lossless": lossless,
                     "by_prompt": [{"tau": tau}] * 8})
        rows.append({**rows[-1], "group": "x", "tau": 5 - tau})
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


A, B, NONE = ["r.jsonl", "a × t", "tau"], ["r.jsonl", "b × t", "tau"], ["r.jsonl", "c × t", "tau"]


@pytest.mark.parametrize("spec, true, words", [
    ({"more": A, "than": B}, True, "τ: a × t 2.5 > b × t 2"),
    ({"more": B, "than": A}, False, "τ: b × t 2 ≤ a × t 2.5"),
    ({"more": A, "than": A}, False, "τ: a × t 2.5 ≤ a × t 2.5"),
    ({"more": A, "than": B, "by": 0.5}, False, "τ: a × t 2.5 ≤ b × t 2 + 0.5"),
    ({"more": A, "than": B, "times": 1.3}, False, "τ: a × t 2.5 ≤ 1.3 of b × t 2"),
    ({"more": B, "than": A, "times": 0.7}, True, "τ: b × t 2 > 0.7 of a × t 2.5"),
    ({"more": A, "than": 2.4}, True, "τ: a × t 2.5 > 2.4"),
    ({"more": 2.4, "than": A}, False, "τ: 2.4 ≤ a × t 2.5"),
    ({"more": A, "than": [*A, "x"]}, False, "τ: a × t 2.5 ≤ a × t (x) 2.5"),
    ({"more": [*B, "x"], "than": A}, True, "τ: b × t (x) 3 > a × t 2.5"),
    ({"more": A, "than": ["r.jsonl", "b × t", "nodes"]}, False, "a × t, τ, 2.5 ≤ b × t, nodes, 10"),
    ({"more": A, "than": NONE}, None, ["c × t"]),
    ({"more": ["none.jsonl", "a × t", "tau"], "than": A}, None, ["a × t"]),
    ({"paired": ["r.jsonl", "a × t", "b × t", "tau"], "below": 0.05}, True, None),
    ({"paired": ["r.jsonl", "a × t", "b × t", "tau"], "below": 0.001}, False, None),
    ({"paired": ["r.jsonl", "b × t", "a × t", "tau"], "below": 0.05}, False, None),
    ({"paired": ["r.jsonl", "a × t", "c × t", "tau"], "below": 0.05}, None, ["a × t", "c × t"]),
    ({"every": ["r.jsonl", "none.jsonl"], "key": "lossless"}, False, "lossless in 2 of 4 rows"),
    ({"every": ["none.jsonl"], "key": "lossless"}, None, ["none.jsonl"]),
])
def test_comparisons_by_hand(folder, spec, true, words):
    found = claims.judged(folder, spec)
    assert found[0] is true
    assert words is None or found[1] == words


def test_verdicts_are_computed_and_counted(folder):
    good, bad, open_ = {"more": A, "than": B}, {"more": B, "than": A}, {"more": NONE, "than": A}
    said = [
        {"holds": [good]}, {"holds": [good, bad], "reason": "because"}, {"holds": [bad]}, {"holds": [good, open_]},
        {"holds": [open_, bad]}, {"holds": [good], "cannot": "it needs a GPU"}, {"cannot": "why"},
    ]
    made = [{"paper": "P", "where": "Table 1", "claim": f"claim | {i}", **each} for i, each in enumerate(said)]
    (folder / "claims.json").write_text(json.dumps(made))
    verdicts = [claims.verdict(folder, claim) for claim in made]
    assert [found for found, _, _ in verdicts] == [
        claims.HELD, claims.FAILED, claims.FAILED, claims.OPEN, claims.FAILED, claims.OPEN, claims.OPEN]
    assert [reason for _, _, reason in verdicts] == [
        "", "because", "not found", "not measured yet: c × t", "not found", "it needs a GPU", "why"]
    page = claims.page(folder)
    assert "**Of 7 claims 1 held, 3 did not hold, 3 cannot be said here.**" in page
    assert "| Table 1 | claim \\| 0 | held | τ: a × t 2.5 > b × t 2 | – |" in page
    assert "| Table 1 | claim \\| 2 | **did not hold** | τ: b × t 2 ≤ a × t 2.5 | not found |" in page


def test_results_py_writes_the_claims(folder):
    docs = folder / "docs"
    (docs / "results").mkdir(parents=True)
    (docs / "results" / "tables.json").write_text(json.dumps({"machines": {}, "tables": []}))
    (docs / "results" / "claims.json").write_text("[]")
    assert results.main(["--docs", str(docs), "--check"]) == 1
    assert results.main(["--docs", str(docs)]) == 0 and results.main(["--docs", str(docs), "--check"]) == 0
    assert "**Of 0 claims" in (docs / "claims.md").read_text(encoding="utf-8")


# ---------------------------------------------------------------- predicted walltime
def cascade_row(stages, K, alpha=None, c=None):
    return {"drafter": f"cascade({', '.join(stages)})", "stages": stages, "K": K, "alpha": alpha, "c": c}


def test_table_1_of_cascade_is_computed():
    printed = {row["as"] + row["arm"]: row["EWIF"] for spec in SPECS if spec["name"] == "cascade-table-1"
               for row in spec["paper"]["rows"]}
    rows = paper.ewif.table_1()
    assert [row["ewif"] for row in rows] == pytest.approx([float(value) for value in printed.values()], abs=0.01)


def test_a_prediction_by_hand():
    """alpha 1/2 and 1/4, c 0.2 and 0.1, two tokens of base and one of small: 1 + 1/2 + 1/4 + 1/16 over 1.5."""
    rows = [cascade_row(["base"], [[2]], 0.5, 0.2), cascade_row(["small"], [[3]], 0.25, 0.1),
            cascade_row(["base", "small"], [[2, 1], [0, 0]]), cascade_row(["base", "small"], [[2, 1], [0, 1]]),
            cascade_row(["base", "maxgram"], [[1, 10], [0, 10]])]
    found = paper.ewif.predicted(rows)
    assert [row["ewif"] for row in found[:3]] == pytest.approx([1.75 / 1.4, 1.328125 / 1.3, 1.8125 / 1.5])
    assert [row["ewif"] for row in found[3:]] == [None, None], "a model that reviews, and Max-Gram"
    assert (found[2]["k1"], found[2]["k2"], found[0]["k2"]) == (2, 1, None)
    with pytest.raises(bench.UserError, match="needs its models alone beside it"):
        paper.ewif.predicted(rows[1:3])


def test_the_prediction_wants_cascades(capsys):
    assert paper.ewif.main(["--drafter", "glide", *TINY]) == 2
    err = capsys.readouterr().err
    assert err.startswith("figures/ewif.py: glide is no cascade") and err.count("\n") == 1


# ---------------------------------------------------------------- one prompt repeated
def test_copies_of_a_prompt_give_its_tokens(capsys):
    """Three copies: the target and the drafter's self-attention have a batch of three, and all comes out as of one."""
    run = bench.Run(["--drafter", "glide", "--tree", "cape", *TINY])
    _, ids, limit = run.prompts[0]
    drafter = run.drafters["glide"]
    alone = run.decode(drafter, bench.cape.cape, ids, limit)
    seen = {"head": set(), "qkv": set()}
    modules = {"head": run.model.lm_head, "qkv": drafter.model.layers[0].qkv}
    hooks = [module.register_forward_hook(lambda module, inputs, out, name=name: seen[name].add(out.shape[0]))
             for name, module in modules.items()]
    with paper.repeated.repeated(run, 3):
        together = run.decode(run.drafters["glide"], bench.cape.cape, ids, limit)
        assert {keys.shape[0] for keys in run.target.cache.keys.values()} == {3}
    for hook in hooks:
        hook.remove()
    assert seen == {"head": {3}, "qkv": {1, 3}}, "what is encoded, not drafted, is read once for all"
    assert (together.tokens, together.runs) == (alone.tokens, alone.runs)
    again = run.decode(run.drafters["glide"], bench.cape.cape, ids, limit)
    assert run.drafters["glide"] is drafter and again.tokens == alone.tokens
    assert {keys.shape[0] for keys in run.target.cache.keys.values()} == {1}


def test_rows_of_copies(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    argv = ["--copies", "1", "2", "--drafter", "glide", "--tree", "chain", *TINY, "--json", str(path)]
    assert paper.repeated.main(argv) == 0
    rows = results.read_rows(path)
    names = [tabular.name_of(row) for row in rows if row["drafter"] in ("plain", "glide")]
    assert names == ["plain, 1 copies", "glide × chain, 1 copies", "plain, 2 copies", "glide × chain, 2 copies"]
    assert all(row["lossless"] for row in rows) and {row["tokens"] for row in rows} == {8}
    assert "  2 copies  glide x chain" in capsys.readouterr().out


@pytest.mark.parametrize("argv, words", [
    (["--copies", "0"], "--copies is 0"), (["--drafter", "edd"], "--drafter edd: glide and vanilla are repeated")])
def test_mistakes_about_copies_are_one_sentence(argv, words, capsys):
    assert paper.repeated.main([*argv, *TINY]) == 2
    err = capsys.readouterr().err
    assert err.startswith("figures/repeated.py: ") and err.count("\n") == 1 and words in err
