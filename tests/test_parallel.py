"""Training at size: chunks, padding, several processes, a full disk.  One process, all at once, is the oracle."""
# ruff: noqa: F811
import json
import os
import re
import shutil
import signal
import socket
import sys
from functools import partial

import numpy as np
import pytest
import torch
from conftest import VOCAB, shared
from test_train import arguments, brief, flags, interrupt, leave, refused, small, some_drafter, state_of  # noqa: F401

import train
from training import prepare
from training import forward as frozen, state as jobs, shard

def batch_of(llama, module, ids, learn=None, count=None):
    reads = frozen.read_by({"x": module}) | {"logits": True}
    return frozen.frozen_forward(llama, ids, learn=learn, count=count, **reads) | {"block": 5}

@pytest.mark.parametrize("name", ["glide", "edd", "edd-ce", "eagle", "medusa", "small"])
def test_a_loss_in_chunks_is_the_whole_one(llama, name):
    """Value and gradients, on rows that were chosen; the head sees no more than a chunk at a time."""
    module, found = some_drafter(name, llama), []
    g = torch.Generator().manual_seed(3)
    ids, learn = torch.randint(VOCAB, (2, 13), generator=g), torch.rand(2, 13, generator=g) < 0.6
    learn[:, -1] = False
    heads = {"eagle": [llama.lm_head], "medusa": list(getattr(module, "heads", [])), "small": [getattr(module, "lm", llama).lm_head]}
    rows, batch = [], batch_of(llama, module, ids, learn)
    for most in (10 ** 6, 5):
        module.zero_grad()
        rows.clear()
        hooks = [head.register_forward_pre_hook(lambda m, given: rows.append(given[0].shape[0])) for head in heads.get(name) or [module.head]]
        loss = module.loss(batch | {"sum": partial(frozen.in_chunks, most)})
        loss.backward()
        for hook in hooks:
            hook.remove()
        assert max(rows) <= most and sum(rows) >= learn[:, 1:].sum()
        found.append([loss, *(p.grad if p.grad is not None else torch.zeros_like(p) for p in module.parameters())])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert frozen.frozen_forward(llama, ids)["count"] == 24, "all rows but the last, where nothing is said"

@pytest.mark.parametrize("name", ["glide", "edd", "eagle", "medusa"])
def test_padding_and_other_documents_change_no_gradient(llama, name):
    """Documents in one batch, and each alone without padding: the same sum of gradients."""
    tokens = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(4)).int().numpy()
    tokens[20:23] = ~tokens[20:23]                                           # not to be learned from
    pieces, module, found = np.array([[0, 18, 0], [18, 7, 0], [40, 11, 0]]), some_drafter(name, llama), []
    for some in (pieces,), (pieces[:1], pieces[1:2], pieces[2:]):
        module.zero_grad()
        for part in some:
            ids, learn = prepare.gather(tokens, part)
            module.loss(batch_of(llama, module, ids, learn, count=30)).backward()
        found.append([p.grad.clone() for p in module.parameters()])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-6)

def test_the_target_keeps_what_somebody_reads(llama):
    """Keys and values of the layers that are read, hidden states as Hugging Face counts them, and no others."""
    ids = torch.randint(VOCAB, (1, 9))
    for target in (llama, shared("qwen2-mixed")):
        states = target(ids, output_hidden_states=True).hidden_states
        batch = frozen.frozen_forward(target, ids, hidden={0, 2, 3})
        assert set(batch["hidden"]) == {0, 2, 3} and all(torch.equal(batch["hidden"][k], states[k]) for k in (0, 2, 3))
        assert frozen.frozen_forward(target, ids)["hidden"] == {}
        assert set(batch["kv"]) == {0, 1, 2} and not batch["logits"].requires_grad
    asked = []
    hook = llama.register_forward_pre_hook(lambda module, args, given: asked.append(given), with_kwargs=True)
    batch = frozen.frozen_forward(llama, ids, **frozen.read_by({name: some_drafter(name, llama) for name in ("glide", "medusa")}))
    assert set(batch["kv"]) == {2} and set(batch["hidden"]) == {3} and batch["logits"].shape == (1, 9, VOCAB)
    batch = frozen.frozen_forward(llama, ids, **frozen.read_by({"edd-ce": some_drafter("edd-ce", llama)}))
    assert not batch["kv"] and set(batch["hidden"]) == {2} and batch["logits"] is None and asked[-1]["logits_to_keep"] == 1
    assert not any(given.get("output_hidden_states") for given in asked)
    hook.remove()

# ---------------------------------------------------------------- runs
def test_each_drafter_is_the_one_of_its_own_run(small, tmp_path):
    names, more = ["glide", "edd", "vdm-ce"], ["--steps", "2", "--every", "2"]
    assert train.main(flags(small, tmp_path / "both", *more, names=names)) == 0
    both = state_of(tmp_path / "both")["models"]
    for name in names:
        assert train.main(flags(small, tmp_path / name, *more, names=[name])) == 0
        alone = state_of(tmp_path / name)["models"]
        assert alone and all(torch.equal(both[key], value) for key, value in alone.items())

def test_a_full_disk_leaves_the_last_checkpoint(small, tmp_path, monkeypatch, capsys):
    save, calls = torch.save, []

    def full(state, part):
        calls.append(state["step"])
        if state["step"] == 3:
            part.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(state, part)
    monkeypatch.setattr(torch, "save", full)
    argv = flags(small, tmp_path, names=["vanilla"])
    refused(capsys, argv, "No space left on device): what was there is still there")
    assert state_of(tmp_path)["step"] == 0 and calls == [0, 3] and not list((tmp_path / "work").glob("*.part"))
    monkeypatch.setattr(torch, "save", save)
    assert train.main([*argv, "--resume"]) == 0 and state_of(tmp_path)["step"] == 6

def test_a_process_that_never_comes(small, tmp_path, monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(jobs, "PATIENCE", jobs.timedelta(seconds=0.3))
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    refused(capsys, flags(small, tmp_path), "not all processes of the job came together")

def processes(argv, folder):
    """train.py in two processes, as torchrun starts them -> statuses, [what each said on stdout and stderr]."""
    pids, said = [], [[folder / f"{rank}.{name}" for name in ("out", "err")] for rank in "01"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    for rank in "01":
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(env, RANK=rank, LOCAL_RANK=rank)
            sys.stdout, sys.stderr = (open(path, "w", buffering=1) for path in said[int(rank)])
            leave(argv)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return statuses, [[path.read_text() for path in paths] for paths in said]

def assert_same_run(a, b, names):
    """Weights up to rounding, and losses, since Adam's first steps hide the gradients' size; of the same target."""
    states = [state_of(out) for out in (a, b)]
    assert states[0]["step"] == states[1]["step"]
    for key, value in states[0]["models"].items():
        torch.testing.assert_close(value, states[1]["models"][key], atol=2e-5, rtol=0, msg=key)
    logs = [json.loads((out / "work" / "log.jsonl").read_text().splitlines()[-1]) for out in (a, b)]
    abouts = [json.loads((out / names[0] / "training.json").read_text()) for out in (a, b)]
    assert abouts[0]["target"] == abouts[1]["target"] and abouts[0]["tokens_seen"] == abouts[1]["tokens_seen"]
    for name in names:
        assert logs[0][name]["loss"] == pytest.approx(logs[1][name]["loss"], rel=1e-4)
        assert logs[0][name]["tau"] == logs[1][name]["tau"]

NAMES = ["glide", "edd", "eagle", "medusa"]

def test_two_processes_that_share_a_target_are_one(small, tmp_path, monkeypatch):
    """Two gloo processes, a piece or two at a time, each with half of the target's weights: the run of one process."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    shutil.copytree(small / "model", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')            # not what config.json says
    more = ("--steps", "2", "--micro", "20", "--target", str(tmp_path / "model"))
    assert train.main(flags(small, whole, *more, names=NAMES)) == 0
    spread, fit, targets = shard.spread, train.fit, []

    def measured(*given):
        found = fit(*given)
        weights = list(targets[0].parameters())
        local = [p.to_local() if hasattr(p, "to_local") else p for p in weights]
        print("ends", targets[0].generation_config.eos_token_id)
        print("local", sum(p.numel() for p in local), "of", sum(p.numel() for p in weights))
        return found
    monkeypatch.setattr(shard, "spread", lambda *given: targets.append(spread(*given)) or targets[0])
    monkeypatch.setattr(train, "fit", measured)
    status, said = processes(flags(small, halves, *more, "--shard-target", names=NAMES), tmp_path)
    assert status == [0, 0], said
    assert_same_run(whole, halves, NAMES)
    for out, _ in said:                                    # after all forwards: of the layers at most half
        local, total = map(int, re.search(r"local (\d+) of (\d+)", out).groups())
        assert local < 0.75 * total and "ends [5, 7]" in out
    assert "saved" in said[0][0] and "saved" not in said[1][0] and said[1][1] == "", "one speaks for all"

def test_two_processes_stop_together_and_one_goes_on(small, tmp_path, monkeypatch):
    """One of them alone is interrupted; both end after the same step, and one process goes on from it."""
    whole, cut, names = tmp_path / "whole", tmp_path / "cut", ["glide"]
    assert train.main(flags(small, whole, "--steps", "4", names=names)) == 0
    undo = interrupt(monkeypatch, 3, lambda: os.environ["RANK"] == "1" and signal.raise_signal(signal.SIGINT))
    status, said = processes(flags(small, cut, "--steps", "4", names=names), tmp_path)
    undo()
    assert status == [2, 2] and "stopped after 2 of 4 steps" in said[0][1], said
    assert said[1][0] == "" and "Traceback" not in said[1][1] and "train.py" not in said[1][1], "one speaks for all"
    assert train.main(flags(small, cut, "--steps", "4", "--resume", names=names)) == 0
    assert_same_run(whole, cut, names)
