"""Writing the whole report of a pretraining study."""

from __future__ import annotations

from pathlib import Path

from hfpatch.reporting.html import render
from hfpatch.reporting.study.data import figure_csv, study_csv
from hfpatch.reporting.study.figures import differences, draw
from hfpatch.reporting.study.markdown import study_markdown
from hfpatch.reporting.study.page import study_page
from hfpatch.reporting.study.results import read_study
from hfpatch.reporting.theme import report_style
from hfpatch.reporting.written import Report, write_figures
from hfpatch.support.files import write_text


def write_study(run_dir: Path, out: Path) -> Report:
    """Write ``report.html``, ``report.md``, ``results.csv`` and ``figures/`` of the study in ``run_dir`` to ``out``.

    The same results give the same bytes. An incomplete study is reported as far as it got, and what is missing is
    named.

    Raises:
        HfpatchError: if the results cannot be read, or ``out`` cannot be written.
    """
    study = read_study(run_dir)
    drawn = draw(study)
    page = study_page(study, drawn)
    texts: dict[Path, str] = {}
    for name, svg in drawn.items():
        path = out / "figures" / name
        texts[path.with_suffix(".svg")] = svg
        texts[path.with_suffix(".csv")] = figure_csv(name, study)
    with report_style():
        figures = write_figures(texts, differences(study, title=True), out / "figures")
    report = Report(
        html=out / "report.html",
        markdown=out / "report.md",
        csv=out / "results.csv",
        figures=figures,
        runs=(),
        study=study,
    )
    write_text(report.csv, study_csv(study))
    write_text(report.markdown, study_markdown(page))
    write_text(report.html, render(page, "study.jinja"))
    return report
