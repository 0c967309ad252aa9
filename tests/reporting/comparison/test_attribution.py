"""Shares against Fieller's interval computed by a search, and the sentences that may be said of them."""

import math

import pytest
from reporting.conftest import document_of

from hfpatch.reporting.comparison.attribution import attribution, fieller, share

SKIP, TEXT, CLOZE = "pre_projection_skip", "tinyworld_text", "tinyworld_cloze"
ALONE = {"type": "pre_projection", "expansion": 0, "content_skip": True}
LINEAR = {"type": "pre_projection", "activation": "identity"}


@pytest.fixture
def controlled(raw, build, compared):
    """Build results in which pre_projection_skip has controls, from the comparisons that a test gives."""

    def make(*comparisons, controls=("skip_alone",)):
        for name in controls:
            raw["methods"][name] = raw["methods"][SKIP] | {"parts": [ALONE if name == "skip_alone" else LINEAR]}
        raw["comparisons"] = [compared(*pair[:5], reference=(*pair, "baseline")[5]) for pair in comparisons]
        return build(raw)

    return make


def sentence(results):
    (section,) = attribution(results)
    (finding,) = section.blocks[0].items
    return str(finding), finding.tone


def test_the_interval_is_fiellers():
    z2 = 1.96**2
    reached = fieller(2.0, 1.5, 1.96 * 0.2, 1.96 * math.sqrt(0.05), z2 * 0.03)
    assert reached.value == 0.75

    def inside(r):
        return (1.5 - r * 2.0) ** 2 <= z2 * (0.05 - 2 * r * 0.03 + r * r * 0.04)

    steps = [step / 10_000 for step in range(-20_000, 30_000)]
    held = [r for r in steps if inside(r)]
    assert (reached.low, reached.high) == pytest.approx((held[0], held[-1]), abs=2e-4)
    assert fieller(0.1, 1.5, 0.4, 0.45, 0.1) is None  # the method's gain may be 0: any share is possible
    assert fieller(-2.0, 1.5, 0.4, 0.45, 0.1) is None
    assert fieller(2.0, 1.5, math.inf, 0.45, 0.0) is None


def test_a_part_that_carries_most_of_a_perplexitys_gain(controlled):
    results = controlled(
        (SKIP, TEXT, -2.4, 0.2, "better"),
        ("skip_alone", TEXT, -2.2, 0.2, "better"),
        (SKIP, TEXT, -0.25, 0.1, "better", "skip_alone"),
    )
    reached = share(results, SKIP, "skip_alone", TEXT)
    assert reached.value == pytest.approx(math.log(1 - 2.2 / 20) / math.log(1 - 2.4 / 20))
    assert 0.85 < reached.low < reached.value < reached.high < 1
    words, tone = sentence(results)
    assert words.endswith("the skip alone carries most of the effect.")
    assert tone == "better"


def test_points_are_compared_as_they_are_and_pairing_narrows_the_interval(controlled):
    both = [(SKIP, CLOZE, 0.05, 0.02, "better"), ("skip_alone", CLOZE, 0.03, 0.02, "better")]
    alone = share(controlled(*both), SKIP, "skip_alone", CLOZE)
    paired = share(controlled(*both, (SKIP, CLOZE, 0.02, 0.01, "better", "skip_alone")), SKIP, "skip_alone",
                   CLOZE)  # fmt: skip
    assert alone.value == paired.value == pytest.approx(0.6)
    assert alone.low < paired.low < paired.high < alone.high


@pytest.mark.parametrize(
    ("comparisons", "ending", "tone"),
    [
        ([(SKIP, CLOZE, 0.05, 0.06, "not decided"), ("skip_alone", CLOZE, 0.05, 0.01, "better")],
         "be told.", "not tested"),
        ([(SKIP, CLOZE, -0.05, 0.01, "worse"), ("skip_alone", CLOZE, 0.05, 0.01, "better")], "be told.", "not tested"),
        ([(SKIP, CLOZE, 0.05, 0.01, "better")], "be told.", "not tested"),
        ([(SKIP, CLOZE, 0.05, 0.01, "better"), ("skip_alone", CLOZE, 0.025, 0.02, "better")], "be told.", "not tested"),
        ([(SKIP, CLOZE, 0.05, 0.01, "better"), ("skip_alone", CLOZE, 0.002, 0.01, "not decided")],
         "half of the effect.", "mixed"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_said(controlled, comparisons, ending, tone):
    words, said_tone = sentence(controlled(*comparisons))
    assert words.endswith(ending)
    assert said_tone == tone


@pytest.mark.parametrize(("half", "ending"), [(0.01, "."), (0.0005, "; the skip alone the most.")])
def test_several_parts_may_each_reach_most_of_it(controlled, half, ending):
    words, _ = sentence(
        controlled(
            (SKIP, CLOZE, 0.05, half, "better"),
            ("linear", CLOZE, 0.04, half, "better"),
            ("skip_alone", CLOZE, 0.048, half, "better"),
            controls=("linear", "skip_alone"),
        )
    )
    assert "the skip alone and the linear pre-projection without the skip each" in words
    assert words.endswith(f"by themselves{ending}")


def test_text_comes_first_then_tasks_on_which_there_is_a_gain(controlled):
    results = controlled(
        (SKIP, CLOZE, 0.05, 0.01, "better"),
        ("skip_alone", CLOZE, 0.05, 0.01, "better"),
        (SKIP, TEXT, -0.4, 0.6, "not decided"),
        ("skip_alone", TEXT, -0.4, 0.6, "not decided"),
    )
    assert "gains on tinyworld_cloze (acc)" in sentence(results)[0]


def test_the_table_groups_a_method_with_its_controls(controlled):
    results = controlled((SKIP, CLOZE, 0.05, 0.01, "better"), ("skip_alone", CLOZE, 0.04, 0.01, "better"))
    sections = {section.name: section for section in document_of(results).parts[0].sections}
    table = sections["attribution"].blocks[-1]
    assert [row.cells[:2] for row in table.rows] == [(SKIP, "all"), ("skip_alone", "the skip alone")]
    assert table.rows[0].strong
    index = [column.name for column in table.columns].index(CLOZE)
    assert table.rows[0].cells[index] == "better"
    assert table.rows[1].cells[index].startswith("80 % [")


def test_nothing_is_shown_without_controls_or_comparisons(results, controlled):
    assert list(attribution(results)) == []
    assert list(attribution(controlled())) == []


def test_bits_per_byte_measure_a_task_that_has_them(controlled, raw, build):
    differences = [(SKIP, CLOZE, -0.4, 0.1, "better"), ("skip_alone", CLOZE, -0.3, 0.1, "better")]
    controlled(*differences)
    raw["comparisons"] += [pair | {"metric": "bits_per_byte"} for pair in raw["comparisons"]]
    results = build(raw)
    assert "gains on tinyworld_cloze (bits per byte)" in sentence(results)[0]
    reached = share(results, SKIP, "skip_alone", CLOZE)
    assert reached.value == pytest.approx(0.75)  # fewer bits are a gain
    assert reached.low < 0.75 < reached.high
