import json
from pathlib import Path

import pytest

import hfpatch
from hfpatch.errors import HfpatchError
from hfpatch.results import ComparisonResults, load_results

ROOT = Path(__file__).parents[2]


def test_what_was_written_is_read_back_equal(run_dir):
    results = hfpatch.load_results(run_dir)
    assert isinstance(results, ComparisonResults)
    (run_dir / "results.json").write_text(json.dumps(results.to_json()))
    assert load_results(str(run_dir)) == results


def test_values_come_by_seed_and_mean_is_their_mean(results):
    assert results.values("pre_projection_skip", "tinyworld_cloze") == [0.44, 0.46]
    assert results.mean("pre_projection_skip", "tinyworld_cloze") == pytest.approx(0.45)
    assert results.values("lora", "tinyworld_text", "bits_per_byte") == [1.25, 1.25]
    assert results.mean("nobody", "tinyworld_cloze") is None
    assert (results.baseline, results.seeds) == ("baseline", [0, 1])


def test_the_baseline_has_no_parts_and_verdicts_follow_from_comparisons(build, raw, results):
    raw["methods"] = {"lora": raw["methods"]["lora"], "frozen": raw["methods"]["baseline"]}
    assert build(raw).baseline == "frozen"
    outcomes = {(verdict.question, verdict.method, verdict.task): verdict.outcome for verdict in results.verdicts}
    assert outcomes["base", "lora", "tinyworld_text"] == "not decided"  # p = 0.02, corrected 0.08
    assert outcomes["lora", "pre_projection_skip", "tinyworld_text"] == "better"
    assert {verdict.family for verdict in results.against_baseline} == {6}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no run here"),
        ("[]", "not a JSON object"),
        ("not json", "cannot be read"),
        ("{}", "not written by hfpatch"),
        ('{"schema": "2", "kind": "comparison"}', "not written by hfpatch"),
        ('{"schema": 2, "kind": "song"}', "not written by hfpatch"),
        ('{"schema": 99, "kind": "comparison"}', "update hfpatch"),
        ('{"schema": 1, "kind": "comparison"}', "run the command again"),
        ('{"schema": 2, "kind": "comparison"}', "name is missing"),
        ('{"schema": 2, "kind": "comparison", "name": "x", "methods": 3}', "methods is 3"),
        (
            '{"schema": 2, "kind": "comparison", "name": "x", "questions": [{"question": "gain", '
            '"pairs": [["a", "b"]], "on": ["text"]}]}',
            "questions: 'a' is none of the methods",
        ),
    ],
)
def test_a_folder_without_readable_results_is_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(HfpatchError, match=message) as caught:
        load_results(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_run_without_results_yet_says_how_to_get_them(tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: small\n")
    with pytest.raises(HfpatchError, match=r"no results yet .* --resume"):
        load_results(tmp_path)


def test_a_kind_that_is_another_or_unknown_is_refused(tmp_path, run_dir):
    assert load_results(run_dir, None) == load_results(run_dir, "comparison")
    with pytest.raises(HfpatchError, match="these are the results of hfpatch compare or pretrain, not of hfpatch eval"):
        load_results(run_dir, "evaluation")
    with pytest.raises(HfpatchError, match=r"kind='evaluatoin' \(did you mean 'evaluation'\?\)"):
        load_results(run_dir, "evaluatoin")


def test_what_is_no_number_is_left_out_or_not_a_number(build, raw):
    outcome = raw["methods"]["lora"]["runs"]["0"]["evaluation"]["tinyworld_cloze"]
    outcome["stderr"] = {"acc": "N/A"}
    raw["methods"]["lora"]["runs"]["0"]["train"]["final_loss"] = None
    raw["comparisons"][0] |= {"low": None, "high": None, "p": None}
    results = build(raw)
    run = results.methods["lora"].runs[0]
    assert run.evaluation["tinyworld_cloze"].stderr == {}
    assert run.train.final_loss != run.train.final_loss
    assert (results.comparisons[0].low, results.comparisons[0].high) == (-float("inf"), float("inf"))
    written = results.to_json()
    assert written["methods"]["lora"]["runs"]["0"]["train"]["final_loss"] is None
    assert written["comparisons"][0]["low"] is None
    json.dumps(written, allow_nan=False)
