import math
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from hfpatch.reporting.curves import Curve, read_curves
from hfpatch.reporting.figures import differences, quality, training
from hfpatch.reporting.theme import report_style, to_svg


def texts(svg):
    root = ElementTree.fromstring(svg)
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def draw():
    def drawn(figure, *arguments, **options):
        with report_style():
            made = figure(*arguments, **options)
            return None if made is None else to_svg(made)

    return drawn


@pytest.mark.parametrize("figure", [differences, quality])
def test_every_task_is_a_panel_and_every_method_is_named(draw, figure, results):
    found = texts(draw(figure, results))
    for name in [*results.tasks, "pre_projection_skip", "lora"]:
        assert found.count(name) == 1


def test_parameters_stand_beside_the_differences(draw, results):
    found = texts(draw(differences, results, title=True))
    assert {
        "80k",
        "81.9k",
        "within noise",
        "What each method changes against the frozen tinyworld/gpt-neox (2 seeds)",
    } <= set(found)


def test_to_the_right_is_better_in_every_panel(results):
    with report_style():
        axes = differences(results).axes
    assert [ax.get_title(loc="left") for ax in axes] == list(results.tasks)
    assert [ax.xaxis_inverted() for ax in axes] == [False, False, True]


def test_marks_stand_at_the_differences(results):
    with report_style():
        cloze, _, text = differences(results).axes
    marks = [point.tolist() for line in cloze.lines if line.get_marker() != "None" for point in line.get_xydata()]
    assert marks == [pytest.approx([5.0, 0.0]), pytest.approx([1.5, 1.0])]
    ends = [segment[:, 0].tolist() for lines in text.collections for segment in lines.get_segments()]
    assert ends == [pytest.approx([-15.0, -9.0]), pytest.approx([-7.5, -2.5])]


def test_an_outlier_leaves_the_others_room(build, raw, compared):
    raw["comparisons"] = [
        compared("pre_projection_skip", "tinyworld_text", -2.0, 0.5, "better"),
        *(compared(name, "tinyworld_text", 0.2, 0.5, "within noise") for name in ("a", "b", "c", "d")),
        compared("lora", "tinyworld_text", 4000.0, 10.0, "worse"),
    ]
    raw["methods"] |= dict.fromkeys("abcd", raw["methods"]["lora"])
    results = build(raw, curves=False)
    with report_style():
        figure = differences(results)
        assert max(figure.axes[0].get_xlim()) < 60
        assert "+20000 %" in texts(to_svg(figure))


def test_training_shows_loss_and_difference_to_the_lora(draw, results, run_dir):
    found = texts(draw(training, results, read_curves(run_dir, list(results.methods))))
    assert "Training loss less that of lora" in found
    assert "baseline" not in found


def test_held_out_loss_has_a_panel_where_it_was_measured(results):
    curves = {
        "lora": Curve(np.array([1, 2]), np.array([3.0, 2.0]), 1, {2: 2.5}),
        "pre_projection_skip": Curve(np.array([1, 2]), np.array([3.0, 2.5]), 1),
    }
    with report_style():
        *_, last = training(results, curves).axes
    assert last.get_title(loc="left") == "Loss on held-out text"
    assert [line.get_xydata().tolist() for line in last.lines if line.get_xydata().size] == [[[2.0, 2.5]]]


def test_nothing_to_draw_is_no_figure(draw, build):
    empty = build({"schema": 1})
    assert draw(differences, empty) is None
    assert draw(quality, empty) is None
    assert draw(training, empty, {}) is None


def test_a_row_without_an_interval_is_drawn_and_named(draw, build, raw):
    untested = {"low": None, "high": None, "p": None, "smallest_visible": None, "verdict": "too few documents"}
    assert "too few documents" not in texts(draw(differences, build(raw)))
    raw["comparisons"][0].update(untested)
    assert "too few documents" in texts(draw(differences, build(raw)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_numbers_that_are_none_are_drawn_somehow(draw, build, raw, value):
    for item in raw["comparisons"][:3]:
        item["difference"] = item["low"] = item["high"] = item["smallest_visible"] = value
    for run in raw["methods"]["lora"]["runs"].values():
        run["evaluation"]["tinyworld_cloze"]["metrics"]["acc"] = value
    results = build(raw)
    assert texts(draw(differences, results))
    assert texts(draw(quality, results))


def test_hostile_names_are_text(draw, build, hostile):
    results = build(hostile, curves=False)
    for figure in (differences, quality):
        assert any(text.startswith("pre_projec") for text in texts(draw(figure, results)))


def test_many_methods_and_tasks_do_not_overlap(build, raw, compared):
    raw["tasks"] |= {f"task_with_a_long_name_{i}": raw["tasks"]["tinyworld_cloze"] for i in range(3)}
    raw["methods"] |= {f"method_with_quite_a_long_name_{i}": raw["methods"]["lora"] for i in range(6)}
    raw["comparisons"] = [
        {**compared(method, "tinyworld_cloze", 0.01, 0.03, "within noise"), "task": task}
        for method in raw["methods"]
        for task in raw["tasks"]
        if method != "baseline" and task != "tinyworld_text"
    ]
    with report_style():
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
