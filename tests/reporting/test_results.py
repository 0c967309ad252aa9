import json

import pytest

from hfpatch.errors import HfpatchError
from hfpatch.reporting.results import plain, read_results


def test_a_complete_run_misses_nothing(results):
    assert results.missing == ()
    assert results.complete
    assert results.baseline == "baseline"
    assert results.seeds == (0, 1)
    assert list(results.methods) == ["baseline", "pre_projection_skip", "lora"]


def test_values_come_by_seed_and_mean_is_their_mean(results):
    assert results.values("pre_projection_skip", "tinyworld_cloze") == [0.44, 0.46]
    assert results.mean("pre_projection_skip", "tinyworld_cloze") == pytest.approx(0.45)
    assert results.values("lora", "tinyworld_text", "bits_per_byte") == [1.25, 1.25]
    assert results.mean("nobody", "tinyworld_cloze") is None


def test_the_baseline_is_the_method_without_parts(build, raw):
    raw["methods"] = {"lora": raw["methods"]["lora"], "frozen": raw["methods"]["baseline"]}
    assert build(raw).baseline == "frozen"


@pytest.mark.parametrize("value", [1.0, "x", {"a": 1}])
@pytest.mark.parametrize("key", ["warnings", "comparisons"])
def test_lists_that_are_none_are_named(build, raw, key, value):
    raw[key] = value
    results = build(raw)
    assert getattr(results, key) == ()
    assert f"{key} in results.json cannot be read (not a list)." in results.missing


def test_a_difference_that_falls_to_the_correction_is_known(results):
    fallen = [(c.method, c.task) for c in results.comparisons if c.falls_to_correction]
    assert fallen == [("lora", "tinyworld_text")]  # p = 0.02, corrected 0.06


@pytest.mark.parametrize("broken", [None, "[]", "not json", '{"schema": 99}', '{"schema": "1"}'])
def test_a_folder_without_a_readable_run_is_one_line(tmp_path, broken):
    if broken is not None:
        (tmp_path / "results.json").write_text(broken)
    with pytest.raises(HfpatchError) as caught:
        read_results(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_what_is_absent_is_named(build, raw):
    raw["complete"] = False
    raw["comparisons"] = []
    del raw["methods"]["pre_projection_skip"]["runs"]["1"]
    del raw["methods"]["lora"]["runs"]["0"]["evaluation"]["tinyworld_text"]
    raw["methods"]["late"] = {"parts": [{"type": "lora"}], "parameters": {"trainable": 5}, "runs": {}}
    missing = " ".join(build(raw).missing)
    assert "not complete" in missing
    assert "pre_projection_skip: no finished run with seed 1." in missing
    assert "lora, seed 0: no result on tinyworld_text." in missing
    assert "late: no run is finished." in missing
    assert "No paired comparison" in missing


def test_an_untrained_baseline_may_have_one_seed(build, raw):
    del raw["methods"]["baseline"]["runs"]["1"]
    assert build(raw).missing == ()


def test_one_broken_piece_does_not_hide_the_others(build, raw):
    raw["comparisons"][0]["verdict"] = "splendid"
    raw["methods"]["lora"]["runs"]["0"]["train"]["tokens_per_s"] = "fast"
    raw["tasks"]["tinyworld_cloze"] = 3
    raw["model"] = []
    results = build(raw)
    assert len(results.comparisons) == 6
    assert results.methods["lora"].runs[0].train is None
    assert results.methods["lora"].runs[1].train.tokens_per_s == 4096.0
    assert list(results.tasks) == ["tinyworld_endings", "tinyworld_text"]
    told = " ".join(results.missing)
    for where in ("comparison 0", "lora, seed 0: train", "task tinyworld_cloze", "model in results.json"):
        assert where in told


def test_an_empty_object_is_an_incomplete_run(build):
    results = build({"methods": {}})
    assert "No method has a result." in results.missing
    assert "No task has a result." in results.missing
    assert results.baseline is None


def test_numbers_that_are_none_are_left_out(build, raw):
    outcome = raw["methods"]["lora"]["runs"]["0"]["evaluation"]["tinyworld_cloze"]
    outcome["stderr"] = {"acc": "N/A"}
    outcome["metrics"]["alias"] = "x"
    read = build(raw).methods["lora"].runs[0].evaluation["tinyworld_cloze"]
    assert read.stderr == {}
    assert read.metrics == {"acc": 0.41}


def test_plain_replaces_what_no_xml_can_hold():
    assert plain({"a\x00": ["\ud800", "\x1b[1m", "tab\tstays", 1.5, None]}) == {
        "a\ufffd": ["\ufffd", "\ufffd[1m", "tab\tstays", 1.5, None]
    }


def test_a_run_folder_is_only_read(run_dir):
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    read_results(run_dir)
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert json.loads(before[run_dir / "results.json"])["schema"] == 1
