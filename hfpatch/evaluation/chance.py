"""What guessing scores on a task of several choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lm_eval.api.task import ConfigurableTask

from hfpatch.evaluation.low_noise import number_of_choices, right_answers


def chance(task: Any, samples: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """Return the mean over documents of the share of their choices that are right; None of another task or metric.

    Args:
        task: lm-eval's task.
        samples: lm-eval's samples of it.
        metric: its primary metric; one whose name begins with ``acc`` counts how often a right choice is taken.
    """
    if task.OUTPUT_TYPE != "multiple_choice" or not isinstance(task, ConfigurableTask) or not metric.startswith("acc"):
        return None
    shares = [len(right_answers(task, sample)) / max(1, number_of_choices(sample)) for sample in samples]
    return fmean(shares) if shares and all(0 < share < 1 for share in shares) else None
