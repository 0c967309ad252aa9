"""Whatever is wrong in results.json, a report of it is written, or one line says why not."""

import json
from contextlib import suppress

from damage import WRONG, damaged, places
from hypothesis import HealthCheck, given, settings
from hypothesis import example as also
from hypothesis import strategies as st
from reporting.conftest import document_of, tuned_example, with_pairs

from hfpatch.errors import HfpatchError
from hfpatch.reporting.cards import run_card
from hfpatch.reporting.differing import measured_differently, trained_differently
from hfpatch.reporting.html import html
from hfpatch.reporting.markdown import markdown
from hfpatch.results.folder import load_results

RAW = with_pairs(tuned_example())
CHANGES = st.tuples(st.sampled_from(list(places(RAW))), st.sampled_from([*WRONG, "", "<b>", [1, "a", None]]))


def broken(changes):
    raw = RAW
    for path, wrong in changes:
        with suppress(KeyError, IndexError, TypeError):  # an earlier change took away what the path leads to
            raw = damaged(raw, path, wrong)
    return raw


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@also(changes=[(("training", "seeds"), None), (("provenance", "versions"), "x")])
@also(changes=[(("training", "seeds"), [1, "a", None]), (("evaluation", "tasks"), {"a": 1})])
@also(changes=[(("data", "held_out"), "x"), (("tuning", "learning_rates"), [])])
@also(changes=[(("methods", "baseline", "runs", "1", "evaluation", "tinyworld_cloze", "metrics", "acc"), 1e308)])
@also(changes=[(("comparisons", 5, "method"), "")])
@also(changes=[(("training", "seeds"), {"x": 1})])
@also(
    changes=[
        (("questions",), [{"question": "gain", "pairs": [["pre_projection_skip", "b"]], "on": ["tinyworld_text"]}])
    ]
)
@given(changes=st.lists(CHANGES, min_size=1, max_size=4))
def test_a_broken_file_is_a_report_or_one_line(tmp_path, changes):
    (tmp_path / "results.json").write_text(json.dumps(broken(changes)))
    try:
        results = load_results(tmp_path)
    except HfpatchError:
        return
    document = document_of(results)
    for text in (html(document), markdown(document), run_card(results)):
        assert text
    pair = {"a": results, "b": results}
    assert [*measured_differently(pair), *trained_differently(pair)] == []
