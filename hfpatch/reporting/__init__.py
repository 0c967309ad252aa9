"""Reports of results: documents, figures and pages. Importing the package loads neither torch nor matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.support.lazy import lazy_names

if TYPE_CHECKING:
    from hfpatch.reporting.report import Report, write_report

__all__ = ["Report", "write_report"]
__getattr__ = lazy_names(__name__, {"report": __all__})
