"""One run: its fixed parts and its state, whether it can be trained, and its folder."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from hfpatch.data.blocks import TokenBlocks
from hfpatch.data.packing import packing_obstacle
from hfpatch.data.plan import BatchPlan
from hfpatch.data.tokenizer import embeddings_of
from hfpatch.errors import HfpatchError
from hfpatch.recipes.training import (
    NOT_IDENTITY,
    LoopSettings,
    PretrainSettings,
    TrainingSettings,
    check_held_out,
)
from hfpatch.training.checkpoint import Checkpoint, newest_checkpoint, remove_old
from hfpatch.training.diagnostics import DiagnosticsFile
from hfpatch.training.records import LoopState, MetricsFile, StepRecord
from hfpatch.training.sharding import under_deepspeed


@dataclass
class Run:
    """One run's fixed parts, and its records and state so far.

    Attributes:
        settings: the recipe's section ``training``, `TrainingSettings` of a patch, `PretrainSettings` of a whole model.
        blocks: the training blocks.
        plan: which blocks each step sees, drawn for these blocks; it decides the number of steps.
        seed: the seed of dropout.
        folder: the run's own folder, for ``metrics.jsonl``, ``diagnostics.jsonl`` and ``checkpoints/``.
        origin: more hashes that a resumed run must share, such as those of the frozen base and of the method's
            settings.
        held_out: blocks that are never trained on; the loss on all of them is recorded as ``eval_loss``.
        on_step: called with each step's record, on the main process.
        measure_survival: whether to count the weights that updates of a patch really change.
        blocks_checked: whether the model is known to take the blocks; otherwise packed ones are tried on it.
        diagnose_every: measure the query paths every so many steps, at the start and at the end; None never does.
        checkpoint: where it resumes from, or None.
    """

    settings: LoopSettings
    blocks: TokenBlocks
    plan: BatchPlan
    seed: int
    folder: Path
    origin: Mapping[str, str | None] = field(default_factory=dict)
    held_out: TokenBlocks | None = None
    on_step: Callable[[StepRecord], None] | None = None
    measure_survival: bool = True
    blocks_checked: bool = False
    diagnose_every: int | None = None
    checkpoint: Checkpoint | None = None
    records: list[StepRecord] = field(default_factory=list)
    state: LoopState = field(default_factory=LoopState)
    checkpoints: Path = field(init=False)
    metrics: MetricsFile = field(init=False)
    diagnostics: DiagnosticsFile = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoints = self.folder / "checkpoints"
        self.metrics = MetricsFile(self.folder / "metrics.jsonl")
        self.diagnostics = DiagnosticsFile(self.folder / "diagnostics.jsonl")

    @property
    def start(self) -> int:
        """Steps done before this session."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def on_bad_loss(self) -> Literal["record", "skip", "stop"]:
        """What a loss or gradient that is not finite does; pretraining always records it."""
        return self.settings.on_bad_loss if isinstance(self.settings, TrainingSettings) else "record"

    def micro_batch(self, processes: int) -> int:
        """Return how many blocks one process takes through one forward pass.

        Raises:
            HfpatchError: if the batch cannot be divided by it.
        """
        batch = self.plan.batch_size
        size = self.settings.micro_batch_size or max(1, batch // processes)
        if batch % (size * processes):
            raise HfpatchError(
                f"a batch of {batch} cannot be divided in micro-batches of {size} on {processes} processes; "
                "change batch_size or micro_batch_size"
            )
        return size

    @property
    def identity(self) -> dict[str, Any]:
        """The settings and data that a resumed run must share; memory, saving and processes may differ."""
        return {
            "settings": self.settings.model_dump(mode="json", exclude=set(NOT_IDENTITY)),
            "seed": self.seed,
            "data": self.blocks.sha256,
            "batch plan": self.plan.sha256,
            "evaluation data": self.held_out.sha256 if self.held_out else None,
            "origin": dict(self.origin),
        }

    def evaluates_after(self, step: int) -> bool:
        """Whether the evaluation loss is due after ``step`` steps, 0 meaning before the first.

        Of a patch the base's loss is measured only where later ones are compared with it.
        """
        if self.held_out is None or self.state.diverged_step is not None:
            return False
        every = self.settings.evaluate_every
        return self.is_due(step, every) if step else every is not None or isinstance(self.settings, PretrainSettings)

    def diverges(self, step: int, loss: float) -> bool:
        """Whether a loss of step ``step`` ends the run as diverged.

        The bound holds after warm-up only: an untrained model's loss lies about ln V, just below the least possible
        bound, and a spike while the learning rate still rises often passes.
        """
        if self.on_bad_loss != "record":
            return False
        bound = self.settings.diverged_above if isinstance(self.settings, PretrainSettings) else None
        is_above = bound is not None and step > self.settings.warmup_steps and loss > bound
        return is_above or not math.isfinite(loss)

    def is_due(self, step: int, every: int | None) -> bool:
        """Whether something is due after ``step`` steps that happens at the end and ``every`` so many steps."""
        return step == self.plan.steps or (every is not None and step % every == 0)


def check_run(model: PreTrainedModel, run: Run) -> None:
    """Refuse a run that cannot be trained, before anything is written.

    Raises:
        HfpatchError: if plan, blocks, settings and model do not fit each other, or the batch cannot be divided.
    """
    settings = run.settings
    if len(run.blocks) != run.plan.blocks:
        raise HfpatchError(
            f"the batch plan was drawn for {run.plan.blocks} blocks and the data has {len(run.blocks)}: "
            "it is for another data set, tokenizer or block size; start a new run"
        )
    if (run.plan.steps, run.plan.batch_size) != (settings.steps, settings.batch_size):
        raise HfpatchError(
            f"the batch plan has {run.plan.steps} steps of {run.plan.batch_size} blocks, the settings ask for "
            f"{settings.steps} of {settings.batch_size}; start a new run or set steps and batch_size as planned"
        )
    check_held_out(settings, measured=run.held_out is not None)
    run.micro_batch(PartialState().num_processes)
    if not run.blocks_checked:
        check_blocks(model, run.blocks, run.held_out)
    if settings.gradient_checkpointing and not getattr(model, "supports_gradient_checkpointing", True):
        raise HfpatchError(
            f"training.gradient_checkpointing: {model.config.model_type} does not support it; leave it out"
        )


def check_blocks(model: PreTrainedModel, blocks: TokenBlocks, held_out: TokenBlocks | None = None) -> None:
    """Refuse blocks beyond the model's context or embeddings, or whose packed documents it cannot keep apart."""
    check_context(model, blocks, held_out)
    texts, rows = [text for text in (blocks, held_out) if text is not None], embeddings_of(model)
    if (largest := max(text.largest_id for text in texts)) >= rows:
        raise HfpatchError(
            f"the text has the token {largest}, and the model only {rows} embeddings; leave out the documents with "
            "that special token, or use a model that has it"
        )
    packed = [text.block_size for text in texts if text.layout == "packed" and len(text.sizes) > len(text)]
    if packed and (why := packing_obstacle(model, max(packed))):
        raise HfpatchError(
            f"{model.config.model_type}: this model cannot keep packed documents apart: {why}; set data.layout=padded "
            "(evaluation_data.layout where that text is packed)"
        )


def check_context(model: PreTrainedModel, blocks: TokenBlocks, held_out: TokenBlocks | None = None) -> None:
    """Refuse blocks that are longer than the context of the model, which may be on the meta device."""
    longest = max(text.block_size for text in (blocks, held_out) if text is not None)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise HfpatchError(
            f"blocks of {longest} tokens (data.block_size) are longer than the model's context of {limit} "
            "(max_position_embeddings, n_positions); use shorter blocks or a model with a longer context"
        )


def open_folder(run: Run) -> None:
    """Find the checkpoint to continue from; only the first process changes the folder.

    Raises:
        HfpatchError: if it holds another run, the processes see different folders or data, or DeepSpeed cannot do what
            is asked; the run in the folder is then as it was.
    """
    state = PartialState()
    if state.is_main_process:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        for half_written in run.checkpoints.glob(".step-*"):
            shutil.rmtree(half_written, ignore_errors=True)
    state.wait_for_everyone()
    run.checkpoint = newest_checkpoint(run.checkpoints, run.identity)
    if run.checkpoint is not None:
        run.state = run.checkpoint.state

    # Processes that see another checkpoint or other data, as machines without a shared folder would.
    by_process = gather_object([(run.start, run.blocks.sha256, run.plan.sha256)])
    for what, values in zip(
        ("checkpoint", "training blocks", "batch plan"), zip(*by_process, strict=True), strict=True
    ):
        if len(set(values)) > 1:
            raise HfpatchError(
                f"the processes see different inputs ({what}: {', '.join(sorted({str(value) for value in values}))}); "
                f"every machine must see the same {run.folder} and the same data"
            )

    # DeepSpeed does not show the optimiser's state or the gradients
    if run.start < run.plan.steps and not run.state.ended_early:
        if run.checkpoint is not None and (under_deepspeed() or not run.checkpoint.resumable):
            raise HfpatchError(
                f"{run.checkpoint.folder}: a run under DeepSpeed cannot be resumed, as the optimiser's state stays "
                "inside DeepSpeed; start it again, or use FSDP2, which can be resumed"
            )
        if under_deepspeed() and (run.on_bad_loss == "skip" or run.settings.save_every is not None):
            key = "save_every" if run.settings.save_every is not None else "on_bad_loss=skip"
            raise HfpatchError(f"training.{key} does not work under DeepSpeed; leave it out, or use FSDP2")

    # Only now is anything changed
    if state.is_main_process:
        if run.start:  # a kill may have come before old ones were removed
            keep = run.settings.keep_checkpoints
            remove_old(run.checkpoints, run.start, best_step=run.state.best_step, keep=keep)
        run.metrics.truncate(run.start)
        diagnosed = set[int]()
        if run.diagnose_every is not None and run.start:
            ended = run.start >= run.plan.steps or run.state.ended_early
            diagnosed.update(range(0, run.start + 1, run.diagnose_every), [run.start] if ended else [])
        run.diagnostics.truncate(run.start, diagnosed)
    state.wait_for_everyone()
    run.records = run.metrics.read()
