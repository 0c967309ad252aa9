"""The page of ``hfpatch plan``: the work, its time on this machine, and what its primary questions can decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hfpatch.reporting.document import Block, Cell, Document, Part, Section, Sentences, Table, Text
from hfpatch.reporting.numbers import NOTHING, count, duration, memory, needs_text, short_count, signed, significant
from hfpatch.results.forecast import Forecast

_ACTIONS = {
    "tune": "trials of tuning, at most",
    "train": "trainings",
    "evaluate": "evaluations",
    "retain": "measurements of retention",
    "rewind": "rewound patches",
}
_DECIDES = (
    "In 80 % of cases, with the variances of an earlier run or assumed ones: the smallest true difference that is "
    "detected, and the smallest margin within which a pair without a difference is equivalent, or kept. Needed: the "
    "seeds with the recipe's documents, or the documents with its seeds, that decide such a pair within its margin; "
    "more of both where neither alone is enough."
)


def forecast_document(forecast: Forecast) -> Document:
    """Return the page of ``hfpatch plan``."""
    device = forecast.provenance.get("device", "this machine")
    whole_steps = all(kind.step_share in (None, 1.0) for kind in forecast.kinds.values())
    bound = "" if whole_steps else " or more, as only parts of steps were run"
    until = "" if forecast.first_look_s is None else f"{duration(forecast.first_look_s)} to the first look, at most "
    headline = (
        f"{forecast.name} on {forecast.model['name']}: about {until}{duration(forecast.seconds)} on {device}, and "
        f"about {memory(forecast.memory_bytes)} of memory{bound}."
    )
    if forecast.jobs_s is not None:
        headline += f" {forecast.jobs} runs at a time, on a device each: about {duration(forecast.jobs_s)}."
    blocks: tuple[Block, ...] = (
        Text(headline, style="headline"),
        *_tables(forecast),
        Sentences((*forecast.assumptions, *forecast.warnings)),
    )
    return Document(
        title=f"Plan of {forecast.name}",
        kind="plan",
        parts=(Part((Section("plan", "Plan", blocks),)),),
        summary=blocks,
    )


def _tables(forecast: Forecast) -> Iterator[Table]:
    """Yield tables of the work, the methods, the tasks, the measured times, and what the questions can decide."""
    rows: list[Sequence[str | Cell]] = []
    for action, work in sorted(forecast.work.items(), key=lambda item: list(_ACTIONS).index(item[0])):
        steps, requests = (count(number) if number else NOTHING for number in (work.steps, work.requests))
        times = count(work.units), steps, short_count(work.tokens), requests, duration(work.seconds)
        rows.append((_ACTIONS[action], *times))
    yield Table.of("work", "What will be run", ("what", "number", "steps", "tokens", "requests", "time"), rows)
    rows = []
    for name, method in forecast.methods.items():
        match = method.match and Cell(
            (f"{method.match.to}: {method.match.words}", f"{signed(100 * (method.match.difference or 0), 1)} %")
        )
        rows.append((name, count(method.trainable), method.kind, match or NOTHING))
    if "base" in forecast.kinds:
        yield Table.of("methods", "Methods", ("method", "trains", "as fast as", "matched to"), rows)
    else:  # models from scratch have none, and are measured one by one
        yield Table.of("methods", "Variants", ("variant", "parameters"), [row[:2] for row in rows])
    if forecast.tasks:
        times_s, rows = forecast.kinds["base"].evaluation_s, []
        for name, task in forecast.tasks.items():
            base = (
                NOTHING
                if task.score is None
                else Cell((significant(task.score, 3), f"{task.metric} of {count(task.sampled)}"))
            )
            rows.append((name, count(task.documents), base, duration(times_s[name]) if times_s.get(name) else NOTHING))
        yield Table.of("tasks", "Tasks", ("task", "documents", "base", "an evaluation"), rows)
    rows = [
        (
            kind if kind in (measured.method, "base") else Cell((kind, f"on {measured.method}")),
            NOTHING if measured.step_s is None else duration(measured.step_s),
            memory(measured.training_memory_bytes),
            duration(sum(measured.evaluation_s.values())) if measured.evaluation_s else NOTHING,
            memory(measured.evaluation_memory_bytes),
        )
        for kind, measured in forecast.kinds.items()
    ]
    caption = "One optimiser step; one evaluation on all tasks; each in proportion to what was run of it. Peak memory."
    yield Table.of("kinds", "Measured", ("kind", "a step", "memory", "an evaluation", "memory"), rows, caption)
    if any(asked.difference is not None or asked.seeds_needed is not None for asked in forecast.questions):
        yield _question_table(forecast)


def _question_table(forecast: Forecast) -> Table:
    """Return what the primary questions can decide."""
    rows: list[Sequence[str | Cell]] = []
    for asked in forecast.questions:
        title = f"{asked.method} against {asked.other}" if asked.question == "gain" else f"{asked.method} keeps"
        source = f"{asked.metric}, assumed" if asked.is_assumed else "no variance to go by"
        if asked.like is not None and asked.like != (asked.method, asked.other):
            source = f"{asked.metric}, as {asked.like[0]} against {asked.like[1]}"
        elif asked.like is not None:
            source = f"{asked.metric}, {count(asked.seeds)} seeds"
        undecidable = asked.margin is not None and (asked.like is not None or asked.is_assumed)
        needed = needs_text(asked) or ("more of both" if undecidable else NOTHING)
        values = asked.difference, asked.smallest_margin, asked.margin
        shown = [NOTHING if value is None else significant(value, 2) for value in values]
        rows.append((Cell((f"{title} on {asked.task}", source)), *shown, needed))
    headings = ("pair", "smallest difference", "smallest margin", "margin", "needed")
    return Table.of("questions", "What the primary questions can decide", headings, rows, _DECIDES)
