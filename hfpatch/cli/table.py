"""Progress of runs that go on at the same time: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hfpatch.cli.progress import PLAIN_EVERY_S, done_text
from hfpatch.runs.progress import Progress
from hfpatch.training.records import StepRecord

_AROUND = 5  # lines of the table that are no run
_NAMED = 6  # runs that one plain line names


@dataclass
class _Row:
    """What is known of a run at work."""

    node: str
    action: str
    steps: int = 0
    record: StepRecord | None = None
    task: str = ""
    done: int = 0
    total: int = 0

    @property
    def state(self) -> str:
        """What is done, and on which task."""
        return f"{self.action} {self.task}".strip()

    @property
    def step(self) -> str:
        """How far its training is in steps, or its evaluation in requests."""
        if self.total:
            return f"{self.done:,} / {self.total:,}"
        return f"{self.record.step if self.record else 0:,} / {self.steps:,}" if self.steps else ""

    @property
    def loss(self) -> str:
        """The loss of the last step."""
        return f"{self.record.loss:.4f}" if self.record else ""

    @property
    def speed(self) -> str:
        """Tokens a second of the last step."""
        record = self.record
        return f"{record.tokens / record.seconds:,.0f}" if record is not None and record.seconds > 0 else ""


class _Rows(Progress):
    """The runs at work, and how many units are left."""

    def __init__(self) -> None:
        self.rows: dict[str, _Row] = {}
        self.units = self.units_left = 0

    def opened(self, engine: str, units: int) -> None:
        """Say how runs are worked on."""
        self.units = self.units_left = units
        self.say(f"{units} units of work, {engine}")

    def placed(self, run: str, action: str, node: str) -> None:
        """Show a run on its node."""
        self.rows[run] = _Row(node, action)

    def started(self, run: str, steps: int) -> None:
        """Note how many steps there are."""
        self.rows[run].steps = steps

    def stepped(self, run: str, record: StepRecord) -> None:
        """Show the last step."""
        self.rows[run].record = record

    def scored(self, run: str, task: str, done: int, total: int) -> None:
        """Show how far a task is."""
        row = self.rows[run]
        row.task, row.done, row.total = task, done, total

    def left(self, run: str, units: int) -> None:
        """Show a run no more."""
        self.rows.pop(run, None)
        self.units_left = units

    def waiting(self, reason: str) -> None:
        """Say why nothing moves."""
        self.say(f"waiting: {reason}")

    def lost(self, run: str, reason: str) -> None:
        """Say that a run goes on elsewhere."""
        self.rows.pop(run, None)
        self.say(f"{run}: its worker ended ({reason}); another one goes on from the newest checkpoint")

    def failed(self, error: str) -> None:
        """Say that a run failed."""
        self.say(f"failed: {error}")

    def finished(self, run: str, summary: str) -> None:
        """Say what a run gave."""
        self.say(done_text(run, summary))

    def say(self, text: str) -> None:
        """Print one line."""
        print(text, file=sys.stderr, flush=True)


class PlainTable(_Rows):
    """A line when a unit begins or a run ends, and every half minute one on all that are at work."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.monotonic()

    def __enter__(self) -> PlainTable:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def placed(self, run: str, action: str, node: str) -> None:
        """Say where a unit begins."""
        super().placed(run, action, node)
        self.say(f"{run}: {action} on {node}")

    def stepped(self, run: str, record: StepRecord) -> None:
        """Say every half minute how far all runs at work are."""
        super().stepped(run, record)
        self._say_all()

    def scored(self, run: str, task: str, done: int, total: int) -> None:
        """Say every half minute how far all runs at work are."""
        super().scored(run, task, done, total)
        self._say_all()

    def _say_all(self) -> None:
        if time.monotonic() - self._last > PLAIN_EVERY_S:
            self._last = time.monotonic()
            parts = [_in_words(name, row) for name, row in self.rows.items()]
            more = f", and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
            done = self.units - self.units_left
            self.say(f"{done} of {self.units} units done; at work: {', '.join(parts[:_NAMED])}{more}")


class TableProgress(_Rows):
    """A table of the runs at work; what is done scrolls away above it as text."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._live = Live(console=console, get_renderable=self.table, refresh_per_second=2, transient=True)

    def __enter__(self) -> TableProgress:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def say(self, text: str) -> None:
        """Print one line above the table."""
        self._console.print(Text(text))

    def table(self) -> Table:
        """Return the table of this moment."""
        rows, most = dict(self.rows), max(1, self._console.height - _AROUND)
        hidden = f", {len(rows) - most} of the runs at work are not shown" if len(rows) > most else ""
        done = f"{self.units - self.units_left} of {self.units} units done{hidden}"
        table = Table(caption=done if self.units else None, box=None, pad_edge=False)
        for name in ("run", "state", "node"):
            table.add_column(name, no_wrap=True)
        for name in ("step", "loss", "tokens/s"):
            table.add_column(name, no_wrap=True, justify="right")
        for run, row in list(rows.items())[:most]:
            table.add_row(Text(run), Text(row.state), Text(row.node), row.step, row.loss, row.speed)
        return table


def _in_words(run: str, row: _Row) -> str:
    """Return how far a run is in a few words."""
    step = f" {row.step}" if row.step else ""
    return f"{run} {row.state}{step}{f' loss {row.loss}' if row.loss else ''}"
