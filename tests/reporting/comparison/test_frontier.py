"""The figure and the table of a comparison with budgets: their numbers are those of the results."""

import pytest
from budgets_example import BUDGETS, EXCHANGES, GAINS, frontier_example
from reporting.conftest import document_of, read_csv, rows_of

from hfpatch.reporting import document as doc
from hfpatch.reporting.comparison.frontier import against_reference, budget_table, frontier_figure
from hfpatch.reporting.html import html
from hfpatch.reporting.markdown import markdown, markdown_table
from hfpatch.reporting.theme import INK
from hfpatch.results.comparison import ComparisonResults


def test_the_figure_has_a_line_a_method_and_the_lora_in_black():
    (ax,) = frontier_figure(frontier_example()).axes
    lines = [line for line in ax.lines if line.get_transform() == ax.transData]
    drawn = {tuple(map(tuple, line.get_xydata().round(6).tolist())): line for line in lines}
    for gains in GAINS.values():
        assert tuple(zip(BUDGETS.values(), gains, strict=True)) in drawn
    assert ((500, 0.15),) in drawn
    assert drawn[tuple(zip(BUDGETS.values(), GAINS["lora"], strict=True))].get_color() == INK
    assert ax.get_xscale() == "log"
    assert [label.get_text() for label in ax.get_xticklabels()] == list(BUDGETS)
    bands = [band.get_paths()[0].vertices[:, 1] for band in ax.collections]
    assert any(min(band) == pytest.approx(0.04) and max(band) == pytest.approx(0.36) for band in bands)  # of lora


def table_of(results):
    return budget_table(results, results.frontier)


def primary(*families):
    """The question whether methods are better than the LoRA of their budget."""
    pairs = [[f"{family}@{budget}", f"lora@{budget}"] for family in families for budget in BUDGETS]
    return {"questions": [{"question": "gain", "pairs": pairs, "on": ["held_out_text"]}]}


def test_the_table_has_each_gain_and_rate_and_the_tones_of_their_verdicts():
    table = table_of(frontier_example())
    assert [column.name for column in table.columns] == ["method", *BUDGETS, "its one size", "for equal gain"]
    rows = rows_of(table)
    assert rows["ahead"] == ["+0.20†", "+0.30†", "+0.40†", "–", "0.1 [0.05, 0.2]"]
    assert rows["lora"][-1] == "1"
    assert rows["turning"][-1] == "cannot be told (they reach no common gain)"
    assert rows["alone"] == ["–", "–", "–", "+0.15 (500)", "3.1 [2.2, 123]"]
    tones = {str(row.cells[0]): [getattr(cell, "tone", None) for cell in row.cells[1:4]] for row in table.rows}
    assert tones["turning"] == ["better", "undecided", "worse"]
    assert tones["lora"] == [None] * 3
    assert "| turning | ● +0.20† | ○ +0.20† | ◆ +0.20† |" in markdown_table(table)
    assert "● better, ◆ worse, ○ undecided." in table.caption


def test_the_bounds_of_a_rate_are_shown_with_why_there_is_no_rate():
    raw = frontier_example().to_json()
    (turning,) = [line for line in raw["frontier"]["lines"] if line["method"] == "turning"]
    turning["exchange"]["more_than"] = 26.0
    assert (
        rows_of(table_of(ComparisonResults.model_validate(raw)))["turning"][-1]
        == "more than 26 (they reach no common gain)"
    )


def test_what_no_primary_question_asks_is_called_exploratory():
    table = table_of(frontier_example(**primary("behind")))
    marked = {name: [cell.endswith("†") for cell in cells[:3]] for name, cells in rows_of(table).items()}
    assert [name for name, marks in marked.items() if all(marks)] == ["ahead", "turning"]
    assert not any(marked["behind"])
    assert "†: exploratory." in table.explained


def test_the_frontier_follows_the_answer_and_its_data_are_complete():
    made = document_of(frontier_example())
    figures = made.parts[0].figures
    assert list(figures)[:2] == ["differences", "frontier"]
    rows = read_csv(figures["frontier"].data)
    assert len(rows) == 3 * len(GAINS) + 1
    ahead = next(row for row in rows if row["point"] == "ahead@10k")
    measured = [ahead[key] for key in ("trainable", "task", "metric", "unit")]
    assert measured == ["10000", "held_out_text", "nats_per_token", "nats per token"]
    assert float(ahead["rate_high"]) == EXCHANGES["ahead"]["high"]
    text = markdown(made)
    assert text.index("for equal gain") < text.index("## Cautions") < text.index("figures/frontier.svg")
    assert 'aria-label="Gain against parameters"' in html(made)
    assert any(isinstance(block, doc.Table) and block.name == "budgets" for block in made.summary)


@pytest.mark.parametrize(
    ("metric", "higher", "factor"),
    [("nats_per_token", False, 1.0), ("acc", True, 100.0), ("word_perplexity", False, 50.0)],  # the base has 2
)
def test_the_data_are_the_points_of_the_figure_in_its_unit(metric, higher, factor):
    raw = frontier_example().to_json()
    raw["tasks"]["held_out_text"] |= {"primary": metric, "higher_is_better": higher}
    raw["frontier"]["metric"] = metric
    for one in raw["comparisons"]:
        if higher:
            one |= {"difference": -one["difference"], "low": -one["high"], "high": -one["low"]}
        one["metric"] = metric
    for method in raw["methods"].values():
        method["runs"]["0"]["evaluation"]["held_out_text"]["metrics"] = {metric: 2.0}
    results = ComparisonResults.model_validate(raw)
    (ax,) = frontier_figure(results).axes
    drawn = {point for line in ax.lines[:-1] for point in map(tuple, line.get_xydata().tolist())}  # the last is 0
    rows = read_csv(document_of(results).parts[0].figures["frontier"].data)
    assert {(float(row["trainable"]), round(float(row["gain"]), 6)) for row in rows} == {
        (size, round(gain, 6)) for size, gain in drawn
    }
    ahead = next(row for row in rows if row["point"] == "ahead@10k")
    ends = [float(ahead[key]) for key in ("gain", "gain_low", "gain_high", "lowest_gain", "highest_gain")]
    assert ends == pytest.approx([factor * gain for gain in (0.3, 0.24, 0.36, 0.2, 0.3)])


def test_a_comparison_without_budgets_has_none(results):
    assert frontier_figure(results) is None


def line_of(results, method):
    return next(line for line in results.frontier.lines if line.method == method)


def test_only_budgets_that_were_tested_have_a_tone():
    results = frontier_example()
    gone, untested = results.verdict("ahead@10k", "held_out_text", "lora@10k"), {"outcome": "not tested", "why": "gone"}
    alone = gone.model_copy(update={"method": "alone", "outcome": "worse"})
    joined = [one.model_copy(update=untested) if one == gone else one for one in results.verdicts]
    table = table_of(results.model_copy(update={"joined": [*joined, alone]}))
    tones = {str(row.cells[0]): [getattr(cell, "tone", None) for cell in row.cells[1:5]] for row in table.rows}
    assert tones["ahead"] == ["better", None, "better", None]
    assert tones["alone"] == [None, None, None, "worse"]


@pytest.mark.parametrize("tried", [["10k"], ["1k", "10k", "100k"], []])
def test_the_budgets_at_which_only_the_rates_tried_decide_are_marked(tried):
    results = frontier_example(**primary("ahead"))
    joined = [
        one.model_copy(update={"at_rates_tried": one.method in [f"ahead@{budget}" for budget in tried] or None})
        for one in results.verdicts
    ]
    table = table_of(results.model_copy(update={"joined": joined}))
    assert [cell.endswith("‡") for cell in rows_of(table)["ahead"][:3]] == [name in tried for name in BUDGETS]
    assert table.explained.endswith("‡: at the rates tried.") == bool(tried)


def test_each_budget_has_the_verdict_against_the_lora_of_its_own():
    results = frontier_example()
    tested = against_reference(results, results.frontier, line_of(results, "ahead"))
    assert {point: verdict.other for point, verdict in tested.items()} == {
        f"ahead@{budget}": f"lora@{budget}" for budget in ("1k", "10k", "100k")
    }
    assert {verdict.family for verdict in tested.values()} == {3 * (len(GAINS) - 1)}  # all budgets of all methods
    alone = results.model_copy(update={"frontier": results.frontier.model_copy(update={"reference": None})})
    assert against_reference(alone, alone.frontier, line_of(alone, "ahead")) == {}


def test_some_methods_and_labels():
    results = frontier_example()
    some = results.only(["ahead@1k", "lora@1k", "lora@10k"])
    assert {line.method: line.points for line in some.frontier.lines} == {
        "lora": ["lora@1k", "lora@10k"],
        "ahead": ["ahead@1k"],
    }
    methods = {
        name: method.model_copy(update={"label": name.replace("lora", "LoRA")})
        for name, method in results.methods.items()
    }
    labelled = results.model_copy(update={"methods": methods}).labelled()
    assert labelled.frontier.reference == "LoRA"
    assert table_of(labelled).columns[-1].notes == ("× LoRA",)
