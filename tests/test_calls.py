"""Drafters and trees named as calls: what is read, what is refused, and that a refusal says what the function takes."""
import inspect
import random
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import bench
import cape
import pct
from verify import UserError

DRAFTERS = {"glide": bench.load_drafter, "maxgram": bench.load_cascade, "cascade": bench.load_cascade}


def read(text, functions=bench.TREES):
    return bench.read_call(text, functions, "tree")


@pytest.mark.parametrize("text, name, settings, label", [
    ("pct", "pct", {}, "pct"),
    ("pct()", "pct", {}, "pct"),
    ("pct(width=7, leaf=0)", "pct", {"width": 7, "leaf": 0}, "pct(width=7, leaf=0)"),
    ("  pct( width =7,leaf= 0 , ) ", "pct", {"width": 7, "leaf": 0}, "pct(width=7, leaf=0)"),
    ("pct-cost", "pct-cost", {}, "pct-cost"),
    ("pct_cost(cost=0.1)", "pct-cost", {"cost": 0.1}, "pct-cost(cost=0.1)"),
    ("own_confidence(own=3e-1)", "own-confidence", {"own": 0.3}, "own-confidence(own=3e-1)"),
    ("cape(sizes=(7, 5), edges=(0.5,))", "cape", {"sizes": (7, 5), "edges": (0.5,)}, "cape(sizes=(7,5), edges=(0.5,))"),
    ("cape(sizes=(3,), edges=())", "cape", {"sizes": (3,), "edges": ()}, "cape(sizes=(3,), edges=())"),
    ("cape(sizes=[3], edges=[])", "cape", {"sizes": [3], "edges": []}, "cape(sizes=[3], edges=[])"),
    ("fixed(size=4)", "fixed", {"size": 4}, "fixed(size=4)"),
])
def test_trees(text, name, settings, label):
    call = read(text)
    assert call == (name, bench.TREES[name], [], settings, label)


@pytest.mark.parametrize("text, words, settings", [
    ("cascade(base, small, maxgram)", ["base", "small", "maxgram"], {}),
    ("cascade(base,small,k=(8, 13, 1),lenience=3,costs=(0.3, 0.05))", ["base", "small"],
     {"k": (8, 13, 1), "lenience": 3, "costs": (0.3, 0.05)}),
    ("cascade(google/flan-t5-base, ./models/t5.small_2, /abs/x-y, maxgram, k=5)",
     ["google/flan-t5-base", "./models/t5.small_2", "/abs/x-y", "maxgram"], {"k": 5}),
])
def test_words_of_a_cascade_are_names_of_models(text, words, settings):
    call = read(text, DRAFTERS)
    assert (call.words, call.settings) == (words, settings)


def test_what_is_read_is_what_was_written():
    """Random calls of every tree: any order, spaces, dashes for underscores."""
    rng = random.Random(0)
    values = [0, 7, -2, 0.25, 1e-3, True, None, (), (1,), (8, 13, 1), [2, 3], "a"]
    for _ in range(500):
        name = rng.choice(list(bench.TREES))
        takes = list(bench.settings_of(bench.TREES[name]))
        settings = {key: rng.choice(values) for key in rng.sample(takes, rng.randint(0, len(takes)))}
        space = rng.choice(["", " ", "  "])
        inside = f"{space},{space}".join(f"{key}{space}={space}{value!r}" for key, value in settings.items())
        written = name.replace("-", rng.choice("-_"))
        call = read(f"{space}{written}{space}({space}{inside}{space}){space}")
        assert (call.name, call.settings) == (name, settings)
        assert read(call.label) == call, "a label is a call again"


def test_settings_are_the_functions_own():
    assert bench.settings_of(pct.pct) == {
        "cost": pct.COST, "width": pct.WIDTH, "depth": pct.DEPTH, "leaf": pct.LEAF, "max_nodes": pct.MAX_NODES}
    for name, function in bench.TREES.items():
        assert not {"expand", "root", "generator"} & set(bench.settings_of(function)), name
    assert bench.settings_of(bench.partial(cape.chain, gamma=3)) == {"gamma": 3}, "of a builder: what it has been given"
    assert set(bench.settings_of(bench.load_cascade)) == {"k", "lenience", "costs", "stop", "matching"}


@pytest.mark.parametrize("text", [
    "pct(wdith=7)", "pct(7)", "pct(width)", "pct(width=x)", "pct(width=)", "pct(=7)", "pct(width=7, width=8)", "pct(width=(1, 2)",
    "pct(width=7)x", "pct(width=7))(", "pct(expand=1)", "pct(**x)", "pct(width=__import__)", "pct(width=1+y)", "pct(a(b=2))", "pct(width==7)",
])
def test_a_mistake_lists_what_the_function_takes(text):
    with pytest.raises(UserError) as why:
        read(text)
    sentence = str(why.value)
    assert sentence.startswith(text) and "\n" not in sentence
    for key, value in bench.settings_of(pct.pct).items():
        assert f"{key}={value}" in sentence


@pytest.mark.parametrize("text, words", [
    ("cascade", "names of models, the largest first, k=None, lenience=1.0, costs=None"),
    ("cascade()", "names of models"), ("cascade(k=3)", "names of models"), ("cascade(base, depth=3)", "lenience=1.0"),
    ("cascade(base, k=(8, 13)", "names of models"), ("glide(width=3)", "glide takes no settings"), ("glide(base)", "no settings"),
    ("maxgram(base)", "maxgram takes"),
])
def test_mistakes_in_drafters(text, words):
    with pytest.raises(UserError, match=".*") as why:
        read(text, DRAFTERS)
    assert words in str(why.value)


@pytest.mark.parametrize("text", ["", "(", "bush", "pct width", "beam8", "pct,cape", "pct=3"])
def test_unknown_names_list_the_known(text):
    with pytest.raises(UserError) as why:
        read(text)
    assert all(name in str(why.value) for name in bench.TREES)


# ---------------------------------------------------------------- from the flags
def checked(*argv):
    return bench.check(bench.parser().parse_args([*argv, "--device", "cpu"]))


@pytest.mark.parametrize("text, words", [
    ("pct(width=0)", "width is 0"), ("pct(cost=2)", "between 0 and 1"), ("pct(cost='a')", "pct(cost='a')"), ("cape(gamma=33)", "chain of 33"),
    ("cape(sizes=(3, 1))", "edges need"), ("cape(edges=(0.6, 0.3, 0.8))", "ascend"), ("cape(sizes=(3, 1, -1, 2))", "fewer than no"),
    ("beam(gamma=100, width=8)", "800 nodes exceed"), ("chain(gamma=0)", "gamma is 0"), ("chain(gamma=1.5)", "chain(gamma=1.5)"),
    ("vct(width=4, depth=6)", "that fit"), ("own-confidence(own=7)", "between 0 and 1"), ("pct_cost(node_price=-1)", "not below zero"),
])
def test_settings_that_cannot_work_are_refused_before_anything_is_loaded(text, words):
    with pytest.raises(UserError) as why:
        checked("--tree", text)
    assert words in str(why.value) and str(why.value).startswith("--tree ") and "\n" not in str(why.value)


def test_every_tree_passes_as_it_is():
    _, trees = checked("--temperature", "1", "--tree", *bench.TREES)
    assert [tree.label for tree in trees] == list(bench.TREES)


@pytest.mark.parametrize("argv", [
    ["--tree", "cape", "cape"], ["--tree", "pct-cost", "pct_cost"], ["--tree", "pct(width=3)", "pct( width = 3 )"], ["--drafter", "glide", "glide"],
    ["--drafter", "cascade(base)", "cascade( base )"]])
def test_equal_labels_are_refused(argv):
    with pytest.raises(UserError, match="name each once"):
        checked(*argv)
    _, trees = checked("--tree", "pct", "pct(width=3)", "pct(width=4)")
    assert len({tree.label for tree in trees}) == 3


def test_drafters_are_what_the_checkpoint_holds(tmp_path):
    shipped = bench.drafters_in(ROOT / "checkpoints")
    assert {"edd", "glide", "vanilla", "vdm"} <= set(shipped) and not {"base", "small", "target"} & set(shipped)
    for name, kind in (("my_own", "edd"), ("edd-h9", "edd-h9")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "training.json").write_text(f'{{"kind": "{kind}"}}')
    assert set(bench.drafters_in(tmp_path)) == {"my-own", "edd-h9"}
    drafters, _ = checked("--checkpoint", str(tmp_path), "--drafter", "my_own", "edd_h9", "maxgram")
    assert [call.label for call in drafters] == ["my-own", "edd-h9", "maxgram"]
    assert bench.drafters_in(tmp_path / "my_own") == {"edd": tmp_path / "my_own"}, "a folder of one is called by its kind"
    with pytest.raises(UserError, match="choose among edd-h9 my-own maxgram cascade"):
        checked("--checkpoint", str(tmp_path), "--drafter", "glide")


def test_flags():
    """About twenty, each used; their defaults are the README's first command."""
    flags = [action.option_strings[-1] for action in bench.parser()._actions if action.dest != "help"]
    assert len(flags) == len(set(flags)) <= 27
    source = Path(inspect.getfile(bench)).read_text()
    for flag in flags:
        name = flag[2:].replace("-", "_")
        assert f"a.{name}" in source or f'"{name}"' in source, f"{flag} is not read"
    a = bench.parser().parse_args([])
    assert (a.drafter, a.tree, a.temperature, a.top_p, torch.dtype) == (["glide"], ["cape"], 0.0, 1.0, torch.dtype)
