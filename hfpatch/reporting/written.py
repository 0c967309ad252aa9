"""Writing a document to a folder as HTML, Markdown, CSV and figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from hfpatch.reporting.document import Document
from hfpatch.reporting.html import html
from hfpatch.reporting.markdown import markdown
from hfpatch.reporting.theme import report_style, to_png
from hfpatch.support.files import atomic_file, write_text


@dataclass(frozen=True)
class Report:
    """A report as it was written: its files, and the document that they show."""

    html: Path
    markdown: Path
    csv: Path
    figures: tuple[Path, ...]
    document: Document

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file of the report."""
        return (self.html, self.markdown, self.csv, *self.figures)


def write_document(document: Document, out: Path, *, csv: str, summary: Figure | None = None) -> Report:
    """Write ``report.html``, ``report.md``, ``results.csv`` and ``figures/``; the same document gives the same bytes.

    Args:
        document: the report.
        out: the folder.
        csv: the content of ``results.csv``.
        summary: the figure that is understood by itself, in a README say; it becomes ``figures/summary.png``.

    Raises:
        HfpatchError: if ``out`` cannot be written.
    """
    figures: list[Path] = []
    for part in document.parts:
        for name, figure in part.figures.items():
            for ending, text in (("svg", figure.svg), ("csv", figure.data)):
                figures.append(out / "figures" / f"{name}.{ending}")
                write_text(figures[-1], text)
    if summary is not None:
        figures.append(out / "figures" / "summary.png")
        with report_style(), atomic_file(figures[-1]) as temporary:
            temporary.write_bytes(to_png(summary))
    report = Report(out / "report.html", out / "report.md", out / "results.csv", tuple(figures), document)
    write_text(report.csv, csv)
    write_text(report.markdown, markdown(document))
    write_text(report.html, html(document))
    return report
