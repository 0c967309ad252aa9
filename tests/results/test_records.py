"""The numbers of records in one file, which comparisons and reports read in place of the records."""

import json
import math
import shutil

import numpy as np
import pytest
from own_tasks import task_result
from safetensors import safe_open
from safetensors.numpy import save_file

from hfpatch.errors import HfpatchError
from hfpatch.evaluation import Records, compare
from hfpatch.results import records
from hfpatch.results.records import (
    VALUES,
    hash_documents,
    published_runs,
    read_lines,
    read_values,
    write_published,
    write_values,
)

ROWS = [
    {"doc_id": 0, "doc_hash": "a", "target": " b\u2028c", "acc": 1.0, "f1": [0, 1, 1], "word_perplexity": [-2.5, 3]},
    {"doc_id": 1, "doc_hash": "b", "target": 2, "doc": {"x": "y"}, "acc": 0, "f1": None, "word_perplexity": [None, 4]},
]


def write(folder, rows=ROWS, task="quiz"):
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / f"{task}.jsonl").write_text(text, encoding="utf-8")
    return folder


def write_random(folders, clusters=1):
    """Write 60 documents with a right or wrong answer and a log-likelihood in each folder."""
    rng = np.random.default_rng(0)
    for folder in folders:
        rows = [
            {"doc_id": i, "doc_hash": f"h{i}", "target": "\u2028", "acc": int(rng.random() < 0.5),
             "cluster": str(i % clusters), "bits_per_byte": [-rng.random(), i % 7 + 1]}
            for i in range(60)
        ]  # fmt: skip
        write(folder, rows)


def quiz(primary, clusters=None):
    return {"quiz": task_result("quiz", primary, primary == "acc", n=60, clusters=clusters)}


def test_a_half_written_line_costs_itself_alone_where_that_is_asked(tmp_path):
    path = write(tmp_path) / "quiz.jsonl"
    path.write_bytes(path.read_bytes() + '{"doc_id": "é'.encode()[:-1])
    assert read_lines(path, skip_broken=True) == ROWS
    with pytest.raises(ValueError, match="decode"):
        read_lines(path)
    assert read_lines(tmp_path / "none.jsonl", skip_broken=True) == []


def test_numbers_and_pairs_are_kept_exactly(tmp_path):
    rows = [{**row, "acc": value} for row, value in zip(ROWS, (0.1 + 0.2, None), strict=True)]
    write_values(write(tmp_path, rows), ["quiz"])
    values = read_values(tmp_path)["quiz"]
    assert set(values.metrics) == {"acc", "word_perplexity"}  # f1 has neither numbers nor pairs
    assert values.metrics["acc"][0] == 0.1 + 0.2
    assert math.isnan(values.metrics["acc"][1])
    assert np.array_equal(values.metrics["word_perplexity"], [[-2.5, 3], [math.nan, 4]], equal_nan=True)
    assert values.documents == hash_documents(["a", "b"]) != hash_documents(["b", "a"])
    first = (tmp_path / VALUES).read_bytes()
    write_values(tmp_path, ["quiz"])
    assert (tmp_path / VALUES).read_bytes() == first


def test_a_metric_that_is_no_number_leaves_those_of_later_tasks_alone(tmp_path):
    """f1, which is left out, comes before others of the first task."""
    for task, right in (("quiz", 1), ("other", 0)):
        write(tmp_path, [{**row, "acc": right} for row in ROWS], task)
    write_values(tmp_path, ["quiz", "other"])
    values = read_values(tmp_path)
    assert [values[task].metrics["acc"].tolist() for task in ("quiz", "other")] == [[1, 1], [0, 0]]
    assert [values[task].metrics["word_perplexity"].shape for task in ("quiz", "other")] == [(2, 2), (2, 2)]


def test_records_that_changed_since_are_read_themselves(tmp_path):
    assert read_values(tmp_path) == {}
    write(tmp_path, task="other")
    write_values(write(tmp_path), ["quiz", "other"])
    write(tmp_path, ROWS[:1])
    assert set(read_values(tmp_path)) == {"other"}
    (tmp_path / VALUES).write_bytes(b"damaged")
    assert read_values(tmp_path) == {}


def test_values_of_another_layout_are_written_again_from_their_records(tmp_path):
    folder = tmp_path / "runs" / "lora" / "seed-0" / "evaluations"
    write_values(write(folder), ["quiz"])
    with safe_open(folder / VALUES, framework="numpy") as file:
        metadata, tensors = file.metadata(), [file.get_tensor(name) for name in sorted(file.keys())]
    whole = (folder / VALUES).read_bytes()
    save_file({f"0.{index}": values for index, values in enumerate(tensors)}, folder / VALUES, metadata=metadata)
    assert read_values(folder) == {}
    write_published(tmp_path, {"lora": {0: folder}}, [("quiz", "acc"), ("quiz", "word_perplexity")], {})
    assert (folder / VALUES).read_bytes() == whole
    shutil.rmtree(tmp_path / "runs")
    assert read_values(folder)["quiz"].metrics.keys() == {"acc", "word_perplexity"}


@pytest.mark.parametrize("clusters", [None, 12, 60])  # of 60 documents
def test_a_comparison_is_the_same_from_its_values_and_from_published_ones(clusters, tmp_path, monkeypatch):
    runs = {
        name: {seed: tmp_path / "runs" / name / f"seed-{seed}" / "evaluations" for seed in seeds}
        for name, seeds in {"baseline": (0,), "method": (0, 1)}.items()
    }
    folders = [folder for of_method in runs.values() for folder in of_method.values()]
    write_random(folders, clusters=clusters or 12)
    of = None if clusters is None else {"column": "passage", "groups": clusters}

    def compared():
        asked = [quiz(primary, of) for primary in ("acc", "bits_per_byte")]
        return [compare(Records(runs), tasks, {"method": ["baseline"]}) for tasks in asked]

    from_records = compared()
    for folder in folders:
        write_values(folder, ["quiz"])
    if clusters is None:  # groups are read in the records
        monkeypatch.setattr(records, "read_lines", lambda path: pytest.fail(f"{path} was read"))
        monkeypatch.setattr("hfpatch.evaluation.reading.read_lines", records.read_lines)
    assert compared() == from_records
    groups = {"quiz": np.arange(60) % 12} if clusters == 12 else {}  # groups of one document are not kept
    write_published(tmp_path, runs, [("quiz", "acc"), ("quiz", "bits_per_byte")], groups)
    shutil.rmtree(tmp_path / "runs")
    assert published_runs(tmp_path) == runs
    assert compared() == from_records
    (tmp_path / VALUES).unlink()
    with pytest.raises(HfpatchError, match="no values of a comparison"):
        published_runs(tmp_path)
