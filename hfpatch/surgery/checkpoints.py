"""Checkpoints of a patched model under ``transformers.Trainer`` and what is built on it (TRL).

Trainer saves with ``model.save_pretrained``, which refuses several active adapters. If the model is not a
``PeftModel``, it resumes from ``model.safetensors`` alone with ``model.load_state_dict(..., strict=False)``. So a
patched model also saves its adapters into that file, with a mark, and on loading adds its own base to marked tensors.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.support.files import atomic_file
from hfpatch.surgery.bases import difference, fingerprint
from hfpatch.surgery.part_files import read_tensors, require_all_saved, require_values, tensor_identity, write_patch
from hfpatch.surgery.scale import require_as_trained
from hfpatch.tuners.adapters import adapter_state

TENSORS = "model.safetensors"
_BASE = "hfpatch.base"  # marks TENSORS as the adapters of a patched model: the base's fingerprint, as the bytes of JSON
_WITHOUT_EFFECT = ("max_shard_size", "safe_serialization", "save_function")
_LOADING = "_hfpatch_loading"  # on the model, so that a copy of it has its own


def enable_checkpoints(model: nn.Module) -> None:
    """Make ``save_pretrained`` and ``load_state_dict`` of a patched model save and restore all of its adapters."""
    # A partial and not a method, so that a copy of the model, pickled or not, saves itself.
    model.save_pretrained = functools.partial(_save, model)  # type: ignore[assignment]  # a method of this model alone
    setattr(model, _LOADING, model.register_load_state_dict_pre_hook(_complete))  # type: ignore[no-untyped-call]  # torch has no type


def disable_checkpoints(model: nn.Module) -> None:
    """Undo :func:`enable_checkpoints`."""
    model.__dict__.pop("save_pretrained", None)
    if handle := model.__dict__.pop(_LOADING, None):
        handle.remove()


def _save(model: Any, save_directory: str | Path, is_main_process: bool = True, **options: Any) -> None:
    """Save a patched model's adapters so that ``load_patch`` and Trainer's ``resume_from_checkpoint`` restore them.

    One adapter is saved as transformers saves it, a PEFT adapter folder; several, or one that is not active, as
    ``save_patch`` does. Each adapter is one safetensors file, as PEFT reads it, whatever ``max_shard_size`` and
    ``safe_serialization`` say.

    Raises:
        HfpatchError: if a trained tensor is not in the files, the patch is scaled, merged, offloaded or sharded, or
            several adapters are saved with an option.
    """
    require_as_trained(model)
    directory, names = Path(save_directory), list(model.peft_config)
    options = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT and value is not None}
    if _is_own_state(model, options.get("state_dict")):
        del options["state_dict"]
    sharded = "state_dict" in options
    if not sharded:
        require_values(model)
    if len(names) == 1 and model.active_adapters():  # transformers saves the active one
        type(model).save_pretrained(model, directory, is_main_process=is_main_process, **options)
        if is_main_process and not sharded:
            written = Counter(map(tensor_identity, read_tensors(directory).values()))
            require_all_saved(model, written, directory)
    elif unusable := [name for name, value in options.items() if value]:
        stack = f"the model has {len(names)} ({', '.join(names)}); train a stack in one process, under DDP, or with"
        why = f"{stack} hfpatch train" if len(names) > 1 else f"{names[0]} is not active; call model.set_adapter first"
        raise HfpatchError(f"save_pretrained({', '.join(unusable)}=...) saves one adapter, and {why}")
    elif is_main_process:
        directory.mkdir(parents=True, exist_ok=True)
        write_patch(model, directory, directory)
    if is_main_process and not sharded:  # sharded weights are saved and resumed by accelerate
        mark = torch.tensor(list(json.dumps(fingerprint(model)).encode()), dtype=torch.uint8)
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in adapter_state(model).items()}
        with atomic_file(directory / TENSORS) as temporary:
            safetensors.torch.save_file({**tensors, _BASE: mark}, temporary, metadata={"format": "pt"})


def _is_own_state(model: nn.Module, state: dict[str, Tensor] | None) -> bool:
    """Return whether a state dict has the adapters' very tensors, as accelerate returns it where nothing is sharded."""
    adapters = adapter_state(model)
    return state is not None and all(
        type(tensor.data) is Tensor and name in state and state[name].data_ptr() == tensor.data_ptr()
        for name, tensor in adapters.items()
    )


def _complete(model: nn.Module, state: dict[str, Tensor], *_: Any) -> None:
    """Add the model's own base to a checkpoint of its adapters, before ``load_state_dict`` reads it.

    Raises:
        HfpatchError: if the checkpoint was made on another base or with other adapters.
    """
    mark = state.pop(_BASE, None)
    if mark is None:
        return
    if why := difference(json.loads(bytes(mark.tolist())), model):
        raise HfpatchError(f"the checkpoint was made on another base ({why}); load that one to resume")
    expected = {name: tensor.shape for name, tensor in adapter_state(model).items()}
    if expected != {name: tensor.shape for name, tensor in state.items()}:
        raise HfpatchError("the checkpoint has other adapters; patch the model as it was patched when it was saved")
    for name, tensor in model.state_dict().items():
        state.setdefault(name, tensor)
