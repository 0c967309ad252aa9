import csv
import io

import numpy as np
import pytest

from hfpatch.reporting.curves import Curve
from hfpatch.reporting.figure_data import csv_text, read_training_csv, training_csv
from hfpatch.reporting.results_csv import COLUMNS, results_csv


def read(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_columns_and_every_number_once(results):
    text = results_csv(results)
    assert text.splitlines()[0] == "method,seed,task,metric,value,stderr,n,trainable"
    rows = read(text)
    assert len(rows) == 3 * 2 * 4  # methods, seeds, and two metrics of one of three tasks
    keys = {(row["method"], row["seed"], row["task"], row["metric"]) for row in rows}
    assert len(keys) == len(rows)
    assert all(len(row) == len(COLUMNS) for row in rows)


def test_values(results):
    rows = {(r["method"], r["seed"], r["metric"]): r for r in read(results_csv(results))}
    row = rows["pre_projection_skip", "1", "acc"]
    assert (row["value"], row["stderr"], row["n"], row["trainable"]) == ("0.46", "0.02", "400", "80000")
    assert rows["lora", "0", "bits_per_byte"]["stderr"] == ""


def test_hostile_text_comes_back_as_it_was(build, hostile):
    results = build(hostile, curves=False)
    assert {row["method"] for row in read(results_csv(results))} == set(results.methods)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t"])
def test_text_that_a_spreadsheet_takes_for_a_formula_is_quoted_and_numbers_are_not(start, tmp_path):
    text = f"{start}HYPERLINK(1)"
    (row,) = csv.reader(io.StringIO(csv_text(["name", "value"], [[text, -1.5]])[len("name,value\n") :], newline=""))
    assert row == [f"'{text}", "-1.5"]
    curve = Curve(np.arange(1, 4), np.array([3.0, 2.0, 1.0]), 1, {})
    (tmp_path / "training.csv").write_text(training_csv({text: curve}), newline="")
    assert list(read_training_csv(tmp_path / "training.csv", [text])) == [text]
