"""A temperature that follows the text: a drafter whose confidence stays calibrated on any text.

It is in none of the three papers.  GLIDE's CAPE and EDD's PCT read a drafter's confidence as the
probability of acceptance ("well-calibrated", EDD's section 3.2).  One temperature for all texts,
fitted on held-out ones, makes it so on average: on a kind of text that is harder for the drafter it
is over-confident.

The idea.  Every round shows which of the drafter's best tokens the target took.  So the temperature
is fitted again after each round, by Newton's method, from the start of a text to its end.

    symbol                          shape    name here
    z = logits / T                  (k, V)   z: of the accepted nodes
    c = max softmax(z)              (k,)     c: confidence
    y                               (k,)     y: 1 where the target took that token, else 0
    log loss                        (k,)     - y log c - (1 - y) log(1 - c)
    d c / d log T = c (E_z - z_max) (k,)     slope, where E_z = sum_x softmax(z)_x z_x
    H = PRIOR + sum slope^2 / (c (1 - c))    curvature: Fisher's information, PRIOR at the start
    log T += sum slope (y - c) / (c (1 - c)) / H

The nodes judged are those of the accepted path: the target's token after each of them is known.
Everything stays on the drafter's device: nothing waits for it.  Greedy decoding alone shows trees
softmax(logits / T); in sampling T is not used.

    both = running.Running(drafter)
    verify.generate(target, both, pct.pct, text)

    python -m beyond.running      # the demo: an over-confident drafter is found out
"""
import math

import torch

PRIOR = 20.0                # information at the start, of some hundred judged tokens
COLDEST, HOTTEST = 0.3, 3.0


class Running:
    """A drafter by the contract at the top of verify.py, with a temperature fitted along the text.

    drafter: a drafter by that contract; its own temperature is where each text starts.  Whatever
    else is asked of it, the drafter answers.
    """

    def __init__(self, drafter):
        self.drafter = drafter
        self.reset()

    def __getattr__(self, name):
        if name == "drafter":                    # not there yet
            raise AttributeError(name)
        return getattr(self.drafter, name)

    def reset(self):
        """Forget the sequence, and what was fitted to it."""
        self.drafter.reset()
        self.temperature = getattr(self.drafter, "temperature", 1.0)
        self.information = PRIOR
        self.logits = []                         # of this round's nodes, one tensor a forward
        self.accepted = None                     # (k, V), of the last round's accepted nodes
        self.following = None                    # the committed tokens after them

    def begin(self, view):
        """A round starts.  The committed tokens follow the last round's accepted nodes."""
        self.drafter.begin(view)
        self.logits = []
        self.following = view.tokens[1:]

    def expand(self, tokens, parents):
        """As the drafter's.  The first call of a round brings the root, the target's own token."""
        if self.accepted is not None:
            root = tokens[:1].to(self.following.device)
            following = torch.cat((self.following, root))
            self.fit(self.accepted, following[:len(self.accepted)])
            self.accepted = None
        logits = self.drafter.expand(tokens, parents)
        self.logits.append(logits)
        return logits

    def keep(self, path):
        """These nodes were accepted: the target's token after each is known when a round begins."""
        self.drafter.keep(path)
        self.accepted = torch.cat(self.logits)[path] if path else None

    def fit(self, logits, following):
        """One step of Newton's method.  logits (k, V); following (k,): the target's tokens."""
        following = following.to(logits.device)
        z = logits.float() / self.temperature                                    # (k, V)
        p = z.softmax(-1)
        c, best = p.max(-1)                                                      # (k,)
        y = (best == following).float()
        # d c / d log T = c (E_z - z_max); a token of probability zero adds nothing
        expected = (p * z.masked_fill(p == 0, 0.0)).sum(-1)
        highest = z.gather(-1, best[:, None])[:, 0]
        slope = c * (expected - highest)
        variance = (c * (1 - c)).clamp(min=1e-4)
        gradient = slope * (y - c) / variance
        information = slope * slope / variance
        # A row of -inf is no prediction: it tells nothing.
        self.information = self.information + information.nan_to_num(0.0).sum()
        step = gradient.nan_to_num(0.0).sum() / self.information
        self.temperature = (self.temperature * step.exp()).clamp(COLDEST, HOTTEST)


# ---------------------------------------------------------------- demo
def main():
    """A drafter that says .95 and is right half the time: c comes down to what it is worth."""
    from types import SimpleNamespace
    row = torch.tensor([[3.0, 0.0]])
    drafter = SimpleNamespace(needs={}, reset=list, begin=id, keep=id,
                              expand=lambda tokens, parents: row)
    both = Running(drafter)
    for number in range(400):
        both.begin(SimpleNamespace(tokens=torch.tensor([0])))
        # The target's own tokens, each the next round's root: 0 1 0 1 ...
        both.expand(torch.tensor([number % 2]), [-1])
        both.keep([0])
    c = (row / both.temperature).softmax(-1).max().item()
    assert math.isclose(c, 0.73, abs_tol=0.03), c     # HOTTEST holds it there
    print(f"confidence .95 became {c:.2f} at temperature {both.temperature:.2f}")


if __name__ == "__main__":
    main()
