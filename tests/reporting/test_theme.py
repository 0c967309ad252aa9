import pytest

from hfpatch.reporting.theme import short, styles


def test_methods_are_never_told_apart_by_colour_alone():
    given = styles(["baseline", *(f"m{i}" for i in range(20))], "baseline")
    assert len({(look.colour, look.dash) for look in given.values()}) == 21
    assert len({(look.colour, look.marker) for look in given.values()}) == 21


def test_a_methods_style_is_its_place():
    assert styles(["a", "base", "b"], "base")["b"] == styles(["a", "b"], None)["b"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("lora", "lora"), ("a\n b", "a b"), ("abcdefghijklmno", "abcd…lmno"), ("abcdefghi", "abcdefghi")],
)
def test_short(name, text):
    assert short(name, 9) == text
