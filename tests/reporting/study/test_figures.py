"""The figures of a study: what they draw is what the results hold."""

import numpy as np
import pytest
from reporting.conftest import read_csv
from reporting.study_example import LINEAR, STEPS, read, row, runs_of, study, variant, with_one_seed

from hfpatch.reporting.numbers import MOST_METHODS
from hfpatch.reporting.study.document import study_document
from hfpatch.reporting.study.figures import diagnostics, differences, draw, figure_csv, improvements, losses, spreads
from hfpatch.reporting.theme import BLUE, GREY

pytestmark = pytest.mark.usefixtures("style")


def lines(ax):
    """The lines that tell something by step."""
    return [line for line in ax.get_lines() if list(line.get_xdata()) == list(STEPS)]


def test_losses_are_the_means_with_the_seeds_as_bands(found):
    figure = losses(found)
    whole, zoomed = figure.axes
    drawn = {line.get_color(): list(line.get_ydata()) for line in lines(whole)}
    assert drawn[GREY] == [point[1] for point in found.chosen["linear"].curve]
    assert drawn[BLUE] == [point[1] for point in found.chosen["nonlinear"].curve]
    assert len(whole.collections) == 4
    band = whole.collections[0].get_paths()[0].vertices
    low, high = band[:, 1].min(), band[:, 1].max()
    assert (low, high) == pytest.approx((min(LINEAR.values()), max(LINEAR.values()) + 400 / 100 - 1))
    assert [list(line.get_xdata()) for line in zoomed.get_lines()] == [[200, 300, 400]] * 4


def test_a_seed_that_diverged_ends_in_a_cross():
    raw = study()
    raw["rows"][2]["best"], raw["rows"][3]["best"] = False, True
    whole = losses(read(raw)).axes[0]
    (cross,) = [line for line in whole.get_lines() if line.get_marker() == "x"]
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([300], [pytest.approx(5.0 + 400 / 300 - 1)])
    assert not [line for line in losses(read(study())).axes[0].get_lines() if line.get_marker() == "x"]


def test_improvements_are_in_per_cent_around_a_zero_line(found):
    figure = improvements(found)
    everything, *each = figure.axes
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["all, the means", "nonlinear", "identity", "wide"]
    assert [line.get_ydata()[-1] for line in lines(everything)] == pytest.approx([2.0, -0.1, -2.0])
    assert [len(ax.collections) for ax in figure.axes] == [0, 1, 1, 1]
    for ax in figure.axes:
        assert [0, 0] in [list(line.get_ydata()) for line in ax.get_lines()]
        low, high = ax.get_ylim()
        assert low == -high
        assert high > 2.0
    band = each[0].collections[0].get_paths()[0].vertices
    told = found.chosen["nonlinear"].improvement
    assert band[band[:, 0] == 400][:, 1].min() == pytest.approx(100 * told.low)
    assert band[band[:, 0] == 400][:, 1].max() == pytest.approx(100 * told.high)


def test_the_forest_has_a_row_a_variant_with_interval_and_seeds(found):
    (ax,) = differences(found).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["nonlinear", "identity", "wide"]
    intervals = [tuple(path.vertices[:, 0]) for lines in ax.collections for path in lines.get_paths()]
    told = [found.verdict(name) for name in found.others]
    together = [(each.corrected_low, each.corrected_high) for each in told]
    ends = [pair for each, wide in zip(told, together, strict=True) for pair in (wide, (each.low, each.high))]
    most = max(ax.get_xlim())
    assert intervals == [pytest.approx((max(100 * low, -most), min(100 * high, most))) for low, high in ends]
    seeds = [sorted(line.get_xdata()) for line in ax.get_lines() if line.get_marker() == "|"]
    assert seeds == [pytest.approx(s) for s in ([1.9, 2.0, 2.1], [-1.3, 0.0, 1.0], [-2.1, -2.0, -1.9])]
    assert {"+0.02 %", "−10.00 %", "+12.50 %"} <= {text.get_text() for text in ax.texts}


def test_f_is_drawn_a_line_a_layer(found):
    size, cosine = diagnostics(found).axes
    assert [line.get_ydata()[-1] for line in lines(size)] == pytest.approx([1.5, 1.6])
    assert [line.get_ydata()[-1] for line in lines(cosine)] == [-0.25, -0.25]


def test_one_seed_has_no_intervals_and_nothing_measured_no_figure():
    found = read(with_one_seed())
    assert spreads(found) is None
    assert not differences(found).axes[0].collections
    assert all(not ax.collections for ax in improvements(found).axes)
    assert draw(read(study() | {"rows": [], "runs": []})) == {}


def test_one_that_runs_away_hides_nothing():
    raw = study()
    away = {seed: 1e6 * (1 + seed) for seed in LINEAR}
    raw["rows"][6] = row("wide", {"training.lr": 0.001}, away, best=True, base=LINEAR)
    found = read(raw)
    low, high = losses(found).axes[1].get_ylim()
    assert 3.5 < low < 4.0
    assert high < 1000
    assert differences(found).axes[0].get_xlim()[1] < 1000


def test_of_very_many_variants_some_are_drawn():
    names = [f"other{i}" for i in range(30)]
    values = {name: {seed: loss - 0.001 * i for seed, loss in LINEAR.items()} for i, name in enumerate(names)}
    rows = [row("linear", {}, LINEAR, best=True)]
    rows += [row(name, {}, each, best=True, base=LINEAR) for name, each in values.items()]
    variants = {name: variant("Q", 1000) for name in ("linear", *names)}
    found = read(study() | {"variants": variants, "rows": rows, "runs": runs_of(rows), "sweep": {}})
    assert len(differences(found).axes[0].get_yticklabels()) == MOST_METHODS
    assert "Of 30 variants the first 24" in study_document(found, {"loss": "<svg/>"}).parts[0].figures["loss"].caption
    assert "Of 3 variants" not in study_document(read(study()), {"loss": "<svg/>"}).parts[0].figures["loss"].caption
    assert len({line.split(",")[0] for line in figure_csv("loss", found).splitlines()[1:]}) == 31


def test_the_data_of_each_figure_are_its_numbers(found):
    rows = {name: read_csv(figure_csv(name, found)) for name in ("loss", "improvement", "differences", "diagnostics")}
    loss = [each for each in rows["loss"] if each["variant"] == "nonlinear" and each["point"] == "lr 0.001"]
    assert [[float(each[key]) for key in ("step", "mean", "low", "high")] for each in loss] == [
        list(point) for point in found.chosen["nonlinear"].curve
    ]
    better = [each for each in rows["improvement"] if each["variant"] == "nonlinear" and each["step"] == "400"]
    assert float(better[0]["mean"]) == pytest.approx(0.02)
    seeds = [each for each in rows["differences"] if each["variant"] == "wide"]
    assert [float(each["improvement_of_seed"]) for each in seeds] == pytest.approx([-0.019, -0.02, -0.021])
    layers = [each for each in rows["diagnostics"] if each["step"] == "400"]
    assert [float(each["size"]) for each in layers] == pytest.approx([1.5, 1.6])
    spread = read_csv(figure_csv("spread", found))
    assert {each["variant"] for each in spread} == {"linear", "nonlinear", "identity", "wide"}
    assert np.allclose([float(each["sd"]) for each in spread if each["variant"] == "linear"], 0.1)
