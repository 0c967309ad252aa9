"""HellaSwag's documents are prepared as published, where the data is at hand."""

import json

from hfpatch.evaluation.tasks import load_tasks


def test_hellaswag_is_prepared_as_published(shared_data):
    task = load_tasks(("hellaswag",), data_dir=shared_data)["hellaswag"]
    published = (shared_data / "hellaswag" / "lm_eval_docs_1000.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, published[:200]):
        document = task.eval_docs[row["row"]]
        assert task.doc_to_text(document).replace("..", ".") == row["query"]
        assert task.doc_to_target(document) == row["gold"]
        choices = [choice.replace("..", ".").strip() for choice in document["choices"]]
        assert choices == [choice.strip() for choice in row["choices"]]
