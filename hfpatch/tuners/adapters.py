"""Telling adapter parameters from base parameters, and taking every adapter out again."""

from __future__ import annotations

from collections.abc import Iterator

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from hfpatch.errors import HfpatchError
from hfpatch.sites import require_matrix
from hfpatch.tuners.config import SurgeryConfig
from hfpatch.tuners.model import detach_layers

AdapterWrapper = (BaseTunerLayer, AuxiliaryTrainingWrapper)


def has_adapters(model: nn.Module) -> bool:
    """Return whether any adapter, of whatever method, is attached to the model."""
    return any(isinstance(module, AdapterWrapper) for module in model.modules())


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that adapters added, by their name in the model."""
    added = {id(p) for module in model.modules() for p in _own_adapter_parameters(module)}
    return {name: p for name, p in model.named_parameters() if id(p) in added}


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that the model had before any adapter, by the name that they had then."""
    added = adapter_parameters(model)
    return {_base_name(name): p for name, p in model.named_parameters() if name not in added}


def keep_mode(model: nn.Module) -> None:
    """Put what adapters added in the training or evaluation mode of its surroundings.

    PEFT creates modules in training mode, so that a LoRA dropout would act on a model in evaluation mode.
    """
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, AdapterWrapper):
                child.train(parent.training)


def rewrites_base(config: PeftConfig) -> bool:
    """Return whether injecting a configuration changes the base's weights, as PiSSA and its kin do."""
    init = str(getattr(config, "init_lora_weights", "")).lower()
    return init.startswith(("pissa", "olora", "corda", "loftq", "lora_ga"))


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


def _base_name(name: str) -> str:
    """Drop the wrappers from a name; adapters of several methods on one module nest."""
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "original_module"))
