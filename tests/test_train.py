"""train.py: a resumed run is an uninterrupted one; losses, updates, metrics are what they say."""
import json
import math
import re
import shlex
import signal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import ROOT, tiny, weighty
from helpers import TEXT, save, tokenizer_of, write_rows

import cape
import train
import verify
from runtime import families, load
from runtime.errors import UserError
from training import evaluate, models, muon

NAMES = {"glide": "glide(width=16)", "edd": "edd(hidden=2)", "eagle": "eagle",
         "small": "small(loss='ce')", "own": "own=glide-shared(feed_forward=16, words=20)"}

@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Few prompts and pieces to measure drafters on."""
    monkeypatch.setattr(evaluate, "PROMPTS", 2)
    monkeypatch.setattr(evaluate, "NEW", 12)
    monkeypatch.setattr(train, "HELD_OUT", 96)

@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A tiny random target with a tokenizer, saved as Hugging Face does, and text of two kinds."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny("llama", vocab_size=300, max_position_embeddings=64).float()
    save(folder / "model", model, tokenizer_of(TEXT * 400))
    rows = []
    for i in range(60):
        text = (TEXT * 9)[i:i + 20 + 37 * i % 250]
        rows.append({"text": text, "group": "ab"[i % 2], "held_out": i % 10 in (4, 7)})
    write_rows(folder / "rows.jsonl", rows)
    return folder

def flags(small, out, *more, names):
    """train.py's arguments.  names: of NAMES."""
    given = [NAMES[name] for name in names]
    return [*given, "--target", str(small / "model"), "--data", str(small / "rows.jsonl"),
            "--out", str(out / "out"), "--work", str(out / "work"), "--device", "cpu",
            "--steps", "4", "--batch", "3", "--length", "40", "--every", "2",
            "--optimizer", "adamw", "--lr", "1e-3", *more]

def saved(out, names):
    return [(out / "out" / name / "model.safetensors").read_bytes() for name in names]

def about_of(out, name):
    return json.loads((out / "out" / name / "training.json").read_text())

def state_of(out):
    return torch.load(out / "work" / "state.pt", weights_only=True)

def weights_of(state):
    """{"glide layers.0.o.weight": tensor} of a state's drafters"""
    return {f"{name} {key}": weight for name, weights in state["drafters"].items()
            for key, weight in weights.items()}

def interrupt(monkeypatch, at, how):
    """Let something happen in the middle of the `at`-th step of training, counted from 1."""
    pieces_of_steps = train.pieces_of_steps

    def interrupting(*given):
        for number, pieces in enumerate(pieces_of_steps(*given), 1):
            if number == at:
                how()
            yield pieces
    monkeypatch.setattr(train, "pieces_of_steps", interrupting)

def refused(capsys, argv, words, main=train.main):
    """One sentence with these words, and exit status 2."""
    assert main(argv) == 2
    err = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert words in err[-1] and not any("Traceback" in line for line in err), err

# ---------------------------------------------------------------- going on
@pytest.mark.parametrize("number, optimizer, names", [
    (signal.SIGINT, "adamw", ["small", "own"]), (signal.SIGTERM, "muon", ["glide", "edd"])])
def test_a_resumed_run_is_bit_for_bit_an_uninterrupted_one(
        small, tmp_path, monkeypatch, capsys, number, optimizer, names):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    handler, how = signal.getsignal(number), ("--optimizer", optimizer)
    assert train.main(flags(small, whole, *how, names=names)) == 0
    with monkeypatch.context() as patch:
        interrupt(patch, 4, lambda: signal.raise_signal(number))
        refused(capsys, flags(small, cut, *how, names=names),
                "stopped after 3 of 4 steps: the same command with --resume goes on")
    assert not (cut / "out").exists() and signal.getsignal(number) is handler
    assert state_of(cut)["step"] == 3
    assert train.main(flags(small, cut, *how, "--resume", names=names)) == 0
    assert saved(whole, names) == saved(cut, names)
    a, b = weights_of(state_of(whole)), weights_of(state_of(cut))
    assert a and all(torch.equal(value, b[key]) for key, value in a.items())

def test_a_killed_run_goes_on_from_the_last_saved_state(small, tmp_path, monkeypatch, capsys):
    """Only the same flags go on with it, with the learning rate that is given then; what is used is
    replaced by --overwrite alone."""
    def killed():
        raise MemoryError
    one = partial(flags, small, tmp_path, names=["glide"])
    state = tmp_path / "work" / "state.pt"
    refused(capsys, one("--resume"), "--resume: there is no interrupted run")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        interrupt(patch, 4, killed)
        train.main(one())
    before, weights = state.read_bytes(), weights_of(state_of(tmp_path))
    refused(capsys, one(), "state.pt is there already")
    refused(capsys, one("--seed", "1", "--resume"), "had another seed; only")
    other = flags(small, tmp_path, "--resume", names=["edd"])
    refused(capsys, other, "had another drafters; only")
    assert state.read_bytes() == before and state_of(tmp_path)["step"] == 2
    state.write_bytes(before[:-99])
    refused(capsys, one("--resume"), "state.pt is damaged")
    state.write_bytes(before)
    assert train.main(one("--resume", "--lr", "1e-30", "--every", "3", "--micro", "64")) == 0
    after = weights_of(state_of(tmp_path))
    assert all(torch.equal(value, after[key]) for key, value in weights.items())
    refused(capsys, one("--work", str(tmp_path / "other")), "out/glide is there already")
    files = saved(tmp_path, ["glide"])
    assert train.main(one("--overwrite")) == 0 and saved(tmp_path, ["glide"]) != files

# ---------------------------------------------------------------- the loop
class OneWeight(torch.nn.Module):
    """Its loss in step i is losses[i](weight)."""

    def __init__(self, size, losses):
        super().__init__()
        self.layer = torch.nn.Linear(size, 1, bias=False).double()
        self.losses, self.config = iter(losses), None

    def terms(self, batch, block):
        return [(torch.ones(1, 1, 1), torch.ones(1, 1), None)]

    def loss_of(self, x, labels):
        return next(self.losses)(self.layer.weight)

def fit(drafters, folder, monkeypatch, steps=6, lr=0.1):
    """train.fit of OneWeights, on a text of one label a step."""
    monkeypatch.setattr(train, "evaluate", lambda *_: {name: {"held_out_loss": 0.0}
                                                       for name in drafters})
    batch = SimpleNamespace(loss_mask=torch.ones(1, 1, dtype=torch.bool))
    frozen = SimpleNamespace(device=torch.device("cpu"), chunk_size=1, batch=lambda *_: batch)
    data = SimpleNamespace(tokens=np.arange(2 * steps), documents=np.array([[0, 2 * steps, 0]]))
    a = SimpleNamespace(work=str(folder), every=1, resume=False, seed=0, length=2, batch=1,
                        micro=2, dtype="float32")
    train.fit(drafters, muon.optimizers(drafters, "adamw"), frozen, None, data, steps, lr, {}, a)

def test_an_update_is_adamws_of_the_clipped_gradient(tmp_path, monkeypatch):
    """Betas 0.9 and 0.95 (the official code's), decay 0.01, each drafter's norm at most 1."""
    slopes = {"a": torch.tensor([3.0, 4.0]).double(), "b": torch.tensor([0.6, 0.0]).double()}
    scales = [1.0, 0.1, 20.0, 0.01, 3.0, 0.5]
    drafters = {}
    for name, slope in slopes.items():
        losses = [lambda w, c=scale * slope: (w * c).sum() for scale in scales]
        drafters[name] = OneWeight(2, losses)
    start = {name: module.layer.weight.detach().clone() for name, module in drafters.items()}
    fit(drafters, tmp_path, monkeypatch)
    for name, module in drafters.items():
        w, mean, square = start[name], 0.0, 0.0
        for step, scale in enumerate(scales):
            g = scale * slopes[name]
            g = g / max(1.0, g.norm().item())
            mean, square = 0.9 * mean + 0.1 * g, 0.95 * square + 0.05 * g ** 2
            root = (square / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
            update = 0.01 * w + mean / (1 - 0.9 ** (step + 1)) / root
            w = w - 0.1 * train.cosine(step, 6) * update
        torch.testing.assert_close(module.layer.weight, w, atol=1e-5, rtol=0)
    steps = [train.cosine(i, 1000) for i in range(1000)]
    assert steps[0] == 1 / 25 and steps[24] == 1.0 and steps.index(max(steps)) == 24, "2.5 %"
    assert abs(steps[25 + 975 // 2] - 0.5) < 2e-3 and steps[-1] < 1e-5 and train.cosine(0, 1) == 1

@pytest.mark.parametrize("bad", [lambda w: (w * 0).sqrt().sum(), lambda w: (w * math.nan).sum()])
def test_weights_of_a_loss_that_is_not_finite_are_never_saved(tmp_path, monkeypatch, bad):
    def good(w):
        return w.square().sum()
    drafters = {"a": OneWeight(1, [good] * 6), "b": OneWeight(1, [good] * 3 + [bad])}
    with pytest.raises(UserError, match="step 3: the loss of b .* give a lower --lr, and go on"):
        fit(drafters, tmp_path, monkeypatch)
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 2
    assert all(torch.isfinite(p).all() for m in drafters.values() for p in m.parameters())

def test_muon_takes_stacked_matrices_one_by_one(llama):
    """q, k, v and gate, up of a GLIDE: as PyTorch's Muon on each alone; tables, norms by AdamW.

    PyTorch's computes in bfloat16, so updates differ by its rounding.
    """
    module = start("glide(width=16)", llama)
    adamw, by_muon = muon.optimizers({"a-head": module}, "muon")
    rest = {id(p) for p in adamw.param_groups[0]["params"]}
    held = {id(group["params"][0]): group["count"] for group in by_muon.param_groups}
    assert {id(module.embed.weight), id(module.head.weight), id(module.norm.weight)} <= rest
    assert len(rest) + len(held) == len(list(module.parameters()))
    layer = module.layers[0]
    counts = [held[id(getattr(layer, name).weight)] for name in ("qkv", "up", "o", "glimpse_q")]
    assert counts == [3, 2, 1, 1]
    torch.manual_seed(0)
    fused = torch.nn.Parameter(torch.randn(12, 6))           # three of 4 x 6
    tall = torch.nn.Parameter(torch.randn(8, 3))
    parts = [*fused.detach().chunk(3), tall.detach()]
    parts = [torch.nn.Parameter(part.clone()) for part in parts]
    ours = muon.Muon([(fused, 3), (tall, 1)])
    theirs = torch.optim.Muon(parts, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for lr in (0.1, 0.1, 0.05):
        fused.grad, tall.grad = torch.randn(12, 6), torch.randn(8, 3)
        for part, grad in zip(parts, (*fused.grad.chunk(3), tall.grad)):
            part.grad = grad.clone()
        for optimizer in (ours, theirs):
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
    torch.testing.assert_close(fused, torch.cat(parts[:3]), rtol=0, atol=2e-3)
    torch.testing.assert_close(tall, parts[3], rtol=0, atol=2e-3)

def test_training_learns_and_the_saved_drafter_is_the_trained_one(small, tmp_path, capsys):
    names = ["glide", "edd"]
    argv = flags(small, tmp_path, "--lr", "2e-2", "--steps", "50", "--every", "25", names=names)
    assert train.main(argv) == 0
    about = about_of(tmp_path, "glide")
    log = [json.loads(line) for line in open(tmp_path / "work" / "log.jsonl")]
    assert about["command"] == log.pop(0)["command"] == "python train.py " + shlex.join(argv)
    assert [row["step"] for row in log] == [25, 50] and log[1]["glide"]["loss"] < 2
    assert log[1]["tokens_seen"] == about["tokens_seen"] == 50 * 3 * 40
    for name in names:
        before, after = (row[name]["held_out_loss"] for row in log)
        assert about_of(tmp_path, name)["validation"]["held_out_loss"] == after < before
    assert (about["kind"], about["init"], about["seed"]) == ("glide", None, 0)
    model, tokenizer = load.load_target(small / "model", "float32", "cpu")
    drafter, _ = families.load(tmp_path / "out" / "glide", model)
    assert about["target"] == load.fingerprint(model, tokenizer)
    by_kind = about["validation"]["by_kind"]
    losses = [values["held_out_loss"] for values in by_kind.values()]
    assert set(by_kind) == {"a", "b"}
    assert about["validation"]["held_out_loss"] == pytest.approx(sum(losses) / 2)
    assert drafter.temperature == about["validation"]["temperature"] != 1
    kept = state_of(tmp_path)["drafters"]["glide"]
    for key, value in drafter.model.state_dict().items():
        assert torch.equal(value, kept[key].bfloat16().float())
    # A second stage starts from it, by the names of its folders; --steps 0 only measures.
    again = tmp_path / "again"
    argv = flags(small, again, "--init", str(tmp_path / "out"), "--steps", "0", names=names)
    refused(capsys, argv, "--init fixes the architecture, so only loss may be given")
    refused(capsys, ["x=glide", *argv[2:]], "--init: there is no ")
    refused(capsys, ["glide=edd", *argv[2:]], "does not serve as edd here: it is a glide")
    assert train.main([*names, *argv[2:]]) == 0
    assert saved(again, names) == saved(tmp_path, names)
    assert about_of(again, "edd")["init"]["tokens_seen"] == 6000
    assert about_of(again, "edd")["tokens_seen"] == 0

def test_each_drafter_is_that_of_its_own_run(small, tmp_path):
    names, more = ["glide", "edd"], ["--steps", "2"]
    assert train.main(flags(small, tmp_path / "all", *more, names=names)) == 0
    together = state_of(tmp_path / "all")["drafters"]
    for name in names:
        assert train.main(flags(small, tmp_path / name, *more, names=[name])) == 0
        alone = state_of(tmp_path / name)["drafters"][name]
        assert alone and all(torch.equal(together[name][key], x) for key, x in alone.items())

# ---------------------------------------------------------------- names
def start(text, model, tokens=np.arange(12)):
    """The draft model of a call."""
    torch.manual_seed(0)
    call, = models.calls_of([text]).values()
    module, _ = models.start(call, model, None, 40, tokens)
    return module

@pytest.mark.parametrize("text, expected", [
    ("glide", {"layers_read": (2,), "norm": True, "glimpse": True, "loss": "kl", "width": 32}),
    ("glide(layer=1, norm=False, loss='ce')", {"layers_read": (1,), "norm": False, "loss": "ce"}),
    ("glide(layers=2, width=24, block=3)", {"layers_read": (1, 2), "width": 24, "block": 3}),
    ("vanilla", {"glimpse": False}), ("medusa(heads=2)", {"heads": 2}),
    ("edd(hidden=2, blocks=(5, 5))", {"hidden": 2, "blocks": (5, 5), "encoding": True}),
    ("vdm(loss='ce')", {"encoding": False, "loss": "ce"}), ("eagle", {"hidden": 3}),
    ("glide-shared(feed_forward=24, words=5, loss='lk')", {"feed_forward": 24, "loss": "lk"})])
def test_calls_become_their_settings(text, expected, llama):
    config = vars(start(text, llama).config)
    assert {key: config[key] for key in expected} == expected

def test_a_call_may_have_a_name():
    calls = models.calls_of(["top=glide(norm=False)", "glide(layer=1)", "a-2 = edd"])
    assert [(name, call.name) for name, call in calls.items()] == [
        ("top", "glide"), ("glide", "glide"), ("a-2", "edd")]
    assert calls["top"].settings == {"norm": False}

def test_a_drafter_starts_from_the_target_where_the_widths_agree():
    """By copies of its embedding and head."""
    model = tiny("llama").float()
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    wide = start("glide", model)
    assert torch.equal(wide.embed.weight, embed) and torch.equal(wide.head.weight, head)
    assert wide.head.weight.data_ptr() != head.data_ptr()
    for other in (start("glide(tables='random')", model), start("glide(width=24)", model)):
        assert not torch.equal(other.head.weight[:, :24], head[:, :24])

def test_the_commands_of_the_documentation_are_understood():
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "training.md").read_text()
    commands = re.findall(r"^python train\.py (.*)", text, re.M)
    assert len(commands) > 3
    for command in commands:
        a = train.parser().parse_args(shlex.split(command))
        assert models.calls_of(a.drafters)

# ---------------------------------------------------------------- losses
@pytest.mark.parametrize("text", ["edd(hidden=2, loss='ce')", "eagle", "medusa(heads=2)", "small",
                                  "glide-shared(words=5)"])
def test_a_loss_in_chunks_and_with_padding_is_that_of_each_document(llama, text):
    """Value and gradients: all at once, and five positions at a time.

    The oracle: each document alone, without padding, by the drafter's own terms.
    """
    tokens = torch.randint(12, (60,), generator=torch.Generator().manual_seed(4)).int().numpy()
    tokens[20:23] = ~tokens[20:23]
    module = weighty(start(text, llama, tokens))
    pieces = np.array([[0, 18, 0], [18, 7, 0], [40, 11, 0]])
    kind = text.partition("(")[0]
    frozen = train.FrozenTarget(llama, {"x": module}, {"x": models.drafter_of(kind, module)})
    found = []
    for size in (10 ** 6, 5):
        module.zero_grad()
        loss = train.masked_loss(module, frozen.batch(tokens, pieces), 5, size)
        loss.backward()
        found.append([loss, *(p.grad for p in module.parameters())])
    module.zero_grad()
    total = 0.0
    for start_, size, _ in pieces:
        given = torch.from_numpy(tokens[start_:start_ + size].astype("i8"))
        batch = frozen.batch(np.where(given < 0, ~given, given), np.array([[0, size, 0]]))
        is_label = given[1:] >= 0
        for x, labels, mask in module.terms(batch, 5):
            mask = is_label if mask is None else is_label & mask[0, :-1]
            total = total + module.loss_of(x[0, :-1][mask], labels[0, :-1][mask])
    total.backward()
    expected = [total, *(p.grad for p in module.parameters())]
    for ours in found:
        for value, oracle in zip(ours, expected):
            torch.testing.assert_close(value, oracle, atol=1e-5, rtol=1e-4)

def test_block_lengths_are_uniform_and_known_by_the_step():
    """EDD, 3.1.  Drafters of one range have the same in each step."""
    module = SimpleNamespace(config=SimpleNamespace(blocks=(5, 10)))
    found, again, other = ([train.block_of_step(module, seed, step) for step in range(3000)]
                           for seed in (0, 0, 1))
    counts = np.bincount(found, minlength=11)
    assert counts[5:].sum() == 3000 and abs(counts[5:] - 500).max() < 80
    assert found == again != other

def test_what_is_read_of_the_target(llama):
    """The batch against the target's own forward: layers, hidden states, logits, those of words."""
    ids = torch.randint(12, (2, 9), generator=torch.Generator().manual_seed(0))
    pieces = np.array([[0, 9, 0], [9, 9, 0]])
    cache = transformers.DynamicCache()
    with torch.no_grad():
        out = llama(ids, past_key_values=cache, output_hidden_states=True)
    for texts, kv, hidden, words in (
            (["glide(layer=1)", "eagle"], {1}, {3}, slice(None)),
            (["edd(hidden=2, loss='ce')", "medusa"], set(), {2, 3}, None),
            (["edd-shared(hidden=2, words=4)"], set(), {2}, [11, 0, 1, 2])):
        # Token 5 stands in prompts alone: it is no word to learn.
        tokens = np.array([~5] * 9 + [11] * 3 + [0, 1, 2] * 2)
        modules = {text: start(text, llama, tokens)
                   for text in texts}
        decoders = {text: models.drafter_of(text.partition("(")[0], module)
                    for text, module in modules.items()}
        frozen = train.FrozenTarget(llama, modules, decoders)
        batch = frozen.batch(ids.flatten().int().numpy(), pieces)
        assert torch.equal(batch.ids, ids)
        assert batch.loss_mask.tolist() == [[True] * 8 + [False]] * 2
        assert batch.kv.keys() == kv and batch.hidden.keys() == hidden
        for layer in kv:
            torch.testing.assert_close(batch.kv[layer][0], cache.layers[layer].keys)
            torch.testing.assert_close(batch.kv[layer][1], cache.layers[layer].values)
        for index in hidden:
            torch.testing.assert_close(batch.hidden[index], out.hidden_states[index])
        if words is None:
            assert batch.logits is None
        else:
            torch.testing.assert_close(batch.logits, out.logits[..., words])

# ---------------------------------------------------------------- how drafters are measured
def chats_at_random(documents, seed=0):
    """Tokens of chats, ~id where nothing is learned -> tokens (n,), documents (m, 3)."""
    rng, tokens, index = np.random.default_rng(seed), [], []
    for number in range(documents):
        begin = len(tokens)
        for turn in range(int(rng.integers(3, 7))):
            ids = rng.integers(1, 12, rng.integers(3, 9))
            tokens.extend(ids if turn % 2 else ~ids)
        index.append((begin, len(tokens) - begin, number % 2))
    return np.array(tokens, "i4"), np.array(index)

def decoded(model, drafter, text, begin):
    """A chain of five by verify.generate -> accepted tokens of each round, and tested ones."""
    rounds, tested, t = [], 0, begin
    # One token more than the text has, so that its last one is drafted, too; the last round has no
    # end.
    new = len(text) - begin + 1
    done = verify.generate(verify.Target(model), drafter, cape.chain, text[:begin], new)
    assert done.tokens[:-1] == text[begin:]
    for each in done.rounds:
        right = [a == b for a, b in zip(each.tokens[1:], text[t + 1:])]
        accepted = (right + [False]).index(False)
        tested += min(accepted + 1, len(right))
        t += len(each.new)
        rounds.append(accepted)
    return rounds, tested

def test_alpha_and_tau_are_those_of_decoding(llama, monkeypatch):
    """On chats, of which the target continues the prompt up to the first answer."""
    monkeypatch.setattr(evaluate, "PROMPTS", 4)
    monkeypatch.setattr(evaluate, "NEW", 16)
    tokens, documents = chats_at_random(30)
    modules = {name: weighty(start(text, llama)) for name, text in (
        ("glide", "glide"), ("eagle", "eagle"), ("medusa", "medusa"), ("small", "small"))}
    decoders = {name: models.drafter_of(name, module) for name, module in modules.items()}
    frozen = train.FrozenTarget(llama, modules, decoders)
    data = SimpleNamespace(held_tokens=tokens, held_documents=documents, kinds=["a", "b"])
    walks = evaluate.Walks(llama, frozen.forward, data, 36, decoders)
    assert [kind for _, _, kind in walks.texts] == [0, 1] * 2
    found = walks.measure()
    assert found == walks.measure(), "the same each time"
    for name, module in modules.items():
        drafter = models.drafter_of(name, module)
        results = [decoded(llama, drafter, text.tolist(), size) for text, size, _ in walks.texts]
        rounds, tested = zip(*results)
        right = sum(map(sum, rounds))
        assert right > 2, "a drafter that is never right would show nothing"
        assert found[name]["alpha"] == right / sum(tested), name
        ended = [accepted for each in rounds for accepted in each[:-1]]
        assert found[name]["tau"] == pytest.approx(1 + sum(ended) / len(ended)), name

def test_the_temperature_is_found_again():
    """Choices sampled from softmax(logits / T): the fit finds T, as a search of the grid does."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4000, 8, generator=g)
    for t in (0.35, 1.0, 2.5):
        choice = torch.multinomial((logits / t).softmax(-1), 1, generator=g)[:, 0]
        found = evaluate.fit_temperature(list(logits), choice.tolist())
        assert abs(found - t) <= 0.06 * max(1, t)
        assert found == min(evaluate.GRID, key=lambda t: F.cross_entropy(logits / t, choice).item())
    assert evaluate.fit_temperature([], []) == 1
    muted = torch.full((8,), float("-inf")).index_fill(0, torch.tensor([0, 1]), 0.0)
    again = evaluate.fit_temperature([*logits, muted], [*choice.tolist(), 5])
    assert again == found, "what it cannot predict"
