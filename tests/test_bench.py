"""The benchmark: its figures by hand and against the paper's table, its clock and prices, and end
to end."""
import json
import random
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from itertools import permutations
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, plain, tiny
from test_load import TEXT, rows_of, save, save_drafter, tokenizer_of, write_rows

import bench
import cape
import verify
from runtime import load, measure, report
from runtime.errors import UserError

# GLIDE paper, some rows of Table 1: model, drafter, cost %, then (acceptance %, E(Spd.)) on GSM8K,
# Finance-Alpaca, Spider, Code.
TABLE_1 = """
Vicuna-7B LLAMA-68m      7.7   51.6 1.46   49.7 1.41   19.2 0.89   34.8 1.11
Vicuna-13B LLAMA-160m   39.3   56.8 0.75   56.8 0.75   25.4 0.45   38.3 0.54
Vicuna-33B GLIDE-71m     6.8   69.3 2.16   64.3 1.94   62.7 1.87   68.9 2.14
"""

def test_expected_speedup_reproduces_table_1():
    """gamma = 5 (section 5.1).  The table prints two decimals: a cell may be off by 0.01."""
    for line in TABLE_1.strip().splitlines():
        c, *cells = map(float, line.split()[2:])
        for alpha, printed in zip(cells[::2], cells[1::2]):
            found = bench.expected_speedup(alpha / 100, c / 100, 5)
            assert abs(round(found, 2) - printed) <= 0.01 + 1e-9

# ---------------------------------------------------------------- a small target with its drafters
@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny random target with random drafters of the real classes, and two stages of a cascade.

    Its folder holds a file of three prompts, one of price prompts, and a chat of two turns.
    """
    folder = tmp_path_factory.mktemp("bench")
    drafters, tokenizer = folder / "drafters", tokenizer_of(TEXT * 100)
    sizes = {"vocab_size": 300, "max_position_embeddings": 64}
    model = tiny("llama", **sizes).float()
    save(folder / "model", model, tokenizer)
    for layers, name in ((2, "base"), (1, "small")):
        stage = tiny("llama", seed=layers, num_hidden_layers=layers, **sizes).float()
        save(drafters / name, stage, tokenizer)
    for kind in ("glide", "edd"):
        save_drafter(drafters / kind, kind, model, tokenizer)
    write_rows(folder / "prompts.jsonl", [{"prompt": "def add("}, {"prompt": "return a + b"},
                                          {"question": "1 + 1?", "answer": "2"}])
    write_rows(folder / "prices.jsonl", [{"prompt": "def f("}, {"prompt": "def g(a)"}])
    write_rows(folder / "chat.jsonl", [{"turns": ["a", "b"], "category": "chat"}, {"prompt": "c"}])
    return folder

def args(small, *more):
    return ["--target", str(small / "model"), "--checkpoint", str(small / "drafters"),
            "--prompts", str(small / "prompts.jsonl"), "--price-prompts",
            str(small / "prices.jsonl"), "--max-new-tokens", "12", "--device", "cpu", *more]

def loaded(small, *more):
    """As bench.py before its table -> flags, Setup, {label: drafter}, trees, prompts"""
    a = bench.parser().parse_args(args(small, *more))
    drafters, trees = bench.check(a)
    setup = load.Setup(a.target, a.checkpoint)
    drafters = {call.label: setup.drafter(call) for call in drafters}
    return a, setup, drafters, trees, bench.read_prompts(a, setup, a.prompts, a.limit)

# ---------------------------------------------------------------- figures by hand
def a_round(accepted, drafted, first=0):
    """A round of a chain: `accepted` of `drafted` tokens."""
    new = list(range(first, first + accepted + 1))
    parents = list(range(-1, drafted))
    return verify.Round(new, list(range(accepted + 1)), [0] * (drafted + 1), parents)

def test_counts_of_rounds_by_hand():
    """A rejection, a tree, an output that ended inside a path, a sampled chain."""
    tree = verify.Round([5], [0], [9, 1, 2], [-1, 0, 0])
    assert measure.counts_of([a_round(2, 3), tree]) == {
        "rounds": 2, "new": 4, "nodes": 5, "depth": 4, "accepted": 2, "tested": 4, "trees": 1,
        "drawn": 0}
    cut = measure.counts_of([verify.Round([5, 6], [0, 1, 2, 3], [0] * 4, [-1, 0, 1, 2])])
    assert cut["accepted"] == cut["tested"] == 2, "two of three accepted ones are in the output"
    overlaps = [None, torch.tensor([0.6, 0.9]), torch.tensor([0.5])]
    total = measure.counts_of([a_round(0, 2), a_round(1, 1)], overlaps)
    assert total["drawn"] == 2
    assert total["overlap"] == pytest.approx(0.6 + 0.5), "nothing after a rejection is tested"

def made_up(rounds, seconds, prompt=0, stage_runs=(), **total):
    """A Record of rounds [(accepted, drafted)]; its tokens count up from 100 times the prompt."""
    tokens, made = [100 * prompt], []
    for accepted, drafted in rounds:
        made.append(a_round(accepted, drafted, tokens[-1] + 1))
        tokens += made[-1].new
    total = measure.counts_of(made) + Counter(prefill=0.25, **total)
    return measure.Record(tokens, total, list(stage_runs), seconds)

def results_of(**records):
    """{name of an arm: [Record]} -> [{name: Record}], with generate() as plain decoding"""
    records = {"generate()": records["plain"], **records}
    return [dict(zip(records, of_prompt)) for of_prompt in zip(*records.values())]

def prompts_of(*kinds):
    return [bench.Prompt(kind, i, [1], 9) for i, kind in enumerate(kinds)]

def test_figures_of_a_row_by_hand():
    """Two prompts of 9 and 13 new tokens; a plain step takes 0.1 s.

    The drafter takes 0.75 s, 0.15 s of it in begin.
    """
    base = [made_up([(0, 0)] * 8, 1.05), made_up([(0, 0)] * 12, 1.45, prompt=1)]
    library = [made_up([(0, 0)] * 5, 1.2), made_up([(0, 0)] * 5, 0.6, prompt=1)]   # it ended sooner
    first = made_up([(2, 3), (0, 3), (1, 1), (1, 3)], 0.525, begin=0.15, draft=0.25, verify=0.5,
                    other=0.25, draft_forwards=10)
    second = made_up([(3, 3), (3, 3), (3, 3)], 0.29, prompt=1, draft=0.5, verify=0.25, other=0.25,
                     draft_forwards=10)
    ours = bench.Arm("x", None, "glide", "chain(gamma=3)", {"gamma": 3})

    def row_of(arm=ours):
        results = results_of(plain=base, x=[first, second], **{"generate()": library})
        return bench.row_of(arm, results, prompts_of("a", "b"))
    row = row_of()
    assert row["tokens"] == 9 + 13 and row["prompts"] == 2 and row["baseline"] is False
    assert (row["drafter"], row["tree"]) == ("glide", "chain(gamma=3)")
    over_library = median([9 / 0.525 / (6 / 1.2), 13 / 0.29 / (6 / 0.6)])
    expected = {
        "tokens_per_second": 22 / 0.815,
        "speedup_low": 2.75, "speedup": 3.5, "speedup_high": 4.25,                # of 2 and 5
        "speedup_vs_generate": over_library,
        "target_ms": 100,
        "tau": 20 / 7,                          # the prefill's token belongs to no round
        "nodes": 19 / 7,
        "alpha_depth": 20 / 19,
        "alpha": 13 / 16,                       # 4 accepted and 3 rejected, and 9 accepted
        "c": (0.75 - 0.15) / 20 / 0.1,
        "expected_speedup": (1 - (13 / 16) ** 4) / (1 - 13 / 16) / (3 * 0.3 + 1),
        "round_ms": 2000 / 7, "draft_ms": 750 / 7,
        "share_draft": 0.375, "share_verify": 0.375, "share_other": 0.25}
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    of_each = {key: [one[key] for one in row["by_prompt"]]
               for key in ("kind", "question", "speedup", "tau", "alpha", "nodes")}
    assert of_each == {"kind": ["a", "b"], "question": [0, 1], "speedup": pytest.approx([2, 5]),
                       "tau": [2, 4], "alpha": [4 / 7, 1], "nodes": [10 / 4, 3]}
    row = row_of(bench.Arm("plain", None))
    assert row["baseline"] is True and row["drafter"] == "plain"
    assert row["tau"] is row["round_ms"] is row["c"] is None
    for record in (first, second):
        record.total.update(accepted=-record.total["accepted"])
    row = row_of()
    assert row["alpha"] == 0, "nothing accepted is a figure, too"
    assert row["expected_speedup"] == pytest.approx(1 / (3 * 0.3 + 1))
    second.total.update(trees=1, nodes=19)
    row = row_of()
    assert row["nodes"] == pytest.approx(38 / 7)
    assert row["alpha_depth"] == pytest.approx(20 / 19), "EDD's: over the maximum depth"
    assert row["alpha"] is row["by_prompt"][1]["alpha"] is row["expected_speedup"] is None

def cascade_of(names, K, sizes):
    models = [name for name in names if name != "maxgram"]
    return SimpleNamespace(names=names, K=K, sizes=sizes, draft_list=names, models=models)

@pytest.mark.parametrize("names, runs, weights", [
    (["base"], [3], [0.5]), (["base", "maxgram"], [2, 5], [0.5]), (["maxgram"], [4], [])])
def test_stages_by_hand(names, runs, weights):
    """SWI counts runs, and each run of a model costs the same, in single prompts, too.

    A clock counts seconds.  Plain decoding takes 0.1 s a token.  After two prompts the model's runs
    took 0.24 s in all, the drafter 0.6 s.
    """
    base = [made_up([(0, 0)] * 6, 0.85, prompt=i) for i in range(2)]
    records = [made_up([(2, 2), (2, 2)], 0.5, prompt=i, stage_runs=runs, draft=0.3,
                       draft_forwards=sum(runs)) for i in range(2)]
    if weights:
        records[0].total["0"], records[1].total["0"] = 0.06, 0.18
    drafter = cascade_of(names, [[2]], weights)
    arm = bench.Arm("x", None, "x", "chain", {}, drafter)
    row = bench.row_of(arm, results_of(plain=base, x=records), prompts_of("a", "a"))
    assert row["runs"] == [6, *(2 * count for count in runs)] and row["stages"] == names
    cost = 0.12 / runs[0] / 0.1 if weights else 0
    assert row["costs"] == pytest.approx([1, cost, 0][:1 + len(names)]), "Max-Gram's is 0"
    assert row["swi_pw"] == pytest.approx(7 / (3 + runs[0] * cost))
    assert row["swi_ms"] == pytest.approx(7 / (3 + runs[0] * sum(weights)))
    assert row["swi_clock"] == pytest.approx(7 / (3 + 0.3 / 0.1))
    assert [one["swi_pw"] for one in row["by_prompt"]] == pytest.approx([row["swi_pw"]] * 2)
    if len(names) == 1:
        c = 0.3 / runs[0] / 0.1
        assert row["c"] == pytest.approx(c) and row["alpha"] == 1
        # Max-Gram's run proposes several tokens, so the formula is not its.
        expected = pytest.approx(3 / (2 * c + 1)) if drafter.models else None
        assert row["expected_speedup"] == expected
    else:
        assert row["c"] is row["expected_speedup"] is None, "several stages have no common c"

# ---------------------------------------------------------------- what is printed
def test_what_is_printed(capsys, monkeypatch):
    """One table for all prompts, then one for each kind; sentences that stand alone."""
    found = {"token": 2, "logit_gap": -0.0625}
    monkeypatch.setattr(bench, "divergence", lambda target, ids, ours, plain: found)
    base, slow = ([made_up([(0, 0)] * 4, seconds, prompt=i) for i in range(2)]
                  for seconds in (0.5, 1.0))
    slow[1] = slow[1]._replace(tokens=[7] * 5)
    more = {"draft": 0.25, "verify": 0.5, "draft_forwards": 2}
    ours = [made_up([(1, 1), (1, 1)], 0.25 / (1 + i), prompt=i, **more) for i in range(2)]
    late = [record._replace(seconds=5.0, stage_runs=[2, 1]) for record in ours]
    results = results_of(plain=base, x=ours, y=late, **{"generate()": slow})
    drafter = cascade_of(["base", "maxgram"], [[2, 10], [0, 10]], [0.5])
    arms = [bench.Arm("plain", None), bench.Arm("generate()", None),
            bench.Arm("x", None, "glide", "pct", {"cost": 0.0625}),
            bench.Arm("y", None, "cascade", "chain", {}, drafter)]
    price = {"cost": 0.0625, "node_price": 0.01, "start": 0.1, "cost_range": [0.06, 0.07],
             "node_price_range": [0.01, 0.02]}
    table = SimpleNamespace(about={"temperature": 0, "commit": "abc"},
                            prices={"glide": price, "cascade": None}, results=results)
    rows = bench.tables(arms, prompts_of("a", "b"), table, None)
    out = capsys.readouterr().out
    assert [row["speedup"] for row in rows if row["group"] == "all"] == [1, 0.5, 3, 0.1]
    assert [row["prompts"] for row in rows if row["tree"] == "pct"] == [2, 1, 1]
    assert all(row["prices"] == price for row in rows if row["drafter"] == "glide")
    assert {row["commit"] for row in rows} == {"abc"}
    groups = re.findall(r"^(\w+): (\d) prompts$", out, re.M)
    assert groups == [("all", "2"), ("a", "1"), ("b", "1")]
    tables = [line for line in out.splitlines() if line.startswith("generate()  ")]
    assert [line.endswith("NO") for line in tables] == [True, False, True]
    for sentence in (
            "generate(): not lossless: after prompt 2 the output differs from plain decoding's "
            "from token 3 on. The target's logits of these two tokens differ by -0.062;",
            "y: slower than plain decoding; docs/speed.md says when that happens.",
            "y: the target ran 6 times, base 4 times (0.000 plain decoding steps each). Stand",
            "\nglide: a forward of the drafter 0.062 [0.060-0.070]; a verified node 0.010"):
        assert sentence in out, out
    # Under sampling a sampled chain and the library's arms may differ, other arms may not.
    assert [bench.has_same_noise(arm, results) for arm in arms] == [True, False, True, True]
    ours[0].total["drawn"] = 1
    assert not bench.has_same_noise(arms[2], results)

def test_divergence_is_reported_with_its_gap(small):
    """A wrong output on purpose: the gap is that of the model's own logits."""
    _, setup, _, _, [_, prompt, _] = loaded(small, "--drafter", "maxgram")
    right = plain(setup.model, prompt.ids, 6)
    cases = [(right[:4], {"token": 4, "logit_gap": None})]       # one is the other's beginning
    for at in (4, 0):
        wrong = right[:at] + [(right[at] + 1) % 300] + right[at + 1:]
        with torch.no_grad():
            logits = setup.model(torch.tensor([prompt.ids + right[:at]])).logits[0, -1]
        gap = (logits[right[at]] - logits[wrong[at]]).item()
        cases.append((wrong, {"token": at, "logit_gap": pytest.approx(gap, abs=1e-4)}))
    for ours, expected in cases:
        record = measure.Record(ours, Counter(), [], 1.0)
        results = [{"plain": record._replace(tokens=right), "x": record}]
        found = bench.losslessness(bench.Arm("x", None), [0], results, [prompt], setup.target)
        assert found == {"lossless": False, "first_divergence": {"prompt": 0, **expected}}

# ---------------------------------------------------------------- the measurement
def test_arm_order_is_random_in_each_prompt():
    """After a warm-up any order comes up.  With graphs all prompts are decoded once before."""
    order = []

    def arm(name):
        def decode(ids, limit, number):
            order.append((name, limit))
            return measure.Record([1], Counter(), [], 1.0)
        return bench.Arm(name, decode)

    def turns(graphs):
        order.clear()
        table = report.Unfinished(None, {})
        prompts = [bench.Prompt("a", 0, [1], 50)] * 40
        bench.measure_all([arm("a"), arm("b"), arm("c")], prompts, table, graphs)
        assert len(table.results) == 40
        return [tuple(order[i:i + 3]) for i in range(0, len(order), 3)]
    first, *others = turns(False)
    assert first == tuple((name, bench.WARM_UP) for name in "abc") and len(others) == 40
    assert set(others) == {tuple((name, 50) for name in names) for names in permutations("abc")}
    assert len(turns(True)) == 80 and {limit for _, limit in order} == {50}

def test_an_interrupted_table_goes_on(small, tmp_path, monkeypatch, capsys):
    """What was measured is reported and kept; the same command measures the rest, another one is
    refused."""
    generate, calls, path = verify.generate, [], tmp_path / "r.jsonl"

    def counting(*given, **how):
        calls.append(1)
        if len(calls) == 5:                # two arms of ours: warm-up, one prompt, and then
            raise KeyboardInterrupt
        return generate(*given, **how)
    monkeypatch.setattr(verify, "generate", counting)
    flags = f"--drafter maxgram --tree chain --json {path} --max-new-tokens 4".split()
    assert bench.main(args(small, *flags)) == 130
    assert {r["prompts"] for r in rows_of(path)} == {1}
    assert "1 of 3 prompts" in capsys.readouterr().err
    part = tmp_path / "r.jsonl.part"
    first = part.read_text()
    with open(part, "a") as file:
        file.write('{"plain": [[1')            # as a kill would leave it
    assert bench.main(args(small, *flags, "--seed", "1")) == 2
    assert "an interrupted table with another command" in capsys.readouterr().err
    before = len(calls)
    assert bench.main(args(small, *flags)) == 0
    assert len(calls) - before == 2 * (1 + 2), "warm-up and two prompts of three, with two arms"
    rows = rows_of(path)
    assert {r["prompts"] for r in rows if r["group"] == "all"} == {3} and not part.exists()
    kept = json.loads(first.splitlines()[1])["plain"]
    assert rows[0]["by_prompt"][0]["target_ms"] == pytest.approx(
        1e3 * (kept[3] - kept[1]["prefill"]) / 3), "the first prompt was not measured again"

def test_rows_know_their_origin(tmp_path, monkeypatch):
    """The commit, "+changes" where files differ from it, "unknown" without git."""
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert report.commit() == "unknown"

    def git(*command):
        who = ["-c", "user.name=x", "-c", "user.email=x"]
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True)
    git("init")
    (tmp_path / "a").write_text("a")
    git("add", "a")
    git("commit", "-m", "a")
    commit = report.commit()
    assert re.fullmatch(r"[\da-f]{10}", commit)
    (tmp_path / "a").write_text("b")
    assert report.commit() == f"{commit}+changes"

# ---------------------------------------------------------------- the clock, the prices
class Model:
    """A model of a cascade, whose forward takes so many seconds of a made-up clock."""

    def __init__(self, now, seconds):
        self.now, self.seconds = now, seconds

    def align(self, ids):
        self.now[0] += self.seconds

def test_the_clock_says_what_time_was_spent_on(monkeypatch):
    """A builder that is the drafter's method is drafting; in it each model's time is its own."""
    now = [100.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def takes(seconds):
        def method(*given):
            now[0] += seconds
        return method

    class Cascade:
        models = [Model(now, 2048), Model(now, 4096)]
        needs, begin, expand = {}, staticmethod(takes(2)), staticmethod(takes(4))

        def chain(self, expand, root):
            for model in (*self.models, self.models[0]):
                model.align([])
                now[0] += 512
    inner = SimpleNamespace(prefill=takes(8), forward=takes(1))
    for _ in range(2):                         # the second clock counts nothing twice
        clock, cascade = measure.Clock(), Cascade()
        target, drafter = clock.around(inner), clock.around(cascade)
        assert drafter.needs == {} and not hasattr(drafter, "drawn"), "all else is its own"
        other_builder = clock.builder(takes(256))
        # before the prompt; the first token: still prefill; then two rounds
        for call in (takes(16), target.prefill, takes(32)):
            call()
        for call in 2 * (drafter.begin, drafter.expand, takes(64), drafter.expand, target.forward,
                         takes(128), other_builder):
            call()
        clock.builder(cascade.chain)(None, None)
        assert clock.seconds() == {
            "prefill": 16 + 8 + 32, "begin": 2 * 2, "draft": 2 * 8 + 3 * 512, "verify": 2,
            "other": 2 * (64 + 128 + 256), "0": 2 * 2048, "1": 4096}
        assert clock.calls["draft"] == 5

# Seconds of a target's forward, in steps of plain decoding, by the nodes beside the root: a
# straight line, and SmolLM2's on 2 cores of an AMD EPYC (figures/costs.py), where two tokens take
# longer than four.  Over trees of a few nodes alone a node would be free there.
EPYC = {1: 39.8, 2: 46.7, 4: 41.0, 8: 45.9, 16: 56.5, 32: 91.9}
MACHINES = {
    "a line": lambda nodes: 1 + 0.02 * nodes + 0.3 * (nodes > 0),
    "EPYC": lambda nodes: np.interp(1 + nodes, list(EPYC), list(EPYC.values())) / EPYC[1]}

@pytest.mark.parametrize("machine", MACHINES)
def test_prices_in_closed_form(machine):
    """Of a made-up machine, of whose turns a third is disturbed by another program.

    begin is in no price; what ends at once, and what drafts by models alone, has none.
    """
    steps, rng, turns = MACHINES[machine], random.Random(0), []
    costs = {"x": 0.2, "slow": 1.7, "maxgram": 0.0}
    drafters = {"x": SimpleNamespace(cost=0.2), "slow": SimpleNamespace(cost=1.7),
                "maxgram": SimpleNamespace(models=[]), "models": SimpleNamespace(models=[1]),
                "ended": SimpleNamespace(cost=None)}
    given, sizes = set(), {"x": (1, 5, 20), "slow": (1, 5, 20), "maxgram": (1, 8, 24)}

    def decode(drafter, build, ids, limit):
        given.add((ids[0], limit))
        how = getattr(build, "keywords", {})
        forwards, nodes = 0, how.get("nodes", 0)
        if build is verify.root_only:
            turns.append(1)
        if drafter:
            forwards = how["depth"]
            nodes = sum(how["width"] ** i for i in range(1, forwards + 1))
            if drafter.cost is None:
                return measure.Record([1], Counter())
        spent = {"verify": 30 * steps(nodes), "other": 30 * (0.15 if nodes else 0.1)}
        if drafter:
            spent |= {"begin": 30 * 0.4, "draft": 30 * (0.4 + forwards * drafter.cost)}
        if len(turns) % 3 == 0:
            spent["verify"] *= rng.uniform(1, 9)
            spent["other"] *= rng.uniform(1, 9)
        return measure.Record([1], Counter(rounds=10, nodes=10 * nodes,
                                           draft_forwards=10 * forwards, **spent))
    found = measure.prices(decode, drafters, [([5], 99), ([6], 3)])
    assert given == {(5, measure.PRICE_TOKENS), (6, 3)} and len(turns) == 1 + measure.TURNS
    assert found["models"] is found["ended"] is None
    nodes = [n for label in sizes for n in sizes[label]]
    rise = np.polyfit(nodes, [steps(n) for n in nodes], 1)[0]
    for label, cost in costs.items():
        besides = np.mean([steps(n) - 1 - rise * n for n in sizes[label]])
        start = max(0, 0.05 + besides)         # the host's .05, and the step to a few tokens
        expected = {"cost": cost, "node_price": rise, "start": start}
        price = found[label]
        assert {key: price[key] for key in expected} == pytest.approx(expected, abs=1e-9)
        low, high = price["cost_range"]
        assert low <= cost + 1e-9 and cost <= high + 1e-9
    assert rise > 0.01

def test_prices_are_measured_once_on_other_prompts(small, monkeypatch):
    """Where --tree sets them they are taken, others are measured once for all trees."""
    trees = ["pct", "pct(cost=0.3)", "pct-cost(node_price=0.5)"]
    a, setup, drafters, calls, prompts = loaded(small, "--drafter", "glide", "--tree", *trees)
    price = {"cost": 0.2, "start": 0.3, "node_price": 0.1, "cost_range": [0, 1]}
    asked = []
    monkeypatch.setattr(measure, "prices", lambda decode, drafters, prompts:
                        asked.append(prompts) or {"glide": price})
    assert bench.measured_prices(a, setup, drafters, calls, prompts) == {"glide": price}
    texts = [setup.tokenizer.decode(ids) for ids, _ in asked[0]]
    assert texts == ["def f(", "def g(a)"]
    pct, given, cost = [bench.builder(drafters["glide"], call, price) for call in calls]
    assert pct[0].keywords == {"cost": 0.2} and given[0].keywords == {"cost": 0.3}
    assert cost[0].keywords == {"cost": 0.2, "start": 0.3, "node_price": 0.5}
    assert pct[1].items() > {"cost": 0.2, "width": 5}.items(), "all settings, for the row"
    assert bench.measured_prices(a, setup, drafters, calls[1:2], prompts) == {}
    # Those of the project: no prompt of the tables, nor of those on which k was tuned, is there.
    files = ("checkpoints/price_prompts.jsonl", "checkpoints/prompts.jsonl", "figures/tuning.jsonl")
    shipped, *others = ({row.get("prompt") or row["question"] for row in rows_of(ROOT / file)}
                        for file in files)
    assert len(shipped) == 12 and not shipped & set.union(*others)

def test_the_overlap_of_a_sampled_chain_by_hand():
    """sum_x min(p_target(x), p_draft(x)) for each drafted token, by the rule's distribution."""
    rule = verify.sampling(0.5, 3, None, 1)
    rule = measure.Overlap(rule.processors, rule.seed)
    logits, p_draft = torch.randn(3, 6), torch.randn(2, 6).softmax(-1)
    parents = torch.tensor([-1, 0, 1])
    tree = verify.Tree(torch.tensor([1, 2, 3]), parents, parents, p_draft)
    text = torch.tensor([[4, 1]])
    rule.choose(tree._replace(p_draft=None), logits, text)
    rule.choose(tree, logits, text)
    assert rule.overlaps[0] is None and len(rule.overlaps) == 2
    least = logits.topk(3).values[:, -1:]
    p_target = (logits.where(logits >= least, torch.tensor(-torch.inf)) / 0.5).softmax(-1)
    torch.testing.assert_close(rule.overlaps[1], torch.minimum(p_target[:2], p_draft).sum(1))

# ---------------------------------------------------------------- what the loop is asked for
def test_limit_counts_prompts(small):
    """A chat gives a prompt for each of its turns; both have one question."""
    flags = ["--prompts", str(small / "chat.jsonl")]
    a, setup, *_ = loaded(small, "--drafter", "maxgram", *flags)
    for limit, questions in ((1, [0]), (2, [0, 0]), (3, [0, 0, 1]), (9, [0, 0, 1])):
        prompts = bench.read_prompts(a, setup, a.prompts, limit)
        assert [prompt.question for prompt in prompts] == questions

def test_flags_of_sampling_reach_the_decoding(small):
    """The same tokens as the loop gives with these settings, and others without one of them.

    The noise is another one for each prompt, and the same for all arms.  End-of-text ends the
    output.
    """
    how = dict(temperature=1.3, top_k=30, top_p=0.9, seed=bench.prompt_seed(7, 1))
    flags = "--drafter maxgram --temperature 1.3 --top-k 30 --top-p 0.9 --seed 7".split()
    a, setup, drafters, _, prompts = loaded(small, *flags)
    _, _, ids, limit = prompts[0]

    def tokens(drafter=None, build=verify.root_only, number=0):
        return bench.decode(a, setup, drafter, build, ids, limit, number).tokens
    wanted = tokens(number=1)
    for changed in ({}, {"seed": 7}, {"seed": bench.prompt_seed(7, 0)}, {"top_k": None},
                    {"top_p": None}, {"temperature": 0.1}):
        rule = verify.sampling(**{**how, **changed})
        out = verify.generate(setup.target, None, verify.root_only, ids, limit, rule)
        assert (out.tokens == wanted) == (not changed), changed
    assert tokens(drafters["maxgram"], cape.cape, 1) == wanted != tokens()
    a.temperature = 0.0
    whole = tokens()
    assert whole == plain(setup.model, ids, limit)
    setup.eos = whole[2]
    assert tokens() == whole[:whole.index(whole[2]) + 1]

@pytest.mark.parametrize("temperature, top_k", [(0.7, 9), (0, 0)])
def test_what_transformers_is_asked_for(small, monkeypatch, temperature, top_k):
    """The same settings, among all tokens without --top-k; assisted generation with the stage;
    prompt lookup with ten tokens."""
    flags = f"--tree chain --temperature {temperature} --top-p 0.8".split()
    flags += ["--top-k", str(top_k)] if top_k else []
    a, setup, drafters, trees, prompts = loaded(small, "--drafter", "cascade(base, maxgram)",
                                                *flags)
    _, _, ids, limit = prompts[0]
    asked = []

    def generate(given, **how):
        asked.append(how)
        return torch.cat((given, given[:, :2]), 1)
    monkeypatch.setattr(setup.model, "generate", generate)
    arms = {arm.name: arm for arm in bench.arms_of(a, setup, drafters, trees, {})}
    for name, own in (("generate()", {}), ("prompt lookup", {"prompt_lookup_num_tokens": 10}),
                      ("assisted generation (base)", {"assistant_model": setup.stages["base"]})):
        assert arms[name].decode(ids, limit, 0).tokens == ids[:2]
        how = asked.pop()
        assert how.pop("attention_mask").tolist() == [[1] * len(ids)]
        assert how == {"max_new_tokens": limit, "do_sample": temperature > 0, "top_k": top_k,
                       "temperature": temperature or 1.0, "top_p": 0.8, **own}

def test_generate_decodes_by_the_rule_of_all_arms(small, tmp_path):
    """Whatever the folder says: a repetition penalty, beams, stop strings."""
    config = transformers.GenerationConfig(repetition_penalty=1.8, num_beams=3, stop_strings=["a"],
                                           min_new_tokens=3, eos_token_id=299)
    shutil.copytree(small / "model", tmp_path / "model")
    config.save_pretrained(tmp_path / "model")
    flags = ["--target", str(tmp_path / "model"), "--tree", "chain", "--drafter", "maxgram"]
    a, setup, drafters, trees, prompts = loaded(small, *flags)
    _, _, ids, limit = prompts[0]
    arms = bench.arms_of(a, setup, drafters, trees, {})
    expected, *found = [arm.decode(ids, limit, 0).tokens for arm in arms]
    assert found == [expected] * 3 and setup.eos == 299

def test_which_drafters_take_a_graft(small):
    """A mixture and Max-Gram alone; a grid leaves the others out and says so."""
    flags = ["--tree", "graft(node_price=0.1)", "pct-cost", "--drafter", "mixture(edd, maxgram)",
             "edd", "maxgram", "cascade(base, maxgram)"]
    a, setup, drafters, trees, _ = loaded(small, *flags)
    arms = {(arm.drafter, arm.tree): arm for arm in bench.arms_of(a, setup, drafters, trees, {})}
    assert {drafter for drafter, tree in arms if tree == trees[0].label} == {
        "mixture(edd, maxgram)", "maxgram"}
    assert arms["maxgram", trees[0].label].settings == {"node_price": 0.1}
    for label in ("edd", "cascade(base, maxgram)"):
        assert any(f"no arm {label} x graft" in note for note in setup.notes)
    del drafters["maxgram"], drafters["mixture(edd, maxgram)"]
    with pytest.raises(UserError, match="--tree graft takes"):
        bench.arms_of(a, setup, drafters, trees[:1], {})

# ---------------------------------------------------------------- end to end
def test_the_main_command_as_a_script(tmp_path, monkeypatch, capsys):
    """From another folder, with the shipped weights, token for token; and what --show prints."""
    price = {"cost": 0.125, "node_price": 0.01, "start": 0.0, "cost_range": [0, 1],
             "node_price_range": [0, 1]}
    monkeypatch.setattr(measure, "prices", lambda *given: {"glide": price})
    trees = ["cape", "chain", "pct(width=1, cost=0.01)", "pct-cost"]
    flags = "--limit 1 --device cpu --max-new-tokens 8 --threads 1 --show --json r.jsonl".split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench.py"), "--tree", *trees, *flags])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    done = capsys.readouterr()
    assert ended.value.code == 0 and "all: 1 prompts" in done.out, done.err
    rows = rows_of(tmp_path / "r.jsonl")
    arms = [("plain", None), ("generate()", None), *(("glide", tree) for tree in trees)]
    assert [(r["drafter"], r["tree"]) for r in rows] == arms
    for r in rows:
        assert r["lossless"] is True and r["tokens"] == 8 and r["group"] == "all"
        assert r["commit"] and r["date"] and r["machine"]
    for r in rows[2:]:
        assert r["c"] > 0 and r["tau"] > 1.2
        is_chain = r["tree"] == "chain" or "width=1" in r["tree"]
        assert (r["alpha"] is not None) == is_chain
    settings = {r["tree"]: r["settings"] for r in rows[2:]}
    assert settings["pct(width=1, cost=0.01)"].items() >= {"width": 1, "cost": 0.01}.items()
    assert settings["chain"] == {"gamma": 5}
    assert settings["pct-cost"]["cost"] == 0.125
    shown = (r"\n--- glide x cape, prompt 1 of story: \[accepted\]bonus\n(.*?)\n--- 8 tokens in "
             r"\d+ rounds, tau ([\d.]+)\n")
    shown, tau = re.search(shown, done.out, re.S).groups()
    assert "[" in shown and float(tau) == round(rows[2]["by_prompt"][0]["tau"], 2)

def test_encoder_decoder_targets_take_cascades(small, tmp_path):
    """An encoder's input takes no positions of the output; a prefill and the rounds are all runs of
    the target."""
    for name, layers in (("target", 3), ("base", 2)):
        torch.manual_seed(layers)
        config = transformers.T5Config(
            vocab_size=300, d_model=16, d_kv=4, d_ff=32, num_layers=layers, num_heads=4,
            num_decoder_layers=layers, pad_token_id=0, eos_token_id=None, decoder_start_token_id=0,
            tie_word_embeddings=False)
        model = transformers.T5ForConditionalGeneration(config).eval()
        save(tmp_path / name, model, load.load_tokenizer(small / "model"))
    (tmp_path / "p.txt").write_text("def add(a, b): return " * 80)
    path = tmp_path / "r.jsonl"
    argv = args(small, "--target", str(tmp_path / "target"), "--checkpoint", str(tmp_path),
                "--json", str(path), "--max-new-tokens", "5", "--prompts", str(tmp_path / "p.txt"),
                "--tree", "chain")
    assert bench.main([*argv, "--drafter", "cascade(base, maxgram)"]) == 0
    rows = rows_of(path)
    assert [r["drafter"] for r in rows] == [
        "plain", "generate()", "assisted generation (base)", "prompt lookup",
        "cascade(base, maxgram)"]
    assert all(r["lossless"] and r["tokens"] == 5 for r in rows)
    r = rows[4]
    target, *stages = r["runs"]
    rounds = target - r["prompts"]
    assert rounds == pytest.approx((r["tokens"] - r["prompts"]) / r["tau"]) and all(stages)
    assert 0 < r["costs"][1] < 3
    for more in (["--drafter", "glide", "--checkpoint", str(small / "drafters")],
                 ["--drafter", "maxgram", "--tree", "chain", "pct"]):
        a = bench.parser().parse_args(argv + more)
        target = SimpleNamespace(verifies_trees=False, encoder_decoder=True)
        with pytest.raises(UserError, match="it takes --"):
            bench.check_target("t5", target, *bench.check(a))
