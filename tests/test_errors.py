import pytest

from hfpatch.errors import HfpatchError, nearest


def test_the_error_is_a_value_error():
    assert issubclass(HfpatchError, ValueError)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("lorra", ["lora", "ia3"], " (did you mean 'lora'?)"),
        ("content_skipp", ["content_skip", "content", "skip"], " (did you mean 'content_skip'?)"),
        ("zzz", ["lora", "ia3"], ""),
        ("lora", [], ""),
    ],
)
def test_nearest(name, known, expected):
    assert nearest(name, known) == expected
    assert nearest(name, dict.fromkeys(known)) == expected
