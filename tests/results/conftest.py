import pytest
from reporting.conftest import example, write_run

from hfpatch.results.folder import load_comparison


@pytest.fixture
def raw():
    return example()


@pytest.fixture
def run_dir(tmp_path, raw):
    return write_run(tmp_path / "run", raw)


@pytest.fixture
def build(tmp_path):
    """Return a function that writes a results.json and reads it back."""
    return lambda raw, **options: load_comparison(write_run(tmp_path / "run", raw, **options))


@pytest.fixture
def results(run_dir):
    return load_comparison(run_dir)
