"""Writing an export, and comparing it with the patched model before the folder appears."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from hfpatch.errors import HfpatchError
from hfpatch.export.parts import Description, base_name, describe
from hfpatch.export.source import FILE, has_tower, modelling_source, patched_name
from hfpatch.models import take_apart
from hfpatch.support.files import atomic_directory, read_json, write_text
from hfpatch.surgery.bases import load_base, locate_base
from hfpatch.surgery.card import base_licence, export_card, shown_base
from hfpatch.surgery.folder import MANIFEST, load_patch
from hfpatch.tuners.adapters import adapter_parameters

_PROBE_TOKENS = 16


@dataclass(frozen=True)
class Export:
    """What was written: the folder, the class that it holds and how many parameters the patch adds."""

    directory: Path
    model_class: str
    added: int


def export_patch(
    patch: Path,
    out: Path,
    *,
    model: str | None = None,
    revision: str | None = None,
    dtype: str = "float32",
    allow_other_base: bool = False,
) -> Export:
    """Write a base with a patch as one folder that transformers alone loads, with ``trust_remote_code=True``.

    The folder holds the weights of both, the base's tokenizer, a modelling file in plain torch and a card. Its logits
    are compared with the patched model's, bit for bit, before the folder appears.

    Args:
        patch: what ``save_patch`` wrote, or a PEFT adapter.
        out: the folder to write; it must not exist or must be empty.
        model: the base; None takes the one that the patch names.
        revision: the base's hub revision.
        dtype: the dtype that the base is loaded and written in; the patch keeps its own.
        allow_other_base: take a patch whose base had other weights.

    Raises:
        HfpatchError: if the base or the patch cannot be loaded, a part cannot be exported, or ``out`` is not free.
    """
    if (patch / "results.json").is_file():
        raise HfpatchError(f"{patch}: is a run; give one of its patches, runs/METHOD/seed-N/patch")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HfpatchError(f"{out}: exists already; choose another --out")
    name = model or _named_base(patch)
    base = load_base(name, revision=revision, dtype=dtype)
    if take_apart(base.model.config) is not None:
        raise HfpatchError(
            f"{name}: was pretrained with another query path and has its own modelling file; only patches of "
            "stock models can be exported (save_patch and load_patch work on it)"
        )
    load_patch(base.model, patch, allow_other_base=allow_other_base)
    description, tensors = describe(base.model)
    with atomic_directory(out) as folder:
        copy = _write_model(base.model, description, tensors, folder)
        tokens = torch.arange(_PROBE_TOKENS)[None] % base.model.config.vocab_size
        with torch.no_grad():  # torch picks kernels by requires_grad
            expected, found = (each.requires_grad_(False)(tokens).logits for each in (base.model, copy))
        if not torch.equal(found, expected):
            raise HfpatchError("the export does not compute what the patched model computes; nothing was written")
        AutoTokenizer.from_pretrained(locate_base(name), revision=revision).save_pretrained(str(folder))
        card = export_card(shown_base(name), type(copy).__name__, base_licence(name))
        write_text(folder / "README.md", card)
    return Export(out, type(copy).__name__, sum(tensor.numel() for tensor in tensors.values()))


def _named_base(patch: Path) -> str:
    """Return the base that a patch was made for."""
    if not (patch / MANIFEST).is_file():
        raise HfpatchError(f"{patch}: names no base ({MANIFEST} is missing); give the base with --model")
    base = read_json(patch / MANIFEST).get("base")
    name = base.get("name") if isinstance(base, dict) else None
    if not isinstance(name, str) or not name:
        raise HfpatchError(f"{patch / MANIFEST}: names no base; give it with --model")
    shown = shown_base(name)
    return shown if shown.startswith("tinyworld/") else name


def _write_model(model: Any, description: Description, tensors: dict[str, Tensor], folder: Path) -> Any:
    """Write modelling file, configuration and weights; return the model that they make."""
    fp32 = any(tensor.dtype == torch.float32 for tensor in tensors.values())
    write_text(folder / FILE, modelling_source(model, keep_fp32=fp32))
    module, home = _imported(folder / FILE), FILE.removesuffix(".py")
    patched, patched_config = patched_name(type(model)), patched_name(type(model.config))
    values = {key: value for key, value in model.config.to_dict().items() if key != "model_type"}
    settings = getattr(module, patched_config)(**values, hfpatch=description)
    settings.auto_map = {"AutoConfig": f"{home}.{patched_config}", "AutoModelForCausalLM": f"{home}.{patched}"}
    if has_tower(model):
        settings.auto_map["AutoModel"] = f"{home}.{patched_name(type(model.base_model))}"
    copy: Any = getattr(module, patched)._from_config(settings, dtype=model.dtype).eval()
    added = set(adapter_parameters(model))
    state = model.state_dict(keep_vars=True)
    _fill(copy, {base_name(name): tensor for name, tensor in state.items() if name not in added} | tensors)
    copy.generation_config = model.generation_config
    copy.save_pretrained(str(folder))
    return copy


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("hfpatch_export", path)
    if spec is None or spec.loader is None:
        raise HfpatchError(f"{path}: cannot be imported")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def _fill(copy: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy every tensor into the model, each in its own dtype."""
    places = copy.state_dict(keep_vars=True)
    if places.keys() != tensors.keys():
        odd = min(places.keys() ^ tensors.keys())
        raise HfpatchError(f"tensor {odd!r} has no counterpart in the export; this architecture cannot be exported")
    for name, place in places.items():
        place.data = tensors[name].detach().clone()
