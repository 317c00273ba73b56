"""User-supplied files and folders: which files they are, and the rows that each of them holds.

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

# ---------------------------------------------------------------- which files
def files_of(paths):
    """Yield (file, is_read) for files, which are read, and those in folders, by their names."""
    for given in map(str, paths):
        if os.path.isdir(given):
            for path in sorted(Path(given).rglob("*")):
                is_hidden = any(name.startswith(".") for name in path.relative_to(given).parts)
                if path.is_file() and not is_hidden:
                    yield path, path.name.lower().removesuffix(".gz").endswith(NAMES)
        elif os.path.exists(given):            # a file, or a pipe
            yield Path(given), True
        else:
            raise UserError(f"{given or 'an empty name'} does not exist: name files or folders")

# ---------------------------------------------------------------- their rows
def lines_of(path):
    """Yield (number, text) for the lines of a file.  Only \\n ends one: JSON may hold U+2028."""
    number = 1
    try:
        with open(path, "rb") as stored:
            is_zipped = stored.peek(2)[:2] == b"\x1f\x8b"
            for number, line in enumerate(gzip.open(stored) if is_zipped else stored, 1):
                if b"\0" in line:
                    raise ValueError("NUL bytes: it is UTF-16, packed, or no text")
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except (OSError, EOFError, ValueError, zlib.error) as why:
        raise UserError(f"line {number} of {path} cannot be read ({first_line(why)}): give text or "
                        "JSON lines in UTF-8") from None

def parsed(text, path=None, number=1):
    """JSON text -> its value; where it is none, a UserError, or None if no path is given."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as why:
        if path is None:
            return None
        line = number + getattr(why, "lineno", 1) - 1
        raise UserError(f"line {line} of {path} is no JSON: correct it, or name another "
                        "file") from None
    if "\\ud" in text.lower():
        # JSON may write half of a surrogate pair alone: it becomes U+FFFD.
        whole = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
        value = json.loads(whole.decode("utf-16", "replace"))
    return value

def rows_of(path):
    """Yield (number of its line, row) for the rows of a file.  A text is the row {"text": ...}."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".csv", ".tsv")):
        raise UserError(f"{path} is a table: make JSON lines of it, by pandas' "
                        "to_json(orient='records', lines=True) for example")
    lines, head = lines_of(path), ""
    for number, line in lines:
        head += line
        if line.strip():
            break
    first = parsed(head)
    if isinstance(first, dict) or name.endswith(JSON) and first is not None:
        yield number, first                              # JSON lines, read one after the other
        for number, line in lines:
            if line.strip():
                yield number, parsed(line, path, number)
        return
    whole = head + "".join(line for _, line in lines)
    if not name.endswith(JSON) and not isinstance(parsed(whole), (dict, list)):
        yield 1, {"text": whole}
    elif whole.strip():
        yield 1, parsed(whole, path)
