"""Models for pretraining from scratch, whose query path is another than a linear W_Q."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.support.lazy import lazy_names

if TYPE_CHECKING:
    from hfpatch.models.build import build_scratch, inner_width, non_embedding_parameters
    from hfpatch.models.classes import load_scratch, register_scratch, take_apart

_HOMES = {
    "build_scratch": "build",
    "inner_width": "build",
    "load_scratch": "classes",
    "non_embedding_parameters": "build",
    "register_scratch": "classes",
    "take_apart": "classes",
}

__all__ = [
    "build_scratch",
    "inner_width",
    "load_scratch",
    "non_embedding_parameters",
    "register_scratch",
    "take_apart",
]

__getattr__ = lazy_names(__name__, _HOMES)
