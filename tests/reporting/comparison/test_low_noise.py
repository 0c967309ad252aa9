"""The section on low-noise metrics: beside the primary metric, bits per byte never without the margin."""

import csv
import io

import pytest
from reporting.conftest import document_of

from hfpatch.reporting.comparison.low_noise import low_noise_section
from hfpatch.reporting.document import Cell, Download, Sentences, Table
from hfpatch.reporting.markdown import markdown

CHOICE = {"bits_per_byte": 0.5, "gold_probability": 0.6, "margin": 0.25}
SKIP = "pre_projection_skip"


@pytest.fixture
def measured(raw, compared):
    """The example, with low-noise metrics of two tasks and of the text, whose bits per byte were there before."""
    has = {"tinyworld_cloze": ("bits_per_byte",), "tinyworld_endings": tuple(CHOICE), "tinyworld_text": CHOICE.keys()}
    for method in raw["methods"].values():
        for run in method["runs"].values():
            for task, score in run["evaluation"].items():
                if task != "tinyworld_text":
                    score["metrics"] |= {name: CHOICE[name] for name in has[task]}

    def differ(method, task, metric, difference, verdict="within noise", reference="baseline", **more):
        made = compared(method, task, difference, 0.02, verdict, reference=reference, **more)
        return {**made, "metric": metric, "p": 0.001}

    raw["low_noise"] = [
        differ(SKIP, "tinyworld_cloze", "bits_per_byte", -0.04, "better"),
        differ(SKIP, "tinyworld_endings", "bits_per_byte", -0.05, "better"),
        differ(SKIP, "tinyworld_endings", "gold_probability", 0.03),
        differ(SKIP, "tinyworld_endings", "margin", -0.01),
        differ(SKIP, "tinyworld_text", "bits_per_byte", -0.03, "better"),
        differ(SKIP, "tinyworld_endings", "bits_per_byte", 0.03, "worse", reference="lora"),
        differ(SKIP, "tinyworld_endings", "gold_probability", 0.02, reference="lora"),
        differ(SKIP, "tinyworld_endings", "margin", 0.01, reference="lora"),
    ]
    return raw


def lines(table):
    return [[cell.lines if isinstance(cell, Cell) else (cell,) for cell in row.cells] for row in table.rows]


def test_each_metric_stands_beside_the_primary_one_in_its_unit(build, measured):
    results = build(measured)
    (section,) = low_noise_section(results)
    against, between = (block for block in section.blocks if isinstance(block, Table))
    assert [column.name for column in against.columns] == [
        "method", "task", "primary metric", "bits per byte", "margin", "probability of the right answer",
    ]  # fmt: skip
    found = {(row[0][0], row[1][0]): row[2:] for row in lines(against)}
    assert list(found) == [
        (name, task)
        for task in ("tinyworld_cloze", "tinyworld_endings", "tinyworld_text")
        for name in ("baseline", SKIP)
    ]
    assert found["baseline", "tinyworld_endings"] == [("50.0 %",), ("0.5000",), ("0.2500",), ("60.0 %",)]
    primary, bits, margin, share = found[SKIP, "tinyworld_endings"]
    assert primary == ("51.5 %", "+1.5 [−3.5, 6.5]", "within noise")
    assert bits == ("0.5000", "−10.0 [−14.0, −6.0]", "better*")  # % of the baseline's 0.5
    assert margin == ("0.2500", "−0.010 [−0.030, 0.010]", "within noise†")
    assert share == ("60.0 %", "+3.0 [1.0, 5.0]", "within noise†")  # points
    assert found[SKIP, "tinyworld_cloze"][2:] == [("–",), ("–",)]
    assert found[SKIP, "tinyworld_text"][1][1:] == ("−2.4 [−4.0, −0.8]", "better*")
    ((name, _, _, bits, *_),) = lines(between)
    assert (name, bits[2]) == ((f"{SKIP} against lora",), "worse*")
    (explained,) = (block for block in section.blocks if isinstance(block, Sentences))
    assert [text.count(". ") + text.endswith(".") for text in explained.items] == [2, 2, 2]
    (download,) = (block for block in section.blocks if isinstance(block, Download))
    rows = list(csv.DictReader(io.StringIO(download.content)))
    assert [(row["metric"], float(row["difference"])) for row in rows[1:4]] == [
        ("bits_per_byte", -0.05), ("gold_probability", 0.03), ("margin", -0.01),
    ]  # fmt: skip


def test_a_report_has_the_section_where_there_are_such_metrics(build, raw, measured):
    assert "## Low-noise metrics" in markdown(document_of(build(measured)))
    del raw["low_noise"]
    assert "Low-noise" not in markdown(document_of(build(raw)))


def test_comparisons_are_found_by_metric(build, measured):
    results = build(measured)
    assert results.comparison(SKIP, "tinyworld_endings", "baseline").metric == "acc_norm"
    assert results.comparison(SKIP, "tinyworld_endings", "lora", "margin").difference == 0.01
    assert results.comparison("lora", "tinyworld_endings", "baseline", "margin") is None
    assert results.mean("lora", "tinyworld_endings", "gold_probability") == 0.6
