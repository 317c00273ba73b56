"""How good is a tree among all trees of its size that the drafter's answers allow?

    python figures/optimality.py --drafter glide edd --tree chain cape "beam(width=8)" pct eagle2

tree_optimality: the joint probabilities of a tree's nodes, over those of the best as many nodes among all the
drafter was asked about: every child, in the whole vocabulary, of every node that was expanded.  A joint
probability is what EDD's section 3.2 builds on, p_j = c_1 c_2 ... c_j along the path to node j; their sum is
how many tokens the tree expects to win.  It says how well a builder uses what it was told, not what it asks.

Over the rounds of the first four prompts.  The flags are bench.py's.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from calibration import about  # noqa: E402

import bench  # noqa: E402

PROMPTS, TOKENS = 4, 48


class Asked:
    """What a builder sees of a drafter, and a note of all that it was told in one round."""

    def __init__(self, expand):
        self.expand = expand
        self.generator = getattr(expand, "generator", None)
        self.number = {}                        # (the node above, token) -> number in the order of expand
        self.children = []                      # of each asked node: joint probabilities (V,) of its children

    def __call__(self, tokens, parents):
        rows = self.expand(tokens, parents)
        for token, parent, row in zip(tokens.tolist(), parents, rows):
            joint = self.children[parent][token].item() if parent >= 0 else 1.0
            self.number[parent, token] = len(self.children)
            # p_j = p_parent c_j
            self.children.append(joint * row.double())
        return rows

    def joint(self, tree):
        """The joint probabilities of the tree's nodes but the root, a list."""
        found, place = [], []                   # place: the asked number of each tree node, or None
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
            absent = parent < 0 < len(place)
            above = place[parent] if parent >= 0 else -1
            place.append(None if absent else self.number.get((above, token)))
            if parent >= 0:
                found.append(self.children[above][token].item())
        return found

    def best(self, n):
        """The sum of the n largest joint probabilities that the builder was told."""
        return torch.cat(self.children).topk(n).values.sum().item()


@torch.inference_mode()
def optimality(decode, build, prompts):
    """-> tree_optimality; None where no node was ever drafted.  decode(build, ids, limit): of one prompt."""
    kept = best = 0.0

    def judged(expand, root):
        nonlocal kept, best
        asked = Asked(expand)
        tree = build(asked, root)
        joint = asked.joint(tree)
        if joint:
            kept += sum(joint)
            best += asked.best(len(joint))
        return tree

    for _, ids, limit in prompts:
        decode(judged, ids, min(limit, TOKENS))
    return kept / best if best else None


def figure(argv):
    run = bench.Run(argv)
    rows = []
    for label, drafter in run.drafters.items():
        for tree in run.trees:
            if hasattr(drafter, "chain") and tree.name in bench.CHAINS:
                continue                        # it writes its own chains, and tells nobody of distributions

            def decode(build, ids, limit, drafter=drafter):
                return run.decode(drafter, build, ids, limit)
            found = optimality(decode, bench.builder(run, label, tree), run.prompts[:PROMPTS])
            print(f"{label} x {tree.label}: tree_optimality {'-' if found is None else format(found, '.3f')}")
            rows.append({**about(run, label), "tree": tree.label, "tree_optimality": found})
    if run.a.json:
        bench.write_json(run.a.json, rows)
    return 0


def main(argv=None):
    return bench.main(argv, figure, "figures/optimality.py")


if __name__ == "__main__":
    sys.exit(main())
