"""One small declaration for each family that cannot be read from its blocks; importing this package registers them.

The common forms need none: see :mod:`hfpatch.sites.structure`. A new file here is found automatically.
"""

import importlib
import pkgutil

from hfpatch.sites.family import DECLARED

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

BUILT_IN = frozenset(DECLARED)
"""The model types of the families that hfpatch declares."""
