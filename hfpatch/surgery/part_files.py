"""The files of a saved patch: writing and reading the adapters, and the names of their tensors."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from peft import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.support.files import printable, sha256_file, write_json, write_text
from hfpatch.support.version import __version__
from hfpatch.surgery.bases import bytes_of, fingerprint
from hfpatch.surgery.card import base_licence, is_local, patch_card, shown_base
from hfpatch.surgery.manifest import FORMAT, MANIFEST, Adapter, Base, Fingerprint, Manifest
from hfpatch.tuners.adapters import active_adapters, adapter_parameters, stack_to_save, wrappers_of_others
from hfpatch.tuners.config import home_of, method_name

_Identity = tuple[tuple[int, ...], torch.dtype, str]

TENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
CARD = "README.md"
PEFT_PREFIX = "base_model.model."
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # of torch; no part of a tensor's name


def write_patch(model: Any, folder: Path, directory: Path) -> None:
    """Write the files of a patch into an existing folder, not atomically; errors call the folder ``directory``.

    Raises:
        HfpatchError: if a trained tensor is not in the files.
    """
    path = model.name_or_path or ""
    named = {"name": path and shown_base(path), "licence": base_licence(path)}
    kind = {"model_type": model.config.model_type, "class": type(model).__name__}
    base = Base(**printable({**named, **kind}), fingerprint=Fingerprint(**fingerprint(model)))
    adapters, written = [], Counter[_Identity]()
    for name, config in stack_to_save(model).items():
        part, tensors = folder / name, tensors_of(model, name)
        part.mkdir(exist_ok=True)
        try:
            safetensors.torch.save_file(tensors, part / TENSORS, metadata={"format": "pt"})
        except SafetensorError as error:  # also where the disk is full
            raise OSError(str(error)) from error
        stored = {key: tensor_identity(tensor) for key, tensor in read_tensors(part).items()}
        if stored != {key: tensor_identity(tensor) for key, tensor in tensors.items()}:
            raise HfpatchError(f"{directory}: the file of {name!r} is not what was saved")
        written.update(stored.values())
        sha256 = sha256_file(part / TENSORS)
        entry = Adapter(name=name, method=method_name(config), sha256=sha256, module=home_of(config) or None)
        saved = copy.deepcopy(config)
        saved.inference_mode = True
        if (source := saved.base_model_name_or_path) and is_local(source):  # relative, it looks like a hub id
            saved.base_model_name_or_path = str(Path(source).absolute())
        for key, value in vars(saved).items():
            if isinstance(value, set):  # which PEFT would write in an order that changes from process to process
                setattr(saved, key, sorted(value))
        saved.save_pretrained(str(part))
        write_text(part / CARD, patch_card(base, [entry]))
        adapters.append(entry)
    require_all_saved(model, written, directory)
    manifest = Manifest(format=FORMAT, hfpatch=__version__, base=base, active=active_adapters(model), adapters=adapters)
    write_json(folder / MANIFEST, manifest.model_dump(by_alias=True, exclude_none=True))
    write_text(folder / CARD, patch_card(base, adapters))


def require_values(model: nn.Module) -> None:
    """Raise :class:`HfpatchError` if tensors of adapters have no values in this process, or a part of them."""
    for name, parameter in adapter_parameters(model).items():
        if parameter.is_meta:
            raise HfpatchError(
                f"{name}: has no values here (offloaded, or on the meta device); save the patch before accelerate "
                "offloads the model, or call accelerate.hooks.remove_hook_from_module(model, recurse=True) first"
            )
        if hasattr(parameter, "full_tensor"):
            raise HfpatchError(
                f"{name}: is sharded over processes; call save_pretrained(state_dict=...) with the gathered state of "
                "one adapter, or train a stack under DDP or with hfpatch train"
            )


def require_all_saved(model: nn.Module, written: Counter[_Identity], directory: Path) -> None:
    """Check that each tensor that is trainable or of an adapter was written, bit for bit.

    A written tensor counts for one parameter: two equal ones, such as zeros at first, need two.

    Raises:
        HfpatchError: naming the first one that was not.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad} | adapter_parameters(model)
    left, lost = written.copy(), []
    for name, parameter in trained.items():
        left[tensor_identity(parameter)] -= 1
        if left[tensor_identity(parameter)] < 0:
            lost.append(name)
    if lost:
        raise HfpatchError(
            f"{directory}: {len(lost)} of {len(trained)} trained tensors would not be in the patch, such as {lost[0]}; "
            "only the tensors of adapters are saved: freeze the rest, or adapt other modules"
        )


def tensor_identity(tensor: Tensor) -> _Identity:
    """Return a tensor's shape, dtype and the hash of its bytes."""
    return tuple(tensor.shape), tensor.dtype, xxhash.xxh3_128_hexdigest(bytes_of(tensor))


def tensors_of(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Return copies of an adapter's tensors under the names of PEFT's files."""
    return {
        key: tensor.cpu().clone(memory_format=torch.contiguous_format)
        for _, key, tensor in adapter_tensors(model, name)
    }


def adapter_tensors(model: nn.Module, name: str, *, keep_vars: bool = False) -> Iterator[tuple[str, str, Tensor]]:
    """Yield an adapter's tensors, without the base's embeddings: name in this stack, name in its file, and tensor.

    In the file's name wrappers of other adapters are left out. A wrapper of the adapter itself stays: LoRA on fused
    experts wraps one module twice. With ``keep_vars`` the tensors are the model's own.
    """
    state = model.state_dict(keep_vars=keep_vars)
    tensors = get_peft_model_state_dict(model, state, adapter_name=name, save_embedding_layers=False)
    others = wrappers_of_others(model, name)
    for key, tensor in tensors.items():
        parts, kept = key.split("."), []
        for index, part in enumerate(parts):
            if part not in _WRAPPERS and not (part == "base_layer" and ".".join(parts[:index]) in others):
                kept.append(part)
        yield key, PEFT_PREFIX + ".".join(kept), tensor


def read_tensors(folder: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a part, whose file must have the given hash."""
    path = folder / TENSORS
    if not path.is_file():
        pickle = (folder / PICKLE).is_file()
        why = f"only a pickle ({PICKLE}), which is never loaded; save it again as safetensors" if pickle else "missing"
        raise HfpatchError(f"{path}: {why}")
    require_whole(path)
    tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    if sha256 is not None and sha256_file(path) != sha256:
        raise HfpatchError(f"{path}: is not the file that {MANIFEST} names (another SHA-256); copy the patch again")
    return tensors


def require_whole(path: Path) -> None:
    """Raise :class:`HfpatchError` if a file of tensors is truncated or not safetensors."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise HfpatchError(f"{path}: truncated or not safetensors ({error})") from error
