"""Training at size: chunks, windows, tokens in a file, several processes.  One process, all at once, is the oracle."""
import copy
import gzip
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, VOCAB, tiny

import cascade
import edd
import train
from checkpoints import make

TEXT = "def add(a, b):\n    return a + b\n\n" * 40


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny target with a tokenizer, and documents of many lengths."""
    folder = tmp_path_factory.mktemp("target")
    make.train_tokenizer([TEXT * 10], 300).save_pretrained(folder / "model")
    tiny("llama", vocab_size=300, max_position_embeddings=64).float().save_pretrained(folder / "model")
    rows = [{"text": TEXT[i:i + 20 + 37 * i % 400]} for i in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def flags(small, out, *more, names=("glide", "edd")):
    return [*names, "--hidden", "2", "--target", str(small / "model"), "--data", str(small / "rows.jsonl"), "--out", str(out),
            "--work", str(out / "work"), "--device", "cpu", "--steps", "4", "--batch", "4", "--length", "24", "--width", "16",
            "--every", "2", "--dtype", "float32", "--lr", "1e-2", *more]


def state_of(out, names=("glide", "edd")):
    return torch.load(out / "work" / f"{'-'.join(names)}.pt", weights_only=True)


def assert_same_models(a, b, atol):
    assert a["models"].keys() == b["models"].keys() and a["step"] == b["step"]
    for key, value in a["models"].items():
        torch.testing.assert_close(value, b["models"][key], atol=atol, rtol=0, msg=key)


# ---------------------------------------------------------------- losses
def drafter(name, llama):
    a = SimpleNamespace(init=None, hidden=2, width=16, layers=1, block=5, layer=None, length=24)
    torch.manual_seed(1)
    module = train.make_drafter(name, llama, a)[0].double()
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.2) if p.ndim == 2 else None
    return module


def batch_of(llama, module, ids, learn=None, count=None):
    reads = train.read_by({"x": module}) | {"logits": True}
    return train.frozen_forward(llama, ids, learn=learn, count=count, **reads) | {"block": 5}


def closed_form(name, module, batch):
    """The loss with all logits at once, row by row."""
    ids, learn, logits = batch["ids"], batch["learn"], module.predict(batch)
    B, T = ids.shape
    total = 0
    if name == "medusa":
        found = module(batch["hidden"][3])
        for k in range(5):
            for b in range(B):
                for i in range(T - 2 - k):
                    if learn[b, i + 1 + k]:
                        total = total - 0.8 ** k * found[k][b, i].log_softmax(-1)[ids[b, i + 2 + k]]
        return total / batch["count"]
    for b in range(B):
        for i in range(T):
            if not learn[b, i] or name == "eagle" and i == 0:
                continue
            log_p, p_target = logits[b, i].log_softmax(-1), batch["logits"][b, i].softmax(-1)
            if name in ("glide", "edd-ce"):
                total = total - log_p[ids[b, i + 1]]
            elif name == "edd":
                total = total + (p_target * (p_target.log() - log_p)).sum()
            else:
                f = module.target.norm(batch["hidden"][3])
                d = (module(ids, f)[b, i - 1] - f[b, i]).abs()
                total = total + torch.where(d < 1, d * d / 2, d - 0.5).mean() - 0.1 * (p_target * log_p).sum()
    return total / batch["count"]


@pytest.mark.parametrize("name", ["glide", "edd", "edd-ce", "eagle", "medusa"])
def test_a_loss_in_chunks_is_the_whole_one(llama, monkeypatch, name):
    """Value and gradients, on rows that were chosen, against logits of all rows; the head never sees more than a chunk."""
    monkeypatch.setattr(train, "CHUNK", 5)
    module = drafter(name, llama)
    g = torch.Generator().manual_seed(3)
    ids, learn = torch.randint(VOCAB, (2, 13), generator=g), torch.rand(2, 13, generator=g) < 0.6
    learn[:, -1] = False
    batch = batch_of(llama, module, ids, learn)
    expected = closed_form(name, module, batch)
    wanted = torch.autograd.grad(expected, list(module.parameters()), allow_unused=True)
    rows, heads = [], [getattr(module, "head", None)]
    if name in ("eagle", "medusa"):
        heads = [llama.lm_head] if name == "eagle" else list(module.heads)
    hooks = [head.register_forward_pre_hook(lambda m, given: rows.append(given[0].shape[0])) for head in heads]
    loss = module.loss(batch)
    loss.backward()
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    for p, g in zip(module.parameters(), wanted):
        torch.testing.assert_close(p.grad, torch.zeros_like(p) if g is None else g, atol=1e-5, rtol=1e-4)
    assert max(rows) <= 5 and sum(rows) >= learn[:, 1:].sum()
    assert train.frozen_forward(llama, ids)["count"] == 24, "all rows but the last, where nothing is said"


@pytest.mark.parametrize("name", ["glide", "edd", "eagle", "medusa"])
def test_padding_and_other_documents_change_no_gradient(llama, name):
    """Windows of three documents, in one batch and each alone without padding: the same sum of gradients."""
    tokens = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(4)).int().numpy()
    tokens[20:23] = ~tokens[20:23]                                           # not to be learned from
    windows, module, found = np.array([[0, 18], [18, 7], [40, 11]]), drafter(name, llama), []
    for some in (windows,), (windows[:1], windows[1:2], windows[2:]):
        module.zero_grad()
        for part in some:
            ids, learn = train.gather(tokens, part)
            module.loss(batch_of(llama, module, ids, learn, count=30)).backward()
        found.append([p.grad.clone() for p in module.parameters()])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-6)
    ids, learn = train.gather(tokens, windows)
    assert ids.shape == (3, 18) and learn.sum() == 17 + 3 + 10, "of seven tokens three are not learned from"
    assert ids[1, :7].tolist() == [t if t >= 0 else ~t for t in tokens[18:25].tolist()]


def test_the_target_keeps_what_somebody_reads(llama):
    ids = torch.randint(VOCAB, (1, 9))
    models = {name: drafter(name, llama) for name in ("glide", "medusa")}
    batch = train.frozen_forward(llama, ids, **train.read_by(models))
    assert batch["logits"] is None and set(batch["kv"]) == {2} and set(batch["hidden"]) == {3}
    batch = train.frozen_forward(llama, ids, **train.read_by({"edd": drafter("edd", llama)}))
    assert batch["logits"].shape == (1, 9, VOCAB) and not batch["kv"] and set(batch["hidden"]) == {2}
    whole = train.frozen_forward(llama, ids)
    assert set(whole["kv"]) == {0, 1, 2}
    torch.testing.assert_close(batch["logits"], whole["logits"])


# ---------------------------------------------------------------- windows
def test_windows_are_documents_or_pieces_of_them():
    """By hand for every document; those held out apart, copies as often as said."""
    index = np.array([[0, 10, 0, 1], [10, 3, 1, 1], [13, 1, 0, 1], [14, 5, 0, 2], [19, 9, 0, 0], [28, 4, 0, 1]])
    found = train.windows_of(index, 4, False).tolist()
    assert found == [[0, 4], [4, 4], [8, 2], [14, 4], [14, 4], [28, 4]], "one token alone predicts nothing"
    assert train.windows_of(index, 4, True).tolist() == [[10, 3]]
    assert train.windows_of(index[:0], 4, True).shape == (0, 2)


def test_an_epoch_has_every_window_once_in_an_order_of_its_own():
    sizes = np.random.default_rng(0).integers(2, 100, 1000)
    windows = np.stack((np.arange(1000), sizes), 1)
    first = train.order(windows, 8, 0, 0)
    assert first.shape == (125, 8, 2) and sorted(first.reshape(-1, 2).tolist()) == windows.tolist()
    assert np.array_equal(first, train.order(windows, 8, 0, 0))
    for other in (train.order(windows, 8, 0, 1), train.order(windows, 8, 1, 0)):
        assert not np.array_equal(first, other)
    padded = first[:, :, 1].max(1).sum() * 8
    assert padded < 1.1 * sizes.sum(), "windows of like length stand side by side"
    assert abs(np.corrcoef(np.arange(125), first[:, 0, 1])[0, 1]) < 0.3, "batches do not grow"
    assert train.order(windows[:3], 8, 0, 0).shape == (1, 8, 2), "few windows: some twice"


# ---------------------------------------------------------------- data
def prepared(small, tmp_path, *paths, loss_on="all", tokenizer=None):
    tokenizer = tokenizer or make.load_tokenizer(str(small / "model"))
    a = SimpleNamespace(data=[str(path) for path in paths], work=str(tmp_path / "work"), loss_on=loss_on)
    return train.read_data(a, tokenizer, 300)


@pytest.mark.parametrize("template", [None, "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
                                            "{% if add_generation_prompt %}<assistant>{% endif %}"])
def test_answers_alone_are_learned_from(small, tmp_path, template):
    """In both spellings of ShareGPT; what is learned from reads as the answers and the ends of their turns."""
    tokenizer = make.load_tokenizer(str(small / "model"))
    tokenizer.chat_template = template
    said = [("human", "add a"), ("gpt", "a + b"), ("human", "return"), ("gpt", "return b")]
    messages = [{"role": {"human": "user", "gpt": "assistant"}[who], "content": text} for who, text in said]
    rows = [{"conversations": [{"from": who, "value": text} for who, text in said]}, {"messages": messages},
            {"text": "def add"}, {"messages": messages[:1]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens, index, _ = prepared(small, tmp_path, path, loss_on="answers", tokenizer=tokenizer)
    parts = [tokens[start:start + size] for start, size, _, _ in index]
    for part in parts[:2]:
        learned = tokenizer.decode(part[part >= 0][:-1])
        # Without a template a turn's end is the empty line, which is no token of its own before another turn.
        assert learned == "a + b|return b|" if template else learned.split() == "a + b return b".split()
        assert np.where(part < 0, ~part, part)[:-1].tolist() == train.encode(messages, tokenizer)
    assert (parts[2] >= 0).all() and (parts[3] < 0).all(), "a text is learned whole, a question not at all"
    whole, _, _ = prepared(small, tmp_path, path, tokenizer=tokenizer)
    assert (whole >= 0).all() and np.array_equal(whole, np.where(tokens < 0, ~tokens, tokens)), "another file: the key says what is learned"


def test_many_documents_at_once_are_encoded_as_one_by_one(small):
    tokenizer = make.load_tokenizer(str(small / "model"))
    tokenizer._tokenizer.post_processor = None
    chat = [{"role": "user", "content": "add"}]
    found = ["add a", chat, [1, 2], "  ", "return b", [], chat]
    assert [list(ids) for ids in train.encode_all(found, tokenizer)] == [
        tokenizer("add a")["input_ids"], *[tokenizer.apply_chat_template(chat, chat_template=train.PLAIN, return_dict=True)["input_ids"]],
        [1, 2], [], tokenizer("return b")["input_ids"], [],
        tokenizer.apply_chat_template(chat, chat_template=train.PLAIN, return_dict=True)["input_ids"]]


def test_bad_lines_are_counted_named_and_left_out(small, tmp_path, capsys, monkeypatch):
    good = [json.dumps({"text": f"add {i}", "meta": {"set": "C4"}}) for i in range(3)]
    path = tmp_path / "c4.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join([good[0], "{cut", good[1], "[]", "null", '{"other": 1}', good[2]]).encode()))
    tokens, index, _ = prepared(small, tmp_path, path)
    assert len(index) == 3
    err = capsys.readouterr().err
    assert "left out, 3 rows" in err and f"row 2 of {path}" in err and err.count("\n") == 1
    with pytest.raises(train.UserError, match="row 2"):
        train.read_rows(path)
    packed = tmp_path / "c4.jsonl.zst"                                       # by whatever reader is there
    packed.write_bytes(path.read_bytes())
    for name in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(train.UserError, match="pip install zstandard"):
        prepared(small, tmp_path, packed)
    monkeypatch.setitem(sys.modules, "zstandard", SimpleNamespace(open=gzip.open))
    assert len(prepared(small, tmp_path, packed)[1]) == 3


def test_a_folders_file_that_is_no_text_is_left_out(small, tmp_path, capsys):
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "a.py").write_text("add a")
    (folder / "b.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / "c.py").write_text("return b")
    assert len(prepared(small, tmp_path, folder)[1]) == 2
    assert f"left out, 1 rows without text: {folder / 'b.png'}" in capsys.readouterr().err
    with pytest.raises(train.UserError, match="b.png cannot be read"):
        prepared(small, tmp_path, folder / "a.py", folder / "b.png")


def test_memory_does_not_grow_with_the_corpus(small, tmp_path):
    """What Python and numpy hold at most while 3 MB of JSON lines and 2 MB of one text become tokens: less than a third."""
    rows, text = tmp_path / "rows.jsonl", tmp_path / "text.py"
    with open(rows, "w") as file:
        for i in range(6000):
            file.write(json.dumps({"text": TEXT[i % 30:i % 30 + 480]}) + "\n")
    text.write_text(TEXT * 1400)
    tokenizer = make.load_tokenizer(str(small / "model"))
    monkey = pytest.MonkeyPatch()
    monkey.setattr(train, "PIECE", 2 ** 12)
    monkey.setattr(tokenizer, "__class__", type("Fake", (type(tokenizer),), {
        "__call__": lambda self, texts, **more: {"input_ids": [[7] * (len(x) // 4) for x in texts]}}))
    tracemalloc.start()
    tokens, index, _ = prepared(small, tmp_path, rows, text, tokenizer=tokenizer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    monkey.undo()
    corpus = rows.stat().st_size + text.stat().st_size
    assert len(index) > 6300 and isinstance(tokens, np.memmap)
    assert peak < corpus / 3, f"{peak} of {corpus}"


def test_killed_while_preparing_nothing_is_lost(small, tmp_path):
    """kill -9 at drawn moments, in a process of its own: what is there afterwards is whole, or made again."""
    tokens, index, key = prepared(small, tmp_path / "whole", small / "rows.jsonl")
    rng, alive = random.Random(0), 0
    for trial in range(12):
        pid = os.fork()
        if pid == 0:
            slow = train.encode_all
            train.encode_all = lambda *given: (time.sleep(0.004), slow(*given))[1]
            prepared(small, tmp_path / "cut", small / "rows.jsonl")
            os._exit(0)
        time.sleep(rng.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
        alive += os.waitpid(pid, 0)[1] == 0
    again, rows, same = prepared(small, tmp_path / "cut", small / "rows.jsonl")
    assert np.array_equal(again, tokens) and np.array_equal(rows, index) and same == key


# ---------------------------------------------------------------- what it is worth
@pytest.mark.parametrize("block", [5, 7, 3])
def test_runs_of_right_choices(block):
    right = torch.rand(47, generator=torch.Generator().manual_seed(block)) < 0.7
    found = train.run_lengths(right, block)
    for row, start in zip(found, range(0, 47 - block + 1, block)):
        length = 0
        while length < min(5, block) and right[start + length]:
            length += 1
        assert row.sum() == length
    assert len(found) == 47 // block


def test_the_log_says_what_it_will_be_worth(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "relative_cost", lambda module, target: 0.1)
    assert train.main(flags(small, tmp_path, names=["vdm"])) == 0
    rows = [json.loads(line) for line in (tmp_path / "work" / "vdm.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2, 4] and rows[0]["vdm"]["loss"] is None
    for row in rows:
        vdm = row["vdm"]
        assert vdm["speedup"] == cascade.ewif_speculative(vdm["alpha"], 0.1, 5) and 1 <= vdm["tau"] <= 6
        assert row["peak_memory"] > 2 ** 20
    assert rows[0]["target_share"] == 0 < rows[1]["target_share"] < 1
    assert rows[2]["tokens_seen"] > rows[1]["tokens_seen"] > 0 < rows[2]["tokens_per_s"]
    captured = capsys.readouterr()
    assert "vdm: a step costs 0.100 of the target's" in captured.err and "speedup" in captured.out


@pytest.mark.parametrize("name", ["glide", "vanilla", "edd", "eagle", "medusa"])
def test_a_measured_cost_leaves_the_drafter_as_it_was(llama, name):
    module = drafter(name, llama).float()
    before = copy.deepcopy(dict(module.state_dict(), **dict(module.named_buffers())))
    assert 0 < train.relative_cost(module, llama) < 50
    after = dict(module.state_dict(), **dict(module.named_buffers()))
    assert all(torch.equal(after[key], value) and after[key].dtype == value.dtype for key, value in before.items())


# ---------------------------------------------------------------- runs
def test_each_drafter_is_the_one_of_its_own_run(small, tmp_path):
    assert train.main(flags(small, tmp_path / "both")) == 0
    both = state_of(tmp_path / "both")["models"]
    for name in ("glide", "edd"):
        assert train.main(flags(small, tmp_path / name, names=[name])) == 0
        alone = state_of(tmp_path / name, [name])["models"]
        assert alone and all(torch.equal(both[key], value) for key, value in alone.items())


def test_tokens_seen_go_on(small, tmp_path):
    """Of an interrupted run's and its continuation's: those of the windows, padding not counted."""
    def about(out):
        return json.loads((out / "glide" / "training.json").read_text())["tokens_seen"]
    assert train.main(flags(small, tmp_path / "whole", names=["glide"])) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    state = state_of(tmp_path / "cut", ["glide"])
    tokens, index, _ = prepared(small, tmp_path, small / "rows.jsonl")
    windows = train.windows_of(index, 24, False)
    each = train.order(windows, 4, 1, 0)[:, :, 1].sum(1)
    assert state["tokens"] == about(tmp_path / "whole") == each[:4].sum()
    torch.save({**state, "step": 2, "tokens": int(each[:2].sum())}, tmp_path / "cut" / "work" / "glide.pt")
    assert train.main(flags(small, tmp_path / "cut", "--resume", names=["glide"])) == 0
    assert about(tmp_path / "cut") == each[:4].sum()


def test_a_full_disk_leaves_the_last_checkpoint(small, tmp_path, monkeypatch, capsys):
    assert train.main(flags(small, tmp_path / "whole")) == 0
    save, calls = torch.save, []

    def full(state, part):
        calls.append(state["step"])
        if state["step"] == 4:
            part.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(state, part)
    monkeypatch.setattr(torch, "save", full)
    assert train.main(flags(small, tmp_path / "cut")) == 2
    err = capsys.readouterr().err.splitlines()
    assert "cannot be written" in err[-1] and "No space left on device" in err[-1] and calls == [0, 2, 4]
    assert state_of(tmp_path / "cut")["step"] == 2 and not list((tmp_path / "cut" / "work").glob("*.part"))
    monkeypatch.setattr(torch, "save", save)
    assert train.main(flags(small, tmp_path / "cut", "--resume")) == 0
    assert_same_models(state_of(tmp_path / "whole"), state_of(tmp_path / "cut"), 0)


@pytest.mark.parametrize("argv, words", [
    (["--recipe", "glide"], None), (["--recipe", "edd"], None), (["--clip", "0"], "--clip is 0"), (["--micro", "0"], "--micro is 0"),
    (["--recipe", "medusa"], "invalid choice"), (["--loss-on", "x"], "invalid choice"),
])
def test_recipes_and_their_mistakes(monkeypatch, capsys, argv, words):
    seen = []

    def prepare(a, checked=train.prepare):
        seen.append((a.batch, a.lr))
        monkeypatch.setattr(train, "load_target", lambda *given, **more: [][0])
        return checked(a)
    monkeypatch.setattr(train, "prepare", prepare)
    try:
        status = train.main(["vdm", *argv, "--device", "cpu", "--data", "x"])
        assert status == 2 and words in capsys.readouterr().err
    except IndexError:
        assert words is None and seen == [train.RECIPES[argv[1]]]


def test_a_process_that_never_comes(small, tmp_path, monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(train, "PATIENCE", train.timedelta(seconds=1))
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    assert train.main(flags(small, tmp_path)) == 2
    err = capsys.readouterr().err
    assert "not all processes of the job came together" in err and err.count("\n") == 1
    assert train.main(flags(small, tmp_path, "--batch", "3")) == 2
    assert "--batch 3 does not part into 2 processes" in capsys.readouterr().err


FORK = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import train
exec(sys.argv[3])
children = []
for rank in "01":
    children.append(os.fork())
    if children[-1] == 0:
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[2]}/{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        status = train.main(sys.argv[4:])
        sys.stdout.flush()
        os._exit(status)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
"""


def processes(argv, folder, before=""):
    """train.py in two processes, as torchrun starts them; `before`: Python that runs first -> statuses, what they said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", FORK, str(ROOT), str(folder), before, *argv], env={**os.environ, **env},
                          capture_output=True, text=True, timeout=120)
    said = [[(folder / f"{rank}.{name}").read_text() for name in ("out", "err")] for rank in "01"]
    return json.loads(done.stdout), said


KILL = """
import os, random, signal, sys, time
sys.path.insert(0, sys.argv[1])
import train
rng, ended = random.Random(1), 0
for trial in range(9):
    pid = os.fork()
    if pid == 0:
        os._exit(train.main(sys.argv[2:]))
    if trial < 8:
        time.sleep(0.1 + 0.3 * rng.random())
        os.kill(pid, signal.SIGKILL)
    ended += os.waitpid(pid, 0)[1] == 0
print(ended)
"""


def test_killed_while_training_nothing_is_lost(small, tmp_path):
    """kill -9 at drawn moments of a run that saves at each step, and goes on: the weights of an uninterrupted one."""
    more = ["--every", "1", "--steps", "40", "--length", "40"]
    assert train.main(flags(small, tmp_path / "whole", *more)) == 0
    argv = flags(small, tmp_path / "cut", *more, "--resume")
    done = subprocess.run([sys.executable, "-c", KILL, str(ROOT), *argv], env={**os.environ, "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=120)
    assert int(done.stdout.splitlines()[-1]) in range(1, 10), done.stderr
    assert_same_models(state_of(tmp_path / "whole"), state_of(tmp_path / "cut"), 0)
    assert (tmp_path / "cut" / "edd" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "edd" / "model.safetensors").read_bytes()


INTERRUPT = """
cosine = train.cosine
def interrupting(step, *given):
    if step == 1 and os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGINT)
    return cosine(step, *given)
train.cosine = interrupting
"""


def test_two_processes_are_one(small, tmp_path):
    """Two gloo processes, a window at a time, interrupted (one of them alone is); then one goes on, or two with a sharded target."""
    names, whole = ["glide", "edd", "eagle", "medusa"], tmp_path / "whole"
    assert train.main(flags(small, whole, names=names)) == 0
    cut, sharded = tmp_path / "cut", tmp_path / "sharded"
    status, said = processes(flags(small, cut, "--micro", "1", names=names), tmp_path, INTERRUPT)
    assert status == [2, 2] and "stopped after 2 of 4 steps" in said[0][1], said
    assert said[1][0] == "" and "Traceback" not in said[1][1] and "train.py" not in said[1][1], "one speaks for all"
    assert state_of(cut, names)["step"] == 2
    shutil.copytree(cut, sharded)
    assert train.main(flags(small, cut, "--resume", names=names)) == 0
    assert_same_models(state_of(whole, names), state_of(cut, names), 2e-5)
    status, said = processes(flags(small, sharded, "--resume", "--shard-target", names=names), tmp_path)
    assert status == [0, 0], said
    assert_same_models(state_of(whole, names), state_of(sharded, names), 2e-5)
    assert (sharded / "edd" / "training.json").exists()
    # Adam's first steps hide the gradients' size: the losses of the log show it.
    logs = [[json.loads(line) for line in (out / "work" / f"{'-'.join(names)}.jsonl").read_text().splitlines()] for out in (whole, sharded)]
    for name in names:
        assert math.isclose(logs[0][-1][name]["loss"], logs[1][-1][name]["loss"], rel_tol=1e-4)
