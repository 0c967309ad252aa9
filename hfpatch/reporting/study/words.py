"""Parts of sentences and of cells that the whole report of a study shares."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hfpatch.reporting.numbers import NOTHING, decimal, listed, signed

FEW_SEEDS = 5
"""Below this many seeds the report says that they are few."""
SMALLEST_SHARE = 5e-5
"""Differences in parameters below this share are told as none."""


def key_text(key: str) -> str:
    """Return a sweep's key as a heading: ``training.lr`` is ``lr``."""
    return key.removeprefix("training.")


def value_text(value: Any) -> str:
    """Return a setting's value as a recipe would have it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def point_text(point: Mapping[str, Any]) -> str:
    """Return a point of the sweep as ``lr 0.002, weight_decay 0.1``."""
    return ", ".join(f"{key_text(key)} {value_text(value)}" for key, value in point.items())


def seeds_text(count: int) -> str:
    """Return ``1 seed`` or ``3 seeds``."""
    return f"{count} seed{'s' * (count != 1)}"


def and_seeds(seeds: Sequence[int]) -> str:
    """Return ``seed 2`` or ``seeds 1 and 2``, with the verb that follows."""
    told = listed([str(seed) for seed in seeds])
    return f"seed {told} has" if len(seeds) == 1 else f"seeds {told} have"


def share_of(parameters: int, baseline: int) -> float:
    """Return by which share a variant has more parameters than the baseline."""
    return parameters / baseline - 1


def share_cell(share: float) -> str:
    """Return a difference in parameters for a cell: ``+12.50 %``."""
    return f"{signed(100 * share, 2)} %"


def share_words(share: float) -> str:
    """Return a difference in parameters for a sentence: ``with 12.5 % more parameters``."""
    if abs(share) < SMALLEST_SHARE:
        return "with as many parameters"
    return f"with {abs(100 * share):.2f} % {'more' if share > 0 else 'fewer'} parameters"


def mean_sd(mean: float, sd: float | None, count: int, digits: int = 4) -> str:
    """Return ``4.1000 ± 0.0100``; of one seed the value alone."""
    return decimal(mean, digits) + (f" ± {decimal(sd, digits)}" if sd is not None and count > 1 else "")


def seconds_text(seconds: float | None, baseline: float | None = None) -> str:
    """Return seconds a step with three significant digits, and how many times the baseline's they are."""
    if seconds is None:
        return NOTHING
    return f"{seconds:.3g}" + (f" (×{seconds / baseline:.2f})" if baseline else "")
