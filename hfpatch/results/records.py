"""The numbers of evaluations' records as arrays: of one run, and of all runs of a comparison.

``evaluations/<task>.jsonl`` has a line for each document: its text and every metric. ``evaluations/values.safetensors``
has the metrics alone, so that comparisons of very many runs read little. It follows from the records and is left out of
account where they have changed since.

``values.safetensors`` beside ``results.json`` has the values for the paired tests of a comparison, without any text: a
tensor ``<method>/<task>/<metric>``, (seeds, documents), and the documents' weights once. Where methods are tuned,
``<method>/tuning_text/nats_per_token``, (trials, documents), has the log-likelihoods of the documents of tuning's text
by trial, in the order of ``tuning.trials``, NaN where one diverged, and that of the baseline those of the base. With it
a run folder can be published without its runs, and every interval, and what the choice of a rate may be worth, still be
computed again (:func:`hfpatch.evaluation.compare_again`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hfpatch.errors import HfpatchError
from hfpatch.results.parts import NATS_PER_TOKEN
from hfpatch.support.files import atomic_file

VALUES = "values.safetensors"
IDENTITY = ("doc_id", "doc_hash", "target", "doc", "cluster")
"""The keys of a record beside its metrics."""
_GROUPS, _WEIGHTS = "/groups", "/weights"  # no method is called so
_HEADER = "tasks"  # the one key of the file's metadata: several would be written in an order that varies

_OF_TRIALS = f"tuning_text/{NATS_PER_TOKEN}"

Array = NDArray[np.float64]
DocumentLosses: TypeAlias = list[list[float]]
"""(documents, 2) nats and predicted tokens of each document."""


@dataclass(frozen=True)
class TaskValues:
    """The metrics of one run on one task.

    Attributes:
        documents: the hash of the documents and their order, see `hash_documents`.
        metrics: each metric's values, (documents,), or (documents, 2) of pairs; NaN where one was not finite.
        groups: the group of each document, where documents come in groups and the records are not there.
    """

    documents: str
    metrics: Mapping[str, Array]
    groups: NDArray[np.int64] | None = None


def hash_documents(hashes: Iterable[str]) -> str:
    """Return the SHA-256 of documents in their order, from the hash of each."""
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def read_lines(path: Path, *, skip_broken: bool = False) -> list[Any]:
    """Return the JSON value of each line of a file.

    With ``skip_broken``, lines that are half-written are left out, and a missing file has none.

    Raises:
        OSError: if it cannot be read.
        ValueError: if a line is not JSON.
    """
    if skip_broken and not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace" if skip_broken else "strict")
    lines = [line for line in text.split("\n") if line]  # text of documents may have other line ends
    with suppress(json.JSONDecodeError):  # all at once, which is much faster
        values: list[Any] = json.loads(f"[{','.join(lines)}]")
        if len(values) == len(lines):
            return values
    values = []
    for line in lines:
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError:
            if not skip_broken:
                raise
    return values


def write_values(folder: Path, tasks: Iterable[str]) -> None:
    """Write the numbers of the records of some tasks; other values are left out."""
    tensors: dict[str, Array] = {}
    header: dict[str, Any] = {}
    for task in tasks:
        path = folder / f"{task}.jsonl"
        rows = read_lines(path)
        for metric in [key for key in (rows[0] if rows else ()) if key not in IDENTITY]:
            with suppress(TypeError, ValueError):  # neither numbers nor pairs of numbers, None as NaN
                values = np.array([row.get(metric) for row in rows], dtype=np.float64)
                if values.ndim == 1 or values.shape[1:] == (2,):
                    tensors[f"{task}/{metric}"] = values
        documents = hash_documents(row["doc_hash"] for row in rows)
        header[task] = {"bytes": path.stat().st_size, "documents": documents}
    with atomic_file(folder / VALUES) as temporary:
        save_file(tensors, temporary, metadata={_HEADER: json.dumps(header)})


def read_values(folder: Path) -> dict[str, TaskValues]:
    """Return the values of each task whose records are as they were when the values were written.

    For a run without a folder of records, return those in its comparison's file. A file that cannot be read has none.
    """
    try:
        if folder.is_dir():
            with safe_open(folder / VALUES, framework="numpy") as file:
                header = json.loads(file.metadata()[_HEADER])
                of_tasks: dict[str, dict[str, Array]] = {task: {} for task in header}
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    task, _, metric = name.partition("/")
                    of_tasks[task][metric] = file.get_tensor(name)  # no such task: a file of another layout
                return {
                    task: TaskValues(stored["documents"], of_tasks[task])
                    for task, stored in header.items()
                    if (folder / f"{task}.jsonl").stat().st_size == stored["bytes"]
                }

        # A row of each tensor in the comparison's file, see `write_published`
        out, method, seed = folder.parents[3], folder.parents[1].name, int(folder.parent.name.removeprefix("seed-"))
        with safe_open(out / VALUES, framework="numpy") as file:
            header, names = json.loads(file.metadata()[_HEADER]), set(file.keys())
            row = header["seeds"][method].index(seed)
            by_task = {}
            for task, documents in header["documents"].items():
                metrics, groups = {}, f"{_GROUPS}/{task}"
                for name in names:
                    if name.startswith(f"{method}/{task}/"):
                        metric = name.removeprefix(f"{method}/{task}/")
                        values = np.asarray(file.get_tensor(name)[row], dtype=np.float64)
                        if values.ndim == 1 and (weights := f"{_WEIGHTS}/{task}/{metric}") in names:
                            values = np.stack([values, file.get_tensor(weights)], axis=-1)
                        metrics[metric] = values
                by_task[task] = TaskValues(documents, metrics, file.get_tensor(groups) if groups in names else None)
            return by_task
    except (OSError, SafetensorError, KeyError, IndexError, TypeError, ValueError, AttributeError):
        return {}


def write_published(
    out: Path,
    records: Mapping[str, Mapping[int, Path]],
    measures: Iterable[tuple[str, str]],
    groups: Mapping[str, NDArray[np.int64]],
    trials: Mapping[str, Sequence[DocumentLosses | None]] | None = None,
) -> None:
    """Write the values of a comparison's runs into its folder, without values that are not numbers.

    Args:
        out: the run folder.
        records: for each method and seed the folder of its records.
        measures: the tasks and metrics that were compared.
        groups: the group of each document, for tasks whose documents come in groups.
        trials: by method the losses of its trials on the documents of tuning's text, None where one diverged; by the
            baseline's name those of the base.
    """
    tensors: dict[str, NDArray[Any]] = {f"{_GROUPS}/{task}": values for task, values in groups.items()}
    documents: dict[str, str] = {}
    measures = list(dict.fromkeys(measures))
    tasks = dict.fromkeys(task for task, _ in measures)
    for run in [run for runs in records.values() for run in runs.values()]:
        if run.is_dir() and not read_values(run):  # damaged, or of another layout
            write_values(run, [task for task in tasks if (run / f"{task}.jsonl").is_file()])
    for method, runs in records.items():
        read = [read_values(runs[seed]) for seed in sorted(runs)]
        for task, metric in measures:
            if not all(task in values and metric in values[task].metrics for values in read):
                continue
            documents[task] = read[0][task].documents
            values, weights = np.stack([run[task].metrics[metric] for run in read]), f"{_WEIGHTS}/{task}/{metric}"
            if values.ndim == 3 and (values[..., 1] == tensors.setdefault(weights, values[0, :, 1])).all():
                values = values[..., 0]
            right_or_wrong = bool(np.isin(values, (0.0, 1.0)).all())
            tensors[f"{method}/{task}/{metric}"] = values.astype(np.uint8) if right_or_wrong else values
    measured = [losses for of_method in (trials or {}).values() for losses in of_method if losses is not None]
    for method, of_method in (trials or {}).items() if measured else ():
        missing = np.full((len(measured[0]), 2), np.nan)
        tensors[f"{method}/{_OF_TRIALS}"] = -np.array([losses or missing for losses in of_method])[..., 0]
        tensors[f"{_WEIGHTS}/{_OF_TRIALS}"] = np.array(measured[0])[:, 1]
    header = {"documents": documents, "seeds": {method: sorted(runs) for method, runs in records.items()}}
    tensors = {name: np.ascontiguousarray(values) for name, values in tensors.items()}  # save_file ignores strides
    with atomic_file(out / VALUES) as temporary:
        save_file(tensors, temporary, metadata={_HEADER: json.dumps(header)})


def loss_of(losses: DocumentLosses) -> float:
    """Return nats per token over all documents, each token weighing the same."""
    nats, tokens = np.sum(losses, axis=0).tolist()
    return float(nats / tokens)


def published_trials(out: Path) -> dict[str, list[float | None]]:
    """Return the losses on tuning's text that a comparison's file has: of the base, and of each method's trials.

    None is a trial that diverged; there is nothing where a comparison was not tuned.
    """
    with safe_open(out / VALUES, framework="numpy") as file:
        names = [name for name in file.keys() if name.endswith(f"/{_OF_TRIALS}")]  # noqa: SIM118 - not a mapping
        tokens = [file.get_tensor(name).sum() for name in names if name.startswith(_WEIGHTS)]
        nats = {name.removesuffix(f"/{_OF_TRIALS}"): -file.get_tensor(name).sum(axis=-1) for name in names}
    return {
        method: [None if np.isnan(total) else float(total / tokens[0]) for total in sums]
        for method, sums in nats.items()
        if method != _WEIGHTS
    }


def published_runs(out: Path) -> dict[str, dict[int, Path]]:
    """Return the folder that the records had, for each method and seed in a comparison's file.

    Raises:
        HfpatchError: if there is no such file, or it is damaged.
    """
    try:
        with safe_open(out / VALUES, framework="numpy") as file:
            seeds = json.loads(file.metadata()[_HEADER])["seeds"]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise HfpatchError(f"{out / VALUES}: no values of a comparison ({error}); run it again") from error
    return {
        method: {seed: out / "runs" / method / f"seed-{seed}" / "evaluations" for seed in of_method}
        for method, of_method in seeds.items()
    }
