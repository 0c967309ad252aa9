"""Evaluation: lm-eval's tasks and metrics, per-document records, paired statistics.

Importing this package registers the lm-eval model ``hfpatch`` by name alone; torch and transformers are imported when
lm-eval builds the model, and the functions below when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hfpatch.results.parts import Comparison as Comparison
from hfpatch.results.parts import TaskResult as TaskResult
from hfpatch.support.lazy import lazy_names, needing_lab

if TYPE_CHECKING:
    from hfpatch.evaluation.again import compare_again as compare_again
    from hfpatch.evaluation.comparison import check_comparable as check_comparable
    from hfpatch.evaluation.comparison import compare as compare
    from hfpatch.evaluation.known_scores import check_known_scores as check_known_scores
    from hfpatch.evaluation.model import HfpatchLM as HfpatchLM
    from hfpatch.evaluation.reading import Records as Records
    from hfpatch.evaluation.run import Storage as Storage
    from hfpatch.evaluation.run import all_aggregations as all_aggregations
    from hfpatch.evaluation.run import evaluate as evaluate
    from hfpatch.evaluation.selection import select as select
    from hfpatch.evaluation.tasks import load_tasks as load_tasks

_NAMES = {
    "again": ["compare_again"],
    "comparison": ["check_comparable", "compare"],
    "known_scores": ["check_known_scores"],
    "model": ["HfpatchLM"],
    "reading": ["Records"],
    "run": ["Storage", "all_aggregations", "evaluate"],
    "selection": ["select"],
    "tasks": ["load_tasks"],
}

with needing_lab():
    model_registry = import_module("lm_eval.api.registry").model_registry
    import_module("lm_eval.models")  # lm-eval fills its registry only while that is empty
if "hfpatch" not in model_registry:
    model_registry.register("hfpatch", target="hfpatch.evaluation.model:HfpatchLM")

__all__ = sorted(["Comparison", "TaskResult", *(name for names in _NAMES.values() for name in names)])
__getattr__ = lazy_names(__name__, _NAMES)
