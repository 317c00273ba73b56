"""Drafters and trees named as calls: what is read, what is refused, and that a refusal says what the function takes."""
import inspect
import random
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import bench
import pct
import verify
from runtime import calls, grams, load
from verify import UserError

FUNCTIONS = {**bench.TREES, "glide": load.load_drafter, "maxgram": load.load_cascade, "cascade": load.load_cascade, "beside": load.load_beside}

def read(text):
    return calls.read_call(text, FUNCTIONS, "tree")

@pytest.mark.parametrize("text, name, words, settings, label", [
    ("  pct( width =7,leaf= 0 , ) ", "pct", [], {"width": 7, "leaf": 0}, "pct(width=7, leaf=0)"),
    ("cascade(google/flan-t5-base, ./models/t5.small_2, /abs/x-y, k=5)", "cascade", ["google/flan-t5-base", "./models/t5.small_2", "/abs/x-y"],
     {"k": 5}, "cascade(google/flan-t5-base, ./models/t5.small_2, /abs/x-y, k=5)"),
    ("beside(glide( raw=True),maxgram, bigram='F')", "beside", ["glide(raw=True)", "maxgram"], {"bigram": "F"},
     "beside(glide(raw=True), maxgram, bigram='F')")])
def test_calls(text, name, words, settings, label):
    """Words of a cascade are names of models."""
    assert read(text) == (name, FUNCTIONS[name], words, settings, label)

def test_what_is_read_is_what_was_written():
    """Random calls of every tree: any order, spaces, dashes for underscores."""
    rng = random.Random(0)
    values = [0, 7, -2, 0.25, 1e-3, True, None, (), (1,), (8, 13, 1), [2, 3], "a"]
    for _ in range(100):
        name, space = rng.choice(list(bench.TREES)), rng.choice(["", " ", "  "])
        takes = list(calls.settings_of(bench.TREES[name]))
        settings = {key: rng.choice(values) for key in rng.sample(takes, rng.randint(0, len(takes)))}
        inside = f"{space},{space}".join(f"{key}{space}={space}{value!r}" for key, value in settings.items())
        call = read(f"{space}{name.replace('-', rng.choice('-_'))}{space}({space}{inside}{space}){space}")
        assert (call.name, call.settings) == (name, settings)
        assert read(call.label) == call, "a label is a call again"

LISTED = [f"{key}={value}" for key, value in calls.settings_of(pct.pct).items()]

@pytest.mark.parametrize("text, words", [*((f"pct({inside})", LISTED) for inside in (
        "wdith=7", "7", "width", "width=x", "width=7, width=8", "**x", "width=__import__")),
    ("pct(width=7)x", LISTED),
    ("cascade", ["names of models, the largest first, k=None, lenience=1.0, costs=None"]), ("cascade(base, depth=3)", ["lenience=1.0"]),
    ("glide(base)", ["glide takes raw=False, running=False"]), ("maxgram(base)", ["maxgram takes"]),
    ("beside", ["beside takes a neural drafter or a language model, then maxgram, bigram=None"]),
    *((text, FUNCTIONS) for text in ("", "bush", "pct width", "beam8", "pct,cape", "pct=3")),
    *((text, [f"{text}: a closing bracket ) is missing"]) for text in ("pct(width=7", "pct(width=(1, 2)", "cascade(base, k=(8, 13)", "pct(")),
    ("pct width=7)", ["pct width=7): an opening bracket ( is missing"])])
def test_a_mistake_says_what_fits(text, words):
    """What the function takes; the names that are known; which bracket is missing."""
    with pytest.raises(UserError) as why:
        read(text)
    assert all(word in str(why.value) for word in words) and "\n" not in str(why.value)
    assert words is FUNCTIONS or str(why.value).startswith(text)

# ---------------------------------------------------------------- from the flags
def checked(*argv):
    return bench.check(bench.parser().parse_args([*argv, "--device", "cpu"]))

def test_every_tree_passes_as_it_is():
    _, trees = checked("--temperature", "1", "--tree", *bench.TREES)
    assert [tree.label for tree in trees] == list(bench.TREES)
    with pytest.raises(UserError, match="nodes exceed the 63 that fit"):
        checked("--exact", "--tree", "beam(gamma=8, width=8)")

def test_drafters_are_what_the_checkpoint_holds(tmp_path):
    shipped = load.drafters_in(ROOT / "checkpoints")
    assert {"edd", "glide", "vanilla", "vdm"} <= set(shipped) and not {"base", "small", "target"} & set(shipped)
    for name, kind in (("my_own", "edd"), ("edd-h9", "edd-h9")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "training.json").write_text(f'{{"kind": "{kind}"}}')
    assert set(load.drafters_in(tmp_path)) == {"my-own", "edd-h9"}
    drafters, _ = checked("--checkpoint", str(tmp_path), "--drafter", "my_own", "edd_h9", "maxgram")
    assert [call.label for call in drafters] == ["my-own", "edd-h9", "maxgram"]
    assert load.drafters_in(tmp_path / "my_own") == {"edd": tmp_path / "my_own"}, "a folder of one is called by its kind"
    with pytest.raises(UserError, match="choose among edd-h9 my-own gemma4 eagle3 maxgram cascade"):
        checked("--checkpoint", str(tmp_path), "--drafter", "glide")

def test_a_language_model_drafts_trees(llama):
    """Each row is its own plain forward's over the path, in whatever steps and rounds; where its context ends, -inf."""
    rng = random.Random(0)
    for capacity in (None, 14):
        stage, text = load.Stage(verify.Target(llama, capacity)), []
        for _ in range(4):
            new, paths = [rng.randrange(12) for _ in range(rng.randint(1, 5))], []
            text += new
            stage.begin(verify.View(torch.tensor(new), len(text), {}, {}, new))
            for m in (1, 2, 3):                                     # the root, then nodes after any before them
                parents = [rng.randrange(len(paths)) if paths else -1 for _ in range(m)]
                tokens = [rng.randrange(12) for _ in range(m)]
                paths += [(paths[parent] if parent >= 0 else []) + [token] for token, parent in zip(tokens, parents)]
                rows = stage.expand(torch.tensor(tokens), parents)
                if len(text) + len(paths) > stage.target.capacity:
                    assert rows.isneginf().all() and rows.shape == (m, 12)
                    continue
                with torch.no_grad():
                    own = [llama(torch.tensor([text + path])).logits[0, -1] for path in paths[-m:]]
                torch.testing.assert_close(rows, torch.stack(own))
            stage.keep([0])
        stage.reset()
        assert stage.text == stage.target.ids == []

def test_agreement_is_scored_on_words_that_it_was_not_fitted_to():
    """In every second hundred of words a long match is right and a short one wrong, in the others the opposite."""
    judged = [(1 + 4 * (i % 2), 0.01, i % 2 == i // 100 % 2) for i in range(400)]
    assert grams.fit_agreement(judged, lambda length: 0.5)["log_loss"] > 2

def test_flags():
    """About twenty, each used, each with its default in --help; the defaults are the README's first command."""
    actions = [action for action in bench.parser()._actions if action.dest != "help"]
    source = Path(inspect.getfile(bench)).read_text()
    for action in actions:
        name = action.option_strings[-1][2:].replace("-", "_")
        assert f"a.{name}" in source or f'"{name}"' in source, f"{name} is not read"
        assert "(default: " in action.help, f"{name}: what is its default?"
    assert len(actions) <= 23
    a = bench.parser().parse_args([])
    assert (a.drafter, a.tree, a.temperature, a.top_p) == (["glide"], ["cape"], 0.0, 1.0)
