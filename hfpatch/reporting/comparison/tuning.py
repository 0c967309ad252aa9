"""How the learning rates were chosen: the figure and the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from hfpatch.reporting import document as doc
from hfpatch.reporting import plots
from hfpatch.reporting.numbers import NOTHING, count, decimal, listed
from hfpatch.reporting.tabular import csv_text
from hfpatch.reporting.theme import PAPER, Style, report_style, styles
from hfpatch.results.schema import ComparisonResults, Trial, Tuning

_CAPTION = (
    "The loss on the text of tuning, nats per token, after a trial at each learning rate; of several trials at one "
    "rate the lowest. The ringed mark is the choice. A mark at the upper edge lies above the panel; a cross diverged."
)
_SIZES = ("documents", "tokens")


def chosen_facts(results: ComparisonResults, method: str) -> list[doc.Fact]:
    """Return what tuning chose for a method, as a labelled line, if it was tuned."""
    choice = results.tuning.chosen.get(method) if results.tuning is not None else None
    if choice is None:
        return []
    if not choice.is_tuned:
        return [("Not tuned", f"all {choice.trials} trials diverged; trained at {_values(choice.values)}")]
    where = f" of {choice.at}" if choice.at is not None else ""
    return [("Tuned", f"{_values(choice.values)}, the best of {choice.trials} trials{where}")]


def tuning_sections(results: ComparisonResults, svg: str | None, data: str) -> Iterator[doc.Section]:
    """Yield the section on tuning, where something was tuned; ``svg`` is its figure, ``data`` the figure's CSV."""
    tuning = results.tuning
    if tuning is None or not tuning.trials:
        return
    blocks: list[doc.Block] = [doc.Text(_how(tuning))]
    if svg is not None:
        title = "Held-out loss against learning rate"
        blocks.append(doc.Figure("tuning", title, _CAPTION, svg, data))
    blocks += [choice_table(results), trial_table(results)]
    yield doc.Section("tuning", "Tuning", tuple(blocks))


def _how(tuning: Tuning) -> str:
    rates = listed([f"{rate:g}" for rate in tuning.learning_rates])
    trials = listed(sorted({count(each.trials) for each in tuning.chosen.values()})) if tuning.chosen else "no"
    added = ""
    if tuning.added:
        were = "was" if len(tuning.added) == 1 else "were"
        shown = listed([f"{rate:g}" for rate in tuning.added])
        added = f" {shown} {were} added for all methods, because the best rate of one was at the edge."
    plans = {trial.plan for trial in tuning.trials}
    batches = f"the same batches (SHA-256 {str(next(iter(plans)))[:16]}…)" if len(plans) == 1 else "several batch plans"
    documents, tokens = (count(value) if isinstance(value, int) else NOTHING for value in map(tuning.text.get, _SIZES))
    return (
        f"Every method had {trials} trials: {count(tuning.steps)} steps on {batches} with seed {tuning.seed}, which no "
        f"final run uses, at the learning rates {rates}.{added} The loss on {documents} documents ({tokens} tokens), "
        "taken away from the training text and contained in no task, decided; a "
        "trial that diverged counts as infinite."
    )


def choice_table(results: ComparisonResults) -> doc.Table:
    """Build the table of what was chosen for each method."""
    names = ("method", "learning rate", "other values", "held-out loss", "trials", "at the edge")
    rows = []
    for method, choice in results.tuning.chosen.items() if results.tuning is not None else ():
        others = _values({key: value for key, value in choice.values.items() if key != "lr"})
        loss = "all diverged" if choice.loss is None else decimal(choice.loss, 4)
        edge = NOTHING if choice.loss is None else f"{choice.edge} rate tried" if choice.edge else "no"
        trials = count(choice.trials) + (f" of {choice.at}" if choice.at is not None else "")
        rows.append(doc.Row((method, _shown(choice.values.get("lr")), others, loss, trials, edge)))
    numbers = ("learning rate", "held-out loss", "trials")
    columns = tuple(doc.Column(name, number=name in numbers) for name in names)
    return doc.Table("chosen", "Chosen rates", columns, tuple(rows))


def trial_table(results: ComparisonResults) -> doc.Table:
    """Build the table of all trials."""
    rows = []
    for trial in _trials(results):
        others = _values({key: value for key, value in trial.values.items() if key != "lr"})
        chosen = "chosen" if _is_chosen(results, trial) else ""
        rows.append(doc.Row((trial.method, _shown(trial.values.get("lr")), others, _outcome(trial), chosen)))
    names = ("method", "learning rate", "other values", "held-out loss", "choice")
    columns = tuple(doc.Column(name, number=name in ("learning rate", "held-out loss")) for name in names)
    return doc.Table("trials", "All trials", columns, tuple(rows), search=True, folded=True)


def tuning_csv(results: ComparisonResults) -> str:
    """Return every trial, a column for each value that was tuned."""
    trials = _trials(results)
    keys = list(dict.fromkeys(key for trial in trials for key in trial.values))
    headings = ("method", *keys, "loss", "diverged_step", "chosen", "seed", "plan")
    return csv_text(
        headings,
        (
            (
                trial.method,
                *(trial.values.get(key) for key in keys),
                trial.loss,
                trial.diverged_step,
                "yes" if _is_chosen(results, trial) else "no",
                trial.seed,
                trial.plan,
            )
            for trial in trials
        ),
    )


@report_style()
def tuning_figure(results: ComparisonResults) -> Figure | None:
    """Draw the held-out loss against the learning rate, a curve a method; None where nothing was tuned."""
    tuning = results.tuning
    curves = {method: _curve(tuning, method) for method in results.others} if tuning is not None else {}
    curves = {method: curve for method, curve in curves.items() if curve}
    losses = [loss for curve in curves.values() for loss in curve.values() if abs(loss) < plots.LARGEST]
    if tuning is None or not losses:
        return None
    looks = styles(list(results.methods), results.baseline, curves)
    figure, axes = plots.panels(1, columns=1, width=7.0, height=3.4, key=len(looks))
    lowest = min(losses)
    top = lowest + 1.08 * (plots.robust_limit(loss - lowest for loss in losses) if max(losses) > lowest else 1.0)
    for method, curve in curves.items():
        choice = tuning.chosen.get(method)
        _draw(axes[0], curve, looks[method], top, choice.values.get("lr") if choice and choice.is_tuned else None)
    rates = sorted({rate for curve in curves.values() for rate in curve})
    axes[0].set(xscale="log", xlabel="learning rate", ylabel="held-out loss, nats per token   ↓ better")
    axes[0].set_ylim(lowest - 0.08 * (top - lowest), top)
    axes[0].xaxis.set_major_locator(FixedLocator(rates))
    axes[0].xaxis.set_minor_locator(NullLocator())
    axes[0].xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    plots.method_key(figure, looks)
    return figure


def _draw(ax: Axes, curve: Mapping[float, float], look: Style, top: float, chosen: object) -> None:
    inside = [loss if loss <= top else np.nan for loss in curve.values()]
    ax.plot(list(curve), inside, look.marker, color=look.colour, linestyle=look.dash, linewidth=1.5, markersize=5)
    for rate, loss in curve.items():
        marks: dict[str, Any] = {"color": look.colour, "markersize": 6, "clip_on": False}
        if loss > top:
            marker = look.marker if abs(loss) < plots.LARGEST else "x"
            ax.plot(rate, 0.985, marker, transform=ax.get_xaxis_transform(), **marks)
        elif rate == chosen:
            ax.plot(rate, loss, "o", markersize=12, markerfacecolor="none", markeredgecolor=look.colour, zorder=4)
            ax.plot(rate, loss, look.marker, markeredgecolor=PAPER, markeredgewidth=0.6, zorder=5, **marks)


def _curve(tuning: Tuning, method: str) -> dict[float, float]:
    """Return the lowest loss at each rate, infinite where all trials at it diverged."""
    lowest: dict[float, float] = {}
    for trial in tuning.of(method):
        if trial.rate is not None:
            loss = np.inf if trial.loss is None else trial.loss
            lowest[trial.rate] = min(loss, lowest.get(trial.rate, np.inf))
    return dict(sorted(lowest.items()))


def _trials(results: ComparisonResults) -> list[Trial]:
    """Return the trials method by method, in the order of the results."""
    tuning = results.tuning
    return [trial for method in results.methods for trial in tuning.of(method)] if tuning is not None else []


def _is_chosen(results: ComparisonResults, trial: Trial) -> bool:
    return results.tuning is not None and results.tuning.is_chosen(trial)


def _outcome(trial: Trial) -> str:
    if trial.diverged_step is not None:
        return f"diverged at step {trial.diverged_step:,}"
    return "not finite" if trial.loss is None else decimal(trial.loss, 4)


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_shown(value)}" for key, value in values.items()) or NOTHING


def _shown(value: object) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:g}" if number else NOTHING if value is None else str(value)
