"""Drafters and trees named as calls: what is read, what is refused, and that a refusal says what the function takes."""
import random

import pytest
import torch
from conftest import ROOT

import bench
import verify
from runtime import calls, load
from verify import UserError

FUNCTIONS = {**bench.TREES, "glide": load.load_drafter, "maxgram": load.load_cascade, "cascade": load.load_cascade,
             "mixture": load.load_mixture}

def read(text):
    return calls.read_call(text, FUNCTIONS, "tree")

@pytest.mark.parametrize("text, name, words, settings, label", [
    ("  pct( width =7,leaf= 0 , ) ", "pct", [], {"width": 7, "leaf": 0}, "pct(width=7, leaf=0)"),
    ("cascade(google/flan-t5-base, ./models/t5.small_2, /abs/x-y,7B, k=(8,13))", "cascade",
     ["google/flan-t5-base", "./models/t5.small_2", "/abs/x-y", "7B"], {"k": (8, 13)},
     "cascade(google/flan-t5-base, ./models/t5.small_2, /abs/x-y, 7B, k=(8, 13))"),
    ("mixture(edd-h9( raw=True),maxgram, bigram='a b')", "mixture", ["edd_h9(raw=True)", "maxgram"], {"bigram": "a b"},
     "mixture(edd_h9(raw=True), maxgram, bigram='a b')")])
def test_calls(text, name, words, settings, label):
    """Names of models need no quotes, and may be calls themselves."""
    call = read(text)
    assert (call.name, call.function, call.words, call.settings, call.label) == (name, FUNCTIONS[name], words, settings, label)
    assert read(label) == call and settings.keys() <= call.defaults.keys()

def test_what_is_read_is_what_was_written():
    """Random calls of every tree: any order, spaces, dashes for underscores."""
    rng = random.Random(0)
    values = [0, 7, -2, 0.25, 1e-3, True, None, (), (1,), (8, 13, 1), [2, 3], "a"]
    for _ in range(100):
        name, space = rng.choice(list(bench.TREES)), rng.choice(["", " ", "  "])
        takes = list(read(name).defaults)
        settings = {key: rng.choice(values) for key in rng.sample(takes, rng.randint(0, len(takes)))}
        inside = f"{space},{space}".join(f"{key}{space}={space}{value!r}" for key, value in settings.items())
        call = read(f"{space}{name.replace('-', rng.choice('-_'))}{space}({space}{inside}{space}){space}")
        assert (call.name, call.settings) == (name, settings)
        assert read(call.label) == call, "a label is a call again"

@pytest.mark.parametrize("text, words", [
    *((f"pct{inside}", "pct takes cost=0.05, width=5, depth=10, leaf=") for inside in (
        "(wdith=7)", "(7)", "(width)", "(width=x)", "(width=7, width=8)", "(**x)", "(width=7", "(width=(1, 2)", "(", "(width=7)x", "(width=7))")),
    ("cascade", "names of models, the largest first, k=None, lenience=1.0, costs=None"), ("cascade(base, depth=3)", "lenience=1.0"),
    ("glide(base)", "glide takes raw=False"), ("maxgram(base)", "maxgram takes"),
    ("mixture", "mixture takes a neural drafter or a language model, then maxgram, bigram=None"),
    *((text, "choose among chain drawn cape") for text in ("", "bush", "pct width", "pct width=7)", "beam8", "pct,cape", "pct=3"))])
def test_a_mistake_says_what_fits(text, words):
    """What the function takes, or the names that are known."""
    with pytest.raises(UserError) as why:
        read(text)
    assert words in str(why.value) and "\n" not in str(why.value)

# ---------------------------------------------------------------- from the flags
def checked(*argv):
    return bench.check(bench.parser().parse_args([*argv, "--device", "cpu"]))

def test_every_tree_passes_as_it_is():
    _, trees = checked("--temperature", "1", "--tree", *bench.TREES)
    assert [tree.label for tree in trees] == list(bench.TREES)
    with pytest.raises(UserError, match="nodes exceed the 511 that fit"):
        checked("--tree", "vct(width=8, depth=3)")

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
    with pytest.raises(UserError, match="choose among edd-h9 my-own maxgram cascade mixture"):
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

def test_flags():
    """Each with its default in --help; the defaults are the README's first command."""
    actions = [action for action in bench.parser()._actions if action.dest != "help"]
    assert len(actions) <= 22 and all("(default: " in action.help for action in actions)
    a = bench.parser().parse_args([])
    assert (a.drafter, a.tree, a.temperature, a.top_p) == (["glide"], ["cape"], 0.0, 1.0)
