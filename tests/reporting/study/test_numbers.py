"""The numbers of a study's answer, tables and cautions, against the study that they were made from."""

import re
from statistics import fmean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reporting.study_example import (
    HIGH,
    LINEAR,
    LOW,
    NONLINEAR,
    improvement,
    read,
    row,
    runs_of,
    study,
    with_one_seed,
    without_sweep,
)
from scipy import stats

from hfpatch.reporting.study.answer import cautions, findings, headline, missing, share_words
from hfpatch.reporting.study.document import study_document
from hfpatch.reporting.study.tables import (
    diagnostics_table,
    main_table,
    series_of,
    spread_of,
    sweep_table,
    terminal_table,
    variant_table,
)

HALF = 0.1 / 3**0.5 * stats.t.ppf(1 - 0.025 / 3, 2)  # per cent, of three intervals together
TOGETHER = f"2.00 % [{2 - HALF:.2f}, {2 + HALF:.2f}]"


def cells(table, heading):
    place = headings(table).index(heading)
    return {row.cells[0]: str(row.cells[place]) for row in table.rows}


def headings(table):
    return [column.name for column in table.columns]


def texts(row):
    return tuple(map(str, row.cells))


def protocol(found):
    section = next(section for section in study_document(found).parts[0].sections if section.name == "protocol")
    return dict(section.blocks[0].items)


def test_the_headline_counts_verdicts_and_findings_give_both_losses_and_both_p(found):
    told = headline(found)
    better, worse, without = re.match(r"Of 3 variants .*?: (.*), (1 is worse.*) and (1 is .*?)\.", told).groups()
    assert all(part in better for part in ("1 is better", "nonlinear", TOGETHER, "0.02 % more parameters"))
    assert all(part in worse for part in ("wide", TOGETHER, "12.50 % more parameters"))
    assert "identity" in without
    assert "3 seeds are few" in told
    assert "not complete" not in told
    assert "few" not in headline(read(without_sweep() | {"seeds": [0, 1, 2, 3, 4]}))
    first, second, third = findings(found)
    assert (first.tone, second.tone, third.tone) == ("better", "undecided", "worse")
    p = improvement(LINEAR, NONLINEAR)["p"]
    numbers = (TOGETHER, "4.0179", "4.1000", "0.02 % more", f"p = {p:.4f}", f"{3 * p:.4f}")
    assert all(number in str(first) for number in numbers)
    assert all(number in str(second) for number in ("−0.1 [−5.2, 5.0] %", "10.00 % fewer"))


def test_one_seed_is_neither_better_nor_worse():
    found = read(with_one_seed())
    assert {finding.tone for finding in findings(found)} == {"not tested"}
    assert "2 are lower in loss, untested" in headline(found)
    table = main_table(found)
    assert cells(table, "improvement, %")["nonlinear"] == "+1.90"
    untested = dict.fromkeys(("nonlinear", "identity", "wide"), "not tested (one seed)")
    assert cells(table, "verdict") == {"linear": "baseline", **untested}
    assert cells(table, "validation loss")["linear"] == "4.0000"
    assert cells(table, "p")["wide"] == "–"


def test_what_the_correction_takes_away_is_no_difference_shown():
    raw = without_sweep()
    raw["rows"][1]["improvement"] |= {"p": 0.03}
    found = read(raw)
    assert cells(main_table(found), "verdict")["nonlinear"] == "not decided"  # 0.03 * 2 after wide's
    assert cells(main_table(found), "p (Holm)")["nonlinear"] == "0.060"
    assert found.verdict("nonlinear").corrected_low < 0


@settings(max_examples=40, deadline=None)
@given(mean=st.floats(-0.5, 0.5).filter(bool), p=st.none() | st.floats(0, 1))
def test_no_verdict_without_a_small_p(mean, p):
    raw = without_sweep()
    raw["rows"][1]["improvement"] = {"mean": mean, "low": mean - 1, "high": mean + 1, "p": p}
    found = read(raw).verdict("nonlinear")
    if p is None:
        assert found.outcome == "not tested"
    elif found.p_corrected >= 0.05:
        assert found.outcome == "not decided"
    else:
        assert found.outcome == ("better" if mean > 0 else "worse")
    assert (found.corrected_low > 0 or found.corrected_high < 0) == found.is_found


def test_the_main_table_is_that_of_the_paper(found):
    table = main_table(found)
    assert headings(table) == [
        *("configuration", "query", "best point", "parameters", "to baseline", "validation loss", "improvement, %"),
        *("corrected", "verdict", "p", "p (Holm)", "s/step"),
    ]
    mean, sd = fmean(NONLINEAR.values()), stdev(NONLINEAR.values())
    assert texts(table.rows[0]) == (
        *("linear", "Q = x W_Q", "lr 0.001", "1,000,000", "–", "4.1000 ± 0.1000", "–", "–", "baseline"),
        *("–", "–", "0.5"),
    )
    assert texts(table.rows[1]) == (
        *("nonlinear", "Q = (x + f(x))/2, f = LN(GELU(RMSNorm(x) W_1) W_2)", "lr 0.001", "1,000,200", "+0.02 %"),
        *(f"{mean:.4f} ± {sd:.4f}", "+2.00 [1.75, 2.25]", TOGETHER.removeprefix("2.00 % "), "better"),
        *("0.0008", "0.0025", "0.55 (×1.10)"),
    )
    shares = {"linear": "–", "nonlinear": "+0.02 %", "identity": "−10.00 %", "wide": "+12.50 %"}
    assert cells(table, "to baseline") == shares
    assert cells(table, "best point")["identity"] == "lr 0.002"
    assert [row.cells[0] for row in table.rows] == ["linear", "nonlinear", "identity", "wide"]


def test_a_narrow_terminal_shows_loss_improvement_and_verdict(found):
    table = terminal_table(found)
    assert headings(table) == [name for name in headings(main_table(found)) if name != "query"]
    assert headings(table.narrow[0]) == ["configuration", "validation loss", "improvement, %", "verdict"]
    assert texts(table.narrow[0].rows[1])[2:] == ("+2.00 [1.75, 2.25]", "better")
    assert [row.cells[-1].tone for row in table.narrow[0].rows[1:]] == ["better", "undecided", "worse"]


def test_the_interval_is_students_over_the_seeds(found):
    """t of 0.975 with 2 degrees of freedom is 4.302653; the shares are 1.9, 2.0 and 2.1 %."""
    half = 4.302653 * 0.1 / 3**0.5
    told = found.chosen["nonlinear"].improvement
    assert 100 * told.low == pytest.approx(2.0 - half, abs=1e-6)
    assert 100 * told.high == pytest.approx(2.0 + half, abs=1e-6)
    shares = [100 * value for value in found.seed_values(found.chosen["nonlinear"]).values()]
    assert shares == pytest.approx([1.9, 2.0, 2.1])


def test_the_sweep_table_has_every_point(found):
    table = sweep_table(found)
    points = [(name, lr) for name in ("linear", "nonlinear", "identity", "wide") for lr in ("0.001", "0.002")]
    assert [row.cells[:2] for row in table.rows] == points
    states = [row.cells[-1] for row in table.rows]
    assert states == [
        *("best", "complete", "best", "diverged at step 340 (seed 2)", "complete", "best", "best"),
        "diverged at step 40 (seed 2), 120 (seed 0) and 120 (seed 1)",
    ]
    assert [row.strong for row in table.rows] == [state == "best" for state in states]
    assert table.rows[3].cells[2:4] == ("4.0000 ± 0.0000", "2")
    assert table.rows[7].cells[2:] == ("–", "0", "–", "–", states[7])


def test_missing_seeds_are_named_and_the_lowest_so_far_is_shown():
    raw = study()
    for each in raw["rows"][2:4]:
        each["best"] = False
    raw["rows"][2] |= {"missing": [1, 2], "loss": {"mean": 3.924, "sd": None, "values": {"0": 3.924}}}
    raw["rows"][2]["improvement"] = improvement({0: 4.0}, {0: 3.924})
    found = read(raw | {"complete": False})
    assert found.chosen["nonlinear"].point == HIGH  # two seeds of three, against one
    assert "nonlinear, lr 0.001: seeds 1 and 2 have not run yet." in missing(found)
    assert cells(main_table(found), "best point")["nonlinear"] == "lr 0.002 (seeds diverged)"
    assert "it diverged at step 340 (seed 2)" in str(findings(found)[0])
    assert headline(found).endswith("The study is not complete.")


def test_a_variant_that_diverged_is_a_result():
    raw = without_sweep()
    raw["rows"][3] = row("wide", {}, {}, diverged={0: 120, 1: 120, 2: 40}, seconds=None)
    found = read(raw | {"runs": runs_of(raw["rows"])})
    last, told = findings(found)[-1], "diverged at step 40 (seed 2), 120 (seed 0) and 120 (seed 1)"
    assert (last.tone, told in str(last)) == ("not tested", True)
    assert cells(main_table(found), "verdict")["wide"] == told


def test_a_baseline_without_a_loss_leaves_nothing_to_compare():
    raw = without_sweep()
    raw["rows"][0] = row("linear", {}, {}, diverged={0: 80, 1: 80, 2: 80})
    for each in raw["rows"][1:]:
        each.update(improvement=None, improvement_by_step=[])
    raw["runs"] = runs_of(raw["rows"])
    found = read(raw)
    assert "3 are not compared (nonlinear, identity and wide)" in headline(found)
    assert "linear has no best point" in str(findings(found)[0])
    assert found.seed_values(found.chosen["nonlinear"]) == {}
    raw = study() | {"complete": False, "evaluation_data": None}  # as in a sweep whose seeds are not all through
    for each in raw["rows"]:
        values = {0: 4.0}
        each.update(best=False, loss={"mean": 4.0, "sd": None, "values": values}, improvement=None, diverged={})
        each.update(missing=[1, 2], improvement_by_step=[])
    found = read(raw)
    assert "3 are not compared (nonlinear, identity and wide)" in headline(found)
    assert cells(main_table(found), "best point")["nonlinear"] == "lr 0.001 (so far)"
    assert "Evaluation data" not in protocol(found)


def test_a_variant_that_diverged_everywhere_has_no_best_point():
    raw = study()
    raw["rows"][6] = row("wide", LOW, {}, diverged={0: 50, 1: 50, 2: 50})
    found = read(raw)
    assert any(caution.startswith("wide: a seed diverged at every point") for caution in cautions(found))
    assert cells(main_table(found), "best point")["wide"] == "lr 0.001 (seeds diverged)"
    assert missing(found) == []


def test_cautions_name_what_weakens_the_study(found):
    told = " ".join(cautions(found))
    assert "2 degrees of freedom" in told
    assert "wide has 12.50 % more parameters than linear (non-embedding 1,125,000)" in told
    assert "nonlinear has" not in told  # 0.02 % is matched
    assert re.search(r"identity: the best point .*, lr 0.002 \(the largest", told)
    assert "weight_decay 0.03125" in told


def test_edges_are_those_of_what_a_variant_was_tried_at():
    raw = study()
    raw["rows"].insert(6, row("identity", {"training.lr": 0.004}, {}, diverged={0: 9, 1: 9, 2: 9}, seconds=None))
    assert "identity: the best point" not in " ".join(cautions(read(raw)))  # a larger one was tried, and diverged
    raw["rows"][6] |= {"diverged": {}, "missing": [0, 1, 2]}
    assert "identity: the best point" in " ".join(cautions(read(raw)))  # it has not run yet
    raw["rows"] = [each for each in raw["rows"] if each["variant"] != "identity" or each["best"]]
    assert "identity: the best point" not in " ".join(cautions(read(raw)))  # of one there is no edge


@pytest.mark.parametrize("sweep", [{}, {"training.lr": [0.001, 0.002]}])
def test_what_was_tried_counts_whatever_section_of_the_recipe_asked_for_it(sweep):
    """The baseline alone has one point, as where each other variant has a sweep of its own."""
    raw = study() | {"sweep": sweep}
    del raw["rows"][1]
    raw["rows"][1]["improvement"]["choices"] = 2
    found = read(raw)
    points = "(linear 1, nonlinear 2, identity 2, wide 2)"
    told = cautions(found)
    assert any(points in sentence for sentence in told)
    assert any(sentence.startswith("wide: the best point is at the edge of the sweep") for sentence in told)
    assert points in headline(found)
    assert "corrected 2-fold" in str(findings(found)[0])
    assert "(corrected, as p is," in main_table(found).caption
    assert "(corrected" not in main_table(read(study())).caption
    assert protocol(found)["Sweep"] == "linear: lr 0.001; nonlinear, identity, wide: lr 0.001, 0.002"
    assert ("Points a variant", "1 and 2") in study_document(found).glance
    raw = study()  # what has not run was not tried
    raw["rows"][-1] |= {"diverged": {}, "missing": [0, 1, 2]}
    assert "(linear 2, nonlinear 2, identity 2, wide 1)" in " ".join(cautions(read(raw)))


def test_diagnostics_are_the_mean_and_the_spread_is_the_standard_deviation_over_whole_runs(found):
    (series,) = series_of(found)
    assert (series.variant, series.target, series.seeds) == ("nonlinear", "query", 3)
    assert series.layers[1] == [(step, pytest.approx(1.6), -0.25) for step in (100, 200, 300, 400)]
    assert [row.cells for row in diagnostics_table(found).rows] == [
        ("nonlinear", "query", "0", "400", "1.500", "−0.250", "3"),
        ("nonlinear", "query", "1", "400", "1.600", "−0.250", "3"),
    ]
    sd = pytest.approx(stdev(LINEAR.values()))
    assert spread_of(found, found.chosen["linear"]) == [(step, sd) for step in (100, 200, 300, 400)]
    one = read(with_one_seed())
    assert spread_of(one, one.chosen["linear"]) == []
    raw = study()  # a seed that diverged is in no mean by step
    raw["rows"][2]["best"], raw["rows"][3]["best"] = False, True
    found = read(raw)
    (series,) = series_of(found)
    assert series.seeds == 2
    assert series.layers[0][-1][:2] == (400, pytest.approx(1.0))  # seeds 0 and 1


def test_facts_name_data_tokens_tokenizer_and_plans_and_architectures_once_where_they_agree(found):
    facts, table = protocol(found), variant_table(found)
    assert facts["Architecture, common to all"] == "model_type gpt2, n_layer 2"
    assert cells(table, "architecture")["identity"] == "query {path identity}"
    assert cells(table, "own training settings")["wide"] == "weight_decay 0.03125"
    assert cells(table, "parameters in all")["wide"] == "1,625,000"
    assert facts["Tokens a run"] == "819,200"
    assert facts["Tokenizer"] == f"4,096 tokens, SHA-256 {'d' * 16}…"
    assert facts["Batch plan, seed 2"] == f"SHA-256 {'2' * 16}…"
    assert facts["Evaluation data"].startswith("local/held, 2 documents, 40 blocks, 5,120 tokens")
    assert facts["Sweep"] == "lr 0.001, 0.002"
    assert dict(study_document(found).glance).items() >= {"Points a variant": "2", "Wall time": "1 h 20 min"}.items()
    assert [share_words(share).split(" more")[0] for share in (0.0, 0.125)] == ["as many parameters", "12.50 %"]
    chosen = {"linear": LOW, "nonlinear": LOW, "identity": HIGH, "wide": LOW}
    assert {name: row.point for name, row in found.chosen.items()} == chosen
