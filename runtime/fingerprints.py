"""Fingerprints: which target a drafter was trained for, told by shapes and some weights.

    mine = fingerprint(model, tokenizer)      # train.py writes it into a drafter's training.json
    relation(about["target"], mine)               # "the same", "a relative" or "another"

The idea.  A drafter is good for the target whose text it learned.  Beside another target it would
still be harmless, as every token is verified, but useless, and often of another shape: it is
refused.  Between the two are relatives: one model in two roundings, say the hub's and a 4-bit copy
that was turned into floating numbers again.  A drafter of one serves the other, with a note.

Of the weights, 32 are kept, one of each of so many matrices.  Their relative difference,
||a - b|| / ||b||, is 0 up to half precision's rounding for the same model; .08 to .16 after
rounding to 4 bits in blocks of 32 to 128; some 1.4 for another seed.
"""
import hashlib
import json

import numpy as np

PROBES = 32              # weights of a model that its fingerprint keeps
HALF = 1 / 128           # relative error of a weight in bfloat16, twice
NEAR = 0.25              # relative difference of relatives, at most
ENOUGH = 8               # weights that must be near: a few may be so by chance

def vocabulary_fingerprint(tokenizer):
    """What tells one vocabulary from another: 16 hex digits of a hash of all tokens and ids."""
    tokens = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(tokens.encode()).hexdigest()[:16]

def matrices_of(model):
    """[(name, matrix)] of which a weight can be read.

    Left out are matrices on another device or the disk (meta), and quantised ones: of integers, or,
    by torchao, tensors made of several.  FSDP's shards are made of several, too, but can be joined.
    """
    found = []
    for name, p in model.named_parameters():
        sharded = hasattr(p, "full_tensor")
        whole = not p.is_meta and not hasattr(p, "__tensor_flatten__")
        if p.ndim == 2 and p.is_floating_point() and (sharded or whole):
            found.append((name, p))
    return found

def fingerprint(model, tokenizer=None):
    """What tells targets apart: {"class", sizes, "probe": {name: weight}, "vocabulary"}."""
    about = {"class": type(model).__name__, "probe": {}}
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        about[name] = getattr(model.config.get_text_config(), name)
    matrices = matrices_of(model)
    last = len(matrices) - 1
    for i in range(PROBES if matrices else 0):
        # Evenly over all matrices, the first and the last among them
        name, matrix = matrices[round(i * last / (PROBES - 1))]
        if hasattr(matrix, "full_tensor"):
            matrix = matrix.full_tensor()
        weight = matrix[matrix.shape[0] // 3, matrix.shape[1] // 2]
        about["probe"][name] = float(f"{weight.item():.5g}")
    if tokenizer is not None:
        about["vocabulary"] = vocabulary_fingerprint(tokenizer)
    return about

def relation(a, b):
    """What the targets of two fingerprints are to each other.

    "the same"     equal in what both say, weights up to half precision's rounding
    "a relative"   of one architecture and vocabulary, and weights are near: one of them is rounded
                   to 4 bits, or lightly tuned, which 32 weights cannot tell apart
    "another"      all else
    """
    probes = [about.get("probe") for about in (a, b)]
    if not all(isinstance(probe, dict) for probe in probes):
        return "another"                          # an older format: weights without names
    if any(a[key] != b[key] for key in a if key in b and key != "probe"):
        return "another"
    shared = [name for name in probes[0] if name in probes[1]]
    if not shared:
        return "another"
    mine = np.array([probes[0][name] for name in shared])
    its = np.array([probes[1][name] for name in shared])
    if np.allclose(mine, its, rtol=HALF, atol=1e-6):
        return "the same"
    difference = np.linalg.norm(mine - its) / max(np.linalg.norm(its), 1e-30)
    if len(shared) >= ENOUGH and difference < NEAR:
        return "a relative"
    return "another"

def same_target(a, b):
    """Whether two fingerprints are of one model."""
    return relation(a, b) == "the same"
