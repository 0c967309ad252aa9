import hashlib
import json
import math

import numpy as np
import pytest
from own_tasks import task_result

from hfpatch.data.plan import BatchPlan
from hfpatch.errors import HfpatchError
from hfpatch.recipes.training import TrainingSettings
from hfpatch.results.parts import TrainResult
from hfpatch.results.verdicts import PrimaryQuestion
from hfpatch.runs.identity import identify_training
from hfpatch.runs.records import (
    Entry,
    EvaluationIdentity,
    Identity,
    Looks,
    Losses,
    Measurement,
    Questions,
    Record,
    RunResult,
    Shared,
    Trained,
)

SIZES = dict.fromkeys(("steps", "tokens", "peak_memory_bytes", "wall_s", "tokens_per_s"), 3)


@pytest.mark.parametrize(
    "record",
    [
        Losses(losses=[[2.5, 3.0]]),
        Trained(**SIZES, final_loss=2.0, identity={"plan": "a", "text": None}, losses=[[2.5, 3.0]], commit="c0ffee"),
        RunResult(identity={"plan": "a"}, evaluation={"quiz": task_result("quiz", metrics={"acc": 0.5})}),
        Measurement(tuning_loss=1.5),
        Shared(text="a", evaluation_text=None, matmul="mkl"),
        Questions(questions=[], margin={"accuracy": 0.01}, seeds=[0], documents=(0.5, {"quiz": 3}), sha256="a"),
        Looks(),
        EvaluationIdentity(models={"one": {"name": "one"}}, limits={"quiz": None}),
    ],
)
def test_a_file_reads_as_what_was_written(tmp_path, record):
    record.write(tmp_path / "file.json")
    assert type(record).read(tmp_path / "file.json") == record


def test_files_of_folders_have_the_same_bytes_and_hash_as_ever():
    """Else no run of an earlier commit could be resumed."""
    shared = Shared(tokenizer="b", base_weights="a", text="c", evaluation_text=None)
    assert json.dumps(shared.to_json()) == (
        '{"base_weights": "a", "tokenizer": "b", "text": "c", "evaluation_text": null}'
    )
    identity = Record(identity=Identity(plan="a", architecture="b", training="c")).to_json()
    assert json.dumps(identity) == '{"identity": {"architecture": "b", "plan": "a", "training": "c"}}'
    gain = PrimaryQuestion(question="gain", pairs=[("pre", "lora")], on=["quiz"])
    asked = Questions(questions=[gain], margin={"accuracy": 0.01}, seeds=[0, 1], documents=(40, {}), later=False)
    written = {"questions": [{"question": "gain", "pairs": [["pre", "lora"]], "on": ["quiz"]}]}
    written |= {"margin": {"accuracy": 0.01}, "seeds": [0, 1], "documents": [40, {}]}
    assert json.dumps(asked.to_json()) == json.dumps({**written, "later": False})
    assert asked.hash == hashlib.sha256(json.dumps([written, False], sort_keys=True).encode()).hexdigest()
    plan = BatchPlan(np.arange(4).reshape(2, 2), blocks=4, seed=0)
    trained = identify_training(Identity(text="t"), TrainingSettings(), plan, method="m")
    assert trained.text == "t"
    assert trained.training == "b4d6cd60693d9bb0f57ffecd5787e60add716f45c26141eb844eee4e0f08fd62"


def test_a_result_repeats_neither_the_identity_nor_the_losses_of_its_training():
    trained = Trained(**SIZES, final_loss=2.0, identity={"plan": "a"}, losses=[[2.5, 3.0]])
    assert RunResult(train=trained).to_json()["train"].keys() == TrainResult.model_fields.keys()


def test_a_run_in_a_line():
    scores = {"quiz": task_result("quiz", metrics={"acc": 0.51234}), "text": task_result("text", metrics={"acc": 1.0})}
    assert RunResult(evaluation=scores).summary == "quiz acc 0.5123, text acc 1"
    assert RunResult(train=TrainResult(**SIZES, final_loss=2.5)).summary == "training loss 2.5000"
    lost = TrainResult(**SIZES, final_loss=math.nan, diverged_step=2)
    assert RunResult(train=lost).summary == "diverged at step 2"


@pytest.mark.parametrize(
    ("content", "reason"), [("[1]", "not a JSON object"), ('{"losses": 3}', "losses is 3"), ("{", "cannot be read")]
)
def test_a_damaged_file_is_one_line(tmp_path, content, reason):
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(HfpatchError, match=reason) as caught:
        Losses.read(tmp_path / "file.json")
    assert str(tmp_path / "file.json") in str(caught.value)


def test_a_queue_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(HfpatchError, match=r"0.json: cannot be written \(No such file or directory\); free space"):
        Entry().write(tmp_path / "gone" / "0.json")
