"""What a complete comparison would have and this one does not, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hfpatch.results.folder import printable
from hfpatch.results.schema import ComparisonResults


def missing(results: ComparisonResults) -> list[str]:
    """Name the runs, scores, curves and comparisons that are not there."""
    return list(_missing(results))


def _missing(results: ComparisonResults) -> Iterator[str]:
    if not results.complete:
        yield "The run is not complete: the same hfpatch compare with --resume finishes it."
    if not results.methods:
        yield "No method has a result."
    if not results.tasks:
        yield "No task has a result."
    for name, method in results.methods.items():
        if not method.runs:
            yield f"{name}: no run is finished."
            continue
        for seed in results.seeds if method.parts else ():
            if seed not in method.runs:
                yield f"{name}: no finished run with seed {seed}."
        for seed, run in sorted(method.runs.items()):
            scored = {task: score.metrics for task, score in run.evaluation.items()}
            tasks = [task for task, info in results.tasks.items() if info.primary not in scored.get(task, {})]
            if tasks and run.diverged_step is None:
                yield f"{name}, seed {seed}: no result on {', '.join(tasks)}."
    if results.tasks and len(results.methods) > 1 and not results.comparisons:
        yield "No paired comparison was made."
    for name, method in results.methods.items():
        if method.curve is None and any(run.train for run in method.runs.values()):
            yield f"{name}: no training curve (metrics.jsonl)."


def unknown_runs(run_dir: Path, results: ComparisonResults) -> list[str]:
    """Name the runs in the folder that do not belong to the results."""
    runs = run_dir / "runs"
    names = sorted(printable(path.name) for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
    return [
        f"runs/{name}: not a method of these results, so it is left out."
        for name in names
        if name not in results.methods
    ]
