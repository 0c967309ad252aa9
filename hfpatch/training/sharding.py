"""Tensors that FSDP2 or DeepSpeed shard over processes: gathered whole, and written back."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator, Mapping

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from hfpatch.errors import HfpatchError
from hfpatch.support.environment import is_set
from hfpatch.training.optim import trainable_parameters

FSDP = "ACCELERATE_USE_FSDP"
DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its values; every process must call it, in the same order."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if hasattr(tensor, "ds_id"):  # ZeRO-3 leaves an empty placeholder on the parameter
        deepspeed = importlib.import_module("deepspeed")  # ZeRO-3 only runs where it is installed
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.data.clone()
    return tensor


def whole_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return detached tensors with all their values, by name; every process must call it."""
    return {name: whole(tensor.detach() if isinstance(tensor, DTensor) else tensor) for name, tensor in tensors.items()}


def like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a whole ``value``, the same on every process, on the device of ``parameter`` and cut as it is."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


@contextlib.contextmanager
def whole_afterwards(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yield the model, or a copy of it where training shards its tensors; then copy back what was trained."""
    if not cuts_tensors():
        yield model
        return
    twin = copy.deepcopy(model)
    yield twin
    whole = whole_tensors(trainable_parameters(twin))
    for name, parameter in trainable_parameters(model).items():
        parameter.data.copy_(whole[name])


def cuts_tensors() -> bool:
    """Whether the launcher asked for FSDP or DeepSpeed, which shard a model's tensors."""
    return is_set(FSDP) or is_set(DEEPSPEED)


def under_deepspeed() -> bool:
    """Whether the launcher asked for DeepSpeed, which keeps the optimiser's state to itself."""
    return is_set(DEEPSPEED)


def configure_deepspeed(accelerator: Accelerator, batch: int, micro_batch: int, max_grad_norm: float | None) -> None:
    """Set DeepSpeed's batches, clipping and precision from the recipe.

    Raises:
        HfpatchError: if the launcher's configuration has other values.
    """
    values = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": batch // (micro_batch * accelerator.num_processes),
        "gradient_clipping": max_grad_norm or 0.0,
        "fp16.enabled": False,
        "bf16.enabled": False,
    }
    mismatches: list[str] = []
    for name, value in values.items():
        accelerator.state.deepspeed_plugin.fill_match(name, mismatches, **{name: value})
    if mismatches:
        raise HfpatchError(
            f"DeepSpeed's configuration does not fit the recipe ({' '.join(mismatches)}); set these keys to auto, or "
            "change the recipe"
        )
