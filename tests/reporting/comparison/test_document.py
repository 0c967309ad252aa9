from hfpatch.reporting.comparison.document import missing, unknown_runs


def test_a_complete_run_misses_nothing(results):
    assert [*missing(results)] == []


def test_what_is_absent_is_named(build, raw):
    raw["complete"] = False
    raw["comparisons"] = []
    del raw["methods"]["pre_projection_skip"]["runs"]["1"]
    del raw["methods"]["lora"]["runs"]["0"]["evaluation"]["tinyworld_text"]
    parameters = {"trainable": 5, "added": 5, "base": 9}
    raw["methods"]["late"] = {"parts": [{"type": "lora"}], "parameters": parameters, "runs": {}}
    found = " ".join(missing(build(raw)))
    assert "not complete" in found
    assert "pre_projection_skip: no finished run with seed 1." in found
    assert "lora, seed 0: no result on tinyworld_text." in found
    assert "late: no run is finished." in found
    assert "No paired comparison" in found


def test_an_untrained_baseline_may_have_one_seed(build, raw):
    del raw["methods"]["baseline"]["runs"]["1"]
    assert [*missing(build(raw))] == []


def test_curves_that_are_not_there_are_named(build, raw):
    assert "lora: no training curve (metrics.jsonl)." in missing(build(raw, curves=False))


def test_nothing_finished_is_said(build):
    found = [*missing(build({"schema": 2, "kind": "comparison", "name": "empty"}))]
    assert "No method has a result." in found
    assert "No task has a result." in found


def test_runs_of_another_comparison_are_named(run_dir, results):
    (run_dir / "runs" / "stranger" / "seed-0").mkdir(parents=True)
    assert unknown_runs(run_dir, results) == ["runs/stranger: not a method of these results, so it is left out."]
