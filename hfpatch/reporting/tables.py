"""The report's tables as plain text in cells, ready for Markdown, HTML and the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from statistics import fmean

from hfpatch.reporting.numbers import (
    NOTHING,
    Change,
    Scale,
    change,
    count,
    decimal,
    diverged_text,
    memory,
    p_text,
    part_text,
    scale_of,
    score,
    signed,
    significant,
    told,
)
from hfpatch.reporting.results import Comparison, MethodOutcome, Results, Verdict

HOLM_MARK = "*"
"""Behind a difference, which stands after Holm's correction."""
FALLEN_MARK = "†"
"""Behind "within noise" where the test alone finds a difference, which falls to the correction."""


@dataclass(frozen=True)
class Cell:
    """What one method does on one task.

    Attributes:
        value: the mean over seeds of the primary metric; of the baseline with its standard error.
        difference: the difference to the baseline with its interval, empty for the baseline itself.
        verdict: the comparison's verdict, None where none was made.
        verdict_text: the verdict with its mark, empty where none was made.
    """

    value: str
    difference: str = ""
    verdict: Verdict | None = None
    verdict_text: str = ""


@dataclass(frozen=True)
class Row:
    """One method's line of the main table."""

    method: str
    trainable: str
    cells: tuple[Cell, ...]
    tokens_per_s: str
    peak_memory: str
    baseline: bool


@dataclass(frozen=True)
class Heading:
    """A task's column: its name, what is measured, on how much, and the unit of the differences."""

    task: str
    metric: str
    n: str
    better: str
    unit: str


@dataclass(frozen=True)
class MainTable:
    """Method × task."""

    headings: tuple[Heading, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class PairedRow:
    """One paired comparison, written out; after the bare verdict, the fields stand in the order of the columns."""

    verdict: Verdict
    method: str
    reference: str
    task: str
    metric: str
    verdict_text: str
    difference: str
    absolute: str
    p: str
    p_holm: str
    visible: str
    n: str
    seeds: str
    test: str


@dataclass(frozen=True)
class MethodRow:
    """What a method is and what it trains; the fields stand in the order of the columns."""

    method: str
    parts: str
    form: str
    matched: str
    trainable: str
    survival: str
    final_loss: str
    time: str


def scale_of_task(results: Results, task: str) -> Scale:
    """Return the scale of a task's primary metric."""
    info = results.tasks[task]
    return scale_of(info.primary, info.higher_is_better)


def told_change(results: Results, comparison: Comparison) -> Change:
    """Return a comparison's difference in the unit in which its metric is told."""
    info = results.tasks.get(comparison.task)
    higher = info.higher_is_better if info else True
    values = results.values(comparison.reference, comparison.task, comparison.metric) if info else []
    return change(
        comparison.difference,
        comparison.low,
        comparison.high,
        comparison.smallest_visible,
        scale=scale_of(comparison.metric, higher),
        reference=fmean(values) if values else None,
    )


def main_table(results: Results) -> MainTable:
    """Build the method × task table: mean over seeds, paired difference to the baseline, cost."""
    headings = tuple(_heading(results, task) for task in results.tasks)
    return MainTable(headings, tuple(_row(results, method) for method in results.methods.values()))


def paired_table(results: Results) -> list[PairedRow]:
    """Build the table of all paired comparisons, in the order in which they were made."""
    return [_paired(results, comparison) for comparison in results.comparisons]


def method_table(results: Results) -> list[MethodRow]:
    """Build the table of methods: parts, parameters, how they were matched, and how training went."""
    return [_method(method) for method in results.methods.values()]


def mean_of(method: MethodOutcome, field: str) -> float | None:
    """Return the mean over seeds of a field of the training outcome, or None where no seed has it."""
    values = [getattr(run.train, field) for run in method.runs.values() if run.train is not None]
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _heading(results: Results, task: str) -> Heading:
    info = results.tasks[task]
    better = "higher is better" if info.higher_is_better else "lower is better"
    return Heading(task, info.primary, count(info.n), better, unit_of(results, task))


def unit_of(results: Results, task: str) -> str:
    """Return the unit in which a task's differences are told."""
    units = {Scale.POINTS: "points", Scale.RELATIVE: "% of the baseline", Scale.RAW: "its own unit"}
    return units[scale_of_task(results, task)]


def _row(results: Results, method: MethodOutcome) -> Row:
    speed = mean_of(method, "tokens_per_s")
    return Row(
        method=method.name,
        trainable=count(method.trainable),
        cells=tuple(cell_of(results, method.name, task) for task in results.tasks),
        tokens_per_s=count(speed),
        peak_memory=memory(mean_of(method, "peak_memory_bytes")),
        baseline=method.name == results.baseline,
    )


def cell_of(results: Results, method: str, task: str) -> Cell:
    """Return what one method does on one task."""
    scale = scale_of_task(results, task)
    value = score(results.mean(method, task), scale)
    if method == results.baseline:
        return Cell(_with_error(results, method, task, value, scale))
    comparison = results.comparison(method, task, results.baseline)
    if comparison is None:
        diverged = results.methods[method].diverged
        return Cell(diverged_text(diverged) if diverged and value == NOTHING else value)
    return Cell(value, told(told_change(results, comparison), unit=False), comparison.verdict, _marked(comparison))


def _with_error(results: Results, method: str, task: str, value: str, scale: Scale) -> str:
    """Append the standard error over documents; seeds change nothing in it, so the first run's is taken."""
    metric = results.tasks[task].primary
    outcomes = (run.evaluation.get(task) for _, run in sorted(results.methods[method].runs.items()))
    errors = [outcome.stderr[metric] for outcome in outcomes if outcome is not None and metric in outcome.stderr]
    if not errors:
        return value
    if scale is Scale.POINTS:
        return f"{value.removesuffix(' %')} ± {decimal(100 * errors[0], 1)} %"
    return f"{value} ± {significant(errors[0], 2)}"


def _paired(results: Results, comparison: Comparison) -> PairedRow:
    change = told_change(results, comparison)
    visible = NOTHING if change.smallest_visible is None else significant(change.smallest_visible, 2)
    return PairedRow(
        method=comparison.method,
        reference=comparison.reference,
        task=comparison.task,
        metric=comparison.metric,
        difference=told(change),
        absolute=_signed_significant(_rounded(comparison)),
        n=count(comparison.n),
        seeds=count(comparison.seeds),
        test=comparison.test,
        p=p_text(comparison.p),
        p_holm=p_text(comparison.p_holm),
        visible=f"{visible} {change.scale.value}".strip() if change.smallest_visible is not None else visible,
        verdict=comparison.verdict,
        verdict_text=_marked(comparison),
    )


def _marked(comparison: Comparison) -> str:
    if comparison.verdict in ("better", "worse"):
        return comparison.verdict + HOLM_MARK
    return comparison.verdict + (FALLEN_MARK if comparison.falls_to_correction else "")


def _rounded(comparison: Comparison) -> float:
    """Return a difference, or 0 where it is nothing but rounding beside its interval."""
    width = comparison.high - comparison.low
    return 0.0 if abs(comparison.difference) < 1e-9 * width < inf else comparison.difference


def _signed_significant(value: float) -> str:
    text = significant(value, 3)
    return f"+{text}" if value > 0 else text


def _method(method: MethodOutcome) -> MethodRow:
    loss = mean_of(method, "final_loss")
    wall = mean_of(method, "wall_s")
    return MethodRow(
        method=method.name,
        parts=" + ".join(map(part_text, method.parts)) or "nothing: the frozen base",
        trainable=count(method.trainable),
        form=method.form or NOTHING,
        matched=_matched(method),
        survival=_survival(method),
        final_loss=NOTHING if loss is None else decimal(loss, 4),
        time=NOTHING if wall is None else f"{wall:,.1f} s",
    )


def _matched(method: MethodOutcome) -> str:
    match = method.match
    if match is None:
        return NOTHING
    share = match.parameters / match.target_parameters - 1 if match.target_parameters else 0.0
    return f"{match.to}: rank {match.rank}, {count(match.target_parameters)} asked ({signed(100 * share, 1)} %)"


def _survival(method: MethodOutcome) -> str:
    shares = lowest_survival([method])
    return NOTHING if shares is None else f"{decimal(100 * shares, 1)} %"


def lowest_survival(methods: Iterable[MethodOutcome]) -> float | None:
    """Return the lowest share of weights that an optimiser step really changed, over all runs and tensors."""
    trains = [run.train for method in methods for run in method.runs.values() if run.train is not None]
    shares = [share for train in trains for share in train.update_survival.values()]
    return min(shares) if shares else None
