"""Callbacks that report the progress of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfpatch.training.records import StepRecord


class Progress:
    """Callbacks for each event, which do nothing; the command line overrides them to show progress."""

    def preparing(self, what: str) -> None:
        """Called when something begins that may take long before any run, such as loading the base or waiting."""

    def opened(self, engine: str, units: int) -> None:
        """Called before runs are started on several workers, with the engine and the number of open units."""

    def placed(self, run: str, action: str, node: str) -> None:
        """Called when a worker starts or continues a unit of a run."""

    def left(self, run: str, units: int, error: str | None = None) -> None:
        """Called when a unit of a run is complete, or failed with ``error``; ``units`` are still open."""

    def lost(self, run: str, reason: str) -> None:
        """Called when the worker of a run ended early; its unit is started again from its checkpoint."""

    def started(self, run: str, steps: int) -> None:
        """Called when the training of a run starts."""

    def stepped(self, run: str, record: StepRecord) -> None:
        """Called after one optimiser step."""

    def evaluating(self, run: str, task: str) -> None:
        """Called when the evaluation on a task starts."""

    def scored(self, run: str, task: str, done: int, total: int) -> None:
        """Called while a task is evaluated: ``done`` of ``total`` requests are scored."""

    def finished(self, run: str, summary: str) -> None:
        """Called when a run is complete."""
