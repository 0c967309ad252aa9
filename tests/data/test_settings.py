import subprocess
import sys

import pytest
from pydantic import ValidationError

from hfpatch.data.settings import DataSettings


def test_bounds():
    for bad in ({"block_size": 1}, {"min_characters": -1}, {"max_documents": 0}, {"sauce": "x"}):
        with pytest.raises(ValidationError):
            DataSettings(**bad)


@pytest.mark.parametrize("room", ["data", "training"])
def test_settings_import_neither_torch_nor_transformers(room):
    code = f"import sys, hfpatch.{room}.settings; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
