"""Training: a resumed run is an uninterrupted one, a killed write spoils nothing, files are read as meant."""
import copy
import gzip
import json
import math
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tiny
from tokenizers.processors import TemplateProcessing

import edd
import glide
import train
from checkpoints import make


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny random target with a tokenizer, saved as Hugging Face does, and a folder of text."""
    folder = tmp_path_factory.mktemp("target")
    text = "def add(a, b):\n    return a + b\n\n" * 400
    tokenizer = make.train_tokenizer([text], 300)
    tiny("llama", vocab_size=300, max_position_embeddings=64).float().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text").mkdir()
    for i in range(60):
        (folder / "text" / f"{i}.py").write_text(text[i:2000 + i])
    return folder


KINDS = ["glide", "vanilla", "edd", "vdm-ce", "eagle", "medusa"]


def flags(small, out, *more, names=KINDS):
    return [*names, "--hidden", "2", "--target", str(small / "model"), "--data", str(small / "text"),
            "--out", str(out), "--work", str(out / "work"), "--device", "cpu", "--steps", "8", "--batch", "2",
            "--length", "24", "--width", "16", "--every", "3", *more]


def saved(out, names=KINDS):
    return [(out / name / "model.safetensors").read_bytes() for name in names]


def state_of(out, names=KINDS):
    return torch.load(out / "work" / f"{'-'.join(names)}.pt", weights_only=True)


def interrupt(monkeypatch, at, how=lambda: signal.raise_signal(signal.SIGINT)):
    """Ctrl-C in the middle of the `at`-th step of training, counted from 1."""
    forward, calls = train.frozen_forward, []

    def interrupting(*args, count=None, **more):
        calls.extend([1] if count is not None else [])
        if len(calls) == at and count is not None:
            how()
        return forward(*args, count=count, **more)
    monkeypatch.setattr(train, "frozen_forward", interrupting)
    return lambda: monkeypatch.setattr(train, "frozen_forward", forward)


# ---------------------------------------------------------------- the loop
@pytest.mark.parametrize("optimizer, names", [("adamw", KINDS), ("muon", ["glide", "edd"])])
def test_resumed_is_bit_for_bit_uninterrupted(small, tmp_path, monkeypatch, capsys, optimizer, names):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    handler, how = signal.getsignal(signal.SIGINT), ("--optimizer", optimizer, "--steps", "6")
    assert train.main(flags(small, whole, *how, names=names)) == 0
    capsys.readouterr()
    undo = interrupt(monkeypatch, 5)
    assert train.main(flags(small, cut, *how, names=names)) == 2
    assert "stopped after 4 of 6 steps" in capsys.readouterr().err and not (cut / "glide").exists()
    assert signal.getsignal(signal.SIGINT) is handler and state_of(cut, names)["step"] == 4
    undo()
    assert train.main(flags(small, cut, *how, "--resume", names=names)) == 0
    assert saved(whole, names) == saved(cut, names)
    states = [state_of(out, names) for out in (whole, cut)]
    assert states[0]["step"] == states[1]["step"] == 6
    for key in states[0]["models"]:
        assert torch.equal(states[0]["models"][key], states[1]["models"][key]), key


def test_a_killed_run_goes_on_from_the_last_saved_step(small, tmp_path, monkeypatch):
    """No warning at all: as kill -9 would, in the middle of step 5.  The state of step 3 is whole."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train.main(flags(small, whole, names=["glide"])) == 0

    def killed():
        raise MemoryError
    undo = interrupt(monkeypatch, 6, killed)
    with pytest.raises(MemoryError):
        train.main(flags(small, cut, names=["glide"]))
    assert state_of(cut, ["glide"])["step"] == 3
    undo()
    assert train.main(flags(small, cut, "--resume", names=["glide"])) == 0
    assert saved(whole, ["glide"]) == saved(cut, ["glide"])


def test_what_a_resumed_run_may_change(small, tmp_path, monkeypatch, capsys):
    names = ["glide", "edd"]
    undo = interrupt(monkeypatch, 3)
    assert train.main(flags(small, tmp_path, names=names)) == 2
    undo()
    for more, what in ((("--seed", "1"), "seed"), (("--batch", "3"), "batch"), (("--block", "4"), "block"),
                       (("--hidden", "1"), "hidden"), (("--optimizer", "muon"), "optimizer"),
                       (("--steps", "9"), "steps"), (("--data", str(small / "text" / "0.py")), "data")):
        capsys.readouterr()
        assert train.main(flags(small, tmp_path, *more, "--resume", names=names)) == 2
        assert f"had another {what}:" in capsys.readouterr().err
    for file in (small / "text").iterdir():                          # the same text elsewhere: the same data
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / file.name).write_text(file.read_text())
    moved = ["--data", str(tmp_path / "copy")]
    more = ("--lr", "1e-5", "--warmup", "0.5", "--every", "2", "--resume", *moved)
    assert train.main(flags(small, tmp_path, *more, names=names)) == 0
    assert state_of(tmp_path, names)["step"] == 8
    (tmp_path / "work" / "glide-edd.pt").write_bytes(b"half a file")
    assert train.main(flags(small, tmp_path, "--resume", names=names)) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_changed_learning_rate_is_the_one_that_counts(small, tmp_path, monkeypatch):
    """From the same state, another --lr gives other weights, and the same --lr the same."""
    undo, found = interrupt(monkeypatch, 3), []
    assert train.main(flags(small, tmp_path / "cut", "--lr", "1e-3", names=["glide"])) == 2
    undo()
    for lr in ("1e-3", "1e-3", "5e-3"):
        out = tmp_path / str(len(found))
        shutil.copytree(tmp_path / "cut", out)
        assert train.main(flags(small, out, "--lr", lr, "--resume", names=["glide"])) == 0
        found.append(saved(out, ["glide"]))
    assert found[0] == found[1] != found[2]


def test_the_advice_after_a_loss_that_is_not_finite_works(small, tmp_path, capsys):
    """Too high a rate ruins the weights; the saved state is from before, so a lower one can go on from it."""
    names = ["vanilla", "edd"]
    assert train.main(flags(small, tmp_path, "--lr", "1e30", "--every", "1", names=names)) == 2
    err = capsys.readouterr().err
    assert "lower --lr and go on with --resume" in err
    assert err.splitlines()[-1].startswith("train.py: step 1: loss of ")
    assert train.main(flags(small, tmp_path, "--lr", "1e-3", "--every", "1", "--resume", names=names)) == 0
    assert train.main(flags(small, tmp_path / "fresh", "--lr", "1e-3", "--every", "1", names=names)) == 0
    assert saved(tmp_path, names) == saved(tmp_path / "fresh", names)


def settings(folder, **more):
    """Flags as fit() reads them."""
    given = dict(work=str(folder), steps=6, batch=1, length=1, lr=0.1, warmup=0.025, optimizer="adamw",
                 dtype="float32", device="cpu", every=1, resume=False, clip=1.0, micro=None, shard_target=False)
    return SimpleNamespace(**{**given, **more})


def test_no_update_where_a_loss_or_a_gradient_is_not_finite(tmp_path):
    """Two modules; the second one's gradient or loss is infinite at step 3: neither is updated, nor saved."""
    def modules():
        torch.manual_seed(0)
        return {name: torch.nn.Linear(1, 1) for name in ("a", "b")}

    def losses_of(models, bad):
        def losses(step):
            found = {name: m(torch.ones(1, 1)).square().sum() for name, m in models.items()}
            if step == 3:
                found["b"] = bad(models["b"].weight).sum()
            yield found
        return losses

    def evaluate():
        return {"a": {"alpha": 0.0}, "b": {"alpha": 0.0}}
    for bad in (lambda w: (w * 0).sqrt(), lambda w: w * math.nan, lambda w: w + math.inf):
        models = modules()
        with pytest.raises(train.UserError, match="step 3: loss of b .* lower --lr and go on with --resume"):
            train.fit(models, losses_of(models, bad), evaluate, settings(tmp_path))
        state = torch.load(tmp_path / "a-b.pt", weights_only=True)
        assert state["step"] == 2, "the last one whose loss was finite"
        assert all(torch.isfinite(p).all() for m in models.values() for p in m.parameters())
    models = modules()
    with pytest.raises(train.UserError, match="step 0: loss of a is nan.* no --lr mends that"):
        first = {"a": models["a"].weight.sum() * math.nan, "b": models["b"].weight.sum()}
        train.fit(models, lambda step: [first], evaluate, settings(tmp_path))


def test_training_learns_and_the_saved_drafter_is_the_trained_one(small, tmp_path):
    args = [x if x != "8" else "60" for x in flags(small, tmp_path, "--lr", "2e-2", names=["glide", "edd"])]
    assert train.main(args) == 0
    about = json.loads((tmp_path / "glide" / "training.json").read_text())
    assert about["validation"]["held_out_loss"] < 2.0, "started near log(300) = 5.7"
    assert 0.95 * 60 * 2 * 24 < about["tokens_seen"] < 60 * 2 * 24, "a document's last window is shorter"
    assert about["seed"] == 0
    assert about["command"] == " ".join(["python train.py", *args])
    assert about["kind"] == "glide" and about["init"] is None
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(small / "model")
    assert about["target"] == train.fingerprint(model, AutoTokenizer.from_pretrained(small / "model"))
    drafter, _ = glide.load(tmp_path / "glide", model)
    assert drafter.temperature == about["validation"]["temperature"] != 1
    kept = state_of(tmp_path, ["glide", "edd"])["models"]
    for key, value in drafter.model.state_dict().items():
        assert torch.equal(value, kept[f"glide.{key}"].bfloat16().float()), key


def test_a_killed_write_leaves_the_last_checkpoint(tmp_path):
    path = tmp_path / "state.pt"
    train.write_atomically(path, lambda p: torch.save({"step": 1}, p))

    def killed(p):
        p.write_bytes(b"half")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        train.write_atomically(path, killed)
    assert torch.load(path, weights_only=True) == {"step": 1}


def test_a_second_stage_starts_from_the_first(small, tmp_path, capsys):
    names = ["glide", "edd"]
    base = ["--target", str(small / "model"), "--work", str(tmp_path / "work"), "--device", "cpu",
            "--batch", "3", "--length", "24", "--data", str(small / "text")]
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    made = ["--width", "16", "--hidden", "2", "--steps", "3", "--out", first]
    assert train.main([*names, *base, *made]) == 0
    assert train.main([*names, *base, "--init", first, "--lr", "1e-30", "--steps", "1", "--out", second]) == 0
    assert saved(tmp_path / "first", names) == saved(tmp_path / "second", names)
    about = json.loads((tmp_path / "second" / "glide" / "training.json").read_text())
    assert about["init"]["tokens_seen"] > 2 * 3 * 24 >= 2 * about["tokens_seen"] > 3 * 24
    capsys.readouterr()
    assert train.main(["vanilla", *base, "--init", first, "--steps", "1"]) == 2
    assert "no drafter in" in capsys.readouterr().err
    # Nothing but measuring.
    assert train.main([*names, *base, "--init", second, "--steps", "0", "--out", third]) == 0
    assert saved(tmp_path / "second", names) == saved(tmp_path / "third", names)
    about = json.loads((tmp_path / "third" / "edd" / "training.json").read_text())
    from transformers import AutoModelForCausalLM
    drafter, _ = edd.load(tmp_path / "third" / "edd", AutoModelForCausalLM.from_pretrained(small / "model"))
    assert about["tokens_seen"] == 0 and drafter.temperature == about["validation"]["temperature"] != 1


def test_drafters_of_another_target_are_refused(small, tmp_path, capsys):
    assert train.main(flags(small, tmp_path, names=["glide"])) == 0
    about = json.loads((tmp_path / "glide" / "training.json").read_text())
    for change in ({"vocabulary": "0" * 16}, {"probe": {name: x + 1 for name, x in about["target"]["probe"].items()}}):
        other = {**about, "target": {**about["target"], **change}}
        (tmp_path / "glide" / "training.json").write_text(json.dumps(other))
        assert train.main(flags(small, tmp_path, "--init", str(tmp_path), names=["glide"])) == 2
        assert "made for another target" in capsys.readouterr().err


def test_greedy_temperature_is_found_again():
    """Choices drawn from softmax(logits / T): the fit finds T, also far from 1."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6000, 8, generator=g)
    for t in (0.35, 0.5, 1.0, 1.4, 2.5, 3.8):
        choice = torch.multinomial((logits / t).softmax(-1), 1, generator=g)[:, 0]
        assert abs(train.greedy_temperature(logits, choice) - t) <= 0.05 * max(1, t)


def test_what_drafters_are_shown_and_how_they_are_measured(llama, tmp_path):
    """A drafter that is the target itself, one that is not; alpha counts rows beyond the first block."""
    ids = torch.randint(1, 12, (600,), generator=torch.Generator().manual_seed(0)).int().numpy()
    ids[500:] = 0
    windows, held = (np.array([[i, 20] for i in range(*span, 20)]) for span in ((0, 500), (500, 600)))
    blocks = []

    class Itself(torch.nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.shift, self.config = shift, SimpleNamespace(loss="kl")
            self.scale = torch.nn.Parameter(torch.tensor(1.0))

        def loss(self, batch):
            self.predict(batch)
            return self.scale * 1.0

        def predict(self, batch):
            assert self.training == torch.is_grad_enabled() == (batch["block"] is None)
            assert self.training == bool(batch["ids"].any()), "held-out text is not trained on"
            blocks.append((batch["block"], batch["random"].integers(10 ** 9) if self.training else None))
            logits = batch["logits"].roll(self.shift, -1) * self.scale
            logits[:, :5] = 0                                       # the first block is not counted
            return logits
    a = settings(tmp_path, batch=3, length=20, block=5, seed=0, steps=3, lr=1e-9, every=9)
    found = train.train_together({"same": Itself(0), "other": Itself(1)}, llama, (ids, windows, held), a)
    assert found["same"]["alpha"] == 1 and found["other"]["alpha"] == 0
    assert found["same"]["temperature"] == pytest.approx(0.3) and found["other"]["temperature"] > 3.8
    # Fixed blocks in validation, drawn ones in training: by (seed, step), whoever asks.
    drawn = [np.random.default_rng([3, step]).integers(10 ** 9, size=2).tolist() for step in range(3)]
    assert blocks == [(5, None)] * 12 + [(None, x) for both in drawn for x in both] + [(5, None)] * 12


def test_one_pass_over_the_data_is_the_default(small, tmp_path):
    argv = flags(small, tmp_path, names=["vanilla"])
    argv[argv.index("--steps"):argv.index("--steps") + 2] = []
    argv[argv.index("--data") + 1] = str(small / "text" / "0.py")
    assert train.main(argv) == 0
    from transformers import AutoTokenizer
    ids, _, _ = read(tmp_path, AutoTokenizer.from_pretrained(small / "model"), small / "text" / "0.py")
    assert state_of(tmp_path, ["vanilla"])["step"] == -(-len(ids) // 24) // 2 > 1


def test_the_rate_of_each_step_is_the_schedules(tmp_path, monkeypatch):
    """Its factor times --lr; where it is zero nothing moves, not even by weight decay."""
    monkeypatch.setattr(train, "cosine", lambda *given: float(given == (2, 6, 0.025)))
    seen = []
    model = torch.nn.Linear(1, 1)

    def losses(step):
        seen.append(model.weight.item())
        yield {"a": model(torch.ones(1, 1)).sum()}
    train.fit({"a": model}, losses, lambda: {"a": {"alpha": 0.0}}, settings(tmp_path, lr=0.5))
    assert seen[0] == seen[1] == seen[2] and seen[3] == seen[4] == seen[5]
    assert abs(seen[2] - seen[3]) == pytest.approx(0.5, rel=0.02), "Adam's first step is the rate"


def test_an_update_is_adamws_of_the_clipped_gradient(tmp_path):
    """Betas 0.9 and 0.95 (the official code's), decay 0.01, a norm of at most 1 for each drafter: written out."""
    models = {name: torch.nn.Linear(2, 1, bias=False).double() for name in ("a", "b")}
    slopes = {"a": torch.tensor([3.0, 4.0], dtype=torch.float64), "b": torch.tensor([0.6, 0.0], dtype=torch.float64)}
    scales = [1.0, 0.1, 20.0, 0.01, 3.0, 0.5]
    start = {name: m.weight.detach().clone() for name, m in models.items()}

    def losses(step):
        yield {name: scales[step] * (m.weight * slopes[name]).sum() for name, m in models.items()}
    train.fit(models, losses, lambda: {name: {"alpha": 0.0} for name in models}, settings(tmp_path, lr=0.1))
    for name, m in models.items():
        w, mean, square = start[name], 0.0, 0.0
        for step, scale in enumerate(scales):
            g = scale * slopes[name]
            g = g / max(1.0, g.norm().item())
            mean, square = 0.9 * mean + 0.1 * g, 0.95 * square + 0.05 * g ** 2
            rate = 0.1 * train.cosine(step, 6, 0.025)
            w = w - rate * (0.01 * w + mean / (1 - 0.9 ** (step + 1)) / ((square / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8))
        torch.testing.assert_close(m.weight, w, atol=1e-5, rtol=0)


def test_defaults_are_the_papers_recipes(monkeypatch):
    """EDD's batch 8 and learning rate 1e-4, GLIDE's 64 and 5e-4, as they reach the training; GLIDE's 2.5 % of warm-up, one
    layer and blocks of 5 (sections 4.1, 5.1), EDD's fourth-to-last layer (appendix B)."""
    seen = []

    def prepared(a):
        seen.append((a.batch, a.lr, a.optimizer))
        assert (a.warmup, a.layers, a.block, a.hidden) == (0.025, 1, 5, -4)
        raise train.UserError("enough")
    monkeypatch.setattr(train, "prepare", prepared)
    for names in (["edd", "vdm"], ["glide"], ["glide", "edd"], ["edd-h2"], ["medusa", "eagle"]):
        assert train.main([*names, "--target", "x", "--device", "cpu", "--data", "y"]) == 2
    assert train.main(["edd", "--batch", "3", "--lr", "0.5", "--optimizer", "muon", "--data", "y"]) == 2
    edds, glides = (8, 1e-4, "adamw"), (64, 5e-4, "adamw")
    assert seen == [edds, glides, glides, edds, edds, (3, 0.5, "muon")]


def test_names_stand_for_their_variants(llama):
    a = SimpleNamespace(init=None, hidden=2, width=16, layers=1, block=5, layer=None, length=24)
    for name, variant in edd.VARIANTS.items():
        module, _ = train.make_drafter(name, llama, a)
        config = vars(module.config)
        assert {key: config[key] for key in variant} == variant
        assert type(module) is edd.KINDS[module.config.kind][0]
    assert train.make_drafter("edd-h1", llama, a)[0].config.hidden == 1
    assert train.make_drafter("edd", llama, a)[0].config.hidden == 2
    glimpses = {name: train.make_drafter(name, llama, a)[0].config.glimpse for name in ("glide", "vanilla")}
    assert glimpses == {"glide": True, "vanilla": False}


def test_muon_gets_the_hidden_matrices_alone(llama):
    a = SimpleNamespace(init=None, width=16, layers=1, block=5, layer=None, length=24)
    module, _ = train.make_drafter("glide", llama, a)
    adamw, muon = train.optimizers(module, "muon")
    names = {id(p): name for name, p in module.named_parameters()}
    of = [[names[id(p)] for group in o.param_groups for p in group["params"]] for o in (adamw, muon)]
    assert sorted(of[0] + of[1]) == sorted(names.values())
    assert of[1] and all("layers." in name for name in of[1])
    assert {"embed.weight", "head.weight"} <= set(of[0])
    alone, = train.optimizers(module, "adamw")
    assert len(alone.param_groups[0]["params"]) == len(names)


def test_windows_depend_on_seed_and_step_alone():
    ids = torch.arange(1000, dtype=torch.int32)
    first = make.draw(ids, 4, 10, 0, 3)
    assert torch.equal(first, make.draw(ids, 4, 10, 0, 3))
    for seed, step in ((0, 4), (1, 3)):
        assert not torch.equal(first, make.draw(ids, 4, 10, seed, step))
    assert first.shape == (4, 10) and (first.diff(dim=1) == 1).all() and first.dtype == torch.int64
    ends = make.draw(ids[:11], 200, 10, 0, 0)[:, 0]
    assert set(ends.tolist()) == {0, 1}, "the last token is reached"


def test_half_of_the_windows_begin_where_a_document_does():
    """Places after an end-of-text token, and the very first; not those with too little text behind them."""
    ids = torch.arange(1000, dtype=torch.int32)
    ids[[99, 499, 995]] = 2000
    starts = make.draw(ids, 400, 10, 0, 3, eos=2000)[:, 0]
    assert set(starts[::2].tolist()) == {0, 100, 500}
    assert torch.equal(starts[1::2], make.draw(ids, 400, 10, 0, 3)[1::2, 0]), "the others are anywhere"
    assert torch.equal(starts, make.draw(ids, 400, 10, 0, 3, eos=2000)[:, 0])


def test_learning_rate_schedule():
    steps = [train.cosine(i, 1000, 0.025) for i in range(1000)]
    assert steps[0] == 1 / 25 and steps[24] == 1.0 and steps.index(max(steps)) == 24
    assert abs(steps[25 + 975 // 2] - 0.5) < 2e-3 and steps[-1] < 1e-5
    assert [train.cosine(0, 1, w) for w in (0.0, 0.025, 1.0)] == [1.0, 1.0, 1.0]


# ---------------------------------------------------------------- what is read
def rows_of(tmp_path, text, name="rows.jsonl"):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return train.read_rows(tmp_path / name)


def test_rows_of_files(tmp_path):
    two = [{"text": "a"}, {"text": "b\u2028c"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in two)
    assert rows_of(tmp_path, lines) == rows_of(tmp_path, lines, "x.json") == two, "U+2028 ends no line"
    assert rows_of(tmp_path, json.dumps(two)) == rows_of(tmp_path, json.dumps(two, indent=1), "x.json") == two
    assert rows_of(tmp_path, json.dumps(two[0])) == two[:1]
    assert rows_of(tmp_path, gzip.compress(lines.encode()), "x.jsonl.gz") == two
    assert rows_of(tmp_path, "plain\n", "x.txt") == ["plain\n"] and rows_of(tmp_path, " \n", "x.txt") == []
    damaged = bytearray(gzip.compress(lines.encode() * 9))
    damaged[20:30] = b"0123456789"
    for text, name in ((b"\xff", "x.txt"), ("{", "x.jsonl"), (bytes(damaged), "x.gz"), (b"no gzip", "y.gz")):
        with pytest.raises(train.UserError, match="cannot be read as text or JSON lines"):
            rows_of(tmp_path, text, name)


USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize("row, messages", [
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
     [USER, ASSISTANT]),
    ({"conversations": [{"from": "system", "value": "be"}, {"from": "human", "value": ""}]},
     [{"role": "system", "content": "be"}]),
    ({"messages": [USER, ASSISTANT], "text": "other"}, [USER, ASSISTANT]),
    ({"turns": ["hi", "more"], "category": "writing"}, [USER, {"role": "user", "content": "more"}]),
    ({"conversations": []}, []),
    ({"text": "turns and messages"}, None), ({"conversations": "hi"}, None), ({"messages": [3]}, None),
    ({"turns": None}, None),
    ("turns", None), ([1], None), (7, None),
])
def test_conversations(row, messages):
    assert train.conversation(row) == messages


@pytest.mark.parametrize("row, found", [
    ({"ids": [1, 2]}, [1, 2]),
    ({"messages": [USER]}, [USER]),
    ({"question": "1 + 1?", "answer": "2"}, "Question: 1 + 1?\nAnswer: 2\n"),
    ({"text": "a"}, "a"),
    ({"prompt": "def f():\n", "canonical_solution": "    return 1\n"}, "def f():\n    return 1\n"),
    ({"prompt": "a", "completion": "b"}, "ab"),
    ({"instruction": "Sum up", "input": "a text", "output": "short"}, "Sum up\na text\nshort"),
    # Alpaca, Finance-Alpaca
    ({"instruction": "Why?", "input": "", "output": "So."}, "Why?\n\nSo."),
    ({"article": "long", "highlights": "short", "id": "1"}, "long\nshort"),
    ({"whole_func_string": "def f(): 0", "func_name": "f"}, "def f(): 0"),
    ({"text": None}, ""), ({"conversations": []}, []), ({"sentence": "a"}, None), ([1], None), (3, None),
])
def test_documents_of_rows(row, found):
    assert train.document(row) == found


MMLU = "Question: 2 + 2?\nA. 3\nB. 4\nC. 5\nD. 6\nAnswer:"


@pytest.mark.parametrize("row, asks", [
    ("as it is", "as it is"), ({"prompt": "def f("}, "def f("), ({"text": "once"}, "once"), ({"prompt": "", "text": "once"}, "once"),
    ({"question": "How many?", "query": "SELECT", "db_id": "x"}, "Question: How many?\nAnswer:"),                            # Spider
    ({"question": "2 + 2?", "choices": ["3", "4", "5", "6"], "answer": 1}, MMLU),
    ({"input": "2 + 2?", "A": "3", "B": "4", "C": "5", "D": "6", "target": "B"}, MMLU),
    ({"article": "long", "highlights": "short"}, "Summarize: long\nSummary:"),
    ({"instruction": "Sum up", "input": "a text", "output": "short"}, "Sum up\na text\n"), ({"instruction": "Why?", "input": ""}, "Why?\n"),
    ({"sentence": "a"}, None), ({"text": None}, None), ([1], None), (3, None),
])
def test_what_a_row_asks(row, asks):
    assert train.question_text(row) == asks


def test_conversations_in_glides_layout():
    row = {"id": 1, "conversation": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert train.conversation(row) == row["conversation"]
    assert train.conversation({"prompt": "a"}) is None


def test_question_text_is_the_form_that_gsm8k_is_trained_on():
    row = {"question": "q", "answer": "a"}
    assert train.document(row) == train.question_text(row) + " a\n"


def read(tmp_path, tokenizer, *paths, length=3):
    a = SimpleNamespace(length=length, work=str(tmp_path / "work"), vocab=300)
    return make.read_flat(a, paths, tokenizer)


@pytest.fixture(scope="module")
def tokenizer():
    return make.train_tokenizer(["one two three four five six seven eight nine ten"] * 3, 300)


def test_rows_without_text_are_named_and_not_trained_on(tmp_path, tokenizer, capsys):
    """An empty document would be trained on as an end-of-text token alone."""
    rows = [{"text": "one two"}, {"text": "  "}, {"conversations": []}, {"instruction": "", "output": ""},
            {"ids": []}, {"text": "three"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "empty.txt").write_text("\n")
    ids, held, _ = read(tmp_path, tokenizer, path, tmp_path / "empty.txt")
    end = tokenizer.eos_token_id
    assert ids.tolist() == [*tokenizer("one two")["input_ids"], end, *tokenizer("three")["input_ids"], end]
    err = capsys.readouterr().err
    assert "4 rows without text" in err and "row 6" not in err
    assert all(f"row {i} of {path}" in err for i in (2, 3, 4, 5))
    assert held.tolist() == ids.tolist() and "too little text is held out" in err


def test_every_fiftieth_document_is_held_out_unless_its_row_says(tmp_path, tokenizer):
    def write(rows):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        train_ids, held, _ = read(tmp_path, tokenizer, tmp_path / "rows.jsonl")
        return train_ids.tolist(), held.tolist()
    rows = [{"ids": [i, i, i]} for i in range(1, 101)]
    train_ids, held = write(rows)
    assert held == [50, 50, 50, 0, 100, 100, 100, 0]
    assert not {50, 100} & set(train_ids) and set(train_ids) == {0, *range(1, 101)} - {50, 100}
    rows = [{"ids": [i, i], "held_out": i < 4, "times": 1 + (i == 7)} for i in range(1, 60)]
    train_ids, held = write(rows)
    assert held == [1, 1, 0, 2, 2, 0, 3, 3, 0] and not {1, 2, 3} & set(train_ids)
    assert [train_ids.count(i) for i in (7, 8, 50)] == [4, 2, 2]


def test_tokens_are_those_of_the_files_as_they_are(tmp_path, tokenizer, monkeypatch):
    """What was encoded is found again by content and tokenizer; a file that was rewritten is encoded anew."""
    path, calls, write_tokens = tmp_path / "a.txt", [], train.write_tokens

    def counting(*given):
        calls.append(given)
        return write_tokens(*given)
    monkeypatch.setattr(train, "write_tokens", counting)

    def decoded(file, by=tokenizer):
        ids, _, key = read(tmp_path, by, file)
        return by.decode(ids[:-1]), key
    path.write_text("one two three four")
    first = decoded(path)
    assert first == decoded(path) and first[0] == "one two three four" and len(calls) == 1
    path.write_text("five six seven ten")
    second = decoded(path)
    assert second[0] == "five six seven ten" and second[1] != first[1] and len(calls) == 2
    (tmp_path / "b.txt").write_text("one two three four")            # the same text under another name
    assert decoded(tmp_path / "b.txt") == first and len(calls) == 2
    other = make.train_tokenizer(["one two three " * 9], 270)
    assert decoded(path, other)[0] == second[0] and len(calls) == 3
    # A killed write leaves no half of a file behind that would be read.
    path.write_text("nine ten nine ten")

    def killed(*given):
        counting(*given)
        raise KeyboardInterrupt
    monkeypatch.setattr(train, "write_tokens", killed)
    with pytest.raises(KeyboardInterrupt):
        decoded(path)
    monkeypatch.setattr(train, "write_tokens", counting)
    assert decoded(path)[0] == "nine ten nine ten" and len(calls) == 5


def test_rows_that_cannot_be_encoded(tmp_path, tokenizer, capsys):
    """Chats that a template refuses are left out and named; token ids of another tokenizer stop the run."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = ("{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
                         "{% for turn in messages %}{{ turn.content }} {% endfor %}")
    path = tmp_path / "rows.jsonl"
    chats = [ASSISTANT], [USER, ASSISTANT], [USER]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    ids, _, _ = read(tmp_path, own, path)
    assert own.decode(ids, skip_special_tokens=True) == "hi yes hi "
    assert f"1 rows without text: row 1 of {path}" in capsys.readouterr().err
    path.write_text(json.dumps({"ids": [1, 2, 3, 299, 300]}) + "\n")
    with pytest.raises(train.UserError, match=f"row 1 of {path} holds token id 300, the target has 300"):
        read(tmp_path, tokenizer, path)


def test_hidden_files_are_left_out_and_folders_are_read_in_order(tmp_path, tokenizer):
    for name in ("b.txt", "a.txt", ".c.txt", "d/e.txt"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(name)
    assert [found for _, _, found in train.documents([tmp_path / "data"])] == ["a.txt", "b.txt", "d/e.txt"]


def test_chats_are_encoded_by_their_template_once(tokenizer):
    """A template that writes the first token itself: the tokenizer must not add another."""
    plain = tokenizer.decode(train.encode([USER, ASSISTANT], tokenizer))
    assert plain == "USER: hi\n\nASSISTANT: yes\n\n"
    own = copy.deepcopy(tokenizer)
    own.bos_token = "<|endoftext|>"
    first = [("<|endoftext|>", 0)]
    own._tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=first)
    assert own("hi")["input_ids"][0] == 0, "as Llama's"
    own.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    ids = train.encode([USER, ASSISTANT], own)
    assert own.decode(ids) == "<|endoftext|>[user]hi[assistant]yes"
    with_bos, without = (train.encode("hi", own, special_tokens=special) for special in (True, False))
    assert with_bos == [0, *without]


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize("argv, words", [
    (["glid"], "cannot train glid"), (["edd-h"], "cannot train edd-h"), (["base"], "cannot train base"),
    ([], "required: what"),
    (["glide", "--target", "/no/such"], "does not exist"), (["glide", "--steps", "0"], "--steps is 0"),
    (["glide", "--steps", "-1"], "--steps is -1"), (["glide", "--lr", "-1"], "--lr is -1"),
    (["glide", "--every", "0"], "--every is 0"),
    (["glide", "--width", "0"], "--width is 0"), (["glide", "--length", "4"], "longer than a block"),
    (["glide", "--width", "x"], "invalid int value"), (["glide", "--optimizer", "x"], "invalid choice"),
    (["glide", "--device", "cuda"], "no CUDA device"),
])
def test_mistakes_are_one_sentence(argv, words, capsys):
    if words == "no CUDA device" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert train.main([*argv, "--data", "x"]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and "Traceback" not in err


def test_data_mistakes(small, tmp_path, capsys):
    base = ["glide", "--target", str(small / "model"), "--work", str(tmp_path), "--device", "cpu"]
    (tmp_path / "short.txt").write_text("a")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ')
    (tmp_path / "odd.jsonl").write_text('{"text": "a"}\n{"sentence": "a"}\n')
    odd, layer = tmp_path / "odd.jsonl", [small / "text", "--length", "64", "--layer", "7"]
    for data, words in (([], "expected at least one argument"), (["/no/such"], "does not exist"),
                        ([tmp_path / "bad.jsonl"], f"row 2 of {tmp_path / 'bad.jsonl'}"),
                        ([tmp_path / "short.txt"], "too few tokens"),
                        ([odd], f"left out, 1 rows without text: row 2 of {odd}"), (layer, "cannot be read")):
        assert train.main([*base, "--data", *map(str, data)]) == 2
        assert words in capsys.readouterr().err
    assert train.main(["edd-h9", *base[1:], "--data", str(small / "text"), "--length", "64"]) == 2
    assert "no layer's output" in capsys.readouterr().err


def test_fingerprint_tells_targets_apart_but_not_precisions(llama, tokenizer):
    mine = train.fingerprint(llama)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert train.same_target(mine, train.fingerprint(copy.deepcopy(llama).to(dtype)))
    tuned = copy.deepcopy(llama)
    for p in tuned.parameters():
        p.data += 0.05 * p.data.std() * torch.randn_like(p) if p.ndim == 2 else 0
    for other in (tuned, tiny("llama", seed=9), tiny("mistral")):
        assert not train.same_target(mine, train.fingerprint(other))
    # The vocabulary counts where both say it.
    full = train.fingerprint(llama, tokenizer)
    assert full["vocabulary"] == train.vocabulary_fingerprint(tokenizer)
    assert train.same_target(full, mine) and train.same_target(mine, full)
    assert not train.same_target(full, {**full, "vocabulary": "another"})


def test_a_fingerprint_of_a_vocabulary():
    """16 hex digits; the same tokens with the same ids, in whatever order they are listed."""
    class Vocabulary(dict):
        get_vocab = dict.copy
    a = train.vocabulary_fingerprint(Vocabulary({"a": 0, "b": 1}))
    assert len(a) == 16 and int(a, 16) and a == train.vocabulary_fingerprint(Vocabulary({"b": 1, "a": 0}))
    others = ({"a": 1, "b": 0}, {"a": 0}, {"a": 0, "b": 1, "c": 2}, {"a": 0, "c": 1})
    assert len({a, *(train.vocabulary_fingerprint(Vocabulary(v)) for v in others)}) == 5
