"""A report as it was written, and what writing one of any kind shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from hfpatch.reporting.results import Results
from hfpatch.reporting.study.results import StudyResults
from hfpatch.reporting.theme import to_png
from hfpatch.support.files import atomic_file, write_text


@dataclass(frozen=True)
class Report:
    """Where a report was written, and the results that it tells: one run, or one for each that stands by itself.

    Of a pretraining study ``study`` holds the results, and there are no runs.
    """

    html: Path
    markdown: Path
    csv: Path
    figures: tuple[Path, ...]
    runs: tuple[Results, ...]
    study: StudyResults | None = None

    @property
    def results(self) -> Results:
        """The results of the first."""
        return self.runs[0]

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file of the report."""
        return (self.html, self.markdown, self.csv, *self.figures)


def write_figures(texts: Mapping[Path, str], summary: Figure | None, folder: Path) -> tuple[Path, ...]:
    """Write figures and their data, and ``summary.png``, the figure that can stand alone, in a README say."""
    for path, text in texts.items():
        write_text(path, text)
    if summary is None:
        return tuple(texts)
    with atomic_file(folder / "summary.png") as temporary:
        temporary.write_bytes(to_png(summary))
    return (*texts, folder / "summary.png")
