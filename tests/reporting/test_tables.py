from hfpatch.reporting.tables import main_table, method_table, paired_table


def rows(results):
    return {row.method: row for row in main_table(results).rows}


def test_headings_say_what_is_measured_on_how_much(results):
    cloze, _, text = main_table(results).headings
    assert (cloze.task, cloze.metric, cloze.n) == ("tinyworld_cloze", "acc", "400")
    assert (cloze.better, cloze.unit) == ("higher is better", "points")
    assert (text.better, text.unit) == ("lower is better", "% of the baseline")


def test_the_baseline_has_its_standard_error_and_no_difference(results):
    row = rows(results)["baseline"]
    assert row.baseline
    assert [cell.value for cell in row.cells] == ["40.0 ± 2.0 %", "50.0 ± 2.0 %", "20.00 ± 0.020"]
    assert all(cell.verdict is None and not cell.difference for cell in row.cells)
    assert (row.tokens_per_s, row.peak_memory) == ("–", "–")


def test_a_method_has_mean_interval_verdict_and_cost(results):
    row = rows(results)["pre_projection_skip"]
    assert (row.trainable, row.tokens_per_s, row.peak_memory) == ("80,000", "2,048", "512 MiB")
    cloze, endings, text = row.cells
    assert (cloze.value, cloze.difference, cloze.verdict_text) == ("45.0 %", "+5.0 [2.0, 8.0]", "better*")
    assert (endings.value, endings.difference, endings.verdict_text) == ("51.5 %", "+1.5 [−3.5, 6.5]", "within noise")
    assert (text.value, text.difference, text.verdict_text) == ("17.60", "−12.0 [−15.0, −9.0]", "better*")


def test_a_difference_that_falls_to_the_correction_is_within_noise(results):
    assert rows(results)["lora"].cells[2].verdict_text == "within noise†"


def test_a_cell_without_comparison_has_its_value_alone(build, raw):
    raw["comparisons"] = raw["comparisons"][1:]
    cell = rows(build(raw))["pre_projection_skip"].cells[0]
    assert (cell.value, cell.difference, cell.verdict_text) == ("45.0 %", "", "")


def test_a_cell_without_result_is_a_dash(build, raw):
    for run in raw["methods"]["lora"]["runs"].values():
        del run["evaluation"]["tinyworld_cloze"]
    raw["comparisons"] = []
    assert rows(build(raw))["lora"].cells[0].value == "–"


def test_every_comparison_is_written_out(results):
    table = paired_table(results)
    assert len(table) == 7
    first, last = table[0], table[-1]
    assert (first.difference, first.absolute) == ("+5.0 [2.0, 8.0] points", "+0.0500")
    assert (first.p, first.p_holm, first.visible, first.n) == ("0.0010", "0.0030", "4.2 points", "400")
    assert last.reference == "lora"
    assert last.difference == "−7.4 [−10.4, −4.4] %"  # -1.4 and ±0.57 of 19.0
    assert table[2].p == "< 0.0001"


def test_methods_are_told_with_match_survival_and_time(results):
    base, skip, lora = method_table(results)
    assert base.parts == "nothing: the frozen base"
    assert skip.parts == "pre_projection(content_skip=True)"
    assert lora.matched == "pre_projection_skip: rank 40, 80,000 asked (+2.4 %)"
    assert (skip.survival, skip.final_loss, skip.time) == ("99.0 %", "2.5000", "200.0 s")
