"""Adapters that are no parts of an export: PEFT's own merge puts them into the weights of the base."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from hfpatch.errors import HfpatchError, first_line
from hfpatch.export.parts import base_name
from hfpatch.tuners.adapters import adapter_state
from hfpatch.tuners.layer import MethodLayer


def is_plain_lora(module: Any) -> bool:
    """Return whether a module is LoRA on a linear projection, y = xW + (x A) B, which an export has as a part."""
    if not isinstance(module, LoraLayer) or isinstance(module, ParamWrapper):
        return False
    if type(module).__module__ != "peft.tuners.lora.layer" or module.lora_variant or module.lora_embedding_A:
        return False
    return all(isinstance(each, nn.Linear) for held in (module.lora_A, module.lora_B) for each in held.values())


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
        if not isinstance(module, BaseTunerLayer) or isinstance(module, MethodLayer) or is_plain_lora(module):
            continue
        if module.active_adapters and not module.disable_adapters:
            if not isinstance(module, TrainableTokensLayer):
                _untie(module.get_base_layer(), model)
            _merge(name, module)
            merged.append(base_name(name))
    return merged


def _untie(base: nn.Module, model: nn.Module) -> None:
    """Give a module parameters of its own."""
    others = {id(p) for module in model.modules() if module is not base for p in module._parameters.values()}
    for key, parameter in list(base._parameters.items()):
        if parameter is not None and id(parameter) in others:
            base._parameters[key] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


def _merge(name: str, layer: Any) -> None:
    try:
        layer.merge(safe_merge=True)
    except (AttributeError, NotImplementedError, ValueError, TypeError, RuntimeError) as error:
        reason, method = first_line(error), type(layer).__module__.split(".")[-2]
        raise HfpatchError(
            f"{base_name(name)}: a {method} adapter cannot be exported: PEFT cannot merge it ({reason})"
        ) from error


def parts_of_the_base(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the base by the names that they had before any adapter.

    An adapter's copy of a module (``modules_to_save``) replaces the original.
    """
    added = adapter_state(model)
    state = model.state_dict(keep_vars=True)
    found = {base_name(name): tensor for name, tensor in state.items() if name not in added}
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and not module.disable_adapters:
            for adapter in (each for each in module.active_adapters if each in module.modules_to_save):
                for key, tensor in module.modules_to_save[adapter].state_dict(keep_vars=True).items():
                    found[f"{base_name(name)}.{key}"] = tensor
    return found
