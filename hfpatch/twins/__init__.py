"""Tiny random twins: models of the same architecture and switches as a big one, built in milliseconds."""

from hfpatch.twins.build import random_model, shrink, twin

__all__ = ["random_model", "shrink", "twin"]
