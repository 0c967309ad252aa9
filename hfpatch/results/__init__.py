"""What hfpatch measured: one typed schema, written by the commands and read by the reports and by you."""

from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.evaluation import EvaluationResults
from hfpatch.results.folder import Results, json_schema, load_results
from hfpatch.results.parts import Comparison, TaskResult

__all__ = [
    "Comparison",
    "ComparisonResults",
    "EvaluationResults",
    "Results",
    "TaskResult",
    "json_schema",
    "load_results",
]
