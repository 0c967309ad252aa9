"""A patch on disk: one folder for the stack, in which every part is a valid PEFT adapter folder.

    DIRECTORY/patch.json               the order of the stack, the base it belongs to, a hash of every part
    DIRECTORY/README.md                the card
    DIRECTORY/<adapter name>/          adapter_config.json, adapter_model.safetensors, README.md

Tensors are safetensors, everything else is JSON and Markdown; nothing is ever unpickled.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftConfig, PeftMixedModel, PeftModel, set_peft_model_state_dict
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.support.files import atomic_directory, read_json
from hfpatch.support.plugins import named_module
from hfpatch.surgery.bases import difference
from hfpatch.surgery.manifest import CONFIG, MANIFEST, Adapter, read_manifest, require_patch
from hfpatch.surgery.part_files import (
    CARD,
    PEFT_PREFIX,
    TENSORS,
    adapter_tensors,
    read_tensors,
    require_values,
    tensor_identity,
    tensors_of,
    write_patch,
)
from hfpatch.surgery.patch import patch, unpatch
from hfpatch.surgery.scale import require_as_trained, scale_patch
from hfpatch.tuners.adapters import Model, activate_adapters, adapter_parameters, base_parameters, has_adapters, stack
from hfpatch.tuners.checks import require_untouched_base
from hfpatch.tuners.config import method_name
from hfpatch.tuners.quantised import keep_unpacked
from hfpatch.tuners.registration import require_loaded

KNOWN: dict[Any, Any] = PEFT_TYPE_TO_CONFIG_MAPPING  # by peft_type


def save_patch(model: Any, directory: str | Path) -> Path:
    """Write the stack of a patched model to a folder, atomically.

    ``PeftModel.from_pretrained`` loads each part as one adapter. The files are read again and compared with all
    trainable tensors and all tensors of adapters, bit for bit.

    Args:
        model: a patched model; a ``PeftModel`` is saved as the model that it wraps.
        directory: the folder; an older patch there is replaced, a link is followed.

    Raises:
        HfpatchError: if the model has no adapters, or scaled, merged, offloaded or sharded ones, a trained tensor would
            not be in the patch, the folder contains other files, or it cannot be written; no partial files remain.
    """
    model = getattr(model, "_orig_mod", model)  # in the wrapper of torch.compile
    if isinstance(model, PeftMixedModel | PeftModel):
        model = model.base_model.model if isinstance(model, PeftMixedModel) else model.get_base_model()
    if not stack(model):
        raise HfpatchError("the model has no adapters to save; call hfpatch.patch(model, config) first")
    require_untouched_base(stack(model).values())
    require_as_trained(model)
    require_values(model)
    directory = Path(directory)
    if directory.is_dir() and any(directory.iterdir()):  # all of it is replaced
        if not (directory / MANIFEST).is_file():
            raise HfpatchError(f"{directory}: contains files of something other than a patch; name another folder")
        names = [Path(part.name) for part in read_manifest(directory / MANIFEST).adapters]
        ours = {Path(MANIFEST), Path(CARD), *(name / file for name in names for file in (CONFIG, TENSORS, CARD))}
        others = [path for path in sorted(directory.rglob("*")) if path.is_symlink() or not path.is_dir()]
        if foreign := [path for path in others if path.relative_to(directory) not in ours]:
            raise HfpatchError(
                f"{directory}: contains {foreign[0].relative_to(directory)}, which is not of a patch and saving would "
                "remove it; move it or name another folder"
            )
    with atomic_directory(directory) as temporary:
        write_patch(model, temporary, directory)
    return directory


def load_patch(
    model: Model,
    directory: str | Path,
    *,
    trainable: bool = False,
    allow_other_base: bool = False,
    scale: float = 1.0,
) -> Model:
    """Stack the adapters of a saved patch on a model, in place and strictly, active as they were when saved.

    Args:
        model: the base, without adapters.
        directory: a folder of :func:`save_patch`, or of a single PEFT adapter.
        trainable: leave the active adapters trainable.
        allow_other_base: accept a base with other weights than the patch was trained on.
        scale: the factor of the change, see :func:`hfpatch.scale_patch`.

    Raises:
        HfpatchError: if a file is missing, damaged or pickled, a tensor is missing, unexpected or of another shape,
            or the base is another one; the model is then unchanged.
    """
    directory = Path(directory)
    if has_adapters(model):
        raise HfpatchError("the model has adapters already; call hfpatch.unpatch(model) first")
    require_patch(directory)
    active = None
    if (directory / CONFIG).is_file():  # of a single adapter that PEFT wrote
        folders = {"default": directory}
        configs, tensors = {"default": _read_config(directory)}, {"default": read_tensors(directory)}
    else:
        manifest = read_manifest(directory / MANIFEST)
        active, base = manifest.active, manifest.base
        folders = {part.name: directory / part.name for part in manifest.adapters}
        configs = {part.name: _read_config(folders[part.name], part) for part in manifest.adapters}
        tensors = {part.name: read_tensors(folders[part.name], part.sha256) for part in manifest.adapters}
        same = base.class_name == type(model).__name__
        if not allow_other_base and (why := difference(base.fingerprint.model_dump(), model, head=same)):
            raise HfpatchError(
                f"{directory}: made for another base, {base.name or base.class_name!r} ({why}); load that one, or "
                "allow another: allow_other_base=True, or --allow-other-base of the commands"
            )
    keep_unpacked(model, training=trainable)
    patch(model, list(configs.values()), names=list(configs))
    try:
        for name, folder in folders.items():
            _fill(model, name, tensors[name], folder)
        activate_adapters(model, list(stack(model)) if active is None else active)
        for parameter in adapter_parameters(model).values() if not trainable else ():
            parameter.requires_grad = False
        if scale != 1:
            scale_patch(model, scale)
    except HfpatchError:
        unpatch(model)
        raise
    model.eval()
    return model


def import_methods(directory: Path) -> None:
    """Import the modules that define a patch's methods: code that comes with no package, which the user trusts.

    Raises:
        HfpatchError: if a module is not there, or cannot be imported.
    """
    if (directory / MANIFEST).is_file():  # a PEFT adapter does not say where its method is
        for part in read_manifest(directory / MANIFEST).adapters:
            if part.module:
                named_module(part.module, f"{directory / MANIFEST}")


def _read_config(folder: Path, part: Adapter | None = None) -> PeftConfig:
    """Read the configuration of an adapter, which must be of the method that the manifest names for ``part``."""
    if not (folder / CONFIG).is_file():
        raise HfpatchError(f"{folder / CONFIG}: missing; the adapter folder is incomplete")
    values = read_json(folder / CONFIG)
    kind = values.get("peft_type")
    if not isinstance(kind, str):
        raise HfpatchError(f"{folder / CONFIG}: not an adapter configuration (no peft_type)")
    require_loaded(kind.lower())
    if kind not in KNOWN:
        where = "import the module that defines it first"
        if part and part.module:
            where = f"import {part.module} first or, of commands, add --trust-code"
        raise HfpatchError(
            f"{folder / CONFIG}: of method {kind.lower()!r}, which neither PEFT nor hfpatch has; install its package, "
            f"{where}"
        )
    try:
        options = {key: values[key] for key in inspect.signature(KNOWN[kind]).parameters if key in values}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            KNOWN[kind](**options)  # PEFT itself would try wrong values again without end
        config: PeftConfig = PeftConfig.from_pretrained(str(folder))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise HfpatchError(f"{folder / CONFIG}: not an adapter configuration ({error})") from error
    if part is not None and (method := method_name(config)) != part.method:
        raise HfpatchError(f"{folder}: contains a {method} adapter where {MANIFEST} says {part.method}")
    return config


def named_as_in(model: nn.Module, tensors: dict[str, Tensor], expected: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of an adapter by their names in a model with another head than the one they were saved from.

    A head puts the name of the body, such as ``model``, before the names inside; ``expected`` are those of the model.
    """
    prefix, names, renamed = f"{PEFT_PREFIX}{getattr(model, 'base_model_prefix', '')}.", set(expected), {}
    for key, tensor in tensors.items():
        without, within = key.replace(prefix, PEFT_PREFIX, 1), key.replace(PEFT_PREFIX, prefix, 1)
        renamed[next((name for name in (key, without, within) if name in names), key)] = tensor
    return renamed


def _fill(model: nn.Module, name: str, tensors: dict[str, Tensor], folder: Path) -> None:
    """Put the tensors of one part in place, in the dtype in which they were saved."""
    expected, base = tensors_of(model, name), base_parameters(model)
    tensors = named_as_in(model, tensors, expected)
    for key, tensor in list(tensors.items()):  # PEFT saves the base's own embeddings beside adapters on them
        original = base.get(key.removeprefix(PEFT_PREFIX).replace(".base_layer.", "."))
        if key in expected or original is None:  # a trained copy of a module is called as the module itself
            continue
        if original.shape != tensor.shape or not torch.equal(original.detach().cpu(), tensor.to(original.dtype)):
            raise HfpatchError(f"{folder / TENSORS}: {key!r} is of another base than the model")
        del tensors[key]
    for problem, keys in (
        ("is missing", expected.keys() - tensors.keys()),
        ("is unexpected", tensors.keys() - expected.keys()),
        ("has another shape", {k for k in expected.keys() & tensors.keys() if expected[k].shape != tensors[k].shape}),
    ):
        if keys:
            more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
            raise HfpatchError(f"{folder / TENSORS}: tensor {min(keys)!r} {problem}{more}: not a patch of this model")
    filling = {}
    for nested, key, tensor in adapter_tensors(model, name, keep_vars=True):
        filling[nested] = tensors[key]
        tensor.data = tensor.data.to(tensors[key].dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_peft_model_state_dict(model, filling, adapter_name=name)
    filled = tensors_of(model, name)
    if wrong := [key for key, tensor in tensors.items() if tensor_identity(filled[key]) != tensor_identity(tensor)]:
        raise HfpatchError(f"{folder / TENSORS}: PEFT does not put tensor {min(wrong)!r} in its place in this model")
