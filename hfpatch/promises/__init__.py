"""The promises that a patch keeps, run on the user's own model."""

from hfpatch.promises.run import PROMISES, CheckReport, Verdict, check

__all__ = ["PROMISES", "CheckReport", "Verdict", "check"]
