"""What hfpatch measured: one typed schema, written by the commands and read by the reports and by you."""

from hfpatch.results.folder import load_results
from hfpatch.results.schema import (
    Comparison,
    ComparisonResults,
    EvaluationResults,
    Results,
    TaskResult,
    json_schema,
)

__all__ = [
    "Comparison",
    "ComparisonResults",
    "EvaluationResults",
    "Results",
    "TaskResult",
    "json_schema",
    "load_results",
]
