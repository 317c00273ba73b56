"""Training: a resumed run is an uninterrupted one, nothing is lost in silence, drafters are measured as decoding sees them."""
import copy
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import cases_training
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, SIZES, plain, tiny
from test_corpus import dump
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, Phi3Config, Phi3ForCausalLM

import cape
import glide
import train
import verify
from checkpoints import make, smollm2
from training import prepare
from runtime import load, drafters as runtime_drafters
from training import continuations, drafters, forward as frozen, state as jobs, muon, evaluate as walk
from training import flags as flags_of_training

KINDS = ["glide", "edd", "eagle", "medusa", "small"]
TEXT = "def add(a, b):\n    return a + b\n\n"

@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Few prompts and pieces to measure drafters on."""
    for name, value in (("PROMPTS", 2), ("NEW", 12), ("CHECKED", 96)):
        monkeypatch.setattr(walk, name, value)

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny random target with a tokenizer, saved as Hugging Face does, and text of two kinds."""
    folder = tmp_path_factory.mktemp("target")
    make.train_tokenizer([TEXT * 400], 300).save_pretrained(folder / "model")
    tiny("llama", vocab_size=300, max_position_embeddings=64).float().save_pretrained(folder / "model")
    dump(folder / "rows.jsonl", [{"text": (TEXT * 9)[i:i + 20 + 37 * i % 250], "group": "ab"[i % 2], "held_out": i % 10 in (4, 7)} for i in range(80)])
    return folder

def flags(small, out, *more, names=KINDS):
    return [*names, "--hidden", "2", "--target", str(small / "model"), "--data", str(small / "rows.jsonl"), "--out", str(out),
            "--work", str(out / "work"), "--device", "cpu", "--steps", "6", "--batch", "4", "--length", "40", "--width", "16",
            "--every", "3", "--dtype", "float32", "--optimizer", "adamw", "--lr", "1e-3", *more]

def saved(out, names=KINDS):
    return [(out / name / "model.safetensors").read_bytes() for name in names]

def about_of(out, name):
    return json.loads((out / name / "training.json").read_text())

def state_of(out):
    return torch.load(out / "work" / "state.pt", weights_only=True)

def interrupt(monkeypatch, at, how):
    """Something happens in the middle of the `at`-th step of training, counted from 1 -> what undoes that."""
    gradients, calls = train.add_gradients, []

    def interrupting(forwards, *given):
        calls.append(1)
        if len(calls) == at:
            how()
        return gradients(forwards, *given)
    monkeypatch.setattr(train, "add_gradients", interrupting)
    return lambda: monkeypatch.setattr(train, "add_gradients", gradients)

def refused(capsys, argv, words, run=train.main):
    assert run(argv) == 2
    err = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert words in err[-1] and not any("Traceback" in line for line in err), err

# ---------------------------------------------------------------- going on
@pytest.mark.parametrize("number, optimizer, names", [(signal.SIGINT, "adamw", KINDS), (signal.SIGTERM, "muon", ["glide", "edd"])])
def test_resumed_is_bit_for_bit_uninterrupted(small, tmp_path, monkeypatch, capsys, number, optimizer, names):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    handler, how = signal.getsignal(number), ("--optimizer", optimizer)
    assert train.main(flags(small, whole, *how, names=names)) == 0
    undo = interrupt(monkeypatch, 5, lambda: signal.raise_signal(number))
    refused(capsys, flags(small, cut, *how, names=names), "stopped after 4 of 6 steps: the same with --resume goes on")
    assert not (cut / "glide").exists() and signal.getsignal(number) is handler and state_of(cut)["step"] == 4
    undo()
    assert train.main(flags(small, cut, *how, "--resume", names=names)) == 0 and saved(whole, names) == saved(cut, names)
    a, b = state_of(whole), state_of(cut)
    assert a["step"] == b["step"] == 6 and a["tokens"] == b["tokens"] == about_of(cut, "glide")["tokens_seen"] == about_of(whole, "glide")["tokens_seen"]
    assert all(torch.equal(value, b["models"][key]) for key, value in a["models"].items()) and about_of(cut, "glide")["command"].endswith("--resume")

def test_nothing_is_lost_in_silence(small, tmp_path, monkeypatch, capsys):
    """Killed without warning, the state of the last saving is whole; only its own command goes on with it, or --overwrite."""
    def killed():
        raise MemoryError
    one = partial(flags, small, tmp_path, names=["glide"])
    refused(capsys, one("--resume"), "--resume: there is no interrupted run")
    undo = interrupt(monkeypatch, 6, killed)
    with pytest.raises(MemoryError):
        train.main(one())
    undo()
    before, mine = [path.read_bytes() for path in (tmp_path / "work").rglob("[sm]*.*")], "python train.py " + " ".join(one())      # state, meta
    for argv in (one(), flags(small, tmp_path, names=["vanilla"])):
        refused(capsys, argv, f"holds step 3 of 6 of `{mine}`, which `python train.py {' '.join(argv)}` would replace")
    other = str(dump(tmp_path / "other.jsonl", [{"text": TEXT}] * 9))
    for flag, value in {"seed": "1", "data": other}.items():
        argv = one(f"--{flag}", value, "--resume")
        refused(capsys, argv, f"`{mine}`, had another {flag} than `python train.py {' '.join(argv)}`")
    assert len(before) == 2 and [path.read_bytes() for path in (tmp_path / "work").rglob("[sm]*.*")] == before
    shutil.copytree(tmp_path, tmp_path / "again")
    (tmp_path / "rows.jsonl").write_text((small / "rows.jsonl").read_text())         # the same text elsewhere is the same data
    assert train.main(one("--resume", "--lr", "1e-5", "--every", "2", "--micro", "64", "--data", str(tmp_path / "rows.jsonl"))) == 0
    # What is finished is not replaced, not even by a run with a --work of its own.
    weights, argv = saved(tmp_path, ["glide"]), one("--work", str(tmp_path / "elsewhere"))
    refused(capsys, argv, f"{tmp_path / 'glide'} was made by `python train.py glide")
    assert saved(tmp_path, ["glide"]) == weights
    assert train.main([*argv, "--overwrite"]) == 0 and saved(tmp_path, ["glide"]) != weights
    # What could not be saved is not lost.
    full = partial(flags, small, tmp_path / "full", names=["glide"])
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(drafters, "save", lambda *_: killed())
        train.main(full())
    refused(capsys, full(), "holds step 6 of 6 of")
    (tmp_path / "full" / "glide").mkdir()
    (tmp_path / "full" / "glide" / "model.safetensors.part").touch()
    assert train.main(full("--resume")) == 0 and saved(tmp_path / "full", ["glide"])
    again = tmp_path / "again"
    assert train.main(flags(small, again, "--overwrite", names=["vanilla"])) == 0, "an unfinished run gives way when told to"

def test_what_this_program_has_not_made_is_left_alone(small, tmp_path, capsys):
    """Files of unknown origin in --out, damaged and foreign states in --work: found at the start."""
    argv, mine, state = flags(small, tmp_path, names=["vanilla"]), tmp_path / "vanilla", tmp_path / "work" / "state.pt"
    mine.mkdir()
    (mine / "model.safetensors").write_bytes(b"precious")
    refused(capsys, argv, "holds files that no training.json accounts for: give another --out, or --overwrite")
    assert (mine / "model.safetensors").read_bytes() == b"precious"
    # States
    shutil.rmtree(mine)
    fit({"vanilla": torch.nn.Linear(40, 40)}, lambda step: [lambda: {"vanilla": torch.zeros((), requires_grad=True)}], tmp_path / "work", steps=1)
    whole = torch.load(state, weights_only=True)
    data = bytearray(state.read_bytes())
    data[data.index(whole["models"]["vanilla.weight"].numpy().tobytes()) + 99] ^= 4
    for found in (bytes(data), {**whole, "learners": None}):
        state.write_bytes(found) if isinstance(found, bytes) else torch.save(found, state)
        before = state.read_bytes()
        refused(capsys, argv, "is damaged, or no state of a training run")
        refused(capsys, [*argv, "--resume"], "--overwrite begins anew")
        assert state.read_bytes() == before

@pytest.mark.parametrize("program", ["train.py", "checkpoints/make.py", "training/prepare.py"])
def test_ctrl_c_while_packages_load(program, tmp_path):
    (tmp_path / "numpy.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    done = subprocess.run([sys.executable, ROOT / program], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{program.split('/')[-1]}: interrupted\n")

def leave(argv):
    """Run train.py in this process, a fork of the test's, and end with it, whatever happens."""
    status = 1
    try:
        status = train.main(argv)
    except SystemExit as why:
        status = why.code
    finally:
        os._exit(status)

# ---------------------------------------------------------------- the loop
def fit(models, losses, folder, **more):
    a = dict(work=str(folder), out=str(folder), steps=6, batch=1, length=1, lr=0.1, optimizer="adamw", dtype="float32", device="cpu",
             every=1, resume=False, overwrite=True, command="fit")
    a = SimpleNamespace(**{**a, **more})
    return train.fit(models, losses, lambda: {name: {"alpha": 0.0} for name in models}, a, jobs.State(a, models))

def test_no_update_where_a_loss_or_a_gradient_is_not_finite(tmp_path):
    """Two modules; the second one's gradient or loss is infinite at a step: neither is updated, nor saved."""
    def losses_of(models, bad, at):
        def losses(step):
            found = {name: m(torch.ones(1, 1)).square().sum() for name, m in models.items()}
            if step == at:
                found["b"] = bad(models["b"].weight).sum()
            return [lambda: found]
        return losses
    for bad, at in ((lambda w: (w * 0).sqrt(), 3), (lambda w: w * math.nan, 0)):
        models = {name: torch.nn.Linear(1, 1) for name in ("a", "b")}
        with pytest.raises(train.UserError, match=f"step {at}: loss of b .* {'lower --lr and go on with --resume' if at else 'no --lr mends that'}"):
            fit(models, losses_of(models, bad, at), tmp_path)
        assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 2, "the last one whose loss was finite"
        assert all(torch.isfinite(p).all() for m in models.values() for p in m.parameters())
    # A last update that overflows is never saved as finished.
    module = torch.nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(3e38)
    with pytest.raises(train.UserError, match="step 1: the last update made weights of b infinite: lower --lr and go on with --resume"):
        fit({"b": module}, lambda step: [lambda: {"b": -1e-30 * module.weight.sum()}], tmp_path, steps=1, lr=1e36)
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 0

def test_an_update_is_adamws_of_the_clipped_gradient(tmp_path):
    """Betas 0.9 and 0.95 (the official code's), decay 0.01, a norm of at most 1 for each drafter: written out."""
    models = {name: torch.nn.Linear(2, 1, bias=False).double() for name in ("a", "b")}
    slopes = {"a": torch.tensor([3.0, 4.0], dtype=torch.float64), "b": torch.tensor([0.6, 0.0], dtype=torch.float64)}
    scales, start = [1.0, 0.1, 20.0, 0.01, 3.0, 0.5], {name: m.weight.detach().clone() for name, m in models.items()}
    fit(models, lambda step: [lambda: {name: scales[step] * (m.weight * slopes[name]).sum() for name, m in models.items()}], tmp_path)
    for name, m in models.items():
        w, mean, square = start[name], 0.0, 0.0
        for step, scale in enumerate(scales):
            g = scale * slopes[name]
            g = g / max(1.0, g.norm().item())
            mean, square = 0.9 * mean + 0.1 * g, 0.95 * square + 0.05 * g ** 2
            w = w - 0.1 * train.cosine(step, 6) * (0.01 * w + mean / (1 - 0.9 ** (step + 1)) / ((square / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8))
        torch.testing.assert_close(m.weight, w, atol=1e-5, rtol=0)
    steps = [train.cosine(i, 1000) for i in range(1000)]
    assert steps[0] == 1 / 25 and steps[24] == 1.0 and steps.index(max(steps)) == 24, "2.5 % of warm-up, as GLIDE's"
    assert abs(steps[25 + 975 // 2] - 0.5) < 2e-3 and steps[-1] < 1e-5 and train.cosine(0, 1) == 1.0

def test_muon_takes_matrices_that_share_a_weight_one_by_one(llama):
    """q, k, v and gate, up of a GLIDE: as PyTorch's Muon on each of them alone; embedding, head and norms learn by AdamW."""
    module = drafters.fresh("glide", llama, arguments())
    adamw, by_muon = muon.optimizers(torch.nn.ModuleDict({"a-head": module}), "muon")
    rest, held = {id(p) for p in adamw.param_groups[0]["params"]}, {id(w): n for w, n in by_muon.weights}
    assert {id(module.embed.weight), id(module.head.weight), id(module.norm.weight)} <= rest and len(rest) + len(held) == len(list(module.parameters()))
    assert [len(held[id(getattr(module.layers[0], name).weight)]) for name in ("qkv", "up", "o", "down", "glimpse_q")] == [3, 2, 1, 1, 1]
    torch.manual_seed(0)
    phi = Phi3ForCausalLM(Phi3Config(**SIZES, num_key_value_heads=2))                    # heads of 8, of k and v half as many
    fresh = torch.nn.ModuleDict({"edd": drafters.fresh("edd", phi, arguments())})
    sizes = {tuple(rows) for w, rows in muon.optimizers(fresh, "muon")[1].weights}
    assert {(32, 16, 16), (48, 48), (32,)} <= sizes
    assert [len(o.param_groups[0]["params"]) for o in muon.optimizers(torch.nn.ModuleDict({"glide": module}), "adamw")] == [len(list(module.parameters()))]
    fused, alone, how = torch.nn.Parameter(torch.randn(12, 6)), torch.nn.Parameter(torch.randn(4, 6)), dict(lr=0.1, adjust_lr_fn="match_rms_adamw")
    parts = [torch.nn.Parameter(part.clone()) for part in (*fused.detach().chunk(3), alone.detach())]
    ours, theirs = muon.Muon([(fused, [4, 4, 4]), (alone, [4])], **how), torch.optim.Muon(parts, **how)
    for _ in range(3):
        fused.grad, alone.grad = torch.randn(12, 6), torch.randn(4, 6)
        for part, grad in zip(parts, (*fused.grad.chunk(3), alone.grad)):
            part.grad = grad.clone()
        ours.step()
        theirs.step()
        ours.zero_grad()
    assert fused.grad is alone.grad is None and torch.equal(torch.cat(parts), torch.cat((fused, alone)))

def test_training_learns_and_the_saved_drafter_is_the_trained_one(small, tmp_path):
    args = flags(small, tmp_path, "--lr", "2e-2", "--steps", "60", "--every", "60", names=["glide", "edd"])
    assert train.main(args) == 0
    about, rows = about_of(tmp_path, "glide"), [json.loads(line) for line in (tmp_path / "work" / "log.jsonl").read_text().splitlines()]
    assert rows[0]["command"] == about["command"] == " ".join(["python train.py", *args]) and [row["step"] for row in rows[1:]] == [0, 60]
    assert about["validation"]["held_out_loss"] < 0.8 * rows[1]["glide"]["held_out_loss"] and rows[2]["glide"]["loss"] < 1
    assert rows[2]["tokens_seen"] == about["tokens_seen"] > 60 * 4 * 20 and rows[2]["peak_memory"] > 2 ** 20 and rows[2]["tokens_per_s"] > 0
    assert about["kind"] == "glide" and about["init"] is None and about["seed"] == 0 and about["config"]["loss"] == "kl" and about["config"]["norm"]
    model, tokenizer = load.load_target(small / "model", "float32", "cpu")
    drafter, _ = glide.load(tmp_path / "glide", model)
    assert about["target"] == load.fingerprint(model, tokenizer) and set(about["validation"]["by_kind"]) == {"a", "b"}
    assert drafter.temperature == about["validation"]["temperature"] != 1
    kept = state_of(tmp_path)["models"]
    for key, value in drafter.model.state_dict().items():
        assert torch.equal(value, kept[f"glide.{key}"].bfloat16().float()), key

def test_a_second_stage_starts_from_the_first(small, tmp_path, capsys):
    names, (first, second, third) = ["glide", "edd", "small"], (tmp_path / name for name in ("first", "second", "third"))
    assert train.main(flags(small, first, "--steps", "3", names=names)) == 0
    assert train.main(flags(small, second, "--init", str(first), "--lr", "1e-30", "--steps", "1", names=names)) == 0
    about = about_of(second, "glide")
    assert saved(first, names) == saved(second, names) and about["init"]["tokens_seen"] > 2 * about["tokens_seen"] > 0
    for more in ("--layer 0", "--hidden -1"):
        argv = flags(small, third, "--init", str(first), *more.split(), names=names)
        refused(capsys, argv, f"not made with {more}")
    # Nothing but measuring
    assert train.main(flags(small, third, "--init", str(second), "--steps", "0", names=names)) == 0
    about = about_of(third, "edd")
    assert saved(second, names) == saved(third, names) and about["tokens_seen"] == 0 and about["validation"]["temperature"] != 1
    about["target"]["vocabulary"] = "0" * 16
    (first / "edd" / "training.json").write_text(json.dumps(about))
    argv = flags(small, tmp_path / "x", "--init", str(first), names=["edd"])
    refused(capsys, argv, "made for another target")

def test_one_pass_over_prepared_data_is_the_default(small, tmp_path, capsys, monkeypatch):
    _, tokenizer = load.load_target(small / "model", "float32", "cpu")
    folder = prepare.prepare([small / "rows.jsonl"], tokenizer, tmp_path / "ready")
    argv = flags(small, tmp_path, "--data", str(folder), names=["vanilla"])
    del argv[argv.index("--steps"):argv.index("--steps") + 2]
    assert train.main(argv) == 0
    pieces = prepare.pieces_of(prepare.open_split(folder, "train")[1], 40)
    assert state_of(tmp_path)["step"] == pieces[:, 1].sum() // (4 * 40) > 1 and not (tmp_path / "work" / "data").exists()
    # GLIDE's learning rate at Vicuna's width, more for narrow targets
    seen = []
    monkeypatch.setattr(train, "load_data", lambda a, *given: seen.append((a.lr, a.batch, a.loss, a.optimizer, a.layers, a.hidden)) or [][0])
    with pytest.raises(IndexError):
        train.main(["glide", "--target", str(small / "model"), "--data", "x", "--length", "40", "--device", "cpu", "--work", str(tmp_path / "w"), "--out", str(tmp_path / "o")])
    assert seen == [(pytest.approx(5e-4 * math.sqrt(4096 / 32)), 8, "kl", "muon", 1, -4)]

# ---------------------------------------------------------------- what drafters are shown
def arguments(**more):
    a = dict(seed=0, length=40, device="cpu", loss="kl", hidden=2, width=16, layers=1, layer=None, norm="yes", block=5, init=None)
    return SimpleNamespace(**{**a, **more})

def test_names_stand_for_their_variants(llama):
    expected = [(name, {key: value for key, value in variant.items() if key != "hidden"}) for name, (_, variant) in runtime_drafters.VARIANTS.items()]
    for name, about in (*expected, ("edd-h1", {"hidden": 1}), ("edd", {"hidden": 2, "loss": "kl"}), ("vanilla", {"glimpse": False}),
                        ("glide", {"layers_read": (2,), "norm": True, "glimpse": True, "loss": "kl"}), ("glide-l1", {"layers_read": (1,), "norm": True}),
                        ("glide-top", {"layers_read": (2,), "norm": False}), ("glide-n2", {"layers": 2, "layers_read": (1, 2)}),
                        ("glide-w32", {"width": 32})):
        config = vars(drafters.fresh(name, llama, arguments()).config)
        assert {key: config[key] for key in about} == about, name
    config = drafters.fresh("glide", llama, arguments(layer=1, norm="no", loss="ce")).config
    assert (config.layers_read, config.norm, config.loss) == ((1,), False, "ce")
    wide = drafters.fresh("glide", llama, arguments(width=None))
    assert torch.equal(wide.embed.weight, llama.get_input_embeddings().weight.float()), "it starts from the target where the widths agree"
    assert drafters.fresh("base", llama, arguments()).lm.config.num_hidden_layers == 3 and drafters.named("edd-h") is drafters.named("lm") is None

def test_a_step_shows_all_drafters_the_same(llama):
    """One block length for all drafters and parts of a step, by (seed, step) alone; each piece once; the target's own precision."""
    ids = torch.randint(1, 12, (500,), generator=torch.Generator().manual_seed(0)).int().numpy()
    pieces = np.array([[i, 10 + i % 7, 0] for i in range(0, 470, 7)])
    model, seen = copy.deepcopy(llama).float(), []

    class Looks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.scale = SimpleNamespace(loss="kl"), torch.nn.Parameter(torch.ones(()))
            self.drafter = lambda: SimpleNamespace(needs={})

        def loss(self, batch):
            assert batch["block"] is None and torch.is_autocast_enabled("cpu"), "drafters train in bfloat16"
            with torch.autocast("cpu", enabled=False), torch.no_grad():
                assert torch.equal(batch["logits"], model(batch["ids"]).logits), "the target does not"
            seen.append((batch["random"].integers(10 ** 9), batch["ids"].sum().item(), batch["learn"].sum().item(), batch["count"]))
            return self.scale * 1.0
    models, a = {"a": Looks(), "b": Looks()}, arguments(batch=5, micro=80, spent=0, dtype="bfloat16", seed=6)
    first, second = (prepare.order(pieces[:, 1], 5 * 40, 7, epoch) for epoch in (0, 1))
    steps = train.Steps(models, partial(frozen.frozen_forward, model, **frozen.read_by(models)), SimpleNamespace(tokens=ids, pieces=pieces), a)
    for step, chosen in ((1, first[1]), (len(first), second[0]), (len(first) + 2, second[2])):
        seen.clear()
        train.add_gradients(steps(step), models, a)
        draws, sums, learned, counts = zip(*seen)
        assert len(seen) > 2 and set(draws) == {np.random.default_rng([9, step]).integers(10 ** 9)}
        assert sum(sums) == 2 * sum(ids[i:i + n].sum() for i, n, _ in pieces[chosen]) and set(counts) == {sum(learned) / 2} == {sum(pieces[chosen, 1] - 1)}
    assert a.spent == pieces[np.concatenate((first[1], second[0], second[2])), 1].sum()

# ---------------------------------------------------------------- how drafters are measured
def some_drafter(name, model):
    """A draft model with weights far from zero, which sometimes guesses right."""
    module = drafters.fresh(name, model, arguments()).double()
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.25) if p.ndim == 2 else None
    return module

def chats_at_random(documents, seed=0):
    """Tokens of chats, ~id where nothing is learned, of 3 to 6 turns -> tokens (n,), documents (m, 3), {where an answer begins: its document's start}."""
    rng, tokens, index, begins = np.random.default_rng(seed), [], [], {}
    for number in range(documents):
        start = len(tokens)
        for turn in range(int(rng.integers(3, 7))):
            ids = rng.integers(0, 12, rng.integers(3, 9))
            if turn % 2:
                begins[len(tokens)] = start
            tokens.extend(ids if turn % 2 else ~ids)
        index.append((start, len(tokens) - start, number % 2))
    return np.array(tokens, "i4"), np.array(index), begins

def evaluation_of(llama, modules, tokens, documents, length=36, micro=64):
    """walk.Evaluation of random chats or texts, as train.py makes it."""
    a, held = arguments(micro=micro, length=length), prepare.pieces_of(documents, length)
    prompts = walk.prompts_of(tokens, documents, length, 7)
    data = SimpleNamespace(held=held[held[:, 1] >= 7], held_tokens=tokens, prompts=prompts, kinds=["a", "b"])
    forward = partial(frozen.frozen_forward, llama, **{**frozen.read_by(modules), "logits": True})
    return walk.Evaluation(forward, llama, data, a)

def test_prompts_are_beginnings_of_documents_up_to_an_answer(llama, monkeypatch):
    """Chats of three times --length: the first answer, where that fits; half of each piece of a text."""
    monkeypatch.setattr(walk, "PROMPTS", 99)
    tokens, documents, begins = chats_at_random(40)
    firsts = {start: begin for begin, start in reversed(begins.items())}
    assert documents[:, 1].mean() > 2 * 12
    found = walk.prompts_of(tokens, documents, 18, 7)                # so that a prompt may have 18 - 12 tokens
    assert {start: start + size for start, size, _ in found} == {start: begin for start, begin in firsts.items() if begin - start <= 6}
    assert 5 < len(found) < 35, "those whose question is longer have no prompt, not one from their middle"
    texts = evaluation_of(llama, {}, tokens, documents, 18).texts
    given = [np.where(tokens[i:i + n] < 0, ~tokens[i:i + n], tokens[i:i + n]).tolist() for i, n, _ in found]
    assert sorted(text[:size].tolist() for text, size, _ in texts) == sorted(given)
    plain_text = np.where(tokens < 0, ~tokens, tokens)
    assert walk.prompts_of(plain_text, np.array([[5, 50, 1], [60, 6, 0]]), 20, 7).tolist() == [[5, 8, 1], [25, 8, 1], [45, 5, 1]], "at most 20 - 12"

def decoded(llama, drafter, text, start):
    """A chain of five by verify.generate -> of each round: accepted tokens; of each drafted token up to the first wrong one: (its logits, the text's)."""
    seen, expand, rounds, tested, t = [], drafter.expand, [], [], start
    drafter.expand = lambda tokens, parents: seen.append(expand(tokens, parents)[0]) or seen[-1][None]
    # One token more than the text has, so that its last one is drafted, too; the last round has no end.
    done = verify.generate(verify.Target(llama), drafter, cape.chain, text[:start], len(text) - start + 1)
    drafter.expand = expand
    assert done.tokens[:-1] == text[start:]
    for round in done.rounds:
        drafted, after = round.tokens[1:], text[t + 1:]
        right = [a == b for a, b in zip(drafted, after)]
        n = (right + [False]).index(False)
        tested += zip(seen[:len(drafted)], after[:min(n + 1, len(right))])
        del seen[:len(drafted)]
        t += len(round.new)
        rounds.append(n)
    return rounds[:-1], sum(rounds), tested

def test_figures_are_those_of_decoding(llama, monkeypatch):
    """On chats: alpha, tau and T as rounds of verify.generate give them, chains of five after the same prompts."""
    monkeypatch.setattr(walk, "PROMPTS", 4)
    monkeypatch.setattr(walk, "NEW", 20)
    modules = {name: some_drafter(name, llama) for name in ("glide", "edd", "eagle", "medusa")}
    evaluation = evaluation_of(llama, modules, *chats_at_random(30)[:2])
    assert len(evaluation.texts) == 4
    for name, found in evaluation(modules).items():
        rounds, right, tested = zip(*(decoded(llama, walk.drafter_of(modules[name]), text.tolist(), start) for text, start, _ in evaluation.texts))
        rounds, right, tested = sum(rounds, []), sum(right), sum(tested, [])
        assert right > 2, "a drafter that is never right would show nothing"
        assert found["alpha"] == right / len(tested) and found["tau"] == pytest.approx(1 + sum(rounds) / len(rounds)), name
        assert found["temperature"] == walk.greedy_temperature(*map(list, zip(*tested))) != 1

def test_language_models_along_a_text(llama):
    """Their forward over the text is the oracle; the target drafts for itself without a mistake."""
    module, start = some_drafter("small", llama), 5
    text = torch.tensor(continuations.continuations(llama, [[1, 2, 3, 4, 5]], [start + 28])[0])
    right, runs, t = (module.lm(text[None]).logits[0, :-1].argmax(-1) == text[1:]).tolist() + [False], [], start
    while t < len(text) - 1:
        runs.append(min(5, right[t:].index(False)))
        t += runs[-1] + 1
    nothing = {"kv": {}, "hidden": {}}
    rounds = walk.walk(module.drafter(), nothing, text, start).accepted
    assert rounds == runs[:len(rounds)] and len(rounds) >= len(runs) - 1 > 0 and sum(rounds) > 0
    assert walk.walk(drafters.SmallLM(llama).drafter(), nothing, text, start).accepted == [5] * 4

def test_evaluation_is_of_all_kinds_evenly(llama, monkeypatch):
    """As many prompts and tokens of each; figures by kind add up to those over all; a loss that is no number is seen."""
    monkeypatch.setattr(walk, "PROMPTS", 6)
    tokens = torch.randint(12, (400,), generator=torch.Generator().manual_seed(0)).int().numpy()
    modules = {name: some_drafter(name, llama) for name in ("glide", "medusa")}
    evaluation = evaluation_of(llama, modules, tokens, np.array([[i, 20, int(i >= 280)] for i in range(0, 360, 20)]))
    metrics = evaluation(modules)
    assert sorted(kind for _, _, kind in evaluation.texts) == [0] * 3 + [1] * 3 and [*map(len, evaluation.pieces.values())] == [2, 2]
    assert all(start == 10 and text[10:].tolist() == plain(llama, text[:10].tolist(), 12) for text, start, _ in evaluation.texts), "half of a text"
    alone = [prepare.gather(tokens, some[i:i + 1]) for some in evaluation.pieces.values() for i in (0, 1)]
    for name, values in metrics.items():
        totals = evaluation.totals[name].values()
        assert values["alpha"] == sum(total["right"] for total in totals) / sum(total["tested"] for total in totals)
        assert {kind: by["alpha"] for kind, by in values["by_kind"].items()} == {
            kind: total["right"] / total["tested"] for kind, total in zip("ab", totals)}
        loss = sum(modules[name].loss(evaluation.forward(ids, learn=learn, count=1) | {"block": 5}).item() for ids, learn in alone)
        assert values["held_out_loss"] == pytest.approx(loss / sum(learn.sum().item() for _, learn in alone), rel=1e-4)
    assert metrics == evaluation(modules), "the same each time"
    modules["glide"].norm.weight.data.fill_(math.nan)
    assert math.isnan(evaluation({"glide": modules["glide"]})["glide"]["held_out_loss"])

def test_greedy_temperature_is_found_again(monkeypatch):
    """Choices sampled from softmax(logits / T): the fit finds T, also far from 1, as a search of the whole grid does; from a sample of the tokens, too."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4000, 8, generator=g)
    for t in (0.35, 1.0, 2.5, 3.8):
        choice = torch.multinomial((logits / t).softmax(-1), 1, generator=g)[:, 0]
        found = walk.greedy_temperature(list(logits), choice.tolist())
        assert abs(found - t) <= 0.06 * max(1, t)
        assert found == min(walk.GRID, key=lambda t: F.cross_entropy(logits / t, choice).item())
    assert walk.greedy_temperature([], []) == 1
    muted = torch.full((8,), float("-inf")).index_fill(0, torch.tensor([0, 1]), 0.0)
    assert walk.greedy_temperature([*logits, muted], [*choice.tolist(), 5]) == found, "a choice that it cannot predict"
    # Of a large vocabulary some tokens are kept, evenly
    monkeypatch.setattr(walk, "LOGITS", 8 * 99)
    monkeypatch.setattr(walk, "FITTED", 1000)
    sample = walk.Sample(3500)
    for i in range(0, 4000, 40):
        sample.add(logits[i:i + 40], range(i, i + 40))
    assert 1000 <= len(sample.choice) <= 1000 * 4000 / 3500 + 1 and np.diff(sample.choice).max() == 4
    assert all(map(torch.equal, sample.logits, logits[sample.choice]))
    assert walk.greedy_temperature(sample.logits, choice[sample.choice].tolist()) == pytest.approx(found, rel=0.2)

# ---------------------------------------------------------------- mistakes, and what the documentation says
def test_targets_of_other_makes(tmp_path, monkeypatch):
    """Configs without Llama's names: a context of BLOOM's, no RoPE in GPT-2.  A target to be spread that is not there."""
    sizes = dict(n_layer=1, n_head=2, vocab_size=20)
    bloom = AutoModelForCausalLM.from_config(BloomConfig(**sizes, hidden_size=8))
    assert drafters.fresh("small", bloom, arguments()).lm.config.max_position_embeddings == 2048
    with pytest.raises(ValueError, match="RoPE"):
        drafters.fresh("longspec", AutoModelForCausalLM.from_config(GPT2Config(**sizes, n_embd=8)), arguments())
    monkeypatch.setattr(train.dist, "is_initialized", lambda: True)
    for name, words in (("nowhere", "does not exist"), (str(tmp_path), "cannot be loaded")):
        with pytest.raises((train.UserError, verify.UserError), match=words):
            train.load_target(arguments(target=name, shard_target=True, revision=None, trust_remote_code=False))

@pytest.fixture(scope="module")
def mistaken(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    cases_training.make_files(folder, small / "model", TEXT)
    loaded, load_target = {}, train.load_target

    def once(a):
        if a.target not in loaded:
            loaded[a.target] = load_target(a)
        return loaded[a.target]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "load_target", once)
        yield folder

@pytest.mark.parametrize("number", range(len(cases_training.CASES)))
def test_mistakes_are_one_sentence(number, mistaken, monkeypatch, capsys):
    """Status 2, and every file is as it was."""
    program, arguments, words = cases_training.CASES[number]
    main = {"train.py": train, "make.py": make, "prepare.py": prepare, "smollm2.py": smollm2}[program].main
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def here(text):
        return re.sub(r"\bT/", f"{mistaken}/", text)
    before = {path: path.stat().st_mtime_ns for path in mistaken.rglob("*") if "/w" not in str(path)[len(str(mistaken)):] and path.is_file()}
    assert main(shlex.split(here(arguments))) == 2
    said = capsys.readouterr().err.replace("\r", "\n").splitlines()
    said = [line for line in said if line.strip() and not line.startswith("left out, ") and "too little text is held out" not in line]
    assert len(said) == 1 and said[0].startswith(f"{program}: ") and here(words) in said[0], said
    assert all(path.stat().st_mtime_ns == time for path, time in before.items()) and not list(mistaken.glob("o*"))

def test_the_commands_in_the_documentation():
    """Each is one that the programs take; the default --out is never the shipped folder."""
    text, known = (ROOT / "docs" / "training.md").read_text(), {"train.py": train.parser(), "checkpoints/make.py": make.parser()}
    said = dict(re.findall(r'^(\w)="(.*)"$', text, re.M))
    commands = [re.sub(r"\$(\w)", lambda name: said[name[1]], line) for line in re.findall(r"^(?:python \w|torchrun).*", text, re.M)]
    commands += [f"python train.py glide {flags}" for flags in re.findall(r'^flags = "(.*)"$', text, re.M)]
    tried = 0
    for words in map(shlex.split, commands):
        script = next(word for word in words if word.endswith(".py"))
        if script in known and "..." not in words:
            a = known[script].parse_args(words[words.index(script) + 1:])
            assert all(drafters.named(name) for name in getattr(a, "what", ()))
            tried += 1
    assert tried > 9 and load.CHECKPOINTS not in [*map(type(ROOT), (default for name, _, default, _ in flags_of_training.FLAGS if name in ("out", "work")))]
