"""Where the YAML folders ``eval/`` and ``recipes/`` are: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def eval_dir() -> Path:
    """Return the folder of lm-eval task files."""
    return _locate("eval")


def recipes_dir() -> Path:
    """Return the folder of recipes."""
    return _locate("recipes")


def _locate(name: str) -> Path:
    installed = _PACKAGE / "_resources" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
