"""The section ``evaluation`` of a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    NonNegativeInt,
    PlainSerializer,
    PositiveInt,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from hfpatch.recipes.strict import ExpandedPath, Section, Seed, check_among


def _limit(value: float) -> float:
    if value > 1 and value != int(value):
        raise ValueError("must be a whole number of documents, or a share of them between 0 and 1")
    return value if value < 1 else int(value)


Limit = Annotated[float, Field(gt=0), AfterValidator(_limit), PlainSerializer(lambda value: value, int | float)]
"""The first documents of a task: how many, or below 1 their share."""
FEWSHOT_SEED = 1234
"""lm-eval's seed for few-shot examples."""


class TaskOptions(Section):
    """Options of one task, or of the tasks of one group."""

    limit: Limit | None = None
    """Only its first documents, in place of the ``limit`` of all tasks."""


Tasks = Annotated[
    Annotated[tuple[str, ...], Tag("<names>")] | Annotated[dict[str, TaskOptions | None], Tag("<options>")],
    Discriminator(lambda value: "<options>" if isinstance(value, Mapping) else "<names>"),
]
"""The names of tasks, or a mapping from them to their options; iterating over either gives the names."""


class EvaluationSettings(Section):
    """Which lm-eval tasks to run, and how."""

    tasks: Tasks = ("lambada_openai", "hellaswag", "arc_easy", "wikitext")
    """Tasks, groups and tags of lm-eval, and hfpatch's own tasks (``eval/``); or a mapping from each to its options,
    such as ``{wikitext: {limit: 5}, hellaswag: null}``. ``[]`` measures ``data.held_out`` alone."""
    include_path: ExpandedPath | None = None
    """A folder with more task files of lm-eval's kind; one that bears the name of another task takes its place."""
    limit: Limit | None = None
    """Only the first documents of each task, or below 1 a share of them; None takes all."""
    num_fewshot: NonNegativeInt | None = None
    """Examples before each question; None takes each task's own number."""
    batch_size: PositiveInt = 16
    """Rows of one batch in text generation; scoring counts tokens."""
    token_budget: PositiveInt | None = None
    """Tokens that are scored at once; None chooses them for the device. It changes no decision."""
    max_length: PositiveInt | None = None
    """Longest row in tokens; None takes the model's own."""
    allow_unknown_base: bool = False
    """Continue where the base scores outside its published known score."""
    cluster: dict[str, str | None] = Field(default_factory=dict)
    """By task the column of its documents that says which belong together, as questions on one passage do; null for
    none. A task that is not named takes the ``cluster`` in its file's ``metadata``, or that of lm-eval's known ones."""
    apply_chat_template: bool | str = False
    """Write prompts in the chat template of the tokenizer, or in the one of this name."""
    system_instruction: str | None = None
    """A system message before each prompt."""
    fewshot_as_multiturn: bool | None = None
    """With a chat template: few-shot examples are turns of the conversation, not one message; None is true."""
    gen_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of text generation that replace those of the tasks, such as ``{temperature: 0.8, do_sample: true}``."""
    seed: tuple[Seed | None, Seed | None, Seed | None, Seed] | None = None
    """The seeds of Python's, NumPy's and torch's random numbers, null to leave one as it is, and that of few-shot
    examples; None leaves all as they are, with 1234 for few-shot examples."""
    confirm_run_unsafe_code: bool = False
    """Run tasks that execute the code which the model writes."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> EvaluationSettings:
        check_among("cluster", self.cluster, [*self.tasks], "tasks")
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise ValueError("fewshot_as_multiturn: needs apply_chat_template, whose turns the examples become")
        return self

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # noqa: ANN202  pydantic reads the type as a schema
        # Without unused options of prompts, so that reports list the used ones
        values, fields = write(self), type(self).model_fields
        unused = {key for key in _PROMPTING if values.get(key) == fields[key].get_default(call_default_factory=True)}
        return {key: value for key, value in values.items() if key not in unused}

    @property
    def plain(self) -> bool:
        """Whether prompts are those of the tasks alone."""
        return not self.apply_chat_template and self.system_instruction is None

    @property
    def fewshot_seed(self) -> int:
        """The seed for choosing few-shot examples."""
        return FEWSHOT_SEED if self.seed is None else self.seed[3]

    def limit_of(self, name: str, documents: int) -> int | None:
        """Return how many of a task's documents are scored; ``tasks`` names it, its group or its tag ``name``."""
        options = self.tasks.get(name) if isinstance(self.tasks, Mapping) else None
        limit = self.limit if options is None or options.limit is None else options.limit
        return limit if limit is None or isinstance(limit, int) else math.ceil(documents * limit)


_PROMPTING = {
    *("apply_chat_template", "system_instruction", "fewshot_as_multiturn"),
    *("gen_kwargs", "seed", "confirm_run_unsafe_code"),
}
