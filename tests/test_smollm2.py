"""SmolLM2: what a fingerprint says of rounded and tuned weights; the real model, where it is."""
import copy

import torch

import bench
from conftest import tiny
from runtime import load
from test_bench import args, rows_of, save, small  # noqa: F401


def changed(model, change):
    """A copy of the model, change(weight) in the place of each matrix."""
    other = copy.deepcopy(model)
    for weight in other.parameters():
        if weight.ndim == 2:
            weight.data = change(weight.data)
    return other

def four_bits(weight):
    """A matrix (n, d), each row rounded to 16 levels between its least and its greatest weight."""
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    step = (high - low) / 15
    return low + ((weight - low) / step).round() * step

def tuned_by(share):
    """A change that moves each weight by about `share` of its size."""
    def change(weight):
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=weight.dtype)
        return weight + share * weight.std() * noise
    return change

# ---------------------------------------------------------------- the same, a relative, another
def test_a_fingerprint_tells_rounded_weights_from_another_models():
    model = tiny("llama")
    mine = load.fingerprint(model)
    others = {
        "the same": [model, changed(model, lambda weight: weight.bfloat16().double())],
        "a relative": [changed(model, four_bits), changed(model, tuned_by(0.05))],
        "another": [tiny("llama", seed=1), changed(model, tuned_by(0.5)), tiny("llama", num_hidden_layers=2)],
    }
    for expected, models in others.items():
        for other in models:
            its = load.fingerprint(other)
            assert load.relation(mine, its) == load.relation(its, mine) == expected
            assert load.same_target(mine, its) == (expected == "the same")
    # Near weights are no relatives where tokens mean something else, nor where they are few.
    near = load.fingerprint(others["a relative"][0])
    assert load.relation(mine | {"vocabulary": "a"}, near | {"vocabulary": "b"}) == "another"
    few = near | {"probe": dict(list(near["probe"].items())[:4])}
    assert load.relation(mine, few) == "another"

def test_a_drafter_serves_its_targets_relative(small, tmp_path, capsys):  # noqa: F811
    model, tokenizer = load.load_target(small / "model", "float32", "cpu")
    save(tmp_path / "rounded", changed(model, four_bits), tokenizer)
    argv = args(small, "--target", str(tmp_path / "rounded"), "--drafter", "glide", "--tree", "cape",
                "--json", str(tmp_path / "rows.jsonl"))
    assert bench.main(argv) == 0
    assert "glide was trained for a relative of this target" in capsys.readouterr().out
    assert all(row["lossless"] for row in rows_of(tmp_path / "rows.jsonl"))
