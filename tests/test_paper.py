"""figures/paper.py: tests against brute force, tables of what their commands measure, pages."""
import json
import shlex
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import paper
import pytest
import tables
from conftest import ROOT
from helpers import bench_args as args

import bench
from runtime import calls, load

# ---------------------------------------------------------------- intervals and tests
def flips(differences, sides):
    """p by all 2^n signs."""
    sums = [sum(s * d for s, d in zip(signs, differences))
            for signs in product((-1, 1), repeat=len(differences))]
    observed = sum(differences)
    if sides == 2:
        sums, observed = [abs(each) for each in sums], abs(observed)
    return np.mean([each >= observed - 1e-9 for each in sums])

@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("differences", [
    [1.0] * 8, [0.3, -0.1, 0.7, 0.2, -0.4, 0.9], [0.0, 0.0, 1.0], [2.0, -2.0], [-1.0, 0.2, -0.5]])
def test_sign_flips_against_all_signs(differences, sides):
    found = paper.sign_flips(np.array(differences), sides)
    assert found == pytest.approx(flips(differences, sides), abs=0.02)

def test_sign_flips_reject_as_often_as_they_say():
    """Of 400 samples without a difference about 5 % have p < 0.05."""
    noise = np.random.RandomState(1).standard_normal((400, 20))
    rejected = sum(paper.sign_flips(sample) < 0.05 for sample in noise)
    assert 8 <= rejected <= 34                 # within 3.2 standard deviations of 20

def test_the_interval_against_all_resamples():
    values = [0.1, 0.5, 0.9, 0.2]
    means = sorted(np.mean(sample) for sample in product(values, repeat=4))              # 256
    assert paper.interval(np.array(values)) == pytest.approx((means[6], means[249]), abs=0.03)

def test_holm_by_hand_and_against_its_definition():
    assert paper.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    ps = list(np.random.RandomState(3).random_sample(12) ** 4)
    for level in (0.01, 0.05, 0.2):
        # Step down: reject while the smallest p left is at most level / (how many are left).
        left, rejected = sorted(ps), []
        while left and left[0] <= level / len(left):
            rejected.append(left.pop(0))
        found = sorted(p for p, adjusted in zip(ps, paper.holm(ps)) if adjusted <= level)
        assert found == rejected

# ---------------------------------------------------------------- rows made up
def a_row(name, speedups, taus, kinds=None, questions=None, **more):
    """A row of an arm on some prompts."""
    drafter, _, tree = name.partition(" x ")
    prompts = len(speedups)
    by_prompt = [{"kind": kind, "question": question, "speedup": speedup, "tau": tau}
                 for kind, question, speedup, tau in zip(
                     kinds or ["a"] * prompts, questions or range(prompts), speedups, taus)]
    return {"drafter": drafter, "tree": tree or None, "group": "all", "prompts": prompts,
            "tau": float(np.mean(taus)), "lossless": True, "by_prompt": by_prompt,
            "commit": "abc", "machine": "a machine", "date": "a day", **more}

@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """docs/ of its own: made_up(rows, table, page) -> the page's path"""
    monkeypatch.setattr(paper, "ROOT", tmp_path)
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    (tmp_path / "README.md").write_text("No figures.\n")

    def make(rows, table, text):
        (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setitem(tables.RUNS, "run", tables.Run(1, "python bench.py"))
        monkeypatch.setitem(tables.TABLES, "t", table)
        page.write_text(text)
        paper.rows_of.cache_clear()
        return page
    yield make
    paper.rows_of.cache_clear()

def claims(*lines):
    return tables.Table("run", "P", "", ("speedup", "tau"), None, lines)

N = 14
FAST, SLOW = "d x fast", "d x slow"
SPEEDS = np.linspace(1, 2, N)

def rows_by_hand():
    """fast is twice as fast as slow, and near like same; each question has two turns."""
    questions = [i // 2 for i in range(2 * N)]
    speeds = np.repeat(SPEEDS, 2)
    kinds = ["x/one", "x/two"] * (N // 2) + ["y"] * N
    jitter = 1 + 0.02 * (-1) ** np.arange(2 * N)                # the turns of a question differ
    about = dict(kinds=kinds, questions=questions)
    taus = [3.0] * (2 * N)
    return [a_row("plain", [1.0] * (2 * N), taus, **about),
            a_row(FAST, (2 * speeds * jitter).tolist(), taus, **about),
            a_row(SLOW, (speeds * jitter[::-1]).tolist(), taus, **about),
            a_row("d x same", (2.02 * speeds).tolist(), (1.01 * np.array(taus)).tolist(), **about),
            a_row("e x fast", (3 * speeds).tolist(), taus, **about)]

def test_comparisons_are_paired_over_questions_not_over_turns(made_up):
    made_up(rows_by_hand(), claims(), "")
    one = paper.compare("run", "", "speedup", FAST, SLOW)
    assert one.effect == pytest.approx(2, rel=1e-3) and one.n == N
    assert one.above == N and one.p < 1e-3
    of_kind = paper.compare("run", "", "speedup on x", FAST, SLOW)
    assert of_kind.n == N // 2 and of_kind.key == "speedup on x", "x/one and x/two"
    tau = paper.compare("run", "", "tau", "d x same", FAST)
    assert tau.effect == pytest.approx(0.03), "a difference"
    assert paper.value_of("run", FAST, "tau") == 3.0
    logs = np.log([one["speedup"] for one in rows_by_hand()[1]["by_prompt"]])
    assert paper.value_of("run", FAST, "speedup") == pytest.approx(np.exp(logs.mean()))

def test_the_rival_is_the_best_that_fits(made_up):
    made_up(rows_by_hand(), claims(), "")
    assert paper.compare("run", "", "speedup", SLOW, "d x *").second == "d x same"
    assert paper.compare("run", "", "speedup", FAST, ("plain", "d x s*")).second == "d x same"
    assert paper.compare("run", "", "speedup", FAST, "*").second == "e x fast"
    mixture = rows_by_hand()[-1] | {"drafter": "mixture(d, e)"}        # as fast as e x fast
    made_up([mixture, *rows_by_hand()], claims(), "")
    assert paper.compare("run", "", "speedup", FAST, "*").second == "e x fast", \
        "the mixture has the tree of the first"
    assert paper.compare("run", "", "speedup", "e*", "plain").first == "e x fast"
    assert paper.compare("run", "", "speedup", FAST, "nobody") is None

def test_verdicts(made_up):
    made_up(rows_by_hand(), claims(
        ("held", "speedup", FAST, SLOW), ("not", "speedup", SLOW, FAST),
        ("nothing", "tau", FAST, SLOW), ("few", "speedup on x", FAST, SLOW),
        ("equal", "=speedup", "d x same", FAST), ("far", "=speedup", FAST, SLOW),
        ("equal too", "=tau", "d x same", FAST)), "")
    made = paper.comparisons(["t"])["t"]
    assert [words for _, words in made] == ["held", "**not held**", "undecided", "undecided",
                                            "held", "**not held**", "held"]
    # Holm over the seven of this paper: .02 would be held alone.
    one = made[0][0]
    assert paper.verdict(one, 0.06) == "undecided" and paper.verdict(one, 0.04) == "held"

def test_a_page_is_filled_and_checked(made_up, capsys):
    text = ("Fast: <!--run speedup: d x fast / d x slow-->1.5x [1.0, 1.0] at τ "
            "<!--run tau: d x fast-->1.23, <!--run tau: d x same / d x fast-->+0.1.\n\n"
            "<!--table t-->\n<!--end-->\n")
    page = made_up(rows_by_hand(), claims(("It is", "speedup", FAST, SLOW)), text)
    assert paper.main(["check"]) == 1
    assert "page.md, line 1: not what the rows give" in capsys.readouterr().err
    assert paper.main(["write"]) == 0 == paper.main(["check"])
    found = page.read_text()
    assert "d x slow-->2.0x [2.0, 2.0] at τ <!--run tau: d x fast-->3.00, " in found
    assert "d x fast-->+0.0." in found, "as precise as it was written"
    assert "|d × fast|2.9" in found and "28 prompts; run `run`; commit abc; a machine" in found
    assert "|It is|speedup: d × fast ÷ d × slow|2.00 [2.00, 2.00]|14/14|0.0004|held|" in found
    capsys.readouterr()

    page.write_text(found.replace("-->3.00", "-->3.10"))
    assert paper.main(["check"]) == 1 and "should Fast" in capsys.readouterr().err
    page.write_text(found + "\nWe gain 17 % and run 2.5x as fast, see §3.1 and 2402.02082.\n")
    assert paper.main(["check"]) == 1
    said = capsys.readouterr().err
    assert "17 % names no row" in said and "2.5x names no row" in said and "3.1" not in said
    page.write_text(found + "\nWe gain <!--given-->17 % (`1.5`).\n")
    assert paper.main(["check"]) == 0
    page.write_text(found + "\n<!--run tau: nobody-->1.5\n")
    assert paper.main(["check"]) == 1 and "no row for" in capsys.readouterr().err

@pytest.mark.parametrize("value, text, found", [
    (0.7651, ".76", ".77"), (-0.2, "+0.31", "-0.20"), (0.2, "+.3", "+.2"), (12.345, "1", "12"),
    (-0.25, "−0.1", "−0.2"), (1234.5, "1.00", "1234.50")])
def test_a_figure_is_as_it_was_written(value, text, found):
    assert paper.as_written(value, text) == found

# ---------------------------------------------------------------- the tables of this project
TRAINED = ("glide-top", "edd-top")
LOADERS = {**load.loaders(str(load.CHECKPOINTS)), **dict.fromkeys(TRAINED, lambda: None)}

@cache
def arms_of(run):
    """The arms of a run: of its rows if there are any, else of its command; None: of neither."""
    if paper.rows_of(run):
        return set(paper.arms_of(run))
    _, script, *arguments = shlex.split(tables.RUNS[run].command)
    if script != "bench.py":
        return None
    a = bench.parser().parse_args(arguments)
    drafters = [calls.read_call(text, LOADERS, "drafter").label for text in a.drafter]
    trees = [calls.read_call(text, bench.TREES, "tree").label for text in a.tree]
    return {"plain", "generate()", "prompt lookup", "assisted generation (base)",
            "assisted generation (small)", *map(" x ".join, product(drafters, trees))}

@pytest.mark.parametrize("name", tables.TABLES)
def test_a_table_shows_arms_of_its_run(name):
    table = tables.TABLES[name]
    arms = arms_of(table.run)
    named = [arm for arm, _, _ in table.arms or ()]
    named += [arm for _, _, *pair in table.claims for arm in pair if isinstance(arm, str)]
    wrong = [arm for arm in named if arms and "*" not in arm and arm not in arms]
    assert not wrong
    assert all(printed.keys() <= set(table.columns) for _, _, printed in table.arms or ())

def test_every_table_is_on_one_page_and_every_file_of_rows_has_a_run():
    on_pages = [name for page in paper.pages()
                for name, _ in paper.BLOCK.findall(page.read_text(encoding="utf-8"))]
    assert len(on_pages) == len(set(on_pages)) and set(on_pages) <= tables.TABLES.keys()
    files = {path.relative_to(paper.RESULTS).with_suffix("").as_posix()
             for path in paper.RESULTS.rglob("*.jsonl")}
    assert files <= tables.RUNS.keys()
    for run in files:
        assert all({"commit", "date", "machine"} <= row.keys()
                   for row in paper.rows_of(run).values())

def test_a_cascades_k_is_the_fastest_on_prompts_that_are_not_reported():
    def prompts(path):
        rows = map(json.loads, Path(path).read_text().splitlines())
        return {row.get("prompt") or row["question"] for row in rows}
    tuning = prompts(ROOT / "figures" / "tuning.jsonl")
    assert len(tuning) == 12 and not tuning & prompts(bench.PROMPTS)
    rows = paper.rows_of("cascade-k")
    if not rows:
        pytest.skip("cascade-k is not measured")
    def speed(name):
        return rows[f"{name} x chain", "all"]["tokens_per_second"]
    for tuned in tables.TUNED:
        models = tuned.partition(", k=")[0]
        ks = tables.KS[models.removeprefix("cascade(")]
        if tuned in (tables.VERTICAL, tables.HORIZONTAL):      # k22 = 0 is horizontal
            ks = [k for k in ks if (k[2] == 0) == (tuned == tables.HORIZONTAL)]
        names = [f"{models}, k={k})" for k in ks]
        assert tuned == max(names, key=speed), "write the fastest k into figures/tables.py"

def test_a_run_is_measured_into_its_file(small, tmp_path, monkeypatch, capsys):  # noqa: F811
    flags = shlex.join(args(small, "--drafter", "glide", "--tree", "chain", "--limit", "1"))
    monkeypatch.setattr(paper, "ROOT", tmp_path)
    monkeypatch.setattr(paper, "RESULTS", tmp_path / "docs" / "results")
    paper.RESULTS.mkdir(parents=True)
    monkeypatch.setitem(tables.RUNS, "one", tables.Run(1, f"python bench.py {flags}"))
    monkeypatch.chdir(tmp_path)
    paper.rows_of.cache_clear()
    assert paper.main(["measure", "one"]) == 0
    assert paper.arms_of("one") == ["plain", "generate()", "glide x chain"]
    assert paper.main(["measure", "grown"]) == 2
    capsys.readouterr()
    assert paper.main(["list"]) == 0 and "one " in capsys.readouterr().out
    paper.rows_of.cache_clear()
