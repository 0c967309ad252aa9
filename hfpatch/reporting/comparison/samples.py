"""The documents that a method gets right and the baseline wrong, and the reverse.

Read from ``runs/<method>/seed-<s>/evaluations/<task>.jsonl``. Fields of a record other than metrics, such as the target
or the document, are shown with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from hfpatch.errors import listed
from hfpatch.recipes.questions import HELD_OUT
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.records import TaskValues, read_lines, read_values
from hfpatch.support.files import printable

Record = Mapping[str, Any]

_IDENTITY = ("doc_id", "doc_hash")
_LISTED = 12_000  # documents on a page at most, over all methods and tasks
_FEWEST, _MOST = 4, 60
_LONGEST = 600  # characters of a field


@dataclass(frozen=True)
class Change:
    """A document, by its key, on which a method differs from the baseline.

    ``gained`` seeds are right where the baseline is wrong, ``lost`` ones the reverse; of a measure that is neither,
    ``gained`` is the change of the document's value a unit (a word, say), the mean over seeds.
    """

    document: str
    gained: float
    lost: float


@dataclass(frozen=True)
class Sides:
    """One method against the baseline on one task."""

    method: str
    task: str
    seeds: int  # of the method, that have records
    documents: int  # that were compared
    gained: int | None  # that most seeds get right and the baseline wrong; None for a measure without right or wrong
    lost: int | None
    changes: tuple[Change, ...]  # the listed documents, the surest first
    left_out: int  # how many more changed


@dataclass(frozen=True)
class Samples:
    """The sides, and the listed documents: task -> key -> field -> text."""

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
    runs = run_dir / "runs"
    names = [path for path in sorted(runs.iterdir()) if path.is_dir()] if runs.is_dir() else []
    folders = {path.name: sorted(path.glob("seed-*/evaluations")) for path in names}
    bases: dict[str, _Run] = {}
    shown = [task for task in results.tasks if task != HELD_OUT]  # whose records have no text
    if results.baseline is None or not folders:
        shown = []
    for task in shown:
        base_runs = (_Run(path) for path in folders.get(results.baseline or "", []))
        if (base := next((run for run in base_runs if run.records(task)), None)) is not None:
            bases[task] = base
    absent = [task for task in shown if task not in bases]
    missing = f"No record of the baseline's documents of {listed(absent)}, so none that changed sides can be shown."
    for method in others:
        runs_of_method = [_Run(path) for path in folders.get(method, [])]
        compared = (_sides(method, task, results, base, runs_of_method, limit) for task, base in bases.items())
        sides += [side for side in compared if side is not None]
    sides.sort(key=lambda side: list(bases).index(side.task))
    # the fields of every document that is listed
    scored = [run.evaluation for method in results.methods.values() for run in method.runs.values()]
    metrics = {task: {name for scores in scored if task in scores for name in scores[task].metrics} for task in bases}
    documents: dict[str, dict[str, dict[str, str]]] = {}
    for side in sides:
        fields, records = documents.setdefault(side.task, {}), bases[side.task].records(side.task)
        for key in (change.document for change in side.changes if change.document not in fields):
            fields[key] = {}
            for name, value in records[key].items():
                if name not in metrics[side.task] and name not in _IDENTITY:
                    text = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
                    fields[key][printable(str(name))] = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return Samples(tuple(sides), documents, (missing,) if absent else ())


@dataclass
class _Run:
    """The records of one run, as they are asked for."""

    folder: Path
    _records: dict[str, dict[str, Record]] = field(default_factory=dict)

    @cached_property
    def values(self) -> dict[str, TaskValues]:
        """The numbers of its tasks, of those where they are known without reading the records."""
        return read_values(self.folder)

    def records(self, task: str) -> dict[str, Record]:
        """Return a task's records by document."""
        if task not in self._records:
            path = self.folder / f"{task}.jsonl"
            lines = read_lines(path, skip_broken=True) if "/" not in task else ()
            whole = [line for line in lines if isinstance(line, dict)]  # a broken line is left out
            self._records[task] = {f"{line.get('doc_id')}/{str(line.get('doc_hash'))[:12]}": line for line in whole}
        return self._records[task]

    def scores(self, task: str, metric: str, base: _Run) -> dict[str, float | None]:
        """Return the score of each document: from arrays if these are of the base's documents, else from records."""
        documents, values, of_base = base.records(task), self.values.get(task), base.values.get(task)
        if values is not None and of_base is not None and values.documents == of_base.documents:
            array = values.metrics.get(metric)
            if array is not None and len(array) == len(documents):
                return dict(zip(documents, map(_score, array.tolist()), strict=True))
        return {key: _score(record.get(metric)) for key, record in self.records(task).items()}


def _score(value: Any) -> float | None:
    """Return a document's score, of a pair (log-likelihood, count) their ratio; None if it is not finite."""
    if isinstance(value, list) and len(value) == 2 and all(isinstance(part, int | float) for part in value):
        value = value[0] / value[1] if value[1] else None
    return float(value) if isinstance(value, int | float) and isfinite(value) else None


def _sides(
    method: str, task: str, results: ComparisonResults, base: _Run, runs: Sequence[_Run], limit: int
) -> Sides | None:
    """Compare a method with the baseline on a task; None where all its runs diverged."""
    metric = results.tasks[task].primary
    by_run = [scores for run in (base, *runs) if (scores := run.scores(task, metric, base))]
    seeds = len(by_run) - 1
    rows = ((key, [scores.get(key) for scores in by_run]) for key in base.records(task))
    values_of = {key: [score for score in row if score is not None] for key, row in rows if None not in row}
    if not values_of or not seeds:
        return None
    binary = all(value in (0.0, 1.0) for row in values_of.values() for value in row)
    changes = []
    for key, (base_value, *others) in values_of.items():
        turned, move = sum(value != base_value for value in others), fmean(others) - base_value
        if binary and turned:
            changes.append(Change(key, 0, turned) if base_value else Change(key, turned, 0))
        elif not binary and move:
            changes.append(Change(key, move, 0.0))
    changes.sort(key=lambda change: -(change.gained + change.lost))  # most seeds, or the largest rise, first
    shown = changes[:limit]
    if not binary and len(changes) > limit:  # the largest rises and falls
        shown = [*changes[: limit // 2], *changes[-(limit // 2) :]]
    return Sides(
        method=method,
        task=task,
        seeds=seeds,
        documents=len(values_of),
        gained=sum(change.gained > seeds / 2 for change in changes) if binary else None,
        lost=sum(change.lost > seeds / 2 for change in changes) if binary else None,
        changes=tuple(shown),
        left_out=len(changes) - len(shown),
    )
