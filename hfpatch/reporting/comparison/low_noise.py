"""The section on low-noise metrics: beside each task's primary metric, what its log-likelihoods say of the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hfpatch.reporting.comparison.data import differences_csv
from hfpatch.reporting.comparison.tables import change_of, verdict_text
from hfpatch.reporting.document import Block, Cell, Column, Download, Filter, Row, Section, Sentences, Table, Text
from hfpatch.reporting.floor import shown_verdict
from hfpatch.reporting.numbers import NOTHING, change_text, count, scale_of, score
from hfpatch.reporting.words import FALLEN_MARK, HOLM_MARK
from hfpatch.results.low_noise import BITS_PER_BYTE, GOLD_PROBABILITY, LOW_NOISE, MARGIN
from hfpatch.results.schema import Comparison, ComparisonResults

_SEES = {
    BITS_PER_BYTE: (
        "Bits per byte of the right answer sees whatever makes the text of right answers likelier, such as adaptation "
        "to its style, on few documents. It cannot see whether wrong answers became likelier as well: without the "
        "margin it does not say that a model tells right from wrong any better."
    ),
    MARGIN: (
        "The margin, the log-likelihood of the right answer minus that of the best wrong one in nats, sees whether "
        "right answers gain on wrong ones, also where no decision changes. It cannot see what all answers share, and "
        "a few documents with large margins can decide it."
    ),
    GOLD_PROBABILITY: (
        "The probability of the right answer among the choices sees the same, with every document between 0 and 1. It "
        "cannot see a change where the model is already sure, whether it is right or wrong."
    ),
}
_COLUMNS = {
    BITS_PER_BYTE: Column("bits per byte", ("lower is better", "[% of the reference]"), number=True),
    MARGIN: Column("margin", ("higher is better", "[nats]"), number=True),
    GOLD_PROBABILITY: Column("probability of the right answer", ("higher is better", "[points]"), number=True),
}
_OPENING = (
    "An accuracy changes only where a decision does. These metrics use the log-likelihoods themselves, which were "
    "scored anyway. The verdicts of the tables and findings rest on the primary metrics, those of the answer on both."
)
_CAPTION = (
    "Each cell: the mean over seeds, the paired difference to the reference with its 95 % interval, and the verdict. "
    f"{HOLM_MARK} significant at 5 % after Holm's correction; {FALLEN_MARK} found by the test alone. The low-noise "
    "metrics are corrected among themselves: over all methods, tasks and metrics with the baseline as their reference, "
    "and apart from them over the others. A task that scores one continuation, or whole texts, has no wrong answers, "
    "and so no margin."
)


def low_noise_section(results: ComparisonResults) -> Iterator[Section]:
    """Yield the section, where any task has a low-noise metric beside its primary one."""
    if not results.low_noise:
        return
    baseline = results.baseline
    pairs = list(dict.fromkeys((each.method, each.reference, each.task) for each in results.low_noise))
    against = [pair for pair in pairs if pair[1] == baseline]
    between = [pair for pair in pairs if pair[1] != baseline]
    blocks: list[Block] = [
        Text(_OPENING),
        Sentences(what_they_see(results.low_noise)),
        _table(results, "low-noise-differences", "Against the baseline", against, against_baseline=True),
        *([_table(results, "low-noise-between", "Between methods", between)] if between else []),
        Download("low-noise.csv", "every difference of a low-noise metric (CSV)", differences_csv(results.low_noise)),
    ]
    yield Section("low-noise", "Low-noise metrics", tuple(blocks))


def what_they_see(comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    """Return two sentences on each metric that is compared: what it can and cannot see."""
    known = {each.metric for each in comparisons}
    return tuple(text for metric, text in _SEES.items() if metric in known)


def _table(
    results: ComparisonResults,
    name: str,
    title: str,
    pairs: Sequence[tuple[str, str, str]],
    *,
    against_baseline: bool = False,
) -> Table:
    """Build a table with a line for each method, reference and task, in the order of tasks."""
    tasks = [task for task in results.tasks if any(task == each for _, _, each in pairs)]
    rows = []
    for task in tasks:
        if against_baseline and results.baseline is not None:
            rows.append(_row(results, results.baseline, None, task))
        rows += [_row(results, method, other, task) for method, other, each in pairs if each == task]
    head = (Column("method"), Column("task"), Column("primary metric", number=True))
    return Table(
        name=name,
        title=title,
        columns=(*head, *_COLUMNS.values()),
        rows=tuple(rows),
        caption=_CAPTION if against_baseline else "",
        search=True,
        filters=(Filter("task", "Task", tuple(tasks)),),
        folded=not against_baseline,
    )


def _row(results: ComparisonResults, method: str, reference: str | None, task: str) -> Row:
    name = method if reference in (None, results.baseline) else f"{method} against {reference}"
    info = results.tasks[task]
    cells = [_cell(results, method, reference, task, metric) for metric in (info.primary, *_COLUMNS)]
    place = Cell((task, f"{info.primary}, n = {count(info.n)}"))
    return Row((name, place, *cells), strong=reference is None, keys={"task": (task,)})


def _cell(results: ComparisonResults, method: str, reference: str | None, task: str, metric: str) -> str | Cell:
    """Return a metric's mean and, with a reference, the difference and its verdict."""
    info, mean = results.tasks[task], results.mean(method, task, metric)
    if mean is None or (metric == info.primary and metric in LOW_NOISE):
        return NOTHING
    value = score(mean, scale_of(metric, LOW_NOISE.get(metric, info.higher_is_better)))
    made = None if reference is None else results.comparison(method, task, reference, metric)
    if made is None:
        return value
    return Cell(
        (value, change_text(change_of(results, made), unit=False), verdict_text(results, made)),
        shown_verdict(results, made),
    )
