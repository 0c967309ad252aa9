"""Progress: live bars, or a table of concurrent runs, in a terminal; plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from hfpatch.runs.progress import Progress
from hfpatch.training.records import StepRecord

PLAIN_EVERY_S = 30.0
"""Seconds between two lines of one training run where the output is no terminal."""
LONG_S = 5.0
"""After how many seconds of preparation a line says what takes them, so that a mistake found before is one line."""
_SPEED_S = 600.0  # over which a speed is taken, as one step may take minutes
_AROUND = 5  # lines of the table that are no run
_NAMED = 6  # runs that one plain line names


@contextmanager
def choose_progress(*, parallel: bool = False, shown: bool = True) -> Iterator[Progress]:
    """Yield live bars, of ``parallel`` runs a table, in a terminal and plain lines elsewhere, on standard error.

    Only the first process shows them, and none where they are not to be ``shown``.
    """
    console = Console(stderr=True)
    if not shown or not is_first_process():
        yield Progress()
    elif parallel:
        with closing(TableProgress(console)) as table, table.live if console.is_terminal else nullcontext():
            yield table
    elif not console.is_terminal:
        with closing(PlainProgress()) as plain:
            yield plain
    else:
        with make_bars(console) as bars:
            yield LiveProgress(bars)


def make_bars(console: Console, **options: Any) -> Bars:
    """Return bars with what each run does, and with its times."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), _Times()
    return Bars(*columns, console=console, speed_estimate_period=_SPEED_S, **options)


class _Times(ProgressColumn):
    """How long a run has been at work and about how long its task still takes; of a complete run how long it took."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """Return the times of a bar."""
        elapsed = timedelta(seconds=int(task.elapsed or 0.0))
        if task.stop_time is not None:
            return Text(str(elapsed))
        left = task.time_remaining if task.remaining else None
        return Text(f"{elapsed} elapsed, {'-:--:--' if left is None else timedelta(seconds=int(left))} left")


def is_first_process() -> bool:
    """Return whether this is the only process, or the first one of a launcher."""
    return os.environ.get("RANK", "0") == "0"


class LineProgress(Progress):
    """Progress in lines on standard error."""

    def __init__(self) -> None:
        self._last_line = time.monotonic()
        self._timer = threading.Timer(0.0, self.say)

    def preparing(self, what: str) -> None:
        """Show what happens before the runs after :data:`LONG_S`, unless something else happens before."""
        self.close()
        self._timer = threading.Timer(LONG_S, self.say, [what])
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        """Note that the preparation is over."""
        self._timer.cancel()

    def finished(self, run: str, summary: str) -> None:
        """Show that a run is complete."""
        self.say(_done(run, summary))

    def say(self, text: str) -> None:
        """Print one line."""
        self.close()
        self._last_line = time.monotonic()
        print(text, file=sys.stderr, flush=True)


class PlainProgress(LineProgress):
    """One line when a run starts and ends, and one every half minute between."""

    _steps = 0

    def started(self, run: str, steps: int) -> None:
        """Show that a run begins."""
        self._steps = steps
        self.say(f"{run}: training, {steps} steps" if steps else run)

    def stepped(self, run: str, record: StepRecord) -> None:
        """Show one optimiser step."""
        if time.monotonic() - self._last_line > PLAIN_EVERY_S:
            left = timedelta(seconds=round(record.seconds * (self._steps - record.step)))
            self.say(f"{run}: {_state(record)}, {left} left")

    def evaluating(self, run: str, task: str) -> None:
        """Show that a task begins."""
        self.say(f"{run}: {task}")

    def scored(self, run: str, task: str, done: int, total: int) -> None:
        """Show how far a task is."""
        if time.monotonic() - self._last_line > PLAIN_EVERY_S:
            self.say(f"{run}: {task}, {done:,} of {total:,} requests")


@dataclass(eq=False)
class LiveProgress(Progress):
    """A bar for each run: step, loss, tokens a second, memory and time left, then the task, then the scores.

    Where the terminal has no line left for the next bar, the first complete one scrolls away as text.
    """

    bars: Bars
    _lines: dict[str, TaskID] = field(default_factory=dict, init=False)
    _finished: dict[str, str] = field(default_factory=dict, init=False)
    _preparing: TaskID | None = field(default=None, init=False)

    def preparing(self, what: str) -> None:
        """Show what happens before the runs, in a bar that the first of them replaces."""
        self._end_preparing()
        self._preparing = self.bars.add_task(what, total=None, state="")

    def started(self, run: str, steps: int) -> None:
        """Show that a run begins."""
        self.bars.update(self._line(run), total=steps or None, completed=0, state="")

    def stepped(self, run: str, record: StepRecord) -> None:
        """Show one optimiser step."""
        self.bars.update(self._line(run), completed=record.step, state=_state(record))

    def evaluating(self, run: str, task: str) -> None:
        """Show that a task begins."""
        self.bars.update(self._line(run), state=task)

    def scored(self, run: str, task: str, done: int, total: int) -> None:
        """Show how far a task is."""
        self.bars.update(self._line(run), total=total, completed=done, state=task)

    def finished(self, run: str, summary: str) -> None:
        """Show that a run is complete."""
        line = self._line(run)
        self.bars.update(line, total=1, completed=1, state=summary)
        self.bars.stop_task(line)
        self._finished[run] = summary

    def _end_preparing(self) -> None:
        if self._preparing is not None:
            self.bars.remove_task(self._preparing)
            self._preparing = None

    def _line(self, run: str) -> TaskID:
        self._end_preparing()
        if run not in self._lines:
            if self._finished and len(self._lines) >= self.bars.console.height - 1:
                first = next(iter(self._finished))
                line = _done(first, self._finished.pop(first))
                self.bars.console.print(line, markup=False, highlight=False)
                self.bars.remove_task(self._lines.pop(first))
            self._lines[run] = self.bars.add_task(run, total=None, state="")
        return self._lines[run]


@dataclass
class _Row:
    """A run at work: ``done`` of ``total`` requests of a task, ``record`` of its last step."""

    node: str
    action: str
    steps: int = 0
    record: StepRecord | None = None
    task: str = ""
    done: int = 0
    total: int = 0

    def cells(self) -> tuple[str, str, str]:
        """Return the action, the progress in steps or requests, and the loss of the last step."""
        step = f"{self.record.step if self.record else 0:,} / {self.steps:,}" if self.steps else ""
        return (
            f"{self.action} {self.task}".strip(),
            f"{self.done:,} / {self.total:,}" if self.total else step,
            f"{self.record.loss:.4f}" if self.record and self.record.step else "",  # step 0 is an evaluation alone
        )


class TableProgress(LineProgress):
    """The runs at work: in a terminal a table while ``live`` is entered, above which other lines scroll away as text.

    Elsewhere a line when a unit begins or a run ends, and every half minute one on all runs at work.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.rows: dict[str, _Row] = {}
        self.units = self.units_left = 0
        self._console, self._summed_up = console, time.monotonic()
        self.live = Live(console=console, get_renderable=self.table, refresh_per_second=2, transient=True)

    def opened(self, engine: str, units: int) -> None:
        """Show how many units there are."""
        self.units = self.units_left = units
        self.say(f"{units} units of work, {engine}")

    def placed(self, run: str, action: str, node: str) -> None:
        """Show that a unit begins."""
        self.close()
        self.rows[run] = _Row(node, action)
        self.show(f"{run}: {action} on {node}")

    def started(self, run: str, steps: int) -> None:
        """Note that a training begins."""
        self.rows[run].steps = steps

    def stepped(self, run: str, record: StepRecord) -> None:
        """Show one optimiser step."""
        self.rows[run].record = record
        self.show()

    def scored(self, run: str, task: str, done: int, total: int) -> None:
        """Show how far a task is."""
        row = self.rows[run]
        row.task, row.done, row.total = task, done, total
        self.show()

    def left(self, run: str, units: int, error: str | None = None) -> None:
        """Remove a run whose unit has ended; print its error if it failed."""
        self.rows.pop(run, None)
        self.units_left = units
        if error is not None:
            self.say(f"failed: {error}")

    def waiting(self, reason: str) -> None:
        """Say that no unit can be started."""
        self.say(f"waiting: {reason}")

    def lost(self, run: str, reason: str) -> None:
        """Say that a worker ended."""
        self.rows.pop(run, None)
        self.say(f"{run}: its worker ended ({reason}); another one goes on from the newest checkpoint")

    def say(self, text: str) -> None:
        """Print one line, above the table where there is one."""
        if self._console.is_terminal:
            self.close()
            self._console.print(Text(text))
        else:
            super().say(text)

    def show(self, begun: str = "") -> None:
        """Without a table, print the unit that has ``begun``, or every half minute how far all runs at work are."""
        if self._console.is_terminal:
            return
        if begun:
            self.say(begun)
        elif time.monotonic() - self._summed_up > PLAIN_EVERY_S:
            self._summed_up = time.monotonic()
            parts = []
            for name, row in self.rows.items():
                state, step, loss = row.cells()
                parts.append(f"{name} {state}{step and f' {step}'}{loss and f' loss {loss}'}")
            more = f", and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
            done = f"{self.units - self.units_left} of {self.units} units done"
            self.say(f"{done}; at work: {', '.join(parts[:_NAMED])}{more}")

    def table(self) -> Table:
        """Return the table of this moment."""
        rows, most = dict(self.rows), max(1, self._console.height - _AROUND)
        hidden = f", {len(rows) - most} of the runs at work are not shown" if len(rows) > most else ""
        done = f"{self.units - self.units_left} of {self.units} units done"
        table = Table(caption=done + hidden if self.units else None, box=None, pad_edge=False)
        for name in ("run", "state", "node"):
            table.add_column(name, no_wrap=True)
        for name in ("step", "loss", "tokens/s"):
            table.add_column(name, no_wrap=True, justify="right")
        for run, row in list(rows.items())[:most]:
            state, step, loss = row.cells()
            last = row.record
            speed = f"{last.tokens / last.seconds:,.0f}" if last is not None and last.seconds > 0 else ""
            table.add_row(Text(run), Text(state), Text(row.node), step, loss, speed)
        return table


def _done(run: str, summary: str) -> str:
    return f"{run}: done{summary and f', {summary}'}"


def _state(record: StepRecord) -> str:
    from hfpatch.training.hardware import resident_memory_bytes

    speed = record.tokens / record.seconds if record.seconds else 0.0
    memory = f"{resident_memory_bytes() / 1e9:.1f} GB"
    return f"step {record.step}, loss {record.loss:.4f}, {speed:,.0f} tokens/s, {memory}"
