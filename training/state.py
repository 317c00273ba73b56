"""How the programs of training/ begin and end: what is replaced, interrupted, and said of mistakes.

    status_of(run, argv)               the exit status of a program
    claim_folders(a)                   a used --out or --work needs --resume or --overwrite
    interruptible()                    Ctrl-C and SIGTERM let the current step end
"""
import contextlib
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from verify import UserError


def status_of(run, argv):
    """Run a program -> its exit status: 0; 2 after one sentence about a user's mistake."""
    try:
        run(argv)
    except (UserError, OSError, torch.OutOfMemoryError) as why:
        program = Path(run.__code__.co_filename).name
        print(f"{program}: {why}", file=sys.stderr)
        return 2
    return 0

def claim_folders(a):
    """Refuse to replace anything unasked, then make --work and remove an older run from it.

    a: the flags of train.py.
    """
    work = Path(a.work)
    state = work / "state.safetensors"
    if a.resume:
        if not state.exists():
            raise UserError(f"--resume: there is no interrupted run in {work}")
        return
    for path in (state, *[Path(a.out) / name for name in a.what]):
        if path.exists() and not a.overwrite:
            raise UserError(f"{path} is there already: go on with an interrupted run by --resume, "
                            "name another --work or --out, or --overwrite")
    work.mkdir(parents=True, exist_ok=True)
    for path in (state, work / "log.jsonl"):
        path.unlink(missing_ok=True)

@contextlib.contextmanager
def interruptible():
    """While this is open, Ctrl-C and SIGTERM are only noted, in the list that it yields.

    A second signal ends the process at once.  Under torchrun it does not: torchrun sends its own
    SIGTERM to each process after a Ctrl-C, which all processes have received already.
    """
    signals = []

    def note(number, frame):
        if signals and not dist.is_initialized():
            sys.exit(130)
        signals.append(number)

    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, note)
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
