import json
import math
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from reporting.conftest import example

from hfpatch.results import ComparisonResults, json_schema, load_results
from hfpatch.results.parts import High, Low, Measured, Number

RESULTS = Path(__file__).parents[2] / "results"
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("**/results.json")), ids=lambda path: path.parent.name)
def test_the_committed_results_fit_the_exported_schema(path):
    jsonschema.validate(json.loads(path.read_text()), json_schema())
    results, raw = load_results(path.parent, None), json.loads(path.read_text())
    loaded = results.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"verdicts"})
    verdicts = raw.pop("verdicts", [])
    assert loaded == raw  # nothing lost; fields that are newer than the file stay out
    computed = [verdict.to_json() for verdict in getattr(results, "verdicts", [])]
    assert [verdict["outcome"] for verdict in computed] == [verdict["outcome"] for verdict in verdicts]
    for key in ("difference", "corrected_low", "corrected_high", "p_corrected", "level", "detectable", "seeds_needed"):
        assert [verdict.get(key) for verdict in computed if verdict.get(key) is not None] == pytest.approx(
            [verdict[key] for verdict in verdicts if verdict.get(key) is not None], rel=1e-6
        )
        assert [verdict.get(key) is None for verdict in computed] == [verdict.get(key) is None for verdict in verdicts]


def test_the_schema_takes_results_and_refuses_a_wrong_type():
    good = ComparisonResults.model_validate(example()).to_json()
    jsonschema.validate(good, json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**good, "methods": 3}, json_schema())


@pytest.mark.parametrize("value", [1.5, math.inf, -math.inf, math.nan, None])
@pytest.mark.parametrize(
    ("kind", "unknown"), [(Low, -math.inf), (High, math.inf), (Number, math.nan), (Measured, None)]
)
def test_a_number_that_is_not_finite_is_the_same_in_memory_and_in_the_file(kind, unknown, value):
    adapter = TypeAdapter(kind)
    here = adapter.validate_python(value)
    written = json.dumps(adapter.dump_python(here, mode="json"), allow_nan=False)
    assert repr(here) == repr(adapter.validate_json(written)) == repr(1.5 if value == 1.5 else unknown)
