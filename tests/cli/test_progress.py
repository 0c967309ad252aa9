"""Times and preparations on the progress display."""

import io
import math
import re

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import TextColumn

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


def drive(progress):
    progress.started("lora · seed 0", 10)
    progress.stepped("lora · seed 0", StepRecord(step=3, loss=2.5, lr=1e-3, tokens=400, seconds=0.5))
    progress.evaluating("lora · seed 0", "cloze")
    progress.finished("lora · seed 0", "cloze acc 0.5")


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys, monkeypatch):
    with choose_progress() as progress:
        drive(progress)
    assert capsys.readouterr().err.splitlines() == [
        "lora · seed 0: training, 10 steps",
        "lora · seed 0: cloze",
        "lora · seed 0: done, cloze acc 0.5",
    ]
    monkeypatch.setattr("hfpatch.cli.progress.PLAIN_EVERY_S", -1.0)
    with choose_progress() as progress:
        drive(progress)
    assert re.search(r"step 3, loss 2.5000, 800 tokens/s, \d+\.\d GB, 0:00:04 left\n", capsys.readouterr().err)
    monkeypatch.setenv("RANK", "1")
    with choose_progress() as progress:
        drive(progress)
    assert capsys.readouterr().err == ""


def test_scoring_shows_how_far_a_task_is(capsys, monkeypatch):
    monkeypatch.setattr("hfpatch.cli.progress.PLAIN_EVERY_S", -1.0)
    PlainProgress().scored("base", "cloze", 1200, 4000)
    assert capsys.readouterr().err == "base: cloze, 1,200 of 4,000 requests\n"
    console = Console(force_terminal=True, width=120, file=io.StringIO())
    with Bars(TextColumn("{task.completed} of {task.total}"), console=console, auto_refresh=False) as bars:
        LiveProgress(bars).scored("base", "cloze", 1200, 4000)
    assert "1200 of 4000" in console.file.getvalue()


def test_more_runs_than_the_terminal_has_lines_scroll_away():
    console = Console(file=io.StringIO(), width=100, height=4)
    with Bars(TextColumn("{task.description}"), console=console, auto_refresh=False) as bars:
        live = LiveProgress(bars)
        for run in "abcde":
            live.started(run, 3)
            live.finished(run, f"loss of {run}" if run != "b" else "")
        assert [task.description for task in bars.tasks] == ["c", "d", "e"]
    assert "a: done, loss of a\nb: done\n" in "\n".join(line.strip() for line in console.file.getvalue().splitlines())


def drive_two(progress):
    progress.opened("2 runs at a time", 6)
    for number, run in enumerate(("lora · seed 0", "pre · seed 0")):
        progress.placed(run, "train", f"node{number}:7")
        progress.started(run, 1000)
        progress.stepped(run, StepRecord(step=30 + number, loss=2.5, lr=1e-3, tokens=4000, seconds=2.0))


def test_runs_beside_each_other_are_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("hfpatch.cli.progress.PLAIN_EVERY_S", -1.0)
    with choose_progress(parallel=True) as progress:
        drive_two(progress)
        progress.placed("third · seed 0", "evaluate", "node2:7")
        progress.scored("third · seed 0", "cloze", 20, 5153)
        progress.lost("pre · seed 0", "BrokenProcessPool")
        progress.left("lora · seed 0", 5)
        progress.finished("lora · seed 0", "cloze acc 0.5")
        progress.left("pre · seed 0", 4, "pre · seed 0: no")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["6 units of work, 2 runs at a time", "lora · seed 0: train on node0:7"]
    runs = "lora · seed 0 train 30 / 1,000 loss 2.5000, pre · seed 0 train 31 / 1,000 loss 2.5000"
    assert lines[-6] == f"0 of 6 units done; at work: {runs}"
    assert lines[-4] == f"0 of 6 units done; at work: {runs}, third · seed 0 evaluate cloze 20 / 5,153"
    assert lines[-3].startswith("pre · seed 0: its worker ended (BrokenProcessPool); another one goes on")
    assert lines[-2:] == ["lora · seed 0: done, cloze acc 0.5", "failed: pre · seed 0: no"]


def test_runs_beside_each_other_are_one_table_in_a_terminal():
    console = Console(file=io.StringIO(), width=100, height=8, force_terminal=True)
    progress = TableProgress(console)
    with progress.live:
        drive_two(progress)
        progress.placed("third · seed 0", "evaluate", "node2:7")
        progress.placed("last · seed 0", "evaluate", "node2:8")
        progress.scored("last · seed 0", "cloze", 2000, 5153)
        progress.left("lora · seed 0", 5)
        plain = Console(file=io.StringIO(), width=100)
        plain.print(progress.table())
        assert [line.split() for line in plain.file.getvalue().splitlines()] == [
            ["run", "state", "node", "step", "loss", "tokens/s"],
            ["pre", "·", "seed", "0", "train", "node1:7", "31", "/", "1,000", "2.5000", "2,000"],
            ["third", "·", "seed", "0", "evaluate", "node2:7"],
            ["last", "·", "seed", "0", "evaluate", "cloze", "node2:8", "2,000", "/", "5,153"],
            ["1", "of", "6", "units", "done"],
        ]
        progress.placed("fourth · seed 0", "evaluate", "node3:7")
        plain.print(progress.table())
        assert "1 of the runs at work are not shown" in plain.file.getvalue()
