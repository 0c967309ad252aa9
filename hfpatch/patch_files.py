"""A patch on disk: one folder for the whole stack, in which every part is a valid PEFT adapter folder.

    DIRECTORY/patch.json               the order of the stack, the base it belongs to, a hash of every part
    DIRECTORY/README.md                the card
    DIRECTORY/<adapter name>/          adapter_config.json, adapter_model.safetensors, README.md

Tensors are safetensors, everything else is JSON and Markdown; nothing is ever unpickled.
"""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from peft import PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from torch import Tensor, nn

from hfpatch.bases import fingerprint
from hfpatch.card import patch_card
from hfpatch.errors import HfpatchError
from hfpatch.files import atomic_directory, read_json, sha256_file, write_json, write_text
from hfpatch.patching import activate, method_name, patch, stack, unpatch
from hfpatch.tuners.adapters import has_adapters
from hfpatch.tuners.config import SurgeryConfig

Model = TypeVar("Model", bound=nn.Module)

MANIFEST = "patch.json"
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PEFT_PREFIX = "base_model.model."
_OUTER_WRAPPER = re.compile(r"\.base_layer(?!\.(weight|bias)$)")


def save_patch(model: nn.Module, directory: str | Path) -> Path:
    """Write the whole stack of a patched model to a folder, atomically.

    Each part, loaded alone by ``PeftModel.from_pretrained``, is that one adapter.

    Raises:
        HfpatchError: if the model has no adapters, the folder holds something else than a patch, or it cannot be
            written; nothing half-written remains.
    """
    if not stack(model):
        raise HfpatchError("the model has no adapters to save; call hfpatch.patch(model, config) first")
    directory = Path(directory)
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST).is_file():
        raise HfpatchError(f"{directory}: holds something else than a patch, which saving would replace; name another")
    with atomic_directory(directory) as temporary:
        write_patch(model, temporary)
    return directory


def write_patch(model: nn.Module, directory: Path) -> None:
    """Write the files of a patch into an existing folder, whatever else it holds; not atomically."""
    adapters = []
    for name, config in stack(model).items():
        _save_part(model, name, config, directory / name)
        adapters.append(
            {"name": name, "method": method_name(config), "sha256": sha256_file(directory / name / TENSORS)}
        )
    write_json(directory / MANIFEST, {"format": 1, "base": _describe_base(model), "adapters": adapters})
    write_text(directory / "README.md", patch_card(_describe_base(model), adapters))


def load_patch(
    model: Model, directory: str | Path, *, trainable: bool = False, allow_other_base: bool = False
) -> Model:
    """Stack the adapters of a saved patch on a model, in place and strictly.

    Args:
        model: the base, without adapters.
        directory: what :func:`save_patch` wrote, or the folder of a single PEFT adapter.
        trainable: leave the adapters trainable.
        allow_other_base: accept a base whose weights differ from those that the patch was trained on.

    Raises:
        HfpatchError: if a file is missing, truncated or pickled, a tensor is missing, unexpected or of another shape,
            or the base is another one; the model is then as it was.
    """
    directory = Path(directory)
    if has_adapters(model):
        raise HfpatchError("the model has adapters already; call hfpatch.unpatch(model) first")
    folders = _read_manifest(model, directory, allow_other_base=allow_other_base)
    configs = {name: _read_config(folder) for name, folder in folders.items()}
    tensors = {name: _read_tensors(folder) for name, folder in folders.items()}
    patch(model, list(configs.values()), names=list(configs))
    try:
        for name, folder in folders.items():
            _fill(model, name, tensors[name], folder)
    except HfpatchError:
        unpatch(model)
        raise
    activate(model, trainable=trainable, upcast=False)
    model.eval()
    return model


def _save_part(model: nn.Module, name: str, config: PeftConfig, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    tensors = {key: tensor.clone() for key, tensor in _state(model, name, config).items()}  # layers may share some
    try:
        safetensors.torch.save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    except SafetensorError as error:  # also where the disk is full
        raise OSError(str(error)) from error
    saved = copy.deepcopy(config)
    saved.inference_mode = True
    saved.save_pretrained(str(folder))
    card = [{"name": name, "method": method_name(config), "sha256": sha256_file(folder / TENSORS)}]
    write_text(folder / "README.md", patch_card(_describe_base(model), card))


def _state(model: nn.Module, name: str, config: PeftConfig) -> dict[str, Tensor]:
    """Return an adapter's tensors under the names of PEFT's files."""
    state = _nested_state(model, name, config)
    return {_file_key(key): tensor.detach().cpu().contiguous() for key, tensor in state.items()}


def _nested_state(model: nn.Module, name: str, config: PeftConfig, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """Return an adapter's tensors under the names that this stack gives them; with ``keep_vars`` the model's own."""
    embeddings: Any = False if isinstance(config, SurgeryConfig) else "auto"
    state: dict[str, Tensor] = get_peft_model_state_dict(
        model, model.state_dict(keep_vars=keep_vars), adapter_name=name, save_embedding_layers=embeddings
    )
    return state


def _file_key(key: str) -> str:
    """Return a tensor's name in the file of its adapter: as if no other adapter were wrapped around the module."""
    return PEFT_PREFIX + _OUTER_WRAPPER.sub("", key)


def _describe_base(model: Any) -> dict[str, Any]:
    return {
        "name": model.name_or_path,
        "model_type": model.config.model_type,
        "class": type(model).__name__,
        "fingerprint": fingerprint(model),
    }


def _read_manifest(model: nn.Module, directory: Path, *, allow_other_base: bool) -> dict[str, Path]:
    """Return the folders of the parts by adapter name, in order."""
    if (directory / CONFIG).is_file():
        return {"default": directory}
    if not (directory / MANIFEST).is_file():
        raise HfpatchError(f"{directory}: no patch here ({MANIFEST} or {CONFIG} is missing)")
    manifest = read_json(directory / MANIFEST)
    try:
        saved, adapters = manifest["base"], [(a["name"], a["method"], a["sha256"]) for a in manifest["adapters"]]
        theirs = saved["fingerprint"]
    except (KeyError, TypeError) as error:
        raise HfpatchError(f"{directory / MANIFEST}: not a patch manifest (no {error})") from error
    if theirs != fingerprint(model) and not allow_other_base:
        raise HfpatchError(
            f"{directory}: made for another base, {saved.get('name') or saved.get('class')!r} (its weights differ); "
            "load that one, or pass allow_other_base=True"
        )
    for name, method, _ in adapters:
        found = method_name(_read_config(directory / name))
        if found != method:
            raise HfpatchError(f"{directory / name}: holds a {found} adapter where {MANIFEST} says {method}")
    return {name: directory / name for name, _, _ in adapters}


def _read_config(folder: Path) -> PeftConfig:
    if not (folder / CONFIG).is_file():
        raise HfpatchError(f"{folder / CONFIG}: missing; the adapter folder is incomplete")
    read_json(folder / CONFIG)
    try:
        config: PeftConfig = PeftConfig.from_pretrained(str(folder))
    except (KeyError, TypeError, ValueError) as error:
        raise HfpatchError(f"{folder / CONFIG}: not an adapter configuration ({error})") from error
    if config.peft_type is None:
        raise HfpatchError(f"{folder / CONFIG}: not an adapter configuration (no peft_type)")
    return config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / TENSORS
    if not path.is_file():
        pickle = (folder / PICKLE).is_file()
        why = f"only a pickle ({PICKLE}), which is never loaded; save it again as safetensors" if pickle else "missing"
        raise HfpatchError(f"{path}: {why}")
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except (SafetensorError, OSError) as error:
        raise HfpatchError(f"{path}: truncated or not safetensors ({error})") from error
    return tensors


def _fill(model: nn.Module, name: str, tensors: dict[str, Tensor], folder: Path) -> None:
    """Put the tensors of one part in place, in the dtype in which they were saved."""
    expected = _state(model, name, stack(model)[name])
    for problem, keys in (
        ("is missing", expected.keys() - tensors.keys()),
        ("is unexpected", tensors.keys() - expected.keys()),
        ("has another shape", {k for k in expected.keys() & tensors.keys() if expected[k].shape != tensors[k].shape}),
    ):
        if keys:
            more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
            raise HfpatchError(
                f"{folder / TENSORS}: tensor {min(keys)!r} {problem}{more}; the adapter is not for this model"
            )
    state = {}
    for key, tensor in _nested_state(model, name, stack(model)[name], keep_vars=True).items():
        state[key] = tensors[_file_key(key)]
        tensor.data = tensor.data.to(state[key].dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_peft_model_state_dict(model, state, adapter_name=name)
