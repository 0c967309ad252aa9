"""The layout of ``results.json``: of a comparison, a pretraining study and an evaluation.

``runs/`` builds these models and writes them, ``reporting/`` and users read them with :func:`hfpatch.load_results`.
Nothing here imports torch. A number that is not finite is null in the file. :func:`json_schema` is the same layout for
other tools.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from hfpatch.results.comparison import (
    ComparisonResults,
    Curve,
    LayerSeries,
    Match,
    Method,
    Parameters,
    Run,
    Task,
)
from hfpatch.results.parts import SCHEMA, Comparison, Part, TaskResult, TrainResult, Values, Verdict
from hfpatch.results.study import (
    AtStep,
    ByStep,
    Diagnostic,
    Improvement,
    Loss,
    Point,
    Row,
    StudyResults,
    StudyRun,
    Variant,
    VariantParameters,
)
from hfpatch.results.tuning import Choice, Trial, Tuning

__all__ = [
    "SCHEMA", "AtStep", "ByStep", "Choice", "Comparison", "ComparisonResults", "Curve", "Diagnostic",
    "EvaluatedVariant", "EvaluationResults", "Improvement", "LayerSeries", "Loss", "Match", "Method", "Parameters",
    "Point", "Results", "Row", "Run", "StudyResults", "StudyRun", "Task", "TaskResult", "TrainResult", "Trial",
    "Tuning", "Variant", "VariantParameters", "Verdict", "json_schema",
]  # fmt: skip


class EvaluatedVariant(Part):
    """The base, or the base with a patch.

    Attributes:
        patch: the patch's folder; None is the bare base.
        added: parameters that the patch added.
        scores: the result of each task.
    """

    patch: str | None = None
    added: int = 0
    scores: dict[str, TaskResult]


class EvaluationResults(Part):
    """What ``hfpatch eval`` found.

    Attributes:
        schema_version: :data:`SCHEMA`, as ``schema`` in the file.
        kind: what sort of results these are.
        model: the base: name, revision, hash, dtype.
        settings: the tasks and how they were run.
        variants: what was evaluated, by label; the bare base is ``base``.
        comparisons: each patch compared with the base, where the base was evaluated too.
        warnings: what a reader must know before believing the scores.
        provenance: where the numbers come from.
    """

    schema_version: Literal[2] = Field(SCHEMA, alias="schema")
    kind: Literal["evaluation"] = "evaluation"
    model: Values
    settings: Values
    variants: dict[str, EvaluatedVariant]
    comparisons: list[Comparison] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    provenance: Values = Field(default_factory=dict)


Results = ComparisonResults | StudyResults | EvaluationResults
"""Any ``results.json``; ``kind`` says which."""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of ``results.json``."""
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[Results, Field(discriminator="kind")])
    return adapter.json_schema(by_alias=True, mode="serialization")
