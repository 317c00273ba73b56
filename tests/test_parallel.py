"""train.py in two processes on the CPU, as torchrun starts them: one process is the oracle."""
# ruff: noqa: F811
import os
import signal
import socket
import sys

import pytest
import torch
from test_train import (  # noqa: F401
    about_of, brief, flags, interrupt, small, state_of, weights_of)

import train

NAMES = ["glide", "edd", "eagle"]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")

def leave(argv):
    """Run train.py in this process, a fork of the test's, and end with it, whatever happens."""
    status = 1
    try:
        status = train.main(argv)
    finally:
        os._exit(status)

def processes(argv, folder):
    """train.py in two processes -> statuses, [what each printed on stdout and stderr]."""
    pids, printed = [], []
    for rank in "01":
        printed.append([folder / f"{rank}.{name}" for name in ("out", "err")])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for rank in "01":
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                              RANK=rank, LOCAL_RANK=rank)
            sys.stdout, sys.stderr = (open(path, "w", buffering=1) for path in printed[int(rank)])
            leave(argv)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return statuses, [[path.read_text() for path in paths] for paths in printed]

def assert_same_run(a, b, names):
    """Weights up to rounding; the losses too, as Adam's first steps hide a gradient's size."""
    one, two = state_of(a), state_of(b)
    assert one["step"] == two["step"]
    weights = weights_of(two)
    for key, value in weights_of(one).items():
        torch.testing.assert_close(value, weights[key], atol=2e-5, rtol=0, msg=key)
    for name in names:
        first, second = about_of(a, name), about_of(b, name)
        assert first["target"] == second["target"]
        assert first["tokens_seen"] == second["tokens_seen"]
        first, second = first["validation"], second["validation"]
        assert first["tau"] == second["tau"]
        assert first["held_out_loss"] == pytest.approx(second["held_out_loss"], rel=1e-4)

def test_gradients_of_two_processes_are_those_of_one(small, tmp_path, monkeypatch):
    """Before any optimizer.  Some parts have fewer pieces than there are processes.

    The one process reads each step in one part, the two read it in many.
    """
    clip = train.clip

    def keep(drafters, losses, step):
        rank, world = train.rank_and_world()
        kept = {f"{name} {key}": p.grad.clone() for name, module in drafters.items()
                for key, p in module.named_parameters() if p.grad is not None}
        kept["losses"] = torch.tensor(losses)
        torch.save(kept, tmp_path / f"{world}-{rank}-{step}.pt")
        clip(drafters, losses, step)
    monkeypatch.setattr(train, "clip", keep)
    one = flags(small, tmp_path / "one", "--steps", "2", "--micro", "9999", names=NAMES)
    two = flags(small, tmp_path / "two", "--steps", "2", "--micro", "30", names=NAMES)
    assert train.main(one) == 0
    statuses, printed = processes(two, tmp_path)
    assert statuses == [0, 0], printed
    assert "saved" in printed[0][0] and printed[1] == ["", ""], "one prints for all"
    for step in (0, 1):
        one, *two = (torch.load(tmp_path / f"{name}-{step}.pt", weights_only=True)
                     for name in ("1-0", "2-0", "2-1"))
        assert len(one) > 20 and all(one.keys() == each.keys() for each in two)
        for key, value in one.items():
            for each in two:
                near = dict(atol=1e-5, rtol=1e-3 if step else 1e-4, msg=f"{step} {key}")
                torch.testing.assert_close(each[key], value, **near)
    assert_same_run(tmp_path / "one", tmp_path / "two", NAMES)

def test_two_processes_stop_together_and_one_goes_on(small, tmp_path, monkeypatch):
    """One of them alone is interrupted; both end after the same step."""
    whole, cut, names = tmp_path / "whole", tmp_path / "cut", ["glide"]
    assert train.main(flags(small, whole, names=names)) == 0

    def signalled():
        if os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt(patch, 3, signalled)
        statuses, printed = processes(flags(small, cut, names=names), tmp_path)
    assert statuses == [2, 2] and "stopped after 2 of 4 steps" in printed[0][1], printed
    assert printed[1] == ["", ""], "one prints for all"
    assert train.main(flags(small, cut, "--resume", names=names)) == 0
    assert_same_run(whole, cut, names)
