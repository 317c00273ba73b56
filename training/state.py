"""How the programs of training/ begin and end: what is locked, replaced, interrupted.

    with claim_folders(a, names):      a used --out or --work needs --resume or --overwrite
    with locked(folder):               one run at a time
    with interruptible() as signals:   Ctrl-C and SIGTERM let the current step end
"""
import contextlib
import fcntl
import os
import signal
import sys
from pathlib import Path

from runtime.errors import UserError
from training.processes import rank_and_world

# ---------------------------------------------------------------- folders
def lock(file, name):
    """Lock an open file, or a folder's descriptor, until it is closed.  name: for the UserError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another run is using {name}: wait for it, or name another") from None

@contextlib.contextmanager
def locked(folder):
    """Make a folder and let no other run have it meanwhile.  It is removed again if it is empty."""
    folder = Path(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle, folder)
        yield
    finally:
        os.close(handle)
        for path in made:
            with contextlib.suppress(OSError):           # it is not empty
                path.rmdir()

@contextlib.contextmanager
def claim_folders(a, names):
    """Lock --work and the folders of --out, and refuse to replace what is there unasked.

    a: the flags of train.py.  names: of the folders in --out.
    """
    rank, _ = rank_and_world()
    if rank > 0:
        yield                                            # the first process claims them for all
        return
    state = Path(a.work) / "state.pt"
    outs = [Path(a.out) / name for name in names]
    if a.resume and not state.exists():
        raise UserError(f"--resume: there is no interrupted run in {a.work}")
    for path in () if a.resume or a.overwrite else (state, *outs):
        if path.is_file() or path.is_dir() and any(path.iterdir()):
            raise UserError(f"{path} is there already: go on with an interrupted run by --resume, "
                            "name another --work or --out, or --overwrite")
    with contextlib.ExitStack() as locks:
        for folder in (a.work, *outs):
            locks.enter_context(locked(folder))
        if not a.resume:
            state.unlink(missing_ok=True)
        yield

# ---------------------------------------------------------------- signals
@contextlib.contextmanager
def interruptible():
    """While this is open, Ctrl-C and SIGTERM are only noted, in the list that it yields.

    A second signal ends the process at once.  Under torchrun it does not: torchrun sends its own
    signal to each process after a Ctrl-C, which all processes have received already.
    """
    signals = []
    _, world = rank_and_world()

    def note(number, frame):
        if signals and world == 1:
            sys.exit(130)
        signals.append(number)

    numbers = signal.SIGINT, signal.SIGTERM
    handlers = [signal.signal(number, note) for number in numbers]
    try:
        yield signals
    finally:
        for number, handler in zip(numbers, handlers):
            signal.signal(number, handler)
