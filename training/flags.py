"""The flags that all training has: of train.py, and of checkpoints/make.py as far as they agree."""
import math
from pathlib import Path

import torch

import edd
from runtime import text as read
from runtime.text import UserError
from runtime import load

WORK = Path(__file__).resolve().parent.parent / "work"
MOST = 1e37                            # no number of a flag is larger: float32 holds 34 times that
# Name, type or choices, default, meaning.
FLAGS = (
    ("target", str, str(load.STAND_IN), "folder or hub name of the target"),
    ("revision", str, None, "of the target on the hub: a branch, a tag, a commit"),
    ("trust-remote-code", bool, False, "run the target's own code, too"),
    ("device", str, "cuda" if torch.cuda.is_available() else "cpu", "cpu or cuda"),
    ("template", str, None,
     "chat format: plain, vicuna, a Jinja file; when left out the tokenizer's own"),
    ("init", str, None, "folder of drafters to start from (a second stage, on other data)"),
    ("out", str, str(WORK / "drafters"), "folder to save under"),
    ("work", str, str(WORK / "training"), "folder for a run's tokens, state and log"),
    ("resume", bool, False, "go on with the interrupted run in --work"),
    ("overwrite", bool, False, "replace an unfinished run in --work, and drafters in --out"),
    ("steps", int, None,
     "one pass over the data when left out; 0: the drafters of --init are only measured"),
    ("every", int, 200, "steps between two savings of the state, and two evaluations"),
    ("batch", int, 8, "a step has so many times --length tokens, of all processes"),
    ("micro", int, 2048, "tokens a forward, with padding; a step takes as many as it needs"),
    ("length", int, 512, "tokens of a document that are seen together, at most"),
    ("lr", float, None,
     "peak learning rate; when left out 5e-4 sqrt(4096 / the target's width)"),
    ("optimizer", ("muon", "adamw"), "muon", "of hidden matrices; all else learns by AdamW"),
    ("loss", ("kl", "ce"), "kl", "to the target's distribution, or cross entropy of the text"),
    ("dtype", ("auto", "float32", "bfloat16"), "auto",
     "autocast of drafters; auto: the faster one"),
    ("width", int, None, "d_D, GLIDE's hidden size; the target's when left out"),
    ("layers", int, 1, "N_D, GLIDE's layers"),
    ("layer", int, None,
     "target layer that GLIDE's top layer reads, from 0; the top one when left out"),
    ("norm", ("yes", "no"), "yes", "a norm before GLIDE's glimpse; the paper has none"),
    ("block", int, 5, "L, block length of GLIDE's mask"),
    ("hidden", int, edd.HIDDEN, "which of the target's hidden_states EDD reads"),
    ("words", int, None,
     "learn and draft so many words alone, the first of --out's words.json"),
    ("features", bool, False,
     "keep what the target computes under --work: a piece's later epochs take no forward of it"),
    ("seed", read.seed, 0, "of weights and of the order"),
)
NAMES = [name for name, *_ in FLAGS]
# Flags that decide a drafter's architecture, and where its config has that.
ARCHITECTURE = {flag: flag for flag in "loss width layers norm block hidden".split()}
ARCHITECTURE["layer"] = "layers_read"


def add_flags(parser, names, meanings=None):
    """The flags of FLAGS that have these names.  meanings {name: text}: what they mean here."""
    for name, kind, default, meaning in FLAGS:
        if name not in names:
            continue
        takes = {"type": kind}
        if kind is bool:
            takes = {"action": "store_true"}
        elif isinstance(kind, tuple):
            takes = {"choices": kind}
        meaning = (meanings or {}).get(name, meaning)
        parser.add_argument(f"--{name}", **takes, default=default, help=meaning)


def check(a, names, least_steps=1):
    """Refuse numbers that cannot work: these flags are above 0, --steps is least_steps or more."""
    for name in names:
        value = getattr(a, name, None)
        if value is None:
            continue
        if not 0 < value < MOST:
            raise UserError(f"--{name} is {value}: it must be above 0, and below {MOST}")
    steps = getattr(a, "steps", None)
    if steps is not None and steps < least_steps:
        raise UserError(f"--steps is {steps}: it must be above 0 (or 0 with train.py --init, to "
                        "measure alone)")
    load.check_device(getattr(a, "device", "cpu"))


def given_by_user(a):
    """Flags of the architecture that are not their defaults."""
    defaults = {name: default for name, _, default, _ in FLAGS}
    return [flag for flag in ARCHITECTURE if getattr(a, flag) != defaults[flag]]


def rate(a, width):
    """The peak learning rate: GLIDE's 5e-4 at Vicuna-7B's width, more for narrow targets."""
    return a.lr or 5e-4 * math.sqrt(4096 / width)
