"""What starting a training imports: nothing that only evaluations and reports need."""

import subprocess
import sys

PROGRAM = """
import sys
from hfpatch.runs import train
import hfpatch.training.probe
print(*sys.modules)
"""
ONLY_ELSEWHERE = {
    "datasets",
    "lm_eval",
    "matplotlib",
    "pandas",
    "scipy.stats",
    "hfpatch.evaluation",
    "hfpatch.reporting",
}


def test_a_training_imports_nothing_of_evaluations_and_reports():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert {"torch", "peft", "hfpatch.runs.training"} <= imported
    assert not imported & ONLY_ELSEWHERE
