"""The figures of an inspection: what they draw is what was found."""

from types import SimpleNamespace as Item

import pytest
from scipy.stats import t as student

from hfpatch.reporting.inspection import figures as module
from hfpatch.reporting.theme import report_style

LAYERS = range(3)


def relation(value):
    return Item(symmetric=value, positive_energy=1 - value, effective_rank=8 * value, norm=2 * value)


def head(layer, number):
    value = 0.1 + 0.2 * layer + 0.1 * number
    return Item(layer=layer, head=number, here=relation(value), by_offset={0: relation(value), 4: relation(value / 2)})


def attending(layer, number):
    return Item(layer=layer, head=number, sink=0.1 * layer + 0.3 * number, entropy=1.0 + layer, distance=9.0 - number)


@pytest.fixture
def inspected():
    sizes = [Item(layer=layer, size=20.0 + layer) for layer in LAYERS]
    return Item(
        attention=[attending(layer, number) for layer in LAYERS for number in range(2)],
        attention_patched=[],
        relations=[head(layer, number) for layer in LAYERS for number in range(2)],
        relations_patched=[],
        skip_norms=[Item(layer=layer, norm=1.0 + layer, at_paper_init=9.0) for layer in LAYERS],
        skip_sizes=sizes,
        pre_projection_sizes=sizes,
        query_sizes=[
            Item(layer=layer, target=target, size=0.5, cosine=-0.5) for layer in LAYERS for target in ("query", "key")
        ],
        linearised=[Item(layer=layer, explained=(0.5, -3.0), explained_change=(None, 0.25)) for layer in LAYERS],
        ablations=Item(items=6, without=[Item(layer=layer, change=1.0, error=0.5) for layer in (*LAYERS, None)]),
    )


@pytest.fixture
def axes(inspected):
    """Return a function from the name of a figure to its panels."""
    with report_style():
        drawn = {name: figure for name, _, _, figure in module._drawn(inspected)}
    return lambda name: drawn[name].axes


def values(ax):
    return [list(line.get_ydata()) for line in ax.lines]


def test_every_analysis_has_a_figure_and_one_that_was_not_made_has_none(inspected):
    names = ["attention", "relation", "offsets", "skips", "pre-projections", "queries", "explained", "ablations"]
    made = module.figures(inspected)
    assert list(made) == names
    assert all(drawn.title and drawn.caption and drawn.svg.rstrip().endswith("</svg>") for drawn in made.values())
    nothing = {name: [] for name in vars(inspected)} | {"ablations": None}
    assert module.figures(Item(**nothing)) == {}
    relations = Item(**nothing | {"relations": inspected.relations})
    assert module.figures(relations) == {name: made[name] for name in ("relation", "offsets")}


def test_maps_have_a_cell_a_head_and_the_patch_a_row_of_its_own(inspected, axes):
    assert len(axes("relation")) == 3 + 3  # with their colour bars
    for ax, name in zip(axes("relation"), ("symmetric", "positive_energy", "effective_rank"), strict=False):
        expected = [
            [getattr(head.here, name) for head in inspected.relations if head.layer == layer] for layer in LAYERS
        ]
        assert ax.collections[0].get_array().tolist() == expected
    inspected.relations_patched = inspected.relations[2:]
    figure = next(figure for name, _, _, figure in module._drawn(inspected) if name == "relation")
    titles = [ax.get_title() or ax.get_title(loc="left") for ax in figure.axes]
    assert titles[3:6] == ["symmetric share, with the patch", "positive share, with the patch", "effective rank, with the patch"]  # noqa: E501  # fmt: skip
    assert figure.axes[3].collections[0].get_array().mask.tolist() == [[True] * 2, [False] * 2, [False] * 2]


def test_relations_by_offset_are_the_mean_over_heads_a_line_a_layer(axes):
    symmetric, _, norm = axes("offsets")
    lines = [line for line in values(symmetric) if line != [0.5, 0.5]]
    assert lines == [pytest.approx(line) for line in ([0.15, 0.075], [0.35, 0.175], [0.55, 0.275])]
    assert values(norm) == [pytest.approx([1.0, 0.5])] * 3


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_without_rope_has_no_line_by_offset(inspected, layer):
    for head in inspected.relations[2 * layer : 2 * layer + 2]:
        del head.by_offset[4]
    (figure,) = [figure for name, _, _, figure in module._drawn(inspected) if name == "offsets"]
    assert len(values(figure.axes[0])) == len(LAYERS)  # one fewer, and the line at 0.5


def test_sizes_are_marks_at_their_layers_on_an_axis_from_zero(axes):
    norms, sizes = axes("skips")
    assert values(norms) == [[1.0, 2.0, 3.0], [9.0, 9.0, 9.0]]
    assert (norms.get_ylim()[1], sizes.get_ylim()[1]) == pytest.approx((1.12 * 9.0, 1.12 * 22.0))  # no mark is cut
    assert values(sizes) == values(axes("pre-projections")[0]) == [[20.0, 21.0, 22.0]]
    assert {ax.get_ylim()[0] for ax in (norms, sizes)} == {0.0}


def test_queries_are_those_of_the_query_path_and_shares_below_zero_at_the_bottom(axes):
    size, cosine = axes("queries")
    assert values(size) == [[0.5] * 3]
    assert values(cosine) == [[-0.5] * 3, [0, 0]]
    logits, change = axes("explained")
    assert values(logits) == [[0.5, -0.05] * 3]
    assert values(change) == [[0.25] * 3]


def test_ablations_have_an_interval_a_row(axes):
    (ax,) = axes("ablations")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["layer 0", "layer 1", "layer 2", "all"]
    assert list(ax.lines[0].get_xdata()) == [1.0] * 4
    ends = [segment[:, 0].tolist() for segment in ax.collections[0].get_segments()]
    half = 0.5 * student.ppf(0.975, 5)
    assert ends == [pytest.approx([1 - half, 1 + half])] * 4
