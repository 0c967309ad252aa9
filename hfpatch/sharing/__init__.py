"""Uploading runs, patches and exports to the hub."""

from hfpatch.sharing.push import Pushed, push

__all__ = ["Pushed", "push"]
