"""Times and preparations on the progress display."""

import io
import math

from rich.console import Console

from hfpatch.cli.progress import LiveProgress, PlainProgress, TableProgress, choose_progress, make_bars
from hfpatch.training.records import StepRecord


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def shown(bars):
    console = Console(width=200, file=io.StringIO())
    console.print(bars.make_tasks_table(bars.tasks))
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def step(number):
    return StepRecord(step=number, loss=2.5, lr=1e-3, tokens=400, seconds=60.0)


def test_a_bar_says_what_has_passed_and_what_is_left_and_keeps_its_time_when_it_is_complete():
    clock = Clock()
    bars = make_bars(Console(file=io.StringIO()), get_time=clock, auto_refresh=False)
    live = LiveProgress(bars)
    live.started("lora", 4)
    clock.now = 60.0
    live.stepped("lora", step(1))
    assert "step 1, loss 2.5000, 7 tokens/s, " in shown(bars)[0]
    assert shown(bars)[0].endswith("0:01:00 elapsed, -:--:-- left")
    clock.now = 120.0  # steps of a minute
    live.stepped("lora", step(2))
    assert shown(bars)[0].endswith("0:02:00 elapsed, 0:02:00 left")
    live.stepped("lora", step(4))
    live.evaluating("lora", "wikitext")
    clock.now = 487.0
    assert shown(bars)[0].endswith("wikitext 0:08:07 elapsed, -:--:-- left")
    live.finished("lora", "acc 0.5")
    clock.now = 9000.0
    assert shown(bars)[0].endswith("acc 0.5 0:08:07")


def test_what_happens_before_the_runs_is_shown(capsys, monkeypatch):
    bars = make_bars(Console(file=io.StringIO()), auto_refresh=False)
    live = LiveProgress(bars)
    live.preparing("loading a")
    live.preparing("reading b")
    (line,) = shown(bars)
    assert line.startswith("reading b")
    live.started("lora", 4)
    (line,) = shown(bars)
    assert line.startswith("lora")
    # as lines once it has taken a while
    monkeypatch.setattr("hfpatch.cli.progress.LONG_S", 0.01)
    for progress in (PlainProgress(), TableProgress(Console(file=io.StringIO()))):
        progress.preparing("loading a")
        progress._timer.join()
        assert capsys.readouterr().err == "loading a\n"


def test_a_mistake_that_shows_soon_is_the_only_line(capsys):
    for parallel in (False, True):
        with choose_progress(parallel=parallel) as progress:
            progress.preparing("loading a")
            progress.preparing("reading b")
            timer = progress._timer
        timer.join()  # it was cancelled
        assert capsys.readouterr().err == ""


def test_a_run_that_has_only_been_evaluated_has_no_loss_of_a_step():
    table = TableProgress(Console(file=io.StringIO()))
    table.placed("lora", "train", "here")
    table.started("lora", 4)
    table.stepped("lora", StepRecord(step=0, loss=math.nan, lr=0.0, tokens=0, seconds=0.0, eval_loss=2.0))
    assert table.rows["lora"].cells() == ("train", "0 / 4", "")
    table.stepped("lora", step(1))
    assert table.rows["lora"].cells() == ("train", "1 / 4", "2.5000")
