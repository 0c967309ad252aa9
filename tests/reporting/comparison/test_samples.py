import json
import math

import pytest
from reporting.big import write_big_run

from hfpatch.reporting.comparison import samples
from hfpatch.reporting.comparison.samples import Change, read_samples
from hfpatch.reporting.comparison.tables import sides_table
from hfpatch.results.folder import load_results
from hfpatch.results.records import write_values


def write(run_dir, method, seed, task, records):
    path = run_dir / "runs" / method / f"seed-{seed}" / "evaluations" / f"{task}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def answers(right, total=6, metric="acc", **more):
    return [
        {"doc_id": i, "doc_hash": f"{i:08d}", "target": f"t{i}", metric: int(i in right), **more} for i in range(total)
    ]


@pytest.fixture
def three(run_dir):
    """The baseline gets 0, 1 and 2 right; seed 0 loses 0 and gains 3 and 4; seed 1 gains 3 alone."""
    write(run_dir, "baseline", 0, "tinyworld_cloze", answers({0, 1, 2}))
    write(run_dir, "lora", 0, "tinyworld_cloze", answers({1, 2, 3, 4}))
    write(run_dir, "lora", 1, "tinyworld_cloze", answers({0, 1, 2, 3}))
    return run_dir


def test_gained_and_lost_are_what_most_seeds_changed(three, results):
    samples = read_samples(three, results)
    (sides,) = samples.sides
    assert (sides.method, sides.seeds, sides.documents, sides.gained, sides.lost) == ("lora", 2, 6, 1, 0)
    assert set(sides.changes) == {Change("3/00000003", 2, 0), Change("0/00000000", 0, 1), Change("4/00000004", 1, 0)}
    assert sides.changes[0].document == "3/00000003"
    assert samples.documents["tinyworld_cloze"]["3/00000003"] == {"target": "t3"}
    assert sides_table([sides]).rows[0].cells == ("lora", "tinyworld_cloze", "1", "0", "+1", "6", "2")
    write(three, "baseline", 0, "tinyworld_cloze", answers({0, 1, 2}, doc={"question": "who <b>?"}))
    fields = read_samples(three, results).documents["tinyworld_cloze"]["3/00000003"]
    assert fields == {"target": "t3", "doc": '{"question": "who <b>?"}'}  # what the evaluation keeps is shown


def test_held_out_documents_whose_text_is_not_recorded_are_not_listed(three, build, raw):
    raw["tasks"] = {"held_out_text": {**raw["tasks"]["tinyworld_text"], "primary": "nats_per_token"}, **raw["tasks"]}
    for name, loss in (("baseline", -8.0), ("lora", -6.0)):
        write(three, name, 0, "held_out_text", [{"doc_id": 0, "doc_hash": "x", "nats_per_token": [loss, 4]}])
    assert {side.task for side in read_samples(three, build(raw)).sides} == {"tinyworld_cloze"}


def test_a_perplexity_has_moves_and_no_sides(run_dir, results):
    for method, values in (("baseline", [-8.0] * 4), ("lora", [-6.0, -8.0, -9.0, -math.inf])):
        texts = [{"doc_id": i, "doc_hash": "x", "word_perplexity": [value, 2]} for i, value in enumerate(values)]
        write(run_dir, method, 0, "tinyworld_text", texts)
    (sides,) = read_samples(run_dir, results).sides
    assert (sides.gained, sides.lost) == (None, None)
    assert [(change.document[0], change.gained) for change in sides.changes] == [("0", 1.0), ("2", -0.5)]
    table = sides_table([sides])
    assert [column.name for column in table.columns] == ["method", "task", "documents", "seeds"]


def test_a_broken_line_costs_that_document_alone(three, results):
    path = three / "runs" / "lora" / "seed-0" / "evaluations" / "tinyworld_cloze.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], lines[3][:10], *lines[4:]]))
    (sides,) = read_samples(three, results).sides
    assert sides.documents == 5
    assert "3/00000003" not in {change.document for change in sides.changes}


def test_without_the_baselines_records_the_task_is_named(run_dir, results):
    write(run_dir, "lora", 0, "tinyworld_cloze", answers({1}))
    samples = read_samples(run_dir, results)
    assert samples.sides == ()
    (sentence,) = samples.missing
    assert sentence.startswith("No record of the baseline's documents of tinyworld_cloze, ")
    assert read_samples(run_dir / "nowhere", results).sides == ()


def test_more_changes_than_are_listed_are_counted(run_dir, results):
    write(run_dir, "baseline", 0, "tinyworld_cloze", answers(set(), total=100))
    write(run_dir, "lora", 0, "tinyworld_cloze", answers(range(100), total=100))
    (sides,) = read_samples(run_dir, results).sides
    assert (len(sides.changes), sides.left_out, sides.gained) == (60, 40, 100)


def test_samples_are_the_same_from_the_numbers_of_records_alone(tmp_path, monkeypatch):
    folder = write_big_run(tmp_path, methods=4, tasks=2, seeds=2, documents=60, steps=0)
    results = load_results(folder)
    expected = read_samples(folder, results)
    assert len(expected.sides) == 6
    for records in folder.glob("runs/*/*/evaluations"):
        write_values(records, results.tasks)
    read = []
    unpatched = samples.read_lines
    monkeypatch.setattr(samples, "read_lines", lambda path, **options: read.append(path) or unpatched(path, **options))
    assert read_samples(folder, results) == expected
    assert {path.parents[2].name for path in read} == {"baseline"}
