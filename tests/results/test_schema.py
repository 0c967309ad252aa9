import json
from pathlib import Path

import pytest
from reporting.conftest import example

from hfpatch.results import ComparisonResults, json_schema, load_results

RESULTS = Path(__file__).parents[2] / "results"
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("**/results.json")), ids=lambda path: path.parent.name)
def test_the_committed_results_fit_the_exported_schema(path):
    jsonschema.validate(json.loads(path.read_text()), json_schema())
    loaded = load_results(path.parent).model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert loaded == json.loads(path.read_text())  # nothing lost; fields that are newer than the file stay out


def test_the_documented_schema_is_that_of_the_code():
    assert json.loads((RESULTS.parent / "docs" / "results.schema.json").read_text(encoding="utf-8")) == json_schema()


def test_the_schema_refuses_what_is_not_results():
    good = ComparisonResults.model_validate(example()).to_json()
    jsonschema.validate(good, json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**good, "methods": 3}, json_schema())
