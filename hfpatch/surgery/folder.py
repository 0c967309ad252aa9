"""A patch on disk: one folder for the stack, in which every part is a valid PEFT adapter folder.

    DIRECTORY/patch.json               the order of the stack, the base it belongs to, a hash of every part
    DIRECTORY/README.md                the card
    DIRECTORY/<adapter name>/          adapter_config.json, adapter_model.safetensors, README.md

Tensors are safetensors, everything else is JSON and Markdown; nothing is ever unpickled.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
import xxhash
from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PeftConfig,
    PeftMixedModel,
    PeftModel,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors import SafetensorError
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.support.files import atomic_directory, printable, read_json, sha256_file, write_json, write_text
from hfpatch.surgery.bases import bytes_of, difference, fingerprint
from hfpatch.surgery.card import patch_card
from hfpatch.surgery.manifest import FORMAT, MANIFEST, Adapter, Base, Fingerprint, Manifest, read_manifest, refuse_a_run
from hfpatch.surgery.patch import activate, patch, stack, unpatch
from hfpatch.surgery.scale import is_scaled, scale_patch
from hfpatch.tuners.adapters import (
    active_adapters,
    adapter_parameters,
    base_parameters,
    has_adapters,
    wrappers_of_others,
)
from hfpatch.tuners.checks import require_untouched_base
from hfpatch.tuners.config import home_of, method_name
from hfpatch.tuners.plugins import require_loaded

Model = TypeVar("Model", bound=nn.Module)
KNOWN: dict[Any, Any] = PEFT_TYPE_TO_CONFIG_MAPPING  # by peft_type
_Identity = tuple[tuple[int, ...], torch.dtype, str]

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
CARD = "README.md"
PEFT_PREFIX = "base_model.model."
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # of torch; no part of a tensor's name


def save_patch(model: Any, directory: str | Path) -> Path:
    """Write the stack of a patched model to a folder, atomically.

    Each part, loaded alone by ``PeftModel.from_pretrained``, is that one adapter. What was written is read again and
    compared with what is trainable or belongs to an adapter, bit for bit.

    Args:
        model: a patched model; a ``PeftModel`` is saved as the model that it wraps.
        directory: the folder; an older patch there is replaced, a link is followed.

    Raises:
        HfpatchError: if the model has no adapters, something trained would not be in the patch, the folder contains
            files that are not of a patch, or it cannot be written; nothing half-written remains.
    """
    model = getattr(model, "_orig_mod", model)  # in the wrapper of torch.compile
    if isinstance(model, PeftMixedModel | PeftModel):
        model = model.base_model.model if isinstance(model, PeftMixedModel) else model.get_base_model()
    if not stack(model):
        raise HfpatchError("the model has no adapters to save; call hfpatch.patch(model, config) first")
    require_untouched_base(stack(model).values())
    if is_scaled(model):
        raise HfpatchError(
            "the patch is scaled, and a folder has it as it was trained; call hfpatch.scale_patch(model, 1) before, "
            "and hfpatch.load_patch(model, directory, scale=...) later"
        )
    directory = Path(directory)
    _require_replaceable(directory)
    with atomic_directory(directory) as temporary:
        write_patch(model, temporary, directory)
    return directory


def write_patch(model: Any, folder: Path, directory: Path) -> None:
    """Write the files of a patch into an existing folder, whatever else it contains; not atomically.

    Args:
        model: a patched model.
        folder: the folder.
        directory: what errors call it.

    Raises:
        HfpatchError: if something trained is not in the files.
    """
    identity = {"name": model.name_or_path or "", "model_type": model.config.model_type, "class": type(model).__name__}
    base = Base(**printable(identity), fingerprint=Fingerprint(**fingerprint(model)))
    adapters, written = [], Counter[_Identity]()
    for name, config in stack(model).items():
        part = folder / name
        written.update(_write_tensors(_state(model, name), part, directory))
        sha256 = sha256_file(part / TENSORS)
        entry = Adapter(name=name, method=method_name(config), sha256=sha256, module=home_of(config) or None)
        saved = copy.deepcopy(config)
        saved.inference_mode = True
        for key, value in vars(saved).items():
            if isinstance(value, set):  # which PEFT would write in an order that changes from process to process
                setattr(saved, key, sorted(value))
        saved.save_pretrained(str(part))
        write_text(part / CARD, patch_card(base, [entry]))
        adapters.append(entry)
    _require_all_saved(model, written, directory)
    manifest = Manifest(format=FORMAT, base=base, active=active_adapters(model), adapters=adapters)
    write_json(folder / MANIFEST, manifest.model_dump(by_alias=True, exclude_none=True))
    write_text(folder / CARD, patch_card(base, adapters))


def require_adapter_saved(model: nn.Module, folder: Path) -> None:
    """Find everything that is trainable or of an adapter in the folder of a model's only adapter, which others wrote.

    Raises:
        HfpatchError: if something is missing there.
    """
    _require_all_saved(model, Counter(map(_identity, _read_tensors(folder).values())), folder)


def load_patch(
    model: Model,
    directory: str | Path,
    *,
    trainable: bool = False,
    allow_other_base: bool = False,
    scale: float = 1.0,
) -> Model:
    """Stack the adapters of a saved patch on a model, in place and strictly; those active when it was saved are active.

    Args:
        model: the base, without adapters.
        directory: what :func:`save_patch` wrote, or the folder of a single PEFT adapter.
        trainable: leave the active adapters trainable.
        allow_other_base: accept a base whose weights differ from those that the patch was trained on.
        scale: what the change is multiplied by, see :func:`hfpatch.scale_patch`.

    Raises:
        HfpatchError: if a file is missing, damaged or pickled, a tensor is missing, unexpected or of another shape,
            or the base is another one; the model is then as it was.
    """
    directory = Path(directory)
    if has_adapters(model):
        raise HfpatchError("the model has adapters already; call hfpatch.unpatch(model) first")
    manifest = _manifest_of(directory)
    if manifest is None:
        folders = {"default": directory}
        configs, tensors = {"default": _read_config(directory)}, {"default": _read_tensors(directory)}
    else:
        folders = {part.name: directory / part.name for part in manifest.adapters}
        configs = {part.name: _read_part(directory, part) for part in manifest.adapters}
        tensors = {part.name: _read_tensors(folders[part.name], part.sha256) for part in manifest.adapters}
        if not allow_other_base:
            _require_base(model, manifest.base, directory)
    patch(model, list(configs.values()), names=list(configs))
    try:
        for name, folder in folders.items():
            _fill(model, name, tensors[name], folder)
        activate(model, manifest.active if manifest is not None else None, trainable=trainable, upcast=False)
        scale_patch(model, scale)
    except HfpatchError:
        unpatch(model)
        raise
    model.eval()
    return model


def _require_replaceable(directory: Path) -> None:
    """Refuse a folder that contains anything but a patch, since all of it is replaced."""
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    if not (directory / MANIFEST).is_file():
        raise HfpatchError(f"{directory}: contains files that are not of a patch; name another folder")
    names = [Path(part.name) for part in read_manifest(directory / MANIFEST).adapters]
    ours = {Path(MANIFEST), Path(CARD), *(name / file for name in names for file in (CONFIG, TENSORS, CARD))}
    others = [path for path in sorted(directory.rglob("*")) if path.is_symlink() or not path.is_dir()]
    if foreign := [path for path in others if path.relative_to(directory) not in ours]:
        raise HfpatchError(
            f"{directory}: contains {foreign[0].relative_to(directory)}, which is not of a patch and saving would "
            "remove it; move it or name another folder"
        )


def _write_tensors(tensors: dict[str, Tensor], folder: Path, directory: Path) -> list[_Identity]:
    """Write one part's tensors, and return what is in the file."""
    folder.mkdir(exist_ok=True)
    try:
        safetensors.torch.save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    except SafetensorError as error:  # also where the disk is full
        raise OSError(str(error)) from error
    written = {key: _identity(tensor) for key, tensor in _read_tensors(folder).items()}
    if written != {key: _identity(tensor) for key, tensor in tensors.items()}:
        raise HfpatchError(f"{directory}: the file of {folder.name!r} is not what was saved")
    return list(written.values())


def _require_all_saved(model: nn.Module, written: Counter[_Identity], directory: Path) -> None:
    """Find everything that is trainable or belongs to an adapter in what was written, bit for bit.

    A tensor in a file counts for one parameter, so that two equal ones (as zeros at first) need two.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad} | adapter_parameters(model)
    left, lost = written.copy(), []
    for name, parameter in trained.items():
        left[_identity(parameter)] -= 1
        if left[_identity(parameter)] < 0:
            lost.append(name)
    if lost:
        raise HfpatchError(
            f"{directory}: {len(lost)} of {len(trained)} trained tensors would not be in the patch, such as {lost[0]}; "
            "only the tensors of adapters are saved: freeze the rest, or adapt other modules"
        )


def _identity(tensor: Tensor) -> _Identity:
    """Return a tensor's shape, dtype and the hash of its bytes."""
    return tuple(tensor.shape), tensor.dtype, xxhash.xxh3_128_hexdigest(bytes_of(tensor))


def _state(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Return copies of an adapter's tensors, of which layers may share some, under the names of PEFT's files."""
    rename, state = _file_keys(model, name), _nested_state(model, name)
    return {rename(key): tensor.cpu().clone(memory_format=torch.contiguous_format) for key, tensor in state.items()}


def _nested_state(model: nn.Module, name: str, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """Return an adapter's tensors under the names that this stack gives them; with ``keep_vars`` the model's own.

    The base's embeddings are not among them.
    """
    state: dict[str, Tensor] = get_peft_model_state_dict(
        model, model.state_dict(keep_vars=keep_vars), adapter_name=name, save_embedding_layers=False
    )
    return state


def _file_keys(model: nn.Module, name: str) -> Callable[[str], str]:
    """Return the function from a tensor's name in this stack to that in its adapter's file.

    There it is called as if no other adapter were wrapped around the module. A wrapper of the adapter itself stays in
    the name: LoRA on fused experts wraps one module twice.
    """
    others = wrappers_of_others(model, name)

    def file_key(key: str) -> str:
        parts, kept = key.split("."), []
        for index, part in enumerate(parts):
            if part not in _WRAPPERS and not (part == "base_layer" and ".".join(parts[:index]) in others):
                kept.append(part)
        return PEFT_PREFIX + ".".join(kept)

    return file_key


def _manifest_of(directory: Path) -> Manifest | None:
    """Return what ``patch.json`` says; None for the folder of a single adapter that PEFT wrote."""
    if (directory / CONFIG).is_file():
        return None
    if not (directory / MANIFEST).is_file():
        refuse_a_run(directory)
        raise HfpatchError(f"{directory}: no patch here ({MANIFEST} or {CONFIG} is missing)")
    return read_manifest(directory / MANIFEST)


def _read_part(directory: Path, part: Adapter) -> PeftConfig:
    config = _read_config(directory / part.name, part.module)
    if (found := method_name(config)) != part.method:
        raise HfpatchError(f"{directory / part.name}: contains a {found} adapter where {MANIFEST} says {part.method}")
    return config


def _require_base(model: nn.Module, base: Base, directory: Path) -> None:
    if why := difference(base.fingerprint.model_dump(), model):
        raise HfpatchError(
            f"{directory}: made for another base, {base.name or base.class_name!r} ({why}); load that one, or allow "
            "another: allow_other_base=True, or --allow-other-base of the commands"
        )


def _read_config(folder: Path, module: str | None = None) -> PeftConfig:
    if not (folder / CONFIG).is_file():
        raise HfpatchError(f"{folder / CONFIG}: missing; the adapter folder is incomplete")
    kind = read_json(folder / CONFIG).get("peft_type")
    if isinstance(kind, str):
        require_loaded(kind.lower())
        if kind not in KNOWN:
            where = f"import {module}" if module else "import the module that defines it"
            raise HfpatchError(
                f"{folder / CONFIG}: of method {kind.lower()!r}, which neither PEFT nor hfpatch has; {where} first, or "
                "install its package"
            )
    try:
        config: PeftConfig = PeftConfig.from_pretrained(str(folder))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise HfpatchError(f"{folder / CONFIG}: not an adapter configuration ({error})") from error
    if config.peft_type is None:
        raise HfpatchError(f"{folder / CONFIG}: not an adapter configuration (no peft_type)")
    return config


def _read_tensors(folder: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a part, whose file must have the given hash."""
    path = folder / TENSORS
    if not path.is_file():
        pickle = (folder / PICKLE).is_file()
        why = f"only a pickle ({PICKLE}), which is never loaded; save it again as safetensors" if pickle else "missing"
        raise HfpatchError(f"{path}: {why}")
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except (SafetensorError, OSError) as error:
        raise HfpatchError(f"{path}: truncated or not safetensors ({error})") from error
    if sha256 is not None and sha256_file(path) != sha256:
        raise HfpatchError(f"{path}: is not the file that {MANIFEST} names (another SHA-256); copy the patch again")
    return tensors


def _fill(model: nn.Module, name: str, tensors: dict[str, Tensor], folder: Path) -> None:
    """Put the tensors of one part in place, in the dtype in which they were saved."""
    expected = _state(model, name)
    tensors = _without_embeddings(model, tensors, expected, folder)
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
    rename, state = _file_keys(model, name), {}
    for key, tensor in _nested_state(model, name, keep_vars=True).items():
        state[key] = tensors[rename(key)]
        tensor.data = tensor.data.to(state[key].dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_peft_model_state_dict(model, state, adapter_name=name)
    filled = _state(model, name)
    if wrong := [key for key, tensor in tensors.items() if _identity(filled[key]) != _identity(tensor)]:
        raise HfpatchError(f"{folder / TENSORS}: PEFT does not put tensor {min(wrong)!r} in its place in this model")


def _without_embeddings(
    model: nn.Module, tensors: dict[str, Tensor], expected: Collection[str], folder: Path
) -> dict[str, Tensor]:
    """Leave out the base's own embeddings, which PEFT saves beside adapters on them.

    A trained copy of a module (``modules_to_save``) is called as the module itself, so it is ``expected``.

    Raises:
        HfpatchError: if they are others than the model's, which a patch leaves as it is.
    """
    base, kept = base_parameters(model), {}
    for key, tensor in tensors.items():
        own = base.get(key.removeprefix(PEFT_PREFIX).replace(".base_layer.", "."))
        if key in expected or own is None:
            kept[key] = tensor
        elif own.shape != tensor.shape or not torch.equal(own.detach().cpu(), tensor.to(own.dtype)):
            raise HfpatchError(f"{folder / TENSORS}: {key!r} is of another base than the model")
    return kept
