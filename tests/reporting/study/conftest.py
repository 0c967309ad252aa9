import pytest
from reporting.study_example import read, study


@pytest.fixture
def found():
    return read(study())
