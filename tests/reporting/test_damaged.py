"""Results in which values are others: every rendering of them is written, or they are refused in one line."""

import json
from contextlib import suppress
from itertools import cycle, islice

import pytest
from damage import WRONG, damaged, places
from hypothesis import HealthCheck, given, settings
from hypothesis import example as also
from hypothesis import strategies as st
from reporting.conftest import document_of as drawn_document
from reporting.conftest import tuned_example, with_pairs
from reporting.evaluation_example import evaluation
from reporting.study_example import study

from hfpatch import HfpatchError
from hfpatch.reporting.cards import run_card
from hfpatch.reporting.differing import measured_differently, trained_differently
from hfpatch.reporting.html import html
from hfpatch.reporting.markdown import markdown
from hfpatch.reporting.report import document_of
from hfpatch.results import load_results

RAW = with_pairs(tuned_example())
EACH = 1  # of the wrong values, for each place; all of them in turn
CHANGES = st.tuples(st.sampled_from(list(places(RAW))), st.sampled_from([*WRONG, "", "<b>", [1, "a", None]]))


def write(folder, raw):
    (folder / "results.json").write_text(json.dumps(raw), encoding="utf-8")


@pytest.mark.parametrize(
    "raw", [RAW, with_pairs(study()), evaluation().to_json()], ids=["comparison", "study", "evaluation"]
)
def test_one_wrong_value_is_reported_or_refused_in_one_line(raw, tmp_path):
    reported, refused, values = 0, 0, cycle(WRONG)
    for path in places(raw):
        for wrong in islice(values, EACH):
            write(tmp_path, damaged(raw, path, wrong))
            try:
                reported += bool(markdown(document_of(tmp_path)))
            except HfpatchError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{path} is {wrong!r}") from error
    assert min(reported, refused) > 50


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@also(changes=[(("training", "seeds"), None), (("provenance", "versions"), "x")])
@also(changes=[(("training", "seeds"), [1, "a", None]), (("evaluation", "tasks"), {"a": 1})])
@also(changes=[(("data", "held_out"), "x"), (("tuning", "learning_rates"), [])])
@also(changes=[(("methods", "baseline", "runs", "1", "evaluation", "tinyworld_cloze", "metrics", "acc"), 1e308)])
@also(changes=[(("comparisons", 5, "method"), "")])
@also(changes=[(("training", "seeds"), {"x": 1})])
@also(changes=[(("questions",), [{"question": "gain", "pairs": [["lora", "b"]], "on": ["tinyworld_text"]}])])
@given(changes=st.lists(CHANGES, min_size=1, max_size=4))
def test_several_wrong_values_are_in_every_rendering_or_refused(tmp_path, changes):
    raw = RAW
    for path, wrong in changes:
        with suppress(KeyError, IndexError, TypeError):  # an earlier change took away what the path leads to
            raw = damaged(raw, path, wrong)
    write(tmp_path, raw)
    try:
        results = load_results(tmp_path)
    except HfpatchError:
        return
    document = drawn_document(results)
    assert all((html(document), markdown(document), run_card(results)))
    pair = {"a": results, "b": results}
    assert [*measured_differently(pair), *trained_differently(pair)] == []


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
    write(tmp_path, damaged(evaluation().to_json(), path, wrong))
    with pytest.raises(HfpatchError) as refused:
        load_results(tmp_path)
    assert line in str(refused.value)
