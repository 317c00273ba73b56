"""The papers' tables and figures: one command measures them, one writes docs/ from what was measured.

    python figures/paper.py list                         # the tables, and about how many minutes each takes
    python figures/paper.py glide-table-1 edd-figure-6   # measure: rows go to work/results/, nothing to docs/
    python figures/paper.py all                          # go on: tables that work/results/ holds are left out
    python figures/paper.py all --target lmsys/vicuna-7b-v1.5 --checkpoint my-drafters --out vicuna
    python figures/paper.py write --rows work/results    # take those rows in, and write docs/ from all rows
    python figures/paper.py check                        # write nothing; exit 1 where docs/ is out of date

docs/results/README.md explains tables.json (tables and their commands) and claims.json.  Flags given here
override a command's own; with --work FOLDER its work/NAME becomes FOLDER/NAME.  Missing drafters are left out,
with one sentence.  A table without a command shows further arms of another table's run.  A table whose command
is train.py's is made from that run's log, work/NAME/log.jsonl, whether the run has ended or not.

A table is written when it is done; what each prompt gave is kept (kept.py), so that the same command goes on
with an interrupted table, and one with a larger --limit measures the further prompts alone.  Flags other than
--out, --again, --work and --rows are bench.py's.
Exit status: 0; 1 where `check` found a difference; 2 after a mistake; 130 after an interruption.
"""
import json
import re
import shlex
import shutil
import sys
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import batches  # noqa: E402
import tables as compare  # noqa: E402
import kept  # noqa: E402
import charts as pictures  # noqa: E402
import probe  # noqa: E402
from tables import LESS, LEVEL, UNTESTED, markdown, name_of, read_rows, unique  # noqa: E402

import bench  # noqa: E402
from runtime import text as read  # noqa: E402
from runtime import load, report  # noqa: E402
from verify import UserError  # noqa: E402

DOCS = ROOT / "docs"
TUNED = "cascade-k.jsonl"                  # the rows by which k is chosen
PUBLIC = "smollm2"                         # folder and page of a public model's rows
HELD, FAILED, OPEN = "held", "not held", "open"

def measured(folder):
    """{file of rows: when, where and with which flags it was measured}"""
    path = folder / "measured.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError):
        raise UserError(f"{path} is damaged: measure again, into another folder") from None
    return found if isinstance(found, dict) else {}

def write_json(path, value):
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    read.write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))

# ---------------------------------------------------------------- one command
def arguments_of(command, flags, work="work"):
    """`python bench.py --limit 9 ...` -> ("bench.py", its arguments, then the flags, which override them).

    work: the folder that stands for work/.
    """
    there = command.replace("\\\n", " ").replace(" work/", f" {shlex.quote(str(work))}/")
    _, script, *arguments = shlex.split(there)
    return script, arguments + flags

def is_there(text, a):
    """Whether every checkpoint that `text`, a call of --drafter, names is in its folder."""
    without_settings = re.sub(r"\w+=(\([^)]*\)|[^,)]*)", "", text)
    names = {*re.split(r"[(),\s]+", without_settings)}
    for name in names - {"", "maxgram", "cascade", "beside", *load.BEYOND}:
        stage = Path(a.checkpoint) / name / "config.json"
        # With a slash it is a folder, or a name on the hub.
        if name not in load.drafters_in(a.checkpoint) and not stage.exists() and "/" not in name:
            return False
    return True

def shipped(arguments):
    """Leave out missing drafters -> (arguments, or None where none is left; sentences about the missing)."""
    a = bench.parser().parse_known_args(arguments)[0]              # arguments may be of any script
    present = [text for text in a.drafter if is_there(text, a)]
    absent = [text for text in a.drafter if text not in present]
    if not absent:
        return arguments, []
    arguments = [*arguments, "--drafter", *present] if present else None
    return arguments, [f"{a.checkpoint} does not hold {' '.join(absent)}"]

def lacking(spec, flags, work):
    """-> a table's script; its arguments or its log, None where it cannot run; sentences about what is missing."""
    script, arguments = arguments_of(spec["command"], flags, work)
    if script != "train.py":
        return script, *shipped(arguments)
    log = Path(arguments[arguments.index("--work") + 1], "log.jsonl")
    if log.exists():
        return script, log, []
    return script, None, [f"{log} is not there: train, or say --work FOLDER"]

def rows_of_command(script, arguments, spec, a):
    """Run one command in this process, with those of its drafted arms that the table names -> its rows.

    What bench.py's prompts gave is kept in --out, one by one.
    """
    if script == "figures/probe.py":
        return probe.rows_of(arguments)
    if script == "figures/batches.py":
        return batches.rows_of(*batches.run_of(arguments))
    run = bench.Run(arguments)
    prompts = kept.Kept(a.out, run, a.again)
    arms = bench.plain_arms(run) + bench.library_arms(run)
    for label, drafter in run.drafters.items():
        for tree in run.trees:
            name = name_of({"drafter": label, "tree": tree.label})
            if name in spec.get("arms", [name]):
                build = bench.builder(run, label, tree)
                arms.append(bench.Arm(label, partial(run.decode, drafter, build), tree.label, build))
    prompts.fill(arms)
    return probe.measured(run, arms, partial(prompts.keep, arms))

# ---------------------------------------------------------------- one table
def rows_of(spec, flags, a):
    """Run the command of a table, or read its log -> (rows, sentences about what is missing)."""
    script, arguments, sentences = lacking(spec, flags, a.work)
    if arguments is None:
        return [], sentences
    if script == "train.py":
        return compare.rows_of_log(arguments, spec["drafters"]), sentences
    print(f"\n$ python {script} {shlex.join(arguments)}", flush=True)
    return rows_of_command(script, arguments, spec, a), sentences

def measure(spec, flags, a):
    """Measure a table, write its rows, print it."""
    rows, sentences = rows_of(spec, flags, a)
    for sentence in sentences:
        print(f"{spec['name']}: {sentence}", file=sys.stderr)
    if not rows:
        return
    # Six digits: by_prompt holds thousands of figures.
    rows = json.loads(json.dumps(rows), parse_float=lambda figure: float(f"{float(figure):.6g}"))
    (a.out / spec["file"]).parent.mkdir(exist_ok=True)
    bench.write_json(a.out / spec["file"], rows)
    if "curve" in rows[0]:
        (a.out / f"{spec['name']}.svg").write_text(pictures.curves(rows), encoding="utf-8")
    entry = {"date": time.strftime("%Y-%m-%d"), "machine": kept.machine(), "flags": shlex.join(flags)}
    write_json(a.out / "measured.json", {**measured(a.out), spec["file"]: entry})
    print("\n" + "\n\n".join(compare.table(spec, read_rows(a.out / spec["file"]), [])), flush=True)

def show_list(specs, flags, a):
    """Print each table with its minutes, and what it lacks; of further tables of a run, that run."""
    minutes = 0
    for spec in specs:
        if "command" not in spec:
            print(f"{spec['name']:22} {run_of(spec, specs)['name']:>7}  {spec['title']}")
            continue
        _, left, lacks = lacking(spec, flags, a.work)
        done = " (measured)" if is_done(spec, flags, a.out) else ""
        print(f"{spec['name']:22} {spec['minutes']:3} min  {spec['title']}{done}", *lacks, sep="\n    ")
        minutes += 0 if done or left is None else spec["minutes"]
    print(f"{'all that is left':22} {minutes:3} min on two cores")

# ---------------------------------------------------------------- claims
def head(folder, name, **places):
    """The beginning of a page, docs/results/NAME.head.md, with text in the place of each @PLACE@."""
    text = (folder / f"{name}.head.md").read_text(encoding="utf-8")
    for place, words in places.items():
        text = text.replace(f"@{place}@", words)
    return text.rstrip()

def verdict(folder, claim):
    """-> (HELD, FAILED, LEVEL, UNTESTED or OPEN; the figures; the reason)."""
    found = [each for spec in claim.get("holds", []) for each in compare.judged(folder, spec)]
    figures = "; ".join(each.words for each in found if each.words)
    verdicts = {each.verdict for each in found}
    if claim.get("cannot"):
        return OPEN, figures, claim["cannot"]
    if LESS in verdicts:
        return FAILED, figures, claim.get("reason", "")
    if None in verdicts or not found:
        return OPEN, figures, "; ".join(unique(each.missing for each in found if each.missing))
    for undecided in (LEVEL, UNTESTED):
        if undecided in verdicts:
            return undecided, figures, claim.get("reason", "")
    return HELD, figures, ""

def shown(decision):
    """A verdict as the tables have it."""
    if decision == OPEN:
        return "–"
    return f"**{decision}**" if decision == FAILED else decision

def claims_table(folder, judged):
    """[(claim, its verdict)] -> a Markdown table, with the verdict on SmolLM2 where there is one."""
    lines = [["where", "claim", "on the stand-in", "figures", "reason", "on SmolLM2", "figures"]]
    for claim, (decision, figures, reason) in judged:
        public, its_figures, _ = verdict(folder / PUBLIC, claim)
        reason = "" if decision == OPEN else reason
        its_figures = "" if public == OPEN else its_figures
        cells = [shown(decision), figures, reason, shown(public), its_figures]
        lines.append([claim["where"], claim["claim"], *(cell or "–" for cell in cells)])
    return markdown(lines, len(lines[0]))

def counted(judged):
    """"12 held, 3 level, 5 not held", and what is not counted: "; 2 untested"."""
    count = Counter(decision for _, (decision, _, _) in judged)
    text = ", ".join(f"{count[decision]} {decision}" for decision in (HELD, LEVEL, FAILED))
    return f"{text}; {count[UNTESTED]} untested" if count[UNTESTED] else text

def claims_page(folder):
    """docs/results/ -> the text of docs/claims.md: what matters, the rest folded, then what stays open."""
    claims = compare.read_specs(folder, "claims.json")
    judged = [(claim, verdict(folder, claim)) for claim in claims]
    public = [(claim, verdict(folder / PUBLIC, claim)) for claim in claims]
    decided = [pair for pair, its in zip(judged, public) if {pair[1][0], its[1][0]} != {OPEN}]
    first = [pair for pair in decided if pair[0].get("main") and pair[1][0] != OPEN]
    its_first = [pair for pair in public if pair[0].get("main") and pair[1][0] != OPEN]
    count = f"Of the {len(first)} that matter most: {counted(first)}."
    if its_first:
        count += f" On SmolLM2, of {len(its_first)}: {counted(its_first)}."
    parts = [head(folder, "claims"), f"**{count}**"]
    for paper in unique(claim["paper"] for claim, _ in decided):
        parts.append(f"## {paper}")
        here = [pair for pair in decided if pair[0]["paper"] == paper]
        mine = [pair for pair in here if pair[0].get("main")]
        more = [pair for pair in here if not pair[0].get("main")]
        parts += [claims_table(folder, mine)] if mine else []
        if more:
            parts.append(f"<details><summary>{len(more)} more, on the stand-in {counted(more)}</summary>")
            parts += [claims_table(folder, more), "</details>"]
    for title, test in (("What cannot be said here", True), ("What waits for rows of its own", False)):
        lines = [["paper", "where", "claim", "why"]]
        for claim, (decision, _, reason) in judged:
            there = any(claim is its for its, _ in decided)
            if not there and ("cannot" in claim) == test:
                lines.append([claim["paper"], claim["where"], claim["claim"], reason])
        parts += [f"## {title}", markdown(lines, len(lines[0]))] if lines[1:] else []
    return "\n\n".join(parts) + "\n"

# ---------------------------------------------------------------- the page of results
def about(folder, file):
    """Parts of a sentence about when and where a file of rows was measured."""
    entry = measured(folder).get(file, {})
    parts = [entry.get("machine"), entry.get("date"), entry.get("flags") and f"with {entry['flags']}"]
    return [part for part in parts if part]

def findings(folder):
    """The claims that are findings, in their order, as a Markdown table."""
    claims = [claim for claim in compare.read_specs(folder, "claims.json") if "finding" in claim]
    lines = [["what", "verdict", "figures"]]
    for claim in sorted(claims, key=lambda claim: claim["finding"]):
        decision, figures, reason = verdict(folder, claim)
        lines.append([claim["found"], decision, figures or reason])
    return markdown(lines, len(lines[0]))

def results_page(folder, page="results"):
    """docs/results/ -> the text of docs/results.md, or of docs/smollm2.md."""
    rows, specs, waiting = {}, [], []
    for spec in compare.read_specs(folder, "tables.json")["tables"]:
        if spec["file"].startswith(f"{PUBLIC}/") != (page == PUBLIC):
            continue
        path = folder / spec["file"]
        if path.exists():
            rows[spec["name"]] = read_rows(path)
            specs.append(spec)
        else:
            waiting.append(f"- {spec['section']}, {spec['title']} (`{spec['name']}`)")
    # Settings that most of the tables share, but for flags, are named once.
    count = Counter()
    for spec in specs:
        parts = [*about(folder, spec["file"]), *compare.setting(rows[spec["name"]])]
        count.update(part for part in parts if not part.startswith("with "))
    common = [part for part, number in count.items() if 2 * number > len(specs)]
    parts = [head(folder, page, FINDINGS=findings(folder), COMMON=", ".join(common))]
    for section in unique(spec["section"] for spec in specs):
        parts.append(f"## {section}")
        for spec in specs:
            if spec["section"] == section:
                parts += compare.table(spec, rows[spec["name"]], about(folder, spec["file"]), common)
    if waiting:
        parts += ["## Not measured here", "`python figures/paper.py list` says what each lacks.",
                  "\n".join(waiting)]
    return "\n\n".join(parts) + "\n"

# ---------------------------------------------------------------- docs/
def written(docs):
    """{path: text} of all that `write` writes."""
    folder = docs / "results"
    found = {docs / "results.md": results_page(folder), docs / "claims.md": claims_page(folder)}
    if (folder / f"{PUBLIC}.head.md").exists():
        found[docs / f"{PUBLIC}.md"] = results_page(folder, PUBLIC)
    for name, svg in pictures.drawings(docs).items():
        found[docs / name] = svg
    return found

def take_in(rows, folder):
    """Copy the rows of the folder `rows`, and when they were measured, into docs/results/."""
    new = measured(rows)
    if not new:
        raise UserError(f"--rows {rows} holds no measured tables: measure some there first")
    lost = [file for file in new if not (rows / file).is_file()]
    if lost:
        raise UserError(f"--rows {rows} holds no {' '.join(lost)}, which measured.json names: measure again")
    for file in new:
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copy(rows / file, folder / file)
    write_json(folder / "measured.json", {**measured(folder), **new})

def pages(docs, check):
    """Write docs/, or only check that it is up to date -> exit status."""
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
    # The table that determines k comes first.
    specs = sorted(specs, key=lambda spec: spec["file"] != TUNED)
    return {spec["name"]: spec for spec in specs}

def is_done(spec, flags, out):
    """Whether `out` holds the table's rows, measured with the same flags."""
    same_flags = measured(out).get(spec["file"], {}).get("flags") == shlex.join(flags)
    return same_flags and (out / spec["file"]).exists()

def run_of(spec, specs):
    """The table whose command makes a table's rows: its own, or that of another table of the same file."""
    return next(each for each in specs if each["file"] == spec["file"] and "command" in each)

def measure_all(names, flags, a):
    """Measure the named tables, but those that are done -> exit status."""
    refused = False
    for name in unique(run_of(spec, tables(a).values())["name"] for spec in map(tables(a).get, names)):
        spec = tables(a)[name]
        if is_done(spec, flags, a.out) and not a.again:
            print(f"{name}: {a.out / spec['file']} is there; --again measures it again")
            continue
        if a.again:
            # So that an interrupted table can go on without --again.
            others = {file: entry for file, entry in measured(a.out).items() if file != spec["file"]}
            write_json(a.out / "measured.json", others)
        try:
            measure(spec, flags, a)
        except KeyboardInterrupt:
            how = "without --again it" if a.again else "the same command"
            print(f"interrupted: {how} goes on with {name}", file=sys.stderr)
            return 130
        except Exception as why:               # the other tables are measured all the same
            message = why if report.is_mistake(why) else traceback.format_exc()
            print(f"{name}: {message}", file=sys.stderr)
            refused = True
    return 2 if refused else 0

def work(argv):
    p = read.Parser(description="Measure tables and figures of the papers; write docs/ from measured rows.",
                    usage="paper.py NAME ... | all | list | write | check, then flags", allow_abbrev=False,
                    epilog="Other flags are bench.py's: --target, --checkpoint, --limit ...")
    p.add_argument("names", nargs="+", help="tables; or all, list, write, check")
    p.add_argument("--out", type=Path, default=ROOT / "work" / "results", help="folder of measured rows "
                   "(default: work/results)")
    p.add_argument("--work", type=Path, default=ROOT / "work", help="the folder that stands for work/ in "
                   "commands: of logs and drafters of trainings (default: work)")
    p.add_argument("--again", action="store_true", help="measure what is in --out once more, all of it")
    p.add_argument("--rows", type=Path, help="write: first take the rows of this folder into docs/results/")
    a, flags = p.parse_known_args(argv)
    names, known = unique(a.names), tables(a)
    given = bench.parser().parse_args(flags)               # a bad flag is refused before anything runs
    if given.json:
        raise UserError("--json: each table has its own file; say --out FOLDER")
    if names == ["write"] and a.rows:
        take_in(a.rows, DOCS / "results")
    if names in (["check"], ["write"]):
        return pages(DOCS, check=names == ["check"])
    if names == ["list"]:
        show_list(known.values(), flags, a)
        return 0
    wrong = [name for name in names if name not in known and names != ["all"]]
    if wrong:
        raise UserError(f"there is no table called {wrong[0]!r}: choose among {' '.join(known)}; or say all, and nothing else")
    if a.out.resolve().is_relative_to(DOCS):
        raise UserError(f"--out {a.out}: docs/ is written by `paper.py write` alone; name another folder")
    try:
        a.out.mkdir(parents=True, exist_ok=True)
    except OSError:
        raise UserError(f"--out {a.out}: name a folder that is there, or can be made") from None
    return measure_all(known if names == ["all"] else names, flags, a)

main = partial(bench.main, work=work, name="figures/paper.py")

if __name__ == "__main__":
    sys.exit(main())
