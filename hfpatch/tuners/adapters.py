"""What all adapters share, of whatever method: which tensors are theirs, activating them, taking them out."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
from peft import PEFT_TYPE_TO_TUNER_MAPPING, PeftConfig
from peft.tuners.ln_tuning.layer import LNTuningLayer
from peft.tuners.osf.layer import OSFLayer
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.sites import require_matrix
from hfpatch.tuners.config import SurgeryConfig
from hfpatch.tuners.model import detach_layers

_MUST_STAY = "which a patch must leave as they are"
AdapterWrapper = (BaseTunerLayer, AuxiliaryTrainingWrapper)

_LOW = (torch.float16, torch.bfloat16)

# Layers that compute with one adapter, and fail or ignore the rest where several are active.
_ONE_ADAPTER = (AuxiliaryTrainingWrapper, LNTuningLayer, OSFLayer, TrainableTokensLayer)

_NEEDS_MORE = {  # PEFT type -> what it needs beside modules in the model
    "ADALORA": "prunes its ranks and adds a penalty to the loss in the methods of its PeftModel",
    "ADAPTION_PROMPT": "replaces the attention modules and needs the methods of its PeftModel",
    "POLY": "needs task_ids in every call of the model",
    "SHADOW": "runs a second network beside the model",
    "XLORA": "mixes adapters that were trained before, by a classifier outside the model",
}


def has_adapters(model: nn.Module) -> bool:
    """Return whether any adapter, of whatever method, is attached to the model."""
    return any(isinstance(module, AdapterWrapper) for module in model.modules())


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that adapters added, by their name in the model."""
    added = _adapter_tensors(model)
    return {name: p for name, p in model.named_parameters() if id(p) in added}


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return every tensor of the model's state that adapters added, buffers included, by its name there."""
    added = _adapter_tensors(model)
    return {name: t for name, t in model.state_dict(keep_vars=True).items() if id(t) in added}


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
    layers.sort(key=lambda layer: isinstance(layer, _ONE_ADAPTER))  # these know no order
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


def upcast_adapters(model: nn.Module) -> None:
    """Put the tensors of adapters in fp32, whatever the dtype of the base.

    Most adapters cast what they get and give; a trained copy of a module (``modules_to_save``, LN tuning) does not, so
    hooks do it there.
    """
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper | LNTuningLayer):
            held = module.modules_to_save if isinstance(module, ModulesToSaveWrapper) else module.ln_tuning_layers
            for trained in held.values():
                dtype = next(trained.parameters()).dtype
                if dtype in _LOW:
                    trained.register_forward_pre_hook(_to_own_dtype)
                    trained.register_forward_hook(functools.partial(_to_dtype, dtype))
    for tensor in adapter_state(model).values():  # buffers too: DeLoRA multiplies its input by one
        if tensor.dtype in _LOW:
            tensor.data = tensor.data.float()


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


def activate_adapters(model: nn.Module, names: list[str]) -> None:
    """Make adapters active and trainable, in every module that holds one of them.

    Raises:
        HfpatchError: if a module that computes with one adapter holds several of them.
    """
    for path, module in model.named_modules():
        if isinstance(module, _ONE_ADAPTER):
            held = [name for name in names if name in module._get_available_adapters()]
            if len(held) > 1:
                raise HfpatchError(f"{path}: {' and '.join(held)} both replace this module; leave it to one of them")
            module.set_adapter(held)
        elif isinstance(module, BaseTunerLayer):
            module.set_adapter(names)


def require_injectable(config: PeftConfig, *, alone: bool = True) -> None:
    """Refuse a method that is more than modules injected into the model.

    Raises:
        HfpatchError: saying what it needs.
    """
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning:
        need = "puts virtual tokens before the input"
    elif getattr(PEFT_TYPE_TO_TUNER_MAPPING.get(cast("Any", config.peft_type)), "uses_shared_state", False):
        need = "keeps tensors that its layers share outside the model"
    else:
        need = _NEEDS_MORE.get(kind, "")
    if need:
        raise HfpatchError(f"{kind.lower()} {need}, so it cannot be injected; use peft.get_peft_model")
    if not alone and getattr(config, "trainable_token_indices", None) is not None:
        raise HfpatchError(
            "trainable_token_indices works alone, not in a stack; give the stack a TrainableTokensConfig of its own"
        )


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


def require_matches(model: nn.Module, config: PeftConfig) -> None:
    """Refuse names and layers in a new configuration that match no module, which PEFT ignores where others match.

    Raises:
        HfpatchError: naming the option and what does not match.
    """
    if config.inference_mode or isinstance(config, SurgeryConfig):  # one that was saved fits or its tensors do not
        return
    names = [name for name, _ in model.named_modules() if name]
    for option in ("target_modules", "exclude_modules", "modules_to_save"):
        given = getattr(config, option, None) or []
        for wanted in () if isinstance(given, str) else sorted(given):
            if not any(f".{name}".endswith(f".{wanted}") for name in names):
                raise HfpatchError(f"{option}: no module of this model is called {wanted!r}")
    for option in ("rank_pattern", "alpha_pattern"):
        for wanted in getattr(config, option, None) or {}:
            if not any(re.match(rf"(.*\.)?({wanted})$", name) for name in names):
                raise HfpatchError(f"{option}: no module of this model matches {wanted!r}")
    _require_layers(model, config, names)


def _require_layers(model: nn.Module, config: PeftConfig, names: list[str]) -> None:
    layers, targets = getattr(config, "layers_to_transform", None), getattr(config, "target_modules", None)
    if layers is None or not targets:
        return
    if paths := sorted({*targets} & {*names}) if not isinstance(targets, str) else [targets]:
        raise HfpatchError(
            f"layers_to_transform does not act on target_modules that say the layer themselves ({paths[0]!r}); "
            "name modules by their last part, such as q_proj, or leave layers_to_transform out"
        )
    for layer in [layers] if isinstance(layers, int) else layers:
        one = copy.copy(config)
        one.layers_to_transform = layer
        if not targeted_modules(model, one):
            raise HfpatchError(f"layers_to_transform: layer {layer} has none of the target_modules, or does not exist")


def targeted_modules(model: nn.Module, config: PeftConfig) -> list[str]:
    """Return the names of the modules that a configuration targets, with its excluded ones and its layers."""
    return [name for name, _ in model.named_modules() if check_target_module_exists(config, name)]


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


def _to_own_dtype(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(module.parameters()).dtype
    return tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def _to_dtype(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return output.to(dtype) if isinstance(output, Tensor) else output


def _adapter_tensors(model: nn.Module) -> set[int]:
    """Return the ids of the parameters and buffers of modules that the model did not have before any adapter."""
    base = {module for _, module in base_modules(model)}
    added = {id(t) for module in {*model.modules()} - base for t in _own_tensors(module)}
    return added - {id(t) for module in base for t in _own_tensors(module)}


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)


def tensor_group(name: str) -> str:
    """Return what precedes the adapter's name in a parameter's name.

    ``layers.0.attention.query_key_value.lora_A.default.weight`` is in group ``lora_A``.
    """
    parts = name.removesuffix(".weight").removesuffix(".bias").split(".")
    return parts[-2] if len(parts) > 1 else parts[0]
