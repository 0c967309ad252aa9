"""A patched model's adapters as the plain description and tensors that :mod:`hfpatch.export.runtime` takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.nn.nonlinear import bottleneck_rank
from hfpatch.sites import AttentionSite, find_sites
from hfpatch.tuners.layer import SurgeryLayer, surgery_layer
from hfpatch.tuners.nonlinear_query.layer import PARTS, NonlinearQueryLayer
from hfpatch.tuners.pre_projection.layer import PreProjectionLayer

Description = dict[str, list[dict[str, Any]]]
Tensors = dict[str, Tensor]


def describe(model: nn.Module) -> tuple[Description, Tensors]:
    """Return the description of every adapter of a patched model, and its tensors by their name in the export.

    Raises:
        HfpatchError: if an adapter is of a kind that cannot be written as plain torch.
    """
    _require_plain_parts(model)
    found: Description = {"pre_projections": [], "queries": [], "loras": []}
    tensors: Tensors = {}
    for site in find_sites(model):
        if (pre := surgery_layer(site, PreProjectionLayer)) is not None:
            found["pre_projections"].append(_pre_projections(site, pre, tensors))
        if (query := surgery_layer(site, NonlinearQueryLayer)) is not None:
            found["queries"] += _queries(site, query, tensors)
    found["loras"] = [_lora(name, module, tensors) for name, module in _loras(model)]
    return found, tensors


def base_name(name: str) -> str:
    """Return the name that a module or parameter had before adapters were wrapped around it."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _loras(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def _require_plain_parts(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise HfpatchError(f"{name}: a copy of a base module (modules_to_save) cannot be exported; leave it out")
        if not isinstance(module, BaseTunerLayer) or isinstance(module, SurgeryLayer):
            continue
        if not isinstance(module, LoraLayer):
            raise HfpatchError(
                f"{name}: a {type(module).__name__} adapter cannot be exported; pre_projection, nonlinear_query and "
                "lora can"
            )
        if module.lora_variant or module.lora_embedding_A:
            raise HfpatchError(f"{name}: only plain LoRA on a linear projection can be exported; no DoRA, no embedding")


def _pre_projections(site: AttentionSite, layer: PreProjectionLayer, tensors: Tensors) -> dict[str, Any]:
    parts = []
    for index, adapter in enumerate(layer.working_adapters()):
        config = layer.configs[adapter]
        kinds = ["up", "down", *(["gate"] if config.gated else []), *(["skip"] if config.content_skip else [])]
        for kind in kinds:
            weight = layer.linear(f"preproj_{kind}", adapter).weight
            tensors[f"{site.path}.hfpatch_pre.parts.{index}.{kind}.weight"] = weight
        up = layer.linear("preproj_up", adapter)
        part = {"hidden": up.in_features, "inner": up.out_features, "activation": config.activation}
        parts.append({**part, "gated": config.gated, "skip": config.content_skip})
    return {"at": site.path, "exit": site.exit_path, "parts": parts}


def _queries(site: AttentionSite, layer: NonlinearQueryLayer, tensors: Tensors) -> list[dict[str, Any]]:
    """Return an item for each projection of a site that has nonlinear parts, in the order in which they act."""
    items: dict[str, list[dict[str, Any]]] = {}
    for adapter in layer.working_adapters():
        config = layer.configs[adapter]
        for target in config.targets:
            at = f"{site.path}.{site.projections[target].path}"
            parts = items.setdefault(at, [])
            for kind in PARTS:
                for name, tensor in layer.held(f"nonlinear_{target}_{kind}")[adapter].named_parameters():
                    tensors[f"{at}.hfpatch_queries.{len(parts)}.{kind}.{name}"] = tensor
            columns = layer.columns[target]
            parts.append(
                {
                    "hidden": site.hidden_size,
                    "rank": bottleneck_rank(site.hidden_size, config.rank),
                    "columns": [columns.groups, columns.width, columns.start, columns.length],
                    "activation": config.activation,
                    "norms": [config.input_norm, config.output_norm],
                    "anchor": config.anchor,
                    "form": config.form,
                }
            )
    return [{"at": at, "parts": parts} for at, parts in items.items()]


def _lora(name: str, layer: LoraLayer, tensors: Tensors) -> dict[str, Any]:
    at, parts = base_name(name), []
    for index, adapter in enumerate(name for name in layer.active_adapters if name in layer.lora_A):
        a, b = layer.lora_A[adapter], layer.lora_B[adapter]
        if not isinstance(a, nn.Linear) or not isinstance(b, nn.Linear):
            raise HfpatchError(f"{at}: only LoRA on a linear projection can be exported, not {type(a).__name__}")
        tensors[f"{at}.hfpatch_lora.a.{index}.weight"] = a.weight
        tensors |= {f"{at}.hfpatch_lora.b.{index}.{kind}": tensor for kind, tensor in b.named_parameters()}
        sizes = {"inputs": a.in_features, "rank": a.out_features, "outputs": b.out_features}
        parts.append({**sizes, "scaling": float(layer.scaling[adapter]), "bias": b.bias is not None})
    return {"at": at, "parts": parts}
