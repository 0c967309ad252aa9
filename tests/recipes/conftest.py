"""A recipe file of a test, and the line with which one is refused."""

from pathlib import Path

import pytest

from hfpatch.errors import HfpatchError
from hfpatch.recipes.comparison import load_recipe


def refused(path, *overrides, load=load_recipe):
    with pytest.raises(HfpatchError) as caught:
        load(path, overrides)
    return str(caught.value)


@pytest.fixture
def write(tmp_path):
    def put(text: str | bytes, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return put
