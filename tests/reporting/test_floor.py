"""A base at floor or at chance, from its scores to what every report says of it."""

import math

import pytest
from reporting.conftest import task_result

from hfpatch.reporting.comparison.tables import difference_table, score_table
from hfpatch.reporting.numbers import verdict_text
from hfpatch.results import TaskResult
from hfpatch.results.cautions import level_of

CLOZE, ENDINGS = "tinyworld_cloze", "tinyworld_endings"


def scored(value, n=400, *, chance=None, primary="acc", groups=None):
    fields = {**task_result(CLOZE, value), "n": n, "primary": primary, "metrics": {primary: value}, "chance": chance}
    return TaskResult.model_validate(fields | {"clusters": {"column": "x", "groups": groups} if groups else None})


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
    lora = compared("pre_projection_skip", CLOZE, 0.0, 0.001, "not decided", reference="lora")
    raw["comparisons"].insert(4, lora)
    return build(raw)


def test_nothing_found_at_floor_says_so(floored):
    outcomes = {(row.cells[0].lines, row.keys["task"][0]): str(row.cells[-1]) for row in difference_table(floored).rows}
    assert outcomes[("lora", "baseline"), CLOZE] == "not decided (baseline at floor)"
    pair = floored.verdict("lora", CLOZE, "baseline").model_copy(update={"documents_needed": 169})
    assert verdict_text(floored, pair) == "not decided (needs 169 documents; baseline at floor)"
    assert outcomes[("pre_projection_skip", "baseline"), CLOZE] == "better"  # one wherever the base is
    assert outcomes[("lora", "baseline"), ENDINGS] == "not decided"
    assert outcomes[("pre_projection_skip", "lora"), CLOZE] == "not decided"  # LoRA is not at floor
    assert score_table(floored).columns[1].notes[-1] == "base at floor"
