"""Keeping other libraries' messages out of the output."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from hfpatch.support.quiet import quiet_libraries as quiet


def quiet_libraries() -> None:
    """Turn off the libraries' progress bars, advice and warnings; hfpatch's own warnings remain."""
    quiet()
    warnings.filterwarnings("ignore", module=r"(?!hfpatch)")
    warnings.showwarning = _show


def _show(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line, without the place in the code that gave it."""
    print(f"hfpatch: warning: {' '.join(str(message).split())}", file=sys.stderr)
