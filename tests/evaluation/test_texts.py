from types import SimpleNamespace

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask

from hfpatch.evaluation import load_tasks
from hfpatch.evaluation.tasks import task_documents


def test_every_text_of_every_document_is_found_however_deep():
    """Also where the task's templates fail on a document."""
    documents = [{"ctx": "a", "endings": ["b", "c"], "label": 2, "more": {"d": ("e", None)}}, {"ctx": "f"}]
    found = task_documents({"task": SimpleNamespace(eval_docs=documents)})["task"]
    assert [(each.read, each.texts) for each in found] == [([], ["a", "b", "c", "e"]), ([], ["f"])]


def test_the_texts_of_a_real_task_are_those_of_its_documents():
    tasks = load_tasks(["tinyworld_cloze", "tinyworld_text"])
    found = task_documents(tasks)
    for name, task in tasks.items():
        first = task.eval_docs[0]
        assert {value for value in first.values() if isinstance(value, str)} <= set(found[name][0].texts)
        assert found[name][0].read == [first["text"]]


def test_a_model_reads_a_prompt_with_each_answer():
    """The right one where it writes the answer itself; contexts where those are the choices; no answer alone."""
    tasks = {kind: made(**options) for kind, options in TASKS.items()}
    found = task_documents(tasks)
    assert {name: documents[0].read for name, documents in found.items()} == {
        "choice": ["Q: one A", "Q: one B"],
        "inputs": ["A one", "B one"],
        "generated": ["Q: A", "Q: B"],
    }


CHOICE = {"output_type": "multiple_choice", "doc_to_choice": ["one A", "one B"], "doc_to_target": 0}
TASKS = {
    "choice": {**CHOICE, "doc_to_text": "Q:", "metric_list": [{"metric": "acc_mutual_info"}]},
    "inputs": {**CHOICE, "doc_to_text": "{{gold}}", "doc_to_choice": ["A", "B"], "doc_to_target": "one"},
    "generated": {"output_type": "generate_until", "doc_to_text": "Q:", "doc_to_target": "{{answers}}"},
}


def made(**options):
    """Return a task of one document."""
    data = [{"gold": 0, "answers": ["A", "B"]}]
    own = {"task": "own", "test_split": "test", "custom_dataset": lambda **_: {"test": Dataset.from_list(data)}}
    return ConfigurableTask(config={**own, **options})
