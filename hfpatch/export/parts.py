"""A patched model's adapters as the plain description and tensors that :mod:`hfpatch.export.runtime` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hfpatch.nn.nonlinear import bottleneck_rank
from hfpatch.sites import AttentionSite, find_sites
from hfpatch.sites.modules import unwrapped
from hfpatch.sites.site import joined
from hfpatch.surgery.patch import stack
from hfpatch.tuners.layer import SurgeryLayer, surgery_layer
from hfpatch.tuners.nonlinear_query.layer import PARTS, NonlinearQueryLayer
from hfpatch.tuners.pre_projection.layer import PreProjectionLayer
from hfpatch.tuners.query_temperature.layer import QueryTemperatureLayer

_WRAPPED = {"base_layer", "original_module", "token_adapter"}  # what PEFT calls the module inside

Description = list[dict[str, Any]]
Tensors = dict[str, Tensor]


def describe(model: nn.Module) -> tuple[Description, Tensors]:
    """Return what :class:`hfpatch.export.runtime.Hooked` reads, an item for each part, and its tensors by their name.

    LoRA that is merged into the weights is no part.
    """
    found: Description = []
    tensors: Tensors = {}
    stacked = list(stack(model))
    names = {module: base_name(name) for name, module in model.named_modules()}

    def injected(layer: SurgeryLayer) -> int:
        return min(stacked.index(name) for name in layer.configs)

    for site in find_sites(model):
        pre = surgery_layer(site, PreProjectionLayer)
        if pre is not None and pre.working_adapters():
            found.append(_pre_projections(site, pre, names, tensors))
        query, scale = surgery_layer(site, NonlinearQueryLayer), surgery_layer(site, QueryTemperatureLayer)
        made = [_queries(site, query, tensors)] if query is not None else []
        if scale is not None and scale.working_adapters():
            item = _temperatures(site, scale, tensors)
            first = query is None or injected(scale) < injected(query)  # of two hooks on one projection
            made.insert(0 if first else 1, [item])
        found += [item for items in made for item in items]
        output = unwrapped(model.get_submodule(site.output_path))
        if isinstance(output, Conv1D):  # as in GPT-2, whose attention joins the heads by the last two axes
            name = f"hfpatch_rows_{site.name.replace('.', '_')}"
            found.append(_item("hfpatch_rows", name, site, {"projection": [site.output_path]}, {"width": output.nx}))
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and not module.merged:
            found.append(_lora(name, module, tensors))
    return found, tensors


def base_name(name: str) -> str:
    """Return the name that a module or parameter had before adapters were wrapped around it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def exported_name(name: str, description: Description) -> str:
    """Return the name in the export of a tensor of the base: the modules in an ``Around`` are called ``base`` there."""
    for path in sorted({path for item in description for path in item["around"]}, key=len, reverse=True):
        if name.startswith(f"{path}."):
            name = f"{path}.base{name[len(path) :]}"
    return name


def _pre_projections(
    site: AttentionSite, layer: PreProjectionLayer, names: Mapping[nn.Module, str], tensors: Tensors
) -> dict[str, Any]:
    parts, name = [], f"hfpatch_pre_{site.name.replace('.', '_')}"
    for index, adapter in enumerate(layer.working_adapters()):
        config = layer.configs[adapter]
        kinds = ["up", "down"] if config.expansion else []
        kinds += [*(["gate"] if config.gated else []), *(["skip"] if config.content_skip else [])]
        for kind in kinds:
            weight = layer.linear(f"preproj_{kind}", adapter).weight
            tensors[joined(site.host_path, f"{name}.parts.{index}.{kind}.weight")] = weight
        inner = layer.linear("preproj_up", adapter).out_features if config.expansion else 0
        part = {"hidden": site.hidden_size, "inner": inner, "activation": config.activation}
        parts.append({**part, "gated": config.gated, "skip": config.content_skip})
    at = {"entries": list(map(names.__getitem__, site.entries)), "exit": [names[site.exit]]}
    at |= {} if site.norm is None else {"norm": [names[site.norm]]}
    return _item("hfpatch_pre", name, site, at, {"parts": parts, "factor": site.exit_factor})


def _queries(site: AttentionSite, layer: NonlinearQueryLayer, tensors: Tensors) -> Description:
    """Return an item for each projection of a site that has nonlinear parts, in the order in which they act."""
    items: dict[str, dict[str, Any]] = {}
    for adapter in layer.working_adapters():
        config = layer.configs[adapter]
        for target in config.targets:
            projection = site.projections[target]
            name = f"hfpatch_queries_{projection.path.replace('.', '_')}"
            at = {"projection": [joined(site.path, projection.path)]}
            at |= {"source": [joined(site.path, projection.source)]} if projection.source else {}
            item = items.setdefault(projection.path, _item("hfpatch_queries", name, site, at, {"parts": []}))
            parts = item["options"]["parts"]
            for kind in PARTS:
                for tensor_name, tensor in layer.held(f"nonlinear_{target}_{kind}")[adapter].named_parameters():
                    tensors[joined(site.host_path, f"{name}.parts.{len(parts)}.{kind}.{tensor_name}")] = tensor
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
    return list(items.values())


def _temperatures(site: AttentionSite, layer: QueryTemperatureLayer, tensors: Tensors) -> dict[str, Any]:
    name, adapters = f"hfpatch_temperatures_{site.name.replace('.', '_')}", layer.working_adapters()
    for index, adapter in enumerate(adapters):
        tensors[joined(site.host_path, f"{name}.taus.{index}")] = layer.tau(adapter)
    columns, heads = layer.columns, layer.heads
    options = {
        "count": len(adapters),
        "heads": [heads.count, heads.norm, heads.heads_first],
        "columns": [columns.groups, columns.width, columns.start, columns.length],
    }
    at = joined(site.path, heads.norm or site.projections["query"].path)
    return _item("hfpatch_temperatures", name, site, {"place": [at]}, options)


def _item(
    kind: str, name: str, site: AttentionSite, at: dict[str, list[str]], options: dict[str, Any]
) -> dict[str, Any]:
    around = sorted({path for paths in at.values() for path in paths} - {site.path})
    paths = {"host": site.host_path, "block": site.block_path, "at": at, "around": around}
    return {"kind": kind, "name": name, **paths, "options": options}


def _lora(name: str, layer: LoraLayer, tensors: Tensors) -> dict[str, Any]:
    at, parts = base_name(name), []
    host, _, last = at.rpartition(".")
    own = f"hfpatch_lora_{last}"
    for index, adapter in enumerate(name for name in layer.active_adapters if name in layer.lora_A):
        a, b = (cast("nn.Linear", held[adapter]) for held in (layer.lora_A, layer.lora_B))
        tensors[joined(host, f"{own}.a.{index}.weight")] = a.weight
        tensors |= {joined(host, f"{own}.b.{index}.{kind}"): tensor for kind, tensor in b.named_parameters()}
        sizes = {"inputs": a.in_features, "rank": a.out_features, "outputs": b.out_features}
        parts.append({**sizes, "scaling": float(layer.scaling[adapter]), "bias": b.bias is not None})
    paths = {"host": host, "block": host, "at": {"linear": [at]}, "around": [at]}
    return {"kind": "hfpatch_lora", "name": own, **paths, "options": {"parts": parts}}
