"""Models for pretraining from scratch, whose query path is another than a linear W_Q."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.support.lazy import lazy_names

if TYPE_CHECKING:
    from hfpatch.models.build import build_scratch as build_scratch
    from hfpatch.models.build import inner_width as inner_width
    from hfpatch.models.build import non_embedding_parameters as non_embedding_parameters
    from hfpatch.models.classes import load_scratch as load_scratch
    from hfpatch.models.classes import load_whole as load_whole
    from hfpatch.models.classes import register_scratch as register_scratch
    from hfpatch.models.classes import take_apart as take_apart

_NAMES = {
    "build": ["build_scratch", "inner_width", "non_embedding_parameters"],
    "classes": ["load_scratch", "load_whole", "register_scratch", "take_apart"],
}

__all__ = sorted(name for names in _NAMES.values() for name in names)
__getattr__ = lazy_names(__name__, _NAMES)
