"""Documents from local files: JSON Lines, plain text and parquet, compressed or not."""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError, nearest

_OPENERS: dict[str, Callable[[Path, str], Any]] = {".gz": gzip.open, ".xz": lzma.open}
_KINDS = (".jsonl", ".txt", ".parquet")
_SEPARATOR = re.compile(r"<\|[^|\s]+\|>")


def is_readable(path: Path) -> bool:
    """Whether :func:`read_documents` knows the file type of ``path``."""
    return _kind(path) in _KINDS


def read_documents(path: Path, *, text_column: str) -> Iterator[str]:
    """Yield the documents of one file, in order, one in memory at a time.

    Each line of .jsonl and each row of .parquet is a document. A .txt file is split at lines with nothing but a
    separator such as ``<|endoftext|>``; without such a line, each paragraph (blank lines between) is a document. Rows
    whose text is null are left out, with a warning.

    Raises:
        HfpatchError: if the file is empty, not UTF-8, not JSON, lacks the column or has only nulls; the message has the
            line.
    """
    if path.stat().st_size == 0:
        raise HfpatchError(f"{path}: the file is empty")
    kind = _kind(path)
    if kind == ".jsonl":
        yield from texts_of(read_json_lines(path), text_column, str(path))
    else:
        yield from _read_text(path) if kind == ".txt" else _read_parquet(path, text_column)


def texts_of(rows: Iterable[tuple[str, dict[str, Any]]], text_column: str, source: str) -> Iterator[str]:
    """Yield the text of each row; rows whose text is null are left out, with a warning.

    Args:
        rows: the place of each row, for messages, and the row.
        text_column: the column of the text.
        source: the name of the source, for messages.

    Raises:
        HfpatchError: if the column of a row is missing or no text, with the place; or if every row's text is null.
    """
    found, skipped = False, 0
    try:
        for place, row in rows:
            if (text := _text_of(row, text_column, place)) is None:
                skipped += 1
            else:
                found = True
                yield text
    finally:
        if found and skipped:
            warnings.warn(f"{source}: left out {skipped} rows whose {text_column!r} is null", stacklevel=1)
    if skipped and not found:
        raise HfpatchError(f"{source}: column {text_column!r} is null in every row; set data.text_column")


def _text_of(row: dict[str, Any], text_column: str, place: str) -> str | None:
    if text_column not in row:
        raise missing_column(place, text_column, list(row))
    text = row[text_column]
    if text is None:
        return None
    if not isinstance(text, str):
        raise HfpatchError(f"{place}: column {text_column!r} is {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise HfpatchError(
            f"{place}: column {text_column!r} has half a surrogate pair (\\u{ord(text[error.start]):04x}, character "
            f"{error.start + 1}), which is not valid Unicode; correct or remove the row"
        ) from error
    return text


def missing_column(place: str, text_column: str, columns: list[str]) -> HfpatchError:
    """Return the error of a missing column, with the columns that exist."""
    found = ", ".join(columns) or "none"
    hint = nearest(text_column, columns)
    return HfpatchError(f"{place}: no column {text_column!r}{hint}; the columns are: {found}; set data.text_column")


def _kind(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in _OPENERS else path.suffix


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the 1-based number and the text of each line that is not blank, without a byte-order mark."""
    number = 0
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                text = line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").decode("utf-8")
                if text.strip():
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
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            reason = getattr(error, "msg", "nested too deeply")
            raise HfpatchError(f"{place}: not valid JSON ({reason}); each line must be one JSON object") from error
        if not isinstance(row, dict):
            raise HfpatchError(f"{place}: is a JSON {type(row).__name__}; each line must be one JSON object")
        yield place, row


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


def _read_parquet(path: Path, text_column: str) -> Iterator[str]:
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise HfpatchError(f"{path}: not a parquet file ({error})") from error
    if text_column not in file.schema_arrow.names:
        raise missing_column(str(path), text_column, file.schema_arrow.names)
    batches = (batch.to_pylist() for batch in file.iter_batches(columns=[text_column]))
    yield from texts_of(((str(path), row) for rows in batches for row in rows), text_column, str(path))
