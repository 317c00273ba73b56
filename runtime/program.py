"""What every program of this project needs: a sentence for a mistake, and exit status 2."""
import os
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import torch
from safetensors import SafetensorError

class UserError(ValueError):
    """A user's mistake: what is wrong and what to do.  A defect of ours keeps its traceback."""

def program(run):
    """Make of run(argv), which may return an exit status, a main(argv) that returns one.

    It is 0 by default; 2 after one sentence about a mistake; 130 after Ctrl-C.
    """
    def main(argv=None):
        name = Path(run.__code__.co_filename).name
        if hasattr(sys.stdout, "reconfigure"):           # a terminal may lack some characters
            sys.stdout.reconfigure(errors="replace")
        try:
            return run(sys.argv[1:] if argv is None else argv) or 0
        except (UserError, OSError, SafetensorError, torch.OutOfMemoryError) as why:
            # Under torchrun all processes raise the same UserError: the first one prints it.
            if os.environ.get("RANK", "0") == "0" or not isinstance(why, UserError):
                sentence = str(why).partition("\n")[0]
                print(f"{name}: {sentence}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"{name}: interrupted", file=sys.stderr)
            return 130
    return main

def at_least(least):
    """A flag's type, for argparse: a finite number of the type of `least`, and not below it."""
    def number(text):
        value = type(least)(text)
        if not least <= value < float("inf"):
            raise ArgumentTypeError(f"{text}: give a finite number, {least} or more")
        return value
    return number

def first_line(why):
    """The first line of an exception's message, or the exception's name where it has none."""
    message = getattr(why, "strerror", None) or str(why)       # an OSError's has no number
    return message.strip().partition("\n")[0][:150] or type(why).__name__
