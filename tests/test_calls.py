"""Drafters and trees named as calls: what is read is what was written."""
import random

import pytest

import bench
from runtime import calls, load
from runtime.errors import UserError

FUNCTIONS = {**bench.TREES, "glide": load.load_drafter, "maxgram": load.load_cascade,
             "cascade": load.load_cascade, "mixture": load.load_mixture}

def read(text):
    return calls.read_call(text, FUNCTIONS, "tree")

@pytest.mark.parametrize("text, name, words, settings, label", [
    ("  pct( width =7,leaf= 0 , ) ", "pct", [], {"width": 7, "leaf": 0}, "pct(width=7, leaf=0)"),
    ("glide(temperature=1)", "glide", [], {"temperature": 1}, "glide(temperature=1)"),
    ("cascade(google/flan-t5-base, ./models/t5.small_2, /abs/x-y,7B, k=(8,13))", "cascade",
     ["google/flan-t5-base", "./models/t5.small_2", "/abs/x-y", "7B"], {"k": (8, 13)},
     "cascade(google/flan-t5-base, ./models/t5.small_2, /abs/x-y, 7B, k=(8, 13))"),
    ("mixture('edd-h9',maxgram, bigram='a b')", "mixture", ["edd-h9", "maxgram"],
     {"bigram": "a b"}, "mixture(edd-h9, maxgram, bigram='a b')")])
def test_names_of_models_need_no_quotes(text, name, words, settings, label):
    call = read(text)
    assert call[:4] == (name, FUNCTIONS[name], words, settings) and call.label == label
    assert read(label) == call and settings.keys() <= call.defaults.keys()

def test_what_is_read_is_what_was_written():
    """Random calls of every tree: any order, spaces, dashes for underscores."""
    rng = random.Random(0)
    values = [0, 7, -2, 0.25, 1e-3, True, None, (), (1,), (8, 13, 1), [2, 3], "a"]
    for _ in range(100):
        name, space = rng.choice(list(bench.TREES)), rng.choice(["", " ", "  "])
        takes = list(read(name).defaults)
        keys = rng.sample(takes, rng.randint(0, len(takes)))
        settings = {key: rng.choice(values) for key in keys}
        inside = [f"{key}{space}={space}{value!r}" for key, value in settings.items()]
        inside = f"{space},{space}".join(inside)
        written = name.replace("-", rng.choice("-_"))
        call = read(f"{space}{written}{space}({space}{inside}{space}){space}")
        assert (call.name, call.settings) == (name, settings)
        assert read(call.label) == call, "a label is a call again"

@pytest.mark.parametrize("text", ["", "pct width", "pct width=7)", "pct,cape", "pct=3", "pct(7)",
                                  "pct(width=7)x", "pct(width=7", "pct(**x)", "pct(width=x)",
                                  "pct(wdith=7)", "cascade", "maxgram(base)", "glide(raw=True)"])
def test_what_is_no_call_is_refused(text):
    with pytest.raises(UserError):
        read(text)
