"""Uploading runs, patches and exports to the hub."""

from hfpatch.support.lazy import needing_lab

with needing_lab():
    from hfpatch.sharing.push import Pushed, push

__all__ = ["Pushed", "push"]
