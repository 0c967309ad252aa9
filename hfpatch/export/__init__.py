"""A base and its patch as one Hugging Face folder that needs neither hfpatch nor PEFT."""

from hfpatch.export.folder import Export, export_patch

__all__ = ["Export", "export_patch"]
