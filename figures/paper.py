"""The papers' tables and figures: one command measures them, one writes docs/ from what was measured.

    python figures/paper.py list                         # the tables, and about how many minutes each takes
    python figures/paper.py glide-table-1 edd-figure-6   # measure: rows go to work/results/, nothing to docs/
    python figures/paper.py all                          # go on: tables that work/results/ holds are left out
    python figures/paper.py all --target lmsys/vicuna-7b-v1.5 --checkpoint my-drafters --out vicuna
    python figures/paper.py write --rows work/results    # take those rows in, and write docs/ from all rows
    python figures/paper.py check                        # write nothing; exit 1 where docs/ is another

docs/results/tables.json says of each table which commands make its rows, what the paper printed, and what is
not shipped (compare.py explains its keys); docs/results/claims.json says which comparisons a claim rests on.

    a table's key   | what becomes of it here
    command, runs   | run in this process; flags given here are added behind its own, so that they win
    arms            | only these drafted arms are measured, all in one run, each prompt with all in turn
    --checkpoint    | given here: a command's own work/NAME becomes FOLDER/NAME
    label           | goes into the rows of its run; of a further run only drafted arms stay
    needs           | a drafter that is not there is left out, with one sentence; the other rows still run
    (training.json) | what it says of a row's drafter is added: tokens, loss, α on held-out text
    (by_prompt)     | {key: a value for each prompt}, for the paired tests
    (measured.json) | beside the rows: of each file the date, the machine, flags beyond the commands'

A table is written when all its runs are done: an interruption loses that table alone, and the same command
goes on with it.  Flags other than --out, --again and --rows are bench.py's.
Exit status: 0; 1 where `check` found a difference; 2 after a mistake; 130 after an interruption.
"""
import ast
import json
import os
import platform
import re
import shlex
import shutil
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import compare  # noqa: E402
import pictures  # noqa: E402
import probe  # noqa: E402
from compare import LESS, LEVEL, commands_of, markdown, name_of, read_rows, unique  # noqa: E402

import bench  # noqa: E402
from data import read  # noqa: E402
from runtime import load  # noqa: E402
from verify import UserError  # noqa: E402

DOCS = ROOT / "docs"
TUNED = "cascade-k.jsonl"                  # the rows by which k is chosen
HELD, FAILED, OPEN = "held", "not held", "open"

def spec_of(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))

def measured(folder):
    """{file of rows: when, where and with which flags it was measured}"""
    return spec_of(folder, "measured.json") if (folder / "measured.json").exists() else {}

def write_json(path, value):
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    read.write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))

# ---------------------------------------------------------------- one command
def flags_of(arguments):
    """bench.py's flags among the arguments of any script."""
    return bench.parser().parse_known_args(arguments)[0]

def arguments_of(command, flags):
    """`python bench.py --checkpoint work/a ...` -> ("bench.py", its arguments with the flags behind them)."""
    words = shlex.split(command.replace("\\\n", " "))
    script, arguments = words[1], words[2:]
    own, given = flags_of(arguments).checkpoint, flags_of(arguments + flags).checkpoint
    arguments = arguments + flags
    if given != own and own.startswith("work/"):
        arguments += ["--checkpoint", str(Path(given) / own.removeprefix("work/"))]
    return script, arguments

def is_there(text, a):
    """Whether the drafter that --drafter calls `text` can be loaded, as far as its folders say."""
    name = text.partition("(")[0].strip()
    if name not in ("cascade", "maxgram"):
        return name in load.drafters_in(a.checkpoint)
    for stage in bench.read_call(text, dict.fromkeys((name,), load.load_cascade), "drafter").words:
        inside = Path(a.checkpoint) / stage / "config.json"
        # With a slash it is a folder, or a name on the hub.
        if stage != "maxgram" and not inside.exists() and "/" not in stage:
            return False
    return True

def shipped(arguments, spec, label):
    """Leave out what is not there -> (arguments, or None where nothing is left; sentences about the rest)."""
    a, sentences = flags_of(arguments), []
    makes = {name: command for command, names in spec.get("needs", {}).items() for name in names}
    present = [text for text in a.drafter if is_there(text, a)]
    absent = {}                                # {the command that makes them: drafters}
    for text in a.drafter:
        if text not in present:
            absent.setdefault(makes.get(label, makes.get(text)), []).append(text)
    for command, texts in absent.items():
        made = f": `{command}` makes what is missing" if command else ""
        sentences.append(f"{a.checkpoint} does not hold {' '.join(texts)}{made}")
    for path in a.prompts or ():
        if not Path(path).exists():
            sentences.append(f"the prompts {path} are not here: fetch the file, or name yours with --prompts")
            present = []
    if not present:
        return None, sentences
    if len(present) < len(a.drafter):
        arguments = [*arguments, "--drafter", *present]
    return arguments, sentences

def rows_of_command(script, arguments, spec):
    """Run one command in this process, with those of its drafted arms that the table names -> its rows."""
    if script == "figures/probe.py":
        return probe.rows_of(arguments)
    run = bench.Run(arguments)
    arms = []
    for arm in bench.arms_of(run):
        name = name_of({"drafter": arm.drafter, "tree": arm.tree})
        if not arm.tree or name in spec.get("arms", [name]):
            arms.append(arm)
    return probe.measured(run, arms)

def trained(row, checkpoint):
    """What training.json says of a row's drafter, so that unequal training shows; {} where there is none.

    tokens_trained: of all stages of training; loss: kl or ce; held_out_alpha: how often its first choice is
    the target's, on held-out text of the kind that it was trained on last.
    """
    names = row.get("stages") or [row.get("drafter")]
    if len(names) > 1:
        return {}
    folder = load.drafters_in(checkpoint).get(names[0]) or Path(checkpoint) / str(names[0])
    if not (folder / "training.json").exists():
        return {}
    about = stage = spec_of(folder, "training.json")
    tokens = 0
    while stage:
        tokens += stage["tokens_seen"]
        stage = stage.get("init")              # what it was trained from
    # GLIDE always learns by cross entropy, and does not say so.
    loss = about["config"].get("loss", "ce") if "config" in about else None
    return {"tokens_trained": tokens, "loss": loss, "held_out_alpha": about["validation"].get("alpha")}

# ---------------------------------------------------------------- one table
def rows_of(spec, flags):
    """Run the commands of a table -> (rows, sentences about what is not there, whether a command refused)."""
    rows, sentences, refused = [], [], False
    for run in commands_of(spec):
        script, arguments = arguments_of(run["command"], flags)
        label, first = run.get("label"), not rows
        arguments, said = shipped(arguments, spec, label)
        sentences += said
        if arguments is None:
            continue
        print(f"\n$ python {script} {shlex.join(arguments)}", flush=True)
        try:
            found = rows_of_command(script, arguments, spec)
        except Exception as why:               # the other tables are measured all the same
            traceback.print_exc()
            sentences.append(f"{type(why).__name__}: {why}")
            refused = True
            continue
        for row in found:
            row |= trained(row, flags_of(arguments).checkpoint)
            drafted = row.get("tree")
            if drafted and label:
                row["label"] = label
            # The baselines are in the first run's rows.
            if first or drafted or "tree" not in row:
                rows.append(row)
    return rows, sentences, refused

def machine():
    """The machine in words: its processor, cores and GPU."""
    name, cpuinfo = platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(": ")[2] if lines else name
    gpu = bench.torch.cuda.get_device_name() if bench.torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores of {name}, {gpu}"

def measure(spec, flags, out):
    """Measure a table, write its rows, print it -> whether a command refused its flags."""
    rows, sentences, refused = rows_of(spec, flags)
    for sentence in unique(sentences):
        print(f"{spec['name']}: {sentence}", file=sys.stderr)
    if not rows:
        return refused
    # Six digits: by_prompt holds thousands of figures.
    rows = json.loads(json.dumps(rows), parse_float=lambda figure: float(f"{float(figure):.6g}"))
    bench.write_json(out / spec["file"], rows)
    said = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "flags": shlex.join(flags)}
    write_json(out / "measured.json", {**measured(out), spec["file"]: said})
    print("\n" + "\n\n".join(compare.table(spec, read_rows(out / spec["file"]), [])), flush=True)
    return refused

def show_list(specs, flags, out):
    """Print each table with its minutes, and what it lacks."""
    minutes = 0
    for spec in specs:
        lacks = []
        for run in commands_of(spec):
            arguments = arguments_of(run["command"], flags)[1]
            lacks += shipped(arguments, spec, run.get("label"))[1]
        done = " (measured)" if is_done(spec, flags, out) else ""
        lacks = [sentence.partition(": `")[0] for sentence in unique(lacks)]
        print(f"{spec['name']:22} {spec['minutes']:3} min  {spec['title']}{done}", *lacks, sep="\n    ")
        minutes += 0 if done or lacks else spec["minutes"]
    print(f"{'all that is left':22} {minutes:3} min on two cores")

# ---------------------------------------------------------------- claims
def head(folder, name, **places):
    """The beginning of a page, docs/results/NAME.head.md, with text in the place of each @PLACE@."""
    text = (folder / f"{name}.head.md").read_text(encoding="utf-8")
    for place, words in places.items():
        text = text.replace(f"@{place}@", words)
    return text.rstrip()

def verdict(folder, claim):
    """-> (HELD, FAILED, LEVEL or OPEN; the figures; the reason)."""
    found = [each for spec in claim.get("holds", []) for each in compare.judged(folder, spec)]
    figures = "; ".join(each.words for each in found if each.words)
    verdicts = {each.verdict for each in found}
    if claim.get("cannot"):
        return OPEN, figures, claim["cannot"]
    if LESS in verdicts:
        return FAILED, figures, claim.get("reason", "")
    if None in verdicts or not found:
        return OPEN, figures, "; ".join(unique(each.missing for each in found if each.missing))
    if LEVEL in verdicts:
        return LEVEL, figures, claim.get("reason", "")
    return HELD, figures, ""

def claims_table(judged):
    """[(claim, its verdict)] -> a Markdown table."""
    lines = [["where", "claim", "verdict", "figures", "reason"]]
    for claim, (said, figures, reason) in judged:
        said = f"**{said}**" if said == FAILED else said
        lines.append([claim["where"], claim["claim"], said, figures or "–", reason or "–"])
    return markdown(lines, len(lines[0]))

def counted(judged):
    """"12 held, 3 level, 5 not held"."""
    count = Counter(said for _, (said, _, _) in judged)
    return ", ".join(f"{count[said]} {said}" for said in (HELD, LEVEL, FAILED))

def claims_page(folder):
    """docs/results/ -> the text of docs/claims.md: what matters, the rest folded, then what stays open."""
    claims = compare.read_specs(folder, "claims.json")
    judged = [(claim, verdict(folder, claim)) for claim in claims]
    said = [pair for pair in judged if pair[1][0] != OPEN]
    first = [pair for pair in said if pair[0].get("main")]
    rest = [pair for pair in said if not pair[0].get("main")]
    parts = [head(folder, "claims"), f"**Of the {len(first)} that matter most: {counted(first)}.**"]
    for paper in unique(claim["paper"] for claim, _ in said):
        parts.append(f"## {paper}")
        mine, more = ([pair for pair in pairs if pair[0]["paper"] == paper] for pairs in (first, rest))
        parts += [claims_table(mine)] if mine else []
        if more:
            parts.append(f"<details><summary>{len(more)} more: {counted(more)}</summary>")
            parts += [claims_table(more), "</details>"]
    for title, test in (("What cannot be said here", True), ("What waits for rows of its own", False)):
        lines = [["paper", "where", "claim", "why"]]
        for claim, (said, _, reason) in judged:
            if said == OPEN and ("cannot" in claim) == test:
                lines.append([claim["paper"], claim["where"], claim["claim"], reason])
        parts += [f"## {title}", markdown(lines, len(lines[0]))] if lines[1:] else []
    return "\n\n".join(parts) + "\n"

# ---------------------------------------------------------------- the page of results
def about(folder, file):
    """Parts of a sentence about when and where a file of rows was measured."""
    said = measured(folder).get(file, {})
    parts = [said.get("machine"), said.get("date"), said.get("flags") and f"with {said['flags']}"]
    return [part for part in parts if part]

def findings(folder):
    """The claims that are findings, in their order, as a Markdown table."""
    claims = [claim for claim in compare.read_specs(folder, "claims.json") if "finding" in claim]
    lines = [["what", "verdict", "figures"]]
    for claim in sorted(claims, key=lambda claim: claim["finding"]):
        said, figures, reason = verdict(folder, claim)
        lines.append([claim["found"], said, figures or reason])
    return markdown(lines, len(lines[0]))

def results_page(folder):
    """docs/results/ -> the text of docs/results.md."""
    rows, specs, waiting = {}, [], []
    for spec in compare.read_specs(folder, "tables.json")["tables"]:
        path = folder / spec["file"]
        if path.exists():
            rows[spec["name"]] = read_rows(path)
            specs.append(spec)
        else:
            waiting.append(f"- {spec['section']}, {spec['title']} (`{spec['name']}`)")
    # What most of the tables share, but for flags, is said once.
    count = Counter()
    for spec in specs:
        parts = [*about(folder, spec["file"]), *compare.setting(rows[spec["name"]])]
        count.update(part for part in parts if not part.startswith("with "))
    common = [part for part, number in count.items() if 2 * number > len(specs)]
    parts = [head(folder, "results", FINDINGS=findings(folder), COMMON=", ".join(common))]
    for section in unique(spec["section"] for spec in specs):
        parts.append(f"## {section}")
        for spec in specs:
            if spec["section"] == section:
                parts += compare.table(spec, rows[spec["name"]], about(folder, spec["file"]), common)
    if waiting:
        parts += ["## Not measured here", "`python figures/paper.py list` says what each lacks.",
                  "\n".join(waiting)]
    return "\n\n".join(parts) + "\n"

# ---------------------------------------------------------------- the README's links to functions
LINK = re.compile(r"\[`([\w.]+)`\]\(([\w/]+\.py)#L\d+\)")          # [`Drafter.expand`](glide.py#L226)

def line_of(file, name):
    """Where a file defines the function or class `name` (dotted); ValueError where it does not."""
    body, line = ast.parse((ROOT / file).read_text(encoding="utf-8")).body, None
    for part in name.split("."):
        here = [each for each in body if getattr(each, "name", None) == part]
        if not here:
            raise ValueError(f"{file} has no {name}")
        body, line = here[0].body, here[0].lineno
    return line

def with_links(text):
    """The README with the line numbers of its links to functions as they are now."""
    return LINK.sub(lambda found: f"[`{found[1]}`]({found[2]}#L{line_of(found[2], found[1])})", text)

# ---------------------------------------------------------------- docs/
def written(docs):
    """{path: text} of all that `write` writes."""
    folder = docs / "results"
    found = {docs / "results.md": results_page(folder), docs / "claims.md": claims_page(folder)}
    for name, svg in pictures.drawings(docs).items():
        found[docs / name] = svg
    readme = docs.parent / "README.md"
    if readme.exists():
        found[readme] = with_links(readme.read_text(encoding="utf-8"))
    return found

def take_in(rows, folder):
    """Copy the rows of the folder `rows`, and when they were measured, into docs/results/."""
    new = measured(rows)
    if not new:
        raise UserError(f"--rows {rows} holds no measured tables: measure some there first")
    for file in new:
        shutil.copy(rows / file, folder / file)
    write_json(folder / "measured.json", {**measured(folder), **new})

def pages(docs, check):
    """Write docs/, or only look whether it is up to date -> exit status."""
    differ = []
    for file, text in written(docs).items():
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            differ.append(file.name)
            if not check:
                read.write_atomically(file, lambda part, text=text: part.write_text(text, encoding="utf-8"))
    if differ and check:
        print(f"out of date: {', '.join(differ)}; run python figures/paper.py write", file=sys.stderr)
        return 1
    print(f"written: {', '.join(differ) or 'nothing, all is up to date'}")
    return 0

# ---------------------------------------------------------------- the command line
def tables(a):
    """{name: table}, with the k that --out, or else docs/results/, found to be the best."""
    tuned = a.out if (a.out / TUNED).exists() else None
    specs = compare.read_specs(DOCS / "results", "tables.json", tuned)["tables"]
    # What the others take their k from comes first.
    specs = sorted(specs, key=lambda spec: spec["file"] != TUNED)
    return {spec["name"]: spec for spec in specs}

def is_done(spec, flags, out):
    """Whether `out` holds the table's rows, measured with the same flags."""
    return measured(out).get(spec["file"], {}).get("flags") == shlex.join(flags)

def measure_all(names, flags, a):
    """Measure the named tables, but those that are done -> exit status."""
    refused = False
    for name in names:
        spec = tables(a)[name]
        if is_done(spec, flags, a.out) and not a.again:
            print(f"{name}: {a.out / spec['file']} is there; --again measures it again")
            continue
        try:
            refused = measure(spec, flags, a.out) or refused
        except KeyboardInterrupt:
            print(f"interrupted: {name} is lost; the same command goes on with it", file=sys.stderr)
            return 130
    return 2 if refused else 0

def work(argv):
    p = read.Parser(description="Measure tables and figures of the papers; write docs/ from measured rows.",
                    usage="paper.py NAME ... | all | list | write | check, then flags", allow_abbrev=False,
                    epilog="Other flags are bench.py's: --target, --checkpoint, --limit ...")
    p.add_argument("names", nargs="+", help="tables; or all, list, write, check")
    p.add_argument("--out", type=Path, default=ROOT / "work" / "results", help="folder of measured rows "
                   "(default: work/results)")
    p.add_argument("--again", action="store_true", help="measure what is in --out once more")
    p.add_argument("--rows", type=Path, help="write: first take the rows of this folder into docs/results/")
    p.add_argument("--docs", type=Path, default=DOCS, help="write, check: the folder docs/")
    a, flags = p.parse_known_args(argv)
    names, known = unique(a.names), tables(a)
    given = bench.parser().parse_args(flags)               # a bad flag is refused before anything runs
    if given.json:
        raise UserError("--json: each table has its own file; say --out FOLDER")
    if names == ["write"] and a.rows:
        take_in(a.rows, a.docs / "results")
    if names in (["check"], ["write"]):
        return pages(a.docs, check=names == ["check"])
    if names == ["list"]:
        show_list(known.values(), flags, a.out)
        return 0
    wrong = [name for name in names if name not in known and names != ["all"]]
    if wrong:
        raise UserError(f"there is no table called {wrong[0]!r}: choose among {' '.join(known)}, or say all")
    if a.out.resolve().is_relative_to(DOCS):
        raise UserError(f"--out {a.out}: docs/ is written by `paper.py write` alone; name another folder")
    a.out.mkdir(parents=True, exist_ok=True)
    return measure_all(known if names == ["all"] else names, flags, a)

def main(argv=None):
    return bench.main(argv, work, "figures/paper.py")

if __name__ == "__main__":
    sys.exit(main())
