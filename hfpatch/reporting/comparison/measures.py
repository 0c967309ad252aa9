"""By what a gain on a task is measured: the one choice that the headline and the attribution rest on."""

from __future__ import annotations

from dataclasses import dataclass

from hfpatch.results.low_noise import BITS_PER_BYTE
from hfpatch.results.schema import ComparisonResults, Task

HELD_OUT = "held-out text"


@dataclass(frozen=True)
class Measure:
    """What a gain is measured by: a task's metric, or the loss on held-out text where there is no task."""

    task: str = ""
    metric: str = "nats per token"

    def __str__(self) -> str:
        return f"{self.task} ({self.metric.replace('_', ' ')})" if self.task else HELD_OUT


def measures(results: ComparisonResults) -> list[Measure]:
    """Return what gains are measured by: the loss on held-out text if it is known, then text tasks, then the others.

    A task is measured by bits per byte where it was compared by them, else by its primary metric; one that was compared
    by neither is left out.
    """
    by_task = [Measure(task, metric_of(results, task)) for task in results.tasks]
    known = [each for each in by_task if is_known(results, each.task, each.metric)]
    text = [each for each in known if is_text(results.tasks[each.task])]
    others = [each for each in known if each not in text]
    return [*([Measure()] if results.base_loss is not None else []), *text, *others]


def metric_of(results: ComparisonResults, task: str) -> str:
    """Return bits per byte where a task is measured by them, else its primary metric."""
    return BITS_PER_BYTE if is_known(results, task, BITS_PER_BYTE) else results.tasks[task].primary


def is_text(task: Task) -> bool:
    """Say whether a task scores whole texts, by perplexity or bits per byte."""
    return "perplexity" in task.primary or BITS_PER_BYTE in task.primary


def is_known(results: ComparisonResults, task: str, metric: str) -> bool:
    """Say whether a task was compared by a metric, or where nothing was compared yet, scored by it."""
    if results.comparisons:
        made = (*results.low_noise, *results.comparisons)
        return any(each.task == task and each.metric == metric for each in made)
    return bool(results.values(str(results.baseline), task, metric))
