"""Parts of sentences and of cells that a study's report and its figures share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hfpatch.reporting.numbers import listed, signed
from hfpatch.results.schema import StudyResults

FEW_SEEDS = 5
"""Below this many seeds the report says that they are few."""
_SAME_SIZE = 5e-5  # a smaller relative difference in parameters is reported as none


def key_text(key: str) -> str:
    """Return a sweep's key as a heading: ``training.lr`` is ``lr``."""
    return key.removeprefix("training.")


def value_text(value: Any) -> str:
    """Return a setting's value as a recipe would have it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def point_text(point: Mapping[str, Any]) -> str:
    """Return a point of the sweep as ``lr 0.002, weight_decay 0.1``."""
    return ", ".join(f"{key_text(key)} {value_text(value)}" for key, value in point.items())


def uneven_text(study: StudyResults) -> str:
    """Say that variants were tried at different numbers of points; nothing where they were not."""
    counts = study.tried_counts
    if len(set(counts.values())) < 2:
        return ""
    named = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"Not all variants have as many points ({named}): a difference may come from tuning one of them more."


def seeds_text(count: int) -> str:
    """Return ``1 seed`` or ``3 seeds``."""
    return f"{count} seed{'s' * (count != 1)}"


def not_run_text(seeds: Sequence[int]) -> str:
    """Return ``seed 2 has not run yet`` or ``seeds 1 and 2 have not run yet``."""
    named = listed([str(seed) for seed in seeds])
    return f"seed {named} has not run yet" if len(seeds) == 1 else f"seeds {named} have not run yet"


def share_cell(share: float) -> str:
    """Return a relative difference in parameters for a cell: ``+12.50 %``."""
    return f"{signed(100 * share, 2)} %"


def share_words(share: float) -> str:
    """Return a relative difference in parameters for a sentence: ``12.50 % more parameters``."""
    if abs(share) < _SAME_SIZE:
        return "as many parameters"
    return f"{abs(100 * share):.2f} % {'more' if share > 0 else 'fewer'} parameters"
