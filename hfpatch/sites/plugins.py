"""Families that other packages declare, through entry points of the group ``hfpatch.families``."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from hfpatch.errors import HfpatchError
from hfpatch.sites.family import Family, register_family

GROUP = "hfpatch.families"


@functools.cache
def load_plugins() -> None:
    """Register the families of every installed package that declares some; once in a process.

    An entry point names a :class:`Family` or an iterable of them.

    Raises:
        HfpatchError: naming the entry point, if it cannot be loaded, holds something else, or repeats a model type.
    """
    for entry in entry_points(group=GROUP):
        for family in _families(entry):
            try:
                register_family(family)
            except HfpatchError as error:
                raise HfpatchError(f"entry point {entry.name!r} ({entry.value}): {error}") from error


def _families(entry: EntryPoint) -> list[Family]:
    try:
        held = entry.load()
    except Exception as error:  # whatever a third party's import raises
        raise HfpatchError(f"entry point {entry.name!r} ({entry.value}) cannot be loaded: {error}") from error
    families = [held] if isinstance(held, Family) else list(held) if isinstance(held, Iterable) else [held]
    if not all(isinstance(family, Family) for family in families):
        raise HfpatchError(f"entry point {entry.name!r} ({entry.value}) must be a hfpatch.Family or several of them")
    return families
