import pytest

from hfpatch.errors import first_line, nearest


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("lorra", ["lora", "ia3"], " (did you mean 'lora'?)"),
        ("content_skipp", ["content_skip", "content", "skip"], " (did you mean 'content_skip'?)"),
        ("zzz", ["lora", "ia3"], ""),
        ("lora", [], ""),
    ],
)
def test_nearest(name, names, expected):
    assert nearest(name, names) == expected
    assert nearest(name, dict.fromkeys(names)) == expected


def test_first_line():
    error = ValueError("\n  one\ntwo")
    assert (first_line(error), first_line(error, kind=True)) == ("one", "ValueError: one")
    assert (first_line(KeyError()), first_line(KeyError(), kind=True)) == ("KeyError", "KeyError")
