"""figures/probe.py: calibration, acceptance by position, tree optimality, each against a count by hand; figures/batches.py."""
from functools import partial
from itertools import combinations
from types import SimpleNamespace

import batches
import tables as compare
import probe
import pytest
import torch
from conftest import plain, shared
from test_bench import args, check_mistake, rows_of, small  # noqa: F401 (small: a fixture)

import bench
import cape
import pct
import verify
from runtime import measure as clock

class Guesser:
    """A drafter that knows a table p(next | token), half of it from the output that it drafts for."""
    needs = {}
    temperature = 0.7

    def __init__(self, run, vocab=12):
        self.table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(3))
        for _, ids, limit in run.prompts:
            text = plain(run.model, ids, limit)
            for token, after in zip(text[::2], text[1::2]):
                self.table[token, after] += 2

    def expand(self, tokens, parents):
        return self.table[tokens]

    def reset(self, *more):
        """Nothing is kept."""
    begin = keep = reset

@pytest.fixture(scope="module")
def run():
    """What a measurement asks of bench.Run: prompts, drafters, and a way to decode."""
    model = shared("llama")
    target = verify.Target(model)
    made = SimpleNamespace(model=model, prompts=[("x", [3, 1, 4, 1], 16), ("x", [5, 9, 2], 1), ("y", [2, 6, 5], 11)])
    made.a = SimpleNamespace(target="tiny", temperature=0.0, seed=0)
    made.decode = lambda drafter, build, ids, limit: clock.Record(verify.generate(target, drafter, build, ids, limit))
    made.drafters = {"guesser": Guesser(made)}
    return made

def by_hand(run, drafter, length):
    """Chains of `length` over the plain output -> [[(confidence, accepted?) of each judged token] of each round] of each prompt."""
    found = []
    for _, ids, limit in run.prompts:
        text, at = ids + plain(run.model, ids, limit), len(ids)
        found.append([])
        while at < len(text) - 1:
            token, judged = text[at], []
            # The last token of an output is never a drafted one: a bonus follows.
            for i in range(min(length, len(text) - 2 - at)):
                row = (drafter.table[token] / drafter.temperature).softmax(-1)
                token = row.argmax().item()
                judged.append((row.max().item(), token == text[at + 1 + i]))
                if not judged[-1][1]:
                    break
            found[-1].append(judged)
            at += sum(ok for _, ok in judged) + 1
    return found

def test_calibration_judges_up_to_the_first_rejection(run, monkeypatch):
    monkeypatch.setattr(probe, "CHAIN", 3)
    (row,), columns = probe.calibration(run)
    each = [sum(rounds, []) for rounds in by_hand(run, run.drafters["guesser"], 3)]
    expected = sum(each, [])
    assert len(expected) > 15 and {ok for _, ok in expected} == {True, False}
    bins, error = probe.reliability(expected)
    assert row["ece"] == pytest.approx(error) and [b["count"] for b in row["bins"]] == [b["count"] for b in bins]
    # of each prompt: the share accepted among its tokens of the bin
    for b in bins:
        inside = [[ok for p, ok in judged if b["low"] < p <= b["high"]] for judged in each]
        assert row["by_prompt"][f"bin {b['low']:g}"] == [sum(oks) / len(oks) if oks else None for oks in inside]
    assert compare.grid([row], columns).startswith("| arm | ECE | bin 0 | bin 0.1 |")

def test_reliability_against_a_count_by_hand():
    judged = [(0.05, False), (0.1, True), (0.10001, True), (0.95, True), (1.0, True), (0.99, False), (0.0, False)]
    rows, error = probe.reliability(judged)
    assert [r["count"] for r in rows] == [3, 1, 0, 0, 0, 0, 0, 0, 0, 3], "bins are closed on the right"
    assert rows[0]["acceptance"] == 1 / 3 and rows[9]["confidence"] == pytest.approx(0.98) and rows[4]["acceptance"] is None
    assert error == pytest.approx((3 * abs(1 / 3 - 0.05) + 1 * (1 - 0.10001) + 3 * abs(2 / 3 - 0.98)) / 7)
    assert probe.reliability([])[1] == 0

def test_positions_against_a_count_by_hand(run):
    """Made-up rounds of chains: which positions were drafted, judged, accepted."""
    chain = verify.Round([], [], [9, 5, 6, 7], [-1, 0, 1, 2])
    ends = [([5, 6, 9], 2), ([4], 0), ([5, 6, 7, 8], 3), ([5, 6], 3)]
    rounds = [chain._replace(new=new, path=list(range(1 + accepted))) for new, accepted in ends]
    # position 3 of the last round was never judged: the output ended before it
    assert probe.position_counts(rounds) == [[4, 3], [4, 3], [3, 1]]
    with pytest.raises(bench.UserError, match="guesser is no cascade"):
        probe.ewif(run)

TABLE = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.6, 0.2, 0.1, 0.1], [0.25, 0.25, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64)

@pytest.mark.parametrize("build", [
    partial(cape.chain, gamma=3), partial(cape.beam, gamma=3, width=2), partial(pct.pct, cost=0.2, leaf=0.04, width=3, depth=3)])
def test_tree_optimality_against_all_subtrees(build):
    """A hand-made drafter over four tokens: the best n nodes under what was asked, by trying every set of that size."""
    shown = {}

    def decode(judged, ids, limit):                        # one round
        shown["tree"] = judged(lambda tokens, parents: TABLE[tokens], torch.tensor([0]))
    found = probe.tree_optimality(decode, build, [("x", [0], 8)])
    tree, asked = shown["tree"], []
    build(lambda tokens, parents: asked.extend(zip(tokens.tolist(), parents)) or TABLE[tokens], torch.tensor([0]))
    joint = []
    for token, parent in asked:
        joint.append(joint[parent] * TABLE[asked[parent][0], token].item() if parent >= 0 else 1.0)
    candidates = [joint[i] * TABLE[token, x].item() for i, (token, _) in enumerate(asked) for x in range(4)]
    above, kept = {0: 1.0}, 0.0
    for i, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist())):
        if i:
            above[i] = above[parent] * TABLE[tree.tokens[parent], token].item()
            kept += above[i]
    n = len(tree.tokens) - 1
    best = max(sum(c) for c in combinations(candidates, n)) if len(candidates) <= 16 else sum(sorted(candidates)[-n:])
    assert found == pytest.approx(kept / best) and 0 < found <= 1 + 1e-9

@pytest.mark.parametrize("name, more, labels, key", [
    ("calibration", ["glide"], ["glide"], "bins"), ("positions", ["cascade(base, k=4)"], ["cascade(base, k=4)"], "positions"),
    ("optimality", ["maxgram", "--tree", "chain", "pct(width=2, cost=0.1)"], ["maxgram"], "tree_optimality"),
    ("ewif", ["cascade(base, k=2)"], [row["drafter"] for row in probe.table_1()] + ["cascade(base, k=2)"], "drafter"),
    ("lookup", ["edd"], ["0", "1", "2", "3"], "before")])
def test_a_measurement_takes_the_benchmark_s_flags(name, more, labels, key, small, tmp_path, capsys):  # noqa: F811
    rows, prompts = tmp_path / "r.jsonl", tmp_path / "p.jsonl"
    prompts.write_text(4 * '{"prompt": "return a + b"}\n')
    assert probe.main([name, *args(small, "--prompts", str(prompts), "--json", str(rows), "--max-new-tokens", "4", "--drafter", *more)]) == 0
    rows = rows_of(rows)
    assert [row["drafter"] for row in rows] == labels and all(key in row for row in rows)
    if name in ("calibration", "positions"):
        assert all(len(values) == 4 for row in rows for values in row["by_prompt"].values())
    if name == "ewif":
        assert len(rows[-1]["by_prompt"]["swi_measured"]) == 4
    assert f"| {rows[-1]['drafter']} " in capsys.readouterr().out

def test_copies_of_a_prompt_are_computed_and_decode_as_one_does(small, tmp_path, monkeypatch):  # noqa: F811
    """The target and the drafter compute each copy; tokens and rounds are those of a batch of one; what does not fit is None."""
    shapes, own = set(), batches.Copies.compare

    def compare(copies, logits):
        shapes.add((copies.count, *logits.shape[::2]))
        own(copies, logits)
    monkeypatch.setattr(batches.Copies, "compare", compare)
    argv = args(small, "--batches", "3", "1", "--limit", "1", "--max-new-tokens", "6", "--json", str(tmp_path / "r.jsonl"))
    assert batches.main([*argv, "--tree", "cape"]) == 0
    one, three = rows_of(tmp_path / "r.jsonl")
    assert shapes == {(1, 1, 300), (3, 3, 300)} and (one["batch"], three["batch"]) == (1, 3)
    assert one["lossless"] is three["lossless"] is True and one["tau"] == three["tau"] >= 1
    assert one["speedup"] == one["glide"] / one["plain"]
    assert "\n| 3 |" in "".join(batches.compare.table({"title": "Table 4", "columns": batches.COLUMNS}, [one, three], []))

    def full(run, *arms):
        raise torch.OutOfMemoryError
    monkeypatch.setattr(bench, "measure", full)
    assert batches.main(argv) == 0 and [row["glide"] for row in rows_of(tmp_path / "r.jsonl")] == [None, None]

def test_copies_that_differ_are_refused(small, monkeypatch, capsys):  # noqa: F811
    def another(copies, logits):
        own(copies, torch.cat((logits[:-1], logits[-1:].roll(1, -1))))
    own = batches.Copies.compare
    monkeypatch.setattr(batches.Copies, "compare", another)
    assert batches.main(args(small, "--batches", "2", "--limit", "1", "--max-new-tokens", "4")) == 2
    assert "figures/batches.py: 2 copies of a prompt chose different tokens" in capsys.readouterr().err.splitlines()[-1]
    for more, words in ((["--drafter", "edd"], "edd is no GLIDE drafter"), (["--tree", "chain", "cape"], "one drafter and one tree"),
                        (["--temperature", "1"], "decoding is greedy"), (["--batches", "0"], "at least one copy"), (["--batches", "x"], "--batches")):
        check_mistake(args(small, *more), words, capsys, batches, "figures/batches.py")
