"""A page on which one watches a decoding round by round: one HTML file with all that it needs.

    python figures/rounds.py --drafter glide edd --tree cape pct --out rounds.html
    python figures/rounds.py --drafter "cascade(base, small, maxgram)" --tree chain --prompt 3

Every drafter with every tree decodes one prompt: GLIDE with a CAPE (arXiv 2402.02082), section 4.2;
EDD and PCT (ACL 2025), section 3.2.  The page is docs/rounds.html with other data, a JSON object in
its script element "data":

    arms[].rounds[]      of the nodes: tokens, texts, parents (-1: the root), p
      p                  the drafter's probability of the node after its parent, as the builder saw
                         it; null where there is none (the root, a cascade's chain, Max-Gram's)
      path               the root and the accepted nodes
      own, choice        the target's own token where the path ended, and its text; null where the
                         text ended
      accepted, bonus    the text of the accepted nodes, and of the target's own token
      ms                 milliseconds of the round: draft, verify, other

Other flags are bench.py's.
"""
import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import bench  # noqa: E402
import verify  # noqa: E402
from runtime import text  # noqa: E402
from verify import UserError  # noqa: E402

PAGE = ROOT / "docs" / "rounds.html"       # a page of one decoding, and the template of all others
# The page before the data, the data, the page after it
DATA = re.compile(r'(.*<script [^>]*id="data">)(.*?)(</script>.*)', re.S)
PARTS = {"begin": "draft", "draft": "draft", "verify": "verify", "other": "other"}

# ---------------------------------------------------------------- one decoding, noted down
class Listener:
    """The loop's expand, with a note of what the drafter said.

    rows     {path: its probabilities (V,) after a node}; a path: the tokens from the root to it
    """
    def __init__(self, expand):
        self.expand = expand
        self.paths, self.rows = [], {}

    def __call__(self, tokens, parents):
        probs = self.expand(tokens, parents)
        for token, parent, row in zip(tokens.tolist(), parents, probs):
            above = self.paths[parent] if parent >= 0 else ()
            path = (*above, token)
            self.paths.append(path)
            self.rows[path] = row
        return probs

    def __getattr__(self, name):
        """What else builders ask of expand: its generator, remaining, root, drafter."""
        return getattr(self.expand, name)

def listening(build, noted):
    """A builder like `build` that appends (its tree, the Listener's rows) to `noted`."""
    def listened(expand, root):
        listener = Listener(expand)
        tree = build(listener, root)
        noted.append((tree, listener.rows))
        return tree
    return listened

def nodes_of(tree, rows):
    """The nodes of a round -> lists.  rows: see Listener."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    paths, p = [(tokens[0],)], [None]
    for node in range(1, len(tokens)):
        above, token = paths[parents[node]], tokens[node]
        paths.append((*above, token))
        chance = None
        if above in rows:
            chance = rows[above][token].item()
        elif tree.p_draft is not None:
            chance = tree.p_draft[node - 1][token].item()      # a sampled chain of a cascade's own
        p.append(chance)
    return {"tokens": tokens, "parents": parents, "p": p}

def milliseconds(parts):
    """Record.parts -> {"draft", "verify", "other"} of each round.

    What follows a verification, the acceptance, ends its round.
    """
    rounds = []
    spent = {"draft": 0.0, "verify": 0.0, "other": 0.0}
    verified = False
    for what, seconds in parts:
        if what in PARTS:
            spent[PARTS[what]] += 1e3 * seconds
        if verified:
            rounds.append(spent)
            spent = dict.fromkeys(spent, 0.0)
        verified = what == "verify"
    return rounds

# ---------------------------------------------------------------- texts
class Speller:
    """Spells a sequence: each call returns the text that further tokens add to it."""
    def __init__(self, tokenizer):
        self.tokenizer, self.tokens, self.text = tokenizer, [], ""

    def __call__(self, tokens):
        self.tokens += tokens
        before = self.text
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        self.text = text.rstrip("\ufffd")                    # incomplete UTF-8 is held back
        return self.text[len(before):]

def namer(tokenizer):
    """-> name(token), its text after another token: some tokenizers drop a first space."""
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    before = tokenizer.decode(anchor)

    def name(token):
        both = tokenizer.decode([*anchor, token])
        if not both.startswith(before):
            return tokenizer.decode([token])
        return both[len(before):]
    return name

# ---------------------------------------------------------------- what the page is told
def rounds_of(run, out, noted, ids):
    """A Record, what `listening` noted, the prompt -> (text of the first token, rounds)"""
    name, spell = namer(run.tokenizer), Speller(run.tokenizer)
    # The text continues the prompt.
    if not run.target.encoder_decoder:
        spell(ids)
    first = spell(out.tokens[:1])
    rounds = []
    for one, note, ms in zip(out.rounds, noted, milliseconds(out.parts)):
        nodes = nodes_of(*note)
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
    """The first token, from 1, that is not plain decoding's; None where all are."""
    same = [x == y for x, y in zip(ours, plain)]
    return None if ours == plain else [*same, False].index(False) + 1

def decoded(run, number, drafter, build):
    """Decode prompt `number`, from 0 -> a Record with its seconds, after a warm-up as bench.py's"""
    _, ids, limit = run.prompts[number]
    run.decode(drafter, build, ids, min(bench.WARM_UP, limit), number)
    out = run.decode(drafter, build, ids, limit, number)
    out.seconds = sum(seconds for _, seconds in out.parts)
    return out

def arm_data(run, number, label, tree, plain):
    """Decode a prompt with one drafter and tree.  plain: plain decoding's Record."""
    noted = []
    build = listening(bench.builder(run, label, tree), noted)
    out = decoded(run, number, run.drafters[label], build)
    # The warm-up was noted, too.
    _, ids, _ = run.prompts[number]
    first, rounds = rounds_of(run, out, noted[-len(out.rounds):], ids)
    total = out.total
    return {
        "name": f"{label} × {tree.label}",
        "tokens": len(out.tokens),
        "tau": total["new"] / max(1, total["rounds"]),
        "speed": out.speed(),
        "speedup": out.speed() / plain.speed(),
        "prefill_ms": 1e3 * total["prefill"],
        "drawn": total["drawn"] > 0,
        "leaves": leaves(out.tokens, plain.tokens),
        "first": first,
        "rounds": rounds}

def page_data(run, number):
    """Decode prompt `number`, from 1, with every drafter and tree -> what the page is told."""
    if not 1 <= number <= len(run.prompts):
        raise UserError(f"--prompt is {number}: there are prompts 1 to {len(run.prompts)}")
    group, ids, limit = run.prompts[number - 1]
    plain = decoded(run, number - 1, None, verify.root_only)
    steps = max(1, len(plain.rounds))
    settings = ("target", "dtype", "device", "temperature", "seed")
    data = {key: getattr(run.a, key) for key in settings}
    data |= {
        "gpu": torch.cuda.get_device_name() if run.cuda else None,
        "threads": torch.get_num_threads(),
        "prompt_number": number,
        "prompts": len(run.prompts),
        "group": group,
        "limit": limit,
        "prompt": run.tokenizer.decode(ids, skip_special_tokens=True),
        "encoder": run.target.encoder_decoder,
        "notes": run.notes,
        "plain": {
            "tokens": len(plain.tokens),
            "speed": plain.speed(),
            "step_ms": 1e3 * (plain.seconds - plain.total["prefill"]) / steps}}
    data["arms"] = []
    for label in run.drafters:
        for tree in run.trees:
            data["arms"].append(arm_data(run, number - 1, label, tree, plain))
    return data

# ---------------------------------------------------------------- the file
def with_data(page, data):
    """The page with other data.  Without a "<" no text can end its script element."""
    before, _, after = DATA.fullmatch(page).groups()
    content = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return before + content.replace("<", "\\u003c") + after

def work(argv):
    argv = sys.argv[1:] if argv is None else argv
    p = text.Parser(description="Write a page that replays a decoding round by round.",
                    epilog="Other flags are bench.py's: --drafter, --tree, --prompts ...",
                    allow_abbrev=False)
    flag = p.add_argument
    flag("--out", type=Path, default=Path("rounds.html"), help="the file (default: rounds.html)")
    flag("--prompt", type=int, default=1, help="which of the prompts, from 1 (default: 1)")
    a, flags = p.parse_known_args(argv)
    template = PAGE.read_text(encoding="utf-8")
    # A file that cannot be written raises an OSError now, before anything is decoded.
    a.out.open("a").close()
    data = page_data(bench.Run(flags), a.prompt)
    data["command"] = "python figures/rounds.py " + shlex.join(argv)
    a.out.write_text(with_data(template, data), encoding="utf-8")
    print(f"{a.out} written: prompt {a.prompt}, {len(data['arms'])} arms")
    return 0

main = partial(bench.main, work=work, name="figures/rounds.py")

if __name__ == "__main__":
    sys.exit(main())
