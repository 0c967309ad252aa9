"""The promises that a patch keeps, run on the user's own model."""

from hfpatch.promises.report import CheckReport, Verdict
from hfpatch.promises.run import PROMISES, check

__all__ = ["PROMISES", "CheckReport", "Verdict", "check"]
