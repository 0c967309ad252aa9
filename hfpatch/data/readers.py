"""Documents from local files: JSON Lines, JSON, CSV, plain text and parquet, compressed or not."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hfpatch.data.rows import Rows, parse_json
from hfpatch.errors import HfpatchError


def _open_zst(path: Path, _mode: str) -> Any:
    import pyarrow  # comes with datasets, and brings the decompressor

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


_OPENERS: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": _open_zst,
}
_KINDS = (".jsonl", ".json", ".csv", ".txt", ".parquet")
_LONGEST_FIELD = 2**31 - 1  # the largest limit on every system; csv's own, 128 KiB, is shorter than books
SUFFIXES = (*_KINDS, *(f"{kind}{ending}" for kind in _KINDS[:-1] for ending in _OPENERS))
"""The endings of the files that can be read."""
_SEPARATOR = re.compile(r"<\|[^|\s]+\|>")


def read_rows(path: Path, rows: Rows) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place, for messages, and the value of each row of a file; only .json is read into memory as a whole.

    Each line of .jsonl, each object of the list in a .json, each row of .csv (its first row has the names) and of
    .parquet is a document. A .txt file is split at lines that consist of a separator such as ``<|endoftext|>``; without
    such a line, each paragraph (blank lines between) is a document.

    Raises:
        HfpatchError: if the file is empty, not UTF-8, or not of its format; the message has the line.
    """
    if path.stat().st_size == 0:
        raise HfpatchError(f"{path}: the file is empty")
    kind = Path(path.stem).suffix if path.suffix in _OPENERS else path.suffix
    if kind == ".txt":
        if rows.format != "text":
            raise HfpatchError(f"{path}: a .txt file has no columns; data.format={rows.format} needs .jsonl or another")
        yield from ((str(path), {rows.columns[0]: text}) for text in _read_text(path))
    elif kind in (".csv", ".parquet"):
        yield from (_read_csv if kind == ".csv" else _read_parquet)(path, rows)
    else:
        yield from (read_json_lines if kind == ".jsonl" else _read_json)(path)


def _lines(path: Path, *, blank: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the 1-based number and the text of each line that is not ``blank``, without a byte-order mark."""
    number = 0
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                text = line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").decode("utf-8")
                if blank or text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise HfpatchError(f"{path}:{number}: not UTF-8 ({error.reason}); convert the file to UTF-8") from error
    except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise HfpatchError(f"{path}: cannot be read ({error})") from error


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place (path:line, for messages) and the object of each line of a .jsonl file, compressed or not.

    Raises:
        HfpatchError: if the file cannot be read, or a line is not UTF-8 or not one JSON object.
    """
    for number, line in _lines(path):
        where, wanted = f"{path}:{number}", "each line must be one JSON object"
        row = parse_json(line, f"{where}:", wanted)
        if not isinstance(row, dict):
            raise HfpatchError(f"{where}: is a JSON {type(row).__name__}; {wanted}")
        yield where, row


def _read_text(path: Path) -> Iterator[str]:
    separated = any(_SEPARATOR.fullmatch(line.rstrip()) for _, line in _lines(path))
    document: list[str] = []
    last = 0
    for number, line in _lines(path):
        blank, last = number - last - 1, number
        is_separator = separated and _SEPARATOR.fullmatch(line.rstrip())
        if document and (is_separator or (blank and not separated)):
            yield "\n".join(document)
            document = []
        if not is_separator:
            document += [""] * blank if document else []
            document.append(line.rstrip("\r\n"))
    if document:
        yield "\n".join(document)


def _read_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file with one JSON list; a file that begins with an object is read as JSON Lines."""
    _, first = next(_lines(path), (1, ""))
    if not first.lstrip().startswith("["):
        yield from read_json_lines(path)
        return
    rows = parse_json("".join(line for _, line in _lines(path)), f"{path}:", "it must be a list of objects")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise HfpatchError(f"{path}, row {number}: is a JSON {type(row).__name__}; each row must be an object")
        yield f"{path}, row {number}", row


def _read_csv(path: Path, rows: Rows) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a table with commas, whose fields may be quoted and then span lines."""
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader((line for _, line in _lines(path, blank=True)), strict=True)
    lines = filter(None, reader)  # without blank ones
    try:
        header = next(lines, [])
        if twice := [name for name in header if header.count(name) > 1 and rows.reads(name)]:
            raise HfpatchError(f"{path}:{reader.line_num}: several columns are called {twice[0]!r}; rename them")
        for row in lines:
            where = f"{path}:{reader.line_num}"
            if len(row) != len(header):
                raise HfpatchError(f"{where}: has {len(row)} fields, the first line {len(header)}; quote commas")
            yield where, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise HfpatchError(f"{path}:{reader.line_num}: not valid CSV ({error})") from error


def _read_parquet(path: Path, rows: Rows) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise HfpatchError(f"{path}: not a parquet file ({error})") from error
    columns = rows.select_columns(str(path), file.schema_arrow.names)
    try:
        every_row = (row for batch in file.iter_batches(columns=columns) for row in batch.to_pylist())
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(every_row, start=1))
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise HfpatchError(f"{path}: cannot be read ({error})") from error
