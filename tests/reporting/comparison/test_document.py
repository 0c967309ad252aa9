import re

from hfpatch.reporting.comparison.document import missing, read_material


def test_a_complete_run_misses_nothing_with_one_untrained_baseline(results, build, raw):
    assert [*missing(results)] == []
    del raw["methods"]["baseline"]["runs"]["1"]
    assert [*missing(build(raw))] == []


def test_what_is_absent_is_named(build, raw):
    raw["complete"] = False
    raw["comparisons"] = []
    del raw["methods"]["pre_projection_skip"]["runs"]["1"]
    del raw["methods"]["lora"]["runs"]["0"]["evaluation"]["tinyworld_text"]
    parameters = {"trainable": 5, "added": 5, "base": 9}
    raw["methods"]["late"] = {"parts": [{"type": "lora"}], "parameters": parameters, "runs": {}}
    text = " ".join(missing(build(raw)))
    named = ("not complete", "pre_projection_skip: .* seed 1", "lora, seed 0: .* tinyworld_text", "late: ", "No paired")
    assert all(re.search(pattern, text) for pattern in named)


def test_runs_of_another_comparison_are_named(run_dir, results):
    (run_dir / "runs" / "stranger" / "seed-0").mkdir(parents=True)
    assert any(text.startswith("runs/stranger: ") for text in read_material("", run_dir, results).missing)
