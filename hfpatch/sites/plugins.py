"""Families that other packages declare, through entry points of the group ``hfpatch.families``."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from hfpatch.errors import HfpatchError
from hfpatch.sites.family import Family, register_family
from hfpatch.support import plugins

GROUP = "hfpatch.families"


@functools.cache
def load_plugins() -> None:
    """Register the families of every installed package that declares some; once in a process.

    An entry point names a :class:`Family` or an iterable of them.

    Raises:
        HfpatchError: naming the entry point, if it cannot be loaded, is not a declaration, or repeats a model type.
    """
    for entry in plugins.entries(GROUP):
        where, found = plugins.where(entry), plugins.load(entry)
        families = list(found) if isinstance(found, Iterable) else [found]
        if not all(isinstance(family, Family) for family in families):
            raise HfpatchError(f"{where} must be a hfpatch.Family or several of them")
        for family in families:
            try:
                register_family(family)
            except HfpatchError as error:
                raise HfpatchError(f"{where}: {error}") from error
