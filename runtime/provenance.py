"""Which code, on which machine, with which packages: what the rows of a measurement say of it."""
import os
import platform
import re
import subprocess
from datetime import date
from functools import partial
from pathlib import Path

import torch
import transformers

def provenance(device):
    """What rows say of the code and the machine -> dict"""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    machine = f"{os.cpu_count()} cores of {found[1] if found else platform.machine()}"
    if device.type == "cuda":
        machine = f"{torch.cuda.get_device_name(device)}, {machine}"
    return {"commit": commit(), "machine": machine, "threads": torch.get_num_threads(),
            "date": date.today().isoformat(), "torch": torch.__version__,
            "transformers": transformers.__version__}

def commit():
    """The commit of this code, "+changes" where files differ from it; "unknown" without git."""
    git = partial(subprocess.check_output, cwd=Path(__file__).resolve().parent, text=True,
                  stderr=subprocess.DEVNULL)
    try:
        # Rows that were measured a moment ago change nothing of what is measured now.
        changed = git(["git", "status", "--porcelain", "--untracked-files=no", "--", ":/!docs"])
        head = git(["git", "rev-parse", "--short=10", "HEAD"]).strip()
        return head + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
