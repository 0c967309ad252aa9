"""A recipe file of a test."""

from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path):
    def put(text: str | bytes, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return put
