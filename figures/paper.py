"""The papers' tables and figures: one command measures them, one writes docs/ from the rows.

    python figures/paper.py list                       # the tables, and about how long each takes
    python figures/paper.py glide-table-1 papers       # measure: rows go to work/results/
    python figures/paper.py all                        # all tables that are not there yet
    python figures/paper.py write --rows work/results  # take those rows in, and write docs/
    python figures/paper.py check                      # exit 1 where docs/ is out of date
    python figures/paper.py papers --target lmsys/vicuna-7b-v1.5 --checkpoint mine --out vicuna

docs/results/README.md explains tables.json, the list of tables with their commands.  Flags given
here override a command's own.  A table without a command shows further arms of another table's run.
A table whose command is train.py's is made from that run's log, and the training itself is not
started here.

A table is written when all of its prompts are done.  An interrupted one keeps its finished prompts
in work/results/kept/, so that the same command goes on; with a larger --limit it measures the
further prompts alone.  Flags other than --out, --again and --rows are bench.py's.
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
import probe  # noqa: E402
import tables  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import bench  # noqa: E402
from runtime import text  # noqa: E402
from runtime.measure import Record  # noqa: E402
from verify import UserError  # noqa: E402

DOCS = ROOT / "docs"
# {page, which is also the folder of its rows: column of its findings}; "results" has no folder
PAGES = {"results": "on the stand-in", "t5": "on T5", "smollm2": "on SmolLM2"}

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

    A table of other settings or packages, or on another machine, begins anew; a larger --limit does
    not.  A drafter that was trained anew, or code that was changed, is not noticed: --again
    discards what is kept.
    """
    def __init__(self, path, run):
        self.path, self.run = path, run
        versions = [torch.__version__, transformers.__version__, torch.get_num_threads()]
        about = {**vars(run.a), "limit": None, "versions": versions, "machine": machine()}
        self.kept = {"about": json.loads(json.dumps(about)), "prices": {}, "prompts": {}}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["about"] == self.kept["about"]:
                self.kept = found
        # With other prices the same names would stand for other trees.
        run.prices.update(self.kept["prices"])

    def give(self, arms):
        """Give the arms their results of the prompts that all of them have finished."""
        for i, prompt in enumerate(self.run.prompts):
            found = self.kept["prompts"].get(json.dumps(prompt), {})
            # All arms of a prompt are measured together, or their speeds could not be compared.
            if all(arm.name in found for arm in arms):
                for arm in arms:
                    arm.results[i] = record_of(found[arm.name])

    def keep(self, arms, i):
        """All arms have decoded prompt i: write down what rows are made of."""
        found = {}
        for arm in arms:
            record = arm.results[i]
            found[arm.name] = {"tokens": record.tokens, "stage_runs": record.stage_runs,
                               "total": record.total, "seconds": record.seconds}
        self.kept["prompts"][json.dumps(self.run.prompts[i])] = found
        self.kept["prices"] = self.run.prices
        content = json.dumps(self.kept)
        text.write_atomically(self.path, lambda part: part.write_text(content))

def record_of(found):
    """What was kept of a decoding -> Record"""
    record = Record(found["tokens"], stage_runs=found["stage_runs"])
    record.total = Counter(found["total"])
    record.seconds = found["seconds"]
    # Rows are made of the sums in `total`, and only ask whether there were rounds.
    record.rounds = [None] * record.total["rounds"]
    return record

# ---------------------------------------------------------------- one table
def arguments_of(command, flags):
    """`python bench.py --limit 9` -> ("bench.py", its arguments, and then flags, which override)"""
    _, script, *arguments = shlex.split(command.replace("\\\n", " "))
    return script, arguments + flags

def rows_of_bench(arguments, spec, specs, a):
    """Run bench.py's command in this process, with the arms that tables show -> rows"""
    run = bench.Run(arguments)
    wanted = []
    for each in specs:
        if each["file"] == spec["file"]:
            wanted += each.get("shown", [])
    arms = []
    for arm in bench.arms_of(run):
        name = tables.name_of({"drafter": arm.drafter, "tree": arm.tree})
        if not arm.tree or not wanted or name in wanted:
            arms.append(arm)
    finished = Finished(kept_file(spec, a), run)
    finished.give(arms)
    done = bench.measure_all(run, arms, after=partial(finished.keep, arms))
    if done < len(run.prompts):
        raise KeyboardInterrupt
    return tables.with_by_prompt(bench.tables(run, arms, done), run.prompts)

def rows_of(spec, specs, flags, a):
    """Run the command of a table, or read its log -> rows"""
    script, arguments = arguments_of(spec["command"], flags)
    if script == "train.py":
        log = Path(arguments[arguments.index("--work") + 1], "log.jsonl")
        if not log.exists():
            raise UserError(f"{log} is not there: run the training, from the repository's root")
        return tables.rows_of_log(log, spec["drafters"])
    print(f"\n$ python {script} {shlex.join(arguments)}", flush=True)
    if script == "figures/probe.py":
        return probe.rows_of(arguments)
    if script == "figures/batches.py":
        return batches.rows_of(arguments)
    return rows_of_bench(arguments, spec, specs, a)

def measure(spec, specs, flags, a):
    """Measure a table, write its rows, print it."""
    where = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "flags": shlex.join(flags)}
    rows = [row | where for row in rows_of(spec, specs, flags, a)]
    # Six digits are enough: by_prompt holds thousands of figures.
    rows = json.loads(json.dumps(rows), parse_float=lambda figure: float(f"{float(figure):.6g}"))
    path = a.out / spec["file"]
    path.parent.mkdir(exist_ok=True)
    bench.write_json(path, rows)
    found = tables.read_rows(path)
    made = tables.compare_all([spec], {spec["file"]: found})[spec["name"]]
    print("\n" + "\n\n".join(tables.table(spec, found, made)), flush=True)

# ---------------------------------------------------------------- the pages
def read_specs():
    """docs/results/tables.json"""
    return json.loads((DOCS / "results" / "tables.json").read_text(encoding="utf-8"))

def page_of(spec):
    """The page on which a table stands: by the folder of its rows."""
    return Path(spec["file"]).parent.name or "results"

def findings(content, made):
    """The lines at the top of the page of results, as a Markdown table.

    made: {table: [Comparison]} of all pages.  A comparison names the finding that it belongs to.
    """
    columns = list(PAGES.values())
    lines = [["what the papers claim", *columns, "why, as far as found"]]
    for finding in content.get("findings", []):
        cells = {page: [] for page in PAGES}
        for spec in content["tables"]:
            for each in made[spec["name"]]:
                if each.claim.get("finding") == finding["name"]:
                    effect = f"{tables.key_in_words(each)} {tables.effect_in_words(each)}"
                    cells[page_of(spec)].append(f"{tables.verdict(each)}: {effect}")
        each_page = ["; ".join(cell) or "–" for cell in cells.values()]
        lines.append([finding["what"], *each_page, finding["why"]])
    return tables.markdown(lines, len(lines[0]))

def family():
    """The models of checkpoints/t5, by what their training.json says, as Markdown."""
    lines = [["model", "text", "held-out loss", "right", "tokens", "distinct 4-grams"]]
    samples = []
    for name in ("target", "base", "small"):
        path = ROOT / "checkpoints" / "t5" / name / "training.json"
        about = json.loads(path.read_text(encoding="utf-8"))
        for kind, found in about["validation"]["by_kind"].items():
            wrote = about["written"][kind]
            figures = (found["held_out_loss"], found["right"], wrote["distinct_4grams"])
            loss, right, distinct = (f"{figure:.2f}" for figure in figures)
            lines.append([f"`{name}`", kind, loss, right, f"{wrote['length']:.0f}", distinct])
            if name == "target":
                samples.append(f"An input ({kind}), and the output:")
                for part in ("input", "output"):
                    samples.append("> " + wrote[part].strip().replace("\n", "\n> "))
    summary = "<details><summary>What the target writes</summary>"
    return "\n\n".join([tables.markdown(lines, 2), summary, *samples, "</details>"])

def pages():
    """{file: text} of docs/results.md, docs/t5.md and docs/smollm2.md"""
    folder = DOCS / "results"
    content = read_specs()
    rows = {}
    for file in dict.fromkeys(spec["file"] for spec in content["tables"]):
        if (folder / file).exists():
            rows[file] = tables.read_rows(folder / file)
    specs_of = {}
    for spec in content["tables"]:
        specs_of.setdefault(page_of(spec), []).append(spec)
    made = {}
    for specs in specs_of.values():
        made |= tables.compare_all(specs, rows)
    written = {}
    for page, specs in specs_of.items():
        head = (folder / f"{page}.head.md").read_text(encoding="utf-8").rstrip()
        head = head.replace("@FINDINGS@", findings(content, made))
        if "@FAMILY@" in head:
            head = head.replace("@FAMILY@", family())
        written[DOCS / f"{page}.md"] = "\n\n".join(paragraphs(head, specs, rows, made)) + "\n"
    return written

def paragraphs(head, specs, rows, made):
    """A page: its head, then by section its tables, as far as there are rows."""
    specs = [spec for spec in specs if spec["file"] in rows]
    parts = [head]
    for section in dict.fromkeys(spec["section"] for spec in specs):
        parts.append(f"## {section}")
        for spec in specs:
            if spec["section"] == section:
                parts += tables.table(spec, rows[spec["file"]], made[spec["name"]], head)
    return parts

def write(check):
    """Write docs/, or only check that it is up to date -> exit status."""
    written = pages()
    differ = []
    for file, content in written.items():
        if not file.exists() or file.read_text(encoding="utf-8") != content:
            differ.append(file.name)
            if not check:
                file.write_text(content, encoding="utf-8")
    if differ and check:
        print(f"out of date: {', '.join(differ)}; run figures/paper.py write", file=sys.stderr)
        return 1
    print(f"written: {', '.join(differ) or 'nothing, all is up to date'}")
    return 0

def take_in(rows, specs):
    """Copy the tables' rows from the folder `rows` into docs/results/."""
    files = dict.fromkeys(spec["file"] for spec in specs if (rows / spec["file"]).exists())
    if not files:
        raise UserError(f"--rows {rows} holds no measured tables: measure some there first")
    for file in files:
        (DOCS / "results" / file).parent.mkdir(exist_ok=True)
        shutil.copy(rows / file, DOCS / "results" / file)

# ---------------------------------------------------------------- the command line
def run_of(spec, specs):
    """The table whose command makes the rows of a table: of those of the same file."""
    return next(each for each in specs if each["file"] == spec["file"] and "command" in each)

def kept_file(spec, a):
    return a.out / "kept" / f"{spec['name']}.json"

def is_done(spec, flags, a):
    """Whether --out holds the table's rows, measured with the same flags."""
    path = a.out / spec["file"]
    return path.exists() and tables.read_rows(path)[0]["flags"] == shlex.join(flags)

def show_list(specs, flags, a):
    """Print each table with the time it takes; of further tables of a run, the name of that run."""
    for spec in specs:
        takes = spec.get("takes") or run_of(spec, specs)["name"]
        done = " (measured)" if is_done(spec, flags, a) else ""
        print(f"{spec['name']:22} {takes:>9}  {spec['title']}{done}")

def measure_all(names, specs, flags, a):
    """Measure the named tables, except those that are done -> exit status."""
    refused = False
    runs = {spec["name"]: run_of(spec, specs) for spec in specs}
    for name in dict.fromkeys(runs[name]["name"] for name in names):
        spec = runs[name]
        if a.again:
            (a.out / spec["file"]).unlink(missing_ok=True)
            kept_file(spec, a).unlink(missing_ok=True)
        if is_done(spec, flags, a):
            print(f"{name}: {a.out / spec['file']} is there; --again measures it again")
            continue
        try:
            measure(spec, specs, flags, a)
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
    flag("--again", action="store_true", help="measure what --out holds once more")
    flag("--rows", type=Path, help="write: first take this folder's rows into docs/results/")
    return p

def work(argv):
    a, flags = parser().parse_known_args(argv)
    bench.parser().parse_args(flags)           # a bad flag is refused before anything runs
    specs = read_specs()["tables"]
    if a.names in (["check"], ["write"]):
        if a.rows:
            take_in(a.rows, specs)
        return write(check=a.names == ["check"])
    if a.names == ["list"]:
        show_list(specs, flags, a)
        return 0
    known = [spec["name"] for spec in specs]
    names = known if a.names == ["all"] else a.names
    for name in names:
        if name not in known:
            raise UserError(f"there is no table called {name!r}: choose among {' '.join(known)}")
    (a.out / "kept").mkdir(parents=True, exist_ok=True)
    return measure_all(names, specs, flags, a)

main = partial(bench.main, work=work, name="figures/paper.py")

if __name__ == "__main__":
    sys.exit(main())
