"""The page of a plan."""

import pytest

from hfpatch.reporting.forecast import forecast_document
from hfpatch.results.forecast import Forecast


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({}, "–"),  # nothing was computed
        ({"is_assumed": True, "difference": 0.5}, "none within 100 seeds"),
        ({"like": ["a", "b"], "seeds_needed": 12, "documents_needed": 4800, "seconds": 7200.0}, "12 seeds, 4,800"),
    ],
)
def test_what_a_margin_needs_is_said_where_a_variance_is_there_to_go_by(fields, needed):
    question = {"question": "gain", "method": "a", "other": "b", "task": "t", "seeds": 5, "margin": 0.02}
    planned = Forecast(
        **{"name": "plan", "model": {"name": "m"}, "seeds": [0], "methods": {}, "tasks": {}, "work": {}},
        **{"kinds": {"base": {"method": "base"}}, "comparisons": 1, "questions": [question | fields]},
    )
    (table,) = (block for block in forecast_document(planned).summary if getattr(block, "name", "") == "questions")
    (row,) = table.rows
    cells = dict(zip([column.name for column in table.columns], map(str, row.cells), strict=True))
    assert cells.get("needed", "–").startswith(needed)
