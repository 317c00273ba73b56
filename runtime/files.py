"""User-supplied files and folders: which files they are, and the rows that each of them holds.

    files_of(paths, flag)      (file, whether it was named itself) for each file
    rows_of(file)              (number, row) for each of its rows

A file is JSON lines, a JSON value, or text in UTF-8, which is one row, compressed by gzip or not.
It is JSON where its name says so, or where it begins with a JSON object.
"""
import gzip
import json
import os
import zlib
from pathlib import Path

from runtime.program import UserError, first_line

JSON = (".json", ".jsonl", ".ndjson", ".jl")             # in any case, and before .gz
NAMES = (*JSON, ".txt")                                  # the files of a folder that are read
# What to do with files of other formats, by the ends of their names
TABLE = "make JSON lines of it, by pandas' to_json(orient='records', lines=True) for example"
OTHERS = dict.fromkeys((".csv", ".tsv", ".xlsx", ".parquet", ".feather", ".arrow"), TABLE)
OTHERS |= dict.fromkeys((".zip", ".tar", ".tgz", ".bz2", ".xz", ".zst"), "unpack it first")

# ---------------------------------------------------------------- which files
def files_of(paths, flag):
    """Yield (file, is_named) for files, which are named, and for those in folders.

    Of a folder hidden files are left out.  flag: what gave the paths, for the error.
    """
    for given in map(str, paths):
        if given and os.path.isdir(given):
            for path in sorted(Path(given).rglob("*")):
                inner = path.relative_to(given)
                if path.is_file() and not any(name.startswith(".") for name in inner.parts):
                    yield path, False
        elif given and os.path.exists(given):            # a file, or a pipe
            yield Path(given), True
        else:
            raise UserError(f"{flag}: {given or 'an empty name'} does not exist: name files or "
                            "folders")

def suffix_of(path):
    """The end of a file's name in lower case, without .gz: ".jsonl"."""
    name = path.name.lower().removesuffix(".gz")
    return os.path.splitext(name)[1]

# ---------------------------------------------------------------- their rows
def unreadable(path, number, why):
    """The UserError for a line of a file."""
    return UserError(f"line {number} of {path} cannot be read as text or JSON lines ({why}): "
                     "correct it, or name another file")

def lines_of(path):
    """Yield (number, text) for the lines of a file.  Only \\n ends one: JSON may hold U+2028."""
    number = 0
    try:
        with open(path, "rb") as stored:
            zipped = path.suffix.lower() == ".gz" or stored.peek(2)[:2] == b"\x1f\x8b"
            file = gzip.open(stored) if zipped else stored
            for number, line in enumerate(file, 1):
                if b"\0" in line:
                    raise ValueError("it holds NUL bytes: turn UTF-16 into UTF-8")
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except (OSError, EOFError, ValueError, zlib.error) as why:
        raise unreadable(path, max(number, 1), first_line(why)) from None

def parsed(text, path=None, number=1):
    """JSON text -> its value; where it is none, a UserError, or None if no path is given."""
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            # JSON may write half of a surrogate pair alone: it becomes U+FFFD.
            whole = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
            value = json.loads(whole.decode("utf-16", "replace"))
        return value
    except (ValueError, RecursionError) as why:
        if path is None:
            return None
        line = number + getattr(why, "lineno", 1) - 1
        raise unreadable(path, line, getattr(why, "msg", first_line(why))) from None

def rows_of(path):
    """Yield (number, row) for the rows of a file.  number: of its line.

    A JSON value of several lines is one row; so is a text, as {"text": ...}.
    """
    suffix = suffix_of(path)
    if suffix in OTHERS:
        raise UserError(f"{path} is neither text nor JSON lines: {OTHERS[suffix]}")
    lines, head = lines_of(path), ""
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
    elif whole.strip():
        yield 1, parsed(whole, path)
