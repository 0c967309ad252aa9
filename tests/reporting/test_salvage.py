import json
import shutil

import pytest

from hfpatch.reporting import write_report
from hfpatch.reporting.results import read_results

RECIPE = """\
name: small
description: A small run.
training: {seeds: [0, 1]}
model: {name: tinyworld/gpt2, dtype: float32}
methods:
  baseline: []
  lora: [{type: lora, r: 4}]
  late: [{type: pre_projection}]
"""


@pytest.fixture
def half(run_dir, raw):
    """A run killed on the way: no results.json, the files of its finished runs."""
    (run_dir / "results.json").unlink()
    (run_dir / "recipe.yaml").write_text(RECIPE)
    for method, seed in (("baseline", 0), ("lora", 0)):
        home = run_dir / "runs" / method / f"seed-{seed}"
        home.mkdir(parents=True, exist_ok=True)
        (home / "result.json").write_text(json.dumps(raw["methods"][method]["runs"]["0"]))
    shutil.rmtree(run_dir / "runs" / "pre_projection_skip")
    return run_dir


def test_the_runs_own_files_are_read(half):
    results = read_results(half)
    assert (results.name, results.complete, list(results.methods)) == ("small", False, ["baseline", "lora", "late"])
    assert results.mean("lora", "tinyworld_cloze") == pytest.approx(0.41)
    assert results.methods["lora"].parts == ({"type": "lora", "r": 4},)
    assert results.tasks["tinyworld_text"].higher_is_better is False
    missing = " ".join(results.missing)
    assert "results.json is missing: this is what the folders of the runs tell." in missing
    assert "late: no run is finished." in missing
    assert "lora: no finished run with seed 1." in missing


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"'])
def test_a_broken_results_file_does_not_hide_the_runs(half, content):
    (half / "results.json").write_text(content)
    assert read_results(half).missing[0].startswith("results.json ")
    assert read_results(half).mean("lora", "tinyworld_text") == pytest.approx(18.9)


def test_broken_files_are_named_and_the_rest_is_read(half):
    (half / "recipe.yaml").write_text("name: [")
    (half / "runs" / "lora" / "seed-0" / "result.json").write_text("{")
    results = read_results(half)
    assert {"recipe.yaml cannot be read.", "runs/lora/seed-0/result.json cannot be read."} <= set(results.missing)
    assert results.mean("baseline", "tinyworld_cloze") == pytest.approx(0.4)


def test_it_becomes_a_report(half):
    text = write_report(half).html.read_text()
    assert "incomplete run" in text
    assert "results.json is missing" in text
    assert "Training curves" in text


def test_a_recipe_alone_is_a_report_of_nothing_finished(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert "lora: no run is finished." in write_report(tmp_path).markdown.read_text()
