"""What a launcher sets by environment variables."""

from __future__ import annotations

import os

CPU_ONLY = "ACCELERATE_USE_CPU"
"""The variable that keeps accelerate from using an accelerator."""


def is_set(variable: str) -> bool:
    """Whether the launcher switched something on by an environment variable, in the words that accelerate takes."""
    true = ("y", "yes", "t", "true", "on", "1") if variable == CPU_ONLY else ("true",)
    return os.environ.get(variable, "").lower() in true
