"""The pretrained checkpoints that come with the package."""

from __future__ import annotations

from pathlib import Path

from hfpatch.errors import HfpatchError, nearest

CHECKPOINTS = ("gpt-neox", "gpt2")


def checkpoint(name: str) -> Path:
    """Return the folder of a checkpoint, in Hugging Face format: weights, config and tokenizer.

    Raises:
        HfpatchError: if there is no such checkpoint.
    """
    if name not in CHECKPOINTS:
        known = ", ".join(CHECKPOINTS)
        raise HfpatchError(f"tinyworld has no checkpoint {name!r}{nearest(name, CHECKPOINTS)}; it has {known}")
    return Path(__file__).parent / "checkpoints" / name
