"""Putting runs, patches and exports on the hub."""

from hfpatch.sharing.push import Pushed, push

__all__ = ["Pushed", "push"]
