"""The benchmark: its clock and its figures by hand, and end to end."""
import re
import runpy
import shutil
import subprocess
import sys
from itertools import permutations
from textwrap import dedent

import pytest
import torch
import transformers
from conftest import ROOT, Positional, plain, tiny
from helpers import bench_args as args
from helpers import rows_of

import bench
import cape
import cascade
import verify
from runtime import load, provenance
from runtime.calls import read_call

RULE = verify.Rule()

def loaded(small, *more):
    """As bench.py before its table -> arguments, load.Loaded, methods, prompts"""
    a = bench.parser().parse_args(args(small, *more))
    found = load.Loaded(a.target, a.checkpoint)
    drafters = load.drafter_calls(a.drafter, a.checkpoint)
    trees = [read_call(tree, bench.TREES, "tree") for tree in a.tree]
    methods = bench.methods_of(found, drafters, trees, a.temperature)
    return a, found, methods, bench.read_prompts(a.prompts, found, a.max_new_tokens, a.limit)

# ---------------------------------------------------------------- the clock
@pytest.fixture()
def now(monkeypatch):
    """A clock that stands still unless somebody adds to it."""
    now = [100.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    return now

def slowly(thing, now, **seconds):
    """A target or drafter whose methods also take so many seconds each."""
    def after(method, takes):
        def call(*given, **more):
            now[0] += takes
            return method(*given, **more)
        return call
    for name, takes in seconds.items():
        setattr(thing, name, after(getattr(thing, name), takes))
    return thing

def test_the_seconds_of_a_decoding_by_hand(llama, now):
    """Each part is the number of its calls times what a call takes, in a chain of three forwards.

    Every drafted token is right, so 13 tokens are the prefill's, and three rounds of 4.
    """
    ids = [3, 1, 4]
    right = ids + plain(llama, ids, 14)
    drafter = Positional(lambda position: torch.eye(12)[right[position]] * 9)
    slowly(drafter, now, begin=1, expand=10)

    def build(expand, root):
        now[0] += 1100
        return cape.chain(expand, root, gamma=3)
    target = slowly(verify.Target(llama), now, forward=10 ** 5)
    for _ in range(2):                                     # nothing is counted twice
        record = bench.decode(target, drafter, build, ids, 13)
        assert record.tokens == right[3:16] and len(record.rounds) == 3
        assert record.seconds == {"prefill": 10 ** 5, "begin": 3, "draft": 90,
                                  "verify": 3 * 10 ** 5, "other": 3300}
        assert record.calls == {"begin": 3, "draft": 9, "verify": 3}

def test_a_builder_of_the_drafters_own_is_drafting(llama, now):
    class Cascade(Positional):
        def chain(self, expand, root):
            now[0] += 7
            return verify.root_only(expand, root)
    drafter = Cascade(None)
    record = bench.decode(verify.Target(llama), drafter, drafter.chain, [3], 4)
    assert record.seconds == {"prefill": 0, "begin": 0, "draft": 14, "verify": 0, "other": 0}
    assert record.calls["draft"] == 2, "where one token may still come, nothing is drafted"

# ---------------------------------------------------------------- figures by hand
def a_round(accepted, drafted, first=0):
    """A round of a chain: `accepted` of `drafted` tokens."""
    new = list(range(first, first + accepted + 1))
    return verify.Round(new, list(range(accepted + 1)), [0] * (drafted + 1),
                        list(range(-1, drafted)))

def made_up(rounds, first=0, **seconds):
    """A Record of rounds [(accepted, drafted)]; its tokens count up from `first`."""
    tokens, made = [first], []
    for accepted, drafted in rounds:
        made.append(a_round(accepted, drafted, tokens[-1] + 1))
        tokens += made[-1].new
    return bench.Record(tokens, made, {"prefill": 0.25, **seconds}, {})

def test_counts_of_rounds_by_hand():
    """A rejection, a tree, a root alone, an output that ended inside a path."""
    tree = verify.Round([5], [0], [9, 1, 2], [-1, 0, 0])
    alone = verify.Round([5], [0], [9], [-1])
    assert bench.counts([a_round(2, 3), tree, alone]) == {
        "rounds": 3, "new": 5, "nodes": 5, "siblings": 1, "accepted": 2, "tested": 4}
    cut = bench.counts([verify.Round([5, 6], [0, 1, 2, 3], [0] * 4, [-1, 0, 1, 2])])
    assert cut["accepted"] == cut["tested"] == 2, "two of three accepted ones are in the output"

def test_a_row_and_the_table_by_hand(capsys):
    """Two prompts of 9 and 13 new tokens; a plain step takes 0.1 s."""
    base = [made_up([(0, 0)] * 8, other=0.2, verify=0.6), made_up([(0, 0)] * 12, verify=1.2)]
    ours = [made_up([(2, 3), (0, 3), (1, 1), (1, 3)], begin=0.025, draft=0.125, verify=0.1,
                    other=0.025),
            made_up([(3, 3), (3, 3), (3, 3)], draft=0.01, verify=0.025, other=0.005)]
    method = bench.Method("glide x chain", None, "glide", "chain", None)
    results = [{"plain": plain_one, method.name: one} for plain_one, one in zip(base, ours)]
    row = bench.row_of(method, results)
    speed = 22 / (0.525 + 0.29), 22 / (1.05 + 1.45)
    assert row == pytest.approx({
        "drafter": "glide", "tree": "chain", "prompts": 2, "tokens": 22,
        "tokens_per_second": speed[0], "speedup": speed[0] / speed[1],
        "speedup_least": 2, "speedup_most": 5, "plain_ms": 100, "tau": 20 / 7, "nodes": 19 / 7,
        "alpha": 13 / 16, "draft_ms": 160 / 7, "verify_ms": 125 / 7, "other_ms": 30 / 7})
    first = bench.row_of(bench.Method("plain", None), results)
    assert first["speedup"] == 1 and "tau" not in first
    gap = {"prompt": 0, "token": 3, "logit_gap": 0.5}
    bench.print_table(["plain", "ours"], [first | {"lossless": True},
                                          row | {"lossless": False, "first_divergence": gap}])
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert lines[:3] == [["tok/s", "speedup", "tau", "lossless"],
                         ["plain", "8.8", "1.00x", "-", "yes"],
                         ["ours", "27.0", "3.07x", "[2.00-5.00]", "2.86", "NO"]]
    assert "A plain step takes 100.0 ms.\nA round of ours takes 45.0 ms: draft 51%, verify " in out
    assert "alpha 0.812.\n" in out
    assert "ours is not lossless: {'prompt': 0" in out
    sibling = ours[1].rounds[0]._replace(parents=[-1, 0, 1, 1])
    ours[1].rounds[0] = sibling
    assert "alpha" not in bench.row_of(method, results), "a tree has no alpha"

def test_a_divergence_is_reported_with_its_gap(llama):
    """A wrong output on purpose: the gap is that of the model's own logits."""
    ids = [3, 1, 4]
    right = plain(llama, ids, 6)
    cases = [(right[:4], {"token": 4, "logit_gap": None})]       # one is the other's beginning
    for at in (4, 0):
        wrong = right[:at] + [(right[at] + 1) % 12] + right[at + 1:]
        with torch.no_grad():
            logits = llama(torch.tensor([ids + right[:at]])).logits[0, -1]
        gap = (logits[right[at]] - logits[wrong[at]]).item()
        cases.append((wrong, {"token": at, "logit_gap": pytest.approx(gap, abs=1e-4)}))
    prompts = [bench.Prompt("", 0, ids, 6)] * 2
    method = bench.Method("x", None)
    for ours, expected in cases:
        same = {name: bench.Record(right, [], {}, {}) for name in ("plain", "x")}
        results = [same, same | {"x": bench.Record(ours, [], {}, {})}]
        found = bench.losslessness(method, results, prompts, verify.Target(llama))
        assert found == {"lossless": False, "first_divergence": {"prompt": 1, **expected}}
        assert bench.losslessness(method, results[:1], prompts, None) == {"lossless": True}

# ---------------------------------------------------------------- the measurement
def test_methods_take_turns_in_random_order():
    """Any order comes up, and all methods of a prompt share its rule."""
    order = []

    def method(name):
        def decode(ids, new_tokens, rule):
            order.append((name, rule.seed))
            return bench.Record([1], [], {}, {})
        return bench.Method(name, decode)
    prompts = [bench.Prompt("a", 0, [1], 50)] * 40
    results = bench.measure([method("a"), method("b"), method("c")], prompts)
    assert len(results) == 40
    turns = [order[i:i + 3] for i in range(0, len(order), 3)]
    assert {tuple(name for name, _ in turn) for turn in turns} == set(permutations("abc"))
    assert all(len({seed for _, seed in turn}) == 1 for turn in turns)
    assert len({seed for _, seed in order}) == 40

def test_the_lines_of_the_docstring_measure_two_models(llama):
    lines = re.search(r"a few lines do:\n\n(.*?)\n\n", bench.__doc__, re.S)[1].replace("128", "12")
    names = {**vars(bench), "cascade": cascade, "large": llama, "small": tiny("llama", seed=1),
             "prompts": [[3, 1, 4], [5]]}
    exec(dedent(lines), names)
    rows = [bench.row_of(method, names["results"]) for method in names["methods"]]
    assert [row["tokens"] for row in rows] == [24, 24] and rows[1]["tau"] >= 1
    for found, ids in zip(names["results"], names["prompts"]):
        assert found["plain"].tokens == found["cascade"].tokens == plain(llama, ids, 12)

def test_an_interrupted_table_goes_on(small, tmp_path, monkeypatch, capsys):
    """The same command measures the rest; another one is refused."""
    rounds, calls, path = verify.rounds, [], tmp_path / "r.jsonl"

    def counting(*given):
        calls.append(1)
        if len(calls) == 5:                # two methods of ours: warm-up, one prompt, and then
            raise KeyboardInterrupt
        return rounds(*given)
    monkeypatch.setattr(verify, "rounds", counting)
    flags = f"--drafter maxgram --tree chain --json {path} --max-new-tokens 4".split()
    assert bench.main(args(small, *flags)) == 130
    assert "interrupted after 1 prompts of 3" in capsys.readouterr().err
    [first] = rows_of(path)
    with open(path, "a") as file:
        file.write('{"command": "pyth')         # as a kill would leave it
    assert bench.main(args(small, *flags, "--seed", "1")) == 2
    assert "what another command" in capsys.readouterr().err
    before = len(calls)
    assert bench.main(args(small, *flags)) == 0
    assert len(calls) - before == 2 * (1 + 2), "warm-up and two prompts of three, with two methods"
    kept, *others = rows_of(path)
    assert kept == first and [row.get("prompt") for row in others] == [1, 2, None, None, None]
    assert [row["prompts"] for row in others[2:]] == [3] * 3

def test_rows_know_their_origin(tmp_path, monkeypatch):
    """The commit, "+changes" where files differ from it, "unknown" without git."""
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.commit() == "unknown"
    (tmp_path / "a").write_text("a")
    for command in ("init", "add a", "-c user.name=x -c user.email=x commit -m a"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    commit = provenance.commit()
    assert re.fullmatch(r"[\da-f]{10}", commit)
    (tmp_path / "a").write_text("b")
    assert provenance.commit() == f"{commit}+changes"

# ---------------------------------------------------------------- what the methods are asked for
def test_limit_counts_prompts(small):
    """A chat gives a prompt for each of its turns; both have one question."""
    found = load.Loaded(small / "model", small / "drafters")
    for limit, questions in ((1, [0]), (3, [0, 0, 1]), (9, [0, 0, 1])):
        prompts = bench.read_prompts([small / "chat.jsonl"], found, 9, limit)
        assert [prompt.question for prompt in prompts] == questions

def test_all_methods_decode_by_one_rule(small, tmp_path, monkeypatch):
    """Whatever the folder says: a repetition penalty, beams, stop strings.  And in sampling
    generate() gets the temperature, and samples among all tokens."""
    config = transformers.GenerationConfig(repetition_penalty=1.8, num_beams=3, stop_strings=["a"],
                                           min_new_tokens=3, eos_token_id=299)
    shutil.copytree(small / "model", tmp_path / "model")
    config.save_pretrained(tmp_path / "model")
    flags = ["--target", str(tmp_path / "model"), "--tree", "chain", "--drafter", "maxgram"]
    _, found, methods, prompts = loaded(small, *flags)
    ids = prompts[0].ids
    expected, *others = [method.decode(ids, 12, RULE).tokens for method in methods]
    assert expected == plain(found.model, ids, 12) and others == [expected] * 2
    found.eos = expected[2]
    stopped = bench.methods_of(found, load.drafter_calls(["maxgram"], small / "drafters"),
                               [read_call("chain", bench.TREES, "tree")], 0)
    for method in (stopped[0], stopped[2]):
        assert method.decode(ids, 12, RULE).tokens == expected[:expected.index(expected[2]) + 1]
    asked = []
    monkeypatch.setattr(found.model, "generate",
                        lambda given, **how: asked.append(how) or torch.cat((given, given), 1))
    assert bench.library(found.model, 0.7, ids, 5, verify.Rule(0.7, seed=3)).tokens == ids
    assert asked[0].pop("attention_mask").tolist() == [[1] * len(ids)]
    assert asked == [{"max_new_tokens": 5, "do_sample": True, "top_k": 0, "temperature": 0.7}]

def test_which_drafters_take_a_graft(small):
    """A mixture and Max-Gram alone; a grid leaves the others out and says so."""
    flags = ["--tree", "graft(node_price=0.1)", "pct-cost", "--drafter", "mixture(edd, maxgram)",
             "edd", "maxgram", "cascade(base, maxgram)"]
    _, found, methods, _ = loaded(small, *flags)
    grafts = {method.drafter for method in methods if method.tree == "graft(node_price=0.1)"}
    assert grafts == {"mixture(edd, maxgram)", "maxgram"} and len(methods) == 2 + 2 + 4
    for label in ("edd", "cascade(base, maxgram)"):
        assert any(f"no {label} x graft" in note for note in found.notes)

# ---------------------------------------------------------------- end to end
def test_the_main_command_as_a_script(tmp_path, monkeypatch, capsys):
    """From another folder, with the shipped weights, token for token; and what --show prints."""
    trees = ["cape", "chain", "pct(width=1, cost=0.01)", "pct-cost"]
    flags = "--limit 1 --device cpu --max-new-tokens 8 --show --json r.jsonl".split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench.py"), "--tree", *trees, *flags])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    done = capsys.readouterr()
    assert ended.value.code == 0, done.err
    prompt, *rows = rows_of(tmp_path / "r.jsonl")
    expected = [("plain", None), ("generate()", None), *(("glide", tree) for tree in trees)]
    assert [(row["drafter"], row["tree"]) for row in rows] == expected
    for row in rows:
        assert row["lossless"] is True and row["tokens"] == 8
        assert row["commit"] and row["date"] and row["machine"]
    for row in rows[2:]:
        assert row["tau"] > 1.2 and row["draft_ms"] > 0
    assert "alpha" not in rows[2] and 0 < rows[3]["alpha"] <= 1
    shown = (r"\n--- glide x cape, story: \[accepted\]bonus\n(.*?)\n--- 8 tokens in "
             r"\d+ rounds, tau ([\d.]+)\n")
    shown, tau = re.search(shown, done.out, re.S).groups()
    assert "[" in shown and float(tau) == round(rows[2]["tau"], 2)
    kept = prompt["records"]["glide x cape"]
    assert len(kept[1]) * rows[2]["tau"] == pytest.approx(len(kept[0]) - 1)

def test_encoder_decoder_targets_take_cascades(tmp_path):
    """The shipped T5.  An encoder's input takes no positions of the output."""
    (tmp_path / "p.txt").write_text("One day a cat saw a dog. " * 80)
    folder = ROOT / "checkpoints/t5"
    flags = (f"--target {folder}/target --checkpoint {folder} --prompts {tmp_path}/p.txt --tree "
             f"chain --max-new-tokens 5 --device cpu --json {tmp_path}/r.jsonl")
    assert bench.main([*flags.split(), "--drafter", "cascade(base, maxgram)"]) == 0
    rows = rows_of(tmp_path / "r.jsonl")[1:]
    assert [row["drafter"] for row in rows] == ["plain", "generate()", "cascade(base, maxgram)"]
    assert all(row["lossless"] and row["tokens"] == 5 for row in rows)

def test_a_batch_gives_each_prompt_what_it_gives_alone(llama):
    """Tokens and rounds; the seconds of its rows add up to those of the batch."""
    target = verify.Target(llama)
    given = ([1, 2], 5), ([3], 9), ([4, 4, 4], 7)
    prompts = [bench.Prompt("", 0, ids, limit) for ids, limit in given]
    rules = [verify.Rule()] * 3
    records = bench.decode_rows(target, None, verify.root_only, prompts, rules)
    for record, prompt in zip(records, prompts):
        alone = bench.decode(target, None, verify.root_only, prompt.ids, prompt.limit)
        assert record.tokens == alone.tokens and record.rounds == alone.rounds
        assert sum(record.seconds.values()) == sum(records[0].seconds.values())
    theirs = bench.library_rows(llama, 0.0, prompts, rules)
    assert [one.tokens for one in theirs] == [record.tokens for record in records]
