"""The figures of a comparison: what they draw is what the results contain."""

import itertools
import math

import pytest
from matplotlib.text import Text
from reporting.big import write_big_run
from reporting.conftest import data_of, texts_of

from hfpatch.reporting.comparison.figures import (
    draw,
    layer_panels,
    prominent,
    training,
)
from hfpatch.reporting.numbers import MOST_METHODS
from hfpatch.reporting.theme import to_svg
from hfpatch.results.folder import load_results
from hfpatch.results.layout import Curve, LayerSeries

pytestmark = pytest.mark.usefixtures("style")


def titles(figure):
    return [ax.get_title(loc="left") for ax in figure.axes]


def drawn(ax):
    """The points of every line that has some, without those that span a panel."""
    lines = [line for line in ax.lines if len(line.get_xdata()) and line.get_transform() == ax.transData]
    return [line.get_xydata().tolist() for line in lines]


def having(results, field, otherwise, **values):
    """Return the results with other values of a field of each method."""
    methods = {name: m.model_copy(update={field: values.get(name, otherwise)}) for name, m in results.methods.items()}
    return results.model_copy(update={"methods": methods})


def test_figures_are_those_that_there_is_something_for_and_the_same_bytes_every_time(build, raw):
    layers = [LayerSeries(quantity="q", points={0: 1.0})]
    made = draw(having(build(raw), "layers", [], lora=layers))
    assert list(made) == ["differences", "training", "layers"]
    (again,) = draw(build(raw | {"comparisons": []})).values()
    assert to_svg(again) == to_svg(made["training"])
    assert draw(build({"schema": 2, "kind": "comparison", "name": "empty"})) == {}


def test_training_shows_loss_difference_to_the_lora_and_held_out_loss_where_it_was_measured(results):
    figure = training(results)
    assert titles(figure) == ["Training loss", "Loss less that of lora"]
    assert all("nats per token" in ax.get_ylabel() for ax in figure.axes)
    assert "baseline" not in texts_of(to_svg(figure))
    measured = Curve(steps=[1, 2], loss=[3.0, 2.0], seeds=1, held_out={2: 2.5})
    shorter = Curve(steps=[2, 3], loss=[2.5, 1.0], seeds=1)
    long = {"a_lora_of_the_size_of_it_1": results.methods["lora"].model_copy(update={"curve": measured})}
    figure = training(results.model_copy(update={"methods": long | results.methods}))
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.findobj(Text) if text.get_text() in titles(figure)]
    assert len(boxes) == 3
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))
    figure = training(having(results, "curve", None, lora=measured, pre_projection_skip=shorter))
    assert titles(figure)[2] == "Loss on held-out text"
    skip, lora = [[2.0, 2.5], [3.0, 1.0]], [[1.0, 3.0], [2.0, 2.0]]
    assert [drawn(ax) for ax in figure.axes] == [[skip, lora], [[[2.0, 0.5]], [[1.0, 0.0], [2.0, 0.0]]], [[[2.0, 2.5]]]]
    assert titles(training(having(results, "curve", None, pre_projection_skip=shorter))) == ["Training loss"]


def test_a_step_without_a_loss_is_a_gap(results):
    loss = [math.nan if step == 50 else 1.0 for step in range(100)]
    curve = Curve(steps=range(100), loss=loss, seeds=1)
    ((points,), *_) = map(drawn, training(having(results, "curve", None, lora=curve)).axes)
    assert 0 < sum(math.isnan(y) for _, y in points) <= 4


def test_layers_have_a_panel_a_quantity_and_the_mean_of_many_groups(results):
    skip = [LayerSeries(quantity="b", points={0: 1.0}, reference=0.5)]
    lora = [LayerSeries(quantity="a", group=f"{i}", points={0: float(i), 1: 2.0 * i}) for i in range(5)]
    first, second = layer_panels(having(results, "layers", [], pre_projection_skip=skip, lora=lora)).axes
    assert {tuple(line.get_ydata()) for line in first.lines} == {(1.0,), (0.5, 0.5)}
    assert drawn(second) == [[[0.0, 2.0], [1.0, 4.0]]]
    many = [LayerSeries(quantity=f"q{i}", points={0: 1.0}) for i in range(15)]
    assert len(layer_panels(having(results, "layers", [], lora=many)).axes) == 15


def test_the_data_of_the_figures(build, raw):
    results = build(raw)
    differences = data_of(results, "differences")
    assert {
        (row["method"], row["other"], row["task"]): float(row["difference"]) for row in differences if row["p"]
    } == {(pair["method"], pair["reference"], pair["task"]): pair["difference"] for pair in raw["comparisons"]}
    layers = [LayerSeries(quantity="‖a‖", group="q", points={3: 1e-9, 0: 0.25}, reference=0.5)]
    rows = data_of(having(results, "layers", [], lora=layers), "layers")
    assert [tuple(row.values())[2:] for row in rows] == [("q", "0", "0.25", "0.5"), ("q", "3", "1e-09", "0.5")]
    curve = Curve(steps=[1, 2], loss=[3.0, 2.0], seeds=2, held_out={2: 2.5})
    assert data_of(having(results, "curve", None, lora=curve), "training") == [
        {"method": "lora", "step": "1", "loss": "3", "seeds": "2", "held_out": ""},
        {"method": "lora", "step": "2", "loss": "2", "seeds": "2", "held_out": "2.5"},
    ]


def test_figures_show_the_surest_differences_whichever_way_they_go(tmp_path):
    folder = write_big_run(tmp_path, methods=40, tasks=2, seeds=1)
    results = load_results(folder)
    surest = {}
    for pair in results.comparisons:
        if pair.reference == "baseline":
            surest[pair.method] = min(pair.p, surest.get(pair.method, 1.0))
    kept = [name for name in prominent(results).methods if name != "baseline"]
    assert len(kept) == MOST_METHODS
    assert max(surest[name] for name in kept) <= min(p for name, p in surest.items() if name not in kept)
    assert kept == sorted(kept)
