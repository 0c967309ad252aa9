import csv
import io

import pytest

from hfpatch.reporting.comparison.data import figure_csv, results_csv
from hfpatch.reporting.tabular import csv_text
from hfpatch.results.schema import Curve, LayerSeries


def read(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_columns_and_every_number_once(results):
    text = results_csv({"": results})
    assert text.splitlines()[0].startswith("method,seed,task,metric,value,stderr,n,trainable,other,")
    rows = [row for row in read(text) if row["value"]]
    assert len(rows) == 3 * 2 * 4  # methods, seeds, and two metrics of one of three tasks
    keys = {(row["method"], row["seed"], row["task"], row["metric"]) for row in rows}
    assert len(keys) == len(rows)
    pairs = [row for row in read(text) if not row["value"]]
    assert len(pairs) == 9  # three pairs on three tasks
    assert not any(row["seed"] for row in pairs)
    assert not any(row["verdict"] for row in rows)


def test_the_loss_on_held_out_text_and_the_groups_of_documents_are_in_the_table(build, raw):
    raw["data"]["held_out"] = {"base_loss": 3.0}
    for seed, loss in (("0", 2.25), ("1", 2.5)):
        raw["methods"]["lora"]["runs"][seed]["train"]["final_eval_loss"] = loss
        raw["methods"]["lora"]["runs"][seed]["evaluation"]["tinyworld_cloze"]["clusters"] = {"column": "x", "groups": 9}
    rows = read(results_csv({"": build(raw)}))
    losses = {(r["method"], r["seed"]): r["value"] for r in rows if r["metric"] == "held_out_loss"}
    expected = {("lora", "0"): "2.25", ("lora", "1"): "2.5", ("baseline", "0"): "3.0", ("baseline", "1"): "3.0"}
    assert losses == expected
    grouped = {(r["method"], r["task"]) for r in rows if (r["groups"], r["grouped_by"]) == ("9", "x")}
    assert grouped == {("lora", "tinyworld_cloze")}
    assert all(r["groups"] == "" for r in rows if (r["method"], r["task"]) not in grouped)


def test_values(results):
    rows = {(r["method"], r["seed"], r["metric"]): r for r in read(results_csv({"": results}))}
    row = rows["pre_projection_skip", "1", "acc"]
    assert (row["value"], row["stderr"], row["n"], row["trainable"]) == ("0.46", "0.02", "400", "80000")
    assert rows["lora", "0", "bits_per_byte"]["stderr"] == ""


def test_hostile_text_comes_back_as_it_was(build, hostile):
    results = build(hostile, curves=False)
    assert {row["method"] for row in read(results_csv({"": results}))} == set(results.methods)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t"])
def test_text_that_a_spreadsheet_takes_for_a_formula_is_quoted_and_numbers_are_not(start, tmp_path):
    text = f"{start}HYPERLINK(1)"
    (row,) = csv.reader(io.StringIO(csv_text(["name", "value"], [[text, -1.5]])[len("name,value\n") :], newline=""))
    assert row == [f"'{text}", "-1.5"]


def test_several_runs_have_a_column_that_says_which(results):
    text = results_csv({"a": results, "b": results})
    assert text.startswith("run,method,seed,")
    assert {row["run"] for row in read(text)} == {"a", "b"}


def test_the_data_of_the_figures(build, raw):
    results = build(raw)
    differences = read(figure_csv("differences", results, []))
    assert {
        (row["method"], row["other"], row["task"]): float(row["difference"]) for row in differences if row["p"]
    } == {(each["method"], each["reference"], each["task"]): each["difference"] for each in raw["comparisons"]}
    quality = [row for row in read(figure_csv("quality", results, [])) if row["method"] == "lora"]
    assert [float(row["value"]) for row in quality] == [0.41, 0.42, 0.5, 0.49, 18.9, 19.1]
    layers = [("lora", LayerSeries(quantity="‖a‖", group="q", points={3: 1e-9, 0: 0.25}, reference=0.5))]
    assert [row["value"] for row in read(figure_csv("layers", results, layers))] == ["0.25", "1e-09"]


def test_curves_have_at_most_some_hundred_steps_and_every_loss_on_held_out_text(build, raw):
    curve = Curve(steps=list(range(1, 1201)), loss=[3 - i / 1200 for i in range(1200)], seeds=2, held_out={7: 2.5})
    results = build(raw, curves=False)
    methods = {str(i): results.methods["lora"].model_copy(update={"curve": curve}) for i in range(400)}
    rows = read(figure_csv("training", results.model_copy(update={"methods": {"a": methods["0"]}}), []))
    assert [int(row["step"]) for row in rows[:4]] == [1, 4, 7, 10]
    assert [row["held_out"] for row in rows if row["held_out"]] == ["2.5"]
    assert all(float(row["loss"]) == curve.loss[int(row["step"]) - 1] for row in rows)
    assert len(read(figure_csv("training", results.model_copy(update={"methods": methods}), []))) < 45_000
