"""The papers' tables and figures, measured here: one command each.

    python figures/paper.py list
    python figures/paper.py glide-table-1 edd-figure-6
    python figures/paper.py glide-figure-6 --limit 4 --out try      # further flags are bench.py's
    python figures/paper.py all --target lmsys/vicuna-7b-v1.5 --checkpoint my-drafters --dtype float16

The idea.  docs/results/tables.json says of each table which commands make its rows, what the paper printed,
and what is not shipped.  Here those commands run one after the other in this process; their rows become one
file under docs/results/, and are printed as figures/results.py puts them into docs/results.md.

    a table's key   | what becomes of it here
    command, runs   | run with --json; flags given here are added behind its own, so that they win
    --checkpoint    | given here: a command's own work/NAME becomes FOLDER/NAME
    label           | goes into the rows of its run; of a further run only drafted arms stay
    (training.json) | what it says of a row's drafter is added: tokens, loss, α on held-out text
    needs           | a drafter that is not there is left out, with one sentence; the other rows still run
    measured        | becomes the date, and the flags given here, where the rows go to docs/results/
    file            | written when all runs of the table are done: an interruption loses this table alone

Exit status: 0; 2 where a name was bad, or a command refused its flags; 130 after an interruption.
"""
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import acceptance  # noqa: E402
import calibration  # noqa: E402
import ewif  # noqa: E402
import optimality  # noqa: E402
import repeated  # noqa: E402
from pictures import DOCS  # noqa: E402
from results import tables  # noqa: E402
from tabular import commands_of, read_rows, table  # noqa: E402

import bench  # noqa: E402
import train  # noqa: E402
from verify import UserError  # noqa: E402

RESULTS = DOCS / "results"
SCRIPTS = {"bench.py": bench, "figures/acceptance.py": acceptance, "figures/calibration.py": calibration,
           "figures/ewif.py": ewif, "figures/optimality.py": optimality, "figures/repeated.py": repeated}
INTERRUPTED = 130


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
    if name == "maxgram":
        return True
    if name != "cascade":
        return name in bench.drafters_in(a.checkpoint)
    stages = bench.read_call(text, {"cascade": bench.load_cascade}, "drafter").words
    for stage in stages:
        inside = Path(a.checkpoint) / stage / "config.json"
        # With a slash it is a folder, or a name on the hub.
        if stage != "maxgram" and not inside.exists() and "/" not in stage:
            return False
    return True


def concerns(text, spec):
    """Whether a table shows rows of the drafter called `text`: some show only a few arms of their file."""
    arms = spec.get("arms")
    compact = text.replace(" ", "")
    return arms is None or any(arm.replace(" ", "").startswith(compact) for arm in arms)


def shipped(arguments, spec, label):
    """Leave out what is not there -> (arguments, or None where nothing is left; sentences about the rest)."""
    a, needs = flags_of(arguments), spec.get("needs", {})
    present = [text for text in a.drafter if is_there(text, a)]
    absent = {}                                # {the command that makes them: drafters}
    for text in a.drafter:
        if text not in present and concerns(text, spec):
            absent.setdefault(needs.get(label) or needs.get(text), []).append(text)
    sentences = []
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


def run_command(run, spec, flags, done):
    """Run one command of a table in this process -> (its rows, or None where it refused; sentences).

    done: {arguments: rows} of the commands that have run, as several tables may show the same.
    """
    script, arguments = arguments_of(run["command"], flags)
    arguments, sentences = shipped(arguments, spec, run.get("label"))
    if arguments is None:
        return [], sentences
    key = (script, *arguments)
    if key not in done:
        print(f"\n$ python {script} {shlex.join(arguments)}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            status = SCRIPTS[script].main([*arguments, "--json", str(path)])
            if status == INTERRUPTED:
                raise KeyboardInterrupt
            if status:
                return None, sentences
            checkpoint = flags_of(arguments).checkpoint
            done[key] = [{**row, **trained(row, checkpoint)} for row in read_rows(path)]
    return done[key], sentences


# ---------------------------------------------------------------- how drafters were trained
def trained(row, checkpoint):
    """What training.json says of a row's drafter, so that unequal training shows; {} where there is none.

    tokens_trained: of all stages of training; loss: kl or ce; held_out_alpha: how often its first choice is
    the target's, on held-out text of the kind that it was trained on last.
    """
    names = row.get("stages") or [row.get("drafter")]
    if len(names) > 1:
        return {}
    folder = bench.drafters_in(checkpoint).get(names[0]) or Path(checkpoint) / str(names[0])
    if not (folder / "training.json").exists():
        return {}
    about = stage = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    tokens = 0
    while stage:
        tokens += stage["tokens_seen"]
        stage = stage.get("init")              # what it was trained from
    # GLIDE always learns by cross entropy, and does not say so.
    loss = about["config"].get("loss", "ce") if "config" in about else None
    return {"tokens_trained": tokens, "loss": loss, "held_out_alpha": about["validation"].get("alpha")}


# ---------------------------------------------------------------- one table
def rows_of(spec, flags, done):
    """Run the commands of a table -> (rows, sentences about what is not there, whether a command refused)."""
    rows, sentences, refused = [], [], False
    for run in commands_of(spec):
        label, first = run.get("label"), not rows
        found, said = run_command(run, spec, flags, done)
        sentences += said
        if found is None:
            refused = True
            continue
        for row in found:
            drafted = row.get("tree")
            if drafted and label:
                row = {**row, "label": label}
            # The baselines are in the first run's rows.
            if first or drafted:
                rows.append(row)
    return rows, sentences, refused


def stamp(file, flags, today):
    """Say in tables.json when a file of rows was measured, and with which flags beyond its commands'."""
    path = RESULTS / "tables.json"
    said = tables(RESULTS)
    for spec in said["tables"]:
        if spec["file"] == file:
            spec["measured"] = today + (f", with {shlex.join(flags)}" if flags else "")
    text = json.dumps(said, indent=1, ensure_ascii=False) + "\n"
    train.write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


def measure(spec, flags, out, done):
    """Measure a table, write its rows, print it -> whether a command refused its flags."""
    rows, sentences, refused = rows_of(spec, flags, done)
    for sentence in dict.fromkeys(sentences):
        print(f"{spec['name']}: {sentence}", file=sys.stderr)
    if rows:
        bench.write_json(out / spec["file"], rows)
        if out.resolve() == RESULTS:
            stamp(spec["file"], flags, time.strftime("%Y-%m-%d"))
        # Neither the machine nor the date of the committed rows holds for these.
        here = {key: value for key, value in spec.items() if key not in ("machine", "measured")}
        print("\n" + "\n\n".join(table(here, {}, out)), flush=True)
    return refused


def missing(spec, flags):
    """Names of what a table needs and is not shipped."""
    names = set()
    for run in commands_of(spec):
        arguments = arguments_of(run["command"], flags)[1]
        a = flags_of(arguments)
        absent = [text for text in a.drafter if concerns(text, spec) and not is_there(text, a)]
        names |= {run["label"]} if absent and run.get("label") else set(absent)
        names |= {path for path in a.prompts or () if not Path(path).exists()}
    return sorted(names)


def show_list(specs, flags):
    for spec in specs:
        absent = ", ".join(missing(spec, flags))
        print(f"{spec['name']:24} {spec['title']}" + (f" (not shipped: {absent})" if absent else ""))


# ---------------------------------------------------------------- the command line
def names_and_flags(argv):
    """["a", "b", "--limit", "4"] -> (["a", "b"], ["--limit", "4"]): names come first."""
    for number, word in enumerate(argv):
        if word.startswith("-"):
            return argv[:number], argv[number:]
    return argv, []


def chosen(specs, names):
    """The tables that are named, in the order of the file for `all`, else as they are named."""
    if names == ["all"]:
        return specs
    known = {spec["name"]: spec for spec in specs}
    for name in names:
        if name not in known:
            raise UserError(f"there is no table called {name!r}: choose among {' '.join(known)}, or say all")
    return [known[name] for name in dict.fromkeys(names)]


def work(argv):
    names, flags = names_and_flags(sys.argv[1:] if argv is None else argv)
    p = train.Parser(description="Measure tables and figures of the papers.", allow_abbrev=False,
                     usage="paper.py NAME ... | all | list, then flags",
                     epilog="Other flags are bench.py's: --target, --checkpoint, --limit ...")
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows (default: docs/results)")
    a, flags = p.parse_known_args(flags)
    if not names:
        raise UserError("name tables, or say all, or list (see --help)")
    specs = tables(RESULTS)["tables"]
    given = bench.parser().parse_args(flags)             # a bad flag is refused before anything runs
    if given.json:
        raise UserError("--json: each table has its own file; say --out FOLDER")
    if names == ["list"]:
        show_list(specs, flags)
        return 0
    specs = chosen(specs, names)
    a.out.mkdir(parents=True, exist_ok=True)
    done, refused = {}, False
    for spec in specs:
        try:
            refused = measure(spec, flags, a.out, done) or refused
        except KeyboardInterrupt:
            print(f"interrupted: {spec['name']} is lost, what was measured before it stands", file=sys.stderr)
            return INTERRUPTED
    if a.out.resolve() == RESULTS:
        print("\nnow python figures/results.py writes docs/results.md and docs/claims.md")
    return 2 if refused else 0


def main(argv=None):
    return bench.main(argv, work, "figures/paper.py")


if __name__ == "__main__":
    sys.exit(main())
