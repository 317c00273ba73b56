"""Drafters and trees named as calls: what is read is what was written."""
import pytest

import bench
from runtime import calls, load
from runtime.errors import UserError

FUNCTIONS = {**bench.TREES, "glide": load.load_drafter, "maxgram": load.load_maxgram,
             "cascade": load.load_cascade, "mixture": load.load_mixture}

def read(text):
    return calls.read_call(text, FUNCTIONS, "tree")

@pytest.mark.parametrize("text, name, words, settings, label", [
    ("  pct_cost( width =7,cost= -1e-3 , ) ", "pct-cost", [], {"width": 7, "cost": -0.001},
     "pct-cost(width=7, cost=-0.001)"),
    ("cape(sizes=[2,3], edges=(1,), max_nodes=None)", "cape", [],
     {"sizes": [2, 3], "edges": (1,), "max_nodes": None},
     "cape(sizes=[2, 3], edges=(1,), max_nodes=None)"),
    ("cascade(google/flan-t5-base, ./models/t5.small_2, /abs/x-y,7B, k=(8,13))", "cascade",
     ["google/flan-t5-base", "./models/t5.small_2", "/abs/x-y", "7B"], {"k": (8, 13)},
     "cascade(google/flan-t5-base, ./models/t5.small_2, /abs/x-y, 7B, k=(8, 13))"),
    ("mixture('edd-h9',maxgram, bigram='a b')", "mixture", ["edd-h9", "maxgram"],
     {"bigram": "a b"}, "mixture(edd-h9, maxgram, bigram='a b')")])
def test_what_is_read_is_what_was_written(text, name, words, settings, label):
    """Names of models need no quotes, and a label is a call again."""
    call = read(text)
    assert call[:4] == (name, FUNCTIONS[name], words, settings) and call.label == label
    assert read(label) == call

@pytest.mark.parametrize("text", [
    "", "pct width=7)", "pct=3", "pct(7)", "pct(width=7)x", "pct(width=7", "pct(**x)",
    "pct(width=x)", "cascade", "maxgram(base)", "glide(raw=True)"])
def test_what_is_no_call_is_refused(text):
    with pytest.raises(UserError):
        read(text)
