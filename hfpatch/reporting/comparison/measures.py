"""By what a gain on a task is measured: the one choice that the headline and the attribution rest on."""

from __future__ import annotations

from dataclasses import dataclass

from hfpatch.reporting.words import metric_text
from hfpatch.results.held_out import HELD_OUT, NATS_PER_TOKEN
from hfpatch.results.low_noise import BITS_PER_BYTE
from hfpatch.results.schema import ComparisonResults, Task

UNTESTED = "held-out text"
"""What the loss on held-out text is called where only its mean is known, as in results of older versions."""


@dataclass(frozen=True)
class Measure:
    """What a gain is measured by: a task's metric, or where there is no task the mean loss on held-out text."""

    task: str = ""
    metric: str = "nats per token"

    def __str__(self) -> str:
        return f"{self.task or UNTESTED} ({metric_text(self.metric)})"


def measures(results: ComparisonResults) -> list[Measure]:
    """Return what gains are measured by: the loss on held-out text if it is known, other text, then the other tasks.

    A task is measured by bits per byte where it was compared by them, else by its primary metric; one that was compared
    by neither is left out.
    """
    by_task = [Measure(task, metric_of(results, task)) for task in results.tasks]
    known = [each for each in by_task if is_known(results, each.task, each.metric)]
    text = [each for each in known if is_text(results.tasks[each.task])]
    others = [each for each in known if each not in text]
    untested = results.base_loss is not None and HELD_OUT not in results.tasks
    return [*([Measure()] if untested else []), *text, *others]


def metric_of(results: ComparisonResults, task: str) -> str:
    """Return bits per byte where a task is measured by them, else its primary metric."""
    return BITS_PER_BYTE if is_known(results, task, BITS_PER_BYTE) else results.tasks[task].primary


def is_text(task: Task) -> bool:
    """Say whether a task scores whole texts, by perplexity, bits per byte or nats per token."""
    return any(name in task.primary for name in ("perplexity", BITS_PER_BYTE, NATS_PER_TOKEN))


def is_known(results: ComparisonResults, task: str, metric: str) -> bool:
    """Say whether a task was compared by a metric, or where nothing was compared yet, scored by it."""
    if results.comparisons:
        made = (*results.low_noise, *results.comparisons)
        return any(each.task == task and each.metric == metric for each in made)
    return bool(results.values(str(results.baseline), task, metric))
