"""figures/probe.py, each measurement against a count by hand; figures/batches.py, costs.py."""
from functools import partial
from types import SimpleNamespace

import batches
import costs
import probe
import pytest
import torch
from conftest import plain, shared
from test_bench import args, rows_of, small  # noqa: F401 (small: a fixture)

import verify
from runtime import measure

class Guesser:
    """A drafter that knows a table p(next | token), half of it from the output that it drafts for."""
    needs = {}
    temperature = 0.7

    def __init__(self, run, vocab=12):
        self.table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(3))
        for _, ids, limit in run.prompts:
            text = plain(run.model, ids, limit)
            for token, after in zip(text[::2], text[1::2]):
                self.table[token, after] += 2

    def expand(self, tokens, parents):
        return self.table[tokens]

    def reset(self, *more):
        """Nothing is kept."""
    begin = keep = reset

def decode(target, drafter, build, ids, limit):
    """What bench.Run.decode gives, without a clock."""
    out = verify.generate(target, drafter, build, ids, limit)
    return measure.Record(out.tokens, out.rounds)

@pytest.fixture(scope="module")
def run():
    """What a measurement asks of bench.Run: prompts, drafters, and a way to decode."""
    model = shared("llama")
    made = SimpleNamespace(model=model, prompts=[("x", [3, 1, 4, 1], 16), ("x", [5, 9, 2], 1), ("y", [2, 6, 5], 11)])
    made.a = SimpleNamespace(target="tiny", temperature=0.0, seed=0)
    made.decode = partial(decode, verify.Target(model))
    made.drafters = {"guesser": Guesser(made)}
    return made

def by_hand(run, drafter, length):
    """Chains of `length` over the plain output -> [[(confidence, raw confidence, accepted?)] of each scored token] of each prompt."""
    found = []
    for _, ids, limit in run.prompts:
        text, at = ids + plain(run.model, ids, limit), len(ids)
        found.append([])
        while at < len(text) - 1:
            token, scored = text[at], []
            # The last token of an output is never a drafted one: a bonus follows.
            for i in range(min(length, len(text) - 2 - at)):
                probs, raw = [(drafter.table[token] / T).softmax(-1) for T in (drafter.temperature, 1.0)]
                token = probs.argmax().item()
                scored.append((probs.max().item(), raw.max().item(), token == text[at + 1 + i]))
                if not scored[-1][2]:
                    break
            found[-1] += scored
            at += sum(accepted for *_, accepted in scored) + 1
    return found

def error_by_hand(pairs):
    """Expected calibration error over ten bins, (0, .1] ... (.9, 1]."""
    error = 0
    for b in range(10):
        inside = [pair for pair in pairs if b / 10 < pair[0] <= (b + 1) / 10]
        error += abs(sum(accepted for _, accepted in inside) - sum(p for p, _ in inside))
    return error / len(pairs)

def test_calibration_scores_up_to_the_first_rejection(run, monkeypatch):
    monkeypatch.setattr(probe, "CHAIN", 3)
    (row,), _ = probe.calibration(run)
    each = by_hand(run, run.drafters["guesser"], 3)
    scored = sum(each, [])
    assert len(scored) > 15 and {accepted for *_, accepted in scored} == {True, False}
    assert row["ece"] == pytest.approx(error_by_hand([(p, accepted) for p, _, accepted in scored]))
    assert row["ece_raw"] == pytest.approx(error_by_hand([(p, accepted) for _, p, accepted in scored])) and row["ece_raw"] != row["ece"]
    for b in range(10):
        inside = [[accepted for p, _, accepted in one if b / 10 < p <= (b + 1) / 10] for one in each]
        assert row["by_prompt"][f"bin {10 * b}"] == [sum(oks) / len(oks) if oks else None for oks in inside]
        together = sum(inside, [])
        assert row[f"bin {10 * b}"] == (pytest.approx(sum(together) / len(together)) if together else None)

def test_positions_against_a_count_by_hand(run):
    """Rounds of chains made up: which positions were drafted, scored, accepted."""
    chain = verify.Round([], [], [9, 5, 6, 7], [-1, 0, 1, 2])
    ends = [([5, 6, 9], 2), ([4], 0), ([5, 6, 7, 8], 3), ([5, 6], 3)]
    rounds = [chain._replace(new=new, path=list(range(1 + accepted))) for new, accepted in ends]
    # Position 3 of the last round was never scored: the output ended before it.
    assert probe.positions_of(rounds) == {"position 1": 3 / 4, "position 2": 3 / 4, "position 3": 1 / 3}
    (row,), _ = probe.positions(run)
    values = row["by_prompt"]["position 2"]
    assert len(values) == 3 and 0 <= row["position 2"] <= 1 and values[1] is None, "one token has no second one"

@pytest.mark.parametrize("name, more, labels, key", [
    ("calibration", ["glide"], ["glide"], "ece_raw"), ("positions", ["cascade(base, k=4)"], ["cascade(base, k=4)"], "position 1"),
    ("ewif", ["cascade(base, k=2)"], [row["drafter"] for row in probe.table_1()] + ["cascade(base, k=2)"], "ewif"),
    ("lookup", ["maxgram"], ["0", "1", "2", "3"], "before")])
def test_a_measurement_takes_the_benchmarks_flags(name, more, labels, key, small, tmp_path):  # noqa: F811
    rows, prompts = tmp_path / "r.jsonl", tmp_path / "p.jsonl"
    prompts.write_text(4 * '{"prompt": "return a + b"}\n')
    assert probe.main([name, *args(small, "--prompts", str(prompts), "--json", str(rows), "--max-new-tokens", "4", "--drafter", *more)]) == 0
    rows = rows_of(rows)
    assert [row["drafter"] for row in rows] == labels and all(key in row for row in rows)
    assert all(len(values) == 4 for values in rows[-1].get("by_prompt", {}).values())

# ---------------------------------------------------------------- lookup: which layer to read
def test_the_mass_on_what_followed_by_hand():
    """Tokens 5 7 5 9 7 5: the second 5 looks at the 7 after the first, the second 7 at the 5, the third 5 at 7 and 9."""
    ids = torch.tensor([5, 7, 5, 9, 7, 5])
    attention = torch.rand(2, 6, 6).tril()
    expected = [attention[:, 2, 1], attention[:, 4, 2], attention[:, 5, 1] + attention[:, 5, 3]]
    (mass,) = probe.mass_there([attention], ids, new=4)
    assert torch.allclose(mass, torch.stack(expected, 1))
    (mass,) = probe.mass_there([attention], ids, new=2)
    assert torch.allclose(mass, torch.stack(expected[1:], 1))

def test_the_linear_map_is_least_squares_with_a_ridge():
    torch.manual_seed(0)
    texts = [torch.randint(5, (30,)) for _ in range(8)]
    table = torch.randn(5, 6, dtype=torch.float64)
    told = [torch.cat((table[:1], table[ids[:-1]])) for ids in texts]        # each state names the token before, in a code of its own
    noisy = [each + 1.5 * torch.randn(each.shape) for each in told]
    assert probe.named_before(told, texts) == 1.0

    def pairs(some):
        """States, and the token that each should name."""
        return torch.cat([noisy[i][1:] for i in some]), torch.cat([texts[i][:-1] for i in some])
    (x, y), (held_out, truth) = pairs([0, 1, 2, 4, 5, 6]), pairs([3, 7])
    mean, std, hot = x.mean(0), x.std(0), torch.eye(5, dtype=torch.float64)[y]
    x = torch.cat(((x - mean) / std, (probe.RIDGE * len(x)) ** 0.5 * torch.eye(6)))
    weights = torch.linalg.lstsq(x, torch.cat((hot - hot.mean(0), torch.zeros(6, 5)))).solution
    share = (((held_out - mean) / std @ weights + hot.mean(0)).argmax(1) == truth).double().mean().item()
    assert probe.named_before(noisy, texts) == pytest.approx(share) and 0.3 < share < 0.95

# ---------------------------------------------------------------- copies of a prompt, and what a forward costs
def test_copies_of_a_prompt_are_computed_and_decode_as_one_does(small, tmp_path):  # noqa: F811
    """The target and the drafter compute each copy; tokens and rounds are those of a batch of one."""
    sizes = {32: [], 16: []}                   # {width of the target, of the drafter: the batch of each forward's logits}

    def note(module, given, out):
        if isinstance(module, torch.nn.Linear) and module.out_features == 300:
            sizes[module.in_features].append(len(out))
    argv = args(small, "--batches", "3", "1", "--limit", "1", "--max-new-tokens", "6", "--json", str(tmp_path / "r.jsonl"))
    hook = torch.nn.modules.module.register_module_forward_hook(note)
    assert batches.main([*argv, "--tree", "cape"]) == 0
    hook.remove()
    one, three = rows_of(tmp_path / "r.jsonl")
    assert all({*made} == {1, 3} and made == sorted(made) for made in sizes.values())
    assert (one["batch"], three["batch"]) == (1, 3) and one["lossless"] is three["lossless"] is True and one["tau"] == three["tau"] >= 1
    assert one["glide"] / one["plain"] == pytest.approx(one["by_prompt"]["speedup"][0])

def test_the_bytes_of_a_step_and_a_row_for_each_size(small, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(costs, "NODES", (1, 4))
    argv = args(small, "--contexts", "20", "--limit", "1", "--json", str(tmp_path / "r.jsonl"))
    assert costs.main(argv) == 0
    one, four = rows_of(tmp_path / "r.jsonl")
    assert (one["nodes"], one["ratio"], four["nodes"]) == (1, 1.0, 4) and four["ratio"] == pytest.approx(four["ms"] / one["ms"])
    model = shared("llama")                    # float64; three layers of four heads of eight, a head of its own
    c = model.config
    linear = 3 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
    assert costs.step_bytes(model, 10) == 8 * (linear + 32 * c.vocab_size + 32 + 2 * 3 * 32 * 10)
