"""Results as pandas tables."""

import sys

import pandas as pd
import pytest
from reporting.conftest import evaluated, tuned_example, write_run  # noqa: F401 - one is a fixture

import hfpatch
from hfpatch.results.parts import GroupResult

SKIP, CLOZE = "pre_projection_skip", "tinyworld_cloze"


@pytest.fixture
def comparison(tmp_path):
    raw = tuned_example()
    raw["data"]["held_out"] = {"base_loss": 3.0}
    return hfpatch.load_results(write_run(tmp_path / "run", raw))


def test_scores_are_a_row_each(comparison):
    frame = comparison.to_pandas()
    assert len(frame) == 3 * 2 * 4  # methods, seeds, two metrics of one of three tasks
    mean = frame[frame.primary].groupby(["method", "task"]).value.mean()
    assert mean[SKIP, CLOZE] == pytest.approx((0.44 + 0.46) / 2)
    assert repr(comparison).startswith("<ComparisonResults, to_pandas: scores, methods")


def test_the_loss_on_held_out_documents_is_that_of_the_saved_patch(tmp_path):
    raw = tuned_example()
    raw["tasks"]["held_out_text"] = {**raw["tasks"]["tinyworld_text"], "primary": "nats_per_token"}
    for seed, loss in (("0", 2.25), ("1", 2.75)):
        run = raw["methods"]["lora"]["runs"][seed]
        run["evaluation"]["held_out_text"] = {"metrics": {"nats_per_token": loss}, "stderr": {}}
        run["train"]["final_eval_loss"] = 2.2  # of the last step
    methods = hfpatch.load_results(write_run(tmp_path / "run", raw)).to_pandas("methods").set_index("method")
    assert methods.held_out_loss["lora"] == 2.5
    assert methods.held_out_loss.isna().to_dict() == {"baseline": True, SKIP: True, "lora": False}


def test_the_other_tables_of_a_comparison(comparison):
    methods = comparison.to_pandas("methods").set_index("method")
    assert methods.trainable.to_dict() == {"baseline": 0, SKIP: 80_000, "lora": 81_920}
    assert methods.wall_s[SKIP] == 409_600 / 2048
    assert methods.matched_to["lora"] == SKIP
    pairs = comparison.to_pandas("comparisons")
    assert len(pairs) == 7
    assert pairs.iloc[0][["method", "reference", "difference"]].tolist() == [SKIP, "baseline", 0.05]
    verdicts = comparison.to_pandas("verdicts")
    assert verdicts.iloc[0][["question", "method", "other", "outcome"]].tolist() == ["base", SKIP, "baseline", "better"]
    assert len(verdicts) == 3 * 3  # three pairs on three tasks
    trials = comparison.to_pandas("trials")
    assert trials.chosen.sum() == 2
    assert trials.seed.tolist() == [trial.seed for trial in comparison.tuning.trials]
    assert trials.plan.tolist() == [trial.plan for trial in comparison.tuning.trials]
    comparison.methods[SKIP].curve.held_out.update({0: 3.0, 200: 2.5})
    curves = comparison.to_pandas("curves").query("method == @SKIP")
    assert curves.loss.tolist()[1:] == comparison.methods[SKIP].curve.loss
    assert curves.set_index("step").held_out.dropna().to_dict() == {0: 3.0, 200: 2.5}
    with pytest.raises(hfpatch.HfpatchError, match=r"to_pandas\('score'\).*there are scores, methods, verdicts"):
        comparison.to_pandas("score")


def test_an_evaluation(evaluated):  # noqa: F811
    scores = evaluated.to_pandas()
    assert scores[scores.metric == "acc"].set_index("model").value.to_dict() == {"base": 0.5, "one": 0.25}
    assert scores[scores.model == "one"].groups.tolist() == [300, 300]
    assert not scores.is_group.any()
    assert len(evaluated.to_pandas("comparisons")) == 3
    assert evaluated.to_pandas("verdicts").outcome.tolist() == ["worse", "not tested"]


def test_groups_of_tasks_are_rows_of_their_own(evaluated):  # noqa: F811
    metrics, stderr = {"acc": 0.45, "acc_norm": 0.5}, {"acc": 0.01}
    group = GroupResult(group="both", tasks=["cloze", "page"], n=1244, metrics=metrics, stderr=stderr)
    base = evaluated.variants["base"].model_copy(update={"groups": {"both": group}})
    grouped = evaluated.model_copy(update={"variants": {**evaluated.variants, "base": base}})
    frame = grouped.to_pandas()
    rows = frame[frame.is_group].to_dict("records")
    assert [(row["model"], row["task"], row["metric"], row["value"], row["n"]) for row in rows] == [
        ("base", "both", "acc", 0.45, 1244),
        ("base", "both", "acc_norm", 0.5, 1244),
    ]
    assert frame[frame.is_group].stderr.fillna(-1).tolist() == [0.01, -1]
    assert not frame[frame.is_group].primary.any()
    pd.testing.assert_frame_equal(frame[~frame.is_group].reset_index(drop=True), evaluated.to_pandas())


def test_without_pandas_the_message_says_so(comparison, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(hfpatch.HfpatchError, match="to_pandas needs pandas"):
        comparison.to_pandas()
