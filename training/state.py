"""A training run as the machine sees it: processes, signals, the state on disk, the log.

    join(a), place(), say(text), mean(values, device)      the processes of torchrun's job
    interruptible()                                        Ctrl-C and SIGTERM are noted
    main(argv, work, name)                                 mistakes are one sentence
    State(a, names)                                        --work/state.pt, and what must stay
    Log(a)                                                 --work/log.jsonl
"""
import contextlib
import hashlib
import json
import os
import resource
import signal
import statistics
import sys
import time
import zipfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import verify
from runtime.text import UserError, first_line, write_atomically

PATIENCE = timedelta(minutes=10)           # with a process of the job that does not come, or answer
# What --resume may change.
FREE = set("lr every micro device shard_target out work resume overwrite command run spent".split())
# What the user can do something about
MISTAKES = (UserError, verify.UserError, OSError)
# What a saved state has.
PARTS = {
    "step": int, "steps": int, "tokens": int, "command": str, "run": str,
    "setting": dict, "models": dict, "learners": list,
}


# ---------------------------------------------------------------- processes
def place():
    """-> the number of this process, and of how many, as torchrun says."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def say(text):
    """One process speaks for all."""
    if place()[0] == 0:
        print(text, file=sys.stderr)


def join(a):
    """Meet the other processes of torchrun's job; each takes a GPU of its own."""
    if "RANK" not in os.environ or dist.is_initialized():
        return
    if a.device == "cuda":
        number, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if number >= count:
            raise UserError(f"torchrun started a process for GPU {number}, and {count} are here: "
                            f"say --nproc-per-node {count}")
        a.device = f"cuda:{number}"
        torch.cuda.set_device(number)
    backend = "nccl" if a.device.startswith("cuda") else "gloo"
    try:
        dist.init_process_group(backend, timeout=PATIENCE)
    except Exception as why:
        reason = first_line(why)
        raise ConnectionError(f"not all processes of the job came together ({reason}): start every "
                              "one by torchrun") from None


def meet():
    """Wait, however long, until all processes are here: one of them prepares the data."""
    if dist.is_initialized():
        dist.barrier(dist.new_group(backend="gloo", timeout=timedelta(days=9)))


def stop(why):
    """End the run with a sentence.  All processes come here, and one says why."""
    raise UserError(why) if place()[0] == 0 else SystemExit(2)


def mean(values, device):
    """The mean over all processes of some numbers, in one message -> floats."""
    like = {"dtype": torch.float64, "device": device}
    values = torch.stack([torch.as_tensor(value, **like) for value in values])
    if dist.is_initialized():
        dist.all_reduce(values)
    return (values / place()[1]).tolist()


@contextlib.contextmanager
def interruptible():
    """Ctrl-C and SIGTERM are noted in the list that this yields: the current step can end.

    A second one stops at once (what is saved stays whole), but for torchrun, which passes on to
    each process what all of them have got already.
    """
    signals = []

    def note(number, frame):
        if signals and not dist.is_initialized():
            sys.exit(130)
        signals.append(number)
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv, work, name):
    """Run work(argv) -> exit status: 0; 2 after one sentence about a mistake or an interruption."""
    try:
        work(argv)
    except (ValueError, OSError, RuntimeError, KeyboardInterrupt) as why:
        rank, together = place()[0], dist.is_initialized()
        reason = why
        if isinstance(why, KeyboardInterrupt):
            reason = "interrupted"
        elif together and "onnection" in str(why):
            reason = "another process has ended: its own words say why"
        elif not isinstance(why, MISTAKES) and "memory" not in str(why):
            raise                                        # a defect of the program's
        # What all processes find before they have met, one of them says.
        if rank == 0 or together or isinstance(why, OSError):
            print(f"{name}: {f'process {rank}: ' if rank else ''}{reason}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


# ---------------------------------------------------------------- the state
class State:
    """What a run leaves in --work, so that it can go on.  It belongs to its command.

    a: the flags; names: of what will be saved under --out.  Raises UserError where the run would
    replace an unfinished one, or something finished; --overwrite lets it.
    """

    def __init__(self, a, names):
        self.path, self.found = Path(a.work) / "state.pt", None
        # What cannot be written to is found before the work.
        check_folder("work", a.work)
        for name in names:
            check_folder("out", Path(a.out) / name)
        if self.path.exists() and (a.resume or not a.overwrite):
            self.found = self.read()
        if a.resume and self.found is None:
            raise UserError(f"--resume: there is no interrupted run in {a.work}: leave it out, or "
                            "name the --work of one")
        # A finished run's state may go: what it has learned stands in its --out.
        if self.found and not a.resume:
            step, steps, command = (self.found[key] for key in ("step", "steps", "command"))
            if step < steps or not self.is_saved():
                raise UserError(f"{a.work} holds step {step} of {steps} of `{command}`, which "
                                f"`{a.command}` would replace: go on with it by --resume, or give "
                                "another --work, or --overwrite")
            self.found = None
        a.run = self.found["run"] if self.found else self.fresh(a)
        for name in names:
            self.protect(Path(a.out) / name, a)

    def read(self):
        """The state in --work; a UserError where it is damaged, or anything else."""
        try:
            with zipfile.ZipFile(self.path) as records:
                damaged = records.testzip()      # the first record whose checksum is wrong, or None
            found = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as why:
            raise UserError(f"{self.path} cannot be read ({type(why).__name__}): --overwrite "
                            "begins anew") from None
        whole = isinstance(found, dict)
        whole = whole and all(isinstance(found.get(name), kind) for name, kind in PARTS.items())
        if damaged or not whole:
            raise self.no_state()
        return found

    def no_state(self):
        return UserError(f"{self.path} is damaged, or no state of a training run: --overwrite "
                         "begins anew")

    def saved(self, a):
        """Note that what the run has learned stands in its --out; one process does."""
        if place()[0] == 0:
            write_atomically(self.path.with_name("saved"), lambda part: part.write_text(a.run))

    def is_saved(self):
        """Whether what the found run has learned stands in its --out."""
        noted = self.path.with_name("saved")
        return noted.exists() and noted.read_text() == self.found["run"]

    def fresh(self, a):
        """A name for a new run: 12 hex digits."""
        return hashlib.sha256(f"{a.command} {time.time()}".encode()).hexdigest()[:12]

    def protect(self, folder, a):
        """Refuse to replace what another run has finished, or what somebody else has put there."""
        path = folder / "training.json"
        if a.overwrite or not folder.exists():
            return
        if not path.exists():
            # A write that was killed leaves a .part.
            if any(file.suffix != ".part" for file in folder.iterdir()):
                raise UserError(f"{folder} holds files that no training.json accounts for: give "
                                "another --out, or --overwrite")
            return
        try:
            about = json.loads(path.read_text())
        except ValueError:
            about = None
        about = about if isinstance(about, dict) else {}
        if about.get("run") != a.run:
            raise UserError(f"{folder} was made by `{about.get('command')}`: give another --out, "
                            "or --overwrite")

    def restore(self, a, together, learners):
        """Put a found state into the modules and their optimizers -> steps done, tokens seen."""
        if not self.found:
            return 0, 0
        before = self.found["setting"]
        if a.dtype == "auto":
            a.dtype = before["dtype"]
        changed = [name for name, value in settings(a).items() if before.get(name) != value]
        if changed:
            command = self.found["command"]
            raise UserError(f"--resume: the run in {a.work}, `{command}`, had another "
                            f"{', '.join(changed)} than `{a.command}`: only --lr, --every, "
                            "--micro, --device, --shard-target and --out may change")
        kept = self.found["learners"]
        try:
            together.load_state_dict(self.found["models"])
            for learner, its in zip(learners, kept, strict=True):
                learner.load_state_dict(its)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):
            raise self.no_state() from None
        return self.found["step"], self.found["tokens"]

    def save(self, step, tokens, a, together, learners):
        """Write the state; one process does."""
        state = {
            "step": step,
            "steps": a.steps,
            "tokens": tokens,
            "command": a.command,
            "run": a.run,
            "setting": settings(a),
            "models": together.state_dict(),
            "learners": [learner.state_dict() for learner in learners],
        }
        if place()[0] == 0:
            write_atomically(self.path, lambda part: torch.save(state, part))


def check_folder(flag, folder):
    """Refuse a folder that cannot be made, or written to."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"--{flag}: {folder} is no folder that can be written to: name another one")


def settings(a):
    """The flags that a resumed run must share."""
    return {name: value for name, value in vars(a).items() if name not in FREE}


# ---------------------------------------------------------------- the log
def clock(device):
    """Seconds, when the device has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Log:
    """JSON lines in --work, and what the bar shows.

    losses: of the steps since the last evaluation, {name: loss} each.
    """

    def __init__(self, a):
        self.path, self.a = Path(a.work) / "log.jsonl", a
        self.begin()
        self.line({"command": a.command, "date": time.strftime("%Y-%m-%d %H:%M")})

    def begin(self):
        """Training goes on."""
        self.losses, self.seen, self.began = [], self.a.spent, clock(self.a.device)

    def rate(self):
        """Tokens a second since training began, or went on."""
        return round((self.a.spent - self.seen) / max(1e-9, clock(self.a.device) - self.began))

    def line(self, row):
        if place()[0] == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")

    def write(self, step, rate, metrics):
        """A line of the file; on the screen what was measured, a line a drafter."""
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        memory *= 1 if sys.platform == "darwin" else 1024      # macOS counts bytes, Linux kilobytes
        if self.a.device.startswith("cuda"):
            memory = torch.cuda.max_memory_allocated(self.a.device)
        row = {
            "step": step,
            "tokens_seen": self.a.spent,
            "tokens_per_s": rate,
            "peak_memory": memory,
        }
        for name, values in metrics.items():
            lost = [losses[name] for losses in self.losses]
            row[name] = {"loss": statistics.mean(lost) if lost else None, **values}
            shown = []
            for key, value in values.items():
                if isinstance(value, float):
                    shown.append(f"{key} {value:.3f}")
            if place()[0] == 0:
                tqdm.write(f"step {step} {name}: {', '.join(shown)}")
        self.line(row)
