"""Functions that take paths take text."""

import inspect
from pathlib import Path

import pytest

from hfpatch import runs
from hfpatch.errors import HfpatchError
from hfpatch.support.paths import takes_text


@takes_text
def function(recipe, out: Path | None, *, patches: "list[Path]" = (), name: str = "x"):
    return recipe, out, patches, name


def test_text_becomes_a_path_where_one_is_taken():
    assert function(1, "a/b", patches=["c", Path("d")]) == (1, Path("a/b"), [Path("c"), Path("d")], "x")
    assert function(1, out=None, name="n") == (1, None, (), "n")


def test_every_command_takes_text_and_names_a_recipe_that_was_not_read():
    for name in runs.__all__:
        command = getattr(runs, name)
        if "Path" in str(inspect.signature(command)):
            assert hasattr(command, "__wrapped__"), name
    with pytest.raises(HfpatchError, match="recipe 'quickstart': compare takes a recipe and no path"):
        runs.compare("quickstart", "out")
