import re
from dataclasses import replace

from hfpatch.reporting.comparison.document import missing, read_material


def test_a_complete_run_misses_nothing_with_one_untrained_baseline(results, build, raw):
    assert [*missing(results)] == []
    del raw["methods"]["baseline"]["runs"]["1"]
    assert [*missing(build(raw))] == []
    raw["comparisons"] = []
    assert [*missing(build(raw))] == ["No paired comparison was made."]


def test_what_is_absent_is_named(build, raw):
    raw["complete"] = False
    raw["comparisons"] = []
    del raw["methods"]["pre_projection_skip"]["runs"]["1"]
    del raw["methods"]["lora"]["runs"]["0"]["evaluation"]["tinyworld_text"]
    parameters = {"trainable": 5, "added": 5, "base": 9}
    raw["methods"]["late"] = {"parts": [{"type": "lora"}], "parameters": parameters, "runs": {}}
    text = " ".join(missing(build(raw)))
    named = ("not complete", "pre_projection_skip: .* seed 1", "lora, seed 0: .* tinyworld_text", "late: ")
    assert all(re.search(pattern, text) for pattern in named)


def test_methods_have_their_names_of_the_tables_and_only_shown_ones_are_named(run_dir, build, raw):
    raw["methods"]["lora"]["label"] = "Low rank"
    for name in ("lora", "pre_projection_skip"):
        raw["methods"][name]["runs"] = {}
    results = build(raw)
    material = read_material("", run_dir, results)
    said = "{}: no run is finished."
    assert said.format("pre_projection_skip and Low rank") in material.missing
    assert said.format("Low rank") in replace(material, results=results.only(["lora"])).missing


def test_reasons_have_the_labels_of_methods(build, raw):
    run = raw["methods"]["lora"]["runs"]["1"]
    raw["methods"]["lora"]["runs"]["1"] = {"train": {**run["train"], "diverged_step": 9}, "evaluation": {}}
    raw["methods"]["lora"]["label"] = "Low rank"
    raw["questions"] = [{"question": "gain", "pairs": [["lora", "baseline"]], "on": ["tinyworld_cloze"]}]
    raw["comparisons"][3] |= {"p": 1e-5, "errors": [[0.001, 100], [0.001, 1]]}
    (primary,) = build(raw).labelled().primary
    assert (primary.method, primary.why) == ("Low rank", "seed 1 of Low rank diverged")


def test_runs_of_another_comparison_are_named(run_dir, results):
    (run_dir / "runs" / "stranger" / "seed-0").mkdir(parents=True)
    assert any(text.startswith("runs/stranger: ") for text in read_material("", run_dir, results).missing)
