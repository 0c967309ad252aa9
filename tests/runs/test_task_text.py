"""What the tasks say is not trained on, whatever the command."""

import json

import pytest
from own_tasks import write_task

from hfpatch.errors import HfpatchError
from hfpatch.evaluation import load_tasks
from hfpatch.evaluation.tasks import task_documents
from hfpatch.recipes.comparison import load_recipe
from hfpatch.results import load_results
from hfpatch.runs import compare, forecast, train
from hfpatch.tinyworld import documents

TASK = {"output_type": "multiple_choice", "doc_to_text": "Riddle: {{question}}", "doc_to_choice": "{{answers}}"}
RIDDLES = [{"question": f"Who has {n} legs?", "answers": [f"number {n}", f"number {n + 1}"]} for n in range(6)]
RECIPE = {
    "name": "own",
    "data": {"source": "$HFPATCH_HERE/text.jsonl", "block_size": 64, "layout": "padded", "held_out": 2},
    "training": {"steps": 2, "warmup_steps": 1, "batch_size": 2, "lr": 1e-3},
    "evaluation": {"tasks": ["riddle", "tinyworld_cloze"], "limit": 2, "include_path": "$HFPATCH_HERE"},
    "methods": {"baseline": [], "lora": [{"type": "lora", "r": 2, "target_modules": "attention"}]},
}
IN_TASKS = "data: 4 of 24 documents of .*text.jsonl are in the tasks, too .riddle 3, tinyworld_cloze 1., and are not"


@pytest.fixture
def recipe(model_folder, tmp_path, monkeypatch):
    """Four documents are what the model reads of tasks; one of them twice, beyond the limit, and one a wrong answer."""
    monkeypatch.setenv("HFPATCH_HERE", str(tmp_path))
    write_task(tmp_path, "riddle", **TASK, doc_to_target=0)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in RIDDLES))
    (tmp_path / "r.yaml").write_text(json.dumps(RECIPE))
    cloze = load_tasks(["tinyworld_cloze"])["tinyworld_cloze"].eval_docs[300]["text"]
    copies = ["Riddle: Who has 0 legs? number 0", "Riddle:  Who has 5 legs?\nnumber 5", cloze]
    copies.append("Riddle: Who has 3 legs? number 4")
    write(tmp_path, [*copies, *documents("shifted", count=20)])
    base = f"model.name={model_folder}"
    return lambda *overrides: load_recipe(tmp_path / "r.yaml", [base, *overrides], trust_code=True)


def write(folder, texts):
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_compare_plan_and_a_tuned_train_leave_out_what_the_tasks_say(recipe, tmp_path):
    with pytest.warns(UserWarning, match=IN_TASKS):
        made = compare(recipe(), tmp_path / "compared")
    assert (made["data"]["documents"], made["data"]["held_out"]["documents"]) == (18, 2)
    warnings = load_results(tmp_path / "compared").warnings
    (left_out,) = [warning for warning in warnings if "in the tasks, too" in warning]
    assert left_out.endswith("(riddle 3, tinyworld_cloze 1), and are not trained on.")
    tuned = recipe("tuning={learning_rates: [1e-3, 3e-3], held_out: 2}")
    with pytest.warns(UserWarning, match=IN_TASKS):
        train(tuned, "lora", tmp_path / "tuned")
    with pytest.warns(UserWarning, match=IN_TASKS):
        planned = forecast(recipe())
    assert left_out in planned.warnings


def test_training_alone_needs_no_task_and_what_it_trained_on_is_not_compared(recipe, tmp_path):
    out, elsewhere = tmp_path / "trained", tmp_path / "elsewhere.jsonl"
    (tmp_path / "rows.jsonl").rename(elsewhere)
    train(recipe(), "lora", out)
    elsewhere.rename(tmp_path / "rows.jsonl")
    with (
        pytest.warns(UserWarning, match=IN_TASKS),
        pytest.raises(HfpatchError, match="does not match the current train"),
    ):
        compare(recipe(), out, resume=True)


def test_a_text_that_is_all_in_the_tasks_is_refused(recipe, tmp_path):
    write(tmp_path, [f"Riddle: Who has {n} legs? number {n}" for n in range(6)])
    with pytest.raises(HfpatchError, match=r"text.jsonl: all 6 documents to train on are in the tasks, too, so none"):
        compare(recipe("data.held_out=null"), tmp_path / "out")


def test_the_documents_of_tasks_are_as_the_model_reads_them(recipe, tmp_path):
    """Beside the texts of their fields."""
    riddles = task_documents(load_tasks(["riddle"], include_path=tmp_path))["riddle"]
    assert [document.read for document in riddles] == [
        [f"Riddle: Who has {n} legs? number {n}", f"Riddle: Who has {n} legs? number {n + 1}"] for n in range(6)
    ]
    assert riddles[2].texts == ["Who has 2 legs?", "number 2", "number 3"]
