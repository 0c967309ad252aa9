import pytest

from hfpatch.reporting.theme import short, styles


def test_methods_are_never_distinguished_by_colour_alone_and_keep_their_style():
    names = ["baseline", *(f"m{i}" for i in range(20))]
    given = styles(names, "baseline")
    assert len({(look.colour, look.dash) for look in given.values()}) == 21
    assert len({(look.colour, look.marker) for look in given.values()}) == 21
    assert styles(names, "baseline", {"m3", "m7"}) == {name: given[name] for name in ("m3", "m7")}
    assert styles(["a", "base", "b"], "base")["b"] == styles(["a", "b"], None)["b"]


@pytest.mark.parametrize(
    ("name", "text"), [("lora", "lora"), ("a\n b", "a b"), ("abcdefghijklmno", "abcd…lmno"), ("abcdefghi", "abcdefghi")]
)
def test_short(name, text):
    assert short(name, 9) == text
