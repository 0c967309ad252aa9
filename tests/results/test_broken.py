"""Whatever is wrong in results.json, a report of it is written, or one line says why not."""

import copy
import json
from contextlib import suppress
from functools import reduce
from operator import getitem

from hypothesis import HealthCheck, given, settings
from hypothesis import example as also
from hypothesis import strategies as st
from reporting.conftest import document_of, tuned_example, with_pairs

from hfpatch.errors import HfpatchError
from hfpatch.reporting.cards import run_card
from hfpatch.reporting.comparison.merging import merge
from hfpatch.reporting.html import html
from hfpatch.reporting.markdown import markdown
from hfpatch.results.folder import load_results

JUNK = [None, 0, -1, 1e308, float("nan"), float("inf"), "", "x", "<b>", [], {}, [1, "a", None], {"a": 1}, True, "1"]


def places(value, path=()):
    """Yield the path of everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


PLACES = list(places(with_pairs(tuned_example())))


def broken(changes):
    raw = with_pairs(tuned_example())
    for path, junk in changes:
        with suppress(KeyError, IndexError, TypeError):  # an earlier change took the place away
            reduce(getitem, path[:-1], raw)[path[-1]] = copy.deepcopy(junk)
    return raw


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@also(changes=[(("training", "seeds"), None), (("provenance", "versions"), "x")])
@also(changes=[(("training", "seeds"), [1, "a", None]), (("evaluation", "tasks"), {"a": 1})])
@also(changes=[(("data", "held_out"), "x"), (("tuning", "learning_rates"), [])])
@also(changes=[(("methods", "baseline", "runs", "1", "evaluation", "tinyworld_cloze", "metrics", "acc"), 1e308)])
@also(changes=[(("comparisons", 5, "method"), "")])
@given(changes=st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(JUNK)), min_size=1, max_size=4))
def test_a_broken_file_is_a_report_or_one_line(tmp_path, changes):
    (tmp_path / "results.json").write_text(json.dumps(broken(changes)))
    try:
        results = load_results(tmp_path)
    except HfpatchError:
        return
    document = document_of(results)
    for text in (html(document), markdown(document), run_card(results)):
        assert text
    assert merge({"a": results, "b": results}).checks
