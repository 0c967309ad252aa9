import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfpatch.errors import HfpatchError
from hfpatch.training.diagnostics import DiagnosticsFile
from hfpatch.training.records import JsonLines, LoopState, MetricsFile, StepRecord, summarise


def records(count):
    return [StepRecord(step, 3.0 / step, 0.1, 10, 0.5) for step in range(1, count + 1)]


@pytest.fixture
def metrics(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for record in records(4):
        metrics.append(record)
    return metrics


def test_lines_come_back_without_a_torn_one_and_missing_ones_are_refused(metrics):
    with metrics.path.open("a") as stream:
        stream.write('{"step": 5, "lo')
    assert metrics.read() == records(4)
    metrics.truncate(3)
    assert metrics.read() == records(3)
    metrics.truncate(0)
    assert metrics.path.read_text() == ""
    with pytest.raises(HfpatchError, match="lines up to step 5 are missing or damaged"):
        metrics.truncate(5)


GARBAGE = [b"garbage", b"3", b"[]", b"{}", b'{"step": "two"}', b'{"step": 3, "layer": 1}', b"\xff\xfe", b"\0\0\0"]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_damaged_line_is_one_clear_line(metrics, garbage):
    lines = metrics.path.read_bytes().splitlines(keepends=True)
    metrics.path.write_bytes(b"".join([*lines[:2], garbage + b"\n", *lines[2:]]))
    with pytest.raises(HfpatchError, match=r"metrics.jsonl: line 3 is damaged; delete .* and resume"):
        metrics.read()
    with pytest.raises(HfpatchError, match=r"lines up to step 4 are missing or damaged"):
        metrics.truncate(4)
    metrics.truncate(2)  # what comes after the checkpoint is dropped, whatever it is
    assert metrics.read() == records(2)
    metrics.path.write_bytes(garbage + b"\n")
    metrics.truncate(0)
    assert metrics.read() == []


def test_a_damaged_diagnostic_is_not_dropped_unseen(tmp_path):
    file = DiagnosticsFile(tmp_path / "diagnostics.jsonl")
    file.write([{"step": step, "layer": layer} for step in (0, 2, 4) for layer in (0, 1)])
    lines = file.path.read_text().splitlines()
    file.path.write_text("\n".join([*lines[:3], "garbage", *lines[4:]]) + "\n")
    for step, expected in ((2, {0, 2}), (4, {0, 2, 4})):
        with pytest.raises(HfpatchError, match=f"lines up to step {step} are missing or damaged"):
            file.truncate(step, expected)


def test_the_line_of_step_0_is_kept_and_not_counted(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    first = StepRecord(0, math.nan, 0.0, 0, 0.0, eval_loss=4.0)
    for record in [first, *records(3)]:
        metrics.append(record)
    metrics.truncate(2)
    assert [(record.step, record.eval_loss) for record in metrics.read()] == [(0, 4.0), (1, None), (2, None)]
    assert ["eval_loss" in line for line in metrics.path.read_text().splitlines()] == [True, False, False]
    result = summarise([first, *records(3)], peak_memory_bytes=7, update_survival={})
    assert (result.steps, result.final_loss, result.tokens) == (3, 1.0, 30)
    assert (result.wall_s, result.tokens_per_s) == (1.5, 20.0)
    metrics.truncate(0)
    assert metrics.read() == []


def test_what_is_no_number_is_left_out_of_the_file_and_null_in_the_result(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(StepRecord(1, math.inf, 0.1, 10, 0.5, eval_loss=math.nan))
    assert metrics.path.read_text() == '{"step": 1, "lr": 0.1, "tokens": 10, "seconds": 0.5}\n'
    raw = summarise(metrics.read(), peak_memory_bytes=7, update_survival={}, state=LoopState(diverged_step=1)).to_json()
    assert (raw["final_loss"], raw["final_eval_loss"], raw["diverged_step"]) == (None, None, 1)


@given(
    steps=st.lists(st.integers(0, 6), max_size=9).map(sorted),
    until=st.integers(0, 8),
    torn=st.sampled_from(["", "{", '{"step": 3}']),
)
def test_what_is_kept_is_what_was_written_until_then(steps, until, torn):
    with tempfile.TemporaryDirectory() as folder:
        file = JsonLines(Path(folder) / "lines.jsonl")
        file.write([{"step": step, "index": index} for index, step in enumerate(steps)])
        with file.path.open("a") as stream:
            stream.write(torn)
        expected, dropped = [(step, index) for index, step in enumerate(steps) if until > 0 and step <= until], []
        file.drop_after(until, lambda values: dropped.append(values) or True)
        assert dropped == [[step for step, _ in expected]]
        assert [(value["step"], value["index"]) for value in file.values()] == expected
        assert file.path.read_text().endswith("}\n") is bool(expected)


def test_the_lowest_finite_loss_is_the_best_and_waiting_ends_the_run():
    state = LoopState()
    improved = [state.evaluated(step, loss, 2) for step, loss in enumerate([math.nan, 3.0, 2.0, 2.0], start=1)]
    assert improved == [False, True, True, False]
    assert (state.best_loss, state.best_step, state.waited, state.stopped) == (2.0, 3, 1, False)
    assert not state.evaluated(5, math.inf, 2)
    assert state.stopped
    state = LoopState()
    for step in range(1, 50):
        state.evaluated(step, float(step), None)
    assert not state.stopped
