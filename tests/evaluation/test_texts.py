from types import SimpleNamespace

from hfpatch.evaluation import load_tasks
from hfpatch.evaluation.texts import task_texts


def test_every_text_of_every_document_is_found_however_deep():
    documents = [{"ctx": "a", "endings": ["b", "c"], "label": 2, "more": {"d": ("e", None)}}, {"ctx": "f"}]
    assert list(task_texts({"task": SimpleNamespace(eval_docs=documents)})) == ["a", "b", "c", "e", "f"]


def test_the_texts_of_a_real_task_are_those_of_its_documents():
    tasks = load_tasks(["tinyworld_cloze"])
    texts = set(task_texts(tasks))
    first = tasks["tinyworld_cloze"].eval_docs[0]
    assert {value for value in first.values() if isinstance(value, str)} <= texts
