"""The benchmark: its figures by hand and against the paper's table, its clock and prices, and end to end."""
import json
import re
import runpy
import shutil
import sys
from functools import partial
from itertools import permutations
from statistics import median
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, plain, tiny
from test_glide import save as save_drafter

import bench
import cape
import cascade
import edd
import glide
import verify
from runtime import load, measure
from training import state

TEXT = "def add(a, b):\n    return a + b\n\n" * 100

# GLIDE paper, some rows of Table 1: model, drafter, cost %, then (acceptance %, E(Spd.)) on GSM8K, Finance-Alpaca, Spider, Code.
TABLE_1 = """
Vicuna-7B LLAMA-68m      7.7   51.6 1.46   49.7 1.41   19.2 0.89   34.8 1.11
Vicuna-7B GLIDE-47m      6.7   64.8 1.97   63.2 1.90   55.7 1.64   67.0 2.06
Vicuna-13B LLAMA-160m   39.3   56.8 0.75   56.8 0.75   25.4 0.45   38.3 0.54
Vicuna-13B GLIDE-47m     5.5   67.1 2.16   65.0 2.07   57.1 1.77   68.6 2.24
Vicuna-33B GLIDE-71m     6.8   69.3 2.16   64.3 1.94   62.7 1.87   68.9 2.14
Mistral-7B GLIDE-47m     6.6   60.1 1.80   56.4 1.67   59.8 1.79   62.6 1.89
"""

def test_expected_speedup_reproduces_table_1():
    """gamma = 5 (section 5.1).  The table prints two decimals: a cell may be off by 0.01."""
    for line in TABLE_1.strip().splitlines():
        c, *cells = map(float, line.split()[2:])
        for alpha, printed in zip(cells[::2], cells[1::2]):
            found = bench.expected_speedup(alpha / 100, c / 100, 5)
            assert abs(round(found, 2) - printed) <= 0.01 + 1e-9

# ---------------------------------------------------------------- a small target with its drafters
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
    """A tiny random target with random drafters of the real classes, and two stages of a cascade."""
    folder = tmp_path_factory.mktemp("bench")
    tokenizer, sizes = tokenizer_of(TEXT, 300), {"vocab_size": 300, "max_position_embeddings": 64}
    for seed, name in enumerate(("model", "other")):
        save(folder / name, tiny("llama", seed=seed, **sizes).float(), tokenizer)
    for layers, name in ((2, "base"), (1, "small")):
        save(folder / "drafters" / name, tiny("llama", seed=layers, num_hidden_layers=layers, **sizes).float(), tokenizer)
    model, _ = load.load_target(str(folder / "model"), "float32", "cpu")
    of_target = load.fingerprint(model, tokenizer)
    torch.manual_seed(0)
    for name in ("glide", "vanilla"):
        config = glide.Config.for_target(model, 16, 1, name == "glide")
        module = glide.Glide(config, glide.target_angles(model, 64))
        save_drafter(folder / "drafters" / name, module, kind=name, target=of_target)
    save_drafter(folder / "drafters" / "edd", edd.EDD(edd.Config.for_target(model, 2), model), kind="edd", target=of_target)
    (folder / "prompts.jsonl").write_text('{"prompt": "def add("}\n{"prompt": "return a + b"}\n{"question": "1 + 1?", "answer": "2"}\n')
    return folder

def args(small, *more):
    return ["--target", str(small / "model"), "--checkpoint", str(small / "drafters"), "--prompts", str(small / "prompts.jsonl"),
            "--max-new-tokens", "12", "--device", "cpu", *more]

def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]

# ---------------------------------------------------------------- figures by hand
def a_round(accepted, drafted, first=0):
    """A round of a chain: `accepted` of `drafted` tokens."""
    new = list(range(first, first + accepted + 1))
    return verify.Round(new, list(range(accepted + 1)), [0] * (drafted + 1), list(range(-1, drafted)))

def test_counts_of_rounds_by_hand():
    """A rejection, a tree, an output that ended inside a path, a sampled chain."""
    tree = verify.Round([5], [0], [9, 1, 2], [-1, 0, 0])
    assert measure.counts_of([a_round(2, 3), tree]) == {
        "rounds": 2, "new": 4, "nodes": 5, "depth": 4, "accepted": 2, "tested": 4, "trees": 1, "drawn": 0}
    cut = measure.counts_of([verify.Round([5, 6], [0, 1, 2, 3], [0] * 4, [-1, 0, 1, 2])])
    assert cut["accepted"] == cut["tested"] == 2, "the output ended: two of three accepted ones are in it"
    overlaps = [None, torch.tensor([0.6, 0.9]), torch.tensor([0.5])]
    total = measure.counts_of([a_round(0, 2), a_round(1, 1)], overlaps)
    assert total["overlap"] == pytest.approx(0.6 + 0.5) and total["drawn"] == 2, "nothing after a rejection is tested"

def made_up(rounds, seconds, prompt=0, stage_runs=(), **total):
    """A Record of rounds [(accepted, drafted)], its tokens counting up from a hundred times the prompt's number."""
    tokens, made = [100 * prompt], []
    for accepted, drafted in rounds:
        made.append(a_round(accepted, drafted, tokens[-1] + 1))
        tokens += made[-1].new
    record = measure.Record(tokens, made, stage_runs=stage_runs)
    record.seconds = seconds
    record.total.update(prefill=0.25, **total)
    return record

def arm_of(name, *records, **how):
    arm = bench.Arm(name, None, **how)
    arm.results = dict(enumerate(records))
    return arm

def made_up_run(**more):
    a = SimpleNamespace(target="t", device="cpu", seed=0, temperature=0.0, graphs=False)
    run = {"a": a, "cuda": False, "target": None, "model": SimpleNamespace(dtype=torch.float32), "drafters": {},
           "prices": {}, "trees": [], "notes": [], "prompts": [("a", [1], 9), ("b", [1], 9)]}
    return SimpleNamespace(**{**run, **more})

def test_figures_of_a_row_by_hand():
    """Two prompts of 9 and 13 new tokens; a plain step takes 0.1 s.  The drafter takes 0.75 s, 0.15 s of it in begin."""
    base = arm_of("plain", made_up([(0, 0)] * 8, 1.05), made_up([(0, 0)] * 12, 1.45, prompt=1))
    library = arm_of("generate()", made_up([(0, 0)] * 5, 1.2), made_up([(0, 0)] * 5, 0.6, prompt=1))     # it ended sooner
    first = made_up([(2, 3), (0, 3), (1, 1), (1, 3)], 0.525, begin=0.15, draft=0.25, verify=0.5, other=0.25, draft_forwards=10)
    second = made_up([(3, 3), (3, 3), (3, 3)], 0.29, prompt=1, draft=0.5, verify=0.25, other=0.25, draft_forwards=10)
    ours = arm_of("x", first, second, tree="chain(gamma=3)", settings={"gamma": 3})
    row_of = partial(bench.row_of, made_up_run(), ours, base, library, "all", [0, 1])
    row = row_of()
    assert row["tokens"] == 9 + 13 and row["prompts"] == 2 and row["lossless"] is True and row["baseline"] is False
    assert row["tokens_per_second"] == pytest.approx(22 / 0.815)
    assert [row[key] for key in ("speedup_low", "speedup", "speedup_high")] == pytest.approx([2.75, 3.5, 4.25]), "of 2 and 5"
    assert row["speedup_vs_generate"] == pytest.approx(median([9 / 0.525 / (6 / 1.2), 13 / 0.29 / (6 / 0.6)]))
    assert row["time_to_first_token"] == 0.25 and row["target_ms"] == pytest.approx(100)
    assert row["tau"] == pytest.approx(20 / 7), "the prefill's token belongs to no round"
    assert row["nodes"] == row["depth"] == pytest.approx(19 / 7) and row["alpha_depth"] == pytest.approx(20 / 19)
    assert row["alpha"] == pytest.approx(13 / 16), "4 accepted and 3 rejected, and 9 accepted"
    assert row["draft_forwards"] == pytest.approx(20 / 7) and row["c"] == pytest.approx((0.75 - 0.15) / 20 / 0.1)
    assert row["expected_speedup"] == pytest.approx((1 - (13 / 16) ** 4) / (1 - 13 / 16) / (3 * 0.3 + 1))
    assert row["round_ms"] == pytest.approx(2000 / 7) and row["draft_ms"] == pytest.approx(750 / 7)
    assert row["begin_ms"] == pytest.approx(150 / 7)
    assert [row[f"share_{key}"] for key in ("draft", "verify", "other")] == pytest.approx([0.375, 0.375, 0.25])
    assert row["runs"] == [7 + 2] and row["settings"] == {"gamma": 3}
    of_each = {key: [figures[key] for figures in row["by_prompt"]] for key in ("speedup", "tau", "alpha", "nodes")}
    assert of_each == {"speedup": pytest.approx([2, 5]), "tau": [2, 4], "alpha": [4 / 7, 1], "nodes": [10 / 4, 3]}
    for record in ours.results.values():
        record.total.update(accepted=-record.total["accepted"])
    row = row_of()
    assert row["alpha"] == 0 and row["expected_speedup"] == pytest.approx(1 / (3 * 0.3 + 1)), "nothing accepted is a figure, too"
    ours.results[1].total.update(trees=1, nodes=19)
    row = row_of()
    assert row["nodes"] == pytest.approx(38 / 7) and row["alpha_depth"] == pytest.approx(20 / 19), "EDD's: over the maximum depth"
    assert row["alpha"] is row["by_prompt"][1]["alpha"] is row["expected_speedup"] is None, "a tree has no alpha"
    row = bench.row_of(made_up_run(), base, base, library, "all", [0, 1])
    assert row["baseline"] is True and row["tau"] is row["round_ms"] is row["c"] is None and row["runs"] == [20 + 2]

@pytest.mark.parametrize("names, runs, costs", [(["base"], [3], [0.5]), (["base", "maxgram"], [2, 5], [0.5])])
def test_stages_by_hand(names, runs, costs):
    """One model alone (k = 2) has a cost and an expected speedup, a cascade has SWIs."""
    base = arm_of("plain", made_up([(0, 0)] * 6, 0.85))
    record = made_up([(2, 2), (2, 2)], 0.5, stage_runs=runs, draft=0.3, draft_forwards=sum(runs))
    ours = arm_of("x", record, tree="chain")
    drafter = cascade.Cascade.__new__(cascade.Cascade)
    drafter.names, drafter.K, drafter.costs = names, [[2]], costs
    row = bench.row_of(made_up_run(drafters={"x": drafter}), ours, base, base, "all", [0])
    assert row["runs"] == [3, *runs] and row["stages"] == names
    assert row["swi_ms"] == 7 / (3 + 0.5 * runs[0]) and row["swi_measured"] == pytest.approx(7 / (3 + 0.3 / 0.1))
    if len(names) == 1:
        assert row["c"] == pytest.approx(1) and row["alpha"] == 1 and row["expected_speedup"] == pytest.approx(3 / (2 + 1))
    else:
        assert row["c"] is row["expected_speedup"] is None

def test_what_is_printed(capsys, monkeypatch):
    """One table for all prompts, then one for each kind and part of it; averages, what differs, the prices that were used."""
    monkeypatch.setattr(bench, "divergence", lambda target, ids, ours, plain: {"from": plain})
    base, slow = (arm_of(name, *(made_up([(0, 0)] * 4, seconds, prompt=i) for i in range(2)))
                  for name, seconds in (("plain", 0.5), ("generate()", 1.0)))
    slow.results[1].tokens = [7] * 5
    more = {"draft": 0.25, "verify": 0.5, "other": 0.0}
    ours = arm_of("x", made_up([(1, 1), (1, 1)], 0.25, **more), made_up([(1, 1), (1, 1)], 0.125, prompt=1, **more),
                  tree="pct", settings={"cost": 0.0625})
    late = arm_of("x", *(made_up([(1, 1), (1, 1)], 5.0, prompt=i, **more) for i in range(2)), tree="chain")
    price = {"cost": 0.0625, "node_price": 0.01, "start": 0.1, "cost_range": [0.06, 0.07], "node_price_range": [0.01, 0.02]}
    prompts = [("a", [1], 9), ("b/c", [1], 9)]
    rows = bench.tables(made_up_run(prices={"x": price}, prompts=prompts), [base, slow, ours, late], 2)
    assert [row["speedup"] for row in rows if row["group"] == "all"] == [1, 0.5, 3, 0.1]
    assert [row["prompts"] for row in rows if row["tree"] == "pct"] == [2, 1, 1, 1], "all, each kind, and b/c, a part of b"
    assert all(row["prices"] == price for row in rows if row["drafter"] == "x")
    out = capsys.readouterr().out
    assert re.findall(r"^([\w/]+): (\d) prompts$", out, re.MULTILINE) == [("all", "2"), ("a", "1"), ("b", "1"), ("b/c", "1")]
    assert [line.endswith("NO") for line in out.splitlines() if line.startswith("generate()  ")] == [True, False, True, True]
    assert re.search(r"generate\(\): .*first_divergence {'prompt': 1, 'from': \[100, ", out)
    assert re.search("^x x pct: .*cost 0.0625", out, re.MULTILINE) and "s_d / s_t 0.062 [0.060-0.070]" in out

def test_what_counts_as_lossless(monkeypatch):
    """The reference arm is plain decoding.  Under sampling a sampled chain and the library's arms may differ, other arms may not."""
    monkeypatch.setattr(bench, "divergence", lambda target, ids, ours, plain: {"from": plain})
    run = made_up_run()
    base, library = (arm_of(name, made_up([(0, 0)] * 4, 1.0)) for name in ("plain", "generate()"))
    ours = arm_of("x", made_up([(0, 0)] * 4, 1.0), tree="cape")
    drawn = arm_of("x", made_up([(1, 1)], 1.0, drawn=1), tree="drawn")
    right = base.results[0].tokens
    ours.results[0].tokens = [7]
    for temperature, arm, lossless, other in ((0, base, True, None), (0, library, True, None), (0, ours, False, right),
                                              (1, drawn, None, None), (1, library, None, None), (1, ours, False, right)):
        run.a.temperature = temperature
        found = bench.losslessness(run, arm, base, [0])
        assert found == {"lossless": lossless, "first_divergence": other and {"prompt": 0, "from": other}}

def test_arm_order_is_random_in_each_prompt():
    """After a warm-up any order comes up.  With graphs all prompts are decoded once before, whole."""
    run, order = made_up_run(), []
    run.prompts = [("a", [1], 50)] * 40

    def arm(name, tree=None):
        decode = lambda ids, limit, number: order.append((name, limit)) or measure.Record([1])       # noqa: E731
        return bench.Arm(name, decode, tree)

    def turns():
        order.clear()
        assert bench.measure_all(run, [arm("a"), arm("b", "chain"), arm("c", "cape")]) == 40
        return [tuple(order[i:i + 3]) for i in range(0, len(order), 3)]
    first, *others = turns()
    assert first == tuple((name, bench.WARM_UP) for name in "abc") and len(others) == 40
    assert set(others) == {tuple((name, 50) for name in names) for names in permutations("abc")}
    run.a.graphs = True
    assert len(turns()) == 80 and {limit for _, limit in order} == {50}

# ---------------------------------------------------------------- the clock, the prices
def test_the_clock_says_what_time_was_spent_on(monkeypatch):
    """Methods that take so many seconds of a made-up clock."""
    now = [100.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def takes(seconds, name="method"):
        def method():
            now[0] += seconds
        method.__name__ = name
        return method
    clock = measure.Clock()
    target = clock.around(SimpleNamespace(prefill=takes(8), forward=takes(1)))
    drafter = clock.around(SimpleNamespace(begin=takes(2, "begin"), expand=takes(4, "expand"), needs={}))
    assert drafter.needs == {} and not hasattr(drafter, "chain"), "everything else is its own"
    # before the prompt; the first token: still prefill; then two rounds
    first, one = [takes(16), target.prefill, takes(32)], [drafter.begin, drafter.expand, takes(64), drafter.expand, target.forward, takes(128)]
    for call in first + 2 * one:
        call()
    record = measure.Record([1], clock=clock)
    total = {key: record.total[key] for key in ("prefill", "begin", "draft", "verify", "other", "draft_forwards")}
    assert total == {"prefill": 16 + 8 + 32, "begin": 2 * 2, "draft": 2 * 10, "verify": 2, "other": 2 * (64 + 128), "draft_forwards": 4}
    spent = " ".join(what for what, seconds in record.parts if seconds)
    assert spent == "prefill prefill prefill" + 2 * " begin draft other draft verify other"
    assert measure.Record([1], clock=clock, stage_runs=[3, 4]).total["draft_forwards"] == 7, "a cascade counts its own"

def test_prices_are_the_made_up_machines():
    """A drafter's forward takes .2 of a plain step, begin .1, a node .03; prompts that are not in the table are decoded."""
    names = {"x": SimpleNamespace(), "maxgram": SimpleNamespace(chain=0, stages=[]), "models": SimpleNamespace(chain=0, stages=[1])}
    seen = set()

    def decode(drafter, build, ids, limit):
        seen.add((ids[0], limit))
        how = getattr(build, "keywords", {})
        drafts = how.get("depth", 0) if drafter else 0
        nodes = sum(how["width"] ** i for i in range(1, drafts + 1)) if drafter else how.get("nodes", 0)
        record = measure.Record([1])
        record.total.update(rounds=10, nodes=10 * nodes, draft_forwards=10 * drafts, verify=10 * (2 + 0.06 * nodes), other=1.0)
        if drafter:
            record.total.update(begin=10 * 0.2, draft=10 * (0.2 + 0.4 * drafts))
        return record
    run = made_up_run(drafters=names, decode=decode, unmeasured=[("a", [5], 99), ("b", [6], 3)])
    found = measure.prices(run)
    assert seen == {(5, measure.PRICE_TOKENS), (6, 3)} and found["models"] is None
    for name, cost, begin in (("x", 0.2, 0.1), ("maxgram", 0, 0)):
        price = found[name]
        assert (price["cost"], price["node_price"]) == (pytest.approx(cost), pytest.approx(0.03))
        assert price["start"] == pytest.approx(begin, abs=1e-9)

def test_prices_come_from_rows_that_are_not_in_the_table(small, tmp_path, monkeypatch):
    """Given settings are taken, others are measured once for all trees."""
    rows = [{"prompt": f"def {name}("} for name in ("f", "g", "h")]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = args(small, "--prompts", str(tmp_path / "p.jsonl"), "--drafter", "glide", "--tree", "pct", "pct(cost=0.3)", "pct-cost(node_price=0.5)")
    run = bench.Run([*argv, "--limit", "2"])
    pct, given, cost = run.trees
    assert bench.builder(run, "glide", given).keywords == {"cost": 0.3} and not run.prices
    price, calls = {"cost": 0.2, "start": 0.3, "node_price": 0.1}, []
    monkeypatch.setattr(measure, "prices", lambda run: calls.append(run) or {"glide": price})
    assert bench.builder(run, "glide", pct).keywords == {"cost": 0.2}
    assert bench.builder(run, "glide", cost).keywords == {"cost": 0.2, "start": 0.3, "node_price": 0.5} and len(calls) == 1
    assert [run.tokenizer.decode(ids) for _, ids, _ in run.unmeasured] == ["def h("] and not run.notes
    run = bench.Run(argv)
    assert run.unmeasured == run.prompts and "prompts of the table" in run.notes[-1], "no row is left"

def test_the_overlap_of_a_sampled_chain_by_hand():
    """sum_x min(p_target(x), p_draft(x)) for each drafted token, from the distribution that the rule saw."""
    rule = measure.Overlap(0.5, 3, None, 1)
    logits, p_draft = torch.randn(3, 6), torch.randn(2, 6).softmax(-1)
    tree = verify.Tree(torch.tensor([1, 2, 3]), torch.tensor([-1, 0, 1]), p_draft)
    rule.choose(tree._replace(p_draft=None), logits, 5)
    rule.choose(tree, logits, 5)
    assert rule.overlaps[0] is None and len(rule.overlaps) == 2
    kept = logits.where(logits >= logits.topk(3).values[:, -1:], torch.tensor(-torch.inf))
    p_target = (kept / 0.5).softmax(-1)
    torch.testing.assert_close(rule.overlaps[1], torch.minimum(p_target[:2], p_draft).sum(1))

# ---------------------------------------------------------------- what the loop and the library are asked for
def test_flags_of_sampling_reach_the_decoding(small):
    """The same tokens as the loop gives with these settings, and others without one of them; end-of-text ends the output.

    The noise is another one for each prompt, and the same for all arms."""
    how = dict(temperature=1.3, top_k=30, top_p=0.9, seed=bench.prompt_seed(7, 1))
    run = bench.Run(args(small, *"--drafter maxgram --temperature 1.3 --top-k 30 --top-p 0.9 --seed 7".split()))
    _, ids, limit = run.prompts[0]
    wanted = run.decode(None, verify.root_only, ids, limit, 1).tokens
    for changed in ({}, {"seed": 7}, {"seed": bench.prompt_seed(7, 0)}, {"top_k": None}, {"top_p": None}, {"temperature": 0.1}):
        tokens = verify.generate(run.target, None, verify.root_only, ids, limit, verify.Sampled(**{**how, **changed})).tokens
        assert (tokens == wanted) == (not changed), changed
    assert run.decode(run.drafters["maxgram"], cape.cape, ids, limit, 1).tokens == wanted
    assert run.decode(None, verify.root_only, ids, limit, 0).tokens != wanted
    run = bench.Run(args(small, "--drafter", "maxgram"))
    whole = run.decode(None, verify.root_only, ids, limit).tokens
    assert whole == plain(run.model, ids, limit) == bench.library(run, ids, limit, 0).tokens
    run.eos = whole[2]
    assert run.decode(None, verify.root_only, ids, limit).tokens == whole[:whole.index(whole[2]) + 1]

@pytest.mark.parametrize("temperature, top_k", [(0.7, 9), (0, 0)])
def test_what_transformers_is_asked_for(small, monkeypatch, temperature, top_k):
    """The same settings, among all tokens without --top-k; assisted generation with the stage; prompt lookup with ten tokens."""
    among = ["--top-k", str(top_k)] if top_k else []
    run = bench.Run(args(small, "--drafter", "cascade(base, maxgram)", "--tree", "chain", *f"--temperature {temperature} --top-p 0.8".split(), *among))
    _, ids, limit = run.prompts[0]
    asked = []
    monkeypatch.setattr(run.model, "generate", lambda given, **how: asked.append(how) or torch.cat((given, given[:, :2]), 1))
    arms = {arm.name: arm for arm in bench.arms_of(run)}
    for name, own in (("generate()", {}), ("assisted generation (base)", {"assistant_model": run.stages["base"]}),
                      ("prompt lookup", {"prompt_lookup_num_tokens": 10})):
        assert arms[name].decode(ids, limit, 0).tokens == ids[:2]
        how = asked.pop()
        assert how.pop("attention_mask").tolist() == [[1] * len(ids)]
        assert how == {"max_new_tokens": limit, "do_sample": temperature > 0, "temperature": temperature or 1.0, "top_k": top_k, "top_p": 0.8, **own}

def test_generate_decodes_by_the_rule_of_all_arms(small, tmp_path):
    """Whatever the folder says: a repetition penalty, beams, stop strings."""
    config = transformers.GenerationConfig(repetition_penalty=1.8, num_beams=3, stop_strings=["a"], min_new_tokens=3, eos_token_id=299)
    shutil.copytree(small / "model", tmp_path / "model")
    config.save_pretrained(tmp_path / "model")
    run = bench.Run(args(small, "--target", str(tmp_path / "model"), "--tree", "chain", "--drafter", "maxgram"))
    _, ids, limit = run.prompts[0]
    expected, *found = [arm.decode(ids, limit, 0).tokens for arm in bench.arms_of(run)]
    assert found == [expected] * 3 and run.eos == 299

# ---------------------------------------------------------------- end to end
TREES = ["chain", "cape(gamma=3)", "fixed(size=2)", "beam", "pct", "pct(width=1, cost=0.01)", "pct-cost", "own-confidence(own=0.2)", "vct", "eagle2"]

def test_the_whole_grid(small, tmp_path, monkeypatch):
    price = {"cost": 0.125, "node_price": 0.01, "start": 0.0}
    monkeypatch.setattr(measure, "prices", lambda run: {"glide": {**price, "cost_range": [0, 1], "node_price_range": [0, 1]}})
    assert bench.main(args(small, "--drafter", "glide", "--tree", *TREES, "--json", str(tmp_path / "r.jsonl"), "--limit", "1",
                           "--max-new-tokens", "5")) == 0
    rows = rows_of(tmp_path / "r.jsonl")
    assert [(r["drafter"], r["tree"]) for r in rows] == [("plain", None), ("generate()", None), *(("glide", tree) for tree in TREES)]
    for r in rows:
        assert r["lossless"] is True and r["tokens"] == 5 and r["prompts"] == 1 and r["speedup_low"] <= r["speedup"] <= r["speedup_high"]
    for r in rows[2:]:
        assert r["draft_forwards"] > 0 and r["c"] > 0 and 1 <= r["tau"] <= r["depth"] + 1
        if r["nodes"] >= 2 and "width=1" not in r["tree"]:
            assert (r["alpha"] is not None) == r["tree"].startswith("chain")
    found = {r["tree"]: r["settings"] for r in rows[2:]}
    assert found["pct(width=1, cost=0.01)"].items() >= {"width": 1, "cost": 0.01}.items() and found["chain"] == {"gamma": 5}
    assert found["pct"]["cost"] == found["pct-cost"]["cost"] == 0.125

def test_an_interruption_reports_what_was_measured(small, tmp_path, monkeypatch, capsys):
    generate, calls, path = verify.generate, [], tmp_path / "r.jsonl"

    def interrupting(*given, **how):
        calls.append(1)
        if len(calls) == 5:                # two arms of ours: warm-up, one prompt, and then
            raise KeyboardInterrupt
        return generate(*given, **how)
    monkeypatch.setattr(verify, "generate", interrupting)
    flags = f"--drafter maxgram --tree chain --json {path} --max-new-tokens 4".split()
    assert bench.main(args(small, *flags)) == 130
    assert {r["prompts"] for r in rows_of(path)} == {1} and "1 of 3 prompts" in capsys.readouterr().err

def test_divergence_is_reported_with_its_gap(small):
    """A wrong output on purpose: the first wrong token is named, and the gap is that of the model's own logits."""
    run = bench.Run(args(small, "--drafter", "maxgram"))
    ids = run.prompts[1][1]
    right = plain(run.model, ids, 6)
    for at in (4, 0):
        wrong = right[:at] + [(right[at] + 1) % 300] + right[at + 1:]
        with torch.no_grad():
            logits = run.model(torch.tensor([ids + right[:at]])).logits[0, -1]
        gap = pytest.approx((logits[right[at]] - logits[wrong[at]]).item(), abs=1e-4)
        assert bench.divergence(run.target, ids, wrong, right) == {"token": at, "logit_gap": gap}
    assert bench.divergence(run.target, ids, right[:4], right) == {"token": 4, "logit_gap": None}, "one is the other's beginning"

def test_stand_in_end_to_end_as_a_script(tmp_path, monkeypatch, capsys):
    """The README's main command, small, from another folder: the shipped weights, token for token; and what --show prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench.py"), *"--drafter glide --tree cape --limit 1 --device cpu".split(),
                                      *"--max-new-tokens 8 --threads 1 --show --json r.jsonl".split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    done = capsys.readouterr()
    assert ended.value.code == 0 and "all: 1 prompts" in done.out, done.err
    rows = rows_of(tmp_path / "r.jsonl")
    ours = next(r for r in rows if r["drafter"] == "glide")
    assert ours["lossless"] is True and ours["tau"] > 1.2 and {r["group"] for r in rows} <= {"all", "story"}
    shown, tau = re.search(r"\n--- glide x cape, prompt 1 of story: \[accepted\]bonus\n(.*)\n--- tau ([\d.]+)\n", done.out, re.DOTALL).groups()
    assert "[" in shown and float(tau) == round(ours["by_prompt"][0]["tau"], 2)

# ---------------------------------------------------------------- an encoder-decoder target and its cascade
@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A small random T5 target and a stage of the real class, with a tokenizer, saved as Hugging Face does."""
    folder = tmp_path_factory.mktemp("t5")
    for name, layers, seed in (("target", 3, 0), ("base", 2, 1)):
        torch.manual_seed(seed)
        config = transformers.T5Config(vocab_size=300, d_model=16, d_kv=4, d_ff=32, num_layers=layers, num_decoder_layers=layers, num_heads=4,
                                       pad_token_id=0, eos_token_id=None, decoder_start_token_id=0, tie_word_embeddings=False)
        save(folder / name, transformers.T5ForConditionalGeneration(config).eval(), tokenizer_of(TEXT, 300))
    return folder

def test_encoder_decoder_targets_take_cascades(t5, small, tmp_path):
    """An encoder's input takes no room from the output; a prefill and the rounds are all runs of the target."""
    (tmp_path / "p.txt").write_text("def add(a, b): return " * 80)
    argv = args(small, "--target", str(t5 / "target"), "--checkpoint", str(t5), "--json", str(tmp_path / "r.jsonl"), "--max-new-tokens", "5")
    assert bench.main([*argv, "--prompts", str(tmp_path / "p.txt"), "--drafter", "cascade(base, maxgram)", "--tree", "chain"]) == 0
    rows = rows_of(tmp_path / "r.jsonl")
    assert [r["drafter"] for r in rows] == ["plain", "generate()", "assisted generation (base)", "prompt lookup", "cascade(base, maxgram)"]
    assert all(r["lossless"] and r["tokens"] == 5 and r["prompt_tokens"] > 512 for r in rows)
    r = rows[4]
    target, *stages = r["runs"]
    rounds = target - r["prompts"]
    assert rounds == pytest.approx((r["tokens"] - r["prompts"]) / r["tau"]) and r["draft_forwards"] == pytest.approx(sum(stages) / rounds)
    for more in (["--tree", "chain", "--checkpoint", str(small / "drafters")], ["--drafter", "maxgram", "--tree", "chain", "pct"]):
        with pytest.raises(verify.UserError, match="it takes --"):
            bench.Run(argv + more)

@pytest.mark.parametrize("why", [RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("memory")])
def test_a_defect_keeps_its_traceback(why, capsys):
    """Memory that does not suffice is a sentence; a fault of CUDA's is no user's mistake."""
    def work(argv):
        raise why
    for program in (partial(bench.main, [], work), partial(state.status_of, work, [])):
        with pytest.raises(type(why), match="memory"):
            program()

    def full(argv):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert bench.main([], full) == state.status_of(full, []) == 2
    assert capsys.readouterr().err.count("CUDA out of memory") == 2
