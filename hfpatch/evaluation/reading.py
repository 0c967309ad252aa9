"""Reading the records of runs, document by document, for comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hfpatch.data.rows import number_groups
from hfpatch.errors import HfpatchError
from hfpatch.evaluation.clusters import Groups, count_groups
from hfpatch.evaluation.metrics import Metric
from hfpatch.results.parts import TaskResult
from hfpatch.results.records import TaskValues, hash_documents, read_lines, read_values


@dataclass
class Reader:
    """Reads the records of runs, each file once for all measures of a pair."""

    _values: dict[Path, dict[str, TaskValues]] = field(default_factory=dict)
    _groups: dict[tuple[str, str], Groups | None] = field(default_factory=dict)

    def read_runs(self, result: TaskResult, metric: Metric, runs: Sequence[Path]) -> dict[Path, Sequence[Any]]:
        """Return one task's values by run, and forget all other runs.

        All runs must have the same documents with the same weights.
        """
        self._values = {run: values for run, values in self._values.items() if run in runs}
        read: dict[Path, tuple[str, Any]] = {}
        for run in runs:
            if run not in self._values and metric.aggregate is None:
                self._values[run] = read_values(run)
            stored = self._values[run].get(result.task) if metric.aggregate is None else None
            if stored is not None and result.primary in stored.metrics:  # an array
                read[run] = (stored.documents, stored.metrics[result.primary])
            else:
                hashes, numbers = read_metric(run / f"{result.task}.jsonl", result.primary)
                read[run] = (hash_documents(hashes), numbers)
        first, (documents, values) = next(iter(read.items()))
        for run, (others, numbers) in read.items():
            same = others == documents
            if same and metric.weighted:
                mine, theirs = (np.asarray(pairs, dtype=np.float64)[:, 1] for pairs in (numbers, values))
                same = np.array_equal(mine, theirs)
            if not same:
                raise HfpatchError(
                    f"{run} and {first}: {result.task} was scored on other documents; evaluate both again"
                )
        return {run: numbers for run, (_, numbers) in read.items()}

    def read_groups(self, run: Path, result: TaskResult) -> Groups | None:
        """Return the group of each document, the same in all runs; None if every group has one document."""
        if result.clusters is None:
            return None
        stored = self._values.get(run, {}).get(result.task)
        key = (result.task, stored.documents if stored is not None else str(run))
        if stored is not None and stored.groups is not None:
            return stored.groups
        if key not in self._groups:
            names = read_metric(run / f"{result.task}.jsonl", "cluster")[1]
            groups = number_groups([name if isinstance(name, str) else None for name in names])
            self._groups[key] = groups if count_groups(groups) < len(groups) else None
        return self._groups[key]


def read_metric(path: Path, metric: str) -> tuple[list[str], list[Any]]:
    """Return the documents' hashes and their values of a metric; null is a value that was not finite."""
    try:
        rows = read_lines(path)
        return [row["doc_hash"] for row in rows], [math.nan if row[metric] is None else row[metric] for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HfpatchError(f"{path}: not a record of {metric} ({error!r}); evaluate this run again") from error
