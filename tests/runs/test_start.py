"""What starting a training or a comparison imports: nothing that is needed only later, or not at all."""

import subprocess
import sys

import pytest
from starting import modules_of_transformers

TRAIN = """
import sys
from hfpatch.runs import train
import hfpatch.training.probe
print(*sys.modules)
"""
COMPARE = """
import sys
from hfpatch.runs import compare
import hfpatch.training.probe
from hfpatch.evaluation import check_comparable, evaluate
print(*sys.modules)
"""
REPORTS = {"matplotlib", "scipy.stats", "hfpatch.reporting.report", "hfpatch.reporting.plots"}
ONLY_ELSEWHERE = {"datasets", "lm_eval", "matplotlib", "pandas", "scipy.stats"}
ONLY_ELSEWHERE |= {"hfpatch.evaluation", "hfpatch.reporting"}


@pytest.mark.parametrize(("program", "later"), [(TRAIN, ONLY_ELSEWHERE), (COMPARE, REPORTS)])
def test_what_is_needed_only_later_is_not_imported(program, later):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert {"torch", "peft", "hfpatch.runs.comparison"} <= imported
    assert imported & later <= modules_of_transformers(imported)
