"""What a recipe says about evaluation."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from hfpatch.errors import nearest
from hfpatch.recipes.strict import ExpandedPath, Section


class EvaluationSettings(Section):
    """Which lm-eval tasks to run, and how."""

    tasks: Annotated[tuple[str, ...], Field(min_length=1)] = ("lambada_openai", "hellaswag", "arc_easy", "wikitext")
    """lm-eval task names, hfpatch's own (``eval/``) included."""
    include_path: ExpandedPath | None = None
    """A folder with more task files of lm-eval's kind; one that bears the name of another task takes its place."""
    limit: PositiveInt | None = None
    """Only the first documents of each task; None takes all."""
    num_fewshot: NonNegativeInt | None = None
    """Examples before each question; None takes each task's own number."""
    batch_size: PositiveInt = 16
    """Rows of one batch in text generation; scoring counts tokens."""
    token_budget: PositiveInt | None = None
    """Tokens that are scored at once; None takes what suits the device. It changes no decision."""
    max_length: PositiveInt | None = None
    """Longest row in tokens; None takes the model's own."""
    allow_unknown_base: bool = False
    """Continue where the base scores outside its published known score."""
    cluster: dict[str, str | None] = Field(default_factory=dict)
    """By task the column of its documents that says which belong together, as questions on one passage do; null for
    none. A task that is not named takes the ``cluster`` in its file's ``metadata``, or that of lm-eval's known ones."""

    @model_validator(mode="after")
    def _clusters_are_of_tasks(self) -> EvaluationSettings:
        for task in self.cluster:
            if task not in self.tasks:
                raise ValueError(f"cluster names {task!r}, which is not among tasks{nearest(task, self.tasks)}")
        return self

    @property
    def task_options(self) -> dict[str, Any]:
        """What `load_tasks` takes besides the tasks' names and the data folder."""
        return {"num_fewshot": self.num_fewshot, "include_path": self.include_path}
