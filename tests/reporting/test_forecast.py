"""The page of a plan."""

import pytest

from hfpatch.reporting.document import Table
from hfpatch.reporting.forecast import forecast_document
from hfpatch.results.forecast import Forecast


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({}, None),  # nothing was computed
        ({"is_assumed": True, "difference": 0.5}, "more of both"),
        ({"like": ["a", "b"], "seeds_needed": 12, "documents_needed": 4800}, "12 seeds or 4,800"),
    ],
)
def test_what_a_margin_needs_is_said_where_a_variance_is_there_to_go_by(fields, needed):
    task = {"documents": 9, "requests": 9, "tokens": 99}
    question = {"question": "gain", "method": "a", "other": "b", "task": "t", "seeds": 5, "margin": 0.02}
    planned = Forecast(
        **{"name": "plan", "model": {"name": "m"}, "seeds": [0], "methods": {}, "work": {}},
        **{
            "kinds": {"base": {"method": "base", "evaluation_s": {"t": 61.0, "generated": 0.0}}},
            "tasks": {"t": task | {"metric": "acc", "score": 0.25, "sampled": 8}, "generated": task},
            "questions": [question | fields],
        },
    )
    tables = {block.name: block for block in forecast_document(planned).summary if isinstance(block, Table)}
    rows = [[*map(str, row.cells)] for row in tables["tasks"].rows]
    assert rows == [["t", "9", "0.250\nacc of 8", "1 min 01 s"], ["generated", "9", "–", "–"]]
    assert ("questions" in tables) == (needed is not None)
    if needed is not None:
        (row,) = tables["questions"].rows
        cells = dict(zip([column.name for column in tables["questions"].columns], map(str, row.cells), strict=True))
        assert cells["needed"].startswith(needed)


@pytest.mark.parametrize(("kind", "title"), [("base", "Methods"), ("a", "Variants")])
def test_a_comparison_without_tasks_has_methods_and_a_study_variants(kind, title):
    methods = {"a": {"trainable": 3, "kind": "a"}}
    planned = Forecast(
        **{"name": "plan", "model": {"name": "m"}, "seeds": [0], "methods": methods, "work": {}},
        **{"kinds": {kind: {"method": kind}}, "tasks": {}},
    )
    assert title in [block.title for block in forecast_document(planned).summary if isinstance(block, Table)]
