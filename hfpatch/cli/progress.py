"""Progress: a live line for each run in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from hfpatch.runs.progress import Progress
from hfpatch.training.records import StepRecord

PLAIN_EVERY_S = 30.0
"""Seconds between two lines of one training run where the output is no terminal."""


@contextmanager
def choose_progress(*, parallel: bool = False) -> Iterator[Progress]:
    """Yield live bars in a terminal and plain lines elsewhere, on standard error; only the first process shows them.

    Args:
        parallel: whether several runs go on at the same time; they are shown as a table then.
    """
    console = Console(stderr=True)
    if not is_first_process():
        yield Progress()
        return
    if parallel:
        from hfpatch.cli.table import PlainTable, TableProgress

        with TableProgress(console) if console.is_terminal else PlainTable() as table:
            yield table
        return
    if not console.is_terminal:
        yield PlainProgress()
        return
    texts = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}")
    with Bars(*texts, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console) as bars:
        yield LiveProgress(bars)


def is_first_process() -> bool:
    """Return whether this is the only process or the first of those that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


class PlainProgress(Progress):
    """One line when a run starts and ends, and one every half minute between."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._steps = 0

    def started(self, run: str, steps: int) -> None:
        """Show that a run begins."""
        self._steps = steps
        self._say(f"{run}: training, {steps} steps" if steps else run)

    def stepped(self, run: str, record: StepRecord) -> None:
        """Show one optimiser step."""
        if time.monotonic() - self._last > PLAIN_EVERY_S:
            left = timedelta(seconds=round(record.seconds * (self._steps - record.step)))
            self._say(f"{run}: {_state(record)}, {left} left")

    def evaluating(self, run: str, task: str) -> None:
        """Show that a task begins."""
        self._say(f"{run}: {task}")

    def scored(self, run: str, task: str, done: int, total: int) -> None:
        """Show how far a task is."""
        if time.monotonic() - self._last > PLAIN_EVERY_S:
            self._say(f"{run}: {task}, {done:,} of {total:,} requests")

    def finished(self, run: str, summary: str) -> None:
        """Show that a run is complete."""
        self._say(done_text(run, summary))

    def _say(self, text: str) -> None:
        self._last = time.monotonic()
        print(text, file=sys.stderr, flush=True)


class TokensSoFar:
    """A line every half minute while text becomes tokens."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()

    def __call__(self, documents: int, tokens: int) -> None:
        """Show how many documents and tokens are written."""
        now = time.monotonic()
        if now - self._last > PLAIN_EVERY_S:
            self._last, speed = now, tokens / (now - self._started)
            print(f"{documents:,} documents, {tokens:,} tokens, {speed:,.0f} tokens/s", file=sys.stderr, flush=True)


class LiveProgress(Progress):
    """A bar for each run: step, loss, tokens a second, memory and time left, then the task, then the scores.

    Where the terminal has no line left for the next bar, the first of those that are complete scrolls away as text.
    """

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._lines: dict[str, TaskID] = {}
        self._finished: dict[str, str] = {}

    def started(self, run: str, steps: int) -> None:
        """Show that a run begins."""
        self._bars.update(self._line(run), total=steps or None, completed=0, state="")

    def stepped(self, run: str, record: StepRecord) -> None:
        """Show one optimiser step."""
        self._bars.update(self._line(run), completed=record.step, state=_state(record))

    def evaluating(self, run: str, task: str) -> None:
        """Show that a task begins."""
        self._bars.update(self._line(run), state=task)

    def scored(self, run: str, task: str, done: int, total: int) -> None:
        """Show how far a task is."""
        self._bars.update(self._line(run), total=total, completed=done, state=task)

    def finished(self, run: str, summary: str) -> None:
        """Show that a run is complete."""
        line = self._line(run)
        self._bars.update(line, total=1, completed=1, state=summary)
        self._bars.stop_task(line)
        self._finished[run] = summary

    def _line(self, run: str) -> TaskID:
        if run not in self._lines:
            if self._finished and len(self._lines) >= self._bars.console.height - 1:
                first = next(iter(self._finished))
                text = done_text(first, self._finished.pop(first))
                self._bars.console.print(text, markup=False, highlight=False)
                self._bars.remove_task(self._lines.pop(first))
            self._lines[run] = self._bars.add_task(run, total=None, state="")
        return self._lines[run]


def done_text(run: str, summary: str) -> str:
    """Return the line of a run that is complete, with its summary if it has one."""
    return f"{run}: done, {summary}" if summary else f"{run}: done"


def _state(record: StepRecord) -> str:
    from hfpatch.training.hardware import resident_memory_bytes

    speed = record.tokens / record.seconds if record.seconds else 0.0
    memory = f"{resident_memory_bytes() / 1e9:.1f} GB"
    return f"step {record.step}, loss {record.loss:.4f}, {speed:,.0f} tokens/s, {memory}"
