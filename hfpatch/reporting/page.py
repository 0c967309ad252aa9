"""What the page holds: one panel a run, or one for several that share a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hfpatch.reporting import captions
from hfpatch.reporting.answer import Answer, answer
from hfpatch.reporting.curves import Curve
from hfpatch.reporting.facts import Fact, environment_facts, protocol_facts
from hfpatch.reporting.figure_data import figure_data
from hfpatch.reporting.layers import LayerSeries
from hfpatch.reporting.merging import Check
from hfpatch.reporting.numbers import NOTHING, count, decimal, duration, signed
from hfpatch.reporting.results import Results
from hfpatch.reporting.samples import Samples, Sides
from hfpatch.reporting.tables import MainTable, MethodRow, PairedRow, main_table, method_table, paired_table

Facts = list[tuple[str, list[Fact]]]


@dataclass(frozen=True)
class Material:
    """All that is known of a run, or of several that share a table.

    Attributes:
        title: the run's label where several stand side by side, else nothing.
        results: the results.
        curves: method -> training curve.
        layers: what is known layer by layer.
        samples: the documents that changed sides.
        figures: figure name -> SVG document.
        sources: label -> results of each run behind it, for protocol and environment.
    """

    title: str
    results: Results
    curves: Mapping[str, Curve]
    layers: Sequence[LayerSeries]
    samples: Samples
    figures: Mapping[str, str]
    sources: Mapping[str, Results]


@dataclass(frozen=True)
class FigurePart:
    """A figure with its words and its data."""

    name: str
    title: str
    caption: str
    svg: str
    data: str


@dataclass(frozen=True)
class SidesRow:
    """How many documents changed sides, as text."""

    method: str
    task: str
    gained: str
    lost: str
    net: str
    documents: str
    seeds: str


@dataclass(frozen=True)
class Frame:
    """What every panel has: ``prefix`` begins its anchors, ``sections`` are its anchors with their names."""

    prefix: str
    title: str
    sections: list[tuple[str, str]]


@dataclass(frozen=True)
class Panel(Frame):
    """One run on the page."""

    results: Results
    answer: Answer
    protocol: Facts
    environment: Facts
    main: MainTable
    methods: list[MethodRow]
    paired: list[PairedRow]
    references: list[str]
    figures: list[FigurePart]
    samples: Samples
    sides: list[SidesRow]
    sample_data: dict[str, Any]


@dataclass(frozen=True)
class Page:
    """The whole page."""

    title: str
    description: str
    complete: bool
    glance: list[Fact]
    panels: Sequence[Frame]
    labels: list[str]
    checks: Sequence[Check]
    comparability: str


def page(material: Sequence[Material], checks: Sequence[Check] = ()) -> Page:
    """Put the page together from its runs and the checks of what they have in common."""
    first, results = material[0], [each.results for each in material]
    labels = [label for each in material for label in each.sources]
    return Page(
        title=" and ".join(each.name or "Comparison" for each in results),
        description=first.results.description if len(material) == 1 else "Several runs, side by side.",
        complete=all(each.complete for each in results),
        glance=_glance(results, [source for each in material for source in each.sources.values()]),
        panels=[_panel(each, anchor(material, i)) for i, each in enumerate(material)],
        labels=labels,
        checks=checks,
        comparability=_comparability(checks, joined=len(material) == 1) if checks else "",
    )


def anchor(material: Sequence[Material], place: int) -> str:
    """Return what begins the anchors and the figures' file names of one run; nothing where it is the only one."""
    return f"run{place + 1}-" if len(material) > 1 else ""


def _comparability(checks: Sequence[Check], *, joined: bool) -> str:
    apart = [check.what.lower() for check in checks if check.decides and check.verdict != "same"]
    other = [check.what.lower() for check in checks if not check.decides and check.verdict != "same"]
    if not joined:
        return f"These runs cannot share a table, for they do not agree in: {', '.join(apart)}. Each stands by itself."
    differing = (
        f"They differ, or are not known to agree, in: {', '.join(other)}." if other else "They agree in all else."
    )
    return (
        "These runs measured the same frozen model on the same documents, so they share the tables. Each difference is "
        f"the paired one of its own run; none was tested across runs. {differing}"
    )


def _glance(results: Sequence[Results], sources: Sequence[Results]) -> list[Fact]:
    models = dict.fromkeys(str(each.model.get("name") or NOTHING) for each in results)
    seeds = sorted({seed for each in results for seed in each.seeds})
    times = [each.provenance.get("wall_s") for each in sources]
    known = [time for time in times if isinstance(time, int | float)]
    return [
        ("Frozen model", ", ".join(models)),
        ("Methods", count(len({name for each in results for name in each.methods}))),
        ("Tasks", count(len({name for each in results for name in each.tasks}))),
        ("Seeds", count(len(seeds))),
        ("Protocol", ", ".join(dict.fromkeys(each.protocol.replace("_", " ") for each in results))),
        ("Wall time", duration(sum(known)) if known else NOTHING),
    ]


def labelled(material: Material, facts: Callable[[Results], list[Fact]]) -> Facts:
    """Return the facts of each run behind a panel, without a label where there is one run."""
    several = len(material.sources) > 1
    return [(label if several else "", facts(each)) for label, each in material.sources.items()]


def _panel(material: Material, prefix: str) -> Panel:
    results = material.results
    figures = [_figure(material, name, svg) for name, svg in material.figures.items()]
    return Panel(
        prefix=prefix,
        title=material.title,
        results=results,
        answer=answer(results),
        protocol=labelled(material, protocol_facts),
        environment=labelled(material, environment_facts),
        main=main_table(results),
        methods=method_table(results),
        paired=paired_table(results),
        references=list(dict.fromkeys(each.reference for each in results.comparisons)),
        figures=figures,
        samples=material.samples,
        sides=[sides_row(each) for each in material.samples.sides],
        sample_data=_sample_data(material.samples),
        sections=_sections(figures, material.samples),
    )


def _sections(figures: Sequence[FigurePart], samples: Samples) -> list[tuple[str, str]]:
    return [
        *(("answer", "Answer"), ("protocol", "Protocol"), ("warnings", "Warnings"), ("results", "Results")),
        *((figure.name, captions.SHORT[figure.name]) for figure in figures),
        ("paired", "Paired differences"),
        *([("samples", "What changed sides")] if samples.sides else []),
        ("environment", "Environment"),
    ]


def _figure(material: Material, name: str, svg: str) -> FigurePart:
    title, caption = captions.FIGURES[name]
    data = figure_data(name, material.results, material.curves, material.layers)
    return FigurePart(name, title, caption + captions.left_out(material.results), svg, data)


def sides_row(sides: Sides) -> SidesRow:
    """Return how many documents changed sides as text; a measure without right or wrong has no sides."""
    known = sides.gained is not None and sides.lost is not None
    return SidesRow(
        method=sides.method,
        task=sides.task,
        gained=count(sides.gained),
        lost=count(sides.lost),
        net=signed((sides.gained or 0) - (sides.lost or 0), 0) if known else NOTHING,
        documents=count(sides.documents),
        seeds=decimal(sides.seeds, 0),
    )


def _sample_data(samples: Samples) -> dict[str, Any]:
    """Return what the page's script lists: sides by method and task, and the documents they name."""
    methods = list(dict.fromkeys(side.method for side in samples.sides))
    tasks = list(dict.fromkeys(side.task for side in samples.sides))
    table: list[list[dict[str, Any] | None]] = [[None] * len(tasks) for _ in methods]
    for side in samples.sides:
        table[methods.index(side.method)][tasks.index(side.task)] = {
            "seeds": side.seeds,
            "binary": side.gained is not None,
            "left_out": side.left_out,
            "changes": [[change.document, round(change.gained, 6), change.lost] for change in side.changes],
        }
    return {"methods": methods, "tasks": tasks, "sides": table, "documents": samples.documents}
