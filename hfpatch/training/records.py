"""Records of a run: a line a step, counts and decisions, and the summary."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from hfpatch.errors import HfpatchError
from hfpatch.results.parts import TrainResult
from hfpatch.support.cpu import MatmulLibrary
from hfpatch.support.files import printable, write_text

_END_BYTES = 4096
"""How much of a file is read for its last line."""


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl.

    The first line may be of step 0, before any update: an ``eval_loss``, no ``loss``.

    Attributes:
        step: the optimiser step, from 1.
        loss: nats per predicted token of the step's batch, before the update; left out of the file if not finite.
        lr: the learning rate that the update used.
        tokens: tokens of the step's batch, padding not counted.
        seconds: duration of the step; evaluation and checkpoints not counted.
        eval_loss: nats per token on the evaluation blocks after the update, where it was measured.
        skipped: True where the update was left out because loss or gradient were not finite.
    """

    step: int
    loss: float
    lr: float
    tokens: int
    seconds: float
    eval_loss: float | None = None
    skipped: bool | None = None


_RECORD = partial(StepRecord, loss=math.nan)  # which is left out of the file if not finite


@dataclass
class LoopState:
    """Counts and decisions of a run.

    Attributes:
        survival: group -> (changed, with gradient), see :func:`hfpatch.training.diagnostics.counting_survival`.
        skipped: steps whose update was left out because loss or gradient were not finite.
        best_loss: the lowest evaluation loss, or None before the first evaluation.
        best_step: the step after which it was measured.
        waited: evaluations since then.
        stopped: whether early stopping has ended the run.
        diverged_step: the step at which the run diverged, which ended it, or None.
        matmul: the library of the matrix products on the CPU, which a resumed run keeps; None before the first step.
    """

    survival: dict[str, tuple[int, int]] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    best_loss: float | None = None
    best_step: int | None = None
    waited: int = 0
    stopped: bool = False
    diverged_step: int | None = None
    matmul: MatmulLibrary | None = None

    @property
    def ended_early(self) -> bool:
        """Whether the run has ended before its plan."""
        return self.stopped or self.diverged_step is not None

    def evaluated(self, step: int, loss: float, patience: int | None) -> bool:
        """Record an evaluation; return whether it is the best so far."""
        better = math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss)
        if better:
            self.best_loss, self.best_step, self.waited = loss, step, 0
        else:
            self.waited += 1
        self.stopped = patience is not None and self.waited >= patience
        return better


def summarise(
    records: Sequence[StepRecord],
    *,
    peak_memory_bytes: int,
    update_survival: dict[str, float],
    state: LoopState | None = None,
    speed_limit: float | None = None,
) -> TrainResult:
    """Add up a run's records; ``speed_limit`` is the machine's, in tokens a second."""
    state = state or LoopState()
    tokens = sum(record.tokens for record in records)
    wall_s = sum(record.seconds for record in records)
    return TrainResult(
        steps=records[-1].step,
        final_loss=next((record.loss for record in reversed(records) if math.isfinite(record.loss)), math.nan),
        tokens=tokens,
        wall_s=wall_s,
        tokens_per_s=tokens / wall_s,
        peak_memory_bytes=peak_memory_bytes,
        update_survival=update_survival,
        final_eval_loss=records[-1].eval_loss,
        best_eval_loss=state.best_loss,
        best_step=state.best_step,
        skipped_steps=len(state.skipped),
        stopped_early=state.stopped,
        diverged_step=state.diverged_step,
        mfu=tokens / wall_s / speed_limit if speed_limit else None,
        matmul=state.matmul,
    )


def _parse(line: str, kind: Callable[..., Any] = dict) -> Any:
    """Return a line's object as this kind; None for anything else and for an object without a step."""
    try:
        value = json.loads(line)
        return kind(**value) if isinstance(value, dict) and isinstance(value.get("step"), int) else None
    except (json.JSONDecodeError, TypeError):
        return None


@dataclass(frozen=True)
class JsonLines:
    """A file of JSON objects, one a line, each with its ``step``; steps never go back."""

    path: Path

    def write(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Append lines, with null for numbers that are not finite, and flush; HfpatchError if that fails."""
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write("".join(json.dumps(printable(value)) + "\n" for value in values))
        except OSError as error:
            raise HfpatchError(f"{self.path}: cannot be written ({error.strerror}); free space and resume") from error

    def values(self, kind: Callable[..., Any] = dict) -> list[Any]:
        """Return all lines, but not a last one that a crash cut off; HfpatchError if another one is damaged."""
        values = []
        for number, line in enumerate(self._whole_lines(), start=1):
            value = _parse(line, kind)
            if value is None:
                raise HfpatchError(
                    f"{self.path}: line {number} is damaged; delete the folder {self.path.parent} and resume, which "
                    "trains that run again"
                )
            values.append(value)
        return values

    def drop_after(self, step: int, are_complete: Callable[[list[int]], bool]) -> None:
        """Drop the lines after ``step`` and any behind a damaged one; before the first step, all.

        Raises:
            HfpatchError: if ``are_complete`` rejects the remaining steps.
        """
        lines = self._whole_lines() if step else []
        values = takewhile(lambda value: value is not None and value["step"] <= step, map(_parse, lines))
        steps = [value["step"] for value in values if value]
        if not are_complete(steps):
            raise HfpatchError(
                f"{self.path}: lines up to step {step} are missing or damaged; delete the run and start again"
            )
        if self.path.exists():
            write_text(self.path, "".join(line + "\n" for line in lines[: len(steps)]))

    def sync(self) -> None:
        """Have the system write the file, if there is one, to the disk, so that no checkpoint is ahead of it."""
        if self.path.exists():
            with self.path.open("rb") as stream:
                os.fsync(stream.fileno())

    def _whole_lines(self) -> list[str]:
        if not self.path.exists():
            return []
        return self.path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]


class MetricsFile(JsonLines):
    """metrics.jsonl: one line a step, written as it comes."""

    def append(self, record: StepRecord) -> None:
        """Write one line and flush it."""
        self.write([{name: value for name, value in printable(asdict(record)).items() if value is not None}])

    def read(self) -> list[StepRecord]:
        """Return all records, as `values`."""
        return self.values(_RECORD)

    def last(self) -> StepRecord | None:
        """Return the newest whole record, reading only the file's end; None if there is none yet."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - _END_BYTES))
                lines = stream.read().decode("utf-8", errors="replace").split("\n")[:-1]
        except OSError:
            return None
        return _parse(lines[-1], _RECORD) if lines else None

    def truncate(self, step: int) -> None:
        """Drop the lines after ``step``; HfpatchError if one up to it is missing or damaged."""
        self.drop_after(step, lambda steps: [number for number in steps if number] == list(range(1, step + 1)))
