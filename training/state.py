"""How the programs of training/ begin and end: what is replaced, interrupted, and said of mistakes.

    status_of(run, argv)               the exit status of a program
    with claim_folders(a, names):      a used --out or --work needs --resume or --overwrite
    with locked(folder):               one run at a time
    with damaged(path):                what goes wrong while a file is read is a sentence
    with interruptible():              Ctrl-C and SIGTERM let the current step end
"""
import contextlib
import fcntl
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from runtime.program import first_line
from runtime.errors import UserError

# What is said in a sentence: mistakes of the user, of the disk, of a file's content
SENTENCES = (UserError, OSError, SafetensorError, torch.OutOfMemoryError)

def is_first():
    """Whether this is the first process of a run, or the only one."""
    return int(os.environ.get("RANK", 0)) == 0

def status_of(run, argv):
    """Run a program -> exit status: 0; 2 after one sentence about a mistake; 130 after Ctrl-C."""
    program = Path(run.__code__.co_filename).name
    try:
        run(argv)
    except SENTENCES as why:
        # All processes of a run raise the same UserError: the first one prints it.
        if is_first() or not isinstance(why, UserError):
            print(f"{program}: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    return 0

@contextlib.contextmanager
def damaged(path):
    """Whatever goes wrong while a saved file is read becomes a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as why:
        raise UserError(f"{path} is damaged, or was not saved by this program "
                        f"({first_line(why)}): begin again with --overwrite") from None

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

def is_log(path):
    """Whether train.py has written this file: its first row names the command."""
    try:
        with open(path, encoding="utf-8") as file:
            return "command" in json.loads(file.readline())
    except (OSError, ValueError, TypeError):
        return False

@contextlib.contextmanager
def claim_folders(a, names):
    """Refuse to replace anything unasked, make --work and keep other runs out of it and of --out.

    a: the flags of train.py.  names: of the folders in --out.  Without --resume, an older run is
    removed from --work.
    """
    if not is_first():
        yield                                            # the first process claims them for all
        return
    work = Path(a.work)
    state, log = work / "state.pt", work / "log.jsonl"
    outs = [Path(a.out) / name for name in names]
    if a.resume and not state.exists():
        raise UserError(f"--resume: there is no interrupted run in {work}")
    used = [state, *[out for out in outs if out.is_dir() and any(out.iterdir())]]
    for path in used if not a.resume else ():
        if path.exists() and not a.overwrite:
            raise UserError(f"{path} is there already: go on with an interrupted run by --resume, "
                            "name another --work or --out, or --overwrite")
    if log.exists() and not is_log(log):
        raise UserError(f"{log} is not a log of train.py: name another --work")
    with contextlib.ExitStack() as locks:
        for folder in (work, *outs):
            locks.enter_context(locked(folder))
        if not a.resume:
            for path in (state, log):
                path.unlink(missing_ok=True)
        yield

# ---------------------------------------------------------------- signals
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
