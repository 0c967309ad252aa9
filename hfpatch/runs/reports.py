"""The report at the end of a run; what draws it is imported there, not before the training."""

from __future__ import annotations

from pathlib import Path


def write_report(folder: Path) -> None:
    """Write the report of a run folder, see `hfpatch.reporting.write_report`."""
    from hfpatch import reporting

    reporting.write_report(folder)
