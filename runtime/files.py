"""User-supplied files and folders: which files they are, and the rows that each of them holds.

    files_of(paths)      each file; of a folder those that are JSON or text by their names
    rows_of(file)        (number of its line, row) for each of its rows

A file is JSON lines, a JSON value, or text in UTF-8, which is one row, compressed by gzip or not.
It is JSON where its name says so, or where it begins with a JSON object.
"""
import gzip
import json
import os
import zlib
from pathlib import Path

from runtime.errors import UserError
from runtime.program import first_line

JSON = (".json", ".jsonl", ".ndjson", ".jl")             # in any case, and before .gz
TABLES = (".csv", ".tsv")                                # text, but its rows are not

def files_of(paths):
    """Yield files, and those in folders, but for hidden ones."""
    for given in map(str, paths):
        if os.path.isdir(given):
            for path in sorted(Path(given).rglob("*")):
                is_hidden = any(name.startswith(".") for name in path.relative_to(given).parts)
                if suffix_of(path) in (*JSON, ".txt") and not is_hidden:
                    yield path
        elif os.path.exists(given):                      # a file, or a pipe
            yield Path(given)
        else:
            raise UserError(f"{given or 'an empty name'} does not exist: name files or folders")

def suffix_of(path):
    """The end of a file's name in lower case, without .gz: ".jsonl"."""
    return os.path.splitext(path.name.lower().removesuffix(".gz"))[1]

# ---------------------------------------------------------------- the rows of a file
def lines_of(path):
    """Yield (number, text) for the lines of a file.  Only \\n ends one: JSON may hold U+2028."""
    number = 1
    try:
        with open(path, "rb") as stored:
            is_zipped = stored.peek(2)[:2] == b"\x1f\x8b"
            for number, line in enumerate(gzip.open(stored) if is_zipped else stored, 1):
                if b"\0" in line:
                    raise ValueError("it has NUL bytes, as UTF-16 has")
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except (OSError, EOFError, ValueError, zlib.error) as why:
        raise UserError(f"line {number} of {path} cannot be read ({first_line(why)}): give text or "
                        "JSON lines in UTF-8") from None

def json_of(text):
    """JSON text -> its value; None where it is none.

    Half of a surrogate pair, which JSON may hold, becomes U+FFFD.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if "\\ud" in text.lower():
        whole = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
        value = json.loads(whole.decode("utf-16", "replace"))
    return value

def row_of(text, path, number):
    """As json_of, or a UserError.  number: of the line where the text begins."""
    value = json_of(text)
    if value is None:
        raise UserError(f"line {number} of {path} is no JSON: correct it, or name another file")
    return value

def rows_of(path):
    """Yield (number, row) for the rows of a file.  number: of its line.

    A JSON value of several lines is one row; so is a text, as {"text": ...}.
    """
    if suffix_of(path) in TABLES:
        raise UserError(f"{path} is a table: make JSON lines of it")
    is_json = suffix_of(path) in JSON
    lines, head = lines_of(path), ""
    for number, line in lines:
        head += line
        if line.strip():
            break
    first = json_of(head)
    if isinstance(first, dict) or is_json and first is not None:       # JSON lines
        yield number, first
        for number, line in lines:
            if line.strip():
                yield number, row_of(line, path, number)
        return
    whole = head + "".join(line for _, line in lines)
    if not is_json and not isinstance(json_of(whole), (dict, list)):
        yield 1, {"text": whole}
    elif whole.strip():
        yield 1, row_of(whole, path, 1)
