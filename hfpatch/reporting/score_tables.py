"""The scores of evaluations in one table: a row for each task and metric, a column for each model or patch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hfpatch.reporting.document import Column, Row, Table
from hfpatch.reporting.numbers import NOTHING, count, decimal, significant
from hfpatch.results.identity import task_identity
from hfpatch.results.schema import EvaluatedVariant, EvaluationResults, TaskResult

_HEADINGS = (("task", False), ("version", False), ("n-shot", True), ("metric", False), ("n", True))


@dataclass(frozen=True)
class _Line:
    """What scores must have in common to share a line; ``data`` is what they are of, documents, prompts and task."""

    task: str
    version: str
    num_fewshot: str
    metric: str
    n: int
    data: str


def score_table_of(sources: Mapping[str, EvaluationResults]) -> Table:
    """Return all scores of one evaluation or of several, by what each is called.

    Scores share a line where they are of the same documents, the same version of a task and as many examples.
    """
    variants = {}
    for source, results in sources.items():
        for label, variant in results.variants.items():
            if len(sources) == 1:
                bare = len(results.variants) == 1 and variant.patch is None
                name = results.model["name"] if bare else label
            else:
                name = source if len(results.variants) == 1 else f"{source}: {label}"
            variants[name] = variant
    caption = "Value and standard error over documents."
    if len(sources) > 1:
        caption += (
            " Scores share a line where they are of the same documents, the same version of the task and as many "
            "examples, asked with the same prompts; nothing was tested across evaluations."
        )
    return _table(variants, caption, strict=len(sources) > 1)


def _table(variants: Mapping[str, EvaluatedVariant], caption: str, *, strict: bool) -> Table:
    cells = {label: dict(_lines(variant, strict=strict)) for label, variant in variants.items()}
    found = dict.fromkeys(line for each in cells.values() for line in each)
    groups = {group for variant in variants.values() for group in variant.groups or ()}
    rows = [
        Row(
            (
                *(line.task, line.version, line.num_fewshot, line.metric, count(line.n)),
                *(cells[label].get(line, NOTHING) for label in variants),
            ),
            strong=line.task in groups,
        )
        for line in _ordered(list(found))
    ]
    columns = [Column(heading, number=number) for heading, number in _HEADINGS]
    columns += [Column(label, number=True) for label in variants]
    return Table("scores", "Scores", tuple(columns), tuple(rows), caption, narrow=tuple(_narrow(cells)))


def _narrow(cells: Mapping[str, Mapping[_Line, str]]) -> Iterator[Table]:
    """Yield the scores of one model or patch after the other."""
    columns = Column("task"), Column("metric"), Column("score", number=True)
    for place, (label, lines) in enumerate(cells.items()):
        rows = (Row((line.task, line.metric, text)) for line, text in lines.items())
        yield Table(f"scores-{place}", label, columns, tuple(rows))


def _ordered(lines: Sequence[_Line]) -> list[_Line]:
    """Return lines with those of one task together, tasks in the order of their first line."""
    tasks = list(dict.fromkeys(line.task for line in lines))
    return sorted(lines, key=lambda line: tasks.index(line.task))


def _lines(variant: EvaluatedVariant, *, strict: bool) -> Iterator[tuple[_Line, str]]:
    """Yield what a variant has in each line: the groups first, then the tasks.

    Where scores are of several evaluations (``strict``), the prompts count; within one they are as they were asked for,
    such as in the template of each model.
    """
    data_of = {name: _data(score) if strict else score.data_sha256 for name, score in variant.scores.items()}
    for name, group in (variant.groups or {}).items():
        for metric, value in group.metrics.items():
            data = " ".join(data_of.values())
            yield _Line(name, group.version, "", metric, group.n, data), _text(value, group.stderr.get(metric))
    for name, score in variant.scores.items():
        for metric, value in score.metrics.items():
            line = _Line(name, score.version, str(score.num_fewshot), metric, score.n, data_of[name])
            yield line, _text(value, score.stderr.get(metric))


def _data(score: TaskResult) -> str:
    identity = task_identity(score)
    return " ".join(
        str(identity[name]) for name in identity if name != "tokens_sha256"
    )  # other models have other tokens


def _text(value: float, stderr: float | None) -> str:
    return value_text(value) if stderr is None else f"{value_text(value)} ± {value_text(stderr)}"


def value_text(value: float) -> str:
    """Format a score, or its standard error."""
    return decimal(value, 4) if abs(value) < 1e6 else significant(value, 4)
