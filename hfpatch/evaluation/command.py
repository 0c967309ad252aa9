"""lm-eval's own command, in a process where its registry has the model ``hfpatch``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lm_eval.__main__ import cli_evaluate


def run_lm_eval(arguments: Sequence[str]) -> None:
    """Run ``lm_eval ARGUMENTS``; importing this package has registered ``--model hfpatch``.

    lm-eval up to 0.4.13 knows only the models of its own package. Later ones find hfpatch by the entry point
    ``lm_eval.models``, so that their own command does without this.

    Raises:
        SystemExit: as lm-eval ends, such as after its help or with wrong arguments.
    """
    before = sys.argv
    sys.argv = ["lm_eval", *arguments]  # its parser reads them there
    try:
        cli_evaluate()
    finally:
        sys.argv = before
