"""A base and its patch as one Hugging Face folder that needs neither hfpatch nor PEFT."""

from hfpatch.export.folder import export_patch
from hfpatch.export.write import Export

__all__ = ["Export", "export_patch"]
