"""The two installs: ``pip install hfpatch`` for the adapters, ``hfpatch[lab]`` to compare, evaluate and report too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hfpatch.errors import HfpatchError

PACKAGES = frozenset(
    {"accelerate", "datasets", "jinja2", "lm_eval", "matplotlib", "numpy", "rich", "scipy", "tokenizers", "typer"}
)
"""The packages that the extra ``lab`` installs, by the names that are imported."""


class MissingLabError(HfpatchError, ImportError):
    """A package that only ``hfpatch[lab]`` installs is missing."""


@contextmanager
def needing_lab() -> Iterator[None]:
    """Name the command that installs a package of :data:`PACKAGES` whose import fails.

    Raises:
        MissingLabError: in place of the ``ModuleNotFoundError``.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES | {"pyarrow"}:  # which datasets brings
            raise
        raise MissingLabError(f"this needs {package}, which is not installed; pip install 'hfpatch[lab]'") from None
