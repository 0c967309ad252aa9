"""A base at floor or at chance, from its scores to what every report says of it."""

import io
import math

import pytest
from reporting.conftest import document_of, task_result
from rich.console import Console

from hfpatch.reporting import terminal
from hfpatch.reporting.comparison.answer import answer
from hfpatch.reporting.comparison.headline import headline
from hfpatch.reporting.comparison.tables import main_table, paired_table
from hfpatch.reporting.floor import floor_cautions, level_of
from hfpatch.reporting.html import html
from hfpatch.results import TaskResult

CLOZE, ENDINGS = "tinyworld_cloze", "tinyworld_endings"


def scored(value, n=400, *, chance=None, primary="acc", groups=None):
    known = {**task_result(CLOZE, value), "n": n, "primary": primary, "metrics": {primary: value}, "chance": chance}
    return TaskResult.model_validate(known | {"clusters": {"column": "x", "groups": groups} if groups else None})


@pytest.mark.parametrize(
    ("score", "level"),
    [
        (scored(0.0, 40), "at floor"),  # 0 of 40
        (scored(0.01), "at floor"),
        (scored(0.012), None),
        (scored(0.0, primary="mcc"), "at floor"),
        (scored(0.0, primary="bleu"), None),  # no share
        (scored(0.25, 100, chance=0.25), "at chance"),
        (scored(0.25 + 1.64 * math.sqrt(0.25 * 0.75 / 100), 100, chance=0.25), "at chance"),
        (scored(0.25 + 1.65 * math.sqrt(0.25 * 0.75 / 100), 100, chance=0.25), None),
        (scored(0.33, 400, chance=0.25), None),
        (scored(0.33, 400, chance=0.25, groups=50), "at chance"),  # 50 groups are as good as 50 documents
        (scored(0.2, 400, chance=0.25), "at chance"),
        (scored(0.25), None),  # what guessing gets is not known
        (None, None),
    ],
)
def test_a_level_is_that_of_the_score_and_of_guessing(score, level):
    assert level_of(score) == level


@pytest.fixture
def floored(build, raw, compared):
    """The example with a base that has 0 of 400 right on the first task; one method is better there, one is not."""
    for run in raw["methods"]["baseline"]["runs"].values():
        run["evaluation"][CLOZE] = task_result(CLOZE, 0.0, stderr=0.0)
    raw["comparisons"].insert(4, compared("pre_projection_skip", CLOZE, 0.0, 0.001, "within noise", reference="lora"))
    return build(raw)


def test_nothing_found_at_floor_is_greyed_and_not_within_noise(floored):
    rows = {row.cells[0]: row for row in main_table(floored).rows}
    cell = rows["lora"].cells[2]
    assert (cell.lines[-1], cell.tone) == ("at floor", "at floor")
    assert rows["pre_projection_skip"].cells[2].tone == "better"  # a difference is one wherever the base is
    assert rows["lora"].cells[3].tone == "within noise"
    assert main_table(floored).columns[2].notes[-1] == "base at floor"
    pairs = {(str(row.cells[0]).splitlines()[0], *row.keys["task"], *row.keys["reference"]): row
             for row in paired_table(floored).rows}  # fmt: skip
    assert [key for key, row in pairs.items() if row.faint] == [("lora", CLOZE, "baseline")]
    assert pairs["pre_projection_skip", CLOZE, "lora"].keys["verdicts"] == ("within noise",)  # LoRA is not at floor
    page = html(document_of(floored))
    assert page.count('<tr class="greyed"') == 1
    assert 'class="number greyed"' in page


def test_the_sentences_say_that_nothing_can_be_told(floored):
    said = {each.subject: each for each in answer(floored).against_baseline}
    assert f"on {CLOZE} (acc) baseline is at floor, so nothing can be told" in said["lora"].rest
    assert CLOZE not in said["lora"].rest.split("on tinyworld_cloze")[0]
    assert headline(floored).lines  # the verdicts can be counted


def test_it_is_a_warning_of_old_results_too(floored):
    (warning,) = floor_cautions(floored.methods["baseline"].runs[0].evaluation)
    assert warning.startswith(f"the base is at floor on {CLOZE} (acc: 0 % of 400 documents)")
    document = document_of(floored)
    assert warning not in floored.warnings
    assert warning in html(document).replace("&#39;", "'")
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(terminal, "Console", lambda: Console(file=out, width=200))
        terminal.print_document(document)
    assert "the base is at floor on" in out.getvalue()


def test_with_all_tasks_at_floor_there_is_no_verdict(build, raw):
    for task in (CLOZE, ENDINGS):
        raw["methods"]["baseline"]["runs"]["0"]["evaluation"][task] = task_result(task, 0.0)
        raw["methods"]["baseline"]["runs"]["1"]["evaluation"][task] = task_result(task, 0.0)
    for name in raw["methods"]:
        for run in raw["methods"][name]["runs"].values():
            del run["evaluation"]["tinyworld_text"]
    del raw["tasks"]["tinyworld_text"]
    raw["comparisons"] = [each for each in raw["comparisons"] if each["task"] in (CLOZE, ENDINGS)]
    for each in raw["comparisons"]:
        each["verdict"] = "within noise"
    found = answer(build(raw))
    assert found.headline.endswith("(acc, acc norm): 2 are without a verdict.")
