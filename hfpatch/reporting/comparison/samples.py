"""The documents on which a method and the baseline part: who was right where the other was wrong.

Read from ``runs/<method>/seed-<s>/evaluations/<task>.jsonl``. Whatever a record holds beside the metrics (the target,
or the document itself where the evaluation kept it) is shown with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpatch.results.folder import printable
from hfpatch.results.schema import ComparisonResults

Record = Mapping[str, Any]

_IDENTITY = ("doc_id", "doc_hash")
_LISTED = 12_000
"""How many documents a page lists at most, over all methods and tasks."""
_FEWEST, _MOST = 4, 60
_LONGEST = 600
"""Characters of a field that are shown."""


@dataclass(frozen=True)
class Change:
    """A document on which a method differs from the baseline.

    Attributes:
        document: its key among the task's documents.
        gained: seeds that are right where the baseline is wrong; of a measure that is neither, the change of the
            document's value a unit (a word, say), the mean over seeds.
        lost: seeds that are wrong where the baseline is right.
    """

    document: str
    gained: float
    lost: float


@dataclass(frozen=True)
class Sides:
    """One method against the baseline on one task.

    Attributes:
        method: the method.
        task: the task.
        seeds: how many seeds of the method have records.
        documents: how many documents were compared.
        gained: documents that most seeds get right and the baseline wrong; None for a measure without right or wrong.
        lost: those that the baseline gets right and most seeds wrong.
        changes: those listed, the surest first.
        left_out: how many more changed.
    """

    method: str
    task: str
    seeds: int
    documents: int
    gained: int | None
    lost: int | None
    changes: tuple[Change, ...]
    left_out: int


@dataclass(frozen=True)
class Samples:
    """What changed sides, and the documents that are listed: task -> key -> field -> text."""

    sides: tuple[Sides, ...]
    documents: Mapping[str, Mapping[str, Mapping[str, str]]]
    missing: tuple[str, ...]


def read_samples(run_dir: Path, results: ComparisonResults) -> Samples:
    """Read the records of a run and compare every method with the baseline, document by document.

    A record that is missing or broken leaves out its seed; where none remains, it is named.
    """
    others = [name for name in results.methods if name != results.baseline]
    limit = max(_FEWEST, min(_MOST, _LISTED // max(1, len(others) * len(results.tasks))))
    sides: list[Sides] = []
    documents: dict[str, dict[str, dict[str, str]]] = {}
    missing: list[str] = []
    runs = run_dir / "runs"
    names = [path for path in sorted(runs.iterdir()) if path.is_dir()] if runs.is_dir() else []
    folders = {path.name: sorted(path.glob("seed-*/evaluations")) for path in names}
    for task in results.tasks if results.baseline is not None and folders else ():
        base = next((read for path in folders.get(results.baseline or "", []) if (read := _read(path, task))), None)
        if base is None:
            missing.append(f"{task}: no record of the baseline's documents, so none that changed sides can be shown.")
            continue
        scored = (run.evaluation.get(task) for method in results.methods.values() for run in method.runs.values())
        metrics = {name for score in scored if score is not None for name in score.metrics}
        for method in others:
            found = _sides(method, task, results, base, [_read(path, task) for path in folders.get(method, [])], limit)
            if found is not None:
                sides.append(found)
                shown = documents.setdefault(task, {})
                for change in found.changes:
                    shown.setdefault(change.document, _fields(base[change.document], metrics))
    return Samples(tuple(sides), documents, tuple(missing))


def _read(folder: Path, task: str) -> dict[str, Record] | None:
    """Return a task's records by document, None where there are none; a broken line is left out."""
    path = folder / f"{task}.jsonl"
    if "/" in task or not path.is_file():
        return None
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line]
    try:
        records = json.loads(f"[{','.join(lines)}]")  # much faster than line by line
    except json.JSONDecodeError:
        records = []
        for line in lines:
            with suppress(json.JSONDecodeError):
                records.append(json.loads(line))
    known = (record for record in records if isinstance(record, dict))
    return {f"{each.get('doc_id')}/{str(each.get('doc_hash'))[:12]}": each for each in known} or None


def _sides(
    method: str,
    task: str,
    results: ComparisonResults,
    base: Mapping[str, Record],
    runs: Sequence[Mapping[str, Record] | None],
    limit: int,
) -> Sides | None:
    metric = results.tasks[task].primary
    seeds = [run for run in runs if run]
    common = [key for key in base if seeds and all(key in run for run in seeds)]
    values = {key: [_value(base[key], metric), *(_value(run[key], metric) for run in seeds)] for key in common}
    known = {key: [v for v in found if v is not None] for key, found in values.items() if None not in found}
    if not known:
        return None
    binary = all(value in (0.0, 1.0) for found in known.values() for value in found)
    changes = _flips(known) if binary else _moves(known)
    half = len(seeds) / 2
    shown = changes[:limit]
    if not binary and len(changes) > limit:  # what rose most, and what fell most
        shown = [*changes[: limit // 2], *changes[-(limit // 2) :]]
    return Sides(
        method=method,
        task=task,
        seeds=len(seeds),
        documents=len(known),
        gained=sum(change.gained > half for change in changes) if binary else None,
        lost=sum(change.lost > half for change in changes) if binary else None,
        changes=tuple(shown),
        left_out=len(changes) - len(shown),
    )


def _value(record: Record, metric: str) -> float | None:
    """Return a document's value; of a pair (log-likelihood, count) the log-likelihood a unit."""
    value = record.get(metric)
    if isinstance(value, list) and len(value) == 2 and all(isinstance(part, int | float) for part in value):
        return float(value[0]) / value[1] if value[1] else None
    return float(value) if isinstance(value, int | float) else None


def _flips(known: Mapping[str, Sequence[float]]) -> list[Change]:
    """Return the documents that seeds turned from wrong to right or back, those of most seeds first."""
    found = []
    for key, (base, *seeds) in known.items():
        turned = sum(value != base for value in seeds)
        if turned:
            found.append(Change(key, 0, turned) if base else Change(key, turned, 0))
    return sorted(found, key=lambda change: -(change.gained + change.lost))


def _moves(known: Mapping[str, Sequence[float]]) -> list[Change]:
    """Return every document with its mean change, what rose most first."""
    moves = [Change(key, sum(seeds) / len(seeds) - base, 0.0) for key, (base, *seeds) in known.items()]
    return sorted((move for move in moves if move.gained), key=lambda move: -move.gained)


def _fields(record: Record, metrics: set[str]) -> dict[str, str]:
    """Return what a record says of its document, as text."""
    fields = {}
    for key, value in record.items():
        if key not in metrics and key not in _IDENTITY:
            text = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            fields[printable(str(key))] = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return fields
