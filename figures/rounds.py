"""A page on which one watches a decoding round by round: one HTML file with all that it needs.

    python figures/rounds.py --drafter glide edd --tree cape pct --out rounds.html
    python figures/rounds.py --drafter "cascade(base, small, maxgram)" --tree chain --prompt 3

Every drafter with every tree decodes one prompt: GLIDE with a CAPE (arXiv 2402.02082), section 4.2; EDD and
PCT (ACL 2025), section 3.2.  The page is rounds.html beside this file, with one placeholder for the JSON:

    arms[].rounds[]      of the nodes: tokens, texts, parents (-1: the root), p; how many are verified
      p                  the drafter's probability of the node after its parent, as the tree's builder saw it;
                         null where there is none (the root, a cascade's chain, Max-Gram's)
      path, gram         the root and the accepted nodes; those that Max-Gram predicts after their parents
      own, choice        the target's own token where the path ended, and its text; null where the text ended
      accepted, bonus    what the round adds to the text
      ms                 milliseconds of the round: draft, verify, other (the shares of bench.py's table)

Nodes after the verified ones were continued by the drafter and left out by the builder (EAGLE-2's
re-ranking, PCT's leaves).  pictures.py draws from docs/rounds.html.  Other flags are bench.py's.
"""
import json
import shlex
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import bench  # noqa: E402
import verify  # noqa: E402
from runtime import text as read  # noqa: E402
from runtime import measure as clock, load  # noqa: E402
from verify import UserError  # noqa: E402

TEMPLATE = Path(__file__).with_suffix(".html")
PLACEHOLDER = "@DATA@"                     # in the template: where the JSON goes

# ---------------------------------------------------------------- one decoding, noted down
class Listener:
    """The loop's expand as a builder sees it, and a note of every call and its answer."""
    def __init__(self, expand):
        self.expand, self.calls = expand, []   # (tokens (m,), parents [m], probabilities (m, V)) of each call

    def __call__(self, tokens, parents):
        rows = self.expand(tokens, parents)
        self.calls.append((tokens, parents, rows))
        return rows

    def __getattr__(self, name):
        """What else builders ask of expand: its generator, remaining, root, and a cascade's drafter."""
        return getattr(self.expand, name)

def listening(build, noted):
    """A builder like `build` that appends (its tree, the calls of expand) to `noted`, round by round."""
    def listened(expand, root):
        listener = Listener(expand)
        tree = build(listener, root)
        noted.append((tree, listener.calls))
        return tree
    return listened

def nodes_of(tree, calls, predicted=None):
    """A round's nodes, the verified ones first -> lists.

    predicted: Max-Gram's token after each of the nodes given to expand, or None.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    nodes = {"tokens": tokens, "parents": parents, "p": [None], "gram": [], "verified": len(tokens)}
    if not calls:
        # A cascade wrote the chain by itself; there is p_draft where its tokens were sampled.
        drafted = tokens[1:]
        rows = [None] * len(drafted) if tree.p_draft is None else tree.p_draft
        nodes["p"] += [None if row is None else row[token].item() for row, token in zip(rows, drafted)]
        nodes["gram"] = [] if predicted is None else list(range(1, len(tokens)))
        return nodes
    # {(expand_index of the parent, token): expand_index}; the probabilities after each of these nodes
    expand_index, rows = {}, []
    for new, above, found in calls:
        for token, parent, row in zip(new.tolist(), above, found):
            expand_index[parent, token] = len(rows)
            rows.append(row)
    add_left_out(nodes, expand_index, rows)
    index = [0]                                # of each node its expand_index, or None
    for node, (token, parent) in enumerate(zip(tokens[1:], parents[1:]), 1):
        above = index[parent]
        nodes["p"].append(None if above is None else rows[above][token].item())
        index.append(expand_index.get((above, token)))
        if above is None or predicted and predicted[above] == token:
            nodes["gram"].append(node)
    return nodes

def add_left_out(nodes, expand_index, rows):
    """Append the nodes that the drafter continued, but that the verified tree does not hold."""
    tokens, parents = nodes["tokens"], nodes["parents"]
    child = verify.children(tokens, parents)
    node_of = {-1: -1}                         # expand_index -> node
    for (above, token), index in expand_index.items():
        if above not in node_of:
            continue
        node = child.get((node_of[above], token))
        if node is None:
            # A builder may continue padding, a token of probability zero.
            if above < 0 or not rows[above][token] > 0:
                continue
            node = len(tokens)
            tokens.append(token)
            parents.append(node_of[above])
        node_of[index] = node

def milliseconds(parts):
    """Record.parts -> {"draft", "verify", "other"} of each round: what follows a forward ends its round."""
    rounds, spent, verified = [], dict.fromkeys(clock.SHARES, 0.0), False
    for what, seconds in parts:
        if what in spent:
            spent[what] += 1e3 * seconds
        if verified:
            rounds.append(spent)
            spent = dict.fromkeys(clock.SHARES, 0.0)
        verified = what == "verify"
    return rounds

# ---------------------------------------------------------------- texts
def speller(tokenizer):
    """-> spell(tokens) -> the text that they add; incomplete UTF-8 is held back."""
    made, said = [], ""

    def spell(tokens):
        nonlocal said
        made.extend(tokens)
        text = tokenizer.decode(made, skip_special_tokens=True).rstrip("\ufffd")
        new, said = text[len(said):], text
        return new
    return spell

def namer(tokenizer):
    """-> name(token), its text after another token: some tokenizers drop the space of a first one."""
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    before = tokenizer.decode(anchor)

    def name(token):
        both = tokenizer.decode([*anchor, token])
        if not both.startswith(before):
            return tokenizer.decode([token])
        return both[len(before):]
    return name

# ---------------------------------------------------------------- what the page is told
def timed(out):
    """A Record with the seconds of its own clock, the prefill's included."""
    out.seconds = sum(seconds for _, seconds in out.parts)
    return out

def rounds_of(run, out, noted, predicted, ids):
    """A Record, what `listening` noted, Max-Gram's tokens -> (text of the prefill's token, rounds)."""
    name, spell = namer(run.tokenizer), speller(run.tokenizer)
    # The text continues the prompt.
    if not run.target.encoder_decoder:
        spell(ids)
    first, rounds = spell(out.tokens[:1]), []
    spent = milliseconds(out.parts)
    for one, (tree, calls), its, ms in zip(out.rounds, noted, predicted, spent):
        nodes = nodes_of(tree, calls, its)
        nodes["p"] = [p if p is None else round(p, 4) for p in nodes["p"]]
        accepted = min(len(one.path) - 1, len(one.new))
        nodes["path"] = one.path[:1 + accepted]
        nodes["own"] = next(iter(one.new[accepted:]), None)
        nodes["texts"] = [name(token) for token in nodes["tokens"]]
        nodes["choice"] = None if nodes["own"] is None else name(nodes["own"])
        nodes["accepted"] = spell(one.new[:accepted])
        nodes["bonus"] = spell(one.new[accepted:])
        nodes["ms"] = ms
        rounds.append(nodes)
    return first, rounds

def leaves(ours, plain):
    """The first token, from 1, at which one output is another than plain decoding's; None: nowhere."""
    same = [x == y for x, y in zip(ours, plain)]
    return None if ours == plain else [*same, False].index(False) + 1

def arm_data(run, arm, ids, limit, plain):
    """Decode the prompt with one arm.  plain: plain decoding's Record."""
    noted, predicted, drafter = [], [], run.drafters[arm.drafter]

    def build(expand, root):
        tree = arm.build(expand, root)
        predicted.append(getattr(drafter, "predicted", None))
        return tree
    out = timed(run.decode(drafter, listening(build, noted), ids, limit))
    first, rounds = rounds_of(run, out, noted, predicted, ids)
    return {
        "name": f"{arm.drafter} × {arm.tree}", "tokens": len(out.tokens), "tau": out.tau,
        "speed": out.speed(), "speedup": out.speed() / plain.speed(),
        "prefill_ms": 1e3 * out.total["prefill"], "drawn": out.total["drawn"] > 0,
        "leaves": leaves(out.tokens, plain.tokens), "first": first, "rounds": rounds,
    }

def page_data(run, number):
    """Decode prompt `number`, from 1, with every arm -> what the page is told."""
    if not 1 <= number <= len(run.prompts):
        raise UserError(f"--prompt is {number}: there are {len(run.prompts)} prompts, counted from 1")
    group, ids, limit = run.prompts[number - 1]
    arms = [arm for arm in bench.arms_of(run) if arm.build or arm.plain]
    for arm in arms:                           # warm-up, as bench.py's
        arm.decode(ids, min(16, limit))
    # Plain decoding by the faster of its ways, as in bench.py's table
    plain = [timed(arm.decode(ids, limit)) for arm in arms if arm.plain]
    base = max(plain, key=clock.Record.speed)
    step = clock.ratio(1e3 * (base.seconds - base.total["prefill"]), len(base.rounds))
    gpu = torch.cuda.get_device_name() if run.cuda else None
    return {
        **{key: getattr(run.a, key) for key in ("target", "dtype", "device", "temperature", "seed")},
        "gpu": gpu, "threads": torch.get_num_threads(), "prompt_number": number, "prompts": len(run.prompts),
        "group": group, "limit": limit, "prompt": run.tokenizer.decode(ids, skip_special_tokens=True),
        "encoder": run.target.encoder_decoder, "notes": run.notes,
        "plain": {"tokens": len(base.tokens), "speed": base.speed(), "step_ms": step},
        "arms": [arm_data(run, arm, ids, limit, base) for arm in arms if arm.build],
    }

# ---------------------------------------------------------------- the file
def page(data, template):
    """The template with the data in it; without a "<" no text ends its script element (\\u003c is JSON's)."""
    assert template.count(PLACEHOLDER) == 1, "the template has one place for the data"
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return template.replace(PLACEHOLDER, text.replace("<", "\\u003c"))

def work(argv):
    argv = sys.argv[1:] if argv is None else argv
    p = read.Parser(description="Write a page that replays a decoding round by round.", allow_abbrev=False,
                    epilog="Other flags are bench.py's: --drafter, --tree, --prompts, --max-new-tokens ...")
    p.add_argument("--out", type=Path, default=Path("rounds.html"), help="the file (default: rounds.html)")
    p.add_argument("--prompt", type=int, default=1, help="which of the prompts, from 1 (default: 1)")
    a, flags = p.parse_known_args(argv)
    # A file that cannot be written is refused before anything is decoded.
    load.check_writable("--out", a.out)
    data = page_data(bench.Run(flags), a.prompt)
    data["command"] = "python figures/rounds.py " + shlex.join(argv)
    text = page(data, TEMPLATE.read_text(encoding="utf-8"))
    read.write_atomically(a.out, lambda part: part.write_text(text, encoding="utf-8"))
    print(f"{a.out} written: prompt {a.prompt}, {len(data['arms'])} arms")
    return 0

main = partial(bench.main, work=work, name="figures/rounds.py")

if __name__ == "__main__":
    sys.exit(main())
