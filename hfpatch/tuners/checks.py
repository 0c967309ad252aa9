"""What cannot be stacked on a model: configurations that do not fit it, adapters that train the base or do not act."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import PEFT_TYPE_TO_TUNER_MAPPING, PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import Tensor, nn

from hfpatch.errors import HfpatchError, first_line
from hfpatch.sites import AttentionSite, features, require_matrix, submodule
from hfpatch.support.modes import hooked
from hfpatch.tuners.adapters import adapter_parameters, base_parameters
from hfpatch.tuners.config import MethodConfig, method_name
from hfpatch.tuners.contracts import require_adapter_name
from hfpatch.tuners.hooks import PROJECTED
from hfpatch.tuners.layer import MethodLayer, layers_at, layers_by_site
from hfpatch.tuners.naming import require_pattern

_MUST_STAY = "which a patch must leave as they are"
_NEEDS_MORE = {  # PEFT type -> its needs beside modules in the model
    "ADALORA": "prunes its ranks and adds a penalty to the loss in the methods of its PeftModel",
    "ADAPTION_PROMPT": "replaces the attention modules and needs the methods of its PeftModel",
    "POLY": "needs task_ids in every call of the model",
    "SHADOW": "runs a second network beside the model",
    "XLORA": "mixes adapters that were trained before, by a classifier outside the model",
}


def require_fitting(model: nn.Module, configs: Sequence[PeftConfig]) -> None:
    """Refuse configurations that cannot be stacked on a model, before anything is injected.

    Raises:
        HfpatchError: naming the option and the fix.
    """
    require_untouched_base(configs)
    for config in configs:
        require_injectable(config, alone=len(configs) == 1)
        for option in ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern"):
            patterns = getattr(config, option, None) or ()
            is_name = option.endswith("modules") and not isinstance(patterns, str)  # a list of these has no patterns
            for pattern in [patterns] if isinstance(patterns, str) else () if is_name else patterns:
                require_pattern(f"{method_name(config)}: {option}", str(pattern))
        if not isinstance(config, MethodConfig):  # these check themselves against each layer
            with refusing_wrong_values(config):
                _require_matches(model, config)
                targets = getattr(config, "target_modules", None)
                for name, module in model.named_modules() if targets and targets != "all-linear" else ():
                    if check_target_module_exists(config, name):
                        require_matrix(module, name)  # PEFT knows which modules are linear


@contextmanager
def refusing_wrong_values(config: PeftConfig) -> Iterator[None]:
    """Say in one line that PEFT does not work with a value of its configuration, whose types it does not check.

    Errors of hfpatch's own methods, which check theirs, pass as they are.

    Raises:
        HfpatchError: in place of the error of Python that follows from such a value.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, TypeError) as error:
        if isinstance(config, MethodConfig):
            raise
        raise HfpatchError(
            f"{method_name(config)}: PEFT cannot use this configuration ({first_line(error, kind=True)}); "
            "check the types of its values"
        ) from error


def require_untouched_base(configs: Iterable[PeftConfig]) -> None:
    """Refuse configurations that change the base: its weights, which parameters are trained, or its layers.

    Raises:
        HfpatchError: naming the option.
    """
    for config in configs:
        init, bias = str(getattr(config, "init_lora_weights", "")), getattr(config, "bias", "none")
        if init.lower().startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
            raise HfpatchError(
                f"init_lora_weights={init!r} rewrites the weights of the base, {_MUST_STAY}; use True or 'gaussian'"
            )
        if bias not in ("none", None, False):
            raise HfpatchError(f"bias={bias!r} trains the biases of the base, {_MUST_STAY}; use bias='none'")
        if getattr(config, "layer_replication", None):
            raise HfpatchError(f"layer_replication repeats the layers of the base, {_MUST_STAY}; leave it out")


def require_injectable(config: PeftConfig, *, alone: bool = True) -> None:
    """Refuse a method that is more than modules injected into the model.

    Args:
        config: the configuration.
        alone: whether it is the only one of its stack.

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
        raise HfpatchError("trainable_token_indices works alone, not in a stack; add a TrainableTokensConfig instead")


def _require_matches(model: nn.Module, config: PeftConfig) -> None:
    """Refuse names and layers in a new configuration that match no module, which PEFT ignores where others match."""
    if config.inference_mode:  # it was saved: it fits, or its tensors do not
        return
    names = [name for name, _ in model.named_modules() if name]
    for option in ("target_modules", "exclude_modules", "modules_to_save"):
        named = getattr(config, option, None) or []
        for wanted in () if isinstance(named, str) else sorted(named):
            if not any(f".{name}".endswith(f".{wanted}") for name in names):
                raise HfpatchError(f"{option}: no module of this model is called {wanted!r}")
    for option in ("rank_pattern", "alpha_pattern"):
        for wanted in getattr(config, option, None) or {}:
            if not any(re.match(rf"(.*\.)?({wanted})$", name) for name in names):
                raise HfpatchError(f"{option}: no module of this model matches {wanted!r}")

    layers, targets = getattr(config, "layers_to_transform", None), getattr(config, "target_modules", None)
    if layers is None or not targets:
        return
    if paths := sorted({*targets} & {*names}) if not isinstance(targets, str) else [targets]:
        raise HfpatchError(
            f"layers_to_transform does not act on target_modules that say the layer themselves ({paths[0]!r}); "
            "name modules by their last part, such as q_proj, or leave layers_to_transform out"
        )
    for layer in [layers] if isinstance(layers, int) else layers:
        of_one_layer = copy.copy(config)
        of_one_layer.layers_to_transform = layer
        if not any(check_target_module_exists(of_one_layer, name) for name in names):
            raise HfpatchError(f"layers_to_transform: layer {layer} has none of the target_modules, or does not exist")


def require_sound(model: nn.Module, adapters: Sequence[str]) -> None:
    """Refuse a stack that trains the base, has adapters without values, or keeps a nonlinear query from acting.

    An adapter's name may not be another part of a parameter's name either, as ``lora_A`` is of LoRA's.

    Raises:
        HfpatchError: naming the adapter, the parameter or the projection.
    """
    base = base_parameters(model)
    of_base = set(base.values())
    for name, parameter in model.named_parameters():
        matches = [part for part in name.split(".") if part in adapters]
        if len(matches) > (parameter not in of_base):
            require_adapter_name(matches[0], (), matches)
    trained = [name for name, parameter in base.items() if parameter.requires_grad]
    if trained:
        raise HfpatchError(f"a part trains {len(trained)} parameters of the base, such as {trained[0]}, {_MUST_STAY}")
    empty = [name for name, parameter in adapter_parameters(model).items() if parameter.is_meta]
    if empty and any(hasattr(module, "_hf_hook") for module in model.modules()):  # a model on meta has no values either
        raise HfpatchError(
            f"{empty[0]}: the module that it adapts is offloaded, and PEFT gives its adapter no values there; load the "
            "model without offloading, or adapt other modules (hfpatch's own methods work offloaded)"
        )
    kinds = {isinstance(module, MethodLayer) for module in model.modules() if isinstance(module, BaseTunerLayer)}
    if len(kinds) == 2:  # another tuner may wrap a projection that a method changes
        for site, layers in layers_by_site(model):
            changing = {target: layer for layer in layers for target in PROJECTED if layer.changes(target)}
            for target, layer in changing.items():
                _require_effect(site, target, layer.device())


@torch.no_grad()
def _require_effect(site: AttentionSite, target: str, device: torch.device) -> None:
    """Refuse adapters that compute with a projection's weight instead of calling it: they would bypass its hooks.

    A wrapped projection is called on one token, with and without a hook that shifts the projection's output.
    """
    path, inner = site.projections[target].path, site.projection_module(target)
    outer = submodule(site.attention, path, of=site.family)
    if outer is inner or device.type == "meta":
        return
    dtype = next((p.dtype for p in inner.parameters() if p.is_floating_point()), torch.get_default_dtype())

    x, outputs = torch.zeros(1, 1, features(inner)[0], dtype=dtype, device=device), list[Tensor]()
    disabled = {layer: layer._disable_adapters for layer in layers_at(site)}
    for layer in disabled:  # without a forward pass of the model, its methods cannot share values
        layer._disable_adapters = True
    try:
        for shift in (0.0, 1.0):
            handle = inner.register_forward_hook(lambda module, args, output, shift=shift: output + shift)
            with hooked([handle]), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                outputs.append(outer(x))
    finally:
        for layer, before in disabled.items():
            layer._disable_adapters = before
    if (outputs[1] - outputs[0]).abs().max() < 0.01:
        method = type(outer).__module__.split(".")[-2]
        raise HfpatchError(
            f"{site.path}.{path}: {method} does not call the projection that it adapts, so a changed {target} would "
            "have no effect; leave this projection out of one of the two"
        )
