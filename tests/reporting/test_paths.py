"""The paths that a text names; what a push does with them: tests/sharing/test_push.py."""

import time

import pytest

from hfpatch.reporting.paths import paths_in


@pytest.mark.parametrize("text", ["see '" + "/a" * 20_000, "'" + "a=/b " * 20_000, "/a/b, " * 20_000, "'/a/" * 20_000])
def test_a_long_text_takes_no_longer_than_its_length(text):
    begun = time.process_time()
    paths_in(text)
    assert time.process_time() - begun < 2


def test_a_path_in_quotes_may_have_spaces_and_the_key_of_an_override():
    text = "hfpatch compare x.yaml '--out=/mnt/a disk/run' 'data_dir=~/my texts/' '/one' 'no/path' '/b//c/' '//' '/d/'"
    assert {"/mnt/a disk/run", "/b//c/"} <= {*paths_in(text)}
    assert not {"/one", "no/path", "/d/"} & {*paths_in(text)}
