"""Adapters of every method, hfpatch's and PEFT's: their tensors, activation and removal."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from peft import PeftConfig
from peft.tuners.ln_tuning.layer import LNTuningLayer
from peft.tuners.osf.layer import OSFLayer
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn

from hfpatch.errors import HfpatchError
from hfpatch.sites import survey
from hfpatch.tuners.layer import MethodLayer
from hfpatch.tuners.model import detach_layers, restore_wrapped

Model = TypeVar("Model", bound=nn.Module)
AdapterWrapper = (BaseTunerLayer, AuxiliaryTrainingWrapper)
_LOW = (torch.float16, torch.bfloat16)
_NUMBER = re.compile(r"\.(\d+)\.")
# Layers that compute with one adapter, and fail or ignore the rest where several are active.
_ONE_ADAPTER = (AuxiliaryTrainingWrapper, LNTuningLayer, OSFLayer, TrainableTokensLayer)


def has_adapters(model: nn.Module) -> bool:
    """Return whether the model has an adapter of any method."""
    return any(isinstance(module, AdapterWrapper) for module in model.modules())


def stack(model: nn.Module) -> dict[str, PeftConfig]:
    """Return the configurations of a model's adapters by name, in the order of injection.

    PEFT leaves that of a failed injection on the model: only those are adapters that a layer has.
    """
    configs = getattr(model, "peft_config", None) or {}
    layers = [module for module in model.modules() if isinstance(module, AdapterWrapper)] if configs else []
    held = {name for layer in layers for name in layer._get_available_adapters()}
    return {name: config for name, config in configs.items() if name in held}


def stack_to_save(model: nn.Module) -> dict[str, PeftConfig]:
    """Return the same in an order in which injected adapters act as these do: another one, if adapters were deleted.

    At each attention the kinds act in the order of their first adapters.

    Raises:
        HfpatchError: if there is none.
    """
    configs, before, order = stack(model), defaultdict[str, set[str]](set), dict[str, PeftConfig]()
    for host in model.modules():
        layers = [child for child in host.children() if isinstance(child, MethodLayer)]
        kinds = list(filter(None, ([name for name in layer.configs if name in configs] for layer in layers)))
        for names in (*kinds, [names[0] for names in kinds]):
            for name, following in pairwise(names):
                before[following].add(name)
    while left := [name for name in configs if name not in order]:
        if (ready := next((name for name in left if before[name] <= order.keys()), None)) is None:
            raise HfpatchError(
                f"since an adapter was deleted, {' and '.join(left)} act in different orders in different layers, as "
                "no saved patch does; unpatch the model, patch it without the deleted adapter, and train it again"
            )
        order[ready] = configs[ready]
    return order


@contextmanager
def adapters_disabled(layers: Iterable[Any]) -> Iterator[None]:
    """Disable the adapter layers that are enabled, and enable them again at the end."""
    enabled = [layer for layer in layers if not layer.disable_adapters]
    for layer in enabled:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in enabled:
            layer.enable_adapters(True)


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
    names: dict[nn.Parameter, str] = {}
    for at, module in base_modules(model):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, f"{at}.{key}" if at else key)
    return {name: parameter for parameter, name in names.items()}


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


def block_finder(model: nn.Module) -> Callable[[str], int]:
    """Return a function from the name of a module or parameter to the index of its block; -1 outside the blocks."""
    try:
        blocks = {f".{path}.": index for index, path in enumerate(survey(model).with_others().blocks)}
    except HfpatchError:  # LoRA and its like also go into models whose attention is not declared
        return block_of
    return lambda name: next((index for path, index in blocks.items() if path in f".{name}."), -1)


def block_of(name: str) -> int:
    """Return the first number in the name of a module or parameter, which is its block as a rule; -1 without one."""
    match = _NUMBER.search(f".{name}.")
    return int(match[1]) if match else -1


def name_in_block(name: str) -> str:
    """Return a parameter's name below its block, the same in every block; its full name outside the blocks."""
    match = _NUMBER.search(f".{name}.")
    return name[match.end() - 1 :] if match else name


def wrappers_of_others(model: nn.Module, adapter_name: str) -> set[str]:
    """Return the paths of the modules that wrap another one for other adapters than this one."""
    return {
        path
        for path, module in model.named_modules()
        if isinstance(module, BaseTunerLayer) and adapter_name not in module._get_available_adapters()
    }


def active_adapters(model: nn.Module) -> list[str]:
    """Return the names of the active adapters, in the order in which they were made active.

    An adapter is active where a layer has it: transformers' ``load_adapter`` tells only the layers of its own kind.
    """
    layers = [module for module in model.modules() if isinstance(module, AdapterWrapper)]
    layers.sort(key=lambda layer: isinstance(layer, _ONE_ADAPTER))  # these know no order
    active = {name for layer in layers for name in {*layer.active_adapters} & layer._get_available_adapters()}
    return [name for name in dict.fromkeys(n for layer in layers for n in layer.active_adapters) if name in active]


def upcast_adapters(model: nn.Module) -> None:
    """Put the tensors of adapters in fp32, whatever the dtype of the base.

    Most adapters cast their inputs and outputs. Hooks do it for a trained copy of a module (``modules_to_save``, LN
    tuning).
    """
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper | LNTuningLayer):
            copies = module.modules_to_save if isinstance(module, ModulesToSaveWrapper) else module.ln_tuning_layers
            for trained in copies.values():
                dtype = next(trained.parameters()).dtype
                if dtype in _LOW:
                    trained.register_forward_pre_hook(_to_own_dtype)
                    trained.register_forward_hook(functools.partial(_to_dtype, dtype))
    for tensor in adapter_state(model).values():  # buffers too: DeLoRA multiplies its input by one
        if tensor.dtype in _LOW:
            tensor.data = tensor.data.float()


def activate_adapters(model: nn.Module, names: list[str]) -> None:
    """Make adapters active and trainable, in every module that has one of them.

    Raises:
        HfpatchError: if a module that computes with one adapter has several of them.
    """
    for path, module in model.named_modules():
        if isinstance(module, _ONE_ADAPTER):
            held = [name for name in names if name in module._get_available_adapters()]
            if len(held) > 1:
                raise HfpatchError(f"{path}: {' and '.join(held)} both replace this module; leave it to one of them")
            module.set_adapter(held)
        elif isinstance(module, BaseTunerLayer):
            module.set_adapter(names)


def require_unmerged(model: nn.Module) -> None:
    """Refuse a model whose weights are not the base's, as an adapter is merged into them.

    Raises:
        HfpatchError: naming the adapter.
    """
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            adapter = module.merged_adapters[0]
            raise HfpatchError(f"{name}: {adapter!r} is merged into the base's weights; call unmerge_adapter() first")


def remove_adapters(model: nn.Module) -> None:
    """Remove the adapters of all methods: the original modules are back in their places.

    Raises:
        HfpatchError: if an adapter is merged into the weights, before anything is changed.
    """
    require_unmerged(model)
    detach_layers(model)
    restore_wrapped(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer) and hasattr(child, "base_layer"):
                setattr(parent, name, child.get_base_layer())


def _to_own_dtype(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(module.parameters()).dtype
    return tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def _to_dtype(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return output.to(dtype) if isinstance(output, Tensor) else output


def _adapter_tensors(model: nn.Module) -> set[int]:
    """Return the ids of the parameters and buffers of modules that the model did not have before any adapter."""
    base, kept, added = {module for _, module in base_modules(model)}, set[int](), set[int]()
    for module in model.modules():
        tensors = (*module._parameters.values(), *module._buffers.values())
        (kept if module in base else added).update(id(t) for t in tensors if t is not None)
    return added - kept  # an adapter may share a tensor of the base


def tensor_group(name: str) -> str:
    """Return the part before the adapter's name in a parameter's name.

    ``layers.0.attention.query_key_value.lora_A.default.weight`` is in group ``lora_A``.
    """
    parts = name.removesuffix(".weight").removesuffix(".bias").split(".")
    return parts[-2] if len(parts) > 1 else parts[0]
