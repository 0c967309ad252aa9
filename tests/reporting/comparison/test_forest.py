"""The forest of the first question: what is drawn is what the verdicts contain."""

import copy
import itertools
import math

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from reporting.conftest import texts_of

from hfpatch.reporting.comparison.forest import SIZE, ForestRow, forest_figure, forest_of
from hfpatch.reporting.theme import to_svg

pytestmark = pytest.mark.usefixtures("style")
TEXT, SKIP = "tinyworld_text", "pre_projection_skip"


@pytest.fixture
def many(raw, compared):
    """A method and its LoRA by number, every third pair worse, better or undecided; the margin is one per cent."""

    def make(count, names="method_with_quite_a_long_name_{}"):
        lora = raw["methods"]["lora"] | {"match": None}
        raw["methods"] = {"baseline": raw["methods"]["baseline"], "l": lora}
        raw["comparisons"], raw["margin"] = [], {TEXT: 0.19}
        for i in range(count):
            raw["methods"][names.format(i)] = lora | {"parts": [{"type": "pre_projection"}]}
            one = compared(names.format(i), TEXT, (0.4, -0.4, 0.1)[i % 3], 0.15, "", reference="l")
            one |= {"p": (1e-6, 1e-6, 0.4)[i % 3]}
            one["errors"] = [[0.01, 100], [0.005, 2]] if i % 3 < 2 else [[0.15, 100], [0.05, 2]]
            raw["comparisons"].append(one)
        pairs = [[names.format(i), "l"] for i in range(count)]
        raw["questions"] = [{"question": "gain", "pairs": pairs, "on": [TEXT]}]
        return raw

    return make


def test_a_row_a_pair_with_both_intervals_the_margin_and_a_mark_for_each_outcome(many, build):
    results = build(many(3, "m{}"), curves=False)
    figure = forest_figure(results)
    (ax,) = figure.axes
    worse, better, undecided = (100 * value / 19 for value in (-0.4, 0.4, -0.1))
    shown = [(line.get_marker(), *line.get_xydata()[0]) for line in ax.lines if line.get_marker() in "oDsx"]
    assert shown == [
        ("D", pytest.approx(worse), 0), ("o", pytest.approx(better), 1), ("o", pytest.approx(undecided), 2),
    ]  # fmt: skip
    band = ax.patches[0].get_extents().transformed(ax.transData.inverted())
    assert (band.x0, band.x1) == pytest.approx((-1.0, 1.0))  # 0.19 of 19
    ends = [segment[:, 0].tolist() for lines in ax.collections for segment in lines.get_segments()]
    verdict = results.primary[0]
    corrected = [-100 * end / 19 for end in (verdict.corrected_high, verdict.corrected_low)]
    assert ends[:2] == [pytest.approx(corrected), pytest.approx([100 * end / 19 for end in (-0.55, -0.25)])]
    shown = texts_of(to_svg(figure))
    assert {"m0", "m1", "m2", "better", "worse", "undecided", "within 1 %"} <= set(shown)


def test_a_margin_in_per_cent_is_of_the_reference_of_its_row(many, build):
    raw = many(2, "m{}")
    raw["methods"]["k"] = copy.deepcopy(raw["methods"]["l"])
    for run in raw["methods"]["k"]["runs"].values():
        run["evaluation"][TEXT]["metrics"]["word_perplexity"] *= 2
    raw["questions"][0]["pairs"][1][1] = raw["comparisons"][1]["reference"] = "k"
    results = build(raw, curves=False)
    assert [row.margin for row in forest_of(results).rows] == pytest.approx([1.0, 0.5])  # 0.19 of 19 and of 38
    figure = forest_figure(results)
    assert [patch.get_width() for patch in figure.axes[0].patches] == pytest.approx([2.0, 1.0])
    assert "within the margin" in texts_of(to_svg(figure))


def test_what_is_compared_is_named_and_exploratory_pairs_are_left_out(many, build, compared):
    raw = many(2, "m{}")
    assert forest_of(build(raw, curves=False)).other == "l"
    raw["methods"]["k"] = raw["methods"]["l"]
    raw["questions"][0]["pairs"][1][1] = raw["comparisons"][1]["reference"] = "k"
    assert forest_of(build(raw, curves=False)).other == SIZE
    raw["methods"]["n"] = raw["methods"]["m0"]
    raw["comparisons"].append(compared("n", TEXT, 0.1, 1.0, "not decided", reference="l"))
    results = build(raw, curves=False)
    assert results.verdict("n", TEXT, "l").role == "secondary"
    assert [row.verdict.method for row in forest_of(results).rows] == ["m0", "m1"]


def test_without_a_question_it_is_the_gain_over_the_base_and_without_tests_there_is_none(build, raw):
    forest = forest_of(build(raw))
    assert (forest.other, [row.gain.difference for row in forest.rows]) == ("baseline", [12.0, 5.0])
    (ax,) = forest_figure(build(raw)).axes
    assert ax.get_xlabel().endswith(", exploratory (better →)")
    raw["comparisons"] = []
    assert forest_figure(build(raw)) is None


@pytest.mark.parametrize(("sign", "arrow"), [("−", "<"), ("+", ">")])
def test_an_outlier_does_not_set_the_limits_and_is_an_arrow_with_its_number(many, build, sign, arrow):
    raw = many(8)
    raw["comparisons"][0]["difference"] = 800.0 if sign == "−" else -800.0
    results = build(raw, curves=False)
    assert max(map(abs, forest_of(results).limits)) < 20
    (ax,) = forest_figure(results).axes
    assert [text.get_text() for text in ax.texts] == [f"{sign}{80000 / 19:.0f} %"]
    assert [line.get_marker() for line in ax.lines if line.get_marker() in "<>"] == [arrow]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_numbers_that_are_not_finite_can_be_drawn(build, raw, value):
    for item in raw["comparisons"]:
        item["difference"] = item["low"] = item["high"] = value
    figure = forest_figure(build(raw))
    assert figure is None or texts_of(to_svg(figure))


@pytest.mark.parametrize(("fewest", "said"), [(1, "1 to 2 seeds"), (2, "2 seeds")])
def test_a_figure_that_is_shown_alone_has_the_seeds_of_its_pairs(many, build, fewest, said):
    raw = many(3)
    raw["comparisons"][1]["seeds"] = fewest
    raw["model"]["name"] = "/home/someone/my-base"  # whose folder a shared picture does not show
    assert forest_figure(build(raw, curves=False), title=True).get_suptitle().endswith(f"text, my-base, {said}")


@pytest.mark.parametrize(
    ("count", "far", "tried"), [(1, 40.0, False), (3, 0.4, True), (10, 40.0, True), (40, 0.4, False)]
)
def test_it_has_a_row_for_every_pair_and_nothing_is_cut_or_touches(many, build, monkeypatch, count, far, tried):
    monkeypatch.setattr(ForestRow, "tried", tried)  # the note makes a second row of the legend
    raw = many(count)
    other = "a_reference"  # no LoRA, so that the pair is named
    raw["methods"][other] = raw["methods"]["method_with_quite_a_long_name_0"]
    raw["comparisons"][0] |= {"reference": other, "difference": -far, "low": -far, "high": -far}
    raw["questions"][0]["pairs"][0][1] = other
    figure = forest_figure(build(raw, curves=False), title=True)
    (ax,) = figure.axes
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert len(names) == count
    assert names[0] == (f"method_with_quite_a_long_name_0{f' − {other}' * (count > 1)}{' ‡' * tried}")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    ticks = [label.get_window_extent(renderer) for label in ax.get_xticklabels() if label.get_text()]
    ticks = [box for box in ticks if ax.bbox.x0 <= (box.x0 + box.x1) / 2 <= ax.bbox.x1]
    assert all(one.x1 + 4 <= next_one.x0 for one, next_one in itertools.pairwise(ticks))
    rows = [label.get_window_extent(renderer) for label in ax.get_yticklabels()]
    assert all(next_one.y1 <= one.y0 + 2 for one, next_one in itertools.pairwise(rows))
    (legend,) = figure.legends
    boxes = [
        ax.get_tightbbox(renderer),
        legend.get_window_extent(renderer),
        *(t.get_window_extent() for t in figure.texts),
    ]
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
