"""A page on which one watches a decoding round by round: one HTML file with all that it needs.

    python figures/rounds.py --drafter glide edd --tree cape pct --out rounds.html
    python figures/rounds.py --drafter "cascade(base, small, maxgram)" --tree chain --prompt 3

Every drafter with every tree decodes one prompt: GLIDE with a CAPE (arXiv 2402.02082), section 4.2; EDD and PCT
(ACL 2025), section 3.2.  The page is rounds.html beside this file, with one placeholder for the JSON:

    arms[].rounds[]      of the nodes: tokens, texts, parents (-1: the root), p; how many are verified
      p                  the drafter's probability of the node after its parent, as the tree's builder saw it;
                         null where nobody said one (the root, a cascade's chain)
      path               the root and the accepted nodes
      own, choice        the target's own token where the path ended, and its text; null where the output ended
      ms                 milliseconds of the round: draft, verify, other (the shares of bench.py's table)

Nodes behind the verified ones were continued by the drafter and left out by the builder (EAGLE-2's re-ranking,
PCT's leaves).  The clock stands still while a round is noted down.  The other flags are bench.py's.
"""
import json
import os
import shlex
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from pictures import add_probabilities, speller  # noqa: E402

import bench  # noqa: E402
import train  # noqa: E402
import verify  # noqa: E402

TEMPLATE = Path(__file__).with_suffix(".html")
PLACEHOLDER = "@DATA@"                     # in the template: where the JSON goes


# ---------------------------------------------------------------- one decoding, noted down
class Listener:
    """The loop's expand as a builder sees it, and a note of every call and its answer."""

    def __init__(self, expand):
        self.expand, self.calls = expand, []    # (tokens (m,), parents [m], probabilities (m, V)) of each call

    def __call__(self, tokens, parents):
        rows = self.expand(tokens, parents)
        self.calls.append((tokens, parents, rows))
        return rows

    def __getattr__(self, name):
        """What else builders ask of expand: its generator, and of a cascade's its drafter."""
        return getattr(self.expand, name)


class Notes:
    """A builder like `build` that notes each round; `tell` is for the loop to call as the output grows."""

    def __init__(self, build):
        self.build, self.tree = build, None     # the tree of the round in hand
        self.before = Counter()                 # bench.Record's totals at the end of the round before
        self.rounds = []
        self.said = []                          # (new tokens, how many of them were drafted), the prefill's first

    def __call__(self, expand, root):
        self.out = expand.out
        self.listener = Listener(expand)
        self.tree = self.build(self.listener, root)
        return self.tree

    def tell(self, new, drafted):
        self.said.append((new, drafted))
        if self.tree is None:
            return                              # the prefill's token
        # The round ends here; what follows is ours, and the clock does not see it.
        out = self.out
        out.mark("other")
        out.settle()
        nodes = nodes_of(self.tree, self.listener.calls)
        child, nodes["path"] = verify.children(nodes["tokens"], nodes["parents"]), [0]
        for token in new[:drafted]:             # down the tree, along what was accepted
            nodes["path"].append(child[nodes["path"][-1], token])
        nodes["own"] = next(iter(new[drafted:]), None)
        nodes["ms"] = {key: 1e3 * (out.total[key] - self.before[key]) for key in bench.SHARES}
        self.rounds.append(nodes)
        self.before = Counter(out.total)
        out.marks = []
        out.mark("")


def nodes_of(tree, calls):
    """A round's nodes, the verified ones first -> {"tokens", "parents", "p", "verified"}, lists."""
    tree = verify.without_absent(tree)
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    nodes = {"tokens": tokens, "parents": parents, "p": [], "verified": len(tokens)}
    if not calls:
        # A cascade wrote the chain by itself: it says p_draft where it drew its tokens.
        rows = [] if tree.p_draft is None else tree.p_draft
        p = [row[token].item() for row, token in zip(rows, tokens[1:])]
        nodes["p"] = [None] + (p or [None] * (len(tokens) - 1))
        return nodes
    asked, rows = {}, []                        # (parent's number, token) -> number; of each number its row
    for new, above, found in calls:
        for token, parent, row in zip(new.tolist(), above, found):
            asked[parent, token] = len(rows)
            rows.append(row)
    add_left_out(nodes, asked, rows)
    add_probabilities(nodes, asked, rows)
    return nodes


def add_left_out(nodes, asked, rows):
    """Append the nodes that the drafter continued, but that the verified tree does not hold."""
    tokens, parents = nodes["tokens"], nodes["parents"]
    child = verify.children(tokens, parents)
    place = {-1: -1}                            # number in the order of expand -> node
    for (above, token), number in asked.items():
        if above not in place:
            continue                            # below an absent node
        node = child.get((place[above], token))
        if node is None:
            # What a builder which reads nothing back asks behind a token of probability zero means nothing.
            if above < 0 or not rows[above][token] > 0:
                continue
            node = len(tokens)
            tokens.append(token)
            parents.append(place[above])
        place[number] = node


# ---------------------------------------------------------------- what the page is told
def namer(tokenizer):
    """-> name(token), its text as it stands behind another: some tokenizers drop the space of a first one."""
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    before = tokenizer.decode(anchor)

    def name(token):
        both = tokenizer.decode([*anchor, token])
        if not both.startswith(before):
            return tokenizer.decode([token])
        return both[len(before):]
    return name


def timed(out):
    """A Record whose seconds are those of its own marks, the prefill included."""
    out.seconds = sum(out.total[key] for key in ("prefill", *bench.SHARES))
    return out


def arm_data(run, arm, ids, limit, plain):
    """Decode the prompt with one arm.  plain: plain decoding's Record."""
    notes = Notes(arm.build)
    out = timed(run.decode(run.drafters[arm.drafter], notes, ids, limit, tell=notes.tell))
    # The text goes on behind the prompt; half characters wait for their other half.
    name, spell = namer(run.tokenizer), speller(run.tokenizer)
    if not run.target.encoder_decoder:
        spell(ids)
    data = {
        "name": f"{arm.drafter} × {arm.tree}", "tokens": len(out.tokens), "tau": out.tau,
        "speed": out.speed(), "speedup": out.speed() / plain.speed(), "prefill_ms": 1e3 * out.total["prefill"],
        "drawn": out.total["drawn"] > 0, "leaves": leaves(out.tokens, plain.tokens),
        "first": spell(notes.said[0][0]), "rounds": notes.rounds,
    }
    for nodes, (new, drafted) in zip(notes.rounds, notes.said[1:]):
        nodes["texts"] = [name(token) for token in nodes["tokens"]]
        nodes["choice"] = None if nodes["own"] is None else name(nodes["own"])
        nodes["accepted"] = spell(new[:drafted])
        nodes["bonus"] = spell(new[drafted:])
    return data


def leaves(ours, plain):
    """The first token, counted from 1, at which one output is another than plain decoding's; None: nowhere."""
    if ours == plain:
        return None
    same = [x == y for x, y in zip(ours, plain)]
    return [*same, False].index(False) + 1


def page_data(run, number):
    """Decode prompt `number`, from 1, with every arm -> what the page is told."""
    if not 1 <= number <= len(run.prompts):
        raise bench.UserError(f"--prompt is {number}: there are {len(run.prompts)} prompts, counted from 1")
    group, ids, limit = run.prompts[number - 1]
    arms = [arm for arm in bench.arms_of(run) if arm.build or arm.drafter.startswith("plain")]
    for arm in arms:                            # warm-up, as bench.py's
        arm.decode(ids, min(16, limit))

    # Plain decoding by the faster of its ways, as in bench.py's table
    plain = [timed(arm.decode(ids, limit)) for arm in arms if not arm.build]
    base = max(plain, key=bench.Record.speed)
    step = bench.ratio(1e3 * (base.seconds - base.total["prefill"]), len(base.runs))

    return {
        **{key: getattr(run.a, key) for key in ("target", "dtype", "device", "temperature", "seed")},
        "gpu": torch.cuda.get_device_name() if run.cuda else None, "threads": torch.get_num_threads(),
        "prompt_number": number, "prompts": len(run.prompts), "group": group, "limit": limit,
        "prompt": run.tokenizer.decode(ids, skip_special_tokens=True), "encoder": run.target.encoder_decoder,
        "notes": run.notes, "plain": {"tokens": len(base.tokens), "speed": base.speed(), "step_ms": step},
        "arms": [arm_data(run, arm, ids, limit, base) for arm in arms if arm.build],
    }


# ---------------------------------------------------------------- the file
def page(data, template):
    """The template with the data in it.

    A script element ends at the first "</script", wherever it stands, and "<!--" means something in it, too.
    Without a "<" there is neither; \\u003c is the same to a reader of JSON.
    """
    assert template.count(PLACEHOLDER) == 1, "the template has one place for the data"
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return template.replace(PLACEHOLDER, text.replace("<", "\\u003c"))


def flags_of(argv):
    """-> (our flags, bench.py's); a file that cannot be written is refused before anything is decoded."""
    p = train.Parser(description="Write a page that replays a decoding round by round.", allow_abbrev=False,
                     epilog="Other flags are bench.py's: --drafter, --tree, --prompts, --max-new-tokens ...")
    p.add_argument("--out", type=Path, default=Path("rounds.html"), help="the file (default: rounds.html)")
    p.add_argument("--prompt", type=int, default=1, help="which of the prompts, from 1 (default: the first)")
    a, flags = p.parse_known_args(argv)
    if a.out.is_dir():
        raise bench.UserError(f"--out {a.out} is a folder: name a file in it")
    if not (a.out.parent.is_dir() and os.access(a.out.parent, os.W_OK)):
        raise bench.UserError(f"--out {a.out}: there is no folder {a.out.parent} that one can write to: make it")
    return a, flags


def figure(argv):
    argv = sys.argv[1:] if argv is None else argv
    a, flags = flags_of(argv)
    data = page_data(bench.Run(flags), a.prompt)
    data["command"] = "python figures/rounds.py " + shlex.join(argv)
    text = page(data, TEMPLATE.read_text(encoding="utf-8"))
    try:
        train.write_atomically(a.out, lambda part: part.write_text(text, encoding="utf-8"))
    except OSError as why:
        raise bench.UserError(f"--out {a.out} cannot be written ({why.strerror}): name another") from None
    print(f"{a.out} written: prompt {a.prompt}, {len(data['arms'])} arms")
    return 0


def main(argv=None):
    return bench.main(argv, figure, "figures/rounds.py")


if __name__ == "__main__":
    sys.exit(main())
