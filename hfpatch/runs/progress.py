"""What a pipeline tells the one who watches it."""

from __future__ import annotations

from hfpatch.training.records import StepRecord


class Progress:
    """Called at each event, and does nothing; the command line's subclasses show it."""

    def started(self, run: str, steps: int) -> None:
        """Hear that a run begins; ``steps`` is 0 where nothing is trained."""

    def stepped(self, run: str, record: StepRecord) -> None:
        """Called after one optimiser step."""

    def evaluating(self, run: str, task: str) -> None:
        """Hear that a task begins."""

    def scored(self, run: str, task: str, done: int, total: int) -> None:
        """Hear how many of a task's requests are scored."""

    def finished(self, run: str, summary: str) -> None:
        """Hear that a run is complete."""
