"""What the page of a study holds: its sections, for HTML and Markdown alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hfpatch.reporting.answer import Answer
from hfpatch.reporting.facts import Fact, provenance_facts
from hfpatch.reporting.page import FigurePart, Frame, Page
from hfpatch.reporting.study import captions
from hfpatch.reporting.study.answer import answer_of
from hfpatch.reporting.study.cautions import cautions
from hfpatch.reporting.study.data import figure_csv
from hfpatch.reporting.study.facts import glance, study_facts
from hfpatch.reporting.study.results import StudyResults
from hfpatch.reporting.study.tables import TextTable, diagnostics_table, main_table, sweep_table, variant_table


@dataclass(frozen=True)
class Section:
    """One section: what it holds of facts, sentences, tables and a figure.

    Attributes:
        name: its anchor.
        title: its heading.
        facts: labelled lines.
        sentences: what stands as a list.
        missing: what is missing, as a list of its own.
        figure: its figure.
        tables: its tables; the first without a heading of its own where it is all that the section begins with.
        text: a paragraph.
    """

    name: str
    title: str
    facts: tuple[Fact, ...] = ()
    sentences: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    figure: FigurePart | None = None
    tables: tuple[TextTable, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class StudyPanel(Frame):
    """A study on the page."""

    study: StudyResults
    answer: Answer
    parts: list[Section]


def study_page(study: StudyResults, figures: Mapping[str, str]) -> Page:
    """Put the page together; ``figures`` are SVG documents by name."""
    parts = list(_sections(study, figures))
    names = [("answer", "Answer"), *((part.name, part.title) for part in parts)]
    panel = StudyPanel("", "", names, study, answer_of(study), parts)
    return Page(
        title=study.name or "Pretraining study",
        description=study.description,
        complete=study.complete,
        glance=glance(study),
        panels=[panel],
        labels=[],
        checks=(),
        comparability="",
    )


def _sections(study: StudyResults, figures: Mapping[str, str]) -> Iterator[Section]:
    told = cautions(study)
    yield Section("protocol", "Protocol and provenance", facts=tuple(study_facts(study)))
    yield Section("warnings", "Warnings", sentences=tuple(told), missing=study.missing, text="" if told else "None.")
    yield Section("results", "Results", tables=(main_table(study), variant_table(study)))
    for name in ("differences", "loss", "improvement"):
        if name in figures:
            yield Section(name, captions.FIGURES[name][0], figure=_figure(study, name, figures[name]))
    swept = sweep_table(study)
    if any(row.point for row in study.rows):
        yield Section("sweep", "Sweep", tables=(swept,))
    else:
        yield Section("sweep", "Sweep", text=captions.NO_SWEEP, tables=(swept,))
    last = diagnostics_table(study)
    if "diagnostics" in figures:
        drawn = _figure(study, "diagnostics", figures["diagnostics"])
        yield Section("diagnostics", drawn.title, figure=drawn, tables=(last,))
    if "spread" in figures:
        yield Section("spread", captions.FIGURES["spread"][0], figure=_figure(study, "spread", figures["spread"]))
    yield Section("environment", "Environment", facts=tuple(provenance_facts(study.provenance)))


def _figure(study: StudyResults, name: str, svg: str) -> FigurePart:
    title, caption = captions.FIGURES[name]
    return FigurePart(name, title, caption + captions.left_out(len(study.others)), svg, figure_csv(name, study))
