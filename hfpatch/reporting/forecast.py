"""The page of ``hfpatch plan``: what will be run, how long it takes here, and what differences it could show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hfpatch.reporting.document import Block, Cell, Column, Document, Part, Row, Section, Sentences, Table, Text
from hfpatch.reporting.numbers import NOTHING, count, duration, memory, short_count, signed, significant
from hfpatch.results.forecast import Detectable, Forecast, PlannedTask

_ACTIONS = {
    "tune": "trials of tuning, at most",
    "train": "trainings",
    "evaluate": "evaluations",
    "retain": "measurements of retention",
    "rewind": "rewound patches",
}
_NAMES = ("what", "method", "as fast as", "matched to", "kind", "task")
_CAPTION = (
    "The true difference from the base that these documents and seeds find in 80 % of cases, for a method that changes "
    "the base much, and for one that changes it little. After Holm: with a correction over all {} comparisons, if no "
    "other is significant. %: of the metric's value."
)


def forecast_document(found: Forecast) -> Document:
    """Return what ``hfpatch plan`` prints."""
    blocks: tuple[Block, ...] = (
        Text(_headline(found), style="headline"),
        _work(found),
        _methods(found),
        _kinds(found),
        _tasks(found),
        *([_needed(found, found.effect)] if found.effect is not None else []),
        Sentences((*found.assumptions, *found.warnings)),
    )
    return Document(
        title=f"Plan of {found.name}",
        kind="plan",
        parts=(Part((Section("plan", "Plan", blocks),)),),
        summary=blocks,
    )


def _headline(found: Forecast) -> str:
    device = found.provenance.get("device", "this machine")
    bound = "at most" if found.whole_steps else "or more, as only parts of steps were run"
    return (
        f"{found.name} on {found.model['name']}: about {duration(found.seconds)} on {device}, and "
        f"{memory(found.memory_bytes)} of memory {bound}."
    )


def _table(
    name: str, title: str, headings: Sequence[str], rows: Iterator[tuple[str | Cell, ...]], caption: str = ""
) -> Table:
    """Return a table of numbers, apart from the columns of names."""
    columns = tuple(Column(heading, number=heading not in _NAMES) for heading in headings)
    return Table(name, title, columns, tuple(map(Row, rows)), caption)


def _work(found: Forecast) -> Table:
    headings = ("what", "number", "steps", "tokens", "requests", "time")
    rows: Iterator[tuple[str | Cell, ...]] = (
        (
            _ACTIONS[action],
            count(work.units),
            count(work.steps) if work.steps else NOTHING,
            short_count(work.tokens),
            count(work.requests) if work.requests else NOTHING,
            duration(work.seconds),
        )
        for action, work in sorted(found.work.items(), key=lambda item: list(_ACTIONS).index(item[0]))
    )
    return _table("work", "What will be run", headings, rows)


def _methods(found: Forecast) -> Table:
    headings = ("method", "trains", "as fast as", "matched to")
    rows: Iterator[tuple[str | Cell, ...]] = (
        (
            name,
            count(method.trainable),
            method.kind,
            Cell((f"{method.match.to}: {method.match.words}", f"{signed(100 * (method.match.difference or 0), 1)} %"))
            if method.match
            else NOTHING,
        )
        for name, method in found.methods.items()
    )
    return _table("methods", "Methods", headings, rows)


def _kinds(found: Forecast) -> Table:
    headings = ("kind", "a step", "memory", "an evaluation", "memory")
    rows: Iterator[tuple[str | Cell, ...]] = (
        (
            kind if kind in (each.method, "base") else Cell((kind, f"on {each.method}")),
            NOTHING if each.step_s is None else duration(each.step_s),
            memory(each.training_memory_bytes),
            duration(sum(each.evaluation_s.values())),
            memory(each.evaluation_memory_bytes),
        )
        for kind, each in found.kinds.items()
    )
    caption = "One optimiser step; one evaluation on all tasks; each in proportion to what was run of it. Peak memory."
    return _table("kinds", "Measured", headings, rows, caption=caption)


def _tasks(found: Forecast) -> Table:
    headings = ("task", "base", "smallest (much)", "after Holm", "smallest (little)")
    rows: Iterator[tuple[str | Cell, ...]] = (
        (
            Cell((name, f"{task.metric or 'no planned metric'}, {count(task.documents)} documents")),
            NOTHING if task.score is None else Cell((significant(task.score, 3), f"of {count(task.sampled)}")),
            *_smallest(task, "much"),
            _smallest(task, "little")[0],
        )
        for name, task in found.tasks.items()
    )
    caption = _CAPTION.format(count(found.comparisons))
    seeds = f"{len(found.seeds)} seed{'s' if len(found.seeds) > 1 else ''}"
    return _table("tasks", f"What the tasks can show with {seeds}", headings, rows, caption=caption)


def _smallest(task: PlannedTask, change: str) -> tuple[str, str]:
    each = task.detectable.get(change)
    return (NOTHING, NOTHING) if each is None else (_size(task, each.smallest), _size(task, each.smallest_corrected))


def _size(task: PlannedTask, value: float | None) -> str:
    if value is None:
        return "none"
    if task.unit == "share":
        return f"{significant(100 * value, 2)} points"
    return f"{significant(100 * value, 2)} %" if task.unit == "log" else significant(value, 2)


def _needed(found: Forecast, effect: float) -> Table:
    headings = ("task", "documents (much)", "seeds (much)", "documents (little)", "seeds (little)")
    nothing = Detectable(sd=0, smallest=None, smallest_corrected=None)
    rows: Iterator[tuple[str | Cell, ...]] = (
        (
            Cell((name, f"{_size(task, effect)}, {count(task.documents)} documents")),
            *(
                "no number" if value is None else count(value)
                for change in ("much", "little")
                for value in (
                    task.detectable.get(change, nothing).documents,
                    task.detectable.get(change, nothing).seeds,
                )
            ),
        )
        for name, task in found.tasks.items()
        if task.detectable
    )
    caption = (
        "Documents with the recipe's seeds, or seeds with the task's documents, that find it in 80 % of cases. Where "
        "the recipe's seeds are enough, their number."
    )
    return _table("needed", f"What an effect of {effect:g} needs", headings, rows, caption=caption)
