"""Words that the reports of comparisons and of studies share."""

from __future__ import annotations

from collections.abc import Iterable

from hfpatch.reporting.numbers import listed
from hfpatch.results.verdicts import Verdict

MOST_METHODS = 24
"""How many methods a figure shows at most, beside the baseline."""


def metric_text(metric: str) -> str:
    """Return the name of a metric in words."""
    return metric.replace("_", " ")


def metrics_text(metrics: Iterable[str]) -> str:
    """Return the names of metrics, each once: ``acc, bits per byte``."""
    return ", ".join(dict.fromkeys(map(metric_text, metrics)))


def measured(verdicts: Iterable[Verdict]) -> str:
    """Return on which tasks and by which metrics: ``arc_easy and piqa (acc) and lambada (acc, bits per byte)``."""
    metrics: dict[str, list[str]] = {}
    for each in verdicts:
        metrics.setdefault(each.task, []).append(each.metric)
    tasks: dict[str, list[str]] = {}
    for task, names in metrics.items():
        tasks.setdefault(metrics_text(names), []).append(task)
    return listed([f"{listed(names)} ({known})" for known, names in tasks.items()])
