"""The chart of speedups as SVG, drawn from the rows that "chart" of docs/results/tables.json names.

    python figures/paper.py write          # draws docs/arms.svg, with the pages

It brings its own card and both colour schemes (charts.css), so that it reads on a white and on a
dark page.  docs/continuation.svg and docs/round.svg are illustrations, drawn once from
docs/rounds.html.
"""
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

import tables

STYLE = Path(__file__).with_suffix(".css")
WIDTH, MARGIN = 880, 24                    # of the chart, in px

# ---------------------------------------------------------------- SVG by hand
def label(x, y, string, classes=""):
    """A line of text at its baseline."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{escape(string)}</text>'

def rectangle(x, y, width, height, classes, radius=4):
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} rx="{radius}" class="{classes}"/>'

def stroke(points, classes):
    return f'<path d="{points}" class="{classes}"/>'

def picture(height, title, body):
    """The whole file: card, style, the elements of the body."""
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
        f'aria-label={quoteattr(title)}>',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE.read_text(encoding='utf-8')}</style>",
        rectangle(0.5, 0.5, WIDTH - 1, height - 1, "card", radius=8),
        *body,
        "</svg>",
    ]) + "\n"

# ---------------------------------------------------------------- the bar chart
def bar_chart(chart, folder):
    """Speedup over plain decoding: a bar to the mean over prompts, a line between the quartiles."""
    there = tables.whole(tables.read_rows(folder / chart["file"]))
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
        line = "ink-line" if tick == 1 else "grid"
        body.append(stroke(f"M{at(tick):.1f} {top - 8}V{bottom}", line))
        body.append(label(at(tick), bottom + 16, f"{tick}×", "small dim middle"))
    for number, (name, paper, row) in enumerate(bars):
        y = top + pitch * number + pitch / 2
        low, high = at(row["speedup_low"]), at(row["speedup_high"])
        middle = at(row["mean_speedup"])
        body += [
            label(left - 12, y + 4, name, "end"),
            rectangle(left, y - 9, middle - left, 18, f"bar-{paper}", radius=2),
            stroke(f"M{low:.1f} {y - 4}v8m0 -4H{high:.1f}m0 -4v8", "ink-line"),
            label(max(high, middle) + 8, y + 4, f"{row['mean_speedup']:.2f}×", "bold"),
        ]
    x = MARGIN
    for paper in dict.fromkeys(paper for _, paper, _ in bars):
        body.append(rectangle(x, bottom + 33, 20, 14, f"bar-{paper}"))
        body.append(label(x + 26, bottom + 44, paper, "small"))
        x += 44 + 6.6 * len(paper)             # about 6.6 px a letter
    meaning = "bar: geometric mean; line: quartiles"
    body.append(label(WIDTH - MARGIN, bottom + 44, meaning, "small dim end"))
    return picture(bottom + 62, chart["title"], body)
