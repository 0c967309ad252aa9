"""The results of ``hfpatch eval``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, computed_field

from hfpatch.results.parts import SCHEMA, Comparison, GroupResult, ModelFacts, Part, TaskResult, Values
from hfpatch.results.tables import Record, Tabular, pair_records, score_records
from hfpatch.results.verdicts import Measure, Verdict, deciding, judge


class EvaluatedVariant(Part):
    """The base, the base with a patch, or one of several whole models.

    Attributes:
        model: one of several models: name, revision, hashes, dtype, size and longest row; None is the base.
        patch: the patch's folder; None is the bare base.
        scale: the factor of the patch's change; None is 1.
        added: parameters that the patch added.
        scores: the result of each task.
        groups: the score of each group of tasks that was asked for and has one; None where there is none.
    """

    model: ModelFacts | None = None
    patch: str | None = None
    scale: float | None = None
    added: int = 0
    scores: dict[str, TaskResult]
    groups: dict[str, GroupResult] | None = None

    @property
    def rows(self) -> list[TaskResult | GroupResult]:
        """The results of groups, then those of tasks, as tables show them."""
        return [*(self.groups or {}).values(), *self.scores.values()]


class EvaluationResults(Tabular):
    """The results of ``hfpatch eval``.

    Attributes:
        schema_version: :data:`SCHEMA`, as ``schema`` in the file.
        kind: what sort of results these are.
        model: the base, or the first of several models: name, revision, hash, dtype.
        settings: the tasks and how they were run.
        variants: the models, by label; the bare base is ``base``.
        comparisons: each patch compared with the base, where the base was evaluated too, by every measure; of several
            models each compared with all before it.
        verdicts: the verdict of each pair on each task, by the measure that decides it.
        warnings: the cautions.
        provenance: where the numbers come from.
    """

    tables = ("scores", "verdicts", "comparisons")

    kind: Literal["evaluation"] = "evaluation"
    schema_version: Literal[2] = Field(SCHEMA, alias="schema")
    model: ModelFacts
    settings: Values
    variants: Annotated[dict[str, EvaluatedVariant], Field(min_length=1)]
    comparisons: list[Comparison] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    provenance: Values = Field(default_factory=dict)

    @computed_field  # type: ignore[prop-decorator]  # pydantic stacks it on properties
    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdict of each pair on each task: the one list that every report reads."""
        scores = next(iter(self.variants.values())).scores
        primary = {task: Measure(score.primary, score.higher_is_better) for task, score in scores.items()}
        measures = deciding(primary, {(one.task, one.metric) for one in self.comparisons})
        made = list(dict.fromkeys(one.pair for one in self.comparisons))
        return judge(self.comparisons, {"models" if self.of_models else "base": made} if made else {}, measures)

    def records(self, table: str) -> Iterator[Record]:  # noqa: D102 - as in Tabular
        if table != "scores":
            yield from pair_records(self.verdicts if table == "verdicts" else self.comparisons)
            return
        for name, variant in self.variants.items():
            of_model = {"model": name, "patch": variant.patch, "added": variant.added}
            for score in variant.rows:
                is_group = isinstance(score, GroupResult)
                yield from ({**of_model, **row, "is_group": is_group} for row in score_records(score))

    @property
    def of_models(self) -> bool:
        """Whether several whole models were evaluated, instead of one base and its patches."""
        return any(variant.model is not None for variant in self.variants.values())
