"""The page of rounds: its JSON is an independent replay of the decoding, and no text breaks out of it."""
import json
import re
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import bench
import verify

sys.path.insert(0, str(ROOT / "figures"))
import rounds  # noqa: E402

TEMPLATE = rounds.TEMPLATE.read_text(encoding="utf-8")
FLAGS = ["--drafter", "glide", "maxgram", "--tree", "chain", "eagle2(total=5, depth=3, expanded=3)",
         "--limit", "2", "--max-new-tokens", "14", "--device", "cpu"]


@pytest.fixture(scope="module")
def run():
    return bench.Run(FLAGS)


@pytest.fixture(scope="module")
def data(run):
    return rounds.page_data(run, 2)


def decode(run):
    """The page's data of the first arm."""
    arm = next(arm for arm in bench.arms_of(run) if arm.build)
    _, ids, limit = run.prompts[1]
    return rounds.arm_data(run, arm, ids, limit, rounds.timed(run.decode(None, verify.no_draft, ids, 1)))


def plain_tokens(run, number):
    """The model's own continuation, by transformers."""
    _, ids, limit = run.prompts[number - 1]
    prompt = torch.tensor([ids])
    how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": limit, "do_sample": False, "pad_token_id": 0}
    return run.model.generate(prompt, **how)[0, len(ids):].tolist()


def path_to(nodes, node):
    """The tokens from the root down to a node."""
    line = []
    while node >= 0:
        line.insert(0, nodes["tokens"][node])
        node = nodes["parents"][node]
    return tuple(line)


class Replay:
    """The prompt decoded again by one arm; of each round the loop's own tree, path, new tokens, the drafter's logits.

    asked: what the builder asked the drafter to continue, each node as the tokens from the root to it.
    logits: {those tokens: (V,)}, where the drafter was asked indeed.
    """

    def __init__(self, run, number, label, tree, monkeypatch):
        self.rounds, self.drafter = [], run.drafters[label]
        self.build = bench.builder(run, label, tree)
        ask, expand, record = verify.Expand.__call__, self.drafter.expand, bench.Record.round

        def asking(this, tokens, parents):
            self.lines = []
            for token, parent in zip(tokens.tolist(), parents):
                above = self.all[parent] if parent >= 0 else ()
                self.lines.append((*above, token))
                self.all.append((*above, token))
            return ask(this, tokens, parents)

        def listening(tokens, parents):
            found = expand(tokens, parents)
            self.rounds[-1]["logits"].update(zip(self.lines, found.float()))
            return found

        def noted(out, new, path, parents, *more):
            self.rounds[-1].update(new=new, path=path, asked=set(self.all))
            record(out, new, path, parents, *more)
        with monkeypatch.context() as patch:
            patch.setattr(verify.Expand, "__call__", asking)
            patch.setattr(self.drafter, "expand", listening)
            patch.setattr(bench.Record, "round", noted)
            run.decode(self.drafter, self, *run.prompts[number - 1][1:])

    def __call__(self, expand, root):
        self.all = []
        self.rounds.append({"logits": {}})
        tree = verify.without_absent(self.build(expand, root))
        self.rounds[-1].update(tokens=tree.tokens.tolist(), parents=tree.parents.tolist())
        return tree


# ---------------------------------------------------------------- the JSON against the decoding
def test_every_arm_writes_plain_decodings_text(run, data):
    tokens = plain_tokens(run, 2)
    said = run.tokenizer.decode(tokens, skip_special_tokens=True)
    assert data["prompt"] == run.tokenizer.decode(run.prompts[1][1]) and data["prompt_number"] == 2
    names = [f"{label} × {tree.label}" for label in ("glide", "maxgram") for tree in run.trees]
    assert [arm["name"] for arm in data["arms"]] == names
    for arm in data["arms"]:
        assert arm["first"] + "".join(each["accepted"] + each["bonus"] for each in arm["rounds"]) == said
        made = [arm["rounds"][0]["tokens"][0]]
        for each in arm["rounds"]:
            assert each["tokens"][0] == made[-1], "the root is the last token of the round before"
            made += [each["tokens"][node] for node in each["path"][1:]] + [each["own"]]
        assert made == tokens and arm["leaves"] is None and arm["tokens"] == len(tokens)
        assert arm["tau"] == pytest.approx((len(tokens) - 1) / len(arm["rounds"]))


def test_the_rounds_are_those_of_an_independent_replay(run, data, monkeypatch):
    kinds, arms = set(), iter(data["arms"])
    for label in run.drafters:
        for tree in run.trees:
            again, arm = Replay(run, 2, label, tree, monkeypatch), next(arms)
            temperature = getattr(again.drafter, "temperature", 1.0)
            for theirs, ours in zip(again.rounds, arm["rounds"], strict=True):
                kinds |= compare(theirs, ours, temperature)
    assert kinds == {"accepted", "rejected", "left out"}, "a kind of node is not tested: choose other flags"


def compare(theirs, ours, temperature):
    """A round of the replay against the page's -> the kinds of nodes that it has."""
    n, path = ours["verified"], ours["path"]
    assert (ours["tokens"][:n], ours["parents"][:n]) == (theirs["tokens"], theirs["parents"])
    assert path == theirs["path"]
    assert [ours["tokens"][node] for node in path[1:]] + [ours["own"]] == theirs["new"]
    # down the tree, each node below the one before, until the target's choice is no drafted child
    assert all(ours["parents"][below] == above for above, below in zip(path, path[1:]))
    assert ours["own"] not in [ours["tokens"][node] for node in range(1, n) if ours["parents"][node] == path[-1]]
    # what is rejected was drafted, verified and not accepted
    rejected = {path_to(theirs, node) for node in range(1, n)} - {path_to(theirs, node) for node in theirs["path"]}
    assert rejected == {path_to(ours, node) for node in range(1, n) if node not in path}
    # the drafter's probability is softmax(logits / temperature); there is none where it was not asked
    p_draft = {line: (row / temperature).softmax(-1) for line, row in theirs["logits"].items()}
    assert ours["p"][0] is None
    for node in range(1, len(ours["tokens"])):
        *above, token = path_to(ours, node)
        p = pytest.approx(p_draft[tuple(above)][token].item(), abs=1e-4) if theirs["asked"] else None
        assert ours["p"][node] == p
    # behind the verified ones: what the drafter was asked to continue, and the builder left out;
    # a token of no probability is no proposal
    proposed = {(*line, token) for line, p in p_draft.items() for token in (p > 0).nonzero().flatten().tolist()}
    left = {path_to(ours, node) for node in range(n, len(ours["tokens"]))}
    assert left == theirs["asked"] & proposed - {path_to(theirs, node) for node in range(n)}
    named = {"accepted": len(path) > 1, "rejected": rejected, "left out": left}
    return {kind for kind, found in named.items() if found}


def test_texts_of_nodes_are_their_tokens(run, data):
    for arm in data["arms"]:
        for each in arm["rounds"]:
            assert each["texts"] == [run.tokenizer.decode([token]) for token in each["tokens"]]
            assert each["choice"] == run.tokenizer.decode([each["own"]])


def test_the_names_of_tokens_keep_their_space():
    """A tokenizer that drops the space of a first token, as sentencepiece's do."""
    words = {1: " a", 2: " dog", 3: "s"}

    def spaceless(text, **more):
        return {"input_ids": [1]}
    spaceless.decode = lambda ids: "".join(words[i] for i in ids).removeprefix(" ")
    name = rounds.namer(spaceless)
    assert [name(i) for i in words] == [" a", " dog", "s"]


def test_the_text_goes_on_behind_the_prompt(run, monkeypatch):
    """A tokenizer whose texts lack their first character: the prompt lacks one, what follows it does not."""
    whole = run.tokenizer.decode(plain_tokens(run, 2), skip_special_tokens=True)
    made = SimpleNamespace(decode=lambda ids, **more: whole_decode(ids, **more)[1:])
    whole_decode = run.tokenizer.decode
    monkeypatch.setattr(rounds, "namer", lambda tokenizer: str)
    monkeypatch.setattr(run, "tokenizer", made)
    arm = decode(run)
    assert arm["first"] + "".join(each["accepted"] + each["bonus"] for each in arm["rounds"]) == whole


def test_half_characters_wait_for_their_other_half(run, monkeypatch):
    """Each character is two tokens long, and stands where its second token does."""
    half = SimpleNamespace(decode=lambda ids, **more: "é" * (len(ids) // 2) + "\ufffd" * (len(ids) % 2))
    monkeypatch.setattr(rounds, "namer", lambda tokenizer: str)
    monkeypatch.setattr(run, "tokenizer", half)
    arm, read = decode(run), len(run.prompts[1][1]) + 1
    characters = read // 2
    assert arm["first"] == "é" * (characters - (read - 1) // 2)
    for each in arm["rounds"]:
        for key, tokens in (("accepted", len(each["path"]) - 1), ("bonus", 1)):
            read += tokens
            assert each[key] == "é" * (read // 2 - characters)
            characters = read // 2


def test_the_path_is_found_among_equal_tokens():
    row = torch.tensor
    notes = rounds.Notes(lambda expand, root: verify.Tree(row([7, 5, 4, 5]), row([-1, 0, 0, 2])))
    notes(SimpleNamespace(out=bench.Record()), row([7]))
    notes.tell([4, 5, 9], 2)
    assert notes.rounds[0]["path"] == [0, 2, 3] and notes.rounds[0]["own"] == 9


def test_an_output_that_ends_within_an_accepted_run_has_no_choice(run, data, monkeypatch):
    """The end-of-text token is one that the drafter proposed."""
    tokens = plain_tokens(run, 2)
    arm = data["arms"][0]
    accepted = [each["tokens"][node] for each in arm["rounds"] for node in each["path"][1:]]
    own = [tokens[0]] + [each["own"] for each in arm["rounds"]]
    end = next(token for token in accepted if token not in own)
    monkeypatch.setattr(run.model.generation_config, "eos_token_id", end)
    arm = decode(run)
    last = arm["rounds"][-1]
    assert last["own"] is last["choice"] is None and last["bonus"] == ""
    assert last["tokens"][last["path"][-1]] == end and arm["tokens"] == tokens.index(end) + 1


def test_nodes_by_hand():
    """Two nodes verified, one left out with its child, an absent one, and what was asked behind no probability."""
    row = torch.tensor
    calls = [(row([7]), [-1], row([[0.5, 0.3, 0.2, 0.0]])),
             (row([0, 1, 3]), [0, 0, 0], row([[0.0, 0.25, 0.75, 0.0], [0.0, 0.0, 0.9, 0.1], [1.0, 0.0, 0.0, 0.0]])),
             (row([2, 0]), [2, 3], row([[1.0, 0.0, 0.0, 0.0]] * 2))]
    tree = verify.Tree(row([7, 0, 3, 2]), row([-1, 0, -1, 1]))
    nodes = rounds.nodes_of(tree, calls)
    assert nodes["tokens"] == [7, 0, 2, 1, 2] and nodes["parents"] == [-1, 0, 1, 0, 3] and nodes["verified"] == 3
    assert nodes["p"] == pytest.approx([None, 0.5, 0.75, 0.3, 0.9], abs=1e-4)
    # a cascade's own chain, drawn and not
    chain, drawn = verify.Tree(row([7, 1, 2]), row([-1, 0, 1])), row([[0.1, 0.2, 0.7], [0.3, 0.4, 0.3]])
    assert rounds.nodes_of(chain, [])["p"] == [None, None, None]
    assert rounds.nodes_of(chain._replace(p_draft=drawn), [])["p"] == pytest.approx([None, 0.2, 0.3])
    assert [rounds.leaves([1, 2, 3], other) for other in ([1, 2, 3], [1, 5, 3], [1, 2])] == [None, 2, 3]


def test_milliseconds_are_those_of_the_round(run, monkeypatch):
    """By a clock that only parts of a round move: forwards of drafter and target, the commit, and our notes."""
    now, asked = [0.0], []
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def takes(where, name, seconds, note=lambda: None):
        function = getattr(where, name)

        def slow(*args, **more):
            note()
            now[0] += seconds
            return function(*args, **more)
        monkeypatch.setattr(where, name, slow)
    drafter = run.drafters["glide"]
    takes(drafter, "begin", 0.5, lambda: asked.append(0))
    takes(drafter, "expand", 3, lambda: asked.append(asked.pop() + 1))
    takes(run.target, "forward", 5)
    takes(run.target, "commit", 0.25)
    takes(rounds, "nodes_of", 1000)
    takes(rounds, "add_left_out", 1000)
    arm = next(arm for arm in bench.arms_of(run) if arm.drafter == "glide" and arm.build)
    _, ids, limit = run.prompts[0]
    plain = rounds.timed(arm.decode(ids, 1))
    assert plain.seconds == 5.25, "the prefill's forward and commit"
    asked.clear()
    found = rounds.arm_data(run, arm, ids, limit, plain)
    assert len(asked) == len(found["rounds"]) > 1 and found["prefill_ms"] == 5250
    for each, times in zip(found["rounds"], asked):
        assert each["ms"] == pytest.approx({"draft": 500 + 3000 * times, "verify": 5000, "other": 250})
    spent = 5.25 + sum(sum(each["ms"].values()) for each in found["rounds"]) / 1000
    assert found["speed"] == pytest.approx(limit / spent)
    assert found["speedup"] == pytest.approx(limit / spent / (1 / 5.25))


def test_milliseconds_by_the_machines_clock(data):
    for arm in data["arms"]:
        for each in arm["rounds"]:
            assert set(each["ms"]) == {"draft", "verify", "other"} and all(ms >= 0 for ms in each["ms"].values())
        spent = arm["prefill_ms"] + sum(sum(each["ms"].values()) for each in arm["rounds"])
        # the loop's last step, after the last round, belongs to none
        assert arm["tokens"] / arm["speed"] * 1e3 == pytest.approx(spent, rel=0.01)
    plain = data["plain"]
    assert plain["tokens"] == 14 and plain["step_ms"] > 0
    assert all(arm["speedup"] == pytest.approx(arm["speed"] / plain["speed"]) for arm in data["arms"])


# ---------------------------------------------------------------- the file
class Scripts(HTMLParser):
    """The texts of a page's script elements, as a browser finds their ends, and all tags that it sees."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self.texts = [], None, {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "script":
            self.inside = dict(attributes).get("id", "page")
            self.texts[self.inside] = ""

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, text):
        if self.inside:
            self.texts[self.inside] += text


NASTY = ["</script><img src=x onerror=alert(1)>", "<!--", "<script>", '"', "'", "\\", "\\u003c", "&lt;", "\x00",
         "\x1b[31m", "\u2028", "\u202e", "\ufffd", "\ud83d", "é", "\n\t", "", rounds.PLACEHOLDER]


class Hostile:
    """The run's tokenizer, but each token is one of the nasty texts."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, *args, **more):
        return self.tokenizer(*args, **more)

    def decode(self, ids, **more):
        return "".join(NASTY[i % len(NASTY)] for i in ids)


def test_whatever_a_model_writes_stays_in_its_place(run, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "tokenizer", Hostile(run.tokenizer))
    data = {"target": NASTY[0], "arms": [decode(run)], "nasty": NASTY}
    text = rounds.page(data, TEMPLATE)
    (tmp_path / "page.html").write_text(text, encoding="utf-8")             # half of a pair has no UTF-8
    assert text.count("</script") == TEMPLATE.count("</script") == 2
    there, before = Scripts(text), Scripts(TEMPLATE)
    assert there.tags == before.tags and "<" not in there.texts["data"]
    assert there.texts["page"] == before.texts["page"]
    assert json.loads(there.texts["data"]) == data
    assert any(NASTY[0] in name for arm in data["arms"] for each in arm["rounds"] for name in each["texts"])


def test_the_page_asks_for_nothing_and_writes_no_markup():
    assert not re.findall(r"https?:", TEMPLATE.replace("http://www.w3.org/2000/svg", ""))
    assert "default-src 'none'" in TEMPLATE and not re.findall(r"\b(src|srcset|@import|url)\s*[=(]", TEMPLATE)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(", TEMPLATE)
    for wanted in ("prefers-color-scheme: dark", "focus-visible", "aria-label", 'name="viewport"'):
        assert wanted in TEMPLATE


def test_from_the_command_to_the_file(run, data, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "Run", lambda flags: run if flags == FLAGS else pytest.fail(f"{flags}"))
    monkeypatch.setattr(rounds, "page_data", lambda run, number: data if number == 2 else pytest.fail(f"{number}"))
    out = tmp_path / "a.html"
    assert rounds.main([*FLAGS, "--prompt", "2", "--out", str(out)]) == 0
    assert "4 arms" in capsys.readouterr().out
    there = json.loads(Scripts(out.read_text(encoding="utf-8")).texts["data"])
    assert there == data and there["prompt_number"] == 2
    assert "--tree chain 'eagle2(total=5, depth=3, expanded=3)'" in data["command"]
    assert data["command"].endswith(f"--prompt 2 --out {out}")
    assert (data["target"], data["dtype"], data["device"]) == (run.a.target, "float32", "cpu")


@pytest.mark.parametrize("argv, said", [
    (["--out", "nowhere/a.html"], "there is no folder nowhere"),
    (["--out", "."], "is a folder: name a file"),
    (["--out", "a.html/b.html"], "there is no folder a.html"),
    (["--prompt", "two"], "invalid int value: 'two'"),
    (["--prompt", "0"], "--prompt is 0: there are 2 prompts"),
    (["--prompt", "3"], "--prompt is 3: there are 2 prompts"),
])
def test_mistakes_are_one_sentence(run, monkeypatch, tmp_path, capsys, argv, said):
    monkeypatch.setattr(bench, "Run", lambda flags: run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.html").write_text("")
    assert rounds.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("figures/rounds.py: ") and said in error and error.count("\n") == 1
    assert (tmp_path / "a.html").read_text() == "" and len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_said(run, monkeypatch, tmp_path, capsys):
    def full(path, write):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(bench, "Run", lambda flags: run)
    monkeypatch.setattr(rounds.train, "write_atomically", full)
    monkeypatch.setattr(rounds, "page_data", lambda run, number: {"arms": []})
    assert rounds.main(["--out", str(tmp_path / "a.html")]) == 2
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    monkeypatch.setattr(bench, "Run", lambda flags: bench.check(bench.parser().parse_args(flags)))
    assert rounds.main(["--drafter", "nobody", "--out", str(tmp_path / "a.html")]) == 2
    assert "there is no drafter" in capsys.readouterr().err
