"""What starting a training or a comparison imports: nothing that is needed only later, or not at all."""

import subprocess
import sys

from starting import modules_of_transformers

PROGRAM = """
import sys
from hfpatch.runs import train
import hfpatch.training.probe
print(*sys.modules)
from hfpatch.runs import compare
from hfpatch.evaluation import check_comparable, evaluate
print(*sys.modules)
"""
REPORTS = {"matplotlib", "scipy.stats", "hfpatch.reporting.report", "hfpatch.reporting.plots"}
ONLY_ELSEWHERE = {"datasets", "lm_eval", "matplotlib", "pandas", "scipy.stats"}
ONLY_ELSEWHERE |= {"hfpatch.evaluation", "hfpatch.reporting"}


def test_what_is_needed_only_later_is_not_imported():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    training, comparison = (set(line.split()) for line in done.stdout.splitlines())
    assert {"torch", "peft", "hfpatch.runs.comparison"} <= training
    assert training & ONLY_ELSEWHERE <= modules_of_transformers(training)
    assert comparison & REPORTS <= modules_of_transformers(comparison)
