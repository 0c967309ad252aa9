"""What starting an evaluation imports: nothing that only other commands, or patches, need."""

import subprocess
import sys

from starting import modules_of_transformers

PROGRAM = """
import sys
import hfpatch.evaluation, hfpatch.recipes.evaluation

def show():
    print(*sys.modules, file=sys.stderr, end="\\n")

show()
from lm_eval.api.registry import model_registry
assert "hf" in model_registry and "hfpatch" in model_registry
from hfpatch.evaluation.model import HfpatchLM
show()
from hfpatch.__main__ import main
code = main("eval --model tinyworld/gpt-neox --tasks tinyworld_cloze --limit 1".split())
show()
sys.exit(code)
"""
ONLY_ELSEWHERE = {
    *("bitsandbytes", "matplotlib", "peft", "scipy.stats", "sklearn", "statsmodels", "torchao", "transformers.trainer"),
    "trl",
}


def test_an_evaluation_imports_what_it_needs_when_it_needs_it():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    package, model, command = (set(line.split()) for line in done.stderr.splitlines() if "hfpatch.evaluation" in line)
    assert not package & {"torch", "transformers", "datasets", "scipy"}
    assert "torch" in model
    assert model & {"peft", "datasets", "scipy", "lm_eval.tasks"} <= modules_of_transformers(model)
    assert {"torch", "transformers", "lm_eval", "hfpatch.evaluation.run"} <= command
    assert command & ONLY_ELSEWHERE <= modules_of_transformers(command)
    assert not {name for name in command if name.startswith("hfpatch.tuners")}
