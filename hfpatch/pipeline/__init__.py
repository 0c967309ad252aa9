"""From a recipe to results: every command of hfpatch as a function, imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.lazy import lazy_names

if TYPE_CHECKING:
    from hfpatch.pipeline.checking import check
    from hfpatch.pipeline.comparison import compare, train
    from hfpatch.pipeline.inspection import inspect
    from hfpatch.pipeline.pretraining import pretrain
    from hfpatch.pipeline.progress import Progress
    from hfpatch.pipeline.scoring import evaluate
    from hfpatch.pipeline.study import pretrain_study

__all__ = ["Progress", "check", "compare", "evaluate", "inspect", "pretrain", "pretrain_study", "train"]

_HOMES = {
    "Progress": "progress",
    "check": "checking",
    "compare": "comparison",
    "evaluate": "scoring",
    "inspect": "inspection",
    "pretrain": "pretraining",
    "pretrain_study": "study",
    "train": "comparison",
}

__getattr__ = lazy_names(__name__, _HOMES)
