"""Evaluation: lm-eval's tasks and metrics, per-document records, paired statistics.

Importing this package registers the lm-eval model ``hfpatch`` by name alone; torch and transformers are imported when
lm-eval builds the model, and the functions below when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hfpatch.results.parts import Comparison, TaskResult
from hfpatch.support.lazy import lazy_names, needing_lab

if TYPE_CHECKING:
    from hfpatch.evaluation.again import compare_again
    from hfpatch.evaluation.comparison import check_comparable, compare
    from hfpatch.evaluation.known_scores import check_known_scores
    from hfpatch.evaluation.model import HfpatchLM
    from hfpatch.evaluation.reading import Records
    from hfpatch.evaluation.run import Storage, all_aggregations, evaluate
    from hfpatch.evaluation.selection import select
    from hfpatch.evaluation.tasks import load_tasks

__all__ = [
    "Comparison",
    "HfpatchLM",
    "Records",
    "Storage",
    "TaskResult",
    "all_aggregations",
    "check_comparable",
    "check_known_scores",
    "compare",
    "compare_again",
    "evaluate",
    "load_tasks",
    "select",
]

_HOMES = {
    "HfpatchLM": "model",
    "Records": "reading",
    "check_known_scores": "known_scores",
    "compare_again": "again",
    "load_tasks": "tasks",
    "select": "selection",
    **dict.fromkeys(("Storage", "all_aggregations", "evaluate"), "run"),
    **dict.fromkeys(("check_comparable", "compare"), "comparison"),
}

with needing_lab():
    model_registry = import_module("lm_eval.api.registry").model_registry
    import_module("lm_eval.models")  # lm-eval fills its registry only while that is empty
if "hfpatch" not in model_registry:
    model_registry.register("hfpatch", target="hfpatch.evaluation.model:HfpatchLM")

__getattr__ = lazy_names(__name__, _HOMES)
