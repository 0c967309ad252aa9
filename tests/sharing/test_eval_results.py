"""What the hub is told of scores: whether they are of whole sets of documents."""

from types import SimpleNamespace

import pytest

from hfpatch.sharing.eval_results import _is_limited


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        ({"tasks": ["page", "cloze"], "limit": None}, [False, False]),
        ({"tasks": ["page", "cloze"], "limit": 5}, [True, True]),
        ({"tasks": {"page": {"limit": 5}, "cloze": None}, "limit": None}, [True, False]),
        ({"tasks": {"a_group": {"limit": 5}, "cloze": None}, "limit": None}, [True, False]),
    ],
)
def test_a_part_of_a_set_is_called_so(evaluation, expected):
    results = SimpleNamespace(evaluation=evaluation)
    assert [_is_limited(results, task) for task in ("page", "cloze")] == expected
