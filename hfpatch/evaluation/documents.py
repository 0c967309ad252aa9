"""Reading a local file of evaluation documents, one JSON object a line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError


def read_documents(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Return the documents of a ``.jsonl`` or ``.jsonl.gz`` file, each cut down to ``fields``.

    Raises:
        HfpatchError: if the file is missing, unreadable or empty, or a row is not UTF-8, not a JSON object or lacks a
            field; the message holds the row's number, counted from 1.
    """
    if not path.is_file():
        raise HfpatchError(f"{path}: no such data file; put it there or leave out the data folder to use the hub")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            rows = [(row, line) for row, line in enumerate(stream, start=1) if line.strip()]
    except (OSError, EOFError, zlib.error) as error:
        raise HfpatchError(f"{path}: cannot be read ({error})") from error
    if not rows:
        raise HfpatchError(f"{path}: holds no documents; give a file with one JSON object a line")
    return [_document(line, fields, f"{path}, row {row}") for row, line in rows]


def _document(line: bytes, fields: Sequence[str], where: str) -> dict[str, Any]:
    try:
        document = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise HfpatchError(f"{where}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise HfpatchError(f"{where}: not JSON ({error}); write one JSON object a line") from None
    if not isinstance(document, dict):
        raise HfpatchError(f"{where}: holds a {type(document).__name__}; write one JSON object a line")
    missing = [field for field in fields if field not in document]
    if missing:
        raise HfpatchError(f"{where}: no field {missing[0]!r}; it needs {', '.join(fields)}")
    return {field: document[field] for field in fields}
