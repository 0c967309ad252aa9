"""Writing the whole report of a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from hfpatch.files import atomic_file, write_text
from hfpatch.reporting.curves import Curve, read_curves
from hfpatch.reporting.figures import differences, quality, training
from hfpatch.reporting.html import html
from hfpatch.reporting.markdown import markdown
from hfpatch.reporting.results import Results, read_results
from hfpatch.reporting.results_csv import results_csv
from hfpatch.reporting.theme import house_style, to_png, to_svg


@dataclass(frozen=True)
class Report:
    """Where a report was written, and the results that it tells."""

    html: Path
    markdown: Path
    csv: Path
    figures: tuple[Path, ...]
    results: Results

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file of the report."""
        return (self.html, self.markdown, self.csv, *self.figures)


def write_report(run_dir: Path) -> Report:
    """Write ``report.html``, ``report.md``, ``results.csv`` and ``figures/`` from the result files in ``run_dir``.

    The same result files give the same bytes. An incomplete run is reported as far as it got, and what is missing
    is named.

    Raises:
        HfpatchError: if ``run_dir`` holds no run, or cannot be written.
    """
    results = read_results(run_dir)
    curves = read_curves(run_dir, list(results.methods))
    results = results.model_copy(update={"missing": (*results.missing, *_curveless(results, curves))})
    with house_style():
        drawn = {"differences": differences(results), "quality": quality(results)}
        drawn["training"] = training(results, curves)
        svgs = {name: to_svg(figure) for name, figure in drawn.items() if figure is not None}
        summary = _write_summary(differences(results, title=True), run_dir / "figures")
    paths = [run_dir / "figures" / f"{name}.svg" for name in svgs]
    for path, svg in zip(paths, svgs.values(), strict=True):
        write_text(path, svg)
    report = Report(
        html=run_dir / "report.html",
        markdown=run_dir / "report.md",
        csv=run_dir / "results.csv",
        figures=(*paths, *summary),
        results=results,
    )
    write_text(report.csv, results_csv(results))
    write_text(report.markdown, markdown(results, list(svgs)))
    write_text(report.html, html(results, svgs))
    return report


def _curveless(results: Results, curves: dict[str, Curve]) -> list[str]:
    trained = [name for name, method in results.methods.items() if any(run.train for run in method.runs.values())]
    return [f"{name}: no training curve (metrics.jsonl)." for name in trained if name not in curves]


def _write_summary(figure: Figure | None, folder: Path) -> tuple[Path, ...]:
    """Write the figure that can stand alone, in a README say; nothing where there is none."""
    if figure is None:
        return ()
    path = folder / "summary.png"
    with atomic_file(path) as temporary:
        temporary.write_bytes(to_png(figure))
    return (path,)
