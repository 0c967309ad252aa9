"""What a process imports before hfpatch does anything."""

import subprocess
import sys
from functools import cache

PROGRAM = """
import sys
from transformers import GPTNeoXForCausalLM
print(*sys.modules)
"""


def modules_of_transformers(imported):
    """Return the modules that a transformers model class imports on its own: none where scikit-learn is not imported.

    Versions such as 5.20 import scikit-learn where it is installed, and with it pandas and SciPy.
    """
    return _modules() if "sklearn" in imported else set()


@cache
def _modules():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return set(done.stdout.split())
