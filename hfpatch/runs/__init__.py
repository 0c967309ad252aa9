"""From a recipe to results: every command of hfpatch as a function, imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.support.lazy import lazy_names

if TYPE_CHECKING:
    from hfpatch.runs.checking import check
    from hfpatch.runs.comparison import compare, train
    from hfpatch.runs.corpus import tokenize
    from hfpatch.runs.evaluation import evaluate
    from hfpatch.runs.forecasting import forecast
    from hfpatch.runs.inspection import inspect
    from hfpatch.runs.pretraining import pretrain
    from hfpatch.runs.previewing import preview
    from hfpatch.runs.progress import Progress

__all__ = [
    "Progress",
    "check",
    "compare",
    "evaluate",
    "forecast",
    "inspect",
    "pretrain",
    "preview",
    "tokenize",
    "train",
]

_HOMES = {
    "Progress": "progress",
    "check": "checking",
    "compare": "comparison",
    "evaluate": "evaluation",
    "forecast": "forecasting",
    "inspect": "inspection",
    "pretrain": "pretraining",
    "preview": "previewing",
    "tokenize": "corpus",
    "train": "comparison",
}

__getattr__ = lazy_names(__name__, _HOMES)
