"""A patched model's adapters as the description and tensors for :mod:`hfpatch.export.runtime`.

PEFT merges all other adapters into the weights of the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hfpatch.errors import HfpatchError, first_line
from hfpatch.sites import AttentionSite, survey
from hfpatch.sites.modules import unwrapped
from hfpatch.sites.site import joined
from hfpatch.tuners.config import MethodConfig
from hfpatch.tuners.hooks import PLACES
from hfpatch.tuners.layer import MethodLayer, layers_at
from hfpatch.tuners.places import modules_at

_WRAPPED = {"base_layer", "original_module", "token_adapter"}  # PEFT's names of the module inside

Description = list[dict[str, Any]]
Tensors = dict[str, Tensor]


def describe(model: nn.Module) -> tuple[Description, Tensors]:
    """Return the items of :class:`hfpatch.export.runtime.Hooked`, one for each unmerged part, and their tensors."""
    attached: Description = []
    rows: Description = []
    tensors: Tensors = {}
    names = {module: base_name(name) for name, module in model.named_modules()}
    for site in survey(model).with_others().sites:
        output = unwrapped(model.get_submodule(site.output_path))
        if isinstance(output, Conv1D):  # as in GPT-2, whose attention joins the heads by the last two axes
            rows.append(_item("hfpatch_rows", "", site, {"projection": [site.output_path]}, {"width": output.nx}))
        for layer in layers_at(site):  # in the order in which their hooks act
            if layer.working_adapters():
                attached.append(_method(site, layer, names, tensors))
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or module.merged:
            continue
        at, parts = base_name(name), []
        host, _, last = at.rpartition(".")
        lora = f"hfpatch_lora_{last}"
        for index, adapter in enumerate(key for key in module.active_adapters if key in module.lora_A):
            a, b = (cast("nn.Linear", held[adapter]) for held in (module.lora_A, module.lora_B))
            tensors[joined(host, f"{lora}.a.{index}.weight")] = a.weight
            tensors |= {joined(host, f"{lora}.b.{index}.{kind}"): tensor for kind, tensor in b.named_parameters()}
            sizes = {"inputs": a.in_features, "rank": a.out_features, "outputs": b.out_features}
            parts.append({**sizes, "scaling": float(module.scaling[adapter]), "bias": b.bias is not None})
        paths = {"host": host, "block": host, "at": {"linear": [at]}, "around": [at]}
        attached.append({"kind": "hfpatch_lora", "name": lora, **paths, "options": {"parts": parts}})
    return attached + rows, tensors  # the last one attached is called first


def base_name(name: str) -> str:
    """Return the name that a module or parameter had before adapters were wrapped around it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def exported_name(name: str, description: Description) -> str:
    """Return the name in the export of a tensor of the base: the modules in an ``Around`` are called ``base`` there."""
    for path in sorted({path for item in description for path in item["around"]}, key=len, reverse=True):
        if name.startswith(f"{path}."):
            name = f"{path}.base{name[len(path) :]}"
    return name


def _method(
    site: AttentionSite, layer: MethodLayer, names: Mapping[nn.Module, str], tensors: Tensors
) -> dict[str, Any]:
    configs = [layer.configs[name] for name in layer.working_adapters()]
    used = {where for config in configs for where in config.acts_at()}
    modules = modules_at(site, [where for where in PLACES if where in used], layer.method)
    at = {role: [names[module] for module in in_role] for role, in_role in modules.items()}
    sites = [asdict(layer.sites[name]) for name in layer.working_adapters()]
    option_names = [f.name for f in fields(layer.method) if f.name not in {f.name for f in fields(MethodConfig)}]
    options: dict[str, Any] = {
        "method": layer.method.spec.name,
        "sites": sites,
        "adapters": [{name: config.to_dict()[name] for name in option_names} for config in configs],
    }
    factors = [layer.scales[name] for name in layer.working_adapters()]
    if set(factors) != {1.0}:
        options["factors"] = factors
    item = _item("hfpatch_method", layer.method.spec.name, site, at, options)
    if layer.method.spec.shares:
        item["around_blocks"] = site.around_path
    for index, adapter in enumerate(layer.working_adapters()):
        parts = nn.ModuleDict(layer.parts(adapter))
        for name, module in parts.named_modules():  # an export and servers put another class in its place
            if not isinstance(module, nn.Linear):
                continue
            others = {*module.state_dict(), *dict(module.named_buffers())} - {"weight", "bias"}
            if type(module).forward is not nn.Linear.forward or others:
                raise HfpatchError(
                    f"{layer.method.__name__} cannot be exported: {name} is a {type(module).__name__}, an nn.Linear "
                    "that computes or holds something else; make it an nn.Module that has an nn.Linear, a parameter or "
                    "a buffer"
                )
        for name, tensor in (parts.state_dict(keep_vars=True) | dict(parts.named_buffers())).items():
            tensors[joined(site.host_path, f"{item['name']}.parts.{index}.{name}")] = tensor
    return item


def _item(
    kind: str, method: str, site: AttentionSite, at: dict[str, list[str]], options: dict[str, Any]
) -> dict[str, Any]:
    # the method last: "NAME_" begins the names of its adapters, which may be put on the export
    name = "_".join(filter(None, [kind, site.name.replace(".", "_"), method]))
    around = sorted({path for paths in at.values() for path in paths} - {site.path, site.block_path})
    paths = {"host": site.host_path, "block": site.block_path, "at": at, "around": around}
    return {"kind": kind, "name": name, **paths, "options": options}


@torch.no_grad()
def merge_others(model: nn.Module) -> list[str]:
    """Merge the active adapters that are neither hfpatch's nor plain LoRA; return the paths of their modules.

    A weight that is tied to another one is untied before, unless the adapter changes both.

    Raises:
        HfpatchError: if PEFT cannot merge one of them.
    """
    merged = []
    modules: list[tuple[str, Any]] = list(model.named_modules())
    for name, module in modules:
        if not isinstance(module, BaseTunerLayer) or isinstance(module, MethodLayer):
            continue

        # LoRA on a linear projection, y = xW + (x A) B, is a part of the export
        if type(module).__module__ == "peft.tuners.lora.layer" and isinstance(module, LoraLayer):
            special = isinstance(module, ParamWrapper) or module.lora_variant or module.lora_embedding_A
            inside = [*module.lora_A.values(), *module.lora_B.values()]
            if not special and all(isinstance(part, nn.Linear) for part in inside):
                continue

        if module.active_adapters and not module.disable_adapters:
            if not isinstance(module, TrainableTokensLayer):
                base = module.get_base_layer()
                others = {id(p) for part in model.modules() if part is not base for p in part._parameters.values()}
                for key, parameter in list(base._parameters.items()):
                    if parameter is not None and id(parameter) in others:
                        copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                        base._parameters[key] = copy
            try:
                module.merge(safe_merge=True)
            except (AttributeError, NotImplementedError, ValueError, TypeError, RuntimeError) as error:
                reason, method = first_line(error), type(module).__module__.split(".")[-2]
                raise HfpatchError(
                    f"{base_name(name)}: a {method} adapter cannot be exported: PEFT cannot merge it ({reason})"
                ) from error
            merged.append(base_name(name))
    return merged
