"""The explorer's entries of one run: the gain and the cost of one method on one task.

A gain is the difference to the run's own reference, in the unit of the run's report, with better above 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hfpatch.reporting.evaluation import value_text
from hfpatch.reporting.numbers import (
    Change,
    Scale,
    change,
    change_of,
    change_text,
    diverged_text,
    outcome_of,
    scale_of,
    signed_size,
)
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.evaluation import EvaluationResults
from hfpatch.results.folder import Results
from hfpatch.results.identity import base_identity, task_identity
from hfpatch.results.low_noise import LOW_NOISE
from hfpatch.results.parts import Task
from hfpatch.support.files import hash_values

NOT_TESTED, NO_VERDICT = "not tested", "no verdict"


@dataclass(frozen=True)
class Axis:
    """The key of an axis: gains on one axis agree in all of it."""

    task: str
    metric: str
    unit: str
    model: str  # the name of the frozen base; of a study the study's
    identity: str = ""  # of models of one name: hash, dtype, and a hash of all else that is recorded
    documents: str = ""  # in words
    data: str = ""  # their hash
    prompts: str = ""  # the hash of prompts and scoring
    reference: str = "the base"
    size: str = "trainable parameters"
    primary: bool = True  # whether the metric decides the task


@dataclass(frozen=True)
class Entry:
    """One method, variant, patch or model on one axis; values that were not measured are None."""

    axis: Axis
    method: str
    gain: float | None = None  # above 0 is better
    low: float | None = None
    high: float | None = None
    text: str = ""  # gain and interval in words, or why there is none
    verdict: str = NOT_TESTED  # of the corrected test; measures that decide nothing have none
    parameters: int | None = None  # trained or added
    seconds: float | None = None  # of a training, the mean over seeds
    memory: float | None = None  # the peak in bytes, the mean over seeds
    seeds: int | None = None


def entries(results: Results) -> list[Entry]:
    """Return every gain over the reference that results have, and one without a number for each that is missing."""
    match results:
        case ComparisonResults():
            return list(_compared(results))
        case EvaluationResults():
            return list(_evaluated(results))


def _axis(
    task: str,
    metric: str,
    info: Task,
    model: Mapping[str, Any],
    **options: Any,
) -> Axis:
    """Return the axis of a metric of a task; other prompts, metrics or code of the task are another axis."""
    higher = LOW_NOISE.get(metric, info.higher_is_better)
    unit = {Scale.POINTS: "points", Scale.RELATIVE: "% lower"}.get(scale_of(metric, higher))
    weights = f"{str(model.get('sha256') or model.get('revision') or '')[:12]} {model.get('dtype') or ''}".strip()
    rest = {key: value for key, value in base_identity(model).items() if key not in ("base_weights", "dtype") and value}
    asked = {name: value for name, value in task_identity(info).items() if name != "data_sha256"}
    return Axis(
        task=task,
        metric=metric.replace("_", " "),
        unit=unit or "its own unit",
        model=str(model.get("name") or "unknown"),
        identity=f"{weights} {hash_values(rest)[:8]}" if rest else weights,
        documents=f"{info.n:,} documents{f' in {info.clusters.groups:,} groups' if info.clusters else ''}",
        data=info.data_sha256[:12],
        prompts=f"prompts {hash_values(asked)[:8]}",
        **options,
    )


def _compared(results: ComparisonResults) -> Iterator[Entry]:
    """Yield the comparisons with the baseline: by the measures that decide, by all others, and on held-out text."""
    model, of_study = results.model, dict[str, str]()
    if results.study is not None:
        model = {"name": f"pretrained in {results.name}"}
        of_study = {"reference": results.study.baseline, "size": "non-embedding parameters"}
    decided = [(task, measure.metric) for task, measure in results.deciding.items()]
    made = [(pair.task, pair.metric) for pair in results.comparisons if pair.reference == results.baseline]
    for task, metric in dict.fromkeys([*decided, *(pair for pair in made if pair[0] in results.tasks)]):
        info, primary = results.tasks[task], metric == results.deciding[task].metric
        axis = _axis(task, metric, info, model, primary=primary, **of_study)
        for name in results.others:
            method, compared = results.methods[name], results.comparison(name, task, str(results.baseline), metric)
            seconds, memory = method.mean("wall_s"), method.mean("peak_memory_bytes")
            cost: dict[str, Any] = {"parameters": method.compared_size, "seconds": seconds, "memory": memory}
            if compared is not None:
                judged = results.verdict(name, task, compared.reference) if primary else None
                higher = LOW_NOISE.get(metric, info.higher_is_better)
                shown = judged or compared  # with looks the one that decided, which may have fewer seeds
                gain = _gain(change_of(results, shown, plain=not primary), higher)
                gain["text"] += outcome_of(judged).rates if judged else ""
                verdict = judged.tone if judged else NO_VERDICT
                yield Entry(axis, name, **gain, verdict=verdict, seeds=shown.seeds, **cost)
            elif primary and method.all_diverged:
                lost = diverged_text(method.diverged)
                yield Entry(axis, name, text=lost, verdict="diverged", seeds=len(method.runs), **cost)
            elif primary:
                why = "not compared" if method.runs else "not finished"
                yield Entry(axis, name, text=why, seeds=len(method.runs), **cost)


def _gain(difference: Change, higher: bool = True) -> dict[str, Any]:
    """Return a difference as a gain: turned round where lower is better."""
    difference = difference if higher else difference.turned
    gain, *ends = (
        number if math.isfinite(number) else None for number in (difference.difference, difference.low, difference.high)
    )
    text = change_text(difference) if None not in ends else f"{signed_size(difference)} (no interval)"
    return {"gain": gain, "low": ends[0], "high": ends[1], "text": text}


def _evaluated(results: EvaluationResults) -> Iterator[Entry]:
    """Yield the comparisons of ``hfpatch eval``, of patches with the base, of whole models with each other.

    Models without a comparison have an entry for each primary score, without a gain.
    """
    decided = {(*verdict.pair, verdict.task, verdict.metric): verdict for verdict in results.verdicts}
    made = {(*pair.pair, pair.task, pair.metric): pair for pair in results.comparisons}
    compared_models = {name for method, reference, *_ in made for name in (method, reference)}
    alone = [
        (label, "", task, score.primary)
        for label, variant in results.variants.items()
        for task, score in variant.scores.items()
        if label not in compared_models
    ]
    for key in (*alone, *made):
        label, reference, task, metric = key
        one, other = results.variants.get(label), results.variants.get(reference)
        if one is None or task not in one.scores:
            continue
        score, compared, judged = one.scores[task], made.get(key), decided.get(key)
        axis = _axis(
            task,
            metric,
            score,
            (other.model if other is not None else None) or results.model,
            reference=reference if results.of_models else "the base",
            size="parameters of the model" if results.of_models else "trainable parameters",
            primary=compared is None or judged is not None,
        )
        if compared is None:
            value, error = score.metrics[metric], score.stderr.get(metric)
            text = f"{value_text(value)}{f' ± {value_text(error)}' if error is not None else ''}, compared with nothing"
            yield Entry(axis, label, text=text, parameters=one.added)
            continue
        base = other.scores[task].metrics.get(metric) if other is not None else None
        higher = LOW_NOISE.get(metric, score.higher_is_better)
        ends = (compared.low, compared.high) if judged is None else (judged.corrected_low, judged.corrected_high)
        gain = change(compared.difference, *ends, scale=scale_of(metric, higher), reference=base)
        size = (one.model or {}).get("parameters") if results.of_models else one.added
        yield Entry(
            axis,
            label,
            **_gain(gain, higher),
            verdict=NO_VERDICT if judged is None else judged.tone,
            parameters=size if isinstance(size, int) else None,
        )
