"""User-supplied files and folders: which files they are, and the rows that each of them holds.

    files_of(paths, flag)      (file, the path that was given) for each file
    read_rows(file)            (number, row) for each of its rows

A file is JSON lines, a JSON list of rows, or text in UTF-8, which is one row; it may be a pipe, and
compressed by gzip.  It is JSON where its name says so, or where it begins with a JSON object.
"""
import gzip
import json
import os
import zlib
from pathlib import Path

from runtime.program import first_line
from runtime.errors import UserError

JSON = (".json", ".jsonl", ".ndjson", ".jl")             # in any case, and before .gz
NAMES = (*JSON, ".txt")                                  # the files of a folder that are read
PANDAS = "import pandas; pandas.{}.to_json('{rows}.jsonl', orient='records', lines=True)"
# The line of Python that makes rows of a file of another format
CONVERTERS = {
    ".csv": PANDAS.replace("{}", "read_csv('{file}')"),
    ".tsv": PANDAS.replace("{}", "read_csv('{file}', sep='\\t')"),
    ".xlsx": PANDAS.replace("{}", "read_excel('{file}')"),
    ".parquet": PANDAS.replace("{}", "read_parquet('{file}')"),
    ".feather": PANDAS.replace("{}", "read_feather('{file}')"),
    ".arrow": "import datasets; datasets.Dataset.from_file('{file}').to_json('{rows}.jsonl')",
    ".zip": "import shutil; shutil.unpack_archive('{file}', '{rows}')",
    ".tar": "import shutil; shutil.unpack_archive('{file}', '{rows}')",
    ".tgz": "import shutil; shutil.unpack_archive('{file}', '{rows}')",
}

# ---------------------------------------------------------------- which files
def files_in(folder, above=()):
    """Yield the files of a folder and of all folders in it, sorted, without hidden ones."""
    real = os.path.realpath(folder)
    for path in sorted(Path(folder).iterdir()) if real not in above else ():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from files_in(path, (*above, real))    # above: a link may lead back
        else:
            yield path

def files_of(paths, flag):
    """Yield (file, the path that was given) for files and folders.  flag: what gave them."""
    for given in map(str, paths):
        if given and os.path.isdir(given):
            yield from ((file, given) for file in files_in(given))
        elif given and os.path.exists(given):            # a file, or a pipe
            yield Path(given), given
        else:
            raise UserError(f"{flag}: {given or 'an empty name'} does not exist: name files or "
                            "folders")

def suffix_of(path):
    """The end of a file's name in lower case, without .gz: ".jsonl"."""
    name = path.name.lower().removesuffix(".gz")
    return os.path.splitext(name)[1]

# ---------------------------------------------------------------- their rows
def lines_of(path):
    """Yield (number, text) for the lines of a file.  Only \\n ends one: JSON may hold U+2028."""
    number = 0
    try:
        with open(path, "rb") as stored:
            zipped = path.suffix.lower() == ".gz" or stored.peek(2)[:2] == b"\x1f\x8b"
            file = gzip.open(stored) if zipped else stored
            for number, line in enumerate(file, 1):
                if b"\0" in line:
                    raise ValueError("it holds NUL bytes")
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except (OSError, EOFError, ValueError, zlib.error) as why:
        raise unreadable(path, max(number, 1), first_line(why)) from None

def unreadable(path, number, why):
    """The UserError for a line of a file."""
    return UserError(f"line {number} of {path} cannot be read as text or JSON lines ({why}): "
                     "correct it, or name another file")

def parsed(text, path=None, number=1):
    """JSON text -> its value; where it is none, a UserError, or None if no path is given."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as why:
        if path is None:
            return None
        line = number + getattr(why, "lineno", 1) - 1
        raise unreadable(path, line, getattr(why, "msg", first_line(why))) from None

def is_message(value):
    """Whether a value is a turn of a chat: a dict with a role."""
    return isinstance(value, dict) and any(name.lower() in ("role", "from") for name in value)

def is_chat(value):
    """Whether a value is a list of turns."""
    return isinstance(value, list) and bool(value) and is_message(value[0])

def read_rows(path):
    """Yield (number, row) for the rows of a file.  number: of the line, or of the row in a list."""
    path = Path(path)
    suffix = suffix_of(path)
    if suffix in CONVERTERS:
        command = CONVERTERS[suffix].format(file=path, rows=path.name.partition(".")[0])
        raise UserError(f"{path} is neither text nor JSON lines: make rows of it by python -c "
                        f'"{command}"')
    lines = lines_of(path)
    head = ""
    for number, line in lines:
        head += line
        if line.strip():
            break
    first = parsed(head)
    if isinstance(first, dict):                          # JSON lines, read one after the other
        yield number, first
        for number, line in lines:
            if line.strip():
                yield number, parsed(line, path, number)
        return
    whole = head + "".join(line for _, line in lines)
    value = parsed(whole)
    if suffix not in JSON and not isinstance(value, (dict, list)):
        yield 1, {"text": whole}
    elif value is None and first is not None:            # lines of strings, or of lists
        for number, line in enumerate(whole.split("\n"), 1):
            if line.strip():
                yield number, parsed(line, path, number)
    elif isinstance(value, list) and not is_chat(value):
        yield from enumerate(value, 1)
    elif whole.strip():
        yield 1, parsed(whole, path)
