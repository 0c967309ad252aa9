"""The version of hfpatch, where every package can import it."""

__version__ = "0.1.0"
