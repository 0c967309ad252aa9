"""Tables, figures and pages from the files of a run; nothing here needs a model."""

from hfpatch.reporting.report import default_out, write_joint_report, write_report
from hfpatch.reporting.written import Report

__all__ = ["Report", "default_out", "write_joint_report", "write_report"]
