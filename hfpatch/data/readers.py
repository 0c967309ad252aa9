"""Documents from local files: JSON Lines, plain text and parquet, compressed or not."""

from __future__ import annotations

import gzip
import json
import lzma
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError, nearest

_COMPRESSED = (".gz", ".xz")
_KINDS = (".jsonl", ".txt", ".parquet")
_SEPARATOR = re.compile(r"<\|[^|\s]+\|>")


def is_readable(path: Path) -> bool:
    """Whether the name of ``path`` is one that :func:`read_documents` knows."""
    return _kind(path) in _KINDS


def read_documents(path: Path, *, text_column: str) -> Iterator[str]:
    """Yield the documents of one file, in order, one in memory at a time.

    A line of .jsonl and a row of .parquet is a document. A .txt file is split at lines that hold nothing but a
    separator such as ``<|endoftext|>``; without such a line, each paragraph (blank lines between) is a document.

    Raises:
        HfpatchError: if the file is empty, not UTF-8, not JSON or lacks the column; the line is named.
    """
    if path.stat().st_size == 0:
        raise HfpatchError(f"{path}: the file is empty")
    reader = {".jsonl": _read_jsonl, ".txt": _read_text, ".parquet": _read_parquet}[_kind(path)]
    yield from reader(path, text_column)


def text_of(row: Any, text_column: str, place: str) -> str:
    """Return a row's text.

    Raises:
        HfpatchError: naming ``place`` if the row is no object, or its column is missing or no text.
    """
    if not isinstance(row, dict):
        raise HfpatchError(f"{place}: a JSON {type(row).__name__}; each line must be one JSON object")
    if text_column not in row:
        raise missing_column(place, text_column, list(row))
    text = row[text_column]
    if not isinstance(text, str):
        raise HfpatchError(f"{place}: column {text_column!r} holds {type(text).__name__}, not text")
    return text


def missing_column(place: str, text_column: str, columns: list[str]) -> HfpatchError:
    """Build the error that says which columns there are instead."""
    found = ", ".join(columns) or "none"
    hint = nearest(text_column, columns)
    return HfpatchError(f"{place}: no column {text_column!r}{hint}; the columns are: {found}; set data.text_column")


def _kind(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix


def _open(path: Path) -> AbstractContextManager[Iterable[bytes]]:
    if path.suffix == ".gz":
        return gzip.GzipFile(path)
    return lzma.LZMAFile(path) if path.suffix == ".xz" else path.open("rb")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the 1-based number and the text of each line that is not blank."""
    number = 0
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, start=1):
                text = line.decode("utf-8")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise HfpatchError(f"{path}:{number}: not UTF-8 ({error.reason}); convert the file to UTF-8") from error
    except (lzma.LZMAError, EOFError, OSError) as error:
        raise HfpatchError(f"{path}: cannot be read ({error})") from error


def _read_jsonl(path: Path, text_column: str) -> Iterator[str]:
    for number, line in _lines(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise HfpatchError(f"{path}:{number}: not JSON ({error.msg}); each line must be one JSON object") from error
        yield text_of(row, text_column, f"{path}:{number}")


def _read_text(path: Path, text_column: str) -> Iterator[str]:
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


def _read_parquet(path: Path, text_column: str) -> Iterator[str]:
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise HfpatchError(f"{path}: not a parquet file ({error})") from error
    if text_column not in file.schema_arrow.names:
        raise missing_column(str(path), text_column, file.schema_arrow.names)
    for batch in file.iter_batches(columns=[text_column]):
        for text in batch.column(0).to_pylist():
            yield text_of({text_column: text}, text_column, str(path))
