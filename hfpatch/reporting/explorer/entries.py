"""What the explorer shows of one run: a gain of one method on one task, and what it cost.

A gain is the difference to the run's own reference with the sign that makes better positive, in the unit in which the
run's report gives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hfpatch.reporting.comparison.changes import change_of
from hfpatch.reporting.comparison.tables import mean_of
from hfpatch.reporting.evaluation import value_text
from hfpatch.reporting.numbers import Change, Scale, change, change_text, diverged_text, scale_of, signed
from hfpatch.reporting.study.answer import change_of as change_of_study
from hfpatch.reporting.study.words import not_run_text
from hfpatch.results.held_out import HELD_OUT
from hfpatch.results.identity import FREE_SETTINGS, base_identity, task_identity
from hfpatch.results.low_noise import LOW_NOISE
from hfpatch.results.schema import (
    Comparison,
    ComparisonResults,
    EvaluationResults,
    Results,
    StudyResults,
    Task,
    TaskResult,
    TrainResult,
)
from hfpatch.support.files import hash_values

NOT_TESTED, NO_VERDICT = "not tested", "no verdict"
UNTESTED = "held-out text"
"""What the loss on held-out text is called where only its mean is known, as in results of older versions."""


@dataclass(frozen=True)
class Axis:
    """What gains must have in common to share an axis.

    Attributes:
        task: the task.
        metric: its metric, with spaces.
        unit: the unit of the gains.
        model: the name of the frozen base; of a study what it pretrains.
        identity: what distinguishes models of one name: hash, dtype, and a hash of all else that is known of it.
        documents: what was scored, in words.
        data: the hash of it.
        prompts: the hash of what the model was asked and how answers were scored; of an older run, which does not say
            that, the hash of its settings.
        reference: what the gains are differences to.
        size: what is counted as parameters.
        primary: whether it is the measure that decides the task.
    """

    task: str
    metric: str
    unit: str
    model: str
    identity: str = ""
    documents: str = ""
    data: str = ""
    prompts: str = ""
    reference: str = "the base"
    size: str = "trainable parameters"
    primary: bool = True


@dataclass(frozen=True)
class Entry:
    """One method on one axis; what was not measured is None.

    Attributes:
        axis: what it is measured on.
        method: the method, variant, patch or model.
        gain: the gain; above 0 is better.
        low: the lower end of its 95 % interval; likewise ``high``.
        text: gain and interval in words, or why there is none.
        verdict: what the corrected test says; measures that decide nothing have none.
        parameters: how many it trains or adds.
        seconds: of a training, the mean over seeds.
        memory: the peak in bytes, likewise.
        seeds: how many seeds are behind it.
    """

    axis: Axis
    method: str
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    text: str = ""
    verdict: str = NOT_TESTED
    parameters: int | None = None
    seconds: float | None = None
    memory: float | None = None
    seeds: int | None = None


def entries(results: Results) -> list[Entry]:
    """Return every gain over the reference that results have, and one without a number for each that is missing."""
    match results:
        case ComparisonResults():
            return [*_tasks(results), *_held_out(results)]
        case StudyResults():
            return list(_variants(results))
        case EvaluationResults():
            return list(_evaluated(results))


def _identity(model: Mapping[str, Any]) -> str:
    name = f"{str(model.get('sha256') or model.get('revision') or '')[:12]} {model.get('dtype') or ''}".strip()
    rest = {key: value for key, value in base_identity(model).items() if key not in ("base_weights", "dtype") and value}
    return f"{name} {hash_values(rest)[:8]}" if rest else name


def _of_prompts(info: Task | TaskResult, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what axes of one task and other prompts, metrics or code are told apart by."""
    asked = {name: value for name, value in task_identity(info).items() if name != "data_sha256"}
    if all(asked.values()):
        return {"prompts": f"prompts {hash_values(asked)[:8]}"}
    kept = {
        key: value for key, value in settings.items() if key not in FREE_SETTINGS and value not in (None, False, {})
    }
    return {"prompts": f"prompts not recorded, settings {hash_values(kept)[:8]}"}


def _tasks(results: ComparisonResults) -> Iterator[Entry]:
    """Yield the comparisons with the baseline: by the measures that decide, then by all others."""
    decided = [(task, measure.metric) for task, measure in results.deciding.items()]
    made = [(each.task, each.metric) for each in results.comparisons if each.reference == results.baseline]
    for task, metric in dict.fromkeys([*decided, *(pair for pair in made if pair[0] in results.tasks)]):
        axis = _axis(results, task, metric)
        for name in results.others:
            compared = results.comparison(name, task, str(results.baseline), metric)
            if compared is not None:
                yield _compared(results, axis, compared)
            elif axis.primary:
                yield _missing(results, axis, name)


def _axis(results: ComparisonResults, task: str, metric: str) -> Axis:
    info = results.tasks[task]
    return Axis(
        **_of_metric(task, metric, results.deciding[task].metric, info.higher_is_better),
        **_of_documents(info),
        **_of_prompts(info, results.evaluation),
        model=str(results.model.get("name") or "unknown"),
        identity=_identity(results.model),
    )


def _of_metric(task: str, metric: str, deciding: str, higher_is_better: bool) -> dict[str, Any]:
    higher = LOW_NOISE.get(metric, higher_is_better)
    unit = {Scale.POINTS: "points", Scale.RELATIVE: "% lower"}.get(scale_of(metric, higher), "its own unit")
    return {"task": task, "metric": metric.replace("_", " "), "unit": unit, "primary": metric == deciding}


def _of_documents(info: Task | TaskResult) -> dict[str, Any]:
    groups = f" in {info.clusters.groups:,} groups" if info.clusters else ""
    return {"documents": f"{info.n:,} documents{groups}", "data": (info.data_sha256 or "")[:12]}


def _compared(results: ComparisonResults, axis: Axis, compared: Comparison) -> Entry:
    info, found = results.tasks[compared.task], results.verdict(compared.method, compared.task, compared.reference)
    higher = LOW_NOISE.get(compared.metric, info.higher_is_better)
    change = change_of(results, found if axis.primary and found else compared, plain=not axis.primary)
    return Entry(
        axis,
        compared.method,
        **_gain(change, higher),
        verdict=found.verdict if axis.primary and found else NO_VERDICT,
        seeds=compared.seeds,
        **_cost(results, compared.method),
    )


def _gain(found: Change, higher: bool = True) -> dict[str, Any]:
    """Return a difference as a gain: turned round where lower is better."""
    if not higher:
        found = Change(-found.difference, -found.high, -found.low, found.smallest_visible, found.scale)
    ends = [end if math.isfinite(end) else None for end in (found.low, found.high)]
    mean = f"{signed(found.difference, 2)} {found.scale.value}".rstrip()
    text = change_text(found) if None not in ends else f"{mean}, no interval"
    return {"gain": found.difference, "low": ends[0], "high": ends[1], "text": text}


def _cost(results: ComparisonResults, name: str) -> dict[str, Any]:
    method = results.methods[name]
    return {
        "parameters": method.trainable,
        "seconds": mean_of(method, "wall_s"),
        "memory": mean_of(method, "peak_memory_bytes"),
    }


def _missing(results: ComparisonResults, axis: Axis, name: str) -> Entry:
    """Return an entry without a gain, which says why there is none."""
    method = results.methods[name]
    lost, unfinished = method.all_diverged, "not compared" if method.runs else "not finished"
    why, verdict = (diverged_text(method.diverged), "diverged") if lost else (unfinished, NOT_TESTED)
    return Entry(axis, name, text=why, verdict=verdict, seeds=len(method.runs), **_cost(results, name))


def _held_out(results: ComparisonResults) -> Iterator[Entry]:
    """Yield what each method saves of the base's loss on held-out text, where no test was made of it."""
    base, text = results.base_loss, results.data.get("held_out") or {}
    if base is None or HELD_OUT in results.tasks:
        return
    axis = Axis(
        task=UNTESTED,
        metric="loss",
        unit="nats per token",
        model=str(results.model.get("name") or "unknown"),
        identity=_identity(results.model),
        documents=f"{text['documents']:,} documents" if isinstance(text.get("documents"), int) else "",
        data=str(text.get("sha256") or "")[:12],
    )
    for name in results.others:
        losses = results.methods[name].held_out_losses
        if losses:
            gain = base - fmean(losses.values())
            yield Entry(axis, name, gain, text=f"{signed(gain, 4)} nats per token, no interval", seeds=len(losses),
                        **_cost(results, name))  # fmt: skip
        else:
            yield _missing(results, axis, name)


def _variants(study: StudyResults) -> Iterator[Entry]:
    """Yield each variant at its best point."""
    text = study.evaluation_data or study.data
    axis = Axis(
        task="validation loss",
        metric="improvement",
        unit="% lower",
        model=f"pretrained in {study.name}" if study.name else "pretrained",
        documents=f"{text['tokens']:,} tokens" if isinstance(text.get("tokens"), int) else "",
        data=str(text.get("sha256") or "")[:12],
        reference=study.baseline,
        size="non-embedding parameters",
    )
    for name in study.others:
        row = study.chosen.get(name)
        runs = [] if row is None else [run.train for run in study.runs_of(row) if run.train is not None]
        found = Entry(
            axis,
            name,
            text="not compared",
            parameters=study.variants[name].parameters.non_embedding,
            **_means(runs),
        )
        if row is None or row.improvement is None:
            why = (
                "" if row is None else diverged_text(row.diverged) or (not_run_text(row.missing) if row.missing else "")
            )
            lost = row is not None and bool(row.diverged)
            yield _with(found, text=why or found.text, verdict="diverged" if lost else NOT_TESTED)
            continue
        gain = _gain(change_of_study(study, name))
        yield _with(found, **gain, verdict=study.verdict(name).verdict, seeds=len(study.seed_values(row)) or None)


def _with(entry: Entry, **values: Any) -> Entry:
    return Entry(**{**vars(entry), **values})


def _means(trained: list[TrainResult]) -> dict[str, Any]:
    if not trained:
        return {}
    return {
        "seconds": fmean(each.wall_s for each in trained),
        "memory": fmean(each.peak_memory_bytes for each in trained),
    }


def _evaluated(results: EvaluationResults) -> Iterator[Entry]:
    """Yield the comparisons of ``hfpatch eval``, of patches with the base, of whole models with each other.

    What was compared with nothing has an entry for each primary score, without a gain.
    """
    yield from _scored(results)
    decided = {(each.method, each.other, each.task, each.metric): each for each in results.verdicts}
    for compared in results.comparisons:
        variant, reference = (results.variants.get(name) for name in (compared.method, compared.reference))
        score = variant.scores.get(compared.task) if variant is not None else None
        if variant is None or score is None:
            continue
        base = reference.scores[compared.task].metrics.get(compared.metric) if reference is not None else None
        higher = LOW_NOISE.get(compared.metric, score.higher_is_better)
        found = decided.get((compared.method, compared.reference, compared.task, compared.metric))
        ends = (compared.low, compared.high) if found is None else (found.simultaneous_low, found.simultaneous_high)
        known = change(compared.difference, *ends, None, scale=scale_of(compared.metric, higher), reference=base)
        size = (variant.model or {}).get("parameters") if results.of_models else variant.added
        yield Entry(
            _evaluated_axis(results, compared.task, compared.metric, score, compared.reference, found is not None),
            compared.method,
            **_gain(known, higher),
            verdict=NO_VERDICT if found is None else found.verdict,
            parameters=size if isinstance(size, int) else None,
        )


def _scored(results: EvaluationResults) -> Iterator[Entry]:
    """Yield the primary scores of what was compared with nothing."""
    known = {name for each in results.comparisons for name in (each.method, each.reference)}
    for label in [name for name in results.variants if name not in known]:
        variant = results.variants[label]
        for task, score in variant.scores.items():
            value, error = score.metrics[score.primary], score.stderr.get(score.primary)
            text = f"{value_text(value)}{f' ± {value_text(error)}' if error is not None else ''}, compared with nothing"
            axis = _evaluated_axis(results, task, score.primary, score, "", decides=True)
            yield Entry(axis, label, text=text, parameters=variant.added)


def _evaluated_axis(
    results: EvaluationResults, task: str, metric: str, score: TaskResult, reference: str, decides: bool
) -> Axis:
    """Return the axis of a metric of one of the models on a task, relative to a reference."""
    compared = results.variants.get(reference)
    model = (compared.model if compared is not None else None) or results.model
    return Axis(
        **_of_metric(task, metric, metric if decides else "", score.higher_is_better),
        **_of_documents(score),
        **_of_prompts(score, results.settings),
        model=str(model.get("name")),
        identity=_identity(model),
        reference=reference if results.of_models else "the base",
        size="parameters of the model" if results.of_models else "trainable parameters",
    )
