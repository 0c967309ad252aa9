"""The numbers of an evaluation's records in one file, so that comparisons of very many runs read little.

``evaluations/<task>.jsonl`` has a line for each document: its text and every metric. ``evaluations/values.safetensors``
has the metrics alone, as arrays. It follows from the records and is left out of account where they have changed since.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hfpatch.support.files import atomic_file

VALUES = "values.safetensors"
IDENTITY = ("doc_id", "doc_hash", "target", "doc", "cluster")
"""What a record has beside its metrics."""
_HEADER = "tasks"  # the one key of the file's metadata: several would be written in an order that varies

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TaskValues:
    """The metrics of one run on one task.

    Attributes:
        documents: the hash of the documents and their order, see `hash_documents`.
        metrics: each metric's values, (documents,), or (documents, 2) of pairs; NaN where one was not finite.
    """

    documents: str
    metrics: Mapping[str, Array]


def hash_documents(hashes: Iterable[str]) -> str:
    """Return the SHA-256 of documents in their order, from the hash of each."""
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def read_lines(path: Path) -> list[Any]:
    """Return the JSON value of each line of a file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if a line is not JSON.
    """
    lines = _lines(path.read_text(encoding="utf-8"))
    values = _at_once(lines)
    return [json.loads(line) for line in lines] if values is None else values


def read_whole_lines(path: Path) -> list[Any]:
    """Return the JSON value of each line that is whole; half-written ones are left out, and a missing file has none."""
    lines = _lines(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else []
    values = _at_once(lines)
    if values is None:
        values = []
        for line in lines:
            with suppress(json.JSONDecodeError):
                values.append(json.loads(line))
    return values


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line]  # text of documents may have other line ends


def _at_once(lines: Sequence[str]) -> list[Any] | None:
    """Return the JSON value of each line, much faster than line by line; None where one is no whole value."""
    try:
        values: list[Any] = json.loads(f"[{','.join(lines)}]")
    except json.JSONDecodeError:
        return None
    return values if len(values) == len(lines) else None


def write_values(folder: Path, tasks: Iterable[str]) -> None:
    """Write the numbers of the records of some tasks; what is neither a number nor a pair of them is left out."""
    tensors: dict[str, Array] = {}
    header: dict[str, Any] = {}
    for task in tasks:
        path = folder / f"{task}.jsonl"
        rows = read_lines(path)
        found = {
            key: _array([row.get(key) for row in rows]) for key in (rows[0] if rows else ()) if key not in IDENTITY
        }
        names = {key: f"{len(header)}.{place}" for place, key in enumerate(found)}
        tensors |= {names[key]: values for key, values in found.items() if values is not None}
        header[task] = {
            "bytes": path.stat().st_size,
            "documents": hash_documents(row["doc_hash"] for row in rows),
            "metrics": {key: name for key, name in names.items() if name in tensors},
        }
    with atomic_file(folder / VALUES) as temporary:
        save_file(tensors, temporary, metadata={_HEADER: json.dumps(header)})


def _array(values: Sequence[Any]) -> Array | None:
    """Return numbers, or pairs of numbers, as an array, None as NaN; None where they are anything else."""
    try:
        found = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return found if found.ndim == 1 or found.shape[1:] == (2,) else None


def read_values(folder: Path) -> dict[str, TaskValues]:
    """Return the values of each task whose records are as they were when the values were written.

    There are none where the file is missing, as in folders of earlier versions, or cannot be read.
    """
    try:
        with safe_open(folder / VALUES, framework="numpy") as file:
            header = json.loads(file.metadata()[_HEADER])
            return {
                task: TaskValues(each["documents"], {key: file.get_tensor(n) for key, n in each["metrics"].items()})
                for task, each in header.items()
                if (folder / f"{task}.jsonl").stat().st_size == each["bytes"]
            }
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError):
        return {}
