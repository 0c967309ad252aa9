"""The tables of a comparison: methods × tasks, the methods, every paired difference, what changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean, stdev

from hfpatch.reporting.comparison.samples import Sides
from hfpatch.reporting.document import Cell, Column, Filter, Row, Table
from hfpatch.reporting.floor import LEVELS, level_at, shown_verdict
from hfpatch.reporting.numbers import (
    NOTHING,
    Change,
    Scale,
    change,
    change_text,
    count,
    decimal,
    diverged_text,
    documents_text,
    memory,
    p_text,
    part_text,
    scale_of,
    score,
    signed,
    significant,
)
from hfpatch.reporting.words import FALLEN_MARK, HOLM_MARK
from hfpatch.results.held_out import HELD_OUT
from hfpatch.results.low_noise import LOW_NOISE
from hfpatch.results.schema import Comparison, ComparisonResults, Method

_VERDICTS = ("better", "worse", "within noise", "too few documents", *LEVELS)
_UNITS = {Scale.POINTS: "points", Scale.RELATIVE: "% of the baseline", Scale.RAW: "its own unit"}
_FAMILIES = {
    "methods and tasks": "Holm's correction goes over all comparisons with the baseline, and apart from them over all "
    "others. ",
    "methods and tasks, LoRAs apart": "Holm's correction goes over all comparisons with the baseline, apart from them "
    "over all with a LoRA, and apart from both over all others. ",
}
"""What Holm's correction goes over, by the name of it in results; in the earliest ones over ``tasks``."""


def scale_of_task(results: ComparisonResults, task: str) -> Scale:
    """Return the scale of a task's primary metric."""
    info = results.tasks[task]
    return scale_of(info.primary, info.higher_is_better)


def unit_of(results: ComparisonResults, task: str) -> str:
    """Return the unit in which a task's differences are reported."""
    return _UNITS[scale_of_task(results, task)]


def change_of(results: ComparisonResults, comparison: Comparison) -> Change:
    """Return a comparison's difference in the unit in which its metric is reported."""
    info = results.tasks.get(comparison.task)
    values = results.values(comparison.reference, comparison.task, comparison.metric) if info else []
    return change(
        comparison.difference,
        comparison.low,
        comparison.high,
        comparison.smallest_visible,
        scale=scale_of(comparison.metric, LOW_NOISE.get(comparison.metric, info.higher_is_better if info else True)),
        reference=fmean(values) if values else None,
    )


def main_table(results: ComparisonResults) -> Table:
    """Build the table of methods and tasks: mean over seeds, paired difference to the baseline, verdict, cost."""
    scores, shown = score_table(results), list(results.methods)
    costs = [(mean_of(results.methods[name], "tokens_per_s"), mean_of(results.methods[name], "peak_memory_bytes"))
             for name in shown]  # fmt: skip
    return replace(
        scores,
        columns=(*scores.columns, Column("tokens/s", number=True), Column("peak memory", number=True)),
        rows=tuple(
            replace(row, cells=(*row.cells, count(speed), memory(peak)))
            for row, (speed, peak) in zip(scores.rows, costs, strict=True)
        ),
    )


def score_table(results: ComparisonResults) -> Table:
    """Build the main table without cost."""
    held_out = held_out_column(results)
    over = "the tasks of a method" if results.correction == "tasks" else "all methods and tasks of this table"
    return Table(
        name="main",
        title="Results by method and task",
        columns=(
            *(Column("method"), Column("trainable", number=True), *([held_out] if held_out else [])),
            *(_task(results, task) for task in results.tasks),
        ),
        rows=tuple(_row(results, name, with_loss=held_out is not None) for name in results.methods),
        caption=(
            "Each cell: the mean over seeds (the baseline with its standard error over documents), the paired "
            "difference to the baseline with its 95 % interval in the unit that the heading gives in brackets, and the "
            f"verdict. {HOLM_MARK} The difference is significant at 5 % after Holm's correction over {over}. Within "
            "noise: the test finds no difference, which does not prove that there is none. Too few documents: nothing "
            "was tested. At floor or at chance: the task measures nothing of the base. "
            f"{FALLEN_MARK} The test alone finds a difference, which is not significant after the correction."
        ),
        heading=False,
        search=True,
        filters=(Filter("verdicts", "Any task is", _VERDICTS),),
    )


def held_out_column(results: ComparisonResults) -> Column | None:
    """Return the column of the loss on held-out text; None where no method has it, or it has a task's column."""
    known = HELD_OUT not in results.tasks and any(method.held_out_losses for method in results.methods.values())
    return Column("held-out loss", ("nats per token", "lower is better"), number=True) if known else None


def _held_out(results: ComparisonResults, name: str) -> str:
    """Return the mean loss on held-out text ± its standard deviation over seeds; of the baseline the base's."""
    losses = list(results.methods[name].held_out_losses.values())
    base = results.base_loss
    if not losses:
        return decimal(base, 4) if name == results.baseline and base is not None else NOTHING
    spread = f" ± {decimal(stdev(losses), 4)}" if len(losses) > 1 else ""
    return decimal(fmean(losses), 4) + spread


def terminal_table(results: ComparisonResults) -> Table:
    """Build the main table for a terminal: without cost; for narrow ones a table for each task."""
    scores = score_table(results)
    fixed = len(scores.columns) - len(results.tasks)
    columns = tuple(replace(column, notes=column.notes[:2], number=False) for column in scores.columns[fixed:])
    by_task = tuple(
        Table(
            name=task.name,
            title=f"{task.name}: {', '.join(task.notes)}",
            columns=(*scores.columns[:2], Column("value"), Column("difference"), Column("verdict")),
            rows=tuple(Row((*row.cells[:2], *_spread(row.cells[place + fixed]))) for row in scores.rows),
        )
        for place, task in enumerate(columns)
    )
    if fixed == 3:
        rows = tuple(Row(row.cells[:3]) for row in scores.rows)
        by_task = (Table("held-out", "Held-out loss", scores.columns[:3], rows), *by_task)
    return replace(scores, columns=(*scores.columns[:fixed], *columns), caption="", narrow=by_task)


def _spread(cell: str | Cell) -> tuple[str | Cell, ...]:
    """Return the lines of a cell as cells: value, difference, verdict."""
    if isinstance(cell, str):
        return cell, "", ""
    value, difference, verdict = cell.lines
    return value, difference, Cell((verdict,), cell.tone)


def _task(results: ComparisonResults, task: str) -> Column:
    info = results.tasks[task]
    better = "higher is better" if info.higher_is_better else "lower is better"
    notes = (f"{info.primary}, n = {documents_text(info.n, info.clusters)}", better, f"[{unit_of(results, task)}]")
    level = level_at(results, results.baseline, task)
    return Column(task, (*notes, *([f"base {level}"] if level else [])), number=True)


def _row(results: ComparisonResults, name: str, *, with_loss: bool) -> Row:
    method = results.methods[name]
    cells = tuple(cell_of(results, name, task) for task in results.tasks)
    loss = [_held_out(results, name)] if with_loss else []
    verdicts = tuple(str(cell.tone) for cell in cells if isinstance(cell, Cell))
    is_baseline = name == results.baseline
    return Row((name, count(method.trainable), *loss, *cells), strong=is_baseline, keys={"verdicts": verdicts})


def cell_of(results: ComparisonResults, method: str, task: str) -> str | Cell:
    """Return what one method does on one task: its mean, and where it was compared its difference and verdict."""
    scale = scale_of_task(results, task)
    value = score(results.mean(method, task), scale)
    if method == results.baseline:
        return _with_error(results, method, task, value, scale)
    comparison = results.comparison(method, task, results.baseline)
    if comparison is None:
        diverged = results.methods[method].diverged
        return diverged_text(diverged) if diverged and value == NOTHING else value
    difference = change_text(change_of(results, comparison), unit=False)
    return Cell((value, difference, verdict_text(results, comparison)), shown_verdict(results, comparison))


def verdict_text(results: ComparisonResults, comparison: Comparison) -> str:
    """Return the verdict with the mark that the correction gives it."""
    verdict = shown_verdict(results, comparison)
    if verdict in ("better", "worse"):
        return verdict + HOLM_MARK
    return verdict + (FALLEN_MARK if comparison.falls_to_correction else "")


def _with_error(results: ComparisonResults, method: str, task: str, value: str, scale: Scale) -> str:
    """Append the standard error over documents; seeds change nothing in it, so the first run's is taken."""
    metric = results.tasks[task].primary
    scores = (run.evaluation.get(task) for _, run in sorted(results.methods[method].runs.items()))
    errors = [each.stderr[metric] for each in scores if each is not None and metric in each.stderr]
    if not errors:
        return value
    if scale is Scale.POINTS:
        return f"{value.removesuffix(' %')} ± {decimal(100 * errors[0], 1)} %"
    return f"{value} ± {significant(errors[0], 2)}"


def method_table(results: ComparisonResults) -> Table:
    """Build the table of methods: parts, parameters, how they were matched, and how training went."""
    names = ("method", "parts", "form", "matched to", "trainable", "updates kept", "final loss", "training time")
    rows = []
    for name, method in results.methods.items():
        loss, wall, kept = mean_of(method, "final_loss"), mean_of(method, "wall_s"), lowest_survival([method])
        rows.append(
            (
                name,
                " + ".join(map(part_text, method.parts)) or "nothing: the frozen base",
                method.form or NOTHING,
                _matched(method),
                count(method.trainable),
                NOTHING if kept is None else f"{decimal(100 * kept, 1)} %",
                NOTHING if loss is None else decimal(loss, 4),
                NOTHING if wall is None else f"{wall:,.1f} s",
            )
        )
    columns = tuple(Column(name, number=place > 3) for place, name in enumerate(names))
    return Table("methods", "Methods", columns, tuple(map(Row, rows)))


def mean_of(method: Method, field: str) -> float | None:
    """Return the mean over seeds of a field of the training outcome, or None where nothing was trained."""
    values = [getattr(run.train, field) for run in method.runs.values() if run.train is not None]
    return fmean(values) if values else None


def lowest_survival(methods: Iterable[Method]) -> float | None:
    """Return the lowest share of weights that an optimiser step really changed, over all runs and tensors."""
    trains = [run.train for method in methods for run in method.runs.values() if run.train is not None]
    return min((share for train in trains for share in train.update_survival.values()), default=None)


def _matched(method: Method) -> str:
    match = method.match
    if match is None:
        return NOTHING
    share = match.parameters / match.target_parameters - 1 if match.target_parameters else 0.0
    return f"{match.to}: {match.words}, {count(match.target_parameters)} asked ({signed(100 * share, 1)} %)"


def paired_table(results: ComparisonResults) -> Table:
    """Build the table of all paired comparisons, in the order in which they were made."""
    return Table(
        name="pairs",
        title="Paired differences",
        columns=(
            *(Column("method", ("reference",)), Column("task", ("metric, n",)), Column("verdict")),
            Column("difference", ("in its own unit", "visible from"), number=True),
            *(Column("p (Holm)", ("p alone",), number=True), Column("test", ("seeds",))),
        ),
        rows=tuple(_pair(results, comparison) for comparison in results.comparisons),
        caption=(
            "Every paired comparison: method minus reference, in the unit of the tables above and in the metric's own; "
            "p after Holm's correction and before it. "
            f"{_FAMILIES.get(results.correction, '')}Visible from: the true difference that "
            "had about four chances in five to be found with these documents and seeds, before correction; none where "
            "no difference would be."
        ),
        heading=False,
        search=True,
        filters=(
            Filter("reference", "Reference", tuple(dict.fromkeys(each.reference for each in results.comparisons))),
            Filter("task", "Task", tuple(results.tasks)),
            Filter("verdicts", "Verdict", _VERDICTS),
        ),
    )


def _pair(results: ComparisonResults, comparison: Comparison) -> Row:
    change = change_of(results, comparison)
    shown = shown_verdict(results, comparison)
    seeds = f", {count(comparison.seeds)} seed{'s' * (comparison.seeds != 1)}" if comparison.seeds else ""
    cells = (
        Cell((comparison.method, f"against {comparison.reference}")),
        Cell((comparison.task, f"{comparison.metric}, n = {documents_text(comparison.n, comparison.clusters)}")),
        Cell((verdict_text(results, comparison),), shown),
        Cell((change_text(change), _own_unit(comparison), _visible(change))),
        Cell((p_text(comparison.p_holm), p_text(comparison.p))),
        f"{comparison.test}{seeds}",
    )
    keys = {"verdicts": shown, "task": comparison.task, "reference": comparison.reference}
    return Row(cells, faint=shown in LEVELS, keys={key: (value,) for key, value in keys.items()})


def _visible(change: Change) -> str:
    visible = change.smallest_visible
    return NOTHING if visible is None else f"from {significant(visible, 2)} {change.scale.value}".strip()


def _own_unit(comparison: Comparison) -> str:
    """Return the difference in the metric's own unit, 0 where it is nothing but rounding beside its interval."""
    width = comparison.high - comparison.low
    is_rounding = abs(comparison.difference) < 1e-9 * width < inf
    text = significant(0.0 if is_rounding else comparison.difference, 3)
    return f"+{text}" if comparison.difference > 0 and not is_rounding else text


def sides_table(sides: Sequence[Sides]) -> Table:
    """Build the table of how many documents changed from wrong to right and back; a measure may have neither."""
    names = ("method", "task", "gained", "lost", "net", "documents", "seeds")
    rows = []
    for each in sides:
        known = each.gained is not None and each.lost is not None
        net = signed((each.gained or 0) - (each.lost or 0), 0) if known else NOTHING
        counts = count(each.gained), count(each.lost), net, count(each.documents), str(each.seeds)
        rows.append(Row((each.method, each.task, *counts)))
    columns = tuple(Column(name, number=place > 1) for place, name in enumerate(names))
    return Table("sides", "How many, by method and task", columns, tuple(rows), folded=True)
