"""Writing the report of a folder that hfpatch wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hfpatch.reporting.document import Document
from hfpatch.reporting.evaluation import evaluation_document, write_evaluation
from hfpatch.reporting.written import Report
from hfpatch.results.folder import load_results
from hfpatch.results.schema import EvaluationResults


def document_of(folder: Path) -> Document:
    """Return the report of a folder as a document, without writing it."""
    results = load_results(folder)
    assert isinstance(results, EvaluationResults)
    return evaluation_document(results)


def write_report(run_dir: Path, out: Path | None = None) -> Report:
    """Write the report of a folder."""
    results = load_results(run_dir)
    assert isinstance(results, EvaluationResults)
    return write_evaluation(results, out or run_dir)


def write_joint_report(run_dirs: Sequence[Path], out: Path) -> Report:
    """Write one report of several folders."""
    return write_report(run_dirs[0], out)


def default_out(run_dirs: Sequence[Path]) -> Path:
    """Return the folder for the report of several runs where none is named."""
    return Path("runs") / "report"
