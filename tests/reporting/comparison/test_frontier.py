"""The figure, the sentences and the table of a comparison with budgets: their numbers are those of the results."""

import pytest
from budgets_example import BUDGETS, EXCHANGES, GAINS, frontier_example
from reporting.conftest import document_of, read_csv

from hfpatch.reporting import document as doc
from hfpatch.reporting.comparison.frontier import budget_table, frontier_blocks, frontier_figure
from hfpatch.reporting.html import html
from hfpatch.reporting.markdown import markdown
from hfpatch.reporting.theme import INK


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


def test_the_table_has_each_gain_and_rate_and_findings_the_tones_of_their_verdicts():
    results = frontier_example()
    findings, *_ = frontier_blocks(results)
    table = budget_table(results)
    tones = {each.subject: each.tone for each in findings.items}
    assert tones == {"ahead": "better", "behind": "worse", "turning": "mixed", "alone": "not tested"}
    assert [column.name for column in table.columns] == ["method", *BUDGETS, "its one size", "for equal gain"]
    rows = {str(row.cells[0]): [*map(str, row.cells[1:])] for row in table.rows}
    assert rows["ahead"] == ["+0.20", "+0.30", "+0.40", "–", "0.1 [0.05, 0.2]"]
    assert rows["lora"][-1] == "1"
    assert rows["turning"][-1] == "cannot be told"
    assert rows["alone"] == ["–", "–", "–", "+0.15 (500)", "3.1 [2.2, 123]"]
    tones = {str(row.cells[0]): [getattr(cell, "tone", None) for cell in row.cells[1:4]] for row in table.rows}
    assert tones["turning"] == ["better", "undecided", "worse"]
    assert tones["lora"] == [None] * 3


def test_the_frontier_follows_the_answer_and_its_data_are_complete():
    made = document_of(frontier_example())
    figures = made.parts[0].figures
    assert list(figures)[:2] == ["differences", "frontier"]
    rows = read_csv(figures["frontier"].data)
    assert len(rows) == 3 * len(GAINS) + 1
    ahead = next(row for row in rows if row["point"] == "ahead@10k")
    assert (ahead["parameters"], float(ahead["gain"])) == ("10000", pytest.approx(0.3))
    assert (float(ahead["low"]), float(ahead["high"])) == pytest.approx((0.24, 0.36))
    assert float(ahead["rate_high"]) == EXCHANGES["ahead"]["high"]
    text = markdown(made)
    assert text.index("for equal gain") < text.index("## Cautions") < text.index("figures/frontier.svg")
    assert 'aria-label="Gain against parameters"' in html(made)
    assert any(isinstance(block, doc.Table) and block.name == "budgets" for block in made.summary)


def test_a_comparison_without_budgets_has_none(results):
    assert frontier_figure(results) is None
    assert [*frontier_blocks(results)] == []
