"""The tables of a study: its variants, every point of the sweep, f layer by layer, and every run as CSV."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from hfpatch.reporting.document import Cell, Column, Row, Table
from hfpatch.reporting.facts import settings_text
from hfpatch.reporting.numbers import NOTHING, count, decimal, diverged_text, interval, p_text, signed
from hfpatch.reporting.study.answer import improvement_text, key_text, not_run_text, point_text, share, value_text
from hfpatch.reporting.tabular import csv_text
from hfpatch.results import schema
from hfpatch.results.schema import Diagnostic, StudyResults, StudyRun

_TEXT = {"configuration", "query", "best point", "verdict", "state", "description", "architecture", "target"}
_TEXT |= {"own training settings"}
_NARROW = {"configuration", "validation loss", "improvement, %", "verdict"}


def main_table(study: StudyResults) -> Table:
    """Build the table of the variants, each at its best point: parameters, loss, improvement, test and cost."""
    points = any(row.point for row in study.chosen.values())
    headings = ("configuration", "query", *(("best point",) if points else ()), "parameters", "to baseline")
    headings += ("validation loss", "improvement, %", "corrected", "verdict", "p", "p (Holm)", "s/step")
    rows = []
    for name, variant in study.variants.items():
        row, is_baseline = study.chosen.get(name), name == study.baseline
        found = None if is_baseline else study.verdict(name)
        tested = found is not None and found.p_corrected is not None
        said = f"{found.outcome} ({found.why})" if found and found.why else found.outcome if found else ""
        if row is None or row.improvement is None:
            said = diverged_text(row.diverged) if row is not None and row.diverged else "not compared"
        point = NOTHING
        if row is not None:
            point = point_text(row.point) + ("" if row.best else " (seeds diverged)" if row.diverged else " (so far)")
        cells = (
            name,
            variant.query or NOTHING,
            *((point,) if points else ()),
            count(variant.parameters.non_embedding),
            NOTHING if is_baseline else f"{signed(100 * share(study, name), 2)} %",
            _loss(row),
            improvement_text(row.improvement if row is not None and not is_baseline else None),
            interval(100 * found.corrected_low, 100 * found.corrected_high, 2) if found and tested else NOTHING,
            "baseline" if found is None else Cell((said,), found.tone),
            p_text(found.p if found else None),
            p_text(found.p_corrected if found else None),
            _seconds(row, None if is_baseline else study.chosen.get(study.baseline)),
        )
        rows.append(Row(cells, strong=is_baseline))
    uneven = any(row.improvement.choices > 1 for row in study.rows if row.improvement is not None)
    choices = " (corrected, as p is, where one of the two was chosen from more points)" if uneven else ""
    caption = (
        "Parameters: non-embedding, and how many more than the baseline has. Validation loss: nats per token on the "
        "fixed evaluation blocks after the last step, mean ± standard deviation over seeds. Improvement: (L of the "
        "baseline − L) / L of the baseline, paired by seed, in per cent, with its 95 % interval by Student's t over "
        f"seeds{choices}; above zero is better. Better, worse: a test at 5 % with Holm's correction over all variants, "
        "to which the corrected interval belongs; what it does not find is not decided. "
        "s/step: the median seconds of an optimiser step, and how many times the baseline's."
    )
    return Table("main", "Variants", _columns(headings), tuple(rows), caption, heading=False)


def terminal_table(study: StudyResults) -> Table:
    """Build the main table for a terminal: without the queries; in a narrow one only loss, improvement and verdict."""
    main, tables = main_table(study), []
    for kept in ({column.name for column in main.columns} - {"query"}, _NARROW):
        places = [place for place, column in enumerate(main.columns) if column.name in kept]
        columns = tuple(main.columns[place] for place in places)
        rows = tuple(replace(row, cells=tuple(row.cells[place] for place in places)) for row in main.rows)
        tables.append(replace(main, caption="", columns=columns, rows=rows))
    return replace(tables[0], narrow=(tables[1],))


def sweep_table(study: StudyResults) -> Table:
    """Build the table of every point of every variant."""
    keys = tuple(dict.fromkeys(key for row in study.rows for key in row.point))
    headings = ("configuration", *map(key_text, keys), "validation loss", "seeds", "improvement, %", "s/step", "state")
    rows = []
    for row in study.rows:
        point = (value_text(row.point[key]) if key in row.point else NOTHING for key in keys)
        seeds = count(len(row.loss.values)) if row.loss else "0"
        states = "best" * row.best, diverged_text(row.diverged), not_run_text(row.missing) if row.missing else ""
        state = "; ".join(filter(None, states)) or "complete"
        cells = row.variant, *point, _loss(row), seeds, improvement_text(row.improvement), _seconds(row), state
        rows.append(Row(cells, strong=row.best))
    caption = (
        "Every point of every variant; the best of each is the one of lowest mean loss. Improvements are compared with "
        "the baseline's best point. Points are chosen on the evaluation text on which the losses are reported, which "
        "favours the best of many."
    )
    return Table("points", "Points", _columns(headings), tuple(rows), caption, heading=False)


def variant_table(study: StudyResults) -> Table:
    """Build the table of variants, with the parts of their architectures that differ."""
    common = study.common_architecture
    rows = []
    for name, each in study.variants.items():
        own = {key: value for key, value in each.architecture.items() if key not in common}
        texts = each.description, settings_text(own), settings_text(each.training), count(each.parameters.total)
        rows.append(Row((name, *(text or NOTHING for text in texts))))
    columns = _columns(("configuration", "description", "architecture", "own training settings", "parameters in all"))
    caption = "Of architectures what differs; what all have in common is under Protocol and provenance."
    return Table("variants", "Configurations", columns, tuple(rows), caption)


def diagnostics_table(study: StudyResults) -> Table:
    """Build the table of f in each layer at the last measured step."""
    rows = []
    for series in series_of(study):
        for layer, points in series.layers.items():
            step, *measured = points[-1]
            size, cosine = (NOTHING if value is None else decimal(value, 3) for value in measured)
            rows.append(
                Row((series.variant, series.target, str(layer), count(step), size, cosine, count(series.seeds)))
            )
    caption = (
        "The mean over tokens and seeds at the last step that was measured: ‖f(x)‖/‖A(x)‖ and the cosine of f(x) and "
        "A(x), A the anchor (x itself where the anchor is the identity)."
    )
    columns = _columns(("configuration", "target", "layer", "step", "‖f‖/‖A‖", "cos(f, A)", "seeds"))
    return Table("layers", "At the last step", columns, tuple(rows), caption)


def _columns(headings: Iterable[str]) -> tuple[Column, ...]:
    return tuple(Column(heading, number=heading not in _TEXT) for heading in headings)


def _loss(row: schema.Row | None) -> str:
    """Return the loss at the end over seeds, ``4.1000 ± 0.0100``; of one seed the value alone."""
    if row is None or row.loss is None:
        return NOTHING
    has_spread = row.loss.sd is not None and len(row.loss.values) > 1
    return decimal(row.loss.mean, 4) + (f" ± {decimal(row.loss.sd or 0, 4)}" if has_spread else "")


def _seconds(row: schema.Row | None, baseline: schema.Row | None = None) -> str:
    """Return seconds a step with three significant digits, and how many times the baseline's they are."""
    if row is None or row.seconds_per_step is None:
        return NOTHING
    base = baseline.seconds_per_step if baseline is not None else None
    return f"{row.seconds_per_step:.3g}" + (f" (×{row.seconds_per_step / base:.2f})" if base else "")


LayerPoints = Sequence[tuple[int, float | None, float | None]]
"""Step, ‖f‖/‖A‖, cosine; ascending."""


@dataclass(frozen=True)
class FSeries:
    """Size and direction of f in one variant, the mean over seeds.

    Attributes:
        variant: the variant, at its best point.
        target: query, key or value.
        layers: layer -> its points.
        seeds: the number of seeds in the mean.
    """

    variant: str
    target: str
    layers: Mapping[int, LayerPoints]
    seeds: int


def series_of(study: StudyResults) -> list[FSeries]:
    """Return a series for each variant and target that recorded one, in the order of the recipe."""
    found = []
    for row in study.chosen.values():
        runs = [run for run in _whole(study.runs_of(row)) if run.diagnostics]
        for target in dict.fromkeys(each.target for run in runs for each in run.diagnostics):
            by_layer: dict[int, dict[int, list[Diagnostic]]] = defaultdict(lambda: defaultdict(list))
            for each in (each for run in runs for each in run.diagnostics if each.target == target):
                by_layer[each.layer][each.step].append(each)
            layers = {
                layer: [
                    (step, _mean(e.size for e in at), _mean(e.cosine for e in at)) for step, at in sorted(by.items())
                ]
                for layer, by in sorted(by_layer.items())
            }
            found.append(FSeries(row.variant, target, layers, len(runs)))
    return found


def spread_of(study: StudyResults, row: schema.Row) -> list[tuple[int, float]]:
    """Return step and standard deviation (n - 1) over seeds of the validation loss, where two seeds or more have it."""
    losses: dict[int, list[float]] = defaultdict(list)
    runs = _whole(study.runs_of(row))
    for run in runs:
        for step, loss in dict(run.evaluation).items():
            if loss is not None:
                losses[step].append(loss)
    spread = []
    for step, values in sorted(losses.items()):
        if len(values) == len(runs) > 1:  # `statistics.stdev` gives other last digits before Python 3.11
            mean = fmean(values)
            spread.append((step, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))))
    return spread


def _whole(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """Return the runs that are complete; where none is, all, so that a mean has the same seeds at every step."""
    return [run for run in runs if run.outcome == "complete"] or list(runs)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def study_csv(study: StudyResults) -> str:
    """Return every run, a line each: variant, sweep point, seed, how it ended, its loss, size and cost."""
    keys = list(dict.fromkeys(key for row in study.rows for key in row.point))
    of_run = ("steps", "tokens", "wall_s", "peak_memory_bytes")
    rows = []
    for row in study.rows:
        parameters = study.variants[row.variant].parameters
        point = [value_text(row.point[key]) if key in row.point else None for key in keys]
        runs = {run.seed: run for run in study.runs_of(row)}
        losses = row.loss.values if row.loss is not None else {}
        for seed in sorted({*runs, *losses, *row.diverged, *row.missing}):
            run = runs.get(seed)
            outcome = "diverged" if seed in row.diverged else "missing" if seed in row.missing else "complete"
            ending = run.outcome if run is not None else outcome
            diverged = row.diverged.get(seed, run.diverged_step if run is not None else None)
            cost = (getattr(run.train if run is not None else None, name, None) for name in of_run)
            start = row.variant, *point, int(row.best), seed
            rows.append((*start, ending, diverged, losses.get(seed), *cost, parameters.non_embedding, parameters.total))
    headings = ("variant", *keys, "best", "seed", "outcome", "diverged_step", "validation_loss", *of_run)
    return csv_text((*headings, "non_embedding", "parameters"), rows)
