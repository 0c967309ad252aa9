"""From a recipe to results: every command of hfpatch as a function, imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.support.lazy import lazy_names

if TYPE_CHECKING:
    from hfpatch.runs.checking import check as check
    from hfpatch.runs.comparison import compare as compare
    from hfpatch.runs.comparison import train as train
    from hfpatch.runs.corpus import tokenize as tokenize
    from hfpatch.runs.evaluation import evaluate as evaluate
    from hfpatch.runs.forecasting import forecast as forecast
    from hfpatch.runs.inspection import inspect as inspect
    from hfpatch.runs.progress import Progress as Progress

_NAMES = {
    "checking": ["check"],
    "comparison": ["compare", "train"],
    "corpus": ["tokenize"],
    "evaluation": ["evaluate"],
    "forecasting": ["forecast"],
    "inspection": ["inspect"],
    "progress": ["Progress"],
}

__all__ = sorted(name for names in _NAMES.values() for name in names)
__getattr__ = lazy_names(__name__, _NAMES)
