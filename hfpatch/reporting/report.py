"""Writing the report of a folder that hfpatch wrote, or of several comparisons."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from matplotlib.figure import Figure

from hfpatch.errors import HfpatchError
from hfpatch.reporting.cards import write_patch_cards
from hfpatch.reporting.comparison.answer import answer, headline_table
from hfpatch.reporting.comparison.document import RunData, comparison_document, read_material
from hfpatch.reporting.comparison.figures import draw
from hfpatch.reporting.comparison.forest import forest_figure
from hfpatch.reporting.comparison.tables import results_csv, score_table
from hfpatch.reporting.document import Document
from hfpatch.reporting.evaluation import evaluation_csv, evaluation_document, joint_evaluation_document, score_table_of
from hfpatch.reporting.html import html
from hfpatch.reporting.markdown import markdown
from hfpatch.reporting.tabular import latex
from hfpatch.reporting.theme import to_file
from hfpatch.results.comparison import ComparisonResults
from hfpatch.results.evaluation import EvaluationResults
from hfpatch.results.folder import load_results
from hfpatch.support.files import atomic_file, printable, write_text

SUMMARY = "summary"
"""The name of the figure that is to be shown alone."""
_RUN_FILES = ("results.json", "recipe.yaml")


@dataclass(frozen=True)
class Report:
    """A written report: its files and its document."""

    html: Path
    markdown: Path
    csv: Path
    figures: tuple[Path, ...]
    document: Document
    tex: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file of the report."""
        return (self.html, self.markdown, self.csv, *([self.tex] if self.tex else []), *self.figures)


def document_of(folder: Path) -> Document:
    """Return the report of a folder as a document for its summary in a terminal, without figures.

    Raises:
        HfpatchError: if the folder has no results that can be read.
    """
    results = load_results(folder, None)
    if isinstance(results, ComparisonResults):
        return comparison_document([RunData("", results)])
    return evaluation_document(results)


def write_report(
    run_dirs: Path | Sequence[Path], out: Path | None = None, *, pdf: bool = False, methods: Sequence[str] | None = None
) -> Report:
    """Write ``report.html``, ``report.md``, ``results.csv``, ``results.tex`` and ``figures/`` from results.

    Several comparisons are reported side by side, with what differs between them. The same results give the same bytes.
    The report of an incomplete run names what is missing. In the folder of a comparison, the model cards of its patches
    are written again with their results.

    Args:
        run_dirs: a folder written by ``hfpatch compare``, ``pretrain`` or ``eval --output``; or several of comparisons,
            or of evaluations.
        out: the folder of the report; None takes that of the run, and of several or of some methods `default_out`.
        pdf: also write each figure as PDF; existing PDFs are always written again.
        methods: the methods of one comparison to report, with the verdicts of the whole; None reports all.

    Raises:
        HfpatchError: if there is no folder, one has no results that can be read or no such method, or is named twice,
            several are of different kinds or studies, or ``out`` is another run's folder or cannot be written.
    """
    folders = [run_dirs] if isinstance(run_dirs, Path) else list(run_dirs)
    if not folders:
        raise HfpatchError("run_dirs: no folder of a run to report; give at least one")
    run_dir, *others = folders
    in_place = out is None and not others and methods is None
    out = out or (run_dir if in_place else default_out(folders, methods or ()))
    if not in_place and any((out / name).exists() for name in _RUN_FILES):
        raise HfpatchError(f"{out}: is a run, whose own report would be lost; choose another --out")
    if others and methods is not None:
        raise HfpatchError(f"--methods chooses methods of one run, and there are {len(folders)}; report each by itself")
    results = load_results(run_dir, None)
    if methods is not None and isinstance(results, EvaluationResults):
        raise HfpatchError(f"{run_dir}: contains no comparison, so it has no methods to choose; leave out --methods")
    if isinstance(results, EvaluationResults):
        return _write_evaluations(labels(folders), out)
    if others:
        runs = [read_material(label, path, load_results(path)) for label, path in labels(folders).items()]
        return _write(out, runs, pdf=pdf)
    material = read_material("", run_dir, results)
    if methods is not None:
        shown = material.results.only(methods)
        material = replace(material, results=shown, note=shown.warnings[0])
    report = _write(out, [material], pdf=pdf)
    if in_place:
        write_patch_cards(run_dir, results)
    return report


def _write_evaluations(folders: Mapping[str, Path], out: Path) -> Report:
    """Write the report of evaluations by label."""
    sources = {label: load_results(path, "evaluation") for label, path in folders.items()}
    one, *others = sources.values()
    document = joint_evaluation_document(sources) if others else evaluation_document(one)
    table = score_table_of(sources)
    caption = " ".join(filter(None, (f"{document.title}.", table.explained)))
    tex = "\n".join(["% needs \\usepackage{booktabs}\n", latex(table, caption=caption)])
    return write_document(document, out, csv=evaluation_csv(sources), tex=tex)


def default_out(run_dirs: Sequence[Path], methods: Sequence[str] = ()) -> Path:
    """Return the folder for the report of several runs, or of some methods of one, where none is named."""
    names = "+".join(re.sub(r"[^\w.-]", "_", name) for name in [*(path.resolve().name for path in run_dirs), *methods])
    return Path("runs") / f"report-{names}"[:100]


def labels(run_dirs: Sequence[Path]) -> dict[str, Path]:
    """Name each run by the shortest end of its path that is different from the others'.

    Raises:
        HfpatchError: if one is named twice.
    """
    paths = [path.resolve() for path in run_dirs]
    for twice, times in Counter(paths).items():
        if times > 1:
            raise HfpatchError(f"{twice}: named twice; name each run once")
    names: list[str] = []
    for length in range(1, 1 + max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return dict(zip(map(printable, names), run_dirs, strict=True))


def _write(out: Path, material: Sequence[RunData], *, pdf: bool) -> Report:
    csv = results_csv({run.title: run.results for run in material})
    # the headline and the scores of each run, as tables with the meaning of their marks
    tables = ["% needs \\usepackage{booktabs}\n"]
    for index, run in enumerate(material, 1):
        first, scores = headline_table(run.shown), score_table(run.shown)
        for table, words in ((first, f"{answer(run.shown)} {first.explained}"), (scores, scores.explained)):
            if not table.rows:
                continue
            table = replace(table, name=f"{table.name}-{index}" if len(material) > 1 else table.name)
            title = f"{run.title or run.results.name}: {table.title.lower()}."
            tables.append(latex(table, caption=" ".join(filter(None, (title, words, run.note)))))
    material = [replace(run, drawn=draw(run.shown)) for run in material]
    document = comparison_document(material)
    of_parts = zip(document.parts, material, strict=True)
    named = {f"{part.prefix}{name}": figure for part, run in of_parts for name, figure in run.drawn.items()}
    if len(material) == 1 and (summary := forest_figure(material[0].shown, title=True)) is not None:
        named[SUMMARY] = summary
    return write_document(document, out, csv=csv, tex="\n".join(tables), drawn=named, pdf=pdf)


def write_document(
    document: Document,
    out: Path,
    *,
    csv: str,
    tex: str = "",
    drawn: Mapping[str, Figure] = MappingProxyType({}),
    pdf: bool = False,
) -> Report:
    """Write ``report.html``, ``report.md``, ``results.csv`` and ``figures/``; the same document gives the same bytes.

    ``tex`` is the content of ``results.tex``, empty for no such file. ``drawn`` are the figures that ``pdf`` writes as
    PDF too; the one named :data:`SUMMARY` is always written as PDF and as PNG.

    Raises:
        HfpatchError: if ``out`` cannot be written.
    """
    figures: list[Path] = []
    for part in document.parts:
        for name, figure in part.figures.items():
            for ending, text in (("svg", figure.svg), ("csv", figure.data)):
                figures.append(out / "figures" / f"{name}.{ending}")
                write_text(figures[-1], text)
    for name, drawing in drawn.items():
        kinds: tuple[Literal["png", "pdf"], ...] = ("png", "pdf") if name == SUMMARY else ("pdf",)
        for path, kind in ((out / "figures" / f"{name}.{kind}", kind) for kind in kinds):
            if name == SUMMARY or pdf or path.exists():  # so that no PDF is older than its SVG
                with atomic_file(path) as temporary:
                    temporary.write_bytes(to_file(drawing, kind))
                figures.append(path)
    pages = out / "report.html", out / "report.md", out / "results.csv"
    report = Report(*pages, tuple(figures), document, out / "results.tex" if tex else None)
    write_text(report.csv, csv)
    if report.tex:
        write_text(report.tex, tex)
    write_text(report.markdown, markdown(document))
    write_text(report.html, html(document))
    return report
