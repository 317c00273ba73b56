"""The pictures as SVG: a continuation, a round, bars of speedups, curves of training.

    python figures/paper.py write          # draws them, with the other pages

    picture           | drawn from
    continuation.svg  | docs/rounds.html, one arm: what was drafted and accepted, and the target's own tokens
    round.svg         | docs/rounds.html, a round of it: its four steps, the tree, the path, the mask
    arms.svg          | docs/results/, the rows that "chart" of tables.json names, all of one run
    curves.svg        | docs/results/, the rows of train.py's logs that "curves" of tables.json names

Each picture brings its own card and both colour schemes (pictures.css), so that it reads on a white and on a
dark page; text in columns has its width set, so that it fits whatever font a machine has.
"""
import json
import re
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

import tables as compare

ARM = "glide × cape"                       # of docs/rounds.html, which is shown
DATA = re.compile(r'<script[^>]* id="data"[^>]*>(.*?)</script>', re.S)
STYLE = Path(__file__).with_suffix(".css")
FLOW = Path(__file__).with_name("flow.svg")              # root, draft, verify, accept, commit: drawn by hand
OWN = "the target's own token"
WIDTH, MARGIN = 880, 24                    # of every picture, in px
COLOURS = 10                               # of curves, in pictures.css

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
        f"<style>{STYLE.read_text(encoding='utf-8')}</style>",
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
    """The elements of one line of a continuation: a box under each accepted run, then its text."""
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

def continuation(arm, prompt):
    """An arm of docs/rounds.html -> SVG."""
    pieces, rounds = [("prompt", end_of(prompt)), ("own", arm["first"])], arm["rounds"]
    for each in rounds:
        pieces += [("drafted", each["accepted"]), ("own", each["bonus"])]
    # The first token is the prefill's.
    caption = f"{arm['tokens'] - 1} tokens in {len(rounds)} rounds"
    y = 34
    meanings = [("yes-box", f"drafted by {arm['name']} and accepted"), ("mono bold", OWN),
                ("mono dim", "the prompt")]
    body = [
        *legend(MARGIN, y, meanings, size="", letter=7.1),
        label(WIDTH - MARGIN, y, caption, "bold end"),
        stroke(f"M{MARGIN} {y + 16}H{WIDTH - MARGIN}", "grid"),
    ]
    y += 42
    for line in wrap(pieces, COLUMNS):
        body += set_line(line, pieces, y)
        y += LINE
    return picture(y + 2, f"A continuation by {arm['name']}: {caption}", body)

# ---------------------------------------------------------------- one round
NODE, PITCH, ROW = 92, 119, 30             # width of a node; from a depth, from a row to the next

def visible(token, most=8):
    """A token's text with its spaces and line ends shown, cut to fit a node."""
    shown = token.replace(" ", "·").replace("\n", "↵").replace("\t", "→")
    if len(shown) > most:
        shown = shown[:most - 1] + "…"
    return shown or "∅"

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

def tree(nodes, top):
    """A round's tree with its root at the height `top` -> (elements, height of the lowest node)."""
    parents, accepted = nodes["parents"][:nodes["verified"]], nodes["path"]
    columns, rows, heights = place(parents)
    x = [MARGIN + column * PITCH for column in columns]
    y = [top + row * ROW for row in rows]
    edges, boxes = [], []
    for child in range(1, len(parents)):
        parent = parents[child]
        ends = x[parent] + NODE, y[parent], x[child], y[child]
        if child in accepted:
            edges.append(edge(*ends, "yes-line"))
        else:
            edges.insert(0, edge(*ends, "edge"))             # under the path
    for each in range(len(parents)):
        kind = "yes" if each in accepted else "no"
        kind = kind if each else "own"
        boxes += node(x[each], y[each], nodes["texts"][each], nodes["p"][each], kind)
    # The target's own token hangs from the end of the path, in the first free row of its column.
    last = accepted[-1]
    own_x = x[last] + PITCH
    own_y = top + max(heights.get(columns[last] + 1, 0), rows[last]) * ROW
    edges.append(edge(x[last] + NODE, y[last], own_x, own_y, "own-line"))
    boxes += node(own_x, own_y, nodes["choice"], None, "own")
    return edges + boxes, max(*y, own_y)

def telling(nodes):
    """How much a round shows: a path that leaves the most likely child, three nodes long, in a small tree."""
    parents, accepted = nodes["parents"][:nodes["verified"]], nodes["path"]
    first = [parents.index(parent) for parent in range(len(parents)) if parent in parents]
    leaves = any(child not in first for child in accepted[1:])
    return nodes["own"] is not None, leaves, -abs(len(accepted) - 4), -len(parents)

def one_round(arm, prompt):
    """An arm of docs/rounds.html -> SVG of the round that shows most."""
    nodes = max(arm["rounds"], key=telling)
    number = arm["rounds"].index(nodes)
    before = prompt + arm["first"]
    for each in arm["rounds"][:number]:
        before += each["accepted"] + each["bonus"]
    before = before.removesuffix(nodes["texts"][0])[-96:]
    verified, gained = nodes["verified"] - 1, len(nodes["path"]) - 1
    caption = (f"{arm['name']}, round {number + 1} of a continuation: {verified} nodes verified, "
               f"{gained} accepted, {gained + 1} new tokens")
    top, side = 232, 92
    drawn, lowest = tree(nodes, top)
    y = max(lowest, top + 56 + side) + 34
    meanings = [("own-box", OWN), ("yes-box", "drafted and accepted"), ("box", "drafted and dropped")]
    body = [
        FLOW.read_text(encoding="utf-8").rstrip(),
        label(MARGIN, 176, caption, "bold"),
        label(MARGIN, 200, f"… {visible(before, 96)}", "mono small dim"),
        *drawn,
        label(MARGIN, top + 44, "what a node sees", "small dim"),
        *mask(nodes["parents"][:nodes["verified"]], nodes["path"], MARGIN, top + 54, side),
        *legend(MARGIN, y, meanings),
        label(WIDTH - MARGIN, y, "numbers: the drafter's probability of the token", "small dim end"),
    ]
    return picture(y + 18, f"One round: {caption}", body)

# ---------------------------------------------------------------- the bar chart
def bar_chart(chart, folder):
    """Speedup over plain decoding: a bar to the median over prompts, a line from quartile to quartile."""
    there = compare.rows_in(folder, chart["file"])
    bars = [(bar["label"], bar["paper"], there[bar["arm"]]) for bar in chart["bars"]]
    left, right, top, pitch = 290, WIDTH - 70, 92, 32
    most = max(row["speedup_high"] for _, _, row in bars)
    most = int(2 * most + 1) / 2                             # up to the next half
    bottom = top + pitch * len(bars)

    def at(value):
        return left + value / most * (right - left)

    body = [
        label(MARGIN, 34, chart["title"], "bold"),
        label(MARGIN, 54, chart["subtitle"], "small dim"),
        label(at(1), top - 14, "plain decoding", "small middle"),
    ]
    for tick in range(int(most) + 1):
        body.append(stroke(f"M{at(tick):.1f} {top - 8}V{bottom}", "ink-line" if tick == 1 else "grid"))
        body.append(label(at(tick), bottom + 16, f"{tick}×", "small dim middle"))
    for number, (name, paper, row) in enumerate(bars):
        y = top + pitch * number + pitch / 2
        low, middle, high = (at(row[key]) for key in ("speedup_low", "speedup", "speedup_high"))
        body += [
            label(left - 12, y + 4, name, "end"),
            rectangle(left, y - 9, middle - left, 18, f"bar-{paper}", radius=2),
            stroke(f"M{low:.1f} {y - 4}v8m0 -4H{high:.1f}m0 -4v8", "ink-line"),
            label(max(high, middle) + 8, y + 4, f"{row['speedup']:.2f}×", "bold"),
        ]
    papers = dict.fromkeys(paper for _, paper, _ in bars)
    body += legend(MARGIN, bottom + 44, [(f"bar-{paper}", paper) for paper in papers])
    body.append(label(WIDTH - MARGIN, bottom + 44, "bar: median; line: quartiles", "small dim end"))
    return picture(bottom + 62, chart["title"], body)

# ---------------------------------------------------------------- the curves
def curves(rows):
    """Held-out α against tokens seen, a line a drafter, its name and last α at the end -> SVG.

    A drafter that went on in a second run has one line: the second begins where the first ended.
    """
    lines = {}                                               # {drafter: [(tokens, α)]}
    for row in rows:
        if row["group"] == "all":
            points = lines.setdefault(row["drafter"], [])
            start = points[-1][0] if row["init"] and points else 0
            points += [(start + tokens, alpha) for tokens, alpha in row["curve"]]
    left, right, top, bottom = 56, WIDTH - 170, 72, 412
    most = max(points[-1][0] for points in lines.values()) or 1
    ticks = int(10 * max(alpha for points in lines.values() for _, alpha in points)) + 1
    body = [
        label(MARGIN, 34, "How the drafters learn", "bold"),
        label(MARGIN, 54, "α of chains of five on held-out text, against tokens learned from", "small dim"),
    ]

    def at(tokens, alpha):
        return left + tokens / most * (right - left), bottom - 10 * alpha / ticks * (bottom - top)

    for tick in range(ticks + 1):
        _, y = at(0, tick / 10)
        body.append(stroke(f"M{left} {y:.1f}H{right}", "grid"))
        body.append(label(left - 8, y + 4, f"{tick / 10:.1f}", "small dim end"))
    for tokens in range(0, most + 1, 10 ** (len(str(most)) - 1)):
        body.append(label(at(tokens, 0)[0], bottom + 18, f"{tokens / 1e6:g}M", "small dim middle"))
    lowest = 0
    # From the top down, so that no name lies on another
    for name, points in sorted(lines.items(), key=lambda line: -line[1][-1][1]):
        colour = f"curve-{[*lines].index(name) % COLOURS}"
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in [at(*point) for point in points])
        x, y = at(*points[-1])
        lowest = max(y, lowest + 14)
        body += [
            stroke(f"M{path}", f"curve {colour}"),
            stroke(f"M{x + 3:.1f} {y:.1f}L{right + 8} {lowest:.1f}", "grid"),
            label(right + 12, lowest + 4, f"{name} {points[-1][1]:.3f}", f"small {colour}"),
        ]
    return picture(max(bottom, lowest) + 36, "Held-out α of the drafters against tokens seen", body)

# ---------------------------------------------------------------- all of them
def drawings(docs):
    """{file name: SVG} of every picture whose data are there."""
    found, pages = {}, docs / "rounds.html"
    if pages.exists():
        data = json.loads(DATA.search(pages.read_text(encoding="utf-8"))[1])
        (arm,) = [arm for arm in data["arms"] if arm["name"] == ARM]
        found["continuation.svg"] = continuation(arm, data["prompt"])
        found["round.svg"] = one_round(arm, data["prompt"])
    specs = compare.read_specs(docs / "results", "tables.json")
    chart = specs.get("chart")
    if chart and (docs / "results" / chart["file"]).exists():
        found["arms.svg"] = bar_chart(chart, docs / "results")
    logs = [docs / "results" / file for file in specs.get("curves", ())]
    rows = [row for path in logs if path.exists() for row in compare.read_rows(path)]
    if rows:
        found["curves.svg"] = curves(rows)
    return found
