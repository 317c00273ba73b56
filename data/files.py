"""User-supplied files: JSON, JSON lines, text, packed or of the hub -> rows, one by one."""
import contextlib
import gzip
import importlib
import json
import re
from pathlib import Path

PIECE = 2 ** 16                                   # characters of a long text that are read at once


class UserError(ValueError):
    """A mistake of the user's, in one sentence."""


def first_line(why):
    """The first line of what an exception says."""
    return str(why).partition("\n")[0][:150]


# ---------------------------------------------------------------- a file's rows
def opened(path):
    """A file as text, .gz and .zst unpacked.  Only \\n ends a line, as JSON may hold U+2028."""
    how = {"encoding": "utf-8", "newline": "\n"}
    if path.suffix == ".gz":
        return gzip.open(path, "rt", **how)
    if path.suffix != ".zst":
        return open(path, **how)
    for reader in ("zstandard", "compression.zstd"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(reader).open(path, "rt", **how)
    raise UserError(f"{path} cannot be read: pip install zstandard")


def parse(line):
    """JSON -> what it says, or None."""
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(line)


def hub_rows(path):
    """Rows of a parquet file, or of the hub's OWNER/NAME or OWNER/NAME:CONFIGURATION."""
    try:
        import datasets
    except ImportError:
        what = "is no file here, maybe a data set of the hub"
        if path.suffix == ".parquet":
            what = "is parquet"
        raise UserError(f"{path} {what}: pip install datasets, or give JSON lines or "
                        "text") from None
    if path.suffix == ".parquet":
        return datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    name, _, configuration = str(path).partition(":")
    return datasets.load_dataset(name, configuration or None, split="train", streaming=True)


class Piece(str):
    """A piece of a long text: whether the text begins and ends with it."""
    first, last = True, True


def pieces_of_text(file):
    """Yield the text of an open file in pieces of some PIECE characters, of whole lines."""
    waiting = None                                       # the last piece that is not blank
    while True:
        text = file.read(PIECE) + file.readline()
        if not text:
            break
        if not text.strip():
            continue
        piece = Piece(text)
        if waiting is not None:
            waiting.last = piece.first = False
            yield waiting
        waiting = piece
    if waiting is not None:
        yield waiting


def check_file(path):
    """Refuse a pipe, which would wait for ever, and can be read once only."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is no file: write to a file what it gives, and name that")


def stream_rows(path):
    """Yield the rows of a file: of JSON, None for a bad line; of any other, its text in pieces."""
    path = Path(path)
    check_file(path)
    try:
        if path.suffix == ".parquet" or not path.exists():
            yield from hub_rows(path)
            return
        with opened(path) as file:
            if ".json" not in path.name:
                yield from pieces_of_text(file)
                return
            lines = file
            if ".jsonl" not in path.name:
                # One list or row; or, whatever the name says, a row a line
                text = file.read()
                lines = text.split("\n") if parse(text) is None else [text]
            for line in filter(str.strip, lines):
                row = parse(line)
                yield from row if isinstance(row, list) else [row]
    except Exception as why:
        if isinstance(why, UserError):
            raise
        raise UserError(f"{path} cannot be read as text or JSON lines ({type(why).__name__}): mend "
                        "it, or name another file") from None


def read_rows(path):
    """All rows of a file, as a list: none may be bad."""
    rows = list(stream_rows(path))
    if None in rows:
        bad = 1 + rows.index(None)
        raise UserError(f"{path} cannot be read as text or JSON lines (row {bad}): mend it, or "
                        "name another file")
    return rows


def files_of(paths, flag):
    """All files of files and folders, in order, none hidden; names of the hub as they are."""
    for path in map(Path, paths):
        check_file(path)
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                names = file.relative_to(path).parts
                hidden = any(name.startswith(".") for name in names)
                if file.is_file() and not hidden:
                    yield file
        elif path.exists() or re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?", str(path)):
            yield path
        else:
            raise UserError(f"{flag}: {path} does not exist")
