import pytest

from hfpatch.errors import nearest


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
