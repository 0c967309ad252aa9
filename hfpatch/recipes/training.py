"""The section ``training`` of a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    model_serializer,
    model_validator,
)

from hfpatch.errors import HfpatchError
from hfpatch.recipes.data import check_plan_size
from hfpatch.recipes.strict import MOST_SEEDS, Dtype, Section, Seeds, explain

Group = Literal["pre_projection", "skip", "query", "lora", "other"]
"""Groups of trained tensors by their role, each of which may have its own learning rate or dtype."""

_MARKS: tuple[tuple[str, Group], ...] = (
    ("preproj_skip", "skip"),
    ("preproj_", "pre_projection"),
    ("nonlinear_", "query"),
    ("temperature_", "query"),
    ("lora_", "lora"),
)
AnySettings = TypeVar("AnySettings", bound="LoopSettings")
_Rate = Annotated[float, Field(ge=0, lt=1)]
_FEWEST_SEEDS = 2  # of a look: with one there is no variance over seeds

NOT_IDENTITY = {
    *("seeds", "micro_batch_size", "gradient_checkpointing", "compile"),
    *("save_every", "keep_checkpoints", "keep_finished", "report_to"),
}
"""Settings that may differ between a run and its continuation: they change the numbers by rounding at most."""
_OF_SCHEDULES = {"decay_steps": ("wsd",), "min_lr_ratio": ("cosine", "wsd")}


class LoopSettings(Section):
    """Settings of every training run: batches, optimiser, schedule, checkpoints."""

    instead_of: ClassVar[Mapping[str, str]] = {"steps": "epochs", "epochs": "steps"}

    steps: PositiveInt
    """Optimiser steps."""
    epochs: PositiveFloat | None = None
    """Instead of ``steps``: how often each block is seen, on average over a mixture; rounded up to whole steps."""
    batch_size: PositiveInt = 16
    """Blocks that one optimiser step sees, over all processes and accumulation steps together."""
    micro_batch_size: PositiveInt | None = None
    """Blocks in one forward pass on one process; None takes the whole batch at once."""
    lr: PositiveFloat
    """Peak learning rate."""
    learning_rates: dict[Group, PositiveFloat] = Field(default_factory=dict)
    """Peak learning rates of single tensor groups (pre_projection, skip, query, lora, other) where they differ from
    ``lr``; a group that a method does not have is no mistake."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """The decay after warm-up (constant: none; wsd: none until the last ``decay_steps``, linear there), with the
    formulas of ``transformers``."""
    decay_steps: PositiveInt | None = None
    """Steps of wsd's decay at the end, at most those after warm-up; None takes a tenth of the steps."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The floor of cosine and wsd, as a share of the peak."""
    warmup_steps: NonNegativeInt
    """Steps of linear warm-up: of w, the first has 1 / (w + 1) of the peak, and the step after the last the peak."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; never applied to norms and biases."""
    betas: tuple[_Rate, _Rate]
    """AdamW's decay rates."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip the gradient's norm to this; None does not clip."""
    autocast: Literal["bfloat16"] | None = None
    """Run the forward pass under autocast in this dtype."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    compile: bool = False
    """Run the model through torch.compile: worth its start-up on GPUs, gains nothing on CPUs."""
    evaluate_every: PositiveInt | None = None
    """Measure the loss on the evaluation blocks at the start, every so many steps and at the end; None measures at the
    end only."""
    patience: PositiveInt | None = None
    """Stop when so many evaluations in a row brought no lower loss; None never stops early."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest evaluation loss besides the newest, and end with its weights."""
    save_every: PositiveInt | None = None
    """Write a checkpoint every so many steps; None writes none before the end."""
    keep_checkpoints: PositiveInt = 1
    """How many checkpoints to keep, the newest ones."""
    keep_finished: bool = False
    """Leave a finished run's checkpoints, which hold the optimiser's state; otherwise its command removes them."""
    report_to: tuple[str, ...] = ()
    """Trackers that ``transformers`` knows, such as tensorboard, wandb or trackio; each must be installed."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> LoopSettings:
        for key, schedules in _OF_SCHEDULES.items():
            if self.schedule not in schedules and self.changed([key]):
                raise ValueError(
                    f"training.{key} is for training.schedule={' or '.join(schedules)}, and training.schedule is "
                    f"{self.schedule}; leave it out"
                )
        if self.evaluate_every is None and (changed := self.changed(("patience", "keep_best"))):
            raise ValueError(
                f"training.{changed[0]} compares evaluations, but there is only one; set training.evaluate_every"
            )
        if self.changed(("keep_checkpoints",)) and self.save_every is None and not self.keep_best:
            raise ValueError(
                f"training.keep_checkpoints is {self.keep_checkpoints}, and only the last one is written; set "
                "training.save_every, or leave it out"
            )
        micro, batch = self.micro_batch_size, self.batch_size
        if micro is not None and batch % micro:
            raise ValueError(f"training.micro_batch_size is {micro}; must divide training.batch_size ({batch})")
        if self.epochs is not None:  # how many steps they are is known once the text is
            if "steps" in self.model_fields_set:
                raise ValueError("training.epochs and training.steps both say how long to train; leave one out")
            return self
        if self.warmup_steps >= self.steps:
            default = "" if "warmup_steps" in self.model_fields_set else " (the default)"
            raise ValueError(
                f"training.warmup_steps is {self.warmup_steps}{default}; must be below training.steps ({self.steps})"
            )
        check_plan_size(self.steps, batch)
        return self

    @model_serializer(mode="wrap")
    def _one_of_both(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the one of ``steps`` and ``epochs`` that is not used."""
        values: dict[str, Any] = handler(self)
        values.pop("epochs" if self.epochs is None else "steps", None)
        return values


def _growing(counts: tuple[int, ...]) -> tuple[int, ...]:
    if list(counts) != sorted(set(counts)) or counts[0] < _FEWEST_SEEDS or counts[-1] > MOST_SEEDS:
        raise ValueError(
            f"is {list(counts)}; must be growing numbers of seeds from {_FEWEST_SEEDS} to {MOST_SEEDS}, such as "
            "[4, 6, 9, 12]"
        )
    return counts


class Looks(Section):
    """Numbers of seeds after which it is tested which primary questions are decided."""

    looks: Annotated[tuple[int, ...], Field(min_length=1), AfterValidator(_growing)]
    """Growing numbers of seeds, such as ``[4, 6, 9, 12]``. All methods get the seeds 0 to 3; after each look only the
    methods of undecided primary pairs, and those they are compared with, get the seeds up to the next one."""


class SeededSettings(LoopSettings):
    """Settings of runs that are repeated with several seeds, to be compared."""

    seeds: Annotated[
        Annotated[Seeds, Tag("<seeds>")] | Annotated[Looks, Tag("<looks>")],
        Discriminator(lambda value: "<looks>" if isinstance(value, Looks | Mapping) else "<seeds>"),
    ] = (0,)
    """One run per seed, which fixes initialisation and batch plan for every method alike: a list of seeds; a number N
    for 0 to N - 1; or ``{looks: [4, 6, 9, 12]}`` for more seeds until the primary questions are decided, tested with 4,
    6, 9 and 12 seeds at levels that together keep each question's."""

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of seeds after which it is tested what is decided; none where the seeds are given."""
        return self.seeds.looks if isinstance(self.seeds, Looks) else ()

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds; with looks all that may be needed."""
        return tuple(range(self.seeds.looks[-1])) if isinstance(self.seeds, Looks) else self.seeds

    @property
    def first_seeds(self) -> tuple[int, ...]:
        """The seeds that every method gets: all, or those before the first look."""
        return self.all_seeds[: self.looks[0]] if self.looks else self.all_seeds


class TrainingSettings(SeededSettings):
    """The probe: a frozen base and a few trained tensors; the defaults are the protocol of arXiv 2604.10791."""

    steps: PositiveInt = 500
    lr: PositiveFloat = 1e-5
    warmup_steps: NonNegativeInt = 50
    betas: tuple[_Rate, _Rate] = (0.9, 0.999)
    on_bad_loss: Literal["record", "skip", "stop"] = "record"
    """The answer to a loss or gradient that is NaN or infinite. ``record``: the run ends there and counts as diverged,
    which is a result: no patch, no scores, its step in the reports. ``skip``: the update is left out and counted; a run
    whose model has no finite loss in the end counts as diverged. ``stop``: an error that names the blocks of the
    step."""
    trainable_dtype: Dtype = "float32"
    """The dtype of trained tensors. bfloat16 loses most small updates; it is here to reproduce results that used it."""
    trainable_dtypes: dict[Group, Dtype] = Field(default_factory=dict)
    """The dtype of single tensor groups (pre_projection, skip, query, lora, other) where it differs from
    ``trainable_dtype``."""


class PretrainSettings(LoopSettings):
    """Pretraining: every parameter is trained, in float32; the defaults suit a model of a few million parameters."""

    steps: PositiveInt = 2000
    batch_size: PositiveInt = 32
    lr: PositiveFloat = 1e-3
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    warmup_steps: NonNegativeInt = 100
    betas: tuple[_Rate, _Rate] = (0.9, 0.95)
    lr_scaling: Literal["none", "width"] = "none"
    """``width``: learning rates are multiplied by 4d / (inner width of the MLP), one over the width as the fan-in of
    its second matrix asks for, so that widths differ in nothing but the width; 1 for GPT-2's own 4d. metrics.jsonl
    shows the product."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, on matrices only: those of tokens and positions among them, gains and biases not."""
    diverged_above: PositiveFloat | None = None
    """The loss of a step's batch, in nats per token, above which the run counts as diverged; must be above ln V, where
    a model of V tokens begins, and holds once warm-up is over. None: only a loss or gradient that is NaN or infinite
    does. A diverged run ends there, with its step in the result and no model."""
    diagnose_every: PositiveInt | None = None
    """Measure f of every query path beside its anchor on the first evaluation blocks, before the first step, every so
    many steps and at the end; None never does. Architectures without f write nothing."""


class StudySettings(PretrainSettings, SeededSettings):
    """Pretraining with every seed, for a study of variants."""


def group_of(name: str) -> Group:
    """Return the group of a parameter by its name in the model.

    ``skip`` is W_skip, ``pre_projection`` the pre-projection's other matrices, ``query`` everything of a nonlinear
    query (also where its targets are keys or values) and temperatures, ``lora`` LoRA's matrices, ``other`` the rest.
    """
    parts = name.split(".")
    return next((group for mark, group in _MARKS if any(part.startswith(mark) for part in parts)), "other")


def with_steps(training: AnySettings, blocks: int) -> AnySettings:
    """Return the settings with their epochs on so many blocks turned into steps.

    Raises:
        HfpatchError: if the steps contradict the other settings.
    """
    if training.epochs is None:
        return training
    steps = math.ceil(training.epochs * blocks / training.batch_size)
    try:
        return training.replaced({"steps": steps, "epochs": None})
    except ValidationError as error:
        why = explain(error, type(training))
        raise HfpatchError(f"training.epochs is {training.epochs:g} of {blocks} blocks: {why}") from None


def check_held_out(training: LoopSettings, *, measured: bool) -> None:
    """Refuse a setting that needs held-out text where none is ``measured``."""
    wanted = ("patience", "keep_best", "diagnose_every", "evaluate_every")
    key = next((name for name in wanted if getattr(training, name, None)), None)
    if measured or key is None:
        return
    what = "held-out text" if key.endswith("_every") else "the loss on held-out text"
    where = "data.held_out or evaluation_data" if isinstance(training, PretrainSettings) else "data.held_out"
    raise HfpatchError(f"training.{key} needs {what}, and there is none; set {where}")
