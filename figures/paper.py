"""The papers' tables and figures: one command measures them, one writes docs/ from the rows.

    python figures/paper.py list                       # the tables, and about how long each takes
    python figures/paper.py glide-table-1 papers       # measure: rows go to work/results/
    python figures/paper.py all                        # all tables that are not there yet
    python figures/paper.py write --rows work/results  # take those rows in, and write docs/
    python figures/paper.py check                      # exit 1 where docs/ is out of date
    python figures/paper.py papers --target lmsys/vicuna-7b-v1.5 --checkpoint mine --out vicuna

docs/results/README.md explains tables.json, the list of tables with their commands.  Flags given
here override a command's own; with --work FOLDER its work/NAME becomes FOLDER/NAME.  A table
without a command shows further arms of another table's run.  A table whose command is train.py's is
made from that run's log, work/NAME/log.jsonl, and the training itself is not started here.

A table is written when all of its prompts are done.  An interrupted one keeps its finished prompts
in work/results/kept/, so that the same command goes on; with a larger --limit it measures the
further prompts alone.  Flags other than --out, --again, --work and --rows are bench.py's.
Exit status: 0; 1 where `check` found a difference; 2 after a mistake; 130 after an interruption.
"""
import json
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import batches  # noqa: E402
import charts  # noqa: E402
import probe  # noqa: E402
import tables  # noqa: E402
import torch  # noqa: E402

import bench  # noqa: E402
from runtime import text  # noqa: E402
from runtime.measure import Record  # noqa: E402
from verify import UserError  # noqa: E402

DOCS = ROOT / "docs"
TUNED = "cascade-k.jsonl"                  # the rows by which k is chosen
PUBLIC = "smollm2"                         # folder of a public model's rows, and name of its page

# ---------------------------------------------------------------- a table that goes on
def machine():
    """The machine in words: its processor, cores and GPU."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    name = found[1] if found else platform.machine()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores of {name}, {gpu}"

class Finished:
    """The prompts that a table has measured so far, in a file.

    A table of other settings, packages or threads, or on another machine, begins anew; a larger
    --limit does not.  A drafter that was trained anew, or code that was changed, is not noticed:
    --again discards what is kept.
    """
    def __init__(self, path, run, again):
        self.path, self.run = path, run
        threads = {name: value for name, value in os.environ.items() if name.startswith("OMP_")}
        settings = {**vars(run.a), "limit": None}
        about = [settings, batches.versions(), machine(), torch.get_num_threads(), threads]
        about = json.loads(json.dumps(about))
        self.found = {"about": about, "prices": {}, "prompts": {}}
        if again:
            path.unlink(missing_ok=True)
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["about"] == about:
                self.found = found
        # With other prices the same names would stand for other trees.
        run.prices.update(self.found["prices"])

    def key(self, i):
        """Prompt i by its tokens, and by how many are to follow."""
        _, ids, limit = self.run.prompts[i]
        return json.dumps([ids, limit])

    def give(self, arms):
        """Give the arms their results of the prompts that all of them have finished."""
        for i in range(len(self.run.prompts)):
            kept = self.found["prompts"].get(self.key(i), {})
            # All arms of a prompt are measured together, or their speeds could not be compared.
            if all(arm.name in kept for arm in arms):
                for arm in arms:
                    arm.results[i] = self.record_of(kept[arm.name])

    def record_of(self, kept):
        record = Record(kept["tokens"], stage_runs=kept["stage_runs"])
        record.total = Counter(kept["total"])
        record.seconds = kept["seconds"]
        # Rows are made of the sums in `total`, and only ask whether there were rounds.
        record.rounds = [None] * record.total["rounds"]
        return record

    def keep(self, arms, i):
        """All arms have decoded prompt i: write down what rows are made of."""
        kept = {}
        for arm in arms:
            record = arm.results[i]
            kept[arm.name] = {"tokens": record.tokens, "stage_runs": record.stage_runs,
                              "total": record.total, "seconds": record.seconds}
        self.found["prompts"][self.key(i)] = kept
        self.found["prices"] = self.run.prices
        content = json.dumps(self.found)
        text.write_atomically(self.path, lambda part: part.write_text(content))

# ---------------------------------------------------------------- one command
def arguments_of(command, flags, work="work"):
    """`python bench.py --limit 9` -> ("bench.py", its arguments, then `flags`, which override them)

    work: the folder that stands for work/.
    """
    there = command.replace("\\\n", " ").replace(" work/", f" {shlex.quote(str(work))}/")
    _, script, *arguments = shlex.split(there)
    return script, arguments + flags

def wanted_arms(spec, specs):
    """The drafted arms to measure: those that the tables of this file show; None: all."""
    names = []
    for each in specs:
        if each["file"] == spec["file"]:
            if "shown" not in each:
                return None
            names += each["shown"]
    return names

def rows_of_bench(arguments, spec, specs, a):
    """Run bench.py's command in this process, with the arms that tables show -> rows"""
    run = bench.Run(arguments)
    finished = Finished(a.out / "kept" / f"{spec['name']}.json", run, a.again)
    wanted = wanted_arms(spec, specs)
    arms = []
    for arm in bench.arms_of(run):
        name = tables.name_of({"drafter": arm.drafter, "tree": arm.tree})
        if not arm.tree or wanted is None or name in wanted:
            arms.append(arm)
    finished.give(arms)
    done = bench.measure_all(run, arms, after=partial(finished.keep, arms))
    if done < len(run.prompts):
        raise KeyboardInterrupt
    return tables.with_by_prompt(bench.tables(run, arms, done), run.prompts)

def rows_of(spec, specs, flags, a):
    """Run the command of a table, or read its log -> rows"""
    script, arguments = arguments_of(spec["command"], flags, a.work)
    if script == "train.py":
        log = Path(arguments[arguments.index("--work") + 1], "log.jsonl")
        if not log.exists():
            raise UserError(f"{log} is not there: run the training, or say --work FOLDER")
        return tables.rows_of_log(log, spec["drafters"])
    print(f"\n$ python {script} {shlex.join(arguments)}", flush=True)
    if script == "figures/probe.py":
        return probe.rows_of(arguments)
    if script == "figures/batches.py":
        return batches.rows_of(*batches.run_of(arguments))
    return rows_of_bench(arguments, spec, specs, a)

def measure(spec, specs, flags, a):
    """Measure a table, write its rows, print it."""
    rows = rows_of(spec, specs, flags, a)
    # Six digits are enough: by_prompt holds thousands of figures.
    rows = json.loads(json.dumps(rows), parse_float=lambda figure: float(f"{float(figure):.6g}"))
    path = a.out / spec["file"]
    path.parent.mkdir(exist_ok=True)
    bench.write_json(path, rows)
    entry = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "flags": shlex.join(flags)}
    write_measured(a.out, {spec["file"]: entry})
    found = tables.read_rows(path)
    made = tables.compare_all([spec], {spec["file"]: found})[spec["name"]]
    print("\n" + "\n\n".join(tables.table(spec, found, made, [])), flush=True)

# ---------------------------------------------------------------- when and where it was measured
def measured(folder):
    """{file of rows: when, where and with which flags it was measured}"""
    path = folder / "measured.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

def write_measured(folder, new):
    content = json.dumps({**measured(folder), **new}, indent=1, ensure_ascii=False) + "\n"
    (folder / "measured.json").write_text(content, encoding="utf-8")

def about(folder, file):
    """[machine, date, flags] of a file of rows, as far as they are known"""
    entry = measured(folder).get(file, {})
    parts = [entry.get("machine"), entry.get("date")]
    if entry.get("flags"):
        parts.append(f"with {entry['flags']}")
    return [part for part in parts if part]

# ---------------------------------------------------------------- the pages
def findings(content, made):
    """The lines at the top of the page of results, as a Markdown table.

    made: {table: [Comparison]} of all pages.  A comparison names the finding that it belongs to.
    """
    lines = [["what the papers claim", "on the stand-in", "on SmolLM2", "why, as far as found"]]
    for finding in content.get("findings", []):
        here, there = [], []
        for spec in content["tables"]:
            for each in made[spec["name"]]:
                if each.claim.get("finding") == finding["name"]:
                    effect = tables.effect_in_words(each).partition(" [")[0]
                    key = tables.WORDS.get(each.claim["key"], each.claim["key"])
                    cell = there if page_of(spec) == PUBLIC else here
                    cell.append(f"{tables.verdict(each)}: {key} {effect}")
        cells = ["; ".join(cell) or "–" for cell in (here, there)]
        lines.append([finding["what"], *cells, finding["why"]])
    return tables.markdown(lines, len(lines[0]))

def page_of(spec):
    """The page on which a table stands: by the folder of its rows."""
    return PUBLIC if spec["file"].startswith(f"{PUBLIC}/") else "results"

def pages(docs):
    """{file: text} of docs/results.md and docs/smollm2.md"""
    folder = docs / "results"
    content = tables.read_specs(folder)
    rows = {}
    specs_of = {"results": [], PUBLIC: []}
    for spec in content["tables"]:
        specs_of[page_of(spec)].append(spec)
        path = folder / spec["file"]
        if path.exists() and spec["file"] not in rows:
            rows[spec["file"]] = tables.read_rows(path)
    made = {}
    for specs in specs_of.values():
        made |= tables.compare_all(specs, rows)
    written = {}
    for page, specs in specs_of.items():
        head = folder / f"{page}.head.md"
        if head.exists():
            top = head.read_text(encoding="utf-8").rstrip()
            top = top.replace("@FINDINGS@", findings(content, made))
            paragraphs = page_paragraphs(specs, rows, made, folder, top)
            written[docs / f"{page}.md"] = "\n\n".join(paragraphs) + "\n"
    return written

def page_paragraphs(specs, rows, made, folder, top):
    """The head of a page, its tables by section, and the names of those that wait for rows."""
    waiting = [f"`{spec['name']}`" for spec in specs if spec["file"] not in rows]
    specs = [spec for spec in specs if spec["file"] in rows]
    # Settings that most of the tables share are named once, at the head.
    settings = [tables.setting(rows[spec["file"]]) for spec in specs]
    count = Counter(part for setting in settings for part in setting)
    half = sum(1 for setting in settings if setting) / 2
    common = [part for part, number in count.items() if number > half]
    parts = [top.replace("@COMMON@", ", ".join(common))]
    for section in tables.unique(spec["section"] for spec in specs):
        parts.append(f"## {section}")
        for spec in specs:
            if spec["section"] == section:
                where = about(folder, spec["file"])
                parts += tables.table(spec, rows[spec["file"]], made[spec["name"]], where, common)
    if waiting:
        parts.append(f"Not measured here: {', '.join(waiting)}.")
    return parts

def write(docs, check):
    """Write docs/, or only check that it is up to date -> exit status."""
    differ = []
    for file, content in (pages(docs) | charts.drawings(docs)).items():
        if not file.exists() or file.read_text(encoding="utf-8") != content:
            differ.append(file.name)
            if not check:
                file.write_text(content, encoding="utf-8")
    if differ and check:
        print(f"out of date: {', '.join(differ)}; run figures/paper.py write", file=sys.stderr)
        return 1
    print(f"written: {', '.join(differ) or 'nothing, all is up to date'}")
    return 0

def take_in(rows, folder):
    """Copy the rows of the folder `rows`, and when they were measured, into docs/results/."""
    new = measured(rows)
    if not new:
        raise UserError(f"--rows {rows} holds no measured tables: measure some there first")
    for file in new:
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copy(rows / file, folder / file)
    write_measured(folder, new)

# ---------------------------------------------------------------- the command line
def specs_of(a):
    """{name: table}, with the k that --out, or else docs/results/, found to be the best."""
    tuned = a.out if (a.out / TUNED).exists() else None
    specs = tables.read_specs(DOCS / "results", tuned)["tables"]
    # The table that determines k comes first.
    specs = sorted(specs, key=lambda spec: spec["file"] != TUNED)
    return {spec["name"]: spec for spec in specs}

def run_of(spec, specs):
    """The table whose command makes the rows of a table: of those of the same file."""
    return next(each for each in specs if each["file"] == spec["file"] and "command" in each)

def is_done(spec, flags, out):
    """Whether `out` holds the table's rows, measured with the same flags."""
    same_flags = measured(out).get(spec["file"], {}).get("flags") == shlex.join(flags)
    return same_flags and (out / spec["file"]).exists()

def show_list(specs, flags, a):
    """Print each table with its minutes; of further tables of a run, the name of that run."""
    for spec in specs:
        if "command" not in spec:
            took = run_of(spec, specs)["name"]
        elif spec["command"].startswith("python train.py"):
            took = "a log"
        else:
            took = f"{spec['minutes']} min"
        done = " (measured)" if is_done(spec, flags, a.out) else ""
        print(f"{spec['name']:22} {took:>9}  {spec['title']}{done}")

def measure_all(names, flags, a):
    """Measure the named tables, but those that are done -> exit status."""
    refused = False
    known = specs_of(a)
    for name in tables.unique(run_of(known[name], known.values())["name"] for name in names):
        # Read again: the table before may have chosen another k.
        specs = specs_of(a)
        if is_done(specs[name], flags, a.out) and not a.again:
            print(f"{name}: {a.out / specs[name]['file']} is there; --again measures it again")
            continue
        if a.again:
            # So that the same command without --again goes on, if this is interrupted.
            (a.out / specs[name]["file"]).unlink(missing_ok=True)
        try:
            measure(specs[name], specs.values(), flags, a)
        except KeyboardInterrupt:
            print(f"interrupted: without --again the same command goes on with {name}",
                  file=sys.stderr)
            return 130
        except (UserError, OSError, torch.OutOfMemoryError) as why:
            # The other tables are measured all the same.
            print(f"{name}: {why}", file=sys.stderr)
            refused = True
    return 2 if refused else 0

def parser():
    p = text.Parser(description="Measure the papers' tables; write docs/ from measured rows.",
                    usage="paper.py NAME ... | all | list | write | check, then flags",
                    epilog="Other flags are bench.py's: --target, --checkpoint, --limit ...",
                    allow_abbrev=False)
    flag = p.add_argument
    flag("names", nargs="+", help="tables; or all, list, write, check")
    flag("--out", type=Path, default=ROOT / "work" / "results",
         help="folder of measured rows (default: work/results)")
    flag("--work", type=Path, default=ROOT / "work", help="the folder that stands for work/ in "
         "commands: logs and drafters of trainings (default: work)")
    flag("--again", action="store_true", help="measure what --out holds once more")
    flag("--rows", type=Path, help="write: first take this folder's rows into docs/results/")
    return p

def work(argv):
    a, flags = parser().parse_known_args(argv)
    bench.parser().parse_args(flags)           # a bad flag is refused before anything runs
    if a.names in (["check"], ["write"]):
        if a.rows:
            take_in(a.rows, DOCS / "results")
        return write(DOCS, check=a.names == ["check"])
    known = specs_of(a)
    if a.names == ["list"]:
        show_list(known.values(), flags, a)
        return 0
    names = list(known) if a.names == ["all"] else tables.unique(a.names)
    for name in names:
        if name not in known:
            raise UserError(f"there is no table called {name!r}: choose among {' '.join(known)}")
    if a.out.resolve().is_relative_to(DOCS):
        raise UserError(f"--out {a.out}: only `paper.py write` changes docs/; name another folder")
    (a.out / "kept").mkdir(parents=True, exist_ok=True)
    return measure_all(names, flags, a)

main = partial(bench.main, work=work, name="figures/paper.py")

if __name__ == "__main__":
    sys.exit(main())
