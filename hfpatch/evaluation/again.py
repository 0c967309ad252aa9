"""A comparison decided again, by the rules of today, from the values that its folder keeps of every document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hfpatch.evaluation.comparison import compare
from hfpatch.evaluation.exchange import frontier_of
from hfpatch.evaluation.reading import Records
from hfpatch.evaluation.retention import compare_points, kept_of
from hfpatch.recipes.questions import HELD_OUT
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.folder import load_results
from hfpatch.results.parts import Comparison, task_results
from hfpatch.results.records import published_runs, published_trials
from hfpatch.results.retention import Retention
from hfpatch.results.tuning import Tuning
from hfpatch.results.verdicts import LookTaken


def compare_again(folder: str | Path) -> ComparisonResults:
    """Compute the differences and verdicts of a comparison again, from ``values.safetensors`` in its folder.

    ``folder`` is that of ``hfpatch compare`` or of a study of ``hfpatch pretrain``, or a published copy, without the
    runs' folders or a model. Differences by measures that are no mean or ratio of the documents' values, such as BLEU,
    stay as they are, and so do exchange rates by them.

    Returns:
        The results with ``comparisons``, ``retention``, ``kept``, ``frontier`` and the losses of ``tuning`` computed
        again, and their verdicts.

    Raises:
        HfpatchError: if the folder has no results or no values.
    """
    folder = Path(folder)
    results = load_results(folder)
    records = Records(published_runs(folder), results.base or "")
    if results.baseline is None:
        return results
    comparisons, retention = _differences(results, records, results.comparisons)
    kept = None
    if (base := results.base) is not None:
        scores = results.scores_of(results.methods[base].runs[0])
        kept = kept_of(records, results.others, scores, comparisons)
    looks = results.looks and [_look_again(results, records, look) for look in results.looks]
    update: dict[str, Any] = {"comparisons": comparisons, "kept": kept, "retention": retention, "looks": looks}
    update["tuning"] = results.tuning and _tuning_again(results.tuning, published_trials(folder), base)
    before, results = results, results.model_copy(update=update)
    frontier = before.frontier
    if frontier is None or (frontier.task, frontier.metric) not in _no_ratios(before.comparisons):
        frontier = frontier_of(results, records) if comparisons else None
    return results.model_copy(update={"frontier": frontier})


def _no_ratios(comparisons: Sequence[Comparison]) -> set[tuple[str, str]]:
    """Return the tasks with a measure by which their score is no ratio: its function is not in the folder."""
    return {(one.task, one.metric) for one in comparisons if one.reference_score is None and not one.log_ratio}


def _tuning_again(tuning: Tuning, losses: Mapping[str, list[float | None]], base: str | None) -> Tuning:
    """Return the trials with their losses, and that of the base, as far as these are kept."""
    by_method = {method: iter(values) for method, values in losses.items()}
    trials = [
        trial.model_copy(update={"loss": next(by_method[trial.method])}) if trial.method in by_method else trial
        for trial in tuning.trials
    ]
    return tuning.model_copy(update={"trials": trials, "base_loss": losses.get(base or "", [tuning.base_loss])[0]})


def _differences(
    results: ComparisonResults, records: Records, before: Sequence[Comparison]
) -> tuple[list[Comparison], Retention | None]:
    """Return the differences of all pairs and what changed on retained texts; what cannot be computed is ``before``."""
    references: dict[str, dict[str, None]] = {}
    for comparison in results.comparisons:
        references.setdefault(comparison.method, {})[comparison.reference] = None
    methods = [results.methods[name] for name in (results.baseline or "", *results.methods)]
    scored = (run for method in methods for run in method.runs.values() if run.evaluation)
    scores = next(map(results.scores_of, scored), {})
    compared = compare(records, scores, references, left_out=_no_ratios(before))
    made = {(one.method, one.reference, one.task, one.metric): one for one in (*before, *compared)}
    if results.retention is None:
        return list(made.values()), None
    texts = task_results(results.retention.scored, results.methods[records.baseline].runs[0].retention or {})
    points = compare_points(results.retention.points, records, texts, scores.get(HELD_OUT))
    return list(made.values()), results.retention.model_copy(update={"points": points})


def _look_again(results: ComparisonResults, records: Records, look: LookTaken) -> LookTaken:
    """Return a look with its differences computed again, from the seeds that it had."""
    finished = {name: {seed: runs[seed] for seed in runs if seed < look.seeds} for name, runs in records.runs.items()}
    comparisons, retention = _differences(results, replace(records, runs=finished), look.comparisons)
    asked = {(one.method, one.reference, one.task) for one in look.comparisons}
    computed = results.model_copy(update={"comparisons": comparisons, "retention": retention})
    return look.model_copy(update={"comparisons": computed.compared_in(asked)})
