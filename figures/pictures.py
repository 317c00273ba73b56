"""The README's pictures of a continuation and of a round, as SVG, from what was decoded.

    python figures/pictures.py continuation --drafter glide --tree cape    # decode, write its JSON, draw
    python figures/pictures.py round --drafter glide --tree cape           # decode, write its JSON, draw
    python figures/pictures.py draw                                        # draw both from their JSON

    picture           | its JSON: docs/results/continuation.json, round.json
    continuation.svg  | round by round what was drafted and accepted, and the target's own tokens
    round.svg         | the four steps of a round, and a real tree with the path that was accepted

Each picture brings its own card, fonts by their generic names and both colour schemes, so that it reads on a
white and on a dark page; text in columns has its width set, so that it fits whatever font a machine has.  No
library but the standard one draws; decoding takes bench.py, and any of its flags.  The bar chart: results.py.
"""
import argparse
import functools
import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
WIDTH, MARGIN = 880, 24                    # of every picture, in px

FONT = 'system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif'
MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'
STYLE = f"text {{ font: 13px {FONT} }} .mono {{ font-family: {MONO}; white-space: pre }}" + """
.small { font-size: 11px } .bold { font-weight: 600 }
.end { text-anchor: end } .middle { text-anchor: middle }
.line, .grid, .edge, .ink-line, .yes-line, .own-line { fill: none }
.ink-line { stroke-width: 1.5 } .yes-line, .own-line { stroke-width: 2.5 }
"""
# what it colours: (on a white page, on a dark one)
COLOURS = {
    "text": ("fill: #1f2328", "fill: #e6edf3"),
    ".dim": ("fill: #656d76", "fill: #8d96a0"),
    ".link": ("fill: #0969da", "fill: #58a6ff"),
    ".card": ("fill: #ffffff; stroke: #d0d7de", "fill: #0d1117; stroke: #30363d"),
    ".box": ("fill: #f6f8fa; stroke: #d0d7de", "fill: #161b22; stroke: #3d444d"),
    ".line": ("stroke: #8c959f", "stroke: #6e7681"),
    ".grid": ("stroke: #d8dee4", "stroke: #262c34"),
    ".edge": ("stroke: #c4ccd4", "stroke: #444c56"),
    ".ink-line": ("stroke: #1f2328", "stroke: #e6edf3"),
    ".seen": ("fill: #8c959f", "fill: #6e7681"),
    ".yes": ("fill: #116329", "fill: #aff5b4"),
    ".yes-box": ("fill: #c9f2d0; stroke: #4ac26b", "fill: #12432a; stroke: #2ea043"),
    ".yes-line": ("stroke: #2da44e", "stroke: #3fb950"),
    ".yes-cell": ("fill: #2da44e", "fill: #3fb950"),
    ".own": ("fill: #0a3069", "fill: #a5d6ff"),
    ".own-box": ("fill: #ddf4ff; stroke: #54aeff", "fill: #0c2d5c; stroke: #388bfd"),
    ".own-line": ("stroke: #0969da", "stroke: #58a6ff"),
    ".bar-GLIDE": ("fill: #4ac26b", "fill: #2ea043"),
    ".bar-EDD": ("fill: #54aeff", "fill: #388bfd"),
    ".bar-Cascade": ("fill: #e0983b", "fill: #b76e1b"),
    ".bar-transformers": ("fill: #afb8c1", "fill: #6e7681"),
}


# XML has no place for control characters, not even escaped.
CONTROL = {code: "\ufffd" for code in range(32) if chr(code) not in "\t\n"}


# ---------------------------------------------------------------- SVG by hand
def label(x, y, string, classes="", width=None):
    """A line of text at its baseline; with a width, it is set to exactly that."""
    fixed = ""
    if width is not None:
        fixed = f' textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs"'
    where = f'x="{x:.1f}" y="{y:.1f}"{fixed} xml:space="preserve"'
    return f'<text {where} class="{classes}">{escape(string.translate(CONTROL))}</text>'


def rectangle(x, y, width, height, classes, radius=4):
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" '
            f'class="{classes}"/>')


def stroke(points, classes):
    return f'<path d="{points}" class="{classes}"/>'


def style():
    """The style sheet: the light scheme, and the dark one where the reader's machine asks for it."""
    light = [f"{what} {{ {colour} }}" for what, (colour, _) in COLOURS.items()]
    dark = [f"{what} {{ {colour} }}" for what, (_, colour) in COLOURS.items()]
    return STYLE + "\n".join([*light, "@media (prefers-color-scheme: dark) {", *dark, "}"])


def legend(x, y, items, size="small", letter=6.6):
    """A row of swatches, boxes or words in their style, with their meaning.  letter: px a letter."""
    body = []
    for swatch, meaning in items:
        if "box" in swatch or "bar" in swatch:
            body.append(rectangle(x, y - 11, 20, 14, swatch))
            x += 26
        else:
            body.append(label(x, y, "abc", swatch, 3 * CELL))
            x += 3 * CELL + 6
        body.append(label(x, y, meaning, size))
        x += letter * len(meaning) + 18
    return body


def picture(height, title, body):
    """The whole file: card, style, the elements of the body."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label={quoteattr(title)}>',
        f"<title>{escape(title)}</title>",
        f"<style>{style()}</style>",
        rectangle(0.5, 0.5, WIDTH - 1, height - 1, "card", radius=8),
        *body,
        "</svg>",
    ]) + "\n"


# ---------------------------------------------------------------- a continuation, its accepted runs in colour
CELL, LINE = 8.4, 22                        # width of a column, height of a line, in px
COLUMNS = int((WIDTH - 2 * MARGIN) / CELL)


def wrap(pieces, columns):
    """[(kind, text)] -> lines, lists of (character, number of its piece); broken at spaces where possible."""
    lines, line = [], []
    for number, (_, text) in enumerate(pieces):
        for character in text.expandtabs(4):
            line.append((character, number))
            if character == "\n":
                lines.append(line)
                line = []
            elif len(line) > columns:
                spaces = [at for at, (c, _) in enumerate(line) if c == " " and at > columns // 2]
                cut = spaces[-1] + 1 if spaces else columns
                lines.append(line[:cut])
                line = line[cut:]
    return lines + [line]


def runs_of(line):
    """A line -> [(number of the piece, first column, text)] of its pieces."""
    runs = []
    for at, (character, number) in enumerate(line):
        if not runs or runs[-1][0] != number:
            runs.append([number, at, ""])
        runs[-1][2] += character
    return runs


def set_line(line, pieces, y):
    """The elements of one line of a continuation: a box behind each accepted run, then its text."""
    body = []
    for number, first, text in runs_of(line):
        kind = pieces[number][0]
        x = MARGIN + first * CELL
        text = text.replace("\n", "" if kind == "prompt" else "↵")
        if kind == "drafted" and text:
            body.append(rectangle(x + 0.5, y - 15, len(text) * CELL - 1, 20, "yes-box"))
        # spaces at the ends are left to the box: browsers differ in how they measure them
        shown = text.strip(" ")
        x += (len(text) - len(text.lstrip(" "))) * CELL
        style = {"prompt": "mono dim", "drafted": "mono yes", "own": "mono bold"}[kind]
        if shown:
            body.append(label(x, y, shown, style, len(shown) * CELL))
    return body


def end_of(prompt, most=3):
    """The last lines of a prompt."""
    lines = wrap([("prompt", prompt)], COLUMNS)
    shown = "".join(character for line in lines[-most:] for character, _ in line)
    if len(lines) > most:
        shown = "…" + shown.removeprefix(" ")                # an indented line stays where it is
    return shown


def continuation(record):
    """The record of `record_continuation` -> SVG."""
    pieces = [("prompt", end_of(record["prompt"]))]
    for each in record["rounds"]:
        pieces += [("drafted", each["drafted"]), ("own", each["own"])]
    rounds = len(record["rounds"]) - 1                       # the first is the prefill, which drafts nothing
    tokens = sum(each["tokens"] for each in record["rounds"][1:])

    y = 34
    meanings = [
        ("yes-box", f"drafted by {record['drafter']} × {record['tree']} and accepted"),
        ("mono bold", "the target's own token"),
        ("mono dim", "the prompt"),
    ]
    body = [
        *legend(MARGIN, y, meanings, size="", letter=7.1),
        label(WIDTH - MARGIN, y, f"{tokens} tokens in {rounds} rounds", "bold end"),
        stroke(f"M{MARGIN} {y + 16}H{WIDTH - MARGIN}", "grid"),
    ]
    y += 42
    for line in wrap(pieces, COLUMNS):
        body += set_line(line, pieces, y)
        y += LINE
    title = f"A continuation by {record['drafter']} × {record['tree']}: {tokens} tokens in {rounds} rounds"
    return picture(y + 2, title, body)


# ---------------------------------------------------------------- one round
NODE, PITCH, ROW = 92, 119, 30             # width of a node; from a depth, from a row to the next


def visible(token, most=8):
    """A token's text with its spaces and line ends shown, cut to fit a node."""
    shown = token.replace(" ", "·").replace("\n", "↵").replace("\t", "→")
    if len(shown) > most:
        shown = shown[:most - 1] + "…"
    return shown or "∅"


def steps(record):
    """The boxes of a round: (title, what it does, [(file, function), ...])."""
    return [
        ("draft", "a tree below the root", [record["expand"], record["build"]]),
        ("verify", "all nodes in one forward", [("verify.py", "Target.forward")]),
        ("accept", "a path, and one more token", [("verify.py", "accept")]),
        ("commit", "the path's keys and values", [("verify.py", "Target.commit"), record["keep"]]),
    ]


def flow(record, y):
    """The row of boxes root -> draft -> verify -> accept -> commit, and the way back."""
    width, gap, height = 170, 24, 84
    middle = y + height / 2
    body = [
        rectangle(MARGIN, y, 56, height, "own-box"),
        label(MARGIN + 28, middle + 4, "root", "bold own middle"),
    ]
    x = MARGIN + 56
    for number, (title, what, places) in enumerate(steps(record), 1):
        body.append(stroke(f"M{x + 3} {middle}h{gap - 7}m-5 -4l5 4l-5 4", "line"))
        x += gap
        body += [
            rectangle(x, y, width, height, "box"),
            label(x + 10, y + 20, f"{number}  {title}", "bold"),
            label(x + 10, y + 38, what, "small dim"),
        ]
        for row, (file, function) in enumerate(places):
            name = f"{file} {function}"
            words = label(x + 10, y + 57 + 16 * row, name, "mono small link", 6.2 * len(name))
            body.append(f"<a href={quoteattr('../' + file)}>{words}</a>")
        x += width
    back = y + height
    body.append(stroke(f"M{x - 85} {back + 2}v14H{MARGIN + 28}v-13m-4 5l4 -5l4 5", "line"))
    body.append(label(WIDTH / 2, back + 31, "the target's own token is the next root", "small dim middle"))
    return body


def place(parents):
    """-> column (its depth) and row of every node, and how many nodes each column has."""
    columns, rows, heights = [], [], {}
    for parent in parents:
        column = columns[parent] + 1 if parent >= 0 else 0
        columns.append(column)
        rows.append(heights.get(column, 0))
        heights[column] = rows[-1] + 1
    return columns, rows, heights


def edge(x0, y0, x1, y1, classes):
    """A curve from the right of a node to the left of its child."""
    middle = (x0 + x1) / 2
    bend = f"{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f}"
    return stroke(f"M{x0:.1f} {y0:.1f}C{bend} {x1:.1f} {y1:.1f}", classes)


def node(x, y, token, p, kind):
    """A node's box: its token, and the drafter's probability of it."""
    classes, ink = {"yes": ("yes-box", "yes"), "own": ("own-box", "own"), "no": ("box", "dim")}[kind]
    body = [
        rectangle(x, y - 11, NODE, 22, classes, radius=5),
        label(x + 7, y + 4, visible(token), f"mono small {ink}"),
    ]
    if p is not None:
        shown = f"{p:.2f}".lstrip("0") if p >= 0.005 else "<.01"
        body.append(label(x + NODE - 6, y + 4, shown, f"small {ink} end"))
    return body


def mask(parents, accepted, x, y, side):
    """The tree mask: row i marks the nodes that node i sees, itself and its ancestors."""
    cell = side / len(parents)
    body = [rectangle(x, y, side, side, "box", radius=0)]
    for row in range(len(parents)):
        seen = row
        while seen >= 0:
            kind = "yes-cell" if row in accepted else "seen"
            corner = f"M{x + seen * cell:.2f} {y + row * cell:.2f}"
            body.append(stroke(f"{corner}h{cell:.2f}v{cell:.2f}h-{cell:.2f}z", kind))
            seen = parents[seen]
    return body


def tree(record, top):
    """A measured tree with its root at the height `top` -> (elements, height of the lowest node)."""
    parents, accepted = record["parents"], record["path"]
    columns, rows, heights = place(parents)
    x = [MARGIN + column * PITCH for column in columns]
    y = [top + row * ROW for row in rows]

    # the target's own token hangs from the end of the accepted path, in the first free row of its column
    last = accepted[-1]
    own_x = x[last] + PITCH
    own_y = top + max(heights.get(columns[last] + 1, 0), rows[last]) * ROW

    edges, nodes = [], []
    for child in range(1, len(parents)):
        parent = parents[child]
        ends = x[parent] + NODE, y[parent], x[child], y[child]
        if child in accepted:
            edges.append(edge(*ends, "yes-line"))
        else:
            edges.insert(0, edge(*ends, "edge"))             # under the path
    edges.append(edge(x[last] + NODE, y[last], own_x, own_y, "own-line"))

    for each, token in enumerate(record["tokens"]):
        kind = "yes" if each in accepted else "no"
        if each == 0:
            kind = "own"
        nodes += node(x[each], y[each], token, record["p"][each], kind)
    nodes += node(own_x, own_y, record["own"], None, "own")
    return edges + nodes, max(*y, own_y)


def round_(record):
    """The record of `record_round` -> SVG."""
    nodes, gained = len(record["parents"]) - 1, len(record["path"]) - 1
    said = (f"{record['drafter']} × {record['tree']}, round {record['round']} of a continuation: "
            f"{nodes} nodes verified, {gained} accepted, {gained + 1} new tokens")
    before = visible(record["before"][-96:], 96)
    top, side = 232, 92
    drawn, lowest = tree(record, top)

    y = max(lowest, top + 56 + side) + 34
    meanings = [
        ("own-box", "the target's own token"),
        ("yes-box", "drafted and accepted"),
        ("box", "drafted and dropped"),
    ]
    body = [
        *flow(record, 20),
        label(MARGIN, 176, said, "bold"),
        label(MARGIN, 200, f"… {before}", "mono small dim"),
        *drawn,
        label(MARGIN, top + 44, "what a node sees", "small dim"),
        *mask(record["parents"], record["path"], MARGIN, top + 54, side),
        *legend(MARGIN, y, meanings),
        label(WIDTH - MARGIN, y, "numbers: the drafter's probability of the token", "small dim end"),
    ]
    return picture(y + 18, f"One round: {said}", body)


# ---------------------------------------------------------------- all of them
def drawings(docs):
    """{file name: SVG} of every picture whose JSON is there."""
    folder, found = docs / "results", {}
    for name, draw in (("continuation", continuation), ("round", round_)):
        source = folder / f"{name}.json"
        if source.exists():
            found[f"{name}.svg"] = draw(json.loads(source.read_text(encoding="utf-8")))
    return found


# ---------------------------------------------------------------- measured: what the pictures are drawn from
def speller(tokenizer):
    """-> spell(tokens) -> the text that they add, half characters waiting for their other half."""
    made, said = [], ""

    def spell(tokens):
        nonlocal said
        made.extend(tokens)
        text = tokenizer.decode(made, skip_special_tokens=True).rstrip("\ufffd")
        new, said = text[len(said):], text
        return new
    return spell


def record_continuation(run, drafter, build, ids, limit):
    """Decode one prompt -> [{"drafted": text, "own": text, "tokens": how many}], the prefill first."""
    rounds, spell = [], speller(run.tokenizer)

    def tell(tokens, drafted):
        accepted = spell(tokens[:drafted])
        rounds.append({"drafted": accepted, "own": spell(tokens[drafted:]), "tokens": len(tokens)})
    run.decode(drafter, build, ids, limit, tell=tell)
    return rounds


def record_rounds(run, drafter, build, ids, limit):
    """Decode one prompt -> of each round the tree as the target saw it, the drafter's p, and the path."""
    asked, rows, rounds, made = {}, [], [], []
    forward, names = run.target.forward, run.tokenizer

    def build_recorded(expand, root):
        asked.clear()
        rows.clear()

        def recorded(tokens, parents):
            found = expand(tokens, parents)
            for row, token, parent in zip(found, tokens.tolist(), parents):
                asked[parent, token] = len(rows)
                rows.append(row)
            return found
        return build(recorded, root)

    def forward_recorded(tokens, parents=None, **more):
        if parents is not None:
            rounds.append({"tokens": tokens.tolist(), "parents": parents.tolist(), "p": [], "path": [0]})
            add_probabilities(rounds[-1], asked, rows)
        return forward(tokens, parents, **more)

    def tell(tokens, drafted):
        if made:
            last = rounds[-1]
            children = list(zip(last["parents"], last["tokens"]))
            for token in tokens[:drafted]:                   # down the tree, along what was accepted
                last["path"].append(children.index((last["path"][-1], token)))
            last["own"] = names.decode(tokens[drafted:])
            last["before"] = names.decode(ids + made[:-1])
        made.extend(tokens)
    run.target.forward = forward_recorded
    run.decode(drafter, build_recorded, ids, limit, tell=tell)
    for number, each in enumerate(rounds, 1):
        each["tokens"] = [names.decode([token]) for token in each["tokens"]]
        each["round"] = number
    return rounds


def add_probabilities(tree_, asked, rows):
    """The drafter's p of each node after its parent.  asked: {(parent, token): number of the row in rows}."""
    where = []
    for token, parent in zip(tree_["tokens"], tree_["parents"]):
        above = where[parent] if parent >= 0 else -1
        tree_["p"].append(round(rows[above][token].item(), 4) if parent >= 0 else None)
        where.append(asked.get((above, token)))


def telling(round_record):
    """How much a round shows: a path that leaves the most likely child, three nodes long, in a small tree."""
    parents, accepted = round_record["parents"], round_record["path"]
    first = [parents.index(parent) for parent in range(len(parents)) if parent in parents]
    leaves = any(child not in first for child in accepted[1:])
    return leaves, -abs(len(accepted) - 4), -len(parents)


def place_of(function):
    """-> [file, name] of a function, also of one that partial() has wrapped."""
    while hasattr(function, "func"):
        function = function.func
    return [f"{function.__module__}.py", function.__qualname__]


def decode(a, flags):
    """Decode one prompt as bench.py's flags say, and write the JSON that the picture a.what is drawn from."""
    import bench
    run = bench.Run(flags)
    name, drafter = next(iter(run.drafters.items()))
    build = bench.builder(run, name, run.trees[0])
    if not 1 <= a.number <= len(run.prompts):
        raise bench.UserError(f"--number is {a.number}: there are {len(run.prompts)} prompts")
    _, ids, limit = run.prompts[a.number - 1]
    record = {
        "command": " ".join(["python figures/pictures.py", *a.argv]),
        "target": run.a.target,
        "drafter": name,
        "tree": run.trees[0].label,
        "prompt": run.tokenizer.decode(ids, skip_special_tokens=True),
    }
    if a.what == "continuation":
        record["rounds"] = record_continuation(run, drafter, build, ids, limit)
    else:
        rounds = record_rounds(run, drafter, build, ids, limit)
        record |= rounds[a.round - 1] if a.round else max(rounds, key=telling)
        kind = type(drafter)
        record |= {"expand": place_of(kind.expand), "build": place_of(build), "keep": place_of(kind.keep)}
    text = json.dumps(record, ensure_ascii=False, indent=1)
    (a.docs / "results" / f"{a.what}.json").write_text(text + "\n", encoding="utf-8")
    return 0


def flags_of(argv):
    """-> (our flags, bench.py's)"""
    parser = argparse.ArgumentParser(
        description="Decode, and draw the README's pictures.", allow_abbrev=False,
        epilog="Other flags are bench.py's: --drafter, --tree, --prompts, --max-new-tokens ...")
    flag = parser.add_argument
    flag("what", choices=["continuation", "round", "draw"])
    flag("--number", type=int, default=1, help="which of the prompts to decode, from 1 (default: 1)")
    flag("--round", type=int, help="which round to draw, from 1 (default: one that shows much)")
    flag("--docs", type=Path, default=DOCS, help="folder of the pictures and of results/ (default: docs)")
    a, flags = parser.parse_known_args(argv)
    if flags and a.what == "draw":
        parser.error(f"draw takes no {flags[0]}")
    a.argv = argv
    return a, flags


def main(argv=None):
    """Exit status: bench.py's."""
    a, flags = flags_of(sys.argv[1:] if argv is None else argv)
    if a.what != "draw":
        sys.path.insert(0, str(ROOT))
        import bench                                         # here, since drawing needs neither it nor torch
        status = bench.main(flags, functools.partial(decode, a), "pictures.py")
        if status:
            return status
    for name, svg in drawings(a.docs).items():
        (a.docs / name).write_text(svg, encoding="utf-8")
        print(f"{name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
