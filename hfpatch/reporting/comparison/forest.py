"""The forest of a comparison: its paired differences as gains, for a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from hfpatch.recipes.pairs import in_one_group, is_lora
from hfpatch.reporting import plots
from hfpatch.reporting.document import WORDS, Tone
from hfpatch.reporting.numbers import (
    Change,
    Scale,
    gain_of,
    margin_of,
    margin_text,
    signed,
    task_text,
    unit_text,
)
from hfpatch.reporting.theme import BAND, BLUE, GREY, INK, MUTED, PAPER, VERMILLION, report_style, short
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.verdicts import Verdict
from hfpatch.surgery.card import shown_base

SIZE = "the LoRA of its size"
_OF_ITS_SIZE = 0.1  # as for budgets; the cautions name smaller differences
ANOTHER = "another method"
_WIDTH, _LETTER, _TICK = 5.4, 0.075, 0.6  # inches: of the figure, of a letter of a name, from tick to tick
_ROW, _LOW_ROW = 0.205, 0.17  # inches of a row; the lower one so that the first screen holds all
_FEW_ROWS = 8  # of more rows each is a lower one
_LEGEND_ROW = 0.19  # inches of each row of the legend but the first
_LOOKS: dict[Tone, tuple[str, str, str]] = {  # colour, marker and the face of the marker
    "better": (BLUE, "o", BLUE),
    "worse": (VERMILLION, "D", VERMILLION),
    "same": (INK, "s", INK),
    "undecided": (GREY, "o", PAPER),
    "not tested": (GREY, "x", GREY),
}
EXPLORATORY, TRIED = "†", "‡"
FOOTNOTES = {
    EXPLORATORY: "†: exploratory.",
    TRIED: "‡: at the rates tried.",
    "(needs ": "Needed is what decides in 80 % of cases at the difference seen.",
}
"""The footnotes of a secondary outcome, of one that another learning rate may turn, and of an undecided one."""


@dataclass(frozen=True)
class ForestRow:
    """One pair: its name, verdict, gain with the interval of the verdict, and the ends of the plain interval."""

    name: str
    verdict: Verdict
    gain: Change
    plain: tuple[float, float]

    @property
    def margin(self) -> float | None:
        """The margin in the unit of the gain; in per cent it depends on the reference's own value."""
        return margin_of(self.verdict, self.gain)

    @property
    def tried(self) -> bool:
        """Whether its outcome holds at the rates tried."""
        return bool(self.verdict.at_rates_tried)


@dataclass(frozen=True)
class Forest:
    """The differences that answer the first question."""

    task: str
    other: str  # what each method is compared with, in words
    rows: tuple[ForestRow, ...]  # in the order of the recipe
    unit: str
    limits: tuple[float, float]  # of an axis


def asked(results: ComparisonResults) -> list[Verdict]:
    """Return the verdicts of the first question, on one task: is it better, or, if no pair asks it, than the base."""
    gains = [verdict for verdict in results.primary if verdict.question == "gain"]
    gains = gains or [verdict for verdict in results.against_baseline if verdict.task == results.first_task]
    return [verdict for verdict in gains if verdict.task == gains[0].task]


def control_for(results: ComparisonResults, name: str) -> str | None:
    """Return the method that a method is compared with: by the primary question, else a LoRA, nearest in size.

    None for a LoRA that no question compares, and for a method that is compared with none.
    """
    asked_of = next((pair.other for pair in results.primary if pair.question == "gain" and pair.method == name), None)
    if asked_of is not None or is_lora(results.methods[name].parts):
        return asked_of
    if results.study is not None:
        return results.baseline
    declared = dict.fromkeys(pair.other for pair in results.verdicts if pair.question == "lora" and pair.method == name)
    loras = [other for other in declared if other in results.methods]
    size = results.methods[name].trainable
    anchors = {other: [method.match.to] if method.match else [] for other, method in results.methods.items()}
    matched = next((other for other in loras if in_one_group(anchors, name, other)), None)
    return matched or min(loras, key=lambda other: abs(results.methods[other].trainable - size), default=None)


def others_text(results: ComparisonResults, verdicts: Sequence[Verdict]) -> str:
    """Return what the methods are compared with: one name, the LoRA of its size, a LoRA, or another method."""
    others = list(dict.fromkeys(verdict.other for verdict in verdicts))
    if len(others) == 1:
        return others[0]
    return loras_text(results, [(verdict.method, verdict.other) for verdict in verdicts]) or ANOTHER


def loras_text(results: ComparisonResults, compared: Sequence[tuple[str, str]]) -> str:
    """Return what LoRAs are to the methods compared with them; nothing where some are no LoRAs."""
    if not are_loras(results, [other for _, other in compared]):
        return ""
    sizes = [[results.methods[name].trainable for name in pair] for pair in compared]
    return SIZE if all(abs(other - method) <= _OF_ITS_SIZE * method for method, other in sizes) else "a LoRA"


def are_loras(results: ComparisonResults, names: Sequence[str]) -> bool:
    """Say whether all of these are LoRAs of the run."""
    return all(name in results.methods and is_lora(results.methods[name].parts) for name in names)


def forest_of(results: ComparisonResults) -> Forest | None:
    """Return the forest of the first question; None where nothing was measured for it."""
    verdicts, rows = asked(results), list[ForestRow]()
    other = others_text(results, verdicts)
    loras = [verdict.other for verdict in verdicts if are_loras(results, [verdict.other])]
    unnamed = {other, *(loras or [str(results.baseline)])}  # rows name all but these
    for verdict in verdicts:
        gain, plain = gain_of(results, verdict), gain_of(results, verdict, plain=True)
        if gain is not None and plain is not None:
            name = verdict.method if verdict.other in unnamed else f"{verdict.method} − {verdict.other}"
            rows.append(ForestRow(name, verdict, gain, (plain.low, plain.high)))
    if other == ANOTHER:
        of_loras = [(verdict.method, verdict.other) for verdict in verdicts if verdict.other in loras]
        other = f"{loras_text(results, of_loras) if loras else results.baseline}, or what is named"
    if not rows:
        return None
    margins = [row.margin for row in rows if row.margin is not None and row.margin < plots.LARGEST]
    sizes = []  # to the farthest end of an interval, but not to that of an outlier
    for gain in (row.gain for row in rows):
        sizes.append(max((abs(end) for end in (gain.difference, gain.low, gain.high) if math.isfinite(end)), default=0))
    most = plots.robust_limit(sizes, 4.0)
    ends = [end for row in rows for end in (row.gain.difference, row.gain.low, row.gain.high) if math.isfinite(end)]
    left, right = max(-most, min([0.0, *ends])), min(most, max([0.0, *ends]))
    band = 1.5 * max(margins, default=0.0)
    left, right = min(left, -band), max(right, band)
    space = 0.05 * (right - left) or 1.0
    return Forest(
        task=rows[0].verdict.task,
        other=other,
        rows=tuple(rows),
        unit=unit_text(rows[0].verdict.metric, rows[0].gain.scale),
        limits=(left - space, right + space),
    )


@report_style()
def forest_figure(results: ComparisonResults, *, title: bool = False) -> Figure | None:
    """Draw the differences of the first question, a row a pair; None where nothing was measured.

    The thin line is the interval of the outcome, the thick one the plain interval, the band the margin. With ``title``
    the figure can be shown alone.
    """
    forest = forest_of(results)
    if forest is None:
        return None
    model = shown_base(str(results.model.get("name") or results.name or "the base model"))  # the figure may be shared
    counts = sorted({row.verdict.seeds for row in forest.rows})  # some pairs may have fewer than others
    seeds = f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seed{'s' * (counts[-1] != 1)}"
    shown = f"{short(task_text(forest.task))}, {short(model, 40)}, {seeds}"
    rows, names = forest.rows, [row.name + f" {TRIED}" * row.tried for row in forest.rows]
    height = (1.15 if title else 0.9) + (_ROW if len(rows) <= _FEW_ROWS else _LOW_ROW) * len(rows)
    figure, (ax,) = plots.panels(1, columns=1, width=_WIDTH, height=height, title=shown if title else "")
    ax.set_xlim(forest.limits)
    for y, row in enumerate(rows):
        _draw_row(ax, y, row, forest.limits)
    ax.axvline(0, color=MUTED, linewidth=1.0, zorder=2)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    plots.named_rows(ax, names)
    room = _WIDTH - _LETTER * max(map(len, names))
    ax.xaxis.set_major_locator(MaxNLocator(min(6, max(2, int(room / _TICK)))))
    exploratory = "" if all(row.verdict.role == "primary" for row in rows) else ", exploratory"
    axis_label = f"gain over {short(forest.other, 44)}, {forest.unit}{exploratory} (better →)"
    ax.set_xlabel(axis_label, loc="right")  # it may be wider than the panel
    handles: list[Line2D | Patch] = []
    for tone, (colour, marker, face) in _LOOKS.items():
        if any(row.verdict.tone == tone for row in forest.rows):
            look: dict[str, Any] = {"color": colour, "marker": marker, "markerfacecolor": face, "linewidth": 1.8}
            handles.append(Line2D([], [], label=WORDS.get(tone, tone), **look))
    margins = {margin_text(row.verdict, row.gain) for row in forest.rows} - {""}
    if margins:
        handles.append(Patch(color=BAND, label=f"within {margins.pop() if len(margins) == 1 else 'the margin'}"))
    if tried := any(row.tried for row in forest.rows):
        handles.append(Line2D([], [], linestyle="none", label=FOOTNOTES[TRIED].rstrip(".")))
    columns = 3 if tried else 5  # the note is longer than the words
    figure.set_figheight(height + _LEGEND_ROW * (math.ceil(len(handles) / columns) - 1))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handletextpad=0.5, columnspacing=1.8)
    return figure


def _draw_row(ax: Axes, y: int, row: ForestRow, limits: tuple[float, float]) -> None:
    """Draw margin, both intervals and the mark of a difference; outside the limits an arrow with its number."""
    left, right = limits
    if row.margin is not None:
        ax.add_patch(Rectangle((-row.margin, y - 0.5), 2 * row.margin, 1, color=BAND, linewidth=0, zorder=1))
    gain, (colour, marker, face) = row.gain, _LOOKS[row.verdict.tone]
    for (low, high), width in (((gain.low, gain.high), 0.9), (row.plain, 2.8)):
        if math.isfinite(high - low):
            ends = (min(max(end, left), right) for end in (low, high))
            ax.hlines(y, *ends, color=colour, linewidth=width, zorder=3)
    if left <= gain.difference <= right:
        ax.plot(gain.difference, y, marker, color=colour, markerfacecolor=face, markersize=6.5, zorder=4)
        return
    above = gain.difference > right
    edge, offset, side = (0.97, -6, "right") if above else (0.03, 6, "left")
    transform = ax.get_yaxis_transform()
    ax.plot(edge, y, marker=">" if above else "<", color=colour, markersize=6.5, zorder=4, transform=transform)
    text = signed(gain.difference, 0 if abs(gain.difference) >= 10 else 2)
    text += " %" if gain.scale is Scale.RELATIVE else ""
    ax.annotate(text, (edge, y), (offset, 0), transform, "offset points", ha=side, va="center", color=INK)
