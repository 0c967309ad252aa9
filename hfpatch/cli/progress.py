"""Progress: in a terminal a table of the runs at work, above which lines scroll away; elsewhere the lines alone."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hfpatch.runs.progress import Progress
from hfpatch.training.hardware import resident_memory_bytes
from hfpatch.training.records import StepRecord

PLAIN_EVERY_S = 30.0
"""Seconds between two lines of the runs at work where the output is no terminal."""
LONG_S = 5.0
"""After how many seconds of preparation a line says what takes them, so that a mistake found before is one line."""
_AROUND = 5  # lines of the table that are no run
_NAMED = 6  # runs that one plain line names
_BAR = 16  # letters of a bar
_WIDE = 100  # letters of a terminal with room for one


@contextmanager
def choose_progress(*, shown: bool = True) -> Iterator[Progress]:
    """Yield a display of the runs at work on standard error.

    Only the first process shows it, and none where it is not to be ``shown``.
    """
    console = Console(stderr=True)
    if not shown or not is_first_process():
        yield Progress()
        return
    with closing(RunDisplay(console)) as display, display.live if console.is_terminal else nullcontext():
        yield display


def is_first_process() -> bool:
    """Return whether this is the only process, or the first one of a launcher."""
    return os.environ.get("RANK", "0") == "0"


@dataclass
class Row:
    """A run at work: since when, and how far it is in what it does.

    Attributes:
        begun: when the run began.
        node: where its worker is.
        task: what it does: the action of a worker's unit, a training or the task of an evaluation.
        done: steps or requests that are done, of ``total``.
        record: the last step.
        task_begun: when the task began.
    """

    begun: float
    node: str = ""
    task: str = ""
    done: int = 0
    total: int = 0
    record: StepRecord | None = None
    task_begun: float = 0.0

    def begin(self, task: str, total: int = 0) -> None:
        """Note that the run does something else."""
        self.task, self.done, self.total, self.record, self.task_begun = task, 0, total, None, time.monotonic()

    @property
    def elapsed(self) -> timedelta:
        """How long the run has been at work."""
        return timedelta(seconds=int(time.monotonic() - self.begun))

    def cells(self) -> dict[str, str]:
        """Return how far the run is, by column; a column without a number is empty."""
        cells, last = dict.fromkeys(("step", "loss", "tokens/s", "memory", "left"), ""), self.record
        unit_s = (time.monotonic() - self.task_begun) / self.done if self.done else 0.0
        if self.total:
            cells["step"] = f"{self.done:,} / {self.total:,}"
        if last is not None and last.step:  # step 0 is an evaluation alone
            cells["loss"], unit_s = f"{last.loss:.4f}", last.seconds
            cells["tokens/s"] = f"{last.tokens / last.seconds:,.0f}" if last.seconds else ""
        if not self.node:
            cells["memory"] = f"{resident_memory_bytes() / 1e9:.1f} GB"
        if self.done and self.total:
            cells["left"] = str(timedelta(seconds=round(unit_s * (self.total - self.done))))
        return cells

    def __str__(self) -> str:
        cells = self.cells()
        names = {"loss": "loss {}", "tokens/s": "{} tokens/s", "memory": "{}", "left": "{} left"}
        numbers = [text.format(cells[name]) for name, text in names.items() if cells[name]]
        return ", ".join([f"{self.task} {cells['step']}".strip(), *numbers])


class RunDisplay(Progress):
    """The runs at work: in a terminal a table while ``live`` is entered, above which other lines scroll away as text.

    Elsewhere a line when something begins or a run ends, and every half minute one on all runs at work.
    """

    def __init__(self, console: Console) -> None:
        self.rows: dict[str, Row] = {}
        self.units = self.units_left = 0  # of workers
        self._console, self._what, self._last_line = console, "", time.monotonic()
        self._timer = threading.Timer(0.0, self.say)
        self.live = Live(console=console, get_renderable=self.table, refresh_per_second=2, transient=True)

    def preparing(self, what: str) -> None:
        """Show what happens before the runs; in lines after :data:`LONG_S`, unless something else happens before."""
        self.close()
        self._what = what
        if not self._console.is_terminal:
            self._timer = threading.Timer(LONG_S, self.say, [what])
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Note that the preparation is over."""
        self._timer.cancel()
        self._what = ""

    def opened(self, engine: str, units: int) -> None:
        """Show how many units there are."""
        self.units = self.units_left = units
        self.say(f"{units} units of work, {engine}")

    def placed(self, run: str, action: str, node: str) -> None:
        """Show that a worker begins a unit."""
        self.rows[run] = Row(time.monotonic(), node, action)
        self._tell(f"{run}: {action} on {node}")

    def started(self, run: str, steps: int) -> None:
        """Show that a training begins."""
        row = self._row(run)
        row.begin(row.task or "train", steps)
        if not self.units:
            self._tell(f"{run}: training, {steps} steps")

    def stepped(self, run: str, record: StepRecord) -> None:
        """Show one optimiser step."""
        row = self._row(run)
        row.record, row.done = record, record.step
        self._sum_up()

    def evaluating(self, run: str, task: str) -> None:
        """Show that a task begins."""
        self._row(run).begin(task)
        if not self.units:
            self._tell(f"{run}: {task}")

    def scored(self, run: str, task: str, done: int, total: int) -> None:
        """Show how far a task is."""
        row = self._row(run)
        if row.task != task:
            row.begin(task)
        row.done, row.total = done, total
        self._sum_up()

    def finished(self, run: str, summary: str) -> None:
        """Show that a run is complete, in a terminal also how long it took."""
        row = self.rows.pop(run, None)
        took = f" in {row.elapsed}" if row is not None and self._console.is_terminal else ""
        self.say(f"{run}: done{took}{summary and f', {summary}'}")

    def left(self, run: str, units: int, error: str | None = None) -> None:
        """Remove a run whose unit has ended; print its error if it failed."""
        self.rows.pop(run, None)
        self.units_left = units
        if error is not None:
            self.say(f"failed: {error}")

    def lost(self, run: str, reason: str) -> None:
        """Say that a worker ended."""
        self.rows.pop(run, None)
        self.say(f"{run}: its worker ended ({reason}); another one goes on from the newest checkpoint")

    def say(self, text: str) -> None:
        """Print one line, above the table where there is one."""
        self.close()
        self._last_line = time.monotonic()
        if self._console.is_terminal:
            self._console.print(Text(text))
        else:
            print(text, file=sys.stderr, flush=True)

    def table(self) -> Table:
        """Return the table of this moment."""
        rows, most = dict(self.rows), max(1, self._console.height - _AROUND)
        hidden = f"{len(rows) - most} of the runs at work are not shown" if len(rows) > most else ""
        caption = ", ".join(filter(None, (self._units_done, hidden, self._what)))
        table = Table(caption=caption or None, box=None, pad_edge=False, show_header=bool(rows))
        has_bar = not self.units and self._console.width >= _WIDE
        for name in ("run", "state", *(["node"] if self.units else [""] if has_bar else [])):
            table.add_column(name)
        numbers = ("step", "loss", "tokens/s", *(() if self.units else ("memory",)), "elapsed", "left")
        for name in numbers:
            table.add_column(name, no_wrap=True, justify="right")
        for run, row in list(rows.items())[:most]:
            cells = {**row.cells(), "elapsed": str(row.elapsed)}
            bar = ProgressBar(total=row.total or None, completed=row.done, width=_BAR)
            at = [Text(row.node)] if self.units else [bar] if has_bar else []
            table.add_row(Text(run), Text(row.task), *at, *(cells[name] for name in numbers))
        return table

    @property
    def _units_done(self) -> str:
        return f"{self.units - self.units_left} of {self.units} units done" if self.units else ""

    def _row(self, run: str) -> Row:
        """Return the row of a run; without workers one run is at work at a time."""
        self.close()
        if run not in self.rows:
            if not self.units:
                self.rows.clear()
            self.rows[run] = Row(time.monotonic())
        return self.rows[run]

    def _tell(self, begun: str) -> None:
        """Say what has begun, which a table shows itself."""
        self.close()
        if not self._console.is_terminal:
            self.say(begun)

    def _sum_up(self) -> None:
        """Without a table, say every half minute how far all runs at work are."""
        if not self._console.is_terminal and time.monotonic() - self._last_line > PLAIN_EVERY_S:
            parts = [f"{name}: {row}" for name, row in self.rows.items()]
            more = f", and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
            self.say(f"{self._units_done and f'{self._units_done}; '}{'; '.join(parts[:_NAMED])}{more}")
