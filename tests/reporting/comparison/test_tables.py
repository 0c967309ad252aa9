from hfpatch.reporting.comparison.tables import (
    main_table,
    method_table,
    paired_table,
    score_table,
    terminal_table,
)
from hfpatch.reporting.latex import latex


def cells(row):
    return [str(cell).split("\n") for cell in row.cells]


def rows(results):
    return {row.cells[0]: cells(row)[1:] for row in main_table(results).rows}


def test_headings_say_what_is_measured_on_how_much(results):
    *_, cloze, _, text, _, _ = main_table(results).columns
    assert (cloze.name, cloze.notes) == ("tinyworld_cloze", ("acc, n = 400", "higher is better", "[points]"))
    assert text.notes[1:] == ("lower is better", "[% of the baseline]")


def test_the_baseline_has_its_standard_error_and_no_difference(results):
    assert rows(results)["baseline"][1:] == [
        *(["40.0 ± 2.0 %"], ["50.0 ± 2.0 %"], ["20.00 ± 0.020"]),
        *(["–"], ["–"]),
    ]
    assert [row.cells[0] for row in main_table(results).rows if row.strong] == ["baseline"]


def test_a_method_has_mean_interval_verdict_and_cost(results):
    assert rows(results)["pre_projection_skip"] == [
        ["80,000"],
        ["45.0 %", "+5.0 [2.0, 8.0]", "better*"],
        ["51.5 %", "+1.5 [−3.5, 6.5]", "within noise"],
        ["17.60", "−12.0 [−15.0, −9.0]", "better*"],
        ["2,048"],
        ["512 MiB"],
    ]


def test_a_difference_that_falls_to_the_correction_is_within_noise(results):
    assert rows(results)["lora"][3][2] == "within noise†"


def test_a_cell_without_comparison_has_its_value_alone(build, raw):
    raw["comparisons"] = raw["comparisons"][1:]
    assert rows(build(raw))["pre_projection_skip"][1] == ["45.0 %"]


def test_a_cell_without_result_is_a_dash(build, raw):
    for run in raw["methods"]["lora"]["runs"].values():
        del run["evaluation"]["tinyworld_cloze"]
    raw["comparisons"] = []
    assert rows(build(raw))["lora"][1] == ["–"]


def test_filters_know_verdicts_tasks_and_references(results):
    assert main_table(results).rows[1].keys == {"verdicts": ("better", "within noise", "better")}
    table = paired_table(results)
    assert table.rows[-1].keys == {
        "verdicts": ("better",),
        "task": ("tinyworld_text",),
        "reference": ("lora",),
    }
    assert [each.values for each in table.filters][:2] == [
        ("baseline", "lora"),
        ("tinyworld_cloze", "tinyworld_endings", "tinyworld_text"),
    ]


def test_a_narrow_terminal_has_a_table_for_each_task(results):
    narrow = terminal_table(results).narrow
    assert [table.title.partition(":")[0] for table in narrow] == list(results.tasks)
    assert cells(narrow[0].rows[1]) == [
        ["pre_projection_skip"],
        ["80,000"],
        ["45.0 %"],
        ["+5.0 [2.0, 8.0]"],
        ["better*"],
    ]
    assert cells(narrow[0].rows[0])[2:] == [["40.0 ± 2.0 %"], [""], [""]]


def test_every_comparison_is_written_out(results):
    table = paired_table(results)
    assert len(table.rows) == 7
    names = [column.name for column in table.columns]
    first, last, third = (
        {name: str(cell).splitlines() for name, cell in zip(names, table.rows[i].cells, strict=True)}
        for i in (0, -1, 2)
    )
    assert first["method"] == ["pre_projection_skip", "against baseline"]
    assert first["task"] == ["tinyworld_cloze", "acc, n = 400"]
    assert first["difference"] == ["+5.0 [2.0, 8.0] points", "+0.0500", "from 4.2 points"]
    assert first["p (Holm)"] == ["0.0030", "0.0010"]
    assert first["test"] == ["paired bootstrap, 2 seeds"]
    assert last["method"][1] == "against lora"
    assert last["difference"][0] == "−7.4 [−10.4, −4.4] %"  # -1.4 and ±0.57 of 19.0
    assert third["p (Holm)"][1] == "< 0.0001"


def test_the_loss_on_held_out_text_has_a_column_where_it_is_known(build, raw):
    assert "held-out loss" not in [column.name for column in main_table(build(raw)).columns]
    raw["data"]["held_out"] = {"base_loss": 3.0}
    for seed, loss in (("0", 2.25), ("1", 2.5)):
        raw["methods"]["lora"]["runs"][seed]["train"]["final_eval_loss"] = loss
    results = build(raw)
    for table in (main_table(results), terminal_table(results)):
        assert [column.name for column in table.columns][:4] == [
            "method",
            "trainable",
            "held-out loss",
            "tinyworld_cloze",
        ]
        # the mean of 2.25 and 2.5, and half of their difference times the square root of 2
        assert [row.cells[2] for row in table.rows] == ["3.0000", "–", "2.3750 ± 0.1768"]
    assert terminal_table(results).narrow[0].title == "Held-out loss"
    assert terminal_table(results).narrow[1].rows[1].cells[2] == "45.0 %"
    assert r"held-out loss & tinyworld\_cloze" in latex(score_table(results))


def test_methods_have_match_survival_and_time(results):
    base, skip, lora = (row.cells for row in method_table(results).rows)
    assert base[1] == "nothing: the frozen base"
    assert skip[1] == "pre_projection(content_skip=True)"
    assert lora[3] == "pre_projection_skip: rank 40, 80,000 asked (+2.4 %)"
    assert skip[5:] == ("99.0 %", "2.5000", "200.0 s")


def test_the_captions_name_what_was_corrected_over(build, raw):
    assert "correction over the tasks of a method" in main_table(build(raw)).caption
    assert "correction goes over" not in paired_table(build(raw)).caption
    families = {
        "methods and tasks": "and apart from them over all others. ",
        "methods and tasks, LoRAs apart": "apart from them over all with a LoRA, and apart from both over all others. ",
    }
    for raw["correction"], told in families.items():
        results = build(raw)
        assert "correction over all methods and tasks of this table" in main_table(results).caption
        assert f"over all comparisons with the baseline, {told}" in paired_table(results).caption
