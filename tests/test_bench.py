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
from runtime.prompts import Prompt, read_prompts

RULE = verify.Rule()

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
        [record] = bench.decode(target, drafter, build, [Prompt("", 0, ids, 13)], [RULE])
        assert record.tokens == right[3:16] and len(record.rounds) == 3
        assert record.seconds == {"prefill": 10 ** 5, "begin": 3, "draft": 90,
                                  "verify": 3 * 10 ** 5, "other": 3300}

def test_a_builder_of_the_drafters_own_is_drafting(llama, now):
    """In a batch, too, whose rows share the seconds."""
    class Cascade(Positional):
        def chain(self, expand, root):
            now[0] += 7
            return verify.root_only(expand, root)
    drafter = Cascade(None)
    for count in (1, 2):
        prompts = [Prompt("", 0, [3], 4)] * count
        target = verify.Target(llama)
        records = bench.decode(target, drafter, drafter.chain, prompts, [RULE] * count)
        for record in records:
            assert record.seconds == {"prefill": 0, "begin": 0, "draft": 14, "verify": 0,
                                      "other": 0}, "where one token may still come: no draft"

# ---------------------------------------------------------------- figures by hand
def a_round(accepted, drafted, first=0):
    """A round of a chain: `accepted` of `drafted` tokens."""
    new = list(range(first, first + accepted + 1))
    return verify.Round(new, list(range(accepted + 1)), [0] * (drafted + 1),
                        list(range(-1, drafted)))

def made_up(rounds, **seconds):
    """A Record of rounds [(accepted, drafted)]; its tokens count up from 0."""
    tokens, made = [0], []
    for accepted, drafted in rounds:
        made.append(a_round(accepted, drafted, tokens[-1] + 1))
        tokens += made[-1].new
    return bench.Record(tokens, made, {"prefill": 0.25, **seconds})

def test_accepted_and_tested_by_hand():
    """A rejection, all accepted, a root alone, an output that ended inside a path."""
    ended = verify.Round([5, 6], [0, 1, 2, 3], [0] * 4, [-1, 0, 1, 2])
    rounds = [a_round(2, 4), a_round(3, 3), a_round(0, 0), ended]
    assert list(map(bench.accepted_and_tested, rounds)) == [(2, 3), (3, 3), (0, 0), (2, 2)]

def test_a_row_and_the_table_by_hand(capsys):
    """Two prompts of 9 and 13 new tokens; a plain step takes 0.1 s."""
    base = [made_up([(0, 0)] * 8, other=0.2, verify=0.6), made_up([(0, 0)] * 12, verify=1.2)]
    ours = [made_up([(2, 3), (0, 3), (1, 1), (1, 3)], begin=0.025, draft=0.125, verify=0.1,
                    other=0.025),
            made_up([(3, 3), (3, 3), (3, 3)], draft=0.01, verify=0.025, other=0.005)]
    method = bench.Method("glide x chain", None, "glide", "chain")
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
    assert "alpha 0.812.\nours is not lossless: {'prompt': 0" in out
    ours[1].rounds[0] = ours[1].rounds[0]._replace(parents=[-1, 0, 1, 1])
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
    prompts = [Prompt("", 0, ids, 6)] * 2
    method = bench.Method("generate()", None)
    same = {name: bench.Record(right, [], {}) for name in ("plain", "generate()")}
    for ours, expected in cases:
        results = [same, same | {"generate()": bench.Record(ours, [], {})}]
        found = bench.losslessness(method, results, prompts, verify.Target(llama))
        assert found == {"lossless": False, "first_divergence": {"prompt": 1, **expected}}
    assert bench.losslessness(method, [same], prompts, None) == {"lossless": True}
    for method, known in ((method, None), (bench.Method("plain", None), True),
                          (bench.Method("x", None, "d", "drawn(gamma=2)"), None)):
        results = [same | {"x": same["plain"]}]
        assert bench.losslessness(method, results, prompts, None, 1.0) == {"lossless": known}

# ---------------------------------------------------------------- the measurement
def test_methods_take_turns_in_random_order():
    """Any order comes up, and all methods of a prompt share its rule."""
    order = []

    def method(name):
        def decode(prompts, rules):
            order.append((name, rules[0].seed))
            return [bench.Record([1], [], {})]
        return bench.Method(name, decode)
    prompts = [Prompt("a", 0, [1], 50)] * 40
    results = list(bench.measure([method("a"), method("b"), method("c")], prompts))
    assert len(results) == 40
    turns = [order[i:i + 3] for i in range(3, len(order), 3)]            # the first three warm up
    assert {tuple(name for name, _ in turn) for turn in turns} == set(permutations("abc"))
    assert all(len({seed for _, seed in turn}) == 1 for turn in turns)
    assert len({seed for _, seed in order}) == 40

def test_the_lines_of_the_docstring_measure_two_models(llama):
    lines = re.search(r"a few lines do:\n\n(.*?)\n\n", bench.__doc__, re.S)[1].replace("128", "12")
    names = {"large": llama, "small": tiny("llama", seed=1), "prompts": [[3, 1, 4], [5]]}
    exec(dedent(lines), names)
    rows = [bench.row_of(method, names["results"]) for method in names["methods"]]
    assert [row["tokens"] for row in rows] == [24, 24] and rows[1]["tau"] >= 1
    for found, ids in zip(names["results"], names["prompts"]):
        assert found["plain"].tokens == found["cascade"].tokens == plain(llama, ids, 12)

def test_an_interrupted_measurement_goes_on(small, tmp_path, monkeypatch, capsys):
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

def test_rows_know_their_commit(tmp_path, monkeypatch):
    """With "+changes" where files differ from it; "unknown" without git."""
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
    for limit, questions in ((1, [0]), (9, [0, 0, 1])):
        prompts = read_prompts([small / "chat.jsonl"], found, 9, limit)
        assert [prompt.question for prompt in prompts] == questions

def test_all_methods_decode_by_one_rule(small, tmp_path, monkeypatch):
    """Whatever the folder says: a repetition penalty, beams, stop strings.  And in sampling
    generate() gets the temperature, and samples among all tokens."""
    config = transformers.GenerationConfig(repetition_penalty=1.8, num_beams=3, stop_strings=["a"],
                                           min_new_tokens=3, eos_token_id=299)
    shutil.copytree(small / "model", tmp_path / "model")
    config.save_pretrained(tmp_path / "model")
    flags = ["--target", str(tmp_path / "model"), "--json", str(tmp_path / "r.jsonl")]
    assert bench.main(args(small, *flags, "--drafter", "maxgram", "--tree", "chain")) == 0
    prompt, *_ = rows_of(tmp_path / "r.jsonl")
    found = load.Loaded(tmp_path / "model", small / "drafters")
    [first] = read_prompts([small / "prompts.jsonl"], found, 12, 1)
    expected = plain(found.model, first.ids, 12)
    assert [record[0] for record in prompt["records"].values()] == [expected] * 3
    # All methods end with the same id.
    found.eos = found.model.generation_config.eos_token_id = expected[2]
    ended = expected[:expected.index(expected[2]) + 1]
    calls = load.drafter_calls(["maxgram"], small / "drafters")
    trees = [bench.read_call("chain", bench.TREES, "tree")]
    for method in bench.methods_of(found, calls, trees, 0.0):
        for count in (1, 2):
            for record in method.decode([first] * count, [RULE] * count):
                assert record.tokens == ended
    asked = []
    monkeypatch.setattr(found.model, "generate",
                        lambda given, **how: asked.append(how) or torch.cat((given, given), 1))
    [record] = bench.library(found.model, 0.7, [first], [verify.Rule(0.7, seed=3)])
    assert record.tokens == first.ids[:12]
    assert asked[0].pop("attention_mask").tolist() == [[1] * len(first.ids)]
    assert asked == [{"max_new_tokens": 12, "do_sample": True, "top_k": 0, "temperature": 0.7,
                      "pad_token_id": 0}]

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
    tokens, rounds, _ = prompt["records"]["glide x cape"]
    assert len(rounds) * rows[2]["tau"] == pytest.approx(len(tokens) - 1)
    shown = re.search(r"--- glide x cape: \[accepted\]bonus\n(.*?)\n\n", done.out, re.S)[1]
    tokenizer = load.load_tokenizer(load.STAND_IN)
    assert "[" in shown and re.sub(r"[][]", "", shown) == tokenizer.decode(tokens)

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
    """Tokens and rounds, of prompts and limits of several lengths; the last batch is smaller."""
    target = verify.Target(llama)
    drafter = cascade.Cascade([verify.Target(tiny("llama", seed=1))], K=[[2]])
    methods = [bench.Method("plain", bench.partial(bench.decode, target, None, verify.root_only)),
               bench.Method("d", bench.partial(bench.decode, target, drafter, drafter.chain)),
               bench.Method("generate()", bench.partial(bench.library, llama, 0.0))]
    prompts = [Prompt("", 0, *given) for given in (([1, 2], 5), ([3], 9), ([4, 4, 4], 7))]
    alone, together = [list(bench.measure(methods, prompts, rows=rows)) for rows in (1, 2)]
    for one, other in zip(alone, together, strict=True):
        for name in one:
            assert one[name].tokens == other[name].tokens == one["plain"].tokens
            assert one[name].rounds == other[name].rounds
