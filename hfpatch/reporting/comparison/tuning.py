"""How the learning rates were chosen: the figure and the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from hfpatch.errors import listed
from hfpatch.reporting import document as doc
from hfpatch.reporting import plots
from hfpatch.reporting.numbers import NOTHING, count, decimal
from hfpatch.reporting.theme import PAPER, report_style, styles
from hfpatch.results.comparison import ComparisonResults


def chosen_facts(results: ComparisonResults, method: str) -> list[doc.Fact]:
    """Return the choice of tuning for a method as a labelled line; none if it was not tuned."""
    choice = results.tuning.chosen.get(method) if results.tuning is not None else None
    if choice is None:
        return []
    if not choice.is_tuned:
        return [("Not tuned", f"all {choice.trials} trials diverged; trained at {_values(choice.values)}")]
    return [("Tuned", f"{_values(choice.values)}, the best of {choice.trials} trials")]


def tuning_sections(results: ComparisonResults, figures: Sequence[doc.Figure]) -> Iterator[doc.Section]:
    """Yield the section on tuning with its figures, where something was tuned."""
    tuning = results.tuning
    if tuning is None or not tuning.trials:
        return
    noun = results.tuned_noun
    rates, added = (listed([f"{rate:g}" for rate in values]) for values in (tuning.learning_rates, tuning.added))
    if tuning.added:
        were = "was" if len(tuning.added) == 1 else "were"
        added = f" {added} {were} added for all {noun}s, because the best rate of one was at the edge."
    if tuning.refined:
        added = f"{added or ''} Then every {noun} was tried at rates between its best and its neighbours."
    trials = listed(sorted({count(choice.trials) for choice in tuning.chosen.values()})) if tuning.chosen else "no"
    plans = {trial.plan for trial in tuning.trials}
    batches = f"the same batches (SHA-256 {str(next(iter(plans)))[:16]}…)" if len(plans) == 1 else "several batch plans"
    sizes = map(tuning.text.get, ("documents", "tokens"))
    documents, tokens = (count(value) if isinstance(value, int) else NOTHING for value in sizes)
    groups = f" in {count(tuning.text['groups'])} groups" if "groups" in tuning.text else ""
    how = (
        f"Every {noun} had {trials} trials: {count(tuning.steps)} steps on {batches} with seed {tuning.seed}, "
        f"which no final run uses, at the learning rates {rates}.{added} The loss on {documents} documents"
        f"{groups} ({tokens} tokens), set aside from the training text and contained in no task, decided; a trial that "
        "diverged counts as infinite. What the choice may be worth: a quarter of the larger excess loss of the two "
        "rates beside it, where no loss counts above the one before training."
    )
    # the choice for each method
    chosen = []
    for method, choice in tuning.chosen.items():
        loss = "all diverged" if choice.loss is None else decimal(choice.loss, 4)
        edge = f"{choice.edge} rate tried" if choice.loss is not None and choice.edge else NOTHING
        rate, values = choice.values.get("lr"), _values(choice.values, without="lr")
        chosen.append((method, _shown(rate), values, loss, count(choice.trials), edge))
    names = (results.noun, "learning rate", "other values", "held-out loss", "trials", "at the edge")
    table = replace(doc.Table.of("chosen", "Chosen rates", names, chosen), heading=False)
    yield doc.Section("tuning", "Tuning", (doc.Text(how), *figures, table))


@report_style()
def tuning_figure(results: ComparisonResults) -> Figure | None:
    """Draw the held-out loss against the learning rate, a curve a method; None where nothing was tuned."""
    tuning = results.tuning
    curves: dict[str, dict[float, float]] = {}  # the lowest loss at each rate, infinite where all trials at it diverged
    for method in results.methods:
        lowest: dict[float, float] = {}
        for trial in tuning.of(method) if tuning is not None else ():
            if trial.rate is not None:
                lowest[trial.rate] = min(trial.compared_loss, lowest.get(trial.rate, np.inf))
        if lowest:
            curves[method] = dict(sorted(lowest.items()))
    losses = [loss for curve in curves.values() for loss in curve.values() if abs(loss) < plots.LARGEST]
    if tuning is None or not losses:
        return None
    looks = styles(list(results.methods), results.baseline, curves)
    figure, (ax,) = plots.panels(1, columns=1, width=7.0, height=3.4, key=len(looks))
    least = min(losses)
    top = least + 1.08 * (plots.robust_limit(loss - least for loss in losses) if max(losses) > least else 1.0)
    for method, curve in curves.items():
        choice, look = tuning.chosen.get(method), looks[method]
        inside = [loss if loss <= top else np.nan for loss in curve.values()]
        ax.plot(list(curve), inside, look.marker, color=look.colour, linestyle=look.dash, linewidth=1.5, markersize=5)
        for rate, loss in curve.items():
            marks: dict[str, Any] = {"color": look.colour, "markersize": 6, "clip_on": False}
            if loss > top:
                marker = look.marker if abs(loss) < plots.LARGEST else "x"
                ax.plot(rate, 0.985, marker, transform=ax.get_xaxis_transform(), **marks)
            elif choice and choice.is_tuned and rate == choice.values.get("lr"):
                ax.plot(rate, loss, "o", markersize=12, markerfacecolor="none", markeredgecolor=look.colour, zorder=4)
                ax.plot(rate, loss, look.marker, markeredgecolor=PAPER, markeredgewidth=0.6, zorder=5, **marks)
    ax.set(xscale="log", xlabel="learning rate", ylabel="held-out loss, nats per token   ↓ better")
    ax.set_ylim(least - 0.08 * (top - least), top)
    ax.xaxis.set_major_locator(FixedLocator(sorted({rate for curve in curves.values() for rate in curve})))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    plots.method_key(figure, looks)
    return figure


def _values(values: Mapping[str, Any], *, without: str = "") -> str:
    return ", ".join(f"{key}={_shown(value)}" for key, value in values.items() if key != without) or NOTHING


def _shown(value: object) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:g}" if number else NOTHING if value is None else str(value)
