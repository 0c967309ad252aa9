import pytest

from hfpatch.errors import HfpatchError
from hfpatch.training.records import MetricsFile, StepRecord, summarise


def records(count):
    return [StepRecord(step, 3.0 / step, 0.1, 10, 0.5) for step in range(1, count + 1)]


@pytest.fixture
def metrics(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for record in records(4):
        metrics.append(record)
    return metrics


def test_lines_come_back_and_a_torn_one_is_left_out(metrics):
    with metrics.path.open("a") as stream:
        stream.write('{"step": 5, "lo')
    assert metrics.read() == records(4)
    metrics.truncate(3)
    assert metrics.read() == records(3)
    metrics.truncate(0)
    assert metrics.path.read_text() == ""


def test_missing_lines_are_refused(metrics):
    with pytest.raises(HfpatchError, match="lines up to step 5 are missing"):
        metrics.truncate(5)


def test_eval_loss_is_written_where_it_was_measured(metrics):
    metrics.append(StepRecord(5, 1.0, 0.1, 10, 0.5, eval_loss=2.0))
    assert metrics.read()[-1].eval_loss == 2.0
    assert ["eval_loss" in line for line in metrics.path.read_text().splitlines()] == [False] * 4 + [True]


def test_summary():
    result = summarise(records(3), peak_memory_bytes=7, update_survival={"all": 1.0})
    assert (result.steps, result.final_loss, result.tokens, result.wall_s) == (3, 1.0, 30, 1.5)
    assert result.tokens_per_s == 20.0
