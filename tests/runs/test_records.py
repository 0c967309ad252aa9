import math

import pytest
from own_tasks import task_result

from hfpatch.errors import HfpatchError
from hfpatch.results.parts import TrainResult
from hfpatch.runs.records import Losses, Measurement, RunResult, Trained

SIZES = dict.fromkeys(("steps", "tokens", "peak_memory_bytes", "wall_s", "tokens_per_s"), 3)


@pytest.mark.parametrize(
    "record",
    [
        Losses(losses=[[2.5, 3.0]]),
        Trained(**SIZES, final_loss=2.0, identity={"plan": "a", "text": None}, losses=[[2.5, 3.0]], commit="c0ffee"),
        RunResult(identity={"plan": "a"}, evaluation={"quiz": task_result("quiz", metrics={"acc": 0.5})}),
        Measurement(tuning_loss=1.5),
    ],
)
def test_a_file_reads_as_what_was_written(tmp_path, record):
    record.write(tmp_path / "file.json")
    assert type(record).read(tmp_path / "file.json") == record


def test_what_a_trial_measured_takes_the_place_of_what_its_training_did():
    outcome = TrainResult(**SIZES, final_loss=2.0, final_eval_loss=9.0)
    trained = Trained.of(outcome, {"plan": "a"}, {"final_eval_loss": 1.5, "commit": "c0ffee"})
    assert (trained.final_eval_loss, trained.final_loss, trained.identity) == (1.5, 2.0, {"plan": "a"})
    of_run = RunResult(train=trained).to_json()["train"]
    assert of_run.keys() == TrainResult.model_fields.keys()  # neither its identity nor its losses again


def test_a_run_in_a_line():
    scores = {"quiz": task_result("quiz", metrics={"acc": 0.51234}), "text": task_result("text", metrics={"acc": 1.0})}
    assert RunResult(evaluation=scores).summary == "quiz acc 0.5123, text acc 1"
    lost = TrainResult(**SIZES, final_loss=math.nan, diverged_step=2)
    assert RunResult(train=lost).summary == "diverged at step 2"


@pytest.mark.parametrize(
    ("content", "said"), [("[1]", "not a JSON object"), ('{"losses": 3}', "losses is 3"), ("{", "cannot be read")]
)
def test_a_damaged_file_is_one_line(tmp_path, content, said):
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(HfpatchError, match=said) as caught:
        Losses.read(tmp_path / "file.json")
    assert str(tmp_path / "file.json") in str(caught.value)
