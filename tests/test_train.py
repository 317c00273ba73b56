"""train.py: a resumed run is an uninterrupted one, and so are two processes; losses, updates and
metrics are what they say."""
import json
import math
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Positional, plain, tiny, weighty
from helpers import TEXT, batch_of, mean_loss, refused, write_rows
from safetensors.torch import load_file
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import start_processes

import train
import verify
from runtime import families, load
from runtime.program import UserError
from training import documents, evaluate, models

NAMES = {"glide": "glide(width=16)", "edd": "edd(hidden=2)", "eagle": "eagle",
         "small": "small(loss='ce')", "own": "own=glide-shared(feed_forward=16, words=20)"}

@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Few prompts and pieces to measure drafters on."""
    monkeypatch.setattr(evaluate, "PROMPTS", 2)
    monkeypatch.setattr(evaluate, "NEW", 12)

@pytest.fixture(scope="module")
def target(small):
    """conftest.small, and text."""
    rows = [{"text": (TEXT * 9)[i:i + 20 + 37 * i % 250], "held_out": i % 10 in (4, 7)}
            for i in range(60)]
    write_rows(small / "rows.jsonl", rows)
    return small

def flags(target, out, *more, names):
    """train.py's arguments.  names: of NAMES."""
    return [*(NAMES[name] for name in names), "--target", str(target / "model"),
            "--data", str(target / "rows.jsonl"), "--out", str(out), "--device", "cpu",
            "--steps", "4", "--batch", "3", "--length", "40", "--optimizer", "adamw",
            "--lr", "1e-3", *more]

# ---------------------------------------------------------------- going on
@pytest.mark.parametrize("number, optimizer, names", [
    (signal.SIGINT, "adamw", ["small", "own"]), (signal.SIGTERM, "muon", ["glide", "edd"])])
def test_a_resumed_run_is_bit_for_bit_an_uninterrupted_one(
        target, tmp_path, monkeypatch, capsys, number, optimizer, names):
    """By the same command alone; what is used is replaced by --overwrite alone."""
    def one(folder, *more):
        return flags(target, tmp_path / folder, "--optimizer", optimizer, *more, names=names)

    def interrupted(*given):
        if given[-1] == 2:
            signal.raise_signal(number)
        return pieces_of_step(*given)
    pieces_of_step, state = train.pieces_of_step, tmp_path / "cut" / "state.pt"
    assert train.main(one("whole")) == 0
    with monkeypatch.context() as patch:
        patch.setattr(train, "pieces_of_step", interrupted)
        refused(capsys, one("cut"), "stopped after 3 of 4 steps", train.main)
    assert torch.load(state, weights_only=True)["step"] == 3
    refused(capsys, one("cut"), "state.pt is there already", train.main)
    refused(capsys, one("cut", "--seed", "1", "--resume"), "repeat the interrupted run's command",
            train.main)
    assert train.main(one("cut", "--resume")) == 0 and not state.exists()
    for name in names:
        whole, cut = (tmp_path / run / name / "model.safetensors" for run in ("whole", "cut"))
        assert whole.read_bytes() == cut.read_bytes()
    refused(capsys, one("cut"), f"cut/{names[0]} is there already", train.main)
    assert train.main(one("cut", "--overwrite", "--steps", "1")) == 0

# ---------------------------------------------------------------- the loop
def test_gradients_are_clipped_drafter_by_drafter_and_finite():
    """SGD at a learning rate of 1 moves weights of 0 by the clipped gradient."""
    drafters = {name: torch.nn.Linear(2, 1, bias=False) for name in "ab"}
    a, b = (module.weight for module in drafters.values())
    sgd = torch.optim.SGD([a, b])
    for weight, gradient in ((a, [3.0, 4.0]), (b, [0.6, 0.0])):
        weight.data.zero_()
        weight.grad = torch.tensor([gradient])
    train.update(drafters, {"a": 1.0, "b": 1.0}, [sgd], 1.0, 0)
    torch.testing.assert_close(torch.cat((-a, -b)), torch.tensor([[0.6, 0.8], [0.6, 0.0]]))
    for loss, gradient in ((1.0, math.nan), (math.inf, 0.0)):
        a.grad, b.grad = torch.ones(1, 2), torch.full((1, 2), gradient)
        with pytest.raises(UserError, match="step 3: the loss of b .* with a lower --lr"):
            train.update(drafters, {"a": 1.0, "b": loss}, [sgd], 1.0, 3)
    assert a.norm() <= 1.0001, "no step was taken"

def test_the_learning_rate_rises_and_falls_along_a_cosine():
    rates = [train.cosine(i, 1000) for i in range(1000)]
    assert rates[0] == 1 / 25 and rates[24] == 1.0 and rates.index(max(rates)) == 24, "2.5 %"
    assert abs(rates[25 + 975 // 2] - 0.5) < 2e-3 and rates[-1] < 1e-5 and train.cosine(0, 1) == 1

def test_muon_is_for_hidden_matrices_adamw_for_the_rest(llama):
    module = start("glide(width=16)", llama)
    rest, held = ({id(p) for p in of.param_groups[0]["params"]}
                  for of in train.optimizers_of({"a-head": module}, "muon"))
    assert len(rest) + len(held) == len(list(module.parameters()))
    assert {name for name, p in module.named_parameters() if id(p) in held} == {
        f"layers.0.{part}.weight" for part in ("qkv", "o", "glimpse_q", "glimpse_o", "up", "down")}

def test_training_learns_and_writes_a_log_and_drafters(target, tmp_path):
    names, out = ["glide", "edd", "small"], tmp_path / "out"
    argv = flags(target, out, "--lr", "2e-2", "--steps", "50", names=names)
    assert train.main(argv) == 0
    log = [json.loads(line) for line in open(out / "log.jsonl")]
    losses = [row["loss"] for row in log]
    for name in names:
        about = json.loads((out / name / "training.json").read_text())
        assert about["kind"] == name and losses[-1][name] < 0.8 * losses[0][name]
    assert about["tokens_seen"] == 50 * 3 * 40 and len(losses) == 50
    model, tokenizer = load.load_target(target / "model", "float32", "cpu")
    assert about["target"] == load.fingerprint(model, tokenizer)
    # What was saved is what was trained: measured again, it drafts as well, but for bfloat16.
    weights = load_file(out / "glide" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    drafter, about = families.load(out / "glide", model)
    assert drafter.temperature == about["validation"]["temperature"] != 1
    data = documents.load([out / "data"], tokenizer, (None, None), {}, None)
    prompts = evaluate.prompts_of(data.tokens, data.held_out, 40)
    again = evaluate.measure(verify.Target(model), {"glide": drafter}, prompts)
    assert again["glide"]["tau"] == pytest.approx(about["validation"]["tau"], rel=0.2)

# ---------------------------------------------------------------- processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_two_processes_are_one(target, tmp_path, monkeypatch):
    """Their gradients before any optimizer; some steps have fewer batches than processes."""
    names, update = ["glide", "edd", "eagle"], train.update

    def keep(modules, losses, optimizers, lr, step):
        gradients = [p.grad for module in modules.values() for p in module.parameters()]
        rank, world = train.rank_and_world()
        torch.save((gradients, losses), tmp_path / f"{world}-{rank}-{step}.pt")
        update(modules, losses, optimizers, lr, step)
    monkeypatch.setattr(train, "update", keep)
    assert train.main(flags(target, tmp_path / "one", names=names)) == 0
    port = str(get_free_port())

    def run(rank):                                       # as torchrun starts them
        os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                          RANK=str(rank), LOCAL_RANK=str(rank))
        assert train.main(flags(target, tmp_path / "two", names=names)) == 0
    start_processes(run, nprocs=2, start_method="fork")
    for step in range(4):
        one, *both = (torch.load(tmp_path / f"{name}-{step}.pt", weights_only=True)
                      for name in ("1-0", "2-0", "2-1"))
        for each in both:
            torch.testing.assert_close(each, one, atol=1e-5, rtol=1e-2 if step else 1e-4)

# ---------------------------------------------------------------- names
def start(text, model, tokens=np.arange(12)):
    """The draft model of a call."""
    torch.manual_seed(0)
    call, = models.calls_of([text]).values()
    return models.new(call, model, 40, tokens)

@pytest.mark.parametrize("text, expected", [
    ("glide", {"layers_read": (2,), "norm": True, "glimpse": True, "loss": "kl", "width": 32}),
    ("glide(layers=2, width=24, block=3)", {"layers_read": (1, 2), "width": 24, "block": 3}),
    ("vdm(loss='ce')", {"encoding": False, "loss": "ce"}),
    ("edd(hidden=2, blocks=(5, 5))", {"hidden": 2, "blocks": (5, 5), "encoding": True}),
    ("vanilla-shared(feed_forward=24, words=5)", {"feed_forward": 24, "glimpse": False})])
def test_calls_become_their_settings(text, expected, llama):
    config = vars(start(text, llama).config)
    assert {key: config[key] for key in expected} == expected

def test_a_drafter_starts_from_the_target_where_the_widths_agree():
    """By copies of its embedding and head.  A list of words has those that are learned."""
    model = tiny("llama").float()
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    wide = start("glide", model)
    assert torch.equal(wide.embed.weight, embed) and torch.equal(wide.head.weight, head)
    assert wide.head.weight.data_ptr() != head.data_ptr()
    other = start("glide(tables='random')", model)
    assert not torch.equal(other.head.weight, head)
    listed = start("glide-shared(words=2)", model, np.array([~9, ~9, ~9, 4, 4, 7]))
    assert listed.between.words.tolist() == [4, 7]

# ---------------------------------------------------------------- pieces, steps, parts
def test_pieces_are_documents_or_batches_of_them():
    """Parts overlap by a token, so that every token but a document's first is a label once."""
    index = np.array([[0, 10, 1], [13, 1, 0], [14, 5, 0], [28, 4, 2]])
    pieces = train.pieces_of(index, 4)
    expected = [[0, 4], [3, 4], [6, 4], [14, 4], [17, 2], [28, 4]]
    assert pieces.tolist() == expected, "one token alone has no label"
    tokens = np.arange(40, dtype="i4")
    tokens[2:4] = ~tokens[2:4]
    ids, loss_mask = train.gather(tokens, pieces[[4, 0, 1]])
    assert ids[0, :2].tolist() == [17, 18] and ids[1].tolist() == [0, 1, 2, 3], "a row each"
    expected = [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert loss_mask.int().tolist() == expected, "no label in padding, nor in what is only read"
    assert train.labels_in(tokens, pieces) == train.gather(tokens, pieces)[1].sum() == 14

def pieces_at_random(n):
    rng = np.random.default_rng(0)
    return np.stack((np.arange(n), rng.integers(2, 100, n)), 1)

def test_an_epoch_has_every_piece_once_in_even_steps():
    pieces = pieces_at_random(1000)
    count = pieces[:, 1].sum() // 512
    steps = [train.pieces_of_step(pieces, 512, 0, i) for i in range(2 * count)]
    for epoch in (steps[:count], steps[count:]):
        sizes = np.cumsum([step[:, 1].sum() for step in epoch])
        assert all(512 * (i + 1) <= size < 512 * (i + 1) + 100 for i, size in enumerate(sizes))
        seen = np.concatenate(epoch)[:, 0]
        assert len(set(seen)) == len(seen), "once"
    for other in (steps[count], train.pieces_of_step(pieces, 512, 1, 0)):
        assert not np.array_equal(other, steps[0]), "another epoch, another seed"

def test_batches_of_a_step_fit_with_their_padding():
    pieces = pieces_at_random(40)
    batches = train.batches_of(pieces, 300)
    assert sorted(np.concatenate(batches)[:, 0]) == list(range(40)), "each piece once"
    padded = [len(batch) * batch[:, 1].max() for batch in batches]
    assert max(padded) <= 300 and sum(padded) < 1.1 * pieces[:, 1].sum(), "alike side by side"

# ---------------------------------------------------------------- losses
@pytest.mark.parametrize("text", ["edd(hidden=2, loss='ce')", "eagle", "medusa(heads=2)", "small",
                                  "glide-shared(layer=1, words=5)"])
def test_a_loss_with_padding_is_that_of_each_document(llama, text):
    """Value and gradients.  The oracle: each document alone, by transformers' own forward."""
    tokens = torch.randint(12, (60,), generator=torch.Generator().manual_seed(4)).int().numpy()
    tokens[20:23] = ~tokens[20:23]
    pieces = np.array([[0, 18], [18, 7], [40, 11]])
    module = weighty(start(text, llama, tokens))
    drafter = models.drafter_of(text.partition("(")[0], module)
    frozen = train.FrozenTarget(llama, {"": module}, {"": drafter})
    loss, total = train.masked_loss(module, frozen.batch(tokens, pieces), 5), 0.0
    for begin, size in pieces:
        given = torch.from_numpy(tokens[begin:begin + size].astype("i8"))[None]
        loss_mask = F.pad(given[:, 1:] >= 0, (0, 1))
        batch = batch_of(llama, torch.where(given < 0, ~given, given))
        total = total + loss_mask.sum() * mean_loss(module, batch, loss_mask)
    weights = list(module.parameters())
    found, expected = [(x, *torch.autograd.grad(x, weights)) for x in (loss, total)]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)

def test_block_lengths_are_uniform_and_known_by_the_step():
    """EDD, 3.1."""
    module = SimpleNamespace(config=SimpleNamespace(blocks=(5, 10)))
    counts = np.bincount([train.block_of_step(module, 0, step) for step in range(3000)])
    assert len(counts) == 11 and counts[5:].sum() == 3000 and abs(counts[5:] - 500).max() < 80

# ---------------------------------------------------------------- how drafters are measured
def test_alpha_and_tau_are_those_of_chains_of_five(llama, monkeypatch):
    """A drafter that is wrong at each seventh position: the counts follow from the positions."""
    monkeypatch.setattr(evaluate, "NEW", 23)
    prompt = [3, 1, 4]
    text = prompt + plain(llama, prompt, 24)

    def at(position):
        token = text[position] if position < len(text) else 0
        return F.one_hot(torch.tensor((token + (position % 7 == 0)) % 12), 12) * 3.0
    drafters = {"x": Positional(at)}
    found = evaluate.measure(verify.Target(llama), drafters, [prompt])
    # The prefill's token has position 3.  Rounds from the roots at 3, 7, 13, 14, 20 and 21 draft
    # 4 5 6 and 7, wrong; 8 to 12; 14, wrong; 15 to 19; 21, wrong; 22 to 24, and the output ends.
    assert found["x"]["alpha"] == (3 + 5 + 0 + 5 + 0 + 3) / (4 + 5 + 1 + 5 + 1 + 3)
    assert found["x"]["tau"] == (4 + 6 + 1 + 6 + 1 + 4) / 6
    # The token at 9 is the first of its kind: where it ends the text, nothing behind it is tested.
    total, pairs = evaluate.decode(verify.Target(llama), Positional(at), prompt, text[9])
    assert total == {"tested": 4 + 2, "right": 3 + 2, "new": 4 + 2, "rounds": 2}
    assert [p.argmax() == choice for p, choice in pairs] == [True] * 3 + [False] + [True] * 2

def test_prompts_are_what_comes_before_an_answer(monkeypatch):
    """Of a text its first half; the kinds alternate; all leave room for what is decoded."""
    tokens = np.arange(1, 101, dtype="i4")
    tokens[:5], tokens[60:90] = ~tokens[:5], ~tokens[60:90]
    index = np.array([[0, 20, 0], [20, 10, 1], [30, 30, 1], [60, 40, 0]])
    monkeypatch.setattr(evaluate, "PROMPTS", 9)
    found = evaluate.prompts_of(tokens, index, 30)
    assert sorted(found) == [[1, 2, 3, 4, 5], [21, 22, 23, 24, 25], list(range(31, 46))]
    assert found.index([1, 2, 3, 4, 5]) < 2, "of the first kind"

def test_the_temperature_is_found_again():
    """Choices are sampled from softmax(logits / T), but for one that cannot be predicted."""
    never = torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0, 0]), 5
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2000, 8, generator=g)
    p = logits.softmax(-1)
    for t in (0.35, 1.0, 2.5):
        choice = torch.multinomial((logits / t).softmax(-1), 1, generator=g)[:, 0]
        found = evaluate.fit_temperature([never, *zip(p, choice.tolist())])
        assert abs(found - t) <= 0.1 * max(1, t)
