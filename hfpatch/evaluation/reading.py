"""Reading the records of runs, document by document, for comparisons."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hfpatch.data.rows import number_groups
from hfpatch.errors import HfpatchError
from hfpatch.evaluation.clusters import Groups
from hfpatch.evaluation.metrics import Aggregation, Metric, metric_of
from hfpatch.recipes.retention import task_of
from hfpatch.results.parts import TaskResult
from hfpatch.results.records import TaskValues, hash_documents, read_lines, read_values


class Pair(NamedTuple):
    """A method, its reference, and their runs; ``paired`` if these have the same seeds in the same order."""

    method: str
    reference: str
    ours: list[Path]
    theirs: list[Path]
    paired: bool = True

    def test(self, one_seed: str, kind: str = "t") -> str:
        """Return the name of the test of these runs."""
        if not self.paired:
            return f"{kind} over documents (paired) and seeds (not paired)"
        return f"paired {kind} over seeds and documents" if len(self.ours) > 1 else one_seed


@dataclass(frozen=True)
class Records:
    """The records of a comparison's runs; each file is read once for all measures of a pair.

    Attributes:
        runs: for each method and seed the folder with ``<task>.jsonl`` records.
        baseline: the reference without training, which has one run; "" where there is none.
        aggregations: each task's own functions from documents to a score, by metric; by default that of its name.
    """

    runs: Mapping[str, Mapping[int, Path]]
    baseline: str = "baseline"
    aggregations: Mapping[str, Mapping[str, Aggregation]] = field(default_factory=dict)
    _values: dict[Path, dict[str, TaskValues]] = field(default_factory=dict, init=False)
    _groups: dict[tuple[str, str], Groups] = field(default_factory=dict, init=False)

    def metric(self, result: TaskResult) -> Metric:
        """Return the primary metric of a result."""
        return metric_of(result, self.aggregations.get(result.task, {}))

    def pairs(self, references: Mapping[str, Collection[str]]) -> Iterator[Pair]:
        """Yield each method with each of its references; none with a method without runs.

        The baseline has no seed: its one run is paired with every seed of a method. Other runs are paired by the seeds
        that both have. If they share fewer than two, as when seeds of one diverged, all runs are used and only
        documents are paired.
        """
        for method, reference in [(method, other) for method, others in references.items() for other in others]:
            by_seed = (self.runs.get(method, {}), self.runs.get(reference, {}))
            if not all(by_seed):
                continue
            shared = sorted(set(by_seed[0]) & set(by_seed[1]))
            ours, theirs = ([runs[seed] for seed in sorted(runs)] for runs in by_seed)
            alone = reference == self.baseline or len(ours) == len(theirs) == 1
            if not alone and len(shared) > 1:
                ours, theirs = ([runs[seed] for seed in shared] for runs in by_seed)
            yield Pair(method, reference, ours, theirs, paired=alone or len(shared) > 1)

    def read_runs(self, result: TaskResult, runs: Sequence[Path]) -> dict[Path, Sequence[Any]]:
        """Return the values of a result's primary metric by run, and forget all other runs.

        Raises:
            HfpatchError: if a record is missing or broken, or the runs have other documents or weights.
        """
        metric = self.metric(result)
        for run in self._values.keys() - set(runs):
            del self._values[run]
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
                same = np.array_equal(np.asarray(numbers, np.float64)[:, 1], np.asarray(values, np.float64)[:, 1])
            if not same:
                raise HfpatchError(
                    f"{run} and {first}: {result.task} was scored on other documents; evaluate both again"
                )
        return {run: numbers for run, (_, numbers) in read.items()}

    def read_groups(self, run: Path, result: TaskResult) -> Groups | None:
        """Return the group of each document, the same in all runs; None if every group has one document."""
        if result.clusters is None or result.clusters.groups == result.n:
            return None
        stored = self._values.get(run, {}).get(result.task)
        key = (result.task, stored.documents if stored is not None else str(run))
        if stored is not None and stored.groups is not None:
            return stored.groups
        if key not in self._groups:
            names = read_metric(run / f"{result.task}.jsonl", "cluster")[1]
            self._groups[key] = number_groups([name if isinstance(name, str) else None for name in names])
        return self._groups[key]


def read_metric(path: Path, metric: str) -> tuple[list[str], list[Any]]:
    """Return the documents' hashes and their values of a metric; null is a value that was not finite."""
    try:
        if rows := read_lines(path):
            return [row["doc_hash"] for row in rows], [math.nan if row[metric] is None else row[metric] for row in rows]
        cause, reason = None, "it is empty"
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause, reason = error, repr(error)
    is_of_run = path.parent.name == "evaluations"  # and not beside its scores, at a scale of rewind
    name = "retention.json" if is_of_run and path.stem.startswith(task_of("")) else "result.json"
    scores = path.parents[is_of_run] / name
    remedy = f"delete {scores} and use --resume" if scores.is_file() else "evaluate again"
    raise HfpatchError(f"{path}: not a record of {metric} ({reason}); {remedy}") from cause
