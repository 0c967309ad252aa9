"""Run an experiment of hfpatch's methods in PEFT's method comparison, whose ``run.py`` stays as it is.

    python launch.py PEFT/method_comparison/MetaMathQA -v experiments/pre_projection/llama-3.2-3B-lora32-size

``run.py`` imports PEFT alone, which does not know the types of hfpatch's adapters; this imports hfpatch first.
"""

import runpy
import sys
from pathlib import Path

import hfpatch.methods  # noqa: F401  # registers the types with PEFT


def main() -> None:
    """Run ``run.py`` of the folder that is the first argument, with the other arguments."""
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} PEFT/method_comparison/MetaMathQA [-v] experiments/METHOD/NAME")
    folder = Path(sys.argv[1])
    if not (folder / "run.py").is_file():
        sys.exit(f"{folder}: has no run.py; give the folder method_comparison/MetaMathQA of a checkout of PEFT")
    sys.argv = [str(folder / "run.py"), *sys.argv[2:]]
    sys.path.insert(0, str(folder.resolve()))  # run.py imports its own modules data and utils
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
