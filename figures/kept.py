"""Prompts that a table has measured, on the disk: an interrupted table goes on where it was.

    prompts = Kept(folder, run)            # before the arms are built: their prices are kept, too
    prompts.fill(arms)
    bench.measure(run, arms, after=partial(prompts.keep, arms))

The file is named after the run's settings but for --limit, the packages, the machine, and how OpenMP was told to
work.  So a run of other settings begins anew, one with a larger --limit takes over what a smaller one measured,
and seconds of two kinds are never mixed.  A drafter that was trained anew, or code that was changed, is not
noticed: --again discards what is kept.
"""
import hashlib
import json
import os
import platform
import re
from collections import Counter
from pathlib import Path

import torch
import transformers

from data import read
from runtime.clock import Record
from verify import UserError

def machine():
    """The machine in words: its processor, cores and GPU."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    name = found[1] if found else platform.machine()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores of {name}, {gpu}"

def how_computed():
    """What seconds depend on besides a run's settings."""
    threads = {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "MKL_"))}
    return [torch.__version__, transformers.__version__, machine(), torch.get_num_threads(), threads]

def digest(value):
    """A short name for a JSON value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

class Kept:
    """What a bench.Run measured before: {prompt: {arm: its Record as a dict}} and the prices of its drafters.

    again: discard it.
    """
    def __init__(self, folder, run, again=False):
        self.run = run
        settings = {**vars(run.a), "limit": None}
        self.path = Path(folder) / "kept" / f"{digest([settings, how_computed()])}.json"
        self.found = {"prices": {}, "prompts": {}}
        if again:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            try:
                found = json.loads(self.path.read_text(encoding="utf-8"))
                self.found = {"prices": found["prices"], "prompts": found["prompts"]}
            except (OSError, ValueError, LookupError, TypeError):
                raise UserError(f"{self.path} is damaged: delete it, or say --again") from None
        # Trees of other prices would be other arms.
        run.costs |= self.found["prices"]

    def name_of(self, i):
        """The name of prompt i: its tokens, and how many are to follow."""
        _, ids, limit = self.run.prompts[i]
        return digest([ids, limit])

    def fill(self, arms):
        """Give the arms the results that they had."""
        for i in range(len(self.run.prompts)):
            there = self.found["prompts"].get(self.name_of(i), {})
            for arm in arms:
                if arm.name in there:
                    found = there[arm.name]
                    arm.results[i] = record_of(found)
                    arm.memory = max(arm.memory or 0, found["memory"] or 0) or None

    def keep(self, arms, i):
        """All arms have decoded prompt i: write it down."""
        self.found["prices"] = self.run.costs
        self.found["prompts"][self.name_of(i)] = {arm.name: dict_of(arm, i) for arm in arms}
        text = json.dumps(self.found)
        read.write_atomically(self.path, lambda part: part.write_text(text, encoding="utf-8"))

def dict_of(arm, i):
    """The Record of a prompt -> what rows are made of; its rounds are counted in `total`."""
    record = arm.results[i]
    return {"tokens": record.tokens, "total": record.total, "seconds": record.seconds,
            "stage_runs": record.stage_runs, "memory": arm.memory}

def record_of(found):
    """dict_of's inverse -> Record"""
    record = Record(found["tokens"], stage_runs=found["stage_runs"])
    record.total, record.seconds = Counter(found["total"]), found["seconds"]
    return record
