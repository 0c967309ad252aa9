"""Experiment trackers of ``transformers``, called as its Trainer calls them."""

from __future__ import annotations

from typing import Any

from accelerate import PartialState
from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from hfpatch.errors import HfpatchError, first_line
from hfpatch.training.hardware import peak_memory_bytes
from hfpatch.training.processes import runs_on_cpu
from hfpatch.training.records import StepRecord
from hfpatch.training.run import Run


def check_trackers(names: tuple[str, ...]) -> list[Any]:
    """Return a new object of each tracker; HfpatchError if one is unknown or not installed."""
    try:
        return [tracker() for tracker in get_reporting_integration_callbacks(list(names))]
    except (ValueError, RuntimeError, ImportError) as error:
        raise HfpatchError(f"training.report_to: {', '.join(names)} cannot be used ({first_line(error)})") from error


class Trackers:
    """The started trackers that a run's settings name.

    Trackers read the configuration of ``model``; ``speed_limit`` is the machine's, in tokens a second.
    """

    def __init__(self, run: Run, model: PreTrainedModel, speed_limit: float) -> None:
        self._trackers = check_trackers(run.settings.report_to)
        if not self._trackers:
            return
        process, settings = PartialState(), run.settings
        self._model, self._speed_limit = model, speed_limit
        self._arguments = TrainingArguments(
            output_dir=str(run.folder),  # where some write; checkpoints/ is removed after the run
            max_steps=run.plan.steps,
            per_device_train_batch_size=run.micro_batch(process.num_processes),
            gradient_accumulation_steps=run.plan.batch_size // run.micro_batch(process.num_processes),
            learning_rate=settings.lr,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm or 0.0,
            report_to=list(settings.report_to),
            seed=run.seed,
            use_cpu=runs_on_cpu(),
            accelerator_config={"use_configured_state": True},  # or it would reset the accelerator's
        )
        main, local = process.is_main_process, process.is_local_main_process
        self._state = TrainerState(
            global_step=run.start, max_steps=run.plan.steps, is_world_process_zero=main, is_local_process_zero=local
        )
        self.call("on_init_end")
        self.call("on_train_begin")

    def log(self, record: StepRecord) -> None:
        """Report a step."""
        if not self._trackers:
            return
        speed = record.tokens / record.seconds
        figures = {
            "loss": record.loss,
            "learning_rate": record.lr,
            "tokens_per_s": speed,
            "mfu": speed / self._speed_limit,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        if record.eval_loss is not None:
            figures["eval_loss"] = record.eval_loss
        self._state.global_step = record.step
        self.call("on_log", logs=figures)

    def call(self, event: str, **values: Any) -> None:
        """Call the method ``event`` of each tracker."""
        for tracker in self._trackers:
            getattr(tracker, event)(self._arguments, self._state, TrainerControl(), model=self._model, **values)
