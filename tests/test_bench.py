"""The benchmark end to end, its formula against the paper's table, its mistakes, and the demos of files copied out alone."""
import contextlib
import gzip
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, plain, tiny

import bench
import train

DATA = ROOT.parent / "shared" / "data"

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


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny random target with both drafters, trained for a few steps on a made-up text."""
    folder = tmp_path_factory.mktemp("bench")
    text = "def add(a, b):\n    return a + b\n\n" * 100
    tokenizer = train.train_tokenizer([text], 300)
    for name, seed in (("model", 0), ("other", 1)):
        tiny("llama", vocab_size=300, max_position_embeddings=64, seed=seed).float().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "text.txt").write_text(text)
    assert train.main(["glide", "vanilla", "edd", "base", "small", "--layers", "1", "--hidden", "2", "--target", str(folder / "model"),
                       "--data", str(folder / "text.txt"), "--out", str(folder / "drafters"),
                       "--work", str(folder / "work"), "--device", "cpu", "--steps", "3", "--batch", "2", "--length", "24", "--width", "16"]) == 0
    (folder / "prompts.jsonl").write_text('{"prompt": "def add("}\n{"prompt": "return a + b"}\n{"question": "1 + 1?", "answer": "2"}\n')
    return folder


def args(small, *more):
    return ["--target", str(small / "model"), "--checkpoint", str(small / "drafters"), "--prompts", str(small / "prompts.jsonl"),
            "--max-new-tokens", "12", "--device", "cpu", *more]


FIELDS = """target drafter tree dtype device threads batch seed gamma depth tree_optimality temperature prompts tokens tokens_per_second speedup speedup_low
speedup_high speedup_vs_generate tau alpha alpha_depth nodes draft_forwards c expected_speedup draft_ms verify_ms target_ms share_draft
share_verify share_other time_to_first_token peak_memory lossless first_divergence distinct_4grams versions""".split()


def test_the_whole_grid(small, tmp_path, capsys):
    trees = ["chain", "cape", "fixed", "beam", "beam8", "pct", "pct-cost", "pct-own", "pct-leaves", "vct", "eagle2"]
    assert bench.main(args(small, "--drafter", "vanilla", "glide", "edd", "--tree", *trees, "--json", str(tmp_path / "r.jsonl"), "--show")) == 0
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [(r["drafter"], r["tree"]) for r in rows] == [("plain", None), ("plain, two queries", None), ("generate()", None)] + [
        (d, t) for d in ("vanilla", "glide", "edd") for t in trees]
    for r in rows:
        assert set(FIELDS) <= set(r) and r["lossless"] is True and r["first_divergence"] is None
        assert r["tokens"] == 3 * 12 and r["prompts"] == 3 and r["speedup_low"] <= r["speedup"] <= r["speedup_high"]
        if r["tree"]:
            assert abs(sum(r[f"share_{k}"] for k in ("draft", "verify", "other")) - 1) < 1e-9
            assert (r["alpha"] is not None) == (r["tree"] == "chain") and 1 <= r["tau"] <= r["depth"] + 1
            assert r["alpha_depth"] == (r["tau"] / r["depth"] if r["depth"] else None)
            assert r["nodes"] or r["tree"].startswith("pct"), "PCT may find nothing worth verifying"
            if r["nodes"]:
                assert 0 < r["tree_optimality"] <= 1 + 1e-9 and 0 < r["depth"] <= (10 if r["tree"].startswith("pct") else 6 if r["tree"] == "eagle2" else 5)
        if r["tree"] == "chain":
            assert r["expected_speedup"] == bench.expected_speedup(r["alpha"], r["c"], 5)
    assert any(r["speedup"] == 1 and r["drafter"].startswith("plain") for r in rows), "the baseline is one of the plain arms"
    out = capsys.readouterr().out
    assert "glide x cape" in out and "[accepted]bonus" in out


def test_reliability_against_a_count_by_hand():
    judged = [(0.05, False), (0.1, True), (0.10001, True), (0.95, True), (1.0, True), (0.99, False), (0.0, False)]
    rows, error = bench.reliability(judged)
    assert [r["count"] for r in rows] == [3, 1, 0, 0, 0, 0, 0, 0, 0, 3], "bins are closed on the right"
    assert rows[0]["acceptance"] == 1 / 3 and rows[9]["confidence"] == pytest.approx(0.98) and rows[4]["acceptance"] is None
    assert error == pytest.approx((3 * abs(1 / 3 - 0.05) + 1 * (1 - 0.10001) + 3 * abs(2 / 3 - 0.98)) / 7)
    assert bench.reliability([])[1] == 0
    plot = bench.reliability_plot("edd", rows, error).splitlines()
    assert len(plot) == 12 and plot[-1].count("#") == round(40 * 2 / 3) and plot[-1].index("|") > plot[-1].rindex("#")


def test_calibration_judges_up_to_the_first_rejection(small, tmp_path, monkeypatch, capsys):
    """The pairs it counts, against chains drafted by hand over the plain output."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = AutoModelForCausalLM.from_pretrained(small / "model"), AutoTokenizer.from_pretrained(small / "model")
    target, drafter = bench.verify.Target(model), bench.kind_of("edd").load(small / "drafters" / "edd", model)[0]
    ids = tokenizer("def add(")["input_ids"]
    a = bench.parser().parse_args([])
    found = bench.calibration(target, drafter, [("x", ids, 12)], a, [])
    text, at, expected = ids + plain(model, ids, 12), len(ids), []
    with torch.inference_mode():
        while at < len(text) - 1:
            path, judged = text[:at + 1], 0
            for i in range(min(10, len(text) - 2 - at)):              # the last token cannot be a drafted one: a bonus follows
                target.watch(drafter.needs)
                drafter.reset()
                target.sync(text[:at])
                drafter.begin(target.view())
                row = drafter.expand(torch.tensor(path[at:]), list(range(-1, len(path) - at - 1)))[-1]
                row = row ** (1 / drafter.temperature) / (row ** (1 / drafter.temperature)).sum()
                path.append(row.argmax().item())
                expected.append((row.max().item(), path[-1] == text[at + 1 + i]))
                if not expected[-1][1]:
                    break
                judged += 1
            at += judged + 1
    assert [ok for _, ok in found] == [ok for _, ok in expected]
    assert [p for p, _ in found] == pytest.approx([p for p, _ in expected], abs=1e-5)
    assert bench.main(args(small, "--drafter", "edd", "glide", "--calibration", "--json", str(tmp_path / "c.jsonl"))) == 0
    rows = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert [r["drafter"] for r in rows] == ["edd", "glide"] and all(len(r["bins"]) == 10 and 0 <= r["ece"] <= 1 for r in rows)
    assert "edd: expected calibration error" in capsys.readouterr().out


def test_tree_optimality_against_all_subtrees(small):
    """A hand-made drafter over four tokens: the best n nodes under what was asked, by trying every set of that size."""
    from itertools import combinations
    table = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.6, 0.2, 0.1, 0.1], [0.25, 0.25, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64)
    shown = {}

    class Drafter:
        needs = {}

        def expand(self, tokens, parents):
            return table[tokens]

        def reset(self):
            pass
        begin = keep = lambda self, x: None

    class OneRound:                                        # the loop, cut down to one tree
        def generate(target, drafter, build, ids, limit, **more):
            shown["tree"] = build(drafter.expand, torch.tensor([0]))
    a = bench.parser().parse_args([])
    for build in (bench.partial(bench.cape.cape, gamma=2, sizes=(1,), edges=()), bench.partial(bench.cape.chain, gamma=3),
                  bench.partial(bench.pct.pct, cost=0.2, leaf=0.04, width=3, depth=3), bench.partial(bench.pct.vct, width=2, depth=2)):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(bench.verify, "generate", OneRound.generate)
            found = bench.optimality(None, Drafter(), build, [("x", [0], 8)], a, [])
        tree, asked = shown["tree"], []
        build(lambda tokens, parents, asked=asked: asked.extend(zip(tokens.tolist(), parents)) or table[tokens], torch.tensor([0]))
        joint = []
        for token, parent in asked:
            joint.append(joint[parent] * table[asked[parent][0], token].item() if parent >= 0 else 1.0)
        candidates = [joint[i] * table[token, x].item() for i, (token, _) in enumerate(asked) for x in range(4)]
        n = len(tree.tokens) - 1
        best = max(sum(c) for c in combinations(candidates, n)) if len(candidates) <= 16 else sum(sorted(candidates)[-n:])
        above, kept = [1.0], 0.0
        for token, parent in list(zip(tree.tokens.tolist(), tree.parents.tolist()))[1:]:
            above.append(above[parent] * table[tree.tokens[parent], token].item())
            kept += above[-1]
        assert found == pytest.approx(kept / best)


def test_sampling_runs_and_says_what_it_can_say(small, tmp_path):
    assert bench.main(args(small, "--tree", "cape", "drawn", "--temperature", "0.8", "--top-k", "20", "--json", str(tmp_path / "r.jsonl"))) == 0
    rows = {(r["drafter"], r["tree"]): r for r in map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())}
    assert rows["glide", "cape"]["lossless"] is True, "keyed noise: plain sampling's tokens"
    assert rows["glide", "drawn"]["lossless"] is None and 0 < rows["glide", "drawn"]["alpha_overlap"] <= 1


def test_plain_arm_is_the_models_own_greedy_output(small):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = AutoModelForCausalLM.from_pretrained(small / "model"), AutoTokenizer.from_pretrained(small / "model")
    ids = tokenizer("def add(")["input_ids"]
    target = bench.verify.Target(model)
    assert bench.verify.generate(target, None, bench.verify.no_draft, ids, 10).tokens == plain(model, ids, 10)


def test_an_interruption_reports_what_was_measured(small, tmp_path, monkeypatch, capsys):
    generate, calls = bench.verify.generate, []

    def interrupting(*args, **how):
        calls.append(1)
        if len(calls) == 10:               # three arms of ours: warm-up, two prompts, and then
            raise KeyboardInterrupt
        return generate(*args, **how)
    monkeypatch.setattr(bench.verify, "generate", interrupting)
    assert bench.main(args(small, "--json", str(tmp_path / "r.jsonl"))) == 130
    assert {json.loads(line)["prompts"] for line in (tmp_path / "r.jsonl").read_text().splitlines()} == {2}
    assert "2 of 3 prompts" in capsys.readouterr().err


def test_divergence_is_reported_with_its_gap(small):
    """A wrong output on purpose: the first wrong token is named, and the gap is that of the model's own logits."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(small / "model")
    ids, target = [5, 6, 7], bench.verify.Target(model)
    right = plain(model, ids, 6)
    wrong = right[:4] + [(right[4] + 1) % 300] + right[5:]
    found = bench.divergence(target, ids, wrong, right, 2)
    with torch.no_grad():
        logits = model(torch.tensor([ids + right[:4]])).logits[0, -1]
    assert found["prompt"] == 2 and found["token"] == 4
    assert abs(found["logit_gap"] - (logits[right[4]] - logits[wrong[4]]).item()) < 1e-4


def test_stand_in_end_to_end_in_a_real_process(tmp_path):
    """The README's main command, small: the shipped weights, the real prompts, token for token."""
    done = subprocess.run([sys.executable, str(ROOT / "bench.py"), "--drafter", "glide", "--tree", "cape", "--limit", "2", "--max-new-tokens", "16",
                           "--device", "cpu", "--threads", "1", "--json", str(tmp_path / "r.jsonl")], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    ours = next(r for r in rows if r["drafter"] == "glide")
    assert ours["lossless"] is True and ours["tau"] > 1.5 and {r["group"] for r in rows} == {"all", "code", "math"}


# ---------------------------------------------------------------- prompts
def test_prompt_files_are_told_apart_by_their_fields(tmp_path):
    cases = {"mt.jsonl": ('{"turns": ["first", "second"]}', [{"role": "user", "content": "first"}]),
             "gsm.jsonl": ('{"question": "q?", "answer": "a"}', "Question: q?\nAnswer:"),
             "share.json": ('[{"conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "hello"}]}]',
                            [{"role": "user", "content": "hello"}]),
             "p.jsonl": ('{"prompt": "def f("}', "def f("), "plain.txt": ("Once upon\n", "Once upon\n")}
    for name, (text, expected) in cases.items():
        (tmp_path / name).write_text(text)
        assert [p for _, p in bench.read_prompts(tmp_path / name)] == [expected], name
    (tmp_path / "he.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "def g("}\n{"prompt": "def h("}\n'))
    assert [p for _, p in bench.read_prompts(tmp_path / "he.jsonl.gz")] == ["def g(", "def h("]


@pytest.mark.skipif(not DATA.exists(), reason="the public prompt files (../shared/data) are not here")
def test_public_prompt_files():
    for name, count, start in (("mt_bench.jsonl", 80, None), ("gsm8k_test.jsonl", 1319, "Question: Janet"), ("HumanEval.jsonl.gz", 164, "from typing")):
        prompts = [p for _, p in bench.read_prompts(DATA / name)]
        assert len(prompts) == count and all(prompts) and (start is None or prompts[0].startswith(start))


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize("more, words", [
    (["--drafter", "bush"], "no drafter 'bush'"), (["--tree", "bush"], "no tree 'bush'"), (["--gamma", "0"], "--gamma is 0"),
    (["--gamma", "33"], "exceeds the 32 nodes"), (["--max-new-tokens", "0"], "--max-new-tokens is 0"), (["--temperature", "-1"], "--temperature is -1"),
    (["--cost", "0"], "--cost is 0"), (["--sizes", "3", "1"], "one more size than edges"),
    (["--edges", "0.6", "0.3", "0.8"], "ascending edges"), (["--gamma", "100", "--tree", "beam8"], "more than the 511 nodes"),
    (["--temperature", "nan"], "--temperature is nan"), (["--top-p", "0"], "--top-p is 0"), (["--tree", "drawn"], "give --temperature above 0"),
    (["--target", "/no/such/model"], "does not exist"), (["--checkpoint", "/no/such"], "no drafter in"), (["--prompts", "/no/such"], "does not exist"),
    (["--limit", "x"], "invalid int value"), (["--dtype", "int8"], "invalid choice"),
    (["--device", "cuda"], "no CUDA device"), (["--nonsense"], "unrecognized arguments"),
    (["--drafter", "cascade"], "go together"), (["--models", "base"], "go together"), (["--drafter", "cascade", "--models", "maxgram", "base"], "maxgram last"),
    (["--drafter", "cascade", "--models", "base", "base"], "every stage once"),
    (["--drafter", "cascade", "--models", "base", "--k", "1", "2"], "take 1 number"),
    (["--drafter", "cascade", "--models", "base", "small", "--k", "5", "4", "1"], "never falls"), (["--lenience", "0.9"], "--lenience is 0.9"),
    (["--drafter", "cascade", "--models", "base", "--k", "3", "--k", "4"], "given 2 time(s)"), (["--leaf", "-1"], "--leaf is -1"),
    (["--drafter", "cascade", "--models", "base", "small", "--costs", "0.1"], "one for each"),
    (["--drafter", "cascade", "--models", "base", "--lenience", "2", "--tree", "drawn", "--temperature", "1"], "no true distribution"),
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
                        ('{"sentence": 1}', "has none of the fields"), ('{"prompt": ', "cannot be read")):
        (tmp_path / "p.jsonl").write_text(text)
        check_mistake(args(small, "--prompts", str(tmp_path / "p.jsonl")), words, capsys)


def test_damaged_and_foreign_drafters(small, tmp_path, capsys):
    def copied(name):
        shutil.copytree(small / "drafters", tmp_path / name)
        return tmp_path / name
    weights = copied("cut") / "glide" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    check_mistake(args(small, "--checkpoint", str(tmp_path / "cut")), "is damaged", capsys)
    (copied("gone") / "glide" / "model.safetensors").unlink()
    check_mistake(args(small, "--checkpoint", str(tmp_path / "gone")), "model.safetensors is missing", capsys)
    (copied("json") / "glide" / "training.json").write_text("{")
    check_mistake(args(small, "--checkpoint", str(tmp_path / "json")), "is damaged", capsys)
    check_mistake(args(small, "--target", str(small / "other")), "was made for another target", capsys)
    check_mistake(args(small, "--checkpoint", str(small / "drafters" / "vanilla")), "of kind vanilla, not glide", capsys)
    model = tmp_path / "model"
    shutil.copytree(small / "model", model)
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-100])
    check_mistake(args(small, "--target", str(model)), "cannot be loaded", capsys)


def test_a_tokenizer_of_another_vocabulary_is_refused(small, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(small / "model", model)
    source = Path(train.__file__).read_text()
    train.train_tokenizer([source], 900).save_pretrained(model)
    (tmp_path / "p.txt").write_text(source)
    check_mistake(args(small, "--target", str(model), "--prompts", str(tmp_path / "p.txt")), "vocabulary is 300", capsys)


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A small random T5 target and two stages of the real class, with a tokenizer, saved as Hugging Face does."""
    from transformers import T5Config, T5ForConditionalGeneration
    folder = tmp_path_factory.mktemp("t5")
    tokenizer = train.train_tokenizer(["def add(a, b):\n    return a + b\n\n" * 100], 300)
    for name, layers, seed in (("target", 3, 0), ("base", 2, 1), ("small", 1, 2)):
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(T5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=48, num_layers=layers, num_decoder_layers=layers, num_heads=4,
                                                    decoder_start_token_id=0, pad_token_id=0, eos_token_id=None))
        for p in model.parameters():
            if p.ndim == 2:
                torch.nn.init.normal_(p, std=0.3)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def test_encoder_decoder_targets_take_cascades(t5, small, tmp_path, capsys):
    argv = args(small, "--target", str(t5 / "target"), "--checkpoint", str(t5), "--json", str(tmp_path / "r.jsonl"))
    assert bench.main([*argv, "--drafter", "cascade", "maxgram", "--tree", "chain", "--models", "base", "small", "maxgram", "--models", "base"]) == 0
    rows = {r["drafter"]: r for r in map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())}
    assert set(rows) == {"plain", "generate()", "assisted generation (base)", "assisted generation (small)", "maxgram", "cascade (base, small, maxgram)",
                         "cascade (base)"}
    assert all(r["lossless"] for r in rows.values())
    assert bench.main([*argv, "--drafter", "cascade", "--tree", "chain", "drawn", "--models", "base", "--temperature", "1"]) == 0
    capsys.readouterr()
    for more in (["--tree", "chain"], ["--drafter", "maxgram"], ["--drafter", "maxgram", "--tree", "chain", "pct"]):
        check_mistake(argv + more, "is an encoder-decoder model: it takes", capsys)
    assert train.main(["glide", "--target", str(t5 / "target"), "--data", str(small / "text.txt"), "--device", "cpu"]) == 2
    assert "encoder-decoder" in capsys.readouterr().err


def test_cascades_in_one_run(small, tmp_path, capsys):
    """Rows of every --models, runs of each stage and SWI from them, beside transformers' assisted generation and prompt lookup."""
    assert bench.main(args(small, "--drafter", "cascade", "maxgram", "--tree", "chain", "cape", "pct", "--models", "base",
                           "--models", "base", "small", "maxgram", "--k", "3", "--k", "2", "4", "1", "--lenience", "2",
                           "--costs", "0.5", "0.25", "--json", str(tmp_path / "r.jsonl"))) == 0
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert all(r["lossless"] for r in rows)
    assert {"assisted generation (base)", "assisted generation (small)", "prompt lookup"} <= {r["drafter"] for r in rows}
    found = {(r["drafter"], r["tree"]): r for r in rows if r["stages"]}
    assert {d for d, _ in found} == {"maxgram", "cascade (base) k 3", "cascade (base, small, maxgram) k 2 4 1"}
    assert {t for _, t in found} == {"chain", "cape", "pct"}
    r = found["cascade (base, small, maxgram) k 2 4 1", "chain"]
    assert r["K"] == [[2, 2, 10], [0, 1, 10], [0, 0, 10]] and r["stages"] == ["base", "small", "maxgram"] and len(r["runs"]) == 4
    assert r["runs"][0] == pytest.approx(r["prompts"] + (r["tokens"] - r["prompts"]) / r["tau"]), "a prefill and the rounds of each prompt"
    assert r["swi_given"] == pytest.approx(r["tokens"] / (r["runs"][0] + 0.5 * r["runs"][1] + 0.25 * r["runs"][2]))
    weights = [sum(p.numel() for p in bench.load_target(str(folder), "float32", "cpu")[0].parameters())
               for folder in (small / "model", small / "drafters" / "base", small / "drafters" / "small")]
    assert r["swi_ms"] == pytest.approx(r["tokens"] / (r["runs"][0] + weights[1] / weights[0] * r["runs"][1] + weights[2] / weights[0] * r["runs"][2]))
    assert found["maxgram", "chain"]["swi_ms"] == r["tokens"] / found["maxgram", "chain"]["runs"][0]
    assert "SWI" in capsys.readouterr().out


def test_position_acceptance_against_a_count_by_hand(small, tmp_path, capsys, monkeypatch):
    """The played rounds are made up: which positions were drafted, judged, accepted."""
    rounds = [([5, 6, 7], [5, 6, 9]), ([5, 6, 7], [4]), ([5, 6, 7], [5, 6, 7, 8]), ([5, 6, 7], [5, 6])]
    monkeypatch.setattr(bench, "played", lambda *_: ((bench.verify.Tree(torch.tensor([0] + d), None), o) for d, o in rounds))
    # position 3 of the last round was never judged: the output ended before it
    assert bench.position_acceptance(*[None] * 6) == [[4, 3], [4, 3], [3, 1]]
    monkeypatch.undo()
    assert bench.main(args(small, "--drafter", "cascade", "glide", "--tree", "chain", "--models", "base", "--k", "4", "--position-acceptance", "--json",
                           str(tmp_path / "p.jsonl"))) == 0
    rows = {r["drafter"]: r["positions"] for r in map(json.loads, (tmp_path / "p.jsonl").read_text().splitlines())}
    assert len(rows["cascade (base)"]) == 4 and len(rows["glide"]) >= 8
    for positions in rows.values():
        share = [p["accepted"] / p["drafted"] for p in positions]
        assert all(p["accepted"] <= p["drafted"] for p in positions) and share[0] <= 1


def test_a_stage_that_does_not_fit(small, t5, tmp_path, capsys):
    cascade = ["--drafter", "cascade", "--tree", "chain"]
    shutil.copytree(small / "drafters" / "base", tmp_path / "other")
    train.train_tokenizer(["another text altogether " * 100], 300).save_pretrained(tmp_path / "other")
    check_mistake(args(small, *cascade, "--models", str(tmp_path / "other")), "another vocabulary", capsys)
    check_mistake(args(small, *cascade, "--models", str(t5 / "base")), "another kind of model", capsys)
    check_mistake(args(small, *cascade, "--models", "nowhere"), "the stage nowhere does not exist", capsys)
    assert bench.main(args(small, *cascade, "--models", str(small / "other"), "--limit", "1")) == 0
    assert "will slow it down" in capsys.readouterr().err
    (tmp_path / "bigram.json").write_text(json.dumps([1] * 301))
    check_mistake(args(small, "--drafter", "maxgram", "--bigram", str(tmp_path / "bigram.json")), "vocabulary", capsys)
    check_mistake(args(small, "--drafter", "maxgram", "--bigram", str(tmp_path / "none.json")), "--bigram", capsys)


# ---------------------------------------------------------------- copied out
@pytest.mark.parametrize("name", ["cape", "edd", "glide", "maxgram", "pct", "verify"])
def test_each_component_alone_in_an_empty_folder_runs_its_demo(name, tmp_path, monkeypatch, capsys):
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    local = {p.stem for p in ROOT.glob("*.py")}
    monkeypatch.setattr(sys, "path", [p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "tests")])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    for module in local & set(sys.modules):
        monkeypatch.delitem(sys.modules, module)
    default = torch.get_default_dtype()
    try:
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(tmp_path / f"{name}.py"), run_name="__main__")
    finally:
        torch.set_default_dtype(default)
    done = capsys.readouterr()
    assert done.out.strip() and not done.err
    assert not local & set(sys.modules), "it imported nothing of its neighbours"
