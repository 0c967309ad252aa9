"""What starting an evaluation imports: nothing that only other commands, or patches, need."""

import subprocess
import sys

PROGRAM = """
import sys
from hfpatch.__main__ import main
code = main("eval --model tinyworld/gpt-neox --tasks tinyworld_cloze --limit 1".split())
print(*sys.modules, file=sys.stderr, sep="\\n")
sys.exit(code)
"""
HEAVY = {
    "bitsandbytes",
    "matplotlib",
    "peft",
    "scipy.stats",
    "sklearn",
    "statsmodels",
    "torchao",
    "transformers.trainer",
    "trl",
}


def test_evaluating_a_bare_model_imports_no_peft_and_no_statistics():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    modules = set(done.stderr.splitlines())
    assert {"torch", "transformers", "lm_eval", "hfpatch.evaluation.run"} <= modules
    assert not modules & HEAVY
    assert not {name for name in modules if name.startswith("hfpatch.tuners")}
