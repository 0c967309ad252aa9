"""The library of plots."""

import math

import numpy as np
import pytest

from hfpatch.reporting import plots
from hfpatch.reporting.theme import styles

pytestmark = pytest.mark.usefixtures("style")


@pytest.fixture
def ax():
    _, (ax,) = plots.panels(1, columns=1, width=3.0, height=2.0)
    return ax


@pytest.mark.parametrize("window", [1, 2, 3, 7])
def test_smooth_is_the_centred_mean_over_a_25th(window):
    values = np.random.default_rng(0).normal(size=25 * window)
    expected = [values[max(i - window // 2, 0) : i + (window - 1) // 2 + 1].mean() for i in range(values.size)]
    np.testing.assert_allclose(plots.smooth(values), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ([1.0, 2.0, 3.0], (), 3.0),
        ([1.0, 1.0, 1.0, 1.0, 100.0], (), 2.0),
        ([1.0, 1.0, 1.0, 1.0, 1000.0], (20.0,), 20.0),
        ([0.5, math.nan, math.inf, 1e300, 0.0], (), 0.5),
        ([], (), 1.0),
    ],
)
def test_an_outlier_does_not_set_the_limit(sizes, options, expected):
    assert plots.robust_limit(sizes, *options) == expected


def test_a_line_is_distinguished_by_dash_and_marks(ax):
    looks = styles([str(i) for i in range(7)], None)
    for index, name in ((0, "0"), (1, "6")):
        plots.line(ax, np.arange(70), np.arange(70), looks[name], index)
    first, second = ax.lines
    assert first.get_color() == second.get_color()
    assert first.get_linestyle() != second.get_linestyle()
    assert first.get_marker() != second.get_marker()
    assert (first.get_markevery(), second.get_markevery()) == ((0, 10), (1, 10))


def test_a_heat_map_leaves_out_what_is_not_there(ax):
    cells = [(0, 0, 0.25), (0, 2, 0.75), (1, 0, 0.5), (1, 1, 0.5), (1, 2, 1.0)]
    plots.heat_map(ax, cells, limits=(0.0, 1.0), diverging=True)
    mesh = ax.collections[0]
    values = [[0.25, np.nan, 0.75], [0.5, 0.5, 1.0]]
    np.testing.assert_array_equal(np.ma.filled(mesh.get_array(), np.nan), values)
    assert mesh.get_clim() == (0.0, 1.0)
    assert ax.yaxis_inverted()
    assert [[label.get_text() for label in axis.get_ticklabels()] for axis in (ax.yaxis, ax.xaxis)] == [
        ["0", "1"], ["0", "1", "2"],
    ]  # fmt: skip
