"""A study of models from scratch is reported as a comparison, with the figures of what it has beside one."""

import math
import re

import pytest
from reporting.conftest import data_of, document_of, rows_of, write_run
from reporting.study_example import LOSSES, SIZES, STEPS, TEXT, curve, difference, study

from hfpatch.reporting import write_report
from hfpatch.reporting.comparison.answer import headline_table, lead, sentences
from hfpatch.reporting.comparison.figures import draw, training
from hfpatch.reporting.comparison.forest import forest_of
from hfpatch.reporting.comparison.study import diagnostics
from hfpatch.reporting.comparison.tables import method_table, score_table
from hfpatch.reporting.document import Table
from hfpatch.reporting.markdown import markdown
from hfpatch.results.cautions import rates_sentence
from hfpatch.results.comparison import ComparisonResults

pytestmark = pytest.mark.usefixtures("style")


@pytest.fixture
def results():
    return ComparisonResults.model_validate(study())


def test_the_first_screen_has_gains_outcomes_against_the_baseline_and_sizes_without_embeddings(results):
    assert lead(results) == "On held-out text (nats per token), nonlinear beats linear at the rates tried."
    assert [finding.tone for finding in sentences(results).items] == ["better", "worse"]
    table = headline_table(results)
    assert [column.name for column in table.columns] == ["variant", "gain", "against linear", "params", "size"]
    rows = rows_of(table)
    assert (rows["nonlinear"][0], rows["identity"][0]) == ("+0.100", "−0.100")
    assert rows["nonlinear"][1].startswith("better by 0.100")
    assert rows["identity"][2:] == ["900k", f"{SIZES['identity'] / SIZES['linear']:.2f} ×"]
    assert rows_of(score_table(results)) == {name: [f"{sum(losses) / 3:.3f}"] for name, losses in LOSSES.items()}
    assert [(row.name, row.gain.difference) for row in forest_of(results).rows] == [
        ("nonlinear", pytest.approx(0.1)),
        ("identity", pytest.approx(-0.1)),
    ]


def test_its_figures_are_improvement_and_what_f_does_by_step(results):
    assert list(draw(results)) == ["tuning", "differences", "training", "diagnostics"]
    panel = training(results).axes[1]
    base, ours = (curve(LOSSES[name])["held_out"] for name in ("linear", "nonlinear"))
    expected = [[step, 100 * (1 - ours[str(step)] / base[str(step)])] for step in STEPS]
    lines = [line.get_xydata().tolist() for line in panel.lines]
    assert any(line == [pytest.approx(point) for point in expected] for line in lines if len(line) == len(expected))
    raw = study()
    raw["methods"]["nonlinear"]["curve"]["held_out"]["200"] -= 0.3  # a gain that is lost again
    panel = training(ComparisonResults.model_validate(raw)).axes[1]
    assert max(value for line in panel.lines for _, value in line.get_xydata()) < panel.get_ylim()[1]
    size, angle = diagnostics(results).axes
    assert [line.get_ydata().tolist() for line in size.lines] == [[0.5] * 4, [1.5] * 4]
    assert angle.lines[0].get_ydata().tolist() == pytest.approx([math.degrees(math.acos(-0.5))] * 4)  # 120°
    many = {f"a variant with a name {i:03d}": results.methods["nonlinear"] for i in range(14)}
    shown = [ax for ax in diagnostics(results.model_copy(update={"methods": many})).axes if ax.get_visible()]
    assert [ax.get_title(loc="left") for ax in shown] == [name for name in many for _ in range(2)]
    rows = data_of(results, "diagnostics")
    assert [(row["method"], row["step"], row["layer"]) for row in rows[:2]] == [
        ("nonlinear", "100", "0"), ("nonlinear", "100", "1"),
    ]  # fmt: skip


def test_the_document_has_its_sections_and_what_is_missing_is_named(results):
    (part,) = document_of(results).parts
    names = [section.name for section in part.sections]
    assert names == ["answer", "cautions", "training", "tuning", "diagnostics", "paired", "results", "protocol"]
    assert rows_of(method_table(results))["identity"] == ["Q = x", "query {path identity}", "1,400,000"]
    raw = study()
    del raw["methods"]["identity"]["runs"]["2"], raw["methods"]["identity"]["runs"]["1"]["evaluation"][TEXT]
    absent = str(document_of(ComparisonResults.model_validate(raw)))
    assert "identity: no finished run with seed 2." in absent
    assert f"identity, seed 1: no result on {TEXT}." in absent


def one_variant():
    raw = study()
    raw["methods"] = {"linear": raw["methods"]["linear"]}
    return raw | {"questions": [], "comparisons": [], "tuning": None, "margin": {}}


def test_a_study_of_one_variant_speaks_of_nothing_that_it_does_not_have(tmp_path):
    raw = one_variant()
    document = document_of(ComparisonResults.model_validate(raw))
    assert "the share of" not in document.parts[0].figures["training"].caption
    assert "paired differences" not in score_table(ComparisonResults.model_validate(raw)).caption
    tables = write_report(write_run(tmp_path, raw, curves=False)).tex.read_text()
    assert re.findall(r"label\{(.*)\}", tables) == ["tab:main"]  # an empty table is none


@pytest.mark.parametrize("held_out", [{"documents": 60}, None])
def test_that_no_task_has_a_result_is_said_where_text_is_held_out(held_out):
    raw = one_variant()
    raw["tasks"], raw["data"]["held_out"] = {}, held_out
    assert ("No task has a result." in str(document_of(ComparisonResults.model_validate(raw)))) == bool(held_out)


def test_a_study_whose_loss_was_measured_on_no_text_speaks_of_none():
    raw = study() | {"tasks": {}, "comparisons": [], "questions": [], "margin": {}, "tuning": None}
    del raw["data"]["held_out"]
    for method in raw["methods"].values():
        method["curve"]["held_out"], method["variant"]["diagnostics"] = {}, []
        for run in method["runs"].values():
            run["evaluation"] = {}
    document = document_of(ComparisonResults.model_validate(raw))
    caption = document.parts[0].figures["training"].caption
    assert "the same minus that of one method" in caption
    assert "share of the baseline" not in caption
    tables = [block for section in document.parts[0].sections for block in section.blocks if isinstance(block, Table)]
    assert [table.name for table in tables] == ["headline", "methods"]  # none of names alone
    assert "Gains" not in markdown(document)


def test_seeds_that_no_look_asked_for_are_not_missing_and_means_over_other_seeds_say_so():
    raw = study()
    raw["training"]["seeds"] = {"looks": [2, 3]}
    raw["looks"] = [
        {"seeds": 2, "part": 0.4, "comparisons": raw["comparisons"], "growing": ["identity"]},
        {"seeds": 3, "part": 0.6, "comparisons": raw["comparisons"], "growing": []},
    ]
    for name in ("linear", "nonlinear"):
        del raw["methods"][name]["runs"]["2"]
    results = ComparisonResults.model_validate(raw)
    assert "no finished run" not in str(document_of(results))
    assert rows_of(score_table(results)) == {
        "linear": ["2", "4.050"], "nonlinear": ["2", "3.940"], "identity": ["3", "4.200"],
    }  # fmt: skip
    del raw["methods"]["linear"]["runs"]["1"]
    one_seed = rows_of(score_table(ComparisonResults.model_validate(raw)))["linear"]
    assert one_seed == ["1", f"{LOSSES['linear'][0]:.3f}"]
    del raw["methods"]["identity"]["runs"]["2"]
    assert "identity: no finished run with seed 2." in str(document_of(ComparisonResults.model_validate(raw)))


def test_a_study_speaks_of_variants(tmp_path):
    raw = study()
    raw["comparisons"] = [difference("nonlinear", 0.0), difference("identity", 0.0)]
    raw["complete"] = False
    report = markdown(document_of(ComparisonResults.model_validate(raw)))
    assert "no variant is shown to be better" in report
    assert "the same hfpatch pretrain with --resume" in report
    tables = write_report(write_run(tmp_path, raw, curves=False)).tex.read_text()
    for text in (report, tables):
        assert not re.search(r"\bmethods?\b|\bLoRA|\bthe base\b|\bfrozen\b", text, re.IGNORECASE)


def test_trials_are_those_of_the_variants_that_were_tuned(results):
    assert "Every variant had 4 trials" in markdown(document_of(results))
    raw = study()
    del raw["tuning"]["chosen"]["identity"]
    results = ComparisonResults.model_validate(raw)
    assert "Every tuned variant had 4 trials" in markdown(document_of(results))
    assert rates_sentence(results).startswith("Each tuned variant at its best of 2 rates")


def test_a_variant_that_diverged_has_no_loss(results):
    raw = study()
    for run in raw["methods"]["identity"]["runs"].values():
        run["train"]["diverged_step"] = 7
        run["evaluation"] = {}
    raw["comparisons"] = raw["comparisons"][:1]
    gain, outcome, *_ = rows_of(headline_table(ComparisonResults.model_validate(raw)))["identity"]
    assert gain == "–"
    assert outcome.startswith("diverged at step 7")
    assert "no result on" not in str(document_of(ComparisonResults.model_validate(raw)))
    for method in raw["methods"].values():
        for run in method["runs"].values():
            run["train"]["diverged_step"], run["evaluation"] = 7, {}
    alone = ComparisonResults.model_validate(raw | {"comparisons": [], "tasks": {}})
    assert [verdict.why for verdict in alone.verdicts] == ["nonlinear diverged", "identity diverged"]


def test_pairs_with_several_references_are_named(results):
    raw = study()
    raw["questions"][0]["pairs"][1] = ["identity", "nonlinear"]
    raw["comparisons"].append(difference("identity", 0.2) | {"reference": "nonlinear"})
    results = ComparisonResults.model_validate(raw)
    assert lead(results).startswith("On held-out text (nats per token), nonlinear beats linear at the rates tried.")
    table = headline_table(results)
    outcomes = {name: cells[1] for name, cells in rows_of(table).items()}
    assert table.columns[2].name == "against"
    assert outcomes["nonlinear"].startswith("linear: better by")
    assert outcomes["identity"].startswith("nonlinear: worse by")
    forest = forest_of(results)
    assert [row.name for row in forest.rows] == ["nonlinear", "identity − nonlinear"]
    assert forest.other == "linear, or what is named"
