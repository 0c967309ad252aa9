import csv
import io

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
