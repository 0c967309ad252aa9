"""Is what was saved what was trained? Empty or partial adapter files are the classic failure of sharded training."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.training.precision import trainable_parameters

Print = tuple[tuple[int, ...], torch.dtype, str]


def check_saved(model: nn.Module, folder: Path) -> None:
    """Reopen the safetensors files below a folder and find every trained tensor in them, bit for bit.

    Raises:
        HfpatchError: naming the first trained tensor that is not there.
    """
    found: Counter[Print] = Counter()
    for file in sorted(folder.rglob("*.safetensors")):
        found.update(_print(tensor) for tensor in load_file(file).values())
    for name, parameter in trainable_parameters(model).items():
        own = _print(parameter.detach())
        if found[own] == 0:
            raise HfpatchError(
                f"{folder}: {name}, {tuple(parameter.shape)}, was trained and is not in the saved files; the run's "
                "newest checkpoint has it: free space and run the same command with --resume"
            )
        found[own] -= 1


def _print(tensor: torch.Tensor) -> Print:
    """Return a tensor's shape, dtype and the hash of its bytes."""
    data = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tuple(tensor.shape), tensor.dtype, hashlib.sha256(data).hexdigest()
