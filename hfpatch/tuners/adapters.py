"""Telling adapter parameters from base parameters, and taking every adapter out again."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import cast

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites import require_matrix
from hfpatch.tuners.config import SurgeryConfig
from hfpatch.tuners.model import detach_layers

_MUST_STAY = "which a patch must leave as they are"
AdapterWrapper = (BaseTunerLayer, AuxiliaryTrainingWrapper)


def has_adapters(model: nn.Module) -> bool:
    """Return whether any adapter, of whatever method, is attached to the model."""
    return any(isinstance(module, AdapterWrapper) for module in model.modules())


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that adapters added, by their name in the model."""
    added = {id(p) for module in model.modules() for p in _own_adapter_parameters(module)}
    return {name: p for name, p in model.named_parameters() if id(p) in added}


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that the model had before any adapter, by the name that they had then; tied ones once."""
    found: dict[nn.Parameter, str] = {}
    for at, module in base_modules(model):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, f"{at}.{key}" if at else key)
    return {name: parameter for parameter, name in found.items()}


def base_modules(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that the model had before any adapter, by the name that they had then."""
    if isinstance(model, AuxiliaryTrainingWrapper):
        yield from base_modules(model.original_module, name)
    elif isinstance(model, BaseTunerLayer):
        if hasattr(model, "base_layer"):  # ours is a child of the base and wraps nothing
            yield from base_modules(cast("nn.Module", model.base_layer), name)
    else:
        yield name, model
        for child, module in model.named_children():
            yield from base_modules(module, f"{name}.{child}" if name else child)


def wrappers_of_others(model: nn.Module, adapter_name: str) -> set[str]:
    """Return the paths of the modules that wrap another one for other adapters than this one."""
    return {
        path
        for path, module in model.named_modules()
        if isinstance(module, BaseTunerLayer) and adapter_name not in module._get_available_adapters()
    }


def active_adapters(model: nn.Module) -> list[str]:
    """Return the names of the active adapters, in the order in which they were made active."""
    layers = [module for module in model.modules() if isinstance(module, AdapterWrapper)]
    return list(dict.fromkeys(name for layer in layers for name in layer.active_adapters))


def require_distinct_names(model: nn.Module, adapters: Collection[str]) -> None:
    """Refuse an adapter name that is also another part of a parameter's name, as ``lora_A`` is of LoRA's.

    Raises:
        HfpatchError: naming it.
    """
    base = set(base_parameters(model).values())
    for name, parameter in model.named_parameters():
        found = [part for part in name.split(".") if part in adapters]
        if len(found) > (parameter not in base):
            raise HfpatchError(f"adapter name {found[0]!r} is a part of PEFT's own names; choose another")


def keep_mode(model: nn.Module) -> None:
    """Put what adapters added in the training or evaluation mode of its surroundings.

    PEFT creates modules in training mode, so that a LoRA dropout would act on a model in evaluation mode.
    """
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, AdapterWrapper):
                child.train(parent.training)


def changes_base(config: PeftConfig) -> str:
    """Return how a configuration changes the base and what to do about it, or an empty string if it does not."""
    init, bias = str(getattr(config, "init_lora_weights", "")), getattr(config, "bias", "none")
    if init.lower().startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
        return f"init_lora_weights={init!r} rewrites the weights of the base, {_MUST_STAY}; use True or 'gaussian'"
    if bias not in ("none", None, False):
        return f"bias={bias!r} trains the biases of the base, {_MUST_STAY}; use bias='none'"
    if getattr(config, "layer_replication", None):
        return f"layer_replication repeats the layers of the base, {_MUST_STAY}; leave it out"
    return ""


def require_matrices(model: nn.Module, config: PeftConfig) -> None:
    """Refuse ``target_modules`` that name a projection put together from several matrices, or from none.

    Raises:
        HfpatchError: naming it, and what to name instead.
    """
    targets = getattr(config, "target_modules", None)
    if isinstance(config, SurgeryConfig) or not targets or targets == "all-linear":  # PEFT knows which are linear
        return
    for name, module in model.named_modules():
        if check_target_module_exists(config, name):
            require_matrix(module, name)


def remove_adapters(model: nn.Module) -> None:
    """Take every adapter out, of whatever method: the original modules stand where they stood.

    Raises:
        HfpatchError: if an adapter is merged into the weights, before anything is changed.
    """
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            raise HfpatchError(f"{name}: an adapter is merged into the base weights; call unmerge_adapter() first")
    detach_layers(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer) and hasattr(child, "base_layer"):
                setattr(parent, name, child.get_base_layer())
            elif isinstance(child, AuxiliaryTrainingWrapper):
                setattr(parent, name, child.original_module)


def _own_adapter_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the adapter parameters that this module itself holds, in ``ModuleDict``s or ``ParameterDict``s."""
    if isinstance(module, AuxiliaryTrainingWrapper):
        original = {id(p) for p in module.original_module.parameters()}
        yield from (p for p in module.parameters() if id(p) not in original)
    elif isinstance(module, BaseTunerLayer):
        for name in module.adapter_layer_names:
            held = getattr(module, name, None)
            if isinstance(held, nn.Module):
                yield from held.parameters()
