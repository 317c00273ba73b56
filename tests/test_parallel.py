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

def test_two_processes_are_one(small, tmp_path, monkeypatch):
    """Their gradients before any optimizer, their weights, and what they measure.

    One of them alone is interrupted: both end after the same step, and go on together.  Some parts
    have fewer pieces than there are processes; the one process reads each step in one part.
    """
    clip = train.clip

    def keep(drafters, losses, step):
        rank, world = train.rank_and_world()
        kept = {f"{name} {key}": p.grad.clone() for name, module in drafters.items()
                for key, p in module.named_parameters() if p.grad is not None}
        kept["losses"] = torch.tensor(losses)
        torch.save(kept, tmp_path / f"{world}-{rank}-{step}.pt")
        clip(drafters, losses, step)

    def signalled():
        if os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(train, "clip", keep)
    assert train.main(flags(small, tmp_path / "one", "--micro", "9999", names=NAMES)) == 0
    two = flags(small, tmp_path / "two", "--micro", "30", names=NAMES)
    with monkeypatch.context() as patch:
        interrupt(patch, 3, signalled)
        statuses, printed = processes(two, tmp_path)
    assert statuses == [2, 2] and "stopped after 2 of 4 steps" in printed[0][1], printed
    assert printed[1] == ["", ""], "one prints for all"
    statuses, printed = processes([*two, "--resume"], tmp_path)
    assert statuses == [0, 0] and "saved" in printed[0][0] and printed[1] == ["", ""], printed
    for step in (0, 1):
        one, *two = (torch.load(tmp_path / f"{name}-{step}.pt", weights_only=True)
                     for name in ("1-0", "2-0", "2-1"))
        assert len(one) > 20 and all(one.keys() == each.keys() for each in two)
        for key, value in one.items():
            for each in two:
                near = dict(atol=1e-5, rtol=1e-3 if step else 1e-4, msg=f"{step} {key}")
                torch.testing.assert_close(each[key], value, **near)
    # Weights up to rounding; the losses too, as Adam's first steps hide a gradient's size
    weights = weights_of(state_of(tmp_path / "two"))
    for key, value in weights_of(state_of(tmp_path / "one")).items():
        torch.testing.assert_close(value, weights[key], atol=2e-5, rtol=0, msg=key)
    for name in NAMES:
        first, second = (about_of(tmp_path / run, name) for run in ("one", "two"))
        assert first["target"] == second["target"]
        first, second = first["validation"], second["validation"]
        assert first["tau"] == second["tau"]
        assert first["held_out_loss"] == pytest.approx(second["held_out_loss"], rel=1e-4)
