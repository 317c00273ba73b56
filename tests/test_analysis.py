"""figures/probe.py, each measurement against a count by hand; figures/batches.py, costs.py."""
# ruff: noqa: F811
from types import SimpleNamespace

import batches
import costs
import probe
import pytest
import torch
from conftest import plain, shared
from helpers import rows_of, write_rows

import bench
import verify

PROMPTS = [bench.Prompt("x", 0, [3, 1, 4, 1], 16), bench.Prompt("x", 1, [5, 9, 2], 1),
           bench.Prompt("y", 1, [2, 6, 5], 11)]

def flags(small, rows, *more):
    """Arguments of a program of figures/, which writes its rows there."""
    return ["--target", str(small / "model"), "--checkpoint", str(small / "drafters"), "--prompts",
            str(small / "prompts.jsonl"), "--device", "cpu", "--max-new-tokens", "6", "--json",
            str(rows), *more]

# ---------------------------------------------------------------- calibration and positions
class Guesser:
    """A drafter that knows a table p(next | token), half of it from the output it drafts for."""
    needs = {}

    def __init__(self, model, vocab=12):
        logits = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(3))
        for prompt in PROMPTS:
            text = plain(model, prompt.ids, prompt.limit)
            for token, after in zip(text[::2], text[1::2]):
                logits[token, after] += 2
        self.table = logits.softmax(-1)

    def expand(self, tokens, parents):
        return self.table[tokens]

    def nothing(self, *more):
        """Nothing is kept."""
    reset = begin = keep = nothing

def by_hand(model, table, length):
    """Chains of `length` over the plain output.

    -> [[(confidence, accepted?)] of each scored token] of each prompt
    """
    found = []
    for prompt in PROMPTS:
        text = prompt.ids + plain(model, prompt.ids, prompt.limit)
        at = len(prompt.ids)
        found.append([])
        while at < len(text) - 1:
            token, scored = text[at], []
            # The last token of an output is never a drafted one: a bonus follows.
            for i in range(min(length, len(text) - 2 - at)):
                probs = table[token]
                token = probs.argmax().item()
                scored.append((probs.max().item(), token == text[at + 1 + i]))
                if not scored[-1][1]:
                    break
            found[-1] += scored
            at += sum(accepted for _, accepted in scored) + 1
    return found

def test_calibration_scores_up_to_the_first_rejection(llama, monkeypatch):
    monkeypatch.setattr(probe, "CHAIN", 3)
    setup, guesser = SimpleNamespace(target=verify.Target(llama), eos=None), Guesser(llama)
    (row,), _ = probe.calibration(setup, {"guesser": guesser}, PROMPTS)
    each = by_hand(llama, guesser.table, 3)
    scored = sum(each, [])
    assert len(scored) > 15 and {accepted for _, accepted in scored} == {True, False}
    error = 0                                                  # over ten bins, (0, .1] ... (.9, 1]
    for b in range(10):
        inside = [[pair for pair in one if b / 10 < pair[0] <= (b + 1) / 10] for one in each]
        together = sum(inside, [])
        error += abs(sum(accepted - p for p, accepted in together))
        shares = [sum(ok for _, ok in one) / len(one) if one else None for one in inside]
        assert [one[f"bin {10 * b}"] for one in row["by_prompt"]] == shares
        share = sum(ok for _, ok in together) / len(together) if together else None
        assert row[f"bin {10 * b}"] == (pytest.approx(share) if together else None)
    assert row["ece"] == pytest.approx(error / len(scored))

def test_positions_against_a_count_by_hand():
    """Rounds of chains made up: which positions were drafted, scored, accepted."""
    chain = verify.Round([], [], [9, 5, 6, 7], [-1, 0, 1, 2])
    ends = [([5, 6, 9], 2), ([4], 0), ([5, 6, 7, 8], 3), ([5, 6], 3)]
    rounds = [chain._replace(new=new, path=list(range(1 + accepted))) for new, accepted in ends]
    # Position 3 of the last round was never scored: the output ended before it.
    assert probe.positions_of(rounds) == {"position 1": 3 / 4, "position 2": 3 / 4,
                                          "position 3": 1 / 3}

@pytest.mark.parametrize("name, more, labels, key", [
    ("calibration", ["--drafter", "glide", "glide(temperature=1)"],
     ["glide", "glide(temperature=1)"], "ece"),
    ("positions", ["--drafter", "cascade(base, k=4)"], ["cascade(base, k=4)"], "position 1"),
    ("ewif", [], [row["drafter"] for row in probe.table_1()], "ewif"),
    ("lookup", [], [f"layer {i}" for i in range(4)], "before")])
def test_a_measurement_as_a_program(name, more, labels, key, small, tmp_path):
    path = tmp_path / "r.jsonl"
    prompts = write_rows(tmp_path / "p.jsonl", 4 * [{"prompt": "return a + b"}])
    assert probe.main([name, *flags(small, path, "--prompts", str(prompts), *more)]) == 0
    rows = rows_of(path)
    assert [row["drafter"] for row in rows] == labels and all(key in row for row in rows)
    assert all({"commit", "date", "machine", "command"} <= row.keys() for row in rows)
    assert all(len(row.get("by_prompt", "1234")) == 4 for row in rows)

@pytest.mark.parametrize("program", [probe, batches, costs])
def test_help_names_its_own_flags(program, capsys):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    said = capsys.readouterr().out
    assert "--target" in said and f"python figures/{program.__name__}.py" in said

# ---------------------------------------------------------------- lookup: which layer to read
def test_the_mass_on_what_followed_by_hand():
    """Tokens 5 7 5 9 7 5.

    The second 5 looks at the 7 after the first, the second 7 at the 5, the third 5 at 7 and 9.
    """
    ids = torch.tensor([5, 7, 5, 9, 7, 5])
    attention = torch.rand(2, 6, 6).tril()
    expected = [attention[:, 2, 1], attention[:, 4, 2], attention[:, 5, 1] + attention[:, 5, 3]]
    for new, counted in ((4, expected), (2, expected[1:])):
        (mass,) = probe.mass_there([attention], ids, new)
        assert torch.allclose(mass, torch.stack(counted, 1))

def test_the_linear_map_names_the_token_before():
    """States that hold it in a code of its own name it always, states at random as chance does."""
    torch.manual_seed(0)
    texts = [torch.randint(5, (30,)) for _ in range(40)]
    table = torch.randn(5, 6, dtype=torch.float64)
    told = [torch.cat((table[:1], table[ids[:-1]])) for ids in texts]
    assert probe.named_before(told, texts) == 1.0
    assert abs(probe.named_before([torch.randn(30, 6) for _ in texts], texts) - 0.2) < 0.08

# ---------------------------------------------------------------- copies of a prompt, costs
def test_copies_of_a_prompt_decode_as_one_does(small, tmp_path):
    """The target and the drafter compute each copy; tokens and rounds are those of one."""
    sizes = {32: [], 16: []}       # {width of target, of drafter: the batch of each forward}

    def note(module, given, out):
        if isinstance(module, torch.nn.Linear) and module.out_features == 300:
            sizes[module.in_features].append(len(out))
    path = tmp_path / "r.jsonl"
    hook = torch.nn.modules.module.register_module_forward_hook(note)
    argv = flags(small, path, "--batches", "3", "1", "--limit", "1", "--tree", "cape")
    assert batches.main(argv) == 0
    hook.remove()
    one, three = rows_of(path)
    assert all({*made} == {1, 3} for made in sizes.values())
    assert (one["batch"], three["batch"]) == (1, 3) and one["tau"] == three["tau"] >= 1
    assert one["lossless"] is three["lossless"] is True
    assert one["glide"] / one["plain"] == pytest.approx(one["by_prompt"][0]["speedup"])

def test_the_bytes_of_a_step_and_a_row_for_each_size(small, tmp_path, monkeypatch):
    """And from which alpha a chain pays."""
    monkeypatch.setattr(costs, "NODES", (1, 4))
    path = tmp_path / "r.jsonl"
    assert costs.main(flags(small, path, "--contexts", "20")) == 0
    one, four, *even = rows_of(path)
    assert (one["drafter"], one["ratio"], four["drafter"]) == ("1 tokens", 1.0, "4 tokens")
    assert four["ratio"] == pytest.approx(four["ms"] / one["ms"])
    assert [row["drafter"] for row in even[:2]] == ["a chain of 1", "a chain of 3"]
    assert even[1]["steps"] == pytest.approx(four["ratio"] + 3 * 0.06)
    model = shared("llama")        # float64; three layers of four heads of eight, an own head
    c = model.config
    linear = 3 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
    weights = linear + 32 * c.vocab_size + 32
    assert costs.step_bytes(model, 10) == 8 * (weights + 2 * 3 * 32 * 10)
    assert costs.least_alpha(1.0, 5) == 0 and costs.least_alpha(6.5, 5) is None
    assert costs.least_alpha(1.75, 2) == 0.5                   # 1 + .5 + .25
