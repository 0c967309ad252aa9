"""A comparison with budgets: what is left out, what a budget more trains, what is tuned where, and what is reported."""

import json
import shutil

import pytest
from tiny_runs import Nothing, Trained

from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import load_recipe
from hfpatch.reporting.markdown import markdown
from hfpatch.reporting.report import document_of
from hfpatch.results import load_results
from hfpatch.runs import compare, train
from hfpatch.runs.forecasting import forecast

COLUMN, RANK = 2 * 16, (16 + 48) + (16 + 16)
"""Parameters of a column of a pre-projection, and of a rank of a LoRA on the attention."""
RECIPE = """
name: small
budgets: [64, 192]
data: {block_size: 32, max_documents: 60, held_out: 25}
training: {steps: 3, warmup_steps: 1, batch_size: 4, seeds: [0, 1], lr: 1e-2}
evaluation: {tasks: [tinyworld_cloze], limit: 4}
methods:
  baseline: []
  pre: [{type: pre_projection}]
  lora: [{type: lora}]
  heat: [{type: query_temperature}]
"""


@pytest.fixture(scope="module")
def read(model_folder, tmp_path_factory):
    file = tmp_path_factory.mktemp("recipe") / "small.yaml"
    file.write_text(RECIPE)
    return lambda *overrides: load_recipe(file, [f"model.name={model_folder}", *overrides])


@pytest.fixture(scope="module")
def two(read, tmp_path_factory):
    out = tmp_path_factory.mktemp("two") / "out"
    compare(read(), out)
    return out


def test_a_method_that_misses_a_budget_is_left_out_and_listed(two, read):
    results = load_results(two)
    sizes = {name: method.trainable for name, method in results.methods.items() if name != "heat"}
    assert sizes == {"baseline": 0, "pre@64": 2 * COLUMN, "pre@192": 6 * COLUMN, "lora@192": 2 * RANK}
    assert list(results.left_out) == ["lora@64"]
    assert results.left_out["lora@64"].endswith(f"r=1, has {RANK} parameters, and its budget is 64")
    assert any(warning.startswith("lora@64 is left out") for warning in results.warnings)
    assert not (two / "runs" / "lora@64").exists()
    assert "lora@64" in markdown(document_of(two))
    assert "lora@64" in (two / "recipe.yaml").read_text()
    compare(read(), two, resume=True, progress=Nothing())  # a finished run is only reported again


def test_a_budget_more_trains_only_what_is_new(two, read, tmp_path):
    out, log = tmp_path / "out", Trained()
    shutil.copytree(two, out)
    compare(read("budgets=[64, 192, 480]"), out, resume=True, progress=log)
    assert log.trained == [f"{name}@480 · seed {seed}" for seed in (0, 1) for name in ("pre", "lora")]
    before, after = load_results(two), load_results(out)
    for name, method in before.methods.items():
        assert after.methods[name].runs.keys() == method.runs.keys()
        for seed, run in method.runs.items():
            assert after.scores_of(after.methods[name].runs[seed]) == before.scores_of(run)
    assert after.complete
    assert {line.method: line.points for line in after.frontier.lines} == {
        "pre": ["pre@64", "pre@192", "pre@480"],
        "lora": ["lora@192", "lora@480"],
        "heat": ["heat"],
    }
    assert (after.frontier.reference, after.frontier.task) == ("lora", "held_out_text")
    lora, others = [line for line in after.frontier.lines if line.method == "lora"], after.frontier.lines
    assert lora[0].exchange is None
    assert all(line.exchange is not None for line in others if line.method != "lora")
    pairs = [("pre@192", "lora@192"), ("pre@480", "lora@480")]
    assert after.pairs["lora"] == pairs
    tested = [verdict for verdict in after.verdicts if verdict.pair in pairs and verdict.task == "held_out_text"]
    assert [(verdict.role, verdict.family) for verdict in tested] == [("primary", len(pairs))] * len(pairs)
    assert json.loads((out / "results.json").read_text())["frontier"]["reference"] == "lora"


def test_one_budget_can_be_trained_alone_and_one_that_is_left_out_cannot(read, tmp_path):
    assert len(train(read(), "pre@192", tmp_path / "out")) == 2
    with pytest.raises(HfpatchError, match="lora@64 is left out: its nearest size, r=1, has 96 parameters"):
        train(read(), "lora@64", tmp_path / "other")
    with pytest.raises(
        HfpatchError, match="no method 'lora' in the recipe; of its budgets name one: lora@64, lora@192"
    ):
        train(read(), "lora", tmp_path / "third")
    with pytest.raises(HfpatchError, match="budgets: no method reaches any; pre@3: its nearest size"):
        compare(read("budgets=[3]", "methods.heat=null"), tmp_path / "fourth")


def test_the_plan_counts_what_is_run(read):
    planned = forecast(read(), seconds=0.1)
    assert sorted(planned.methods) == ["heat", "lora@192", "pre@192", "pre@64"]
    assert (planned.work["train"].units, planned.work["evaluate"].units) == (8, 9)
    assert any(warning.startswith("lora@64 is left out") for warning in planned.warnings)
