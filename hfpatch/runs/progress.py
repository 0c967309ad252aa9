"""What is reported while runs are in progress."""

from __future__ import annotations

from hfpatch.training.records import StepRecord


class Progress:
    """Callbacks for each event, which do nothing; the command line overrides them to show progress."""

    def started(self, run: str, steps: int) -> None:
        """Called when the training of a run starts, of so many steps."""

    def stepped(self, run: str, record: StepRecord) -> None:
        """Called after one optimiser step."""

    def evaluating(self, run: str, task: str) -> None:
        """Called when the evaluation on a task starts."""

    def scored(self, run: str, task: str, done: int, total: int) -> None:
        """Called while a task is evaluated: ``done`` of ``total`` requests are scored."""

    def finished(self, run: str, summary: str) -> None:
        """Called when a run is complete."""
