from reporting.conftest import read_csv, rows_of
from scipy import stats

from hfpatch.reporting.comparison.tables import (
    difference_table,
    method_table,
    results_csv,
    score_table,
    seed_table,
)
from hfpatch.reporting.markdown import markdown_table

SKIP = "pre_projection_skip"


def test_scores_are_means_with_cost_and_the_baseline_has_its_standard_error(results, build, raw):
    table = score_table(results)
    *_, cloze, _, text = table.columns
    assert (cloze.name, cloze.notes) == ("tinyworld_cloze", ("acc, n = 400", "higher is better"))
    assert text.notes[1] == "lower is better"
    cells = rows_of(table)
    assert cells["baseline"] == ["40.0 ± 2.0 %", "50.0 ± 2.0 %", "20.00 ± 0.020"]
    assert cells[SKIP] == ["45.0 %", "51.5 %", "17.60"]
    assert [row.cells[0] for row in table.rows if row.strong] == ["baseline"]
    for run in raw["methods"]["lora"]["runs"].values():
        del run["evaluation"]["tinyworld_cloze"]
    assert rows_of(score_table(build(raw | {"comparisons": []})))["lora"][0] == "–"


def test_every_difference_is_in_one_table_once(results):
    table = difference_table(results)
    lines = [[str(cell).splitlines() for cell in row.cells] for row in table.rows]
    assert len({(*line[0], *line[1]) for line in lines}) == len(lines) == 9  # three pairs on three tasks
    names = [column.name for column in table.columns]
    first = dict(zip(names, lines[0], strict=True))
    assert first["method"] == [SKIP, "baseline"]
    assert first["task"] == ["tinyworld_cloze", "acc"]
    assert first["difference"] == ["+5.0 [2.0, 8.0] points"]
    one, all_six = (stats.t.ppf(level, 100) for level in (0.975, 1 - 0.025 / 6))
    half = 3 * all_six / one
    assert first["corrected"] == [f"[{5 - half:.1f}, {5 + half:.1f}]"]
    assert first["p corrected"] == ["0.0050", "0.0010"]  # five are left after the smallest
    assert first["verdict"] == ["better"]
    assert lines[-1][0] == [SKIP, "lora"]
    assert lines[-1][2] == ["−7.4 [−10.4, −4.4] %"]  # -1.4 and ±0.57 of 19.0
    assert lines[-2][-1] == ["not tested (not compared)"]
    assert "does it change the base? 6, is it better than LoRA? 1" in table.caption
    few = [one.model_copy(update={"p": None, "test": "none (too few documents)"}) for one in results.comparisons]
    assert difference_table(results.model_copy(update={"comparisons": few})).caption == "Method minus reference."

    # filters know questions, measures, tasks and verdicts
    assert table.rows[-1].keys == {
        "question": ("is it better than LoRA?",),
        "task": ("tinyworld_text",),
        "verdicts": ("better",),
        "measure": ("word perplexity",),
    }
    assert [choice.values for choice in table.filters][:2] == [
        ("does it change the base?", "is it better than LoRA?"),
        ("acc", "acc norm", "word perplexity"),
    ]


def test_measures_that_decide_nothing_have_no_verdict_and_are_on_the_page_alone(build, raw, compared):
    raw["comparisons"].append(compared(SKIP, "tinyworld_cloze", -0.2, 0.01, "better", metric="bits_per_byte"))
    table = difference_table(build(raw))
    others = [[str(cell) for cell in row.cells] for row in table.rows if row.page_only]
    assert [row[0] for row in others] == [f"{SKIP}\nbaseline", "lora\nbaseline"]
    assert others[0][1:] == ["tinyworld_cloze\nacc", "+5.0 [2.0, 8.0] points", "–", "–", "no verdict"]
    assert str(table.rows[0].cells[1]).endswith("bits per byte")
    assert "no verdict" not in markdown_table(table)


def test_seeds_have_scores_and_methods_match_survival_and_time(results):
    assert [row.cells for row in seed_table(results).rows][:2] == [
        (SKIP, "0", "44.0 %", "52.0 %", "17.50"),
        (SKIP, "1", "46.0 %", "51.0 %", "17.70"),
    ]
    base, skip, lora = (row.cells for row in method_table(results).rows)
    assert base[1] == "nothing: the frozen base"
    assert skip[1] == "pre_projection(content_skip=True)"
    assert lora[2] == "pre_projection_skip: rank 40, 80,000 asked (+2.4 %)"  # no method has a form
    assert skip[4:] == ("99.0 %", "2.5000")


def test_the_csv_has_every_number_once_and_says_which_run(results):
    text = results_csv({"": results})
    assert text.splitlines()[0].startswith("method,seed,task,metric,value,stderr,n,trainable,other,")
    rows = {(r["method"], r["seed"], r["task"], r["metric"]): r for r in read_csv(text) if r["value"]}
    assert len(rows) == 3 * 2 * 4  # methods, seeds, and two metrics of one of three tasks
    pairs = [row for row in read_csv(text) if not row["value"]]
    assert len(pairs) == 9  # three pairs on three tasks
    assert not any(row["seed"] for row in pairs)
    assert not any(row["outcome"] for row in rows.values())
    row = rows[SKIP, "1", "tinyworld_cloze", "acc"]
    assert (row["value"], row["stderr"], row["n"], row["trainable"]) == ("0.46", "0.02", "400", "80000")
    assert rows["lora", "0", "tinyworld_text", "bits_per_byte"]["stderr"] == ""
    directions = {(row["task"], row["metric"]): row["higher_is_better"] for row in read_csv(text)}
    assert directions == {
        **{("tinyworld_cloze", "acc"): "True", ("tinyworld_endings", "acc_norm"): "True"},
        **{("tinyworld_text", "word_perplexity"): "False", ("tinyworld_text", "bits_per_byte"): "False"},
    }
    both = results_csv({"a": results, "b": results})
    assert both.startswith("run,method,seed,")
    assert {row["run"] for row in read_csv(both)} == {"a", "b"}


def test_the_groups_of_documents_are_in_the_table(build, raw):
    clusters = {"clusters": {"column": "x", "groups": 9}}
    for one in (raw["tasks"]["tinyworld_cloze"], *raw["comparisons"][:4:3]):  # of both methods
        one |= clusters
    rows = [row for row in read_csv(results_csv({"": build(raw)})) if row["value"] or row["p"]]
    assert {row["other"] for row in rows} == {"", "baseline", "lora"}
    for row in rows:
        assert (row["groups"], row["grouped_by"]) == (("9", "x") if row["task"] == "tinyworld_cloze" else ("", ""))
