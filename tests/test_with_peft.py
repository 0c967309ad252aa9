"""PEFT learns the methods as soon as both packages are imported; importing hfpatch alone loads nothing heavy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KNOWN = (
    "from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as m; assert 'PRE_PROJECTION' in m and 'NONLINEAR_QUERY' in m"
)


def run(code):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_hfpatch_loads_neither_torch_nor_transformers_nor_peft():
    heavy = "{'torch', 'transformers', 'peft', 'numpy', 'datasets', 'lm_eval'}"
    assert run(f"import hfpatch, sys; print(sorted({heavy} & set(sys.modules)))").strip() == "[]"


@pytest.mark.parametrize("package", ["training", "data", "evaluation"])
def test_settings_load_neither_torch_nor_transformers(package):
    code = (
        f"import hfpatch.{package}.settings, sys; print(sorted({{'torch', 'transformers', 'peft'}} & set(sys.modules)))"
    )
    assert run(code).strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import hfpatch; from peft.tuners.lora import LoraConfig",
        "import hfpatch; from hfpatch import PreProjectionConfig",
    ],
)
def test_every_order_of_imports_registers_the_methods(imports):
    run(f"{imports}\n{KNOWN}")


@pytest.mark.slow
def test_the_import_hook_leaves_no_trace():
    run(
        "import sys; before = list(sys.meta_path)\n"
        "import hfpatch, importlib.util, peft\n"
        "assert all(finder in sys.meta_path for finder in before)\n"
        "assert not [f for f in sys.meta_path if type(f).__module__.startswith('hfpatch')], sys.meta_path\n"
        "assert type(peft.__loader__).__name__ == 'SourceFileLoader' == type(peft.__spec__.loader).__name__\n"
        "assert importlib.util.find_spec('peft').origin == peft.__file__\n"
    )


def test_a_missing_peft_is_reported_as_python_does():
    code = (
        "import sys, hfpatch\n"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "try:\n    import peft\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    assert "No module named 'peft'" in run(code)
