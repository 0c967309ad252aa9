"""The display of the runs at work: a table in a terminal, and lines elsewhere."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from hfpatch.cli import progress as module
from hfpatch.cli.progress import RunDisplay, choose_progress
from hfpatch.training.records import StepRecord


def step(number, seconds=60.0):
    return StepRecord(step=number, loss=2.5, lr=1e-3, tokens=400, seconds=seconds)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    return clock


def terminal(**size):
    return RunDisplay(Console(file=io.StringIO(), force_terminal=True, **{"width": 120, "height": 24, **size}))


def shown(display):
    console = Console(width=120, file=io.StringIO())
    console.print(display.table())
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_a_run_has_a_bar_what_it_does_what_has_passed_and_what_is_left(clock):
    display = terminal()
    display.preparing("loading a")
    display.preparing("reading b")
    assert shown(display) == ["reading b"]
    display.started("lora", 4)
    assert re.fullmatch(r"lora train 0 / 4 \d+\.\d GB 0:00:00", shown(display)[-1])
    clock.now = 60.0
    display.stepped("lora", step(0))
    assert " 0 / 4 " in shown(display)[-1]  # it has only been evaluated, and has no loss of a step
    assert "2.5" not in shown(display)[-1]
    clock.now = 120.0
    display.stepped("lora", step(2))  # steps of a minute
    head, row = shown(display)
    assert head == "run state step loss tokens/s memory elapsed left"
    assert re.fullmatch(
        r"lora train ━+ 2 / 4 2\.5000 7 \d+\.\d GB 0:02:00 0:02:00", row.replace("╸", "").replace("╺", "")
    )
    display.evaluating("lora", "wikitext")
    clock.now = 487.0
    assert re.search(r"lora wikitext .*\d+\.\d GB 0:08:07$", shown(display)[-1])
    display.scored("lora", "wikitext", 1000, 4000)
    assert re.search(r" 1,000 / 4,000 .* 0:08:07 0:18:21$", shown(display)[-1])  # 367 s for a quarter
    display.finished("lora", "acc 0.5")
    assert shown(display) == []
    assert "lora: done in 0:08:07, acc 0.5" in display._console.file.getvalue()
    display.started("one", 1)
    display.started("two", 1)  # no two are at work
    assert [line.split()[0] for line in shown(display)] == ["run", "two"]


def test_what_takes_long_before_the_runs_is_a_line_and_a_mistake_that_shows_soon_the_only_one(capsys, monkeypatch):
    with choose_progress() as progress:
        progress.preparing("loading a")
        progress.preparing("reading b")
        timer = progress._timer
    timer.join()  # it was cancelled
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module, "LONG_S", 0.01)
    progress = RunDisplay(Console(file=io.StringIO()))
    progress.preparing("loading a")
    progress._timer.join()
    assert capsys.readouterr().err == "loading a\n"


def drive(progress):
    progress.started("lora · seed 0", 10)
    progress.stepped("lora · seed 0", step(3, seconds=0.5))
    progress.evaluating("lora · seed 0", "cloze")
    progress.scored("lora · seed 0", "cloze", 1200, 4000)
    progress.finished("lora · seed 0", "cloze acc 0.5")


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys, monkeypatch):
    with choose_progress() as progress:
        drive(progress)
    assert capsys.readouterr().err.splitlines() == [
        "lora · seed 0: training, 10 steps",
        "lora · seed 0: cloze",
        "lora · seed 0: done, cloze acc 0.5",
    ]
    monkeypatch.setattr(module, "PLAIN_EVERY_S", -1.0)
    with choose_progress() as progress:
        drive(progress)
    _, training, _, scoring, _ = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"lora · seed 0: train 3 / 10, loss 2.5000, 800 tokens/s, \d+\.\d GB, 0:00:04 left", training)
    assert scoring.startswith("lora · seed 0: cloze 1,200 / 4,000, ")
    monkeypatch.setenv("RANK", "1")
    with choose_progress() as progress:
        drive(progress)
    assert capsys.readouterr().err == ""


def drive_two(progress):
    progress.opened("2 runs at a time", 6)
    for number, run in enumerate(("lora · seed 0", "pre · seed 0")):
        progress.placed(run, "tune", f"node{number}:7")
        progress.started(run, 1000)
        progress.stepped(run, step(30 + number, seconds=2.0))


def test_runs_beside_each_other_are_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(module, "PLAIN_EVERY_S", -1.0)
    with choose_progress() as progress:
        drive_two(progress)
        progress.placed("third · seed 0", "evaluate", "node2:7")
        progress.evaluating("third · seed 0", "cloze")
        progress.lost("pre · seed 0", "BrokenProcessPool")
        progress.stepped("lora · seed 0", step(31, seconds=2.0))
        progress.left("lora · seed 0", 5)
        progress.finished("lora · seed 0", "cloze acc 0.5")
        progress.left("pre · seed 0", 4, "pre · seed 0: no")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["6 units of work, 2 runs at a time", "lora · seed 0: tune on node0:7"]
    runs = "lora · seed 0: tune 30 / 1,000, loss 2.5000, 200 tokens/s, 0:32:20 left; pre · seed 0: tune 31 / 1,000"
    assert lines[4].startswith(f"0 of 6 units done; {runs}, loss 2.5000")
    assert lines[5:7] == [
        "third · seed 0: evaluate on node2:7",
        "pre · seed 0: its worker ended (BrokenProcessPool); another one goes on from the newest checkpoint",
    ]
    assert lines[7].endswith("; third · seed 0: cloze")
    assert lines[8:] == ["lora · seed 0: done, cloze acc 0.5", "failed: pre · seed 0: no"]


def test_runs_beside_each_other_are_one_table_in_a_terminal(clock):
    display = terminal(height=8)
    with display.live:
        drive_two(display)
        display.placed("third · seed 0", "evaluate", "node2:7")
        display.placed("last · seed 0", "evaluate", "node2:8")
        display.scored("last · seed 0", "cloze", 2000, 5153)
        display.left("lora · seed 0", 5)
        assert shown(display) == [
            "run state node step loss tokens/s elapsed left",
            "pre · seed 0 tune node1:7 31 / 1,000 2.5000 200 0:00:00 0:32:18",
            "third · seed 0 evaluate node2:7 0:00:00",
            "last · seed 0 cloze node2:8 2,000 / 5,153 0:00:00 0:00:00",
            "1 of 6 units done",
        ]
        display.placed("fourth · seed 0", "evaluate", "node3:7")
        assert "1 of the runs at work are not shown" in shown(display)[-1]
