"""The page of rounds: its rounds add up to plain decoding's text, its nodes by hand, and no text breaks out of it."""
import json

import pytest
import rounds
import torch

import bench
import verify

def data_of(page):
    return json.loads(rounds.DATA.fullmatch(page)[2])

PAGE = rounds.PAGE.read_text(encoding="utf-8")
FLAGS = ["--drafter", "glide", "maxgram", "--tree", "chain", "eagle2(total=5, depth=3, expanded=3)",
         "--limit", "2", "--max-new-tokens", "9", "--device", "cpu"]

@pytest.fixture(scope="module")
def run():
    return bench.Run(FLAGS)

@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("rounds") / "a.html"
    assert rounds.main([*FLAGS, "--prompt", "2", "--out", str(out)]) == 0
    return data_of(out.read_text(encoding="utf-8"))

@pytest.fixture(scope="module")
def tokens(run):
    """The model's own continuation of the second prompt, by transformers."""
    _, ids, limit = run.prompts[1]
    prompt = torch.tensor([ids])
    how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": limit, "do_sample": False, "pad_token_id": 0}
    return run.model.generate(prompt, **how)[0, len(ids):].tolist()

def test_every_arm_writes_plain_decodings_text(run, data, tokens):
    text = run.tokenizer.decode(tokens, skip_special_tokens=True)
    assert "--tree chain 'eagle2(total=5, depth=3, expanded=3)'" in data["command"]
    assert data["prompt"] == run.tokenizer.decode(run.prompts[1][1]) and data["prompt_number"] == 2
    assert [arm["name"] for arm in data["arms"]] == [f"{label} × {tree.label}" for label in ("glide", "maxgram") for tree in run.trees]
    for arm in data["arms"]:
        assert arm["first"] + "".join(each["accepted"] + each["bonus"] for each in arm["rounds"]) == text
        made = [arm["rounds"][0]["tokens"][0]]
        for each in arm["rounds"]:
            assert each["tokens"][0] == made[-1], "the root is the last token of the round before"
            made += [each["tokens"][node] for node in each["path"][1:]] + [each["own"]]
            assert [*each["texts"], each["choice"]] == [run.tokenizer.decode([token]) for token in (*each["tokens"], each["own"])]
            assert [each["parents"][node] for node in each["path"]] == [-1, *each["path"][:-1]]
            if arm["name"] == "glide × chain":
                assert all(0 < p <= 1 for p in each["p"][1:])
            if arm["name"] == "maxgram × chain":
                assert {*each["p"]} == {None}, "a chain of Max-Gram's own has no probabilities"
        assert made == tokens and arm["leaves"] is None and arm["tokens"] == len(tokens)
        assert arm["tau"] == pytest.approx((len(tokens) - 1) / len(arm["rounds"]))

def test_an_output_that_ends_within_an_accepted_run_has_no_choice(run, data, tokens, monkeypatch):
    """The end-of-text token is one that the drafter proposed."""
    arm = data["arms"][0]
    accepted = [each["tokens"][node] for each in arm["rounds"] for node in each["path"][1:]]
    end = next(token for token in accepted if token not in [tokens[0], *(each["own"] for each in arm["rounds"])])
    monkeypatch.setattr(run, "eos", end)
    plain = rounds.decoded(run, 1, None, verify.root_only)
    arm = rounds.arm_data(run, 1, "glide", run.trees[0], plain)
    last = arm["rounds"][-1]
    assert last["own"] is last["choice"] is None and last["bonus"] == ""
    assert last["tokens"][last["path"][-1]] == end and arm["tokens"] == tokens.index(end) + 1

row = torch.tensor
CALLS = [(row([7]), [-1], row([[0.5, 0.3, 0.2, 0.0]])),
         (row([0, 1, 3]), [0, 0, 0], row([[0.0, 0.25, 0.75, 0.0], [0.0, 0.0, 0.9, 0.1], [1.0, 0.0, 0.0, 0.0]])),
         (row([2, 0]), [2, 3], row([[1.0, 0.0, 0.0, 0.0]] * 2))]

def probabilities(tokens, parents, calls=CALLS, p_draft=None):
    """p of the nodes of a tree whose builder made these calls of expand."""
    answers, noted = iter(calls), []

    def build(expand, root):
        for call in calls:
            expand(*call[:2])
        return verify.Tree(row(tokens), row(parents), p_draft)
    rounds.listening(build, noted)(lambda tokens, parents: next(answers)[2], None)
    nodes = rounds.nodes_of(*noted[0])
    assert (nodes["tokens"], nodes["parents"]) == (tokens, parents)
    return nodes["p"]

def test_nodes_by_hand():
    assert probabilities([7, 0, 2], [-1, 0, 1]) == pytest.approx([None, 0.5, 0.75])
    assert probabilities([7, 1, 2, 0, 1], [-1, 0, 1, 2, 3])[3:] == [1, None], "after a node that the drafter did not read"
    # a cascade's own chain, sampled and not
    assert probabilities([7, 1, 2], [-1, 0, 1], []) == [None, None, None]
    sampled = row([[0.1, 0.2, 0.7], [0.3, 0.4, 0.3]])
    assert probabilities([7, 1, 2], [-1, 0, 1], [], sampled) == pytest.approx([None, 0.2, 0.3])
    assert [rounds.leaves([1, 2, 3], other) for other in ([1, 2, 3], [1, 5, 3], [1, 2])] == [None, 2, 3]

def test_milliseconds_are_those_of_the_round(data):
    parts = [("prefill", 5), ("draft", 1), ("other", 0.5), ("draft", 2), ("verify", 4), ("other", 0.25), ("draft", 3), ("verify", 6), ("other", 1)]
    assert rounds.milliseconds(parts) == [{"draft": 3000, "verify": 4000, "other": 750}, {"draft": 3000, "verify": 6000, "other": 1000}]
    for arm in data["arms"]:
        assert all(ms["draft"] > 0 and ms["verify"] > 0 and ms["other"] > 0 for ms in (each["ms"] for each in arm["rounds"]))
        spent = arm["prefill_ms"] + sum(sum(each["ms"].values()) for each in arm["rounds"])
        assert arm["tokens"] / arm["speed"] * 1e3 == pytest.approx(spent)
        assert arm["speedup"] == pytest.approx(arm["speed"] / data["plain"]["speed"])
    assert data["plain"]["tokens"] == 9 and data["plain"]["step_ms"] > 0
