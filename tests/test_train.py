"""train.py: a resumed run is an uninterrupted one, each loss is what it says, drafters are measured as decoding sees them."""
import json
import math
import signal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
import torch.nn.functional as F
import transformers
from conftest import shared, tiny

import cape
import glide
import train
import verify
from runtime import load
from training import drafters, evaluate, muon
from training.forward import reads_of

KINDS = ["glide", "edd", "eagle", "medusa", "small"]
TEXT = "def add(a, b):\n    return a + b\n\n"

@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Few prompts and pieces to measure drafters on."""
    for name, value in (("PROMPTS", 2), ("NEW", 12)):
        monkeypatch.setattr(evaluate, name, value)
    monkeypatch.setattr(train, "HELD_OUT", 96)

def tokenizer_of(text, vocab=300):
    """A byte-level BPE tokenizer; its end-of-text token has the id 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<|endoftext|>"], show_progress=False, initial_alphabet=alphabet)
    bpe.train_from_iterator([text], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>")

def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A tiny random target with a tokenizer, saved as Hugging Face does, and text of two kinds."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer_of(TEXT * 400).save_pretrained(folder / "model")
    tiny("llama", vocab_size=300, max_position_embeddings=64).float().save_pretrained(folder / "model")
    rows = [{"text": (TEXT * 9)[i:i + 20 + 37 * i % 250], "group": "ab"[i % 2], "held_out": i % 10 in (4, 7)} for i in range(60)]
    write_rows(folder / "rows.jsonl", rows)
    return folder

def flags(small, out, *more, names=KINDS):
    return [*names, "--hidden", "2", "--target", str(small / "model"), "--data", str(small / "rows.jsonl"), "--out", str(out / "out"),
            "--work", str(out / "work"), "--device", "cpu", "--steps", "4", "--batch", "3", "--length", "40", "--width", "16",
            "--every", "2", "--optimizer", "adamw", "--lr", "1e-3", *more]

def saved(out, names=KINDS):
    return [(out / "out" / name / "model.safetensors").read_bytes() for name in names]

def about_of(out, name):
    return json.loads((out / "out" / name / "training.json").read_text())

def state_of(out):
    with safe_open(out / "work" / "state.safetensors", "pt") as file:
        models = {name.removeprefix("model "): file.get_tensor(name) for name in file.keys() if name.startswith("model ")}
        return {"step": int(file.metadata()["step"]), "models": models}

def interrupt(monkeypatch, at, how):
    """Let something happen in the middle of the `at`-th step of training, counted from 1."""
    gradients, calls = train.Gradients.__call__, []

    def interrupting(self, step):
        calls.append(1)
        if len(calls) == at:
            how()
        return gradients(self, step)
    monkeypatch.setattr(train.Gradients, "__call__", interrupting)

def refused(capsys, argv, words, main=train.main):
    assert main(argv) == 2
    err = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert words in err[-1] and not any("Traceback" in line for line in err), err

# ---------------------------------------------------------------- going on
@pytest.mark.parametrize("number, optimizer, names", [(signal.SIGINT, "adamw", KINDS), (signal.SIGTERM, "muon", ["glide", "edd"])])
def test_a_resumed_run_is_bit_for_bit_an_uninterrupted_one(small, tmp_path, monkeypatch, capsys, number, optimizer, names):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    handler, how = signal.getsignal(number), ("--optimizer", optimizer)
    assert train.main(flags(small, whole, *how, names=names)) == 0
    with monkeypatch.context() as patch:
        interrupt(patch, 4, lambda: signal.raise_signal(number))
        refused(capsys, flags(small, cut, *how, names=names), "stopped after 3 of 4 steps: the same command with --resume goes on")
    assert not (cut / "out").exists() and signal.getsignal(number) is handler and state_of(cut)["step"] == 3
    assert train.main(flags(small, cut, *how, "--resume", names=names)) == 0
    assert saved(whole, names) == saved(cut, names)
    a, b = state_of(whole)["models"], state_of(cut)["models"]
    assert a and all(torch.equal(value, b[key]) for key, value in a.items())

def test_a_killed_run_goes_on_from_the_last_saved_state(small, tmp_path, monkeypatch, capsys):
    """Only the same flags go on with it; what is used is replaced by --overwrite alone."""
    def killed():
        raise MemoryError
    one = partial(flags, small, tmp_path, names=["glide"])
    refused(capsys, one("--resume"), "--resume: there is no interrupted run")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        interrupt(patch, 4, killed)
        train.main(one())
    before = (tmp_path / "work" / "state.safetensors").read_bytes()
    refused(capsys, one(), "state.safetensors is there already")
    refused(capsys, one("--seed", "1", "--resume"), "had another --seed;")
    assert (tmp_path / "work" / "state.safetensors").read_bytes() == before and state_of(tmp_path)["step"] == 2
    assert train.main(one("--resume", "--lr", "1e-5", "--every", "3", "--micro", "64")) == 0
    refused(capsys, one("--work", str(tmp_path / "other")), "out/glide is there already")
    weights = saved(tmp_path, ["glide"])
    assert train.main(one("--overwrite")) == 0 and saved(tmp_path, ["glide"]) != weights

# ---------------------------------------------------------------- the loop
class OneWeight(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = torch.nn.Linear(size, 1, bias=False).double()

def fit(models, loss_of, folder, steps=6, lr=0.1, optimizer="adamw"):
    """train.fit of modules with given losses: loss_of(step, name, weight) -> loss."""
    a = SimpleNamespace(work=str(folder), what=list(models), every=1, resume=False)
    folder.mkdir(exist_ok=True)

    def gradients(step):
        losses = {name: loss_of(step, name, module.layer.weight) for name, module in models.items()}
        sum(losses.values()).backward()
        return {name: loss.detach() for name, loss in losses.items()}
    learners = muon.optimizers(torch.nn.ModuleDict(models), optimizer, lr)
    return train.fit(models, learners, gradients, lambda: {name: {"held_out_loss": 0.0} for name in models}, steps, 1, a, "cpu")

def test_an_update_is_adamws_of_the_clipped_gradient(tmp_path):
    """Betas 0.9 and 0.95 (the official code's), decay 0.01, a norm of at most 1 for each drafter: written out."""
    models = {name: OneWeight(2) for name in ("a", "b")}
    slopes = {"a": torch.tensor([3.0, 4.0]).double(), "b": torch.tensor([0.6, 0.0]).double()}
    scales, start = [1.0, 0.1, 20.0, 0.01, 3.0, 0.5], {name: m.layer.weight.detach().clone() for name, m in models.items()}
    fit(models, lambda step, name, weight: scales[step] * (weight * slopes[name]).sum(), tmp_path / "w")
    for name, m in models.items():
        w, mean, square = start[name], 0.0, 0.0
        for step, scale in enumerate(scales):
            g = scale * slopes[name]
            g = g / max(1.0, g.norm().item())
            mean, square = 0.9 * mean + 0.1 * g, 0.95 * square + 0.05 * g ** 2
            w = w - 0.1 * train.cosine(step, 6) * (0.01 * w + mean / (1 - 0.9 ** (step + 1)) / ((square / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8))
        torch.testing.assert_close(m.layer.weight, w, atol=1e-5, rtol=0)
    steps = [train.cosine(i, 1000) for i in range(1000)]
    assert steps[0] == 1 / 25 and steps[24] == 1.0 and steps.index(max(steps)) == 24, "2.5 % of warm-up, as GLIDE's"
    assert abs(steps[25 + 975 // 2] - 0.5) < 2e-3 and steps[-1] < 1e-5 and train.cosine(0, 1) == 1.0

@pytest.mark.parametrize("bad", [lambda w: (w * 0).sqrt().sum(), lambda w: (w * math.nan).sum()])
def test_weights_of_a_loss_that_is_not_finite_are_never_saved(tmp_path, bad):
    models = {name: OneWeight(1) for name in ("a", "b")}
    with pytest.raises(verify.UserError, match="step 3: the loss of b .* give a lower --lr, and go on with --resume"):
        fit(models, lambda step, name, w: bad(w) if (step, name) == (3, "b") else w.square().sum(), tmp_path / "w")
    assert safe_open(tmp_path / "w" / "state.safetensors", "pt").metadata()["step"] == "2"
    assert all(torch.isfinite(p).all() for m in models.values() for p in m.parameters())

def test_muon_takes_stacked_matrices_one_by_one(llama):
    """q, k, v and gate, up of a GLIDE: as PyTorch's Muon on each of them alone; tables and norms learn by AdamW."""
    module = start("glide", llama)
    adamw, by_muon = muon.optimizers(torch.nn.ModuleDict({"a-head": module}), "muon", 0.1)
    rest, held = {id(p) for p in adamw.param_groups[0]["params"]}, {id(w): count for w, count in by_muon.weights}
    assert {id(module.embed.weight), id(module.head.weight), id(module.norm.weight)} <= rest
    assert len(rest) + len(held) == len(list(module.parameters()))
    assert [held[id(getattr(module.layers[0], name).weight)] for name in ("qkv", "up", "o", "down", "glimpse_q")] == [3, 2, 1, 1, 1]
    fused, alone, how = torch.nn.Parameter(torch.randn(12, 6)), torch.nn.Parameter(torch.randn(4, 6)), dict(lr=0.1, adjust_lr_fn="match_rms_adamw")
    parts = [torch.nn.Parameter(part.clone()) for part in (*fused.detach().chunk(3), alone.detach())]
    ours, theirs = muon.StackedMuon([(fused, 3), (alone, 1)], **how), torch.optim.Muon(parts, **how)
    for _ in range(3):
        fused.grad, alone.grad = torch.randn(12, 6), torch.randn(4, 6)
        for part, grad in zip(parts, (*fused.grad.chunk(3), alone.grad)):
            part.grad = grad.clone()
        ours.step()
        theirs.step()
        ours.zero_grad()
    assert fused.grad is alone.grad is None and torch.equal(torch.cat(parts), torch.cat((fused, alone)))

def test_training_learns_and_the_saved_drafter_is_the_trained_one(small, tmp_path):
    args = flags(small, tmp_path, "--lr", "2e-2", "--steps", "50", "--every", "50", names=["glide", "edd"])
    assert train.main(args) == 0
    about, rows = about_of(tmp_path, "glide"), [json.loads(line) for line in (tmp_path / "work" / "log.jsonl").read_text().splitlines()]
    assert about["command"] == rows.pop(0)["command"] == " ".join(["python train.py", *args]) and [row["step"] for row in rows] == [0, 50]
    assert about["validation"]["held_out_loss"] < 0.8 * rows[0]["glide"]["held_out_loss"] and rows[1]["glide"]["loss"] < 2
    assert rows[1]["tokens_seen"] == about["tokens_seen"] == 50 * 3 * 40 and rows[1]["seconds_per_step"] > 0
    assert (about["kind"], about["init"], about["seed"], about["config"]["loss"]) == ("glide", None, 0, "kl") and about["config"]["norm"]
    model, tokenizer = load.load_target(small / "model", "float32", "cpu")
    drafter, _ = glide.load(tmp_path / "out" / "glide", model)
    assert about["target"] == load.fingerprint(model, tokenizer) and set(about["validation"]["by_kind"]) == {"a", "b"}
    assert drafter.temperature == about["validation"]["temperature"] != 1
    kept = state_of(tmp_path)["models"]
    assert all(torch.equal(value, kept[f"glide.{key}"].bfloat16().float()) for key, value in drafter.model.state_dict().items())
    # A second stage starts from it; --steps 0 only measures.
    again, init = tmp_path / "again", ("--init", str(tmp_path / "out"))
    plain = [word for word in flags(small, again, *init, names=["glide", "edd"]) if word not in ("--width", "16", "--hidden")]
    plain.remove("2")
    assert train.main([*plain, "--steps", "0"]) == 0 and saved(again, ["glide", "edd"]) == saved(tmp_path, ["glide", "edd"])
    assert about_of(again, "edd")["init"]["tokens_seen"] == 6000 and about_of(again, "edd")["tokens_seen"] == 0

def test_each_drafter_is_that_of_its_own_run(small, tmp_path):
    names, more = ["glide", "edd", "vdm-ce"], ["--steps", "2"]
    assert train.main(flags(small, tmp_path / "all", *more, names=names)) == 0
    together = state_of(tmp_path / "all")["models"]
    for name in names:
        assert train.main(flags(small, tmp_path / name, *more, names=[name])) == 0
        alone = state_of(tmp_path / name)["models"]
        assert alone and all(torch.equal(together[key], value) for key, value in alone.items())

# ---------------------------------------------------------------- names, words, what is kept
def arguments(**more):
    a = vars(train.parser().parse_args(["glide", "--data", "x"]))
    return SimpleNamespace(**{**a, "length": 40, "device": "cpu", "hidden": 2, "width": 16, **more})

def start(name, model, tokens=np.arange(12), **more):
    """The draft model of a name."""
    module, _ = drafters.start(name, model, None, tokens, arguments(**more))
    return module

def weighty(name, model, **more):
    """A draft model with weights far from zero, which sometimes guesses right."""
    module = start(name, model, **more).to(model.dtype)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.25) if p.ndim == 2 else None
    return module

@pytest.mark.parametrize("name, more, expected", [
    ("glide", {}, {"layers_read": (2,), "norm": True, "glimpse": True, "loss": "kl"}), ("glide-top", {"layer": 1}, {"layers_read": (2,), "norm": False}),
    ("glide-l1", {}, {"layers_read": (1,), "norm": True}),
    ("glide", {"layer": 1, "norm": "no", "loss": "ce"}, {"layers_read": (1,), "norm": False, "loss": "ce"}),
    ("glide-n2", {}, {"layers_read": (1, 2)}), ("glide-w32", {}, {"width": 32}), ("vanilla", {}, {"glimpse": False}),
    ("edd", {}, {"hidden": 2, "loss": "kl"}), ("edd-h1", {}, {"hidden": 1}), ("edd-top", {"hidden": 2}, {"hidden": 1}),
    ("vdm-ce", {}, {"encoding": False, "loss": "ce"}), ("glide-shared-f24", {"words": 5}, {"feed_forward": 24, "words": 5, "norm": True}),
    ("edd-shared", {"words": 5}, {"words": 5, "hidden": 2})])
def test_names_stand_for_their_settings(name, more, expected):
    model = shared("llama") if name != "edd-top" else tiny("llama", num_hidden_layers=4)
    config = vars(start(name, model, **more).config)
    assert {key: config[key] for key in expected} == expected

def test_a_drafter_starts_from_the_target_where_the_widths_agree(llama):
    wide = start("glide", llama, width=None)
    assert torch.equal(wide.embed.weight, llama.get_input_embeddings().weight.float())

def batch_of(model, modules, ids, learn=None, **more):
    """What train.py shows draft models of ids (B, T)."""
    pieces = np.array([[i * ids.shape[1], ids.shape[1], 0] for i in range(len(ids))])
    learn = torch.ones_like(ids, dtype=torch.bool) if learn is None else learn
    tokens = torch.where(learn, ids, ~ids).flatten().int().numpy()
    frozen = train.FrozenTarget(model, modules)
    batch = frozen.batch(tokens, pieces, count=max(1, train.labels_in(tokens, pieces)))
    return {**batch, "block": 5, "random": None, **more}

def test_the_loss_is_the_divergence_on_answers_alone(llama):
    """KL against float64, over the positions whose next token is learned; with --words among the words; --loss ce."""
    ids = torch.randint(12, (2, 20), generator=torch.Generator().manual_seed(0))
    learn = torch.rand(2, 20, generator=torch.Generator().manual_seed(1)) < 0.5
    with torch.no_grad():
        log_p = llama(ids).logits.log_softmax(-1)
    chosen = learn[:, 1:]
    for name, more, words in (("glide", {}, range(12)), ("edd", {}, range(12)), ("small", {}, range(12)), ("glide", {"loss": "ce"}, None),
                              ("glide-shared", {"words": 5}, None), ("edd-shared", {"words": 5}, None)):
        module = weighty(name, llama, tokens=ids.flatten().numpy(), **more)
        batch = batch_of(llama, {name: module}, ids, learn)
        assert batch["learn"][:, :-1].equal(chosen) and not batch["learn"][:, -1].any()
        if name == "small":
            logits = module.lm(ids).logits
        elif name.startswith("glide"):
            logits = module.head(module(ids, batch["kv"]))
        else:
            logits = module.head(module(ids, batch["hidden"][2], 5))
        if more.get("loss") == "ce":
            expected = F.cross_entropy(logits[:, :-1][chosen], ids[:, 1:][chosen])
        else:
            words = list(words or module.words)
            p, log_q = log_p[..., words].softmax(-1), logits[..., words].log_softmax(-1)
            expected = (p * (p.log() - log_q)).sum(-1)[:, :-1][chosen].mean()
        assert module.loss(batch).item() == pytest.approx(expected.item(), rel=1e-4), name

@pytest.mark.parametrize("name", ["glide", "edd", "edd-ce", "eagle", "medusa", "small"])
def test_a_loss_in_chunks_and_with_padding_is_the_whole_one(llama, name):
    """Value and gradients: all at once; five positions at a time; each document alone, without padding."""
    module = weighty(name, llama)
    tokens = torch.randint(12, (60,), generator=torch.Generator().manual_seed(4)).int().numpy()
    tokens[20:23] = ~tokens[20:23]
    pieces, found = np.array([[0, 18, 0], [18, 7, 0], [40, 11, 0]]), []
    frozen = train.FrozenTarget(llama, {name: module})
    for size, some in ((10 ** 6, [pieces]), (5, [pieces]), (10 ** 6, [pieces[:1], pieces[1:2], pieces[2:]])):
        module.zero_grad()
        total = 0.0
        for part in some:
            batch = {**frozen.batch(tokens, part, count=30), "block": 5, "random": None}
            loss = module.loss({**batch, "sum": partial(train.in_chunks, size)})
            loss.backward()
            total += loss.item()
        found.append([torch.tensor(total), *(p.grad if p.grad is not None else torch.zeros_like(p) for p in module.parameters())])
    for whole, chunks, alone in zip(*found):
        torch.testing.assert_close(whole, chunks, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(whole, alone, atol=1e-5, rtol=1e-4)

def test_drafters_of_few_words_learn_them_and_draft_them(small, tmp_path):
    names = ["glide-shared-f16", "edd-shared"]
    assert train.main(flags(small, tmp_path, "--words", "20", names=names)) == 0
    model, tokenizer = load.load_target(small / "model", "float32", "cpu")
    for name in names:
        weights = state_of(tmp_path)["models"]
        words = set(weights[f"{name}.words"].tolist())
        assert len(words) == 20 and tokenizer.eos_token_id in words and not any("embed" in key or "head" in key for key in weights)
        module, _ = drafters.trained(name, model, load.fingerprint(model, tokenizer), arguments(init=tmp_path / "out"))
        out = verify.generate(verify.Target(model), drafters.drafter_of(module), cape.cape, [5, 6, 7], 8)
        assert out.tokens == verify.generate(verify.Target(model), None, verify.root_only, [5, 6, 7], 8).tokens
        assert {token for each in out.rounds for token in each.tokens[1:]} <= words

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

def walks_of(model, modules, tokens, documents, length=36):
    data = SimpleNamespace(held_tokens=tokens, held_documents=documents, kinds=["a", "b"])
    return evaluate.Walks(model, train.FrozenTarget(model, modules).forward, data, length)

def decoded(model, drafter, text, begin):
    """A chain of five by verify.generate -> accepted tokens of each round, and how many drafted tokens were tested."""
    rounds, tested, t = [], 0, begin
    # One token more than the text has, so that its last one is drafted, too; the last round has no end.
    done = verify.generate(verify.Target(model), drafter, cape.chain, text[:begin], len(text) - begin + 1)
    assert done.tokens[:-1] == text[begin:]
    for each in done.rounds:
        right = [a == b for a, b in zip(each.tokens[1:], text[t + 1:])]
        accepted = (right + [False]).index(False)
        tested += min(accepted + 1, len(right))
        t += len(each.new)
        rounds.append(accepted)
    return rounds, tested

def test_what_is_read_of_the_target(llama):
    reads = reads_of({name: weighty(name, llama) for name in ("glide", "medusa")}, llama)
    assert (reads.kv, reads.hidden, reads.logits) == ({2}, {3}, True)
    assert reads_of({"edd": weighty("edd-ce", llama)}, llama) == (set(), {2}, False, None)

def test_alpha_and_tau_are_those_of_decoding(llama, monkeypatch):
    """On chats, of which the target continues the prompt up to the first answer."""
    monkeypatch.setattr(evaluate, "PROMPTS", 8)
    monkeypatch.setattr(evaluate, "NEW", 20)
    tokens, documents = chats_at_random(30)
    modules = {name: weighty(name, llama) for name in ("glide", "edd", "eagle", "medusa", "small")}
    walks = walks_of(llama, modules, tokens, documents)
    assert [kind for _, _, kind in walks.texts] == [0, 1] * 4
    found = walks(modules)
    assert found == walks(modules), "the same each time"
    for name, module in modules.items():
        rounds, tested = zip(*(decoded(llama, drafters.drafter_of(module), text.tolist(), size) for text, size, _ in walks.texts))
        right = sum(map(sum, rounds))
        assert right > 2, "a drafter that is never right would show nothing"
        assert found[name]["alpha"] == right / sum(tested), name
        ended = [accepted for each in rounds for accepted in each[:-1]]
        assert found[name]["tau"] == pytest.approx(1 + sum(ended) / len(ended)), name

def test_the_temperature_is_found_again():
    """Choices sampled from softmax(logits / T): the fit finds T, as a search of the whole grid does."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4000, 8, generator=g)
    for t in (0.35, 1.0, 2.5):
        choice = torch.multinomial((logits / t).softmax(-1), 1, generator=g)[:, 0]
        found = evaluate.fit_temperature(list(logits), choice.tolist())
        assert abs(found - t) <= 0.06 * max(1, t)
        assert found == min(evaluate.GRID, key=lambda t: F.cross_entropy(logits / t, choice).item())
    assert evaluate.fit_temperature([], []) == 1
    muted = torch.full((8,), float("-inf")).index_fill(0, torch.tensor([0, 1]), 0.0)
    assert evaluate.fit_temperature([*logits, muted], [*choice.tolist(), 5]) == found, "what it cannot predict"

