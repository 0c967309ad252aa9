"""What guessing scores on a task of several choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lm_eval.api.task import ConfigurableTask

from hfpatch.evaluation.low_noise import number_of_choices, right_answers


def chance(task: Any, samples: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """Return the mean over documents of the share of their choices that are right; None where that is not the chance.

    It is not of another kind of task, or one that scores with a function of its own.

    Args:
        task: lm-eval's task.
        samples: lm-eval's samples of it.
        metric: its primary metric; one whose name begins with ``acc`` counts how often a right choice is taken.
    """
    is_choice = task.OUTPUT_TYPE == "multiple_choice" and isinstance(task, ConfigurableTask)
    if not is_choice or callable(task.config.process_results) or not metric.startswith("acc"):
        return None
    shares = [_share(right_answers(task, sample), number_of_choices(sample)) for sample in samples]
    return fmean(shares) if shares and all(0 < share < 1 for share in shares) else None


def _share(right: Sequence[int], choices: int) -> float:
    return len(set(right) & set(range(choices))) / max(1, choices)
