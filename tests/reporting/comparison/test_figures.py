"""The figures of a comparison: what they draw is what the results contain."""

import math
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from reporting.big import write_big_run
from reporting.conftest import read_csv
from scipy import stats

from hfpatch.reporting.comparison.figures import (
    differences,
    draw,
    figure_csv,
    layer_panels,
    prominent,
    quality,
    training,
)
from hfpatch.reporting.numbers import MOST_METHODS
from hfpatch.reporting.plots import to_svgs
from hfpatch.reporting.theme import to_svg
from hfpatch.results.folder import load_results
from hfpatch.results.schema import Curve, LayerSeries

pytestmark = pytest.mark.usefixtures("style")


def texts(svg):
    root = ElementTree.fromstring(svg)
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def titles(figure):
    return [ax.get_title(loc="left") for ax in figure.axes]


def drawn(ax):
    """The points of every line that has some, without those that span a panel."""
    lines = [line for line in ax.lines if len(line.get_xdata()) and line.get_transform() == ax.transData]
    return [line.get_xydata().tolist() for line in lines]


def test_figures_are_those_that_there_is_something_for_and_the_same_bytes_every_time(build, raw):
    made = to_svgs(draw(build(raw), [("lora", LayerSeries(quantity="q", points={0: 1.0}))]))
    assert list(made) == ["differences", "quality", "training", "layers"]
    assert to_svgs(draw(build(raw | {"comparisons": []}), [])) == {name: made[name] for name in ("quality", "training")}
    assert draw(build({"schema": 2, "kind": "comparison", "name": "empty"}), []) == {}


@pytest.mark.parametrize("figure", [differences, quality])
def test_every_task_is_a_panel_and_every_method_is_named(figure, results, build, raw):
    found = texts(to_svg(figure(results)))
    for name in [*results.tasks, "pre_projection_skip", "lora"]:
        assert found.count(name) == 1
    if figure is differences:
        assert {"80k", "81.9k"} <= set(found)
        alone = texts(to_svg(figure(results, title=True)))
        assert any(text.endswith("tinyworld/gpt-neox (2 seeds)") for text in alone)
        assert "not tested" not in found
        raw["comparisons"][0] |= {"low": None, "high": None, "p": None, "test": "none (too few documents)"}
        assert "not tested" in texts(to_svg(figure(build(raw))))  # a row without an interval is drawn and named


def test_marks_are_at_the_differences_and_to_the_right_is_better(results):
    figure = differences(results)
    assert titles(figure) == list(results.tasks)
    cloze, endings, text = figure.axes
    assert [ax.xaxis_inverted() for ax in (cloze, endings, text)] == [False, False, True]
    marks = [point.tolist() for line in cloze.lines if line.get_marker() in "oD" for point in line.get_xydata()]
    assert marks == [pytest.approx([5.0, 0.0]), pytest.approx([1.5, 1.0])]
    one, all_six = (stats.t.ppf(level, 100) for level in (0.975, 1 - 0.025 / 6))
    power = stats.norm.ppf(0.8)
    ends = [segment[:, 0].tolist() for lines in text.collections for segment in lines.get_segments()]
    half = 3 * all_six / one
    assert ends[:2] == [pytest.approx([-12 - half, -12 + half]), pytest.approx([-15.0, -9.0])]  # simultaneous, plain
    assert ends[3] == pytest.approx([-7.5, -2.5])
    seen = 3 * (all_six + power) / one
    bars = [(bar.get_x(), bar.get_width()) for bar in cloze.patches]
    assert bars == [pytest.approx((-seen, 2 * seen))] * 2


def test_an_outlier_does_not_set_the_limits(build, raw, compared):
    raw["comparisons"] = [
        compared("pre_projection_skip", "tinyworld_text", -2.0, 0.5, "better"),
        *(compared(name, "tinyworld_text", 0.2, 0.5, "not decided") for name in ("a", "b", "c", "d")),
        compared("lora", "tinyworld_text", 4000.0, 10.0, "worse"),
    ]
    raw["methods"] |= dict.fromkeys("abcd", raw["methods"]["lora"])
    results = build(raw, curves=False)
    figure = differences(results)
    assert max(figure.axes[0].get_xlim()) < 60
    assert "+20000 %" in texts(to_svg(figure))


def test_quality_has_the_mean_and_the_spread_over_seeds_around_the_baseline(results):
    cloze = quality(results).axes[0]
    baseline, *points = cloze.lines
    assert list(baseline.get_ydata()) == [40.0, 40.0]
    assert {tuple(xy) for line in points for xy in line.get_xydata().tolist()} == {(80_000, 45.0), (81_920, 41.5)}
    bars = [segment[:, 1].tolist() for lines in cloze.collections for segment in lines.get_segments()]
    assert bars == [pytest.approx([45 - 2**0.5, 45 + 2**0.5]), pytest.approx([41.5 - 0.5**0.5, 41.5 + 0.5**0.5])]


def with_curves(results, **curves):
    methods = {name: method.model_copy(update={"curve": curves.get(name)}) for name, method in results.methods.items()}
    return results.model_copy(update={"methods": methods})


def test_training_shows_loss_difference_to_the_lora_and_held_out_loss_where_it_was_measured(results):
    figure = training(results)
    assert titles(figure) == ["Training loss", "Training loss less that of lora"]
    assert "baseline" not in texts(to_svg(figure))
    measured = Curve(steps=[1, 2], loss=[3.0, 2.0], seeds=1, held_out={2: 2.5})
    shorter = Curve(steps=[2, 3], loss=[2.5, 1.0], seeds=1)
    figure = training(with_curves(results, lora=measured, pre_projection_skip=shorter))
    assert titles(figure)[2] == "Loss on held-out text"
    skip, lora = [[2.0, 2.5], [3.0, 1.0]], [[1.0, 3.0], [2.0, 2.0]]
    assert [drawn(ax) for ax in figure.axes] == [[skip, lora], [[[2.0, 0.5]], [[1.0, 0.0], [2.0, 0.0]]], [[[2.0, 2.5]]]]
    assert titles(training(with_curves(results, pre_projection_skip=shorter))) == ["Training loss"]


def test_a_step_without_a_loss_is_a_gap(results):
    loss = [math.nan if step == 50 else 1.0 for step in range(100)]
    ((points,), *_) = map(drawn, training(with_curves(results, lora=Curve(steps=range(100), loss=loss, seeds=1))).axes)
    assert 0 < sum(math.isnan(y) for _, y in points) <= 4


def test_layers_have_a_panel_a_quantity_and_the_mean_of_many_groups(results):
    series = [("lora", LayerSeries(quantity="a", group=f"{i}", points={0: float(i), 1: 2.0 * i})) for i in range(5)]
    series += [("pre_projection_skip", LayerSeries(quantity="b", points={0: 1.0}, reference=0.5))]
    series += [("no method", LayerSeries(quantity="c", points={0: 1.0}))]
    first, second = layer_panels(results, series).axes
    assert drawn(first) == [[[0.0, 2.0], [1.0, 4.0]]]
    assert {tuple(line.get_ydata()) for line in second.lines} == {(1.0,), (0.5, 0.5)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_numbers_that_are_not_finite_can_be_drawn(build, raw, value):
    for item in raw["comparisons"][:3]:
        item["difference"] = item["low"] = item["high"] = value
    for run in raw["methods"]["lora"]["runs"].values():
        run["evaluation"]["tinyworld_cloze"]["metrics"]["acc"] = value
    results = build(raw)
    assert texts(to_svg(differences(results)))
    assert texts(to_svg(quality(results)))


def test_many_methods_and_tasks_do_not_overlap(build, raw, compared):
    raw["tasks"] |= {f"task_with_a_long_name_{i}": raw["tasks"]["tinyworld_cloze"] for i in range(3)}
    raw["methods"] |= {f"method_with_quite_a_long_name_{i}": raw["methods"]["lora"] for i in range(6)}
    raw["comparisons"] = [
        {**compared(method, "tinyworld_cloze", 0.01, 0.03, "not decided"), "task": task}
        for method in raw["methods"]
        for task in raw["tasks"]
        if method != "baseline" and task != "tinyworld_text"
    ]
    figure = differences(build(raw, curves=False))
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    boxes = [ax.get_tightbbox(renderer) for ax in figure.axes if ax.get_visible()]
    (legend,) = figure.legends
    boxes.append(legend.get_window_extent(renderer))
    page = figure.bbox
    assert len(boxes) == 4 + 1
    for i, box in enumerate(boxes):
        assert page.x0 <= box.x0 < box.x1 <= page.x1
        assert page.y0 <= box.y0 < box.y1 <= page.y1
        for other in boxes[i + 1 :]:
            width = min(box.x1, other.x1) - max(box.x0, other.x0)
            height = min(box.y1, other.y1) - max(box.y0, other.y0)
            assert width <= 1 or height <= 1


@pytest.mark.parametrize("tasks", [1, 2])
def test_title_and_key_of_few_panels_are_inside_the_figure(build, raw, tasks):
    raw["model"]["name"] = "an-organisation/a-model-with-a-long-name-1234567890"
    raw["comparisons"] = [each for each in raw["comparisons"] if each["task"] in list(raw["tasks"])[:tasks]]
    figure = differences(build(raw), title=True)
    figure.draw_without_rendering()
    for artist in (*figure.texts, *figure.legends):
        box = artist.get_window_extent()
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1


def test_the_data_of_the_figures(build, raw):
    results = build(raw)
    differences = read_csv(figure_csv("differences", results, []))
    assert {
        (row["method"], row["other"], row["task"]): float(row["difference"]) for row in differences if row["p"]
    } == {(each["method"], each["reference"], each["task"]): each["difference"] for each in raw["comparisons"]}
    quality = [row for row in read_csv(figure_csv("quality", results, [])) if row["method"] == "lora"]
    assert [float(row["value"]) for row in quality] == [0.41, 0.42, 0.5, 0.49, 18.9, 19.1]
    layers = [("lora", LayerSeries(quantity="‖a‖", group="q", points={3: 1e-9, 0: 0.25}, reference=0.5))]
    assert [row["value"] for row in read_csv(figure_csv("layers", results, layers))] == ["0.25", "1e-09"]


def test_curves_have_at_most_some_hundred_steps_and_every_loss_on_held_out_text(build, raw):
    curve = Curve(steps=list(range(1, 1201)), loss=[3 - i / 1200 for i in range(1200)], seeds=2, held_out={7: 2.5})
    results = build(raw, curves=False)
    methods = {str(i): results.methods["lora"].model_copy(update={"curve": curve}) for i in range(400)}
    rows = read_csv(figure_csv("training", results.model_copy(update={"methods": {"a": methods["0"]}}), []))
    assert [int(row["step"]) for row in rows[:4]] == [1, 4, 7, 10]
    assert [row["held_out"] for row in rows if row["held_out"]] == ["2.5"]
    assert all(float(row["loss"]) == curve.loss[int(row["step"]) - 1] for row in rows)
    assert len(read_csv(figure_csv("training", results.model_copy(update={"methods": methods}), []))) < 45_000


def test_figures_show_the_surest_differences_whichever_way_they_go(tmp_path):
    folder = write_big_run(tmp_path, methods=40, tasks=2, seeds=1, documents=2, steps=0)
    results = load_results(folder)
    surest = {}
    for each in results.comparisons:
        if each.reference == "baseline":
            surest[each.method] = min(each.p, surest.get(each.method, 1.0))
    kept = [name for name in prominent(results).methods if name != "baseline"]
    assert len(kept) == MOST_METHODS
    assert max(surest[name] for name in kept) <= min(p for name, p in surest.items() if name not in kept)
    assert kept == sorted(kept)
