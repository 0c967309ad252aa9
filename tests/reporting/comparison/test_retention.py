import pytest
from reporting.conftest import data_of, document_of, read_csv

from hfpatch.reporting.comparison.figures import draw
from hfpatch.reporting.comparison.retention import answers_table, retention_table
from hfpatch.reporting.comparison.tables import results_csv
from hfpatch.reporting.facts import protocol_facts

TEXT = "retention_old"


def change(method, task, metric, difference, p=0.001):
    return {
        "method": method, "reference": "baseline", "task": task, "metric": metric, "n": 50, "seeds": 2,
        "difference": difference, "low": difference - 0.01, "high": difference + 0.01, "p": p, "test": "paired t",
        "errors": [[0.005, 49]],
    }  # fmt: skip


def point(method, scale, loss, *, kl, gain):
    made = [change(method, TEXT, "bits_per_byte", kl / 2), change(method, TEXT, "kl", kl)]
    made += [change(method, TEXT, "top1_agreement", -kl), change(method, TEXT, "forgetting", kl / 4)]
    if scale != 1:
        made.append(change(method, "held_out_text", "nats_per_token", -gain))
    return {"method": method, "scale": scale, "tuning_loss": loss, "comparisons": made}


@pytest.fixture
def kept(raw):
    """LoRA gains 0.3 and forgets 0.2; at 0.5, which is chosen, 0.25 and 0.04."""
    info = {**raw["tasks"]["tinyworld_text"], "primary": "nats_per_token"}
    raw["tasks"] = {"held_out_text": info, **raw["tasks"]}
    raw["comparisons"].append(change("lora", "held_out_text", "nats_per_token", -0.3))
    raw["retention"] = {
        "texts": {TEXT: {"source": "old.txt", "documents": 50, "tokens": 900, "sha256": "e" * 64}},
        "tasks": ["tinyworld_cloze"],
        "points": [point("lora", 0.5, 1.9, kl=0.04, gain=0.25), point("lora", 1.0, 2.0, kl=0.2, gain=0.3)],
    }
    return raw


def test_the_table_has_a_row_a_point_and_text(kept, build):
    rows = [[str(cell) for cell in row.cells] for row in retention_table(build(kept)).rows]
    assert rows == [
        ["lora", "0.5 (chosen)", "old", "+0.250 [0.240, 0.260]", "+0.020 [0.010, 0.030]", "+0.040 [0.030, 0.050]",
         "−4.0 [−5.0, −3.0]", "+0.010 [0.000, 0.020]", "–"],
        ["lora", "1", "old", "+0.300 [0.290, 0.310]", "+0.100 [0.090, 0.110]", "+0.200 [0.190, 0.210]",
         "−20.0 [−21.0, −19.0]", "+0.050 [0.040, 0.060]", "worse"],
    ]  # fmt: skip


def test_the_data_has_every_difference(kept, build):
    rows = data_of(build(kept), "retention")
    assert len(rows) == 2 * 5
    one = next(row for row in rows if (row["scale"], row["metric"]) == ("0.5", "nats_per_token"))
    assert (one["difference"], one["chosen"], one["tuning_loss"]) == ("-0.25", "True", "1.9")


def of_texts(results):
    return [verdict for verdict in results.verdicts if verdict.question == "retention"]


def test_the_files_have_every_verdict_on_a_text_that_should_be_kept(kept, build):
    """Exploratory ones, too, where no question asks for them."""
    results = build(kept)
    (verdict,) = of_texts(results)
    assert verdict.role == "secondary"
    for every in (read_csv(results_csv({"": results})), data_of(results, "differences")):
        rows = [row for row in every if row["task"] == TEXT]
        assert [(row["method"], row["other"], row["outcome"]) for row in rows] == [("lora", "baseline", "worse")]


def test_the_figure_has_the_points_and_the_front(kept, build):
    (axes,) = draw(build(kept))["retention"].axes
    places = {
        (float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axes.lines if len(line.get_xdata()) == 1
    }
    assert {(0.04, 0.25), (0.2, 0.3), (0.0, 0.0)} <= places
    paths = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines]
    assert [(0.0, 0.0), (0.04, 0.25), (0.2, 0.3)] in paths


def test_a_report_has_the_section_where_there_is_retention(kept, build):
    with_it = build(kept)
    parts = [document_of(run).parts[0] for run in (with_it, with_it.model_copy(update={"retention": None}))]
    names = [{section.name for section in part.sections} for part in parts]
    assert names[0] - names[1] == {"retention"}
    assert "old.txt" in dict(protocol_facts(with_it))["Text to keep, retention_old"]


def test_labels_and_a_choice_of_methods_keep_points_and_verdicts(kept, build):
    kept["methods"]["lora"]["label"] = "LoRA"
    results = build(kept)
    before = of_texts(results)
    labelled = results.labelled()
    assert {pair.method for p in labelled.retention.points for pair in p.comparisons} == {"LoRA"}
    assert of_texts(labelled) == [pair.model_copy(update={"method": "LoRA"}) for pair in before]
    assert of_texts(results.only(["lora"])) == before


def test_answers_are_shown_without_retention_too(raw, build):
    shares = {"kept": 0.971, "kept_low": 0.95, "kept_high": 0.992, "won": 0.5}
    raw["kept"] = [{"method": "lora", "task": "tinyworld_cloze", "seeds": 2, "right": 200, "wrong": 20, **shares}]
    results = build(raw)
    table = answers_table(results)
    assert table.columns[1].notes[:1] == ("right 200, wrong 20",)
    assert [list(map(str, row.cells)) for row in table.rows] == [["lora", "97 % [95, 99]\n50 %"]]
    assert retention_table(results).rows == ()
