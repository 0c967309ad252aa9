from scipy import stats

from hfpatch.reporting.comparison.tables import difference_table, method_table, score_table, seed_table, task_table
from hfpatch.reporting.markdown import markdown_table
from hfpatch.reporting.tabular import latex

SKIP = "pre_projection_skip"


def rows(table):
    return {str(row.cells[0]): [str(cell) for cell in row.cells[1:]] for row in table.rows}


def test_headings_say_what_is_measured_on_how_much(results):
    *_, cloze, _, text, _, _ = score_table(results).columns
    assert (cloze.name, cloze.notes) == ("tinyworld_cloze", ("acc, n = 400", "higher is better"))
    assert text.notes[1] == "lower is better"


def test_scores_are_means_with_cost_and_the_baseline_has_its_standard_error(results):
    found = rows(score_table(results))
    assert found["baseline"] == ["0", "40.0 ± 2.0 %", "50.0 ± 2.0 %", "20.00 ± 0.020", "–", "–"]
    assert found[SKIP] == ["80,000", "45.0 %", "51.5 %", "17.60", "2,048", "512 MiB"]
    assert [row.cells[0] for row in score_table(results).rows if row.strong] == ["baseline"]


def test_a_cell_without_result_is_a_dash(build, raw):
    for run in raw["methods"]["lora"]["runs"].values():
        del run["evaluation"]["tinyworld_cloze"]
    raw["comparisons"] = []
    assert rows(score_table(build(raw)))["lora"][1] == "–"


def test_a_narrow_terminal_has_a_line_for_each_method_and_task(results):
    (narrow,) = score_table(results).narrow
    assert narrow.rows[1].cells == (SKIP, "tinyworld_cloze", "45.0 %")
    assert len(narrow.rows) == 9


def test_every_difference_is_in_one_table_once(results):
    table = difference_table(results)
    lines = [[str(cell).splitlines() for cell in row.cells] for row in table.rows]
    assert len({(*line[0], *line[1]) for line in lines}) == len(lines) == 9  # three pairs on three tasks
    names = [column.name for column in table.columns]
    first = dict(zip(names, lines[0], strict=True))
    assert first["method"] == [SKIP, "baseline"]
    assert first["task"] == ["tinyworld_cloze", "acc"]
    assert first["difference"] == ["+5.0 [2.0, 8.0] points"]
    one, all_six, power = (stats.t.ppf(level, 100) for level in (0.975, 1 - 0.025 / 6, 0.8))
    half = 3 * all_six / one
    assert first["simultaneous"] == [f"[{5 - half:.1f}, {5 + half:.1f}]"]
    assert first["p (Holm)"] == ["0.0050", "0.0010"]  # five are left after the smallest
    assert first["visible from"] == [f"{3 * (all_six + power) / one:.1f} points"]
    assert first["verdict"] == ["better"]
    assert lines[-1][0] == [SKIP, "lora"]
    assert lines[-1][2] == ["−7.4 [−10.4, −4.4] %"]  # -1.4 and ±0.57 of 19.0
    assert lines[-2][-1] == ["not tested (not compared)"]
    assert "does it change the base? 6, is it better than LoRA? 1" in table.caption


def test_filters_know_questions_measures_tasks_and_verdicts(results):
    table = difference_table(results)
    assert table.rows[-1].keys == {
        "question": ("is it better than LoRA?",),
        "task": ("tinyworld_text",),
        "verdicts": ("better",),
        "measure": ("word perplexity",),
    }
    assert [each.values for each in table.filters][:2] == [
        ("does it change the base?", "is it better than LoRA?"),
        ("acc", "acc norm", "word perplexity"),
    ]


def test_measures_that_decide_nothing_have_no_verdict_and_are_on_the_page_alone(build, raw, compared):
    raw["comparisons"].append(compared(SKIP, "tinyworld_cloze", -0.2, 0.01, "better", metric="bits_per_byte"))
    table = difference_table(build(raw))
    others = [[str(cell) for cell in row.cells] for row in table.rows if row.page_only]
    assert [each[0] for each in others] == [f"{SKIP}\nbaseline", "lora\nbaseline"]
    assert others[0][1:] == ["tinyworld_cloze\nacc", "+5.0 [2.0, 8.0] points", "–", "–", "–", "no verdict"]
    assert str(table.rows[0].cells[1]).endswith("bits per byte")
    assert "no verdict" not in markdown_table(table)


def test_each_seed_has_its_scores(results):
    assert [row.cells for row in seed_table(results).rows][:2] == [
        (SKIP, "0", "44.0 %", "52.0 %", "17.50"),
        (SKIP, "1", "46.0 %", "51.0 %", "17.70"),
    ]


def test_the_loss_on_held_out_text_has_a_column_where_it_is_known(build, raw):
    assert "held-out loss" not in [column.name for column in score_table(build(raw)).columns]
    raw["data"]["held_out"] = {"base_loss": 3.0}
    for seed, loss in (("0", 2.25), ("1", 2.5)):
        raw["methods"]["lora"]["runs"][seed]["train"]["final_eval_loss"] = loss
    table = score_table(build(raw))
    assert [column.name for column in table.columns][2] == "held-out loss"
    # the mean of 2.25 and 2.5, and half of their difference times the square root of 2
    assert [row.cells[2] for row in table.rows] == ["3.0000", "–", "2.3750 ± 0.1768"]
    assert r"held-out loss & tinyworld\_cloze" in latex(table)


def test_methods_have_match_survival_and_time(results):
    base, skip, lora = (row.cells for row in method_table(results).rows)
    assert base[1] == "nothing: the frozen base"
    assert skip[1] == "pre_projection(content_skip=True)"
    assert lora[3] == "pre_projection_skip: rank 40, 80,000 asked (+2.4 %)"
    assert skip[5:] == ("99.0 %", "2.5000", "200.0 s")


def test_every_task_says_what_it_asks_with_one_example(build, raw):
    raw["tasks"] = {**raw["tasks"], "lambada": raw["tasks"]["tinyworld_cloze"]}
    table = task_table(build(raw), {"lambada": {"0/ab": {"target": "tree"}}})
    found = rows(table)
    assert found["tinyworld_cloze"][:2] == ["the last word of a story, which follows from the whole of it", "acc"]
    assert found["tinyworld_cloze"][2].endswith("]")
    assert "|" in found["tinyworld_endings"][2]
    assert found["lambada"] == ["scored by acc in lm-eval", "acc", "target: tree"]
