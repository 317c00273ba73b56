"""train.py in two processes on the CPU, as torchrun starts them: the run of one process is the oracle."""
# ruff: noqa: F811
import os
import signal
import socket
import sys

import pytest
import torch
from test_train import about_of, brief, flags, interrupt, small, state_of  # noqa: F401

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
    pids, printed = [], [[folder / f"{rank}.{name}" for name in ("out", "err")] for rank in "01"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    for rank in "01":
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(env, RANK=rank, LOCAL_RANK=rank)
            sys.stdout, sys.stderr = (open(path, "w", buffering=1) for path in printed[int(rank)])
            leave(argv)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return statuses, [[path.read_text() for path in paths] for paths in printed]

def assert_same_run(a, b, names):
    """Weights up to rounding; the losses too, since Adam's first steps hide the gradients' size."""
    states = [state_of(out) for out in (a, b)]
    assert states[0]["step"] == states[1]["step"]
    for key, value in states[0]["models"].items():
        torch.testing.assert_close(value, states[1]["models"][key], atol=2e-5, rtol=0, msg=key)
    for name in names:
        first, second = about_of(a, name), about_of(b, name)
        assert first["target"] == second["target"] and first["tokens_seen"] == second["tokens_seen"]
        assert first["validation"]["tau"] == second["validation"]["tau"]
        assert first["validation"]["held_out_loss"] == pytest.approx(second["validation"]["held_out_loss"], rel=1e-4)

def test_gradients_of_two_processes_are_those_of_one(small, tmp_path, monkeypatch):
    """Before any optimizer: parts of a piece or two, some of which have fewer pieces than there are processes."""
    update, found = train.clip, {}

    def keep(models, losses, step):
        rank, _ = train.rank_and_world()
        kept = {f"{name} {key}": p.grad.clone() for name, m in models.items() for key, p in m.named_parameters() if p.grad is not None}
        torch.save({**kept, "losses": torch.tensor(losses)}, tmp_path / f"{os.environ.get('WORLD_SIZE', 1)}-{rank}-{step}.pt")
        update(models, losses, step)
    monkeypatch.setattr(train, "clip", keep)
    more = ("--steps", "2", "--micro", "30")
    assert train.main(flags(small, tmp_path / "one", *more, names=NAMES)) == 0
    statuses, printed = processes(flags(small, tmp_path / "two", *more, names=NAMES), tmp_path)
    assert statuses == [0, 0], printed
    assert "saved" in printed[0][0] and "saved" not in printed[1][0] and printed[1][1] == "", "one prints for all"
    for step in (0, 1):
        one, *found = (torch.load(tmp_path / f"{name}-{step}.pt") for name in ("1-0", "2-0", "2-1"))
        assert len(one) > 20 and all(one.keys() == each.keys() for each in found)
        for key, value in one.items():
            for each in found:
                torch.testing.assert_close(each[key], value, atol=1e-5, rtol=1e-3 if step else 1e-4, msg=f"{step} {key}")
    assert_same_run(tmp_path / "one", tmp_path / "two", NAMES)

def test_two_processes_stop_together_and_one_goes_on(small, tmp_path, monkeypatch):
    """One of them alone is interrupted; both end after the same step, and one process goes on from it."""
    whole, cut, names = tmp_path / "whole", tmp_path / "cut", ["glide"]
    assert train.main(flags(small, whole, names=names)) == 0
    with monkeypatch.context() as patch:
        interrupt(patch, 3, lambda: os.environ["RANK"] == "1" and signal.raise_signal(signal.SIGINT))
        statuses, printed = processes(flags(small, cut, names=names), tmp_path)
    assert statuses == [2, 2] and "stopped after 2 of 4 steps" in printed[0][1], printed
    assert printed[1][0] == "" and "train.py" not in printed[1][1] and "Traceback" not in printed[1][1], "one prints for all"
    assert train.main(flags(small, cut, "--resume", names=names)) == 0
    assert_same_run(whole, cut, names)
