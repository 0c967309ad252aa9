"""Results in which one value is another: they are read and reported, or refused in one line."""

import json
from itertools import cycle, islice

import pytest
from damage import WRONG, damaged, places
from reporting.conftest import example, with_pairs
from reporting.evaluation_example import evaluation
from reporting.study_example import study as pretrained

from hfpatch import HfpatchError
from hfpatch.reporting.markdown import markdown
from hfpatch.reporting.report import document_of
from hfpatch.results import load_results

EACH = 1  # of the wrong values, for each place; all of them in turn


@pytest.mark.parametrize(
    "raw",
    [with_pairs(example()), with_pairs(pretrained()), evaluation().to_json()],
    ids=["comparison", "pretrained", "evaluation"],
)
def test_one_wrong_value_is_reported_or_refused_in_one_line(raw, tmp_path):
    reported, messages, values = 0, [], cycle(WRONG)
    for path in places(raw):
        for wrong in islice(values, EACH):
            (tmp_path / "results.json").write_text(json.dumps(damaged(raw, path, wrong)), encoding="utf-8")
            try:
                reported += bool(markdown(document_of(tmp_path)))
            except HfpatchError as error:
                messages.append(str(error))
            except Exception as error:
                raise AssertionError(f"{path} is {wrong!r}") from error
    assert min(reported, len(messages)) > 50
    assert not [message for message in messages if "\n" in message]


@pytest.mark.parametrize(
    ("path", "wrong", "line"),
    [
        (("variants",), {}, "variants"),
        (("model", "name"), None, "model: name must be a string that names the model, not None"),
        (("model", "sha256"), 3, "model: sha256 must be a string that names the model, not 3"),
        (("variants", "base", "scores", "cloze", "n"), -1, "variants.base.scores.cloze.n is -1"),
        (("variants", "base", "scores", "cloze", "n"), 10**400, "variants.base.scores.cloze.n is null"),
        (("variants", "base", "scores", "cloze", "chance"), 2, "variants.base.scores.cloze.chance is 2"),
    ],
    ids=["no variants", "no name", "no hash", "n below 0", "n too large", "chance above 1"],
)
def test_what_is_wrong_in_an_evaluation_is_named(path, wrong, line, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(damaged(evaluation().to_json(), path, wrong)), encoding="utf-8")
    with pytest.raises(HfpatchError) as refused:
        load_results(tmp_path)
    assert line in str(refused.value)
