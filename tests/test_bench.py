"""The benchmark: its clock and its figures by hand, and end to end."""
import re
import runpy
import shutil
import sys
from functools import partial
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
import verify
from runtime import load
from runtime.chats import Prompt, read_prompts

RULE = verify.Rule()

# ---------------------------------------------------------------- the clock
@pytest.fixture()
def takes(monkeypatch):
    """takes(seconds, function) -> the same function, on a clock that stands still otherwise."""
    now = [100.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def slow(seconds, function):
        def call(*given, **more):
            now[0] += seconds
            return function(*given, **more)
        return call
    return slow

def test_the_seconds_of_a_decoding_by_hand(llama, takes):
    """Each part is the number of its calls times what a call takes, in a chain of three forwards.

    Every drafted token is right, so 13 tokens are the prefill's, and three rounds of 4.
    """
    ids = [3, 1, 4]
    right = ids + plain(llama, ids, 14)
    drafter, target = Positional(lambda i: torch.eye(12)[right[i]] * 9), verify.Target(llama)
    drafter.begin, drafter.expand = takes(1, drafter.begin), takes(10, drafter.expand)
    target.forward = takes(10 ** 5, target.forward)
    build = takes(1100, partial(cape.chain, gamma=3))
    for _ in range(2):                                     # nothing is counted twice
        [record] = bench.decode(target, drafter, build, [Prompt("", 0, ids, 13)], [RULE])
        assert record.tokens == right[3:16] and len(record.rounds) == 3
        assert record.seconds == {"prefill": 10 ** 5, "begin": 3, "draft": 90,
                                  "verify": 3 * 10 ** 5, "other": 3300}

def test_a_builder_of_the_drafters_own_is_drafting(llama, takes):
    """In a batch, too, whose rows share the seconds.  Where one token may still come: no draft."""
    class Own(Positional):
        chain = takes(7, lambda self, expand, root: verify.root_only(expand, root))
    drafter = Own(None)
    prompts, target = [Prompt("", 0, [3], 4)] * 2, verify.Target(llama)
    for record in bench.decode(target, drafter, drafter.chain, prompts, [RULE] * 2):
        assert record.seconds == {"prefill": 0, "begin": 0, "draft": 14, "verify": 0, "other": 0}

# ---------------------------------------------------------------- figures by hand
def made_up(rounds, **seconds):
    """A Record of rounds of chains [(accepted, drafted)]; its tokens count up from 0."""
    tokens, made = [0], []
    for accepted, drafted in rounds:
        new = list(range(tokens[-1] + 1, tokens[-1] + accepted + 2))
        made.append(verify.Round(new, list(range(accepted + 1)), [0] * (drafted + 1),
                                 list(range(-1, drafted))))
        tokens += new
    return bench.Record(tokens, made, {"prefill": 0.25, **seconds})

def test_a_row_and_the_table_by_hand(capsys):
    """Two prompts of 9 and 13 new tokens; a plain step takes 0.1 s.

    One round drafts nothing; in the last one the output ends inside the path.
    """
    base = [made_up([(0, 0)] * 8, other=0.2, verify=0.6), made_up([(0, 0)] * 12, verify=1.2)]
    ours = [made_up([(2, 3), (0, 0), (1, 1), (1, 3)], begin=0.025, draft=0.125, verify=0.1,
                    other=0.025),
            made_up([(3, 3), (3, 3), (3, 3)], draft=0.01, verify=0.025, other=0.005)]
    ours[1].rounds[-1] = verify.Round([11, 12], [0, 1, 2, 3], [0] * 4, [-1, 0, 1, 2])
    method = bench.Method("glide x chain", None, "glide", "chain")
    results = [{"plain": plain_one, method.name: one} for plain_one, one in zip(base, ours)]
    row = bench.row_of(method, results)
    speed = 22 / (0.525 + 0.29), 22 / (1.05 + 1.45)
    assert row == pytest.approx({
        "drafter": "glide", "tree": "chain", "prompts": 2, "tokens": 22,
        "tokens_per_second": speed[0], "speedup": speed[0] / speed[1],
        "speedup_least": 2, "speedup_most": 5, "plain_ms": 100, "tau": 18 / 7, "nodes": 16 / 7,
        "alpha": 12 / 14, "draft_ms": 160 / 7, "verify_ms": 125 / 7, "other_ms": 30 / 7})
    first = bench.row_of(bench.Method("plain", None), results) | {"lossless": True}
    gap = {"prompt": 0, "token": 3, "logit_gap": 0.5}
    second = row | {"lossless": False, "first_divergence": gap}
    bench.print_table(["plain", "ours"], [first, second])
    table, below = capsys.readouterr().out.split("\n\n")
    assert [line.split() for line in table.splitlines()] == [
        ["tok/s", "speedup", "tau", "lossless"], ["plain", "8.8", "1.00x", "-", "yes"],
        ["ours", "27.0", "3.07x", "[2.00-5.00]", "2.57", "NO"]]
    assert "45.0 ms: draft 51%, verify 40%, other 10%; alpha 0.857" in below and str(gap) in below

@pytest.mark.parametrize("at, length", [(4, 6), (0, 6), (4, 4)])
def test_a_divergence_is_reported_with_its_gap(llama, at, length):
    """A wrong output on purpose: the gap is that of the model's own logits; none at an end."""
    right = plain(llama, [3], 6)
    wrong = (right[:at] + [(right[at] + 1) % 12] + right[at + 1:])[:length]
    with torch.no_grad():
        logits = llama(torch.tensor([[3, *right[:at]]])).logits[0, -1]
    gap = pytest.approx((logits[right[at]] - logits[(right[at] + 1) % 12]).item(), abs=1e-4)
    same = {name: bench.Record(right, [], {}) for name in ("plain", "x")}
    results = [same, same | {"x": bench.Record(wrong, [], {})}]
    find = partial(bench.losslessness, results=results, prompts=[Prompt("", 0, [3], 6)] * 2,
                   target=verify.Target(llama))
    where = {"prompt": 1, "token": at, "logit_gap": gap if length == 6 else None}
    expected = {"lossless": False, "first_divergence": where}
    assert find(bench.Method("x", None, "d", "cape"), temperature=1.0) == expected
    assert find(bench.Method("x", None)) == expected
    assert find(bench.Method("plain", None), temperature=1.0) == {"lossless": True}
    for tree in (None, "drawn(gamma=2)"):                  # generate(), a sampled chain
        assert find(bench.Method("x", None, "d", tree), temperature=1.0) == {"lossless": None}

# ---------------------------------------------------------------- the measurement
def test_methods_take_turns_in_random_order():
    """Any order comes up, and all methods of a prompt share its rule."""
    order = []

    def decode(name, prompts, rules):
        order.append((name, rules[0].seed))
        return [bench.Record([1], [], {})]
    methods = [bench.Method(name, partial(decode, name)) for name in "abc"]
    assert len(list(bench.measure(methods, [Prompt("", 0, [1], 50)] * 40))) == 40
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
    assert bench.main(args(small, *flags, "--limit", "2")) == 2
    assert "what another command" in capsys.readouterr().err
    before = len(calls)
    assert bench.main(args(small, *flags)) == 0
    assert len(calls) - before == 2 * (1 + 2), "warm-up and two prompts of three, with two methods"
    kept, *others = rows_of(path)
    assert kept == first and [row.get("prompt") for row in others] == [1, 2, None, None, None]
    assert [row["prompts"] for row in others[2:]] == [3] * 3

# ---------------------------------------------------------------- what the methods are asked for
def test_limit_counts_prompts(small):
    """A chat gives a prompt for each of its turns; both have one question."""
    found = load.Loaded(small / "model", small / "drafters")
    for limit, questions in ((1, [0]), (9, [0, 0, 1])):
        prompts = read_prompts([small / "chat.jsonl"], found, 9, limit)
        assert [prompt.question for prompt in prompts] == questions

def test_all_methods_decode_by_one_rule_and_end_with_one_id(small, tmp_path, monkeypatch):
    """Whatever the folder says: a repetition penalty, beams, stop strings."""
    config = transformers.GenerationConfig(repetition_penalty=1.8, num_beams=3, stop_strings=["a"],
                                           min_new_tokens=3, eos_token_id=299)
    shutil.copytree(small / "model", tmp_path / "model")
    config.save_pretrained(tmp_path / "model")
    found = load.Loaded(tmp_path / "model", small / "drafters")
    prompt, other, *_ = read_prompts([small / "prompts.jsonl"], found, 12)
    expected = plain(found.model, prompt.ids, 12)
    calls = load.drafter_calls(["maxgram"], small / "drafters")
    trees = [bench.read_call("chain", bench.TREES, "tree")]
    for end in (299, expected[2]):
        found.eos = found.model.generation_config.eos_token_id = end
        ended = verify.until_end(expected, {end})
        for method in bench.methods_of(found, calls, trees, 0.0):
            for prompts in ([prompt], [other, prompt]):
                assert method.decode(prompts, [RULE] * len(prompts))[-1].tokens == ended
    asked = []
    monkeypatch.setattr(found.model, "generate",
                        lambda given, **how: asked.append(how) or torch.cat((given, given), 1))
    bench.library(found.model, 0.7, [prompt], [verify.Rule(0.7, seed=3)])
    assert asked[0].items() >= {"do_sample": True, "top_k": 0, "temperature": 0.7}.items()

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
    assert all(row["lossless"] and row["tokens"] == 8 for row in rows)
    assert all(row["tau"] > 1.2 and row["draft_ms"] > 0 for row in rows[2:])
    assert "alpha" not in rows[2] and 0 < rows[3]["alpha"] <= 1
    tokens, _, _ = prompt["records"]["glide x cape"]
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
    assert len(rows) == 3 and all(row["lossless"] and row["tokens"] == 5 for row in rows)
