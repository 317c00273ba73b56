"""The figures: calibration, acceptance by position, tree optimality, each against a count by hand."""
import json
import sys
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, plain, tiny
from test_house import run_alone

import bench
import cape
import pct
import verify

sys.path.insert(0, str(ROOT / "figures"))

import acceptance  # noqa: E402
import calibration  # noqa: E402
import optimality  # noqa: E402
import prefill  # noqa: E402
import results  # noqa: E402


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

    def reset(self):
        pass

    def begin(self, view):
        pass

    def expand(self, tokens, parents):
        return self.table[tokens]

    def keep(self, path):
        pass


@pytest.fixture(scope="module")
def run():
    """What a figure asks of bench.Run: prompts, and a way to decode them."""
    model = tiny("llama")
    target = verify.Target(model)
    made = SimpleNamespace(model=model, prompts=[("x", [3, 1, 4, 1], 16), ("x", [5, 9, 2], 1), ("y", [2, 6, 5], 11)])

    def decode(drafter, build, ids, limit):
        return verify.generate(target, drafter, build, ids, limit, out=bench.Record())
    made.decode = decode
    return made


def by_hand(run, drafter, length):
    """Chains of `length` over the plain output -> [(confidence, accepted?) of each judged token] of every round."""
    found = []
    for _, ids, limit in run.prompts:
        text, at = ids + plain(run.model, ids, limit), len(ids)
        while at < len(text) - 1:
            token, judged = text[at], []
            # The last token of an output is never a drafted one: a bonus follows.
            for i in range(min(length, len(text) - 2 - at)):
                row = (drafter.table[token] / drafter.temperature).softmax(-1)
                token = row.argmax().item()
                judged.append((row.max().item(), token == text[at + 1 + i]))
                if not judged[-1][1]:
                    break
            found.append(judged)
            at += sum(ok for _, ok in judged) + 1
    return found


# ---------------------------------------------------------------- calibration
def test_calibration_judges_up_to_the_first_rejection(run):
    drafter = Guesser(run)
    found = calibration.calibration(run, drafter, 3)
    expected = [pair for judged in by_hand(run, drafter, 3) for pair in judged]
    assert len(expected) > 15 and {ok for _, ok in expected} == {True, False}
    assert [ok for _, ok in found] == [ok for _, ok in expected]
    assert [p for p, _ in found] == pytest.approx([p for p, _ in expected], abs=1e-6)


def test_reliability_against_a_count_by_hand():
    judged = [(0.05, False), (0.1, True), (0.10001, True), (0.95, True), (1.0, True), (0.99, False), (0.0, False)]
    rows, error = calibration.reliability(judged)
    assert [r["count"] for r in rows] == [3, 1, 0, 0, 0, 0, 0, 0, 0, 3], "bins are closed on the right"
    assert rows[0]["acceptance"] == 1 / 3 and rows[9]["confidence"] == pytest.approx(0.98) and rows[4]["acceptance"] is None
    assert error == pytest.approx((3 * abs(1 / 3 - 0.05) + 1 * (1 - 0.10001) + 3 * abs(2 / 3 - 0.98)) / 7)
    assert calibration.reliability([])[1] == 0
    plot = calibration.reliability_plot("edd", rows, error).splitlines()
    assert len(plot) == 12 and plot[-1].count("#") == round(40 * 2 / 3) and plot[-1].index("|") > plot[-1].rindex("#")


def test_a_drafter_that_knows_its_own_mind_is_calibrated():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(20000, generator=generator)
    judged = list(zip(p.tolist(), (torch.rand(20000, generator=generator) < p).tolist()))
    assert calibration.reliability(judged)[1] < 0.02
    assert calibration.reliability([(x ** 0.5, ok) for x, ok in judged])[1] > 0.1


# ---------------------------------------------------------------- acceptance by position
def test_position_acceptance_against_a_count_by_hand(run):
    """The played rounds are made up: which positions were drafted, judged, accepted."""
    rounds = [([5, 6, 7], [5, 6, 9]), ([5, 6, 7], [4]), ([5, 6, 7], [5, 6, 7, 8]), ([5, 6, 7], [5, 6])]
    played = [(verify.Tree(torch.tensor([0] + d), torch.arange(-1, len(d))), out) for d, out in rounds]
    # position 3 of the last round was never judged: the output ended before it
    assert acceptance.position_acceptance(played) == [[4, 3], [4, 3], [3, 1]]
    absent = verify.Tree(torch.tensor([0, 5, 6]), torch.tensor([-1, 0, -1]))
    assert acceptance.position_acceptance([(absent, [5, 6])]) == [[1, 1]], "an absent node was not drafted"
    drafter = Guesser(run)
    found = acceptance.position_acceptance(calibration.played(run, drafter, partial(cape.chain, gamma=3)))
    drafted, accepted = [0] * 3, [0] * 3
    for judged in by_hand(run, drafter, 3):
        for i, (_, ok) in enumerate(judged):
            accepted[i] += ok
    assert [ok for _, ok in found] == [n for n in accepted if n] + [0] * (len(found) - sum(n > 0 for n in accepted))
    assert all(n >= ok for n, ok in found) and found[0][0] >= found[-1][0]
    plot = acceptance.position_plot("mine", [[4, 3], [2, 0]]).splitlines()
    assert plot[2:] == [f"    1  0.75       4  {'#' * 30}", "    2  0.00       2"]


# ---------------------------------------------------------------- tree optimality
TABLE = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.6, 0.2, 0.1, 0.1], [0.25, 0.25, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64)


@pytest.mark.parametrize("build", [
    partial(cape.cape, gamma=2, sizes=(1,), edges=()), partial(cape.chain, gamma=3), partial(cape.beam, gamma=3, width=2),
    partial(pct.pct, cost=0.2, leaf=0.04, width=3, depth=3), partial(pct.vct, width=2, depth=2)])
def test_tree_optimality_against_all_subtrees(build):
    """A hand-made drafter over four tokens: the best n nodes under what was asked, by trying every set of that size."""
    shown = {}

    def decode(judged, ids, limit):                        # one round
        shown["tree"] = judged(lambda tokens, parents: TABLE[tokens], torch.tensor([0]))
    found = optimality.optimality(decode, build, [("x", [0], 8)])
    tree, asked = shown["tree"], []
    build(lambda tokens, parents: asked.extend(zip(tokens.tolist(), parents)) or TABLE[tokens], torch.tensor([0]))
    joint = []
    for token, parent in asked:
        joint.append(joint[parent] * TABLE[asked[parent][0], token].item() if parent >= 0 else 1.0)
    candidates = [joint[i] * TABLE[token, x].item() for i, (token, _) in enumerate(asked) for x in range(4)]
    above, kept, n = {0: 1.0}, 0.0, 0
    for i, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist())):
        if i and parent >= 0:                              # absent nodes are no nodes
            above[i] = above[parent] * TABLE[tree.tokens[parent], token].item()
            kept, n = kept + above[i], n + 1
    best = max(sum(c) for c in combinations(candidates, n)) if len(candidates) <= 16 else sum(sorted(candidates)[-n:])
    assert found == pytest.approx(kept / best) and 0 < found <= 1 + 1e-9


def test_tree_optimality_of_nothing():
    def decode(judged, ids, limit):
        judged(lambda tokens, parents: torch.zeros(len(tokens), 4), torch.tensor([0]))
    assert optimality.optimality(decode, cape.cape, [("x", [0], 8)]) is None


# ---------------------------------------------------------------- long prompts
class Listener:
    """A drafter that drafts nothing, and notes in `events` when it is called."""
    needs = {}

    def __init__(self, events):
        self.events = events

    def reset(self):
        pass

    def begin(self, view):
        self.events.append(("begin", view.length))

    def expand(self, tokens, parents):
        self.events.append(("expand", len(tokens)))
        return torch.zeros(len(tokens), 12)

    def keep(self, path):
        pass


@pytest.fixture(scope="module")
def long_llama():
    return tiny("llama", max_position_embeddings=300, num_hidden_layers=4)      # EDD reads the fourth to last


def test_every_arm_of_the_prefill_reads_the_whole_prompt(long_llama, monkeypatch):
    """Each ends with the token that the model's own forward ends with, and leaves no hook behind; a drafter has a row for every token."""
    monkeypatch.setattr(verify, "SLICE", 32)
    with torch.no_grad():
        expected = long_llama(prefill.prompt_of(long_llama, 100)[None]).logits[0, -1].argmax().item()
    for name in prefill.ARMS:
        drafter = prefill.fresh_drafter(name, long_llama, 100)
        assert (drafter is None) == (name in (prefill.PLAIN, "plain"))
        seconds, token = prefill.prefill(long_llama, name, drafter, 100)
        assert seconds > 0 and token == expected, name
        # Two rounds were played: the second began with the first one's root in the cache.
        assert drafter is None or drafter.t == 101
    assert not any(module._forward_hooks for module in long_llama.modules())


def test_the_clock_of_a_prefill_stops_behind_the_first_draft(long_llama, monkeypatch):
    events = []
    monkeypatch.setattr(prefill, "time", SimpleNamespace(perf_counter=lambda: events.append("clock") or len(events)))
    seconds, _ = prefill.one_prefill(long_llama, Listener(events), prefill.prompt_of(long_llama, 50))
    assert events[:4] == ["clock", ("begin", 50), ("expand", 1), "clock"] and seconds == 3
    del events[:]
    assert prefill.one_prefill(long_llama, None, prefill.prompt_of(long_llama, 50))[0] == 1


def test_the_most_memory_is_counted_from_now_on():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the most so far can be counted anew on Linux alone")
    for size in (120e6, 40e6):                             # the second is not hidden by the first; both are mapped, whatever malloc holds
        before = prefill.memory_in_use(cuda=False)
        held = torch.ones(int(size) // 4)
        del held
        assert prefill.most_memory(cuda=False) - before == pytest.approx(size, rel=0.25)


def test_rows_of_the_prefill_make_a_table(long_llama, tmp_path, monkeypatch, capsys):
    """Medians of the turns, ratios to transformers, and a table of docs/results.md, from made-up times and peaks."""
    took = {name: iter([100.0, 4.0 + i, 2.0 + i, 9.0 + i] * 4) for i, name in enumerate(prefill.ARMS)}      # the first warms up
    given = []

    def made_up(model, name, drafter, length):
        given.append(drafter)
        return next(took[name]), 0
    monkeypatch.setattr(prefill, "random_target", lambda a: long_llama)
    monkeypatch.setattr(prefill, "prefill", made_up)
    monkeypatch.setattr(prefill, "peak_of", lambda a, name, length: (1 + prefill.ARMS.index(name)) * 3_000_000 * length // 512)
    argv = ["--tokens", "512", "--turns", "3", "--device", "cpu", "--threads", "1", "--json", str(tmp_path / "r.jsonl")]
    assert prefill.main(argv) == 0
    rows = results.read_rows(tmp_path / "r.jsonl")
    assert [(row["prompt_tokens"], row["drafter"]) for row in rows] == [(n, name) for n in (64, 128, 256, 512) for name in prefill.ARMS]
    drafters = [each for each in given if each]
    assert len(set(map(id, drafters))) == len(drafters) == 4 * 4 * 3, "each turn with an empty store"
    assert [row["prefill_seconds"] for row in rows[-5:]] == [4, 5, 6, 7, 8]
    assert [row["time_ratio"] for row in rows[-5:]] == [1, 1.25, 1.5, 1.75, 2]
    assert [row["prefill_memory"] for row in rows[-5:]] == [3e6, 6e6, 9e6, 12e6, 15e6] and rows[-1]["memory_ratio"] == 5
    assert f"{'edd':22}   8.000   2.00     15.0   5.00" in capsys.readouterr().out
    spec = {"machines": {"m": "a machine"}, "tables": [{
        "section": "All prompts", "title": "Long prompts", "file": "r.jsonl", "machine": "m", "command": "python figures/prefill.py",
        "columns": ["arm", "tokens=prompt_tokens:d", "s=prefill_seconds:.2f", "× time=time_ratio:.2f", "MB=megabytes:.0f", "× memory=memory_ratio:.2f"]}]}
    (tmp_path / "tables.json").write_text(json.dumps(spec))
    page = results.page(tmp_path)
    assert "| arm | tokens | s | × time | MB | × memory |" in page and "| edd | 512 | 8.00 | 2.00 | 15 | 5.00 |" in page


@pytest.mark.parametrize("argv, words", [
    (["--tokens", "511"], "--tokens is 511: it must be at least 512"), (["--turns", "0"], "--turns is 0"), (["--device", "tpu"], "invalid choice"),
    (["--target", "/no/such"], "/no/such does not exist"), (["--target", str(ROOT / "checkpoints" / "target")], "--tokens 8192: the target's context holds 512")])
def test_mistakes_about_prefills_are_one_sentence(argv, words, capsys):
    assert prefill.main(["--device", "cpu", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("figures/prefill.py: ") and err.count("\n") == 1 and words in err, err


# ---------------------------------------------------------------- the scripts
@pytest.mark.parametrize("name, more, key", [
    ("calibration", [], "bins"), ("acceptance", ["cascade(base, k=4)", "maxgram"], "positions"),
    ("optimality", ["maxgram", "--tree", "chain", "pct(width=2, cost=0.1)"], "tree_optimality")])
def test_a_script_takes_the_benchmark_s_flags(name, more, key, tmp_path, monkeypatch, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "def main("}\n')
    monkeypatch.chdir(tmp_path)
    argv = ["--device", "cpu", "--threads", "1", "--prompts", "p.jsonl", "--max-new-tokens", "12", "--json", "r.jsonl", "--drafter", "glide", *more]
    assert run_alone(ROOT / "figures" / f"{name}.py", *argv) == 0         # from another folder
    out = capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    labels = {"calibration": ["glide"], "acceptance": ["glide", "cascade(base, k=4)", "maxgram"], "optimality": ["glide", "glide", "maxgram"]}
    assert [row["drafter"] for row in rows] == labels[name] and all(row[key] for row in rows)
    assert all(row["seed"] == 0 and row["temperature"] == 0 and row["target"] for row in rows) and "glide" in out
    if name == "acceptance":
        assert all(0 <= p["accepted"] <= p["drafted"] for row in rows for p in row["positions"])
        assert len(rows[1]["positions"]) <= 5 and [p["position"] for p in rows[0]["positions"]] == list(range(1, len(rows[0]["positions"]) + 1))


def test_mistakes_are_one_sentence(capsys):
    for figure in (acceptance, calibration, optimality):
        assert figure.main(["--drafter", "bush"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"figures/{figure.__name__}.py: ") and err.count("\n") == 1 and "bush" in err
