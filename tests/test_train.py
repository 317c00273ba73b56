"""Training: resuming repeats an uninterrupted run, a killed write spoils nothing, held-out text stays out."""
import copy
import json
import re
import signal

import numpy as np
import pytest
import torch
from conftest import plain, tiny

import glide
import train


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny random target with a tokenizer, saved as Hugging Face does, and a folder of text."""
    folder = tmp_path_factory.mktemp("target")
    text = "def add(a, b):\n    return a + b\n\n" * 400
    tokenizer = train.train_tokenizer([text], 300)
    tiny("llama", vocab_size=300, max_position_embeddings=64).float().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text").mkdir()
    for i in range(60):
        (folder / "text" / f"{i}.py").write_text(text[i:2000 + i])
    return folder


KINDS = ["glide", "vanilla", "edd", "vdm-ce", "eagle", "medusa", "small"]


def flags(small, out, *more):
    return [*KINDS, "--hidden", "2", "--target", str(small / "model"), "--data", str(small / "text"), "--out", str(out), "--work",
            str(out / "work"), "--device", "cpu", "--steps", "8", "--batch", "2", "--length", "24", "--width", "16", "--save-every", "3", *more]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_is_bit_for_bit_uninterrupted(small, tmp_path, monkeypatch, capsys, optimizer):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train.main(flags(small, whole, "--optimizer", optimizer)) == 0
    draw, calls = train.draw, []

    def interrupting(*args):
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)                  # Ctrl-C in the middle of step 5
        return draw(*args)
    monkeypatch.setattr(train, "draw", interrupting)
    assert train.main(flags(small, cut, "--optimizer", optimizer)) == 2
    assert "stopped after step 5 of 8" in capsys.readouterr().err and not (cut / "glide").exists()
    monkeypatch.setattr(train, "draw", draw)
    assert train.main(flags(small, cut, "--optimizer", optimizer, "--resume")) == 0
    for name in KINDS:
        assert (whole / name / "model.safetensors").read_bytes() == (cut / name / "model.safetensors").read_bytes()
    states = [torch.load(p / "work" / f"{'-'.join(KINDS)}.pt", weights_only=True)["models"] for p in (whole, cut)]
    for name in states[0]:
        for key in states[0][name]:
            assert torch.equal(states[0][name][key], states[1][name][key]), f"{name} {key}"


def test_resuming_with_other_flags_is_refused(small, tmp_path, capsys):
    assert train.main(flags(small, tmp_path)) == 0
    assert train.main(flags(small, tmp_path, "--lr", "0.1", "--resume")) == 2
    assert "lr differ" in capsys.readouterr().err
    (tmp_path / "work" / f"{'-'.join(KINDS)}.pt").write_bytes(b"half a file")
    assert train.main(flags(small, tmp_path, "--resume")) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_training_learns_and_the_saved_drafter_is_the_trained_one(small, tmp_path):
    args = [x if x != "8" else "60" for x in flags(small, tmp_path, "--lr", "2e-2")]
    assert train.main(args) == 0
    about = json.loads((tmp_path / "glide" / "training.json").read_text())
    assert about["validation"]["held_out_loss"] < 2.0, "started near log(300) = 5.7"
    assert about["tokens_seen"] == 60 * 2 * 24 and about["seed"] == 0 and about["command"].startswith("python train.py")
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(small / "model")
    drafter, _ = glide.load(tmp_path / "glide", model)
    kept = torch.load(tmp_path / "work" / f"{'-'.join(KINDS)}.pt", weights_only=True)["models"]["glide"]
    for key, value in drafter.model.state_dict().items():
        assert torch.equal(value, kept[key].bfloat16().float()), key


def test_a_killed_write_leaves_the_last_checkpoint(tmp_path):
    path = tmp_path / "state.pt"
    train.write_atomically(path, lambda p: torch.save({"step": 1}, p))

    def killed(p):
        p.write_bytes(b"half")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        train.write_atomically(path, killed)
    assert torch.load(path, weights_only=True) == {"step": 1}


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """A made-up interpreter: held-out files (HELD), others (OPEN), and ones that must not be read at all (SKIPPED)."""
    for source, files in {"stdlib": {"json/decoder.py": "HELD", "ast.py": "OPEN", "test/test_ast.py": "SKIPPED"},
                          "torch": {"hub.py": "HELD", "hubert.py": "OPEN"},
                          "transformers": {"models/whisper/modeling_whisper.py": "HELD", "models/bert/modeling_bert.py": "OPEN",
                                           "models/moonshine/modeling.py": "# Copied from transformers.models.whisper.modeling SKIPPED"}}.items():
        for name, word in files.items():
            path = tmp_path / source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("# licence\n" * 3 + "x = 1\n" + f"# {word} {source}\n" * 900)
    monkeypatch.setattr(train, "source_roots", lambda: {s: tmp_path / s for s in ("stdlib", "torch", "transformers")})
    rows = tmp_path / "math.jsonl"
    rows.write_text("".join(json.dumps({"question": f"q{i}", "answer": "2 + 2 = <<2+2=4>>4"}) + "\n" for i in range(3000)))
    return rows


def test_held_out_text_is_never_trained_on(made_up):
    """Held-out files and families, and files that copy from a held-out family, stay out."""
    docs = list(train.corpus(train.HELD_OUT, made_up))
    words = {(s, held, re.search("HELD|OPEN|SKIPPED", t).group()) for s, held, t in docs if s != "math"}
    assert words == {(s, h, "HELD" if h else "OPEN") for s in ("stdlib", "torch", "transformers") for h in (True, False)}
    math = [(held, t) for s, held, t in docs if s == "math"]
    assert [h for h, _ in math] == [False] * 2940 + [True] * 60 and "<<" not in math[0][1]
    assert all(t.startswith("x = 1") for s, _, t in docs if s != "math"), "licences at the top are dropped"


def test_the_stand_in_from_scratch_its_drafter_and_the_benchmark(made_up, tmp_path, monkeypatch, capsys):
    """The whole road on a made-up interpreter: target (resumed, bit for bit), glide on it, bench on its held-out prompts."""
    import bench
    monkeypatch.setattr(bench, "source_roots", train.source_roots)
    base = ["--math", str(made_up), "--work", str(tmp_path / "work"), "--device", "cpu", "--batch", "2", "--length", "400", "--save-every", "2"]
    target = ["target", *base, "--vocab", "300", "--width", "32", "--layers", "2", "--steps", "5", "--out", str(tmp_path / "target")]
    assert train.main(target) == 0
    whole = (tmp_path / "target" / "model.safetensors").read_bytes()
    draw, calls = train.draw, []

    def interrupting(*args):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return draw(*args)
    monkeypatch.setattr(train, "draw", interrupting)
    assert train.main(target) == 2
    monkeypatch.setattr(train, "draw", draw)
    assert train.main([*target, "--resume"]) == 0
    assert (tmp_path / "target" / "model.safetensors").read_bytes() == whole
    about = json.loads((tmp_path / "target" / "training.json").read_text())
    assert set(about["validation"]) == {"stdlib", "torch", "transformers", "math"} and about["tokens_seen"] == 5 * 2 * 400
    assert json.loads((tmp_path / "target" / "held_out.json").read_text()) == train.HELD_OUT

    assert train.main(["glide", *base, "--target", str(tmp_path / "target"), "--out", str(tmp_path), "--width", "16", "--steps", "2"]) == 0
    capsys.readouterr()
    assert bench.main(["--target", str(tmp_path / "target"), "--checkpoint", str(tmp_path), "--max-new-tokens", "6", "--device", "cpu", "--limit", "4"]) == 0
    out = capsys.readouterr().out
    assert "29 held-out modules are not in this interpreter" in out and "code: 2 prompts" in out and "glide x cape" in out and "NO" not in out


def test_continuations_are_the_targets_own_and_a_second_stage_starts_from_the_first(small, tmp_path, capsys):
    base = ["--target", str(small / "model"), "--work", str(tmp_path / "work"), "--device", "cpu", "--batch", "3", "--length", "24"]
    written = tmp_path / "written.jsonl"
    made = ["continuations", *base, "--data", str(small / "text"), "--steps", "4", "--out", str(written)]
    assert train.main(made) == 0
    rows = [json.loads(line)["ids"] for line in written.read_text().splitlines()]
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(small / "model")
    assert len(rows) == 12 and len({tuple(r[:6]) for r in rows}) > 6
    for ids in rows:
        assert ids[6:] == plain(model, ids[:6], 18)[:len(ids) - 6]
    whole = written.read_bytes()
    written.write_bytes(whole[:len(whole) // 2])                   # cut off in the middle of a row
    assert train.main([*made, "--resume"]) == 0 and written.read_bytes() == whole

    first, second, kinds = tmp_path / "first", tmp_path / "second", ["glide", "edd", "small"]
    assert train.main([*kinds, *base, "--hidden", "2", "--data", str(small / "text"), "--width", "16", "--steps", "3", "--out", str(first)]) == 0
    assert train.main([*kinds, *base, "--data", str(written), "--init", str(first), "--lr", "1e-30", "--steps", "1", "--out", str(second)]) == 0
    for name in kinds:
        assert (first / name / "model.safetensors").read_bytes() == (second / name / "model.safetensors").read_bytes()
    about = json.loads((second / "glide" / "training.json").read_text())
    assert about["init"]["tokens_seen"] == 3 * 3 * 24 and about["tokens_seen"] == 3 * 24
    assert train.main(["vanilla", *base, "--data", str(written), "--init", str(first), "--steps", "1"]) == 2
    assert "no drafter in" in capsys.readouterr().err
    assert train.main([*kinds, *base, "--data", str(written), "--init", str(second), "--steps", "0", "--out", str(tmp_path / "third")]) == 0
    assert (tmp_path / "third" / "edd" / "model.safetensors").read_bytes() == (second / "edd" / "model.safetensors").read_bytes()
    about = json.loads((tmp_path / "third" / "edd" / "training.json").read_text())
    drafter, _ = train.edd.load(tmp_path / "third" / "edd", model)
    assert about["tokens_seen"] == 0 and drafter.temperature == about["validation"]["temperature"] != 1


def test_greedy_temperature_is_found_again():
    """Choices drawn from softmax(logits / T): the fit finds T."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20000, 8, generator=g)
    for t in (0.5, 1.0, 1.4):
        choice = torch.multinomial((logits / t).softmax(-1), 1, generator=g)[:, 0]
        assert abs(train.greedy_temperature(logits, choice) - t) <= 0.05


def test_defaults_are_the_papers_recipes_and_the_loss_of_a_small_model_is_kl(small, tmp_path, monkeypatch, llama):
    """EDD's batch 8 and learning rate 1e-4, GLIDE's 64 and 5e-4, as they reach the training loop."""
    seen = []
    monkeypatch.setattr(train, "train_drafters", seen.append)
    for names in (["edd", "vdm"], ["glide"], ["glide", "edd"], ["edd-h2"]):
        assert train.main([*names, "--target", "x", "--device", "cpu"]) == 0
    assert [(a.batch, a.lr, a.optimizer) for a in seen] == [(8, 1e-4, "adamw"), (64, 5e-4, "adamw"), (64, 5e-4, "adamw"), (8, 1e-4, "adamw")]
    model = train.SmallLM(tiny("llama", seed=5))
    ids = torch.randint(12, (2, 9))
    loss, logits = model.loss(train.frozen_forward(llama, ids, "float32"))
    with torch.no_grad():
        p, q = (torch.distributions.Categorical(logits=m(ids).logits) for m in (llama, model.lm))
    assert loss.item() == pytest.approx(torch.distributions.kl_divergence(p, q).mean().item(), abs=1e-5)
    assert torch.equal(logits, model.lm(ids).logits)


def test_windows_come_from_the_file_and_depend_on_seed_and_step_alone(tmp_path):
    path = tmp_path / "t.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    files = {"a": train.TokenFile(path, 2000), "b": train.TokenFile(path, 2000)}
    assert isinstance(files["a"].ids, np.memmap)
    first = train.draw(files, {"a": 1.0, "b": 0.0}, 4, 10, 0, 3)
    assert torch.equal(first, train.draw(files, {"a": 1.0, "b": 0.0}, 4, 10, 0, 3))
    assert not torch.equal(first, train.draw(files, {"a": 1.0, "b": 0.0}, 4, 10, 0, 4))
    assert (first.diff(dim=1) == 1).all() and first.dtype == torch.int64


def test_learning_rate_schedule():
    steps = [train.cosine(i, 1000, 0.025) for i in range(1000)]
    assert steps[0] == 1 / 25 and steps[24] == 1.0 and steps.index(max(steps)) == 24
    assert abs(steps[25 + 975 // 2] - 0.5) < 2e-3 and steps[-1] < 1e-5


@pytest.mark.parametrize("argv, words", [
    (["glid"], "cannot train glid"), (["edd-h"], "cannot train edd-h"),
    (["target", "glide"], "name target or continuations alone"), (["glide", "--target", "/no/such"], "does not exist"),
    (["glide", "--steps", "0"], "--steps is 0"),
    (["glide", "--steps", "-1"], "--steps is -1"), (["glide", "--lr", "-1"], "--lr is -1"), (["glide", "--length", "4"], "longer than a block"),
    (["glide", "--width", "x"], "invalid int value"), (["target", "--math", "/no/such"], "does not exist"), (["glide", "--device", "cuda"], "no CUDA device"),
])
def test_mistakes_are_one_sentence(argv, words, capsys):
    if words == "no CUDA device" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert train.main(argv) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and "Traceback" not in err


def test_data_mistakes(small, tmp_path, capsys):
    base = ["glide", "--target", str(small / "model"), "--work", str(tmp_path), "--device", "cpu"]
    (tmp_path / "short.txt").write_text("a")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ')
    (tmp_path / "odd.jsonl").write_text('{"sentence": "a"}\n')
    for more, words in ((["--data", "/no/such"], "does not exist"), (["--data", str(tmp_path / "bad.jsonl")], "cannot be read"),
                        (["--data", str(tmp_path / "odd.jsonl")], "has none of the fields"), ([], "--data FILES-OR-FOLDERS is missing"),
                        (["--data", str(tmp_path / "short.txt")], "too few tokens"),
                        (["--data", str(small / "text"), "--length", "64", "--layer", "7"], "cannot be read")):
        assert train.main(base + more) == 2
        assert words in capsys.readouterr().err
    assert train.main(["edd-h9", *base[1:], "--data", str(small / "text"), "--length", "64"]) == 2
    assert "no layer's output" in capsys.readouterr().err


def test_fingerprint_tells_targets_apart_but_not_precisions(llama):
    mine = train.fingerprint(llama)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert train.same_target(mine, train.fingerprint(copy.deepcopy(llama).to(dtype)))
    tuned = copy.deepcopy(llama)
    for p in tuned.parameters():
        p.data += 0.05 * p.data.std() * torch.randn_like(p) if p.ndim == 2 else 0
    for other in (tuned, tiny("llama", seed=9), tiny("mistral")):
        assert not train.same_target(mine, train.fingerprint(other))
