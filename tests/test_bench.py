"""The benchmark end to end, its formula against the paper's table, its prompts, and its mistakes."""
import gzip
import json
import re
import runpy
import shutil
import sys
from functools import partial
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, plain, tiny

import bench
import train

DATA = ROOT.parent / "shared" / "data"
TEXT = "def add(a, b):\n    return a + b\n\n" * 100

# GLIDE paper, Table 1: cost %, then (acceptance %, E(Spd.)) on GSM8K, Finance-Alpaca, Spider, Code.  gamma = 5 (section 5.1).
TABLE_1 = """
Vicuna-7B LLAMA-68m      7.7   51.6 1.46   49.7 1.41   19.2 0.89   34.8 1.11
Vicuna-7B LLAMA-160m    49.0   58.0 0.66   57.1 0.65   25.1 0.38   40.0 0.48
Vicuna-7B GLIDE-47m      6.7   64.8 1.97   63.2 1.90   55.7 1.64   67.0 2.06
Vicuna-13B LLAMA-68m     6.2   50.2 1.51   49.3 1.48   19.0 0.94   32.7 1.13
Vicuna-13B LLAMA-160m   39.3   56.8 0.75   56.8 0.75   25.4 0.45   38.3 0.54
Vicuna-13B GLIDE-47m     5.5   67.1 2.16   65.0 2.07   57.1 1.77   68.6 2.24
Vicuna-33B LLAMA-68m     4.6   49.1 1.57   46.5 1.50   30.0 1.16   31.5 1.19
Vicuna-33B LLAMA-160m   29.5   56.1 0.89   53.1 0.84   31.4 0.59   36.7 0.64
Vicuna-33B GLIDE-71m     6.8   69.3 2.16   64.3 1.94   62.7 1.87   68.9 2.14
Mistral-7B LLAMA-45m     4.9   36.7 1.27   40.2 1.34   41.9 1.38   44.5 1.44
Mistral-7B GLIDE-47m     6.6   60.1 1.80   56.4 1.67   59.8 1.79   62.6 1.89
"""


def test_expected_speedup_reproduces_table_1():
    rows = [line.split() for line in TABLE_1.strip().splitlines()]
    cells = [(row[:2], float(row[2]) / 100, float(row[i]) / 100, float(row[i + 1])) for row in rows for i in (3, 5, 7, 9)]
    assert len(cells) == 44
    for name, c, alpha, printed in cells:
        # the table prints two decimals: a cell is off by at most 0.01 when rounding (0.005) is taken into account
        assert abs(round(bench.expected_speedup(alpha, c, 5), 2) - printed) <= 0.01 + 1e-9, (name, alpha, c)


def tokenizer_of(text, vocab):
    """A byte-level BPE of `vocab` tokens."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast
    made = ByteLevelBPETokenizer()
    made.train_from_iterator([text], vocab_size=vocab, min_frequency=1, special_tokens=["<|endoftext|>"])
    return PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token="<|endoftext|>")


def save(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny random target with drafters trained for a few steps on a made-up text, and two stages of a cascade."""
    folder = tmp_path_factory.mktemp("bench")
    tokenizer, sizes = tokenizer_of(TEXT, 300), {"vocab_size": 300, "max_position_embeddings": 64}
    for seed, name in enumerate(("model", "other")):
        save(folder / name, tiny("llama", seed=seed, **sizes).float(), tokenizer)
    for layers, name in ((2, "base"), (1, "small")):
        save(folder / "drafters" / name, tiny("llama", seed=layers, num_hidden_layers=layers, **sizes).float(), tokenizer)
    (folder / "text.txt").write_text(TEXT)
    (folder / "more.txt").write_text(TEXT * 60)
    argv = ["--target", str(folder / "model"), "--data", str(folder / "text.txt"), str(folder / "more.txt"), "--out", str(folder / "drafters"),
            "--work", str(folder / "work"), "--device", "cpu", "--steps", "3", "--batch", "2", "--length", "24", "--width", "16", "--hidden", "2"]
    assert train.main(["glide", "vanilla", "edd", *argv]) == 0
    (folder / "prompts.jsonl").write_text('{"prompt": "def add("}\n{"prompt": "return a + b"}\n{"question": "1 + 1?", "answer": "2"}\n')
    return folder


def args(small, *more):
    return ["--target", str(small / "model"), "--checkpoint", str(small / "drafters"), "--prompts", str(small / "prompts.jsonl"),
            "--max-new-tokens", "12", "--device", "cpu", *more]


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------- figures by hand
def test_counts_of_rounds_by_hand():
    """(new, path, parents) of rounds -> what a Record counts: an absent node, a rejection, a cut by the length limit."""
    out = bench.Record()
    out.round([5, 6, 9], [0, 1, 2], [-1, 0, 1, 2, -1])              # two of three accepted; a place left empty
    out.round([5], [0], [-1, 0, 0])                                # a tree, nothing accepted
    assert out.total == {"rounds": 2, "nodes": 5, "depth": 4, "accepted": 2, "tested": 4, "trees": 1, "drawn": 0, "draft_forwards": 0}
    assert out.runs == [3, 1] and out.tokens == [5, 6, 9, 5] and out.tau == 2
    out = bench.Record()
    out.round([5, 6], [0, 1, 2, 3], [-1, 0, 1, 2])                  # the output ended: two of three accepted ones are in it
    assert out.total["accepted"] == out.total["tested"] == 2
    p, q = torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    out.round([1], [0], [-1, 0], p, q)
    assert out.total["overlap"] == pytest.approx(0.6) and out.total["drawn"] == 1


def made_up(rounds, seconds, prefill=0.25, prompt=0, **total):
    """A Record of a chain drafter: rounds [(accepted, drafted)], tokens that count up from a hundred times the prompt's number."""
    out = bench.Record()
    out.tokens = [100 * prompt]
    for accepted, drafted in rounds:
        new = list(range(out.tokens[-1] + 1, out.tokens[-1] + 2 + accepted))
        out.round(new, list(range(accepted + 1)), list(range(-1, drafted)))
    out.seconds = seconds
    out.total.update(prefill=prefill, **total)
    return out


def arm_of(name, *outs, tree=None, build=None):
    arm = bench.Arm(name, None, tree, build)
    arm.results = dict(enumerate(outs))
    return arm


def made_up_run(**more):
    a = dict(target="t", dtype="float32", device="cpu", seed=0, temperature=0.0, exact=False)
    return SimpleNamespace(a=SimpleNamespace(**a), cuda=False, drafters={}, prompts=[("a", [1], 9), ("b", [1], 9)], **more)


def test_figures_of_a_row_by_hand():
    """Two prompts of 9 and 13 new tokens; a plain step takes 0.1 s."""
    plain = arm_of("plain", made_up([(0, 0)] * 8, 1.05), made_up([(0, 0)] * 12, 1.45, prompt=1))
    library = arm_of("generate()", made_up([(0, 0)] * 5, 1.2), made_up([(0, 0)] * 5, 0.6, prompt=1))          # it ended sooner
    ours = arm_of("x", made_up([(2, 3), (0, 3), (1, 1), (1, 3)], 0.525, draft=0.25, verify=0.5, other=0.25, draft_forwards=10),
                  made_up([(3, 3), (3, 3), (3, 3)], 0.29, prompt=1, draft=0.5, verify=0.25, other=0.25, draft_forwards=10),
                  tree="chain(gamma=3)", build=partial(bench.cape.chain, gamma=3))
    row = bench.row_of(made_up_run(), ours, plain, library, "all", [0, 1])
    assert row["tokens"] == 9 + 13 and row["prompts"] == 2 and row["lossless"] is True
    assert row["tokens_per_second"] == pytest.approx(22 / 0.815)
    assert [row[key] for key in ("speedup_low", "speedup", "speedup_high")] == pytest.approx([2.75, 3.5, 4.25]), "of 2 and 5"
    assert row["speedup_vs_generate"] == pytest.approx(median([9 / 0.525 / (6 / 1.2), 13 / 0.29 / (6 / 0.6)]))
    assert row["time_to_first_token"] == 0.25 and row["target_ms"] == pytest.approx(100)
    assert row["tau"] == pytest.approx(20 / 7), "the prefill's token is none of a round's"
    assert row["nodes"] == pytest.approx(19 / 7) and row["depth"] == pytest.approx(19 / 7)
    assert row["alpha_depth"] == pytest.approx(20 / 19)
    assert row["alpha"] == pytest.approx(13 / 16), "4 accepted and 3 rejected, and 9 accepted: what follows a rejection is not tested"
    assert row["draft_forwards"] == pytest.approx(20 / 7) and row["c"] == pytest.approx(0.75 / 20 / 0.1)
    assert row["expected_speedup"] == pytest.approx((1 - (13 / 16) ** 4) / (1 - 13 / 16) / (3 * 0.375 + 1))
    assert row["round_ms"] == pytest.approx(2000 / 7) and row["draft_ms"] == pytest.approx(750 / 7)
    assert [row[f"share_{key}"] for key in ("draft", "verify", "other")] == pytest.approx([0.375, 0.375, 0.25])
    assert row["runs"] == [7 + 2] and row["settings"] == {"gamma": 3} and row["distinct_4grams"] == 1
    of_each = {key: [figures[key] for figures in row["by_prompt"]] for key in row["by_prompt"][0]}
    assert of_each == {"speedup": pytest.approx([2, 5]), "tau": [2, 4], "alpha": [4 / 7, 1], "alpha_overlap": [None, None],
                       "nodes": [10 / 4, 3]}


def test_one_model_alone_has_a_cost_and_an_expected_speedup():
    """Speculative decoding with k = 2: four tokens of four accepted; three runs of 0.1 s each beside a step of 0.1 s."""
    plain = arm_of("plain", made_up([(0, 0)] * 6, 0.85))
    ours = arm_of("x", made_up([(2, 2), (2, 2)], 0.5, draft=0.3, draft_forwards=3), tree="chain", build=bench.cascade.proposal)
    ours.results[0].stage_runs = [3]
    run = made_up_run()
    run.drafters = {"x": SimpleNamespace(names=["base"], K=[[2]], costs={"ms": [0.5]})}
    row = bench.row_of(run, ours, plain, plain, "all", [0])
    assert row["c"] == pytest.approx(1) and row["alpha"] == 1
    assert row["expected_speedup"] == pytest.approx(3 / (2 + 1))


def test_stages_and_repetitions_by_hand():
    """A cascade of two; its runs of each stage; 4-grams of 1 2 3 1 2 3 1: three of four."""
    plain = arm_of("plain", made_up([(0, 0)] * 6, 0.85))
    ours = arm_of("x", made_up([(2, 2), (2, 2)], 0.5, draft=0.3, verify=0.2, other=0.1, draft_forwards=7), tree="chain", build=bench.cascade.proposal)
    for arm in (plain, ours):
        arm.results[0].tokens = [1, 2, 3, 1, 2, 3, 1]
    ours.results[0].stage_runs = [2, 5]
    run = made_up_run()
    run.drafters = {"x": SimpleNamespace(names=["base", "maxgram"], K=[[1, 1], [0, 1]], costs={"ms": [0.5], "given": (0.25,)})}
    row = bench.row_of(run, ours, plain, plain, "all", [0])
    assert row["distinct_4grams"] == 3 / 4 and row["runs"] == [3, 2, 5] and row["stages"] == ["base", "maxgram"]
    assert row["swi_ms"] == 7 / (3 + 0.5 * 2) and row["swi_given"] == 7 / (3 + 0.25 * 2)
    assert row["swi_measured"] == pytest.approx(7 / (3 + 0.3 / 0.1)) and row["c"] is None


def test_the_baseline_is_the_faster_plain_arm(capsys):
    slow, fast = (arm_of(name, *(made_up([(0, 0)] * 4, seconds, prompt=i) for i in range(2)))
                  for name, seconds in (("plain", 1.0), ("plain, two queries", 0.5)))
    ours = arm_of("x", *(made_up([(1, 1), (1, 1)], 0.25, prompt=i) for i in range(2)), tree="chain", build=bench.cape.chain)
    rows = bench.report(made_up_run(), [slow, fast, arm_of("generate()", *slow.results.values()), ours], 2)
    assert [row["speedup"] for row in rows if row["group"] == "all"] == [0.5, 1, 0.5, 2]
    assert [row["prompts"] for row in rows if row["drafter"] == "x"] == [2, 1, 1], "all, and each group"
    assert "baseline: plain, two queries" in capsys.readouterr().out


def test_arms_take_turns_in_going_first():
    run, order = made_up_run(), []

    def arm(name):
        return bench.Arm(name, lambda ids, limit: order.append(name) or bench.Record())
    run.prompts = [("a", [1], 9)] * 4
    assert bench.measure(run, [arm(name) for name in "abc"]) == 4
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc", "a warm-up; then nobody is always first"


def test_costs_are_the_middle_of_turns_after_a_warm_up():
    """In turn k a draft takes k hundredths of a plain step, and each further node k thousandths."""
    run, turn = made_up_run(), [-1]
    run.drafters, run.notes = {"x": object()}, []

    def decode(drafter, build, ids, limit):
        out = bench.Record()
        if drafter is None:
            turn[0] += 1
            out.total.update(rounds=10, verify=10.0)
        else:
            wide = build is not bench.cape.chain
            nodes = 300 if wide else 50
            out.total.update(rounds=10, nodes=nodes, draft_forwards=50, draft=0.5 * turn[0], verify=10 + 0.001 * turn[0] * nodes)
        return out
    run.decode = decode
    found = bench.measure_costs(run, "x")
    assert turn[0] == 6 and found == {"cost": pytest.approx(0.035), "node_price": pytest.approx(0.0035)}, "turns 1 to 6"


def test_flags_of_sampling_reach_the_decoding(small):
    """The same tokens as the loop gives with these settings, and others without one of them."""
    how = dict(temperature=1.3, top_k=30, top_p=0.9, seed=7)
    run = bench.Run(args(small, *(x for key, value in how.items() for x in (f"--{key.replace('_', '-')}", str(value)))))
    _, ids, limit = run.prompts[0]

    def tokens(**changed):
        return bench.verify.generate(run.target, None, bench.verify.no_draft, ids, limit, **{**how, **changed}).tokens
    wanted = tokens()
    assert run.decode(None, bench.verify.no_draft, ids, limit).tokens == wanted
    assert all(wanted != tokens(**changed) for changed in ({"seed": 0}, {"top_k": None}, {"top_p": 1.0}, {"temperature": 0.0}))
    run = bench.Run(args(small))
    whole = run.decode(None, bench.verify.no_draft, ids, limit).tokens
    run.model.generation_config.eos_token_id = whole[2]
    assert run.decode(None, bench.verify.no_draft, ids, limit).tokens == whole[:whole.index(whole[2]) + 1]


def test_what_transformers_is_asked_for(small, monkeypatch):
    """Its own generate() with the same settings; assisted generation with the stage; prompt lookup with ten tokens."""
    run = bench.Run(args(small, "--drafter", "cascade(base, maxgram)", "--tree", "chain", "--temperature", "0.7", "--top-k", "9", "--top-p", "0.8"))
    _, ids, limit = run.prompts[0]
    asked = []

    def generate(given, **how):
        asked.append(how)
        return torch.cat((given, given[:, :2]), 1)
    monkeypatch.setattr(run.model, "generate", generate)
    arms = {arm.name: arm for arm in bench.arms_of(run)}
    for name, own in (("generate()", {}), ("assisted generation (base)", {"assistant_model": run.stages["base"]}),
                      ("prompt lookup", {"prompt_lookup_num_tokens": 10})):
        assert arms[name].decode(ids, limit).tokens == ids[:2]
        how = asked.pop()
        assert how.pop("attention_mask").tolist() == [[1] * len(ids)]
        assert how == {"max_new_tokens": limit, "do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8, **own}
    run.a.temperature = 0.0
    arms["generate()"].decode(ids, limit)
    assert asked.pop()["do_sample"] is False


# ---------------------------------------------------------------- end to end
FIELDS = """target drafter tree settings group dtype device threads batch seed depth temperature prompts tokens tokens_per_second
speedup speedup_low speedup_high speedup_vs_generate tau alpha alpha_overlap alpha_depth nodes draft_forwards c expected_speedup draft_ms
verify_ms other_ms target_ms share_draft share_verify share_other time_to_first_token peak_memory lossless first_divergence stages K runs
distinct_4grams versions by_prompt""".split()
TREES = ["chain", "chain(gamma=3)", "cape", "cape(gamma=3)", "fixed", "fixed(size=2)", "beam", "beam(width=8)", "pct", "pct(width=3, leaf=0)",
         "pct(width=1, cost=0.01)", "pct-cost", "own-confidence(own=0.2)", "vct", "eagle2"]


def test_exact_is_compared_with_what_it_costs(small, tmp_path):
    """Tokens are held against plain decoding in the same shapes, speeds against the fastest plain decoding, exact or not."""
    assert bench.main(args(small, "--exact", "--dtype", "bfloat16", "--drafter", "glide", "edd", "--tree", "chain", "--limit", "3",
                           "--max-new-tokens", "24", "--json", str(tmp_path / "r.jsonl"))) == 0
    rows = {(r["drafter"], r["tree"]): r for r in rows_of(tmp_path / "r.jsonl")}
    assert list(rows) == [("plain", None), ("plain, two queries", None), ("plain, not exact", None), ("generate()", None),
                          ("glide", "chain"), ("edd", "chain")]
    assert all(rows[key]["lossless"] for key in rows if key[0] not in ("plain, not exact", "generate()"))
    plain = [r for (name, _), r in rows.items() if name.startswith("plain")]
    fastest = max(plain, key=lambda r: r["tokens_per_second"])
    assert fastest["speedup"] == 1


def test_tokens_are_held_against_the_exact_ones(monkeypatch):
    """Where rounding makes the fastest plain decoding say something else, an arm that says it has lost."""
    run = made_up_run()
    monkeypatch.setattr(bench, "divergence", lambda run, arm, base, i: base.name)
    exact, fast, ours = (arm_of(name, made_up([(0, 0)] * 4, 1.0)) for name in ("plain", "plain, not exact", "ours"))
    fast.results[0].tokens, ours.results[0].tokens = [7, 7, 7, 7], list(exact.results[0].tokens)
    row = bench.row_of(run, ours, fast, exact, "all", [0], exact)
    assert row["lossless"] is True and row["first_divergence"] is None
    row = bench.row_of(run, fast, fast, exact, "all", [0], exact)
    assert row["lossless"] is False and row["first_divergence"] == "plain"
    assert bench.row_of(run, ours, fast, exact, "all", [0])["first_divergence"] == "plain, not exact"


def test_the_whole_grid(small, tmp_path, capsys):
    assert bench.main(args(small, "--drafter", "glide", "edd", "--tree", *TREES, "--json", str(tmp_path / "r.jsonl"),
                           "--limit", "2", "--max-new-tokens", "8")) == 0
    rows = rows_of(tmp_path / "r.jsonl")
    assert [(r["drafter"], r["tree"]) for r in rows] == [("plain", None), ("plain, two queries", None), ("generate()", None)] + [
        (d, t) for d in ("glide", "edd") for t in TREES]
    for r in rows:
        assert set(FIELDS) <= set(r) and r["lossless"] is True and r["first_divergence"] is None
        assert r["tokens"] == 2 * 8 and r["prompts"] == 2 and r["speedup_low"] <= r["speedup"] <= r["speedup_high"]
        assert r["tree"] or not r["settings"]
        if not r["tree"]:
            assert r["c"] is r["tau"] is None
            continue
        assert r["draft_forwards"] > 0 and r["c"] > 0
        assert abs(sum(r[f"share_{k}"] for k in ("draft", "verify", "other")) - 1) < 1e-9
        assert (r["alpha"] is not None) == r["tree"].startswith("chain") or r["nodes"] < 2 or "width=1" in r["tree"], "only chains have an alpha"
        assert 1 <= r["tau"] <= r["depth"] + 1
        assert r["alpha_depth"] == (r["tau"] / r["depth"] if r["depth"] else None)
        assert r["nodes"] or r["tree"][:3] in ("pct", "own"), "PCT may find nothing worth verifying"
        assert r["depth"] <= (10 if r["tree"][:3] in ("pct", "own") else 6 if r["tree"] == "eagle2" else r["settings"].get("gamma", 5))
        if r["tree"].startswith("chain"):
            gamma = 3 if r["tree"] == "chain(gamma=3)" else 5
            assert r["settings"] == {"gamma": gamma} and r["nodes"] <= gamma
            assert r["expected_speedup"] == (bench.expected_speedup(r["alpha"], r["c"], gamma) if r["alpha"] else None)
    assert any(r["speedup"] == 1 and r["drafter"].startswith("plain") for r in rows), "the baseline is one of the plain arms"
    found = {(r["drafter"], r["tree"]): r["settings"] for r in rows}
    assert found["glide", "pct(width=3, leaf=0)"]["width"] == 3 and found["glide", "pct(width=3, leaf=0)"]["leaf"] == 0
    for d in ("glide", "edd"):
        assert found[d, "pct"]["cost"] == found[d, "pct-cost"]["cost"], "measured once a drafter"
    out = capsys.readouterr().out
    assert "glide x cape(gamma=3)" in out and "baseline: plain" in out


def test_what_is_measured_is_not_what_is_given(small, monkeypatch, capsys):
    """s_d / s_t of a disturbed machine is refused; a given one is taken, and nothing is measured."""
    run = bench.Run(args(small, "--drafter", "glide", "--tree", "pct", "pct(cost=0.3)", "pct-cost(node_price=0.5)", "fixed(size=1)", "fixed"))
    pct, given, priced, size, fixed = run.trees
    assert bench.builder(run, "glide", given).keywords == {"cost": 0.3} and not run.costs and not run.notes
    assert bench.builder(run, "glide", size).keywords == {"size": 1}
    clock = iter(range(10 ** 9))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock) * 1e-3)       # every step takes as long: s_d / s_t is about 1
    found = bench.builder(run, "glide", priced).keywords
    assert set(found) == {"cost", "node_price"} and found["node_price"] == 0.5 and 0.5 < found["cost"] <= 1 or "cannot be" in run.notes[-1]
    run.costs.clear()
    total = bench.Record.settle

    def disturbed(self):
        total(self)
        self.total["draft"] *= 1e-6
    monkeypatch.setattr(bench.Record, "settle", disturbed)
    assert bench.builder(run, "glide", pct).keywords == {} and "cannot be" in run.notes[-1] and str(bench.pct.COST) in run.notes[-1]
    monkeypatch.undo()
    cape = [run.decode(run.drafters["glide"], bench.cape.cape, ids, limit).total for _, ids, limit in run.prompts]
    mean = sum(t["nodes"] for t in cape) / sum(t["depth"] for t in cape) - 1
    assert bench.builder(run, "glide", fixed).keywords == {"size": round(mean)}


def test_fixed_is_sized_for_each_drafter(small, monkeypatch):
    run = bench.Run(args(small, "--drafter", "glide", "edd", "--tree", "fixed"))
    nodes = {"glide": 10, "edd": 30}

    def decode(drafter, build, ids, limit, tell=None):
        out = bench.Record()
        out.total.update(nodes=nodes[next(label for label, d in run.drafters.items() if d is drafter)], depth=5)
        return out
    monkeypatch.setattr(run, "decode", decode)
    assert [bench.builder(run, d, run.trees[0]).keywords["size"] for d in ("glide", "edd")] == [1, 5]


def test_sampling_runs_and_says_what_it_can_say(small, tmp_path):
    assert bench.main(args(small, "--tree", "cape", "drawn", "--drafter", "glide", "maxgram", "--temperature", "0.8", "--top-k", "20",
                           "--json", str(tmp_path / "r.jsonl"))) == 0
    rows = {(r["drafter"], r["tree"]): r for r in rows_of(tmp_path / "r.jsonl")}
    for drafter in ("glide", "maxgram"):
        assert rows[drafter, "cape"]["lossless"] is True, "keyed noise: plain sampling's tokens"
    assert rows["maxgram", "drawn"]["lossless"] is None, "a drawn chain: speculative sampling's tokens"
    assert rows["glide", "drawn"]["lossless"] is None and 0 < rows["glide", "drawn"]["alpha_overlap"] <= 1
    assert rows["generate()", None]["lossless"] is None and rows["plain", None]["lossless"] is True


def test_plain_arm_is_the_models_own_greedy_output(small):
    run = bench.Run(args(small))
    _, ids, limit = run.prompts[0]
    assert run.decode(None, bench.verify.no_draft, ids, limit).tokens == plain(run.model, ids, limit) == bench.library(run, ids, limit).tokens


def test_an_interruption_reports_what_was_measured(small, tmp_path, monkeypatch, capsys):
    generate, calls = bench.verify.generate, []

    def interrupting(*given, **how):
        calls.append(1)
        if len(calls) == 10:               # three arms of ours: warm-up, two prompts, and then
            raise KeyboardInterrupt
        return generate(*given, **how)
    monkeypatch.setattr(bench.verify, "generate", interrupting)
    assert bench.main(args(small, "--json", str(tmp_path / "r.jsonl"))) == 130
    assert {r["prompts"] for r in rows_of(tmp_path / "r.jsonl") if r["group"] == "all"} == {2}
    assert "2 of 3 prompts" in capsys.readouterr().err
    calls[:] = [1] * 6                     # and before anything was measured
    (tmp_path / "r.jsonl").unlink()
    assert bench.main(args(small, "--json", str(tmp_path / "r.jsonl"))) == 130
    assert "before there was anything" in capsys.readouterr().err and not (tmp_path / "r.jsonl").exists()


def test_divergence_is_reported_with_its_gap(small, monkeypatch, tmp_path, capsys):
    """A wrong output on purpose: the first wrong token is named, and the gap is that of the model's own logits."""
    run = bench.Run(args(small))
    i, ids = 1, run.prompts[1][1]
    right = plain(run.model, ids, 6)
    base, arm = bench.Arm("plain", None), bench.Arm("ours", None)
    for at in (4, 0):
        wrong = right[:at] + [(right[at] + 1) % 300] + right[at + 1:]
        for x, tokens in ((base, right), (arm, wrong)):
            x.results[i] = bench.Record()
            x.results[i].tokens = tokens
        found = bench.divergence(run, arm, base, i)
        with torch.no_grad():
            logits = run.model(torch.tensor([ids + right[:at]])).logits[0, -1]
        assert found["prompt"] == i and found["token"] == at
        assert abs(found["logit_gap"] - (logits[right[at]] - logits[wrong[at]]).item()) < 1e-4
    arm.results[i].tokens = right[:4]
    assert bench.divergence(run, arm, base, i) == {"prompt": i, "token": 4, "logit_gap": None}, "one is the other's beginning"
    # end to end: a loop that accepts everything
    accept = bench.verify.accept

    def gullible(tokens, parents, choice):
        path, new = accept(tokens, parents, choice)
        return (path, new[:-1] + [(new[-1] + 1) % 300]) if len(parents) > 2 else (path, new)
    monkeypatch.setattr(bench.verify, "accept", gullible)
    assert bench.main(args(small, "--tree", "chain", "--json", str(tmp_path / "r.jsonl"))) == 0
    row = rows_of(tmp_path / "r.jsonl")[-1]
    assert row["lossless"] is False and row["first_divergence"]["token"] >= 1
    out = capsys.readouterr().out
    assert re.search(r"glide x chain .* NO\n", out) and "first_divergence" in out


# ---------------------------------------------------------------- what is shown while it runs
def continuation(run, arm, capsys):
    bench.show(run, arm)
    head, text, tail = re.fullmatch(r"\n(--- .*?bonus)\n(.*)\n(--- tau .*)\n", capsys.readouterr().out, re.DOTALL).groups()
    return head, text, float(tail.split()[-1])


def test_show_brackets_what_was_drafted_and_accepted(small, capsys, monkeypatch):
    run = bench.Run(args(small, "--tree", "chain"))
    arm = bench.arms_of(run)[-1]
    _, ids, limit = run.prompts[0]
    right = run.tokenizer.decode(plain(run.model, ids, limit)).rstrip("\ufffd")
    oracle = plain(run.model, ids, limit)

    def build(expand, root):                                # drafts two right tokens and a wrong one
        at = run.target.cache.length - len(ids) + 1
        tokens = [root.item(), *oracle[at:at + 2], 0][:max(1, limit - at)]
        return bench.verify.Tree(torch.tensor(tokens), torch.arange(-1, len(tokens) - 1))
    arm.decode = bench.partial(run.decode, None, build)
    head, text, tau = continuation(run, arm, capsys)
    assert head == "--- glide x chain, prompt 1 of prompts: [accepted]bonus" and tau > 2.5
    assert text.replace("[", "").replace("]", "") == right.replace("[", "").replace("]", "")
    assert text.count("[") - right.count("[") >= 2
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, coloured, _ = continuation(run, arm, capsys)
    assert coloured.replace("\033[32m", "").replace("\033[0m", "") == right and coloured.count("\033[32m") == coloured.count("\033[0m") >= 2


def test_show_waits_for_the_other_half_of_a_character(small, capsys):
    run = bench.Run(args(small))
    arm, out = bench.Arm("ours", None), bench.Record()
    ids = run.tokenizer("aé€b")["input_ids"]
    assert len(ids) > 4, "characters of several tokens each"

    def decode(prompt, limit, tell):
        tell(ids[:1], 0)
        for i in range(1, len(ids), 2):
            tell(ids[i:i + 2], 1)
        return out
    arm.decode = decode
    _, text, _ = continuation(run, arm, capsys)
    assert text.replace("[", "").replace("]", "") == "aé€b"


def test_the_bar_carries_the_running_speedup(small, monkeypatch):
    seen = []

    class Bar:
        def __init__(self, rows=(), **_):
            self.rows = rows

        def __iter__(self):
            return iter(self.rows)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self):
            pass

        def set_postfix_str(self, text):
            seen.append(text)
    monkeypatch.setattr(bench, "tqdm", Bar)
    assert bench.main(args(small, "--drafter", "vanilla", "--tree", "chain", "cape", "--show")) == 0
    assert len(seen) == 3 and all(re.fullmatch(r"vanilla x chain \d+\.\d\dx, vanilla x cape \d+\.\d\dx", text) for text in seen)


def test_stand_in_end_to_end_as_a_script(tmp_path, monkeypatch, capsys):
    """The README's main command, small, from another folder: the shipped weights, token for token."""
    (tmp_path / "p.jsonl").write_text('{"group": "code", "prompt": "def main("}\n{"group": "math", "question": "What is 2 + 3?"}\n')
    default = ROOT / "checkpoints" / "prompts.jsonl"
    prompts = [] if default.exists() else ["--prompts", "p.jsonl"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench.py"), "--drafter", "glide", "--tree", "cape", "--limit", "2", "--max-new-tokens", "10",
                                      "--device", "cpu", "--threads", "1", "--json", str(tmp_path / "r.jsonl"), *prompts])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    done = capsys.readouterr()
    assert ended.value.code == 0, done.err
    rows = rows_of(tmp_path / "r.jsonl")
    ours = next(r for r in rows if r["drafter"] == "glide")
    assert ours["lossless"] is True and ours["tau"] > 1.2 and len({r["group"] for r in rows}) == 3, "all, and two groups"
    assert "all: 2 prompts" in done.out and "glide x cape" in done.out


# ---------------------------------------------------------------- prompts
class Words:
    """A tokenizer that shows what it was given."""
    chat_template = None

    def __call__(self, text):
        return {"input_ids": text}

    def apply_chat_template(self, messages, **_):
        return {"input_ids": [(message["role"], message["content"]) for message in messages]}

    def decode(self, ids, **_):
        return f"answer to {ids[0]}"


def made_up_turns(**more):
    """A run whose target answers a question of n letters or messages with token n."""
    def decode(drafter, build, ids, limit):
        assert drafter is None and build is bench.verify.no_draft and limit == min(9, 20 - len(ids))
        return SimpleNamespace(tokens=[len(ids)])
    flags = SimpleNamespace(**{"system": None, "template": None, "ask": None, "max_new_tokens": 9, **more})
    return SimpleNamespace(a=flags, tokenizer=Words(), decode=decode, target=SimpleNamespace(room=lambda ids: 20 - len(ids)))


@pytest.mark.parametrize("name, text, expected", [
    ("mt.jsonl", '{"turns": ["first", "second"]}', ["first", "first\n\nanswer to 5\n\nsecond"]),
    ("gsm.jsonl", '{"question": "q?", "answer": "a"}', ["Question: q?\nAnswer:"]),
    ("share.json", '[{"conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "hello"}]}]', ["hi\n\nhello"]),
    ("chat.json", '[{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}]', ["hello"]),
    ("p.jsonl", '{"prompt": "def f("}', ["def f("]), ("t.jsonl", '{"text": "once"}', ["once"]), ("s.json", '["once"]', ["once"]),
    ("told.json", '[{"conversations": [{"from": "gpt", "value": "hi"}]}]', [None]),
    ("plain.txt", "Once upon\n", ["Once upon\n"]), ("none.jsonl", '{"sentence": "x"}', [None]), ("number.json", "[1]", [None])])
def test_prompt_files_are_told_apart_by_their_fields(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    (row,) = train.read_rows(tmp_path / name)
    assert list(bench.turns_of(made_up_turns(), row)) == expected


def test_each_question_of_a_conversation_stands_behind_what_was_said():
    """The file's own answers where it has them, else the target's; a system message first."""
    run = made_up_turns(system="be kind")
    run.tokenizer.chat_template = "yes"
    system, one, two = ("system", "be kind"), ("user", "one"), ("user", "two")
    assert list(bench.turns_of(run, {"turns": ["one", "two"]})) == [
        [system, one], [system, one, ("assistant", "answer to 2"), two]]
    share = {"conversations": [{"from": role, "value": text} for role, text in
                               (("human", "one"), ("gpt", "yes"), ("human", "two"), ("human", "three"))]}
    assert list(bench.turns_of(run, share)) == [
        [system, one], [system, one, ("assistant", "yes"), two],
        [system, one, ("assistant", "yes"), two, ("assistant", "answer to 4"), ("user", "three")]]
    own = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]}
    assert list(bench.turns_of(run, own)) == [[("system", "be brief"), one]], "the file's own system message"


def test_a_second_turn_continues_the_first(small, tmp_path, monkeypatch):
    """End to end: the second prompt holds the first, plain decoding's answer, and the second question."""
    (tmp_path / "mt.jsonl").write_text('{"turns": ["def add(", "return"]}\n{"turns": ["a + b", "b"]}\n')
    run = bench.Run(args(small, "--prompts", str(tmp_path / "mt.jsonl")))
    first = run.prompts[0][1]
    answer = plain(run.model, first, 12)
    words = f"def add(\n\n{run.tokenizer.decode(answer, skip_special_tokens=True)}\n\nreturn"
    assert len(run.prompts) == 4 and run.prompts[1][1] == run.tokenizer(words)["input_ids"]
    asked, decode = [], bench.Run.decode
    monkeypatch.setattr(bench.Run, "decode", lambda run, *how, **more: asked.append(how) or decode(run, *how, **more))
    assert len(bench.Run(args(small, "--prompts", str(tmp_path / "mt.jsonl"), "--limit", "2")).prompts) == 2 and len(asked) == 1


def test_chats_in_vicunas_words(small, tmp_path, capsys):
    """As FastChat writes them: seps " " and "</s>"."""
    run = bench.Run(args(small, "--template", "vicuna"))
    said = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Who?"}]
    about = ("A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
             "and polite answers to the user's questions.")
    assert run.tokenizer.decode(bench.chat_ids(run, said)) == f"{about} USER: Hi. ASSISTANT: Hello!</s>USER: Who? ASSISTANT:"
    said.insert(0, {"role": "system", "content": "Be kind."})
    assert run.tokenizer.decode(bench.chat_ids(run, said)) == "Be kind. USER: Hi. ASSISTANT: Hello!</s>USER: Who? ASSISTANT:"
    (tmp_path / "form.jinja").write_text("{% for turn in messages %}<{{ turn.content }}>{% endfor %}")
    run = bench.Run(args(small, "--template", str(tmp_path / "form.jinja")))
    assert run.tokenizer.decode(bench.chat_ids(run, said[:2])) == "<Be kind.><Hi.>"
    (tmp_path / "form.jinja").write_text("{{ raise_exception('no system message') }}")
    (tmp_path / "mt.jsonl").write_text('{"turns": ["Hi."]}')
    argv = args(small, "--template", str(tmp_path / "form.jinja"), "--prompts", str(tmp_path / "mt.jsonl"))
    check_mistake(argv, "the chat template refuses the messages (no system message)", capsys)


def test_groups_take_turns(small, tmp_path):
    rows = [{"group": "a", "prompt": f"a{i}"} for i in range(3)] + [{"group": "b", "prompt": "b"}] + [{"prompt": "c"}]
    (tmp_path / "file.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "he.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "def g("}\n{"prompt": "def h("}\n'))
    argv = args(small, "--prompts", str(tmp_path / "file.jsonl"), str(tmp_path / "he.jsonl.gz"))
    assert [group for group, _, _ in bench.Run(argv).prompts] == ["a", "b", "file", "he", "a", "he", "a"]
    run = bench.Run([*argv, "--limit", "5"])
    assert [run.tokenizer.decode(ids) for _, ids, _ in run.prompts] == ["a0", "b", "c", "def g(", "a1"]


@pytest.mark.skipif(not DATA.exists(), reason="the public prompt files (../shared/data) are not here")
def test_public_prompt_files():
    for name, count, start in (("mt_bench.jsonl", 80, None), ("gsm8k_test.jsonl", 1319, "Question: Janet"), ("HumanEval.jsonl.gz", 164, "from typing")):
        prompts = [next(bench.turns_of(made_up_turns(), row)) for row in train.read_rows(DATA / name)]
        assert len(prompts) == count and all(prompts) and (start is None or prompts[0].startswith(start))


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize("more, words", [
    (["--drafter", "bush"], "called 'bush'"), (["--tree", "bush"], "there is no tree called 'bush'"), (["--tree", "chain(gamma=0)"], "gamma is 0"),
    (["--tree", "cape(gamma=33)"], "max_nodes 32"), (["--max-new-tokens", "0"], "--max-new-tokens is 0"), (["--temperature", "-1"], "--temperature is -1"),
    (["--tree", "pct(cost=-1)"], "between 0 and 1"), (["--tree", "cape(sizes=(3, 1))"], "3 edges need 4 sizes"), (["--limit", "0"], "--limit is 0"),
    (["--tree", "cape(edges=(0.6, 0.3, 0.8))"], "ascend"), (["--tree", "beam(gamma=100, width=8)"], "that fit"),
    (["--temperature", "nan"], "--temperature is nan"), (["--top-p", "0"], "--top-p is 0"), (["--top-p", "nan"], "--top-p is nan"),
    (["--template", "lama"], "--template lama: say vicuna, or name a file"),
    (["--top-k", "0"], "--top-k is 0"), (["--threads", "0"], "--threads is 0"), (["--tree", "drawn"], "give --temperature above 0"),
    (["--target", "/no/such/model"], "does not exist"), (["--target", "/nowhere"], "does not exist"), (["--checkpoint", "/no/such"], "no drafter in /no/such"),
    (["--prompts", "/no/such"], "/no/such cannot be read"), (["--limit", "x"], "invalid int value"), (["--dtype", "int8"], "invalid choice"),
    (["--device", "cuda"], "no CUDA device"), (["--nonsense"], "unrecognized arguments"), (["--drafter", "base"], "called 'base'"),
    (["--drafter", "cascade"], "names of models"), (["--tree", "cape(base)"], "cape takes gamma=5"),
    (["--drafter", "cascade(maxgram, base)"], "maxgram last"), (["--drafter", "cascade(base, base)"], "every stage once"),
    (["--drafter", "cascade(base, k=(1, 2))"], "take 1 number"), (["--drafter", "cascade(base, small, k=(5, 4, 1))"], "never falls"),
    (["--drafter", "cascade(base, stop='never')"], "say 'own' or 'sum'"),
    (["--drafter", "cascade(base, lenience=0.9)"], "lenience is 0.9"), (["--drafter", "cascade(base, lenience='x')"], "lenience"),
    (["--drafter", "cascade(base, k='x')"], "cascade(base, k='x')"), (["--drafter", "cascade(base, costs=0.1)"], "cascade(base, costs=0.1)"),
    (["--drafter", "cascade(base, small, costs=(0.1,))"], "a cost for each model"), (["--tree", "cape", "cape"], "name each once"),
    (["--drafter", "maxgram", "--tree", "chain(gamma=3)"], "of its own length"),
])
def test_mistakes_are_one_sentence(small, capsys, more, words):
    if words == "no CUDA device" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    check_mistake(args(small, *more), words, capsys)


def check_mistake(argv, words, capsys):
    assert bench.main(argv) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and err.startswith("bench.py: ")


def test_prompt_mistakes(small, tmp_path, capsys):
    for text, words in (("", "holds no prompt"), ('{"prompt": ""}', "is empty"), ('{"prompt": "%s"}' % ("x y " * 200), "context holds 64"),
                        ('{"sentence": 1}', "row 1 of "), ('"a"\n{"x": 1}', "row 2 of "), ('{"prompt": ', "cannot be read")):
        (tmp_path / "p.jsonl").write_text(text)
        check_mistake(args(small, "--prompts", str(tmp_path / "p.jsonl")), words, capsys)
    (tmp_path / "p.jsonl").write_text('{"prompt": "%s"}' % ("x y " * 200))
    check_mistake(args(small, "--skip-long", "--prompts", str(tmp_path / "p.jsonl")), "holds no prompt of at most 64", capsys)
    run = bench.Run(args(small, "--skip-long", "--prompts", str(tmp_path / "p.jsonl"), str(small / "prompts.jsonl")))
    assert len(run.prompts) == 3 and run.notes == ["1 prompts longer than the context left out"]


def test_without_prompts_a_look_at_the_projects_own():
    argv = ["--drafter", "maxgram", "--tree", "chain"]
    groups = [group for group, _, _ in bench.Run(argv).prompts]
    assert groups == ["story", "retell", "math"] * (bench.LOOK // 3)
    assert len(bench.Run([*argv, "--limit", "36"]).prompts) == 36


def test_a_form_of_ones_own_asks(small, tmp_path, capsys):
    (tmp_path / "q.jsonl").write_text('{"question": "Why {x}", "category": "math"}\n{"question": "b"}\n')
    run = bench.Run(args(small, "--prompts", str(tmp_path / "q.jsonl"), "--ask", "Q: {question}"))
    assert [(group, run.tokenizer.decode(ids)) for group, ids, _ in run.prompts] == [("math", "Q: Why {x}"), ("q", "Q: b")]
    for ask, words in (("{answer}", "KeyError"), ("{question", "ValueError"), ("{question[x]}", "does not fit")):
        check_mistake(args(small, "--prompts", str(tmp_path / "q.jsonl"), "--ask", ask), words, capsys)


def test_limits_are_the_context_s(small, tmp_path):
    """A prompt of the context's length leaves room for one token, which nobody reads again."""
    ids = bench.Run(args(small)).tokenizer("def add(a, b): return " * 30)["input_ids"]
    words = bench.Run(args(small)).tokenizer
    text = words.decode(ids[:64])
    while len(words(text)["input_ids"]) > 64:
        text = text[:-1]
    (tmp_path / "p.txt").write_text(text)
    (tmp_path / "r.jsonl").write_text("")
    n = len(words(text)["input_ids"])
    argv = args(small, "--prompts", str(tmp_path / "p.txt"), "--tree", "chain", "cape", "pct", "--json", str(tmp_path / "r.jsonl"))
    assert bench.Run(argv).prompts[0][2] == min(12, 65 - n) and bench.main(argv) == 0
    assert all(r["lossless"] and r["tokens"] == min(12, 65 - n) for r in rows_of(tmp_path / "r.jsonl"))


def test_damaged_and_foreign_drafters(small, tmp_path, capsys):
    def copied(name):
        shutil.copytree(small / "drafters", tmp_path / name)
        return tmp_path / name
    weights = copied("cut") / "glide" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    check_mistake(args(small, "--checkpoint", str(tmp_path / "cut")), "is damaged", capsys)
    (copied("gone") / "glide" / "model.safetensors").unlink()
    check_mistake(args(small, "--checkpoint", str(tmp_path / "gone")), "model.safetensors is missing", capsys)
    for text in ("{", "[]", "{}", "3"):
        shutil.rmtree(tmp_path / "json", ignore_errors=True)
        (copied("json") / "glide" / "training.json").write_text(text)
        check_mistake(args(small, "--checkpoint", str(tmp_path / "json")), "is damaged", capsys)
        check_mistake(args(small, "--checkpoint", str(tmp_path / "json" / "glide")), "is damaged", capsys)
    check_mistake(args(small, "--target", str(small / "other")), "was made for another target", capsys)
    check_mistake(args(small, "--checkpoint", str(small / "drafters" / "vanilla")), "choose among vanilla maxgram", capsys)
    model = tmp_path / "model"
    shutil.copytree(small / "model", model)
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-100])
    check_mistake(args(small, "--target", str(model)), "cannot be loaded", capsys)


def test_a_checkpoint_may_be_one_drafter_s_folder(small, tmp_path):
    shutil.copytree(small / "drafters" / "edd", tmp_path / "mine")
    for checkpoint, name in ((tmp_path / "mine", "edd"), (tmp_path, "mine")):
        run = bench.Run(args(small, "--checkpoint", str(checkpoint), "--drafter", name))
        assert type(run.drafters[name]).__module__ == "edd"


def test_raw_confidence(small, tmp_path):
    shutil.copytree(small / "drafters", tmp_path / "c")
    about = json.loads((tmp_path / "c" / "glide" / "training.json").read_text())
    about["validation"] = {"temperature": 0.5}
    (tmp_path / "c" / "glide" / "training.json").write_text(json.dumps(about))
    argv = args(small, "--checkpoint", str(tmp_path / "c"))
    assert bench.Run(argv).drafters["glide"].temperature == 0.5 and bench.Run([*argv, "--raw-confidence"]).drafters["glide"].temperature == 1


def test_a_tokenizer_of_another_vocabulary_is_refused(small, tmp_path, capsys):
    source = (ROOT / "cape.py").read_text()
    shutil.copytree(small / "model", tmp_path / "model")
    tokenizer_of(source, 900).save_pretrained(tmp_path / "model")
    (tmp_path / "p.txt").write_text(source[:100])
    check_mistake(args(small, "--target", str(tmp_path / "model"), "--prompts", str(tmp_path / "p.txt")), "vocabulary is 300", capsys)


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A small random T5 target and two stages of the real class, with a tokenizer, saved as Hugging Face does."""
    from transformers import T5Config, T5ForConditionalGeneration
    folder = tmp_path_factory.mktemp("t5")
    for name, layers, seed in (("target", 3, 0), ("base", 2, 1), ("small", 1, 2)):
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(T5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=48, num_layers=layers, num_decoder_layers=layers,
                                                    num_heads=4, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None))
        for p in model.parameters():
            if p.ndim == 2:
                torch.nn.init.normal_(p, std=0.3)
        save(folder / name, model, tokenizer_of(TEXT, 300))
    return folder


def test_encoder_decoder_targets_take_cascades(t5, small, tmp_path, capsys):
    argv = args(small, "--target", str(t5 / "target"), "--checkpoint", str(t5), "--json", str(tmp_path / "r.jsonl"))
    assert bench.main([*argv, "--limit", "2", "--max-new-tokens", "8", "--drafter", "cascade(base, small, maxgram)", "maxgram", "cascade(base)",
                       "--tree", "chain"]) == 0
    rows = {r["drafter"]: r for r in rows_of(tmp_path / "r.jsonl")}
    assert set(rows) == {"plain", "generate()", "assisted generation (base)", "assisted generation (small)", "maxgram",
                         "cascade(base, small, maxgram)", "cascade(base)"}
    assert all(r["lossless"] for r in rows.values())
    assert bench.main([*argv, "--limit", "1", "--max-new-tokens", "8", "--drafter", "cascade(base)", "--tree", "chain", "drawn", "--temperature", "1"]) == 0
    capsys.readouterr()
    for more in (["--tree", "chain", "--checkpoint", str(small / "drafters")], ["--drafter", "maxgram"],
                 ["--drafter", "maxgram", "--tree", "chain", "pct"]):
        check_mistake(argv + more, "it takes --", capsys)


def test_an_encoder_s_input_takes_no_room_from_the_output(t5, small, tmp_path):
    (tmp_path / "p.txt").write_text("def add(a, b): return " * 80)
    run = bench.Run(args(small, "--target", str(t5 / "target"), "--drafter", "maxgram", "--tree", "chain", "--prompts", str(tmp_path / "p.txt")))
    _, ids, limit = run.prompts[0]
    assert len(ids) > 512 and limit == 12
    assert len(run.decode(run.drafters["maxgram"], bench.cascade.proposal, ids, limit).tokens) == 12


def test_cascades_in_one_run(small, tmp_path, capsys):
    """Rows of every cascade, runs of each stage and SWI from them, beside transformers' assisted generation and prompt lookup."""
    two, three = "cascade(base, k=3, costs=(0.4,))", "cascade(base, small, maxgram, k=(2, 4, 1), lenience=2, costs=(0.5, 0.25))"
    assert bench.main(args(small, "--drafter", two, three, "maxgram", "--tree", "chain", "cape", "pct", "--json", str(tmp_path / "r.jsonl"),
                           "--limit", "2", "--max-new-tokens", "10")) == 0
    rows = rows_of(tmp_path / "r.jsonl")
    assert all(r["lossless"] for r in rows)
    assert {"assisted generation (base)", "assisted generation (small)", "prompt lookup"} <= {r["drafter"] for r in rows}
    found = {(r["drafter"], r["tree"]): r for r in rows if r["stages"]}
    assert len(found) == 9 and {t for _, t in found} == {"chain", "cape", "pct"}
    r = next(r for (d, t), r in found.items() if "lenience" in d and t == "chain")
    assert r["K"] == [[2, 2, 10], [0, 1, 10], [0, 0, 10]] and r["stages"] == ["base", "small", "maxgram"] and len(r["runs"]) == 4
    assert r["runs"][0] == pytest.approx(r["prompts"] + (r["tokens"] - r["prompts"]) / r["tau"]), "a prefill and the rounds of each prompt"
    assert r["swi_given"] == pytest.approx(r["tokens"] / (r["runs"][0] + 0.5 * r["runs"][1] + 0.25 * r["runs"][2]))
    weights = [sum(p.numel() for p in bench.train.load_target(str(folder), "float32", "cpu")[0].parameters())
               for folder in (small / "model", small / "drafters" / "base", small / "drafters" / "small")]
    assert r["swi_ms"] == pytest.approx(r["tokens"] / (r["runs"][0] + weights[1] / weights[0] * r["runs"][1] + weights[2] / weights[0] * r["runs"][2]))
    draft = r["draft_ms"] * (r["runs"][0] - r["prompts"]) / r["target_ms"]
    assert r["swi_measured"] == pytest.approx(r["tokens"] / (r["runs"][0] + draft)), "the stages' own time, in plain steps"
    assert found["maxgram", "chain"]["swi_ms"] == r["tokens"] / found["maxgram", "chain"]["runs"][0]
    assert r["c"] is None and r["expected_speedup"] is None and r["settings"] == {"drawn": False}
    assert r["draft_forwards"] == pytest.approx(sum(r["runs"][1:]) / (r["runs"][0] - r["prompts"]))
    assert "swi_given" in capsys.readouterr().out


def test_a_stage_that_does_not_fit(small, t5, tmp_path, capsys):
    shutil.copytree(small / "drafters" / "base", tmp_path / "other")
    tokenizer_of("another text altogether " * 100, 300).save_pretrained(tmp_path / "other")
    for stage, words in ((tmp_path / "other", "token 257 is 'er' there, 'Ġa' here"), (t5 / "base", "another kind of model"),
                         ("nowhere", "the stage nowhere does not exist")):
        check_mistake(args(small, "--tree", "chain", "--drafter", f"cascade({stage})"), words, capsys)
    assert bench.main(args(small, "--tree", "chain", "--drafter", f"cascade({small / 'other'})", "--limit", "1")) == 0
    assert "will slow it down" in capsys.readouterr().out
    (tmp_path / "bigram.json").write_text(json.dumps([1] * 301))
    check_mistake(args(small, "--drafter", "maxgram", "--bigram", str(tmp_path / "bigram.json")), "vocabulary", capsys)
    check_mistake(args(small, "--drafter", "maxgram", "--bigram", str(tmp_path / "none.json")), "--bigram", capsys)
    foreign = {"bigram": [1] * 300, "confidence": None, "fingerprint": "0" * 16}
    (tmp_path / "bigram.json").write_text(json.dumps(foreign))
    check_mistake(args(small, "--drafter", "maxgram", "--bigram", str(tmp_path / "bigram.json")), "--bigram", capsys)


def test_the_checkpoint_s_bigram_is_read(small, tmp_path):
    shutil.copytree(small / "drafters", tmp_path / "c")
    (tmp_path / "c" / "bigram.json").write_text(json.dumps([7] * 300))
    argv = args(small, "--checkpoint", str(tmp_path / "c"), "--drafter", "maxgram", "cascade(base)", "cascade(base, maxgram)")
    grams = [drafter.gram for drafter in bench.Run(argv).drafters.values()]
    assert grams[1] is None and list(grams[0].bigram) == list(grams[2].bigram) == [7] * 300
    # Another tokenizer's, which nobody asked for, is left out and said so.
    (tmp_path / "c" / "bigram.json").write_text(json.dumps({"bigram": [7] * 300, "confidence": None, "fingerprint": "0" * 16}))
    run = bench.Run(args(small, "--checkpoint", str(tmp_path / "c"), "--drafter", "maxgram"))
    assert not any(run.drafters["maxgram"].gram.bigram or []) and "no bigram" in run.notes[-1]


def test_a_plain_step_is_timed_without_the_prefill(small, tmp_path):
    """One prompt, so that medians are the values: target_ms is (seconds - prefill) / (tokens - 1), and c is drafting over that."""
    assert bench.main(args(small, "--limit", "1", "--tree", "chain", "--json", str(tmp_path / "r.jsonl"))) == 0
    rows = rows_of(tmp_path / "r.jsonl")
    base = next(r for r in rows if r["drafter"].startswith("plain") and abs(r["speedup"] - 1) < 1e-6)
    seconds = base["tokens"] / base["tokens_per_second"]
    step = (seconds - base["time_to_first_token"]) / (base["tokens"] - 1)
    for r in rows:
        assert r["target_ms"] == pytest.approx(1e3 * step, rel=1e-9)
    chain = rows[-1]
    assert chain["c"] == pytest.approx(chain["draft_ms"] / chain["draft_forwards"] / (1e3 * step), rel=1e-9)
