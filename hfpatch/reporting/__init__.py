"""Tables, figures and pages from the files of a run; nothing here needs a model."""

from hfpatch.reporting.report import Report, write_report

__all__ = ["Report", "write_report"]
